//! Processes on a machine that another process fills: a server that retains much free memory and continues to allocate,
//! and a filler that allocates memory at a steady rate.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::{Failure, WorkloadResult, ensure};
use crate::histogram::Histogram;
use crate::native::TaggedAllocation;
use crate::proc;
use crate::signs::Signs;

const ALLOCATION_BYTES: usize = 1 << 20;

/// Name of the empty file that the server creates to signal that it has allocated its memory and freed most of it.
pub const READY_SIGN: &str = "ready";
/// Name of the empty file that the filler creates to signal that it has allocated all its memory, or was stopped.
pub const FILLED_SIGN: &str = "taken";
/// Name of the empty file that the bench creates to signal that available memory is low. From then on the server
/// records the times of malloc separately.
pub const NEARLY_FULL_SIGN: &str = "near";
/// Name of the empty file that the bench creates to signal that server and filler must end.
pub const STOP_SIGN: &str = "stop";

/// Number of live allocations that the server replaces one by one after it has freed most of its memory.
const LIVE_ALLOCATIONS: usize = 256;
/// Smallest size, in bytes, of the allocations that the server replaces, and the number of size ranges. Each range
/// begins at a power of two and ends below the next; all ranges are equally frequent.
const ALLOCATION_SIZES: (usize, u32) = (1 << 10, 10);

/// Number of allocations that the server replaces before it sleeps for a millisecond.
const BATCH_ALLOCATIONS: usize = 64;

crate::workload::arguments! {
    /// Arguments of the server, a process that holds much free memory and continues to allocate.
    ServerArguments:
    free_mib: usize,
    live_mib: usize,
    /// The folder of sign files, empty files by which the processes signal their progress.
    folder: PathBuf,
}

crate::workload::arguments! {
    /// Arguments of the filler, a process that allocates memory at a steady rate.
    FillerArguments:
    mib: usize,
    mib_per_second: u64,
    /// The filler stops before less than this many MiB are available on the machine.
    floor_mib: u64,
    /// The folder of sign files, empty files by which the processes signal their progress.
    folder: PathBuf,
}

/// Replaces allocations until the file [`STOP_SIGN`] exists. The resulting JSON has the latency of malloc before the
/// machine's available memory was low, and afterwards.
pub fn run_server(arguments: &ServerArguments) -> WorkloadResult {
    let signs = Signs::new(&arguments.folder);
    let mut held = fill_memory(arguments.live_mib + arguments.free_mib)?;
    // The allocations that stay live are spread among the freed ones, so the free memory is scattered.
    let every = held.len() / arguments.live_mib.max(1);
    let mut index = 0;
    held.retain(|_| {
        index += 1;
        index % every.max(1) == 0
    });
    signs.create(READY_SIGN)?;
    let (mut before, mut near) = (Box::new(Histogram::new()), Box::new(Histogram::new()));
    let mut work = ServerWork::new();
    let (mut is_near, mut is_over) = (false, false);
    while !is_over {
        // If the signs `NEARLY_FULL_SIGN` and `STOP_SIGN` both exist, the server times one more batch before it ends.
        is_over = signs.exists(STOP_SIGN);
        is_near = is_near || signs.exists(NEARLY_FULL_SIGN);
        let times = if is_near { &mut near } else { &mut before };
        (0..BATCH_ALLOCATIONS).for_each(|_| work.replace_one(times));
        thread::sleep(Duration::from_millis(1));
    }
    let is_right = held.iter().all(|(tag, piece)| piece.tag() == *tag);
    ensure(work.wrong == 0 && is_right, || "a block lost its tag")?;
    // If memory was never low, the percentiles of that phase are left out.
    let near_percentile = |value: f64| (near.count() > 0).then_some(value);
    Ok(serde_json::json!({
        "quiet_p999_ms": before.percentile_ms(0.999),
        "quiet_longest_ms": before.longest_ms(),
        "p50_ms": near_percentile(near.percentile_ms(0.5)),
        "p99_ms": near_percentile(near.percentile_ms(0.99)),
        "p999_ms": near_percentile(near.percentile_ms(0.999)),
        "longest_ms": near_percentile(near.longest_ms()),
        "mallocs": near.count(),
        "refused": work.refused,
    }))
}

