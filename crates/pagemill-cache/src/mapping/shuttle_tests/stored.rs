//! Shuttle tests of one file with a store: threads read, write, truncate, write back, evict, prefetch and refresh the
//! file.
//!
//! The first eight bytes of a page are its value; no value except zero is written twice. Reads must be linearizable,
//! and so must the contents of the store after a sync: neither may contain a value if another value was written
//! completely after that value and before the read or sync began.

use super::*;
use crate::mapping::inflight::Kind;
use crate::mapping::request::{Purpose, Reserved, Unpublished};
use pagemill_core::sync::modelled::scheduling_point;
use std::io;
use std::sync::MutexGuard;
use std::sync::atomic::AtomicBool;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A value that was written to a page, and the times when the write began and ended. The end is the maximum while the
/// write runs.
#[derive(Debug)]
struct PageWrite {
    page: u64,
    value: u64,
    begin: u64,
    end: u64,
}

/// All writes so far, and a logical clock that advances at each reading.
#[derive(Default)]
struct History {
    /// The current logical time.
    now: u64,
    writes: Vec<PageWrite>,
}

impl History {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Returns whether a read or a sync that began at the time `since` may find `value` in a page.
    fn allows(&self, page: u64, value: u64, since: u64) -> bool {
        let of_page = || self.writes.iter().filter(|written| written.page == page);
        let is_last = |one: &PageWrite| !of_page().any(|other| other.begin > one.end && other.end < since);
        of_page().any(|written| written.value == value && is_last(written))
    }
}

/// A store of page values. It asserts that a page has one write at a time. About half of its instances complete reads
/// asynchronously, and some instances fail operations at random.
struct PageStore {
    /// The value of each page, and the length of the file.
    state: Mutex<(Vec<u64>, u64)>,
    /// Pages that are being written.
    writing: Mutex<Vec<u64>>,
    is_failing: AtomicBool,
    is_asynchronous: bool,
}

impl PageStore {
    fn new() -> Arc<Self> {
        let values = (1..=PAGES).collect();
        Arc::new(Self {
            state: Mutex::new((values, PAGES * PAGE as u64)),
            writing: Mutex::new(Vec::new()),
            is_failing: AtomicBool::new(random_below(3) == 0),
            is_asynchronous: random_below(2) == 0,
        })
    }

    fn may_fail(&self) -> io::Result<()> {
        scheduling_point();
        let fails = self.is_failing.load(Relaxed) && random_below(4) == 0;
        if fails { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    }

    fn value(&self, page: u64) -> u64 {
        lock(&self.state).0[page as usize]
    }

    /// Returns the pages that begin in a range of bytes, each with its offset in the range.
    fn pages(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize)> {
        assert_eq!(offset % PAGE as u64, 0, "the range does not begin at a page");
        (0..len).step_by(PAGE).map(move |at| ((offset + at as u64) / PAGE as u64, at))
    }
}

impl Store for PageStore {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(lock(&self.state).1)
    }

    fn block_bytes(&self) -> usize {
        SAMPLE_BYTES
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.may_fail()?;
        for (page, at) in Self::pages(offset, to.len()) {
            to[at..at + SAMPLE_BYTES].copy_from_slice(&self.value(page).to_le_bytes());
            scheduling_point();
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.may_fail()?;
        for (page, at) in Self::pages(offset, from.len()) {
            let is_alone = !lock(&self.writing).contains(&page);
            assert!(is_alone, "two threads write to one page at a time");
            lock(&self.writing).push(page);
            scheduling_point();
            let value = u64::from_le_bytes(from[at..at + SAMPLE_BYTES].try_into().unwrap());
            let mut state = lock(&self.state);
            state.0[page as usize] = value;
            state.1 = state.1.max(offset + (at + PAGE).min(from.len()) as u64);
            drop(state);
            scheduling_point();
            lock(&self.writing).retain(|writing| *writing != page);
        }
        self.may_fail()
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.may_fail()?;
        let mut state = lock(&self.state);
        state.1 = size_bytes;
        let first = size_bytes.div_ceil(PAGE as u64) as usize;
        state.0[first.min(PAGES as usize)..].fill(0);
        drop(state);
        self.may_fail()
    }

    fn sync(&self) -> io::Result<()> {
        self.may_fail()
    }

    fn is_asynchronous(&self) -> bool {
        self.is_asynchronous
    }
}

/// A file with its store, another file that competes for memory, and the history of writes to the first file.
struct StoredFile {
    store: Arc<PageStore>,
    file: Mapping,
    other: Mapping,
    history: Mutex<History>,
}

/// Returns whether a call succeeded. Panics on errors other than those of a store or of a cache without room.
fn has_succeeded<T>(result: Result<T>) -> bool {
    match result {
        Ok(_) => true,
        Err(Error::Busy { .. } | Error::NoMemory { .. } | Error::Store { .. } | Error::PastEnd { .. }) => false,
        Err(error) => panic!("{error:?}"),
    }
}

impl StoredFile {
    fn new(cache: &PageCache) -> Self {
        let store = PageStore::new();
        let first = (0..PAGES).map(|page| PageWrite { page, value: page + 1, begin: 0, end: 0 });
        let history = History { now: 0, writes: first.collect() };
        Self {
            file: cache.open(store.clone()).unwrap(),
            other: cache.open(Arc::new(ConstantStore(0xEE))).unwrap(),
            store,
            history: Mutex::new(history),
        }
    }

