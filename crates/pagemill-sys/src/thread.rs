//! Background threads that do not disturb the program: detached, named, with all signals blocked. Also sets scheduling
//! priorities.
#![allow(unsafe_code)] // pthreads

use rustix::thread::{Timespec, nanosleep, sched_yield};
use std::ffi::{CStr, c_void};
use std::io;
use std::ptr;

/// A value whose method [`Work::work`] is the main function of a background thread.
pub trait Work: Sync + 'static {
    /// Runs on the background thread, which ends when this function returns.
    fn work(&'static self);
}

/// The first function of a thread that [`spawn`] starts. `work` points to a `T`.
extern "C" fn run_work<T: Work>(work: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` passed this pointer, which comes from a `'static` reference.
    unsafe { &*work.cast::<T>() }.work();
    ptr::null_mut()
}

/// Maximum length of a thread's name in Linux.
const MAX_NAME_BYTES: usize = 15;

/// Starts a detached thread that calls `work`, with a stack of 256 KiB.
///
/// The caller must hold no lock, because the C library allocates memory for a new thread.
///
/// # Errors
///
/// Errors of `pthread_create`, usually `EAGAIN`.
pub fn spawn<T: Work>(name: &CStr, work: &'static T) -> io::Result<()> {
    spawn_with_stack(name, 256 << 10, work)
}

/// As [`spawn`], with the given stack size, for work that calls functions of the program.
///
/// # Errors
///
/// As [`spawn`].
pub fn spawn_with_stack<T: Work>(name: &CStr, stack_bytes: usize, work: &'static T) -> io::Result<()> {
    // SAFETY: `run_work` reads a `'static` reference to a `T`, which is passed here.
    unsafe { spawn_with_argument(name, stack_bytes, run_work::<T>, ptr::from_ref(work).cast_mut().cast()) }
}

/// Starts a detached thread that calls `start` with `argument`.
///
/// # Errors
///
/// Errors of `pthread_create`.
///
/// # Safety
///
/// `start` must accept `argument` on another thread.
pub(crate) unsafe fn spawn_with_argument(
    name: &CStr,
    stack_bytes: usize,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> io::Result<()> {
    debug_assert!(name.count_bytes() <= MAX_NAME_BYTES, "the kernel refuses the name of the thread");
    debug_assert!(stack_bytes >= libc::PTHREAD_STACK_MIN);
    // SAFETY: attributes and signal sets are plain data, which the calls initialise before they are read. The mask of
    // this thread is restored before the function returns.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setstacksize(&raw mut attributes, stack_bytes);
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let mut thread: libc::pthread_t = std::mem::zeroed();
        let result = libc::pthread_create(&raw mut thread, &raw const attributes, start, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        libc::pthread_attr_destroy(&raw mut attributes);
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        // The thread is detached last: until then its id stays valid, even if the thread has ended.
        libc::pthread_setname_np(thread, name.as_ptr());
        libc::pthread_detach(thread);
    }
    Ok(())
}

/// Interrupts blocking system calls of one thread, with a signal whose handler does nothing.
#[derive(Clone, Copy, Debug)]
pub struct Interrupter {
    thread: libc::pid_t,
    signal: libc::c_int,
}

/// The handler of the interrupting signal. It does nothing, so the interrupted system call returns `EINTR`.
extern "C" fn return_from_call(_: libc::c_int) {}

impl Interrupter {
    /// Makes the calling thread interruptible: installs the handler for the last real-time signal and unblocks the
    /// signal in this thread. The process must not use that signal otherwise.
    pub fn of_this_thread() -> Self {
        let signal = libc::SIGRTMAX();
        // SAFETY: the structures are plain data, and the handler accesses nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = return_from_call as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(signal, &raw const action, ptr::null_mut());
            let mut signals: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut signals, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, ptr::null_mut());
            Self { thread: libc::gettid(), signal }
        }
    }

    /// Interrupts the system call that the thread executes. Does nothing if the thread executes none, or has ended.
    pub fn interrupt(self) {
        // SAFETY: the call takes numbers only, and the process id is that of this process.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.thread, self.signal) };
    }
}

/// Gives this thread a private, empty table of file descriptors (since Linux 5.9). Returns whether it succeeded.
///
/// Files that the thread opens then take no descriptor number that the program may rely on, and the thread keeps none
/// of the program's files open.
pub fn unshare_files() -> bool {
    // SAFETY: with this flag the kernel first copies the table. The program's own table stays as it is.
    unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE) == 0 }
}

