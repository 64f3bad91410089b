//! Background threads that the program does not notice: detached, named, all signals blocked. Also scheduling
//! priorities.
#![allow(unsafe_code)] // pthreads

use std::ffi::{CStr, c_void};
use std::io;
use std::ptr;

/// The function of a background thread.
pub trait Work: Sync + 'static {
    fn work(&'static self);
}

extern "C" fn start<T: Work>(work: *mut c_void) -> *mut c_void {
    // SAFETY: the pointer that `spawn` passed: a `'static` reference.
    unsafe { &*work.cast::<T>() }.work();
    ptr::null_mut()
}

/// Starts `work` on a thread with a 256 KiB stack. It is never joined.
///
/// The caller must hold no lock: the C library allocates for a new thread.
///
/// # Errors
///
/// Errors of `pthread_create`, usually `EAGAIN`.
pub fn spawn<T: Work>(name: &CStr, work: &'static T) -> io::Result<()> {
    spawn_with_stack(name, 256 << 10, work)
}

/// As [`spawn`], with a given stack size, for work that calls the program.
///
/// # Errors
///
/// As [`spawn`].
pub fn spawn_with_stack<T: Work>(name: &CStr, stack_bytes: usize, work: &'static T) -> io::Result<()> {
    // SAFETY: `start` reads a `'static` reference to a `T`.
    unsafe { create(name, stack_bytes, start::<T>, ptr::from_ref(work).cast_mut().cast()) }
}

/// Starts a detached thread that calls `start` with `argument`.
///
/// # Errors
///
/// Errors of `pthread_create`.
///
/// # Safety
///
/// `start` may be called with `argument` on another thread.
pub(crate) unsafe fn create(
    name: &CStr,
    stack_bytes: usize,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> io::Result<()> {
    // SAFETY: attributes and signal sets are plain data initialised by the calls
    // before they are read; the mask of this thread is restored before returning.
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
        // Detached only now: until then its id is valid, even if the thread has ended.
        libc::pthread_setname_np(thread, name.as_ptr());
        libc::pthread_detach(thread);
    }
    Ok(())
}

/// Gives this thread a private, empty table of file descriptors. Returns whether it succeeded (since Linux 5.9).
///
/// Files that it opens briefly then take no number that the program relies on, and it keeps none of the program's
/// files open.
pub fn unshare_files() -> bool {
    const CLOSE_RANGE_UNSHARE: libc::c_uint = 2;
    // SAFETY: with this flag the table is copied first; the program's own descriptors stay as they are.
    unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, CLOSE_RANGE_UNSHARE) == 0 }
}

/// Gives this thread real-time priority if permitted (`SCHED_RR`, lowest level). Returns whether it succeeded.
pub fn prefer() -> bool {
    // SAFETY: plain data; concerns the calling thread only.
    unsafe {
        let mut parameters: libc::sched_param = std::mem::zeroed();
        parameters.sched_priority = libc::sched_get_priority_min(libc::SCHED_RR);
        libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &raw const parameters) == 0
    }
}

/// Raises the thread's priority while this lives, if permitted ([`prefer`]). For short work that other threads would
/// wait for. On drop the thread returns to `SCHED_OTHER` and its priority there.
pub struct Preferred;

impl Preferred {
    pub fn begin() -> Self {
        prefer();
        Self
    }
}

impl Drop for Preferred {
    fn drop(&mut self) {
        // SAFETY: plain data; concerns the calling thread only.
        unsafe {
            let parameters: libc::sched_param = std::mem::zeroed();
            libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters);
        }
    }
}

/// Gives this thread 8 ms of every 10 (`SCHED_DEADLINE`); otherwise as [`prefer`].
///
/// Since Linux 6.12 threads without real-time priority get 50 ms of every second ahead of `SCHED_RR` threads, but not
/// ahead of those with a deadline. Threads that this one starts are scheduled normally.
pub fn prefer_by_deadline() -> bool {
    /// `struct sched_attr`, as of its first version.
    #[repr(C)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime_ns: u64,
        deadline_ns: u64,
        period_ns: u64,
    }
    const SCHED_DEADLINE: u32 = 6;
    const RESET_ON_FORK: u64 = 1;
    const PERIOD_NS: u64 = 10_000_000;
    let attributes = Attributes {
        size: size_of::<Attributes>() as u32,
        policy: SCHED_DEADLINE,
        flags: RESET_ON_FORK,
        nice: 0,
        priority: 0,
        runtime_ns: PERIOD_NS / 10 * 8,
        deadline_ns: PERIOD_NS,
        period_ns: PERIOD_NS,
    };
    // SAFETY: reads `attributes`, which holds its own size; concerns the calling thread only.
    let is_done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } == 0;
    is_done || prefer()
}

/// Gives this thread the lowest normal priority (nice 19). It still gets some CPU time.
pub fn defer() {
    // SAFETY: concerns the calling thread only, which 0 names.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
}

/// Gives this single-threaded process the lowest normal priority and a session of its own with the lowest autogroup
/// priority.
///
/// Where the kernel divides CPU time among sessions first (`sched_autogroup_enabled`), a nice value applies within one
/// session only: of two sessions even a nice 19 one gets half. Control groups have separate weights.
pub fn defer_process() {
    defer();
    // SAFETY: no arguments. Fails for the leader of a process group and then changes nothing.
    let is_alone = unsafe { libc::setsid() } >= 0;
    if is_alone {
        // The autogroup of the new session, which this process leads.
        let _ = std::fs::write("/proc/self/autogroup", "19");
    }
}

/// Waits briefly (50 us plus timer slack) for a thread that may have a lower priority than this one.
pub fn pause() {
    // SAFETY: no arguments.
    unsafe { libc::sched_yield() };
    let moment = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    // A plain system call, not a cancellation point.
    // SAFETY: reads `moment`.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const moment, std::ptr::null_mut::<libc::timespec>()) };
}
