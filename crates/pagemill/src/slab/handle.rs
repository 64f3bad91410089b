//! Values that are reached by handle: the table says where each is, so they can be moved beside their readers.
//!
//! Nobody has a `&mut` to a value that others can reach. A writer makes a new one, changes the word of the handle, and leaves the old
//! one to its readers; so does who moves a value. What was left is dropped, or forgotten, when its readers have gone: by a later
//! call of the cache, or the thread behind.
#![allow(unsafe_code)] // values in slots

use super::batch::{GRACE_NS, Grace, take_over};
use super::defrag::{self, MOMENT_NS};
use super::ending::Ending;
use super::engine::{Engine, Object};
use super::handles::{Entry, Handle, Handles, Key, Words};
use super::info::{self, SlabInfo};
use super::migrate::{Chunk, Fate, Mover, Places, Progress};
use super::readers::{self, Guard, Moment, pin};
use super::seize::Seized;
use super::stock::{KEYS, PLACES, RUN, Sorted};
use super::worker::withdraw;
use super::{Kind, Member, Settings, Slabs};
use crate::error::{Error, Result};
use crate::sync::{Acquire, Guarded, Padded, Patience, Relaxed, Release};
use std::alloc::Layout;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::thread;
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

/// A value and the handle that stands for it.
#[repr(C)]
struct Place<T> {
    /// Of a free place that of its last value. Before the value, in the line of its first bytes, which are mostly at hand.
    index: AtomicU32,
    value: T,
}

/// Places that no handle stands for any more, and readers may be at; but for what threads have in stock.
#[derive(Default)]
struct Limbo {
    /// For which no grace period has begun.
    open: Vec<u64>,
    /// In the order in which they came, mostly by moments.
    closed: VecDeque<(Vec<u64>, Moment)>,
}

/// Parts of limbo that one thread ends on its way.
const PARTS_AT_ONCE: usize = 2;

/// # Invariants
///
/// A live word names a place with a value that was written before, of which nothing changes until the word has, and all guards of
/// that moment have gone. Places in limbo hold values that no word names.
pub(super) struct Inner<T> {
    engine: Engine,
    handles: &'static Handles,
    /// Where places begin to be counted.
    base: usize,
    limbo: Padded<Guarded<Limbo>>,
    /// Places in parts of limbo that are closed. Changed with these.
    waiting: Padded<AtomicUsize>,
    /// The table is another cache's by now. Changed by who has seized all magazines.
    is_over: AtomicBool,
    _values: PhantomData<T>,
}

impl<T: Movable> Inner<T> {
    #[inline]
    fn place(&self, entry: Entry) -> *mut Place<T> {
        (self.base + entry.place()) as *mut Place<T>
    }

    /// Puts a value where nobody knows of it yet: into an object that was taken.
    #[inline]
    fn write(&self, object: usize, value: T, index: u32) {
        let place = object as *mut Place<T>;
        // SAFETY: an object that was taken: large and aligned enough, and ours alone; but for the index, at which a mover may look
        // meanwhile.
        unsafe {
            (&raw mut (*place).value).write(value);
            (*place).index.store(index, Release);
        }
    }

