//! Values reached by handle: a table holds the address of each value, so it can be moved while it is read.
//!
//! No `&mut` to a reachable value exists. An update writes a new value, exchanges the word of the handle, and retires the
//! old value; so does a move. A retired value is dropped (after a move: forgotten) when its readers have finished, by a
//! later call of the cache or by the background thread.
#![allow(unsafe_code)] // values in slots

use super::batch::{GRACE_NS, Grace, take_over};
use super::deferred_drop::DeferredDrop;
use super::defrag::{self, SHORT_GRACE_NS};
use super::drain::DrainGuard;
use super::engine::{Engine, Object};
use super::epochs::{self, Epoch, Guard, pin};
use super::handles::{Handle, HandleWord, Handles, Key, Words};
use super::info::{self, SlabInfo};
use super::migrate::{Chunk, Fate, Mover, Places, Progress};
use super::stock::{KEYS, PLACES, RUN, Sorted};
use super::worker::withdraw;
use super::{CacheKind, Member, Settings, Slabs};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Acquire, Backoff, Guarded, Padded, Relaxed, Release};
use std::alloc::Layout;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::thread;
use std::time::Duration;

/// Values that may be copied byte by byte to another address while other threads read them.
///
/// # Safety
///
/// The value does not refer to its own address. Its bytes do not change while only `&` references exist: no `Cell`,
/// atomic or lock, except behind a pointer. Example of a cache of such values: [`ByHandle`].
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
// SAFETY: as the value that it may hold.
unsafe impl<T: Movable> Movable for Option<T> {}
// SAFETY: a pointer and lengths; the buffer is not moved.
unsafe impl<T: Send + Sync + 'static> Movable for Vec<T> {}
// SAFETY: a pointer; its target is not moved.
unsafe impl<T: Send + Sync + 'static> Movable for Box<T> {}
// SAFETY: a pointer; its target is not moved.
unsafe impl<T: Send + Sync + 'static> Movable for Arc<T> {}

/// A value, and the index of its handle. The content of one object.
#[repr(C)]
struct HandledValue<T> {
    /// For a free place, that of its last value. Lies before the value, in the cache line of its first bytes.
    index: AtomicU32,
    value: T,
}

/// The retire list: places without a handle that readers may still use. The stocks of threads hold more.
#[derive(Default)]
struct SharedRetireList {
    /// Places whose grace period has not begun.
    open: Vec<u64>,
    /// Batches with the epoch that each waits for, in order of arrival, which is mostly the order of epochs.
    closed: VecDeque<(Vec<u64>, Epoch)>,
}

/// Batches that one call ends at most.
const PARTS_AT_ONCE: usize = 2;

/// # Invariants
///
/// A live word names a place with an initialized value. The value does not change until the word has changed and all
/// guards of that time are dropped. Retired places hold values that no word names.
pub(super) struct HandleInner<T> {
    engine: Engine,
    handles: &'static Handles,
    /// Address that places in words are relative to.
    base: usize,
    retired: Padded<Guarded<SharedRetireList>>,
    /// Number of places in `closed`. Changed together with it, under its lock.
    waiting: Padded<AtomicUsize>,
    /// The handle table belongs to another cache now. Set while all magazines are drained.
    is_over: AtomicBool,
    _values: PhantomData<T>,
}

impl<T: Movable> HandleInner<T> {
    #[inline]
    fn place(&self, entry: HandleWord) -> *mut HandledValue<T> {
        (self.base + entry.place()) as *mut HandledValue<T>
    }

    /// Writes a value into an allocated object that is not published yet.
    #[inline]
    fn write(&self, object: usize, value: T, index: u32) {
        let place = object as *mut HandledValue<T>;
        // SAFETY: an allocated object: large and aligned enough, and owned by this call alone. Only the index may be read
        // by a mover meanwhile, and it is atomic.
        unsafe {
            (&raw mut (*place).value).write(value);
            (*place).index.store(index, Release);
        }
    }

