//! The account of one process: compares what it holds with its limits before memory becomes resident.
//!
//! A charge that meets the limit measures overcommitted memory, gives back free memory of this process, requests memory
//! from the siblings of the process tree, and removes dead members. Only then does it fail.
//! Inside the small allocator, whose locks forbid purging it, one charge may exceed the limit. The next allocation
//! outside those locks reclaims first ([`Account::pay_debt`]).

use super::governor;
use super::helper::Helper;
use super::limits::Headroom;
use super::owners::Owners;
use super::pressure::FUTILE_NS;
use super::tree::{MemberSlot, Membership, Totals, TreePage, UNLIMITED};
use super::{Reason, Shrinker, Urgency, Which};
use crate::arena::{self, Budget, Context};
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::trace::{self, Event};
use crate::units::BLOCK_BYTES;
use pagemill_sys::clock;
use pagemill_sys::process::Identity;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Shortest time between two measurements of overcommitted memory.
const RECONCILE_NS: u64 = 2_000_000;

/// If more than this part of the known resident bytes is overcommitted, overcommitted memory is measured before that
/// number is relied on.
const OVERCOMMIT_DIVISOR: u64 = 8;

/// Measuring this much takes some 20 us: done whenever the room is queried.
const QUICK_BYTES: u64 = 64 << 20;

/// Measuring this much takes some 0.4 ms: done whenever a limit is near.
const QUICK_AT_LIMIT_BYTES: u64 = 1 << 30;

/// Measuring takes at most this part of a thread's time.
const RECONCILE_SHARE: u64 = 50;

/// Largest part of a loan that is expected to be touched at once.
const SYSTEM_LOAN_BYTES: u64 = 16 << 20;

/// New memory is offset in steps of this, or of this part of the resident bytes: each step scans all free slots.
const MAKE_UP_STEP_BYTES: u64 = 1 << 20;
const MAKE_UP_DIVISOR: u64 = 128;

/// Free memory that was not reused for this long is cold. Faulting it in again costs a hundredth of that time.
const COLD: Duration = Duration::from_millis(67);

/// After too little cold memory was found, the next search waits this long.
const MAKE_UP_PAUSE_NS: u64 = 100_000_000;

/// Free memory up to this part of the resident bytes (plus one block) is kept.
const SPARE_DIVISOR: u64 = 16;

/// Free memory beyond this part of the resident bytes is given back even if it is not cold.
const MOST_SPARE_DIVISOR: u64 = 3;

/// The account of one process.
///
/// ```
/// use pagemill::arena::Context;
/// use pagemill::reclaim::{Reason, Urgency};
///
/// let pagemill = pagemill::Pagemill::of_process()?;
/// let block = pagemill.heap.allocate(2 << 20, 64)?;
/// // SAFETY: the block is written while it is allocated, and not used after it was freed.
/// unsafe {
///     block.addr.as_ptr().write_bytes(1, 2 << 20);
///     pagemill.heap.free(block.addr.as_ptr() as usize)?;
/// }
/// let freed = pagemill.account.give_back(1 << 20, Context::Outside, Urgency::Request, Reason::Program);
/// println!("{freed} bytes returned");
/// assert!(pagemill.account.giveable() < 2 << 20);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Account {
    resident: AtomicU64,
    /// Bytes overcommitted to the program and not known to be touched.
    untouched: AtomicU64,
    own_limit: AtomicU64,
    membership: Membership,
    pub(super) owners: Owners,
    /// Earliest time of the next measurement of overcommitted memory.
    reconcile_after_ns: AtomicU64,
    /// The room that control groups and the machine leave.
    pub headroom: Headroom,
    /// Until this time reclaim for groups and the machine is not retried, because it freed nothing; and the length of
    /// that pause.
    pub(super) futile_until_ns: AtomicU64,
    pub(super) futile_pause_ns: AtomicU64,
    /// Until this time siblings are not asked before this process reclaims, because that did not help.
    pub(super) elsewhere_after_ns: AtomicU64,
    /// Woken when there is memory to give back again.
    helper: OnceLock<&'static Helper>,
    /// New memory that was not yet offset by giving free memory back.
    to_make_up: AtomicU64,
    /// Earliest time of the next search for cold memory, after one found too little.
    make_up_after_ns: AtomicU64,
    has_debt: AtomicBool,
    /// The last reclaim outside freed too little. Nested charges over the limit are refused.
    is_exhausted: AtomicBool,
    /// Called when a nested charge has passed the limit. Must not allocate or lock.
    on_debt: OnceLock<fn()>,
    /// Called before the first charge of this process. Must not allocate or lock.
    on_first_charge: OnceLock<fn()>,
    has_charged: AtomicBool,
}

