//! Views: ranges of a cached file as plain memory.
//!
//! ```text
//!   faulting thread, in the fault handler
//!     registry: finds the window of the address
//!     pieces: claims the entry of the page,
//!             finds and pins the folio in memory,
//!             maps it, keeps the pin in the entry
//!     fill:   if that fails (the folio is missing, must be made dirty, or there are too many mappings):
//!             on a larger stack, reads the page into memory, maps it
//!     access is retried, or SIGBUS
//! ```
//!
//! A *window* is the reserved address range of one view. An *entry* is a word for each software page of a window: it is
//! empty, or names the folio that it has pinned, which may be mapped there. An entry with a folio owns a pin of it. So
//! all rules about pinned folios hold for mapped ones, and code that needs a folio without pins first unmaps it from
//! all windows ([`File::unmap_from_views`]).
//!
//! An entry is claimed before the folio is looked up. A thread that removes a folio from the file does so before it
//! looks at the entries. So either it finds the entry with the folio, or the look-up finds the folio removed.
//!
//! Writes through a view: before a folio is mapped writable, it is made dirty. Writeback, eviction, splits and
//! collapses freeze a folio, which needs a folio without pins. So they unmap it first, and the next write maps it
//! again. A view with private writes copies a page at its first write ([`private`]).

mod entry;
mod fill;
mod handle;
mod locked;
mod pieces;
mod private;
pub(crate) mod registry;
#[cfg(all(test, shuttle))]
mod shuttle_tests;
mod window;

use crate::folio::word::{State, Word};
use crate::mapping::File;
use locked::LockedRanges;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{AtomicU32, Guarded};
use pagemill_sys::fault::AllSignalsBlocked;
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use window::{Window, Writes};

pub use handle::{Bytes, Prefaulted, PrivateView, View, ViewMut};
pub(crate) use pieces::Unmap;

const BORROWED: Error = Error::Busy { what: "bytes of the file are borrowed (View::bytes)" };

/// The views of one file, and its locked ranges. Most files have none, so the lists are created with the first.
#[derive(Default)]
pub(crate) struct Views(OnceLock<Box<Windows>>);

/// The windows of one file's views.
#[derive(Default)]
struct Windows {
    count: AtomicU32,
    /// Number of windows whose writes change the file.
    writable: AtomicU32,
    /// Whether there was such a window.
    were_writable: AtomicBool,
    /// Number of locked ranges ([`View::lock`], [`Mapping::lock`](crate::mapping::Mapping::lock)).
    locked: AtomicU32,
    /// The ranges that `Mapping::lock` has locked.
    locked_by_file: LockedRanges,
    /// Number of guards that borrow bytes of the file ([`View::bytes`]). Increased under the file's gate, held
    /// exclusively.
    borrowed: AtomicU32,
    list: Guarded<Vec<Arc<Window>>>,
}

impl Views {
    /// Returns whether the file has views.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.get().is_none_or(|windows| windows.count.load(SeqCst) == 0)
    }

    /// Returns whether writes through a view may have changed the file.
    #[inline]
    pub fn were_writable(&self) -> bool {
        self.0.get().is_some_and(|windows| windows.were_writable.load(SeqCst))
    }

    /// Returns whether writes through a view can change the file.
    fn are_writable(&self) -> bool {
        self.0.get().is_some_and(|windows| windows.writable.load(SeqCst) > 0)
    }

    /// Returns whether a guard borrows bytes of the file, so that the file must not change.
    #[inline]
    fn are_borrowed(&self) -> bool {
        self.0.get().is_some_and(|windows| windows.borrowed.load(SeqCst) > 0)
    }

    fn add(&self, window: &Arc<Window>) {
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        let windows = self.0.get_or_init(Box::default);
        windows.list.with(|list| list.push(window.clone()));
        windows.count.fetch_add(1, SeqCst);
        windows.writable.fetch_add(u32::from(window.writes == Writes::Shared), SeqCst);
        windows.were_writable.fetch_or(window.writes == Writes::Shared, SeqCst);
    }

    fn remove(&self, window: &Arc<Window>) {
        let _blocked = AllSignalsBlocked::begin();
        let Some(windows) = self.0.get() else { return };
        windows.list.with(|list| list.retain(|other| !Arc::ptr_eq(other, window)));
        windows.count.fetch_sub(1, SeqCst);
        windows.writable.fetch_sub(u32::from(window.writes == Writes::Shared), SeqCst);
    }
}

impl File {
    /// Unmaps pages of the file from all its views, and ends the pins of their entries. Accesses map the pages again.
    /// Waits for fault handlers that are mapping one of the pages.
    #[cold]
    pub(crate) fn unmap_from_views(&self, pages: Range<u64>, how: Unmap) {
        // A signal handler of the program could access a view, and would then wait for the lock.
        let _blocked = AllSignalsBlocked::begin();
        let Some(windows) = self.views.0.get() else { return };
        windows.list.with(|list| list.iter().for_each(|window| window.unmap(pages.clone(), how)));
    }

    /// Checks that no guard borrows bytes of the file, which must not change then. The caller holds the file's gate.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`].
    #[inline]
    pub(crate) fn check_not_borrowed(&self) -> Result<()> {
        if self.views.are_borrowed() { Err(BORROWED) } else { Ok(()) }
    }

    /// Zeroes the bytes behind the end of the file in its last OS page. Writes through a view may have changed them;
    /// the file must read zero there when it grows. The caller holds the file's gate exclusively.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the last folio is held for a second.
    pub(crate) fn zero_last_os_page(&self) -> Result<()> {
        let size_bytes = self.size_bytes();
        let end = size_bytes.next_multiple_of(mem::os_page_bytes() as u64);
        if size_bytes == end {
            return Ok(());
        }
        if let Some(place) = self.pin_page(self.index_of(size_bytes))? {
            let at = (size_bytes - self.offset_of(place.first)) as usize;
            self.pool.zero(place.number, at, (end - size_bytes) as usize);
            self.cache.unpin(place.number);
        }
        Ok(())
    }

    /// Freezes a live folio that begins at page `number` of the pool, for a change that needs a folio without pins.
    /// First unmaps the folio from the file's views.
    ///
    /// # Errors
    ///
    /// The current state, see [`Word::freeze`](crate::folio::word::Word::freeze).
    #[inline]
    pub(crate) fn freeze(&self, number: u32) -> std::result::Result<State, State> {
        self.claim(number, Word::freeze)
    }

    /// As [`File::freeze`], but holds the folio.
    pub(crate) fn hold_folio(&self, number: u32) -> std::result::Result<State, State> {
        self.claim(number, Word::hold)
    }

    #[inline]
    fn claim(
        &self,
        number: u32,
        act: impl Fn(&Word) -> std::result::Result<State, State>,
    ) -> std::result::Result<State, State> {
        let frame = self.pool.frame(number);
        act(&frame.word).or_else(|seen| {
            let owner = frame.owner();
            if self.views.is_empty() || seen.pins() == 0 || owner.id != self.id {
                return Err(seen);
            }
            self.unmap_from_views(owner.index..owner.index + (1 << seen.order()), Unmap::UnlessKept);
            act(&frame.word)
        })
    }
}
