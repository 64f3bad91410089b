//! The handles of views that programs use: [`View`], [`ViewMut`], [`PrivateView`], and the guard [`Prefaulted`].
#![allow(unsafe_code)] // copies from and to windows

use super::pieces::Access;
use super::window::{Window, Writes};
use super::{BORROWED, registry};
use crate::mapping::{Mapping, Pin};
use pagemill_core::error::{Error, Result};
use pagemill_sys::fault::{self, AllSignalsBlocked};
use pagemill_sys::mem;
use std::ops::{Deref, Range};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

/// A range of a cached file as memory that can be read, made by [`Mapping::view`]. [`ViewMut`] and [`PrivateView`] can
/// be written, and have all methods of this type.
///
/// The bytes are read into memory when they are first accessed. Writes to the file by [`Mapping::write_at`] are visible
/// in the view at once, because both use the same memory. Other threads may change the bytes at any time, so they are
/// copied, or accessed as atomic numbers, never borrowed.
///
/// An access raises `SIGBUS` if the bytes lie behind the end of the file ([`Mapping::truncate`]), if the store cannot
/// read them, or if there is no memory for them: a page of a hole needs memory, too, and in a file without a store
/// nothing can be evicted. [`View::take_error`] then returns the error. A write raises `SIGSEGV`. A system call on bytes that
/// are not in memory fails with `EFAULT`; [`View::prefault`] prevents this.
///
/// A view keeps its file open. docs/from-memmap2.md compares views with the crate memmap2.
///
/// A fork child does not have the memory of its parent's views: an access raises `SIGSEGV`. A child of a bare `clone`
/// runs no fork handlers, so other memory of the child can be mapped where its parent's views were. Such a child must
/// not access them.
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
    pub(super) window: Arc<Window>,
    /// Keeps the file open.
    file: Mapping,
}

/// A range of a cached file as memory that can be written, made by [`Mapping::view_mut`]. Writes change the file: reads
/// by [`Mapping::read_at`] and other views show them at once, and [`Mapping::sync`] writes them to the store.
///
/// The first write to a page after it was written back makes it dirty, which takes some microseconds, and is delayed as
/// by [`Mapping::write_at`] if too much is dirty. Writes do not extend the file: bytes behind its end raise `SIGBUS`,
/// except in the rest of its last OS page, where writes are lost.
///
/// ```
/// use pagemill::PageCache;
/// use pagemill::cache::Source;
/// use std::sync::atomic::Ordering::SeqCst;
///
/// let cache = PageCache::builder("counters").limit(64 << 20).source(Source::Shared).build()?;
/// let file = cache.create()?;
/// file.truncate(1 << 20)?;
/// let view = file.view_mut(0..1 << 20)?;
/// view.write_at(b"name", 4096);
/// view.atomic_u64(8192).fetch_add(7, SeqCst);
/// let mut bytes = [0; 4];
/// file.read_at(&mut bytes, 4096)?;
/// assert_eq!((&bytes, view.atomic_u64(8192).load(SeqCst)), (b"name", 7));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct ViewMut(View);

/// A range of a cached file as memory whose writes stay in the view, made by [`Mapping::view_private`].
///
/// The first write to a software page copies it into memory of the view. From then on the page belongs to the view: it
/// does not show changes of the file, nor does a truncation of the file remove it. Other pages show the file, also its
/// changes. The copies do not count in the cache's limit. They are freed when the view is dropped.
///
/// ```
/// use pagemill::PageCache;
/// use pagemill::cache::Source;
///
/// let cache = PageCache::builder("images").limit(64 << 20).source(Source::Shared).build()?;
/// let file = cache.create()?;
/// file.write_at(b"original", 0)?;
/// let view = file.view_private(0..4096)?;
/// view.write_at(b"relocated", 0);
/// let (mut own, mut of_file) = ([0; 8], [0; 8]);
/// view.read_at(&mut own, 0);
/// file.read_at(&mut of_file, 0)?;
/// assert_eq!((&own, &of_file), (b"relocate", b"original"));
/// assert_eq!(view.copied_bytes(), 4096);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct PrivateView(View);

