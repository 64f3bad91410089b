//! Writers at full speed with constant live memory. The size of their allocations changes with each phase. A phase
//! cannot reuse the memory that the previous phase freed, so that memory must be returned first.

use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Failure, WorkloadResult, check_status, ensure};
use crate::child;
use crate::native::TaggedAllocation;

/// Size of the allocations in each phase of a writer, in KiB.
const PHASE_SIZES_KIB: [usize; 8] = [100, 300, 8, 700, 1500, 40, 3072, 170];

crate::workload::arguments! {
    WritersArguments:
    /// Number of processes that write; the first process starts the others.
    #[arg(default_value_t = 1)]
    processes: usize,
    /// Number of writer threads in each process.
    threads: usize,
    /// Size of the live allocations of each process in MiB.
    mib: usize,
    run_ms: u64,
}

/// Counters of written bytes, failed allocations and wrong tags, shared by all writer threads of a process.
#[derive(Default)]
struct Counters {
    bytes: AtomicU64,
    refused: AtomicU64,
    wrong: AtomicU64,
}

/// Runs the writer threads until the time is over. The resulting JSON has the rate at which this process wrote memory,
/// and its number of failed allocations.
pub fn run(arguments: &WritersArguments) -> WorkloadResult {
    let siblings = (1..arguments.processes).map(|_| start_sibling(arguments)).collect::<Result<Vec<_>, _>>()?;
    let (start, counters) = (Instant::now(), Counters::default());
    let end = start + Duration::from_millis(arguments.run_ms);
    thread::scope(|scope| {
        for index in 0..arguments.threads {
            let counters = &counters;
            scope.spawn(move || run_writer(arguments, index, end, counters));
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    for mut sibling in siblings {
        let status = sibling.wait()?;
        check_status("a sibling", status)?;
    }
    ensure(counters.wrong.into_inner() == 0, || "memory lost a tag")?;
    let gib = counters.bytes.into_inner() as f64 / f64::from(1 << 30);
    Ok(serde_json::json!({ "gib_per_second": gib / seconds, "refused": counters.refused.into_inner() }))
}

fn start_sibling(arguments: &WritersArguments) -> Result<Child, Failure> {
    let numbers =
        [("--threads", arguments.threads as u64), ("--mib", arguments.mib as u64), ("--run-ms", arguments.run_ms)];
    let mut command = child::workload_command(child::command_words(&["__writers"], &numbers))?;
    Ok(command.stdout(Stdio::null()).spawn()?)
}

/// Runs one writer thread for at least one phase. In each phase, the thread fills its memory with allocations of one
/// size, checks their tags, and frees all of them.
fn run_writer(arguments: &WritersArguments, index: usize, end: Instant, counters: &Counters) {
    let bytes_per_writer = (arguments.mib << 20) / arguments.threads;
    for phase in index.. {
        let size = PHASE_SIZES_KIB[phase % PHASE_SIZES_KIB.len()] << 10;
        let mut held = Vec::with_capacity(bytes_per_writer / size);
        for tag in 0..(bytes_per_writer / size) as u64 {
            // The first phase is always completed, even if this thread got no CPU within the time.
            if phase > index && Instant::now() >= end {
                return;
            }
            match TaggedAllocation::filled(size, tag) {
                Some(piece) => held.push((tag, piece)),
                None => {
                    counters.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let wrong = held.iter().filter(|(tag, piece)| piece.tag() != *tag).count();
        counters.wrong.fetch_add(wrong as u64, Ordering::Relaxed);
        counters.bytes.fetch_add((held.len() * size) as u64, Ordering::Relaxed);
    }
}