    /// Allocates a place, and a handle that is not live yet.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn take_slowly(&self) -> Result<(usize, Key)> {
        let object = self.engine.allocate()?;
        let stocked = self.engine.beside_magazine(|thread| self.handles.stock(thread).keys.pop());
        let key = stocked.flatten().map_or_else(|| self.take_key_slowly(), |bits| Ok(Key::from_stock(bits)));
        // SAFETY: it was allocated here, and no other thread has seen it.
        let key = key.inspect_err(|_| unsafe { self.engine.free(object) })?;
        Ok((object, key))
    }

    fn take_key_slowly(&self) -> Result<Key> {
        let mut keys = [Key::from_bits(0); RUN];
        let most = if self.engine.beside_magazine(|_| ()).is_some() { keys.len() } else { 1 };
        let count = self.handles.take(&mut keys[..most])?;
        let kept = self.engine.beside_magazine(|thread| {
            let stock = &self.handles.stock(thread).keys;
            // The lowest is popped first.
            keys[1..count].iter().rev().take_while(|key| stock.push(key.to_bits())).count()
        });
        self.handles.give(keys[1..count - kept.unwrap_or(0)].iter().copied());
        Ok(keys[0])
    }

    /// Frees a handle that is not live, and retires its place.
    #[inline(always)]
    fn give_up(&self, key: Option<Key>, place: usize) {
        // One place may wait: it is small. A value may own much, so types with a destructor are not stocked.
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
        // If the closure of `remove_with` forked, this is the child. The value still belongs to the parent, and locks may
        // be held by threads that do not exist here.
        if self.engine.check().is_err() {
            return;
        }
        let are_in = self.engine.beside_magazine(|thread| {
            let stock = self.handles.stock(thread);
            let is_stocked = !std::mem::needs_drop::<T>() && stock.retired.push(place as u64);
            (key.is_none_or(|key| stock.keys.push(key.to_bits())), is_stocked)
        });
        let (has_key, has_place) = are_in.unwrap_or((key.is_none(), false));
        if !has_key {
            self.give_key_slowly(key);
        }
        if !has_place {
            self.retire_slowly(place);
        }
    }

    fn give_key_slowly(&self, key: Option<Key>) {
        let mut keys = [0; KEYS / 2];
        let drained = self.engine.beside_magazine(|thread| self.handles.stock(thread).keys.drain(KEYS / 2, &mut keys));
        self.give_keys(&keys[..drained.unwrap_or(0)]);
        self.handles.give(key);
    }

    /// Returns handles to the table, one run for each time that its lock is taken.
    fn give_keys(&self, keys: &[u64]) {
        keys.chunks(RUN).for_each(|run| self.handles.give(run.iter().map(|bits| Key::from_stock(*bits))));
    }

    fn retire_slowly(&self, place: usize) {
        if !std::mem::needs_drop::<T>() && self.retire_to_stock(place) {
            if self.waiting.0.load(Relaxed) > 0 {
                let ripe = self.retired.0.try_with(|retired| self.ripe(retired, PARTS_AT_ONCE));
                self.drop_all(ripe.unwrap_or_default());
            }
            return;
        }
        let ripe = self.retired.0.with(|retired| {
            retired.open.push(place as u64);
            if retired.open.len() < PLACES {
                return None;
            }
            self.close(retired);
            self.begin_end(retired)
        });
        self.end(ripe);
        self.notify();
    }

    /// Wakes the background thread for the retire list if the cache allows it and it is worth it: at once for values with
    /// a destructor, which may own much, else for about a block of places.
    fn notify(&self) {
        let places = self.waiting.0.load(Relaxed);
        let is_worth_it = std::mem::needs_drop::<T>() || places >= self.engine.shape.block_capacity() as usize;
        if is_worth_it && self.engine.used_ratio.load(Relaxed) > 0 {
            self.engine.shared.slabs.worker.notify();
        }
    }

    /// Sorts the retired places of this thread's stock and adds one. Returns whether the thread has a stock.
    fn retire_to_stock(&self, place: usize) -> bool {
        let mut places = [0; PLACES];
        let more = self.engine.shape.sheaf.div_ceil(2);
        let sorted = self.engine.beside_magazine(|thread| {
            let left = &self.handles.stock(thread).retired;
            let sorted = left.sort(more, &mut places);
            (sorted, left.push(place as u64))
        });
        let Some((Sorted { count, until }, is_in)) = sorted else { return false };
        let places = &places[..count];
        match until {
            // SAFETY: allocated objects with values without a destructor; no word names them, and no reader uses them.
            None => unsafe { self.engine.free_all(places) },
            Some(until) => {
                self.retired.0.with(|retired| self.add_part(retired, places.to_vec(), until));
                self.notify();
            }
        }
        is_in
    }

    /// Starts the grace period of the open places.
    fn close(&self, retired: &mut SharedRetireList) {
        if !retired.open.is_empty() {
            let open = std::mem::take(&mut retired.open);
            self.add_part(retired, open, epochs::wait_until());
        }
    }

    fn add_part(&self, retired: &mut SharedRetireList, places: Vec<u64>, until: Epoch) {
        self.waiting.0.fetch_add(places.len(), Relaxed);
        retired.closed.push_back((places, until));
    }

    /// Removes up to `most` batches that have no readers left.
    fn ripe(&self, retired: &mut SharedRetireList, most: usize) -> Vec<Vec<u64>> {
        let oldest = epochs::oldest();
        let ripe = take_over(&mut retired.closed, most, |(_, until)| *until < oldest);
        let ripe: Vec<Vec<u64>> = ripe.map(|(places, _)| places).collect();
        self.waiting.0.fetch_sub(ripe.iter().map(Vec::len).sum(), Relaxed);
        ripe
    }

    /// As [`HandleInner::ripe`], for all batches. `None` inside of a destructor: the outer call ends them then.
    fn begin_end(&self, retired: &mut SharedRetireList) -> Option<(DeferredDrop, Vec<Vec<u64>>)> {
        let dropping = DeferredDrop::begin(self)?;
        Some((dropping, self.ripe(retired, usize::MAX)))
    }

    /// Drops the values of these batches, and of those that destructors retire meanwhile. Called without locks.
    fn end(&self, begun: Option<(DeferredDrop, Vec<Vec<u64>>)>) {
        let Some((dropping, mut ripe)) = begun else { return };
        loop {
            self.drop_all(ripe);
            if !dropping.take_more() {
                return;
            }
            ripe = self.retired.0.with(|retired| self.ripe(retired, usize::MAX));
        }
    }

    /// Drops values that no thread can reach, and frees their places. Called without locks.
    fn drop_all(&self, ripe: Vec<Vec<u64>>) {
        let mut panic = None;
        for place in ripe.iter().flatten().map(|place| *place as usize) {
            if std::mem::needs_drop::<T>() {
                // SAFETY: it was retired: no word names the value, no reader uses it (type invariant). Dropped only here.
                let dropped = catch_unwind(AssertUnwindSafe(|| unsafe {
                    (&raw mut (*(place as *mut HandledValue<T>)).value).drop_in_place()
                }));
                panic = panic.or(dropped.err());
            }
            // SAFETY: an allocated object; its value is gone.
            unsafe { self.engine.free(place) };
        }
        match panic {
            // A second panic would abort: that of the `remove_with` closure, during which this runs, goes on.
            Some(panic) if thread::panicking() => std::mem::forget(panic),
            Some(panic) => resume_unwind(panic),
            None => {}
        }
    }

    /// Frees retired values without a destructor after their readers. For reclaim, so it may run inside of any call.
    fn end_plain(&self) {
        let Some(drained) = self.engine.try_drain_magazines() else { return };
        self.collect(&drained);
        drop(drained);
        self.retired.0.try_with(|retired| self.close(retired));
        let backoff = Backoff::new();
        while backoff.waited_ns() < SHORT_GRACE_NS {
            let ripe = self.retired.0.try_with(|retired| self.ripe(retired, PARTS_AT_ONCE)).unwrap_or_default();
            if ripe.is_empty() {
                return;
            }
            self.drop_all(ripe);
        }
    }

    /// Ends all retired values, if their readers finish within a second.
    fn end_all(&self) {
        if let Ok(drained) = self.engine.drain_magazines() {
            self.collect(&drained);
            // After the end of the cache its handle table and stocks belong to another cache.
            if !self.is_over.load(Relaxed) {
                drained.users().for_each(|thread| self.handles.strip_stock(thread));
            }
        }
        let mut backoff = Backoff::new();
        self.retired.0.with(|retired| self.close(retired));
        loop {
            let (ripe, left) = self.retired.0.with(|retired| (self.begin_end(retired), retired.closed.len()));
            let is_within = ripe.is_none();
            self.end(ripe);
            if is_within || left == 0 || backoff.waited_ns() > GRACE_NS {
                return;
            }
            backoff.pause();
        }
    }
}

