//! The buddy allocator of one pool: free lists of runs of 1, 2, 4 .. pages.
//!
//! The first frame of a free run describes the run. The frame's state word stores that the run is free, its order, and
//! whether all its bytes are zero. The frame's owner word stores the previous and the next run of the free list. All
//! other frames of the run are *Tail*. Free chunks that are leased to rings ([`super::leases`]) have a list of their
//! own. The pool's `state` lock protects the lists and the words of free runs.

use super::frame::Frame;
use super::leases::Leases;
use super::word::Kind;
use pagemill_core::arena::Table;
use pagemill_core::sync::Relaxed;
use std::ops::Range;

/// Number of possible orders of a run. A run has from 1 page to 512 pages of 4 KiB, which is a block.
pub(super) const ORDER_COUNT: usize = 10;

/// Marks the end of a free list, in place of a frame number.
const END_OF_LIST: u32 = u32::MAX;

/// Index of the list of free chunks that are leased to rings. These chunks are allocated first, and are not returned to
/// the system while they are leased.
const LEASED_LIST: usize = ORDER_COUNT;

/// The free lists of a pool.
pub(super) struct Buddies {
    /// First run of each free list; [`END_OF_LIST`] if the list is empty.
    first: [u32; ORDER_COUNT + 1],
    /// Number of completely free chunks, leased or not.
    pub free_chunk_count: u32,
    /// Log2 of the number of pages of a chunk.
    max_order: u8,
    pub leases: Leases,
}

impl Buddies {
    pub const fn new(max_order: u8, leases: Leases) -> Self {
        Self { first: [END_OF_LIST; ORDER_COUNT + 1], free_chunk_count: 0, max_order, leases }
    }

    /// Returns the index of the free list for the run of 2^`order` pages from page `number` on.
    fn list_of(&self, number: u32, order: u8) -> usize {
        let is_leased = order == self.max_order && self.leases.is_leased(number >> self.max_order);
        if is_leased { LEASED_LIST } else { usize::from(order) }
    }

    /// Makes a run of 2^`order` pages free, and adds the run to its free list.
    fn push(&mut self, frames: &Table<Frame>, number: u32, order: u8, is_zero: bool) {
        let list = self.list_of(number, order);
        let next = self.first[list];
        debug_assert!(order <= self.max_order && number.is_multiple_of(1 << order), "free runs are aligned");
        debug_assert!(next != number, "the run is in no list");
        let frame = frames.get(number as usize);
        frame.word.set_free(order, is_zero);
        frame.set_links(END_OF_LIST, next);
        if next != END_OF_LIST {
            let after = frames.get(next as usize);
            after.set_links(number, after.links().1);
        }
        self.first[list] = number;
        self.free_chunk_count += u32::from(order == self.max_order);
    }

    /// Removes a run from its free list.
    fn unlink(&mut self, frames: &Table<Frame>, number: u32, order: u8) {
        self.unlink_from(frames, number, order, self.list_of(number, order));
    }

    /// Removes a run from the free list `list`.
    fn unlink_from(&mut self, frames: &Table<Frame>, number: u32, order: u8, list: usize) {
        let (before, after) = frames.get(number as usize).links();
        let state = frames.get(number as usize).word.load();
        debug_assert!(state.kind() == Kind::Free && state.order() == order, "only free runs are in a list");
        if before == END_OF_LIST {
            debug_assert!(self.first[list] == number, "the run is in this list");
            self.first[list] = after;
        } else {
            let frame = frames.get(before as usize);
            debug_assert!(frame.links().1 == number, "neighbours in a list refer to each other");
            frame.set_links(frame.links().0, after);
        }
        if after != END_OF_LIST {
            let frame = frames.get(after as usize);
            debug_assert!(frame.links().0 == number, "neighbours in a list refer to each other");
            frame.set_links(before, frame.links().1);
        }
        self.free_chunk_count -= u32::from(order == self.max_order);
    }

    /// Allocates a run of 2^`order` pages, splitting the smallest larger run if necessary. Returns its first page, and
    /// whether all its bytes are zero.
    pub fn allocate(&mut self, frames: &Table<Frame>, order: u8) -> Option<(u32, bool)> {
        let found = (order..=self.max_order).find(|order| self.first_of(*order) != END_OF_LIST)?;
        let number = self.first_of(found);
        let is_zero = frames.get(number as usize).word.load().is_zero();
        self.unlink(frames, number, found);
        for half in (order..found).rev() {
            self.push(frames, number + (1 << half), half, is_zero);
        }
        frames.get(number as usize).word.assign(Kind::Busy, order);
        Some((number, is_zero))
    }

