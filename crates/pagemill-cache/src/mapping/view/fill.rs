//! Fills: what the fault handler does for a page that is not in memory, in the faulting thread, on a stack of its own.
//!
//! The handler of an access to a view interrupts that access and nothing else. So it may do what a function that is
//! called in its place may do: allocate, lock, wait for the store. Two limits remain. The signal handler's stack may be
//! too small for stores and policies of the program. And all signals stay blocked, so a store must not access views:
//! the fault would end the process.

use super::pieces::Access;
use super::window::Window;
use crate::mapping::TimedWait;
use pagemill_core::callback;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_sys::fault::Verdict;
use pagemill_sys::mem;
use pagemill_sys::stack::Stacks;

/// Maximum number of fills at a time. Further faulting threads try again.
const MAX_FILLS: usize = 128;

/// Size of the stack of a fill, which calls stores and policies of the program.
const STACK_BYTES: usize = 1 << 20;

static STACKS: Stacks<MAX_FILLS, STACK_BYTES> = Stacks::new();

/// Makes all stacks free in a fork child.
pub(super) fn begin_child() {
    STACKS.begin_child();
}

/// Reads the page at `addr` into memory, and maps it for an access. Returns [`Verdict::Purged`] behind the end of the
/// file and after an error. Runs in a signal handler.
pub(super) fn fill(window: &Window, addr: usize, access: Access) -> Verdict {
    let (offset, size_bytes) = (window.offset_at(addr), window.file.size_bytes());
    if offset >= size_bytes.next_multiple_of(mem::os_page_bytes() as u64) {
        return Verdict::Purged;
    }
    let fill = || {
        // A panic of a store or policy counts as a failure.
        let result = callback::catch_panic(|| fill_within_wait(window, window.page_at(addr), access));
        match result {
            Some(Ok(_)) => {
                stats::add(Counter::ViewFills, 1);
                Verdict::Resolved
            }
            // Another thread holds the page for long, so the access is tried again.
            Some(Err(Error::Busy { .. })) => Verdict::Again,
            Some(Err(Error::PastEnd { .. })) | None => Verdict::Purged,
            Some(Err(error)) => {
                window.error.with(|latest| *latest = Some(error));
                Verdict::Purged
            }
        }
    };
    match STACKS.call(fill) {
        Ok(verdict) => verdict.unwrap_or(Verdict::Again),
        Err(cause) => {
            window.error.with(|latest| *latest = Some(Error::System { doing: "mapping a stack", cause }));
            Verdict::Purged
        }
    }
}

/// As [`Window::fill`]. If other accesses use all pages of a cache that can evict, waits for a page as for a folio that
/// is in use: an access cannot be repeated by the program, unlike a call.
fn fill_within_wait(window: &Window, page: u64, access: Access) -> Result<()> {
    let mut timed_wait = TimedWait::new();
    loop {
        match window.fill(page, access) {
            Err(error @ Error::NoMemory { .. }) if window.file.store.is_some() => {
                timed_wait.wait().map_err(|_| error)?;
            }
            result => return result.map(drop),
        }
    }
}
