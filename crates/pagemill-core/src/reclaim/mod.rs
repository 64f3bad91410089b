//! Memory reclaim: which owners of memory give memory back, in which order, and when.
//!
//! Every charge passes through [`Account`]. Owners of memory register as [`Shrinker`]s, cheapest first (`owners`).
//! [`tree`] is the page that the processes of a tree share. [`limits`] defines the room that control groups and the
//! machine leave, and [`kernel`] measures it; `pressure` gives memory back before such a limit is exceeded. [`helper`]
//! is the background thread that answers siblings and makes blocks resident before they are needed. [`governor`] is its
//! periodic work, and [`alarms`] are the kernel events that wake it.
//!
//! No lock is held around a call to a shrinker.

pub mod account;
pub mod aging;
pub mod alarms;
pub mod governor;
pub mod helper;
pub mod kernel;
pub mod limits;
mod owners;
pub mod policy;
mod pressure;
pub mod tree;

pub use account::Account;
pub use policy::{ParseReturnError, Return};

use crate::stats::{self, Counter};
use crate::trace::{self, Event};
use std::time::Duration;

/// How far reclaim goes to free memory, from cheap to costly.
///
/// Example: [`Shrinker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Returns only what is cheap to return: whole blocks, coldest first.
    Request,
    /// Also splits huge pages to return their free parts. Memory in use is not touched.
    Split,
    /// Also returns memory in use that can be recreated, such as clean folios. For charges that would be refused
    /// otherwise.
    Limit,
}

/// Which free memory is offered to the kernel.
///
/// Example: [`Shrinker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Only memory that has been free for a while.
    Cold,
    /// All free memory. Used when other processes may use up the room before this process reacts.
    All,
}

/// Why memory is given back. Each reason has a counter and a trace event.
///
/// Example: [`Account`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The program requested that memory is given back.
    Program,
    /// The limit of the process or of its tree would be exceeded.
    Limit,
    /// Usage is inside the margin of a control group's limit.
    Group,
    /// The machine's memory runs short.
    Machine,
    /// A sibling of the process tree needs memory.
    Sibling,
    /// A thread stalls on (waits for) memory, in this process's control group or elsewhere on the machine.
    Stall,
    /// The memory was free, and not reused, for the age that [`Return`] sets.
    Age,
    /// Free memory is returned to offset new memory.
    New,
}

impl Reason {
    /// Returns the counter and the trace event of this reason.
    fn counter_and_event(self) -> (Counter, Event) {
        match self {
            Self::Program => (Counter::GivenForProgram, Event::GivenForProgram),
            Self::Limit => (Counter::GivenForLimit, Event::GivenForLimit),
            Self::Group => (Counter::GivenForGroup, Event::GivenForGroup),
            Self::Machine => (Counter::GivenForMachine, Event::GivenForMachine),
            Self::Sibling => (Counter::GivenForSibling, Event::GivenForSibling),
            Self::Stall => (Counter::GivenForStall, Event::GivenForStall),
            Self::Age => (Counter::GivenForAge, Event::GivenForAge),
            Self::New => (Counter::GivenForNew, Event::GivenForNew),
        }
    }

    /// Returns the counter of the volatile bytes that were purged for this reason. `None` for reasons for which contents
    /// are never purged: age, and new memory.
    pub fn purge_counter(self) -> Option<Counter> {
        match self {
            Self::Program => Some(Counter::PurgedForProgram),
            Self::Limit => Some(Counter::PurgedForLimit),
            Self::Group => Some(Counter::PurgedForGroup),
            Self::Machine => Some(Counter::PurgedForMachine),
            Self::Sibling => Some(Counter::PurgedForSibling),
            Self::Stall => Some(Counter::PurgedForStall),
            Self::Age | Self::New => None,
        }
    }

    /// Records that `freed` of `wanted` bytes were given back.
    fn record(self, wanted: u64, freed: u64) {
        let (counter, event) = self.counter_and_event();
        stats::add(counter, freed);
        trace::event(event, wanted, freed);
    }
}

