//! The slots of one node: in which order words are written, and how a reader makes sense of what it meets.
//!
//! ```text
//!   slot        8       9       10      11        an entry of four slots
//!           +-------+-------+-------+-------+
//!           | VALUE | -> 8  | -> 8  | -> 8  |
//!           +-------+-------+-------+-------+
//! ```
//!
//! The rule that all writers keep: *while a slot names another, following the names leads to a VALUE or GONE that covers
//! the slot* (or to DEAD, once the node is out of the tree). A reader that comes to something else has read a name which
//! was overwritten since, before what it met was written; it begins again and sees more. So it never waits for a writer, and
//! never takes a name that was overtaken for an answer:
//!
//! - [`enter`]: GONE into the first slot, names into the others, then the VALUE: it comes with one store.
//! - [`leave`]: GONE instead of the VALUE: it leaves with one store; then the names go, then GONE.
//! - [`cover`]: first the VALUE, then names over all that stood behind, upwards. Each slot is old, then new.
//! - [`part`]: new words from the last slot to the first: the old entry's first slot is overwritten last.
//!
//! Nothing is written twice by different hands: the caller has the array's lock. Checked under loom.

use super::word::Word;
use crate::sync::{Acquire, AtomicU64, Relaxed, Release};

/// One slot, or the root.
#[repr(transparent)]
pub(super) struct Slot(AtomicU64);

impl Slot {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[cfg(loom)]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// For readers: what is behind the word can be seen, too.
    #[inline]
    pub fn look(&self) -> Word {
        Word(self.0.load(Acquire))
    }

    /// For who has the lock.
    #[inline]
    pub fn peek(&self) -> Word {
        Word(self.0.load(Relaxed))
    }

    #[inline]
    pub fn publish(&self, word: Word) {
        self.0.store(word.0, Release);
    }
}

/// What was read is out of date: begin again at the root.
#[derive(Debug)]
pub(super) struct Again;

/// What stands for `slot` in a node of that shift, and in which slot: a value, a node, or neither if nothing is there.
#[inline]
pub(super) fn resolve<const N: usize>(slots: &[Slot; N], slot: usize, shift: u32) -> Result<(usize, Word), Again> {
    let word = slots[slot % N].look();
    if word.answers() { Ok((slot, word)) } else { follow(slots, slot, word, shift) }
}

#[inline]
fn follow<const N: usize>(slots: &[Slot; N], slot: usize, name: Word, shift: u32) -> Result<(usize, Word), Again> {
    let (mut at, mut word) = (slot, name);
    // A name leads downwards, so this ends; more than one is followed only while a `cover` goes on.
    while word.is_sibling() {
        at = word.first_slot();
        word = slots[at % N].look();
    }
    if word.covers(at, slot, shift) { Ok((at, word)) } else { Err(Again) }
}

/// Puts an entry into slots that are empty.
pub(super) fn enter<const N: usize>(slots: &[Slot; N], first: usize, count: usize, word: Word) {
    if count > 1 {
        slots[first].publish(word.gone());
        slots[first + 1..first + count].iter().for_each(|slot| slot.publish(Word::sibling(first)));
    }
    slots[first].publish(word);
}

/// Takes an entry out.
pub(super) fn leave<const N: usize>(slots: &[Slot; N], first: usize, count: usize) {
    if count > 1 {
        slots[first].publish(slots[first].peek().gone());
        slots[first + 1..first + count].iter().for_each(|slot| slot.publish(Word::EMPTY));
    }
    slots[first].publish(Word::EMPTY);
}

/// Puts an entry over all that stands in these slots. `replaced` gets each word when it is out of reach.
pub(super) fn cover<const N: usize>(
    slots: &[Slot; N],
    first: usize,
    count: usize,
    word: Word,
    mut replaced: impl FnMut(Word),
) {
    for slot in &slots[first..first + count] {
        let old = slot.peek();
        slot.publish(if std::ptr::eq(slot, &slots[first]) { word } else { Word::sibling(first) });
        replaced(old);
    }
}

