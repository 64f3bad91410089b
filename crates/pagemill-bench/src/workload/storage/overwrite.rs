//! Large pages that are in memory, changed by a word each and written back, again and again.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemill::stats::{self, Counter};
use pagemill::store::{Aligned, FileStore, Store, Transfer};

use super::miss::cache_of_folios;
use super::{Source, Span};
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::stats::Random;
use crate::storage::writeback::places;
use crate::workload::hit::{failed, write};
use crate::workload::{Failure, Outcome};

/// One page of so many is in memory and changed.
const ONE_OF: u64 = 8;

/// Pages that are read again after they were written.
const READ_AGAIN: usize = 32;

/// Writes to a file, whose content is lost.
#[derive(Clone, Debug, clap::Args)]
pub struct Overwrite {
    #[command(flatten)]
    pub source: Source,
    #[arg(long)]
    pub cache_mib: u64,
    #[arg(long)]
    pub io_bytes: usize,
    /// Pages here and there, not one after the other
    #[arg(long)]
    pub random: bool,
    #[arg(long)]
    pub run_ms: u64,
}

/// A file that is not made safe: fio does not do that either.
struct Unsynced(FileStore);

impl Store for Unsynced {
    fn size_bytes(&self) -> io::Result<u64> {
        self.0.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, to)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.0.write(offset, from)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.0.set_size(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn start(&self, batch: Vec<Transfer>) {
        self.0.start(batch);
    }

    fn is_asynchronous(&self) -> bool {
        self.0.is_asynchronous()
    }

    fn as_file(&self) -> Option<&FileStore> {
        self.0.as_file()
    }
}

/// Changes and writes until the time is over, and looks whether it is there.
pub fn run(arguments: &Overwrite) -> Outcome {
    let Overwrite { source, io_bytes, .. } = arguments;
    let places = match arguments.random {
        true => places(source.len_bytes, *io_bytes as u64, ONE_OF, 1),
        false => (0..source.len_bytes / ONE_OF).step_by(*io_bytes).collect(),
    };
    let cache = cache_of_folios(arguments.cache_mib << 20, *io_bytes)?;
    let file = cache.open(Arc::new(Unsynced(source.open_writable()?))).map_err(failed)?;
    let mut records = Records::filled(*io_bytes);
    // Whole pages: none is read before.
    places.iter().try_for_each(|offset| write(&file, records.at(0, *offset), *offset))?;
    let mut order = places.clone();
    if arguments.random {
        Random::new(2).shuffle(&mut order);
    }
    let mut generation = u64::from(std::process::id());
    let mut round = || -> Result<u64, Failure> {
        generation += 1;
        for offset in &order {
            write(&file, &pattern::word(0, *offset, generation).to_le_bytes(), *offset)?;
        }
        file.sync().map_err(failed)?;
        Ok(order.len() as u64)
    };
    // Once beforehand, as everywhere.
    round()?;
    let (run, mut ios) = (Duration::from_millis(arguments.run_ms), 0);
    let (before, begun, span) = (stats::get(Counter::StoreWritten), Instant::now(), Span::begin());
    while begun.elapsed() < run {
        ios += round()?;
    }
    let took = span.end();
    let written = stats::get(Counter::StoreWritten) - before;
    if written < ios * *io_bytes as u64 {
        return Err(Failure::WrongAnswer(format!("of {ios} pages that were changed, {written} bytes were written")));
    }
    drop((file, cache));
    check(source, &order, *io_bytes, generation)?;
    Ok(took.rates(ios, *io_bytes)?.into())
}

/// What was written last: the first word is of that generation, the rest as it always was.
fn check(source: &Source, order: &[u64], io_bytes: usize, generation: u64) -> Result<(), Failure> {
    let store = source.open_read_only()?;
    let mut bytes = Aligned::new(io_bytes, RECORD_BYTES);
    for offset in order.iter().take(READ_AGAIN) {
        store.read(*offset, &mut bytes).map_err(|error| error.to_string())?;
        let (first, rest) = bytes.split_at(RECORD_BYTES);
        let is_there = pattern::is_record(first, 0, *offset, generation)
            && pattern::is_whole(rest, 0, offset + RECORD_BYTES as u64);
        if !is_there {
            return Err(Failure::WrongAnswer(format!("what was written back at {offset} is not there")));
        }
    }
    Ok(())
}
