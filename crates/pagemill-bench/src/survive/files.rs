//! Volatile files are written at full speed into memory that is too small for them. Under the limit of a cgroup, the
//! oldest volatile files must be removed in time. Other files must not be removed.

use std::time::Duration;

use super::{Options, start_in_group};
use crate::cgroup::Cgroup;
use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result};
use crate::experiment::{Metric, Progress, SampleTable, Study, not_measured, rotated};
use crate::files::mount::{FileSystem, Mounted, Mounter, PAGEMILL_MOUNT, WITHIN_SIZE};
use crate::files::place_arguments;
use crate::report::{Bound, Report, Verdict};
use crate::stats::{self, Better};
use crate::workload::file_writers::{FILL_TIME_LIMIT, KEPT_FOLDER, VOLATILE_FOLDER};

/// Total size in MiB of the files that must not be removed.
const KEPT_MIB: u64 = 64;
/// Size in bytes of the mount in a run without a cgroup limit. This size is smaller than [`LIMITED_MOUNT_BYTES`],
/// because without a limit files are removed only when the file system is full.
const UNLIMITED_MOUNT_BYTES: u64 = 4 << 30;
/// Size in bytes of the mount in a run with a cgroup limit.
const LIMITED_MOUNT_BYTES: u64 = 8 << 30;
/// Seconds of a run on plain tmpfs. The run is short because the tmpfs is soon full.
const PLAIN_SECONDS: u64 = 2;

/// Metric: GiB written per second.
const SPEED: &str = "gib_per_second";
/// Metric: peak of the memory charged to the cgroup.
const PEAK_MIB: &str = "peak_mib";
/// Subject: a run on Pagemill's mount without a cgroup limit.
const UNLIMITED: &str = "unlimited";
/// Metric: number of writes that failed.
const FAILED_WRITES: &str = "failed_writes";
/// Metrics that count losses, and the titles of their table columns. No loss is allowed.
const LOSS_METRICS: [(&str, &str); 5] = [
    (FAILED_WRITES, "failed writes"),
    ("lost_newest", "newest lost"),
    ("lost_kept", "kept lost"),
    ("torn", "torn"),
    ("kills", "kills"),
];
const METRICS: &[&str] = &[SPEED, "files", FAILED_WRITES, "lost_newest", "lost_kept", "torn", "kills", PEAK_MIB];

/// One case: a number of threads that write files of one size, in a cgroup with a memory limit. For each file size and
/// number of writers, the case with the first limit also runs without a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    file_mib: u64,
    writers: u64,
    limit_mib: u64,
}

const LIMITS_MIB: [u64; 2] = [512, 1024];

impl Case {
    fn name(&self) -> String {
        let plural = if self.writers == 1 { "" } else { "s" };
        format!("{} writer{plural}, files of {} MiB, in {} MiB", self.writers, self.file_mib, self.limit_mib)
    }

    /// Returns how many MiB of files cannot be removed: the files that are being written, and the files that must be
    /// kept.
    fn unremovable_mib(&self) -> u64 {
        self.writers * self.file_mib + KEPT_MIB
    }

    /// Returns whether the files that cannot be removed fit below the limit. Otherwise there is no speed to judge.
    fn can_fit(&self) -> bool {
        self.unremovable_mib() < self.limit_mib
    }

    /// Returns how many of the files that were closed last must still exist at the end of a run: two per writer, one
    /// per writer, or none. The result is the largest of these numbers of files that fits below the purge threshold.
    fn required_newest_files(&self) -> u64 {
        let mark = self.limit_mib - (self.limit_mib / 5).max(128);
        let fits = |count: &u64| self.unremovable_mib() + count * self.file_mib <= mark;
        [2, 1].map(|each| each * self.writers).into_iter().find(fits).unwrap_or(0)
    }
}

