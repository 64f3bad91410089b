//! A map whose values may be purged under memory pressure.
//!
//! Values are stored in volatile ranges. The least recently used values are purged first; a lookup treats a purged
//! value as absent. In [`VolatileCache::get_or_try_insert`], the first thread that misses a value computes it, while
//! other threads that look up the same key wait. So the function that computes a value must not look up the same key.
//!
//! Uses `range`, and the global allocator for keys and the table.

use super::range::{Behaviour, Range};
use super::{Contents, Ranges};
use pagemill_core::error::Result;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

/// Number of shards of the table, each with a lock.
const SHARDS: usize = 64;

/// The keys of purged values are removed after this many new keys, plus half the number of keys.
const SWEEP_AFTER_KEYS: usize = 16;

/// A type whose values a cache can store: it converts to bytes and back.
///
/// ```
/// use pagemill::{Pagemill, volatile::{VolatileCache, cache::Blob}};
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
/// let cache = VolatileCache::<u32, Point>::new(Pagemill::of_process()?.ranges);
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

/// The value of a key, as stored in the table.
#[derive(Default)]
enum Value {
    /// The value was not computed yet, or computing it failed.
    #[default]
    Absent,
    /// A value with a length of zero bytes, which needs no range.
    Empty,
    Stored(Range),
}

/// The cell of one key. Its lock is held for writing while the value is computed.
type ValueCell = Arc<RwLock<Value>>;

/// A shard of the table.
struct TableShard<K> {
    cells: HashMap<K, ValueCell>,
    /// Number of new keys until the next search for purged values.
    until_sweep: usize,
}

/// A map from keys to values that memory pressure may purge.
///
/// Cost of a hit: the lock of one of 64 shards, and a pin. [`VolatileCache::get`] also copies the value,
/// [`VolatileCache::read`] does not.
///
/// ```
/// use pagemill::{Error, Pagemill, volatile::VolatileCache};
///
/// let cache = VolatileCache::<String, Vec<u8>>::new(Pagemill::of_process()?.ranges);
/// let thumbnail = cache.get_or_try_insert("a.png".to_owned(), || Ok::<_, Error>(vec![7; 100_000]))?;
/// assert_eq!(thumbnail.len(), 100_000);
/// // Later: `None` if the value was purged.
/// assert!(cache.read("a.png", |bytes| bytes[0]).is_none_or(|first| first == 7));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct VolatileCache<K, V> {
    ranges: &'static Ranges,
    shards: Box<[Mutex<TableShard<K>>]>,
    hasher: RandomState,
    _values: PhantomData<fn() -> V>,
}

