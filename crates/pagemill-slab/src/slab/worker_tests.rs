//! The background thread: what it does without being called, and what it leaves alone.
#![allow(unsafe_code)] // implements `Movable`

use super::owner_tests::{Book, Items, Whim, cache_of};
use super::tests::{STUCK_AFTER, slabs_behind};
use super::worker::{ShrinkRequest, VisitResult, Worker, owed_after};
use super::*;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::BLOCK_BYTES;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::Instant;

const ITEMS: u64 = 60_000;

/// Waits for an event that comes without a call.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < STUCK_AFTER, "{what} does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

fn slabs(use_huge: bool) -> &'static Slabs {
    slabs_behind(pagemill_core::arena::Layout { use_huge, ..pagemill_core::arena::Layout::for_test() }, UNLIMITED).0
}

fn with_ratio(name: &str, percent: u32) -> Settings {
    Settings { defrag_used_ratio: percent, ..Settings::new(name) }
}

/// Adds items and removes all but one in `one_of`, at pseudorandom positions, while they may be moved. Returns how many
/// are left.
fn fragmented(cache: &ByOwner<Book>, one_of: u64) -> u64 {
    (0..ITEMS).for_each(|number| cache.add(number));
    let stays = |number: &u64| (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32).is_multiple_of(one_of);
    (0..ITEMS).filter(|number| !stays(number)).for_each(|number| {
        // An item that is being moved can be removed a moment later.
        wait_until("an item", || cache.remove(number));
    });
    (0..ITEMS).filter(stays).count() as u64
}

/// Blocks that `items` items need, plus one.
fn blocks_for(cache: &ByOwner<Book>, items: u64) -> u32 {
    let engine = cache.engine();
    (items.div_ceil(u64::from(engine.shape.block_capacity())) + 1) as u32
}

/// A cache that keeps the background thread in a callback until the owner's whim changes.
fn busy(slabs: &'static Slabs) -> ByOwner<Book> {
    let cache = cache_of(slabs, Settings::new("busy"));
    *cache.owner().whim.lock().unwrap() = Whim::Wait;
    (0..ITEMS).for_each(|number| cache.add(number));
    (0..ITEMS).filter(|number| number % 16 != 3).for_each(|number| _ = cache.remove(number));
    wait_until("a move", || cache.owner().waits.load(Relaxed));
    cache
}

fn wait_for_sleep(slabs: &Slabs) {
    wait_until("sleep", || slabs.worker.is_asleep());
}

/// The memory of a fragmented cache returns to the system without any call. The thread uses at most a twentieth of a
/// processor, and then sleeps.
#[test]
fn memory_comes_back_without_a_call() {
    for use_huge in [true, false] {
        let slabs = slabs(use_huge);
        let cache = cache_of(slabs, Settings::new("behind"));
        (ITEMS..2 * ITEMS).for_each(|number| cache.add(number));
        (ITEMS..2 * ITEMS).for_each(|number| wait_until("an item", || cache.remove(number)));
        let items = fragmented(&cache, 10);
        // Whole blocks, and an idle one that is kept.
        let block_bytes = BLOCK_BYTES as u64;
        let most =
            (items * cache.info().unwrap().stride_bytes as u64 * 100 / 30).next_multiple_of(block_bytes) + block_bytes;
        wait_until("memory", || {
            cache.info().unwrap().total.resident_bytes <= most
                && slabs.shared.get().unwrap().blocks.giveable_bytes() == 0
        });
        wait_for_sleep(slabs);
        let info = cache.info().unwrap();
        assert_eq!((cache.check_all(), info.active), (items, items));
        assert!(info.moved > 0 && info.total.resident_bytes <= most, "{info:?}");
        let (worked, rested) = (slabs.worker.worked_ns(), slabs.worker.rested_ns());
        assert!(worked > 0 && rested >= 19 * worked, "{worked} {rested}");
        assert!(stats::get(Counter::SlabBehindSteps) > 0);
        cache.engine().check_state();
    }
}

