//! The registered owners of memory. They are called in order of cost, in bounded steps, and are not trusted.
//!
//! An owner that panics is not called again (where panics unwind; the preload library aborts). A call that does not
//! return blocks only the thread that made it and threads whose charge would be refused otherwise. Other threads skip
//! that owner.
//! Reported amounts are added with saturation. Whether an owner really freed memory is seen in the limit that had no
//! room.

use super::aging::LeastOver;
use super::governor::WORTHWHILE_BYTES;
use super::{Shrinker, Urgency, Which};
use crate::arena::Context;
use crate::stats::{self, Counter};
use pagemill_sys::clock;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Relaxed};
use std::time::Duration;

/// Owners that can register.
pub const MAX_OWNERS: usize = 8;

/// Maximum bytes requested by one call, or `1/STEP_DIVISOR` of what is wanted if that is more.
const STEP_BYTES: u64 = 64 << 20;
const STEP_DIVISOR: u64 = 16;

/// A step takes some milliseconds. An owner that shows no progress for this long is blocked.
const BLOCKED_NS: u64 = 1_000_000_000;

#[derive(Default)]
struct RegisteredOwner {
    shrinker: OnceLock<&'static dyn Shrinker>,
    /// Threads inside a call that may take long.
    inside: AtomicU32,
    /// When the first of them entered, or the last one left.
    progress_ns: AtomicU64,
    has_failed: AtomicBool,
    /// Least amount that was giveable throughout an age, for an owner that tracks no ages.
    unused: LeastOver,
}

/// Decrements [`RegisteredOwner::inside`] on drop, also on unwind.
struct CallGuard<'owner>(&'owner RegisteredOwner);

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.progress_ns.store(clock::fine_ns(), Relaxed);
        self.0.inside.fetch_sub(1, AcqRel);
    }
}

impl RegisteredOwner {
    /// Makes a call that only reads a number or two.
    fn ask<T>(&self, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        let shrinker = *self.shrinker.get()?;
        if self.has_failed.load(Relaxed) {
            return None;
        }
        let result = catch_unwind(AssertUnwindSafe(|| act(shrinker)));
        if result.is_err() {
            self.has_failed.store(true, Relaxed);
            stats::add(Counter::OwnersFailed, 1);
        }
        result.ok()
    }

    /// Makes a call that may take long. Returns `None` if another thread has been blocked in one for [`BLOCKED_NS`].
    fn call<T>(&self, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        self.call_within(BLOCKED_NS, act)
    }

    /// As [`RegisteredOwner::call`], but threads inside count as blocked only after `timeout_ns` without progress.
    fn call_within<T>(&self, timeout_ns: u64, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        let now = clock::fine_ns();
        if self.inside.fetch_add(1, AcqRel) == 0 {
            self.progress_ns.store(now, Relaxed);
        } else if now.saturating_sub(self.progress_ns.load(Relaxed)) > timeout_ns {
            self.inside.fetch_sub(1, AcqRel);
            stats::add(Counter::OwnersBlocked, 1);
            return None;
        }
        let _inside = CallGuard(self);
        self.ask(act)
    }

    fn may_be_called(&self, context: Context) -> bool {
        context == Context::Outside || self.ask(|shrinker| shrinker.may_nest()).unwrap_or(false)
    }

    /// Requests memory that was not reused for `age`.
    fn give_aged(&self, want_bytes: u64, age: Duration) -> u64 {
        if let Some(freed) = self.call(|shrinker| shrinker.shrink_aged(want_bytes, age)).flatten() {
            return freed;
        }
        let giveable = self.ask(|shrinker| shrinker.giveable_bytes()).unwrap_or(0);
        let unused = self.unused.least(giveable, clock::fine_ns(), age).min(want_bytes);
        if unused < WORTHWHILE_BYTES {
            return 0;
        }
        let freed = self.call(|shrinker| shrinker.shrink(unused, Urgency::Request)).unwrap_or(0);
        self.unused.take(freed);
        freed
    }

