//! Huge folios: ranges of a folio are pinned and unpinned; folios are split and collapsed again.

use std::sync::Barrier;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::time::{Duration, Instant};

use pagemill_cache::mapping::policy::Always;
use pagemill_cache::mapping::{Mapping, PageCache};
use pagemill_core::units::BLOCK_BYTES;

use super::hit::{cache, write_all};
use super::steps::run_in_threads;
use super::{Failure, WorkloadResult, ensure};
use crate::native::{Pages, SharedCounters};
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::stats;

/// The method by which a range of a folio is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PinMethod {
    /// One pin of a folio that may be split.
    Splittable,
    /// One pin of a folio that is never split.
    NeverSplit,
    /// One reference count for each 4 KiB of the range, without a folio.
    PerPage,
}

crate::workload::arguments! {
    /// Arguments of a run that pins and unpins ranges of huge folios.
    RefsArguments:
    way: PinMethod,
    threads: usize,
    range_kib: usize,
    /// Each thread pins ranges of a folio of its own; otherwise all threads use one folio.
    own: bool,
    run_ms: u64,
}

const PAGES_PER_BLOCK: usize = BLOCK_BYTES / RECORD_BYTES;

/// Measures the time that a thread needs to pin and unpin a range. The resulting JSON has the mean over all threads, in
/// nanoseconds.
pub fn run(arguments: &RefsArguments) -> WorkloadResult {
    let folios = if arguments.own { arguments.threads } else { 1 };
    let len_bytes = arguments.range_kib << 10;
    if len_bytes > BLOCK_BYTES {
        return Err("the range is longer than a huge folio".into());
    }
    let folio_of = |thread: usize| if arguments.own { thread } else { 0 };
    let ns = if arguments.way == PinMethod::PerPage {
        let counts = SharedCounters::new(folios * PAGES_PER_BLOCK)?;
        let ns = mean_ns_in_threads(arguments, |thread| {
            let first = folio_of(thread) * PAGES_PER_BLOCK;
            let range = || (first..first + len_bytes / RECORD_BYTES).map(|page| counts.counter(page));
            for count in range() {
                count.fetch_add(1, Acquire);
            }
            for count in range() {
                count.fetch_sub(1, AcqRel);
            }
            Ok(())
        })?;
        ensure(
            (0..folios * PAGES_PER_BLOCK).all(|page| counts.counter(page).load(Acquire) == 0),
            || "a reference was not given back",
        )?;
        ns
    } else {
        let (cache, file) = file_of_huge_folios(folios, arguments.way == PinMethod::Splittable)?;
        let ns = mean_ns_in_threads(arguments, |thread| {
            let pins = file.pin_range((folio_of(thread) * BLOCK_BYTES) as u64, len_bytes)?;
            let is_one = pins.len() == 1 && pins.first().is_some_and(|pin| pin.len_bytes() >= len_bytes);
            ensure(is_one, || "a range of a folio is not one pin")
        })?;
        let usage = cache.usage();
        let is_right = usage.pinned == 0 && usage.huge == (folios * BLOCK_BYTES) as u64;
        ensure(is_right, || format!("a reference was not given back: {usage:?}"))?;
        check_folios(&file, folios)?;
        ns
    };
    Ok(serde_json::json!({ "ns": ns }))
}

/// Makes a cache, and a file in it that consists of huge folios.
fn file_of_huge_folios(folios: usize, may_split: bool) -> Result<(PageCache, Mapping), Failure> {
    let bytes = (folios * BLOCK_BYTES) as u64;
    // The cache may use more than twice the memory of the file, since a collapse needs a free block.
    let cache = cache(2 * bytes + 16 * BLOCK_BYTES as u64, Box::new(Always), may_split)?;
    let file = cache.create()?;
    fill_folios(&file, folios)?;
    match cache.usage() {
        usage if usage.huge == bytes => Ok((cache, file)),
        usage => Err(format!("the file does not lie in huge folios: {usage:?}").into()),
    }
}

fn fill_folios(file: &Mapping, folios: usize) -> Result<(), Failure> {
    let mut records = Records::filled(BLOCK_BYTES);
    (0..folios).try_for_each(|folio| {
        let offset = (folio * BLOCK_BYTES) as u64;
        write_all(file, records.stamped_at(0, offset), offset)
    })
}

fn check_folios(file: &Mapping, folios: usize) -> Result<(), Failure> {
    let mut bytes = vec![0; BLOCK_BYTES];
    for offset in (0..folios).map(|folio| (folio * BLOCK_BYTES) as u64) {
        let read = file.read_at(&mut bytes, offset)?;
        let is_right = read == BLOCK_BYTES && pattern::is_intact(&bytes, 0, offset);
        ensure(is_right, || format!("the folio at {offset} is not what was put there"))?;
    }
    Ok(())
}