impl Account {
    /// Creates an account that may hold `limit` bytes ([`UNLIMITED`] for no limit of its own).
    pub fn new(limit: u64) -> Self {
        Self {
            resident: AtomicU64::new(0),
            untouched: AtomicU64::new(0),
            own_limit: AtomicU64::new(limit),
            membership: Membership::default(),
            owners: Owners::default(),
            reconcile_after_ns: AtomicU64::new(0),
            headroom: Headroom::default(),
            futile_until_ns: AtomicU64::new(0),
            futile_pause_ns: AtomicU64::new(*FUTILE_NS.start()),
            elsewhere_after_ns: AtomicU64::new(0),
            helper: OnceLock::new(),
            to_make_up: AtomicU64::new(0),
            make_up_after_ns: AtomicU64::new(0),
            has_debt: AtomicBool::new(false),
            is_exhausted: AtomicBool::new(false),
            on_debt: OnceLock::new(),
            on_first_charge: OnceLock::new(),
            has_charged: AtomicBool::new(false),
        }
    }

    /// As [`Account::new`], in its own allocation, which is never freed.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if not even one OS page can be allocated for it.
    pub fn make(limit: u64) -> Result<&'static Self> {
        arena::place(Self::new(limit))
    }

    /// Registers an owner that can give memory back. Cheaper owners must register first.
    ///
    /// # Panics
    ///
    /// If there are more than eight.
    pub fn register(&self, shrinker: &'static dyn Shrinker) {
        self.owners.register(shrinker);
    }

    /// As [`Account::register`], for an owner that is called after all that register later.
    ///
    /// # Panics
    ///
    /// As [`Account::register`].
    pub fn register_last(&self, shrinker: &'static dyn Shrinker) {
        self.owners.register_last(shrinker);
    }

    /// Sets the helper that is woken when there is memory to give back again.
    pub fn set_helper(&self, helper: &'static Helper) {
        let _ = self.helper.set(helper);
    }

    /// Sets the function called when a nested charge exceeds the limit. It must arrange that [`Account::pay_debt`] runs
    /// soon.
    pub fn on_debt(&self, act: fn()) {
        let _ = self.on_debt.set(act);
    }

    /// Sets the function called before the first charge of this process and of every fork child, for example to publish
    /// the figures.
    pub fn on_first_charge(&self, act: fn()) {
        let _ = self.on_first_charge.set(act);
    }

    /// Joins a process tree: the tree's limit applies from now on, and this process's charge is published there.
    pub fn join(&self, page: &'static TreePage, identity: Identity) {
        self.membership.set(page, page.enter(identity));
        self.publish();
    }

    /// Leaves the tree, at the end of the process.
    pub fn leave(&self) {
        if let Some(place) = self.membership.place() {
            // Other threads and later destructors may continue to allocate. They must not write to a slot that another
            // process takes.
            self.membership.give_up_place();
            place.leave();
        }
    }

    /// Called in a fork child. The parent keeps its charge; the child takes its own slot in the tree.
    pub fn forked(&self, identity: Identity) {
        self.resident.store(0, Relaxed);
        self.untouched.store(0, Relaxed);
        self.has_charged.store(false, Relaxed);
        self.headroom.forget();
        self.owners.forked();
        self.futile_until_ns.store(0, Relaxed);
        if let Some(page) = self.membership.page() {
            page.count_start();
            self.membership.set(page, page.enter(identity));
        }
        self.publish();
    }

    pub fn place(&self) -> Option<MemberSlot> {
        self.membership.place()
    }

    /// Whether any limit applies to this process, so that reclaim may be requested.
    pub fn is_limited(&self) -> bool {
        self.limit() != UNLIMITED
    }

    /// The smallest limit that applies.
    pub fn limit(&self) -> u64 {
        let tree = self.membership.page().map_or(UNLIMITED, TreePage::limit);
        tree.min(self.own_limit.load(Relaxed))
    }

    /// Resident bytes of this process, as far as charged and measured.
    pub fn resident(&self) -> u64 {
        self.resident.load(Relaxed)
    }

    /// The totals that the limit is compared with: those of the tree, or of this process alone.
    fn totals(&self) -> Totals {
        let own = Totals {
            resident: self.resident.load(Relaxed),
            untouched: self.untouched.load(Relaxed),
            giveable: 0,
            members: 1,
        };
        match (self.membership.page(), self.membership.place()) {
            // For this process uses the current numbers, not those it last published.
            (Some(page), Some(place)) => page.totals_with(place, own),
            (Some(page), None) => {
                let others = page.totals();
                Totals {
                    resident: others.resident.saturating_add(own.resident),
                    untouched: others.untouched.saturating_add(own.untouched),
                    ..others
                }
            }
            _ => own,
        }
    }

    /// Resident bytes of this process and its siblings.
    pub(super) fn tree_resident(&self) -> u64 {
        self.totals().resident
    }

    /// Publishes the current charge in the tree and in the figures, and updates the peaks.
    pub fn publish(&self) {
        // Repeat if another thread changed it meanwhile, so that the last value published is a current one.
        loop {
            let resident = self.resident.load(Relaxed);
            self.publish_once(resident);
            if self.resident.load(Relaxed) == resident {
                return;
            }
        }
    }

    fn publish_once(&self, resident: u64) {
        let untouched = self.untouched.load(Relaxed);
        stats::set(Counter::Resident, resident);
        stats::set(Counter::Untouched, untouched);
        let giveable = self.giveable();
        if let Some(helper) = self.helper.get().filter(|helper| helper.is_parked())
            && (giveable >= governor::WORTHWHILE_BYTES || self.may_have_more())
        {
            helper.unpark(self);
        }
        stats::raise(Counter::ResidentPeak, resident);
        let giveable = self.giveable_of_state(giveable);
        stats::raise(Counter::NetPeak, resident.saturating_sub(giveable));
        if let Some(place) = self.membership.place() {
            place.publish(resident, untouched, giveable.min(resident));
            place.page().note_peak(place.page().totals());
        }
    }

    /// Bytes that the owners of this process could give back at once.
    pub fn giveable(&self) -> u64 {
        self.owners.giveable(Context::Outside)
    }

    /// The part of `giveable` that this account is charged for. Only that part helps siblings and limits.
    fn giveable_of_state(&self, giveable: u64) -> u64 {
        giveable.saturating_sub(self.owners.foreign())
    }

    /// Whether measuring may find more to give back than is known.
    pub(super) fn may_have_more(&self) -> bool {
        self.owners.may_have_more()
    }

    /// Wakes the helper if it is parked, because there may be something to give back from now on.
    pub fn note_more(&self) {
        if let Some(helper) = self.helper.get() {
            helper.unpark(self);
        }
    }

    /// Measures how much of the overcommitted memory is resident.
    pub fn reconcile(&self) {
        let start = clock::fine_ns();
        self.owners.reconcile();
        let end = clock::fine_ns();
        self.reconcile_after_ns.store(end + RECONCILE_NS.max((end - start) * RECONCILE_SHARE), Relaxed);
    }

    /// Measures everything that can only be known by measuring. Call it outside every lock.
    pub fn measure(&self) {
        self.reconcile();
        self.owners.measure();
        self.publish();
    }

    /// As [`Account::reconcile`], but skipped if more than `quick_bytes` are overcommitted and the last measurement is
    /// recent.
    fn reconcile_sometimes(&self, quick_bytes: u64) {
        let untouched = self.untouched.load(Relaxed);
        if untouched == 0 {
            return;
        }
        if untouched <= quick_bytes || clock::fine_ns() >= self.reconcile_after_ns.load(Relaxed) {
            self.reconcile();
        }
    }

    /// Makes the owners of this process give back up to `want_bytes`. Returns the bytes that the kernel took.
    pub fn give_back(&self, want_bytes: u64, context: Context, urgency: Urgency, reason: Reason) -> u64 {
        stats::add(Counter::PurgeRequests, 1);
        let freed = self.owners.give(want_bytes, context, urgency);
        reason.note(want_bytes, freed);
        freed
    }

    /// Makes the owners of this process give back up to `want_bytes` that were not reused for `age`. Returns the bytes
    /// that the kernel took.
    pub fn give_aged(&self, want_bytes: u64, age: Duration) -> u64 {
        let freed = self.owners.give_aged(want_bytes, age, Context::Outside);
        if freed > 0 {
            Reason::Age.note(want_bytes, freed);
        }
        freed
    }

    /// Gives back all free memory of this process, also parts of huge pages. Used when the program requests it.
    pub fn give_all_back(&self) -> u64 {
        let [cheap, rest] = [Urgency::Request, Urgency::Split]
            .map(|urgency| self.give_back(u64::MAX, Context::Outside, urgency, Reason::Program));
        cheap.saturating_add(rest)
    }

    /// Offers up to `want_bytes` of free memory to the kernel, in case the kernel runs short before this process
    /// reacts.
    pub fn offer(&self, want_bytes: u64, which: Which) {
        let offered = self.owners.offer(want_bytes, which);
        if offered > 0 {
            stats::add(Counter::Offered, offered);
            trace::event(Event::Offered, want_bytes, offered);
        }
    }

    /// Records how much of the offered memory the kernel took. Usually there is nothing to do.
    pub fn reap(&self) {
        self.owners.reap();
    }

    /// Returns free memory to offset `bytes` of new memory. If much is free, returns as much as is cold. If very much
    /// is free, returns twice as much, cold or not. So free memory of size classes that a program no longer uses does
    /// not accumulate.
    pub fn make_up_for(&self, bytes: u64) {
        let due = self.to_make_up.fetch_add(bytes, Relaxed).saturating_add(bytes);
        if due < MAKE_UP_STEP_BYTES.max(self.resident() / MAKE_UP_DIVISOR) {
            return;
        }
        self.to_make_up.store(0, Relaxed);
        let (free, resident) = (self.owners.giveable(Context::Nested), self.resident());
        if free <= resident / SPARE_DIVISOR + BLOCK_BYTES as u64 {
            return;
        }
        let excess = free.saturating_sub(resident / MOST_SPARE_DIVISOR + BLOCK_BYTES as u64);
        if excess > 0 {
            let want = excess.min(2 * due);
            Reason::New.note(want, self.owners.give_aged(want, Duration::ZERO, Context::Nested));
            return;
        }
        let now = clock::coarse_ns();
        if now < self.make_up_after_ns.load(Relaxed) {
            return;
        }
        let freed = self.owners.give_aged(due, COLD, Context::Nested);
        Reason::New.note(due, freed);
        if freed < due / 2 {
            // The free memory lies in pieces that cannot be given back. Do not search again at every step.
            self.make_up_after_ns.store(now + MAKE_UP_PAUSE_NS, Relaxed);
        }
    }

    /// Answers an open request of a sibling, if there is one.
    pub fn answer(&self) {
        let Some(place) = self.membership.place() else { return };
        self.measure();
        let mut asked = 0;
        let given = place.answer(self.giveable_of_state(self.giveable()), |part| {
            asked = part;
            self.give_back(part, Context::Outside, Urgency::Limit, Reason::Sibling)
        });
        if let Some(given) = given {
            trace::event(Event::Asked, asked, given);
        }
        self.publish();
    }

    /// Bytes by which the limit would be exceeded if `bytes` more were charged.
    fn excess(&self, bytes: u64) -> u64 {
        self.totals().resident.saturating_add(bytes).saturating_sub(self.limit())
    }

    /// Reclaims until `bytes` more fit under the limit, in this process and in the tree. Returns whether they fit.
    fn make_room(&self, bytes: u64, context: Context) -> bool {
        self.reconcile_sometimes(QUICK_AT_LIMIT_BYTES);
        trace::event(Event::OverLimit, bytes, self.totals().resident);
        for urgency in [Urgency::Request, Urgency::Limit] {
            let excess = self.excess(bytes);
            if excess == 0 {
                break;
            }
            self.give_back(excess, context, urgency, Reason::Limit);
        }
        // Ask twice: a member that took a part of the first request may not have had that much.
        for _ in 0..2 {
            self.ask_siblings(bytes, u64::MAX);
        }
        let has_room = self.excess(bytes) == 0;
        stats::add(if has_room { Counter::LimitReclaims } else { Counter::LimitRefused }, 1);
        has_room
    }

    /// Removes dead members from the totals. Then requests from the siblings the excess that `bytes` more would cause,
    /// at most `most`. Waits for answers for a bounded time.
    fn ask_siblings(&self, bytes: u64, most: u64) {
        let Some(page) = self.membership.page().filter(|_| self.excess(bytes) > 0) else { return };
        page.sweep();
        let excess = self.excess(bytes).min(most);
        if excess > 0 {
            self.ask_for(excess, || self.excess(bytes) == 0);
        }
    }

    /// Requests `bytes` from the siblings. Returns by how much their charge fell. Waits for answers for a bounded time.
    pub(super) fn ask_for(&self, bytes: u64, is_enough: impl Fn() -> bool) -> u64 {
        let Some(page) = self.membership.page() else { return 0 };
        let given = page.ask(bytes, self.membership.place(), is_enough);
        trace::event(Event::AskSiblings, bytes, given);
        given
    }

    fn refuse(&self, bytes: u64) -> Error {
        let used_bytes = self.totals().resident;
        trace::event(Event::Refused, bytes, used_bytes);
        Error::NoMemory { wanted_bytes: bytes, used_bytes, limit_bytes: self.limit() }
    }

    /// Whether a nested charge exceeded the limit since the last [`Account::pay_debt`].
    #[inline]
    pub fn has_debt(&self) -> bool {
        self.has_debt.load(Relaxed)
    }

    /// Reclaims what nested charges exceeded the limit by. Call it outside every lock.
    pub fn pay_debt(&self) {
        if self.has_debt.swap(false, Relaxed) {
            let is_paid = self.excess(0) == 0 || self.make_room(0, Context::Outside);
            let is_below_others = self.pay_system_debt();
            self.is_exhausted.store(!(is_paid && is_below_others), Relaxed);
        }
    }

    /// Whether a charge that found no room may exceed the limit. Only nested charges may, until a reclaim outside
    /// fails.
    pub(super) fn admit_on_debt(&self, context: Context) -> bool {
        if context == Context::Outside {
            return false;
        }
        let is_admitted = !self.is_exhausted.load(Relaxed);
        self.has_debt.store(true, Relaxed);
        if let Some(act) = self.on_debt.get() {
            act();
        }
        is_admitted
    }

    /// Runs `on_first_charge` once: at the first charge, or at the first vrange mark.
    #[inline]
    pub fn note_use(&self) {
        if !self.has_charged.load(Relaxed)
            && !self.has_charged.swap(true, Relaxed)
            && let Some(act) = self.on_first_charge.get()
        {
            act();
        }
    }

    fn charge(&self, bytes: u64) {
        self.note_use();
        self.resident.fetch_add(bytes, Relaxed);
        self.publish();
    }
}

