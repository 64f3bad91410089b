//! Tests of caches by owner. The owner is a map of numbered items. The owner moves an item by copying the item and
//! storing its new address in the map.
#![allow(unsafe_code)] // implements an owner

use super::*;
use crate::caches::tests::basics::{
    STUCK_AFTER, finish_retired, rounds_until_moved, shrink_until_packed, slabs, slabs_on_nodes, slabs_with,
    sparse_slabs,
};
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_core::{arena, epoch};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};
use std::time::Duration;
use std::{sync::Mutex, sync::OnceLock, thread::ThreadId};

/// Number of words in the body of an item.
const BODY_WORDS: usize = 22;

/// The object type of the tested caches.
#[repr(C)]
pub(crate) struct Item {
    /// Number of references to the item. 0: the item is free; 1: live; more: pinned.
    references: AtomicU32,
    number: AtomicU64,
    body: [AtomicU64; BODY_WORDS],
}

/// Value of `number` in a free item. A newly constructed item also has this value in all words of its body.
const FREE_NUMBER: u64 = 0xfee;

/// Behaviour of the owner's `isolate` and `migrate`.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Behavior {
    #[default]
    Move,
    /// Frees items with even numbers instead of moving them.
    FreeSome,
    /// Takes a destination for a move, but moves no item to it.
    Fail,
    PanicInIsolate,
    PanicInMigrate,
    /// Panics in the destructor of the result of `isolate`.
    PanicAfterwards,
    CallInIsolate,
    /// Waits in `migrate` until the behaviour is changed.
    Wait,
}

type Hook = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(crate) struct ItemOwner {
    items: Mutex<BTreeMap<u64, usize>>,
    pub behavior: Arc<Mutex<Behavior>>,
    /// Set while the owner waits in `migrate`.
    pub waits: AtomicBool,
    pub ended_on: Arc<OnceLock<ThreadId>>,
    panics_in_construct: AtomicBool,
    /// A function that the next `construct` calls once.
    on_construct: Mutex<Option<Hook>>,
    on_isolate: Mutex<Option<Hook>>,
    constructed: AtomicU64,
}

impl Drop for ItemOwner {
    fn drop(&mut self) {
        let _ = self.ended_on.set(std::thread::current().id());
    }
}

/// Result of `isolate`: the number of the selected items that are still to be moved.
pub(crate) struct IsolatedItems {
    count: usize,
    is_to_panic: bool,
}

impl Drop for IsolatedItems {
    fn drop(&mut self) {
        assert!(!self.is_to_panic, "an owner that fails, as it should here");
    }
}

// SAFETY: items are found through the map and count their users. The old copy of a moved item is free.
unsafe impl Migrate for ItemOwner {
    type Object = Item;
    type Isolated = IsolatedItems;

    fn construct(&self) -> Item {
        assert!(!self.panics_in_construct.load(Relaxed), "a constructor that fails, as it should here");
        let hook = self.on_construct.lock().unwrap().take();
        hook.into_iter().for_each(|hook| hook());
        self.constructed.fetch_add(1, Relaxed);
        Item {
            references: AtomicU32::new(0),
            number: AtomicU64::new(FREE_NUMBER),
            body: [const { AtomicU64::new(FREE_NUMBER) }; BODY_WORDS],
        }
    }

    fn isolate(&self, items: &mut Candidates<'_, Item>) -> IsolatedItems {
        let hook = self.on_isolate.lock().unwrap().take();
        hook.into_iter().for_each(|hook| hook());
        let behavior = *self.behavior.lock().unwrap();
        assert!(behavior != Behavior::PanicInIsolate, "an owner that fails, as it should here");
        if behavior == Behavior::CallInIsolate {
            crate::defrag::isolating::assert_not_isolating();
        }
        let mut count = 0;
        items.retain(|item| {
            // SAFETY: objects of the cache are always valid items.
            let references = unsafe { &item.as_ref().references };
            let is_kept = references.compare_exchange(1, 2, AcqRel, Acquire).is_ok();
            count += usize::from(is_kept);
            is_kept
        });
        IsolatedItems { count, is_to_panic: behavior == Behavior::PanicAfterwards }
    }

