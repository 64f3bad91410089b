//! Tests of slab caches whose values are reached by handle.
#![allow(unsafe_code)] // implements `Movable`

use super::*;
use crate::caches::tests::basics::{STUCK_AFTER, rounds_until_moved, slabs, slabs_on_nodes, slabs_with, sparse_slabs};
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::BLOCK_BYTES;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

type Value = [u64; 24];

fn value(number: u64) -> Value {
    std::array::from_fn(|at| number + at as u64)
}

/// An item of a linked list whose items are spread over several caches. Its destructor removes the next item from the
/// next cache.
struct Link {
    next: Option<Handle<Link>>,
    number: usize,
    lists: Arc<SharedLinkState>,
}

/// State that all links of a test share.
#[derive(Default)]
struct SharedLinkState {
    caches: OnceLock<Vec<HandleMap<Link>>>,
    /// Number of destructors that are running now, nested in each other.
    nested: AtomicUsize,
    /// Maximum of `nested` so far.
    max_nested: AtomicUsize,
    /// Number of destructors that have run.
    dropped: AtomicUsize,
}

// SAFETY: numbers and pointers can be copied byte by byte.
unsafe impl Movable for Link {}

impl Drop for Link {
    fn drop(&mut self) {
        let lists = &self.lists;
        lists.max_nested.fetch_max(lists.nested.fetch_add(1, Relaxed) + 1, Relaxed);
        if let (Some(next), Some(caches)) = (self.next, lists.caches.get()) {
            assert!(caches[(self.number + 1) % caches.len()].remove(next).unwrap().is_some());
        }
        lists.nested.fetch_sub(1, Relaxed);
        lists.dropped.fetch_add(1, Relaxed);
    }
}

/// Removes the first items of long lists; each item's destructor removes the next item. Destructors must nest at most
/// once for each of up to eight caches, and all of them must run.
#[test]
fn destructors_nest_once_per_cache() {
    const LISTS: usize = 256;
    const LENGTH: usize = 64;
    for caches in [1, 2, 12] {
        let lists = Arc::new(SharedLinkState::default());
        let make = || slabs().by_handle(Settings::new("lists")).unwrap();
        let made = lists.caches.get_or_init(|| (0..caches).map(|_| make()).collect());
        let mut heads = vec![None; LISTS];
        for number in (0..LENGTH).rev() {
            for head in &mut heads {
                let link = Link { next: *head, number, lists: lists.clone() };
                *head = Some(made[number % caches].insert(link).unwrap());
            }
        }
        heads.into_iter().flatten().for_each(|head| assert!(made[0].remove(head).unwrap().is_some()));
        // Readers of other tests may delay the destructors.
        while lists.dropped.load(Relaxed) < LISTS * LENGTH {
            made.iter().for_each(|cache| _ = cache.shrink().unwrap());
        }
        assert!(
            lists.max_nested.load(Relaxed) <= caches.min(8),
            "{} within each other",
            lists.max_nested.load(Relaxed)
        );
        assert_eq!(lists.dropped.load(Relaxed), LISTS * LENGTH, "each once");
    }
}

/// A value that may own a cache with further values of this type.
struct CacheOwner {
    _inner: Option<Box<HandleMap<CacheOwner>>>,
    dropped: Arc<AtomicUsize>,
}

// SAFETY: pointers can be copied byte by byte.
unsafe impl Movable for CacheOwner {}

impl Drop for CacheOwner {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Relaxed);
    }
}

