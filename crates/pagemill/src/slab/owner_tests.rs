//! Caches by owner, as behaviours. The owner here is a book of numbered items: it finds each by its number, and moves one by
//! copying it and writing its new place down.
#![allow(unsafe_code)] // an owner

use super::tests::{settle, slabs, slabs_on_nodes, sparse_slabs};
use super::*;
use crate::units::BLOCK_BYTES;
use crate::xarray;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};
use std::time::Duration;

const WORDS: usize = 22;

#[repr(C)]
pub(super) struct Item {
    /// 0 free, 1 live, more: somebody has it.
    references: AtomicU32,
    number: AtomicU64,
    body: [AtomicU64; WORDS],
}

const FREE: u64 = 0xfee;

/// What the owner does when it is to move an item.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Whim {
    #[default]
    Move,
    /// Items of even numbers are freed instead.
    FreeSome,
    /// There is a place, which is not used.
    Fail,
    PanicInIsolate,
    PanicInMigrate,
    CallInIsolate,
}

#[derive(Default)]
pub(super) struct Book {
    items: Mutex<BTreeMap<u64, usize>>,
    whim: Mutex<Whim>,
    panics_in_construct: AtomicBool,
    constructed: AtomicU64,
}

// SAFETY: items are found through the book and count who has them; the old place of a moved one is free.
unsafe impl Migrate for Book {
    type Object = Item;
    type Isolated = usize;

    fn construct(&self) -> Item {
        assert!(!self.panics_in_construct.load(Relaxed), "a constructor that fails, as it should here");
        self.constructed.fetch_add(1, Relaxed);
        Item {
            references: AtomicU32::new(0),
            number: AtomicU64::new(FREE),
            body: [const { AtomicU64::new(FREE) }; WORDS],
        }
    }

    fn isolate(&self, items: &mut Candidates<'_, Item>) -> usize {
        let whim = *self.whim.lock().unwrap();
        assert!(whim != Whim::PanicInIsolate, "an owner that fails, as it should here");
        if whim == Whim::CallInIsolate {
            super::defrag::assert_not_isolating();
        }
        let mut kept = 0;
        items.retain(|item| {
            // SAFETY: objects of the cache are items at all times.
            let references = unsafe { &item.as_ref().references };
            let is_kept = references.compare_exchange(1, 2, AcqRel, Acquire).is_ok();
            kept += usize::from(is_kept);
            is_kept
        });
        kept
    }

    fn migrate<'object>(
        &self,
        item: Moving<'object, Item>,
        to: &mut Target<'_, Item>,
        left: &mut usize,
    ) -> Done<'object> {
        *left -= 1;
        // SAFETY: live, and held by `isolate`.
        let old = unsafe { item.object().as_ref() };
        let number = old.number.load(Relaxed);
        let whim = *self.whim.lock().unwrap();
        assert!(whim != Whim::PanicInMigrate || number % 64 != 33, "an owner that fails, as it should here");
        let mut items = self.items.lock().unwrap();
        if whim == Whim::FreeSome && number % 2 == 0 {
            items.remove(&number);
            release(old);
            return item.freed();
        }
        let Some(new) = to.take() else {
            old.references.fetch_sub(1, AcqRel);
            return item.failed();
        };
        if whim == Whim::Fail {
            old.references.fetch_sub(1, AcqRel);
            return item.failed();
        }
        // SAFETY: a free item, this owner's.
        let copy = unsafe { new.object().as_ref() };
        assert_eq!(
            (copy.references.load(Acquire), copy.number.load(Relaxed)),
            (0, FREE),
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

/// Makes an item free. Readers may still look at its body.
fn release(item: &Item) {
    item.number.store(FREE, Relaxed);
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

pub(super) fn cache_of(slabs: &'static Slabs, settings: Settings) -> ByOwner<Book> {
    slabs.by_owner(settings, Book::default()).unwrap()
}

pub(super) trait Items {
    fn add(&self, number: u64);
    fn add_on(&self, node: usize, number: u64);
    fn remove(&self, number: u64) -> bool;
    fn check_all(&self) -> u64;
    fn item(&self, number: u64) -> NonNull<Item>;
    /// Shrinks until readers of other tests have not been in the way.
    fn pack(&self) -> u64;
}

impl Items for ByOwner<Book> {
    fn add(&self, number: u64) {
        enter(self, self.allocate().unwrap(), number);
    }

    fn add_on(&self, node: usize, number: u64) {
        enter(self, self.allocate_on(node).unwrap(), number);
    }

    /// Takes an item out, if it is there and nobody has it.
    fn remove(&self, number: u64) -> bool {
        let mut items = self.owner().items.lock().unwrap();
        let Some(item) = items.get(&number).map(|at| NonNull::new(*at as *mut Item).unwrap()) else { return false };
        // SAFETY: in the book, so live; the book is locked.
        let words = unsafe { item.as_ref() };
        if words.references.compare_exchange(1, 0, AcqRel, Acquire).is_err() {
            return false;
        }
        assert!(words.is_whole(number));
        items.remove(&number);
        drop(items);
        words.number.store(FREE, Relaxed);
        // SAFETY: free, and nobody's.
        unsafe { self.free(item) };
        true
    }

    /// Each item is there once, whole, at a place of its own. Returns how many there are.
    fn check_all(&self) -> u64 {
        let items = self.owner().items.lock().unwrap();
        let mut places: Vec<usize> = items.values().copied().collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= size_of::<Item>()));
        for (number, at) in &*items {
            // SAFETY: in the book.
            let item = unsafe { &*(*at as *const Item) };
            assert!(item.is_whole(*number) && item.references.load(Acquire) == 1, "item {number}");
        }
        items.len() as u64
    }

    fn item(&self, number: u64) -> NonNull<Item> {
        NonNull::new(self.owner().items.lock().unwrap()[&number] as *mut Item).unwrap()
    }

    fn pack(&self) -> u64 {
        let mut freed = self.shrink().unwrap();
        while self.engine().has_batches() {
            settle(self.engine());
            freed += self.shrink().unwrap();
        }
        freed
    }
}

