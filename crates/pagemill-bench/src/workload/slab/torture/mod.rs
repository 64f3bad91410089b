//! Random operations on slab caches by many threads, while another thread moves their objects. No object may be torn,
//! lost, duplicated or dropped twice.
//!
//! The words of an object follow from its *stamp*: the number of the thread that inserted it, a serial number, and the
//! number of its changes. A thread knows the stamps of its own objects. It checks all words of an object whenever it
//! reads, changes or removes the object. Threads exchange objects through a *pool*. The *board* contains objects that
//! all threads use.

mod by_handle;
mod by_owner;
mod fixed;
mod stamped;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use fastrand::Rng;
use pagemill_core::Result;
use pagemill_core::arena::Layout;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_slab::{SlabCache, SlabInfo, Slabs};
use pagemill_testbed::Testbed;

use stamped::{Counters, Stamp};

/// Number of logical NUMA nodes in a torture run, over which the objects of the caches are spread.
const NUMA_NODE_COUNT: usize = 3;

/// Upper bound of the number of objects that a thread aims to have in its cache.
const MAX_TARGET_OBJECTS: u64 = 1_500;

/// Number of operations after which a thread chooses a new target at random for the number of its objects.
const OPERATIONS_PER_TARGET: u64 = 10_000;

/// The largest number of objects that a thread has pinned at a time.
const MAX_PINNED_PER_THREAD: usize = 4;

/// Number of objects on the board of a cache, that is, of objects that all threads use.
const BOARD_OBJECTS: u64 = 64;

/// The number of operations and threads of a torture run, and its random seed.
#[derive(Clone, Copy, Debug)]
pub struct TorturePlan {
    /// Number of operations of all threads together, for one kind of cache.
    pub operations: u64,
    /// Number of threads that operate on the cache of each of the five object sizes.
    pub threads: u64,
    pub seed: u64,
}

/// The number of operations that a torture run made, and the errors that it found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TortureResult {
    pub operations: u64,
    pub inserted: u64,
    /// Number of moves of objects by defragmentation.
    pub moved: u64,
    /// Number of slabs that defragmentation emptied.
    pub emptied: u64,
    /// Number of objects with wrong contents.
    pub corrupted: u64,
    /// Number of objects that were missing, plus the number of objects that were never dropped.
    pub lost: u64,
    pub dropped_twice: u64,
}

impl TortureResult {
    pub fn is_right(&self) -> bool {
        self.corrupted == 0 && self.lost == 0 && self.dropped_twice == 0
    }

    fn add(&mut self, part: Self) {
        self.operations += part.operations;
        self.inserted += part.inserted;
        self.moved += part.moved;
        self.emptied += part.emptied;
        self.corrupted += part.corrupted;
        self.lost += part.lost;
        self.dropped_twice += part.dropped_twice;
    }
}

/// The result of an attempt to remove an object from a cache.
enum RemoveOutcome<K> {
    /// The object was removed.
    Gone,
    /// Another thread uses the object, so the object still exists. The key is returned.
    Busy(K),
    /// There was no object with this key, or it had wrong contents.
    Missing,
}

/// A slab cache under test, of one kind and object size, with the operations that threads make on it.
trait Subject: Sync + Sized + 'static {
    /// The reference by which a thread finds an object.
    type Key: Send;
    /// An object that is pinned, so that it cannot be moved.
    type Pin<'a>
    where
        Self: 'a;

    fn new(slabs: &'static Slabs, counters: &'static Counters) -> Result<Self>;
    fn insert(&self, stamp: Stamp, node: Option<usize>) -> Result<Self::Key>;
    /// Returns whether the object exists and has the contents of its stamp.
    fn is_intact(&self, key: &Self::Key, stamp: Stamp) -> bool;
    /// Changes an object from the contents of the stamp `old` to those of `new`. Returns `None` if the object may not
    /// be changed now; otherwise returns whether the object existed and was intact.
    fn update(&self, key: &mut Self::Key, old: Stamp, new: Stamp) -> Option<bool>;
    fn remove(&self, key: Self::Key, stamp: Stamp) -> RemoveOutcome<Self::Key>;
    fn pin(&self, key: &Self::Key) -> Option<Self::Pin<'_>>;
    /// Ends a pin. Returns whether the pinned object has the contents of its stamp.
    fn unpin(&self, held: Self::Pin<'_>, stamp: Stamp) -> bool;
    /// Returns the address of an object; 0 if the object does not exist.
    fn address(&self, key: &Self::Key) -> usize;
    /// Uses object `at` of the board, the objects that all threads use. Returns whether the object was intact.
    fn use_board_object(&self, at: u64, random: &mut Rng) -> bool;
    /// Moves some objects of the cache, or changes the settings that determine when its objects are moved.
    fn move_some_objects(&self, random: &mut Rng);
    fn info(&self) -> SlabInfo;
    /// Checks the objects of the board, then drops the cache with all its objects, which include those in `left`.
    /// Returns the number of wrong objects.
    fn check_and_drop(self, left: Vec<(Self::Key, Stamp)>) -> u64;
}

