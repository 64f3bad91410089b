//! Resident pages, copied out and pinned in random order: in the page cache, in its building blocks, and in other
//! caches.
//!
//! Every subject stores the same records ([`crate::pattern`]). Before the measurement, every byte of the records is
//! compared. The timed loop checks only the stamp of each record, and counts wrong stamps without a branch.

mod page_cache;
mod peers;
mod plain;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_cache::Source;
use pagemill_core::units::BLOCK_BYTES;

use super::steps::run_in_threads;
use super::{Failure, WorkloadResult, ensure};
use crate::files::FilePlace;
use crate::native::Pages;
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::proc;
pub use page_cache::{SPARE_BYTES, SmallFilesArguments, cache, cache_in, cache_of, measure_files, write_all};

/// What is measured: the page cache, its building blocks (plain memory, with and without state words), files that are
/// mapped or read by system calls, and other caches (foyer, quick_cache).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    /// The page cache with huge folios.
    Huge,
    /// The page cache with folios of one page.
    Dense,
    /// Pages in plain memory that is backed by huge pages.
    Memcpy,
    /// Pages in plain memory that is backed by huge pages, with a state word for each page.
    Frames,
    /// Pages of a file that is mapped into memory.
    Mmap,
    /// Pages of a file that is read by system calls.
    Pread,
    Foyer,
    QuickCache,
}

crate::workload::arguments! {
    /// Arguments of one measurement of one subject: a cache, or a building block of a cache.
    HitArguments:
    subject: Subject,
    threads: usize,
    mib: usize,
    run_ms: u64,
    // The page cache uses shared memory.
    shared: bool,
    // The only operation to measure, named by its metric.
    operation: Option<String>,
    // Make the operation this many times in one thread instead of measuring its time.
    #[arg(requires = "operation")]
    operations: Option<usize>,
    // The folder of the file, for subjects that use a file.
    ..place: Option<FilePlace>,
}

type Record = [u8; RECORD_BYTES];

/// A cache, or a building block of a cache, with all its pages filled.
trait PageStore: Sync {
    /// Copies the page with index `page` to `to`; returns whether the page was resident.
    fn copy(&self, page: usize, to: &mut Record) -> bool;

    /// Pins the page with index `page`, reads its first word, and unpins it. `None` for stores that have no pins.
    fn pin(&self, _page: usize) -> Option<u64> {
        None
    }

    /// As [`PageStore::pin`], but with what an earlier access remembered of the page. `None` for stores that remember
    /// nothing.
    fn pin_hinted(&self, _page: usize) -> Option<u64> {
        None
    }

    /// Reads the first word of the page with index `page` without a pin, with what an earlier access remembered of the
    /// page. `None` for stores that cannot.
    fn read_hinted(&self, _page: usize) -> Option<u64> {
        None
    }

