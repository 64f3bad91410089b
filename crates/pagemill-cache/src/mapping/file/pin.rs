//! Guards of folios: shared pins, and exclusive holds.
#![allow(unsafe_code)] // references to the bytes of held folios

use crate::folio::word::Kind;
use crate::folio::{Frame, bytes};
use crate::mapping::file::hint::FolioHint;
use crate::mapping::index::Place;
use crate::mapping::request::Purpose;
use crate::mapping::writeback::dirty::DIRTY;
use crate::mapping::{File, Mapping, TimedWait};
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use std::fmt;
use std::ops::{Deref, DerefMut};

/// A pin on a folio of a file: the folio stays in memory at its address until the pin is dropped. A pin suits I/O and
/// repeated reads of one folio. A pinned folio is not split, collapsed or evicted. A `truncate` or `punch_hole` of the
/// whole folio still removes it from the file; its memory stays until the unpin. If the call covers only a part of the
/// folio, that part is zeroed, and the folio stays in the file.
///
/// Other threads may write to the folio at the same time, so its bytes are copied, never borrowed. A fork child must
/// not use an inherited pin: the memory may not be mapped there (docs/files-behind.md).
///
/// Cost: one atomic operation to pin and one to unpin, for any part of a huge folio.
///
/// ```
/// use pagemill::PageCache;
///
/// let cache = PageCache::builder("records").limit(64 << 20).build()?;
/// let file = cache.create()?;
/// file.write_at(&7_u64.to_ne_bytes(), 8)?;
/// let pin = file.pin(0)?; // the folio with offset 0
/// assert_eq!(pin.read_u64(8), 7);
/// drop(pin);
/// let pins = file.pin_range(0, 16)?;
/// assert_eq!((pins.len(), file.pin(0)?.as_ptr()), (1, pins.first().unwrap().as_ptr()));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[must_use = "the pin ends when this is dropped"]
pub struct Pin<'file> {
    file: &'file File,
    frame: &'static Frame,
    /// Address of the pin's first byte.
    addr: usize,
    /// Length from the pin's first byte to the end of the folio.
    len_bytes: u32,
}

/// The pinned folios of a range, in the order of the file. A single folio, such as a huge one that covers the whole
/// range, needs no allocation.
///
/// Example: [`Pin`].
#[derive(Debug)]
#[must_use = "the pin ends when this is dropped"]
pub struct Pins<'file> {
    first: Option<Pin<'file>>,
    others: Vec<Pin<'file>>,
}

impl<'file> Pins<'file> {
    /// Returns the number of pinned folios.
    pub fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    /// Returns whether there are no pinned folios: the range was empty, or lies behind the end of the file.
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub fn first(&self) -> Option<&Pin<'file>> {
        self.first.as_ref()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Pin<'file>> {
        self.first.iter().chain(&self.others)
    }
}

