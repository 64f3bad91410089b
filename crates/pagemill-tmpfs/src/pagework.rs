//! Queue of files for the [`worker`](crate::worker).
//!
//! A worker can end at any time, because it enters groups whose owner can kill it (a *lost* worker). The files that the
//! worker had not begun are queued again at once. The file that it was examining is queued again a limited number of
//! times. The pause before the next start grows with each worker that is lost before it has answered a job. The group
//! in which a worker was lost is *avoided*: files charged to the group wait for a time that grows with each loss there.
//! All groups of a user are avoided together, because a user can create any number of groups.
//!
//! The control loop never waits for the worker. A separate thread starts the process, because a start takes tens of
//! milliseconds on a busy machine: the new process runs at normal priority until it executes its program, and the
//! thread that starts it sleeps until then.

use crate::file_access::{FileAccess, FileAttributes};
use crate::folders::Folders;
use crate::groups::{GroupId, Groups};
use crate::messages::print_message;
use crate::policy::{Huge, Marks};
use crate::status::Counts;
use crate::worker::{Worker, WorkerJob, WorkerReply};
use pagemill_sys::task;
use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// Delay before the worker examines a busy file again, which doubles with each try. The rest of a file that the worker
/// examined in part is sent after the same delay, any number of times.
const RETRY_DELAY: Duration = Duration::from_millis(250);
/// Maximum number of times that a busy file is queued again. After that, the file waits for a later scan.
const MAX_TRIES: u32 = 6;

/// Maximum number of files that wait for the worker. A later scan finds again the files that did not fit.
const MAX_WAITING_FILES: usize = 1 << 16;

/// Maximum number of entries in the table `known`: finished files, which are examined again only after a change.
const MAX_KNOWN_FILES: usize = 1 << 18;

/// Minimum and maximum pause before another worker is started. The pause doubles with each lost worker until a worker
/// answers a job.
const RESTART_PAUSE: Range<Duration> = Duration::from_secs(1)..Duration::from_secs(60);

/// How long a controller that ends waits for a worker that is being started.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a controller that ends waits for the exit of its worker, which may be in a frozen group.
const EXIT_TIMEOUT: Duration = Duration::from_millis(200);

/// Minimum and maximum time for which a group is avoided after a worker was lost in it. The time doubles with each
/// loss.
const AVOID_TIME: Range<Duration> = Duration::from_secs(60)..Duration::from_secs(3600);

/// Returns the start of the range, doubled `times` times, but at most the end of the range.
fn doubled(range: &Range<Duration>, times: u32) -> Duration {
    debug_assert!(!range.start.is_zero() && range.start <= range.end);
    range.start.saturating_mul(1 << times.min(16)).min(range.end)
}

/// The groups that are avoided together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Domain {
    /// All groups of a user other than root.
    User(u32),
    Group(String),
}

impl Domain {
    /// Returns the domain of the group with this cgroup folder; `None` if the folder does not exist.
    fn of(group: &str) -> Option<Self> {
        match std::fs::metadata(group).ok()?.uid() {
            0 => Some(Self::Group(group.to_owned())),
            user => Some(Self::User(user)),
        }
    }
}

/// Until when a domain is avoided, and the number of workers lost in it.
#[derive(Clone, Copy)]
struct Avoided {
    until: Instant,
    losses: u32,
}

/// A file that waits for the worker.
struct Waiting {
    /// Inode of the file's folder.
    folder: u64,
    name: OsString,
    huge: Huge,
    /// The group that the worker enters for this file, and the groups that are avoided together with it. `None` while
    /// the file has not been sent, or if the group is unknown.
    entered: Option<(String, Domain)>,
    /// Offset of the first block to examine.
    from: u64,
    /// A block before `from` was busy or got no memory, so the file must be examined again.
    is_incomplete: bool,
    /// Last change of the file when it was queued, in nanoseconds since 1970.
    changed_ns: i64,
    tries: u32,
    /// Earliest time to send the file to the worker.
    due: Instant,
}

