//! Memory for metadata: out of line, sparse, indexed, never from the global allocator.
#![allow(unsafe_code)] // tables in memory mapped by hand

use crate::error::{Error, Result};
use crate::sync::{AtomicU32, AtomicU64};
use crate::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::mem;
use std::marker::PhantomData;

/// A table of `T`, all zero bits at first, touched only where it is used.
///
/// It starts as reserved addresses and is opened as the blocks it describes are carved. Otherwise a program's
/// `mlockall` would make gigabytes of unused table resident, and it would count against strict commit limits.
///
/// # Invariants
///
/// `base` starts `len * size_of::<T>()` reserved bytes that are never unmapped. Entries are used only after
/// [`Table::open`]. `T` consists of atomics only, so zero bits are valid and `&T` suffices.
///
/// ```
/// use pagemill_core::arena::Table;
/// use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
///
/// let table: Table<AtomicU32> = Table::new_open(1000)?;
/// table.get(7).store(1, Relaxed);
/// assert_eq!([6, 7].map(|at| table.get(at).load(Relaxed)), [0, 1]);
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Table<T> {
    base: usize,
    len: usize,
    _entries: PhantomData<T>,
}

/// Types that a [`Table`] may hold.
///
/// # Safety
///
/// Zero bits are a valid value, the type needs no drop, and it is `Sync`.
///
/// Example: [`Table`].
pub unsafe trait Zeroed: Sync {}

// SAFETY: one atomic word.
unsafe impl Zeroed for super::block::BlockWord {}
// SAFETY: atomic words.
unsafe impl Zeroed for super::extents::ExtentMaps {}
// SAFETY: an atomic integer.
unsafe impl Zeroed for AtomicU32 {}
// SAFETY: an atomic integer.
unsafe impl Zeroed for AtomicU64 {}

impl<T: Zeroed> Table<T> {
    pub fn new(len: usize) -> Result<Self> {
        let bytes = (len * size_of::<T>()).next_multiple_of(BLOCK_BYTES);
        let base = mem::reserve(bytes, BLOCK_BYTES, 0).map_err(Error::system("reserving metadata"))?;
        Ok(Self { base, len, _entries: PhantomData })
    }

    /// A table that is open as a whole.
    pub fn new_open(len: usize) -> Result<Self> {
        let table = Self::new(len)?;
        table.open(0, 0, len)?;
        Ok(table)
    }

    /// A table that can be read as a whole at any time; entries that are not open read as zero bits.
    pub fn new_readable(len: usize) -> Result<Self> {
        let table = Self::new(len)?;
        let bytes = (len * size_of::<T>()).next_multiple_of(BLOCK_BYTES);
        // SAFETY: the reservation of this table, which is not shared yet.
        unsafe { mem::open_to_read(table.base, bytes) }.map_err(Error::system("opening metadata"))?;
        Ok(table)
    }

    /// Opens the entries from `next` to `end`, of a run that begins at `first` and is open up to `next`.
    ///
    /// Works in steps of 1 MiB, so mostly it does nothing.
    pub fn open(&self, first: usize, next: usize, end: usize) -> Result<()> {
        const STEP_BYTES: usize = 1 << 20;
        assert!(end <= self.len);
        let (from, to) = (self.base + next * size_of::<T>(), self.base + end * size_of::<T>());
        let from = if next == first { from & !(STEP_BYTES - 1) } else { from.next_multiple_of(STEP_BYTES) };
        let to = to.next_multiple_of(STEP_BYTES);
        if from < to {
            // SAFETY: inside the reservation: its length is a multiple of the step.
            unsafe { mem::open(from, to - from) }.map_err(Error::system("opening metadata"))?;
        }
        Ok(())
    }

    #[inline]
    pub fn get(&self, index: usize) -> &T {
        assert!(index < self.len);
        // SAFETY: in range as asserted; the type invariant covers the rest.
        unsafe { &*((self.base + index * size_of::<T>()) as *const T) }
    }

    /// Address of the first entry, open or not.
    pub fn start(&self) -> *const T {
        self.base as *const T
    }

    /// `N` consecutive entries.
    #[inline]
    pub fn row<const N: usize>(&self, first: usize) -> &[T; N] {
        assert!(first + N <= self.len);
        // SAFETY: in range as asserted, and consecutive; the type invariant covers the rest.
        unsafe { &*((self.base + first * size_of::<T>()) as *const [T; N]) }
    }

    /// As [`Table::get`], without the range check.
    ///
    /// # Safety
    ///
    /// `index` is below the table's length.
    #[inline]
    pub unsafe fn get_unchecked(&self, index: usize) -> &T {
        debug_assert!(index < self.len);
        // SAFETY: in range as guaranteed by the caller; the type invariant covers the rest.
        unsafe { &*((self.base + index * size_of::<T>()) as *const T) }
    }

    /// Allows huge pages for new parts of the table from here on.
    pub fn allow_huge(&self) {
        mem::allow_huge(self.base, (self.len * size_of::<T>()).next_multiple_of(BLOCK_BYTES));
    }

    /// Gives back the memory of entries, which read as zero bits afterwards. They must be whole OS pages.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses (locked memory).
    pub fn discard(&self, first: usize, count: usize) -> Result<()> {
        let (at, bytes) = (self.base + first * size_of::<T>(), count * size_of::<T>());
        assert!(first + count <= self.len && (at | bytes).is_multiple_of(os_page_bytes()));
        // SAFETY: this table's own open entries, for which zero bits are valid. They are atomic, so other threads hold
        // at most shared references to them.
        unsafe { mem::discard(at, bytes) }.map_err(Error::system("giving metadata back"))
    }

    /// Resident bytes behind `count` entries from `first` on.
    pub fn resident_bytes(&self, first: usize, count: usize) -> u64 {
        let page = os_page_bytes();
        let start = (self.base + first * size_of::<T>()) & !(page - 1);
        let end = (self.base + (first + count) * size_of::<T>()).next_multiple_of(page);
        mem::resident_bytes(start, end - start).unwrap_or(0) as u64
    }
}

/// Used by the model only: shuttle creates and drops thousands of tables.
#[cfg(shuttle)]
impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: the reservation of this table; no reference to an entry is left.
        unsafe { mem::unreserve(self.base, (self.len * size_of::<T>()).next_multiple_of(BLOCK_BYTES)) };
    }
}

/// Places a value in memory that stays for the life of the process, without the global allocator.
///
/// # Errors
///
/// [`Error::System`] if no page can be mapped.
pub fn place<T: Sync>(value: T) -> Result<&'static T> {
    let bytes = size_of::<T>().next_multiple_of(os_page_bytes());
    let addr =
        mem::map_sparse(bytes, align_of::<T>().max(os_page_bytes())).map_err(Error::system("mapping metadata"))?;
    let at = addr as *mut T;
    // SAFETY: fresh memory, large and aligned enough, not shared yet; written once, then only shared.
    unsafe {
        at.write(value);
        Ok(&*at)
    }
}
