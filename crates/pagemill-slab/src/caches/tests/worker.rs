//! Tests of the background thread: its work without a call of the program, and the cases in which it must not run.
#![allow(unsafe_code)] // implements `Movable`

use super::*;
use crate::alloc::stock::STOCK_RETIRED_CAPACITY;
use crate::caches::tests::basics::{STUCK_AFTER, slabs_with_background};
use crate::caches::tests::owner::{Behavior, ItemOwner, Items, cache_of};
use crate::defrag::rounds::VisitResult;
use crate::defrag::worker::{RequestedWork, WorkRequest, Worker, rest_due_after};
use pagemill_core::instance::Part;
use pagemill_core::listing::{Action, SlabCommands};
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::BLOCK_BYTES;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::Instant;

/// Number of items that a test adds at first.
const ITEMS: u64 = 60_000;

/// Waits until `is_so` returns true, without any call that would do the work of the background thread.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < STUCK_AFTER, "{what} does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

fn slabs(use_huge: bool) -> &'static Slabs {
    slabs_with_background(
        pagemill_core::arena::Layout { use_huge, ..pagemill_core::arena::Layout::for_test() },
        UNLIMITED,
    )
    .0
}

/// Returns the settings of a cache with this `defrag_used_ratio`.
fn with_ratio(name: &str, percent: u32) -> Settings {
    Settings::new(name).defrag_used_ratio(percent)
}

/// Adds items, and removes all but one in `kept_divisor`, at pseudorandom positions. The background thread may move
/// items meanwhile. Returns the number of remaining items.
fn fragment_cache(cache: &OwnerSlab<ItemOwner>, kept_divisor: u64) -> u64 {
    (0..ITEMS).for_each(|number| cache.add(number));
    let stays = |number: &u64| (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32).is_multiple_of(kept_divisor);
    (0..ITEMS).filter(|number| !stays(number)).for_each(|number| {
        // The removal fails while the item is being moved.
        wait_until("an item", || cache.remove(number));
    });
    (0..ITEMS).filter(stays).count() as u64
}

/// Returns one more than the number of blocks that `items` items need.
fn blocks_for(cache: &OwnerSlab<ItemOwner>, items: u64) -> u32 {
    let engine = cache.engine();
    (items.div_ceil(u64::from(engine.shape.block_capacity())) + 1) as u32
}

/// Creates a cache whose owner keeps the background thread inside of a callback until the owner's behaviour is changed.
fn cache_that_blocks_background_thread(slabs: &'static Slabs) -> OwnerSlab<ItemOwner> {
    let cache = cache_of(slabs, Settings::new("busy"));
    *cache.owner().behavior.lock().unwrap() = Behavior::Wait;
    (0..ITEMS).for_each(|number| cache.add(number));
    (0..ITEMS).filter(|number| number % 16 != 3).for_each(|number| _ = cache.remove(number));
    wait_until("a move", || cache.owner().waits.load(Relaxed));
    cache
}

fn wait_for_sleep(slabs: &Slabs) {
    wait_until("sleep", || slabs.worker.is_asleep());
}

/// Fragments a cache. The memory must return to the system without a call of the program. The background thread may use
/// at most a twentieth of a processor, and must sleep afterwards.
#[test]
fn background_frees_fragmented_memory() {
    for use_huge in [true, false] {
        let slabs = slabs(use_huge);
        let cache = cache_of(slabs, Settings::new("behind"));
        (ITEMS..2 * ITEMS).for_each(|number| cache.add(number));
        (ITEMS..2 * ITEMS).for_each(|number| wait_until("an item", || cache.remove(number)));
        let items = fragment_cache(&cache, 10);
        // The ratio's bound in whole blocks, plus an idle block that is kept.
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
        let (worked, rested) = (slabs.worker.used_cpu_ns(), slabs.worker.rested_ns());
        assert!(worked > 0 && rested >= 19 * worked, "{worked} {rested}");
        assert!(stats::get(Counter::SlabBehindSteps) > 0);
        cache.engine().check_state();
    }
}

