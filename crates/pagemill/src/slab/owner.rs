//! Objects that their owner moves: it knows who refers to them, and is asked.
#![allow(unsafe_code)] // a contract that owners keep; objects in slots

use super::batch::Grace;
use super::defrag;
use super::engine::{Engine, Object, SetUp};
use super::info::{self, SlabInfo};
use super::migrate::{Chunk, Fate, Mover, Places, Progress};
use super::worker::withdraw;
use super::{Kind, Member, Settings, Slabs};
use crate::error::Result;
use std::alloc::Layout;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Who owns the objects of a cache, and can move them.
///
/// An object is at any moment *free* or *live*: live from when its owner made it so, after [`ByOwner::allocate`], until its owner
/// ended that, before [`ByOwner::free`]. The cache does not know which; an owner has to see it by the object, which is always
/// what [`Migrate::construct`] made, or what the owner made of that. A count of references in the object, 0 while it is free,
/// does.
///
/// # Safety
///
/// - A free object needs no destructor, and is valid for whatever the owner does with objects it does not know to be live.
/// - `isolate` keeps only objects that are live, and that stay so until `migrate` has them: nobody frees them meanwhile.
/// - When `migrate` says *moved* or *freed*, nobody comes to the old object any more, but who came to it before, under a guard
///   ([`crate::epoch::pin`], or [`super::pin`]); it is free when these guards have gone, and what it holds needs no destructor.
/// - Who can panic in `migrate` does so before anybody can come to the object at its new place, which goes back then.
pub unsafe trait Migrate: Send + Sync + 'static {
    type Object;

    /// What `isolate` tells `migrate` about the objects of one slab. A panic of its destructor is as one of `migrate`.
    type Isolated;

    /// A free object. Called for each of a slab before the first of them is handed out.
    fn construct(&self) -> Self::Object;

    /// Refuses objects that are free, or cannot be moved, and takes hold of the others.
    ///
    /// The slab is locked: no object of it is taken or given meanwhile, calls of the cache panic (`info` and [`Slabs::list`], too), and all of its other users
    /// wait. Must not wait for anybody who may be at such a call: where one lock covers the references and calls of the cache, that is tried
    /// (`try_lock`), and all objects are refused where somebody has it. With busy threads little would move then: better keep calls of the
    /// cache outside of that lock, or give each object a word that says who holds it, as the tree of names in `pagemill bench slab` does.
    fn isolate(&self, objects: &mut Candidates<'_, Self::Object>) -> Self::Isolated;

    /// Moves an object to a place of `to`, or ends its life, or lets it stay, and lets go of it. No lock is held. What became
    /// of it is told by the one value that can be made of `object`.
    fn migrate<'object>(
        &self,
        object: Moving<'object, Self::Object>,
        to: &mut Target<'_, Self::Object>,
        isolated: &mut Self::Isolated,
    ) -> Done<'object>;
}

/// Objects of one slab, of which an owner says which will be moved.
pub struct Candidates<'slab, T> {
    chunk: &'slab mut Chunk,
    _objects: PhantomData<*mut T>,
}

impl<T> Candidates<'_, T> {
    /// Leaves those out for which `is_kept` is false.
    pub fn retain(&mut self, mut is_kept: impl FnMut(NonNull<T>) -> bool) {
        self.chunk.retain(|object| is_kept(pointer(object)));
    }
}

/// An object that is being moved. `'object` is this one's alone: what is made of another does not fit.
#[must_use]
pub struct Moving<'object, T> {
    at: NonNull<T>,
    _brand: Brand<'object>,
}

type Brand<'object> = PhantomData<fn(&'object ()) -> &'object ()>;

/// What became of an object: made of its [`Moving`], once.
#[must_use]
pub struct Done<'object> {
    fate: Fate,
    _brand: Brand<'object>,
}

impl<'object, T> Moving<'object, T> {
    pub fn object(&self) -> NonNull<T> {
        self.at
    }

    fn end(fate: Fate) -> Done<'object> {
        Done { fate, _brand: PhantomData }
    }

    /// It is live at its new place. The cache takes the old one back.
    pub fn moved(self, new: New<'_, T>) -> Done<'object> {
        let _ = ManuallyDrop::new(new);
        Self::end(Fate::Moved)
    }

    /// It is free. The cache takes its place back: [`ByOwner::free`] must not be called for it.
    pub fn freed(self) -> Done<'object> {
        Self::end(Fate::Freed)
    }

    /// It stays: somebody uses it.
    pub fn busy(self) -> Done<'object> {
        Self::end(Fate::Busy)
    }

    /// It stays: there is no place, or it cannot be moved now.
    pub fn failed(self) -> Done<'object> {
        Self::end(Fate::Failed)
    }
}

