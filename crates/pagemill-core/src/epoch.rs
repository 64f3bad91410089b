//! Epoch-based reclamation for index nodes and slab objects: a retired object is freed once every pinned epoch is
//! newer.
//!
//! This module has its own collector, because the program may use the default collector of `crossbeam_epoch`. Retiring
//! an object also frees older objects whose epoch has passed, and this happens under locks of this crate. Destructors
//! of the program must not run under such locks.
//!
//! A fork child has none of its parent's threads but inherits their pinned epochs, which would block reclamation
//! forever. So the child starts with a new collector. The exception is a thread that forks while it holds a guard: the
//! child keeps the old collector, because that guard must stay valid.
#![allow(unsafe_code)] // a collector behind a pointer

use crossbeam_epoch::{Collector, LocalHandle};
use pagemill_sys::process;
use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// A guard of epoch-based reclamation. While a guard exists, objects that its thread can reach are not freed or reused.
///
/// Only [`pin`] creates guards, because a guard of another collector would not protect the objects of this crate.
///
/// Example: `XArray` of `pagemill-xarray`.
pub struct Guard(crossbeam_epoch::Guard);

/// Runs `act` once all guards that exist now are dropped. `act` may run on any thread and under any lock of Pagemill,
/// so it must not call functions of the program. This is a function and not a method, so that a crate can re-export
/// [`Guard`] without it.
pub fn defer<R>(guard: &Guard, act: impl FnOnce() -> R + Send + 'static) {
    guard.0.defer(act);
}

/// Advances the epoch if possible, and runs the functions of [`defer`] that are due.
pub fn flush(guard: &Guard) {
    guard.0.flush();
}

/// Generation of the current collector: 0 for the first one. Each fork child that starts a new collector increments it.
static COLLECTOR_GENERATION: AtomicU32 = AtomicU32::new(0);

/// Id of the process that created the current collector; 0 while there is no collector.
static OWNER_PID: AtomicU32 = AtomicU32::new(0);

/// The collector of the current generation, if that generation is not 0. Null before the generation's first [`pin`].
/// Never freed.
static LATER_GENERATION_COLLECTOR: AtomicPtr<Collector> = AtomicPtr::new(ptr::null_mut());

/// Returns the collector of generation 0; the first call creates it.
fn collector_of_first_generation() -> &'static Collector {
    static FIRST_COLLECTOR: OnceLock<Collector> = OnceLock::new();
    FIRST_COLLECTOR.get_or_init(|| {
        OWNER_PID.store(process::id(), Relaxed);
        Collector::new()
    })
}

/// Returns the collector of the current generation, which is not 0; the first call in a generation creates it.
fn collector_of_later_generation() -> &'static Collector {
    debug_assert!(COLLECTOR_GENERATION.load(Relaxed) != 0, "generation 0 has the first collector");
    let mut found = LATER_GENERATION_COLLECTOR.load(Acquire);
    if found.is_null() {
        let made = Box::into_raw(Box::new(Collector::new()));
        found = match LATER_GENERATION_COLLECTOR.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
            Ok(_) => made,
            Err(theirs) => {
                // SAFETY: created above; no other thread has a reference to it.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
    }
    // SAFETY: the pointer is from `Box::into_raw`, and a collector that was stored is never freed.
    unsafe { &*found }
}

thread_local! {
    /// Whether [`FIRST_GENERATION_HANDLE`] exists in this thread. Tested before code that must not create the handle.
    static HAS_HANDLE: Cell<bool> = const { Cell::new(false) };
    /// This thread's handle of the collector of generation 0.
    static FIRST_GENERATION_HANDLE: LocalHandle = {
        HAS_HANDLE.set(true);
        collector_of_first_generation().register()
    };
    /// This thread's handle of the collector of a later generation, with the number of that generation.
    static LATER_GENERATION_HANDLE: RefCell<Option<(u32, LocalHandle)>> = const { RefCell::new(None) };
}

/// Pins the current thread: objects reachable while pinned are not reused until the guard is dropped.
///
/// Cost: some nanoseconds; writes no shared cache line. A guard blocks no other thread, but no retired object is freed
/// while it exists.
#[inline]
pub fn pin() -> Guard {
    match COLLECTOR_GENERATION.load(Relaxed) {
        // The thread-local handle is gone while a thread ends. Destructors may still read, through a new handle.
        0 => Guard(
            FIRST_GENERATION_HANDLE
                .try_with(LocalHandle::pin)
                .unwrap_or_else(|_| collector_of_first_generation().register().pin()),
        ),
        generation => pin_in_later_generation(generation),
    }
}

/// As [`pin`], for the collector of a generation after 0.
#[cold]
fn pin_in_later_generation(generation: u32) -> Guard {
    let pinned = LATER_GENERATION_HANDLE.try_with(|handle| {
        let mut handle = handle.borrow_mut();
        debug_assert!(handle.as_ref().is_none_or(|(of, _)| *of <= generation), "generations only grow");
        if handle.as_ref().is_none_or(|(of, _)| *of != generation) {
            // Dropping the parent's handle would access the parent's collector, so the handle is leaked.
            std::mem::forget(handle.replace((generation, collector_of_later_generation().register())));
        }
        handle.as_ref().map(|(_, handle)| handle.pin())
    });
    Guard(pinned.ok().flatten().unwrap_or_else(|| collector_of_later_generation().register().pin()))
}

/// Starts a new collector in a fork child, unless its only thread is pinned. Allocates nothing.
///
/// The page caches of each instance in the process call this. Only the first call has an effect: by the time of a
/// second call, other threads may exist and be pinned.
///
/// # Safety
///
/// Called in a fork child, while no other thread of it exists.
pub unsafe fn begin_child() {
    let (owner, own) = (OWNER_PID.load(Relaxed), process::id());
    if owner == 0 || owner == own {
        return;
    }
    OWNER_PID.store(own, Relaxed);
    let is_reading = match COLLECTOR_GENERATION.load(Relaxed) {
        0 => HAS_HANDLE.get() && FIRST_GENERATION_HANDLE.try_with(LocalHandle::is_pinned).unwrap_or(true),
        generation => {
            let is_pinned = |(of, handle): &(u32, LocalHandle)| *of == generation && handle.is_pinned();
            LATER_GENERATION_HANDLE.try_with(|handle| handle.borrow().as_ref().is_some_and(is_pinned)).unwrap_or(true)
        }
    };
    if !is_reading {
        LATER_GENERATION_COLLECTOR.store(ptr::null_mut(), Relaxed);
        COLLECTOR_GENERATION.fetch_add(1, Relaxed);
    }
}
