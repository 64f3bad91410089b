//! Walks of the index of a file. One page in six of the file is resident.

use pagemill_cache::mapping::policy::Never;
use pagemill_cache::mapping::{Mapping, PageCache};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_slab::Slabs;

use super::turns::{Turns, walk_for};
use crate::pattern::RECORD_BYTES;
use crate::stats;
use crate::workload::hit::{cache, failed, write_all};
use crate::workload::{Failure, WorkloadResult};

/// One page in this many is resident.
const RESIDENT_ONE_OF: u64 = 6;

/// Number of pages that one leaf node of the index covers.
const NODE_PAGES: u64 = 64;

/// For each node of the file's index, this many nodes of another file are made and freed.
const OTHER_NODES_PER_NODE: u64 = 9;

#[derive(Clone, Debug, clap::Args)]
pub struct Index {
    /// Number of resident pages.
    #[arg(long)]
    pub pages: u64,
    /// In each turn, the file is made again, and the previous file is dropped.
    #[command(flatten)]
    pub turns: Turns,
}

/// Measures the nanoseconds of a walk per resident page.
pub fn run(arguments: &Index) -> WorkloadResult {
    let pages = arguments.pages;
    let nodes = pages * RESIDENT_ONE_OF / NODE_PAGES + 1;
    // The cache has room for two generations of the file, and for the other file.
    let bytes = (2 * pages + OTHER_NODES_PER_NODE * nodes) * RECORD_BYTES as u64;
    let cache = cache(bytes + 32 * BLOCK_BYTES as u64, Box::new(Never), true)?;
    let mut walks = Vec::new();
    // The index nodes of a page cache are in slabs of the process.
    let slabs = super::slabs_without_background_moves()?;
    let moved = move_count(slabs);
    let mut kept = None;
    arguments.turns.run(slabs, |time| {
        let new = make(&cache, pages)?;
        let file = kept.insert(new);
        walk_for(time, &mut walks, || walk(file, pages))
    })?;
    // The sum can be lower than before, because caches that were dropped in between are no longer counted.
    let moved = move_count(slabs).saturating_sub(moved);
    Ok(serde_json::json!({ "ns": stats::median(&walks), "walks": walks.len(), "moved": moved }))
}

/// Returns the number of objects moved so far, over all slab caches.
fn move_count(slabs: &Slabs) -> u64 {
    slabs.list().iter().map(|info| info.moved).sum()
}

/// Makes a file. At the same time makes pages of another file, which is then dropped. So the index nodes of the
/// returned file are scattered.
fn make(cache: &PageCache, pages: u64) -> Result<Mapping, Failure> {
    let (file, other) = (cache.create().map_err(failed)?, cache.create().map_err(failed)?);
    let mut nodes = 0;
    for page in 0..pages {
        let index = page * RESIDENT_ONE_OF;
        write_all(&file, &index.to_ne_bytes(), index * RECORD_BYTES as u64)?;
        if index / NODE_PAGES >= nodes {
            nodes = index / NODE_PAGES + 1;
            for node in (nodes - 1) * OTHER_NODES_PER_NODE..nodes * OTHER_NODES_PER_NODE {
                write_all(&other, &[1], node * NODE_PAGES * RECORD_BYTES as u64)?;
            }
        }
    }
    Ok(file)
}

/// Walks all resident pages and returns their number. Checks their number and the sum of their indexes.
fn walk(file: &Mapping, pages: u64) -> Result<u64, Failure> {
    let (size, page_bytes) = (file.size_bytes(), RECORD_BYTES as u64);
    let (mut count, mut sum, mut from) = (0, 0, 0);
    while from < size {
        let Some(offset) = file.seek_data(from).map_err(failed)? else { break };
        count += 1;
        sum += offset / page_bytes;
        from = (offset / page_bytes + 1) * page_bytes;
    }
    // The expected sum is that of all multiples of `RESIDENT_ONE_OF`.
    if (count, sum) == (pages, RESIDENT_ONE_OF * (pages * pages.saturating_sub(1) / 2)) {
        Ok(count)
    } else {
        Err(Failure::WrongAnswer(format!("{count} of {pages} pages are there, or not where they were")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A walk must find all resident pages, with and without concurrent compaction.
    #[test]
    fn walk_finds_all_pages() {
        for moving in [false, true] {
            let line = run(&Index { pages: 300, turns: Turns { turns: 2, turn_ms: 15, moving } }).expect("a walk");
            assert!(line["ns"].as_f64() > Some(0.0), "{line}");
        }
    }
}
