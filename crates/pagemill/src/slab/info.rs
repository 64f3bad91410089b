//! Figures of a cache, as Linux's `slabinfo` has them, and more.

use super::Kind;
use super::engine::Engine;
use crate::error::Result;
use crate::sync::Relaxed;

/// Figures of a cache at one moment; where others use it meanwhile, of nearly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabInfo {
    pub name: String,
    pub kind: Kind,
    /// Bytes of an object as its user knows it, and from one to the next.
    pub object_bytes: usize,
    pub stride_bytes: usize,
    pub slab_bytes: usize,
    pub objects_per_slab: u32,
    pub has_constructor: bool,
    pub defrag_used_ratio: u32,
    pub remote_node_defrag_ratio: u32,
    /// Sums of the nodes.
    pub total: NodeInfo,
    pub nodes: Vec<NodeInfo>,
    /// Objects that users have: less those in magazines and barns.
    pub active: u64,
    /// Free objects in magazines and barns.
    pub cached: u64,
    /// Objects that were moved, and such as their owner freed where it was to move them.
    pub moved: u64,
    pub freed: u64,
    /// Objects that stayed: in use (pinned), refused before they were touched, or without a place.
    pub busy: u64,
    pub refused: u64,
    pub failed: u64,
    /// Slabs that were emptied by moving.
    pub emptied: u64,
    /// Objects that came from another node than the one that wanted them.
    pub from_remote: u64,
}

/// Figures of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// Objects outside of slabs: users', and in magazines and barns.
    pub used: u64,
    /// Objects that its slabs have room for.
    pub objects: u64,
    /// Slabs that are set up; of these, some in use and some free, none in use, out of use for good.
    pub slabs: u32,
    pub partial: u32,
    pub empty: u32,
    pub lost: u32,
    pub blocks: u32,
    /// Bytes charged for its blocks.
    pub resident_bytes: u64,
}

impl NodeInfo {
    fn add(&mut self, other: &Self) {
        self.used += other.used;
        self.objects += other.objects;
        self.slabs += other.slabs;
        self.partial += other.partial;
        self.empty += other.empty;
        self.lost += other.lost;
        self.blocks += other.blocks;
        self.resident_bytes += other.resident_bytes;
    }
}

/// # Errors
///
/// [`crate::Error::WrongState`] of a parent's cache.
pub(super) fn of(engine: &Engine, kind: Kind) -> Result<SlabInfo> {
    engine.check()?;
    let shape = &engine.shape;
    let mut cached = engine.in_magazines();
    let nodes: Vec<NodeInfo> = (0..engine.node_count())
        .map(|node| {
            let tally = engine.on(node, |node| node.tally());
            cached += tally.in_barn;
            NodeInfo {
                used: tally.used,
                objects: u64::from(tally.slabs) * u64::from(shape.capacity),
                slabs: tally.slabs,
                partial: tally.partial,
                empty: tally.empty,
                lost: tally.lost,
                blocks: tally.blocks,
                resident_bytes: tally.resident_bytes,
            }
        })
        .collect();
    let mut total = NodeInfo::default();
    nodes.iter().for_each(|node| total.add(node));
    let counts = &engine.counts;
    Ok(SlabInfo {
        name: engine.name.clone(),
        kind,
        object_bytes: engine.object_bytes,
        stride_bytes: shape.stride,
        slab_bytes: shape.slab_bytes,
        objects_per_slab: shape.capacity,
        has_constructor: engine.has_constructor(),
        defrag_used_ratio: engine.used_ratio.load(Relaxed),
        remote_node_defrag_ratio: engine.remote_ratio.load(Relaxed),
        active: total.used.saturating_sub(cached),
        cached,
        moved: counts.moved.load(Relaxed),
        freed: counts.freed.load(Relaxed),
        busy: counts.busy.load(Relaxed),
        refused: counts.refused.load(Relaxed),
        failed: counts.failed.load(Relaxed),
        emptied: counts.emptied.load(Relaxed),
        from_remote: counts.from_remote.load(Relaxed),
        total,
        nodes,
    })
}
