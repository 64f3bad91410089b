//! The index of a file in memory, of which one page of six is there, walked from page to page.

use pagemill::mapping::policy::Never;
use pagemill::mapping::{Cache, Mapping};
use pagemill::slab::Slabs;
use pagemill::units::BLOCK_BYTES;

use super::turns::{Turns, walk_for};
use crate::pattern::RECORD_BYTES;
use crate::stats;
use crate::workload::hit::{cache, failed, write};
use crate::workload::{Failure, Outcome};

/// One of so many pages is there.
const STRIDE: u64 = 6;

/// Pages of a node of the index.
const NODE_PAGES: u64 = 64;

/// For each node of the file so many of another come and go.
const OTHERS: u64 = 9;

/// One run.
#[derive(Clone, Debug, clap::Args)]
pub struct Index {
    /// Pages that are there.
    #[arg(long)]
    pub pages: u64,
    /// With each the file is made anew, and the one before goes.
    #[command(flatten)]
    pub turns: Turns,
}

/// Nanoseconds a page that is there.
pub fn run(arguments: &Index) -> Outcome {
    let pages = arguments.pages;
    let nodes = pages * STRIDE / NODE_PAGES + 1;
    // Two generations of the file, and the other one.
    let bytes = (2 * pages + OTHERS * nodes) * RECORD_BYTES as u64;
    let cache = cache(bytes + 32 * BLOCK_BYTES as u64, Box::new(Never), true)?;
    let mut walks = Vec::new();
    // The nodes of a page cache are the process's.
    let slabs = super::by_hand()?;
    let moved = move_count(slabs);
    let mut kept = None;
    arguments.turns.run(slabs, |time| {
        let new = make(&cache, pages)?;
        let file = kept.insert(new);
        walk_for(time, &mut walks, || walk(file, pages))
    })?;
    // Caches of others may have gone meanwhile, with what they counted.
    let moved = move_count(slabs).saturating_sub(moved);
    Ok(serde_json::json!({ "ns": stats::median(&walks), "walks": walks.len(), "moved": moved }))
}

/// Objects of all slabs that were moved.
fn move_count(slabs: &Slabs) -> u64 {
    slabs.list().iter().map(|info| info.moved).sum()
}

/// A file, written by turns with another one that then goes: what is left of their index is one node here and there.
fn make(cache: &Cache, pages: u64) -> Result<Mapping, Failure> {
    let (file, other) = (cache.create().map_err(failed)?, cache.create().map_err(failed)?);
    let mut nodes = 0;
    for page in 0..pages {
        let index = page * STRIDE;
        write(&file, &index.to_ne_bytes(), index * RECORD_BYTES as u64)?;
        if index / NODE_PAGES >= nodes {
            nodes = index / NODE_PAGES + 1;
            for node in (nodes - 1) * OTHERS..nodes * OTHERS {
                write(&other, &[1], node * NODE_PAGES * RECORD_BYTES as u64)?;
            }
        }
    }
    Ok(file)
}

/// Goes from page to page; says how many there are, which are all, where they were.
fn walk(file: &Mapping, pages: u64) -> Result<u64, Failure> {
    let (size, page_bytes) = (file.size_bytes(), RECORD_BYTES as u64);
    let (mut count, mut sum, mut from) = (0, 0, 0);
    while from < size {
        let Some(offset) = file.seek_data(from).map_err(failed)? else { break };
        count += 1;
        sum += offset / page_bytes;
        from = (offset / page_bytes + 1) * page_bytes;
    }
    // Each by its number: one in so many is there.
    if (count, sum) == (pages, STRIDE * (pages * pages.saturating_sub(1) / 2)) {
        Ok(count)
    } else {
        Err(Failure::WrongAnswer(format!("{count} of {pages} pages are there, or not where they were")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All pages are come by, with a thread that packs and without.
    #[test]
    fn all_pages_are_there() {
        for moving in [false, true] {
            let line = run(&Index { pages: 300, turns: Turns { turns: 2, turn_ms: 15, moving } }).expect("a walk");
            assert!(line["ns"].as_f64() > Some(0.0), "{line}");
        }
    }
}
