//! Shuttle tests: threads read, write, truncate, split and collapse the same files, in randomly scheduled steps.
//!
//! Most tests use two files of one cache whose huge folios have two pages. So a few steps cover all transitions, and
//! memory moves between the files. Bytes are checked at the begin and end of pages. `SHUTTLE_RUNS` sets the number of
//! runs of each test. A failure while other threads work ends in an abort, so run these tests with `--nocapture`.

mod growth;
mod hinted;
mod stored;

use super::policy::{Always, Ask, Cause, Choice, Policy};
use super::*;
use pagemill_core::arena::{self, Arena, Layout};
use pagemill_core::reclaim::Account;
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::modelled::pause;
use pagemill_core::sync::modelled::reset_clock;
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::{Direction, Transfer};
use pagemill_xarray::OneForest;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::{Mutex, OnceLock};
use std::task::{Context, Waker};
use std::time::Duration;

/// Depth of the PCT schedules (probabilistic concurrency testing): at up to `PCT_DEPTH - 1` random steps, the running
/// thread gets the lowest priority.
const PCT_DEPTH: usize = 4;

/// Maximum number of steps of one run of a test. A longer run waits for an event that never comes.
const MAX_STEPS: usize = 300_000;

/// Factor for the number of runs of tests whose race happens at few points only.
const RARE_RACE_FACTOR: usize = 20;

/// Bytes of a page. Two pages make a huge folio.
pub(super) const PAGE: usize = BLOCK_BYTES / 2;
/// Number of pages of a test file.
pub(super) const PAGES: u64 = 4;

/// Number of bytes at the begin or end of a page that a test writes and checks.
pub(super) const SAMPLE_BYTES: usize = 8;

pub(super) fn random_below(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

/// A policy that chooses small folios for some writes, so that there is something to collapse.
pub(super) struct RandomSmall;

impl Policy for RandomSmall {
    fn choose(&self, ask: &Ask) -> Choice {
        if ask.cause == Cause::Write && random_below(2) == 0 { Choice::Small } else { Always.choose(ask) }
    }
}

fn cache_with_ample_room() -> PageCache {
    cache_of_limit(6 * BLOCK_BYTES as u64)
}

fn cache_of_limit(limit_bytes: u64) -> PageCache {
    cache_with(limit_bytes, Writeback::default(), None)
}

/// Returns the page caches of all tests.
pub(super) fn model_caches() -> &'static Caches {
    static CACHES: OnceLock<&'static Caches> = OnceLock::new();
    CACHES.get_or_init(|| {
        let layout = Layout { use_huge: false, ..Layout::for_test() };
        let account = Account::make(UNLIMITED).unwrap();
        let arena = arena::place(Arena::new(layout, account).unwrap()).unwrap();
        let helper = arena::place(Helper::new(account)).unwrap();
        let forests = arena::place(OneForest::default()).unwrap();
        arena::place(Caches::new(arena, helper, forests)).unwrap()
    })
}

fn cache_with(limit_bytes: u64, writeback: Writeback, timeout: Option<Duration>) -> PageCache {
    let page = PageSize::new(PAGE).unwrap();
    let settings = PageCache::builder("model").limit(limit_bytes);
    settings.page(page).policy(RandomSmall).writeback(writeback).timeout(timeout).build_in(model_caches()).unwrap()
}

/// A test file, and the byte that is written to all of its pages.
struct TestFile {
    file: Mapping,
    byte: u8,
    pages: u64,
    /// Incremented when a pin or a hold begins, and when it ends. So a pin or hold exists while the count is odd. Valid
    /// only if a single thread pins and holds.
    guard_count: std::sync::atomic::AtomicU32,
}

impl TestFile {
    fn new(cache: &PageCache, byte: u8, pages: u64) -> Self {
        Self { file: cache.create().unwrap(), byte, pages, guard_count: std::sync::atomic::AtomicU32::new(0) }
    }

    fn random_page(&self) -> u64 {
        random_below(self.pages as usize) as u64
    }

