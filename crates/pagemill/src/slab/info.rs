//! Figures of a cache, as Linux's `slabinfo` has them, and more.

use super::migrate::assert_not_isolating;
use super::node::Node;
use super::{Kind, Member};
use crate::error::Result;
use crate::sync::{Patience, Relaxed};
use std::io;
use std::sync::Arc;

/// Figures of a cache at one moment; where others use it meanwhile, of nearly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabInfo {
    pub name: Arc<str>,
    pub kind: Kind,
    /// Bytes of an object as its user knows it, and from one to the next.
    pub object_bytes: usize,
    pub stride_bytes: usize,
    pub slab_bytes: usize,
    pub objects_per_slab: u32,
    pub has_constructor: bool,
    /// Whether its objects are watched ([`super::Settings::debug`]).
    pub is_debug: bool,
    pub defrag_used_ratio: u32,
    pub remote_node_defrag_ratio: u32,
    /// Sums of the nodes.
    pub total: NodeInfo,
    pub nodes: Vec<NodeInfo>,
    /// Objects that users have: less those in magazines and barns.
    pub active: u64,
    /// Of these, such as nobody comes to any more, and readers may be at: values that were removed or replaced, places that were moved
    /// from. Each call counts them anew. Nodes of indices that were retired are in use until they go back.
    pub waiting: u64,
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
    /// Bytes of its table of handles, beside what is charged for its blocks.
    pub handle_bytes: u64,
    /// A node was locked for too long to be looked at: its figures are missing.
    pub is_partial: bool,
    /// A callback panicked in the background, which leaves the cache alone since. It tries again when `defrag_used_ratio` is set, be it
    /// to what it was, or when a shrink gets through. Slabs that are out of use (`lost`) stay so.
    pub is_given_up: bool,
}

/// Figures of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// Objects outside of slabs: users', and in magazines and barns.
    pub used: u64,
    /// Of these, free ones in its barns.
    pub cached: u64,
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
    /// Figures that another process tells may be any: sums saturate.
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

    fn of(node: &Node<'_>, cached: u64) -> Self {
        let tally = node.tally();
        Self {
            used: tally.used,
            cached,
            objects: u64::from(tally.slabs) * u64::from(node.shape.capacity),
            slabs: tally.slabs,
            partial: tally.partial,
            empty: tally.empty,
            lost: tally.lost,
            blocks: tally.blocks,
            resident_bytes: tally.resident_bytes,
        }
    }
}

impl SlabInfo {
    /// Takes the figures of its next node in.
    pub(crate) fn add_node(&mut self, node: NodeInfo) {
        self.total.add(&node);
        self.cached = self.cached.saturating_add(node.cached);
        self.active = self.total.used.saturating_sub(self.cached);
        self.nodes.push(node);
    }

    /// The order of lists: caches with movable objects first, then by name.
    pub(crate) fn rank(&self) -> (bool, Arc<str>) {
        (self.kind == Kind::Fixed, self.name.clone())
    }
}

/// # Errors
///
/// [`crate::Error::WrongState`] of a parent's cache.
pub(super) fn of(member: &dyn Member) -> Result<SlabInfo> {
    assert_not_isolating();
    let (mut info, engine) = (without_nodes(member)?, member.engine());
    for node in 0..engine.node_count() {
        let cached = engine.in_barns(node);
        info.add_node(engine.on(node, |node| NodeInfo::of(node, cached)));
    }
    Ok(info)
}

/// Shows a cache with each of its nodes, which `SlabInfo` has none of then: takes no memory, and waits for the lock of a node,
/// under which `isolate` may run, until `patience` has waited so long at most.
///
/// # Errors
///
/// What `show` says. A parent's cache is not shown.
pub(super) fn show(
    member: &dyn Member,
    (patience, most_ns): (&mut Patience, u64),
    mut show: impl FnMut(&SlabInfo, usize, &NodeInfo) -> io::Result<()>,
) -> io::Result<()> {
    let Ok(mut info) = without_nodes(member) else { return Ok(()) };
    for node in 0..member.engine().node_count() {
        let found = loop {
            let cached = member.engine().in_barns(node);
            let found = member.engine().try_on(node, |node| NodeInfo::of(node, cached));
            if found.is_some() || patience.waited_ns() > most_ns {
                break found;
            }
            patience.pause();
        };
        info.is_partial = found.is_none();
        show(&info, node, &found.unwrap_or_default())?;
    }
    Ok(())
}

/// What is cached is what magazines have.
fn without_nodes(member: &dyn Member) -> Result<SlabInfo> {
    let engine = member.engine();
    engine.check()?;
    let (shape, counts) = (&engine.shape, &engine.counts);
    Ok(SlabInfo {
        name: engine.name.clone(),
        kind: member.kind(),
        object_bytes: engine.object_bytes,
        stride_bytes: shape.stride,
        slab_bytes: shape.slab_bytes,
        objects_per_slab: shape.capacity,
        // What sets the places of handles up is nobody's.
        has_constructor: engine.has_constructor() && member.kind() == Kind::ByOwner,
        is_debug: engine.checks.is_some(),
        defrag_used_ratio: engine.used_ratio.load(Relaxed),
        remote_node_defrag_ratio: engine.remote_ratio.load(Relaxed),
        total: NodeInfo::default(),
        nodes: Vec::new(),
        active: 0,
        waiting: member.waiting(),
        cached: engine.in_magazines(),
        moved: counts.moved.load(Relaxed),
        freed: counts.freed.load(Relaxed),
        busy: counts.busy.load(Relaxed),
        refused: counts.refused.load(Relaxed),
        failed: counts.failed.load(Relaxed),
        emptied: counts.emptied.load(Relaxed),
        from_remote: counts.from_remote.load(Relaxed),
        handle_bytes: member.handle_bytes(),
        is_partial: false,
        is_given_up: engine.has_failed.load(Relaxed),
    })
}
