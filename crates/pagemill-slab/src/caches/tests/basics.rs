//! Tests of the behaviour that all kinds of caches share. Most use objects that keep their address.
#![allow(unsafe_code)] // faulty programs; locks and protects pages

use super::*;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::arena::{Budget, Context, Layout};
use pagemill_core::reclaim::Account;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Creates slab caches without background defragmentation.
pub(crate) fn slabs_with(layout: Layout, limit_bytes: u64) -> (&'static Slabs, &'static Account) {
    let (slabs, account) = slabs_with_background(layout, limit_bytes);
    slabs.defrag_by_hand();
    (slabs, account)
}

/// Creates slab caches with background defragmentation.
pub(crate) fn slabs_with_background(layout: Layout, limit_bytes: u64) -> (&'static Slabs, &'static Account) {
    let account = Account::make(limit_bytes).unwrap();
    let arena = place(Arena::new(layout, account).unwrap()).unwrap();
    let slabs: &'static Slabs = place(Slabs::new(arena)).unwrap();
    account.register(slabs);
    (slabs, account)
}

/// Creates slab caches whose blocks are whole from the start.
pub(crate) fn slabs() -> &'static Slabs {
    slabs_with(Layout::for_test(), UNLIMITED).0
}

/// Creates slab caches whose blocks are sparse: memory is populated and freed slab by slab.
pub(crate) fn sparse_slabs() -> &'static Slabs {
    slabs_with(Layout { use_huge: false, ..Layout::for_test() }, UNLIMITED).0
}

/// Creates slab caches in an arena with several simulated nodes.
pub(crate) fn slabs_on_nodes(nodes: usize) -> &'static Slabs {
    slabs_with(Layout { nodes: Nodes::logical(nodes), ..Layout::for_test() }, UNLIMITED).0
}

/// Executes the deferred actions of all batches of emptied slabs. Readers of concurrent tests may delay the batches for
/// longer than one call waits, so this function repeats the call.
pub(crate) fn finish_retired(engine: &Engine) {
    while !engine.finish_all_retired().unwrap() {}
}

/// Shrinks a cache repeatedly until readers of concurrent tests have finished, so that no emptied slab waits for them,
/// and nothing is left to move. Objects in the block of a pinned object may move back and forth at each shrink: ends
/// after some shrinks in a row without a gain. `counts` returns how many objects were moved and freed. Returns by how
/// many bytes the memory charged for the cache fell.
pub(crate) fn shrink_until_packed(
    engine: &Engine,
    shrink: impl Fn() -> u64,
    counts: impl Fn() -> (u64, u64),
    is_waiting: impl Fn() -> bool,
) -> u64 {
    const MAX_SHRINKS_WITHOUT_GAIN: u32 = 8;
    let (mut freed, mut without_gain) = (0, 0);
    loop {
        let (before, used) = (counts(), engine.used_slabs_and_blocks());
        let more = shrink();
        freed += more;
        if engine.has_batches() || is_waiting() || more > 0 || engine.used_slabs_and_blocks() < used {
            without_gain = 0;
            finish_retired(engine);
            continue;
        }
        without_gain += 1;
        if counts() == before || without_gain == MAX_SHRINKS_WITHOUT_GAIN {
            return freed;
        }
    }
}

/// Time after which a test is considered stuck: far longer than any test takes, even on an overloaded machine.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(600);

/// Returns an iterator for a thread that uses a cache while another thread packs the cache. The iterator yields at
/// least `rounds` rounds, and more until the packing thread has moved objects. If there is only one processor, the
/// packing thread may not have run before that.
pub(crate) fn rounds_until_moved(rounds: usize, moved: impl Fn() -> u64) -> impl Iterator<Item = usize> {
    let began = Instant::now();
    (0..).take_while(move |round| {
        *round < rounds || round % 1_000 != 0 || {
            assert!(began.elapsed() < STUCK_AFTER, "nothing moves");
            moved() <= 100
        }
    })
}

type Object = [u64; 24];

fn object(number: u64) -> Object {
    [number; 24]
}

