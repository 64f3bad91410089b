//! The helper thread: answers the siblings' requests, brings in blocks ahead of need, governs by the clock, sleeps
//! otherwise.
//!
//! Started when the process first holds enough for that to matter, outside
//! every lock; a fork child has none until it needs one again. Where there is
//! something to give and somebody to give it to, a second thread sleeps until
//! the kernel gives a sign, and wakes the helper.

use super::Account;
use super::alarms::{Alarms, Covered};
use super::governor::{Governor, Next, Signs, SystemClock, WORTHWHILE_BYTES};
use super::limits::Bound;
use crate::arena::Arena;
use crate::stats::{self, Counter};
use crate::trace::{self, Event};
use pagemill_sys::events::{self, Sign};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::{clock, thread};
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::SeqCst,
};
use std::time::Duration;

/// Resident bytes from which on a process of a limited tree or control group has a helper.
const HELPED_FROM_BYTES: u64 = 4 << 20;

/// Resident bytes from which on any process has one: it may fall idle.
const GOVERNED_FROM_BYTES: u64 = 64 << 20;

/// Signs come in swarms where a group's usage plays around a threshold: they are passed on at most so often.
const SIGN_PAUSE: Duration = Duration::from_millis(5);

/// Where something becomes giveable without a word, it is looked for so often.
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// A helper that wakes so much later than it wanted to is starved.
const LATE: Duration = Duration::from_millis(20);

/// Of requests that came together at most so many are answered: those that came last.
const MOST_ASKED: u32 = 8;

/// What the helper does when another process asks, by a number on the page of figures.
pub trait Answer: Sync {
    /// Answers request `number`. Neither allocates nor trusts whoever asked.
    fn answer(&self, number: u32);
}

/// Whether there is a helper, and who answers what it is asked.
pub struct Helper {
    account: &'static Account,
    is_started: AtomicBool,
    /// It sleeps until there is something to give.
    is_parked: AtomicBool,
    answers: OnceLock<&'static dyn Answer>,
    /// Descriptor of the alarms, in the helper's own table.
    alarms: AtomicI32,
    /// Signs of the kernel that were not looked at yet.
    signs: AtomicU64,
}

impl Helper {
    pub fn new(account: &'static Account) -> Self {
        Self {
            account,
            is_started: AtomicBool::new(false),
            is_parked: AtomicBool::new(false),
            answers: OnceLock::new(),
            alarms: AtomicI32::new(-1),
            signs: AtomicU64::new(0),
        }
    }

    /// Sets who answers other processes.
    pub fn set_answer(&self, answer: &'static dyn Answer) {
        let _ = self.answers.set(answer);
    }

    /// Whether one should be started now: there is none, and the process holds enough.
    #[inline]
    pub fn is_due(&self, account: &Account) -> bool {
        if self.is_started.load(Relaxed) {
            return false;
        }
        let resident = account.resident();
        let is_near_limit = || account.is_limited() || account.headroom.known().bound == Bound::Group;
        resident >= GOVERNED_FROM_BYTES || (resident >= HELPED_FROM_BYTES && is_near_limit())
    }

    #[inline]
    pub fn is_running(&self) -> bool {
        self.is_started.load(Relaxed)
    }

    /// Claims the right to start the one helper.
    pub fn claim(&self) -> bool {
        !self.is_started.swap(true, AcqRel)
    }

    /// It could not be started, or was not copied by `fork`: another may be.
    pub fn unclaim(&self) {
        self.is_started.store(false, Relaxed);
    }

    /// Wakes the helper if it sleeps for lack of anything to give. Neither allocates nor locks.
    #[inline]
    pub(super) fn unpark(&self, account: &Account) {
        if self.is_parked.load(Relaxed) && self.is_parked.swap(false, AcqRel) {
            self.wake(account);
        }
    }

    /// Wakes the helper, if there is one.
    pub fn wake(&self, account: &Account) {
        if self.is_started.load(Relaxed) {
            match account.place() {
                Some(place) => place.wake(),
                None => stats::wake(),
            }
        }
    }

    /// Answers what other processes asked since request `answered`; returns the latest.
    fn answer_others(&self, answered: u32) -> u32 {
        let asked = stats::current().asked();
        if asked != answered
            && let Some(answers) = self.answers.get()
        {
            let first = answered.min(asked).max(asked.saturating_sub(MOST_ASKED));
            (first..asked).for_each(|before| answers.answer(before + 1));
        }
        asked
    }

