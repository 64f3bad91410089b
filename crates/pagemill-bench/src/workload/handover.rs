//! The two processes of a handover: the keeper frees much memory and keeps running; then the newcomer needs that
//! memory.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Failure, Outcome};
use crate::native::{Piece, Tagged};
use crate::signs::Signs;
use crate::stats::Random;

/// Range of sizes of the large allocations.
const LARGE: (usize, usize) = (64 << 10, 1 << 20);
/// Number of small allocations for each large one.
const SMALL_EACH: usize = 4;
const SMALL: (usize, usize) = (16, 4 << 10);

/// Size of each allocation of the newcomer.
const NEWCOMER_PIECE: usize = 1 << 20;

/// Bytes that an almost idle keeper allocates and frees each millisecond.
const LITTLE: usize = 512;

/// Arguments of the keeper, which frees its memory and keeps running.
#[derive(Clone, Debug, clap::Args)]
pub struct Keeper {
    #[arg(long)]
    pub mib: usize,
    #[arg(long)]
    pub turns: u64,
    /// The folder of sign files.
    #[arg(long)]
    pub folder: PathBuf,
}

/// Arguments of the newcomer, which needs all of its memory at one time.
#[derive(Clone, Debug, clap::Args)]
pub struct Newcomer {
    #[arg(long)]
    pub mib: usize,
    #[arg(long)]
    pub threads: usize,
}

/// Returns the name of the keeper's sign that it has freed its memory in this turn.
pub fn freed_sign(turn: u64) -> String {
    format!("freed-{turn}")
}

/// Returns the name of the bench's sign that the newcomer of this turn has ended.
pub fn taken_sign(turn: u64) -> String {
    format!("taken-{turn}")
}

/// In each turn, fills and frees memory, then does little work until the newcomer has ended.
pub fn keep(arguments: &Keeper) -> Outcome {
    let signs = Signs::new(&arguments.folder);
    let mut random = Random::new(0x6b65_6570);
    let mut refused = 0_u64;
    for turn in 0..arguments.turns {
        refused += fill_and_free(arguments.mib << 20, &mut random)?;
        signs.give(&freed_sign(turn)).map_err(|cause| cause.to_string())?;
        let taken = taken_sign(turn);
        while !signs.is_given(&taken) {
            refused += u64::from(Tagged::new(LITTLE, turn).is_none());
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(serde_json::json!({ "refused": refused }))
}

/// Fills memory with allocations of mixed sizes and frees it; returns the number of failed allocations.
fn fill_and_free(bytes: usize, random: &mut Random) -> Result<u64, Failure> {
    let (mut held, mut held_bytes, mut refused) = (Vec::new(), 0, 0);
    while held_bytes < bytes {
        let mut sizes = [0; SMALL_EACH + 1];
        sizes.fill_with(|| SMALL.0 + random.below(SMALL.1 - SMALL.0));
        sizes[SMALL_EACH] = LARGE.0 + random.below(LARGE.1 - LARGE.0);
        for size in sizes {
            let tag = held.len() as u64;
            match Tagged::filled(size, tag) {
                Some(piece) => held.push(Some(piece)),
                None => {
                    held.push(None);
                    refused += 1;
                }
            }
            held_bytes += size;
        }
    }
    let is_right = (0..).zip(&held).all(|(tag, piece)| piece.as_ref().is_none_or(|piece| piece.tag() == tag));
    match is_right {
        true => Ok(refused),
        false => Err(Failure::WrongAnswer("a piece lost its tag".to_owned())),
    }
}

/// Allocates and fills memory with all threads at full speed, then checks every word.
pub fn come(arguments: &Newcomer) -> Outcome {
    let refused = AtomicU64::new(0);
    let begun = Instant::now();
    let taken: Vec<Vec<(u64, Piece)>> = thread::scope(|scope| {
        let takers: Vec<_> = (0..arguments.threads)
            .map(|index| {
                let refused = &refused;
                scope.spawn(move || take(arguments, index, refused))
            })
            .collect();
        takers.into_iter().map(|taker| taker.join().unwrap_or_default()).collect()
    });
    let took = begun.elapsed().as_secs_f64();
    let pieces = || taken.iter().flatten();
    if !pieces().all(|(tag, piece)| piece.words().iter().all(|word| word == tag)) {
        return Err(Failure::WrongAnswer("the newcomer's memory lost a word".to_owned()));
    }
    let gib = (pieces().count() * NEWCOMER_PIECE) as f64 / f64::from(1 << 30);
    Ok(serde_json::json!({
        "ms": took * 1e3,
        "gib_per_second": gib / took,
        "refused": refused.into_inner(),
    }))
}

/// Allocates and fills the memory of one thread. Returns the allocations with the word that fills each of them.
fn take(arguments: &Newcomer, index: usize, refused: &AtomicU64) -> Vec<(u64, Piece)> {
    let count = (arguments.mib << 20) / NEWCOMER_PIECE / arguments.threads;
    let mut taken = Vec::with_capacity(count);
    for number in 0..count as u64 {
        let tag = (index as u64) << 32 | number;
        match Piece::filled(NEWCOMER_PIECE / size_of::<u64>(), tag) {
            Some(piece) => taken.push((tag, piece)),
            None => {
                refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    taken
}
