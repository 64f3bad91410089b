//! Pagemill's three kinds of cache.
#![allow(unsafe_code)] // an owner of objects, and what can be moved

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pagemill::Pagemill;
use pagemill::slab::{ByHandle, ByOwner, Candidates, Done, Fixed, Handle, Migrate, Movable, Moving, Settings};
use pagemill::slab::{Slot, Target};

use super::Access;
use crate::workload::Failure;
use crate::workload::hit::failed;

/// An object of which the first word is known; the rest is as it was found.
pub struct Object<Rest> {
    pub tag: u64,
    _rest: MaybeUninit<Rest>,
}

impl<Rest> Object<Rest> {
    #[inline]
    pub fn new(tag: u64) -> Self {
        Self { tag, _rest: MaybeUninit::uninit() }
    }
}

// SAFETY: plain data.
unsafe impl<Rest: Copy + Send + Sync + 'static> Movable for Object<Rest> {}

/// The one account of this process.
fn pagemill() -> Result<&'static Pagemill, Failure> {
    Pagemill::of_process().map_err(failed)
}

/// A cache of values that stay.
pub fn fixed<Rest>() -> Result<Fixed<Object<Rest>>, Failure> {
    pagemill()?.slabs.fixed(Settings::new("fixed")).map_err(failed)
}

impl<'cache, Rest: Copy + Send + Sync> Access for &'cache Fixed<Object<Rest>> {
    type Object = Slot<'cache, Object<Rest>>;

    #[inline]
    fn take(&mut self, tag: u64) -> Option<Self::Object> {
        self.insert(Object::new(tag)).ok()
    }

    #[inline]
    fn give(&mut self, object: Self::Object) -> u64 {
        object.tag
    }
}

/// An object of an owner: 0 is the tag of a free one.
pub struct Owned<Rest> {
    tag: AtomicU64,
    _rest: MaybeUninit<Rest>,
}

/// An owner that lets nothing be moved: what taking and giving cost is asked here.
pub struct Still<Rest>(MaybeUninit<Rest>);

// SAFETY: nothing is ever isolated.
unsafe impl<Rest: Copy + Send + Sync + 'static> Migrate for Still<Rest> {
    type Object = Owned<Rest>;
    type Isolated = ();

    fn construct(&self) -> Owned<Rest> {
        Owned { tag: AtomicU64::new(0), _rest: MaybeUninit::uninit() }
    }

    fn isolate(&self, objects: &mut Candidates<'_, Owned<Rest>>) {
        objects.retain(|_| false);
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, Owned<Rest>>,
        _to: &mut Target<'_, Owned<Rest>>,
        (): &mut (),
    ) -> Done<'object> {
        object.busy()
    }
}

/// A cache of objects that an owner has.
pub fn by_owner<Rest: Copy + Send + Sync + 'static>() -> Result<ByOwner<Still<Rest>>, Failure> {
    pagemill()?.slabs.by_owner(Settings::new("by owner"), Still(MaybeUninit::uninit())).map_err(failed)
}

impl<Rest: Copy + Send + Sync + 'static> Access for &ByOwner<Still<Rest>> {
    type Object = NonNull<Owned<Rest>>;

    #[inline]
    fn take(&mut self, tag: u64) -> Option<Self::Object> {
        let object = self.allocate().ok()?;
        // SAFETY: an object that was taken just now, and was constructed.
        unsafe { object.as_ref() }.tag.store(tag, Relaxed);
        Some(object)
    }

    #[inline]
    fn give(&mut self, object: Self::Object) -> u64 {
        // SAFETY: an object of `take`, which is given back once: there is no copy of it.
        let word = unsafe { &object.as_ref().tag };
        let tag = word.load(Relaxed);
        word.store(0, Relaxed);
        // SAFETY: as above; it is free by its owner's word.
        unsafe { self.free(object) };
        tag
    }
}

/// A cache of values that are reached by handle.
pub fn by_handle<Rest: Copy + Send + Sync + 'static>() -> Result<ByHandle<Object<Rest>>, Failure> {
    pagemill()?.slabs.by_handle(Settings::new("by handle")).map_err(failed)
}

impl<Rest: Copy + Send + Sync + 'static> Access for &ByHandle<Object<Rest>> {
    type Object = Handle<Object<Rest>>;

    #[inline]
    fn take(&mut self, tag: u64) -> Option<Self::Object> {
        self.insert(Object::new(tag)).ok()
    }

    #[inline]
    fn give(&mut self, object: Self::Object) -> u64 {
        self.remove_with(object, |object| object.tag).ok().flatten().unwrap_or(0)
    }
}
