//! Lists of free pages by order, and their halves: the buddy system of one pool.
//!
//! A free run of pages is known by its first frame: the word says that it is free, of which order, and whether its bytes
//! are zero; the owner word holds the neighbours in the list. All else says *Tail*. Guarded by the pool's `books`.

use super::pool::Frame;
use super::word::Kind;
use crate::arena::Table;
use crate::sync::Relaxed;

/// Orders that a run can have: up to 512 pages of 4 KiB in a block.
pub(super) const ORDERS: usize = 10;

/// No frame: the end of a list.
const NONE: u32 = u32::MAX;

/// The lists.
pub(super) struct Buddies {
    first: [u32; ORDERS],
    /// Of whole chunks.
    pub whole_count: u32,
    max_order: u8,
}

impl Buddies {
    pub const fn new(max_order: u8) -> Self {
        Self { first: [NONE; ORDERS], whole_count: 0, max_order }
    }

    fn put(&mut self, frames: &Table<Frame>, number: u32, order: u8, is_zero: bool) {
        let next = self.first[usize::from(order)];
        let frame = frames.get(number as usize);
        frame.word.release(order, is_zero);
        frame.link(NONE, next);
        if next != NONE {
            let after = frames.get(next as usize);
            after.link(number, after.links().1);
        }
        self.first[usize::from(order)] = number;
        self.whole_count += u32::from(order == self.max_order);
    }

    fn unlink(&mut self, frames: &Table<Frame>, number: u32, order: u8) {
        let (before, after) = frames.get(number as usize).links();
        if before == NONE {
            self.first[usize::from(order)] = after;
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

    /// Takes a run of `order` out, splitting a larger one if it must: the smallest that serves. Says whether it reads zero.
    pub fn take(&mut self, frames: &Table<Frame>, order: u8) -> Option<(u32, bool)> {
        let found = (order..=self.max_order).find(|order| self.first[usize::from(*order)] != NONE)?;
        let number = self.first[usize::from(found)];
        let is_zero = frames.get(number as usize).word.load().is_zero();
        self.unlink(frames, number, found);
        for half in (order..found).rev() {
            self.put(frames, number + (1 << half), half, is_zero);
        }
        frames.get(number as usize).word.assign(Kind::Busy, order);
        Some((number, is_zero))
    }

    /// Takes a run back; it joins its free buddies.
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

    /// Takes one whole chunk out that nobody uses.
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
    use proptest::prelude::*;

    const MAX_ORDER: u8 = 5;
    const CHUNKS: u32 = 3;

    fn frames() -> Table<Frame> {
        Table::new_open((CHUNKS << MAX_ORDER) as usize).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Random takes and gives: no page is handed out twice, every run is aligned to its length, and when all is given
        /// back all chunks are whole again.
        #[test]
        fn runs_never_overlap_and_join_again(steps in prop::collection::vec((0..=MAX_ORDER, any::<prop::sample::Index>()), 1..300)) {
            let frames = frames();
            let mut buddies = Buddies::new(MAX_ORDER);
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
                            // Not one run of that length is free.
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