impl<T: Movable> Member for HandleInner<T> {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn kind(&self) -> CacheKind {
        CacheKind::ByHandle
    }

    fn handle_bytes(&self) -> u64 {
        if self.engine.check().is_ok() { self.handles.resident_bytes() } else { 0 }
    }

    fn waiting(&self) -> u64 {
        if self.engine.check().is_err() || self.is_over.load(Relaxed) {
            return 0;
        }
        let stocked: u64 = self.engine.users().map(|thread| u64::from(self.handles.stock(thread).retired.len())).sum();
        let in_retire_list = self.retired.0.with(|retired| retired.open.len() + self.waiting.0.load(Relaxed));
        stocked + in_retire_list as u64 + self.engine.in_batches()
    }

    /// Moving or forgetting a value runs no user code. So under `Limit` this cache packs itself, and frees retired values
    /// if they have no destructor.
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

    fn finish_retired(&self) -> bool {
        let (ripe, is_left) = self.retired.0.with(|retired| {
            self.close(retired);
            (self.begin_end(retired), !retired.closed.is_empty())
        });
        self.end(ripe);
        self.engine.finish_retired_behind() || is_left
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        let ripe = self.retired.0.with(|retired| {
            self.close(retired);
            self.begin_end(retired)
        });
        self.end(ripe);
        defrag::step(&self.engine, self, budget)
    }
}

