//! Values that are reached by handle: the table says where each is, so they can be moved beside their readers.
//!
//! Nobody has a `&mut` to a value that others can reach. A writer makes a new one, changes the word of the handle, and leaves the old
//! one to its readers; so does who moves a value. What was left is dropped, or forgotten, when its readers have gone: by a later
//! call of the cache, never by somebody else's.
#![allow(unsafe_code)] // values in slots

use super::batch::GRACE_NS;
use super::defrag::{self, Chunk, Fate, Mover, Places, Progress};
use super::engine::{Engine, Object};
use super::handles::{Entry, Handles};
use super::info::{self, SlabInfo};
use super::{Kind, Member, Settings, Slabs};
use crate::error::{Error, Result};
use crate::sync::{Acquire, Guarded, Patience, Release};
use crate::xarray;
use std::alloc::Layout;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

/// Values that may be copied to another place byte by byte while others read them.
///
/// # Safety
///
/// Nothing in the value refers to the value's own place, and nothing of its bytes changes while there is only a `&` to it: no
/// `Cell`, no atomic, no lock, but behind a pointer.
pub unsafe trait Movable: Send + Sync + 'static {}

macro_rules! movable {
    ($($plain:ty),*) => { $(
        // SAFETY: plain data.
        unsafe impl Movable for $plain {}
    )* };
}

movable!((), bool, char, u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64, String);

// SAFETY: as its items.
unsafe impl<T: Movable, const N: usize> Movable for [T; N] {}
// SAFETY: as what it may hold.
unsafe impl<T: Movable> Movable for Option<T> {}
// SAFETY: a pointer and lengths; what it points to stays.
unsafe impl<T: Send + Sync + 'static> Movable for Vec<T> {}
// SAFETY: a pointer; what it points to stays.
unsafe impl<T: Send + Sync + 'static> Movable for Box<T> {}
// SAFETY: a pointer; what it points to stays.
unsafe impl<T: Send + Sync + 'static> Movable for Arc<T> {}

/// Stands for a value of a cache. Copies stand for the same; when the value has gone none of them fits any other.
pub struct Handle<T> {
    index: u32,
    generation: u32,
    _value: PhantomData<fn() -> T>,
}

impl<T> Handle<T> {
    fn new(index: u32, generation: u32) -> Self {
        Self { index, generation, _value: PhantomData }
    }

    /// As a number, for places that keep numbers.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << u32::BITS | u64::from(self.index)
    }

    /// The handle of a number. One that was no handle's stands for nothing, or for any value of the cache.
    pub fn from_bits(bits: u64) -> Self {
        Self::new(bits as u32, (bits >> u32::BITS) as u32)
    }
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

impl<T> Eq for Handle<T> {}

impl<T> std::hash::Hash for Handle<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.to_bits().hash(state);
    }
}

impl<T> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({}.{})", self.index, self.generation)
    }
}

/// For who reads: until it goes, values that he came to stay as they are.
pub struct Guard {
    _epoch: crossbeam_epoch::Guard,
}

/// Begins reading. Some nanoseconds, no shared line is written; memory that was freed piles up for as long as the guard is kept.
#[inline]
pub fn pin() -> Guard {
    Guard { _epoch: xarray::pin() }
}

/// A value and the handle that stands for it.
#[repr(C)]
struct Place<T> {
    value: T,
    /// Of a free place that of its last value.
    index: AtomicU32,
}

/// Places that no handle stands for any more, and readers may be at.
#[derive(Default)]
struct Limbo {
    /// For which no grace period has begun.
    open: Vec<usize>,
    closed: Vec<(Vec<usize>, Arc<AtomicBool>)>,
}

/// So many wait for one grace period.
const CLOSED_AT: usize = 64;

/// # Invariants
///
/// A live word names a place with a value that was written before, of which nothing changes until the word has, and all guards of
/// that moment have gone. Places in limbo hold values that no word names.
pub(super) struct Inner<T> {
    engine: Engine,
    handles: &'static Handles,
    /// Where places begin to be counted.
    base: usize,
    limbo: Guarded<Limbo>,
    _values: PhantomData<T>,
}

impl<T: Movable> Inner<T> {
    #[inline]
    fn place(&self, entry: Entry) -> *mut Place<T> {
        (self.base + entry.place()) as *mut Place<T>
    }

    /// The word of a handle, if it stands for a value.
    #[inline]
    fn live(&self, handle: Handle<T>) -> Option<Entry> {
        let entry = self.handles.load(handle.index)?;
        (entry.generation() == handle.generation && entry.is_live()).then_some(entry)
    }

