//! When nobody can be at what was taken away any more, nodes of an index or objects of a slab: epochs of our own.
//!
//! Not those of the default collector, which the program may use as well: retiring something gives back what is due, under
//! whatever lock, and destructors of the program must not run there.
//!
//! A fork child has none of its parent's threads, but their epochs: one that was reading would be waited for without end. So it begins
//! anew with a collector of its own, unless it was made under a guard, which has to keep what it keeps.
#![allow(unsafe_code)] // a collector behind a pointer

use crossbeam_epoch::{Collector, Guard, LocalHandle};
use pagemill_sys::process;
use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

/// Times that a child began anew, since the process whose collector is [`first`].
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that began anew last, or had the first collector; 0 while nobody has read.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// The collector of this generation, but for the first; null until somebody reads. Never freed.
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
                // SAFETY: made above, and nobody has seen it.
                drop(unsafe { Box::from_raw(made) });
                theirs
            }
        };
    }
    // SAFETY: from `Box::into_raw`, and never freed once it is there.
    unsafe { &*found }
}

thread_local! {
    /// Whether there is a [`HANDLE`]: looking at that would make one.
    static HAS_HANDLE: Cell<bool> = const { Cell::new(false) };
    static HANDLE: LocalHandle = {
        HAS_HANDLE.set(true);
        first().register()
    };
    /// Of a later generation, which one.
    static LATER_HANDLE: RefCell<Option<(u32, LocalHandle)>> = const { RefCell::new(None) };
}

/// For who reads: until the guard goes, nothing that he comes to is used for anything else.
///
/// Cost: some nanoseconds, no shared line written. Others wait for nothing; what was taken away piles up for as long as it is kept.
#[inline]
pub fn pin() -> Guard {
    match GENERATION.load(Relaxed) {
        // A thread that is ending may still read.
        0 => HANDLE.try_with(LocalHandle::pin).unwrap_or_else(|_| first().register().pin()),
        generation => pin_later(generation),
    }
}

#[cold]
fn pin_later(generation: u32) -> Guard {
    let pinned = LATER_HANDLE.try_with(|handle| {
        let mut handle = handle.borrow_mut();
        if handle.as_ref().is_none_or(|(of, _)| *of != generation) {
            // That of the parent stays in the parent's collector.
            std::mem::forget(handle.replace((generation, later().register())));
        }
        handle.as_ref().map(|(_, handle)| handle.pin())
    });
    pinned.ok().flatten().unwrap_or_else(|| later().register().pin())
}

/// In a fork child: nobody reads but this thread, if it does. Takes no memory. Counts once for each process, of however many Pagemills:
/// with the second one's call others may be reading.
pub(crate) fn begin_child() {
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
