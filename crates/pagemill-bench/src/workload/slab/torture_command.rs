//! The hidden subcommand that runs [`super::torture`]: random operations on slab caches.

use super::torture::{self, TorturePlan, TortureResult};
use crate::workload::{WorkloadResult, ensure};
use serde_json::json;
use std::time::Instant;

crate::workload::arguments! {
    /// Make random operations on slab caches of all kinds and several object sizes, while their objects are moved.
    TortureArguments:
    /// Number of operations for each kind of cache.
    #[arg(default_value_t = 100_000_000)]
    operations: u64,
    /// Number of threads that operate on the cache of each of the five object sizes.
    #[arg(default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    threads: u64,
    /// Seed; an even seed uses huge pages for the slabs' blocks, an odd seed does not. Default: the current time.
    seed: Option<u64>,
}

/// Runs the random operations on each kind of slab cache. Returns [`Failure::WrongAnswer`](crate::workload::Failure::WrongAnswer) if a check failed.
pub fn run(arguments: &TortureArguments) -> WorkloadResult {
    let seed = arguments.seed.unwrap_or_else(pagemill_sys::clock::fine_ns);
    eprintln!("seed {seed}");
    let plan = TorturePlan { operations: arguments.operations, threads: arguments.threads, seed };
    type Run = fn(TorturePlan) -> pagemill_core::Result<TortureResult>;
    let kinds: [(&str, Run); 3] =
        [("by_handle", torture::run_by_handle), ("by_owner", torture::run_by_owner), ("fixed", torture::run_fixed)];
    let mut line = json!({ "seed": seed });
    for (kind, run) in kinds {
        let began = Instant::now();
        let found = run(plan)?;
        let said = json!({
            "operations": found.operations,
            "inserted": found.inserted,
            "moved": found.moved,
            "emptied": found.emptied,
            "corrupted": found.corrupted,
            "lost": found.lost,
            "dropped_twice": found.dropped_twice,
            "seconds": began.elapsed().as_secs_f64(),
        });
        eprintln!("{kind} {said}");
        ensure(found.is_right(), || format!("{kind}, seed {seed}: {said}"))?;
        line[kind] = said;
    }
    Ok(line)
}
