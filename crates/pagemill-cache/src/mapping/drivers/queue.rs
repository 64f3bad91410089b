//! A queue of reads for one thread: an event loop submits many reads and takes their completions.
#![allow(unsafe_code)] // looks at requests whose bytes a device writes

use crate::mapping::drivers::completions::Completions;
use crate::mapping::drivers::registration::Registration;
use crate::mapping::inflight::{Kind, RequestId};
use crate::mapping::request::{Purpose, READING, Reserved, Unpublished};
use crate::mapping::writeback::sync::failed;
use crate::mapping::{File, Mapping, PageCache};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Relaxed, coarse_ns};
use pagemill_store::errno::{self, ECANCELED};
use pagemill_store::ring::{Event, FileId, RingWaker, Settings};
use pagemill_store::{Buffer, FileStore, Ring};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Result of [`Queue::fetch`].
///
/// Example: [`Queue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// The page is in memory. [`Queue::next`] does not report it.
    Present,
    /// The page will be read. [`Queue::next`] reports the completion.
    Started,
}

/// A completion: the result of a page's read.
///
/// Example: [`Queue`].
#[derive(Debug)]
pub struct Fetched {
    /// The token that [`Queue::fetch`] got.
    pub token: u64,
    /// Whether the page was read. It can then be read without waiting, until it is evicted. Also `Ok` for a page that a
    /// truncation has cut off since the request.
    pub result: Result<()>,
}

/// A requested page without a read of its own: another request reads it, or it must be read again.
struct Pending {
    file: Arc<File>,
    index: u64,
    token: u64,
    since_ns: u64,
    /// The request of this queue that reads the page. Its completion makes the queue look at the page again. `None` if
    /// the queue must check the page from time to time.
    awaited: Option<RequestId>,
}

impl Pending {
    fn new(file: Arc<File>, index: u64, token: u64) -> Self {
        Self { file, index, token, since_ns: coarse_ns(), awaited: None }
    }
}

/// Maximum time of the wait for another queue's read, which its owner may never complete. Then that read is cancelled.
const MAX_WAIT_NS: u64 = 100_000_000;

/// Number of reads that are submitted together while the device has others. One system call for each read costs too
/// much CPU time; one for all reads would leave the device idle until then.
const SUBMIT_BATCH: usize = 4;

/// Interval between checks of pages that other threads read.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Reads pages of a cache's files into memory for one thread, which requests many pages and takes a completion for
/// each.
///
/// A queue is not `Send`: create it in the thread that uses it. A queue is no `Iterator` either, although it has a
/// method [`next`](Queue::next): so a loop can request more pages between two completions. It is best to request a page
/// after each completion: then the device already reads while the caller handles the other completions.
///
/// If another thread needs a requested page at once, that thread reads it, and the queue reports its completion.
///
/// Drop a queue, or take its completions, before the last handle of a file that it reads: the drop of a file waits up
/// to 20 ms for such reads. [`Error::NoMemory`] means that the requested pages fill the cache: take completions, and
/// request again.
///
/// ```
/// use pagemill::cache::{Fetch, PageCache};
/// use pagemill::store::FileStore;
/// use std::sync::Arc;
/// use std::time::Duration;
///
/// let path = std::env::temp_dir().join(format!("pagemill-doc-queue-{}", std::process::id()));
/// std::fs::write(&path, vec![7; 1 << 20]).unwrap();
/// let cache = PageCache::builder("records").limit(64 << 20).build()?;
/// let file = cache.open(Arc::new(FileStore::open_read_only(&path)?))?;
/// let mut queue = cache.queue(32)?;
/// for page in 0..4 {
///     assert_eq!(queue.fetch(&file, page << 18, page)?, Fetch::Started); // token: the page
/// }
/// while !queue.is_empty() {
///     queue.wait(1, Duration::from_secs(60))?;
///     while let Some(fetched) = queue.next() {
///         fetched.result?;
///         assert_eq!(file.read_at(&mut [0; 8], fetched.token << 18)?, 8); // from memory
///     }
/// }
/// std::fs::remove_file(&path).unwrap();
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Queue {
    ring: Ring<Unpublished>,
    pending: VecDeque<Pending>,
    completed: VecDeque<Fetched>,
    /// The file of the last read, and its id in the ring.
    last: Option<(Weak<File>, FileId)>,
    registration: Registration,
    /// Reads of stores that are no files of the system. Created for the first such read.
    completions: Option<Completions>,
    /// Wakes the queue's thread when a store has completed a read, or when reclaim needs registered memory.
    waker: Option<RingWaker>,
    /// Dropped last: the cache returns its reserved huge pages, none of which may be registered then.
    cache: PageCache,
}

