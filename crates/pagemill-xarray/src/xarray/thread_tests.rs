//! Tests with real threads: readers run concurrently with one writer that uses all operations. ThreadSanitizer runs
//! these tests, too.

use super::pin;
use super::word::{first_index_of, last_index_of};
use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

/// Every index from `FIRST_PERMANENT_INDEX` to `2 * FIRST_PERMANENT_INDEX - 1` is covered by an entry at all times.
const FIRST_PERMANENT_INDEX: u64 = 1 << MAX_ORDER;
/// An index at which an entry is stored and erased, so that the tree grows to its full height and shrinks.
const DISTANT_INDEX: u64 = MAX_INDEX - 5;
/// Number of nodes that the forest can have: many, because retired nodes accumulate while readers are preempted.
const NODE_LIMIT: usize = 1 << 22;
const WRITING_DURATION: Duration = Duration::from_millis(400);

/// Returns the value for an entry with this first index and order, stored in this round of the writer.
fn value_of(first: u64, order: u32, round: u64) -> u64 {
    (round & 0xFFFF) << 32 | (first & 0xFFF_FFFF) << 4 | u64::from(order)
}

fn assert_belongs(found: Found, index: u64) {
    assert!((found.first..=found.last()).contains(&index));
    assert_eq!(found.value & 0xFFFF_FFFF, value_of(found.first, found.order, 0), "a value of another entry");
}

/// Guard of a test with reader threads: dropping it makes the readers stop, also if the writer panics.
struct StopReaders<'a>(&'a AtomicBool);

impl Drop for StopReaders<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn read_until_done(array: &XArray<Forest>, is_done: &AtomicBool, seed: u64) -> u64 {
    let (mut reads, mut random) = (0, seed);
    while !is_done.load(Relaxed) || reads < 1000 {
        let guard = &pin();
        for _ in 0..64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let index = FIRST_PERMANENT_INDEX + (random >> 33) % (1 << MAX_ORDER);
            assert_belongs(array.load(index, guard).expect("it is always there"), index);
            assert_belongs(array.next(index, index, guard).expect("it is always there"), index);
            assert!(array.get_mark(index, Mark::B, guard), "all are marked at all times");
            let (low, far) = ((random >> 20) % 100, DISTANT_INDEX - random % 3);
            array.load(low, guard).into_iter().for_each(|found| assert_belongs(found, low));
            array.load(far, guard).into_iter().for_each(|found| assert_belongs(found, far));
            let next = array.next(low, MAX_INDEX, guard).expect("something is always there");
            assert!(next.last() >= low && next.first <= FIRST_PERMANENT_INDEX, "a permanent entry was skipped");
        }
        assert_eq!(array.next_gap(FIRST_PERMANENT_INDEX, 2 * FIRST_PERMANENT_INDEX - 1, guard), None);
        reads += 1;
    }
    reads
}

fn fill_permanent_range(array: &XArray<Forest>, order: u32, round: u64) {
    let mut stock = array.prepare(FIRST_PERMANENT_INDEX, 2 * FIRST_PERMANENT_INDEX - 1, order).unwrap();
    let mut writer = array.lock();
    for first in (FIRST_PERMANENT_INDEX..2 * FIRST_PERMANENT_INDEX).step_by(1 << order) {
        writer.join(first, order, value_of(first, order, round), &mut stock);
    }
}

fn write_round(array: &XArray<Forest>, round: u64) {
    let orders = [MAX_ORDER, 9, 6, 5, 3, 0];
    for (order, into) in orders.iter().zip(&orders[1..]) {
        for first in (FIRST_PERMANENT_INDEX..2 * FIRST_PERMANENT_INDEX).step_by(1 << order) {
            let mut stock = array.prepare_split(*order, *into).unwrap();
            array.lock().split(first, *into, &mut stock, |part| value_of(part, *into, round));
        }
        store_low_and_distant(array, round, *into);
    }
    for order in [2, 4, 7, 10, MAX_ORDER] {
        fill_permanent_range(array, order, round);
    }
}

