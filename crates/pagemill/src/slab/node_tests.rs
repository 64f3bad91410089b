//! Which slabs and blocks a search on a node finds, and how many blocks it visits. Uses the allocator state alone: no
//! object has memory.

use super::candidates::{Criteria, DefragCandidate, MAX_COMPARED};
use super::node::{Node, NodeState, TargetRoom};
use super::shape::Shape;
use super::tests::sparse_slabs;
use crate::arena::Filling;
use crate::units::BLOCK_BYTES;

/// Slabs of a block, and objects of a slab.
const SLABS: usize = 8;
const OBJECTS: usize = 4;

const PASS: u32 = 7;

fn criteria(percent: u32) -> Criteria {
    Criteria { percent, pass: PASS, round: None }
}

/// How blocks get memory, as `is_sparse` has it.
#[derive(Clone, Copy)]
enum BlockKind {
    Whole,
    Sparse,
}

/// Calls `act` with a node that has `blocks` blocks with all objects taken, and with the addresses of these, block by
/// block and slab by slab.
fn with_full_blocks(kind: BlockKind, blocks: usize, act: impl FnOnce(&mut Node<'_>, &[usize])) {
    let slabs = sparse_slabs();
    let shared = slabs.members.with(|_| slabs.shared()).unwrap();
    let slab_bytes = BLOCK_BYTES / SLABS;
    let shape = Shape::new(slab_bytes / OBJECTS, 8, Some(slab_bytes)).unwrap();
    let mut state = NodeState::new();
    let mut node = Node { shape: &shape, blocks: &shared.blocks, state: &mut state };
    for _ in 0..blocks {
        let block = shared.blocks.take(0, Filling::Unknown).unwrap();
        shared.blocks.block(block).is_sparse.set(kind as u32);
        node.add_block(block);
        while let Some((block, slab)) = node.claim_bare() {
            node.open(block, slab);
        }
    }
    let mut objects = vec![0; blocks * SLABS * OBJECTS];
    assert_eq!(node.take(TargetRoom::Any, &mut objects), objects.len());
    objects.sort_unstable();
    act(&mut node, &objects);
    node.check_lists();
}

/// Claims and returns every slab that the search finds; returns how many these were.
fn try_all(node: &mut Node<'_>, criteria: &Criteria) -> usize {
    let mut count = 0;
    while let Some(source) = node.claim_candidate(criteria) {
        let DefragCandidate::Slab(block, slab, _) = source else { panic!("{source:?}") };
        node.open(block, slab);
        count += 1;
    }
    count
}

/// If all slabs are returned unchanged, each is tried once in a pass, and a bounded number of blocks is visited for each.
#[test]
fn a_pass_visits_few_blocks_for_each_slab() {
    for blocks in [50, 200] {
        with_full_blocks(BlockKind::Sparse, blocks, |node, objects| {
            objects.iter().step_by(2).for_each(|object| node.give(*object));
            let tried = try_all(node, &criteria(101));
            assert_eq!(tried, blocks * SLABS);
            let most = tried * MAX_COMPARED + blocks;
            assert!(node.state.searches.visited as usize <= most, "{} {most}", node.state.searches.visited);
        });
    }
}

/// Claims every block that the search finds and returns it at once; returns these blocks in order.
fn try_blocks(node: &mut Node<'_>, criteria: &Criteria) -> Vec<u32> {
    let mut tried = Vec::new();
    while let Some(source) = node.claim_candidate(criteria) {
        let DefragCandidate::Block(block, slabs, _) = source else { panic!("{source:?}") };
        slabs.iter().for_each(|slab| node.open(block, slab));
        node.return_block(block);
        tried.push(block);
    }
    tried
}

/// If all blocks are returned unchanged, each is tried once in a round, the emptiest first, and a bounded number is
/// visited for each.
#[test]
fn a_round_visits_few_blocks_for_each() {
    for blocks in [10, 50, 200] {
        with_full_blocks(BlockKind::Whole, blocks, |node, objects| {
            // One block in three has too many objects left, but is in the same list as others.
            let left = |block: usize| if block.is_multiple_of(3) { 10 } else { 1 + block % 2 * 8 };
            let (mut sparse, mut sparser) = (0, 0);
            for (at, block) in objects.chunks(SLABS * OBJECTS).enumerate() {
                block[left(at)..].iter().for_each(|object| node.give(*object));
                sparse += usize::from(left(at) < 10);
                sparser += usize::from(left(at) == 1);
            }
            for round in [PASS, PASS + 1] {
                let before = node.state.searches.visited;
                let tried = try_blocks(node, &Criteria { percent: 30, pass: round, round: Some(round) });
                assert_eq!(tried.iter().collect::<std::collections::BTreeSet<_>>().len(), sparse);
                assert_eq!(tried.len(), sparse, "each once");
                let used = |block: &u32| node.blocks.block(*block).used.get();
                assert!(
                    tried[..sparser].iter().all(|block| used(block) == 1)
                        && tried[sparser..].iter().all(|block| used(block) == 9)
                );
                let visited = (node.state.searches.visited - before) as usize;
                // The other search, for slabs, visits all blocks once.
                assert!(visited <= sparse * MAX_COMPARED + 2 * blocks, "{visited} {sparse}");
            }
        });
    }
}

/// A block that becomes emptier during a round is found in that round.
#[test]
fn what_changes_in_a_round_is_found_in_it() {
    with_full_blocks(BlockKind::Whole, 40, |node, objects| {
        let block_of = |at: usize| &objects[at * SLABS * OBJECTS..][..SLABS * OBJECTS];
        (0..20).for_each(|at| block_of(at)[9..].iter().for_each(|object| node.give(*object)));
        let criteria = Criteria { percent: 30, pass: PASS, round: Some(PASS) };
        assert_eq!(try_blocks(node, &criteria).len(), 20);
        assert!(!node.has_candidate(&criteria));
        block_of(30)[9..].iter().for_each(|object| node.give(*object));
        assert_eq!(try_blocks(node, &criteria).len(), 1);
    });
}

/// The same for moves to another node, which include full slabs.
#[test]
fn moving_away_visits_few_blocks_for_each_slab() {
    with_full_blocks(BlockKind::Sparse, 100, |node, objects| {
        node.give(objects[0]);
        let mut tried = 0;
        while let Some((block, slab)) = node.claim_next(PASS) {
            node.open(block, slab);
            tried += 1;
        }
        assert_eq!(tried, 100 * SLABS);
        assert!(node.state.searches.visited as usize <= 2 * tried, "{}", node.state.searches.visited);
    });
}

/// In a block without candidates, a slab is found once it is no longer full, or is returned without having been tried.
/// The next pass finds all of them.
#[test]
fn what_changes_in_a_pass_is_found_in_it() {
    with_full_blocks(BlockKind::Sparse, 3, |node, objects| {
        let per_block = SLABS * OBJECTS;
        // One slab of each block but the last is half used.
        [0, 1, per_block, per_block + 1].into_iter().for_each(|at| node.give(objects[at]));
        assert_eq!(try_all(node, &criteria(40)), 0);
        assert_eq!(try_all(node, &criteria(101)), 2);
        assert!(!node.has_candidate(&criteria(101)));
        node.give(objects[2 * per_block]);
        node.give(objects[per_block - 1]);
        assert_eq!(try_all(node, &criteria(101)), 2);
        let Some(DefragCandidate::Slab(block, slab, _)) =
            node.claim_candidate(&Criteria { pass: PASS + 1, ..criteria(101) })
        else {
            panic!("another pass tries all again");
        };
        assert_eq!(try_all(node, &Criteria { pass: PASS + 1, ..criteria(101) }), 3);
        // A slab that was left half done.
        node.blocks.slab(block, slab).tried.set(0);
        node.open(block, slab);
        assert_eq!(try_all(node, &Criteria { pass: PASS + 1, ..criteria(101) }), 1);
    });
}
