//! Tests of files with a store: reads come from the store, a sync writes to it, and clean pages are evicted.

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Mapping, PageCache, Policy};
use pagemill_core::Error;
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use source::source;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A store in memory whose calls fail when the test requests it.
struct TestStore {
    bytes: Mutex<Vec<u8>>,
    reads: AtomicU64,
    /// Number of calls until one fails; 0 if no call fails.
    calls_until_failure: AtomicU64,
    /// Offset at which a read copies the bytes of the store, and then waits until the test releases it.
    stop_offset: AtomicU64,
    is_stopped: AtomicBool,
}

impl TestStore {
    fn new(len: usize) -> Arc<Self> {
        let bytes = (0..len).map(|at| (at / 1000 % 255) as u8 + 1).collect();
        Arc::new(Self {
            bytes: Mutex::new(bytes),
            reads: AtomicU64::new(0),
            calls_until_failure: AtomicU64::new(0),
            stop_offset: AtomicU64::new(u64::MAX),
            is_stopped: AtomicBool::new(false),
        })
    }

    /// Counts a call of the store. Returns an error if this is the call that must fail.
    fn count_call(&self) -> io::Result<()> {
        let left = self.calls_until_failure.load(Relaxed);
        self.calls_until_failure.store(left.saturating_sub(1), Relaxed);
        if left == 1 { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }
}

impl Store for TestStore {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.count_call()?;
        self.reads.fetch_add(1, Relaxed);
        let bytes = self.bytes.lock().unwrap();
        let from = bytes.get(offset as usize..).unwrap_or_default();
        let len = from.len().min(to.len());
        to[..len].copy_from_slice(&from[..len]);
        to[len..].fill(0);
        drop(bytes);
        if self.stop_offset.compare_exchange(offset, u64::MAX, SeqCst, SeqCst).is_ok() {
            self.is_stopped.store(true, SeqCst);
            while self.is_stopped.load(SeqCst) {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.count_call()?;
        let mut bytes = self.bytes.lock().unwrap();
        let (at, end) = (offset as usize, offset as usize + from.len());
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[at..end].copy_from_slice(from);
        Ok(())
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.count_call()?;
        self.bytes.lock().unwrap().resize(size_bytes as usize, 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.count_call()
    }
}

impl TestStore {
    /// Runs `act` while another thread reads the page at `offset` from the store.
    fn while_page_is_read(&self, file: &Mapping, offset: u64, act: impl FnOnce()) {
        self.stop_offset.store(offset, SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| file.read_at(&mut [0], offset).unwrap());
            while !self.is_stopped.load(SeqCst) {
                std::thread::yield_now();
            }
            act();
            self.is_stopped.store(false, SeqCst);
        });
    }
}

fn byte_at(file: &Mapping, offset: u64) -> u8 {
    let mut byte = [0xEE];
    assert_eq!(file.read_at(&mut byte, offset).unwrap(), 1);
    byte[0]
}

fn cache(policy: Box<dyn Policy>, limit_bytes: usize) -> PageCache {
    let settings = PageCache::builder("store")
        .source(source())
        .limit(limit_bytes as u64)
        .policy(policy)
        .page(PageSize::new(4 * KIB).unwrap());
    let caches = Testbed::for_test().caches;
    // Nothing is written back in the background, however long a test takes.
    caches.collapse_by_hand();
    settings.build_in(caches).unwrap()
}

fn read(file: &Mapping) -> Vec<u8> {
    let mut bytes = vec![0; file.size_bytes() as usize];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
    bytes
}

/// Bytes must be read from the store only once. Changes must be visible to readers at once, and must be in the store
/// after a sync.
#[test]
fn reads_fill_and_syncs_write_back() {
    let store = TestStore::new(5 * MIB + 100);
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

/// A file six times as large as the cache is read completely, which evicts clean folios. Data that was written must
/// stay in memory until it is synced.
#[test]
fn clean_folios_are_evicted_for_new_pages() {
    for (policy, pages) in [(true, "huge"), (false, "small")] {
        let policy: Box<dyn Policy> = if policy { Box::new(Always) } else { Box::new(Never) };
        let store = TestStore::new(24 * MIB);
        let expected = store.bytes.lock().unwrap().clone();
        let cache = cache(policy, 4 * MIB);
        let file = cache.open(store.clone()).unwrap();
        assert!(read(&file) == expected, "{pages}");
        assert!(cache.charged_bytes() as usize <= 4 * MIB);
        file.write_at(&[7; 100], 50).unwrap();
        assert!(read(&file)[..150] == [&expected[..50], &[7; 100]].concat(), "{pages}");
        file.sync().unwrap();
        assert_eq!(store.bytes.lock().unwrap()[50..150], [7; 100]);
        // Extends the file, syncs it, and reads it again after its pages were evicted.
        file.write_at(&[8; 100], 30 * MIB as u64).unwrap();
        file.sync().unwrap();
        let bytes = read(&file);
        assert!(bytes[24 * MIB..30 * MIB].iter().all(|byte| *byte == 0) && bytes[30 * MIB..] == [8; 100]);
        let _ = read(&file);
        assert!(read(&file) == bytes);
    }
}

/// A file that fills a quarter of the cache is read repeatedly. Meanwhile a file four times as large as the cache is
/// scanned in small reads. The first file must stay in memory, in small and in huge folios. Dirty pages of the scanned
/// file must also stay.
#[test]
fn a_scan_does_not_evict_pages_in_use() {
    for (is_huge, limit, hot_bytes, piece) in [(false, 4 * MIB, MIB, KIB), (true, 32 * MIB, 8 * MIB, 256 * KIB)] {
        let policy = || -> Box<dyn Policy> { if is_huge { Box::new(Always) } else { Box::new(Never) } };
        let cache = cache(policy(), limit);
        let (hot_store, scan_store) = (TestStore::new(hot_bytes), TestStore::new(4 * limit));
        let (hot, scanned) = (cache.open(hot_store.clone()).unwrap(), cache.open(scan_store).unwrap());
        let scan = |from: usize, to: usize| {
            let mut piece = vec![0; piece];
            for at in (from..to).step_by(piece.len()) {
                scanned.read_at(&mut piece, at as u64).unwrap();
            }
        };
        let expected = read(&hot);
        scan(0, limit / 8);
        assert!(read(&hot) == expected);
        let (before, pin) = (hot_store.reads.load(Relaxed), scanned.pin(0).unwrap());
        scanned.write_at(&[1], 5 * KIB as u64).unwrap();
        for part in 0..4 {
            scan(part * limit, (part + 1) * limit);
            assert!(read(&hot) == expected);
        }
        assert_eq!(hot_store.reads.load(Relaxed), before, "huge: {is_huge}");
        drop(pin);
        assert_eq!(byte_at(&scanned, 5 * KIB as u64), 1, "what is dirty stays");
        scanned.sync().unwrap();
        scan(0, 4 * limit);
        assert_eq!(hot_store.reads.load(Relaxed), before, "huge: {is_huge}");
    }
}

/// A page that was evicted and is read again soon must count as used, so that a scan does not evict it again.
#[test]
fn pages_that_return_soon_are_kept() {
    let cache = cache(Box::new(Never), 4 * MIB);
    let stores = [TestStore::new(4 * MIB), TestStore::new(32 * MIB)];
    let [file, scanned] = stores.clone().map(|store| cache.open(store).unwrap());
    let page = 200 * 4 * KIB as u64;
    read(&file);
    let mut piece = vec![0; 2 * MIB];
    scanned.read_at(&mut piece, 0).unwrap();
    for (reads, what) in [(1, "dropped"), (0, "back, and passed by")] {
        let before = stores[0].reads.load(Relaxed);
        byte_at(&file, page);
        assert_eq!(stores[0].reads.load(Relaxed) - before, reads, "{what}");
        for at in (2 * MIB..32 * MIB).step_by(2 * MIB) {
            scanned.read_at(&mut piece, at as u64).unwrap();
        }
    }
}

/// Calls of the store fail. Afterwards the cache must have no wrong bytes, and no written bytes may be lost.
#[test]
fn errors_of_the_store_lose_no_data() {
    let store = TestStore::new(MIB);
    let mut expected = store.bytes.lock().unwrap().clone();
    let cache = cache(Box::new(Never), 8 * MIB);
    let file = cache.open(store.clone()).unwrap();
    store.calls_until_failure.store(1, Relaxed);
    let error = file.read_at(&mut [0; 10], 0).unwrap_err();
    assert_eq!((error.errno(), error.to_string().contains("reading a file")), (libc::EIO, true));
    assert_eq!(cache.charged_bytes(), 0);
    let failing = FaultyStore::new(MemoryStore::new(expected.clone(), 512));
    let other = cache.open(Arc::new(failing.clone())).unwrap();
    byte_at(&other, 8 * KIB as u64);
    failing.set_faults(Faults { fails_after: Some(1), ..Faults::default() });
    assert_eq!(other.read_at(&mut vec![0; 64 * KIB], 0).unwrap(), 12 * KIB, "as far as it went");
    drop(other);
    assert_eq!(cache.charged_bytes(), 0);
    store.calls_until_failure.store(1, Relaxed);
    assert!(matches!(file.write_at(b"part of a page", 20 * KIB as u64), Err(Error::Store { .. })));
    assert!(read(&file) == expected);
    for calls_until_failure in 1..5 {
        file.write_at(&[calls_until_failure as u8; 3], 0).unwrap();
        file.write_at(&[calls_until_failure as u8; 3], 100 * KIB as u64).unwrap();
        expected.resize(MIB + calls_until_failure as usize, 0);
        file.truncate(expected.len() as u64).unwrap();
        store.calls_until_failure.store(calls_until_failure, Relaxed);
        assert!(matches!(file.sync(), Err(Error::Store { .. })), "{calls_until_failure}");
        file.sync().unwrap();
        expected[..3].fill(calls_until_failure as u8);
        expected[100 * KIB..100 * KIB + 3].fill(calls_until_failure as u8);
        assert!(*store.bytes.lock().unwrap() == expected);
    }
}

/// A range is collapsed while some of its pages are only in the store. The collapse must not replace these pages by
/// zeros.
#[test]
fn a_collapse_keeps_bytes_of_the_store() {
    let store = TestStore::new(2 * MIB);
    let expected = store.bytes.lock().unwrap().clone();
    let file = cache(Box::new(Never), 64 * MIB).open(store.clone()).unwrap();
    file.write_at(&[9], 0).unwrap();
    assert!(!file.collapse(0).unwrap(), "a part is in the store only");
    assert_eq!(byte_at(&file, 8192), expected[8192]);
    let _ = read(&file);
    assert!(file.collapse(0).unwrap());
    file.sync().unwrap();
    assert!(store.bytes.lock().unwrap()[1..] == expected[1..]);
}

/// A page is read from the store while the file is truncated. Bytes from before the truncation must not appear in
/// memory.
#[test]
fn reads_from_before_a_truncation_are_discarded() {
    let store = TestStore::new(8 * KIB);
    let file = cache(Box::new(Never), 64 * MIB).open(store.clone()).unwrap();
    store.while_page_is_read(&file, 4 * KIB as u64, || file.truncate(0).unwrap());
    file.truncate(8 * KIB as u64).unwrap();
    assert_eq!(byte_at(&file, 5000), 0);
}

/// A thread reads or writes a page while another thread reads that page from the store. The first thread must wait for
/// that read. The store must be read only once, even if other pages of the file are evicted at the same time.
#[test]
fn a_page_is_read_once() {
    let store = TestStore::new(64 * KIB);
    let file = cache(Box::new(Never), 8 * KIB).open(store.clone()).unwrap();
    let begun = std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        store.while_page_is_read(&file, 0, || {
            let (file, begun) = (&file, &begun);
            scope.spawn(|| assert_eq!((begun.wait(), byte_at(file, 1)).1, 1));
            scope.spawn(|| assert_eq!((begun.wait(), file.write_at(&[99], 0).unwrap()).1, 1));
            begun.wait();
            for page in 1..16 {
                byte_at(file, page * 4 * KIB as u64);
            }
            assert_eq!(store.reads.load(Relaxed), 16);
        });
    });
    assert_eq!((byte_at(&file, 0), store.reads.load(Relaxed)), (99, 16));
    file.sync().unwrap();
    assert_eq!(store.bytes.lock().unwrap()[..2], [99, 1]);
}

