//! Tests of readahead: which streams are read ahead, the effect of hints, and how little memory readahead takes from
//! other files.

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Advice, Mapping, PageCache, Policy, Reuse, Writeback};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, FileStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use source::source;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

/// Lets one test at a time run, because the counters belong to the process.
fn exclusive_test() -> MutexGuard<'static, ()> {
    static RUNNING_TEST: Mutex<()> = Mutex::new(());
    RUNNING_TEST.lock().unwrap_or_else(PoisonError::into_inner)
}

fn byte_at(at: usize) -> u8 {
    (at / 999 % 251) as u8 + 1
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(byte_at).collect()
}

fn cache_with_policy(policy: Box<dyn Policy>, limit_bytes: usize) -> PageCache {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    let settings = PageCache::builder("ahead").source(source()).limit(limit_bytes as u64).policy(policy).page(page);
    settings.build_in(Testbed::for_test().caches).unwrap()
}

fn cache(limit_bytes: usize) -> PageCache {
    cache_with_policy(Box::new(Never), limit_bytes)
}

type DelayedStore = FaultyStore<MemoryStore>;

fn delayed_store(len: usize) -> DelayedStore {
    FaultyStore::new(MemoryStore::new(bytes(len), 512))
}

fn open(cache: &PageCache, store: &DelayedStore) -> Mapping {
    cache.open(Arc::new(store.clone())).unwrap()
}

/// Reads a range of the file, and checks its first, middle and last byte.
fn read(file: &Mapping, offset: usize, len: usize) {
    let mut found = vec![0; len];
    assert_eq!(file.read_at(&mut found, offset as u64).unwrap(), len);
    for at in [0, len / 2, len - 1] {
        assert_eq!(found[at], byte_at(offset + at), "at {}", offset + at);
    }
}

/// The values of the readahead counters at one time, to compute later how much they have increased.
struct CountersBefore([u64; 4]);

const COUNTERS: [Counter; 4] =
    [Counter::ReadAhead, Counter::ReadAheadUsed, Counter::ReadAheadUnused, Counter::ReadAheadTransfers];

impl CountersBefore {
    fn now() -> Self {
        Self(COUNTERS.map(stats::get))
    }

    fn increases(&self) -> [u64; 4] {
        let mut now = Self::now().0;
        now.iter_mut().zip(self.0).for_each(|(now, before)| *now -= before);
        now
    }
}

/// All folios of the cache are dirty, and their store hangs. Readahead of a file on another store must not wait for the
/// hanging store, and must read nothing ahead.
#[test]
fn readahead_waits_for_no_other_store() {
    let _exclusive = exclusive_test();
    for policy in [Box::new(Always) as Box<dyn Policy>, Box::new(Never)] {
        let writeback = Writeback::default().background_percent(100).most_percent(100);
        let page = PageSize::new(PAGE_BYTES).unwrap();
        let caches = Testbed::for_test().caches;
        caches.collapse_by_hand();
        let settings = PageCache::builder("ahead")
            .source(source())
            .limit(64 * MIB as u64)
            .policy(policy)
            .page(page)
            .writeback(writeback);
        let cache = settings.build_in(caches).unwrap();
        let (file, other) = (delayed_store(4 * MIB), delayed_store(0));
        let (file, dirty) = (open(&cache, &file), open(&cache, &other));
        dirty.write_at(&bytes(64 * MIB), 0).unwrap();
        assert_eq!(cache.dirty_bytes(), 64 * MIB as u64);
        other.hold();
        assert_eq!(file.will_need(0, 4 * MIB as u64).unwrap(), 0);
        assert_eq!(other.calls().writes, 0, "it asked the store that hangs");
        other.release();
    }
}

/// A file is read sequentially, forward and backward, in small and large reads. Nearly all bytes must be read ahead in
/// few transfers. Nearly all bytes that were read ahead must be used.
#[test]
fn sequential_reads_are_read_ahead() {
    let _exclusive = exclusive_test();
    const FILE_BYTES: usize = 32 * MIB;
    for (step, is_backward) in [(PAGE_BYTES, false), (10_000, false), (256 << 10, false), (PAGE_BYTES, true)] {
        let (cache, store) = (cache(128 * MIB), delayed_store(FILE_BYTES));
        let file = open(&cache, &store);
        let since = CountersBefore::now();
        let offsets: Vec<_> = (0..FILE_BYTES / step).map(|nth| nth * step).collect();
        if is_backward {
            offsets.iter().rev().for_each(|at| read(&file, *at, step));
        } else {
            offsets.iter().for_each(|at| read(&file, *at, step));
        }
        let [ahead, used, unused, transfers] = since.increases();
        let least = (FILE_BYTES - 4 * step.max(PAGE_BYTES)) as u64 * 15 / 16;
        assert!(ahead >= least && used >= least && unused == 0, "{step}: {ahead} came, {used} were used");
        assert!(transfers <= 2 * 32, "{transfers} transfers for 32 MiB");
        assert!(store.calls().reads <= 2 * 32 + 4, "{:?}", store.calls());
        assert!(ahead <= FILE_BYTES as u64);
    }
}

