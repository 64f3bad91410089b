//! Threads that write and free memory (writers) in a cgroup. The limit of the cgroup has room for their live memory,
//! but not also for the memory that they freed.

use std::time::Duration;

use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{Metric, Named, SampleTable, Study, not_measured};
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
const METRICS: &[&str] = &[SPEED, FAILED_ALLOCATIONS, USED_SHARE];

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
    let mut study = Study::new(report, |case: &Case| case.name());
    let mut complaints = Vec::new();
    study.measure_by_case((&CASES, rounds), &ready, METRICS, |case, subject| {
        let outcome = take_sample(subject, *case, seconds)?;
        if let Outcome::Measured(line) = &outcome {
            let written_gib = line[SPEED].as_f64().unwrap_or(0.0) * (seconds * case.processes) as f64;
            complaints.extend(complaint_if_too_little_freed(*case, subject, written_gib));
        }
        Ok(outcome)
    })?;
    complaints.into_iter().for_each(|gap| study.report.add_gap(gap));
    for case in CASES {
        add_rows(&mut study, case, &ready);
    }
    CASES.into_iter().for_each(|case| study.report.add_verdict(verdict(&study.samples, case)));
    Ok(())
}

/// Returns a sentence for the report (gap) if a sample freed too little memory to prove anything. Assumes that all
/// processes of the sample write as fast as the first one.
fn complaint_if_too_little_freed(case: Case, ready: &AvailableSubject, written_gib: f64) -> Option<String> {
    (written_gib * 1024.0 < (MIN_FREED_TO_LIMIT_RATIO * LIMIT_MIB) as f64).then(|| {
        let (name, case) = (ready.name(), case.name());
        format!(
            "{name} {case}: a sample freed less than {MIN_FREED_TO_LIMIT_RATIO} times the limit; give it more --seconds"
        )
    })
}

/// Takes one sample in a new cgroup.
///
/// # Errors
///
/// [`Error::Gap`](crate::error::Error::Gap) if nothing could be measured.
fn take_sample(ready: &AvailableSubject, case: Case, seconds: u64) -> Result<Outcome> {
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
    let mut outcome = child::classify(ready.name(), &finished)?;
    if let Outcome::Measured(line) = &mut outcome {
        line[USED_SHARE] = used_share.into();
    }
    Ok(outcome)
}

fn add_rows(study: &mut Study<'_, Case>, case: Case, ready: &[&AvailableSubject]) {
    let columns = [
        (Metric::higher(SPEED, "GiB/s"), "written, GiB/s"),
        (Metric::higher(USED_SHARE, "share"), "of the limit used"),
        (Metric::higher(FAILED_ALLOCATIONS, "calls"), "refused"),
    ];
    let table = format!("survive: {} in {LIMIT_MIB} MiB, {LIVE_MIB} MiB held at a time", case.name());
    study.rows(&case, ready, &table, &columns);
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
