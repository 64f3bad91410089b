//! Queue of files for the [`worker`](crate::worker).

use crate::control_loop::say;
use crate::file_access::{FileAccess, Seen};
use crate::folders::Folders;
use crate::groups::{GroupId, Groups, UNKNOWN};
use crate::policy::{Huge, Marks};
use crate::status::Counts;
use crate::worker::{Worker, WorkerJob, WorkerReply};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// A busy file is retried with growing delays, this many times. A job postponed for lack of CPU time is retried at
/// once.
const RETRY: Duration = Duration::from_millis(250);
const MAX_TRIES: u32 = 6;

/// Maximum number of waiting files; a later scan finds the others again.
const MAX_WAITING: usize = 1 << 16;

/// Maximum number of finished files that are remembered.
const MAX_KNOWN: usize = 1 << 18;

struct Waiting {
    folder: u64,
    name: OsString,
    huge: Huge,
    group: GroupId,
    changed_ns: i64,
    tries: u32,
    due: Instant,
}

/// Files that wait, files that the worker has, and files that are done.
pub struct PageWork {
    program: Vec<OsString>,
    worker: Option<Worker>,
    /// Earliest time to start a worker again.
    retry_at: Option<Instant>,
    waiting: HashMap<u64, Waiting>,
    order: BTreeMap<(Instant, u64), ()>,
    given: HashMap<u64, Waiting>,
    known: HashMap<u64, (i64, Huge)>,
}

impl PageWork {
    /// Creates the queue. Without a program it does nothing.
    pub fn new(program: Vec<OsString>) -> Self {
        Self {
            program,
            worker: None,
            retry_at: None,
            waiting: HashMap::new(),
            order: BTreeMap::new(),
            given: HashMap::new(),
            known: HashMap::new(),
        }
    }

    /// Queues a file as it was seen; it is due after `delay`.
    pub fn note(&mut self, folder: u64, name: &OsStr, seen: &Seen, huge: Huge, group: GroupId, delay: Duration) {
        let is_large = !Marks { volatile: None, huge: Some(huge) }.leave_alone(seen.held_bytes);
        let is_known = self.known.get(&seen.inode) == Some(&(seen.changed_ns, huge));
        if self.program.is_empty() || !is_large || is_known || self.waiting.len() >= MAX_WAITING {
            return;
        }
        let due = Instant::now() + delay;
        let name = name.to_owned();
        let changed_ns = seen.changed_ns;
        self.put(seen.inode, Waiting { folder, name, huge, group, changed_ns, tries: 0, due });
    }

    /// Removes a file that is about to be purged.
    pub fn forget(&mut self, inode: u64) {
        if let Some(waiting) = self.waiting.remove(&inode) {
            self.order.remove(&(waiting.due, inode));
        }
    }

    /// Returns whether the worker has this file.
    pub fn is_given(&self, inode: u64) -> bool {
        self.given.contains_key(&inode)
    }

    fn put(&mut self, inode: u64, waiting: Waiting) {
        let due = waiting.due;
        if let Some(before) = self.waiting.insert(inode, waiting) {
            self.order.remove(&(before.due, inode));
        }
        self.order.insert((due, inode), ());
    }

    /// Takes the worker's results and gives it the jobs that are due. `charged` finds the group charged for a file.
    pub fn work(
        &mut self,
        access: &FileAccess,
        folders: &Folders,
        groups: &mut Groups,
        counts: &mut Counts,
        charged: impl Fn(&mut Groups, &Path, &OsStr) -> GroupId,
    ) {
        self.take_done(counts);
        let now = Instant::now();
        while let Some(((due, inode), ())) = self.order.first_key_value().map(|(key, ())| (*key, ())) {
            if due > now || !self.is_ready(access, now, counts) {
                return;
            }
            self.order.remove(&(due, inode));
            let Some(waiting) = self.waiting.remove(&inode) else { continue };
            let Some(folder) = folders.path(waiting.folder) else { continue };
            let group = match waiting.group {
                UNKNOWN => charged(groups, &folder, &waiting.name),
                group => group,
            };
            let job = WorkerJob::new(inode, &folder, &waiting.name, waiting.huge, groups.folder(group));
            let is_given = self.worker.as_mut().is_some_and(|worker| worker.give(&job).is_ok());
            if is_given {
                self.given.insert(inode, waiting);
            } else {
                self.lose(now, counts);
            }
        }
    }

