//! A cache with a file on a store that a test controls, and the checks after each fault.

use super::store::ScriptedStore;
use crate::mapping::policy::{Ask, Choice, Policy};
use crate::mapping::{Caches, Mapping, PageCache, Pin, Writeback};
use pagemill_core::arena::{self, Arena, Layout};
use pagemill_core::reclaim::{Account, helper::Helper, tree::UNLIMITED};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::MemoryStore;
use pagemill_xarray::OneForest;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

pub const PAGE: usize = PageSize::MIN_BYTES;

/// The memory of the folios that a call gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Pages that are contiguous in memory.
    Contiguous,
    /// Pages that are not contiguous in memory, which a read fills through a buffer.
    Scattered,
    /// One huge folio.
    Huge,
}

/// Limit of the caches of contiguous pages, in pages.
pub const LIMIT_PAGES: usize = 256;

/// Length of the files in pages.
pub const FILE_PAGES: usize = 16;

/// The page caches of a process, with index nodes that a test can refuse.
pub struct TestCaches {
    pub caches: &'static Caches,
    pub forests: &'static OneForest,
}

impl TestCaches {
    pub fn new() -> Self {
        let account = Account::make(UNLIMITED).unwrap();
        let arena = arena::place(Arena::new(Layout::for_test(), account).unwrap()).unwrap();
        let helper = arena::place(Helper::new(account)).unwrap();
        let forests = arena::place(OneForest::default()).unwrap();
        let caches = arena::place(Caches::new(arena, helper, forests)).unwrap();
        caches.collapse_by_hand();
        Self { caches, forests }
    }
}

/// A policy that always makes the same choice, and panics when a test asks for that.
struct PanickingPolicy(Choice, Arc<AtomicBool>);

impl Policy for PanickingPolicy {
    fn choose(&self, _ask: &Ask) -> Choice {
        assert!(!self.1.load(SeqCst), "the test asked for a panic of the policy");
        self.0
    }
}

/// Returns the bytes of a file: all bytes of a page are equal, and each page has a different byte.
pub fn pattern(seed: u8) -> Vec<u8> {
    (0..FILE_PAGES * PAGE).map(|at| (at / PAGE) as u8 * 3 + seed).collect()
}

/// A cache, a file whose store the test controls, and a second file, which the faults must not disturb.
pub struct Scene {
    pub cache: PageCache,
    pub store: Arc<ScriptedStore>,
    /// `None` after the test has closed the file.
    pub file: Option<Arc<Mapping>>,
    pub other: Mapping,
    /// A file in memory whose pages separate the free pages.
    fragments: Option<Mapping>,
    pub policy_panics: Arc<AtomicBool>,
    /// The bytes that the file must have after the fault.
    pub expected: Vec<u8>,
}

impl Scene {
    /// Creates a scene of contiguous small folios. `timeout` applies to reads and writeback. Dirty pages are due at
    /// once.
    pub fn new(caches: &TestCaches, is_asynchronous: bool, timeout: Duration) -> Self {
        Self::with_shape(caches, is_asynchronous, timeout, Shape::Contiguous)
    }

    pub fn with_shape(caches: &TestCaches, is_asynchronous: bool, timeout: Duration, shape: Shape) -> Self {
        let policy_panics = Arc::new(AtomicBool::new(false));
        let (limit_bytes, choice) = match shape {
            Shape::Contiguous => (LIMIT_PAGES * PAGE, Choice::Small),
            Shape::Scattered => (BLOCK_BYTES, Choice::Small),
            // A hint reads at most a 16th of the limit ahead.
            Shape::Huge => (32 * BLOCK_BYTES, Choice::Huge),
        };
        let writeback = Writeback::default().age(Duration::ZERO).background_percent(100).most_percent(100);
        let settings = PageCache::builder("faults").limit(limit_bytes as u64).page(PageSize::new(PAGE).unwrap());
        let settings = settings.policy(PanickingPolicy(choice, policy_panics.clone())).timeout(timeout);
        let cache = settings.writeback(writeback.timeout(timeout)).build_in(caches.caches).unwrap();
        let store = Arc::new(ScriptedStore::new(pattern(1), PAGE, is_asynchronous));
        let file = Some(Arc::new(cache.open(store.clone()).unwrap()));
        let other = cache.open(Arc::new(MemoryStore::new(pattern(101), PAGE))).unwrap();
        let mut scene = Self { cache, store, file, other, fragments: None, policy_panics, expected: pattern(1) };
        scene.check_other();
        assert_eq!(
            scene.cache.0.huge_bytes.load(Relaxed) > 0,
            shape == Shape::Huge,
            "the other file has huge folios only in the huge shape"
        );
        if shape == Shape::Scattered {
            scene.fragment();
        }
        scene
    }

