//! Who goes next: the order in which the clean folios of a cache make room.
//!
//! ```text
//!                        comes in                          came back soon after it was dropped
//!                           |                                             |
//!                           v           after a fiftieth                  v
//!      new part          window ---------------------> small -- used --> main <--.
//!      (1 to 50 % of all)   uses do not count            |                 |     | used: one use off
//!                                                        | not used        |-----'
//!                                                        v                 v not used
//!                                                     dropped           dropped
//!                                                        `--> ghosts <-----'
//! ```
//!
//! It is S3-FIFO with four changes, chosen on traces (`pagemill bench traces`, docs/decisions.md):
//!
//! 1. Uses in the *window* do not count: a page is mostly read in pieces, soon after it came in, and then no more.
//! 2. The share of the new part is not a tenth for good: a folio that comes back right after it was dropped from a part says that
//!    this part is too small.
//! 3. What came back goes to *main* only as long as the hand that makes room there does not pass too many used folios for it
//!    (`HAND_PACE`): a loop larger than the cache would else push out all of itself.
//! 4. What was dropped from main and comes back begins anew.
//!
//! A hit touches nothing here: uses are noted in the folio's word. Entering and each turn are some words under one lock,
//! the last one that is taken; nothing is allocated. A folio that left its file stays linked until its turn. One that is dirty
//! or in use when it has its turn steps *aside*, and has another once an eighth of the cache has gone by, or when
//! nothing else is left. Sizes are pages, so a huge folio weighs as many as it has.
//!
//! Links and ghosts lie in tables of their own (8 bytes a page that was in use, 5 bytes a page of the limit), not in the
//! global allocator: a limit may be far larger than what is ever used, and an order is used again by the next cache in its place.
//!
//! Source: J. Yang and others, "FIFO queues are all you need for cache eviction", SOSP 2023 (S3-FIFO); N. Megiddo and D. Modha, "ARC",
//! FAST 2003 (ghosts of two parts set their shares); T. Johnson and D. Shasha, "2Q", VLDB 1994 (uses close together are one).

mod ghosts;
mod queues;
#[cfg(test)]
mod tests;

use crate::error::Result;
use crate::sync::{Acquire, AtomicUsize, Guarded, Lock, Relaxed, Release};
use ghosts::Ghosts;
use queues::{Links, Queue, Queues};

/// The share of the new part, of 2^32: at first, at least, at most.
const FIRST_SHARE: u64 = ONE / 10;
const LEAST_SHARE: u64 = ONE / 100;
const MOST_SHARE: u64 = ONE / 2;
const ONE: u64 = 1 << 32;

/// The window is this part of the cache, or half of the new part.
const WINDOW_DIVISOR: u64 = 50;

/// A folio tells that its part is too small if it comes back before as many pages were dropped from there as this part of the cache.
const NEAR_DIVISOR: [u64; 2] = [12, 5];

/// For each page that tells so, the share changes by so many.
const STEP_PAGES: u64 = 2;

/// The hand in main may pass so many used pages for each page that comes back.
const HAND_PACE: u64 = 3;

/// Turns under the lock at a time.
const TURNS: u32 = 64;

/// Those aside have another turn after this part of the cache was dropped.
const ASIDE_DIVISOR: u64 = 8;

/// Links are opened for so many pages at a time: a mebibyte of them, and whole chunks.
const OPENED_PAGES: usize = 1 << 17;

/// Rounds before it gives up: a folio counts two uses, and may step from part to part.
const ROUNDS: u64 = 5;

/// Which part of the cache a folio was dropped from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    New = 0,
    Main = 1,
}

/// What is known of a folio, as its word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// It may be dropped.
    Idle { order: u8 },
    /// It is dirty, or somebody has it.
    Kept,
    /// It is none any more.
    Gone,
}

/// Folios by the number of their first page. Asked under the order's lock: it takes none itself.
pub trait Folios {
    fn look(&self, number: u32) -> Look;

    /// Whether it was brought in, and whoever it is for has not used it. Never, where nothing comes ahead.
    fn is_awaited(&self, _number: u32) -> bool {
        false
    }

    /// Takes one noted use off; returns whether there was one.
    fn forget_use(&self, number: u32) -> bool;

