//! A store for tests that injects faults at set rates. The faults are random but repeatable.
//!
//! Locks: that of the state, for a few instructions; never around calls of the wrapped store.

use super::errno::{self, ECANCELED, EIO, ETIMEDOUT};
use super::{Direction, Store, Transfer, lock};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

/// A call that is blocked by [`FaultyStore::hold`] for this long fails.
const MAX_HOLD: Duration = Duration::from_secs(60);

/// Faults to inject, as rates per 1000 calls. A call is one read, write, change of size or sync.
///
/// Example: [`FaultyStore`].
#[derive(Clone, Debug)]
pub struct Faults {
    /// The same seed and the same order of calls give the same faults.
    pub seed: u64,
    /// Rate of calls that fail without any effect.
    pub fail_per_mille: u32,
    /// Rate of reads and writes that are interrupted halfway, at a block boundary. Half of these calls then transfer
    /// the remaining bytes. The others fail.
    pub short_per_mille: u32,
    /// Rate of calls that take up to `longest_delay` longer. A delayed transfer of a batch may end after later ones.
    pub delay_per_mille: u32,
    pub longest_delay: Duration,
    /// Whether the transfers of a batch are done in random order.
    pub is_reordered: bool,
    /// After this many calls, counted from [`FaultyStore::set_faults`], every call fails.
    pub fails_after: Option<u64>,
    /// Error number of all injected failures.
    pub errno: i32,
}

impl Default for Faults {
    /// Returns settings that inject no faults.
    fn default() -> Self {
        Self {
            seed: 0,
            fail_per_mille: 0,
            short_per_mille: 0,
            delay_per_mille: 0,
            longest_delay: Duration::from_millis(2),
            is_reordered: false,
            fails_after: None,
            errno: EIO,
        }
    }
}

/// Number of calls of a [`FaultyStore`] so far, by kind and by injected fault.
///
/// Example: [`FaultyStore`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub reads: u64,
    pub writes: u64,
    pub set_sizes: u64,
    pub syncs: u64,
    /// Number of failed calls. The counts by kind of call include these calls.
    pub failed: u64,
    /// Number of reads and writes that were interrupted halfway.
    pub shortened: u64,
    /// Number of calls that were delayed.
    pub delayed: u64,
}

impl Calls {
    /// Returns the number of all calls.
    pub fn count(&self) -> u64 {
        self.reads + self.writes + self.set_sizes + self.syncs
    }
}

/// A store that injects [`Faults`]. Clones share one store: a test passes one clone to a cache and sets the faults
/// through another.
///
/// ```
/// use pagemill_store::{Faults, FaultyStore, MemoryStore, Store};
///
/// let store = FaultyStore::new(MemoryStore::new(vec![0; 512], 512));
/// store.set_faults(Faults { fails_after: Some(1), ..Faults::default() });
/// assert!(store.sync().is_ok() && store.sync().is_err());
/// assert_eq!((store.calls().syncs, store.calls().failed), (2, 1));
/// ```
pub struct FaultyStore<S>(Arc<SharedState<S>>);

impl<S> Clone for FaultyStore<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// The state that all clones of a [`FaultyStore`] share.
struct SharedState<S> {
    inner: S,
    state: Mutex<FaultyState>,
    /// Signalled when blocked calls may continue or check for a cancel.
    changed: Condvar,
}

/// The state that the lock of a [`FaultyStore`] protects.
#[derive(Default)]
struct FaultyState {
    faults: Faults,
    /// State of the random number generator.
    random: u64,
    /// Number of calls that may still succeed before every call fails; `None`: no such limit.
    calls_left: Option<u64>,
    /// Whether [`FaultyStore::hold`] blocks calls.
    is_held: bool,
    /// Number of calls that are inside of [`SharedState::begin`].
    paused_calls: usize,
    calls: Calls,
}

/// The faults drawn for one call.
#[derive(Clone, Copy)]
struct CallFaults {
    fails: bool,
    /// Whether the call is interrupted halfway.
    is_short: bool,
    /// Whether the call transfers the remaining bytes after the interruption, and succeeds.
    is_repaired: bool,
    delay: Option<Duration>,
    errno: i32,
}