/// Locks a mutex, also after a panic of a thread that had it locked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The lock is held for table lookups only, so the table is consistent after a panic under it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Hash + Eq, V: Blob> VolatileCache<K, V> {
    pub fn new(ranges: &'static Ranges) -> Self {
        let shard = || Mutex::new(TableShard { cells: HashMap::new(), until_sweep: SWEEP_AFTER_KEYS });
        Self {
            ranges,
            shards: (0..SHARDS).map(|_| shard()).collect(),
            hasher: RandomState::new(),
            _values: PhantomData,
        }
    }

    fn shard<Q: Hash + ?Sized>(&self, key: &Q) -> MutexGuard<'_, TableShard<K>> {
        lock(&self.shards[self.hasher.hash_one(key) as usize % SHARDS])
    }

    fn cell<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<ValueCell>
    where
        K: Borrow<Q>,
    {
        self.shard(key).cells.get(key).cloned()
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
        read_value(&self.cell(key)?, read)
    }

    /// Inserts a value, or replaces the existing one. A concurrent `remove` may remove either value.
    ///
    /// # Errors
    ///
    /// As [`Ranges::allocate`]. After an error the key has no value.
    pub fn insert(&self, key: K, value: &V) -> Result<()> {
        let cell = self.cell_or_insert(key);
        let mut value_guard = cell.write().unwrap_or_else(PoisonError::into_inner);
        *value_guard = Value::Absent;
        *value_guard = self.store_value(value)?;
        Ok(())
    }

    /// Returns the value; computes it with `make` if it is absent. Only one of several concurrent callers computes it.
    /// If there is no memory to store the value, the value is returned without being stored.
    ///
    /// # Errors
    ///
    /// The error of `make`. Nothing is stored then, and the next caller computes the value.
    pub fn get_or_try_insert<E>(
        &self,
        key: K,
        make: impl FnOnce() -> std::result::Result<V, E>,
    ) -> std::result::Result<V, E> {
        let cell = self.cell_or_insert(key);
        if let Some(value) = read_value(&cell, V::load) {
            return Ok(value);
        }
        let mut value_guard = cell.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have computed the value while this thread waited for the lock.
        if let Some(value) = value_guard.read_value(V::load) {
            return Ok(value);
        }
        *value_guard = Value::Absent;
        let value = make()?;
        *value_guard = self.store_value(&value).unwrap_or(Value::Absent);
        Ok(value)
    }

    /// Removes a key and its value. Returns whether the value was present and not purged.
    pub fn remove<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        // The key is dropped after the shard is unlocked, because its destructor may use the cache.
        let removed = self.shard(key).cells.remove_entry(key);
        removed.is_some_and(|(_key, cell)| read_value(&cell, |_| ()).is_some())
    }

    /// Number of keys in the table, including keys whose values were purged. Locks each shard in turn.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).cells.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The cell of a key; inserts the key if it is missing.
    fn cell_or_insert(&self, key: K) -> ValueCell {
        // Declared first, so that these keys are dropped after the shard is unlocked, even if a key's `Eq` panics.
        let _purged;
        let mut shard = self.shard(&key);
        if let Some(cell) = shard.cells.get(&key) {
            return cell.clone();
        }
        _purged = shard.take_purged_if_due();
        shard.cells.entry(key).or_default().clone()
    }

    /// Stores a value in a new volatile range, which is marked.
    fn store_value(&self, value: &V) -> Result<Value> {
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

impl Value {
    fn read_value<T>(&self, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let range = match self {
            Self::Absent => return None,
            Self::Empty => return Some(read(&[])),
            Self::Stored(range) => range,
        };
        let pin = range.pin().ok()?;
        let whole = pin.whole()?;
        // Makes the range the most recently used one, so that others are purged first.
        let _ = range.refresh();
        Some(read(whole))
    }

    /// Whether the value is absent or was purged.
    fn is_purged(&self) -> bool {
        match self {
            Self::Absent => true,
            Self::Empty => false,
            Self::Stored(range) => range.pin().is_ok_and(|pin| pin.contents() != Contents::Kept),
        }
    }
}

fn read_value<T>(cell: &ValueCell, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
    cell.read().unwrap_or_else(PoisonError::into_inner).read_value(read)
}

impl<K: Hash + Eq> TableShard<K> {
    /// Removes the keys whose values were purged, if enough new keys were added since the last time. The caller must
    /// drop the result after it has unlocked the shard, because the keys' destructors may use the cache or panic.
    fn take_purged_if_due(&mut self) -> Vec<(K, ValueCell)> {
        self.until_sweep -= 1;
        let mut purged = Vec::new();
        if self.until_sweep == 0 {
            // With a reference count of 1 no other thread has the cell, and none can get it while the shard is locked.
            let is_purged = |cell: &ValueCell| match cell.try_read() {
                Ok(value) => value.is_purged(),
                Err(TryLockError::Poisoned(value)) => value.into_inner().is_purged(),
                Err(TryLockError::WouldBlock) => false,
            };
            let is_dead = |cell: &ValueCell| Arc::strong_count(cell) == 1 && is_purged(cell);
            purged.extend(self.cells.extract_if(|_, cell| is_dead(cell)));
            self.until_sweep = SWEEP_AFTER_KEYS + self.cells.len() / 2;
        }
        purged
    }
}
