//! Lists of free pages by order, and their halves: the buddy system of one pool.
//!
//! A free run of pages is described by its first frame: the word stores that it is free, its order, and whether its
//! bytes are zero; the owner word holds its neighbours in the free list. All other frames are *Tail*. Whole chunks that
//! are leased ([`super::leases`]) have a separate list. Guarded by the pool's `state`.

use super::leases::Leases;
use super::pool::Frame;
use super::word::Kind;
use pagemill_core::arena::Table;
use pagemill_core::sync::Relaxed;
use std::ops::Range;

/// Orders of a run: up to 512 pages of 4 KiB in a block.
pub(super) const ORDERS: usize = 10;

/// No frame: the end of a list.
const NONE: u32 = u32::MAX;

/// The list of whole chunks that are leased: used first, never given back.
const LEASED: usize = ORDERS;

/// The free lists.
pub(super) struct Buddies {
    first: [u32; ORDERS + 1],
    /// Whole chunks, leased or not.
    pub whole_count: u32,
    max_order: u8,
    pub leases: Leases,
}

impl Buddies {
    pub const fn new(max_order: u8, leases: Leases) -> Self {
        Self { first: [NONE; ORDERS + 1], whole_count: 0, max_order, leases }
    }

    fn list_of(&self, number: u32, order: u8) -> usize {
        let is_leased = order == self.max_order && self.leases.is_leased(number >> self.max_order);
        if is_leased { LEASED } else { usize::from(order) }
    }

    fn put(&mut self, frames: &Table<Frame>, number: u32, order: u8, is_zero: bool) {
        let list = self.list_of(number, order);
        let next = self.first[list];
        let frame = frames.get(number as usize);
        frame.word.release(order, is_zero);
        frame.link(NONE, next);
        if next != NONE {
            let after = frames.get(next as usize);
            after.link(number, after.links().1);
        }
        self.first[list] = number;
        self.whole_count += u32::from(order == self.max_order);
    }

    fn unlink(&mut self, frames: &Table<Frame>, number: u32, order: u8) {
        self.unlink_from(frames, number, order, self.list_of(number, order));
    }

    fn unlink_from(&mut self, frames: &Table<Frame>, number: u32, order: u8, list: usize) {
        let (before, after) = frames.get(number as usize).links();
        if before == NONE {
            self.first[list] = after;
        } else {
            let frame = frames.get(before as usize);
            frame.link(frame.links().0, after);
        }
        if after != NONE {
            let frame = frames.get(after as usize);
            frame.link(before, frame.links().1);
        }
        self.whole_count -= u32::from(order == self.max_order);
    }

    /// Takes a run of `order`, splitting the smallest larger one if necessary. Returns it and whether it reads zero.
    pub fn take(&mut self, frames: &Table<Frame>, order: u8) -> Option<(u32, bool)> {
        let found = (order..=self.max_order).find(|order| self.first_of(*order) != NONE)?;
        let number = self.first_of(found);
        let is_zero = frames.get(number as usize).word.load().is_zero();
        self.unlink(frames, number, found);
        for half in (order..found).rev() {
            self.put(frames, number + (1 << half), half, is_zero);
        }
        frames.get(number as usize).word.assign(Kind::Busy, order);
        Some((number, is_zero))
    }

