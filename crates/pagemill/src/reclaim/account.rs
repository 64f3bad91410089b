//! What this process holds against what it may hold: asked before memory becomes resident.
//!
//! A charge that meets the limit measures what is lent, gives back what is free
//! here, asks the siblings of the process tree, counts the dead out, and only
//! then fails. Inside the small allocator, whose locks forbid purging it, a
//! charge may pass the limit once by what it wants: the next allocation outside
//! reclaims first ([`Account::pay_debt`]).

use super::governor;
use super::helper::Helper;
use super::limits::Headroom;
use super::owners::Owners;
use super::pressure::FUTILE_NS;
use super::tree::{Membership, Place, Totals, TreePage, UNLIMITED};
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

/// Shortest time between two measurements of lent memory.
const SETTLE_NS: u64 = 2_000_000;

/// Lent memory beyond this part of what is known to be resident is measured before that is relied on.
const LENT_DIVISOR: u64 = 8;

/// So much is measured in some 20 us: whenever it is asked for.
const QUICK_BYTES: u64 = 64 << 20;

/// So much is measured in some 0.4 ms: whenever a limit is near.
const QUICK_AT_LIMIT_BYTES: u64 = 1 << 30;

/// Measuring takes at most one part in so many of a thread's time.
const SETTLE_SHARE: u64 = 50;

/// Of a loan at most so much is expected to be touched at once.
const SYSTEM_LOAN_BYTES: u64 = 16 << 20;

/// Cold memory goes for new in steps of this.
const MAKE_UP_STEP_BYTES: u64 = 1 << 20;

/// After too little was cold, it is looked for again so much later.
const MAKE_UP_PAUSE_NS: u64 = 100_000_000;

/// Free memory up to this part of what is resident (and a block) is left alone.
const SPARE_DIVISOR: u64 = 16;

/// The account of one process.
pub struct Account {
    resident: AtomicU64,
    /// Lent to the program and not known to be touched.
    untouched: AtomicU64,
    own_limit: AtomicU64,
    membership: Membership,
    pub(super) owners: Owners,
    /// When lent memory may be measured again.
    settle_after_ns: AtomicU64,
    /// What control groups and the machine allow.
    pub headroom: Headroom,
    /// Giving back for them found nothing: not tried again before, and how long that pause is.
    pub(super) futile_until_ns: AtomicU64,
    pub(super) futile_pause_ns: AtomicU64,
    /// Asking siblings before giving oneself did not help: not tried again before.
    pub(super) elsewhere_after_ns: AtomicU64,
    /// Woken when there is something to give again.
    helper: OnceLock<&'static Helper>,
    /// New memory for which none was given back yet.
    to_make_up: AtomicU64,
    /// When cold memory is looked for again after too little was found.
    make_up_after_ns: AtomicU64,
    has_debt: AtomicBool,
    /// The last reclaim outside found too little: nested charges over the limit are refused.
    is_exhausted: AtomicBool,
    /// Called when a nested charge has passed the limit. Must not allocate or lock.
    on_debt: OnceLock<fn()>,
    /// Called before the first charge of this process. Must not allocate or lock.
    on_first_charge: OnceLock<fn()>,
    has_charged: AtomicBool,
}

