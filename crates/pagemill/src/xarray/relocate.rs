//! Moving a node to another place, beside readers, writers and the end of its array.
//!
//! ```text
//!   node --array--> entry (held: the array is not dropped) --try--> lock of the array
//!   is it there still?  its array's number, and the word that points at it
//!   copy  ->  nodes below learn of it  ->  one store: the word above names the new place  ->  old slots DEAD
//! ```
//!
//! For readers that is what any node is to them that leaves: cut off first, then DEAD (module header). Between the two nothing is
//! written to either node, so what a reader finds in the old one is what stands in the new one. Entries leave their slots in the
//! sense of [`super::Hit::is_still`].

use super::nodes::Nodes;
use super::store::Writer;
use super::word::Word;

/// Moves the node `old` to `new`, a node that is the caller's alone, in whatever state; says whether it did. Then `old` is the
/// caller's, not to be used before all guards ([`super::pin`]) that are there now have gone; else `new` is as it was.
///
/// It does not where the node is in no tree, or of an array that cannot be found ([`super::XArray::movable`]), or somebody has that
/// array: nobody is waited for. Cost: a copy of the node, and a store to each below.
pub fn relocate<N: Nodes>(nodes: &'static N, old: u32, new: u32) -> bool {
    let id = nodes.node(old).array();
    if id == 0 {
        return false;
    }
    let moved = nodes.arrays().with(id, |array| array.try_lock().is_some_and(|writer| writer.relocate(id, old, new)));
    moved.unwrap_or(false)
}

impl<N: Nodes> Writer<'_, N> {
    pub(super) fn relocate(&self, id: u32, old: u32, new: u32) -> bool {
        let node = self.node(old);
        // Looked up without the lock: it may have left since, and be another's.
        if node.array() != id {
            return false;
        }
        let above = match node.parent() {
            0 => &self.array.root,
            parent => &self.node(parent).slots[node.offset()],
        };
        // So it does, unless a change of the array was broken off by a panic.
        if above.peek() != Word::node(old, node.shift()) {
            return false;
        }
        node.copy_to(self.node(new));
        let below = node.slots.iter().map(super::Slot::peek).filter(|word| word.is_node());
        below.for_each(|word| self.node(word.number()).set_parent(new));
        above.publish(Word::node(new, node.shift()));
        node.kill();
        true
    }
}
