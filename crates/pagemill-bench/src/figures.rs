//! Free memory that a process could return at once, as it publishes it.

use pagemill::published;

/// Bytes that the process could return now; none if it publishes nothing, as with allocators other than Pagemill.
///
/// `start_time` is field 22 of `/proc/PID/stat`. Together with the process id it identifies the process even if the id
/// is reused.
pub fn giveable_bytes(pid: u32, start_time: u64) -> Option<u64> {
    let (_, snapshot) = published::find(pid)?;
    (snapshot.identity.start_ticks == start_time).then(|| snapshot.giveable_bytes())
}
