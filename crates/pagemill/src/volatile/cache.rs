//! A map whose values may be forgotten.
//!
//! Values lie in volatile ranges: when memory is short the least recently used are purged, and the map finds that out when
//! it is asked for them. Whoever asks first makes the value anew; others who ask meanwhile wait for that one (so what makes a value must not ask for the same).
//!
//! Above `range`; uses the global allocator for keys and the table.

use super::range::{Behaviour, Range};
use super::{Contents, Ranges};
use crate::error::Result;
use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

/// Parts of the table with a lock each.
const PARTS: usize = 64;

/// After so many new keys, and half as many as there are, the purged ones are dropped.
const SWEEP_AFTER: usize = 16;

/// What a cache can hold: something that is a run of bytes, and can be made of it again.
pub trait Blob: Sized {
    /// Bytes that [`Blob::store`] fills.
    fn len_bytes(&self) -> usize;

    /// Writes all of `bytes`, which is as long as [`Blob::len_bytes`] says.
    fn store(&self, bytes: &mut [u8]);

    /// Reads what [`Blob::store`] wrote.
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

/// What is known of a value.
#[derive(Default)]
enum Value {
    /// Not made yet, or its making failed.
    #[default]
    Absent,
    /// Of no bytes: nothing to purge.
    Empty,
    Stored(Range),
}

/// A value's place. Its lock is held for writing while the value is made.
type Cell = Arc<RwLock<Value>>;

/// A part of the table.
struct Part<K> {
    cells: HashMap<K, Cell>,
    /// New keys until purged ones are looked for.
    until_sweep: usize,
}

/// A map from keys to values that memory pressure may take away.
///
/// Cost of a hit: a lock of one of 64 parts, a pin, and a copy of the value ([`VolatileCache::get`]) or none
/// ([`VolatileCache::read`]).
pub struct VolatileCache<K, V> {
    ranges: &'static Ranges,
    parts: Box<[Mutex<Part<K>>]>,
    hasher: RandomState,
    _values: PhantomData<fn() -> V>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panicked held it for a look at the table, which is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Hash + Eq, V: Blob> VolatileCache<K, V> {
    pub fn new(ranges: &'static Ranges) -> Self {
        let part = || Mutex::new(Part { cells: HashMap::new(), until_sweep: SWEEP_AFTER });
        Self { ranges, parts: (0..PARTS).map(|_| part()).collect(), hasher: RandomState::new(), _values: PhantomData }
    }

    fn part<Q: Hash + ?Sized>(&self, key: &Q) -> MutexGuard<'_, Part<K>> {
        lock(&self.parts[self.hasher.hash_one(key) as usize % PARTS])
    }

    fn cell<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<Cell>
    where
        K: Borrow<Q>,
    {
        self.part(key).cells.get(key).cloned()
    }

    /// The value, if it is there. It counts as used now.
    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.read(key, V::load)
    }

    /// Lets `read` look at the value's bytes, if they are there; none goes meanwhile. It counts as used now. `read` must not
    /// change the value of the same key.
    pub fn read<Q: Hash + Eq + ?Sized, T>(&self, key: &Q, read: impl FnOnce(&[u8]) -> T) -> Option<T>
    where
        K: Borrow<Q>,
    {
        look(&self.cell(key)?, read)
    }

    /// Puts a value in, in place of the one there may be. A `remove` at the same time may take it along.
    ///
    /// # Errors
    ///
    /// As [`Ranges::allocate`]; the key has no value then.
    pub fn insert(&self, key: K, value: &V) -> Result<()> {
        let cell = self.cell_of(key);
        let mut place = cell.write().unwrap_or_else(PoisonError::into_inner);
        *place = Value::Absent;
        *place = self.stored(value)?;
        Ok(())
    }

    /// The value, made by `make` if it is not there. Of several that ask for it at the same time one makes it.
    ///
    /// # Errors
    ///
    /// What `make` says; nothing is kept then, and the next who asks makes it. A value for which there is no memory is
    /// returned and not kept.
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
        // Another may have made it while this one waited.
        if let Some(value) = place.look(V::load) {
            return Ok(value);
        }
        *place = Value::Absent;
        let value = make()?;
        *place = self.stored(&value).unwrap_or(Value::Absent);
        Ok(value)
    }

    /// Forgets a value. Says whether there was one.
    pub fn remove<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        let cell = self.part(key).cells.remove(key);
        cell.is_some_and(|cell| look(&cell, |_| ()).is_some())
    }

    /// Keys that are known; the values of some may have been purged. Walks the parts.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| lock(part).cells.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn cell_of(&self, key: K) -> Cell {
        let mut part = self.part(&key);
        if let Some(cell) = part.cells.get(&key) {
            return cell.clone();
        }
        part.sweep_if_due();
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
        // Used now, so others go before it.
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

fn look<T>(cell: &Cell, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
    cell.read().unwrap_or_else(PoisonError::into_inner).look(read)
}

impl<K: Hash + Eq> Part<K> {
    /// Drops keys whose values were purged, now and then.
    fn sweep_if_due(&mut self) {
        self.until_sweep -= 1;
        if self.until_sweep == 0 {
            // Nobody else has such a cell, and nobody can get it while the part is locked.
            let is_purged = |cell: &Cell| match cell.try_read() {
                Ok(value) => value.is_purged(),
                Err(TryLockError::Poisoned(value)) => value.into_inner().is_purged(),
                Err(TryLockError::WouldBlock) => false,
            };
            let is_dead = |cell: &Cell| Arc::strong_count(cell) == 1 && is_purged(cell);
            self.cells.retain(|_, cell| !is_dead(cell));
            self.until_sweep = SWEEP_AFTER + self.cells.len() / 2;
        }
    }
}
