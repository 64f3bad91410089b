//! Lookups of readers: descents from the root, without a lock.
//!
//! A descent returns the result for one index, or restarts after it read a stale word. Iteration makes one descent per
//! step, so it keeps no state that a writer could invalidate.

use super::nodes::Nodes;
use super::slots::{IndexSlot, StaleWord, resolve};
use super::word::{self, IndexWord, SLOT_BITS, SLOTS};
use super::{Found, Mark, XArray};
use pagemill_core::epoch::Guard;
use pagemill_core::sync::{Acquire, Relaxed};
use pagemill_sys::mem;

/// An entry that a lookup found, with the slot in which it was found.
///
/// Example: [`XArray`](super::XArray).
#[derive(Clone, Copy)]
pub struct Hit<'g> {
    found: Found,
    slot: &'g IndexSlot,
    word: IndexWord,
}

impl<'g> Hit<'g> {
    #[inline]
    fn new(slot: &'g IndexSlot, word: IndexWord, index: u64) -> Self {
        Self { found: Found::new(word, index), slot, word }
    }

    #[inline]
    pub fn found(&self) -> Found {
        self.found
    }

    #[inline]
    pub fn value(&self) -> u64 {
        self.found.value
    }

    /// Returns the first index that the entry covers.
    #[inline]
    pub fn first(&self) -> u64 {
        self.found.first
    }

    /// Returns whether the slot in which the entry was found still contains the same value of the same order. The
    /// module documentation has the contract of this method.
    #[inline]
    pub fn is_still(&self) -> bool {
        self.slot.load_acquire() == self.word
    }
}

/// Maximum number of levels in a tree: an index has 40 bits, and each level uses 6 of them.
const MAX_LEVELS: usize = 7;

/// Result of the lookup of one index.
enum LookupResult<'g> {
    /// The entry that covers the index.
    Entry(Hit<'g>),
    /// No entry covers the indices from the looked-up index to `last`.
    Nothing { last: u64 },
}

impl<N: Nodes> XArray<N> {
    /// Returns the entry that covers the index. Cost: two loads for each level of the tree, and one more if the index
    /// is not in the entry's first slot.
    #[inline]
    pub fn load(&self, index: u64, guard: &Guard) -> Option<Found> {
        self.find(index, guard).map(|hit| hit.found)
    }

    /// As [`XArray::load`], for readers that then pin the object that the value refers to.
    #[inline]
    pub fn find<'g>(&'g self, index: u64, _guard: &'g Guard) -> Option<Hit<'g>> {
        retry_while_stale(|| self.try_find(index))
    }

    /// Returns the entry that seems to cover the index, for callers that validate the value. Needs no guard, so a node
    /// on the path from the root may belong to another array by now. The result may therefore be `None`, or any entry
    /// that was ever stored with the same `Nodes`.
    ///
    /// Cost: as [`XArray::find`], without the guard.
    #[inline]
    pub fn hint(&self, index: u64) -> Option<Found> {
        let mut word = self.root.load_acquire();
        if !word.reaches(index) {
            return None;
        }
        // The deepest tree has this many levels. The bound ends a descent through reused nodes.
        for _ in 0..MAX_LEVELS {
            if !word.is_node() {
                break;
            }
            let slots = &self.nodes.node(word.number()).slots;
            word = slots[word::slot_of(index, word.shift()) % SLOTS].load_acquire();
            if word.is_node() {
                continue;
            }
            if word.is_sibling() {
                word = slots[word.first_slot() % SLOTS].load_acquire();
            }
            break;
        }
        word.is_value().then(|| Found::new(word, index))
    }

    /// Prefetches into the CPU cache the memory that a store or an erasure of an entry of order 0 at `index` accesses.
    /// Needs no guard: if a node on the path belongs to another array by now, the prefetch is only useless.
    ///
    /// Cost: a load for each level of the tree, except the lowest.
    #[inline]
    pub fn prefetch_entry(&self, index: u64) {
        let mut word = self.root.load_acquire();
        for _ in 0..MAX_LEVELS {
            if !word.is_node() || !word.reaches(index) {
                return;
            }
            let node = self.nodes.node(word.number());
            let slot = &node.slots[word::slot_of(index, word.shift()) % SLOTS];
            if word.shift() == 0 {
                mem::prefetch(std::ptr::from_ref(slot) as usize);
                return mem::prefetch(std::ptr::from_ref(&node.marks) as usize);
            }
            word = slot.load_acquire();
        }
    }

