//! The thread behind: it defragments caches in steps, and shrinks one that somebody outside wants shrunk.
//!
//! It begins with the first cache whose objects can be moved, on a thread of the program. It looks at each cache, makes a step where
//! something can be emptied, and sleeps, for as long as nobody frees anything, when a round over all has found nothing.
//!
//! ```text
//!           a cache                       a round finds nothing
//!   none ---------------> at its rounds ----------------------> parked
//!     ^                    |  ^   ^   `--- readers: a while ---'  |
//!     |   by hand          |  |   `------------- ring ------------'
//!     '--------------------'  '-- a fork: nothing is begun
//! ```
//!
//! Callbacks of the program run on it, and destructors of values by handle that were removed: one cache at a time, under no lock
//! of its own. Who ends a cache, forks, or wants no more of it waits until it is out of what it is at, a second at most.

use super::engine::Engine;
use super::{Kind, Member, Slabs, defrag};
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::sync::{AtomicU32, AtomicU64, Patience, Relaxed, Signal};
use crate::trace::{self, Event};
use crate::units::BLOCK_BYTES;
use pagemill_sys::clock;
#[cfg(not(shuttle))]
use pagemill_sys::process;
#[cfg(not(shuttle))]
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A step ends after about so long.
const STEP: Duration = Duration::from_millis(1);

/// For each nanosecond of a processor it rests so many, so it takes a twentieth of one at most.
const REST_FACTOR: u64 = if cfg!(shuttle) { 0 } else { 19 };

/// Rests are taken when so much has come together, and so much at least lies between two rounds.
const REST_NS: u64 = if cfg!(shuttle) { 0 } else { 20_000_000 };

/// It rests no longer at a time, however long a callback took: memory may become short meanwhile.
const MOST_REST_NS: u64 = 1_000_000_000;

/// Where readers are waited for, or another who is at a cache, it looks again after so long; each time after twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(4);

/// Where something was freed that was not worth a sign it looks once more after so long.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// Free blocks that are in no cache wait so long for one to need them, and go so many bytes at a time.
const UNUSED_NS: u64 = if cfg!(shuttle) { 0 } else { 1_000_000_000 };
const GIVEN_AT_ONCE: u64 = 16 * BLOCK_BYTES as u64;

/// Who waits until it is out of a cache waits so long; a fork, which may hold what a callback waits for, less.
const PATIENCE_NS: u64 = if cfg!(test) { 100_000_000_000 } else { 1_000_000_000 };
const FORK_PATIENCE_NS: u64 = 20_000_000;

/// Its callbacks may use as much of the stack as on a thread of the program.
#[cfg(not(shuttle))]
const STACK_BYTES: usize = 2048 << 10;

/// How it sleeps, but for rests.
const AWAKE: u32 = 0;
const DOZING: u32 = 1;
const ASLEEP: u32 = 2;

/// What somebody outside of the process wants of a cache.
#[derive(Debug, Default)]
pub(super) enum Order {
    #[default]
    None,
    Wanted,
    /// It is being shrunk.
    Taken,
    Done(Result<u64>),
}

impl Order {
    /// Begins what is wanted; says whether something is.
    fn take(&mut self) -> bool {
        let is_wanted = matches!(self, Self::Wanted);
        if is_wanted {
            *self = Self::Taken;
        }
        is_wanted
    }
}

/// What a look at a cache, or at all of them, has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Found {
    Nothing,
    /// Something was freed since the last look.
    Changes,
    /// Readers, or somebody else who is at it, have to go first.
    Waiting,
    /// A step was made.
    Work,
    /// An order was carried out: whoever gave it wanted that now, so nobody rests for it.
    Order,
}

/// The thread, as others see it. Flags are 0 or 1.
#[derive(Default)]
pub(super) struct Worker {
    is_started: AtomicU32,
    /// A look is worth it since something was freed.
    is_rung: AtomicU32,
    /// Whether it sleeps until that is so, or for a while at most.
    parked: AtomicU32,
    /// It is at a cache, or about to see that it must not be.
    is_inside: AtomicU32,
    is_by_hand: AtomicU32,
    /// Forks under way.
    holds: AtomicU32,
    /// It sleeps on this.
    bell: Signal,
    /// Nanoseconds of a processor that it took, and such that it rested for them.
    worked_ns: AtomicU64,
    rested_ns: AtomicU64,
    /// Blocks that had become free by the last round, and when it saw that.
    gives_seen: AtomicU32,
    given_ns: AtomicU64,
}

