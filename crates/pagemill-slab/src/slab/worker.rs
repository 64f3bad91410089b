//! The background thread: defragments caches in steps, and carries out shrinks that another process requests.
//!
//! A thread of the program starts it with the first cache of movable objects. It visits each cache, and runs a
//! step if something can be emptied. When a round over all caches finds nothing, it sleeps until something is freed.
//!
//! ```text
//!           a cache                       a round finds nothing
//!   none ---------------> at its rounds ----------------------> parked
//!     ^                    |  ^   ^   `--- readers: timeout ---'  |
//!     |   by hand          |  |   `------------- ring ------------'
//!     '--------------------'  '-- a fork: nothing is begun
//! ```
//!
//! It runs callbacks of the program and destructors of removed values by handle: for one cache at a time, without holding
//! a lock of its own. A thread that drops a cache, forks, or stops the background waits until the current visit ends, at
//! most one second.

use super::engine::Engine;
use super::{CacheKind, Member, Slabs, defrag};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, AtomicU64, Backoff, EventCount, Relaxed};
use pagemill_core::trace::{self, Event};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::clock;
#[cfg(not(shuttle))]
use pagemill_sys::process;
#[cfg(not(shuttle))]
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Approximate length of a step.
const STEP: Duration = Duration::from_millis(1);

/// Nanoseconds of rest for each nanosecond of processor time: it uses at most a twentieth of one processor.
const REST_FACTOR: u64 = if cfg!(shuttle) { 0 } else { 19 };

/// Rests are taken once this much has accumulated; also the minimum rest between two rounds.
const REST_NS: u64 = if cfg!(shuttle) { 0 } else { 20_000_000 };

/// Maximum length of one rest, however long a callback took: memory may become short meanwhile.
const MOST_REST_NS: u64 = 1_000_000_000;

/// While readers, or another thread that uses a cache, have to be waited for: the time until the next round, doubled each
/// time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(4);

/// After frees that were too few to wake it: the time until one more round.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// Free blocks of no cache are kept this long for reuse, then freed in portions of `GIVEN_AT_ONCE`.
const UNUSED_NS: u64 = if cfg!(shuttle) { 0 } else { 1_000_000_000 };
const GIVEN_AT_ONCE: u64 = 16 * BLOCK_BYTES as u64;

/// How long other threads wait until it has left a cache. A fork waits less, because it may hold what a callback waits
/// for.
const TIMEOUT_NS: u64 = if cfg!(test) { 100_000_000_000 } else { 1_000_000_000 };
const FORK_TIMEOUT_NS: u64 = 20_000_000;

/// Size of the stack: callbacks may need as much as on a thread of the program.
#[cfg(not(shuttle))]
const STACK_BYTES: usize = 2048 << 10;

/// States of `parked`: awake (or resting), asleep with a timeout, asleep without.
const AWAKE: u32 = 0;
const DOZING: u32 = 1;
const ASLEEP: u32 = 2;

/// A shrink that another process requests.
#[derive(Debug, Default)]
pub(super) enum ShrinkRequest {
    #[default]
    None,
    Wanted,
    /// The shrink is in progress.
    Taken,
    Done(Result<u64>),
}

impl ShrinkRequest {
    /// Begins the requested shrink; returns whether there is one.
    fn take(&mut self) -> bool {
        let is_wanted = matches!(self, Self::Wanted);
        if is_wanted {
            *self = Self::Taken;
        }
        is_wanted
    }
}

/// Result of a visit to a cache, or of a round over all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum VisitResult {
    Nothing,
    /// Objects were freed since the last visit.
    Changes,
    /// Readers, or another thread that uses the cache, have to finish first.
    Waiting,
    /// A step was run.
    Work,
    /// A command was carried out. It is urgent, so its time is not charged as rest.
    ShrinkRequest,
}

