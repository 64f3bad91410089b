//! Memory for a bare io_uring: mappings with pages of the size to measure. Each mapping is divided into buffers for one
//! transfer each.

#![allow(unsafe_code)] // passes memory that it owns to io_uring

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use pagemill_store::Buffer;

use crate::native::Pages;

/// Maximum size of a mapping in bytes. Each mapping is registered with the ring as one buffer.
const MAX_MAPPING_BYTES: usize = 64 << 20;

/// The size of the pages of a memory mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PageKind {
    /// Huge pages of 2 MiB
    Huge,
    /// Pages of 4 KiB
    Small,
}

/// A memory mapping and its length in bytes. The mapping is divided into [`TransferBuffer`]s.
pub struct Memory(Arc<Pages>, usize);

/// The memory of one transfer, with the transfer's offset in the file and its start time.
///
/// # Invariants
///
/// The bytes belong to no other `TransferBuffer`, and they are accessed only through this value.
pub struct TransferBuffer {
    memory: Arc<Pages>,
    at: usize,
    len_bytes: usize,
    pub offset: u64,
    pub began: Instant,
}

/// Makes `count` buffers of `len_bytes` each, and the mappings that contain them.
pub fn make_buffers(
    kind: PageKind,
    count: usize,
    len_bytes: usize,
) -> Result<(Vec<Memory>, Vec<TransferBuffer>), String> {
    let (mut memories, mut parts) = (Vec::new(), Vec::new());
    let most = (MAX_MAPPING_BYTES / len_bytes).max(1);
    while parts.len() < count {
        let some = most.min(count - parts.len());
        let pages = match kind {
            PageKind::Huge => Pages::huge(some * len_bytes)?,
            PageKind::Small => Pages::small(some * len_bytes)?,
        };
        let memory = Arc::new(pages);
        // Each offset of the mapping is used for one `TransferBuffer`, and nothing else refers to it. This establishes
        // the type invariant.
        let of = |part: usize| TransferBuffer {
            memory: memory.clone(),
            at: part * len_bytes,
            len_bytes,
            offset: 0,
            began: Instant::now(),
        };
        parts.extend((0..some).map(of));
        memories.push(Memory(memory, some * len_bytes));
    }
    Ok((memories, parts))
}

impl TransferBuffer {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: inside the mapping, which lives as long as `self`; nothing else accesses these bytes (type
        // invariant).
        unsafe { std::slice::from_raw_parts(self.memory.address_at(self.at, self.len_bytes), self.len_bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: inside the mapping, which lives as long as `self`, and `&mut self` excludes other access.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address_at(self.at, self.len_bytes), self.len_bytes) }
    }
}

fn address(pages: &Pages, at: usize, len_bytes: usize) -> NonNull<u8> {
    // SAFETY: no mapping is at address 0.
    unsafe { NonNull::new_unchecked(pages.address_at(at, len_bytes)) }
}

// SAFETY: the bytes are mapped until the last `TransferBuffer` of the mapping is dropped, and only this one accesses
// them (type invariant).
unsafe impl Buffer for TransferBuffer {
    fn addr(&self) -> NonNull<u8> {
        address(&self.memory, self.at, self.len_bytes)
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

// SAFETY: the bytes are mapped until this value is dropped. It is only registered; its bytes are accessed through
// `TransferBuffer`s.
unsafe impl Buffer for Memory {
    fn addr(&self) -> NonNull<u8> {
        address(&self.0, 0, self.1)
    }

    fn len_bytes(&self) -> usize {
        self.1
    }
}
