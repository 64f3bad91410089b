//! The registered owners of memory. They are called in order of cost, in bounded steps, and are not trusted.
//!
//! An owner that panics is not called again (where panics unwind; the preload library aborts). A call that does not
//! return blocks the thread that made it. Other threads then skip that owner, except for a thread whose charge would
//! otherwise be refused: it waits. The amounts that owners report are added with saturation. After a reclaim the limit
//! is checked again, so an owner that reports too much cannot make the process exceed its limit.
//!
//! Each charge needs the amounts, so Pagemill's own owners report them by a direct call: these only load counters. Only
//! an owner of the program may panic there, and is called through `catch_unwind`.

use super::aging::LeastOver;
use super::governor::WORTHWHILE_BYTES;
use super::{Cost, Reason, Shrinker, Urgency, Which};
use crate::arena::Context;
use crate::stats::{self, Counter};
use pagemill_sys::clock;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Relaxed};
use std::time::Duration;

/// Maximum number of owners of one [`Cost`] that Pagemill itself registers. The program may register as many.
pub const SLOTS_PER_COST: usize = 3;

/// Number of slots in [`Owners`]. The slots are in the order of calls: by cost, and within one cost Pagemill's own
/// before the program's.
const MAX_OWNERS: usize = 2 * SLOTS_PER_COST * Cost::COUNT;

/// Maximum number of bytes that one call requests from an owner, unless very many bytes are wanted ([`STEP_DIVISOR`]).
const STEP_BYTES: u64 = 64 << 20;
/// One call may always request the wanted bytes divided by this number from an owner.
const STEP_DIVISOR: u64 = 16;

/// An owner is skipped as blocked if no thread inside its calls has made progress for this time, in nanoseconds. A call
/// usually takes some milliseconds.
const BLOCKED_AFTER_NS: u64 = 1_000_000_000;

/// A slot for an owner of memory, and the state of the calls to this owner.
#[derive(Default)]
struct RegisteredOwner {
    shrinker: OnceLock<&'static dyn Shrinker>,
    /// Number of threads inside those calls to the owner that may take long.
    threads_inside: AtomicU32,
    /// Time at which a thread last left such a call, or, if none left since, at which the first of the threads inside
    /// entered.
    progress_ns: AtomicU64,
    /// The owner has panicked, and is not called any more.
    has_failed: AtomicBool,
    /// For an owner that tracks no ages: the minimum of its giveable bytes over the requested age.
    least_giveable: LeastOver,
}

/// Decrements [`RegisteredOwner::threads_inside`] on drop, also on unwind.
struct CallGuard<'owner>(&'owner RegisteredOwner);

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.progress_ns.store(clock::fine_ns(), Relaxed);
        let inside = self.0.threads_inside.fetch_sub(1, AcqRel);
        debug_assert!(inside > 0, "this thread counts as inside");
    }
}