/// State of the background thread. Flags are 0 or 1.
#[derive(Default)]
pub(super) struct Worker {
    is_started: AtomicU32,
    /// A round is due, because something was freed.
    is_notified: AtomicU32,
    /// `AWAKE`, `DOZING` or `ASLEEP`.
    parked: AtomicU32,
    /// The thread is visiting a cache, or about to check whether it may.
    is_inside: AtomicU32,
    is_by_hand: AtomicU32,
    /// Forks in progress.
    holds: AtomicU32,
    /// The event that it sleeps on.
    wakeups: EventCount,
    /// `worked_ns`: processor time that it used. `rested_ns`: time that it rested for that.
    worked_ns: AtomicU64,
    rested_ns: AtomicU64,
    /// `gives_seen`: the count of freed blocks as of the last round. `given_ns`: the time of its last change.
    gives_seen: AtomicU32,
    given_ns: AtomicU64,
}

#[cfg(not(shuttle))]
thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
    static MADE_BY: MadeBy = const { MadeBy(Cell::new(None)) };
}

/// The `Slabs` in which a thread has created caches. When the first thread ends, the process usually ends, too. Later
/// destructors of statics and the like may destroy what callbacks use, so this destructor, which runs before them, stops
/// the background.
#[cfg(not(shuttle))]
struct MadeBy(Cell<Option<&'static Slabs>>);

#[cfg(not(shuttle))]
impl Drop for MadeBy {
    fn drop(&mut self) {
        if let Some(slabs) = self.0.get()
            && process::is_first_thread()
        {
            slabs.defrag_by_hand();
        }
    }
}

impl Worker {
    pub fn is_by_hand(&self) -> bool {
        self.is_by_hand.load(SeqCst) == 1
    }

    /// Something was freed or requested: wakes the thread, if it sleeps. Takes no lock and no memory, so it can be called
    /// anywhere.
    pub fn notify(&self) {
        if self.is_notified.swap(1, SeqCst) == 1 {
            return;
        }
        // Either the parking thread sees the flag, or this sees that it has parked.
        if self.parked.swap(AWAKE, SeqCst) != AWAKE {
            self.wakeups.raise();
        }
    }

    /// As [`Worker::notify`], for urgent work: also shortens the thread's rest.
    pub fn wake(&self) {
        self.is_notified.store(1, SeqCst);
        self.wakeups.raise();
    }

    /// Starts the thread, for the first cache with movable objects. Called on a thread of the program, because callbacks
    /// expect its open files, which the helper thread does not have. If no thread can be created, the next cache tries
    /// again.
    pub fn start(&self, slabs: &'static Slabs) {
        if self.is_by_hand() {
            return;
        }
        // Fails on a thread that is ending.
        #[cfg(not(shuttle))]
        let _ = MADE_BY.try_with(|made_by| made_by.0.set(Some(slabs)));
        if self.is_started.swap(1, SeqCst) == 0 && spawn(slabs).is_err() {
            self.is_started.store(0, SeqCst);
        }
    }

    /// Has the thread shrink a cache, and waits for the result, however long callbacks take.
    ///
    /// # Errors
    ///
    /// As the cache's own `shrink`; [`Error::Busy`] if there is no such thread, another request for the cache is pending,
    /// or the cache is dropped before its turn.
    pub fn request_shrink(&self, engine: &Engine) -> Result<u64> {
        let none = || Error::Busy { what: "no thread of this process defragments its slab caches from outside" };
        let is_first = engine.request.with(|request| {
            let is_first = matches!(request, ShrinkRequest::None) && self.is_started.load(SeqCst) == 1;
            if is_first {
                *request = ShrinkRequest::Wanted;
            }
            is_first
        });
        if !is_first {
            return Err(none());
        }
        self.wake();
        let mut backoff = Backoff::new();
        loop {
            let is_over = self.is_by_hand() || self.is_started.load(SeqCst) == 0 || engine.is_withdrawn.load(SeqCst);
            let done = engine.request.with(|request| match std::mem::take(request) {
                ShrinkRequest::Done(freed) => Some(freed),
                ShrinkRequest::Wanted if is_over => Some(Err(none())),
                other => {
                    *request = other;
                    None
                }
            });
            match done {
                Some(freed) => return freed,
                None => backoff.pause(),
            }
        }
    }

    /// Stops the thread: no further step begins. Returns when none is in progress, or after a second.
    pub fn stop(&self) {
        self.is_by_hand.store(1, SeqCst);
        self.wakeups.raise();
        self.wait_outside(TIMEOUT_NS);
    }

    fn wait_outside(&self, timeout_ns: u64) {
        let mut backoff = Backoff::new();
        while self.is_inside.load(SeqCst) == 1 && !is_worker() && backoff.waited_ns() < timeout_ns {
            backoff.pause();
        }
    }

    /// Holds the thread off until [`Worker::release_after_fork`]. A child would inherit the pinned epoch of a thread that
    /// it does not have, so a fork waits for the visit in progress. The wait is short, because a callback may wait for
    /// the forking thread.
    pub fn acquire_for_fork(&self) {
        self.holds.fetch_add(1, SeqCst);
        self.wait_outside(FORK_TIMEOUT_NS);
    }

    pub fn release_after_fork(&self) {
        self.holds.fetch_sub(1, SeqCst);
        self.wakeups.raise();
    }

    /// In a fork child: no background thread exists until a cache of the child starts one.
    pub fn begin_child(&self) {
        for flag in [&self.is_started, &self.is_notified, &self.parked, &self.is_inside] {
            flag.store(0, SeqCst);
        }
    }

    /// Begins a visit; returns false if the background was stopped.
    fn enter(&self) -> bool {
        loop {
            let seen = self.wakeups.count();
            self.is_inside.store(1, SeqCst);
            if self.is_by_hand() {
                self.leave();
                return false;
            }
            if self.holds.load(SeqCst) == 0 {
                return true;
            }
            self.leave();
            self.wakeups.wait(seen, Some(FIRST_PAUSE));
        }
    }

    fn leave(&self) {
        self.is_inside.store(0, SeqCst);
    }

    /// The thread's main loop, until the background is stopped.
    fn run(&self, slabs: &'static Slabs) {
        let (mut pause, mut owed_ns) = (FIRST_PAUSE, 0);
        loop {
            // Read before the flags, so that an event between the two ends the next wait.
            let seen = self.wakeups.count();
            if self.is_by_hand() {
                break;
            }
            self.is_notified.store(0, SeqCst);
            let found = self.round(slabs, &mut owed_ns);
            self.rest(std::mem::take(&mut owed_ns).max(REST_NS), seen);
            match found {
                VisitResult::Work | VisitResult::ShrinkRequest => pause = FIRST_PAUSE,
                VisitResult::Waiting => {
                    self.park(seen, Some(pause));
                    pause = (2 * pause).min(LAST_PAUSE);
                }
                VisitResult::Changes => self.park(seen, Some(SECOND_LOOK)),
                VisitResult::Nothing => self.park(seen, None),
            }
        }
        self.is_started.store(0, SeqCst);
    }

    /// Sleeps until it is woken.
    fn park(&self, seen: u32, timeout: Option<Duration>) {
        self.parked.store(if timeout.is_some() { DOZING } else { ASLEEP }, SeqCst);
        if self.is_notified.load(SeqCst) == 0 {
            self.wakeups.wait(seen, timeout);
        }
        self.parked.store(AWAKE, SeqCst);
    }

    /// Rests for `ns`, or until stopped. If it is woken meanwhile, the rest is limited to that between two rounds.
    fn rest(&self, mut ns: u64, seen: u32) {
        let (began_ns, mut last) = (clock::fine_ns(), seen);
        let mut rested_ns = 0;
        while rested_ns < ns && !self.is_by_hand() {
            self.wakeups.wait(last, Some(Duration::from_nanos(ns - rested_ns)));
            last = self.wakeups.count();
            ns = if last == seen { ns } else { ns.min(REST_NS) };
            rested_ns = clock::fine_ns() - began_ns;
        }
        self.rested_ns.fetch_add(rested_ns, Relaxed);
    }

    /// Visits each cache, the newest first: a cache that is removed meanwhile changes only the positions of newer ones.
    pub fn round(&self, slabs: &'static Slabs, owed_ns: &mut u64) -> VisitResult {
        let mut found = VisitResult::Nothing;
        for at in (0..slabs.member_count()).rev() {
            let (seen, before_ns) = (self.wakeups.count(), clock::own_cpu_ns());
            let done = self.visit(|| slabs.member_at(at), tend);
            let owes = (!matches!(done, Some(Ok(VisitResult::ShrinkRequest)))).then_some(&mut *owed_ns);
            self.note_work(before_ns, owes);
            if let Some(done) = done {
                stats::add(
                    Counter::SlabBehindSteps,
                    u64::from(matches!(done, Ok(VisitResult::Work | VisitResult::ShrinkRequest))),
                );
                found = found.max(done.unwrap_or(VisitResult::Waiting));
            }
            if *owed_ns >= REST_NS {
                self.rest(std::mem::take(owed_ns), seen);
            }
        }
        found.max(self.give_free(slabs, owed_ns))
    }

    /// Frees blocks that are in no cache, once no further block was freed for a while: until then they may be reused.
    fn give_free(&self, slabs: &'static Slabs, owed_ns: &mut u64) -> VisitResult {
        let Some(blocks) = slabs.shared.get().map(|shared| &shared.blocks) else { return VisitResult::Nothing };
        let gives = blocks.gives();
        if self.gives_seen.swap(gives, Relaxed) != gives {
            self.given_ns.store(clock::fine_ns(), Relaxed);
        }
        if blocks.giveable_bytes() == 0 {
            return VisitResult::Nothing;
        }
        if clock::fine_ns() - self.given_ns.load(Relaxed) < UNUSED_NS {
            return VisitResult::Changes;
        }
        // In portions, because a fork or a stop waits meanwhile.
        while blocks.gives() == gives && self.enter() {
            let (seen, before_ns) = (self.wakeups.count(), clock::own_cpu_ns());
            let freed = blocks.shrink(GIVEN_AT_ONCE);
            self.leave();
            self.note_work(before_ns, Some(owed_ns));
            // Nothing is left, or the kernel keeps it.
            if freed < GIVEN_AT_ONCE {
                break;
            }
            if *owed_ns >= REST_NS {
                self.rest(std::mem::take(owed_ns), seen);
            }
        }
        VisitResult::Nothing
    }

    fn note_work(&self, before_ns: u64, owed_ns: Option<&mut u64>) {
        let took_ns = clock::own_cpu_ns() - before_ns;
        if let Some(owed_ns) = owed_ns {
            *owed_ns = owed_after(*owed_ns, took_ns);
        }
        stats::add(Counter::SlabBehindNs, took_ns);
        self.worked_ns.fetch_add(took_ns, Relaxed);
    }

    /// Runs `act` on a cache. If it panics, the background gives the cache up until its ratio is set or a shrink
    /// succeeds.
    fn visit<T>(
        &self,
        find: impl FnOnce() -> Option<Arc<dyn Member>>,
        act: impl FnOnce(&dyn Member) -> Result<T>,
    ) -> Option<Result<T>> {
        if !self.enter() {
            return None;
        }
        let done = find().map(|member| {
            let done = catch_unwind(AssertUnwindSafe(|| act(&*member)));
            let done = done.unwrap_or_else(|panic| {
                // The payload may have a destructor, which may panic.
                std::mem::forget(panic);
                let engine = member.engine();
                engine.has_failed.store(true, Relaxed);
                engine.request.with(|request| {
                    if matches!(request, ShrinkRequest::Taken) {
                        *request =
                            ShrinkRequest::Done(Err(Error::system("shrinking, in code of the program")(cancelled())));
                    }
                });
                stats::add(Counter::SlabBehindFailed, 1);
                trace::event(Event::SlabBehindFailed, engine.number as u64, stats::get(Counter::SlabLost));
                Err(Error::WrongState { what: "a callback of this slab cache panicked: its slab is out of use" })
            });
            // The last reference also drops what the user put into the cache.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(member))) {
                std::mem::forget(panic);
            }
            done
        });
        self.leave();
        done
    }
}

