//! A map whose values may be purged under memory pressure.
//!
//! Values are stored in volatile ranges. The least recently used values are purged first; a lookup treats a purged
//! value as absent. In [`VolatileCache::get_or_try_insert`], the first thread that misses a value computes it, while
//! other threads that look up the same key wait. So the function that computes a value must not look up the same key.
//!
//! Uses `range`, and the global allocator for keys and the table of the map.

use super::Ranges;
use super::range::{Behaviour, VolatileBuf};
use pagemill_core::error::Error;
use pagemill_core::sync::Padded;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, Hash, RandomState};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Number of shards of a cache's table, each with a lock.
const SHARDS: usize = 64;

/// A shard removes the keys of purged values when it has got this many new keys, plus half the number of keys that the
/// previous removal left.
const SWEEP_AFTER_KEYS: usize = 16;

#[diagnostic::on_unimplemented(
    message = "values of type `{Self}` cannot be stored in a `VolatileCache`",
    label = "not a `Blob`",
    note = "`String`, `Bytes`, `[u8; N]` and, with `T: bytemuck::Pod`, `Vec<T>` are; implement `Blob` for other types"
)]
/// A type whose values a cache can store: it converts to bytes and back. Implemented for `String`, for byte arrays
/// `[u8; N]`, for `Vec<T>` if `T` is plain data (`bytemuck::Pod`), and for `bytes::Bytes`.
///
/// ```
/// use pagemill::volatile::{Blob, VolatileCache};
///
/// #[derive(Debug, PartialEq)]
/// struct Point(u64);
///
/// impl Blob for Point {
///     fn len_bytes(&self) -> usize {
///         8
///     }
///     fn store(&self, bytes: &mut [u8]) {
///         bytes.copy_from_slice(&self.0.to_ne_bytes());
///     }
///     fn load(bytes: &[u8]) -> Self {
///         Self(u64::from_ne_bytes(bytes.try_into().unwrap()))
///     }
/// }
///
/// let cache = VolatileCache::<u32, Point>::new()?;
/// cache.insert(1, &Point(7))?;
/// assert!(cache.get(&1).is_none_or(|point| point == Point(7)));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Blob: Sized {
    /// Number of bytes that [`Blob::store`] writes.
    fn len_bytes(&self) -> usize;

    /// Fills `bytes`, whose length is [`Blob::len_bytes`].
    fn store(&self, bytes: &mut [u8]);

    /// Rebuilds the value from the bytes that [`Blob::store`] wrote.
    fn load(bytes: &[u8]) -> Self;
}

#[cfg(not(feature = "bytemuck"))]
impl Blob for Vec<u8> {
    fn len_bytes(&self) -> usize {
        self.len()
    }

    fn store(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(self);
    }

    fn load(bytes: &[u8]) -> Self {
        bytes.to_vec()
    }
}

/// Vectors of plain data, such as `Vec<u8>` and `Vec<f32>`. A program makes its own type plain data by
/// `#[derive(bytemuck::Pod, bytemuck::Zeroable)]`; it then depends on the crate `bytemuck` 1 with its feature `derive`.
#[cfg(feature = "bytemuck")]
impl<T: bytemuck::Pod> Blob for Vec<T> {
    fn len_bytes(&self) -> usize {
        size_of_val(self.as_slice())
    }

    fn store(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(bytemuck::cast_slice(self));
    }

    fn load(bytes: &[u8]) -> Self {
        bytemuck::pod_collect_to_vec(bytes)
    }
}

#[cfg(feature = "bytes")]
impl Blob for bytes::Bytes {
    fn len_bytes(&self) -> usize {
        self.len()
    }

    fn store(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(self);
    }

    fn load(bytes: &[u8]) -> Self {
        Self::copy_from_slice(bytes)
    }
}

impl Blob for String {
    fn len_bytes(&self) -> usize {
        self.len()
    }

    fn store(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(self.as_bytes());
    }

    fn load(bytes: &[u8]) -> Self {
        String::from_utf8_lossy(bytes).into_owned()
    }
}

impl<const LEN: usize> Blob for [u8; LEN] {
    fn len_bytes(&self) -> usize {
        LEN
    }

    fn store(&self, bytes: &mut [u8]) {
        bytes.copy_from_slice(self);
    }