/// Twelve caches each own the next one through a value. They are more caches than [`crate::read::deferred_drop`]
/// tracks. Dropping the outermost cache must drop each value once, including removed values that wait for a reader, and
/// must free all memory.
#[test]
fn caches_can_be_dropped_in_destructors_of_values() {
    const CACHES: usize = 12;
    const VALUES_PER_CACHE: usize = 100;
    let slabs = slabs();
    let dropped = Arc::new(AtomicUsize::new(0));
    let nest = |inner| CacheOwner { _inner: inner, dropped: dropped.clone() };
    let guard = enter();
    let mut outer = None;
    for _ in 0..CACHES {
        let cache = Box::new(slabs.by_handle::<CacheOwner>(Settings::new("nest")).unwrap());
        let handles: Vec<_> = (1..VALUES_PER_CACHE).map(|_| cache.insert(nest(None)).unwrap()).collect();
        // The value that is removed last, and waits for the reader, owns the other caches.
        let last = cache.insert(nest(outer.take())).unwrap();
        handles.iter().step_by(2).chain([&last]).for_each(|handle| assert!(cache.remove(*handle).unwrap().is_some()));
        outer = Some(cache);
    }
    assert_eq!((slabs.list().len(), dropped.load(Relaxed)), (CACHES, 0));
    drop(outer);
    assert_eq!((slabs.list().len(), dropped.load(Relaxed)), (0, CACHES * VALUES_PER_CACHE));
    drop(guard);
    slabs.shrink(u64::MAX, Urgency::Limit);
    assert_eq!(slabs.arena.budget.room().0, 0);
}

/// A value that counts in `dropped[number]` how often values with its number were dropped.
struct Counted {
    number: u64,
    dropped: Arc<Vec<AtomicUsize>>,
}

// SAFETY: a number and a pointer can be copied byte by byte.
unsafe impl Movable for Counted {}

impl Drop for Counted {
    fn drop(&mut self) {
        self.dropped[self.number as usize].fetch_add(1, Relaxed);
    }
}

/// Creates `count` counters, all 0.
fn zeroed_counters(count: usize) -> Arc<Vec<AtomicUsize>> {
    Arc::new((0..count).map(|_| AtomicUsize::new(0)).collect())
}

/// Nine of ten values are removed, and the rest is packed into as few slabs and blocks as possible. The remaining
/// handles must lead to their values, and the removed handles to no value.
#[test]
fn handles_find_values_after_moves() {
    for slabs in [slabs(), sparse_slabs()] {
        let cache = slabs.by_handle::<Value>(Settings::new("packed")).unwrap();
        let handles: Vec<_> = (0..100_000).map(|number| cache.insert(value(number)).unwrap()).collect();
        for (number, handle) in handles.iter().enumerate() {
            assert!(number % 10 == 3 || cache.remove(*handle).unwrap().is_some());
        }
        assert!(cache.remove(handles[0]).unwrap().is_none(), "it has gone");
        let address = |handle| std::ptr::from_ref(cache.get(handle, &enter()).unwrap()) as usize;
        let before: Vec<usize> = handles.iter().skip(3).step_by(10).map(|handle| address(*handle)).collect();
        assert!(cache.pack() >= 8 * BLOCK_BYTES as u64);
        let after: Vec<usize> = handles.iter().skip(3).step_by(10).map(|handle| address(*handle)).collect();
        assert!(before.iter().zip(&after).filter(|(before, after)| before != after).count() > 5_000);
        let guard = enter();
        for (number, handle) in handles.iter().enumerate() {
            let found = cache.get(*handle, &guard);
            assert_eq!(found, (number % 10 == 3).then(|| value(number as u64)).as_ref());
        }
        drop(guard);
        let info = cache.info().unwrap();
        let needed = 10_000_u64.div_ceil(u64::from(info.objects_per_slab));
        assert_eq!((info.active, u64::from(info.total.slabs - info.total.empty)), (10_000, needed));
        assert!(info.total.partial <= 1 && info.stride_bytes == 200, "{info:?}");
        assert_eq!(u64::from(info.total.blocks), needed.div_ceil(32));
        cache.engine().check_state();
    }
}

