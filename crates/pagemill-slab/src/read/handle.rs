//! Caches by handle: a table holds the address of each value, so the cache can move a value while threads read it.
//!
//! No `&mut` to a reachable value exists. An update writes a new value, exchanges the word of the handle, and retires
//! the old value. A move does the same with a copy of the value. When the readers of a retired value have finished, a
//! later call or the background thread drops the value. After a move the old copy is freed without a drop.
#![allow(unsafe_code)] // raw access to the values in objects

mod sparse;
mod unguarded;

pub use unguarded::{Pinned, Removed};

use crate::SlabCache;
use crate::alloc::engine::{Engine, ObjectSpec};
use crate::alloc::settings::Settings;
use crate::alloc::stock::{DrainedBatch, KEY_BATCH_LEN, STOCK_KEY_CAPACITY, STOCK_RETIRED_CAPACITY};
use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::defrag::drain::DrainGuard;
use crate::defrag::migrate::{Chunk, DestinationSource, Destinations, MoveOutcome, Mover};
use crate::defrag::passes::Progress;
use crate::defrag::steps::{self, SHORT_GRACE_TIMEOUT_NS};
use crate::insert_error::InsertError;
use crate::read::batch::{GRACE_TIMEOUT_NS, drain_finished};
use crate::read::deferred_drop::DeferredDrop;
use crate::read::epochs::{self, Epoch, Guard};
use crate::read::handles::{Handle, HandleTable, HandleWord, Key, Words};
use crate::read::movable::Movable;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Acquire, Backoff, Guarded, Padded, Relaxed, Release};
use std::alloc::Layout;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::thread;
use std::time::Duration;

/// The content of an object of a cache by handle: a value, and the index of its handle.
#[repr(C)]
struct HandledValue<T> {
    /// Index of the value's handle. In a free object, this is the index of the last value's handle. The index is mostly
    /// in the same cache line as the beginning of the value.
    index: AtomicU32,
    value: T,
}

/// The retire list that all threads of a cache share: objects that no handle refers to, but that readers may still use.
/// Further retired objects are in the stocks of threads.
#[derive(Default)]
struct SharedRetireList {
    /// Retired objects whose grace period has not begun.
    unsealed: Vec<u64>,
    /// Batches of retired objects. A batch is freed when all pinned epochs are newer than the batch's epoch.
    sealed: VecDeque<(Vec<u64>, Epoch)>,
}

/// Maximum number of sealed batches that one call removes from the retire list, for values without a destructor.
const MAX_FINISHED_BATCHES: usize = 2;

/// Maximum number of counts that [`HandleMap::len`] makes while other threads retire or free objects.
const MAX_COUNTS: usize = 4;

/// The part of a [`HandleMap`] to which the list of all caches refers.
///
/// Type invariant: the word of a live handle contains the offset of an object with an initialized value. The value does
/// not change until the word has changed and all guards that existed at the change are dropped. No word refers to a
/// retired object.
pub(crate) struct HandleInner<T> {
    engine: Engine,
    handles: &'static HandleTable,
    /// Start of the window of slab memory. Offsets in handle words are relative to this address.
    base: usize,
    retired: Padded<Guarded<SharedRetireList>>,
    /// Number of objects in the sealed batches (those whose grace period has begun) of `retired`. Changed under the
    /// lock of `retired`, but also read without that lock.
    waiting: Padded<AtomicUsize>,
    /// Whether the handle table was given back, so that another cache may use it. Set while all magazines are drained.
    is_closed: AtomicBool,
    _values: PhantomData<T>,
}

impl<T: Movable> HandleInner<T> {
    /// Runs a step that moves values. Without mobility ([`Settings::movable`]) there is nothing to do.
    fn if_movable(&self, step: impl FnOnce() -> Result<Progress>) -> Result<Progress> {
        if self.engine.object.is_movable() { step() } else { Ok(Progress { is_done: true, ..Progress::default() }) }
    }

    #[inline]
    fn value_at(&self, word: HandleWord) -> *mut HandledValue<T> {
        (self.base + word.object_offset()) as *mut HandledValue<T>
    }

