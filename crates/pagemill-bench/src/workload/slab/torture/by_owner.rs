//! Caches of items that their owner moves, for the random operations. *Cells* contain the addresses of the items.
//! Readers get an address from a cell under a guard. Items on the board never change.
#![allow(unsafe_code)] // an owner

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use fastrand::Rng;
use pagemill_core::Result;
use pagemill_slab::{Candidates, Done, Migrate, Moving, OwnerSlab, Settings, SlabCache, SlabInfo, Slabs, Target};

use super::stamped::{Counters, Stamp};
use super::{BOARD_OBJECTS, RemoveOutcome, Subject};

/// Number of cells of a cache; each cell contains the address of one item.
const CELL_COUNT: usize = 1 << 15;

/// State of an item that is not allocated.
const STATE_FREE: u32 = 0;
/// State of an item in use that any thread may hold or move.
const STATE_LIVE: u32 = 1;
/// State of an item that a thread changes or pins.
const STATE_HELD: u32 = 2;
/// State of an item while defragmentation moves it.
const STATE_MOVING: u32 = 3;

/// An object of the cache, which has a state, the number of its cell, and words.
///
/// # Invariants
///
/// Only the thread that changed the state from free or live to held may write the words. After a move, the words of the
/// old item do not change until the cache reuses its memory.
#[repr(C)]
pub struct Item<const WORDS: usize> {
    state: AtomicU32,
    cell: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Item<WORDS> {
    fn fill(&self, stamp: Stamp) {
        self.words.iter().enumerate().for_each(|(at, word)| word.store(stamp.word(at), Relaxed));
    }

    fn is_intact_with(&self, stamp: Stamp) -> bool {
        self.words.iter().enumerate().all(|(at, word)| word.load(Relaxed) == stamp.word(at))
    }

    fn change_state(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Acquire, Relaxed).is_ok()
    }
}

/// The owner of the items. It has cells with the addresses of the items, and the numbers of the unused cells.
pub struct CellOwner<const WORDS: usize> {
    cells: Box<[AtomicPtr<Item<WORDS>>]>,
    free: Mutex<Vec<u32>>,
    /// Number of moves of items that were requested. The owner refuses some of them on purpose.
    moves: AtomicU64,
    counters: &'static Counters,
}

// SAFETY: the state of an item tells whether it is free. No other thread changes an item that `isolate` keeps until
// `migrate` releases it. The cell has the new address before the old item is free, and the old item's words stay.
unsafe impl<const WORDS: usize> Migrate for CellOwner<WORDS> {
    type Object = Item<WORDS>;
    type Isolated = ();

    fn construct(&self) -> Item<WORDS> {
        let words = [const { AtomicU64::new(0) }; WORDS];
        Item { state: AtomicU32::new(STATE_FREE), cell: AtomicU32::new(0), words }
    }

    fn isolate(&self, items: &mut Candidates<'_, Item<WORDS>>) {
        // SAFETY: objects of the cache always are items.
        items.retain(|item| unsafe { item.as_ref() }.change_state(STATE_LIVE, STATE_MOVING));
    }

    fn migrate<'object>(
        &self,
        item: Moving<'object, Item<WORDS>>,
        to: &mut Target<'_, Item<WORDS>>,
        _isolated: &mut (),
    ) -> Done<'object> {
        // SAFETY: the item is live, and `isolate` keeps it.
        let old = unsafe { item.object().as_ref() };
        let move_number = self.moves.fetch_add(1, Relaxed) % 64;
        if move_number == 0 {
            old.state.store(STATE_LIVE, Release);
            return item.busy();
        }
        let place = to.take();
        let Some(place) = place.filter(|_| move_number != 1) else {
            old.state.store(STATE_LIVE, Release);
            return item.failed();
        };
        // SAFETY: this is a free item of this owner.
        let new = unsafe { place.object().as_ref() };
        let is_free = new.change_state(STATE_FREE, STATE_HELD);
        self.counters.corrupted.fetch_add(u64::from(!is_free), Relaxed);
        new.words.iter().zip(&old.words).for_each(|(new, old)| new.store(old.load(Relaxed), Relaxed));
        let cell = old.cell.load(Relaxed);
        new.cell.store(cell, Relaxed);
        new.state.store(STATE_LIVE, Release);
        let named = self.cells[cell as usize].swap(place.object().as_ptr(), Release);
        self.counters.corrupted.fetch_add(u64::from(named != item.object().as_ptr()), Relaxed);
        old.state.store(STATE_FREE, Release);
        item.moved(place)
    }
}

/// The slab cache under test, whose items are moved by their owner.
pub struct OwnerCache<const WORDS: usize> {
    cache: OwnerSlab<CellOwner<WORDS>>,
    board: Vec<u32>,
    counters: &'static Counters,
}

/// A held item, which cannot be moved while this value exists.
pub struct HeldItem<'a, const WORDS: usize>(&'a Item<WORDS>);

impl<const WORDS: usize> OwnerCache<WORDS> {
    /// Returns the item of a cell. The caller must have an epoch guard, and the item must not be freed during the
    /// borrow.
    fn item(&self, cell: u32) -> &Item<WORDS> {
        let item = self.cache.owner().cells[cell as usize].load(Acquire);
        // SAFETY: cells in use refer to live items. If the item is moved, its old memory stays while the guard lives.
        unsafe { &*item }
    }

