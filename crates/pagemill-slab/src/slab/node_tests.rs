//! Which slabs and blocks a search on a node finds, and how many blocks it visits. Uses the allocator state alone: no
//! object has memory.

use super::candidates::{Criteria, DefragCandidate, MAX_COMPARED};
use super::node::{GROWING, Node, NodeState, TargetRoom};
use super::shape::Shape;
use super::tests::sparse_slabs;
use pagemill_core::arena::Filling;
use pagemill_core::units::BLOCK_BYTES;

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
    with_blocks(kind, blocks, SLABS, act);
}

/// As [`with_full_blocks`], but only `last` slabs of the last block are set up. The others are bare.
fn with_blocks(kind: BlockKind, blocks: usize, last: usize, act: impl FnOnce(&mut Node<'_>, &[usize])) {
    let slabs = sparse_slabs();
    let shared = slabs.members.with(|_| slabs.shared()).unwrap();
    let slab_bytes = BLOCK_BYTES / SLABS;
    let shape = Shape::new(slab_bytes / OBJECTS, 8, Some(slab_bytes)).unwrap();
    let mut state = NodeState::new();
    let mut node = Node { shape: &shape, blocks: &shared.blocks, state: &mut state };
    for at in 0..blocks {
        let block = shared.blocks.take(0, Filling::Unknown).unwrap();
        shared.blocks.block(block).is_sparse.set(kind as u32);
        node.add_block(block);
        for _ in 0..if at + 1 < blocks { SLABS } else { last } {
            let (block, slab) = node.claim_bare().unwrap();
            node.open(block, slab);
        }
    }
    let mut objects = vec![0; ((blocks - 1) * SLABS + last) * OBJECTS];
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

/// Objects of a block.
const BLOCK: usize = SLABS * OBJECTS;

/// Leaves so many objects of a block, those of its first slabs.
fn leave_in(node: &mut Node<'_>, objects: &[usize], block: usize, left: usize) {
    objects[block * BLOCK..][left..BLOCK].iter().for_each(|object| node.give(*object));
}

/// Whether the search finds a block. It is returned at once.
fn finds_block(node: &mut Node<'_>, criteria: &Criteria) -> bool {
    let has_candidate = node.has_candidate(criteria);
    let found = node.claim_candidate(criteria);
    assert_eq!(found.is_some(), has_candidate);
    let Some(candidate) = found else { return false };
    let DefragCandidate::Block(block, slabs, _) = candidate else { panic!("{candidate:?}") };
    slabs.iter().for_each(|slab| node.open(block, slab));
    node.return_block(block);
    true
}

/// The search for blocks finds what is used by less than its percentage, if the objects fit into others.
#[test]
fn a_block_is_found_if_sparse_and_if_its_objects_fit() {
    let criteria = |percent| Criteria { percent, pass: PASS, round: Some(PASS) };
    for (left, percent, is_found) in [(8, 25, false), (7, 25, true), (8, 26, true), (0, 25, false)] {
        with_full_blocks(BlockKind::Whole, 3, |node, objects| {
            leave_in(node, objects, 0, left);
            leave_in(node, objects, 1, 20);
            let found = finds_block(node, &criteria(percent));
            assert_eq!(found, is_found, "{left} of 32 at {percent} %");
        });
    }
    // In the other block with room there is exactly enough, or one too little.
    for (room, is_found) in [(7, true), (6, false)] {
        with_full_blocks(BlockKind::Whole, 2, |node, objects| {
            leave_in(node, objects, 0, 7);
            leave_in(node, objects, 1, BLOCK - room);
            assert_eq!(finds_block(node, &criteria(25)), is_found, "7 objects, room for {room}");
        });
    }
}

/// Idle blocks are no room for the objects of a block, because emptying it would gain nothing.
#[test]
fn an_idle_block_is_no_room() {
    with_full_blocks(BlockKind::Whole, 3, |node, objects| {
        leave_in(node, objects, 0, 7);
        leave_in(node, objects, 1, 0);
        assert!(!finds_block(node, &Criteria { percent: 25, pass: PASS, round: Some(PASS) }));
    });
}

/// A block that kept objects when it was emptied gives them only to blocks that are as full, by eighths.
#[test]
fn a_block_that_refused_moves_to_fuller_ones() {
    let criteria = Criteria { percent: 60, pass: PASS, round: Some(PASS) };
    for (other, is_found) in [(8, false), (11, false), (12, true), (20, true)] {
        with_full_blocks(BlockKind::Whole, 2, |node, objects| {
            leave_in(node, objects, 0, 12);
            leave_in(node, objects, 1, other);
            let first = node.list(12 * 8 / 32 + 1).last();
            let number = first.expect("the block with 12 objects");
            node.blocks.block(number).has_refused.set(1);
            // Only this block may be found.
            let others: Vec<u32> = (1..=8).flat_map(|list| node.list(list)).filter(|of| *of != number).collect();
            others.iter().for_each(|other| node.blocks.block(*other).tried.set(PASS));
            let found = node.claim_candidate(&criteria);
            assert_eq!(found.is_some(), is_found, "to a block with {other}: {found:?}");
            if let Some(DefragCandidate::Block(block, slabs, room)) = found {
                assert_eq!((block, room), (number, TargetRoom::Fuller(12)));
                slabs.iter().for_each(|slab| node.open(block, slab));
                node.return_block(block);
            }
        });
    }
}

/// The search for slabs finds the emptiest slab that is used by less than its percentage; in whole blocks, only if
/// everything is packed. Not all objects may fit elsewhere.
#[test]
fn a_slab_is_found_if_sparse_and_if_an_object_fits() {
    for (kind, used, percent, is_found) in [
        (BlockKind::Sparse, 2, 50, false),
        (BlockKind::Sparse, 2, 51, true),
        (BlockKind::Sparse, 1, 50, true),
        (BlockKind::Whole, 1, 100, false),
        (BlockKind::Whole, 1, 101, true),
    ] {
        with_full_blocks(kind, 2, |node, objects| {
            objects[used..OBJECTS].iter().for_each(|object| node.give(*object));
            // Another slab has room for one.
            node.give(objects[BLOCK]);
            assert_eq!(node.has_candidate(&criteria(percent)), is_found);
            let found = node.claim_candidate(&criteria(percent));
            let Some(DefragCandidate::Slab(block, slab, most)) = found else {
                return assert!(!is_found && found.is_none(), "{used} of 4 at {percent} %: {found:?}");
            };
            assert!(is_found && node.blocks.slab(block, slab).used() == used as u32);
            assert_eq!(most, 1, "one fits elsewhere");
            node.open(block, slab);
        });
    }
    with_full_blocks(BlockKind::Sparse, 1, |node, objects| {
        node.give(objects[0]);
        assert_eq!(node.claim_candidate(&criteria(101)), None, "there is no room elsewhere");
        node.give(objects[1]);
        node.give(objects[OBJECTS]);
        node.give(objects[OBJECTS + 1]);
        node.give(objects[OBJECTS + 2]);
        let Some(DefragCandidate::Slab(block, slab, most)) = node.claim_candidate(&criteria(101)) else {
            panic!("the emptiest")
        };
        assert_eq!((node.blocks.slab(block, slab).used(), most), (1, 1));
        node.open(block, slab);
    });
}

/// The emptiest block is split up if it is whole, at most half used, and has no claimed slab.
#[test]
fn at_most_half_of_a_block_is_split_up() {
    for (kind, left, is_found) in [
        (BlockKind::Whole, 16, true),
        (BlockKind::Whole, 17, false),
        (BlockKind::Sparse, 16, false),
        (BlockKind::Whole, 0, false),
    ] {
        with_full_blocks(kind, 2, |node, objects| {
            leave_in(node, objects, 0, left);
            let found = node.claim_emptiest();
            assert_eq!(found.is_some(), is_found, "{left} of 32: {found:?}");
            if let Some((block, slabs)) = found {
                assert_eq!((slabs.iter().count(), node.blocks.block(block).tried.get()), (SLABS, 0));
                slabs.iter().for_each(|slab| node.open(block, slab));
                node.return_block(block);
                assert_eq!(node.blocks.block(block).has_refused.get(), 0, "it was not tried in a round");
                let (block, slab) = node.claim_next(PASS).unwrap();
                assert_eq!(node.claim_emptiest(), None, "a slab is claimed");
                node.open(block, slab);
            }
        });
    }
}

/// A block that was tried in a round and still has objects is marked; an empty one is not.
#[test]
fn a_block_that_kept_objects_is_marked() {
    for left in [7, 0] {
        with_full_blocks(BlockKind::Whole, 2, |node, objects| {
            leave_in(node, objects, 0, 7);
            leave_in(node, objects, 1, 20);
            let criteria = Criteria { percent: 25, pass: PASS, round: Some(PASS) };
            let Some(DefragCandidate::Block(block, slabs, TargetRoom::Used)) = node.claim_candidate(&criteria) else {
                panic!("sparse")
            };
            objects[left..7].iter().for_each(|object| node.give(*object));
            slabs.iter().for_each(|slab| node.open(block, slab));
            node.return_block(block);
            assert_eq!(node.blocks.block(block).has_refused.get(), u32::from(left > 0));
        });
    }
}

/// Bare slabs of other whole blocks are room for the objects of a block; its own are not.
#[test]
fn bare_slabs_of_others_are_room() {
    let criteria = Criteria { percent: 40, pass: PASS, round: Some(PASS) };
    for (left, is_found) in [(8, true), (9, false)] {
        with_blocks(BlockKind::Whole, 2, SLABS - 2, |node, objects| {
            leave_in(node, objects, 0, left);
            assert_eq!(finds_block(node, &criteria), is_found, "{left} objects, two bare slabs of 4");
        });
    }
    with_blocks(BlockKind::Whole, 2, 2, |node, _| assert!(!finds_block(node, &criteria)));
}

/// A block without room in its set-up slabs is emptied if it is whole: its bare slabs have memory. If it is sparse,
/// emptying it gains nothing. A block that was tried is not found again in its round.
#[test]
fn a_packed_block_is_emptied_if_it_is_whole() {
    for (kind, is_found) in [(BlockKind::Whole, true), (BlockKind::Sparse, false)] {
        with_blocks(kind, 2, 2, |node, objects| {
            let block = node.blocks.number_of(objects[BLOCK]);
            leave_in(node, objects, 0, BLOCK - 10);
            let criteria = Criteria { percent: 30, pass: PASS, round: Some(PASS) };
            assert_eq!(node.list(GROWING).collect::<Vec<_>>(), [block]);
            assert_eq!(finds_block(node, &criteria), is_found);
            assert!(!finds_block(node, &criteria));
            node.blocks.block(block).has_refused.set(0);
            assert_eq!(finds_block(node, &Criteria { round: Some(PASS + 1), ..criteria }), is_found);
        });
    }
}

/// Blocks of a list that are used too little are not among the first that an allocation looks at.
#[test]
fn the_first_blocks_have_enough_in_use() {
    with_full_blocks(BlockKind::Whole, 3, |node, objects| {
        let used = [12, 13, 15];
        used.into_iter().enumerate().for_each(|(block, left)| leave_in(node, objects, block, left));
        let list = node.list_of(12);
        for (least, count) in [(0, 3), (12, 3), (13, 2), (15, 1), (16, 0)] {
            let found: Vec<u32> = node.first_of(list, least).map(|block| node.blocks.block(block).used.get()).collect();
            assert_eq!(found.len(), count, "{found:?}");
            assert!(found.iter().all(|used| *used >= least), "{found:?}");
        }
    });
}

/// An empty slab is no room for the objects of another.
#[test]
fn empty_slabs_are_no_room() {
    with_full_blocks(BlockKind::Sparse, 1, |node, objects| {
        objects[1..2 * OBJECTS].iter().for_each(|object| node.give(*object));
        assert_eq!(node.claim_candidate(&criteria(101)), None);
        node.give(objects[2 * OBJECTS]);
        let Some(DefragCandidate::Slab(block, slab, 1)) = node.claim_candidate(&criteria(101)) else {
            panic!("one slab has room")
        };
        node.open(block, slab);
    });
}

/// A move to another node claims each slab with objects once, and none that is claimed already.
#[test]
fn moving_away_claims_slabs_with_objects() {
    with_full_blocks(BlockKind::Sparse, 2, |node, objects| {
        objects[..OBJECTS].iter().for_each(|object| node.give(*object));
        let (block, slab) = node.claim_next(PASS - 1).unwrap();
        let mut claimed = vec![(block, slab)];
        claimed.extend(std::iter::from_fn(|| node.claim_next(PASS)));
        let used: Vec<u32> = claimed.iter().map(|(block, slab)| node.blocks.slab(*block, *slab).used()).collect();
        assert_eq!(used, [OBJECTS as u32; 2 * SLABS - 1]);
        claimed.iter().for_each(|(block, slab)| node.open(*block, *slab));
    });
}