    fn load(bytes: &[u8]) -> Self {
        let mut blob = [0; LEN];
        blob.copy_from_slice(bytes);
        blob
    }
}

/// The value of a key, as stored in a cache's table.
#[derive(Default)]
enum Value {
    /// The value was not computed yet, or computing it failed.
    #[default]
    Absent,
    /// A value with a length of zero bytes, which needs no range.
    Empty,
    Stored(VolatileBuf),
}

/// The cell of one key. Its lock is held for writing while the value is computed.
type ValueCell = Arc<RwLock<Value>>;

/// A shard of a cache's table: some of its keys.
struct TableShard<K> {
    cells: HashMap<K, ValueCell>,
    /// Number of new keys until the next search for purged values.
    until_sweep: usize,
}

/// A map from keys to values that memory pressure may purge.
///
/// Values are [`Blob`]s: strings, byte arrays, vectors of plain data (`bytemuck::Pod`), `bytes::Bytes`, or types of the
/// program that implement the trait. [`VolatileCache::insert`] borrows the value, because it copies the bytes.
///
/// Cost of a hit: the lock of one of 64 shards, and a pin. [`VolatileCache::get`] also copies the value,
/// [`VolatileCache::read`] does not.
///
/// ```
/// use pagemill::Error;
/// use pagemill::VolatileCache;
///
/// let cache = VolatileCache::<String, Vec<f32>>::new()?;
/// let row = vec![0.5; 1000];
/// cache.insert("first".to_owned(), &row)?;
/// assert!(cache.get("first").is_none_or(|found| found == row)); // `None` if the value was purged
/// let second = cache.get_or_try_insert("second".to_owned(), || Ok::<_, Error>(vec![1.5; 1000]))?;
/// assert_eq!(second.len(), 1000);
/// assert!(cache.read("second", |bytes| bytes.len()).is_none_or(|len| len == 4000)); // without a copy
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// A test can purge all values with `Pagemill::return_all` of the crate `pagemill`, to check that the program
/// computes them again. Values that are being read stay, and of more than 30,000 values those used last.
///
/// ```
/// use pagemill::{Pagemill, VolatileCache};
///
/// let cache = VolatileCache::<u32, String>::new()?;
/// cache.insert(1, &"one".to_owned())?;
/// Pagemill::of_process()?.return_all();
/// assert_eq!(cache.get(&1), None);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct VolatileCache<K, V: Blob> {
    ranges: &'static Ranges,
    shards: Box<[Mutex<TableShard<K>>]>,
    counts: Box<[Padded<ShardCounts>]>,
    hasher: RandomState,
    _values: PhantomData<fn() -> V>,
}

/// Number of lookups in a [`VolatileCache`] since its creation, by result. Lookups are the calls of
/// [`get`](VolatileCache::get), [`read`](VolatileCache::read) and
/// [`get_or_try_insert`](VolatileCache::get_or_try_insert). Other calls, such as `insert`, `remove` and `iter`, count
/// as none.
///
/// Example: [`VolatileCache::counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Lookups that found the value.
    pub hits: u64,
    /// Lookups that found no value, including those of purged values.
    pub misses: u64,
    /// Misses because the value was purged.
    pub purged: u64,
}

/// Number of lookups in one shard of a cache, by result.
#[derive(Default)]
struct ShardCounts {
    hits: AtomicU64,
    misses: AtomicU64,
    purged: AtomicU64,
}

impl<K, V: Blob> VolatileCache<K, V> {
    /// Returns the number of lookups since the cache was created, by result ([`CacheCounts`] says which calls count).
    ///
    /// ```
    /// let cache = pagemill::VolatileCache::<u32, Vec<u8>>::new()?;
    /// cache.insert(1, &vec![7; 100])?;
    /// let is_found = cache.get(&1).is_some();
    /// assert!(cache.get(&2).is_none());
    /// let counts = cache.counts();
    /// assert_eq!((counts.hits + counts.misses, counts.hits == 1), (2, is_found));
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn counts(&self) -> CacheCounts {
        let mut sum = CacheCounts::default();
        for Padded(shard) in &self.counts {
            sum.hits += shard.hits.load(Relaxed);
            sum.misses += shard.misses.load(Relaxed);
            sum.purged += shard.purged.load(Relaxed);
        }
        sum
    }
}

