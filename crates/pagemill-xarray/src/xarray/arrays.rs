//! Table of all arrays with movable nodes, by their number. A thread that moves a node finds the node's array in this
//! table, and keeps the array from being dropped during the move.
//!
//! Each node stores the number of its array. A thread that moves nodes holds the lock of that number's table entry
//! while it uses the array. Dropping an array acquires the same lock first, so the drop waits for the move of at most
//! one node.
//!
//! Lock order: a table entry, then the lock of its array (only tried, so no thread waits for it); the list of free
//! numbers last.
#![allow(unsafe_code)] // reaches arrays by address; `Zeroed` for entries

use super::nodes::Nodes;
use super::{NO_ID_YET, XArray};
use pagemill_core::arena::{Table, Zeroed};
use pagemill_core::error::Result;
use pagemill_core::sync::{Acquire, AtomicU32, AtomicUsize, Guarded, Lock, Relaxed, Release};
use std::marker::PhantomData;

/// Maximum number of arrays in the table at a time. Further arrays get no number, so their nodes cannot be moved.
const MAX_ARRAYS: usize = 1 << 22;

/// The table entry of one array number.
struct ArrayEntry {
    /// Address of the array with this number; 0 while no array has the number.
    array: AtomicUsize,
    /// Held while a thread uses the array through this entry. The array is not dropped while the lock is held.
    lock: Lock,
    /// The next number in the list of free numbers, if this number is free.
    next: AtomicU32,
}

// SAFETY: the entry consists of atomic words (a lock is one, too), for which zero bits are valid.
unsafe impl Zeroed for ArrayEntry {}

#[derive(Default)]
/// The list of the numbers that no array has.
struct FreeArrays {
    /// The array number that was freed last; 0 if no number is free.
    head: u32,
    /// The highest number that was ever assigned to an array. The first number is 1.
    assigned: u32,
}

/// The table of the arrays that use the nodes of one [`Nodes`].
///
/// Example: [`XArray`](super::XArray).
pub struct Arrays<N: Nodes> {
    table: Table<ArrayEntry>,
    free: Guarded<FreeArrays>,
    _arrays: PhantomData<fn(&XArray<N>)>,
}

impl<N: Nodes> Arrays<N> {
    /// Creates an empty table of arrays. Reserves address space for the table, but allocates no memory.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if not enough address space is free.
    pub fn new() -> Result<Self> {
        let (table, free) = (Table::new(MAX_ARRAYS)?, Guarded::new(FreeArrays::default()));
        Ok(Self { table, free, _arrays: PhantomData })
    }

    /// Assigns a free number to an array. Returns `None` if no number is free, or the kernel refuses memory for the
    /// table.
    pub(super) fn assign_number(&self, array: &XArray<N>) -> Option<u32> {
        let id = self.free.with(|free| {
            if free.head != 0 {
                let id = free.head;
                free.head = self.entry(id).next.load(Relaxed);
                return Some(id);
            }
            let at = free.assigned as usize + 1;
            if at >= MAX_ARRAYS || self.table.open(1, at, at + 1).is_err() {
                return None;
            }
            free.assigned += 1;
            Some(free.assigned)
        })?;
        self.entry(id).array.store(std::ptr::from_ref(array) as usize, Release);
        Some(id)
    }

    /// Removes the array with number `id` from the table, so that later lookups fail. Waits for a thread that uses the
    /// array through its table entry.
    pub(super) fn remove(&self, id: u32) {
        let _guard = self.entry(id).lock.lock();
        self.entry(id).array.store(0, Relaxed);
    }

    /// Frees the number `id` for another array. No node may store the number any more.
    pub(super) fn free_number(&self, id: u32) {
        self.free.with(|free| {
            self.entry(id).next.store(free.head, Relaxed);
            free.head = id;
        });
    }

    /// Calls `act` with the array whose number `id` was stored in a node, and keeps the array from being dropped during
    /// the call. Returns `None` if the array was dropped, or if another thread holds the lock of the array's entry.
    pub(super) fn with<R>(&self, id: u32, act: impl FnOnce(&XArray<N>) -> R) -> Option<R> {
        let _guard = self.entry(id).lock.try_lock()?;
        let array = self.entry(id).array.load(Acquire) as *const XArray<N>;
        if array.is_null() {
            return None;
        }
        // SAFETY: `XArray::movable` requires that the array stays at its address until its drop has ended. The drop
        // begins with `remove`, which waits for this guard.
        Some(act(unsafe { &*array }))
    }

    fn entry(&self, id: u32) -> &ArrayEntry {
        self.table.get(id as usize)
    }

    /// Returns the resident bytes of the table of arrays.
    pub fn resident_bytes(&self) -> u64 {
        let used = self.free.with(|free| free.assigned);
        self.table.resident_bytes(0, used as usize + 1)
    }
}

impl<N: Nodes> XArray<N> {
    /// Creates an empty array whose nodes can be moved (`relocate`). Allocates no node.
    ///
    /// # Safety
    ///
    /// From the first call of one of its methods on, the array must stay at its address until it has been dropped
    /// there, or forever.
    pub const unsafe fn movable(nodes: &'static N) -> Self {
        Self::with_id(nodes, NO_ID_YET)
    }
}
