//! The loop of the patches of 2007: a program reads a file of 100 MiB again and again into memory from `malloc`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Instant;

use pagemill_cache::{Mapping, PageCache, Source};
use pagemill_core::units::PageSize;

use super::{cached_file, for_all_blocks, memory_file};
use crate::files::FilePlace;
use crate::native::{self, Pages};
use crate::pattern;
use crate::stats;
use crate::workload::{Failure, WorkloadResult, ensure};

crate::workload::arguments! {
    /// Arguments of a run that reads a resident file again and again.
    RepeatedArguments:
    /// The file lies in a page cache of this process, whose pages have this size
    page: Option<PageSize>,
    len_bytes: usize,
    passes: usize,
    /// Pagemill's allocator must serve `malloc`
    preloaded: bool,
    ..place: Option<FilePlace>,
}

/// The file that is read.
enum ReadFile {
    Cached { file: Mapping, _cache: PageCache },
    Kernel(File),
}

impl ReadFile {
    fn make(arguments: &RepeatedArguments) -> Result<Self, Failure> {
        let len_bytes = arguments.len_bytes;
        if let Some(page) = arguments.page {
            let (cache, file) = cached_file(Some(page), len_bytes, Source::Ordinary)?;
            return Ok(Self::Cached { file, _cache: cache });
        }
        let Some(place) = &arguments.place else {
            return Ok(Self::Kernel(memory_file(len_bytes)?));
        };
        place.check()?;
        let path = place.folder.join("pageshift");
        let file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        for_all_blocks(len_bytes, |offset, records| Ok(file.write_all_at(records, offset)?))?;
        Ok(Self::Kernel(file))
    }

    /// Reads the whole file by as few calls as possible.
    fn read(&self, to: &mut [u8]) -> Result<(), Failure> {
        let mut done = 0;
        while done < to.len() {
            let (rest, offset) = (&mut to[done..], done as u64);
            let read = match self {
                Self::Cached { file, .. } => file.read_at(rest, offset)?,
                Self::Kernel(file) => file.read_at(rest, offset)?,
            };
            ensure(read > 0, || format!("the file ends at {offset}"))?;
            done += read;
        }
        Ok(())
    }
}

/// Reads the file once into new memory, then again and again. The resulting JSON has the time and the page faults of the
/// first pass, and the median time of the others. Each pass is compared with what was written.
pub fn run(arguments: &RepeatedArguments) -> WorkloadResult {
    if arguments.preloaded && !native::malloc_library().is_some_and(|path| path.to_string_lossy().contains("pagemill"))
    {
        return Err("Pagemill's allocator does not serve malloc".into());
    }
    let source = ReadFile::make(arguments)?;
    // This is a `calloc` of memory that no page backs yet, which writes nothing.
    let mut bytes = vec![0; arguments.len_bytes];
    let (begun, faults) = (Instant::now(), Pages::faults());
    source.read(&mut bytes)?;
    let (first, faults) = (begun.elapsed(), Pages::faults() - faults);
    ensure(pattern::is_intact(&bytes, 0, 0), || "the first pass read other bytes than were written")?;
    let mut times = Vec::with_capacity(arguments.passes);
    for pass in 0..arguments.passes {
        for stamp in bytes.chunks_mut(pattern::RECORD_BYTES) {
            stamp[..8].fill(0);
        }
        let begun = Instant::now();
        source.read(&mut bytes)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
        let mut records = bytes.chunks(pattern::RECORD_BYTES).zip((0..).step_by(pattern::RECORD_BYTES));
        let is_right = records.all(|(record, offset)| pattern::is_stamped(record, 0, offset, 0));
        ensure(is_right, || format!("pass {pass} read other bytes than were written"))?;
    }
    Ok(serde_json::json!({
        "first_us": first.as_secs_f64() * 1e6,
        "first_faults": faults,
        "again_us": stats::median(&times),
    }))
}
