//! The one thread that decides: takes notes of what was written, looks at the limits, purges, keeps the size.
//!
//! Nothing that it knows is shared, so it holds no lock while it works; others reach it through the [`Inbox`].

use crate::budget::{Bound, Budget, LONGEST_PAUSE, Line, Margins};
use crate::door::{Door, Fill};
use crate::groups::Groups;
use crate::inbox::{Inbox, Message, Request};
use crate::ledger::{Ledger, now_ns};
use crate::pace::Pace;
use crate::scan::{self, Scanning};
use crate::status::{LineStatus, Status};
use pagemill::units::BLOCK_BYTES;
use pagemill_sys::cgroup::{self, Machine};
use pagemill_sys::fanotify::{Event, Listener};
use pagemill_sys::thread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Notification is drained so often: each wake-up of a reader would cost the writer three times as much.
const DRAIN_PAUSE: Duration = Duration::from_millis(5);

/// Bytes of one read of notification, some fifty events, and how long draining may take at a time: anybody may close files as
/// fast as he can, and this thread goes before others. What is too much for that is lost, and looked for.
const EVENT_BYTES: usize = 4 << 10;
const DRAIN_SLICE: Duration = Duration::from_millis(1);

/// Purging is interrupted after so long to look at limits again, and to drain.
const SLICE: Duration = Duration::from_millis(2);

/// From this much room on no alarm is needed.
const ROOM_FOR_EASE: u64 = 512 * BLOCK_BYTES as u64;

/// The pause where nothing moves and no alarm will come; and where nothing can go.
const STILL_PAUSE: Duration = Duration::from_millis(4);
const NOTHING_PAUSE: Duration = Duration::from_millis(16);

/// By so much the file system has to grow for an unknown writer to be looked for, and so long it has to be since the last time.
const GROWN_BYTES: u64 = 8 * BLOCK_BYTES as u64;
const GROWN_PAUSE: Duration = Duration::from_millis(20);

/// A purge that met the worker goes on so much later, one that waits for a look at everything so often.
const WORKER_PAUSE: Duration = Duration::from_millis(5);
const SCAN_PAUSE: Duration = Duration::from_millis(2);

/// Limits are asked for so often while nothing moves.
const SAMPLE_LASTS: Duration = Duration::from_millis(200);

/// Looks without a change after which nothing moves.
const STILL_LOOKS: u32 = 16;

/// The machine's memory is asked for so often while there is much of it.
const MACHINE_LASTS: Duration = Duration::from_millis(10);

/// How the mount is to be kept.
#[derive(Clone, Debug)]
pub struct Settings {
    pub mount_point: PathBuf,
    pub size_bytes: u64,
    /// Folders of memory groups to watch besides those of the writers.
    pub groups: Vec<String>,
    /// The program, with its arguments, that serves as worker; none without.
    pub worker: Vec<OsString>,
}

struct PendingPurge {
    left_bytes: u64,
    freed_bytes: u64,
    began_ns: i64,
    /// Not before then.
    next: Instant,
    /// A look at everything was asked for when nothing more was known; it has ended if this is not the latest.
    scans: Option<u64>,
    reply: Sender<u64>,
}

/// The thread's state.
pub struct Steward {
    settings: Settings,
    door: Arc<Door>,
    inbox: Arc<Inbox>,
    listener: Option<Listener>,
    ledger: Ledger,
    started: Instant,
    budget: Budget,
    fill: Fill,
    pace: Pace,
    machine: Option<(Machine, Instant)>,
    is_preferred: bool,
    /// Fill when writers were looked for last.
    grown: (u64, Instant),
    /// Groups that were known at the last look.
    learned: u32,
    purges: Vec<PendingPurge>,
    backlog: VecDeque<Message>,
    scanning: Scanning,
    drained: Instant,
    has_events: bool,
    look_at: Instant,
    /// When limits were asked for last.
    sampled: Instant,
    still_looks: u32,
}

