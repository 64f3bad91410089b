//! Caches by owner: the owner of the objects moves them, because it knows all references to an object and can update
//! the references.
#![allow(unsafe_code)] // the contract of owners; raw access to objects

use crate::alloc::engine::{Engine, ObjectSpec};
use crate::alloc::settings::Settings;
use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::defrag::migrate::{Chunk, DestinationSource, Destinations, MoveOutcome, Mover};
use crate::defrag::passes::Progress;
use crate::defrag::steps;
use pagemill_core::error::Result;
use std::alloc::Layout;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot move the objects of an `OwnerSlab`",
    label = "not `Migrate`",
    note = "the parameter is the type that knows all references to the objects, not the type of the objects",
    note = "a `HandleMap` moves its objects itself; a `FixedSlab` never moves them"
)]
/// The interface of the owner of objects in an [`OwnerSlab`]. The owner moves the objects.
///
/// At any time an object is *free* or *live*. The owner makes an object live after [`OwnerSlab::allocate`], and free
/// again before [`OwnerSlab::free`]. The cache does not know the state of an object. The owner must recognize the state
/// from the object's contents, which [`Migrate::construct`] or the owner wrote last. A reference count that is 0 while
/// the object is free is sufficient.
///
/// # Safety
///
/// - A free object needs no destructor. A free object is valid for every access that the owner makes before the owner
///   knows whether the object is live.
/// - `isolate` keeps only live objects. No thread frees them before `migrate` receives them.
/// - After `migrate` reports *moved* or *freed*, no thread reaches the old object, except threads that reached it
///   earlier under a guard of [`crate::enter`]. The object is free once these guards are dropped, and needs no
///   destructor.
/// - `migrate` panics only before any thread can reach the object at its new address. The new address is then freed.
///
/// ```
/// use pagemill::slab::{Candidates, Done, Migrate, Moving, OwnerSlab, Target};
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
///
/// /// Objects are numbers, 0 while free. The owner has the only references: none, so it moves nothing.
/// struct Numbers;
///
/// // SAFETY: no object is kept for a move.
/// unsafe impl Migrate for Numbers {
///     type Object = AtomicU64;
///     type Isolated = ();
///     fn construct(&self) -> AtomicU64 {
///         AtomicU64::new(0)
///     }
///     fn isolate(&self, objects: &mut Candidates<'_, AtomicU64>) {
///         objects.retain(|_| false);
///     }
///     fn migrate<'o>(&self, object: Moving<'o, AtomicU64>, _: &mut Target<'_, AtomicU64>, (): &mut ()) -> Done<'o> {
///         object.busy() // a mover takes a `New` from the target, copies, and returns `object.moved(new)`
///     }
/// }
///
/// let cache = OwnerSlab::new("numbers", Numbers)?;
/// let object = cache.allocate()?;
/// // SAFETY: a constructed object, used and freed by this thread only.
/// unsafe {
///     assert_eq!(object.as_ref().swap(7, Relaxed), 0);
///     object.as_ref().store(0, Relaxed);
///     cache.free(object);
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
pub unsafe trait Migrate: Send + Sync + 'static {
    type Object;

    /// State that `isolate` passes to `migrate` for the objects of one slab. A panic in the destructor of this state
    /// counts as a panic of `migrate`.
    type Isolated;

    /// Creates a free object. Called for every object of a slab before the first of them is allocated.
    fn construct(&self) -> Self::Object;

    /// Selects the objects to move: rejects free and unmovable objects, and increments the reference count of each
    /// other object, or locks it.
    ///
    /// The slab is locked while `isolate` runs: threads that allocate or free its objects wait. If `isolate` calls the
    /// cache, the call panics; that includes [`SlabCache::info`](crate::SlabCache::info). `isolate` must not wait for a
    /// thread that may be inside a call to the cache. If one lock covers both the references and calls to the cache,
    /// use `try_lock`, and reject all objects if the lock is held. Few objects are then moved under load. It is better
    /// to call the cache outside of that lock, or to keep a lock word in each object, as the name tree in `pagemill
    /// bench slab` does.
    fn isolate(&self, objects: &mut Candidates<'_, Self::Object>) -> Self::Isolated;

    /// Moves `object` to a destination from `to`, frees `object`, or does not change it. Then releases the reference or
    /// lock that `isolate` took. Called without locks. Only the methods of `object` create the result.
    fn migrate<'object>(
        &self,
        object: Moving<'object, Self::Object>,
        to: &mut Target<'_, Self::Object>,
        isolated: &mut Self::Isolated,
    ) -> Done<'object>;
}

/// Objects of one slab, from which the owner selects those to move.
///
/// Example: [`Migrate`].
pub struct Candidates<'slab, T> {
    chunk: &'slab mut Chunk,
    _objects: PhantomData<*mut T>,
}

impl<T> Candidates<'_, T> {
    /// Removes from the candidates the objects for which `is_kept` returns false, so that they are not moved.
    pub fn retain(&mut self, mut is_kept: impl FnMut(NonNull<T>) -> bool) {
        self.chunk.retain(|object| is_kept(object_pointer(object)));
    }
}

