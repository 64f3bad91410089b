//! Readers: descents from the root, without a lock.
//!
//! Each descent answers for one index, or finds a stale word and is restarted. Iteration is one descent per step, so no
//! state is kept between steps that a writer could invalidate.

use super::nodes::Nodes;
use super::slots::{Again, IndexSlot, resolve};
use super::word::{self, IndexWord, SLOT_BITS, SLOTS};
use super::{Found, Mark, XArray};
use pagemill_core::epoch::Guard;
use pagemill_core::sync::{Acquire, Relaxed};

/// A value that was found, and its slot.
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
        let order = word.order();
        Self { found: Found { value: word.to_value(), first: word::first_of(index, order), order }, slot, word }
    }

    #[inline]
    pub fn found(&self) -> Found {
        self.found
    }

    #[inline]
    pub fn value(&self) -> u64 {
        self.found.value
    }

    /// First index of the entry.
    #[inline]
    pub fn first(&self) -> u64 {
        self.found.first
    }

    /// Whether the slot still holds the same value of the same order. See the module for what that proves.
    #[inline]
    pub fn is_still(&self) -> bool {
        self.slot.look() == self.word
    }
}

/// Levels down to an index of 40 bits, 6 bits each.
const MAX_LEVELS: usize = 7;

/// Result of a lookup.
enum Seen<'g> {
    /// The entry that covers the index.
    Entry(Hit<'g>),
    /// No entry, from the index to this one.
    Nothing { last: u64 },
}

impl<N: Nodes> XArray<N> {
    /// The entry that covers the index. Cost: two loads a level, and one more if it is not the entry's first slot.
    #[inline]
    pub fn load(&self, index: u64, guard: &Guard) -> Option<Found> {
        self.find(index, guard).map(|hit| hit.found)
    }

    /// As [`XArray::load`], for readers that pin the object behind the value.
    #[inline]
    pub fn find<'g>(&'g self, index: u64, _guard: &'g Guard) -> Option<Hit<'g>> {
        loop {
            if let Ok(hit) = self.try_find(index) {
                return hit;
            }
        }
    }

    /// The entry that seems to cover the index, for callers that can validate the value. Without a guard a node may
    /// belong to another array by now, so the result may be any entry that was ever stored with the same `Nodes`, or
    /// none. For a value that is validated this saves a second lookup.
    ///
    /// Cost: as [`XArray::find`], without the guard.
    #[inline]
    pub fn hint(&self, index: u64) -> Option<Found> {
        let mut word = self.root.look();
        if !word.reaches(index) {
            return None;
        }
        // The deepest tree has this many levels; reused nodes might lead on endlessly.
        for _ in 0..MAX_LEVELS {
            if !word.is_node() {
                break;
            }
            let slots = &self.nodes.node(word.number()).slots;
            word = slots[word::slot_of(index, word.shift()) % SLOTS].look();
            if word.is_node() {
                continue;
            }
            if word.is_sibling() {
                word = slots[word.first_slot() % SLOTS].look();
            }
            break;
        }
        let order = word.order();
        word.is_value().then(|| Found { value: word.to_value(), first: word::first_of(index, order), order })
    }

    #[inline]
    fn try_find(&self, index: u64) -> Result<Option<Hit<'_>>, Again> {
        let mut slot = &self.root;
        let mut word = slot.look();
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

    /// The first entry that covers `from`, or begins after it and not after `to`.
    pub fn next(&self, from: u64, to: u64, _guard: &Guard) -> Option<Found> {
        self.search(from, to, |at| self.try_look(at, to))
    }

    /// As [`XArray::next`], for entries with the mark.
    pub fn next_marked(&self, from: u64, to: u64, mark: Mark, _guard: &Guard) -> Option<Found> {
        self.search(from, to, |at| self.try_look_marked(at, mark as usize))
    }

    /// The first index from `from` to `to` without an entry.
    pub fn next_gap(&self, from: u64, to: u64, _guard: &Guard) -> Option<u64> {
        let mut at = from;
        while at <= to {
            match self.again(|| self.try_look(at, at)) {
                Seen::Entry(hit) => at = hit.found.last() + 1,
                Seen::Nothing { .. } => return Some(at),
            }
        }
        None
    }

