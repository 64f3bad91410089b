//! The control loop: one thread that records writes, checks all limits, purges volatile files, and sets the file
//! system's size. A *check* reads usage and limits, and purges while usage is above a purge threshold
//! ([`crate::budget`]).
//!
//! The loop shares no state, so it holds no lock while it works. Other threads send it requests through the
//! [`SubmissionQueue`].

mod requests;
mod writer_search;

use crate::budget::{Bound, Budget, LONGEST_PAUSE, LimitUsage, Margins, occupied_bytes};
use crate::closes::{CloseEventsChange, Closes};
use crate::duty::Duty;
use crate::file_access::{FileAccess, FileSystemUsage, now_ns};
use crate::file_table::FileTable;
use crate::groups::Groups;
use crate::growth_predictor::GrowthPredictor;
use crate::messages::print_message;
use crate::open_throttle::OpenThrottle;
use crate::openfiles;
use crate::recent_peak::RecentPeak;
use crate::scan::{self, Scanning, Which};
use crate::submissions::{ScanMessage, SubmissionQueue};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::cgroup::{self, Machine};
use pagemill_sys::fanotify::{Event, Listener};
use pagemill_sys::open_permission::OpenPermissions;
use pagemill_sys::thread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use writer_search::WriterSearch;

/// Pause between two reads of the event queue. If every event woke the control loop, a close would cost the writer
/// three times as much.
const DRAIN_PAUSE: Duration = Duration::from_millis(5);

/// Maximum number of bytes that one read of the event queue returns: some fifty events.
const MAX_EVENT_READ_BYTES: usize = 4 << 10;
/// Maximum time for which the control loop reads events after one `DRAIN_PAUSE`. The time is limited because any user
/// can close files at any rate, and this thread runs at high priority. If the kernel's queue overflows, a scan finds
/// the files.
const DRAIN_SLICE: Duration = Duration::from_millis(1);

/// Number of consecutive failed reads of the event queue after which the control loop works without events. Each failed
/// read before that counts as lost events.
const MAX_FAILED_READS: u32 = 100;

/// Time for which the control loop purges before it reads the limits again or does its other work.
const SLICE: Duration = Duration::from_millis(2);

/// Minimum room below every purge threshold at which checks of a stable file system read only its usage, and no limits.
/// If the room below a group's threshold is less, the kernel must watch that group's usage (an alarm).
const ROOM_FOR_SHORT_CHECKS: u64 = 512 * BLOCK_BYTES as u64;

/// Pause between checks while usage is stable, if the kernel cannot watch a group's usage (no alarm can be set).
const STABLE_PAUSE: Duration = Duration::from_millis(4);
/// Pause between checks while usage is stable, if it is above a purge threshold and no file can be purged.
const BLOCKED_PAUSE: Duration = Duration::from_millis(16);

/// Close events may be off only while the room below every purge threshold is at least this many times the predicted
/// growth: as much as usage grows in some two seconds.
const QUIET_GROWTH_FACTOR: u64 = 50;
/// Close events may be off only while at least this many bytes of room are below every purge threshold.
const MIN_QUIET_ROOM_BYTES: u64 = 128 * BLOCK_BYTES as u64;

/// Interval at which the control loop reads the limits while usage is stable.
const LIMITS_INTERVAL: Duration = Duration::from_millis(200);

/// Number of consecutive checks with unchanged usage after which usage counts as stable.
const MIN_STABLE_CHECKS: u32 = 16;

/// Interval at which the machine's available memory is read while at least an eighth of all memory is available.
const MACHINE_MEMORY_INTERVAL: Duration = Duration::from_millis(10);

/// Time for which the control loop reads, during the first scan, to which groups the found files are charged.
const FIRST_SCAN_TIME: Duration = Duration::from_secs(1);

/// Opens are delayed while the room below a limit is at most this many times the predicted growth: as much as usage
/// grows in some 160 ms.
const FAST_GROWTH_FACTOR: u64 = 4;

/// While the control loop purges, opens remain allowed for this long after a reading of the usage.
const READING_MAX_AGE: Duration = Duration::from_millis(8);
/// While the control loop does not purge, opens remain allowed until this long after the time at which the next check
/// is due.
const CHECK_TOLERANCE: Duration = Duration::from_millis(4);

/// Settings of a mounted file system.
#[derive(Clone, Debug)]
pub struct Settings {
    pub mount_point: PathBuf,
    pub size_bytes: u64,
    /// Folders of memory groups to watch besides those of the writers.
    pub groups: Vec<String>,
    /// Command line of the worker process; empty for none.
    pub worker: Vec<OsString>,
}