    /// Writes a value and the index of its handle into an allocated object that no handle refers to yet.
    #[inline]
    fn write_value(&self, object: usize, value: T, index: u32) {
        let object = object as *mut HandledValue<T>;
        // SAFETY: a new object is large and aligned enough, and owned by this call. Movers only read its atomic index.
        unsafe {
            (&raw mut (*object).value).write(value);
            (*object).index.store(index, Release);
        }
    }

    /// Allocates an object and a handle. The handle is not live until [`Key::publish`].
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn allocate_slowly(&self) -> Result<(usize, Key)> {
        let object = self.engine.allocate()?;
        let stocked = self.engine.with_magazine(|slot| self.handles.stock(slot).keys.pop());
        let key = stocked.flatten().map_or_else(|| self.take_keys_from_table(), |bits| Ok(Key::from_stock(bits)));
        // SAFETY: the object was allocated above, and no other thread has seen it.
        let key = key.inspect_err(|_| unsafe { self.engine.free(object) })?;
        Ok((object, key))
    }

    fn take_keys_from_table(&self) -> Result<Key> {
        let mut keys = [Key::from_bits(0); KEY_BATCH_LEN];
        let most = if self.engine.with_magazine(|_| ()).is_some() { keys.len() } else { 1 };
        let count = self.handles.allocate(&mut keys[..most])?;
        let kept = self.engine.with_magazine(|thread| {
            let stock = &self.handles.stock(thread).keys;
            // In reverse order, so that the lowest handle is popped first.
            keys[1..count].iter().rev().take_while(|key| stock.push(key.to_bits())).count()
        });
        self.handles.free(keys[1..count - kept.unwrap_or(0)].iter().copied());
        Ok(keys[0])
    }

    /// Frees a handle that is not live any more, and retires the object to which the handle referred.
    #[inline(never)]
    fn free_and_retire(&self, key: Option<Key>, object: usize) {
        // A stock may keep a retired object for long. A value with a destructor may own much, so it is not stocked.
        let is_done = !std::mem::needs_drop::<T>()
            && key.is_some_and(|key| {
                let push_pair = |slot| self.handles.stock(slot).push_pair(key.to_bits(), object as u64);
                self.engine.with_magazine(push_pair).unwrap_or(false)
            });
        if !is_done {
            self.free_and_retire_slowly(key, object);
        }
    }

    #[cold]
    #[inline(never)]
    fn free_and_retire_slowly(&self, key: Option<Key>, object: usize) {
        // If the program forked while it read a removed value, this is the child. The value still belongs to the
        // parent, and locks may be held by threads that do not exist in the child.
        if self.engine.check_generation().is_err() {
            return;
        }
        let are_in = self.engine.with_magazine(|thread| {
            let stock = self.handles.stock(thread);
            let is_stocked = !std::mem::needs_drop::<T>() && stock.retired.push(object as u64);
            (key.is_none_or(|key| stock.keys.push(key.to_bits())), is_stocked)
        });
        let (has_key, has_place) = are_in.unwrap_or((key.is_none(), false));
        if !has_key {
            self.free_key_slowly(key);
        }
        if !has_place {
            self.retire_slowly(object);
        }
    }

    fn free_key_slowly(&self, key: Option<Key>) {
        let mut keys = [0; STOCK_KEY_CAPACITY / 2];
        let count =
            self.engine.with_magazine(|slot| self.handles.stock(slot).keys.drain(STOCK_KEY_CAPACITY / 2, &mut keys));
        self.free_keys(&keys[..count.unwrap_or(0)]);
        self.handles.free(key);
    }

    /// Frees handles in the handle table. The table's lock is taken once for each [`KEY_BATCH_LEN`] handles.
    fn free_keys(&self, keys: &[u64]) {
        keys.chunks(KEY_BATCH_LEN).for_each(|run| self.handles.free(run.iter().map(|bits| Key::from_stock(*bits))));
    }

