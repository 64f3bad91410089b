//! Memory nodes: real ones with a memory policy, or logical ones to test node code on one real node.

use pagemill_sys::numa;

/// The nodes that blocks are assigned to.
///
/// Example: [`Layout`](super::Layout).
#[derive(Clone, Copy, Debug)]
pub struct Nodes {
    count: usize,
    are_real: bool,
}

impl Nodes {
    /// The nodes of this machine.
    pub fn real() -> Self {
        Self { count: numa::node_count(), are_real: true }
    }

    /// `count` nodes without own memory; a thread's node follows from its CPU.
    pub fn logical(count: usize) -> Self {
        Self { count: count.clamp(1, numa::MAX_NODES), are_real: false }
    }

    #[inline]
    pub fn count(self) -> usize {
        self.count
    }

    /// The preferred memory node of this thread.
    #[inline]
    pub fn current(self) -> usize {
        if self.count == 1 {
            return 0;
        }
        let (cpu, node) = numa::current();
        if self.are_real { node.min(self.count - 1) } else { cpu % self.count }
    }

    /// Prefers pages from `node` for the range, if nodes are real. If the kernel refuses, its default applies.
    pub fn bind(self, addr: usize, len_bytes: usize, node: usize) {
        if self.count > 1 && self.are_real {
            let _ = numa::prefer(addr, len_bytes, node);
        }
    }
}
