//! Runs a child process in place of this one: forwards signals to it and returns its exit status.
//!
//! If this process ends, the kernel kills the child.
#![allow(unsafe_code)] // signal masks, wait4, prctl

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Signals that are forwarded. Stop and continue come from the terminal, which sends them to both processes.
const FORWARDED: &[libc::c_int] = &[
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
];

/// How a child ended, and the CPU time and memory that it and its waited-for descendants used.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// Exit status, or 128 plus the signal number.
    pub code: i32,
    pub signal: Option<i32>,
    pub user: Duration,
    pub system: Duration,
    /// Largest resident set of a single process, as the kernel counts it.
    pub max_resident_bytes: u64,
}

/// Standard streams that were closed at start, one bit each. Rust's runtime opens /dev/null in their place.
static WERE_CLOSED: AtomicU32 = AtomicU32::new(0);

/// Checks the streams before Rust's runtime opens /dev/null.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STREAMS: extern "C" fn() = look_at_streams;

extern "C" fn look_at_streams() {
    for stream in 0..3 {
        // SAFETY: reads the flags of a descriptor number.
        if unsafe { libc::fcntl(stream, libc::F_GETFD) } < 0 {
            WERE_CLOSED.fetch_or(1 << stream, Relaxed);
        }
    }
}

fn mask() -> libc::sigset_t {
    // SAFETY: plain data, initialised by the first call.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in FORWARDED.iter().chain(&[libc::SIGCHLD]) {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// A running child. This thread blocks the forwarded signals until this is dropped.
pub struct StoodFor {
    child: Child,
    /// This thread's previous signal mask.
    before: libc::sigset_t,
}

impl Drop for StoodFor {
    fn drop(&mut self) {
        // SAFETY: sets this thread's mask back.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// Makes the kernel kill this process when the thread that started it ends. Called in the child before `exec`.
///
/// The setting survives `exec`, except of a program that changes its user.
fn die_with(parent: libc::pid_t) -> io::Result<()> {
    // SAFETY: sets a number of this process.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // A parent that ended before the call sends nothing.
    // SAFETY: no arguments.
    if unsafe { libc::getppid() } != parent {
        // SAFETY: ends this process.
        unsafe { libc::_exit(128 + libc::SIGKILL) };
    }
    Ok(())
}

/// Starts a child and blocks the forwarded signals in this thread until [`StoodFor::wait`] handles them.
///
/// The kernel kills the child when this thread ends, so call it on the first thread. `group` is the opened
/// `cgroup.procs` of a control group that the child enters before it executes the program.
///
/// # Errors
///
/// Errors of entering the group or of starting the program.
pub fn spawn(mut command: Command, group: Option<File>) -> io::Result<StoodFor> {
    // SAFETY: no arguments.
    let own = unsafe { libc::getpid() };
    // SAFETY: plain data, written by the call before it is read.
    let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
    let held = mask();
    // SAFETY: sets this thread's mask; other threads are not started yet.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, &raw mut before) };
    // SAFETY: the closure makes system calls only. The child gets the original mask and streams of this process.
    unsafe {
        command.pre_exec(move || {
            die_with(own)?;
            if let Some(group) = &group
                && libc::write(group.as_raw_fd(), b"0".as_ptr().cast(), 1) != 1
            {
                return Err(io::Error::last_os_error());
            }
            libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
            for stream in (0..3).filter(|stream| WERE_CLOSED.load(Relaxed) >> stream & 1 == 1) {
                libc::close(stream);
            }
            Ok(())
        });
    }
    match command.spawn() {
        Ok(child) => Ok(StoodFor { child, before }),
        Err(error) => {
            // SAFETY: sets this thread's mask back.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
            Err(error)
        }
    }
}

impl StoodFor {
    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the child and forwards signals. Calls `meanwhile` at once, and again after each pause that it
    /// returns.
    ///
    /// A signal from the terminal has already reached the child (both are in the foreground group) and is not sent
    /// twice.
    ///
    /// # Errors
    ///
    /// Errors of `wait4`.
    pub fn wait(self, mut meanwhile: impl FnMut() -> Duration) -> io::Result<End> {
        let pid = self.child.id() as libc::pid_t;
        let held = mask();
        let mut pause = Duration::ZERO;
        loop {
            if let Some(end) = try_wait(pid)? {
                return Ok(end);
            }
            // SAFETY: plain data, written by the call.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            let time = libc::timespec { tv_sec: pause.as_secs() as _, tv_nsec: pause.subsec_nanos().into() };
            // SAFETY: waits for blocked signals; writes `info`.
            let signal = unsafe { libc::sigtimedwait(&raw const held, &raw mut info, &raw const time) };
            let is_from_terminal = info.si_code == libc::SI_KERNEL;
            if FORWARDED.contains(&signal) && !is_from_terminal {
                // SAFETY: the child was not waited for, so its id is still its own.
                unsafe { libc::kill(pid, signal) };
            }
            if signal < 0 {
                pause = meanwhile();
            }
        }
    }
}

fn try_wait(pid: libc::pid_t) -> io::Result<Option<End>> {
    let mut status = 0;
    // SAFETY: plain data, written by the call.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes `status` and `usage`.
    match unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, &raw mut usage) } {
        0 => Ok(None),
        waited if waited == pid => {
            let time = |value: libc::timeval| {
                Duration::from_secs(value.tv_sec as u64) + Duration::from_micros(value.tv_usec as u64)
            };
            let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
            Ok(Some(End {
                code: signal.map_or_else(|| libc::WEXITSTATUS(status), |signal| 128 + signal),
                signal,
                user: time(usage.ru_utime),
                system: time(usage.ru_stime),
                max_resident_bytes: usage.ru_maxrss as u64 * 1024,
            }))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_of(script: &str) -> End {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        spawn(command, None).unwrap().wait(|| Duration::from_secs(1)).unwrap()
    }

    #[test]
    fn statuses_are_the_shells() {
        assert_eq!(end_of("exit 7").code, 7);
        let killed = end_of("kill -TERM $$");
        assert_eq!((killed.code, killed.signal), (143, Some(15)));
    }

    /// `meanwhile` runs repeatedly, with the pauses that it returns; the child's end is noticed between calls.
    #[test]
    fn work_goes_on_meanwhile() {
        let mut command = Command::new("sh");
        command.args(["-c", "read line; exit 3"]).stdin(std::process::Stdio::piped());
        let mut child = spawn(command, None).unwrap();
        let mut input = child.child.stdin.take();
        let mut calls = 0;
        let end = child.wait(|| {
            calls += 1;
            if calls == 5 {
                input = None;
            }
            Duration::from_millis(1)
        });
        assert_eq!(end.unwrap().code, 3);
        assert!(calls >= 5);
    }

    /// `spawn` returns an error of the child before `exec`, here a failed write to `cgroup.procs`.
    #[test]
    fn a_group_that_refuses_is_told() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = spawn(Command::new("true"), Some(full)).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }

    /// The child does not inherit the mask that blocks this process's signals.
    #[test]
    fn the_child_gets_signals() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap 'exit 5' USR1; kill -USR1 $$; sleep 5; exit 6"]);
        assert_eq!(spawn(command, None).unwrap().wait(|| Duration::from_secs(1)).unwrap().code, 5);
    }
}
