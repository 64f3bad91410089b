//! Pieces of one size: allocated up to a limit, freed in whole or in part; and the work that the process does
//! afterwards.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use super::handover::taken_sign;
use super::{Failure, Outcome};
use crate::chain::Chain;
use crate::native::Tagged;
use crate::proc;
use crate::signs::Signs;
use crate::stats::Random;

/// Pieces are freed and kept in runs of this many bytes, in order of allocation.
const RUN_BYTES: usize = 1 << 20;
/// Of this many runs (or pieces) the last two are kept, so nine tenths are freed.
const OF_RUNS: u64 = 20;
const KEPT_RUNS: u64 = 2;

/// The process samples its own memory after this many bytes.
const LOOK_EVERY: usize = 1 << 20;

/// Which of the pieces are freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Freed {
    All,
    /// Nine tenths, in runs of the order of allocation.
    Runs,
    /// Nine tenths, each piece at random.
    Random,
}

/// The work that a process does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Load {
    /// One small malloc per millisecond.
    Little,
    /// A fifth of a CPU, in pairs of malloc and free.
    Busy,
}

/// Arguments of a process that fills, frees and stays until the newcomer has ended.
#[derive(Clone, Debug, clap::Args)]
pub struct PieceKeeper {
    #[arg(long)]
    pub mib: usize,
    #[arg(long)]
    pub size: usize,
    #[arg(long)]
    pub freed: Freed,
    #[arg(long)]
    pub load: Load,
    /// The index of this keeper among several.
    #[arg(long)]
    pub index: u64,
    /// The folder of signs.
    #[arg(long)]
    pub folder: PathBuf,
}

/// The sign of one keeper: it has freed its pieces.
pub fn keeper_sign(index: u64) -> String {
    format!("pieces-freed-{index}")
}

/// Runs [`PieceKeeper`].
pub fn keep(arguments: &PieceKeeper) -> Outcome {
    let signs = Signs::new(&arguments.folder);
    let mut chain = Chain::new(arguments.size)?;
    let mut refused = fill(&mut chain, arguments.size, arguments.mib << 20);
    free(&mut chain, arguments.size, arguments.freed)?;
    signs.give(&keeper_sign(arguments.index)).map_err(|cause| cause.to_string())?;
    let taken = taken_sign(0);
    while !signs.is_given(&taken) {
        refused += arguments.load.turn(arguments.size)?;
    }
    match chain.retain(|_| true) {
        0 => Ok(serde_json::json!({ "refused": refused, "pieces": chain.pushed() })),
        wrong => Err(Failure::WrongAnswer(format!("{wrong} pieces that were kept have changed"))),
    }
}

/// Allocates until the pieces have `bytes` in sum, or the process holds that much more, whichever comes first: a piece
/// of 16 bytes takes 32 in some allocators. Stops at the first failed allocation. Returns the number of failed
/// allocations.
pub fn fill(chain: &mut Chain, size: usize, bytes: usize) -> u64 {
    let before = proc::own_resident_bytes();
    let mut filled = 0;
    while filled < bytes {
        for _ in 0..LOOK_EVERY.div_ceil(size) {
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

/// Frees the pieces that `freed` selects.
///
/// # Errors
///
/// [`Failure::WrongAnswer`] if a piece has changed since it was written.
pub fn free(chain: &mut Chain, size: usize, freed: Freed) -> Result<(), Failure> {
    let run = (RUN_BYTES / size).max(1) as u64;
    let mut random = Random::new(0x7069_6563);
    let wrong = chain.retain(|place| match freed {
        Freed::All => false,
        Freed::Runs => place / run % OF_RUNS >= OF_RUNS - KEPT_RUNS,
        Freed::Random => (random.below(OF_RUNS as usize) as u64) < KEPT_RUNS,
    });
    match wrong {
        0 => Ok(()),
        wrong => Err(Failure::WrongAnswer(format!("{wrong} pieces have changed"))),
    }
}

/// Length of a duty cycle, and of its working part.
const CYCLE: Duration = Duration::from_millis(10);
const WORKING: Duration = Duration::from_millis(2);

/// Bytes that an almost idle process allocates each millisecond.
const LITTLE_BYTES: usize = 512;

impl Load {
    /// Works for some milliseconds; returns the number of failed allocations.
    ///
    /// # Errors
    ///
    /// [`Failure::WrongAnswer`] if a piece lost its tag.
    pub fn turn(self, size: usize) -> Result<u64, Failure> {
        let begun = Instant::now();
        let mut refused = 0;
        match self {
            Self::Little => {
                refused += u64::from(Tagged::new(LITTLE_BYTES, 1).is_none());
                thread::sleep(Duration::from_millis(1));
            }
            Self::Busy => {
                let mut tag = 0;
                while begun.elapsed() < WORKING {
                    match Tagged::filled(size, tag) {
                        Some(piece) if piece.tag() != tag => {
                            return Err(Failure::WrongAnswer("a piece lost its tag".to_owned()));
                        }
                        Some(_) => {}
                        None => refused += 1,
                    }
                    tag += 1;
                }
                thread::sleep(CYCLE.saturating_sub(begun.elapsed()));
            }
        }
        Ok(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tenth is kept of each kind, and nothing if all is freed.
    #[test]
    fn a_tenth_stays() {
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

    /// Filling stops at the bytes or at the resident memory. Both kinds of work leave all pieces intact.
    #[test]
    fn filling_ends_and_work_is_done() {
        let mut chain = Chain::new(64).expect("large enough");
        assert_eq!(fill(&mut chain, 64, 4 << 20), 0);
        assert!(chain.pushed() >= (1 << 20) / 64 && chain.pushed() <= (4 << 20) / 64);
        for load in [Load::Little, Load::Busy] {
            assert_eq!(load.turn(64).expect("all tags are there"), 0);
        }
        assert_eq!(chain.retain(|_| true), 0);
    }
}
