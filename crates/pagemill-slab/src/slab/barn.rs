//! Barns: per-node depots of full sheaves (arrays of free objects) that refill magazines.
//!
//! Without them, a thread that frees what another allocates would look up the slab of every object. Each node has several
//! barns. So a thread that needs more than its magazine holds mostly gets back its own sheaves, without contention. Each
//! barn has its own lock; no other lock is taken under it.
#![allow(unsafe_code)] // zero bits are a valid sheaf

use super::meta::{Held32, Held64};
use super::shape::MAX_SHEAF;
use pagemill_core::arena::{Table, Zeroed};
use pagemill_core::error::Result;
use pagemill_core::sync::Lock;

/// Barns of a cache on each node. A thread prefers one by its thread slot.
pub(super) const BARNS: usize = 8;

/// Maximum number of sheaves in a barn.
const PLACES: usize = 16;

/// Objects that move between magazine and barn at once.
#[repr(C)]
pub(super) struct Sheaf([Held64; MAX_SHEAF]);

// SAFETY: atomic words.
unsafe impl Zeroed for Sheaf {}

/// Memory of the barns of all caches.
pub(super) struct BarnMemory {
    sheaves: Table<Sheaf>,
}

impl BarnMemory {
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] without addresses.
    pub fn new(barns: usize) -> Result<Self> {
        Ok(Self { sheaves: Table::new(barns * PLACES)? })
    }

    /// Opens `barns` barns.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`].
    pub fn open(&self, first: usize, barns: usize) -> Result<()> {
        self.sheaves.open(first * PLACES, first * PLACES, (first + barns) * PLACES)
    }

    /// Resident bytes of the first `barns` barns.
    pub fn resident_bytes(&self, barns: usize) -> u64 {
        self.sheaves.resident_bytes(0, barns * PLACES)
    }
}

/// A bounded stack of full sheaves with its own lock, shared by some threads of a node.
pub(super) struct Barn {
    barn_memory: &'static BarnMemory,
    first: usize,
    /// Objects in each sheaf.
    sheaf: usize,
    lock: Lock,
    /// Number of sheaves. Changed under the lock.
    full: Held32,
}

impl Barn {
    /// The barn with this number, which must be unused.
    pub fn new(barn_memory: &'static BarnMemory, number: usize, sheaf: usize) -> Self {
        Self { barn_memory, first: number * PLACES, sheaf, lock: Lock::new(), full: Held32::default() }
    }

    pub fn objects(&self) -> usize {
        self.full.get() as usize * self.sheaf
    }

    /// Stores a sheaf; returns false if the length is not that of a sheaf or the barn is full.
    pub fn put(&self, objects: &[usize]) -> bool {
        if objects.len() != self.sheaf || self.full.get() as usize == PLACES {
            return false;
        }
        let _guard = self.lock.lock();
        let full = self.full.get() as usize;
        let is_in = full < PLACES;
        if is_in {
            let words = &self.barn_memory.sheaves.get(self.first + full).0;
            words.iter().zip(objects).for_each(|(word, object)| word.set(*object as u64));
            self.full.set(full as u32 + 1);
        }
        is_in
    }

    /// Removes a sheaf; returns the number of its objects. An empty barn costs one load.
    pub fn take(&self, objects: &mut [usize]) -> usize {
        if self.full.get() == 0 || objects.len() < self.sheaf {
            return 0;
        }
        let _guard = self.lock.lock();
        let Some(last) = self.full.get().checked_sub(1) else { return 0 };
        self.full.set(last);
        let words = &self.barn_memory.sheaves.get(self.first + last as usize).0;
        objects.iter_mut().zip(&words[..self.sheaf]).for_each(|(object, word)| *object = word.get() as usize);
        self.sheaf
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_core::arena::place;

    /// Each stored object is removed once; adjacent barns do not mix.
    #[test]
    fn sheaves_come_out_once() {
        let barn_memory = place(BarnMemory::new(2).unwrap()).unwrap();
        barn_memory.open(0, 2).unwrap();
        let barns = [Barn::new(barn_memory, 0, 3), Barn::new(barn_memory, 1, 3)];
        let mut inside = Vec::new();
        for number in 0..2 * PLACES {
            let objects = [number * 3, number * 3 + 1, number * 3 + 2];
            if barns[number % 2].put(&objects) {
                inside.extend(objects);
            }
        }
        assert_eq!((inside.len(), barns[0].put(&[7, 8, 9]), barns[0].put(&[7])), (6 * PLACES, false, false));
        let mut out = Vec::new();
        let mut sheaf = [0; 3];
        for barn in &barns {
            while barn.take(&mut sheaf) == 3 {
                out.extend(sheaf);
            }
            assert_eq!((barn.objects(), barn.take(&mut sheaf[..2])), (0, 0));
        }
        out.sort_unstable();
        assert_eq!(out, inside);
    }
}
