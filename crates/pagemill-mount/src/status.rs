//! Status of a controller.

use serde::{Deserialize, Serialize};

/// A limit and its usage, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LineStatus {
    /// `size`, `group` or `machine`.
    pub kind: String,
    pub name: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    /// Usage above this purges volatile files.
    pub mark_bytes: u64,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// Volatile files that were purged whole, and their memory.
    pub purged_files: u64,
    pub purged_bytes: u64,
    /// Times that a partially volatile file was cut, and the memory freed.
    pub cut_files: u64,
    pub cut_bytes: u64,
    /// Volatile files that were due but open, and therefore skipped.
    pub spared_open: u64,
    /// Times that memory had to be freed and nothing could be. A period counts once.
    pub nothing_to_purge: u64,
    /// Changes of the size by remount, and refused ones.
    pub size_changes: u64,
    pub size_refused: u64,
    /// Close events received; overflows of the event queue; full scans.
    pub events: u64,
    pub events_lost: u64,
    pub scans: u64,
    /// Opens that waited because writers outran purging.
    pub delayed_opens: u64,
    /// Times that close events were turned off during many closes of small files.
    pub quiet_times: u64,
    /// Marks with unknown values, which were ignored.
    pub bad_marks: u64,
    /// Volatile files that did not fit in the index.
    pub not_indexed: u64,
    /// Blocks made huge; blocks split as users requested; memory of sparse blocks freed.
    pub huge_blocks: u64,
    pub split_blocks: u64,
    pub sparse_bytes: u64,
    /// Files that could not be collapsed: pages in use, CPU needed by other processes, no memory.
    pub collapse_busy: u64,
    pub collapse_postponed: u64,
    pub collapse_no_memory: u64,
    /// Restarts of the process that does this.
    pub worker_restarts: u64,
}

/// State of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub mount_point: String,
    /// Process id of the controller; missing if none is running.
    pub controller_pid: Option<u32>,
    /// The size that the user requested, and the current size, which is smaller near a limit.
    pub asked_bytes: u64,
    pub size_bytes: u64,
    pub used_bytes: u64,
    pub inodes: u64,
    pub volatile_files: u64,
    pub volatile_bytes: u64,
    /// Maximum age of these two; 0 if the files are few enough to be checked for each answer.
    pub volatile_age_seconds: f64,
    pub lines: Vec<LineStatus>,
    pub counts: Counts,
    /// The controller has real-time priority; without it its margins are wider.
    pub is_preferred: bool,
    /// The kernel reports writes; otherwise the controller scans periodically.
    pub is_notified: bool,
    /// Files that the worker has still to examine.
    pub files_waiting_for_pages: u64,
    pub uptime_seconds: f64,
}
