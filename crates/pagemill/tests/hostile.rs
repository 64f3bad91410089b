//! Tests of stores, policies and callers that break their contract. They must not harm other files, the process or
//! waiting threads.

#[path = "common/stores.rs"]
mod stores;

use pagemill_cache::mapping::policy::{Always, Ask, Cause, Choice, Never};
use pagemill_cache::mapping::{Advice, Builder, Mapping, PageCache, Policy, Writeback};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;
use pagemill_store::{Aligned, FileStore, MemoryStore, Store, Transfer};
use pagemill_testbed::Testbed;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;
use stores::BrokenStore;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

/// The value of all bytes in one file. Reads of other files must never find it.
const SECRET: u8 = 0x5a;

fn settings(limit_bytes: usize) -> Builder {
    PageCache::builder("hostile").limit(limit_bytes as u64).page(PageSize::new(PAGE_BYTES).unwrap())
}

fn cache_without_threads(settings: Builder) -> PageCache {
    let caches = Testbed::for_test().caches;
    caches.collapse_by_hand();
    settings.build_in(caches).unwrap()
}

#[track_caller]
fn wait_until(condition: impl Fn() -> bool) {
    while !condition() {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A store that claims to be a regular file, and reports reads as successful without filling any bytes.
struct NoDataStore {
    file: FileStore,
    size_bytes: u64,
    is_asynchronous: bool,
}

impl Store for NoDataStore {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.size_bytes)
    }
    fn block_bytes(&self) -> usize {
        512
    }
    fn read(&self, _offset: u64, _to: &mut [u8]) -> io::Result<()> {
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
    fn start(&self, batch: Vec<Transfer>) {
        batch.into_iter().for_each(|transfer| transfer.finish(Ok(())));
    }
    fn is_asynchronous(&self) -> bool {
        self.is_asynchronous
    }
    fn as_file(&self) -> Option<&FileStore> {
        Some(&self.file)
    }
}

fn assert_no_secret(file: &Mapping, access: &str) {
    let mut bytes = vec![1; 8 * MIB];
    let len = file.read_at(&mut bytes, 0).unwrap();
    assert!(len == bytes.len() && !bytes.contains(&SECRET), "{access}: bytes of a dropped file");
}

/// A store fills no bytes when it is read. The free memory of its cache has the bytes of a dropped file. The store's
/// file must read as zeros, whichever call brings its pages into memory, in huge and in small folios.
#[test]
fn a_store_that_fills_nothing_reads_as_zeros() {
    let folder = tempfile::tempdir().unwrap();
    type Access = (&'static str, fn(&PageCache, &Mapping));
    let accesses: [Access; 5] = [
        ("read", |_, _| {}),
        ("read ahead", |_, file| {
            file.advise(Advice::Sequential);
            file.will_need(0, 8 << 20).unwrap();
        }),
        ("pinned", |_, file| assert_ne!(file.pin(9000).unwrap().read_u64(0) as u8, SECRET)),
        ("written to", |_, file| assert_eq!(file.write_at(b"x", 3 << 20).unwrap(), 1)),
        ("queued", |cache, file| {
            let mut queue = cache.queue(8).unwrap();
            (0..8).for_each(|at| _ = queue.fetch(file, at << 20, at).unwrap());
            while !queue.is_empty() {
                queue.wait(1, Duration::from_secs(600)).unwrap();
                while queue.next().is_some() {}
            }
        }),
    ];
    let policies: [fn() -> Box<dyn Policy>; 2] = [|| Box::new(Never), || Box::new(Always)];
    for (number, (name, access)) in accesses.into_iter().enumerate() {
        for policy in policies {
            for is_asynchronous in [false, true] {
                let cache = cache_without_threads(settings(8 * MIB).policy(policy()));
                let secret = cache.create().unwrap();
                secret.write_at(&vec![SECRET; 8 * MIB], 0).unwrap();
                drop(secret);
                let file = FileStore::create(folder.path().join(format!("{number}"))).unwrap();
                let store = Arc::new(NoDataStore { file, size_bytes: 8 * MIB as u64, is_asynchronous });
                let file = cache.open(store).unwrap();
                access(&cache, &file);
                assert_no_secret(&file, name);
            }
        }
    }
}

/// A store panics in background writeback. The panic must be counted, and other files must be written back. After a
/// successful sync of the store's file, that file must be written back in the background again.
#[test]
fn a_panic_of_a_store_in_the_background_is_counted() {
    let writeback = Writeback::default().age(Duration::from_millis(1));
    let cache = settings(8 * MIB).writeback(writeback).build_in(Testbed::for_test().caches).unwrap();
    let panics = Arc::new(BrokenStore::that_panics(PAGE_BYTES));
    let good = Arc::new(MemoryStore::new(Vec::new(), PAGE_BYTES));
    let before = stats::get(Counter::BehindPanics);
    let bad_file = cache.open(panics.clone()).unwrap();
    bad_file.write_at(&[1; PAGE_BYTES], 0).unwrap();
    wait_until(|| stats::get(Counter::BehindPanics) > before);
    let good_file = cache.open(good.clone()).unwrap();
    for byte in 2..5 {
        good_file.write_at(&[byte; PAGE_BYTES], 0).unwrap();
        wait_until(|| good.bytes() == [byte; PAGE_BYTES]);
    }
    assert!(panics.inner.bytes().is_empty() && bad_file.dirty_bytes() == PAGE_BYTES as u64);
    panics.panics.store(false, SeqCst);
    bad_file.sync().unwrap();
    assert_eq!(panics.inner.bytes(), [1; PAGE_BYTES]);
    bad_file.write_at(&[9; PAGE_BYTES], 0).unwrap();
    wait_until(|| panics.inner.bytes() == [9; PAGE_BYTES]);
}

/// A policy that chooses small folios. If its flag is set, it panics when it decides about a collapse.
struct PanickingPolicy(Arc<AtomicBool>);

impl Policy for PanickingPolicy {
    fn choose(&self, ask: &Ask) -> Choice {
        match ask.cause {
            Cause::Collapse if self.0.load(SeqCst) => panic!("the test asked for a panic"),
            Cause::Collapse => Choice::Huge,
            _ => Choice::Small,
        }
    }
}

/// A policy panics when the background thread asks it about a collapse. The panic must be counted, the range must stay
/// in small folios, and later ranges must be collapsed.
#[test]
fn a_panic_of_a_policy_in_the_background_is_counted() {
    let does_panic = Arc::new(AtomicBool::new(true));
    let policy = Box::new(PanickingPolicy(does_panic.clone()));
    let cache = settings(16 * MIB).policy(policy).build_in(Testbed::for_test().caches).unwrap();
    let before = stats::get(Counter::BehindPanics);
    let first = cache.create().unwrap();
    first.write_at(&[3; 2 * MIB], 0).unwrap();
    wait_until(|| stats::get(Counter::BehindPanics) > before);
    assert_eq!(cache.usage().huge, 0);
    does_panic.store(false, SeqCst);
    let second = cache.create().unwrap();
    second.write_at(&[4; 2 * MIB], 0).unwrap();
    wait_until(|| cache.usage().huge == 2 * MIB as u64);
    let mut bytes = vec![0; 2 * MIB];
    first.read_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 3));
}

