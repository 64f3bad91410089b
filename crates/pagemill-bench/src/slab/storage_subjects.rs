//! Subjects of the parts `speed`, `fragments` and `stalls`: allocators that are preloaded into the workload, and Pagemill's
//! caches inside of the workload.

use std::process::Command;
use std::time::Duration;

use super::{BY_HANDLE, BY_OWNER, FIXED, allocator_names, allocators};
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{CommonOptions, Named};
use crate::report::Report;
use crate::subject::{self, AvailableSubject, MESH};

/// Names of Pagemill's slab caches, in the report and on the workload's command line.
pub const CACHES: [&str; 3] = [BY_OWNER, BY_HANDLE, FIXED];

/// Names of the slab caches that can move their objects.
pub const MOVERS: [&str; 2] = [BY_OWNER, BY_HANDLE];

/// Time limit of a workload process.
pub const TIME_LIMIT: Duration = Duration::from_secs(120);

/// What stores the objects of the workload: an allocator or a slab cache.
pub enum StorageSubject {
    Allocator(AvailableSubject),
    Cache(&'static str),
}

impl Named for StorageSubject {
    fn name(&self) -> &'static str {
        match self {
            Self::Allocator(ready) => ready.name(),
            Self::Cache(name) => name,
        }
    }
}

impl StorageSubject {
    pub fn can_move(&self) -> bool {
        MOVERS.contains(&self.name())
    }

    /// Runs the workload `work` of the hidden subcommand `__slab`. It stores its objects in this allocator or cache.
    pub fn sample(&self, work: &str, numbers: &[(&str, u64)], flag: Option<&str>) -> Result<Outcome> {
        let mut command = child::workload_command(["__slab", work, "--subject", self.word()])?;
        if let Self::Allocator(ready) = self {
            command.args(["--how", &child::word(&ready.subject.give_back)]);
        }
        command.args(child::numeric_options(numbers)).args(flag);
        self.apply(&mut command);
        child::run_to_end(self.name(), &mut command, TIME_LIMIT)
    }

    /// Returns the name of the subject on the workload's command line.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Allocator(_) => "malloc",
            Self::Cache(name) => name,
        }
    }

    /// Sets the command's environment so that the workload runs under this allocator; for a cache, under the system's.
    pub fn apply(&self, command: &mut Command) {
        match self {
            Self::Allocator(ready) => ready.apply(command),
            Self::Cache(_) => subject::clear_foreign_settings(command),
        }
    }
}

/// Returns the wanted caches and allocators that are available on this machine. Adds a sentence (gap) to the report for
/// each that is not.
pub fn available_subjects(common: &CommonOptions, report: &mut Report) -> Result<Vec<StorageSubject>> {
    let caches = CACHES.into_iter().filter(|name| common.is_wanted(name)).map(StorageSubject::Cache);
    let mut ready = report.with_gaps(allocators(common)?);
    if common.is_wanted(MESH.name) {
        match subject::find_available(&MESH) {
            Ok(mesh) => ready.push(mesh),
            Err(gap) => report.add_gap(gap),
        }
    }
    Ok(caches.chain(ready.into_iter().map(StorageSubject::Allocator)).collect())
}

pub fn names() -> impl Iterator<Item = &'static str> {
    CACHES.into_iter().chain(peers())
}

/// Returns the names of the allocators with which Pagemill's caches are compared.
pub fn peers() -> impl Iterator<Item = &'static str> {
    allocator_names().chain([MESH.name])
}
