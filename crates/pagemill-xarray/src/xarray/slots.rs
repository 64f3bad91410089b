//! The slots of one node: the order in which words are written, and how readers interpret them.
//!
//! ```text
//!   slot        8       9       10      11        an entry of four slots
//!           +-------+-------+-------+-------+
//!           | VALUE | -> 8  | -> 8  | -> 8  |
//!           +-------+-------+-------+-------+
//! ```
//!
//! A SIBLING word (`-> 8`) holds the number of its entry's first slot. All writers keep this rule: from a SIBLING,
//! following these numbers ends at a VALUE or GONE that covers the slot (or at DEAD, once the node is out of the tree).
//! A reader that ends anywhere else had read an outdated SIBLING, and restarts at the root. It never waits for a writer:
//!
//! - [`enter`] (into empty slots): GONE into the first slot, SIBLINGs into the others, then the VALUE, which inserts.
//! - [`leave`] (removes an entry): GONE instead of the VALUE, which removes; then the other slots are cleared, then GONE.
//! - [`cover`] (over old entries): first the VALUE, then SIBLINGs over all later slots, upwards.
//! - [`part`] (splits an entry): piece by piece from the last to the first, so that the first slot of the old entry is
//!   overwritten last.
//!
//! There is one writer at a time: the caller holds the array's lock. Checked with loom.

use super::word::IndexWord;
use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release};

/// One slot, or the root word.
#[repr(transparent)]
pub(super) struct IndexSlot(AtomicU64);

impl IndexSlot {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// For readers: with `Acquire`, so the node behind the word is visible, too.
    #[inline]
    pub fn look(&self) -> IndexWord {
        IndexWord(self.0.load(Acquire))
    }

    /// For the thread that holds the lock.
    #[inline]
    pub fn peek(&self) -> IndexWord {
        IndexWord(self.0.load(Relaxed))
    }

    #[inline]
    pub fn publish(&self, word: IndexWord) {
        self.0.store(word.0, Release);
    }
}

/// A stale word was read: restart at the root.
#[derive(Debug)]
pub(super) struct Again;

/// The word that answers for `slot` in a node of that shift, and its slot: a value, a node, or neither if there is no
/// entry.
#[inline]
pub(super) fn resolve<const N: usize>(
    slots: &[IndexSlot; N],
    slot: usize,
    shift: u32,
) -> Result<(usize, IndexWord), Again> {
    let word = slots[slot % N].look();
    if word.answers() { Ok((slot, word)) } else { follow(slots, slot, word, shift) }
}

#[inline]
fn follow<const N: usize>(
    slots: &[IndexSlot; N],
    slot: usize,
    name: IndexWord,
    shift: u32,
) -> Result<(usize, IndexWord), Again> {
    let (mut at, mut word) = (slot, name);
    // A name refers to a lower slot, so this ends; more than one name is followed only during a `cover`.
    while word.is_sibling() {
        at = word.first_slot();
        word = slots[at % N].look();
    }
    if word.covers(at, slot, shift) { Ok((at, word)) } else { Err(Again) }
}

/// Inserts an entry into empty slots.
pub(super) fn enter<const N: usize>(slots: &[IndexSlot; N], first: usize, count: usize, word: IndexWord) {
    if count > 1 {
        slots[first].publish(word.gone());
        slots[first + 1..first + count].iter().for_each(|slot| slot.publish(IndexWord::sibling(first)));
    }
    slots[first].publish(word);
}

/// Removes an entry.
pub(super) fn leave<const N: usize>(slots: &[IndexSlot; N], first: usize, count: usize) {
    if count > 1 {
        slots[first].publish(slots[first].peek().gone());
        slots[first + 1..first + count].iter().for_each(|slot| slot.publish(IndexWord::EMPTY));
    }
    slots[first].publish(IndexWord::EMPTY);
}

/// Stores an entry over everything in these slots. Passes each old word to `replaced` once no reader can reach it.
pub(super) fn cover<const N: usize>(
    slots: &[IndexSlot; N],
    first: usize,
    count: usize,
    word: IndexWord,
    mut replaced: impl FnMut(IndexWord),
) {
    for slot in &slots[first..first + count] {
        let old = slot.peek();
        slot.publish(if std::ptr::eq(slot, &slots[first]) { word } else { IndexWord::sibling(first) });
        replaced(old);
    }
}

