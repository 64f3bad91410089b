//! Caches by handle, as behaviours.
#![allow(unsafe_code)] // says that values are movable

use super::tests::{slabs, slabs_on_nodes, slabs_with, sparse_slabs};
use super::*;
use crate::arena::Layout;
use crate::units::BLOCK_BYTES;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

type Value = [u64; 24];

fn value(number: u64) -> Value {
    std::array::from_fn(|at| number + at as u64)
}

/// Counts how often values like it were dropped.
struct Counted {
    number: u64,
    dropped: Arc<Vec<AtomicUsize>>,
}

// SAFETY: a number and a pointer.
unsafe impl Movable for Counted {}

impl Drop for Counted {
    fn drop(&mut self) {
        self.dropped[self.number as usize].fetch_add(1, Relaxed);
    }
}

fn counters(count: usize) -> Arc<Vec<AtomicUsize>> {
    Arc::new((0..count).map(|_| AtomicUsize::new(0)).collect())
}

/// Of many values nine of ten go: handles still find what is left, in as few slabs and blocks as can be; the others' find nothing.
#[test]
fn values_move_below_their_handles() {
    for slabs in [slabs(), sparse_slabs()] {
        let cache = slabs.by_handle::<Value>(Settings::new("packed")).unwrap();
        let handles: Vec<_> = (0..100_000).map(|number| cache.insert(value(number)).unwrap()).collect();
        for (number, handle) in handles.iter().enumerate() {
            assert!(number % 10 == 3 || cache.remove(*handle).unwrap());
        }
        assert!(!cache.remove(handles[0]).unwrap(), "it has gone");
        let place = |handle| std::ptr::from_ref(cache.get(handle, &pin()).unwrap()) as usize;
        let before: Vec<usize> = handles.iter().skip(3).step_by(10).map(|handle| place(*handle)).collect();
        assert!(cache.pack() >= 8 * BLOCK_BYTES as u64);
        let after: Vec<usize> = handles.iter().skip(3).step_by(10).map(|handle| place(*handle)).collect();
        assert!(before.iter().zip(&after).filter(|(before, after)| before != after).count() > 5_000);
        let guard = pin();
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
        cache.engine().check_books();
    }
}

/// Each value is dropped once, when its readers have gone: removed, replaced, moved or left in the cache.
#[test]
fn values_are_dropped_once() {
    const VALUES: usize = 30_000;
    let dropped = counters(2 * VALUES);
    let counted = |number: usize| Counted { number: number as u64, dropped: dropped.clone() };
    let count = || dropped.iter().map(|count| count.load(Relaxed)).sum::<usize>();
    let cache = slabs().by_handle(Settings::new("dropped")).unwrap();
    let handles: Vec<_> = (0..VALUES).map(|number| cache.insert(counted(number)).unwrap()).collect();
    let guard = pin();
    let first = cache.get(handles[1], &guard).unwrap();
    for (number, handle) in handles.iter().enumerate() {
        match number % 4 {
            0 => {}
            1 => assert!(cache.remove(*handle).unwrap()),
            2 => assert!(cache.update(*handle, |old| counted(old.number as usize + VALUES)).unwrap()),
            _ => assert!(cache.remove(*handle).unwrap() && !cache.remove(*handle).unwrap()),
        }
    }
    assert_eq!((count(), first.number), (0, 1), "a reader is there");
    drop(guard);
    cache.pack();
    assert_eq!(count(), VALUES / 4 * 3);
    assert!(cache.info().unwrap().moved > 1_000);
    let pin_again = cache.pin_value(handles[0]).unwrap().unwrap();
    std::mem::forget(pin_again);
    drop(cache);
    assert!(dropped.iter().take(VALUES).all(|count| count.load(Relaxed) == 1));
    assert_eq!(count(), VALUES + VALUES / 4);
}

