//! Allocations of one size from the C `malloc`, in an intrusive linked list.
//!
//! Each allocation stores the address of the next one. A separate array of addresses would need half as much memory as
//! the allocations themselves, if these have 16 bytes.

#![allow(unsafe_code)] // the list is intrusive: its links are in the pieces

use std::hint::black_box;
use std::{ptr, slice};

/// The first bytes of each allocation: the address of the next allocation, and the index of this one as its tag.
#[repr(C)]
struct Link {
    next: *mut Link,
    tag: u64,
}

/// The smallest size of an allocation in the list.
pub const MIN_BYTES: usize = size_of::<Link>();

/// A linked list of allocations, in the order in which they were made.
///
/// # Invariants
///
/// `first` is the head of a null-terminated list of allocations that `malloc` returned for `size` bytes. This chain
/// alone owns these allocations, and every byte of them is initialized. `last` is the tail, or null if the list is
/// empty.
pub struct Chain {
    first: *mut Link,
    last: *mut Link,
    size: usize,
    allocated_count: u64,
}

// SAFETY: a chain is the only owner of its allocations (type invariant), and malloc and free work across threads.
unsafe impl Send for Chain {}

impl Chain {
    /// Makes an empty list for allocations of `size` bytes.
    ///
    /// # Errors
    ///
    /// A message if `size` is below [`MIN_BYTES`].
    pub fn new(size: usize) -> Result<Self, String> {
        match size < MIN_BYTES {
            true => Err(format!("a piece has {MIN_BYTES} bytes at least")),
            false => Ok(Self { first: ptr::null_mut(), last: ptr::null_mut(), size, allocated_count: 0 }),
        }
    }

    /// Makes one allocation, writes all of its bytes, and appends it to the list. Returns false if malloc failed.
    pub fn push(&mut self) -> bool {
        let tag = self.allocated_count;
        // SAFETY: malloc takes any size.
        let allocation = black_box(unsafe { libc::malloc(self.size) }.cast::<Link>());
        if allocation.is_null() {
            return false;
        }
        // SAFETY: the allocation has room for a link (`MIN_BYTES`), and malloc aligned it.
        unsafe { allocation.write(Link { next: ptr::null_mut(), tag }) };
        // SAFETY: the `size - MIN_BYTES` bytes after the link belong to the same allocation.
        unsafe { allocation.add(1).cast::<u8>().write_bytes(tag as u8, self.size - MIN_BYTES) };
        self.append(allocation);
        self.allocated_count += 1;
        true
    }

    /// Returns the number of allocations made so far, including freed ones.
    pub fn allocated_count(&self) -> u64 {
        self.allocated_count
    }

    /// Frees all allocations except those for which `keeps` returns true. The argument of `keeps` is the index of an
    /// allocation in the order in which they were made. First compares every byte of each allocation with what was
    /// written. Returns the number of allocations that differ.
    pub fn retain(&mut self, mut keeps: impl FnMut(u64) -> bool) -> u64 {
        let (mut at, mut wrong) = (self.first, 0);
        (self.first, self.last) = (ptr::null_mut(), ptr::null_mut());
        while !at.is_null() {
            // SAFETY: `at` is a live allocation that was in the list (type invariant), and nothing else refers to it.
            let (next, tag) = unsafe { ((*at).next, (*at).tag) };
            // SAFETY: the bytes after the link belong to the same allocation and are initialized (type invariant).
            let rest = unsafe { slice::from_raw_parts(at.add(1).cast::<u8>(), self.size - MIN_BYTES) };
            // A tag that was never assigned shows that the allocation is damaged. The walk then ends, since its `next`
            // cannot be trusted either.
            let is_known = tag < self.allocated_count;
            wrong += u64::from(!is_known || rest.iter().any(|&byte| byte != tag as u8));
            if keeps(tag) && is_known {
                self.append(at);
            } else {
                // SAFETY: malloc returned this allocation, and it is in no list any more.
                unsafe { libc::free(at.cast()) };
            }
            at = if is_known { next } else { ptr::null_mut() };
        }
        wrong
    }

    /// Appends an allocation, which must be in no list yet, to this list.
    fn append(&mut self, allocation: *mut Link) {
        // SAFETY: `allocation` is a live allocation that is in no list (precondition).
        unsafe { (*allocation).next = ptr::null_mut() };
        match self.last.is_null() {
            true => self.first = allocation,
            // SAFETY: `last` is a live allocation of this list (type invariant).
            false => unsafe { (*self.last).next = allocation },
        }
        self.last = allocation;
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        self.retain(|_| false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 1000 allocations in the list, every second one is freed. The others must stay in order, with their bytes
    /// intact.
    #[test]
    fn retained_allocations_stay_in_order() {
        for size in [MIN_BYTES, 17, 4096] {
            let mut chain = Chain::new(size).expect("large enough");
            assert!((0..1000).all(|_| chain.push()));

            assert_eq!(chain.retain(|place| place % 2 == 0), 0);
            let mut seen = Vec::new();
            assert_eq!(
                chain.retain(|place| {
                    seen.push(place);
                    true
                }),
                0
            );

            assert!(seen.iter().copied().eq((0..1000).step_by(2)), "{size}");
            assert!(chain.push() && chain.allocated_count() == 1001);
        }
        assert!(Chain::new(MIN_BYTES - 1).is_err());
    }

    /// The last byte of the first of ten allocations is changed. [`Chain::retain`] must return that one allocation is
    /// wrong.
    #[test]
    fn a_changed_byte_is_found() {
        let mut chain = Chain::new(64).expect("large enough");
        assert!((0..10).all(|_| chain.push()));
        // SAFETY: this is the last byte of the first allocation, which the chain owns.
        unsafe { chain.first.cast::<u8>().add(63).write(99) };

        assert_eq!(chain.retain(|_| true), 1);
    }
}
