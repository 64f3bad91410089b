//! Barns: bounded stacks of full sheaves (arrays of free objects) on each NUMA node, from which magazines are refilled.
//!
//! If one thread frees objects that another thread allocates, barns pass the objects on as whole sheaves, without a
//! look-up of the slab of each object. A node has several barns, and a thread prefers one of them. So a thread that
//! needs more than its magazine holds mostly gets back its own sheaves, without contention. Each barn has a lock, under
//! which no other lock is taken.
#![allow(unsafe_code)] // zero bits are a valid sheaf

use crate::alloc::meta::{LockedU32, LockedU64};
use crate::alloc::shape::MAX_SHEAF_LEN;
use pagemill_core::arena::{Table, Zeroed};
use pagemill_core::error::Result;
use pagemill_core::sync::Lock;

/// Number of barns that a slab cache has on each NUMA node. A thread prefers the barn that its thread slot selects.
pub(crate) const BARNS_PER_NODE: usize = 8;

/// Maximum number of sheaves in a barn.
const SHEAVES_PER_BARN: usize = 16;

/// An array of free objects, the unit of transfer between magazine and barn.
#[repr(C)]
pub(crate) struct Sheaf([LockedU64; MAX_SHEAF_LEN]);

// SAFETY: atomic words are valid if all bits are zero.
unsafe impl Zeroed for Sheaf {}

/// The memory for the sheaves of all barns of all slab caches, in one table.
pub(crate) struct BarnMemory {
    sheaves: Table<Sheaf>,
}

impl BarnMemory {
    /// Reserves addresses for the sheaves of `barns` barns.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if no addresses are available.
    pub fn new(barns: usize) -> Result<Self> {
        Ok(Self { sheaves: Table::new(barns * SHEAVES_PER_BARN)? })
    }

    /// Makes the memory of `barns` barns accessible, beginning with the barn at index `first`.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`].
    pub fn open(&self, first: usize, barns: usize) -> Result<()> {
        self.sheaves.open(first * SHEAVES_PER_BARN, first * SHEAVES_PER_BARN, (first + barns) * SHEAVES_PER_BARN)
    }

    /// Returns the resident bytes of the sheaves of the first `barns` barns.
    pub fn resident_bytes(&self, barns: usize) -> u64 {
        self.sheaves.resident_bytes(0, barns * SHEAVES_PER_BARN)
    }
}

/// A bounded stack of full sheaves with its own lock, shared by some of the threads that allocate from one NUMA node.
pub(crate) struct Barn {
    barn_memory: &'static BarnMemory,
    /// Index of the barn's first sheaf in `barn_memory`.
    first_sheaf: usize,
    /// Number of objects in a sheaf.
    sheaf_len: usize,
    lock: Lock,
    /// Number of sheaves that the barn contains. Changed under `lock`.
    sheaf_count: LockedU32,
}

impl Barn {
    /// Creates the barn at index `number`: its sheaves begin at index `number * SHEAVES_PER_BARN` of `barn_memory`. No
    /// other barn may use these sheaves.
    pub fn new(barn_memory: &'static BarnMemory, number: usize, sheaf_len: usize) -> Self {
        debug_assert!(sheaf_len > 0 && sheaf_len <= MAX_SHEAF_LEN);
        Self {
            barn_memory,
            first_sheaf: number * SHEAVES_PER_BARN,
            sheaf_len,
            lock: Lock::new(),
            sheaf_count: LockedU32::default(),
        }
    }

    /// Returns the approximate number of free objects in the barn.
    pub fn objects(&self) -> usize {
        self.sheaf_count.get() as usize * self.sheaf_len
    }

    /// Adds `objects` to the barn as a sheaf. Returns false if `objects` does not have the length of a sheaf, or the
    /// barn is full.
    pub fn push_sheaf(&self, objects: &[usize]) -> bool {
        if objects.len() != self.sheaf_len || self.sheaf_count.get() as usize == SHEAVES_PER_BARN {
            return false;
        }
        let _guard = self.lock.lock();
        let full = self.sheaf_count.get() as usize;
        debug_assert!(full <= SHEAVES_PER_BARN);
        let has_room = full < SHEAVES_PER_BARN;
        if has_room {
            let words = &self.barn_memory.sheaves.get(self.first_sheaf + full).0;
            words.iter().zip(objects).for_each(|(word, object)| word.set(*object as u64));
            self.sheaf_count.set(full as u32 + 1);
        }
        has_room
    }

    /// Removes a sheaf from the barn, copies its objects to `objects`, and returns their number. Returns 0 if the barn
    /// is empty or `objects` is shorter than a sheaf. With an empty barn, the call costs one load.
    pub fn pop_sheaf(&self, objects: &mut [usize]) -> usize {
        if self.sheaf_count.get() == 0 || objects.len() < self.sheaf_len {
            return 0;
        }
        let _guard = self.lock.lock();
        let Some(last) = self.sheaf_count.get().checked_sub(1) else { return 0 };
        self.sheaf_count.set(last);
        let words = &self.barn_memory.sheaves.get(self.first_sheaf + last as usize).0;
        objects.iter_mut().zip(&words[..self.sheaf_len]).for_each(|(object, word)| *object = word.get() as usize);
        self.sheaf_len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_core::arena::place;

    /// Fills and empties two adjacent barns. Each stored object must be removed once, and no barn may return a sheaf of
    /// the other.
    #[test]
    fn each_stored_object_is_removed_once() {
        let barn_memory = place(BarnMemory::new(2).unwrap()).unwrap();
        barn_memory.open(0, 2).unwrap();
        let barns = [Barn::new(barn_memory, 0, 3), Barn::new(barn_memory, 1, 3)];
        let mut inside = Vec::new();
        for number in 0..2 * SHEAVES_PER_BARN {
            let objects = [number * 3, number * 3 + 1, number * 3 + 2];
            if barns[number % 2].push_sheaf(&objects) {
                inside.extend(objects);
            }
        }
        assert_eq!(
            (inside.len(), barns[0].push_sheaf(&[7, 8, 9]), barns[0].push_sheaf(&[7])),
            (6 * SHEAVES_PER_BARN, false, false)
        );
        let mut out = Vec::new();
        let mut sheaf = [0; 3];
        for barn in &barns {
            while barn.pop_sheaf(&mut sheaf) == 3 {
                out.extend(sheaf);
            }
            assert_eq!((barn.objects(), barn.pop_sheaf(&mut sheaf[..2])), (0, 0));
        }
        out.sort_unstable();
        assert_eq!(out, inside);
    }
}