    /// Returns whether a worker is free. Starts one if there is none.
    fn is_ready(&mut self, access: &FileAccess, now: Instant, counts: &mut Counts) -> bool {
        if self.worker.as_ref().is_some_and(Worker::is_stuck) {
            self.lose(now, counts);
        }
        if self.worker.is_none() && self.retry_at.is_none_or(|at| at <= now) {
            match Worker::start(&self.program, access) {
                Ok(worker) => (self.worker, self.retry_at) = (Some(worker), None),
                Err(error) => {
                    say(&format!("huge pages are left to the kernel: the worker cannot be started: {error}"));
                    self.retry_at = Some(now + Duration::from_secs(60));
                }
            }
        }
        self.worker.as_ref().is_some_and(Worker::is_free)
    }

    /// Drops a lost worker; its jobs stay unfinished.
    fn lose(&mut self, now: Instant, counts: &mut Counts) {
        self.worker = None;
        self.retry_at = Some(now + Duration::from_secs(1));
        self.given.clear();
        counts.worker_restarts += 1;
    }

    fn take_done(&mut self, counts: &mut Counts) {
        let Some(worker) = &mut self.worker else { return };
        match worker.take() {
            Ok(done) => done.into_iter().for_each(|done| self.note_done(done, counts)),
            Err(_) => self.lose(Instant::now(), counts),
        }
    }

    fn note_done(&mut self, done: WorkerReply, counts: &mut Counts) {
        counts.huge_blocks += done.huge_blocks;
        counts.split_blocks += done.split_blocks;
        counts.sparse_bytes += done.freed_bytes;
        counts.collapse_busy += u64::from(done.is_busy);
        counts.collapse_postponed += u64::from(done.is_postponed);
        counts.collapse_no_memory += u64::from(done.has_no_memory);
        let Some(mut waiting) = self.given.remove(&done.inode) else { return };
        if done.is_postponed && !self.waiting.contains_key(&done.inode) {
            waiting.due = Instant::now() + RETRY;
            self.put(done.inode, waiting);
            return;
        }
        let is_unfinished = done.is_busy || done.has_no_memory;
        if is_unfinished && waiting.tries < MAX_TRIES && !self.waiting.contains_key(&done.inode) {
            waiting.due = Instant::now() + RETRY * (1 << waiting.tries);
            waiting.tries += 1;
            self.put(done.inode, waiting);
            return;
        }
        // The next scan queues it again.
        if is_unfinished {
            return;
        }
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        // The worker's own change queues the file once more, and finds nothing left to do.
        self.known.insert(done.inode, (waiting.changed_ns, waiting.huge));
    }

    /// Returns when the next job is due, if the worker is free.
    pub fn due(&self) -> Option<Instant> {
        let first = self.order.first_key_value().map(|((due, _), ())| *due)?;
        match &self.worker {
            Some(worker) if !worker.is_free() => None,
            Some(_) => Some(first),
            None => Some(self.retry_at.map_or(first, |at| at.max(first))),
        }
    }

    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.worker.as_ref().map(AsFd::as_fd)
    }

    /// Process id of the worker; 0 if there is none.
    pub fn worker_pid(&self) -> u32 {
        self.worker.as_ref().map_or(0, Worker::pid)
    }

    /// Number of files that wait or that the worker has.
    pub fn count(&self) -> usize {
        self.waiting.len() + self.given.len()
    }
}
