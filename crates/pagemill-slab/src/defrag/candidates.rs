//! Defragmentation candidates: finds the emptiest block or slab of a node whose objects fit elsewhere.
//!
//! Each search visits a bounded number of blocks, under the lock of the node's [`crate::alloc::node::NodeState`].

use crate::alloc::lists::Lists;
use crate::alloc::meta::{BY_USE, LEVEL_COUNT, PARTIAL_LEVEL, SEARCH_QUEUE, SlabSet, SlabState};
use crate::alloc::node::{
    FULL_LIST, FULL_WITH_BARE_LIST, FULLEST_LIST, IDLE_LIST, Node, TargetSlabs, USE_CLASS_COUNT, USE_LIST_COUNT,
};

/// Maximum number of suitable blocks that a search compares to find the emptiest one.
pub(crate) const MAX_COMPARED_BLOCKS: usize = 16;

/// Percentage in the key of a search for slabs with any number of used objects.
const ANY_PERCENT: u32 = u32::MAX;

/// Id of the first search. Id 0 in a block means that no search has queued the block.
const FIRST_SEARCH_ID: u32 = 1;

type UseLists = Lists<USE_LIST_COUNT, BY_USE>;
type SearchQueues = Lists<USE_LIST_COUNT, SEARCH_QUEUE>;

/// A block or slab that defragmentation is going to empty. It is claimed already, so no objects are allocated from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefragCandidate {
    /// A block: its number; its slabs that were claimed with it; and the slabs that may receive its objects. Slabs of
    /// the block that were claimed before (to be set up, freed, or in a batch) are not in the set.
    Block(u32, SlabSet, TargetSlabs),
    /// A slab: its block's number, its own number, and how many of its objects fit into other partial slabs.
    Slab(u32, u32, u32),
}

/// The conditions that a candidate for emptying must meet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Criteria {
    /// The candidate must have less than this percentage of its capacity in use.
    pub percent: u32,
    /// A candidate slab must not have been tried in the pass with this number.
    pub pass: u32,
    /// A candidate block must not have been tried under this number, which several passes may share. If an object
    /// stayed in a block, trying the block again would only move its other objects back and forth. `None`: only slabs
    /// are candidates.
    pub block_pass: Option<u32>,
}

/// Identifies a search for slabs or blocks to empty.
struct SearchId {
    /// Number of the defragmentation pass, and percentage of use, for which the search looks for candidates.
    key: (u32, u32),
    /// Unique id of the search, which is stored in the blocks that it has visited or queued.
    id: u32,
}

impl Default for SearchId {
    fn default() -> Self {
        Self { key: (0, 0), id: FIRST_SEARCH_ID }
    }
}

impl SearchId {
    /// Continues the search if its key is `key`, else begins a new search. Returns whether a new search began.
    fn begin(&mut self, key: (u32, u32)) -> bool {
        let is_new = self.key != key;
        if is_new {
            *self = Self { key, id: self.id.checked_add(1).unwrap_or(FIRST_SEARCH_ID) };
        }
        debug_assert!(self.id >= FIRST_SEARCH_ID, "0 marks blocks that are in no queue");
        is_new
    }
}

/// State of a NUMA node's searches for blocks and slabs to empty.
#[derive(Default)]
pub(crate) struct Searches {
    slab_search: SearchId,
    block_search: SearchId,
    /// For each list of blocks by use, a queue of its blocks that the block search has not visited yet. A block that
    /// enters a list during the search is added at the front of the list's queue.
    queues: SearchQueues,
    /// Number of blocks that all searches of the node have visited.
    #[cfg(test)]
    pub visited: u64,
}

