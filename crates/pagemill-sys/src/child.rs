//! Runs a child process in place of this one: forwards signals to it and returns its exit status.
//!
//! If this process ends, the kernel kills the child.
#![allow(unsafe_code)] // clone, signal masks, wait4, prctl

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::ptr;
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

/// A program to execute: the arguments start with its name, the environment has entries `NAME=VALUE`.
pub struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Program {
    /// `path` without a slash is searched in `PATH`, as by `execvp`.
    ///
    /// # Errors
    ///
    /// A text contains a zero byte.
    pub fn new(
        path: OsString,
        arguments: impl IntoIterator<Item = OsString>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> io::Result<Self> {
        let text = |text: OsString| Ok::<_, io::Error>(CString::new(text.into_vec())?);
        let entry = |(mut name, value): (OsString, OsString)| {
            name.push("=");
            name.push(value);
            text(name)
        };
        Ok(Self {
            path: text(path)?,
            arguments: arguments.into_iter().map(text).collect::<io::Result<_>>()?,
            environment: environment.into_iter().map(entry).collect::<io::Result<_>>()?,
        })
    }
}

/// Signals that [`StoodFor::wait`] takes, blocked in this thread and in threads that it starts, until this is dropped.
pub struct HeldSignals {
    /// This thread's previous signal mask, which the child gets.
    before: libc::sigset_t,
}

impl HeldSignals {
    /// Call it before any thread is started: one that has a signal unblocked would end this process instead of
    /// forwarding it.
    #[must_use]
    pub fn begin() -> Self {
        let held = mask();
        // SAFETY: plain data, written by the call before it is read.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: sets this thread's mask.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, &raw mut before) };
        Self { before }
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // SAFETY: sets this thread's mask back.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

/// A running child, whose signals this thread holds.
pub struct StoodFor {
    pid: libc::pid_t,
    _held: HeldSignals,
}

/// What a new child reads, and the error that it leaves, in memory shared with its parent.
struct Start<'a> {
    parent: libc::pid_t,
    path: &'a CStr,
    /// Ends with a null pointer, like `environment`.
    arguments: &'a [*const c_char],
    environment: &'a [*const c_char],
    /// `cgroup.procs` of the control group to enter.
    group: Option<RawFd>,
    mask: libc::sigset_t,
    /// `errno` of the call that failed; 0 once the program runs.
    error: c_int,
}

impl Start<'_> {
    /// Runs in the child. Returns the error of the call that failed, if the program could not be executed.
    ///
    /// The parent is suspended meanwhile and shares all memory: no allocation, no lock, no panic.
    fn execute(&self) -> io::Error {
        // SAFETY: system calls on valid arguments; the arrays of texts end with null pointers.
        unsafe {
            // Survives `exec`, except of a program that changes its user.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return io::Error::last_os_error();
            }
            // A parent that ended before the call sends nothing.
            if libc::getppid() != self.parent {
                libc::_exit(128 + libc::SIGKILL);
            }
            if let Some(group) = self.group
                && libc::write(group, b"0".as_ptr().cast(), 1) != 1
            {
                return io::Error::last_os_error();
            }
            // Rust's runtime ignores this signal; the child has its own table of handlers.
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            // A child that stops here would keep its parent suspended, so that Ctrl-C reaches neither. Ignoring a stop
            // signal discards one that is pending; the parent gets its own.
            for signal in [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU] {
                let before = libc::signal(signal, libc::SIG_IGN);
                libc::signal(signal, before);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &raw const self.mask, ptr::null_mut());
            for stream in (0..3).filter(|stream| WERE_CLOSED.load(Relaxed) >> stream & 1 == 1) {
                libc::close(stream);
            }
            libc::execvpe(self.path.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr());
            io::Error::last_os_error()
        }
    }
}

/// First function of the child; `start` points to a [`Start`].
extern "C" fn child_main(start: *mut c_void) -> c_int {
    // SAFETY: `start_child` passes a `Start`, and is suspended while this runs.
    let start = unsafe { &mut *start.cast::<Start>() };
    start.error = start.execute().raw_os_error().unwrap_or(libc::EINVAL);
    127
}

/// Stack of the child until it executes the program; `execvpe` places a copy of the arguments on it for a script without
/// an interpreter line.
const STACK_BYTES: usize = 64 << 10;

/// Starts a child that shares this process's memory until it executes the program (`vfork`), which saves the copy of
/// the page tables that a fork makes.
fn start_child(start: &mut Start) -> io::Result<libc::pid_t> {
    // Whole pages, so that the end is aligned as a stack pointer must be.
    let stack_bytes = (STACK_BYTES + size_of_val(start.arguments)).next_multiple_of(4096);
    // SAFETY: new memory, nothing is replaced.
    let stack = unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(ptr::null_mut(), stack_bytes, access, kind | libc::MAP_STACK, -1, 0)
    };
    if stack == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack grows down from the mapping's end; with CLONE_VFORK this thread goes on once the child no longer
    // uses the stack and `start`.
    let pid = unsafe { libc::clone(child_main, stack.byte_add(stack_bytes), flags, ptr::from_mut(start).cast()) };
    let failed = (pid < 0).then(io::Error::last_os_error);
    // SAFETY: the child executes another program, or ended.
    unsafe { libc::munmap(stack, stack_bytes) };
    if let Some(error) = failed {
        return Err(error);
    }
    if start.error != 0 {
        // SAFETY: waits for the child, which ends.
        while unsafe { libc::waitpid(pid, ptr::null_mut(), 0) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        return Err(io::Error::from_raw_os_error(start.error));
    }
    Ok(pid)
}