    fn migrate<'object>(
        &self,
        item: Moving<'object, Item>,
        to: &mut Target<'_, Item>,
        left: &mut IsolatedItems,
    ) -> Done<'object> {
        left.count -= 1;
        while *self.behavior.lock().unwrap() == Behavior::Wait {
            self.waits.store(true, Relaxed);
            std::thread::yield_now();
        }
        // SAFETY: the item is live, and `isolate` took a reference to it.
        let old = unsafe { item.object().as_ref() };
        let number = old.number.load(Relaxed);
        let behavior = *self.behavior.lock().unwrap();
        assert!(behavior != Behavior::PanicInMigrate || number % 64 != 33, "an owner that fails, as it should here");
        let mut items = self.items.lock().unwrap();
        if behavior == Behavior::FreeSome && number % 2 == 0 {
            items.remove(&number);
            release(old);
            return item.freed();
        }
        let Some(new) = to.take() else {
            old.references.fetch_sub(1, AcqRel);
            return item.failed();
        };
        if behavior == Behavior::Fail {
            old.references.fetch_sub(1, AcqRel);
            return item.failed();
        }
        // SAFETY: a free item that only this call uses.
        let copy = unsafe { new.object().as_ref() };
        assert_eq!(
            (copy.references.load(Acquire), copy.number.load(Relaxed)),
            (0, FREE_NUMBER),
            "it is as it was constructed"
        );
        copy.fill(number);
        assert!(old.is_whole(number));
        copy.references.store(1, Relaxed);
        assert_eq!(items.insert(number, new.object().as_ptr() as usize), Some(item.object().as_ptr() as usize));
        release(old);
        item.moved(new)
    }
}

/// Makes an item free again. Readers may still read the item's body.
fn release(item: &Item) {
    item.number.store(FREE_NUMBER, Relaxed);
    item.references.store(0, Relaxed);
}

impl Item {
    fn fill(&self, number: u64) {
        self.number.store(number, Relaxed);
        self.body.iter().zip(number..).for_each(|(word, value)| word.store(value, Relaxed));
    }

    fn is_whole(&self, number: u64) -> bool {
        self.number.load(Relaxed) == number
            && self.body.iter().zip(number..).all(|(word, value)| word.load(Relaxed) == value)
    }
}

pub(crate) fn cache_of(slabs: &'static Slabs, settings: Settings) -> OwnerSlab<ItemOwner> {
    slabs.by_owner(settings, ItemOwner::default()).unwrap()
}

pub(crate) trait Items {
    fn add(&self, number: u64);
    fn add_on(&self, node: usize, number: u64);
    fn remove(&self, number: u64) -> bool;
    fn check_all(&self) -> u64;
    fn item(&self, number: u64) -> NonNull<Item>;
    /// As [`shrink_until_packed`].
    fn pack(&self) -> u64;
}

impl Items for OwnerSlab<ItemOwner> {
    fn add(&self, number: u64) {
        register(self, self.allocate().unwrap(), number);
    }

    fn add_on(&self, node: usize, number: u64) {
        register(self, self.allocate_on(node).unwrap(), number);
    }

    /// Removes an item if it exists and is not in use. Returns whether the item was removed.
    fn remove(&self, number: u64) -> bool {
        let mut items = self.owner().items.lock().unwrap();
        let Some(item) = items.get(&number).map(|at| NonNull::new(*at as *mut Item).unwrap()) else { return false };
        // SAFETY: the item is in the map, so it is live. The map is locked.
        let words = unsafe { item.as_ref() };
        if words.references.compare_exchange(1, 0, AcqRel, Acquire).is_err() {
            return false;
        }
        assert!(words.is_whole(number));
        items.remove(&number);
        drop(items);
        words.number.store(FREE_NUMBER, Relaxed);
        // SAFETY: the item is free and has no users.
        unsafe { self.free(item) };
        true
    }

    /// Checks that each item exists once, undamaged, at an address of its own. Returns the number of items.
    fn check_all(&self) -> u64 {
        let items = self.owner().items.lock().unwrap();
        let mut addresses: Vec<usize> = items.values().copied().collect();
        addresses.sort_unstable();
        assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= size_of::<Item>()));
        for (number, at) in &*items {
            // SAFETY: the item is in the map, so it is live.
            let item = unsafe { &*(*at as *const Item) };
            assert!(item.is_whole(*number) && item.references.load(Acquire) == 1, "item {number}");
        }
        items.len() as u64
    }

    fn item(&self, number: u64) -> NonNull<Item> {
        NonNull::new(self.owner().items.lock().unwrap()[&number] as *mut Item).unwrap()
    }

    fn pack(&self) -> u64 {
        let counts = || self.info().map(|info| (info.moved, info.freed)).unwrap();
        shrink_until_packed(self.engine(), || self.shrink().unwrap(), counts, || false)
    }
}

