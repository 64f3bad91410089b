//! Fresh views: a resident file is mapped, one word of each record is read, and the mapping is dropped, again and again.

use std::time::{Duration, Instant};

use pagemill_core::stats::{self, Counter};
use pagemill_core::units::PageSize;

use super::memory::{Backing, Kind};
use crate::native::Pages;
use crate::pattern::RECORD_BYTES;
use crate::workload::{WorkloadResult, ensure};

/// Minimum number of views of a sample.
const MIN_VIEWS: u32 = 3;

crate::workload::arguments! {
    /// Arguments of a run that maps a resident file again and again.
    FreshArguments:
    kind: Kind,
    /// Size of the cache's pages; without it, 4 KiB and huge folios
    page: Option<PageSize>,
    len_bytes: usize,
    run_ms: u64,
}

/// Maps and touches the file until the time is over. The resulting JSON has the mean times, and the faults of one view
/// as the kernel counts them and as the page cache's handler counts them, the latter also as pages of 4 KiB for each
/// fault.
pub fn run(arguments: &FreshArguments) -> WorkloadResult {
    let len_bytes = arguments.len_bytes;
    let backing = Backing::new(arguments.kind, arguments.page, len_bytes)?;
    // The first view installs the fault handler.
    backing.map(len_bytes)?.check()?;
    let (begun, faults_before, handled_before) = (Instant::now(), Pages::faults(), stats::get(Counter::ViewFaults));
    let (mut touched, mut unmapped, mut views) = (Duration::ZERO, Duration::ZERO, 0);
    while views < MIN_VIEWS || begun.elapsed() < Duration::from_millis(arguments.run_ms) {
        let start = Instant::now();
        let memory = backing.map(len_bytes)?;
        let wrong = memory.touch_records();
        touched += start.elapsed();
        ensure(wrong == 0, || format!("{wrong} records of a view are not what was written"))?;
        memory.take_error()?;
        let start = Instant::now();
        drop(memory);
        unmapped += start.elapsed();
        views += 1;
    }
    let kernel_faults = (Pages::faults() - faults_before) as f64 / f64::from(views);
    let ms = |total: Duration| (total / views).as_secs_f64() * 1e3;
    let handled = (stats::get(Counter::ViewFaults) - handled_before) as f64 / f64::from(views);
    let handler_faults = Some(handled).filter(|_| arguments.kind == Kind::View);
    let small_pages = (len_bytes / RECORD_BYTES) as f64;
    Ok(serde_json::json!({
        "touch_ms": ms(touched),
        "unmap_ms": ms(unmapped),
        "kernel_faults": kernel_faults,
        "handler_faults": handler_faults,
        "small_pages_per_fault": handler_faults.map(|faults| small_pages / faults),
    }))
}
