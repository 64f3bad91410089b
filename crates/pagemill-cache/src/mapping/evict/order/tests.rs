//! Model tests of the eviction order: random operations, and access patterns, on simulated folios.

mod bounds;

use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

const PAGES: u32 = 256;
/// Order of a simulated huge folio, which begins at a multiple of its length.
const HUGE_ORDER: u8 = 3;

/// A simulated folio, with the state that a scan can see or change.
#[derive(Clone, Copy, Debug)]
struct SimulatedFolio {
    order: u8,
    uses: u8,
    is_kept: bool,
    /// The folio belongs to a file without a store, so it is never entered into the order.
    is_without_store: bool,
}

/// The simulated folios, by the number of their first page.
#[derive(Default)]
struct Model(RefCell<BTreeMap<u32, SimulatedFolio>>);

impl Folios for Model {
    fn look(&self, number: u32) -> FolioState {
        match self.0.borrow().get(&number) {
            None => FolioState::Gone,
            Some(folio) if folio.is_kept => FolioState::Kept,
            Some(folio) => FolioState::Idle { order: folio.order },
        }
    }

    fn forget_use(&self, number: u32) -> bool {
        let mut folios = self.0.borrow_mut();
        let Some(folio) = folios.get_mut(&number).filter(|folio| folio.uses > 0) else { return false };
        folio.uses -= 1;
        true
    }

    fn forget_uses(&self, number: u32) -> bool {
        self.0.borrow_mut().get_mut(&number).is_some_and(|folio| std::mem::take(&mut folio.uses) > 0)
    }
}

impl Model {
    /// Returns the number of pages of all simulated folios that were entered into the order.
    fn pages(&self) -> u64 {
        self.0.borrow().values().filter(|folio| !folio.is_without_store).map(|folio| 1 << folio.order).sum()
    }

    fn is_free(&self, number: u32, order: u8) -> bool {
        let mut folios = self.0.borrow().clone().into_iter();
        let end = number + (1 << order);
        end <= PAGES && folios.all(|(first, folio)| first >= end || first + (1 << folio.order) <= number)
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A folio at this page is read in if its pages are free. The flags say whether it is huge, and whether its file
    /// has no store.
    Enter(u32, bool, bool),
    Use(u32),
    Keep(u32, bool),
    /// The folio with this page is removed from its file.
    Leave(u32),
    Split(u32),
    Join(u32),
    Evict(u64),
    /// A scan returns a candidate, which then cannot be evicted.
    Refuse,
}

fn random_step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    prop_oneof![
        6 => (page.clone(), any::<bool>(), prop::bool::weighted(0.1)).prop_map(|(at, huge, alone)| Step::Enter(at, huge, alone)),
        6 => page.clone().prop_map(Step::Use),
        2 => (page.clone(), any::<bool>()).prop_map(|(at, is_kept)| Step::Keep(at, is_kept)),
        2 => page.clone().prop_map(Step::Leave),
        1 => page.clone().prop_map(Step::Split),
        1 => page.prop_map(Step::Join),
        3 => (1..20_u64).prop_map(Step::Evict),
        1 => Just(Step::Refuse),
    ]
}

struct Simulation {
    model: Model,
    order: Order,
}

impl Simulation {
    fn new() -> Self {
        let order = Order::new(PAGES as usize).unwrap();
        order.begin(PAGES.into());
        order.reach(PAGES as usize).unwrap();
        Self { model: Model::default(), order }
    }

    fn find(&self, at: u32) -> Option<(u32, SimulatedFolio)> {
        let folios = self.model.0.borrow();
        let (number, folio) = folios.range(..=at).next_back()?;
        (at < number + (1 << folio.order)).then_some((*number, *folio))
    }

    fn change(&self, at: u32, change: impl FnOnce(&mut SimulatedFolio)) {
        let Some((number, _)) = self.find(at) else { return };
        if let Some(folio) = self.model.0.borrow_mut().get_mut(&number) {
            change(folio);
        }
    }

    fn enter(&self, number: u32, order: u8, is_without_store: bool) {
        let folio = SimulatedFolio { order, uses: 0, is_kept: false, is_without_store };
        self.model.0.borrow_mut().insert(number, folio);
        if !is_without_store {
            let recall = self.order.recall(GhostKey::of(0, number.into(), order));
            self.order.enter(&self.model, number, order, recall);
        }
    }