impl FaultyState {
    /// Returns the next pseudo-random number (splitmix64).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// Returns true with a probability of `per_mille` / 1000.
    fn is_drawn(&mut self, per_mille: u32) -> bool {
        self.random() % 1000 < u64::from(per_mille)
    }

    /// Counts a call with `count`, and draws its faults.
    fn draw_faults(&mut self, count: impl FnOnce(&mut Calls)) -> CallFaults {
        count(&mut self.calls);
        let Faults { fail_per_mille, short_per_mille, delay_per_mille, longest_delay, errno, .. } = self.faults;
        let is_used_up = self.calls_left.is_some_and(|left| left == 0);
        self.calls_left = self.calls_left.map(|left| left.saturating_sub(1));
        let fails = self.is_drawn(fail_per_mille) || is_used_up;
        let is_short = self.is_drawn(short_per_mille);
        let is_repaired = self.is_drawn(500);
        let is_delayed = self.is_drawn(delay_per_mille);
        let delay_ns = self.random() % (longest_delay.as_nanos() as u64).max(1);
        let delay = is_delayed.then(|| Duration::from_nanos(delay_ns));
        self.calls.failed += u64::from(fails);
        self.calls.delayed += u64::from(is_delayed);
        CallFaults { fails, is_short, is_repaired, delay, errno }
    }
}

impl<S> SharedState<S> {
    fn state(&self) -> MutexGuard<'_, FaultyState> {
        lock(&self.state)
    }

    /// Sleeps for the call's delay. Then blocks while calls are held, until the call is cancelled or a minute has
    /// passed. Returns the injected error if the call fails.
    fn begin(&self, faults: CallFaults, is_cancelled: impl Fn() -> bool) -> io::Result<()> {
        if let Some(delay) = faults.delay {
            std::thread::sleep(delay);
        }
        let (end, mut state) = (Instant::now() + MAX_HOLD, self.state());
        state.paused_calls += 1;
        let mut result = Ok(());
        while state.is_held && !is_cancelled() {
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                result = Err(errno::error(ETIMEDOUT));
                break;
            }
            state = self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.paused_calls -= 1;
        if is_cancelled() {
            result = Err(errno::error(ECANCELED));
        } else if faults.fails {
            result = result.and(Err(errno::error(faults.errno)));
        }
        result
    }
}

impl<S: Store> SharedState<S> {
    /// Counts an interrupted transfer. Returns how many bytes the transfer completes before the interruption: half of
    /// `len_bytes`, in whole blocks.
    fn bytes_before_interruption(&self, len_bytes: usize) -> usize {
        self.state().calls.shortened += 1;
        let half = len_bytes / 2;
        half - half % self.inner.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8], faults: CallFaults) -> io::Result<()> {
        if !faults.is_short {
            return self.inner.read(offset, to);
        }
        let (first, rest) = to.split_at_mut(self.bytes_before_interruption(to.len()));
        self.inner.read(offset, first)?;
        if faults.is_repaired {
            return self.inner.read(offset + first.len() as u64, rest);
        }
        // A caller that uses the bytes in spite of the error gets this pattern, so that a test notices it.
        rest.fill(0xEE);
        self.fail(faults)
    }

    fn write(&self, offset: u64, from: &[u8], faults: CallFaults) -> io::Result<()> {
        if !faults.is_short {
            return self.inner.write(offset, from);
        }
        let (first, rest) = from.split_at(self.bytes_before_interruption(from.len()));
        self.inner.write(offset, first)?;
        if faults.is_repaired { self.inner.write(offset + first.len() as u64, rest) } else { self.fail(faults) }
    }

    /// Counts an injected failure, and returns its error.
    fn fail(&self, faults: CallFaults) -> io::Result<()> {
        self.state().calls.failed += 1;
        Err(errno::error(faults.errno))
    }

    /// Runs a transfer with these faults, and ends it.
    fn run_transfer(&self, mut transfer: Transfer, faults: CallFaults) {
        let begun = self.begin(faults, || transfer.is_cancelled());
        let offset = transfer.offset();
        let result = begun.and_then(|()| match transfer.direction() {
            Direction::Read => self.read(offset, transfer.bytes_mut(), faults),
            Direction::Write => self.write(offset, transfer.bytes(), faults),
        });
        transfer.finish(result);
    }
}

