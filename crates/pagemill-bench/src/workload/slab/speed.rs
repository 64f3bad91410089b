//! Objects that are allocated and freed: each at once, in batches of a thousand, or as a random replacement among many.
//!
//! The first word of an object is its tag, which is written at allocation and checked when the object is freed. At the
//! end of a run all live objects are checked. Tags and order are the same for every subject.

use std::time::{Duration, Instant};

use super::Access;
use super::own::{self, Object};
use super::peers::{Alone, Locked, Malloc, Sharded};
use crate::stats::Random;
use crate::workload::small::Pattern;
use crate::workload::steps::{self, Work};
use crate::workload::{Failure, Outcome};

/// The subjects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    /// A cache of values that do not move
    Fixed,
    /// A cache of objects that their owner moves
    ByOwner,
    /// A cache of values that are accessed by handle
    ByHandle,
    /// Allocations of the C library, or of the preloaded allocator
    Malloc,
    /// A keyed map: with one thread a map of its own, else a map that all threads share under a lock
    Slotmap,
    /// A keyed map that threads share
    ShardedSlab,
}

/// Arguments of one run.
#[derive(Clone, Debug, clap::Args)]
pub struct Speed {
    #[arg(long)]
    pub subject: Subject,
    #[arg(long)]
    pub pattern: Pattern,
    /// Bytes of an object.
    #[arg(long)]
    pub size: usize,
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Number of live objects of all threads in the pattern that replaces random ones.
    #[arg(long, default_value_t = 100_000)]
    pub live: usize,
    /// Duration of the measurement in ms; without it, `--pairs` applies.
    #[arg(long)]
    pub measure_ms: Option<u64>,
    /// Number of pairs to run on one thread.
    #[arg(long, default_value_t = 100_000)]
    pub pairs: u64,
}

/// Number of allocation and free pairs in a step of every pattern. It is also the size of a batch.
pub const STEP_PAIRS: u64 = 1000;

/// Number of pairs with which each thread warms up, in addition to two for each live object; and the time limit.
const WARM_PAIRS: u64 = 100_000;
const WARM_AT_MOST: Duration = Duration::from_secs(2);

/// The words of an object after its first.
pub type Words<const COUNT: usize> = [u64; COUNT];

/// Runs the pattern. The JSON line has nanoseconds per pair and pairs per second, or only the number of pairs.
pub fn run(arguments: &Speed) -> Outcome {
    match arguments.size {
        64 => of_size::<Words<7>>(arguments),
        192 => of_size::<Words<23>>(arguments),
        576 => of_size::<Words<71>>(arguments),
        1024 => of_size::<Words<127>>(arguments),
        4096 => of_size::<Words<511>>(arguments),
        size => Err(format!("there are no objects of {size} bytes here").into()),
    }
}

fn of_size<Rest: Copy + Send + Sync + 'static>(arguments: &Speed) -> Outcome {
    assert_eq!(size_of::<Object<Rest>>(), arguments.size);
    match arguments.subject {
        Subject::Fixed => own::fixed::<Rest>().and_then(|cache| measure(arguments, || &cache)),
        Subject::ByOwner => own::by_owner::<Rest>().and_then(|cache| measure(arguments, || &cache)),
        Subject::ByHandle => own::by_handle::<Rest>().and_then(|cache| measure(arguments, || &cache)),
        Subject::Malloc => measure(arguments, || Malloc { size: arguments.size }),
        Subject::Slotmap if arguments.threads == 1 => measure(arguments, Alone::<Rest>::new),
        Subject::Slotmap => {
            let map = Locked::<Rest>::new();
            measure(arguments, || &map)
        }
        Subject::ShardedSlab => {
            let slab = Sharded::<Rest>::new();
            measure(arguments, || &slab)
        }
    }
}

/// Measures threads that each get an access to the objects from `access`.
fn measure<A: Access>(arguments: &Speed, access: impl Fn() -> A + Sync) -> Outcome {
    let Some(milliseconds) = arguments.measure_ms else {
        let mut bench = Bench::new(arguments, access(), 0)?;
        for _ in 0..arguments.pairs / STEP_PAIRS {
            bench.step()?;
        }
        bench.verdict()?;
        return Ok(serde_json::json!({ "pairs": arguments.pairs }));
    };
    let make = |index| Bench::new(arguments, access(), index as u64).and_then(Bench::warmed);
    let times = steps::timed(arguments.threads, Duration::from_millis(milliseconds), STEP_PAIRS, make)?;
    let pairs_per_second = arguments.threads as f64 * 1e9 / times.ns();
    Ok(serde_json::json!({ "ns": times.ns(), "pairs_per_second": pairs_per_second, "pairs": times.acts() }))
}

