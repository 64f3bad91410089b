//! NUMA nodes: those of the machine, or logical ones, with which code for several nodes can be tested on one node.

use pagemill_sys::numa;

/// The set of NUMA nodes to which blocks are assigned.
///
/// Example: [`Layout`](super::Layout).
#[derive(Clone, Copy, Debug)]
pub struct Nodes {
    count: usize,
    are_real: bool,
}

impl Nodes {
    /// The NUMA nodes of this machine.
    pub fn real() -> Self {
        Self { count: numa::node_count(), are_real: true }
    }

    /// A set of `count` logical nodes, which have no memory of their own. The node of a thread follows from its CPU's
    /// number.
    pub fn logical(count: usize) -> Self {
        Self { count: count.clamp(1, numa::MAX_NODES), are_real: false }
    }

    #[inline]
    pub fn count(self) -> usize {
        self.count
    }

    /// Returns the node of the CPU on which this thread runs.
    #[inline]
    pub fn current(self) -> usize {
        if self.count == 1 {
            return 0;
        }
        let (cpu, node) = numa::current();
        if self.are_real { node.min(self.count - 1) } else { cpu % self.count }
    }

    /// Sets `node` as the preferred NUMA node of the `len_bytes` from `addr` on. Does nothing for logical nodes, or
    /// if the kernel refuses.
    pub fn bind(self, addr: usize, len_bytes: usize, node: usize) {
        debug_assert!(node < self.count);
        if self.count > 1 && self.are_real {
            let _ = numa::prefer(addr, len_bytes, node);
        }
    }
}
