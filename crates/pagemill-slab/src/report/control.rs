//! Statistics and commands of slab caches, for other processes of the same user. A unique id identifies each cache.

use crate::NodeInfo;
use crate::SlabInfo;
use crate::cache::Cache;
use crate::cache::SlabKind;
use crate::caches::Slabs;
use crate::report::info;
use pagemill_core::error::{Error, Result};
use pagemill_core::listing::ShrinkReport;
use pagemill_core::sync::Backoff;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Slabs {
    /// Returns the cache with the lowest id that is at least `from`, and its id.
    fn first_cache_from(&self, from: u64) -> Option<(u64, Arc<dyn Cache>)> {
        self.caches.with(|caches| {
            let rest = &caches[caches.partition_point(|(id, _)| *id < from)..];
            rest.iter().find_map(|(id, cache)| Some((*id, cache.upgrade()?)))
        })
    }

    /// Returns the cache with this id, if it exists.
    fn cache_by_id(&self, id: u64) -> Option<Arc<dyn Cache>> {
        self.first_cache_from(id).filter(|(found, _)| *found == id).map(|(_, cache)| cache)
    }

    /// Calls `show` once for each NUMA node of every cache, in order of cache ids, with the statistics of the cache on
    /// that node. Allocates no memory. Waits at most `timeout_ns` for locks in all. If the lock of a node was not
    /// available, the statistics are marked as partial.
    ///
    /// # Errors
    ///
    /// Errors of `show`. After an error no further cache is shown.
    pub(crate) fn show(
        &self,
        timeout_ns: u64,
        mut show: impl FnMut(u64, &SlabInfo, usize, &NodeInfo) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut backoff, mut from) = (Backoff::new(), 0);
        while let Some((id, cache)) = self.first_cache_from(from) {
            info::show(&*cache, (&mut backoff, timeout_ns), |info, node, node_info| show(id, info, node, node_info))?;
            from = id + 1;
        }
        Ok(())
    }

    /// Shrinks one cache as the program itself would, which includes callbacks of owners. Returns `None` if the cache
    /// was dropped before or during the shrink.
    ///
    /// # Errors
    ///
    /// As the cache's own `shrink`.
    pub(crate) fn shrink_one(&self, id: u64) -> Option<Result<ShrinkReport>> {
        let cache = self.cache_by_id(id)?;
        let shrink = || {
            let before = info::of(&*cache)?;
            // Callbacks must run on a thread that shares the program's open files: the background thread.
            let freed_bytes = match cache.kind() {
                SlabKind::Fixed => cache.shrink()?,
                SlabKind::ByOwner | SlabKind::ByHandle => self.worker.request_shrink(cache.engine())?,
            };
            let after = info::of(&*cache)?;
            Ok(ShrinkReport {
                freed_bytes,
                moved: after.moved.saturating_sub(before.moved),
                slabs_before: before.total.slabs,
                slabs_after: after.total.slabs,
                resident_before: before.total.resident_bytes,
                resident_after: after.total.resident_bytes,
            })
        };
        let done = shrink();
        let has_gone = done.is_err() && cache.engine().is_unregistered.load(SeqCst);
        (!has_gone).then_some(done)
    }

    /// Sets [`crate::Settings::defrag_used_ratio`] of a cache. Returns `None` if the cache was dropped.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`]; [`Error::Unsupported`] if objects of the cache cannot be moved.
    pub(crate) fn set_used_ratio(&self, id: u64, percent: u32) -> Option<Result<()>> {
        let cache = self.cache_by_id(id)?;
        Some(match cache.kind() {
            SlabKind::Fixed => Err(Error::Unsupported { what: "objects of this slab cache cannot be moved" }),
            SlabKind::ByOwner | SlabKind::ByHandle => cache.engine().set_used_ratio(percent),
        })
    }

    /// Sets [`crate::Settings::remote_node_defrag_ratio`] of a cache. Returns `None` if the cache was dropped.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`].
    pub(crate) fn set_remote_ratio(&self, id: u64, percent: u32) -> Option<Result<()>> {
        Some(self.cache_by_id(id)?.engine().set_remote_ratio(percent))
    }
}