/// The completion callback of a transfer panics on the store's thread. The next transfer must complete nevertheless.
#[test]
fn transfers_continue_after_a_callback_panics() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    store.write(0, &[7; 512]).unwrap();
    let before = stats::get(Counter::BehindPanics);
    store.start(vec![Transfer::read(0, Aligned::new(512, 512), |_, _| panic!("the test asked for a panic"))]);
    wait_until(|| stats::get(Counter::BehindPanics) > before);
    let (sender, ends) = mpsc::channel();
    let done = move |result: io::Result<()>, bytes: Aligned| sender.send((result.is_ok(), bytes[0])).unwrap();
    store.start(vec![Transfer::read(0, Aligned::new(512, 512), done)]);
    assert_eq!(ends.recv().unwrap(), (true, 7));
}

/// A store does not complete its writes. Syncs with a timeout must fail. Later syncs must succeed once the writes have
/// completed.
#[test]
fn a_sync_times_out_if_the_store_completes_nothing() {
    let timeout = Some(Duration::from_millis(30));
    let cache = cache_without_threads(settings(4 * MIB).timeout(timeout).policy(Never));
    let store = Arc::new(BrokenStore::that_completes_no_transfer(PAGE_BYTES));
    let file = cache.open(store.clone()).unwrap();
    file.write_at(&[8; 3 * PAGE_BYTES], 0).unwrap();
    let is_busy = |result: pagemill_core::Result<()>| assert!(matches!(result, Err(Error::Busy { .. })), "{result:?}");
    is_busy(file.sync());
    is_busy(file.sync());
    is_busy(file.sync_range(0, 1));
    is_busy(file.write_back(0, 1));
    is_busy(file.refresh());
    let started = store.take_started();
    assert!(!started.is_empty());
    started.into_iter().for_each(|transfer| transfer.run(&store.inner));
    file.sync().unwrap();
    assert_eq!(store.inner.bytes(), [8; 3 * PAGE_BYTES]);
}

/// Calls get extreme offsets and lengths. No call may panic. Each must fail, or stop at the end of the file.
#[test]
fn extreme_offsets_and_lengths_do_not_panic() {
    let page = PAGE_BYTES as u64;
    let extremes =
        [0, 1, page - 1, page, i64::MAX as u64 - page, i64::MAX as u64 - 1, i64::MAX as u64, u64::MAX - page];
    let extremes = extremes.into_iter().chain([u64::MAX - 1, u64::MAX]);
    let cache = cache_without_threads(settings(4 * MIB).policy(Never));
    let stored = Arc::new(MemoryStore::new(vec![6; 2 * PAGE_BYTES], PAGE_BYTES));
    for file in [cache.create().unwrap(), cache.open(stored).unwrap()] {
        for offset in extremes.clone() {
            file.write_at(&[6; 2 * PAGE_BYTES], 0).unwrap();
            let mut bytes = [0; 32];
            let _ =
                (file.read_at(&mut bytes, offset), file.read_vectored_at(&mut [io::IoSliceMut::new(&mut [0])], offset));
            let _ = (file.pin(offset).is_ok(), file.pin_present(offset).is_ok(), file.hold(offset).is_ok());
            let _ = (file.seek_data(offset), file.seek_hole(offset));
            let _ = (file.split(offset), file.collapse(offset));
            for len_bytes in extremes.clone() {
                let _ = file.will_need(offset, len_bytes);
                let _ = (file.dont_need(offset, len_bytes), file.sync_range(offset, len_bytes));
                let _ = file.write_back(offset, len_bytes);
                let _ = file.pin_range(offset, len_bytes as usize).is_ok();
                let _ = file.punch_hole(offset, len_bytes);
            }
            if offset > page {
                assert!(file.write_at(b"x", u64::MAX - 1).is_err() && file.zero_range(offset, u64::MAX).is_err());
                assert!(file.pin(offset).is_err(), "the offset lies behind the end");
            }
            let _ = file.truncate(offset);
            file.truncate(2 * page).unwrap();
        }
    }
}
