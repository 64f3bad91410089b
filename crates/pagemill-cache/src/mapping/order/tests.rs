//! Model test of the eviction order: random operations on simulated folios.

mod bounds;

use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

const PAGES: u32 = 256;
/// Order of a huge folio of the model; it begins at a multiple of its length.
const HUGE: u8 = 3;

/// A folio of the model.
#[derive(Clone, Copy, Debug)]
struct Folio {
    order: u8,
    uses: u8,
    is_kept: bool,
    /// In a file in memory, so never entered into the order.
    is_alone: bool,
}

/// Folios by the number of their first page.
#[derive(Default)]
struct Model(RefCell<BTreeMap<u32, Folio>>);

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
    /// Pages of folios in the order.
    fn pages(&self) -> u64 {
        self.0.borrow().values().filter(|folio| !folio.is_alone).map(|folio| 1 << folio.order).sum()
    }

    fn is_free(&self, number: u32, order: u8) -> bool {
        let mut folios = self.0.borrow().clone().into_iter();
        let end = number + (1 << order);
        end <= PAGES && folios.all(|(first, folio)| first >= end || first + (1 << folio.order) <= number)
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A folio comes in, if there is room; perhaps one of a file in memory.
    Enter(u32, bool, bool),
    Use(u32),
    Keep(u32, bool),
    /// A folio leaves its file.
    Leave(u32),
    Split(u32),
    Join(u32),
    Evict(u64),
    /// A candidate could not be evicted.
    Miss,
}

fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    prop_oneof![
        6 => (page.clone(), any::<bool>(), prop::bool::weighted(0.1)).prop_map(|(at, huge, alone)| Step::Enter(at, huge, alone)),
        6 => page.clone().prop_map(Step::Use),
        2 => (page.clone(), any::<bool>()).prop_map(|(at, is_kept)| Step::Keep(at, is_kept)),
        2 => page.clone().prop_map(Step::Leave),
        1 => page.clone().prop_map(Step::Split),
        1 => page.prop_map(Step::Join),
        3 => (1..20_u64).prop_map(Step::Evict),
        1 => Just(Step::Miss),
    ]
}

struct Run {
    model: Model,
    order: Order,
}

impl Run {
    fn new() -> Self {
        let order = Order::new(PAGES as usize).unwrap();
        order.begin(PAGES.into());
        order.reach(PAGES as usize).unwrap();
        Self { model: Model::default(), order }
    }

    fn find(&self, at: u32) -> Option<(u32, Folio)> {
        let folios = self.model.0.borrow();
        let (number, folio) = folios.range(..=at).next_back()?;
        (at < number + (1 << folio.order)).then_some((*number, *folio))
    }

    fn change(&self, at: u32, change: impl FnOnce(&mut Folio)) {
        let Some((number, _)) = self.find(at) else { return };
        if let Some(folio) = self.model.0.borrow_mut().get_mut(&number) {
            change(folio);
        }
    }

    fn enter(&self, number: u32, order: u8, is_alone: bool) {
        let folio = Folio { order, uses: 0, is_kept: false, is_alone };
        self.model.0.borrow_mut().insert(number, folio);
        if !is_alone {
            let recall = self.order.recall(GhostKey::of(0, number.into(), order));
            self.order.enter(&self.model, number, order, recall);
        }
    }