impl RegisteredOwner {
    /// Calls `act` with the owner, for calls that return at once. Returns `None` if the slot is free or its owner has
    /// panicked.
    fn query<T>(&self, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
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

    /// As [`RegisteredOwner::query`], but without `catch_unwind`. Only for owners that are a part of Pagemill, not for
    /// those that the program registered, and only to read their amounts.
    #[inline]
    fn query_own<T>(&self, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        let shrinker = *self.shrinker.get()?;
        (!self.has_failed.load(Relaxed)).then(|| act(shrinker))
    }

    /// Calls `act` with the owner, for calls that may take long. Returns `None` without a call if other threads are
    /// inside such calls, and for [`BLOCKED_AFTER_NS`] none of these calls has ended.
    fn call<T>(&self, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        self.call_within(BLOCKED_AFTER_NS, act)
    }

    /// As [`RegisteredOwner::call`], but threads inside count as blocked only after `timeout_ns` without progress.
    fn call_within<T>(&self, timeout_ns: u64, act: impl FnOnce(&dyn Shrinker) -> T) -> Option<T> {
        let now = clock::fine_ns();
        if self.threads_inside.fetch_add(1, AcqRel) == 0 {
            self.progress_ns.store(now, Relaxed);
        } else if now.saturating_sub(self.progress_ns.load(Relaxed)) > timeout_ns {
            self.threads_inside.fetch_sub(1, AcqRel);
            stats::add(Counter::OwnersBlocked, 1);
            return None;
        }
        let _inside = CallGuard(self);
        self.query(act)
    }

    /// Returns whether a thread that holds the locks of `context` may call the owner.
    fn may_be_called(&self, context: Context) -> bool {
        context == Context::Outside || self.query(|shrinker| shrinker.may_nest()).unwrap_or(false)
    }

    /// Makes the owner give back up to `want_bytes` of memory that was not reused for `age`. Returns the bytes freed.
    fn give_aged(&self, want_bytes: u64, age: Duration) -> u64 {
        if let Some(freed) = self.call(|shrinker| shrinker.shrink_aged(want_bytes, age)).flatten() {
            return freed;
        }
        let giveable = self.query(|shrinker| shrinker.giveable_bytes()).unwrap_or(0);
        let unused = self.least_giveable.least(giveable, clock::fine_ns(), age).min(want_bytes);
        if unused < WORTHWHILE_BYTES {
            return 0;
        }
        let freed = self.call(|shrinker| shrinker.shrink_for(unused, Urgency::Request, Reason::Age)).unwrap_or(0);
        self.least_giveable.take(freed);
        freed
    }

    /// Makes the owner give back `want_bytes` in steps, until a step frees less than requested. Returns the bytes
    /// freed.
    fn give(&self, want_bytes: u64, urgency: Urgency, reason: Reason) -> u64 {
        let step = STEP_BYTES.max(want_bytes / STEP_DIVISOR);
        debug_assert!(want_bytes > 0, "the caller wants bytes");
        // The last attempt before a refusal waits: the thread inside may merely be stopped, or be waiting for a fork.
        let timeout_ns = if urgency == Urgency::Limit { u64::MAX } else { BLOCKED_AFTER_NS };
        let mut freed = 0_u64;
        while freed < want_bytes {
            let part = step.min(want_bytes - freed);
            let given =
                self.call_within(timeout_ns, |shrinker| shrinker.shrink_for(part, urgency, reason)).unwrap_or(0);
            freed = freed.saturating_add(given);
            if given < part {
                break;
            }
        }
        freed
    }
}

/// The sums of the amounts of memory that all owners report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    /// Bytes that the owners could give back at once.
    pub giveable: u64,
    /// The part of `giveable` that no account is charged for.
    pub foreign: u64,
    /// Whether any owner may have more giveable memory than it reports ([`Shrinker::may_have_more`]).
    pub may_have_more: bool,
}

impl Amounts {
    fn of(shrinker: &dyn Shrinker) -> Self {
        Self {
            giveable: shrinker.giveable_bytes(),
            foreign: shrinker.foreign_bytes(),
            may_have_more: shrinker.may_have_more(),
        }
    }

    /// Returns the bytes of `giveable` that the account is charged for. Returning the others lowers neither its charge
    /// nor that of its tree.
    pub fn charged(self) -> u64 {
        self.giveable.saturating_sub(self.foreign)
    }

    fn add(self, other: Self) -> Self {
        Self {
            giveable: self.giveable.saturating_add(other.giveable),
            foreign: self.foreign.saturating_add(other.foreign),
            may_have_more: self.may_have_more | other.may_have_more,
        }
    }
}

/// All registered owners, cheapest first.
///
/// Example: [`Shrinker`].
#[derive(Default)]
pub struct Owners {
    slots: [RegisteredOwner; MAX_OWNERS],
    /// Whether the program has registered an owner.
    has_programs: AtomicBool,
}

impl Owners {
    /// Registers an owner of Pagemill itself. It is called after Pagemill's owners of the same cost that registered
    /// before.
    ///
    /// # Panics
    ///
    /// If Pagemill has more than [`SLOTS_PER_COST`] owners of this cost.
    pub fn register(&self, shrinker: &'static dyn Shrinker) {
        let first = shrinker.cost() as usize * 2 * SLOTS_PER_COST;
        assert!(self.store_in_free_slot(first, shrinker), "{SLOTS_PER_COST} owners of Pagemill for each cost");
    }