/// Values in a fixed cache must keep their contents and lie at distinct addresses, and `into_inner` must return them
/// unchanged.
#[test]
fn values_keep_contents_and_addresses() {
    let cache = slabs().fixed::<Object>(Settings::new("kept")).unwrap();
    let mut slots: Vec<_> = (0..5_000).map(|number| cache.insert(object(number)).unwrap()).collect();
    slots.retain(|slot| slot[0] % 3 != 0);
    for number in 5_000..9_000 {
        slots.push(cache.insert(object(number)).unwrap());
    }
    let mut addresses: Vec<usize> = slots.iter().map(|slot| std::ptr::from_ref(&**slot) as usize).collect();
    addresses.sort_unstable();
    assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] >= size_of::<Object>()));
    assert!(slots.iter().all(|slot| slot.iter().all(|word| *word == slot[0])));
    let info = cache.info().unwrap();
    assert_eq!((info.active, info.object_bytes, info.slab_bytes), (slots.len() as u64, 192, 64 << 10));
    assert_eq!(slots.pop().unwrap().into_inner(), object(8_999));
    cache.engine().check_state();
}

/// A cache has one object more than one slab holds, so two slabs must be used. After one object is freed and the cache
/// shrunk, one slab must be left.
#[test]
fn two_slabs_become_one() {
    for slabs in [slabs(), sparse_slabs()] {
        let cache = slabs.fixed::<Object>(Settings::new("two")).unwrap();
        let per_slab = u64::from(cache.info().unwrap().objects_per_slab);
        let mut slots: Vec<_> = (0..=per_slab).map(|number| cache.insert(object(number)).unwrap()).collect();
        assert_eq!(cache.shrink().unwrap(), 0);
        let info = cache.info().unwrap();
        assert_eq!((info.total.slabs, info.total.partial, info.cached, info.active), (2, 1, 0, per_slab + 1));
        slots.pop();
        cache.shrink().unwrap();
        let info = cache.info().unwrap();
        let in_use = info.total.slabs - info.total.empty;
        assert_eq!((in_use, info.total.partial, info.active), (1, 0, per_slab));
        // In a whole block, empty slabs stay resident with the block.
        let bytes = if info.total.empty == 0 { info.slab_bytes } else { BLOCK_BYTES };
        assert_eq!(info.total.resident_bytes, bytes as u64);
        drop(slots);
        cache.shrink().unwrap();
        assert_eq!(cache.info().unwrap().total, NodeInfo::default());
        cache.engine().check_state();
    }
}

/// Nine of ten objects of a fixed cache are freed. Neither a shrink nor defragmentation may move the other objects, so
/// all partial slabs must stay.
#[test]
fn fixed_objects_never_move() {
    for slabs in [slabs(), sparse_slabs()] {
        let cache = slabs.fixed::<Object>(Settings::new("immobile")).unwrap();
        let mut slots: Vec<_> = (0..50_000).map(|number| cache.insert(object(number)).unwrap()).collect();
        slots.retain(|slot| slot[0] % 10 == 0);
        let address = |slot: &Slot<'_, Object>| std::ptr::from_ref(&**slot) as usize;
        let before: Vec<_> = slots.iter().map(address).collect();
        cache.shrink().unwrap();
        let partial = cache.info().unwrap().total.partial;
        assert!(partial > 100);
        slabs.defrag_step(Duration::from_secs(1));
        slabs.shrink(u64::MAX, Urgency::Limit);
        cache.shrink().unwrap();
        let info = cache.info().unwrap();
        assert_eq!((info.moved, info.emptied, info.total.partial), (0, 0, partial));
        assert_eq!(slots.iter().map(address).collect::<Vec<_>>(), before);
        assert!(slots.iter().zip(0..).all(|(slot, number)| **slot == object(number * 10)));
    }
}

/// The charge of a cache must equal the resident memory of its blocks. After all objects are freed, a shrink must
/// return all memory.
#[test]
fn all_memory_is_freed() {
    for layout in [Layout::for_test(), Layout { use_huge: false, ..Layout::for_test() }] {
        let (slabs, account) = slabs_with(layout, UNLIMITED);
        let cache = slabs.fixed::<[u8; 1000]>(Settings::new("back")).unwrap();
        let slots: Vec<_> = (0..20_000).map(|_| cache.insert([7; 1000]).unwrap()).collect();
        let resident = cache.info().unwrap().total.resident_bytes;
        assert!(resident >= 20_000_000 && account.resident() == resident, "{resident} {}", account.resident());
        drop(slots);
        assert!(slabs.shrink(u64::MAX, Urgency::Limit) > 0);
        assert_eq!((account.resident(), cache.info().unwrap().total.blocks), (0, 0));
        // Memory can be allocated again afterwards.
        drop(cache.insert([1; 1000]).unwrap());
        drop(cache);
        slabs.shrink(u64::MAX, Urgency::Request);
        assert_eq!(account.resident(), 0);
    }
}

