//! Doubly linked lists of the blocks of one cache on one node, linked through their metadata. A block is in at most one
//! list of each kind.

use super::blocks::Blocks;
use super::meta::Links;

/// Heads and tails are block numbers plus one; 0: empty.
pub(super) struct Lists<const COUNT: usize, const KIND: usize> {
    heads: [u32; COUNT],
    tails: [u32; COUNT],
}

impl<const COUNT: usize, const KIND: usize> Lists<COUNT, KIND> {
    pub fn new() -> Self {
        Self { heads: [0; COUNT], tails: [0; COUNT] }
    }

    pub fn first(&self, list: usize) -> Option<u32> {
        self.heads[list].checked_sub(1)
    }

    pub fn iter<'a>(&self, blocks: &'a Blocks, list: usize) -> impl Iterator<Item = u32> + use<'a, COUNT, KIND> {
        std::iter::successors(self.first(list), |number| Self::next(blocks, *number))
    }

    /// The next block in the same list.
    pub fn next(blocks: &Blocks, number: u32) -> Option<u32> {
        Self::links(blocks, number).next.get().checked_sub(1)
    }

    fn links(blocks: &Blocks, number: u32) -> &Links {
        &blocks.block(number).links[KIND]
    }

    /// Inserts a block that is in no list at the front.
    pub fn put_first(&mut self, blocks: &Blocks, list: usize, number: u32) {
        let links = Self::links(blocks, number);
        let after = std::mem::replace(&mut self.heads[list], number + 1);
        links.list.set(list as u32);
        links.before.set(0);
        links.next.set(after);
        match after.checked_sub(1) {
            Some(after) => Self::links(blocks, after).before.set(number + 1),
            None => self.tails[list] = number + 1,
        }
    }

    /// Inserts a block that is in no list at the back.
    pub fn put_last(&mut self, blocks: &Blocks, list: usize, number: u32) {
        let links = Self::links(blocks, number);
        let before = std::mem::replace(&mut self.tails[list], number + 1);
        links.list.set(list as u32);
        links.before.set(before);
        links.next.set(0);
        match before.checked_sub(1) {
            Some(before) => Self::links(blocks, before).next.set(number + 1),
            None => self.heads[list] = number + 1,
        }
    }

    /// Moves a block to the back of its list.
    pub fn move_last(&mut self, blocks: &Blocks, number: u32) {
        self.remove(blocks, number);
        self.put_last(blocks, Self::links(blocks, number).list.get() as usize, number);
    }

    /// Removes a block from its list.
    pub fn remove(&mut self, blocks: &Blocks, number: u32) {
        let links = Self::links(blocks, number);
        let (before, after) = (links.before.get(), links.next.get());
        let list = links.list.get() as usize;
        match before.checked_sub(1) {
            Some(before) => Self::links(blocks, before).next.set(after),
            None => self.heads[list] = after,
        }
        match after.checked_sub(1) {
            Some(after) => Self::links(blocks, after).before.set(before),
            None => self.tails[list] = before,
        }
    }

    /// Checks that each list is the same in both directions.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check(&self, blocks: &Blocks) {
        for list in 0..COUNT {
            let mut forwards: Vec<u32> = self.iter(blocks, list).collect();
            let last = self.tails[list].checked_sub(1);
            let backwards =
                std::iter::successors(last, |number| Self::links(blocks, *number).before.get().checked_sub(1));
            forwards.reverse();
            assert_eq!(backwards.collect::<Vec<_>>(), forwards);
        }
    }
}
