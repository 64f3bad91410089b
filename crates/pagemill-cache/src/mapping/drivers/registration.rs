//! Registers memory of a cache with the ring of a queue. The kernel keeps registered pages pinned, so a read into them
//! costs less CPU time.
//!
//! Registers regions of 64 MiB at most. A region is registered when the bytes read into it add up to its length. The
//! pool leases the region's chunks, and keeps their memory meanwhile. Only the ring's own thread can unregister memory.
//! So reclaim sets a flag ([`Pool::request_lease_end`]) and calls the queue's waker. The queue's next call then
//! unregisters all regions. If the queue's thread makes no call after it was woken, the regions stay registered until
//! the queue is dropped.
#![allow(unsafe_code)] // leased memory as a buffer

use crate::folio::Pool;
use crate::mapping::request::Unpublished;
use pagemill_store::ring::RegionId;
use pagemill_store::{Buffer, Ring};
use std::ops::Range;
use std::ptr::NonNull;

/// Minimum number of bytes that a read counts for, because small reads profit most.
const MIN_COUNTED_BYTES: usize = 64 << 10;

/// Chunks of a pool that a ring may register.
///
/// # Invariants
///
/// The chunks are leased. [`Pool::end_lease`] is not called before this value is dropped.
struct Lease {
    pool: &'static Pool,
    chunks: Range<u32>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.end_lease(self.chunks.start);
    }
}

// SAFETY: leased chunks are mapped, readable and writable until the lease ends (type invariant, and the pool's). The
// lease is only registered: transfers use the folios in it, each of which is a buffer of its own.
unsafe impl Buffer for Lease {
    fn addr(&self) -> NonNull<u8> {
        // SAFETY: a pool does not begin at address 0.
        unsafe { NonNull::new_unchecked(self.pool.range_of(&self.chunks).0 as *mut u8) }
    }

    fn len_bytes(&self) -> usize {
        self.pool.range_of(&self.chunks).1
    }

    fn is_kept_from_children(&self) -> bool {
        self.pool.is_kept_from_children()
    }
}

/// A part of the pool's addresses that can be registered as one region.
struct Window {
    /// Registered addresses; empty if there are none.
    range: Range<usize>,
    /// The registered region and its length in bytes.
    region: Option<(RegionId, usize)>,
    /// Bytes read into unregistered memory of the window.
    unregistered_bytes: usize,
}

/// The memory that one queue has registered.
pub(crate) struct Registration {
    pool: &'static Pool,
    /// Windows by address, from the pool's first address on.
    windows: Vec<Window>,
    window_bytes: usize,
    /// A window is registered after this many bytes were read into it.
    threshold_bytes: usize,
    /// Whether no further memory can be registered: `RLIMIT_MEMLOCK`, an old kernel, or a ring of threads.
    is_refused: bool,
}

impl Registration {
    pub fn new(pool: &'static Pool, is_kernel: bool) -> Self {
        let window_bytes = pool.lease_bytes();
        let threshold_bytes = window_bytes.min(pool.max_bytes() as usize);
        Self { pool, windows: Vec::new(), window_bytes, threshold_bytes, is_refused: !is_kernel }
    }

    /// Returns the number of registered bytes.
    pub fn bytes(&self) -> usize {
        self.windows.iter().filter_map(|window| window.region.as_ref()).map(|(_, bytes)| bytes).sum()
    }

    /// Called before a read into the folio at page `number`. Registers the window of the folio if enough was read into
    /// it. Returns whether this call has registered memory.
    #[inline]
    pub fn note_read(&mut self, ring: &mut Ring<Unpublished>, number: u32, len_bytes: usize) -> bool {
        if self.is_refused {
            return false;
        }
        let addr = self.pool.addr(number);
        let at = (addr - self.pool.addr(0)) / self.window_bytes;
        if at >= self.windows.len() {
            self.windows.resize_with(at + 1, || Window { range: 0..0, region: None, unregistered_bytes: 0 });
        }
        let window = &mut self.windows[at];
        if window.range.contains(&addr) {
            return false;
        }
        window.unregistered_bytes += len_bytes.max(MIN_COUNTED_BYTES);
        window.unregistered_bytes >= self.threshold_bytes && self.register(ring, at, number)
    }

    #[cold]
    fn register(&mut self, ring: &mut Ring<Unpublished>, at: usize, number: u32) -> bool {
        self.windows[at].unregistered_bytes = 0;
        // If the window has more memory by now, all of it is registered again.
        if !self.unregister(ring, at) {
            return false;
        }
        let Some(chunks) = self.pool.lease(number) else { return false };
        let (addr, len_bytes) = self.pool.range_of(&chunks);
        match ring.register(Box::new(Lease { pool: self.pool, chunks })) {
            Ok(region) => {
                self.windows[at].region = Some((region, len_bytes));
                self.windows[at].range = addr..addr + len_bytes;
            }
            Err(_) => self.is_refused = true,
        }
        !self.is_refused
    }

    /// Unregisters a window. Returns whether the window has no region any more. Reads in flight in the region continue,
    /// and no further read uses it.
    fn unregister(&mut self, ring: &mut Ring<Unpublished>, at: usize) -> bool {
        let window = &mut self.windows[at];
        let Some((region, _)) = window.region else { return true };
        window.range = 0..0;
        ring.retire(region);
        // Fails while reads are in flight in the region. A later call tries again.
        if ring.unregister(region).is_err() {
            return false;
        }
        window.region = None;
        true
    }

    /// If the pool requests its memory, unregisters all windows without reads in flight.
    #[inline]
    pub fn unregister_if_requested(&mut self, ring: &mut Ring<Unpublished>) {
        if self.pool.is_lease_end_requested() {
            (0..self.windows.len()).for_each(|at| _ = self.unregister(ring, at));
        }
    }
}