/// Values are removed, replaced, moved, or left in the cache until the cache is dropped. Each value must be dropped
/// once, and not before its readers have finished.
#[test]
fn values_are_dropped_once() {
    const VALUES: usize = 30_000;
    let dropped = zeroed_counters(2 * VALUES);
    let counted = |number: usize| Counted { number: number as u64, dropped: dropped.clone() };
    let count = || dropped.iter().map(|count| count.load(Relaxed)).sum::<usize>();
    let cache = slabs().by_handle(Settings::new("dropped")).unwrap();
    let handles: Vec<_> = (0..VALUES).map(|number| cache.insert(counted(number)).unwrap()).collect();
    let guard = enter();
    let first = cache.get(handles[1], &guard).unwrap();
    for (number, handle) in handles.iter().enumerate() {
        match number % 4 {
            0 => {}
            1 => assert!(cache.remove(*handle).unwrap().is_some()),
            2 => assert!(cache.update(*handle, |old| counted(old.number as usize + VALUES)).unwrap()),
            _ => assert!(cache.remove(*handle).unwrap().is_some() && cache.remove(*handle).unwrap().is_none()),
        }
    }
    assert_eq!((count(), first.number), (0, 1), "a reader is there");
    drop(guard);
    cache.pack();
    assert_eq!(count(), VALUES / 4 * 3);
    assert!(cache.info().unwrap().moved > 1_000);
    let pin_again = cache.pin(handles[0]).unwrap().unwrap();
    std::mem::forget(pin_again);
    drop(cache);
    assert!(dropped.iter().take(VALUES).all(|count| count.load(Relaxed) == 1));
    assert_eq!(count(), VALUES + VALUES / 4);
}

/// The destructors of some values panic, after the values were removed or when their cache is dropped. The other
/// destructors must run, and the panic must reach the caller.
#[test]
fn panicking_destructor_does_not_stop_others() {
    struct Failing(Counted);
    // SAFETY: as the value that it holds.
    unsafe impl Movable for Failing {}
    impl Drop for Failing {
        fn drop(&mut self) {
            assert!(self.0.number % 50 != 7, "a destructor that fails, as it should here");
        }
    }
    let dropped = zeroed_counters(400);
    let cache = slabs().by_handle(Settings::new("failing")).unwrap();
    let insert = |number| cache.insert(Failing(Counted { number, dropped: dropped.clone() })).unwrap();
    let handles: Vec<_> = (0..400).map(insert).collect();
    let fails = |act: &mut dyn FnMut()| catch_unwind(AssertUnwindSafe(act)).is_err();
    let is_gone = |number: usize| dropped[number].load(Relaxed) == 1;
    let mut failures = 0;
    for handle in &handles[..200] {
        failures += usize::from(fails(&mut || assert!(cache.remove(*handle).unwrap().is_some())));
    }
    // Readers of other tests may take longer than one shrink waits.
    let began = Instant::now();
    while !(0..200).all(is_gone) {
        assert!(began.elapsed() < STUCK_AFTER, "destructors do not come");
        failures += usize::from(fails(&mut || _ = cache.shrink()));
    }
    assert!((1..=4).contains(&failures), "{failures}");
    assert!(handles[..200].iter().all(|handle| cache.get(*handle, &enter()).is_none()));
    let mut cache = Some(cache);
    assert!(fails(&mut || drop(cache.take())));
    assert!((0..400).all(is_gone));
}

/// A cache is dropped while another thread drains it for a long time. The drop must wait for the end of the drain, then
/// drop the values.
#[test]
fn drop_waits_for_a_long_drain() {
    let (slabs, dropped) = (slabs(), zeroed_counters(10));
    let cache = slabs.by_handle(Settings::new("long")).unwrap();
    (0..10).for_each(|number| _ = cache.insert(Counted { number, dropped: dropped.clone() }).unwrap());
    std::thread::scope(|scope| {
        let other_reference = slabs.caches().remove(0);
        let drained = other_reference.engine().drain_magazines().unwrap();
        let dropper = scope.spawn(move || drop(cache));
        // Longer than a shrink would wait for the drain.
        std::thread::sleep(Duration::from_millis(1_200));
        drop(drained);
        drop(other_reference);
        dropper.join().unwrap();
    });
    assert!(dropped.iter().all(|count| count.load(Relaxed) == 1));
}

