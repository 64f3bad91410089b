//! A file on a device that is larger than the memory for it: records are read at random by several threads, or in order,
//! through a view, by pins, or through a mapping of the kernel.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use pagemill_cache::{Mapping, Source, View};
use pagemill_core::units::PageSize;
use serde_json::json;

use super::cache;
use crate::files::mapping::{Order, SharedMapping};
use crate::pattern::{self, RECORD_BYTES};
use crate::storage::{CPU_PER_MIB, MIB, READS};
use crate::workload::steps::{StepWork, measure_threads, run_in_threads};
use crate::workload::storage::{self, IntervalStart};
use crate::workload::{Failure, WorkloadResult, ensure};

/// Number of reads between two checks of the time.
const STEP_READS: u64 = 8;
/// Number of threads that fill the memory before random reads.
const FILL_THREADS: usize = 8;
/// Number of records of which every byte is compared after the measurement.
const CHECKED_RECORDS: usize = 64;

/// How the records are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// A view of the file in a page cache.
    View,
    /// A pin of the page in a page cache for each record.
    Pin,
    /// A mapping of the kernel.
    Mmap,
    /// A mapping of the kernel with `MADV_RANDOM`.
    MmapRandom,
    /// A mapping of the kernel with `MADV_SEQUENTIAL`.
    MmapSequential,
}

crate::workload::arguments! {
    /// Arguments of a run that reads records of a file.
    DeviceArguments:
    way: Way,
    /// Size of the cache's pages; without it, 4 KiB and huge folios
    page: Option<PageSize>,
    cache_mib: u64,
    /// Read random records with this many threads; without it, read the file once in order
    #[arg(requires = "run_ms")]
    threads: Option<usize>,
    run_ms: Option<u64>,
    ..source: storage::Source,
}

/// The file, opened in the way to be measured. None of its pages is resident.
enum Reader {
    View(View),
    Pin(Mapping),
    Mapped(SharedMapping),
}

impl Reader {
    fn open(arguments: &DeviceArguments) -> Result<Self, Failure> {
        let source = &arguments.source;
        source.drop_kernel_pages()?;
        let order = match arguments.way {
            Way::View | Way::Pin => {
                let cache = cache(arguments.page, arguments.cache_mib << 20, Source::Shared)?;
                let file = cache.open(Arc::new(source.open_read_only()?))?;
                return Ok(match arguments.way {
                    Way::View => Self::View(file.view(0..source.len_bytes)?),
                    _ => Self::Pin(file),
                });
            }
            Way::Mmap => Order::Unknown,
            Way::MmapRandom => Order::Random,
            Way::MmapSequential => Order::Sequential,
        };
        let mapping = SharedMapping::untouched(&File::open(&source.file)?, source.len_bytes as usize, order)?;
        Ok(Self::Mapped(mapping))
    }

    #[inline]
    fn read(&self, offset: u64, to: &mut [u8; RECORD_BYTES]) -> Result<(), Failure> {
        match self {
            Self::View(view) => view.read_at(to, offset as usize),
            Self::Pin(file) => file.pin(offset)?.read_at(to, 0),
            Self::Mapped(mapping) => mapping.read(offset as usize, to),
        }
        Ok(())
    }
}

/// Reads the records. The resulting JSON has the rate, and for reads in order the CPU time.
pub fn run(arguments: &DeviceArguments) -> WorkloadResult {
    let (source, reader) = (&arguments.source, Reader::open(arguments)?);
    let line = match (arguments.threads, arguments.run_ms) {
        (Some(threads), Some(run_ms)) => {
            fill(source, &reader, arguments.cache_mib << 20)?;
            read_at_random(source, &reader, threads, run_ms)?
        }
        _ => read_in_order(source, &reader)?,
    };
    check_whole_records(source, &reader)?;
    Ok(line)
}

/// Reads as many bytes of the file as there is memory for, so that random reads evict pages from the start.
fn fill(source: &storage::Source, reader: &Reader, len_bytes: u64) -> Result<(), Failure> {
    let part_bytes = len_bytes.min(source.len_bytes) / FILL_THREADS as u64;
    run_in_threads(FILL_THREADS, |thread| {
        let (begin, mut record) = (thread as u64 * part_bytes, [0; RECORD_BYTES]);
        let mut offsets = (begin..begin + part_bytes).step_by(RECORD_BYTES);
        offsets.try_for_each(|offset| {
            reader.read(offset, &mut record)?;
            ensure(source.is_right(&record, offset), || format!("the record at {offset} is not what was written"))
        })
    })?;
    Ok(())
}

/// Compares every byte of some random records. The measured reads compare the first word of each record.
fn check_whole_records(source: &storage::Source, reader: &Reader) -> Result<(), Failure> {
    let (mut random, mut record) = (Rng::with_seed(99), [0; RECORD_BYTES]);
    for _ in 0..CHECKED_RECORDS {
        let offset = random.u64(..source.len_bytes / RECORD_BYTES as u64) * RECORD_BYTES as u64;
        reader.read(offset, &mut record)?;
        let is_right = !source.pattern || pattern::is_intact(&record, 0, offset);
        ensure(is_right, || format!("a byte of the record at {offset} is not what was written"))?;
    }
    Ok(())
}

/// The work of one thread that reads random records.
struct RandomReads<'a> {
    source: &'a storage::Source,
    reader: &'a Reader,
    random: Rng,
    record: [u8; RECORD_BYTES],
    wrong: u64,
}

impl StepWork for RandomReads<'_> {
    fn step(&mut self) -> Result<(), Failure> {
        for _ in 0..STEP_READS {
            let offset = self.random.u64(..self.source.len_bytes / RECORD_BYTES as u64) * RECORD_BYTES as u64;
            self.reader.read(offset, &mut self.record)?;
            self.wrong += u64::from(!self.source.is_right(&self.record, offset));
        }
        Ok(())
    }

    fn check_results(&mut self) -> Result<(), Failure> {
        ensure(self.wrong == 0, || format!("{} records are not what was written", self.wrong))
    }
}

fn read_at_random(source: &storage::Source, reader: &Reader, threads: usize, run_ms: u64) -> WorkloadResult {
    let times = measure_threads(threads, Duration::from_millis(run_ms), STEP_READS, |thread| {
        let random = Rng::with_seed(thread as u64 + 1);
        Ok(RandomReads { source, reader, random, record: [0; RECORD_BYTES], wrong: 0 })
    })?;
    let reads: f64 = (0..threads).map(|thread| times.per_second(thread)).sum();
    Ok(json!({ READS: reads }))
}

fn read_in_order(source: &storage::Source, reader: &Reader) -> WorkloadResult {
    let mut record = [0; RECORD_BYTES];
    let span = IntervalStart::begin();
    for offset in (0..source.len_bytes).step_by(RECORD_BYTES) {
        reader.read(offset, &mut record)?;
        ensure(source.is_right(&record, offset), || format!("the record at {offset} is not what was written"))?;
    }
    let took = span.end();
    let mib = source.len_bytes as f64 / f64::from(1 << 20);
    Ok(json!({ MIB: mib / took.seconds, CPU_PER_MIB: took.cpu_seconds * 1e6 / mib }))
}
