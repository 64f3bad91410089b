//! Pages and folios: the memory of a cache, in software pages of one size, and the protocol for accessing it.
//!
//! ```text
//!   Pool ---- window of addresses in the arena's pool zone, in chunks: a block, or a page if that is larger
//!     |         | chunk | chunk | chunk |          brought in as a whole, huge, faulted once, then recycled
//!     |         `- pages: buddies of 1, 2, 4 .. pages, up to the chunk
//!     `------ frames: 16 bytes for each page, out of line
//!               word   state, order, pins, version        ([`word`])
//!               owner  first page of a folio: its owner; free page: its neighbours in the free list
//! ```
//!
//! A *folio* is 1, 2, 4 .. consecutive pages, handled as one: the word of its first page holds its state. Page and
//! memory are found by arithmetic from the *frame number*, which is all that an index stores. A folio knows its owner
//! as an opaque id and an index.
//!
//! Bytes are accessed by copies ([`bytes`]) under the word's protocol. Below: `arena`. Locks: `state` (free lists),
//! never held while memory is brought in or given back.

mod buddy;
pub(crate) mod bytes;
mod leases;
mod pool;
pub(crate) mod word;

pub(crate) use pool::{Frame, Owner, Pool, Taken};
