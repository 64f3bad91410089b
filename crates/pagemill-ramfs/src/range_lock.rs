//! Byte-range locks of a file, with the rules of POSIX: a later lock of the same owner replaces an earlier one.

use crate::error::{Error, Result};
use pagemill_core::sync::{EventCount, Guarded};
use std::time::Duration;

/// Kind of a byte-range lock.
///
/// Example: [`LockRange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Several owners may have shared locks of a byte.
    Shared,
    Exclusive,
}

/// A lock of a range of bytes.
///
/// ```
/// use pagemill::ramfs::{LockKind, LockRange, OpenOptions, RamFs};
///
/// let fs = RamFs::new("scratch")?;
/// let file = fs.open("/file", &OpenOptions::new().read(true).write(true).create(true))?;
/// let whole = LockRange { start: 0, end: u64::MAX, kind: LockKind::Exclusive, owner: 1 };
/// file.lock_range(whole)?;
/// let part = LockRange { start: 10, end: 20, kind: LockKind::Shared, owner: 2 };
/// assert_eq!(file.lock_range(part).unwrap_err().errno(), 11); // EAGAIN
/// file.unlock_range(1, 0, 100);
/// file.lock_range(part)?;
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRange {
    pub start: u64,
    /// First byte behind the range; `u64::MAX` for all bytes to the end of the file, however long it becomes.
    pub end: u64,
    pub kind: LockKind,
    /// Number of the owner, which the program chooses.
    pub owner: u64,
}

impl LockRange {
    fn conflicts_with(&self, other: &Self) -> bool {
        let is_shared = self.kind == LockKind::Shared && other.kind == LockKind::Shared;
        self.owner != other.owner && !is_shared && self.start < other.end && other.start < self.end
    }
}

/// Time after which a waiting thread looks again, although no lock was released.
const RECHECK: Duration = Duration::from_millis(100);

/// The locks of one file, in no particular order.
#[derive(Default)]
pub(crate) struct RangeLocks {
    state: Guarded<State>,
    released: EventCount,
}

#[derive(Default)]
struct State {
    held: Vec<LockRange>,
    waiting: Vec<LockRange>,
}

impl State {
    fn conflict(&self, wanted: &LockRange) -> Option<LockRange> {
        self.held.iter().find(|held| held.conflicts_with(wanted)).copied()
    }

    /// Returns whether `owner` waits, perhaps through other owners, for a lock of `wanted.owner`.
    fn would_deadlock(&self, wanted: &LockRange) -> bool {
        let mut owners: Vec<u64> = self.holders_against(wanted).collect();
        let mut seen = 0;
        while let Some(&owner) = owners.get(seen) {
            seen += 1;
            if owner == wanted.owner {
                return true;
            }
            for waiting in self.waiting.iter().filter(|waiting| waiting.owner == owner) {
                let next: Vec<u64> = self.holders_against(waiting).filter(|owner| !owners.contains(owner)).collect();
                owners.extend(next);
            }
        }
        false
    }

    fn holders_against(&self, wanted: &LockRange) -> impl Iterator<Item = u64> {
        self.held.iter().filter(|held| held.conflicts_with(wanted)).map(|held| held.owner)
    }

    /// Removes the locks of an owner in a range; parts outside of the range stay.
    fn cut(&mut self, owner: u64, start: u64, end: u64) {
        let mut rest = Vec::new();
        self.held.retain(|held| {
            if held.owner != owner || held.start >= end || held.end <= start {
                return true;
            }
            rest.extend((held.start < start).then_some(LockRange { end: start, ..*held }));
            rest.extend((held.end > end).then_some(LockRange { start: end, ..*held }));
            false
        });
        self.held.append(&mut rest);
    }

    fn put(&mut self, lock: LockRange) {
        self.cut(lock.owner, lock.start, lock.end);
        let mut merged = lock;
        self.held.retain(|held| {
            let touches = held.owner == lock.owner
                && held.kind == lock.kind
                && (held.end == merged.start || held.start == merged.end);
            if touches {
                (merged.start, merged.end) = (merged.start.min(held.start), merged.end.max(held.end));
            }
            !touches
        });
        self.held.push(merged);
    }
}

impl RangeLocks {
    /// Returns a lock that prevents `wanted`.
    pub fn conflict(&self, wanted: &LockRange) -> Option<LockRange> {
        self.state.with(|state| state.conflict(wanted))
    }