    fn retire_slowly(&self, object: usize) {
        if !std::mem::needs_drop::<T>() && self.retire_to_stock(object) {
            if self.waiting.0.load(Relaxed) > 0 {
                let finished =
                    self.retired.0.try_with(|retired| self.take_finished_batches(retired, MAX_FINISHED_BATCHES));
                self.drop_values(finished.unwrap_or_default());
            }
            return;
        }
        let finished = self.retired.0.with(|retired| {
            retired.unsealed.push(object as u64);
            if retired.unsealed.len() < STOCK_RETIRED_CAPACITY {
                return None;
            }
            self.seal(retired);
            self.begin_drops(retired)
        });
        self.drop_batches(finished);
        self.notify_worker();
    }

    /// Tells the background thread that retired objects wait for readers, unless the used ratio of the cache is 0. A
    /// single waiting value with a destructor is urgent, because it may own much memory. Other values are urgent when
    /// about as many objects wait as fit into a block.
    fn notify_worker(&self) {
        let objects = self.waiting.0.load(Relaxed);
        let is_urgent = std::mem::needs_drop::<T>() || objects >= self.engine.shape.block_capacity() as usize;
        self.engine.note_free_for_worker(is_urgent);
    }

    /// Adds an object to the retire list in this thread's stock. Before that, frees retired objects in the stock whose
    /// readers have finished, or moves the oldest ones to the shared list. Returns false if the object does not fit
    /// into the stock.
    fn retire_to_stock(&self, object: usize) -> bool {
        let mut objects = [0; STOCK_RETIRED_CAPACITY];
        let more = self.engine.shape.sheaf_len.div_ceil(2);
        let drained = self.engine.with_magazine(|thread| {
            let retired = &self.handles.stock(thread).retired;
            let drained = retired.drain_batch(more, &mut objects);
            (drained, retired.push(object as u64))
        });
        let Some((DrainedBatch { count, until }, is_pushed)) = drained else { return false };
        let objects = &objects[..count];
        match until {
            // SAFETY: allocated objects whose values need no destructor. No word refers to them, no reader uses them.
            None => unsafe { self.engine.free_all(objects) },
            Some(until) => {
                self.retired.0.with(|retired| self.push_batch(retired, objects.to_vec(), until));
                self.notify_worker();
            }
        }
        is_pushed
    }

    /// Makes the unsealed objects of the shared retire list a batch, and begins the batch's grace period.
    fn seal(&self, retired: &mut SharedRetireList) {
        if !retired.unsealed.is_empty() {
            let open = std::mem::take(&mut retired.unsealed);
            self.push_batch(retired, open, epochs::grace_epoch());
        }
    }

    fn push_batch(&self, retired: &mut SharedRetireList, objects: Vec<u64>, until: Epoch) {
        self.waiting.0.fetch_add(objects.len(), Relaxed);
        retired.sealed.push_back((objects, until));
    }

    /// Removes up to `most` batches whose readers have finished from the shared retire list, and returns them.
    fn take_finished_batches(&self, retired: &mut SharedRetireList, most: usize) -> Vec<Vec<u64>> {
        let oldest = epochs::oldest_pinned();
        let finished = drain_finished(&mut retired.sealed, most, |(_, until)| *until < oldest);
        let finished: Vec<Vec<u64>> = finished.map(|(objects, _)| objects).collect();
        self.waiting.0.fetch_sub(finished.iter().map(Vec::len).sum(), Relaxed);
        finished
    }

    /// As [`HandleInner::take_finished_batches`], for all batches, so that the caller can drop the values. Returns
    /// `None` inside of a destructor: the outer call drops the values.
    fn begin_drops(&self, retired: &mut SharedRetireList) -> Option<(DeferredDrop, Vec<Vec<u64>>)> {
        let dropping = DeferredDrop::begin(self)?;
        Some((dropping, self.take_finished_batches(retired, usize::MAX)))
    }

    /// Drops the values of batches whose readers have finished, and the values that their destructors retire. The
    /// caller holds no lock.
    fn drop_batches(&self, begun: Option<(DeferredDrop, Vec<Vec<u64>>)>) {
        let Some((dropping, mut finished)) = begun else { return };
        loop {
            self.drop_values(finished);
            if !dropping.take_has_more() {
                return;
            }
            finished = self.retired.0.with(|retired| self.take_finished_batches(retired, usize::MAX));
        }
    }

