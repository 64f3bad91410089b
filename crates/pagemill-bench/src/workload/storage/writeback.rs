//! Scattered pages of a file, written in ascending order: from a cache in which they are dirty, or from plain memory by
//! a bare io_uring.

use std::sync::Arc;

use pagemill::mapping::policy::Never;
use pagemill::stats::{self, Counter};
use pagemill::store::{Aligned, FileStore, Store};
use pagemill::units::BLOCK_BYTES;

use super::ring::{Loop, Ring};
use super::{Source, Span, Took};
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::stats::Random;
use crate::storage::writeback::{TRANSFERS, places};
use crate::workload::hit::{cache, failed, write};
use crate::workload::{Failure, Outcome};

/// Number of offsets next to written pages that are checked for changes.
const NEIGHBOURS: usize = 256;

/// Arguments of a run that writes to a file, whose content is lost.
#[derive(Clone, Debug, clap::Args)]
pub struct Writeback {
    #[command(flatten)]
    pub source: Source,
    /// Write one page in this many
    #[arg(long)]
    pub one_of: u64,
    /// Seed for the choice of the pages
    #[arg(long)]
    pub seed: u64,
    /// Use a bare io_uring of this depth instead of the cache
    #[arg(long)]
    pub ring: Option<usize>,
}

/// The start of an interval, with the counters of bytes and writes at that time.
struct Writing {
    span: Span,
    bytes: u64,
    writes: u64,
}

/// The duration of an interval, and the bytes and writes in it.
struct Written {
    took: Took,
    bytes: u64,
    writes: u64,
}

impl Writing {
    fn begin() -> Self {
        let [bytes, writes] = [Counter::StoreWritten, Counter::StoreWrites].map(stats::get);
        Self { bytes, writes, span: Span::begin() }
    }

    fn end(self) -> Written {
        let took = self.span.end();
        let [bytes, writes] = [Counter::StoreWritten, Counter::StoreWrites].map(stats::get);
        Written { took, bytes: bytes - self.bytes, writes: writes - self.writes }
    }
}

/// Writes the pages, and compares all of them afterwards.
pub fn run(arguments: &Writeback) -> Outcome {
    let source = &arguments.source;
    let places = places(source.len_bytes, RECORD_BYTES as u64, arguments.one_of, arguments.seed);
    // The generation of the written stamps. It distinguishes writes of this process from those of others.
    let generation = u64::from(std::process::id());
    let neighbours = neighbours(&source.open_read_only()?, &places, source.len_bytes)?;
    let written = match arguments.ring {
        Some(depth) => by_ring(source, &places, depth)?,
        None => by_cache(source, &places, generation)?,
    };
    let pages = written.bytes / RECORD_BYTES as u64;
    if pages < places.len() as u64 * 9 / 10 {
        return Err(format!("of {} dirty pages {pages} were left to be written in that time", places.len()).into());
    }
    let mut figures = written.took.rates(pages, RECORD_BYTES)?;
    figures.insert(TRANSFERS.to_owned(), (written.writes as f64 / pages as f64).into());
    check(source, &places, generation, &neighbours)?;
    Ok(figures.into())
}

/// Makes the pages dirty in random order, then syncs the file. Whole pages are written, so that none is read first.
fn by_cache(source: &Source, places: &[u64], generation: u64) -> Result<Written, Failure> {
    let cache = cache(source.len_bytes, Box::new(Never), true)?;
    let file = cache.open(Arc::new(source.open_writable()?)).map_err(failed)?;
    let (mut places, mut random) = (places.to_vec(), Random::new(generation));
    random.shuffle(&mut places);
    let mut record = Records::filled(RECORD_BYTES).at(0, 0).to_vec();
    for offset in places {
        pattern::stamp(&mut record, 0, offset, generation);
        write(&file, &record, offset)?;
    }
    let writing = Writing::begin();
    file.sync().map_err(failed)?;
    Ok(writing.end())
}

fn by_ring(source: &Source, places: &[u64], depth: usize) -> Result<Written, Failure> {
    let arguments = Ring::writes(source, RECORD_BYTES, depth);
    let mut work = Loop::new(&arguments, places.iter().copied())?;
    let writing = Writing::begin();
    work.run_to_end()?;
    work.sync()?;
    Ok(writing.end())
}

/// Reads the contents directly after some of the written pages, where no page is written.
fn neighbours(store: &FileStore, places: &[u64], len_bytes: u64) -> Result<Vec<(u64, Aligned)>, Failure> {
    let mut random = Random::new(5);
    let mut found = Vec::new();
    for _ in 0..NEIGHBOURS.min(places.len()) {
        let offset = places[random.below(places.len())] + RECORD_BYTES as u64;
        if offset < len_bytes && places.binary_search(&offset).is_err() {
            found.push((offset, read(store, offset, RECORD_BYTES)?));
        }
    }
    Ok(found)
}

fn read(store: &FileStore, offset: u64, len_bytes: usize) -> Result<Aligned, Failure> {
    let mut bytes = Aligned::new(len_bytes, RECORD_BYTES);
    store.read(offset, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Compares every written byte, and the bytes next to written pages, with the file.
fn check(source: &Source, places: &[u64], generation: u64, neighbours: &[(u64, Aligned)]) -> Result<(), Failure> {
    let store = source.open_read_only()?;
    let mut places = places.iter().copied().peekable();
    for begin in (0..source.len_bytes).step_by(BLOCK_BYTES) {
        let end = begin + BLOCK_BYTES as u64;
        if places.peek().is_none_or(|place| *place >= end) {
            continue;
        }
        let bytes = read(&store, begin, BLOCK_BYTES)?;
        while let Some(offset) = places.next_if(|place| *place < end) {
            let record = &bytes[(offset - begin) as usize..][..RECORD_BYTES];
            if !pattern::is_record(record, 0, offset, generation) {
                return Err(Failure::WrongAnswer(format!("what was written back at {offset} is not there")));
            }
        }
    }
    for (offset, before) in neighbours {
        if read(&store, *offset, RECORD_BYTES)?[..] != before[..] {
            return Err(Failure::WrongAnswer(format!("what was not written to at {offset} is something else")));
        }
    }
    Ok(())
}
