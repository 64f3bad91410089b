//! A map whose values may be purged.
//!
//! Values lie in volatile ranges. Under memory pressure the least recently used are purged; the map notices that at the
//! next lookup. The first thread that misses a value makes it; other threads that look it up meanwhile wait for it. So
//! the function that makes a value must not look up the same key.
//!
//! Above `range`; uses the global allocator for keys and the table.

use super::range::{Behaviour, Range};
use super::{Contents, Ranges};
use pagemill_core::error::Result;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

/// Number of shards of the table, each with a lock.
const PARTS: usize = 64;

/// Purged keys are dropped after this many new keys, plus half as many as there are keys.
const SWEEP_AFTER: usize = 16;

/// A value that a cache can hold: converts to bytes and back.
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

/// The state of a value.
#[derive(Default)]
enum Value {
    /// Not made yet, or making it failed.
    #[default]
    Absent,
    /// A value of no bytes: nothing to purge.
    Empty,
    Stored(Range),
}

/// The cell of one value. Its lock is held for writing while the value is made.
type ValueCell = Arc<RwLock<Value>>;

/// A shard of the table.
struct TableShard<K> {
    cells: HashMap<K, ValueCell>,
    /// New keys until the next search for purged values.
    until_sweep: usize,
}

/// A map from keys to values that memory pressure may purge.
///
/// Cost of a hit: the lock of one of 64 shards, a pin, and a copy of the value ([`VolatileCache::get`]) or none
/// ([`VolatileCache::read`]).
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
    parts: Box<[Mutex<TableShard<K>>]>,
    hasher: RandomState,
    _values: PhantomData<fn() -> V>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked held it for a table lookup only, so the table is consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Hash + Eq, V: Blob> VolatileCache<K, V> {
    pub fn new(ranges: &'static Ranges) -> Self {
        let part = || Mutex::new(TableShard { cells: HashMap::new(), until_sweep: SWEEP_AFTER });
        Self { ranges, parts: (0..PARTS).map(|_| part()).collect(), hasher: RandomState::new(), _values: PhantomData }
    }

    fn part<Q: Hash + ?Sized>(&self, key: &Q) -> MutexGuard<'_, TableShard<K>> {
        lock(&self.parts[self.hasher.hash_one(key) as usize % PARTS])
    }

    fn cell<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<ValueCell>
    where
        K: Borrow<Q>,
    {
        self.part(key).cells.get(key).cloned()
    }

    /// Returns a copy of the value if it is present, and counts it as used now.
    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.read(key, V::load)
    }

    /// Calls `read` with the value's bytes if they are present, and counts the value as used now. The bytes are pinned
    /// during the call. `read` must not change the value of the same key.
    pub fn read<Q: Hash + Eq + ?Sized, T>(&self, key: &Q, read: impl FnOnce(&[u8]) -> T) -> Option<T>
    where
        K: Borrow<Q>,
    {
        look(&self.cell(key)?, read)
    }

    /// Inserts a value, replacing an existing one. A concurrent `remove` may remove it, too.
    ///
    /// # Errors
    ///
    /// As [`Ranges::allocate`]; the key then has no value.
    pub fn insert(&self, key: K, value: &V) -> Result<()> {
        let cell = self.cell_of(key);
        let mut place = cell.write().unwrap_or_else(PoisonError::into_inner);
        *place = Value::Absent;
        *place = self.stored(value)?;
        Ok(())
    }

    /// Returns the value, making it with `make` if it is absent. Of several concurrent callers one makes it.
    ///
    /// # Errors
    ///
    /// The error of `make`. Nothing is stored then, and the next caller tries again. A value for which there is no
    /// memory is returned but not stored.
    pub fn get_or_try_insert<E>(
        &self,
        key: K,
        make: impl FnOnce() -> std::result::Result<V, E>,
    ) -> std::result::Result<V, E> {
        let cell = self.cell_of(key);
        if let Some(value) = look(&cell, V::load) {
            return Ok(value);
        }
        let mut place = cell.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have made it while this one waited.
        if let Some(value) = place.look(V::load) {
            return Ok(value);
        }
        *place = Value::Absent;
        let value = make()?;
        *place = self.stored(&value).unwrap_or(Value::Absent);
        Ok(value)
    }

    /// Removes a value. Returns whether there was one.
    pub fn remove<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        // The key goes when the part is unlocked: its destructor may use the cache.
        let removed = self.part(key).cells.remove_entry(key);
        removed.is_some_and(|(_key, cell)| look(&cell, |_| ()).is_some())
    }

    /// Number of known keys; some of their values may have been purged. Walks the shards.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| lock(part).cells.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn cell_of(&self, key: K) -> ValueCell {
        // Declared before the part is locked, so that it goes after that is unlocked, also where a key's `Eq` panics.
        let _purged;
        let mut part = self.part(&key);
        if let Some(cell) = part.cells.get(&key) {
            return cell.clone();
        }
        _purged = part.take_purged_if_due();
        part.cells.entry(key).or_default().clone()
    }

    fn stored(&self, value: &V) -> Result<Value> {
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
    fn look<T>(&self, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let range = match self {
            Self::Absent => return None,
            Self::Empty => return Some(read(&[])),
            Self::Stored(range) => range,
        };
        let pin = range.pin().ok()?;
        let whole = pin.whole()?;
        // Counts as used now, so that others are purged first.
        let _ = range.refresh();
        Some(read(whole))
    }

    fn is_purged(&self) -> bool {
        match self {
            Self::Absent => true,
            Self::Empty => false,
            Self::Stored(range) => range.pin().is_ok_and(|pin| pin.contents() != Contents::Kept),
        }
    }
}

fn look<T>(cell: &ValueCell, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
    cell.read().unwrap_or_else(PoisonError::into_inner).look(read)
}

impl<K: Hash + Eq> TableShard<K> {
    /// Takes out keys whose values were purged, now and then. They are dropped where the part is not locked: their destructors
    /// may use the cache, or panic.
    fn take_purged_if_due(&mut self) -> Vec<(K, ValueCell)> {
        self.until_sweep -= 1;
        let mut purged = Vec::new();
        if self.until_sweep == 0 {
            // No other thread has such a cell, and none can get it while the shard is locked.
            let is_purged = |cell: &ValueCell| match cell.try_read() {
                Ok(value) => value.is_purged(),
                Err(TryLockError::Poisoned(value)) => value.into_inner().is_purged(),
                Err(TryLockError::WouldBlock) => false,
            };
            let is_dead = |cell: &ValueCell| Arc::strong_count(cell) == 1 && is_purged(cell);
            purged.extend(self.cells.extract_if(|_, cell| is_dead(cell)));
            self.until_sweep = SWEEP_AFTER + self.cells.len() / 2;
        }
        purged
    }
}