impl Account {
    /// Counts memory that the C library allocates (or frees) while it serves the program. Never refuses, never
    /// reclaims.
    pub fn count_c_library(&self, change_bytes: i64) {
        self.note_use();
        let amount = change_bytes.unsigned_abs();
        if change_bytes >= 0 {
            stats::add(Counter::CLibrary, amount);
            self.resident.fetch_add(amount, Relaxed);
        } else {
            stats::sub(Counter::CLibrary, amount);
            self.resident.fetch_sub(amount, Relaxed);
        }
        self.publish();
    }
}

impl Account {
    /// Records the peak of a process that the C library served, at its end. If its figures are not published by then,
    /// they never are: the tree records the peak instead.
    pub fn note_small(&self, peak_bytes: u64) {
        if self.has_charged.load(Relaxed) {
            stats::raise(Counter::ResidentPeak, peak_bytes);
            stats::raise(Counter::NetPeak, peak_bytes);
        } else if let Some(page) = self.membership.page() {
            page.note_small(peak_bytes);
        }
    }
}

impl Budget for Account {
    fn admit(&self, bytes: u64, context: Context) -> Result<()> {
        let limit = self.limit();
        if limit != UNLIMITED && self.excess(bytes) > 0 {
            let has_room = self.make_room(bytes, context);
            if !(has_room || self.admit_on_debt(context)) {
                return Err(self.refuse(bytes));
            }
        } else if limit != UNLIMITED {
            // Overcommitted memory may have become resident meanwhile: measure it if it could matter.
            let totals = self.totals();
            self.is_exhausted.store(false, Relaxed);
            if totals.resident.saturating_add(totals.untouched).saturating_add(bytes) > limit {
                self.reconcile_sometimes(QUICK_AT_LIMIT_BYTES);
            }
        }
        self.make_system_room(bytes, context)?;
        if context == Context::Nested {
            self.make_up_for(bytes);
        }
        self.charge(bytes);
        Ok(())
    }