    /// Fills the memory with a file, of which every second page is then removed.
    fn fragment(&mut self) {
        let fragments = self.cache.create().unwrap();
        let pages = BLOCK_BYTES / PAGE - self.cache.charged_bytes() as usize / PAGE;
        for page in 0..pages {
            fragments.write_at(&[7; PAGE], (page * PAGE) as u64).unwrap();
        }
        for page in (0..pages).step_by(2) {
            fragments.punch_hole((page * PAGE) as u64, PAGE as u64).unwrap();
        }
        assert!(self.cache.0.allocate_contiguous(2, 2).is_none(), "two free pages are contiguous");
        self.fragments = Some(fragments);
    }

    pub fn file(&self) -> &Arc<Mapping> {
        self.file.as_ref().expect("the test has not closed the file")
    }

    /// Fills the cache with pinned pages of `file`, which is in memory only, until only `free_pages` pages are free.
    pub fn fill<'file>(&self, file: &'file Mapping, free_pages: usize) -> Vec<Pin<'file>> {
        self.other.dont_need(0, u64::MAX).unwrap();
        let pages = LIMIT_PAGES - self.cache.charged_bytes() as usize / PAGE - free_pages;
        let pin = |page| {
            file.write_at(&[7; PAGE], (page * PAGE) as u64).unwrap();
            file.pin((page * PAGE) as u64).unwrap()
        };
        (0..pages).map(pin).collect()
    }

    fn check_other(&self) {
        let mut bytes = vec![0; FILE_PAGES * PAGE];
        assert_eq!(self.other.read_at(&mut bytes, 0).unwrap(), bytes.len());
        assert!(bytes == pattern(101), "the other file is disturbed");
    }

    /// Checks that nothing remains of the fault: no request is in flight, each byte is right, in memory and in the
    /// store, and all memory is free when the files and the cache are dropped.
    pub fn check_unharmed(mut self, row: &str) {
        let (cache, store, expected) = (self.cache.clone(), self.store.clone(), self.expected.clone());
        let inner = &cache.0;
        assert!(inner.inflight.is_empty(), "{row}: a request is in flight");
        assert_eq!(inner.ahead_bytes.load(Relaxed), 0, "{row}: readahead is counted as in flight");
        // An eviction that found nothing delays the next one.
        inner.evict_after_ns.store(0, SeqCst);
        self.check_other();
        let check = |file: &Mapping, which: &str| {
            let mut bytes = vec![9; expected.len() + 1];
            assert_eq!(file.read_at(&mut bytes, 0).unwrap(), expected.len(), "{row}, {which}");
            let wrong = bytes.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!(wrong, None, "{row}, {which}: first wrong byte");
        };
        if let Some(file) = &self.file {
            check(file, "in memory");
            assert_eq!(Arc::strong_count(file), 1, "{row}: a handle is left");
        }
        drop(self.file.take());
        // The new file has the id of the closed one.
        let again = cache.open(store.clone()).unwrap();
        check(&again, "opened again");
        drop((again, self.fragments.take()));
        // Evicts what is left, the pages of the other file, and takes removed folios out of the order.
        assert!(!inner.evict_some(u64::MAX), "{row}: more was evicted than the cache has");
        assert_eq!((cache.charged_bytes(), inner.order.pages()), (0, [0, 0]), "{row}: a folio is left");
        inner.evict_after_ns.store(0, SeqCst);
        self.check_other();
        drop(self);
        assert_eq!((cache.charged_bytes(), cache.dirty_bytes()), (0, 0), "{row}: memory leaks");
        assert_eq!(Arc::strong_count(&store), 1, "{row}: the store is still in use");
        let pool = cache.0.pool;
        drop(cache);
        assert!(pool.is_idle(), "{row}: pages of the pool are in use");
    }
}