    /// As [`XArray::find`], but fails if the lookup reads a stale word.
    #[inline]
    fn try_find(&self, index: u64) -> Result<Option<Hit<'_>>, StaleWord> {
        let mut slot = &self.root;
        let mut word = slot.load_acquire();
        if !word.reaches(index) {
            return Ok(None);
        }
        while word.is_node() {
            let (slots, shift) = (&self.nodes.node(word.number()).slots, word.shift());
            let (at, below) = resolve(slots, word::slot_of(index, shift), shift)?;
            (slot, word) = (&slots[at % SLOTS], below);
        }
        Ok(word.is_value().then(|| Hit::new(slot, word, index)))
    }

    /// Returns the first entry that covers `from`, or begins after `from` and not after `to`.
    pub fn next(&self, from: u64, to: u64, guard: &Guard) -> Option<Found> {
        if from == to {
            return self.load(from, guard);
        }
        self.search(from, to, |at| self.try_find_or_gap(at, to))
    }

    /// As [`XArray::next`], but returns only an entry that has the mark.
    pub fn next_marked(&self, from: u64, to: u64, mark: Mark, _guard: &Guard) -> Option<Found> {
        self.search(from, to, |at| self.try_find_marked_or_gap(at, mark as usize))
    }

    /// Returns the first index from `from` to `to` that no entry covers; `None` if entries cover all these indices.
    pub fn next_gap(&self, from: u64, to: u64, _guard: &Guard) -> Option<u64> {
        let mut at = from;
        while at <= to {
            match retry_while_stale(|| self.try_find_or_gap(at, at)) {
                LookupResult::Entry(hit) => at = hit.found.last() + 1,
                LookupResult::Nothing { .. } => return Some(at),
            }
        }
        None
    }

    /// Returns whether an entry covers the index and has the mark.
    pub fn get_mark(&self, index: u64, mark: Mark, guard: &Guard) -> bool {
        self.next_marked(index, index, mark, guard).is_some()
    }

    /// As [`XArray::next`], for the thread that holds the array's lock, which needs no guard.
    pub(super) fn next_locked(&self, from: u64, to: u64) -> Option<Found> {
        self.search(from, to, |at| self.try_find_or_gap(at, to))
    }

    /// Calls `lookup` for indices from `from` to `to` until it returns an entry. After indices without an entry,
    /// continues behind them.
    fn search<'g>(
        &self,
        from: u64,
        to: u64,
        lookup: impl Fn(u64) -> Result<LookupResult<'g>, StaleWord>,
    ) -> Option<Found> {
        let mut at = from;
        while at <= to {
            match retry_while_stale(|| lookup(at)) {
                LookupResult::Entry(hit) => return Some(hit.found),
                LookupResult::Nothing { last } => at = last.checked_add(1)?,
            }
        }
        None
    }

    /// As [`XArray::try_find`]. If no entry covers `index`, returns the last index of the gap around `index`, as far as
    /// this lookup can tell: at most the last index of the node, and not beyond the slot of `to`.
    fn try_find_or_gap(&self, index: u64, to: u64) -> Result<LookupResult<'_>, StaleWord> {
        let mut slot = &self.root;
        let mut word = slot.load_acquire();
        if word.is_empty() || !word.reaches(index) {
            return Ok(LookupResult::Nothing { last: u64::MAX });
        }
        while word.is_node() {
            let (slots, shift) = (&self.nodes.node(word.number()).slots, word.shift());
            let wanted = word::slot_of(index, shift);
            let (at, below) = resolve(slots, wanted, shift)?;
            if !below.is_value() && !below.is_node() {
                let behind = ((to >> shift) - (index >> shift)).min((SLOTS - 1 - wanted) as u64) as usize;
                let more = slots[wanted + 1..=wanted + behind]
                    .iter()
                    .take_while(|slot| slot.load_acquire().is_empty())
                    .count();
                return Ok(LookupResult::Nothing {
                    last: word::last_index_of(index, shift) + ((more as u64) << shift),
                });
            }
            (slot, word) = (&slots[at], below);
        }
        Ok(LookupResult::Entry(Hit::new(slot, word, index)))
    }

    /// As [`XArray::try_find_or_gap`], but treats indices whose entry lacks the mark as indices without an entry.
    fn try_find_marked_or_gap(&self, index: u64, mark: usize) -> Result<LookupResult<'_>, StaleWord> {
        let root = self.root.load_acquire();
        if !root.is_node() {
            let is_marked = root.is_value() && index == 0 && self.root_marks.load(Relaxed) >> mark & 1 != 0;
            let nothing = LookupResult::Nothing { last: u64::MAX };
            return Ok(if is_marked { LookupResult::Entry(Hit::new(&self.root, root, 0)) } else { nothing });
        }
        if !root.reaches(index) {
            return Ok(LookupResult::Nothing { last: u64::MAX });
        }
        let mut word = root;
        loop {
            let (node, shift) = (self.nodes.node(word.number()), word.shift());
            let wanted = word::slot_of(index, shift);
            let (at, below) = resolve(&node.slots, wanted, shift)?;
            // The marks are read after the slot: a writer sets a mark before it stores a marked entry.
            let marks = node.marks[mark].load(Acquire);
            let is_marked = marks >> at & 1 != 0;
            if is_marked && below.is_value() {
                return Ok(LookupResult::Entry(Hit::new(&node.slots[at], below, index)));
            }
            if !is_marked || !below.is_node() {
                // A join overwrites the slots of the old entries, then clears their marks. After a join the mark is at
                // another slot, so restart.
                let is_still = node.slots[at].load_acquire() == below;
                let nothing = LookupResult::Nothing { last: last_unmarked(index, marks, wanted, shift) };
                return if is_still { Ok(nothing) } else { Err(StaleWord) };
            }
            word = below;
        }
    }
}

/// Repeats a lookup until it reads no stale word. Returns its result.
#[inline]
fn retry_while_stale<T>(lookup: impl Fn() -> Result<T, StaleWord>) -> T {
    loop {
        if let Ok(seen) = lookup() {
            return seen;
        }
    }
}

/// Returns the last index before the next slot that has the mark, searching after slot `wanted`; or the last index of
/// the node. Slot `wanted` contains `index`.
fn last_unmarked(index: u64, marks: u64, wanted: usize, shift: u32) -> u64 {
    let behind = marks.checked_shr(wanted as u32 + 1).unwrap_or(0);
    match behind {
        0 => word::last_index_of(index, shift + SLOT_BITS),
        _ => word::last_index_of(index, shift) + (u64::from(behind.trailing_zeros()) << shift),
    }
}
