//! State of one cache on one NUMA node: its blocks, listed by how full they are, and the slabs in them.
//!
//! Objects are taken from the fullest block, and there from the fullest slab, so sparse slabs drain by themselves.
//! Everything here runs under the lock of the node's [`NodeState`] (the allocator state) and allocates no memory.

use super::blocks::Blocks;
use super::candidates::Searches;
use super::lists::Lists;
#[cfg(any(test, feature = "test-util"))]
use super::meta::LEVELS;
use super::meta::{Level, Objects, STANDING, SlabState, level_of};
use super::shape::Shape;
use pagemill_core::units::BLOCK_BYTES;

/// Number of classes of block use.
pub(super) const PARTS: u32 = 8;

/// Lists of blocks. First the blocks without an object in use.
pub(super) const IDLE: usize = 0;
pub(super) const FULLEST: usize = PARTS as usize;
/// No room in slabs that are set up, but some slabs are bare (not set up).
pub(super) const GROWING: usize = FULLEST + 1;
pub(super) const FULL: usize = GROWING + 1;
/// Blocks that are being emptied.
const LEAVING: usize = FULL + 1;
pub(super) const BUCKETS: usize = LEAVING + 1;

/// `KEPT_IDLE`: idle blocks kept for the next objects. `KEPT_EMPTY`: empty slabs of sparse blocks kept for them.
const KEPT_IDLE: u32 = 1;
const KEPT_EMPTY: u32 = 4;

/// Memory to keep for the next objects when the rest is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// [`KEPT_IDLE`] and [`KEPT_EMPTY`].
    Some,
    Nothing,
}

/// The slabs that objects may be taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetRoom {
    /// Partial slabs.
    Partial,
    /// Partial and empty slabs of blocks in use; for moves, their bare slabs, too.
    Used,
    /// As `Used`, but only of blocks with at least this many objects in use.
    Fuller(u32),
    /// All slabs that are set up.
    Any,
}

/// Allocator state of one cache on one node.
pub(super) struct NodeState {
    pub lists: Lists<BUCKETS, STANDING>,
    pub searches: Searches,
    blocks: u32,
    idle: u32,
    /// Number of whole blocks: each is charged and returned as a whole.
    whole: u32,
    /// `slabs`: number of slabs that are set up. `sparse`: number of those in sparse blocks.
    slabs: u32,
    sparse: u32,
    /// `partial`: number of partial slabs. `empty`: number of empty slabs.
    partial: u32,
    pub empty: u32,
    /// Number of empty slabs in sparse blocks.
    sparse_empty: u32,
    /// `bare`: number of bare slabs in whole blocks that are in use; they have memory. `bare_in`: the same for each list.
    pub bare: u32,
    pub bare_in: [u32; BUCKETS],
    /// Objects outside of slabs: in use, or in magazines and barns.
    used: u64,
    /// `room`: objects that can be taken. `room_in`: the same for each list.
    pub room: u64,
    pub room_in: [u64; BUCKETS],
    /// Objects that users returned to slabs since the last [`super::engine::Engine::take_given`].
    pub given: u64,
    lost: u32,
}

/// Statistics of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub blocks: u32,
    pub slabs: u32,
    pub partial: u32,
    pub empty: u32,
    pub lost: u32,
    /// Objects outside of slabs.
    pub used: u64,
    pub resident_bytes: u64,
}

/// The allocator state of a node, with the blocks that it describes.
pub(super) struct Node<'a> {
    pub shape: &'a Shape,
    pub blocks: &'a Blocks,
    pub state: &'a mut NodeState,
}

impl NodeState {
    pub fn new() -> Self {
        Self {
            lists: Lists::new(),
            searches: Searches::new(),
            blocks: 0,
            idle: 0,
            whole: 0,
            slabs: 0,
            sparse: 0,
            partial: 0,
            empty: 0,
            sparse_empty: 0,
            bare: 0,
            bare_in: [0; BUCKETS],
            used: 0,
            room: 0,
            room_in: [0; BUCKETS],
            given: 0,
            lost: 0,
        }
    }

    pub fn used(&self) -> u64 {
        self.used
    }
}