fn register(cache: &OwnerSlab<ItemOwner>, at: NonNull<Item>, number: u64) {
    // SAFETY: an allocated item, which is free.
    let item = unsafe { at.as_ref() };
    assert_eq!((item.references.load(Relaxed), item.number.load(Relaxed)), (0, FREE_NUMBER));
    item.fill(number);
    let before = cache.owner().items.lock().unwrap().insert(number, at.as_ptr() as usize);
    assert_eq!(before, None);
    item.references.store(1, std::sync::atomic::Ordering::Release);
}

/// Pins an item, so that it is not moved.
pub(crate) fn pin(cache: &OwnerSlab<ItemOwner>, number: u64) {
    // SAFETY: the item is in the map, so it is live.
    unsafe { cache.item(number).as_ref() }.references.fetch_add(1, AcqRel);
}

pub(crate) fn unpin(cache: &OwnerSlab<ItemOwner>, number: u64) {
    // SAFETY: the item is in the map, so it is live.
    unsafe { cache.item(number).as_ref() }.references.fetch_sub(1, AcqRel);
}

/// Adds items and removes nine of ten, at pseudorandom positions.
fn fragment_cache(cache: &OwnerSlab<ItemOwner>, items: u64) -> u64 {
    (0..items).for_each(|number| cache.add(number));
    let is_kept = |number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & 0xff < 26;
    (0..items).filter(|number| !is_kept(*number)).for_each(|number| assert!(cache.remove(number)));
    (0..items).filter(|number| is_kept(*number)).count() as u64
}

/// After packing, the last block holds only a few items, so most of a huge page would be wasted. These items must lie
/// in small pages. Resident memory must not exceed the charge, even at addresses of a former huge page.
#[test]
fn last_block_is_in_small_pages_after_packing() {
    let layout = arena::Layout { huge_from_bytes: 3 * BLOCK_BYTES as u64 / 2, ..arena::Layout::for_test() };
    let (slabs, _) = slabs_with(layout, UNLIMITED);
    let cache = cache_of(slabs, Settings::new("last"));
    let per_block = {
        cache.add(0);
        let info = cache.info().unwrap();
        (BLOCK_BYTES / info.slab_bytes) as u64 * u64::from(info.objects_per_slab)
    };
    // The first blocks are in small pages and are emptied. Of the items in other blocks one in six is left; these fill
    // a little more than four blocks.
    let items = 27 * per_block + 600;
    let is_left = |number: &u64| *number >= 3 * per_block && number.is_multiple_of(6);
    (1..items).for_each(|number| cache.add(number));
    (0..items).filter(|number| !is_left(number)).for_each(|number| assert!(cache.remove(number)));
    let left = (0..items).filter(is_left).count() as u64;

    // Free blocks with memory would influence whether a whole block counts as wasted.
    slabs.shrink(u64::MAX, Urgency::Request);
    cache.pack();

    assert_packed(&cache, left);
    let info = cache.info().unwrap();
    assert!(info.total.resident_bytes < 5 * BLOCK_BYTES as u64, "{info:?}");
    let window_bytes = 32 * BLOCK_BYTES;
    let in_memory = pagemill_sys::mem::resident_bytes(cache.engine().shared.blocks.addr(0), window_bytes).unwrap();
    assert!(in_memory as u64 <= info.total.resident_bytes, "{in_memory} {info:?}");
    // Later items can be allocated.
    (items..items + per_block).for_each(|number| cache.add(number));
    assert_eq!(cache.check_all(), left + per_block);
}

/// Checks that at most one slab is partial, no block is superfluous, and each item exists once.
fn assert_packed(cache: &OwnerSlab<ItemOwner>, items: u64) {
    let info = cache.info().unwrap();
    assert_eq!((cache.check_all(), info.active, info.cached), (items, items, 0));
    let slabs = items.div_ceil(u64::from(info.objects_per_slab));
    assert_eq!(u64::from(info.total.slabs - info.total.empty), slabs, "{info:?}");
    assert!(info.total.partial <= 1, "{info:?}");
    let per_block = (BLOCK_BYTES / info.slab_bytes) as u64;
    assert_eq!(u64::from(info.total.blocks), slabs.div_ceil(per_block), "{info:?}");
    cache.engine().check_state();
}

