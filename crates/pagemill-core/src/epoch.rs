//! Epoch-based reclamation for index nodes and slab objects: a retired object is freed once every pinned epoch is
//! newer.
//!
//! This module has its own collector. The default collector of the crate may be used by the program, too: retiring an
//! object frees what is due, under any lock, and destructors of the program must not run there.
//!
//! A fork child has none of its parent's threads but inherits their epochs. A thread that was pinned in the parent
//! would block reclamation forever. So the child begins anew with a new collector, unless the fork happened under a
//! guard, which must keep protecting what it protects.
#![allow(unsafe_code)] // a collector behind a pointer

use crossbeam_epoch::{Collector, LocalHandle};
use pagemill_sys::process;
use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// Keeps the objects that its thread reaches from being freed or reused until it is dropped. Only [`pin`] makes one: a
/// guard of another collector would protect nothing here.
///
/// Example: [`XArray`](crate::xarray::XArray).
pub struct Guard(crossbeam_epoch::Guard);

impl Guard {
    /// Runs `act` once all guards that exist now are dropped, on any thread and under any lock of this crate. So it
    /// must not run functions of programs.
    pub fn defer<R>(&self, act: impl FnOnce() -> R + Send + 'static) {
        self.0.defer(act);
    }

    /// Advances the epoch if possible, and runs the deferred functions that are due.
    pub fn flush(&self) {
        self.0.flush();
    }
}

/// Times that a child began anew, since the process whose collector is [`first`].
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that began anew last or created the first collector; 0 before the first read.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The collector of this generation, except the first; null before the first read. Never freed.
static LATER: AtomicPtr<Collector> = AtomicPtr::new(ptr::null_mut());

fn first() -> &'static Collector {
    static FIRST: OnceLock<Collector> = OnceLock::new();
    FIRST.get_or_init(|| {
        OWNER.store(process::id(), Relaxed);
        Collector::new()
    })
}

fn later() -> &'static Collector {
    let mut found = LATER.load(Acquire);
    if found.is_null() {
        let made = Box::into_raw(Box::new(Collector::new()));
        found = match LATER.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
            Ok(_) => made,
            Err(theirs) => {
                // SAFETY: made above; no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
    }
    // SAFETY: from `Box::into_raw`, and never freed once it is there.
    unsafe { &*found }
}

thread_local! {
    /// Whether [`HANDLE`] exists: accessing `HANDLE` would create it.
    static HAS_HANDLE: Cell<bool> = const { Cell::new(false) };
    static HANDLE: LocalHandle = {
        HAS_HANDLE.set(true);
        first().register()
    };
    /// The handle of a later generation, with its number.
    static LATER_HANDLE: RefCell<Option<(u32, LocalHandle)>> = const { RefCell::new(None) };
}

/// Pins the current thread: objects reachable while pinned are not reused until the guard is dropped.
///
/// Cost: some nanoseconds; writes no shared cache line. Other threads wait for nothing, but retired objects pile up for
/// as long as the guard is kept.
#[inline]
pub fn pin() -> Guard {
    match GENERATION.load(Relaxed) {
        // A thread that is ending may still read.
        0 => Guard(HANDLE.try_with(LocalHandle::pin).unwrap_or_else(|_| first().register().pin())),
        generation => pin_later(generation),
    }
}

#[cold]
fn pin_later(generation: u32) -> Guard {
    let pinned = LATER_HANDLE.try_with(|handle| {
        let mut handle = handle.borrow_mut();
        if handle.as_ref().is_none_or(|(of, _)| *of != generation) {
            // The parent's handle stays in the parent's collector.
            std::mem::forget(handle.replace((generation, later().register())));
        }
        handle.as_ref().map(|(_, handle)| handle.pin())
    });
    Guard(pinned.ok().flatten().unwrap_or_else(|| later().register().pin()))
}

/// Called in a fork child: no thread but this one can be reading. Takes no memory. Has an effect once per process,
/// however many Pagemills call it: by the second call other threads may be reading.
pub fn begin_child() {
    let (owner, own) = (OWNER.load(Relaxed), process::id());
    if owner == 0 || owner == own {
        return;
    }
    OWNER.store(own, Relaxed);
    let is_reading = match GENERATION.load(Relaxed) {
        0 => HAS_HANDLE.get() && HANDLE.try_with(LocalHandle::is_pinned).unwrap_or(true),
        generation => {
            let is_pinned = |(of, handle): &(u32, LocalHandle)| *of == generation && handle.is_pinned();
            LATER_HANDLE.try_with(|handle| handle.borrow().as_ref().is_some_and(is_pinned)).unwrap_or(true)
        }
    };
    if !is_reading {
        LATER.store(ptr::null_mut(), Relaxed);
        GENERATION.fetch_add(1, Relaxed);
    }
}