/// The queue: files that wait, files sent to the worker and not answered, and files that are done.
pub struct PageWork {
    program: Vec<OsString>,
    worker: Option<Worker>,
    /// Receives the worker that a separate thread is starting.
    starting: Option<Receiver<io::Result<Worker>>>,
    /// Earliest time to start a worker again.
    retry_at: Option<Instant>,
    /// Number of workers lost since a worker last answered a job.
    lost_in_a_row: u32,
    avoided: HashMap<Domain, Avoided>,
    /// Files that wait, by inode.
    waiting: HashMap<u64, Waiting>,
    /// The waiting files in the order in which they become due: time and inode.
    order: BTreeSet<(Instant, u64)>,
    /// Files that were sent to the worker and not answered, by inode.
    sent: HashMap<u64, Waiting>,
    /// Finished files by inode: last change and page policy, with which a later scan compares them.
    known: HashMap<u64, (i64, Huge)>,
}

impl PageWork {
    /// Creates the queue. If `program` is empty, no file is ever queued.
    pub fn new(program: Vec<OsString>) -> Self {
        Self {
            program,
            worker: None,
            starting: None,
            retry_at: None,
            lost_in_a_row: 0,
            avoided: HashMap::new(),
            waiting: HashMap::new(),
            order: BTreeSet::new(),
            sent: HashMap::new(),
            known: HashMap::new(),
        }
    }

    /// Queues a file with the attributes `seen`, to be examined after `delay`. Ignores files that need no huge page
    /// work, and files that were examined and have not changed since.
    pub fn queue_file(&mut self, folder: u64, name: &OsStr, seen: &FileAttributes, huge: Huge, delay: Duration) {
        let is_large = !Marks { volatile: None, huge: Some(huge) }.needs_no_action(seen.held_bytes);
        let is_known = self.known.get(&seen.inode) == Some(&(seen.changed_ns, huge));
        if self.program.is_empty() || !is_large || is_known || self.waiting.len() >= MAX_WAITING_FILES {
            return;
        }
        let due = Instant::now() + delay;
        let (name, changed_ns) = (name.to_owned(), seen.changed_ns);
        let (from, is_incomplete) = (0, false);
        let waiting = Waiting { folder, name, huge, entered: None, from, is_incomplete, changed_ns, tries: 0, due };
        self.insert_waiting(seen.inode, waiting);
    }

    /// Removes a waiting file from the queue. Called before the file is purged.
    pub fn forget(&mut self, inode: u64) {
        if let Some(waiting) = self.waiting.remove(&inode) {
            let was_queued = self.order.remove(&(waiting.due, inode));
            debug_assert!(was_queued, "each waiting file is queued");
        }
        debug_assert!(self.order.len() == self.waiting.len());
    }

    /// Returns whether this file was sent to the worker and not answered yet.
    pub fn is_sent(&self, inode: u64) -> bool {
        self.sent.contains_key(&inode)
    }

    /// Sends a queued file to a worker that never answers.
    #[cfg(test)]
    pub fn pretend_to_send(&mut self, inode: u64) {
        let Some(waiting) = self.waiting.remove(&inode) else { return };
        self.order.remove(&(waiting.due, inode));
        self.sent.insert(inode, waiting);
    }

    fn insert_waiting(&mut self, inode: u64, waiting: Waiting) {
        let due = waiting.due;
        if let Some(before) = self.waiting.insert(inode, waiting) {
            self.order.remove(&(before.due, inode));
        }
        self.order.insert((due, inode));
        debug_assert!(self.order.len() == self.waiting.len(), "each waiting file is queued once");
    }