/// A pinned value stays where it is, and what it is; with the last pin all is as before.
#[test]
fn pinned_values_stay() {
    let cache = slabs().by_handle::<Value>(Settings::new("pinned")).unwrap();
    let handles: Vec<_> = (0..50_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    let pins: Vec<_> = handles.iter().step_by(5_000).map(|handle| cache.pin_value(*handle).unwrap().unwrap()).collect();
    let places: Vec<_> = pins.iter().map(|pin| std::ptr::from_ref(&**pin)).collect();
    for (number, handle) in handles.iter().enumerate() {
        assert!(number % 10 == 0 || cache.remove(*handle).unwrap());
    }
    assert!(matches!(cache.remove(handles[0]), Err(Error::Busy { .. })));
    assert!(matches!(cache.update(handles[0], |old| *old), Err(Error::Busy { .. })));
    cache.pack();
    let info = cache.info().unwrap();
    assert!(info.busy >= 9 && info.moved > 3_000 && info.total.partial as usize <= pins.len() + 1, "{info:?}");
    for (at, (pin, place)) in pins.iter().zip(places).enumerate() {
        assert_eq!((std::ptr::from_ref(&**pin), **pin), (place, value(at as u64 * 5_000)));
    }
    let most: Vec<_> = (0..6).map(|_| cache.pin_value(handles[0]).unwrap().unwrap()).collect();
    assert!(matches!(cache.pin_value(handles[0]), Err(Error::Busy { .. })));
    drop((most, pins));
    cache.pack();
    assert_eq!((cache.info().unwrap().total.partial, cache.info().unwrap().total.blocks), (1, 1));
    assert!(cache.remove(handles[0]).unwrap() && cache.pin_value(handles[0]).unwrap().is_none());
}

/// The table of handles gives free pages back; handles of before fit nothing that came after, nor in the next cache.
#[test]
fn the_table_of_handles_shrinks() {
    let slabs = slabs();
    let cache = slabs.by_handle::<u64>(Settings::new("table")).unwrap();
    let handles: Vec<_> = (0..100_000).map(|number| cache.insert(number).unwrap()).collect();
    let full = cache.handle_bytes();
    assert!((800_000..900_000).contains(&full), "{full}");
    handles.iter().skip(1_000).for_each(|handle| assert!(cache.remove(*handle).unwrap()));
    cache.pack();
    assert!(cache.handle_bytes() <= 16 << 10, "{}", cache.handle_bytes());
    let again: Vec<_> = (0..100_000).map(|number| cache.insert(number).unwrap()).collect();
    let guard = pin();
    assert!(handles.iter().skip(1_000).all(|handle| cache.get(*handle, &guard).is_none()));
    assert!(again.iter().enumerate().all(|(number, handle)| cache.get(*handle, &guard) == Some(&(number as u64))));
    drop((guard, cache));
    let next = slabs.by_handle::<u64>(Settings::new("next")).unwrap();
    (0..200_000).for_each(|number| _ = next.insert(number).unwrap());
    let guard = pin();
    assert!(handles.iter().chain(&again).all(|handle| next.get(*handle, &guard).is_none()));
    assert!(next.get(Handle::from_bits(u64::MAX), &guard).is_none());
}

/// At a limit, values of a sparse cache are packed so that another can have the memory.
#[test]
fn a_limit_packs_values() {
    let (slabs, account) = slabs_with(Layout::for_test(), 8 * BLOCK_BYTES as u64);
    let cache = slabs.by_handle::<Value>(Settings::new("limit")).unwrap();
    let handles: Vec<_> = (0..70_000).map(|number| cache.insert(value(number)).unwrap()).collect();
    handles.iter().enumerate().for_each(|(number, handle)| assert!(number % 10 == 0 || cache.remove(*handle).unwrap()));
    // What was removed last waits for a call.
    while !cache.defrag_step(Duration::ZERO).unwrap().is_done && cache.info().unwrap().active > 7_100 {}
    assert!(account.resident() > 6 * BLOCK_BYTES as u64);
    let other = slabs.fixed::<[u8; 4000]>(Settings::new("other")).unwrap();
    // Readers of other tests are waited for, too, and they may take longer than who is refused does.
    let insert = |_| loop {
        match other.insert([1; 4000]) {
            Ok(slot) => break slot,
            Err(Error::NoMemory { .. }) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => panic!("{error}"),
        }
    };
    let slots: Vec<_> = (0..2_000).map(insert).collect();
    assert!(cache.info().unwrap().moved > 1_000);
    let guard = pin();
    assert!(
        handles.iter().step_by(10).zip(0..).all(|(handle, at)| cache.get(*handle, &guard) == Some(&value(at * 10)))
    );
    drop(slots);
}

/// Values move between nodes, and their handles find them.
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
    let guard = pin();
    assert!(handles.iter().zip(0..).all(|(handle, number)| cache.get(*handle, &guard) == Some(&value(number))));
}

/// Threads insert, read, change and remove values while another packs them: each handle finds its own value, whole, or nothing
/// once it has been removed, and each value is dropped once.
#[test]
fn threads_use_values_that_move() {
    const THREADS: usize = 2;
    const ROUNDS: usize = 60_000;
    struct Owned {
        words: Box<[u64; 4]>,
        live: Arc<AtomicUsize>,
    }
    // SAFETY: two pointers.
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
        for _ in 0..ROUNDS {
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
                    assert!(cache.remove(handle).unwrap());
                    known.remove(&handle);
                    assert!(cache.get(handle, &pin()).is_none());
                }
                5 if !handles.is_empty() => {
                    assert!(cache.update(handles[at], |old| owned(old.words[0] ^ 1)).unwrap());
                    *known.get_mut(&handles[at]).unwrap() ^= 1;
                }
                _ if !handles.is_empty() => {
                    let guard = pin();
                    let found = cache.get(handles[at], &guard).unwrap();
                    assert_eq!(*found.words, [known[&handles[at]]; 4]);
                }
                _ => {}
            }
        }
        let guard = pin();
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
    assert!(cache.info().unwrap().moved > 100);
    cache.engine().check_books();
    drop(cache);
    assert_eq!(live.load(Relaxed), 0);
}