/// What it costs to give memory of an owner back.
///
/// Example: [`Shrinker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cost {
    /// The memory is free: the next allocation takes new memory.
    Nothing,
    /// The memory has contents that can be read again, such as clean pages of files.
    Contents,
    /// The memory has contents that the program computes again.
    Purge,
}

impl Cost {
    const COUNT: usize = Self::Purge as usize + 1;
}

/// An owner of memory that can give some of it back on request.
///
/// ```
/// use pagemill::Pagemill;
/// use pagemill::reclaim::{Shrinker, Urgency};
/// use std::sync::Mutex;
///
/// /// A cache of a program that a limit or pressure may empty.
/// static SPARE: Mutex<Vec<u8>> = Mutex::new(Vec::new());
/// struct Spare;
///
/// impl Shrinker for Spare {
///     fn name(&self) -> &'static str {
///         "spare"
///     }
///     fn may_nest(&self) -> bool {
///         false // frees through the global allocator
///     }
///     fn giveable_bytes(&self) -> u64 {
///         SPARE.try_lock().map_or(0, |spare| spare.capacity() as u64)
///     }
///     fn shrink(&self, _want_bytes: u64, _urgency: Urgency) -> u64 {
///         SPARE.try_lock().map_or(0, |mut spare| std::mem::take(&mut *spare).capacity() as u64)
///     }
/// }
///
/// *SPARE.lock().unwrap() = vec![0; 1 << 20];
/// let pagemill = Pagemill::of_process()?;
/// pagemill.register(&Spare)?;
/// pagemill.return_all();
/// assert_eq!(SPARE.lock().unwrap().capacity(), 0);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Shrinker: Sync {
    /// A short name for reports.
    fn name(&self) -> &'static str;

    /// What giving memory back costs. Cheaper owners are called first.
    fn cost(&self) -> Cost {
        Cost::Contents
    }

    /// Whether the shrinker may be called while the small allocator (jemalloc) holds its locks.
    fn may_nest(&self) -> bool;

    /// Bytes that the shrinker could give back at once. An estimate that is cheap to compute.
    fn giveable_bytes(&self) -> u64;

    /// Whether [`Shrinker::measure`] may find more than [`Shrinker::giveable_bytes`] reports, because the owner is not
    /// notified when memory becomes giveable. While this returns true, limits are watched.
    fn may_have_more(&self) -> bool {
        false
    }

    /// The part of [`Shrinker::giveable_bytes`] for which no account is charged. Giving these bytes back lowers no
    /// charge.
    fn foreign_bytes(&self) -> u64 {
        0
    }

    /// Gives back up to about `want_bytes`. Returns the bytes that the kernel took back.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64;

    /// As [`Shrinker::shrink`], for an owner that counts by reason what it gives back. Reclaim calls this function.
    fn shrink_for(&self, want_bytes: u64, urgency: Urgency, _reason: Reason) -> u64 {
        self.shrink(want_bytes, urgency)
    }

    /// Gives back up to about `want_bytes` of memory that has been free and not reused for `age`, oldest first. Never
    /// drops contents. May be called nested if [`Shrinker::may_nest`] returns true.
    ///
    /// Returns `None` if the owner tracks no ages. The caller then calls [`Shrinker::shrink`] for the least amount that
    /// was giveable throughout `age`. An owner whose giveable memory has contents (volatile ranges) must therefore
    /// return `Some`.
    fn shrink_aged(&self, _want_bytes: u64, _age: Duration) -> Option<u64> {
        None
    }

    /// Lets the kernel take up to about `want_bytes` of free memory if memory runs short (`MADV_FREE`). `which` selects
    /// memory that has been free for a while, or any free memory. Returns the bytes offered by this call, without those
    /// offered before.
    fn offer(&self, _want_bytes: u64, _which: Which) -> u64 {
        0
    }

    /// Finds out how much of the offered memory the kernel took, and discharges it. Called periodically.
    fn reap(&self) {}

    /// Measures how much of the overcommitted memory has become resident, and charges it.
    fn reconcile(&self) {}

    /// Measures the bytes that the owner could give back, if determining them takes more than reading a counter. The
    /// caller holds no lock.
    fn measure(&self) {}
}
