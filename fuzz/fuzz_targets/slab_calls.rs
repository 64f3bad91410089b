//! Makes random calls on slab caches of all kinds. Each three bytes of the input are decoded as one call. The results
//! are compared with a list of the expected objects.
//!
//! Run it by `cargo +nightly fuzz run slab_calls`. The first two bytes of an input choose the kind of cache, the sizes
//! of its objects and slabs, debug mode, and whether blocks are huge pages. At the end of each input, the cache is
//! dropped with its contents.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_core::Error;
use pagemill_core::arena::Layout;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_slab as slab;
use pagemill_slab::{Candidates, Done, FixedSlab, Handle, HandleMap, Migrate, Movable, Moving, OwnerSlab, Pinned};
use pagemill_slab::{Settings, SlabCache, Slabs, Slot, Target};
use pagemill_testbed::Testbed;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of logical NUMA nodes of the instances under test.
const NODES: usize = 3;

/// Maximum number of objects in the slab cache.
const MAX_OBJECTS: usize = 4_000;

/// Number of values that exist in all slab caches. It shows whether each value is dropped exactly once.
static LIVE_VALUES: AtomicU64 = AtomicU64::new(0);

fn slabs(use_huge: bool) -> &'static Slabs {
    thread_local! {
        static BOTH: [&'static Slabs; 2] = [false, true].map(|use_huge| {
            let layout = Layout { use_huge, nodes: Nodes::logical(NODES), ..Layout::for_test() };
            Testbed::new(layout, UNLIMITED).expect("address space").slabs
        });
    }
    BOTH.with(|both| both[usize::from(use_huge)])
}

/// A value whose words all contain its number. It is counted in `LIVE_VALUES` until it is dropped.
struct Value<const WORDS: usize>([u64; WORDS]);

// SAFETY: the type has only numbers, which can be moved.
unsafe impl<const WORDS: usize> Movable for Value<WORDS> {}

impl<const WORDS: usize> Value<WORDS> {
    fn new(number: u64) -> Self {
        LIVE_VALUES.fetch_add(1, Relaxed);
        Self([number; WORDS])
    }

    fn is(&self, number: u64) -> bool {
        self.0.iter().all(|word| *word == number)
    }
}

impl<const WORDS: usize> Drop for Value<WORDS> {
    fn drop(&mut self) {
        assert!(self.is(self.0[0]));
        self.0[0] = !self.0[0];
        assert!(LIVE_VALUES.fetch_sub(1, Relaxed) > 0);
    }
}

/// Makes a call that moves objects of the cache or returns memory. If `is_guarded` is true, makes only calls that do
/// not wait for readers.
fn compact(slabs: &Slabs, cache: &impl SlabCache, [call, one, other]: [u8; 3], is_guarded: bool) {
    let (from, to) = (usize::from(one) % (NODES + 1), usize::from(other) % (NODES + 1));
    match call % 8 {
        0 if !is_guarded => {
            cache.shrink().unwrap();
            let info = cache.info().unwrap();
            let stayed = info.busy + info.refused + info.failed;
            assert!(stayed > 0 || info.nodes.iter().all(|node| node.partial <= 1), "{info:?}");
        }
        1 if !is_guarded => {
            let before = cache.info().unwrap();
            match cache.move_objects(from, to, u64::from(other)) {
                Ok(progress) => assert!(from < NODES && to < NODES && progress.moved <= u64::from(other)),
                Err(error) => assert!(matches!(error, Error::BadNode { .. }) && (from == NODES || to == NODES)),
            }
            assert!(cache.info().unwrap().active <= before.active);
        }
        2 if !is_guarded => _ = cache.balance().unwrap(),
        3 => match cache.set_defrag_used_ratio(u32::from(one)) {
            Ok(()) => assert_eq!(cache.info().unwrap().defrag_used_ratio, u32::from(one)),
            Err(error) => assert!(matches!(error, Error::BadRatio { percent: 101.. })),
        },
        4 => _ = slabs.shrink(u64::from(one) << 16, Urgency::Request),
        5 => _ = slabs.shrink(u64::MAX, Urgency::Limit),
        6 => _ = slabs.defrag_step(Duration::from_micros(u64::from(one) * 8)),
        _ => _ = cache.defrag_step(Duration::from_micros(u64::from(one) * 8)).unwrap(),
    }
}