    /// Takes all noted uses off; returns whether there was one.
    fn forget_uses(&self, number: u32) -> bool;
}

/// By what a folio is known again after it was dropped: whose it was.
#[derive(Clone, Copy, Debug)]
pub struct Key(u64);

impl Key {
    /// Of a folio of 2^`order` pages that begins at `index` of a file.
    pub fn of(file: u32, index: u64, order: u8) -> Self {
        // The last step of splitmix64: all bits depend on all.
        let mut bits = (u64::from(file) << 40 ^ index ^ u64::from(order) << 32).wrapping_add(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(bits ^ bits >> 31)
    }

    fn set_of(self, sets: u64) -> u64 {
        ((self.0 >> 32) * sets) >> 32
    }

    fn mark(self) -> u32 {
        self.0 as u32 >> 17
    }
}

/// What is remembered of a folio that comes in.
#[derive(Clone, Copy, Debug)]
pub struct Recall(Option<(Part, u64)>);

impl Recall {
    /// Whether it was dropped not long ago.
    pub fn is_known(self) -> bool {
        self.0.is_some()
    }
}

/// A folio that is to go. It stands in no queue: [`Order::dropped`] or [`Order::put_back`] says what became of it.
#[derive(Debug, PartialEq, Eq)]
pub struct Candidate {
    pub number: u32,
    pub order: u8,
    pub part: Part,
}

/// The order of one cache.
pub struct Order {
    links: Links,
    /// So many pages can be linked; more under the lock.
    opened_pages: AtomicUsize,
    opening: Lock,
    most_pages: usize,
    ghosts: Ghosts,
    state: Guarded<State>,
}

/// What is behind the lock.
struct State {
    queues: Queues,
    /// Of the new part.
    share: u64,
    /// Used pages that the hand passed in main, over what it might.
    debt: u64,
    /// Pages that were picked since those aside had a turn, and of these the ones that have it now.
    picked: u64,
    again: [u64; 2],
}

enum Turn {
    Found(Candidate),
    Next,
    Nothing,
}

impl Order {
    /// Of a cache that has up to `most_pages`. Addresses only.
    ///
    /// # Errors
    ///
    /// [`crate::Error::System`] without addresses.
    pub fn new(most_pages: usize) -> Result<Self> {
        Ok(Self {
            links: Links::new(most_pages)?,
            opened_pages: AtomicUsize::new(0),
            opening: Lock::new(),
            most_pages,
            ghosts: Ghosts::new(most_pages as u64)?,
            state: Guarded::new(State::new()),
        })
    }

    /// Begins anew, for a cache whose folios have up to `pages` at a time. Those of the one before are gone.
    ///
    /// Cost: a turn for each folio that stands here still.
    pub fn begin(&self, pages: u64) {
        self.ghosts.open(pages);
        self.state.with(|state| {
            for queue in queues::QUEUES {
                while state.queues.pop(&self.links, queue).is_some() {}
            }
            *state = State::new();
        });
    }

    /// Lets pages up to `end` enter. Mostly a look: some hundred thousand come at a time.
    ///
    /// # Errors
    ///
    /// [`crate::Error::System`] if the system does not promise the memory.
    pub fn reach(&self, end: usize) -> Result<()> {
        if end <= self.opened_pages.load(Acquire) {
            return Ok(());
        }
        let _alone = self.opening.lock();
        let next = self.opened_pages.load(Relaxed);
        let end = end.next_multiple_of(OPENED_PAGES).min(self.most_pages);
        if next < end {
            self.links.open(next, end)?;
            self.opened_pages.store(end, Release);
        }
        Ok(())
    }

    /// Bytes of it that are resident, of a cache whose pages have numbers below `pages`.
    pub fn resident_bytes(&self, pages: usize) -> u64 {
        self.links.resident_bytes(pages.min(self.opened_pages.load(Relaxed))) + self.ghosts.resident_bytes()
    }

    /// What is remembered of a folio. No lock.
    pub fn recall(&self, key: Key) -> Recall {
        Recall(self.ghosts.recall(key))
    }

    /// A folio of a file with a store has come in. Its pages have been reached.
    pub fn enter(&self, folios: &impl Folios, number: u32, order: u8, recall: Recall) {
        self.state.with(|state| {
            let queue = state.place_for(recall, 1 << order);
            state.queues.push(&self.links, number, order, queue);
            state.narrow_window(&self.links, folios);
        });
    }