/// Blocks that the program itself emptied return to the system without any call, whether their cache is kept or dropped.
#[test]
fn what_the_program_emptied_comes_back_without_a_call() {
    let (slabs, account) = slabs_behind(pagemill_core::arena::Layout::for_test(), UNLIMITED);
    let kept = cache_of(slabs, Settings::new("kept"));
    let fixed = slabs.fixed::<[u64; 24]>(Settings::new("fixed")).unwrap();
    for is_dropped in [false, true] {
        let slots: Vec<_> = (0..ITEMS).map(|number| fixed.insert([number; 24]).unwrap()).collect();
        // With ratio 0 nothing of it waits for readers when it is dropped.
        let other = is_dropped.then(|| cache_of(slabs, with_ratio("goes", 0)));
        let cache = other.as_ref().unwrap_or(&kept);
        (0..ITEMS).for_each(|number| cache.add(number));
        (0..ITEMS).for_each(|number| wait_until("an item", || cache.remove(number)));
        drop((other, slots));
        wait_until("memory", || slabs.shared.get().unwrap().blocks.giveable_bytes() == 0);
        wait_for_sleep(slabs);
        // Each cache keeps a block for its next objects, and the objects in magazines.
        let bytes: u64 = slabs.list().iter().map(|cache| cache.total.resident_bytes).sum();
        assert_eq!(account.resident(), bytes);
    }
}

/// A value whose destructor removes the next value, in the next cache.
struct Link {
    next: Option<Handle<Link>>,
    number: usize,
    gone: Arc<AtomicUsize>,
    caches: Arc<OnceLock<Vec<ByHandle<Link>>>>,
}

// SAFETY: numbers and pointers.
unsafe impl Movable for Link {}

impl Drop for Link {
    fn drop(&mut self) {
        if let (Some(next), Some(caches)) = (self.next, self.caches.get()) {
            assert!(caches[(self.number + 1) % caches.len()].remove(next).unwrap());
        }
        self.gone.fetch_add(1, Relaxed);
    }
}

/// Values that are removed by destructors on the background thread are dropped without a call, too: in the same cache, or
/// in one already visited.
#[test]
fn what_destructors_remove_is_dropped() {
    for count in [1, 2] {
        let slabs = slabs(true);
        let (caches, gone) = (Arc::new(OnceLock::new()), Arc::new(AtomicUsize::new(0)));
        let made =
            caches.get_or_init(|| (0..count).map(|_| slabs.by_handle(Settings::new("lists")).unwrap()).collect());
        let mut next = None;
        for number in (0..5).rev() {
            let link = Link { next, number, gone: gone.clone(), caches: caches.clone() };
            next = Some(made[number % count].insert(link).unwrap());
        }
        assert!(made[0].remove(next.unwrap()).unwrap());
        wait_until("a destructor", || {
            // Without this the first value would wait for a full batch.
            slabs.worker.notify();
            gone.load(Relaxed) > 0
        });
        wait_until("the others", || gone.load(Relaxed) == 5);
    }
}

/// Counts its drops.
struct Value {
    words: [u64; 20],
    gone: Arc<AtomicUsize>,
}

// SAFETY: numbers and a pointer.
unsafe impl Movable for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        self.gone.fetch_add(1, Relaxed);
    }
}

/// All removed values by handle are dropped, and the others packed, without a call.
#[test]
fn values_by_handle_are_dropped_and_packed() {
    let slabs = slabs(true);
    let cache = slabs.by_handle::<Value>(Settings::new("behind")).unwrap();
    let gone = Arc::new(AtomicUsize::new(0));
    let value = |number| Value { words: [number; 20], gone: gone.clone() };
    let handles: Vec<_> = (0..ITEMS).map(|number| cache.insert(value(number)).unwrap()).collect();
    handles.iter().zip(0..).filter(|(_, number)| number % 10 != 7).for_each(|(handle, _)| {
        assert!(cache.remove(*handle).unwrap());
    });
    let items = ITEMS / 10;
    wait_until("destructors", || gone.load(Relaxed) as u64 == ITEMS - items);
    let most = (items * 100 / 30).div_ceil(u64::from(cache.engine().shape.block_capacity())) as u32 + 1;
    wait_until("memory", || cache.info().unwrap().total.blocks <= most);
    wait_for_sleep(slabs);
    assert!(cache.info().unwrap().moved > 0);
    for (handle, number) in handles.iter().zip(0..) {
        let words = cache.get(*handle, &super::pin()).map(|value| value.words);
        assert_eq!(words, (number % 10 == 7).then_some([number; 20]));
    }
    drop(cache);
    assert_eq!(gone.load(Relaxed) as u64, ITEMS);
}