/// Records are read at regular distances, forward and backward. The records must be read ahead, but not the bytes
/// between them.
#[test]
fn strided_reads_are_read_ahead() {
    let _exclusive = exclusive_test();
    for is_backward in [false, true] {
        let (cache, store) = (cache(64 * MIB), delayed_store(16 * MIB));
        let file = open(&cache, &store);
        let since = CountersBefore::now();
        for nth in 0..300 {
            let nth = if is_backward { 299 - nth } else { nth };
            read(&file, 1000 + nth * 50_000, 3000);
        }
        let [ahead, used, ..] = since.increases();
        let pages = |bytes: u64| bytes / PAGE_BYTES as u64;
        assert!(pages(used) >= 290 && pages(ahead) <= 2 * 300, "{} of {} pages", pages(used), pages(ahead));
        assert!(cache.charged_bytes() <= 2 * 310 * PAGE_BYTES as u64);
    }
}

/// Random reads in a large file must start no readahead. With `Advice::Random`, sequential reads must start none
/// either.
#[test]
fn random_reads_start_no_readahead() {
    let _exclusive = exclusive_test();
    const FILE_BYTES: usize = 256 * MIB;
    let store = FaultyStore::new(ZeroStore(FILE_BYTES as u64));
    let cache = cache(16 * MIB);
    let file = cache.open(Arc::new(store.clone())).unwrap();
    let since = CountersBefore::now();
    let mut seed = 1_u64;
    for _ in 0..10_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        file.read_at(&mut [0; PAGE_BYTES], (seed >> 20) / PAGE_BYTES as u64 * PAGE_BYTES as u64 % FILE_BYTES as u64)
            .unwrap();
    }
    assert_eq!(since.increases(), [0; 4]);
    // With `Advice::Random`, sequential reads start no readahead either.
    file.advise(Advice::Random);
    (0..1000)
        .for_each(|page| assert_eq!(file.read_at(&mut [0; PAGE_BYTES], page * PAGE_BYTES as u64).unwrap(), PAGE_BYTES));
    assert_eq!(since.increases(), [0; 4]);
    file.advise(Advice::Sequential);
    file.read_at(&mut [0; PAGE_BYTES], (FILE_BYTES / 2) as u64).unwrap();
    assert!(
        since.increases()[0] > (400 << 10),
        "believed at once, and what is there already is passed over: {:?}",
        since.increases()
    );
}

/// A store of zeros that uses no memory.
struct ZeroStore(u64);

impl Store for ZeroStore {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.0)
    }
    fn block_bytes(&self) -> usize {
        512
    }
    fn read(&self, _offset: u64, to: &mut [u8]) -> io::Result<()> {
        to.fill(0);
        Ok(())
    }
    fn write(&self, _offset: u64, _from: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, _size_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that is larger than the cache is read twice. Pages that were read ahead must be used before they are evicted,
/// and the cache must not exceed its limit.
#[test]
fn readahead_continues_when_the_cache_is_full() {
    let _exclusive = exclusive_test();
    const FILE_BYTES: usize = 64 * MIB;
    let (cache, store) = (cache(8 * MIB), delayed_store(FILE_BYTES));
    let file = open(&cache, &store);
    let since = CountersBefore::now();
    for _ in 0..2 {
        (0..FILE_BYTES / PAGE_BYTES).for_each(|page| read(&file, page * PAGE_BYTES, PAGE_BYTES));
        assert!(cache.charged_bytes() <= 8 * MIB as u64);
    }
    let [ahead, used, unused, transfers] = since.increases();
    assert!(used >= 2 * FILE_BYTES as u64 * 9 / 10 && unused <= ahead / 20, "{ahead} came, {used} used, {unused} not");
    assert!(transfers <= 2 * 64 * 16, "{transfers} transfers for 128 MiB by 128 KiB at most");
}

/// A file of huge folios is read. Each folio must be read ahead as a whole.
#[test]
fn huge_folios_are_read_ahead() {
    let _exclusive = exclusive_test();
    const FILE_BYTES: usize = 64 * MIB;
    let (cache, store) = (cache_with_policy(Box::new(Always), 128 * MIB), delayed_store(FILE_BYTES));
    let file = open(&cache, &store);
    let since = CountersBefore::now();
    (0..FILE_BYTES / PAGE_BYTES).for_each(|page| read(&file, page * PAGE_BYTES, PAGE_BYTES));
    let [ahead, used, _, transfers] = since.increases();
    let folios = (FILE_BYTES / cache.huge_bytes()) as u64;
    assert_eq!((store.calls().reads, transfers), (folios, folios - 3));
    assert!(ahead == used && used == (FILE_BYTES - 3 * cache.huge_bytes()) as u64, "{ahead} {used}");
}

/// Three threads read a regular file in different orders. All bytes must be right, and pages must be read ahead.
#[test]
fn system_files_are_read_ahead() {
    let _exclusive = exclusive_test();
    const FILE_BYTES: usize = 16 * MIB + 777;
    let path = std::env::temp_dir().join(format!("pagemill-ahead-{}", std::process::id()));
    std::fs::write(&path, bytes(FILE_BYTES)).unwrap();
    for (policy, limit) in [(Box::new(Never) as Box<dyn Policy>, 8 * MIB), (Box::new(Always), 48 * MIB)] {
        let cache = cache_with_policy(policy, limit);
        let file = cache.open(Arc::new(FileStore::open(&path).unwrap())).unwrap();
        let since = CountersBefore::now();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..FILE_BYTES / 5000).for_each(|nth| read(&file, nth * 5000, 5000)));
            scope
                .spawn(|| (0..FILE_BYTES / PAGE_BYTES).rev().for_each(|nth| read(&file, nth * PAGE_BYTES, PAGE_BYTES)));
            scope.spawn(|| (0..100).for_each(|nth| read(&file, nth * 150_000, 100)));
        });
        assert!(since.increases()[1] > MIB as u64, "{:?}", since.increases());
        assert!(cache.charged_bytes() <= limit as u64);
        read(&file, FILE_BYTES - 900, 900);
        file.will_need(0, FILE_BYTES as u64).unwrap();
        drop(file);
        FileStore::open(&path).expect("what was on its way is given up");
        assert_eq!(cache.charged_bytes(), 0);
    }
    std::fs::remove_file(&path).unwrap();
}

