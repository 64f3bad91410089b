//! The allocator state of one cache on one NUMA node: its blocks, in lists by use, and the slabs in them.
//!
//! Objects are allocated from the fullest block, and there from the fullest slab, so little used slabs become empty
//! over time. All operations run under the lock of the node's [`NodeState`] and allocate no memory.

use crate::alloc::blocks::Blocks;
use crate::alloc::lists::Lists;
#[cfg(any(test, feature = "test-util"))]
use crate::alloc::meta::LEVEL_COUNT;
use crate::alloc::meta::{BARE_LEVEL, BY_USE, EMPTY_LEVEL, ObjectSet, PARTIAL_LEVEL, SlabState, level_of};
use crate::alloc::shape::Shape;
use crate::defrag::candidates::Searches;
use pagemill_core::units::BLOCK_BYTES;

/// Number of classes into which blocks are divided by the share of their objects that is in use: eighths.
pub(crate) const USE_CLASS_COUNT: u32 = 8;

/// Index of the list of blocks that have neither used objects nor claimed slabs. The lists from 1 to [`FULLEST_LIST`]
/// have the other blocks with free objects, sorted by how many eighths of a block's objects are in use.
pub(crate) const IDLE_LIST: usize = 0;
/// Index of the last list of blocks with free objects: those that are at least seven eighths in use.
pub(crate) const FULLEST_LIST: usize = USE_CLASS_COUNT as usize;
/// Index of the list of blocks that have bare slabs, while all their other slabs are full.
pub(crate) const FULL_WITH_BARE_LIST: usize = FULLEST_LIST + 1;
/// Index of the list of blocks that have neither free objects nor bare slabs.
pub(crate) const FULL_LIST: usize = FULL_WITH_BARE_LIST + 1;
/// Index of the list of blocks that defragmentation is emptying.
const EMPTYING_LIST: usize = FULL_LIST + 1;
/// Number of lists in which a node keeps its blocks, by how many of their objects are in use.
pub(crate) const USE_LIST_COUNT: usize = EMPTYING_LIST + 1;

/// Number of idle blocks that a node keeps for later objects.
const KEPT_IDLE_BLOCKS: u32 = 1;
/// Number of empty slabs in sparse blocks that a node keeps for later objects.
const KEPT_EMPTY_SLABS: u32 = 4;

/// How much memory a node keeps for later objects when unused memory is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// The node keeps [`KEPT_IDLE_BLOCKS`] idle blocks and [`KEPT_EMPTY_SLABS`] empty slabs.
    Reserve,
    Nothing,
}

/// The slabs from which an allocation or a move may take free objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetSlabs {
    /// Partial slabs of all blocks.
    Partial,
    /// Partial and empty slabs of blocks in use. To move objects, bare slabs of these blocks may also be set up.
    InUse,
    /// As `InUse`, but only in blocks with at least this many objects in use.
    Fuller(u32),
    /// All slabs that are set up, also in idle blocks.
    Any,
}

/// Allocator state of one cache on one node.
#[derive(Default)]
pub(crate) struct NodeState {
    pub lists: Lists<USE_LIST_COUNT, BY_USE>,
    pub searches: Searches,
    pub blocks: u32,
    idle_blocks: u32,
    /// Bytes that are charged for the blocks of the node. The 2 MiB of a whole block are charged and freed together,
    /// those of a sparse block slab by slab.
    pub resident_bytes: u64,
    /// Number of slabs that are set up.
    pub slabs: u32,
    /// Number of partial slabs.
    pub partial: u32,
    /// Number of empty slabs.
    pub empty: u32,
    /// Number of empty slabs in sparse blocks.
    empty_in_sparse_blocks: u32,
    /// Number of bare slabs in whole blocks that hold objects. These slabs have memory already.
    pub bare_slabs: u32,
    /// For each list of blocks by use, how many of the `bare_slabs` are in blocks of that list.
    pub bare_slabs_in: [u32; USE_LIST_COUNT],
    /// Number of objects that are not free in their slabs: they are allocated, or in magazines and barns.
    pub used: u64,
    /// Number of objects that can be allocated from open slabs.
    pub free_objects: u64,
    /// For each list of blocks by use, how many of the `free_objects` are in blocks of that list.
    pub free_objects_in: [u64; USE_LIST_COUNT],
    /// Number of objects that users freed into slabs since the background thread last visited the cache.
    pub freed_objects: u64,
    /// Number of lost slabs.
    pub lost: u32,
}