    /// A place, and a handle that stands for nothing yet.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn take_slowly(&self) -> Result<(usize, Key)> {
        let object = self.engine.allocate()?;
        let stocked = self.engine.beside_magazine(|thread| self.handles.stock(thread).keys.pop());
        let key = stocked.flatten().map_or_else(|| self.take_key_slowly(), |bits| Ok(Key::from_stock(bits)));
        // SAFETY: it was taken, and nobody has seen it.
        let key = key.inspect_err(|_| unsafe { self.engine.free(object) })?;
        Ok((object, key))
    }

    fn take_key_slowly(&self) -> Result<Key> {
        let mut keys = [Key::from_bits(0); RUN];
        let most = if self.engine.beside_magazine(|_| ()).is_some() { keys.len() } else { 1 };
        let count = self.handles.take(&mut keys[..most])?;
        let kept = self.engine.beside_magazine(|thread| {
            let stock = &self.handles.stock(thread).keys;
            // The lowest comes first.
            keys[1..count].iter().rev().take_while(|key| stock.push(key.to_bits())).count()
        });
        self.handles.give(keys[1..count - kept.unwrap_or(0)].iter().copied());
        Ok(keys[0])
    }

    /// Gives a handle back that stands for nothing, and leaves its place to readers.
    #[inline(always)]
    fn give_up(&self, key: Option<Key>, place: usize) {
        // Nobody waits for memory of one place; what a value holds, which is to be dropped, may be any amount.
        let is_done = !std::mem::needs_drop::<T>()
            && key.is_some_and(|key| {
                let take_in = |thread| self.handles.stock(thread).take_in(key.to_bits(), place as u64);
                self.engine.beside_magazine(take_in).unwrap_or(false)
            });
        if !is_done {
            self.give_up_slowly(key, place);
        }
    }

    #[cold]
    #[inline(never)]
    fn give_up_slowly(&self, key: Option<Key>, place: usize) {
        // Whose look forked is a child: there the parent has it still, and locks of threads that are not there.
        if self.engine.check().is_err() {
            return;
        }
        let are_in = self.engine.beside_magazine(|thread| {
            let stock = self.handles.stock(thread);
            let is_stocked = !std::mem::needs_drop::<T>() && stock.left.push(place as u64);
            (key.is_none_or(|key| stock.keys.push(key.to_bits())), is_stocked)
        });
        let (has_key, has_place) = are_in.unwrap_or((key.is_none(), false));
        if !has_key {
            self.give_key_slowly(key);
        }
        if !has_place {
            self.leave_slowly(place);
        }
    }

    fn give_key_slowly(&self, key: Option<Key>) {
        let mut keys = [0; KEYS / 2];
        let drained = self.engine.beside_magazine(|thread| self.handles.stock(thread).keys.drain(KEYS / 2, &mut keys));
        self.give_keys(&keys[..drained.unwrap_or(0)]);
        self.handles.give(key);
    }

    /// Gives handles to the table, some for each time that its lock is taken.
    fn give_keys(&self, keys: &[u64]) {
        keys.chunks(RUN).for_each(|run| self.handles.give(run.iter().map(|bits| Key::from_stock(*bits))));
    }

    fn leave_slowly(&self, place: usize) {
        if !std::mem::needs_drop::<T>() && self.leave_to_stock(place) {
            if self.waiting.0.load(Relaxed) > 0 {
                let ripe = self.limbo.0.try_with(|limbo| self.ripe(limbo, PARTS_AT_ONCE));
                self.drop_all(ripe.unwrap_or_default());
            }
            return;
        }
        let ripe = self.limbo.0.with(|limbo| {
            limbo.open.push(place as u64);
            if limbo.open.len() < PLACES {
                return None;
            }
            self.close(limbo);
            self.begin_end(limbo)
        });
        self.end(ripe);
        self.ring();
    }

    /// Has the thread behind see to what is in limbo, where it may, and that is worth it: what values hold may be any amount, places alone
    /// are when they are about a block.
    fn ring(&self) {
        let places = self.waiting.0.load(Relaxed);
        let is_worth_it = std::mem::needs_drop::<T>() || places >= self.engine.shape.block_capacity() as usize;
        if is_worth_it && self.engine.used_ratio.load(Relaxed) > 0 {
            self.engine.ground.slabs.worker.ring();
        }
    }

    /// Sorts the places of this thread's stock, and adds one; says whether it has one.
    fn leave_to_stock(&self, place: usize) -> bool {
        let mut places = [0; PLACES];
        let more = self.engine.shape.sheaf.div_ceil(2);
        let sorted = self.engine.beside_magazine(|thread| {
            let left = &self.handles.stock(thread).left;
            let sorted = left.sort(more, &mut places);
            (sorted, left.push(place as u64))
        });
        let Some((Sorted { count, until }, is_in)) = sorted else { return false };
        let places = &places[..count];
        match until {
            // SAFETY: objects that were taken, of values without a destructor; no word names them, and no reader is at them.
            None => unsafe { self.engine.free_all(places) },
            Some(until) => {
                self.limbo.0.with(|limbo| self.add_part(limbo, places.to_vec(), until));
                self.ring();
            }
        }
        is_in
    }

    /// Lets what is open wait for who reads now.
    fn close(&self, limbo: &mut Limbo) {
        if !limbo.open.is_empty() {
            let open = std::mem::take(&mut limbo.open);
            self.add_part(limbo, open, readers::wait_until());
        }
    }

    fn add_part(&self, limbo: &mut Limbo, places: Vec<u64>, until: Moment) {
        self.waiting.0.fetch_add(places.len(), Relaxed);
        limbo.closed.push_back((places, until));
    }

    /// Takes out what no reader is at any more, so many parts at most.
    fn ripe(&self, limbo: &mut Limbo, most: usize) -> Vec<Vec<u64>> {
        let oldest = readers::oldest();
        let ripe = take_over(&mut limbo.closed, most, |(_, until)| *until < oldest);
        let ripe: Vec<Vec<u64>> = ripe.map(|(places, _)| places).collect();
        self.waiting.0.fetch_sub(ripe.iter().map(Vec::len).sum(), Relaxed);
        ripe
    }

    /// Takes out what no reader is at any more, to end it. `None` within a destructor: then it is left to who runs that.
    fn begin_end(&self, limbo: &mut Limbo) -> Option<(Ending, Vec<Vec<u64>>)> {
        let ending = Ending::begin(self)?;
        Some((ending, self.ripe(limbo, usize::MAX)))
    }

    /// Ends what was taken out, and what destructors leave meanwhile. Outside of every lock.
    fn end(&self, begun: Option<(Ending, Vec<Vec<u64>>)>) {
        let Some((ending, mut ripe)) = begun else { return };
        loop {
            self.drop_all(ripe);
            if !ending.take_more() {
                return;
            }
            ripe = self.limbo.0.with(|limbo| self.ripe(limbo, usize::MAX));
        }
    }

    /// Drops values that nobody can reach any more, and gives their places back. Outside of every lock.
    fn drop_all(&self, ripe: Vec<Vec<u64>>) {
        let mut panic = None;
        for place in ripe.iter().flatten().map(|place| *place as usize) {
            if std::mem::needs_drop::<T>() {
                // SAFETY: out of limbo: a value that no word names, and no reader is at (type invariant); dropped here alone.
                let dropped = catch_unwind(AssertUnwindSafe(|| unsafe {
                    (&raw mut (*(place as *mut Place<T>)).value).drop_in_place()
                }));
                panic = panic.or(dropped.err());
            }
            // SAFETY: an object that was taken, of which the value is gone.
            unsafe { self.engine.free(place) };
        }
        match panic {
            // Two at a time would end the process: that of a look, under which this is done, goes on.
            Some(panic) if thread::panicking() => std::mem::forget(panic),
            Some(panic) => resume_unwind(panic),
            None => {}
        }
    }

    /// Ends values without a destructor that no reader is at any more, for who needs memory and may be in the midst of anything.
    fn end_plain(&self) {
        let Some(seized) = self.engine.try_seize() else { return };
        self.collect(&seized);
        drop(seized);
        self.limbo.0.try_with(|limbo| self.close(limbo));
        let patience = Patience::new();
        while patience.waited_ns() < MOMENT_NS {
            let ripe = self.limbo.0.try_with(|limbo| self.ripe(limbo, PARTS_AT_ONCE)).unwrap_or_default();
            if ripe.is_empty() {
                return;
            }
            self.drop_all(ripe);
        }
    }

    /// Ends all that is in limbo, as far as readers go within a second.
    fn end_all(&self) {
        if let Ok(seized) = self.engine.seize() {
            self.collect(&seized);
            // Of a cache that is over they are another's.
            if !self.is_over.load(Relaxed) {
                seized.users().for_each(|thread| self.handles.strip_stock(thread));
            }
        }
        let mut patience = Patience::new();
        self.limbo.0.with(|limbo| self.close(limbo));
        loop {
            let (ripe, left) = self.limbo.0.with(|limbo| (self.begin_end(limbo), limbo.closed.len()));
            let is_within = ripe.is_none();
            self.end(ripe);
            if is_within || left == 0 || patience.waited_ns() > GRACE_NS {
                return;
            }
            patience.pause();
        }
    }
}

