//! A RAM file system in process and through FUSE, compared with tmpfs and ext4 through system calls: a search of a big
//! tree, look-ups, creations and removals, and the memory that remains after most files were removed.
//!
//! The search is the regression test of the original series (Slab Movable Objects, 2019): a name that does not exist is
//! looked for, cold and after caches were dropped, with and without movable objects.

mod ext4;

use std::path::Path;
use std::time::Duration;

use crate::child::{self, Outcome};
use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Metric, Study, metric_names, threads_text};
use crate::files::mount::{Mounter, NEVER, PAGEMILL_FUSE};
use crate::report::{Bound, Report, Row, TableCell};
use crate::workload::find::Work;
use ext4::Ext4Image;

/// Text that `--help` prints below the options.
const HELP_EXAMPLES_AND_SUBJECTS: &str = "\
Subjects (--only):
  ramfs            RAM file system in process
  ramfs-immovable  the same, with inodes and names that keep their address
  fuse             `pagemill mount --fuse` (search only)
  tmpfs            system calls, and the program `find`
  ext4             the same on a loop device (search only)
  removed, fresh   memory: after nine tenths of the files were removed, and new

Example:
  pagemill bench find --quick --only ramfs,tmpfs

Without --quick it takes some minutes. tmpfs, ext4 and fuse need root.
Methods and targets: docs/benchmarks-slab.md.";

#[derive(Clone, Debug, clap::Args)]
#[command(after_help = HELP_EXAMPLES_AND_SUBJECTS)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// Number of files that are searched (default 100,000, with --quick 20,000). Of ten times as many files, nine
    /// tenths are removed
    #[arg(long, value_parser = clap::value_parser!(u32).range(1000..=1_000_000))]
    pub files: Option<u32>,
}

const RAMFS: &str = "ramfs";
const IMMOVABLE: &str = "ramfs-immovable";
const FUSE: &str = "fuse";
const TMPFS: &str = "tmpfs";
const EXT4: &str = "ext4";
/// Subject: the file system from which nine tenths of the files were removed.
const REMOVED: &str = "removed";
/// Subject: a new file system with the files that remain in [`REMOVED`].
const FRESH: &str = "fresh";

const SUBJECTS: [&str; 7] = [RAMFS, IMMOVABLE, FUSE, TMPFS, EXT4, REMOVED, FRESH];

/// The published results: the series that the kernel had, and the seconds of the search, cold and after caches of names
/// and inodes were dropped.
///
/// Source: T. C. Harding, "Slab Movable Objects (SMO)" v3, linux-kernel, April 2019.
const ORIGINAL: [(&str, f64, f64); 3] = [
    ("original-2019: not movable", 29.799, 6.828),
    ("original-2019: movable, not dentries", 30.075, 6.626),
    ("original-2019: movable, also dentries", 30.637, 6.886),
];

const FILES_PER_DIRECTORY: u64 = 100;
/// Number of files in the file system whose look-ups are timed.
const LOOKUP_FILES: u64 = 20_000;
/// Number of files that each thread creates and then removes.
const CHURN_FILES: u64 = 1000;
/// Milliseconds of each kind of look-up, and of creations and removals (quick, full).
const RUN_MS: (u64, u64) = (200, 1000);
/// Size of the file systems that are mounted, in bytes.
const MOUNT_BYTES: u64 = 1 << 30;
const TIME_LIMIT: Duration = Duration::from_secs(600);