impl Mapping {
    /// Pins the folio that contains the byte at `offset`. The pin's bytes begin at `offset` and end with the folio.
    /// Allocates a folio if there is none, as a write would.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] at or past the end of the file; else see [`Mapping::write_at`].
    #[inline(always)]
    pub fn pin(&self, offset: u64) -> Result<Pin<'_>> {
        match self.0.try_pin(offset) {
            Some(pin) => Ok(pin),
            None => Ok(self.0.guard_of(self.0.pin_or_create(offset, offset.saturating_add(1))?, offset)),
        }
    }

    /// As [`Mapping::pin`], but returns `None` if the folio is not in memory.
    ///
    /// # Errors
    ///
    /// See [`Mapping::pin`].
    #[inline(always)]
    pub fn pin_present(&self, offset: u64) -> Result<Option<Pin<'_>>> {
        match self.0.try_pin(offset) {
            Some(pin) => Ok(Some(pin)),
            None => Ok(self.0.pin_in_memory(offset)?.map(|place| self.0.guard_of(place, offset))),
        }
    }

    /// Pins all folios of `len_bytes` from `offset` on, to the end of the file at most.
    ///
    /// Cost: that of [`Mapping::pin`] for each folio.
    ///
    /// # Errors
    ///
    /// See [`Mapping::pin`]. No folio stays pinned after an error.
    #[inline(always)]
    pub fn pin_range(&self, offset: u64, len_bytes: usize) -> Result<Pins<'_>> {
        if let Some(first) = self.0.try_pin(offset) {
            // Fast path: one folio covers the whole range.
            if len_bytes.wrapping_sub(1) < first.len_bytes() {
                return Ok(Pins { first: Some(first), others: Vec::new() });
            }
        }
        // The guard of the first folio is built here, from values in registers.
        let (first, others) = self.0.pin_all(offset, len_bytes)?;
        Ok(Pins { first: first.map(|place| self.0.guard_of(place, offset)), others })
    }

    /// Holds the folio that contains the byte at `offset` exclusively. Other threads that read, write or pin the folio
    /// wait, a second at most. Allocates a folio if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the folio is pinned or held for a second. [`Error::ReadOnly`] if the store is read-only,
    /// because holding a folio counts as a write. Otherwise see [`Mapping::pin`].
    pub fn hold(&self, offset: u64) -> Result<Exclusive<'_>> {
        let file = &*self.0;
        file.check_inside(offset)?;
        file.check_writable()?;
        let index = file.index_of(offset);
        let mut timed_wait = TimedWait::new();
        loop {
            let guard = epoch::pin();
            let Some(hit) = file.tree.find(index, &guard) else {
                drop(guard);
                file.bring_in(index..index + 1, Purpose::Write)?;
                continue;
            };
            let number = hit.value() as u32;
            // The gate is held shared, because a truncation, which holds it exclusively, relies on no new holds.
            let gate = file.gate.shared();
            file.check_not_borrowed()?;
            match file.hold_folio(number) {
                Ok(state) if hit.is_still() => {
                    let len_bytes = file.cache.folio_bytes(state.order()) as usize;
                    return Ok(Exclusive { file, number, first: hit.first(), len_bytes });
                }
                Ok(_) => file.end_hold(number),
                Err(_) if !hit.is_still() => {}
                Err(_) => {
                    drop((gate, guard));
                    timed_wait.wait()?;
                }
            }
        }
    }
}

impl File {
    /// Checks that the byte at `offset` lies inside of the file. Returns the length of the file.
    ///
    /// # Errors
    ///
    /// Fails at or past the end of the file, and in a fork child.
    pub(crate) fn check_inside(&self, offset: u64) -> Result<u64> {
        self.check(offset, 0)?;
        let size_bytes = self.size_bytes();
        if offset >= size_bytes { Err(Error::PastEnd { offset, size_bytes }) } else { Ok(size_bytes) }
    }

