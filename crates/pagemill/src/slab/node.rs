//! One cache on one node: its blocks by how full they are, the slabs in them, and a barn of free objects.
//!
//! Objects are taken from the fullest block, there from the fullest slab; so the emptiest empty themselves. Everything here is
//! under the lock of the node's [`Books`]; nothing here asks for memory.

use super::barn::Barn;
use super::blocks::Blocks;
use super::meta::{LEVELS, Level, State, level_of};
use super::shape::Shape;
use crate::units::BLOCK_BYTES;

/// Parts of a block's capacity that its use is told in.
const PARTS: u32 = 8;

/// Lists of blocks, from those of which nothing is in use on.
const IDLE: usize = 0;
const FULLEST: usize = PARTS as usize;
/// No room, but slabs that are not set up.
const GROWING: usize = FULLEST + 1;
const FULL: usize = GROWING + 1;
/// Being emptied.
const LEAVING: usize = FULL + 1;
const BUCKETS: usize = LEAVING + 1;

/// An idle block stays for the next object, and so many empty slabs of sparse blocks.
const KEPT_IDLE: u32 = 1;
const KEPT_EMPTY: u32 = 4;

/// What a look for the emptiest of a list goes over.
const LOOKS: usize = 16;

/// Where objects may be taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// Slabs that are partly in use.
    Partial,
    /// Blocks that are partly in use, with their empty slabs.
    Used,
    /// All that is set up.
    Any,
}

/// What is to be emptied next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A block, all slabs of which are claimed now.
    Block(u32),
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

/// What one cache has on one node.
pub(super) struct Books {
    heads: [u32; BUCKETS],
    blocks: u32,
    idle: u32,
    /// Blocks whose memory comes and goes as a whole.
    whole: u32,
    /// Slabs that are set up, and such in sparse blocks.
    slabs: u32,
    sparse: u32,
    /// Of these, with objects and room; and without any object.
    partial: u32,
    empty: u32,
    /// Of the empty ones, in sparse blocks.
    sparse_empty: u32,
    /// Objects that are not in slabs.
    used: u64,
    /// Objects that may be taken.
    room: u64,
    lost: u32,
    pub barn: Barn,
}

/// Figures of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub blocks: u32,
    pub slabs: u32,
    pub partial: u32,
    pub empty: u32,
    pub lost: u32,
    /// Objects outside of slabs.
    pub used: u64,
    /// Of these, in the barn.
    pub in_barn: u64,
    pub resident_bytes: u64,
}

/// The books of a node together with what they are about.
pub(super) struct Node<'a> {
    pub shape: &'a Shape,
    pub blocks: &'a Blocks,
    pub books: &'a mut Books,
}

impl Books {
    pub fn new(barn: Barn) -> Self {
        Self {
            heads: [0; BUCKETS],
            blocks: 0,
            idle: 0,
            whole: 0,
            slabs: 0,
            sparse: 0,
            partial: 0,
            empty: 0,
            sparse_empty: 0,
            used: 0,
            room: 0,
            lost: 0,
            barn,
        }
    }

    pub fn used(&self) -> u64 {
        self.used
    }
}

