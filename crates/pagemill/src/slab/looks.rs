//! What is to be emptied next: the emptiest block, or slab, of a node whose objects find a place in others.
//!
//! Each look is at some blocks, however many there are, and under the lock of the node's [`super::node::Books`].

use super::lists::Lists;
use super::meta::{LEVELS, Level, QUEUED, STANDING, SlabSet, State};
use super::node::{BUCKETS, FULL, FULLEST, GROWING, IDLE, Node, PARTS, Room};

/// What a look for the emptiest of a list goes over.
pub(super) const LOOKS: usize = 16;

/// A look for slabs however full they are.
const ANY_PERCENT: u32 = u32::MAX;

/// Looks of one kind have a number each; 0 is that of none.
const FIRST_LOOK: u32 = 1;

type Standing = Lists<BUCKETS, STANDING>;
type Queues = Lists<BUCKETS, QUEUED>;

/// What is to be emptied next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A block, and those of its slabs that were claimed for it: not such as others have, who set them up, give their memory back,
    /// or wait for readers. With it where its objects go.
    Block(u32, SlabSet, Room),
    /// A slab of a block, claimed now, of which so many objects find a place in other partial slabs.
    Slab(u32, u32, u32),
}

/// What is looked for to be emptied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    /// In use by less than so much.
    pub percent: u32,
    /// Slabs are tried once in a pass.
    pub pass: u32,
    /// Blocks are tried once in a round of passes: where an object stayed, what else is there would only go round. `None`:
    /// slabs only.
    pub round: Option<u32>,
}

/// For what a look is: a pass, or a round of passes, and percent; its number is no other's.
struct Look {
    of: (u32, u32),
    number: u32,
}

impl Look {
    fn new() -> Self {
        Self { of: (0, 0), number: FIRST_LOOK }
    }

    /// Goes on with a look; says whether it is a new one.
    fn begin(&mut self, of: (u32, u32)) -> bool {
        let is_new = self.of != of;
        if is_new {
            *self = Self { of, number: self.number.checked_add(1).unwrap_or(FIRST_LOOK) };
        }
        is_new
    }
}

/// Where a node's looks have come to.
pub(super) struct Looks {
    for_slabs: Look,
    for_blocks: Look,
    /// What the look for blocks is still to be at, list by list. What comes to a list meanwhile comes first.
    queues: Queues,
    /// Blocks that were looked at.
    #[cfg(test)]
    pub looked_at: u64,
}

impl Looks {
    pub fn new() -> Self {
        Self {
            for_slabs: Look::new(),
            for_blocks: Look::new(),
            queues: Lists::new(),
            #[cfg(test)]
            looked_at: 0,
        }
    }

    /// The lists of which blocks may be in use by less than the look for blocks wants. Without room, but for slabs that are not set up,
    /// they may be, too.
    fn lists_of_blocks(&self) -> impl Iterator<Item = usize> + use<> {
        let percent = self.for_blocks.of.1;
        let parts = (percent * PARTS).div_ceil(100).min(PARTS) as usize;
        (IDLE + 1..=IDLE + parts).chain((percent > 0).then_some(GROWING))
    }
}

