//! Commands on slab caches from other processes of the same user. Each command names its cache by a unique id.

use crate::alloc::engine::check_ratio;
use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::defrag::worker::RequestedWork;
use crate::report::info;
use pagemill_core::error::{Error, Result};
use pagemill_core::listing::{Action, ShrinkReport, SlabCommands};
use pagemill_core::sync::Relaxed;
use std::sync::atomic::Ordering::SeqCst;

impl SlabCommands for Slabs {
    fn execute(&self, id: u64, action: Action) -> Option<Result<ShrinkReport>> {
        let (_, cache) = self.first_cache_from(id).filter(|(found, _)| *found == id)?;
        let set = match action {
            Action::SetUsedRatio(_) | Action::Move { .. } | Action::Balance if cache.kind() == SlabKind::Fixed => {
                Err(Error::Unsupported { what: "objects of this slab cache cannot be moved" })
            }
            Action::SetUsedRatio(percent) => cache.engine().set_used_ratio(percent),
            Action::SetRemoteRatio(percent) => {
                check_ratio(percent).map(|()| cache.engine().remote_ratio.store(percent, Relaxed))
            }
            Action::Shrink => return self.run_long_action(&*cache, RequestedWork::Shrink),
            Action::Move { from, to } => {
                return self.run_long_action(&*cache, RequestedWork::Move { from: from.into(), to: to.into() });
            }
            Action::Balance => return self.run_long_action(&*cache, RequestedWork::Balance),
        };
        Some(set.map(|()| ShrinkReport::default()))
    }
}

impl Slabs {
    /// Shrinks or moves one cache as the program itself would, including callbacks of owners. Returns `None` if the
    /// cache was dropped before or during the work.
    ///
    /// # Errors
    ///
    /// As the cache's own `shrink`, `move_objects` and `balance`.
    fn run_long_action(&self, cache: &dyn Cache, work: RequestedWork) -> Option<Result<ShrinkReport>> {
        let run = || {
            let before = info::of(cache)?;
            // Callbacks must run on a thread that shares the program's open files: the background thread.
            let freed_bytes = match cache.kind() {
                SlabKind::Fixed => cache.shrink()?,
                SlabKind::ByOwner | SlabKind::ByHandle => self.worker.request(cache.engine(), work)?,
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
        let done = run();
        let has_gone = done.is_err() && cache.engine().is_unregistered.load(SeqCst);
        (!has_gone).then_some(done)
    }
}
