//! Pages that one thread wants from stores, many at a time: what a loop of events uses instead of a thread for each read.
#![allow(unsafe_code)] // looks at requests whose bytes a device writes

use super::arrivals::Arrivals;
use super::fill::{Asked, DOING, Filling};
use super::flights::Ticket;
use super::registered::Registered;
use super::{File, Mapping, PageCache};
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Relaxed, coarse_ns};
use pagemill_store::ring::{Event, FileId, RingWaker, Settings};
use pagemill_store::{Buffer, FileStore, Ring};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A page that was asked for.
///
/// Example: [`Queue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// It is in memory: nothing follows.
    Present,
    /// It is on its way: [`Queue::next`] tells of it.
    Started,
}

/// What became of a page that was on its way.
///
/// Example: [`Queue`].
#[derive(Debug)]
pub struct Fetched {
    /// As it was given to [`Queue::fetch`].
    pub token: u64,
    /// Whether it came. Then it is read without waiting, until room is made for others.
    pub result: Result<()>,
}

/// A page that another read brings in, or that was read in vain.
struct Wanted {
    file: Arc<File>,
    index: u64,
    token: u64,
    since_ns: u64,
    /// That read is one of this queue's own: its end is heard of.
    behind: Option<Ticket>,
}

impl Wanted {
    fn new(file: Arc<File>, index: u64, token: u64) -> Self {
        Self { file, index, token, since_ns: coarse_ns(), behind: None }
    }
}

/// Another queue's read is not waited for longer than this: its owner may never complete it.
const MOST_WAIT_NS: u64 = 100_000_000;

/// Reads are started this many at a time: one by one they cost most, all at once they leave the device idle before.
const STARTED_TOGETHER: usize = 4;

/// Pages of others are looked after so often.
const STEP: Duration = Duration::from_millis(1);

/// Brings pages of a cache's files in, for one thread: asks for many, and is told of each.
///
/// A page that another thread needs at once is read by that thread, and counts as come here.
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
///     assert_eq!(queue.fetch(&file, page << 18, page)?, Fetch::Started); // request id: the page
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
    ring: Ring<Filling>,
    wanted: VecDeque<Wanted>,
    ended: VecDeque<Fetched>,
    /// The file of the last read, and what the ring knows it by.
    last: Option<(Weak<File>, FileId)>,
    registered: Registered,
    /// What other stores were asked for, once there is something.
    arrivals: Option<Arrivals>,
    /// Rung when something has arrived, or memory is wanted back.
    bell: Option<RingWaker>,
    /// Goes last: reserved huge pages are given back with it, and none may be registered then.
    cache: PageCache,
}

impl PageCache {
    /// A queue of this thread for up to `depth` pages at a time: 1 to 4096, else the nearer of these ([`Queue::depth`]).
    ///
    /// # Errors
    ///
    /// [`Error::System`] where neither rings nor threads can be had; [`Error::WrongState`] in a fork child.
    pub fn queue(&self, depth: u32) -> Result<Queue> {
        self.0.check()?;
        let ring = Ring::new(&Settings { depth, ..Settings::default() });
        let ring = ring.map_err(Error::system("making a queue of reads"))?;
        let registered = Registered::new(self.0.pool, ring.is_kernel());
        let (wanted, ended) = (VecDeque::new(), VecDeque::new());
        let cache = self.clone();
        Ok(Queue { cache, ring, wanted, ended, last: None, registered, arrivals: None, bell: None })
    }
}

impl Queue {
    /// Asks for the page at `offset` of a file of the same cache. What was started begins with [`Queue::wait`], together with what follows.
    ///
    /// A store that is no file of the system is asked at once; one that only blocks is waited for.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the queue is full; [`Error::PastEnd`]; [`Error::NoMemory`] if no room can be made;
    /// [`Error::Store`]; [`Error::WrongState`] for a file of another cache, and in a fork child.
    pub fn fetch(&mut self, mapping: &Mapping, offset: u64, token: u64) -> Result<Fetch> {
        let file = &mapping.0;
        file.check_inside(offset)?;
        if !Arc::ptr_eq(&file.cache, &self.cache.0) {
            return Err(Error::WrongState { what: "a file of another cache" });
        }
        if file.store.is_none() {
            // A hole is zero without memory.
            return Ok(Fetch::Present);
        }
        if self.is_full() {
            return Err(Error::Busy { what: "the queue is full" });
        }
        self.registered.comply(&mut self.ring);
        let wanted = Wanted::new(file.clone(), file.index_of(offset), token);
        if self.ask(wanted)? { Ok(Fetch::Present) } else { Ok(Fetch::Started) }
    }

