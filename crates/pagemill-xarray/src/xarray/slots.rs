//! The slots of one node: the order in which words are written, and how readers interpret them.
//!
//! ```text
//!   slot        8       9       10      11        an entry of four slots
//!           +-------+-------+-------+-------+
//!           | VALUE | -> 8  | -> 8  | -> 8  |
//!           +-------+-------+-------+-------+
//! ```
//!
//! A SIBLING word (`-> 8`) is in a later slot of an entry and contains the number of the entry's first slot. Every
//! write preserves this rule: following SIBLING words from a slot ends at a VALUE or GONE that covers the slot. If the
//! node is out of the tree, it may also end at DEAD. A reader that ends at another word has read a stale SIBLING, and
//! restarts at the root. Readers never wait for a writer. The operations write in this order:
//!
//! - [`insert_entry`] (into empty slots): GONE into the first slot, SIBLINGs into the others, then the VALUE. The last
//!   store inserts the entry.
//! - [`remove_entry`]: GONE in place of the VALUE, which removes the entry. Then the other slots are cleared, last the
//!   first slot.
//! - [`overwrite_entries`]: first the VALUE, then SIBLINGs into all later slots, in ascending order.
//! - [`split_entry`]: the new entries from the last to the first, so that the first slot of the old entry is
//!   overwritten last.
//!
//! There is one writer at a time: the caller holds the array's lock. Loom tests check these rules.

use super::word::IndexWord;
use pagemill_core::sync::{Acquire, AtomicU64, Relaxed, Release};

/// A slot of a node, or the root word of an array.
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

    /// Loads the word of the slot with `Acquire`, for a reader: the contents of a node that the word points at are then
    /// visible.
    #[inline]
    pub fn load_acquire(&self) -> IndexWord {
        IndexWord(self.0.load(Acquire))
    }

    /// Loads the word of the slot with `Relaxed`, for the thread that holds the array's lock.
    #[inline]
    pub fn load_relaxed(&self) -> IndexWord {
        IndexWord(self.0.load(Relaxed))
    }

    /// Stores a word in the slot with `Release`, so that readers that load the word see the contents of the node that
    /// it points at.
    #[inline]
    pub fn publish(&self, word: IndexWord) {
        self.0.store(word.0, Release);
    }
}

/// Error of a lookup that read a stale word. The reader must restart at the root.
#[derive(Debug)]
pub(super) struct StaleWord;

/// Looks up slot `slot` of a node with this shift. Returns the word at which the lookup ends, and the slot of that
/// word. The word is VALUE or NODE or, if there is no entry, EMPTY or GONE.
#[inline]
pub(super) fn resolve<const N: usize>(
    slots: &[IndexSlot; N],
    slot: usize,
    shift: u32,
) -> Result<(usize, IndexWord), StaleWord> {
    let word = slots[slot % N].load_acquire();
    if word.decides_lookup() { Ok((slot, word)) } else { follow_siblings(slots, slot, word, shift) }
}

/// Continues the lookup of `slot`, in which the word `name` was read: follows SIBLING words to the entry's first slot.
#[inline]
fn follow_siblings<const N: usize>(
    slots: &[IndexSlot; N],
    slot: usize,
    name: IndexWord,
    shift: u32,
) -> Result<(usize, IndexWord), StaleWord> {
    let (mut at, mut word) = (slot, name);
    // A SIBLING refers to a lower slot, so the loop ends. More than one SIBLING is followed only during
    // `overwrite_entries`.
    while word.is_sibling() {
        at = word.first_slot();
        word = slots[at % N].load_acquire();
    }
    if word.covers(at, slot, shift) { Ok((at, word)) } else { Err(StaleWord) }
}

/// Inserts an entry into `count` empty slots, beginning with slot `first`.
pub(super) fn insert_entry<const N: usize>(slots: &[IndexSlot; N], first: usize, count: usize, word: IndexWord) {
    if count > 1 {
        slots[first].publish(word.gone());
        slots[first + 1..first + count].iter().for_each(|slot| slot.publish(IndexWord::sibling(first)));
    }
    slots[first].publish(word);
}