    /// Pins the folio that a lock-free lookup finds. Returns `None` if the slow path is needed.
    #[inline(always)]
    fn try_pin(&self, offset: u64) -> Option<Pin<'_>> {
        if offset >= self.size_bytes() {
            return None;
        }
        let found = self.tree.hint(self.index_of(offset))?;
        let (place, frame) = self.try_pin_number(found.value, found.order, offset)?;
        Some(self.guard(place, frame, offset))
    }

    /// Pins the folio at `offset` if it is in memory.
    #[cold]
    fn pin_in_memory(&self, offset: u64) -> Result<Option<Place>> {
        self.check_inside(offset)?;
        self.pin_page(self.index_of(offset))
    }

    /// Pins the folio at `offset`, and brings it into memory first if needed. In files with a store, reads all missing
    /// pages up to `end` along with that folio.
    #[cold]
    fn pin_or_create(&self, offset: u64, end: u64) -> Result<Place> {
        loop {
            if let Some(place) = self.pin_in_memory(offset)? {
                return Ok(place);
            }
            let index = self.index_of(offset);
            if self.store.is_some() {
                self.note_access(self.offset_of(index), (end - offset) as usize);
            }
            let end = if self.store.is_some() { self.index_of(end - 1) + 1 } else { index + 1 };
            // Pages that are read along are prefetched, and this pin is no use of them.
            let purpose = if end > index + 1 { Purpose::Read } else { Purpose::Write };
            self.bring_in(index..end, purpose)?;
        }
    }

    /// Returns a pin of the folio at `offset`, which is brought into memory first if needed. In files with a store,
    /// reads all missing pages up to `end` along with that folio.
    pub(crate) fn pin_or_bring_in(&self, offset: u64, end: u64) -> Result<Pin<'_>> {
        self.pin_or_create(offset, end).map(|place| self.guard_of(place, offset))
    }

    /// Pins the folio at `offset` for a view, and brings it into memory first if needed. Through a writable view, pages
    /// that come into memory in order count as written in order.
    pub(crate) fn pin_for_view(&self, offset: u64, is_writable: bool) -> Result<Pin<'_>> {
        let index = self.index_of(offset);
        let mut is_new = false;
        loop {
            if let Some(place) = self.pin_in_memory(offset)? {
                if is_new && is_writable {
                    let begin = self.offset_of(place.first);
                    self.note_sequential(begin, begin + self.cache.folio_bytes(place.order));
                    self.propose_collapse(place.first + (1 << place.order) - 1);
                }
                return Ok(self.guard_of(place, offset));
            }
            if self.store.is_some() {
                self.note_access(self.offset_of(index), 1);
            }
            self.bring_in(index..index + 1, Purpose::Fault)?;
            is_new = true;
        }
    }

    /// Pins all folios of a range. Returns the place of the first one, and guards of the others.
    #[cold]
    fn pin_all(&self, offset: u64, len_bytes: usize) -> Result<(Option<Place>, Vec<Pin<'_>>)> {
        self.check(offset, len_bytes as u64)?;
        let end = (offset + len_bytes as u64).min(self.size_bytes());
        if offset >= end {
            return Ok((None, Vec::new()));
        }
        // A guard from the start, so that the folio is unpinned if a later pin fails.
        let first = self.pin_or_create(offset, end).map(|place| self.guard_of(place, offset))?;
        let (mut others, mut at) = (Vec::new(), offset + u64::from(first.len_bytes));
        while at < end {
            let pin = self.guard_of(self.pin_or_create(at, end)?, at);
            at += u64::from(pin.len_bytes);
            others.push(pin);
        }
        Ok((Some(first.into_place()), others))
    }

    /// Returns the guard of the pinned folio at `place`.
    #[inline]
    pub(crate) fn guard_of(&self, place: Place, offset: u64) -> Pin<'_> {
        let frame = self.pool.frame(place.number);
        self.guard(place, frame, offset)
    }

    /// Returns the guard of a pinned folio. The guard is built from values in registers, because storing the guard and
    /// loading it again would cost as much as the rest of a pin.
    #[inline(always)]
    pub(super) fn guard(&self, place: Place, frame: &'static Frame, offset: u64) -> Pin<'_> {
        let folio_bytes = 1 << (self.pool.page_shift + u32::from(place.order));
        // Folios are aligned to their length in the file.
        let at = offset % folio_bytes;
        let addr = self.pool.addr(place.number) + at as usize;
        Pin { file: self, frame, addr, len_bytes: (folio_bytes - at) as u32 }
    }

    /// Ends an exclusive hold of a folio that was not changed. Frees the folio if it was removed from the file
    /// meanwhile.
    pub(crate) fn end_hold(&self, number: u32) {
        self.note_revived(number, self.pool.word(number).end_hold(false));
    }

    /// As [`File::end_hold`], for a folio that may have been changed: makes it dirty.
    fn end_hold_dirty(&self, number: u32, first: u64) {
        let word = self.pool.word(number);
        let state = word.load();
        let new_bytes = if state.is_dirty() { 0 } else { self.cache.folio_bytes(state.order()) };
        if new_bytes > 0 && self.dirty.is_some() {
            self.tree.lock().set_mark_of(first, u64::from(number), DIRTY);
            self.add_dirty(new_bytes);
        }
        let is_live = word.end_hold(true);
        if !is_live {
            self.sub_dirty(new_bytes);
        }
        self.note_revived(number, is_live);
    }
}

