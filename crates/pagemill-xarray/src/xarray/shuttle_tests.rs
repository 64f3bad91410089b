//! Two readers, a writer and a thread that moves nodes, over few indices, scheduled step by step in random orders.
//!
//! There are only a few nodes, and they are watched: a retired node is reused as soon as no reader can access it. So a
//! reader without its guard would find slots of another node. `SHUTTLE_RUNS` is the number of runs of each model.

#![allow(unsafe_code)] // arrays with a stable address

use super::arrays::Arrays;
use super::*;
use pagemill_core::error::Result;
use pagemill_core::sync::modelled::reset_clock;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::Arc;
use std::sync::Mutex;

/// Number of preemptions in a PCT schedule.
const DEPTH: usize = 4;

/// No run is this long; a longer one waits for an event that never comes.
const MOST_STEPS: usize = 100_000;

/// Number of nodes in a model.
const NODES: u32 = 40;

/// Nodes with their own grace periods: those of the default collector cannot be modelled.
struct FewNodes {
    nodes: [Node; NODES as usize],
    arrays: Arrays<Self>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<u32>,
    in_use: u32,
    /// Time; increases by one when a reader begins, and when a node is retired.
    now: u64,
    /// The start times of current readers.
    readers: Vec<u64>,
    retired: Vec<(u64, u32)>,
}

impl FewNodes {
    /// Returns the state of this thread, which runs one model after the other, reset to its initial contents.
    fn anew() -> &'static Self {
        thread_local! {
            static FEW: &'static FewNodes = Box::leak(Box::new(FewNodes {
                nodes: [const { Node::new() }; NODES as usize],
                arrays: Arrays::new().unwrap(),
                state: Mutex::default(),
            }));
        }
        let few = FEW.with(|few| *few);
        few.nodes.iter().for_each(Node::clear);
        *few.state.lock().unwrap() = State { free: (1..=NODES).collect(), ..State::default() };
        few
    }

    /// Runs `read` as a reader, with its guard and its grace period.
    fn reading<T>(&self, read: impl FnOnce(&pagemill_core::epoch::Guard) -> T) -> T {
        let began = {
            let mut state = self.state.lock().unwrap();
            state.now += 1;
            let now = state.now;
            state.readers.push(now);
            now
        };
        let result = read(&pin());
        self.state.lock().unwrap().readers.retain(|reader| *reader != began);
        self.recycle();
        result
    }

    /// Returns the nodes that were retired before the first current reader began.
    fn recycle(&self) {
        let mut state = self.state.lock().unwrap();
        let first = state.readers.iter().min().copied().unwrap_or(u64::MAX);
        let (over, waiting) = state.retired.drain(..).partition::<Vec<_>, _>(|(at, _)| *at < first);
        state.retired = waiting;
        drop(state);
        over.into_iter().for_each(|(_, number)| self.give(number));
    }
}

impl Nodes for FewNodes {
    fn node(&self, number: u32) -> &Node {
        &self.nodes[number as usize - 1]
    }

    fn take(&self) -> Result<u32> {
        let mut state = self.state.lock().unwrap();
        state.in_use += 1;
        Ok(state.free.pop().expect("a model is small"))
    }

    fn give(&self, number: u32) {
        let mut state = self.state.lock().unwrap();
        state.in_use -= 1;
        state.free.push(number);
    }

    fn retire(&'static self, number: u32) {
        let mut state = self.state.lock().unwrap();
        state.now += 1;
        let now = state.now;
        state.retired.push((now, number));
        drop(state);
        self.recycle();
    }

    fn arrays(&self) -> &Arrays<Self> {
        &self.arrays
    }
}

struct Fixture {
    nodes: &'static FewNodes,
    array: Box<XArray<FewNodes>>,
    /// The pins of each frame; [`RELEASED`] once it must not be used.
    frames: [AtomicU32; FRAMES],
}

const FRAMES: usize = 8;
const RELEASED: u32 = 1 << 16;

fn array_of(nodes: &'static FewNodes) -> Box<XArray<FewNodes>> {
    // SAFETY: it is first used when it is in its box, where it is dropped.
    Box::new(unsafe { XArray::movable(nodes) })
}

impl Fixture {
    fn new() -> Arc<Self> {
        let nodes = FewNodes::anew();
        Arc::new(Self { nodes, array: array_of(nodes), frames: [const { AtomicU32::new(0) }; FRAMES] })
    }

    fn store(&self, first: u64, order: u32, value: u64) {
        let mut stock = self.array.prepare(first, word::last_of(first, order), order).unwrap();
        self.array.lock().store(first, order, value, &mut stock);
    }