#[cfg(not(shuttle))]
fn is_worker() -> bool {
    IS_WORKER.get()
}

/// Under shuttle all tasks share one thread.
#[cfg(shuttle)]
fn is_worker() -> bool {
    false
}

#[cfg(not(shuttle))]
fn spawn(slabs: &'static Slabs) -> std::io::Result<()> {
    pagemill_sys::thread::spawn_with_stack(c"pagemill-slabs", STACK_BYTES, slabs)
}

#[cfg(shuttle)]
fn spawn(slabs: &'static Slabs) -> std::io::Result<()> {
    shuttle::thread::spawn(move || slabs.worker.run(slabs));
    Ok(())
}

/// Allocating threads wait for locks that this thread holds briefly, so it runs with their priority and limits its
/// processor time instead.
impl pagemill_sys::thread::Work for Slabs {
    fn work(&'static self) {
        #[cfg(not(shuttle))]
        IS_WORKER.set(true);
        self.worker.run(self);
    }
}

/// The rest that is owed after a visit: previous debt plus that for `took_ns`.
pub(super) fn owed_after(owed_ns: u64, took_ns: u64) -> u64 {
    owed_ns.saturating_add(took_ns.saturating_mul(REST_FACTOR)).min(MOST_REST_NS)
}

/// The result of a command if code of the program panicked.
fn cancelled() -> std::io::Error {
    const ECANCELED: i32 = 125;
    std::io::Error::from_raw_os_error(ECANCELED)
}