    /// Most pages on their way.
    pub fn depth(&self) -> usize {
        self.ring.depth()
    }

    /// Pages on their way, and such as came and were not told.
    pub fn len(&self) -> usize {
        self.underway() + self.wanted.len() + self.ended.len()
    }

    /// Reads of its own that have not ended, or were not looked at yet.
    fn underway(&self) -> usize {
        self.ring.in_flight() + self.arrivals.as_ref().map_or(0, Arrivals::len)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether pages have to be told before another can be asked for.
    pub fn is_full(&self) -> bool {
        self.len() >= self.depth()
    }

    /// Starts what was asked for, and waits until at least `least` can be told, at most for `timeout`, or nothing is on its way. Returns how
    /// many can be.
    ///
    /// # Errors
    ///
    /// [`Error::System`] with what the ring says.
    pub fn wait(&mut self, least: usize, timeout: Duration) -> Result<usize> {
        self.cache.0.check()?;
        let begun = Instant::now();
        loop {
            let rest = timeout.saturating_sub(begun.elapsed());
            let step = self.due().map_or(rest, |step| rest.min(step));
            let missing = least.saturating_sub(self.ended.len());
            self.take_events(missing.min(self.underway()), step)?;
            self.ask_again()?;
            let may_come = !self.wanted.is_empty() || self.underway() > 0;
            let rest = timeout.saturating_sub(begun.elapsed());
            if self.ended.len() >= least || rest.is_zero() || !may_come {
                return Ok(self.ended.len());
            }
            if self.underway() == 0 {
                std::thread::sleep(rest.min(STEP));
            }
        }
    }

    /// Bytes of the cache's memory that the kernel has at hand for this queue: memory that it reads into time and
    /// again, about 64 MiB at a time. They are pinned and in no fork child, and go back to the system only once this
    /// queue has given them up, which it does with its next call after they are wanted back.
    pub fn registered_bytes(&self) -> usize {
        self.registered.bytes()
    }

    /// How long a loop of events may sleep before it calls [`Queue::wait`], if nothing comes: pages that others bring in
    /// are looked after then. `None`: for as long as it likes.
    pub fn due(&self) -> Option<Duration> {
        self.wanted.iter().any(|wanted| wanted.behind.is_none()).then_some(STEP)
    }

    /// Readable when a page of this queue's own has come, or memory is wanted back that it has registered: any loop of events can
    /// wait for it, for as long as [`Queue::due`] says, and then call [`Queue::wait`] with 0.
    ///
    /// # Errors
    ///
    /// [`Error::System`] where no such descriptor can be had.
    pub fn watch(&mut self) -> Result<BorrowedFd<'_>> {
        self.ring.watch().map_err(Error::system("watching a queue of reads"))
    }

    /// Others ring it for this queue; the cache knows it, too.
    fn bell(&mut self) -> Result<RingWaker> {
        if let Some(bell) = &self.bell {
            return Ok(bell.clone());
        }
        let bell = self.ring.waker().map_err(Error::system("making a queue's bell"))?;
        self.cache.0.caches.add_waker(self.cache.0.pool, &bell);
        Ok(self.bell.insert(bell).clone())
    }

    /// The next page that came, or failed.
    #[allow(clippy::should_implement_trait)] // an iterator would hold the queue while its owner asks for more
    pub fn next(&mut self) -> Option<Fetched> {
        self.ended.pop_front()
    }

    /// Returns whether the page is there.
    fn ask(&mut self, mut wanted: Wanted) -> Result<bool> {
        let overtakes = coarse_ns().saturating_sub(wanted.since_ns) >= MOST_WAIT_NS;
        match Filling::begin(&wanted.file, wanted.index, wanted.token, overtakes)? {
            Asked::Present => Ok(true),
            Asked::Underway(other) => {
                // SAFETY: only the number of the request is read.
                let is_own = unsafe { self.ring.any_in_flight(|filling| filling.ticket() == other.ticket) };
                wanted.behind = is_own.then_some(other.ticket);
                self.wanted.push_back(wanted);
                Ok(false)
            }
            Asked::Begun(filling) => self.start(filling),
        }
    }

