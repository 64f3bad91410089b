//! In-flight reads: requests that are reading pages of stored files. At most one request reads a page at a time.
//!
//! A thread that enters a folio of a stored file into the index first registers a request for its pages. It registers
//! the request before it checks the index, and before it reads the store. So concurrent reads of a page are merged into
//! one, and no page is loaded, changed, written back and evicted while another thread holds older bytes of the store.
//!
//! | [`Kind`] | completed by | a later request for the same pages |
//! |---|---|---|
//! | `Uncancellable` | the registering thread, or the store's thread | waits |
//! | `Cancellable` | a later call of a queue's owner, perhaps never | cancels this one; but a `Cancellable` request waits |
//! | `CancellableTimedOut` | as `Cancellable` | cancels this one; but a `Cancellable` request waits |
//!
//! A cancelled request is not in the table any more ([`InflightTable::contains`]), and must not publish its pages.
//! Threads wait in [`InflightTable::wait`]. Tasks register a waker ([`Completion`]).

use super::File;
use super::cache::Inner;
use pagemill_core::callback;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{EventCount, Guarded};
use pagemill_store::errno::{self, ETIMEDOUT};
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// Number of shards of the table. Requests for pages of the same huge folio are in the same shard.
const SHARDS: usize = 16;

/// 2^64 divided by the golden ratio, for Fibonacci hashing.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Name of the operation in the error of a thread that waited too long for a read.
const WAITING_FOR_PAGE: &str = "waiting for a page of a file";

/// The in-flight reads of a cache.
#[derive(Default)]
pub(crate) struct InflightTable {
    shards: [Shard; SHARDS],
    /// Next number of a request or of a task's waker.
    next_number: AtomicU64,
}

#[derive(Default)]
struct Shard {
    reads: Guarded<Vec<InflightRead>>,
    /// Raised when a request of the shard completes.
    completed: EventCount,
}

/// One in-flight read of the table.
struct InflightRead {
    number: u64,
    /// [`File::serial`], because ids of files are reused.
    file: u64,
    first: u64,
    last: u64,
    is_cancellable: bool,
    /// Wakers of the tasks that wait for completion, each with a number of its own.
    wakers: Vec<(u64, Waker)>,
}

/// Identifies a registered request, which must be completed ([`InflightTable::complete`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "threads wait until the request is completed"]
pub(crate) struct RequestId {
    shard: usize,
    number: u64,
}

/// Whether a request can be cancelled, and whether it cancels others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Completes even if the program makes no further call: in the registering call, or on a thread of the store.
    /// Cancels cancellable requests for its pages.
    Uncancellable,
    /// Completes in a later call of its owner. Waits for all other requests.
    Cancellable,
    /// As `Cancellable`, after a long wait: cancels other cancellable requests for its pages.
    CancellableTimedOut,
}

/// An in-flight read that prevents the registration of a request for some of the same pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    pub id: RequestId,
    /// The pages of that read: `first..=last`.
    pub pages: (u64, u64),
}

/// A guard of a registered request: completes the request when dropped.
pub(crate) struct InflightGuard<'cache> {
    cache: &'cache Inner,
    pub id: RequestId,
}

impl InflightGuard<'_> {
    /// Returns the id of the request, which the caller must complete.
    pub fn into_id(self) -> RequestId {
        ManuallyDrop::new(self).id
    }
}

impl Drop for InflightGuard<'_> {
    fn drop(&mut self) {
        self.cache.inflight.complete(self.id);
    }
}

impl InflightTable {
    /// Registers a request for pages `first..=last` of a file, given as `pages`. All lie in the range of one huge
    /// folio, which begins at `range`. Removes the requests that the new one cancels.
    ///
    /// # Errors
    ///
    /// The in-flight read with the lowest pages that conflicts with the request. The pages before it are free.
    fn register(
        &self,
        file: u64,
        range: u64,
        pages: (u64, u64),
        kind: Kind,
    ) -> std::result::Result<RequestId, Conflict> {
        let (first, last) = pages;
        // The upper bits select the shard, because `range` is a multiple of a power of two.
        let shard = ((range + file).wrapping_mul(GOLDEN) >> (u64::BITS - SHARDS.ilog2())) as usize;
        self.shards[shard].reads.with(|reads| {
            let overlaps = |read: &InflightRead| read.file == file && read.first <= last && read.last >= first;
            let conflicts =
                |read: &&InflightRead| overlaps(read) && (kind == Kind::Cancellable || !read.is_cancellable);
            if let Some(other) = reads.iter().filter(conflicts).min_by_key(|read| read.first) {
                let id = RequestId { shard, number: other.number };
                return Err(Conflict { id, pages: (other.first, other.last) });
            }
            reads.retain(|read| !overlaps(read));
            let number = self.next_number.fetch_add(1, Relaxed);
            let is_cancellable = kind != Kind::Uncancellable;
            reads.push(InflightRead { number, file, first, last, is_cancellable, wakers: Vec::new() });
            Ok(RequestId { shard, number })
        })
    }