/// A limit whose purge threshold is exceeded although no file is known that can be purged for it.
///
/// Files can be unknown: named by a link, or written while events were lost. So a scan is started at once, and opens
/// wait for it as if a purge were in progress. If the scan finds no file to purge either, the limit is *given up* until
/// a file is purged for it.
#[derive(Clone, Copy)]
struct BlockedLimit {
    bound: Bound,
    /// The limit is given up once this many scans have ended since the start of the control loop.
    awaited_scans: u64,
    is_given_up: bool,
}

/// State of the control loop.
pub struct ControlLoop {
    settings: Settings,
    access: Arc<FileAccess>,
    submissions: Arc<SubmissionQueue>,
    listener: Option<Listener>,
    table: FileTable,
    started: Instant,
    budget: Budget,
    usage: FileSystemUsage,
    growth_predictor: GrowthPredictor,
    /// Recent peak of the memory of all files and inodes.
    peak: RecentPeak,
    duty: Duty,
    /// `None` where the kernel cannot delay opens.
    throttle: Option<OpenThrottle>,
    machine: Option<(Machine, Instant)>,
    is_preferred: bool,
    writer_search: WriterSearch,
    /// Number of known groups at the last check.
    groups_added: u32,
    purges: Vec<requests::PendingPurge>,
    backlog: VecDeque<ScanMessage>,
    scanning: Scanning,
    closes: Closes,
    /// The limits that the last check found blocked.
    blocked: Vec<BlockedLimit>,
    /// When the event queue was last read.
    drained: Instant,
    has_events: bool,
    /// The worker has sent answers that the loop has not read yet.
    has_replies: bool,
    /// Number of consecutive reads of the event queue that failed.
    failed_reads: u32,
    /// Time of the next check.
    next_check_at: Instant,
    /// When limits were last read.
    sampled: Instant,
    /// Number of consecutive checks in which the usage did not change.
    stable_checks: u32,
}

impl ControlLoop {
    /// Creates a control loop for the file system. Scans all files, and checks the limits once.
    ///
    /// # Errors
    ///
    /// Errors of the scan, and of a folder in `settings.groups`. If the kernel reports no events, the control loop
    /// works without them.
    pub fn new(settings: Settings, access: FileAccess) -> io::Result<Self> {
        let access = Arc::new(access);
        let listener = Listener::new(access.root());
        if let Err(error) = &listener {
            print_message(&format!("the kernel does not report writes ({error}): only periodic scans find new files"));
        }
        // Many folders may be open at a time. Without a free descriptor the limits could not be read.
        pagemill_sys::process::raise_descriptor_limit();
        let (now, began_ns) = (Instant::now(), now_ns());
        let usage = access.usage()?;
        let mut groups = Groups::new("");
        for folder in &settings.groups {
            groups.add_folder(folder).map_err(|error| {
                let text = format!("{folder} is not the folder of a memory control group: {error}");
                io::Error::new(error.kind(), text)
            })?;
        }
        let mut control_loop = Self {
            table: FileTable::new(access.clone(), groups, settings.worker.clone()),
            started: now,
            budget: Budget::new(settings.size_bytes, (usage, 0), &[], None, Margins::default(), |_| 0),
            usage,
            growth_predictor: GrowthPredictor::new(usage.used_bytes, usage.inodes, now),
            peak: RecentPeak::new(now),
            duty: Duty::default(),
            throttle: None,
            machine: None,
            is_preferred: false,
            writer_search: WriterSearch::new(usage.used_bytes, now),
            groups_added: 0,
            purges: Vec::new(),
            backlog: VecDeque::new(),
            scanning: Scanning::new(usage),
            closes: Closes::new(now),
            blocked: Vec::new(),
            drained: now,
            has_events: false,
            has_replies: false,
            failed_reads: 0,
            next_check_at: now,
            sampled: now,
            stable_checks: 0,
            submissions: Arc::new(SubmissionQueue::new()?),
            listener: listener.ok(),
            settings,
            access,
        };
        // A file system that is taken over has files. Their groups must bound its size from the first check on.
        let until = now + FIRST_SCAN_TIME;
        let table = &mut control_loop.table;
        scan::scan(&control_loop.access, Which::All, &AtomicBool::new(true), |found| {
            let file = found.file().filter(|_| Instant::now() < until);
            file.into_iter().for_each(|(folder, name, seen)| table.record_charge(folder, name, seen));
            table.record_scan_item(found);
        })?;
        control_loop.table.record_scan_end(now, began_ns);
        control_loop.throttle = control_loop.can_delay_opens().then(OpenThrottle::default);
        control_loop.check_limits();
        Ok(control_loop)
    }

