//! Whole ranges under shuttle: users, purges and memory requests, step by step in random orders.
//!
//! Loom explores every order of a word's few steps, including weak ones. Here the orders of whole protocols are drawn
//! at random, over real memory. `SHUTTLE_RUNS` sets the runs of each model, `SHUTTLE_RANDOM_SEED` repeats some. A
//! failure while other threads are inside an operation ends in an abort, so run them with `--nocapture`.
#![allow(unsafe_code)] // drops what a run has made, reads bytes

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

/// Bytes are written and checked at this distance. Steps of purges, and chunks, are multiples of it.
const PIECE: usize = BLOCK_BYTES / 32;

/// Preemptions in a PCT schedule.
const DEPTH: usize = 4;

/// Upper bound of a run's length; a longer run waits for something that never happens.
const MOST_STEPS: usize = 300_000;

/// A part of a run that lives as long as the run.
struct Owned<T>(*mut T);

impl<T> Owned<T> {
    fn new(value: T) -> Self {
        Self(Box::into_raw(Box::new(value)))
    }

    fn get(&self) -> &'static T {
        // SAFETY: it lives until `end`, when the run is over and no reference is left.
        unsafe { &*self.0 }
    }

    fn end(self) {
        // SAFETY: made by a box, ended once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Memory of one run, and its owners.
#[derive(Clone, Copy)]
struct Fixture {
    heap: &'static Heap,
    ranges: &'static Ranges,
    vranges: &'static Vranges,
}

/// A budget that is mostly not short and purges when it is: any request for memory may purge.
#[derive(Default)]
struct Tight {
    owners: OnceLock<Fixture>,
}

impl Tight {
    fn press(&self) -> Result<()> {
        if let Some(owners) = self.owners.get().filter(|_| one_of(6) == 0) {
            owners.purge_once();
        }
        Ok(())
    }
}

impl Budget for Tight {
    fn admit(&self, _bytes: u64, _context: Context) -> Result<()> {
        self.press()
    }

    fn discharge(&self, _bytes: u64) {}

    fn overcommit(&self, _bytes: u64, _context: Context) -> Result<()> {
        self.press()
    }

    fn reserve(&self, _bytes: u64) -> Result<()> {
        self.press()
    }

    fn reconciled(&self, _resident: i64, _reconciled: i64) {}

    fn room(&self) -> (u64, u64) {
        (0, u64::MAX)
    }
}

impl Fixture {
    /// Builds everything anew, so that a failed schedule fails again; runs it and drops it. After a failure it is
    /// leaked.
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
        let budget = Owned::new(Tight::default());
        let arena = Owned::new(Arena::new(layout, budget.get()).unwrap());
        let heap = Owned::new(Heap::new(arena.get(), account, helper).unwrap());
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
        // SAFETY: the reservation of the arena, which has ended.
        unsafe { mem::unreserve(addresses.start, addresses.len()) };
    }

    /// Sends one request to one of the owners.
    fn purge_once(&self) {
        let owners: [&dyn Shrinker; 3] = [self.heap, self.ranges, self.vranges];
        purge(owners[one_of(owners.len())], 1);
    }
}

/// Sends `requests` requests, each for a little or for everything.
fn purge(owner: &dyn Shrinker, requests: usize) {
    for _ in 0..requests {
        owner.shrink([1, PIECE as u64, u64::MAX][one_of(3)], Urgency::Limit);
    }
}

/// A byte of the program's memory.
fn byte_at(addr: usize) -> u8 {
    // SAFETY: tests pass mapped memory that is not a Rust object.
    unsafe { (addr as *const u8).read_volatile() }
}

fn set_byte(addr: usize, byte: u8) {
    // SAFETY: as above.
    unsafe { (addr as *mut u8).write_volatile(byte) }
}

fn one_of(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

/// Lets other threads run for some steps.
fn linger() {
    (0..one_of(4)).for_each(|_| shuttle::thread::yield_now());
}

/// Runs a model in many orders: random ones, and ones with few preemptions.
fn model(run: impl Fn(Fixture) + Clone + Send + Sync + 'static) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(2000, |runs| runs.parse().expect("SHUTTLE_RUNS is a number"));
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (BLOCK_BYTES / 8, MaxSteps::FailAfter(MOST_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        Fixture::run(&run);
    };
    let awaited = stats::get(Counter::RangesAwaited);
    Runner::new(RandomScheduler::new(runs), config()).run(begin.clone());
    Runner::new(PctScheduler::new(DEPTH, runs), config()).run(begin);
    assert!(runs < 100 || stats::get(Counter::RangesAwaited) > awaited, "no thread met a purge");
}

/// Runs all of them concurrently.
fn together<const COUNT: usize>(acts: [Box<dyn FnOnce() + Send>; COUNT]) {
    let threads = acts.map(|act| shuttle::thread::spawn(act));
    for thread in threads {
        thread.join().unwrap();
    }
}
