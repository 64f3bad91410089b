//! A process that allocates much memory, frees all of it, and continues to work. After each second it records how much
//! memory is still resident.

use std::time::{Duration, Instant};

use super::WorkloadResult;
use super::pieces::{Freed, Load, fill, free};
use crate::chain::Chain;
use crate::{native, proc};

crate::workload::arguments! {
    ReturningArguments:
    mib: usize,
    size: usize,
    /// Seconds for which the process continues to work after it has freed all memory.
    seconds: u64,
}

/// Size in bytes of the allocations that the process makes after it has freed its memory.
const WORK_BYTES: usize = 512;

/// Fills memory, frees it, and continues to work. The resulting JSON has the growth of the resident memory since before
/// the first allocation: when all memory is filled, directly after the last free, and after each further second.
pub fn run(arguments: &ReturningArguments) -> WorkloadResult {
    // The memory that the work itself needs is allocated first, so that it is not part of the growth.
    Load::Busy.work_once(WORK_BYTES)?;
    let before = proc::own_resident_bytes();
    let more_mib = || (proc::own_resident_bytes() as f64 - before as f64) / f64::from(1 << 20);
    let mut chain = Chain::new(arguments.size)?;
    if fill(&mut chain, arguments.size, arguments.mib << 20) > 0 {
        return Err("malloc refused without a limit".into());
    }
    let filled_mib = more_mib();
    free(&mut chain, arguments.size, Freed::All)?;
    let (begun, cpu_before) = (Instant::now(), native::own_cpu_time());
    let mut held = vec![more_mib()];
    for second in 1..=arguments.seconds {
        while begun.elapsed() < Duration::from_secs(second) {
            Load::Busy.work_once(WORK_BYTES)?;
        }
        held.push(more_mib());
    }
    let cpu = (native::own_cpu_time() - cpu_before).as_secs_f64() / begun.elapsed().as_secs_f64();
    Ok(serde_json::json!({ "filled_mib": filled_mib, "more_mib": held, "cpu_share": cpu }))
}