/// A visit: carries out a command. Else frees what waited for readers, and runs a step if something can be emptied.
fn tend(member: &dyn Member) -> Result<VisitResult> {
    let engine = member.engine();
    if engine.check().is_ok() && engine.request.with(ShrinkRequest::take) {
        let freed = member.shrink();
        engine.request.with(|request| *request = ShrinkRequest::Done(freed));
        return Ok(VisitResult::ShrinkRequest);
    }
    let is_wanted = member.kind() != CacheKind::Fixed && engine.used_ratio.load(Relaxed) > 0;
    if !is_wanted || engine.check().is_err() {
        return Ok(VisitResult::Nothing);
    }
    if engine.has_failed.load(Relaxed) {
        // Runs no callback, but finishes what was moved before.
        return Ok(if engine.finish_retired_behind() { VisitResult::Waiting } else { VisitResult::Nothing });
    }
    let before = engine.resident_bytes();
    let has_given = engine.take_given();
    let is_waiting = member.finish_retired();
    let is_worth_it = defrag::is_worth_it(engine);
    if is_worth_it {
        member.defrag(STEP)?;
    }
    // Memory that the cache gave up goes to the system, less what it took again meanwhile.
    engine.shared.blocks.shrink(before.saturating_sub(engine.resident_bytes()));
    Ok(match (is_worth_it, is_waiting || engine.has_batches(), has_given) {
        (true, ..) => VisitResult::Work,
        (_, true, _) => VisitResult::Waiting,
        (.., true) => VisitResult::Changes,
        _ => VisitResult::Nothing,
    })
}