/// What removed values own is freed without another call, even for few values.
#[test]
fn what_was_removed_goes_without_a_call() {
    struct Held(Arc<()>);
    // SAFETY: a pointer; its target is not moved.
    unsafe impl Movable for Held {}
    let (slabs, held) = (slabs(true), Arc::new(()));
    let cache = slabs.by_handle(Settings::new("few")).unwrap();
    let handles: Vec<_> = (0..3).map(|_| cache.insert(Held(held.clone())).unwrap()).collect();
    assert!(
        handles
            .iter()
            .all(|handle| cache.get(*handle, &super::pin()).is_some_and(|value| Arc::ptr_eq(&value.0, &held)))
    );
    assert!(handles.iter().all(|handle| cache.remove(*handle).unwrap()));
    wait_until("destructors", || Arc::strong_count(&held) == 1);
}

/// Places of values without a destructor that were removed under a guard are freed without another call once it is
/// dropped.
#[test]
fn what_was_removed_beside_a_reader_comes_back() {
    const VALUES: usize = 100_000;
    for has_own_guard in [true, false] {
        let cache = slabs(true).by_handle::<[u64; 24]>(Settings::new("read")).unwrap();
        let handles: Vec<_> = (0..VALUES).map(|number| cache.insert([number as u64; 24]).unwrap()).collect();
        let remove = || handles[VALUES / 10..].iter().for_each(|handle| assert!(cache.remove(*handle).unwrap()));
        let guard = super::pin();
        if has_own_guard {
            remove();
        } else {
            thread::scope(|scope| _ = scope.spawn(remove).join());
        }
        assert_eq!(cache.get(handles[7], &guard), Some(&[7; 24]));
        drop(guard);
        // Less than a block does not wake the background thread.
        let most = VALUES as u64 / 10 + 2 * u64::from(cache.engine().shape.block_capacity());
        wait_until("memory", || cache.info().unwrap().active <= most);
    }
}

/// With ratio 0 nothing moves, while another cache is packed.
#[test]
fn nothing_moves_at_a_ratio_of_0() {
    let slabs = slabs(true);
    let still = cache_of(slabs, with_ratio("still", 0));
    let items = fragmented(&still, 10);
    let other = cache_of(slabs, Settings::new("other"));
    fragmented(&other, 10);
    wait_until("a move", || other.info().unwrap().moved > 0);
    wait_for_sleep(slabs);
    let info = still.info().unwrap();
    assert_eq!((info.moved, info.emptied, still.check_all()), (0, 0, items));
    assert!(info.total.blocks > blocks_for(&still, items), "{info:?}");
}

/// After `defrag_by_hand` nothing is done in the background, and the thread ends.
#[test]
fn by_hand_nothing_is_done_behind() {
    let slabs = slabs(true);
    let cache = cache_of(slabs, Settings::new("by hand"));
    let items = fragmented(&cache, 10);
    wait_until("a thread", || slabs.worker.is_started());
    slabs.defrag_by_hand();
    let moved = cache.info().unwrap().moved;
    wait_until("the thread's end", || !slabs.worker.is_started());
    for number in 0..ITEMS {
        cache.remove(number);
    }
    fragmented(&cache, 10);
    assert_eq!((cache.info().unwrap().moved, cache.check_all()), (moved, items));
    while slabs.defrag_step(Duration::from_secs(1)).moved > 0 {}
    assert!(cache.info().unwrap().moved > moved && !slabs.worker.is_started());
}

/// Dropping a cache that the thread is visiting waits for the visit, and the owner is dropped on the dropping thread. The
/// background serves later caches as before.
#[test]
fn dropping_a_cache_waits_for_the_thread() {
    let slabs = slabs(true);
    for use_whim in [true, false, true] {
        let cache = cache_of(slabs, Settings::new("dropped"));
        let ended_on = cache.owner().ended_on.clone();
        let whim = cache.owner().whim.clone();
        if use_whim {
            *whim.lock().unwrap() = Whim::Wait;
        }
        (0..ITEMS).for_each(|number| cache.add(number));
        (0..ITEMS).filter(|number| number % 16 != 3).for_each(|number| _ = cache.remove(number));
        if use_whim {
            wait_until("a move", || cache.owner().waits.load(Relaxed));
        }
        let dropper = thread::spawn(move || drop(cache));
        if use_whim {
            wait_until("the withdrawal", || slabs.member_count() == 0);
            assert_eq!(ended_on.get(), None);
            *whim.lock().unwrap() = Whim::Move;
        }
        let dropper_id = dropper.thread().id();
        dropper.join().unwrap();
        assert_eq!(ended_on.get(), Some(&dropper_id));
    }
    let cache = cache_of(slabs, Settings::new("next"));
    fragmented(&cache, 10);
    wait_until("a move", || cache.info().unwrap().moved > 0);
}

