//! Leases of a pool's chunks to io_uring rings. A ring registers the memory of leased chunks, so the kernel pins their
//! pages.
//!
//! Leased memory must not be returned to the system: the kernel would continue to use the old pages, and data that it
//! reads would be lost. The pool's address range is divided into slots of 64 MiB. At most one run of adjacent chunks
//! per slot is leased, to any number of rings: whether fork children inherit the memory (`MADV_DONTFORK`) is set for a
//! run as a whole. The pool's `state` lock protects all leases.

use pagemill_core::arena::Table;
use pagemill_core::error::Result;
use pagemill_core::sync::{AtomicU64, Relaxed};
use pagemill_core::units::BLOCK_BYTES;
use std::ops::Range;

/// Bytes of a slot of the pool's address range. A ring registers at most one range of memory in each slot. A larger
/// slot would keep memory leased longer than needed; a smaller slot would cost system calls more often.
const SLOT_BYTES: usize = 32 * BLOCK_BYTES;

/// Position of the field `first` in a packed [`LeaseSlot`].
const FIRST_SHIFT: u32 = 32;
/// Position of the field `count` in a packed [`LeaseSlot`].
const COUNT_SHIFT: u32 = 40;
/// Position of the field `rings` in a packed [`LeaseSlot`].
const RINGS_SHIFT: u32 = 48;

/// The leases in one slot of 64 MiB, which are packed into one word.
#[derive(Clone, Copy)]
struct LeaseSlot {
    /// One bit for each chunk of the slot: whether it has memory.
    filled: u32,
    /// First chunk of the leased run, counted from the slot's start.
    first: u8,
    /// Number of chunks of the leased run.
    count: u8,
    /// Number of rings that lease the run.
    rings: u16,
}

impl LeaseSlot {
    fn unpack(word: u64) -> Self {
        Self {
            filled: word as u32,
            first: (word >> FIRST_SHIFT) as u8,
            count: (word >> COUNT_SHIFT) as u8,
            rings: (word >> RINGS_SHIFT) as u16,
        }
    }

    fn pack(self) -> u64 {
        u64::from(self.filled)
            | u64::from(self.first) << FIRST_SHIFT
            | u64::from(self.count) << COUNT_SHIFT
            | u64::from(self.rings) << RINGS_SHIFT
    }

    /// Returns whether the chunk at position `at` of the slot is leased.
    fn is_leased(self, at: u32) -> bool {
        self.rings > 0 && (u32::from(self.first)..u32::from(self.first + self.count)).contains(&at)
    }

    /// Returns the longest run of chunks with memory that contains chunk `at`. The run is empty if chunk `at` has no
    /// memory.
    fn run_around(self, at: u32) -> Range<u32> {
        debug_assert!(at < u32::BITS);
        let above = (self.filled >> at).trailing_ones();
        let below = (self.filled << (u32::BITS - 1 - at)).leading_ones();
        if above == 0 { at..at } else { at + 1 - below..at + above }
    }
}

/// The leases of one pool, by slot.
pub(super) struct Leases {
    slots: Table<AtomicU64>,
    /// Number of chunks per slot, up to 32. The first slot begins with chunk 0.
    pub chunks: u32,
}

impl Leases {
    /// Creates the leases of a pool of `max_chunks` chunks without memory.
    pub fn new(max_chunks: usize, chunk_bytes: usize) -> Result<Self> {
        let chunks = (SLOT_BYTES / chunk_bytes).clamp(1, u32::BITS as usize);
        Ok(Self { slots: Table::new(max_chunks.div_ceil(chunks))?, chunks: chunks as u32 })
    }

    /// Commits the memory for the state of the slot that begins with `chunk`. Does nothing if `chunk` is not the first
    /// chunk of its slot.
    pub fn commit_slot_state(&self, chunk: u32) -> Result<()> {
        let slot = (chunk / self.chunks) as usize;
        if chunk.is_multiple_of(self.chunks) { self.slots.open(0, slot, slot + 1) } else { Ok(()) }
    }

    /// Returns the resident bytes of the slot states for the first `chunks` chunks.
    pub fn resident_bytes(&self, chunks: u32) -> u64 {
        self.slots.resident_bytes(0, chunks.div_ceil(self.chunks) as usize)
    }

    /// Changes the state of a chunk's slot. `change` gets the slot state, and the position of the chunk in the slot.
    fn change<R>(&self, chunk: u32, change: impl FnOnce(&mut LeaseSlot, u32) -> R) -> R {
        let word = self.slots.get((chunk / self.chunks) as usize);
        let mut slot = LeaseSlot::unpack(word.load(Relaxed));
        let result = change(&mut slot, chunk % self.chunks);
        word.store(slot.pack(), Relaxed);
        result
    }

