//! Where nodes come from: a trait, so that arrays need not know whose memory they are in.

use super::arrays::Arrays;
use super::node::Node;
use crate::error::Result;

/// Who has the nodes of arrays; many arrays share one.
///
/// Numbers are not 0, and 32 bits.
pub trait Nodes: Sized + Sync + 'static {
    /// The node of this number, which was taken. Costs what a table's index does: readers call it at each level.
    fn node(&self, number: u32) -> &Node;

    /// A node that nobody else has, in whatever state.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoAddresses`] when there are no more, [`crate::Error::System`] if the kernel refuses memory.
    fn take(&self) -> Result<u32>;

    /// Takes back a node that no reader can have: clean, or with something in its first slot.
    fn give(&self, number: u32);

    /// Takes back a node that was cut off, of whose slots all are DEAD: [`Nodes::give`] follows when all guards ([`super::pin`])
    /// that are there now have gone. Called under the lock of an array.
    fn retire(&'static self, number: u32);

    /// Looks after what was retired: called outside of the lock, after [`Nodes::retire`].
    fn collect(&'static self) {}

    /// The arrays that have nodes of these.
    fn arrays(&self) -> &Arrays<Self>;

    /// Whether this is a fork child, and they are its parent's: what is in their arrays stays there.
    fn are_inherited(&self) -> bool {
        false
    }
}