impl<T: Movable> Member for Inner<T> {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn kind(&self) -> Kind {
        Kind::ByHandle
    }

    fn handle_bytes(&self) -> u64 {
        if self.engine.check().is_ok() { self.handles.resident_bytes() } else { 0 }
    }

    fn waiting(&self) -> u64 {
        if self.engine.check().is_err() || self.is_over.load(Relaxed) {
            return 0;
        }
        let stocked: u64 = self.engine.users().map(|thread| u64::from(self.handles.stock(thread).left.len())).sum();
        let in_limbo = self.limbo.0.with(|limbo| limbo.open.len() + self.waiting.0.load(Relaxed));
        stocked + in_limbo as u64 + self.engine.in_batches()
    }

    /// Nobody's code runs when a value is moved, or forgotten: at a limit this cache packs itself, and ends what was removed if that has no
    /// destructor.
    fn compact(&self) {
        if !std::mem::needs_drop::<T>() {
            self.end_plain();
        }
        defrag::pack(&self.engine, self);
    }

    fn shrink(&self) -> Result<u64> {
        self.engine.check()?;
        self.end_all();
        let freed = defrag::shrink(&self.engine, self)?;
        Ok(freed + self.handles.shrink())
    }

    fn settle(&self) -> bool {
        let (ripe, is_left) = self.limbo.0.with(|limbo| {
            self.close(limbo);
            (self.begin_end(limbo), !limbo.closed.is_empty())
        });
        self.end(ripe);
        self.engine.settle_behind() || is_left
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        let ripe = self.limbo.0.with(|limbo| {
            self.close(limbo);
            self.begin_end(limbo)
        });
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

    /// The word of the handle that stands for it: those are all over the table.
    fn expect(&self, object: usize) {
        // SAFETY: as in `migrate`; which value's it is by now is seen there.
        let index = unsafe { &(*(object as *mut Place<T>)).index }.load(Relaxed);
        self.handles.fetch(index);
    }

    /// Handles go to the table, places to the limbo of all.
    fn collect(&self, seized: &Seized<'_>) {
        if self.is_over.load(Relaxed) {
            return;
        }
        for stock in seized.users().map(|thread| self.handles.stock(thread)) {
            let (mut keys, mut places) = ([0; KEYS], [0; PLACES]);
            let (free, left) = (stock.keys.drain(0, &mut keys), stock.left.take(&mut places));
            self.give_keys(&keys[..free]);
            self.limbo.0.with(|limbo| limbo.open.extend_from_slice(&places[..left]));
        }
    }

    fn migrate(&self, object: usize, to: &mut Places<'_>, _guard: &mut Guard) -> Fate {
        let old = object as *mut Place<T>;
        // SAFETY: an object of this cache: all of their indices were written, by `set_up` at first.
        let index = unsafe { &(*old).index }.load(Acquire);
        // Of a place that is being filled, or is in limbo, no word says that it is there.
        let seen = self.handles.load(index);
        if !seen.is_live() || self.place(seen) != old || seen.pins() > 0 {
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
///
/// ```
/// use pagemill::{Pagemill, slab::{Settings, pin}};
///
/// let cache = Pagemill::of_process()?.slabs.by_handle::<String>(Settings::new("names"))?;
/// let handle = cache.insert("one".into())?;
/// assert_eq!(cache.get(handle, &pin()).map(|name| name.len()), Some(3)); // stays as it is while the guard is there
/// let kept = cache.get(handle, &pin()).cloned(); // for longer, without a guard
/// cache.remove(handle)?;
/// assert_eq!((cache.get(handle, &pin()), kept.as_deref()), (None, Some("one")));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct ByHandle<T: Movable> {
    inner: Arc<Inner<T>>,
    /// Of `inner`, for readers: what lies in the cache itself stays in registers from one call to the next.
    words: &'static Words,
    base: usize,
}

/// A value that no handle stands for any more; it is given up when this goes, be it by a panic.
struct Ended<'cache, T: Movable> {
    cache: &'cache Inner<T>,
    /// The one that stood for it.
    key: Key,
    place: *mut Place<T>,
}

impl<T: Movable> Drop for Ended<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.cache.give_up(self.key.next(), self.place as usize);
    }
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
        let (index_at, value_at) = (std::mem::offset_of!(Place<T>, index), std::mem::offset_of!(Place<T>, value));
        // SAFETY: an object of a slab that is being set up, of the layout below: nobody else's.
        let set_up = move |object: usize| unsafe { ((object + index_at) as *mut AtomicU32).write(AtomicU32::new(0)) };
        let ground = self.members.with(|_| self.ground())?;
        let handles = ground.take_handles()?;
        let object = Object {
            layout: Layout::new::<Place<T>>(),
            user_bytes: size_of::<T>(),
            closed: value_at..value_at + size_of::<T>(),
            set_up: Some(Box::new(set_up)),
            is_movable: true,
            grace: Grace::of_handles,
            handles: Some(handles),
        };
        let inner = self.make(settings, object, |engine| Inner {
            base: engine.ground.blocks.addr(0),
            engine,
            handles,
            limbo: Padded::default(),
            waiting: Padded::default(),
            is_over: AtomicBool::new(false),
            _values: PhantomData,
        });
        let inner = inner.inspect_err(|_| ground.give_handles(handles))?;
        Ok(ByHandle { base: inner.base, inner, words: handles.words() })
    }
}