impl<K, V: Blob> fmt::Debug for VolatileCache<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolatileCache").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

/// Locks a mutex, even if a thread has panicked while it held the lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The lock is held for table lookups only, so the table is consistent after a panic under it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Hash + Eq, V: Blob> VolatileCache<K, V> {
    /// Creates an empty cache, whose values lie in volatile memory of the process.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the first use of the library fails.
    pub fn new() -> Result<Self, Error> {
        Ok(Self::new_in(crate::Base::of_process()?.ranges))
    }

    /// Creates an empty cache, whose values lie in `ranges`.
    #[doc(hidden)] // programs have one set of ranges, tests have several
    pub fn new_in(ranges: &'static Ranges) -> Self {
        let shard = || Mutex::new(TableShard { cells: HashMap::new(), until_sweep: SWEEP_AFTER_KEYS });
        Self {
            ranges,
            shards: (0..SHARDS).map(|_| shard()).collect(),
            counts: (0..SHARDS).map(|_| Padded::default()).collect(),
            hasher: RandomState::new(),
            _values: PhantomData,
        }
    }

    /// Returns the index of the shard of `key`.
    fn shard_of<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        self.hasher.hash_one(key) as usize % SHARDS
    }

    /// Returns a copy of the value if it is present, and makes the value the most recently used one.
    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.read(key, V::load)
    }

    /// Calls `read` with the value's bytes if they are present, and makes the value the most recently used one. The
    /// bytes are pinned during the call. `read` must not change the value of the same key.
    pub fn read<Q: Hash + Eq + ?Sized, T>(&self, key: &Q, read: impl FnOnce(&[u8]) -> T) -> Option<T>
    where
        K: Borrow<Q>,
    {
        let shard = self.shard_of(key);
        let cell = lock(&self.shards[shard]).cells.get(key).cloned();
        self.count(shard, cell.ok_or(Miss::Absent).and_then(|cell| read_value(&cell, read)))
    }

    /// Counts a lookup in a shard, and returns the value that the lookup found.
    fn count<T>(&self, shard: usize, lookup: Result<T, Miss>) -> Option<T> {
        let counts = &self.counts[shard].0;
        if let Err(Miss::Purged) = lookup {
            counts.purged.fetch_add(1, Relaxed);
        }
        let results = if lookup.is_ok() { &counts.hits } else { &counts.misses };
        results.fetch_add(1, Relaxed);
        lookup.ok()
    }

    /// Returns copies of all keys and values that are present. A key that is inserted or removed meanwhile may be
    /// missed. Does not count as use of the values.
    ///
    /// Cost: a copy of the keys of one shard at a time, under its lock.
    pub fn iter(&self) -> impl Iterator<Item = (K, V)>
    where
        K: Clone,
    {
        let entries = |shard: &Mutex<TableShard<K>>| -> Vec<(K, ValueCell)> {
            lock(shard).cells.iter().map(|(key, cell)| (key.clone(), cell.clone())).collect()
        };
        self.shards.iter().flat_map(entries).filter_map(|(key, cell)| {
            let value = cell.read().unwrap_or_else(PoisonError::into_inner).load(V::load);
            value.ok().map(|value| (key, value))
        })
    }

    /// Removes all keys and values.
    pub fn clear(&self) {
        for shard in &self.shards {
            // The keys are dropped after the shard is unlocked, because their destructors may use the cache.
            let removed = std::mem::take(&mut lock(shard).cells);
            drop(removed);
        }
    }

    /// Inserts a value, or replaces the existing one. A concurrent `remove` may remove either value.
    ///
    /// # Errors
    ///
    /// As [`VolatileBuf::new`], but a value may have a length of zero. After an error the key has no value.
    pub fn insert(&self, key: K, value: &V) -> Result<(), Error> {
        let cell = self.cell_or_insert(self.shard_of(&key), key);
        let mut value_guard = cell.write().unwrap_or_else(PoisonError::into_inner);
        *value_guard = Value::Absent;
        *value_guard = self.store_value(value)?;
        Ok(())
    }

    /// Returns the value of the key, and computes the value with `make` if it is absent. Only one of several concurrent
    /// callers computes the value. If there is no memory to store the value, the value is returned without being
    /// stored.
    ///
    /// # Errors
    ///
    /// The error of `make`. Nothing is stored then, and the next caller computes the value.
    pub fn get_or_try_insert<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        let shard = self.shard_of(&key);
        let cell = self.cell_or_insert(shard, key);
        if let Some(value) = self.count(shard, read_value(&cell, V::load)) {
            return Ok(value);
        }
        let mut value_guard = cell.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have computed the value while this thread waited for the lock.
        if let Ok(value) = value_guard.read_value(V::load) {
            return Ok(value);
        }
        *value_guard = Value::Absent;
        let value = make()?;
        *value_guard = self.store_value(&value).unwrap_or(Value::Absent);
        Ok(value)
    }

    /// Removes a key, and returns its value if it was present and not purged.
    pub fn remove<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        // The key is dropped after the shard is unlocked, because its destructor may use the cache.
        let removed = lock(&self.shards[self.shard_of(key)]).cells.remove_entry(key);
        removed.and_then(|(_key, cell)| read_value(&cell, V::load).ok())
    }

    /// Returns the number of keys in the table, including keys whose values were purged or could not be computed. Later
    /// insertions remove such keys. Locks each shard in turn.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).cells.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the cell of a key of this shard, and inserts the key if it is missing.
    fn cell_or_insert(&self, shard: usize, key: K) -> ValueCell {
        // Declared first, so that the removed keys are dropped after the shard is unlocked, even if a key's `Eq`
        // panics.
        let _purged;
        let mut shard = lock(&self.shards[shard]);
        if let Some(cell) = shard.cells.get(&key) {
            return cell.clone();
        }
        _purged = shard.take_purged_if_due();
        shard.cells.entry(key).or_default().clone()
    }

    /// Stores a value in a new volatile range, which is marked.
    fn store_value(&self, value: &V) -> Result<Value, Error> {
        let len_bytes = value.len_bytes();
        if len_bytes == 0 {
            return Ok(Value::Empty);
        }
        let mut range = self.ranges.allocate(len_bytes, Behaviour::Full)?;
        value.store(range.bytes_mut()?);
        range.mark()?;
        Ok(Value::Stored(range))
    }
}