    fn write(&self) {
        let page = self.random_page();
        // A whole page, or its first bytes, or its last bytes.
        let (at, len) = [(0, PAGE), (0, SAMPLE_BYTES), (PAGE - SAMPLE_BYTES, SAMPLE_BYTES)][random_below(3)];
        let written = self.file.write_at(&vec![self.byte; len], page * PAGE as u64 + at as u64);
        assert!(written.is_ok_and(|bytes| bytes == len));
    }

    /// Asserts that the bytes are the file's own, or zero.
    fn assert_own_bytes(&self, bytes: &[u8]) {
        assert!(bytes.iter().all(|byte| *byte == 0 || *byte == self.byte), "{bytes:?} in the file of {}", self.byte);
    }

    fn read(&self) {
        let page = self.random_page();
        let at = page * PAGE as u64 + [0, PAGE - SAMPLE_BYTES][random_below(2)] as u64;
        let mut bytes = [0; SAMPLE_BYTES];
        let len = self.file.read_at(&mut bytes, at).unwrap();
        self.assert_own_bytes(&bytes[..len]);
    }

    /// Pins a folio, and checks its bytes twice.
    fn pin(&self) {
        if let Ok(Some(pin)) = self.file.pin_present(self.random_page() * PAGE as u64) {
            self.guard_count.fetch_add(1, Relaxed);
            let mut bytes = [0; SAMPLE_BYTES];
            for _ in 0..2 {
                pin.read_at(&mut bytes, 0);
                self.assert_own_bytes(&bytes);
                shuttle::thread::yield_now();
            }
            self.guard_count.fetch_add(1, Relaxed);
        }
    }

    fn hold(&self) {
        if let Ok(mut held) = self.file.hold(self.random_page() * PAGE as u64) {
            self.guard_count.fetch_add(1, Relaxed);
            self.assert_own_bytes(&held[..SAMPLE_BYTES]);
            held[..SAMPLE_BYTES].fill(0);
            shuttle::thread::yield_now();
            assert!(held[..SAMPLE_BYTES].iter().all(|byte| *byte == 0), "no other thread writes");
            held[..SAMPLE_BYTES].fill(self.byte);
            self.guard_count.fetch_add(1, Relaxed);
        }
    }

    /// Splits a huge folio, or collapses small folios. Returns whether a huge folio was split or created.
    fn reshape(&self) -> bool {
        let offset = self.random_page() * PAGE as u64;
        let done = match random_below(4) {
            0 | 1 => self.file.split(offset),
            2 => self.file.collapse(offset),
            _ => self.file.split_sparse().map(|_| false),
        };
        assert!(matches!(done, Ok(_) | Err(Error::Busy { .. })), "{done:?}");
        done.unwrap_or(false)
    }

    /// Removes pages of the file, or zeroes them.
    fn remove(&self) {
        let offset = self.random_page() * PAGE as u64 + random_below(2) as u64 * SAMPLE_BYTES as u64;
        let len = [SAMPLE_BYTES, PAGE, 2 * PAGE][random_below(3)] as u64;
        let done = match random_below(3) {
            0 => self.file.truncate(offset),
            1 => self.file.punch_hole(offset, len).map(drop),
            _ => self.file.zero_range(offset, len),
        };
        assert!(matches!(done, Ok(()) | Err(Error::Busy { .. })), "{done:?}");
    }

    fn remove_or_reshape(&self) {
        if random_below(7) < 3 { self.remove() } else { _ = self.reshape() }
    }

    /// Asserts that all bytes of the file are its own, or zero.
    fn check_all(&self) {
        for page in 0..self.pages {
            let mut bytes = vec![0; PAGE];
            let len = self.file.read_at(&mut bytes, page * PAGE as u64).unwrap();
            self.assert_own_bytes(&bytes[..len]);
        }
    }

    fn run_operation(&self, which: usize) {
        match which {
            0 => self.write(),
            1 => self.read(),
            2 => self.pin(),
            3 => self.hold(),
            RESHAPE => _ = self.reshape(),
            REMOVE => self.remove(),
            _ => self.remove_or_reshape(),
        }
    }
}