impl<S: Store + 'static> FaultyStore<S> {
    /// Wraps a store. Injects no faults until [`FaultyStore::set_faults`].
    pub fn new(inner: S) -> Self {
        Self(Arc::new(SharedState { inner, state: Mutex::default(), changed: Condvar::new() }))
    }

    /// Returns the wrapped store.
    pub fn inner(&self) -> &S {
        &self.0.inner
    }

    /// Injects these faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        let mut state = self.0.state();
        (state.random, state.calls_left) = (faults.seed, faults.fails_after);
        state.faults = faults;
    }

    /// Makes calls block until [`FaultyStore::release`]. A call that has blocked for a minute fails with `ETIMEDOUT`.
    pub fn hold(&self) {
        self.0.state().is_held = true;
    }

    /// Ends the effect of [`FaultyStore::hold`]: the blocked calls continue.
    pub fn release(&self) {
        self.0.state().is_held = false;
        self.0.changed.notify_all();
    }

    /// Returns the number of calls that [`FaultyStore::hold`] blocks now.
    pub fn held(&self) -> usize {
        let state = self.0.state();
        if state.is_held { state.paused_calls } else { 0 }
    }

    /// Returns how often each call was made so far.
    pub fn calls(&self) -> Calls {
        self.0.state().calls
    }

    /// Counts a call, draws its faults, and runs `act` with these faults.
    fn call<T>(
        &self,
        count: impl FnOnce(&mut Calls),
        act: impl FnOnce(&SharedState<S>, CallFaults) -> io::Result<T>,
    ) -> io::Result<T> {
        let faults = self.0.state().draw_faults(count);
        self.0.begin(faults, || false)?;
        act(&self.0, faults)
    }
}

impl<S: Store + 'static> Store for FaultyStore<S> {
    fn size_bytes(&self) -> io::Result<u64> {
        self.0.inner.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.0.inner.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.call(|calls| calls.reads += 1, |shared, faults| shared.read(offset, to, faults))
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.call(|calls| calls.writes += 1, |shared, faults| shared.write(offset, from, faults))
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.call(|calls| calls.set_sizes += 1, |shared, _| shared.inner.set_size(size_bytes))
    }

    fn sync(&self) -> io::Result<()> {
        self.call(|calls| calls.syncs += 1, |shared, _| shared.inner.sync())
    }

    /// Injects no faults.
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.0.inner.discard(offset, len_bytes)
    }

    fn is_writable(&self) -> bool {
        self.0.inner.is_writable()
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    /// Runs delayed transfers on a new thread, and all transfers while calls are held. Runs the other transfers at once
    /// on the calling thread.
    fn start(&self, mut batch: Vec<Transfer>) {
        let is_reordered = self.0.state().faults.is_reordered;
        for last in (1..batch.len()).rev().filter(|_| is_reordered) {
            let other = self.0.state().random() % (last as u64 + 1);
            batch.swap(last, other as usize);
        }
        let waker = Waker::from(self.0.clone());
        let mut for_thread = Vec::new();
        for transfer in batch {
            let faults = self.0.state().draw_faults(|calls| match transfer.direction() {
                Direction::Read => calls.reads += 1,
                Direction::Write => calls.writes += 1,
            });
            if faults.delay.is_none() && !self.0.state().is_held {
                self.0.run_transfer(transfer, faults);
                continue;
            }
            if let Some(cancel) = transfer.cancel() {
                cancel.wake_when_cancelled(&waker);
            }
            for_thread.push((transfer, faults));
        }
        if !for_thread.is_empty() {
            let shared = self.0.clone();
            std::thread::spawn(move || {
                for_thread.into_iter().for_each(|(transfer, faults)| shared.run_transfer(transfer, faults))
            });
        }
    }
}

/// Wakes the blocked calls, so that each checks whether it was cancelled.
impl<S: Send + Sync> Wake for SharedState<S> {
    fn wake(self: Arc<Self>) {
        // A call that has checked for a cancel but does not wait yet holds the lock. Taking the lock once makes sure
        // that the call waits before it is notified, so that no wake-up is lost.
        drop(self.state());
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Aligned, Cancel, MemoryStore};
    use std::sync::mpsc;