    /// Drops the retired values whose readers have finished. Returns whether retired values still wait.
    fn drop_finished(&self) -> bool {
        let (finished, is_left) = self.retired.0.with(|retired| {
            self.seal(retired);
            (self.begin_drops(retired), !retired.sealed.is_empty())
        });
        self.drop_batches(finished);
        is_left
    }

    /// Drops values that no thread can reach, and frees their objects. The caller holds no lock.
    fn drop_values(&self, finished: Vec<Vec<u64>>) {
        let mut panic = None;
        for object in finished.iter().flatten().map(|object| *object as usize) {
            if std::mem::needs_drop::<T>() {
                // SAFETY: a retired value: no word refers to it, no reader uses it (type invariant). Dropped only here.
                let dropped = catch_unwind(AssertUnwindSafe(|| unsafe {
                    (&raw mut (*(object as *mut HandledValue<T>)).value).drop_in_place()
                }));
                panic = panic.or(dropped.err());
            }
            // SAFETY: an allocated object whose value was dropped or needs no destructor.
            unsafe { self.engine.free(object) };
        }
        match panic {
            // A reader of a removed value is unwinding. A second panic would abort the process: drop the destructor's
            // panic.
            Some(panic) if thread::panicking() => std::mem::forget(panic),
            Some(panic) => resume_unwind(panic),
            None => {}
        }
    }

    /// Frees retired objects whose readers have finished, if values have no destructor. Reclaim may call this on any
    /// thread.
    fn free_plain_retired(&self) {
        let Some(drained) = self.engine.try_drain_magazines() else { return };
        self.collect_stocks(&drained);
        drop(drained);
        self.retired.0.try_with(|retired| self.seal(retired));
        let backoff = Backoff::new();
        while backoff.waited_ns() < SHORT_GRACE_TIMEOUT_NS {
            let finished = self
                .retired
                .0
                .try_with(|retired| self.take_finished_batches(retired, MAX_FINISHED_BATCHES))
                .unwrap_or_default();
            if finished.is_empty() {
                return;
            }
            self.drop_values(finished);
        }
    }

    /// Drops all retired values, if their readers finish within a second.
    fn drop_all_retired(&self) {
        if let Ok(drained) = self.engine.drain_magazines() {
            self.collect_stocks(&drained);
            // After the end of this cache, its handle table and stocks belong to another cache.
            if !self.is_closed.load(Relaxed) {
                drained.opened_slots().for_each(|thread| self.handles.discard_stock(thread));
            }
        }
        let mut backoff = Backoff::new();
        self.retired.0.with(|retired| self.seal(retired));
        loop {
            let (finished, left) = self.retired.0.with(|retired| (self.begin_drops(retired), retired.sealed.len()));
            let is_within = finished.is_none();
            self.drop_batches(finished);
            if is_within || left == 0 || backoff.waited_ns() > GRACE_TIMEOUT_NS {
                return;
            }
            backoff.pause();
        }
    }
}

impl<T: Movable> Cache for HandleInner<T> {
    fn engine(&self) -> &Engine {
        &self.engine
    }

    fn handle_bytes(&self) -> u64 {
        if self.engine.check_generation().is_ok() { self.handles.resident_bytes() } else { 0 }
    }

    fn waiting_objects(&self) -> u64 {
        if self.engine.check_generation().is_err() || self.is_closed.load(Relaxed) {
            return 0;
        }
        let stocked: u64 =
            self.engine.opened_slots().map(|slot| u64::from(self.handles.stock(slot).retired.len())).sum();
        let in_retire_list = self.retired.0.with(|retired| retired.unsealed.len() + self.waiting.0.load(Relaxed));
        stocked + in_retire_list as u64 + self.engine.objects_in_batches()
    }

    /// Packs the values into fewer slabs, and frees retired values without a destructor. Neither runs code of the
    /// program.
    fn pack_without_callback(&self) {
        if !std::mem::needs_drop::<T>() {
            self.free_plain_retired();
        }
        if self.engine.object.is_movable() {
            steps::pack(&self.engine, self);
        }
    }

    fn shrink(&self) -> Result<u64> {
        self.engine.check_generation()?;
        self.drop_all_retired();
        let freed =
            if self.engine.object.is_movable() { steps::shrink(&self.engine, self) } else { self.engine.shrink() }?;
        Ok(freed + self.handles.shrink())
    }

