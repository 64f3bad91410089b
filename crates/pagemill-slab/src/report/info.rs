//! Statistics of a cache. They include the statistics of Linux's `slabinfo`.

use crate::alloc::node::Node;
use crate::cache::{Cache, SlabKind};
use crate::defrag::isolating::assert_not_isolating;
use pagemill_core::error::Result;
use pagemill_core::sync::{Backoff, Relaxed};
use std::io;
use std::sync::Arc;

/// Statistics of a cache. If other threads use the cache meanwhile, the values may be from slightly different times.
///
/// ```
/// use pagemill::slab::{FixedSlab, SlabCache};
///
/// let cache = FixedSlab::<[u64; 8]>::new("lines")?;
/// let kept = cache.insert([1; 8])?;
/// let info = cache.info()?;
/// assert_eq!((info.object_bytes, info.active), (64, 1));
/// assert!(info.total.slabs == 1 && info.total.objects >= info.total.used);
/// # drop(kept);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabInfo {
    pub name: Arc<str>,
    pub kind: SlabKind,
    /// Size in bytes of an object as the user defined it.
    pub object_bytes: usize,
    /// Distance in bytes from one object to the next.
    pub stride_bytes: usize,
    pub slab_bytes: usize,
    pub objects_per_slab: u32,
    pub has_constructor: bool,
    /// Whether debug mode is on ([`crate::Settings::debug`]).
    pub is_debug: bool,
    pub defrag_used_ratio: u32,
    pub remote_node_defrag_ratio: u32,
    /// Sums of the statistics of all NUMA nodes.
    pub total: NodeInfo,
    pub nodes: Vec<NodeInfo>,
    /// Number of the cache's objects that its user has allocated. Free objects in magazines and barns are not included.
    pub active: u64,
    /// Number of the active objects that are unreachable and wait for readers: removed or replaced values, and the old
    /// memory of moved objects. Counted anew by each call. Retired index nodes count as active until they are freed,
    /// not as waiting.
    pub waiting: u64,
    /// Number of free objects in magazines and barns, which threads and NUMA nodes keep for the next allocations.
    pub cached: u64,
    /// Number of objects that were moved so far.
    pub moved: u64,
    /// Number of objects that their owner freed instead of moving them.
    pub freed: u64,
    /// Number of objects that were not moved because they were in use or pinned.
    pub busy: u64,
    /// Number of objects that were not moved because the callback `isolate` of their owner rejected them.
    pub refused: u64,
    /// Number of objects that were not moved because there was no destination, or because their owner could not move
    /// them.
    pub failed: u64,
    /// Number of slabs that were emptied by moving their objects.
    pub emptied: u64,
    /// Number of objects that were allocated from another NUMA node than the preferred one.
    pub from_remote: u64,
    /// Resident bytes of the handle table. These bytes are not included in the bytes charged for blocks.
    pub handle_bytes: u64,
    /// Whether the statistics of a NUMA node are missing, because another thread held the node's lock for too long.
    pub is_partial: bool,
    /// Whether the background thread skips the cache, because a callback panicked on that thread. The thread resumes
    /// work on the cache when `defrag_used_ratio` is set, even to the same value, or a shrink succeeds. Slabs that are
    /// out of use (`lost`) stay out of use.
    pub is_given_up: bool,
}

/// Statistics of a cache on one NUMA node.
///
/// Example: [`SlabInfo`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// Number of objects that are not on the free lists of their slabs: allocated by users, or in magazines and barns.
    pub used: u64,
    /// Number of free objects in barns. They are part of `used`.
    pub cached: u64,
    /// Number of objects that fit into the slabs that are set up on the node.
    pub objects: u64,
    /// Number of slabs that are set up. The fields `partial`, `empty` and `lost` count some of these slabs.
    pub slabs: u32,
    /// Number of slabs that have both free and used objects.
    pub partial: u32,
    /// Number of slabs without used objects.
    pub empty: u32,
    /// Number of slabs that are out of use for good, because a callback panicked.
    pub lost: u32,
    pub blocks: u32,
    /// Bytes that are charged for the blocks of the node.
    pub resident_bytes: u64,
}

impl NodeInfo {
    /// Adds the statistics of another NUMA node to these statistics. Sums saturate, because another process may send
    /// any values.
    fn add(&mut self, other: &Self) {
        self.used = self.used.saturating_add(other.used);
        self.cached = self.cached.saturating_add(other.cached);
        self.objects = self.objects.saturating_add(other.objects);
        self.slabs = self.slabs.saturating_add(other.slabs);
        self.partial = self.partial.saturating_add(other.partial);
        self.empty = self.empty.saturating_add(other.empty);
        self.lost = self.lost.saturating_add(other.lost);
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.resident_bytes = self.resident_bytes.saturating_add(other.resident_bytes);
    }

