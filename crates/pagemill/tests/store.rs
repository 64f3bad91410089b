//! Files with a store behind them: what is read comes from there, what is written goes there at sync, clean pages make room.

use pagemill::mapping::policy::{Always, Never};
use pagemill::mapping::{Cache, Policy, Settings};
use pagemill::store::Store;
use pagemill::units::PageSize;
use pagemill::{Error, Pagemill};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Bytes in memory, which fail on demand.
struct Memory {
    bytes: Mutex<Vec<u8>>,
    reads: AtomicU64,
    /// Calls until one fails; none do at 0.
    fails_in: AtomicU64,
}

impl Memory {
    fn new(len: usize) -> Arc<Self> {
        let bytes = (0..len).map(|at| (at / 1000 % 255) as u8 + 1).collect();
        Arc::new(Self { bytes: Mutex::new(bytes), reads: AtomicU64::new(0), fails_in: AtomicU64::new(0) })
    }

    fn may_fail(&self) -> io::Result<()> {
        let left = self.fails_in.load(Relaxed);
        self.fails_in.store(left.saturating_sub(1), Relaxed);
        if left == 1 { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }
}

impl Store for Memory {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.may_fail()?;
        self.reads.fetch_add(1, Relaxed);
        let bytes = self.bytes.lock().unwrap();
        let from = bytes.get(offset as usize..).unwrap_or_default();
        let len = from.len().min(to.len());
        to[..len].copy_from_slice(&from[..len]);
        to[len..].fill(0);
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.may_fail()?;
        let mut bytes = self.bytes.lock().unwrap();
        let (at, end) = (offset as usize, offset as usize + from.len());
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[at..end].copy_from_slice(from);
        Ok(())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.may_fail()?;
        self.bytes.lock().unwrap().resize(size_bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.may_fail()
    }
}

fn cache(policy: Box<dyn Policy>, limit_bytes: usize) -> Cache {
    let settings =
        Settings { policy, page: PageSize::new(4 * KIB).unwrap(), ..Settings::new("store", limit_bytes as u64) };
    Pagemill::for_test().caches.make(settings).unwrap()
}

fn read(file: &pagemill::mapping::Mapping) -> Vec<u8> {
    let mut bytes = vec![0; file.size_bytes() as usize];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

/// Bytes come from the store once; what is written over them is there, and in the store after a sync.
#[test]
fn reads_fill_and_syncs_write_back() {
    let store = Memory::new(5 * MIB + 100);
    let mut expected = store.bytes.lock().unwrap().clone();
    let cache = cache(Box::new(Always), 64 * MIB);
    let file = cache.open(store.clone()).unwrap();
    assert!(read(&file) == expected && read(&file) == expected);
    assert_eq!(store.reads.load(Relaxed), 3, "one for each huge folio");
    for (at, len) in [(10, 100), (2 * MIB - 5, 10), (5 * MIB + 90, 5000)] {
        file.write_at(&vec![0xAA; len], at as u64).unwrap();
        expected.resize(expected.len().max(at + len), 0);
        expected[at..at + len].fill(0xAA);
    }
    assert!(read(&file) == expected);
    assert!(*store.bytes.lock().unwrap() != expected);
    file.sync().unwrap();
    assert!(*store.bytes.lock().unwrap() == expected);
    file.truncate(MIB as u64).unwrap();
    file.truncate(3 * MIB as u64).unwrap();
    expected.truncate(MIB);
    expected.resize(3 * MIB, 0);
    assert!(read(&file) == expected, "what was cut off does not come back from the store");
    file.sync().unwrap();
    assert!(*store.bytes.lock().unwrap() == expected);
    assert!(matches!(file.punch_hole(0, 10), Err(Error::Unsupported { .. })));
    file.zero_range(100, 3 * KIB as u64).unwrap();
    expected[100..100 + 3 * KIB].fill(0);
    assert!(read(&file) == expected);
}

/// A file six times as large as the cache is read whole: clean folios make room. What was written stays until it is synced.
#[test]
fn clean_folios_make_room() {
    for (policy, pages) in [(true, "huge"), (false, "small")] {
        let policy: Box<dyn Policy> = if policy { Box::new(Always) } else { Box::new(Never) };
        let store = Memory::new(24 * MIB);
        let expected = store.bytes.lock().unwrap().clone();
        let cache = cache(policy, 4 * MIB);
        let file = cache.open(store.clone()).unwrap();
        assert!(read(&file) == expected, "{pages}");
        assert!(cache.charged_bytes() as usize <= 4 * MIB);
        file.write_at(&[7; 100], 50).unwrap();
        assert!(read(&file)[..150] == [&expected[..50], &[7; 100]].concat(), "{pages}");
        file.sync().unwrap();
        assert_eq!(store.bytes.lock().unwrap()[50..150], [7; 100]);
        // Longer, clean, dropped, and read again.
        file.write_at(&[8; 100], 30 * MIB as u64).unwrap();
        file.sync().unwrap();
        let bytes = read(&file);
        assert!(bytes[24 * MIB..30 * MIB].iter().all(|byte| *byte == 0) && bytes[30 * MIB..] == [8; 100]);
        let _ = read(&file);
        assert!(read(&file) == bytes);
    }
}

/// A store that fails keeps nothing wrong in memory, and loses nothing that was written.
#[test]
fn failures_of_the_store_lose_nothing() {
    let store = Memory::new(MIB);
    let mut expected = store.bytes.lock().unwrap().clone();
    let cache = cache(Box::new(Never), 8 * MIB);
    let file = cache.open(store.clone()).unwrap();
    store.fails_in.store(1, Relaxed);
    let error = file.read_at(&mut [0; 10], 0).unwrap_err();
    assert_eq!((error.errno(), error.to_string().contains("reading a file")), (5, true));
    assert_eq!(cache.charged_bytes(), 0);
    store.fails_in.store(3, Relaxed);
    assert_eq!(file.read_at(&mut vec![0; 64 * KIB], 0).unwrap(), 8 * KIB, "as far as it went");
    store.fails_in.store(1, Relaxed);
    assert!(matches!(file.write_at(b"part of a page", 20 * KIB as u64), Err(Error::Store { .. })));
    assert!(read(&file) == expected);
    for fails_in in 1..5 {
        file.write_at(&[fails_in as u8; 3], 0).unwrap();
        file.write_at(&[fails_in as u8; 3], 100 * KIB as u64).unwrap();
        store.fails_in.store(fails_in, Relaxed);
        assert!(matches!(file.sync(), Err(Error::Store { .. })), "{fails_in}");
        file.sync().unwrap();
        expected[..3].fill(fails_in as u8);
        expected[100 * KIB..100 * KIB + 3].fill(fails_in as u8);
        assert!(*store.bytes.lock().unwrap() == expected);
    }
}
