//! Source of nodes: a trait, so that arrays do not depend on the owner of the memory.

use super::arrays::Arrays;
use super::node::Node;
use pagemill_core::error::Result;

/// Owner of the nodes of arrays; many arrays share one.
///
/// Node numbers have 32 bits and are never 0.
///
/// Example: [`XArray`](super::XArray).
pub trait Nodes: Sized + Sync + 'static {
    /// The node of a number that was taken. Must be as cheap as indexing a table: readers call it at each level.
    fn node(&self, number: u32) -> &Node;

    /// Takes a node without any other user, with unspecified contents.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoAddresses`] if there are no more, [`pagemill_core::Error::System`] if the kernel refuses memory.
    fn take(&self) -> Result<u32>;

    /// Returns a node that no reader can access: it is clean, or its first slot is not empty.
    fn give(&self, number: u32);

    /// Retires a node that was unlinked, with all slots DEAD: [`Nodes::give`] follows after all current guards
    /// ([`super::pin`]) are dropped. Called under the lock of an array.
    fn retire(&'static self, number: u32);

    /// Processes retired nodes: called after [`Nodes::retire`], without the lock.
    fn collect(&'static self) {}

    /// The table of the arrays with nodes of this owner.
    fn arrays(&self) -> &Arrays<Self>;

    /// Whether this is a forked child, and the nodes are its parent's: their arrays are then not dropped here.
    fn are_inherited(&self) -> bool {
        false
    }
}