/// Nine of ten items of a cache are freed. The rest must be packed into as few slabs and blocks as possible, and the
/// other memory must be freed.
#[test]
fn a_fragmented_cache_is_packed() {
    for slabs in [slabs(), sparse_slabs()] {
        let cache = cache_of(slabs, Settings::new("packed"));
        let items = fragment_cache(&cache, 100_000);
        let before = cache.info().unwrap();
        assert!(before.total.partial > 100);
        let freed = cache.pack();
        assert_packed(&cache, items);
        let after = cache.info().unwrap();
        assert_eq!(before.total.resident_bytes - after.total.resident_bytes, freed);
        assert!(after.moved > items / 2 && after.emptied > 100, "{after:?}");
        // A second call must move no item.
        assert_eq!((cache.pack(), cache.info().unwrap().moved), (0, after.moved));
        (0..100_000).for_each(|number| _ = cache.remove(number));
        cache.pack();
        assert_eq!(cache.info().unwrap().total, NodeInfo::default());
    }
}

/// A cache has one item more than one slab holds. After one item is freed, packing must leave one full slab.
#[test]
fn two_slabs_become_one() {
    let cache = cache_of(slabs(), Settings::new("two"));
    let per_slab = u64::from(cache.info().unwrap().objects_per_slab);
    (0..=per_slab).for_each(|number| cache.add(number));
    cache.pack();
    let total = cache.info().unwrap().total;
    assert_eq!((total.slabs - total.empty, total.partial), (2, 1));
    cache.remove(3);
    cache.pack();
    assert_packed(&cache, per_slab);
    let info = cache.info().unwrap();
    assert_eq!((info.total.partial, info.moved), (0, 1));
}

/// Two blocks with few items are packed. One of them must remain, and its bare slabs must take the items of the other
/// block. The test allocates a third block, because the second one is unusable while it is emptied under a guard.
#[test]
fn bare_slabs_are_destinations_when_packing() {
    let cache = cache_of(slabs(), Settings::new("bare"));
    let info = cache.info().unwrap();
    let (per_slab, slabs_each) = (u64::from(info.objects_per_slab), (BLOCK_BYTES / info.slab_bytes) as u64);
    // The first block loses half of its items. The second is less than a quarter full, and its items fit into the
    // first, except for some that are pinned.
    let (per_block, pinned) = (slabs_each * per_slab, 2 * per_slab);
    let end = per_block + slabs_each / 4 * per_slab - 1;
    (0..end).for_each(|number| cache.add(number));
    (0..per_block).step_by(2).for_each(|number| assert!(cache.remove(number)));
    (end - pinned..end).for_each(|number| pin(&cache, number));
    cache.set_defrag_used_ratio(100).unwrap();
    let guard = epoch::pin();
    while !cache.defrag_step(Duration::from_secs(1)).unwrap().is_done {}
    // These items fill the first block, and ten slabs of a third.
    let more = end + per_block / 2 - (end - per_block - pinned);
    (end..more + 10 * per_slab).for_each(|number| cache.add(number));
    drop(guard);
    finish_retired(cache.engine());
    let block_of = |number| cache.item(number).as_ptr() as usize / BLOCK_BYTES;
    let (first, second) = (block_of(1), block_of(end - 1));
    let numbers: Vec<u64> = cache.owner().items.lock().unwrap().keys().copied().collect();
    let (gone, left): (Vec<u64>, Vec<u64>) = numbers.into_iter().partition(|number| block_of(*number) == first);
    gone.iter().for_each(|number| assert!(cache.remove(*number)));
    assert!(
        left.iter().any(|number| block_of(*number) == second) && left.iter().any(|number| block_of(*number) != second)
    );
    (end - pinned..end).for_each(|number| unpin(&cache, number));

    cache.pack();

    assert_packed(&cache, left.len() as u64);
}

/// Pinned items must keep their address and be counted as refused. After they are unpinned, they must be moved.
#[test]
fn pinned_items_keep_their_address() {
    let cache = cache_of(slabs(), Settings::new("pinned"));
    let items = fragment_cache(&cache, 60_000);
    let pinned: Vec<u64> = cache.owner().items.lock().unwrap().keys().copied().step_by(1_000).collect();
    pinned.iter().for_each(|number| pin(&cache, *number));
    let addresses: Vec<_> = pinned.iter().map(|number| cache.item(*number)).collect();
    cache.pack();
    let info = cache.info().unwrap();
    assert!(info.refused >= pinned.len() as u64 - 2, "{info:?}");
    assert_eq!(pinned.iter().map(|number| cache.item(*number)).collect::<Vec<_>>(), addresses);
    assert!(u64::from(info.total.partial) <= pinned.len() as u64 + 1, "{info:?}");
    pinned.iter().for_each(|number| unpin(&cache, *number));
    cache.pack();
    assert_packed(&cache, items);
}