impl<T: Movable> Mover for HandleInner<T> {
    /// The guard keeps the source of the copy from being dropped.
    type Isolated = Guard;

    fn isolate(&self, _chunk: &mut Chunk) -> Guard {
        pin()
    }

    /// Prefetches the word of its handle: words are spread over the whole table.
    fn expect(&self, object: usize) {
        // SAFETY: as in `migrate`, which also checks that the index still belongs to this value.
        let index = unsafe { &(*(object as *mut HandledValue<T>)).index }.load(Relaxed);
        self.handles.fetch(index);
    }

    /// Handles go to the table, places to the shared retire list.
    fn collect(&self, drained: &DrainGuard<'_>) {
        if self.is_over.load(Relaxed) {
            return;
        }
        for stock in drained.users().map(|thread| self.handles.stock(thread)) {
            let (mut keys, mut places) = ([0; KEYS], [0; PLACES]);
            let (free, left) = (stock.keys.drain(0, &mut keys), stock.retired.take(&mut places));
            self.give_keys(&keys[..free]);
            self.retired.0.with(|retired| retired.open.extend_from_slice(&places[..left]));
        }
    }

    fn migrate(&self, object: usize, to: &mut Places<'_>, _guard: &mut Guard) -> Fate {
        let old = object as *mut HandledValue<T>;
        // SAFETY: an object of this cache: the index of each was initialized, first by `set_up`.
        let index = unsafe { &(*old).index }.load(Acquire);
        // If the place is being filled or is retired, its index leads to a word that does not name this place.
        let seen = self.handles.load(index);
        if !seen.is_live() || self.place(seen) != old || seen.pins() > 0 {
            return Fate::Busy;
        }
        let Some(target) = to.take() else { return Fate::Failed };
        let new = target as *mut HandledValue<T>;
        // SAFETY: the word was live after the guard was pinned: the value exists until it is dropped, and does not
        // change (type invariant, `Movable`). Only this call uses the target, except for its index.
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

/// A cache of values that are reached by handle, and that the cache moves by itself.
///
/// ```
/// use pagemill::{Pagemill, slab::{Settings, pin}};
///
/// let cache = Pagemill::of_process()?.slabs.by_handle::<String>(Settings::new("names"))?;
/// let handle = cache.insert("one".into())?;
/// assert_eq!(cache.get(handle, &pin()).map(|name| name.len()), Some(3)); // stays as it is while the guard is there
/// let pinned = cache.pin_value(handle)?; // for longer, without a guard
/// assert_eq!(pinned.as_deref().map(String::len), Some(3));
/// drop(pinned);
/// assert!(cache.remove(handle)? && cache.get(handle, &pin()).is_none());
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct ByHandle<T: Movable> {
    inner: Arc<HandleInner<T>>,
    /// As in `inner`. A copy in the cache itself stays in registers from one call of a reader to the next.
    words: &'static Words,
    base: usize,
}

/// A value that was removed from its handle. Dropping this retires it, also during unwinding.
struct Ended<'cache, T: Movable> {
    cache: &'cache HandleInner<T>,
    /// Its former handle.
    key: Key,
    place: *mut HandledValue<T>,
}

impl<T: Movable> Drop for Ended<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.cache.give_up(self.key.next(), self.place as usize);
    }
}