#[cfg(not(shuttle))]
thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
    static MADE_BY: MadeBy = const { MadeBy(Cell::new(None)) };
}

/// Whose caches a thread has made. With the first thread the process ends, mostly: what callbacks use may go from there on, by
/// destructors of statics and the like, of which this comes before all.
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

    /// Something was freed, or is wanted: the thread looks, where there is one. Can be called anywhere: takes no lock, and no memory.
    pub fn ring(&self) {
        if self.is_rung.swap(1, SeqCst) == 1 {
            return;
        }
        // Either this is seen by who is about to park, or it is seen here that he has.
        if self.parked.swap(AWAKE, SeqCst) != AWAKE {
            self.bell.raise();
        }
    }

    /// As [`Worker::ring`], for what cannot wait: shortens its rest, too.
    pub fn wake(&self) {
        self.is_rung.store(1, SeqCst);
        self.bell.raise();
    }

    /// There is a cache with movable objects. By a thread of the program, whose open files callbacks expect: the helper has none of
    /// them. Where no thread can be had, the next cache tries again.
    pub fn start(&self, slabs: &'static Slabs) {
        if self.is_by_hand() {
            return;
        }
        // A thread that is ending makes caches, too.
        #[cfg(not(shuttle))]
        let _ = MADE_BY.try_with(|made_by| made_by.0.set(Some(slabs)));
        if self.is_started.swap(1, SeqCst) == 0 && spawn(slabs).is_err() {
            self.is_started.store(0, SeqCst);
        }
    }

    /// Has a cache shrunk by the thread, and waits for that, however long callbacks take.
    ///
    /// # Errors
    ///
    /// As the cache's own `shrink`; [`Error::Busy`] where there is no such thread, somebody else waits for the same, or the cache is
    /// dropped before its turn.
    pub fn order_shrink(&self, engine: &Engine) -> Result<u64> {
        let none = || Error::Busy { what: "no thread of this process defragments its slab caches from outside" };
        let is_first = engine.order.with(|order| {
            let is_first = matches!(order, Order::None) && self.is_started.load(SeqCst) == 1;
            if is_first {
                *order = Order::Wanted;
            }
            is_first
        });
        if !is_first {
            return Err(none());
        }
        self.wake();
        let mut patience = Patience::new();
        loop {
            let is_over = self.is_by_hand() || self.is_started.load(SeqCst) == 0 || engine.is_withdrawn.load(SeqCst);
            let done = engine.order.with(|order| match std::mem::take(order) {
                Order::Done(freed) => Some(freed),
                Order::Wanted if is_over => Some(Err(none())),
                other => {
                    *order = other;
                    None
                }
            });
            match done {
                Some(freed) => return freed,
                None => patience.pause(),
            }
        }
    }

    /// From here on no step begins; returns when none is under way, or after a second.
    pub fn stop(&self) {
        self.is_by_hand.store(1, SeqCst);
        self.bell.raise();
        self.wait_outside(PATIENCE_NS);
    }

    fn wait_outside(&self, patience_ns: u64) {
        let mut patience = Patience::new();
        while self.is_inside.load(SeqCst) == 1 && !is_worker() && patience.waited_ns() < patience_ns {
            patience.pause();
        }
    }

    /// Nothing is begun until [`Worker::release_after_fork`]. A child would have the epoch of a thread that it has not, so a fork
    /// waits for what is under way; not for long, for a callback may wait for who forks.
    pub fn acquire_for_fork(&self) {
        self.holds.fetch_add(1, SeqCst);
        self.wait_outside(FORK_PATIENCE_NS);
    }

    pub fn release_after_fork(&self) {
        self.holds.fetch_sub(1, SeqCst);
        self.bell.raise();
    }

    /// In a fork child, which has no such thread until a cache of its own wants one.
    pub fn begin_child(&self) {
        for flag in [&self.is_started, &self.is_rung, &self.parked, &self.is_inside] {
            flag.store(0, SeqCst);
        }
    }

    /// Begins something; says whether it may be done.
    fn enter(&self) -> bool {
        loop {
            let seen = self.bell.count();
            self.is_inside.store(1, SeqCst);
            if self.is_by_hand() {
                self.leave();
                return false;
            }
            if self.holds.load(SeqCst) == 0 {
                return true;
            }
            self.leave();
            self.bell.wait(seen, Some(FIRST_PAUSE));
        }
    }

    fn leave(&self) {
        self.is_inside.store(0, SeqCst);
    }

    /// The thread's work, until the program does it itself.
    fn run(&self, slabs: &'static Slabs) {
        let (mut pause, mut owed_ns) = (FIRST_PAUSE, 0);
        loop {
            // Before the look at what it says: what is said between both is not slept through.
            let seen = self.bell.count();
            if self.is_by_hand() {
                break;
            }
            self.is_rung.store(0, SeqCst);
            let found = self.round(slabs, &mut owed_ns);
            self.rest(std::mem::take(&mut owed_ns).max(REST_NS), seen);
            match found {
                Found::Work | Found::Order => pause = FIRST_PAUSE,
                Found::Waiting => {
                    self.park(seen, Some(pause));
                    pause = (2 * pause).min(LAST_PAUSE);
                }
                Found::Changes => self.park(seen, Some(SECOND_LOOK)),
                Found::Nothing => self.park(seen, None),
            }
        }
        self.is_started.store(0, SeqCst);
    }

    /// Sleeps until somebody rings.
    fn park(&self, seen: u32, timeout: Option<Duration>) {
        self.parked.store(if timeout.is_some() { DOZING } else { ASLEEP }, SeqCst);
        if self.is_rung.load(SeqCst) == 0 {
            self.bell.wait(seen, timeout);
        }
        self.parked.store(AWAKE, SeqCst);
    }

    /// Rests so long, unless no more is wanted; no longer than between two rounds where somebody wakes it.
    fn rest(&self, mut ns: u64, seen: u32) {
        let (began_ns, mut last) = (clock::fine_ns(), seen);
        let mut rested_ns = 0;
        while rested_ns < ns && !self.is_by_hand() {
            self.bell.wait(last, Some(Duration::from_nanos(ns - rested_ns)));
            last = self.bell.count();
            ns = if last == seen { ns } else { ns.min(REST_NS) };
            rested_ns = clock::fine_ns() - began_ns;
        }
        self.rested_ns.fetch_add(rested_ns, Relaxed);
    }

    /// Looks at each cache, the newest first: one that goes meanwhile changes the places of newer ones only.
    pub fn round(&self, slabs: &'static Slabs, owed_ns: &mut u64) -> Found {
        let mut found = Found::Nothing;
        for at in (0..slabs.member_count()).rev() {
            let (seen, before_ns) = (self.bell.count(), clock::own_cpu_ns());
            let done = self.visit(|| slabs.member_at(at), tend);
            let owes = (!matches!(done, Some(Ok(Found::Order)))).then_some(&mut *owed_ns);
            self.note_work(before_ns, owes);
            if let Some(done) = done {
                stats::add(Counter::SlabBehindSteps, u64::from(matches!(done, Ok(Found::Work | Found::Order))));
                found = found.max(done.unwrap_or(Found::Waiting));
            }
            if *owed_ns >= REST_NS {
                self.rest(std::mem::take(owed_ns), seen);
            }
        }
        found.max(self.give_free(slabs, owed_ns))
    }

    /// What is free, and in no cache, goes to the system when nothing has come to it for a while: until then it may be needed again.
    fn give_free(&self, slabs: &'static Slabs, owed_ns: &mut u64) -> Found {
        let Some(blocks) = slabs.ground.get().map(|ground| &ground.blocks) else { return Found::Nothing };
        let gives = blocks.gives();
        if self.gives_seen.swap(gives, Relaxed) != gives {
            self.given_ns.store(clock::fine_ns(), Relaxed);
        }
        if blocks.giveable_bytes() == 0 {
            return Found::Nothing;
        }
        if clock::fine_ns() - self.given_ns.load(Relaxed) < UNUSED_NS {
            return Found::Changes;
        }
        // Some at a time, since a fork waits meanwhile, or who wants nothing done behind.
        while blocks.gives() == gives && self.enter() {
            let (seen, before_ns) = (self.bell.count(), clock::own_cpu_ns());
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
        Found::Nothing
    }

    fn note_work(&self, before_ns: u64, owed_ns: Option<&mut u64>) {
        let took_ns = clock::own_cpu_ns() - before_ns;
        if let Some(owed_ns) = owed_ns {
            *owed_ns = owed_after(*owed_ns, took_ns);
        }
        stats::add(Counter::SlabBehindNs, took_ns);
        self.worked_ns.fetch_add(took_ns, Relaxed);
    }

    /// Lets `act` have a cache. One whose callbacks panic is left alone from then on, until somebody says that they are mended:
    /// sets its ratio, or has it shrunk.
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
                // It may have a destructor, which may panic.
                std::mem::forget(panic);
                let engine = member.engine();
                engine.has_failed.store(true, Relaxed);
                engine.order.with(|order| {
                    if matches!(order, Order::Taken) {
                        *order = Order::Done(Err(Error::system("shrinking, in code of the program")(cancelled())));
                    }
                });
                stats::add(Counter::SlabBehindFailed, 1);
                trace::event(Event::SlabBehindFailed, engine.number as u64, stats::get(Counter::SlabLost));
                Err(Error::WrongState { what: "a callback of this slab cache panicked: its slab is out of use" })
            });
            // Who is the last to have it ends what its user put into it.
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