type Calls<'a> = std::slice::ChunksExact<'a, u8>;

fn next_call(calls: &mut Calls<'_>) -> Option<[u8; 3]> {
    calls.next().map(|call| [call[0], call[1], call[2]])
}

fn index_of(one: u8, other: u8, len: usize) -> usize {
    (usize::from(one) << 8 | usize::from(other)) % len.max(1)
}

/// A slab cache of values that are accessed by handle, and the expected values.
struct HandleModel<'a, const WORDS: usize> {
    slabs: &'static Slabs,
    cache: &'a HandleMap<Value<WORDS>>,
    live: Vec<(Handle<Value<WORDS>>, u64)>,
    gone: Vec<Handle<Value<WORDS>>>,
    pins: Vec<(Pinned<'a, Value<WORDS>>, Handle<Value<WORDS>>, u64)>,
    next: u64,
}

impl<const WORDS: usize> HandleModel<'_, WORDS> {
    fn insert(&mut self, count: usize) {
        for _ in 0..count.min(MAX_OBJECTS.saturating_sub(self.live.len())) {
            self.next += 1;
            self.live.push((self.cache.insert(Value::new(self.next)).unwrap(), self.next));
        }
    }

    fn remove(&mut self, at: usize) {
        let Some((handle, _)) = self.live.get(at).copied() else { return };
        let is_pinned = self.pins.iter().any(|(_, pinned, _)| *pinned == handle);
        match self.cache.remove(handle) {
            Err(error) => assert!(is_pinned && matches!(error, Error::Busy { .. })),
            Ok(removed) => {
                assert!(removed.is_some() && !is_pinned);
                self.live.swap_remove(at);
                self.gone.push(handle);
            }
        }
    }

    fn update(&mut self, at: usize) {
        let Some((handle, number)) = self.live.get_mut(at) else { return };
        self.next += 1;
        let changed = self.cache.update(*handle, |old| {
            assert!(old.is(*number));
            Value::new(self.next)
        });
        match changed {
            Err(_) => assert!(self.pins.iter().any(|(_, pinned, _)| pinned == handle)),
            Ok(was_there) => {
                assert!(was_there);
                *number = self.next;
            }
        }
    }

    fn use_stale_handle(&self, one: u8, other: u8) {
        if let Some(handle) = self.gone.get(index_of(one, other, self.gone.len())) {
            assert!(self.cache.get(*handle, &slab::enter()).is_none() && self.cache.remove(*handle).unwrap().is_none());
            assert!(self.cache.pin(*handle).unwrap().is_none());
            assert!(!self.cache.update(*handle, |_| unreachable!()).unwrap());
        }
        let forged = Handle::from_bits(u64::from(one) << 32 | u64::from(other));
        let is_known = self.live.iter().any(|(handle, _)| *handle == forged);
        assert_eq!(self.cache.get(forged, &slab::enter()).is_some(), is_known);
    }

    fn pin(&mut self, at: usize) {
        let Some((handle, number)) = self.live.get(at).copied() else { return };
        match self.cache.pin(handle) {
            Ok(pinned) => self.pins.push((pinned.unwrap(), handle, number)),
            Err(_) => assert_eq!(self.pins.iter().filter(|(_, pinned, _)| *pinned == handle).count(), 7),
        }
    }

    /// Makes one call. If the call takes an epoch guard, up to three further calls of the input are made under that
    /// guard.
    fn make_call(&mut self, call: [u8; 3], calls: &mut Calls<'_>, is_guarded: bool) {
        let [what, one, other] = call;
        let at = index_of(one, other, self.live.len());
        match what >> 3 {
            0..8 => self.insert(1 + usize::from(one)),
            8..12 => (0..=other).for_each(|step| self.remove(at.wrapping_sub(usize::from(step) * usize::from(one)))),
            12..15 => self.remove(at),
            15..17 => self.update(at),
            17 => self.use_stale_handle(one, other),
            18 => self.pin(at),
            19 if !self.pins.is_empty() => {
                let (pinned, _, number) = self.pins.swap_remove(usize::from(one) % self.pins.len());
                assert!(pinned.is(number));
            }
            20 if !is_guarded => {
                let guard = slab::enter();
                let cache = self.cache;
                let some = self.live[at.min(self.live.len())..].iter().take(9);
                let seen: Vec<_> =
                    some.map(|(handle, number)| (cache.get(*handle, &guard).unwrap(), *number)).collect();
                for _ in 0..3 {
                    next_call(calls).into_iter().for_each(|call| self.make_call(call, calls, true));
                }
                assert!(seen.iter().all(|(value, number)| value.is(*number)));
            }
            21 => self.check(),
            _ => compact(self.slabs, self.cache, call, is_guarded),
        }
    }

    fn check(&self) {
        let guard = slab::enter();
        assert!(self.live.iter().all(|(handle, number)| self.cache.get(*handle, &guard).unwrap().is(*number)));
        assert!(self.pins.iter().all(|(pinned, _, number)| pinned.is(*number)));
        assert!(self.cache.info().unwrap().active >= self.live.len() as u64);
    }
}