    /// As [`Order::enter`], of a folio that is used once: it goes before all others.
    pub fn enter_once(&self, number: u32, order: u8) {
        self.state.with(|state| state.queues.push(&self.links, number, order, Queue::Once));
    }

    /// A huge folio has become pages, of which each goes by itself: they stand where it stood.
    pub fn split(&self, number: u32, order: u8) {
        self.state.with(|state| {
            let queue = state.queues.shrink(&self.links, number).unwrap_or(Queue::Small);
            for part in number + 1..number + (1 << order) {
                state.queues.push(&self.links, part, 0, queue);
            }
        });
    }

    /// Pages have become a huge folio, which stands in main if most of them did.
    pub fn join(&self, parts: impl Iterator<Item = u32>, number: u32, order: u8) {
        self.state.with(|state| {
            let is_main = |part: &u32| matches!(self.links.queue(*part), Some(Queue::Main | Queue::AsideMain));
            let is_mostly_main = parts.filter(is_main).count() > 1 << order >> 1;
            let queue = if is_mostly_main { Queue::Main } else { Queue::Small };
            state.queues.push(&self.links, number, order, queue);
        });
    }

    /// Looks for folios to drop, one after the other. It comes to an end: all had their turns.
    pub fn hunt(&self) -> Hunt<'_> {
        Hunt { order: self, turns: None, is_last_round: false }
    }

    /// The candidate was dropped.
    pub fn dropped(&self, candidate: &Candidate, key: Key) {
        self.ghosts.note(key, candidate.part, 1 << candidate.order);
    }

    /// The candidate could not be dropped: somebody was faster. It steps aside.
    pub fn put_back(&self, candidate: &Candidate) {
        let queue = if candidate.part == Part::New { Queue::AsideNew } else { Queue::AsideMain };
        self.state.with(|state| {
            // Unless it came in anew meanwhile.
            if self.links.queue(candidate.number).is_none() {
                state.queues.push(&self.links, candidate.number, candidate.order, queue);
            }
        });
    }

    /// Pages that stand in the new part and in main.
    pub fn pages(&self) -> [u64; 2] {
        self.state.with(|state| [state.new_pages(), state.queues.total() - state.new_pages()])
    }
}

/// A search for folios to drop.
pub struct Hunt<'order> {
    order: &'order Order,
    /// Turns until it gives up, should hits add uses as fast as it takes them off, or what it finds not be dropped.
    turns: Option<u64>,
    /// Those aside have had another turn, since there was nobody else.
    is_last_round: bool,
}

impl Hunt<'_> {
    /// The next one that may go; `None` if there is none.
    pub fn next(&mut self, folios: &impl Folios) -> Option<Candidate> {
        loop {
            let links = &self.order.links;
            let turn = self.order.state.with(|state| {
                let left = self.turns.get_or_insert(ROUNDS * state.queues.total() + u64::from(TURNS));
                for _ in 0..TURNS {
                    if *left == 0 {
                        return Turn::Nothing;
                    }
                    *left -= 1;
                    match state.turn(links, folios) {
                        Turn::Next => {}
                        Turn::Nothing if !self.is_last_round => {
                            self.is_last_round = true;
                            state.call_aside();
                        }
                        turn => return turn,
                    }
                }
                Turn::Next
            });
            match turn {
                Turn::Found(candidate) => return Some(candidate),
                Turn::Nothing => return None,
                Turn::Next => {}
            }
        }
    }
}

impl State {
    const fn new() -> Self {
        Self { queues: Queues::new(), share: FIRST_SHARE, debt: 0, picked: 0, again: [0; 2] }
    }

    fn new_pages(&self) -> u64 {
        [Queue::Window, Queue::Small, Queue::AsideNew, Queue::Once].map(|queue| self.queues.pages(queue)).iter().sum()
    }

    /// Pages that the new part should have.
    fn target(&self) -> u64 {
        (u128::from(self.queues.total()) * u128::from(self.share) / u128::from(ONE)) as u64
    }

