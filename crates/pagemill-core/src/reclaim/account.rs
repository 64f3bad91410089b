//! The account of one process: it compares the bytes that the process holds with its limits before memory becomes
//! resident.
//!
//! A charge that would exceed the limit first reclaims: it measures overcommitted memory, returns free memory of this
//! process, requests memory from the siblings of the process tree, and removes dead members. The charge fails only if
//! that frees too little. A charge from inside the small allocator (jemalloc) may exceed the limit once, because
//! jemalloc's locks forbid purging its memory. The next allocation outside of those locks reclaims first
//! ([`Account::pay_debt`]).

use super::governor;
use super::helper::Helper;
use super::limits::Headroom;
use super::owners::{self, Owners};
use super::pressure::RECLAIM_PAUSE_NS;
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

/// Shortest time in nanoseconds between two measurements of overcommitted memory. Amounts up to the `QUICK_` constants
/// take so little time that they are measured at once.
const RECONCILE_NS: u64 = 2_000_000;

/// If the overcommitted bytes exceed the resident bytes divided by this number, they are measured before the room below
/// the limit is reported.
const OVERCOMMIT_DIVISOR: u64 = 8;

/// Up to this number of overcommitted bytes are measured whenever the room below the limit is queried. The measurement
/// takes some 20 us.
const QUICK_RECONCILE_BYTES: u64 = 64 << 20;

/// Up to this number of overcommitted bytes are measured whenever a limit is near. The measurement takes some 0.4 ms.
const QUICK_RECONCILE_AT_LIMIT_BYTES: u64 = 1 << 30;

/// The pause after a measurement is this many times the duration of the measurement. So measuring costs at most 2 % of
/// the time.
const RECONCILE_PAUSE_FACTOR: u64 = 50;

/// Maximum number of bytes of an overcommitted range that the program is expected to touch at once.
const MAX_TOUCHED_AT_ONCE_BYTES: u64 = 16 << 20;

/// Free memory is returned to offset new memory only after new memory of at least this number of bytes. Each such step
/// scans all free slots.
const OFFSET_STEP_BYTES: u64 = 1 << 20;
/// Free memory is returned to offset new memory only after new memory of at least the resident bytes divided by this
/// number.
const OFFSET_STEP_DIVISOR: u64 = 128;

/// Free memory that was not reused for this time is cold. A page fault that brings such memory in again costs a
/// hundredth of this time.
const COLD_AGE: Duration = Duration::from_millis(67);

/// After a search that found too little cold free memory, no search starts for this time, in nanoseconds.
const OFFSET_PAUSE_NS: u64 = 100_000_000;

/// Free memory up to the resident bytes divided by this number, plus one block, is not returned to offset new memory.
const KEPT_FREE_DIVISOR: u64 = 16;

/// Free memory above the resident bytes divided by this number, plus one block, is returned even if it is not cold.
const MAX_FREE_DIVISOR: u64 = 3;

/// Number of bytes that one step of [`Account::drop_contents`] wants.
const DROP_STEP_BYTES: u64 = 32 << 20;