/// Under shuttle all threads are one.
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

/// Allocating threads wait for locks that this one holds for moments, so it goes as they do, and takes little of a processor.
impl pagemill_sys::thread::Work for Slabs {
    fn work(&'static self) {
        #[cfg(not(shuttle))]
        IS_WORKER.set(true);
        self.worker.run(self);
    }
}

/// What it is to rest for when a look at a cache took so long, with what it was to before.
pub(super) fn owed_after(owed_ns: u64, took_ns: u64) -> u64 {
    owed_ns.saturating_add(took_ns.saturating_mul(REST_FACTOR)).min(MOST_REST_NS)
}

/// What an order ends with where the program's own code panicked.
fn cancelled() -> std::io::Error {
    const ECANCELED: i32 = 125;
    std::io::Error::from_raw_os_error(ECANCELED)
}

/// What is done for a cache: an order from outside; what waited for readers is taken back, and a step is made where something can be emptied.
fn tend(member: &dyn Member) -> Result<Found> {
    let engine = member.engine();
    if engine.check().is_ok() && engine.order.with(Order::take) {
        let freed = member.shrink();
        engine.order.with(|order| *order = Order::Done(freed));
        return Ok(Found::Order);
    }
    let is_wanted = member.kind() != Kind::Fixed && engine.used_ratio.load(Relaxed) > 0;
    if !is_wanted || engine.check().is_err() {
        return Ok(Found::Nothing);
    }
    if engine.has_failed.load(Relaxed) {
        // No callback, but what it had moved before.
        return Ok(if engine.settle_behind() { Found::Waiting } else { Found::Nothing });
    }
    let before = engine.resident_bytes();
    let has_given = engine.take_given();
    let is_waiting = member.settle();
    let is_worth_it = defrag::is_worth_it(engine);
    if is_worth_it {
        member.defrag(STEP)?;
    }
    // What was emptied goes to the system, as far as the cache does not need it again.
    engine.ground.blocks.shrink(before.saturating_sub(engine.resident_bytes()));
    Ok(match (is_worth_it, is_waiting || engine.has_batches(), has_given) {
        (true, ..) => Found::Work,
        (_, true, _) => Found::Waiting,
        (.., true) => Found::Changes,
        _ => Found::Nothing,
    })
}