fn enter(cache: &ByOwner<Book>, at: NonNull<Item>, number: u64) {
    // SAFETY: an item, free as it was constructed.
    let item = unsafe { at.as_ref() };
    assert_eq!((item.references.load(Relaxed), item.number.load(Relaxed)), (0, FREE));
    item.fill(number);
    let before = cache.owner().items.lock().unwrap().insert(number, at.as_ptr() as usize);
    assert_eq!(before, None);
    item.references.store(1, std::sync::atomic::Ordering::Release);
}

/// Pins an item, which then stays.
fn pin(cache: &ByOwner<Book>, number: u64) {
    // SAFETY: in the book.
    unsafe { cache.item(number).as_ref() }.references.fetch_add(1, AcqRel);
}

fn unpin(cache: &ByOwner<Book>, number: u64) {
    // SAFETY: in the book.
    unsafe { cache.item(number).as_ref() }.references.fetch_sub(1, AcqRel);
}

/// Adds so many items and removes nine of ten, no matter where.
fn fragmented(cache: &ByOwner<Book>, items: u64) -> u64 {
    (0..items).for_each(|number| cache.add(number));
    let is_kept = |number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & 0xff < 26;
    (0..items).filter(|number| !is_kept(*number)).for_each(|number| assert!(cache.remove(number)));
    (0..items).filter(|number| is_kept(*number)).count() as u64
}

/// After a shrink one slab at most is partly in use, and no block is there that is not needed; each item is there once.
fn assert_packed(cache: &ByOwner<Book>, items: u64) {
    let info = cache.info().unwrap();
    assert_eq!((cache.check_all(), info.active, info.cached), (items, items, 0));
    let slabs = items.div_ceil(u64::from(info.objects_per_slab));
    assert_eq!(u64::from(info.total.slabs - info.total.empty), slabs, "{info:?}");
    assert!(info.total.partial <= 1, "{info:?}");
    let per_block = (BLOCK_BYTES / info.slab_bytes) as u64;
    assert_eq!(u64::from(info.total.blocks), slabs.div_ceil(per_block), "{info:?}");
    cache.engine().check_books();
}