fn run_by_handle<const WORDS: usize>(slabs: &'static Slabs, settings: Settings, mut calls: Calls<'_>) {
    let cache = slabs.by_handle::<Value<WORDS>>(settings).unwrap();
    let (live, gone, pins) = (Vec::new(), Vec::new(), Vec::new());
    let mut machine = HandleModel { slabs, cache: &cache, live, gone, pins, next: 0 };
    while let Some(call) = next_call(&mut calls) {
        machine.make_call(call, &mut calls, false);
    }
    machine.check();
    drop(machine);
    drop(cache);
    assert_eq!(LIVE_VALUES.load(Relaxed), 0, "each value was dropped once");
}

fn run_fixed<const WORDS: usize>(slabs: &'static Slabs, settings: Settings, mut calls: Calls<'_>) {
    let cache: FixedSlab<Value<WORDS>> = slabs.fixed(settings).unwrap();
    let mut slots: Vec<(Slot<'_, Value<WORDS>>, u64)> = Vec::new();
    let mut number = 0;
    while let Some([what, one, other]) = next_call(&mut calls) {
        let at = index_of(one, other, slots.len());
        number += 1;
        match what >> 3 {
            0..8 if slots.len() < MAX_OBJECTS => {
                slots.extend((0..=one).map(|_| (cache.insert(Value::new(number)).unwrap(), number)));
            }
            8..12 => match cache.insert_on(usize::from(one) % (NODES + 1), Value::new(number)) {
                Ok(slot) => {
                    assert_eq!(slot.node(), usize::from(one) % (NODES + 1));
                    slots.push((slot, number));
                }
                Err(error) => assert!(matches!(error.error, Error::BadNode { node: NODES, .. })),
            },
            12..20 => slots.retain(|(slot, number)| number % (1 + u64::from(one)) != 0 || !slot.is(*number)),
            20 if at < slots.len() => {
                let (slot, number) = slots.swap_remove(at);
                assert!(slot.into_inner().is(number));
            }
            21 if at < slots.len() => {
                *slots[at].0 = Value::new(number);
                slots[at].1 = number;
            }
            22 => _ = slabs.shrink(u64::MAX, if one % 2 == 0 { Urgency::Limit } else { Urgency::Request }),
            23 => {
                cache.shrink().unwrap();
                assert_eq!(cache.info().unwrap().active, slots.len() as u64);
            }
            _ => assert!(slots.iter().all(|(slot, number)| slot.is(*number))),
        }
    }
    drop(slots);
    assert_eq!((LIVE_VALUES.load(Relaxed), cache.info().unwrap().active), (0, 0));
}

/// What the callbacks of the objects' owner do when defragmentation moves an object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CallbackBehaviour {
    Move,
    Busy,
    Fail,
    Free,
    PanicInIsolate,
    PanicInMigrate,
    PanicInConstruct,
}

