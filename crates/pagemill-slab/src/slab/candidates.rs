//! Defragmentation candidates: finds the emptiest block or slab of a node with objects that fit elsewhere.
//!
//! Each search visits a bounded number of blocks under the lock of the node's [`super::node::NodeState`].

use super::lists::Lists;
use super::meta::{LEVELS, Level, QUEUED, STANDING, SlabSet, SlabState};
use super::node::{BUCKETS, FULL, FULLEST, GROWING, IDLE, Node, PARTS, TargetRoom};

/// Maximum number of suitable blocks that a search compares.
pub(super) const MAX_COMPARED: usize = 16;

/// Ratio of a search for slabs of any use.
const ANY_PERCENT: u32 = u32::MAX;

/// Searches of each kind are numbered; 0: no search.
const FIRST_SEARCH: u32 = 1;

type Standing = Lists<BUCKETS, STANDING>;
type BlockQueues = Lists<BUCKETS, QUEUED>;

/// The next candidate to empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DefragCandidate {
    /// A block, its slabs that were claimed with it, and where its objects may go. Slabs that were claimed before (to set
    /// up, to free, or in a batch) are not included.
    Block(u32, SlabSet, TargetRoom),
    /// A slab of a block, claimed now, and how many of its objects fit into other partial slabs.
    Slab(u32, u32, u32),
}

/// What to search for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Criteria {
    /// Candidates are used by less than this percentage.
    pub percent: u32,
    /// Each slab is tried once in a pass.
    pub pass: u32,
    /// Each block is tried once in a round of passes: if an object stayed, the other objects of the block would only be
    /// moved back and forth. `None`: search for slabs only.
    pub round: Option<u32>,
}

/// Identity of a search: pass (or round of passes) and percentage, and its unique number.
struct SearchId {
    of: (u32, u32),
    number: u32,
}

impl SearchId {
    fn new() -> Self {
        Self { of: (0, 0), number: FIRST_SEARCH }
    }

    /// Continues the search, or begins a new one if `of` differs. Returns whether it is new.
    fn begin(&mut self, of: (u32, u32)) -> bool {
        let is_new = self.of != of;
        if is_new {
            *self = Self { of, number: self.number.checked_add(1).unwrap_or(FIRST_SEARCH) };
        }
        is_new
    }
}

/// State of a node's searches.
pub(super) struct Searches {
    for_slabs: SearchId,
    for_blocks: SearchId,
    /// Blocks that the search for blocks still has to visit, list by list. Blocks that enter a list meanwhile come first.
    queues: BlockQueues,
    /// Number of blocks visited.
    #[cfg(test)]
    pub visited: u64,
}

impl Searches {
    pub fn new() -> Self {
        Self {
            for_slabs: SearchId::new(),
            for_blocks: SearchId::new(),
            queues: Lists::new(),
            #[cfg(test)]
            visited: 0,
        }
    }

    /// The lists in which a block may be less used than `percent`, the limit of the search for blocks: those of blocks with
    /// room, by eighths in use, up to that limit; then `GROWING`. That one is not sorted by use, because its blocks have no
    /// room in set-up slabs.
    fn lists_of_blocks(&self) -> impl Iterator<Item = usize> + use<> {
        let percent = self.for_blocks.of.1;
        let parts = (percent * PARTS).div_ceil(100).min(PARTS) as usize;
        (IDLE + 1..=IDLE + parts).chain((percent > 0).then_some(GROWING))
    }
}

