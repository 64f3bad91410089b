//! Views: ranges of a cached file as plain memory.
//!
//! ```text
//!   faulting thread: fault handler                       fill thread
//!     registry: finds the window of the address
//!     window: claims the entry of the page
//!             finds and pins the folio in memory,
//!             maps it, keeps the pin in the entry
//!     folio missing, or anything else: fill request -->  reads the page into memory, maps it
//!     access is retried, or SIGBUS       <-------------  wakes the faulting thread
//! ```
//!
//! A *window* is the reserved address range of one view. An *entry* is a word for each software page of a window: it is
//! empty, or names the folio that is mapped there. An entry with a folio owns a pin of it. So all rules about pinned
//! folios hold for mapped ones, and code that needs a folio without pins first unmaps it from all windows
//! ([`File::unmap_from_views`]).
//!
//! An entry is claimed before the folio is looked up. A thread that removes a folio from the file does so before it
//! looks at the entries. So either it finds the entry with the folio, or the look-up finds the folio removed.

#![allow(unsafe_code)] // copies from windows

mod fill;
pub(crate) mod registry;
mod window;

use crate::folio::word::{State, Word};
use crate::mapping::{File, Mapping};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{AtomicU32, Guarded};
use pagemill_sys::fault::{self, AllSignalsBlocked};
use pagemill_sys::mem;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};
pub(crate) use window::Unmap;
use window::Window;

/// A range of a cached file as read-only memory, made by [`Mapping::view`].
///
/// The bytes are read into memory when they are first accessed. Writes to the file by [`Mapping::write_at`] are visible
/// in the view at once, because both use the same memory. Other threads may change the bytes at any time, so they are
/// copied, never borrowed.
///
/// An access raises `SIGBUS` if the bytes lie behind the end of the file ([`Mapping::truncate`]), or if the store cannot
/// read them; [`View::take_error`] then returns the error. A system call on bytes that are not in memory fails with
/// `EFAULT`; [`View::prefault`] prevents this.
///
/// A view keeps its file open. A fork child does not have the memory of its parent's views.
///
/// ```
/// use pagemill::PageCache;
/// use pagemill::cache::Source;
///
/// let cache = PageCache::builder("tables").limit(64 << 20).source(Source::Shared).build()?;
/// let file = cache.create()?;
/// file.write_at(b"header", 0)?;
/// file.write_at(b"rows", 1 << 20)?;
/// let view = file.view(0..(1 << 20) + 4096)?;
/// let mut bytes = [0; 4];
/// view.read_at(&mut bytes, 1 << 20);
/// assert_eq!(&bytes, b"rows");
/// file.write_at(b"ROWS", 1 << 20)?;
/// view.read_at(&mut bytes, 1 << 20);
/// assert_eq!(&bytes, b"ROWS");
/// let prefaulted = view.prefault(0..4096)?; // until its drop, system calls can read these bytes
/// # drop(prefaulted);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct View {
    window: Arc<Window>,
    /// Keeps the file open.
    _file: Mapping,
}

impl Mapping {
    /// Makes a range of the file accessible as memory. `range` begins at a multiple of 4 KiB, and may end behind the end
    /// of the file, which may grow. The file's cache must have shared memory ([`Source::Shared`]).
    ///
    /// The first access to a page calls the fault handler of Pagemill, which it installs for `SIGSEGV`. Faults at other
    /// addresses are passed to the handler that the program has installed before. A handler that the program installs
    /// later must call [`handle_fault`](pagemill_sys::fault::handle) first.
    ///
    /// Cost: some system calls. An access to a page that is in memory, but not mapped yet, takes some microseconds.
    ///
    /// [`Source::Shared`]: crate::mapping::Source::Shared
    ///
    /// # Errors
    ///
    /// [`Error::BadRange`] for an empty range, or one that begins elsewhere. [`Error::BadOffset`] past 2^63.
    /// [`Error::Unsupported`] if the cache has no shared memory. [`Error::NoAddresses`]. [`Error::TooMany`] views.
    /// [`Error::System`] if the system refuses the fault handler or a thread.
    pub fn view(&self, range: Range<u64>) -> Result<View> {
        let file = &self.0;
        let len_bytes = range.end.saturating_sub(range.start);
        file.check(range.start, len_bytes)?;
        if len_bytes == 0 || !range.start.is_multiple_of(mem::os_page_bytes() as u64) {
            return Err(Error::BadRange { addr: range.start as usize, len_bytes: len_bytes as usize });
        }
        if file.pool.memory_file().is_none() {
            return Err(Error::Unsupported { what: "views need a cache with shared memory (Source::Shared)" });
        }
        fill::start_threads()?;
        fault::install(registry::resolve_fault).map_err(Error::system("installing the fault handler"))?;
        let window = Arc::new(Window::new(file.clone(), range)?);
        registry::add(&window)?;
        file.views.add(&window);
        file.pool.view_count.fetch_add(1, SeqCst);
        Ok(View { window, _file: self.clone() })
    }
}