impl Steward {
    /// Takes the file system over: looks at everything there is, sets the size.
    ///
    /// # Errors
    ///
    /// What looking says. Without notification it goes on.
    pub fn new(settings: Settings, door: Door) -> io::Result<Self> {
        let door = Arc::new(door);
        let listener = Listener::new(door.root());
        if let Err(error) = &listener {
            say(&format!("the kernel does not tell what is written ({error}): new files are found now and then only"));
        }
        // Many folders may be open at a time, and without a descriptor no limit can be read.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
        let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
        let now = Instant::now();
        let fill = door.fill()?;
        let mut groups = Groups::new("");
        for folder in &settings.groups {
            groups.add_folder(folder).map_err(|error| {
                let text = format!("{folder} is not the folder of a memory control group: {error}");
                io::Error::new(io::ErrorKind::InvalidInput, text)
            })?;
        }
        let mut steward = Self {
            ledger: Ledger::new(door.clone(), groups, settings.worker.clone()),
            started: now,
            budget: Budget::new(settings.size_bytes, fill, &[], None, Margins::default(), |_| 0),
            fill,
            pace: Pace::new(fill.used_bytes, now),
            machine: None,
            is_preferred: false,
            grown: (fill.used_bytes, now),
            learned: 0,
            purges: Vec::new(),
            backlog: VecDeque::new(),
            scanning: Scanning::new(fill),
            drained: now,
            has_events: false,
            look_at: now,
            sampled: now,
            still_looks: 0,
            inbox: Arc::new(Inbox::new()?),
            listener: listener.ok(),
            settings,
            door,
        };
        scan::scan(&steward.door, |found| steward.ledger.found(found))?;
        steward.ledger.counts.scans = 1;
        steward.look();
        Ok(steward)
    }

    /// Where others reach it.
    pub fn inbox(&self) -> Arc<Inbox> {
        self.inbox.clone()
    }

    /// Works until it is asked to stop.
    pub fn run(mut self) {
        // Writers at full speed leave others no time; it works in bounded steps, and sleeps when nothing happens.
        self.is_preferred = thread::prefer_by_deadline();
        loop {
            self.drain();
            self.take_found();
            for request in self.inbox.take_requests() {
                match request {
                    Request::Stop => return,
                    Request::Status(reply) => drop(reply.send(self.status())),
                    Request::Purge(left_bytes, reply) => {
                        let (now, began_ns) = (Instant::now(), now_ns());
                        self.purges.push(PendingPurge {
                            left_bytes,
                            freed_bytes: 0,
                            began_ns,
                            next: now,
                            scans: None,
                            reply,
                        });
                    }
                }
            }
            if Instant::now() >= self.look_at {
                self.look();
            }
            self.work_on_purges();
            let is_asked = self.purges.iter().any(|purge| purge.scans.is_some());
            let is_wanted = std::mem::take(&mut self.ledger.wants_scan);
            self.scanning.start_if_due(&self.door, &self.inbox, is_wanted, is_asked);
            self.ledger.work_on_pages();
            self.wait();
        }
    }

    /// Takes note of a part of what a look at everything found: a little at a time, limits come first.
    fn take_found(&mut self) {
        const AT_A_TIME: usize = 256;
        if self.backlog.len() < AT_A_TIME {
            self.backlog.extend(self.inbox.take_found());
        }
        let count = self.backlog.len().min(AT_A_TIME);
        for message in self.backlog.drain(..count).collect::<Vec<_>>() {
            match message {
                Message::Found(found) => self.ledger.found(found),
                Message::ScanEnded => {
                    self.ledger.forget_unseen(self.scanning.began_ns());
                    self.scanning.end(self.fill);
                }
            }
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) {
        let now = Instant::now();
        let mut until = self.look_at;
        if self.has_events {
            until = until.min(self.drained + DRAIN_PAUSE);
        }
        if let Some(due) = self.ledger.pages.due() {
            until = until.min(due);
        }
        if let Some(next) = self.purges.iter().map(|purge| purge.next).min() {
            until = until.min(next);
        }
        if !self.backlog.is_empty() {
            until = now;
        }
        let mut polled = vec![PollFd::from_borrowed_fd(self.inbox.as_fd(), PollFlags::IN)];
        // Between two drains nobody is woken.
        let is_listening = !self.has_events && self.drained.elapsed() >= DRAIN_PAUSE;
        if !is_listening {
            until = until.min(self.drained + DRAIN_PAUSE);
        }
        let listener = self.listener.as_ref().filter(|_| is_listening);
        polled.extend(listener.map(|listener| PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)));
        polled.extend(self.ledger.pages.as_fd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let alarms_at = polled.len();
        polled
            .extend(self.ledger.groups.alarms().map(|alarms| PollFd::from_borrowed_fd(alarms.as_fd(), PollFlags::IN)));
        let pause = until.saturating_duration_since(now);
        let pause = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: i64::from(pause.subsec_nanos()) };
        if poll(&mut polled, Some(&pause)).is_err() {
            return;
        }
        let is_ready = |at: usize| polled.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (is_woken, has_events, is_alarmed) = (is_ready(0), listener.is_some() && is_ready(1), is_ready(alarms_at));
        if is_woken {
            self.inbox.calm();
        }
        if is_alarmed {
            self.ledger.groups.take_alarms();
            self.look_at = Instant::now();
        }
        self.has_events |= has_events;
    }

