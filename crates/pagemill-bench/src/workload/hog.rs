//! A memory hog: a process that periodically allocates, touches, checks and frees memory, with a pause after each
//! round.

use std::fs::File;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use super::{WorkloadResult, ensure};
use crate::native::TaggedAllocation;

const ALLOCATION_BYTES: usize = 1 << 20;

crate::workload::arguments! {
    HogArguments:
    mib: usize,
    pause_ms: u64,
    /// The folder of the stop file and of the lock file. The lock prevents the hog and the workload from using memory
    /// at the same time.
    folder: PathBuf,
}

/// Name of the lock file that the hog holds during each round.
pub const LOCK_FILE: &str = "turn";
/// Name of the file that stops the memory hog: the hog ends when this file exists.
pub const STOP_FILE: &str = "stop";

/// Allocates, touches, checks and frees memory in rounds, until the stop file exists. The resulting JSON has the number
/// of rounds and the number of failed allocations.
pub fn run(arguments: &HogArguments) -> WorkloadResult {
    let path = arguments.folder.join(LOCK_FILE);
    let lock = File::open(&path).map_err(|cause| format!("{}: {cause}", path.display()))?;
    let stop = arguments.folder.join(STOP_FILE);
    let (mut rounds, mut refused) = (0_u64, 0_u64);
    while !stop.exists() {
        flock(&lock, FlockOperation::LockExclusive)?;
        let mut held = Vec::with_capacity(arguments.mib);
        for tag in 0..arguments.mib as u64 {
            match TaggedAllocation::touched(ALLOCATION_BYTES, tag) {
                Some(piece) => held.push(piece),
                None => {
                    refused += 1;
                    break;
                }
            }
        }
        let is_right = (0..).zip(&held).all(|(tag, piece)| piece.tag() == tag);
        drop(held);
        let _ = flock(&lock, FlockOperation::Unlock);
        ensure(is_right, || "the hog's memory lost a tag")?;
        rounds += 1;
        thread::sleep(Duration::from_millis(arguments.pause_ms));
    }
    Ok(serde_json::json!({ "rounds": rounds, "refused": refused }))
}
