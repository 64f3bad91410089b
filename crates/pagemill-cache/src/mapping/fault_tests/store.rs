//! A store in memory whose transfers end as a test sets.

use pagemill_store::errno::{self, ECANCELED, EIO};
use pagemill_store::{Direction, MemoryStore, Store, Transfer};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// How a transfer or a blocking call ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It succeeds.
    Done,
    /// It fails with `EIO`, and transfers nothing.
    Failed,
    /// It transfers the first half of its bytes, then fails with `EIO`.
    Short,
    /// The store drops the transfer. A blocking call fails with `ECANCELED`.
    Cancelled,
    /// The store panics, on the thread that called it or on its own.
    Panicked,
}

/// What the store does with a transfer or a blocking call.
#[derive(Clone, Copy)]
enum Plan {
    /// Ends it at once, during the call.
    End(End),
    /// Keeps a transfer until [`ScriptedStore::release`]. A blocking call waits until then. A read gets its bytes at
    /// once, so they may be outdated when it ends.
    Keep,
    /// As `Keep`, but also `start` waits until then.
    Block,
}

struct State {
    plan: Plan,
    /// Number of calls that succeed before the plan is followed.
    first_calls: usize,
    /// How `set_size` and `sync` end.
    sync_end: End,
    set_size_end: End,
    kept: Vec<Transfer>,
    /// Number of calls that wait for the release.
    waiting: usize,
    /// How the calls end that waited at the last release, and the number of releases.
    released: (End, usize),
}

/// A [`MemoryStore`] whose reads and writes end as a test sets. It ignores that a transfer was cancelled.
pub struct ScriptedStore {
    pub inner: MemoryStore,
    is_asynchronous: bool,
    state: Mutex<State>,
    changed: Condvar,
}