/// A panicking callback is counted; its slab is unusable and its cache is given up, but not other caches.
#[test]
fn a_panic_is_told_and_the_thread_goes_on() {
    let slabs = slabs(true);
    let failing = cache_of(slabs, with_ratio("failing", 0));
    let items = fragmented(&failing, 10);
    *failing.owner().whim.lock().unwrap() = Whim::PanicInMigrate;
    let before = stats::get(Counter::SlabBehindFailed);
    failing.set_defrag_used_ratio(30).unwrap();
    wait_until("a panic", || failing.engine().has_failed.load(Relaxed));
    // It is counted a moment later.
    wait_until("a count", || stats::get(Counter::SlabBehindFailed) > before);
    let other = cache_of(slabs, Settings::new("other"));
    let other_items = fragmented(&other, 10);
    wait_until("a move", || other.info().unwrap().moved > 0);
    wait_for_sleep(slabs);
    let info = failing.info().unwrap();
    assert_eq!((info.total.lost, info.active, other.check_all()), (1, items, other_items));
    assert!(info.is_given_up && !other.info().unwrap().is_given_up);
}

/// A cache that was given up is tried again when its ratio is set, even to the same value. It stays in use if callbacks
/// succeed, and is given up again if not.
#[test]
fn a_cache_that_was_given_up_is_tried_again() {
    let slabs = slabs(true);
    let cache = cache_of(slabs, with_ratio("failing", 0));
    let items = fragmented(&cache, 10);
    *cache.owner().whim.lock().unwrap() = Whim::PanicInIsolate;
    for lost in 1..=2 {
        cache.set_defrag_used_ratio(30).unwrap();
        wait_until("a panic", || cache.info().unwrap().total.lost == lost && cache.info().unwrap().is_given_up);
        wait_for_sleep(slabs);
    }
    let (before, moved) = (cache.info().unwrap(), || cache.info().unwrap().moved);
    *cache.owner().whim.lock().unwrap() = Whim::Move;
    assert_eq!(before.total.lost, 2, "nothing is tried by itself");
    cache.set_defrag_used_ratio(30).unwrap();
    wait_until("a move", || moved() > before.moved);
    wait_for_sleep(slabs);
    let after = cache.info().unwrap();
    assert_eq!((after.is_given_up, after.total.lost, cache.check_all()), (false, 2, items));
}

/// A successful shrink by the program has the same effect as setting the ratio; one that panics has not.
#[test]
fn a_shrink_that_gets_through_ends_giving_up() {
    let slabs = slabs(true);
    let cache = cache_of(slabs, with_ratio("failing", 0));
    let items = fragmented(&cache, 10);
    let is_given_up = || cache.info().unwrap().is_given_up;
    *cache.owner().whim.lock().unwrap() = Whim::PanicInIsolate;
    cache.set_defrag_used_ratio(30).unwrap();
    wait_until("a panic", is_given_up);
    wait_for_sleep(slabs);
    assert!(catch_unwind(AssertUnwindSafe(|| cache.shrink())).is_err() && is_given_up());
    *cache.owner().whim.lock().unwrap() = Whim::Move;
    cache.shrink().unwrap();
    assert!(!is_given_up());
    let before = cache.info().unwrap();
    (ITEMS..2 * ITEMS).for_each(|number| cache.add(number));
    let more = (ITEMS..2 * ITEMS).filter(|number| number % 10 == 0).count() as u64;
    (ITEMS..2 * ITEMS)
        .filter(|number| number % 10 > 0)
        .for_each(|number| wait_until("an item", || cache.remove(number)));
    wait_until("a move", || cache.info().unwrap().moved > before.moved);
    wait_for_sleep(slabs);
    assert_eq!((cache.info().unwrap().total.lost, cache.check_all()), (2, items + more));
}