    /// A place with a value that nobody knows of.
    #[track_caller]
    fn write(&self, value: T, index: u32) -> Result<usize> {
        let object = self.engine.allocate()?;
        let place = object as *mut Place<T>;
        // SAFETY: an object that was taken: large and aligned enough, and ours alone; but for the index, at which a mover may look
        // meanwhile.
        unsafe {
            (&raw mut (*place).value).write(value);
            (*place).index.store(index, Release);
        }
        Ok(object)
    }

    /// Leaves a place to its readers.
    fn leave(&self, place: usize) {
        let ripe = self.limbo.with(|limbo| {
            limbo.open.push(place);
            if limbo.open.len() < CLOSED_AT {
                return Vec::new();
            }
            limbo.close();
            limbo.ripe()
        });
        self.end(ripe);
    }

    /// Drops values that nobody can reach any more, and gives their places back. Outside of every lock.
    fn end(&self, places: Vec<usize>) {
        let mut panic = None;
        for place in places {
            // SAFETY: out of limbo: a value that no word names, and no reader is at (type invariant); dropped here alone.
            let dropped = catch_unwind(AssertUnwindSafe(|| unsafe { (place as *mut T).drop_in_place() }));
            panic = panic.or(dropped.err());
            // SAFETY: an object that was taken, of which the value is gone.
            unsafe { self.engine.free(place) };
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Ends all that is in limbo, as far as readers go within a second.
    fn end_all(&self) {
        let mut patience = Patience::new();
        self.limbo.with(Limbo::close);
        loop {
            let (ripe, left) = self.limbo.with(|limbo| (limbo.ripe(), limbo.closed.len()));
            self.end(ripe);
            if left == 0 || patience.waited_ns() > GRACE_NS {
                return;
            }
            xarray::pin().flush();
            patience.pause();
        }
    }
}

impl Limbo {
    /// Begins a grace period for what is open.
    fn close(&mut self) {
        if !self.open.is_empty() {
            let is_ripe = Arc::new(AtomicBool::new(false));
            self.closed.push((std::mem::take(&mut self.open), is_ripe.clone()));
            let guard = xarray::pin();
            guard.defer(move || is_ripe.store(true, Release));
            guard.flush();
        }
    }

    /// Takes out what no reader is at any more.
    fn ripe(&mut self) -> Vec<usize> {
        let ripe = self.closed.extract_if(.., |(_, is_ripe)| is_ripe.load(Acquire));
        ripe.flat_map(|(places, _)| places).collect()
    }
}

impl<T: Movable> Member for Inner<T> {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn kind(&self) -> Kind {
        Kind::ByHandle
    }

    /// Nobody's code runs when a value is moved: at a limit this cache packs itself.
    fn compact(&self) {
        defrag::pack(&self.engine, self);
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        let ripe = self.limbo.with(Limbo::ripe);
        self.end(ripe);
        defrag::step(&self.engine, self, budget)
    }
}

impl<T: Movable> Mover for Inner<T> {
    /// What is copied is not dropped meanwhile.
    type Isolated = Guard;

    fn isolate(&self, _chunk: &mut Chunk) -> Guard {
        pin()
    }

    fn migrate(&self, object: usize, to: &mut Places<'_>, _guard: &mut Guard) -> Fate {
        let old = object as *mut Place<T>;
        // SAFETY: an object of this cache: all of their indices were written, by `set_up` at first.
        let index = unsafe { &(*old).index }.load(Acquire);
        // Of a place that is being filled, or is in limbo, no word says that it is there.
        let Some(seen) = self.handles.load(index).filter(|entry| entry.is_live() && self.place(*entry) == old) else {
            return Fate::Busy;
        };
        if seen.pins() > 0 {
            return Fate::Busy;
        }
        let Some(target) = to.take() else { return Fate::Failed };
        let new = target as *mut Place<T>;
        // SAFETY: the word was live after the guard was taken, so the value is there until the guard goes, and nothing of it
        // changes (type invariant, and `Movable`); the target is an object that was taken, ours alone but for its index.
        unsafe {
            std::ptr::copy_nonoverlapping(&raw const (*old).value, &raw mut (*new).value, 1);
            (*new).index.store(index, Release);
        }
        if self.handles.exchange(index, seen, seen.at(target - self.base)) {
            Fate::Moved
        } else {
            to.put(target);
            Fate::Busy
        }
    }
}

/// A cache of values that are reached by handle, and move by themselves.
pub struct ByHandle<T: Movable> {
    inner: Arc<Inner<T>>,
}

/// A value that stays where it is, and as it is, for as long as this lives. Up to seven of one value at a time.
pub struct Pinned<'cache, T: Movable> {
    cache: &'cache Inner<T>,
    index: u32,
    value: &'cache T,
}

impl Slabs {
    /// Makes a cache whose values are reached by handle.
    ///
    /// # Errors
    ///
    /// As [`Slabs::fixed`].
    pub fn by_handle<T: Movable>(&'static self, settings: Settings) -> Result<ByHandle<T>> {
        let index_at = std::mem::offset_of!(Place<T>, index);
        // SAFETY: an object of a slab that is being set up, of the layout below: nobody else's.
        let set_up = move |object: usize| unsafe { ((object + index_at) as *mut AtomicU32).write(AtomicU32::new(0)) };
        let object =
            Object { layout: Layout::new::<Place<T>>(), user_bytes: size_of::<T>(), set_up: Some(Box::new(set_up)) };
        let ground = self.members.with(|_| self.ground())?;
        let handles = ground.take_handles()?;
        let inner = self.make(settings, object, |engine| Inner {
            base: engine.ground.blocks.addr(0),
            engine,
            handles,
            limbo: Guarded::default(),
            _values: PhantomData,
        });
        Ok(ByHandle { inner: inner.inspect_err(|_| ground.give_handles(handles))? })
    }
}

impl<T: Movable> ByHandle<T> {
    /// Puts a value in.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`], [`Error::System`]: the value is dropped. [`Error::WrongState`] in a fork child.
    #[track_caller]
    pub fn insert(&self, value: T) -> Result<Handle<T>> {
        let inner = &*self.inner;
        inner.engine.check()?;
        let (index, generation) = inner.handles.take()?;
        let object = inner.write(value, index).inspect_err(|_| inner.handles.give(index, generation))?;
        inner.handles.publish(index, generation, object - inner.base);
        Ok(Handle::new(index, generation))
    }

