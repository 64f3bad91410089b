//! One worker of iozone: opens its file and runs one operation on its records.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use fastrand::Rng;
use pagemill_cache::mapping::{Mapping as Cached, PageCache, Source};
use pagemill_core::units::{BLOCK_BYTES, PageSize};

use super::{Interval, Job, Operation, now_ns};
use crate::files::mapping::{Access, Mapping};
use crate::pattern::{self, RECORD_BYTES};
use crate::workload::{Failure, ensure};

/// Prepares the worker, waits for all other workers, and runs the operation. A worker that cannot open its file also
/// waits, because the others wait for all workers.
pub fn run_job(job: &Job, cached_files: Option<&CachedFiles>, wait: impl FnOnce()) -> Result<Interval, Failure> {
    let worker = Worker::prepare(job, cached_files);
    wait();
    let worker = worker.map_err(|cause| format!("{}: {cause}", job.path.display()))?;
    let start = now_ns();
    worker.run(job)?;
    Ok(Interval { start, end: now_ns() })
}

/// Files in a page cache of this process, used instead of files in a folder.
pub struct CachedFiles {
    cache: PageCache,
    files: Vec<Mutex<Option<Arc<Cached>>>>,
}

impl CachedFiles {
    /// Makes a cache with default settings, which include its background thread, in this kind of memory. The cache's
    /// limit is far above the size of the data.
    pub fn new(files: usize, total_bytes: u64, source: Source) -> Result<Self, Failure> {
        let page = PageSize::new(RECORD_BYTES).ok_or("no pages of a record's size here")?;
        // The limit is twice the bytes of the files, plus a huge folio for each file.
        let limit_bytes = 2 * (total_bytes + ((files + 1) * BLOCK_BYTES) as u64);
        let settings = PageCache::builder("iozone").limit(limit_bytes).page(page).source(source);
        let cache = pagemill_testbed::Testbed::of_process().and_then(|pagemill| settings.build_in(pagemill.caches));
        let cache = cache?;
        Ok(Self { cache, files: (0..files).map(|_| Mutex::new(None)).collect() })
    }

