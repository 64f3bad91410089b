//! Large resident pages. Each round changes one word of each page and writes the pages back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_core::stats::{self, Counter};
use pagemill_store::{Aligned, Store as _};

use super::miss::cache_of_folios;
use super::{IntervalStart, Source};
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::storage::writeback::page_offsets;
use crate::workload::hit::write_all;
use crate::workload::{Failure, WorkloadResult, ensure};

/// One page of the file in this many is resident and is changed.
const PAGES_PER_CHANGED_ONE: u64 = 8;

/// Number of pages that are read back from the file and checked after the last round.
const READ_BACK_COUNT: usize = 32;

crate::workload::arguments! {
    /// Arguments of a run that changes resident pages of a file and writes them back. The file's previous content is
    /// lost.
    OverwriteArguments:
    cache_mib: u64,
    io_bytes: usize,
    /// Change scattered pages instead of sequential ones
    random: bool,
    run_ms: u64,
    ..source: Source,
}

/// Changes pages and writes them back until the time is over, then checks the file.
pub fn run(arguments: &OverwriteArguments) -> WorkloadResult {
    let OverwriteArguments { source, io_bytes, .. } = arguments;
    let page_offsets = match arguments.random {
        true => page_offsets(source.len_bytes, *io_bytes as u64, PAGES_PER_CHANGED_ONE, 1),
        false => (0..source.len_bytes / PAGES_PER_CHANGED_ONE).step_by(*io_bytes).collect(),
    };
    let cache = cache_of_folios(arguments.cache_mib << 20, *io_bytes)?;
    let file = cache.open(Arc::new(source.open_writable()?))?;
    let mut records = Records::filled(*io_bytes);
    // Whole pages are written, so that no page is first read from the file.
    page_offsets.iter().try_for_each(|offset| write_all(&file, records.stamped_at(0, *offset), *offset))?;
    let mut order = page_offsets.clone();
    if arguments.random {
        Rng::with_seed(2).shuffle(&mut order);
    }
    let mut generation = u64::from(std::process::id());
    let mut round = || -> Result<u64, Failure> {
        generation += 1;
        for offset in &order {
            write_all(&file, &pattern::stamp_word(0, *offset, generation).to_le_bytes(), *offset)?;
        }
        // There is no sync, because fio does not sync in the runs that these results are compared with.
        file.write_back(0, source.len_bytes)?;
        Ok(order.len() as u64)
    };
    // The first round is warm-up, as in the other workloads.
    round()?;
    let (run, mut ios) = (Duration::from_millis(arguments.run_ms), 0);
    let (before, begun, span) = (stats::get(Counter::StoreWritten), Instant::now(), IntervalStart::begin());
    while begun.elapsed() < run {
        ios += round()?;
    }
    let took = span.end();
    let written = stats::get(Counter::StoreWritten) - before;
    ensure(written >= ios * *io_bytes as u64, || {
        format!("of {ios} pages that were changed, {written} bytes were written")
    })?;
    drop((file, cache));
    check_pages(source, &order, *io_bytes, generation)?;
    Ok(took.rates(ios, *io_bytes)?.into())
}

/// Reads pages from the file after the last round and checks them. The stamp of a page must have the generation number
/// of the last round, and all other bytes must be unchanged.
fn check_pages(source: &Source, order: &[u64], io_bytes: usize, generation: u64) -> Result<(), Failure> {
    let store = source.open_read_only()?;
    let mut bytes = Aligned::new(io_bytes, RECORD_BYTES);
    for offset in order.iter().take(READ_BACK_COUNT) {
        store.read(*offset, &mut bytes)?;
        let (first, rest) = bytes.split_at(RECORD_BYTES);
        let is_there = pattern::is_intact_record(first, 0, *offset, generation)
            && pattern::is_intact(rest, 0, offset + RECORD_BYTES as u64);
        ensure(is_there, || format!("what was written back at {offset} is not there"))?;
    }
    Ok(())
}
