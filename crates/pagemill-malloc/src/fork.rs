//! Fork handlers: acquire all locks in a fixed order before a fork, release them afterwards, and reset a child's state.
//!
//! The library registers one set of handlers when it starts, which also calls jemalloc's handlers. jemalloc must not
//! register its own (build.rs): it starts later, so handlers that the program registered before would run while
//! jemalloc holds its locks. The order of locks:
//!
//! | acquired before the fork | released after it, in both processes |
//! |---|---|
//! | the lock of growth (`globals::GROWTH_LOCK`) | Pagemill's locks |
//! | the lock of purges of jemalloc (`small`) | jemalloc's locks |
//! | jemalloc's locks | the lock of purges |
//! | Pagemill's locks | the lock of growth |
#![allow(unsafe_code)] // fork handlers

use crate::globals::assert_fatal;
use crate::{globals, libc_fallback, small};
use pagemill_core::stats;
use pagemill_core::sync::Lock;
use pagemill_sys::{mem, process};
use pagemill_volatile::Base;
use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// A fork handler; `None` for no handler.
type ForkHandler = Option<unsafe extern "C" fn()>;

/// The type of `__register_atfork`.
type RegisterAtforkFn = unsafe extern "C" fn(ForkHandler, ForkHandler, ForkHandler, *mut c_void) -> c_int;

/// Finds the C library's `__register_atfork`.
///
/// The symbol has one version for each processor architecture. A lookup by version allocates no memory.
fn find_register_atfork() -> Option<RegisterAtforkFn> {
    const SYMBOL_VERSION: &CStr = if cfg!(target_arch = "x86_64") { c"GLIBC_2.3.2" } else { c"GLIBC_2.17" };
    // SAFETY: the arguments are two C strings. The call searches the loaded libraries.
    let address =
        unsafe { libc::dlvsym(libc::RTLD_NEXT, c"__register_atfork".as_ptr(), SYMBOL_VERSION.as_ptr()) } as usize;
    // SAFETY: the address is 0 or that of a function of this type.
    unsafe { std::mem::transmute::<usize, Option<RegisterAtforkFn>>(address) }
}

/// Lock around the registration of this library's fork handlers. The handlers are registered once: a fork child
/// inherits them and [`IS_REGISTERED`], and does not register them again.
static REGISTRATION_LOCK: Lock = Lock::new();
/// Whether this library's fork handlers are registered.
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers this library's fork handlers, unless they are registered already.
pub fn register_fork_handlers() {
    if !IS_REGISTERED.load(Acquire)
        && let Some(register_handlers) = find_register_atfork()
    {
        register_own_handlers(register_handlers);
    }
}

/// Registers this library's fork handlers by calling `register_handlers`, unless they are registered already.
fn register_own_handlers(register_handlers: RegisterAtforkFn) {
    let _guard = REGISTRATION_LOCK.lock();
    if !IS_REGISTERED.load(Relaxed) {
        // SAFETY: the handlers are functions of this library, which is never unmapped (build.rs). So the last argument,
        // the library whose unloading would remove the handlers, is null. The call allocates only after 48
        // registrations.
        unsafe { register_handlers(Some(before_fork), Some(in_parent), Some(in_child), ptr::null_mut()) };
        IS_REGISTERED.store(true, Release);
    }
}

/// Registers fork handlers of the program or of one of its libraries, which `library` identifies. The handlers of this
/// library are registered first.
///
/// # Safety
///
/// As `pthread_atfork`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: ForkHandler,
    parent: ForkHandler,
    child: ForkHandler,
    library: *mut c_void,
) -> c_int {
    let Some(register_handlers) = find_register_atfork() else { return libc::ENOMEM };
    register_own_handlers(register_handlers);
    // SAFETY: the caller's promise.
    unsafe { register_handlers(prepare, parent, child, library) }
}

/// Addresses of jemalloc's fork handlers, indexed by [`ForkStage`]; 0 until jemalloc has started.
static JEMALLOC_HANDLERS: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

/// The stage of a fork at which a fork handler runs.
#[derive(Clone, Copy)]
enum ForkStage {
    Before,
    InParent,
    InChild,
}

/// Replaces `pthread_atfork` in this library, where only jemalloc calls it: stores the handlers instead of registering
/// them.
///
/// # Safety
///
/// As `pthread_atfork`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __wrap_pthread_atfork(prepare: ForkHandler, parent: ForkHandler, child: ForkHandler) -> c_int {
    for (place, handler) in JEMALLOC_HANDLERS.iter().zip([prepare, parent, child]) {
        place.store(handler.map_or(0, |handler| handler as usize), Release);
    }
    0
}