    /// Processes the worker's answers and sends it the jobs that are due. `charged` returns the group charged for a
    /// file. Returns the inodes of files in which the worker freed memory.
    pub fn work(
        &mut self,
        access: &Arc<FileAccess>,
        folders: &Folders,
        groups: &mut Groups,
        counts: &mut Counts,
        charged: impl Fn(&mut Groups, &Path, &OsStr, u64) -> GroupId,
    ) -> Vec<u64> {
        self.take_started();
        let freed = self.take_replies_of_worker(counts);
        let now = Instant::now();
        // This check also runs while no file is queued, because a file cannot be purged while the worker has it open.
        if self.worker.as_ref().and_then(Worker::stuck_at).is_some_and(|at| at < now) {
            self.drop_worker(now, counts);
        }
        while let Some((due, inode)) = self.order.first().copied() {
            if due > now || !self.is_ready(access, now) {
                break;
            }
            self.order.remove(&(due, inode));
            debug_assert!(self.waiting.contains_key(&inode), "each queued file waits");
            let Some(mut waiting) = self.waiting.remove(&inode) else { continue };
            debug_assert!(waiting.due == due && waiting.tries <= MAX_TRIES);
            let Some(folder) = folders.path(waiting.folder) else { continue };
            let group = charged(groups, &folder, &waiting.name, inode);
            // The owner of the cgroup folder is read before the worker enters the group, since the owner can remove the
            // folder afterwards.
            waiting.entered = groups.folder(group).and_then(|group| Domain::of(&group).map(|domain| (group, domain)));
            if let Some(until) = waiting.entered.as_ref().and_then(|(_, domain)| self.avoided_until(domain, now)) {
                waiting.due = until;
                self.insert_waiting(inode, waiting);
                continue;
            }
            let entered = waiting.entered.as_ref().map(|(group, _)| group.clone());
            let job = WorkerJob::new(inode, waiting.from, &folder, &waiting.name, waiting.huge, entered);
            let is_sent = self.worker.as_mut().is_some_and(|worker| worker.send_job(&job).is_ok());
            if is_sent {
                self.sent.insert(inode, waiting);
            } else {
                self.insert_waiting(inode, waiting);
                self.drop_worker(now, counts);
            }
        }
        freed
    }

    /// Returns the end of the time for which the domain is avoided; `None` if it is not avoided now.
    fn avoided_until(&self, domain: &Domain, now: Instant) -> Option<Instant> {
        self.avoided.get(domain).map(|avoided| avoided.until).filter(|until| *until > now)
    }

    /// Avoids a group in which a worker was lost.
    fn avoid(&mut self, group: &str, domain: &Domain, now: Instant) {
        // Losses in a domain add up, unless the domain was not avoided for an hour.
        self.avoided.retain(|_, avoided| now < avoided.until + AVOID_TIME.end);
        let losses = self.avoided.get(domain).map_or(0, |avoided| avoided.losses + 1);
        let pause = doubled(&AVOID_TIME, losses);
        debug_assert!((AVOID_TIME.start..=AVOID_TIME.end).contains(&pause));
        print_message(&format!(
            "the worker for huge pages ended in {group}: files charged there wait {} s",
            pause.as_secs()
        ));
        self.avoided.insert(domain.clone(), Avoided { until: now + pause, losses });
    }

    /// Returns whether the worker can accept a job. If there is no worker, begins to start one.
    fn is_ready(&mut self, access: &Arc<FileAccess>, now: Instant) -> bool {
        if self.worker.is_none() && self.starting.is_none() && self.retry_at.is_none_or(|at| at <= now) {
            debug_assert!(!self.program.is_empty(), "files are queued only if there is a worker");
            let (program, access) = (self.program.clone(), access.clone());
            let (sender, starting) = mpsc::channel();
            // If the queue was dropped meanwhile, the send fails and the worker is dropped. That closes its socket and
            // ends the process.
            match task::spawn(c"starter", move || _ = sender.send(Worker::start(&program, &access))) {
                Ok(()) => self.starting = Some(starting),
                Err(error) => self.report_start_failure(&error),
            }
        }
        self.worker.as_ref().is_some_and(Worker::can_accept_job)
    }

    /// Uses the worker of a start that has completed.
    fn take_started(&mut self) {
        let Some(starting) = &self.starting else { return };
        let result = match starting.try_recv() {
            Ok(result) => result,
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => Err(io::Error::other("its thread ended")),
        };
        self.starting = None;
        debug_assert!(self.worker.is_none(), "one worker runs");
        match result {
            Ok(worker) => (self.worker, self.retry_at) = (Some(worker), None),
            Err(error) => self.report_start_failure(&error),
        }
    }

    /// Reports that no worker could be started. The next start is tried a minute later.
    fn report_start_failure(&mut self, error: &io::Error) {
        print_message(&format!("huge pages are left to the kernel: the worker cannot be started: {error}"));
        self.retry_at = Some(Instant::now() + Duration::from_secs(60));
    }