    /// The thread's work, for as long as the process lives. A process that does nothing for `idle` gives back.
    pub fn run(&'static self, arena: &Arena, idle: Option<Duration>) -> ! {
        let account = self.account;
        // Who needs memory most may leave this thread no time; and a program may count on the number of its next file.
        // Where either is not to be had it goes on as it is.
        stats::set(Counter::HelpersPreferred, u64::from(thread::prefer()));
        let mut may_be_warned = thread::unshare_files();
        stats::set(Counter::Helpers, 1);
        let mut governor = Governor::new(SystemClock, idle);
        let mut alarms = None;
        let (place, mut answered) = (account.place(), 0);
        if let Some(place) = &place {
            place.listen(true);
        }
        loop {
            // The page of figures may have been published since.
            let word: &AtomicU32 = place.as_ref().map_or_else(stats::wake_word, |place| place.wake_word());
            let seen = word.load(Acquire);
            answered = self.answer_others(answered);
            account.answer();
            while arena.prefault() {}
            let next = governor.step(account, self.take_signs(account, &mut alarms));
            if matches!(next, Next::After(_)) && may_be_warned {
                may_be_warned = self.keep_alarms(&mut alarms);
            }
            if matches!(next, Next::WhenGiveable(_)) {
                self.is_parked.store(true, SeqCst);
                // What was freed since the look wakes nobody: look again.
                if account.giveable() >= WORTHWHILE_BYTES {
                    self.is_parked.store(false, Relaxed);
                    continue;
                }
            }
            let pause = match next {
                Next::After(pause) => Some(pause),
                Next::WhenGiveable(pause) if account.may_have_more() => {
                    account.look_for_more();
                    Some(pause.unwrap_or(LOOK_PAUSE).min(LOOK_PAUSE))
                }
                Next::WhenGiveable(pause) => pause,
                Next::WhenAsked => None,
            };
            let due_ns = pause.map(|pause| clock::fine_ns().saturating_add((pause + LATE).as_nanos() as u64));
            futex::wait(word, seen, pause, Scope::Shared);
            if due_ns.is_some_and(|due_ns| clock::fine_ns() > due_ns) {
                stats::add(Counter::HelperLate, 1);
            }
            self.is_parked.store(false, Relaxed);
        }
    }

    /// What the kernel said since the last look.
    fn take_signs(&self, account: &Account, alarms: &mut Option<Alarms>) -> Signs {
        let mut signs = self.signs.swap(0, AcqRel);
        if let Some(alarms) = alarms {
            signs = alarms.confirm(signs);
        }
        if signs != 0 {
            stats::add(Counter::Signs, 1);
            trace::event(Event::Sign, signs, account.headroom.known().bytes.max(0) as u64);
        }
        let covered = alarms.as_ref().map_or(Covered::default(), |alarms| alarms.covered);
        let has = |sign: Sign| signs & sign as u64 != 0;
        Signs {
            group_stalls: has(Sign::GroupStall),
            machine_stalls: has(Sign::MachineStall),
            has_thresholds: covered.has_thresholds,
        }
    }

    /// Keeps alarms set for the limits there are now; the first time a thread is started that waits for them. Returns
    /// whether that can be done here.
    fn keep_alarms(&'static self, alarms: &mut Option<Alarms>) -> bool {
        let headroom = &self.account.headroom;
        if headroom.known().bound == Bound::None {
            return true;
        }
        if alarms.is_none() {
            let Ok(new) = Alarms::new() else { return false };
            self.alarms.store(new.number(), Relaxed);
            if thread::spawn(c"pagemill-signs", self).is_err() {
                return false;
            }
            *alarms = Some(new);
        }
        if let Some(alarms) = alarms
            && let Some(plan) = headroom.plan(alarms.set_for())
        {
            alarms.set_all(&plan);
        }
        true
    }
}

/// The second thread's: sleeps, passes a sign on, sleeps.
impl thread::Work for Helper {
    fn work(&'static self) {
        // As the helper: who needs memory most may leave no time.
        thread::prefer();
        while let Ok(signs) = events::wait(self.alarms.load(Relaxed)) {
            self.signs.fetch_or(signs, AcqRel);
            self.wake(self.account);
            std::thread::sleep(SIGN_PAUSE);
        }
    }
}