impl Mapping {
    /// Makes a range of the file accessible as memory. `range` begins at a multiple of the OS page, and may end behind
    /// the end of the file, which may grow. The file's cache must have shared memory ([`Source::Shared`]).
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
    /// [`Error::System`] if the system refuses the fault handler.
    pub fn view(&self, range: Range<u64>) -> Result<View> {
        self.view_with(range, Writes::Refused)
    }

    /// As [`Mapping::view`], for memory that can be written.
    ///
    /// # Errors
    ///
    /// As [`Mapping::view`]. [`Error::ReadOnly`] if the store is read-only. [`Error::Busy`] while [`View::bytes`]
    /// borrows bytes of the file.
    pub fn view_mut(&self, range: Range<u64>) -> Result<ViewMut> {
        self.0.check_writable()?;
        self.view_with(range, Writes::Shared).map(ViewMut)
    }

    /// As [`Mapping::view`], for memory whose writes stay in the view. The store may be read-only.
    ///
    /// # Errors
    ///
    /// As [`Mapping::view`].
    pub fn view_private(&self, range: Range<u64>) -> Result<PrivateView> {
        self.view_with(range, Writes::Private).map(PrivateView)
    }

    /// Creates a view of a range.
    fn view_with(&self, range: Range<u64>, writes: Writes) -> Result<View> {
        let file = &self.0;
        let len_bytes = range.end.saturating_sub(range.start);
        file.check(range.start, len_bytes)?;
        if len_bytes == 0 || !range.start.is_multiple_of(mem::os_page_bytes() as u64) {
            return Err(Error::BadRange { addr: range.start as usize, len_bytes: len_bytes as usize });
        }
        file.pool.prepare_views()?;
        fault::install(registry::resolve_fault).map_err(Error::system("installing the fault handler"))?;
        let window = Arc::new(Window::new(file.clone(), range, writes)?);
        registry::add(&window)?;
        {
            // A writable view and borrowed bytes exclude each other.
            let _gate = file.gate.exclusive();
            if writes == Writes::Shared && file.check_not_borrowed().is_err() {
                registry::remove(&window);
                return Err(BORROWED);
            }
            file.views.add(&window);
        }
        file.pool.view_count.fetch_add(1, SeqCst);
        Ok(View { window, file: self.clone() })
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
        self.check(at, to.len());
        // SAFETY: the range lies in the window, where the fault handler maps pages before the access continues.
        unsafe { crate::folio::copy(to.as_mut_ptr(), self.as_ptr().add(at), to.len()) };
    }