const COLD: Metric = Metric::lower("cold_ms", "ms").against(TMPFS);
const DROPPED: Metric = Metric::lower("dropped_ms", "ms").against(TMPFS);
const WARM: Metric = Metric::lower("warm_ms", "ms").against(TMPFS);
const SHORT: Metric = Metric::lower("short_ns", "ns").against(TMPFS);
const NEGATIVE: Metric = Metric::lower("negative_ns", "ns").against(TMPFS);
const COMPONENT: Metric = Metric::lower("component_ns", "ns").against(TMPFS);
const PAIRS: Metric = Metric::higher("pairs_per_second", "1/s").against(TMPFS);
const LEFT: Metric = Metric::lower("left_mib", "MiB").against(FRESH);
const COUNTED: Metric = Metric::lower("counted_mib", "MiB").against(FRESH);
const PER_FILE: Metric = Metric::lower("bytes_per_file", "B").against(FRESH);
const SHRINK: Metric = Metric::lower("shrink_ms", "ms");
const SPARSE_SEARCH: Metric = Metric::lower("sparse_ms", "ms").against(FRESH);
const PACKED_SEARCH: Metric = Metric::lower("search_ms", "ms").against(FRESH);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    Search { files: u64 },
    Lookups,
    Churn { threads: u64 },
    Memory { files: u64 },
}

impl Case {
    fn name(self) -> String {
        match self {
            Self::Search { files } => format!("search of {files} files in {} directories", files / FILES_PER_DIRECTORY),
            Self::Lookups => "look-ups".to_owned(),
            Self::Churn { threads } => format!("create and unlink, {}", threads_text(threads)),
            Self::Memory { files } => format!("{files} files, nine tenths removed"),
        }
    }

    /// Returns the metrics and the titles of their columns.
    fn columns(self) -> &'static [(Metric, &'static str)] {
        match self {
            Self::Search { .. } => &[(COLD, "cold, ms"), (DROPPED, "caches dropped, ms"), (WARM, "warm, ms")],
            Self::Lookups => &[(SHORT, "short path"), (NEGATIVE, "missing name"), (COMPONENT, "a component")],
            Self::Churn { .. } => &[(PAIRS, "pairs a second")],
            Self::Memory { .. } => &[
                (LEFT, "MiB resident"),
                (COUNTED, "MiB counted"),
                (PER_FILE, "B per file"),
                (SHRINK, "ms to shrink"),
                (SPARSE_SEARCH, "search before, ms"),
                (PACKED_SEARCH, "search afterwards, ms"),
            ],
        }
    }

    fn subjects(self) -> &'static [&'static str] {
        match self {
            Self::Search { .. } => &[RAMFS, IMMOVABLE, FUSE, TMPFS, EXT4],
            Self::Lookups | Self::Churn { .. } => &[RAMFS, IMMOVABLE, TMPFS],
            Self::Memory { .. } => &[REMOVED, FRESH],
        }
    }

    /// Returns the command line of the workload, without the arguments for a folder.
    fn arguments(self, common: &CommonOptions, subject: &str) -> Vec<String> {
        let (work, files, directories, threads) = match self {
            Self::Search { files } => (Work::Search, files, files / FILES_PER_DIRECTORY, 1),
            Self::Lookups => (Work::Lookups, LOOKUP_FILES, LOOKUP_FILES / FILES_PER_DIRECTORY, 1),
            Self::Churn { threads } => (Work::Churn, CHURN_FILES, threads, threads),
            Self::Memory { files } if subject == REMOVED => (Work::Removed, files, files / FILES_PER_DIRECTORY / 10, 1),
            Self::Memory { files } => (Work::Fresh, files, files / FILES_PER_DIRECTORY / 10, 1),
        };
        let numbers = [
            ("--files", files),
            ("--directories", directories),
            ("--run-ms", common.quick_or_full(RUN_MS)),
            ("--threads", threads),
        ];
        let mut line = child::command_words(&["__find", "--work", &child::word(&work)], &numbers);
        line.extend((subject == IMMOVABLE).then(|| "--immovable".to_owned()));
        line
    }
}

/// What mounts file systems. A file system that cannot be mounted has a reason instead.
struct Mounts {
    mounter: std::result::Result<Mounter, String>,
    ext4: std::result::Result<Ext4Image, String>,
}

