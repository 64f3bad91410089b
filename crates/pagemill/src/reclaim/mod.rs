//! Who gives memory back, in which order, and when it must.
//!
//! [`Account`] stands before every charge; `owners` of memory register as
//! [`Shrinker`]s, cheapest first; [`tree`] is the page that a process tree
//! shares; [`limits`] is the room that control groups and the machine leave, as
//! [`kernel`] finds it, and `pressure` gives back before they are passed; [`helper`] is the one thread,
//! which answers siblings and brings in blocks ahead of need, [`governor`] what
//! it does by the clock, and [`alarms`] what the kernel wakes it for. No lock is
//! held around a shrinker.

pub mod account;
pub mod alarms;
pub mod governor;
pub mod helper;
pub mod kernel;
pub mod limits;
mod owners;
mod pressure;
pub mod tree;

pub use account::Account;

use crate::stats::{self, Counter};
use crate::trace::{self, Event};

/// How hard to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// What can be given cheaply: whole blocks, coldest first.
    Request,
    /// Also what costs more: blocks are split to give back their free parts.
    Limit,
}

/// What is offered to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// What nobody is likely to use soon.
    Cold,
    /// Everything: somebody may be faster than we are.
    All,
}

/// Why memory is given back. Each reason has a counter and an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The program asked.
    Program,
    /// The limit of the process or of its tree.
    Limit,
    /// A control group's limit.
    Group,
    /// The machine's memory.
    Machine,
    /// A sibling of the tree needs it.
    Sibling,
    /// Somebody waits for memory, here or elsewhere on the machine.
    Stall,
    /// Nothing happens here.
    Idleness,
    /// New memory comes in.
    New,
}

impl Reason {
    fn row(self) -> (Counter, Event) {
        match self {
            Self::Program => (Counter::GivenForProgram, Event::GivenForProgram),
            Self::Limit => (Counter::GivenForLimit, Event::GivenForLimit),
            Self::Group => (Counter::GivenForGroup, Event::GivenForGroup),
            Self::Machine => (Counter::GivenForMachine, Event::GivenForMachine),
            Self::Sibling => (Counter::GivenForSibling, Event::GivenForSibling),
            Self::Stall => (Counter::GivenForStall, Event::GivenForStall),
            Self::Idleness => (Counter::GivenForIdleness, Event::GivenForIdleness),
            Self::New => (Counter::GivenForNew, Event::GivenForNew),
        }
    }

    /// Notes that of `wanted` bytes `freed` went.
    fn note(self, wanted: u64, freed: u64) {
        let (counter, event) = self.row();
        stats::add(counter, freed);
        trace::event(event, wanted, freed);
    }
}

/// An owner of memory that can give some back.
pub trait Shrinker: Sync {
    /// A word for reports.
    fn name(&self) -> &'static str;

    /// Whether it may be called while the small allocator holds its locks.
    fn may_nest(&self) -> bool;

    /// Bytes it could give at once; an estimate, cheap.
    fn giveable_bytes(&self) -> u64;

    /// Whether a look ([`Shrinker::measure`]) may find more than it says now: nobody tells it what becomes giveable.
    fn may_have_more(&self) -> bool {
        false
    }

    /// What of that is memory which is on no account's books: no budget's limit is helped by it.
    fn foreign_bytes(&self) -> u64 {
        0
    }

    /// Gives up to about `want_bytes` and returns what the kernel really took back.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64;

    /// Gives up to about `want_bytes` of what has been free for some hundred milliseconds; may nest if the owner may.
    fn shrink_cold(&self, _want_bytes: u64) -> u64 {
        0
    }

    /// Lets the kernel take up to about `want_bytes` of what is free, should it run short, and returns how much that is:
    /// what has been free for a while, or all of it. What was offered before does not count again.
    fn offer(&self, _want_bytes: u64, _which: Which) -> u64 {
        0
    }

    /// Finds out, now and then, what the kernel took of what was offered.
    fn reap(&self) {}

    /// Measures what of its lent memory is resident.
    fn settle(&self) {}

    /// Finds out what it could give, where that takes more than reading a number. Outside of every lock.
    fn measure(&self) {}
}
