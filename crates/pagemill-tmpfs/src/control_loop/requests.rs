//! Requests of other threads to the control loop: status, purge, end.

use super::{ControlLoop, SLICE};
use crate::budget::{Bound, LimitUsage};
use crate::file_access::now_ns;
use crate::open_throttle::OpenThrottle;
use crate::status::{Counts, LineStatus, Status};
use crate::submissions::LoopRequest;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// How long a purge waits before it tries a file again that the worker had open.
const WORKER_PAUSE: Duration = Duration::from_millis(5);
/// Interval at which a purge that waits for a scan checks whether the scan has ended.
const SCAN_PAUSE: Duration = Duration::from_millis(2);

/// A purge that a client requested and that has not ended.
pub(super) struct PendingPurge {
    left_bytes: u64,
    freed_bytes: u64,
    began_ns: i64,
    /// Earliest time at which the purge continues.
    pub(super) next: Instant,
    /// The purge waits until this many scans have ended since the start of the control loop. `None` while files to
    /// purge are known.
    pub(super) scans: Option<u64>,
    reply: Sender<u64>,
}

impl ControlLoop {
    /// Handles the queued requests. Returns whether the control loop must end.
    pub(super) fn handle_requests(&mut self) -> bool {
        for request in self.submissions.take_requests() {
            match request {
                LoopRequest::Stop => {
                    if let Some(mut throttle) = self.throttle.take() {
                        throttle.end(self.access.root());
                    }
                    return true;
                }
                LoopRequest::Status(reply) => drop(reply.send(self.status())),
                LoopRequest::Purge(left_bytes, reply) => {
                    let (next, began_ns) = (Instant::now(), now_ns());
                    self.purges.push(PendingPurge { left_bytes, freed_bytes: 0, began_ns, next, scans: None, reply });
                }
            }
        }
        false
    }

    /// Continues the purges that [`LoopRequest::Purge`] requested, for one time slice.
    pub(super) fn work_on_purges(&mut self) {
        let begun = Instant::now();
        let mut purges = std::mem::take(&mut self.purges);
        purges.retain_mut(|purge| {
            if purge.next > begun {
                return true;
            }
            while purge.left_bytes > 0 && begun.elapsed() < SLICE {
                match self.table.purge_one(None, purge.left_bytes, purge.began_ns) {
                    Some(bytes) => {
                        self.growth_predictor.freed(bytes);
                        purge.left_bytes = purge.left_bytes.saturating_sub(bytes);
                        purge.freed_bytes += bytes;
                    }
                    None if std::mem::take(&mut self.table.skipped_for_worker) => {
                        (purge.began_ns, purge.next) = (now_ns(), begun + WORKER_PAUSE);
                        return true;
                    }
                    // No file is left to purge. Waits for a scan that starts from now on, and tries once more. Then the
                    // purge ends.
                    None => match purge.scans {
                        None => {
                            purge.scans = Some(self.table.counts.scans + 1 + u64::from(self.scanning.is_running()));
                            self.table.wants_scan = true;
                            return true;
                        }
                        Some(scans) if self.table.counts.scans < scans => {
                            purge.next = begun + SCAN_PAUSE;
                            return true;
                        }
                        Some(_) => purge.left_bytes = 0,
                    },
                }
            }
            if purge.left_bytes == 0 {
                let _ = purge.reply.send(purge.freed_bytes);
            }
            purge.left_bytes > 0
        });
        self.purges.append(&mut purges);
    }

    /// Returns the status of the mount, which a client requested.
    fn status(&mut self) -> Status {
        let is_fresh = self.table.recheck_volatile_files();
        let volatile_age = if is_fresh { Duration::ZERO } else { self.scanning.age() };
        let line = |line: &LimitUsage| LineStatus {
            kind: match line.bound {
                Bound::Size => "size",
                Bound::Group(_) => "group",
                Bound::Machine => "machine",
            }
            .to_owned(),
            name: line.name.clone(),
            limit_bytes: line.limit_bytes,
            used_bytes: line.used_bytes,
            mark_bytes: line.mark_bytes,
        };
        let usage = self.access.usage().unwrap_or(self.usage);
        Status {
            mount_point: self.settings.mount_point.to_string_lossy().into_owned(),
            controller_pid: Some(std::process::id()),
            asked_bytes: self.settings.size_bytes,
            size_bytes: usage.size_bytes,
            used_bytes: usage.used_bytes,
            bounded_by: self.budget.nearest.clone().filter(|_| usage.size_bytes < self.settings.size_bytes),
            inodes: usage.inodes,
            max_inodes: usage.max_inodes,
            volatile_files: self.table.index.count() as u64,
            volatile_bytes: self.table.held_bytes(Bound::Size),
            volatile_age_seconds: volatile_age.as_secs_f64(),
            lines: self.budget.lines.iter().map(line).collect(),
            counts: Counts {
                delayed_opens: self.throttle.as_ref().map_or(0, OpenThrottle::delayed_opens),
                ..self.table.counts
            },
            is_preferred: self.is_preferred,
            is_notified: self.listener.is_some(),
            files_waiting_for_pages: self.table.pages.count() as u64,
            uptime_seconds: self.started.elapsed().as_secs_f64(),
        }
    }
}