impl<T: Movable> ByHandle<T> {
    /// Puts a value in.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`], [`Error::System`]: the value is dropped. [`Error::WrongState`] in a fork child.
    // Always, so that a value is made where it will be, and nothing is copied of it that was never written.
    #[inline(always)]
    #[track_caller]
    pub fn insert(&self, value: T) -> Result<Handle<T>> {
        let inner = &*self.inner;
        inner.engine.check()?;
        let at_hand = inner.engine.allocate_with(|thread| inner.handles.stock(thread).keys.pop());
        let (object, key) = match at_hand {
            Some((object, bits)) => (object, Key::from_stock(bits)),
            None => inner.take_slowly()?,
        };
        inner.write(object, value, key.index());
        key.publish(self.words, object - inner.base);
        Ok(Handle::new(key))
    }

    /// The value of a handle, if it is there. Cost: its word, then the value.
    #[inline]
    pub fn get<'read>(&'read self, handle: Handle<T>, _guard: &'read Guard) -> Option<&'read T> {
        let entry = handle.key.find(self.words)?;
        // SAFETY: a live word names a value, which stays until all guards of now have gone: `_guard` is one, and outlives the
        // reference; so does the cache.
        Some(unsafe { &(*handle.key.address(entry, self.base).cast::<Place<T>>()).value })
    }