/// A pinned value: it keeps its address and contents while this exists. At most seven pins of one value at a time.
/// Example: [`ByHandle`].
pub struct Pinned<'cache, T: Movable> {
    cache: &'cache HandleInner<T>,
    index: u32,
    value: &'cache T,
}

impl Slabs {
    /// Creates a cache of values that are reached by handle.
    ///
    /// # Errors
    ///
    /// As [`Slabs::fixed`].
    pub fn by_handle<T: Movable>(&'static self, settings: Settings) -> Result<ByHandle<T>> {
        let (index_at, value_at) =
            (std::mem::offset_of!(HandledValue<T>, index), std::mem::offset_of!(HandledValue<T>, value));
        // SAFETY: an object of a slab that is being set up, with the layout below, and not shared yet.
        let set_up = move |object: usize| unsafe { ((object + index_at) as *mut AtomicU32).write(AtomicU32::new(0)) };
        let shared = self.members.with(|_| self.shared())?;
        let handles = shared.take_handles()?;
        let object = Object {
            layout: Layout::new::<HandledValue<T>>(),
            user_bytes: size_of::<T>(),
            closed: value_at..value_at + size_of::<T>(),
            set_up: Some(Box::new(set_up)),
            is_movable: true,
            grace: Grace::of_handles,
            handles: Some(handles),
        };
        let inner = self.make(settings, object, |engine| HandleInner {
            base: engine.shared.blocks.addr(0),
            engine,
            handles,
            retired: Padded::default(),
            waiting: Padded::default(),
            is_over: AtomicBool::new(false),
            _values: PhantomData,
        });
        let inner = inner.inspect_err(|_| shared.give_handles(handles))?;
        Ok(ByHandle { base: inner.base, inner, words: handles.words() })
    }
}

impl<T: Movable> ByHandle<T> {
    /// Inserts a value and returns its handle.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`], [`Error::System`]: the value is dropped. [`Error::WrongState`] in a
    /// fork child.
    // Always inlined, so that the value is built in place and uninitialized bytes of it are not copied.
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

    /// Returns the value of a handle, if it is live. Cost: one load of its word, then the value.
    #[inline]
    pub fn get<'read>(&'read self, handle: Handle<T>, _guard: &'read Guard) -> Option<&'read T> {
        let entry = handle.key.find(self.words)?;
        // SAFETY: a live word names a value that exists until all guards of this time are dropped. `_guard` is one of
        // them and outlives the reference; so does the cache.
        Some(unsafe { &(*handle.key.address(entry, self.base).cast::<HandledValue<T>>()).value })
    }

    /// Removes a value. Returns whether it existed. It is dropped when its readers have finished, by this or a later call
    /// or by Pagemill's background thread. With a ratio of 0, or after [`Slabs::defrag_by_hand`], it is dropped by one of
    /// the next removals, [`ByHandle::shrink`] or [`ByHandle::defrag_step`].
    ///
    /// Cost: a compare-and-swap and two stores into the thread's stock; for types with a destructor also a short lock.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if it is pinned; [`Error::WrongState`] in a fork child.
    #[inline]
    pub fn remove(&self, handle: Handle<T>) -> Result<bool> {
        Ok(self.end(handle)?.is_some())
    }

    /// As [`ByHandle::remove`], and returns the result of `look` on the value. Only one of concurrent removals sees it.
    /// Needs no guard, so it costs less than [`ByHandle::get`] and a removal.
    ///
    /// # Errors
    ///
    /// As [`ByHandle::remove`].
    #[inline]
    pub fn remove_with<R>(&self, handle: Handle<T>, look: impl FnOnce(&T) -> R) -> Result<Option<R>> {
        // SAFETY: a live word named the place until this call ended it, so the value is initialized and does not change
        // (type invariant). Only this call retires the place, when the result is dropped.
        Ok(self.end(handle)?.map(|ended| look(unsafe { &(*ended.place).value })))
    }

