//! What comes and goes turn by turn, and is walked after each, alone or beside a thread that packs it.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use pagemill::slab::Slabs;

use crate::workload::Failure;

/// Steps as a thread in the background makes them: so long, with such pauses.
pub const STEP: Duration = Duration::from_millis(1);
pub const PAUSE: Duration = Duration::from_millis(10);

/// How often, for how long, and beside what.
#[derive(Clone, Debug, clap::Args)]
pub struct Turns {
    /// How often as much comes and goes as there is.
    #[arg(long)]
    pub turns: usize,
    /// For how long it is walked after each.
    #[arg(long)]
    pub turn_ms: u64,
    /// A thread in the background packs what is not full.
    #[arg(long)]
    pub moving: bool,
}

impl Turns {
    /// Makes `turn` again and again, which gets the time that it has.
    pub fn run(
        &self,
        slabs: &'static Slabs,
        mut turn: impl FnMut(Duration) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let time = Duration::from_millis(self.turn_ms);
        let rest = |_| PAUSE;
        beside_steps(self.moving.then_some(slabs), rest, || (0..self.turns).try_for_each(|_| turn(time)))
    }
}

/// Does something, where slabs are given beside a thread that packs what is not full in them, and rests after each step as long as
/// `rest` makes of the time that it took.
pub fn beside_steps<T>(
    slabs: Option<&'static Slabs>,
    rest: impl Fn(Duration) -> Duration + Sync,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let steps = |slabs: &Slabs| {
            let mut has_moved = false;
            loop {
                let begun = Instant::now();
                let progress = slabs.defrag_step(STEP);
                has_moved |= progress.moved > 0;
                // The work may have ended before this thread had a processor.
                if is_over.load(Relaxed) && (has_moved || progress.is_done) {
                    return;
                }
                thread::sleep(rest(begun.elapsed()));
            }
        };
        let mover = slabs.map(|slabs| scope.spawn(move || steps(slabs)));
        let result = work();
        is_over.store(true, Relaxed);
        match mover.map(thread::ScopedJoinHandle::join) {
            Some(Err(_)) => Err("a thread panicked".to_owned().into()),
            _ => result,
        }
    })
}

/// Walks for so long, once at least, each time by `walk`, which says of how many entries; adds nanoseconds an entry of each walk.
pub fn walk_for(
    time: Duration,
    walks: &mut Vec<f64>,
    mut walk: impl FnMut() -> Result<u64, Failure>,
) -> Result<(), Failure> {
    let begun = Instant::now();
    loop {
        let one = Instant::now();
        let entries = walk()?;
        walks.push(one.elapsed().as_nanos() as f64 / entries as f64);
        if begun.elapsed() >= time {
            return Ok(());
        }
    }
}
