//! Whole caches in random schedules: threads allocate and free objects while others drain their magazines and move the
//! objects.
//!
//! Objects are so large that a sheaf has two and a slab four of them, so a few steps reach every path. `SHUTTLE_RUNS`
//! sets the number of runs of each model.
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

/// Preemptions in a PCT schedule.
const DEPTH: usize = 4;

/// Bound on the steps of a run; a longer run waits for an event that never comes.
const MOST_STEPS: usize = 300_000;

/// Words of a value; with the cache's own bytes it is 16 KiB.
const WORDS: usize = (16 << 10) / size_of::<u64>() - 3;

fn one_of(count: usize) -> usize {
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

/// Whether runs behave as if the kernel refused the process-wide barrier.
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

fn slabs() -> &'static Slabs {
    static SLABS: [OnceLock<&'static Slabs>; 2] = [const { OnceLock::new() }; 2];
    SLABS[usize::from(IS_REFUSED.load(Relaxed))].get_or_init(new_slabs)
}

fn run_in_many_orders(run: impl Fn() + Clone + Send + Sync + 'static) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(1000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    run_in_orders(runs, run);
}

/// Runs with both kinds of barriers.
fn run_in_orders(runs: usize, run: impl Fn() + Clone + Send + Sync + 'static) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (1 << 20, MaxSteps::FailAfter(MOST_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    for is_refused in [false, true] {
        IS_REFUSED.store(is_refused, Relaxed);
        Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
        Runner::new(PctScheduler::new(DEPTH, runs), config()).run(begin.clone());
    }
}

/// A value with a known content that counts live values.
struct Value {
    number: u64,
    live: Arc<AtomicUsize>,
    words: [u64; WORDS],
}

// SAFETY: numbers and a pointer.
unsafe impl Movable for Value {}

impl Value {
    fn new(number: u64, live: &Arc<AtomicUsize>) -> Self {
        live.fetch_add(1, Relaxed);
        Self { number, live: live.clone(), words: [number; WORDS] }
    }

    fn check(&self, number: u64) {
        assert_eq!((self.number, self.words[0], self.words[WORDS - 1]), (number, number, number));
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        assert_eq!(self.words[0], self.number);
        self.words[0] = u64::MAX;
        self.live.fetch_sub(1, Relaxed);
    }
}

fn is_fine<T>(done: Result<T>) {
    assert!(matches!(done, Ok(_) | Err(Error::Busy { .. })), "{:?}", done.err());
}

/// Two threads allocate and free objects, some of them each other's, while a third drains everything: no object is given
/// out twice or lost.
#[test]
fn magazines_that_are_emptied() {
    run_in_many_orders(|| {
        let cache: &'static Fixed<Value> = Box::leak(Box::new(slabs().fixed(Settings::new("model")).unwrap()));
        let live = Arc::new(AtomicUsize::new(0));
        let passed = Arc::new(pagemill_core::sync::Guarded::new(Vec::new()));
        let threads: Vec<_> = (0..2)
            .map(|thread| {
                let (live, passed) = (live.clone(), passed.clone());
                shuttle::thread::spawn(move || {
                    let mut slots = Vec::new();
                    for number in 0..8 {
                        let number = thread * 100 + number;
                        if one_of(2) == 0 || slots.is_empty() {
                            let slot = cache.insert(Value::new(number, &live)).unwrap();
                            slots.push((number, slot));
                        } else if one_of(3) == 0 {
                            // The other thread, or the end of the test, frees it.
                            let (number, slot) = slots.swap_remove(one_of(slots.len()));
                            slot.check(number);
                            passed.with(|passed| passed.push(slot));
                        } else {
                            let (number, slot) = slots.swap_remove(one_of(slots.len()));
                            slot.check(number);
                        }
                        drop(passed.with(Vec::pop));
                    }
                    slots.iter().for_each(|(number, slot)| slot.check(*number));
                })
            })
            .collect();
        is_fine(cache.shrink());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        drop(passed.with(std::mem::take));
        cache.shrink().unwrap();
        cache.engine().check_state();
        assert_eq!((live.load(Relaxed), cache.info().unwrap().total.used), (0, 0));
        // SAFETY: made above by `Box::leak`; its slots are dropped.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(cache).cast_mut()) });
    });
}

