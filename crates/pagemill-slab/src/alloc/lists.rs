//! Doubly linked lists of the blocks of one cache on one node. The links lie in the metadata of the blocks. There are
//! several kinds of lists, and a block is in at most one list of each kind.

use crate::alloc::blocks::Blocks;
use crate::alloc::meta::Links;

/// `COUNT` lists of blocks. Their links are in entry `KIND` of each block's array of links.
pub(crate) struct Lists<const COUNT: usize, const KIND: usize> {
    /// For each list, the number of its first block plus one; 0 if the list is empty.
    heads: [u32; COUNT],
    /// For each list, the number of its last block plus one; 0 if the list is empty.
    tails: [u32; COUNT],
}

impl<const COUNT: usize, const KIND: usize> Default for Lists<COUNT, KIND> {
    fn default() -> Self {
        Self { heads: [0; COUNT], tails: [0; COUNT] }
    }
}

impl<const COUNT: usize, const KIND: usize> Lists<COUNT, KIND> {
    /// Returns the number of the first block in list `list`; `None` if the list is empty.
    pub fn first(&self, list: usize) -> Option<u32> {
        self.heads[list].checked_sub(1)
    }

    pub fn iter<'a>(&self, blocks: &'a Blocks, list: usize) -> impl Iterator<Item = u32> + use<'a, COUNT, KIND> {
        std::iter::successors(self.first(list), |block_number| Self::next(blocks, *block_number))
    }

    /// Returns the number of the block that follows `block_number` in its list.
    pub fn next(blocks: &Blocks, block_number: u32) -> Option<u32> {
        Self::links(blocks, block_number).next.get().checked_sub(1)
    }

    fn links(blocks: &Blocks, block_number: u32) -> &Links {
        &blocks.block(block_number).links[KIND]
    }

    /// Makes `after` the block that follows `previous` in list `list`. Both are block numbers plus one: after 0 the list
    /// begins, and before 0 it ends.
    fn connect(&mut self, blocks: &Blocks, list: usize, previous: u32, after: u32) {
        match previous.checked_sub(1) {
            Some(previous) => Self::links(blocks, previous).next.set(after),
            None => self.heads[list] = after,
        }
        match after.checked_sub(1) {
            Some(after) => Self::links(blocks, after).previous.set(previous),
            None => self.tails[list] = previous,
        }
    }

    /// Inserts a block between two neighbours in list `list`, which are block numbers plus one.
    fn insert(&mut self, blocks: &Blocks, list: usize, (previous, after): (u32, u32), block_number: u32) {
        debug_assert!(previous != block_number + 1 && after != block_number + 1, "the block is in no list");
        Self::links(blocks, block_number).list.set(list as u32);
        self.connect(blocks, list, previous, block_number + 1);
        self.connect(blocks, list, block_number + 1, after);
    }

    /// Inserts a block at the front of list `list`. The block must be in no list of this kind.
    pub fn push_front(&mut self, blocks: &Blocks, list: usize, block_number: u32) {
        self.insert(blocks, list, (0, self.heads[list]), block_number);
    }

    /// Inserts a block at the back of list `list`. The block must be in no list of this kind.
    pub fn push_back(&mut self, blocks: &Blocks, list: usize, block_number: u32) {
        self.insert(blocks, list, (self.tails[list], 0), block_number);
    }

    /// Moves a block to the back of the list that it is in.
    pub fn move_to_back(&mut self, blocks: &Blocks, block_number: u32) {
        self.remove(blocks, block_number);
        self.push_back(blocks, Self::links(blocks, block_number).list.get() as usize, block_number);
    }

    /// Removes a block from the list that it is in.
    pub fn remove(&mut self, blocks: &Blocks, block_number: u32) {
        let links = Self::links(blocks, block_number);
        let (previous, after) = (links.previous.get(), links.next.get());
        let list = links.list.get() as usize;
        let next_of = |block: u32| Self::links(blocks, block).next.get();
        let previous_of = |block: u32| Self::links(blocks, block).previous.get();
        let (head, tail) = (self.heads[list], self.tails[list]);
        debug_assert!(previous.checked_sub(1).map_or(head, next_of) == block_number + 1, "the block is in this list");
        debug_assert!(after.checked_sub(1).map_or(tail, previous_of) == block_number + 1, "the block is in this list");
        self.connect(blocks, list, previous, after);
    }

    /// Checks that each list contains the same blocks when it is followed forwards and backwards.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check(&self, blocks: &Blocks) {
        for list in 0..COUNT {
            let mut forwards: Vec<u32> = self.iter(blocks, list).collect();
            let last = self.tails[list].checked_sub(1);
            let backwards = std::iter::successors(last, |block_number| {
                Self::links(blocks, *block_number).previous.get().checked_sub(1)
            });
            forwards.reverse();
            assert_eq!(backwards.collect::<Vec<_>>(), forwards);
        }
    }
}