    /// Drops a lost or stuck worker and queues its files again.
    fn drop_worker(&mut self, now: Instant, counts: &mut Counts) {
        let current = self.worker.take().and_then(|worker| worker.current_inode());
        self.retry_at = Some(now + doubled(&RESTART_PAUSE, self.lost_in_a_row));
        self.lost_in_a_row += 1;
        counts.worker_restarts += 1;
        for (inode, mut waiting) in std::mem::take(&mut self.sent) {
            if Some(inode) == current {
                if let Some((group, domain)) = &waiting.entered {
                    self.avoid(group, domain, now);
                }
                waiting.due = now + RETRY_DELAY * (1 << waiting.tries);
                waiting.tries += 1;
            }
            // After too many tries the file waits for a later scan. A file that was written meanwhile is already
            // queued.
            if waiting.tries <= MAX_TRIES && !self.waiting.contains_key(&inode) {
                self.insert_waiting(inode, waiting);
            }
        }
    }

    /// Records the worker's answers. Returns the inodes of files in which the worker freed memory.
    fn take_replies_of_worker(&mut self, counts: &mut Counts) -> Vec<u64> {
        let Some(worker) = &mut self.worker else { return Vec::new() };
        let mut done = Vec::new();
        let taken = worker.take_replies(&mut done);
        if !done.is_empty() {
            self.lost_in_a_row = 0;
        }
        let freed = done.iter().filter(|done| done.freed_bytes > 0).map(|done| done.inode).collect();
        done.into_iter().for_each(|done| self.record_reply(done, counts));
        if taken.is_err() {
            self.drop_worker(Instant::now(), counts);
        }
        freed
    }

    fn record_reply(&mut self, done: WorkerReply, counts: &mut Counts) {
        counts.huge_blocks += done.huge_blocks;
        counts.split_blocks += done.split_blocks;
        counts.sparse_bytes += done.freed_bytes;
        counts.collapse_busy += u64::from(done.is_busy);
        counts.collapse_postponed += u64::from(done.next.is_some());
        counts.collapse_no_memory += u64::from(done.has_no_memory);
        let Some(mut waiting) = self.sent.remove(&done.inode) else { return };
        waiting.is_incomplete |= done.is_busy || done.has_no_memory;
        // A file that was written meanwhile is already queued.
        let is_queued = self.waiting.contains_key(&done.inode);
        if let Some(next) = done.next.filter(|_| !is_queued) {
            waiting.from = next;
            waiting.due = Instant::now() + RETRY_DELAY;
            self.insert_waiting(done.inode, waiting);
            return;
        }
        let is_unfinished = waiting.is_incomplete;
        if is_unfinished && waiting.tries < MAX_TRIES && !is_queued {
            (waiting.from, waiting.is_incomplete) = (0, false);
            waiting.due = Instant::now() + RETRY_DELAY * (1 << waiting.tries);
            waiting.tries += 1;
            self.insert_waiting(done.inode, waiting);
            return;
        }
        // The next scan queues the file again, with its new path if it was renamed.
        if is_unfinished || done.is_missing || done.next.is_some() {
            return;
        }
        if self.known.len() >= MAX_KNOWN_FILES {
            self.known.clear();
        }
        // The worker's own changes may make a later scan queue the file once more. The worker then finds nothing to
        // change.
        debug_assert!(self.known.len() < MAX_KNOWN_FILES);
        self.known.insert(done.inode, (waiting.changed_ns, waiting.huge));
    }

    /// Returns when the queue needs the control loop next: when the next job can be sent, when the next worker can be
    /// started, or when the current worker counts as stuck, whichever is earliest.
    pub fn due(&self) -> Option<Instant> {
        let first = self.order.first().map(|(due, _)| *due);
        let next = match &self.worker {
            Some(worker) if !worker.can_accept_job() => None,
            Some(_) => first,
            // The control loop's periodic checks are frequent enough to find the started worker.
            None if self.starting.is_some() => None,
            None => first.map(|first| self.retry_at.map_or(first, |at| at.max(first))),
        };
        next.into_iter().chain(self.worker.as_ref().and_then(Worker::stuck_at)).min()
    }

    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.worker.as_ref().map(AsFd::as_fd)
    }

    /// Returns the process id of the worker; 0 if there is none.
    pub fn worker_pid(&self) -> u32 {
        self.worker.as_ref().map_or(0, Worker::pid)
    }

    /// Returns the number of files that wait or were sent to the worker.
    pub fn count(&self) -> usize {
        self.waiting.len() + self.sent.len()
    }
}

