//! Tests of sequential writes of large files: which calls the store gets.

use pagemill_cache::PageCache;
use pagemill_store::{MemoryStore, Store};
use std::io;
use std::sync::{Arc, Mutex};

const MIB: usize = 1 << 20;

/// A call of a store that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Read,
    /// A write that ends at this offset.
    WriteUpTo(u64),
    SetSize(u64),
}

/// A store in memory that records its calls.
struct RecordingStore {
    inner: MemoryStore,
    calls: Mutex<Vec<Call>>,
    /// Whether `set_size` fails.
    refuses_sizes: bool,
}

impl RecordingStore {
    fn new(bytes: Vec<u8>, refuses_sizes: bool) -> Arc<Self> {
        Arc::new(Self { inner: MemoryStore::new(bytes, 4096), calls: Mutex::default(), refuses_sizes })
    }

    fn record(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

impl Store for RecordingStore {
    fn size_bytes(&self) -> io::Result<u64> {
        self.inner.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.record(Call::Read);
        self.inner.read(offset, to)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.record(Call::WriteUpTo(offset + from.len() as u64));
        self.inner.write(offset, from)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.record(Call::SetSize(size_bytes));
        if self.refuses_sizes { Err(io::ErrorKind::Unsupported.into()) } else { self.inner.set_size(size_bytes) }
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
}

/// A file is overwritten in order, by calls that end inside of huge folios. Every byte of the file is replaced, so the
/// store must not be read.
#[test]
fn sequential_overwrites_read_nothing() {
    let store = RecordingStore::new(vec![1; 16 * MIB], false);
    let cache = PageCache::builder("overwrite").limit(64 << 20).build().unwrap();
    let file = cache.open(store.clone()).unwrap();
    for offset in (0..16 * MIB).step_by(64 << 10) {
        assert_eq!(file.write_at(&[7; 64 << 10], offset as u64).unwrap(), 64 << 10);
    }
    file.sync().unwrap();
    assert!(!store.calls().contains(&Call::Read), "{:?}", store.calls());
    assert!(store.inner.bytes().iter().all(|byte| *byte == 7));
}

/// A new file is written and synced. The store must get its new length before the first write, because file systems do
/// one write at a time behind the end of a file.
#[test]
fn a_store_is_extended_before_large_writes() {
    let store = RecordingStore::new(Vec::new(), false);
    // 8 MiB are less than a tenth of the limit, so the background does not write a part of them before the sync.
    let cache = PageCache::builder("append").limit(512 << 20).build().unwrap();
    let file = cache.open(store.clone()).unwrap();
    file.write_at(&vec![7; 8 * MIB], 0).unwrap();
    file.sync().unwrap();
    let calls = store.calls();
    let extended = calls.iter().position(|call| *call == Call::SetSize(8 * MIB as u64)).unwrap();
    let written = calls.iter().position(|call| matches!(call, Call::WriteUpTo(_))).unwrap();
    assert!(extended < written, "{calls:?}");
    assert!(store.inner.bytes().iter().all(|byte| *byte == 7) && store.inner.bytes().len() == 8 * MIB);
}

/// A file of which only the length was set is written in order, while its writeback runs. The store has no bytes of the
/// file behind the written ones, so huge folios must not read it.
#[test]
fn a_file_with_a_length_is_written_without_reads() {
    let store = RecordingStore::new(Vec::new(), false);
    let cache = PageCache::builder("length").limit(64 << 20).build().unwrap();
    let file = cache.open(store.clone()).unwrap();
    file.truncate(16 << 20).unwrap();
    for offset in (0..16 * MIB).step_by(128 << 10) {
        assert_eq!(file.write_at(&[7; 128 << 10], offset as u64).unwrap(), 128 << 10);
        if offset == 4 * MIB {
            file.write_back(0, u64::MAX).unwrap();
        }
    }
    file.sync().unwrap();
    let calls = store.calls();
    assert!(calls.contains(&Call::SetSize(16 << 20)) && !calls.contains(&Call::Read), "{calls:?}");
    assert!(cache.usage().huge > 0, "sequential writes get huge folios");
    assert!(store.inner.bytes().iter().all(|byte| *byte == 7) && store.inner.bytes().len() == 16 * MIB);
}

/// Another process has made the store longer than the file. A writeback must not cut these bytes off.
#[test]
fn a_store_that_others_extended_is_not_cut() {
    let store = RecordingStore::new(Vec::new(), false);
    let cache = PageCache::builder("longer").limit(64 << 20).build().unwrap();
    let file = cache.open(store.clone()).unwrap();
    file.write_at(&vec![7; 8 * MIB], 0).unwrap();
    store.inner.write(20 * MIB as u64, &[9; 4096]).unwrap();
    file.write_back(0, u64::MAX).unwrap();
    assert_eq!(store.inner.bytes().len(), 20 * MIB + 4096);
    assert_eq!(store.inner.bytes()[20 * MIB..], [9; 4096]);
}

/// A store that cannot be extended by itself must still get all writes. The sync must report no error then, because the
/// writes extended the store.
#[test]
fn writes_extend_a_store_that_refuses_sizes() {
    let store = RecordingStore::new(Vec::new(), true);
    let cache = PageCache::builder("refused").limit(64 << 20).build().unwrap();
    let file = cache.open(store.clone()).unwrap();
    file.write_at(&vec![7; 8 * MIB], 0).unwrap();
    file.sync().unwrap();
    assert!(store.inner.bytes().iter().all(|byte| *byte == 7) && store.inner.bytes().len() == 8 * MIB);
}