    /// Reads a range into memory and maps it. While the result exists, the pages are pinned and stay mapped, so
    /// addresses of the range can be passed to system calls that read them. A truncation or `punch_hole` unmaps pages
    /// of the range. So does an unmapping nearby in a process that has used up its mappings; the pages are then mapped
    /// again at the next access, and system calls can fail with `EFAULT` until then.
    ///
    /// Direct or asynchronous I/O (`O_DIRECT`, io_uring) can use the memory of pages after they were unmapped. The
    /// memory of the pages that were prefaulted is not reused before the result is dropped, also if the file loses
    /// them, so keep the result until the I/O has ended. I/O on other pages of a view, or that begins after such a
    /// loss, has no such protection.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] if the range does not lie in the view, or in the OS pages of the file. [`Error::BadRange`] if
    /// it ends before it begins. [`Error::System`] if the pages need more mappings than views or the process may have.
    /// [`Error::NoMemory`] if the range and other pages in use do not fit into the cache. Otherwise see
    /// [`Mapping::pin`].
    pub fn prefault(&self, range: Range<usize>) -> Result<Prefaulted<'_>> {
        self.prefault_for(range, Access::Read)
    }

    fn prefault_for(&self, range: Range<usize>, access: Access) -> Result<Prefaulted<'_>> {
        let pages = self.pages_of(range.clone())?;
        let mut prefaulted = Prefaulted { view: self, pages: pages.clone(), pins: Vec::new() };
        {
            // As in `File::unmap_from_views`.
            let _blocked = AllSignalsBlocked::begin();
            self.window.kept.with(|kept| kept.push(pages.clone()));
        }
        self.fill(pages, range, access, |pin| prefaulted.pins.push(pin.into_number()))?;
        Ok(prefaulted)
    }

    /// Reads a range into memory, maps it, and returns a guard that borrows its bytes as a slice. While the guard
    /// exists, the file cannot change: writes, truncations, holds and [`Mapping::refresh`] fail with [`Error::Busy`].
    /// Reads, pins, and other guards are possible.
    ///
    /// # Errors
    ///
    /// As [`View::prefault`]. [`Error::Busy`] while the file has a [`ViewMut`]. [`Error::Unsupported`] for a
    /// [`PrivateView`]: use [`PrivateView::bytes_mut`].
    pub fn bytes(&self, range: Range<usize>) -> Result<Bytes<'_>> {
        let file = &self.window.file;
        if self.window.writes == Writes::Private {
            return Err(Error::Unsupported { what: "borrowing bytes of a private view; use bytes_mut" });
        }
        let prefaulted = self.prefault(range.clone())?;
        // Waits for writes that have begun. Later ones see that the bytes are borrowed.
        let _gate = file.gate.exclusive();
        if file.views.are_writable() {
            return Err(Error::Busy { what: "the file has a view that can be written" });
        }
        // A truncation may have removed pages since they were prefaulted.
        let (end, size_bytes) = (self.window.offset + range.end as u64, file.size_bytes());
        if end > size_bytes {
            return Err(Error::PastEnd { offset: end, size_bytes });
        }
        file.views.0.get().into_iter().for_each(|windows| _ = windows.borrowed.fetch_add(1, SeqCst));
        Ok(Bytes { prefaulted, range })
    }

    /// Reads a range into memory, and keeps it there until [`View::unlock`] is called as often with the same range, or
    /// the view is dropped. Unlike after [`View::prefault`], the pages can be written back, and the first access to one
    /// may call the fault handler again. A truncation or `punch_hole` still removes pages of the range.
    ///
    /// [`Usage::locked_ranges`](crate::mapping::Usage::locked_ranges) has the sum of all locked ranges.
    ///
    /// # Errors
    ///
    /// As [`View::prefault`]. After an error the range is not locked.
    pub fn lock(&self, range: Range<usize>) -> Result<()> {
        let pages = self.pages_of(range.clone())?;
        self.window.lock(pages.clone());
        self.fill(pages.clone(), range, Access::Read, |_| {}).inspect_err(|_| _ = self.window.unlock(&pages))
    }

    /// Ends one [`View::lock`] of a range.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the pages of the range are not locked by a call with the same pages.
    pub fn unlock(&self, range: Range<usize>) -> Result<()> {
        let pages = self.pages_of(range)?;
        self.window.unlock(&pages)
    }

    /// Returns, once, the latest error for which an access got a `SIGBUS`; `None` if there was none, if the access was
    /// behind the end of the file, or if a store or policy has panicked.
    pub fn take_error(&self) -> Option<Error> {
        // As in `File::unmap_from_views`.
        let _blocked = AllSignalsBlocked::begin();
        self.window.error.with(Option::take)
    }

    /// Returns the file of the view.
    pub fn file(&self) -> &Mapping {
        &self.file
    }

    /// Returns the four bytes at offset `at` of the view as an atomic number of this machine's byte order.
    fn atomic_u32(&self, at: usize) -> &AtomicU32 {
        self.check_aligned(at, size_of::<AtomicU32>());
        // SAFETY: the address is aligned and lies in the window, which exists as long as this view. The fault handler
        // maps the page before an access continues. Other code accesses the bytes by copies only.
        unsafe { &*ptr::with_exposed_provenance::<AtomicU32>(self.window.addr + at) }
    }

    /// As [`View::atomic_u32`], for eight bytes.
    fn atomic_u64(&self, at: usize) -> &AtomicU64 {
        self.check_aligned(at, size_of::<AtomicU64>());
        // SAFETY: as above.
        unsafe { &*ptr::with_exposed_provenance::<AtomicU64>(self.window.addr + at) }
    }

    /// Copies `from` to the bytes from offset `at` on. Only called for views that can be written.
    fn write_at(&self, from: &[u8], at: usize) {
        self.check(at, from.len());
        // SAFETY: as in `read_at`.
        unsafe { crate::folio::copy(self.as_ptr().cast_mut().add(at), from.as_ptr(), from.len()) };
    }

    fn check(&self, at: usize, len: usize) {
        let len_bytes = self.window.len_bytes;
        let is_inside = at.checked_add(len).is_some_and(|end| end <= len_bytes);
        assert!(is_inside, "{len} bytes at {at} are not in a view of {len_bytes}");
    }

    fn check_aligned(&self, at: usize, len: usize) {
        self.check(at, len);
        assert!(at.is_multiple_of(len), "offset {at} is not a multiple of {len}");
    }

    /// Returns the pages of the file in a range of the view.
    fn pages_of(&self, range: Range<usize>) -> Result<Range<u64>> {
        self.window.file.check(0, 0)?;
        if range.start > range.end {
            return Err(Error::BadRange { addr: range.start, len_bytes: 0 });
        }
        if range.end > self.window.len_bytes {
            return Err(Error::PastEnd { offset: range.end as u64, size_bytes: self.window.len_bytes as u64 });
        }
        Ok(self.window.pages_of(range))
    }

    /// Reads pages into memory and maps them, and passes pins of their folios to `keep`. `range` are the bytes of the
    /// view in the pages.
    fn fill(&self, pages: Range<u64>, range: Range<usize>, access: Access, mut keep: impl FnMut(Pin)) -> Result<()> {
        let file = &self.window.file;
        // The last software page may have OS pages behind the end, which are not mapped.
        let (end, size_bytes) = (self.window.offset + range.end as u64, file.size_bytes());
        let is_past = !range.is_empty() && end > size_bytes.next_multiple_of(mem::os_page_bytes() as u64);
        if is_past && self.window.writes != Writes::Private {
            return Err(Error::PastEnd { offset: end, size_bytes });
        }
        let mut page = pages.start;
        while page < pages.end {
            let (end, pin) = self.window.fill(page, access)?;
            let is_small = pin.as_ref().is_some_and(|pin| pin.folio_bytes() == file.page_bytes() as u64);
            pin.into_iter().for_each(&mut keep);
            page += 1;
            if !is_small {
                page = end;
            }
            // Each of the small folios that were mapped together needs a pin, unless the file has just lost it.
            while page < end.min(pages.end)
                && let Some(place) = file.pin_page(page)?
            {
                keep(file.guard_of(place, file.offset_of(page)));
                page += 1;
            }
        }
        Ok(())
    }
}

