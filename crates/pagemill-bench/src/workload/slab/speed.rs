//! Objects that are allocated and freed: each object at once, in batches of a thousand, or as a random replacement
//! among many.
//!
//! The first word of an object is its tag. The tag is written at allocation and checked when the object is freed. At
//! the end of a run, the tags of all live objects are checked. All subjects use the same tags in the same order.

use std::time::{Duration, Instant};

use fastrand::Rng;

use super::ObjectAllocator;
use super::pagemill_caches::{self, Object};
use super::peers::{LockedSlotMap, Malloc, SharedSlab, ThreadSlotMap};
use crate::workload::small::Pattern;
use crate::workload::steps::{self, StepWork};
use crate::workload::{Failure, WorkloadResult};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    /// A slab cache of values that do not move
    Fixed,
    /// A slab cache of objects that their owner moves
    #[value(name = "by-owner")]
    OwnerSlab,
    /// A slab cache of values that are accessed by handle
    #[value(name = "by-handle")]
    HandleMap,
    /// Allocations of the C library, or of the preloaded allocator
    Malloc,
    /// A map of the crate slotmap; if there are several threads, they share it under a lock
    Slotmap,
    /// A map of the crate sharded-slab, which all threads share
    ShardedSlab,
}

crate::workload::arguments! {
    SpeedArguments:
    subject: Subject,
    pattern: Pattern,
    /// Bytes of an object.
    size: usize,
    #[arg(default_value_t = 1)]
    threads: usize,
    /// Number of live objects of all threads together in the pattern `churn`, which replaces random objects.
    #[arg(default_value_t = 100_000)]
    live: usize,
    /// Duration of the measurement in ms; without it, `--pairs` applies.
    measure_ms: Option<u64>,
    /// Number of pairs of allocation and free to run on one thread, if no duration is given.
    #[arg(default_value_t = 100_000)]
    pairs: u64,
}

/// Number of pairs of allocation and free in a step of every pattern, and number of objects in a batch.
pub const PAIRS_PER_STEP: u64 = 1000;

/// Number of pairs of allocation and free that each thread makes to warm up, in addition to two pairs for each of its
/// live objects.
const WARM_PAIRS: u64 = 100_000;
/// Maximum time for which each thread makes pairs to warm up.
const WARM_TIME_LIMIT: Duration = Duration::from_secs(2);

/// The words of an object that follow its tag.
pub type Words<const COUNT: usize> = [u64; COUNT];

/// Allocates and frees objects in the given pattern. The resulting JSON has the number of pairs of allocation and free
/// and, in a timed run, the nanoseconds per pair and the pairs per second.
pub fn run(arguments: &SpeedArguments) -> WorkloadResult {
    match arguments.size {
        64 => run_for_object_size::<Words<7>>(arguments),
        192 => run_for_object_size::<Words<23>>(arguments),
        576 => run_for_object_size::<Words<71>>(arguments),
        1024 => run_for_object_size::<Words<127>>(arguments),
        4096 => run_for_object_size::<Words<511>>(arguments),
        size => Err(format!("there are no objects of {size} bytes here").into()),
    }
}

fn run_for_object_size<Rest: Copy + Send + Sync + 'static>(arguments: &SpeedArguments) -> WorkloadResult {
    assert_eq!(size_of::<Object<Rest>>(), arguments.size);
    match arguments.subject {
        Subject::Fixed => pagemill_caches::fixed_cache::<Rest>().and_then(|cache| measure_pairs(arguments, || &cache)),
        Subject::OwnerSlab => {
            pagemill_caches::owner_cache::<Rest>().and_then(|cache| measure_pairs(arguments, || &cache))
        }
        Subject::HandleMap => {
            pagemill_caches::handle_cache::<Rest>().and_then(|cache| measure_pairs(arguments, || &cache))
        }
        Subject::Malloc => measure_pairs(arguments, || Malloc { size: arguments.size }),
        Subject::Slotmap if arguments.threads == 1 => measure_pairs(arguments, ThreadSlotMap::<Rest>::new),
        Subject::Slotmap => {
            let map = LockedSlotMap::<Rest>::new();
            measure_pairs(arguments, || &map)
        }
        Subject::ShardedSlab => {
            let slab = SharedSlab::<Rest>::new();
            measure_pairs(arguments, || &slab)
        }
    }
}