/// Puts new words, of `each` slots, where an entry of `count` slots stands; `word_at` makes the one that begins at a slot.
pub(super) fn part<const N: usize>(
    slots: &[Slot; N],
    first: usize,
    count: usize,
    each: usize,
    mut word_at: impl FnMut(usize) -> Word,
) {
    for begin in (first..first + count).step_by(each).rev() {
        slots[begin].publish(word_at(begin));
        // Those of the first part name the right slot already.
        if begin != first {
            slots[begin + 1..begin + each].iter().for_each(|slot| slot.publish(Word::sibling(begin)));
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
    /// Pins of the frame behind the old entry; this bit says that the frame was released.
    const RELEASED: usize = 1 << 8;

    struct Fixture {
        slots: [Slot; COUNT],
        frame: AtomicUsize,
    }

    impl Fixture {
        /// With one entry of that order in the first slots.
        fn with_entry(order: u32) -> Arc<Self> {
            let fixture = Self { slots: std::array::from_fn(|_| Slot::new()), frame: AtomicUsize::new(0) };
            enter(&fixture.slots, 0, 1 << order, Word::value(OLD, order));
            Arc::new(fixture)
        }

        /// The value for a slot, begun again as often as it takes.
        fn value(&self, slot: usize) -> Option<(usize, Word)> {
            loop {
                match resolve(&self.slots, slot, 0) {
                    Ok((at, word)) => return word.is_value().then_some((at, word)),
                    Err(Again) => loom::thread::yield_now(),
                }
            }
        }

        /// Looks up, pins, looks again: returns whether it may use the frame.
        fn try_pin(&self, slot: usize) -> bool {
            let Some((at, word)) = self.value(slot).filter(|(_, word)| word.to_value() == OLD) else { return false };
            self.frame.fetch_add(1, AcqRel);
            let is_still = self.slots[at].look() == word;
            if !is_still {
                self.frame.fetch_sub(1, AcqRel);
            }
            is_still
        }

        /// What the owner does who has taken the entry out: nobody who comes later pins for good.
        fn release(&self) -> bool {
            self.frame.compare_exchange(0, RELEASED, AcqRel, Relaxed).is_ok()
        }
    }

    /// Runs `write`, then releases the frame, beside a reader that pins it by way of `slot`.
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
        pin_beside(1, |fixture| part(&fixture.slots, 0, COUNT, 2, |slot| Word::value(slot as u64, 1)));
        pin_beside(3, |fixture| part(&fixture.slots, 0, COUNT, 2, |slot| Word::value(slot as u64, 1)));
    }

    /// While an entry is split, then one of its parts taken out, the others are found at all times.
    #[test]
    fn a_split_leaves_no_gap() {
        loom::model(|| {
            let fixture = Fixture::with_entry(1);
            let writer = fixture.clone();
            let writer = thread::spawn(move || {
                part(&writer.slots, 0, 2, 1, |slot| Word::value(slot as u64, 0));
                leave(&writer.slots, 0, 1);
            });
            let (_, word) = fixture.value(1).expect("it is always there");
            assert!([OLD, 1].contains(&word.to_value()));
            writer.join().unwrap();
        });
    }

    /// While parts become one entry each index finds the old or the new one.
    #[test]
    fn a_join_leaves_no_gap() {
        loom::model(|| {
            let fixture = Fixture::with_entry(1);
            enter(&fixture.slots, 2, 2, Word::value(OLD, 1));
            let writer = fixture.clone();
            let writer = thread::spawn(move || cover(&writer.slots, 0, COUNT, Word::value(9, ORDER), |_| ()));
            let (at, word) = fixture.value(3).expect("it is always there");
            assert!(word == Word::value(OLD, 1) && at == 2 || word == Word::value(9, ORDER) && at == 0);
            writer.join().unwrap();
        });
    }

    /// Whoever has found one slot of an entry that comes finds the others; so it is with nothing when one leaves.
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
                    false => enter(&writer.slots, 0, 2, Word::value(OLD, 1)),
                });
                let (one, other) = if is_there { (1, 0) } else { (0, 1) };
                if fixture.value(one).is_some() != is_there {
                    assert!(fixture.value(other).is_some() != is_there, "half of an entry");
                }
                writer.join().unwrap();
            });
        }
    }

    /// An entry comes, with all that was written before, and leaves; a smaller one in its first slot is not taken for it.
    #[test]
    fn an_entry_comes_and_leaves_as_one() {
        loom::model(|| {
            let fixture = Fixture::with_entry(0);
            leave(&fixture.slots, 0, 1);
            let writer = fixture.clone();
            let writer = thread::spawn(move || {
                writer.frame.store(5, Relaxed);
                enter(&writer.slots, 0, 2, Word::value(OLD, 1));
                leave(&writer.slots, 0, 2);
                enter(&writer.slots, 0, 1, Word::value(9, 0));
            });
            if let Some((_, word)) = fixture.value(1) {
                assert_eq!((word, fixture.frame.load(Relaxed)), (Word::value(OLD, 1), 5));
            }
            writer.join().unwrap();
        });
    }
}
