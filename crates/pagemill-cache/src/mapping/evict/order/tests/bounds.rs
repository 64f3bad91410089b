//! Single decisions of the eviction order, tested at their limits.

use super::*;
use std::cell::Cell;

/// Simulated folios, by the number of their first page. A folio has one page, or the order [`HUGE_ORDER`].
#[derive(Default)]
struct FakeFolios {
    used: RefCell<BTreeSet<u32>>,
    kept: RefCell<BTreeSet<u32>>,
    awaited: RefCell<BTreeSet<u32>>,
    huge: BTreeSet<u32>,
    /// Whether folios are used again as soon as the scan removes their uses.
    is_busy: bool,
    look_calls: Cell<u64>,
}

impl Folios for FakeFolios {
    fn look(&self, number: u32) -> FolioState {
        self.look_calls.set(self.look_calls.get() + 1);
        match self.kept.borrow().contains(&number) {
            true => FolioState::Kept,
            false => FolioState::Idle { order: if self.huge.contains(&number) { HUGE_ORDER } else { 0 } },
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

struct QueueFixture {
    links: Links,
    state: QueueState,
    fake: FakeFolios,
    pushed: u32,
}

impl QueueFixture {
    /// Creates queues with the given numbers of single pages. The pages are numbered from 0 in that order.
    fn new(queues: &[(Queue, u32)]) -> Self {
        let links = Links::new(PAGES as usize).unwrap();
        links.open(0, PAGES as usize).unwrap();
        let mut fixture = Self { links, state: QueueState::new(), fake: FakeFolios::default(), pushed: 0 };
        queues.iter().for_each(|(queue, count)| fixture.push(*queue, *count));
        fixture
    }

    fn push(&mut self, queue: Queue, count: u32) {
        for _ in 0..count {
            self.state.queues.push(&self.links, self.pushed, 0, queue);
            self.pushed += 1;
        }
    }

    fn choose_returning(&mut self, part: CachePart, age: u64, pages: u64) -> Queue {
        self.state.choose_queue(Recall(Some((part, age))), pages)
    }

    /// Runs one step of the eviction scan. Returns the number of the candidate, or `None` if the step found no
    /// candidate.
    fn step(&mut self) -> Option<u32> {
        self.state.rescan_if_due();
        match self.state.step(&self.links, &self.fake) {
            ScanStep::Found(candidate) => Some(candidate.number),
            ScanStep::Next | ScanStep::Nothing => None,
        }
    }

    fn next_candidate(&mut self) -> Option<u32> {
        (0..1000).find_map(|_| self.step())
    }

    fn pages(&self, queue: Queue) -> u64 {
        self.state.queues.pages(queue)
    }
}

fn simulation_with(pages: u32) -> Simulation {
    let run = Simulation::new();
    (0..pages).for_each(|page| run.enter(page, 0, false));
    run
}

/// The hash of index 0 must be the first number of splitmix64 (S. Vigna) for seed 0, and that of index 1 the first
/// number for seed 1. Each field of the key must change the hash.
#[test]
fn a_ghost_key_hashes_file_index_and_order() {
    assert_eq!((GhostKey::of(0, 0, 0).0, GhostKey::of(0, 1, 0).0), (0xE220_A839_7B1D_CDAF, 0x910A_2DEC_8902_5CC1));
    let parts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (3, 0, 0), (0, 3, 0), (0, 0, 3), (1, 1, 1)];
    let keys: BTreeSet<u64> = parts.iter().map(|(file, index, order)| GhostKey::of(*file, *index, *order).0).collect();
    assert_eq!(keys.len(), parts.len());
}

/// A folio that returns soon after its eviction must change the share of the part from which it was evicted, by two
/// pages for each page of the folio. The share must stay between its minimum and maximum.
#[test]
fn a_returning_folio_changes_the_share() {
    let step = |pages: u64| 2 * pages * (FULL_SHARE / 100);
    for (part, near, sign) in [(CachePart::New, 8, 1), (CachePart::Main, 20, -1)] {
        for (age, is_near) in [(0, true), (near, true), (near + 1, false)] {
            for pages in [1, 2] {
                let mut fixture = QueueFixture::new(&[(Queue::Small, 40), (Queue::Main, 60)]);
                fixture.choose_returning(part, age, pages);
                let moved = (i128::from(fixture.state.share) - i128::from(INITIAL_SHARE)) * sign;
                let wanted = if is_near { i128::from(step(pages)) } else { 0 };
                assert!((moved - wanted).abs() < 256, "{part:?} {age} {pages}: {moved} {wanted}");
            }
        }
    }
    let mut fixture = QueueFixture::new(&[(Queue::Small, 40), (Queue::Main, 60)]);
    (0..100).for_each(|_| _ = fixture.choose_returning(CachePart::New, 0, 1));
    assert_eq!((fixture.state.share, fixture.state.target()), (1 << 31, 50), "half");
    (0..100).for_each(|_| _ = fixture.choose_returning(CachePart::Main, 0, 1));
    assert_eq!((fixture.state.share, fixture.state.target()), (FULL_SHARE / 100, 0), "a hundredth, rounded down");
    fixture.state.share = FULL_SHARE / 4;
    assert_eq!(fixture.state.target(), 25);
}

/// A folio that is read again after its eviction may enter the main queue only if it was evicted from the new part, and
/// if no more pages than the cache has were evicted from that part since. In addition, the clock hand must not have
/// passed too many used pages in the main queue.
#[test]
fn a_returning_folio_enters_main_only_from_the_new_part() {
    let mut fixture = QueueFixture::new(&[(Queue::Small, 40), (Queue::Main, 60)]);
    assert_eq!(fixture.state.choose_queue(Recall(None), 1), Queue::Probation);
    assert_eq!(fixture.choose_returning(CachePart::New, 100, 1), Queue::Main);
    assert_eq!(fixture.choose_returning(CachePart::New, 101, 1), Queue::Probation);
    assert_eq!(fixture.choose_returning(CachePart::Main, 0, 1), Queue::Probation);
    for (pages, passed_excess, queue, left) in
        [(1, 3, Queue::Main, 0), (1, 4, Queue::Probation, 1), (2, 6, Queue::Main, 0), (2, 7, Queue::Probation, 1)]
    {
        fixture.state.passed_excess = passed_excess;
        assert_eq!((fixture.choose_returning(CachePart::New, 100, pages), fixture.state.passed_excess), (queue, left));
    }
}

/// The clock hand must count the used pages that it passes in the main queue, up to half of the cache. Each page that
/// it passes must lose one use.
#[test]
fn the_clock_hand_counts_used_pages() {
    let mut fixture = QueueFixture::new(&[(Queue::Main, 20)]);
    fixture.fake.is_busy = true;
    for passed in 1..30 {
        assert_eq!(fixture.step(), None);
        assert_eq!(
            (fixture.state.passed_excess, fixture.pages(Queue::Main)),
            (passed.min(10), 20),
            "half of them at most"
        );
    }
    fixture.fake.is_busy = false;
    assert_eq!((fixture.step(), fixture.state.passed_excess), (Some(9), 10));
}

/// The queue `Probation` must keep a fiftieth of the cache, or half of the new part if that is less. Each call of
/// `shrink_probation` must move at most two folios to another queue and clear their uses. The newest folio must stay.
#[test]
fn probation_shrinks_to_its_target() {
    for (share, width) in [(FULL_SHARE / 4, 4), (FULL_SHARE / 50, 2)] {
        let mut fixture = QueueFixture::new(&[(Queue::Main, 192), (Queue::Probation, 8)]);
        fixture.state.share = share + 1;
        fixture.fake.used.borrow_mut().extend(192..200);
        for left in [6, 4, 2, 2] {
            fixture.state.shrink_probation(&fixture.links, &fixture.fake);
            assert_eq!(fixture.pages(Queue::Probation), left.max(width));
            assert_eq!(fixture.fake.used.borrow().len() as u64, fixture.pages(Queue::Probation));
        }
    }
    let mut fixture = QueueFixture::new(&[(Queue::Main, 10), (Queue::Probation, 2)]);
    fixture.state.shrink_probation(&fixture.links, &fixture.fake);
    assert_eq!((fixture.pages(Queue::Probation), fixture.pages(Queue::Small)), (1, 1), "the newest stays");
}

/// Candidates must come from the new part while it is larger than its share, then from the main part. The small queue
/// must be scanned before probation.
#[test]
fn the_part_above_its_share_is_scanned() {
    let mut fixture = QueueFixture::new(&[(Queue::Probation, 1), (Queue::Small, 3), (Queue::Main, 4)]);
    fixture.state.share = FULL_SHARE / 2;
    let found: Vec<_> = std::iter::from_fn(|| fixture.next_candidate()).collect();
    // Pages of the new part at each step: 4 of 8, 3 of 7, 2 of 6 (less than half), 2 of 5, 1 of 4 (less than half), 1
    // of 3, none.
    assert_eq!(found, [1, 2, 4, 3, 5, 0, 6, 7]);
    let mut fixture = QueueFixture::new(&[(Queue::Small, 1), (Queue::Main, 2)]);
    fixture.state.share = FULL_SHARE / 100;
    assert_eq!(fixture.next_candidate(), Some(0), "a target of less than a page counts as one");
    let mut fixture = QueueFixture::new(&[(Queue::Small, 2), (Queue::Main, 2)]);
    fixture.fake.used.borrow_mut().insert(0);
    assert_eq!(
        (fixture.step(), fixture.pages(Queue::Main), fixture.step()),
        (None, 3, Some(1)),
        "used ones go to main"
    );
}

/// A dirty folio must be deferred when the scan reaches it. The scan must visit the folio once more, after an eighth of
/// the cache was chosen for eviction.
#[test]
fn deferred_folios_are_rescanned_after_an_eighth() {
    let mut fixture = QueueFixture::new(&[(Queue::Small, 80)]);
    fixture.fake.kept.borrow_mut().insert(0);
    assert_eq!((fixture.step(), fixture.pages(Queue::DeferredNew)), (None, 1));
    fixture.fake.kept.borrow_mut().clear();
    // The tenth candidate follows a rescan: nine of 71 pages are an eighth, rounded down; eight of 72 are not.
    assert_eq!(
        (0..10).map(|_| fixture.next_candidate()).collect::<Option<Vec<_>>>(),
        Some([1, 2, 3, 4, 5, 6, 7, 8, 9, 0].to_vec())
    );
    let mut fixture = QueueFixture::new(&[(Queue::DeferredNew, 2), (Queue::Small, 60), (Queue::DeferredMain, 1)]);
    fixture.fake.kept.borrow_mut().extend([0, 1, 62]);
    fixture.state.rescan_deferred();
    assert_eq!((fixture.state.rescan_pages, fixture.state.chosen_pages), ([2, 1], 0));
    assert_eq!([(); 3].map(|()| fixture.step()), [None, None, Some(2)]);
    assert_eq!((fixture.state.rescan_pages, fixture.pages(Queue::DeferredNew)), ([0, 1], 2));
    fixture.state.rescan_pages = [0, 1];
    assert_eq!(fixture.state.next_queue(CachePart::Main), Some(Queue::DeferredMain));
    fixture.state.rescan_pages = [1, 0];
    assert_eq!(
        (fixture.state.next_queue(CachePart::New), fixture.state.next_queue(CachePart::Main)),
        (Some(Queue::DeferredNew), None)
    );
}

/// A huge folio must count as all of its pages when it is chosen for eviction, passed by the clock hand, deferred, and
/// stored as a ghost.
#[test]
fn a_huge_folio_counts_its_pages() {
    let mut fixture = QueueFixture::new(&[]);
    for number in [0, 8, 16] {
        fixture.state.queues.push(&fixture.links, number, HUGE_ORDER, Queue::Main);
        fixture.fake.huge.insert(number);
    }
    fixture.pushed = 24;
    fixture.push(Queue::Main, 56);
    fixture.fake.used.borrow_mut().insert(0);
    assert_eq!((fixture.step(), fixture.state.passed_excess), (None, 8));
    assert_eq!((fixture.step(), fixture.state.chosen_pages), (Some(8), 8));
    assert_eq!((fixture.step(), fixture.state.chosen_pages), (Some(16), 16));
    assert_eq!((fixture.step().is_some(), fixture.state.chosen_pages), (true, 1), "16 of 64 are an eighth");

    let mut fixture = QueueFixture::new(&[]);
    fixture.state.queues.push(&fixture.links, 0, HUGE_ORDER, Queue::DeferredNew);
    fixture.fake.kept.borrow_mut().insert(0);
    fixture.state.rescan_deferred();
    assert_eq!((fixture.state.rescan_pages, fixture.step(), fixture.state.rescan_pages), ([8, 0], None, [0, 0]));

    let run = simulation_with(100);
    run.order.enter(&run.model, 120, HUGE_ORDER, Recall(Some((CachePart::New, 0))));
    assert_eq!(run.order.state.with(|state| state.share) * 100 / FULL_SHARE, 10 + 16 - 1, "16 % more, rounded down");

    let run = simulation_with(10);
    let ghost = GhostKey::of(9, 9, 0);
    run.order.dropped(&Candidate { number: 0, order: 0, part: CachePart::New }, ghost);
    assert!(run.order.recall(ghost).is_known() && !run.order.recall(GhostKey::of(9, 8, 0)).is_known());
    run.order
        .dropped(&Candidate { number: 8, order: HUGE_ORDER, part: CachePart::New }, GhostKey::of(9, 7, HUGE_ORDER));
    assert_eq!(run.order.recall(ghost).0, Some((CachePart::New, 9)));
}

/// A huge folio must enter the main queue if more than half of the small folios that it replaces were there. Exactly
/// half must not be enough.
#[test]
fn a_collapsed_folio_enters_the_queue_of_most_pages() {
    for (mains, is_main) in [(0, false), (4, false), (5, true), (8, true)] {
        let run = Simulation::new();
        run.order.state.with(|state| {
            for part in 0..8 {
                let queue = if part < mains { Queue::Main } else { Queue::Small };
                state.queues.push(&run.order.links, part, 0, queue);
            }
        });
        run.order.join(0..8, 16, HUGE_ORDER);
        let queue = run.order.links.queue(16);
        assert_eq!(queue, Some(if is_main { Queue::Main } else { Queue::Small }), "{mains} of 8");
        let main_pages = u64::from(mains) + if is_main { 8 } else { 0 };
        assert_eq!(run.order.pages(), [16 - main_pages, main_pages]);
    }
}

/// The pages of a split folio must keep its queue, and the first page its position. A candidate that cannot be evicted
/// must be deferred in its own part.
#[test]
fn split_pages_and_refused_candidates_keep_their_queue() {
    let run = Simulation::new();
    run.enter(16, HUGE_ORDER, false);
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

/// A noreuse folio must be evicted first, used or not, but not before its first use.
#[test]
fn noreuse_folios_are_evicted_first() {
    let run = simulation_with(20);
    run.order.enter_noreuse(30, 0);
    run.order.enter_noreuse(31, 0);
    let fake = FakeFolios::default();
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

/// A scan returns up to 16 candidates at a time. The test puts 60 of 100 folios back whenever they are candidates, as
/// if they were locked. The scan must still return the other 40.
#[test]
fn refused_batches_do_not_hide_other_folios() {
    let run = simulation_with(100);
    let (mut scan, mut evicted) = (run.order.scan(), 0);
    loop {
        let batch = scan.next_batch(&run.model, 16);
        let (locked, others): (Vec<_>, Vec<_>) = batch.iter().partition(|candidate| candidate.number < 60);
        locked.into_iter().for_each(|candidate| run.order.put_back(candidate));
        evicted += others.len();
        if batch.is_empty() || evicted == 40 {
            break;
        }
    }
    assert_eq!(evicted, 40);
}

/// Folios are used again as fast as the scan removes their uses. The scan must end after five steps for each page.
#[test]
fn a_scan_has_a_step_limit() {
    let run = simulation_with(100);
    let fake = FakeFolios { is_busy: true, ..FakeFolios::default() };
    assert_eq!(run.order.scan().next(&fake), None);
    assert_eq!(fake.look_calls.get(), 5 * 100 + 64);
}

/// The reported resident memory of an order must be that of its links and ghosts in use.
#[test]
fn resident_memory_is_that_of_links_and_ghosts() {
    let run = simulation_with(PAGES);
    run.order.dropped(&Candidate { number: 0, order: 0, part: CachePart::New }, GhostKey::of(1, 1, 0));
    let (links, ghosts) = (run.order.links.resident_bytes(PAGES as usize), run.order.ghosts.resident_bytes());
    assert!(links >= u64::from(PAGES) * 8 && ghosts > 1);
    assert_eq!(run.order.resident_bytes(usize::MAX), links + ghosts);
}