impl Pin<'_> {
    /// Returns the number of bytes from the pin's first byte to the end of the folio.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes as usize
    }

    /// Copies bytes of the folio to `to`, starting `at` bytes behind the pin's first byte.
    ///
    /// # Panics
    ///
    /// If the range exceeds [`Pin::len_bytes`].
    pub fn read_at(&self, to: &mut [u8], at: usize) {
        self.check(at, to.len());
        self.file.pool.copy_out(self.number(), self.at() + at, to);
    }

    /// Copies `from` into the folio, starting `at` bytes behind the pin's first byte. The range must not exceed the end
    /// of the file.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] past the end of the file, which may have shrunk meanwhile. [`Error::WrongState`] if the folio
    /// was removed from the file (a hole, say). [`Error::ReadOnly`].
    ///
    /// # Panics
    ///
    /// If the range exceeds [`Pin::len_bytes`].
    pub fn write_at(&self, from: &[u8], at: usize) -> Result<()> {
        self.check(at, from.len());
        self.file.check_writable()?;
        // Bytes behind the end must read zero when the file grows, so writes stop at the end. The gate prevents that
        // the file shrinks meanwhile.
        let _gate = self.file.gate.shared();
        self.file.check_not_borrowed()?;
        let begin = self.file.offset_of(self.frame.owner().index) + self.at() as u64;
        let (end, size_bytes) = (begin + (at + from.len()) as u64, self.file.size_bytes());
        if end > size_bytes {
            return Err(Error::PastEnd { offset: end - 1, size_bytes });
        }
        let state = self.frame.word.load();
        if state.kind() == Kind::Gone {
            return Err(Error::WrongState { what: "the page was removed from the file" });
        }
        if !state.is_dirty() {
            self.file.make_dirty(&self.place());
        }
        self.file.pool.copy_in(self.number(), self.at() + at, from);
        Ok(())
    }

    /// Returns the eight bytes that start `at` bytes behind the pin's first byte, as a little-endian number.
    ///
    /// # Panics
    ///
    /// If the range exceeds [`Pin::len_bytes`].
    #[inline]
    pub fn read_u64(&self, at: usize) -> u64 {
        self.check(at, size_of::<u64>());
        // SAFETY: inside the folio, as just checked. The folio is mapped while it is pinned.
        unsafe { bytes::read_u64((self.addr + at) as *const u8) }
    }

    /// Returns the address of the pinned bytes, for I/O. The bytes stay mapped there until the pin is dropped; other
    /// threads may change them. Bytes past the end of the file must stay zero. After changing bytes, the caller must
    /// call [`Pin::set_dirty`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.addr as *mut u8
    }

    /// As [`Pin::set_dirty`], for a file that can be written. Returns false, and does nothing, if a truncation or another
    /// removal is running: that may wait for the end of the pin.
    pub(crate) fn try_set_dirty(&self) -> bool {
        let Some(_gate) = self.file.gate.try_shared() else { return false };
        let state = self.frame.word.load();
        if !state.is_dirty() && state.kind() != Kind::Gone {
            self.file.make_dirty(&self.place());
        }
        true
    }

    /// Makes the folio dirty, so that writeback writes it to the store. Does nothing in a read-only file, whose changes
    /// last only until the folio is evicted.
    pub fn set_dirty(&self) {
        if !self.file.is_writable {
            return;
        }
        // The gate orders this call before or after a removal of the folio.
        let _gate = self.file.gate.shared();
        let state = self.frame.word.load();
        if !state.is_dirty() && state.kind() != Kind::Gone {
            self.file.make_dirty(&self.place());
        }
    }

    /// Returns whether the folio is dirty.
    pub(crate) fn is_dirty(&self) -> bool {
        self.frame.word.load().is_dirty()
    }

    /// Returns the length of the pinned folio.
    pub(crate) fn folio_bytes(&self) -> u64 {
        self.file.cache.folio_bytes(self.frame.word.load().order())
    }

    /// Returns the page number, first index and order of the pinned folio.
    fn place(&self) -> Place {
        Place { number: self.number(), first: self.frame.owner().index, order: self.frame.word.load().order() }
    }

    /// Drops the guard without ending the pin. The returned place owns the pin.
    fn into_place(self) -> Place {
        std::mem::ManuallyDrop::new(self).place()
    }

    /// Returns a hint of the pinned folio.
    pub(super) fn hint(&self) -> FolioHint {
        FolioHint::of(self.number(), self.frame.word.load().order())
    }

    /// Returns the number of the folio's first page.
    fn number(&self) -> u32 {
        self.file.pool.number_of(self.frame)
    }

    /// Returns the offset of the pin's first byte in the folio.
    fn at(&self) -> usize {
        self.addr - self.file.pool.addr(self.number())
    }

    /// Panics if the range lies outside of the pinned bytes.
    #[inline]
    fn check(&self, at: usize, len: usize) {
        let is_inside = self.len_bytes().checked_sub(len).is_some_and(|last| at <= last);
        assert!(is_inside, "{at} + {len} of {}", self.len_bytes);
    }

    /// Frees a folio that was removed from its file, after its last unpin.
    #[cold]
    fn free(&self) {
        self.file.cache.free(self.number(), self.frame.word.load().order());
    }
}

