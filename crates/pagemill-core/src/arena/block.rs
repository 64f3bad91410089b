//! The state word of a block: its backing, its charge, its lock, and the fork generation.
//!
//! A table has one word per block of the reservation. A thread holds the lock bit while it makes pages of the block
//! resident or discards them. A word of an older generation was written before `fork`: its lock is void, because the
//! child does not have the thread that held it, and its charge belongs to the parent.

use super::Generation;
use crate::sync;
use crate::units::os_pages_per_block;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// The kind of memory that a block has.
///
/// Example: [`Arena`](super::Arena).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Backing {
    /// The block has no memory and reads zero.
    Empty = 0,
    /// The block may be touched. The kernel provides pages on touch, which are charged when they are measured.
    Lazy = 1,
    /// The block has small pages, charged before they become resident (extents of the small allocator).
    Small = 2,
    /// The block has one huge page, charged as a whole.
    Huge = 3,
}

/// The state of a block, unpacked from its state word.
///
/// Example: [`Arena`](super::Arena).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockState {
    pub backing: Backing,
    /// Number of OS pages charged to this process's account.
    pub charged_pages: u32,
    /// Whether the block got its memory before `fork`. The parent is charged for this memory; this process never
    /// measures it.
    pub is_inherited: bool,
}

/// Bit of a block's state word, set while a thread holds the block's lock.
const LOCKED_BIT: u64 = 1 << 2;
/// Bit of a block's state word, set if the block got its memory before `fork`.
const INHERITED_BIT: u64 = 1 << 3;
/// Position, in a block's state word, of the fork generation (16 bits) in which the word was written.
const GENERATION_SHIFT: u32 = 16;
/// Position, in a block's state word, of the number of charged OS pages (16 bits).
const CHARGED_SHIFT: u32 = 32;

impl BlockState {
    pub const EMPTY: Self = Self { backing: Backing::Empty, charged_pages: 0, is_inherited: false };
    /// The state of a block that may be touched and of which no page is known to be resident.
    pub const OVERCOMMITTED: Self = Self { backing: Backing::Lazy, charged_pages: 0, is_inherited: false };

    /// The state of a block with a huge page, charged as a whole.
    pub fn huge() -> Self {
        Self { backing: Backing::Huge, charged_pages: os_pages_per_block() as u32, is_inherited: false }
    }

    /// Returns the state word for this state, with the lock bit clear.
    fn pack(self, generation: u16) -> u64 {
        let (pages, full) = (self.charged_pages as usize, os_pages_per_block());
        debug_assert!(pages <= full, "a block is charged once");
        debug_assert!(self.backing != Backing::Empty || pages == 0, "an empty block is not charged");
        debug_assert!(self.backing != Backing::Empty || !self.is_inherited, "an empty block has no inherited memory");
        debug_assert!(
            self.backing != Backing::Huge || self.is_inherited || pages == full,
            "a huge page is charged as a whole"
        );
        self.backing as u64
            | (u64::from(self.is_inherited) * INHERITED_BIT)
            | u64::from(generation) << GENERATION_SHIFT
            | u64::from(self.charged_pages) << CHARGED_SHIFT
    }

    /// Unpacks a state word. If the word was written in another fork generation, only its backing is valid: the block
    /// is not charged, and its memory is inherited.
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
            is_inherited: backing != Backing::Empty && (!is_ours || word & INHERITED_BIT != 0),
        }
    }
}

/// The state word of one block.
#[repr(transparent)]
pub(crate) struct BlockWord(AtomicU64);

impl BlockWord {
    #[cfg(test)]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Returns the current state of the block. Other threads may change the state at any time.
    #[inline]
    pub fn state(&self, generation: &Generation) -> BlockState {
        BlockState::unpack(self.0.load(Acquire), generation.get())
    }

    /// Acquires the block's lock; returns `None` if another thread holds it.
    pub fn try_lock<'word>(&'word self, generation: &Generation) -> Option<LockedBlock<'word>> {
        let generation = generation.get();
        let word = self.0.load(Relaxed);
        if word & LOCKED_BIT != 0 && (word >> GENERATION_SHIFT) as u16 == generation {
            return None;
        }
        self.lock_if_unchanged(word, generation)
    }

    /// Acquires the block's lock if the state word is still `seen`, which the caller has read and found unlocked.
    /// Returns `None` if the word has changed.
    fn lock_if_unchanged(&self, seen: u64, generation: u16) -> Option<LockedBlock<'_>> {
        let is_void = (seen >> GENERATION_SHIFT) as u16 != generation;
        debug_assert!(seen & LOCKED_BIT == 0 || is_void, "the word was read unlocked");
        let state = BlockState::unpack(seen, generation);
        self.0.compare_exchange(seen, state.pack(generation) | LOCKED_BIT, Acquire, Relaxed).ok()?;
        // The guard is created after the lock was acquired, because dropping a guard always releases the lock.
        Some(LockedBlock { word: self, generation, state })
    }

    /// Acquires the block's lock. Threads hold the lock for some hundred microseconds at most, so a waiting thread
    /// yields in a loop.
    pub fn lock<'word>(&'word self, generation: &Generation) -> LockedBlock<'word> {
        loop {
            if let Some(locked) = self.try_lock(generation) {
                return locked;
            }
            sync::pause();
        }
    }
}

/// The guard of a block's lock. Dropping the guard stores `state` in the state word and releases the lock.
pub(crate) struct LockedBlock<'word> {
    word: &'word BlockWord,
    generation: u16,
    pub state: BlockState,
}

impl Drop for LockedBlock<'_> {
    fn drop(&mut self) {
        debug_assert!(self.word.0.load(Relaxed) & LOCKED_BIT != 0, "only a held lock is released");
        self.word.0.store(self.state.pack(self.generation), Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Locks a block, and advances the fork generation as in a fork child. Locking the block again must then succeed.
    #[test]
    fn lock_of_older_generation_is_void() {
        let (word, generation) = (BlockWord::new(), Generation::default());
        let mut locked = word.lock(&generation);
        locked.state = BlockState::huge();
        drop(locked);
        let held = word.lock(&generation);
        assert!(word.try_lock(&generation).is_none());
        std::mem::forget(held); // as if `fork` had not copied the thread that holds the lock
        generation.advance();
        let locked = word.try_lock(&generation).expect("void lock");
        assert_eq!(locked.state, BlockState { backing: Backing::Huge, charged_pages: 0, is_inherited: true });
    }

    /// Reads the state word of an unlocked block and locks the block. Another attempt to lock, with the word as read,
    /// must then fail, and must not release the lock.
    #[test]
    fn failed_lock_keeps_lock_of_other_thread() {
        let (word, generation) = (BlockWord::new(), Generation::default());
        let seen = word.0.load(Relaxed);
        let held = word.lock(&generation);
        assert!(word.lock_if_unchanged(seen, generation.get()).is_none());
        assert!(word.try_lock(&generation).is_none(), "the lock was ended");
        drop(held);
        assert!(word.try_lock(&generation).is_some());
    }
}