fn fill_memory(mib: usize) -> Result<Vec<(u64, TaggedAllocation)>, Failure> {
    let pieces = (0..mib as u64).map(|tag| Some((tag, TaggedAllocation::touched(ALLOCATION_BYTES, tag)?)));
    pieces.collect::<Option<_>>().ok_or(Failure::Other("no memory to hold free later".to_owned()))
}

/// The allocations that the server replaces until it ends, and the counters of this work.
struct ServerWork {
    blocks: Vec<Option<(u64, TaggedAllocation)>>,
    random: Rng,
    count: u64,
    refused: u64,
    wrong: u64,
}

impl ServerWork {
    fn new() -> Self {
        let blocks = (0..LIVE_ALLOCATIONS).map(|_| None).collect();
        Self { blocks, random: Rng::with_seed(0x686f_7374), count: 0, refused: 0, wrong: 0 }
    }

    /// Frees one allocation and makes another instead. Adds the time of the malloc and of the touch of its first page
    /// to `times`.
    fn replace_one(&mut self, times: &mut Histogram) {
        let place = self.random.usize(..self.blocks.len());
        let old = self.blocks[place].take();
        self.wrong += u64::from(old.is_some_and(|(tag, block)| block.tag() != tag));
        let base = ALLOCATION_SIZES.0 << self.random.u32(..ALLOCATION_SIZES.1);
        let size = base + self.random.usize(..base);
        self.count += 1;
        let begun = Instant::now();
        let block = TaggedAllocation::new(size, self.count);
        times.add(begun.elapsed());
        self.refused += u64::from(block.is_none());
        self.blocks[place] = block.map(|block| (self.count, block));
    }
}

/// Allocates memory at the given rate, until it has the given amount or the machine's available memory is at the floor.
/// Then creates the file [`FILLED_SIGN`] and waits for the file [`STOP_SIGN`].
pub fn run_filler(arguments: &FillerArguments) -> WorkloadResult {
    // If the kernel has to kill a process, it should choose this one.
    std::fs::write("/proc/self/oom_score_adj", "1000")?;
    let signs = Signs::new(&arguments.folder);
    let mut held = Vec::with_capacity(arguments.mib);
    let (begun, mut is_stopped) = (Instant::now(), false);
    while held.len() < arguments.mib {
        let available = proc::available_bytes().ok_or("no /proc/meminfo")?;
        is_stopped = available < (arguments.floor_mib << 20) + ALLOCATION_BYTES as u64;
        if is_stopped || signs.exists(STOP_SIGN) {
            break;
        }
        let tag = held.len() as u64;
        held.push(TaggedAllocation::touched(ALLOCATION_BYTES, tag).ok_or("the C library refused memory")?);
        let due = Duration::from_micros(1_000_000 * held.len() as u64 / arguments.mib_per_second);
        thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    let seconds = begun.elapsed().as_secs_f64();
    signs.create(FILLED_SIGN)?;
    while !signs.exists(STOP_SIGN) {
        thread::sleep(Duration::from_millis(2));
    }
    let is_right = (0..).zip(&held).all(|(tag, piece)| piece.tag() == tag);
    ensure(is_right, || "the filler's memory lost a tag")?;
    let gib = held.len() as f64 / 1024.0;
    Ok(serde_json::json!({ "filler_gib_per_second": gib / seconds, "stopped": u8::from(is_stopped), "gib": gib }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files [`NEARLY_FULL_SIGN`] and [`STOP_SIGN`] are created as soon as a server with 8 MiB of free memory is
    /// ready. The server must still record the malloc times of one batch, and no allocation may be damaged.
    #[test]
    fn a_last_batch_is_timed_while_memory_is_low() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let signs = Signs::new(folder.path());
        let arguments = ServerArguments { free_mib: 8, live_mib: 2, folder: folder.path().to_owned() };
        let server = thread::spawn(move || run_server(&arguments));
        while !signs.exists(READY_SIGN) {
            thread::yield_now();
        }
        [NEARLY_FULL_SIGN, STOP_SIGN].into_iter().for_each(|sign| signs.create(sign).expect("given"));

        let line = server.join().expect("it ends").expect("all is right");

        assert!(line["mallocs"].as_u64().is_some_and(|count| count >= BATCH_ALLOCATIONS as u64), "{line}");
        assert_eq!(line["refused"], 0);
    }
}
