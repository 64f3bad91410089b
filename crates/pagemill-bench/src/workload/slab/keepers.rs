//! Subjects that store objects of one size, with the object's number in every word: the allocator, or one of three
//! kinds of cache.

use std::time::Duration;

use pagemill::slab::{self, ByHandle, Fixed, Handle, Progress, Settings, Slabs, Slot};

use crate::native::{self, GiveBack, Piece};
use crate::workload::Failure;
use crate::workload::hit::failed;

/// A subject that stores objects of `WORDS` words.
pub trait Keeper<const WORDS: usize>: Sync {
    /// The workload's reference to an object.
    type Kept: Send;

    /// Makes an object whose words all are this number.
    fn put(&self, number: u64) -> Result<Self::Kept, Failure>;

    /// Frees an object.
    fn take(&self, kept: Self::Kept) -> Result<(), Failure>;

    /// Returns whether each word of an object is this number.
    fn is_whole(&self, kept: &Self::Kept, number: u64) -> bool;

    /// Returns all free memory to the system, in the subject's own way.
    fn give_back(&self) -> Result<(), Failure>;

    /// Does a step of defragmentation; none if the subject cannot defragment.
    fn step(&self, _budget: Duration) -> Result<Option<Progress>, Failure> {
        Ok(None)
    }

    /// Returns the number of objects moved so far.
    fn moved(&self) -> Result<u64, Failure> {
        Ok(0)
    }

    /// Returns the bytes of the table of handles; 0 if the subject has none.
    fn handle_bytes(&self) -> u64 {
        0
    }
}

/// Converts the result of a step. If another thread was busy with a step, there was no progress.
pub fn stepped(step: pagemill::Result<Progress>) -> Result<Option<Progress>, Failure> {
    match step {
        Err(pagemill::Error::Busy { .. }) => Ok(Some(Progress::default())),
        other => other.map(Some).map_err(failed),
    }
}

/// The allocator that serves `malloc` in this process.
pub struct Malloc {
    pub how: GiveBack,
}

impl<const WORDS: usize> Keeper<WORDS> for Malloc {
    type Kept = Piece;

    #[inline]
    fn put(&self, number: u64) -> Result<Piece, Failure> {
        Piece::filled(WORDS, number).ok_or_else(|| Failure::Other("malloc refused an object".to_owned()))
    }

    #[inline]
    fn take(&self, kept: Piece) -> Result<(), Failure> {
        drop(kept);
        Ok(())
    }

    fn is_whole(&self, kept: &Piece, number: u64) -> bool {
        kept.words().len() == WORDS && kept.words().iter().all(|word| *word == number)
    }

    fn give_back(&self) -> Result<(), Failure> {
        native::give_back(self.how).map_err(Failure::Other)
    }
}

/// A cache of objects that do not move.
pub struct Still<const WORDS: usize>(&'static Fixed<[u64; WORDS]>);

impl<const WORDS: usize> Still<WORDS> {
    pub fn new(slabs: &'static Slabs) -> Result<Self, Failure> {
        let cache = slabs.fixed(Settings::new("fixed")).map_err(failed)?;
        // The cache is leaked, because its objects borrow from it and the workload stores them beside it.
        Ok(Self(Box::leak(Box::new(cache))))
    }
}

impl<const WORDS: usize> Keeper<WORDS> for Still<WORDS> {
    type Kept = Slot<'static, [u64; WORDS]>;

    #[inline]
    fn put(&self, number: u64) -> Result<Self::Kept, Failure> {
        self.0.insert([number; WORDS]).map_err(failed)
    }

    #[inline]
    fn take(&self, kept: Self::Kept) -> Result<(), Failure> {
        drop(kept);
        Ok(())
    }

    fn is_whole(&self, kept: &Self::Kept, number: u64) -> bool {
        kept.iter().all(|word| *word == number)
    }

    fn give_back(&self) -> Result<(), Failure> {
        self.0.shrink().map(|_| ()).map_err(failed)
    }
}

/// A cache of values that are accessed by handle.
pub struct Handled<const WORDS: usize>(ByHandle<[u64; WORDS]>);

impl<const WORDS: usize> Handled<WORDS> {
    pub fn new(slabs: &'static Slabs) -> Result<Self, Failure> {
        slabs.by_handle(Settings::new("by handle")).map(Self).map_err(failed)
    }
}

impl<const WORDS: usize> Keeper<WORDS> for Handled<WORDS> {
    type Kept = Handle<[u64; WORDS]>;

    #[inline]
    fn put(&self, number: u64) -> Result<Self::Kept, Failure> {
        self.0.insert([number; WORDS]).map_err(failed)
    }

    #[inline]
    fn take(&self, kept: Self::Kept) -> Result<(), Failure> {
        match self.0.remove(kept).map_err(failed)? {
            true => Ok(()),
            false => Err(Failure::WrongAnswer("a handle stands for nothing".to_owned())),
        }
    }

    fn is_whole(&self, kept: &Self::Kept, number: u64) -> bool {
        self.0.get(*kept, &slab::pin()).is_some_and(|value| value.iter().all(|word| *word == number))
    }

    fn give_back(&self) -> Result<(), Failure> {
        self.0.shrink().map(|_| ()).map_err(failed)
    }

    fn step(&self, budget: Duration) -> Result<Option<Progress>, Failure> {
        stepped(self.0.defrag_step(budget))
    }

    fn moved(&self) -> Result<u64, Failure> {
        self.0.info().map(|info| info.moved).map_err(failed)
    }

    fn handle_bytes(&self) -> u64 {
        self.0.handle_bytes()
    }
}
