//! The trait for sources of nodes. With it, arrays do not depend on the owner of the nodes' memory.

use super::arrays::Arrays;
use super::node::Node;
use pagemill_core::error::Result;

/// The owner of the nodes that any number of arrays use. It allocates and frees the nodes.
///
/// Node numbers have 32 bits and are never 0.
///
/// Example: [`XArray`](super::XArray).
pub trait Nodes: Sized + Sync + 'static {
    /// Returns the node with this number, which [`Nodes::take`] returned before. Must be as cheap as an index into a
    /// table: readers call it at each level.
    fn node(&self, number: u32) -> &Node;

    /// Allocates a node that has no other user. Returns its number. The contents of the node are unspecified.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoAddresses`] if all addresses for nodes are in use, [`pagemill_core::Error::System`] if
    /// the kernel refuses memory.
    fn take(&self) -> Result<u32>;

    /// Frees a node that no reader can access. Either the node is *clean* (see [`Node`]), or its first slot is not
    /// empty.
    fn give(&self, number: u32);

    /// Retires a node that was unlinked and whose slots are all DEAD. [`Nodes::give`] follows after all current guards
    /// ([`super::pin`]) are dropped. Called under the lock of an array.
    fn retire(&'static self, number: u32);

    /// Begins grace periods of retired nodes. Called after [`Nodes::retire`], by a thread that holds no lock of an
    /// array.
    fn collect(&'static self) {}

    /// Returns the table of the arrays that use these nodes.
    fn arrays(&self) -> &Arrays<Self>;

    /// Returns whether this process is a fork child and the nodes belong to its parent. Dropping an array then does
    /// nothing.
    fn are_inherited(&self) -> bool {
        false
    }
}
