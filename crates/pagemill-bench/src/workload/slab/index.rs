//! Walks of the index of a file in the page cache. One page in six of the file is resident.

use pagemill_cache::mapping::policy::Never;
use pagemill_cache::mapping::{Mapping, PageCache};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_slab::Slabs;

use super::turns::{TurnsArguments, repeat_walk_for};
use crate::pattern::RECORD_BYTES;
use crate::stats;
use crate::workload::hit::{cache, write_all};
use crate::workload::{Failure, WorkloadResult, ensure};

/// One page of the file in this many is resident.
const PAGES_PER_RESIDENT_ONE: u64 = 6;

/// Number of pages that one leaf node of the index covers.
const PAGES_PER_NODE: u64 = 64;

/// For each node of the file's index, this many index nodes of another file are made and later freed.
const OTHER_NODES_PER_NODE: u64 = 9;

crate::workload::arguments! {
    IndexArguments:
    /// Number of resident pages of the file.
    pages: u64,
    // In each turn, a new file replaces the previous one.
    ..turns: TurnsArguments,
}

/// Walks the resident pages of a file through its index. The resulting JSON has the median time of a walk divided by
/// the number of pages, in nanoseconds.
pub fn run(arguments: &IndexArguments) -> WorkloadResult {
    let pages = arguments.pages;
    let nodes = pages * PAGES_PER_RESIDENT_ONE / PAGES_PER_NODE + 1;
    // The cache has room for two generations of the file, and for the other file.
    let bytes = (2 * pages + OTHER_NODES_PER_NODE * nodes) * RECORD_BYTES as u64;
    let cache = cache(bytes + 32 * BLOCK_BYTES as u64, Box::new(Never), true)?;
    let mut walks = Vec::new();
    // The index nodes of a page cache are in slabs of the process.
    let slabs = super::slabs_without_background_moves()?;
    let moved = moved_count(slabs);
    let mut kept = None;
    arguments.turns.run(slabs, |time| {
        let new = make_file_with_scattered_nodes(&cache, pages)?;
        let file = kept.insert(new);
        repeat_walk_for(time, &mut walks, || walk(file, pages))
    })?;
    // The sum can be lower than before, because caches that were dropped in between are no longer counted.
    let moved = moved_count(slabs).saturating_sub(moved);
    Ok(serde_json::json!({ "ns": stats::median(&walks), "walks": walks.len(), "moved": moved }))
}

/// Returns the number of objects that all slab caches have moved so far.
fn moved_count(slabs: &Slabs) -> u64 {
    slabs.list().iter().map(|info| info.moved).sum()
}

/// Makes a file with `pages` resident pages. At the same time makes pages of another file, which is then dropped. So
/// the index nodes of the returned file are scattered in memory.
fn make_file_with_scattered_nodes(cache: &PageCache, pages: u64) -> Result<Mapping, Failure> {
    let (file, other) = (cache.create()?, cache.create()?);
    let mut nodes = 0;
    for page in 0..pages {
        let index = page * PAGES_PER_RESIDENT_ONE;
        write_all(&file, &index.to_ne_bytes(), index * RECORD_BYTES as u64)?;
        if index / PAGES_PER_NODE >= nodes {
            nodes = index / PAGES_PER_NODE + 1;
            for node in (nodes - 1) * OTHER_NODES_PER_NODE..nodes * OTHER_NODES_PER_NODE {
                write_all(&other, &[1], node * PAGES_PER_NODE * RECORD_BYTES as u64)?;
            }
        }
    }
    Ok(file)
}

/// Visits all resident pages of the file and returns their number. Fails if their number, or the sum of their indexes,
/// is wrong.
fn walk(file: &Mapping, pages: u64) -> Result<u64, Failure> {
    let (size, page_bytes) = (file.size_bytes(), RECORD_BYTES as u64);
    let (mut count, mut sum, mut from) = (0, 0, 0);
    while from < size {
        let Some(offset) = file.seek_data(from)? else { break };
        count += 1;
        sum += offset / page_bytes;
        from = (offset / page_bytes + 1) * page_bytes;
    }
    // The expected sum is that of all multiples of `PAGES_PER_RESIDENT_ONE`.
    let is_right = (count, sum) == (pages, PAGES_PER_RESIDENT_ONE * (pages * pages.saturating_sub(1) / 2));
    ensure(is_right, || format!("{count} of {pages} pages are there, or not where they were"))?;
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A walk must find all resident pages of the file, whether or not the index nodes are compacted concurrently.
    #[test]
    fn walk_finds_all_pages() {
        for moving in [false, true] {
            let line = run(&IndexArguments { pages: 300, turns: TurnsArguments { turns: 2, turn_ms: 15, moving } })
                .expect("a walk");
            assert!(line["ns"].as_f64() > Some(0.0), "{line}");
        }
    }
}
