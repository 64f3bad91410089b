//! Commands on slab caches from other processes of the same user. Each command names its cache by a unique id.

use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::report::info;
use pagemill_core::error::{Error, Result};
use pagemill_core::listing::{Action, ShrinkReport, SlabCommands};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl SlabCommands for Slabs {
    fn execute(&self, cache: u64, action: Action) -> Option<Result<ShrinkReport>> {
        match action {
            Action::SetUsedRatio(percent) => {
                self.set_used_ratio(cache, percent).map(|set| set.map(|()| ShrinkReport::default()))
            }
            Action::SetRemoteRatio(percent) => {
                self.set_remote_ratio(cache, percent).map(|set| set.map(|()| ShrinkReport::default()))
            }
            Action::Shrink => self.shrink_one(cache),
        }
    }
}

impl Slabs {
    /// Returns the cache with this id, if it exists.
    fn cache_by_id(&self, id: u64) -> Option<Arc<dyn Cache>> {
        self.first_cache_from(id).filter(|(found, _)| *found == id).map(|(_, cache)| cache)
    }

    /// Shrinks one cache as the program itself would, including callbacks of owners. Returns `None` if the cache was
    /// dropped before or during the shrink.
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