impl Node<'_> {
    /// Claims the next candidate: a block if its objects fit into others, else a slab with some objects that do.
    pub fn claim_candidate(&mut self, criteria: &Criteria) -> Option<DefragCandidate> {
        if let Some(number) = self.sparsest_block(criteria) {
            let room = self.room_for(number);
            return Some(DefragCandidate::Block(number, self.begin_emptying(number, criteria.round), room));
        }
        let (number, slab, most) = self.sparsest_slab(criteria)?;
        self.blocks.slab(number, slab).tried.set(criteria.pass);
        self.claim(number, slab);
        Some(DefragCandidate::Slab(number, slab, most))
    }

    /// Whether [`Node::claim_candidate`] would find a candidate.
    pub fn has_candidate(&mut self, criteria: &Criteria) -> bool {
        self.sparsest_block(criteria).is_some() || self.sparsest_slab(criteria).is_some()
    }

    /// The emptiest of the first suitable blocks. A block that is used too much for this search is dequeued, and visited
    /// again only after it has entered another list.
    fn sparsest_block(&mut self, criteria: &Criteria) -> Option<u32> {
        self.begin_for_blocks(criteria.round?, criteria.percent);
        let capacity = u64::from(self.shape.block_capacity());
        for list in self.state.searches.lists_of_blocks() {
            let (mut least, mut count) = (None, 0);
            let mut at = self.state.searches.queues.first(list);
            while let Some(number) = at.filter(|_| count < MAX_COMPARED) {
                at = BlockQueues::next(self.blocks, number);
                self.note_visit();
                let block = self.blocks.block(number);
                let used = u64::from(block.used.get());
                // A sparse block has memory only for its set-up slabs. If these are full, emptying it gains nothing.
                let is_packed = list == GROWING && block.is_sparse.get() == 1;
                let was_tried = Some(block.tried.get()) == criteria.round;
                if is_packed || was_tried || used * 100 >= capacity * u64::from(criteria.percent) {
                    self.dequeue(number);
                    continue;
                }
                count += 1;
                if used <= self.room_beside(number) {
                    let found = (used, number);
                    least = Some(least.map_or(found, |before: (u64, u32)| before.min(found)));
                }
            }
            if let Some((_, number)) = least {
                return Some(number);
            }
        }
        None
    }

    /// Where the objects of a block may go. Two blocks with objects that cannot move would exchange the others forever.
    /// So after such an attempt, objects only go to blocks that are at least as full.
    fn room_for(&self, number: u32) -> TargetRoom {
        let block = self.blocks.block(number);
        if block.has_refused.get() == 1 { TargetRoom::Fuller(block.used.get()) } else { TargetRoom::Used }
    }

    /// How many objects fit into the blocks that the objects of this block may go to. Emptier blocks of the same list are
    /// counted, too.
    fn room_beside(&self, number: u32) -> u64 {
        let block = self.blocks.block(number);
        let first = match self.room_for(number) {
            TargetRoom::Fuller(least) => self.list_of(least),
            _ => IDLE + 1,
        };
        let lists = (first..=FULLEST).chain([GROWING]);
        let (room, bare) =
            lists.fold((0, 0), |(room, bare), list| (room + self.state.room_in[list], bare + self.state.bare_in[list]));
        let bare = u64::from(bare - self.bare_in_use(number)) * u64::from(self.shape.capacity);
        room - u64::from(block.room.get()) + bare
    }

    /// The first blocks of a list with at least `least` objects in use; they are the first that an allocation looks at.
    pub fn first_of(&self, list: usize, least: u32) -> impl Iterator<Item = u32> {
        // Blocks that were tried may be emptier. They come first in the list, and are in no queue.
        let queued = self.state.searches.queues.iter(self.blocks, list).take(MAX_COMPARED);
        let blocks = queued.chain(self.list(list).take(MAX_COMPARED));
        blocks.filter(move |number| self.blocks.block(*number).used.get() >= least)
    }

    /// Begins a search for blocks. If it is new, queues all blocks that may be used by less than it wants.
    fn begin_for_blocks(&mut self, round: u32, percent: u32) {
        if !self.state.searches.for_blocks.begin((round, percent)) {
            return;
        }
        self.state.searches.queues = Lists::new();
        for list in self.state.searches.lists_of_blocks() {
            let mut at = self.state.lists.first(list);
            while let Some(number) = at {
                at = Standing::next(self.blocks, number);
                self.blocks.block(number).queued.set(self.state.searches.for_blocks.number);
                self.state.searches.queues.put_last(self.blocks, list, number);
            }
        }
    }

    /// Queues a block that has entered its list for the search for blocks, unless it was tried in this round.
    pub fn queue(&mut self, number: u32) {
        let (block, searches) = (self.blocks.block(number), &mut self.state.searches);
        let list = block.bucket();
        let is_wanted =
            block.tried.get() != searches.for_blocks.of.0 && searches.lists_of_blocks().any(|of| of == list);
        block.queued.set(if is_wanted { searches.for_blocks.number } else { 0 });
        if is_wanted {
            searches.queues.put_first(self.blocks, list, number);
        }
    }

    pub fn dequeue(&mut self, number: u32) {
        let searches = &mut self.state.searches;
        let queued = &self.blocks.block(number).queued;
        if queued.get() == searches.for_blocks.number {
            searches.queues.remove(self.blocks, number);
        }
        queued.set(0);
    }

    /// Checks that each queued block is queued under the list that it is in.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check_queues(&self) {
        let searches = &self.state.searches;
        searches.queues.check(self.blocks);
        for list in 0..BUCKETS {
            let is_there = |number: &u32| {
                let block = self.blocks.block(*number);
                block.bucket() == list && block.queued.get() == searches.for_blocks.number
            };
            assert!(searches.queues.iter(self.blocks, list).all(|number| is_there(&number)));
            let queued =
                self.list(list).filter(|number| self.blocks.block(*number).queued.get() == searches.for_blocks.number);
            assert_eq!(queued.count(), searches.queues.iter(self.blocks, list).count());
        }
    }

    fn note_visit(&mut self) {
        #[cfg(test)]
        {
            self.state.searches.visited += 1;
        }
    }

    /// A slab, and how many of its objects fit into other partial slabs. In whole blocks this is only useful when
    /// everything is packed.
    fn sparsest_slab(&mut self, criteria: &Criteria) -> Option<(u32, u32, u32)> {
        let capacity = self.shape.capacity;
        let partial_room = self.state.room - u64::from(self.state.empty) * u64::from(capacity);
        let blocks = self.blocks;
        let sparsest_of = |number| {
            let block = blocks.block(number);
            let is_worth_it = block.is_sparse.get() == 1 || criteria.percent > 100;
            let slabs = (Level::Partial as usize..LEVELS).flat_map(|level| block.all_at(level));
            let used = |slab: u32| blocks.slab(number, slab).used();
            let fits = |slab: &u32| {
                let is_sparse_enough = u64::from(used(*slab)) * 100 < u64::from(capacity) * u64::from(criteria.percent);
                is_sparse_enough && blocks.slab(number, *slab).tried.get() != criteria.pass
            };
            let slab = is_worth_it.then(|| slabs.filter(fits).min_by_key(|slab| used(*slab)))??;
            Some((used(slab), number, slab))
        };
        let (used, number, slab) = self.least((criteria.pass, criteria.percent), FULLEST, MAX_COMPARED, sparsest_of)?;
        let elsewhere = partial_room - u64::from(capacity - used);
        (elsewhere > 0).then(|| (number, slab, u64::from(used).min(elsewhere) as u32))
    }

    /// The minimum of `find` over the first `most` blocks that have a candidate, from the emptiest list to `last`. Blocks
    /// without a candidate move to the end of their list. The same search visits them again only after a change.
    fn least<T: Ord + Copy>(
        &mut self,
        search_id: (u32, u32),
        last: usize,
        most: usize,
        find: impl Fn(u32) -> Option<T>,
    ) -> Option<T> {
        self.state.searches.for_slabs.begin(search_id);
        let (mut least, mut count) = (None, 0);
        for list in IDLE + 1..=last {
            let mut at = self.state.lists.first(list);
            while let Some(number) = at.filter(|number| count < most && !self.is_spent(*number)) {
                at = Standing::next(self.blocks, number);
                self.note_visit();
                let Some(found) = find(number) else {
                    self.blocks.block(number).spent.set(self.state.searches.for_slabs.number);
                    self.state.lists.move_last(self.blocks, number);
                    continue;
                };
                least = Some(least.map_or(found, |before: T| before.min(found)));
                count += 1;
            }
        }
        least
    }

    /// Whether the current search has found no candidate in a block. Such blocks are last in their lists.
    pub fn is_spent(&self, number: u32) -> bool {
        self.blocks.block(number).spent.get() == self.state.searches.for_slabs.number
    }

    /// A slab of a block changed, so the search may visit the block again.
    pub fn renew(&mut self, number: u32) {
        if self.is_spent(number) {
            let bucket = self.blocks.block(number).bucket();
            self.unlink(number);
            self.link(number, bucket);
        }
    }

    /// Marks a block as leaving, and claims all of its open slabs. Returns them.
    fn begin_emptying(&mut self, number: u32, round: Option<u32>) -> SlabSet {
        let block = self.blocks.block(number);
        block.tried.set(round.unwrap_or(0));
        block.is_leaving.set(1);
        let mut claimed = SlabSet::default();
        for slab in block.all_set_up(self.shape.slabs) {
            if self.blocks.slab(number, slab).state() == SlabState::Open {
                self.claim(number, slab);
                claimed.add(slab);
            }
        }
        self.file(number);
        claimed
    }

    /// Claims the first block of the emptiest nonempty list, if it is whole, has no claimed slab and is at most half used.
    pub fn claim_emptiest(&mut self) -> Option<(u32, SlabSet)> {
        let number = (IDLE + 1..=FULLEST).flat_map(|list| self.list(list)).next()?;
        let block = self.blocks.block(number);
        let is_half_used = 2 * block.used.get() <= self.shape.block_capacity();
        let is_it = is_half_used && block.is_sparse.get() == 0 && block.claimed.get() == 0;
        is_it.then(|| (number, self.begin_emptying(number, None)))
    }

    /// Claims a slab with objects that was not tried in this pass, of the emptiest block that has one.
    pub fn claim_next(&mut self, pass: u32) -> Option<(u32, u32)> {
        let (blocks, slabs) = (self.blocks, self.shape.slabs);
        let (number, slab) = self.least((pass, ANY_PERCENT), FULL, 1, |number| {
            let slab = blocks.block(number).all_set_up(slabs).find(|slab| {
                let words = blocks.slab(number, *slab);
                words.state() == SlabState::Open && words.used() > 0 && words.tried.get() != pass
            })?;
            Some((number, slab))
        })?;
        self.blocks.slab(number, slab).tried.set(pass);
        self.claim(number, slab);
        Some((number, slab))
    }

    /// Ends the emptying of a block that [`Node::claim_candidate`] claimed, after the claims of its slabs.
    pub fn return_block(&mut self, number: u32) {
        let block = self.blocks.block(number);
        block.is_leaving.set(0);
        // A block that was left half done is continued, not marked.
        if block.tried.get() != 0 && block.used.get() > 0 {
            block.has_refused.set(1);
        }
        self.file(number);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// A search for blocks used by less than a percentage visits the lists of the eighths below it, then blocks without
    /// room. A search for none visits none.
    #[test]
    fn a_percentage_chooses_the_lists() {
        let lists_of = |percent: u32| {
            let mut searches = Searches::new();
            searches.for_blocks.of.1 = percent;
            searches.lists_of_blocks().collect::<Vec<_>>()
        };
        assert_eq!(lists_of(0), []);
        for (percent, parts) in [(1, 1), (12, 1), (13, 2), (25, 2), (26, 3), (87, 7), (88, 8), (100, 8), (101, 8)] {
            let mut expected = Vec::from_iter(IDLE + 1..=IDLE + parts);
            expected.push(GROWING);
            assert_eq!(lists_of(percent), expected, "{percent} %");
        }
    }

    /// A search with another pass or percentage has a new number, which is never 0.
    #[test]
    fn each_search_has_a_number() {
        let mut id = SearchId::new();
        assert!(id.number != 0 && id.begin((7, 50)) && !id.begin((7, 50)));
        let first = id.number;
        assert!(id.begin((7, 51)) && id.begin((8, 51)) && !id.begin((8, 51)));
        assert_eq!((id.of, id.number), ((8, 51), first + 2));
        id.number = u32::MAX;
        assert!(id.begin((9, 51)) && id.number == FIRST_SEARCH);
    }
}