    /// Takes a value out; says whether it was there. It is dropped by this or a later call, or by Pagemill's thread in the
    /// background, when its readers have gone. With a ratio of 0, or by hand, that is one of the next removals, [`ByHandle::shrink`]
    /// or [`ByHandle::defrag_step`].
    ///
    /// Cost: a compare-and-swap, and two words put by; of types with a destructor a short lock.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if it is pinned; [`Error::WrongState`] in a fork child.
    #[inline]
    pub fn remove(&self, handle: Handle<T>) -> Result<bool> {
        Ok(self.end(handle)?.is_some())
    }

    /// As [`ByHandle::remove`], and has `look` see the value as it goes; what that returns, if the value was there. Of those who remove one
    /// at the same time one sees it. No guard is needed, so it costs less than [`ByHandle::get`] and a removal.
    ///
    /// # Errors
    ///
    /// As [`ByHandle::remove`].
    #[inline]
    pub fn remove_with<R>(&self, handle: Handle<T>, look: impl FnOnce(&T) -> R) -> Result<Option<R>> {
        // SAFETY: a live word named the place until it was ended, so the value was written, and nothing of it changes (type invariant);
        // nobody but us gives the place up, which is when the result goes.
        Ok(self.end(handle)?.map(|ended| look(unsafe { &(*ended.place).value })))
    }

