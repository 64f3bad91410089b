//! Moves a node to another address, while readers, writers and the drop of its array may run concurrently.
//!
//! ```text
//!   node  --number of its array-->  table entry (its lock keeps the array from being dropped)  --try-->  array's lock
//!   check     the node's array number, and the word that points at the node, have not changed
//!   move      copy the node, set the parent of the nodes below, one store of the word above, old slots DEAD
//! ```
//!
//! For readers, the old node is removed as the module `xarray` describes: unlinked first, then DEAD. Between these
//! steps neither node is written, so a reader of the old node finds the contents of the new node. Entries of the node
//! leave their slots in the sense of [`super::Hit::is_still`].

use super::nodes::Nodes;
use super::store::Writer;
use super::word::IndexWord;

/// Moves the node with number `old` to the node with number `new`, which belongs to the caller and may have any
/// contents. Returns whether the node moved. After a move `old` belongs to the caller, which must not reuse it before
/// all current guards ([`super::pin`]) are dropped. Otherwise `new` is unchanged.
///
/// Does nothing if the node is in no tree, if its array cannot be found ([`super::XArray::movable`]), or if another
/// thread holds the array's lock or table entry. Never waits. Cost: a copy of the node, and a store to each node below.
pub(crate) fn relocate<N: Nodes>(nodes: &'static N, old: u32, new: u32) -> bool {
    let id = nodes.node(old).array();
    if id == 0 {
        return false;
    }
    let moved = nodes.arrays().with(id, |array| array.try_lock().is_some_and(|writer| writer.relocate(id, old, new)));
    moved.unwrap_or(false)
}

impl<N: Nodes> Writer<'_, N> {
    /// As the function [`relocate`], under the lock of the array, which has number `id`.
    pub(super) fn relocate(&self, id: u32, old: u32, new: u32) -> bool {
        let node = self.node(old);
        // The caller looked up the array without the lock. The node may have been removed since, and belong to another
        // array.
        if node.array() != id {
            return false;
        }
        let above = match node.parent() {
            0 => &self.array.root,
            parent => &self.node(parent).slots[node.offset()],
        };
        // The word above always points at the node, unless a panic interrupted a change of the array.
        if above.load_relaxed() != IndexWord::node(old, node.shift()) {
            return false;
        }
        node.copy_to(self.node(new));
        let below = node.slots.iter().map(super::IndexSlot::load_relaxed).filter(|word| word.is_node());
        below.for_each(|word| self.node(word.number()).set_parent(new));
        above.publish(IndexWord::node(new, node.shift()));
        node.mark_dead();
        true
    }
}