/// Adjacent dirty folios must be written by one transfer, other folios separately, and of the last block only the part
/// inside the file. No data may be lost if the store fails, shortens and reorders transfers.
#[test]
fn folios_are_written_back_together() {
    let store = FaultyStore::new(MemoryStore::new(vec![0; 4 * MIB], 512));
    let file = cache(Box::new(Never), 64 * MIB).open(Arc::new(store.clone())).unwrap();
    let mut expected = vec![0; 4 * MIB + 100];
    let write = |expected: &mut [u8], page: usize, count: usize, byte: u8| {
        let range = page * 4 * KIB..((page + count) * 4 * KIB).min(expected.len());
        expected[range.clone()].fill(byte);
        assert_eq!(file.write_at(&expected[range.clone()], range.start as u64).unwrap(), range.len());
    };
    for (page, count) in [(3, 1), (10, 300), (500, 1), (502, 1), (1020, 5)] {
        write(&mut expected, page, count, 1);
    }
    file.sync().unwrap();
    // The length of a single write is bounded, so 300 pages need somewhat more than one write.
    assert!((5..=12).contains(&store.calls().writes), "{:?}", store.calls());
    for seed in 0..200 {
        let faults =
            Faults { seed, fail_per_mille: 300, short_per_mille: 300, is_reordered: true, ..Faults::default() };
        store.set_faults(faults);
        (0..5).for_each(|at| write(&mut expected, (seed as usize * 37 + at * 41) % 1020, 1 + at, seed as u8));
        while file.sync().is_err() {}
        store.set_faults(Faults::default());
        let mut found = vec![0; expected.len()];
        store.read(0, &mut found).unwrap();
        assert!(found == expected && store.size_bytes().unwrap() == expected.len() as u64, "seed {seed}");
    }
}

