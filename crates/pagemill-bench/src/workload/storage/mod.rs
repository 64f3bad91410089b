//! Transfers to and from a file with O_DIRECT, through Pagemill's page cache or by a bare io_uring.

pub mod buffers;
pub mod hits;
pub mod miss;
pub mod overwrite;
pub mod ring;
pub mod stream;
pub mod writeback;

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagemill_store::FileStore;
use rustix::fs::{Advice, fadvise};
use serde_json::{Map, Value};

use super::Failure;
use crate::histogram::Histogram;
use crate::native;
use crate::pattern::{self, RECORD_BYTES};
use crate::storage::{CPU, IOS, MIB, P50, P99, P999};

crate::workload::arguments! {
    /// Arguments that describe the file to read or write, as [`crate::storage::target::Target`] passes them.
    Source:
    file: PathBuf,
    /// Number of bytes at the start of the file that are used
    len_bytes: u64,
    /// Each record of the file has a stamp of its offset, which reads check
    pattern: bool,
}

impl Source {
    pub fn open_read_only(&self) -> Result<FileStore, Failure> {
        FileStore::open_read_only(&self.file).map_err(Failure::from).and_then(check_direct)
    }

    fn open_writable(&self) -> Result<FileStore, Failure> {
        FileStore::open(&self.file).map_err(Failure::from).and_then(check_direct)
    }

    /// Drops the file's pages from the kernel's page cache, so that all subjects start without them.
    pub fn drop_kernel_pages(&self) -> Result<(), Failure> {
        let file = File::open(&self.file)?;
        file.sync_all()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
        Ok(())
    }

    /// Returns whether a record has the stamp of this offset. Always true if the file has no stamps (`pattern`).
    #[inline]
    pub fn is_right(&self, record: &[u8], offset: u64) -> bool {
        !self.pattern || pattern::is_stamped(record, 0, offset, 0)
    }

    /// Returns whether the first and the last record in `bytes` have the stamps of their offsets. Always true if the
    /// file has no stamps.
    fn has_right_ends(&self, bytes: &[u8], offset: u64) -> bool {
        let last = bytes.len() - RECORD_BYTES;
        self.is_right(bytes, offset) && self.is_right(&bytes[last..], offset + last as u64)
    }
}

fn check_direct(store: FileStore) -> Result<FileStore, Failure> {
    if store.is_direct() { Ok(store) } else { Err("O_DIRECT is refused".into()) }
}

/// The start of an interval whose duration and CPU time are measured.
pub struct IntervalStart {
    begun: Instant,
    cpu: Duration,
}

/// Duration and CPU time of an interval.
pub struct Elapsed {
    pub seconds: f64,
    pub cpu_seconds: f64,
}

impl IntervalStart {
    pub fn begin() -> Self {
        Self { begun: Instant::now(), cpu: native::own_cpu_time() }
    }

    pub fn end(&self) -> Elapsed {
        let cpu = native::own_cpu_time().saturating_sub(self.cpu);
        Elapsed { seconds: self.begun.elapsed().as_secs_f64(), cpu_seconds: cpu.as_secs_f64() }
    }
}

impl Elapsed {
    /// Returns transfers and MiB per second, and the CPU time per transfer, for `ios` transfers of `io_bytes` bytes.
    fn rates(&self, ios: u64, io_bytes: usize) -> Result<Map<String, Value>, Failure> {
        if ios == 0 {
            return Err("nothing was transferred in that time".into());
        }
        let rate = ios as f64 / self.seconds;
        let mib = rate * io_bytes as f64 / f64::from(1 << 20);
        let metrics = [(IOS, rate), (MIB, mib), (CPU, self.cpu_seconds * 1e6 / ios as f64)];
        Ok(metrics.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect())
    }

    /// Returns the values of [`Self::rates`], and percentiles of the `ios` longest latencies in `times`.
    fn metrics(&self, ios: u64, io_bytes: usize, times: &Histogram) -> Result<Map<String, Value>, Failure> {
        let mut metrics = self.rates(ios, io_bytes)?;
        for (name, share) in [(P50, 0.5), (P99, 0.99), (P999, 0.999)] {
            metrics.insert(name.to_owned(), (times.percentile_of_longest_ms(ios, share) * 1e3).into());
        }
        Ok(metrics)
    }
}
