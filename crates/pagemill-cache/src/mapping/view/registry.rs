//! The table of all windows of the process, in which the fault handler finds the window of an address.
#![allow(unsafe_code)] // references to windows that the table names

use super::pieces::{Access, Mapped, Mapper};
use super::window::{Window, Writes};
use super::{entry, fill};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::pause;
#[cfg(shuttle)]
use pagemill_core::sync::{AtomicU32, AtomicUsize};
use pagemill_sys::fault::{self, Fault, Verdict};
use pagemill_sys::{maps, window as sys_window};
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed, Ordering::SeqCst};
#[cfg(not(shuttle))]
use std::sync::atomic::{AtomicU32, AtomicUsize};

/// Maximum number of views of a process.
const MAX_VIEWS: usize = 256;

/// A place of the table.
pub(super) struct Slot {
    /// Begin and end of the window's addresses; the end is 0 while the place is unused.
    start: AtomicUsize,
    end: AtomicUsize,
    window: AtomicPtr<Window>,
    /// Number of threads that use the window. While it is above 0, the window is not dropped.
    users: AtomicU32,
    /// Whether a view has the place, which it may still be filling.
    is_taken: AtomicU32,
}

static SLOTS: [Slot; MAX_VIEWS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        window: AtomicPtr::new(ptr::null_mut()),
        users: AtomicU32::new(0),
        is_taken: AtomicU32::new(0),
    }
}; MAX_VIEWS];

/// Number of places, from the first on, that were ever used.
static USED_SLOTS: AtomicUsize = AtomicUsize::new(0);

/// Adds a window to the table.
pub(super) fn add(window: &Arc<Window>) -> Result<()> {
    let is_free = |slot: &&Slot| slot.is_taken.compare_exchange(0, 1, SeqCst, Relaxed).is_ok();
    let at = SLOTS.iter().position(|slot| is_free(&slot)).ok_or(Error::TooMany { what: "views", most: MAX_VIEWS })?;
    let slot = &SLOTS[at];
    slot.window.store(Arc::as_ptr(window).cast_mut(), SeqCst);
    slot.start.store(window.addr, SeqCst);
    slot.end.store(window.addr + window.len_bytes, SeqCst);
    USED_SLOTS.fetch_max(at + 1, SeqCst);
    Ok(())
}

/// Removes a window from the table, and waits until no fault handler uses it.
pub(super) fn remove(window: &Arc<Window>) {
    let is_own = |slot: &&Slot| slot.window.load(SeqCst).cast_const() == Arc::as_ptr(window);
    let Some(slot) = SLOTS.iter().find(|slot| is_own(slot)) else { return };
    slot.end.store(0, SeqCst);
    while slot.users.load(SeqCst) > 0 {
        pause();
    }
    slot.window.store(ptr::null_mut(), SeqCst);
    slot.is_taken.store(0, SeqCst);
}

/// Removes all windows in a fork child, which does not have their memory. Where something was mapped in a window, the
/// child has no mapping. These addresses are reserved, so that accesses fault, and no other memory of the child is
/// mapped there. A child of a bare `clone` may have mapped memory there already, which must stay.
pub(crate) fn begin_child() {
    let slots = &SLOTS[..USED_SLOTS.load(SeqCst)];
    let reserve = |gap: Range<usize>| {
        for slot in slots {
            let (start, end) = (slot.start.load(SeqCst).max(gap.start), slot.end.load(SeqCst).min(gap.end));
            if start < end {
                sys_window::reserve_if_unmapped(start, end - start);
            }
        }
    };
    if slots.iter().any(|slot| slot.end.load(SeqCst) > 0) {
        // Fails only without `/proc`. Then the addresses stay free.
        let _ = maps::for_each_gap(reserve);
    }
    for slot in slots {
        slot.end.store(0, SeqCst);
        slot.window.store(ptr::null_mut(), SeqCst);
        slot.users.store(0, SeqCst);
        slot.is_taken.store(0, SeqCst);
    }
    fill::begin_child();
    entry::begin_child();
}

/// Unmaps some `count` pieces of each window, so that other pages can be mapped.
pub(super) fn unmap_some(count: usize) {
    for slot in &SLOTS[..USED_SLOTS.load(SeqCst)] {
        slot.users.fetch_add(1, SeqCst);
        if slot.end.load(SeqCst) > 0 {
            // SAFETY: the window is in the table, so it is not dropped while this thread is counted.
            unsafe { &*slot.window.load(SeqCst) }.unmap_next(count);
        }
        slot.users.fetch_sub(1, SeqCst);
    }
}

/// Decides about a fault: maps the page if the address lies in a view. Runs in a signal handler.
pub(super) fn resolve_fault(fault: &Fault) -> Verdict {
    let addr = fault.addr;
    let has_addr = |slot: &&Slot| addr < slot.end.load(SeqCst) && addr >= slot.start.load(SeqCst);
    for slot in SLOTS[..USED_SLOTS.load(SeqCst)].iter().filter(has_addr) {
        slot.users.fetch_add(1, SeqCst);
        // The view may have been dropped before this handler was counted.
        let verdict = has_addr(&slot).then(|| {
            // SAFETY: the window is in the table, so it is not dropped while this handler is counted.
            let window = unsafe { &*slot.window.load(SeqCst) };
            resolve(window, addr, fault.access)
        });
        slot.users.fetch_sub(1, SeqCst);
        if let Some(verdict) = verdict {
            return verdict;
        }
    }
    Verdict::Program
}

fn resolve(window: &Window, addr: usize, access: Option<fault::Access>) -> Verdict {
    let access = match access {
        Some(fault::Access::Fetch) => return Verdict::Program,
        Some(fault::Access::Read) => Access::Read,
        Some(fault::Access::Write) => Access::Write,
        // Where the kind of access is unknown, an access that fails on a readable page is a write.
        None if fault::is_readable(addr) => Access::Write,
        None => Access::Read,
    };
    if access == Access::Write && window.writes == Writes::Refused {
        return Verdict::Program;
    }
    stats::add(Counter::ViewFaults, 1);
    let verdict = match window.try_map(window.offset_at(addr), access, Mapper::Handler) {
        Mapped::Yes(_) => Verdict::Resolved,
        Mapped::Busy => Verdict::Again,
        Mapped::No | Mapped::Failed(_) => fill::fill(window, addr, access),
    };
    if verdict == Verdict::Purged {
        stats::add(Counter::ViewFaultsFailed, 1);
    }
    verdict
}