    fn finish_retired(&self) -> bool {
        let is_left = self.drop_finished();
        self.engine.finish_retired_in_background() || is_left
    }

    fn defrag(&self, budget: Duration) -> Result<Progress> {
        self.drop_finished();
        self.if_movable(|| steps::run_step(&self.engine, self, budget))
    }

    fn move_objects(&self, from: usize, to: usize, most: u64) -> Result<Progress> {
        self.if_movable(|| steps::move_objects(&self.engine, self, from, to, most))
    }

    fn balance(&self) -> Result<Progress> {
        self.if_movable(|| steps::balance(&self.engine, self))
    }
}

impl<T: Movable> Mover for HandleInner<T> {
    /// While this guard exists, the old copy of a moved value is not freed.
    type Isolated = Guard;

    fn isolate(&self, _chunk: &mut Chunk) -> Guard {
        epochs::enter()
    }

    /// Prefetches the word of the handle of the value in `object`, because words are spread over the whole table.
    fn prefetch_for(&self, object: usize) {
        // SAFETY: as in `migrate`, which also checks that the index belongs to this value.
        let index = unsafe { &(*(object as *mut HandledValue<T>)).index }.load(Relaxed);
        self.handles.prefetch(index);
    }

    /// Empties the stocks of all threads: returns their free handles to the table, and moves their retired objects to
    /// the shared retire list.
    fn collect_stocks(&self, drained: &DrainGuard<'_>) {
        if self.is_closed.load(Relaxed) {
            return;
        }
        for stock in drained.opened_slots().map(|slot| self.handles.stock(slot)) {
            let (mut keys, mut objects) = ([0; STOCK_KEY_CAPACITY], [0; STOCK_RETIRED_CAPACITY]);
            let (free, left) = (stock.keys.drain(0, &mut keys), stock.retired.drain_all(&mut objects));
            self.free_keys(&keys[..free]);
            self.retired.0.with(|retired| retired.unsealed.extend_from_slice(&objects[..left]));
        }
    }

    fn migrate(&self, object: usize, to: &mut Destinations<'_>, _guard: &mut Guard) -> MoveOutcome {
        let old = object as *mut HandledValue<T>;
        // SAFETY: an object of this cache. The constructor has initialized its index.
        let index = unsafe { &(*old).index }.load(Acquire);
        // If the object is being filled or is retired, its index leads to a word that does not refer to this object.
        let seen = self.handles.load(index);
        if !seen.is_live() || self.value_at(seen) != old || seen.pins() > 0 {
            return MoveOutcome::Busy;
        }
        let Some(target) = to.take() else { return MoveOutcome::Failed };
        let new = target as *mut HandledValue<T>;
        // SAFETY: the word was live after the guard was pinned. So the value exists until the guard is dropped, and
        // does not change (type invariant, `Movable`). Only this call uses the target, except for its index.
        unsafe {
            std::ptr::copy_nonoverlapping(&raw const (*old).value, &raw mut (*new).value, 1);
            (*new).index.store(index, Release);
        }
        if self.handles.replace_word(index, seen, seen.with_offset(target - self.base)) {
            MoveOutcome::Moved
        } else {
            to.put_back(target);
            MoveOutcome::Busy
        }
    }
}