/// A cache with moved objects is dropped while a guard exists. The guard cannot protect a read of this cache, because
/// readers borrow the cache. The drop must free all memory of the cache.
#[test]
fn drop_under_a_guard_frees_all_memory() {
    let (slabs, account) = slabs_with(Layout::for_test(), UNLIMITED);
    let cache = slabs.by_handle::<Value>(Settings::new("guarded")).unwrap();
    let handles: Vec<_> = (0..50_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    handles
        .iter()
        .enumerate()
        .for_each(|(number, handle)| assert!(number % 100 == 0 || cache.remove(*handle).unwrap().is_some()));
    // Frees the removed values without moving anything.
    cache.set_defrag_used_ratio(0).unwrap();
    while cache.info().unwrap().active > 1_000 {
        cache.defrag_step(Duration::ZERO).unwrap();
    }
    cache.set_defrag_used_ratio(100).unwrap();
    let guard = enter();
    let moved = cache.defrag_step(Duration::from_secs(1)).unwrap().moved;
    let info = cache.info().unwrap();
    assert!(moved > 0 && cache.engine().has_batches());
    assert!(info.waiting >= moved && info.active - info.waiting == 500, "{moved} {info:?}");
    drop(cache);
    slabs.shrink(u64::MAX, Urgency::Request);
    assert_eq!(account.resident(), 0);
    drop(guard);
}

/// Threads remove values and then sleep. A shrink on another thread must drop these values.
#[test]
fn shrink_drops_values_that_sleeping_threads_removed() {
    const THREADS: usize = 4;
    let dropped = zeroed_counters(THREADS * 100);
    let cache = slabs().by_handle(Settings::new("asleep")).unwrap();
    let (removed, ended) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    std::thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (cache, dropped, removed, ended) = (&cache, &dropped, &removed, &ended);
            scope.spawn(move || {
                let counted = |number| Counted { number: thread * 100 + number, dropped: dropped.clone() };
                let handles: Vec<_> = (0..100).map(|number| cache.insert(counted(number)).unwrap()).collect();
                assert!(handles.iter().all(|handle| cache.remove(*handle).unwrap().is_some()));
                removed.wait();
                ended.wait();
            });
        }
        removed.wait();
        cache.pack();
        assert!(dropped.iter().all(|count| count.load(Relaxed) == 1));
        assert_eq!(cache.info().unwrap().active, 0);
        ended.wait();
    });
}

/// Inserts, updates and removes values, also while a reader exists. `len` must count each value once, and a removed
/// value until its `Removed` is dropped. In a fork child the length must be 0.
#[test]
fn length_is_the_number_of_values() {
    let slabs = slabs();
    let map = slabs.by_handle::<String>(Settings::new("length").defrag_used_ratio(0)).unwrap();
    assert!(map.is_empty());
    let handles: Vec<_> = (0..1_000).map(|number: u32| map.insert(number.to_string()).unwrap()).collect();
    assert_eq!((map.len(), map.is_empty()), (1_000, false));
    let guard = enter();
    handles[..100].iter().for_each(|handle| assert!(map.update(*handle, String::clone).unwrap()));
    assert_eq!(map.len(), 1_000);
    let removed = map.remove(handles[0]).unwrap();
    handles[1..600].iter().for_each(|handle| assert!(map.remove(*handle).unwrap().is_some()));
    assert_eq!(map.len(), 401, "400 values and the one in `removed`");
    drop(removed);
    assert_eq!(map.len(), 400);
    drop(guard);
    map.pack();
    assert_eq!(map.len(), 400);
    handles[601..].iter().for_each(|handle| assert!(map.remove(*handle).unwrap().is_some()));
    assert_eq!((map.len(), map.is_empty()), (1, false));
    // SAFETY: no other thread uses these slab caches.
    unsafe { slabs.arena.forked() };
    assert!(map.is_empty());
}