/// Removes the entry in `count` slots, beginning with slot `first`.
pub(super) fn remove_entry<const N: usize>(slots: &[IndexSlot; N], first: usize, count: usize) {
    if count > 1 {
        slots[first].publish(slots[first].load_relaxed().gone());
        slots[first + 1..first + count].iter().for_each(|slot| slot.publish(IndexWord::EMPTY));
    }
    slots[first].publish(IndexWord::EMPTY);
}

/// Stores an entry over all words in `count` slots, beginning with slot `first`. Passes each old word to `replaced`
/// after the word is overwritten.
pub(super) fn overwrite_entries<const N: usize>(
    slots: &[IndexSlot; N],
    first: usize,
    count: usize,
    word: IndexWord,
    mut replaced: impl FnMut(IndexWord),
) {
    for slot in &slots[first..first + count] {
        let old = slot.load_relaxed();
        slot.publish(if std::ptr::eq(slot, &slots[first]) { word } else { IndexWord::sibling(first) });
        replaced(old);
    }
}

/// Replaces an entry of `count` slots by several entries of `each` slots. Calls `word_at` with the first slot of each
/// new entry to get the word of that entry.
pub(super) fn split_entry<const N: usize>(
    slots: &[IndexSlot; N],
    first: usize,
    count: usize,
    each: usize,
    mut word_at: impl FnMut(usize) -> IndexWord,
) {
    for begin in (first..first + count).step_by(each).rev() {
        slots[begin].publish(word_at(begin));
        // The later slots of the first new entry already refer to the right slot.
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

    const SLOT_COUNT: usize = 4;
    const ENTRY_ORDER: u32 = 2;
    /// Value of the entry that the tests look up.
    const OLD_VALUE: u64 = 7;
    /// Bit of `frame` that is set once the frame was released. The lower bits hold the number of pins.
    const RELEASED: usize = 1 << 8;

    /// The slots of a node, and the simulated page frame to which the value [`OLD_VALUE`] refers.
    struct Fixture {
        slots: [IndexSlot; SLOT_COUNT],
        frame: AtomicUsize,
    }

    impl Fixture {
        /// Creates the slots with one entry of this order, which begins at slot 0 and has the value [`OLD_VALUE`].
        fn with_entry(order: u32) -> Arc<Self> {
            let fixture = Self { slots: std::array::from_fn(|_| IndexSlot::new()), frame: AtomicUsize::new(0) };
            insert_entry(&fixture.slots, 0, 1 << order, IndexWord::value(OLD_VALUE, order));
            Arc::new(fixture)
        }

        /// Looks up a slot, and repeats the lookup until it reads no stale word. Returns the slot at which the lookup
        /// ended, and its word.
        fn value(&self, slot: usize) -> Option<(usize, IndexWord)> {
            loop {
                match resolve(&self.slots, slot, 0) {
                    Ok((at, word)) => return word.is_value().then_some((at, word)),
                    Err(StaleWord) => loom::thread::yield_now(),
                }
            }
        }

        /// Looks up the entry that covers a slot, pins the entry's frame, and returns whether the entry is still in its
        /// slot.
        fn try_pin(&self, slot: usize) -> bool {
            let Some((at, word)) = self.value(slot).filter(|(_, word)| word.to_value() == OLD_VALUE) else {
                return false;
            };
            self.frame.fetch_add(1, AcqRel);
            let is_still = self.slots[at].load_acquire() == word;
            if !is_still {
                self.frame.fetch_sub(1, AcqRel);
            }
            is_still
        }

        /// Releases the frame after its entry was removed, unless the frame is pinned. Returns whether the frame was
        /// released.
        fn release(&self) -> bool {
            self.frame.compare_exchange(0, RELEASED, AcqRel, Relaxed).is_ok()
        }
    }

    /// Runs `write` and then releases the frame, while a reader pins the frame through `slot`. The release and the pin
    /// must not both succeed.
    fn check_pin_during(slot: usize, write: fn(&Fixture)) {
        loom::model(move || {
            let fixture = Fixture::with_entry(ENTRY_ORDER);
            let reader = fixture.clone();
            let reader = thread::spawn(move || reader.try_pin(slot));
            write(&fixture);
            let was_released = fixture.release();
            let is_pinned = reader.join().unwrap();
            assert!(!(was_released && is_pinned), "a frame was released that is pinned");
        });
    }

    #[test]
    fn a_removed_entry_cannot_be_pinned() {
        check_pin_during(0, |fixture| remove_entry(&fixture.slots, 0, SLOT_COUNT));
        check_pin_during(3, |fixture| remove_entry(&fixture.slots, 0, SLOT_COUNT));
    }

    #[test]
    fn a_split_entry_cannot_be_pinned() {
        check_pin_during(1, |fixture| {
            split_entry(&fixture.slots, 0, SLOT_COUNT, 2, |slot| IndexWord::value(slot as u64, 1))
        });
        check_pin_during(3, |fixture| {
            split_entry(&fixture.slots, 0, SLOT_COUNT, 2, |slot| IndexWord::value(slot as u64, 1))
        });
    }

    /// An entry is split, and one of the parts is removed. A reader that looks up the other part must find that part or
    /// the old entry.
    #[test]
    fn a_reader_finds_an_entry_during_a_split() {
        loom::model(|| {
            let fixture = Fixture::with_entry(1);
            let writer = fixture.clone();
            let writer = thread::spawn(move || {
                split_entry(&writer.slots, 0, 2, 1, |slot| IndexWord::value(slot as u64, 0));
                remove_entry(&writer.slots, 0, 1);
            });
            let (_, word) = fixture.value(1).expect("it is always there");
            assert!([OLD_VALUE, 1].contains(&word.to_value()));
            writer.join().unwrap();
        });
    }

    /// Two entries are joined into one. A reader must find either an old entry or the new one.
    #[test]
    fn a_reader_finds_an_entry_during_a_join() {
        loom::model(|| {
            let fixture = Fixture::with_entry(1);
            insert_entry(&fixture.slots, 2, 2, IndexWord::value(OLD_VALUE, 1));
            let writer = fixture.clone();
            let writer = thread::spawn(move || {
                overwrite_entries(&writer.slots, 0, SLOT_COUNT, IndexWord::value(9, ENTRY_ORDER), |_| ())
            });
            let (at, word) = fixture.value(3).expect("it is always there");
            assert!(
                word == IndexWord::value(OLD_VALUE, 1) && at == 2
                    || word == IndexWord::value(9, ENTRY_ORDER) && at == 0
            );
            writer.join().unwrap();
        });
    }

    /// An entry of two slots is inserted or removed. A reader that finds the change in one slot must then find the
    /// change in the other slot.
    #[test]
    fn all_slots_change_with_one_store() {
        for is_there in [false, true] {
            loom::model(move || {
                let fixture = Fixture::with_entry(1);
                if !is_there {
                    remove_entry(&fixture.slots, 0, 2);
                }
                let writer = fixture.clone();
                let writer = thread::spawn(move || match is_there {
                    true => remove_entry(&writer.slots, 0, 2),
                    false => insert_entry(&writer.slots, 0, 2, IndexWord::value(OLD_VALUE, 1)),
                });
                let (one, other) = if is_there { (1, 0) } else { (0, 1) };
                if fixture.value(one).is_some() != is_there {
                    assert!(fixture.value(other).is_some() != is_there, "half of an entry");
                }
                writer.join().unwrap();
            });
        }
    }

    /// An entry of two slots is inserted and removed, and then a smaller entry is stored in its first slot. A reader of
    /// the second slot must find the first entry with its contents, or no entry.
    #[test]
    fn a_reader_finds_a_whole_entry_or_none() {
        loom::model(|| {
            let fixture = Fixture::with_entry(0);
            remove_entry(&fixture.slots, 0, 1);
            let writer = fixture.clone();
            let writer = thread::spawn(move || {
                writer.frame.store(5, Relaxed);
                insert_entry(&writer.slots, 0, 2, IndexWord::value(OLD_VALUE, 1));
                remove_entry(&writer.slots, 0, 2);
                insert_entry(&writer.slots, 0, 1, IndexWord::value(9, 0));
            });
            if let Some((_, word)) = fixture.value(1) {
                assert_eq!((word, fixture.frame.load(Relaxed)), (IndexWord::value(OLD_VALUE, 1), 5));
            }
            writer.join().unwrap();
        });
    }
}
