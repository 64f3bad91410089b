//! The one thread that decides: takes notes of what was written, looks at the limits, purges, keeps the size.
//!
//! Nothing that it knows is shared, so it holds no lock while it works; others reach it through the [`Inbox`], which it only
//! tries to lock: who has it may be of lower priority and off the processor.

use crate::budget::{Bound, Budget, LONGEST_PAUSE, Line, Margins};
use crate::door::{self, Door, Fill, Seen};
use crate::folders::Folders;
use crate::groups::{Groups, UNKNOWN};
use crate::index::{File, Index, Part};
use crate::pace::Pace;
use crate::pagework::PageWork;
use crate::policy::{Marks, Volatile};
use crate::purge::{self, Outcome, Target};
use crate::scan::{self, Found};
use crate::status::{Counts, LineStatus, Status};
use pagemill::units::BLOCK_BYTES;
use pagemill_sys::cgroup::{self, Machine};
use pagemill_sys::fanotify::{Event, Listener};
use pagemill_sys::{pages, thread};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::OFlags;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Notification is drained so often: each wake-up of a reader would cost the writer three times as much.
const DRAIN_PAUSE: Duration = Duration::from_millis(5);

/// Bytes of one read of notification: some hundred events.
const EVENT_BYTES: usize = 64 << 10;

/// Purging is interrupted after so long to look at limits again, and to drain.
const SLICE: Duration = Duration::from_millis(2);

/// From this much room on no alarm is needed.
const ROOM_FOR_EASE: u64 = 512 * BLOCK_BYTES as u64;

/// A file that was closed is left alone for so long before its pages are looked at: many are opened again at once, and a
/// volatile one may be purged soon, in which the worker would only be in the way.
const DELAY: Duration = Duration::from_millis(50);
const VOLATILE_DELAY: Duration = Duration::from_millis(500);

/// A file that the worker has open is due again so much later than it was.
const WORKER_NS: i64 = 100_000_000;

/// The pause where nothing moves and no alarm will come; and where nothing can go.
const STILL_PAUSE: Duration = Duration::from_millis(4);
const NOTHING_PAUSE: Duration = Duration::from_millis(16);

/// By so much the file system has to grow for an unknown writer to be looked for, and so long it has to be since the last time.
const GROWN_BYTES: u64 = 8 * BLOCK_BYTES as u64;
const GROWN_PAUSE: Duration = Duration::from_millis(20);

/// Looks without a change after which nothing moves.
const STILL_LOOKS: u32 = 16;

/// The machine's memory is asked for so often while there is much of it.
const MACHINE_LASTS: Duration = Duration::from_millis(10);

/// Bounds of the time between two looks at everything.
const SCAN_EVERY: std::ops::Range<Duration> = Duration::from_secs(5)..Duration::from_secs(300);

/// A look at everything may take this part of the time.
const SCAN_SHARE: u32 = 20;

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

/// What others want.
pub enum Request {
    Status(Sender<Status>),
    /// Purge so much; answered with what went.
    Purge(u64, Sender<u64>),
    Stop,
}

/// Where others leave what they want, and what they found.
pub struct Inbox {
    requests: Mutex<Vec<Request>>,
    found: Mutex<Vec<Message>>,
    wake: OwnedFd,
}

enum Message {
    Found(Found),
    ScanEnded,
}

impl Inbox {
    fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { requests: Mutex::default(), found: Mutex::default(), wake })
    }

    pub fn send(&self, request: Request) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.wake();
    }

    fn send_found(&self, messages: &mut Vec<Message>) {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).append(messages);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Takes what is there, if nobody holds the lock just now.
fn take<T>(from: &Mutex<Vec<T>>) -> Vec<T> {
    let guard: Option<MutexGuard<'_, Vec<T>>> = from.try_lock().ok();
    guard.map_or_else(Vec::new, |mut guard| std::mem::take(&mut *guard))
}

struct PendingPurge {
    left_bytes: u64,
    freed_bytes: u64,
    began_ns: i64,
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
    folders: Folders,
    index: Index,
    groups: Groups,
    pages: PageWork,
    counts: Counts,
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
    scanning: Scanning,
    drained: Instant,
    has_events: bool,
    look_at: Instant,
    still_looks: u32,
    told: HashSet<PathBuf>,
}

/// When everything was looked at last, and is to be next.
struct Scanning {
    is_running: bool,
    is_wanted: bool,
    began: Instant,
    began_ns: i64,
    next: Instant,
    every: Duration,
    seen: HashSet<u64>,
    fill: Fill,
}

fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
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
        let now = Instant::now();
        let fill = door.fill()?;
        let mut groups = Groups::new("");
        groups.of_self();
        for folder in &settings.groups {
            groups.add_folder(folder).map_err(|error| {
                let text = format!("{folder} is not the folder of a memory control group: {error}");
                io::Error::new(io::ErrorKind::InvalidInput, text)
            })?;
        }
        let mut steward = Self {
            folders: Folders::new(door.root_inode()),
            index: Index::default(),
            pages: PageWork::new(settings.worker.clone()),
            counts: Counts::default(),
            started: now,
            budget: Budget::new(settings.size_bytes, fill, &[], None, Margins::default()),
            fill,
            pace: Pace::new(fill.used_bytes, now),
            machine: None,
            is_preferred: false,
            grown: (fill.used_bytes, now),
            learned: 0,
            purges: Vec::new(),
            scanning: Scanning {
                is_running: false,
                is_wanted: false,
                began: now,
                began_ns: 0,
                next: now + SCAN_EVERY.start,
                every: SCAN_EVERY.start,
                seen: HashSet::new(),
                fill,
            },
            drained: now,
            has_events: false,
            look_at: now,
            still_looks: 0,
            told: HashSet::new(),
            inbox: Arc::new(Inbox::new()?),
            listener: listener.ok(),
            settings,
            groups,
            door,
        };
        let door = steward.door.clone();
        scan::scan(&door, |found| steward.take_found(found))?;
        steward.counts.scans = 1;
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
        self.is_preferred = thread::prefer();
        loop {
            self.drain();
            for message in take(&self.inbox.found) {
                match message {
                    Message::Found(found) => self.take_found(found),
                    Message::ScanEnded => self.end_scan(),
                }
            }
            for request in take(&self.inbox.requests) {
                match request {
                    Request::Stop => return,
                    Request::Status(reply) => drop(reply.send(self.status())),
                    Request::Purge(left_bytes, reply) => {
                        let began_ns = now_ns();
                        self.purges.push(PendingPurge { left_bytes, freed_bytes: 0, began_ns, scans: None, reply });
                    }
                }
            }
            if Instant::now() >= self.look_at || !self.purges.is_empty() {
                self.look();
            }
            self.work_on_purges();
            self.scan_if_due();
            self.pages.work(&self.door, &self.folders, &self.groups, &mut self.counts);
            self.wait();
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) {
        let now = Instant::now();
        let mut until = self.look_at;
        if self.has_events {
            until = until.min(self.drained + DRAIN_PAUSE);
        }
        if let Some(due) = self.pages.due() {
            until = until.min(due);
        }
        if self.purges.iter().any(|purge| purge.scans.is_none()) {
            until = now;
        }
        let mut polled = vec![PollFd::new(&self.inbox.wake, PollFlags::IN)];
        // Between two drains nobody is woken.
        let is_listening = !self.has_events && self.drained.elapsed() >= DRAIN_PAUSE;
        if !is_listening {
            until = until.min(self.drained + DRAIN_PAUSE);
        }
        let listener = self.listener.as_ref().filter(|_| is_listening);
        polled.extend(listener.map(|listener| PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)));
        polled.extend(self.pages.as_fd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let alarms_at = polled.len();
        polled.extend(self.groups.alarms().map(|alarms| PollFd::from_borrowed_fd(alarms.as_fd(), PollFlags::IN)));
        let pause = until.saturating_duration_since(now);
        let pause = Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: i64::from(pause.subsec_nanos()) };
        if poll(&mut polled, Some(&pause)).is_err() {
            return;
        }
        let is_ready = |at: usize| polled.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (is_woken, has_events, is_alarmed) = (is_ready(0), listener.is_some() && is_ready(1), is_ready(alarms_at));
        if is_woken {
            let _ = rustix::io::read(&self.inbox.wake, &mut [0; 8]);
        }
        if is_alarmed {
            self.groups.take_alarms();
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
        let mut open: HashMap<u64, Option<OwnedFd>> = HashMap::new();
        let own = [std::process::id(), self.pages.worker_pid()];
        // What comes meanwhile is for the next time: writers may be faster than this.
        let until = self.drained + SLICE;
        while Instant::now() < until {
            let result = listener.drain(&mut buffer, |event| match event {
                Event::Lost => {
                    self.counts.events_lost += 1;
                    self.scanning.is_wanted = true;
                }
                Event::Written { pid, .. } if pid != 0 && own.contains(&pid) => {}
                Event::Written { folder, name, pid } => {
                    self.counts.events += 1;
                    let Some(inode) = self.folders.find(&self.door, folder) else {
                        self.scanning.is_wanted = true;
                        return;
                    };
                    let fd = open.entry(inode).or_insert_with(|| self.folders.open(&self.door, inode).ok());
                    match fd {
                        Some(fd) => self.observe(inode, fd, name, pid),
                        None => self.scanning.is_wanted = true,
                    }
                }
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
        if self.still_looks > STILL_LOOKS || self.groups.learned() != self.learned {
            self.still_looks = 0;
            self.look_at = Instant::now();
        }
    }

    /// Takes note of a file that was written.
    fn observe(&mut self, folder: u64, fd: &OwnedFd, name: &OsStr, pid: u32) {
        let Ok(seen) = door::look_at(fd, name) else { return };
        if !seen.is_file() {
            return;
        }
        let mut bad = Vec::new();
        let marks = door::marks_at(fd, name, |mark| bad.push(mark));
        for mark in bad {
            let path = self.folders.path(folder).unwrap_or_default().join(name);
            self.tell_bad(path, &mark.0);
        }
        self.note(folder, name, &seen, marks, Some(pid), now_ns());
    }

    fn tell_bad(&mut self, path: PathBuf, text: &str) {
        const MAX_TOLD: usize = 1000;
        self.counts.bad_marks += 1;
        if self.told.len() < MAX_TOLD && self.told.insert(path.clone()) {
            say(&format!("{}: {text}: it is passed over", path.display()));
        }
    }

    /// Takes note of what a look at everything found.
    fn take_found(&mut self, found: Found) {
        match found {
            Found::Folder { inode, parent, name, above } => {
                self.folders.learn(inode, parent, &name, above);
            }
            Found::Bad { path, mark } => self.tell_bad(path, &mark.0),
            Found::File { folder, name, seen, marks } => {
                if let Ok(fd) = self.folders.open(&self.door, folder)
                    && purge::finish(fd.as_fd(), &name)
                {
                    return;
                }
                self.scanning.seen.insert(seen.inode);
                self.note(folder, &name, &seen, marks, None, seen.used_ns);
            }
        }
    }

    /// Puts a file where it belongs: among the volatile ones, among those whose pages are to be looked at.
    fn note(&mut self, folder: u64, name: &OsStr, seen: &Seen, own: Marks, pid: Option<u32>, used_ns: i64) {
        let Some(marks) = self.folders.effective(&self.door, folder, own, seen.owner) else { return };
        let known = self.index.get(seen.inode).map(|file| file.group).filter(|group| *group != UNKNOWN);
        let group = match (known, pid) {
            (Some(group), _) => group,
            (None, Some(pid)) if pid != 0 => self.groups.of_process(pid),
            // Nobody says who it was. In a namespace of its own all come from here.
            (None, Some(_)) => self.groups.of_self(),
            (None, None) => UNKNOWN,
        };
        let part = match marks.volatile.unwrap_or_default() {
            Volatile::Full => Some(Part::Whole),
            Volatile::Partial => Some(Part::Tail),
            Volatile::None => None,
        };
        match part.filter(|_| seen.held_bytes > 0) {
            Some(part) => {
                let file = File { folder, name: name.to_owned(), part, used_ns, held_bytes: seen.held_bytes, group };
                self.counts.not_indexed += u64::from(!self.index.insert(seen.inode, file));
            }
            None => drop(self.index.remove(seen.inode)),
        }
        let delay = if part.is_some() { VOLATILE_DELAY } else { DELAY };
        self.pages.note(folder, name, seen, marks.huge.unwrap_or_default(), group, delay);
    }

    /// Looks at every limit, keeps the size, purges what is over a mark; decides when to look again.
    fn look(&mut self) {
        let begun = Instant::now();
        let mut blocked: Vec<Bound> = Vec::new();
        let was = (self.fill.used_bytes, self.used_of_groups());
        loop {
            self.sample();
            let over =
                self.budget.lines.iter().filter(|line| line.excess_bytes() > 0 && !blocked.contains(&line.bound));
            let Some(line) = over.max_by_key(|line| line.excess_bytes()).cloned() else { break };
            if self.purge_for(&line) == 0 {
                blocked.push(line.bound);
                self.counts.nothing_to_purge += 1;
                // Something may have been marked, or was used by a name that is not known.
                self.scanning.is_wanted = true;
            }
            if begun.elapsed() > DRAIN_PAUSE {
                break;
            }
        }
        let has_moved = was != (self.fill.used_bytes, self.used_of_groups());
        self.still_looks = if has_moved { 0 } else { self.still_looks.saturating_add(1) };
        self.look_at = Instant::now() + self.pause(!blocked.is_empty());
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
        let groups = &mut self.groups;
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
        self.fill = self.door.fill().unwrap_or(self.fill);
        self.groups.list_suspects_if_due();
        self.find_writers();
        self.learned = self.groups.learned();
        let groups = self.groups.sample();
        let is_old = |(machine, at): &(Machine, Instant)| {
            at.elapsed() > MACHINE_LASTS || machine.available_bytes < machine.total_bytes / 8
        };
        if self.machine.as_ref().is_none_or(is_old) {
            self.machine = cgroup::machine("").ok().map(|machine| (machine, Instant::now()));
        }
        let machine = self.machine.map(|(machine, _)| machine);
        self.pace.look(self.fill.used_bytes, Instant::now());
        let margins = Margins { is_preferred: self.is_preferred, foreseen_bytes: self.pace.foreseen_bytes() };
        self.budget = Budget::new(self.settings.size_bytes, self.fill, &groups, machine, margins);
        if self.budget.wants_size(self.fill) {
            match self.door.set_size(self.budget.size_bytes) {
                Ok(()) => self.counts.size_changes += 1,
                // Somebody wrote meanwhile, so that more is used: next time.
                Err(_) => self.counts.size_refused += 1,
            }
        }
    }

    /// Looks who it is if the file system has grown: before the first file is closed nobody says so.
    fn find_writers(&mut self) {
        let (used, at) = self.grown;
        if self.fill.used_bytes >= used.saturating_add(GROWN_BYTES) && at.elapsed() >= GROWN_PAUSE {
            self.groups.find_writers();
            self.grown = (self.fill.used_bytes, Instant::now());
        }
        self.grown.0 = self.grown.0.min(self.fill.used_bytes);
    }

    /// Purges for a limit, for a moment. Returns what went.
    fn purge_for(&mut self, line: &Line) -> u64 {
        let (begun, began_ns, mut freed) = (Instant::now(), now_ns(), 0);
        while freed < line.excess_bytes() && begun.elapsed() < SLICE {
            match self.purge_one(Some(line.bound), line.excess_bytes() - freed, began_ns) {
                Some(bytes) => freed += bytes,
                None => break,
            }
        }
        freed
    }

    /// Purges the file used least recently that helps; `None` if there is none that was used before `began_ns`. Some may turn
    /// out to be in use: 0 then.
    fn purge_one(&mut self, bound: Option<Bound>, want_bytes: u64, began_ns: i64) -> Option<u64> {
        let groups = &self.groups;
        let inode = self.index.oldest(|group| match bound {
            Some(Bound::Group(watch)) => groups.helps(group, watch),
            _ => true,
        })?;
        // All others were found in use since, or have come since.
        self.index.get(inode).filter(|file| file.used_ns < began_ns)?;
        let file = self.index.remove(inode)?;
        self.pages.forget(inode);
        let Ok(folder) = self.folders.open(&self.door, file.folder) else {
            // It was moved, with its folder.
            self.scanning.is_wanted = true;
            return Some(0);
        };
        if file.group == UNKNOWN
            && matches!(bound, Some(Bound::Group(_)))
            && let Some(group) = self.group_of(&folder, &file)
        {
            self.index.insert(inode, File { group, ..file });
            return Some(0);
        }
        let target = Target { folder: folder.as_fd(), name: &file.name, inode, part: file.part, used_ns: file.used_ns };
        let folders = std::cell::RefCell::new(&mut self.folders);
        let is_volatile = |fd: &OwnedFd, seen: &Seen| {
            let own = door::marks(fd, |_| ());
            let marks = folders.borrow_mut().effective(&self.door, file.folder, own, seen.owner);
            marks.and_then(|marks| marks.volatile).is_some_and(|volatile| volatile != Volatile::None)
        };
        match purge::purge(&target, want_bytes, is_volatile) {
            Outcome::Freed { bytes, left_bytes } => {
                self.pace.freed(bytes);
                let counts = &mut self.counts;
                let (files, sum) = match file.part {
                    Part::Whole => (&mut counts.purged_files, &mut counts.purged_bytes),
                    Part::Tail => (&mut counts.cut_files, &mut counts.cut_bytes),
                };
                (*files, *sum) = (*files + 1, *sum + bytes);
                if left_bytes > 0 {
                    self.index.insert(inode, File { held_bytes: left_bytes, used_ns: now_ns(), ..file });
                }
                Some(bytes)
            }
            Outcome::Used(used_ns) => {
                self.index.insert(inode, File { used_ns, ..file });
                Some(0)
            }
            Outcome::Open => {
                let is_worker = self.pages.is_given(inode);
                self.counts.spared_open += u64::from(!is_worker);
                // It is used, and goes to the end; the worker has done with it in a moment.
                let used_ns = if is_worker { file.used_ns.saturating_add(WORKER_NS) } else { now_ns() };
                self.index.insert(inode, File { used_ns, ..file });
                Some(0)
            }
            Outcome::Gone => Some(0),
        }
    }

    /// The group that a file's first page is charged to, where that can be asked and is known.
    fn group_of(&mut self, folder: &OwnedFd, file: &File) -> Option<u32> {
        let fd = door::open_file(folder, &file.name, OFlags::RDONLY).ok()?;
        let at = rustix::fs::seek(&fd, rustix::fs::SeekFrom::Data(0)).ok()?;
        let inode = pages::charged_group(fd.as_fd(), at).ok()?;
        Some(self.groups.of_inode(inode)).filter(|group| *group != UNKNOWN)
    }

    /// Does a part of what was asked for by [`Request::Purge`].
    fn work_on_purges(&mut self) {
        let begun = Instant::now();
        let mut purges = std::mem::take(&mut self.purges);
        purges.retain_mut(|purge| {
            while purge.left_bytes > 0 && begun.elapsed() < SLICE {
                match self.purge_one(None, purge.left_bytes, purge.began_ns) {
                    Some(bytes) => {
                        purge.left_bytes = purge.left_bytes.saturating_sub(bytes);
                        purge.freed_bytes += bytes;
                    }
                    // Once more after a look at everything that begins now, and then no more.
                    None => match purge.scans {
                        None => {
                            purge.scans = Some(self.counts.scans + 1 + u64::from(self.scanning.is_running));
                            self.scanning.is_wanted = true;
                            return true;
                        }
                        Some(scans) if self.counts.scans < scans => return true,
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

    /// Starts a look at everything, in a thread of its own, if one is wanted or due.
    fn scan_if_due(&mut self) {
        let scanning = &mut self.scanning;
        let now = Instant::now();
        let is_asked = self.purges.iter().any(|purge| purge.scans.is_some());
        // What is wanted comes soon, but not all the time.
        let rest = scanning.every.min(SCAN_EVERY.start);
        let is_due = now >= scanning.next || is_asked || (scanning.is_wanted && now >= scanning.began + rest / 10);
        if scanning.is_running || !is_due {
            return;
        }
        (scanning.is_running, scanning.is_wanted) = (true, false);
        (scanning.began, scanning.began_ns) = (now, now_ns());
        scanning.seen.clear();
        let (door, inbox) = (self.door.clone(), self.inbox.clone());
        let work = move || {
            const BATCH: usize = 512;
            let mut batch = Vec::new();
            let _ = scan::scan(&door, |found| {
                batch.push(Message::Found(found));
                if batch.len() == BATCH {
                    inbox.send_found(&mut batch);
                }
            });
            batch.push(Message::ScanEnded);
            inbox.send_found(&mut batch);
        };
        let started = std::thread::Builder::new().name("scan".into()).spawn(work);
        if started.is_err() {
            scanning.is_running = false;
            scanning.next = now + scanning.every;
        }
    }

    /// Forgets what was not found, and decides when to look at everything again.
    fn end_scan(&mut self) {
        let scanning = &mut self.scanning;
        let began_ns = scanning.began_ns;
        let seen = std::mem::take(&mut scanning.seen);
        self.index.retain(|inode, file| seen.contains(&inode) || file.used_ns >= began_ns);
        self.counts.scans += 1;
        scanning.is_running = false;
        let took = scanning.began.elapsed();
        // The less happens the less often.
        let is_still = scanning.fill == self.fill;
        let every = if is_still { scanning.every * 2 } else { SCAN_EVERY.start };
        scanning.every = every.max(took * SCAN_SHARE).clamp(SCAN_EVERY.start, SCAN_EVERY.end);
        scanning.fill = self.fill;
        scanning.next = Instant::now() + scanning.every;
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
            volatile_files: self.index.len() as u64,
            volatile_bytes: self.index.held_bytes(),
            lines: self.budget.lines.iter().map(line).collect(),
            counts: self.counts,
            is_preferred: self.is_preferred,
            is_notified: self.listener.is_some(),
            files_waiting_for_pages: self.pages.len() as u64,
            uptime_seconds: self.started.elapsed().as_secs_f64(),
        }
    }
}

/// Says something to whoever started the controller.
pub fn say(message: &str) {
    let _ = writeln!(io::stderr(), "pagemill: {message}");
}
