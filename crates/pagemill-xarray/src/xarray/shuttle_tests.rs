//! Shuttle tests: readers, writers, and threads that move nodes, in random interleavings of single steps.
//!
//! There are few nodes, and a retired node is reused as soon as no reader can access it. So a missing guard would show
//! as a read of a reused node. `SHUTTLE_RUNS` is the number of interleavings per test.

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

/// Depth of the PCT schedules (probabilistic concurrency testing): at up to `PCT_DEPTH - 1` random steps, the running
/// thread gets the lowest priority.
const PCT_DEPTH: usize = 4;

/// Maximum number of steps in an interleaving. A longer interleaving is considered to wait for an event that never
/// happens.
const MAX_STEPS: usize = 100_000;

/// Number of nodes that each test can use.
const NODE_COUNT: u32 = 40;

/// A source of few nodes, with simulated grace periods, because shuttle cannot control the grace periods of the default
/// epoch collector.
struct FewNodes {
    nodes: [Node; NODE_COUNT as usize],
    arrays: Arrays<Self>,
    state: Mutex<NodesState>,
}

#[derive(Default)]
struct NodesState {
    free: Vec<u32>,
    in_use: u32,
    /// Simulated time. The time increases by one when a reader begins, and when a node is retired.
    now: u64,
    /// The simulated times at which current readers began.
    readers: Vec<u64>,
    /// Retired nodes, each with the simulated time of its retirement.
    retired: Vec<(u64, u32)>,
}