    pub fn clear(&self) {
        for file in &self.files {
            drop(file.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }

    fn open(&self, index: u64, operation: Operation) -> io::Result<Arc<Cached>> {
        let place = self.files.get(index as usize).ok_or(io::ErrorKind::NotFound)?;
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        match (&*place, operation) {
            (Some(_), Operation::InitialWrite) => Err(io::ErrorKind::AlreadyExists.into()),
            (Some(file), _) => Ok(file.clone()),
            (None, Operation::InitialWrite) => {
                let file = self.cache.create().map(Arc::new).map_err(io::Error::other)?;
                Ok(place.insert(file).clone())
            }
            (None, _) => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// The way in which a worker accesses its file.
enum FileAccess {
    /// The worker reads and writes by system calls.
    Calls(File),
    /// The worker reads and writes through a mapping by the kernel, or a view of a file in a page cache of this process.
    Mapped(Mapping),
    /// The file is in a page cache of this process. The worker calls `read_at` and `write_at`.
    Cached(Arc<Cached>),
}

impl FileAccess {
    fn open(job: &Job, cached_files: Option<&CachedFiles>) -> io::Result<Self> {
        let (len, operation) = (job.records * RECORD_BYTES, job.operation);
        let access = if operation.is_writing() { Access::Write } else { Access::Read };
        if let Some(cached_files) = cached_files {
            let file = cached_files.open(job.file, operation)?;
            if !job.is_mapped {
                return Ok(Self::Cached(file));
            }
            if operation == Operation::InitialWrite {
                file.truncate(len as u64)?;
            }
            return Mapping::of_cached(&file, len, access).map(Self::Mapped);
        }
        let mut options = OpenOptions::new();
        options.read(true).write(operation.is_writing()).create_new(operation == Operation::InitialWrite);
        let file = options.open(&job.path)?;
        if !job.is_mapped {
            return Ok(Self::Calls(file));
        }
        if operation == Operation::InitialWrite {
            file.set_len(len as u64)?;
        }
        Mapping::new(&file, len, access).map(Self::Mapped)
    }

    #[inline]
    fn write(&self, record: &[u8; RECORD_BYTES], offset: usize) -> Result<(), String> {
        match self {
            Self::Calls(file) => file.write_all_at(record, offset as u64).map_err(|cause| format!("writing: {cause}")),
            Self::Mapped(mapping) => {
                mapping.write(offset, record);
                Ok(())
            }
            Self::Cached(file) => check_transferred("writing", file.write_at(record, offset as u64)),
        }
    }

    #[inline]
    fn read(&self, record: &mut [u8; RECORD_BYTES], offset: usize) -> Result<(), String> {
        match self {
            Self::Calls(file) => file.read_exact_at(record, offset as u64).map_err(|cause| format!("reading: {cause}")),
            Self::Mapped(mapping) => {
                mapping.read(offset, record);
                Ok(())
            }
            Self::Cached(file) => check_transferred("reading", file.read_at(record, offset as u64)),
        }
    }
}

/// Fails if a read or write failed, or did not transfer a whole record.
#[inline]
fn check_transferred(doing: &str, result: pagemill_core::Result<usize>) -> Result<(), String> {
    match result {
        Ok(RECORD_BYTES) => Ok(()),
        Ok(bytes) => Err(format!("{doing}: of a record {bytes} bytes")),
        Err(error) => Err(format!("{doing}: {error}")),
    }
}

/// The state of a worker that is ready to run its operation.
struct Worker {
    file_access: FileAccess,
    /// The indexes of all records in random order; empty if the operation is not random.
    shuffled: Vec<u32>,
}

impl Worker {
    fn prepare(job: &Job, cached_files: Option<&CachedFiles>) -> io::Result<Self> {
        let file_access = FileAccess::open(job, cached_files)?;
        let shuffled = match job.operation {
            Operation::RandomRead | Operation::RandomWrite => {
                shuffled_indexes(job.records, job.file ^ job.generation << 32)
            }
            _ => Vec::new(),
        };
        Ok(Self { file_access, shuffled })
    }

    fn run(&self, job: &Job) -> Result<(), Failure> {
        let mut record = [0x5a; RECORD_BYTES];
        let mut access = |index: usize| match job.operation.is_writing() {
            true => self.write(job, index, &mut record),
            false => self.read(job, index, &mut record),
        };
        match job.operation {
            Operation::ReverseRead => (0..job.records).rev().try_for_each(access),
            Operation::RandomRead | Operation::RandomWrite => {
                self.shuffled.iter().try_for_each(|&index| access(index as usize))
            }
            _ => (0..job.records).try_for_each(access),
        }
    }

    #[inline]
    fn write(&self, job: &Job, index: usize, record: &mut [u8; RECORD_BYTES]) -> Result<(), Failure> {
        let offset = index * RECORD_BYTES;
        pattern::stamp(record, job.file, offset as u64, job.generation);
        Ok(self.file_access.write(record, offset)?)
    }

    #[inline]
    fn read(&self, job: &Job, index: usize, record: &mut [u8; RECORD_BYTES]) -> Result<(), Failure> {
        let offset = index * RECORD_BYTES;
        self.file_access.read(record, offset)?;
        // Only the record's stamp is checked. `black_box` makes the compiler copy the whole record nevertheless.
        let record = std::hint::black_box(&*record);
        ensure(pattern::is_stamped(record, job.file, offset as u64, job.generation), || {
            format!("{}: a wrong record at {offset}", job.path.display())
        })
    }
}

/// Returns all numbers below `count` in an order that depends on the seed.
fn shuffled_indexes(count: usize, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    Rng::with_seed(seed).shuffle(&mut order);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each number below the given count must occur once. Another seed must give another order.
    #[test]
    fn shuffled_indexes_are_a_permutation() {
        let mut order = shuffled_indexes(1000, 7);
        assert_ne!(order, shuffled_indexes(1000, 8));
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<u32>>());
    }
}