/// A slab cache under test, with counters, and with the pool through which threads exchange objects.
struct TestedCache<S: Subject> {
    subject: S,
    pool: Mutex<Vec<(S::Key, Stamp)>>,
    counters: &'static Counters,
    inserted: AtomicU64,
    removed: AtomicU64,
}

/// The state of one thread that makes random operations on one cache.
struct CacheUser<'a, S: Subject> {
    cache: &'a TestedCache<S>,
    random: Rng,
    /// Index of the thread, from 1, which is part of the stamps of its objects.
    number: u64,
    /// Number of objects that the thread has inserted. It is also the serial number of the next object.
    inserted: u64,
    /// Number of objects that the thread should have. Random insertions and removals approach this number.
    target_objects: u64,
    own: Vec<(S::Key, Stamp)>,
    held: Vec<(S::Pin<'a>, Stamp)>,
}

impl<S: Subject> TestedCache<S> {
    fn new(subject: S, counters: &'static Counters) -> Self {
        Self {
            subject,
            pool: Mutex::new(Vec::new()),
            counters,
            inserted: AtomicU64::new(0),
            removed: AtomicU64::new(0),
        }
    }

    /// Counts a corrupted object if `is_right` is false.
    fn count_unless_right(&self, is_right: bool) {
        self.counters.corrupted.fetch_add(u64::from(!is_right), Relaxed);
    }
}

impl<S: Subject> CacheUser<'_, S> {
    fn do_random_operation(&mut self) {
        let is_low = (self.own.len() as u64) < self.target_objects;
        match self.random.u64(..16) {
            0..4 if is_low => self.insert(),
            0..4 => self.remove(),
            4 => self.insert(),
            5 => self.remove(),
            6..11 => self.read(),
            11 => self.update(),
            12 => self.pin(),
            13 => self.exchange_with_pool(),
            _ => {
                let at = self.random.u64(..BOARD_OBJECTS);
                self.cache.count_unless_right(self.cache.subject.use_board_object(at, &mut self.random));
            }
        }
    }

    fn random_index(&mut self) -> Option<usize> {
        (!self.own.is_empty()).then(|| self.random.usize(..self.own.len()))
    }

    fn insert(&mut self) {
        let stamp = Stamp::new(self.number, self.inserted);
        let node = (self.random.u64(..8) == 0).then(|| self.random.usize(..NUMA_NODE_COUNT));
        match self.cache.subject.insert(stamp, node) {
            Ok(key) => {
                self.inserted += 1;
                self.own.push((key, stamp));
            }
            Err(error) => panic!("an object that was not to be had, without any limit: {error}"),
        }
    }

    fn remove(&mut self) {
        let Some(at) = self.random_index() else { return };
        let (key, stamp) = self.own.swap_remove(at);
        match self.cache.subject.remove(key, stamp) {
            RemoveOutcome::Gone => _ = self.cache.removed.fetch_add(1, Relaxed),
            RemoveOutcome::Busy(key) => self.own.push((key, stamp)),
            RemoveOutcome::Missing => self.cache.count_unless_right(false),
        }
    }

    fn read(&mut self) {
        let Some(at) = self.random_index() else { return };
        let (key, stamp) = &self.own[at];
        self.cache.count_unless_right(self.cache.subject.is_intact(key, *stamp));
    }

    fn update(&mut self) {
        let Some(at) = self.random_index() else { return };
        let (key, stamp) = &mut self.own[at];
        let new = stamp.next();
        if let Some(is_right) = self.cache.subject.update(key, *stamp, new) {
            *stamp = new;
            self.cache.count_unless_right(is_right);
        }
    }

    fn pin(&mut self) {
        if self.held.len() == MAX_PINNED_PER_THREAD {
            let at = self.random.usize(..MAX_PINNED_PER_THREAD);
            let (held, stamp) = self.held.swap_remove(at);
            self.cache.count_unless_right(self.cache.subject.unpin(held, stamp));
        }
        let Some(at) = self.random_index() else { return };
        let (key, stamp) = &self.own[at];
        self.held.extend(self.cache.subject.pin(key).map(|held| (held, *stamp)));
    }

    /// Moves one of this thread's objects to the pool, and takes another object from the pool.
    fn exchange_with_pool(&mut self) {
        let given = self.random_index().map(|at| self.own.swap_remove(at));
        let mut pool = self.cache.pool.lock().expect("the lock is not poisoned");
        let at = self.random.usize(..pool.len().max(1));
        let taken = (pool.len() > 32).then(|| pool.swap_remove(at));
        pool.extend(given);
        drop(pool);
        self.own.extend(taken);
    }

    fn finish(mut self) {
        for (held, stamp) in std::mem::take(&mut self.held) {
            self.cache.count_unless_right(self.cache.subject.unpin(held, stamp));
        }
        self.cache.inserted.fetch_add(self.inserted, Relaxed);
        self.cache.pool.lock().expect("the lock is not poisoned").append(&mut self.own);
    }
}