/// Items that their owner frees must be counted as freed, and items that the owner fails to move must be counted as
/// failed. All other items must stay intact.
#[test]
fn each_outcome_is_counted() {
    let cache = cache_of(slabs(), Settings::new("outcomes"));
    let items = fragment_cache(&cache, 60_000);
    *cache.owner().behavior.lock().unwrap() = Behavior::Fail;
    assert_eq!(cache.pack(), 0);
    let info = cache.info().unwrap();
    assert_eq!((info.moved, info.active, cache.check_all()), (0, items, items));
    assert!(info.failed > 1_000, "{info:?}");
    *cache.owner().behavior.lock().unwrap() = Behavior::FreeSome;
    cache.pack();
    let info = cache.info().unwrap();
    assert!(info.freed > 1_000 && info.moved > 1_000, "{info:?}");
    assert_packed(&cache, items - info.freed);
}

/// For several ratios, runs steps that empty one slab each until nothing is left to do. Resident memory must then be
/// bounded by the ratio and the live items. At a ratio of 0 no item may move.
#[test]
fn ratio_bounds_resident_memory() {
    let kinds = [slabs(), sparse_slabs()];
    for (slabs, ratio) in kinds.into_iter().flat_map(|slabs| [0, 30, 60, 100].map(|ratio| (slabs, ratio))) {
        let cache = cache_of(slabs, Settings::new("ratio"));
        let items = fragment_cache(&cache, 80_000);
        let before = cache.info().unwrap().total.resident_bytes;
        cache.set_defrag_used_ratio(ratio).unwrap();
        let mut steps = 0;
        loop {
            // A budget of zero ends each step after one slab, on any machine.
            let progress = cache.defrag_step(Duration::ZERO).unwrap();
            finish_retired(cache.engine());
            if progress.is_done && progress.moved == 0 {
                break;
            }
            steps += 1;
        }
        cache.engine().shrink().unwrap();
        let info = cache.info().unwrap();
        let live = items * info.stride_bytes as u64;
        if ratio == 0 {
            assert_eq!((info.moved, steps), (0, 0));
            assert!(info.total.resident_bytes > before / 2);
        } else {
            let bound = live * 100 / u64::from(ratio) + BLOCK_BYTES as u64;
            assert!(steps > 1 && info.total.resident_bytes <= bound, "{ratio}: {bound} {info:?}");
        }
        assert_eq!(cache.check_all(), items);
    }
    let cache = cache_of(slabs(), Settings::new("ratio"));
    assert!(matches!(cache.set_defrag_used_ratio(101), Err(Error::BadRatio { percent: 101 })));
}

/// Raising the ratio must resume defragmentation that is suspended, although no item was added or removed.
#[test]
fn raised_ratio_resumes_defragmentation() {
    let cache = cache_of(slabs(), Settings::new("raised"));
    (0..60_000).for_each(|number| cache.add(number));
    (0..60_000).filter(|number| number % 2 == 0).for_each(|number| assert!(cache.remove(number)));
    // Several steps, so that defragmentation is suspended afterwards.
    for _ in 0..10 {
        cache.defrag_step(Duration::from_secs(1)).unwrap();
        finish_retired(cache.engine());
    }
    cache.set_defrag_used_ratio(100).unwrap();
    assert!(cache.defrag_step(Duration::from_secs(1)).unwrap().moved > 0);
}

/// Steps over all caches must empty the slabs and blocks of which less than their cache's ratio is in use. After a pass
/// that freed nothing, a step must do nothing.
#[test]
fn all_caches_are_defragmented() {
    let slabs = slabs();
    let caches = ["one", "other"].map(|name| cache_of(slabs, Settings::new(name)));
    let items = caches.each_ref().map(|cache| fragment_cache(cache, 60_000));
    loop {
        let progress = slabs.defrag_step(Duration::from_millis(5));
        caches.iter().for_each(|cache| finish_retired(cache.engine()));
        if progress.is_done && progress.moved == 0 {
            break;
        }
    }
    for (cache, items) in caches.iter().zip(items) {
        let info = cache.info().unwrap();
        assert!(info.moved > items / 4 && info.total.blocks <= 3, "{info:?}");
        assert_eq!(cache.check_all(), items);
    }
    let progress = slabs.defrag_step(Duration::from_secs(1));
    assert_eq!((progress.moved, progress.stayed, progress.is_done), (0, 0, true));
}