/// Of many items nine of ten are freed: what is left ends up in as few slabs and blocks as can be, and memory comes back.
#[test]
fn a_fragmented_cache_is_packed() {
    for slabs in [slabs(), sparse_slabs()] {
        let cache = cache_of(slabs, Settings::new("packed"));
        let items = fragmented(&cache, 100_000);
        let before = cache.info().unwrap();
        assert!(before.total.partial > 100);
        let freed = cache.pack();
        assert_packed(&cache, items);
        let after = cache.info().unwrap();
        assert_eq!(before.total.resident_bytes - after.total.resident_bytes, freed);
        assert!(after.moved > items / 2 && after.emptied > 100, "{after:?}");
        // Nothing is left to do.
        assert_eq!((cache.pack(), cache.info().unwrap().moved), (0, after.moved));
        (0..100_000).for_each(|number| _ = cache.remove(number));
        cache.pack();
        assert_eq!(cache.info().unwrap().total, NodeInfo::default());
    }
}

/// Objects per slab and one more, one of the first slab freed: two slabs become one.
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

/// Pinned items stay where they are and are counted; unpinned they go.
#[test]
fn pinned_items_stay() {
    let cache = cache_of(slabs(), Settings::new("pinned"));
    let items = fragmented(&cache, 60_000);
    let pinned: Vec<u64> = cache.owner().items.lock().unwrap().keys().copied().step_by(1_000).collect();
    pinned.iter().for_each(|number| pin(&cache, *number));
    let places: Vec<_> = pinned.iter().map(|number| cache.item(*number)).collect();
    cache.pack();
    let info = cache.info().unwrap();
    assert!(info.refused >= pinned.len() as u64 - 2, "{info:?}");
    assert_eq!(pinned.iter().map(|number| cache.item(*number)).collect::<Vec<_>>(), places);
    assert!(u64::from(info.total.partial) <= pinned.len() as u64 + 1, "{info:?}");
    pinned.iter().for_each(|number| unpin(&cache, *number));
    cache.pack();
    assert_packed(&cache, items);
}

/// Items that their owner frees, or fails to move, are counted so, and nothing else changes.
#[test]
fn each_outcome_is_counted() {
    let cache = cache_of(slabs(), Settings::new("outcomes"));
    let items = fragmented(&cache, 60_000);
    *cache.owner().whim.lock().unwrap() = Whim::Fail;
    assert_eq!(cache.pack(), 0);
    let info = cache.info().unwrap();
    assert_eq!((info.moved, info.active, cache.check_all()), (0, items, items));
    assert!(info.failed > 1_000, "{info:?}");
    *cache.owner().whim.lock().unwrap() = Whim::FreeSome;
    cache.pack();
    let info = cache.info().unwrap();
    assert!(info.freed > 1_000 && info.moved > 1_000, "{info:?}");
    assert_packed(&cache, items - info.freed);
}