/// A slab cache under test with objects of any size, for use as a trait object.
trait AnyTestedCache: Sync {
    fn run_operations(&self, plan: TorturePlan, number: u64, operations: u64);
    fn move_some_objects(&self, random: &mut Rng);
    /// Checks that each object exists exactly once, and drops the cache. Called after all threads have ended.
    fn check_and_drop(self: Box<Self>, operations: u64) -> TortureResult;
}

impl<S: Subject> AnyTestedCache for TestedCache<S> {
    fn run_operations(&self, plan: TorturePlan, number: u64, operations: u64) {
        let random = Rng::with_seed(plan.seed ^ number << 48);
        let (own, held) = (Vec::new(), Vec::new());
        let mut user = CacheUser { cache: self, random, number, inserted: 0, target_objects: 0, own, held };
        for operation in 0..operations {
            if operation % OPERATIONS_PER_TARGET == 0 {
                user.target_objects = user.random.u64(..MAX_TARGET_OBJECTS);
            }
            user.do_random_operation();
        }
        user.finish();
    }

    fn move_some_objects(&self, random: &mut Rng) {
        self.subject.move_some_objects(random);
    }

    fn check_and_drop(self: Box<Self>, operations: u64) -> TortureResult {
        let cache = *self;
        let left = cache.pool.into_inner().unwrap_or_default();
        let present = cache.inserted.load(Relaxed) - cache.removed.load(Relaxed);
        let mut places: Vec<usize> = left.iter().map(|(key, _)| cache.subject.address(key)).collect();
        places.sort_unstable();
        let doubled = places.windows(2).filter(|pair| pair[0] == pair[1]).count() as u64;
        let info = cache.subject.info();
        let torn = left.iter().filter(|(key, stamp)| !cache.subject.is_intact(key, *stamp)).count() as u64;
        let there = left.len() as u64;
        let wrong = cache.subject.check_and_drop(left);
        let (created, dropped) = (cache.counters.created.load(Relaxed), cache.counters.dropped.load(Relaxed));
        TortureResult {
            operations,
            inserted: cache.inserted.load(Relaxed),
            moved: info.moved,
            emptied: info.emptied,
            corrupted: cache.counters.corrupted.load(Relaxed) + doubled + torn + wrong,
            lost: present.abs_diff(there) + created.saturating_sub(dropped),
            dropped_twice: cache.counters.dropped_twice.load(Relaxed) + dropped.saturating_sub(created),
        }
    }
}

type TestedCaches = Vec<Box<dyn AnyTestedCache>>;

fn make_tested_cache<S: Subject>(slabs: &'static Slabs) -> Result<Box<dyn AnyTestedCache>> {
    let counters = Counters::new();
    Ok(Box::new(TestedCache::new(S::new(slabs, counters)?, counters)))
}

