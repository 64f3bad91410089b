//! Rounds of the background thread, which defragments caches in steps and does work that another process requests.
//!
//! A thread of the program starts the background thread with the first cache of movable objects. A *round* visits each
//! cache, and a visit runs a step if a slab or block can be emptied. When a round finds nothing to do, the thread
//! sleeps until objects are freed or work is requested. If only a few objects were freed, the thread first waits for
//! further frees. So each free is followed by a round, but few frees cause at most one round per second. Between
//! visits the thread *rests*, so that its processor time is bounded.
//!
//! ```text
//!           first cache                   a round finds nothing
//!   none ---------------> runs rounds ------------------------> asleep
//!     ^                    |  ^  ^ ^  `-- timeout for readers --' | |
//!     |  `defrag_by_hand`  |  |  | `------------ notify ----------' |
//!     '--------------------'  |  `----- a second <---- few frees ---'
//!                             '-- during a fork: begins no visit
//! ```
//!
//! The thread runs callbacks of the program and destructors of removed values, for one cache at a time. It holds none
//! of its own locks meanwhile. The state of the thread, its wake-ups and rests: [`crate::defrag::worker`].

use crate::alloc::engine::Engine;
use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::defrag::steps;
use crate::defrag::worker::{
    MAX_RETRY_DELAY, MIN_REST_NS, MIN_RETRY_DELAY, RequestedWork, WorkRequest, Worker, set_worker,
};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Backoff, Relaxed};
use pagemill_core::trace::{self, Event};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::clock;
#[cfg(not(shuttle))]
use pagemill_sys::process;
#[cfg(not(shuttle))]
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// Approximate length of a step of defragmentation on the background thread.
const STEP_DURATION: Duration = Duration::from_millis(1);

/// Time after which the background thread runs another round if only a few objects were freed, or if free blocks still
/// keep their memory.
const RECHECK_DELAY: Duration = Duration::from_secs(1);

/// Time for which free blocks keep their memory for reuse. Then the memory is freed in portions of
/// `FREE_PORTION_BYTES`.
const FREE_BLOCK_DELAY_NS: u64 = if cfg!(shuttle) { 0 } else { 1_000_000_000 };
/// Number of bytes of free blocks that the background thread frees at a time.
const FREE_PORTION_BYTES: u64 = 16 * BLOCK_BYTES as u64;

/// Size of the background thread's stack. Callbacks may need as much stack as on a thread of the program.
#[cfg(not(shuttle))]
const STACK_BYTES: usize = 2048 << 10;

/// Result of the background thread's visit to a cache. The result of a round over all caches is the greatest result of
/// its visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VisitResult {
    Nothing,
    /// Free blocks keep their memory for a while, because caches may reuse it.
    FreeBlocks,
    /// The thread has work that must wait for readers, or for another thread that uses the cache.
    Waiting,
    /// A step of defragmentation was run.
    StepRun,
    /// Requested work was carried out. The thread does not rest for its processor time, because requests are urgent.
    Requested,
}

#[cfg(not(shuttle))]
thread_local! {
    static STOP_AT_EXIT: StopAtMainThreadExit = const { StopAtMainThreadExit(Cell::new(None)) };
}

