//! Memory that files use in addition to their content, under each setting for huge pages. Also whether large files get
//! huge pages.

use std::time::Duration;

use super::mount::{ALWAYS, FileSystem, Mounter, NEVER, PAGEMILL_MOUNT, WITHIN_SIZE};
use crate::child;
use crate::error::Result;
use crate::experiment::{Metric, SampleTable, Study, not_measured};
use crate::report::{Bound, Report, Verdict};
use crate::stats::Better;

/// Metric: MiB in use on the file system directly after the last file was closed.
const USED_AT_ONCE: &str = "used_at_once";
/// Metric: MiB in use on the file system a second after the last file was closed.
const USED_AFTER_SECOND: &str = "used_after_second";
/// Metric: fraction of the first file that is mapped by huge pages.
const HUGE_SHARE: &str = "huge_share";
/// Maximum of [`USED_AFTER_SECOND`], relative to tmpfs without huge pages.
const MAX_USED_RATIO: f64 = 1.1;
/// Minimum of [`HUGE_SHARE`].
const MIN_HUGE_SHARE: f64 = 0.95;

/// What the verdict on files of one kind depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Criterion {
    /// Files of this kind have no verdict.
    Not,
    /// By the memory that the files use, relative to tmpfs without huge pages.
    BySize,
    /// By the fraction of a file that is mapped by huge pages ([`HUGE_SHARE`]).
    ByHugePages,
}

/// Files of one size, all written in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FileKind {
    name: &'static str,
    files: u64,
    bytes: u64,
    /// Number of bytes that each write appends to the file. If it is 0, only one byte in the middle of the file is
    /// written, and the rest is a hole.
    step: u64,
    criterion: Criterion,
}

/// Size of a large file in bytes.
const LARGE_FILE_BYTES: u64 = 64 << 20;

/// Returns the kind of a single large file that is written by appending `step` bytes at a time.
const fn appended_file(name: &'static str, step: u64) -> FileKind {
    FileKind { name, files: 1, bytes: LARGE_FILE_BYTES, step, criterion: Criterion::ByHugePages }
}

const KINDS: [FileKind; 6] = [
    FileKind { name: "small: 1000 x 1000 B", files: 1000, bytes: 1000, step: 1000, criterion: Criterion::BySize },
    FileKind { name: "middle: 300 x 300 KiB", files: 300, bytes: 300 << 10, step: 64 << 10, criterion: Criterion::Not },
    FileKind {
        name: "sparse: 100 x 64 MiB, 1 B each",
        files: 100,
        bytes: LARGE_FILE_BYTES,
        step: 0,
        criterion: Criterion::BySize,
    },
    appended_file("64 MiB in steps of 4 KiB", 4 << 10),
    appended_file("64 MiB in steps of 64 KiB", 64 << 10),
    appended_file("64 MiB in steps of 1 MiB", 1 << 20),
];

/// Measures the memory that files of several kinds use. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`crate::error::Error::CannotRun`] if mounting is not permitted.
pub fn run(options: &super::FileOptions, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let mounter = Mounter::new(options.dir.as_deref())?;
    let ready = report.with_gaps(mounter.select(&common.only, &[NEVER, WITHIN_SIZE, ALWAYS, PAGEMILL_MOUNT])?);
    // With huge pages everywhere, each small file would use 2 MiB.
    child::touch_beforehand(2100)?;
    let mut study = Study::new(report, |kind: &FileKind| kind.name.to_owned());
    let metrics = [USED_AT_ONCE, USED_AFTER_SECOND, HUGE_SHARE];
    let sizes = (8 << 30, Duration::from_secs(120));
    let turns = (&KINDS[..], common.rounds());
    super::measure((&mut study, &mounter), turns, &ready, &metrics, sizes, arguments)?;
    for kind in KINDS {
        add_rows(&mut study, kind, &ready);
        verdict(&study.samples, kind).into_iter().for_each(|verdict| study.report.add_verdict(verdict));
    }
    Ok(())
}

fn arguments(kind: &FileKind) -> Vec<String> {
    let numbers = [("--files", kind.files), ("--bytes", kind.bytes), ("--step", kind.step)];
    child::command_words(&["__waste"], &numbers)
}

fn add_rows(study: &mut Study<'_, FileKind>, kind: FileKind, ready: &[FileSystem]) {
    let mut columns = vec![
        (Metric::lower(USED_AT_ONCE, "MiB").against(NEVER.name), "used at once"),
        (Metric::lower(USED_AFTER_SECOND, "MiB").against(NEVER.name), "used after a second"),
    ];
    if kind.criterion == Criterion::ByHugePages {
        columns.push((Metric::higher(HUGE_SHARE, "share"), "mapped huge"));
    }
    let table = format!("{}: MiB, half the spread, times {}", kind.name, NEVER.name);
    study.rows(&kind, ready, &table, &columns);
}

/// Returns the verdict on files of one kind, if they have one.
fn verdict(samples: &SampleTable<FileKind>, kind: FileKind) -> Option<Verdict> {
    let get = |subject: FileSystem, metric| samples.get((&kind, subject.name, metric));
    Some(match kind.criterion {
        Criterion::Not => return None,
        Criterion::BySize => {
            let target = format!("{}, used after a second, against {}", kind.name, NEVER.name);
            let blank = not_measured(target, Bound::AtMost(MAX_USED_RATIO), "x", "one side was not run");
            let base = (NEVER.name, get(NEVER, USED_AFTER_SECOND));
            blank.compared(get(PAGEMILL_MOUNT, USED_AFTER_SECOND), base, Better::Higher)
        }
        Criterion::ByHugePages => {
            let target = format!("{}, share in huge pages when mapped a second after the close", kind.name);
            let blank = not_measured(target, Bound::AtLeast(MIN_HUGE_SHARE), "of 1", "pagemill was not run");
            blank.measured(get(PAGEMILL_MOUNT, HUGE_SHARE))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The workload's arguments must contain number, size and step of a kind of files. Two kinds must be judged by the
    /// memory that they use, three by their huge pages.
    #[test]
    fn file_kind_becomes_workload_arguments() {
        assert_eq!(arguments(&KINDS[2]), ["__waste", "--files", "100", "--bytes", "67108864", "--step", "0"]);
        let count = |criterion| KINDS.iter().filter(|kind| kind.criterion == criterion).count();
        assert_eq!((count(Criterion::BySize), count(Criterion::ByHugePages)), (2, 3));
    }

    /// The verdict on the fraction in huge pages must need no baseline. The verdict on the used memory must have an
    /// estimate only if both Pagemill's mount and tmpfs without huge pages were measured.
    #[test]
    fn verdict_on_used_memory_needs_both_file_systems() {
        let (mut samples, small, large) = (SampleTable::new(), KINDS[0], KINDS[3]);
        for _ in 0..3 {
            samples.add_value(&small, PAGEMILL_MOUNT.name, USED_AFTER_SECOND, 10.0);
            samples.add_value(&large, PAGEMILL_MOUNT.name, HUGE_SHARE, 0.5);
        }
        assert!(verdict(&samples, small).is_some_and(|verdict| verdict.estimate.is_none()));
        samples.add_value(&small, NEVER.name, USED_AFTER_SECOND, 5.0);
        assert_eq!(verdict(&samples, small).expect("it has one").estimate.map(|estimate| estimate.value), Some(2.0));
        assert_eq!(verdict(&samples, large).expect("it has one").state(), crate::report::VerdictState::FallsShort);
    }
}