    /// Requests `want_bytes` in steps, until a step frees less than it requested.
    fn give(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let step = STEP_BYTES.max(want_bytes / STEP_DIVISOR);
        // The last attempt before a refusal waits: the thread inside may only be stopped, or wait for a fork.
        let timeout_ns = if urgency == Urgency::Limit { u64::MAX } else { BLOCKED_NS };
        let mut freed = 0_u64;
        while freed < want_bytes {
            let part = step.min(want_bytes - freed);
            let given = self.call_within(timeout_ns, |shrinker| shrinker.shrink(part, urgency)).unwrap_or(0);
            freed = freed.saturating_add(given);
            if given < part {
                break;
            }
        }
        freed
    }
}

/// All registered owners, cheapest first.
///
/// Example: [`Shrinker`].
#[derive(Default)]
pub struct Owners([RegisteredOwner; MAX_OWNERS]);

impl Owners {
    /// Registers an owner in the first free slot.
    ///
    /// # Panics
    ///
    /// If there are more than eight.
    pub fn register(&self, shrinker: &'static dyn Shrinker) {
        let is_in = self.0.iter().any(|owner| owner.shrinker.set(shrinker).is_ok());
        assert!(is_in, "more than {MAX_OWNERS} owners of memory");
    }

    /// Registers an owner in the last free slot. It is called after all owners of [`Owners::register`].
    ///
    /// # Panics
    ///
    /// As [`Owners::register`].
    pub fn register_last(&self, shrinker: &'static dyn Shrinker) {
        let is_in = self.0.iter().rev().any(|owner| owner.shrinker.set(shrinker).is_ok());
        assert!(is_in, "more than {MAX_OWNERS} owners of memory");
    }

    fn callable(&self, context: Context) -> impl Iterator<Item = &RegisteredOwner> {
        self.0.iter().filter(move |owner| owner.may_be_called(context))
    }

    /// Bytes that the owners callable in `context` could give back at once.
    pub fn giveable(&self, context: Context) -> u64 {
        let each = self.callable(context).filter_map(|owner| owner.ask(|shrinker| shrinker.giveable_bytes()));
        each.fold(0, u64::saturating_add)
    }

    /// The part of [`Owners::giveable`] that no account is charged for.
    pub fn foreign(&self) -> u64 {
        let each = self.callable(Context::Outside).filter_map(|owner| owner.ask(|shrinker| shrinker.foreign_bytes()));
        each.fold(0, u64::saturating_add)
    }

    /// Whether any owner may have more than it reports ([`Shrinker::may_have_more`]).
    pub fn may_have_more(&self) -> bool {
        self.0.iter().any(|owner| owner.ask(|shrinker| shrinker.may_have_more()).unwrap_or(false))
    }

    /// Makes the owners give back `want_bytes`. Returns the bytes freed, as the owners report them.
    pub fn give(&self, want_bytes: u64, context: Context, urgency: Urgency) -> u64 {
        self.callable(context).fold(0, |freed, owner| match want_bytes.saturating_sub(freed) {
            0 => freed,
            left => freed.saturating_add(owner.give(left, urgency)),
        })
    }

    /// Makes the owners give back memory that was not reused for `age`.
    pub fn give_aged(&self, want_bytes: u64, age: Duration, context: Context) -> u64 {
        self.callable(context).fold(0, |freed, owner| match want_bytes.saturating_sub(freed) {
            0 => freed,
            left => freed.saturating_add(owner.give_aged(left, age)),
        })
    }

    /// Makes the owners offer memory to the kernel. Returns the bytes offered.
    pub fn offer(&self, want_bytes: u64, which: Which) -> u64 {
        self.callable(Context::Outside).fold(0, |offered, owner| {
            let left = want_bytes.saturating_sub(offered);
            offered.saturating_add(owner.call(|shrinker| shrinker.offer(left, which)).unwrap_or(0))
        })
    }

    /// Makes the owners find out how much of the offered memory the kernel took.
    pub fn reap(&self) {
        self.0.iter().for_each(|owner| _ = owner.call(|shrinker| shrinker.reap()));
    }

    /// Makes the owners measure how much of their overcommitted memory is resident.
    pub fn reconcile(&self) {
        self.0.iter().for_each(|owner| _ = owner.call(|shrinker| shrinker.reconcile()));
    }

    /// Makes the owners measure what they could give back.
    pub fn measure(&self) {
        self.0.iter().for_each(|owner| _ = owner.call(|shrinker| shrinker.measure()));
    }

