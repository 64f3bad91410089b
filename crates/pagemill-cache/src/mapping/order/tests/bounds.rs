//! Single decisions of the eviction order, at their bounds.

use super::*;
use std::cell::Cell;

/// Folios of one page or of [`HUGE`], by the number of their first page.
#[derive(Default)]
struct Fake {
    used: RefCell<BTreeSet<u32>>,
    kept: RefCell<BTreeSet<u32>>,
    awaited: RefCell<BTreeSet<u32>>,
    huge: BTreeSet<u32>,
    /// Uses come back as soon as they are removed.
    is_busy: bool,
    looks: Cell<u64>,
}

impl Folios for Fake {
    fn look(&self, number: u32) -> FolioState {
        self.looks.set(self.looks.get() + 1);
        match self.kept.borrow().contains(&number) {
            true => FolioState::Kept,
            false => FolioState::Idle { order: if self.huge.contains(&number) { HUGE } else { 0 } },
        }
    }

    fn is_awaited(&self, number: u32) -> bool {
        self.awaited.borrow().contains(&number)
    }

    fn forget_use(&self, number: u32) -> bool {
        self.is_busy || self.used.borrow_mut().remove(&number)
    }

    fn forget_uses(&self, number: u32) -> bool {
        self.forget_use(number)
    }
}

struct Bench {
    links: Links,
    state: QueueState,
    fake: Fake,
    pushed: u32,
}

impl Bench {
    /// Single pages, numbered from 0: so many in each queue.
    fn new(queues: &[(Queue, u32)]) -> Self {
        let links = Links::new(PAGES as usize).unwrap();
        links.open(0, PAGES as usize).unwrap();
        let mut bench = Self { links, state: QueueState::new(), fake: Fake::default(), pushed: 0 };
        queues.iter().for_each(|(queue, count)| bench.push(*queue, *count));
        bench
    }

    fn push(&mut self, queue: Queue, count: u32) {
        for _ in 0..count {
            self.state.queues.push(&self.links, self.pushed, 0, queue);
            self.pushed += 1;
        }
    }

    fn place(&mut self, part: CachePart, age: u64, pages: u64) -> Queue {
        self.state.place_for(Recall(Some((part, age))), pages)
    }

    /// The next candidate, or `None` if the step found none.
    fn step(&mut self) -> Option<u32> {
        match self.state.step(&self.links, &self.fake) {
            ScanStep::Found(candidate) => Some(candidate.number),
            ScanStep::Next | ScanStep::Nothing => None,
        }
    }

    fn next(&mut self) -> Option<u32> {
        (0..1000).find_map(|_| self.step())
    }

    fn pages(&self, queue: Queue) -> u64 {
        self.state.queues.pages(queue)
    }
}

fn run_with(pages: u32) -> Run {
    let run = Run::new();
    (0..pages).for_each(|page| run.enter(page, 0, false));
    run
}

/// The key is the first number of splitmix64 (S. Vigna) for its seed.
#[test]
fn a_key_is_a_hash_of_all_its_parts() {
    assert_eq!((GhostKey::of(0, 0, 0).0, GhostKey::of(0, 1, 0).0), (0xE220_A839_7B1D_CDAF, 0x910A_2DEC_8902_5CC1));
    let parts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 0, 0), (0, 3, 0), (0, 0, 3), (1, 1, 1)];
    let keys: BTreeSet<u64> = parts.iter().map(|(file, index, order)| GhostKey::of(*file, *index, *order).0).collect();
    assert_eq!(keys.len(), parts.len());
}