impl Node<'_> {
    /// Takes objects, up to as many as fit; tells where they are. 0 where nothing is set up that has room.
    pub fn take(&mut self, room: Room, taken: &mut [usize]) -> usize {
        let mut count = 0;
        while count < taken.len()
            && let Some((block, slab)) = self.find(room)
        {
            let base = self.blocks.addr(block);
            let left = &mut taken[count..];
            let before = self.level(block, slab);
            let (mut at, shape) = (0, self.shape);
            self.blocks.slab(block, slab).take(shape.capacity, left.len(), |object| {
                left[at] = base + shape.offset_of(slab, object);
                at += 1;
            });
            self.note_change(block, slab, before, at as i32);
            count += at;
        }
        count
    }

    fn find(&self, room: Room) -> Option<(u32, u32)> {
        let may_be_empty = room != Room::Partial;
        let mut lists = (IDLE + 1..=FULLEST).rev().chain((room == Room::Any).then_some(IDLE));
        lists.find_map(|list| {
            let mut blocks = self.list(list);
            blocks.find_map(|block| Some((block, self.blocks.block(block).fullest(may_be_empty)?)))
        })
    }

    /// Takes an object back.
    ///
    /// # Panics
    ///
    /// If no object begins there, or it is free already.
    pub fn give(&mut self, addr: usize) {
        let block = self.blocks.number_of(addr);
        let (slab, object, is_object) = self.shape.place_of(addr - self.blocks.addr(block));
        assert!(is_object, "no object of this cache begins at {addr:#x}");
        let before = self.level(block, slab);
        self.blocks.slab(block, slab).give(object);
        self.note_change(block, slab, before, -1);
    }

    /// Whether more is kept for the next object than should be: idle blocks, or empty slabs of sparse ones.
    pub fn has_spare(&self) -> bool {
        self.books.idle > KEPT_IDLE || self.books.sparse_empty > KEPT_EMPTY
    }

    /// The level at which an open slab stands.
    fn level(&self, block: u32, slab: u32) -> Option<usize> {
        level_of(self.blocks.slab(block, slab).used(), self.shape.capacity)
    }

    /// So many more objects of a slab are in use (or fewer).
    fn note_change(&mut self, number: u32, slab: u32, before: Option<usize>, more: i32) {
        let block = self.blocks.block(number);
        self.books.used = self.books.used.wrapping_add_signed(i64::from(more));
        block.used.set(block.used.get().wrapping_add_signed(more));
        if self.blocks.slab(number, slab).state() == State::Open {
            self.replace(number, slab, before, self.level(number, slab));
            block.room.set(block.room.get().wrapping_add_signed(-more));
            self.books.room = self.books.room.wrapping_add_signed(i64::from(-more));
        }
        self.file(number);
    }

    fn replace(&mut self, number: u32, slab: u32, before: Option<usize>, after: Option<usize>) {
        if before == after {
            return;
        }
        let block = self.blocks.block(number);
        let empty = |level: Option<usize>| u32::from(level == Some(Level::Empty as usize));
        let partial = |level: Option<usize>| u32::from(level.is_some_and(|level| level >= Level::Partial as usize));
        let (books, is_sparse) = (&mut *self.books, block.is_sparse.get());
        books.partial = books.partial + partial(after) - partial(before);
        books.empty = books.empty + empty(after) - empty(before);
        books.sparse_empty = books.sparse_empty + is_sparse * empty(after) - is_sparse * empty(before);
        if let Some(level) = before {
            block.remove(level, slab);
        }
        if let Some(level) = after {
            block.put(level, slab);
        }
    }

    /// Puts a block into the list that it belongs in.
    fn file(&mut self, number: u32) {
        let block = self.blocks.block(number);
        let bucket = self.bucket_of(number);
        let before = block.bucket.get() as usize;
        if bucket != before {
            self.unlink(number, before);
            self.link(number, bucket);
        }
    }

    fn bucket_of(&self, number: u32) -> usize {
        let block = self.blocks.block(number);
        if block.is_leaving.get() == 1 {
            LEAVING
        } else if block.used.get() == 0 && block.claimed.get() == 0 {
            IDLE
        } else if block.room.get() > 0 {
            1 + (block.used.get() * PARTS / self.shape.block_capacity()).min(PARTS - 1) as usize
        } else if block.first_at(Level::Bare as usize).is_some() {
            GROWING
        } else {
            FULL
        }
    }

    fn link(&mut self, number: u32, bucket: usize) {
        let block = self.blocks.block(number);
        let head = self.books.heads[bucket];
        block.next.set(head);
        block.before.set(0);
        block.bucket.set(bucket as u32);
        if let Some(next) = head.checked_sub(1) {
            self.blocks.block(next).before.set(number + 1);
        }
        self.books.heads[bucket] = number + 1;
        self.books.idle += u32::from(bucket == IDLE);
    }

    fn unlink(&mut self, number: u32, bucket: usize) {
        let block = self.blocks.block(number);
        let (next, before) = (block.next.get(), block.before.get());
        match before.checked_sub(1) {
            Some(before) => self.blocks.block(before).next.set(next),
            None => self.books.heads[bucket] = next,
        }
        if let Some(next) = next.checked_sub(1) {
            self.blocks.block(next).before.set(before);
        }
        self.books.idle -= u32::from(bucket == IDLE);
    }

    fn list(&self, bucket: usize) -> impl Iterator<Item = u32> {
        let first = self.books.heads[bucket].checked_sub(1);
        std::iter::successors(first, |block| self.blocks.block(*block).next.get().checked_sub(1))
    }

    /// Adds a block that the cache was given, all of it bare.
    pub fn add_block(&mut self, number: u32) {
        let block = self.blocks.block(number);
        for word in [&block.used, &block.room, &block.claimed, &block.slabs, &block.is_leaving, &block.tried] {
            word.set(0);
        }
        block.strip(self.shape.slabs);
        self.books.blocks += 1;
        self.books.whole += 1 - block.is_sparse.get();
        self.link(number, IDLE);
    }

    /// Takes an idle block off that is more than should be kept, or any where none should be.
    pub fn remove_idle(&mut self, keep_some: bool) -> Option<u32> {
        if self.books.idle <= if keep_some { KEPT_IDLE } else { 0 } {
            return None;
        }
        let number = self.books.heads[IDLE].checked_sub(1)?;
        let block = self.blocks.block(number);
        self.unlink(number, IDLE);
        self.books.blocks -= 1;
        self.books.whole -= 1 - block.is_sparse.get();
        self.books.slabs -= block.slabs.get();
        self.books.sparse -= block.slabs.get() * block.is_sparse.get();
        self.books.room -= u64::from(block.room.get());
        let empty = block.count_at(Level::Empty as usize);
        self.books.empty -= empty;
        self.books.sparse_empty -= empty * block.is_sparse.get();
        Some(number)
    }

    /// Takes a slab that is not set up, to do that.
    pub fn claim_bare(&mut self) -> Option<(u32, u32)> {
        let number = [GROWING, IDLE].into_iter().find_map(|list| {
            self.list(list).find(|block| self.blocks.block(*block).first_at(Level::Bare as usize).is_some())
        })?;
        let block = self.blocks.block(number);
        let slab = block.first_at(Level::Bare as usize)?;
        block.remove(Level::Bare as usize, slab);
        block.slabs.add(1);
        self.blocks.slab(number, slab).tried.set(0);
        self.books.slabs += 1;
        self.books.sparse += block.is_sparse.get();
        self.hold(number, slab);
        Some((number, slab))
    }

    /// Takes an empty slab of a sparse block whose memory can go; of some that are kept, where that is wanted, none.
    pub fn claim_empty(&mut self, keep_some: bool) -> Option<(u32, u32)> {
        if self.books.sparse_empty <= if keep_some { KEPT_EMPTY } else { 0 } {
            return None;
        }
        let is_it = |block: &u32| {
            let words = self.blocks.block(*block);
            words.is_sparse.get() == 1 && words.first_at(Level::Empty as usize).is_some()
        };
        let number = (IDLE..=FULLEST).find_map(|list| self.list(list).find(is_it))?;
        let slab = self.blocks.block(number).first_at(Level::Empty as usize)?;
        self.claim(number, slab);
        Some((number, slab))
    }

    fn hold(&mut self, number: u32, slab: u32) {
        self.blocks.slab(number, slab).set_state(State::Claimed);
        self.blocks.block(number).claimed.add(1);
        self.file(number);
    }

    /// Takes an open slab: nothing is taken from it until [`Node::open`].
    pub fn claim(&mut self, number: u32, slab: u32) {
        let level = self.level(number, slab);
        self.replace(number, slab, level, None);
        let free = self.shape.capacity - self.blocks.slab(number, slab).used();
        self.blocks.block(number).room.sub(free);
        self.books.room -= u64::from(free);
        self.hold(number, slab);
    }

    /// Ends a claim: objects may be taken from the slab.
    pub fn open(&mut self, number: u32, slab: u32) {
        let words = self.blocks.slab(number, slab);
        debug_assert_eq!(words.state(), State::Claimed);
        words.set_state(State::Open);
        let free = self.shape.capacity - words.used();
        let level = self.level(number, slab);
        self.replace(number, slab, None, level);
        self.blocks.block(number).room.add(free);
        self.books.room += u64::from(free);
        self.blocks.block(number).claimed.sub(1);
        self.file(number);
    }

    /// Ends a claim: the slab has no memory, and has to be set up again.
    pub fn strip(&mut self, number: u32, slab: u32) {
        let block = self.blocks.block(number);
        self.blocks.slab(number, slab).set_state(State::Open);
        block.put(Level::Bare as usize, slab);
        block.slabs.sub(1);
        self.books.slabs -= 1;
        self.books.sparse -= block.is_sparse.get();
        block.claimed.sub(1);
        self.file(number);
    }

    /// Ends a claim: the slab is never used again. Its objects can be given back, to nobody's use.
    pub fn lose(&mut self, number: u32, slab: u32) {
        self.blocks.slab(number, slab).set_state(State::Lost);
        self.books.lost += 1;
    }

    /// Claims what should be emptied next: a block whose objects find a place in others, else a slab some objects of which do.
    pub fn claim_source(&mut self, search: &Search) -> Option<Source> {
        if let Some(number) = self.sparsest_block(search) {
            self.leave(number, search);
            return Some(Source::Block(number));
        }
        let (number, slab, most) = self.sparsest_slab(search)?;
        self.blocks.slab(number, slab).tried.set(search.pass);
        self.claim(number, slab);
        Some(Source::Slab(number, slab, most))
    }

    fn sparsest_block(&self, search: &Search) -> Option<u32> {
        let round = search.round?;
        let idle_room: u64 = self.list(IDLE).map(|block| u64::from(self.blocks.block(block).room.get())).sum();
        let room = self.books.room - idle_room;
        let capacity = u64::from(self.shape.block_capacity());
        // Of a sparse block only what has memory counts, and that is looked at by slabs.
        let fits = |number: &u32| {
            let block = self.blocks.block(*number);
            let used = u64::from(block.used.get());
            let is_sparse_enough = used * 100 < capacity * u64::from(search.percent);
            is_sparse_enough && block.tried.get() != round && used <= room - u64::from(block.room.get())
        };
        (IDLE + 1..=FULLEST).find_map(|list| {
            self.list(list).take(LOOKS).filter(fits).min_by_key(|block| self.blocks.block(*block).used.get())
        })
    }

    /// A slab, and how many objects of it find a place in other partial ones. In whole blocks that helps only where all is packed.
    fn sparsest_slab(&self, search: &Search) -> Option<(u32, u32, u32)> {
        let capacity = self.shape.capacity;
        let partial_room = self.books.room - u64::from(self.books.empty) * u64::from(capacity);
        let candidates = (IDLE + 1..=FULLEST).flat_map(|list| self.list(list)).filter_map(|number| {
            let block = self.blocks.block(number);
            let is_worth_it = block.is_sparse.get() == 1 || search.percent > 100;
            let slabs = (Level::Partial as usize..LEVELS).flat_map(|level| block.all_at(level));
            let used = |slab: u32| self.blocks.slab(number, slab).used();
            let fits = |slab: &u32| {
                let is_sparse_enough = u64::from(used(*slab)) * 100 < u64::from(capacity) * u64::from(search.percent);
                is_sparse_enough && self.blocks.slab(number, *slab).tried.get() != search.pass
            };
            let slab = is_worth_it.then(|| slabs.filter(fits).min_by_key(|slab| used(*slab)))??;
            Some((used(slab), number, slab))
        });
        let (used, number, slab) = candidates.take(LOOKS).min()?;
        let elsewhere = partial_room - u64::from(capacity - used);
        (elsewhere > 0).then(|| (number, slab, u64::from(used).min(elsewhere) as u32))
    }

    /// Claims all that is set up of a block, which is to be emptied.
    fn leave(&mut self, number: u32, search: &Search) {
        let block = self.blocks.block(number);
        block.tried.set(search.round.unwrap_or(0));
        block.is_leaving.set(1);
        for slab in block.all_set_up(self.shape.slabs) {
            if self.blocks.slab(number, slab).state() == State::Open {
                self.claim(number, slab);
            }
        }
        self.file(number);
    }

    /// Slabs of a block that are claimed, each with whether this pass has tried it.
    pub fn claimed_slabs(&self, number: u32, pass: u32) -> Vec<(u32, bool)> {
        let words = |slab: &u32| self.blocks.slab(number, *slab);
        let claimed =
            self.blocks.block(number).all_set_up(self.shape.slabs).filter(|slab| words(slab).state() == State::Claimed);
        claimed.map(|slab| (slab, words(&slab).tried.get() == pass)).collect()
    }

    /// Claims a slab with objects that has not been tried in this pass, of the emptiest block that has one.
    pub fn claim_next(&mut self, pass: u32) -> Option<(u32, u32)> {
        let (number, slab) = (IDLE + 1..=FULL).flat_map(|list| self.list(list)).find_map(|number| {
            let mut slabs = self.blocks.block(number).all_set_up(self.shape.slabs);
            let slab = slabs.find(|slab| {
                let words = self.blocks.slab(number, *slab);
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
        self.blocks.block(number).is_leaving.set(0);
        self.file(number);
    }

    /// Slabs and blocks that objects are in.
    pub fn footprint(&self) -> u64 {
        u64::from(self.books.slabs - self.books.empty) + u64::from(self.books.blocks - self.books.idle)
    }

    pub fn tally(&self) -> Tally {
        let books = &self.books;
        let (whole, sparse) = (books.whole as usize * BLOCK_BYTES, books.sparse as usize * self.shape.slab_bytes);
        Tally {
            blocks: books.blocks,
            slabs: books.slabs,
            partial: books.partial,
            empty: books.empty,
            lost: books.lost,
            used: books.used,
            in_barn: books.barn.objects() as u64,
            resident_bytes: (whole + sparse) as u64,
        }
    }

    /// What the books say is what the slabs say.
    #[cfg(test)]
    pub fn check(&self) {
        let (mut blocks, mut used, mut room, mut slabs, mut idle) = (0, 0, 0, 0, 0);
        let (mut empty, mut sparse_empty, mut partial, mut resident) = (0, 0, 0, 0);
        for bucket in 0..BUCKETS {
            for number in self.list(bucket) {
                let block = self.blocks.block(number);
                assert_eq!((bucket, bucket), (self.bucket_of(number), block.bucket.get() as usize), "block {number}");
                let (mut own_used, mut own_room, mut claimed) = (0, 0, 0);
                let all: Vec<u32> = block.all_set_up(self.shape.slabs).collect();
                for slab in &all {
                    let words = self.blocks.slab(number, *slab);
                    own_used += words.used();
                    let level = self.level(number, *slab);
                    let stands_at = (0..LEVELS).find(|level| block.all_at(*level).any(|at| at == *slab));
                    if words.state() == State::Open {
                        assert_eq!(stands_at, level);
                        own_room += self.shape.capacity - words.used();
                    } else {
                        assert_eq!(stands_at, None);
                        claimed += 1;
                    }
                    let set = words.set_objects(0, usize::MAX, |_| ());
                    assert_eq!(set as u32, words.used());
                }
                assert_eq!(
                    (block.used.get(), block.room.get(), block.claimed.get(), block.slabs.get()),
                    (own_used, own_room, claimed, all.len() as u32)
                );
                blocks += 1;
                idle += u32::from(bucket == IDLE);
                slabs += block.slabs.get();
                used += u64::from(own_used);
                room += u64::from(own_room);
                empty += block.count_at(Level::Empty as usize);
                partial += (Level::Partial as usize..LEVELS).map(|level| block.count_at(level)).sum::<u32>();
                resident += self.blocks.resident_bytes_of(number);
                sparse_empty += block.count_at(Level::Empty as usize) * block.is_sparse.get();
            }
        }
        let books = &self.books;
        assert_eq!((books.blocks, books.idle, books.slabs), (blocks, idle, slabs));
        assert_eq!((books.partial, self.tally().resident_bytes), (partial, resident));
        assert_eq!((books.used, books.room, books.empty, books.sparse_empty), (used, room, empty, sparse_empty));
    }
}
