//! Small allocations: timed, or a known number of malloc and free pairs for an instruction counter.

use std::time::{Duration, Instant};

use fastrand::Rng;

use super::steps::{self, StepWork};
use super::{Failure, WorkloadResult};
use crate::native::TaggedAllocation;

/// Number of malloc and free pairs in a step of every pattern; number of allocations in a batch; number of live
/// allocations in the pattern churn.
pub const PAIRS_PER_STEP: u64 = 1000;

/// The order in which allocations are made and freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Pattern {
    /// Each allocation is freed at once
    Pair,
    /// A thousand allocations are made, then all are freed
    Batch,
    /// A random one of a thousand allocations is replaced
    Churn,
}

/// Number of malloc and free pairs that each thread makes to warm up.
const WARM_PAIRS: u64 = 150_000;
/// Maximum time for which each thread makes pairs to warm up.
const WARM_TIME_LIMIT: Duration = Duration::from_millis(500);

crate::workload::arguments! {
    SmallArguments:
    size: usize,
    pattern: Pattern,
    #[arg(default_value_t = 1)]
    threads: usize,
    /// Duration of the measurement in ms; without it, `--pairs` applies.
    measure_ms: Option<u64>,
    /// Number of malloc and free pairs to run on one thread, if no duration is given.
    #[arg(default_value_t = 100_000)]
    pairs: u64,
}

/// The allocations of one thread, and the number of allocations whose tag was wrong.
struct ThreadState {
    size: usize,
    pattern: Pattern,
    table: Vec<Option<TaggedAllocation>>,
    random: Rng,
    wrong: u64,
}

/// Makes allocations and frees in the given pattern. The resulting JSON has the number of malloc and free pairs and, in
/// a timed run, the nanoseconds per pair.
pub fn run(arguments: &SmallArguments) -> WorkloadResult {
    match arguments.measure_ms {
        Some(milliseconds) => run_timed(arguments, Duration::from_millis(milliseconds)),
        None => run_pairs(arguments),
    }
}

fn run_pairs(arguments: &SmallArguments) -> WorkloadResult {
    let mut thread = ThreadState::new(arguments, 0)?;
    for _ in 0..arguments.pairs / PAIRS_PER_STEP {
        thread.step()?;
    }
    thread.check_results()?;
    Ok(serde_json::json!({ "pairs": arguments.pairs }))
}

fn run_timed(arguments: &SmallArguments, duration: Duration) -> WorkloadResult {
    let make = |index| ThreadState::new(arguments, index as u64).and_then(ThreadState::warm_up);
    let times = steps::measure_threads(arguments.threads, duration, PAIRS_PER_STEP, make)?;
    Ok(serde_json::json!({ "ns_per_pair": times.ns_per_operation(), "pairs": times.operations() }))
}

impl ThreadState {
    fn new(arguments: &SmallArguments, seed: u64) -> Result<Self, Failure> {
        if arguments.size < 8 {
            return Err(Failure::Other("a block holds a tag of eight bytes".to_owned()));
        }
        let mut table: Vec<Option<TaggedAllocation>> = Vec::new();
        table.resize_with(PAIRS_PER_STEP as usize, || None);
        if arguments.pattern == Pattern::Churn {
            for (tag, slot) in (0..).zip(&mut table) {
                *slot = Some(TaggedAllocation::new(arguments.size, tag).ok_or_else(out_of_memory)?);
            }
        }
        Ok(Self { size: arguments.size, pattern: arguments.pattern, table, random: Rng::with_seed(seed), wrong: 0 })
    }

    /// Makes [`WARM_PAIRS`] pairs, but for no longer than [`WARM_TIME_LIMIT`], so that the allocator reaches its steady
    /// state. Under Pagemill, the C library serves the first hundred thousand calls of a program.
    fn warm_up(mut self) -> Result<Self, Failure> {
        let end = Instant::now() + WARM_TIME_LIMIT;
        for _ in 0..WARM_PAIRS / PAIRS_PER_STEP {
            self.step()?;
            if Instant::now() >= end {
                break;
            }
        }
        Ok(self)
    }
}

impl StepWork for ThreadState {
    /// Makes [`PAIRS_PER_STEP`] pairs of malloc and free. The tag of each allocation is checked before the free.
    fn step(&mut self) -> Result<(), Failure> {
        match self.pattern {
            Pattern::Pair => {
                for tag in 0..PAIRS_PER_STEP {
                    let block = TaggedAllocation::new(self.size, tag).ok_or_else(out_of_memory)?;
                    self.wrong += u64::from(block.tag() != tag);
                }
            }
            Pattern::Batch => {
                for (tag, slot) in (0..).zip(&mut self.table) {
                    *slot = Some(TaggedAllocation::new(self.size, tag).ok_or_else(out_of_memory)?);
                }
                for (tag, slot) in (0..).zip(&mut self.table) {
                    let block = slot.take();
                    self.wrong += u64::from(block.is_some_and(|block| block.tag() != tag));
                }
            }
            Pattern::Churn => {
                for _ in 0..PAIRS_PER_STEP {
                    let tag = self.random.usize(..self.table.len());
                    let slot = &mut self.table[tag];
                    let block = slot.take();
                    self.wrong += u64::from(block.is_some_and(|block| block.tag() != tag as u64));
                    *slot = Some(TaggedAllocation::new(self.size, tag as u64).ok_or_else(out_of_memory)?);
                }
            }
        }
        Ok(())
    }

    fn check_results(&mut self) -> Result<(), Failure> {
        match self.wrong {
            0 => Ok(()),
            wrong => Err(Failure::WrongAnswer(format!("{wrong} blocks lost their tag"))),
        }
    }
}

fn out_of_memory() -> Failure {
    Failure::Other("malloc refused a small block".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With every pattern, a run with a given number of pairs and a timed run must succeed, which shows that no
    /// allocation lost its tag.
    #[test]
    fn all_patterns_keep_their_tags() {
        for pattern in [Pattern::Pair, Pattern::Batch, Pattern::Churn] {
            let arguments = SmallArguments { size: 64, pattern, threads: 2, measure_ms: None, pairs: 5000 };
            assert!(run_pairs(&arguments).is_ok());
            assert!(run_timed(&arguments, Duration::from_millis(4)).is_ok());
        }
    }
}