impl PageCache {
    /// Creates a queue of this thread for up to `depth` pages at a time. Limits `depth` to 1..=4096 ([`Queue::depth`]).
    /// No other thread can use the queue.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the system provides neither a ring nor threads. [`Error::WrongState`] in a fork child.
    pub fn queue(&self, depth: u32) -> Result<Queue> {
        self.0.check()?;
        let ring = Ring::new(&Settings { depth, ..Settings::default() });
        let ring = ring.map_err(Error::system("making a queue of reads"))?;
        let registration = Registration::new(self.0.pool, ring.is_kernel());
        let (pending, completed) = (VecDeque::new(), VecDeque::new());
        let cache = self.clone();
        Ok(Queue { cache, ring, pending, completed, last: None, registration, completions: None, waker: None })
    }
}

impl Queue {
    /// Requests the page at `offset` of a file of the same cache. Submits the read at once if the device has no other
    /// read of this queue. Otherwise several reads are submitted together, at the latest by [`Queue::wait`].
    ///
    /// The read of a store that is no file of the system is always submitted at once. If that store has blocking calls,
    /// this call blocks while it reads the page.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the queue is full. [`Error::PastEnd`]. [`Error::NoMemory`] if eviction frees too little.
    /// [`Error::Store`]. [`Error::WrongState`] for a file of another cache, and in a fork child.
    pub fn fetch(&mut self, mapping: &Mapping, offset: u64, token: u64) -> Result<Fetch> {
        let file = &mapping.0;
        file.check_inside(offset)?;
        if !Arc::ptr_eq(&file.cache, &self.cache.0) {
            return Err(Error::WrongState { what: "the file belongs to another cache" });
        }
        if file.store.is_none() {
            // A hole is zero without memory.
            return Ok(Fetch::Present);
        }
        if self.is_full() {
            return Err(Error::Busy { what: "the queue is full" });
        }
        self.registration.unregister_if_requested(&mut self.ring);
        let page = Pending::new(file.clone(), file.index_of(offset), token);
        if self.request(page)? { Ok(Fetch::Present) } else { Ok(Fetch::Started) }
    }

    /// Returns the maximum number of requested pages without a taken completion.
    pub fn depth(&self) -> usize {
        self.ring.depth()
    }

    /// Returns the number of requested pages without a taken completion.
    pub fn len(&self) -> usize {
        self.in_flight() + self.pending.len() + self.ready()
    }

    /// Returns the number of completions that can be taken. Some of their pages may have to be read again.
    fn ready(&self) -> usize {
        self.completed.len() + self.ring.ready()
    }

