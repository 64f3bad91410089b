//! Threads that truncate, read, write, split and collapse the same files, in randomly scheduled steps.
//!
//! Two files of one cache with huge folios of two pages, so that a few steps cover all transitions, and memory moves
//! between the files. Bytes are checked at page boundaries. `SHUTTLE_RUNS` sets the runs of each model. A failure
//! during other threads' work ends in an abort, so run them with `--nocapture`.

mod stored;

use super::policy::{Always, Ask, Cause, Choice, Policy};
use super::*;
use pagemill_core::arena::{self, Arena, Layout};
use pagemill_core::reclaim::Account;
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

/// Preemptions of a PCT schedule.
const DEPTH: usize = 4;

/// Most steps of a run; a longer one waits for an event that never comes.
const MOST_STEPS: usize = 300_000;

/// Factor for models with a small window for the race.
const MANY: usize = 20;

const PAGE: usize = BLOCK_BYTES / 2;
const PAGES: u64 = 4;

/// Bytes of a page that are written and checked.
const SAMPLE: usize = 8;

fn one_of(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

/// Chooses small for some writes, so that there is something to collapse.
struct Either;

impl Policy for Either {
    fn choose(&self, ask: &Ask) -> Choice {
        if ask.cause == Cause::Write && one_of(2) == 0 { Choice::Small } else { Always.choose(ask) }
    }
}

fn cache() -> Cache {
    cache_of(6 * BLOCK_BYTES as u64)
}

fn cache_of(limit_bytes: u64) -> Cache {
    cache_with(limit_bytes, Writeback::default(), None)
}

fn cache_with(limit_bytes: u64, writeback: Writeback, timeout: Option<Duration>) -> Cache {
    static CACHES: OnceLock<&'static Caches> = OnceLock::new();
    let caches = CACHES.get_or_init(|| {
        let layout = Layout { use_huge: false, ..Layout::for_test() };
        let arena = arena::place(Arena::new(layout, Account::make(UNLIMITED).unwrap()).unwrap()).unwrap();
        let forests = arena::place(OneForest::default()).unwrap();
        arena::place(Caches::new(arena, forests)).unwrap()
    });
    let page = PageSize::new(PAGE).unwrap();
    let settings = Settings::new("model", limit_bytes);
    caches.make(Settings { page, policy: Box::new(Either), writeback, timeout, ..settings }).unwrap()
}

/// A file, and the byte written to all of its pages.
struct Model {
    file: Mapping,
    byte: u8,
    pages: u64,
    /// Advances when a pin or hold begins, and before it ends: odd while there is one. Used by one thread only.
    kept: std::sync::atomic::AtomicU32,
}

impl Model {
    fn new(cache: &Cache, byte: u8, pages: u64) -> Self {
        Self { file: cache.create().unwrap(), byte, pages, kept: std::sync::atomic::AtomicU32::new(0) }
    }

    fn a_page(&self) -> u64 {
        one_of(self.pages as usize) as u64
    }

    fn write(&self) {
        let page = self.a_page();
        // A whole page, or its beginning, or its end.
        let (at, len) = [(0, PAGE), (0, SAMPLE), (PAGE - SAMPLE, SAMPLE)][one_of(3)];
        let written = self.file.write_at(&vec![self.byte; len], page * PAGE as u64 + at as u64);
        assert!(written.is_ok_and(|bytes| bytes == len));
    }

    /// Bytes are the file's own, or zero.
    fn check(&self, bytes: &[u8]) {
        assert!(bytes.iter().all(|byte| *byte == 0 || *byte == self.byte), "{bytes:?} in the file of {}", self.byte);
    }

    fn read(&self) {
        let page = self.a_page();
        let at = page * PAGE as u64 + [0, PAGE - SAMPLE][one_of(2)] as u64;
        let mut bytes = [0; SAMPLE];
        let len = self.file.read_at(&mut bytes, at).unwrap();
        self.check(&bytes[..len]);
    }

    /// A pinned folio keeps its size and its place.
    fn pin(&self) {
        if let Ok(Some(pin)) = self.file.pin_present(self.a_page() * PAGE as u64) {
            self.kept.fetch_add(1, Relaxed);
            let mut bytes = [0; SAMPLE];
            for _ in 0..2 {
                pin.read_at(&mut bytes, 0);
                self.check(&bytes);
                shuttle::thread::yield_now();
            }
            self.kept.fetch_add(1, Relaxed);
        }
    }

    fn hold(&self) {
        if let Ok(mut held) = self.file.hold(self.a_page() * PAGE as u64) {
            self.kept.fetch_add(1, Relaxed);
            self.check(&held[..SAMPLE]);
            held[..SAMPLE].fill(0);
            shuttle::thread::yield_now();
            assert!(held[..SAMPLE].iter().all(|byte| *byte == 0), "no other thread writes");
            held[..SAMPLE].fill(self.byte);
            self.kept.fetch_add(1, Relaxed);
        }
    }

    /// Splits or collapses folios; returns whether it did.
    fn reshape(&self) -> bool {
        let offset = self.a_page() * PAGE as u64;
        let done = match one_of(4) {
            0 | 1 => self.file.split(offset),
            2 => self.file.collapse(offset),
            _ => self.file.split_sparse().map(|_| false),
        };
        assert!(matches!(done, Ok(_) | Err(Error::Busy { .. })), "{done:?}");
        done.unwrap_or(false)
    }

    /// Removes pages, or zeroes them.
    fn remove(&self) {
        let offset = self.a_page() * PAGE as u64 + one_of(2) as u64 * SAMPLE as u64;
        let len = [SAMPLE, PAGE, 2 * PAGE][one_of(3)] as u64;
        let done = match one_of(3) {
            0 => self.file.truncate(offset),
            1 => self.file.punch_hole(offset, len).map(drop),
            _ => self.file.zero_range(offset, len),
        };
        assert!(matches!(done, Ok(()) | Err(Error::Busy { .. })), "{done:?}");
    }

    fn disturb(&self) {
        if one_of(7) < 3 { self.remove() } else { _ = self.reshape() }
    }

    /// All bytes of the file are its own.
    fn check_all(&self) {
        for page in 0..self.pages {
            let mut bytes = vec![0; PAGE];
            let len = self.file.read_at(&mut bytes, page * PAGE as u64).unwrap();
            self.check(&bytes[..len]);
        }
    }

    fn act(&self, which: usize) {
        match which {
            0 => self.write(),
            1 => self.read(),
            2 => self.pin(),
            3 => self.hold(),
            RESHAPE => _ = self.reshape(),
            REMOVE => self.remove(),
            _ => self.disturb(),
        }
    }
}

/// Runs threads over two files in many schedules; each thread does the acts in its list. At the end all pages are
/// there, and all memory comes back.
fn model(threads: &'static [&'static [usize]]) {
    let awaited = stats::get(Counter::FoliosAwaited);
    let runs = run_in_many_orders(1, move || {
        let cache = cache();
        let models: Arc<[Model; 2]> = Arc::new([1, 2].map(|byte| Model::new(&cache, byte, PAGES)));
        models.iter().for_each(Model::write);
        let threads: Vec<_> = threads
            .iter()
            .map(|acts| {
                let models = models.clone();
                shuttle::thread::spawn(move || acts.iter().for_each(|act| models[one_of(2)].act(*act)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        models.iter().for_each(Model::check_all);
        drop(models);
        assert_is_empty(&cache);
    });
    assert!(runs < 100 || stats::get(Counter::FoliosAwaited) > awaited, "no two threads met");
}

fn assert_is_empty(cache: &Cache) {
    let usage = cache.usage();
    assert_eq!((usage.charged, usage.huge, usage.small, usage.locked), (0, 0, 0, 0), "{usage:?}");
}

/// Two threads at one range of one file, each with one act: a cell of the table in docs/states-and-locks.md, and its
/// mirror cell. A pinned or held folio is unchanged when its thread looks at it again.
fn beside(first: usize, then: usize) {
    run_in_many_orders(0, move || {
        let cache = cache();
        let model = Arc::new(Model::new(&cache, 1, 2));
        (0..model.pages).for_each(|page| {
            assert_eq!(model.file.write_at(&[1; SAMPLE], page * PAGE as u64).unwrap(), SAMPLE);
        });
        let other = model.clone();
        let other = shuttle::thread::spawn(move || {
            for _ in 0..2 {
                let kept = other.kept.load(Relaxed);
                if then == RESHAPE && first != then {
                    let is_done = other.reshape();
                    let is_kept = kept % 2 == 1 && other.kept.load(Relaxed) == kept;
                    assert!(!(is_done && is_kept), "a kept folio was made another");
                } else {
                    other.act(then);
                }
            }
        });
        (0..2).for_each(|_| model.act(first));
        other.join().unwrap();
        model.check_all();
        drop(model);
        assert_is_empty(&cache);
    });
}

/// Runs random schedules, and schedules with few preemptions (PCT). Returns the number of random ones. Runs `times` as
/// many PCT schedules; 0: a quarter of both.
///
/// One model at a time: all share one arena, and its locks do not see the threads of other models. A thread that waits
/// for one that the system has preempted would make any number of steps.
fn run_in_many_orders(times: usize, run: impl Fn() + Clone + Send + Sync + 'static) -> usize {
    static ALONE: Mutex<()> = Mutex::new(());
    let _exclusive = ALONE.lock();
    let runs: usize =
        std::env::var("SHUTTLE_RUNS").map_or(1000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let (runs, times) = if times == 0 { (runs.div_ceil(4), 1) } else { (runs, times) };
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (BLOCK_BYTES / 4, MaxSteps::FailAfter(MOST_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(DEPTH, times * runs), config()).run(begin);
    runs
}

/// A page moves from one file to the other while a thread reads or pins it in the first. The thread gets the first
/// file's bytes, or none. Free pages are allocated last in, first out, so it is the same memory. The race needs all of
/// the other thread's work at one of a few points, so there are many runs of few steps.
#[test]
fn a_page_that_another_file_takes() {
    run_in_many_orders(MANY, || {
        let cache = cache();
        let models: Arc<[Model; 2]> = Arc::new([1, 2].map(|byte| Model::new(&cache, byte, PAGES)));
        let write = |model: &Model| assert_eq!(model.file.write_at(&vec![model.byte; PAGE], 0).unwrap(), PAGE);
        write(&models[0]);
        let taker = models.clone();
        let taker = shuttle::thread::spawn(move || {
            taker[0].file.truncate(0).unwrap();
            write(&taker[1]);
        });
        let mut bytes = [0; SAMPLE];
        if one_of(2) == 0 {
            let len = models[0].file.read_at(&mut bytes, 0).unwrap();
            models[0].check(&bytes[..len]);
        } else if let Ok(Some(pin)) = models[0].file.pin_present(0) {
            pin.read_at(&mut bytes, 0);
            models[0].check(&bytes);
        }
        taker.join().unwrap();
    });
}

const WRITE: usize = 0;
const READ: usize = 1;
const PIN: usize = 2;
const HOLD: usize = 3;
const RESHAPE: usize = 4;
const REMOVE: usize = 5;
const DISTURB: usize = 6;
/// An act of the background.
const FLUSH: usize = 7;

#[test]
fn readers_beside_one_that_truncates_splits_and_collapses() {
    model(&[&[READ, READ, READ], &[READ, PIN, READ], &[DISTURB, WRITE, DISTURB, DISTURB]]);
}

#[test]
fn writers_beside_one_that_truncates_splits_and_collapses() {
    model(&[&[WRITE, WRITE, WRITE], &[WRITE, READ, WRITE], &[DISTURB, DISTURB, DISTURB]]);
}

#[test]
fn holders_beside_pins_and_truncations() {
    model(&[&[HOLD, HOLD], &[PIN, WRITE, PIN], &[DISTURB, DISTURB, DISTURB]]);
}

#[test]
fn two_that_truncate_split_and_collapse() {
    model(&[&[DISTURB, DISTURB, WRITE], &[DISTURB, WRITE, DISTURB], &[READ, WRITE, READ]]);
}

/// A write begins with a pin, so the table treats them as one.
#[test]
fn pins_beside_splits() {
    beside(PIN, RESHAPE);
}

#[test]
fn pins_beside_removals() {
    beside(PIN, REMOVE);
}

#[test]
fn pins_beside_holders() {
    beside(PIN, HOLD);
}

#[test]
fn reads_beside_reads() {
    beside(READ, READ);
}

#[test]
fn reads_beside_writes() {
    beside(READ, WRITE);
}

#[test]
fn reads_beside_holders() {
    beside(READ, HOLD);
}

#[test]
fn reads_beside_splits() {
    beside(READ, RESHAPE);
}

#[test]
fn reads_beside_removals() {
    beside(READ, REMOVE);
}

#[test]
fn writes_beside_writes() {
    beside(WRITE, WRITE);
}

#[test]
fn writes_beside_holders() {
    beside(WRITE, HOLD);
}

#[test]
fn writes_beside_splits() {
    beside(WRITE, RESHAPE);
}

#[test]
fn writes_beside_removals() {
    beside(WRITE, REMOVE);
}

#[test]
fn holders_beside_holders() {
    beside(HOLD, HOLD);
}

#[test]
fn holders_beside_splits() {
    beside(HOLD, RESHAPE);
}

#[test]
fn holders_beside_removals() {
    beside(HOLD, REMOVE);
}

#[test]
fn splits_beside_splits() {
    beside(RESHAPE, RESHAPE);
}

#[test]
fn splits_beside_removals() {
    beside(RESHAPE, REMOVE);
}

#[test]
fn removals_beside_removals() {
    beside(REMOVE, REMOVE);
}

/// A read beside an append finds the old end, or the new bytes: never zeros that were not written.
#[test]
fn reads_beside_appends() {
    run_in_many_orders(MANY, || {
        let cache = cache();
        let file = Arc::new(cache.create().unwrap());
        let other = file.clone();
        let writer = shuttle::thread::spawn(move || {
            assert_eq!(other.write_at(&[1; SAMPLE], 0).unwrap(), SAMPLE);
        });
        let mut bytes = [9; SAMPLE];
        let len = file.read_at(&mut bytes, 0).unwrap();
        assert!(bytes[..len].iter().all(|byte| *byte == 1), "{len} bytes: {bytes:?}");
        writer.join().unwrap();
    });
}

/// A store of one byte value everywhere. It accepts only that byte and zeros.
struct Same(u8);

impl Store for Same {
    fn size_bytes(&self) -> std::io::Result<u64> {
        Ok(PAGES * PAGE as u64)
    }

    fn block_bytes(&self) -> usize {
        SAMPLE
    }

    fn read(&self, _offset: u64, to: &mut [u8]) -> std::io::Result<()> {
        to.fill(self.0);
        Ok(())
    }

    fn write(&self, _offset: u64, from: &[u8]) -> std::io::Result<()> {
        assert!(from[..SAMPLE].iter().all(|byte| *byte == 0 || *byte == self.0));
        Ok(())
    }

    fn set_size(&self, _size_bytes: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Model {
    /// As the other acts, in a cache that may have no room.
    fn act_in_little_room(&self, act: usize) {
        let at = one_of(PAGES as usize) as u64 * PAGE as u64;
        let mut bytes = [0; SAMPLE];
        let done = match act {
            READ => self.file.read_at(&mut bytes, at),
            WRITE => self.file.write_at(&[self.byte; SAMPLE], at),
            PIN => self.file.pin_present(at).map(|_| 0),
            HOLD => self.file.sync().map(|()| 0),
            FLUSH => Ok(self.file.0.cache.flush().0 as usize),
            _ => match one_of(4) {
                0 => self.file.truncate(at).map(|()| 0),
                1 => self.file.collapse(at).map(|_| 0),
                _ => self.file.split(at).map(|_| 0),
            },
        };
        // Also after a failed read, which may have copied and discarded another file's bytes.
        self.check(&bytes);
        let is_fine = matches!(done, Ok(_) | Err(Error::Busy { .. } | Error::NoMemory { .. } | Error::PastEnd { .. }));
        assert!(is_fine, "{done:?}");
    }
}

/// Folios come in, leave, are split and collapsed, and evict each other, in a cache of three pages. Once all are clean,
/// the order contains each of them, and nothing else.
#[test]
fn folios_that_make_room_beside_such_as_leave() {
    const THREADS: [&[usize]; 3] = [&[READ, READ, READ], &[READ, WRITE, HOLD, PIN], &[WRITE, DISTURB, READ, DISTURB]];
    run_in_many_orders(1, || {
        let cache = cache_of(3 * PAGE as u64);
        let open = |byte| Model { file: cache.open(Arc::new(Same(byte))).unwrap(), ..Model::new(&cache, byte, PAGES) };
        let models: Arc<[Model; 2]> = Arc::new([1, 2].map(open));
        let threads = THREADS.map(|acts| {
            let models = models.clone();
            shuttle::thread::spawn(move || acts.iter().for_each(|act| models[one_of(2)].act_in_little_room(*act)))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        models.iter().for_each(|model| model.file.sync().unwrap());
        cache.0.evict_after_ns.store(0, Relaxed);
        assert!(!cache.0.evict_some(u64::MAX), "all of it is no more than there is");
        assert_eq!((cache.charged_bytes(), cache.0.order.pages()), (0, [0, 0]));
    });
}

/// Writers, which must write back in so little room, beside background writeback, syncs, truncations, collapses and
/// evictions. In the end nothing is dirty that a sync covered, and the counts are correct.
#[test]
fn writing_back_beside_writers_truncations_and_such_as_make_room() {
    const THREADS: [&[usize]; 3] =
        [&[WRITE, WRITE, READ, WRITE], &[FLUSH, HOLD, FLUSH, WRITE], &[DISTURB, WRITE, DISTURB]];
    run_in_many_orders(1, || {
        let writeback = Writeback { age: Duration::ZERO, ..Writeback::default() };
        let cache = cache_with(3 * PAGE as u64, writeback, None);
        let open = |byte| Model { file: cache.open(Arc::new(Same(byte))).unwrap(), ..Model::new(&cache, byte, PAGES) };
        let models: Arc<[Model; 2]> = Arc::new([1, 2].map(open));
        let threads = THREADS.map(|acts| {
            let models = models.clone();
            shuttle::thread::spawn(move || acts.iter().for_each(|act| models[one_of(2)].act_in_little_room(*act)))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        for model in models.iter() {
            let dirty = |file: &Mapping| {
                let (mut at, mut bytes) = (0, 0);
                while let Some(found) = { file.0.tree.next(at, PAGES, &pagemill_xarray::pin()) } {
                    let is_dirty = file.0.pool().word(found.value as u32).load().is_dirty();
                    let is_marked = file.0.tree.get_mark(found.first, dirty::DIRTY, &pagemill_xarray::pin());
                    assert!(is_marked || !is_dirty, "no writeback would find it");
                    bytes += if is_dirty { (PAGE as u64) << found.order } else { 0 };
                    at = found.last() + 1;
                }
                bytes
            };
            assert_eq!(model.file.dirty_bytes(), dirty(&model.file));
            model.file.sync().unwrap();
            assert_eq!((model.file.dirty_bytes(), dirty(&model.file)), (0, 0));
        }
        assert_eq!(cache.dirty_bytes(), 0);
        cache.0.evict_after_ns.store(0, Relaxed);
        assert!(!cache.0.evict_some(u64::MAX), "all of it is no more than there is");
        assert_eq!((cache.charged_bytes(), cache.0.order.pages()), (0, [0, 0]));
    });
}

/// As [`Same`], but another thread ends its reads later, in any order; some fail.
struct Late(Same, Mutex<Vec<Transfer>>);

impl Late {
    /// Ends one read. Returns whether there was one.
    fn end_one(&self) -> bool {
        let mut reads = self.1.lock().unwrap();
        let count = reads.len();
        let next = (count > 0).then(|| reads.swap_remove(one_of(count)));
        drop(reads);
        let is_there = next.is_some();
        match next {
            Some(read) if one_of(8) == 0 => drop(read),
            Some(read) => read.run(self),
            None => {}
        }
        is_there
    }
}

impl Store for Late {
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
        // Writes are done at once: writeback would wait for them outside of shuttle, which would stop all threads.
        let is_read = |transfer: &Transfer| transfer.direction() == Direction::Read;
        let (reads, writes): (Vec<_>, Vec<_>) = batch.into_iter().partition(is_read);
        writes.into_iter().for_each(|write| write.run(self));
        self.1.lock().unwrap().extend(reads);
    }
}

impl Model {
    /// Starts an asynchronous read, and perhaps drops it.
    fn read_as_task(&self) {
        let mut bytes = [0; SAMPLE];
        let at = self.a_page() * PAGE as u64;
        let mut reading = Box::pin(self.file.read_async(&mut bytes, at));
        for _ in 0..one_of(4) {
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
        self.check(&bytes);
    }

    /// As [`Model::act_in_little_room`], with a store that ends reads in the background, or never.
    fn act_beside_reads(&self, act: usize) {
        let mut bytes = [0; SAMPLE];
        let at = self.a_page() * PAGE as u64;
        match act {
            TASK => self.read_as_task(),
            READ => match self.file.read_at(&mut bytes, at) {
                Ok(len) => self.check(&bytes[..len]),
                Err(error) => {
                    assert!(matches!(error, Error::Busy { .. } | Error::NoMemory { .. } | Error::Store { .. }))
                }
            },
            WRITE => match self.file.write_at(&[self.byte; SAMPLE], at) {
                Ok(len) => assert_eq!(len, SAMPLE),
                Err(error) => assert!(matches!(error, Error::NoMemory { .. } | Error::Store { .. })),
            },
            other => self.act_in_little_room(other),
        }
    }
}

const TASK: usize = 7;

/// Reads end on another thread, some with errors, beside reads, writes, truncations, splits and evictions. Waiting
/// threads continue, the file gets its own bytes, and no memory is lost.
#[test]
fn reads_behind_beside_all_others() {
    const THREADS: [&[usize]; 3] = [&[READ, TASK, READ], &[TASK, WRITE, HOLD, TASK], &[DISTURB, TASK, DISTURB, READ]];
    const HOUR: Duration = Duration::from_secs(3600);
    run_in_many_orders(1, || {
        let cache = cache_with(3 * PAGE as u64, Writeback::default(), Some(HOUR));
        let store = Arc::new(Late(Same(1), Mutex::default()));
        let model = Model { file: cache.open(store.clone()).unwrap(), ..Model::new(&cache, 1, PAGES) };
        let model = Arc::new(model);
        let is_over = Arc::new(AtomicBool::new(false));
        let ender = {
            let (store, is_over) = (store.clone(), is_over.clone());
            shuttle::thread::spawn(move || {
                while store.end_one() || !is_over.load(Relaxed) {
                    pause();
                }
            })
        };
        let threads = THREADS.map(|acts| {
            let model = model.clone();
            shuttle::thread::spawn(move || acts.iter().for_each(|act| model.act_beside_reads(*act)))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        is_over.store(true, Relaxed);
        ender.join().unwrap();
        // A part of a split huge folio may be dirty behind the end: it is written back once it is inside.
        model.file.truncate(PAGES * PAGE as u64).unwrap();
        model.file.sync().unwrap();
        cache.0.evict_after_ns.store(0, Relaxed);
        assert!(!cache.0.evict_some(u64::MAX), "all of it is no more than there is");
        assert_eq!((cache.charged_bytes(), cache.0.order.pages()), (0, [0, 0]));
        assert_eq!(Arc::strong_count(&store), 2, "the file and this");
    });
}
