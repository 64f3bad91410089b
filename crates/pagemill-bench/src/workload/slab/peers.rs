//! Peers of the slab caches: the preloaded malloc, and keyed maps.

use std::sync::{Mutex, MutexGuard, PoisonError};

use sharded_slab::Slab;
use slotmap::{DefaultKey, SlotMap};

use super::Access;
use super::own::Object;
use crate::native::Tagged;

/// The C functions `malloc` and `free`.
pub struct Malloc {
    pub size: usize,
}

impl Access for Malloc {
    type Object = Tagged;

    #[inline]
    fn take(&mut self, tag: u64) -> Option<Tagged> {
        Tagged::new(self.size, tag)
    }

    #[inline]
    fn give(&mut self, object: Tagged) -> u64 {
        object.tag()
    }
}

/// A map of the crate slotmap, separate for each thread.
pub type Alone<Rest> = SlotMap<DefaultKey, Object<Rest>>;

impl<Rest> Access for Alone<Rest> {
    type Object = DefaultKey;

    #[inline]
    fn take(&mut self, tag: u64) -> Option<DefaultKey> {
        Some(self.insert(Object::new(tag)))
    }

    #[inline]
    fn give(&mut self, object: DefaultKey) -> u64 {
        self.remove(object).map_or(0, |object| object.tag)
    }
}

/// A map of the crate slotmap that all threads share, under a lock.
pub struct Locked<Rest>(Mutex<Alone<Rest>>);

impl<Rest> Locked<Rest> {
    pub fn new() -> Self {
        Self(Mutex::new(SlotMap::new()))
    }

    #[inline]
    fn map(&self) -> MutexGuard<'_, Alone<Rest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<Rest> Access for &Locked<Rest> {
    type Object = DefaultKey;

    #[inline]
    fn take(&mut self, tag: u64) -> Option<DefaultKey> {
        Some(self.map().insert(Object::new(tag)))
    }

    #[inline]
    fn give(&mut self, object: DefaultKey) -> u64 {
        self.map().remove(object).map_or(0, |object| object.tag)
    }
}

/// A map of the crate sharded-slab, which all threads share.
pub type Sharded<Rest> = Slab<Object<Rest>>;

impl<Rest> Access for &Sharded<Rest> {
    type Object = usize;

    #[inline]
    fn take(&mut self, tag: u64) -> Option<usize> {
        self.insert(Object::new(tag))
    }

    #[inline]
    fn give(&mut self, object: usize) -> u64 {
        Slab::take(*self, object).map_or(0, |object| object.tag)
    }
}
