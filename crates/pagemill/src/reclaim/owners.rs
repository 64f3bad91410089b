//! The owners of memory that registered, and how they are called: in order of cost, in bounded steps, with no trust.
//!
//! An owner that panics is not called again (where panics unwind; the preload
//! library aborts). One that does not come back is waited for by whoever called
//! it, and by who would be refused without it; others pass it over. What an
//! owner claims is added up without overflow; whether it helped is seen by the
//! limit that had no room.

use super::{Shrinker, Urgency, Which};
use crate::arena::Context;
use crate::stats::{self, Counter};
use pagemill_sys::clock;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Relaxed};

/// Owners that can register.
pub const MAX_OWNERS: usize = 8;

/// One call asks for so much at the most, or for one part in so many of what is wanted if that is more.
const STEP_BYTES: u64 = 64 << 20;
const STEP_DIVISOR: u64 = 16;

/// A step takes some milliseconds. Who shows no progress for so long is blocked.
const BLOCKED_NS: u64 = 1_000_000_000;

#[derive(Default)]
struct Owner {
    shrinker: OnceLock<&'static dyn Shrinker>,
    /// Threads inside a call that may take long.
    inside: AtomicU32,
    /// When the first of them entered, or the last one left.
    progress_ns: AtomicU64,
    has_failed: AtomicBool,
}

/// Counts a thread out however it leaves.
struct Inside<'owner>(&'owner Owner);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.progress_ns.store(clock::fine_ns(), Relaxed);
        self.0.inside.fetch_sub(1, AcqRel);
    }
}

impl Owner {
    /// A call that reads a number or two.
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

    /// A call that may take long: `None` where somebody is stuck in one already.
    fn call<T>(&self, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        self.call_patiently(BLOCKED_NS, act)
    }

    /// As [`Owner::call`], by who believes for so long that the others inside will come back.
    fn call_patiently<T>(&self, patience_ns: u64, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        let now = clock::fine_ns();
        if self.inside.fetch_add(1, AcqRel) == 0 {
            self.progress_ns.store(now, Relaxed);
        } else if now.saturating_sub(self.progress_ns.load(Relaxed)) > patience_ns {
            self.inside.fetch_sub(1, AcqRel);
            stats::add(Counter::OwnersBlocked, 1);
            return None;
        }
        let _inside = Inside(self);
        self.ask(act)
    }

    fn may_be_called(&self, context: Context) -> bool {
        context == Context::Outside || self.ask(|shrinker| shrinker.may_nest()).unwrap_or(false)
    }

    /// Asks for `want_bytes` in steps, until one of them brings less than it should.
    fn give(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let step = STEP_BYTES.max(want_bytes / STEP_DIVISOR);
        // The last resort before a refusal waits: who is inside may only be stopped, or wait for a fork.
        let patience_ns = if urgency == Urgency::Limit { u64::MAX } else { BLOCKED_NS };
        let mut freed = 0_u64;
        while freed < want_bytes {
            let part = step.min(want_bytes - freed);
            let given = self.call_patiently(patience_ns, |shrinker| shrinker.shrink(part, urgency)).unwrap_or(0);
            freed = freed.saturating_add(given);
            if given < part {
                break;
            }
        }
        freed
    }
}

/// All of them, cheapest first.
#[derive(Default)]
pub struct Owners([Owner; MAX_OWNERS]);

impl Owners {
    /// Adds one.
    ///
    /// # Panics
    ///
    /// If there are more than eight.
    pub fn register(&self, shrinker: &'static dyn Shrinker) {
        let is_in = self.0.iter().any(|owner| owner.shrinker.set(shrinker).is_ok());
        assert!(is_in, "more than {MAX_OWNERS} owners of memory");
    }

    /// Adds one that is asked after all others, as long as there is a place behind them.
    ///
    /// # Panics
    ///
    /// As [`Owners::register`].
    pub fn register_last(&self, shrinker: &'static dyn Shrinker) {
        let is_in = self.0.iter().rev().any(|owner| owner.shrinker.set(shrinker).is_ok());
        assert!(is_in, "more than {MAX_OWNERS} owners of memory");
    }

    fn callable(&self, context: Context) -> impl Iterator<Item = &Owner> {
        self.0.iter().filter(move |owner| owner.may_be_called(context))
    }