    /// Completes a request: removes it, and wakes the threads and tasks that wait for it. Calls wakers of tasks, so the
    /// caller must hold no lock. A panic of a waker is caught: the other tasks must be woken, and the caller may be a
    /// thread that has nothing to do with the task, or is already unwinding. Does nothing for a cancelled request.
    pub fn complete(&self, id: RequestId) {
        let shard = &self.shards[id.shard];
        let completed = shard.reads.with(|reads| {
            let at = reads.iter().position(|read| read.number == id.number)?;
            Some(reads.swap_remove(at))
        });
        if let Some(read) = completed {
            shard.completed.raise();
            read.wakers.into_iter().for_each(|(_, waker)| _ = callback::catch_panic(|| waker.wake()));
        }
    }

    /// Returns whether a request is neither completed nor cancelled.
    pub fn contains(&self, id: RequestId) -> bool {
        self.with_read(id, |_| ()).is_some()
    }

    fn with_read<R>(&self, id: RequestId, act: impl FnOnce(&mut InflightRead) -> R) -> Option<R> {
        let find = |reads: &mut Vec<InflightRead>| reads.iter_mut().find(|read| read.number == id.number).map(act);
        self.shards[id.shard].reads.with(find)
    }

    /// Returns whether no request is registered.
    #[cfg(all(test, not(shuttle)))]
    pub fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.reads.with(|reads| reads.is_empty()))
    }

    /// Sets a lower last page of a request. Other requests may then read the pages after `last`.
    pub fn shorten(&self, id: RequestId, last: u64) {
        self.with_read(id, |read| read.last = last);
    }

    /// Blocks until a request is completed. Returns whether it is; false if `deadline` passed first.
    pub fn wait(&self, id: RequestId, deadline: Option<Instant>) -> bool {
        let completed = &self.shards[id.shard].completed;
        loop {
            let seen = completed.count();
            if !self.contains(id) {
                return true;
            }
            let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if rest.is_some_and(|rest| rest.is_zero()) {
                return false;
            }
            completed.wait(seen, rest);
        }
    }
}

/// A future that resolves when a request is completed. Dropping it removes its waker from the table.
#[must_use = "a future does nothing unless it is awaited"]
pub(crate) struct Completion<'cache> {
    table: &'cache InflightTable,
    id: RequestId,
    /// Number of its waker. `None` before the first poll.
    waker_number: Option<u64>,
}

impl<'cache> Completion<'cache> {
    pub fn new(table: &'cache InflightTable, id: RequestId) -> Self {
        Self { table, id, waker_number: None }
    }
}

impl Future for Completion<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let table = self.table;
        let number = *self.waker_number.get_or_insert_with(|| table.next_number.fetch_add(1, Relaxed));
        // Wakers are cloned and dropped outside of the lock, because that runs code of the executor.
        let mut waker = Some(context.waker().clone());
        let mut is_in_flight = false;
        let replaced = table.with_read(self.id, |read| {
            is_in_flight = true;
            let waker = waker.take()?;
            match read.wakers.iter_mut().find(|(known, _)| *known == number) {
                Some((_, known)) => Some(std::mem::replace(known, waker)),
                None => {
                    read.wakers.push((number, waker));
                    None
                }
            }
        });
        drop(replaced);
        if is_in_flight { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for Completion<'_> {
    fn drop(&mut self) {
        let Some(number) = self.waker_number else { return };
        let waker = self.table.with_read(self.id, |read| {
            let at = read.wakers.iter().position(|(known, _)| *known == number)?;
            Some(read.wakers.swap_remove(at))
        });
        drop(waker);
    }
}

