//! Tests of indices whose nodes are moved: the contents must stay, and memory must be freed.
#![allow(unsafe_code)] // arrays that keep their address

use super::*;
use pagemill_core::Error;
use pagemill_core::arena;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Account, Shrinker, Urgency};
use pagemill_slab::SlabInfo;
use pagemill_xarray::{Found, MAX_INDEX, MAX_ORDER, Mark, XArray, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

type Array = XArray<pagemill_xarray::Forest>;

/// Time limit of every wait: far longer than a wait takes, even on an overloaded machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(600);

/// Returns slab caches with background defragmentation.
fn slabs_with_background_defrag(layout: arena::Layout) -> &'static Slabs {
    let account = Account::make(UNLIMITED).unwrap();
    let arena = place(arena::Arena::new(layout, account).unwrap()).unwrap();
    let slabs: &'static Slabs = place(Slabs::new(arena)).unwrap();
    account.register(slabs);
    slabs
}

/// Returns slab caches without background defragmentation.
fn slabs_without_background_defrag(layout: arena::Layout) -> &'static Slabs {
    let slabs = slabs_with_background_defrag(layout);
    slabs.defrag_by_hand();
    slabs
}

/// Returns slab caches that use whole blocks from the start.
fn slabs() -> &'static Slabs {
    slabs_without_background_defrag(arena::Layout::for_test())
}

/// Returns slab caches with sparse blocks, whose memory is committed and returned slab by slab.
fn sparse_slabs() -> &'static Slabs {
    slabs_without_background_defrag(arena::Layout { use_huge: false, ..arena::Layout::for_test() })
}

fn slabs_on_nodes(nodes: usize) -> &'static Slabs {
    slabs_without_background_defrag(arena::Layout { nodes: Nodes::logical(nodes), ..arena::Layout::for_test() })
}

/// Waits until `is_so` returns true. Panics after [`WAIT_TIMEOUT`].
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WAIT_TIMEOUT, "{what} does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_for_sleep(slabs: &Slabs) {
    wait_until("sleep", || slabs.is_asleep());
}

/// Number of indices that a lowest-level node covers.
const NODE_SPAN: u64 = 64;

fn array(nodes: &'static NodeCache) -> Box<Array> {
    // SAFETY: the array is not used before it lies in its box, where it stays until its drop.
    Box::new(unsafe { Array::movable(nodes.forest()) })
}

fn store(array: &Array, index: u64, order: u32, value: u64) {
    let (mut writer, mut stock) = array.lock_for(index, index + (1 << order) - 1, order).unwrap();
    writer.store(index, order, value, &mut stock);
}

fn all_entries(array: &Array) -> Vec<Found> {
    let next = |from: u64| array.next(from, MAX_INDEX, &pin());
    std::iter::successors(next(0), |found| next(found.last() + 1)).collect()
}

/// Creates an index of ten thousand entries, each in its own node, and erases all but every sixth entry.
fn array_with_one_of_six(nodes: &'static NodeCache) -> Box<Array> {
    let array = array(nodes);
    (0..10_000).for_each(|at| store(&array, at * NODE_SPAN, 0, at));
    let erased = (0..10_000).filter(|at| at % 6 != 0);
    erased.for_each(|at| assert!(array.lock().erase(at * NODE_SPAN).is_some()));
    array
}

fn assert_one_of_six(array: &Array) {
    let kept: Vec<_> = (0..10_000).step_by(6).map(|at| Found { value: at, first: at * NODE_SPAN, order: 0 }).collect();
    assert_eq!(all_entries(array), kept);
}

/// Shrinks the cache until the memory of all moved nodes is freed. Readers in concurrent tests may delay that.
fn shrink(nodes: &NodeCache) {
    nodes.shrink().unwrap();
    nodes.finish_all_retired();
    nodes.shrink().unwrap();
    nodes.finish_all_retired();
    nodes.shrink_slabs();
    nodes.check_state();
}

/// Memory that held nodes is read without a guard. After a shrink the memory must read as zero, and AddressSanitizer
/// must report no error.
#[test]
fn memory_of_former_nodes_reads_zero() {
    for slabs in [slabs(), sparse_slabs()] {
        let nodes = IndexNodes::new(slabs).cache().unwrap();
        let array = array_with_one_of_six(nodes);
        let sum = || {
            // SAFETY: the window stays readable where nodes were set up.
            let words = nodes.addresses().map(|node| unsafe { &*(node as *const AtomicU64) }.load(Relaxed));
            words.fold(0, |sum, word| sum | word)
        };
        assert_ne!(sum(), 0);
        drop(array);
        // Free objects stay readable while their slab is kept.
        let _ = sum();
        shrink(nodes);
        assert_eq!((nodes.info().unwrap().total.resident_bytes, sum()), (0, 0));
    }
}

