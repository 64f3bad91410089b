//! Pagemill's three kinds of slab cache, for the workloads `speed` and `reads`.
#![allow(unsafe_code)] // an owner of objects, and movable values

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pagemill_slab::{Candidates, Done, FixedSlab, Handle, HandleMap, Migrate, Movable, Moving, OwnerSlab, Settings};
use pagemill_slab::{Slot, Target};
use pagemill_testbed::Testbed;

use crate::workload::Failure;
use crate::workload::pairs::ObjectAllocator;

/// An object whose first word is a tag. The rest of the object is uninitialized.
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

// SAFETY: the object is plain data, so it may be moved by copying its bytes.
unsafe impl<Rest: Copy + Send + Sync + 'static> Movable for Object<Rest> {}

fn process_testbed() -> Result<&'static Testbed, Failure> {
    Testbed::of_process().map_err(Failure::from)
}

pub fn fixed_cache<Rest>() -> Result<FixedSlab<Object<Rest>>, Failure> {
    process_testbed()?.slabs.fixed(Settings::new("fixed")).map_err(Failure::from)
}

impl<'cache, Rest: Copy + Send + Sync> ObjectAllocator for &'cache FixedSlab<Object<Rest>> {
    type Object = Slot<'cache, Object<Rest>>;

    #[inline]
    fn make_object(&mut self, tag: u64) -> Option<Self::Object> {
        self.insert(Object::new(tag)).ok()
    }

    #[inline]
    fn free_object(&mut self, object: Self::Object) -> u64 {
        object.tag
    }
}

/// An object of a slab cache whose owner decides about moves of the objects. The tag of a free object is 0.
pub struct Owned<Rest> {
    tag: AtomicU64,
    _rest: MaybeUninit<Rest>,
}

/// An owner of objects that refuses all their moves, since the workload `speed` measures only allocation and free.
pub struct RefusingOwner<Rest>(MaybeUninit<Rest>);

// SAFETY: `isolate` keeps no object, so none is ever moved.
unsafe impl<Rest: Copy + Send + Sync + 'static> Migrate for RefusingOwner<Rest> {
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

pub fn owner_cache<Rest: Copy + Send + Sync + 'static>() -> Result<OwnerSlab<RefusingOwner<Rest>>, Failure> {
    process_testbed()?
        .slabs
        .by_owner(Settings::new("by owner"), RefusingOwner(MaybeUninit::uninit()))
        .map_err(Failure::from)
}

impl<Rest: Copy + Send + Sync + 'static> ObjectAllocator for &OwnerSlab<RefusingOwner<Rest>> {
    type Object = NonNull<Owned<Rest>>;

    #[inline]
    fn make_object(&mut self, tag: u64) -> Option<Self::Object> {
        let object = self.allocate().ok()?;
        // SAFETY: the object was just allocated, and `construct` has initialized it.
        unsafe { object.as_ref() }.tag.store(tag, Relaxed);
        Some(object)
    }

    #[inline]
    fn free_object(&mut self, object: Self::Object) -> u64 {
        // SAFETY: `make_object` returned the object, and it is freed once, since the caller has no copy of the
        // reference.
        let word = unsafe { &object.as_ref().tag };
        let tag = word.load(Relaxed);
        word.store(0, Relaxed);
        // SAFETY: the object was allocated and is freed only once; its tag 0 marks it as free.
        unsafe { self.free(object) };
        tag
    }
}

pub fn handle_cache<Rest: Copy + Send + Sync + 'static>() -> Result<HandleMap<Object<Rest>>, Failure> {
    process_testbed()?.slabs.by_handle(Settings::new("by handle")).map_err(Failure::from)
}

impl<Rest: Copy + Send + Sync + 'static> ObjectAllocator for &HandleMap<Object<Rest>> {
    type Object = Handle<Object<Rest>>;

    #[inline]
    fn make_object(&mut self, tag: u64) -> Option<Self::Object> {
        self.insert(Object::new(tag)).ok()
    }

    #[inline]
    fn free_object(&mut self, object: Self::Object) -> u64 {
        self.remove(object).ok().flatten().map_or(0, |object| object.tag)
    }
}