impl Searches {
    /// Returns the indices of the lists whose blocks may have less than the percentage of the block search in use.
    /// Blocks with free objects are in lists by eighths in use, so these are the lists up to that percentage. Then
    /// comes `FULL_WITH_BARE_LIST`, which is not divided by use.
    fn lists_to_search(&self) -> impl Iterator<Item = usize> + use<> {
        let percent = self.block_search.key.1;
        let parts = (percent * USE_CLASS_COUNT).div_ceil(100).min(USE_CLASS_COUNT) as usize;
        (IDLE_LIST + 1..=IDLE_LIST + parts).chain((percent > 0).then_some(FULL_WITH_BARE_LIST))
    }
}

impl Node<'_> {
    /// Claims the next candidate for emptying: a block if all its objects fit into other blocks, else a slab if some of
    /// its objects fit into other slabs.
    pub fn claim_candidate(&mut self, criteria: &Criteria) -> Option<DefragCandidate> {
        if let Some(block_number) = self.emptiest_block(criteria) {
            let targets = self.target_slabs_for(block_number);
            return Some(DefragCandidate::Block(
                block_number,
                self.begin_emptying(block_number, criteria.block_pass),
                targets,
            ));
        }
        let (block_number, slab, most) = self.emptiest_slab(criteria)?;
        debug_assert!(criteria.pass != 0, "0 marks slabs that were never tried");
        self.blocks.slab(block_number, slab).tried.set(criteria.pass);
        self.claim(block_number, slab);
        Some(DefragCandidate::Slab(block_number, slab, most))
    }

    /// Returns whether [`Node::claim_candidate`] would find a candidate.
    pub fn has_candidate(&mut self, criteria: &Criteria) -> bool {
        self.emptiest_block(criteria).is_some() || self.emptiest_slab(criteria).is_some()
    }

    /// Visits blocks until enough suitable ones were found, and returns the number of the emptiest of these. An
    /// unsuitable block is removed from the search queue, and is queued again only when it enters another list.
    fn emptiest_block(&mut self, criteria: &Criteria) -> Option<u32> {
        self.begin_block_search(criteria.block_pass?, criteria.percent);
        let capacity = u64::from(self.shape.block_capacity());
        for list in self.state.searches.lists_to_search() {
            let (mut least, mut count) = (None, 0);
            let mut at = self.state.searches.queues.first(list);
            while let Some(block_number) = at.filter(|_| count < MAX_COMPARED_BLOCKS) {
                at = SearchQueues::next(self.blocks, block_number);
                self.count_visit();
                let block = self.blocks.block(block_number);
                let used = u64::from(block.used.get());
                // Only set-up slabs of a sparse block have memory. If all of them are full, emptying the block saves
                // nothing.
                let is_packed = list == FULL_WITH_BARE_LIST && block.is_sparse.get() == 1;
                let was_tried = Some(block.tried.get()) == criteria.block_pass;
                if is_packed || was_tried || used * 100 >= capacity * u64::from(criteria.percent) {
                    self.dequeue_from_search(block_number);
                    continue;
                }
                count += 1;
                if used <= self.count_free_objects_elsewhere(block_number) {
                    let found = (used, block_number);
                    least = Some(least.map_or(found, |before: (u64, u32)| before.min(found)));
                }
            }
            if let Some((_, block_number)) = least {
                return Some(block_number);
            }
        }
        None
    }

    /// Returns the slabs that may receive the objects of a block. If an earlier attempt to empty the block left
    /// unmovable objects, only blocks that are at least as full may receive its other objects. Otherwise two blocks
    /// with unmovable objects would exchange their other objects forever.
    fn target_slabs_for(&self, block_number: u32) -> TargetSlabs {
        let block = self.blocks.block(block_number);
        if block.has_unmovable.get() == 1 { TargetSlabs::Fuller(block.used.get()) } else { TargetSlabs::InUse }
    }

    /// Returns how many objects fit into the blocks that may receive the objects of block `block_number`. Sums the
    /// counters of whole lists, so blocks that are a little emptier than allowed are included.
    fn count_free_objects_elsewhere(&self, block_number: u32) -> u64 {
        let block = self.blocks.block(block_number);
        let first = match self.target_slabs_for(block_number) {
            TargetSlabs::Fuller(least) => self.list_for_use(least),
            _ => IDLE_LIST + 1,
        };
        let lists = (first..=FULLEST_LIST).chain([FULL_WITH_BARE_LIST]);
        let (free, bare) = lists.fold((0, 0), |(free, bare), list| {
            (free + self.state.free_objects_in[list], bare + self.state.bare_slabs_in[list])
        });
        let bare = u64::from(bare - self.counted_bare_slabs(block_number)) * u64::from(self.shape.capacity);
        free - u64::from(block.free_objects.get()) + bare
    }

    /// Returns those of the first blocks of a list that have at least `least` objects in use. An allocation tries these
    /// blocks before the others of the list.
    pub fn first_blocks_of(&self, list: usize, least: u32) -> impl Iterator<Item = u32> {
        // Blocks that were tried may be emptier. They come first in the list, but are in no search queue.
        let queued = self.state.searches.queues.iter(self.blocks, list).take(MAX_COMPARED_BLOCKS);
        let blocks = queued.chain(self.blocks_in_list(list).take(MAX_COMPARED_BLOCKS));
        blocks.filter(move |block_number| self.blocks.block(*block_number).used.get() >= least)
    }

    /// Begins or continues a search for blocks to empty. A new search queues all blocks of which less than `percent`
    /// may be in use.
    fn begin_block_search(&mut self, block_pass: u32, percent: u32) {
        if !self.state.searches.block_search.begin((block_pass, percent)) {
            return;
        }
        self.state.searches.queues = SearchQueues::default();
        for list in self.state.searches.lists_to_search() {
            for block_number in self.state.lists.iter(self.blocks, list) {
                self.blocks.block(block_number).queued_search.set(self.state.searches.block_search.id);
                self.state.searches.queues.push_back(self.blocks, list, block_number);
            }
        }
    }

    /// Adds a block that has entered a list to the search queue of that list, unless the block was tried in this
    /// search.
    pub fn queue_for_search(&mut self, block_number: u32) {
        let (block, searches) = (self.blocks.block(block_number), &mut self.state.searches);
        let list = block.use_list();
        debug_assert!(block.queued_search.get() != searches.block_search.id, "the block is in no queue");
        let is_wanted =
            block.tried.get() != searches.block_search.key.0 && searches.lists_to_search().any(|of| of == list);
        block.queued_search.set(if is_wanted { searches.block_search.id } else { 0 });
        if is_wanted {
            searches.queues.push_front(self.blocks, list, block_number);
        }
    }

    /// Removes a block from the search queue, if it is queued.
    pub fn dequeue_from_search(&mut self, block_number: u32) {
        let searches = &mut self.state.searches;
        let queued_search = &self.blocks.block(block_number).queued_search;
        if queued_search.get() == searches.block_search.id {
            searches.queues.remove(self.blocks, block_number);
        }
        queued_search.set(0);
    }

    /// Checks that each queued block is in the queue that belongs to its list by use.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check_queues(&self) {
        let searches = &self.state.searches;
        searches.queues.check(self.blocks);
        for list in 0..USE_LIST_COUNT {
            let is_there = |block_number: &u32| {
                let block = self.blocks.block(*block_number);
                block.use_list() == list && block.queued_search.get() == searches.block_search.id
            };
            assert!(searches.queues.iter(self.blocks, list).all(|block_number| is_there(&block_number)));
            let queued = self.blocks_in_list(list).filter(|block_number| {
                self.blocks.block(*block_number).queued_search.get() == searches.block_search.id
            });
            assert_eq!(queued.count(), searches.queues.iter(self.blocks, list).count());
        }
    }

    /// In tests, counts a block that a search visits.
    fn count_visit(&mut self) {
        #[cfg(test)]
        {
            self.state.searches.visited += 1;
        }
    }

    /// Returns the emptiest suitable slab (as block number and slab number), and how many of its objects fit into other
    /// partial slabs. Emptying a slab of a whole block frees no memory, so slabs of whole blocks are considered only if
    /// all slabs are to be packed.
    fn emptiest_slab(&mut self, criteria: &Criteria) -> Option<(u32, u32, u32)> {
        let capacity = self.shape.capacity;
        let partial_room = self.state.free_objects - u64::from(self.state.empty) * u64::from(capacity);
        let blocks = self.blocks;
        let sparsest_of = |block_number| {
            let block = blocks.block(block_number);
            let is_worthwhile = block.is_sparse.get() == 1 || criteria.percent > 100;
            let slabs = (PARTIAL_LEVEL..LEVEL_COUNT).flat_map(|level| block.slabs_at_level(level));
            let used = |slab: u32| blocks.slab(block_number, slab).used_objects();
            let fits = |slab: &u32| {
                let is_sparse_enough = u64::from(used(*slab)) * 100 < u64::from(capacity) * u64::from(criteria.percent);
                is_sparse_enough && blocks.slab(block_number, *slab).tried.get() != criteria.pass
            };
            let slab = is_worthwhile.then(|| slabs.filter(fits).min_by_key(|slab| used(*slab)))??;
            Some((used(slab), block_number, slab))
        };
        let (used, block_number, slab) =
            self.min_over_blocks((criteria.pass, criteria.percent), FULLEST_LIST, MAX_COMPARED_BLOCKS, sparsest_of)?;
        let elsewhere = partial_room - u64::from(capacity - used);
        (elsewhere > 0).then(|| (block_number, slab, u64::from(used).min(elsewhere) as u32))
    }

    /// Calls `find` for blocks, from the list of the emptiest blocks to list `last`, until `most` calls have returned a
    /// candidate. Returns the least of the candidates. A block for which `find` returns `None` moves to the end of its
    /// list, and the same search visits it again only after a change.
    fn min_over_blocks<T: Ord + Copy>(
        &mut self,
        search_id: (u32, u32),
        last: usize,
        most: usize,
        find: impl Fn(u32) -> Option<T>,
    ) -> Option<T> {
        self.state.searches.slab_search.begin(search_id);
        let (mut least, mut count) = (None, 0);
        for list in IDLE_LIST + 1..=last {
            let mut at = self.state.lists.first(list);
            while let Some(block_number) = at.filter(|block_number| count < most && !self.is_exhausted(*block_number)) {
                at = UseLists::next(self.blocks, block_number);
                self.count_visit();
                let Some(found) = find(block_number) else {
                    self.blocks.block(block_number).exhausted_search.set(self.state.searches.slab_search.id);
                    self.state.lists.move_to_back(self.blocks, block_number);
                    continue;
                };
                least = Some(least.map_or(found, |before: T| before.min(found)));
                count += 1;
            }
        }
        least
    }

    /// Returns whether the current slab search found no candidate in a block. Such blocks are at the ends of their
    /// lists.
    pub fn is_exhausted(&self, block_number: u32) -> bool {
        self.blocks.block(block_number).exhausted_search.get() == self.state.searches.slab_search.id
    }

    /// Lets the slab search visit a block again. Called when one of the block's slabs has changed.
    pub fn allow_revisit(&mut self, block_number: u32) {
        if self.is_exhausted(block_number) {
            let list = self.blocks.block(block_number).use_list();
            self.unlink(block_number);
            self.link(block_number, list);
        }
    }

    /// Begins to empty a block: from now on no object is allocated from it. Claims all of its open slabs and returns
    /// them.
    fn begin_emptying(&mut self, block_number: u32, block_pass: Option<u32>) -> SlabSet {
        let block = self.blocks.block(block_number);
        block.tried.set(block_pass.unwrap_or(0));
        debug_assert!(block.is_emptying.get() == 0, "one thread empties a block");
        block.is_emptying.set(1);
        let mut claimed = SlabSet::default();
        for slab in block.set_up_slabs(self.shape.slabs) {
            if self.blocks.slab(block_number, slab).state() == SlabState::Open {
                self.claim(block_number, slab);
                claimed.add(slab);
            }
        }
        self.update_use_list(block_number);
        claimed
    }

    /// Claims the first block of the emptiest nonempty list, if that block is whole, at most half used, and has no
    /// claimed slab.
    pub fn claim_half_used_block(&mut self) -> Option<(u32, SlabSet)> {
        let block_number = (IDLE_LIST + 1..=FULLEST_LIST).flat_map(|list| self.blocks_in_list(list)).next()?;
        let block = self.blocks.block(block_number);
        let is_half_used = 2 * block.used.get() <= self.shape.block_capacity();
        let is_it = is_half_used && block.is_sparse.get() == 0 && block.claimed.get() == 0;
        is_it.then(|| (block_number, self.begin_emptying(block_number, None)))
    }

    /// Claims a slab that has objects and was not tried in this pass. Searches the lists of blocks, that of the
    /// emptiest blocks first, and takes the first such slab.
    pub fn claim_next_slab(&mut self, pass: u32) -> Option<(u32, u32)> {
        let (blocks, slabs) = (self.blocks, self.shape.slabs);
        let (block_number, slab) = self.min_over_blocks((pass, ANY_PERCENT), FULL_LIST, 1, |block_number| {
            let slab = blocks.block(block_number).set_up_slabs(slabs).find(|slab| {
                let slab_meta = blocks.slab(block_number, *slab);
                slab_meta.state() == SlabState::Open && slab_meta.used_objects() > 0 && slab_meta.tried.get() != pass
            })?;
            Some((block_number, slab))
        })?;
        self.blocks.slab(block_number, slab).tried.set(pass);
        self.claim(block_number, slab);
        Some((block_number, slab))
    }

    /// Ends the emptying of a block, after the slabs that were claimed with it were opened or freed.
    pub fn end_emptying(&mut self, block_number: u32) {
        let block = self.blocks.block(block_number);
        debug_assert!(block.is_emptying.get() == 1, "the block is being emptied");
        block.is_emptying.set(0);
        // If emptying stopped before all objects were tried, `tried` is 0: a later step continues with the block.
        if block.tried.get() != 0 && block.used.get() > 0 {
            block.has_unmovable.set(1);
        }
        self.update_use_list(block_number);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// For several percentages, a block search must visit all lists by eighths that begin below the percentage, and
    /// then `FULL_WITH_BARE_LIST`. At 0 % it must visit no list.
    #[test]
    fn percentage_selects_lists_to_search() {
        let lists_of = |percent: u32| {
            let mut searches = Searches::default();
            searches.block_search.key.1 = percent;
            searches.lists_to_search().collect::<Vec<_>>()
        };
        assert_eq!(lists_of(0), []);
        for (percent, parts) in [(1, 1), (12, 1), (13, 2), (25, 2), (26, 3), (87, 7), (88, 8), (100, 8), (101, 8)] {
            let mut expected = Vec::from_iter(IDLE_LIST + 1..=IDLE_LIST + parts);
            expected.push(FULL_WITH_BARE_LIST);
            assert_eq!(lists_of(percent), expected, "{percent} %");
        }
    }

    /// A search with another pass or percentage must get a new id. No id may be 0, even after an overflow.
    #[test]
    fn each_search_has_a_nonzero_id() {
        let mut id = SearchId::default();
        assert!(id.id != 0 && id.begin((7, 50)) && !id.begin((7, 50)));
        let first = id.id;
        assert!(id.begin((7, 51)) && id.begin((8, 51)) && !id.begin((8, 51)));
        assert_eq!((id.key, id.id), ((8, 51), first + 2));
        id.id = u32::MAX;
        assert!(id.begin((9, 51)) && id.id == FIRST_SEARCH_ID);
    }
}