/// A cache of values that are reached by handle. The cache can move the values without a callback of the program.
///
/// ```
/// use pagemill::slab::{self, HandleMap};
///
/// let names = HandleMap::<String>::new("names")?;
/// let handle = names.insert("one".to_owned())?;
/// let guard = slab::enter(); // in a variable, because `one` can be used only while the guard exists
/// let one = names.get(handle, &guard);
/// assert_eq!(one.map(String::as_str), Some("one"));
/// drop(guard); // until then, the memory of removed values is not freed
/// assert_eq!(names.get(handle, &slab::enter()).map(String::len), Some(3)); // a guard for this statement only
/// let pinned = names.pin(handle)?; // keeps the value for longer, without a guard
/// assert_eq!(pinned.as_deref().map(String::len), Some(3));
/// drop(pinned);
/// let removed = names.remove(handle)?;
/// assert_eq!(removed.as_deref().map(String::as_str), Some("one"));
/// assert!(names.get(handle, &slab::enter()).is_none());
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// The trait [`SlabCache`] has the methods for statistics ([`info`](SlabCache::info)) and for compaction
/// ([`shrink`](SlabCache::shrink), [`defrag_step`](SlabCache::defrag_step)):
///
/// ```
/// use pagemill::HandleMap;
/// use pagemill::slab::SlabCache;
///
/// let sizes = HandleMap::<u64>::new("sizes")?;
/// for size in 0..1000 {
///     let handle = sizes.insert(size)?;
///     if size % 100 > 0 {
///         sizes.remove(handle)?;
///     }
/// }
/// let freed_bytes = sizes.shrink()?; // moves the remaining values together
/// println!("{freed_bytes} bytes freed; {} bytes for {} values", sizes.info()?.total.resident_bytes, sizes.len());
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct HandleMap<T: Movable> {
    pub(crate) inner: Arc<HandleInner<T>>,
    /// Copies of the same fields in `inner`. The copies stay in registers from one call of a reader to the next.
    words: &'static Words,
    base: usize,
    /// The caches of the process, to which this cache belongs.
    slabs: &'static Slabs,
}

impl Slabs {
    /// Creates a cache of values that are reached by handle.
    ///
    /// # Errors
    ///
    /// As [`Slabs::fixed`].
    pub fn by_handle<T: Movable>(&'static self, settings: Settings) -> Result<HandleMap<T>> {
        let (index_at, value_at) =
            (std::mem::offset_of!(HandledValue<T>, index), std::mem::offset_of!(HandledValue<T>, value));
        // SAFETY: an object of a slab that is being set up, with the layout below. No other thread uses it yet.
        let constructor =
            move |object: usize| unsafe { ((object + index_at) as *mut AtomicU32).write(AtomicU32::new(0)) };
        let shared = self.caches.with(|_| self.shared())?;
        let handles = shared.take_handle_table()?;
        let object = ObjectSpec {
            layout: Layout::new::<HandledValue<T>>(),
            user_bytes: size_of::<T>(),
            poisoned_range: value_at..value_at + size_of::<T>(),
            constructor: Some(Box::new(constructor)),
            kind: if settings.is_movable { SlabKind::ByHandle } else { SlabKind::Fixed },
            handles: Some(handles),
        };
        let inner = self.create_cache(settings, object, |engine| HandleInner {
            base: engine.shared.blocks.addr(0),
            engine,
            handles,
            retired: Padded::default(),
            waiting: Padded::default(),
            is_closed: AtomicBool::new(false),
            _values: PhantomData,
        });
        let inner = inner.inspect_err(|_| shared.return_handle_table(handles))?;
        Ok(HandleMap { base: inner.base, inner, words: handles.words(), slabs: self })
    }
}

impl<T: Movable> HandleMap<T> {
    /// Creates a map with default parameters among the slab caches of the process.
    ///
    /// # Errors
    ///
    /// As [`HandleMap::with`].
    pub fn new(name: &str) -> Result<Self> {
        Self::with(Settings::new(name))
    }

    /// Creates a map among the slab caches of the process.
    ///
    /// # Errors
    ///
    /// As [`FixedSlab::with`](crate::FixedSlab::with).
    pub fn with(settings: Settings) -> Result<Self> {
        Slabs::of_process()?.by_handle(settings)
    }

    /// Inserts a value and returns its handle.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`], [`Error::NoAddresses`], [`Error::System`]; [`Error::WrongState`] in a fork child. The error
    /// returns the value.
    // Always inlined, so that the caller builds the value in place and uninitialized bytes are not copied.
    #[inline(always)]
    #[track_caller]
    pub fn insert(&self, value: T) -> std::result::Result<Handle<T>, InsertError<T>> {
        let inner = &*self.inner;
        if let Err(error) = inner.engine.check_generation() {
            return Err(InsertError { value, error });
        }
        let at_hand = inner.engine.allocate_together(|thread| inner.handles.stock(thread).keys.pop());
        let (object, key) = match at_hand {
            Some((object, bits)) => (object, Key::from_stock(bits)),
            None => match inner.allocate_slowly() {
                Ok(allocated) => allocated,
                Err(error) => return Err(InsertError { value, error }),
            },
        };
        inner.write_value(object, value, key.index());
        key.publish(self.words, object - inner.base);
        Ok(Handle::new(key))
    }