impl Drop for PageWork {
    /// Ends the worker and waits for its exit, so that it is no longer in a writer's group. Waits for a worker that is
    /// being started, too. Without the wait, the process would start later and keep the mount's root folder open. The
    /// wait has a timeout, because the worker's program may be on a file system that does not respond.
    fn drop(&mut self) {
        let started = self.starting.take().and_then(|starting| starting.recv_timeout(START_TIMEOUT).ok()?.ok());
        started.into_iter().chain(self.worker.take()).for_each(|worker| worker.end(EXIT_TIMEOUT));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_access;
    use crate::groups::UNKNOWN;
    use pagemill_core::units::BLOCK_BYTES;
    use pagemill_sys::pages;
    use rustix::fs::FileType;
    use std::fs::{self, File};
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt;

    /// Shell program of a worker that kills itself on the file with inode 7 and answers every other job at once.
    const DYING_WORKER: &str = r#"while read -r line; do
        inode=${line#*:}; inode=${inode%%,*}
        [ "$inode" = 7 ] && kill -s KILL $$
        echo "{\"inode\":$inode,\"huge_blocks\":1,\"split_blocks\":0,\"freed_bytes\":0,\"is_busy\":false,\"is_missing\":false,\"next\":null,\"has_no_memory\":false}" >&0
    done"#;

    fn seen(inode: u64) -> FileAttributes {
        let bytes = 8 << 20;
        FileAttributes {
            inode,
            kind: FileType::RegularFile,
            owner: 0,
            mode: 0o600,
            links: 1,
            len_bytes: bytes,
            held_bytes: bytes,
            used_ns: 1,
            changed_ns: 1,
        }
    }

    /// A worker dies on the first of several files. The next worker must examine the other files, and the group in
    /// which the first worker died must be avoided.
    #[test]
    fn a_lost_worker_loses_no_other_file() {
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let access = Arc::new(FileAccess::of_root(File::open(folder.path()).unwrap().into()).unwrap());
        let (folders, mut groups) = (Folders::new(access.root_inode()), Groups::new(""));
        let own = groups.of_self();
        if groups.folder(own).is_none() {
            return println!("skipped: no memory control group");
        }
        let mut work = PageWork::new(["sh", "-c", DYING_WORKER].map(OsString::from).to_vec());
        let mut counts = Counts::default();
        // All files are sent to one worker, the file with inode 7 first.
        work.queue_file(access.root_inode(), OsStr::new("7"), &seen(7), Huge::Auto, Duration::ZERO);
        for inode in 8..13 {
            work.queue_file(access.root_inode(), OsStr::new("other"), &seen(inode), Huge::Auto, Duration::ZERO);
        }
        let begun = Instant::now();
        while counts.huge_blocks < 5 {
            assert!(begun.elapsed() < Duration::from_secs(600), "{} files wait", work.count());
            let charged = |_: &mut Groups, _: &Path, name: &OsStr, _| if name == "7" { own } else { UNKNOWN };
            work.work(&access, &folders, &mut groups, &mut counts, charged);
            std::thread::sleep(Duration::from_millis(1));
        }
        let others: Vec<u64> = work.waiting.keys().chain(work.sent.keys()).copied().collect();
        assert_eq!((counts.huge_blocks, others), (5, vec![7]));
        let most = 1 + begun.elapsed().as_secs() / AVOID_TIME.start.as_secs();
        assert!((1..=most).contains(&counts.worker_restarts), "{} restarts", counts.worker_restarts);
        let domain = Domain::of(&groups.folder(own).unwrap()).unwrap();
        assert!(work.avoided_until(&domain, begun).is_some());
        let file = work.waiting.get(&7).or_else(|| work.sent.get(&7)).unwrap();
        assert!(file.due >= begun + RETRY_DELAY);
    }

    /// A file is renamed before the worker opens it, so the worker does not find it. The next scan must be able to queue
    /// the file again, although the file itself has not changed.
    #[test]
    fn a_file_that_was_not_found_is_queued_again() {
        let worker = DYING_WORKER.replace(r#"is_missing\":false"#, r#"is_missing\":true"#);
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let access = Arc::new(FileAccess::of_root(File::open(folder.path()).unwrap().into()).unwrap());
        let folders = Folders::new(access.root_inode());
        let (mut groups, mut counts) = (Groups::new(""), Counts::default());
        let mut work = PageWork::new(["sh", "-c", &worker].map(OsString::from).to_vec());
        let name = OsStr::new("file");
        work.queue_file(access.root_inode(), name, &seen(8), Huge::Auto, Duration::ZERO);
        let begun = Instant::now();
        while work.count() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            work.work(&access, &folders, &mut groups, &mut counts, |_: &mut Groups, _: &Path, _: &OsStr, _| UNKNOWN);
            std::thread::sleep(Duration::from_millis(1));
        }
        work.queue_file(access.root_inode(), name, &seen(8), Huge::Auto, Duration::ZERO);
        assert_eq!(work.count(), 1);
    }

    /// Pauses before the start of another worker, and times for which a group is avoided, must double up to their
    /// maximum.
    #[test]
    fn pauses_double() {
        assert_eq!([0, 1, 5, 6, 99].map(|times| doubled(&RESTART_PAUSE, times).as_secs()), [1, 2, 32, 60, 60]);
        assert_eq!([0, 1, 6].map(|times| doubled(&AVOID_TIME, times).as_secs()), [60, 120, 3600]);
    }

    /// A worker takes long to start, because the test has a lease on the worker's program. The control loop's calls
    /// must return meanwhile. The program can run only after the test closes the file.
    #[test]
    fn starting_a_worker_does_not_wait_for_it() {
        let Ok(place) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        // The file keeps the name `sleep`, because one binary may contain many programs. `/dev/shm` may forbid
        // execution.
        let programs = tempfile::tempdir().unwrap();
        let program = programs.path().join("sleep");
        fs::copy("/bin/sleep", &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        fs::write(place.path().join("file"), vec![1; BLOCK_BYTES]).unwrap();
        let root: OwnedFd = File::open(place.path()).unwrap().into();
        let seen = file_access::attributes_at(&root, OsStr::new("file")).unwrap();
        let access = Arc::new(FileAccess::of_root(root).unwrap());
        let folders = Folders::new(access.root_inode());
        let (mut groups, mut counts) = (Groups::new(""), Counts::default());
        let begun = Instant::now();
        let lease = File::open(&program).unwrap();
        while let Err(error) = pages::take_lease(lease.as_fd()) {
            if error.kind() != io::ErrorKind::WouldBlock {
                return println!("skipped: no lease on a program: {error}");
            }
            // A process that a parallel test started may still have inherited the descriptor with which the program was
            // written.
            assert!(begun.elapsed().as_secs() < 600, "the program stays open");
            std::thread::yield_now();
        }
        let mut work = PageWork::new(vec![program.into(), "3600".into()]);
        work.queue_file(access.root_inode(), OsStr::new("file"), &seen, Huge::Auto, Duration::ZERO);
        let mut step =
            |work: &mut PageWork| work.work(&access, &folders, &mut groups, &mut counts, |_, _, _, _| UNKNOWN);

        while pages::has_lease(lease.as_fd()) {
            assert!(begun.elapsed().as_secs() < 600, "nothing executes the program");
            step(&mut work);
            if work.retry_at.is_some() {
                return println!("skipped: no program can be executed in {}", programs.path().display());
            }
            std::thread::yield_now();
        }
        // The program is being executed and cannot run before the descriptor is closed, or the kernel breaks the lease.
        step(&mut work);
        let lease_break = fs::read_to_string("/proc/sys/fs/lease-break-time").unwrap();
        if begun.elapsed().as_secs() >= lease_break.trim().parse().unwrap() {
            return println!("skipped: a machine this slow loses the lease");
        }
        assert!(work.worker.is_none() && work.starting.is_some() && work.due().is_none());
        drop(lease);
        while work.worker.is_none() {
            assert!(begun.elapsed().as_secs() < 600, "the worker does not start");
            step(&mut work);
            std::thread::yield_now();
        }
        assert!(work.starting.is_none() && work.worker_pid() != 0);
    }
}