    /// Called in a fork child. The threads that were inside do not exist there.
    pub fn forked(&self) {
        self.0.iter().for_each(|owner| owner.inside.store(0, Relaxed));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::Lock;

    const MIB: u64 = 1 << 20;

    /// A scripted shrinker: frees at most `gives` bytes a call and reports `claims` as giveable.
    #[derive(Default)]
    struct Odd {
        claims: AtomicU64,
        gives: AtomicU64,
        calls: AtomicU64,
        panics: bool,
        entry: Lock,
    }

    impl Shrinker for Odd {
        fn name(&self) -> &'static str {
            "odd"
        }

        fn may_nest(&self) -> bool {
            false
        }

        fn giveable_bytes(&self) -> u64 {
            self.claims.load(Relaxed)
        }

        fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
            self.calls.fetch_add(1, Relaxed);
            assert!(!self.panics, "an owner that fails, as it should here");
            let _guard = self.entry.lock();
            assert!(want_bytes <= STEP_BYTES.max(self.claims.load(Relaxed) / STEP_DIVISOR), "a step of {want_bytes}");
            self.gives.load(Relaxed).min(want_bytes)
        }
    }

    fn odd(claims: u64, gives: u64, panics: bool) -> &'static Odd {
        let (claims, gives) = (AtomicU64::new(claims), AtomicU64::new(gives));
        Box::leak(Box::new(Odd { claims, gives, panics, ..Odd::default() }))
    }

    fn with(odd: &[&'static Odd]) -> Owners {
        let owners = Owners::default();
        odd.iter().for_each(|odd| owners.register(*odd));
        owners
    }

    /// A large amount is requested in steps. The requests stop once a step frees too little.
    #[test]
    fn steps_are_bounded() {
        let willing = odd(1024 * MIB, u64::MAX, false);
        let owners = with(&[willing]);
        assert_eq!(owners.give(1024 * MIB, Context::Outside, Urgency::Request), 1024 * MIB);
        assert_eq!(willing.calls.swap(0, Relaxed), 16);
        willing.gives.store(3 * MIB, Relaxed);
        assert_eq!(owners.give(1024 * MIB, Context::Outside, Urgency::Request), 3 * MIB);
        assert_eq!((willing.calls.load(Relaxed), owners.give(MIB, Context::Nested, Urgency::Request)), (1, 0));
    }

    /// An owner that panics is counted and not called again. The next owner is called in its place.
    #[test]
    fn a_panicking_owner_is_left_alone() {
        let (failing, willing) = (odd(MIB, MIB, true), odd(2 * MIB, 2 * MIB, false));
        let owners = with(&[failing, willing]);
        let before = stats::get(Counter::OwnersFailed);
        for _ in 0..3 {
            assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request), MIB);
        }
        assert_eq!((failing.calls.load(Relaxed), owners.giveable(Context::Outside)), (1, 2 * MIB));
        assert!(stats::get(Counter::OwnersFailed) > before);
    }

    /// Absurd reported amounts neither overflow nor cause an endless loop.
    #[test]
    fn lies_are_survived() {
        let owners = with(&[odd(u64::MAX, 0, false), odd(u64::MAX, u64::MAX, false)]);
        assert_eq!(owners.giveable(Context::Outside), u64::MAX);
        assert_eq!(owners.give(MIB, Context::Outside, Urgency::Limit), MIB);
    }

    /// A blocked owner blocks only the thread that called it.
    #[test]
    fn a_blocked_owner_is_passed_over() {
        let (stuck, willing) = (odd(MIB, MIB, false), odd(MIB, MIB, false));
        let owners = with(&[stuck, willing]);
        stuck.entry.acquire();
        std::thread::scope(|scope| {
            scope.spawn(|| owners.give(MIB, Context::Outside, Urgency::Request));
            while stuck.calls.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            // Simulates that a second has passed.
            owners.0[0].progress_ns.store(clock::fine_ns() - BLOCKED_NS - 1, Relaxed);
            assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request), MIB);
            assert_eq!((stuck.calls.load(Relaxed), willing.calls.load(Relaxed)), (1, 1));
            stuck.entry.release();
        });
        assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request), MIB);
        assert_eq!(stuck.calls.load(Relaxed), 2, "it came back");
    }
}