/// Methods of views that can be written.
macro_rules! writable_view {
    ($view:ident) => {
        impl $view {
            /// Returns the address of the first byte. The addresses stay reserved until the view is dropped. Other
            /// threads may access the bytes at the same time, so the program must not create a reference to the bytes.
            pub fn as_mut_ptr(&self) -> *mut u8 {
                self.as_ptr().cast_mut()
            }

            /// Copies `from` to the bytes from offset `at` of the view on.
            ///
            /// # Panics
            ///
            /// If the range does not lie in the view.
            pub fn write_at(&self, from: &[u8], at: usize) {
                self.0.write_at(from, at);
            }

            /// Returns the four bytes at offset `at` of the view as an atomic number in this machine's byte order.
            ///
            /// # Panics
            ///
            /// If `at` is not a multiple of four, or the bytes do not lie in the view.
            pub fn atomic_u32(&self, at: usize) -> &AtomicU32 {
                self.0.atomic_u32(at)
            }

            /// Returns the eight bytes at offset `at` of the view as an atomic number in this machine's byte order.
            ///
            /// # Panics
            ///
            /// If `at` is not a multiple of eight, or the bytes do not lie in the view.
            pub fn atomic_u64(&self, at: usize) -> &AtomicU64 {
                self.0.atomic_u64(at)
            }

            /// As [`View::prefault`], for system calls that write to the range, also by direct or asynchronous I/O that
            /// ends before the result is dropped. All its pages count as written.
            ///
            /// # Errors
            ///
            /// As [`View::prefault`], and as [`Mapping::write_at`].
            pub fn prefault_mut(&self, range: Range<usize>) -> Result<Prefaulted<'_>> {
                self.prefault_for(range, Access::Write)
            }
        }

        impl Deref for $view {
            type Target = View;

            fn deref(&self) -> &View {
                &self.0
            }
        }
    };
}