/// The objects of one thread, and its count of wrong tags.
struct Bench<A: Access> {
    access: A,
    pattern: Pattern,
    objects: Vec<Option<A::Object>>,
    /// The random order in which every second batch is freed.
    order: Vec<usize>,
    is_in_order: bool,
    random: Random,
    wrong: u64,
}

impl<A: Access> Bench<A> {
    fn new(arguments: &Speed, access: A, seed: u64) -> Result<Self, Failure> {
        let mut random = Random::new(seed);
        let count = match arguments.pattern {
            Pattern::Churn => arguments.live.div_ceil(arguments.threads),
            Pattern::Pair | Pattern::Batch => STEP_PAIRS as usize,
        };
        let mut order: Vec<usize> = (0..STEP_PAIRS as usize).collect();
        random.shuffle(&mut order);
        let mut objects = Vec::new();
        objects.resize_with(count, || None);
        let mut bench =
            Self { access, pattern: arguments.pattern, objects, order, is_in_order: false, random, wrong: 0 };
        if arguments.pattern == Pattern::Churn {
            bench.fill()?;
        }
        Ok(bench)
    }

    /// Warms up for a number of pairs or a time, so that memory is touched and the allocator reaches its steady state.
    fn warmed(mut self) -> Result<Self, Failure> {
        let end = Instant::now() + WARM_AT_MOST;
        let pairs = WARM_PAIRS + 2 * self.objects.len() as u64;
        for _ in 0..pairs / STEP_PAIRS {
            self.step()?;
            if Instant::now() >= end {
                break;
            }
        }
        Ok(self)
    }

    fn fill(&mut self) -> Result<(), Failure> {
        for (tag, slot) in (1..).zip(&mut self.objects) {
            *slot = Some(self.access.take(tag).ok_or_else(refused)?);
        }
        Ok(())
    }

    /// Frees the object at this index of the table and checks its tag.
    #[inline]
    fn give(&mut self, place: usize) {
        let tag = self.objects[place].take().map_or(0, |object| self.access.give(object));
        self.wrong += u64::from(tag != tag_of(place));
    }
}

/// Returns the tag for an index of the table. Tags are unique and never 0.
#[inline]
fn tag_of(place: usize) -> u64 {
    place as u64 + 1
}

fn refused() -> Failure {
    Failure::Other("an object was refused".to_owned())
}

impl<A: Access> Work for Bench<A> {
    /// Makes [`STEP_PAIRS`] pairs of allocation and free.
    #[inline]
    fn step(&mut self) -> Result<(), Failure> {
        match self.pattern {
            Pattern::Pair => {
                for tag in 1..=STEP_PAIRS {
                    let object = self.access.take(tag).ok_or_else(refused)?;
                    self.wrong += u64::from(self.access.give(object) != tag);
                }
            }
            Pattern::Batch => {
                self.fill()?;
                self.is_in_order = !self.is_in_order;
                if self.is_in_order {
                    (0..self.objects.len()).for_each(|place| self.give(place));
                } else {
                    (0..self.order.len()).for_each(|at| self.give(self.order[at]));
                }
            }
            Pattern::Churn => {
                for _ in 0..STEP_PAIRS {
                    let place = self.random.below(self.objects.len());
                    self.give(place);
                    self.objects[place] = Some(self.access.take(tag_of(place)).ok_or_else(refused)?);
                }
            }
        }
        Ok(())
    }

    /// Frees all live objects, and fails if any object had a wrong tag.
    fn verdict(&mut self) -> Result<(), Failure> {
        for place in 0..self.objects.len() {
            if self.objects[place].is_some() {
                self.give(place);
            }
        }
        match self.wrong {
            0 => Ok(()),
            wrong => Err(Failure::WrongAnswer(format!("{wrong} objects lost their tag"))),
        }
    }
}