/// While the background thread sleeps, fewer objects are freed than a block holds. After that the cache is used below
/// its ratio, so the memory must return to the system without a further call.
#[test]
fn background_packs_after_few_frees() {
    const BLOCKS: u64 = 4;
    for use_huge in [true, false] {
        let slabs = slabs(use_huge);
        let cache = cache_of(slabs, with_ratio("few", 30));
        let per_block = u64::from(cache.engine().shape.block_capacity());
        // Items with parts below a limit are spread evenly over the slabs: 40 %, then 16 % of each slab.
        let parts = |number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & 0xff;
        let remove_where = |is_one: &dyn Fn(u64) -> bool| {
            let ones = (0..BLOCKS * per_block).filter(|number| is_one(parts(*number)));
            ones.inspect(|number| wait_until("an item", || cache.remove(*number))).count() as u64
        };
        (0..BLOCKS * per_block).for_each(|number| cache.add(number));
        remove_where(&|part| part >= 102);
        wait_for_sleep(slabs);
        assert_eq!(u64::from(cache.info().unwrap().total.blocks), BLOCKS);
        let freed = remove_where(&|part| (42..102).contains(&part));
        assert!(freed < per_block, "{freed} of {per_block}");
        wait_until("packing", || u64::from(cache.info().unwrap().total.blocks) < BLOCKS);
        wait_for_sleep(slabs);
        assert!(cache.info().unwrap().moved > 0);
        cache.check_all();
    }
}

/// The program frees all objects of a cache, then keeps or drops the cache. The blocks must return to the system
/// without a further call.
#[test]
fn background_frees_blocks_that_the_program_emptied() {
    let (slabs, account) = slabs_with_background(pagemill_core::arena::Layout::for_test(), UNLIMITED);
    let kept = cache_of(slabs, Settings::new("kept"));
    let fixed = slabs.fixed::<[u64; 24]>(Settings::new("fixed")).unwrap();
    for is_dropped in [false, true] {
        let slots: Vec<_> = (0..ITEMS).map(|number| fixed.insert([number; 24]).unwrap()).collect();
        // With ratio 0 nothing is moved, so nothing waits for readers when the cache is dropped.
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
    caches: Arc<OnceLock<Vec<HandleMap<Link>>>>,
}

// SAFETY: numbers and pointers can be copied byte by byte.
unsafe impl Movable for Link {}

impl Drop for Link {
    fn drop(&mut self) {
        if let (Some(next), Some(caches)) = (self.next, self.caches.get()) {
            assert!(caches[(self.number + 1) % caches.len()].remove(next).unwrap().is_some());
        }
        self.gone.fetch_add(1, Relaxed);
    }
}

/// Destructors that run on the background thread remove further values, in the same cache or in a cache that the thread
/// has already visited. These values must be dropped without a further call, too.
#[test]
fn values_removed_by_destructors_are_dropped() {
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
        assert!(made[0].remove(next.unwrap()).unwrap().is_some());
        wait_until("a destructor", || {
            // Without this call the first value would wait for a full batch.
            slabs.worker.notify();
            gone.load(Relaxed) > 0
        });
        wait_until("the others", || gone.load(Relaxed) == 5);
    }
}

/// A value that counts how many values were dropped.
struct Value {
    words: [u64; 20],
    gone: Arc<AtomicUsize>,
}

// SAFETY: numbers and a pointer can be copied byte by byte.
unsafe impl Movable for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        self.gone.fetch_add(1, Relaxed);
    }
}

