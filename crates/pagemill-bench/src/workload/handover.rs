//! The two processes of a handover. The keeper frees much memory and keeps running. Then the newcomer needs that
//! memory.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::steps::run_in_threads;
use super::{Failure, WorkloadResult, ensure};
use crate::native::{TaggedAllocation, WordAllocation};
use crate::signs::Signs;

/// Smallest and largest size of a large allocation, in bytes.
const LARGE_SIZES: (usize, usize) = (64 << 10, 1 << 20);
/// Number of small allocations that are made for each large one.
const SMALL_PER_LARGE: usize = 4;
/// Smallest and largest size of a small allocation, in bytes.
const SMALL_SIZES: (usize, usize) = (16, 4 << 10);

const NEWCOMER_ALLOCATION_BYTES: usize = 1 << 20;

/// Bytes that the keeper process allocates and frees each millisecond while it is almost idle.
const IDLE_ALLOCATION_BYTES: usize = 512;

crate::workload::arguments! {
    /// Arguments of the keeper, the process that frees its memory and keeps running.
    KeeperArguments:
    mib: usize,
    turns: u64,
    /// The folder of sign files, empty files by which the processes signal their progress.
    folder: PathBuf,
}

crate::workload::arguments! {
    /// Arguments of the newcomer, the process that needs the memory that the keeper process has freed. All its
    /// allocations are live at the same time.
    NewcomerArguments:
    mib: usize,
    threads: usize,
}

/// Returns the name of the empty file that the keeper process creates to signal that it has freed its memory in round
/// `turn`.
pub fn freed_sign(turn: u64) -> String {
    format!("freed-{turn}")
}

/// Returns the name of the empty file that the bench creates to signal that the newcomer process of round `turn` has
/// ended.
pub fn taken_sign(turn: u64) -> String {
    format!("taken-{turn}")
}

/// In each turn, fills and frees memory, and is then almost idle until the newcomer process, which needs that memory,
/// has ended.
pub fn run_keeper(arguments: &KeeperArguments) -> WorkloadResult {
    let signs = Signs::new(&arguments.folder);
    let mut random = Rng::with_seed(0x6b65_6570);
    let mut refused = 0_u64;
    for turn in 0..arguments.turns {
        refused += fill_and_free(arguments.mib << 20, &mut random)?;
        signs.create(&freed_sign(turn))?;
        let taken = taken_sign(turn);
        while !signs.exists(&taken) {
            refused += u64::from(TaggedAllocation::new(IDLE_ALLOCATION_BYTES, turn).is_none());
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(serde_json::json!({ "refused": refused }))
}

/// Fills memory with allocations of mixed sizes and frees them. Returns the number of failed allocations.
fn fill_and_free(bytes: usize, random: &mut Rng) -> Result<u64, Failure> {
    let (mut held, mut held_bytes, mut refused) = (Vec::new(), 0, 0);
    while held_bytes < bytes {
        let mut sizes = [0; SMALL_PER_LARGE + 1];
        sizes.fill_with(|| SMALL_SIZES.0 + random.usize(..SMALL_SIZES.1 - SMALL_SIZES.0));
        sizes[SMALL_PER_LARGE] = LARGE_SIZES.0 + random.usize(..LARGE_SIZES.1 - LARGE_SIZES.0);
        for size in sizes {
            let tag = held.len() as u64;
            match TaggedAllocation::filled(size, tag) {
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
    ensure(is_right, || "a piece lost its tag")?;
    Ok(refused)
}

/// Allocates and fills memory with all threads at full speed, then checks every word of it. The resulting JSON has the
/// duration and the number of failed allocations.
pub fn run_newcomer(arguments: &NewcomerArguments) -> WorkloadResult {
    let refused = AtomicU64::new(0);
    let begun = Instant::now();
    let taken = run_in_threads(arguments.threads, |index| Ok(fill_memory(arguments, index, &refused)))?;
    let took = begun.elapsed().as_secs_f64();
    let pieces = || taken.iter().flatten();
    ensure(
        pieces().all(|(tag, piece)| piece.words().iter().all(|word| word == tag)),
        || "the newcomer's memory lost a word",
    )?;
    let gib = (pieces().count() * NEWCOMER_ALLOCATION_BYTES) as f64 / f64::from(1 << 30);
    Ok(serde_json::json!({
        "ms": took * 1e3,
        "gib_per_second": gib / took,
        "refused": refused.into_inner(),
    }))
}

/// Allocates and fills the memory of one thread. Returns each allocation with the word that fills it.
fn fill_memory(arguments: &NewcomerArguments, index: usize, refused: &AtomicU64) -> Vec<(u64, WordAllocation)> {
    let count = (arguments.mib << 20) / NEWCOMER_ALLOCATION_BYTES / arguments.threads;
    let mut taken = Vec::with_capacity(count);
    for number in 0..count as u64 {
        let tag = (index as u64) << 32 | number;
        match WordAllocation::filled(NEWCOMER_ALLOCATION_BYTES / size_of::<u64>(), tag) {
            Some(piece) => taken.push((tag, piece)),
            None => {
                refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    taken
}
