//! Nodes allocated before the lock is taken, so that nothing can fail under the lock.

use super::XArray;
use super::nodes::Nodes;
use super::store::Writer;
use super::word::{self, MAX_INDEX, MAX_ORDER, MAX_SHIFT, SLOT_BITS};
use pagemill_core::error::Result;

/// Preallocated nodes for one or more changes, of any array with the same `Nodes`. Unused nodes are returned on drop.
///
/// Example: [`XArray`](super::XArray).
pub struct NodeStock<N: Nodes> {
    nodes: &'static N,
    /// Head of a list through the nodes; 0 if empty.
    head: u32,
    count: u32,
}

impl<N: Nodes> NodeStock<N> {
    pub(super) fn new(nodes: &'static N) -> Self {
        Self { nodes, head: 0, count: 0 }
    }

    /// Number of nodes in the stock.
    pub fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn fill(&mut self, count: u32) -> Result<()> {
        while self.count < count {
            let number = self.nodes.take()?;
            let node = self.nodes.node(number);
            node.clean();
            node.set_next(self.head);
            (self.head, self.count) = (number, self.count + 1);
        }
        Ok(())
    }

    pub(super) fn take(&mut self) -> u32 {
        assert!(self.count > 0, "a stock has as many nodes as the change needs");
        let number = self.head;
        self.head = self.nodes.node(number).next();
        self.count -= 1;
        number
    }

    pub(super) fn is_of(&self, nodes: &'static N) -> bool {
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
    /// Allocates nodes to store, or join to, consecutive entries of that order over `first..=last` under one lock.
    ///
    /// Cost: as many nodes as the tallest empty tree needs, taken and returned: six for one page, about one more for
    /// every 64. A caller with many changes should keep a stock and use [`XArray::top_up`].
    ///
    /// # Errors
    ///
    /// As `Nodes::take`; the nodes taken so far have been returned then.
    pub fn prepare(&self, first: u64, last: u64, order: u32) -> Result<NodeStock<N>> {
        let mut stock = NodeStock::new(self.nodes);
        self.top_up(&mut stock, first, last, order)?;
        Ok(stock)
    }

    /// Takes the lock, with nodes to store consecutive entries of that order over `first..=last`. The stock is empty if
    /// the tree has all nodes, the usual case.
    ///
    /// Cost: a descent of the tree; if a node is missing, also the cost of [`XArray::prepare`] and a second lock.
    /// Errors as there.
    pub fn lock_for(&self, first: u64, last: u64, order: u32) -> Result<(Writer<'_, N>, NodeStock<N>)> {
        let mut stock = NodeStock::new(self.nodes);
        let writer = self.lock();
        if writer.has_nodes_for(first, last, order) {
            return Ok((writer, stock));
        }
        drop(writer);
        self.top_up(&mut stock, first, last, order)?;
        Ok((self.lock(), stock))
    }

    /// Fills a stock up to the size that [`XArray::prepare`] returns. Cost: only the missing nodes. Errors as there.
    pub fn top_up(&self, stock: &mut NodeStock<N>, first: u64, last: u64, order: u32) -> Result<()> {
        assert!(first <= last, "a range has an index");
        assert!(last <= MAX_INDEX, "an index is at most MAX_INDEX");
        assert!(order <= MAX_ORDER, "an order is at most MAX_ORDER");
        stock.fill(nodes_to_store(first, last, order))
    }

    /// Allocates nodes to split one entry of `order` into entries of `into_order`. Errors as [`XArray::prepare`].
    pub fn prepare_split(&self, order: u32, into_order: u32) -> Result<NodeStock<N>> {
        assert!(order <= MAX_ORDER, "an order is at most MAX_ORDER");
        let mut stock = NodeStock::new(self.nodes);
        stock.fill(nodes_to_split(order, into_order))?;
        Ok(stock)
    }
}

/// Number of nodes of one level over the range.
fn span(first: u64, last: u64, shift: u32) -> u32 {
    let nodes = (last >> (shift + SLOT_BITS)) - (first >> (shift + SLOT_BITS)) + 1;
    u32::try_from(nodes).unwrap_or(u32::MAX)
}

/// The most nodes that such stores need for any tree: a descent in a tree of full height, or a tree that grows, in
/// which existing entries need a chain up to the new top, too.
fn nodes_to_store(first: u64, last: u64, order: u32) -> u32 {
    let lowest = word::shift_of(order);
    let levels = |from: u32, to: u32| (from..=to).step_by(SLOT_BITS as usize);
    let way = |top: u32| levels(lowest, top).fold(0u32, |sum, shift| sum.saturating_add(span(first, last, shift)));
    let top = top_for(last, lowest);
    let is_apart = |shift: &u32| *shift < lowest || first >> (shift + SLOT_BITS) != 0;
    let chain = levels(0, top).filter(|shift| *shift < top).filter(is_apart).count() as u32;
    way(MAX_SHIFT - SLOT_BITS).max(way(top).saturating_add(chain))
}

/// Shift of the lowest root that covers `last`, and entries in nodes of shift `lowest`.
pub(super) fn top_for(last: u64, lowest: u32) -> u32 {
    let mut shift = lowest;
    while last >> (shift + SLOT_BITS) != 0 {
        shift += SLOT_BITS;
    }
    shift
}

fn nodes_to_split(order: u32, into_order: u32) -> u32 {
    let (from, to) = (word::shift_of(order), word::shift_of(into_order));
    // One node below each slot; orders span two levels, so there is none in between.
    if to < from { 1 << (order - from) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Borders of the bound: a page, the tallest tree, a range over many leaves, huge entries.
    #[test]
    fn a_stock_has_enough_and_not_much_more() {
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
