//! Tests of the searches for candidates for emptying on a node: the slabs and blocks that they find, and the number of
//! blocks that they visit. The tests use only the allocator state; no object has memory.

use crate::alloc::node::{FULL_WITH_BARE_LIST, Node, NodeState, TargetSlabs};
use crate::alloc::shape::Shape;
use crate::caches::tests::basics::sparse_slabs;
use crate::defrag::candidates::{Criteria, DefragCandidate, MAX_COMPARED_BLOCKS};
use pagemill_core::arena::ExpectedUse;
use pagemill_core::units::BLOCK_BYTES;

/// Number of slabs in a block.
const SLABS_PER_BLOCK: usize = 8;
/// Number of objects in a slab.
const OBJECTS_PER_SLAB: usize = 4;

/// Number of the defragmentation pass for which the tests search candidates.
const PASS: u32 = 7;

fn criteria(percent: u32) -> Criteria {
    Criteria { percent, pass: PASS, block_pass: None }
}

/// The kind of a block, as in `is_sparse`.
#[derive(Clone, Copy)]
enum BlockKind {
    Whole,
    Sparse,
}

/// Calls `act` with a node on which all objects of `blocks` blocks are allocated, and with the addresses of these
/// objects in order of blocks and slabs.
fn with_full_blocks(kind: BlockKind, blocks: usize, act: impl FnOnce(&mut Node<'_>, &[usize])) {
    with_blocks(kind, blocks, SLABS_PER_BLOCK, act);
}

/// As [`with_full_blocks`], but only the first `last` slabs of the last block are set up. The others are bare.
fn with_blocks(kind: BlockKind, blocks: usize, last: usize, act: impl FnOnce(&mut Node<'_>, &[usize])) {
    let slabs = sparse_slabs();
    let shared = slabs.caches.with(|_| slabs.shared()).unwrap();
    let slab_bytes = BLOCK_BYTES / SLABS_PER_BLOCK;
    let shape = Shape::new(slab_bytes / OBJECTS_PER_SLAB, 8, Some(slab_bytes)).unwrap();
    let mut state = NodeState::default();
    let mut node = Node { shape: &shape, blocks: &shared.blocks, state: &mut state };
    for at in 0..blocks {
        let block = shared.blocks.allocate(0, ExpectedUse::Unknown).unwrap();
        shared.blocks.block(block).is_sparse.set(kind as u32);
        node.add_block(block);
        for _ in 0..if at + 1 < blocks { SLABS_PER_BLOCK } else { last } {
            let (block, slab) = node.claim_bare().unwrap();
            node.open(block, slab);
        }
    }
    let mut objects = vec![0; ((blocks - 1) * SLABS_PER_BLOCK + last) * OBJECTS_PER_SLAB];
    assert_eq!(node.allocate(TargetSlabs::Any, &mut objects), objects.len());
    objects.sort_unstable();
    act(&mut node, &objects);
    node.check_lists();
}

/// Claims every slab that a search for slabs to empty finds, and opens the slab again unchanged. Returns the number of
/// slabs.
fn try_all_slabs(node: &mut Node<'_>, criteria: &Criteria) -> usize {
    let mut count = 0;
    while let Some(candidate) = node.claim_candidate(criteria) {
        let DefragCandidate::Slab(block, slab, _) = candidate else { panic!("{candidate:?}") };
        node.open(block, slab);
        count += 1;
    }
    count
}

/// All slabs are half used and do not change. A pass must try each slab once, and must visit a bounded number of blocks
/// for each slab.
#[test]
fn slab_search_visits_bounded_blocks_per_slab() {
    for blocks in [50, 200] {
        with_full_blocks(BlockKind::Sparse, blocks, |node, objects| {
            objects.iter().step_by(2).for_each(|object| node.free(*object));
            let tried = try_all_slabs(node, &criteria(101));
            assert_eq!(tried, blocks * SLABS_PER_BLOCK);
            let most = tried * MAX_COMPARED_BLOCKS + blocks;
            assert!(node.state.searches.visited as usize <= most, "{} {most}", node.state.searches.visited);
        });
    }
}

/// Claims every block that a search for blocks to empty finds, and ends the block's emptying without a change. Returns
/// the block numbers in the order in which they were found.
fn try_blocks(node: &mut Node<'_>, criteria: &Criteria) -> Vec<u32> {
    let mut tried = Vec::new();
    while let Some(candidate) = node.claim_candidate(criteria) {
        let DefragCandidate::Block(block, slabs, _) = candidate else { panic!("{candidate:?}") };
        slabs.iter().for_each(|slab| node.open(block, slab));
        node.end_emptying(block);
        tried.push(block);
    }
    tried
}

/// Little used blocks stay unchanged. A block search must try each of these blocks once, the emptiest first, and must
/// visit a bounded number of blocks for each.
#[test]
fn block_search_visits_bounded_blocks_per_block() {
    for blocks in [10, 50, 200] {
        with_full_blocks(BlockKind::Whole, blocks, |node, objects| {
            // One block in three has too many objects for the search, but is in the same list as the others.
            let left = |block: usize| if block.is_multiple_of(3) { 10 } else { 1 + block % 2 * 8 };
            let (mut sparse, mut sparser) = (0, 0);
            for (at, block) in objects.chunks(SLABS_PER_BLOCK * OBJECTS_PER_SLAB).enumerate() {
                block[left(at)..].iter().for_each(|object| node.free(*object));
                sparse += usize::from(left(at) < 10);
                sparser += usize::from(left(at) == 1);
            }
            for block_pass in [PASS, PASS + 1] {
                let before = node.state.searches.visited;
                let tried = try_blocks(node, &Criteria { percent: 30, pass: block_pass, block_pass: Some(block_pass) });
                assert_eq!(tried.iter().collect::<std::collections::BTreeSet<_>>().len(), sparse);
                assert_eq!(tried.len(), sparse, "each once");
                let used = |block: &u32| node.blocks.block(*block).used.get();
                assert!(
                    tried[..sparser].iter().all(|block| used(block) == 1)
                        && tried[sparser..].iter().all(|block| used(block) == 9)
                );
                let visited = (node.state.searches.visited - before) as usize;
                // For each candidate, the slab search visits all blocks once.
                assert!(visited <= sparse * MAX_COMPARED_BLOCKS + 2 * blocks, "{visited} {sparse}");
            }
        });
    }
}

/// During a block search, most objects of a full block are freed. The same search must find this block.
#[test]
fn block_emptied_during_a_pass_is_found() {
    with_full_blocks(BlockKind::Whole, 40, |node, objects| {
        let block_of =
            |at: usize| &objects[at * SLABS_PER_BLOCK * OBJECTS_PER_SLAB..][..SLABS_PER_BLOCK * OBJECTS_PER_SLAB];
        (0..20).for_each(|at| block_of(at)[9..].iter().for_each(|object| node.free(*object)));
        let criteria = Criteria { percent: 30, pass: PASS, block_pass: Some(PASS) };
        assert_eq!(try_blocks(node, &criteria).len(), 20);
        assert!(!node.has_candidate(&criteria));
        block_of(30)[9..].iter().for_each(|object| node.free(*object));
        assert_eq!(try_blocks(node, &criteria).len(), 1);
    });
}

/// A move of objects to another node, which also tries full slabs, must try each slab once and visit a bounded number
/// of blocks for each slab.
#[test]
fn node_move_visits_bounded_blocks_per_slab() {
    with_full_blocks(BlockKind::Sparse, 100, |node, objects| {
        node.free(objects[0]);
        let mut tried = 0;
        while let Some((block, slab)) = node.claim_next_slab(PASS) {
            node.open(block, slab);
            tried += 1;
        }
        assert_eq!(tried, 100 * SLABS_PER_BLOCK);
        assert!(node.state.searches.visited as usize <= 2 * tried, "{}", node.state.searches.visited);
    });
}

/// A pass has found no further candidate. The pass must find a slab again when an object of the slab is freed, or when
/// the slab is opened without having been tried. The next pass must find all slabs.
#[test]
fn slab_changed_during_a_pass_is_found() {
    with_full_blocks(BlockKind::Sparse, 3, |node, objects| {
        let per_block = SLABS_PER_BLOCK * OBJECTS_PER_SLAB;
        // One slab of each block except the last is half used.
        [0, 1, per_block, per_block + 1].into_iter().for_each(|at| node.free(objects[at]));
        assert_eq!(try_all_slabs(node, &criteria(40)), 0);
        assert_eq!(try_all_slabs(node, &criteria(101)), 2);
        assert!(!node.has_candidate(&criteria(101)));
        node.free(objects[2 * per_block]);
        node.free(objects[per_block - 1]);
        assert_eq!(try_all_slabs(node, &criteria(101)), 2);
        let Some(DefragCandidate::Slab(block, slab, _)) =
            node.claim_candidate(&Criteria { pass: PASS + 1, ..criteria(101) })
        else {
            panic!("another pass tries all again");
        };
        assert_eq!(try_all_slabs(node, &Criteria { pass: PASS + 1, ..criteria(101) }), 3);
        // Represents a slab that was emptied partly.
        node.blocks.slab(block, slab).tried.set(0);
        node.open(block, slab);
        assert_eq!(try_all_slabs(node, &Criteria { pass: PASS + 1, ..criteria(101) }), 1);
    });
}

/// Number of objects in a block.
const OBJECTS_PER_BLOCK: usize = SLABS_PER_BLOCK * OBJECTS_PER_SLAB;

/// Frees the last objects of a block, so that `left` objects are left.
fn free_objects_down_to(node: &mut Node<'_>, objects: &[usize], block: usize, left: usize) {
    objects[block * OBJECTS_PER_BLOCK..][left..OBJECTS_PER_BLOCK].iter().for_each(|object| node.free(*object));
}

/// Returns whether a search with these criteria finds a block to empty. Ends the emptying of the block without a
/// change.
fn search_finds_block(node: &mut Node<'_>, criteria: &Criteria) -> bool {
    let has_candidate = node.has_candidate(criteria);
    let found = node.claim_candidate(criteria);
    assert_eq!(found.is_some(), has_candidate);
    let Some(candidate) = found else { return false };
    let DefragCandidate::Block(block, slabs, _) = candidate else { panic!("{candidate:?}") };
    slabs.iter().for_each(|slab| node.open(block, slab));
    node.end_emptying(block);
    true
}

/// A block search must find a block of which less than the search's percentage is used, if its objects fit into other
/// blocks.
#[test]
fn block_is_found_if_little_used_and_its_objects_fit() {
    let criteria = |percent| Criteria { percent, pass: PASS, block_pass: Some(PASS) };
    for (left, percent, is_found) in [(8, 25, false), (7, 25, true), (8, 26, true), (0, 25, false)] {
        with_full_blocks(BlockKind::Whole, 3, |node, objects| {
            free_objects_down_to(node, objects, 0, left);
            free_objects_down_to(node, objects, 1, 20);
            let found = search_finds_block(node, &criteria(percent));
            assert_eq!(found, is_found, "{left} of 32 at {percent} %");
        });
    }
    // The other block has exactly enough free objects, or one too few.
    for (free, is_found) in [(7, true), (6, false)] {
        with_full_blocks(BlockKind::Whole, 2, |node, objects| {
            free_objects_down_to(node, objects, 0, 7);
            free_objects_down_to(node, objects, 1, OBJECTS_PER_BLOCK - free);
            assert_eq!(search_finds_block(node, &criteria(25)), is_found, "7 objects, {free} free elsewhere");
        });
    }
}

/// An idle block must not count as a destination, because emptying another block into it would gain nothing.
#[test]
fn idle_blocks_are_no_destination() {
    with_full_blocks(BlockKind::Whole, 3, |node, objects| {
        free_objects_down_to(node, objects, 0, 7);
        free_objects_down_to(node, objects, 1, 0);
        assert!(!search_finds_block(node, &Criteria { percent: 25, pass: PASS, block_pass: Some(PASS) }));
    });
}

/// An earlier attempt to empty a block left unmovable objects. A search must find this block again only if its objects
/// fit into a block of which at least as many eighths are in use.
#[test]
fn block_with_unmovable_objects_moves_only_to_fuller_blocks() {
    let criteria = Criteria { percent: 60, pass: PASS, block_pass: Some(PASS) };
    for (other, is_found) in [(8, false), (11, false), (12, true), (20, true)] {
        with_full_blocks(BlockKind::Whole, 2, |node, objects| {
            free_objects_down_to(node, objects, 0, 12);
            free_objects_down_to(node, objects, 1, other);
            let first = node.blocks_in_list(12 * 8 / 32 + 1).last();
            let number = first.expect("the block with 12 objects");
            node.blocks.block(number).has_unmovable.set(1);
            // Marks all other blocks as tried, so that only this block may be found.
            let others: Vec<u32> =
                (1..=8).flat_map(|list| node.blocks_in_list(list)).filter(|of| *of != number).collect();
            others.iter().for_each(|other| node.blocks.block(*other).tried.set(PASS));
            let found = node.claim_candidate(&criteria);
            assert_eq!(found.is_some(), is_found, "to a block with {other}: {found:?}");
            if let Some(DefragCandidate::Block(block, slabs, free)) = found {
                assert_eq!((block, free), (number, TargetSlabs::Fuller(12)));
                slabs.iter().for_each(|slab| node.open(block, slab));
                node.end_emptying(block);
            }
        });
    }
}

/// A slab search must find the emptiest slab of which less than the search's percentage is used, if at least one of its
/// objects fits elsewhere. Slabs of whole blocks must be found only above 100 %.
#[test]
fn slab_is_found_if_little_used_and_an_object_fits() {
    for (kind, used, percent, is_found) in [
        (BlockKind::Sparse, 2, 50, false),
        (BlockKind::Sparse, 2, 51, true),
        (BlockKind::Sparse, 1, 50, true),
        (BlockKind::Whole, 1, 100, false),
        (BlockKind::Whole, 1, 101, true),
    ] {
        with_full_blocks(kind, 2, |node, objects| {
            objects[used..OBJECTS_PER_SLAB].iter().for_each(|object| node.free(*object));
            // Another slab can take one object.
            node.free(objects[OBJECTS_PER_BLOCK]);
            assert_eq!(node.has_candidate(&criteria(percent)), is_found);
            let found = node.claim_candidate(&criteria(percent));
            let Some(DefragCandidate::Slab(block, slab, most)) = found else {
                return assert!(!is_found && found.is_none(), "{used} of 4 at {percent} %: {found:?}");
            };
            assert!(is_found && node.blocks.slab(block, slab).used_objects() == used as u32);
            assert_eq!(most, 1, "one fits elsewhere");
            node.open(block, slab);
        });
    }
    with_full_blocks(BlockKind::Sparse, 1, |node, objects| {
        node.free(objects[0]);
        assert_eq!(node.claim_candidate(&criteria(101)), None, "there is no free object elsewhere");
        node.free(objects[1]);
        node.free(objects[OBJECTS_PER_SLAB]);
        node.free(objects[OBJECTS_PER_SLAB + 1]);
        node.free(objects[OBJECTS_PER_SLAB + 2]);
        let Some(DefragCandidate::Slab(block, slab, most)) = node.claim_candidate(&criteria(101)) else {
            panic!("the emptiest")
        };
        assert_eq!((node.blocks.slab(block, slab).used_objects(), most), (1, 1));
        node.open(block, slab);
    });
}

/// `claim_half_used_block` must claim the emptiest block if it is whole, at most half used, and has no claimed slab.
#[test]
fn only_half_used_whole_blocks_are_split_up() {
    for (kind, left, is_found) in [
        (BlockKind::Whole, 16, true),
        (BlockKind::Whole, 17, false),
        (BlockKind::Sparse, 16, false),
        (BlockKind::Whole, 0, false),
    ] {
        with_full_blocks(kind, 2, |node, objects| {
            free_objects_down_to(node, objects, 0, left);
            let found = node.claim_half_used_block();
            assert_eq!(found.is_some(), is_found, "{left} of 32: {found:?}");
            if let Some((block, slabs)) = found {
                assert_eq!((slabs.iter().count(), node.blocks.block(block).tried.get()), (SLABS_PER_BLOCK, 0));
                slabs.iter().for_each(|slab| node.open(block, slab));
                node.end_emptying(block);
                assert_eq!(node.blocks.block(block).has_unmovable.get(), 0, "it was not tried in a pass");
                let (block, slab) = node.claim_next_slab(PASS).unwrap();
                assert_eq!(node.claim_half_used_block(), None, "a slab is claimed");
                node.open(block, slab);
            }
        });
    }
}

/// A block that was tried and still has objects must be marked as having unmovable objects. A block that became empty
/// must not be marked.
#[test]
fn block_that_keeps_objects_is_marked_unmovable() {
    for left in [7, 0] {
        with_full_blocks(BlockKind::Whole, 2, |node, objects| {
            free_objects_down_to(node, objects, 0, 7);
            free_objects_down_to(node, objects, 1, 20);
            let criteria = Criteria { percent: 25, pass: PASS, block_pass: Some(PASS) };
            let Some(DefragCandidate::Block(block, slabs, TargetSlabs::InUse)) = node.claim_candidate(&criteria) else {
                panic!("sparse")
            };
            objects[left..7].iter().for_each(|object| node.free(*object));
            slabs.iter().for_each(|slab| node.open(block, slab));
            node.end_emptying(block);
            assert_eq!(node.blocks.block(block).has_unmovable.get(), u32::from(left > 0));
        });
    }
}

/// Bare slabs of another whole block must count as destinations of a block's objects. Bare slabs of the block itself
/// must not count.
#[test]
fn bare_slabs_of_other_blocks_are_destinations() {
    let criteria = Criteria { percent: 40, pass: PASS, block_pass: Some(PASS) };
    for (left, is_found) in [(8, true), (9, false)] {
        with_blocks(BlockKind::Whole, 2, SLABS_PER_BLOCK - 2, |node, objects| {
            free_objects_down_to(node, objects, 0, left);
            assert_eq!(search_finds_block(node, &criteria), is_found, "{left} objects, two bare slabs of 4");
        });
    }
    with_blocks(BlockKind::Whole, 2, 2, |node, _| assert!(!search_finds_block(node, &criteria)));
}

/// The set-up slabs of a block are full, and its other slabs are bare. A search must find the block if it is whole,
/// because its bare slabs have memory, but not if it is sparse. Once tried, the block must not be found again in the
/// same search.
#[test]
fn block_of_full_slabs_is_emptied_only_if_whole() {
    for (kind, is_found) in [(BlockKind::Whole, true), (BlockKind::Sparse, false)] {
        with_blocks(kind, 2, 2, |node, objects| {
            let block = node.blocks.number_of(objects[OBJECTS_PER_BLOCK]);
            free_objects_down_to(node, objects, 0, OBJECTS_PER_BLOCK - 10);
            let criteria = Criteria { percent: 30, pass: PASS, block_pass: Some(PASS) };
            assert_eq!(node.blocks_in_list(FULL_WITH_BARE_LIST).collect::<Vec<_>>(), [block]);
            assert_eq!(search_finds_block(node, &criteria), is_found);
            assert!(!search_finds_block(node, &criteria));
            node.blocks.block(block).has_unmovable.set(0);
            assert_eq!(search_finds_block(node, &Criteria { block_pass: Some(PASS + 1), ..criteria }), is_found);
        });
    }
}

/// `first_blocks_of` must return only those blocks of a list that have at least the given number of objects in use.
#[test]
fn first_blocks_of_a_list_meet_the_minimum_use() {
    with_full_blocks(BlockKind::Whole, 3, |node, objects| {
        let used = [12, 13, 15];
        used.into_iter().enumerate().for_each(|(block, left)| free_objects_down_to(node, objects, block, left));
        let list = node.list_for_use(12);
        for (least, count) in [(0, 3), (12, 3), (13, 2), (15, 1), (16, 0)] {
            let found: Vec<u32> =
                node.first_blocks_of(list, least).map(|block| node.blocks.block(block).used.get()).collect();
            assert_eq!(found.len(), count, "{found:?}");
            assert!(found.iter().all(|used| *used >= least), "{found:?}");
        }
    });
}

/// Empty slabs must not count as destinations of another slab's objects.
#[test]
fn empty_slabs_are_no_destination() {
    with_full_blocks(BlockKind::Sparse, 1, |node, objects| {
        objects[1..2 * OBJECTS_PER_SLAB].iter().for_each(|object| node.free(*object));
        assert_eq!(node.claim_candidate(&criteria(101)), None);
        node.free(objects[2 * OBJECTS_PER_SLAB]);
        let Some(DefragCandidate::Slab(block, slab, 1)) = node.claim_candidate(&criteria(101)) else {
            panic!("one slab has free objects")
        };
        node.open(block, slab);
    });
}

/// A move of objects to another node must claim each slab that has objects once, and must claim no slab that is claimed
/// already.
#[test]
fn node_move_claims_each_used_slab_once() {
    with_full_blocks(BlockKind::Sparse, 2, |node, objects| {
        objects[..OBJECTS_PER_SLAB].iter().for_each(|object| node.free(*object));
        let (block, slab) = node.claim_next_slab(PASS - 1).unwrap();
        let mut claimed = vec![(block, slab)];
        claimed.extend(std::iter::from_fn(|| node.claim_next_slab(PASS)));
        let used: Vec<u32> =
            claimed.iter().map(|(block, slab)| node.blocks.slab(*block, *slab).used_objects()).collect();
        assert_eq!(used, [OBJECTS_PER_SLAB as u32; 2 * SLABS_PER_BLOCK - 1]);
        claimed.iter().for_each(|(block, slab)| node.open(*block, *slab));
    });
}