    /// Records whether a chunk has memory.
    pub fn note_filled(&self, chunk: u32, is_filled: bool) {
        self.change(chunk, |slot, at| {
            debug_assert!(is_filled || !slot.is_leased(at), "a leased chunk loses its memory");
            debug_assert!((slot.filled >> at & 1 == 1) != is_filled, "a chunk is filled once");
            slot.filled = slot.filled & !(1 << at) | u32::from(is_filled) << at;
        });
    }

    /// Returns whether a ring leases the chunk.
    pub fn is_leased(&self, chunk: u32) -> bool {
        let slot = LeaseSlot::unpack(self.slots.get((chunk / self.chunks) as usize).load(Relaxed));
        slot.is_leased(chunk % self.chunks)
    }

    /// Leases the run of chunks with memory around a chunk to one more ring. Returns the run, and whether the run was
    /// not leased before. Returns `None` if the chunk has no memory, or if a different run of its slot is leased.
    pub fn lease(&self, chunk: u32) -> Option<(Range<u32>, bool)> {
        let begin = chunk - chunk % self.chunks;
        self.change(chunk, |slot, at| {
            let is_new = slot.rings == 0;
            if is_new {
                let run = slot.run_around(at);
                (slot.first, slot.count) = (run.start as u8, run.len() as u8);
            }
            if slot.rings == u16::MAX || !(slot.first..slot.first + slot.count).contains(&(at as u8)) {
                return None;
            }
            debug_assert!(slot.filled >> at & 1 == 1, "a leased chunk has memory");
            slot.rings += 1;
            let first = begin + u32::from(slot.first);
            Some((first..first + u32::from(slot.count), is_new))
        })
    }

    /// Ends one ring's lease of the run that begins with `first`. Returns the run if no ring leases it any more.
    pub fn end(&self, first: u32) -> Option<Range<u32>> {
        self.change(first, |slot, at| {
            assert!(slot.rings > 0 && u32::from(slot.first) == at, "not leased");
            slot.rings -= 1;
            (slot.rings == 0).then(|| first..first + u32::from(slot.count))
        })
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    fn leases(filled: &[u32]) -> Leases {
        let leases = Leases::new(96, BLOCK_BYTES).unwrap();
        (0..96).for_each(|chunk| leases.commit_slot_state(chunk).unwrap());
        filled.iter().for_each(|chunk| leases.note_filled(*chunk, true));
        leases
    }

    /// A lease must cover the longest run of chunks with memory, within one slot. A chunk that gets memory next to a
    /// leased run must not be leased until all leases of the slot have ended.
    #[test]
    fn a_leased_run_ends_where_memory_ends() {
        let all: Vec<u32> = (0..96).filter(|chunk| ![3, 40, 62].contains(chunk)).collect();
        let leases = leases(&all);
        for (chunk, run) in [(0, 0..3), (31, 4..32), (32, 32..40), (63, 63..64), (64, 64..96)] {
            assert_eq!(leases.lease(chunk), Some((run.clone(), true)), "{chunk}");
            assert!(leases.is_leased(run.start) && leases.is_leased(run.end - 1));
            assert!(run.start % 32 == 0 || !leases.is_leased(run.start - 1));
            assert_eq!(leases.end(run.start), Some(run.clone()));
            assert!(!run.clone().any(|chunk| leases.is_leased(chunk)));
        }
        assert_eq!(leases.lease(3), None, "the chunk has no memory");
        assert_eq!(leases.lease(41), Some((41..62, true)));
        leases.note_filled(40, true);
        assert_eq!((leases.lease(40), leases.lease(35)), (None, None), "another run is leased");
        assert_eq!(leases.lease(61), Some((41..62, false)), "the same run is leased to a second ring");
        assert_eq!((leases.end(41), leases.is_leased(50)), (None, true));
        assert_eq!(leases.end(41), Some(41..62));
        assert_eq!(leases.lease(61), Some((32..62, true)));
    }

    /// A chunk larger than 64 MiB must be a slot of its own.
    #[test]
    fn large_chunks_are_leased_separately() {
        let leases = Leases::new(4, 4 * SLOT_BYTES).unwrap();
        (0..4).for_each(|chunk| leases.commit_slot_state(chunk).unwrap());
        (0..2).for_each(|chunk| leases.note_filled(chunk, true));
        assert_eq!(leases.lease(1), Some((1..2, true)));
        assert_eq!((leases.lease(0), leases.lease(2)), (Some((0..1, true)), None));
        assert!(leases.is_leased(0) && leases.is_leased(1) && !leases.is_leased(2));
    }
}
