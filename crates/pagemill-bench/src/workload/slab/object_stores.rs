//! Allocators and caches that store objects of one size, with the object's number in every word: the preloaded
//! allocator, and two kinds of slab cache.

use pagemill_slab::SlabCache;
use std::time::Duration;

use pagemill_slab as slab;
use pagemill_slab::{FixedSlab, Handle, HandleMap, Progress, Settings, Slabs, Slot};

use crate::native::{self, GiveBack, WordAllocation};
use crate::workload::{Failure, ensure};

/// An allocator or a cache that stores objects of `WORDS` words.
pub trait ObjectStore<const WORDS: usize>: Sync {
    /// The reference by which the workload finds an object.
    type Reference: Send;

    fn make_object(&self, number: u64) -> Result<Self::Reference, Failure>;

    fn free_object(&self, reference: Self::Reference) -> Result<(), Failure>;

    fn has_number(&self, reference: &Self::Reference, number: u64) -> bool;

    /// Returns the slab cache that stores the objects, if it can move them.
    fn movable_cache(&self) -> Option<&dyn SlabCache> {
        None
    }

    /// Returns all free memory to the system, by the call that this allocator or cache has for it.
    fn give_back(&self) -> Result<(), Failure> {
        self.movable_cache().map_or(Ok(()), |cache| cache.shrink().map(drop).map_err(Failure::from))
    }

    /// Makes one step of defragmentation. If another thread was making a step, the result is a step without progress.
    /// Returns none if this allocator or cache cannot move objects.
    fn defrag_step(&self, budget: Duration) -> Result<Option<Progress>, Failure> {
        match self.movable_cache().map(|cache| cache.defrag_step(budget)) {
            Some(Err(pagemill_core::Error::Busy { .. })) => Ok(Some(Progress::default())),
            other => other.transpose().map_err(Failure::from),
        }
    }

    /// Returns the number of objects that defragmentation has moved so far.
    fn moved_count(&self) -> Result<u64, Failure> {
        self.movable_cache().map_or(Ok(0), |cache| cache.info().map(|info| info.moved).map_err(Failure::from))
    }

    /// Returns the size of the table of handles in bytes; 0 if there is no such table.
    fn handle_bytes(&self) -> u64 {
        0
    }
}

/// The allocator that serves `malloc` in this process.
pub struct Malloc {
    pub how: GiveBack,
}

impl<const WORDS: usize> ObjectStore<WORDS> for Malloc {
    type Reference = WordAllocation;

    #[inline]
    fn make_object(&self, number: u64) -> Result<WordAllocation, Failure> {
        WordAllocation::filled(WORDS, number).ok_or_else(|| Failure::Other("malloc refused an object".to_owned()))
    }

    #[inline]
    fn free_object(&self, reference: WordAllocation) -> Result<(), Failure> {
        drop(reference);
        Ok(())
    }

    fn has_number(&self, reference: &WordAllocation, number: u64) -> bool {
        reference.words().len() == WORDS && reference.words().iter().all(|word| *word == number)
    }

    fn give_back(&self) -> Result<(), Failure> {
        native::give_back(self.how).map_err(Failure::Other)
    }
}

/// A slab cache of objects that do not move.
pub struct FixedStore<const WORDS: usize>(&'static FixedSlab<[u64; WORDS]>);

impl<const WORDS: usize> FixedStore<WORDS> {
    pub fn new(slabs: &'static Slabs) -> Result<Self, Failure> {
        let cache = slabs.fixed(Settings::new("fixed"))?;
        // The cache is leaked, because its objects borrow from it and the workload stores both in the same structure.
        Ok(Self(Box::leak(Box::new(cache))))
    }
}

impl<const WORDS: usize> ObjectStore<WORDS> for FixedStore<WORDS> {
    type Reference = Slot<'static, [u64; WORDS]>;

    #[inline]
    fn make_object(&self, number: u64) -> Result<Self::Reference, Failure> {
        self.0.insert([number; WORDS]).map_err(Failure::from)
    }

    #[inline]
    fn free_object(&self, reference: Self::Reference) -> Result<(), Failure> {
        drop(reference);
        Ok(())
    }

    fn has_number(&self, reference: &Self::Reference, number: u64) -> bool {
        reference.iter().all(|word| *word == number)
    }

    fn give_back(&self) -> Result<(), Failure> {
        self.0.shrink().map(|_| ()).map_err(Failure::from)
    }
}

/// A slab cache of values that are accessed by handle.
pub struct HandleStore<const WORDS: usize>(HandleMap<[u64; WORDS]>);

impl<const WORDS: usize> HandleStore<WORDS> {
    pub fn new(slabs: &'static Slabs) -> Result<Self, Failure> {
        slabs.by_handle(Settings::new("by handle")).map(Self).map_err(Failure::from)
    }
}

impl<const WORDS: usize> ObjectStore<WORDS> for HandleStore<WORDS> {
    type Reference = Handle<[u64; WORDS]>;

    #[inline]
    fn make_object(&self, number: u64) -> Result<Self::Reference, Failure> {
        self.0.insert([number; WORDS]).map_err(Failure::from)
    }

    #[inline]
    fn free_object(&self, reference: Self::Reference) -> Result<(), Failure> {
        ensure(self.0.remove(reference)?.is_some(), || "a handle stands for nothing")
    }

    fn has_number(&self, reference: &Self::Reference, number: u64) -> bool {
        self.0.get(*reference, &slab::enter()).is_some_and(|value| value.iter().all(|word| *word == number))
    }

    fn movable_cache(&self) -> Option<&dyn SlabCache> {
        Some(&self.0)
    }

    fn handle_bytes(&self) -> u64 {
        self.0.handle_bytes()
    }
}