/// Starts a child.
///
/// The kernel kills the child when this thread ends, so call it on the first thread. `group` is the opened
/// `cgroup.procs` of a control group that the child enters before it executes the program.
///
/// # Errors
///
/// Errors of entering the group or of starting the program.
pub fn spawn(program: &Program, group: Option<&File>, held: HeldSignals) -> io::Result<StoodFor> {
    let pointers = |texts: &[CString]| -> Vec<*const c_char> {
        texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
    };
    let mut start = Start {
        // SAFETY: no arguments.
        parent: unsafe { libc::getpid() },
        path: &program.path,
        arguments: &pointers(&program.arguments),
        environment: &pointers(&program.environment),
        group: group.map(AsRawFd::as_raw_fd),
        mask: held.before,
        error: 0,
    };
    // SAFETY: plain data, written by the calls before it is read.
    let (mut all, mut own): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // The child inherits the mask: no signal stops it or runs a handler in it before it has set its own.
    // SAFETY: sets this thread's mask.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut own);
    }
    let started = start_child(&mut start);
    // SAFETY: sets this thread's mask back.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const own, ptr::null_mut()) };
    started.map(|pid| StoodFor { pid, _held: held })
}

impl StoodFor {
    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.pid as u32
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
        let pid = self.pid;
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
        -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => Ok(None),
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

    fn shell(script: &str) -> Program {
        let arguments = ["sh", "-c", script].map(OsString::from);
        Program::new("sh".into(), arguments, std::env::vars_os()).unwrap()
    }

    fn end_of(script: &str) -> End {
        spawn(&shell(script), None, HeldSignals::begin()).unwrap().wait(|| Duration::from_secs(1)).unwrap()
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
        let file = std::env::temp_dir().join(format!("pagemill-child-{}", std::process::id()));
        let script = format!("while [ ! -e {} ]; do sleep 0.01; done; exit 3", file.display());
        let child = spawn(&shell(&script), None, HeldSignals::begin()).unwrap();
        let mut calls = 0;
        let end = child.wait(|| {
            calls += 1;
            if calls == 5 {
                File::create(&file).unwrap();
            }
            Duration::from_millis(1)
        });
        std::fs::remove_file(&file).unwrap();
        assert_eq!(end.unwrap().code, 3);
        assert!(calls >= 5);
    }

    /// The program gets the environment of the call, and only that; a script without an interpreter line runs in a
    /// shell; a program that does not exist is an error.
    #[test]
    fn programs_are_executed() {
        // Even and odd numbers of arguments: the stack is aligned for both.
        for arguments in [&["true"][..], &["true", "1"], &["true", "1", "2"]] {
            let program = Program::new("true".into(), arguments.iter().map(OsString::from), []).unwrap();
            assert_eq!(
                spawn(&program, None, HeldSignals::begin()).unwrap().wait(|| Duration::from_secs(1)).unwrap().code,
                0
            );
        }
        let mut program = shell("test \"$GIVEN\" = 1 -a -z \"$PAGEMILL_ABSENT\" || exit 4");
        program.environment = vec![c"GIVEN=1".to_owned()];
        assert_eq!(
            spawn(&program, None, HeldSignals::begin()).unwrap().wait(|| Duration::from_secs(1)).unwrap().code,
            0
        );
        let script = std::env::temp_dir().join(format!("pagemill-script-{}", std::process::id()));
        std::fs::write(&script, "exit $1\n").unwrap();
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let many = std::iter::repeat_n("9".into(), 20_000);
        let program = Program::new(script.clone().into(), std::iter::once("x".into()).chain(many), []).unwrap();
        let end = spawn(&program, None, HeldSignals::begin()).map(|child| child.wait(|| Duration::from_secs(1)));
        std::fs::remove_file(&script).unwrap();
        assert_eq!(end.unwrap().unwrap().code, 9);
        let absent = Program::new("/pagemill/absent".into(), ["absent".into()], []).unwrap();
        assert_eq!(spawn(&absent, None, HeldSignals::begin()).err().unwrap().raw_os_error(), Some(libc::ENOENT));
        assert!(Program::new("a\0b".into(), [], []).is_err());
    }

    /// `spawn` returns an error of the child before `exec`, here a failed write to `cgroup.procs`.
    #[test]
    fn a_group_that_refuses_is_told() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = spawn(&shell("true"), Some(&full), HeldSignals::begin()).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }

    /// The child does not inherit the mask that blocks this process's signals.
    #[test]
    fn the_child_gets_signals() {
        assert_eq!(end_of("trap 'exit 5' USR1; kill -USR1 $$; sleep 5; exit 6").code, 5);
    }
}
