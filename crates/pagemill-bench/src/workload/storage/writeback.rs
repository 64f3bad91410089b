//! Scattered pages of a file, written in ascending order. They are written from a cache in which they are dirty, or
//! from plain memory by a bare io_uring.

use std::sync::Arc;

use fastrand::Rng;
use pagemill_cache::mapping::policy::Never;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_store::{Aligned, FileStore, Store};

use super::ring::{RingArguments, TransferLoop};
use super::{Elapsed, IntervalStart, Source};
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::storage::writeback::{TRANSFERS, page_offsets};
use crate::workload::hit::{cache, write_all};
use crate::workload::{Failure, WorkloadResult, ensure};

/// Maximum number of pages directly after written pages that are checked to be unchanged.
const MAX_NEIGHBOURS: usize = 256;

crate::workload::arguments! {
    /// Arguments of a run that writes scattered pages of a file. The file's previous content is lost.
    WritebackArguments:
    /// Write one page of the file in this many
    one_of: u64,
    /// Seed for the choice of the pages
    seed: u64,
    /// Use a bare io_uring of this depth instead of the cache
    ring: Option<usize>,
    ..source: Source,
}

/// The duration of an interval, and the number of written bytes and of writes in it.
struct WriteTotals {
    took: Elapsed,
    bytes: u64,
    writes: u64,
}

/// Runs `work`, and measures its duration and what it wrote.
fn measure_writes(work: impl FnOnce() -> Result<(), Failure>) -> Result<WriteTotals, Failure> {
    let counters = || [Counter::StoreWritten, Counter::StoreWrites].map(stats::get);
    let ([bytes, writes], span) = (counters(), IntervalStart::begin());
    work()?;
    let (took, [bytes_after, writes_after]) = (span.end(), counters());
    Ok(WriteTotals { took, bytes: bytes_after - bytes, writes: writes_after - writes })
}

/// Writes scattered pages of the file, then reads all of them from the file and compares them.
pub fn run(arguments: &WritebackArguments) -> WorkloadResult {
    let source = &arguments.source;
    let page_offsets = page_offsets(source.len_bytes, RECORD_BYTES as u64, arguments.one_of, arguments.seed);
    // The generation of the written stamps. It distinguishes the writes of this process from those of other processes.
    let generation = u64::from(std::process::id());
    let neighbours = read_neighbours(&source.open_read_only()?, &page_offsets, source.len_bytes)?;
    let written = match arguments.ring {
        Some(depth) => write_by_ring(source, &page_offsets, depth)?,
        None => write_by_cache(source, &page_offsets, generation)?,
    };
    let pages = written.bytes / RECORD_BYTES as u64;
    if pages < page_offsets.len() as u64 * 9 / 10 {
        return Err(
            format!("of {} dirty pages {pages} were left to be written in that time", page_offsets.len()).into()
        );
    }
    let mut metrics = written.took.rates(pages, RECORD_BYTES)?;
    metrics.insert(TRANSFERS.to_owned(), (written.writes as f64 / pages as f64).into());
    check_file(source, &page_offsets, generation, &neighbours)?;
    Ok(metrics.into())
}

/// Makes the pages dirty in a page cache, in random order, then syncs the file. Writes whole pages, so that no page is
/// read first.
fn write_by_cache(source: &Source, page_offsets: &[u64], generation: u64) -> Result<WriteTotals, Failure> {
    let cache = cache(source.len_bytes, Box::new(Never), true)?;
    let file = cache.open(Arc::new(source.open_writable()?))?;
    let (mut page_offsets, mut random) = (page_offsets.to_vec(), Rng::with_seed(generation));
    random.shuffle(&mut page_offsets);
    let mut record = Records::filled(RECORD_BYTES).stamped_at(0, 0).to_vec();
    for offset in page_offsets {
        pattern::stamp(&mut record, 0, offset, generation);
        write_all(&file, &record, offset)?;
    }
    measure_writes(|| Ok(file.sync()?))
}

fn write_by_ring(source: &Source, page_offsets: &[u64], depth: usize) -> Result<WriteTotals, Failure> {
    let arguments = RingArguments::writes(source, RECORD_BYTES, depth);
    let mut work = TransferLoop::new(&arguments, page_offsets.iter().copied())?;
    measure_writes(|| {
        work.run_to_end()?;
        work.sync()
    })
}

/// Reads the page directly after each of some pages to be written, unless it will be written itself. Returns the
/// offsets and contents of these pages.
fn read_neighbours(store: &FileStore, page_offsets: &[u64], len_bytes: u64) -> Result<Vec<(u64, Aligned)>, Failure> {
    let mut random = Rng::with_seed(5);
    let mut found = Vec::new();
    for _ in 0..MAX_NEIGHBOURS.min(page_offsets.len()) {
        let offset = page_offsets[random.usize(..page_offsets.len())] + RECORD_BYTES as u64;
        if offset < len_bytes && page_offsets.binary_search(&offset).is_err() {
            found.push((offset, read(store, offset, RECORD_BYTES)?));
        }
    }
    Ok(found)
}

fn read(store: &FileStore, offset: u64, len_bytes: usize) -> Result<Aligned, Failure> {
    let mut bytes = Aligned::new(len_bytes, RECORD_BYTES);
    store.read(offset, &mut bytes)?;
    Ok(bytes)
}

/// Checks that the file has every byte that was written, and that the pages next to written pages are unchanged.
fn check_file(
    source: &Source,
    page_offsets: &[u64],
    generation: u64,
    neighbours: &[(u64, Aligned)],
) -> Result<(), Failure> {
    let store = source.open_read_only()?;
    let mut page_offsets = page_offsets.iter().copied().peekable();
    for begin in (0..source.len_bytes).step_by(BLOCK_BYTES) {
        let end = begin + BLOCK_BYTES as u64;
        if page_offsets.peek().is_none_or(|place| *place >= end) {
            continue;
        }
        let bytes = read(&store, begin, BLOCK_BYTES)?;
        while let Some(offset) = page_offsets.next_if(|place| *place < end) {
            let record = &bytes[(offset - begin) as usize..][..RECORD_BYTES];
            ensure(pattern::is_intact_record(record, 0, offset, generation), || {
                format!("what was written back at {offset} is not there")
            })?;
        }
    }
    for (offset, before) in neighbours {
        ensure(read(&store, *offset, RECORD_BYTES)?[..] == before[..], || {
            format!("what was not written to at {offset} is something else")
        })?;
    }
    Ok(())
}
