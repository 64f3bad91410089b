//! Runs a program in a child process: forwards signals to it and returns its exit status.
//!
//! If this process ends, the kernel kills the child.
#![allow(unsafe_code)] // clone, signal masks, wait4, prctl

use crate::fault::AllSignalsBlocked;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Signals that are forwarded to the child. Stop and continue signals are not forwarded, because the terminal sends
/// them to this process and to the child.
const FORWARDED_SIGNALS: &[libc::c_int] = &[
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
];

/// How a child ended, and the CPU time and memory of the child and of the descendants that it waited for.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// Exit status of the child. If a signal ended the child, 128 plus the number of the signal.
    pub code: i32,
    pub signal: Option<i32>,
    pub user: Duration,
    pub system: Duration,
    /// Size of the largest resident set, among the child and the descendants that it waited for.
    pub max_resident_bytes: u64,
}

/// Standard streams that were closed when this process started, one bit each. Rust's runtime opens /dev/null in their
/// place.
static STREAMS_CLOSED_AT_START: AtomicU32 = AtomicU32::new(0);

/// Entry of `.init_array`: [`record_closed_streams`] is called before Rust's runtime opens /dev/null for closed
/// streams.
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD_CLOSED_STREAMS: extern "C" fn() = record_closed_streams;

extern "C" fn record_closed_streams() {
    for stream in 0..3 {
        // SAFETY: the call accesses no memory.
        if unsafe { libc::fcntl(stream, libc::F_GETFD) } < 0 {
            STREAMS_CLOSED_AT_START.fetch_or(1 << stream, Relaxed);
        }
    }
}

/// Returns the set of the forwarded signals and `SIGCHLD`.
fn handled_signals() -> libc::sigset_t {
    // SAFETY: the set is plain data, which the first call initialises.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in FORWARDED_SIGNALS.iter().chain(&[libc::SIGCHLD]) {
            libc::sigaddset(&raw mut set, *signal);
        }
        set
    }
}

/// A program to execute. The first argument is the name of the program. Each entry of the environment is `NAME=VALUE`.
pub struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Program {
    /// Creates a program from its path, arguments and environment. `PATH` is searched for a `path` without a slash, as
    /// `execvp` does.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if a text contains a zero byte.
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

/// Blocks the signals that [`RunningChild::wait`] receives, in this thread and in threads that it starts. Dropping the
/// value restores the signal mask.
pub struct BlockedSignals {
    /// The previous signal mask of the calling thread, which the child's program gets.
    before: libc::sigset_t,
}

impl BlockedSignals {
    /// Blocks the forwarded signals and `SIGCHLD`. Must be called before any thread is started: a signal that a thread
    /// does not block would end this process.
    #[must_use]
    pub fn begin() -> Self {
        let held = handled_signals();
        // SAFETY: plain data may be zero.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: the call only changes this thread's signal mask.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, &raw mut before) };
        Self { before }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the call only restores this thread's signal mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

/// A running child. The signals that are forwarded to the child stay blocked in this thread.
pub struct RunningChild {
    pid: libc::pid_t,
    _blocked: BlockedSignals,
}

/// Setup of a new child, in memory that the child shares with its parent. The child reads its arguments there, and
/// stores the error of a failed call.
struct ChildSetup<'a> {
    parent: libc::pid_t,
    path: &'a CStr,
    /// The arguments of the program. Ends with a null pointer, as `environment` does.
    arguments: &'a [*const c_char],
    environment: &'a [*const c_char],
    /// Descriptor of the `cgroup.procs` file of the group that the child enters.
    group: Option<RawFd>,
    /// Signal mask that the program gets.
    mask: libc::sigset_t,
    /// `errno` of the call that failed in the child; 0 once the program runs.
    error: c_int,
}

impl ChildSetup<'_> {
    /// Executes the program; runs in the child. Returns only if a call fails, with the error of that call.
    ///
    /// The parent is suspended meanwhile and shares all memory with the child. So this function must not allocate, lock
    /// or panic.
    fn execute_program(&self) -> io::Error {
        // SAFETY: these are system calls with valid arguments, and the arrays of texts end with null pointers.
        unsafe {
            // The setting survives `exec`, unless the executed program changes the user (set-user-ID).
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return io::Error::last_os_error();
            }
            // If the parent ended before that call, no signal is sent.
            if libc::getppid() != self.parent {
                libc::_exit(128 + libc::SIGKILL);
            }
            if let Some(group) = self.group
                && libc::write(group, b"0".as_ptr().cast(), 1) != 1
            {
                return io::Error::last_os_error();
            }
            // Rust's runtime ignores this signal, and `exec` would keep that. The parent has its own signal actions.
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            // If the child stopped here, its parent would stay suspended, and Ctrl-C would reach neither process.
            // Ignoring a stop signal discards a pending one of the child; the parent receives the signal itself.
            for signal in [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU] {
                let before = libc::signal(signal, libc::SIG_IGN);
                libc::signal(signal, before);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &raw const self.mask, ptr::null_mut());
            for stream in (0..3).filter(|stream| STREAMS_CLOSED_AT_START.load(Relaxed) >> stream & 1 == 1) {
                libc::close(stream);
            }
            libc::execvpe(self.path.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr());
            io::Error::last_os_error()
        }
    }
}