impl Account {
    /// An account that may hold `limit` bytes ([`UNLIMITED`] for no limit of its own).
    pub fn new(limit: u64) -> Self {
        Self {
            resident: AtomicU64::new(0),
            untouched: AtomicU64::new(0),
            own_limit: AtomicU64::new(limit),
            membership: Membership::default(),
            owners: Owners::default(),
            settle_after_ns: AtomicU64::new(0),
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

    /// As [`Account::new`], in memory of its own that stays.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if there is not even an OS page for it.
    pub fn make(limit: u64) -> Result<&'static Self> {
        arena::place(Self::new(limit))
    }

    /// Adds an owner that can give memory back. Cheaper ones first.
    ///
    /// # Panics
    ///
    /// If there are more than eight.
    pub fn register(&self, shrinker: &'static dyn Shrinker) {
        self.owners.register(shrinker);
    }

    /// As [`Account::register`], for one whose memory is dearer than that of all who register later.
    ///
    /// # Panics
    ///
    /// As [`Account::register`].
    pub fn register_last(&self, shrinker: &'static dyn Shrinker) {
        self.owners.register_last(shrinker);
    }

    /// Sets who is woken when there is something to give after there was nothing.
    pub fn set_helper(&self, helper: &'static Helper) {
        let _ = self.helper.set(helper);
    }

    /// Sets what to do when a nested charge has passed the limit: arrange that [`Account::pay_debt`] runs soon.
    pub fn on_debt(&self, act: fn()) {
        let _ = self.on_debt.set(act);
    }

    /// Sets what to do before the first charge of this process, and of every fork child: publish the figures, say.
    pub fn on_first_charge(&self, act: fn()) {
        let _ = self.on_first_charge.set(act);
    }

    /// Joins a process tree: its limit counts from now on, and what is held here is seen there.
    pub fn join(&self, page: &'static TreePage, who: Identity) {
        self.membership.set(page, page.enter(who));
        self.publish();
    }

    /// Leaves the tree, at the end of the process.
    pub fn leave(&self) {
        if let Some(place) = self.membership.place() {
            // Other threads and later destructors may go on allocating: they must not write to another's place.
            self.membership.give_up_place();
            place.leave();
        }
    }

    /// In a fork child: what the parent holds is the parent's; takes a place of its own.
    pub fn forked(&self, who: Identity) {
        self.resident.store(0, Relaxed);
        self.untouched.store(0, Relaxed);
        self.has_charged.store(false, Relaxed);
        self.headroom.forget();
        self.owners.forked();
        self.futile_until_ns.store(0, Relaxed);
        if let Some(page) = self.membership.page() {
            self.membership.set(page, page.enter(who));
        }
        self.publish();
    }

    pub fn place(&self) -> Option<Place> {
        self.membership.place()
    }

    /// Whether anybody limits what this process holds, so that it may be asked to give back.
    pub fn is_limited(&self) -> bool {
        self.limit() != UNLIMITED
    }

    /// The smallest limit that applies.
    pub fn limit(&self) -> u64 {
        let tree = self.membership.page().map_or(UNLIMITED, TreePage::limit);
        tree.min(self.own_limit.load(Relaxed))
    }

    /// Bytes that this process has resident, as far as charged and measured.
    pub fn resident(&self) -> u64 {
        self.resident.load(Relaxed)
    }

    /// What the limit is compared with: the tree's sums, or this process's.
    fn totals(&self) -> Totals {
        let own = Totals {
            resident: self.resident.load(Relaxed),
            untouched: self.untouched.load(Relaxed),
            giveable: 0,
            members: 1,
        };
        match (self.membership.page(), self.membership.place()) {
            // Of this process what it knows, not what it last published.
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

    /// Bytes that this process and its siblings have resident.
    pub(super) fn tree_resident(&self) -> u64 {
        self.totals().resident
    }

    /// Tells the tree and the figures what is held now, and notes peaks.
    pub(crate) fn publish(&self) {
        // Again where another thread changed it meanwhile: the last word published is a true one.
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
        if giveable >= governor::WORTHWHILE_BYTES
            && let Some(helper) = self.helper.get()
        {
            helper.unpark(self);
        }
        stats::raise(Counter::ResidentPeak, resident);
        let giveable = self.giveable_of_books(giveable);
        stats::raise(Counter::NetPeak, resident.saturating_sub(giveable));
        if let Some(place) = self.membership.place() {
            place.publish(resident, untouched, giveable.min(resident));
            place.page().note_peak(place.page().totals());
        }
    }

    /// Bytes that the owners here could give at once.
    pub fn giveable(&self) -> u64 {
        self.owners.giveable(Context::Outside)
    }

    /// What of that is on the books, so that siblings and limits are helped by it.
    fn giveable_of_books(&self, giveable: u64) -> u64 {
        giveable.saturating_sub(self.owners.foreign())
    }

    /// Whether a look may find more to give than is known.
    pub(super) fn may_have_more(&self) -> bool {
        self.owners.may_have_more()
    }

    /// From here on it may: the helper, which may sleep for lack of anything to give, begins to look.
    pub(crate) fn note_more(&self) {
        if let Some(helper) = self.helper.get() {
            helper.unpark(self);
        }
    }

    /// Takes that look.
    pub(super) fn look_for_more(&self) {
        self.owners.measure();
        self.publish();
    }

    /// Measures what of the lent memory is resident.
    pub fn settle(&self) {
        let start = clock::fine_ns();
        self.owners.settle();
        let end = clock::fine_ns();
        self.settle_after_ns.store(end + SETTLE_NS.max((end - start) * SETTLE_SHARE), Relaxed);
    }

    /// Measures all that can only be known by measuring. Outside of every lock.
    pub fn measure(&self) {
        self.settle();
        self.owners.measure();
        self.publish();
    }

    /// As [`Account::settle`], unless more than `quick_bytes` are to be measured and that was done just now.
    fn settle_sometimes(&self, quick_bytes: u64) {
        let untouched = self.untouched.load(Relaxed);
        if untouched == 0 {
            return;
        }
        if untouched <= quick_bytes || clock::fine_ns() >= self.settle_after_ns.load(Relaxed) {
            self.settle();
        }
    }

    /// Makes the owners here give back up to `want_bytes`; returns what the kernel took.
    pub fn give_back(&self, want_bytes: u64, context: Context, urgency: Urgency, reason: Reason) -> u64 {
        stats::add(Counter::PurgeRequests, 1);
        let freed = self.owners.give(want_bytes, context, urgency);
        reason.note(want_bytes, freed);
        freed
    }

    /// Offers up to `want_bytes` of what is free to the kernel, in case it runs short before we notice.
    pub fn offer(&self, want_bytes: u64, which: Which) {
        let offered = self.owners.offer(want_bytes, which);
        if offered > 0 {
            stats::add(Counter::Offered, offered);
            trace::event(Event::Offered, want_bytes, offered);
        }
    }

    /// Finds out what the kernel took of what was offered to it; does nothing mostly.
    pub fn reap(&self) {
        self.owners.reap();
    }

    /// New memory comes in: as much of what is free and cold goes, if much is free. So sizes that a program has done
    /// with do not add up beside those it uses now.
    pub fn make_up_for(&self, bytes: u64) {
        let due = self.to_make_up.fetch_add(bytes, Relaxed).saturating_add(bytes);
        if due < MAKE_UP_STEP_BYTES {
            return;
        }
        self.to_make_up.store(0, Relaxed);
        let free = self.owners.giveable(Context::Nested);
        let now = clock::coarse_ns();
        if free <= self.resident() / SPARE_DIVISOR + BLOCK_BYTES as u64 || now < self.make_up_after_ns.load(Relaxed) {
            return;
        }
        let freed = self.owners.give_cold(due);
        Reason::New.note(due, freed);
        if freed < due / 2 {
            // Free memory in pieces, none of which can go: not looked for again at every step.
            self.make_up_after_ns.store(now + MAKE_UP_PAUSE_NS, Relaxed);
        }
    }

    /// Answers a sibling's open request, if there is one.
    pub fn answer(&self) {
        let Some(place) = self.membership.place() else { return };
        self.measure();
        let mut asked = 0;
        let given = place.answer(self.giveable_of_books(self.giveable()), |part| {
            asked = part;
            self.give_back(part, Context::Outside, Urgency::Limit, Reason::Sibling)
        });
        if let Some(given) = given {
            trace::event(Event::Asked, asked, given);
        }
        self.publish();
    }

    /// Bytes over the limit if `bytes` more came in.
    fn excess(&self, bytes: u64) -> u64 {
        self.totals().resident.saturating_add(bytes).saturating_sub(self.limit())
    }

    /// Reclaims until `bytes` more fit under the limit, here and in the tree. Returns whether they do.
    fn make_room(&self, bytes: u64, context: Context) -> bool {
        self.settle_sometimes(QUICK_AT_LIMIT_BYTES);
        trace::event(Event::OverLimit, bytes, self.totals().resident);
        for urgency in [Urgency::Request, Urgency::Limit] {
            let excess = self.excess(bytes);
            if excess == 0 {
                break;
            }
            self.give_back(excess, context, urgency, Reason::Limit);
        }
        // Twice: who took a part of the first request may not have had it.
        for _ in 0..2 {
            self.ask_siblings(bytes, u64::MAX);
        }
        let has_room = self.excess(bytes) == 0;
        stats::add(if has_room { Counter::LimitReclaims } else { Counter::LimitRefused }, 1);
        has_room
    }

    /// Counts out members that are gone and asks the others for what `bytes` more are over the limit by, at most
    /// `most`. Waits for answers, but not long.
    fn ask_siblings(&self, bytes: u64, most: u64) {
        let Some(page) = self.membership.page().filter(|_| self.excess(bytes) > 0) else { return };
        page.sweep();
        let excess = self.excess(bytes).min(most);
        if excess > 0 {
            self.ask_for(excess, || self.excess(bytes) == 0);
        }
    }

    /// Asks the siblings for `bytes`; returns by how much what they hold fell. Waits for answers, but not long.
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

    /// Whether a nested charge passed the limit since the last [`Account::pay_debt`].
    #[inline]
    pub fn has_debt(&self) -> bool {
        self.has_debt.load(Relaxed)
    }

    /// Reclaims what nested charges are over the limit by. Call it outside of every lock.
    pub fn pay_debt(&self) {
        if self.has_debt.swap(false, Relaxed) {
            let is_paid = self.excess(0) == 0 || self.make_room(0, Context::Outside);
            let is_below_others = self.pay_system_debt();
            self.is_exhausted.store(!(is_paid && is_below_others), Relaxed);
        }
    }

    /// Whether a charge that found no room may run a debt: a nested one may, once.
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

    /// Tells, once, that the process makes use of Pagemill: by its first charge, or, without any, by a mark.
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
    /// Counts what the C library hands out (or gets back) while it serves the program: nobody is asked.
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
    /// At the end of a process that the C library served: the most that it held. If its figures are not published yet
    /// they will not be; the tree notes the peak.
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
            // What was lent may have come in meanwhile: look when it could matter.
            let totals = self.totals();
            self.is_exhausted.store(false, Relaxed);
            if totals.resident.saturating_add(totals.untouched).saturating_add(bytes) > limit {
                self.settle_sometimes(QUICK_AT_LIMIT_BYTES);
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
        // Below zero everything would be over every limit.
        let rest = |resident: u64| Some(resident.saturating_sub(bytes));
        let before = self.resident.fetch_update(Relaxed, Relaxed, rest).unwrap_or_default();
        stats::add(Counter::BooksMended, bytes.saturating_sub(before));
        self.publish();
    }

    fn lend(&self, bytes: u64, context: Context) -> Result<()> {
        let limit = self.limit();
        if limit != UNLIMITED {
            let totals = self.totals();
            if totals.resident.saturating_add(totals.untouched).saturating_add(bytes) > limit {
                self.settle_sometimes(QUICK_AT_LIMIT_BYTES);
                // It will be touched without asking again, so room is made now, as far as there is something to give.
                if self.excess(bytes) > 0 {
                    self.give_back(self.excess(bytes).min(bytes), context, Urgency::Request, Reason::Limit);
                }
                self.ask_siblings(bytes, bytes);
            }
            // Refused only where not even one more page may become resident.
            let has_room = self.excess(1) == 0 || self.make_room(1, context);
            if !(has_room || self.admit_on_debt(context)) {
                return Err(self.refuse(bytes));
            }
        }
        // Large loans are touched bit by bit, if ever; room is made for as much as comes in before the next look. Refused only where
        // not even a block may become resident.
        self.make_system_room_or(bytes.min(SYSTEM_LOAN_BYTES), bytes.min(BLOCK_BYTES as u64), context)?;
        self.note_use();
        self.untouched.fetch_add(bytes, Relaxed);
        self.publish();
        Ok(())
    }

    fn expect(&self, bytes: u64) -> Result<()> {
        self.make_system_room(bytes, Context::Outside)?;
        let limit = self.limit();
        if limit == UNLIMITED {
            return Ok(());
        }
        let totals = self.totals();
        if totals.resident.saturating_add(totals.untouched) > limit {
            self.settle_sometimes(QUICK_AT_LIMIT_BYTES);
        }
        if self.excess(bytes) == 0 || self.make_room(bytes, Context::Outside) {
            Ok(())
        } else {
            Err(self.refuse(bytes))
        }
    }

    fn settled(&self, resident: i64, settled: i64) {
        self.resident.fetch_add(resident as u64, Relaxed);
        self.untouched.fetch_sub(settled as u64, Relaxed);
        self.publish();
    }

    fn room(&self) -> (u64, u64) {
        // Where much is lent, what is known to be resident says little.
        if self.untouched.load(Relaxed) > self.resident.load(Relaxed) / LENT_DIVISOR {
            self.settle_sometimes(QUICK_BYTES);
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

    /// Gives from a hoard what it is asked for.
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

    /// Over the limit exactly what is missing is given back, and no more than there is.
    #[test]
    fn a_charge_over_the_limit_reclaims_what_is_missing() {
        let (account, hoard) = account(100, 60, true);
        account.admit(70, Context::Outside).unwrap();
        assert_eq!((account.resident(), hoard.held.load(Relaxed)), (100, 30));
        let error = account.admit(31, Context::Outside).unwrap_err();
        assert!(matches!(error, Error::NoMemory { wanted_bytes: 31, limit_bytes: 100, .. }), "{error}");
        assert_eq!(account.resident(), 100 - hoard.held.swap(0, Relaxed) - 30, "nothing charged by a refusal");
    }

    /// Inside the small allocator what cannot be purged there becomes a debt, is paid outside, and is then refused.
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

    /// Lending is refused only at the limit itself.
    #[test]
    fn untouched_memory_is_lent_far_beyond_the_limit() {
        let (account, _) = account(100, 0, true);
        account.lend(1 << 40, Context::Outside).unwrap();
        account.settled(100, 100);
        assert_eq!(account.resident(), 100);
        assert!(account.lend(1, Context::Outside).is_err());
    }
}