impl File {
    /// Registers a request for pages `first..=last`, which must lie in the range of one huge folio.
    ///
    /// # Errors
    ///
    /// The conflicting in-flight read.
    pub(crate) fn register(
        &self,
        first: u64,
        last: u64,
        kind: Kind,
    ) -> std::result::Result<InflightGuard<'_>, Conflict> {
        let id = self.cache.inflight.register(self.serial, self.span_of(first).start, (first, last), kind)?;
        Ok(InflightGuard { cache: &self.cache, id })
    }

    /// Registers an `Uncancellable` request for pages `first..=last`, which must lie in the range of one huge folio.
    /// Blocks while a conflicting request is in flight. Another thread may have read the pages meanwhile, so the caller
    /// must check the index.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with `ETIMEDOUT` after the cache's timeout.
    pub(crate) fn wait_and_register(&self, first: u64, last: u64) -> Result<InflightGuard<'_>> {
        let mut deadline = None;
        loop {
            match self.register(first, last, Kind::Uncancellable) {
                Ok(guard) => return Ok(guard),
                Err(other) => {
                    let deadline = *deadline.get_or_insert_with(|| self.deadline());
                    self.wait_for(other.id, deadline)?;
                }
            }
        }
    }

    /// Returns the time at which a call that starts now stops waiting for reads; `None` without a timeout.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.cache.timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// Blocks until a request is completed.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with `ETIMEDOUT` if the deadline passes first.
    pub(crate) fn wait_for(&self, id: RequestId, deadline: Option<Instant>) -> Result<()> {
        if self.cache.inflight.wait(id, deadline) {
            return Ok(());
        }
        stats::add(Counter::ReadsLate, 1);
        Err(Error::Store { doing: WAITING_FOR_PAGE, cause: errno::error(ETIMEDOUT) })
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;
    use std::time::Duration;

    /// Requests for different huge folios are mostly in different shards, those for one huge folio in the same shard.
    #[test]
    fn requests_are_spread_over_the_shards() {
        for pages in [1u64, 16, 512] {
            let table = InflightTable::default();
            for range in 0..64 {
                let first = range * pages;
                for page in [first, first + pages - 1].into_iter().take(pages.min(2) as usize) {
                    let _ = table.register(7, first, (page, page), Kind::Uncancellable).unwrap();
                }
            }
            let longest = table.shards.iter().map(|shard| shard.reads.with(|reads| reads.len())).max();
            assert!(longest <= Some(16), "{longest:?} of {} in one shard, of {pages} pages", 64 * pages.min(2));
        }
    }

    /// At most one request is registered for a page of a file. A cancellable request is cancelled by an `Uncancellable`
    /// or `CancellableTimedOut` one, not by a `Cancellable` one.
    #[test]
    fn one_request_reads_a_page() {
        let table = InflightTable::default();
        let register = |file, first, last, kind| table.register(file, 0, (first, last), kind);
        let firm = register(1, 4, 7, Kind::Uncancellable).unwrap();
        for (first, last) in [(4, 4), (7, 9), (0, 4), (0, 100)] {
            for kind in [Kind::Uncancellable, Kind::Cancellable, Kind::CancellableTimedOut] {
                let other = register(1, first, last, kind).unwrap_err();
                assert_eq!((other.id, other.pages), (firm, (4, 7)));
            }
        }
        let (before, after, other) = (
            register(1, 3, 3, Kind::Uncancellable),
            register(1, 8, 8, Kind::Cancellable),
            register(2, 4, 7, Kind::Uncancellable),
        );
        let (before, after, other) = (before.unwrap(), after.unwrap(), other.unwrap());
        assert!(register(1, 8, 8, Kind::Cancellable).is_err(), "cancellable requests wait for each other");
        let timed_out = register(1, 8, 8, Kind::CancellableTimedOut).expect("the wait has an end");
        let last = register(1, 8, 8, Kind::Uncancellable).unwrap();
        assert!(!table.contains(after) && !table.contains(timed_out) && table.contains(last) && table.contains(firm));
        assert!(register(1, 8, 8, Kind::Uncancellable).is_err(), "the request completes without further calls");
        table.shorten(firm, 5);
        let rest = register(1, 6, 7, Kind::Uncancellable).expect("no request reads these pages any more");
        assert!(register(1, 5, 5, Kind::Uncancellable).is_err());
        [firm, rest, before, after, other, last].into_iter().for_each(|id| table.complete(id));
        assert!(table.shards.iter().all(|shard| shard.reads.with(|reads| reads.is_empty())));
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// The completion wakes a task once, by the waker of its latest poll. It does not wake a task that dropped its
    /// future.
    #[test]
    fn completion_wakes_tasks() {
        let table = InflightTable::default();
        let id = table.register(1, 0, (0, 9), Kind::Uncancellable).unwrap();
        let counts: [Arc<Count>; 3] = Default::default();
        let wakers = counts.clone().map(Waker::from);
        let (mut one, mut other) = (Completion::new(&table, id), Completion::new(&table, id));
        let poll =
            |future: &mut Completion<'_>, at: usize| Pin::new(future).poll(&mut Context::from_waker(&wakers[at]));
        assert!(poll(&mut one, 0).is_pending() && poll(&mut one, 1).is_pending() && poll(&mut other, 2).is_pending());
        drop(other);
        table.complete(id);
        assert_eq!(counts.map(|count| count.0.load(Relaxed)), [0, 1, 0]);
        assert!(poll(&mut one, 0).is_ready());
    }

    /// A waiting thread sleeps until the completion, or until its deadline.
    #[test]
    fn threads_wait_for_the_completion() {
        let table = InflightTable::default();
        let id = table.register(1, 0, (0, 9), Kind::Uncancellable).unwrap();
        assert!(!table.wait(id, Some(Instant::now() + Duration::from_millis(5))));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| table.wait(id, None));
            table.complete(id);
            assert!(waiting.join().unwrap());
        });
    }
}
