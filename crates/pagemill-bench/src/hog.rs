//! The ebizzy workload and a memory hog under the same limit. Free memory must move from one process to the other.
//!
//! Workload and hog use memory alternately. The memory in use by the two processes always fits below the limit. The sum
//! of used memory and *retained* free memory does not. A process whose allocator retains free memory is killed. An
//! allocator that returns free memory at once loses time at every record. Pagemill should do neither. A kill is a
//! result, not an error.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use crate::cgroup::Cgroup;
use crate::child::{self, Outcome, RunningGroup};
use crate::ebizzy::{FAULTS, MIN_FAULTS_IF_RETURNING};
use crate::error::{Error, Result, doing};
use crate::experiment::{CommonOptions, Metric, Named, SampleTable, Study, not_measured};
use crate::report::{Bound, Report, Series, Verdict};
use crate::stats::{self, Better};
use crate::subject::{AvailableSubject, PAGEMILL, Role};
use crate::workload::hog::LOCK_FILE;

/// The memory limit of the cgroup that contains both the workload and the hog.
const LIMIT_MIB: u64 = 512;
/// MiB that a process uses while it has the lock that the two processes share. [`LIMIT_MIB`] has room for the memory of
/// one process, but not of two.
const TURN_MIB: u64 = 300;
const THREADS: u16 = 2;
const CASE: &str = "hog, 512 MiB, 2 threads";

const RECORDS: &str = "records_per_second";
const METRICS: &[&str] = &[FAULTS, RECORDS, "hog_rounds", "refused", "hog_refused", "bursts"];

/// Runs ebizzy and a memory hog together under every allocator; adds rows and a verdict to the report.
pub fn run(common: &CommonOptions, ready: &[AvailableSubject], report: &mut Report) -> Result<()> {
    let is_limited = match check_limit() {
        Ok(()) => true,
        Err(why) => {
            report.add_gap(format!("hog: without a limit around workload and hog, since {why}"));
            false
        }
    };
    let mut study = Study::new(report, |case: &&str| (*case).to_owned());
    study.measure_by_case((&[CASE], common.rounds()), ready, METRICS, |_, subject| {
        take_sample(subject, common, is_limited)
    })?;
    let table = format!("ebizzy with a hog: {THREADS} threads, {LIMIT_MIB} MiB around both, {TURN_MIB} MiB by turns");
    let columns = [
        (Metric::higher(RECORDS, "1/s").against("glibc-eager"), "records/s"),
        (Metric::higher("hog_rounds", "rounds"), "turns of the hog"),
        (Metric::higher("refused", "calls"), "refused"),
        (Metric::higher("hog_refused", "calls"), "refused to the hog"),
    ];
    study.rows(&CASE, ready, &table, &columns);
    study.report.add_verdict(verdict(&study.samples, ready));
    Ok(())
}

/// Takes one sample of a subject in a new cgroup. If they run in a cgroup with a limit, Pagemill gets no `--limit`
/// option: it must detect the cgroup's limit itself.
///
/// # Errors
///
/// [`Error::Gap`] if nothing could be measured.
fn take_sample(ready: &AvailableSubject, common: &CommonOptions, is_limited: bool) -> Result<Outcome> {
    let folder = tempfile::tempdir().map_err(doing("making a folder for the lock"))?;
    let limit = format!("{LIMIT_MIB}M");
    let limit_options = ["--limit", &limit];
    let mut line = ready.launcher("hog", if is_limited { &[] } else { &limit_options })?;
    line.push(child::own_executable()?.display().to_string());
    line.extend(pair_arguments(common, folder.path()));
    sample_pair(ready.name(), &line, folder.path(), is_limited, &[])
}

