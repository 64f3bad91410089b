//! Delays opens of files while writers are so fast that a late check of the control loop would let them reach a limit.
//!
//! A writer at full speed fills the distance between a purge threshold and its limit in some ten milliseconds. The
//! control loop can be late by more than that, for example when a hypervisor runs other guests on its CPU. The writer
//! would then get `ENOSPC`.
//!
//! While fast writers exist, the throttle is *active*: the kernel asks this module before each open of a file. An open
//! waits while usage is close to a limit, or while the last reading of usage is old. So if the control loop is late,
//! only files that are already open can fill the file system.
//!
//! An open waits at most `MAX_OPEN_WAIT`. Limits for which nothing can be purged delay no opens. Opens of folders,
//! opens on other file systems, and files that are already open are not affected. The throttle requires root; without
//! root, opens are not delayed.
//!
//! For each event the kernel also opens the file in the listener. That open can block, because a process may hold a
//! lease on the file. The controller then ends the listener, which allows all opens, and starts a new one later.

use pagemill_sys::open_permission::{DelayedOpen, OpenPermissions};
use pagemill_sys::task;
use pagemill_sys::thread::{self, Interrupter};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Maximum delay of one open.
const MAX_OPEN_WAIT: Duration = Duration::from_millis(500);

/// Maximum number of delayed opens; each uses a descriptor. If one more open arrives, the oldest delayed open is
/// allowed.
const MAX_DELAYED_OPENS: usize = 256;

/// The throttle stays active for this long after writers were last so fast that they could reach a limit.
const ACTIVE_TIME: Duration = Duration::from_secs(1);

/// The controller ends a listener that has blocked for this long in one read of an event.
const MAX_BLOCKED_TIME: Duration = Duration::from_millis(50);
/// The controller ends a listener that has blocked for this long in all reads of events since the throttle became
/// active.
const MAX_TOTAL_BLOCKED_TIME: Duration = Duration::from_millis(200);
/// Minimum time between the end of a listener that blocked and the start of the next one.
const RESTART_PAUSE: Duration = Duration::from_secs(10);

/// A read of an event normally takes microseconds. A read that takes longer than this counts as blocked.
const BLOCKED_READ_TIME: Duration = Duration::from_millis(2);

/// Maximum time of uninterrupted work of the listener's thread, which has real-time priority. The thread then sleeps
/// for the same time.
const WORK_SLICE: Duration = Duration::from_millis(1);

/// Delays opens of one file system. Dropping the value allows all opens.
pub struct OpenThrottle {
    /// `None` until the first fast writer, and for a while after a listener was ended.
    listener: Option<Listener>,
    /// Earliest start of the next listener.
    start_at: Option<Instant>,
    max_wait: Duration,
    active_until: Option<Instant>,
    /// Number of opens that were delayed by listeners that have ended.
    delayed_before: u64,
}

impl Default for OpenThrottle {
    fn default() -> Self {
        Self { listener: None, start_at: None, max_wait: MAX_OPEN_WAIT, active_until: None, delayed_before: 0 }
    }
}

impl OpenThrottle {
    /// Activates the throttle while writers are fast, and deactivates it a second after they were last fast. `root` is
    /// a folder of the controller's private mount; opens through that mount are never delayed.
    ///
    /// # Errors
    ///
    /// `EPERM` without CAP_SYS_ADMIN; `EINVAL` without support in the kernel; other errors of `fanotify_mark` and of
    /// starting a thread. Nothing is delayed then.
    pub fn update(&mut self, root: BorrowedFd<'_>, has_fast_writers: bool, now: Instant) -> io::Result<()> {
        if self.listener.as_ref().is_some_and(|listener| listener.shared.has_failed()) {
            self.end(root);
            self.start_at = Some(now + RESTART_PAUSE);
        }
        if has_fast_writers && self.start_at.is_none_or(|start_at| start_at <= now) {
            let listener = match &mut self.listener {
                Some(listener) => listener,
                None => self.listener.insert(Listener::start(self.max_wait)?),
            };
            if self.active_until.is_none() {
                listener.shared.blocked_ns.store(0, Relaxed);
                listener.shared.permissions.start(root)?;
            }
            debug_assert!(!listener.shared.is_stopped.load(SeqCst), "a stopped listener is dropped");
            self.active_until = Some(now + ACTIVE_TIME);
        } else if self.active_until.is_some_and(|until| until <= now) {
            debug_assert!(self.listener.is_some(), "opens are delayed by a listener");
            self.active_until = None;
            if let Some(Listener { shared }) = &self.listener {
                shared.permissions.stop(root);
                shared.allow_until(now + self.max_wait);
            }
        }
        Ok(())
    }