/// The account of one process: its charge, its limits, and the shrinkers that can give memory back.
///
/// ```
/// use pagemill_core::arena::Context;
/// use pagemill_core::reclaim::{Reason, Urgency};
///
/// let pagemill = pagemill_testbed::Testbed::of_process()?;
/// let block = pagemill.heap.allocate(2 << 20, 64)?;
/// // SAFETY: the block is written while it is allocated, and not used after it was freed.
/// unsafe {
///     block.addr.as_ptr().write_bytes(1, 2 << 20);
///     pagemill.heap.free(block.addr.as_ptr() as usize)?;
/// }
/// let freed = pagemill.account.give_back(1 << 20, Context::Outside, Urgency::Request, Reason::Program);
/// println!("{freed} bytes returned");
/// assert!(pagemill.account.giveable() < 2 << 20);
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Default)]
pub struct Account {
    /// Bytes charged to this process.
    resident: AtomicU64,
    /// Overcommitted bytes that no measurement has found to be touched yet.
    untouched: AtomicU64,
    /// The limit of this process in bytes, apart from the limit of its tree; [`UNLIMITED`] for none.
    own_limit: u64,
    /// The process tree to which this process belongs, if any, and its slot on the tree's page.
    membership: Membership,
    pub(super) owners: Owners,
    /// Earliest time of the next measurement of overcommitted memory.
    reconcile_after_ns: AtomicU64,
    /// The bytes that may still become resident below the limits of control groups and of the machine.
    pub headroom: Headroom,
    /// Until this time, this process does not reclaim for control groups or the machine again, because the last attempt
    /// freed nothing.
    pub(super) reclaim_paused_until_ns: AtomicU64,
    /// Length of the pause that ends at `reclaim_paused_until_ns`.
    pub(super) reclaim_pause_ns: AtomicU64,
    /// Until this time, this process reclaims its own memory before it sends requests to siblings, because requests
    /// that were sent first freed too little.
    pub(super) siblings_first_after_ns: AtomicU64,
    /// The helper thread. It is woken when there is memory to give back.
    helper: OnceLock<&'static Helper>,
    /// Bytes of memory that became resident since the last step of [`Account::offset_new_memory`].
    not_offset_bytes: AtomicU64,
    /// Earliest time of the next search for cold memory, after a search that found too little.
    next_offset_ns: AtomicU64,
    /// A nested charge (made inside the small allocator) has exceeded the limit since the last [`Account::pay_debt`].
    has_debt: AtomicBool,
    /// The last reclaim outside of the small allocator freed too little, so nested charges over the limit are refused.
    is_exhausted: AtomicBool,
    /// Called when a charge made inside the small allocator has exceeded the limit. The function must not allocate or
    /// lock.
    on_debt: OnceLock<fn()>,
    /// Called before the first charge of this process. The function must not allocate or lock.
    on_first_charge: OnceLock<fn()>,
    /// `on_first_charge` has run in this process.
    has_charged: AtomicBool,
}

impl Account {
    /// Creates the account of a process that may hold `limit` resident bytes ([`UNLIMITED`] for no limit of its own).
    pub fn new(limit: u64) -> Self {
        let reclaim_pause_ns = AtomicU64::new(*RECLAIM_PAUSE_NS.start());
        Self { own_limit: limit, reclaim_pause_ns, ..Self::default() }
    }