/// Takes one sample. Starts workload and hog with the command line `launcher` and the environment variables `settings`;
/// if `is_limited` is true, in a new cgroup with a memory limit.
///
/// # Errors
///
/// [`Error::Gap`] if the cgroup could not be made.
pub fn sample_pair(
    subject: &str,
    launcher: &[String],
    folder: &Path,
    is_limited: bool,
    settings: &[(&str, &str)],
) -> Result<Outcome> {
    File::create(folder.join(LOCK_FILE)).map_err(doing("making the lock"))?;
    let gap = |why| Error::Gap(format!("hog: {subject}: {why}"));
    let group = is_limited.then(|| Cgroup::with_limit(LIMIT_MIB << 20)).transpose().map_err(gap)?;
    let mut command = child::command_in_group(group.as_ref(), launcher)?;
    command.envs(settings.iter().copied());
    let finished = RunningGroup::start(&mut command)?.finish(Duration::from_secs(90))?;
    // The cgroup must be removed only after its processes have ended. An early return also drops `group`.
    drop(group);
    child::classify(subject, &finished)
}

/// Checks that the bench can make a cgroup with a memory limit on this machine. The error is the reason why it cannot.
pub fn check_limit() -> std::result::Result<(), String> {
    Cgroup::with_limit(LIMIT_MIB << 20).map(|_probe| ()).map_err(|why| why.to_string())
}

/// Returns the arguments of the bench that start workload and hog. Further arguments of the workload may follow.
pub fn pair_arguments(common: &CommonOptions, folder: &Path) -> Vec<String> {
    let [warm_ms, measure_ms, burst_every_ms, pause_ms] =
        common.quick_or_full(([50, 400, 300, 100], [250, 3000, 500, 200]));
    let work = [
        ("--threads", u64::from(THREADS)),
        ("--warm-ms", warm_ms),
        ("--measure-ms", measure_ms),
        ("--burst-mib", TURN_MIB),
        ("--burst-every-ms", burst_every_ms),
    ];
    let (folder, hog) = (folder.display().to_string(), [("--mib", TURN_MIB), ("--pause-ms", pause_ms)]);
    [child::command_words(&["__pair", "--folder", &folder], &hog), child::command_words(&["--"], &work)].concat()
}

fn verdict(samples: &SampleTable<&'static str>, ready: &[AvailableSubject]) -> Verdict {
    let bound = Bound::AtLeast(6.0);
    let target = "ebizzy with a hog, against the best returning at once";
    let Some(series) = samples.get((&CASE, PAGEMILL, RECORDS)) else {
        return not_measured(target, bound, "x", "pagemill was not run");
    };
    let refusals = samples.sum((&CASE, PAGEMILL, "refused")) + samples.sum((&CASE, PAGEMILL, "hog_refused"));
    let eager = ready.iter().filter(|ready| ready.subject.role == Role::ReturningAtOnce);
    let eager = eager.filter(|ready| {
        let faults = samples.get((&CASE, ready.name(), FAULTS)).and_then(Series::median);
        faults.is_some_and(|faults| faults >= MIN_FAULTS_IF_RETURNING)
    });
    let best = samples.best_survivor(&CASE, eager.map(Named::name), RECORDS);
    let has_lost_round = !series.survived() || refusals > 0.0;
    let Some((name, best)) = best else {
        let why = "no subject that returns at once survived";
        return Verdict { has_lost_round, ..not_measured(target, bound, "x", why) };
    };
    let note = match has_lost_round {
        true => format!("best: {name}; pagemill was killed or refused"),
        false => format!("best: {name}"),
    };
    let peers = ready.iter().filter(|ready| ready.name() != PAGEMILL);
    let note = match samples.best_survivor(&CASE, peers.map(Named::name), RECORDS) {
        Some((name, peer)) if !has_lost_round => {
            let ratio = stats::median(&series.ratios(peer, Better::Higher)).unwrap_or_default();
            format!("{note}; {ratio:.2} x the best of all survivors, {name}")
        }
        _ => note,
    };
    let blank = not_measured(target, bound, "x", "");
    let compared = blank.compared(Some(series), ("best-eager", Some(best)), Better::Higher);
    Verdict { has_lost_round, note, ..compared }
}