/// The first function of the child. `start` points to a [`ChildSetup`].
extern "C" fn child_main(start: *mut c_void) -> c_int {
    // SAFETY: `start_child` passes a `ChildSetup`, and is suspended while the child runs.
    let start = unsafe { &mut *start.cast::<ChildSetup>() };
    start.error = start.execute_program().raw_os_error().unwrap_or(libc::EINVAL);
    127
}

/// Size of the child's stack until it executes the program. For a script without an interpreter line `execvpe` copies
/// the arguments to the stack.
const CHILD_STACK_BYTES: usize = 64 << 10;

/// Starts a child that shares this process's memory until it executes the program (`vfork`). That saves the copy of the
/// page tables that `fork` makes.
fn start_child(start: &mut ChildSetup) -> io::Result<libc::pid_t> {
    // Whole pages align the stack's end as a stack pointer must be.
    let stack_bytes = (CHILD_STACK_BYTES + size_of_val(start.arguments)).next_multiple_of(4096);
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::STACK);
    // SAFETY: the call creates a new mapping and replaces none.
    let stack = unsafe { mmap_anonymous(ptr::null_mut(), stack_bytes, access, kind) }?;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack grows down from the end of the mapping. Because of CLONE_VFORK this thread continues only after
    // the child has stopped using the stack and `start`.
    let pid = unsafe { libc::clone(child_main, stack.byte_add(stack_bytes), flags, ptr::from_mut(start).cast()) };
    let failed = (pid < 0).then(io::Error::last_os_error);
    // SAFETY: the child does not use the stack any more.
    let _ = unsafe { munmap(stack, stack_bytes) };
    if let Some(error) = failed {
        return Err(error);
    }
    if start.error != 0 {
        // SAFETY: the call only waits for the child, which ends.
        while unsafe { libc::waitpid(pid, ptr::null_mut(), 0) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        return Err(io::Error::from_raw_os_error(start.error));
    }
    Ok(pid)
}

/// Starts a program in a child process.
///
/// The kernel kills the child when the calling thread ends, so the process's first thread should call this function.
/// `group` is the opened `cgroup.procs` of a control group that the child enters before it executes the program.
///
/// # Errors
///
/// Errors of entering the group or of starting the program.
pub fn spawn(program: &Program, group: Option<&File>, held: BlockedSignals) -> io::Result<RunningChild> {
    let pointers = |texts: &[CString]| -> Vec<*const c_char> {
        texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
    };
    let mut start = ChildSetup {
        // SAFETY: the call takes no arguments.
        parent: unsafe { libc::getpid() },
        path: &program.path,
        arguments: &pointers(&program.arguments),
        environment: &pointers(&program.environment),
        group: group.map(AsRawFd::as_raw_fd),
        mask: held.before,
        error: 0,
    };
    // The child inherits the mask, so no signal stops the child or runs a handler in it before the child has set its
    // own mask.
    let blocked = AllSignalsBlocked::begin();
    let started = start_child(&mut start);
    drop(blocked);
    started.map(|pid| RunningChild { pid, _blocked: held })
}

impl RunningChild {
    /// Process id of the child.
    pub fn id(&self) -> u32 {
        self.pid as u32
    }

