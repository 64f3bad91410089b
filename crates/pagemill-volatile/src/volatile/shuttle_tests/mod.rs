//! Shuttle tests of whole ranges: threads use, purge and allocate ranges in random interleavings.
//!
//! Loom tests run every interleaving of a state word's operations. The tests here run whole operations on real memory,
//! in random interleavings. `SHUTTLE_RUNS` sets the number of executions of each test, and `SHUTTLE_RANDOM_SEED`
//! repeats a sequence of executions. A failure may end in an abort, so run these tests with `--nocapture`.
#![allow(unsafe_code)] // drops the objects of an execution, reads bytes

mod handles;
mod vranges;

use super::{Ranges, Vranges};
use pagemill_core::arena::{self, Arena, Budget, Context, Layout};
use pagemill_core::error::Result;
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Account, Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::modelled::{reset_clock, skip_ticks};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_heap::Heap;
use pagemill_sys::mem;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::OnceLock;

/// Tests write and check one byte in each piece of this length. Purge steps and chunks are multiples of this length.
const PIECE_BYTES: usize = BLOCK_BYTES / 32;

/// Depth of the PCT scheduler: a schedule changes the priorities of threads at most `PCT_DEPTH - 1` times.
const PCT_DEPTH: usize = 4;

/// Maximum number of steps of one execution of a test. A longer execution waits for an event that never happens.
const MAX_STEPS: usize = 300_000;

/// An object with a `'static` reference that is dropped at the end of an execution of a test.
struct Owned<T>(*mut T);

impl<T> Owned<T> {
    fn new(value: T) -> Self {
        Self(Box::into_raw(Box::new(value)))
    }

    fn get(&self) -> &'static T {
        // SAFETY: the object exists until `end`, which is called when no reference is left.
        unsafe { &*self.0 }
    }

    fn end(self) {
        // SAFETY: the pointer is from `Box::into_raw`, and `end` consumes it.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// The shrinkers of one execution of a test.
#[derive(Clone, Copy)]
struct Fixture {
    heap: &'static Heap,
    ranges: &'static Ranges,
    vranges: &'static Vranges,
}

/// A budget that grants all requests. One in six requests also purges, as under pressure.
#[derive(Default)]
struct PurgingBudget {
    owners: OnceLock<Fixture>,
}

impl PurgingBudget {
    fn maybe_purge(&self) -> Result<()> {
        if let Some(owners) = self.owners.get().filter(|_| random_below(6) == 0) {
            owners.purge_once();
        }
        Ok(())
    }
}

impl Budget for PurgingBudget {
    fn admit(&self, _bytes: u64, _context: Context) -> Result<()> {
        self.maybe_purge()
    }

    fn discharge(&self, _bytes: u64) {}

    fn overcommit(&self, _bytes: u64, _context: Context) -> Result<()> {
        self.maybe_purge()
    }

    fn reserve(&self, _bytes: u64) -> Result<()> {
        self.maybe_purge()
    }

    fn reconciled(&self, _resident: i64, _reconciled: i64) {}

    fn room(&self) -> (u64, u64) {
        (0, u64::MAX)
    }
}

impl Fixture {
    /// Creates an arena, a heap and the ranges, calls `run`, and drops these objects. Each execution of a test starts
    /// with new objects, so that a failed schedule can be repeated.
    fn run(run: impl Fn(Self)) {
        static ACCOUNT: OnceLock<(&'static Account, &'static Helper)> = OnceLock::new();
        let (account, helper) = ACCOUNT.get_or_init(|| {
            let account = Account::make(UNLIMITED).unwrap();
            (account, arena::place(Helper::new(account)).unwrap())
        });
        let layout = Layout {
            small_bytes: BLOCK_BYTES,
            heap_bytes: 256 * BLOCK_BYTES,
            pool_bytes: 0,
            use_huge: false,
            ..Layout::for_test()
        };
        let budget = Owned::new(PurgingBudget::default());
        let arena = Owned::new(Arena::new(layout, budget.get()).unwrap());
        // SAFETY: the arena gets no other heap.
        let heap = Owned::new(unsafe { Heap::new(arena.get(), account, helper) }.unwrap());
        let ranges = Owned::new(Ranges::new(arena.get(), heap.get()).unwrap());
        let vranges = Owned::new(Vranges::new(arena.get(), account));
        let fixture = Self { heap: heap.get(), ranges: ranges.get(), vranges: vranges.get() };
        assert!(budget.get().owners.set(fixture).is_ok());
        run(fixture);
        let addresses = arena.get().addresses();
        vranges.end();
        ranges.end();
        heap.end();
        arena.end();
        budget.end();
        // SAFETY: this is the reservation of the arena, which was dropped.
        unsafe { mem::unreserve(addresses.start, addresses.len()) };
    }

    /// Sends one purge request to a random shrinker of the fixture.
    fn purge_once(&self) {
        let owners: [&dyn Shrinker; 3] = [self.heap, self.ranges, self.vranges];
        purge(owners[random_below(owners.len())], 1);
    }
}

/// Sends `requests` purge requests to a shrinker, each for one byte, one piece or everything.
fn purge(owner: &dyn Shrinker, requests: usize) {
    for _ in 0..requests {
        owner.shrink([1, PIECE_BYTES as u64, u64::MAX][random_below(3)], Urgency::Limit);
    }
}

/// Reads a byte of memory.
fn byte_at(addr: usize) -> u8 {
    // SAFETY: tests pass mapped memory that is not a Rust object.
    unsafe { (addr as *const u8).read_volatile() }
}

fn set_byte(addr: usize, byte: u8) {
    // SAFETY: as above.
    unsafe { (addr as *mut u8).write_volatile(byte) }
}

fn random_below(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

/// Yields a random number of times, so that other threads run.
fn yield_randomly() {
    (0..random_below(4)).for_each(|_| shuttle::thread::yield_now());
}

/// Executes a test with many schedules: random schedules, and schedules with few preemptions (PCT).
fn run_in_many_schedules(run: impl Fn(Fixture) + Clone + Send + Sync + 'static) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(2000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (BLOCK_BYTES / 8, MaxSteps::FailAfter(MAX_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        Fixture::run(&run);
    };
    let awaited = stats::get(Counter::RangesAwaited);
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(PCT_DEPTH, runs), config()).run(begin);
    assert!(runs < 100 || stats::get(Counter::RangesAwaited) > awaited, "no thread met a purge");
}

/// Runs all functions concurrently, each on a thread of its own.
fn run_concurrently<const COUNT: usize>(acts: [Box<dyn FnOnce() + Send>; COUNT]) {
    let threads = acts.map(|act| shuttle::thread::spawn(act));
    for thread in threads {
        thread.join().unwrap();
    }
}