    /// Returns the names and values of further metrics of this store, in bytes per page.
    fn extra_metrics(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}

/// Fills a cache or a building block of a cache with pages, checks its contents, and measures it.
pub fn run(arguments: &HitArguments) -> WorkloadResult {
    let pages = (arguments.mib << 20) / RECORD_BYTES;
    let source = if arguments.shared { Source::Shared } else { Source::Ordinary };
    let place = || arguments.place.as_ref().ok_or_else(|| Failure::Other("a file needs a place".to_owned()));
    match arguments.subject {
        kind @ (Subject::Huge | Subject::Dense) => {
            measure_store(arguments, pages, || page_cache::CachedFile::new(pages, kind, source))
        }
        Subject::Memcpy => measure_store(arguments, pages, || plain::Memory::new(pages)),
        Subject::Frames => measure_store(arguments, pages, || plain::Frames::new(pages)),
        Subject::Mmap => measure_store(arguments, pages, || plain::Mapped::new(pages, place()?)),
        Subject::Pread => measure_store(arguments, pages, || plain::OnFile::new(pages, place()?)),
        Subject::Foyer => measure_store(arguments, pages, || Ok(peers::Foyer::new(pages))),
        Subject::QuickCache => measure_store(arguments, pages, || peers::Quick::new(pages)),
    }
}

fn measure_store<D: PageStore>(
    arguments: &HitArguments,
    pages: usize,
    make: impl FnOnce() -> Result<D, Failure>,
) -> WorkloadResult {
    let before = resident_bytes()?;
    let store = make()?;
    let grown = resident_bytes()?.saturating_sub(before);
    let data_bytes = (pages * RECORD_BYTES) as f64;
    let mut line = serde_json::Map::new();
    line.insert("beside_bytes".to_owned(), ((grown as f64 - data_bytes) / pages as f64).into());
    check_pages(&store, pages)?;
    let share = proc::own_huge_bytes().unwrap_or(0) as f64 / data_bytes;
    line.insert("huge_share".to_owned(), share.min(1.0).into());
    line.extend(store.extra_metrics().into_iter().map(|(name, value)| (name.to_owned(), value.into())));
    let operations: [(&str, bool, BatchOperation<D>); 4] = [
        ("copy_ns", true, copy_random_pages),
        ("pin_ns", store.pin(0).is_some(), |store, pages, random, _, count| {
            read_random_words(pages, random, count, |page| store.pin(page))
        }),
        ("hinted_ns", store.pin_hinted(0).is_some(), |store, pages, random, _, count| {
            read_random_words(pages, random, count, |page| store.pin_hinted(page))
        }),
        ("hinted_read_ns", store.read_hinted(0).is_some(), |store, pages, random, _, count| {
            read_random_words(pages, random, count, |page| store.read_hinted(page))
        }),
    ];
    let is_wanted = |metric: &str| arguments.operation.as_ref().is_none_or(|only| only == metric);
    for (metric, _, operation) in
        operations.into_iter().filter(|(name, is_possible, _)| *is_possible && is_wanted(name))
    {
        match arguments.operations {
            Some(count) => {
                let wrong = operation(&store, pages, &mut Rng::with_seed(1), &mut [0; RECORD_BYTES], count);
                ensure(wrong == 0, || format!("{wrong} of {count} pages were not what was put there"))?;
            }
            None => {
                line.insert(metric.to_owned(), mean_ns_in_threads(arguments, pages, &store, operation)?.into());
            }
        }
    }
    Ok(line.into())
}

fn resident_bytes() -> Result<u64, Failure> {
    let resident = proc::resident_memory(std::process::id());
    resident.map(|resident| resident.all).ok_or_else(|| Failure::Other("/proc tells no resident memory".to_owned()))
}

fn first_word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

fn stamp_of_page(page: usize) -> u64 {
    pattern::stamp_word(0, (page * RECORD_BYTES) as u64, 0)
}

/// Calls `operation` with the records of all pages, in blocks of 2 MiB in ascending order.
fn for_all_records(
    pages: usize,
    mut operation: impl FnMut(usize, &[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let bytes = pages * RECORD_BYTES;
    let mut records = Records::filled(BLOCK_BYTES);
    for offset in (0..bytes).step_by(BLOCK_BYTES) {
        operation(offset, &records.stamped_at(0, offset as u64)[..BLOCK_BYTES.min(bytes - offset)])?;
    }
    Ok(())
}

/// Checks every byte of every page that the store returns.
fn check_pages(store: &impl PageStore, pages: usize) -> Result<(), Failure> {
    let mut record = [0; RECORD_BYTES];
    for page in 0..pages {
        let offset = (page * RECORD_BYTES) as u64;
        let is_right = store.copy(page, &mut record) && pattern::is_intact(&record, 0, offset);
        ensure(is_right, || format!("page {page} is not what was put there"))?;
        let words = [store.pin(page), store.pin_hinted(page), store.read_hinted(page)];
        ensure(words.into_iter().flatten().all(|word| word == stamp_of_page(page)), || {
            format!("the word of page {page} is another one")
        })?;
    }
    Ok(())
}

/// A function that repeats an operation on random pages and returns the number of wrong results. Its arguments are the
/// store, the number of pages, the random generator, a buffer, and the number of repetitions.
type BatchOperation<D> = fn(&D, usize, &mut Rng, &mut Record, usize) -> u64;

#[inline]
fn copy_random_pages<D: PageStore>(
    store: &D,
    pages: usize,
    random: &mut Rng,
    to: &mut Record,
    operations: usize,
) -> u64 {
    let mut wrong = 0;
    for _ in 0..operations {
        let page = random.usize(..pages);
        let is_there = store.copy(page, to);
        // `black_box` makes the compiler copy the whole record, since only its stamp is checked.
        let record = black_box(&*to);
        let is_right = pattern::is_stamped(record, 0, (page * RECORD_BYTES) as u64, 0);
        wrong += u64::from(!(is_there & is_right));
    }
    wrong
}

/// Calls `read` with random pages. Returns how many calls did not return the first word of their page.
#[inline]
fn read_random_words(pages: usize, random: &mut Rng, count: usize, read: impl Fn(usize) -> Option<u64>) -> u64 {
    let mut wrong = 0;
    for _ in 0..count {
        let page = random.usize(..pages);
        wrong += u64::from(black_box(read(page)) != Some(stamp_of_page(page)));
    }
    wrong
}

/// Returns the mean time that a thread needs for one operation, in nanoseconds. All threads use the same pages, each in
/// its own random order.
fn mean_ns_in_threads<D: PageStore>(
    arguments: &HitArguments,
    pages: usize,
    store: &D,
    operation: BatchOperation<D>,
) -> Result<f64, Failure> {
    let start = Barrier::new(arguments.threads);
    let run = Duration::from_millis(arguments.run_ms);
    let work = |index: usize| {
        let mut random = Rng::with_seed(index as u64 + 1);
        // Every subject copies pages into such a page-aligned buffer.
        let mut buffer = Pages::new(RECORD_BYTES)?;
        buffer.touch(0, RECORD_BYTES);
        let to: &mut Record = buffer.bytes_mut(RECORD_BYTES).try_into().map_err(|_| "a short buffer".to_owned())?;
        start.wait();
        // A tenth of the time is warm-up, in which CPUs leave their idle states and caches fill.
        time_repeated(run / 10, || operation(store, pages, &mut random, to, BATCH_OPERATIONS))?;
        time_repeated(run, || operation(store, pages, &mut random, to, BATCH_OPERATIONS))
    };
    let each = run_in_threads(arguments.threads, work)?;
    Ok(each.iter().sum::<f64>() / each.len() as f64)
}

/// Number of page copies, or pins, between two reads of the clock.
const BATCH_OPERATIONS: usize = 128;

fn time_repeated(run: Duration, mut operation: impl FnMut() -> u64) -> Result<f64, Failure> {
    let (begun, mut done, mut wrong) = (Instant::now(), 0, 0);
    while begun.elapsed() < run || done == 0 {
        wrong += operation();
        done += BATCH_OPERATIONS;
    }
    let took = begun.elapsed();
    ensure(wrong == 0, || format!("{wrong} of {done} pages were not what was put there"))?;
    Ok(took.as_nanos() as f64 / done as f64)
}