    /// Registers an owner of the program. It is called after all owners of the same cost that registered before.
    /// Returns whether there was a free slot: the program has [`SLOTS_PER_COST`] slots for each cost.
    pub fn register_for_program(&self, shrinker: &'static dyn Shrinker) -> bool {
        self.has_programs.store(true, Relaxed);
        self.store_in_free_slot((shrinker.cost() as usize * 2 + 1) * SLOTS_PER_COST, shrinker)
    }

    /// Stores the owner in the first free one of the [`SLOTS_PER_COST`] slots from `first` on. Returns whether one was
    /// free.
    fn store_in_free_slot(&self, first: usize, shrinker: &'static dyn Shrinker) -> bool {
        assert!(first.is_multiple_of(SLOTS_PER_COST) && first < MAX_OWNERS, "slots of one cost");
        self.slots[first..first + SLOTS_PER_COST].iter().any(|owner| owner.shrinker.set(shrinker).is_ok())
    }

    fn callable_owners(&self, context: Context) -> impl Iterator<Item = &RegisteredOwner> {
        self.slots.iter().filter(move |owner| owner.may_be_called(context))
    }

    /// Returns the slots of Pagemill's owners, or those of the program's.
    fn slots_of(&self, is_programs: bool) -> impl Iterator<Item = &RegisteredOwner> {
        self.slots.chunks_exact(SLOTS_PER_COST).skip(usize::from(is_programs)).step_by(2).flatten()
    }

    /// Returns the sums of the amounts that all owners report. Cost: some loads of counters for each owner of Pagemill;
    /// each owner of the program also costs a `catch_unwind`.
    pub(crate) fn amounts(&self) -> Amounts {
        let own = self.slots_of(false).filter_map(|owner| owner.query_own(Amounts::of));
        let sum = own.fold(Amounts::default(), Amounts::add);
        if !self.has_programs.load(Relaxed) {
            return sum;
        }
        self.slots_of(true).filter_map(|owner| owner.query(Amounts::of)).fold(sum, Amounts::add)
    }

    /// Returns the number of bytes that the owners that may be called in `context` could give back at once.
    pub fn giveable(&self, context: Context) -> u64 {
        if context == Context::Outside {
            return self.amounts().giveable;
        }
        let each = self.callable_owners(context).filter_map(|owner| owner.query(|shrinker| shrinker.giveable_bytes()));
        each.fold(0, u64::saturating_add)
    }

    /// Makes the owners give back `want_bytes`, in order of cost. Returns the bytes freed, as the owners report them.
    pub fn give(&self, want_bytes: u64, context: Context, urgency: Urgency, reason: Reason) -> u64 {
        self.collect(want_bytes, context, |owner, left| owner.give(left, urgency, reason))
    }

    /// Makes the owners whose memory has contents that can be read again give back `want_bytes`, because the program
    /// requested it. Returns the bytes freed, as the owners report them.
    pub fn give_contents(&self, want_bytes: u64) -> u64 {
        let first = Cost::Contents as usize * 2 * SLOTS_PER_COST;
        let owners = &self.slots[first..first + 2 * SLOTS_PER_COST];
        owners.iter().fold(0, |given: u64, owner| match want_bytes.saturating_sub(given) {
            0 => given,
            left => given.saturating_add(owner.give(left, Urgency::Limit, Reason::Program)),
        })
    }

    /// Makes the owners give back up to `want_bytes` of memory that was not reused for `age`. Returns the bytes freed.
    pub fn give_aged(&self, want_bytes: u64, age: Duration, context: Context) -> u64 {
        self.collect(want_bytes, context, |owner, left| owner.give_aged(left, age))
    }

    /// Makes the owners offer memory to the kernel ([`Shrinker::offer`]). Returns the bytes offered.
    pub fn offer(&self, want_bytes: u64, which: Which) -> u64 {
        let offer = |owner: &RegisteredOwner, left| owner.call(|shrinker| shrinker.offer(left, which)).unwrap_or(0);
        self.collect(want_bytes, Context::Outside, offer)
    }

