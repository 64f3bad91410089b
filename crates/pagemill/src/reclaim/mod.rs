//! Who gives memory back, in which order, and when it must.
//!
//! [`Account`] stands before every charge; owners of memory register as
//! [`Shrinker`]s, cheapest first; [`tree`] is the page that a process tree
//! shares; [`helper`] is the one thread that answers siblings and brings in
//! blocks ahead of need. No lock is held around a shrinker.

pub mod account;
pub mod helper;
pub mod tree;

pub use account::Account;

/// How hard to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// What can be given cheaply: whole blocks, coldest first.
    Request,
    /// Also what costs more: blocks are split to give back their free parts.
    Limit,
}

/// An owner of memory that can give some back.
pub trait Shrinker: Sync {
    /// A word for reports.
    fn name(&self) -> &'static str;

    /// Whether it may be called while the small allocator holds its locks.
    fn may_nest(&self) -> bool;

    /// Bytes it could give at once; an estimate, cheap.
    fn giveable_bytes(&self) -> u64;

    /// Gives up to about `want_bytes` and returns what the kernel really took back.
    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64;

    /// Gives up to about `want_bytes` of what has been free for some hundred milliseconds; may nest if the owner may.
    fn shrink_cold(&self, _want_bytes: u64) -> u64 {
        0
    }

    /// Measures what of its lent memory is resident.
    fn settle(&self) {}

    /// Finds out what it could give, where that takes more than reading a number. Outside of every lock.
    fn measure(&self) {}
}