/// Checks that removed and replaced values are counted as waiting while a guard exists. `value` is the value that is
/// inserted.
fn assert_counted_while_they_wait<T: Movable + Clone>(value: T) {
    let cache = slabs().by_handle::<T>(Settings::new("waiting").defrag_used_ratio(0)).unwrap();
    let handles: Vec<_> = (0..4_000).map(|_| cache.insert(value.clone()).unwrap()).collect();
    let active_and_waiting = || {
        let info = cache.info().unwrap();
        (info.active, info.waiting)
    };
    assert_eq!(active_and_waiting(), (4_000, 0));
    let guard = enter();
    handles[..3_000].iter().for_each(|handle| assert!(cache.remove(*handle).unwrap().is_some()));
    handles[3_900..].iter().for_each(|handle| assert!(cache.update(*handle, T::clone).unwrap()));
    assert_eq!(active_and_waiting(), (4_100, 3_100));
    drop(guard);
    cache.pack();
    assert_eq!(active_and_waiting(), (1_000, 0));
}

/// Removed and replaced values, with and without a destructor, must be counted as waiting while a reader exists.
#[test]
fn values_that_wait_for_readers_are_counted() {
    assert_counted_while_they_wait(value(1));
    assert_counted_while_they_wait("a string".to_owned());
}