/// A folio that comes back soon widens its part by two pages for each of its own; the share has bounds.
#[test]
fn a_return_moves_the_share() {
    let step = |pages: u64| 2 * pages * (ONE / 100);
    for (part, near, sign) in [(CachePart::New, 8, 1), (CachePart::Main, 20, -1)] {
        for (age, is_near) in [(0, true), (near, true), (near + 1, false)] {
            for pages in [1, 2] {
                let mut bench = Bench::new(&[(Queue::Small, 40), (Queue::Main, 60)]);
                bench.place(part, age, pages);
                let moved = (i128::from(bench.state.share) - i128::from(FIRST_SHARE)) * sign;
                let wanted = if is_near { i128::from(step(pages)) } else { 0 };
                assert!((moved - wanted).abs() < 256, "{part:?} {age} {pages}: {moved} {wanted}");
            }
        }
    }
    let mut bench = Bench::new(&[(Queue::Small, 40), (Queue::Main, 60)]);
    (0..100).for_each(|_| _ = bench.place(CachePart::New, 0, 1));
    assert_eq!((bench.state.share, bench.state.target()), (1 << 31, 50), "half");
    (0..100).for_each(|_| _ = bench.place(CachePart::Main, 0, 1));
    assert_eq!((bench.state.share, bench.state.target()), (ONE / 100, 0), "a hundredth, rounded down");
    bench.state.share = ONE / 4;
    assert_eq!(bench.state.target(), 25);
}

/// A folio that comes back enters main only from the new part, before as many pages were evicted as there are, and while the
/// hand in main has not passed too many used pages.
#[test]
fn main_is_entered_from_the_new_part() {
    let mut bench = Bench::new(&[(Queue::Small, 40), (Queue::Main, 60)]);
    assert_eq!(bench.state.place_for(Recall(None), 1), Queue::Probation);
    assert_eq!(bench.place(CachePart::New, 100, 1), Queue::Main);
    assert_eq!(bench.place(CachePart::New, 101, 1), Queue::Probation);
    assert_eq!(bench.place(CachePart::Main, 0, 1), Queue::Probation);
    for (pages, debt, queue, left) in
        [(1, 3, Queue::Main, 0), (1, 4, Queue::Probation, 1), (2, 6, Queue::Main, 0), (2, 7, Queue::Probation, 1)]
    {
        bench.state.debt = debt;
        assert_eq!((bench.place(CachePart::New, 100, pages), bench.state.debt), (queue, left));
    }
}

/// Used pages that the hand passes in main are counted, up to half of the cache. Each loses one use.
#[test]
fn the_hand_counts_what_it_passes() {
    let mut bench = Bench::new(&[(Queue::Main, 20)]);
    bench.fake.is_busy = true;
    for passed in 1..30 {
        assert_eq!(bench.step(), None);
        assert_eq!((bench.state.debt, bench.pages(Queue::Main)), (passed.min(10), 20), "half of them at most");
    }
    bench.fake.is_busy = false;
    assert_eq!((bench.step(), bench.state.debt), (Some(9), 10));
}

/// Probation keeps a fiftieth of the cache, or half of the new part. At most two folios leave it at a time, without their
/// uses; the newest stays.
#[test]
fn probation_is_narrowed() {
    for (share, width) in [(ONE / 4, 4), (ONE / 50, 2)] {
        let mut bench = Bench::new(&[(Queue::Main, 192), (Queue::Probation, 8)]);
        bench.state.share = share + 1;
        bench.fake.used.borrow_mut().extend(192..200);
        for left in [6, 4, 2, 2] {
            bench.state.narrow_probation(&bench.links, &bench.fake);
            assert_eq!(bench.pages(Queue::Probation), left.max(width));
            assert_eq!(bench.fake.used.borrow().len() as u64, bench.pages(Queue::Probation));
        }
    }
    let mut bench = Bench::new(&[(Queue::Main, 10), (Queue::Probation, 2)]);
    bench.state.narrow_probation(&bench.links, &bench.fake);
    assert_eq!((bench.pages(Queue::Probation), bench.pages(Queue::Small)), (1, 1), "the newest stays");
}