    /// Takes what notification has, if that was not done just now.
    fn drain(&mut self) {
        if !self.has_events || self.drained.elapsed() < DRAIN_PAUSE {
            return;
        }
        let Some(listener) = self.listener.take() else { return };
        (self.has_events, self.drained) = (false, Instant::now());
        let mut buffer = vec![0; EVENT_BYTES];
        // What comes meanwhile is for the next time: writers may be faster than this.
        let until = self.drained + DRAIN_SLICE;
        self.ledger.begin_batch();
        while Instant::now() < until {
            let result = listener.drain(&mut buffer, |event| match event {
                Event::Lost => self.ledger.lost_events(),
                Event::Written { folder, name, pid } => self.ledger.written(folder, name, pid),
                Event::FolderMoved { folder, name } => self.ledger.folder_moved(folder, name),
            });
            match result {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    say(&format!("notification fails ({error}): new files are found now and then only"));
                    return;
                }
            }
        }
        self.has_events = Instant::now() >= until;
        self.listener = Some(listener);
        // Somebody writes: what nothing moved for no longer holds; and a new group's limit is not known.
        if self.still_looks > STILL_LOOKS || self.ledger.groups.learned() != self.learned {
            self.still_looks = 0;
            self.look_at = Instant::now();
        }
    }

    /// Looks at every limit, keeps the size, purges what is over a mark; decides when to look again.
    fn look(&mut self) {
        let (begun, worked) = (Instant::now(), processor_time());
        // Nothing moved for long, here at least, and nothing is near: whether somebody writes is all there is to know.
        let is_still = self.still_looks >= STILL_LOOKS && self.budget.room_bytes() >= ROOM_FOR_EASE;
        if is_still && begun < self.sampled + SAMPLE_LASTS && self.door.fill().is_ok_and(|fill| fill == self.fill) {
            self.look_at = begun + LONGEST_PAUSE;
            return;
        }
        let mut blocked: Vec<Bound> = Vec::new();
        let mut is_behind = false;
        let was = (self.fill.used_bytes, self.used_of_groups());
        loop {
            self.sample();
            let over =
                self.budget.lines.iter().filter(|line| line.excess_bytes() > 0 && !blocked.contains(&line.bound));
            let Some(line) = over.max_by_key(|line| line.excess_bytes()).cloned() else { break };
            let freed = self.purge_for(&line);
            if freed == 0 {
                blocked.push(line.bound);
                self.ledger.counts.nothing_to_purge += 1;
                // Something may have been marked, or was used by a name that is not known.
                self.ledger.wants_scan = true;
            }
            if begun.elapsed() > DRAIN_PAUSE {
                is_behind = freed > 0;
                break;
            }
        }
        let has_moved = was != (self.fill.used_bytes, self.used_of_groups());
        self.still_looks = if has_moved { 0 } else { self.still_looks.saturating_add(1) };
        // Half of a processor at most, however many limits there are. Who had to wait for a lock or for his turn is late already.
        // Who is still purging does not rest: a writer on the other processor does not either.
        let worked = processor_time().saturating_sub(worked);
        let pause = if is_behind { Duration::ZERO } else { self.pause(!blocked.is_empty()).max(worked) };
        self.look_at = Instant::now() + pause;
    }

    fn used_of_groups(&self) -> u64 {
        let groups = self.budget.lines.iter().filter(|line| line.bound != Bound::Machine);
        groups.fold(0, |sum, line| sum.wrapping_add(line.used_bytes))
    }

    fn pause(&mut self, is_blocked: bool) -> Duration {
        let pause = self.budget.pause();
        if self.still_looks < STILL_LOOKS {
            return pause;
        }
        if is_blocked {
            return pause.max(NOTHING_PAUSE);
        }
        // Near a limit of a group the kernel may do the looking.
        let groups = &mut self.ledger.groups;
        let is_alarmed = |line: &Line| match line.bound {
            Bound::Group(watch) => {
                let alarm = line.mark_bytes + (line.limit_bytes - line.mark_bytes) / 8;
                line.used_bytes < alarm && groups.set_alarm(watch, alarm)
            }
            _ => false,
        };
        let near = self.budget.lines.iter().filter(|line| line.room_bytes() < ROOM_FOR_EASE);
        if near.map(is_alarmed).fold(true, |all, is_alarmed| all & is_alarmed) {
            LONGEST_PAUSE
        } else {
            pause.max(STILL_PAUSE)
        }
    }

    /// Asks the kernel how full everything is, and sets the size that follows.
    fn sample(&mut self) {
        self.sampled = Instant::now();
        self.fill = self.door.fill().unwrap_or(self.fill);
        self.ledger.groups.list_suspects_if_due();
        self.find_writers();
        self.learned = self.ledger.groups.learned();
        let groups = self.ledger.groups.sample();
        let is_old = |(machine, at): &(Machine, Instant)| {
            at.elapsed() > MACHINE_LASTS || machine.available_bytes < machine.total_bytes / 8
        };
        if self.machine.as_ref().is_none_or(is_old) {
            self.machine = cgroup::machine("").ok().map(|machine| (machine, Instant::now()));
        }
        let machine = self.machine.map(|(machine, _)| machine);
        self.pace.look(self.fill.used_bytes, Instant::now());
        let margins = Margins { is_preferred: self.is_preferred, foreseen_bytes: self.pace.foreseen_bytes() };
        let held = |bound: Bound| self.ledger.held_bytes(bound.group());
        self.budget = Budget::new(self.settings.size_bytes, self.fill, &groups, machine, margins, held);
        if self.budget.wants_size(self.fill) {
            match self.door.set_size(self.budget.size_bytes) {
                Ok(()) => self.ledger.counts.size_changes += 1,
                // Somebody wrote meanwhile, so that more is used: next time.
                Err(_) => self.ledger.counts.size_refused += 1,
            }
        }
    }

    /// Looks who it is if the file system has grown: before the first file is closed nobody says so.
    fn find_writers(&mut self) {
        let (used, at) = self.grown;
        if self.fill.used_bytes >= used.saturating_add(GROWN_BYTES) && at.elapsed() >= GROWN_PAUSE {
            self.ledger.groups.find_writers();
            self.grown = (self.fill.used_bytes, Instant::now());
        }
        self.grown.0 = self.grown.0.min(self.fill.used_bytes);
    }

    /// Purges for a limit, for a moment. Returns what went.
    fn purge_for(&mut self, line: &Line) -> u64 {
        let (begun, began_ns, mut freed) = (Instant::now(), now_ns(), 0);
        while freed < line.excess_bytes() && begun.elapsed() < SLICE {
            match self.ledger.purge_one(line.bound.group(), line.excess_bytes() - freed, began_ns) {
                Some(bytes) => {
                    self.pace.freed(bytes);
                    freed += bytes;
                }
                None => break,
            }
        }
        freed
    }

    /// Does a part of what was asked for by [`Request::Purge`].
    fn work_on_purges(&mut self) {
        let begun = Instant::now();
        let mut purges = std::mem::take(&mut self.purges);
        purges.retain_mut(|purge| {
            if purge.next > begun {
                return true;
            }
            while purge.left_bytes > 0 && begun.elapsed() < SLICE {
                match self.ledger.purge_one(None, purge.left_bytes, purge.began_ns) {
                    Some(bytes) => {
                        self.pace.freed(bytes);
                        purge.left_bytes = purge.left_bytes.saturating_sub(bytes);
                        purge.freed_bytes += bytes;
                    }
                    None if std::mem::take(&mut self.ledger.met_worker) => {
                        (purge.began_ns, purge.next) = (now_ns(), begun + WORKER_PAUSE);
                        return true;
                    }
                    // Once more after a look at everything that begins now, and then no more.
                    None => match purge.scans {
                        None => {
                            purge.scans = Some(self.ledger.counts.scans + 1 + u64::from(self.scanning.is_running()));
                            self.ledger.wants_scan = true;
                            return true;
                        }
                        Some(scans) if self.ledger.counts.scans < scans => {
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

    fn status(&self) -> Status {
        let line = |line: &Line| LineStatus {
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
        let fill = self.door.fill().unwrap_or(self.fill);
        Status {
            mount_point: self.settings.mount_point.to_string_lossy().into_owned(),
            controller_pid: Some(std::process::id()),
            asked_bytes: self.settings.size_bytes,
            size_bytes: fill.size_bytes,
            used_bytes: fill.used_bytes,
            inodes: fill.inodes,
            volatile_files: self.ledger.index.count() as u64,
            volatile_bytes: self.ledger.held_bytes(None),
            lines: self.budget.lines.iter().map(line).collect(),
            counts: self.ledger.counts,
            is_preferred: self.is_preferred,
            is_notified: self.listener.is_some(),
            files_waiting_for_pages: self.ledger.pages.count() as u64,
            uptime_seconds: self.started.elapsed().as_secs_f64(),
        }
    }
}

/// For how long this thread has had a processor.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Says something to whoever started the controller.
pub fn say(message: &str) {
    let _ = writeln!(io::stderr(), "pagemill: {message}");
}