    /// Returns the statistics of a slab cache on one NUMA node. `cached` is the number of free objects in the node's
    /// barns.
    fn of(node: &Node<'_>, cached: u64) -> Self {
        let state = &*node.state;
        Self {
            used: state.used,
            cached,
            objects: u64::from(state.slabs) * u64::from(node.shape.capacity),
            slabs: state.slabs,
            partial: state.partial,
            empty: state.empty,
            lost: state.lost,
            blocks: state.blocks,
            resident_bytes: state.resident_bytes,
        }
    }
}

impl SlabInfo {
    /// Adds the statistics of the cache's next NUMA node to `nodes` and `total`.
    pub(crate) fn add_node(&mut self, node: NodeInfo) {
        self.total.add(&node);
        self.cached = self.cached.saturating_add(node.cached);
        self.active = self.total.used.saturating_sub(self.cached);
        self.nodes.push(node);
    }

    /// Returns the key by which lists of slab caches are sorted: caches with movable objects come first, and then the
    /// order is by name.
    pub(crate) fn sort_key(&self) -> (bool, Arc<str>) {
        (self.kind == SlabKind::Fixed, self.name.clone())
    }
}

/// Returns the statistics of a cache.
///
/// # Errors
///
/// [`pagemill_core::Error::WrongState`] for a cache of the parent process.
pub(crate) fn of(cache: &dyn Cache) -> Result<SlabInfo> {
    assert_not_isolating();
    let (mut info, engine) = (cache_info(cache)?, cache.engine());
    for node in 0..engine.node_count() {
        let cached = engine.objects_in_barns(node);
        info.add_node(engine.with_node(node, |node| NodeInfo::of(node, cached)));
    }
    Ok(info)
}

/// Calls `show` for each NUMA node, with the statistics of the cache, whose `nodes` are empty, and those of the node.
/// Allocates no memory. Waits for the lock of a node, which the caller of `isolate` may hold, until `backoff` has
/// waited `timeout_ns` in all.
///
/// # Errors
///
/// Errors of `show`. Does nothing for a cache of the parent process.
pub(crate) fn show(
    cache: &dyn Cache,
    (backoff, timeout_ns): (&mut Backoff, u64),
    mut show: impl FnMut(&SlabInfo, usize, &NodeInfo) -> io::Result<()>,
) -> io::Result<()> {
    let Ok(mut info) = cache_info(cache) else { return Ok(()) };
    for node in 0..cache.engine().node_count() {
        let node_info = loop {
            let cached = cache.engine().objects_in_barns(node);
            let node_info = cache.engine().try_with_node(node, |node| NodeInfo::of(node, cached));
            if node_info.is_some() || backoff.waited_ns() > timeout_ns {
                break node_info;
            }
            backoff.pause();
        };
        info.is_partial = node_info.is_none();
        show(&info, node, &node_info.unwrap_or_default())?;
    }
    Ok(())
}

/// Returns the statistics of a cache without those of its NUMA nodes. Of the free objects, `cached` counts only those
/// in magazines.
fn cache_info(cache: &dyn Cache) -> Result<SlabInfo> {
    let engine = cache.engine();
    engine.check_generation()?;
    let (shape, counts) = (&engine.shape, &engine.counts);
    Ok(SlabInfo {
        name: engine.name.clone(),
        kind: cache.kind(),
        object_bytes: engine.object.user_bytes,
        stride_bytes: shape.stride,
        slab_bytes: shape.slab_bytes,
        objects_per_slab: shape.capacity,
        // Caches by handle use a constructor internally, which is not the user's.
        has_constructor: engine.object.constructor.is_some() && cache.kind() == SlabKind::ByOwner,
        is_debug: engine.checks.is_some(),
        defrag_used_ratio: engine.used_ratio.load(Relaxed),
        remote_node_defrag_ratio: engine.remote_ratio.load(Relaxed),
        total: NodeInfo::default(),
        nodes: Vec::new(),
        active: 0,
        waiting: cache.waiting_objects(),
        cached: engine.objects_in_magazines(),
        moved: counts.moved.load(Relaxed),
        freed: counts.freed.load(Relaxed),
        busy: counts.busy.load(Relaxed),
        refused: counts.refused.load(Relaxed),
        failed: counts.failed.load(Relaxed),
        emptied: counts.emptied.load(Relaxed),
        from_remote: counts.from_remote.load(Relaxed),
        handle_bytes: cache.handle_bytes(),
        is_partial: false,
        is_given_up: engine.has_panicked.load(Relaxed),
    })
}
