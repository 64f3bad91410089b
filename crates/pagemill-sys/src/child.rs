//! A child that this process stands in for: signals go to it, its end is this process's.
#![allow(unsafe_code)] // signal masks, wait4

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Signals that are passed on. Stop and continue are left to the terminal, which sends them to both.
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

/// How a child ended, and what it and its waited-for descendants used.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// Exit status, or 128 plus the signal.
    pub code: i32,
    pub signal: Option<i32>,
    pub user: Duration,
    pub system: Duration,
    /// Largest resident set of a single process, as the kernel counts it.
    pub max_resident_bytes: u64,
}

/// Standard streams that this process was started without, a bit each. Rust's runtime puts /dev/null in their place.
static WERE_CLOSED: AtomicU32 = AtomicU32::new(0);

/// Looks before the runtime does.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STREAMS: extern "C" fn() = look_at_streams;

extern "C" fn look_at_streams() {
    for stream in 0..3 {
        // SAFETY: asks about a descriptor number.
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

/// A child that this thread stands in for, until it has ended.
pub struct StoodFor {
    child: Child,
    /// This thread's signal mask before.
    before: libc::sigset_t,
}

impl Drop for StoodFor {
    fn drop(&mut self) {
        // SAFETY: sets this thread's mask back.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// Starts a child from here on stood in for: this thread's signals wait for [`StoodFor::wait`].
///
/// # Errors
///
/// What starting it says.
pub fn spawn(mut command: Command) -> io::Result<StoodFor> {
    // SAFETY: plain data, written by the call before it is read.
    let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
    let held = mask();
    // SAFETY: sets this thread's mask; other threads are not started yet.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, &raw mut before) };
    // SAFETY: the closure only makes system calls; the child gets the mask and the streams this process was given.
    unsafe {
        command.pre_exec(move || {
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
    /// Waits for the child, passing signals on; calls `meanwhile` about once a second.
    ///
    /// A signal from the terminal has reached the child already (both are in the
    /// foreground group) and is not sent twice.
    ///
    /// # Errors
    ///
    /// What `wait4` says.
    pub fn wait(self, mut meanwhile: impl FnMut()) -> io::Result<End> {
        let pid = self.child.id() as libc::pid_t;
        let held = mask();
        loop {
            if let Some(end) = try_wait(pid)? {
                return Ok(end);
            }
            // SAFETY: plain data, written by the call.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
            // SAFETY: waits for blocked signals; writes `info`.
            let signal = unsafe { libc::sigtimedwait(&raw const held, &raw mut info, &raw const second) };
            let is_from_terminal = info.si_code == libc::SI_KERNEL;
            if FORWARDED.contains(&signal) && !is_from_terminal {
                // SAFETY: the child was not waited for, so its id is still its own.
                unsafe { libc::kill(pid, signal) };
            }
            if signal < 0 {
                meanwhile();
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
        spawn(command).unwrap().wait(|| {}).unwrap()
    }

    #[test]
    fn statuses_are_the_shells() {
        assert_eq!(end_of("exit 7").code, 7);
        let killed = end_of("kill -TERM $$");
        assert_eq!((killed.code, killed.signal), (143, Some(15)));
    }

    /// The child does not inherit the mask that holds this process's signals back.
    #[test]
    fn the_child_gets_signals() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap 'exit 5' USR1; kill -USR1 $$; sleep 5; exit 6"]);
        assert_eq!(spawn(command).unwrap().wait(|| {}).unwrap().code, 5);
    }
}
