//! Tests of defragmentation in steps, some of them very short. Defragmentation must become suspended, and until then it
//! must have freed enough memory.

use super::*;
use crate::caches::tests::basics::{finish_retired, slabs, slabs_on_nodes, sparse_slabs};
use crate::caches::tests::model::Random;
use crate::caches::tests::owner::{ItemOwner, Items, cache_of, pin};
use pagemill_core::epoch;
use pagemill_core::units::BLOCK_BYTES;
use std::collections::BTreeMap;

/// Number of slabs in a block. A slab has 512 objects, so that few items fill many blocks.
const SLABS_PER_BLOCK: u64 = 2;
const SLAB_BYTES: usize = BLOCK_BYTES / SLABS_PER_BLOCK as usize;
/// Number of objects in a block.
const OBJECTS_PER_BLOCK: u64 = SLABS_PER_BLOCK * 512;

/// Creates a cache with `blocks` full blocks. Returns the cache, and the numbers of the items in each block.
fn with_full_blocks(slabs: &'static Slabs, blocks: u64) -> (OwnerSlab<ItemOwner>, Vec<Vec<u64>>) {
    let cache = cache_of(slabs, Settings::new("steps").slab_bytes(SLAB_BYTES));
    (0..blocks * OBJECTS_PER_BLOCK).for_each(|number| cache.add(number));
    let mut by_block = BTreeMap::<usize, Vec<u64>>::new();
    for number in 0..blocks * OBJECTS_PER_BLOCK {
        by_block.entry(cache.item(number).as_ptr() as usize / BLOCK_BYTES).or_default().push(number);
    }
    assert!(by_block.values().all(|numbers| numbers.len() as u64 == OBJECTS_PER_BLOCK));
    (cache, by_block.into_values().collect())
}

/// Removes all but `left` items of a block, so that each slab of the block still has items. Drains the magazines.
/// Returns the numbers of the remaining items.
fn remove_all_but(cache: &OwnerSlab<ItemOwner>, numbers: &[u64], left: usize) -> Vec<u64> {
    let is_left = |at: usize| at * left / numbers.len() != (at + 1) * left / numbers.len();
    let (kept, gone): (Vec<_>, Vec<_>) = numbers.iter().enumerate().partition(|(at, _)| is_left(*at));
    gone.iter().for_each(|(_, number)| assert!(cache.remove(**number)));
    drop(cache.engine().drain_magazines().unwrap());
    kept.into_iter().map(|(_, number)| *number).collect()
}

/// Runs steps of one slab each until defragmentation is suspended. Returns the number of steps.
fn steps_until_suspended(cache: &OwnerSlab<ItemOwner>, most: u64) -> u64 {
    for steps in 0..most {
        cache.defrag_step(Duration::ZERO).unwrap();
        if cache.engine().passes.is_suspended() {
            return steps;
        }
        finish_retired(cache.engine());
    }
    panic!("it does not come to its end in {most} steps: {:?}", cache.info());
}

/// Forty blocks have only pinned items and come first in their list. They are more blocks than one search compares. The
/// items of twenty other blocks fit into these forty. Steps that empty one slab each must empty all of the twenty
/// blocks.
#[test]
fn blocks_with_pinned_items_do_not_hide_others() {
    let (cache, blocks) = with_full_blocks(slabs(), 60);
    let (refusing, others) = blocks.split_at(40);
    others.iter().for_each(|numbers| _ = remove_all_but(&cache, numbers, 100));
    for numbers in refusing {
        remove_all_but(&cache, numbers, 100).iter().for_each(|number| pin(&cache, *number));
    }

    // Each slab is tried once in a pass, and few passes are needed.
    steps_until_suspended(&cache, 4 * 60 * SLABS_PER_BLOCK);

    cache.engine().shrink().unwrap();
    let info = cache.info().unwrap();
    assert_eq!((info.total.blocks, info.moved), (40, 20 * 100), "{info:?}");
    assert_eq!(info.active, 60 * 100);
    cache.engine().check_state();
}

/// Two blocks have a pinned item each, and less of each block is used than the ratio demands. The unpinned items of one
/// block may be moved into the other block, but not back again.
#[test]
fn blocks_with_pinned_items_do_not_exchange_items_forever() {
    let (cache, blocks) = with_full_blocks(slabs(), 2);
    for numbers in &blocks {
        let left = remove_all_but(&cache, numbers, 130);
        pin(&cache, left[0]);
    }
    for _ in 0..5 {
        cache.engine().passes.end_suspension();
        steps_until_suspended(&cache, 4 * 2 * SLABS_PER_BLOCK);
    }
    let info = cache.info().unwrap();
    assert!(info.moved <= 129 + 2 * 129 && info.total.blocks == 2, "{info:?}");
    cache.engine().check_state();
}