    /// As [`Account::new`], but places the account in an allocation of its own that is never freed.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if not even one OS page can be mapped.
    pub fn make(limit: u64) -> Result<&'static Self> {
        arena::place(Self::new(limit))
    }

    /// Registers a shrinker of Pagemill itself. Shrinkers are called in order of [`Shrinker::cost`], those of equal
    /// cost in order of registration.
    ///
    /// # Panics
    ///
    /// If more than three shrinkers of one cost register.
    pub fn register(&self, shrinker: &'static dyn Shrinker) {
        self.owners.register(shrinker);
    }

    /// Registers a shrinker of the program. It is called after those of Pagemill that have the same cost.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`] if the program has registered three of this cost.
    pub fn register_for_program(&self, shrinker: &'static dyn Shrinker) -> Result<()> {
        let what = "shrinkers of the program of one cost";
        let is_registered = self.owners.register_for_program(shrinker);
        if is_registered { Ok(()) } else { Err(Error::TooMany { what, most: owners::SLOTS_PER_COST }) }
    }

    /// Sets the helper thread that is woken when there is memory to give back again.
    pub fn set_helper(&self, helper: &'static Helper) {
        let _ = self.helper.set(helper);
    }

    /// Sets the function that is called when a charge made inside the small allocator exceeds the limit. The function
    /// must arrange that [`Account::pay_debt`] runs soon.
    pub fn on_debt(&self, act: fn()) {
        let _ = self.on_debt.set(act);
    }

    /// Sets the function that is called before the first charge of this process and of every fork child. Pagemill
    /// publishes the process's statistics there.
    pub fn on_first_charge(&self, act: fn()) {
        let _ = self.on_first_charge.set(act);
    }

    /// Joins a process tree. From now on the tree's limit applies, and this process publishes its charge on the tree's
    /// page.
    pub fn join(&self, page: &'static TreePage, identity: Identity) {
        self.membership.set(page, page.enter(identity));
        self.publish();
    }

    /// Leaves the process tree, at the end of the process.
    pub fn leave(&self) {
        if let Some(place) = self.membership.place() {
            // Other threads and later destructors may continue to allocate. These must not write to a slot of the
            // tree's page that another process may take over.
            self.membership.forget_slot();
            place.leave();
        }
    }

    /// Resets the account in a fork child: the charge starts at zero, and the child gets its own slot on the tree's
    /// page.
    pub fn begin_child(&self, identity: Identity) {
        self.resident.store(0, Relaxed);
        self.untouched.store(0, Relaxed);
        self.has_charged.store(false, Relaxed);
        self.headroom.drop_credit();
        self.owners.begin_child();
        self.reclaim_paused_until_ns.store(0, Relaxed);
        if let Some(page) = self.membership.page() {
            page.count_started_program();
            self.membership.set(page, page.enter(identity));
        }
        self.publish();
    }

    /// Returns the slot of this process on the shared page of its process tree; `None` if the process has no slot.
    pub fn place(&self) -> Option<MemberSlot> {
        self.membership.place()
    }

    /// Returns whether a limit of this process or of its tree applies.
    pub fn is_limited(&self) -> bool {
        self.limit() != UNLIMITED
    }

    /// Returns the limit that applies: the smaller of the process's own limit and its tree's limit.
    pub fn limit(&self) -> u64 {
        let tree = self.membership.page().map_or(UNLIMITED, TreePage::limit);
        tree.min(self.own_limit)
    }

    /// Returns the resident bytes of this process, as far as they were charged or measured.
    pub fn resident(&self) -> u64 {
        self.resident.load(Relaxed)
    }

    /// Returns the totals that are compared with the limit: those of the process tree, or of this process if it is in
    /// no tree.
    pub(super) fn totals(&self) -> Totals {
        let (resident, untouched) = (self.resident.load(Relaxed), self.untouched.load(Relaxed));
        let own = Totals { resident, untouched, giveable: 0, members: 1 };
        self.membership.page().map_or(own, |page| page.totals_with(self.membership.place(), own))
    }

    /// Publishes the current charge on the tree's page and in the statistics, and updates the peaks.
    pub fn publish(&self) {
        // Repeat if another thread changed the charge meanwhile, so that the value published last is a current one.
        loop {
            let resident = self.resident.load(Relaxed);
            self.publish_charge(resident);
            if self.resident.load(Relaxed) == resident {
                return;
            }
        }
    }

    /// Publishes the charge `resident` and the giveable bytes, and wakes a parked helper if there is memory to give
    /// back.
    fn publish_charge(&self, resident: u64) {
        let untouched = self.untouched.load(Relaxed);
        stats::set(Counter::Resident, resident);
        stats::set(Counter::Untouched, untouched);
        let amounts = self.owners.amounts();
        if let Some(helper) = self.helper.get().filter(|helper| helper.is_parked())
            && (amounts.giveable >= governor::WORTHWHILE_BYTES || amounts.may_have_more)
        {
            helper.unpark();
        }
        stats::raise(Counter::ResidentPeak, resident);
        let giveable = amounts.charged();
        stats::raise(Counter::NetPeak, resident.saturating_sub(giveable));
        if let Some(place) = self.membership.place() {
            place.publish(resident, untouched, giveable.min(resident));
            place.page().raise_peaks(place.page().totals());
        }
    }

    /// Returns the number of bytes that the shrinkers of this process could give back at once.
    pub fn giveable(&self) -> u64 {
        self.owners.giveable(Context::Outside)
    }

    /// Returns whether a measurement may find more giveable memory than the shrinkers report.
    pub(super) fn may_have_more(&self) -> bool {
        self.owners.amounts().may_have_more
    }

    /// Wakes the helper if it is parked. Called when there may be memory to give back from now on.
    pub fn note_more(&self) {
        if let Some(helper) = self.helper.get() {
            helper.unpark();
        }
    }

    /// Measures how much of the overcommitted memory has become resident, and charges it.
    pub fn reconcile(&self) {
        let start = clock::fine_ns();
        self.owners.for_each(|shrinker| shrinker.reconcile());
        let end = clock::fine_ns();
        self.reconcile_after_ns.store(end + RECONCILE_NS.max((end - start) * RECONCILE_PAUSE_FACTOR), Relaxed);
    }

    /// Measures all amounts of memory that are known only by measuring. The caller must hold no lock.
    pub fn measure(&self) {
        self.reconcile();
        self.owners.for_each(|shrinker| shrinker.measure());
        self.publish();
    }

    /// As [`Account::reconcile`], but does nothing if more than `quick_bytes` are overcommitted and the last
    /// measurement is recent.
    fn reconcile_if_due(&self, quick_bytes: u64) {
        let untouched = self.untouched.load(Relaxed);
        let is_due = || untouched <= quick_bytes || clock::fine_ns() >= self.reconcile_after_ns.load(Relaxed);
        if untouched > 0 && is_due() {
            self.reconcile();
        }
    }

    /// Measures the overcommitted memory if a charge of `bytes` could exceed `limit` because all of that memory has
    /// become resident meanwhile. Returns whether it could.
    fn reconcile_near_limit(&self, bytes: u64, limit: u64) -> bool {
        let totals = self.totals();
        let is_near = totals.resident.saturating_add(totals.untouched).saturating_add(bytes) > limit;
        if is_near {
            self.reconcile_if_due(QUICK_RECONCILE_AT_LIMIT_BYTES);
        }
        is_near
    }

    /// Makes the shrinkers of this process give back up to `want_bytes` of memory. Returns the bytes that the kernel
    /// took back.
    pub fn give_back(&self, want_bytes: u64, context: Context, urgency: Urgency, reason: Reason) -> u64 {
        stats::add(Counter::PurgeRequests, 1);
        let freed = self.owners.give(want_bytes, context, urgency, reason);
        reason.record(want_bytes, freed);
        freed
    }

    /// Makes the shrinkers give back up to `want_bytes` of memory that was not reused for `age`. Returns the bytes that
    /// the kernel took back.
    pub fn give_aged(&self, want_bytes: u64, age: Duration) -> u64 {
        let freed = self.owners.give_aged(want_bytes, age, Context::Outside);
        if freed > 0 {
            Reason::Age.record(want_bytes, freed);
        }
        freed
    }

    /// Gives back all free memory of this process, also free parts of huge pages, which it splits. Runs when the
    /// program requests it.
    pub fn return_all(&self) -> u64 {
        let [cheap, rest] = [Urgency::Request, Urgency::Split]
            .map(|urgency| self.give_back(u64::MAX, Context::Outside, urgency, Reason::Program));
        cheap.saturating_add(rest)
    }

    /// Drops contents that can be read again, such as clean pages of cached files, and returns their memory. At most as
    /// much as this process holds is dropped, because the program may read meanwhile. Returns the bytes that the kernel
    /// took back.
    pub fn drop_contents(&self) -> u64 {
        stats::add(Counter::PurgeRequests, 1);
        let (most, mut freed, mut failures) = (self.resident(), 0_u64, 0);
        // A step that evicts less than it wants leaves the evicted memory to the next step, which frees it.
        while freed < most && failures < 2 {
            let given = self.owners.give_contents(DROP_STEP_BYTES);
            freed = freed.saturating_add(given);
            failures = if given == 0 { failures + 1 } else { 0 };
        }
        Reason::Program.record(most, freed);
        freed
    }

    /// Offers up to `want_bytes` of free memory to the kernel (`MADV_FREE`), in case memory runs short before this
    /// process reacts.
    pub fn offer(&self, want_bytes: u64, which: Which) {
        let offered = self.owners.offer(want_bytes, which);
        if offered > 0 {
            stats::add(Counter::Offered, offered);
            trace::event(Event::Offered, want_bytes, offered);
        }
    }

    /// Finds out how much of the offered memory the kernel took, and discharges it. Usually the kernel took none.
    pub fn reap(&self) {
        self.owners.for_each(|shrinker| shrinker.reap());
    }

    /// Counts `bytes` of memory that becomes resident, and returns free memory to the kernel to offset them, in steps
    /// of at least `OFFSET_STEP_BYTES`. So free memory of unused size classes does not accumulate. A process with
    /// little free memory returns none. With more free memory, a step returns up to as many bytes as were counted, but
    /// only cold ones. With very much, a step returns up to twice as many bytes, cold or not.
    pub fn offset_new_memory(&self, bytes: u64) {
        let due = self.not_offset_bytes.fetch_add(bytes, Relaxed).saturating_add(bytes);
        if due < OFFSET_STEP_BYTES.max(self.resident() / OFFSET_STEP_DIVISOR) {
            return;
        }
        self.not_offset_bytes.store(0, Relaxed);
        let (free, resident) = (self.owners.giveable(Context::Nested), self.resident());
        if free <= resident / KEPT_FREE_DIVISOR + BLOCK_BYTES as u64 {
            return;
        }
        let excess = free.saturating_sub(resident / MAX_FREE_DIVISOR + BLOCK_BYTES as u64);
        if excess > 0 {
            let want = excess.min(2 * due);
            Reason::New.record(want, self.owners.give_aged(want, Duration::ZERO, Context::Nested));
            return;
        }
        let now = clock::coarse_ns();
        if now < self.next_offset_ns.load(Relaxed) {
            return;
        }
        let freed = self.owners.give_aged(due, COLD_AGE, Context::Nested);
        Reason::New.record(due, freed);
        if freed < due / 2 {
            // The free memory lies in ranges that cannot be given back. The next steps skip the search.
            self.next_offset_ns.store(now + OFFSET_PAUSE_NS, Relaxed);
        }
    }

    /// Answers an open request for memory of a sibling (another process of the tree), if there is one.
    pub fn answer(&self) {
        let Some(place) = self.membership.place() else { return };
        self.measure();
        let mut asked = 0;
        let given = place.answer(self.owners.amounts().charged(), |part| {
            asked = part;
            self.give_back(part, Context::Outside, Urgency::Limit, Reason::Sibling)
        });
        if let Some(given) = given {
            trace::event(Event::Asked, asked, given);
        }
        self.publish();
    }

    /// Returns the number of bytes by which a charge of `bytes` would exceed the limit.
    fn bytes_over_limit(&self, bytes: u64) -> u64 {
        self.totals().resident.saturating_add(bytes).saturating_sub(self.limit())
    }

    /// Reclaims in this process and in the tree until a charge of `bytes` fits under the limit. Returns whether it
    /// fits.
    fn make_room(&self, bytes: u64, context: Context) -> bool {
        self.reconcile_if_due(QUICK_RECONCILE_AT_LIMIT_BYTES);
        trace::event(Event::OverLimit, bytes, self.totals().resident);
        for urgency in [Urgency::Request, Urgency::Limit] {
            let excess = self.bytes_over_limit(bytes);
            if excess == 0 {
                break;
            }
            self.give_back(excess, context, urgency, Reason::Limit);
        }
        // The request to the siblings is repeated once, because a sibling that accepted a part of the first request may
        // have had less memory than that part.
        for _ in 0..2 {
            self.ask_siblings(bytes, u64::MAX);
        }
        let has_room = self.bytes_over_limit(bytes) == 0;
        stats::add(if has_room { Counter::LimitReclaims } else { Counter::LimitRefused }, 1);
        has_room
    }

    /// Removes dead members from the totals. If a charge of `bytes` would still exceed the limit, requests the excess,
    /// at most `most`, from the siblings. The wait for their answers is bounded.
    fn ask_siblings(&self, bytes: u64, most: u64) {
        let Some(page) = self.membership.page().filter(|_| self.bytes_over_limit(bytes) > 0) else { return };
        page.sweep();
        let excess = self.bytes_over_limit(bytes).min(most);
        if excess > 0 {
            self.request_from_siblings(excess, || self.bytes_over_limit(bytes) == 0);
        }
    }

    /// Requests `bytes` from the siblings. Returns the number of bytes by which the siblings' charge fell. Waits for
    /// their answers for a bounded time, or until `is_enough` returns true.
    pub(super) fn request_from_siblings(&self, bytes: u64, is_enough: impl Fn() -> bool) -> u64 {
        let Some(page) = self.membership.page() else { return 0 };
        let given = page.ask(bytes, self.membership.place(), is_enough);
        trace::event(Event::AskSiblings, bytes, given);
        given
    }

    /// Returns the error of a refused charge of `bytes`, with the current usage and limit.
    fn no_memory_error(&self, bytes: u64) -> Error {
        let used_bytes = self.totals().resident;
        trace::event(Event::Refused, bytes, used_bytes);
        Error::NoMemory { wanted_bytes: bytes, used_bytes, limit_bytes: self.limit() }
    }

    /// Charges bytes that were admitted.
    fn charge(&self, bytes: u64) {
        self.note_first_use();
        let charged = self.resident.fetch_add(bytes, Relaxed);
        debug_assert!(charged.checked_add(bytes).is_some(), "the charge does not wrap");
        self.publish();
    }

    /// Returns whether a nested charge has exceeded the limit since the last [`Account::pay_debt`].
    #[inline]
    pub fn has_debt(&self) -> bool {
        self.has_debt.load(Relaxed)
    }

    /// Reclaims the bytes by which nested charges (made inside the small allocator) exceeded the limit. The caller must
    /// hold no lock.
    pub fn pay_debt(&self) {
        if self.has_debt.swap(false, Relaxed) {
            let is_paid = self.bytes_over_limit(0) == 0 || self.make_room(0, Context::Outside);
            let is_below_others = self.pay_system_debt();
            self.is_exhausted.store(!(is_paid && is_below_others), Relaxed);
        }
    }

    /// Returns whether a charge that does not fit may exceed the limit. Only nested charges may, until a reclaim
    /// outside of the small allocator fails. Records the debt of a nested charge.
    pub(super) fn may_exceed_limit(&self, context: Context) -> bool {
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

    /// Runs `on_first_charge` once: at the first charge, or when the program first makes a range volatile.
    #[inline]
    pub fn note_first_use(&self) {
        if !self.has_charged.load(Relaxed)
            && !self.has_charged.swap(true, Relaxed)
            && let Some(act) = self.on_first_charge.get()
        {
            act();
        }
    }

    /// Charges memory that the C library allocates for the program, or discharges what the C library frees. Never
    /// refuses and never reclaims.
    pub fn charge_c_library(&self, change_bytes: i64) {
        self.note_first_use();
        let change_counter = if change_bytes >= 0 { stats::add } else { stats::sub };
        change_counter(Counter::CLibrary, change_bytes.unsigned_abs());
        self.reconciled(change_bytes, 0);
    }

    /// Records the peak of a process that ends and that allocated from the C library only. A process that never charged
    /// memory records its peak on the tree's page, any other process in its own statistics.
    pub fn record_libc_peak(&self, peak_bytes: u64) {
        if self.has_charged.load(Relaxed) {
            stats::raise(Counter::ResidentPeak, peak_bytes);
            stats::raise(Counter::NetPeak, peak_bytes);
        } else if let Some(page) = self.membership.page() {
            page.record_unpublished_peak(peak_bytes);
        }
    }
}

