//! Frees 1 GiB and requests that the allocator return it, while another thread allocates.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Failure, WorkloadResult, ensure};
use crate::native::{self, GiveBack, TaggedAllocation};
use crate::proc;
use crate::stats::mib;

/// Sizes in bytes that the second thread allocates one after the other. For the largest, an allocator may make a
/// separate mapping.
const SECOND_THREAD_SIZES: [usize; 4] = [64, 1024, 16 << 10, 96 << 10];

/// Time for which the second thread allocates before the return of memory is requested. The longest malloc in this time
/// shows the delays that the machine itself causes.
const QUIET_TIME: Duration = Duration::from_millis(100);

crate::workload::arguments! {
    GivebackArguments:
    mib: usize,
    piece: usize,
    how: GiveBack,
}

/// Allocates and touches memory, frees it, and requests that the allocator return it to the system. The resulting JSON
/// has the duration of the request, the resident memory before it, the returned memory, and the longest malloc of a
/// second thread.
pub fn run(arguments: &GivebackArguments) -> WorkloadResult {
    // The last allocation is kept, so that the freed memory does not end at the end of a heap. Such memory could simply
    // be trimmed.
    let last = fill_and_free(arguments)?;
    let longest_ns = AtomicU64::new(0);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let unrelated = scope.spawn(|| allocate_until_stopped(&longest_ns, &is_over));
        thread::sleep(QUIET_TIME);
        let quiet_ns = longest_ns.swap(0, Ordering::Relaxed);
        let held = resident_bytes()?;
        let begun = Instant::now();
        let asked = native::give_back(arguments.how);
        let took = begun.elapsed();
        let left = resident_bytes();
        is_over.store(true, Ordering::Relaxed);
        let is_right = unrelated.join().unwrap_or(false);
        drop(last);
        asked?;
        ensure(is_right, || "an unrelated block lost its tag")?;
        Ok(serde_json::json!({
            "ms": took.as_secs_f64() * 1e3,
            "held_mib": mib(held),
            "returned_mib": mib(held.saturating_sub(left?)),
            "longest_malloc_ms": longest_ns.load(Ordering::Relaxed) as f64 / 1e6,
            "longest_malloc_quiet_ms": quiet_ns as f64 / 1e6,
        }))
    })
}

/// Makes and touches all allocations, then frees all except the last one, which it returns.
fn fill_and_free(arguments: &GivebackArguments) -> Result<Option<TaggedAllocation>, Failure> {
    let count = (arguments.mib << 20) / arguments.piece;
    let mut held = Vec::with_capacity(count);
    for tag in 0..count as u64 {
        let piece = TaggedAllocation::touched(arguments.piece, tag);
        held.push(piece.ok_or("no memory to give back later")?);
    }
    ensure((0..).zip(&held).all(|(tag, piece)| piece.tag() == tag), || "a block lost its tag")?;
    Ok(held.pop())
}

/// Allocates and frees memory until `is_over` is set. Records the longest time of one allocation and free in
/// `longest_ns`. Returns whether every allocation kept its tag.
fn allocate_until_stopped(longest_ns: &AtomicU64, is_over: &AtomicBool) -> bool {
    let mut is_right = true;
    while !is_over.load(Ordering::Relaxed) {
        for size in SECOND_THREAD_SIZES {
            let begun = Instant::now();
            let block = TaggedAllocation::new(size, size as u64);
            is_right &= block.is_none_or(|block| block.tag() == size as u64);
            longest_ns.fetch_max(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
    }
    is_right
}

fn resident_bytes() -> Result<u64, Failure> {
    let own = proc::resident_memory(std::process::id());
    Ok(own.ok_or("no /proc/self/status")?.all)
}