/// Gives this thread real-time priority, if that is permitted (`SCHED_RR`, the lowest level). Returns whether it
/// succeeded.
pub fn prefer() -> bool {
    // SAFETY: the call takes a number only.
    let lowest = unsafe { libc::sched_get_priority_min(libc::SCHED_RR) };
    set_scheduler(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, lowest)
}

/// Sets the scheduling policy and the real-time priority of this thread. Returns whether that succeeded.
fn set_scheduler(policy: libc::c_int, sched_priority: libc::c_int) -> bool {
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: the call concerns only the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

/// While the value lives, its thread has real-time priority, if that is permitted ([`prefer`]). For short work that
/// other threads wait for. Dropping the value gives the thread normal priority again.
pub struct Preferred;

impl Preferred {
    pub fn begin() -> Self {
        prefer();
        Self
    }
}

impl Drop for Preferred {
    fn drop(&mut self) {
        set_normal_priority();
    }
}

/// Gives this thread normal priority.
fn set_normal_priority() {
    // Only a privileged thread may clear the flag that `prefer` has set.
    set_scheduler(libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0);
}

/// Runs `work` with normal priority, for long work of a thread that may have real-time priority ([`prefer`]). Gives such
/// a thread real-time priority again. Returns false if that is not permitted any more.
pub fn with_normal_priority(work: impl FnOnce()) -> bool {
    // SAFETY: the call takes a number only.
    let policy = unsafe { libc::sched_getscheduler(0) };
    let is_preferred = policy == libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    if is_preferred {
        set_normal_priority();
    }
    work();
    !is_preferred || prefer()
}

/// Reserves 8 ms of CPU time in every 10 ms for this thread (`SCHED_DEADLINE`). If that is not permitted, does the same
/// as [`prefer`].
///
/// Since Linux 6.12 normal threads get 50 ms of every second before `SCHED_RR` threads, but not before threads with a
/// deadline. Threads that this thread starts are scheduled normally.
pub fn prefer_by_deadline() -> bool {
    const SCHED_DEADLINE: u32 = 6;
    const PERIOD_NS: u64 = 10_000_000;
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: SCHED_DEADLINE,
        sched_flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: PERIOD_NS / 10 * 8,
        sched_deadline: PERIOD_NS,
        sched_period: PERIOD_NS,
    };
    // SAFETY: the call reads `attributes`, which contains its own size, and concerns only the calling thread.
    let is_done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } == 0;
    is_done || prefer()
}

/// Gives this thread the lowest normal priority (nice 19). The thread still gets some CPU time.
pub fn defer() {
    // Without a process id, the call concerns only the calling thread.
    let _ = rustix::process::setpriority_process(None, 19);
}

/// Gives this single-threaded process the lowest normal priority, and puts it into a session of its own with the lowest
/// autogroup priority.
///
/// Where the kernel divides CPU time among sessions first (`sched_autogroup_enabled`), a nice value has an effect only
/// within one session: a nice 19 process that is alone in a session gets as much as another session. Control groups
/// have weights of their own.
pub fn defer_process() {
    defer();
    // SAFETY: the call takes no arguments. It fails for the leader of a process group and then changes nothing.
    let is_alone = unsafe { libc::setsid() } >= 0;
    if is_alone {
        // The file sets the priority of the new session's autogroup.
        let _ = std::fs::write("/proc/self/autogroup", "19");
    }
}

/// Sleeps briefly (50 us plus timer slack), so that a thread with a lower priority can continue.
pub fn pause() {
    sched_yield();
    // A direct system call: the C library's function is a cancellation point.
    let _ = nanosleep(&Timespec { tv_sec: 0, tv_nsec: 50_000 });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> libc::c_int {
        // SAFETY: the call takes a number only.
        unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK }
    }

    /// Long work of a thread with real-time priority must have normal priority; afterwards the thread must have its own
    /// again. A thread with normal priority must keep it.
    #[test]
    fn long_work_has_normal_priority() {
        let test = || {
            assert!(with_normal_priority(|| assert_eq!(policy(), libc::SCHED_OTHER)));
            assert_eq!(policy(), libc::SCHED_OTHER);
            if !prefer() {
                println!("skipped: real-time priority is not permitted");
                return;
            }
            assert!(with_normal_priority(|| assert_eq!(policy(), libc::SCHED_OTHER)));
            assert_eq!(policy(), libc::SCHED_RR);
        };
        std::thread::spawn(test).join().unwrap();
    }
}
