//! Table of arrays by number: finds the array of a node, and keeps it from being dropped meanwhile.
//!
//! A node holds the number of its array. A thread that moves nodes holds the lock of that number's entry while it uses
//! the array. An array that is dropped takes the lock of its entry first, so it waits for the move of at most one node.
//!
//! Lock order: an entry, then the lock of its array (only tried: an array that is dropped has no other user); the list
//! of free numbers last.
#![allow(unsafe_code)] // arrays at addresses that their makers promise; `Zeroed` for entries

use super::nodes::Nodes;
use super::{NO_ID_YET, XArray};
use pagemill_core::arena::{Table, Zeroed};
use pagemill_core::error::Result;
use pagemill_core::sync::{Acquire, AtomicU32, AtomicUsize, Guarded, Lock, Relaxed, Release};
use std::marker::PhantomData;

/// The most arrays in the table at a time. Nodes of further arrays cannot be moved.
const MAX_ARRAYS: usize = 1 << 22;

/// The entry of one array.
struct ArrayEntry {
    /// The array's address; 0 while no array has the number.
    array: AtomicUsize,
    /// Held while the array is used through this entry; the array is not dropped meanwhile.
    lock: Lock,
    /// For a free number: the next one in the free list.
    next: AtomicU32,
}

// SAFETY: atomic words, and a lock that is one: zero bits are a free entry.
unsafe impl Zeroed for ArrayEntry {}

#[derive(Default)]
struct FreeArrays {
    /// The free number that was returned last; 0 if none.
    head: u32,
    /// The count of numbers used so far, which start at 1.
    used: u32,
}

/// The arrays with nodes of one [`Nodes`].
///
/// Example: [`XArray`](super::XArray).
pub struct Arrays<N: Nodes> {
    table: Table<ArrayEntry>,
    free: Guarded<FreeArrays>,
    _arrays: PhantomData<fn(&XArray<N>)>,
}

impl<N: Nodes> Arrays<N> {
    /// Reserves address space for the table.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if there is none.
    pub fn new() -> Result<Self> {
        let (table, free) = (Table::new(MAX_ARRAYS)?, Guarded::new(FreeArrays::default()));
        Ok(Self { table, free, _arrays: PhantomData })
    }

    /// Assigns a number to an array, if one is free.
    pub(super) fn enter(&self, array: &XArray<N>) -> Option<u32> {
        let id = self.free.with(|free| {
            if free.head != 0 {
                let id = free.head;
                free.head = self.entry(id).next.load(Relaxed);
                return Some(id);
            }
            let at = free.used as usize + 1;
            if at >= MAX_ARRAYS || self.table.open(1, at, at + 1).is_err() {
                return None;
            }
            free.used += 1;
            Some(free.used)
        })?;
        self.entry(id).array.store(std::ptr::from_ref(array) as usize, Release);
        Some(id)
    }

    /// Removes the array from the table: later lookups fail. Waits for a thread that uses the array through its entry.
    pub(super) fn leave(&self, id: u32) {
        let _guard = self.entry(id).lock.lock();
        self.entry(id).array.store(0, Relaxed);
    }

    /// Frees the number for another array; no node may hold it any more.
    pub(super) fn give(&self, id: u32) {
        self.free.with(|free| {
            self.entry(id).next.store(free.head, Relaxed);
            free.head = id;
        });
    }

    /// Calls `act` with the array of a number that a node held, and keeps it from being dropped meanwhile. Returns none
    /// if the array is gone, or if another thread holds its entry.
    pub(super) fn with<R>(&self, id: u32, act: impl FnOnce(&XArray<N>) -> R) -> Option<R> {
        let _guard = self.entry(id).lock.try_lock()?;
        let array = self.entry(id).array.load(Acquire) as *const XArray<N>;
        if array.is_null() {
            return None;
        }
        // SAFETY: the array entered under the promise of `XArray::movable` that it stays at its address until its drop
        // has ended. That drop begins with `leave`, which waits for this guard.
        Some(act(unsafe { &*array }))
    }

    fn entry(&self, id: u32) -> &ArrayEntry {
        self.table.get(id as usize)
    }

    /// Resident bytes of the table.
    pub fn resident_bytes(&self) -> u64 {
        let used = self.free.with(|free| free.used);
        self.table.resident_bytes(0, used as usize + 1)
    }
}

impl<N: Nodes> XArray<N> {
    /// Makes an empty array with movable nodes (`relocate`). Allocates no node.
    ///
    /// # Safety
    ///
    /// From the first call of one of its methods on, it must stay at its address until it has been dropped there, or
    /// for good.
    pub const unsafe fn movable(nodes: &'static N) -> Self {
        Self::with_id(nodes, NO_ID_YET)
    }
}