/// A thread reads a page that is being read ahead. The thread must wait for the transfer in flight. If that transfer
/// fails, the thread must read the page itself, and get only the error of its own read.
#[test]
fn a_reader_of_an_in_flight_page_waits_for_it() {
    let _exclusive = exclusive_test();
    let (cache, store) = (cache(64 * MIB), delayed_store(4 * MIB));
    let file = open(&cache, &store);
    store.hold();
    assert_eq!(file.will_need(0, MIB as u64).unwrap(), MIB as u64);
    assert_eq!(file.will_need(0, MIB as u64).unwrap(), 0, "the pages are already being read");
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&file, 5 * PAGE_BYTES, 100));
        store.release();
        reading.join().unwrap();
    });
    let reads = store.calls().reads;
    read(&file, 0, MIB);
    assert_eq!(store.calls().reads, reads, "no page twice");
    store.set_faults(Faults { fails_after: Some(0), ..Faults::default() });
    let since = CountersBefore::now();
    assert_eq!(file.will_need(2 * MIB as u64, MIB as u64).unwrap(), MIB as u64);
    assert_eq!((since.increases()[0], cache.charged_bytes()), (0, MIB as u64), "nothing came, nothing is kept");
    let error = file.read_at(&mut [0; 8], 2 * MIB as u64).unwrap_err();
    assert!(matches!(error, Error::Store { .. }) && error.errno() == libc::EIO);
    store.set_faults(Faults::default());
    read(&file, 2 * MIB, MIB);
    // Some reads fail. The other pages must be readable.
    store.set_faults(Faults { seed: 3, fail_per_mille: 500, ..Faults::default() });
    let mut good = 0;
    for page in 768..1024 {
        good += usize::from(file.read_at(&mut [0; PAGE_BYTES], (page * PAGE_BYTES) as u64).is_ok());
    }
    assert!((1..=256).contains(&good));
}

/// A file is truncated or closed while many transfers of readahead are in flight. No truncated bytes may appear, and no
/// memory may leak.
#[test]
fn truncation_during_readahead_leaks_nothing() {
    let _exclusive = exclusive_test();
    for seed in 0..50 {
        let (cache, store) = (cache(16 * MIB), delayed_store(4 * MIB));
        let longest_delay = Duration::from_micros(500);
        let faults = Faults { seed, delay_per_mille: 800, longest_delay, is_reordered: true, ..Faults::default() };
        store.set_faults(Faults { fail_per_mille: seed as u32 % 3 * 100, ..faults });
        let file = open(&cache, &store);
        assert_eq!(file.will_need(0, MIB as u64).unwrap(), MIB as u64);
        file.truncate(100).unwrap();
        file.truncate(MIB as u64).unwrap();
        let mut found = vec![9; PAGE_BYTES];
        if file.read_at(&mut found, 0).is_ok() {
            assert!(found[..100] == bytes(100) && found[100..].iter().all(|byte| *byte == 0));
        }
        assert!(file.write_at(&[7; PAGE_BYTES], 8 * PAGE_BYTES as u64).is_ok_and(|len| len == PAGE_BYTES));
        assert_eq!(file.read_at(&mut found, 8 * PAGE_BYTES as u64).unwrap(), PAGE_BYTES);
        assert_eq!(found, [7; PAGE_BYTES]);
        file.will_need(0, MIB as u64).unwrap();
        drop(file);
        assert_eq!(cache.charged_bytes(), 0);
    }
}

