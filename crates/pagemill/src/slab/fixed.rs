//! Objects that stay where they are: a [`Slot`] is a box whose memory is a cache's.
#![allow(unsafe_code)] // values in slots

use super::engine::Engine;
use super::info::{self, SlabInfo};
use super::{Kind, Member};
use crate::error::Result;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

pub(super) struct Inner(Engine);

impl Inner {
    pub fn new(engine: Engine) -> Self {
        Self(engine)
    }
}

impl Member for Inner {
    fn engine(&self) -> &Engine {
        &self.0
    }

    fn kind(&self) -> Kind {
        Kind::Fixed
    }

    fn shrink(&self) -> Result<u64> {
        self.0.shrink()
    }
}

/// A cache of values of one type, which stay where they are until they are dropped.
pub struct Fixed<T> {
    inner: Arc<Inner>,
    _values: PhantomData<fn(T) -> T>,
}

/// A value in a slab. Drops it, and gives its place back.
///
/// # Invariants
///
/// `at` holds a value of this slot's alone, in an object of `cache`.
pub struct Slot<'cache, T> {
    cache: &'cache Engine,
    at: NonNull<T>,
    _value: PhantomData<T>,
}

// SAFETY: as a box: the value and nothing else is sent; engines are shared by threads.
unsafe impl<T: Send> Send for Slot<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Slot<'_, T> {}

impl<T> Fixed<T> {
    pub(super) fn new(inner: Arc<Inner>) -> Self {
        Self { inner, _values: PhantomData }
    }

    /// Puts a value in.
    ///
    /// Cost: mostly that of taking a word from a stack of this thread's. A new slab is set up now and then, and a block.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoMemory`], [`crate::Error::NoAddresses`], [`crate::Error::System`]: the value is dropped.
    #[inline]
    #[track_caller]
    pub fn insert(&self, value: T) -> Result<Slot<'_, T>> {
        let object = self.inner.0.allocate()?;
        Ok(self.fill(object, value))
    }

    /// As [`Fixed::insert`], in memory of one node.
    ///
    /// # Errors
    ///
    /// As [`Fixed::insert`]; [`crate::Error::BadNode`].
    #[track_caller]
    pub fn insert_on(&self, node: usize, value: T) -> Result<Slot<'_, T>> {
        let object = self.inner.0.allocate_on(node)?;
        Ok(self.fill(object, value))
    }

    #[inline]
    fn fill(&self, object: usize, value: T) -> Slot<'_, T> {
        let at = object as *mut T;
        // SAFETY: an object that was taken: large and aligned enough for a `T`, and ours alone.
        let at = unsafe {
            at.write(value);
            NonNull::new_unchecked(at)
        };
        Slot { cache: &self.inner.0, at, _value: PhantomData }
    }

    /// Gives back all that no value is in: what threads and nodes keep for the next, empty slabs of blocks in small pages, idle
    /// blocks. Says how many bytes less are charged for the cache.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Busy`] if somebody else does the same for a second, or a thread was stopped in the midst of a call.
    pub fn shrink(&self) -> Result<u64> {
        self.inner.shrink()
    }

    /// # Errors
    ///
    /// [`crate::Error::WrongState`] in a fork child.
    pub fn info(&self) -> Result<SlabInfo> {
        info::of(&*self.inner)
    }
}

#[cfg(test)]
impl<T> Fixed<T> {
    pub(super) fn engine(&self) -> &Engine {
        &self.inner.0
    }
}

impl<T> Slot<'_, T> {
    /// The node whose memory it is in.
    pub fn node(&self) -> usize {
        self.cache.node_of(self.at.as_ptr() as usize)
    }

    /// Takes the value out.
    pub fn into_inner(self) -> T {
        let slot = std::mem::ManuallyDrop::new(self);
        // SAFETY: the slot's own value (type invariant), read once: the slot is not dropped.
        unsafe {
            let value = slot.at.read();
            slot.cache.free(slot.at.as_ptr() as usize);
            value
        }
    }
}

impl<T> Deref for Slot<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: type invariant.
        unsafe { self.at.as_ref() }
    }
}

impl<T> DerefMut for Slot<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: type invariant.
        unsafe { self.at.as_mut() }
    }
}

impl<T> Drop for Slot<'_, T> {
    #[inline]
    #[track_caller]
    fn drop(&mut self) {
        // SAFETY: the slot's own value (type invariant), of which nobody has a reference any more. Its place goes back also
        // where its destructor panics.
        unsafe {
            let _place = Place(self.cache, self.at.as_ptr() as usize);
            self.at.drop_in_place();
        }
    }
}

/// Gives a slot's place back, whatever happens.
struct Place<'cache>(&'cache Engine, usize);

impl Drop for Place<'_> {
    #[inline]
    #[track_caller]
    fn drop(&mut self) {
        // SAFETY: made by a slot's end, whose object it was.
        unsafe { self.0.free(self.1) };
    }
}
