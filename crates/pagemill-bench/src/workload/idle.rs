//! A process that fills much memory, frees it, and then does nothing.

use std::thread;
use std::time::Duration;

use super::WorkloadResult;
use crate::native::TaggedAllocation;

const ALLOCATION_BYTES: usize = 1 << 20;

crate::workload::arguments! {
    IdleArguments:
    mib: usize,
    /// Seconds for which the process sleeps after it has freed its memory; the bench may end it earlier.
    seconds: u64,
}

pub fn run(arguments: &IdleArguments) -> WorkloadResult {
    let held: Vec<_> = (0..arguments.mib as u64).map(|tag| TaggedAllocation::touched(ALLOCATION_BYTES, tag)).collect();
    let taken = held.iter().flatten().count();
    drop(held);
    thread::sleep(Duration::from_secs(arguments.seconds));
    Ok(serde_json::json!({ "pieces": taken }))
}