/// Runs all cases of volatile files; adds rows and verdicts to the report.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let mounter = Mounter::new(None)?;
    let ready = report.with_gaps(mounter.select(&common.only, &[PAGEMILL_MOUNT, WITHIN_SIZE])?);
    let cases = cases(options)?;
    let seconds = options.seconds.unwrap_or(common.quick_or_full((1, 60)));
    let rounds = common.rounds_or((2, 3));
    let mut study = Study::new(report, Case::name);
    let same_writers = |left: &Case, right: &Case| (left.file_mib, left.writers) == (right.file_mib, right.writers);
    let groups: Vec<&[Case]> = cases.chunk_by(same_writers).collect();
    let sample = |subject, setup, seconds, report: &mut Report| {
        child::failed_if_gap(take_sample(&mounter, subject, setup, seconds, report))
    };
    let progress = Progress::new((cases.len() + groups.len()) * rounds);
    for cases in groups {
        // The last run has no limit. It is the baseline of the runs with a limit.
        let limited = cases.iter().map(|&case| (case, Some(case.limit_mib)));
        let setups: Vec<_> = limited.chain([(cases[0], None)]).collect();
        for round in 0..rounds {
            for &(case, limit_mib) in rotated(&setups, round) {
                progress.step(&case.name());
                if ready.contains(&PAGEMILL_MOUNT) {
                    let outcome = sample(PAGEMILL_MOUNT, (case, limit_mib), seconds, study.report)?;
                    let samples = &mut study.samples;
                    match limit_mib {
                        Some(_) => samples.add_outcome(&case, PAGEMILL_MOUNT.name, METRICS, &outcome),
                        None => cases.iter().for_each(|case| samples.add_outcome(case, UNLIMITED, METRICS, &outcome)),
                    }
                }
                if ready.contains(&WITHIN_SIZE) && round == 0 && limit_mib.is_some() {
                    let plain = seconds.min(PLAIN_SECONDS);
                    let outcome = sample(WITHIN_SIZE, (case, limit_mib), plain, study.report)?;
                    study.samples.add_outcome(&case, WITHIN_SIZE.name, METRICS, &outcome);
                }
            }
        }
    }
    drop(progress);
    for case in &cases {
        add_rows(&mut study, case);
        study.report.add_verdict(verdict(&study.samples, case));
    }
    Ok(())
}

/// Returns the cases that `--case` selects, ordered by file size and number of writers.
fn cases(options: &Options) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for file_mib in [4, 64] {
        for writers in [1, 2, 4, 8] {
            cases.extend(LIMITS_MIB.map(|limit_mib| Case { file_mib, writers, limit_mib }));
        }
    }
    if let Some(text) = &options.case {
        cases.retain(|case| case.name().contains(text));
    }
    match cases.is_empty() {
        true => Err(Error::CannotRun("no case of --files has that in its name".to_owned())),
        false => Ok(cases),
    }
}

/// Takes one sample of a case in a new cgroup, with files on a new mount.
fn take_sample(
    mounter: &Mounter,
    subject: FileSystem,
    (case, limit_mib): (Case, Option<u64>),
    seconds: u64,
    report: &mut Report,
) -> Result<Outcome> {
    let group = match limit_mib {
        Some(mib) => Cgroup::with_limit(mib << 20),
        None => Cgroup::without_limit(),
    };
    let group = group.map_err(Error::CannotRun)?;
    let size_bytes = if limit_mib.is_some() { LIMITED_MOUNT_BYTES } else { UNLIMITED_MOUNT_BYTES };
    let mounted = mounter.mount(subject, size_bytes)?;
    make_folders(&mounted, subject).map_err(Error::Gap)?;
    // The speed is measured only after as many bytes were written as fit. Before that, files may get memory that the
    // host of a virtual machine has taken back, and its first touch is many times slower. Touching other memory
    // beforehand does not help.
    let fill_mib = if subject == PAGEMILL_MOUNT { limit_mib.unwrap_or(UNLIMITED_MOUNT_BYTES >> 20) } else { 0 };
    let options = [
        ("--writers", case.writers),
        ("--file-mib", case.file_mib),
        ("--kept-mib", KEPT_MIB),
        ("--newest", case.required_newest_files()),
        ("--fill-mib", fill_mib),
        ("--run-ms", seconds * 1000),
    ];
    let finished = start(&group, &mounted, &options)?.finish(Duration::from_secs(seconds) + 2 * FILL_TIME_LIMIT)?;
    let mut outcome = child::classify(subject.name, &finished)?;
    if let Outcome::Measured(line) = &mut outcome {
        line["kills"] = group.oom_kills().into();
        line[PEAK_MIB] = group.peak_bytes().map(stats::mib).into();
        if let Some(complaint) = line["complaint"].as_str() {
            let limit = if limit_mib.is_some() { "" } else { " (without a limit)" };
            report.add_gap(format!("{}, {}{limit}: {complaint}", subject.name, case.name()));
        }
    }
    // The files are charged to the cgroup, so the file system is unmounted before the cgroup is removed.
    let ended = mounted.unmount();
    ended.complaint.into_iter().for_each(|gap| report.add_gap(gap));
    drop(group);
    if matches!(outcome, Outcome::Killed) && subject == PAGEMILL_MOUNT {
        let (name, seconds, stderr) = (case.name(), finished.wall.as_secs_f64(), ended.stderr);
        report.add_note(format!("{name}: killed after {seconds:.2} s; the controller said: {stderr}"));
    }
    Ok(outcome)
}

