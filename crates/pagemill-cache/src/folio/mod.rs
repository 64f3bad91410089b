//! Pages and folios: the memory of a cache, in software pages of one size, and the protocol for accessing it.
//!
//! ```text
//!   Pool ---- address range in the arena's pool zone, in chunks: a block, or a page if that is larger
//!     |         | chunk | chunk | chunk |          memory comes a chunk at a time, in huge pages, and is reused
//!     |         `- pages: free runs of 1, 2, 4 .. pages (buddies), up to a chunk
//!     `------ frames: 16 bytes for each page, in a separate table
//!               word   state, order, pins, version        ([`word`])
//!               owner  first page of a folio: its owner; free page: its neighbours in the free list
//! ```
//!
//! A *folio* is a run of 1, 2, 4 .. consecutive pages that is handled as a unit. The word of its first page has the
//! folio's state. An index stores only the *number* of that page in the pool. The addresses of the page's frame and of
//! its memory follow from the number by arithmetic. A folio records its owner as an opaque file id and a page index.
//!
//! Bytes are accessed by copies ([`bytes`]) under the word's protocol. Uses `arena`. Locks: `state` (free lists), which
//! is never held while memory is brought in or returned. While a pool grows, the helper thread brings in chunks before
//! they are needed.

mod buddy;
pub(crate) mod bytes;
mod frame;
mod leases;
mod pool;
pub(crate) mod word;

pub(crate) use bytes::copy;
pub(crate) use frame::{Frame, Owner};
pub(crate) use pool::{MemoryKind, NewFolio, Pool};
