//! The state word of a block: its backing, the charge, and the fork generation.
//!
//! There is one word per block of reserved address space, found by arithmetic. One bit is the block's lock, held while
//! pages come or go. A lock held by a thread that `fork` did not copy carries an older generation and is void; so are
//! charges of the parent.

use super::Generation;
use crate::sync;
use crate::units::os_pages_per_block;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// The backing of a block.
///
/// Example: [`Arena`](super::Arena).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Backing {
    /// No page: reads zero.
    Empty = 0,
    /// Open to the program. The kernel brings pages in on touch; they are charged when measured.
    Lazy = 1,
    /// Pages brought in unit by unit (extents of the small allocator).
    Small = 2,
    /// One huge page, or all OS pages of the block at once.
    Huge = 3,
}

/// The unpacked word.
///
/// Example: [`Arena`](super::Arena).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockState {
    pub backing: Backing,
    /// OS pages charged to the account.
    pub charged_pages: u32,
    /// Brought in before `fork`: shared with the parent, charged and overcommitted there, never measured here.
    pub is_inherited: bool,
}

const LOCKED: u64 = 1 << 2;
const INHERITED: u64 = 1 << 3;
const GENERATION_SHIFT: u32 = 16;
const CHARGED_SHIFT: u32 = 32;

impl BlockState {
    pub const EMPTY: Self = Self { backing: Backing::Empty, charged_pages: 0, is_inherited: false };
    /// Open to be touched, nothing known to be resident.
    pub const OVERCOMMITTED: Self = Self { backing: Backing::Lazy, charged_pages: 0, is_inherited: false };

    pub fn huge() -> Self {
        Self { backing: Backing::Huge, charged_pages: os_pages_per_block() as u32, is_inherited: false }
    }

    fn pack(self, generation: u16) -> u64 {
        self.backing as u64
            | (u64::from(self.is_inherited) * INHERITED)
            | u64::from(generation) << GENERATION_SHIFT
            | u64::from(self.charged_pages) << CHARGED_SHIFT
    }

    /// For a word of another generation only the backing is valid.
    fn unpack(word: u64, generation: u16) -> Self {
        let backing = match word & 3 {
            0 => Backing::Empty,
            1 => Backing::Lazy,
            2 => Backing::Small,
            _ => Backing::Huge,
        };
        let is_ours = (word >> GENERATION_SHIFT) as u16 == generation;
        Self {
            backing,
            charged_pages: if is_ours { (word >> CHARGED_SHIFT) as u32 & 0xFFFF } else { 0 },
            is_inherited: backing != Backing::Empty && (!is_ours || word & INHERITED != 0),
        }
    }
}

/// The state word.
#[repr(transparent)]
pub(crate) struct BlockWord(AtomicU64);

impl BlockWord {
    #[cfg(test)]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The current state; it may change at any time.
    #[inline]
    pub fn peek(&self, generation: &Generation) -> BlockState {
        BlockState::unpack(self.0.load(Acquire), generation.get())
    }

    /// Takes the block's lock; returns `None` if another thread holds it.
    pub fn try_lock<'word>(&'word self, generation: &Generation) -> Option<Locked<'word>> {
        let generation = generation.get();
        let word = self.0.load(Relaxed);
        if word & LOCKED != 0 && (word >> GENERATION_SHIFT) as u16 == generation {
            return None;
        }
        self.claim(word, generation)
    }

    /// Takes the lock of a word that was seen unlocked; `None` if it has changed since.
    fn claim(&self, seen: u64, generation: u16) -> Option<Locked<'_>> {
        let state = BlockState::unpack(seen, generation);
        self.0.compare_exchange(seen, state.pack(generation) | LOCKED, Acquire, Relaxed).ok()?;
        // Create the guard only with the lock: dropping a guard releases the lock, whichever thread holds it.
        Some(Locked { word: self, generation, state })
    }

    /// Takes the block's lock. It is held for at most some hundred microseconds, so waiters yield.
    pub fn lock<'word>(&'word self, generation: &Generation) -> Locked<'word> {
        loop {
            if let Some(locked) = self.try_lock(generation) {
                return locked;
            }
            sync::pause();
        }
    }
}

/// A locked block: changes of `state` are stored on drop.
pub(crate) struct Locked<'word> {
    word: &'word BlockWord,
    generation: u16,
    pub state: BlockState,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.word.0.store(self.state.pack(self.generation), Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_of_an_older_generation_is_void() {
        let (word, generation) = (BlockWord::new(), Generation::default());
        let mut locked = word.lock(&generation);
        locked.state = BlockState::huge();
        drop(locked);
        let held = word.lock(&generation);
        assert!(word.try_lock(&generation).is_none());
        std::mem::forget(held); // the thread that held it was not copied by fork
        generation.advance();
        let locked = word.try_lock(&generation).expect("void lock");
        assert_eq!(locked.state, BlockState { backing: Backing::Huge, charged_pages: 0, is_inherited: true });
    }

    /// A thread that claims a word it saw unlocked too late does not release the lock of another thread.
    #[test]
    fn a_late_claim_leaves_the_lock() {
        let (word, generation) = (BlockWord::new(), Generation::default());
        let seen = word.0.load(Relaxed);
        let held = word.lock(&generation);
        assert!(word.claim(seen, generation.get()).is_none());
        assert!(word.try_lock(&generation).is_none(), "the lock was ended");
        drop(held);
        assert!(word.try_lock(&generation).is_some());
    }
}