impl Budget for Account {
    fn admit(&self, bytes: u64, context: Context) -> Result<()> {
        let limit = self.limit();
        if limit != UNLIMITED && self.bytes_over_limit(bytes) > 0 {
            let has_room = self.make_room(bytes, context);
            if !(has_room || self.may_exceed_limit(context)) {
                return Err(self.no_memory_error(bytes));
            }
        } else if limit != UNLIMITED {
            self.is_exhausted.store(false, Relaxed);
            self.reconcile_near_limit(bytes, limit);
        }
        self.make_system_room(bytes, bytes, context)?;
        if context == Context::Nested {
            self.offset_new_memory(bytes);
        }
        self.charge(bytes);
        Ok(())
    }

    fn admit_without_reclaim(&self, bytes: u64) -> bool {
        let has_room = self.room().1 >= bytes.saturating_mul(2) && self.headroom.is_short(bytes).is_none();
        if has_room {
            self.charge(bytes);
        }
        has_room
    }

    fn discharge(&self, bytes: u64) {
        // A charge below zero would wrap around and appear to exceed every limit.
        let rest = |resident: u64| Some(resident.saturating_sub(bytes));
        let before = self.resident.fetch_update(Relaxed, Relaxed, rest).unwrap_or_default();
        stats::add(Counter::BooksMended, bytes.saturating_sub(before));
        self.publish();
    }

