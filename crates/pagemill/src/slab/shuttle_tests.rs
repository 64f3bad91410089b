//! Whole caches, step by step in orders drawn at random: threads take and give objects while others empty their magazines and
//! move what they hold.
//!
//! Objects are so large that a sheaf is two of them and a slab four: few steps do all there is to do. `SHUTTLE_RUNS` says how
//! many of each model.
#![allow(unsafe_code)] // says that values are movable, takes down what a run has made

use super::*;
use crate::arena::Layout;
use crate::reclaim::Account;
use crate::reclaim::tree::UNLIMITED;
use crate::sync::Relaxed;
use crate::sync::modelled::reset_clock;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// Preemptions that a schedule of PCT has.
const DEPTH: usize = 4;

/// No run is so long; one that is waits for something that never comes.
const MOST_STEPS: usize = 300_000;

/// Words of a value; with what the cache adds it is 16 KiB.
const WORDS: usize = (16 << 10) / size_of::<u64>() - 3;

fn one_of(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

fn slabs() -> &'static Slabs {
    static SLABS: OnceLock<&'static Slabs> = OnceLock::new();
    SLABS.get_or_init(|| {
        let arena = place(Arena::new(Layout::for_test(), Account::make(UNLIMITED).unwrap()).unwrap()).unwrap();
        place(Slabs::new(arena)).unwrap()
    })
}

fn run_in_many_orders(run: impl Fn() + Clone + Send + Sync + 'static) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock();
    let runs: usize =
        std::env::var("SHUTTLE_RUNS").map_or(1000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (1 << 20, MaxSteps::FailAfter(MOST_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(DEPTH, runs), config()).run(begin);
}

/// A value that says whose it is, and counts itself.
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

/// Two threads take and give objects, and one gives what the other took, while a third empties everything: none is two
/// threads', and none is lost.
#[test]
fn magazines_that_are_emptied() {
    run_in_many_orders(|| {
        let cache: &'static Fixed<Value> = Box::leak(Box::new(slabs().fixed(Settings::new("model")).unwrap()));
        let live = Arc::new(AtomicUsize::new(0));
        let passed = Arc::new(crate::sync::Guarded::new(Vec::new()));
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
                            // The other thread, or the end, gives it back.
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
        cache.engine().check_books();
        assert_eq!((live.load(Relaxed), cache.info().unwrap().total.used), (0, 0));
        // SAFETY: made above, by `Box::leak`; its slots have gone.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(cache).cast_mut()) });
    });
}

/// Threads insert, read, change, pin and remove values that another packs: each finds its own, or nothing once it is gone, and
/// each value is dropped once.
#[test]
fn values_that_are_moved() {
    run_in_many_orders(|| {
        let cache = Arc::new(slabs().by_handle::<Value>(Settings::new("model")).unwrap());
        let live = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..9).map(|number| cache.insert(Value::new(number, &live)).unwrap()).collect();
        // Of three slabs something is left in each.
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
        cache.engine().check_books();
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