/// The kernel keeps the memory of a sparse block, because the memory is locked. The next cache reuses the block as it
/// is, even though it wants a whole block. The memory must be charged only once.
#[test]
fn memory_that_the_kernel_keeps_is_charged_once() {
    const OTHER_BYTES: u64 = 32 * BLOCK_BYTES as u64;
    let layout = Layout { huge_from_bytes: BLOCK_BYTES as u64 / 4, ..Layout::for_test() };
    let (slabs, account) = slabs_with(layout, UNLIMITED);
    let cache = slabs.fixed::<Object>(Settings::new("locked")).unwrap();
    let slot = cache.insert(object(1)).unwrap();
    let at = cache.engine().shared.blocks.addr(0);
    let resident_bytes = || pagemill_sys::mem::resident_bytes(at, BLOCK_BYTES).unwrap() as u64;
    // A plain system call, because the `mlock` of the sanitizers does nothing.
    // SAFETY: locks pages that belong to the test.
    if unsafe { libc::syscall(libc::SYS_mlock2, at, BLOCK_BYTES, libc::MLOCK_ONFAULT) } != 0 {
        return println!("skipped: nothing may be locked here");
    }
    drop(slot);
    drop(cache);
    assert_eq!(account.resident(), resident_bytes(), "nothing can be given back");
    account.admit(OTHER_BYTES, Context::Outside).unwrap();
    let next = slabs.fixed::<Object>(Settings::new("next")).unwrap();
    let slot = next.insert(object(2)).unwrap();
    assert_eq!(
        (next.engine().shared.blocks.number_of(&raw const *slot as usize), account.resident()),
        (0, OTHER_BYTES + resident_bytes())
    );
    drop(slot);
    // SAFETY: unlocks the pages that were locked above.
    unsafe { libc::syscall(libc::SYS_munlock, at, BLOCK_BYTES) };
    drop(next);
    slabs.shrink(u64::MAX, Urgency::Limit);
    assert_eq!((account.resident(), resident_bytes()), (OTHER_BYTES, 0));
}

/// The last page of a slab cannot be populated. The populated part of the slab must be freed, and its charge must end.
#[test]
fn partly_populated_slab_is_freed() {
    let (slabs, account) = slabs_with(Layout { use_huge: false, ..Layout::for_test() }, UNLIMITED);
    let cache = slabs.fixed::<Object>(Settings::new("part")).unwrap();
    let mut slots = vec![cache.insert(object(0)).unwrap()];
    let (at, page) = (cache.engine().shared.blocks.addr(0), os_page_bytes());
    let protect = |access| {
        let last = at + 2 * cache.engine().shape.slab_bytes - page;
        // SAFETY: a page that belongs to the test and holds nothing.
        assert_eq!(unsafe { libc::mprotect(last as *mut _, page, access) }, 0);
    };
    protect(libc::PROT_NONE);
    let error = loop {
        match cache.insert(object(0)) {
            Ok(slot) => slots.push(slot),
            Err(error) => break error,
        }
    };
    assert!(matches!(error.error, Error::System { .. }), "{error}");
    let resident_bytes = pagemill_sys::mem::resident_bytes(at, BLOCK_BYTES).unwrap() as u64;
    let first = cache.engine().shape.slab_bytes as u64;
    assert_eq!((account.resident(), resident_bytes), (first, first));
    protect(libc::PROT_READ | libc::PROT_WRITE);
    slots.push(cache.insert(object(1)).unwrap());
    cache.engine().check_state();
}

/// At the memory limit an allocation must fail. After objects were freed, allocations must succeed again.
#[test]
fn allocations_fail_at_the_limit() {
    let (slabs, account) = slabs_with(Layout::for_test(), 4 * BLOCK_BYTES as u64);
    let cache = slabs.fixed::<Object>(Settings::new("limit")).unwrap();
    let mut slots = Vec::new();
    let error = loop {
        match cache.insert(object(0)) {
            Ok(slot) => slots.push(slot),
            Err(error) => break error,
        }
    };
    assert!(matches!(error.error, Error::NoMemory { .. }), "{error}");
    assert!(slots.len() * size_of::<Object>() > 3 * BLOCK_BYTES, "{}", slots.len());
    assert!(account.resident() <= 4 * BLOCK_BYTES as u64);
    slots.truncate(10);
    slots.extend((0..1_000).map(|number| cache.insert(object(number)).unwrap()));
    cache.engine().check_state();
}