/// Threads insert, read, change, pin and remove values while another packs: each handle finds its own value, or nothing
/// after its removal. Each value is dropped once.
#[test]
fn values_that_are_moved() {
    run_in_many_orders(|| {
        let cache = Arc::new(slabs().by_handle::<Value>(Settings::new("model")).unwrap());
        let live = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..9).map(|number| cache.insert(Value::new(number, &live)).unwrap()).collect();
        // Leaves values in each of three slabs.
        for handle in [0, 1, 2, 4, 5, 7] {
            assert!(cache.remove(handles[handle]).unwrap());
        }
        let left = [3, 6, 8];
        let threads: Vec<_> = (0..2)
            .map(|thread| {
                let (cache, live, handles) = (cache.clone(), live.clone(), handles.clone());
                shuttle::thread::spawn(move || {
                    for _ in 0..4 {
                        let number = left[one_of(3)];
                        let handle = handles[number as usize];
                        match one_of(if thread == 0 { 3 } else { 5 }) {
                            0 => {
                                let guard = pin();
                                if let Some(value) = cache.get(handle, &guard) {
                                    value.check(number);
                                    shuttle::thread::yield_now();
                                    value.check(number);
                                }
                            }
                            1 => {
                                if let Some(pinned) = cache.pin_value(handle).unwrap() {
                                    pinned.check(number);
                                    shuttle::thread::yield_now();
                                    pinned.check(number);
                                }
                            }
                            2 => is_fine(cache.update(handle, |old| Value::new(old.number, &live))),
                            3 => is_fine(cache.remove(handle)),
                            _ => {
                                let handle = cache.insert(Value::new(77, &live)).unwrap();
                                cache.get(handle, &pin()).unwrap().check(77);
                            }
                        }
                    }
                })
            })
            .collect();
        match one_of(3) {
            0 => is_fine(cache.defrag_step(Duration::from_secs(1))),
            1 => is_fine(cache.move_objects(0, 0, 1)),
            _ => is_fine(cache.shrink()),
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        cache.shrink().unwrap();
        cache.engine().check_state();
        let info = cache.info().unwrap();
        assert_eq!(info.active, live.load(Relaxed) as u64);
        assert!(info.total.partial <= 1, "{info:?}");
        for number in left {
            cache.get(handles[number as usize], &pin()).into_iter().for_each(|value| value.check(number));
        }
        drop(cache);
        assert_eq!(live.load(Relaxed), 0);
    });
}

/// Nine values, of which one is left in each of three slabs, with a fresh background thread.
fn sparse_values(live: &Arc<AtomicUsize>) -> (ByHandle<Value>, [Handle<Value>; 3]) {
    slabs().worker.reset();
    let settings = Settings { defrag_used_ratio: 100, ..Settings::new("model") };
    let cache = slabs().by_handle(settings).unwrap();
    let handles: Vec<_> = (0..9).map(|number| cache.insert(Value::new(number, live)).unwrap()).collect();
    for handle in [0, 1, 2, 4, 5, 7] {
        assert!(cache.remove(handles[handle]).unwrap());
    }
    let left = [3, 6, 8].map(|handle| handles[handle]);
    (cache, left)
}

fn end_thread_behind() {
    slabs().defrag_by_hand();
    while slabs().worker.is_started() {
        shuttle::thread::yield_now();
    }
}

fn linger(most: usize) {
    (0..one_of(most)).for_each(|_| shuttle::thread::yield_now());
}

/// Once the background is stopped nothing is moved or dropped by it, at any point of its work.
#[test]
fn nothing_begins_once_it_is_turned_off() {
    run_in_many_orders(|| {
        let live = Arc::new(AtomicUsize::new(0));
        let (cache, _) = sparse_values(&live);
        slabs().worker.notify();
        linger(40);
        slabs().defrag_by_hand();
        let done = || (cache.info().unwrap().moved, live.load(Relaxed));
        let before = done();
        linger(200);
        assert_eq!(done(), before);
        end_thread_behind();
    });
}

