//! Transfers: in-flight reads and writes with their memory, completion callback and cancellation.
//!
//! The code that creates a [`Transfer`] sets the completion callback. The store that gets the transfer ends it once
//! ([`Transfer::finish`]) or drops it, which ends it as cancelled, so no caller waits forever. Many transfers can share
//! one [`Finish`] and one [`Cancel`]; then starting a transfer allocates nothing.
#![allow(unsafe_code)] // accesses memory that the creator of a transfer keeps valid

use super::buffer::Buffer;
use super::errno::{self, ECANCELED};
use super::{Store, lock};
use pagemill_core::callback;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Direction of a transfer.
///
/// Example: [`Transfer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads from the store into memory.
    Read,
    /// Writes from memory to the store.
    Write,
}

/// Completion callbacks of transfers.
///
/// Example: [`Gather`].
pub trait Finish: Send + Sync {
    /// Reports that the transfer with this token has ended. From now on the transfer's creator owns its memory again.
    /// Called once for each transfer, on any thread.
    fn finish(&self, token: u64, result: io::Result<()>);

    /// Reports that the transfer exceeds its time limit and is being cancelled. Its memory stays in use until
    /// [`Finish::finish`] is called. A device that hangs may delay that call for long.
    fn late(&self, _token: u64) {}
}

/// Completion callback of one transfer that owns its memory.
type DoneCallback = Box<dyn FnOnce(io::Result<()>) + Send>;

/// The callback that reports the end of a transfer.
enum EndCallback {
    /// A callback that transfers share, which is called with this token.
    Shared(Arc<dyn Finish>, u64),
    /// A callback of this transfer only.
    Once(DoneCallback),
    /// The end was already reported, so there is no callback any more.
    Reported,
}

/// One read or write. It transfers all bytes or fails. After a failed read the content of its memory is undefined.
///
/// # Invariants
///
/// 1. Until the end is reported, the `len_bytes` from `addr` on can be read, and for [`Direction::Read`] written.
/// 2. Until then no other code writes to these bytes, and for [`Direction::Read`] no other code reads them.
///
/// ```
/// use pagemill::store::{Aligned, Cancel, Direction, MemoryStore, Transfer};
///
/// let store = MemoryStore::new(vec![7; 512], 512);
/// let (sender, results) = std::sync::mpsc::channel();
/// let done = move |result, memory: Aligned| sender.send((result, memory)).unwrap();
/// let cancel = Cancel::new(); // `cancel.cancel()` would end the transfer with ECANCELED
/// let transfer = Transfer::read(0, Aligned::new(512, 512), done).with_cancel(&cancel);
/// assert_eq!((transfer.direction(), transfer.is_cancelled()), (Direction::Read, false));
/// transfer.run(&store);
/// let (result, memory): (std::io::Result<()>, Aligned) = results.recv().unwrap();
/// assert!(result.is_ok() && memory[511] == 7);
/// ```
pub struct Transfer {
    direction: Direction,
    offset: u64,
    addr: NonNull<u8>,
    len_bytes: usize,
    cancel: Option<Cancel>,
    end: EndCallback,
}