/// Stores and erases entries: small and large ones at low indices, and one at a distant index, so that the tree grows
/// and shrinks.
fn store_low_and_distant(array: &XArray<Forest>, round: u64, order: u32) {
    for (index, order) in [(0, 0), (33, 0), (70, order), (DISTANT_INDEX, 1), (DISTANT_INDEX - 1, 0)] {
        let first = first_index_of(index, order);
        let mut stock = array.prepare(first, last_index_of(first, order), order).unwrap();
        array.lock().store(first, order, value_of(first, order, round), &mut stock);
        if round.is_multiple_of(3) {
            array.lock().erase(first);
        }
    }
    array.lock().erase_range(0, FIRST_PERMANENT_INDEX - 1, |found| assert_belongs(found, found.first));
    array.lock().erase_range(2 * FIRST_PERMANENT_INDEX, MAX_INDEX, |found| assert_belongs(found, found.first));
}

/// While a writer splits, joins, stores and erases entries, readers must always find the permanent entries, and must
/// never find an entry of another index.
#[test]
fn threads_read_while_one_writes() {
    let nodes = test_forest::forest_of(NODE_LIMIT);
    let (array, is_done) = (XArray::new(nodes), AtomicBool::new(false));
    fill_permanent_range(&array, MAX_ORDER, 0);
    array.lock().set_mark(FIRST_PERMANENT_INDEX, Mark::B);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (1..4)
            .map(|seed| {
                let (array, is_done) = (&array, &is_done);
                scope.spawn(move || read_until_done(array, is_done, seed))
            })
            .collect();
        let done = StopReaders(&is_done);
        let start = Instant::now();
        let mut round = 0;
        while round == 0 || start.elapsed() < WRITING_DURATION {
            round += 1;
            write_round(&array, round);
        }
        drop(done);
        readers.into_iter().for_each(|reader| assert!(reader.join().unwrap() > 0));
        assert!(round > 0);
    });
    array.lock().erase_range(0, MAX_INDEX, drop);
    super::model_tests::wait_until_no_node_is_used(nodes);
}

/// Bit of a frame's word that is set once the frame was released. The lower bits hold the number of pins.
const RELEASED: u64 = 1 << 32;

/// Readers find simulated page frames in the array, pin them, and call `is_still`. If it returns true, the frame must
/// not have been released.
#[test]
fn a_frame_pinned_by_a_thread_is_not_released() {
    const FRAME_COUNT: usize = 64;
    use std::sync::atomic::Ordering::AcqRel;
    let array = XArray::new(test_forest::forest_of(NODE_LIMIT));
    let frames: Vec<AtomicU64> = (0..FRAME_COUNT).map(|_| AtomicU64::new(0)).collect();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2u64 {
            let (array, frames, is_done) = (&array, &frames, &is_done);
            scope.spawn(move || {
                let mut index = seed;
                while !is_done.load(Relaxed) {
                    index = (index + 7) % FRAME_COUNT as u64;
                    let guard = &pin();
                    let Some(hit) = array.find(index, guard) else { continue };
                    let frame = &frames[hit.value() as usize];
                    frame.fetch_add(1, AcqRel);
                    if hit.is_still() {
                        assert!(frame.load(Relaxed) < RELEASED, "pinned, and released");
                    }
                    frame.fetch_sub(1, AcqRel);
                }
            });
        }
        let _done = StopReaders(&is_done);
        let start = Instant::now();
        while start.elapsed() < WRITING_DURATION {
            for (index, frame) in (0..).zip(&frames) {
                let mut stock = array.prepare(index, index, 0).unwrap();
                array.lock().store(index, 0, index, &mut stock);
                array.lock().erase(index);
                if frame.compare_exchange(0, RELEASED, AcqRel, Relaxed).is_ok() {
                    frame.fetch_sub(RELEASED, AcqRel);
                }
            }
        }
    });
}
