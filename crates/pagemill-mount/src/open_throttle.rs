//! Delays opens of files while writers outrun purging.
//!
//! A writer at full speed fills the distance between a mark and its limit in some ten milliseconds. The control loop can
//! be late by more than that, for example when a hypervisor runs other guests on its CPU. The writer would then get
//! ENOSPC. While such writers are active, the kernel asks this module before each open. An open waits while usage is
//! close to a limit, and while the last reading of usage is old. So a late control loop is outrun only by files that are
//! already open.
//!
//! An open waits at most `MAX_WAIT`. It does not wait if purging cannot help. Other mounts, folders and files that are
//! already open are not affected. Needs root; without it writers are not delayed.

use pagemill_sys::open_permission::{DelayedOpen, OpenPermissions};
use pagemill_sys::{task, thread};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Maximum delay of one open, and maximum number of delayed opens. Each holds a descriptor.
const MAX_WAIT: Duration = Duration::from_millis(500);
const MAX_DELAYED: usize = 256;

/// The throttle stays active this long after writers were last fast enough.
const ACTIVE_LASTS: Duration = Duration::from_secs(1);

/// The kernel opens each file for the listener, too, which breaks a lease that another process holds on it. That can take
/// as long as `fs.lease-break-time`, and all other delayed opens wait meanwhile. So after `STUCK` of it the throttle turns
/// off for a while.
const STUCK: Duration = Duration::from_secs(1);
const OFF_AFTER_STUCK: Duration = Duration::from_secs(60);

/// Delays opens of one file system. Dropping it allows all.
pub struct OpenThrottle {
    shared: Arc<Shared>,
    active_until: Option<Instant>,
    /// The thread was stuck: no delays before this time.
    off_until: Option<Instant>,
}

const NOT_READING: u64 = u64::MAX;

struct Shared {
    permissions: Arc<OpenPermissions>,
    created: Instant,
    /// Opens are allowed until this time, in nanoseconds since `created`.
    allowed_until_ns: AtomicU64,
    /// Number of opens that wait now, and of all that waited.
    waiting: AtomicUsize,
    /// When the thread began to read events, in nanoseconds since `created`; `NOT_READING` at other times.
    reading_since_ns: AtomicU64,
    total: AtomicU64,
    is_stopped: AtomicBool,
    wake: OwnedFd,
}

