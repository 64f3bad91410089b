//! The helper thread: it answers requests of sibling processes, brings in blocks before they are needed, and runs the
//! governor. Otherwise it sleeps.
//!
//! The helper is started, outside of every lock, when the process first holds enough memory for reclaim to matter. A
//! fork child has no helper until it holds that much itself. If there is memory to give back and a limit to watch, a
//! second thread waits for kernel events and wakes the helper.

use super::alarms::{Alarms, CoveredEvents};
use super::governor::{Governor, KernelEvents, NextStep, SystemClock, WORTHWHILE_BYTES};
use super::limits::Bound;
use super::{Account, Return};
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

/// Resident bytes from which a process gets a helper thread if its tree or its control group has a limit.
const MIN_HELPER_RESIDENT_BYTES_IF_LIMITED: u64 = 4 << 20;

/// Resident bytes from which every process gets a helper thread, which returns memory that was free for long. Most
/// smaller processes end before their memory is old enough.
const MIN_HELPER_RESIDENT_BYTES: u64 = 16 << 20;

/// Shortest pause between two kernel events that the second thread forwards to the helper. Events come in bursts while
/// a group's usage oscillates around a threshold.
const MIN_EVENT_PAUSE: Duration = Duration::from_millis(5);

/// While requests to make memory resident wake the helper, this time passes between two steps of the governor, unless
/// the governor or a kernel event requires an earlier one. Requests of siblings are answered at these steps, in time
/// for their limit of 25 ms.
const STEP_PAUSE: Duration = Duration::from_millis(4);

/// A helper that wakes this much later than planned is counted as late, because it got no CPU in time.
const LATE_AFTER: Duration = Duration::from_millis(20);

/// Maximum number of requests that the helper answers one after the other. If more have arrived, only the latest ones
/// are answered.
const MAX_ANSWERED_REQUESTS: u32 = 8;

/// An object that answers requests of other processes. The requests have ascending numbers.
///
/// Example: [`Helper`].
pub trait Answer: Sync {
    /// Answers the request with this number. The implementation must not allocate and must not trust the requester.
    fn answer(&self, number: u32);
}