/// Pinned values must keep their address and contents while the cache is packed. After the last pin of a value is
/// dropped, the value must be movable and removable again.
#[test]
fn pinned_values_keep_address_and_contents() {
    let cache = slabs().by_handle::<Value>(Settings::new("pinned")).unwrap();
    let handles: Vec<_> = (0..50_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    let pins: Vec<_> = handles.iter().step_by(5_000).map(|handle| cache.pin(*handle).unwrap().unwrap()).collect();
    let addresses: Vec<_> = pins.iter().map(|pin| std::ptr::from_ref(&**pin)).collect();
    for (number, handle) in handles.iter().enumerate() {
        assert!(number % 10 == 0 || cache.remove(*handle).unwrap().is_some());
    }
    assert!(matches!(cache.remove(handles[0]), Err(Error::Busy { .. })));
    assert!(matches!(cache.update(handles[0], |old| *old), Err(Error::Busy { .. })));
    cache.pack();
    let info = cache.info().unwrap();
    assert!(info.busy >= 9 && info.moved > 3_000 && info.total.partial as usize <= pins.len() + 1, "{info:?}");
    for (at, (pin, address)) in pins.iter().zip(addresses).enumerate() {
        assert_eq!((std::ptr::from_ref(&**pin), **pin), (address, value(at as u64 * 5_000)));
    }
    let most: Vec<_> = (0..6).map(|_| cache.pin(handles[0]).unwrap().unwrap()).collect();
    assert_eq!(cache.get(handles[0], &enter()), Some(&value(0)));
    assert!(matches!(cache.pin(handles[0]), Err(Error::Busy { .. })));
    drop((most, pins));
    cache.pack();
    assert_eq!((cache.info().unwrap().total.partial, cache.info().unwrap().total.blocks), (1, 1));
    assert!(cache.remove(handles[0]).unwrap().is_some() && cache.pin(handles[0]).unwrap().is_none());
}

/// A block has a pinned value and another one in a slab, and a full block has an empty slab. Each shrink moves the other
/// value to the empty slab to empty its block, and then back, because it fits beside the pinned value. Packing must end
/// nevertheless. Without the pin, one block must be left.
#[test]
fn packing_ends_while_a_value_moves_around_a_pinned_one() {
    let cache = slabs().by_handle::<[u64; 1500]>(Settings::new("around")).unwrap();
    let shape = &cache.engine().shape;
    let (in_slab, in_block) = (shape.capacity as usize, shape.block_capacity() as usize);
    let handles: Vec<_> = (0..in_block as u64 + 2).map(|number| cache.insert([number; 1500]).unwrap()).collect();
    let address = |handle| std::ptr::from_ref(cache.get(handle, &enter()).unwrap()) as usize;
    let block_of = |handle: &&Handle<_>| address(**handle) / BLOCK_BYTES;
    let full = block_of(&&handles[0]);
    let (mut in_full, others): (Vec<&Handle<_>>, Vec<_>) = handles.iter().partition(|handle| block_of(handle) == full);
    assert_eq!((in_full.len(), others.len()), (in_block, 2));
    in_full.sort_by_key(|handle| address(**handle));
    in_full[..in_slab].iter().for_each(|handle| _ = cache.remove(**handle).unwrap().unwrap());
    let pinned = cache.pin(*others[0]).unwrap().unwrap();
    cache.pack();
    let before = cache.info().unwrap().moved;
    cache.shrink().unwrap();
    assert!(cache.info().unwrap().moved > before, "the value moves at each shrink");
    drop(pinned);
    cache.pack();
    let info = cache.info().unwrap();
    assert_eq!((info.active as usize, info.total.blocks), (in_block + 2 - in_slab, 1), "{info:?}");
}

/// Several threads call `remove_with` for one value. Only one of the calls may read the value. While the value is
/// pinned, the removal must be refused. If the closure panics, the value must be removed nevertheless.
#[test]
fn only_one_remove_with_reads_a_value() {
    let slabs = slabs();
    let cache = slabs.by_handle::<Value>(Settings::new("seen")).unwrap();
    let handles: Vec<_> = (0..5_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    for (handle, number) in handles.iter().zip(0..) {
        assert_eq!(cache.remove_with(*handle, |value| *value).unwrap(), Some(value(number)));
        assert!(cache.remove_with(*handle, |_| panic!("it has gone")).unwrap().is_none());
    }
    let kept = cache.insert(value(7)).unwrap();
    let pinned = cache.pin(kept).unwrap();
    assert!(matches!(cache.remove_with(kept, |_| panic!("it is pinned")), Err::<Option<()>, _>(Error::Busy { .. })));
    drop(pinned);
    assert!(catch_unwind(AssertUnwindSafe(|| cache.remove_with(kept, |_| panic!("a look")))).is_err());
    cache.pack();
    assert_eq!((cache.info().unwrap().active, cache.get(kept, &enter())), (0, None));

    let texts = slabs.by_handle::<String>(Settings::new("texts")).unwrap();
    let text = texts.insert("one".to_owned()).unwrap();
    assert_eq!(texts.remove_with(text, String::clone).unwrap().as_deref(), Some("one"));
    texts.pack();
    assert_eq!(texts.info().unwrap().active, 0);
}

/// The closure of `remove_with` or `update` forks. The child must retire nothing when the closure returns, because
/// locks of the parent's caches may be held forever in the child.
#[test]
fn fork_in_a_closure_retires_nothing_in_the_child() {
    for is_removed in [true, false] {
        let slabs = slabs();
        slabs.defrag_by_hand();
        let texts = slabs.by_handle::<String>(Settings::new("forked")).unwrap();
        let text = texts.insert("one".to_owned()).unwrap();
        let fork = |text: &String| {
            // SAFETY: a child with one thread, which holds no lock.
            unsafe { slabs.arena.forked() };
            text.clone()
        };
        if is_removed {
            assert_eq!(texts.remove_with(text, fork).unwrap().as_deref(), Some("one"));
        } else {
            assert!(texts.update(text, fork).unwrap());
        }
        assert_eq!(texts.in_retire_list(), 0);
    }
}

/// The closure of `remove_with` panics, and so does a destructor that runs meanwhile. The panic of the closure, not
/// that of the destructor, must reach the caller.
#[test]
fn panic_of_the_closure_propagates_before_that_of_a_destructor() {
    static DROPPED: AtomicUsize = AtomicUsize::new(0);

    struct PanicsOnDrop;

    // SAFETY: it has no bytes.
    unsafe impl Movable for PanicsOnDrop {}

    impl Drop for PanicsOnDrop {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Relaxed);
            assert!(!std::thread::panicking(), "a destructor");
        }
    }

    let slabs = slabs();
    slabs.defrag_by_hand();
    let cache = slabs.by_handle::<PanicsOnDrop>(Settings::new("bad")).unwrap();
    // Every 64th removal runs destructors. Readers of other tests may delay the destructors.
    while DROPPED.load(Relaxed) == 0 {
        let bad = cache.insert(PanicsOnDrop).unwrap();
        let look = |_: &PanicsOnDrop| panic!("a look");
        let panic = catch_unwind(AssertUnwindSafe(|| cache.remove_with(bad, look))).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a look"));
    }
}