/// A step empties a slab only partly, and a later step finds no other candidate while a reader exists. Defragmentation
/// must not be suspended before the reader has finished. Then the pass must continue with this slab.
#[test]
fn half_emptied_slab_is_continued_after_readers_finish() {
    let (cache, blocks) = with_full_blocks(slabs(), 6);
    cache.set_defrag_used_ratio(100).unwrap();
    remove_all_but(&cache, &blocks[4], 500);
    remove_all_but(&cache, &blocks[5], 40);
    let guard = epoch::pin();
    for _ in 0..3 {
        cache.defrag_step(Duration::ZERO).unwrap();
    }
    assert_eq!(cache.info().unwrap().moved, 20, "one of two slabs");
    drop(guard);
    finish_retired(cache.engine());
    steps_until_suspended(&cache, 4 * 6 * SLABS_PER_BLOCK);
    cache.engine().shrink().unwrap();
    let info = cache.info().unwrap();
    assert_eq!((info.moved, info.total.blocks), (40, 5), "{info:?}");
}

/// Items are added and removed at random between steps of random length, with and without readers. When defragmentation
/// is suspended, the cache must have no more memory than the ratio allows. In addition, the cache may have one little
/// used whole block and one idle block, or with sparse blocks one little used slab and four empty ones.
#[test]
fn ratio_bounds_memory_when_defragmentation_is_suspended() {
    let mut random = Random::seeded("at rest");
    for slabs in [slabs(), sparse_slabs()].into_iter().flat_map(|slabs| [slabs; 15]) {
        let (cache, blocks) = with_full_blocks(slabs, 2 + random.below(7));
        let ratio = [10, 30, 50, 60, 90, 100][random.below(6) as usize];
        cache.set_defrag_used_ratio(ratio).unwrap();
        let most = 1 + random.below(OBJECTS_PER_BLOCK);
        let mut live: Vec<u64> =
            blocks.iter().flat_map(|numbers| remove_all_but(&cache, numbers, random.below(most) as usize)).collect();
        for step in 0..random.below(12) {
            let guard = (random.below(2) == 0).then(epoch::pin);
            cache.defrag_step(Duration::from_micros(random.below(4) * 20)).unwrap();
            match random.below(6) {
                0 => {
                    let more = (1 << 32) + step * OBJECTS_PER_BLOCK..;
                    live.extend(more.take(random.below(200) as usize).inspect(|number| cache.add(*number)));
                }
                1 => {
                    let kept = live.split_off(random.below(1 + live.len() as u64) as usize / 2);
                    std::mem::replace(&mut live, kept).iter().for_each(|number| assert!(cache.remove(*number)));
                }
                _ => {}
            }
            drop(guard);
            if random.below(2) == 0 {
                finish_retired(cache.engine());
            }
        }
        // A change of less than 1/64 of the objects would not end the suspension.
        cache.engine().passes.end_suspension();
        steps_until_suspended(&cache, 1000);
        let (info, live_count) = (cache.info().unwrap(), live.len() as u64);
        assert_eq!((cache.check_all(), info.active), (live_count, live_count));
        let (unit, kept) =
            if cache.engine().new_blocks_are_sparse() { (SLAB_BYTES, 1 + 4) } else { (BLOCK_BYTES, 1 + 1) };
        let per_unit = OBJECTS_PER_BLOCK * unit as u64 / BLOCK_BYTES as u64;
        let more = (info.total.resident_bytes / unit as u64).saturating_sub(kept);
        assert!(more * per_unit * u64::from(ratio) <= live_count * 100, "{ratio} {info:?}");
        cache.engine().check_state();
    }
}

/// Balances four nodes with different numbers of objects. Each node must then have the average number of objects, and
/// only the surplus may be moved.
#[test]
fn balance_gives_each_node_the_average() {
    let cache = cache_of(slabs_on_nodes(4), Settings::new("average"));
    let mut numbers = 0..;
    for (node, count) in [500, 350, 200, 550].into_iter().enumerate() {
        numbers.by_ref().take(count).for_each(|number| cache.add_on(node, number));
    }
    let progress = cache.balance().unwrap();
    let used: Vec<_> = cache.info().unwrap().nodes.iter().map(|node| node.used).collect();
    assert_eq!((used, progress.moved, progress.is_done), (vec![400; 4], 250, true));
}
