//! Workloads of the experiment `pageshift`: files in a page cache with software pages of one size, read by calls and
//! through views.

pub mod device;
pub mod fresh;
pub mod memory;
pub mod repeated;
pub mod small;
pub mod touch;

use std::fs::File;
use std::io::Write;

use pagemill_cache::mapping::policy::{Auto, Never};
use pagemill_cache::mapping::{Mapping, PageCache, Policy, Source};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use rustix::fs::{MemfdFlags, memfd_create};

use super::Failure;
use super::hit::{SPARE_BYTES, cache_in, write_all};
use crate::pattern::{RECORD_BYTES, Records};

/// Makes a cache whose folios have one page of this size each. Without a size, the pages have 4 KiB, and the default
/// policy also makes huge folios.
fn cache(page: Option<PageSize>, limit_bytes: u64, source: Source) -> Result<PageCache, Failure> {
    let policy: Box<dyn Policy> = if page.is_some() { Box::new(Never) } else { Box::new(Auto) };
    cache_in(source, page.map_or(RECORD_BYTES, PageSize::bytes), limit_bytes, policy, true)
}

/// Makes a file of `len_bytes` bytes in a new cache. All its pages are resident, and contain stamped records.
fn cached_file(page: Option<PageSize>, len_bytes: usize, source: Source) -> Result<(PageCache, Mapping), Failure> {
    let cache = cache(page, len_bytes as u64 + SPARE_BYTES, source)?;
    let file = cache.create()?;
    for_all_blocks(len_bytes, |offset, records| write_all(&file, records, offset))?;
    Ok((cache, file))
}

/// Makes a file of `len_bytes` bytes in the kernel's memory, with stamped records.
fn memory_file(len_bytes: usize) -> Result<File, Failure> {
    let mut file = File::from(memfd_create("pagemill-bench", MemfdFlags::CLOEXEC)?);
    for_all_blocks(len_bytes, |_, records| Ok(file.write_all(records)?))?;
    Ok(file)
}

/// Calls `operation` with the offset and the stamped records of each block of 2 MiB, in ascending order.
fn for_all_blocks(
    len_bytes: usize,
    mut operation: impl FnMut(u64, &[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut records = Records::filled(BLOCK_BYTES);
    for offset in (0..len_bytes).step_by(BLOCK_BYTES) {
        operation(offset as u64, &records.stamped_at(0, offset as u64)[..BLOCK_BYTES.min(len_bytes - offset)])?;
    }
    Ok(())
}