/// After most handles are removed, `shrink` must free pages of the handle table. Old handles must match no later value,
/// not even of the next cache that uses the table.
#[test]
fn handle_table_shrinks() {
    let slabs = slabs();
    let cache = slabs.by_handle::<u64>(Settings::new("table")).unwrap();
    let handles: Vec<_> = (0..100_000).map(|number| cache.insert(number).unwrap()).collect();
    let full = cache.handle_bytes();
    assert!((800_000..900_000).contains(&full), "{full}");
    handles.iter().skip(1_000).for_each(|handle| assert!(cache.remove(*handle).unwrap().is_some()));
    cache.pack();
    assert!(cache.handle_bytes() <= 16 << 10, "{}", cache.handle_bytes());
    let again: Vec<_> = (0..100_000).map(|number| cache.insert(number).unwrap()).collect();
    let guard = enter();
    assert!(handles.iter().skip(1_000).all(|handle| cache.get(*handle, &guard).is_none()));
    assert!(again.iter().enumerate().all(|(number, handle)| cache.get(*handle, &guard) == Some(&(number as u64))));
    drop((guard, cache));
    let next = slabs.by_handle::<u64>(Settings::new("next")).unwrap();
    (0..200_000).for_each(|number| _ = next.insert(number).unwrap());
    let guard = enter();
    assert!(handles.iter().chain(&again).all(|handle| next.get(*handle, &guard).is_none()));
    assert!(next.get(Handle::from_bits(u64::MAX), &guard).is_none());
}