impl FewNodes {
    /// Returns the nodes of this thread in their initial state. All interleavings on this thread use the same nodes,
    /// one interleaving after the other.
    fn reset() -> &'static Self {
        thread_local! {
            static FEW_NODES: &'static FewNodes = Box::leak(Box::new(FewNodes {
                nodes: [const { Node::new() }; NODE_COUNT as usize],
                arrays: Arrays::new().unwrap(),
                state: Mutex::default(),
            }));
        }
        let few = FEW_NODES.with(|few| *few);
        // SAFETY: the threads of the last interleaving have ended, so no tree and no reader uses the nodes.
        few.nodes.iter().for_each(|node| unsafe { node.clear() });
        *few.state.lock().unwrap() = NodesState { free: (1..=NODE_COUNT).collect(), ..NodesState::default() };
        few
    }

    /// Calls `read` as a reader, which holds a guard and delays grace periods.
    fn as_reader<T>(&self, read: impl FnOnce(&pagemill_core::epoch::Guard) -> T) -> T {
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

    /// Frees the nodes that were retired before the earliest current reader began.
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

/// The state that the threads of a test share.
struct Fixture {
    nodes: &'static FewNodes,
    array: Box<XArray<FewNodes>>,
    /// For each simulated page frame, the number of its pins, or [`RELEASED`] if the frame was released and must not be
    /// used any more.
    frames: [AtomicU32; FRAME_COUNT],
}

/// Number of simulated page frames.
const FRAME_COUNT: usize = 8;
/// Value of a simulated page frame that was released and must not be used.
const RELEASED: u32 = 1 << 16;

fn array_of(nodes: &'static FewNodes) -> Box<XArray<FewNodes>> {
    // SAFETY: the array is first used in its box, where it stays and is dropped.
    Box::new(unsafe { XArray::movable(nodes) })
}

impl Fixture {
    fn new() -> Arc<Self> {
        let nodes = FewNodes::reset();
        Arc::new(Self { nodes, array: array_of(nodes), frames: [const { AtomicU32::new(0) }; FRAME_COUNT] })
    }

    fn store(&self, first: u64, order: u32, value: u64) {
        let mut stock = self.array.prepare(first, word::last_index_of(first, order), order).unwrap();
        self.array.lock().store(first, order, value, &mut stock);
    }

    fn join(&self, first: u64, order: u32, value: u64) {
        let mut stock = self.array.prepare(first, word::last_index_of(first, order), order).unwrap();
        self.array.lock().join(first, order, value, &mut stock);
    }

    /// Splits the entry at `index`. The new entries get ascending values, beginning with `value`.
    fn split(&self, index: u64, into_order: u32, value: u64) {
        let found = self.array.lock().get(index).unwrap();
        let mut stock = self.array.prepare_split(found.order, into_order).unwrap();
        self.array.lock().split(index, into_order, &mut stock, |part| value + ((part - found.first) >> into_order));
    }

    fn erase(&self, index: u64) {
        self.array.lock().erase(index);
    }

    /// Looks up an entry that is in the array at all times, in one of three ways, chosen at random.
    fn load_permanent_entry(&self, index: u64) -> Found {
        self.nodes.as_reader(|guard| match thread_rng().gen_range(0..3) {
            0 => self.array.load(index, guard).expect("it is always there"),
            1 => self.array.next(index, MAX_INDEX, guard).filter(|found| found.first <= index).expect("always there"),
            _ => self.array.next_marked(index, index, Mark::A, guard).expect("always there, and marked"),
        })
    }

    fn mark(&self, index: u64) {
        assert!(self.array.lock().set_mark(index, Mark::A));
    }

    /// As a reader: looks up the frame at `index`, pins the frame, checks that the entry is unchanged, and uses the
    /// frame.
    fn use_frame(&self, index: u64) {
        self.nodes.as_reader(|guard| {
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

    /// Moves the node with number `old`, if possible, and retires the old node. Returns whether the node moved.
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

    /// Moves a random node that seems to be in a tree. Returns whether the node moved.
    fn move_random_node(&self) -> bool {
        let movable: Vec<u32> = (1..=NODE_COUNT).filter(|number| self.nodes.node(*number).may_move()).collect();
        !movable.is_empty() && self.relocate(movable[thread_rng().gen_range(0..movable.len())])
    }

    fn move_random_nodes(&self) {
        (0..thread_rng().gen_range(1..5)).for_each(|_| _ = self.move_random_node());
    }

    /// Releases a frame whose entry was removed, unless the frame is pinned.
    fn release(&self, frame: u64) {
        let acquire = pagemill_core::sync::Acquire;
        let _ = self.frames[frame as usize].compare_exchange(0, RELEASED, std::sync::atomic::Ordering::AcqRel, acquire);
    }

    /// Erases all entries of the array. All nodes must then be free.
    fn erase_all_and_check(&self) {
        self.array.lock().erase_range(0, MAX_INDEX, drop);
        self.nodes.recycle();
        assert_eq!(self.nodes.state.lock().unwrap().in_use, 0, "a node was lost");
    }
}

fn yield_some_steps() {
    (0..thread_rng().gen_range(0..60)).for_each(|_| shuttle::thread::yield_now());
}

/// Runs `read` in two threads, concurrently with `write` in a third, in many interleavings. `begin` prepares the array.
fn run_readers_and_writer(begin: fn(&Fixture), read: fn(&Fixture), write: fn(&Fixture)) {
    run_threads(begin, [read, read, write]);
}

/// Runs each function of `acts` in a thread of its own, in many interleavings. `begin` prepares the array.
fn run_threads<const N: usize>(begin: fn(&Fixture), acts: [fn(&Fixture); N]) {
    run_in_many_schedules(move || {
        let fixture = Fixture::new();
        begin(&fixture);
        let threads = acts.map(|act| {
            let fixture = fixture.clone();
            shuttle::thread::spawn(move || act(&fixture))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        fixture.erase_all_and_check();
    });
}

/// Runs a test in random interleavings, and in interleavings with few preemptions.
pub(super) fn run_in_many_schedules(run: impl Fn() + Clone + Send + Sync + 'static) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(2000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let config = || {
        let mut config = Config::new();
        config.max_steps = MaxSteps::FailAfter(MAX_STEPS);
        config
    };
    let begin = move || {
        reset_clock();
        run();
    };
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(PCT_DEPTH, runs), config()).run(begin);
}

/// An entry of four indices is split, one part is erased and stored again, and all parts are joined. Readers must
/// always find entries at the other indices.
#[test]
fn readers_find_an_entry_during_split_and_join() {
    run_readers_and_writer(
        |fixture| {
            fixture.store(4, 2, 1);
            fixture.mark(4);
        },
        |fixture| {
            for index in [7, 6, 7] {
                let found = fixture.load_permanent_entry(index);
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

/// An entry of 128 indices is split into entries of two nodes, which are joined again. Readers must always find an
/// entry at each index, although the root changes.
#[test]
fn readers_find_an_entry_that_is_split_into_nodes() {
    run_readers_and_writer(
        |fixture| {
            fixture.store(0, 7, 0);
            fixture.mark(0);
        },
        |fixture| {
            for index in [127, 64] {
                let found = fixture.load_permanent_entry(index);
                assert!(found.value == if found.order == 7 { 0 } else { index >> 5 }, "{found:?} at {index}");
            }
        },
        |fixture| {
            fixture.split(1, 5, 0);
            fixture.join(0, 7, 0);
        },
    );
}

/// The tree grows and shrinks. Readers must always find the entry at index 0.
#[test]
fn readers_find_an_entry_while_the_root_changes() {
    run_readers_and_writer(
        |fixture| {
            fixture.store(0, 0, 1);
            fixture.mark(0);
        },
        |fixture| {
            assert_eq!(fixture.load_permanent_entry(0), Found { value: 1, first: 0, order: 0 });
            let far = fixture.nodes.as_reader(|guard| fixture.array.next(1, MAX_INDEX, guard));
            assert!(far.is_none_or(|far| far.first == far.value && [3, 70].contains(&far.first)), "{far:?}");
            assert_eq!(fixture.nodes.as_reader(|guard| fixture.array.next_gap(0, 9, guard)), Some(1));
            assert_eq!(fixture.load_permanent_entry(0).value, 1);
        },
        |fixture| {
            for index in [70, 3, 70] {
                fixture.store(index, 0, index);
                fixture.erase(index);
            }
        },
    );
}

/// Readers pin frames while the writer changes the frames' entries: small, huge, in the root word, split, joined. A
/// frame must not be released if a reader pins the frame and then finds its entry unchanged.
#[test]
fn a_pinned_frame_of_an_unchanged_entry_is_not_released() {
    run_readers_and_writer(
        |fixture| {
            fixture.store(0, 0, 0);
        },
        |fixture| {
            for _ in 0..6 {
                yield_some_steps();
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

/// An entry moves between a node and the root word, and then its frame is released. For a reader that found the entry
/// in its former slot, `is_still` must return false.
#[test]
fn is_still_fails_after_a_move_to_or_from_the_root() {
    run_readers_and_writer(
        |fixture| {
            fixture.store(0, 0, 0);
            fixture.store(1, 0, 1);
        },
        |fixture| {
            for _ in 0..6 {
                yield_some_steps();
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

/// A larger entry replaces an entry together with its whole node, and the frame of the former entry is released. For a
/// reader that found the former entry, `is_still` must then return false. The test has few steps, so that schedules can
/// interrupt it between any two steps.
#[test]
fn is_still_fails_after_a_join() {
    run_readers_and_writer(
        |fixture| fixture.store(0, 2, 0),
        |fixture| fixture.use_frame(3),
        |fixture| {
            fixture.join(0, 6, 1);
            fixture.release(0);
        },
    );
}

/// Stores marked entries of orders 0, 2 and 7 in three nodes that have the same parent.
fn store_three_leaves(fixture: &Fixture) {
    for (index, order) in [(3, 0), (68, 2), (128, 7)] {
        fixture.store(index, order, index);
        fixture.mark(index);
    }
}

/// Looks up the entries of [`store_three_leaves`] and checks them.
fn check_three_leaves(fixture: &Fixture) {
    for index in [3, 70, 200, 3] {
        let found = fixture.load_permanent_entry(index);
        assert_eq!((found.value, (found.first..=found.last()).contains(&index)), (found.first, true));
    }
    assert_eq!(fixture.nodes.as_reader(|guard| fixture.array.next_gap(3, MAX_INDEX, guard)), Some(4));
}

/// A thread repeatedly moves nodes, both the root and leaves. Readers must always find all entries, with their marks.
#[test]
fn readers_find_entries_while_nodes_move() {
    run_readers_and_writer(store_three_leaves, check_three_leaves, |fixture| {
        (0..5).for_each(|_| assert!(fixture.move_random_node(), "no other thread has the lock"));
    });
}

/// Two threads move the same nodes at the same time. Readers must always find all entries.
#[test]
fn readers_find_entries_while_two_threads_move_nodes() {
    run_threads(store_three_leaves, [check_three_leaves, Fixture::move_random_nodes, Fixture::move_random_nodes]);
}

/// Nodes are moved while a writer splits, joins, stores, marks and erases entries. No change of the writer may be lost
/// by a move.
#[test]
fn no_change_is_lost_while_nodes_move() {
    run_threads(
        |fixture| {
            store_three_leaves(fixture);
            fixture.store(4, 2, 4);
        },
        [
            |fixture| {
                for index in [3, 70, 3] {
                    fixture.load_permanent_entry(index);
                }
            },
            Fixture::move_random_nodes,
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
                fixture.nodes.as_reader(|guard| {
                    assert_eq!(
                        fixture.array.next_marked(201, MAX_INDEX, Mark::C, guard).map(|found| found.first),
                        Some(400)
                    );
                });
            },
        ],
    );
}

/// Nodes are moved while arrays are dropped and new arrays get their nodes and numbers. No thread may use a dropped
/// array, and no node may be lost or used twice.
#[test]
fn nodes_move_while_arrays_are_dropped() {
    fn create_and_drop_arrays(fixture: &Fixture) {
        for round in 0..3 {
            let array = array_of(fixture.nodes);
            for index in [1, 70] {
                let mut stock = array.prepare(index, index, 0).unwrap();
                array.lock().store(index, 0, index + round, &mut stock);
            }
            assert_eq!(array.lock().get(70).map(|found| found.value), Some(70 + round));
            assert_eq!(fixture.nodes.as_reader(|guard| array.load(1, guard)).map(|found| found.value), Some(1 + round));
        }
    }
    run_threads(
        |_| (),
        [create_and_drop_arrays, create_and_drop_arrays, |fixture| {
            Fixture::move_random_nodes(fixture);
            Fixture::move_random_nodes(fixture);
        }],
    );
}

/// Two arrays exchange nodes while a third thread moves nodes. That thread may have found an array to which a node no
/// longer belongs. The node must then not be moved.
#[test]
fn nodes_move_while_arrays_exchange_them() {
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
    run_threads(|_| (), [fill_and_empty, fill_and_empty, |fixture| (0..3).for_each(|_| fixture.move_random_nodes())]);
}

/// The node of an entry is moved. Then the entry is erased and its frame released. If a reader pins the frame and
/// `is_still` then returns true, the frame must not have been released.
#[test]
fn is_still_fails_after_a_node_move_and_an_erase() {
    run_readers_and_writer(
        |fixture| {
            fixture.store(1, 0, 0);
            fixture.store(70, 0, 1);
        },
        |fixture| {
            for _ in 0..3 {
                yield_some_steps();
                fixture.use_frame([1, 70][thread_rng().gen_range(0..2)]);
            }
        },
        |fixture| {
            fixture.move_random_nodes();
            fixture.erase(1);
            fixture.release(0);
            fixture.move_random_nodes();
            fixture.erase(70);
            fixture.release(1);
        },
    );
}