    fn act(&self, step: &Step) {
        match *step {
            Step::Enter(at, is_huge, is_without_store) => {
                let order = if is_huge { HUGE_ORDER } else { 0 };
                let number = at >> order << order;
                if self.model.is_free(number, order) {
                    self.enter(number, order, is_without_store);
                }
            }
            Step::Use(at) => self.change(at, |folio| folio.uses = (folio.uses + 1).min(2)),
            Step::Keep(at, is_kept) => self.change(at, |folio| folio.is_kept = is_kept),
            Step::Leave(at) => {
                if let Some((number, _)) = self.find(at) {
                    self.model.0.borrow_mut().remove(&number);
                }
            }
            Step::Split(at) => self.split(at),
            Step::Join(at) => self.join(at >> HUGE_ORDER << HUGE_ORDER),
            Step::Evict(pages) => self.evict(pages),
            Step::Refuse => {
                if let Some(candidate) = self.order.scan().next(&self.model) {
                    self.order.put_back(&candidate);
                }
            }
        }
    }

    fn split(&self, at: u32) {
        let Some((number, folio)) = self.find(at).filter(|(_, folio)| folio.order > 0 && !folio.is_without_store)
        else {
            return;
        };
        let page = SimulatedFolio { order: 0, uses: 0, ..folio };
        self.model.0.borrow_mut().extend((number..number + (1 << HUGE_ORDER)).map(|number| (number, page)));
        self.order.split(number, HUGE_ORDER);
    }

    /// Collapses eight pages into a huge folio in free pages, as a cache does.
    fn join(&self, first: u32) {
        let is_page =
            |number: &u32| self.find(*number).is_some_and(|(_, folio)| folio.order == 0 && !folio.is_without_store);
        let to = (0..PAGES).step_by(1 << HUGE_ORDER).find(|to| self.model.is_free(*to, HUGE_ORDER));
        let parts = first..first + (1 << HUGE_ORDER);
        let (Some(to), true) = (to, parts.clone().all(|number| is_page(&number))) else { return };
        self.model
            .0
            .borrow_mut()
            .insert(to, SimulatedFolio { order: HUGE_ORDER, uses: 0, is_kept: false, is_without_store: false });
        self.order.join(parts.clone(), to, HUGE_ORDER);
        self.model.0.borrow_mut().retain(|number, _| !parts.contains(number));
    }

    fn evict(&self, pages: u64) {
        let (mut scan, mut gone) = (self.order.scan(), 0);
        while gone < pages {
            let batch = scan.next_batch(&self.model, pages - gone);
            let Some((last, others)) = batch.split_last() else { break };
            let others_pages = others.iter().map(|candidate| 1 << candidate.order).sum::<u64>();
            assert!(others_pages < pages - gone, "{} candidates for {} pages", batch.len(), pages - gone);
            let is_enough = others_pages + (1 << last.order) >= pages - gone;
            assert!(is_enough || batch.len() == MAX_BATCH || scan.next(&self.model).is_none(), "the scan has more");
            gone += batch.iter().map(|candidate| self.drop_candidate(candidate)).sum::<u64>();
        }
    }