/// A little used cache holds most of the memory that the limit allows. An allocation in another cache must cause the
/// first cache to be packed. The handles of the first cache must still lead to their values.
#[test]
fn values_are_packed_at_a_memory_limit() {
    let (slabs, account) = slabs_with(Layout::for_test(), 8 * BLOCK_BYTES as u64);
    let cache = slabs.by_handle::<Value>(Settings::new("limit")).unwrap();
    let handles: Vec<_> = (0..70_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    handles
        .iter()
        .enumerate()
        .for_each(|(number, handle)| assert!(number % 10 == 0 || cache.remove(*handle).unwrap().is_some()));
    // The values that were removed last are freed by a later call.
    while !cache.defrag_step(Duration::ZERO).unwrap().is_done && cache.info().unwrap().active > 7_100 {}
    assert!(account.resident() > 6 * BLOCK_BYTES as u64);
    let other = slabs.fixed::<[u8; 4000]>(Settings::new("other")).unwrap();
    // Readers of other tests may delay reclaim for longer than an allocation waits.
    let insert = |_| loop {
        match other.insert([1; 4000]) {
            Ok(slot) => break slot,
            Err(InsertError { error: Error::NoMemory { .. }, .. }) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    };
    let slots: Vec<_> = (0..2_000).map(insert).collect();
    assert!(cache.info().unwrap().moved > 1_000);
    let guard = enter();
    assert!(
        handles.iter().step_by(10).zip(0..).all(|(handle, at)| cache.get(*handle, &guard) == Some(&value(at * 10)))
    );
    drop(slots);
}

/// Values of one cache are removed under a guard. After the guard is dropped, another cache at the limit must get their
/// memory without a call to the first cache.
#[test]
fn removed_values_are_freed_at_a_memory_limit() {
    let (slabs, _) = slabs_with(Layout::for_test(), 8 * BLOCK_BYTES as u64);
    let cache = slabs.by_handle::<Value>(Settings::new("limit")).unwrap();
    let handles: Vec<_> = (0..70_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    let guard = enter();
    handles.iter().for_each(|handle| assert!(cache.remove(*handle).unwrap().is_some()));
    let other = slabs.fixed::<[u8; 4000]>(Settings::new("other")).unwrap();
    let mut slots = Vec::new();
    let error = loop {
        match other.insert([1; 4000]) {
            Ok(slot) => slots.push(slot),
            Err(error) => break error,
        }
    };
    assert!(matches!(error.error, Error::NoMemory { .. }) && slots.len() < 1_000 && cache.in_retire_list() > 69_000);
    drop(guard);
    let began = Instant::now();
    while slots.len() < 2_000 {
        // Readers of other tests may exist.
        assert!(began.elapsed() < STUCK_AFTER, "memory does not come");
        slots.extend(other.insert([1; 4000]).ok());
    }
}

/// Moves values to another node and back. Handles must lead to their values after each move.
#[test]
fn values_move_between_nodes() {
    let cache = slabs_on_nodes(2).by_handle::<Value>(Settings::new("nodes")).unwrap();
    let handles: Vec<_> = (0..3_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    for from in [0, 1] {
        cache.move_objects(from, 1 - from, u64::MAX).unwrap();
        assert_eq!(cache.info().unwrap().nodes[from].used, 0);
    }
    cache.balance().unwrap();
    assert_eq!(cache.info().unwrap().nodes.iter().map(|node| node.used).collect::<Vec<_>>(), [1_500, 1_500]);
    let guard = enter();
    assert!(handles.iter().zip(0..).all(|(handle, number)| cache.get(*handle, &guard) == Some(&value(number))));
}

/// Threads insert, read, change and remove values while another thread packs the cache. Each handle must lead to its
/// own value, undamaged, or to no value after the removal. Each value must be dropped once.
#[test]
fn threads_use_values_while_they_move() {
    const THREADS: usize = 2;
    const ROUNDS: usize = 60_000;
    struct Owned {
        words: Box<[u64; 4]>,
        live: Arc<AtomicUsize>,
    }
    // SAFETY: two pointers can be copied byte by byte.
    unsafe impl Movable for Owned {}
    impl Drop for Owned {
        fn drop(&mut self) {
            self.words.fill(u64::MAX);
            self.live.fetch_sub(1, Relaxed);
        }
    }
    let live = Arc::new(AtomicUsize::new(0));
    let owned = |number: u64| {
        live.fetch_add(1, Relaxed);
        Owned { words: Box::new([number; 4]), live: live.clone() }
    };
    let cache = slabs().by_handle::<Owned>(Settings::new("beside")).unwrap();
    let is_done = AtomicBool::new(false);
    let use_it = |thread: usize| {
        let mut known: HashMap<Handle<Owned>, u64> = HashMap::new();
        let mut handles = Vec::new();
        let mut seed = thread as u64 + 1;
        for _ in rounds_until_moved(ROUNDS, || cache.info().unwrap().moved) {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = (seed >> 40) as usize % handles.len().max(1);
            match seed >> 33 & 7 {
                0..3 => {
                    let handle = cache.insert(owned(seed)).unwrap();
                    assert_eq!(known.insert(handle, seed), None);
                    handles.push(handle);
                }
                3 | 4 if !handles.is_empty() => {
                    let handle = handles.swap_remove(at);
                    assert!(cache.remove(handle).unwrap().is_some());
                    known.remove(&handle);
                    assert!(cache.get(handle, &enter()).is_none());
                }
                5 if !handles.is_empty() => {
                    assert!(cache.update(handles[at], |old| owned(old.words[0] ^ 1)).unwrap());
                    *known.get_mut(&handles[at]).unwrap() ^= 1;
                }
                _ if !handles.is_empty() => {
                    let guard = enter();
                    let found = cache.get(handles[at], &guard).unwrap();
                    assert_eq!(*found.words, [known[&handles[at]]; 4]);
                }
                _ => {}
            }
        }
        let guard = enter();
        assert!(known.iter().all(|(handle, number)| *cache.get(*handle, &guard).unwrap().words == [*number; 4]));
        handles.len()
    };
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || use_it(thread))).collect();
        let packer = scope.spawn(|| {
            while !is_done.load(Relaxed) {
                assert!(matches!(cache.shrink(), Ok(_) | Err(Error::Busy { .. })));
            }
        });
        let left: usize = users.into_iter().map(|user| user.join().unwrap()).sum();
        is_done.store(true, Relaxed);
        packer.join().unwrap();
        cache.pack();
        assert_eq!((live.load(Relaxed), cache.info().unwrap().active), (left, left as u64));
    });
    cache.engine().check_state();
    drop(cache);
    assert_eq!(live.load(Relaxed), 0);
}
