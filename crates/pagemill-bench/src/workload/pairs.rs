//! Objects that are allocated and freed: each object at once, in batches of a thousand, or as a random replacement
//! among many. Runs for a time, or for a known number of pairs for an instruction counter.

use std::time::{Duration, Instant};

use fastrand::Rng;

use super::steps::{self, StepWork};
use super::{Failure, WorkloadResult, ensure};
use crate::native::TaggedAllocation;

/// The order in which objects are allocated and freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Pattern {
    /// Each object is freed at once
    Pair,
    /// A thousand objects are allocated, then all are freed
    Batch,
    /// A random one of the live objects is replaced
    Churn,
}

/// The order in which the objects of a batch are freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeOrder {
    /// The order of their allocation.
    Allocation,
    /// In every second batch a random order.
    Alternating,
}

/// Allocation and free by one thread, for objects of one size.
pub trait ObjectAllocator {
    type Object;

    /// Allocates an object with `tag` as its first word; returns none if out of memory.
    fn make_object(&mut self, tag: u64) -> Option<Self::Object>;

    /// Frees an object and returns its tag.
    fn free_object(&mut self, object: Self::Object) -> u64;
}

/// The preloaded malloc, for objects of `size` bytes.
pub struct Malloc {
    pub size: usize,
}

impl ObjectAllocator for Malloc {
    type Object = TaggedAllocation;

    #[inline]
    fn make_object(&mut self, tag: u64) -> Option<TaggedAllocation> {
        TaggedAllocation::new(self.size, tag)
    }

    #[inline]
    fn free_object(&mut self, object: TaggedAllocation) -> u64 {
        object.tag()
    }
}

/// Number of pairs of allocation and free in a step of every pattern, and number of objects in a batch.
pub const PAIRS_PER_STEP: u64 = 1000;

/// Number of pairs of allocation and free that each thread makes to warm up, in addition to two pairs for each of its
/// live objects. Under Pagemill, the C library serves the first hundred thousand calls of a program.
const WARM_PAIRS: u64 = 150_000;
/// Maximum time for which each thread makes pairs to warm up.
const WARM_TIME_LIMIT: Duration = Duration::from_secs(2);

crate::workload::arguments! {
    PairPlan:
    pattern: Pattern,
    #[arg(default_value_t = 1)]
    threads: usize,
    /// Duration of the measurement in ms; without it, `--pairs` applies.
    measure_ms: Option<u64>,
    /// Number of pairs of allocation and free to run on one thread, if no duration is given.
    #[arg(default_value_t = 100_000)]
    pairs: u64,
}

impl PairPlan {
    /// Measures threads with `count` objects each. Each thread allocates and frees objects through a value that
    /// `access` returns. The resulting JSON has the number of pairs of allocation and free and, in a timed run, the
    /// nanoseconds per pair and the pairs per second.
    pub fn measure<A: ObjectAllocator>(
        &self,
        count: usize,
        free_order: FreeOrder,
        access: impl Fn() -> A + Sync,
    ) -> WorkloadResult {
        let new = |index: usize| ThreadState::new(self.pattern, count, free_order, access(), index as u64);
        let Some(milliseconds) = self.measure_ms else {
            let mut thread = new(0)?;
            (0..self.pairs / PAIRS_PER_STEP).try_for_each(|_| thread.step())?;
            thread.check_results()?;
            return Ok(serde_json::json!({ "pairs": self.pairs }));
        };
        let make = |index| new(index).and_then(ThreadState::warm_up);
        let times = steps::measure_threads(self.threads, Duration::from_millis(milliseconds), PAIRS_PER_STEP, make)?;
        Ok(serde_json::json!({
            "ns": times.ns_per_operation(),
            "pairs_per_second": self.threads as f64 * 1e9 / times.ns_per_operation(),
            "pairs": times.operations(),
        }))
    }
}

/// The objects of one thread, and the number of wrong tags.
struct ThreadState<A: ObjectAllocator> {
    access: A,
    pattern: Pattern,
    objects: Vec<Option<A::Object>>,
    /// The order in which the objects of every second batch are freed. The objects of the other batches are freed in
    /// the order of their allocation.
    order: Vec<usize>,
    is_in_order: bool,
    random: Rng,
    wrong: u64,
}

impl<A: ObjectAllocator> ThreadState<A> {
    fn new(pattern: Pattern, count: usize, free_order: FreeOrder, access: A, seed: u64) -> Result<Self, Failure> {
        let mut random = Rng::with_seed(seed);
        let mut order: Vec<usize> = (0..PAIRS_PER_STEP as usize).collect();
        if free_order == FreeOrder::Alternating {
            random.shuffle(&mut order);
        }
        let objects = (0..count).map(|_| None).collect();
        let mut thread = Self { access, pattern, objects, order, is_in_order: false, random, wrong: 0 };
        if pattern == Pattern::Churn {
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
        ensure(self.wrong == 0, || format!("{} objects lost their tag", self.wrong))
    }
}
