//! Commands on slab caches from other processes of the same user. Each command names its cache by a unique id.

use crate::alloc::engine::check_ratio;
use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::report::info;
use pagemill_core::error::{Error, Result};
use pagemill_core::listing::{Action, ShrinkReport, SlabCommands};
use pagemill_core::sync::Relaxed;
use std::sync::atomic::Ordering::SeqCst;

impl SlabCommands for Slabs {
    fn execute(&self, id: u64, action: Action) -> Option<Result<ShrinkReport>> {
        let (_, cache) = self.first_cache_from(id).filter(|(found, _)| *found == id)?;
        let set = match action {
            Action::SetUsedRatio(_) if cache.kind() == SlabKind::Fixed => {
                Err(Error::Unsupported { what: "objects of this slab cache cannot be moved" })
            }
            Action::SetUsedRatio(percent) => cache.engine().set_used_ratio(percent),
            Action::SetRemoteRatio(percent) => {
                check_ratio(percent).map(|()| cache.engine().remote_ratio.store(percent, Relaxed))
            }
            Action::Shrink => return self.shrink_one(&*cache),
        };
        Some(set.map(|()| ShrinkReport::default()))
    }
}

impl Slabs {
    /// Shrinks one cache as the program itself would, including callbacks of owners. Returns `None` if the cache was
    /// dropped before or during the shrink.
    ///
    /// # Errors
    ///
    /// As the cache's own `shrink`.
    fn shrink_one(&self, cache: &dyn Cache) -> Option<Result<ShrinkReport>> {
        let shrink = || {
            let before = info::of(cache)?;
            // Callbacks must run on a thread that shares the program's open files: the background thread.
            let freed_bytes = match cache.kind() {
                SlabKind::Fixed => cache.shrink()?,
                SlabKind::ByOwner | SlabKind::ByHandle => self.worker.request_shrink(cache.engine())?,
            };
            let after = info::of(cache)?;
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
}