    const LONG_TIMEOUT: Duration = Duration::from_secs(600);

    fn store() -> FaultyStore<MemoryStore> {
        FaultyStore::new(MemoryStore::new((0..64).collect(), 4))
    }

    /// 100 reads fail at random. The same seed must make the same reads fail, and another seed other reads.
    #[test]
    fn faults_are_repeatable() {
        let run = |seed| {
            let store = store();
            store.set_faults(Faults { seed, fail_per_mille: 300, short_per_mille: 300, ..Faults::default() });
            (0..100).map(|_| store.read(0, &mut [0; 16]).is_ok()).collect::<Vec<_>>()
        };
        assert!(run(1) == run(1) && run(1) != run(2));
        assert!(run(1).contains(&true) && run(1).contains(&false));
    }

    /// Every write of 24 bytes is interrupted halfway. It must either report success and transfer all bytes, or report
    /// an error and transfer 12.
    #[test]
    fn short_writes_are_reported_or_repaired() {
        let store = store();
        store.set_faults(Faults { seed: 7, short_per_mille: 1000, ..Faults::default() });
        for round in 100..120 {
            let is_whole = store.write(0, &[round; 24]).is_ok();
            let bytes = store.inner().bytes();
            let written = bytes[..24].iter().filter(|byte| **byte == round).count();
            assert_eq!(written, if is_whole { 24 } else { 12 });
        }
        let calls = store.calls();
        assert!(calls.writes == 20 && calls.shortened == 20 && (1..20).contains(&calls.failed), "{calls:?}");
    }

    /// With `fails_after` 3 the first three calls must succeed and all later ones fail, until other faults are set.
    #[test]
    fn all_calls_fail_after_a_number_of_calls() {
        let store = store();
        store.set_faults(Faults { fails_after: Some(3), errno: errno::ENOSPC, ..Faults::default() });
        store.write(0, &[1]).unwrap();
        store.set_size(10).unwrap();
        store.sync().unwrap();
        assert_eq!(store.sync().unwrap_err().raw_os_error(), Some(errno::ENOSPC));
        assert!(store.set_size(5).is_err() && store.size_bytes().unwrap() == 10);
        store.set_faults(Faults::default());
        store.sync().unwrap();
    }

    /// A batch of 16 reads is reordered. Each read must end once with the right bytes, and the order must change.
    #[test]
    fn batches_are_reordered_and_delayed() {
        let store = store();
        store.set_faults(Faults { seed: 3, is_reordered: true, delay_per_mille: 300, ..Faults::default() });
        let (sender, ended) = mpsc::channel();
        let batch = (0..16u8).map(|at| {
            let sender = sender.clone();
            let done =
                move |result: io::Result<()>, memory: Aligned| sender.send((at, result.is_ok(), memory[0])).unwrap();
            Transfer::read(u64::from(at) * 4, Aligned::new(4, 4), done)
        });
        store.start(batch.collect());
        drop(sender);
        let ended: Vec<_> = ended.iter().collect();
        assert!(ended.len() == 16 && !ended.is_sorted());
        assert!(ended.iter().all(|(at, is_ok, byte)| *is_ok && *byte == at * 4));
    }

    /// [`FaultyStore::hold`] blocks a read and a started transfer. The transfer must end when it is cancelled. The read
    /// must end after [`FaultyStore::release`].
    #[test]
    fn held_calls_block_until_release_or_cancel() {
        let store = store();
        store.hold();
        let (cancel, gather) = (Cancel::new(), crate::Gather::new(1));
        let to = gather.clone();
        let done = move |result, _| crate::Finish::finish(&*to, 0, result);
        store.start(vec![Transfer::read(0, Aligned::new(4, 4), done).with_cancel(&cancel)]);
        std::thread::scope(|scope| {
            let read = scope.spawn(|| store.read(0, &mut [0; 4]));
            while store.held() < 2 {
                std::thread::yield_now();
            }
            assert_eq!(gather.missing(), 1);
            cancel.cancel();
            let results = gather.wait(LONG_TIMEOUT).unwrap();
            assert_eq!(results[0].as_ref().unwrap_err().raw_os_error(), Some(ECANCELED));
            store.release();
            read.join().unwrap().unwrap();
        });
    }
}