impl CallbackBehaviour {
    /// Chooses a behaviour by `byte`. The number of panics is limited, because a slab in which a callback panicked
    /// keeps its block until the process ends.
    fn of(byte: u8) -> Self {
        static PANICS: AtomicU32 = AtomicU32::new(0);
        let all =
            [Self::Busy, Self::Fail, Self::Free, Self::PanicInIsolate, Self::PanicInMigrate, Self::PanicInConstruct];
        let behaviour = all[usize::from(byte) % all.len()];
        if behaviour.may_panic() && PANICS.fetch_add(1, Relaxed) > 200 { Self::Fail } else { behaviour }
    }

    fn may_panic(self) -> bool {
        matches!(self, Self::PanicInIsolate | Self::PanicInMigrate | Self::PanicInConstruct)
    }
}

struct Item<const WORDS: usize> {
    /// State: 0 if the item is free, 1 if it is in use, and 2 if a move has isolated it or the test has pinned it.
    state: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Item<WORDS> {
    fn is(&self, number: u64) -> bool {
        self.words.iter().all(|word| word.load(Relaxed) == number)
    }
}

struct ItemOwner<const WORDS: usize> {
    items: Mutex<BTreeMap<u64, usize>>,
    behaviour: Mutex<CallbackBehaviour>,
}

// SAFETY: an item has its number, so `migrate` finds its entry. The entry refers to the new item before the old
// one is free.
unsafe impl<const WORDS: usize> Migrate for ItemOwner<WORDS> {
    type Object = Item<WORDS>;
    type Isolated = ();

    fn construct(&self) -> Item<WORDS> {
        self.panic_if_behaviour_is(CallbackBehaviour::PanicInConstruct);
        Item { state: AtomicU32::new(0), words: [const { AtomicU64::new(0) }; WORDS] }
    }

    fn isolate(&self, items: &mut Candidates<'_, Item<WORDS>>) {
        self.panic_if_behaviour_is(CallbackBehaviour::PanicInIsolate);
        // SAFETY: all objects of the cache are constructed items.
        items.retain(|item| unsafe { item.as_ref() }.state.compare_exchange(1, 2, Relaxed, Relaxed).is_ok());
    }

    fn migrate<'object>(
        &self,
        item: Moving<'object, Item<WORDS>>,
        to: &mut Target<'_, Item<WORDS>>,
        _: &mut (),
    ) -> Done<'object> {
        self.panic_if_behaviour_is(CallbackBehaviour::PanicInMigrate);
        // SAFETY: the item is in use, and `isolate` prevents changes to it.
        let old = unsafe { item.object().as_ref() };
        let number = old.words[0].load(Relaxed);
        // The behaviour is copied, so that its lock is not held below: `to.take()` may call `construct`, which
        // takes the lock.
        let behaviour = *self.behaviour.lock().unwrap();
        let mut items = self.items.lock().unwrap();
        assert!(old.is(number) && items[&number] == item.object().as_ptr() as usize);
        match behaviour {
            CallbackBehaviour::Busy => {
                old.state.store(1, Relaxed);
                return item.busy();
            }
            CallbackBehaviour::Free if number % 3 == 0 => {
                items.remove(&number);
                old.state.store(0, Relaxed);
                return item.freed();
            }
            _ => {
                let place = to.take();
                let Some(place) = place.filter(|_| behaviour != CallbackBehaviour::Fail) else {
                    old.state.store(1, Relaxed);
                    return item.failed();
                };
                // SAFETY: a free item of this owner, which no other call uses.
                let new = unsafe { place.object().as_ref() };
                assert_eq!(new.state.swap(1, Relaxed), 0);
                new.words.iter().for_each(|word| word.store(number, Relaxed));
                items.insert(number, place.object().as_ptr() as usize);
                old.state.store(0, Relaxed);
                item.moved(place)
            }
        }
    }
}

