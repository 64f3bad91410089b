//! Caches of objects with fixed addresses. A [`Slot`] owns a value in the memory of a cache, like a box.
#![allow(unsafe_code)] // raw access to the values in objects

use crate::alloc::engine::{Engine, ObjectSpec};
use crate::alloc::settings::Settings;
use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::insert_error::InsertError;
use pagemill_core::error::Result;
use std::alloc::Layout;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// The part of a [`FixedSlab`] to which the list of all caches refers.
pub(crate) struct FixedInner(Engine);

impl Cache for FixedInner {
    fn engine(&self) -> &Engine {
        &self.0
    }

    fn shrink(&self) -> Result<u64> {
        self.0.shrink()
    }
}

/// A cache of values of one type. A value keeps its address until it is dropped.
///
/// ```
/// use pagemill::slab::{FixedSlab, SlabCache};
///
/// let cache = FixedSlab::<String>::new("names")?;
/// let mut name = cache.insert("page".to_owned())?; // a `Slot`, used as a `Box`
/// name.push_str("mill");
/// assert_eq!(name.into_inner(), "pagemill");
/// cache.shrink()?; // the empty slab returns to the system
/// assert_eq!(cache.info()?.total.used, 0);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct FixedSlab<T> {
    pub(crate) inner: Arc<FixedInner>,
    _values: PhantomData<fn(T) -> T>,
}

/// An owned value in a slab, like a `Box`. Dropping the slot drops the value and frees the object.
///
/// Example: [`FixedSlab`].
pub struct Slot<'cache, T> {
    // Type invariant: `at` points to a valid value in an object of `cache`. Only this slot owns the value.
    cache: &'cache Engine,
    at: NonNull<T>,
    _value: PhantomData<T>,
}

// SAFETY: as for a box, only the value is sent to another thread. Any thread may use the engine.
unsafe impl<T: Send> Send for Slot<'_, T> {}
// SAFETY: other threads get only a shared reference to the value. Any thread may use the engine.
unsafe impl<T: Sync> Sync for Slot<'_, T> {}

impl Slabs {
    /// Creates a cache of objects that keep their address.
    ///
    /// # Errors
    ///
    /// [`BadLength`](pagemill_core::Error::BadLength), [`BadAlignment`](pagemill_core::Error::BadAlignment) for
    /// unsupported object or slab sizes, [`BadRatio`](pagemill_core::Error::BadRatio),
    /// [`TooMany`](pagemill_core::Error::TooMany) if there are [`MAX_CACHES`](crate::MAX_CACHES),
    /// [`System`](pagemill_core::Error::System).
    pub fn fixed<T>(&'static self, settings: Settings) -> Result<FixedSlab<T>> {
        let object = ObjectSpec {
            layout: Layout::new::<T>(),
            user_bytes: size_of::<T>(),
            poisoned_range: 0..size_of::<T>(),
            constructor: None,
            kind: SlabKind::Fixed,
            handles: None,
        };
        self.create_cache(settings, object, FixedInner).map(|inner| FixedSlab { inner, _values: PhantomData })
    }
}

impl<T> FixedSlab<T> {
    /// Creates a cache with default parameters among the slab caches of the process.
    ///
    /// # Errors
    ///
    /// As [`FixedSlab::with`].
    pub fn new(name: &str) -> Result<Self> {
        Self::with(Settings::new(name))
    }

    /// Creates a cache among the slab caches of the process.
    ///
    /// # Errors
    ///
    /// [`BadLength`](pagemill_core::Error::BadLength), [`BadAlignment`](pagemill_core::Error::BadAlignment) for
    /// unsupported object or slab sizes, [`BadRatio`](pagemill_core::Error::BadRatio),
    /// [`TooMany`](pagemill_core::Error::TooMany) if the process has 1,024 slab caches,
    /// [`System`](pagemill_core::Error::System) if there are no addresses, or if the first use of the library fails.
    pub fn with(settings: Settings) -> Result<Self> {
        Slabs::of_process()?.fixed(settings)
    }

    /// Allocates an object and moves the value into it.
    ///
    /// Cost: mostly a pop from this thread's magazine, a stack of free objects. Sometimes a new slab has to be set up,
    /// and rarely a new block.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoMemory`], [`pagemill_core::Error::NoAddresses`], [`pagemill_core::Error::System`]. The
    /// error returns the value.
    #[inline]
    #[track_caller]
    pub fn insert(&self, value: T) -> std::result::Result<Slot<'_, T>, InsertError<T>> {
        self.insert_into(self.inner.0.allocate(), value)
    }

    /// As [`FixedSlab::insert`], in memory of one NUMA node.
    ///
    /// # Errors
    ///
    /// As [`FixedSlab::insert`]; [`pagemill_core::Error::BadNode`].
    #[track_caller]
    pub fn insert_on(&self, node: usize, value: T) -> std::result::Result<Slot<'_, T>, InsertError<T>> {
        self.insert_into(self.inner.0.allocate_on(node), value)
    }

    /// Moves a value into the result of an allocation, or returns the value with the allocation's error.
    #[inline]
    fn insert_into(&self, object: Result<usize>, value: T) -> std::result::Result<Slot<'_, T>, InsertError<T>> {
        let object = match object {
            Ok(object) => object,
            Err(error) => return Err(InsertError { value, error }),
        };
        let at = object as *mut T;
        // SAFETY: `object` was just allocated. It is large and aligned enough for a `T`, and this call alone owns it.
        let at = unsafe {
            at.write(value);
            NonNull::new_unchecked(at)
        };
        Ok(Slot { cache: &self.inner.0, at, _value: PhantomData })
    }
}

#[cfg(test)]
impl<T> FixedSlab<T> {
    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.0
    }
}

impl<T> Slot<'_, T> {
    /// Returns the NUMA node of the value's memory.
    pub fn node(&self) -> usize {
        self.cache.node_of(self.at.as_ptr() as usize)
    }

    /// Moves the value out of the slab, and frees the object that held it.
    pub fn into_inner(self) -> T {
        let slot = std::mem::ManuallyDrop::new(self);
        // SAFETY: the slot owns the value (type invariant). The value is read once, because the slot is not dropped.
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
        // SAFETY: the slot owns the value (type invariant), and no reference to it is left. The object is freed even if
        // the destructor panics.
        unsafe {
            let _place = FreeOnDrop(self.cache, self.at.as_ptr() as usize);
            self.at.drop_in_place();
        }
    }
}

/// Frees the object of a slot when this value is dropped, also during unwinding.
struct FreeOnDrop<'cache>(&'cache Engine, usize);

impl Drop for FreeOnDrop<'_> {
    #[inline]
    #[track_caller]
    fn drop(&mut self) {
        // SAFETY: created only by the drop of the slot that owned the object.
        unsafe { self.0.free(self.1) };
    }
}
