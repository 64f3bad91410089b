//! The page cache as a subject, with one large file and with many small files.

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{FolioHint, Mapping, PageCache, Policy, Source, Writeback};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_testbed::Testbed;

use super::{PageStore, Record, Subject, for_all_records, resident_bytes};
use crate::pattern::RECORD_BYTES;
use crate::workload::{Failure, WorkloadResult, ensure};

/// Bytes by which the limit of a cache exceeds its data, so that the cache does not come near the limit.
pub const SPARE_BYTES: u64 = 32 * BLOCK_BYTES as u64;

/// A file in a page cache, with all its pages resident.
pub struct CachedFile {
    cache: PageCache,
    file: Mapping,
    pages: usize,
    /// The hint of each page.
    hints: Vec<FolioHint>,
}

/// Makes a page cache whose pages have the size of a record.
pub fn cache(limit_bytes: u64, policy: Box<dyn Policy>, may_split: bool) -> Result<PageCache, Failure> {
    cache_of(RECORD_BYTES, limit_bytes, policy, may_split)
}

/// Makes a page cache with pages of `page_bytes` bytes.
pub fn cache_of(
    page_bytes: usize,
    limit_bytes: u64,
    policy: Box<dyn Policy>,
    may_split: bool,
) -> Result<PageCache, Failure> {
    cache_in(Source::Ordinary, page_bytes, limit_bytes, policy, may_split)
}

/// As [`cache_of`], but the cache uses memory of the given kind.
pub fn cache_in(
    source: Source,
    page_bytes: usize,
    limit_bytes: u64,
    policy: Box<dyn Policy>,
    may_split: bool,
) -> Result<PageCache, Failure> {
    let page = PageSize::new(page_bytes).ok_or("no such page size here")?;
    let pagemill = Testbed::of_process()?;
    // Without this call, the background thread could collapse small folios into huge ones.
    pagemill.caches.collapse_by_hand();
    // With these percentages, dirty pages are written back only when the workload requests it.
    let writeback = Writeback::default().background_percent(100).most_percent(100);
    let settings = PageCache::builder("bench").source(source).limit(limit_bytes).page(page).writeback(writeback);
    settings.policy(policy).split(may_split).build_in(pagemill.caches).map_err(Failure::from)
}

impl CachedFile {
    /// Makes a file in a new cache, fills it, and checks that its folios are of the requested kind, huge or dense.
    pub fn new(pages: usize, folios: Subject, source: Source) -> Result<Self, Failure> {
        let is_huge = folios == Subject::Huge;
        let bytes = (pages * RECORD_BYTES) as u64;
        let policy: Box<dyn Policy> = if is_huge { Box::new(Always) } else { Box::new(Never) };
        let cache = cache_in(source, RECORD_BYTES, bytes + SPARE_BYTES, policy, true)?;
        let file = cache.create()?;
        for_all_records(pages, |offset, records| write_all(&file, records, offset as u64))?;
        let usage = cache.usage();
        let expected = if is_huge { (bytes, 0) } else { (0, bytes) };
        if (usage.huge, usage.small) != expected {
            return Err(format!("{folios:?}: the file lies elsewhere: {usage:?}").into());
        }
        let mut hints = vec![FolioHint::default(); pages];
        for (page, hint) in hints.iter_mut().enumerate() {
            drop(file.pin_hinted(hint, (page * RECORD_BYTES) as u64)?);
        }
        Ok(Self { cache, file, pages, hints })
    }
}

pub fn write_all(file: &Mapping, bytes: &[u8], offset: u64) -> Result<(), Failure> {
    match file.write_at(bytes, offset)? {
        written if written == bytes.len() => Ok(()),
        written => Err(format!("of {} bytes {written} were written", bytes.len()).into()),
    }
}

impl PageStore for CachedFile {
    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        self.file.read_at(to, (page * RECORD_BYTES) as u64).is_ok_and(|bytes| bytes == RECORD_BYTES)
    }

    #[inline]
    fn pin(&self, page: usize) -> Option<u64> {
        Some(self.file.pin((page * RECORD_BYTES) as u64).map_or(0, |pin| pin.read_u64(0)))
    }

    #[inline]
    fn pin_hinted(&self, page: usize) -> Option<u64> {
        let mut hint = self.hints[page];
        let pin = self.file.pin_hinted(&mut hint, (page * RECORD_BYTES) as u64);
        Some(pin.map_or(0, |pin| pin.read_u64(0)))
    }

    #[inline]
    fn read_hinted(&self, page: usize) -> Option<u64> {
        let (mut hint, mut word) = (self.hints[page], [0; 8]);
        let read = self.file.read_at_hinted(&mut hint, &mut word, (page * RECORD_BYTES) as u64);
        Some(read.map_or(0, |_| u64::from_le_bytes(word)))
    }

    fn extra_metrics(&self) -> Vec<(&'static str, f64)> {
        let usage = self.cache.usage();
        let each = |bytes: u64| bytes as f64 / self.pages as f64;
        let mut extra_metrics = vec![("frames_bytes", each(usage.frames))];
        // An index of single pages needs at least one pointer per page. A smaller value must be wrong and is not
        // reported.
        if usage.small == 0 || each(usage.index) >= 8.0 {
            extra_metrics.push(("index_bytes", each(usage.index)));
        }
        extra_metrics
    }
}

crate::workload::arguments! {
    /// Arguments of a run with many small files in one cache.
    SmallFilesArguments:
    files: usize,
    bytes: usize,
}

/// Measures the memory that the files use, divided by their bytes rounded up to pages. The resulting JSON has this
/// ratio for the memory that the kernel counts, and for the memory that the cache counts.
pub fn measure_files(arguments: &SmallFilesArguments) -> WorkloadResult {
    let rounded = (arguments.files * arguments.bytes.next_multiple_of(RECORD_BYTES)) as f64;
    let mut files: Vec<Mapping> = Vec::with_capacity(arguments.files);
    let byte = |file: usize| file as u8;
    let before = resident_bytes()?;
    let cache = cache(2 * rounded as u64 + SPARE_BYTES, Box::new(pagemill_cache::mapping::policy::Auto), true)?;
    let mut bytes = vec![0; arguments.bytes];
    for index in 0..arguments.files {
        let file = cache.create()?;
        bytes.fill(byte(index));
        write_all(&file, &bytes, 0)?;
        files.push(file);
    }
    let grown = resident_bytes()?.saturating_sub(before);
    for (index, file) in files.iter().enumerate() {
        let read = file.read_at(&mut bytes, 0)?;
        let is_whole = read == bytes.len() && file.size_bytes() == read as u64;
        let is_right = is_whole && bytes.iter().all(|found| *found == byte(index));
        ensure(is_right, || format!("file {index} is not what was written"))?;
    }
    let total = cache.usage().total();
    Ok(serde_json::json!({ "resident_ratio": grown as f64 / rounded, "counted_ratio": total as f64 / rounded }))
}
