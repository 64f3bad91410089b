//! Status of a controller.

use serde::{Deserialize, Serialize};

/// A limit and the usage that counts against it, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LineStatus {
    /// `size` (of the file system), `group` (a cgroup) or `machine`.
    pub kind: String,
    pub name: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    /// Purge threshold: volatile files are purged while the usage is above it.
    pub mark_bytes: u64,
}

/// Totals since the start of the controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// Number of volatile files that were purged as a whole.
    pub purged_files: u64,
    /// Memory that was freed by purges of whole files.
    pub purged_bytes: u64,
    /// Number of times that the end of a partially volatile file was purged.
    pub cut_files: u64,
    /// Memory that was freed by purges of the ends of files.
    pub cut_bytes: u64,
    /// Number of times that a volatile file was skipped at its turn to be purged, because it was open.
    pub spared_open: u64,
    /// Number of periods in which usage was above a purge threshold and no volatile file could be purged.
    pub nothing_to_purge: u64,
    /// Number of changes of the file system's size.
    pub size_changes: u64,
    /// Number of changes of the file system's size that the kernel refused.
    pub size_refused: u64,
    /// Number of closes and renames of files that the kernel reported.
    pub events: u64,
    /// Number of times that events were lost, because the kernel's event queue overflowed or could not be read.
    pub events_lost: u64,
    /// Number of completed full scans of the file system.
    pub scans: u64,
    /// Number of opens that were delayed because files were written faster than purges freed memory.
    pub delayed_opens: u64,
    /// Number of times that close events were turned off while many small files were closed.
    pub quiet_times: u64,
    /// Number of marks with invalid values, which were ignored.
    pub bad_marks: u64,
    /// Number of times that a volatile file did not fit in the index.
    pub not_indexed: u64,
    /// Number of blocks that were huge after the worker examined them.
    pub huge_blocks: u64,
    /// Number of blocks that the worker asked the kernel to split because of the mark `never`.
    pub split_blocks: u64,
    /// Memory of zero pages that the worker freed in sparse blocks.
    pub sparse_bytes: u64,
    /// Number of times that the worker could not finish a file because the file was in use.
    pub collapse_busy: u64,
    /// Number of times that the worker could not finish a file because the time for one job was over.
    pub collapse_postponed: u64,
    /// Number of times that the worker could not finish a file because there was no memory for huge pages.
    pub collapse_no_memory: u64,
    /// Number of restarts of the worker process, which creates and splits huge pages.
    pub worker_restarts: u64,
}

/// State of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub mount_point: String,
    /// Process id of the controller; missing if none is running.
    pub controller_pid: Option<u32>,
    /// The size that the user requested for the file system.
    pub asked_bytes: u64,
    /// The current size of the file system. It is smaller than the requested size if a limit bounds it, and larger if
    /// more memory is in use.
    pub size_bytes: u64,
    /// The limit that leaves the least room for the size: `group NAME`, or the machine.
    pub bounded_by: Option<String>,
    pub used_bytes: u64,
    /// Number of inodes in use. The kernel counts each KiB of attributes as an inode, too.
    pub inodes: u64,
    /// The current maximum number of inodes.
    pub max_inodes: u64,
    pub volatile_files: u64,
    pub volatile_bytes: u64,
    /// Maximum age of `volatile_files` and `volatile_bytes`, in seconds. It is 0 if there are so few files that each
    /// status request checks them all.
    pub volatile_age_seconds: f64,
    pub lines: Vec<LineStatus>,
    pub counts: Counts,
    /// The controller has real-time priority. A controller without real-time priority starts purges farther below a
    /// limit.
    pub is_preferred: bool,
    /// The kernel reports closes of files to the controller. Otherwise the controller finds files only by periodic
    /// scans.
    pub is_notified: bool,
    /// Number of files that wait for the worker to examine their pages.
    pub files_waiting_for_pages: u64,
    pub uptime_seconds: f64,
}