    /// Calls `give` for one owner after the other, with the number of bytes that are still wanted, until none are.
    /// Returns the sum of the results.
    fn collect(&self, want_bytes: u64, context: Context, give: impl Fn(&RegisteredOwner, u64) -> u64) -> u64 {
        self.callable_owners(context).fold(0, |given: u64, owner| match want_bytes.saturating_sub(given) {
            0 => given,
            left => given.saturating_add(give(owner, left)),
        })
    }

    /// Calls `act` with every owner, for calls that may take long.
    pub fn for_each(&self, act: impl Fn(&dyn Shrinker)) {
        self.slots.iter().for_each(|owner| _ = owner.call(&act));
    }

    /// Resets the number of threads inside each owner's calls, in a fork child, which does not have these threads.
    pub fn begin_child(&self) {
        self.slots.iter().for_each(|owner| owner.threads_inside.store(0, Relaxed));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::Lock;

    const MIB: u64 = 1 << 20;

    /// A scripted shrinker. It reports `reported_bytes` as giveable and frees at most `freed_per_call` bytes a call.
    #[derive(Default)]
    struct ScriptedShrinker {
        reported_bytes: AtomicU64,
        freed_per_call: AtomicU64,
        calls: AtomicU64,
        panics: bool,
        entry: Lock,
    }

    impl Shrinker for ScriptedShrinker {
        fn name(&self) -> &'static str {
            "scripted"
        }

        fn may_nest(&self) -> bool {
            false
        }

        fn giveable_bytes(&self) -> u64 {
            self.reported_bytes.load(Relaxed)
        }

        fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
            self.calls.fetch_add(1, Relaxed);
            assert!(!self.panics, "panics on purpose");
            let _guard = self.entry.lock();
            assert!(
                want_bytes <= STEP_BYTES.max(self.reported_bytes.load(Relaxed) / STEP_DIVISOR),
                "a step of {want_bytes}"
            );
            self.freed_per_call.load(Relaxed).min(want_bytes)
        }
    }

    fn scripted_shrinker(reported_bytes: u64, freed_per_call: u64, panics: bool) -> &'static ScriptedShrinker {
        let (reported_bytes, freed_per_call) = (AtomicU64::new(reported_bytes), AtomicU64::new(freed_per_call));
        Box::leak(Box::new(ScriptedShrinker { reported_bytes, freed_per_call, panics, ..ScriptedShrinker::default() }))
    }

    fn owners_of(shrinkers: &[&'static ScriptedShrinker]) -> Owners {
        let owners = Owners::default();
        shrinkers.iter().for_each(|shrinkers| owners.register(*shrinkers));
        owners
    }

    /// A large amount must be requested from a shrinker in steps. After a step that frees less than requested, no
    /// further step may follow.
    #[test]
    fn steps_are_bounded() {
        let freeing = scripted_shrinker(1024 * MIB, u64::MAX, false);
        let owners = owners_of(&[freeing]);
        assert_eq!(owners.give(1024 * MIB, Context::Outside, Urgency::Request, Reason::Program), 1024 * MIB);
        assert_eq!(freeing.calls.swap(0, Relaxed), 16);
        freeing.freed_per_call.store(3 * MIB, Relaxed);
        assert_eq!(owners.give(1024 * MIB, Context::Outside, Urgency::Request, Reason::Program), 3 * MIB);
        assert_eq!(
            (freeing.calls.load(Relaxed), owners.give(MIB, Context::Nested, Urgency::Request, Reason::Program)),
            (1, 0)
        );
    }

    /// An owner that panics must be counted and not called again. The next owner must free the memory.
    #[test]
    fn a_panicking_owner_is_not_called_again() {
        let (failing, freeing) = (scripted_shrinker(MIB, MIB, true), scripted_shrinker(2 * MIB, 2 * MIB, false));
        let owners = owners_of(&[failing, freeing]);
        let before = stats::get(Counter::OwnersFailed);
        for _ in 0..3 {
            assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request, Reason::Program), MIB);
        }
        assert_eq!((failing.calls.load(Relaxed), owners.giveable(Context::Outside)), (1, 2 * MIB));
        assert!(stats::get(Counter::OwnersFailed) > before);
    }

    /// Owners that report absurd amounts must cause neither an overflow nor an endless loop.
    #[test]
    fn absurd_amounts_do_not_overflow() {
        let owners = owners_of(&[scripted_shrinker(u64::MAX, 0, false), scripted_shrinker(u64::MAX, u64::MAX, false)]);
        assert_eq!(owners.giveable(Context::Outside), u64::MAX);
        assert_eq!(owners.give(MIB, Context::Outside, Urgency::Limit, Reason::Program), MIB);
    }

    /// While a thread is blocked inside a call, other threads must skip that owner. After the call has returned, the
    /// other threads must call the owner again.
    #[test]
    fn a_blocked_owner_is_skipped() {
        let (stuck, freeing) = (scripted_shrinker(MIB, MIB, false), scripted_shrinker(MIB, MIB, false));
        let owners = owners_of(&[stuck, freeing]);
        stuck.entry.acquire();
        std::thread::scope(|scope| {
            scope.spawn(|| owners.give(MIB, Context::Outside, Urgency::Request, Reason::Program));
            while stuck.calls.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            // Set the time of the last progress back by more than a second.
            owners.slots[2 * SLOTS_PER_COST].progress_ns.store(clock::fine_ns() - BLOCKED_AFTER_NS - 1, Relaxed);
            assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request, Reason::Program), MIB);
            assert_eq!((stuck.calls.load(Relaxed), freeing.calls.load(Relaxed)), (1, 1));
            stuck.entry.release();
        });
        assert_eq!(owners.give(MIB, Context::Outside, Urgency::Request, Reason::Program), MIB);
        assert_eq!(stuck.calls.load(Relaxed), 2, "the call has returned");
    }

    /// The program has as many slots of each cost as Pagemill, and its slots are separate. One more registration must
    /// be refused and must change nothing. An owner of Pagemill that registers later must still get a slot, and must be
    /// called before those of the program.
    #[test]
    fn slots_of_the_program_are_separate() {
        let owners = Owners::default();
        let of_program = [(); SLOTS_PER_COST].map(|()| scripted_shrinker(MIB, MIB, false));
        assert!(of_program.iter().all(|shrinker| owners.register_for_program(*shrinker)));
        assert!(!owners.register_for_program(scripted_shrinker(MIB, MIB, false)));
        let own = [(); SLOTS_PER_COST].map(|()| scripted_shrinker(MIB, MIB, false));
        own.iter().for_each(|shrinker| owners.register(*shrinker));
        assert_eq!(owners.giveable(Context::Outside), 2 * SLOTS_PER_COST as u64 * MIB);
        assert_eq!(
            owners.give(SLOTS_PER_COST as u64 * MIB, Context::Outside, Urgency::Request, Reason::Program),
            SLOTS_PER_COST as u64 * MIB
        );
        let calls =
            |shrinkers: &[&ScriptedShrinker; SLOTS_PER_COST]| shrinkers.map(|shrinker| shrinker.calls.load(Relaxed));
        assert_eq!((calls(&own), calls(&of_program)), ([1; SLOTS_PER_COST], [0; SLOTS_PER_COST]));
    }

    /// A shrinker of the program that panics when it reports an amount.
    struct PanickingReport;

    impl Shrinker for PanickingReport {
        fn name(&self) -> &'static str {
            "panicking report"
        }

        fn may_nest(&self) -> bool {
            false
        }

        fn giveable_bytes(&self) -> u64 {
            panic!("panics on purpose")
        }

        fn shrink(&self, _want_bytes: u64, _urgency: Urgency) -> u64 {
            0
        }
    }

    /// An owner of the program that panics in its report must be counted once and skipped. The amounts of all other
    /// owners must be summed, whether they belong to Pagemill or to the program.
    #[test]
    fn a_report_of_the_program_may_panic() {
        let owners = owners_of(&[scripted_shrinker(2 * MIB, 0, false)]);
        assert!(owners.register_for_program(Box::leak(Box::new(PanickingReport))));
        assert!(owners.register_for_program(scripted_shrinker(MIB, 0, false)));
        let before = stats::get(Counter::OwnersFailed);
        for _ in 0..2 {
            assert_eq!(owners.amounts().giveable, 3 * MIB);
        }
        assert!(stats::get(Counter::OwnersFailed) > before);
    }
}