    /// Returns the value of a handle; `None` if the handle is not live. The reference is valid as long as the guard,
    /// so a guard that is needed for more than one statement is stored in a variable: `let guard = slab::enter();`.
    ///
    /// Cost: one load of the handle's word, then the access to the value.
    #[inline]
    pub fn get<'read>(&'read self, handle: Handle<T>, _guard: &'read Guard) -> Option<&'read T> {
        let word = handle.key.live_word(self.words)?;
        // SAFETY: a live word refers to a value that exists until all guards of this time are dropped. `_guard` is one
        // of them and outlives the reference, as does the cache.
        Some(unsafe { &(*handle.key.address(word, self.base).cast::<HandledValue<T>>()).value })
    }

    /// Removes a value, and returns it for reading; `None` if the handle is not live. If several threads remove the
    /// value at once, only one of them gets it. When all readers have finished, the value is dropped by this call, a
    /// later one, or the background thread. If the background thread does not work on the map
    /// ([`Settings::defrag_used_ratio`] is 0), one of the next removals, [`shrink`](SlabCache::shrink) or
    /// [`defrag_step`](SlabCache::defrag_step) drops it.
    ///
    /// Cost: a compare-and-swap and two stores into the thread's stock; for types with a destructor also a short lock.
    /// No guard is needed, so reading the removed value costs less than [`HandleMap::get`] before the removal.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the value is pinned; [`Error::WrongState`] in a fork child.
    #[inline]
    pub fn remove(&self, handle: Handle<T>) -> Result<Option<Removed<'_, T>>> {
        self.inner.engine.check_generation()?;
        while let Some(seen) = handle.key.live_word(self.words) {
            if seen.pins() > 0 {
                return Err(Error::Busy { what: "the value of this handle is pinned" });
            }
            if handle.key.end_value(self.words, seen) {
                return Ok(Some(Removed { map: self, key: handle.key }));
            }
        }
        Ok(None)
    }

    /// Replaces a value by the result of `change`. Returns whether the value existed. If another thread changes the
    /// value at the same time, `change` is called again. Readers see the old or the new value. `change` must not update
    /// the same value: then `change` would be called again forever.
    ///
    /// # Errors
    ///
    /// As [`HandleMap::insert`]; [`Error::Busy`] if the value is pinned.
    #[track_caller]
    pub fn update(&self, handle: Handle<T>, mut change: impl FnMut(&T) -> T) -> Result<bool> {
        let inner = &*self.inner;
        inner.engine.check_generation()?;
        loop {
            let guard = epochs::enter();
            let Some(seen) = handle.key.live_word(self.words) else { return Ok(false) };
            if seen.pins() > 0 {
                return Err(Error::Busy { what: "the value of this handle is pinned" });
            }
            // SAFETY: as in `get`.
            let new = change(unsafe { &(*inner.value_at(seen)).value });
            let object = inner.engine.allocate()?;
            inner.write_value(object, new, handle.key.index());
            // The guard still exists, so the object that was read cannot hold another value by now.
            let is_in = inner.handles.replace_word(handle.key.index(), seen, seen.with_offset(object - inner.base));
            drop(guard);
            // If the exchange failed, the new value was never visible. The new value is then retired in the same way.
            inner.free_and_retire(None, if is_in { inner.value_at(seen) as usize } else { object });
            if is_in {
                return Ok(true);
            }
        }
    }

    /// Pins a value, so that it keeps its address and contents. Returns `None` if the handle is not live.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the value has seven pins already.
    pub fn pin(&self, handle: Handle<T>) -> Result<Option<Pinned<'_, T>>> {
        let inner = &*self.inner;
        while let Some(seen) = handle.key.live_word(self.words) {
            if inner.handles.pin(handle.key.index(), seen) {
                // SAFETY: the word was live, and its new pin keeps all threads from changing it.
                let value = unsafe { &(*inner.value_at(seen)).value };
                return Ok(Some(Pinned { cache: inner, index: handle.key.index(), value }));
            }
            if seen.has_max_pins() {
                return Err(Error::Busy { what: "the value of this handle has the maximum number of pins" });
            }
        }
        Ok(None)
    }

    /// Returns the number of values: [`active`](crate::SlabInfo::active) objects less those that are
    /// [`waiting`](crate::SlabInfo::waiting). A removed value counts until its [`Removed`] is dropped. In a fork child
    /// the result is 0.
    ///
    /// The result is approximate if values are inserted, updated, removed or moved at the same time. Pagemill's
    /// background thread, too, moves values and drops removed ones.
    ///
    /// Cost: as [`SlabCache::info`], which adds up counts of all threads and NUMA nodes. So a program should not call
    /// `len` for each value.
    ///
    /// # Panics
    ///
    /// If called inside of [`Migrate::isolate`](crate::Migrate::isolate).
    pub fn len(&self) -> usize {
        let mut count = 0;
        for _ in 0..MAX_COUNTS {
            let Ok(info) = self.info() else { return 0 };
            count = info.active.saturating_sub(info.waiting) as usize;
            // If the number of waiting objects has changed, `active` may not match it: count again.
            if self.inner.waiting_objects() == info.waiting {
                break;
            }
        }
        count
    }

    /// Returns whether the map has no values. Approximate, and with the cost and panic of [`HandleMap::len`].
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the resident bytes of the handle table (8 bytes for each handle, except in freed pages) and of the free
    /// handles that threads keep.
    pub fn handle_bytes(&self) -> u64 {
        self.inner.handle_bytes()
    }
}