/// One cache frees blocks. Another cache must use these blocks without a request to the kernel.
#[test]
fn freed_blocks_serve_other_caches() {
    let slabs = slabs();
    let one = slabs.fixed::<Object>(Settings::new("one")).unwrap();
    drop((0..100_000).map(|number| one.insert(object(number)).unwrap()).collect::<Vec<_>>());
    drop(one);
    let free = slabs.giveable_bytes();
    let other = slabs.fixed::<[u8; 4000]>(Settings::new("other")).unwrap();
    let slot = other.insert([3; 4000]).unwrap();
    assert!(free > BLOCK_BYTES as u64 && slabs.giveable_bytes() == free - BLOCK_BYTES as u64);
    drop(slot);
}

/// One thread allocates objects and another frees them, while a third shrinks the cache. No object may be lost or
/// allocated twice.
#[test]
fn threads_pass_objects_to_each_other() {
    let cache = slabs().fixed::<AtomicUsize>(Settings::new("threads")).unwrap();
    let (send, receive) = std::sync::mpsc::sync_channel(100);
    std::thread::scope(|scope| {
        let cache = &cache;
        scope.spawn(move || {
            for number in 0..100_000 {
                let slot = cache.insert(AtomicUsize::new(number)).unwrap();
                send.send(slot).unwrap();
            }
        });
        scope.spawn(move || {
            let mut kept = Vec::new();
            for (number, slot) in receive.into_iter().enumerate() {
                assert_eq!(slot.load(Relaxed), number);
                kept.push(slot);
                if kept.len() == 500 {
                    kept.drain(..400);
                }
            }
        });
        for _ in 0..20 {
            match cache.shrink() {
                Ok(_) | Err(Error::Busy { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    });
    cache.shrink().unwrap();
    assert_eq!((cache.info().unwrap().active, cache.info().unwrap().total.slabs), (0, 0));
    cache.engine().check_state();
}

/// Each value must be dropped once, even if its destructor panics, and the memory of each value must be freed.
#[test]
fn values_are_dropped_once() {
    struct Counted<'count>(&'count AtomicUsize);
    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            assert!(self.0.fetch_add(1, Relaxed) != 3, "a destructor that fails, as it should here");
        }
    }
    let dropped = AtomicUsize::new(0);
    let cache = slabs().fixed::<Counted<'_>>(Settings::new("dropped")).unwrap();
    let slots: Vec<_> = (0..10).map(|_| cache.insert(Counted(&dropped)).unwrap()).collect();
    for slot in slots {
        let failed = catch_unwind(AssertUnwindSafe(|| drop(slot))).is_err();
        assert_eq!(failed, dropped.load(Relaxed) == 4);
    }
    assert_eq!((dropped.load(Relaxed), cache.info().unwrap().active), (10, 0));
}

/// Objects must be allocated on the requested NUMA node and counted there. A node that does not exist must be refused.
#[test]
fn objects_are_allocated_on_the_requested_node() {
    let cache = slabs_on_nodes(3).fixed::<Object>(Settings::new("nodes")).unwrap();
    let slots: Vec<_> = (0..300).map(|number| cache.insert_on(number % 3, object(1)).unwrap()).collect();
    assert!(slots.iter().enumerate().all(|(number, slot)| slot.node() == number % 3));
    let used: Vec<u64> = cache.info().unwrap().nodes.iter().map(|node| node.used).collect();
    assert_eq!(used, [100, 100, 100]);
    assert!(matches!(
        cache.insert_on(3, object(1)),
        Err(InsertError { error: Error::BadNode { node: 3, nodes: 3 }, .. })
    ));
    drop(slots);
    cache.shrink().unwrap();
    assert_eq!(cache.info().unwrap().total, NodeInfo::default());
}

/// A node without free objects must use objects of another node if `remote_node_defrag_ratio` is 100. If it is 0, the
/// node must set up a slab.
#[test]
fn remote_objects_are_used_by_ratio() {
    for (ratio, are_remote) in [(0, false), (100, true)] {
        let settings = Settings::new("remote").remote_node_defrag_ratio(ratio);
        let cache = slabs_on_nodes(2).fixed::<Object>(settings).unwrap();
        let engine = cache.engine();
        let first = engine.allocate_on(1).unwrap();
        let mut taken = [0];
        let (node, _) = engine.take_objects(0, ratio, &mut taken).unwrap();
        assert_eq!(node == 1, are_remote);
        assert_eq!(cache.info().unwrap().from_remote, u64::from(are_remote));
        engine.return_objects(1, &[first]);
        engine.return_objects(node, &taken);
    }
}

/// Ratios above 100 and unsupported object or slab sizes must be refused.
#[test]
fn bad_settings_are_refused() {
    let slabs = slabs();
    for (used, remote) in [(101, 0), (0, 101)] {
        let settings = Settings::new("ratio").defrag_used_ratio(used).remote_node_defrag_ratio(remote);
        assert!(matches!(slabs.fixed::<u64>(settings), Err(Error::BadRatio { percent: 101 })));
    }
    let settings = Settings::new("slab").slab_bytes(5000);
    assert!(matches!(slabs.fixed::<u64>(settings), Err(Error::BadLength { .. })));
    assert!(matches!(slabs.fixed::<[u8; 3 << 20]>(Settings::new("large")), Err(Error::BadLength { .. })));
}

/// Creates caches in different orders. A list of caches must begin with those that have movable objects, and each kind
/// must be sorted by name.
#[test]
fn caches_are_listed_movable_first_then_by_name() {
    let slabs = slabs_on_nodes(1);
    let names = |list: Vec<SlabInfo>| list.into_iter().map(|info| info.name.to_string()).collect::<Vec<_>>();
    let (_last, _third) =
        (slabs.fixed::<u64>(Settings::new("b")).unwrap(), slabs.fixed::<u64>(Settings::new("a")).unwrap());
    let (_second, _first) =
        (slabs.by_handle::<u64>(Settings::new("z")).unwrap(), slabs.by_handle::<u64>(Settings::new("c")).unwrap());
    assert_eq!(names(slabs.list()), ["c", "z", "a", "b"]);
}

/// Creates the maximum number of caches; one more cache must be refused. All caches must be listed. Each must have
/// magazines and barns, of which only used ones may be resident.
#[test]
fn there_can_be_a_thousand_caches() {
    let slabs = slabs_on_nodes(2);
    let caches: Vec<_> = (0..MAX_CACHES).map(|_| slabs.fixed::<Object>(Settings::new("many")).unwrap()).collect();
    let more = || slabs.fixed::<u64>(Settings::new("more"));
    assert!(MAX_CACHES > 1000 && matches!(more(), Err(Error::TooMany { most: MAX_CACHES, .. })));
    let list = slabs.list();
    assert!(list.len() == MAX_CACHES && list.iter().all(|info| *info.name == *"many"));
    assert_eq!(slabs.shared.get().unwrap().resident_bytes(), 0);
    for cache in [&caches[0], &caches[255], &caches[256], &caches[MAX_CACHES - 1]] {
        let slots: Vec<_> = (0..5_000).map(|number| cache.insert(object(number)).unwrap()).collect();
        assert!(slots.iter().zip(0..).all(|(slot, number)| **slot == object(number)));
        drop(slots);
        let engine = cache.engine();
        assert!(engine.objects_in_magazines() > 0 && (0..2).map(|node| engine.objects_in_barns(node)).sum::<u64>() > 0);
    }
    drop(caches);
    assert!(slabs.fixed::<u64>(Settings::new("again")).is_ok() && slabs.list().is_empty());
}

/// Debug mode must detect a write past the end of an object, a write after free, and a double free, and must name the
/// source locations.
#[test]
fn debug_mode_detects_damage() {
    let slabs = slabs();
    let with_damage = |damage: &dyn Fn(&Engine, usize)| {
        let settings = Settings::new("watched").debug(true);
        let cache = slabs.fixed::<[u8; 20]>(settings).unwrap();
        let object = cache.engine().allocate().unwrap();
        let found = catch_unwind(AssertUnwindSafe(|| damage(cache.engine(), object))).unwrap_err();
        *found.downcast::<String>().unwrap()
    };
    let free = |engine: &Engine, object| damage::free(engine, object);
    let found = with_damage(&|engine, object| {
        damage::write(object + 24, 0);
        free(engine, object);
    });
    assert!(found.contains("watched") && found.contains("was written behind its end"), "{found}");
    let found = with_damage(&|engine, object| {
        free(engine, object);
        free(engine, object);
    });
    assert!(found.contains("was freed twice") && found.contains("basics.rs:"), "{found}");
    let found = with_damage(&|engine, object| {
        free(engine, object);
        damage::write(object + 19, 1);
        _ = engine.allocate();
    });
    assert!(found.contains("was written at byte 19 while it was free"), "{found}");
}

/// Invalid operations that a faulty program may execute.
mod damage {
    use super::Engine;

    pub fn free(engine: &Engine, object: usize) {
        // SAFETY: none. In debug mode the cache detects the error before the object is freed.
        unsafe { engine.free(object) };
    }

    pub fn write(addr: usize, byte: u8) {
        // SAFETY: memory of a slab that belongs to the test and that no other code uses.
        unsafe { (addr as *mut u8).write(byte) };
    }
}

/// Prints the cost of typical operations of one thread. Run this test with `--ignored --nocapture` in a release build.
#[test]
#[ignore = "prints times"]
fn print_cost_of_typical_operations() {
    let cache = slabs().fixed::<Object>(Settings::new("cost")).unwrap();
    let time = |what: &str, count: u64, act: &mut dyn FnMut()| {
        let began = std::time::Instant::now();
        act();
        println!("{what}: {:.2} ns", began.elapsed().as_nanos() as f64 / count as f64);
    };
    for _ in 0..3 {
        time("pair", 20_000_000, &mut || {
            for _ in 0..20_000_000 {
                let object = cache.engine().allocate().unwrap();
                damage::free(cache.engine(), std::hint::black_box(object));
            }
        });
        let mut batch = Vec::with_capacity(10_000);
        time("batch of 10000, an object written", 10_000_000, &mut || {
            for _ in 0..1_000 {
                for number in 0..10_000_u64 {
                    batch.push(cache.insert(object(number)).unwrap());
                }
                batch.clear();
            }
        });
        let mut slots: Vec<_> = (0..100_000).map(|number| Some(cache.insert(object(number)).unwrap())).collect();
        let mut at = 1_u64;
        time("churn over 100000", 5_000_000, &mut || {
            for _ in 0..5_000_000 {
                at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let slot = &mut slots[(at >> 33) as usize % 100_000];
                *slot = None;
                *slot = Some(cache.insert(object(at)).unwrap());
            }
        });
    }
}

/// Another thread has free objects in its magazine. At the memory limit, allocations must use all objects of the block
/// before one fails, because the other thread's magazine is drained.
#[test]
fn magazines_are_drained_before_an_allocation_fails() {
    let (slabs, _) = slabs_with(Layout::for_test(), BLOCK_BYTES as u64);
    let cache = slabs.fixed::<Object>(Settings::new("others")).unwrap();
    let per_block = cache.engine().shape.block_capacity() as usize;
    let (kept, wait_kept) = std::sync::mpsc::channel();
    let (end, wait_end) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let cache = &cache;
        scope.spawn(move || {
            drop(cache.insert(object(1)).unwrap());
            kept.send(()).unwrap();
            wait_end.recv().unwrap();
        });
        wait_kept.recv().unwrap();
        let slots: Vec<_> = std::iter::from_fn(|| cache.insert(object(2)).ok()).collect();
        end.send(()).unwrap();
        assert_eq!(slots.len(), per_block);
    });
    cache.engine().check_state();
}

