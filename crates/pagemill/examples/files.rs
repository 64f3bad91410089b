//! Two files of a page cache: one in memory only, and one on disk. The file on disk may be larger than the cache, and
//! is fetched many pages at a time.
//!
//! `cargo run --release -p pagemill --example files -- FILE`

use pagemill::cache::{Advice, Fetch, Mapping, Reuse};
use pagemill::store::FileStore;
use pagemill::units::PageSize;
use pagemill::{PageCache, Result};
use std::sync::Arc;
use std::time::Duration;

/// Memory limit of the page cache in bytes.
const CACHE_BYTES: u64 = 64 << 20;
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let page = PageSize::new(64 << 10).expect("a page size");
    let cache = PageCache::builder("tiles").limit(CACHE_BYTES).page(page).build()?;
    use_file_in_memory(&cache)?;
    if let Some(path) = std::env::args_os().nth(1) {
        let file = cache.open(Arc::new(FileStore::open_read_only(path)?))?;
        println!("{} bytes, of which {} differ from 0", file.size_bytes(), count_by_queue(&cache, &file)?);
        assert_eq!(count_in_order(&file)?, count_by_queue(&cache, &file)?);
    }
    println!("{:?}", cache.usage());
    Ok(())
}

/// Writes to a file without a store, whose pages stay in memory within the limit. Then punches a hole into the file,
/// which frees memory.
fn use_file_in_memory(cache: &PageCache) -> Result<()> {
    let file = cache.create()?;
    let mut bytes = [7; 1000];
    assert_eq!(file.write_at(&bytes, 5_000_000)?, bytes.len());
    let pin = file.pin(5_000_000)?;
    pin.read_at(&mut bytes[..10], 990);
    drop(pin);
    file.punch_hole(0, file.size_bytes())?;
    assert_eq!(file.read_at(&mut bytes, 5_000_000)?, 1000);
    assert_eq!(bytes, [0; 1000]);
    Ok(())
}

/// Counts the bytes of a file that are not zero, in the order of the file. Readahead fetches the next part during the
/// count. Pages that were read are evicted first.
fn count_in_order(file: &Mapping) -> Result<usize> {
    file.advise(Advice::Sequential);
    file.advise_reuse(Reuse::Once);
    let (mut bytes, mut offset, mut sum) = (vec![0; 10_000], 0, 0);
    loop {
        let len = file.read_at(&mut bytes, offset)?;
        if len == 0 {
            return Ok(sum);
        }
        sum += bytes[..len].iter().filter(|byte| **byte != 0).count();
        offset += len as u64;
    }
}

/// Counts the bytes of a file that are not zero, with as many pages in flight as the queue holds.
fn count_by_queue(cache: &PageCache, file: &Mapping) -> Result<usize> {
    let mut queue = cache.queue(32)?;
    let mut page = vec![0; cache.page().bytes()];
    let mut count = |offset: u64| -> Result<usize> {
        let len = file.read_at(&mut page, offset)?;
        Ok(page[..len].iter().filter(|byte| **byte != 0).count())
    };
    let (mut sum, mut next) = (0, 0);
    while next < file.size_bytes() || !queue.is_empty() {
        while next < file.size_bytes() && !queue.is_full() {
            if queue.fetch(file, next, next)? == Fetch::Present {
                sum += count(next)?;
            }
            next += cache.page().bytes() as u64;
        }
        queue.wait(1, WAIT_TIMEOUT)?;
        while let Some(fetched) = queue.next() {
            fetched.result?;
            sum += count(fetched.token)?;
        }
    }
    Ok(sum)
}