    /// Evicts a candidate. Asserts that the folio exists, can be evicted, and has the reported order. Returns the
    /// number of its pages.
    fn drop_candidate(&self, candidate: &Candidate) -> u64 {
        let found = self.model.0.borrow_mut().remove(&candidate.number);
        assert!(found.is_some_and(|folio| !folio.is_kept && folio.order == candidate.order), "{candidate:?} {found:?}");
        self.order.dropped(candidate, GhostKey::of(0, candidate.number.into(), candidate.order));
        1 << candidate.order
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Random folios are entered, used, made dirty, split, joined, evicted and removed. At the end no folio is dirty. A
    /// scan must then find each folio in the order once, and no other, and must leave the order empty.
    #[test]
    fn a_scan_finds_each_folio_once(steps in prop::collection::vec(random_step(), 1..600)) {
        let run = Simulation::new();
        steps.iter().for_each(|step| run.act(step));
        let [new, main] = run.order.pages();
        prop_assert!(new + main >= run.model.pages(), "removed folios may still be linked; no other is missing");
        run.model.0.borrow_mut().values_mut().for_each(|folio| folio.is_kept = false);
        let known: BTreeSet<u32> =
            run.model.0.borrow().iter().filter(|folio| !folio.1.is_without_store).map(|folio| *folio.0).collect();
        let mut found = BTreeSet::new();
        let mut scan = run.order.scan();
        while let Some(candidate) = scan.next(&run.model) {
            // The scan may also find a folio of a file without a store, in a page whose former folio was removed. The
            // cache then checks the owner.
            let is_without_store = run.model.0.borrow()[&candidate.number].is_without_store;
            run.drop_candidate(&candidate);
            prop_assert!(is_without_store || found.insert(candidate.number));
        }
        prop_assert_eq!(found, known);
        prop_assert_eq!(run.order.pages(), [0, 0]);
    }
}

/// Reads `pages` through a simulated cache of `size` pages. A page that is missing is entered into the order.
fn read(run: &Simulation, pages: std::ops::Range<u32>, size: u64) {
    for page in pages {
        if run.find(page).is_some() {
            run.act(&Step::Use(page));
            continue;
        }
        if run.model.pages() >= size {
            run.evict(1);
        }
        run.enter(page, 0, false);
    }
}

/// A set of pages that is used twice must stay in memory while a sequential scan reads more than four times as many
/// other pages. Other pages that were read only once must be evicted.
#[test]
fn a_scan_does_not_evict_pages_that_were_used_twice() {
    let run = Simulation::new();
    read(&run, 0..32, 64);
    // These reads move the first pages out of probation.
    read(&run, 40..50, 64);
    read(&run, 0..32, 64);
    read(&run, 60..240, 64);
    assert!((0..32).all(|page| run.find(page).is_some()));
    assert!((40..50).all(|page| run.find(page).is_none()));
}

/// Uses soon after a page was read must not count. So a sequential scan that reads each page three times must not evict
/// 32 pages that are used repeatedly.
#[test]
fn uses_close_together_count_as_one() {
    let run = Simulation::new();
    for _ in 0..4 {
        read(&run, 0..32, 64);
    }
    for page in 60..240 {
        (0..3).for_each(|_| read(&run, page..page + 1, 64));
        if page % 4 == 0 {
            read(&run, page / 4 % 32..page / 4 % 32 + 1, 64);
        }
    }
    let left = (0..32).filter(|page| run.find(*page).is_some()).count();
    assert!(left >= 30, "{left}");
}

/// Dirty folios are deferred while clean folios are evicted. A scan must find the deferred folios once they are clean,
/// however long that takes.
#[test]
fn dirty_folios_are_deferred() {
    let run = Simulation::new();
    read(&run, 0..64, 64);
    (0..48).for_each(|page| run.act(&Step::Keep(page, true)));
    read(&run, 64..192, 64);
    assert!((0..48).all(|page| run.find(page).is_some()) && run.model.pages() == 64);
    (0..48).for_each(|page| run.act(&Step::Keep(page, false)));
    read(&run, 192..256, 64);
    let left = (0..48).filter(|page| run.find(*page).is_some()).count();
    assert!(left < 24, "{left} of 48 that were never used");
    (0..PAGES).for_each(|page| run.act(&Step::Keep(page, true)));
    assert_eq!(run.order.scan().next(&run.model), None);
}

/// A page is read again soon after its eviction. It must enter the main queue, and a sequential scan must not evict it
/// again.
#[test]
fn a_folio_that_returns_soon_is_kept() {
    let run = Simulation::new();
    read(&run, 0..64, 64);
    read(&run, 64..80, 64);
    let back = (0..16).find(|page| run.find(*page).is_none()).unwrap();
    read(&run, back..back + 1, 64);
    read(&run, 80..240, 64);
    assert!(run.find(back).is_some());
}

/// A loop reads slightly more pages than the cache has. From one round to the next, most of the pages in memory must
/// stay.
#[test]
fn a_loop_larger_than_the_cache_keeps_most_pages() {
    let run = Simulation::new();
    for _ in 0..20 {
        read(&run, 0..110, 100);
    }
    let there = |page: &u32| run.find(*page).is_some();
    let before: Vec<u32> = (0..110).filter(there).collect();
    read(&run, 0..110, 100);
    let stayed = before.iter().filter(|page| there(page)).count();
    assert!(stayed >= 80, "{stayed}");
}

/// A scan must end even if none of its candidates can be evicted, for instance because a thread that does not run uses
/// them.
#[test]
fn a_scan_ends_if_no_candidate_can_be_evicted() {
    let run = Simulation::new();
    read(&run, 0..16, 64);
    (1..16).for_each(|page| run.act(&Step::Keep(page, true)));
    let (mut scan, mut found) = (run.order.scan(), 0);
    while let Some(candidate) = scan.next(&run.model) {
        run.order.put_back(&candidate);
        found += 1;
        assert!(found < 1000, "the scan does not end");
    }
    assert!(found > 0);
}
