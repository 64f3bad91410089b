//! What of a cache's memory a queue's ring has registered: the kernel has its pages at hand then, for less CPU a read.
//!
//! Of memory that reads go to time and again, 64 MiB at most at a time: once as much was read there as that has. What
//! is registered is lent by the pool, and not given back to the system. A ring is its thread's alone, and no other
//! thread can take memory out of it. So reclaim sets a flag ([`Pool::request_lease_end`]) and rings the queue's bell; the
//! queue's thread gives all of it back with its next call. A thread that neither calls nor listens keeps it, until the
//! queue is dropped.
#![allow(unsafe_code)] // memory that it was lent

use super::fill::Filling;
use crate::folio::Pool;
use pagemill_store::ring::RegionId;
use pagemill_store::{Buffer, Ring};
use std::ops::Range;
use std::ptr::NonNull;

/// A read counts as at least so much: the others are those that cost most for what they bring.
const LEAST_BYTES: usize = 64 << 10;

/// Chunks of a pool that a ring may register.
///
/// # Invariants
///
/// They are lent, and [`Pool::end_lease`] is not called before it is dropped.
struct Lease {
    pool: &'static Pool,
    chunks: Range<u32>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.end_lease(self.chunks.start);
    }
}

// SAFETY: lent chunks are mapped, readable and writable, until the lease ends (type invariant, and the pool's). It is registered only:
// transfers use folios of it, each of which is its own buffer.
unsafe impl Buffer for Lease {
    fn addr(&self) -> NonNull<u8> {
        // SAFETY: a pool does not begin at address 0.
        unsafe { NonNull::new_unchecked(self.pool.range_of(&self.chunks).0 as *mut u8) }
    }

    fn len_bytes(&self) -> usize {
        self.pool.range_of(&self.chunks).1
    }

    fn is_kept_from_children(&self) -> bool {
        self.pool.is_hugetlb()
    }
}

/// Memory around which reads were made.
struct Place {
    /// Addresses that are registered, if any.
    range: Range<usize>,
    /// With its length.
    region: Option<(RegionId, usize)>,
    /// Read beside them since.
    missed_bytes: usize,
}

/// What one queue has registered.
pub(super) struct Registered {
    pool: &'static Pool,
    /// By address, from the pool's first on.
    places: Vec<Place>,
    /// How long a place is, and how much is read there before it is registered.
    place_bytes: usize,
    after_bytes: usize,
    /// How many are registered.
    count: usize,
    /// The kernel does not want more of it: `RLIMIT_MEMLOCK`, an old one, threads.
    is_refused: bool,
}

impl Registered {
    pub fn new(pool: &'static Pool, is_kernel: bool) -> Self {
        let place_bytes = pool.lease_bytes();
        let after_bytes = place_bytes.min(pool.max_bytes() as usize);
        Self { pool, places: Vec::new(), place_bytes, after_bytes, count: 0, is_refused: !is_kernel }
    }

    /// Bytes that are registered.
    pub fn bytes(&self) -> usize {
        self.places.iter().filter_map(|place| place.region.as_ref()).map(|(_, bytes)| bytes).sum()
    }

    /// A read into memory is about to start. Registers what lies around it, if that pays; returns whether it did.
    #[inline]
    pub fn note(&mut self, ring: &mut Ring<Filling>, number: u32, len_bytes: usize) -> bool {
        if self.is_refused {
            return false;
        }
        let addr = self.pool.addr(number);
        let at = (addr - self.pool.addr(0)) / self.place_bytes;
        if at >= self.places.len() {
            self.places.resize_with(at + 1, || Place { range: 0..0, region: None, missed_bytes: 0 });
        }
        let place = &mut self.places[at];
        if place.range.contains(&addr) {
            return false;
        }
        place.missed_bytes += len_bytes.max(LEAST_BYTES);
        place.missed_bytes >= self.after_bytes && self.register(ring, at, number)
    }

    #[cold]
    fn register(&mut self, ring: &mut Ring<Filling>, at: usize, number: u32) -> bool {
        self.places[at].missed_bytes = 0;
        // The memory has grown since: once more, all of it.
        if !self.unregister(ring, at) {
            return false;
        }
        let Some(chunks) = self.pool.lease(number) else { return false };
        let (addr, len_bytes) = self.pool.range_of(&chunks);
        match ring.register(Box::new(Lease { pool: self.pool, chunks })) {
            Ok(region) => {
                self.places[at].region = Some((region, len_bytes));
                self.places[at].range = addr..addr + len_bytes;
                self.count += 1;
            }
            Err(_) => self.is_refused = true,
        }
        !self.is_refused
    }

    /// Takes a place's memory out of the ring; returns whether it has none any more. Reads under way there go on, and no other uses it.
    fn unregister(&mut self, ring: &mut Ring<Filling>, at: usize) -> bool {
        let place = &mut self.places[at];
        let Some((region, _)) = place.region else { return true };
        place.range = 0..0;
        ring.retire(region);
        // With reads under way there it is tried again.
        if ring.unregister(region).is_err() {
            return false;
        }
        place.region = None;
        self.count -= 1;
        true
    }

    /// Gives all back that no read is in flight in, if the pool wants it back.
    #[inline]
    pub fn comply(&mut self, ring: &mut Ring<Filling>) {
        if self.count > 0 && self.pool.is_lease_end_requested() {
            (0..self.places.len()).for_each(|at| _ = self.unregister(ring, at));
        }
    }
}
