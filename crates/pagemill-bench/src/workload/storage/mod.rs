//! Transfers to and from a file with O_DIRECT, through Pagemill's page cache or by a bare io_uring.

pub mod buffers;
pub mod hits;
pub mod miss;
pub mod overwrite;
pub mod ring;
pub mod writeback;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagemill_store::FileStore;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value};

use super::Failure;
use crate::pattern::{self, RECORD_BYTES};
use crate::storage::{CPU, IOS, MIB, P50, P99, P999};

/// Arguments that describe the file, as [`crate::storage::target::Target`] passes them.
#[derive(Clone, Debug, clap::Args)]
pub struct Source {
    #[arg(long)]
    pub file: PathBuf,
    /// Length of the part of the file in use
    #[arg(long)]
    pub len_bytes: u64,
    /// The records of the file identify their offset
    #[arg(long)]
    pub pattern: bool,
}

impl Source {
    fn open_read_only(&self) -> Result<FileStore, Failure> {
        let store = FileStore::open_read_only(&self.file).map_err(super::hit::failed)?;
        check_direct(&store)?;
        Ok(store)
    }

    fn open_writable(&self) -> Result<FileStore, Failure> {
        let store = FileStore::open(&self.file).map_err(super::hit::failed)?;
        check_direct(&store)?;
        Ok(store)
    }

    /// Returns whether a record has the stamp of this offset. Always true if the file has no pattern.
    #[inline]
    fn is_right(&self, record: &[u8], offset: u64) -> bool {
        !self.pattern || pattern::is_stamped(record, 0, offset, 0)
    }

    /// Returns whether the first and the last record of a longer range have their stamps, like [`Self::is_right`].
    fn has_right_ends(&self, bytes: &[u8], offset: u64) -> bool {
        let last = bytes.len() - RECORD_BYTES;
        self.is_right(bytes, offset) && self.is_right(&bytes[last..], offset + last as u64)
    }
}

fn check_direct(store: &FileStore) -> Result<(), Failure> {
    if store.is_direct() { Ok(()) } else { Err("O_DIRECT is refused".to_owned().into()) }
}

/// Returns the CPU time of this process so far, user and system.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The start of an interval whose duration and CPU time are measured.
struct IntervalStart {
    begun: Instant,
    cpu: Duration,
}

/// Duration and CPU time of an interval.
struct Elapsed {
    seconds: f64,
    cpu_seconds: f64,
}

impl IntervalStart {
    fn begin() -> Self {
        Self { begun: Instant::now(), cpu: cpu_time() }
    }

    fn end(&self) -> Elapsed {
        let cpu = cpu_time().saturating_sub(self.cpu);
        Elapsed { seconds: self.begun.elapsed().as_secs_f64(), cpu_seconds: cpu.as_secs_f64() }
    }
}

impl Elapsed {
    /// Returns the rates and the CPU time per transfer, for `ios` transfers of `io_bytes` bytes.
    fn rates(&self, ios: u64, io_bytes: usize) -> Result<Map<String, Value>, Failure> {
        if ios == 0 {
            return Err("nothing was transferred in that time".to_owned().into());
        }
        let rate = ios as f64 / self.seconds;
        let mib = rate * io_bytes as f64 / f64::from(1 << 20);
        let metrics = [(IOS, rate), (MIB, mib), (CPU, self.cpu_seconds * 1e6 / ios as f64)];
        Ok(metrics.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect())
    }

    /// Returns the values of [`Self::rates`], and percentiles of the latencies `times`.
    fn metrics(&self, ios: u64, io_bytes: usize, times: &mut [u32]) -> Result<Map<String, Value>, Failure> {
        let mut metrics = self.rates(ios, io_bytes)?;
        for (name, share) in [(P50, 0.5), (P99, 0.99), (P999, 0.999)] {
            metrics.insert(name.to_owned(), percentile_us(times, share).into());
        }
        Ok(metrics)
    }
}

/// Returns the nanoseconds since a point in time, but at most some four seconds.
fn nanoseconds(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_nanos()).unwrap_or(u32::MAX)
}

/// Returns a percentile of the times in microseconds. `share` is the percentile as a fraction. The result is one of the
/// times.
fn percentile_us(times: &mut [u32], share: f64) -> f64 {
    let rank = (share * times.len() as f64).ceil() as usize;
    match times.len() {
        0 => 0.0,
        _ => f64::from(*times.select_nth_unstable(rank.max(1) - 1).1) / 1000.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The percentile must be one of the times.
    #[test]
    fn percentile_is_one_of_the_times() {
        let mut times: Vec<u32> = (1..=1000).rev().map(|us| us * 1000).collect();
        let found = [0.5, 0.99, 0.999, 1.0].map(|share| percentile_us(&mut times, share));
        assert_eq!(found, [500.0, 990.0, 999.0, 1000.0]);
        assert_eq!(percentile_us(&mut [], 0.5), 0.0);
    }
}