/// Places that objects may be moved to: those of one node, none of a slab that is being emptied.
pub struct Target<'step, T> {
    places: &'step mut (dyn Spare + 'step),
    _objects: PhantomData<*mut T>,
}

/// [`Places`], of whichever engine.
trait Spare {
    fn take(&mut self) -> Option<usize>;
    fn put(&mut self, object: usize);
}

impl Spare for Places<'_> {
    fn take(&mut self) -> Option<usize> {
        Places::take(self)
    }

    fn put(&mut self, object: usize) {
        Places::put(self, object);
    }
}

impl<T> Target<'_, T> {
    /// A place with a free object, if there is one. Where it is not used it goes back.
    pub fn take(&mut self) -> Option<New<'_, T>> {
        let object = self.places.take()?;
        Some(New { places: self.places, at: pointer(object) })
    }
}

/// A place that an object can be moved to.
#[must_use]
pub struct New<'target, T> {
    places: &'target mut (dyn Spare + 'target),
    at: NonNull<T>,
}

impl<T> New<'_, T> {
    pub fn object(&self) -> NonNull<T> {
        self.at
    }
}

impl<T> Drop for New<'_, T> {
    fn drop(&mut self) {
        self.places.put(self.at.as_ptr() as usize);
    }
}

fn pointer<T>(object: usize) -> NonNull<T> {
    NonNull::new(object as *mut T).expect("objects lie in the arena")
}

pub(super) struct Inner<M> {
    engine: Engine,
    owner: Arc<M>,
}

impl<M: Migrate> Member for Inner<M> {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn kind(&self) -> Kind {
        Kind::ByOwner
    }

    /// Its owner is not called by who needs memory, and may hold anything: the thread behind packs the cache.
    fn compact(&self) {
        self.engine.press();
    }

    fn shrink(&self) -> Result<u64> {
        defrag::shrink(&self.engine, self)
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        defrag::step(&self.engine, self, budget)
    }
}

impl<M: Migrate> Mover for Inner<M> {
    type Isolated = M::Isolated;

    fn isolate(&self, chunk: &mut Chunk) -> M::Isolated {
        self.owner.isolate(&mut Candidates { chunk, _objects: PhantomData })
    }

    fn migrate(&self, object: usize, to: &mut Places<'_>, isolated: &mut M::Isolated) -> Fate {
        let mut target = Target { places: to, _objects: PhantomData };
        let moving = Moving { at: pointer(object), _brand: PhantomData };
        self.owner.migrate(moving, &mut target, isolated).fate
    }
}

/// A cache of objects that their owner moves.
///
/// Dropped with objects that were not freed it keeps their memory for good. Its end waits for a step that is under way in the
/// background, a second at most, so that the owner ends on the thread that drops the cache.
///
/// `isolate` and `migrate` are called by who defragments, by Pagemill's thread in the background
/// ([`Settings::defrag_used_ratio`], [`Slabs::defrag_by_hand`]), and by it for who asks from outside (`pagemill slabinfo -s`).
pub struct ByOwner<M: Migrate> {
    inner: Arc<Inner<M>>,
}

impl Slabs {
    /// Makes a cache whose objects `owner` moves.
    ///
    /// # Errors
    ///
    /// As [`Slabs::fixed`].
    pub fn by_owner<M: Migrate>(&'static self, settings: Settings, owner: M) -> Result<ByOwner<M>> {
        let owner = Arc::new(owner);
        let constructor = owner.clone();
        // SAFETY: an object of a slab that is being set up: large and aligned enough, and nobody else's.
        let set_up = move |object: usize| unsafe { (object as *mut M::Object).write(constructor.construct()) };
        let user_bytes = size_of::<M::Object>();
        let layout = Layout::new::<M::Object>();
        let (set_up, grace) = (Some(Box::new(set_up) as SetUp), Grace::of_all);
        let object = Object { layout, user_bytes, closed: 0..0, set_up, is_movable: true, grace, handles: None };
        let inner = self.make(settings, object, |engine| Inner { engine, owner })?;
        Ok(ByOwner { inner })
    }
}