/// Stops the background thread when the first thread of the process ends, because the process usually ends then.
/// Contains the `Slabs` in which the current thread has created caches. The destructor of this thread-local value runs
/// before the destructors of statics, which may destroy data that callbacks use.
#[cfg(not(shuttle))]
struct StopAtMainThreadExit(Cell<Option<&'static Slabs>>);

#[cfg(not(shuttle))]
impl Drop for StopAtMainThreadExit {
    fn drop(&mut self) {
        if let Some(slabs) = self.0.get()
            && process::is_first_thread()
        {
            slabs.defrag_by_hand();
        }
    }
}

impl Worker {
    /// Starts the background thread. Called with the first cache of movable objects, by a thread of the program,
    /// because callbacks need the open files of the program, which Pagemill's helper thread does not share. If the
    /// thread cannot be created, the next cache tries to create it again.
    pub fn start(&self, slabs: &'static Slabs) {
        if self.is_stopped() {
            return;
        }
        // Fails if this thread is ending.
        #[cfg(not(shuttle))]
        let _ = STOP_AT_EXIT.try_with(|made_by| made_by.0.set(Some(slabs)));
        if self.is_started.swap(1, SeqCst) == 0 && spawn(slabs).is_err() {
            self.is_started.store(0, SeqCst);
        }
    }

    /// Asks the background thread to do work on a cache, and waits for the result, however long callbacks take. Returns
    /// the bytes freed.
    ///
    /// # Errors
    ///
    /// As [`run_work`]. [`Error::Busy`] if the background thread does not run, another request for the cache
    /// is pending, or the cache is dropped before the work begins.
    #[cfg_attr(not(feature = "control"), allow(dead_code))]
    pub fn request(&self, engine: &Engine, work: RequestedWork) -> Result<u64> {
        let none = || Error::Busy { what: "the background thread does not accept a request for this slab cache" };
        let is_first = engine.work_request.with(|request| {
            let is_first = matches!(request, WorkRequest::None) && self.is_started.load(SeqCst) == 1;
            if is_first {
                *request = WorkRequest::Wanted(work);
            }
            is_first
        });
        if !is_first {
            return Err(none());
        }
        self.wake();
        let mut backoff = Backoff::new();
        loop {
            let is_over = self.is_stopped() || self.is_started.load(SeqCst) == 0 || engine.is_unregistered.load(SeqCst);
            let done = engine.work_request.with(|request| match std::mem::take(request) {
                WorkRequest::Done(freed) => Some(freed),
                WorkRequest::Wanted(_) if is_over => Some(Err(none())),
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

    /// The main loop of the background thread. Returns when the thread is stopped.
    fn run(&self, slabs: &'static Slabs) {
        let (mut pause, mut rest_due_ns) = (MIN_RETRY_DELAY, 0);
        loop {
            // Read before the flags, so that an event after this line ends the next wait.
            let seen = self.wakeups.count();
            if self.is_stopped() {
                break;
            }
            self.is_notified.store(0, SeqCst);
            self.has_frees.store(0, SeqCst);
            let found = self.run_round(slabs, &mut rest_due_ns);
            self.rest(std::mem::take(&mut rest_due_ns).max(MIN_REST_NS), seen);
            match found {
                VisitResult::StepRun | VisitResult::Requested => pause = MIN_RETRY_DELAY,
                VisitResult::Waiting => {
                    self.park(seen, Some(pause));
                    pause = (2 * pause).min(MAX_RETRY_DELAY);
                }
                VisitResult::FreeBlocks => self.park(seen, Some(RECHECK_DELAY)),
                VisitResult::Nothing => {
                    self.park(seen, None);
                    let seen = self.wakeups.count();
                    if self.has_frees.load(SeqCst) == 1 && !self.is_stopped() {
                        // More objects may be freed soon. If many are freed, the call of `notify` ends this sleep.
                        self.park(seen, Some(RECHECK_DELAY));
                    }
                }
            }
        }
        self.is_started.store(0, SeqCst);
    }

    /// Visits all caches, the newest first. If a cache is dropped during the round, only the positions of newer caches
    /// change, so no remaining cache is missed.
    pub fn run_round(&self, slabs: &'static Slabs, rest_due_ns: &mut u64) -> VisitResult {
        let mut found = VisitResult::Nothing;
        for at in (0..slabs.cache_count()).rev() {
            let (seen, before_ns) = (self.wakeups.count(), clock::own_cpu_ns());
            let done = self.visit(slabs, at);
            let owes = (!matches!(done, Some(Ok(VisitResult::Requested)))).then_some(&mut *rest_due_ns);
            self.note_cpu_time(before_ns, owes);
            if let Some(done) = done {
                stats::add(
                    Counter::SlabBehindSteps,
                    u64::from(matches!(done, Ok(VisitResult::StepRun | VisitResult::Requested))),
                );
                found = found.max(done.unwrap_or(VisitResult::Waiting));
            }
            if *rest_due_ns >= MIN_REST_NS {
                self.rest(std::mem::take(rest_due_ns), seen);
            }
        }
        found.max(self.free_unused_blocks(slabs, rest_due_ns))
    }

    /// Frees the memory of free blocks once no further block has become free for [`FREE_BLOCK_DELAY_NS`]. Until then
    /// caches may reuse the blocks with their memory.
    fn free_unused_blocks(&self, slabs: &'static Slabs, rest_due_ns: &mut u64) -> VisitResult {
        let Some(blocks) = slabs.shared.get().map(|shared| &shared.blocks) else { return VisitResult::Nothing };
        let freed_with_memory = blocks.freed_with_memory();
        if self.seen_freed_count.swap(freed_with_memory, Relaxed) != freed_with_memory {
            self.last_freed_ns.store(clock::fine_ns(), Relaxed);
        }
        if blocks.giveable_bytes() == 0 {
            return VisitResult::Nothing;
        }
        if clock::fine_ns() - self.last_freed_ns.load(Relaxed) < FREE_BLOCK_DELAY_NS {
            return VisitResult::FreeBlocks;
        }
        // In portions, because a fork or a stop may wait for the end of a portion.
        while blocks.freed_with_memory() == freed_with_memory && self.begin_visit() {
            let (seen, before_ns) = (self.wakeups.count(), clock::own_cpu_ns());
            let freed = blocks.shrink(FREE_PORTION_BYTES);
            self.end_visit();
            self.note_cpu_time(before_ns, Some(rest_due_ns));
            // No free block has memory left, or the kernel keeps the memory.
            if freed < FREE_PORTION_BYTES {
                break;
            }
            if *rest_due_ns >= MIN_REST_NS {
                self.rest(std::mem::take(rest_due_ns), seen);
            }
        }
        VisitResult::Nothing
    }

    /// Visits the cache at position `at` of the list of caches. If a callback panics, the background thread skips the cache until its used ratio
    /// is set or a shrink succeeds. Returns `None` if there is no cache or the thread was stopped.
    fn visit(&self, slabs: &Slabs, at: usize) -> Option<Result<VisitResult>> {
        if !self.begin_visit() {
            return None;
        }
        let done = slabs.cache_at(at).map(|cache| {
            let done = catch_unwind(AssertUnwindSafe(|| visit_cache(&*cache)));
            let done = done.unwrap_or_else(|panic| {
                // The panic's payload is leaked, because its destructor may panic, too.
                std::mem::forget(panic);
                let engine = cache.engine();
                engine.has_panicked.store(true, Relaxed);
                engine.work_request.with(|request| {
                    if matches!(request, WorkRequest::Taken) {
                        *request = WorkRequest::Done(Err(Error::system("a request, in code of the program")(
                            std::io::Error::from_raw_os_error(libc::ECANCELED),
                        )));
                    }
                });
                stats::add(Counter::SlabBehindFailed, 1);
                trace::event(Event::SlabBehindFailed, engine.cache_id as u64, stats::get(Counter::SlabLost));
                Err(Error::WrongState { what: "a callback of this slab cache panicked: its slab is out of use" })
            });
            // If this is the last reference, the drop runs destructors of the user, which may panic.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(cache))) {
                std::mem::forget(panic);
            }
            done
        });
        self.end_visit();
        done
    }
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

/// The background thread of [`Slabs`] runs with normal priority, because allocating threads may wait for locks that it
/// holds. The thread limits its own processor time instead.
impl pagemill_sys::thread::Work for Slabs {
    fn work(&'static self) {
        set_worker();
        self.worker.run(self);
    }
}

/// Does requested work on a cache. Returns the bytes freed, which are 0 for moves between NUMA nodes.
///
/// # Errors
///
/// As the cache's own `shrink`, `move_objects` and `balance`.
fn run_work(cache: &dyn Cache, work: RequestedWork) -> Result<u64> {
    match work {
        RequestedWork::Shrink => cache.shrink(),
        RequestedWork::Move { from, to } => cache.move_objects(from, to, u64::MAX).map(|_| 0),
        RequestedWork::Balance => cache.balance().map(|_| 0),
    }
}

/// The background thread's visit to a cache: does requested work, if there is some. Otherwise frees retired
/// objects whose readers have finished, and runs a step of defragmentation if a slab or block can be emptied.
fn visit_cache(cache: &dyn Cache) -> Result<VisitResult> {
    let engine = cache.engine();
    if engine.check_generation().is_ok()
        && let Some(work) = engine.work_request.with(WorkRequest::begin_if_wanted)
    {
        let freed = run_work(cache, work);
        engine.work_request.with(|request| *request = WorkRequest::Done(freed));
        return Ok(VisitResult::Requested);
    }
    let is_wanted = cache.kind() != SlabKind::Fixed && engine.used_ratio.load(Relaxed) > 0;
    if !is_wanted || engine.check_generation().is_err() {
        return Ok(VisitResult::Nothing);
    }
    engine.reset_freed_objects();
    if engine.has_panicked.load(Relaxed) {
        // Runs no callback, but frees the old memory of objects that were moved earlier.
        return Ok(if engine.finish_retired_in_background() { VisitResult::Waiting } else { VisitResult::Nothing });
    }
    let before = engine.resident_bytes();
    let is_waiting = cache.finish_retired();
    let is_step_worthwhile = steps::is_step_worthwhile(engine);
    if is_step_worthwhile {
        cache.defrag(STEP_DURATION)?;
    }
    // Frees as much memory of free blocks as the cache gave up during the visit.
    engine.shared.blocks.shrink(before.saturating_sub(engine.resident_bytes()));
    Ok(match (is_step_worthwhile, is_waiting || engine.has_batches()) {
        (true, _) => VisitResult::StepRun,
        (false, true) => VisitResult::Waiting,
        (false, false) => VisitResult::Nothing,
    })
}