    fn overcommit(&self, bytes: u64, context: Context) -> Result<()> {
        let limit = self.limit();
        if limit != UNLIMITED {
            if self.reconcile_near_limit(bytes, limit) {
                // The program later touches overcommitted memory without another charge. So free memory, if there is
                // any, is returned now.
                if self.bytes_over_limit(bytes) > 0 {
                    self.give_back(self.bytes_over_limit(bytes).min(bytes), context, Urgency::Request, Reason::Limit);
                }
                self.ask_siblings(bytes, bytes);
            }
            // The request is refused only if not even one more byte may become resident.
            let has_room = self.bytes_over_limit(1) == 0 || self.make_room(1, context);
            if !(has_room || self.may_exceed_limit(context)) {
                return Err(self.no_memory_error(bytes));
            }
        }
        // Programs touch large ranges gradually, if at all. So reclaim only what may become resident before the next
        // sample, and refuse only if not even one block may.
        self.make_system_room(bytes.min(MAX_TOUCHED_AT_ONCE_BYTES), bytes.min(BLOCK_BYTES as u64), context)?;
        self.note_first_use();
        self.untouched.fetch_add(bytes, Relaxed);
        self.publish();
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> Result<()> {
        self.make_system_room(bytes, bytes, Context::Outside)?;
        let limit = self.limit();
        if limit == UNLIMITED {
            return Ok(());
        }
        self.reconcile_near_limit(0, limit);
        if self.bytes_over_limit(bytes) == 0 || self.make_room(bytes, Context::Outside) {
            Ok(())
        } else {
            Err(self.no_memory_error(bytes))
        }
    }

    fn reconciled(&self, resident: i64, reconciled: i64) {
        let charged = self.resident.fetch_add(resident as u64, Relaxed);
        debug_assert!(charged.checked_add_signed(resident).is_some(), "only charged bytes are discharged");
        let untouched = self.untouched.fetch_sub(reconciled as u64, Relaxed);
        debug_assert!(i128::from(untouched) >= i128::from(reconciled), "only overcommitted bytes are measured");
        self.publish();
    }

    fn room(&self) -> (u64, u64) {
        // With much overcommitted memory, the known resident bytes are inaccurate.
        if self.untouched.load(Relaxed) > self.resident.load(Relaxed) / OVERCOMMIT_DIVISOR {
            self.reconcile_if_due(QUICK_RECONCILE_BYTES);
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

    /// A shrinker with a fixed stock of charged bytes. It discharges the bytes that it gives back.
    struct FixedStock {
        account: &'static Account,
        stock_bytes: AtomicU64,
        may_nest: bool,
    }

    impl Shrinker for FixedStock {
        fn name(&self) -> &'static str {
            "stock"
        }
        fn may_nest(&self) -> bool {
            self.may_nest
        }
        fn giveable_bytes(&self) -> u64 {
            self.stock_bytes.load(Relaxed)
        }
        fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
            let given = want_bytes.min(self.stock_bytes.load(Relaxed));
            self.stock_bytes.fetch_sub(given, Relaxed);
            self.account.discharge(given);
            given
        }
    }

    fn account_with_stock(limit: u64, stock: u64, may_nest: bool) -> (&'static Account, &'static FixedStock) {
        let account = place(Account::new(limit)).unwrap();
        account.admit(stock, Context::Outside).unwrap();
        let stock = place(FixedStock { account, stock_bytes: AtomicU64::new(stock), may_nest }).unwrap();
        account.register(stock);
        (account, stock)
    }

    /// A charge over the limit must make the shrinker free exactly the missing bytes. A charge for which the shrinker
    /// has too few bytes must fail, and must leave the account unchanged except for the bytes freed.
    #[test]
    fn a_charge_over_the_limit_reclaims_the_missing_bytes() {
        let (account, stock) = account_with_stock(100, 60, true);
        account.admit(70, Context::Outside).unwrap();
        assert_eq!((account.resident(), stock.stock_bytes.load(Relaxed)), (100, 30));
        let error = account.admit(31, Context::Outside).unwrap_err();
        assert!(matches!(error, Error::NoMemory { wanted_bytes: 31, limit_bytes: 100, .. }), "{error}");
        assert_eq!(account.resident(), 100 - stock.stock_bytes.swap(0, Relaxed) - 30, "nothing charged by a refusal");
    }

    /// A nested charge may exceed the limit, and `pay_debt` must reclaim the excess. Once the shrinker has nothing
    /// left, nested charges must be refused.
    #[test]
    fn nested_charges_exceed_the_limit_until_nothing_is_left_to_reclaim() {
        let (account, stock) = account_with_stock(100, 90, false);
        account.admit(20, Context::Nested).unwrap();
        assert_eq!(account.resident(), 110);
        assert!(account.has_debt());
        account.pay_debt();
        assert_eq!((account.resident(), stock.stock_bytes.load(Relaxed)), (100, 80));
        stock.stock_bytes.store(0, Relaxed);
        account.admit(20, Context::Nested).unwrap();
        account.pay_debt();
        assert!(account.admit(1, Context::Nested).is_err(), "the shrinker has nothing left");
    }

    /// A charge without reclaim must succeed while twice its bytes fit. Otherwise it must be refused, must charge
    /// nothing, and must take nothing from the shrinker.
    #[test]
    fn a_charge_without_reclaim_takes_only_room() {
        let (account, stock) = account_with_stock(100, 60, true);
        assert!(account.admit_without_reclaim(20));
        assert_eq!((account.resident(), account.admit_without_reclaim(11)), (80, false));
        assert_eq!((account.resident(), stock.stock_bytes.load(Relaxed)), (80, 60));
    }

    /// Overcommitting many more bytes than the limit must succeed. Once a measurement finds the limit reached,
    /// overcommitting one byte more must fail.
    #[test]
    fn overcommitting_is_refused_only_at_the_limit() {
        let (account, _) = account_with_stock(100, 0, true);
        account.overcommit(1 << 40, Context::Outside).unwrap();
        account.reconciled(100, 100);
        assert_eq!(account.resident(), 100);
        assert!(account.overcommit(1, Context::Outside).is_err());
    }
}