impl<T: Movable> Drop for HandleMap<T> {
    /// Drops all values of the map.
    fn drop(&mut self) {
        self.slabs.unregister(&self.inner);
        let inner = &*self.inner;
        // The drain keeps other threads from moving values. If the drain fails, as in a fork child, the values are
        // leaked.
        let drained = loop {
            match inner.engine.drain_magazines() {
                Ok(drained) => break drained,
                // Another thread runs a long step, on a cache that it found in the list of caches. The step will end.
                Err(Error::Busy { .. }) => {}
                Err(_) => return,
            }
        };
        // Readers borrow the cache, so existing guards belong to readers of other caches.
        inner.engine.finish_retired_at_once();
        let live: Vec<(u32, HandleWord)> = inner.handles.live_words().collect();
        let mut objects = Vec::with_capacity(live.len());
        for (index, word) in live {
            // Readers and pins borrow the cache, so only forgotten pins are left.
            let key = Key::new(index, word.generation());
            inner.handles.end_value_despite_pins(key);
            inner.handles.free(key.next_generation());
            objects.push(inner.value_at(word) as u64);
        }
        inner.collect_stocks(&drained);
        inner.is_closed.store(true, Relaxed);
        drop(drained);
        let retired = inner.retired.0.with(std::mem::take);
        inner.handles.shrink();
        inner.engine.shared.return_handle_table(inner.handles);
        inner
            .drop_values(retired.sealed.into_iter().map(|(left, _)| left).chain([objects, retired.unsealed]).collect());
    }
}

#[cfg(test)]
impl<T: Movable> HandleMap<T> {
    /// Removes a value and calls `read` with it. Returns the result of `read`; `None` if the handle is not live.
    pub(crate) fn remove_with<R>(&self, handle: Handle<T>, read: impl FnOnce(&T) -> R) -> Result<Option<R>> {
        Ok(self.remove(handle)?.map(|removed| read(&removed)))
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    #[cfg(not(shuttle))]
    pub(crate) fn in_retire_list(&self) -> usize {
        self.inner.retired.0.with(|retired| {
            retired.unsealed.len() + retired.sealed.iter().map(|(objects, _)| objects.len()).sum::<usize>()
        })
    }

    /// As `shrink_until_packed`; also waits until no object waits for readers.
    #[cfg(not(shuttle))]
    pub(crate) fn pack(&self) -> u64 {
        let counts = || self.info().map(|info| (info.moved, info.freed)).unwrap();
        let shrink = || self.shrink().unwrap();
        crate::caches::tests::basics::shrink_until_packed(self.engine(), shrink, counts, || self.in_retire_list() > 0)
    }
}