/// Erases five of six entries of an index, and shrinks the cache of its nodes. The remaining entries must be found in
/// order, and at most one slab per NUMA node may be partial.
#[test]
fn an_index_that_became_sparse_is_packed() {
    for slabs in [slabs(), sparse_slabs(), slabs_on_nodes(2)] {
        let nodes = IndexNodes::new(slabs).cache().unwrap();
        let array = array_with_one_of_six(nodes);
        let before = nodes.info().unwrap();
        let per_slab = u64::from(before.objects_per_slab);
        let full = |objects: u64| objects.div_ceil(per_slab) as u32;
        assert!(before.total.slabs >= full(10_000), "{before:?}");
        shrink(nodes);
        assert_one_of_six(&array);
        let after = nodes.info().unwrap();
        assert!(after.moved > 0 && after.total.partial as usize <= after.nodes.len(), "{after:?}");
        let in_use = u64::from(array.node_count());
        assert_eq!((after.active, after.total.used), (in_use, in_use), "what is in the tree, and nothing else");
        assert!(after.total.slabs <= full(in_use) + after.nodes.len() as u32);
        assert!(after.total.resident_bytes * 3 < before.total.resident_bytes, "{before:?} {after:?}");
        drop(array);
        shrink(nodes);
        let empty = nodes.info().unwrap().total;
        assert_eq!((empty.used, empty.slabs, empty.resident_bytes), (0, 0, 0));
    }
}

/// Nodes must not be moved if the cache's ratio is set to 0 (`set_defrag_used_ratio`), nor in arrays whose own address
/// may change.
#[test]
fn nodes_stay_at_ratio_0_and_in_arrays_that_may_move() {
    let nodes = IndexNodes::new(slabs()).cache().unwrap();
    let array = array_with_one_of_six(nodes);
    nodes.set_defrag_used_ratio(0).unwrap();
    assert!(nodes.defrag_step(Duration::from_secs(1)).unwrap().is_done);
    assert_eq!(nodes.info().unwrap().moved, 0);
    assert!(matches!(nodes.set_defrag_used_ratio(101), Err(Error::BadRatio { percent: 101 })));
    drop(array);
    let staying = XArray::new(nodes.forest());
    (0..1000).for_each(|at| store(&staying, at * NODE_SPAN, 0, at));
    (0..1000).filter(|at| at % 6 != 0).for_each(|at| _ = staying.lock().erase(at * NODE_SPAN));
    shrink(nodes);
    let info = nodes.info().unwrap();
    assert_eq!(info.moved, 0);
    assert!(info.refused > 0 && info.total.partial > 1);
    assert_eq!(all_entries(&staying).len(), 1000_usize.div_ceil(6));
}

/// After steps of defragmentation the cache's ratio (`set_defrag_used_ratio`) must bound the resident memory of nodes,
/// even if another thread sometimes holds the lock of the array.
#[test]
fn ratio_bounds_resident_nodes() {
    let slabs = sparse_slabs();
    let nodes = IndexNodes::new(slabs).cache().unwrap();
    nodes.set_defrag_used_ratio(60).unwrap();
    let array = array_with_one_of_six(nodes);
    let busy = array.lock();
    // A step moves nothing if another thread was stopped in an allocation. Then the next step tries again.
    wait_until("a step that finds the array locked", || {
        assert_eq!(slabs.defrag_step(Duration::from_secs(5)).moved, 0);
        nodes.info().unwrap().busy > 0
    });
    drop(busy);
    let is_bounded = |info: &SlabInfo| {
        let most = info.total.used * info.stride_bytes as u64 * 100 / 60;
        info.moved > 0 && info.total.resident_bytes <= most + (6 * info.slab_bytes) as u64
    };
    // Readers of other tests may delay the bound.
    for round in 0..1000 {
        if round >= 20 && is_bounded(&nodes.info().unwrap()) {
            break;
        }
        // A suspended cache is searched again only after its number of objects has changed.
        store(&array, MAX_INDEX, 0, 1);
        (0..40).for_each(|at| store(&array, (20_000 + at) * NODE_SPAN, 0, at));
        while !slabs.defrag_step(Duration::from_millis(1)).is_done {}
        nodes.finish_all_retired();
        array.lock().erase_range(20_000 * NODE_SPAN, MAX_INDEX, drop);
    }
    assert_one_of_six(&array);
    let info = nodes.info().unwrap();
    assert!(is_bounded(&info), "{info:?}");
}

/// At a memory limit the shrinker must pack the nodes into fewer slabs. The shrinker must report no freed bytes,
/// because nodes are not charged.
#[test]
fn limit_packs_nodes() {
    let slabs = sparse_slabs();
    let nodes = IndexNodes::new(slabs).cache().unwrap();
    let array = array_with_one_of_six(nodes);
    let before = nodes.info().unwrap();
    let mut freed = 0;
    while nodes.info().unwrap().total.resident_bytes * 2 > before.total.resident_bytes {
        freed += slabs.shrink(u64::MAX, Urgency::Limit);
        pagemill_core::epoch::flush(&pin());
    }
    assert_eq!(freed, 0);
    assert!(nodes.info().unwrap().moved > 0);
    assert_one_of_six(&array);
}