    fn is_intact_with(&self, cell: u32, stamp: Stamp) -> bool {
        let _guard = pagemill_xarray::pin();
        let item = self.item(cell);
        let was_whole = item.is_intact_with(stamp);
        // The item may be moved now, but under the guard its old copy does not change.
        stamp.maybe_yield();
        was_whole && item.is_intact_with(stamp)
    }

    /// Marks an item as held, so that it cannot be moved. Returns `None` if the item is already held or is being moved.
    fn hold(&self, cell: u32) -> Option<&Item<WORDS>> {
        let _guard = pagemill_xarray::pin();
        let item = self.item(cell);
        item.change_state(STATE_LIVE, STATE_HELD).then_some(item)
    }
}

impl<const WORDS: usize> Subject for OwnerCache<WORDS> {
    type Key = u32;
    type Pin<'a> = HeldItem<'a, WORDS>;

    fn new(slabs: &'static Slabs, counters: &'static Counters) -> Result<Self> {
        let cells = CellOwner {
            cells: (0..CELL_COUNT).map(|_| AtomicPtr::default()).collect(),
            free: Mutex::new((0..CELL_COUNT as u32).collect()),
            moves: AtomicU64::new(0),
            counters,
        };
        let mut items = Self { cache: slabs.by_owner(Settings::new("items"), cells)?, board: Vec::new(), counters };
        items.board = (0..BOARD_OBJECTS).map(|at| items.insert(Stamp::of_board(at), None)).collect::<Result<_>>()?;
        Ok(items)
    }

    fn insert(&self, stamp: Stamp, node: Option<usize>) -> Result<u32> {
        let at = match node {
            Some(node) => self.cache.allocate_on(node)?,
            None => self.cache.allocate()?,
        };
        // SAFETY: this is a free item to which no other thread has a reference.
        let item = unsafe { at.as_ref() };
        let is_free = item.change_state(STATE_FREE, STATE_HELD);
        self.counters.corrupted.fetch_add(u64::from(!is_free), Relaxed);
        self.counters.created.fetch_add(1, Relaxed);
        let owner = self.cache.owner();
        let cell = owner.free.lock().expect("the lock is not poisoned").pop().expect("more cells than items");
        item.fill(stamp);
        item.cell.store(cell, Relaxed);
        owner.cells[cell as usize].store(at.as_ptr(), Release);
        item.state.store(STATE_LIVE, Release);
        Ok(cell)
    }

    fn is_intact(&self, cell: &u32, stamp: Stamp) -> bool {
        self.is_intact_with(*cell, stamp)
    }

    fn update(&self, cell: &mut u32, old: Stamp, new: Stamp) -> Option<bool> {
        let item = self.hold(*cell)?;
        let was_whole = item.is_intact_with(old);
        item.fill(new);
        item.state.store(STATE_LIVE, Release);
        Some(was_whole)
    }

    fn remove(&self, cell: u32, stamp: Stamp) -> RemoveOutcome<u32> {
        let Some(item) = self.hold(cell) else { return RemoveOutcome::Busy(cell) };
        let was_whole = item.is_intact_with(stamp);
        let owner = self.cache.owner();
        owner.cells[cell as usize].store(std::ptr::null_mut(), Relaxed);
        owner.free.lock().expect("the lock is not poisoned").push(cell);
        self.counters.dropped.fetch_add(1, Relaxed);
        item.state.store(STATE_FREE, Release);
        // SAFETY: this thread held the item, and its state is free.
        unsafe { self.cache.free(NonNull::from(item)) };
        if was_whole { RemoveOutcome::Gone } else { RemoveOutcome::Missing }
    }

    fn pin(&self, cell: &u32) -> Option<Self::Pin<'_>> {
        self.hold(*cell).map(HeldItem)
    }

    fn unpin(&self, held: Self::Pin<'_>, stamp: Stamp) -> bool {
        let was_whole = held.0.is_intact_with(stamp);
        held.0.state.store(STATE_LIVE, Release);
        was_whole
    }

    fn address(&self, cell: &u32) -> usize {
        std::ptr::from_ref(self.item(*cell)) as usize
    }

    fn use_board_object(&self, at: u64, _random: &mut Rng) -> bool {
        self.is_intact_with(self.board[at as usize], Stamp::of_board(at))
    }

    fn move_some_objects(&self, random: &mut Rng) {
        super::move_some_objects_of(&self.cache, random);
    }

    fn info(&self) -> SlabInfo {
        self.cache.info().expect("a cache of this process")
    }

    fn check_and_drop(mut self, left: Vec<(u32, Stamp)>) -> u64 {
        let board = std::mem::take(&mut self.board);
        let board = board.into_iter().zip((0..BOARD_OBJECTS).map(Stamp::of_board));
        let _ = self.cache.shrink();
        let count = left.len() as u64 + BOARD_OBJECTS;
        let active = self.info().active;
        let all = left.into_iter().chain(board);
        let wrong = all.filter(|(cell, stamp)| !matches!(self.remove(*cell, *stamp), RemoveOutcome::Gone)).count();
        active.abs_diff(count) + wrong as u64 + self.info().active
    }
}