/// Memory becomes short during a step that frees nothing. The next steps must empty all slabs and blocks that are not
/// full, until a pass frees nothing.
#[test]
fn steps_continue_when_memory_becomes_short() {
    let cache = Arc::new(cache_of(slabs(), Settings::new("pressed")));
    let items = fragment_cache(&cache, 60_000);
    let step = || assert!(cache.defrag_step(Duration::MAX).unwrap().is_done);
    let is_memory_short = || cache.engine().passes.is_memory_short();
    *cache.owner().behavior.lock().unwrap() = Behavior::Fail;
    let pressed = cache.clone();
    *cache.owner().on_isolate.lock().unwrap() = Some(Box::new(move || _ = pressed.engine().passes.note_memory_short()));
    step();
    assert!(is_memory_short() && cache.info().unwrap().moved == 0);
    *cache.owner().behavior.lock().unwrap() = Behavior::Move;
    while is_memory_short() {
        step();
        finish_retired(cache.engine());
    }
    assert!(cache.info().unwrap().moved > 0 && cache.check_all() == items);
}

/// An item that was looked up under a guard is moved. The item must stay readable at its old address, and its slab must
/// not be reused before the guard is dropped.
#[test]
fn moved_item_stays_readable_under_a_guard() {
    let cache = cache_of(slabs(), Settings::new("readers"));
    (0..100_000).for_each(|number| cache.add(number));
    (0..100_000).filter(|number| number % 10 != 0).for_each(|number| assert!(cache.remove(number)));
    let guard = epoch::pin();
    let old: Vec<_> = (0..10_000).map(|number| cache.item(number * 10)).collect();
    while !cache.defrag_step(Duration::from_secs(1)).unwrap().is_done {}
    cache.engine().finish_retired();
    let moved: Vec<_> = (0..10_000).filter(|number| cache.item(number * 10) != old[*number as usize]).collect();
    assert!(moved.len() > 5_000);
    // New items must not be allocated in emptied slabs.
    (200_000..210_000).for_each(|number| cache.add(number));
    for number in moved {
        // SAFETY: the item was looked up under the guard, which still exists.
        let item = unsafe { old[number as usize].as_ref() };
        assert!(item.body.iter().zip(number * 10..).all(|(word, value)| word.load(Relaxed) == value));
    }
    let before = cache.info().unwrap().total.blocks;
    drop(guard);
    finish_retired(cache.engine());
    cache.engine().shrink().unwrap();
    assert!(cache.info().unwrap().total.blocks < before);
    cache.pack();
    assert_packed(&cache, 20_000);
}

/// `move_objects` must move as many items to another node as requested. `balance` must move only surplus items.
#[test]
fn items_move_between_nodes() {
    let cache = cache_of(slabs_on_nodes(3), Settings::new("nodes"));
    (0..3_000).for_each(|number| cache.add_on(0, number));
    let used = || cache.info().unwrap().nodes.iter().map(|node| node.used).collect::<Vec<_>>();
    assert_eq!(used(), [3_000, 0, 0]);
    assert!(matches!(cache.move_objects(0, 1, 700), Ok(Progress { moved: 700, is_done: true, .. })));
    assert_eq!(used(), [2_300, 700, 0]);
    let moved = cache.info().unwrap().moved;
    assert!(cache.balance().unwrap().is_done);
    assert_eq!((used(), cache.info().unwrap().moved - moved), (vec![1_000; 3], 1_300));
    assert_eq!(cache.balance().unwrap().moved, 0);
    assert_eq!(cache.move_objects(2, 0, u64::MAX).unwrap().moved, 1_000);
    assert_eq!(used(), [2_000, 1_000, 0]);
    assert!((0..3_000).all(|number| cache.node_of(cache.item(number)) < 2));
    for (from, to) in [(0, 3), (7, 0)] {
        assert!(matches!(cache.move_objects(from, to, 1), Err(Error::BadNode { nodes: 3, .. })));
    }
    cache.pack();
    assert_eq!(cache.check_all(), 3_000);
    let info = cache.info().unwrap();
    assert!(info.nodes.iter().all(|node| node.partial <= 1) && info.nodes[2].blocks == 0, "{info:?}");
    cache.engine().check_state();
}

