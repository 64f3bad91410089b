//! Caches in random schedules: threads allocate and free objects while other threads drain their magazines and move the
//! objects.
//!
//! Objects are so large that a sheaf has two and a slab has four, so a few steps reach every path. `SHUTTLE_RUNS` sets
//! the number of runs of each test.
#![allow(unsafe_code)] // implements `Movable`; frees a leaked box

use super::*;
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::Account;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::sync::modelled::reset_clock;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

/// Depth of the PCT (probabilistic concurrency testing) schedules: at up to `PCT_DEPTH - 1` random steps, the running
/// thread gets the lowest priority.
const PCT_DEPTH: usize = 4;

/// Maximum number of steps in a run. A longer run is considered to wait for an event that never happens.
const MAX_STEPS: usize = 300_000;

/// Number of words in the body of a value. With the other fields, a value has 16 KiB.
const VALUE_WORDS: usize = (16 << 10) / size_of::<u64>() - 3;

fn random_below(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

fn new_slabs() -> &'static Slabs {
    let arena = place(Arena::new(Layout::for_test(), Account::make(UNLIMITED).unwrap()).unwrap()).unwrap();
    let slabs: &'static Slabs = place(Slabs::new(arena)).unwrap();
    slabs.defrag_by_hand();
    if IS_REFUSED.load(Relaxed) {
        slabs.refuse_barrier();
    }
    slabs
}

/// Whether the current runs of a test behave as if the kernel refused the process-wide barrier.
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

fn slabs() -> &'static Slabs {
    static SLABS: [OnceLock<&'static Slabs>; 2] = [const { OnceLock::new() }; 2];
    SLABS[usize::from(IS_REFUSED.load(Relaxed))].get_or_init(new_slabs)
}

fn run_in_many_schedules(run: impl Fn() + Clone + Send + Sync + 'static) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(1000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    run_in_schedules(runs, run);
}