/// Candidates come from the new part while it is larger than its share, then from main; small goes before probation.
#[test]
fn the_larger_part_is_scanned() {
    let mut bench = Bench::new(&[(Queue::Probation, 1), (Queue::Small, 3), (Queue::Main, 4)]);
    bench.state.share = ONE / 2;
    let found: Vec<_> = std::iter::from_fn(|| bench.next()).collect();
    // The new part has 4 of 8 pages, 3 of 7, 2 of 6 (less than half), 2 of 5, 1 of 4 (less than half), 1 of 3, none.
    assert_eq!(found, [1, 2, 4, 3, 5, 0, 6, 7]);
    let mut bench = Bench::new(&[(Queue::Small, 1), (Queue::Main, 2)]);
    bench.state.share = ONE / 100;
    assert_eq!(bench.next(), Some(0), "a target of less than a page counts as one");
    let mut bench = Bench::new(&[(Queue::Small, 2), (Queue::Main, 2)]);
    bench.fake.used.borrow_mut().insert(0);
    assert_eq!((bench.step(), bench.pages(Queue::Main), bench.step()), (None, 3, Some(1)), "used ones go to main");
}

/// A folio that is kept is deferred. It is scanned again once an eighth of the cache was picked, and then once.
#[test]
fn deferred_folios_wait_for_an_eighth() {
    let mut bench = Bench::new(&[(Queue::Small, 80)]);
    bench.fake.kept.borrow_mut().insert(0);
    assert_eq!((bench.step(), bench.pages(Queue::DeferredNew)), (None, 1));
    bench.fake.kept.borrow_mut().clear();
    // Nine of 71 are an eighth, rounded down; eight of 72 are not.
    assert_eq!(
        (0..10).map(|_| bench.next()).collect::<Option<Vec<_>>>(),
        Some([1, 2, 3, 4, 5, 6, 7, 8, 9, 0].to_vec())
    );
    let mut bench = Bench::new(&[(Queue::DeferredNew, 2), (Queue::Small, 60), (Queue::DeferredMain, 1)]);
    bench.fake.kept.borrow_mut().extend([0, 1, 62]);
    bench.state.rescan_deferred();
    assert_eq!((bench.state.again, bench.state.picked), ([2, 1], 0));
    assert_eq!([(); 3].map(|()| bench.step()), [None, None, Some(2)]);
    assert_eq!((bench.state.again, bench.pages(Queue::DeferredNew)), ([0, 1], 2));
    bench.state.again = [0, 1];
    assert_eq!(bench.state.first_of(CachePart::Main), Some(Queue::DeferredMain));
    bench.state.again = [1, 0];
    assert_eq!(
        (bench.state.first_of(CachePart::New), bench.state.first_of(CachePart::Main)),
        (Some(Queue::DeferredNew), None)
    );
}

/// A huge folio counts all of its pages: when picked, passed in main, deferred, and as a ghost.
#[test]
fn a_huge_folio_counts_its_pages() {
    let mut bench = Bench::new(&[]);
    for number in [0, 8, 16] {
        bench.state.queues.push(&bench.links, number, HUGE, Queue::Main);
        bench.fake.huge.insert(number);
    }
    bench.pushed = 24;
    bench.push(Queue::Main, 56);
    bench.fake.used.borrow_mut().insert(0);
    assert_eq!((bench.step(), bench.state.debt), (None, 8));
    assert_eq!((bench.step(), bench.state.picked), (Some(8), 8));
    assert_eq!((bench.step(), bench.state.picked), (Some(16), 0), "16 of 64 are an eighth");

    let mut bench = Bench::new(&[]);
    bench.state.queues.push(&bench.links, 0, HUGE, Queue::DeferredNew);
    bench.fake.kept.borrow_mut().insert(0);
    bench.state.rescan_deferred();
    assert_eq!((bench.state.again, bench.step(), bench.state.again), ([8, 0], None, [0, 0]));

    let run = run_with(100);
    run.order.enter(&run.model, 120, HUGE, Recall(Some((CachePart::New, 0))));
    assert_eq!(run.order.state.with(|state| state.share) * 100 / ONE, 10 + 16 - 1, "16 % more, rounded down");

    let run = run_with(10);
    let ghost = GhostKey::of(9, 9, 0);
    run.order.dropped(&Candidate { number: 0, order: 0, part: CachePart::New }, ghost);
    assert!(run.order.recall(ghost).is_known() && !run.order.recall(GhostKey::of(9, 8, 0)).is_known());
    run.order.dropped(&Candidate { number: 8, order: HUGE, part: CachePart::New }, GhostKey::of(9, 7, HUGE));
    assert_eq!(run.order.recall(ghost).0, Some((CachePart::New, 9)));
}

