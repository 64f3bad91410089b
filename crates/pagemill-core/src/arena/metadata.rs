//! Tables for metadata, in reserved address space of their own. A table never uses the global allocator.
#![allow(unsafe_code)] // tables in memory mapped by hand

use crate::error::{Error, Result};
use crate::sync::{AtomicU32, AtomicU64};
use crate::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::mem;
use std::marker::PhantomData;

/// A sparse array of `T` in reserved address space. All entries are zero bits at first.
///
/// Entries become accessible in [`Table::open`], when the blocks that they describe are carved. If all entries were
/// accessible from the start, the program's `mlockall` would make gigabytes of unused entries resident, and the table
/// would count against strict commit limits.
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

// SAFETY: the type is one atomic word.
unsafe impl Zeroed for super::block::BlockWord {}
// SAFETY: the type consists of atomic words.
unsafe impl Zeroed for super::extents::ExtentMaps {}
// SAFETY: zero bits are a valid atomic integer.
unsafe impl Zeroed for AtomicU32 {}
// SAFETY: zero bits are a valid atomic integer.
unsafe impl Zeroed for AtomicU64 {}

impl<T: Zeroed> Table<T> {
    /// Creates a table whose entries are inaccessible until [`Table::open`].
    pub fn new(len: usize) -> Result<Self> {
        let bytes = (len * size_of::<T>()).next_multiple_of(BLOCK_BYTES);
        let base = mem::reserve(bytes, BLOCK_BYTES, 0).map_err(Error::system("reserving metadata"))?;
        Ok(Self { base, len, _entries: PhantomData })
    }

    /// Creates a table whose entries are all accessible.
    pub fn new_open(len: usize) -> Result<Self> {
        let table = Self::new(len)?;
        table.open(0, 0, len)?;
        Ok(table)
    }

    /// Creates a table whose entries can all be read. Before [`Table::open`] an entry reads as zero bits and is
    /// read-only.
    pub fn new_readable(len: usize) -> Result<Self> {
        let table = Self::new(len)?;
        let bytes = (len * size_of::<T>()).next_multiple_of(BLOCK_BYTES);
        // SAFETY: the reservation of this table, which is not shared yet.
        unsafe { mem::open_to_read(table.base, bytes) }.map_err(Error::system("opening metadata"))?;
        Ok(table)
    }

    /// Makes the entries from `next` to `end` accessible. Entries from `first` to `next`, if any, are accessible
    /// already.
    ///
    /// Works in steps of 1 MiB, so most calls do nothing.
    pub fn open(&self, first: usize, next: usize, end: usize) -> Result<()> {
        const OPEN_STEP_BYTES: usize = 1 << 20;
        assert!(end <= self.len);
        debug_assert!(first <= next, "entries are opened in order");
        let (from, to) = (self.base + next * size_of::<T>(), self.base + end * size_of::<T>());
        let from = if next == first { from & !(OPEN_STEP_BYTES - 1) } else { from.next_multiple_of(OPEN_STEP_BYTES) };
        let to = to.next_multiple_of(OPEN_STEP_BYTES);
        if from < to {
            // SAFETY: the range is inside the reservation, whose length is a multiple of the step.
            unsafe { mem::open(from, to - from) }.map_err(Error::system("opening metadata"))?;
        }
        Ok(())
    }

    /// Returns the entry with this index. The entry must be accessible ([`Table::open`]).
    #[inline]
    pub fn get(&self, index: usize) -> &T {
        assert!(index < self.len);
        // SAFETY: the index is in range, as asserted; the type invariant covers the rest.
        unsafe { &*((self.base + index * size_of::<T>()) as *const T) }
    }

    /// Returns the address of the first entry, whether that entry is accessible or not.
    pub fn start(&self) -> *const T {
        self.base as *const T
    }

    /// Returns `N` consecutive entries, the first with index `first`.
    #[inline]
    pub fn row<const N: usize>(&self, first: usize) -> &[T; N] {
        assert!(first + N <= self.len);
        // SAFETY: the entries are consecutive and in range, as asserted; the type invariant covers the rest.
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
        // SAFETY: the caller guarantees that the index is in range; the type invariant covers the rest.
        unsafe { &*((self.base + index * size_of::<T>()) as *const T) }
    }

    /// Allows the kernel to use huge pages for memory of the table that becomes resident later.
    pub fn allow_huge(&self) {
        mem::allow_huge(self.base, (self.len * size_of::<T>()).next_multiple_of(BLOCK_BYTES));
    }

    /// Returns the memory of `count` entries from index `first` on to the kernel. The entries read as zero bits
    /// afterwards. They must occupy whole OS pages.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the kernel refuses (locked memory).
    pub fn discard(&self, first: usize, count: usize) -> Result<()> {
        let (at, bytes) = (self.base + first * size_of::<T>(), count * size_of::<T>());
        assert!(first + count <= self.len && (at | bytes).is_multiple_of(os_page_bytes()));
        // SAFETY: these are open entries of this table, for which zero bits are valid. Other threads have shared
        // references to them only, because they are atomic.
        unsafe { mem::discard(at, bytes) }.map_err(Error::system("giving metadata back"))
    }

    /// Resident bytes of the OS pages that contain `count` entries, the first with index `first`.
    pub fn resident_bytes(&self, first: usize, count: usize) -> u64 {
        debug_assert!(first + count <= self.len);
        let page = os_page_bytes();
        let start = (self.base + first * size_of::<T>()) & !(page - 1);
        let end = (self.base + (first + count) * size_of::<T>()).next_multiple_of(page);
        mem::resident_bytes(start, end - start).unwrap_or(0) as u64
    }
}

/// Unmaps a table in shuttle tests, which create thousands of tables. In other builds tables are never unmapped.
#[cfg(shuttle)]
impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: this is the reservation of this table, and no reference to an entry is left.
        unsafe { mem::unreserve(self.base, (self.len * size_of::<T>()).next_multiple_of(BLOCK_BYTES)) };
    }
}

/// Moves a value into new memory that is never freed. Does not use the global allocator.
///
/// # Errors
///
/// [`Error::System`] if no page can be mapped.
pub fn place<T: Sync>(value: T) -> Result<&'static T> {
    let bytes = size_of::<T>().next_multiple_of(os_page_bytes());
    let addr =
        mem::map_sparse(bytes, align_of::<T>().max(os_page_bytes())).map_err(Error::system("mapping metadata"))?;
    assert!(addr.is_multiple_of(align_of::<T>()));
    let at = addr as *mut T;
    // SAFETY: the mapping is new, large enough and aligned. It is written once, then only shared references exist.
    unsafe {
        at.write(value);
        Ok(&*at)
    }
}