/// Unregisters a cache and waits for other users (the background thread, the governor, other threads that visit all
/// caches), at most one second. So the user's part of the cache is dropped on the thread that drops the cache.
pub(super) fn withdraw<M: Member + 'static>(member: &Arc<M>) {
    let engine = member.engine();
    if engine.check().is_err() {
        return;
    }
    let is_it = |other: &Weak<dyn Member>| std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(member));
    engine.shared.slabs.members.with(|members| members.retain(|(_, other)| !is_it(other)));
    // From here on no round finds it: a command that has not begun fails.
    engine.is_withdrawn.store(true, SeqCst);
    let mut backoff = Backoff::new();
    while Arc::strong_count(member) > 1 && !is_worker() && backoff.waited_ns() < TIMEOUT_NS {
        backoff.pause();
    }
}

#[cfg(any(test, feature = "test-util"))]
#[cfg_attr(not(test), allow(dead_code))] // tests of this crate use all of it
impl Worker {
    pub fn is_started(&self) -> bool {
        self.is_started.load(SeqCst) == 1
    }

    /// It sleeps without a timeout, after a round that found nothing.
    #[cfg(not(shuttle))]
    pub fn is_asleep(&self) -> bool {
        self.parked.load(SeqCst) == ASLEEP && self.is_notified.load(SeqCst) == 0
    }

    /// How often it was woken.
    #[cfg(not(shuttle))]
    pub fn wakes(&self) -> u32 {
        self.wakeups.count()
    }

    #[cfg(not(shuttle))]
    pub fn worked_ns(&self) -> u64 {
        self.worked_ns.load(Relaxed)
    }

    #[cfg(not(shuttle))]
    pub fn rested_ns(&self) -> u64 {
        self.rested_ns.load(Relaxed)
    }

    /// Resets the state, as if it had never been woken or stopped.
    #[cfg(shuttle)]
    pub fn reset(&self) {
        self.begin_child();
        self.is_by_hand.store(0, SeqCst);
    }
}