writable_view!(ViewMut);
writable_view!(PrivateView);

impl PrivateView {
    /// Copies all pages of a range into memory of the view, as a write would, and returns the bytes.
    ///
    /// # Errors
    ///
    /// As [`View::prefault`].
    pub fn bytes_mut(&mut self, range: Range<usize>) -> Result<&mut [u8]> {
        drop(self.prefault_mut(range.clone())?);
        // SAFETY: all pages of the range belong to the view from here on, and stay mapped until it is dropped. The view
        // is borrowed uniquely, and no other code accesses its memory.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().add(range.start), range.len()) })
    }

    /// Returns the size of the pages that belong to the view, in bytes.
    pub fn copied_bytes(&self) -> u64 {
        let window = &self.0.window;
        window.own_pages.as_ref().map_or(0, |own_pages| own_pages.count() * window.file.page_bytes()) as u64
    }
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Window { addr, len_bytes, writes, .. } = &*self.window;
        let mut text = f.debug_struct("View");
        text.field("addr", addr).field("len_bytes", len_bytes).field("writes", writes).finish_non_exhaustive()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // In a fork child the window is not mapped, and threads of the parent may hold locks forever.
        if self.window.file.cache.check().is_err() {
            return;
        }
        registry::remove(&self.window);
        self.window.unlock_all();
        self.window.file.views.remove(&self.window);
        self.window.file.pool.view_count.fetch_sub(1, SeqCst);
        self.window.unmap_all();
    }
}

/// Bytes of a view, which do not change while this guard exists ([`View::bytes`]).
///
/// ```
/// use pagemill::PageCache;
/// use pagemill::cache::Source;
///
/// let cache = PageCache::builder("text").limit(64 << 20).source(Source::Shared).build()?;
/// let file = cache.create()?;
/// file.write_at(b"one two three", 0)?;
/// let view = file.view(0..4096)?;
/// let bytes = view.bytes(0..13)?;
/// assert_eq!(bytes.split(|byte| *byte == b' ').count(), 3);
/// assert!(file.write_at(b"four", 0).is_err()); // until the guard is dropped
/// drop(bytes);
/// file.write_at(b"four", 0)?;
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the bytes can be accessed only while this exists"]
pub struct Bytes<'view> {
    prefaulted: Prefaulted<'view>,
    range: Range<usize>,
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let addr = self.prefaulted.view.as_ptr().wrapping_add(self.range.start);
        // SAFETY: the pages are mapped, or mapped again by the fault handler. The file does not change while this guard
        // exists.
        unsafe { std::slice::from_raw_parts(addr, self.range.len()) }
    }
}

impl AsRef<[u8]> for Bytes<'_> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Bytes<'_> {
    fn drop(&mut self) {
        let file = &self.prefaulted.view.window.file;
        file.views.0.get().into_iter().for_each(|windows| _ = windows.borrowed.fetch_sub(1, SeqCst));
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
    /// Numbers of the folios that this value has pinned, besides the pins of the window's entries: a truncation ends
    /// those, but the kernel may still transfer data to or from the folios.
    pins: Vec<u32>,
}

impl Drop for Prefaulted<'_> {
    fn drop(&mut self) {
        let window = &self.view.window;
        if window.file.cache.check().is_err() {
            return;
        }
        {
            let _blocked = AllSignalsBlocked::begin();
            window.kept.with(|kept| {
                if let Some(at) = kept.iter().position(|pages| *pages == self.pages) {
                    kept.swap_remove(at);
                }
            });
        }
        self.pins.iter().for_each(|number| window.file.cache.unpin(*number));
    }
}