/// Measures threads. Each thread allocates and frees objects through a value that `access` returns.
fn measure_pairs<A: ObjectAllocator>(arguments: &SpeedArguments, access: impl Fn() -> A + Sync) -> WorkloadResult {
    let Some(milliseconds) = arguments.measure_ms else {
        let mut thread = ThreadState::new(arguments, access(), 0)?;
        for _ in 0..arguments.pairs / PAIRS_PER_STEP {
            thread.step()?;
        }
        thread.check_results()?;
        return Ok(serde_json::json!({ "pairs": arguments.pairs }));
    };
    let make = |index| ThreadState::new(arguments, access(), index as u64).and_then(ThreadState::warm_up);
    let times = steps::measure_threads(arguments.threads, Duration::from_millis(milliseconds), PAIRS_PER_STEP, make)?;
    let pairs_per_second = arguments.threads as f64 * 1e9 / times.ns_per_operation();
    Ok(serde_json::json!({
        "ns": times.ns_per_operation(),
        "pairs_per_second": pairs_per_second,
        "pairs": times.operations(),
    }))
}

/// The objects of one thread, and the number of objects whose tag was wrong.
struct ThreadState<A: ObjectAllocator> {
    access: A,
    pattern: Pattern,
    objects: Vec<Option<A::Object>>,
    /// The random order in which the objects of every second batch are freed. The objects of the other batches are
    /// freed in the order of their allocation.
    order: Vec<usize>,
    is_in_order: bool,
    random: Rng,
    wrong: u64,
}

impl<A: ObjectAllocator> ThreadState<A> {
    fn new(arguments: &SpeedArguments, access: A, seed: u64) -> Result<Self, Failure> {
        let mut random = Rng::with_seed(seed);
        let count = match arguments.pattern {
            Pattern::Churn => arguments.live.div_ceil(arguments.threads),
            Pattern::Pair | Pattern::Batch => PAIRS_PER_STEP as usize,
        };
        let mut order: Vec<usize> = (0..PAIRS_PER_STEP as usize).collect();
        random.shuffle(&mut order);
        let mut objects = Vec::new();
        objects.resize_with(count, || None);
        let mut thread =
            Self { access, pattern: arguments.pattern, objects, order, is_in_order: false, random, wrong: 0 };
        if arguments.pattern == Pattern::Churn {
            thread.fill()?;
        }
        Ok(thread)
    }

    /// Makes the pairs of the warm-up, but for no longer than [`WARM_TIME_LIMIT`]. Afterwards memory is touched and the
    /// allocator is in its steady state.
    fn warm_up(mut self) -> Result<Self, Failure> {
        let end = Instant::now() + WARM_TIME_LIMIT;
        let pairs = WARM_PAIRS + 2 * self.objects.len() as u64;
        for _ in 0..pairs / PAIRS_PER_STEP {
            self.step()?;
            if Instant::now() >= end {
                break;
            }
        }
        Ok(self)
    }

    fn fill(&mut self) -> Result<(), Failure> {
        for (tag, slot) in (1..).zip(&mut self.objects) {
            *slot = Some(self.access.make_object(tag).ok_or_else(out_of_memory)?);
        }
        Ok(())
    }

    /// Frees the object at this index of `objects`, and counts it as wrong if its tag is wrong.
    #[inline]
    fn free_at(&mut self, index: usize) {
        let tag = self.objects[index].take().map_or(0, |object| self.access.free_object(object));
        self.wrong += u64::from(tag != tag_of(index));
    }
}

/// Returns the tag of the object at this index of a thread's table. Tags are unique within a thread and never 0.
#[inline]
fn tag_of(index: usize) -> u64 {
    index as u64 + 1
}

fn out_of_memory() -> Failure {
    Failure::Other("an object was refused".to_owned())
}

impl<A: ObjectAllocator> StepWork for ThreadState<A> {
    /// Makes [`PAIRS_PER_STEP`] pairs of allocation and free.
    #[inline]
    fn step(&mut self) -> Result<(), Failure> {
        match self.pattern {
            Pattern::Pair => {
                for tag in 1..=PAIRS_PER_STEP {
                    let object = self.access.make_object(tag).ok_or_else(out_of_memory)?;
                    self.wrong += u64::from(self.access.free_object(object) != tag);
                }
            }
            Pattern::Batch => {
                self.fill()?;
                self.is_in_order = !self.is_in_order;
                if self.is_in_order {
                    (0..self.objects.len()).for_each(|index| self.free_at(index));
                } else {
                    (0..self.order.len()).for_each(|at| self.free_at(self.order[at]));
                }
            }
            Pattern::Churn => {
                for _ in 0..PAIRS_PER_STEP {
                    let index = self.random.usize(..self.objects.len());
                    self.free_at(index);
                    self.objects[index] = Some(self.access.make_object(tag_of(index)).ok_or_else(out_of_memory)?);
                }
            }
        }
        Ok(())
    }

    /// Frees all live objects, and fails if any object had a wrong tag.
    fn check_results(&mut self) -> Result<(), Failure> {
        for index in 0..self.objects.len() {
            if self.objects[index].is_some() {
                self.free_at(index);
            }
        }
        match self.wrong {
            0 => Ok(()),
            wrong => Err(Failure::WrongAnswer(format!("{wrong} objects lost their tag"))),
        }
    }
}
