//! Two readers and a writer over few indices, step by step in orders drawn at random.
//!
//! Nodes come from a few that are watched: one that was retired is used anew as soon as no reader is left who may be in it,
//! and no later, so a reader that went on without its guard would meet another's slots. `SHUTTLE_RUNS` says how many of each
//! model.

use super::*;
use crate::error::Result;
use crate::sync::modelled::reset_clock;
use crossbeam_epoch::pin;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::Arc;
use std::sync::Mutex;

/// Preemptions that a schedule of PCT has.
const DEPTH: usize = 4;

/// No run is so long; one that is waits for something that never comes.
const MOST_STEPS: usize = 100_000;

/// Nodes of a model.
const NODES: u32 = 24;

/// Nodes with grace periods of their own: those of the default collector cannot be modelled.
struct FewNodes {
    nodes: [Node; NODES as usize],
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<u32>,
    in_use: u32,
    /// Time goes by one for each reader that begins, and each node that is retired.
    now: u64,
    /// When the readers began that are there.
    readers: Vec<u64>,
    retired: Vec<(u64, u32)>,
}

impl FewNodes {
    /// One for the thread that runs models, one after the other; as new.
    fn anew() -> &'static Self {
        thread_local! {
            static FEW: &'static FewNodes = Box::leak(Box::new(FewNodes {
                nodes: [const { Node::new() }; NODES as usize],
                state: Mutex::default(),
            }));
        }
        let few = FEW.with(|few| *few);
        few.nodes.iter().for_each(Node::clear);
        *few.state.lock().unwrap() = State { free: (1..=NODES).collect(), ..State::default() };
        few
    }

    /// A reader, with its guard and its grace period, for as long as `read` goes on.
    fn reading<T>(&self, read: impl FnOnce(&crossbeam_epoch::Guard) -> T) -> T {
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

    /// Gives those back that were retired before the first reader began who is still there.
    fn recycle(&self) {
        let mut state = self.state.lock().unwrap();
        let first = state.readers.iter().min().copied().unwrap_or(u64::MAX);
        let (over, waiting) = state.retired.drain(..).partition::<Vec<_>, _>(|(at, _)| *at < first);
        state.retired = waiting;
        drop(state);
        for (_, number) in over {
            self.node(number).clear();
            self.give(number);
        }
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

    fn resident_bytes(&self) -> u64 {
        size_of::<Self>() as u64
    }

    fn in_use(&self) -> u32 {
        self.state.lock().unwrap().in_use
    }
}

struct Fixture {
    nodes: &'static FewNodes,
    array: XArray<FewNodes>,
    /// Per frame its pins; [`RELEASED`] once nobody is to have it.
    frames: [AtomicU32; FRAMES],
}

const FRAMES: usize = 8;
const RELEASED: u32 = 1 << 16;

impl Fixture {
    fn new() -> Arc<Self> {
        let nodes = FewNodes::anew();
        Arc::new(Self { nodes, array: XArray::new(nodes), frames: [const { AtomicU32::new(0) }; FRAMES] })
    }

    fn store(&self, first: u64, order: u32, value: u64) {
        let mut stock = self.array.prepare(first, word::last_of(first, order), order).unwrap();
        self.array.lock().store(first, order, value, &mut stock);
    }

    fn join(&self, first: u64, order: u32, value: u64) {
        let mut stock = self.array.prepare(first, word::last_of(first, order), order).unwrap();
        self.array.lock().join(first, order, value, &mut stock);
    }

    /// Values count up from `value` on, from part to part.
    fn split(&self, index: u64, into_order: u32, value: u64) {
        let found = self.array.lock().get(index).unwrap();
        let mut stock = self.array.prepare_split(found.order, into_order).unwrap();
        self.array.lock().split(index, into_order, &mut stock, |part| value + ((part - found.first) >> into_order));
    }

    fn erase(&self, index: u64) {
        self.array.lock().erase(index);
    }

    /// What is found there at some moment; each way to look must find something.
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

    /// Looks up, pins, looks again, and uses the frame.
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

    /// The frame is in the array no more; unless it is pinned it is released for good.
    fn release(&self, frame: u64) {
        let acquire = crate::sync::Acquire;
        let _ = self.frames[frame as usize].compare_exchange(0, RELEASED, std::sync::atomic::Ordering::AcqRel, acquire);
    }

    fn end(&self) {
        self.array.lock().erase_range(0, MAX_INDEX, drop);
        self.nodes.recycle();
        assert_eq!(self.nodes.in_use(), 0, "a node was lost");
    }
}

/// Lets others go on, for as long as some changes take.
fn linger() {
    (0..thread_rng().gen_range(0..60)).for_each(|_| shuttle::thread::yield_now());
}

/// Runs `read` twice beside `write`, in many orders: random ones, and such as have few preemptions.
fn model(begin: fn(&Fixture), read: fn(&Fixture), write: fn(&Fixture)) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(2000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let config = || {
        let mut config = Config::new();
        config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
        config
    };
    let run = move || {
        reset_clock();
        let fixture = Fixture::new();
        begin(&fixture);
        let threads = [read, read, write].map(|act| {
            let fixture = fixture.clone();
            shuttle::thread::spawn(move || act(&fixture))
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        fixture.end();
    };
    Runner::new(RandomScheduler::new(runs), config()).run(run);
    Runner::new(PctScheduler::new(DEPTH, runs), config()).run(run);
}

/// Split inside of a node, a part erased, stored anew, and joined again: the other index is there at all times.
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

/// An entry that is alone becomes a node of entries, and one again: the root changes under the readers.
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

/// The tree grows by levels and loses them while index 0 is there, and nothing is where nothing ever was.
#[test]
fn a_root_that_changes_loses_nobody() {
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

/// Whoever pins and then finds it still there has what was not released: small, huge, in the root word, split, joined.
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

/// An entry that moves, from a node to the root word and on, is not still where it was: it is released from its last place.
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

/// Parts whose node goes as a whole are not still there. Few steps, so that one may go by between any two.
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