    /// Bytes that those who may be called could give at once.
    pub fn giveable(&self, context: Context) -> u64 {
        let each = self.callable(context).filter_map(|owner| owner.ask(|shrinker| shrinker.giveable_bytes()));
        each.fold(0, u64::saturating_add)
    }

    /// Of that, what is on no account's books.
    pub fn foreign(&self) -> u64 {
        let each = self.callable(Context::Outside).filter_map(|owner| owner.ask(|shrinker| shrinker.foreign_bytes()));
        each.fold(0, u64::saturating_add)
    }

    /// Whether one of them may have more than it knows.
    pub fn may_have_more(&self) -> bool {
        self.0.iter().any(|owner| owner.ask(|shrinker| shrinker.may_have_more()).unwrap_or(false))
    }

    /// Makes them give `want_bytes` back; returns what the kernel took, as they say.
    pub fn give(&self, want_bytes: u64, context: Context, urgency: Urgency) -> u64 {
        self.callable(context).fold(0, |freed, owner| match want_bytes.saturating_sub(freed) {
            0 => freed,
            left => freed.saturating_add(owner.give(left, urgency)),
        })
    }

    /// Makes those who may nest give back cold memory.
    pub fn give_cold(&self, want_bytes: u64) -> u64 {
        self.callable(Context::Nested).fold(0, |freed, owner| {
            let left = want_bytes.saturating_sub(freed);
            freed.saturating_add(owner.call(|shrinker| shrinker.shrink_cold(left)).unwrap_or(0))
        })
    }

    /// Makes them offer memory to the kernel; returns how much.
    pub fn offer(&self, want_bytes: u64, which: Which) -> u64 {
        self.callable(Context::Outside).fold(0, |offered, owner| {
            let left = want_bytes.saturating_sub(offered);
            offered.saturating_add(owner.call(|shrinker| shrinker.offer(left, which)).unwrap_or(0))
        })
    }

    /// Makes them find out what the kernel took of what was offered.
    pub fn reap(&self) {
        self.0.iter().for_each(|owner| _ = owner.call(|shrinker| shrinker.reap()));
    }

    /// Makes them measure what of their lent memory is resident.
    pub fn settle(&self) {
        self.0.iter().for_each(|owner| _ = owner.call(|shrinker| shrinker.settle()));
    }

    /// Makes them find out what they could give.
    pub fn measure(&self) {
        self.0.iter().for_each(|owner| _ = owner.call(|shrinker| shrinker.measure()));
    }

    /// In a fork child: the threads that were inside do not exist here.
    pub fn forked(&self) {
        self.0.iter().for_each(|owner| owner.inside.store(0, Relaxed));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::Lock;

    const MIB: u64 = 1 << 20;

    /// Behaves as told: gives `gives` a call, claims to have `claims`.
    #[derive(Default)]
    struct Odd {
        claims: AtomicU64,
        gives: AtomicU64,
        calls: AtomicU64,
        panics: bool,
        door: Lock,
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
            let _guard = self.door.lock();
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

    /// Much is asked for in steps, and no further once a step brings too little.
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

    /// One that panics is counted and left alone; the next one is asked in its place.
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

    /// Absurd claims neither overflow nor go on for ever.
    #[test]
    fn lies_are_survived() {
        let owners = with(&[odd(u64::MAX, 0, false), odd(u64::MAX, u64::MAX, false)]);
        assert_eq!(owners.giveable(Context::Outside), u64::MAX);
        assert_eq!(owners.give(MIB, Context::Outside, Urgency::Limit), MIB);
    }

    /// One that is stuck holds up whoever called it, and nobody else.
    #[test]
    fn a_blocked_owner_is_passed_over() {
        let (stuck, willing) = (odd(MIB, MIB, false), odd(MIB, MIB, false));
        let owners = with(&[stuck, willing]);
        stuck.door.acquire();
        std::thread::scope(|scope| {
            scope.spawn(|| owners.give(MIB, Context::Outside, Urgency::Request));
            while stuck.calls.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            // As if a second had passed.
            owners.0[0].progress_ns.store(clock::fine_ns() - BLOCKED_NS - 1, Relaxed);
            assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request), MIB);
            assert_eq!((stuck.calls.load(Relaxed), willing.calls.load(Relaxed)), (1, 1));
            stuck.door.release();
        });
        assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request), MIB);
        assert_eq!(stuck.calls.load(Relaxed), 2, "it came back");
    }
}
