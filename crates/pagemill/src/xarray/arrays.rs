//! Which arrays there are, by number: so that who meets a node finds its array, and finds it alive.
//!
//! A node knows the number of its array. Who moves nodes has the entry of that number for as long as he is at the array; an array that
//! is dropped takes its entry first, so it waits for one node at most.
//!
//! Lock order: an entry, then (only tried) the lock of its array, as an array that is dropped has nobody at it; the list of free
//! numbers last.
#![allow(unsafe_code)] // arrays at addresses that their makers promise; says that zero bits are an entry

use super::nodes::Nodes;
use super::{NO_ID_YET, XArray};
use crate::arena::{Table, Zeroed};
use crate::error::Result;
use crate::sync::{Acquire, AtomicU32, AtomicUsize, Guarded, Lock, Relaxed, Release};
use std::marker::PhantomData;

/// Arrays with nodes that can be found at a time. Nodes of others stay where they are.
const MAX_ARRAYS: usize = 1 << 22;

/// One array, by number.
struct Entry {
    /// Its address; 0 while no array has the number.
    array: AtomicUsize,
    /// Who has it keeps the array from being dropped.
    lock: Lock,
    /// Of free numbers: the next one.
    next: AtomicU32,
}

// SAFETY: atomic words, and a lock that is one: zero is free.
unsafe impl Zeroed for Entry {}

#[derive(Default)]
struct Free {
    /// The number that was given back last; 0 none.
    head: u32,
    /// Numbers that have been used, from 1 on.
    used: u32,
}

/// The arrays with nodes of one [`Nodes`].
pub struct Arrays<N: Nodes> {
    table: Table<Entry>,
    free: Guarded<Free>,
    _arrays: PhantomData<fn(&XArray<N>)>,
}

impl<N: Nodes> Arrays<N> {
    /// Reserves addresses.
    ///
    /// # Errors
    ///
    /// [`crate::Error::System`] if there are none.
    pub fn new() -> Result<Self> {
        let (table, free) = (Table::new(MAX_ARRAYS)?, Guarded::new(Free::default()));
        Ok(Self { table, free, _arrays: PhantomData })
    }

    /// Gives an array a number, if there is one.
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

    /// From here on nobody finds the array: waits for who is at it.
    pub(super) fn leave(&self, id: u32) {
        let _guard = self.entry(id).lock.lock();
        self.entry(id).array.store(0, Relaxed);
    }

    /// Another array may have the number, as no node says it any more.
    pub(super) fn give(&self, id: u32) {
        self.free.with(|free| {
            self.entry(id).next.store(free.head, Relaxed);
            free.head = id;
        });
    }

    /// Lets `act` have the array of a number that a node has had, and keeps it from being dropped meanwhile; unless it is gone, or
    /// somebody else is at it.
    pub(super) fn with<R>(&self, id: u32, act: impl FnOnce(&XArray<N>) -> R) -> Option<R> {
        let _guard = self.entry(id).lock.try_lock()?;
        let array = self.entry(id).array.load(Acquire) as *const XArray<N>;
        if array.is_null() {
            return None;
        }
        // SAFETY: it entered as `XArray::movable` was promised that it stays at its address until its drop has ended, which begins
        // with `leave`: that waits for this guard.
        Some(act(unsafe { &*array }))
    }

    fn entry(&self, id: u32) -> &Entry {
        self.table.get(id as usize)
    }

    /// Bytes of metadata that are resident.
    pub fn resident_bytes(&self) -> u64 {
        let used = self.free.with(|free| free.used);
        self.table.resident_bytes(0, used as usize + 1)
    }
}

impl<N: Nodes> XArray<N> {
    /// An empty one, whose nodes can be moved ([`super::relocate()`]). Takes no node.
    ///
    /// # Safety
    ///
    /// From the first call of one of its methods on it stays at its address, until it has been dropped there; or it stays for good.
    pub const unsafe fn movable(nodes: &'static N) -> Self {
        Self::with_id(nodes, NO_ID_YET)
    }
}