/// Runs a test in `runs` random schedules, once with the process-wide barrier and once as if the kernel refused it.
fn run_in_schedules(runs: usize, run: impl Fn() + Clone + Send + Sync + 'static) {
    static TEST_LOCK: Mutex<()> = Mutex::new(());
    let _alone = TEST_LOCK.lock();
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (1 << 20, MaxSteps::FailAfter(MAX_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    for is_refused in [false, true] {
        IS_REFUSED.store(is_refused, Relaxed);
        Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
        Runner::new(PctScheduler::new(PCT_DEPTH, runs), config()).run(begin.clone());
    }
}

/// A value with known contents, which is counted in `live` while it exists.
struct Value {
    number: u64,
    live: Arc<AtomicUsize>,
    words: [u64; VALUE_WORDS],
}

// SAFETY: numbers and a pointer can be copied byte by byte.
unsafe impl Movable for Value {}

impl Value {
    fn new(number: u64, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(1, Relaxed);
        Self { number, live: live.clone(), words: [number; VALUE_WORDS] }
    }

    fn check(&self, number: u64) {
        assert_eq!((self.number, self.words[0], self.words[VALUE_WORDS - 1]), (number, number, number));
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        assert_eq!(self.words[0], self.number);
        self.words[0] = u64::MAX;
        self.live.fetch_sub(1, Relaxed);
    }
}

fn assert_ok_or_busy<T>(done: Result<T>) {
    assert!(matches!(done, Ok(_) | Err(Error::Busy { .. })), "{:?}", done.err());
}

/// Two threads allocate and free objects, some of them each other's, while a third thread drains all magazines. No
/// object may be allocated twice or lost.
#[test]
fn drain_neither_loses_nor_duplicates_objects() {
    run_in_many_schedules(|| {
        let cache: &'static FixedSlab<Value> = Box::leak(Box::new(slabs().fixed(Settings::new("model")).unwrap()));
        let live = Arc::new(AtomicUsize::new(0));
        let passed = Arc::new(pagemill_core::sync::Guarded::new(Vec::new()));
        let threads: Vec<_> = (0..2)
            .map(|thread| {
                let (live, passed) = (live.clone(), passed.clone());
                shuttle::thread::spawn(move || {
                    let mut slots = Vec::new();
                    for number in 0..8 {
                        let number = thread * 100 + number;
                        if random_below(2) == 0 || slots.is_empty() {
                            let slot = cache.insert(Value::new(number, &live)).unwrap();
                            slots.push((number, slot));
                        } else if random_below(3) == 0 {
                            // The other thread, or the end of the test, frees the slot.
                            let (number, slot) = slots.swap_remove(random_below(slots.len()));
                            slot.check(number);
                            passed.with(|passed| passed.push(slot));
                        } else {
                            let (number, slot) = slots.swap_remove(random_below(slots.len()));
                            slot.check(number);
                        }
                        drop(passed.with(Vec::pop));
                    }
                    slots.iter().for_each(|(number, slot)| slot.check(*number));
                })
            })
            .collect();
        assert_ok_or_busy(cache.shrink());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        drop(passed.with(std::mem::take));
        cache.shrink().unwrap();
        cache.engine().check_state();
        assert_eq!((live.load(Relaxed), cache.info().unwrap().total.used), (0, 0));
        // SAFETY: made above by `Box::leak`; its slots are dropped.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(cache).cast_mut()) });
    });
}

/// Threads insert, read, change, pin and remove values while another thread packs the cache. Each handle must lead to
/// its own value, or to no value after the removal. Each value must be dropped once.
#[test]
fn handles_find_their_values_during_moves() {
    run_in_many_schedules(|| {
        let cache = Arc::new(slabs().by_handle::<Value>(Settings::new("model")).unwrap());
        let live = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..9).map(|number| cache.insert(Value::new(number, &live)).unwrap()).collect();
        // Leaves one value in each of three slabs.
        for handle in [0, 1, 2, 4, 5, 7] {
            assert!(cache.remove(handles[handle]).unwrap().is_some());
        }
        let left = [3, 6, 8];
        let threads: Vec<_> = (0..2)
            .map(|thread| {
                let (cache, live, handles) = (cache.clone(), live.clone(), handles.clone());
                shuttle::thread::spawn(move || {
                    for _ in 0..4 {
                        let number = left[random_below(3)];
                        let handle = handles[number as usize];
                        match random_below(if thread == 0 { 3 } else { 5 }) {
                            0 => {
                                let guard = enter();
                                if let Some(value) = cache.get(handle, &guard) {
                                    value.check(number);
                                    shuttle::thread::yield_now();
                                    value.check(number);
                                }
                            }
                            1 => {
                                if let Some(pinned) = cache.pin(handle).unwrap() {
                                    pinned.check(number);
                                    shuttle::thread::yield_now();
                                    pinned.check(number);
                                }
                            }
                            2 => assert_ok_or_busy(cache.update(handle, |old| Value::new(old.number, &live))),
                            3 => assert_ok_or_busy(cache.remove(handle)),
                            _ => {
                                let handle = cache.insert(Value::new(77, &live)).unwrap();
                                cache.get(handle, &enter()).unwrap().check(77);
                            }
                        }
                    }
                })
            })
            .collect();
        match random_below(3) {
            0 => assert_ok_or_busy(cache.defrag_step(Duration::from_secs(1))),
            1 => assert_ok_or_busy(cache.move_objects(0, 0, 1)),
            _ => assert_ok_or_busy(cache.shrink()),
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        cache.shrink().unwrap();
        cache.engine().check_state();
        let info = cache.info().unwrap();
        assert_eq!(info.active, live.load(Relaxed) as u64);
        assert!(info.total.partial <= 1, "{info:?}");
        for number in left {
            cache.get(handles[number as usize], &enter()).into_iter().for_each(|value| value.check(number));
        }
        drop(cache);
        assert_eq!(live.load(Relaxed), 0);
    });
}

/// Creates a cache with one value in each of three slabs, and resets the background thread.
fn cache_with_three_slabs(live: &Arc<AtomicUsize>) -> (HandleMap<Value>, [Handle<Value>; 3]) {
    slabs().worker.reset();
    let settings = Settings::new("model").defrag_used_ratio(100);
    let cache = slabs().by_handle(settings).unwrap();
    let handles: Vec<_> = (0..9).map(|number| cache.insert(Value::new(number, live)).unwrap()).collect();
    for handle in [0, 1, 2, 4, 5, 7] {
        assert!(cache.remove(handles[handle]).unwrap().is_some());
    }
    let left = [3, 6, 8].map(|handle| handles[handle]);
    (cache, left)
}

fn stop_background() {
    slabs().defrag_by_hand();
    while slabs().worker.is_started() {
        shuttle::thread::yield_now();
    }
}

fn yield_some_times(most: usize) {
    (0..random_below(most)).for_each(|_| shuttle::thread::yield_now());
}

/// The background thread is stopped at any point of its work. After that, it must not move or drop values.
#[test]
fn stopped_background_moves_nothing() {
    run_in_many_schedules(|| {
        let live = Arc::new(AtomicUsize::new(0));
        let (cache, _) = cache_with_three_slabs(&live);
        slabs().worker.notify();
        yield_some_times(40);
        slabs().defrag_by_hand();
        let done = || (cache.info().unwrap().moved, live.load(Relaxed));
        let before = done();
        yield_some_times(200);
        assert_eq!(done(), before);
        stop_background();
    });
}

/// Values are removed at random times. All of them must be dropped without a further call: no wake-up of the background
/// thread may be lost.
#[test]
fn no_wakeup_of_the_background_is_lost() {
    run_in_many_schedules(|| {
        let live = Arc::new(AtomicUsize::new(0));
        let (cache, left) = cache_with_three_slabs(&live);
        for handle in left {
            yield_some_times(40);
            assert!(cache.remove(handle).unwrap().is_some());
        }
        while live.load(Relaxed) > 0 {
            shuttle::thread::yield_now();
        }
        drop(cache);
        stop_background();
    });
}

/// A few objects are freed at random times, while other work wakes the background thread. A round must begin after each
/// free: the thread must not sleep without a timeout before that.
#[test]
fn each_free_is_followed_by_a_round() {
    run_in_many_schedules(|| {
        let worker = &slabs().worker;
        worker.reset();
        worker.start(slabs());
        let other = shuttle::thread::spawn(|| {
            yield_some_times(40);
            slabs().worker.notify();
        });
        for _ in 0..3 {
            yield_some_times(40);
            worker.note_frees();
            while worker.has_frees() {
                shuttle::thread::yield_now();
            }
        }
        other.join().unwrap();
        stop_background();
    });
}

/// A value without a destructor. After its removal, its object waits for readers in the stock of a thread.
#[derive(Clone)]
struct Plain {
    number: u64,
    _words: [u64; VALUE_WORDS],
    /// The last word of the value, by which a partly overwritten value is detected.
    last: u64,
}

// SAFETY: numbers can be copied byte by byte.
unsafe impl Movable for Plain {}

impl Plain {
    fn new(number: u64) -> Self {
        Self { number, _words: [0; VALUE_WORDS], last: number }
    }

    fn check(&self, number: u64) {
        assert_eq!((self.number, self.last), (number, number));
    }
}

/// Threads read values under guards for several steps, change and remove them, and insert others, which reuse the
/// memory. No reader may see another value under its guard, with or without packing. All memory must be freed at the
/// end.
#[test]
fn readers_never_see_reused_memory() {
    run_in_many_schedules(|| {
        let cache = Arc::new(slabs().by_handle::<Plain>(Settings::new("model")).unwrap());
        let handles: Vec<_> = (0..4).map(|number| cache.insert(Plain::new(number)).unwrap()).collect();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (cache, handles) = (cache.clone(), handles.clone());
                shuttle::thread::spawn(move || {
                    for _ in 0..4 {
                        let number = random_below(4) as u64;
                        let handle = handles[number as usize];
                        match random_below(4) {
                            0 | 1 => {
                                let guard = enter();
                                if let Some(value) = cache.get(handle, &guard) {
                                    for _ in 0..3 {
                                        value.check(number);
                                        shuttle::thread::yield_now();
                                    }
                                    value.check(number);
                                }
                            }
                            2 => assert_ok_or_busy(cache.update(handle, |old| Plain::new(old.number))),
                            _ => assert_ok_or_busy(cache.remove_with(handle, |value| {
                                value.check(number);
                                shuttle::thread::yield_now();
                                value.check(number);
                            })),
                        }
                        let own = cache.insert(Plain::new(77)).unwrap();
                        cache.get(own, &enter()).unwrap().check(77);
                        assert!(cache.remove(own).unwrap().is_some() && cache.get(own, &enter()).is_none());
                    }
                })
            })
            .collect();
        if random_below(2) == 0 {
            assert_ok_or_busy(cache.shrink());
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        cache.shrink().unwrap();
        cache.engine().check_state();
        let left = handles.iter().filter(|handle| cache.get(**handle, &enter()).is_some()).count();
        assert_eq!(cache.info().unwrap().active, left as u64);
    });
}

/// Values are removed and their cache is dropped while the background thread runs, and while another thread shrinks all
/// caches, forks or stops the background thread. All values must be dropped, no visit may fail, and no cache may be
/// left.
#[test]
fn background_runs_beside_fork_stop_and_drop() {
    run_in_many_schedules(|| {
        let (slabs, live) = (slabs(), Arc::new(AtomicUsize::new(0)));
        let failed = stats::get(Counter::SlabBehindFailed);
        let (cache, left) = cache_with_three_slabs(&live);
        slabs.worker.notify();
        let other = shuttle::thread::spawn(move || match random_below(3) {
            0 => slabs.defrag_by_hand(),
            1 => {
                slabs.worker.acquire_for_fork();
                slabs.worker.release_after_fork();
            }
            _ => slabs.caches().iter().for_each(|cache| assert_ok_or_busy(cache.shrink())),
        });
        for (handle, number) in left.into_iter().zip([3, 6, 8]) {
            cache.get(handle, &enter()).unwrap().check(number);
            if random_below(2) == 0 {
                assert_ok_or_busy(cache.remove(handle));
            }
        }
        drop(cache);
        assert_eq!(live.load(Relaxed), 0);
        other.join().unwrap();
        stop_background();
        assert_eq!((stats::get(Counter::SlabBehindFailed), slabs.cache_count()), (failed, 0));
    });
}