    /// Returns the number of the queue's own reads that have not ended.
    fn in_flight(&self) -> usize {
        self.ring.in_flight() + self.completions.as_ref().map_or(0, |completions| completions.in_flight)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether completions must be taken before another page can be requested.
    pub fn is_full(&self) -> bool {
        self.len() >= self.depth()
    }

    /// Submits the requested reads. Blocks until at least `least` completions can be taken, no request is left, or
    /// `timeout` has passed. Returns the number of completions that can be taken. [`Queue::next`] may return fewer,
    /// even none: a page that was truncated or read by another call meanwhile is requested again. So call `wait` again
    /// while the queue is not empty.
    ///
    /// A panic of the policy or a store unwinds through this call. The page that it concerns gets a completion with an
    /// error.
    ///
    /// # Errors
    ///
    /// [`Error::System`] with the ring's error.
    pub fn wait(&mut self, least: usize, timeout: Duration) -> Result<usize> {
        self.cache.0.check()?;
        // Closes the files of dropped stores.
        self.ring.sweep();
        let begun = Instant::now();
        loop {
            let rest = timeout.saturating_sub(begun.elapsed());
            let step = self.due().map_or(rest, |step| rest.min(step));
            // One read may complete several pending pages.
            let most = if self.pending.is_empty() { least } else { 1 };
            let wanted = least.saturating_sub(self.completed.len()).min(most);
            self.collect(wanted.min(self.in_flight() + self.ring.ready()), step)?;
            self.check_pending()?;
            let has_more = !self.pending.is_empty() || self.in_flight() > 0;
            let rest = timeout.saturating_sub(begun.elapsed());
            if self.ready() >= least || rest.is_zero() || !has_more {
                return Ok(self.ready());
            }
            if self.in_flight() == 0 {
                std::thread::sleep(rest.min(CHECK_INTERVAL));
            }
        }
    }

    /// Returns the bytes of the cache's memory that are registered with the queue's ring. The queue registers memory
    /// that it often reads into, in regions of about 64 MiB. Registered memory is pinned, and fork children do not
    /// inherit it. When reclaim needs the memory, the queue's next call unregisters it.
    pub fn registered_bytes(&self) -> usize {
        self.registration.bytes()
    }

    /// Returns the maximum time that an event loop may sleep before it calls [`Queue::wait`], which then checks pages
    /// that other threads read: 1 ms. `None` if there are no such pages.
    pub fn due(&self) -> Option<Duration> {
        self.pending.iter().any(|page| page.awaited.is_none()).then_some(CHECK_INTERVAL)
    }

    /// Returns a descriptor that is readable when a read of this queue has completed, or when reclaim needs registered
    /// memory; sometimes also without a cause. An event loop calls [`Queue::wait`] with 0 before it sleeps, because
    /// that submits reads. It waits for the descriptor, at most for the time of [`Queue::due`], and calls
    /// [`Queue::wait`] with 0 again:
    ///
    /// ```
    /// # use pagemill::cache::PageCache;
    /// # use pagemill::store::MemoryStore;
    /// use std::time::Duration;
    ///
    /// # /// Stands for `poll` of the program's event loop.
    /// # fn poll(_: std::os::fd::BorrowedFd<'_>, _: Option<Duration>) {}
    /// # let cache = PageCache::builder("doc").limit(8 << 20).build()?;
    /// # let file = cache.open(std::sync::Arc::new(MemoryStore::new(vec![1; 1 << 20], 512)))?;
    /// # let mut queue = cache.queue(8)?;
    /// for page in 0..8 {
    ///     queue.fetch(&file, page * 4096, page)?;
    /// }
    /// while !queue.is_empty() {
    ///     queue.wait(0, Duration::ZERO)?; // submits, and collects what has arrived
    ///     while let Some(fetched) = queue.next() {
    ///         fetched.result?; // the program uses the page, and requests another
    ///     }
    ///     let due = queue.due();
    ///     poll(queue.watch()?, due);
    /// }
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the system provides no such descriptor.
    pub fn watch(&mut self) -> Result<BorrowedFd<'_>> {
        self.ring.watch().map_err(Error::system("watching a queue of reads"))
    }

    /// Returns the queue's waker for stores and reclaim. The first call creates it.
    fn waker(&mut self) -> Result<RingWaker> {
        if let Some(waker) = &self.waker {
            return Ok(waker.clone());
        }
        let waker = self.ring.waker().map_err(Error::system("making a queue's waker"))?;
        self.cache.0.caches.add_waker(self.cache.0.pool, &waker);
        Ok(self.waker.insert(waker).clone())
    }

    /// Takes the next completion that [`Queue::wait`] has collected; `None` if there is none, and in a fork child. A
    /// page that the ring has read is added to its file here, not in [`Queue::wait`], unless the queue also waits for
    /// another request or for a store. So the caller can request another page after each added page, which keeps the
    /// device busy. Another thread that needs the page before it is added reads it again.
    #[allow(clippy::should_implement_trait)] // an iterator would borrow the queue while its owner requests more pages
    pub fn next(&mut self) -> Option<Fetched> {
        while self.completed.is_empty() && self.complete_next() {}
        self.completed.pop_front()
    }

    /// Completes the next read that has ended in the ring. Returns whether there was an event.
    fn complete_next(&mut self) -> bool {
        // A fork child neither owns the folios, nor may it wait for locks that threads of the parent held.
        if self.cache.0.check().is_err() {
            return false;
        }
        let Some(event) = self.ring.next() else { return false };
        if let Event::Done { buffer: folio, result, .. } = event {
            self.complete(folio, result);
        }
        true
    }