/// Makes the folder for volatile files and the folder for files that must be kept. Marks the first folder, so that
/// files in it are volatile.
fn make_folders(mounted: &Mounted, subject: FileSystem) -> std::result::Result<(), String> {
    let [volatile, kept] = [VOLATILE_FOLDER, KEPT_FOLDER].map(|name| mounted.folder().join(name));
    for folder in [&volatile, &kept] {
        std::fs::create_dir(folder).map_err(|cause| format!("{}: {cause}", folder.display()))?;
    }
    let flags = rustix::fs::XattrFlags::empty();
    match rustix::fs::setxattr(&volatile, "user.pagemill.volatile", b"full", flags) {
        Err(errno) if subject == PAGEMILL_MOUNT => Err(format!("marking {}: {errno}", volatile.display())),
        _ => Ok(()),
    }
}

fn start(group: &Cgroup, mounted: &Mounted, options: &[(&str, u64)]) -> Result<RunningGroup> {
    let own = child::own_executable()?.display().to_string();
    let mut line = child::command_words(&[&own, "__file-writers"], options);
    line.extend(place_arguments(mounted));
    start_in_group(group, &line)
}

fn add_rows(study: &mut Study<'_, Case>, case: &Case) {
    let table = format!("survive: {}, {KEPT_MIB} MiB beside them that must stay", case.name());
    let losses = LOSS_METRICS.map(|(name, column)| (Metric::higher(name, "count"), column));
    let mut columns = vec![
        (Metric::higher(SPEED, "GiB/s").against(UNLIMITED), "written, GiB/s"),
        (Metric::higher(PEAK_MIB, "MiB"), "peak of the group, MiB"),
    ];
    columns.extend(losses);
    let subjects = [UNLIMITED, PAGEMILL_MOUNT.name, WITHIN_SIZE.name];
    study.rows(case, &subjects, &table, &columns);
}