/// Runs threads over two files in many schedules. Each thread runs the operations in its list. At the end the bytes of
/// both files are checked, and all memory must have been freed.
fn run_threads(threads: &'static [&'static [usize]]) {
    let awaited = stats::get(Counter::FoliosAwaited);
    let runs = run_in_many_schedules(1, move || {
        let cache = cache_with_ample_room();
        let files: Arc<[TestFile; 2]> = Arc::new([1, 2].map(|byte| TestFile::new(&cache, byte, PAGES)));
        files.iter().for_each(TestFile::write);
        let threads: Vec<_> = threads
            .iter()
            .map(|acts| {
                let files = files.clone();
                shuttle::thread::spawn(move || acts.iter().for_each(|act| files[random_below(2)].run_operation(*act)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        files.iter().for_each(TestFile::check_all);
        drop(files);
        assert_is_empty(&cache);
    });
    assert!(runs < 100 || stats::get(Counter::FoliosAwaited) > awaited, "no thread ever waited for another");
}

fn assert_is_empty(cache: &PageCache) {
    let usage = cache.usage();
    assert_eq!((usage.charged, usage.huge, usage.small, usage.pinned), (0, 0, 0, 0), "{usage:?}");
}

/// Runs two threads on one range of one file, each with one kind of operation. This tests one entry of the table in
/// docs/states-and-locks.md, and its mirror entry. A pinned or held folio must not be split or collapsed.
fn run_two_threads(first: usize, then: usize) {
    run_in_many_schedules(0, move || {
        let cache = cache_with_ample_room();
        let test_file = Arc::new(TestFile::new(&cache, 1, 2));
        (0..test_file.pages).for_each(|page| {
            assert_eq!(test_file.file.write_at(&[1; SAMPLE_BYTES], page * PAGE as u64).unwrap(), SAMPLE_BYTES);
        });
        let other = test_file.clone();
        let other = shuttle::thread::spawn(move || {
            for _ in 0..2 {
                let count_before = other.guard_count.load(Relaxed);
                if then == RESHAPE && first != then {
                    let is_done = other.reshape();
                    let was_guarded = count_before % 2 == 1 && other.guard_count.load(Relaxed) == count_before;
                    assert!(!(is_done && was_guarded), "a pinned or held folio was split or collapsed");
                } else {
                    other.run_operation(then);
                }
            }
        });
        (0..2).for_each(|_| test_file.run_operation(first));
        other.join().unwrap();
        test_file.check_all();
        drop(test_file);
        assert_is_empty(&cache);
    });
}

/// Runs `run` in random schedules, and in `times` as many schedules with few preemptions (PCT). With `times` 0, runs a
/// quarter of the schedules of both kinds. Returns the number of random schedules.
///
/// One test runs at a time. All tests share one arena, and under shuttle the locks of the arena work only between
/// threads of one test. A thread that waits for a thread that the system has preempted would make any number of steps.
pub(super) fn run_in_many_schedules(times: usize, run: impl Fn() + Clone + Send + Sync + 'static) -> usize {
    static TEST_LOCK: Mutex<()> = Mutex::new(());
    let _exclusive = TEST_LOCK.lock();
    let runs: usize =
        std::env::var("SHUTTLE_RUNS").map_or(1000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let (runs, times) = if times == 0 { (runs.div_ceil(4), 1) } else { (runs, times) };
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (BLOCK_BYTES / 4, MaxSteps::FailAfter(MAX_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(PCT_DEPTH, times * runs), config()).run(begin);
    runs
}

/// A page moves from one file to another while a thread reads or pins the page in the first file. That thread must find
/// bytes of the first file, or zeros, or no page. Free pages are allocated last in, first out, so the second file gets
/// the same page. The race happens only if the other thread does all of its work at one of a few points, so there are
/// many runs of few steps.
#[test]
fn a_reader_of_a_reused_page_finds_only_its_own_files_bytes() {
    run_in_many_schedules(RARE_RACE_FACTOR, || {
        let cache = cache_with_ample_room();
        let files: Arc<[TestFile; 2]> = Arc::new([1, 2].map(|byte| TestFile::new(&cache, byte, PAGES)));
        let write =
            |test_file: &TestFile| assert_eq!(test_file.file.write_at(&vec![test_file.byte; PAGE], 0).unwrap(), PAGE);
        write(&files[0]);
        let taker = files.clone();
        let taker = shuttle::thread::spawn(move || {
            taker[0].file.truncate(0).unwrap();
            write(&taker[1]);
        });
        let mut bytes = [0; SAMPLE_BYTES];
        if random_below(2) == 0 {
            let len = files[0].file.read_at(&mut bytes, 0).unwrap();
            files[0].assert_own_bytes(&bytes[..len]);
        } else if let Ok(Some(pin)) = files[0].file.pin_present(0) {
            pin.read_at(&mut bytes, 0);
            files[0].assert_own_bytes(&bytes);
        }
        taker.join().unwrap();
    });
}

/// Operation of [`TestFile::run_operation`]: a write. The next constants are the other operations.
const WRITE: usize = 0;
const READ: usize = 1;
const PIN: usize = 2;
const HOLD: usize = 3;
const RESHAPE: usize = 4;
const REMOVE: usize = 5;
const REMOVE_OR_RESHAPE: usize = 6;
/// Operation of [`TestFile::run_operation_at_limit`]: writes back the pages that are due, as the flusher thread does.
const FLUSH: usize = 7;

#[test]
fn reads_during_truncations_splits_and_collapses() {
    run_threads(&[
        &[READ, READ, READ],
        &[READ, PIN, READ],
        &[REMOVE_OR_RESHAPE, WRITE, REMOVE_OR_RESHAPE, REMOVE_OR_RESHAPE],
    ]);
}

#[test]
fn writes_during_truncations_splits_and_collapses() {
    run_threads(&[
        &[WRITE, WRITE, WRITE],
        &[WRITE, READ, WRITE],
        &[REMOVE_OR_RESHAPE, REMOVE_OR_RESHAPE, REMOVE_OR_RESHAPE],
    ]);
}

#[test]
fn holds_during_pins_and_truncations() {
    run_threads(&[&[HOLD, HOLD], &[PIN, WRITE, PIN], &[REMOVE_OR_RESHAPE, REMOVE_OR_RESHAPE, REMOVE_OR_RESHAPE]]);
}

#[test]
fn two_threads_truncate_split_and_collapse() {
    run_threads(&[
        &[REMOVE_OR_RESHAPE, REMOVE_OR_RESHAPE, WRITE],
        &[REMOVE_OR_RESHAPE, WRITE, REMOVE_OR_RESHAPE],
        &[READ, WRITE, READ],
    ]);
}

/// One thread pins folios while another splits and collapses the same folios. This test is that of pins and of writes
/// in the table of docs/states-and-locks.md, because a write begins with a pin.
#[test]
fn pins_during_splits() {
    run_two_threads(PIN, RESHAPE);
}

#[test]
fn pins_during_removals() {
    run_two_threads(PIN, REMOVE);
}

#[test]
fn pins_during_holds() {
    run_two_threads(PIN, HOLD);
}

#[test]
fn reads_during_reads() {
    run_two_threads(READ, READ);
}

#[test]
fn reads_during_writes() {
    run_two_threads(READ, WRITE);
}

#[test]
fn reads_during_holds() {
    run_two_threads(READ, HOLD);
}

#[test]
fn reads_during_splits() {
    run_two_threads(READ, RESHAPE);
}

#[test]
fn reads_during_removals() {
    run_two_threads(READ, REMOVE);
}

#[test]
fn writes_during_writes() {
    run_two_threads(WRITE, WRITE);
}

#[test]
fn writes_during_holds() {
    run_two_threads(WRITE, HOLD);
}

#[test]
fn writes_during_splits() {
    run_two_threads(WRITE, RESHAPE);
}

#[test]
fn writes_during_removals() {
    run_two_threads(WRITE, REMOVE);
}

#[test]
fn holds_during_holds() {
    run_two_threads(HOLD, HOLD);
}

#[test]
fn holds_during_splits() {
    run_two_threads(HOLD, RESHAPE);
}

#[test]
fn holds_during_removals() {
    run_two_threads(HOLD, REMOVE);
}

#[test]
fn splits_during_splits() {
    run_two_threads(RESHAPE, RESHAPE);
}

#[test]
fn splits_during_removals() {
    run_two_threads(RESHAPE, REMOVE);
}

#[test]
fn removals_during_removals() {
    run_two_threads(REMOVE, REMOVE);
}

/// A read concurrent with an append must find the old end or the new bytes, but never zeros that were not written.
#[test]
fn reads_during_appends() {
    run_in_many_schedules(RARE_RACE_FACTOR, || {
        let cache = cache_with_ample_room();
        let file = Arc::new(cache.create().unwrap());
        let other = file.clone();
        let writer = shuttle::thread::spawn(move || {
            assert_eq!(other.write_at(&[1; SAMPLE_BYTES], 0).unwrap(), SAMPLE_BYTES);
        });
        let mut bytes = [9; SAMPLE_BYTES];
        let len = file.read_at(&mut bytes, 0).unwrap();
        assert!(bytes[..len].iter().all(|byte| *byte == 1), "{len} bytes: {bytes:?}");
        writer.join().unwrap();
    });
}

/// A store in which all bytes are equal. Writes must contain only that byte and zeros.
pub(super) struct ConstantStore(pub(super) u8);

impl Store for ConstantStore {
    fn size_bytes(&self) -> std::io::Result<u64> {
        Ok(PAGES * PAGE as u64)
    }

    fn block_bytes(&self) -> usize {
        SAMPLE_BYTES
    }

    fn read(&self, _offset: u64, to: &mut [u8]) -> std::io::Result<()> {
        to.fill(self.0);
        Ok(())
    }

    fn write(&self, _offset: u64, from: &[u8]) -> std::io::Result<()> {
        assert!(from[..SAMPLE_BYTES].iter().all(|byte| *byte == 0 || *byte == self.0));
        Ok(())
    }

    fn set_size(&self, _size_bytes: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }
}

impl TestFile {
    /// Runs an operation in a cache that may have no memory for it. The operation `HOLD` means a sync here.
    fn run_operation_at_limit(&self, act: usize) {
        let at = random_below(PAGES as usize) as u64 * PAGE as u64;
        let mut bytes = [0; SAMPLE_BYTES];
        let done = match act {
            READ => self.file.read_at(&mut bytes, at),
            WRITE => self.file.write_at(&[self.byte; SAMPLE_BYTES], at),
            PIN => self.file.pin_present(at).map(|_| 0),
            HOLD => self.file.sync().map(|()| 0),
            FLUSH => Ok(self.file.0.cache.flush().0 as usize),
            _ => match random_below(4) {
                0 => self.file.truncate(at).map(|()| 0),
                1 => self.file.collapse(at).map(|_| 0),
                _ => self.file.split(at).map(|_| 0),
            },
        };
        // Checked after a failed read, too: the read may have copied and discarded another file's bytes.
        self.assert_own_bytes(&bytes);
        let is_fine = matches!(done, Ok(_) | Err(Error::Busy { .. } | Error::NoMemory { .. } | Error::PastEnd { .. }));
        assert!(is_fine, "{done:?}");
    }
}

/// Folios are read, removed, split and collapsed, and evict each other, in a cache of three pages. At the end a sync
/// must leave all folios clean, and evicting everything must free all of the cache's memory.
#[test]
fn evictions_during_reads_writes_and_removals() {
    const OPERATIONS_OF_THREADS: [&[usize]; 3] =
        [&[READ, READ, READ], &[READ, WRITE, HOLD, PIN], &[WRITE, REMOVE_OR_RESHAPE, READ, REMOVE_OR_RESHAPE]];
    run_in_many_schedules(1, || {
        let cache = cache_of_limit(3 * PAGE as u64);
        let open = |byte| TestFile {
            file: cache.open(Arc::new(ConstantStore(byte))).unwrap(),
            ..TestFile::new(&cache, byte, PAGES)
        };
        let files: Arc<[TestFile; 2]> = Arc::new([1, 2].map(open));
        let threads = OPERATIONS_OF_THREADS.map(|acts| {
            let files = files.clone();
            shuttle::thread::spawn(move || {
                acts.iter().for_each(|act| files[random_below(2)].run_operation_at_limit(*act))
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        files.iter().for_each(|test_file| test_file.file.sync().unwrap());
        cache.0.evict_after_ns.store(0, Relaxed);
        assert!(!cache.0.evict_some(u64::MAX), "more was evicted than the cache holds");
        assert_eq!((cache.charged_bytes(), cache.0.order.pages()), (0, [0, 0]));
    });
}

/// Writers need pages that are free only after writeback. The writers run concurrently with background writeback,
/// syncs, truncations, collapses and evictions. At the end the counts of dirty bytes must be correct, and after a sync
/// nothing may be dirty.
#[test]
fn writeback_during_writes_truncations_and_evictions() {
    const OPERATIONS_OF_THREADS: [&[usize]; 3] =
        [&[WRITE, WRITE, READ, WRITE], &[FLUSH, HOLD, FLUSH, WRITE], &[REMOVE_OR_RESHAPE, WRITE, REMOVE_OR_RESHAPE]];
    run_in_many_schedules(1, || {
        let writeback = Writeback::default().age(Duration::ZERO);
        let cache = cache_with(3 * PAGE as u64, writeback, None);
        let open = |byte| TestFile {
            file: cache.open(Arc::new(ConstantStore(byte))).unwrap(),
            ..TestFile::new(&cache, byte, PAGES)
        };
        let files: Arc<[TestFile; 2]> = Arc::new([1, 2].map(open));
        let threads = OPERATIONS_OF_THREADS.map(|acts| {
            let files = files.clone();
            shuttle::thread::spawn(move || {
                acts.iter().for_each(|act| files[random_below(2)].run_operation_at_limit(*act))
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for test_file in files.iter() {
            let dirty = |file: &Mapping| {
                let (mut at, mut bytes) = (0, 0);
                while let Some(found) = { file.0.tree.next(at, PAGES, &pagemill_xarray::pin()) } {
                    let is_dirty = file.0.pool.word(found.value as u32).load().is_dirty();
                    let is_marked = file.0.tree.get_mark(found.first, writeback::dirty::DIRTY, &pagemill_xarray::pin());
                    assert!(is_marked || !is_dirty, "a dirty folio without a mark, which writeback would not find");
                    bytes += if is_dirty { (PAGE as u64) << found.order } else { 0 };
                    at = found.last() + 1;
                }
                bytes
            };
            assert_eq!(test_file.file.dirty_bytes(), dirty(&test_file.file));
            test_file.file.sync().unwrap();
            assert_eq!((test_file.file.dirty_bytes(), dirty(&test_file.file)), (0, 0));
        }
        assert_eq!(cache.dirty_bytes(), 0);
        cache.0.evict_after_ns.store(0, Relaxed);
        assert!(!cache.0.evict_some(u64::MAX), "more was evicted than the cache holds");
        assert_eq!((cache.charged_bytes(), cache.0.order.pages()), (0, [0, 0]));
    });
}

/// As [`ConstantStore`], but another thread completes the reads later, in any order, and fails some of them.
struct LateStore(ConstantStore, Mutex<Vec<Transfer>>);

impl LateStore {
    /// Completes one read that was started. Returns whether there was such a read.
    fn complete_one_read(&self) -> bool {
        let mut reads = self.1.lock().unwrap();
        let count = reads.len();
        let next = (count > 0).then(|| reads.swap_remove(random_below(count)));
        drop(reads);
        let is_there = next.is_some();
        match next {
            Some(read) if random_below(8) == 0 => drop(read),
            Some(read) => read.run(self),
            None => {}
        }
        is_there
    }
}

impl Store for LateStore {
    fn size_bytes(&self) -> std::io::Result<u64> {
        self.0.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> std::io::Result<()> {
        self.0.read(offset, to)
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::io::Result<()> {
        self.0.write(offset, from)
    }

    fn set_size(&self, _size_bytes: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn start(&self, batch: Vec<Transfer>) {
        // Writes complete at once: writeback would wait for them outside of shuttle, which would stop all threads.
        let is_read = |transfer: &Transfer| transfer.direction() == Direction::Read;
        let (reads, writes): (Vec<_>, Vec<_>) = batch.into_iter().partition(is_read);
        writes.into_iter().for_each(|write| write.run(self));
        self.1.lock().unwrap().extend(reads);
    }
}

impl TestFile {
    /// Starts an asynchronous read, polls it a few times, and drops it.
    fn poll_and_drop_read(&self) {
        let mut bytes = [0; SAMPLE_BYTES];
        let at = self.random_page() * PAGE as u64;
        let mut reading = Box::pin(self.file.read_async(&mut bytes, at));
        for _ in 0..random_below(4) {
            let polled = reading.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            if let std::task::Poll::Ready(done) = polled {
                let is_fine =
                    matches!(done, Ok(_) | Err(Error::Busy { .. } | Error::NoMemory { .. } | Error::Store { .. }));
                assert!(is_fine, "{done:?}");
                break;
            }
            pause();
        }
        drop(reading);
        self.assert_own_bytes(&bytes);
    }

    /// Runs an operation on a file whose store lets another thread complete its reads ([`LateStore`]).
    fn run_operation_with_late_reads(&self, act: usize) {
        let mut bytes = [0; SAMPLE_BYTES];
        let at = self.random_page() * PAGE as u64;
        match act {
            POLL_AND_DROP_READ => self.poll_and_drop_read(),
            READ => match self.file.read_at(&mut bytes, at) {
                Ok(len) => self.assert_own_bytes(&bytes[..len]),
                Err(error) => {
                    assert!(matches!(error, Error::Busy { .. } | Error::NoMemory { .. } | Error::Store { .. }))
                }
            },
            WRITE => match self.file.write_at(&[self.byte; SAMPLE_BYTES], at) {
                Ok(len) => assert_eq!(len, SAMPLE_BYTES),
                Err(error) => assert!(matches!(error, Error::NoMemory { .. } | Error::Store { .. })),
            },
            other => self.run_operation_at_limit(other),
        }
    }
}

/// Operation of [`TestFile::run_operation_with_late_reads`]: polls an asynchronous read, then drops it.
const POLL_AND_DROP_READ: usize = 7;

/// Another thread completes reads, some with errors, concurrently with reads, writes, truncations, splits and
/// evictions. Waiting threads must continue, the file must have only its own bytes, and no memory may be lost.
#[test]
fn late_reads_during_all_other_operations() {
    const OPERATIONS_OF_THREADS: [&[usize]; 3] = [
        &[READ, POLL_AND_DROP_READ, READ],
        &[POLL_AND_DROP_READ, WRITE, HOLD, POLL_AND_DROP_READ],
        &[REMOVE_OR_RESHAPE, POLL_AND_DROP_READ, REMOVE_OR_RESHAPE, READ],
    ];
    const HOUR: Duration = Duration::from_secs(3600);
    run_in_many_schedules(1, || {
        let cache = cache_with(3 * PAGE as u64, Writeback::default(), Some(HOUR));
        let store = Arc::new(LateStore(ConstantStore(1), Mutex::default()));
        let test_file = TestFile { file: cache.open(store.clone()).unwrap(), ..TestFile::new(&cache, 1, PAGES) };
        let test_file = Arc::new(test_file);
        let is_over = Arc::new(AtomicBool::new(false));
        let completer = {
            let (store, is_over) = (store.clone(), is_over.clone());
            shuttle::thread::spawn(move || {
                while store.complete_one_read() || !is_over.load(Relaxed) {
                    pause();
                }
            })
        };
        let threads = OPERATIONS_OF_THREADS.map(|acts| {
            let test_file = test_file.clone();
            shuttle::thread::spawn(move || acts.iter().for_each(|act| test_file.run_operation_with_late_reads(*act)))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        is_over.store(true, Relaxed);
        completer.join().unwrap();
        // A page of a split huge folio may be dirty behind the end of the file. It is written back when the file is
        // longer again.
        test_file.file.truncate(PAGES * PAGE as u64).unwrap();
        test_file.file.sync().unwrap();
        cache.0.evict_after_ns.store(0, Relaxed);
        assert!(!cache.0.evict_some(u64::MAX), "more was evicted than the cache holds");
        assert_eq!((cache.charged_bytes(), cache.0.order.pages()), (0, [0, 0]));
        assert_eq!(Arc::strong_count(&store), 2, "the file and this test");
    });
}