impl<const WORDS: usize> ItemOwner<WORDS> {
    fn panic_if_behaviour_is(&self, behaviour: CallbackBehaviour) {
        let is_it = *self.behaviour.lock().unwrap() == behaviour;
        assert!(!is_it, "an owner that fails, as it should here");
    }

    fn set_behaviour(&self, behaviour: CallbackBehaviour) {
        *self.behaviour.lock().unwrap() = behaviour;
    }

    fn with_item<R>(&self, number: u64, act: impl FnOnce(&Item<WORDS>) -> R) -> R {
        // SAFETY: the table has only items in use, and nothing moves them meanwhile.
        act(unsafe { &*(self.items.lock().unwrap()[&number] as *const Item<WORDS>) })
    }

    /// Checks that no two items have the same address, and that only pinned items are in state 2.
    fn check(&self, pinned: &[u64]) {
        let items = self.items.lock().unwrap();
        let mut places: Vec<usize> = items.values().copied().collect();
        places.sort_unstable();
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= size_of::<Item<WORDS>>()));
        for (number, at) in &*items {
            // SAFETY: the table has only items in use.
            let item = unsafe { &*(*at as *const Item<WORDS>) };
            assert!(item.is(*number) && item.state.load(Relaxed) == 1 + u32::from(pinned.contains(number)));
        }
    }
}

/// Runs `act`, whose callbacks may panic, and suppresses the message of a panic. Returns whether `act` completed
/// without a panic.
fn completes_without_panic(act: impl FnOnce()) -> bool {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let is_done = catch_unwind(AssertUnwindSafe(act)).is_ok();
    std::panic::set_hook(hook);
    is_done
}

fn add_item<const WORDS: usize>(cache: &OwnerSlab<ItemOwner<WORDS>>, number: u64, node: Option<usize>) {
    let at = match node {
        None => cache.allocate().unwrap(),
        Some(node) => match cache.allocate_on(node) {
            Ok(at) => at,
            Err(error) => return assert!(matches!(error, Error::BadNode { node: NODES, .. }) && node == NODES),
        },
    };
    assert!(node.is_none_or(|node| cache.node_of(at) == node));
    // SAFETY: a free item that belongs to this thread.
    let item = unsafe { at.as_ref() };
    assert_eq!(item.state.swap(1, Relaxed), 0);
    item.words.iter().for_each(|word| word.store(number, Relaxed));
    cache.owner().items.lock().unwrap().insert(number, at.as_ptr() as usize);
}

fn remove_item<const WORDS: usize>(cache: &OwnerSlab<ItemOwner<WORDS>>, number: u64) {
    cache.owner().with_item(number, |item| {
        assert!(item.is(number));
        if item.state.compare_exchange(1, 0, Relaxed, Relaxed).is_ok() {
            // SAFETY: the item is free, and not isolated by the mover.
            unsafe { cache.free(NonNull::from(item)) };
        }
    });
    let is_free = cache.owner().with_item(number, |item| item.state.load(Relaxed) != 2);
    is_free.then(|| cache.owner().items.lock().unwrap().remove(&number));
}

fn first_item_from(items: &Mutex<BTreeMap<u64, usize>>, from: u64) -> Option<u64> {
    items.lock().unwrap().range(from..).next().map(|(number, _)| *number)
}