    /// Reserves the page and submits its read. Returns whether the page is in memory already.
    fn request(&mut self, mut page: Pending) -> Result<bool> {
        if page.file.seems_present(page.index) {
            return Ok(true);
        }
        // After a long wait, the request cancels the requests of other queues.
        let is_timed_out = coarse_ns().saturating_sub(page.since_ns) >= MAX_WAIT_NS;
        let kind = if is_timed_out { Kind::CancellableTimedOut } else { Kind::Cancellable };
        match Unpublished::reserve(page.file.clone(), page.index..page.index + 1, kind, Purpose::Read)? {
            Reserved::Present => Ok(true),
            Reserved::InFlight(other) => {
                // SAFETY: reads only the id of the request, not its bytes.
                let is_own = unsafe { self.ring.any_in_flight(|folio| folio.request_id() == other.id) };
                page.awaited = is_own.then_some(other.id);
                self.pending.push_back(page);
                Ok(false)
            }
            Reserved::New(mut folio) => {
                folio.token = page.token;
                self.submit(folio)
            }
        }
    }

    /// Submits the read of a folio. Returns whether the page is in memory already.
    fn submit(&mut self, mut folio: Unpublished) -> Result<bool> {
        let Some(store) = folio.file.store.as_ref().filter(|_| folio.needs_store()) else {
            return self.publish(folio);
        };
        let Some(system_file) = store.as_file() else {
            if store.is_asynchronous() {
                let (store, waker) = (store.clone(), self.waker()?);
                self.completions.get_or_insert_with(|| Completions::new(waker)).submit(&*store, folio);
                return Ok(false);
            }
            folio.fill_from_store()?;
            return self.publish(folio);
        };
        let (id, offset) = (self.attach(&folio.file, system_file)?, folio.offset());
        if self.registration.note_read(&mut self.ring, folio.number(), folio.len_bytes()) {
            // Without a waker, reclaim cannot wake the thread. The queue's next call unregisters the memory.
            let _ = self.waker();
        }
        match self.ring.read(id, offset, folio) {
            // A device without other reads begins at once. The read has a completion, so an error is reported by the
            // next wait, which submits again.
            Ok(_) if self.ring.queued() >= SUBMIT_BATCH.min(self.ring.in_flight()) => _ = self.ring.submit(),
            Ok(_) => {}
            // The ring is full.
            Err(folio) => self.request_later(&folio),
        }
        Ok(false)
    }

    /// Returns the ring's id of a file. Most reads are of the same file as the last one.
    fn attach(&mut self, file: &Arc<File>, store: &FileStore) -> Result<FileId> {
        if let Some((last, id)) = &self.last
            && last.as_ptr() == Arc::as_ptr(file)
        {
            return Ok(*id);
        }
        self.ring.sweep();
        let id = self.ring.attach(store).map_err(Error::system(READING))?;
        self.last = Some((Arc::downgrade(file), id));
        Ok(id)
    }

    /// Publishes a folio that was read. Returns whether the page is in memory. Otherwise the page is requested again
    /// later.
    fn publish(&mut self, mut folio: Unpublished) -> Result<bool> {
        let is_present = folio.publish()?;
        if !is_present {
            self.request_later(&folio);
        }
        Ok(is_present)
    }

    /// Requests the page of a folio again when the queue next checks its pending pages.
    fn request_later(&mut self, folio: &Unpublished) {
        self.pending.push_back(Pending::new(folio.file.clone(), folio.index, folio.token));
    }

    /// Checks the pages that other requests read, and requests those that are still missing. Submits their reads at
    /// once, because the caller may wait only for the descriptor.
    fn check_pending(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        for _ in 0..self.pending.len() {
            let Some(page) = self.pending.pop_front() else { break };
            if page.awaited.is_some() {
                self.pending.push_back(page);
                continue;
            }
            let token = page.token;
            // A truncated or closed file has no such page.
            let is_past = page.file.offset_of(page.index) >= page.file.size_bytes();
            let is_over = is_past || page.file.is_closed.load(Relaxed);
            let result = if is_over { Ok(true) } else { self.request_or_report(page) };
            self.push_completion(token, result);
        }
        self.ring.submit().map_err(Error::system(READING))
    }

