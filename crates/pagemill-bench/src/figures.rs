//! What a process could give back at once, as it publishes it.

use pagemill::published;

/// Bytes that the process would give back if asked now; none where it publishes nothing.
///
/// `start_time` is field 22 of `/proc/PID/stat`: with the number it names the process for good. Allocators
/// other than Pagemill publish nothing.
pub fn giveable_bytes(pid: u32, start_time: u64) -> Option<u64> {
    let (_, snapshot) = published::find(pid)?;
    (snapshot.who.start_ticks == start_time).then(|| snapshot.giveable_bytes())
}