/// Calls the fork handler of jemalloc for this stage, if jemalloc has started.
fn call_jemalloc_handler(stage: ForkStage) {
    let handler = JEMALLOC_HANDLERS[stage as usize].load(Acquire);
    if handler != 0 {
        // SAFETY: this is the address of the function that jemalloc registered for this stage.
        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn()>(handler)() };
    }
}

/// Whether [`before_fork`] has acquired the locks of jemalloc and of Pagemill for the current fork.
static HAS_ACQUIRED_LOCKS: AtomicBool = AtomicBool::new(false);

/// The fork handler that runs before a fork: acquires all locks of this library.
extern "C" fn before_fork() {
    globals::GROWTH_LOCK.acquire();
    if let Some(pagemill) = globals::pagemill() {
        small::before_fork();
        call_jemalloc_handler(ForkStage::Before);
        // SAFETY: the next call is `after_fork` on this thread, both in the parent and in the child.
        unsafe { pagemill.instance.before_fork() };
        assert_fatal!(!HAS_ACQUIRED_LOCKS.swap(true, Relaxed));
    }
}

/// Releases the locks that [`before_fork`] has acquired, in both processes.
fn after_fork(stage: ForkStage) {
    let has_acquired_locks = HAS_ACQUIRED_LOCKS.swap(false, Relaxed);
    assert_fatal!(!has_acquired_locks || globals::pagemill().is_some());
    if has_acquired_locks && let Some(pagemill) = globals::pagemill() {
        // SAFETY: `before_fork` has acquired the locks (`HAS_ACQUIRED_LOCKS`).
        unsafe { pagemill.instance.after_fork() };
        call_jemalloc_handler(stage);
        small::after_fork();
    }
    globals::GROWTH_LOCK.release();
}

extern "C" fn in_parent() {
    after_fork(ForkStage::InParent);
}

extern "C" fn in_child() {
    after_fork(ForkStage::InChild);
    if !WIPED_PAGE.load(Relaxed).is_null() {
        arm_raw_clone_detection();
    }
    begin_child();
}

/// A page that the kernel zeroes in every child process (`MADV_WIPEONFORK`), also if no fork handlers ran.
static WIPED_PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Stores 1 in the page at [`WIPED_PAGE`], so that [`detect_raw_clone`] recognises a child made by a bare `clone`: the
/// child reads 0 there. The first call maps the page.
pub fn arm_raw_clone_detection() {
    let page_bytes = pagemill_core::units::os_page_bytes();
    let known = WIPED_PAGE.load(Acquire);
    let page = match known.is_null() {
        false => known,
        true => match mem::map_sparse(page_bytes, page_bytes) {
            Ok(page) if mem::wipe_on_fork(page) => page as *mut AtomicU32,
            _ => return,
        },
    };
    // SAFETY: the page is large enough and aligned, and is never unmapped.
    unsafe { (*page).store(1, Relaxed) };
    // Store the address last: a thread that found a page with 0 would treat this process as a new child.
    WIPED_PAGE.store(page, Release);
}

/// Detects that this process is a child made by a bare `clone`, which ran no fork handlers, and resets the child's
/// state. Slow paths of malloc call this function.
pub fn detect_raw_clone() {
    // SAFETY: the pointer is null or refers to a page that is never unmapped.
    if let Some(mark) = unsafe { WIPED_PAGE.load(Acquire).as_ref() }
        && mark.load(Relaxed) == 0
        && mark.swap(1, Relaxed) == 0
    {
        begin_child();
    }
}

/// As [`globals::pagemill`], but first detects whether this process is a child made by a bare `clone`.
pub fn pagemill_of_process() -> Option<&'static Base> {
    globals::pagemill().inspect(|_| detect_raw_clone())
}

/// Resets the state of this library in a child process: existing memory is charged to the parent, and all counters
/// start at 0.
fn begin_child() {
    process::forget_own_identity();
    libc_fallback::begin_child();
    match (globals::pagemill(), globals::account()) {
        // SAFETY: this is a new child with one thread, and it holds no lock of Pagemill.
        (Some(pagemill), _) => unsafe { pagemill.instance.begin_child() },
        (None, Some(account)) => {
            // SAFETY: as above.
            unsafe { stats::detach_in_child() };
            account.begin_child(process::own_identity());
        }
        (None, None) => {}
    }
}