    /// Locks a range at once.
    ///
    /// # Errors
    ///
    /// [`Error::Locked`], [`Error::Invalid`] for an empty range.
    pub fn try_lock(&self, wanted: LockRange) -> Result<()> {
        check(&wanted)?;
        let conflict = self.state.with(|state| {
            let conflict = state.conflict(&wanted);
            if conflict.is_none() {
                state.put(wanted);
            }
            conflict
        });
        self.released.raise(); // a lock may have become shared
        conflict.map_or(Ok(()), |held| Err(Error::Locked { start: held.start.max(wanted.start) }))
    }

    /// Locks a range, and waits for locks of other owners.
    ///
    /// # Errors
    ///
    /// [`Error::Deadlock`], [`Error::Invalid`] for an empty range.
    pub fn lock(&self, wanted: LockRange) -> Result<()> {
        check(&wanted)?;
        loop {
            let seen = self.released.count();
            let is_done = self.state.with(|state| {
                if state.conflict(&wanted).is_none() {
                    state.put(wanted);
                    return Ok(true);
                }
                if state.would_deadlock(&wanted) {
                    return Err(Error::Deadlock);
                }
                state.waiting.push(wanted);
                Ok(false)
            })?;
            if is_done {
                self.released.raise();
                return Ok(());
            }
            self.released.wait(seen, Some(RECHECK));
            self.state.with(|state| {
                let own = state.waiting.iter().position(|waiting| *waiting == wanted);
                own.map(|own| state.waiting.swap_remove(own))
            });
        }
    }

    /// Ends the locks of an owner in a range.
    pub fn unlock(&self, owner: u64, start: u64, end: u64) {
        self.state.with(|state| state.cut(owner, start, end));
        self.released.raise();
    }
}

fn check(wanted: &LockRange) -> Result<()> {
    if wanted.start < wanted.end { Ok(()) } else { Err(Error::Invalid { what: "an empty range of bytes" }) }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    fn range(owner: u64, start: u64, end: u64, kind: LockKind) -> LockRange {
        LockRange { start, end, kind, owner }
    }

    /// Random locks and unlocks of three owners, compared with the kind of lock that each owner has on each byte.
    #[test]
    fn locks_agree_with_a_map_of_bytes() {
        let (locks, mut random) = (RangeLocks::default(), fastrand::Rng::with_seed(7));
        let mut model: BTreeMap<(u64, u64), LockKind> = BTreeMap::new();
        for _ in 0..20_000 {
            let (owner, start) = (random.u64(0..3), random.u64(0..20));
            let end = start + random.u64(1..8);
            let kind = if random.bool() { LockKind::Shared } else { LockKind::Exclusive };
            if random.u8(..3) == 0 {
                locks.unlock(owner, start, end);
                (start..end).for_each(|byte| _ = model.remove(&(byte, owner)));
                continue;
            }
            let is_free = (start..end).all(|byte| {
                let others = (0..3).filter(|other| *other != owner).filter_map(|other| model.get(&(byte, other)));
                others.into_iter().all(|held| (*held, kind) == (LockKind::Shared, LockKind::Shared))
            });
            assert_eq!(locks.try_lock(range(owner, start, end, kind)).is_ok(), is_free);
            if is_free {
                (start..end).for_each(|byte| _ = model.insert((byte, owner), kind));
            }
        }
        assert!(locks.state.lock().held.len() <= 60);
    }

    /// Two owners wait for each other. The second must get an error, and the first its lock.
    #[test]
    fn deadlock_is_an_error() {
        let locks = Arc::new(RangeLocks::default());
        locks.try_lock(range(1, 0, 10, LockKind::Exclusive)).unwrap();
        locks.try_lock(range(2, 10, 20, LockKind::Exclusive)).unwrap();
        let others = locks.clone();
        let waiter = std::thread::spawn(move || others.lock(range(1, 10, 20, LockKind::Exclusive)));
        while locks.state.lock().waiting.is_empty() {
            std::thread::yield_now();
        }
        assert!(matches!(locks.lock(range(2, 0, 5, LockKind::Shared)), Err(Error::Deadlock)));
        locks.unlock(2, 0, u64::MAX);
        waiter.join().unwrap().unwrap();
        assert!(locks.try_lock(range(3, 5, 5, LockKind::Shared)).is_err(), "an empty range");
    }
}