impl Pin<'_> {
    /// Returns whether the folio is still in its file. Once it was removed, it never is again while it is pinned.
    pub(crate) fn is_in_file(&self) -> bool {
        self.frame.word.load().kind() == Kind::Live
    }

    /// Returns the folio's number in the pool. The caller ends the pin.
    pub(crate) fn into_number(self) -> u32 {
        let number = self.file.pool.number_of(self.frame);
        std::mem::forget(self);
        number
    }
}

impl fmt::Debug for Pin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.frame.word.unpin() {
            self.free();
        }
    }
}

/// A folio that this thread holds exclusively, with its bytes as a slice. Other threads that need the folio wait, a
/// second at most, so it should not be held long.
///
/// ```
/// use pagemill::PageCache;
///
/// let file = PageCache::builder("records").limit(64 << 20).build()?.create()?;
/// file.write_at(&[1; 100], 0)?;
/// let mut folio = file.hold(0)?;
/// folio[..100].reverse(); // a slice of the cached bytes
/// folio[0] = 9;
/// drop(folio);
/// let mut first = [0];
/// assert_eq!((file.read_at(&mut first, 0)?, first), (1, [9]));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[must_use = "other threads wait until this is dropped"]
pub struct Exclusive<'file> {
    // Type invariant: the folio is held from the creation of this guard until its drop, and has `len_bytes` bytes.
    file: &'file File,
    /// Number of the folio's first page.
    number: u32,
    /// Index of the folio's first page in the file.
    first: u64,
    len_bytes: usize,
}

impl Exclusive<'_> {
    /// Returns the offset of the folio's first byte in the file.
    pub fn offset(&self) -> u64 {
        self.file.offset_of(self.first)
    }
}

impl Deref for Exclusive<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pool's memory is mapped for the life of the process. By the type invariant only this guard changes
        // the bytes, through a unique borrow.
        unsafe { std::slice::from_raw_parts(self.file.pool.addr(self.number) as *const u8, self.len_bytes) }
    }
}

impl DerefMut for Exclusive<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the borrow is unique. A reader without a pin may copy the bytes meanwhile, by code
        // that is opaque to the compiler (`folio::bytes`), and discards the copy.
        unsafe { std::slice::from_raw_parts_mut(self.file.pool.addr(self.number) as *mut u8, self.len_bytes) }
    }
}

impl fmt::Debug for Exclusive<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Exclusive");
        text.field("offset", &self.offset()).field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        // Bytes written past the end of the file are not part of it. Unless they are zeroed, they would appear when the
        // file grows.
        let end = self.file.size_bytes().saturating_sub(self.offset());
        if end < self.len_bytes as u64 {
            self.file.pool.zero(self.number, end as usize, self.len_bytes - end as usize);
        }
        self.file.end_hold_dirty(self.number, self.first);
    }
}