/// Defragmentation by a ratio leaves no more than so many times what is live; nothing is done at 0, and steps end in time.
#[test]
fn a_ratio_bounds_what_is_resident() {
    let kinds = [slabs(), sparse_slabs()];
    for (slabs, ratio) in kinds.into_iter().flat_map(|slabs| [0, 30, 60, 100].map(|ratio| (slabs, ratio))) {
        let cache = cache_of(slabs, Settings::new("ratio"));
        let items = fragmented(&cache, 80_000);
        let before = cache.info().unwrap().total.resident_bytes;
        cache.set_defrag_used_ratio(ratio).unwrap();
        let mut steps = 0;
        loop {
            let progress = cache.defrag_step(Duration::from_micros(500)).unwrap();
            settle(cache.engine());
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

/// A step over all caches empties what their ratios say; it rests when a pass has freed nothing, until something changes.
#[test]
fn all_caches_are_defragmented() {
    let slabs = slabs();
    let caches = ["one", "other"].map(|name| cache_of(slabs, Settings::new(name)));
    let items = caches.each_ref().map(|cache| fragmented(cache, 60_000));
    loop {
        let progress = slabs.defrag_step(Duration::from_millis(5));
        caches.iter().for_each(|cache| settle(cache.engine()));
        if progress.is_done && progress.moved == 0 {
            break;
        }
    }
    for (cache, items) in caches.iter().zip(items) {
        let info = cache.info().unwrap();
        assert!(info.moved > items / 4 && info.total.blocks <= 3, "{info:?}");
        assert_eq!(cache.check_all(), items);
    }
    let rested = slabs.defrag_step(Duration::from_secs(1));
    assert_eq!((rested.moved, rested.stayed, rested.is_done), (0, 0, true));
}

/// Who came to an item under a guard reads it where it was, though it was moved, and its slab is not used before he goes.
#[test]
fn readers_are_waited_for() {
    let cache = cache_of(slabs(), Settings::new("readers"));
    (0..100_000).for_each(|number| cache.add(number));
    (0..100_000).filter(|number| number % 10 != 0).for_each(|number| assert!(cache.remove(number)));
    let guard = xarray::pin();
    let old: Vec<_> = (0..10_000).map(|number| cache.item(number * 10)).collect();
    while !cache.defrag_step(Duration::from_secs(1)).unwrap().is_done {}
    cache.engine().settle();
    let moved: Vec<_> = (0..10_000).filter(|number| cache.item(number * 10) != old[*number as usize]).collect();
    assert!(moved.len() > 5_000);
    // New items come elsewhere.
    (200_000..210_000).for_each(|number| cache.add(number));
    for number in moved {
        // SAFETY: came to under the guard, which is still there.
        let item = unsafe { old[number as usize].as_ref() };
        assert!(item.body.iter().zip(number * 10..).all(|(word, value)| word.load(Relaxed) == value));
    }
    let before = cache.info().unwrap().total.blocks;
    drop(guard);
    settle(cache.engine());
    cache.engine().shrink().unwrap();
    assert!(cache.info().unwrap().total.blocks < before);
    cache.pack();
    assert_packed(&cache, 20_000);
}

/// Items move to a node and from it, as many as asked for; balancing moves the surplus and nothing else.
#[test]
fn items_move_between_nodes() {
    let cache = cache_of(slabs_on_nodes(3), Settings::new("nodes"));
    (0..3_000).for_each(|number| cache.add_on(0, number));
    let used = || cache.info().unwrap().nodes.iter().map(|node| node.used).collect::<Vec<_>>();
    assert_eq!(used(), [3_000, 0, 0]);
    assert_eq!(cache.move_objects(0, 1, 700).unwrap().moved, 700);
    assert_eq!(used(), [2_300, 700, 0]);
    let moved = cache.info().unwrap().moved;
    cache.balance().unwrap();
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
    cache.engine().check_books();
}

fn panics(act: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(act)).is_err()
}

/// A callback that panics leaves its slab out of use: what is in it stays, can be freed, and nothing new comes in.
#[test]
fn a_panic_leaves_the_slab_out_of_use() {
    for whim in [Whim::PanicInIsolate, Whim::PanicInMigrate, Whim::CallInIsolate] {
        let cache = cache_of(slabs(), Settings::new("panics"));
        let items = fragmented(&cache, 60_000);
        *cache.owner().whim.lock().unwrap() = whim;
        assert!(panics(|| _ = cache.shrink()));
        cache.owner().whim.clear_poison();
        *cache.owner().whim.lock().unwrap() = Whim::Move;
        cache.owner().items.clear_poison();
        // Of the lost slab references are held by the owner that failed.
        for (number, at) in &*cache.owner().items.lock().unwrap() {
            // SAFETY: in the book.
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
        cache.engine().check_books();
    }
}

/// A constructor that panics leaves its slab out of use; the next slab serves.
#[test]
fn a_constructor_may_panic() {
    let cache = cache_of(slabs(), Settings::new("constructor"));
    cache.owner().panics_in_construct.store(true, Relaxed);
    assert!(panics(|| _ = cache.allocate()));
    cache.owner().panics_in_construct.store(false, Relaxed);
    cache.add(1);
    let info = cache.info().unwrap();
    assert_eq!((info.active, info.total.lost, info.total.slabs), (1, 1, 2));
    assert_eq!(cache.owner().constructed.load(Relaxed), u64::from(info.objects_per_slab), "each is constructed once");
    cache.engine().check_books();
}

/// Threads add, remove and read items while another packs them all the time: none is lost, none is two, none is torn.
#[test]
fn threads_use_items_that_move() {
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
                    for _ in 0..150_000 {
                        let at = random() % SPAN;
                        let number = thread * SPAN + at;
                        if live[at as usize] {
                            // It may be on its way.
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
        assert!(cache.info().unwrap().moved > 100);
    });
}

/// A cache that is dropped while all of them are shrunk and listed gives back what it has.
#[test]
fn threads_drop_caches_that_others_shrink() {
    let (slabs, is_done) = (slabs(), &AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !is_done.load(Relaxed) {
                slabs.shrink(u64::MAX, Urgency::Limit);
                slabs.list().iter().for_each(|info| assert_eq!(info.name, "dropped"));
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
