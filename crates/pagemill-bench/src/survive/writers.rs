//! Threads that write and free memory (writers) in a cgroup. The limit of the cgroup has room for their live memory,
//! but not also for the memory that they freed.

use std::time::Duration;

use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{Metric, Named, Progress, SampleTable, not_measured, report_rows};
use crate::report::{Bound, Report, Verdict};
use crate::stats;
use crate::subject::{AvailableSubject, PAGEMILL, Role};

use super::{LIMIT_MIB, Options, make_group, start_in_group, workload_line};

/// MiB of live memory of all writing threads together. Live memory and the memory that these threads free in one phase
/// together exceed the limit of the cgroup.
const LIVE_MIB: u64 = 160;
/// Minimum of the memory that a sample frees, divided by the limit of the cgroup. A sample that frees less proves
/// nothing.
const MIN_FREED_TO_LIMIT_RATIO: u64 = 2;

const SPEED: &str = "gib_per_second";
const FAILED_ALLOCATIONS: &str = "refused";
const USED_SHARE: &str = "used_share";
const METRICS: &[&str] = &[SPEED, FAILED_ALLOCATIONS];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    processes: u64,
    writers: u64,
}

impl Case {
    fn name(self) -> String {
        match self.processes {
            1 => format!("{} writers", self.writers),
            many => format!("{many} x {} writers", self.writers),
        }
    }
}

const CASES: [Case; 6] = [
    Case { processes: 1, writers: 2 },
    Case { processes: 1, writers: 4 },
    Case { processes: 1, writers: 8 },
    Case { processes: 2, writers: 1 },
    Case { processes: 2, writers: 2 },
    Case { processes: 2, writers: 4 },
];

/// Measures all numbers of writing threads and processes under every allocator whose settings let it retain free
/// memory; adds rows and verdicts to the report.
pub fn run(options: &Options, ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let common = &options.common;
    let ready: Vec<&AvailableSubject> =
        ready.iter().filter(|ready| ready.subject.role != Role::ReturningAtOnce).collect();
    let seconds = options.seconds.unwrap_or(common.quick_or_full((1, 60)));
    let rounds = common.rounds_or((2, 3));
    let progress = Progress::new(CASES.len() * rounds * ready.len());
    let mut samples = SampleTable::new();
    for case in CASES {
        for _ in 0..rounds {
            for subject in &ready {
                progress.step(&format!("{}, {}", case.name(), subject.name()));
                let Some((outcome, used_share)) = report.unless_gap(take_sample(subject, case, seconds))? else {
                    continue;
                };
                samples.add_outcome(&case, subject.name(), METRICS, &outcome);
                if let Outcome::Measured(line) = &outcome {
                    samples.add_value(&case, subject.name(), USED_SHARE, used_share);
                    let written_gib = line[SPEED].as_f64().unwrap_or(0.0) * (seconds * case.processes) as f64;
                    add_gap_if_too_little_freed(report, case, subject, written_gib);
                }
            }
        }
    }
    drop(progress);
    for case in CASES {
        add_rows(report, &samples, case, &ready);
    }
    CASES.into_iter().for_each(|case| report.add_verdict(verdict(&samples, case)));
    Ok(())
}

/// Adds a sentence (gap) to the report if a sample freed too little memory to prove anything. Assumes that all
/// processes of the sample write as fast as the first one.
fn add_gap_if_too_little_freed(report: &mut Report, case: Case, ready: &AvailableSubject, written_gib: f64) {
    if written_gib * 1024.0 < (MIN_FREED_TO_LIMIT_RATIO * LIMIT_MIB) as f64 {
        report.add_gap(format!(
            "{} {}: a sample freed less than {MIN_FREED_TO_LIMIT_RATIO} times the limit; give it more --seconds",
            ready.name(),
            case.name()
        ));
    }
}

/// Takes one sample in a new cgroup. Returns its outcome, and the cgroup's peak as a fraction of its limit.
///
/// # Errors
///
/// [`Error::Gap`](crate::error::Error::Gap) if nothing could be measured.
fn take_sample(ready: &AvailableSubject, case: Case, seconds: u64) -> Result<(Outcome, f64)> {
    let group = make_group(ready, LIMIT_MIB)?;
    let mut line = workload_line(ready, &[], "__writers")?;
    let options = [
        ("--processes", case.processes),
        ("--threads", case.writers),
        ("--mib", LIVE_MIB / case.processes),
        ("--run-ms", seconds * 1000),
    ];
    line.extend(child::numeric_options(&options));
    let finished = start_in_group(&group, &line)?.finish(Duration::from_secs(seconds + 60))?;
    let used_share = group.peak_bytes().unwrap_or(0) as f64 / (LIMIT_MIB << 20) as f64;
    child::classify(ready.name(), &finished).map(|outcome| (outcome, used_share))
}

fn add_rows(report: &mut Report, samples: &SampleTable<Case>, case: Case, ready: &[&AvailableSubject]) {
    let columns = [
        (Metric::higher(SPEED, "GiB/s"), "written, GiB/s"),
        (Metric::higher(USED_SHARE, "share"), "of the limit used"),
        (Metric::higher(FAILED_ALLOCATIONS, "calls"), "refused"),
    ];
    let table = format!("survive: {} in {LIMIT_MIB} MiB, {LIVE_MIB} MiB held at a time", case.name());
    report_rows(report, samples, (&case, &case.name()), ready, &table, &columns);
}

fn verdict(samples: &SampleTable<Case>, case: Case) -> Verdict {
    let target = format!("survive, {}: used of the limit", case.name());
    let blank = not_measured(target, Bound::AtLeast(0.9), "x", "pagemill was not run");
    let Some(series) = samples.get((&case, PAGEMILL, SPEED)) else { return blank };
    let refused = samples.sum((&case, PAGEMILL, FAILED_ALLOCATIONS));
    let has_lost_round = !series.survived() || refused > 0.0;
    let used = samples.get((&case, PAGEMILL, USED_SHARE)).map(|series| series.values()).unwrap_or_default();
    let killed: Vec<_> = ["glibc", "jemalloc", "mimalloc", "tcmalloc"]
        .into_iter()
        .filter(|name| samples.get((&case, name, SPEED)).is_some_and(|series| series.killed > 0))
        .collect();
    let others =
        if killed.is_empty() { "no peer was killed".to_owned() } else { format!("killed: {}", killed.join(", ")) };
    let note = if has_lost_round { format!("pagemill was killed or refused; {others}") } else { others };
    Verdict { estimate: stats::estimate_median(&used), has_lost_round, note, ..blank }
}