    /// Returns whether opens may be delayed. Requires root. False if the worker's program is a file of this mount: the
    /// start of a worker would then wait for the controller, which may have been killed.
    fn can_delay_opens(&self) -> bool {
        let program = self.settings.worker.first().and_then(|program| std::fs::metadata(program).ok());
        let is_elsewhere = program.is_none_or(|program| program.dev() != self.access.device());
        is_elsewhere && OpenPermissions::new().is_ok()
    }

    /// Returns the queue through which other threads reach the control loop.
    pub fn submissions(&self) -> Arc<SubmissionQueue> {
        self.submissions.clone()
    }

    /// Runs until a stop request arrives.
    pub fn run(mut self) {
        // Writers at full speed can use all CPU time, so this thread needs priority. It works in bounded steps and
        // sleeps when idle.
        self.is_preferred = thread::prefer_by_deadline();
        loop {
            self.read_due_events();
            self.switch_close_events();
            self.take_scan_messages();
            if self.handle_requests() {
                return;
            }
            if Instant::now() >= self.next_check_at {
                self.check_limits();
            }
            self.work_on_purges();
            let is_asked = self.purges.iter().any(|purge| purge.scans.is_some());
            let is_wanted = std::mem::take(&mut self.table.wants_scan);
            self.scanning.hurry(is_asked || !self.blocked.is_empty());
            let is_urgent = !self.blocked_bounds(false).is_empty();
            self.scanning.start_if_due(&self.access, &self.submissions, is_wanted, is_urgent, is_asked);
            // The worker closes a file before it answers. Without process ids, its close is recognized only if the
            // event is read before the answer.
            if std::mem::take(&mut self.has_replies) && !self.table.may_ask_for_group() {
                self.read_events_now();
            }
            self.table.work_on_pages();
            self.wait();
        }
    }

    /// Records at most 256 scan results, so that the next check is not delayed.
    fn take_scan_messages(&mut self) {
        const AT_A_TIME: usize = 256;
        if self.backlog.len() < AT_A_TIME {
            self.backlog.extend(self.submissions.take_scan_messages());
        }
        let count = self.backlog.len().min(AT_A_TIME);
        for message in self.backlog.drain(..count).collect::<Vec<_>>() {
            match message {
                ScanMessage::ScanItem(found) => self.table.record_scan_item(found),
                ScanMessage::ScanEnded => {
                    self.table.record_scan_end(self.scanning.began(), self.scanning.began_ns());
                    self.scanning.end(self.usage);
                }
            }
        }
    }