    /// Removes the value from its handle, if it is live.
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

    /// Replaces a value by the result of `change`. Returns whether the value existed. If another thread changes it at the
    /// same time, `change` is called again. Readers see the old or the new value. `change` must not update the same
    /// value: it would be called again forever.
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
            // Still under the guard: the place that was read cannot hold another value by now.
            let is_in = inner.handles.exchange(handle.key.index(), seen, seen.at(object - inner.base));
            drop(guard);
            // An unused new value was never visible; it is retired in the same way.
            inner.give_up(None, if is_in { inner.place(seen) as usize } else { object });
            if is_in {
                return Ok(true);
            }
        }
    }

    /// Pins a value: it keeps its address and contents. `None` if the handle is not live.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if it has been pinned seven times.
    pub fn pin_value(&self, handle: Handle<T>) -> Result<Option<Pinned<'_, T>>> {
        let inner = &*self.inner;
        while let Some(seen) = handle.key.find(self.words) {
            if inner.handles.pin(handle.key.index(), seen) {
                // SAFETY: the word is as it was read except for the pin, which keeps all threads from changing it.
                let value = unsafe { &(*inner.place(seen)).value };
                return Ok(Some(Pinned { cache: inner, index: handle.key.index(), value }));
            }
            if seen.is_pinned_most() {
                return Err(Error::Busy { what: "the value of this handle is pinned as often as can be" });
            }
        }
        Ok(None)
    }

    /// Packs all values into as few slabs and blocks as possible, drops removed ones, and frees the rest, including free
    /// pages of the handle table. As [`super::ByOwner::shrink`]; returns the bytes of both.
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

    /// Returns the statistics of the cache.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] in a fork child.
    pub fn info(&self) -> Result<SlabInfo> {
        info::of(&*self.inner)
    }

    /// Resident bytes of the handle table: 8 for each handle of the highest count so far, less free pages.
    pub fn handle_bytes(&self) -> u64 {
        self.inner.handle_bytes()
    }
}

impl<T: Movable> Drop for ByHandle<T> {
    /// Drops all values.
    fn drop(&mut self) {
        withdraw(&self.inner);
        let inner = &*self.inner;
        // Keeps other threads from moving values. If it fails, as in a fork child, the values stay allocated for good.
        let drained = loop {
            match inner.engine.drain_magazines() {
                Ok(drained) => break drained,
                // Another thread runs a long step that it began through the list of caches: it ends.
                Err(Error::Busy { .. }) => {}
                Err(_) => return,
            }
        };
        // Readers borrow the cache, so guards that exist are for other caches.
        inner.engine.finish_retired_at_once();
        let live: Vec<(u32, HandleWord)> = inner.handles.live().collect();
        let mut places = Vec::with_capacity(live.len());
        for (index, entry) in live {
            // Readers and pins borrow the cache, so none is left, except pins that were forgotten.
            let key = Key::new(index, entry.generation());
            inner.handles.close(key);
            inner.handles.give(key.next());
            places.push(inner.place(entry) as u64);
        }
        inner.collect(&drained);
        inner.is_over.store(true, Relaxed);
        drop(drained);
        let retired = inner.retired.0.with(std::mem::take);
        inner.handles.shrink();
        inner.engine.shared.give_handles(inner.handles);
        inner.drop_all(retired.closed.into_iter().map(|(left, _)| left).chain([places, retired.open]).collect());
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

    pub(super) fn in_retire_list(&self) -> usize {
        self.inner
            .retired
            .0
            .with(|retired| retired.open.len() + retired.closed.iter().map(|(places, _)| places.len()).sum::<usize>())
    }

    /// Shrinks until readers of other tests have finished: nothing waits for them, and nothing is left to move.
    pub(super) fn pack(&self) -> u64 {
        let mut freed = 0;
        loop {
            let before = self.info().unwrap().moved;
            freed += self.shrink().unwrap();
            let is_waiting = self.inner.engine.has_batches() || self.in_retire_list() > 0;
            if !is_waiting && self.info().unwrap().moved == before {
                return freed;
            }
        }
    }
}