/// Nine of ten values of a cache by handle are removed. The removed values must be dropped, and the others packed,
/// without a further call.
#[test]
fn values_by_handle_are_dropped_and_packed() {
    let slabs = slabs(true);
    let cache = slabs.by_handle::<Value>(Settings::new("behind")).unwrap();
    let gone = Arc::new(AtomicUsize::new(0));
    let value = |number| Value { words: [number; 20], gone: gone.clone() };
    let handles: Vec<_> = (0..ITEMS).map(|number| cache.insert(value(number)).unwrap()).collect();
    handles.iter().zip(0..).filter(|(_, number)| number % 10 != 7).for_each(|(handle, _)| {
        assert!(cache.remove(*handle).unwrap().is_some());
    });
    let items = ITEMS / 10;
    wait_until("destructors", || gone.load(Relaxed) as u64 == ITEMS - items);
    let most = (items * 100 / 30).div_ceil(u64::from(cache.engine().shape.block_capacity())) as u32 + 1;
    wait_until("memory", || cache.info().unwrap().total.blocks <= most);
    wait_for_sleep(slabs);
    assert!(cache.info().unwrap().moved > 0);
    for (handle, number) in handles.iter().zip(0..) {
        let words = cache.get(*handle, &crate::enter()).map(|value| value.words);
        assert_eq!(words, (number % 10 == 7).then_some([number; 20]));
    }
    drop(cache);
    assert_eq!(gone.load(Relaxed) as u64, ITEMS);
}

/// Three values that own memory are removed. The memory must be freed without a further call.
#[test]
fn background_drops_a_few_removed_values() {
    struct Held(Arc<()>);
    // SAFETY: a pointer; its target is not moved.
    unsafe impl Movable for Held {}
    let (slabs, held) = (slabs(true), Arc::new(()));
    let cache = slabs.by_handle(Settings::new("few")).unwrap();
    let handles: Vec<_> = (0..3).map(|_| cache.insert(Held(held.clone())).unwrap()).collect();
    assert!(
        handles
            .iter()
            .all(|handle| cache.get(*handle, &crate::enter()).is_some_and(|value| Arc::ptr_eq(&value.0, &held)))
    );
    assert!(handles.iter().all(|handle| cache.remove(*handle).unwrap().is_some()));
    wait_until("destructors", || Arc::strong_count(&held) == 1);
}

/// Values without a destructor are removed under a guard: first most of them, then a few while the background thread
/// sleeps. After the guard is dropped, the memory of the values must be freed without a further call.
#[test]
fn values_removed_under_a_guard_are_freed() {
    const VALUES: usize = 100_000;
    const STOCKS: usize = 3 * STOCK_RETIRED_CAPACITY;
    for has_own_guard in [true, false] {
        let slabs = slabs(true);
        let cache = slabs.by_handle::<[u64; 24]>(Settings::new("read")).unwrap();
        let mut handles: Vec<_> = (0..VALUES).map(|number| cache.insert([number as u64; 24]).unwrap()).collect();
        for left in [VALUES / 10, VALUES / 20] {
            let removed = handles.split_off(left);
            let remove = || removed.iter().for_each(|handle| assert!(cache.remove(*handle).unwrap().is_some()));
            let guard = crate::enter();
            if has_own_guard {
                remove();
            } else {
                thread::scope(|scope| _ = scope.spawn(remove).join());
            }
            assert_eq!(cache.get(handles[7], &guard), Some(&[7; 24]));
            drop(guard);
            // The last removed values stay in the stocks of the threads.
            wait_until("memory", || cache.info().unwrap().active <= (left + STOCKS) as u64);
            wait_for_sleep(slabs);
        }
    }
}

/// The background thread packs one cache, while another cache has ratio 0. The objects of the cache with ratio 0 must
/// not be moved.
#[test]
fn nothing_moves_at_a_ratio_of_0() {
    let slabs = slabs(true);
    let still = cache_of(slabs, with_ratio("still", 0));
    let items = fragment_cache(&still, 10);
    let other = cache_of(slabs, Settings::new("other"));
    fragment_cache(&other, 10);
    wait_until("a move", || other.info().unwrap().moved > 0);
    wait_for_sleep(slabs);
    let info = still.info().unwrap();
    assert_eq!((info.moved, info.emptied, still.check_all()), (0, 0, items));
    assert!(info.total.blocks > blocks_for(&still, items), "{info:?}");
}