impl View {
    /// Returns the address of the first byte. The addresses stay reserved until the view is dropped.
    pub fn as_ptr(&self) -> *const u8 {
        ptr::with_exposed_provenance(self.window.addr)
    }

    pub fn len_bytes(&self) -> usize {
        self.window.len_bytes
    }

    /// Copies the bytes from offset `at` of the view on into `to`.
    ///
    /// # Panics
    ///
    /// If the range does not lie in the view.
    pub fn read_at(&self, to: &mut [u8], at: usize) {
        let len_bytes = self.window.len_bytes;
        let is_inside = at.checked_add(to.len()).is_some_and(|end| end <= len_bytes);
        assert!(is_inside, "{} bytes at {at} are not in a view of {len_bytes}", to.len());
        // SAFETY: the range lies in the window, where the fault handler maps pages before the access continues.
        unsafe { crate::folio::copy(to.as_mut_ptr(), self.as_ptr().add(at), to.len()) };
    }

    /// Reads a range into memory and maps it. While the result exists, the pages are pinned and stay mapped, so addresses
    /// of the range can be passed to system calls. Only a truncation or `punch_hole` unmaps pages of the range.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] if the range does not lie in the view. Otherwise see [`Mapping::pin`].
    pub fn prefault(&self, range: Range<usize>) -> Result<Prefaulted<'_>> {
        if range.start > range.end || range.end > self.window.len_bytes {
            return Err(Error::PastEnd { offset: range.end as u64, size_bytes: self.window.len_bytes as u64 });
        }
        let pages = self.window.pages_of(range);
        let prefaulted = Prefaulted { view: self, pages: pages.clone() };
        {
            // As in `File::unmap_from_views`.
            let _blocked = AllSignalsBlocked::begin();
            self.window.kept.with(|kept| kept.push(pages.clone()));
        }
        let mut page = pages.start;
        while page < pages.end {
            page = self.window.fill(page)?;
        }
        Ok(prefaulted)
    }

    /// Returns, once, the latest error for which an access got a `SIGBUS`; `None` if there was none, or if the access was
    /// behind the end of the file.
    pub fn take_error(&self) -> Option<Error> {
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        self.window.error.with(Option::take)
    }
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (addr, len_bytes) = (self.window.addr, self.window.len_bytes);
        f.debug_struct("View").field("addr", &addr).field("len_bytes", &len_bytes).finish_non_exhaustive()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // In a fork child the window is not mapped, and threads of the parent may hold locks forever.
        if self.window.file.cache.check().is_err() {
            return;
        }
        registry::remove(&self.window);
        self.window.file.views.remove(&self.window);
        self.window.file.pool.view_count.fetch_sub(1, SeqCst);
        self.window.unmap_all();
    }
}

/// Pages of a view that are pinned and mapped ([`View::prefault`]), until this is dropped.
///
/// Example: [`View`].
#[derive(Debug)]
#[must_use = "the pages can be unmapped when this is dropped"]
pub struct Prefaulted<'view> {
    view: &'view View,
    pages: Range<u64>,
}

impl Drop for Prefaulted<'_> {
    fn drop(&mut self) {
        if self.view.window.file.cache.check().is_err() {
            return;
        }
        let _blocked = AllSignalsBlocked::begin();
        self.view.window.kept.with(|kept| {
            if let Some(at) = kept.iter().position(|pages| *pages == self.pages) {
                kept.swap_remove(at);
            }
        });
    }
}

/// The views of one file. Most files have none, so the list is created with the first.
#[derive(Default)]
pub(crate) struct Views(OnceLock<Box<Windows>>);

/// The windows of one file's views.
#[derive(Default)]
struct Windows {
    count: AtomicU32,
    list: Guarded<Vec<Arc<Window>>>,
}

impl Views {
    /// Returns whether the file has views.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.get().is_none_or(|windows| windows.count.load(SeqCst) == 0)
    }

    fn add(&self, window: &Arc<Window>) {
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        let windows = self.0.get_or_init(Box::default);
        windows.list.with(|list| list.push(window.clone()));
        windows.count.fetch_add(1, SeqCst);
    }

    fn remove(&self, window: &Arc<Window>) {
        let _blocked = AllSignalsBlocked::begin();
        let Some(windows) = self.0.get() else { return };
        windows.list.with(|list| list.retain(|other| !Arc::ptr_eq(other, window)));
        windows.count.fetch_sub(1, SeqCst);
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

    /// Freezes a live folio that begins at page `number` of the pool, for a change that needs a folio without pins. First
    /// unmaps the folio from the file's views.
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
