//! Allocations of one size, which fill a given amount of memory. All or most of them are then freed. Also the work that
//! the process does afterwards.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::handover::taken_sign;
use super::{Failure, WorkloadResult, ensure};
use crate::chain::Chain;
use crate::native::TaggedAllocation;
use crate::proc;
use crate::signs::Signs;

/// Bytes of a run, that is, of consecutive allocations that are all freed or all kept.
const RUN_BYTES: usize = 1 << 20;
/// Of this many consecutive runs of allocations, [`KEPT_RUNS_PER_CYCLE`] are kept and the others are freed. If single
/// allocations are freed at random, the same fraction of them is kept.
const RUNS_PER_CYCLE: u64 = 20;
/// Number of runs of allocations that are kept, of [`RUNS_PER_CYCLE`] consecutive runs.
const KEPT_RUNS_PER_CYCLE: u64 = 2;

/// The process measures its resident memory each time it has allocated this many bytes.
const SAMPLE_EVERY_BYTES: usize = 1 << 20;

/// The allocations that are freed, and the pattern of those that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Freed {
    All,
    /// Nine tenths of the allocations, in runs of consecutive ones.
    Runs,
    /// Nine tenths of the allocations, each chosen at random.
    Random,
}

/// The work that a process does after it has freed its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Load {
    /// One small allocation per millisecond.
    Little,
    /// Pairs of malloc and free for a fifth of the time; sleep for the rest.
    Busy,
}

crate::workload::arguments! {
    /// Arguments of a keeper, a process that fills memory, frees it, and works until the process that then needs the
    /// memory has ended.
    PieceKeeperArguments:
    mib: usize,
    size: usize,
    freed: Freed,
    load: Load,
    /// Index, from 0, of this process among the processes that free memory at the same time.
    index: u64,
    /// The folder of sign files, empty files by which the processes signal their progress.
    folder: PathBuf,
}

/// Returns the name of the empty file that the process with this index creates to signal that it has freed its
/// allocations.
pub fn keeper_sign(index: u64) -> String {
    format!("pieces-freed-{index}")
}

pub fn run_keeper(arguments: &PieceKeeperArguments) -> WorkloadResult {
    let signs = Signs::new(&arguments.folder);
    let mut chain = Chain::new(arguments.size)?;
    let mut refused = fill(&mut chain, arguments.size, arguments.mib << 20);
    free(&mut chain, arguments.size, arguments.freed)?;
    signs.create(&keeper_sign(arguments.index))?;
    let taken = taken_sign(0);
    while !signs.exists(&taken) {
        refused += arguments.load.work_once(arguments.size)?;
    }
    let wrong = chain.retain(|_| true);
    ensure(wrong == 0, || format!("{wrong} pieces that were kept have changed"))?;
    Ok(serde_json::json!({ "refused": refused, "pieces": chain.allocated_count() }))
}

/// Makes allocations of `size` bytes until the sum of their sizes reaches `bytes`, or until the resident memory has
/// grown by `bytes`. The second condition is needed since some allocators use 32 bytes for an allocation of 16. Stops
/// at the first failed allocation. Returns the number of failed allocations, 0 or 1.
pub fn fill(chain: &mut Chain, size: usize, bytes: usize) -> u64 {
    let before = proc::own_resident_bytes();
    let mut filled = 0;
    while filled < bytes {
        for _ in 0..SAMPLE_EVERY_BYTES.div_ceil(size) {
            if !chain.push() {
                return 1;
            }
            filled += size;
        }
        if proc::own_resident_bytes().saturating_sub(before) >= bytes as u64 {
            break;
        }
    }
    0
}

/// Frees the allocations that `freed` selects.
///
/// # Errors
///
/// [`Failure::WrongAnswer`] if an allocation has changed since it was written.
pub fn free(chain: &mut Chain, size: usize, freed: Freed) -> Result<(), Failure> {
    let run = (RUN_BYTES / size).max(1) as u64;
    let mut random = Rng::with_seed(0x7069_6563);
    let wrong = chain.retain(|place| match freed {
        Freed::All => false,
        Freed::Runs => place / run % RUNS_PER_CYCLE >= RUNS_PER_CYCLE - KEPT_RUNS_PER_CYCLE,
        Freed::Random => random.u64(..RUNS_PER_CYCLE) < KEPT_RUNS_PER_CYCLE,
    });
    ensure(wrong == 0, || format!("{wrong} pieces have changed"))
}

/// Length of a cycle of work and sleep with [`Load::Busy`].
const BUSY_CYCLE: Duration = Duration::from_millis(10);
/// Part of each cycle in which a process with [`Load::Busy`] works.
const WORKING_TIME_PER_CYCLE: Duration = Duration::from_millis(2);

/// Bytes that a process with [`Load::Little`] allocates each millisecond.
const LITTLE_LOAD_BYTES: usize = 512;

impl Load {
    /// Does this work once, then sleeps: 1 ms in total with `Little`, 10 ms with `Busy`. Returns the number of failed
    /// allocations.
    ///
    /// # Errors
    ///
    /// [`Failure::WrongAnswer`] if an allocation lost its tag.
    pub fn work_once(self, size: usize) -> Result<u64, Failure> {
        let begun = Instant::now();
        let mut refused = 0;
        match self {
            Self::Little => {
                refused += u64::from(TaggedAllocation::new(LITTLE_LOAD_BYTES, 1).is_none());
                thread::sleep(Duration::from_millis(1));
            }
            Self::Busy => {
                let mut tag = 0;
                while begun.elapsed() < WORKING_TIME_PER_CYCLE {
                    match TaggedAllocation::filled(size, tag) {
                        Some(piece) => ensure(piece.tag() == tag, || "a piece lost its tag")?,
                        None => refused += 1,
                    }
                    tag += 1;
                }
                thread::sleep(BUSY_CYCLE.saturating_sub(begun.elapsed()));
            }
        }
        Ok(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [`free`] must keep about a tenth of 100 allocations with `Runs` and with `Random`, and none with `All`.
    #[test]
    fn a_tenth_of_the_allocations_is_kept() {
        for (freed, low, high) in [(Freed::All, 0, 0), (Freed::Runs, 10, 10), (Freed::Random, 2, 25)] {
            let mut chain = Chain::new(RUN_BYTES).expect("large enough");
            assert!((0..100).all(|_| chain.push()));

            free(&mut chain, RUN_BYTES, freed).expect("nothing has changed");

            let mut left = 0;
            chain.retain(|_| {
                left += 1;
                true
            });
            assert!((low..=high).contains(&left), "{freed:?}: {left}");
        }
    }

    /// [`fill`] must stop when the sum of the allocations, or the resident memory, has grown by the given bytes. After
    /// each kind of work, all allocations must be intact.
    #[test]
    fn filling_stops_at_its_limit() {
        let mut chain = Chain::new(64).expect("large enough");
        assert_eq!(fill(&mut chain, 64, 4 << 20), 0);
        assert!(chain.allocated_count() >= (1 << 20) / 64 && chain.allocated_count() <= (4 << 20) / 64);
        for load in [Load::Little, Load::Busy] {
            assert_eq!(load.work_once(64).expect("all tags are there"), 0);
        }
        assert_eq!(chain.retain(|_| true), 0);
    }
}