    /// As [`Queue::request`]. If the policy or the store panics, adds a completion with `ECANCELED` first, because the
    /// panic unwinds through a call that is not the one that requested the page.
    fn request_or_report(&mut self, page: Pending) -> Result<bool> {
        let (token, in_flight) = (page.token, self.in_flight());
        panic::catch_unwind(AssertUnwindSafe(|| self.request(page))).unwrap_or_else(|cause| {
            // A read that was submitted has a completion of its own.
            if self.in_flight() == in_flight {
                self.push_completion(token, Err(failed(READING)(errno::error(ECANCELED))));
            }
            panic::resume_unwind(cause)
        })
    }

    /// Submits the queued reads, and waits until `least` events of the ring can be taken. Completes the reads of stores
    /// that have ended.
    fn collect(&mut self, least: usize, timeout: Duration) -> Result<()> {
        let known = self.ring.ready();
        self.ring.wait(least, timeout).map_err(Error::system("waiting for reads"))?;
        self.ring.discard_late();
        self.registration.unregister_if_requested(&mut self.ring);
        self.ring.completed_buffers().skip(known).for_each(Unpublished::prefetch_publication);
        // A pending page may wait for one of these reads. With events that were not taken, the ring would not wait for
        // the reads of stores.
        let must_complete =
            !self.pending.is_empty() || self.completions.as_ref().is_some_and(|reads| reads.in_flight > 0);
        while must_complete && self.complete_next() {}
        if let Some(completions) = &mut self.completions {
            completions.take().into_iter().for_each(|(folio, result)| self.complete(folio, result));
        }
        Ok(())
    }

    /// Completes one of the queue's reads.
    fn complete(&mut self, folio: Unpublished, result: io::Result<()>) {
        let (token, id) = (folio.token, folio.request_id());
        let waiting = self.pending.iter_mut().filter(|page| page.awaited == Some(id));
        waiting.for_each(|page| page.awaited = None);
        let result = result.map_err(failed(READING)).and_then(|()| self.publish(folio));
        self.push_completion(token, result);
    }

    /// Adds the completion of a page, unless the result is that the page is still missing.
    fn push_completion(&mut self, token: u64, result: Result<bool>) {
        if !matches!(result, Ok(false)) {
            self.completed.push_back(Fetched { token, result: result.map(drop) });
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // In a fork child, threads of the parent may hold locks forever.
        if self.cache.0.check().is_err() {
            std::mem::forget(self.completions.take());
        } else if let Some(waker) = &self.waker {
            self.cache.0.caches.remove_waker(waker);
        }
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("depth", &self.depth()).field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::mapping::policy::Never;
    use crate::mapping::{Caches, PageCache};
    use pagemill_core::arena::{self, Arena, Layout};
    use pagemill_core::reclaim::Account;
    use pagemill_core::reclaim::helper::Helper;
    use pagemill_core::reclaim::tree::UNLIMITED;
    use pagemill_core::units::{BLOCK_BYTES, PageSize};
    use pagemill_xarray::OneForest;

    /// A page that was read before a truncation is read again. The `wait` that requests the page again also submits the
    /// read, because an event loop may then wait only for the descriptor.
    #[test]
    fn a_repeated_read_is_submitted_at_once() {
        let account = Account::make(UNLIMITED).unwrap();
        let arena = arena::place(Arena::new(Layout::for_test(), account).unwrap()).unwrap();
        let helper = arena::place(Helper::new(account)).unwrap();
        let forests = arena::place(OneForest::default()).unwrap();
        let caches = arena::place(Caches::new(arena, helper, forests)).unwrap();
        let page = PageSize::new(PageSize::MIN_BYTES).unwrap();
        let policy = Box::new(Never);
        let settings = PageCache::builder("again").limit(BLOCK_BYTES as u64).page(page).policy(policy);
        let cache = settings.build_in(caches).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; 2 * PageSize::MIN_BYTES]).unwrap();
        let file = cache.open(Arc::new(FileStore::open(&path).unwrap())).unwrap();
        let mut queue = cache.queue(4).unwrap();
        assert_eq!(queue.fetch(&file, 0, 1).unwrap(), Fetch::Started);
        file.truncate(PageSize::MIN_BYTES as u64).unwrap();
        let mut waits = 0;
        let fetched = loop {
            queue.wait(0, Duration::ZERO).unwrap();
            assert_eq!(queue.ring.queued(), 0, "the read was queued, but not submitted");
            let Some(fetched) = queue.next() else {
                waits += 1;
                continue;
            };
            break fetched;
        };
        assert!(waits > 0, "the page was read again");
        fetched.result.unwrap();
    }
}