/// After a call of `defrag_by_hand`, the background thread must end without moving any further object.
#[test]
fn stopped_background_does_nothing() {
    let slabs = slabs(true);
    let cache = cache_of(slabs, Settings::new("by hand"));
    let items = fragment_cache(&cache, 10);
    wait_until("a thread", || slabs.worker.is_started());
    slabs.defrag_by_hand();
    let moved = cache.info().unwrap().moved;
    wait_until("the thread's end", || !slabs.worker.is_started());
    for number in 0..ITEMS {
        cache.remove(number);
    }
    fragment_cache(&cache, 10);
    assert_eq!((cache.info().unwrap().moved, cache.check_all()), (moved, items));
    while slabs.defrag_step(Duration::from_secs(1)).moved > 0 {}
    assert!(cache.info().unwrap().moved > moved && !slabs.worker.is_started());
}

/// A cache is dropped while the background thread visits it. The drop must wait for the end of the visit, and the owner
/// must be dropped on the dropping thread. The background thread must serve later caches.
#[test]
fn drop_waits_for_the_background_visit() {
    let slabs = slabs(true);
    for use_wait in [true, false, true] {
        let cache = cache_of(slabs, Settings::new("dropped"));
        let ended_on = cache.owner().ended_on.clone();
        let behavior = cache.owner().behavior.clone();
        if use_wait {
            *behavior.lock().unwrap() = Behavior::Wait;
        }
        (0..ITEMS).for_each(|number| cache.add(number));
        (0..ITEMS).filter(|number| number % 16 != 3).for_each(|number| _ = cache.remove(number));
        if use_wait {
            wait_until("a move", || cache.owner().waits.load(Relaxed));
        }
        let dropper = thread::spawn(move || drop(cache));
        if use_wait {
            wait_until("the withdrawal", || slabs.cache_count() == 0);
            assert_eq!(ended_on.get(), None);
            *behavior.lock().unwrap() = Behavior::Move;
        }
        let dropper_id = dropper.thread().id();
        dropper.join().unwrap();
        assert_eq!(ended_on.get(), Some(&dropper_id));
    }
    let cache = cache_of(slabs, Settings::new("next"));
    fragment_cache(&cache, 10);
    wait_until("a move", || cache.info().unwrap().moved > 0);
}

/// A callback panics on the background thread. The panic must be counted, and the slab must be unusable. The thread
/// must skip the callback's cache, but no other cache.
#[test]
fn panic_makes_the_background_skip_only_its_cache() {
    let slabs = slabs(true);
    let failing = cache_of(slabs, with_ratio("failing", 0));
    let items = fragment_cache(&failing, 10);
    *failing.owner().behavior.lock().unwrap() = Behavior::PanicInMigrate;
    let before = stats::get(Counter::SlabBehindFailed);
    failing.set_defrag_used_ratio(30).unwrap();
    wait_until("a panic", || failing.engine().has_panicked.load(Relaxed));
    // The count follows the flag a moment later.
    wait_until("a count", || stats::get(Counter::SlabBehindFailed) > before);
    let other = cache_of(slabs, Settings::new("other"));
    let other_items = fragment_cache(&other, 10);
    wait_until("a move", || other.info().unwrap().moved > 0);
    wait_for_sleep(slabs);
    let info = failing.info().unwrap();
    assert_eq!((info.total.lost, info.active, other.check_all()), (1, items, other_items));
    assert!(info.is_given_up && !other.info().unwrap().is_given_up);
}