    /// Ends the listener and so allows all opens. [`Self::update`] may start another listener.
    pub fn end(&mut self, root: BorrowedFd<'_>) {
        if let Some(listener) = self.listener.take() {
            listener.shared.permissions.stop(root);
            self.delayed_before += listener.shared.delayed.load(Relaxed);
        }
        self.active_until = None;
    }

    /// Allows opens until this time. If the time is in the past, opens are delayed from now on.
    pub fn allow_until(&self, until: Instant) {
        if let Some(Listener { shared }) = self.listener.as_ref().filter(|_| self.is_active()) {
            shared.allow_until(until);
        }
    }

    pub fn is_active(&self) -> bool {
        self.active_until.is_some()
    }

    /// Returns how many opens were delayed so far.
    pub fn delayed_opens(&self) -> u64 {
        self.delayed_before + self.listener.as_ref().map_or(0, |listener| listener.shared.delayed.load(Relaxed))
    }
}

/// A thread that answers the kernel's requests for permission to open. Dropping the value ends the thread.
struct Listener {
    shared: Arc<Shared>,
}

impl Listener {
    fn start(max_wait: Duration) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            permissions: OpenPermissions::new()?,
            max_wait,
            created: Instant::now(),
            allowed_until_ns: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            delayed: AtomicU64::new(0),
            reading_since_ns: AtomicU64::new(NOT_READING),
            blocked_ns: AtomicU64::new(0),
            has_read_error: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            interrupter: OnceLock::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let for_thread = shared.clone();
        task::spawn(c"opens", move || {
            for_thread.answer_opens();
            for_thread.has_ended.store(true, SeqCst);
        })?;
        Ok(Self { shared })
    }
}

