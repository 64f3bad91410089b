//! Tests of faults: each step of a read or a writeback is cancelled, fails, is delayed, or panics.
//!
//! ```text
//!   store       a store whose transfers end as a test sets
//!   scene       a cache with a file on that store, and the checks after each fault
//!   driver      the calls that need pages: blocking, queue, future, readahead
//!   reserve     faults of Reserve: no memory, another request, panics
//!   reads       faults of Submit, Complete and Publish
//!   writes      the same for writes of whole pages, which read nothing
//!   wakers      panics of the program's code in the middle of other calls
//!   writeback   faults of Submit and Complete when dirty folios are written back
//! ```
//!
//! | step | cancelled | failed | delayed | panicked |
//! |---|---|---|---|---|
//! | Reserve | `reads_wait_for_other_requests` | `reads_fail_without_memory`, `reads_fail_when_dirty_pages..` | the tests of *cancelled* and *failed* | `panics_of_the_policy..`, `reads_fail_when_dirty_pages..` |
//! | Submit | `reads_fail_when_they_are_submitted` | as cancelled | `reads_complete_late..`: `StartBlocks` | as cancelled |
//! | Complete | `reads_complete_late..`: `Closed`, `Abandoned` | `reads_complete_late..` | `reads_complete_late..`: all events | `reads_complete_late..` |
//! | Publish | `reads_complete_late..`: `Overtaken`, `Replaced`, `Closed`; `a_closed_file_gets_no_pages` | `reads_fail_when_the_index..` | `reads_complete_late..`: `Truncated`, `Zeroed` | cannot panic: runs no code of the program |
//!
//! The tests in `reads` and `reserve` run their faults for each driver (`DRIVERS`) where possible; `why_impossible` has
//! the reasons for the exceptions.
//!
//! The cache starts no background threads here. For a fault during transfers, a test waits until the store has them. So
//! the outcome does not depend on time, except in the tests of timeouts.

mod driver;
mod reads;
mod reserve;
mod scene;
mod store;
mod wakers;
mod writeback;
mod writes;

use std::time::{Duration, Instant};

/// Upper bound of every wait in these tests.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Waits until `is_so` returns true. Panics after [`WAIT_LIMIT`].
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < WAIT_LIMIT, "{what} did not happen within 60 s");
        std::thread::sleep(Duration::from_micros(100));
    }
}