/// A callback panics, so the background thread skips the callback's cache. After the ratio of the cache is set, even to
/// the same value, the thread must visit the cache again. If callbacks still panic, the thread must skip the cache
/// again.
#[test]
fn setting_the_ratio_ends_the_skipping_of_a_cache() {
    let slabs = slabs(true);
    let cache = cache_of(slabs, with_ratio("failing", 0));
    let items = fragment_cache(&cache, 10);
    *cache.owner().behavior.lock().unwrap() = Behavior::PanicInIsolate;
    for lost in 1..=2 {
        cache.set_defrag_used_ratio(30).unwrap();
        wait_until("a panic", || cache.info().unwrap().total.lost == lost && cache.info().unwrap().is_given_up);
        wait_for_sleep(slabs);
    }
    let (before, moved) = (cache.info().unwrap(), || cache.info().unwrap().moved);
    *cache.owner().behavior.lock().unwrap() = Behavior::Move;
    assert_eq!(before.total.lost, 2, "nothing is tried by itself");
    cache.set_defrag_used_ratio(30).unwrap();
    wait_until("a move", || moved() > before.moved);
    wait_for_sleep(slabs);
    let after = cache.info().unwrap();
    assert_eq!((after.is_given_up, after.total.lost, cache.check_all()), (false, 2, items));
}