/// Returns a value that contains its index, and a round number in the lowest bits.
fn value_of(index: u64, round: u64) -> u64 {
    index << 8 | round & 0xFF
}

/// Sets the flag that ends the other threads of a test when the value is dropped, also after a panic.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Two readers, two writers and two threads that move nodes run while further arrays are created and dropped. A
/// permanent entry must always be found with its mark, and no lookup may return an entry of another index.
#[test]
fn threads_read_and_write_while_nodes_move() {
    const ROUNDS: u64 = 60;
    const FILES: u64 = 300;
    let nodes = IndexNodes::new(sparse_slabs()).cache().unwrap();
    let (array, is_done) = (array(nodes), AtomicBool::new(false));
    for at in 0..FILES {
        store(&array, at * NODE_SPAN, 0, value_of(at * NODE_SPAN, 0));
        array.lock().set_mark(at * NODE_SPAN, Mark::B);
    }
    let order = |at: u64| (at % u64::from(MAX_ORDER + 1)) as u32;
    std::thread::scope(|scope| {
        let (array, is_done) = (&*array, &is_done);
        for seed in 0..2 {
            scope.spawn(move || {
                let mut at = seed;
                while !is_done.load(Relaxed) {
                    at = (at * 7 + 1) % FILES;
                    let guard = &pin();
                    let found = array.load(at * NODE_SPAN, guard).expect("always there");
                    assert_eq!((found.value >> 8, found.order), (at * NODE_SPAN, 0));
                    assert!(array.get_mark(at * NODE_SPAN, Mark::B, guard));
                    let next = array.next(at * NODE_SPAN + 1, MAX_INDEX, guard);
                    assert!(next.is_none_or(|next| next.value >> 8 == next.first), "another's: {next:?}");
                    assert!(array.hint(at * NODE_SPAN).is_none_or(|found| found.value >> 8 == found.first));
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(move || {
                while !is_done.load(Relaxed) {
                    let done = nodes.defrag_step(Duration::from_micros(200));
                    let _ = done.map(drop).or_else(|_| nodes.shrink().map(drop));
                    std::thread::yield_now();
                }
            });
        }
        let writers: Vec<_> = [0, 1 << 30]
            .map(|base| {
                scope.spawn(move || {
                    let _done = EndOnDrop(is_done);
                    // At least `ROUNDS` rounds, and more until nodes were moved.
                    let nothing_moved = || nodes.info().unwrap().moved == 0 && !is_done.load(Relaxed);
                    for round in (1..).take_while(|round| *round <= ROUNDS || nothing_moved()) {
                        for at in 0..FILES {
                            let first = (base + (at + FILES) * (1 << MAX_ORDER)) & MAX_INDEX;
                            store(array, first, order(at), value_of(first, round));
                            if base == 0 {
                                assert!(
                                    array.lock().replace(at * NODE_SPAN, value_of(at * NODE_SPAN, round)).is_some()
                                );
                            }
                        }
                        // An array of this thread alone, which is dropped while its nodes may be moved.
                        let brief = self::array(nodes);
                        (0..50).for_each(|at| store(&brief, at * NODE_SPAN, 0, value_of(at * NODE_SPAN, round)));
                        for at in (0..FILES).filter(|at| at % 6 != round % 6) {
                            let first = base + (at + FILES) * (1 << MAX_ORDER);
                            let erased = array.lock().erase(first).expect("this thread's own");
                            assert_eq!((erased.value, erased.order), (value_of(first, round), order(at)));
                        }
                        assert_eq!(all_entries(&brief).len(), 50);
                        array.lock().erase_range(base + FILES * (1 << MAX_ORDER), base + (1 << 29), drop);
                    }
                })
            })
            .into_iter()
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    shrink(nodes);
    assert_eq!(all_entries(&array).len() as u64, FILES);
    assert_eq!(nodes.info().unwrap().active, u64::from(array.node_count()));
}

/// All entries of an index are erased. The background thread must free the index's nodes. After a call of
/// `defrag_by_hand`, the nodes must stay until a call of `shrink`.
#[test]
fn background_frees_retired_nodes() {
    for is_stopped in [false, true] {
        let slabs = slabs_with_background_defrag(arena::Layout { use_huge: false, ..arena::Layout::for_test() });
        if is_stopped {
            slabs.defrag_by_hand();
        }
        let forest = IndexNodes::new(slabs).cache().unwrap().forest();
        let array = XArray::new(forest);
        for index in (0..10).map(|at| at << 30) {
            let (mut writer, mut stock) = array.lock_for(index, index, 0).unwrap();
            writer.store(index, 0, 1, &mut stock);
        }
        if !is_stopped {
            wait_for_sleep(slabs);
        }
        let in_use = forest.in_use();
        assert!(in_use > 20);
        array.lock().erase_range(0, MAX_INDEX, drop);
        if is_stopped {
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(forest.in_use(), in_use, "no call has asked for it");
            IndexNodes::new(slabs).cache().unwrap().shrink().unwrap();
        } else {
            wait_for_sleep(slabs);
        }
        wait_until("nodes", || forest.in_use() == 0);
    }
}