    fn discharge(&self, bytes: u64) {
        // A charge below zero would wrap around and exceed every limit.
        let rest = |resident: u64| Some(resident.saturating_sub(bytes));
        let before = self.resident.fetch_update(Relaxed, Relaxed, rest).unwrap_or_default();
        stats::add(Counter::BooksMended, bytes.saturating_sub(before));
        self.publish();
    }

    fn overcommit(&self, bytes: u64, context: Context) -> Result<()> {
        let limit = self.limit();
        if limit != UNLIMITED {
            let totals = self.totals();
            if totals.resident.saturating_add(totals.untouched).saturating_add(bytes) > limit {
                self.reconcile_sometimes(QUICK_AT_LIMIT_BYTES);
                // The loan is touched without another charge, so reclaim now, as far as there is something to give
                // back.
                if self.excess(bytes) > 0 {
                    self.give_back(self.excess(bytes).min(bytes), context, Urgency::Request, Reason::Limit);
                }
                self.ask_siblings(bytes, bytes);
            }
            // Refuse only if not even one more byte may become resident.
            let has_room = self.excess(1) == 0 || self.make_room(1, context);
            if !(has_room || self.admit_on_debt(context)) {
                return Err(self.refuse(bytes));
            }
        }
        // Large loans are touched bit by bit, if ever. Reclaim only what may become resident before the next sample.
        // Refuse only if not even one block may become resident.
        self.make_system_room_or(bytes.min(SYSTEM_LOAN_BYTES), bytes.min(BLOCK_BYTES as u64), context)?;
        self.note_use();
        self.untouched.fetch_add(bytes, Relaxed);
        self.publish();
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        self.make_system_room(bytes, Context::Outside)?;
        let limit = self.limit();
        if limit == UNLIMITED {
            return Ok(());
        }
        let totals = self.totals();
        if totals.resident.saturating_add(totals.untouched) > limit {
            self.reconcile_sometimes(QUICK_AT_LIMIT_BYTES);
        }
        if self.excess(bytes) == 0 || self.make_room(bytes, Context::Outside) {
            Ok(())
        } else {
            Err(self.refuse(bytes))
        }
    }