    /// Frees a run and merges it with its free buddies.
    pub fn give(&mut self, frames: &Table<Frame>, mut number: u32, mut order: u8, mut is_zero: bool) {
        while order < self.max_order {
            // Chunks begin at multiples of their length, so buddies differ in one bit.
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
        self.put(frames, number, order, is_zero);
    }

    fn first_of(&self, order: u8) -> u32 {
        let leased = self.first[LEASED];
        if order == self.max_order && leased != NONE { leased } else { self.first[usize::from(order)] }
    }

    /// Whether a whole free chunk is leased.
    pub fn has_leased(&self) -> bool {
        self.first[LEASED] != NONE
    }

    /// Leases the run of chunks with memory around one to one more ring; none of it is given back until the ring ends
    /// that.
    pub fn lease(&mut self, frames: &Table<Frame>, chunk: u32) -> Option<Range<u32>> {
        let (run, is_new) = self.leases.lease(chunk)?;
        if is_new {
            self.move_whole(frames, run.clone(), usize::from(self.max_order));
        }
        Some(run)
    }

    /// Ends one ring's lease of the run that begins at a chunk.
    pub fn end_lease(&mut self, frames: &Table<Frame>, first: u32) {
        if let Some(run) = self.leases.end(first) {
            self.move_whole(frames, run, LEASED);
        }
    }

    /// Moves free whole chunks to the list where they belong now.
    fn move_whole(&mut self, frames: &Table<Frame>, run: Range<u32>, from: usize) {
        for chunk in run {
            let number = chunk << self.max_order;
            let state = frames.get(number as usize).word.load();
            if state.kind() == Kind::Free && state.order() == self.max_order {
                self.unlink_from(frames, number, self.max_order, from);
                self.put(frames, number, self.max_order, state.is_zero());
            }
        }
    }

    /// Takes one free whole chunk that is not leased.
    pub fn take_whole(&mut self, frames: &Table<Frame>) -> Option<u32> {
        let number = self.first[usize::from(self.max_order)];
        (number != NONE).then(|| {
            self.unlink(frames, number, self.max_order);
            frames.get(number as usize).word.assign(Kind::Tail, 0);
            number
        })
    }
}

impl Frame {
    fn link(&self, before: u32, after: u32) {
        self.owner.store(u64::from(before) << u32::BITS | u64::from(after), Relaxed);
    }

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
            leases.open(chunk).unwrap();
            leases.note_filled(chunk, true);
        });
        leases
    }

    /// Leased whole chunks are not given back, and are used first. After the lease they are like any other. Chunks
    /// freed during the lease are leased, too.
    #[test]
    fn leased_chunks_stay() {
        let frames = frames();
        let mut buddies = Buddies::new(MAX_ORDER, leases());
        buddies.leases.note_filled(1, false);
        [0, 2].into_iter().for_each(|chunk| buddies.give(&frames, chunk << MAX_ORDER, MAX_ORDER, true));
        assert_eq!(buddies.lease(&frames, 0), Some(0..1));
        assert!(buddies.has_leased());
        let (page, _) = buddies.take(&frames, 0).unwrap();
        assert!(page < 1 << MAX_ORDER && !buddies.has_leased());
        assert_eq!(buddies.take_whole(&frames), Some(2 << MAX_ORDER));
        assert_eq!((buddies.lease(&frames, 0), buddies.take_whole(&frames)), (Some(0..1), None));
        buddies.give(&frames, page, 0, false);
        assert!(buddies.has_leased() && buddies.whole_count == 1);
        buddies.end_lease(&frames, 0);
        assert_eq!(buddies.take_whole(&frames), None);
        buddies.end_lease(&frames, 0);
        assert!(!buddies.has_leased());
        assert_eq!(buddies.take_whole(&frames), Some(0));
        assert_eq!((buddies.take_whole(&frames), buddies.whole_count), (None, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Random takes and gives: no page is allocated twice, every run is aligned to its length, and after everything
        /// is freed all chunks are whole again.
        #[test]
        fn runs_never_overlap_and_join_again(steps in prop::collection::vec((0..=MAX_ORDER, any::<prop::sample::Index>()), 1..300)) {
            let frames = frames();
            let mut buddies = Buddies::new(MAX_ORDER, leases());
            (0..CHUNKS).for_each(|chunk| buddies.give(&frames, chunk << MAX_ORDER, MAX_ORDER, true));
            let mut used = vec![false; (CHUNKS << MAX_ORDER) as usize];
            let mut taken: Vec<(u32, u8)> = Vec::new();
            for (order, which) in steps {
                match buddies.take(&frames, order) {
                    Some((number, is_zero)) if taken.len() < 40 => {
                        prop_assert_eq!(number % (1 << order), 0);
                        let run = number as usize..(number + (1 << order)) as usize;
                        prop_assert!(used[run.clone()].iter().all(|used| !used));
                        prop_assert!(is_zero || taken.len() < 40);
                        used[run].fill(true);
                        taken.push((number, order));
                    }
                    other => {
                        if let Some((number, _)) = other {
                            buddies.give(&frames, number, order, false);
                        } else {
                            // No run of that length is free.
                            let len = 1 << order;
                            prop_assert!(used.chunks(len).all(|run| run.iter().any(|used| *used)));
                        }
                        if !taken.is_empty() {
                            let (number, order) = taken.swap_remove(which.index(taken.len()));
                            used[number as usize..(number + (1 << order)) as usize].fill(false);
                            buddies.give(&frames, number, order, false);
                        }
                    }
                }
            }
            taken.into_iter().for_each(|(number, order)| buddies.give(&frames, number, order, false));
            prop_assert_eq!(buddies.whole_count, CHUNKS);
            let whole: Vec<_> = std::iter::from_fn(|| buddies.take_whole(&frames)).collect();
            prop_assert_eq!(whole.len(), CHUNKS as usize);
        }
    }
}
