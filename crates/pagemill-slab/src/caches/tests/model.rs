//! Random calls of a cache by handle, compared with a `BTreeMap` that holds the expected contents. The test prints its
//! seed; `PAGEMILL_TEST_SEED` repeats a run with that seed.
#![allow(unsafe_code)] // implements `Movable`

use super::*;
use crate::caches::tests::basics::slabs_with;
use pagemill_core::arena::Layout;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_sys::clock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

const NODES: usize = 3;

/// A pseudorandom number generator.
pub(crate) struct Random(u64);

impl Random {
    pub fn seeded(what: &str) -> Self {
        let named = std::env::var("PAGEMILL_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = named.unwrap_or_else(clock::fine_ns);
        println!("{what}: PAGEMILL_TEST_SEED={seed}");
        Self(seed)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB) % end.max(1)
    }
}

/// A value that adds its number to `sum` while the value exists.
struct Summed<const WORDS: usize> {
    words: [u64; WORDS],
    sum: Arc<AtomicU64>,
}

// SAFETY: numbers and a pointer can be copied byte by byte.
unsafe impl<const WORDS: usize> Movable for Summed<WORDS> {}

impl<const WORDS: usize> Summed<WORDS> {
    fn new(number: u64, sum: &Arc<AtomicU64>) -> Self {
        sum.fetch_add(number, Relaxed);
        Self { words: [number; WORDS], sum: sum.clone() }
    }
}

impl<const WORDS: usize> Drop for Summed<WORDS> {
    fn drop(&mut self) {
        assert!(self.words.iter().all(|word| *word == self.words[0]));
        self.sum.fetch_sub(self.words[0], Relaxed);
    }
}

/// A cache by handle, and the contents that it is expected to have.
struct Model<const WORDS: usize> {
    slabs: &'static Slabs,
    cache: HandleMap<Summed<WORDS>>,
    values: BTreeMap<u64, (Handle<Summed<WORDS>>, u64)>,
    /// Handles of removed values.
    removed: Vec<Handle<Summed<WORDS>>>,
    sum: Arc<AtomicU64>,
    next_key: u64,
}

impl<const WORDS: usize> Model<WORDS> {
    fn new(slabs: &'static Slabs, settings: Settings) -> Self {
        let cache = slabs.by_handle(settings).unwrap();
        Self { slabs, cache, values: BTreeMap::new(), removed: Vec::new(), sum: Arc::default(), next_key: 0 }
    }

    fn random_key(&self, random: &mut Random) -> Option<u64> {
        let from = random.below(self.next_key);
        self.values.range(from..).next().map(|(key, _)| *key)
    }

    fn insert(&mut self, count: u64, random: &mut Random) {
        for _ in 0..count {
            let number = random.below(1 << 40);
            let handle = self.cache.insert(Summed::new(number, &self.sum)).unwrap();
            assert_eq!(self.values.insert(self.next_key, (handle, number)), None);
            self.next_key += 1;
        }
    }

    fn remove(&mut self, count: u64, random: &mut Random) {
        for _ in 0..count {
            let Some(key) = self.random_key(random) else { return };
            let (handle, _) = self.values.remove(&key).unwrap();
            assert!(self.cache.remove(handle).unwrap().is_some());
            self.removed.push(handle);
        }
    }

    fn update(&mut self, random: &mut Random) {
        let (Some(key), number) = (self.random_key(random), random.below(1 << 40)) else { return };
        let word = self.values.get_mut(&key).unwrap();
        assert!(
            self.cache
                .update(word.0, |old| {
                    assert_eq!(old.words, [word.1; WORDS]);
                    Summed::new(number, &self.sum)
                })
                .unwrap()
        );
        word.1 = number;
    }

    /// Packs the cache twice: once while a value is pinned, which must not be moved, and once without pins.
    fn shrink(&mut self, random: &mut Random) {
        let pinned = self.random_key(random).map(|key| self.cache.pin(self.values[&key].0).unwrap().unwrap());
        let address = pinned.as_ref().map(|pinned| std::ptr::from_ref(&**pinned));
        self.cache.pack();
        assert_eq!(pinned.as_ref().map(|pinned| std::ptr::from_ref(&**pinned)), address);
        drop(pinned);
        self.cache.pack();
        let info = self.cache.info().unwrap();
        assert_eq!(info.active, self.values.len() as u64);
        assert!(info.nodes.iter().all(|node| node.partial <= 1), "{info:?}");
    }

    fn do_random_operation(&mut self, random: &mut Random) {
        match random.below(16) {
            0..5 => self.insert(random.below(400), random),
            5..9 => self.remove(random.below(400), random),
            9 => self.update(random),
            10 => self.shrink(random),
            11 => {
                let (from, to) = (random.below(NODES as u64) as usize, random.below(NODES as u64) as usize);
                self.cache.move_objects(from, to, random.below(500)).unwrap();
            }
            12 => _ = self.cache.balance().unwrap(),
            13 => self.cache.set_defrag_used_ratio(random.below(101) as u32).unwrap(),
            14 => _ = self.cache.defrag_step(Duration::from_micros(random.below(2_000))).unwrap(),
            _ => _ = self.slabs.shrink(u64::MAX, Urgency::Limit),
        }
    }

    fn check(&self) {
        let guard = enter();
        for (handle, number) in self.values.values() {
            assert_eq!(self.cache.get(*handle, &guard).unwrap().words, [*number; WORDS]);
        }
        assert!(self.removed.iter().all(|handle| self.cache.get(*handle, &guard).is_none()));
        self.cache.engine().check_state();
    }

    fn drop_and_check(self) {
        drop(self.cache);
        assert_eq!(self.sum.load(Relaxed), 0, "each value was dropped once");
    }
}

fn run_model<const WORDS: usize>(what: &str, use_huge: bool, debug: bool) {
    let nodes = Nodes::logical(NODES);
    let (slabs, account) = slabs_with(Layout { nodes, use_huge, ..Layout::for_test() }, UNLIMITED);
    let mut random = Random::seeded(what);
    let mut model = Model::<WORDS>::new(slabs, Settings::new(what).debug(debug));
    for step in 0..400 {
        model.do_random_operation(&mut random);
        if step % 8 == 0 {
            model.check();
        }
    }
    model.drop_and_check();
    slabs.shrink(u64::MAX, Urgency::Limit);
    assert_eq!(account.resident(), 0);
}

#[test]
fn model_holds_for_small_values_in_huge_blocks() {
    run_model::<5>("whole blocks", true, false);
}

#[test]
fn model_holds_for_medium_values_in_small_pages() {
    run_model::<100>("sparse blocks", false, false);
}

#[test]
fn model_holds_for_large_values() {
    run_model::<1500>("large values", true, false);
}

#[test]
fn model_holds_in_debug_mode() {
    run_model::<20>("watched", false, true);
}
