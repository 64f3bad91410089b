//! What other processes of the user can see of slab caches and change in them. Each cache is named by a unique id.

use super::{CacheKind, Member, NodeInfo, SlabInfo, Slabs, info};
use pagemill_core::error::{Error, Result};
use pagemill_core::listing::ShrinkReport;
use pagemill_core::sync::Backoff;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

impl Slabs {
    /// The first cache that still exists with an id of at least `from`.
    fn member_from(&self, from: u64) -> Option<(u64, Arc<dyn Member>)> {
        self.members.with(|members| {
            let rest = &members[members.partition_point(|(id, _)| *id < from)..];
            rest.iter().find_map(|(id, member)| Some((*id, member.upgrade()?)))
        })
    }

    fn member(&self, id: u64) -> Option<Arc<dyn Member>> {
        self.member_from(id).filter(|(found, _)| *found == id).map(|(_, member)| member)
    }

    /// Calls `show` for every cache in order of ids, once for each node, with the statistics of that node. Allocates no
    /// memory. Waits `most_ns` for locks in all, and reports a node as partial if it could not read its values.
    ///
    /// # Errors
    ///
    /// Those of `show`; the remaining caches are not shown then.
    pub(super) fn show(
        &self,
        most_ns: u64,
        mut show: impl FnMut(u64, &SlabInfo, usize, &NodeInfo) -> io::Result<()>,
    ) -> io::Result<()> {
        let (mut backoff, mut from) = (Backoff::new(), 0);
        while let Some((id, member)) = self.member_from(from) {
            info::show(&*member, (&mut backoff, most_ns), |info, node, figures| show(id, info, node, figures))?;
            from = id + 1;
        }
        Ok(())
    }

    /// Shrinks one cache as its user would, which runs callbacks of owners. `None` if the cache was dropped, even while
    /// it waited.
    ///
    /// # Errors
    ///
    /// As the cache's own `shrink`.
    pub(super) fn shrink_one(&self, id: u64) -> Option<Result<ShrinkReport>> {
        let member = self.member(id)?;
        let shrink = || {
            let before = info::of(&*member)?;
            // Code of the program must run on a thread that shares the program's open files.
            let freed_bytes = match member.kind() {
                CacheKind::Fixed => member.shrink()?,
                CacheKind::ByOwner | CacheKind::ByHandle => self.worker.request_shrink(member.engine())?,
            };
            let after = info::of(&*member)?;
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
        let has_gone = done.is_err() && member.engine().is_withdrawn.load(SeqCst);
        (!has_gone).then_some(done)
    }

    /// Sets the used ratio below which a cache is defragmented. `None` if the cache was dropped.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`]; [`Error::Unsupported`] if objects of the cache cannot be moved.
    pub(super) fn set_used_ratio(&self, id: u64, percent: u32) -> Option<Result<()>> {
        let member = self.member(id)?;
        Some(match member.kind() {
            CacheKind::Fixed => Err(Error::Unsupported { what: "objects of this slab cache stay where they are" }),
            CacheKind::ByOwner | CacheKind::ByHandle => member.engine().set_used_ratio(percent),
        })
    }

    /// Sets how often free objects of other nodes are used before a new slab is set up. `None` if the cache was dropped.
    ///
    /// # Errors
    ///
    /// [`Error::BadRatio`].
    pub(super) fn set_remote_ratio(&self, id: u64, percent: u32) -> Option<Result<()>> {
        Some(self.member(id)?.engine().set_remote_ratio(percent))
    }
}