/// Ends a cache's being known, and waits for who is at it (the thread behind, the governor, another who goes over all caches), a
/// second at most: what the cache's user put into it ends with the cache then, on the thread that ends that.
pub(super) fn withdraw<M: Member + 'static>(member: &Arc<M>) {
    let engine = member.engine();
    if engine.check().is_err() {
        return;
    }
    let is_it = |other: &Weak<dyn Member>| std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(member));
    engine.ground.slabs.members.with(|members| members.retain(|(_, other)| !is_it(other)));
    // No round finds it from here on: who waits for an order that none has begun does so in vain.
    engine.is_withdrawn.store(true, SeqCst);
    let mut patience = Patience::new();
    while Arc::strong_count(member) > 1 && !is_worker() && patience.waited_ns() < PATIENCE_NS {
        patience.pause();
    }
}

#[cfg(test)]
impl Worker {
    pub fn is_started(&self) -> bool {
        self.is_started.load(SeqCst) == 1
    }

    /// It sleeps until somebody rings, after a look that found nothing.
    #[cfg(not(shuttle))]
    pub fn is_asleep(&self) -> bool {
        self.parked.load(SeqCst) == ASLEEP && self.is_rung.load(SeqCst) == 0
    }

    /// How often it was waked.
    #[cfg(not(shuttle))]
    pub fn wakes(&self) -> u32 {
        self.bell.count()
    }

    #[cfg(not(shuttle))]
    pub fn worked_ns(&self) -> u64 {
        self.worked_ns.load(Relaxed)
    }

    #[cfg(not(shuttle))]
    pub fn rested_ns(&self) -> u64 {
        self.rested_ns.load(Relaxed)
    }

    /// As if nothing had been said yet.
    #[cfg(shuttle)]
    pub fn reset(&self) {
        self.begin_child();
        self.is_by_hand.store(0, SeqCst);
    }
}