impl Mounts {
    /// Finds out what can be mounted for the wanted subjects. A search has `files` files.
    fn new(common: &CommonOptions, files: u64) -> Self {
        let mounter = match [TMPFS, FUSE, EXT4].into_iter().any(|subject| common.is_wanted(subject)) {
            true => Mounter::new(None).map_err(|error| error.to_string()),
            false => Err("not wanted".to_owned()),
        };
        let ext4 = match &mounter {
            Ok(_) if common.is_wanted(EXT4) => Ext4Image::new(2 * files).map_err(|error| error.to_string()),
            Ok(_) => Err("not wanted".to_owned()),
            Err(why) => Err(why.clone()),
        };
        Self { mounter, ext4 }
    }

    /// Returns why a subject cannot be measured.
    fn gap(&self, subject: &str) -> Option<String> {
        let why = match subject {
            TMPFS | FUSE => self.mounter.as_ref().err(),
            EXT4 => self.ext4.as_ref().err(),
            _ => None,
        };
        why.map(|why| format!("{subject}: {why}"))
    }
}

/// Runs all cases. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if a search or a look-up had a wrong result; [`Error::CannotRun`] for an unknown subject.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    common.check_only(&SUBJECTS)?;
    let files = options.files.map_or(common.quick_or_full((20_000, 100_000)), u64::from);
    let mounts = Mounts::new(common, files);
    for gap in common.wanted(&SUBJECTS).into_iter().filter_map(|subject| mounts.gap(subject)) {
        report.add_gap(gap);
    }
    child::touch_beforehand(common.quick_or_full((512, 2048)))?;
    let cases = [
        Case::Search { files },
        Case::Lookups,
        Case::Churn { threads: 1 },
        Case::Churn { threads: 2 },
        Case::Memory { files: 10 * files },
    ];
    let mut study = Study::new(report, |case: &Case| case.name());
    for case in cases {
        let is_ready = |subject: &&&'static str| common.is_wanted(subject) && mounts.gap(subject).is_none();
        let subjects: Vec<&'static str> = case.subjects().iter().filter(is_ready).copied().collect();
        study.measure_by_case(
            (&[case], common.rounds()),
            &subjects,
            &metric_names(case.columns()),
            |case, subject| child::failed_if_gap(sample(*case, common, subject, &mounts)),
        )?;
        let table = format!("{}: median, half the spread, times the baseline", case.name());
        study.rows(&case, &subjects, &table, case.columns());
        if matches!(case, Case::Search { .. }) && !subjects.is_empty() {
            add_original(study.report, &case, &table);
        }
        judge(&mut study, case);
    }
    Ok(())
}

fn sample(case: Case, common: &CommonOptions, subject: &'static str, mounts: &Mounts) -> Result<Outcome> {
    let line = case.arguments(common, subject);
    let run = |folder: &Path, more: &[&str]| {
        let folder = ["--folder".to_owned(), folder.display().to_string()];
        let more = more.iter().map(|word| (*word).to_owned());
        child::run_plain(subject, line.iter().cloned().chain(folder).chain(more), TIME_LIMIT)
    };
    let gap = |why: &String| Error::Gap(why.clone());
    match subject {
        TMPFS => {
            let mounted = mounts.mounter.as_ref().map_err(gap)?.mount(NEVER, MOUNT_BYTES)?;
            run(mounted.folder(), &[])
        }
        FUSE => {
            let mounted = mounts.mounter.as_ref().map_err(gap)?.mount(PAGEMILL_FUSE, MOUNT_BYTES)?;
            let outcome = run(mounted.folder(), &["--remount"])?;
            mounted.unmount().complaint.map_or(Ok(outcome), |complaint| Err(Error::Gap(complaint)))
        }
        EXT4 => {
            let mounted = mounts.ext4.as_ref().map_err(gap)?.mount()?;
            run(mounted.folder(), &["--mount-anew", &mounted.remount_command()])
        }
        _ => child::run_plain(subject, line, TIME_LIMIT),
    }
}

