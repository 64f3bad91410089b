//! Peers of the slab caches: maps that choose the keys of their values.

use std::sync::{Mutex, MutexGuard, PoisonError};

use sharded_slab::Slab;
use slotmap::{DefaultKey, SlotMap};

use super::pagemill_caches::Object;
use crate::workload::pairs::ObjectAllocator;

/// A map of the crate slotmap. Each thread has its own.
pub type ThreadSlotMap<Rest> = SlotMap<DefaultKey, Object<Rest>>;

impl<Rest> ObjectAllocator for ThreadSlotMap<Rest> {
    type Object = DefaultKey;

    #[inline]
    fn make_object(&mut self, tag: u64) -> Option<DefaultKey> {
        Some(self.insert(Object::new(tag)))
    }

    #[inline]
    fn free_object(&mut self, object: DefaultKey) -> u64 {
        self.remove(object).map_or(0, |object| object.tag)
    }
}

/// A map of the crate slotmap that all threads share, under a lock.
pub struct LockedSlotMap<Rest>(Mutex<ThreadSlotMap<Rest>>);

impl<Rest> LockedSlotMap<Rest> {
    pub fn new() -> Self {
        Self(Mutex::new(SlotMap::new()))
    }

    #[inline]
    fn map(&self) -> MutexGuard<'_, ThreadSlotMap<Rest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<Rest> ObjectAllocator for &LockedSlotMap<Rest> {
    type Object = DefaultKey;

    #[inline]
    fn make_object(&mut self, tag: u64) -> Option<DefaultKey> {
        Some(self.map().insert(Object::new(tag)))
    }

    #[inline]
    fn free_object(&mut self, object: DefaultKey) -> u64 {
        self.map().remove(object).map_or(0, |object| object.tag)
    }
}

/// A map of the crate sharded-slab, which all threads share.
pub type SharedSlab<Rest> = Slab<Object<Rest>>;

impl<Rest> ObjectAllocator for &SharedSlab<Rest> {
    type Object = usize;

    #[inline]
    fn make_object(&mut self, tag: u64) -> Option<usize> {
        self.insert(Object::new(tag))
    }

    #[inline]
    fn free_object(&mut self, object: usize) -> u64 {
        Slab::take(*self, object).map_or(0, |object| object.tag)
    }
}
