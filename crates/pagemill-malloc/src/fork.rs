//! Around `fork`: whose locks are taken in which order, and what a child begins with.
//!
//! All handlers are registered as one, when the library's life begins. Those of
//! jemalloc are kept from registering themselves (build.rs): it starts late, and
//! what the program registered before would run inside its locks. In order:
//!
//! | before, in the parent | after, on both sides |
//! |---|---|
//! | growth: none under way, none begins | ours released |
//! | no purge of jemalloc's under way | jemalloc's released |
//! | jemalloc's locks | purges |
//! | ours | growth |
#![allow(unsafe_code)] // fork handlers

use crate::{small, start, young};
use pagemill::stats;
use pagemill_sys::{mem, process};
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

type Handler = Option<unsafe extern "C" fn()>;

unsafe extern "C" {
    /// The C library's `pthread_atfork`, under the name the linker gives it (`--wrap`).
    fn __real_pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
}

/// jemalloc's own handlers, by [`Moment`]; 0 until it has started.
static OF_JEMALLOC: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

#[derive(Clone, Copy)]
enum Moment {
    Before,
    InParent,
    InChild,
}

/// Takes the place of `pthread_atfork` in this library, where only jemalloc calls it.
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
        // SAFETY: what jemalloc gave for this moment.
        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn()>(handler)() };
    }
}

/// Registers what happens around a fork: once, as early as can be.
pub fn register() {
    // SAFETY: functions of this library, which stays (build.rs).
    unsafe { __real_pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
}

/// Whether the handlers of a grown process were run before the fork that is under way.
static HAS_LOCKED: AtomicBool = AtomicBool::new(false);

extern "C" fn before() {
    start::GROWTH.acquire();
    if let Some(pagemill) = start::pagemill() {
        small::before_fork();
        call_jemallocs(Moment::Before);
        pagemill.before_fork();
        HAS_LOCKED.store(true, Relaxed);
    }
}

fn after(moment: Moment) {
    if HAS_LOCKED.swap(false, Relaxed)
        && let Some(pagemill) = start::pagemill()
    {
        pagemill.after_fork();
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

/// A page that reads zero in a child: the kernel wipes it, however the child was made.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Marks this process as known.
pub fn mark_process() {
    let page_bytes = pagemill::units::os_page_bytes();
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
    // Not before it is marked: who looks in between would take this for a new process.
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

/// In a child process: what is held is the parent's, and everything is counted anew.
fn begin_child() {
    young::forked();
    match (start::pagemill(), start::account()) {
        (Some(pagemill), _) => pagemill.begin_child(),
        (None, Some(account)) => {
            stats::detach_in_child();
            account.forked(process::own_identity());
        }
        (None, None) => {}
    }
}