/// The allocator state of a slab cache on one NUMA node, together with the block allocator and the layout that
/// operations on the state need.
pub(crate) struct Node<'a> {
    pub shape: &'a Shape,
    pub blocks: &'a Blocks,
    pub state: &'a mut NodeState,
}

impl Node<'_> {
    /// Allocates up to `taken.len()` objects from the slabs that `targets` allows, and writes their addresses into
    /// `taken`. Returns the number of objects.
    pub fn allocate(&mut self, targets: TargetSlabs, taken: &mut [usize]) -> usize {
        let mut count = 0;
        while count < taken.len()
            && let Some((block, slab)) = self.find_slab(targets)
        {
            let base = self.blocks.addr(block);
            let left = &mut taken[count..];
            debug_assert!(self.blocks.slab(block, slab).state() == SlabState::Open, "only open slabs are found");
            let before = self.level(block, slab);
            let (mut at, shape) = (0, self.shape);
            self.blocks.slab(block, slab).allocate(shape.capacity, left.len(), |object| {
                left[at] = base + shape.offset_of(slab, object);
                at += 1;
            });
            self.note_change(block, slab, before, at as i32);
            count += at;
        }
        count
    }

    /// Finds a slab with a free object, among those that `targets` allows, in the fullest block that has such a slab.
    /// Returns the number of the block and of the slab.
    fn find_slab(&self, targets: TargetSlabs) -> Option<(u32, u32)> {
        let may_be_empty = targets != TargetSlabs::Partial;
        let least = if let TargetSlabs::Fuller(least) = targets { self.list_for_use(least) + 1 } else { IDLE_LIST + 1 };
        let mut lists = (least..=FULLEST_LIST).rev().chain((targets == TargetSlabs::Any).then_some(IDLE_LIST));
        let in_slab = |block| Some((block, self.blocks.block(block).fullest_slab(may_be_empty)?));
        let found = lists.find_map(|list| self.blocks_in_list(list).find_map(in_slab));
        if let (None, TargetSlabs::Fuller(least)) = (found, targets) {
            return self.first_blocks_of(self.list_for_use(least), least).find_map(in_slab);
        }
        found
    }

    /// Frees an object into its slab.
    ///
    /// # Panics
    ///
    /// If no object begins at `addr`, or the object is free already.
    pub fn free(&mut self, addr: usize) {
        let block = self.blocks.number_of(addr);
        let (slab, object, is_object) = self.shape.locate(addr - self.blocks.addr(block));
        assert!(is_object, "no object of this cache begins at {addr:#x}");
        let before = self.level(block, slab);
        self.blocks.slab(block, slab).free(object);
        self.note_change(block, slab, before, -1);
    }

    /// Frees several objects of one slab.
    ///
    /// # Panics
    ///
    /// If one of the objects is free already.
    pub fn free_all(&mut self, block: u32, slab: u32, objects: &ObjectSet) {
        let before = self.level(block, slab);
        self.blocks.slab(block, slab).free_all(objects);
        self.note_change(block, slab, before, -(objects.count() as i32));
    }

    /// Returns whether the node has more idle blocks or empty slabs than [`Keep::Reserve`] keeps.
    pub fn has_surplus(&self) -> bool {
        self.state.idle_blocks > KEPT_IDLE_BLOCKS || self.state.empty_in_sparse_blocks > KEPT_EMPTY_SLABS
    }

    /// Returns the level of use of a slab; `None` if the slab is full.
    fn level(&self, block: u32, slab: u32) -> Option<usize> {
        level_of(self.blocks.slab(block, slab).used_objects(), self.shape.capacity)
    }

    /// Updates all counters and lists after `more` objects of a slab were allocated (if negative, freed). `before` is
    /// the level of use that the slab had before.
    fn note_change(&mut self, block_number: u32, slab: u32, before: Option<usize>, more: i32) {
        let block = self.blocks.block(block_number);
        debug_assert!(self.state.used.checked_add_signed(i64::from(more)).is_some(), "the node counts its objects");
        debug_assert!(block.used.get().checked_add_signed(more).is_some(), "the block counts its objects");
        self.state.used = self.state.used.wrapping_add_signed(i64::from(more));
        block.used.set(block.used.get().wrapping_add_signed(more));
        if self.blocks.slab(block_number, slab).state() == SlabState::Open {
            self.change_level(block_number, slab, before, self.level(block_number, slab));
            self.add_free_objects(block_number, -more);
        }
        self.update_use_list(block_number);
    }

    /// Adds `more`, which may be negative, to the counters of free objects of a block, of its list and of the node.
    fn add_free_objects(&mut self, block_number: u32, more: i32) {
        let block = self.blocks.block(block_number);
        block.free_objects.set(block.free_objects.get().wrapping_add_signed(more));
        for free in [&mut self.state.free_objects, &mut self.state.free_objects_in[block.use_list()]] {
            debug_assert!(free.checked_add_signed(i64::from(more)).is_some(), "no object is allocated twice");
            *free = free.wrapping_add_signed(i64::from(more));
        }
    }

    /// Moves a slab from the set of level `before` to the set of level `after`, and updates the counters of partial and
    /// empty slabs. A level of `None` means that the slab is in no set.
    fn change_level(&mut self, block_number: u32, slab: u32, before: Option<usize>, after: Option<usize>) {
        if before == after {
            return;
        }
        let block = self.blocks.block(block_number);
        let empty = |level: Option<usize>| u32::from(level == Some(EMPTY_LEVEL));
        let partial = |level: Option<usize>| u32::from(level.is_some_and(|level| level >= PARTIAL_LEVEL));
        let (state, is_sparse) = (&mut *self.state, block.is_sparse.get());
        state.partial = state.partial + partial(after) - partial(before);
        state.empty = state.empty + empty(after) - empty(before);
        state.empty_in_sparse_blocks =
            state.empty_in_sparse_blocks + is_sparse * empty(after) - is_sparse * empty(before);
        if let Some(level) = before {
            block.remove(level, slab);
        }
        if let Some(level) = after {
            block.insert(level, slab);
        }
        // A search visits a block again only after a slab has changed its level. Smaller changes wait for the next
        // pass.
        if partial(after) == 1 {
            self.allow_revisit(block_number);
        }
    }

    /// Moves a block to the list that fits the number of its objects in use.
    pub fn update_use_list(&mut self, block_number: u32) {
        let list = self.use_list_for(block_number);
        if list != self.blocks.block(block_number).use_list() {
            self.unlink(block_number);
            self.link(block_number, list);
        }
    }

    /// Returns the index of the list that fits the number of a block's objects in use.
    fn use_list_for(&self, block_number: u32) -> usize {
        let block = self.blocks.block(block_number);
        if block.is_emptying.get() == 1 {
            EMPTYING_LIST
        } else if block.used.get() == 0 && block.claimed.get() == 0 {
            IDLE_LIST
        } else if block.free_objects.get() > 0 {
            self.list_for_use(block.used.get())
        } else if block.first_at_level(BARE_LEVEL).is_some() {
            FULL_WITH_BARE_LIST
        } else {
            FULL_LIST
        }
    }

    /// Returns the index of the list for blocks with free objects and with `used` objects in use.
    pub fn list_for_use(&self, used: u32) -> usize {
        IDLE_LIST + 1 + (used * USE_CLASS_COUNT / self.shape.block_capacity()).min(USE_CLASS_COUNT - 1) as usize
    }

    /// Adds a block to a list of blocks by use, and to the counters of that list.
    pub fn link(&mut self, block_number: u32, list: usize) {
        let block = self.blocks.block(block_number);
        block.exhausted_search.set(0);
        self.state.lists.push_front(self.blocks, list, block_number);
        self.queue_for_search(block_number);
        self.state.free_objects_in[list] += u64::from(block.free_objects.get());
        self.add_bare_slabs(block_number, self.counted_bare_slabs(block_number) as i32);
        if list == IDLE_LIST {
            self.state.idle_blocks += 1;
            block.has_unmovable.set(0);
        }
    }

    /// Adds `more`, which may be negative, to the counters of bare slabs of the node and of the block's list.
    fn add_bare_slabs(&mut self, block_number: u32, more: i32) {
        for bare in
            [&mut self.state.bare_slabs, &mut self.state.bare_slabs_in[self.blocks.block(block_number).use_list()]]
        {
            debug_assert!(bare.checked_add_signed(more).is_some(), "no slab is set up twice");
            *bare = bare.wrapping_add_signed(more);
        }
    }

    /// Returns how many slabs of a block count in `bare_slabs` and `bare_slabs_in`: its bare slabs, or none if the
    /// block is sparse, idle or being emptied.
    pub fn counted_bare_slabs(&self, block_number: u32) -> u32 {
        let block = self.blocks.block(block_number);
        let is_counted = block.is_sparse.get() == 0 && ![IDLE_LIST, EMPTYING_LIST].contains(&block.use_list());
        if is_counted { block.count_at_level(BARE_LEVEL) } else { 0 }
    }

    /// Removes a block from its list of blocks by use, and from the counters of that list.
    pub fn unlink(&mut self, block_number: u32) {
        let block = self.blocks.block(block_number);
        self.add_bare_slabs(block_number, -(self.counted_bare_slabs(block_number) as i32));
        self.state.free_objects_in[block.use_list()] -= u64::from(block.free_objects.get());
        self.state.idle_blocks -= u32::from(block.use_list() == IDLE_LIST);
        self.state.lists.remove(self.blocks, block_number);
        self.dequeue_from_search(block_number);
    }

    pub fn blocks_in_list(&self, list: usize) -> impl Iterator<Item = u32> {
        self.state.lists.iter(self.blocks, list)
    }

    /// Adds a block to the idle blocks of the node. All slabs of the block become bare.
    pub fn add_block(&mut self, block_number: u32) {
        let block = self.blocks.block(block_number);
        for word in [&block.used, &block.free_objects, &block.claimed, &block.slabs, &block.is_emptying, &block.tried] {
            word.set(0);
        }
        block.mark_all_bare(self.shape.slabs);
        self.state.blocks += 1;
        self.state.resident_bytes += u64::from(1 - block.is_sparse.get()) * BLOCK_BYTES as u64;
        self.link(block_number, IDLE_LIST);
    }

    /// Removes an idle block from the node and returns its number, if the node has more idle blocks than `keep`
    /// demands.
    pub fn remove_idle(&mut self, keep: Keep) -> Option<u32> {
        if self.state.idle_blocks <= if keep == Keep::Reserve { KEPT_IDLE_BLOCKS } else { 0 } {
            return None;
        }
        let block_number = self.state.lists.first(IDLE_LIST)?;
        let block = self.blocks.block(block_number);
        debug_assert!(block.used.get() == 0 && block.claimed.get() == 0, "no thread uses the block");
        self.unlink(block_number);
        self.state.blocks -= 1;
        self.state.slabs -= block.slabs.get();
        let slab_bytes = u64::from(block.slabs.get()) * self.shape.slab_bytes as u64;
        self.state.resident_bytes -= if block.is_sparse.get() == 1 { slab_bytes } else { BLOCK_BYTES as u64 };
        self.state.free_objects -= u64::from(block.free_objects.get());
        let empty = block.count_at_level(EMPTY_LEVEL);
        self.state.empty -= empty;
        self.state.empty_in_sparse_blocks -= empty * block.is_sparse.get();
        Some(block_number)
    }

    /// Returns the bytes of memory in idle whole blocks, and in empty slabs of sparse blocks.
    pub fn kept_bytes(&self) -> u64 {
        let whole =
            self.blocks_in_list(IDLE_LIST).filter(|block| self.blocks.block(*block).is_sparse.get() == 0).count();
        let empty = u64::from(self.state.empty_in_sparse_blocks) * self.shape.slab_bytes as u64;
        whole as u64 * BLOCK_BYTES as u64 + empty
    }

    /// Claims a bare slab of the node, so that the caller can set the slab up. Returns the number of the block and of
    /// the slab.
    pub fn claim_bare(&mut self) -> Option<(u32, u32)> {
        let block_number = [FULL_WITH_BARE_LIST, IDLE_LIST].into_iter().find_map(|list| {
            self.blocks_in_list(list).find(|block| self.blocks.block(*block).first_at_level(BARE_LEVEL).is_some())
        })?;
        self.claim_bare_of(block_number)
    }

    /// As [`Node::claim_bare`], but only in whole blocks that hold objects, where a slab needs no further memory.
    /// Chooses a block with at least `least` objects in use, from the list of the fullest blocks that has one.
    pub fn claim_bare_in_used_block(&mut self, least: u32) -> Option<(u32, u32)> {
        let is_it = |block: &u32| {
            let block_meta = self.blocks.block(*block);
            block_meta.is_sparse.get() == 0
                && block_meta.used.get() >= least
                && block_meta.first_at_level(BARE_LEVEL).is_some()
        };
        let lists = [FULL_WITH_BARE_LIST].into_iter().chain((self.list_for_use(least)..=FULLEST_LIST).rev());
        let block_number = (self.state.bare_slabs > 0)
            .then(|| lists.into_iter().find_map(|list| self.blocks_in_list(list).find(is_it)))??;
        self.claim_bare_of(block_number)
    }

    /// Claims the first bare slab of a block.
    fn claim_bare_of(&mut self, block_number: u32) -> Option<(u32, u32)> {
        let block = self.blocks.block(block_number);
        let slab = block.first_at_level(BARE_LEVEL)?;
        let before = self.counted_bare_slabs(block_number);
        block.remove(BARE_LEVEL, slab);
        self.add_bare_slabs(block_number, self.counted_bare_slabs(block_number) as i32 - before as i32);
        debug_assert!(self.blocks.slab(block_number, slab).used_objects() == 0, "a bare slab has no objects");
        block.slabs.add(1);
        debug_assert!(block.slabs.get() <= self.shape.slabs);
        self.blocks.slab(block_number, slab).tried.set(0);
        self.state.slabs += 1;
        self.state.resident_bytes += u64::from(block.is_sparse.get()) * self.shape.slab_bytes as u64;
        self.mark_claimed(block_number, slab);
        Some((block_number, slab))
    }

    /// Claims an empty slab of a sparse block, so that the caller can free the slab's memory. Returns `None` unless
    /// there are more such slabs than `keep` demands.
    pub fn claim_empty(&mut self, keep: Keep) -> Option<(u32, u32)> {
        if self.state.empty_in_sparse_blocks <= if keep == Keep::Reserve { KEPT_EMPTY_SLABS } else { 0 } {
            return None;
        }
        let is_it = |block: &u32| {
            let block_meta = self.blocks.block(*block);
            block_meta.is_sparse.get() == 1 && block_meta.first_at_level(EMPTY_LEVEL).is_some()
        };
        let block_number = (IDLE_LIST..=FULLEST_LIST).find_map(|list| self.blocks_in_list(list).find(is_it))?;
        let slab = self.blocks.block(block_number).first_at_level(EMPTY_LEVEL)?;
        self.claim(block_number, slab);
        Some((block_number, slab))
    }

    /// Marks a slab as claimed, and moves its block to the list that fits the block's use.
    fn mark_claimed(&mut self, block_number: u32, slab: u32) {
        self.blocks.slab(block_number, slab).set_state(SlabState::Claimed);
        self.blocks.block(block_number).claimed.add(1);
        self.update_use_list(block_number);
    }

    /// Claims an open slab: no object is allocated from it until [`Node::open`].
    pub fn claim(&mut self, block_number: u32, slab: u32) {
        debug_assert!(self.blocks.slab(block_number, slab).state() == SlabState::Open, "one thread claims a slab");
        let level = self.level(block_number, slab);
        self.change_level(block_number, slab, level, None);
        let free = self.shape.capacity - self.blocks.slab(block_number, slab).used_objects();
        self.add_free_objects(block_number, -(free as i32));
        self.mark_claimed(block_number, slab);
    }

    /// Ends the claim of a slab and opens it: objects may be allocated from the slab again.
    pub fn open(&mut self, block_number: u32, slab: u32) {
        let slab_meta = self.blocks.slab(block_number, slab);
        debug_assert!(slab_meta.state() == SlabState::Claimed, "the claim ends once");
        slab_meta.set_state(SlabState::Open);
        let free = self.shape.capacity - slab_meta.used_objects();
        let level = self.level(block_number, slab);
        self.change_level(block_number, slab, None, level);
        self.add_free_objects(block_number, free as i32);
        self.blocks.block(block_number).claimed.sub(1);
        self.allow_revisit(block_number);
        self.update_use_list(block_number);
    }

    /// Ends the claim of a slab without memory: the slab becomes bare, and must be set up before use.
    pub fn mark_bare(&mut self, block_number: u32, slab: u32) {
        let block = self.blocks.block(block_number);
        debug_assert!(self.blocks.slab(block_number, slab).used_objects() == 0, "a bare slab has no objects");
        self.blocks.slab(block_number, slab).set_state(SlabState::Open);
        block.insert(BARE_LEVEL, slab);
        block.slabs.sub(1);
        self.state.slabs -= 1;
        self.state.resident_bytes -= u64::from(block.is_sparse.get()) * self.shape.slab_bytes as u64;
        block.claimed.sub(1);
        self.update_use_list(block_number);
    }

    /// Makes a claimed slab unusable for good. Its objects can be freed, but are not allocated again.
    pub fn mark_lost(&mut self, block_number: u32, slab: u32) {
        self.blocks.slab(block_number, slab).set_state(SlabState::Lost);
        self.state.lost += 1;
    }

    /// Returns how many slabs and how many blocks of the node have objects in use, as one sum.
    pub fn used_slabs_and_blocks(&self) -> u64 {
        u64::from(self.state.slabs - self.state.empty) + u64::from(self.state.blocks - self.state.idle_blocks)
    }

    /// Checks that each list contains the same blocks when it is followed forwards and backwards, and that blocks
    /// without candidates for defragmentation come last in their lists.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check_lists(&self) {
        self.state.lists.check(self.blocks);
        self.check_queues();
        assert!(
            (0..USE_LIST_COUNT)
                .all(|list| self.blocks_in_list(list).is_sorted_by_key(|block_number| self.is_exhausted(block_number)))
        );
    }

    /// Checks that all counters of the node match the states of its slabs.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check(&self) {
        let (mut blocks, mut used, mut free_objects, mut slabs, mut idle) = (0, 0, 0, 0, 0);
        let (mut empty, mut sparse_empty, mut partial, mut resident, mut bare) = (0, 0, 0, 0, 0);
        self.check_lists();
        for list in 0..USE_LIST_COUNT {
            let free_objects_in: u32 =
                self.blocks_in_list(list).map(|block_number| self.blocks.block(block_number).free_objects.get()).sum();
            let bare_slabs_in: u32 =
                self.blocks_in_list(list).map(|block_number| self.counted_bare_slabs(block_number)).sum();
            assert_eq!(
                (u64::from(free_objects_in), bare_slabs_in),
                (self.state.free_objects_in[list], self.state.bare_slabs_in[list])
            );
            for block_number in self.blocks_in_list(list) {
                let block = self.blocks.block(block_number);
                assert_eq!((list, list), (self.use_list_for(block_number), block.use_list()), "block {block_number}");
                let (mut own_used, mut own_free, mut claimed) = (0, 0, 0);
                let all: Vec<u32> = block.set_up_slabs(self.shape.slabs).collect();
                for slab in &all {
                    let slab_meta = self.blocks.slab(block_number, *slab);
                    own_used += slab_meta.used_objects();
                    let level = self.level(block_number, *slab);
                    let listed_level =
                        (0..LEVEL_COUNT).find(|level| block.slabs_at_level(*level).any(|at| at == *slab));
                    if slab_meta.state() == SlabState::Open {
                        assert_eq!(listed_level, level);
                        own_free += self.shape.capacity - slab_meta.used_objects();
                    } else {
                        assert_eq!(listed_level, None);
                        claimed += 1;
                    }
                    let set = slab_meta.for_each_allocated(0, usize::MAX, |_| ());
                    assert_eq!(set as u32, slab_meta.used_objects());
                }
                assert_eq!(
                    (block.used.get(), block.free_objects.get(), block.claimed.get(), block.slabs.get()),
                    (own_used, own_free, claimed, all.len() as u32)
                );
                blocks += 1;
                idle += u32::from(list == IDLE_LIST);
                slabs += block.slabs.get();
                used += u64::from(own_used);
                free_objects += u64::from(own_free);
                empty += block.count_at_level(EMPTY_LEVEL);
                partial += (PARTIAL_LEVEL..LEVEL_COUNT).map(|level| block.count_at_level(level)).sum::<u32>();
                resident += self.blocks.resident_bytes_of(block_number);
                sparse_empty += block.count_at_level(EMPTY_LEVEL) * block.is_sparse.get();
                bare += self.counted_bare_slabs(block_number);
            }
        }
        let state = &self.state;
        assert_eq!((state.blocks, state.idle_blocks, state.slabs), (blocks, idle, slabs));
        assert_eq!((state.partial, state.bare_slabs, self.state.resident_bytes), (partial, bare, resident));
        assert_eq!(
            (state.used, state.free_objects, state.empty, state.empty_in_sparse_blocks),
            (used, free_objects, empty, sparse_empty)
        );
    }
}