impl Drop for Listener {
    /// Ends the thread and waits for it, some 50 ms at most. The kernel allows the queued opens once the thread has
    /// ended.
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, SeqCst);
        self.shared.wake();
        // A signal that arrives just before a blocking call is lost, so it is sent again.
        for _ in 0..50 {
            if self.shared.has_ended.load(SeqCst) {
                return;
            }
            if let Some(interrupter) = self.shared.interrupter.get() {
                interrupter.interrupt();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Value of `reading_since_ns` while no read is in progress.
const NOT_READING: u64 = u64::MAX;

/// State of a listener, shared by its thread and the control loop. Times are in nanoseconds since `created`.
struct Shared {
    permissions: Arc<OpenPermissions>,
    max_wait: Duration,
    created: Instant,
    /// Opens are allowed until this time.
    allowed_until_ns: AtomicU64,
    /// Number of opens that wait now.
    waiting: AtomicUsize,
    /// Number of opens that were delayed since the listener started.
    delayed: AtomicU64,
    /// When the thread began to read an event; `NOT_READING` while it reads none.
    reading_since_ns: AtomicU64,
    /// Total time of the reads that blocked.
    blocked_ns: AtomicU64,
    has_read_error: AtomicBool,
    is_stopped: AtomicBool,
    has_ended: AtomicBool,
    interrupter: OnceLock<Interrupter>,
    wake: OwnedFd,
}

impl Shared {
    fn now_ns(&self) -> u64 {
        self.created.elapsed().as_nanos() as u64
    }

    fn allow_until(&self, until: Instant) {
        let until_ns = until.saturating_duration_since(self.created).as_nanos() as u64;
        self.allowed_until_ns.store(until_ns, SeqCst);
        // The thread stores `waiting` and then reads `allowed_until_ns`; this function stores `allowed_until_ns` and
        // then reads `waiting`. So at least one of the two threads sees the other's store.
        if self.waiting.load(SeqCst) > 0 && self.is_allowed() {
            self.wake();
        }
    }

    fn is_allowed(&self) -> bool {
        self.allowed_until_ns.load(SeqCst) > self.now_ns()
    }

    /// Returns whether the listener must be ended, because it blocks or fails to read.
    fn has_failed(&self) -> bool {
        let reading_ns = self.now_ns().saturating_sub(self.reading_since_ns.load(Relaxed));
        Duration::from_nanos(reading_ns) > MAX_BLOCKED_TIME
            || Duration::from_nanos(self.blocked_ns.load(Relaxed)) > MAX_TOTAL_BLOCKED_TIME
            || self.has_read_error.load(Relaxed)
    }

    /// Reads the next event. After an error the kernel has already refused an open, so the control loop must end the
    /// listener.
    fn read(&self) -> Option<DelayedOpen> {
        let begun_ns = self.now_ns();
        self.reading_since_ns.store(begun_ns, Relaxed);
        let open = self.permissions.read();
        self.reading_since_ns.store(NOT_READING, Relaxed);
        let took_ns = self.now_ns() - begun_ns;
        if Duration::from_nanos(took_ns) > BLOCKED_READ_TIME {
            self.blocked_ns.fetch_add(took_ns, Relaxed);
        }
        self.has_read_error.fetch_or(open.is_err(), Relaxed);
        open.ok().flatten()
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Answers opens until the listener is stopped or fails. Must open no file itself: that open would wait for this
    /// thread.
    fn answer_opens(&self) {
        thread::prefer();
        let _ = self.interrupter.set(Interrupter::of_this_thread());
        // Each open and the time at which it is allowed at the latest.
        let mut waiting: VecDeque<(Instant, DelayedOpen)> = VecDeque::new();
        let mut working_since = Instant::now();
        while !self.is_stopped.load(SeqCst) && !self.has_read_error.load(Relaxed) {
            let open = self.read();
            let now = Instant::now();
            let is_idle = open.is_none();
            if let Some(open) = open
                && !self.is_allowed()
            {
                debug_assert!(waiting.back().is_none_or(|(until, _)| *until <= now + self.max_wait), "oldest first");
                waiting.push_back((now + self.max_wait, open));
                self.delayed.fetch_add(1, Relaxed);
            }
            self.waiting.store(waiting.len(), SeqCst);
            if self.is_allowed() {
                waiting.clear();
            }
            while waiting.front().is_some_and(|(until, _)| waiting.len() > MAX_DELAYED_OPENS || *until <= now) {
                waiting.pop_front();
            }
            debug_assert!(waiting.len() <= MAX_DELAYED_OPENS);
            self.waiting.store(waiting.len(), SeqCst);
            if is_idle {
                self.wait(waiting.front().map(|(until, _)| *until));
                working_since = Instant::now();
            } else if working_since.elapsed() > WORK_SLICE {
                std::thread::sleep(WORK_SLICE);
                working_since = Instant::now();
            }
        }
    }

    /// Sleeps until an open arrives, the control loop wakes this thread, or the time is over.
    fn wait(&self, until: Option<Instant>) {
        let timeout = until.map(|until| {
            let pause = until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: pause.as_secs() as i64, tv_nsec: i64::from(pause.subsec_nanos()) }
        });
        let mut polled = [
            PollFd::from_borrowed_fd(self.permissions.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut polled, timeout.as_ref());
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_access::FileAccess;
    use std::fs::File;
    use std::path::PathBuf;
    use std::thread::{JoinHandle, sleep, spawn};

    const LONG: Duration = Duration::from_secs(20);

    /// A mounted tmpfs, which is unmounted on drop.
    struct Ram(tempfile::TempDir);

    impl Ram {
        fn new() -> Option<Self> {
            let folder = tempfile::tempdir().unwrap();
            let flags = rustix::mount::MountFlags::empty();
            rustix::mount::mount("test", folder.path(), "tmpfs", flags, None).ok()?;
            std::fs::write(folder.path().join("file"), b"x").unwrap();
            Some(Self(folder))
        }

        fn path(&self) -> PathBuf {
            self.0.path().join("file")
        }

        /// Opens a file of the mount in a new thread. The thread returns how long the open took.
        fn open(&self) -> JoinHandle<Duration> {
            let path = self.path();
            spawn(move || {
                let begun = Instant::now();
                drop(File::open(path).unwrap());
                begun.elapsed()
            })
        }
    }

    impl Drop for Ram {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
        }
    }

    /// Returns an active throttle on a new tmpfs, which delays each open for at most `max_wait`, or the reason why
    /// there is none.
    fn active_throttle(max_wait: Duration) -> Result<(OpenThrottle, Ram, FileAccess), String> {
        let ram = Ram::new().ok_or("no right to mount")?;
        let access = FileAccess::open(ram.0.path()).map_err(|error| error.to_string())?;
        let mut throttle = OpenThrottle { max_wait, ..OpenThrottle::default() };
        throttle.update(access.root(), true, Instant::now()).map_err(|error| error.to_string())?;
        Ok((throttle, ram, access))
    }

    /// A file is opened while another process has a lease on it, so the listener blocks. The opens of all other files
    /// must continue, including those queued behind the blocked open, and the throttle must start again later.
    #[test]
    fn a_lease_does_not_stop_other_opens() {
        let (mut throttle, ram, access) = match active_throttle(LONG) {
            Ok(parts) => parts,
            Err(why) => return println!("skipped: {why}"),
        };
        throttle.allow_until(Instant::now() + 10 * LONG);
        let other = ram.0.path().join("other");
        std::fs::write(&other, b"x").unwrap();
        let holder = File::options().read(true).write(true).open(ram.path()).unwrap();
        if pagemill_sys::pages::take_lease(holder.as_fd()).is_err() {
            return println!("skipped: no lease");
        }
        let path = ram.path();
        let leased = spawn(move || drop(File::open(path)));
        let shared = throttle.listener.as_ref().unwrap().shared.clone();
        wait_until(|| shared.has_failed());
        assert!(!leased.is_finished());
        // This open waits in the listener's queue.
        let queued = spawn(move || File::open(other).map(drop));
        let begun = Instant::now();
        wait_until(|| {
            throttle.update(access.root(), true, begun).unwrap();
            !throttle.is_active()
        });
        queued.join().unwrap().unwrap();
        drop(holder);
        leased.join().unwrap();
        throttle.update(access.root(), true, begun).unwrap();
        assert!(!throttle.is_active());
        throttle.update(access.root(), true, begun + RESTART_PAUSE).unwrap();
        assert!(throttle.is_active());
    }

    fn wait_until(mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < LONG);
            sleep(Duration::from_millis(1));
        }
    }

    /// Files are opened while the throttle is active. Each open must wait until opens are allowed or the throttle ends.
    /// Without an active throttle, no open may wait. The maximum delay of an open is long in this test, so that a lost
    /// wake-up is noticed.
    #[test]
    fn opens_wait_for_the_control_loop() {
        let (mut throttle, ram, access) = match active_throttle(10 * LONG) {
            Ok(parts) => parts,
            Err(why) => return println!("skipped: {why}"),
        };
        let start = Instant::now();
        throttle.allow_until(start + 10 * LONG);
        ram.open().join().unwrap();
        assert_eq!(throttle.delayed_opens(), 0);
        for round in 1..=20 {
            throttle.allow_until(start);
            let delayed = ram.open();
            wait_until(|| throttle.delayed_opens() == round);
            assert!(!delayed.is_finished());
            throttle.allow_until(start + 10 * LONG);
            delayed.join().unwrap();
        }
        // Writers were fast a moment ago, so the throttle must stay active for another second.
        throttle.update(access.root(), false, start).unwrap();
        assert!(throttle.is_active());
        throttle.update(access.root(), false, start + 2 * ACTIVE_TIME + LONG).unwrap();
        assert!(!throttle.is_active());
        ram.open().join().unwrap();
        assert_eq!(throttle.delayed_opens(), 20);
        throttle.update(access.root(), true, Instant::now()).unwrap();
        throttle.allow_until(start);
        let delayed = [(); 8].map(|()| ram.open());
        wait_until(|| throttle.delayed_opens() == 28);
        throttle.end(access.root());
        delayed.into_iter().for_each(|open| _ = open.join().unwrap());
        assert!(!throttle.is_active() && throttle.delayed_opens() == 28);
    }

    /// The control loop never allows an open. The open must end after the maximum delay.
    #[test]
    fn an_open_waits_for_a_limited_time() {
        let max_wait = Duration::from_millis(50);
        let (throttle, ram, _) = match active_throttle(max_wait) {
            Ok(parts) => parts,
            Err(why) => return println!("skipped: {why}"),
        };
        assert!(ram.open().join().unwrap() >= max_wait / 2);
        assert_eq!(throttle.delayed_opens(), 1);
    }
}
