//! What the controller tells of itself.

use serde::{Deserialize, Serialize};

/// A limit, as it stands. All in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LineStatus {
    /// `size`, `group` or `machine`.
    pub kind: String,
    pub name: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    /// From here on volatile files go.
    pub mark_bytes: u64,
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// Volatile files that went as a whole, and their memory.
    pub purged_files: u64,
    pub purged_bytes: u64,
    /// Times that a partial file lost its end, and that memory.
    pub cut_files: u64,
    pub cut_bytes: u64,
    /// Volatile files that were due and open: they were passed over.
    pub spared_open: u64,
    /// Looks at which memory was to go and nothing could.
    pub nothing_to_purge: u64,
    /// Changes of the size by remount, and those that were refused.
    pub size_changes: u64,
    pub size_refused: u64,
    /// Files that were written and closed, as notification told; queues that ran over; looks at everything.
    pub events: u64,
    pub events_lost: u64,
    pub scans: u64,
    /// Marks with unknown values, passed over.
    pub bad_marks: u64,
    /// Volatile files there was no room to keep in mind.
    pub not_indexed: u64,
    /// Blocks that are huge after a look at their file; those that were split, as users want; memory of sparse ones given back.
    pub huge_blocks: u64,
    pub split_blocks: u64,
    pub sparse_bytes: u64,
    /// Files whose pages were in use when they were to be collapsed, those that others needed the processors for, and those
    /// for which there was no memory.
    pub collapse_busy: u64,
    pub collapse_postponed: u64,
    pub collapse_no_memory: u64,
    /// Times the process that does this was started anew.
    pub worker_restarts: u64,
}

/// The state of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub mount_point: String,
    /// The controller; none is running where this is missing.
    pub controller_pid: Option<u32>,
    /// As the user asked for it, and as it is now: less near a limit.
    pub asked_bytes: u64,
    pub size_bytes: u64,
    pub used_bytes: u64,
    pub inodes: u64,
    pub volatile_files: u64,
    pub volatile_bytes: u64,
    pub lines: Vec<LineStatus>,
    pub counts: Counts,
    /// It goes before others, by real-time priority; without that its margins are wider.
    pub is_preferred: bool,
    /// Its kernel tells of what is written; else it looks at everything now and then.
    pub is_notified: bool,
    /// Files whose pages are still to be looked at.
    pub files_waiting_for_pages: u64,
    pub uptime_seconds: f64,
}