    fn join(&self, first: u64, order: u32, value: u64) {
        let mut stock = self.array.prepare(first, word::last_of(first, order), order).unwrap();
        self.array.lock().join(first, order, value, &mut stock);
    }

    /// The parts get ascending values from `value` on.
    fn split(&self, index: u64, into_order: u32, value: u64) {
        let found = self.array.lock().get(index).unwrap();
        let mut stock = self.array.prepare_split(found.order, into_order).unwrap();
        self.array.lock().split(index, into_order, &mut stock, |part| value + ((part - found.first) >> into_order));
    }

    fn erase(&self, index: u64) {
        self.array.lock().erase(index);
    }

    /// Looks up an entry that is always there; each kind of lookup must find it.
    fn load_always(&self, index: u64) -> Found {
        self.nodes.reading(|guard| match thread_rng().gen_range(0..3) {
            0 => self.array.load(index, guard).expect("it is always there"),
            1 => self.array.next(index, MAX_INDEX, guard).filter(|found| found.first <= index).expect("always there"),
            _ => self.array.next_marked(index, index, Mark::A, guard).expect("always there, and marked"),
        })
    }

    fn mark(&self, index: u64) {
        assert!(self.array.lock().set_mark(index, Mark::A));
    }

    /// Looks up, pins, checks again, and uses the frame.
    fn use_frame(&self, index: u64) {
        self.nodes.reading(|guard| {
            let Some(hit) = self.array.find(index, guard) else { return };
            let frame = &self.frames[hit.value() as usize];
            frame.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
            if hit.is_still() {
                assert!(frame.load(Relaxed) < RELEASED, "the frame was released before it was pinned");
                shuttle::thread::yield_now();
                assert!(frame.load(Relaxed) < RELEASED, "the frame was released while it was pinned");
            }
            frame.fetch_sub(1, std::sync::atomic::Ordering::AcqRel);
        });
    }

    /// Moves a node, if possible; returns whether it did. The old node is retired.
    fn relocate(&self, old: u32) -> bool {
        let new = self.nodes.take().unwrap();
        let is_moved = relocate(self.nodes, old, new);
        if is_moved {
            self.nodes.retire(old);
        } else {
            self.nodes.give(new);
        }
        is_moved
    }

    /// Moves one of the nodes that seem to be in a tree; returns whether it did.
    fn move_one(&self) -> bool {
        let movable: Vec<u32> = (1..=NODES).filter(|number| self.nodes.node(*number).may_move()).collect();
        !movable.is_empty() && self.relocate(movable[thread_rng().gen_range(0..movable.len())])
    }

    fn move_some(&self) {
        (0..thread_rng().gen_range(1..5)).for_each(|_| _ = self.move_one());
    }

    /// After the frame's entry was removed: releases the frame for good, unless it is pinned.
    fn release(&self, frame: u64) {
        let acquire = pagemill_core::sync::Acquire;
        let _ = self.frames[frame as usize].compare_exchange(0, RELEASED, std::sync::atomic::Ordering::AcqRel, acquire);
    }

    fn end(&self) {
        self.array.lock().erase_range(0, MAX_INDEX, drop);
        self.nodes.recycle();
        assert_eq!(self.nodes.state.lock().unwrap().in_use, 0, "a node was lost");
    }
}

/// Yields for as long as some changes take.
fn linger() {
    (0..thread_rng().gen_range(0..60)).for_each(|_| shuttle::thread::yield_now());
}

/// Runs `read` twice, concurrent with `write`, in many orders.
fn model(begin: fn(&Fixture), read: fn(&Fixture), write: fn(&Fixture)) {
    model_of(begin, [read, read, write]);
}