impl Node<'_> {
    /// Claims what should be emptied next: a block whose objects find a place in others, else a slab some objects of which do.
    pub fn claim_source(&mut self, search: &Search) -> Option<Source> {
        if let Some(number) = self.sparsest_block(search) {
            let room = self.room_for(number);
            return Some(Source::Block(number, self.leave(number, search.round), room));
        }
        let (number, slab, most) = self.sparsest_slab(search)?;
        self.blocks.slab(number, slab).tried.set(search.pass);
        self.claim(number, slab);
        Some(Source::Slab(number, slab, most))
    }

    /// Whether there is something for [`Node::claim_source`].
    pub fn has_source(&mut self, search: &Search) -> bool {
        self.sparsest_block(search).is_some() || self.sparsest_slab(search).is_some()
    }

    /// The emptiest of the first that fit. One that is in use too much for this look goes, and is not looked at again before it has come to
    /// another list.
    fn sparsest_block(&mut self, search: &Search) -> Option<u32> {
        self.begin_for_blocks(search.round?, search.percent);
        let capacity = u64::from(self.shape.block_capacity());
        for list in self.books.looks.lists_of_blocks() {
            let (mut least, mut count) = (None, 0);
            let mut at = self.books.looks.queues.first(list);
            while let Some(number) = at.filter(|_| count < LOOKS) {
                at = Queues::next(self.blocks, number);
                self.note_look();
                let block = self.blocks.block(number);
                let used = u64::from(block.used.get());
                // A sparse block has memory for no more than it has set up: without room there nothing is won.
                let is_packed = list == GROWING && block.is_sparse.get() == 1;
                let was_tried = Some(block.tried.get()) == search.round;
                if is_packed || was_tried || used * 100 >= capacity * u64::from(search.percent) {
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

    /// Where what is in a block may go. Two in which objects have stayed would give each other the rest without end, so that only goes to
    /// blocks that are as full.
    fn room_for(&self, number: u32) -> Room {
        let block = self.blocks.block(number);
        if block.has_refused.get() == 1 { Room::Fuller(block.used.get()) } else { Room::Used }
    }

    /// Objects that other blocks have room for, of those that what is in a block may go to; in its own list those that are emptier count, too.
    fn room_beside(&self, number: u32) -> u64 {
        let block = self.blocks.block(number);
        let first = match self.room_for(number) {
            Room::Fuller(least) => self.list_of(least),
            _ => IDLE + 1,
        };
        let lists = (first..=FULLEST).chain([GROWING]);
        let (room, bare) =
            lists.fold((0, 0), |(room, bare), list| (room + self.books.room_in[list], bare + self.books.bare_in[list]));
        let bare = u64::from(bare - self.bare_in_use(number)) * u64::from(self.shape.capacity);
        room - u64::from(block.room.get()) + bare
    }

    /// Of a list the first blocks that so many objects are in at least: such as look for room comes to first.
    pub fn first_of(&self, list: usize, least: u32) -> impl Iterator<Item = u32> {
        // Those that were tried, which may be emptier, come first in the list, and are in no queue.
        let queued = self.books.looks.queues.iter(self.blocks, list).take(LOOKS);
        let blocks = queued.chain(self.list(list).take(LOOKS));
        blocks.filter(move |number| self.blocks.block(*number).used.get() >= least)
    }

    /// Where that is a new look it is to be at all blocks that may be in use by less than it wants.
    fn begin_for_blocks(&mut self, round: u32, percent: u32) {
        if !self.books.looks.for_blocks.begin((round, percent)) {
            return;
        }
        self.books.looks.queues = Lists::new();
        for list in self.books.looks.lists_of_blocks() {
            let mut at = self.books.lists.first(list);
            while let Some(number) = at {
                at = Standing::next(self.blocks, number);
                self.blocks.block(number).queued.set(self.books.looks.for_blocks.number);
                self.books.looks.queues.put_last(self.blocks, list, number);
            }
        }
    }

    /// The look for blocks is to be at a block, which has come to its list, unless that was tried in this round.
    pub fn queue(&mut self, number: u32) {
        let (block, looks) = (self.blocks.block(number), &mut self.books.looks);
        let list = block.bucket();
        let is_wanted = block.tried.get() != looks.for_blocks.of.0 && looks.lists_of_blocks().any(|of| of == list);
        block.queued.set(if is_wanted { looks.for_blocks.number } else { 0 });
        if is_wanted {
            looks.queues.put_first(self.blocks, list, number);
        }
    }

    pub fn dequeue(&mut self, number: u32) {
        let looks = &mut self.books.looks;
        let queued = &self.blocks.block(number).queued;
        if queued.get() == looks.for_blocks.number {
            looks.queues.remove(self.blocks, number);
        }
        queued.set(0);
    }

    /// What the look for blocks is still to be at is in the list that it is in.
    #[cfg(test)]
    pub fn check_queues(&self) {
        let looks = &self.books.looks;
        looks.queues.check(self.blocks);
        for list in 0..BUCKETS {
            let is_there = |number: &u32| {
                let block = self.blocks.block(*number);
                block.bucket() == list && block.queued.get() == looks.for_blocks.number
            };
            assert!(looks.queues.iter(self.blocks, list).all(|number| is_there(&number)));
            let queued =
                self.list(list).filter(|number| self.blocks.block(*number).queued.get() == looks.for_blocks.number);
            assert_eq!(queued.count(), looks.queues.iter(self.blocks, list).count());
        }
    }

    fn note_look(&mut self) {
        #[cfg(test)]
        {
            self.books.looks.looked_at += 1;
        }
    }

    /// A slab, and how many objects of it find a place in other partial ones. In whole blocks that helps only where all is packed.
    fn sparsest_slab(&mut self, search: &Search) -> Option<(u32, u32, u32)> {
        let capacity = self.shape.capacity;
        let partial_room = self.books.room - u64::from(self.books.empty) * u64::from(capacity);
        let blocks = self.blocks;
        let sparsest_of = |number| {
            let block = blocks.block(number);
            let is_worth_it = block.is_sparse.get() == 1 || search.percent > 100;
            let slabs = (Level::Partial as usize..LEVELS).flat_map(|level| block.all_at(level));
            let used = |slab: u32| blocks.slab(number, slab).used();
            let fits = |slab: &u32| {
                let is_sparse_enough = u64::from(used(*slab)) * 100 < u64::from(capacity) * u64::from(search.percent);
                is_sparse_enough && blocks.slab(number, *slab).tried.get() != search.pass
            };
            let slab = is_worth_it.then(|| slabs.filter(fits).min_by_key(|slab| used(*slab)))??;
            Some((used(slab), number, slab))
        };
        let (used, number, slab) = self.least((search.pass, search.percent), FULLEST, LOOKS, sparsest_of)?;
        let elsewhere = partial_room - u64::from(capacity - used);
        (elsewhere > 0).then(|| (number, slab, u64::from(used).min(elsewhere) as u32))
    }

    /// The least of what the first blocks have, from the emptiest list to the `last`: of so many that have anything. The others go to
    /// the end of their lists, where the same look does not come to them again before something in them has changed.
    fn least<T: Ord + Copy>(
        &mut self,
        look: (u32, u32),
        last: usize,
        most: usize,
        find: impl Fn(u32) -> Option<T>,
    ) -> Option<T> {
        self.books.looks.for_slabs.begin(look);
        let (mut least, mut count) = (None, 0);
        for list in IDLE + 1..=last {
            let mut at = self.books.lists.first(list);
            while let Some(number) = at.filter(|number| count < most && !self.is_spent(*number)) {
                at = Standing::next(self.blocks, number);
                self.note_look();
                let Some(found) = find(number) else {
                    self.blocks.block(number).spent.set(self.books.looks.for_slabs.number);
                    self.books.lists.move_last(self.blocks, number);
                    continue;
                };
                least = Some(least.map_or(found, |before: T| before.min(found)));
                count += 1;
            }
        }
        least
    }

    /// Whether the look that is under way has found nothing in a block. Such are last in their lists.
    pub fn is_spent(&self, number: u32) -> bool {
        self.blocks.block(number).spent.get() == self.books.looks.for_slabs.number
    }

    /// A slab of a block may be worth a look again.
    pub fn renew(&mut self, number: u32) {
        if self.is_spent(number) {
            let bucket = self.blocks.block(number).bucket();
            self.unlink(number);
            self.link(number, bucket);
        }
    }

    /// Claims all that is open of a block, which is to be emptied; says which slabs that are.
    fn leave(&mut self, number: u32, round: Option<u32>) -> SlabSet {
        let block = self.blocks.block(number);
        block.tried.set(round.unwrap_or(0));
        block.is_leaving.set(1);
        let mut claimed = SlabSet::default();
        for slab in block.all_set_up(self.shape.slabs) {
            if self.blocks.slab(number, slab).state() == State::Open {
                self.claim(number, slab);
                claimed.add(slab);
            }
        }
        self.file(number);
        claimed
    }

    /// Claims the block in use by the least parts, if it is whole and in use by half at most.
    pub fn claim_emptiest(&mut self) -> Option<(u32, SlabSet)> {
        let number = (IDLE + 1..=FULLEST).flat_map(|list| self.list(list)).next()?;
        let block = self.blocks.block(number);
        let is_half_used = 2 * block.used.get() <= self.shape.block_capacity();
        let is_it = is_half_used && block.is_sparse.get() == 0 && block.claimed.get() == 0;
        is_it.then(|| (number, self.leave(number, None)))
    }

    /// Claims a slab with objects that has not been tried in this pass, of the emptiest block that has one.
    pub fn claim_next(&mut self, pass: u32) -> Option<(u32, u32)> {
        let (blocks, slabs) = (self.blocks, self.shape.slabs);
        let (number, slab) = self.least((pass, ANY_PERCENT), FULL, 1, |number| {
            let slab = blocks.block(number).all_set_up(slabs).find(|slab| {
                let words = blocks.slab(number, *slab);
                words.state() == State::Open && words.used() > 0 && words.tried.get() != pass
            })?;
            Some((number, slab))
        })?;
        self.blocks.slab(number, slab).tried.set(pass);
        self.claim(number, slab);
        Some((number, slab))
    }

    /// Ends what [`Node::claim_source`] began with a block; claims of its slabs have been ended.
    pub fn return_block(&mut self, number: u32) {
        let block = self.blocks.block(number);
        block.is_leaving.set(0);
        // One that was left in the midst is gone on with.
        if block.tried.get() != 0 && block.used.get() > 0 {
            block.has_refused.set(1);
        }
        self.file(number);
    }
}