/// Adds the verdicts on a case.
fn judge(study: &mut Study<'_, Case>, case: Case) {
    let name = case.name();
    let key = |subject, metric: Metric| (&case, subject, metric.name);
    let mut judge_time =
        |what: &str, bound, own, base| study.judge_time_ratio(format!("{name}: {what}"), bound, own, base);
    match case {
        Case::Search { .. } => {
            for (metric, title) in case.columns() {
                let when = title.trim_end_matches(", ms");
                let (own, without, tmpfs) = (key(RAMFS, *metric), key(IMMOVABLE, *metric), key(TMPFS, *metric));
                judge_time(&format!("{when}, speed with mobility"), Bound::AtLeast(0.98), own, without);
                judge_time(&format!("{when}, speed"), Bound::AtLeast(3.0), own, tmpfs);
            }
        }
        Case::Lookups => {
            let pair = |metric| (key(RAMFS, metric), key(TMPFS, metric));
            let (own, base) = pair(COMPONENT);
            judge_time("speed of a component", Bound::AtLeast(1.0), own, base);
            let (own, base) = pair(SHORT);
            judge_time("speed of a short path, against stat(2)", Bound::AtLeast(3.0), own, base);
            let (own, base) = (key(RAMFS, NEGATIVE), key(RAMFS, SHORT));
            judge_time("time of a missing name, of that of a name that exists", Bound::AtMost(1.0), own, base);
        }
        Case::Churn { .. } => {
            let (own, base) = (key(RAMFS, PAIRS), key(TMPFS, PAIRS));
            study.judge_quotient(format!("{name}: speed"), Bound::AtLeast(2.0), own, base);
        }
        Case::Memory { .. } => {
            for (metric, what) in [(LEFT, "resident memory"), (COUNTED, "counted memory")] {
                judge_time(
                    &format!("{what} after shrink"),
                    Bound::AtMost(1.25),
                    key(REMOVED, metric),
                    key(FRESH, metric),
                );
            }
            let (own, base) = (key(REMOVED, PACKED_SEARCH), key(REMOVED, SPARSE_SEARCH));
            judge_time("speed of a search after shrink, of that before", Bound::AtLeast(0.95), own, base);
        }
    }
}

/// Adds the original's figures to the report. They are from another machine and tree, so they have no ratio.
fn add_original(report: &mut Report, case: &Case, table: &str) {
    for (subject, cold_s, dropped_s) in ORIGINAL {
        for (metric, seconds) in [(0, cold_s), (1, dropped_s)] {
            let (metric, column) = case.columns()[metric];
            report.add_row(Row {
                case: case.name(),
                subject: subject.to_owned(),
                cell: Some(TableCell { table: table.to_owned(), column: column.to_owned() }),
                ..report.single_value(metric.name, seconds * 1e3, "ms")
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each case must have a name of its own, and only subjects that the experiment knows.
    #[test]
    fn cases_have_names_and_known_subjects() {
        let (one, two) = (Case::Churn { threads: 1 }, Case::Churn { threads: 2 });
        let cases = [Case::Search { files: 3000 }, Case::Lookups, one, two, Case::Memory { files: 9000 }];
        assert!(cases.iter().all(|case| case.subjects().iter().all(|subject| SUBJECTS.contains(subject))));
        let names: std::collections::BTreeSet<String> = cases.iter().map(|case| case.name()).collect();
        assert_eq!(names.len(), cases.len());
        assert_eq!(cases[0].name(), "search of 3000 files in 30 directories");
    }

    /// The help must name all subjects.
    #[test]
    fn help_names_all_subjects() {
        assert_eq!(SUBJECTS.into_iter().find(|subject| !HELP_EXAMPLES_AND_SUBJECTS.contains(subject)), None);
    }

    /// The published figures must be those of the original's cover letter: dentries that move cost 3 %.
    #[test]
    fn published_figures_are_in_order() {
        assert!(ORIGINAL.iter().all(|(_, cold_s, dropped_s)| cold_s > dropped_s));
        assert!((ORIGINAL[2].1 / ORIGINAL[0].1 - 1.028).abs() < 0.001);
    }
}