    fn now(&self) -> u64 {
        lock(&self.history).tick()
    }

    /// Records writes of `value` to `pages`, and runs the operation `act` that makes them. If `act` fails, it must have
    /// had no effect.
    fn change(&self, pages: std::ops::Range<u64>, value: impl Fn(u64) -> u64, act: impl FnOnce(&[u64]) -> bool) {
        let (begin, values) = {
            let mut history = lock(&self.history);
            let begin = history.tick();
            let values: Vec<u64> = pages.clone().map(|_| value(begin)).collect();
            let written = pages.clone().zip(&values);
            let written = written.map(|(page, value)| PageWrite { page, value: *value, begin, end: u64::MAX });
            history.writes.extend(written);
            (begin, values)
        };
        let has_succeeded = act(&values);
        let mut history = lock(&self.history);
        let end = history.tick();
        if has_succeeded {
            let own = history.writes.iter_mut().filter(|written| written.begin == begin);
            own.for_each(|written| written.end = end);
        } else {
            history.writes.retain(|written| written.begin != begin);
        }
    }

    fn check(&self, page: u64, value: u64, since: u64, what: &str) {
        let history = lock(&self.history);
        let written = history.writes.iter().filter(|written| written.page == page);
        let written_values = || format!("{:?}", written.collect::<Vec<_>>());
        assert!(history.allows(page, value, since), "{what} {value:x}, since {since}: {}", written_values());
    }

    fn read(&self, page: u64) {
        let (since, mut bytes) = (self.now(), [0xEE; SAMPLE_BYTES]);
        let read = self.file.read_at(&mut bytes, page * PAGE as u64);
        match read {
            // Bytes behind the end of the file are zero.
            Ok(0) => self.check(page, 0, since, "read"),
            Ok(len) => {
                assert_eq!(len, SAMPLE_BYTES);
                self.check(page, u64::from_le_bytes(bytes), since, "read");
            }
            Err(error) => {
                assert!(bytes == [0xEE; SAMPLE_BYTES] || bytes == [0; SAMPLE_BYTES], "{error:?} and {bytes:?}");
                has_succeeded::<()>(Err(error));
            }
        }
    }

    fn write(&self, page: u64) {
        // A value with these bits differs from the initial values.
        self.change(
            page..page + 1,
            |begin| begin << 8 | 0xFF,
            |values| has_succeeded(self.file.write_at(&values[0].to_le_bytes(), page * PAGE as u64)),
        );
    }

    fn truncate(&self, page: u64) {
        self.change(page..PAGES, |_| 0, |_| has_succeeded(self.file.truncate(page * PAGE as u64)));
    }

    /// Syncs the file, or only the page `range`. After a success the store must have all values that were written
    /// before.
    fn sync(&self, range: Option<u64>) {
        let since = self.now();
        let result = match range {
            None => self.file.sync(),
            Some(page) => self.file.sync_range(page * PAGE as u64, 1),
        };
        if has_succeeded(result) {
            let pages = range.map_or(0..PAGES, |page| page..page + 1);
            pages.for_each(|page| self.check(page, self.store.value(page), since, "stored"));
        }
    }

    /// Fills a page from the store, as a [`Queue`](crate::Queue) does. The read completes during this call, or is
    /// dropped.
    fn fill(&self, page: u64) {
        let file = &self.file.0;
        if file.seems_present(page) {
            return;
        }
        let kind = [Kind::Cancellable, Kind::CancellableTimedOut][random_below(2)];
        match Unpublished::reserve(file.clone(), page..page + 1, kind, Purpose::Read) {
            Ok(Reserved::New(mut folio)) => {
                let is_read = folio.fill_from_store().is_ok();
                if is_read && random_below(4) > 0 {
                    folio.publish().unwrap();
                }
            }
            other => _ = has_succeeded(other.map(drop)),
        }
    }

