//! Large allocations for programs: the [`Heap`] of slots of 64 KiB and up.
//!
//! Uses `pagemill-core`. `pagemill-volatile` and the preload library `pagemill-malloc` allocate from the heap.

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the slot protocol only.
#[cfg(not(loom))]
mod heap;
#[cfg(all(loom, test))]
mod heap {
    #[allow(dead_code)] // the parts that only the heap uses
    mod slot;
}
#[cfg(all(test, not(loom)))]
mod test_process;

#[cfg(not(loom))]
pub use heap::{Allocation, Heap, MIN_BYTES};