fn run_by_owner<const WORDS: usize>(slabs: &'static Slabs, settings: Settings, mut calls: Calls<'_>) {
    let owner = ItemOwner::<WORDS> { items: Mutex::default(), behaviour: Mutex::new(CallbackBehaviour::Move) };
    let cache = slabs.by_owner(settings, owner).unwrap();
    let owner = cache.owner();
    let (mut number, mut pinned) = (0, Vec::new());
    while let Some(call) = next_call(&mut calls) {
        let [what, one, other] = call;
        let chosen = u64::from(one) << 8 | u64::from(other);
        let found = first_item_from(&owner.items, chosen);
        match what >> 3 {
            0..8 if owner.items.lock().unwrap().len() < MAX_OBJECTS => (0..=one).for_each(|_| {
                number += 1;
                add_item(&cache, number, None);
            }),
            8..10 => {
                number += 1;
                add_item(&cache, number, Some(usize::from(one) % (NODES + 1)));
            }
            10..16 => (0..=one).for_each(|step| {
                let item = first_item_from(&owner.items, chosen + u64::from(step) * u64::from(other % 16));
                item.into_iter().for_each(|number| remove_item(&cache, number));
            }),
            16 => {
                let is_ours = |number: &u64| owner.with_item(*number, |item| item.state.swap(2, Relaxed)) == 1;
                pinned.extend(found.filter(is_ours));
            }
            17 if !pinned.is_empty() => {
                let number = pinned.swap_remove(usize::from(one) % pinned.len());
                owner.with_item(number, |item| item.state.store(1, Relaxed));
            }
            18 => {
                let behaviour = CallbackBehaviour::of(one);
                owner.set_behaviour(behaviour);
                let mut taken = Vec::new();
                let is_done = completes_without_panic(|| match next_call(&mut calls) {
                    Some([_, count, _]) if behaviour == CallbackBehaviour::PanicInConstruct => {
                        (0..2 * u32::from(count)).for_each(|_| taken.push(cache.allocate().unwrap()));
                    }
                    Some(call) => compact(slabs, &cache, call, true),
                    None => {}
                });
                assert!(is_done || behaviour.may_panic());
                // SAFETY: the items were allocated above, and were never in use.
                taken.into_iter().for_each(|item| unsafe { cache.free(item) });
                owner.set_behaviour(CallbackBehaviour::Move);
                // If a callback panicked, the items of its slab are still in state 2.
                let numbers: Vec<u64> = owner.items.lock().unwrap().keys().copied().collect();
                let loose = numbers.into_iter().filter(|number| !pinned.contains(number));
                loose.for_each(|number| owner.with_item(number, |item| item.state.store(1, Relaxed)));
            }
            19 => {
                // Under an epoch guard, moved items can still be read at their old place.
                let _guard = pagemill_xarray::pin();
                let seen = found.map(|number| (owner.items.lock().unwrap()[&number], number));
                compact(slabs, &cache, [one, other, what], true);
                // SAFETY: the items were found under the guard, and could only be moved since.
                seen.into_iter().for_each(|(at, number)| assert!(unsafe { &*(at as *const Item<WORDS>) }.is(number)));
            }
            20 => owner.check(&pinned),
            _ => compact(slabs, &cache, call, false),
        }
    }
    owner.check(&pinned);
    assert!(cache.info().unwrap().active >= owner.items.lock().unwrap().len() as u64);
    pinned.into_iter().for_each(|number| owner.with_item(number, |item| item.state.store(1, Relaxed)));
    // Items that are not removed here would never be freed.
    while let Some(number) = first_item_from(&owner.items, 0) {
        remove_item(&cache, number);
    }
    cache.shrink().unwrap();
    assert_eq!(cache.info().unwrap().active, 0);
}

fuzz_target!(|data: &[u8]| {
    let [first, second, calls @ ..] = data else { return };
    let calls = calls.chunks_exact(3);
    let slab_bytes = [None, Some(16 << 10), Some(128 << 10), Some(2 << 20)][usize::from(second & 3)];
    let settings = Settings::new("fuzz")
        .slab_bytes(slab_bytes)
        .debug(first & 64 == 64)
        .remote_node_defrag_ratio(u32::from(second >> 2));
    let slabs = slabs(first & 128 == 128);
    match first & 15 {
        0 | 1 | 2 => run_by_handle::<5>(slabs, settings, calls),
        3 | 4 => run_by_handle::<40>(slabs, settings, calls),
        5 => run_by_handle::<511>(slabs, settings, calls),
        6 | 7 | 8 => run_by_owner::<7>(slabs, settings, calls),
        9 | 10 => run_by_owner::<40>(slabs, settings, calls),
        11 => run_by_owner::<511>(slabs, settings, calls),
        12 | 13 => run_fixed::<3>(slabs, settings, calls),
        _ => run_fixed::<100>(slabs, settings, calls),
    }
});