fn panics(act: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(act)).is_err()
}

/// A callback panics. The slab that it was called for must become unusable: its items stay and can be freed, but no
/// item may be allocated from the slab.
#[test]
fn panic_of_a_callback_makes_the_slab_unusable() {
    for behavior in
        [Behavior::PanicInIsolate, Behavior::PanicInMigrate, Behavior::PanicAfterwards, Behavior::CallInIsolate]
    {
        let cache = cache_of(slabs(), Settings::new("panics"));
        let items = fragment_cache(&cache, 60_000);
        *cache.owner().behavior.lock().unwrap() = behavior;
        assert!(panics(|| _ = cache.shrink()));
        cache.owner().behavior.clear_poison();
        *cache.owner().behavior.lock().unwrap() = Behavior::Move;
        cache.owner().items.clear_poison();
        // The failed owner still has references to items of the lost slab, which are reset here.
        for (number, at) in &*cache.owner().items.lock().unwrap() {
            // SAFETY: the item is in the map, so it is live.
            let item = unsafe { &*(*at as *const Item) };
            assert!(item.is_whole(*number));
            item.references.store(1, Relaxed);
        }
        assert_eq!(cache.info().unwrap().total.lost, 1);
        cache.pack();
        let info = cache.info().unwrap();
        assert_eq!((cache.check_all(), info.active, info.total.lost), (items, items, 1));
        assert!(info.total.partial <= 1, "{info:?}");
        (0..60_000).for_each(|number| _ = cache.remove(number));
        cache.pack();
        let info = cache.info().unwrap();
        assert_eq!((info.active, info.total.blocks, info.total.lost), (0, 1, 1), "its block stays");
        // As many items as a block has do not fit into the block with the lost slab.
        let per_block = u64::from(info.objects_per_slab) * (BLOCK_BYTES / info.slab_bytes) as u64;
        (0..per_block).for_each(|number| cache.add(number));
        let info = cache.info().unwrap();
        assert_eq!((info.active, info.total.blocks, info.total.lost), (per_block, 2, 1), "it is not used again");
        (0..per_block).for_each(|number| assert!(cache.remove(number)));
        cache.engine().check_state();
    }
}

/// Calls to `info` and `list` from `isolate` must panic, because they would wait for the lock under which `isolate`
/// runs.
#[test]
fn info_and_list_panic_in_isolate() {
    let slabs = slabs();
    let cache = Arc::new(cache_of(slabs, Settings::new("asked")));
    let items = fragment_cache(&cache, 20_000);
    let (tell, told) = std::sync::mpsc::channel();
    let asked = cache.clone();
    let ask = move || tell.send([panics(|| _ = asked.info()), panics(|| _ = slabs.list())]).unwrap();
    let packed = cache.clone();
    *cache.owner().on_isolate.lock().unwrap() = Some(Box::new(ask));
    let packer = std::thread::spawn(move || packed.pack());
    assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok([true; 2]));
    packer.join().unwrap();
    assert_packed(&cache, items);
}

/// Reclaim runs inside of `isolate`, as it may when a callback allocates. Reclaim must free the memory of free blocks
/// and must not deadlock.
#[test]
fn reclaim_in_isolate_does_not_deadlock() {
    let slabs = slabs();
    let cache = cache_of(slabs, Settings::new("asks"));
    let items = fragment_cache(&cache, 20_000);
    let other = cache_of(slabs, Settings::new("gone"));
    other.add(0);
    assert!(other.remove(0));
    drop(other);
    let (freed, wait_freed) = std::sync::mpsc::channel();
    *cache.owner().on_isolate.lock().unwrap() =
        Some(Box::new(move || freed.send(slabs.shrink(u64::MAX, Urgency::Limit)).unwrap()));
    let packer = std::thread::spawn(move || {
        cache.pack();
        assert_packed(&cache, items);
    });
    let freed = wait_freed.recv_timeout(STUCK_AFTER).expect("no thread waits for itself");
    assert!(freed >= BLOCK_BYTES as u64, "{freed}");
    packer.join().unwrap();
}

/// A constructor panics. The unfinished slab must become unusable, and the next allocation must use another slab.
#[test]
fn panic_of_the_constructor_makes_the_slab_unusable() {
    let cache = cache_of(slabs(), Settings::new("constructor"));
    cache.owner().panics_in_construct.store(true, Relaxed);
    assert!(panics(|| _ = cache.allocate()));
    cache.owner().panics_in_construct.store(false, Relaxed);
    cache.add(1);
    let info = cache.info().unwrap();
    assert_eq!((info.active, info.total.lost, info.total.slabs), (1, 1, 2));
    assert_eq!(cache.owner().constructed.load(Relaxed), u64::from(info.objects_per_slab), "each is constructed once");
    cache.engine().check_state();
}