    /// Ends what a handle stands for, if that is there.
    ///
    /// # Errors
    ///
    /// As [`ByHandle::remove`].
    #[inline(always)]
    fn end(&self, handle: Handle<T>) -> Result<Option<Ended<'_, T>>> {
        self.inner.engine.check()?;
        while let Some(seen) = handle.key.find(self.words) {
            if seen.pins() > 0 {
                return Err(Error::Busy { what: "the value of this handle is pinned" });
            }
            if handle.key.end(self.words, seen) {
                let place = handle.key.address(seen, self.base).cast();
                return Ok(Some(Ended { cache: &self.inner, key: handle.key, place }));
            }
        }
        Ok(None)
    }

    /// Puts what `change` makes of a value in its place; says whether it was there. Where others change it at the same time
    /// `change` is called again. Readers see the old value or the new one. `change` must not update the same value: it would be called
    /// again without end.
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
            let Some(seen) = handle.key.find(self.words) else { return Ok(false) };
            if seen.pins() > 0 {
                return Err(Error::Busy { what: "the value of this handle is pinned" });
            }
            // SAFETY: as in `get`.
            let new = change(unsafe { &(*inner.place(seen)).value });
            let object = inner.engine.allocate()?;
            inner.write(object, new, handle.key.index());
            // Under the guard still: the place that was seen cannot be another value's by now.
            let is_in = inner.handles.exchange(handle.key.index(), seen, seen.at(object - inner.base));
            drop(guard);
            // Of the new one, where it is not wanted, nobody knows; it goes the same way.
            inner.give_up(None, if is_in { inner.place(seen) as usize } else { object });
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
        while let Some(seen) = handle.key.find(self.words) {
            if inner.handles.pin(handle.key.index(), seen) {
                // SAFETY: the word is as it was seen but for the pin, which lets nobody change it.
                let value = unsafe { &(*inner.place(seen)).value };
                return Ok(Some(Pinned { cache: inner, index: handle.key.index(), value }));
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
        self.inner.shrink()
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
        info::of(&*self.inner)
    }

    /// Bytes of the table of handles that are resident: 8 for each of the most that there were at a time, less free pages.
    pub fn handle_bytes(&self) -> u64 {
        self.inner.handle_bytes()
    }
}

impl<T: Movable> Drop for ByHandle<T> {
    /// Drops all values.
    fn drop(&mut self) {
        withdraw(&self.inner);
        let inner = &*self.inner;
        // Nobody else moves them meanwhile. Where that cannot be had, as in a fork child, they stay for good.
        let seized = loop {
            match inner.engine.seize() {
                Ok(seized) => break seized,
                // A long step of somebody who came by the list of caches: it ends.
                Err(Error::Busy { .. }) => {}
                Err(_) => return,
            }
        };
        // Readers borrow the cache, so guards that are there are for others.
        inner.engine.settle_at_once();
        let live: Vec<(u32, Entry)> = inner.handles.live().collect();
        let mut places = Vec::with_capacity(live.len());
        for (index, entry) in live {
            // No reader is left, and no pin but such as was forgotten: they borrow the cache.
            let key = Key::new(index, entry.generation());
            inner.handles.close(key);
            inner.handles.give(key.next());
            places.push(inner.place(entry) as u64);
        }
        inner.collect(&seized);
        inner.is_over.store(true, Relaxed);
        drop(seized);
        let limbo = inner.limbo.0.with(std::mem::take);
        inner.handles.shrink();
        inner.engine.ground.give_handles(inner.handles);
        inner.drop_all(limbo.closed.into_iter().map(|(left, _)| left).chain([places, limbo.open]).collect());
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

    pub(super) fn in_limbo(&self) -> usize {
        self.inner
            .limbo
            .0
            .with(|limbo| limbo.open.len() + limbo.closed.iter().map(|(places, _)| places.len()).sum::<usize>())
    }

    /// Shrinks until readers of other tests have not been in the way: nothing waits for them, and nothing is left to be moved.
    pub(super) fn pack(&self) -> u64 {
        let mut freed = 0;
        loop {
            let before = self.info().unwrap().moved;
            freed += self.shrink().unwrap();
            let is_waiting = self.inner.engine.has_batches() || self.in_limbo() > 0;
            if !is_waiting && self.info().unwrap().moved == before {
                return freed;
            }
        }
    }
}
