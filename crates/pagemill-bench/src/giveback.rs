//! Time to return 1 GiB of free memory on request, and the longest delay of a malloc in another thread meanwhile.

use std::time::Duration;

use crate::child;
use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Metric, Study, metric_names, not_measured};
use crate::proc;
use crate::report::{Bound, Report, Verdict};
use crate::stats;
use crate::subject::{self, PAGEMILL, Role};

/// Sizes in bytes of the allocations that are freed before free memory is requested. The report has one table for each
/// size.
const ALLOCATION_SIZES: [usize; 2] = [256 << 10, 4 << 10];

/// The amount of free memory, in MiB, to which the targets apply.
const FULL_MIB: u64 = 1024;

const BASELINE: &str = "glibc";
/// Metric: duration in milliseconds of the request to return free memory.
const WALL_MS: &str = "ms";
/// Metric: resident memory before the request to return free memory, minus resident memory after the request.
const RETURNED_MIB: &str = "returned_mib";
/// Metric: resident memory before the request to return free memory.
const HELD_MIB: &str = "held_mib";
/// Metric: longest duration of a malloc in another thread during the request to return free memory.
const LONGEST_MALLOC_MS: &str = "longest_malloc_ms";
/// Metric: longest duration of a malloc in the other thread in the 100 ms before the request to return free memory.
const LONGEST_MALLOC_BEFORE_MS: &str = "longest_malloc_quiet_ms";

/// The metrics, and their columns of the table.
const COLUMNS: [(Metric, &str); 5] = [
    (Metric::lower(HELD_MIB, "MiB"), "MiB before the return"),
    (Metric::higher(RETURNED_MIB, "MiB"), "MiB returned"),
    (Metric::lower(WALL_MS, "ms"), "ms"),
    // A subject that has little to return needs little time, so its time is no baseline. Only the delay of other
    // threads can be compared.
    (Metric::lower(LONGEST_MALLOC_MS, "ms").against(BASELINE), "longest malloc, ms"),
    (Metric::lower(LONGEST_MALLOC_BEFORE_MS, "ms"), "longest in 100 ms before"),
];

/// MiB of freed memory, and size of the freed allocations in bytes.
type Case = (u64, usize);

pub fn run(common: &CommonOptions, report: &mut Report) -> Result<()> {
    let is_wanted = |subject: &subject::Subject| !common.only.is_empty() || subject.role != Role::ReturningAtOnce;
    let ready = report.with_gaps(subject::select_available(&common.only, is_wanted)?);
    let mib = common.quick_or_full((FULL_MIB / 4, FULL_MIB));
    let needed = (mib + mib / 2) << 20;
    if proc::available_bytes().is_some_and(|available| available < needed) {
        return Err(Error::CannotRun(format!("{} MiB of memory are not available", needed >> 20)));
    }
    child::touch_beforehand(mib + mib / 8)?;
    let mut study = Study::new(report, |(mib, piece): &Case| format!("{mib} MiB in pieces of {} KiB", piece >> 10));
    let cases = ALLOCATION_SIZES.map(|piece| (mib, piece));
    let metrics = metric_names(&COLUMNS);
    study.measure_by_case((&cases, common.rounds()), &ready, &metrics, |(mib, piece), subject| {
        let how = child::word(&subject.subject.give_back);
        let arguments = ["__giveback", "--mib", &mib.to_string(), "--piece", &piece.to_string(), "--how", &how];
        child::run_under(subject, arguments, Duration::from_secs(120))
    })?;
    for case in &cases {
        let table = format!("{}, freed, then asked for", study.name(case));
        study.rows(case, &ready, &table, &COLUMNS);
        add_verdicts(&mut study, case);
    }
    Ok(())
}

fn add_verdicts(study: &mut Study<'_, Case>, case: &Case) {
    let (mib, piece) = *case;
    let name = format!("giveback of 1 GiB in pieces of {} KiB", piece >> 10);
    let targets = [(WALL_MS, 50.0, "ms to give back"), (LONGEST_MALLOC_MS, 5.0, "longest unrelated malloc")];
    for (metric, bound, what) in targets {
        let target = format!("{name}, {what}");
        let verdict = not_measured(target, Bound::AtMost(bound), "ms", "");
        let get = |metric| study.samples.get((case, PAGEMILL, metric));
        let verdict = match (get(metric), get(RETURNED_MIB), get(HELD_MIB)) {
            _ if mib < FULL_MIB => Verdict { note: "--quick asks for less than 1 GiB".to_owned(), ..verdict },
            (Some(series), Some(returned), Some(held)) => {
                let (returned, held) = (returned.median().unwrap_or(0.0), held.median().unwrap_or(0.0));
                Verdict {
                    estimate: stats::estimate_median(&series.values()),
                    // The target also falls short if Pagemill did not return the free memory that it retained.
                    has_lost_round: !series.survived() || held - returned > 0.1 * mib as f64,
                    note: format!("{returned:.0} of {held:.0} MiB returned"),
                    ..verdict
                }
            }
            _ => Verdict { note: "pagemill was not run".to_owned(), ..verdict },
        };
        study.report.add_verdict(verdict);
    }
}