/// An object that is being moved. The lifetime `'object` is unique to the object, so a `migrate` that returns the
/// result of another object does not compile.
///
/// Example: [`Migrate`].
#[must_use]
pub struct Moving<'object, T> {
    at: NonNull<T>,
    _brand: Brand<'object>,
}

/// Ties a value to the lifetime of one object that is being moved.
type Brand<'object> = PhantomData<fn(&'object ()) -> &'object ()>;

/// The outcome for one object that was to be moved, created by a method of its [`Moving`].
///
/// Example: [`Migrate`].
#[must_use]
pub struct Done<'object> {
    outcome: MoveOutcome,
    _brand: Brand<'object>,
}

impl<'object, T> Moving<'object, T> {
    /// Returns the object that is to be moved.
    pub fn object(&self) -> NonNull<T> {
        self.at
    }

    fn done(outcome: MoveOutcome) -> Done<'object> {
        Done { outcome, _brand: PhantomData }
    }

    /// Reports that the object is live at its new address. The cache frees the memory at the old address.
    pub fn moved(self, new: New<'_, T>) -> Done<'object> {
        let _ = ManuallyDrop::new(new);
        Self::done(MoveOutcome::Moved)
    }

    /// Reports that the object is free now. The cache frees its memory, so the owner must not call [`OwnerSlab::free`]
    /// for it.
    pub fn freed(self) -> Done<'object> {
        Self::done(MoveOutcome::Freed)
    }

    /// Reports that the object was not moved, because it is in use or pinned.
    pub fn busy(self) -> Done<'object> {
        Self::done(MoveOutcome::Busy)
    }

    /// Reports that the object was not moved, because there is no destination or the object cannot be moved now.
    pub fn failed(self) -> Done<'object> {
        Self::done(MoveOutcome::Failed)
    }
}

/// Destinations for moved objects: free objects of one node, outside of slabs that are being emptied.
///
/// Example: [`Migrate`].
pub struct Target<'step, T> {
    destinations: &'step mut (dyn DestinationSource + 'step),
    _objects: PhantomData<*mut T>,
}

impl<T> Target<'_, T> {
    /// Allocates a free object as a destination; `None` if no free object is available. If the result is dropped
    /// unused, the object becomes free again.
    pub fn take(&mut self) -> Option<New<'_, T>> {
        let object = self.destinations.take()?;
        Some(New { destinations: self.destinations, at: object_pointer(object) })
    }
}

/// A destination: a free object that another object can be moved to.
///
/// Example: [`Migrate`].
#[must_use]
pub struct New<'target, T> {
    destinations: &'target mut (dyn DestinationSource + 'target),
    at: NonNull<T>,
}

impl<T> New<'_, T> {
    /// Returns the address of the destination.
    pub fn object(&self) -> NonNull<T> {
        self.at
    }
}

impl<T> Drop for New<'_, T> {
    fn drop(&mut self) {
        self.destinations.put_back(self.at.as_ptr() as usize);
    }
}

/// Converts the address of an object into a pointer.
fn object_pointer<T>(object: usize) -> NonNull<T> {
    NonNull::new(object as *mut T).expect("objects lie in the arena")
}

/// The part of an [`OwnerSlab`] to which the list of all caches refers.
pub(crate) struct OwnerInner<M> {
    engine: Engine,
    owner: Arc<M>,
}

impl<M: Migrate> Cache for OwnerInner<M> {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Asks the background thread to pack the objects into fewer slabs. Reclaim must not call the owner itself, since
    /// the reclaiming thread may hold any lock.
    fn pack_without_callback(&self) {
        self.engine.note_memory_short();
    }

    fn shrink(&self) -> Result<u64> {
        steps::shrink(&self.engine, self)
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        steps::run_step(&self.engine, self, budget)
    }

    fn move_objects(&self, from: usize, to: usize, most: u64) -> Result<Progress> {
        steps::move_objects(&self.engine, self, from, to, most)
    }

    fn balance(&self) -> Result<Progress> {
        steps::balance(&self.engine, self)
    }
}

impl<M: Migrate> Mover for OwnerInner<M> {
    type Isolated = M::Isolated;

    fn isolate(&self, chunk: &mut Chunk) -> M::Isolated {
        self.owner.isolate(&mut Candidates { chunk, _objects: PhantomData })
    }

    fn migrate(&self, object: usize, to: &mut Destinations<'_>, isolated: &mut M::Isolated) -> MoveOutcome {
        let mut target = Target { destinations: to, _objects: PhantomData };
        let moving = Moving { at: object_pointer(object), _brand: PhantomData };
        self.owner.migrate(moving, &mut target, isolated).outcome
    }
}