    /// Frees a run, and merges the run with its buddies as far as they are free.
    pub fn free(&mut self, frames: &Table<Frame>, mut number: u32, mut order: u8, mut is_zero: bool) {
        debug_assert!(order <= self.max_order && number.is_multiple_of(1 << order), "allocated runs are aligned");
        debug_assert!(
            order == self.max_order || frames.get(number as usize).word.load().kind() != Kind::Free,
            "a run is freed once"
        );
        while order < self.max_order {
            // The numbers of two buddies differ in one bit, because chunks begin at multiples of their length.
            let buddy = number ^ (1 << order);
            let state = frames.get(buddy as usize).word.load();
            if state.kind() != Kind::Free || state.order() != order {
                break;
            }
            self.unlink(frames, buddy, order);
            is_zero &= state.is_zero();
            frames.get(number.max(buddy) as usize).word.assign(Kind::Tail, 0);
            number = number.min(buddy);
            order += 1;
        }
        self.push(frames, number, order, is_zero);
    }

    /// Returns the first page of a free run of 2^`order` pages. Prefers leased chunks.
    fn first_of(&self, order: u8) -> u32 {
        let leased = self.first[LEASED_LIST];
        if order == self.max_order && leased != END_OF_LIST { leased } else { self.first[usize::from(order)] }
    }

    /// Returns whether a completely free chunk is leased.
    pub fn has_leased(&self) -> bool {
        self.first[LEASED_LIST] != END_OF_LIST
    }

    /// Leases the chunk, and adjacent chunks that have memory, to one more ring. These chunks are not returned to the
    /// system until the ring ends its lease.
    pub fn lease(&mut self, frames: &Table<Frame>, chunk: u32) -> Option<Range<u32>> {
        let (run, is_new) = self.leases.lease(chunk)?;
        if is_new {
            self.move_free_chunks(frames, run.clone(), usize::from(self.max_order));
        }
        Some(run)
    }

    /// Ends one ring's lease of the chunks that begin with `first`.
    pub fn end_lease(&mut self, frames: &Table<Frame>, first: u32) {
        if let Some(run) = self.leases.end(first) {
            self.move_free_chunks(frames, run, LEASED_LIST);
        }
    }

    /// Moves the completely free chunks of `run` from the list `from` to the list of leased chunks if the chunks are
    /// leased now, else to the list of unleased chunks.
    fn move_free_chunks(&mut self, frames: &Table<Frame>, run: Range<u32>, from: usize) {
        for chunk in run {
            let number = chunk << self.max_order;
            let state = frames.get(number as usize).word.load();
            if state.kind() == Kind::Free && state.order() == self.max_order {
                self.unlink_from(frames, number, self.max_order, from);
                self.push(frames, number, self.max_order, state.is_zero());
            }
        }
    }

    /// Takes a completely free chunk that is not leased out of its free list. Returns the number of its first page.
    pub fn take_free_chunk(&mut self, frames: &Table<Frame>) -> Option<u32> {
        let number = self.first[usize::from(self.max_order)];
        (number != END_OF_LIST).then(|| {
            debug_assert!(!self.leases.is_leased(number >> self.max_order), "a leased chunk keeps its memory");
            self.unlink(frames, number, self.max_order);
            frames.get(number as usize).word.assign(Kind::Tail, 0);
            number
        })
    }
}

impl Frame {
    /// Stores the previous and the next run in the free list of the run that begins at this frame.
    fn set_links(&self, before: u32, after: u32) {
        self.owner.store(u64::from(before) << u32::BITS | u64::from(after), Relaxed);
    }

