//! Nodes that are allocated before the array's lock is acquired, so that operations under the lock cannot fail.

use super::XArray;
use super::nodes::Nodes;
use super::store::Writer;
use super::word::{self, MAX_INDEX, MAX_ORDER, MAX_SHIFT, SLOT_BITS};
use pagemill_core::error::Result;

/// Preallocated nodes for one or more changes of any arrays with the same `Nodes`. Dropping the stock frees the unused
/// nodes.
///
/// Example: [`XArray`](super::XArray).
pub struct NodeStock<N: Nodes> {
    nodes: &'static N,
    /// Number of the first node in the linked list of the stock's nodes; 0 if the list is empty.
    head: u32,
    count: u32,
}

impl<N: Nodes> NodeStock<N> {
    pub(super) fn new(nodes: &'static N) -> Self {
        Self { nodes, head: 0, count: 0 }
    }

    /// Returns the number of nodes in the stock.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Allocates nodes until the stock has `count` nodes.
    pub(super) fn allocate_up_to(&mut self, count: u32) -> Result<()> {
        while self.count < count {
            let number = self.nodes.take()?;
            let node = self.nodes.node(number);
            node.clear_if_needed();
            node.set_next(self.head);
            (self.head, self.count) = (number, self.count + 1);
        }
        Ok(())
    }

    /// Removes a preallocated node from the stock and returns the node's number. Panics if the stock is empty.
    pub(super) fn take(&mut self) -> u32 {
        assert!(self.count > 0, "a stock has as many nodes as the change needs");
        let number = self.head;
        self.head = self.nodes.node(number).next();
        self.count -= 1;
        number
    }

    /// Returns whether the nodes of the stock were allocated from `nodes`.
    pub(super) fn comes_from(&self, nodes: &'static N) -> bool {
        std::ptr::eq(self.nodes, nodes)
    }
}

impl<N: Nodes> Drop for NodeStock<N> {
    fn drop(&mut self) {
        while self.count > 0 {
            let number = self.take();
            self.nodes.give(number);
        }
    }
}

impl<N: Nodes> XArray<N> {
    /// Allocates nodes for consecutive stores or joins of entries of order `order` over `first..=last`, between one
    /// acquisition of the array's lock and its release.
    ///
    /// Cost: allocates as many nodes as the stores may need in the worst case. For one page these are 6 to 13 nodes,
    /// and for each further 64 pages about one more. A caller with many changes should keep the nodes and use
    /// [`XArray::top_up`].
    ///
    /// # Errors
    ///
    /// As `Nodes::take`. The nodes that were allocated before the error are freed.
    pub fn prepare(&self, first: u64, last: u64, order: u32) -> Result<NodeStock<N>> {
        let mut stock = NodeStock::new(self.nodes);
        self.top_up(&mut stock, first, last, order)?;
        Ok(stock)
    }

    /// Acquires the array's lock, and allocates the nodes for storing consecutive entries of order `order` over
    /// `first..=last`. Usually the tree has all nodes already, so that no node is allocated.
    ///
    /// Cost: a descent of the tree. If a node is missing, or the range needs several nodes, also the cost of
    /// [`XArray::prepare`] and a second acquisition of the lock. Errors: as [`XArray::prepare`].
    pub fn lock_for(&self, first: u64, last: u64, order: u32) -> Result<(Writer<'_, N>, NodeStock<N>)> {
        let mut stock = NodeStock::new(self.nodes);
        let writer = self.lock();
        if writer.has_all_nodes_for(first, last, order) {
            return Ok((writer, stock));
        }
        drop(writer);
        self.top_up(&mut stock, first, last, order)?;
        Ok((self.lock(), stock))
    }

    /// Allocates nodes until `stock` has as many as [`XArray::prepare`] returns for this range and order. Errors: as
    /// [`XArray::prepare`].
    pub fn top_up(&self, stock: &mut NodeStock<N>, first: u64, last: u64, order: u32) -> Result<()> {
        assert!(first <= last, "a range has an index");
        assert!(last <= MAX_INDEX, "an index is at most MAX_INDEX");
        assert!(order <= MAX_ORDER, "an order is at most MAX_ORDER");
        stock.allocate_up_to(nodes_to_store(first, last, order))
    }

    /// Allocates nodes for splitting one entry of order `order` into entries of order `into_order`. Errors: as
    /// [`XArray::prepare`].
    pub fn prepare_split(&self, order: u32, into_order: u32) -> Result<NodeStock<N>> {
        assert!(order <= MAX_ORDER, "an order is at most MAX_ORDER");
        let mut stock = NodeStock::new(self.nodes);
        stock.allocate_up_to(nodes_to_split(order, into_order))?;
        Ok(stock)
    }
}

/// Returns how many nodes with this shift cover the indices from `first` to `last`.
fn nodes_covering(first: u64, last: u64, shift: u32) -> u32 {
    let nodes = (last >> (shift + SLOT_BITS)) - (first >> (shift + SLOT_BITS)) + 1;
    u32::try_from(nodes).unwrap_or(u32::MAX)
}

/// Returns the maximum number of new nodes that storing entries of order `order` over the range needs, whatever the
/// tree. Either the tree has full height already, and the stores need a new path of nodes through the tree. Or the tree
/// grows, and existing entries also need a path of nodes up to the new root.
fn nodes_to_store(first: u64, last: u64, order: u32) -> u32 {
    let lowest = word::shift_of(order);
    let levels = |from: u32, to: u32| (from..=to).step_by(SLOT_BITS as usize);
    let path =
        |top: u32| levels(lowest, top).fold(0u32, |sum, shift| sum.saturating_add(nodes_covering(first, last, shift)));
    let top = root_shift_for(last, lowest);
    let is_apart = |shift: &u32| *shift < lowest || first >> (shift + SLOT_BITS) != 0;
    let chain = levels(0, top).filter(|shift| *shift < top).filter(is_apart).count() as u32;
    path(MAX_SHIFT - SLOT_BITS).max(path(top).saturating_add(chain))
}

/// Returns the shift of the root node in the lowest tree that covers index `last` and has nodes of shift `lowest`.
pub(super) fn root_shift_for(last: u64, lowest: u32) -> u32 {
    let mut shift = lowest;
    while last >> (shift + SLOT_BITS) != 0 {
        shift += SLOT_BITS;
    }
    shift
}

/// Returns how many new nodes are needed to split one entry of order `order` into entries of order `into_order`.
fn nodes_to_split(order: u32, into_order: u32) -> u32 {
    let (from, to) = (word::shift_of(order), word::shift_of(into_order));
    // Each slot gets one node. Entries are in the two lowest levels only, so no level lies between.
    if to < from { 1 << (order - from) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of nodes to preallocate must equal known numbers: for one page, for the tallest tree, for a range
    /// over many leaves, and for splits.
    #[test]
    fn prepare_allocates_enough_nodes() {
        assert_eq!(nodes_to_store(0, 0, 0), 6);
        assert_eq!(nodes_to_store(MAX_INDEX, MAX_INDEX, 0), 13);
        assert_eq!(nodes_to_store(0, (1 << 18) - 1, 0), (1 << 12) + (1 << 6) + 1 + 3);
        assert_eq!(nodes_to_store(0, 511, 9), 5);
        assert_eq!(
            (nodes_to_split(9, 0), nodes_to_split(11, 5), nodes_to_split(9, 6), nodes_to_split(5, 0)),
            (8, 32, 0, 0)
        );
    }
}