/// A callback panics, so the background thread skips the callback's cache. A shrink by the program that panics must not
/// change that. After a successful shrink, the thread must visit the cache again.
#[test]
fn successful_shrink_ends_the_skipping_of_a_cache() {
    let slabs = slabs(true);
    let cache = cache_of(slabs, with_ratio("failing", 0));
    let items = fragment_cache(&cache, 10);
    let is_given_up = || cache.info().unwrap().is_given_up;
    *cache.owner().behavior.lock().unwrap() = Behavior::PanicInIsolate;
    cache.set_defrag_used_ratio(30).unwrap();
    wait_until("a panic", is_given_up);
    wait_for_sleep(slabs);
    assert!(catch_unwind(AssertUnwindSafe(|| cache.shrink())).is_err() && is_given_up());
    *cache.owner().behavior.lock().unwrap() = Behavior::Move;
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

/// Another process has requested a shrink of a cache. The cache is dropped while the background thread is busy with
/// another one. The request must return `None`, the owner must be dropped on the dropping thread, and later requests
/// must succeed.
#[test]
fn shrink_request_ends_with_its_cache() {
    let slabs = slabs(true);
    let busy = cache_that_blocks_background_thread(slabs);
    let requested = cache_of(slabs, Settings::new("requested"));
    let ended_on = requested.owner().ended_on.clone();
    let request = thread::spawn(move || slabs.execute(1, Action::Shrink));
    wait_until("the request", || {
        requested.engine().work_request.with(|request| matches!(request, WorkRequest::Wanted(_)))
    });
    let dropper = thread::spawn(move || drop(requested));
    wait_until("an answer", || request.is_finished());
    assert!(request.join().unwrap().is_none());
    let dropper_id = dropper.thread().id();
    dropper.join().unwrap();
    assert_eq!(ended_on.get(), Some(&dropper_id));
    *busy.owner().behavior.lock().unwrap() = Behavior::Move;
    assert!(slabs.execute(0, Action::Shrink).unwrap().is_ok());
}

/// Another process requests that the objects of one NUMA node are moved to another, and that nodes are balanced. The
/// background thread must move them, and must refuse a node that does not exist. A cache whose objects cannot be moved
/// must refuse both.
#[test]
fn objects_are_moved_between_nodes_on_request() {
    let layout = pagemill_core::arena::Layout::for_test();
    let nodes = pagemill_core::arena::nodes::Nodes::logical(3);
    let slabs = slabs_with_background(pagemill_core::arena::Layout { nodes, ..layout }, UNLIMITED).0;
    let cache = cache_of(slabs, Settings::new("nodes").defrag_used_ratio(0));
    let mut numbers = 0..;
    for (node, count) in [300, 0, 600].into_iter().enumerate() {
        numbers.by_ref().take(count).for_each(|number| cache.add_on(node, number));
    }
    let used = || cache.info().unwrap().nodes.iter().map(|node| node.used).collect::<Vec<_>>();
    let moved = |action| slabs.execute(0, action).unwrap().map(|report| report.moved);
    assert_eq!((moved(Action::Move { from: 2, to: 1 }).unwrap(), used()), (600, vec![300, 600, 0]));
    assert_eq!((moved(Action::Balance).unwrap(), used()), (300, vec![300; 3]));
    assert!(matches!(moved(Action::Move { from: 0, to: 3 }), Err(Error::BadNode { .. })));
    assert_eq!((cache.check_all(), used()), (900, vec![300; 3]));
    let fixed = slabs.fixed::<u64>(Settings::new("fixed")).unwrap();
    let _value = fixed.insert(7).unwrap();
    for action in [Action::Balance, Action::Move { from: 0, to: 1 }] {
        assert!(matches!(slabs.execute(1, action), Some(Err(Error::Unsupported { .. }))));
    }
}

/// The background thread must not rest for the processor time of a requested shrink. For other work it must rest 19
/// times as long as the work's processor time, but at most a second.
#[test]
fn rest_of_the_background_thread_is_bounded() {
    let slabs = slabs(true);
    slabs.defrag_by_hand();
    let cache = cache_of(slabs, Settings::new("requested"));
    (0..100).for_each(|number| cache.add(number));
    cache.engine().work_request.with(|request| *request = WorkRequest::Wanted(RequestedWork::Shrink));
    let (worker, mut rest_due_ns) = (Worker::default(), 0);
    assert_eq!(worker.run_round(slabs, &mut rest_due_ns), VisitResult::Requested);
    assert_eq!((rest_due_ns, worker.rested_ns()), (0, 0));
    assert!(cache.engine().work_request.with(|request| matches!(request, WorkRequest::Done(Ok(_)))));
    for (took_ms, owed_ms) in [(1, 19), (10, 190), (10_000, 1_000), (u64::MAX / 1_000_000, 1_000)] {
        assert_eq!(rest_due_after(0, took_ms * 1_000_000), owed_ms * 1_000_000);
    }
}

/// While memory is short, reclaim must wake the resting background thread once, and not again until the thread has
/// packed all caches.
#[test]
fn memory_shortage_shortens_a_rest() {
    let slabs = slabs(true);
    let busy = cache_that_blocks_background_thread(slabs);
    let before = slabs.worker.wake_count();
    let wakes = [(); 3].map(|()| {
        slabs.shrink(u64::MAX, Urgency::Limit);
        slabs.worker.wake_count() - before
    });
    // Ends the callback before an assertion can fail, because dropping the cache waits for the callback.
    *busy.owner().behavior.lock().unwrap() = Behavior::Move;
    assert_eq!(wakes, [1; 3]);
}

/// At a memory limit, caches by owner must be packed even if they are used above their ratio. Caches with ratio 0 must
/// not be packed.
#[test]
fn caches_by_owner_are_packed_at_a_limit() {
    let slabs = slabs(true);
    let [half, still] = [("half", 30), ("still", 0)].map(|(name, percent)| cache_of(slabs, with_ratio(name, percent)));
    let items = [&half, &still].map(|cache| fragment_cache(cache, 2));
    wait_until("a thread", || slabs.worker.is_started());
    wait_for_sleep(slabs);
    assert!(half.info().unwrap().total.blocks > blocks_for(&half, items[0]));
    slabs.shrink(u64::MAX, Urgency::Limit);
    wait_until("packing", || half.info().unwrap().total.blocks <= blocks_for(&half, items[0]));
    wait_for_sleep(slabs);
    assert_eq!((still.info().unwrap().moved, [&half, &still].map(|cache| cache.check_all())), (0, items));
}

/// After a fork, the child's list of caches must be empty, so that the child never drops an owner that belongs to the
/// parent.
#[test]
fn fork_child_lists_no_caches_of_its_parent() {
    let slabs = slabs(true);
    slabs.defrag_by_hand();
    let cache = cache_of(slabs, Settings::new("a parent's"));
    // SAFETY: no other thread uses this arena, and no lock is held.
    unsafe { slabs.arena.forked() };
    // SAFETY: as above.
    unsafe { slabs.begin_child() };
    assert_eq!(slabs.cache_count(), 0);
    drop(cache);
}