    fn reconciled(&self, resident: i64, reconciled: i64) {
        self.resident.fetch_add(resident as u64, Relaxed);
        self.untouched.fetch_sub(reconciled as u64, Relaxed);
        self.publish();
    }

    fn room(&self) -> (u64, u64) {
        // Where much is overcommitted, the known resident bytes are inaccurate.
        if self.untouched.load(Relaxed) > self.resident.load(Relaxed) / OVERCOMMIT_DIVISOR {
            self.reconcile_sometimes(QUICK_BYTES);
        }
        let limit = self.limit();
        let room = if limit == UNLIMITED { u64::MAX } else { limit.saturating_sub(self.totals().resident) };
        (self.resident.load(Relaxed), room)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::arena::place;

    /// A shrinker that gives what is requested from a fixed stock.
    struct Hoard {
        account: &'static Account,
        held: AtomicU64,
        may_nest: bool,
    }

    impl Shrinker for Hoard {
        fn name(&self) -> &'static str {
            "hoard"
        }
        fn may_nest(&self) -> bool {
            self.may_nest
        }
        fn giveable_bytes(&self) -> u64 {
            self.held.load(Relaxed)
        }
        fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
            let given = want_bytes.min(self.held.load(Relaxed));
            self.held.fetch_sub(given, Relaxed);
            self.account.discharge(given);
            given
        }
    }

    fn account(limit: u64, hoard: u64, may_nest: bool) -> (&'static Account, &'static Hoard) {
        let account = place(Account::new(limit)).unwrap();
        account.admit(hoard, Context::Outside).unwrap();
        let hoard = place(Hoard { account, held: AtomicU64::new(hoard), may_nest }).unwrap();
        account.register(hoard);
        (account, hoard)
    }

    /// A charge over the limit reclaims exactly what is missing. A charge that needs more than there is fails.
    #[test]
    fn a_charge_over_the_limit_reclaims_what_is_missing() {
        let (account, hoard) = account(100, 60, true);
        account.admit(70, Context::Outside).unwrap();
        assert_eq!((account.resident(), hoard.held.load(Relaxed)), (100, 30));
        let error = account.admit(31, Context::Outside).unwrap_err();
        assert!(matches!(error, Error::NoMemory { wanted_bytes: 31, limit_bytes: 100, .. }), "{error}");
        assert_eq!(account.resident(), 100 - hoard.held.swap(0, Relaxed) - 30, "nothing charged by a refusal");
    }

    /// Memory that cannot be purged inside the small allocator becomes a debt. The debt is paid outside; once nothing
    /// is left to pay with, nested charges are refused.
    #[test]
    fn nested_charges_run_a_debt_once() {
        let (account, hoard) = account(100, 90, false);
        account.admit(20, Context::Nested).unwrap();
        assert_eq!(account.resident(), 110);
        assert!(account.has_debt());
        account.pay_debt();
        assert_eq!((account.resident(), hoard.held.load(Relaxed)), (100, 80));
        hoard.held.store(0, Relaxed);
        account.admit(20, Context::Nested).unwrap();
        account.pay_debt();
        assert!(account.admit(1, Context::Nested).is_err(), "nothing left to pay with");
    }

    /// Overcommitting is refused only at the limit itself.
    #[test]
    fn untouched_memory_is_overcommitted_far_beyond_the_limit() {
        let (account, _) = account(100, 0, true);
        account.overcommit(1 << 40, Context::Outside).unwrap();
        account.reconciled(100, 100);
        assert_eq!(account.resident(), 100);
        assert!(account.overcommit(1, Context::Outside).is_err());
    }
}