    /// Sleeps until there is work.
    fn wait(&mut self) {
        let now = Instant::now();
        let mut until = self.next_check_at;
        if self.has_events {
            until = until.min(self.drained + DRAIN_PAUSE);
        }
        if let Some(due) = self.table.pages.due() {
            until = until.min(due);
        }
        if let Some(next) = self.purges.iter().map(|purge| purge.next).min() {
            until = until.min(next);
        }
        if !self.backlog.is_empty() {
            until = now;
        }
        let mut polled = vec![PollFd::from_borrowed_fd(self.submissions.as_fd(), PollFlags::IN)];
        // Until the next drain, events do not wake this thread.
        let is_listening = !self.has_events && self.drained.elapsed() >= DRAIN_PAUSE;
        if !is_listening {
            until = until.min(self.drained + DRAIN_PAUSE);
        }
        let listener = self.listener.as_ref().filter(|_| is_listening);
        polled.extend(listener.map(|listener| PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)));
        let worker_at = polled.len();
        polled.extend(self.table.pages.as_fd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let alarms_at = polled.len();
        polled.extend(self.table.groups.alarms().map(|alarms| PollFd::from_borrowed_fd(alarms.as_fd(), PollFlags::IN)));
        let pause = until.saturating_duration_since(now);
        let pause = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: i64::from(pause.subsec_nanos()) };
        if poll(&mut polled, Some(&pause)).is_err() {
            return;
        }
        let is_ready = |at: usize| polled.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (is_woken, has_events, is_alarmed) = (is_ready(0), listener.is_some() && is_ready(1), is_ready(alarms_at));
        let has_replies = is_ready(worker_at);
        if is_woken {
            self.submissions.reset_waker();
        }
        if is_alarmed {
            self.table.groups.take_alarms();
            self.next_check_at = Instant::now();
        }
        self.has_replies = worker_at < alarms_at && has_replies;
        self.has_events |= has_events;
    }

    /// Reads the queued events, unless they were read less than `DRAIN_PAUSE` ago.
    fn read_due_events(&mut self) {
        if self.has_events && self.drained.elapsed() >= DRAIN_PAUSE {
            self.read_events_now();
        }
    }

    fn read_events_now(&mut self) {
        let Some(listener) = self.listener.take() else { return };
        (self.has_events, self.drained) = (false, Instant::now());
        let mut buffer = vec![0; MAX_EVENT_READ_BYTES];
        // Events that arrive meanwhile are read next time, since writers may be faster than this loop.
        let until = self.drained + DRAIN_SLICE;
        self.table.begin_batch();
        let before = (self.table.counts.events, self.table.closed_bytes);
        while Instant::now() < until {
            let result = listener.drain(&mut buffer, |event| match event {
                Event::Lost => self.table.record_lost_events(),
                Event::Written { folder, name, pid } => self.table.record_written(folder, name, pid),
                Event::FolderMoved { folder, name } => self.table.record_moved_folder(folder, name),
            });
            match result {
                Ok(true) => self.failed_reads = 0,
                Ok(false) => break,
                Err(error) => {
                    self.failed_reads += 1;
                    self.table.record_lost_events();
                    if self.failed_reads >= MAX_FAILED_READS {
                        print_message(&format!("reading events fails ({error}): only periodic scans find new files"));
                        self.table.end_batch();
                        return;
                    }
                    break;
                }
            }
        }
        self.table.end_batch();
        self.closes.count(self.table.counts.events - before.0, self.table.closed_bytes - before.1);
        self.has_events = Instant::now() >= until;
        self.listener = Some(listener);
        // Usage changes again, or the limit of a new group must be read: check at once.
        if self.stable_checks > MIN_STABLE_CHECKS || self.table.groups.groups_added() != self.groups_added {
            self.stable_checks = 0;
            self.next_check_at = Instant::now();
        }
    }

    /// Turns close events on or off, and requests a scan for files that were closed while the events were off.
    fn switch_close_events(&mut self) {
        let now = Instant::now();
        let room = self.budget.room_bytes();
        let has_room = room
            >= MIN_QUIET_ROOM_BYTES
                .max(self.growth_predictor.recently_predicted_bytes().saturating_mul(QUIET_GROWTH_FACTOR))
            && !self.writer_search.has_suspects();
        if let (Some(listener), Some(change)) = (&self.listener, self.closes.next_change(now, has_room)) {
            // If events cannot be turned off, they still arrive. If they cannot be turned on, scans find the
            // files.
            if listener.listen_to_closes(self.access.root(), change == CloseEventsChange::Enable).is_err()
                && change == CloseEventsChange::Enable
            {
                print_message("the kernel no longer reports closes: only periodic scans find new files");
            }
            self.table.counts.quiet_times += u64::from(change == CloseEventsChange::Disable);
        }
        self.table.wants_scan |= self.closes.is_scan_due(now, has_room);
    }

    /// Checks every limit, sets the size, purges while usage is above a purge threshold, and sets the time of the next
    /// check.
    fn check_limits(&mut self) {
        let (begun, worked) = (Instant::now(), processor_time());
        // Usage has been stable for long and no limit is near: read only the file system's usage.
        let is_still = self.stable_checks >= MIN_STABLE_CHECKS && self.budget.room_bytes() >= ROOM_FOR_SHORT_CHECKS;
        if is_still
            && begun < self.sampled + LIMITS_INTERVAL
            && self.access.usage().is_ok_and(|usage| usage == self.usage)
        {
            self.next_check_at = begun + LONGEST_PAUSE;
            self.allow_opens_until(self.next_check_at + CHECK_TOLERANCE);
            return;
        }
        let mut blocked: Vec<BlockedLimit> = Vec::new();
        let mut is_purge_unfinished = false;
        let was = (self.usage.used_bytes, self.sum_of_usages());
        loop {
            // Files whose close has not been recorded cannot be purged.
            if self.throttle.as_ref().is_some_and(OpenThrottle::is_active) {
                self.read_events_now();
            }
            self.sample();
            self.throttle_opens();
            let is_blocked = |bound: Bound| blocked.iter().any(|limit| limit.bound == bound);
            let over = self.budget.lines.iter().filter(|line| line.excess_bytes() > 0 && !is_blocked(line.bound));
            let Some(line) = over.max_by_key(|line| line.excess_bytes()).cloned() else { break };
            let freed = self.purge_for(&line);
            if freed.is_none() {
                blocked.push(self.blocked_limit(line.bound));
                self.table.wants_scan = true;
            }
            if begun.elapsed() > DRAIN_PAUSE {
                is_purge_unfinished = freed.is_some_and(|bytes| bytes > 0);
                break;
            }
        }
        let is_blocked = !blocked.is_empty();
        let had_given_up = !self.blocked_bounds(true).is_empty();
        self.blocked = blocked;
        self.table.counts.nothing_to_purge += u64::from(!had_given_up && !self.blocked_bounds(true).is_empty());
        let has_moved = was != (self.usage.used_bytes, self.sum_of_usages());
        self.stable_checks = if has_moved { 0 } else { self.stable_checks.saturating_add(1) };
        // The loop uses at most half of a CPU, however many limits there are. Only CPU time counts: after a wait for a
        // lock or for the CPU no further pause is needed.
        let worked = processor_time().saturating_sub(worked);
        let pause = self.pause(is_blocked);
        let next = self.duty.next_check(self.sampled, Instant::now(), pause, worked);
        // If a purge is unfinished, the next check follows without a pause, because writers on other CPUs do not pause
        // either.
        self.next_check_at = if is_purge_unfinished { Instant::now() } else { next };
        self.allow_opens_until(self.next_check_at + CHECK_TOLERANCE);
    }

    /// Returns the state of a limit for which no known file can be purged.
    fn blocked_limit(&self, bound: Bound) -> BlockedLimit {
        let scans = self.table.counts.scans;
        match self.blocked.iter().find(|limit| limit.bound == bound) {
            Some(known) => BlockedLimit { is_given_up: known.is_given_up || scans >= known.awaited_scans, ..*known },
            // A scan that is running may have passed the files already.
            None => {
                let awaited_scans = scans + 1 + u64::from(self.scanning.is_running());
                BlockedLimit { bound, awaited_scans, is_given_up: false }
            }
        }
    }

    /// Returns the blocked limits that are given up, or those for which a scan searches for files.
    fn blocked_bounds(&self, is_given_up: bool) -> Vec<Bound> {
        self.blocked.iter().filter(|limit| limit.is_given_up == is_given_up).map(|limit| limit.bound).collect()
    }

    /// Delays opens while writers are fast, if a file can be purged for a limit that these writers may reach.
    fn throttle_opens(&mut self) {
        let fast_bytes = self.growth_predictor.recently_predicted_bytes().saturating_mul(FAST_GROWTH_FACTOR);
        let room_bytes = self.budget.room_to_limit_bytes(&self.blocked_bounds(true));
        let may_purge = self.table.index.count() > 0 || !self.blocked_bounds(false).is_empty();
        let has_fast_writers = may_purge && fast_bytes > 0 && fast_bytes >= room_bytes;
        let Some(throttle) = &mut self.throttle else { return };
        if let Err(error) = throttle.update(self.access.root(), has_fast_writers, self.sampled) {
            print_message(&format!(
                "the kernel does not delay opens ({error}): a fast writer may find the file system full"
            ));
            throttle.end(self.access.root());
            self.throttle = None;
        }
        self.allow_opens_until(self.sampled + READING_MAX_AGE);
    }

    /// Allows opens until the time `until`, or until writers at their recent rate need half of the room below a limit.
    /// Allows none if usage is close to a limit for which files can be purged.
    fn allow_opens_until(&self, until: Instant) {
        let Some(throttle) = &self.throttle else { return };
        let given_up = self.blocked_bounds(true);
        let is_close = self.budget.is_close_to_limit(&given_up, &self.blocked_bounds(false));
        let room_bytes = self.budget.room_to_limit_bytes(&given_up);
        let until = until.min(self.sampled + self.growth_predictor.time_to_grow(room_bytes / 2));
        throttle.allow_until(if is_close { self.started } else { until });
    }

    /// Returns the sum of the usages of all limits except the machine's. The sum is only compared with earlier sums.
    fn sum_of_usages(&self) -> u64 {
        let groups = self.budget.lines.iter().filter(|line| line.bound != Bound::Machine);
        groups.fold(0, |sum, line| sum.wrapping_add(line.used_bytes))
    }

    /// Returns how long after the last reading of the usage the next check is due.
    fn pause(&mut self, is_blocked: bool) -> Duration {
        let pause = self.budget.pause();
        if self.stable_checks < MIN_STABLE_CHECKS {
            return pause;
        }
        if is_blocked {
            return pause.max(BLOCKED_PAUSE);
        }
        // Near a group's purge threshold the kernel can watch the usage (an alarm).
        let groups = &mut self.table.groups;
        let is_alarmed = |line: &LimitUsage| match line.bound {
            Bound::Group(watch) => {
                let alarm = line.mark_bytes + (line.limit_bytes - line.mark_bytes) / 8;
                line.used_bytes < alarm && groups.set_alarm(watch, alarm)
            }
            _ => false,
        };
        let near = self.budget.lines.iter().filter(|line| line.room_bytes() < ROOM_FOR_SHORT_CHECKS);
        if near.map(is_alarmed).fold(true, |all, is_alarmed| all & is_alarmed) {
            LONGEST_PAUSE
        } else {
            pause.max(STABLE_PAUSE)
        }
    }

    /// Reads usage and limits from the kernel, and sets the file system's size accordingly.
    fn sample(&mut self) {
        self.sampled = Instant::now();
        self.usage = self.access.usage().unwrap_or(self.usage);
        if self.table.groups.list_suspects_if_due() {
            self.table.renew_writers();
        }
        self.find_writers();
        self.table.examine_claims();
        self.groups_added = self.table.groups.groups_added();
        self.table.groups.record_files(|group| self.table.index.has_files_of(group));
        let groups = self.table.groups.sample();
        let is_old = |(machine, at): &(Machine, Instant)| {
            at.elapsed() > MACHINE_MEMORY_INTERVAL || machine.available_bytes < machine.total_bytes / 8
        };
        if self.machine.as_ref().is_none_or(is_old) {
            self.machine = cgroup::machine("").ok().map(|machine| (machine, Instant::now()));
        }
        let machine = self.machine.map(|(machine, _)| machine);
        self.growth_predictor.record_usage(self.usage.used_bytes, Instant::now());
        self.growth_predictor.record_inodes(self.usage.inodes);
        let peak_bytes = self.peak.record(occupied_bytes(self.usage), Instant::now());
        let margins = Margins {
            is_preferred: self.is_preferred,
            predicted_bytes: self.growth_predictor.predicted_bytes(),
            predicted_inodes: self.growth_predictor.predicted_inodes(),
        };
        let held = |bound: Bound| self.table.held_bytes(bound);
        self.budget = Budget::new(self.settings.size_bytes, (self.usage, peak_bytes), &groups, machine, margins, held);
        if self.budget.wants_change(self.usage) {
            match self.access.set_size(self.budget.size_bytes, self.budget.max_inodes) {
                Ok(()) => {
                    let is_size = self.budget.wants_size(self.usage);
                    self.table.counts.size_changes += u64::from(is_size);
                }
                // Another process wrote meanwhile, so usage is above the new size. The next check tries again.
                Err(_) => self.table.counts.size_refused += 1,
            }
        }
    }

    /// Searches for writers if the file system has grown, since no event identifies a file's writer before the file is
    /// closed. Without permission to examine other processes and pages, no writer could be found.
    fn find_writers(&mut self) {
        let now = Instant::now();
        if self.table.may_ask_for_group() && self.writer_search.is_due(self.usage.used_bytes, now) {
            let access = self.access.clone();
            let charged = |folders: &[String], from| openfiles::charged_memory(&access, folders, from);
            let has_suspects = self.table.groups.find_writers(charged);
            self.writer_search.record(self.usage.used_bytes, Instant::now(), has_suspects);
        }
    }

    /// Purges for a limit during one time slice. Returns the bytes freed; `None` if no file that may be purged is left.
    fn purge_for(&mut self, line: &LimitUsage) -> Option<u64> {
        let (begun, began_ns, mut freed) = (Instant::now(), now_ns(), 0);
        while freed < line.excess_bytes() && begun.elapsed() < SLICE {
            match self.table.purge_one(line.bound.group(), line.excess_bytes() - freed, began_ns) {
                Some(bytes) => {
                    self.growth_predictor.freed(bytes);
                    freed += bytes;
                }
                // The limits of groups that were found meanwhile are read at the next check.
                None if self.groups_added != self.table.groups.groups_added() => return Some(freed),
                None => return (freed > 0).then_some(freed),
            }
        }
        Some(freed)
    }
}

/// Returns the CPU time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