impl OpenThrottle {
    /// Starts the thread that answers the kernel. Delays nothing yet.
    ///
    /// # Errors
    ///
    /// `EPERM` without CAP_SYS_ADMIN; `EINVAL` without support in the kernel; errors of starting a thread.
    pub fn new() -> io::Result<Self> {
        let shared = Arc::new(Shared {
            permissions: OpenPermissions::new()?,
            created: Instant::now(),
            allowed_until_ns: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            reading_since_ns: AtomicU64::new(NOT_READING),
            total: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let for_thread = shared.clone();
        task::spawn(c"opens", move || for_thread.answer_opens())?;
        Ok(Self { shared, active_until: None, off_until: None })
    }

    /// Turns the throttle on if writers are fast, and off a second after they were. `root` is the controller's private
    /// mount, whose opens are never delayed.
    ///
    /// # Errors
    ///
    /// Errors of `fanotify_mark`. Then nothing is delayed.
    pub fn set_active(&mut self, root: BorrowedFd<'_>, has_fast_writers: bool, now: Instant) -> io::Result<()> {
        if self.shared.is_stuck() {
            self.off_until = Some(now + OFF_AFTER_STUCK);
        }
        if self.off_until.is_some_and(|until| now < until) {
            self.deactivate(root, now);
        } else if has_fast_writers {
            if self.active_until.is_none() {
                self.shared.permissions.start(root)?;
            }
            self.active_until = Some(now + ACTIVE_LASTS);
        } else if self.active_until.is_some_and(|until| until <= now) {
            self.deactivate(root, now);
        }
        Ok(())
    }

    fn deactivate(&mut self, root: BorrowedFd<'_>, now: Instant) {
        if self.active_until.take().is_some() {
            self.shared.permissions.stop(root);
            self.shared.allow_until(now + MAX_WAIT);
        }
    }

    pub fn is_active(&self) -> bool {
        self.active_until.is_some()
    }

    /// Allows opens until this time; a time in the past delays them from now on.
    pub fn allow_until(&self, until: Instant) {
        self.shared.allow_until(until);
    }

    /// Returns how many opens have waited.
    pub fn delayed_opens(&self) -> u64 {
        self.shared.total.load(Relaxed)
    }
}

impl Drop for OpenThrottle {
    fn drop(&mut self) {
        self.shared.is_stopped.store(true, SeqCst);
        self.shared.wake();
    }
}

impl Shared {
    fn allow_until(&self, until: Instant) {
        let until_ns = until.saturating_duration_since(self.created).as_nanos() as u64;
        self.allowed_until_ns.store(until_ns, SeqCst);
        // The thread stores the number and then checks the time again, so one of the two sees the other's store.
        if self.waiting.load(SeqCst) > 0 && self.is_allowed() {
            self.wake();
        }
    }

    fn is_allowed(&self) -> bool {
        let now_ns = self.created.elapsed().as_nanos() as u64;
        self.allowed_until_ns.load(SeqCst) > now_ns || self.is_stopped.load(SeqCst)
    }

    fn is_stuck(&self) -> bool {
        let since_ns = self.reading_since_ns.load(Relaxed);
        self.created.elapsed().saturating_sub(Duration::from_nanos(since_ns)) > STUCK
    }

    fn read(&self) -> io::Result<Vec<DelayedOpen>> {
        self.reading_since_ns.store(self.created.elapsed().as_nanos() as u64, Relaxed);
        let opens = self.permissions.read();
        self.reading_since_ns.store(NOT_READING, Relaxed);
        opens
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Answers opens until the throttle is dropped. Must open no file itself: that open would wait for this thread.
    fn answer_opens(&self) {
        thread::prefer();
        let mut waiting: VecDeque<(Instant, DelayedOpen)> = VecDeque::new();
        while !self.is_stopped.load(SeqCst) {
            let Ok(new) = self.read() else {
                // Without descriptors the kernel refuses opens, so none may be delayed.
                waiting.clear();
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            let now = Instant::now();
            let (is_idle, is_allowed) = (new.is_empty(), self.is_allowed());
            let before = waiting.len();
            waiting.extend(new.into_iter().filter(|_| !is_allowed).map(|open| (now, open)));
            self.total.fetch_add((waiting.len() - before) as u64, Relaxed);
            self.waiting.store(waiting.len(), SeqCst);
            if self.is_allowed() {
                waiting.clear();
            }
            while waiting.front().is_some_and(|(since, _)| waiting.len() > MAX_DELAYED || *since + MAX_WAIT <= now) {
                waiting.pop_front();
            }
            self.waiting.store(waiting.len(), SeqCst);
            if is_idle {
                self.wait(waiting.front().map(|(since, _)| *since + MAX_WAIT));
            }
        }
    }

    /// Sleeps until an open arrives, the control loop allows opens, or the time has come.
    fn wait(&self, until: Option<Instant>) {
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
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

        /// Opens the file in a thread. Returns how long that took.
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

    /// While a lease that another process holds keeps the thread from reading, the throttle is off.
    #[test]
    fn a_lease_does_not_stop_other_opens() {
        let Ok(mut throttle) = OpenThrottle::new() else { return println!("skipped: no permission events") };
        let Some(ram) = Ram::new() else { return println!("skipped: no right to mount") };
        let access = FileAccess::open(ram.0.path()).unwrap();
        let holder = File::options().read(true).write(true).open(ram.path()).unwrap();
        if pagemill_sys::pages::take_lease(holder.as_fd()).is_err() {
            return println!("skipped: no lease");
        }
        if let Err(error) = throttle.set_active(access.root(), true, Instant::now()) {
            return println!("skipped: {error}");
        }
        let delayed = ram.open();
        wait_until(|| {
            throttle.set_active(access.root(), true, Instant::now()).unwrap();
            !throttle.is_active()
        });
        assert!(!delayed.is_finished(), "the lease is held");
        std::fs::write(ram.0.path().join("other"), b"x").unwrap();
        drop(holder);
        delayed.join().unwrap();
    }

    fn wait_until(mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < LONG);
            sleep(Duration::from_millis(1));
        }
    }

    /// While the throttle is active, an open waits until opens are allowed, until its time limit, or until the throttle
    /// is dropped. Otherwise it does not wait.
    #[test]
    fn opens_wait_for_the_control_loop() {
        let Ok(mut throttle) = OpenThrottle::new() else { return println!("skipped: no permission events") };
        let Some(ram) = Ram::new() else { return println!("skipped: no right to mount") };
        let access = FileAccess::open(ram.0.path()).unwrap();
        let start = Instant::now();
        if let Err(error) = throttle.set_active(access.root(), true, start) {
            return println!("skipped: {error}");
        }
        assert!(throttle.is_active());
        throttle.allow_until(start + 2 * LONG);
        ram.open().join().unwrap();
        assert_eq!(throttle.delayed_opens(), 0);
        throttle.allow_until(start);
        let delayed = ram.open();
        wait_until(|| throttle.delayed_opens() == 1);
        throttle.allow_until(start + 2 * LONG);
        delayed.join().unwrap();
        throttle.allow_until(start);
        let took = ram.open().join().unwrap();
        assert!(took >= MAX_WAIT / 2 && throttle.delayed_opens() == 2, "the time limit: {took:?}");
        // Still active, since writers were fast a moment ago; later not.
        throttle.set_active(access.root(), false, start).unwrap();
        assert!(throttle.is_active());
        throttle.set_active(access.root(), false, start + ACTIVE_LASTS).unwrap();
        assert!(!throttle.is_active());
        throttle.allow_until(start);
        ram.open().join().unwrap();
        assert_eq!(throttle.delayed_opens(), 2);
        throttle.set_active(access.root(), true, Instant::now()).unwrap();
        throttle.allow_until(start);
        let delayed = [(); 8].map(|()| ram.open());
        wait_until(|| throttle.delayed_opens() > 2);
        drop(throttle);
        delayed.into_iter().for_each(|open| _ = open.join().unwrap());
    }
}