    /// Whether an entry covers the index and has the mark.
    pub fn get_mark(&self, index: u64, mark: Mark, guard: &Guard) -> bool {
        self.next_marked(index, index, mark, guard).is_some()
    }

    /// For the thread that holds the lock, which needs no guard.
    pub(super) fn next_locked(&self, from: u64, to: u64) -> Option<Found> {
        self.search(from, to, |at| self.try_look(at, to))
    }

    fn search<'g>(&self, from: u64, to: u64, look: impl Fn(u64) -> Result<Seen<'g>, Again>) -> Option<Found> {
        let mut at = from;
        while at <= to {
            match self.again(|| look(at)) {
                Seen::Entry(hit) => return Some(hit.found),
                Seen::Nothing { last } => at = last.checked_add(1)?,
            }
        }
        None
    }

    fn again<'g>(&self, look: impl Fn() -> Result<Seen<'g>, Again>) -> Seen<'g> {
        loop {
            if let Ok(seen) = look() {
                return seen;
            }
        }
    }

    /// As [`XArray::try_find`]; without an entry, returns the extent of the gap in this node, up to `to`.
    fn try_look(&self, index: u64, to: u64) -> Result<Seen<'_>, Again> {
        let mut slot = &self.root;
        let mut word = slot.look();
        if word.is_empty() || !word.reaches(index) {
            return Ok(Seen::Nothing { last: u64::MAX });
        }
        while word.is_node() {
            let (slots, shift) = (&self.nodes.node(word.number()).slots, word.shift());
            let wanted = word::slot_of(index, shift);
            let (at, below) = resolve(slots, wanted, shift)?;
            if !below.is_value() && !below.is_node() {
                let behind = ((to >> shift) - (index >> shift)).min((SLOTS - 1 - wanted) as u64) as usize;
                let more = slots[wanted + 1..=wanted + behind].iter().take_while(|slot| slot.look().is_empty()).count();
                return Ok(Seen::Nothing { last: word::last_of(index, shift) + ((more as u64) << shift) });
            }
            (slot, word) = (&slots[at], below);
        }
        Ok(Seen::Entry(Hit::new(slot, word, index)))
    }

    /// As [`XArray::try_look`], but entries without the mark count as a gap.
    fn try_look_marked(&self, index: u64, mark: usize) -> Result<Seen<'_>, Again> {
        let root = self.root.look();
        if !root.is_node() {
            let is_marked = root.is_value() && index == 0 && self.root_marks.load(Relaxed) >> mark & 1 != 0;
            let nothing = Seen::Nothing { last: u64::MAX };
            return Ok(if is_marked { Seen::Entry(Hit::new(&self.root, root, 0)) } else { nothing });
        }
        if !root.reaches(index) {
            return Ok(Seen::Nothing { last: u64::MAX });
        }
        let mut word = root;
        loop {
            let (node, shift) = (self.nodes.node(word.number()), word.shift());
            let wanted = word::slot_of(index, shift);
            let (at, below) = resolve(&node.slots, wanted, shift)?;
            // Read after the slot: a writer sets the mark before it stores a marked entry.
            let marks = node.marks[mark].load(Acquire);
            let is_marked = marks >> at & 1 != 0;
            if is_marked && below.is_value() {
                return Ok(Seen::Entry(Hit::new(&node.slots[at], below, index)));
            }
            if !is_marked || !below.is_node() {
                // A join writes the slots of its parts, then clears their marks. If one did, the mark is at another
                // slot now.
                let is_still = node.slots[at].look() == below;
                let nothing = Seen::Nothing { last: last_unmarked(index, marks, wanted, shift) };
                return if is_still { Ok(nothing) } else { Err(Again) };
            }
            word = below;
        }
    }
}

/// The last index before the next mark after slot `wanted`, which contains `index`, or the last index of the node.
fn last_unmarked(index: u64, marks: u64, wanted: usize, shift: u32) -> u64 {
    let behind = marks.checked_shr(wanted as u32 + 1).unwrap_or(0);
    match behind {
        0 => word::last_of(index, shift + SLOT_BITS),
        _ => word::last_of(index, shift) + (u64::from(behind.trailing_zeros()) << shift),
    }
}
