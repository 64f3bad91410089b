//! Small files of random lengths in one page cache: the memory that they take.

use fastrand::Rng;
use pagemill_cache::{Mapping, Source};
use pagemill_core::units::{PageSize, parse_bytes};

use super::cache;
use crate::stats::mib;
use crate::workload::hit::{SPARE_BYTES, write_all};
use crate::workload::{WorkloadResult, ensure};

crate::workload::arguments! {
    /// Arguments of a run with many small files in one cache.
    SmallArguments:
    page: PageSize,
    files: usize,
    /// Least length of a file
    #[arg(value_parser = parse_bytes)]
    min_bytes: u64,
    /// Greatest length of a file
    #[arg(value_parser = parse_bytes)]
    max_bytes: u64,
}

/// Makes files and reads them back. The resulting JSON has the memory of their folios, and all memory of the cache,
/// divided by the bytes of the files; and the metadata of all pages of a GiB.
pub fn run(arguments: &SmallArguments) -> WorkloadResult {
    let mut random = Rng::with_seed(16);
    let lengths: Vec<usize> =
        (0..arguments.files).map(|_| random.u64(arguments.min_bytes..=arguments.max_bytes) as usize).collect();
    let data: u64 = lengths.iter().map(|len| *len as u64).sum();
    let page_bytes = arguments.page.bytes();
    let folios: u64 = lengths.iter().map(|len| len.next_multiple_of(page_bytes) as u64).sum();
    let cache = cache(Some(arguments.page), folios + SPARE_BYTES, Source::Ordinary)?;
    let mut files: Vec<Mapping> = Vec::with_capacity(lengths.len());
    let mut bytes = vec![0; arguments.max_bytes as usize];
    for (index, len) in lengths.iter().enumerate() {
        let file = cache.create()?;
        bytes.fill(index as u8);
        write_all(&file, &bytes[..*len], 0)?;
        files.push(file);
    }
    for (index, (file, len)) in files.iter().zip(&lengths).enumerate() {
        let read = file.read_at(&mut bytes, 0)?;
        let is_right = read == *len && bytes[..read].iter().all(|byte| *byte == index as u8);
        ensure(is_right, || format!("file {index} is not what was written"))?;
    }
    let usage = cache.usage();
    let in_folios = usage.huge + usage.small + usage.pinned;
    Ok(serde_json::json!({
        "folio_ratio": in_folios as f64 / data as f64,
        "total_ratio": usage.total() as f64 / data as f64,
        "frames_mib_per_gib": mib(usage.frames) / (in_folios + usage.free) as f64 * f64::from(1 << 30),
    }))
}
