//! Readers: from the root down, without a lock.
//!
//! Each walk answers for one index, or says that it has met what is out of date, and is begun again. Iteration is a walk for
//! each step, so nothing is carried from one to the next that a writer could take away.

use super::nodes::Nodes;
use super::slots::{Again, Slot, resolve};
use super::word::{self, SLOT_BITS, SLOTS, Word};
use super::{Found, Mark, XArray};
use crate::sync::{Acquire, Relaxed};
use crossbeam_epoch::Guard;

/// A value that was found, and the slot it stood in.
#[derive(Clone, Copy)]
pub struct Hit<'g> {
    found: Found,
    slot: &'g Slot,
    word: Word,
}

impl<'g> Hit<'g> {
    #[inline]
    fn new(slot: &'g Slot, word: Word, index: u64) -> Self {
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

    /// Whether the same value of the same order stands where it was found. What that proves: see the module.
    #[inline]
    pub fn is_still(&self) -> bool {
        self.slot.look() == self.word
    }
}

/// Nodes on the way to an index of 40 bits, 6 at a time.
const MAX_LEVELS: usize = 7;

/// What a walk for an index found.
enum Seen<'g> {
    /// What covers the index.
    Entry(Hit<'g>),
    /// Nothing, from the index to this one.
    Nothing { last: u64 },
}

impl<N: Nodes> XArray<N> {
    /// What covers the index. Cost: two loads a level, and one if it is not the entry's first slot.
    #[inline]
    pub fn load(&self, index: u64, guard: &Guard) -> Option<Found> {
        self.find(index, guard).map(|hit| hit.found)
    }

    /// As [`XArray::load`], for who pins what the value stands for.
    #[inline]
    pub fn find<'g>(&'g self, index: u64, _guard: &'g Guard) -> Option<Hit<'g>> {
        loop {
            if let Ok(hit) = self.try_find(index) {
                return hit;
            }
        }
    }

    /// What seems to cover the index, for who can tell by the value whether it does: no guard is held, so a node may be
    /// another array's by now, and what is found anything that was ever stored with the same [`Nodes`], or nothing. Once a
    /// value is known to be right, a second look is saved.
    ///
    /// Cost: as [`XArray::find`], without the guard.
    #[inline]
    pub fn hint(&self, index: u64) -> Option<Found> {
        let mut word = self.root.look();
        if !word.reaches(index) {
            return None;
        }
        // So deep is the deepest; nodes that go from hand to hand might lead on for ever.
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

    /// As [`XArray::next`], of the entries with the mark.
    pub fn next_marked(&self, from: u64, to: u64, mark: Mark, _guard: &Guard) -> Option<Found> {
        self.search(from, to, |at| self.try_look_marked(at, mark as usize))
    }

    /// The first index from `from` to `to` that no entry covers.
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

    /// For who has the lock, and so needs no guard.
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

    /// As [`XArray::try_find`]; where nothing is, it looks how far that goes in the node, up to `to`.
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

    /// As [`XArray::try_look`], where what has not the mark is nothing.
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
            // After the slot: who put a marked entry there has marked it before.
            let marks = node.marks[mark].load(Acquire);
            let is_marked = marks >> at & 1 != 0;
            if is_marked && below.is_value() {
                return Ok(Seen::Entry(Hit::new(&node.slots[at], below, index)));
            }
            if !is_marked || !below.is_node() {
                // A join writes the slots of its parts, then takes their marks off: did it, the mark is elsewhere now.
                let is_still = node.slots[at].look() == below;
                let nothing = Seen::Nothing { last: last_unmarked(index, marks, wanted, shift) };
                return if is_still { Ok(nothing) } else { Err(Again) };
            }
            word = below;
        }
    }
}

/// How far it is to the next mark after slot `wanted`, in which `index` lies, or to the end of the node.
fn last_unmarked(index: u64, marks: u64, wanted: usize, shift: u32) -> u64 {
    let behind = marks.checked_shr(wanted as u32 + 1).unwrap_or(0);
    match behind {
        0 => word::last_of(index, shift + SLOT_BITS),
        _ => word::last_of(index, shift) + (u64::from(behind.trailing_zeros()) << shift),
    }
}
