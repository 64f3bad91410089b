//! Experiments on file systems in memory: tmpfs with each setting for huge pages, compared with Pagemill's mount.

pub mod iozone;
pub mod mapping;
pub mod metadata;
pub mod mount;
pub mod pageshift;
pub mod waste;

use std::path::PathBuf;
use std::time::Duration;

use crate::child;
use crate::error::Result;
use crate::experiment::{CommonOptions, Study};
use mount::{FileSystem, Mounted, Mounter};

/// Command-line options of the experiments on files.
#[derive(Clone, Debug, clap::Args)]
pub struct FileOptions {
    #[command(flatten)]
    pub common: CommonOptions,
    /// A folder that `pagemill mount` already serves (default: one mount for each sample, which needs root)
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Command-line option with which a workload stores its files in a page cache of its own process.
const CACHED: &str = "--cached";

/// Measures all cases on all file systems, which are measured in turn. Each sample has a new mount with room for
/// `size_bytes`, and a workload with the arguments that `line` returns, which must end within `limit`.
///
/// # Errors
///
/// An error if a workload found wrong bytes, if the bench was interrupted, or if a tmpfs can no longer be mounted.
pub fn measure<Case: Ord + Clone>(
    (study, mounter): (&mut Study<'_, Case>, &Mounter),
    turns: (&[Case], usize),
    ready: &[FileSystem],
    metrics: &[&'static str],
    (size_bytes, limit): (u64, Duration),
    line: impl Fn(&Case) -> Vec<String>,
) -> Result<()> {
    let mut complaints = Vec::new();
    let mut sample = |case: &Case, subject: FileSystem| {
        let mounted = subject.is_mounted().then(|| mounter.mount(subject, size_bytes)).transpose()?;
        let place = mounted.as_ref().map_or(vec![CACHED.to_owned()], |mounted| place_arguments(mounted).to_vec());
        let outcome = child::run_plain(subject.name, line(case).into_iter().chain(place), limit)?;
        complaints.extend(mounted.and_then(|mounted| mounted.unmount().complaint));
        Ok(outcome)
    };
    study.measure_by_case(turns, ready, metrics, |case, subject| child::failed_if_gap(sample(case, *subject)))?;
    complaints.into_iter().for_each(|gap| study.report.add_gap(gap));
    Ok(())
}

/// Returns the arguments by which a workload gets the folder for its files and the device number of that folder. By the
/// device number, the workload checks that the file system is still mounted.
pub fn place_arguments(mounted: &Mounted) -> [String; 4] {
    let folder = mounted.folder().display().to_string();
    ["--folder".to_owned(), folder, "--device".to_owned(), mounted.device().to_string()]
}

/// The folder for files and its device number, as a workload parses them from the arguments that [`place_arguments`]
/// returned.
#[derive(Clone, Debug, clap::Args)]
pub struct FilePlace {
    // Neither option is required, because some workloads have an optional place. Other workloads check that the place
    // is given.
    /// The root of the file system, or a folder in it
    #[arg(long, required = false, requires = "device")]
    pub folder: PathBuf,
    /// The device number of that file system
    #[arg(long, required = false, requires = "folder")]
    pub device: u64,
}

impl FilePlace {
    /// Fails if the folder is no longer on the file system with this device number.
    pub fn check(&self) -> std::result::Result<(), String> {
        mount::assert_tmpfs(&self.folder, self.device)
    }
}
