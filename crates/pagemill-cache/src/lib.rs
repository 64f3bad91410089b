//! The page cache: files in memory ([`mapping`]), in folios of one to many pages.
//!
//! Uses `pagemill-core`, `pagemill-slab`, `pagemill-xarray` and `pagemill-store`. The nodes of its indices lie in a
//! slab cache, so that they can be moved ([`IndexNodes`]). The crate `pagemill` re-exports what programs use; examples
//! of these items use its names.

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the words of folios only.
#[cfg(not(loom))]
mod folio;
#[cfg(all(loom, test))]
mod folio {
    #[allow(dead_code)] // the parts that only folios use
    mod word;
}
#[cfg(not(loom))]
pub mod mapping;
#[cfg(not(loom))]
mod nodes;
#[cfg(all(test, not(any(loom, shuttle))))]
mod test_process;

#[cfg(not(loom))]
pub use mapping::policy::{Always, Ask, Auto, Cause, Choice, Never};
#[cfg(not(loom))]
pub use mapping::{
    Advice, Builder, Bytes, Caches, Cursor, Exclusive, Fetch, Fetched, FolioHint, Holder, Mapping, PageCache, Pin,
    Pins, Policy, Prefaulted, PrivateView, Queue, Reuse, SharedMemory, Source, Usage, View, ViewMut, Writeback,
    ask_for_caches,
};
#[cfg(not(loom))]
pub use nodes::{IndexNodes, NodeCache};
