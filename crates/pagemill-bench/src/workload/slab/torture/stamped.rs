//! The contents of the objects, which follow from their stamps; and counters of the objects.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The number that a drop writes to every word of a value, so that later reads and a second drop are detected.
const DROPPED_WORD: u64 = 0xdead_dead_dead_dead;

fn mix_bits(word: u64) -> u64 {
    let mixed = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// A number that is unique for an object and its version. It consists of the index of the thread that inserted the
/// object, a serial number, and the number of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

impl Stamp {
    pub fn new(thread: u64, number: u64) -> Self {
        Self(thread << 56 | number << 16)
    }

    pub fn of_board(at: u64) -> Self {
        Self::new(0, at + 1)
    }

    pub fn next(self) -> Self {
        Self(self.0 & !0xffff | self.0.wrapping_add(1) & 0xffff)
    }

    pub fn changes(self) -> u64 {
        self.0 & 0xffff
    }

    pub fn is_of_same_object(self, other: Self) -> bool {
        self.0 >> 16 == other.0 >> 16
    }

    /// Yields the CPU for some stamps, so that other threads run while this thread reads the object.
    pub fn maybe_yield(self) {
        if (self.0 >> 16).is_multiple_of(32) {
            std::thread::yield_now();
        }
    }

    /// Returns the contents of word `at` of an object with this stamp. Word 0 is the stamp itself.
    pub fn word(self, at: usize) -> u64 {
        if at == 0 { self.0 } else { mix_bits(self.0.wrapping_add(at as u64)) }
    }

    pub fn of_word(word: u64) -> Self {
        Self(word)
    }
}

#[derive(Default)]
pub struct Counters {
    pub created: AtomicU64,
    pub dropped: AtomicU64,
    pub dropped_twice: AtomicU64,
    pub corrupted: AtomicU64,
}

impl Counters {
    /// Makes counters that are never freed, because values refer to them.
    pub fn new() -> &'static Self {
        Box::leak(Box::default())
    }
}

/// A value whose words follow from its stamp. It counts its creation and its drop in `counters`.
pub struct Stamped<const WORDS: usize> {
    words: [u64; WORDS],
    counters: &'static Counters,
}

impl<const WORDS: usize> Stamped<WORDS> {
    pub fn new(stamp: Stamp, counters: &'static Counters) -> Self {
        counters.created.fetch_add(1, Relaxed);
        Self { words: std::array::from_fn(|at| stamp.word(at)), counters }
    }

    pub fn stamp(&self) -> Stamp {
        Stamp::of_word(self.words[0])
    }

    pub fn is_intact(&self) -> bool {
        let stamp = self.stamp();
        (1..).zip(&self.words[1..]).all(|(at, word)| *word == stamp.word(at))
    }

    pub fn is_intact_with(&self, stamp: Stamp) -> bool {
        self.stamp() == stamp && self.is_intact()
    }
}

impl<const WORDS: usize> Drop for Stamped<WORDS> {
    fn drop(&mut self) {
        let counters = self.counters;
        counters.dropped.fetch_add(1, Relaxed);
        if self.words[0] == DROPPED_WORD {
            counters.dropped_twice.fetch_add(1, Relaxed);
        } else if !self.is_intact() {
            counters.corrupted.fetch_add(1, Relaxed);
        }
        // A later read or a second drop detects these words.
        self.words.iter_mut().for_each(|word| *word = std::hint::black_box(DROPPED_WORD));
    }
}
