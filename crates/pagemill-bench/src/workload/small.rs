//! Small allocations: timed, or a known number of malloc and free pairs for an instruction counter.

use super::WorkloadResult;
use super::pairs::{FreeOrder, Malloc, PAIRS_PER_STEP, PairPlan};

crate::workload::arguments! {
    SmallArguments:
    size: usize,
    ..plan: PairPlan,
}

/// Makes allocations and frees in the given pattern. Each thread has a thousand live allocations in the pattern churn.
/// The resulting JSON has the number of malloc and free pairs and, in a timed run, the nanoseconds per pair.
pub fn run(arguments: &SmallArguments) -> WorkloadResult {
    let size = arguments.size;
    if size < size_of::<u64>() {
        return Err("a block holds a tag of eight bytes".into());
    }
    let mut line = arguments.plan.measure(PAIRS_PER_STEP as usize, FreeOrder::Allocation, || Malloc { size })?;
    line["ns_per_pair"] = line["ns"].take();
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::super::pairs::Pattern;
    use super::*;

    /// With every pattern, a run with a given number of pairs and a timed run must succeed, which shows that no
    /// allocation lost its tag.
    #[test]
    fn all_patterns_keep_their_tags() {
        for pattern in [Pattern::Pair, Pattern::Batch, Pattern::Churn] {
            for measure_ms in [None, Some(4)] {
                let plan = PairPlan { pattern, threads: 2, measure_ms, pairs: 5000 };
                assert!(run(&SmallArguments { size: 64, plan }).is_ok());
            }
        }
    }
}