/// Slabs for which no memory was available must become bare again. Once all objects are freed, no block may be left,
/// and allocations must succeed again.
#[test]
fn slab_without_memory_becomes_bare() {
    let layout = Layout { use_huge: false, ..Layout::for_test() };
    let (slabs, _) = slabs_with(layout, BLOCK_BYTES as u64 / 2);
    let cache = slabs.fixed::<Object>(Settings::new("refused")).unwrap();
    for _ in 0..2 {
        let slots: Vec<_> = std::iter::from_fn(|| cache.insert(object(1)).ok()).collect();
        assert!(
            slots.len() > 1_000
                && matches!(cache.insert(object(2)), Err(InsertError { error: Error::NoMemory { .. }, .. }))
        );
        cache.engine().check_state();
        drop(slots);
        cache.shrink().unwrap();
        assert_eq!(cache.info().unwrap().total, NodeInfo::default());
    }
}

/// After a shrink, which drains the magazines, threads must use their magazines again.
#[test]
fn magazines_are_used_again_after_a_shrink() {
    let cache = slabs().fixed::<Object>(Settings::new("again")).unwrap();
    for _ in 0..2 {
        let slot = cache.insert(object(1)).unwrap();
        assert!(cache.engine().objects_in_magazines() > 0, "more than one was taken");
        drop(slot);
        cache.shrink().unwrap();
        assert_eq!(cache.engine().objects_in_magazines(), 0);
    }
}