    /// The value of a handle, if it is there. Cost: its word, then the value.
    #[inline]
    pub fn get<'read>(&'read self, handle: Handle<T>, _guard: &'read Guard) -> Option<&'read T> {
        let entry = self.inner.live(handle)?;
        // SAFETY: a live word names a value, which stays until all guards of now have gone: `_guard` is one, and outlives the
        // reference; so does the cache.
        Some(unsafe { &(*self.inner.place(entry)).value })
    }

    /// A copy of the value of a handle, if it is there.
    pub fn get_cloned(&self, handle: Handle<T>) -> Option<T>
    where
        T: Clone,
    {
        self.get(handle, &pin()).cloned()
    }

    /// Takes a value out; says whether it was there. It is dropped by this or a later call, when its readers have gone.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if it is pinned; [`Error::WrongState`] in a fork child.
    pub fn remove(&self, handle: Handle<T>) -> Result<bool> {
        let inner = &*self.inner;
        inner.engine.check()?;
        while let Some(seen) = inner.live(handle) {
            if seen.pins() > 0 {
                return Err(Error::Busy { what: "the value of this handle is pinned" });
            }
            if inner.handles.end(handle.index, seen) {
                inner.handles.give(handle.index, handle.generation);
                inner.leave(inner.place(seen) as usize);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Puts what `change` makes of a value in its place; says whether it was there. Where others change it at the same time
    /// `change` is called again. Readers see the old value or the new one.
    ///
    /// # Errors
    ///
    /// As [`ByHandle::insert`]; [`Error::Busy`] if it is pinned.
    #[track_caller]
    pub fn update(&self, handle: Handle<T>, mut change: impl FnMut(&T) -> T) -> Result<bool> {
        let inner = &*self.inner;
        inner.engine.check()?;
        loop {
            let guard = pin();
            let Some(seen) = inner.live(handle) else { return Ok(false) };
            if seen.pins() > 0 {
                return Err(Error::Busy { what: "the value of this handle is pinned" });
            }
            // SAFETY: as in `get`.
            let new = change(unsafe { &(*inner.place(seen)).value });
            let object = inner.write(new, handle.index)?;
            // Under the guard still: the place that was seen cannot be another value's by now.
            let is_in = inner.handles.exchange(handle.index, seen, seen.at(object - inner.base));
            drop(guard);
            // Of the new one, where it is not wanted, nobody knows; it goes the same way.
            inner.leave(if is_in { inner.place(seen) as usize } else { object });
            if is_in {
                return Ok(true);
            }
        }
    }

    /// Keeps a value where it is, and as it is; `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if it has been pinned seven times.
    pub fn pin_value(&self, handle: Handle<T>) -> Result<Option<Pinned<'_, T>>> {
        let inner = &*self.inner;
        while let Some(seen) = inner.live(handle) {
            if inner.handles.pin(handle.index, seen) {
                // SAFETY: the word is as it was seen but for the pin, which lets nobody change it.
                let value = unsafe { &(*inner.place(seen)).value };
                return Ok(Some(Pinned { cache: inner, index: handle.index, value }));
            }
            if seen.is_pinned_most() {
                return Err(Error::Busy { what: "the value of this handle is pinned as often as can be" });
            }
        }
        Ok(None)
    }

    /// Packs all values into as few slabs and blocks as can be, drops those that were removed, and gives the rest back, with the
    /// pages of the table of handles that are free. As [`super::ByOwner::shrink`]; returns the bytes of both.
    ///
    /// # Errors
    ///
    /// As [`super::ByOwner::shrink`].
    pub fn shrink(&self) -> Result<u64> {
        let inner = &*self.inner;
        inner.engine.check()?;
        inner.end_all();
        let freed = defrag::shrink(&inner.engine, inner)?;
        Ok(freed + inner.handles.shrink())
    }

    /// As [`super::ByOwner::defrag_step`].
    ///
    /// # Errors
    ///
    /// As [`super::ByOwner::shrink`].
    pub fn defrag_step(&self, budget: Duration) -> Result<Progress> {
        self.inner.defrag(budget)
    }

    /// As [`super::ByOwner::move_objects`].
    ///
    /// # Errors
    ///
    /// As [`super::ByOwner::move_objects`].
    pub fn move_objects(&self, from: usize, to: usize, most: u64) -> Result<Progress> {
        defrag::move_objects(&self.inner.engine, &*self.inner, from, to, most)
    }

    /// As [`super::ByOwner::balance`].
    ///
    /// # Errors
    ///
    /// As [`super::ByOwner::balance`].
    pub fn balance(&self) -> Result<Progress> {
        defrag::balance(&self.inner.engine, &*self.inner)
    }

    /// As [`super::ByOwner::set_defrag_used_ratio`].
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`].
    pub fn set_defrag_used_ratio(&self, percent: u32) -> Result<()> {
        self.inner.engine.set_used_ratio(percent)
    }

    /// # Errors
    ///
    /// [`Error::WrongState`] in a fork child.
    pub fn info(&self) -> Result<SlabInfo> {
        info::of(&self.inner.engine, Kind::ByHandle)
    }

    /// Bytes of the table of handles that are resident: 8 for each of the most that there were at a time, less free pages.
    pub fn handle_bytes(&self) -> u64 {
        self.inner.handles.resident_bytes()
    }
}

impl<T: Movable> Drop for ByHandle<T> {
    /// Drops all values.
    fn drop(&mut self) {
        let inner = &*self.inner;
        // Nobody else moves them meanwhile. Where that cannot be had, as in a fork child, they stay for good.
        let Ok(seized) = inner.engine.seize() else { return };
        let live: Vec<(u32, Entry)> = inner.handles.live().collect();
        let mut places = Vec::with_capacity(live.len());
        for (index, entry) in live {
            // No reader is left, and no pin but such as was forgotten: they borrow the cache.
            inner.handles.give(index, entry.generation());
            places.push(inner.place(entry) as usize);
        }
        drop(seized);
        let limbo = inner.limbo.with(std::mem::take);
        places.extend(limbo.open);
        places.extend(limbo.closed.into_iter().flat_map(|(places, _)| places));
        inner.handles.shrink();
        inner.engine.ground.give_handles(inner.handles);
        inner.end(places);
    }
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

#[cfg(test)]
impl<T: Movable> ByHandle<T> {
    pub(super) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Shrinks until readers of other tests have not been in the way.
    pub(super) fn pack(&self) -> u64 {
        let mut freed = self.shrink().unwrap();
        let is_waiting = || {
            self.inner.engine.has_batches()
                || self.inner.limbo.with(|limbo| !limbo.open.is_empty() || !limbo.closed.is_empty())
        };
        while is_waiting() {
            freed += self.shrink().unwrap();
        }
        freed
    }
}