/// Replaces an entry of `count` slots by words of `each` slots; `word_at` makes the word for a slot.
pub(super) fn part<const N: usize>(
    slots: &[IndexSlot; N],
    first: usize,
    count: usize,
    each: usize,
    mut word_at: impl FnMut(usize) -> IndexWord,
) {
    for begin in (first..first + count).step_by(each).rev() {
        slots[begin].publish(word_at(begin));
        // The slots of the first part name the right slot already.
        if begin != first {
            slots[begin + 1..begin + each].iter().for_each(|slot| slot.publish(IndexWord::sibling(begin)));
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;
    use std::sync::atomic::Ordering::AcqRel;

    const COUNT: usize = 4;
    const ORDER: u32 = 2;
    const OLD: u64 = 7;
    /// Pins of the frame behind the old entry; this bit marks the frame as released.
    const RELEASED: usize = 1 << 8;

    struct Fixture {
        slots: [IndexSlot; COUNT],
        frame: AtomicUsize,
    }

    impl Fixture {
        /// A node with one entry of that order in its first slots.
        fn with_entry(order: u32) -> Arc<Self> {
            let fixture = Self { slots: std::array::from_fn(|_| IndexSlot::new()), frame: AtomicUsize::new(0) };
            enter(&fixture.slots, 0, 1 << order, IndexWord::value(OLD, order));
            Arc::new(fixture)
        }

        /// The value for a slot, with as many restarts as necessary.
        fn value(&self, slot: usize) -> Option<(usize, IndexWord)> {
            loop {
                match resolve(&self.slots, slot, 0) {
                    Ok((at, word)) => return word.is_value().then_some((at, word)),
                    Err(Again) => loom::thread::yield_now(),
                }
            }
        }

        /// Looks up, pins, checks again; returns whether the frame may be used.
        fn try_pin(&self, slot: usize) -> bool {
            let Some((at, word)) = self.value(slot).filter(|(_, word)| word.to_value() == OLD) else { return false };
            self.frame.fetch_add(1, AcqRel);
            let is_still = self.slots[at].look() == word;
            if !is_still {
                self.frame.fetch_sub(1, AcqRel);
            }
            is_still
        }

        /// Releases the frame after its entry was removed; later pins fail.
        fn release(&self) -> bool {
            self.frame.compare_exchange(0, RELEASED, AcqRel, Relaxed).is_ok()
        }
    }

    /// Runs `write`, then releases the frame, concurrent with a reader that pins it through `slot`.
    fn pin_beside(slot: usize, write: fn(&Fixture)) {
        loom::model(move || {
            let fixture = Fixture::with_entry(ORDER);
            let reader = fixture.clone();
            let reader = thread::spawn(move || reader.try_pin(slot));
            write(&fixture);
            let was_released = fixture.release();
            let is_pinned = reader.join().unwrap();
            assert!(!(was_released && is_pinned), "a frame was released that is pinned");
        });
    }

    #[test]
    fn what_left_is_not_pinned() {
        pin_beside(0, |fixture| leave(&fixture.slots, 0, COUNT));
        pin_beside(3, |fixture| leave(&fixture.slots, 0, COUNT));
    }

    #[test]
    fn what_was_split_is_not_pinned() {
        pin_beside(1, |fixture| part(&fixture.slots, 0, COUNT, 2, |slot| IndexWord::value(slot as u64, 1)));
        pin_beside(3, |fixture| part(&fixture.slots, 0, COUNT, 2, |slot| IndexWord::value(slot as u64, 1)));
    }

    /// While an entry is split and one of its parts removed, the other parts are always found.
    #[test]
    fn a_split_leaves_no_gap() {
        loom::model(|| {
            let fixture = Fixture::with_entry(1);
            let writer = fixture.clone();
            let writer = thread::spawn(move || {
                part(&writer.slots, 0, 2, 1, |slot| IndexWord::value(slot as u64, 0));
                leave(&writer.slots, 0, 1);
            });
            let (_, word) = fixture.value(1).expect("it is always there");
            assert!([OLD, 1].contains(&word.to_value()));
            writer.join().unwrap();
        });
    }

    /// While parts are joined, each index finds the old entry or the new one.
    #[test]
    fn a_join_leaves_no_gap() {
        loom::model(|| {
            let fixture = Fixture::with_entry(1);
            enter(&fixture.slots, 2, 2, IndexWord::value(OLD, 1));
            let writer = fixture.clone();
            let writer = thread::spawn(move || cover(&writer.slots, 0, COUNT, IndexWord::value(9, ORDER), |_| ()));
            let (at, word) = fixture.value(3).expect("it is always there");
            assert!(word == IndexWord::value(OLD, 1) && at == 2 || word == IndexWord::value(9, ORDER) && at == 0);
            writer.join().unwrap();
        });
    }

    /// A reader that finds one slot of a new entry finds the others; and after a removal it finds none of them.
    #[test]
    fn all_slots_come_and_leave_with_one_store() {
        for is_there in [false, true] {
            loom::model(move || {
                let fixture = Fixture::with_entry(1);
                if !is_there {
                    leave(&fixture.slots, 0, 2);
                }
                let writer = fixture.clone();
                let writer = thread::spawn(move || match is_there {
                    true => leave(&writer.slots, 0, 2),
                    false => enter(&writer.slots, 0, 2, IndexWord::value(OLD, 1)),
                });
                let (one, other) = if is_there { (1, 0) } else { (0, 1) };
                if fixture.value(one).is_some() != is_there {
                    assert!(fixture.value(other).is_some() != is_there, "half of an entry");
                }
                writer.join().unwrap();
            });
        }
    }

    /// An entry is inserted, with all earlier writes visible, and removed; a smaller one in its first slot is not
    /// mistaken for it.
    #[test]
    fn an_entry_comes_and_leaves_as_one() {
        loom::model(|| {
            let fixture = Fixture::with_entry(0);
            leave(&fixture.slots, 0, 1);
            let writer = fixture.clone();
            let writer = thread::spawn(move || {
                writer.frame.store(5, Relaxed);
                enter(&writer.slots, 0, 2, IndexWord::value(OLD, 1));
                leave(&writer.slots, 0, 2);
                enter(&writer.slots, 0, 1, IndexWord::value(9, 0));
            });
            if let Some((_, word)) = fixture.value(1) {
                assert_eq!((word, fixture.frame.load(Relaxed)), (IndexWord::value(OLD, 1), 5));
            }
            writer.join().unwrap();
        });
    }
}
