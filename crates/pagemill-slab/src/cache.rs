//! [`Cache`]: a cache of any kind, as seen by code that handles all caches.

use crate::alloc::engine::Engine;
use crate::alloc::node::Keep;
use crate::defrag::passes::Progress;
use pagemill_core::error::Result;
use pagemill_core::reclaim::Urgency;
use std::time::Duration;

/// How objects of a cache can be moved.
///
/// Example: [`SlabInfo`](crate::SlabInfo), whose field `kind` has this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabKind {
    /// Objects keep their address.
    Fixed,
    /// The owner of the objects moves them.
    ByOwner,
    /// Values are reached by handle, and the cache moves them.
    ByHandle,
}

/// The operations of every kind of slab cache. The list of all slab caches holds references to this trait.
pub(crate) trait Cache: Send + Sync {
    fn engine(&self) -> &Engine;

    fn kind(&self) -> SlabKind {
        self.engine().object.kind
    }

    /// Returns the resident bytes of the handle table; 0 if the cache has none.
    fn handle_bytes(&self) -> u64 {
        0
    }

    /// Returns the number of unreachable objects that cannot be freed before their readers have finished.
    fn waiting_objects(&self) -> u64 {
        self.engine().objects_in_batches()
    }

    /// Packs the objects of the cache into fewer slabs: moves them at once if this runs no user callback, and otherwise
    /// asks the background thread to move them. Does nothing if the objects cannot be moved.
    fn pack_without_callback(&self) {}

    /// Frees unused memory, as [`SlabCache::shrink`](crate::SlabCache::shrink) describes.
    fn shrink(&self) -> Result<u64>;

    /// Frees retired objects whose readers have finished, if that runs no user callback.
    fn finish_retired_without_callback(&self) {}

    /// Frees retired objects whose readers have finished. Returns whether retired objects still wait.
    fn finish_retired(&self) -> bool {
        self.engine().finish_retired_in_background()
    }

    /// Runs one step of defragmentation for about `budget`. Does nothing if the objects cannot be moved.
    fn defrag(&self, _budget: Duration) -> Result<Progress> {
        Ok(Progress { is_done: true, ..Progress::default() })
    }

    /// As [`SlabCache::move_objects`](crate::SlabCache::move_objects).
    fn move_objects(&self, _from: usize, _to: usize, _most: u64) -> Result<Progress> {
        Ok(Progress { is_done: true, ..Progress::default() })
    }

    /// As [`SlabCache::balance`](crate::SlabCache::balance).
    fn balance(&self) -> Result<Progress> {
        Ok(Progress { is_done: true, ..Progress::default() })
    }

    /// Frees unused memory without calling user callbacks. With [`Urgency::Limit`], also drains magazines and packs
    /// objects. Returns the bytes that were returned to the system. Whole blocks that become free are not included,
    /// because they keep their memory.
    fn give_back(&self, urgency: Urgency) -> u64 {
        let engine = self.engine();
        if engine.check_generation().is_err() {
            return 0;
        }
        self.finish_retired_without_callback();
        if urgency == Urgency::Limit {
            self.pack_without_callback();
        }
        let _drained = (urgency == Urgency::Limit).then(|| engine.try_drain_magazines());
        let each = (0..engine.node_count()).map(|node| {
            engine.drain_barns(node);
            engine.trim(node, Keep::Nothing)
        });
        each.sum()
    }
}