/// Syncs run concurrently with appends and splits. After the last sync, the store must have all data that was appended
/// or that was written before a split.
#[test]
fn syncs_during_appends_and_splits_lose_no_data() {
    for _ in 0..20 {
        let store = TestStore::new(0);
        let file = cache(Box::new(Never), 64 * MIB).open(store.clone()).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    file.sync().unwrap();
                }
            });
            for part in 0..2000 {
                assert_eq!(file.write_at(&[7; 64], part * 64).unwrap(), 64);
            }
            is_over.store(true, Relaxed);
        });
        file.sync().unwrap();
        assert!(*store.bytes.lock().unwrap() == vec![7; 2000 * 64]);

        let store = TestStore::new(2 * MIB);
        let file = cache(Box::new(Always), 64 * MIB).open(store.clone()).unwrap();
        file.write_at(&vec![0xBB; 2 * MIB], 0).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| file.split(0));
            file.sync().unwrap();
        });
        assert!(*store.bytes.lock().unwrap() == vec![0xBB; 2 * MIB]);
    }
}

/// A store breaks its contract by an impossible size, blocks larger than a page, a panic, or short reads. Other files
/// must not be harmed.
#[test]
fn a_store_that_breaks_its_contract_harms_no_other_file() {
    struct ContractBreaker {
        size: u64,
        block: usize,
    }
    impl Store for ContractBreaker {
        fn size_bytes(&self) -> io::Result<u64> {
            Ok(self.size)
        }
        fn block_bytes(&self) -> usize {
            self.block
        }
        fn read(&self, offset: u64, _to: &mut [u8]) -> io::Result<()> {
            assert!(offset > 0, "a store that panics");
            Ok(())
        }
        fn write(&self, _offset: u64, _from: &[u8]) -> io::Result<()> {
            panic!("a store that panics")
        }
        fn set_size(&self, _size_bytes: u64) -> io::Result<()> {
            Ok(())
        }
        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
    }
    let cache = cache(Box::new(Never), 8 * MIB);
    let open = |size, block| cache.open(Arc::new(ContractBreaker { size, block }));
    assert!(matches!(open(1 << 60, 512), Err(Error::FileTooLarge { .. })));
    assert!(matches!(open(1, 8 * KIB), Err(Error::Unsupported { .. })));
    let other = cache.create().unwrap();
    other.write_at(&vec![0x5E; 64 * KIB], 0).unwrap();
    drop(other);
    let file = open(64 * KIB as u64, 512).unwrap();
    assert_eq!(byte_at(&file, 8 * KIB as u64), 0, "not what another file had");
    let panics = |act: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).is_err();
    assert!(panics(&|| drop(file.read_at(&mut [0], 0))));
    assert_eq!(file.write_at(&[1], 8 * KIB as u64).unwrap(), 1);
    assert!(panics(&|| drop(file.sync())));
    assert_eq!(file.write_at(&[2], 8 * KIB as u64).unwrap(), 1, "not held for good");
    drop(file);
    assert_eq!(cache.charged_bytes(), 0);
}

