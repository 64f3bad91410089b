//! Experiments on file systems in memory: tmpfs with each setting for huge pages, compared with Pagemill's mount.

pub mod iozone;
pub mod mapping;
pub mod metadata;
pub mod mount;
pub mod waste;

use std::path::PathBuf;
use std::time::Duration;

use crate::child::{self, Outcome};
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

/// The cases of an experiment on file systems, and the arguments with which a workload runs each case.
pub struct FileExperiment<'a, Case> {
    pub cases: &'a [Case],
    pub rounds: usize,
    pub size_bytes: u64,
    /// The metrics, which are keys of the workload's JSON line.
    pub metrics: &'a [&'static str],
    /// Returns the workload's arguments for a case.
    pub arguments: &'a dyn Fn(&Case) -> Vec<String>,
    pub limit: Duration,
}

impl<Case: Ord + Clone> FileExperiment<'_, Case> {
    /// Runs every case on every file system. File systems are measured in turn, and each sample
    /// has a new mount.
    ///
    /// # Errors
    ///
    /// An error if a workload found wrong bytes, if the bench was interrupted, or if a tmpfs can no longer be mounted.
    pub fn measure(&self, mounter: &Mounter, ready: &[FileSystem], study: &mut Study<'_, Case>) -> Result<()> {
        let mut complaints = Vec::new();
        study.measure_by_case((self.cases, self.rounds), ready, self.metrics, |case, &subject| {
            child::failed_if_gap(self.sample(case, subject, mounter, &mut complaints))
        })?;
        complaints.into_iter().for_each(|gap| study.report.add_gap(gap));
        Ok(())
    }

    fn sample(
        &self,
        case: &Case,
        subject: FileSystem,
        mounter: &Mounter,
        complaints: &mut Vec<String>,
    ) -> Result<Outcome> {
        let mounted = subject.is_mounted().then(|| mounter.mount(subject, self.size_bytes)).transpose()?;
        let place = mounted.as_ref().map_or(vec![CACHED.to_owned()], |mounted| place_arguments(mounted).to_vec());
        let line = (self.arguments)(case).into_iter().chain(place);
        let outcome = child::run_plain(subject.name, line, self.limit)?;
        complaints.extend(mounted.and_then(|mounted| mounted.unmount().complaint));
        Ok(outcome)
    }
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