/// Runs threads concurrently in many orders.
fn model_of<const N: usize>(begin: fn(&Fixture), acts: [fn(&Fixture); N]) {
    run_in_many_orders(move || {
        let fixture = Fixture::new();
        begin(&fixture);
        let threads = acts.map(|act| {
            let fixture = fixture.clone();
            shuttle::thread::spawn(move || act(&fixture))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        fixture.end();
    });
}

/// Random schedules, and schedules with few preemptions.
pub(super) fn run_in_many_orders(run: impl Fn() + Clone + Send + Sync + 'static) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(2000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let config = || {
        let mut config = Config::new();
        config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(DEPTH, runs), config()).run(begin);
}

/// An entry is split inside a node, a part is erased, stored again, and joined: the other index is always found.
#[test]
fn a_split_and_a_join_leave_no_gap() {
    model(
        |fixture| {
            fixture.store(4, 2, 1);
            fixture.mark(4);
        },
        |fixture| {
            for index in [7, 6, 7] {
                let found = fixture.load_always(index);
                assert!((found.first..=found.last()).contains(&index));
                assert!(match found.order {
                    2 => found.value == 1 || found.value == 5,
                    1 => found.value == 3,
                    _ => found.value == index,
                });
            }
        },
        |fixture| {
            fixture.split(5, 1, 2);
            fixture.erase(4);
            fixture.split(6, 0, 6);
            fixture.join(4, 2, 5);
        },
    );
}

/// A single entry becomes a node of entries, and one entry again: the root changes under the readers.
#[test]
fn a_split_into_nodes_leaves_no_gap() {
    model(
        |fixture| {
            fixture.store(0, 7, 0);
            fixture.mark(0);
        },
        |fixture| {
            for index in [127, 64] {
                let found = fixture.load_always(index);
                assert!(found.value == if found.order == 7 { 0 } else { index >> 5 }, "{found:?} at {index}");
            }
        },
        |fixture| {
            fixture.split(1, 5, 0);
            fixture.join(0, 7, 0);
        },
    );
}

/// The tree grows and shrinks while index 0 is there; unused indices stay empty.
#[test]
fn a_root_that_changes_loses_no_entry() {
    model(
        |fixture| {
            fixture.store(0, 0, 1);
            fixture.mark(0);
        },
        |fixture| {
            assert_eq!(fixture.load_always(0), Found { value: 1, first: 0, order: 0 });
            let far = fixture.nodes.reading(|guard| fixture.array.next(1, MAX_INDEX, guard));
            assert!(far.is_none_or(|far| far.first == far.value && [3, 70].contains(&far.first)), "{far:?}");
            assert_eq!(fixture.nodes.reading(|guard| fixture.array.next_gap(0, 9, guard)), Some(1));
            assert_eq!(fixture.load_always(0).value, 1);
        },
        |fixture| {
            for index in [70, 3, 70] {
                fixture.store(index, 0, index);
                fixture.erase(index);
            }
        },
    );
}

/// A reader that pins and then finds the entry unchanged has an unreleased frame: small, huge, in the root word, split,
/// joined.
#[test]
fn what_is_still_there_was_not_released() {
    model(
        |fixture| {
            fixture.store(0, 0, 0);
        },
        |fixture| {
            for _ in 0..6 {
                linger();
                fixture.use_frame([0, 0, 2, 3][thread_rng().gen_range(0..4)]);
            }
        },
        |fixture| {
            fixture.store(2, 1, 1);
            fixture.erase(0);
            fixture.release(0);
            fixture.split(2, 0, 2);
            fixture.release(1);
            fixture.join(0, 2, 4);
            (2..4).for_each(|frame| fixture.release(frame));
            fixture.join(0, 6, 5);
            fixture.release(4);
            fixture.erase(9);
            fixture.release(5);
            fixture.store(0, 0, 6);
            fixture.store(0, 0, 7);
            fixture.release(6);
        },
    );
}

/// An entry that moves between a node and the root word fails `is_still` at its old place: it is released from its last
/// place.
#[test]
fn what_has_moved_was_not_released() {
    model(
        |fixture| {
            fixture.store(0, 0, 0);
            fixture.store(1, 0, 1);
        },
        |fixture| {
            for _ in 0..6 {
                linger();
                fixture.use_frame(0);
            }
        },
        |fixture| {
            fixture.erase(1);
            fixture.release(1);
            fixture.erase(0);
            fixture.release(0);
            fixture.store(0, 0, 2);
            fixture.store(70, 0, 3);
            fixture.erase(70);
            fixture.erase(0);
            fixture.release(2);
        },
    );
}

/// Parts that leave with their whole node fail `is_still`. Few steps, so that a schedule can place one between any two.
#[test]
fn what_was_joined_was_not_released() {
    model(
        |fixture| fixture.store(0, 2, 0),
        |fixture| fixture.use_frame(3),
        |fixture| {
            fixture.join(0, 6, 1);
            fixture.release(0);
        },
    );
}

/// Entries in three nodes below one, marked: of order 0, 2 and 7.
fn three_leaves(fixture: &Fixture) {
    for (index, order) in [(3, 0), (68, 2), (128, 7)] {
        fixture.store(index, order, index);
        fixture.mark(index);
    }
}

fn load_leaves(fixture: &Fixture) {
    for index in [3, 70, 200, 3] {
        let found = fixture.load_always(index);
        assert_eq!((found.value, (found.first..=found.last()).contains(&index)), (found.first, true));
    }
    assert_eq!(fixture.nodes.reading(|guard| fixture.array.next_gap(3, MAX_INDEX, guard)), Some(4));
}

/// Nodes move repeatedly, the root and leaves: entries are always found, with their marks.
#[test]
fn nodes_that_move_leave_no_gap() {
    model(three_leaves, load_leaves, |fixture| {
        (0..5).for_each(|_| assert!(fixture.move_one(), "no other thread has the lock"));
    });
}

/// Two threads move the same nodes: each node is moved by one at a time.
#[test]
fn nodes_that_two_move_leave_no_gap() {
    model_of(three_leaves, [load_leaves, Fixture::move_some, Fixture::move_some]);
}

/// Nodes move while a writer splits, joins, stores, marks and erases: no change is lost, or made to an old node.
#[test]
fn nodes_move_beside_a_writer() {
    model_of(
        |fixture| {
            three_leaves(fixture);
            fixture.store(4, 2, 4);
        },
        [
            |fixture| {
                for index in [3, 70, 3] {
                    fixture.load_always(index);
                }
            },
            Fixture::move_some,
            |fixture| {
                fixture.split(5, 0, 4);
                fixture.erase(6);
                fixture.store(400, 0, 400);
                assert!(fixture.array.lock().set_mark(400, Mark::C));
                fixture.join(64, 3, 64);
                fixture.erase(200);
                fixture.store(1 << 20, 0, 5);
                fixture.erase(1 << 20);
                let expected = [(3, 3), (4, 4), (5, 5), (7, 7), (64, 64), (400, 400)];
                let mut at = 0;
                for (first, value) in expected {
                    let found = fixture.array.lock().next(at, MAX_INDEX).expect("stored, and not erased");
                    assert_eq!((found.first, found.value), (first, value));
                    at = found.last() + 1;
                }
                assert_eq!(fixture.array.lock().next(at, MAX_INDEX), None);
                assert!(fixture.array.lock().get_mark(400, Mark::C) && fixture.array.lock().get_mark(70, Mark::A));
                fixture.nodes.reading(|guard| {
                    assert_eq!(
                        fixture.array.next_marked(201, MAX_INDEX, Mark::C, guard).map(|found| found.first),
                        Some(400)
                    );
                });
            },
        ],
    );
}

/// Nodes move while arrays are dropped and others get their nodes and numbers: no thread reaches a dropped array, and
/// no node is lost or in two places.
#[test]
fn nodes_move_beside_the_end_of_their_array() {
    fn come_and_go(fixture: &Fixture) {
        for round in 0..3 {
            let array = array_of(fixture.nodes);
            for index in [1, 70] {
                let mut stock = array.prepare(index, index, 0).unwrap();
                array.lock().store(index, 0, index + round, &mut stock);
            }
            assert_eq!(array.lock().get(70).map(|found| found.value), Some(70 + round));
            assert_eq!(fixture.nodes.reading(|guard| array.load(1, guard)).map(|found| found.value), Some(1 + round));
        }
    }
    model_of(
        |_| (),
        [come_and_go, come_and_go, |fixture| {
            Fixture::move_some(fixture);
            Fixture::move_some(fixture);
        }],
    );
}

/// Nodes pass from one array to another and back while they move: a thread that looked up a node's array may then hold
/// the wrong one.
#[test]
fn nodes_move_beside_their_next_array() {
    fn fill_and_empty(fixture: &Fixture) {
        let array = array_of(fixture.nodes);
        for round in 0..4 {
            for index in [70, 1, 71] {
                let mut stock = array.prepare(index, index, 0).unwrap();
                array.lock().store(index, 0, index + round, &mut stock);
            }
            for index in [70, 1, 71] {
                assert_eq!(array.lock().erase(index).map(|found| found.value), Some(index + round));
            }
        }
    }
    model_of(|_| (), [fill_and_empty, fill_and_empty, |fixture| (0..3).for_each(|_| fixture.move_some())]);
}

/// A reader that pins and then finds the entry unchanged has an unreleased frame, even if the entry's node moved before
/// it was erased.
#[test]
fn what_has_moved_with_its_node_was_not_released() {
    model(
        |fixture| {
            fixture.store(1, 0, 0);
            fixture.store(70, 0, 1);
        },
        |fixture| {
            for _ in 0..3 {
                linger();
                fixture.use_frame([1, 70][thread_rng().gen_range(0..2)]);
            }
        },
        |fixture| {
            fixture.move_some();
            fixture.erase(1);
            fixture.release(0);
            fixture.move_some();
            fixture.erase(70);
            fixture.release(1);
        },
    );
}