/// Makes caches of five object sizes on logical NUMA nodes, and runs the random operations on them. The seed decides
/// whether blocks are in huge pages.
fn run_all<A: Subject, B: Subject, C: Subject, D: Subject, E: Subject>(plan: TorturePlan) -> Result<TortureResult> {
    let layout =
        Layout { nodes: Nodes::logical(NUMA_NODE_COUNT), use_huge: plan.seed.is_multiple_of(2), ..Layout::for_test() };
    let slabs = Testbed::new(layout, UNLIMITED)?.slabs;
    let caches = [
        make_tested_cache::<A>,
        make_tested_cache::<B>,
        make_tested_cache::<C>,
        make_tested_cache::<D>,
        make_tested_cache::<E>,
    ]
    .into_iter()
    .map(|cache| cache(slabs));
    Ok(run_caches(slabs, plan, caches.collect::<Result<_>>()?))
}

fn run_caches(slabs: &'static Slabs, plan: TorturePlan, caches: TestedCaches) -> TortureResult {
    let each = plan.operations.div_ceil(caches.len() as u64 * plan.threads);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let users: Vec<_> = (1..=plan.threads)
            .flat_map(|thread| caches.iter().map(move |cache| (thread, cache)))
            .map(|(thread, cache)| scope.spawn(move || cache.run_operations(plan, thread, each)))
            .collect();
        let (is_done, caches) = (&is_done, &caches);
        let mover = scope.spawn(move || {
            let mut random = Rng::with_seed(plan.seed);
            while !is_done.load(Relaxed) {
                run_random_slab_operation(slabs, caches, &mut random);
            }
        });
        let ended: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        is_done.store(true, Relaxed);
        mover.join().expect("the mover does not panic");
        ended.into_iter().for_each(|user| user.expect("no user panics"));
    });
    // From here on no object may be moved, so that the counts stay the same. Until now, the background thread also
    // moved objects.
    slabs.defrag_by_hand();
    let mut found = TortureResult::default();
    caches.into_iter().for_each(|cache| found.add(cache.check_and_drop(each * plan.threads)));
    found
}

fn run_random_slab_operation(slabs: &'static Slabs, caches: &TestedCaches, random: &mut Rng) {
    match random.u64(..16) {
        0 => _ = slabs.shrink(u64::MAX, Urgency::Limit),
        1 => _ = slabs.shrink(random.u64(..1 << 24), Urgency::Request),
        2 => _ = slabs.defrag_step(Duration::from_micros(random.u64(..2_000))),
        3..6 => std::thread::sleep(Duration::from_micros(random.u64(..2_000))),
        6 => _ = slabs.list(),
        _ => caches[random.usize(..caches.len())].move_some_objects(random),
    }
}

/// Moves some objects of a cache whose objects can be moved, or changes its defragmentation threshold.
fn move_some_objects_of(cache: &impl SlabCache, random: &mut Rng) {
    let (from, to) = (random.usize(..NUMA_NODE_COUNT), random.usize(..NUMA_NODE_COUNT));
    match random.u64(..5) {
        0 => _ = cache.shrink(),
        1 => _ = cache.defrag_step(Duration::from_micros(random.u64(..2_000))),
        2 => _ = cache.move_objects(from, to, random.u64(..500)),
        3 => _ = cache.balance(),
        _ => cache.set_defrag_used_ratio(random.u32(..101)).expect("a ratio"),
    }
}

/// Runs the random operations on caches of values that are accessed by handle: threads read values under guards,
/// replace them, and pin them.
///
/// # Errors
///
/// The error with which the caches could not be made.
pub fn run_by_handle(plan: TorturePlan) -> Result<TortureResult> {
    use by_handle::HandleCache;
    run_all::<HandleCache<6>, HandleCache<22>, HandleCache<70>, HandleCache<254>, HandleCache<510>>(plan)
}

/// Runs the random operations on caches of objects that their owner moves. The owner refuses some moves as busy and
/// lets others fail.
///
/// # Errors
///
/// The error with which the caches could not be made.
pub fn run_by_owner(plan: TorturePlan) -> Result<TortureResult> {
    use by_owner::OwnerCache;
    run_all::<OwnerCache<7>, OwnerCache<23>, OwnerCache<71>, OwnerCache<255>, OwnerCache<511>>(plan)
}

/// Runs the random operations on caches whose values do not move.
///
/// # Errors
///
/// The error with which the caches could not be made.
pub fn run_fixed(plan: TorturePlan) -> Result<TortureResult> {
    use fixed::FixedCache;
    run_all::<FixedCache<7>, FixedCache<23>, FixedCache<71>, FixedCache<255>, FixedCache<511>>(plan)
}
