//! Fork handlers: the order in which locks are taken, and the initial state of a child.
//!
//! All handlers are registered as one when the library starts. jemalloc is kept from registering its own (build.rs): it
//! starts late, and handlers that the program registered earlier would run inside its locks. The order:
//!
//! | before, in the parent | after, on both sides |
//! |---|---|
//! | growth: none under way, none begins | ours released |
//! | no purge of jemalloc's under way | jemalloc's released |
//! | jemalloc's locks | purges |
//! | ours | growth |
#![allow(unsafe_code)] // fork handlers

use crate::{libc_fallback, small, start};
use pagemill_core::stats;
use pagemill_core::sync::Lock;
use pagemill_sys::{mem, process};
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

type Handler = Option<unsafe extern "C" fn()>;

type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// Finds the C library's `__register_atfork`.
///
/// It has one version for each processor, the first that had it. Looked up by version no memory is allocated.
fn register_of_c_library() -> Option<Register> {
    const VERSION: &CStr = if cfg!(target_arch = "x86_64") { c"GLIBC_2.3.2" } else { c"GLIBC_2.17" };
    // SAFETY: two C strings; looks among what is loaded.
    let address = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"__register_atfork".as_ptr(), VERSION.as_ptr()) } as usize;
    // SAFETY: 0, or the address of a function of this type.
    unsafe { std::mem::transmute::<usize, Option<Register>>(address) }
}

/// The registration of this library's own handlers: once in a process and its children.
static REGISTRATION: Lock = Lock::new();
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers what happens around a fork, unless that is done.
pub fn register() {
    if !IS_REGISTERED.load(Acquire)
        && let Some(register_handlers) = register_of_c_library()
    {
        register_with(register_handlers);
    }
}

fn register_with(register_handlers: Register) {
    let _guard = REGISTRATION.lock();
    if !IS_REGISTERED.load(Relaxed) {
        // SAFETY: functions of this library, which stays (build.rs); so no library is named whose end would end them.
        // It allocates from its 49th caller on only.
        unsafe { register_handlers(Some(before), Some(in_parent), Some(in_child), ptr::null_mut()) };
        IS_REGISTERED.store(true, Release);
    }
}

/// Registers handlers of the program or of one of its libraries (`library`), behind this library's own.
///
/// # Safety
///
/// As `pthread_atfork`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> c_int {
    let Some(register_handlers) = register_of_c_library() else { return libc::ENOMEM };
    register_with(register_handlers);
    // SAFETY: the caller's promise.
    unsafe { register_handlers(prepare, parent, child, library) }
}

/// jemalloc's own handlers, indexed by [`Moment`]; 0 until it has started.
static OF_JEMALLOC: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

#[derive(Clone, Copy)]
enum Moment {
    Before,
    InParent,
    InChild,
}

/// Replaces `pthread_atfork` in this library, where only jemalloc calls it.
///
/// # Safety
///
/// As `pthread_atfork`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __wrap_pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int {
    for (place, handler) in OF_JEMALLOC.iter().zip([prepare, parent, child]) {
        place.store(handler.map_or(0, |handler| handler as usize), Release);
    }
    0
}

fn call_jemallocs(moment: Moment) {
    let handler = OF_JEMALLOC[moment as usize].load(Acquire);
    if handler != 0 {
        // SAFETY: the handler that jemalloc registered for this moment.
        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn()>(handler)() };
    }
}

/// Whether the handlers of a grown process were run before the fork that is under way.
static HAS_LOCKED: AtomicBool = AtomicBool::new(false);

extern "C" fn before() {
    start::GROWTH.acquire();
    if let Some(pagemill) = start::pagemill() {
        small::before_fork();
        call_jemallocs(Moment::Before);
        pagemill.control.acquire_for_fork();
        // SAFETY: `after` follows on this thread, on both sides.
        unsafe { pagemill.before_fork() };
        HAS_LOCKED.store(true, Relaxed);
    }
}

fn after(moment: Moment) {
    if HAS_LOCKED.swap(false, Relaxed)
        && let Some(pagemill) = start::pagemill()
    {
        // SAFETY: `before` has taken the locks (`HAS_LOCKED`).
        unsafe { pagemill.after_fork() };
        pagemill.control.release_after_fork();
        call_jemallocs(moment);
        small::after_fork();
    }
    start::GROWTH.release();
}

extern "C" fn in_parent() {
    after(Moment::InParent);
}

extern "C" fn in_child() {
    after(Moment::InChild);
    if !MARK.load(Relaxed).is_null() {
        mark_process();
    }
    begin_child();
}

/// A page that reads zero in a child: the kernel wipes it, however the child was created.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Marks this process as known.
pub fn mark_process() {
    let page_bytes = pagemill_core::units::os_page_bytes();
    let known = MARK.load(Acquire);
    let page = match known.is_null() {
        false => known,
        true => match mem::map_sparse(page_bytes, page_bytes) {
            Ok(page) if mem::wipe_on_fork(page) => page as *mut AtomicU32,
            _ => return,
        },
    };
    // SAFETY: a page that stays mapped, large enough and aligned.
    unsafe { (*page).store(1, Relaxed) };
    // Store it only after marking: another thread in between would take this for a new process.
    MARK.store(page, Release);
}

/// A child made by a bare `clone` ran no fork handlers: it starts its own account at its first slow call.
pub fn notice_raw_clone() {
    // SAFETY: null, or a page that stays mapped.
    if let Some(mark) = unsafe { MARK.load(Acquire).as_ref() }
        && mark.load(Relaxed) == 0
        && mark.swap(1, Relaxed) == 0
    {
        begin_child();
    }
}

/// Runs in a child process: existing memory is the parent's, and everything is counted anew.
fn begin_child() {
    process::forget_own_identity();
    libc_fallback::forked();
    match (start::pagemill(), start::account()) {
        // SAFETY: a child that has this thread, at its first handler or its first call.
        (Some(pagemill), _) => unsafe { pagemill.begin_child(|| {}) },
        (None, Some(account)) => {
            // SAFETY: as above.
            unsafe { stats::detach_in_child() };
            account.forked(process::own_identity());
        }
        (None, None) => {}
    }
}
