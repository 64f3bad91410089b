//! Files by which the bench and its workloads signal progress to each other.
//!
//! A sign is an empty file in a temporary folder, and its existence is the signal. Files work between processes under
//! any allocator, also through a launcher. They are removed together with the folder.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::{self, RunningGroup};
use crate::error::{Error, Result};

/// Interval at which a waiting process checks whether the awaited file exists.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The folder of the files by which the processes of one sample signal progress to each other.
#[derive(Clone, Debug)]
pub struct Signs {
    folder: PathBuf,
}

impl Signs {
    /// Uses an existing folder for the empty files that signal progress.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Creates the file with this name, which signals progress to the processes that wait for it.
    ///
    /// # Errors
    ///
    /// An I/O error if the file cannot be created.
    pub fn create(&self, name: &str) -> io::Result<()> {
        File::create(self.folder.join(name)).map(drop)
    }

    pub fn exists(&self, name: &str) -> bool {
        self.folder.join(name).exists()
    }

    /// Waits until a workload has created the file with this name. Returns false if the workload ended without creating
    /// it.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] after a signal; [`Error::CannotRun`] if the file does not exist within `limit`.
    pub fn wait_for(&self, name: &str, process: &RunningGroup, limit: Duration) -> Result<bool> {
        let begun = Instant::now();
        while !self.exists(name) {
            if process.has_ended() {
                return Ok(self.exists(name));
            }
            if begun.elapsed() > limit {
                let seconds = limit.as_secs();
                return Err(Error::CannotRun(format!("a workload did not give the sign `{name}` within {seconds} s")));
            }
            child::check_interrupt()?;
            thread::sleep(CHECK_INTERVAL);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// [`Signs::wait_for`] must return when the process creates the file, when the process ends, and at the time limit.
    #[test]
    fn wait_ends_with_file_process_or_time_limit() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let signs = Signs::new(folder.path());
        let path = folder.path().join("ready").display().to_string();
        let start = |script: &str| RunningGroup::start(Command::new("sh").args(["-c", script])).expect("sh starts");

        let process = start(&format!("touch {path}; sleep 3600"));
        assert!(signs.wait_for("ready", &process, Duration::from_secs(60)).expect("it comes"));
        assert!(!signs.wait_for("over", &start("true"), Duration::from_secs(60)).expect("it ends"));
        assert!(signs.wait_for("over", &process, Duration::ZERO).is_err());
    }
}