/// Threads add, remove and read items while another thread packs the cache continuously. No item may be lost,
/// duplicated or damaged.
#[test]
fn threads_use_items_while_they_move() {
    const THREADS: u64 = 2;
    const SPAN: u64 = 20_000;
    let cache = cache_of(slabs(), Settings::new("beside"));
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..THREADS)
            .map(|thread| {
                let cache = &cache;
                scope.spawn(move || {
                    let mut seed = thread + 1;
                    let mut random = move || {
                        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        seed >> 33
                    };
                    let mut live = vec![false; SPAN as usize];
                    for _ in rounds_until_moved(150_000, || cache.info().unwrap().moved) {
                        let at = random() % SPAN;
                        let number = thread * SPAN + at;
                        if live[at as usize] {
                            // The removal fails while the item is being moved.
                            live[at as usize] = !cache.remove(number);
                        } else if random() % 8 == 0 {
                            cache.add(number);
                            live[at as usize] = true;
                        }
                    }
                    live.iter().filter(|is_live| **is_live).count() as u64
                })
            })
            .collect();
        let (cache, is_done) = (&cache, &is_done);
        let packer = scope.spawn(move || {
            while !is_done.load(Relaxed) {
                match cache.shrink() {
                    Ok(_) | Err(Error::Busy { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let live: u64 = users.into_iter().map(|user| user.join().unwrap()).sum();
        is_done.store(true, Relaxed);
        packer.join().unwrap();
        cache.pack();
        assert_packed(cache, live);
    });
}

/// Caches are dropped while another thread shrinks and lists all caches. The memory of the dropped caches must be
/// freed.
#[test]
fn threads_drop_caches_that_others_shrink() {
    let (slabs, is_done) = (slabs(), &AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !is_done.load(Relaxed) {
                slabs.shrink(u64::MAX, Urgency::Limit);
                slabs.list().iter().for_each(|info| assert_eq!(&*info.name, "dropped"));
            }
        });
        for _ in 0..50 {
            let cache = cache_of(slabs, Settings::new("dropped"));
            (0..2_000).for_each(|number| cache.add(number));
            (0..2_000).for_each(|number| assert!(cache.remove(number)));
        }
        is_done.store(true, Relaxed);
    });
    slabs.shrink(u64::MAX, Urgency::Limit);
    assert_eq!((slabs.list(), slabs.giveable_bytes()), (Vec::new(), 0));
    assert_eq!(slabs.arena.budget.room().0, 0);
}

/// A constructor waits until a step of defragmentation has run and its readers have finished. The step must not empty
/// the slab that is being set up, even if it empties the slab's block.
#[test]
fn a_slab_is_not_emptied_while_it_is_set_up() {
    let cache = cache_of(slabs(), Settings::new("set up"));
    let info = cache.info().unwrap();
    let per_block = u64::from(info.objects_per_slab) * (BLOCK_BYTES / info.slab_bytes) as u64;
    // One block is full, and another has one full slab.
    (0..per_block + u64::from(info.objects_per_slab)).for_each(|number| cache.add(number));
    let (begun, wait_begun) = std::sync::mpsc::channel();
    let (go_on, wait_go_on) = std::sync::mpsc::channel();
    *cache.owner().on_construct.lock().unwrap() = Some(Box::new(move || {
        begun.send(()).unwrap();
        wait_go_on.recv().unwrap();
    }));
    std::thread::scope(|scope| {
        let cache = &cache;
        let adder = scope.spawn(move || cache.add(1 << 40));
        wait_begun.recv().unwrap();
        // After these removals the items of the second block fit into the first.
        (0..per_block / 2).for_each(|number| assert!(cache.remove(number)));
        (per_block..per_block + 10).for_each(|number| assert!(cache.remove(number)));
        while !cache.defrag_step(Duration::from_secs(1)).unwrap().is_done {}
        finish_retired(cache.engine());
        cache.engine().check_state();
        go_on.send(()).unwrap();
        adder.join().unwrap();
    });
    cache.pack();
    assert_packed(&cache, per_block / 2 + u64::from(info.objects_per_slab) - 10 + 1);
}
