//! One program on a file that it maps with the crate `memmap2`, and on a view of a page cache. It adds interest to some of
//! the accounts in the file. docs/from-memmap2.md compares the two ways.
//!
//! `cargo run --release -p pagemill --example from_memmap2 -- [MIB]`
#![allow(unsafe_code)] // memmap2

use pagemill::PageCache;
use pagemill::cache::Source;
use pagemill::store::FileStore;
use pagemill::units::PageSize;
use std::error::Error;
use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Memory limit of the page cache in bytes.
const CACHE_BYTES: u64 = 16 << 20;
const RECORD_BYTES: usize = 16;

/// An account: its number and its balance, both little-endian.
type Record = [u8; RECORD_BYTES];

/// Adds interest to an account if it gets some.
fn add_interest(record: &mut Record) -> bool {
    let number = u64::from_le_bytes(*record.first_chunk().expect("a whole record"));
    let balance = u64::from_le_bytes(*record.last_chunk().expect("a whole record"));
    let gets_interest = number.is_multiple_of(7);
    if gets_interest {
        record[8..].copy_from_slice(&(balance + balance / 50).to_le_bytes());
    }
    gets_interest
}

fn with_memmap2(path: &Path) -> Result<usize, Box<dyn Error>> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // SAFETY: no other thread or process changes or truncates the file.
    let mut map = unsafe { memmap2::MmapMut::map_mut(&file)? };
    let mut changed = 0;
    for record in map.chunks_exact_mut(RECORD_BYTES) {
        if add_interest(record.try_into()?) {
            changed += 1;
        }
    }
    map.flush()?;
    Ok(changed)
}

fn with_pagemill(path: &Path) -> Result<usize, Box<dyn Error>> {
    let page = PageSize::new(64 << 10).expect("a page size");
    let cache = PageCache::builder("accounts").limit(CACHE_BYTES).page(page).source(Source::Shared).build()?;
    let file = cache.open(Arc::new(FileStore::open(path)?))?;
    let view = file.view_mut(0..file.size_bytes())?;
    let mut changed = 0;
    for at in (0..file.size_bytes() as usize).step_by(RECORD_BYTES) {
        let mut record = [0; RECORD_BYTES];
        view.read_at(&mut record, at);
        if add_interest(&mut record) {
            view.write_at(&record, at);
            changed += 1;
        }
    }
    file.sync()?;
    assert!(cache.charged_bytes() <= CACHE_BYTES);
    Ok(changed)
}

/// Writes two equal files of `mib` MiB, runs each half of the program on one, and compares the files.
pub fn run(mib: usize) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let (mapped, viewed) = (folder.path().join("mapped"), folder.path().join("viewed"));
    let record = |number: u64| [number.to_le_bytes(), (number * 1000).to_le_bytes()].concat();
    let records = (0..(mib << 20) as u64 / RECORD_BYTES as u64).flat_map(record);
    fs::write(&mapped, records.collect::<Vec<u8>>())?;
    fs::copy(&mapped, &viewed)?;
    let begun = Instant::now();
    let changed_mapped = with_memmap2(&mapped)?;
    let mapped_ms = begun.elapsed().as_millis();
    let changed_viewed = with_pagemill(&viewed)?;
    println!("memmap2 {mapped_ms} ms, Pagemill {} ms", begun.elapsed().as_millis() - mapped_ms);
    assert_eq!(changed_mapped, changed_viewed);
    assert!(fs::read(mapped)? == fs::read(viewed)?, "the files differ");
    Ok(())
}

#[allow(dead_code)] // a test includes this file
fn main() -> Result<(), Box<dyn Error>> {
    run(std::env::args().nth(1).map_or(Ok(64), |mib| mib.parse())?)
}
