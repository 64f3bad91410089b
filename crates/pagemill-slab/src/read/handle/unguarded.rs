//! Values that a thread reads without a guard: removed ones ([`Removed`]) and pinned ones ([`Pinned`]).
#![allow(unsafe_code)] // raw access to the values in objects

use super::{HandleInner, HandleMap, HandledValue};
use crate::read::handles::Key;
use crate::read::movable::Movable;
use std::ops::Deref;

/// A value that was removed from its map, so that no handle leads to it. Other threads may still read the value.
/// Dropping `Removed` retires the value, also during unwinding.
///
/// Example: [`HandleMap`].
pub struct Removed<'cache, T: Movable> {
    // Type invariant: this value alone frees `key` and retires its object. Until then, the word of `key` has the offset
    // of the object.
    pub(super) map: &'cache HandleMap<T>,
    /// The former handle of the value. The address of the value is not stored, because an `Option` of two words is
    /// returned in registers.
    pub(super) key: Key,
}

impl<T: Movable> Removed<'_, T> {
    #[inline(always)]
    fn object(&self) -> *mut HandledValue<T> {
        (self.map.base + self.key.load_word(self.map.words).object_offset()) as *mut HandledValue<T>
    }
}

impl<T: Movable> Drop for Removed<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        let next = self.key.next_generation();
        if next.is_none() {
            self.map.inner.handles.note_worn_out();
        }
        self.map.inner.free_and_retire(next, self.object() as usize);
    }
}

impl<T: Movable> Deref for Removed<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the word of the handle has the offset of the object (type invariant). The word was live until the
        // removal, so the value is initialized and does not change. Only the drop of `self` retires the object.
        unsafe { &(*self.object()).value }
    }
}

/// A pinned value, which keeps its address and contents while the `Pinned` exists. A value can have up to seven pins at
/// a time. Example: [`HandleMap`].
pub struct Pinned<'cache, T: Movable> {
    pub(super) cache: &'cache HandleInner<T>,
    pub(super) index: u32,
    pub(super) value: &'cache T,
}

impl<T: Movable> Deref for Pinned<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value
    }
}

impl<T: Movable> Drop for Pinned<'_, T> {
    fn drop(&mut self) {
        self.cache.handles.unpin(self.index);
    }
}
