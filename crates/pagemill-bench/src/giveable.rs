//! Reads the amount of free memory that a running process publishes in its figures file.

use pagemill_core::published;

/// Returns the free bytes that the process could return at once. Returns none if the process publishes no statistics,
/// for example because it runs under another allocator than Pagemill.
///
/// `start_time` is field 22 of `/proc/PID/stat`. Process id and start time together identify the process even if the
/// kernel has reused the id.
pub fn giveable_bytes(pid: u32, start_time: u64) -> Option<u64> {
    let (_, snapshot) = published::find(pid)?;
    (snapshot.identity.start_ticks == start_time).then(|| snapshot.giveable_bytes())
}
