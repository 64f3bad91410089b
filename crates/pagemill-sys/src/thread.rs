//! A helper thread that the program does not notice: detached, all signals blocked, named.
#![allow(unsafe_code)] // pthreads

use std::ffi::{CStr, c_void};
use std::io;
use std::ptr;

/// What a thread of its own does.
pub trait Work: Sync + 'static {
    fn work(&'static self);
}

extern "C" fn start<T: Work>(work: *mut c_void) -> *mut c_void {
    // SAFETY: what `spawn` was given: a reference that stays.
    unsafe { &*work.cast::<T>() }.work();
    ptr::null_mut()
}

/// Starts `work` on a thread with a 256 KiB stack. It is never joined.
///
/// Call it outside every lock: the C library allocates for a new thread.
///
/// # Errors
///
/// What `pthread_create` says, `EAGAIN` above all.
pub fn spawn<T: Work>(name: &CStr, work: &'static T) -> io::Result<()> {
    spawn_with_stack(name, 256 << 10, work)
}

/// As [`spawn`], with a stack of so many bytes, for work that calls the program.
///
/// # Errors
///
/// As [`spawn`].
pub fn spawn_with_stack<T: Work>(name: &CStr, stack_bytes: usize, work: &'static T) -> io::Result<()> {
    // SAFETY: attributes and signal sets are plain data initialised by the calls
    // before they are read; the mask of this thread is restored before returning.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(&raw mut attributes, stack_bytes);
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let mut thread: libc::pthread_t = std::mem::zeroed();
        let argument = ptr::from_ref(work).cast_mut().cast();
        let result = libc::pthread_create(&raw mut thread, &raw const attributes, start::<T>, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        libc::pthread_attr_destroy(&raw mut attributes);
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        libc::pthread_setname_np(thread, name.as_ptr());
    }
    Ok(())
}

/// Gives this thread a table of file descriptors of its own, empty: the files that it opens for a moment take no number
/// that the program counts on, and it keeps none of the program's open. Says whether that was done (since Linux 5.9).
pub fn unshare_files() -> bool {
    const CLOSE_RANGE_UNSHARE: libc::c_uint = 2;
    // SAFETY: with this flag the table is copied first; the program's own descriptors stay as they are.
    unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, CLOSE_RANGE_UNSHARE) == 0 }
}

/// Lets this thread go before others, where it is allowed to (`SCHED_RR`, lowest level); says whether it is.
pub fn prefer() -> bool {
    // SAFETY: plain data; concerns the calling thread only.
    unsafe {
        let mut parameters: libc::sched_param = std::mem::zeroed();
        parameters.sched_priority = libc::sched_get_priority_min(libc::SCHED_RR);
        libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &raw const parameters) == 0
    }
}

/// While this lives the thread goes before others, where it is allowed to ([`prefer`]): for what others would have to wait
/// for, and is over soon. It ends as a thread of the usual kind, with the priority it has as one.
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

/// As [`prefer`], and before what the kernel lends to others: since Linux 6.12 threads without real-time priority get 50 ms
/// of every second before those with one, unless these have a deadline (`SCHED_DEADLINE`). It gets 8 ms of every 10.
/// Threads that it starts go as any other.
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
    // SAFETY: reads `attributes`, whose size it holds; concerns the calling thread only.
    let is_done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) } == 0;
    is_done || prefer()
}

/// Lets every other thread of its session go before this one, by the last priority of its kind: it always gets something.
pub fn defer() {
    // SAFETY: concerns the calling thread only, which 0 names.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
}

/// Lets every other thread go before this process, which has one: by the last priority of its kind, so that it always gets
/// something; and in a session of its own, which has the last as well: where the kernel shares processors among sessions first
/// (`sched_autogroup_enabled`) a priority holds within one only, and an idle one of two sessions gets half. Control groups
/// have weights of their own.
pub fn defer_process() {
    defer();
    // SAFETY: no arguments; fails for the leader of a process group, and then all is as it was.
    let is_alone = unsafe { libc::setsid() } >= 0;
    if is_alone {
        // Of the session, which is this process.
        let _ = std::fs::write("/proc/self/autogroup", "19");
    }
}

/// Waits a moment (50 us and what the timer adds) for a thread that may have a lower priority than this one.
pub fn pause() {
    // SAFETY: no arguments.
    unsafe { libc::sched_yield() };
    let moment = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    // A plain system call, not a point where a thread can be cancelled.
    // SAFETY: reads `moment`.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const moment, std::ptr::null_mut::<libc::timespec>()) };
}