    fn read_other(&self, page: u64) {
        let mut bytes = [0; SAMPLE_BYTES];
        if has_succeeded(self.other.read_at(&mut bytes, page * PAGE as u64)) {
            assert_eq!(bytes, [0xEE; SAMPLE_BYTES]);
        }
    }

    /// Refreshes the file. The refresh fails if the file is not synced. Otherwise it changes nothing, because the store
    /// has no other writers.
    fn refresh(&self) {
        let result = self.file.refresh();
        if !matches!(result, Err(Error::WrongState { .. })) {
            has_succeeded(result);
        }
    }

    fn run_operation(&self, act: u8) {
        let page = random_below(PAGES as usize) as u64;
        match act {
            b'r' => self.read(page),
            b'w' => self.write(page),
            b't' => self.truncate(page),
            b's' => self.sync([None, Some(page)][random_below(2)]),
            b'e' => self.read_other(page),
            b'f' => self.fill(page),
            b'n' => self.refresh(),
            b'c' => _ = has_succeeded(self.file.collapse(page * PAGE as u64)),
            b'p' => _ = has_succeeded(self.file.split(page * PAGE as u64)),
            _ => unreachable!("{act}"),
        }
    }
}

/// Runs threads on one file in a cache of three pages. Each script is a thread, each letter one operation on a random
/// page ([`StoredFile::run_operation`]). At the end the store works again and has all values after a sync, and no
/// memory is lost.
fn run_threads(scripts: &'static [&'static str]) {
    run_in_many_schedules(1, move || {
        let cache = cache_of_limit(3 * PAGE as u64);
        let stored = Arc::new(StoredFile::new(&cache));
        let threads: Vec<_> = scripts
            .iter()
            .map(|script| {
                let stored = stored.clone();
                shuttle::thread::spawn(move || script.bytes().for_each(|act| stored.run_operation(act)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        stored.store.is_failing.store(false, Relaxed);
        // One sync may still report an earlier failure, although all is written now.
        has_succeeded(stored.file.sync());
        stored.file.sync().unwrap();
        let now = stored.now();
        (0..PAGES).for_each(|page| stored.check(page, stored.store.value(page), now, "left"));
        (0..PAGES).for_each(|page| stored.read(page));
        assert_eq!(lock(&stored.store.state).1, stored.file.size_bytes(), "the store and the file differ in length");
        drop(stored);
        assert_is_empty(&cache);
    });
}

#[test]
fn writebacks_during_writes_and_truncations() {
    run_threads(&["wsw", "tst", "wrw"]);
}

#[test]
fn evictions_during_writes_and_writebacks() {
    run_threads(&["wswr", "eeer", "rwsr"]);
}

#[test]
fn reads_and_writes_during_evictions_and_truncations() {
    run_threads(&["rerw", "wser", "trte"]);
}

#[test]
fn fills_during_all_other_operations() {
    run_threads(&["ffrf", "wsrt", "efre"]);
}

#[test]
fn refreshes_during_all_other_operations() {
    run_threads(&["nsnr", "rwfr", "werr"]);
}

#[test]
fn splits_and_collapses_during_writebacks_and_evictions() {
    run_threads(&["cpcp", "wsrs", "retr"]);
}

/// Writebacks and truncations only, with few operations, so that the schedules cover more of their interleavings.
#[test]
fn writebacks_during_truncations() {
    run_threads(&["wws", "tws"]);
}

#[test]
fn reads_during_evictions() {
    run_threads(&["rrr", "eee"]);
}

/// All pages of a cache are dirty. A read must get a page, even while another thread scans the list of dirty files.
#[test]
fn a_page_is_allocated_during_a_scan_of_dirty_files() {
    run_in_many_schedules(1, || {
        let cache = cache_of_limit(2 * PAGE as u64);
        let stored = StoredFile::new(&cache);
        stored.store.is_failing.store(false, Relaxed);
        (0..2).for_each(|page| stored.write(page));
        let other = {
            let cache = cache.clone();
            shuttle::thread::spawn(move || drop(cache.0.dirty_files()))
        };
        let mut bytes = [0; SAMPLE_BYTES];
        stored.other.read_at(&mut bytes, 0).unwrap();
        other.join().unwrap();
    });
}
