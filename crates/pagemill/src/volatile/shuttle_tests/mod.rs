//! Whole ranges under shuttle: users, purges and whoever needs memory, step by step in orders that nobody would think of.
//!
//! Loom goes into every order of a word's few steps, and into weak ones; here the orders of whole protocols are drawn at
//! random, over real memory. `SHUTTLE_RUNS` says how many of each model, `SHUTTLE_RANDOM_SEED` repeats some. A failure while
//! others are at something ends in an abort, so run them with `--nocapture`.
#![allow(unsafe_code)] // takes down what a run has made, looks at bytes

mod handles;
mod vranges;

use super::{Ranges, Vranges};
use crate::arena::{self, Arena, Budget, Context, Layout};
use crate::error::Result;
use crate::heap::Heap;
use crate::reclaim::helper::Helper;
use crate::reclaim::tree::UNLIMITED;
use crate::reclaim::{Account, Shrinker, Urgency};
use crate::stats::{self, Counter};
use crate::sync::modelled::{reset_clock, skip_ticks};
use crate::units::BLOCK_BYTES;
use pagemill_sys::mem;
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::OnceLock;

/// Bytes are written and checked at such distances. Steps of purges, and chunks, are multiples.
const PIECE: usize = BLOCK_BYTES / 32;

/// Preemptions that a schedule of PCT has.
const DEPTH: usize = 4;

/// No run is so long; one that is waits for something that never comes.
const MOST_STEPS: usize = 300_000;

/// A part of a run, for all of it.
struct Owned<T>(*mut T);

impl<T> Owned<T> {
    fn new(value: T) -> Self {
        Self(Box::into_raw(Box::new(value)))
    }

    fn get(&self) -> &'static T {
        // SAFETY: it lives until `end`, when the run is over and nobody has the reference any more.
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

/// A budget that is mostly not short, and purges where it is: wherever memory is asked for a purge may happen.
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

    fn lend(&self, _bytes: u64, _context: Context) -> Result<()> {
        self.press()
    }

    fn expect(&self, _bytes: u64) -> Result<()> {
        self.press()
    }

    fn settled(&self, _resident: i64, _settled: i64) {}

    fn room(&self) -> (u64, u64) {
        (0, u64::MAX)
    }
}

impl Fixture {
    /// Makes everything anew, so that a schedule that failed fails again, runs it and takes it down. After a failure it stays.
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

    /// One request to one of the owners.
    fn purge_once(&self) {
        let owners: [&dyn Shrinker; 3] = [self.heap, self.ranges, self.vranges];
        purge(owners[one_of(owners.len())], 1);
    }
}

/// So many requests, each for a little or for all.
fn purge(owner: &dyn Shrinker, requests: usize) {
    for _ in 0..requests {
        owner.shrink([1, PIECE as u64, u64::MAX][one_of(3)], Urgency::Limit);
    }
}

/// A byte of the program's memory.
fn byte_at(addr: usize) -> u8 {
    // SAFETY: tests ask for mapped memory that is no Rust object.
    unsafe { (addr as *const u8).read_volatile() }
}

fn set_byte(addr: usize, byte: u8) {
    // SAFETY: as above.
    unsafe { (addr as *mut u8).write_volatile(byte) }
}

fn one_of(count: usize) -> usize {
    thread_rng().gen_range(0..count)
}

/// Lets others go on, for some steps.
fn linger() {
    (0..one_of(4)).for_each(|_| shuttle::thread::yield_now());
}

/// Runs it in many orders: random ones, and such as have few preemptions.
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
    assert!(runs < 100 || stats::get(Counter::RangesAwaited) > awaited, "nobody met a purge");
}

/// Runs all of them at the same time.
fn together<const COUNT: usize>(acts: [Box<dyn FnOnce() + Send>; COUNT]) {
    let threads = acts.map(|act| shuttle::thread::spawn(act));
    for thread in threads {
        thread.join().unwrap();
    }
}