/// Readahead must use no more than its share of the cache and the free memory. Pinned pages must stay in memory, and
/// other readers must get memory.
#[test]
fn readahead_uses_only_its_share_of_the_cache() {
    let _exclusive = exclusive_test();
    let (cache, store) = (cache(MIB), delayed_store(4 * MIB));
    let file = open(&cache, &store);
    store.hold();
    let started = file.will_need(0, 4 * MIB as u64).unwrap();
    assert_eq!(started, (MIB / 16) as u64);
    assert!(cache.charged_bytes() <= (MIB / 16) as u64);
    store.release();
    drop(file);
    let file = open(&cache, &store);
    let pins: Vec<_> = (0..MIB / PAGE_BYTES).map(|page| file.pin((page * PAGE_BYTES) as u64).unwrap()).collect();
    assert_eq!(file.will_need(2 * MIB as u64, MIB as u64).unwrap(), 0, "all is in use");
    drop(pins);
    assert!(matches!(file.will_need(u64::MAX, 1), Err(Error::BadOffset { .. })));
    assert_eq!(file.will_need(100 * MIB as u64, 1).unwrap(), 0, "behind the end");
    // From a store without asynchronous reads, nothing may be read ahead.
    let plain = cache.open(Arc::new(MemoryStore::new(bytes(MIB), 512))).unwrap();
    assert_eq!(plain.will_need(0, MIB as u64).unwrap(), 0);
    assert_eq!(cache.create().unwrap().will_need(0, 1).unwrap(), 0);
}

/// A file is scanned with `Reuse::Once`. Its pages must be evicted before other pages, so that another file stays in
/// memory.
#[test]
fn pages_used_once_are_evicted_first() {
    let _exclusive = exclusive_test();
    let (cache, store, other) = (cache(4 * MIB), delayed_store(32 * MIB), delayed_store(3 * MIB));
    let (scanned, kept) = (open(&cache, &store), open(&cache, &other));
    kept.advise(Advice::Random);
    // Reads the other file only once. By uses alone, its pages would be evicted like those of the scanned file.
    (0..3 * MIB / PAGE_BYTES).for_each(|page| read(&kept, page * PAGE_BYTES, PAGE_BYTES));
    let reads = other.calls().reads;
    scanned.advise_reuse(Reuse::Once);
    for _ in 0..2 {
        (0..32 * MIB / PAGE_BYTES).for_each(|page| read(&scanned, page * PAGE_BYTES, PAGE_BYTES));
    }
    (0..3 * MIB / PAGE_BYTES).for_each(|page| read(&kept, page * PAGE_BYTES, PAGE_BYTES));
    assert_eq!(other.calls().reads, reads, "pages of the other file went");
}

/// `dont_need` must drop the clean pages that lie completely inside its range. Dirty pages, pinned pages and pages
/// outside the range must stay.
#[test]
fn dont_need_drops_clean_pages() {
    let _exclusive = exclusive_test();
    let (cache, store) = (cache(16 * MIB), delayed_store(MIB - 100));
    let file = open(&cache, &store);
    read(&file, 0, MIB - 100);
    let charged = cache.charged_bytes();
    assert_eq!(file.dont_need(1, PAGE_BYTES as u64).unwrap(), 0, "no whole page");
    assert_eq!(file.dont_need(1, 3 * PAGE_BYTES as u64).unwrap(), 2 * PAGE_BYTES as u64);
    file.write_at(&[byte_at(10 * PAGE_BYTES)], 10 * PAGE_BYTES as u64).unwrap();
    let pin = file.pin(20 * PAGE_BYTES as u64).unwrap();
    assert_eq!(file.dont_need(10 * PAGE_BYTES as u64, 11 * PAGE_BYTES as u64).unwrap(), 9 * PAGE_BYTES as u64);
    drop(pin);
    assert_eq!(cache.charged_bytes(), charged - 11 * PAGE_BYTES as u64);
    file.sync().unwrap();
    file.dont_need(0, u64::MAX).unwrap();
    assert_eq!(cache.charged_bytes(), 0);
    read(&file, 0, MIB - 100);
    assert_eq!(cache.create().unwrap().dont_need(0, 100).unwrap(), 0);
}