/// Data that was written through a pin must be written back.
#[test]
fn data_written_through_pins_is_written_back() {
    let store = TestStore::new(8 * KIB);
    let file = cache(Box::new(Never), 8 * MIB).open(store.clone()).unwrap();
    let pin = file.pin(0).unwrap();
    pin.write_at(&[99], 0).unwrap();
    drop(pin);
    file.sync().unwrap();
    assert_eq!(store.bytes.lock().unwrap()[0], 99);
    let pin = file.pin(0).unwrap();
    pin.set_dirty();
    drop(pin);
    store.bytes.lock().unwrap()[0] = 1;
    file.sync().unwrap();
    assert_eq!(store.bytes.lock().unwrap()[0], 99);
}

/// Many threads read in a full cache. Each thread evicts pages to get room for its read. No read may fail because
/// another thread has used that room.
#[test]
fn threads_that_make_room_are_not_refused() {
    let store = TestStore::new(2 * MIB);
    let cache = cache(Box::new(Never), 512 * KIB);
    let file = cache.open(store.clone()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (file, store) = (&file, &store);
            scope.spawn(move || {
                for step in 0..3000_usize {
                    let at = (step * 7919 + thread * 104_729) % 512 * 4 * KIB;
                    assert_eq!(byte_at(file, at as u64), store.bytes.lock().unwrap()[at]);
                }
            });
        }
    });
}
