//! Other caches, configured for the fastest hits: with many shards, and so large that nothing is evicted.

use std::sync::Arc;

use foyer_memory::{Cache, CacheBuilder, FifoConfig};
use quick_cache::sync::{Cache as QuickCache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, UnitWeighter};

use super::{PageStore, Record, first_word};
use crate::pattern::{RECORD_BYTES, Records};
use crate::workload::Failure;

/// Number of shards of each cache. The documentation of foyer and of quick_cache says that operations on different
/// shards run in parallel.
const SHARDS: usize = 64;
/// Capacity of a cache divided by the number of its entries. It is more than 1 because the shards do not fill evenly.
const CAPACITY_FACTOR: usize = 2;

/// Calls `insert` with the number and the record of each page.
fn fill(pages: usize, mut insert: impl FnMut(u64, &[u8])) {
    let mut records = Records::filled(RECORD_BYTES);
    for page in 0..pages as u64 {
        insert(page, records.stamped_at(0, page * RECORD_BYTES as u64));
    }
}

/// The cache foyer with FIFO eviction, its only eviction policy that does nothing at a hit. A hit takes a shared lock.
pub struct Foyer(Cache<u64, Box<[u8]>, DefaultHashBuilder>);

impl Foyer {
    pub fn new(pages: usize) -> Self {
        let builder = CacheBuilder::new(CAPACITY_FACTOR * pages)
            .with_shards(SHARDS)
            .with_eviction_config(FifoConfig::default())
            .with_hash_builder(DefaultHashBuilder::default());
        let cache: Cache<u64, Box<[u8]>, _> = builder.build();
        fill(pages, |key, record| drop(cache.insert(key, record.into())));
        Self(cache)
    }
}

impl PageStore for Foyer {
    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        let Some(entry) = self.0.get(&(page as u64)) else { return false };
        to.copy_from_slice(&entry);
        true
    }

    #[inline]
    fn pin(&self, page: usize) -> Option<u64> {
        Some(self.0.get(&(page as u64)).map_or(0, |entry| first_word(&entry)))
    }
}

/// The cache quick_cache with default settings. A hit takes a shared lock and increments the value's reference count.
pub struct Quick(QuickCache<u64, Arc<[u8]>>);

impl Quick {
    pub fn new(pages: usize) -> Result<Self, Failure> {
        let mut options = OptionsBuilder::new();
        options.shards(SHARDS).estimated_items_capacity(pages).weight_capacity((CAPACITY_FACTOR * pages) as u64);
        let options = options.build()?;
        let lifecycle = DefaultLifecycle::default();
        let cache = QuickCache::with_options(options, UnitWeighter, DefaultHashBuilder::default(), lifecycle);
        fill(pages, |key, record| cache.insert(key, record.into()));
        Ok(Self(cache))
    }
}

impl PageStore for Quick {
    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        let Some(value) = self.0.get(&(page as u64)) else { return false };
        to.copy_from_slice(&value);
        true
    }

    #[inline]
    fn pin(&self, page: usize) -> Option<u64> {
        Some(self.0.get(&(page as u64)).map_or(0, |value| first_word(&value)))
    }
}
