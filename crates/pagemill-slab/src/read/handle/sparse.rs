//! What a program needs to give back the memory of a map by itself: lower handles for its values, and the values that
//! lie in sparse slabs.

use super::HandleMap;
use crate::alloc::engine::check_ratio;
use crate::insert_error::InsertError;
use crate::read::handles::{Handle, Key};
use crate::read::movable::Movable;
use pagemill_core::error::Result;
use std::collections::{HashMap, HashSet};

impl<T: Movable> HandleMap<T> {
    /// As [`HandleMap::insert`], with a handle of the lowest page of the handle table that has a free one, instead of a
    /// handle that this thread keeps. For programs that give old values new handles, so that
    /// [`SlabCache::shrink`](crate::SlabCache::shrink) can free pages of the table.
    ///
    /// Cost: a lock of the handle table.
    ///
    /// # Errors
    ///
    /// As [`HandleMap::insert`].
    #[track_caller]
    pub fn insert_low(&self, value: T) -> std::result::Result<Handle<T>, InsertError<T>> {
        let inner = &*self.inner;
        let mut keys = [Key::from_bits(0)];
        let mut allocate = || {
            inner.engine.check_generation()?;
            inner.handles.allocate(&mut keys)?;
            inner.engine.allocate().inspect_err(|_| inner.handles.free(keys))
        };
        let object = match allocate() {
            Ok(object) => object,
            Err(error) => return Err(InsertError { value, error }),
        };
        inner.write_value(object, value, keys[0].index());
        keys[0].publish(self.words, object - inner.base);
        Ok(Handle::new(keys[0]))
    }

    /// Returns the handles of the values that lie in slabs of which less than `used_percent` of the objects are values.
    /// A program may free such values to empty the slabs, and then call [`HandleMap::trim`].
    ///
    /// Cost: a scan of the handle table, and memory for a number for each slab.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadRatio`] above 100 percent; [`pagemill_core::Error::WrongState`] in a fork child.
    pub fn sparse_handles(&self, used_percent: u32) -> Result<HashSet<Handle<T>>> {
        check_ratio(used_percent)?;
        let inner = &*self.inner;
        inner.engine.check_generation()?;
        let slab_of = |offset: usize| offset / inner.engine.shape.slab_bytes;
        let mut counts: HashMap<usize, u32> = HashMap::new();
        for (_, word) in inner.handles.live_words() {
            *counts.entry(slab_of(word.object_offset())).or_default() += 1;
        }
        let bound = inner.engine.shape.capacity * used_percent;
        let is_sparse = |slab| counts.get(&slab).is_none_or(|count| count * 100 < bound);
        let live = inner.handles.live_words().filter(|(_, word)| is_sparse(slab_of(word.object_offset())));
        Ok(live.map(|(index, word)| Handle::new(Key::new(index, word.generation()))).collect())
    }

    /// Frees slabs and blocks without values, without moving a value. Otherwise as
    /// [`SlabCache::shrink`](crate::SlabCache::shrink).
    ///
    /// # Errors
    ///
    /// As [`SlabCache::shrink`](crate::SlabCache::shrink).
    pub fn trim(&self) -> Result<u64> {
        let inner = &*self.inner;
        inner.engine.check_generation()?;
        inner.drop_all_retired();
        Ok(inner.engine.shrink()? + inner.handles.shrink())
    }

    /// Returns the number of handle indices that are not used again, because they have had their last generation: 2^19
    /// values. They count for the maximum of 2^26 handles, and their 8 bytes stay in use.
    pub fn worn_out_handles(&self) -> u64 {
        self.inner.handles.worn_out()
    }
}