/// The state of the helper thread. Other threads use it to wake the helper.
///
/// ```
/// let pagemill = pagemill_testbed::Testbed::of_process()?; // starts the helper
/// assert!(pagemill.helper.is_running());
/// assert!(!pagemill.helper.claim()); // one thread per process
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Helper {
    account: &'static Account,
    /// The helper thread runs, or another thread has claimed the right to start it.
    is_started: AtomicBool,
    /// The helper sleeps without a timeout until there is memory to give back.
    is_parked: AtomicBool,
    /// Answers requests of other processes; empty until [`Helper::set_answer`].
    answers: OnceLock<&'static dyn Answer>,
    /// Descriptor of the alarms in the helper's own descriptor table, or -1.
    alarms: AtomicI32,
    /// Bits of the kernel events that were not handled yet.
    signs: AtomicU64,
    /// The age of [`Return`] in seconds; 0 for [`Return::Keep`].
    return_after_s: AtomicU64,
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
            return_after_s: AtomicU64::new(return_after_seconds(Return::BALANCED)),
        }
    }

    /// Sets the time after which free memory returns to the system without a request or pressure. The default is
    /// [`Return::BALANCED`]. The policy does not apply to the contents of volatile ranges and caches. Wakes the helper,
    /// so that the new policy applies at once.
    pub fn set_return(&self, policy: Return) {
        self.return_after_s.store(return_after_seconds(policy), Relaxed);
        self.wake();
    }

    /// Returns the policy that [`Helper::set_return`] has set.
    fn policy(&self) -> Return {
        Return::after_seconds(self.return_after_s.load(Relaxed)).unwrap_or(Return::Keep)
    }

    /// Sets the object that answers requests of other processes.
    pub fn set_answer(&self, answer: &'static dyn Answer) {
        let _ = self.answers.set(answer);
    }

    /// Returns whether a helper should be started now: none runs, and the process holds enough memory.
    #[inline]
    pub fn is_due(&self) -> bool {
        if self.is_started.load(Relaxed) {
            return false;
        }
        let (account, resident) = (self.account, self.account.resident());
        let is_near_limit = || account.is_limited() || account.headroom.latest_sample().bound == Bound::Group;
        resident >= MIN_HELPER_RESIDENT_BYTES || (resident >= MIN_HELPER_RESIDENT_BYTES_IF_LIMITED && is_near_limit())
    }

    #[inline]
    pub fn is_running(&self) -> bool {
        self.is_started.load(Relaxed)
    }

    /// Claims the right to start the helper. Returns whether the caller got that right.
    pub fn claim(&self) -> bool {
        !self.is_started.swap(true, AcqRel)
    }

    /// Undoes [`Helper::claim`] if the helper thread could not be started, or in a fork child, which has no helper
    /// thread. Afterwards a thread may claim the right again.
    pub fn unclaim(&self) {
        self.is_started.store(false, Relaxed);
    }

    /// Returns whether the helper sleeps until there is memory to give back.
    #[inline]
    pub(super) fn is_parked(&self) -> bool {
        self.is_parked.load(Relaxed)
    }

    /// Wakes the helper if it sleeps until there is memory to give back. Neither allocates nor locks.
    #[inline]
    pub(super) fn unpark(&self) {
        if self.is_parked.load(Relaxed) && self.is_parked.swap(false, AcqRel) {
            self.wake();
        }
    }

    /// Wakes the helper, if there is one.
    pub fn wake(&self) {
        if self.is_started.load(Relaxed) {
            match self.account.place() {
                Some(place) => place.wake(),
                None => stats::wake(),
            }
        }
    }

    /// Answers the requests of other processes with numbers above `answered`. Returns the number of the latest request.
    fn answer_others(&self, answered: u32) -> u32 {
        let asked = stats::current().latest_request();
        if asked != answered
            && let Some(answers) = self.answers.get()
        {
            let first = answered.min(asked).max(asked.saturating_sub(MAX_ANSWERED_REQUESTS));
            (first..asked).for_each(|before| answers.answer(before + 1));
        }
        asked
    }

    /// The main loop of the helper thread. Runs as long as the process lives. After each wake-up it calls `prefault`,
    /// which makes requested memory resident and returns whether there was a request.
    pub fn run(&'static self, prefault: impl Fn() -> bool) -> ! {
        let account = self.account;
        // Other threads may use all CPU time, so this thread requests a higher priority. A program may rely on the
        // number of its next descriptor, so this thread uses a table of its own.
        stats::set(Counter::HelpersPreferred, u64::from(thread::prefer()));
        let mut can_set_alarms = thread::unshare_files();
        stats::set(Counter::Helpers, 1);
        let mut governor = Governor::new(SystemClock);
        let mut alarms = None;
        let (place, mut answered, mut next_step_ns) = (account.place(), 0, 0);
        if let Some(place) = &place {
            place.listen(true);
        }
        loop {
            // The word to sleep on is on the page of figures, which `publish` may have replaced since the last
            // iteration.
            let word: &AtomicU32 = place.as_ref().map_or_else(stats::wake_word, |place| place.wake_word());
            let seen = word.load(Acquire);
            answered = self.answer_others(answered);
            account.answer();
            // After a kernel event memory may be short, so the governor's step comes first.
            let is_warned = self.has_events();
            let was_requested = !is_warned && prefault();
            // A growing process wakes the helper often. A step of the governor takes about as long as making one block
            // resident, so it does not run at each wake-up.
            let now_ns = clock::fine_ns();
            if was_requested && now_ns < next_step_ns && !self.has_events() {
                futex::wait(word, seen, Some(Duration::from_nanos(next_step_ns - now_ns)), Scope::Shared);
                continue;
            }
            let next = governor.step(account, self.take_events(alarms.as_mut()), self.policy());
            if is_warned {
                prefault();
            }
            let pause = match next {
                NextStep::After(pause) => Some(pause),
                NextStep::WhenGiveable | NextStep::WhenAsked => None,
            };
            next_step_ns = now_ns + pause.unwrap_or(STEP_PAUSE).min(STEP_PAUSE).as_nanos() as u64;
            if pause.is_some() && can_set_alarms {
                can_set_alarms = self.update_alarms(&mut alarms);
            }
            if next == NextStep::WhenGiveable {
                self.is_parked.store(true, SeqCst);
                // Memory that was freed since the step above did not wake the helper, so check again.
                if account.giveable() >= WORTHWHILE_BYTES || account.may_have_more() {
                    self.is_parked.store(false, Relaxed);
                    continue;
                }
            }
            let due_ns = pause.map(|pause| clock::fine_ns().saturating_add((pause + LATE_AFTER).as_nanos() as u64));
            futex::wait(word, seen, pause, Scope::Shared);
            if due_ns.is_some_and(|due_ns| clock::fine_ns() > due_ns) {
                stats::add(Counter::HelperLate, 1);
            }
            self.is_parked.store(false, Relaxed);
        }
    }

    /// Returns whether kernel events have happened since the last step of the governor.
    pub fn has_events(&self) -> bool {
        self.signs.load(Relaxed) != 0
    }

    /// Reads and clears the kernel events that happened since the last step.
    fn take_events(&self, alarms: Option<&mut Alarms>) -> KernelEvents {
        let signs = self.signs.swap(0, AcqRel);
        let (signs, covered) = match alarms {
            Some(alarms) => (alarms.genuine_events(signs), alarms.covered),
            None => (signs, CoveredEvents::default()),
        };
        if signs != 0 {
            stats::add(Counter::Signs, 1);
            trace::event(Event::Sign, signs, self.account.headroom.latest_sample().bytes.max(0) as u64);
        }
        let has = |sign: Sign| signs & sign as u64 != 0;
        KernelEvents {
            group_stalls: has(Sign::GroupStall),
            machine_stalls: has(Sign::MachineStall),
            has_thresholds: covered.has_thresholds,
            is_woken: signs != 0,
        }
    }

    /// Sets alarms if the limits have changed. The first call starts the thread that waits for alarms. Returns whether
    /// this process can set alarms.
    fn update_alarms(&'static self, alarms: &mut Option<Alarms>) -> bool {
        let headroom = &self.account.headroom;
        if headroom.latest_sample().bound == Bound::None {
            return true;
        }
        if alarms.is_none() {
            let Ok(new) = Alarms::new() else { return false };
            self.alarms.store(new.descriptor(), Relaxed);
            if thread::spawn(c"pagemill-signs", self).is_err() {
                return false;
            }
            *alarms = Some(new);
        }
        if let Some(alarms) = alarms
            && let Some(plan) = headroom.plan(alarms.limits_version())
        {
            alarms.set_all(&plan);
        }
        true
    }
}

/// Returns the age of a policy in whole seconds, at least 1; 0 for [`Return::Keep`].
fn return_after_seconds(policy: Return) -> u64 {
    policy.age().map_or(0, |age| age.as_secs().max(1))
}

/// The second thread: waits for a kernel event, forwards it to the helper, and pauses.
impl thread::Work for Helper {
    fn work(&'static self) {
        // Other threads may use all CPU time, so this thread requests a higher priority, too.
        thread::prefer();
        while let Ok(signs) = events::wait(self.alarms.load(Relaxed)) {
            self.signs.fetch_or(signs, AcqRel);
            self.wake();
            std::thread::sleep(MIN_EVENT_PAUSE);
        }
    }
}
