//! A million random calls on slab caches of each kind, while their objects are moved. `SLAB_OPERATIONS` sets the number
//! of calls. `PAGEMILL_TEST_SEED` repeats the calls, but not their order across threads. `pagemill-bench __slab
//! torture` runs the same workload.

#[path = "../../pagemill-bench/src/workload/slab/torture/mod.rs"]
mod torture;

use std::time::{Duration, Instant};
use torture::{TorturePlan, TortureResult};

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Makes random calls with two adjacent seeds, which select whole and sparse blocks, and then with further seeds until
/// `least_moved` objects have moved. Returns the number of moved objects. Only one of several threads moves objects, so
/// on a small machine that thread may rarely run.
fn torture(run: fn(TorturePlan) -> pagemill_core::Result<TortureResult>, least_moved: u64) -> u64 {
    let (began, mut moved) = (Instant::now(), 0);
    let first = env_number("PAGEMILL_TEST_SEED").unwrap_or_else(pagemill_sys::clock::fine_ns);
    let operations = env_number("SLAB_OPERATIONS").unwrap_or(1_000_000) / 2;
    for round in 0.. {
        if round >= 2 && moved >= least_moved {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(600), "only {moved} objects moved");
        let seed = first.wrapping_add(round);
        println!("PAGEMILL_TEST_SEED={seed}");
        let found = run(TorturePlan { operations, threads: 1, seed }).unwrap();
        println!("{found:?}");
        assert!(found.is_right() && found.inserted > operations / 10, "{found:?}");
        moved += found.moved;
    }
    moved
}

#[test]
fn threads_use_values_by_handle() {
    torture(torture::run_by_handle, 1_000);
}

#[test]
fn threads_use_items_of_an_owner() {
    torture(torture::run_by_owner, 1_000);
}

#[test]
fn threads_use_fixed_values() {
    assert_eq!(torture(torture::run_fixed, 0), 0);
}