fn mean_ns_in_threads(
    arguments: &RefsArguments,
    operation: impl Fn(usize) -> Result<(), Failure> + Sync,
) -> Result<f64, Failure> {
    const BATCH: usize = 100;
    let (start, run) = (Barrier::new(arguments.threads), Duration::from_millis(arguments.run_ms));
    let repeat = |thread: usize, run: Duration| -> Result<f64, Failure> {
        let (begun, mut done) = (Instant::now(), 0);
        while begun.elapsed() < run || done == 0 {
            (0..BATCH).try_for_each(|_| operation(thread))?;
            done += BATCH;
        }
        Ok(begun.elapsed().as_nanos() as f64 / done as f64)
    };
    let work = |thread: usize| {
        start.wait();
        // A tenth of the time is warm-up, in which CPUs leave their idle states.
        repeat(thread, run / 10).and_then(|_| repeat(thread, run))
    };
    let each = run_in_threads(arguments.threads, work)?;
    Ok(each.iter().sum::<f64>() / each.len() as f64)
}

crate::workload::arguments! {
    /// Arguments of a run that splits and collapses huge folios, or copies as much memory.
    SplitCollapseArguments:
    /// Copy huge pages, instead of splitting and collapsing folios. Each copy overwrites the source of the previous
    /// copy.
    copy: bool,
    folios: usize,
    run_ms: u64,
}

/// Measures the median time of each operation, in nanoseconds: split and collapse, or copy.
pub fn measure_split_and_collapse(arguments: &SplitCollapseArguments) -> WorkloadResult {
    let run = Duration::from_millis(arguments.run_ms);
    if arguments.copy { time_copies(arguments.folios, run) } else { split_and_collapse(arguments.folios, run) }
}

/// Runs an operation and appends its duration in nanoseconds to `times`. Fails if the operation changed nothing.
fn time_operation(
    times: &mut Vec<f64>,
    operation: impl FnOnce() -> pagemill_core::Result<bool>,
) -> Result<(), Failure> {
    let begun = Instant::now();
    let is_done = operation();
    times.push(begun.elapsed().as_nanos() as f64);
    ensure(is_done?, || "a folio was not split, or not made huge again")
}

fn split_and_collapse(folios: usize, run: Duration) -> WorkloadResult {
    let (cache, file) = file_of_huge_folios(folios, true)?;
    let (mut splits, mut collapses) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    // The first round over all folios is not counted: it allocates the index nodes and blocks that later rounds reuse.
    while begun.elapsed() < run || splits.len() < 2 * folios {
        for offset in (0..folios).map(|folio| (folio * BLOCK_BYTES) as u64) {
            time_operation(&mut splits, || file.split(offset))?;
            time_operation(&mut collapses, || file.collapse(offset))?;
        }
    }
    check_folios(&file, folios)?;
    let usage = cache.usage();
    let is_right = usage.huge == (folios * BLOCK_BYTES) as u64 && usage.small == 0;
    ensure(is_right, || format!("not all is huge again: {usage:?}"))?;
    let median = |times: &[f64]| stats::median(&times[folios..]);
    Ok(serde_json::json!({ "split_ns": median(&splits), "collapse_ns": median(&collapses), "turns": splits.len() }))
}

/// Copies huge pages. Each copy overwrites the source of the previous copy, like a collapse that reuses freed blocks.
fn time_copies(folios: usize, run: Duration) -> WorkloadResult {
    let mut memory = Pages::huge((folios + 1) * BLOCK_BYTES)?;
    let bytes = memory.bytes_mut((folios + 1) * BLOCK_BYTES);
    let mut records = Records::filled(BLOCK_BYTES);
    let mut blocks: Vec<&mut [u8]> = bytes.chunks_exact_mut(BLOCK_BYTES).collect();
    for (folio, block) in blocks.iter_mut().enumerate().take(folios) {
        block.copy_from_slice(records.stamped_at(0, (folio * BLOCK_BYTES) as u64));
    }
    let Some(mut spare) = blocks.pop() else { return Err("no blocks".into()) };
    let mut times = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < run || times.len() < 2 * folios {
        for block in &mut blocks {
            let copy = Instant::now();
            spare.copy_from_slice(block);
            times.push(copy.elapsed().as_nanos() as f64);
            std::mem::swap(&mut spare, block);
        }
    }
    for (folio, block) in blocks.iter().enumerate() {
        ensure(pattern::is_intact(block, 0, (folio * BLOCK_BYTES) as u64), || "a copy is not what was copied")?;
    }
    Ok(serde_json::json!({ "copy_ns": stats::median(&times[folios..]), "turns": times.len() }))
}