impl<M: Migrate> ByOwner<M> {
    pub fn owner(&self) -> &M {
        &self.inner.owner
    }

    /// Takes a free object, which is as its owner left it.
    ///
    /// Cost: mostly that of taking a word from a stack of this thread's. A new slab is set up now and then, and a block.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoMemory`], [`crate::Error::NoAddresses`], [`crate::Error::System`].
    ///
    /// # Panics
    ///
    /// Where the constructor does, whose slab is out of use then; and inside of [`Migrate::isolate`].
    #[inline]
    #[track_caller]
    pub fn allocate(&self) -> Result<NonNull<M::Object>> {
        self.inner.engine.allocate().map(pointer)
    }

    /// As [`ByOwner::allocate`], in memory of one node.
    ///
    /// # Errors
    ///
    /// As [`ByOwner::allocate`]; [`crate::Error::BadNode`].
    #[track_caller]
    pub fn allocate_on(&self, node: usize) -> Result<NonNull<M::Object>> {
        self.inner.engine.allocate_on(node).map(pointer)
    }

    /// Gives an object back.
    ///
    /// # Safety
    ///
    /// It was taken from this cache, or an object was moved there; it is free as [`Migrate`] has it, and nobody comes to it any
    /// more as to a live one.
    #[inline]
    #[track_caller]
    pub unsafe fn free(&self, object: NonNull<M::Object>) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.engine.free(object.as_ptr() as usize) };
    }

    /// The node whose memory an object of this cache is in.
    pub fn node_of(&self, object: NonNull<M::Object>) -> usize {
        self.inner.engine.node_of(object.as_ptr() as usize)
    }

    /// Packs all objects into as few slabs and blocks as can be, and gives the rest back.
    ///
    /// Afterwards at most one slab of each node is partly in use, as far as no object had to stay. Returns the bytes that are
    /// no longer charged for the cache. Ends when a pass over all has emptied nothing; waits for readers, a second at most,
    /// so do not call it under a guard.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Busy`] if somebody else defragments it for a second, or a thread was stopped in the midst of a call.
    ///
    /// # Panics
    ///
    /// Where `isolate` or `migrate` does: the slab is out of use then.
    pub fn shrink(&self) -> Result<u64> {
        self.inner.shrink()
    }

    /// Empties what is in use by less than the cache's ratio, for about so long at most: it looks at the clock after each 64
    /// objects, once it has been through one slab. What it left is given back by a later call, when readers have gone.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Busy`] if somebody else defragments it, or a thread was stopped in the midst of a call.
    ///
    /// # Panics
    ///
    /// As [`ByOwner::shrink`].
    pub fn defrag_step(&self, budget: Duration) -> Result<Progress> {
        self.inner.defrag(budget)
    }

    /// Moves up to `most` objects from one node to another.
    ///
    /// # Errors
    ///
    /// [`crate::Error::BadNode`], and as [`ByOwner::shrink`].
    pub fn move_objects(&self, from: usize, to: usize, most: u64) -> Result<Progress> {
        defrag::move_objects(&self.inner.engine, &*self.inner, from, to, most)
    }

    /// Moves what nodes have more than their share to those that have less, and no more.
    ///
    /// # Errors
    ///
    /// As [`ByOwner::shrink`].
    pub fn balance(&self) -> Result<Progress> {
        defrag::balance(&self.inner.engine, &*self.inner)
    }

    /// Below how many percent of use [`ByOwner::defrag_step`] empties slabs: 0 none, 100 all that are not full. If a callback has
    /// panicked in the background, which has given the cache up since ([`SlabInfo::is_given_up`]), it tries again.
    ///
    /// # Errors
    ///
    /// [`crate::Error::BadRatio`].
    pub fn set_defrag_used_ratio(&self, percent: u32) -> Result<()> {
        self.inner.engine.set_used_ratio(percent)
    }

    /// # Errors
    ///
    /// [`crate::Error::WrongState`] in a fork child.
    pub fn info(&self) -> Result<SlabInfo> {
        info::of(&*self.inner)
    }
}

impl<M: Migrate> Drop for ByOwner<M> {
    fn drop(&mut self) {
        withdraw(&self.inner);
    }
}

#[cfg(test)]
impl<M: Migrate> ByOwner<M> {
    pub(super) fn engine(&self) -> &Engine {
        &self.inner.engine
    }
}