/// Why a lookup found no value.
enum Miss {
    Absent,
    Purged,
}

impl Value {
    /// Calls `read` with the bytes of the value, and makes the value the most recently used one, so that other values
    /// are purged first.
    fn read_value<T>(&self, read: impl FnOnce(&[u8]) -> T) -> Result<T, Miss> {
        self.load(|whole| {
            if let Self::Stored(range) = self {
                let _ = range.refresh();
            }
            read(whole)
        })
    }

    /// Calls `read` with the bytes of the value, which are pinned during the call.
    fn load<T>(&self, read: impl FnOnce(&[u8]) -> T) -> Result<T, Miss> {
        match self {
            Self::Absent => Err(Miss::Absent),
            Self::Empty => Ok(read(&[])),
            Self::Stored(range) => {
                let pin = range.pin().map_err(|_| Miss::Absent)?;
                pin.whole().map(read).ok_or(Miss::Purged)
            }
        }
    }
}

fn read_value<T>(cell: &ValueCell, read: impl FnOnce(&[u8]) -> T) -> Result<T, Miss> {
    cell.read().unwrap_or_else(PoisonError::into_inner).read_value(read)
}

impl<K: Hash + Eq> TableShard<K> {
    /// Removes the keys whose values were purged, if enough new keys were added since the last removal. Returns the
    /// removed keys. The caller must drop the result after it has unlocked the shard, because the keys' destructors may
    /// use the cache or panic.
    fn take_purged_if_due(&mut self) -> Vec<(K, ValueCell)> {
        self.until_sweep -= 1;
        let mut purged = Vec::new();
        if self.until_sweep == 0 {
            let is_purged = |value: &mut Value| value.load(|_| ()).is_err();
            purged.extend(self.cells.extract_if(|_, cell| {
                // A cell that another thread has is kept. No thread can get the cell while the shard is locked.
                let value = Arc::get_mut(cell).map(|cell| cell.get_mut().unwrap_or_else(PoisonError::into_inner));
                value.is_some_and(is_purged)
            }));
            self.until_sweep = SWEEP_AFTER_KEYS + self.cells.len() / 2;
        }
        purged
    }
}