    fn start(&mut self, mut filling: Filling) -> Result<bool> {
        let (file, offset) = (filling.file().clone(), filling.offset());
        let Some(store) = file.store.as_ref().filter(|_| filling.needs_store()) else {
            return self.finish(filling);
        };
        let Some(system_file) = store.as_file() else {
            if store.is_asynchronous() {
                let bell = self.bell()?;
                self.arrivals.get_or_insert_with(|| Arrivals::new(bell)).start(&**store, filling);
                return Ok(false);
            }
            filling.read()?;
            return self.finish(filling);
        };
        let id = self.attach(&file, system_file)?;
        if self.ring.in_flight() % STARTED_TOGETHER == STARTED_TOGETHER - 1 {
            self.ring.submit().map_err(Error::system(DOING))?;
        }
        if self.registered.note(&mut self.ring, filling.number(), filling.len_bytes()) {
            // Without one it is asked with its next call.
            let _ = self.bell();
        }
        if let Err(filling) = self.ring.read(id, offset, filling) {
            // As many as it has room for are on their way; this goes with the next.
            let (file, index, token) = (filling.file().clone(), filling.index, filling.token);
            self.wanted.push_back(Wanted::new(file, index, token));
        }
        Ok(false)
    }

    /// Mostly it is the last one's.
    fn attach(&mut self, file: &Arc<File>, store: &FileStore) -> Result<FileId> {
        if let Some((last, id)) = &self.last
            && last.as_ptr() == Arc::as_ptr(file)
        {
            return Ok(*id);
        }
        self.ring.sweep();
        let id = self.ring.attach(store).map_err(Error::system(DOING))?;
        self.last = Some((Arc::downgrade(file), id));
        Ok(id)
    }

    /// Its bytes are there. Returns whether the page is; otherwise it is asked for again.
    fn finish(&mut self, filling: Filling) -> Result<bool> {
        let (file, index, token) = (filling.file().clone(), filling.index, filling.token);
        let is_there = filling.finish()?;
        if !is_there {
            self.wanted.push_back(Wanted::new(file, index, token));
        }
        Ok(is_there)
    }

    /// Checks pages that other reads bring in, and reads those that are still missing. Submits at once, because the
    /// caller may wait for the descriptor only.
    fn ask_again(&mut self) -> Result<()> {
        if self.wanted.is_empty() {
            return Ok(());
        }
        for _ in 0..self.wanted.len() {
            let Some(wanted) = self.wanted.pop_front() else { break };
            if wanted.behind.is_some() {
                self.wanted.push_back(wanted);
                continue;
            }
            let token = wanted.token;
            // A file that was cut, or closed, has no such page.
            let is_past = wanted.file.offset_of(wanted.index) >= wanted.file.size_bytes();
            let result = if is_past || wanted.file.is_closed.load(Relaxed) { Ok(true) } else { self.ask(wanted) };
            if !matches!(result, Ok(false)) {
                self.ended.push_back(Fetched { token, result: result.map(drop) });
            }
        }
        self.ring.submit().map_err(Error::system(DOING))
    }

    fn take_events(&mut self, least: usize, timeout: Duration) -> Result<()> {
        self.ring.wait(least, timeout).map_err(Error::system("waiting for reads"))?;
        self.registered.comply(&mut self.ring);
        while let Some(event) = self.ring.next() {
            let Event::Done { buffer: filling, result, .. } = event else { continue };
            self.take(filling, result);
        }
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.take().into_iter().for_each(|(filling, result)| self.take(filling, result));
        }
        Ok(())
    }

    /// A read has ended.
    fn take(&mut self, filling: Filling, result: io::Result<()>) {
        let (token, ticket) = (filling.token, filling.ticket());
        let behind = self.wanted.iter_mut().filter(|wanted| wanted.behind == Some(ticket));
        behind.for_each(|wanted| wanted.behind = None);
        let result = match result {
            Ok(()) => self.finish(filling),
            Err(cause) => Err(Error::Store { doing: DOING, cause }),
        };
        if !matches!(result, Ok(false)) {
            self.ended.push_back(Fetched { token, result: result.map(drop) });
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // In a fork child the parent's locks may be held for good.
        if self.cache.0.check().is_err() {
            std::mem::forget(self.arrivals.take());
        } else if let Some(bell) = &self.bell {
            self.cache.0.caches.remove_waker(bell);
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
    use pagemill_core::reclaim::tree::UNLIMITED;
    use pagemill_core::units::{BLOCK_BYTES, PageSize};
    use pagemill_xarray::OneForest;

    /// What was read before a cut is read again, and that is started at once: a loop of events that sleeps from here on would not
    /// call for it.
    #[test]
    fn what_is_read_again_is_started() {
        let arena = arena::place(Arena::new(Layout::for_test(), Account::make(UNLIMITED).unwrap()).unwrap()).unwrap();
        let forests = arena::place(OneForest::default()).unwrap();
        let caches = arena::place(Caches::new(arena, forests)).unwrap();
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
        while queue.wait(0, Duration::ZERO).unwrap() == 0 {
            assert!(!queue.ring.has_queued(), "asked for, and not started");
            waits += 1;
        }
        assert!(waits > 0, "it was read once");
        queue.next().unwrap().result.unwrap();
    }
}