impl Node<'_> {
    /// Takes up to `taken.len()` objects and writes their addresses. Returns how many: 0 if no suitable slab has room.
    pub fn take(&mut self, room: TargetRoom, taken: &mut [usize]) -> usize {
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

    fn find(&self, room: TargetRoom) -> Option<(u32, u32)> {
        let may_be_empty = room != TargetRoom::Partial;
        let least = if let TargetRoom::Fuller(least) = room { self.list_of(least) + 1 } else { IDLE + 1 };
        let mut lists = (least..=FULLEST).rev().chain((room == TargetRoom::Any).then_some(IDLE));
        let in_slab = |block| Some((block, self.blocks.block(block).fullest(may_be_empty)?));
        let found = lists.find_map(|list| self.list(list).find_map(in_slab));
        if let (None, TargetRoom::Fuller(least)) = (found, room) {
            return self.first_of(self.list_of(least), least).find_map(in_slab);
        }
        found
    }

    /// Returns an object to its slab.
    ///
    /// # Panics
    ///
    /// If no object begins at `addr`, or it is free already.
    pub fn give(&mut self, addr: usize) {
        let block = self.blocks.number_of(addr);
        let (slab, object, is_object) = self.shape.place_of(addr - self.blocks.addr(block));
        assert!(is_object, "no object of this cache begins at {addr:#x}");
        let before = self.level(block, slab);
        self.blocks.slab(block, slab).give(object);
        self.note_change(block, slab, before, -1);
    }

    /// Returns several objects of one slab.
    ///
    /// # Panics
    ///
    /// If one of them is free already.
    pub fn give_all(&mut self, block: u32, slab: u32, objects: &Objects) {
        let before = self.level(block, slab);
        self.blocks.slab(block, slab).give_all(objects);
        self.note_change(block, slab, before, -(objects.count() as i32));
    }

    /// Whether more is kept than [`Keep::Some`] allows: idle blocks, or empty slabs of sparse blocks.
    pub fn has_spare(&self) -> bool {
        self.state.idle > KEPT_IDLE || self.state.sparse_empty > KEPT_EMPTY
    }

    /// The level of an open slab.
    fn level(&self, block: u32, slab: u32) -> Option<usize> {
        level_of(self.blocks.slab(block, slab).used(), self.shape.capacity)
    }

    /// Records that `more` objects of a slab were taken (negative: returned).
    fn note_change(&mut self, number: u32, slab: u32, before: Option<usize>, more: i32) {
        let block = self.blocks.block(number);
        self.state.used = self.state.used.wrapping_add_signed(i64::from(more));
        block.used.set(block.used.get().wrapping_add_signed(more));
        if self.blocks.slab(number, slab).state() == SlabState::Open {
            self.replace(number, slab, before, self.level(number, slab));
            self.add_room(number, -more);
        }
        self.file(number);
    }

    fn add_room(&mut self, number: u32, more: i32) {
        let block = self.blocks.block(number);
        block.room.set(block.room.get().wrapping_add_signed(more));
        for room in [&mut self.state.room, &mut self.state.room_in[block.bucket()]] {
            *room = room.wrapping_add_signed(i64::from(more));
        }
    }

    fn replace(&mut self, number: u32, slab: u32, before: Option<usize>, after: Option<usize>) {
        if before == after {
            return;
        }
        let block = self.blocks.block(number);
        let empty = |level: Option<usize>| u32::from(level == Some(Level::Empty as usize));
        let partial = |level: Option<usize>| u32::from(level.is_some_and(|level| level >= Level::Partial as usize));
        let (state, is_sparse) = (&mut *self.state, block.is_sparse.get());
        state.partial = state.partial + partial(after) - partial(before);
        state.empty = state.empty + empty(after) - empty(before);
        state.sparse_empty = state.sparse_empty + is_sparse * empty(after) - is_sparse * empty(before);
        if let Some(level) = before {
            block.remove(level, slab);
        }
        if let Some(level) = after {
            block.put(level, slab);
        }
        // Changes within a quarter are seen by the next pass.
        if partial(after) == 1 {
            self.renew(number);
        }
    }

    /// Moves a block to the list that it belongs in.
    pub fn file(&mut self, number: u32) {
        let bucket = self.bucket_of(number);
        if bucket != self.blocks.block(number).bucket() {
            self.unlink(number);
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
            self.list_of(block.used.get())
        } else if block.first_at(Level::Bare as usize).is_some() {
            GROWING
        } else {
            FULL
        }
    }

    /// The list of blocks with room and this many objects in use.
    pub fn list_of(&self, used: u32) -> usize {
        IDLE + 1 + (used * PARTS / self.shape.block_capacity()).min(PARTS - 1) as usize
    }

    pub fn link(&mut self, number: u32, bucket: usize) {
        let block = self.blocks.block(number);
        block.spent.set(0);
        self.state.lists.put_first(self.blocks, bucket, number);
        self.queue(number);
        self.state.room_in[bucket] += u64::from(block.room.get());
        self.add_bare(number, self.bare_in_use(number) as i32);
        if bucket == IDLE {
            self.state.idle += 1;
            block.has_refused.set(0);
        }
    }

    fn add_bare(&mut self, number: u32, more: i32) {
        for bare in [&mut self.state.bare, &mut self.state.bare_in[self.blocks.block(number).bucket()]] {
            *bare = bare.wrapping_add_signed(more);
        }
    }

    /// The bare slabs of a block that count in `bare` and `bare_in`: none if the block is sparse, idle or leaving.
    pub fn bare_in_use(&self, number: u32) -> u32 {
        let block = self.blocks.block(number);
        let is_counted = block.is_sparse.get() == 0 && ![IDLE, LEAVING].contains(&block.bucket());
        if is_counted { block.count_at(Level::Bare as usize) } else { 0 }
    }

    pub fn unlink(&mut self, number: u32) {
        let block = self.blocks.block(number);
        self.add_bare(number, -(self.bare_in_use(number) as i32));
        self.state.room_in[block.bucket()] -= u64::from(block.room.get());
        self.state.idle -= u32::from(block.bucket() == IDLE);
        self.state.lists.remove(self.blocks, number);
        self.dequeue(number);
    }

    pub fn list(&self, bucket: usize) -> impl Iterator<Item = u32> {
        self.state.lists.iter(self.blocks, bucket)
    }

    /// Adds a block. All of its slabs are bare.
    pub fn add_block(&mut self, number: u32) {
        let block = self.blocks.block(number);
        for word in [&block.used, &block.room, &block.claimed, &block.slabs, &block.is_leaving, &block.tried] {
            word.set(0);
        }
        block.strip(self.shape.slabs);
        self.state.blocks += 1;
        self.state.whole += 1 - block.is_sparse.get();
        self.link(number, IDLE);
    }

    /// Removes an idle block if there are more than to be kept.
    pub fn remove_idle(&mut self, keep: Keep) -> Option<u32> {
        if self.state.idle <= if keep == Keep::Some { KEPT_IDLE } else { 0 } {
            return None;
        }
        let number = self.state.lists.first(IDLE)?;
        let block = self.blocks.block(number);
        self.unlink(number);
        self.state.blocks -= 1;
        self.state.whole -= 1 - block.is_sparse.get();
        self.state.slabs -= block.slabs.get();
        self.state.sparse -= block.slabs.get() * block.is_sparse.get();
        self.state.room -= u64::from(block.room.get());
        let empty = block.count_at(Level::Empty as usize);
        self.state.empty -= empty;
        self.state.sparse_empty -= empty * block.is_sparse.get();
        Some(number)
    }

    /// Bytes of idle whole blocks, and of empty slabs of sparse blocks.
    pub fn kept_bytes(&self) -> u64 {
        let whole = self.list(IDLE).filter(|block| self.blocks.block(*block).is_sparse.get() == 0).count();
        let empty = u64::from(self.state.sparse_empty) * self.shape.slab_bytes as u64;
        whole as u64 * BLOCK_BYTES as u64 + empty
    }

    /// Claims a bare slab, to set it up.
    pub fn claim_bare(&mut self) -> Option<(u32, u32)> {
        let number = [GROWING, IDLE].into_iter().find_map(|list| {
            self.list(list).find(|block| self.blocks.block(*block).first_at(Level::Bare as usize).is_some())
        })?;
        self.claim_bare_of(number)
    }

    /// As [`Node::claim_bare`], but needs no additional memory: takes the slab from the fullest whole block in use that
    /// has a bare slab and at least `least` objects in use.
    pub fn claim_bare_in_use(&mut self, least: u32) -> Option<(u32, u32)> {
        let is_it = |block: &u32| {
            let words = self.blocks.block(*block);
            words.is_sparse.get() == 0 && words.used.get() >= least && words.first_at(Level::Bare as usize).is_some()
        };
        let lists = [GROWING].into_iter().chain((self.list_of(least)..=FULLEST).rev());
        let number =
            (self.state.bare > 0).then(|| lists.into_iter().find_map(|list| self.list(list).find(is_it)))??;
        self.claim_bare_of(number)
    }

    fn claim_bare_of(&mut self, number: u32) -> Option<(u32, u32)> {
        let block = self.blocks.block(number);
        let slab = block.first_at(Level::Bare as usize)?;
        let before = self.bare_in_use(number);
        block.remove(Level::Bare as usize, slab);
        self.add_bare(number, self.bare_in_use(number) as i32 - before as i32);
        block.slabs.add(1);
        self.blocks.slab(number, slab).tried.set(0);
        self.state.slabs += 1;
        self.state.sparse += block.is_sparse.get();
        self.hold(number, slab);
        Some((number, slab))
    }

    /// Claims an empty slab of a sparse block, to free its memory, if there are more than to be kept.
    pub fn claim_empty(&mut self, keep: Keep) -> Option<(u32, u32)> {
        if self.state.sparse_empty <= if keep == Keep::Some { KEPT_EMPTY } else { 0 } {
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
        self.blocks.slab(number, slab).set_state(SlabState::Claimed);
        self.blocks.block(number).claimed.add(1);
        self.file(number);
    }

    /// Claims an open slab: no object is taken from it until [`Node::open`].
    pub fn claim(&mut self, number: u32, slab: u32) {
        let level = self.level(number, slab);
        self.replace(number, slab, level, None);
        let free = self.shape.capacity - self.blocks.slab(number, slab).used();
        self.add_room(number, -(free as i32));
        self.hold(number, slab);
    }

    /// Ends a claim: objects may be taken from the slab again.
    pub fn open(&mut self, number: u32, slab: u32) {
        let words = self.blocks.slab(number, slab);
        debug_assert_eq!(words.state(), SlabState::Claimed);
        words.set_state(SlabState::Open);
        let free = self.shape.capacity - words.used();
        let level = self.level(number, slab);
        self.replace(number, slab, None, level);
        self.add_room(number, free as i32);
        self.blocks.block(number).claimed.sub(1);
        self.renew(number);
        self.file(number);
    }

    /// Ends a claim: the slab is bare, and must be set up before use.
    pub fn strip(&mut self, number: u32, slab: u32) {
        let block = self.blocks.block(number);
        self.blocks.slab(number, slab).set_state(SlabState::Open);
        block.put(Level::Bare as usize, slab);
        block.slabs.sub(1);
        self.state.slabs -= 1;
        self.state.sparse -= block.is_sparse.get();
        block.claimed.sub(1);
        self.file(number);
    }

    /// Makes a claimed slab unusable for good. Its objects can be returned, but are not allocated again.
    pub fn lose(&mut self, number: u32, slab: u32) {
        self.blocks.slab(number, slab).set_state(SlabState::Lost);
        self.state.lost += 1;
    }

    /// Number of slabs and blocks with objects in use.
    pub fn footprint(&self) -> u64 {
        u64::from(self.state.slabs - self.state.empty) + u64::from(self.state.blocks - self.state.idle)
    }

    pub fn tally(&self) -> Tally {
        let state = &self.state;
        let (whole, sparse) = (state.whole as usize * BLOCK_BYTES, state.sparse as usize * self.shape.slab_bytes);
        Tally {
            blocks: state.blocks,
            slabs: state.slabs,
            partial: state.partial,
            empty: state.empty,
            lost: state.lost,
            used: state.used,
            resident_bytes: (whole + sparse) as u64,
        }
    }

    /// Lists are consistent in both directions, with spent blocks last.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check_lists(&self) {
        self.state.lists.check(self.blocks);
        self.check_queues();
        assert!((0..BUCKETS).all(|bucket| self.list(bucket).is_sorted_by_key(|number| self.is_spent(number))));
    }

    /// The counters match the slabs.
    #[cfg(any(test, feature = "test-util"))]
    pub fn check(&self) {
        let (mut blocks, mut used, mut room, mut slabs, mut idle) = (0, 0, 0, 0, 0);
        let (mut empty, mut sparse_empty, mut partial, mut resident, mut bare) = (0, 0, 0, 0, 0);
        self.check_lists();
        for bucket in 0..BUCKETS {
            let room_in: u32 = self.list(bucket).map(|number| self.blocks.block(number).room.get()).sum();
            let bare_in: u32 = self.list(bucket).map(|number| self.bare_in_use(number)).sum();
            assert_eq!((u64::from(room_in), bare_in), (self.state.room_in[bucket], self.state.bare_in[bucket]));
            for number in self.list(bucket) {
                let block = self.blocks.block(number);
                assert_eq!((bucket, bucket), (self.bucket_of(number), block.bucket()), "block {number}");
                let (mut own_used, mut own_room, mut claimed) = (0, 0, 0);
                let all: Vec<u32> = block.all_set_up(self.shape.slabs).collect();
                for slab in &all {
                    let words = self.blocks.slab(number, *slab);
                    own_used += words.used();
                    let level = self.level(number, *slab);
                    let stands_at = (0..LEVELS).find(|level| block.all_at(*level).any(|at| at == *slab));
                    if words.state() == SlabState::Open {
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
                bare += self.bare_in_use(number);
            }
        }
        let state = &self.state;
        assert_eq!((state.blocks, state.idle, state.slabs), (blocks, idle, slabs));
        assert_eq!((state.partial, state.bare, self.tally().resident_bytes), (partial, bare, resident));
        assert_eq!((state.used, state.room, state.empty, state.sparse_empty), (used, room, empty, sparse_empty));
    }
}