/// Removed values are dropped without another call: no wake-up of the background thread is lost.
#[test]
fn no_sign_is_lost() {
    run_in_many_orders(|| {
        let live = Arc::new(AtomicUsize::new(0));
        let (cache, left) = sparse_values(&live);
        for handle in left {
            linger(40);
            assert!(cache.remove(handle).unwrap());
        }
        while live.load(Relaxed) > 0 {
            shuttle::thread::yield_now();
        }
        drop(cache);
        end_thread_behind();
    });
}

/// A value without a destructor: threads keep its place in stock until readers have finished.
#[derive(Clone)]
struct Plain {
    number: u64,
    _words: [u64; WORDS],
    /// At the end, to detect a partly overwritten value.
    last: u64,
}

// SAFETY: numbers.
unsafe impl Movable for Plain {}

impl Plain {
    fn new(number: u64) -> Self {
        Self { number, _words: [0; WORDS], last: number }
    }

    fn check(&self, number: u64) {
        assert_eq!((self.number, self.last), (number, number));
    }
}

/// Threads read values under guards for some steps, change and remove them, and insert others, which reuse the places. No
/// reader sees another value under its guard, with or without packing, and all places are freed.
#[test]
fn places_that_are_used_again() {
    run_in_many_orders(|| {
        let cache = Arc::new(slabs().by_handle::<Plain>(Settings::new("model")).unwrap());
        let handles: Vec<_> = (0..4).map(|number| cache.insert(Plain::new(number)).unwrap()).collect();
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (cache, handles) = (cache.clone(), handles.clone());
                shuttle::thread::spawn(move || {
                    for _ in 0..4 {
                        let number = one_of(4) as u64;
                        let handle = handles[number as usize];
                        match one_of(4) {
                            0 | 1 => {
                                let guard = pin();
                                if let Some(value) = cache.get(handle, &guard) {
                                    for _ in 0..3 {
                                        value.check(number);
                                        shuttle::thread::yield_now();
                                    }
                                    value.check(number);
                                }
                            }
                            2 => is_fine(cache.update(handle, |old| Plain::new(old.number))),
                            _ => is_fine(cache.remove_with(handle, |value| {
                                value.check(number);
                                shuttle::thread::yield_now();
                                value.check(number);
                            })),
                        }
                        let own = cache.insert(Plain::new(77)).unwrap();
                        cache.get(own, &pin()).unwrap().check(77);
                        assert!(cache.remove(own).unwrap() && cache.get(own, &pin()).is_none());
                    }
                })
            })
            .collect();
        if one_of(2) == 0 {
            is_fine(cache.shrink());
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        cache.shrink().unwrap();
        cache.engine().check_state();
        let left = handles.iter().filter(|handle| cache.get(**handle, &pin()).is_some()).count();
        assert_eq!(cache.info().unwrap().active, left as u64);
    });
}

/// Values come and go beside the background thread. Meanwhile another thread shrinks all caches, forks or stops the
/// background, and the cache is dropped at any moment. Afterwards all values are dropped, and nothing starts after the
/// stop.
#[test]
fn the_thread_behind() {
    run_in_many_orders(|| {
        let (slabs, live) = (slabs(), Arc::new(AtomicUsize::new(0)));
        let failed = stats::get(Counter::SlabBehindFailed);
        let (cache, left) = sparse_values(&live);
        slabs.worker.notify();
        let other = shuttle::thread::spawn(move || match one_of(3) {
            0 => slabs.defrag_by_hand(),
            1 => {
                slabs.worker.acquire_for_fork();
                slabs.worker.release_after_fork();
            }
            _ => slabs.members().iter().for_each(|member| is_fine(member.shrink())),
        });
        for (handle, number) in left.into_iter().zip([3, 6, 8]) {
            cache.get(handle, &pin()).unwrap().check(number);
            if one_of(2) == 0 {
                is_fine(cache.remove(handle));
            }
        }
        drop(cache);
        assert_eq!(live.load(Relaxed), 0);
        other.join().unwrap();
        end_thread_behind();
        assert_eq!((stats::get(Counter::SlabBehindFailed), slabs.member_count()), (failed, 0));
    });
}