/// A requested shrink of a cache that is dropped while the thread is busy elsewhere: the requester gets `None`, the owner
/// is dropped on the dropping thread, and later requests are served.
#[test]
fn an_order_ends_with_its_cache() {
    let slabs = slabs(true);
    let busy = busy(slabs);
    let ordered = cache_of(slabs, Settings::new("ordered"));
    let ended_on = ordered.owner().ended_on.clone();
    let order = thread::spawn(move || slabs.shrink_one(1));
    wait_until("the order", || ordered.engine().request.with(|request| matches!(request, ShrinkRequest::Wanted)));
    let dropper = thread::spawn(move || drop(ordered));
    wait_until("an answer", || order.is_finished());
    assert!(order.join().unwrap().is_none());
    let dropper_id = dropper.thread().id();
    dropper.join().unwrap();
    assert_eq!(ended_on.get(), Some(&dropper_id));
    *busy.owner().whim.lock().unwrap() = Whim::Move;
    assert!(slabs.shrink_one(0).unwrap().is_ok());
}

/// The thread owes no rest for a requested shrink, and at most a second for its own work, however long that took.
#[test]
fn rests_are_not_long() {
    let slabs = slabs(true);
    slabs.defrag_by_hand();
    let cache = cache_of(slabs, Settings::new("ordered"));
    (0..100).for_each(|number| cache.add(number));
    cache.engine().request.with(|request| *request = ShrinkRequest::Wanted);
    let (worker, mut owed_ns) = (Worker::default(), 0);
    assert_eq!(worker.round(slabs, &mut owed_ns), VisitResult::ShrinkRequest);
    assert_eq!((owed_ns, worker.rested_ns()), (0, 0));
    assert!(cache.engine().request.with(|request| matches!(request, ShrinkRequest::Done(Ok(_)))));
    for (took_ms, owed_ms) in [(1, 19), (10, 190), (10_000, 1_000), (u64::MAX / 1_000_000, 1_000)] {
        assert_eq!(owed_after(0, took_ms * 1_000_000), owed_ms * 1_000_000);
    }
}

/// Short memory wakes a resting thread, so that its rest is no longer than between two rounds; once, until it has packed
/// everything.
#[test]
fn short_memory_shortens_a_rest() {
    let slabs = slabs(true);
    let busy = busy(slabs);
    let before = slabs.worker.wakes();
    let wakes = [(); 3].map(|()| {
        slabs.shrink(u64::MAX, Urgency::Limit);
        slabs.worker.wakes() - before
    });
    // Before any assertion can fail, because dropping the cache waits for the thread.
    *busy.owner().whim.lock().unwrap() = Whim::Move;
    assert_eq!(wakes, [1; 3]);
}

/// At a limit, caches by owner are packed even above their ratio, but not those with ratio 0.
#[test]
fn at_a_limit_caches_are_packed() {
    let slabs = slabs(true);
    let [half, still] = [("half", 30), ("still", 0)].map(|(name, percent)| cache_of(slabs, with_ratio(name, percent)));
    let items = [&half, &still].map(|cache| fragmented(cache, 2));
    wait_until("a thread", || slabs.worker.is_started());
    wait_for_sleep(slabs);
    assert!(half.info().unwrap().total.blocks > blocks_for(&half, items[0]));
    slabs.shrink(u64::MAX, Urgency::Limit);
    wait_until("packing", || half.info().unwrap().total.blocks <= blocks_for(&half, items[0]));
    wait_for_sleep(slabs);
    assert_eq!((still.info().unwrap().moved, [&half, &still].map(|cache| cache.check_all())), (0, items));
}

/// A fork child's list of caches does not contain those of the parent: their owners are dropped by the code that drops
/// the caches.
#[test]
fn a_child_begins_without_caches() {
    let slabs = slabs(true);
    slabs.defrag_by_hand();
    let cache = cache_of(slabs, Settings::new("a parent's"));
    // SAFETY: no other thread uses this arena, and no lock is held.
    unsafe { slabs.arena.forked() };
    // SAFETY: as above.
    unsafe { slabs.begin_child() };
    assert_eq!(slabs.member_count(), 0);
    drop(cache);
}