/// A huge folio takes the queue of most of its pages; exactly half of them in main are not most.
#[test]
fn a_joined_folio_goes_where_most_of_it_was() {
    for (mains, is_main) in [(0, false), (4, false), (5, true), (8, true)] {
        let run = Run::new();
        run.order.state.with(|state| {
            for part in 0..8 {
                let queue = if part < mains { Queue::Main } else { Queue::Small };
                state.queues.push(&run.order.links, part, 0, queue);
            }
        });
        run.order.join(0..8, 16, HUGE);
        let queue = run.order.links.queue(16);
        assert_eq!(queue, Some(if is_main { Queue::Main } else { Queue::Small }), "{mains} of 8");
        let main_pages = u64::from(mains) + if is_main { 8 } else { 0 };
        assert_eq!(run.order.pages(), [16 - main_pages, main_pages]);
    }
}

/// The pages of a split folio take its place, its first page first. A refused candidate is deferred in its own part.
#[test]
fn parts_and_refused_candidates_keep_their_place() {
    let run = Run::new();
    run.enter(16, HUGE, false);
    run.enter(40, 0, false);
    run.enter(41, 0, false);
    run.split(16);
    assert_eq!(run.order.pages(), [10, 0]);
    let mut scan = run.order.scan();
    assert_eq!(scan.next(&run.model).map(|found| found.number), Some(16));
    for (part, queue) in [(CachePart::New, Queue::DeferredNew), (CachePart::Main, Queue::DeferredMain)] {
        let number = 100 + part as u32;
        run.order.put_back(&Candidate { number, order: 0, part });
        assert_eq!(run.order.links.queue(number), Some(queue));
    }
}

/// A folio that is used once goes first, used or not, but not before its first use.
#[test]
fn what_is_used_once_goes_first() {
    let run = run_with(20);
    run.order.enter_noreuse(30, 0);
    run.order.enter_noreuse(31, 0);
    let fake = Fake::default();
    fake.used.borrow_mut().insert(31);
    fake.awaited.borrow_mut().insert(30);
    assert_eq!(run.order.pages(), [22, 0]);
    let mut scan = run.order.scan();
    let found = scan.next(&fake).unwrap();
    assert_eq!((found.number, run.order.links.queue(30)), (31, Some(Queue::Small)), "awaited");
    run.enter(40, 0, true);
    run.order.enter_noreuse(40, 0);
    assert_eq!(scan.next(&run.model).map(|found| found.number), Some(40), "without reads ahead none is awaited");
}

/// A scan ends after five rounds if uses come back as fast as it removes them.
#[test]
fn a_scan_ends_after_five_rounds() {
    let run = run_with(100);
    let fake = Fake { is_busy: true, ..Fake::default() };
    assert_eq!(run.order.scan().next(&fake), None);
    assert_eq!(fake.looks.get(), 5 * 100 + 64);
}

/// The memory of an order is that of its links and ghosts, as far as they are in use.
#[test]
fn the_memory_is_that_of_links_and_ghosts() {
    let run = run_with(PAGES);
    run.order.dropped(&Candidate { number: 0, order: 0, part: CachePart::New }, GhostKey::of(1, 1, 0));
    let (links, ghosts) = (run.order.links.resident_bytes(PAGES as usize), run.order.ghosts.resident_bytes());
    assert!(links >= u64::from(PAGES) * 8 && ghosts > 1);
    assert_eq!(run.order.resident_bytes(usize::MAX), links + ghosts);
}
