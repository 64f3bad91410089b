//! Memory whose contents may be purged under pressure: [`Ranges`] by handle, [`Vranges`] by address.
//!
//! Uses `pagemill-core` and `pagemill-heap`. [`Base`] creates the parts that a process with such memory needs. The
//! crate `pagemill` re-exports what programs use; examples of these items use its names.

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the state words only.
#[cfg(not(loom))]
mod base;
#[cfg(not(loom))]
mod volatile;
#[cfg(all(loom, test))]
mod volatile {
    #[allow(dead_code)] // the parts that only the ranges use
    mod word;
}

#[cfg(not(loom))]
pub use base::Base;
#[cfg(not(loom))]
pub use volatile::{
    Behaviour, Blob, CacheCounts, Contents, List, Listed, MAX_RANGES, Pin, RangeLists, Ranges, VolatileBuf,
    VolatileCache, Vranges, ask, c, handle_fault, listed, range, vrange,
};