// SAFETY: the owner of the value may use the memory on any thread (invariants); the other fields are Send.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Creates a transfer of memory that the caller keeps valid until `to` is called with `token`.
    ///
    /// # Safety
    ///
    /// The caller guarantees the type's invariants until [`Finish::finish`] is called.
    pub unsafe fn new(
        direction: Direction,
        offset: u64,
        addr: NonNull<u8>,
        len_bytes: usize,
        to: Arc<dyn Finish>,
        token: u64,
    ) -> Self {
        Self { direction, offset, addr, len_bytes, cancel: None, end: EndCallback::Shared(to, token) }
    }

    /// Creates a read into memory that the transfer owns. The end of the transfer calls `done` with the result and the
    /// memory. If `done` panics on a thread of this crate, the panic is caught and counted (`behind_panics`).
    pub fn read<B: Buffer + Send>(offset: u64, into: B, done: impl FnOnce(io::Result<()>, B) + Send + 'static) -> Self {
        // The closure owns the memory until the end is reported, and moving the closure does not move the bytes (the
        // trait's promise). Both invariants follow.
        let (addr, len_bytes) = (into.addr(), into.len_bytes());
        let end = EndCallback::Once(Box::new(move |result| done(result, into)));
        Self { direction: Direction::Read, offset, addr, len_bytes, cancel: None, end }
    }

    /// Creates a write of memory that the transfer owns. The end of the transfer calls `done` with the result and the
    /// memory.
    pub fn write<B: Buffer + Send>(
        offset: u64,
        from: B,
        done: impl FnOnce(io::Result<()>, B) + Send + 'static,
    ) -> Self {
        let mut transfer = Self::read(offset, from, done);
        transfer.direction = Direction::Write;
        transfer
    }

    /// Makes the transfer cancellable by `cancel`.
    #[must_use]
    pub fn with_cancel(mut self, cancel: &Cancel) -> Self {
        self.cancel = Some(cancel.clone());
        self
    }

    pub fn direction(&self) -> Direction {
        self.direction
    }

    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn cancel(&self) -> Option<&Cancel> {
        self.cancel.as_ref()
    }

    /// Returns whether the transfer was cancelled ([`Transfer::with_cancel`]).
    pub fn is_cancelled(&self) -> bool {
        self.cancel.as_ref().is_some_and(Cancel::is_cancelled)
    }

    /// Returns the bytes to write, or the bytes read so far.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is valid, and no other code changes it (invariants 1 and 2).
        unsafe { std::slice::from_raw_parts(self.addr.as_ptr(), self.len_bytes) }
    }

    /// Returns the memory to read into.
    ///
    /// # Panics
    ///
    /// If the transfer is a write, whose bytes must not change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert_eq!(self.direction, Direction::Read, "the bytes of a write are not to be changed");
        // SAFETY: the memory is valid, and no other code changes it (invariants 1 and 2).
        unsafe { std::slice::from_raw_parts_mut(self.addr.as_ptr(), self.len_bytes) }
    }

    /// Ends the transfer and reports `result` to its creator. If `result` is an error, some bytes may have been
    /// transferred.
    pub fn finish(mut self, result: io::Result<()>) {
        debug_assert!(!matches!(self.end, EndCallback::Reported), "the end is reported once");
        self.report_end(result);
    }

    /// Does the transfer with the store's blocking calls and ends it. A cancelled transfer ends with `ECANCELED`
    /// instead.
    pub fn run(self, store: &(impl Store + ?Sized)) {
        self.run_with(|offset, to| store.read(offset, to), |offset, from| store.write(offset, from));
    }

    /// As [`Transfer::run`], with the functions that read and write.
    pub(crate) fn run_with(
        mut self,
        read: impl FnOnce(u64, &mut [u8]) -> io::Result<()>,
        write: impl FnOnce(u64, &[u8]) -> io::Result<()>,
    ) {
        let result = match self.direction {
            _ if self.is_cancelled() => Err(errno::error(ECANCELED)),
            Direction::Read => read(self.offset, self.bytes_mut()),
            Direction::Write => write(self.offset, self.bytes()),
        };
        self.finish(result);
    }

    /// Reports that the transfer exceeds its time limit.
    pub fn tell_late(&self) {
        if let EndCallback::Shared(to, token) = &self.end {
            to.late(*token);
        }
    }

    /// Reports the end of the transfer with `result`, unless the end was reported before.
    fn report_end(&mut self, result: io::Result<()>) {
        match std::mem::replace(&mut self.end, EndCallback::Reported) {
            EndCallback::Shared(to, token) => to.finish(token, result),
            EndCallback::Once(done) => done(result),
            EndCallback::Reported => {}
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.report_end(Err(errno::error(ECANCELED)));
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { direction, offset, len_bytes, .. } = self;
        let mut text = f.debug_struct("Transfer");
        text.field("direction", direction).field("offset", offset).field("len_bytes", len_bytes);
        text.finish_non_exhaustive()
    }
}

// SAFETY: the end is not reported before the value is consumed or dropped. Until then invariants 1 and 2 hold.
unsafe impl Buffer for Transfer {
    fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// Cancels any number of transfers. Clones share one state.
///
/// A cancelled transfer still ends once: as cancelled, or with its normal result.
///
/// Example: [`Transfer`].
#[derive(Clone, Default)]
pub struct Cancel(Arc<CancelState>);

/// The state that the clones of a [`Cancel`] share.
#[derive(Default)]
struct CancelState {
    is_cancelled: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

impl Cancel {
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels all transfers with this object ([`Transfer::with_cancel`]): those in flight, and those that are started
    /// later. Does not wait until they end. A panic of a waker is caught and counted (`behind_panics`): the other
    /// wakers must be called, and drops of files and queues cancel their transfers.
    pub fn cancel(&self) {
        self.0.is_cancelled.store(true, SeqCst);
        let wakers = std::mem::take(&mut *lock(&self.0.wakers));
        wakers.into_iter().for_each(|waker| _ = callback::catch_panic(|| waker.wake()));
    }

    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(SeqCst)
    }

    /// Registers a waker. Wakes it on cancellation, or during this call if the transfers were cancelled before. The
    /// waker stays stored as long as this object or a clone exists, perhaps as long as a file, so callers should not
    /// register one per transfer.
    pub fn wake_when_cancelled(&self, waker: &Waker) {
        let mut wakers = lock(&self.0.wakers);
        if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
        drop(wakers);
        if self.is_cancelled() {
            waker.wake_by_ref();
        }
    }

    #[cfg(test)]
    pub fn wakers(&self) -> usize {
        lock(&self.0.wakers).len()
    }
}

impl std::fmt::Debug for Cancel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cancel").field("is_cancelled", &self.is_cancelled()).finish_non_exhaustive()
    }
}