    /// Returns the previous and the next run in the free list of the run that begins at this frame.
    fn links(&self) -> (u32, u32) {
        let links = self.owner.load(Relaxed);
        ((links >> u32::BITS) as u32, links as u32)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use pagemill_core::units::BLOCK_BYTES;
    use proptest::prelude::*;

    const MAX_ORDER: u8 = 5;
    const CHUNKS: u32 = 3;

    fn frames() -> Table<Frame> {
        Table::new_open((CHUNKS << MAX_ORDER) as usize).unwrap()
    }

    fn leases() -> Leases {
        let leases = Leases::new(CHUNKS as usize, BLOCK_BYTES).unwrap();
        (0..CHUNKS).for_each(|chunk| {
            leases.commit_slot_state(chunk).unwrap();
            leases.note_filled(chunk, true);
        });
        leases
    }

    /// Leased free chunks must not be returned to the system, and must be allocated first. The same must hold for a
    /// chunk that is freed during its lease. After the lease a free chunk must be returned again.
    #[test]
    fn leased_chunks_are_not_returned() {
        let frames = frames();
        let mut buddies = Buddies::new(MAX_ORDER, leases());
        buddies.leases.note_filled(1, false);
        [0, 2].into_iter().for_each(|chunk| buddies.free(&frames, chunk << MAX_ORDER, MAX_ORDER, true));
        assert_eq!(buddies.lease(&frames, 0), Some(0..1));
        assert!(buddies.has_leased());
        let (page, _) = buddies.allocate(&frames, 0).unwrap();
        assert!(page < 1 << MAX_ORDER && !buddies.has_leased());
        assert_eq!(buddies.take_free_chunk(&frames), Some(2 << MAX_ORDER));
        assert_eq!((buddies.lease(&frames, 0), buddies.take_free_chunk(&frames)), (Some(0..1), None));
        buddies.free(&frames, page, 0, false);
        assert!(buddies.has_leased() && buddies.free_chunk_count == 1);
        buddies.end_lease(&frames, 0);
        assert_eq!(buddies.take_free_chunk(&frames), None);
        buddies.end_lease(&frames, 0);
        assert!(!buddies.has_leased());
        assert_eq!(buddies.take_free_chunk(&frames), Some(0));
        assert_eq!((buddies.take_free_chunk(&frames), buddies.free_chunk_count), (None, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// After random allocations and frees no page may be allocated twice, and every run must be aligned to its
        /// length. A run that is reported as zero must consist of pages that were zero when they were freed. After
        /// everything is freed all chunks must be completely free.
        #[test]
        fn runs_never_overlap_and_merge_when_freed(steps in prop::collection::vec((0..=MAX_ORDER, any::<prop::sample::Index>()), 1..300)) {
            let frames = frames();
            let mut buddies = Buddies::new(MAX_ORDER, leases());
            (0..CHUNKS).for_each(|chunk| buddies.free(&frames, chunk << MAX_ORDER, MAX_ORDER, true));
            let mut used = vec![false; (CHUNKS << MAX_ORDER) as usize];
            let mut zero = vec![true; used.len()];
            let mut taken: Vec<(u32, u8)> = Vec::new();
            for (order, which) in steps {
                match buddies.allocate(&frames, order) {
                    Some((number, is_zero)) if taken.len() < 40 => {
                        prop_assert_eq!(number % (1 << order), 0);
                        let run = number as usize..(number + (1 << order)) as usize;
                        prop_assert!(used[run.clone()].iter().all(|used| !used));
                        prop_assert!(!is_zero || zero[run.clone()].iter().all(|zero| *zero));
                        used[run].fill(true);
                        taken.push((number, order));
                    }
                    other => {
                        if let Some((number, _)) = other {
                            zero[number as usize..(number + (1 << order)) as usize].fill(false);
                            buddies.free(&frames, number, order, false);
                        } else {
                            // The allocation failed, so no aligned run of that length is free.
                            let len = 1 << order;
                            prop_assert!(used.chunks(len).all(|run| run.iter().any(|used| *used)));
                        }
                        if !taken.is_empty() {
                            let (number, order) = taken.swap_remove(which.index(taken.len()));
                            let (run, is_zero) = (number as usize..(number + (1 << order)) as usize, which.index(2) == 0);
                            used[run.clone()].fill(false);
                            zero[run].fill(is_zero);
                            buddies.free(&frames, number, order, is_zero);
                        }
                    }
                }
            }
            taken.into_iter().for_each(|(number, order)| buddies.free(&frames, number, order, false));
            prop_assert_eq!(buddies.free_chunk_count, CHUNKS);
            let whole: Vec<_> = std::iter::from_fn(|| buddies.take_free_chunk(&frames)).collect();
            prop_assert_eq!(whole.len(), CHUNKS as usize);
        }
    }
}