impl ScriptedStore {
    pub fn new(bytes: Vec<u8>, block_bytes: usize, is_asynchronous: bool) -> Self {
        let plan = Plan::End(End::Done);
        let (sync_end, set_size_end, released) = (End::Done, End::Done, (End::Done, 0));
        let state = State { plan, first_calls: 0, sync_end, set_size_end, kept: Vec::new(), waiting: 0, released };
        let inner = MemoryStore::new(bytes, block_bytes);
        Self { inner, is_asynchronous, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_plan(&self, first_calls: usize, plan: Plan) {
        let mut state = self.state();
        (state.first_calls, state.plan) = (first_calls, plan);
    }

    /// Makes all later calls end with `end`, after `first_calls` successes.
    pub fn end_calls(&self, first_calls: usize, end: End) {
        self.set_plan(first_calls, Plan::End(end));
    }

    /// Makes all later calls of `set_size` and of `sync` end with these ends.
    pub fn end_other_calls(&self, set_size_end: End, sync_end: End) {
        let mut state = self.state();
        (state.set_size_end, state.sync_end) = (set_size_end, sync_end);
    }

    /// Keeps the transfers that start from now on. With `blocks_starts`, also [`Store::start`] waits for the release.
    pub fn keep(&self, blocks_starts: bool) {
        self.set_plan(0, if blocks_starts { Plan::Block } else { Plan::Keep });
    }

    /// Returns the number of transfers and calls that wait for the release.
    pub fn kept(&self) -> usize {
        let state = self.state();
        state.kept.len() + state.waiting
    }

    /// Registers a waker with each kept transfer, to be woken when the transfer is cancelled.
    pub fn wake_when_cancelled(&self, waker: &Waker) {
        let state = self.state();
        state.kept.iter().filter_map(Transfer::cancel).for_each(|cancel| cancel.wake_when_cancelled(waker));
    }

    /// Lets later calls succeed. Those that wait for the release still wait.
    pub fn succeed(&self) {
        self.set_plan(0, Plan::End(End::Done));
        self.end_other_calls(End::Done, End::Done);
    }

    /// Ends the kept transfers and waiting calls with `end`, each kept transfer on the calling thread, as a thread of
    /// the store would. Later calls succeed.
    pub fn release(&self, end: End) {
        self.succeed();
        let kept = {
            let mut state = self.state();
            state.released = (end, state.released.1 + 1);
            std::mem::take(&mut state.kept)
        };
        self.changed.notify_all();
        for transfer in kept {
            // A thread of the store would catch its panics, too.
            let _ = catch_unwind(AssertUnwindSafe(|| self.end_kept(transfer, end)));
        }
    }

    /// Returns the plan for the next call.
    fn next_plan(&self) -> Plan {
        let mut state = self.state();
        if state.first_calls > 0 {
            state.first_calls -= 1;
            return Plan::End(End::Done);
        }
        state.plan
    }

    /// Blocks until the release. Returns how the call ends.
    fn wait_for_release(&self) -> End {
        let mut state = self.state();
        let seen = state.released.1;
        state.waiting += 1;
        while state.released.1 == seen {
            let (now, waited) =
                self.changed.wait_timeout(state, super::WAIT_LIMIT).unwrap_or_else(PoisonError::into_inner);
            assert!(!waited.timed_out(), "the test does not release the calls");
            state = now;
        }
        state.waiting -= 1;
        state.released.0
    }

    fn keep_transfer(&self, mut transfer: Transfer) {
        if transfer.direction() == Direction::Read {
            let offset = transfer.offset();
            self.inner.read(offset, transfer.bytes_mut()).expect("a store in memory");
        }
        self.state().kept.push(transfer);
    }

    /// Ends a kept transfer, whose bytes were read before.
    fn end_kept(&self, transfer: Transfer, end: End) {
        match (end, transfer.direction()) {
            (End::Done, Direction::Read) => transfer.finish(Ok(())),
            _ => self.end(transfer, end),
        }
    }

    fn end(&self, mut transfer: Transfer, end: End) {
        let offset = transfer.offset();
        let result = match (end, transfer.direction()) {
            (End::Cancelled, _) => return drop(transfer),
            (_, Direction::Read) => self.read_as(end, offset, transfer.bytes_mut()),
            (_, Direction::Write) => self.write_as(end, offset, transfer.bytes()),
        };
        transfer.finish(result);
    }

    fn read_as(&self, end: End, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let half = to.len() / 2;
        match end {
            End::Done => self.inner.read(offset, to),
            End::Short => self.inner.read(offset, &mut to[..half]).and(Err(errno::error(EIO))),
            _ => Self::result_without_effect(end),
        }
    }

    fn write_as(&self, end: End, offset: u64, from: &[u8]) -> io::Result<()> {
        match end {
            End::Done => self.inner.write(offset, from),
            End::Short => self.inner.write(offset, &from[..from.len() / 2]).and(Err(errno::error(EIO))),
            _ => Self::result_without_effect(end),
        }
    }

    fn result_without_effect(end: End) -> io::Result<()> {
        match end {
            End::Panicked => panic!("the test asked for a panic of the store"),
            End::Cancelled => Err(errno::error(ECANCELED)),
            _ => Err(errno::error(EIO)),
        }
    }
}

impl Store for ScriptedStore {
    fn size_bytes(&self) -> io::Result<u64> {
        self.inner.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        match self.next_plan() {
            Plan::End(end) => self.read_as(end, offset, to),
            Plan::Keep | Plan::Block => {
                self.inner.read(offset, to)?;
                let end = self.wait_for_release();
                if end == End::Done { Ok(()) } else { self.read_as(end, offset, to) }
            }
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let end = match self.next_plan() {
            Plan::End(end) => end,
            Plan::Keep | Plan::Block => self.wait_for_release(),
        };
        self.write_as(end, offset, from)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        let end = self.state().set_size_end;
        if end == End::Done { self.inner.set_size(size_bytes) } else { Self::result_without_effect(end) }
    }

    fn sync(&self) -> io::Result<()> {
        let end = self.state().sync_end;
        if end == End::Done { self.inner.sync() } else { Self::result_without_effect(end) }
    }

    fn is_asynchronous(&self) -> bool {
        self.is_asynchronous
    }

    fn start(&self, batch: Vec<Transfer>) {
        for transfer in batch {
            if !self.is_asynchronous {
                transfer.run(self);
                continue;
            }
            match self.next_plan() {
                Plan::End(end) => self.end(transfer, end),
                Plan::Keep => self.keep_transfer(transfer),
                Plan::Block => self.end(transfer, self.wait_for_release()),
            }
        }
    }
}