/// Waits until several transfers have ended. Their tokens must be the numbers from 0 to the number of transfers - 1.
///
/// ```
/// use pagemill::store::{Finish, Gather};
/// use std::time::Duration;
///
/// let gather = Gather::new(2);
/// gather.finish(0, Ok(())); // called by a store, on any thread
/// gather.finish(1, Err(std::io::ErrorKind::TimedOut.into()));
/// let results = gather.wait(Duration::from_secs(60)).unwrap();
/// assert!(results[0].is_ok() && results[1].is_err());
/// ```
#[derive(Debug)]
pub struct Gather {
    results: Mutex<Vec<Option<io::Result<()>>>>,
    has_result: Condvar,
}

impl Gather {
    /// Creates an object that waits for `count` transfers.
    pub fn new(count: usize) -> Arc<Self> {
        let results = (0..count).map(|_| None).collect();
        Arc::new(Self { results: Mutex::new(results), has_result: Condvar::new() })
    }

    /// Returns the number of transfers that have not ended.
    pub fn missing(&self) -> usize {
        lock(&self.results).iter().filter(|result| result.is_none()).count()
    }

    /// Waits until all transfers have ended. Returns their results in the order of the tokens, or `None` after the
    /// timeout.
    pub fn wait(&self, timeout: Duration) -> Option<Vec<io::Result<()>>> {
        let end = Instant::now() + timeout;
        let mut results = lock(&self.results);
        while results.iter().any(Option::is_none) {
            let rest = end.checked_duration_since(Instant::now())?;
            results = self.has_result.wait_timeout(results, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(results.drain(..).flatten().collect())
    }
}

impl Finish for Gather {
    fn finish(&self, token: u64, result: io::Result<()>) {
        if let Some(place) = lock(&self.results).get_mut(token as usize) {
            debug_assert!(place.is_none(), "a transfer ends once");
            *place = Some(result);
        }
        self.has_result.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Aligned, MemoryStore};
    use std::sync::mpsc;

    /// A read, a write, a dropped transfer and a cancelled transfer must each report the end once and return the
    /// memory.
    #[test]
    fn every_transfer_reports_its_end_once() {
        let store = MemoryStore::new(vec![5; 100], 1);
        let (sender, results) = mpsc::channel();
        let done = || {
            let sender = sender.clone();
            move |result: io::Result<()>, memory: Aligned| {
                sender.send((result.map_err(|error| error.raw_os_error()), memory[0])).unwrap();
            }
        };
        let mut bytes = Aligned::new(10, 1);
        bytes.fill(9);
        store.start(vec![Transfer::read(20, Aligned::new(10, 1), done()), Transfer::write(20, bytes, done())]);
        drop(Transfer::read(0, Aligned::new(1, 1), done()));
        let cancel = Cancel::new();
        cancel.cancel();
        Transfer::read(0, Aligned::new(1, 1), done()).with_cancel(&cancel).run(&store);
        drop(sender);
        let ended: Vec<_> = results.iter().collect();
        assert_eq!(ended, [(Ok(()), 5), (Ok(()), 9), (Err(Some(ECANCELED)), 0), (Err(Some(ECANCELED)), 0)]);
    }

    /// A waker is registered twice. [`Cancel::cancel`] must wake it once. When the waker is registered again after the
    /// cancel, it must be woken at once.
    #[test]
    fn a_cancel_wakes_registered_wakers() {
        use std::sync::atomic::AtomicUsize;
        struct CountingWaker(AtomicUsize);
        impl std::task::Wake for CountingWaker {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, SeqCst);
            }
        }
        let count = Arc::new(CountingWaker(AtomicUsize::new(0)));
        let (waker, cancel) = (Waker::from(count.clone()), Cancel::new());
        cancel.wake_when_cancelled(&waker);
        cancel.wake_when_cancelled(&waker);
        assert_eq!(count.0.load(SeqCst), 0);
        cancel.clone().cancel();
        assert!(count.0.load(SeqCst) == 1 && cancel.is_cancelled());
        cancel.wake_when_cancelled(&waker);
        assert_eq!(count.0.load(SeqCst), 2);
    }

    /// The second of two transfers ends first. A wait must time out until the first transfer ends, too. The results
    /// must be in the order of the tokens.
    #[test]
    fn a_wait_ends_when_all_transfers_have_ended() {
        let gather = Gather::new(2);
        gather.finish(1, Err(errno::error(ECANCELED)));
        assert!(gather.missing() == 1 && gather.wait(Duration::ZERO).is_none());
        std::thread::scope(|scope| {
            scope.spawn(|| gather.finish(0, Ok(())));
            let results = gather.wait(Duration::from_secs(600)).unwrap();
            assert!(results[0].is_ok() && results[1].is_err());
        });
    }
}
