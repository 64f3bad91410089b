//! What objects are filled with, and what is counted of them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Words of an object that was dropped.
const DEAD: u64 = 0xdead_dead_dead_dead;

fn mix(word: u64) -> u64 {
    let mixed = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// Numbers that look random, the same ones for the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0) % end
    }
}

/// Which object it is, and how often it was changed: no two are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

impl Stamp {
    pub fn new(thread: u64, number: u64) -> Self {
        Self(thread << 56 | number << 16)
    }

    /// Of the object that is everybody's and has this number.
    pub fn of_board(at: u64) -> Self {
        Self::new(0, at + 1)
    }

    pub fn next(self) -> Self {
        Self(self.0 & !0xffff | self.0.wrapping_add(1) & 0xffff)
    }

    /// How often it was changed, of so many times and less.
    pub fn changes(self) -> u64 {
        self.0 & 0xffff
    }

    pub fn is_of_same_object(self, other: Self) -> bool {
        self.0 >> 16 == other.0 >> 16
    }

    /// At some objects readers stay until others have run.
    pub fn linger(self) {
        if (self.0 >> 16).is_multiple_of(32) {
            std::thread::yield_now();
        }
    }

    /// The words of an object with this stamp, the first of which is the stamp.
    pub fn word(self, at: usize) -> u64 {
        if at == 0 { self.0 } else { mix(self.0.wrapping_add(at as u64)) }
    }

    pub fn of_word(word: u64) -> Self {
        Self(word)
    }
}

/// What is counted of the objects of one cache.
#[derive(Default)]
pub struct Tally {
    pub created: AtomicU64,
    pub dropped: AtomicU64,
    pub dropped_twice: AtomicU64,
    pub corrupted: AtomicU64,
}

impl Tally {
    /// Values refer to it for as long as there are any.
    pub fn new() -> &'static Self {
        Box::leak(Box::default())
    }
}

/// A value that says what it is, and counts its end.
pub struct Stamped<const WORDS: usize> {
    words: [u64; WORDS],
    tally: &'static Tally,
}

impl<const WORDS: usize> Stamped<WORDS> {
    pub fn new(stamp: Stamp, tally: &'static Tally) -> Self {
        tally.created.fetch_add(1, Relaxed);
        Self { words: std::array::from_fn(|at| stamp.word(at)), tally }
    }

    pub fn stamp(&self) -> Stamp {
        Stamp::of_word(self.words[0])
    }

    pub fn is_whole(&self) -> bool {
        let stamp = self.stamp();
        (1..).zip(&self.words[1..]).all(|(at, word)| *word == stamp.word(at))
    }

    pub fn is(&self, stamp: Stamp) -> bool {
        self.stamp() == stamp && self.is_whole()
    }
}

impl<const WORDS: usize> Drop for Stamped<WORDS> {
    fn drop(&mut self) {
        let tally = self.tally;
        tally.dropped.fetch_add(1, Relaxed);
        if self.words[0] == DEAD {
            tally.dropped_twice.fetch_add(1, Relaxed);
        } else if !self.is_whole() {
            tally.corrupted.fetch_add(1, Relaxed);
        }
        // Who still reads it, or drops it again, is to see that.
        self.words.iter_mut().for_each(|word| *word = std::hint::black_box(DEAD));
    }
}