fn verdict(samples: &SampleTable<Case>, case: &Case) -> Verdict {
    let target = format!("survive, {}: speed, of that without a limit", case.name());
    let blank = not_measured(target, Bound::AtLeast(0.8), "x", "pagemill was not run");
    let Some(series) = samples.get((case, PAGEMILL_MOUNT.name, SPEED)) else { return blank };
    let count = |metric| samples.sum((case, PAGEMILL_MOUNT.name, metric));
    let mut losses: Vec<String> = LOSS_METRICS
        .into_iter()
        // If the files cannot fit, failed writes are expected. All other losses count.
        .filter(|(metric, _)| case.can_fit() || *metric != FAILED_WRITES)
        .map(|(metric, name)| (count(metric), name))
        .filter(|(count, _): &(f64, _)| *count > 0.0)
        .map(|(count, name)| format!("{count} {name}"))
        .collect();
    if series.killed > 0 {
        losses.push(format!("killed {} of {}", series.killed, series.rounds.len()));
    }
    if !case.can_fit() {
        let has_lost_round = !losses.is_empty();
        losses.push(format!("{} MiB are open or must stay: no purging makes them fit", case.unremovable_mib()));
        return Verdict { note: losses.join("; "), has_lost_round, ..blank };
    }
    let has_lost_round = !series.survived() || !losses.is_empty();
    let note = match (losses.is_empty(), case.required_newest_files()) {
        (false, _) => losses.join(", "),
        (true, 0) => "nothing lost; no room for the newest files, which were not checked".to_owned(),
        (true, newest) => format!("nothing lost, the {newest} newest files were there"),
    };
    let ratios = samples.get((case, UNLIMITED, SPEED)).map(|unlimited| series.ratios(unlimited, Better::Higher));
    let estimate = stats::estimate_median(&ratios.unwrap_or_default());
    Verdict { estimate, baseline: UNLIMITED.to_owned(), has_lost_round, note, ..blank }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::VerdictState;

    const SMALL: Case = Case { file_mib: 4, writers: 8, limit_mib: 512 };

    /// [`Case::required_newest_files`] must return the numbers computed by hand. [`Case::can_fit`] must detect that the
    /// files that cannot be removed exceed the limit.
    #[test]
    fn required_newest_files_fit_below_limit() {
        let newest = |file_mib, writers, limit_mib| Case { file_mib, writers, limit_mib }.required_newest_files();
        assert_eq!([newest(4, 1, 512), newest(4, 8, 512), newest(4, 8, 1024)], [2, 16, 16]);
        // 64 MiB of kept files and 128 MiB of open files leave 192 MiB below the threshold of 384 MiB. Three files fit,
        // which is one for each writer.
        assert_eq!([newest(64, 1, 512), newest(64, 2, 512), newest(64, 4, 512)], [2, 2, 0]);
        assert_eq!([newest(64, 4, 1024), newest(64, 8, 1024)], [4, 0]);
        assert!(SMALL.can_fit() && !Case { file_mib: 64, writers: 8, limit_mib: 512 }.can_fit());
    }

    fn samples(speed: f64, failed: f64) -> SampleTable<Case> {
        let mut samples = SampleTable::new();
        for _ in 0..3 {
            samples.add_value(&SMALL, UNLIMITED, SPEED, 10.0);
            samples.add_value(&SMALL, PAGEMILL_MOUNT.name, SPEED, speed);
            samples.add_value(&SMALL, PAGEMILL_MOUNT.name, FAILED_WRITES, failed);
        }
        samples
    }

    /// A run at 0.7 of the speed of the unlimited run must miss its target, even without losses. A run at 0.9 of that
    /// speed must reach its target without losses, and miss it after failed writes. Without samples, the target must
    /// count as not measured.
    #[test]
    fn any_loss_misses_the_target() {
        assert_eq!(verdict(&samples(9.0, 0.0), &SMALL).state(), VerdictState::Reached);
        assert_eq!(verdict(&samples(7.0, 0.0), &SMALL).state(), VerdictState::FallsShort);
        let lossy = verdict(&samples(9.0, 1.0), &SMALL);
        assert_eq!((lossy.state(), lossy.note.as_str()), (VerdictState::FallsShort, "3 failed writes"));
        assert_eq!(verdict(&SampleTable::new(), &SMALL).state(), VerdictState::NotMeasured);
    }

    /// If the files of a case cannot fit below the limit, failed writes must be accepted. A killed sample must still
    /// miss the target.
    #[test]
    fn kill_misses_target_even_if_files_cannot_fit() {
        let case = Case { file_mib: 64, writers: 8, limit_mib: 512 };
        let mut samples = SampleTable::new();
        samples.add_value(&case, PAGEMILL_MOUNT.name, SPEED, 9.0);
        samples.add_value(&case, PAGEMILL_MOUNT.name, FAILED_WRITES, 20.0);
        assert_eq!(verdict(&samples, &case).state(), VerdictState::NotMeasured);
        samples.add_outcome(&case, PAGEMILL_MOUNT.name, METRICS, &Outcome::Killed);
        let killed = verdict(&samples, &case);
        assert_eq!((killed.state(), killed.note.starts_with("killed 1 of 2; ")), (VerdictState::FallsShort, true));
    }
}