    fn act(&self, step: &Step) {
        match *step {
            Step::Enter(at, is_huge, is_alone) => {
                let order = if is_huge { HUGE } else { 0 };
                let number = at >> order << order;
                if self.model.is_free(number, order) {
                    self.enter(number, order, is_alone);
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
            Step::Join(at) => self.join(at >> HUGE << HUGE),
            Step::Evict(pages) => self.evict(pages),
            Step::Miss => {
                if let Some(candidate) = self.order.scan().next(&self.model) {
                    self.order.put_back(&candidate);
                }
            }
        }
    }

    fn split(&self, at: u32) {
        let Some((number, folio)) = self.find(at).filter(|(_, folio)| folio.order > 0 && !folio.is_alone) else {
            return;
        };
        let page = Folio { order: 0, uses: 0, ..folio };
        self.model.0.borrow_mut().extend((number..number + (1 << HUGE)).map(|number| (number, page)));
        self.order.split(number, HUGE);
    }

    /// Joins pages into free ones, as a cache does.
    fn join(&self, first: u32) {
        let is_page = |number: &u32| self.find(*number).is_some_and(|(_, folio)| folio.order == 0 && !folio.is_alone);
        let to = (0..PAGES).step_by(1 << HUGE).find(|to| self.model.is_free(*to, HUGE));
        let parts = first..first + (1 << HUGE);
        let (Some(to), true) = (to, parts.clone().all(|number| is_page(&number))) else { return };
        self.model.0.borrow_mut().insert(to, Folio { order: HUGE, uses: 0, is_kept: false, is_alone: false });
        self.order.join(parts.clone(), to, HUGE);
        self.model.0.borrow_mut().retain(|number, _| !parts.contains(number));
    }

    fn evict(&self, pages: u64) {
        let (mut scan, mut gone) = (self.order.scan(), 0);
        while gone < pages
            && let Some(candidate) = scan.next(&self.model)
        {
            gone += self.drop_candidate(&candidate);
        }
    }

    /// A candidate exists, may be evicted, and has the reported order.
    fn drop_candidate(&self, candidate: &Candidate) -> u64 {
        let found = self.model.0.borrow_mut().remove(&candidate.number);
        assert!(found.is_some_and(|folio| !folio.is_kept && folio.order == candidate.order), "{candidate:?} {found:?}");
        self.order.dropped(candidate, GhostKey::of(0, candidate.number.into(), candidate.order));
        1 << candidate.order
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Random folios are entered, used, kept, split, joined, evicted and removed. At the end, with none kept, a scan
    /// finds each folio once, and no other. Then the order is empty, by count and by pages.
    #[test]
    fn all_are_found_once(steps in prop::collection::vec(step(), 1..600)) {
        let run = Run::new();
        steps.iter().for_each(|step| run.act(step));
        let [new, main] = run.order.pages();
        prop_assert!(new + main >= run.model.pages(), "removed folios may still be linked; no other is missing");
        run.model.0.borrow_mut().values_mut().for_each(|folio| folio.is_kept = false);
        let known: BTreeSet<u32> =
            run.model.0.borrow().iter().filter(|(_, folio)| !folio.is_alone).map(|(number, _)| *number).collect();
        let mut found = BTreeSet::new();
        let mut scan = run.order.scan();
        while let Some(candidate) = scan.next(&run.model) {
            // A folio in a page of one that had left is found, too. The cache checks the owner.
            let is_alone = run.model.0.borrow()[&candidate.number].is_alone;
            run.drop_candidate(&candidate);
            prop_assert!(is_alone || found.insert(candidate.number));
        }
        prop_assert_eq!(found, known);
        prop_assert_eq!(run.order.pages(), [0, 0]);
    }
}

/// Reads `pages` through a cache of `size` pages; each miss enters a page.
fn read(run: &Run, pages: std::ops::Range<u32>, size: u64) {
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

/// A set that is used twice survives a scan of four times its size; pages of the scan are evicted.
#[test]
fn a_scan_passes_by() {
    let run = Run::new();
    read(&run, 0..32, 64);
    // Out of the window.
    read(&run, 40..50, 64);
    read(&run, 0..32, 64);
    read(&run, 60..240, 64);
    assert!((0..32).all(|page| run.find(page).is_some()));
    assert!((40..50).all(|page| run.find(page).is_none()));
}

/// Uses soon after a page came in do not count: a scan that reads each page three times does not evict a set in use.
#[test]
fn uses_close_together_are_one() {
    let run = Run::new();
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

/// Dirty folios are deferred while clean ones are evicted. They are found once they are clean, however long that takes.
#[test]
fn kept_folios_are_deferred() {
    let run = Run::new();
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

/// A page that comes back soon enters main, and a scan does not evict it again.
#[test]
fn returning_folios_stay() {
    let run = Run::new();
    read(&run, 0..64, 64);
    read(&run, 64..80, 64);
    let back = (0..16).find(|page| run.find(*page).is_none()).unwrap();
    read(&run, back..back + 1, 64);
    read(&run, 80..240, 64);
    assert!(run.find(back).is_some());
}

/// A loop slightly larger than the cache: most of it stays.
#[test]
fn a_loop_does_not_push_itself_out() {
    let run = Run::new();
    for _ in 0..20 {
        read(&run, 0..110, 100);
    }
    let there = |page: &u32| run.find(*page).is_some();
    let before: Vec<u32> = (0..110).filter(there).collect();
    read(&run, 0..110, 100);
    let stayed = before.iter().filter(|page| there(page)).count();
    assert!(stayed >= 80, "{stayed}");
}

/// A scan ends even if none of its candidates can be evicted, as when another thread that does not run has them.
#[test]
fn a_search_in_vain_comes_to_an_end() {
    let run = Run::new();
    read(&run, 0..16, 64);
    (1..16).for_each(|page| run.act(&Step::Keep(page, true)));
    let (mut scan, mut found) = (run.order.scan(), 0);
    while let Some(candidate) = scan.next(&run.model) {
        run.order.put_back(&candidate);
        found += 1;
        assert!(found < 1000, "there is one");
    }
    assert!(found > 0);
}