    /// Where a folio goes that comes in; what is remembered of it changes the shares.
    fn place_for(&mut self, recall: Recall, pages: u64) -> Queue {
        let Some((part, age)) = recall.0 else { return Queue::Window };
        let total = self.queues.total().max(1);
        if age <= total / NEAR_DIVISOR[part as usize] {
            let step = STEP_PAGES * pages * ONE / total;
            let share = match part {
                Part::New => self.share.saturating_add(step),
                Part::Main => self.share.saturating_sub(step),
            };
            self.share = share.clamp(LEAST_SHARE, MOST_SHARE);
        }
        if part == Part::Main || age > total {
            return Queue::Window;
        }
        let may_pass = HAND_PACE * pages;
        let is_welcome = self.debt <= may_pass;
        self.debt = self.debt.saturating_sub(may_pass);
        if is_welcome { Queue::Main } else { Queue::Window }
    }

    /// Lets the oldest of the window go on, so that it keeps its width; a few at a time.
    fn narrow_window(&mut self, links: &Links, folios: &impl Folios) {
        let width = (self.queues.total() / WINDOW_DIVISOR).min(self.target() / 2);
        for _ in 0..2 {
            // The latest one stays: who made it reads it next.
            if self.queues.pages(Queue::Window) <= width || !self.queues.has_several(Queue::Window) {
                return;
            }
            if let Some(popped) = self.queues.pop(links, Queue::Window) {
                if popped.again.is_none() {
                    folios.forget_uses(popped.number);
                }
                self.queues.push(links, popped.number, popped.order, popped.again.unwrap_or(Queue::Small));
            }
        }
    }

    /// Those aside that are there now have another turn.
    fn call_aside(&mut self) {
        self.picked = 0;
        self.again = [self.queues.pages(Queue::AsideNew), self.queues.pages(Queue::AsideMain)];
    }

    /// Whose turn it is in a part.
    fn first_of(&self, part: Part) -> Option<Queue> {
        let (aside, queues) = match part {
            Part::New => (Queue::AsideNew, &[Queue::Small, Queue::Window][..]),
            Part::Main => (Queue::AsideMain, &[Queue::Main][..]),
        };
        if self.again[part as usize] > 0 && !self.queues.is_empty(aside) {
            return Some(aside);
        }
        queues.iter().copied().find(|queue| !self.queues.is_empty(*queue))
    }

    /// Gives one folio its turn.
    fn turn(&mut self, links: &Links, folios: &impl Folios) -> Turn {
        let is_new_large = self.new_pages() >= self.target().max(1);
        let parts = if is_new_large { [Part::New, Part::Main] } else { [Part::Main, Part::New] };
        let once = (!self.queues.is_empty(Queue::Once)).then_some((Part::New, Queue::Once));
        let found = once.or_else(|| parts.into_iter().find_map(|part| Some((part, self.first_of(part)?))));
        let Some((part, queue)) = found else { return Turn::Nothing };
        let Some(popped) = self.queues.pop(links, queue) else { return Turn::Nothing };
        let number = popped.number;
        let aside = [Queue::AsideNew, Queue::AsideMain][part as usize];
        if queue == aside {
            let again = &mut self.again[part as usize];
            *again = again.saturating_sub(1 << popped.order);
        }
        if let Some(queue) = popped.again {
            self.queues.push(links, number, popped.order, queue);
            return Turn::Next;
        }
        let order = match folios.look(number) {
            Look::Gone => return Turn::Next,
            Look::Kept => {
                self.queues.push(links, number, popped.order, aside);
                return Turn::Next;
            }
            Look::Idle { order } => order,
        };
        let is_used = match part {
            // However often it was used; but not before it was.
            Part::New if queue == Queue::Once && folios.is_awaited(number) => {
                self.queues.push(links, number, order, Queue::Small);
                return Turn::Next;
            }
            Part::New => folios.forget_uses(number) && queue != Queue::Once,
            Part::Main => folios.forget_use(number),
        };
        if is_used {
            self.queues.push(links, number, order, Queue::Main);
            if part == Part::Main {
                self.debt = (self.debt + (1 << order)).min(self.queues.total() / 2);
            }
            return Turn::Next;
        }
        self.picked += 1 << order;
        if self.picked >= self.queues.total() / ASIDE_DIVISOR {
            self.call_aside();
        }
        Turn::Found(Candidate { number, order, part })
    }
}