/// A cache of objects that their owner can move.
///
/// Objects that were not freed before the cache is dropped are leaked. The drop waits at most one second for a step of
/// the background thread that is in progress. So the owner is usually dropped on the thread that drops the cache.
///
/// The callbacks `isolate` and `migrate` run in calls that defragment the cache, and on Pagemill's background thread,
/// unless [`Settings::defrag_used_ratio`] is 0. Another process can request a shrink (`pagemill slabinfo -s`), which
/// runs the callbacks on the background thread, too.
///
/// [`Migrate`] shows an owner. The cache is used through pointers:
///
/// ```
/// use pagemill::slab::{Migrate, OwnerSlab, SlabCache};
///
/// /// Allocates and frees one object of any owner.
/// fn use_one<M: Migrate>(cache: &OwnerSlab<M>) -> pagemill::Result<()> {
///     let object = cache.allocate()?; // as `construct` made it, or as it was freed
///     assert!(cache.info()?.active >= 1);
///     // SAFETY: no thread reaches the object.
///     unsafe { cache.free(object) };
///     Ok(())
/// }
/// ```
pub struct OwnerSlab<M: Migrate> {
    pub(crate) inner: Arc<OwnerInner<M>>,
    /// The caches of the process, to which this cache belongs.
    slabs: &'static Slabs,
}

impl Slabs {
    /// Creates a cache whose objects `owner` moves.
    ///
    /// # Errors
    ///
    /// As [`Slabs::fixed`].
    pub fn by_owner<M: Migrate>(&'static self, settings: Settings, owner: M) -> Result<OwnerSlab<M>> {
        let owner = Arc::new(owner);
        let constructing_owner = owner.clone();
        // SAFETY: an object of a slab that is being set up. It is large and aligned enough, and no other thread uses it
        // yet.
        let constructor =
            move |object: usize| unsafe { (object as *mut M::Object).write(constructing_owner.construct()) };
        let object = ObjectSpec {
            layout: Layout::new::<M::Object>(),
            user_bytes: size_of::<M::Object>(),
            poisoned_range: 0..0,
            constructor: Some(Box::new(constructor)),
            kind: SlabKind::ByOwner,
            handles: None,
        };
        let inner = self.create_cache(settings, object, |engine| OwnerInner { engine, owner })?;
        Ok(OwnerSlab { inner, slabs: self })
    }
}

impl<M: Migrate> OwnerSlab<M> {
    /// Creates a cache with default parameters among the slab caches of the process. `owner` moves the cache's objects.
    ///
    /// # Errors
    ///
    /// As [`OwnerSlab::with`].
    pub fn new(name: &str, owner: M) -> Result<Self> {
        Self::with(Settings::new(name), owner)
    }

    /// Creates a cache among the slab caches of the process. `owner` moves the cache's objects.
    ///
    /// # Errors
    ///
    /// As [`FixedSlab::with`](crate::FixedSlab::with).
    pub fn with(settings: Settings, owner: M) -> Result<Self> {
        Slabs::of_process()?.by_owner(settings, owner)
    }

    /// Returns the owner of the objects.
    pub fn owner(&self) -> &M {
        &self.inner.owner
    }

    /// Allocates an object. The object is free in the sense of [`Migrate`], with the contents that its owner wrote
    /// last.
    ///
    /// Cost: mostly a pop from this thread's magazine, a stack of free objects. Sometimes a new slab has to be set up,
    /// and rarely a new block.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoMemory`], [`pagemill_core::Error::NoAddresses`], [`pagemill_core::Error::System`].
    ///
    /// # Panics
    ///
    /// If [`Migrate::construct`] panics; the slab is unusable afterwards. Also if called inside of
    /// [`Migrate::isolate`].
    #[inline]
    #[track_caller]
    pub fn allocate(&self) -> Result<NonNull<M::Object>> {
        self.inner.engine.allocate().map(object_pointer)
    }

    /// As [`OwnerSlab::allocate`], in memory of one NUMA node.
    ///
    /// # Errors
    ///
    /// As [`OwnerSlab::allocate`]; [`pagemill_core::Error::BadNode`].
    #[track_caller]
    pub fn allocate_on(&self, node: usize) -> Result<NonNull<M::Object>> {
        self.inner.engine.allocate_on(node).map(object_pointer)
    }

    /// Frees an object of this cache.
    ///
    /// # Safety
    ///
    /// The object was allocated from this cache, or was the destination of a move. The object is free in the sense of
    /// [`Migrate`], and no thread reaches it as a live object any more.
    #[inline]
    #[track_caller]
    pub unsafe fn free(&self, object: NonNull<M::Object>) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.engine.free(object.as_ptr() as usize) };
    }

    /// Returns the NUMA node of the memory of an object of this cache.
    pub fn node_of(&self, object: NonNull<M::Object>) -> usize {
        self.inner.engine.node_of(object.as_ptr() as usize)
    }
}

impl<M: Migrate> Drop for OwnerSlab<M> {
    fn drop(&mut self) {
        self.slabs.unregister(&self.inner);
    }
}

#[cfg(test)]
impl<M: Migrate> OwnerSlab<M> {
    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }
}