    /// Waits until the child ends, and forwards signals to it. Calls `meanwhile` at once, and again after each pause
    /// that `meanwhile` returns.
    ///
    /// A signal from the terminal is not forwarded, because the terminal sends it to the child, too (this process and
    /// the child are in the foreground group).
    ///
    /// # Errors
    ///
    /// Errors of `wait4`.
    pub fn wait(self, mut meanwhile: impl FnMut() -> Duration) -> io::Result<End> {
        let pid = self.pid;
        let held = handled_signals();
        let mut pause = Duration::ZERO;
        loop {
            if let Some(end) = try_wait(pid)? {
                return Ok(end);
            }
            // SAFETY: plain data may be zero.
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            let time = libc::timespec { tv_sec: pause.as_secs() as _, tv_nsec: pause.subsec_nanos().into() };
            // SAFETY: the call waits for blocked signals and writes only `info`.
            let signal = unsafe { libc::sigtimedwait(&raw const held, &raw mut info, &raw const time) };
            let is_from_terminal = info.si_code == libc::SI_KERNEL;
            if FORWARDED_SIGNALS.contains(&signal) && !is_from_terminal {
                // SAFETY: the child was not waited for yet, so no other process has its id.
                unsafe { libc::kill(pid, signal) };
            }
            if signal < 0 {
                pause = meanwhile();
            }
        }
    }
}

/// Returns how the child with the id `pid` ended, or `None` if it is still running.
fn try_wait(pid: libc::pid_t) -> io::Result<Option<End>> {
    let mut status = 0;
    // SAFETY: plain data may be zero.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes only `status` and `usage`.
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

    fn shell_program(script: &str) -> Program {
        let arguments = ["sh", "-c", script].map(OsString::from);
        Program::new("sh".into(), arguments, std::env::vars_os()).unwrap()
    }

    fn run_script(script: &str) -> End {
        spawn(&shell_program(script), None, BlockedSignals::begin()).unwrap().wait(|| Duration::from_secs(1)).unwrap()
    }

    /// Exit statuses and the numbers of fatal signals must be reported as a shell reports them.
    #[test]
    fn statuses_are_reported_as_by_a_shell() {
        assert_eq!(run_script("exit 7").code, 7);
        let killed = run_script("kill -TERM $$");
        assert_eq!((killed.code, killed.signal), (143, Some(15)));
    }

    /// `meanwhile` must be called repeatedly until the child ends.
    #[test]
    fn meanwhile_is_called_until_the_child_ends() {
        let file = std::env::temp_dir().join(format!("pagemill-child-{}", std::process::id()));
        let script = format!("while [ ! -e {} ]; do sleep 0.01; done; exit 3", file.display());
        let child = spawn(&shell_program(&script), None, BlockedSignals::begin()).unwrap();
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

    /// A program must get only the given environment. A script without an interpreter line must run in a shell. A
    /// program that does not exist must lead to an error.
    #[test]
    fn programs_run_with_their_arguments_and_environment() {
        // The stack is aligned for even and for odd numbers of arguments.
        for arguments in [&["true"][..], &["true", "1"], &["true", "1", "2"]] {
            let program = Program::new("true".into(), arguments.iter().map(OsString::from), []).unwrap();
            assert_eq!(
                spawn(&program, None, BlockedSignals::begin()).unwrap().wait(|| Duration::from_secs(1)).unwrap().code,
                0
            );
        }
        let mut program = shell_program("test \"$GIVEN\" = 1 -a -z \"$PAGEMILL_ABSENT\" || exit 4");
        program.environment = vec![c"GIVEN=1".to_owned()];
        assert_eq!(
            spawn(&program, None, BlockedSignals::begin()).unwrap().wait(|| Duration::from_secs(1)).unwrap().code,
            0
        );
        let script = std::env::temp_dir().join(format!("pagemill-script-{}", std::process::id()));
        std::fs::write(&script, "exit $1\n").unwrap();
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let many = std::iter::repeat_n("9".into(), 20_000);
        let program = Program::new(script.clone().into(), std::iter::once("x".into()).chain(many), []).unwrap();
        let end = spawn(&program, None, BlockedSignals::begin()).map(|child| child.wait(|| Duration::from_secs(1)));
        std::fs::remove_file(&script).unwrap();
        assert_eq!(end.unwrap().unwrap().code, 9);
        let absent = Program::new("/pagemill/absent".into(), ["absent".into()], []).unwrap();
        assert_eq!(spawn(&absent, None, BlockedSignals::begin()).err().unwrap().raw_os_error(), Some(libc::ENOENT));
        assert!(Program::new("a\0b".into(), [], []).is_err());
    }

    /// The child's write to `cgroup.procs` fails before `exec`. `spawn` must return the error of that write.
    #[test]
    fn a_failure_to_enter_the_group_is_returned() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = spawn(&shell_program("true"), Some(&full), BlockedSignals::begin()).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }

    /// The child must receive signals: it must not inherit the mask that blocks them in this process.
    #[test]
    fn the_child_receives_signals() {
        assert_eq!(run_script("trap 'exit 5' USR1; kill -USR1 $$; sleep 5; exit 6").code, 5);
    }
}
