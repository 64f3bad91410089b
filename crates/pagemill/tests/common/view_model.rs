//! A model of views: random steps on a file and its views, compared with a vector of bytes. The test `view_model` and
//! the fuzz target `views` use it.
#![allow(unsafe_code)] // accesses behind the end of a file

mod sigbus;
mod view_steps;

use pagemill_cache::mapping::policy::Always;
use pagemill_cache::mapping::{Mapping, PageCache, PrivateView, Source, View, ViewMut};
use pagemill_core::Error;
use pagemill_core::units::{BLOCK_BYTES, PageSize, os_page_bytes};
use pagemill_store::MemoryStore;
use pagemill_sys::fault;
use pagemill_testbed::Testbed;
use sigbus::assert_sigbus;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use view_steps::{Call, MAX_VIEWS};
pub use view_steps::{STEP_BYTES, Step};

/// Limit of a cache for a file with a store. The file fits into it, since prefaulted and locked folios cannot be evicted,
/// beside one more block and two that were prefaulted and then truncated: their memory is not free before the end of the
/// prefault. But more of the file can be prefaulted and dirty than the cache allows for dirty pages.
const MEDIUM_LIMIT_BYTES: usize = 6 * BLOCK_BYTES;

/// Limit of a cache for a file without a store, whose pages cannot be evicted.
const LARGE_LIMIT_BYTES: usize = 16 * BLOCK_BYTES;

/// Maximum length of the file.
const MAX_FILE_BYTES: usize = 3 * BLOCK_BYTES;

/// Maximum length of a prefaulted or locked range.
const MAX_KEPT_BYTES: usize = 1 << 20;

/// A view of any kind.
enum AnyView {
    ReadOnly(View),
    Writable(ViewMut),
    Private(PrivateView),
}

impl Deref for AnyView {
    type Target = View;

    fn deref(&self) -> &View {
        match self {
            Self::ReadOnly(view) => view,
            Self::Writable(view) => view,
            Self::Private(view) => view,
        }
    }
}

/// A view of the file, and what the model knows about it.
struct OpenView {
    view: AnyView,
    /// Offset in the file of the first byte.
    begin: usize,
    /// The bytes of the pages that belong to a private view, by page index.
    own_pages: RefCell<BTreeMap<usize, Vec<u8>>>,
}

impl OpenView {
    fn addr(&self, at: usize) -> *mut u8 {
        self.view.as_ptr().cast_mut().wrapping_add(at)
    }
}

/// A range of a view that is locked.
struct Lock {
    view: usize,
    range: Range<usize>,
    /// Whether the file has lost pages since.
    is_removed: bool,
}

/// A kind of cache and file.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub page_bytes: usize,
    pub use_huge: bool,
    pub has_store: bool,
    pub limit_bytes: usize,
}

impl Setting {
    pub fn new(page_bytes: usize, use_huge: bool, has_store: bool) -> Self {
        let limit_bytes = if has_store { MEDIUM_LIMIT_BYTES } else { LARGE_LIMIT_BYTES };
        Self { page_bytes, use_huge, has_store, limit_bytes }
    }

    /// Creates a cache in an instance of its own, without background threads.
    pub fn cache(self) -> PageCache {
        let pagemill = Testbed::for_test();
        pagemill.caches.collapse_by_hand();
        let builder = PageCache::builder("model").source(Source::Shared).limit(self.limit_bytes as u64);
        let builder = builder.page(PageSize::new(self.page_bytes).unwrap()).huge(self.use_huge).policy(Always);
        builder.build_in(pagemill.caches).unwrap()
    }
}

/// A file with views, and the bytes that the file must have.
pub struct Model {
    cache: PageCache,
    file: Mapping,
    store: Option<Arc<MemoryStore>>,
    /// A file that is as large as the cache. Reading it evicts the pages of the other file.
    filler: Mapping,
    bytes: Vec<u8>,
    /// Whether a view has written behind the end of the file, into its last OS page. The bytes there may have any value.
    is_tail_written: bool,
    views: [Option<Rc<OpenView>>; MAX_VIEWS],
    lock: Option<Lock>,
    is_prefaulted: bool,
    /// Whether pages were removed since the latest prefault.
    is_removed: bool,
}

impl Model {
    /// Creates a file in a cache that has the same setting.
    pub fn new(cache: &PageCache, setting: Setting) -> Self {
        let has_store = setting.has_store;
        let bytes: Vec<u8> =
            if has_store { (0..BLOCK_BYTES + 100_000).map(|at| (at / 777) as u8).collect() } else { Vec::new() };
        let store = has_store.then(|| Arc::new(MemoryStore::new(bytes.clone(), 512)));
        let file = match &store {
            Some(store) => cache.open(store.clone()).unwrap(),
            None => cache.create().unwrap(),
        };
        let filler_bytes = if has_store { setting.limit_bytes } else { 0 };
        let filler = cache.open(Arc::new(MemoryStore::new(vec![0xFE; filler_bytes], 512))).unwrap();
        Self {
            cache: cache.clone(),
            file,
            store,
            filler,
            bytes,
            is_tail_written: false,
            views: Default::default(),
            lock: None,
            is_prefaulted: false,
            is_removed: false,
        }
    }

    /// Makes the steps, and then compares all bytes of the file, its views and its store.
    pub fn run(mut self, steps: &[Step]) {
        self.make_steps(steps);
        let all = 0..MAX_FILE_BYTES;
        (0..MAX_VIEWS).for_each(|view| self.check_view(view, all.clone()));
        self.check_file(all);
        self.sync();
        // Pages are accessed after the last view was dropped, too.
        self.views = Default::default();
        let usage = self.cache.usage();
        assert_eq!((usage.pinned, usage.locked_ranges), (0, 0), "dropped views keep neither pins nor locks");
        self.check_file(0..MAX_FILE_BYTES);
    }

    fn make_steps(&mut self, mut steps: &[Step]) {
        while let Some((step, behind)) = steps.split_first() {
            steps = behind;
            if step.call == Call::Prefault && !self.is_prefaulted {
                let (under, after) = steps.split_at(steps.len().min(usize::from(step.byte) % 8));
                self.prefault(step, under);
                steps = after;
            } else {
                self.make_step(step);
            }
            let (at, len) = self.range(step);
            let near = |at: usize| at.saturating_sub(os_page_bytes())..at + os_page_bytes();
            for range in [near(at), near(at + len), near(self.bytes.len())] {
                self.check_file(range.clone());
                for (number, begin) in self.begins() {
                    self.check_view(number, range.start.saturating_sub(begin)..range.end.saturating_sub(begin));
                }
            }
        }
    }

    /// Returns the numbers and first offsets of all views.
    fn begins(&self) -> Vec<(usize, usize)> {
        let views = self.views.iter().enumerate();
        views.filter_map(|(number, open)| Some((number, open.as_ref()?.begin))).collect()
    }

    fn page_bytes(&self) -> usize {
        self.cache.page().bytes()
    }

    /// Returns offset and length of the step's range. Its end may lie up to a block behind the maximum.
    fn range(&self, step: &Step) -> (usize, usize) {
        let at = step.offset(self.page_bytes(), MAX_FILE_BYTES);
        (at, step.len_bytes(self.page_bytes()).min(MAX_FILE_BYTES + BLOCK_BYTES - at))
    }

    fn make_step(&mut self, step: &Step) {
        let (at, len) = self.range(step);
        let offset = at as u64;
        match step.call {
            Call::Open => {
                self.drop_view(step.view);
                self.views[step.view] = Some(Rc::new(self.open(step.byte, at, len)));
            }
            Call::Drop => self.drop_view(step.view),
            Call::WriteToView => self.write_to_view(step),
            Call::Lock => self.lock(step),
            Call::Unlock => self.unlock(),
            Call::Read | Call::Prefault => self.check_view(step.view, at..at + len),
            Call::Write => {
                let len = len.min(MAX_FILE_BYTES - at);
                assert_eq!(self.file.write_at(&vec![step.byte; len], offset).unwrap(), len);
                if len > 0 {
                    self.is_tail_written &= at + len <= self.bytes.len();
                    self.bytes.resize(self.bytes.len().max(at + len), 0);
                    self.bytes[at..at + len].fill(step.byte);
                }
            }
            Call::WritePinned => match self.file.pin(offset) {
                Ok(pin) => {
                    let len = len.min(pin.len_bytes()).min(self.bytes.len() - at);
                    pin.write_at(&vec![step.byte; len], 0).unwrap();
                    self.bytes[at..at + len].fill(step.byte);
                }
                Err(error) => assert!(matches!(error, Error::PastEnd { .. }) && at >= self.bytes.len(), "{error:?}"),
            },
            Call::Truncate => {
                self.note_removal();
                self.is_tail_written &= at == self.bytes.len();
                self.file.truncate(offset).unwrap();
                self.bytes.resize(at, 0);
            }
            Call::Remove if self.store.is_none() => {
                self.note_removal();
                self.file.punch_hole(offset, len as u64).unwrap();
                self.zero(at..at + len);
            }
            Call::Remove | Call::Zero => {
                self.file.zero_range(offset, len as u64).unwrap();
                self.zero(at..at + len);
            }
            // A prefaulted folio is pinned.
            Call::Split => drop(self.file.split(offset).map_err(|error| self.assert_busy(&error))),
            Call::Collapse => drop(self.file.collapse(offset).map_err(|error| {
                let is_full = matches!(error, Error::NoMemory { .. });
                if !is_full {
                    self.assert_busy(&error);
                }
            })),
            Call::Sweep => {
                self.cache.collapse_waiting(usize::MAX);
                self.cache.split_sparse_waiting(usize::MAX);
            }
            // A sync waits for the end of pins.
            Call::Sync if self.is_prefaulted => {}
            Call::Sync => self.sync(),
            Call::Evict => self.evict(),
        }
        assert_eq!(self.file.size_bytes() as usize, self.bytes.len());
    }

    fn assert_busy(&self, error: &Error) {
        assert!(self.is_prefaulted && matches!(error, Error::Busy { .. }), "{error:?}");
    }

    fn zero(&mut self, range: Range<usize>) {
        let end = range.end.min(self.bytes.len());
        if range.start < end {
            self.bytes[range.start..end].fill(0);
        }
    }

    fn sync(&self) {
        self.file.sync().unwrap();
        assert_eq!(self.file.dirty_bytes(), 0, "nothing is dirty after a sync");
        if let Some(store) = &self.store {
            assert!(store.bytes() == self.bytes, "the store has the bytes of the file");
        }
    }

    /// Evicts the pages of the file that are neither pinned nor dirty, and frees memory that no page uses.
    fn evict(&self) {
        let mut bytes = vec![0; BLOCK_BYTES / 2];
        let mut at = 0;
        while at < self.filler.size_bytes() {
            at += self.filler.read_at(&mut bytes, at).unwrap() as u64;
        }
        self.cache.shrink();
        self.check_lock();
    }

    fn note_removal(&mut self) {
        self.is_removed = true;
        self.lock.iter_mut().for_each(|lock| lock.is_removed = true);
    }

    fn open(&self, kind: u8, at: usize, len: usize) -> OpenView {
        let (begin, len) = (at / os_page_bytes() * os_page_bytes(), len.max(1));
        let range = begin as u64..(begin + len) as u64;
        let view = match kind / 2 % 3 {
            0 => AnyView::ReadOnly(self.file.view(range).unwrap()),
            1 => AnyView::Writable(self.file.view_mut(range).unwrap()),
            _ => AnyView::Private(self.file.view_private(range).unwrap()),
        };
        assert_eq!(view.len_bytes(), len.next_multiple_of(os_page_bytes()));
        OpenView { view, begin, own_pages: RefCell::default() }
    }

    fn drop_view(&mut self, number: usize) {
        self.views[number] = None;
        self.lock.take_if(|lock| lock.view == number);
    }

    /// Returns the step's range in a view, which is not longer than [`MAX_KEPT_BYTES`].
    fn range_to_keep(&self, step: &Step, open: &OpenView) -> Range<usize> {
        let (at, len) = self.range(step);
        let at = at % open.view.len_bytes();
        at..(at + len.min(MAX_KEPT_BYTES)).min(open.view.len_bytes())
    }

    /// Returns the indices of the pages in a range of a view.
    fn pages(&self, open: &OpenView, range: &Range<usize>) -> Range<usize> {
        let page_bytes = self.page_bytes();
        let (start, end) = (open.begin + range.start, open.begin + range.end);
        if range.is_empty() { 0..0 } else { start / page_bytes..end.div_ceil(page_bytes) }
    }

    /// Returns the pages in a range of a view up to the first one that begins behind the end of the file and does not
    /// belong to the view. Only these can be prefaulted. A range with an OS page behind the end has none, except in a private
    /// view.
    fn pages_inside(&self, open: &OpenView, range: &Range<usize>) -> Range<usize> {
        let pages = self.pages(open, range);
        let is_private = matches!(open.view, AnyView::Private(_));
        if !is_private && open.begin + range.end > self.bytes.len().next_multiple_of(os_page_bytes()) {
            return pages.start..pages.start;
        }
        let own_pages = open.own_pages.borrow();
        let is_inside = |page: usize| {
            own_pages.contains_key(&page) || (page * self.page_bytes()).max(open.begin) < self.bytes.len()
        };
        pages.start..pages.clone().find(|page| !is_inside(*page)).unwrap_or(pages.end)
    }

    /// Records that pages belong to a private view from now on.
    fn copy_pages(&self, open: &OpenView, pages: Range<usize>) {
        for page in pages {
            let page_bytes = self.page_bytes();
            open.own_pages.borrow_mut().entry(page).or_insert_with(|| {
                let range = (page * page_bytes).min(self.bytes.len())..((page + 1) * page_bytes).min(self.bytes.len());
                let mut bytes = self.bytes[range].to_vec();
                bytes.resize(page_bytes, 0);
                bytes
            });
        }
    }

    /// Prefaults a range of a view, and makes `steps` while it stays mapped.
    fn prefault(&mut self, step: &Step, steps: &[Step]) {
        let Some(open) = self.views[step.view].clone() else { return self.make_steps(steps) };
        let range = self.range_to_keep(step, &open);
        let (pages, inside) = (self.pages(&open, &range), self.pages_inside(&open, &range));
        let is_written = step.byte & 8 != 0 && !self.is_tail_written;
        let result = match &open.view {
            AnyView::Writable(view) if is_written => view.prefault_mut(range.clone()),
            AnyView::Private(view) if is_written => {
                let result = view.prefault_mut(range.clone());
                self.copy_pages(&open, inside.clone());
                result
            }
            view => view.prefault(range.clone()),
        };
        let prefaulted = match result {
            Ok(prefaulted) => prefaulted,
            Err(error) => {
                assert!(inside != pages && matches!(error, Error::PastEnd { .. }), "{error:?}");
                return self.make_steps(steps);
            }
        };
        assert_eq!(inside, pages, "{range:?} was prefaulted");
        let is_writable = is_written && !matches!(open.view, AnyView::ReadOnly(_));
        let is_mapped = |addr: usize| if is_writable { fault::is_writable(addr) } else { fault::is_readable(addr) };
        let end = range.end.min(self.bytes.len().saturating_sub(open.begin));
        let mut addresses = (range.start..end).step_by(os_page_bytes()).map(|at| open.addr(at) as usize);
        assert!(addresses.clone().all(is_mapped), "system calls can use the range");
        (self.is_prefaulted, self.is_removed) = (true, false);
        self.make_steps(steps);
        self.is_prefaulted = false;
        assert!(self.is_removed || addresses.all(is_mapped), "the range stays mapped");
        drop(prefaulted);
    }

    fn lock(&mut self, step: &Step) {
        let Some(open) = self.views[step.view].clone() else { return };
        if self.lock.is_some() {
            return;
        }
        let range = self.range_to_keep(step, &open);
        match open.view.lock(range.clone()) {
            Ok(()) => {
                assert_eq!(self.pages(&open, &range), self.pages_inside(&open, &range), "{range:?} was locked");
                self.lock = Some(Lock { view: step.view, range, is_removed: false });
            }
            Err(error) => {
                assert_ne!(self.pages(&open, &range), self.pages_inside(&open, &range));
                assert!(matches!(error, Error::PastEnd { .. }), "{error:?}");
            }
        }
    }

    fn unlock(&mut self) {
        let Some(Lock { view, range, .. }) = self.lock.take() else { return };
        let Some(open) = &self.views[view] else { return };
        open.view.unlock(range.clone()).unwrap();
        assert!(matches!(open.view.unlock(range), Err(Error::WrongState { .. })));
    }

    /// Asserts that the pages of the locked range are in memory.
    fn check_lock(&self) {
        let Some(Lock { view, range, is_removed: false }) = &self.lock else { return };
        let Some(open) = &self.views[*view] else { return };
        for page in self.pages(open, range) {
            let offset = (page * self.page_bytes()) as u64;
            let is_present = || self.file.pin_present(offset).unwrap().is_some();
            assert!(open.own_pages.borrow().contains_key(&page) || is_present(), "page {page} was evicted");
        }
    }

    /// Writes to a view, up to the first OS page that is not accessible. A write to that page must raise `SIGBUS`.
    fn write_to_view(&mut self, step: &Step) {
        let Some(open) = self.views[step.view].clone() else { return };
        let (at, len) = self.range(step);
        let start = at % open.view.len_bytes();
        let wanted_end = (start + len.min(BLOCK_BYTES)).min(open.view.len_bytes());
        let end = self.accessible_end(&open, start, wanted_end);
        let bytes = vec![step.byte; end - start];
        match &open.view {
            AnyView::ReadOnly(_) => return,
            AnyView::Writable(view) => {
                if end - start == 8 && start.is_multiple_of(8) {
                    view.atomic_u64(start).store(u64::from_ne_bytes([step.byte; 8]), SeqCst);
                } else {
                    view.write_at(&bytes, start);
                }
                let range = open.begin + start..(open.begin + end).min(self.bytes.len());
                self.is_tail_written |= open.begin + end > self.bytes.len();
                if !range.is_empty() {
                    self.bytes[range].fill(step.byte);
                }
            }
            // The copy of the last page would have unknown bytes.
            AnyView::Private(_) if self.is_tail_written => return,
            AnyView::Private(view) => {
                view.write_at(&bytes, start);
                let pages = self.pages(&open, &(start..end));
                self.copy_pages(&open, pages.clone());
                let mut own_pages = open.own_pages.borrow_mut();
                for page in pages {
                    let page_start = page * self.page_bytes();
                    let from = (open.begin + start).max(page_start) - page_start;
                    let to = (open.begin + end - page_start).min(self.page_bytes());
                    own_pages.get_mut(&page).unwrap()[from..to].fill(step.byte);
                }
                assert_eq!(view.copied_bytes() as usize, own_pages.len() * self.page_bytes());
            }
        }
        if end < wanted_end && self.accessible_end(&open, end, wanted_end) == end {
            // SAFETY: the address lies in the view. The handler of `assert_sigbus` makes the page accessible.
            assert_sigbus(open.addr(end), |byte| unsafe { byte.write_volatile(1) });
        }
    }

    /// Compares a range of the file with the model.
    fn check_file(&self, range: Range<usize>) {
        let mut found = vec![0xEE; range.len()];
        let count = self.file.read_at(&mut found, range.start as u64).unwrap();
        let end = range.end.min(self.bytes.len());
        assert!(found[..count] == *self.bytes.get(range.start..end).unwrap_or_default(), "{range:?} of the file");
    }

    /// Returns the end of the accessible bytes of a view that begin at `start`, at most `end`. A page that belongs to the
    /// view is accessible as a whole, others up to the end of the file's last OS page.
    fn accessible_end(&self, open: &OpenView, start: usize, end: usize) -> usize {
        let in_file = self.bytes.len().next_multiple_of(os_page_bytes()).saturating_sub(open.begin);
        let own_pages = open.own_pages.borrow();
        let mut at = start;
        while at < end {
            let page = (open.begin + at) / self.page_bytes();
            if own_pages.contains_key(&page) {
                at = (page + 1) * self.page_bytes() - open.begin;
            } else if at < in_file {
                at = ((page + 1) * self.page_bytes() - open.begin).min(in_file);
            } else {
                break;
            }
        }
        at.min(end).max(start)
    }

    /// Returns the bytes that a view must show in an accessible range.
    fn expected(&self, open: &OpenView, range: &Range<usize>) -> Vec<u8> {
        let (first, end) = (open.begin + range.start, open.begin + range.end);
        let mut bytes = self.bytes.get(first..end.min(self.bytes.len())).unwrap_or_default().to_vec();
        bytes.resize(range.len(), 0);
        for (page, own) in open.own_pages.borrow().range(first / self.page_bytes()..end.div_ceil(self.page_bytes())) {
            let page_start = page * self.page_bytes();
            let (from, to) = (first.max(page_start), end.min(page_start + self.page_bytes()));
            if from < to {
                bytes[from - first..to - first].copy_from_slice(&own[from - page_start..to - page_start]);
            }
        }
        bytes
    }

    /// Compares a range of a view with the model. An access to the first byte that is not accessible must raise `SIGBUS`.
    fn check_view(&self, number: usize, range: Range<usize>) {
        let Some(open) = self.views[number].as_deref() else { return };
        let (start, end) = (range.start, range.end.min(open.view.len_bytes()));
        if start >= end {
            return;
        }
        let accessible = start..self.accessible_end(open, start, end);
        let mut found = vec![0xEE; accessible.len()];
        open.view.read_at(&mut found, start);
        let mut expected = self.expected(open, &accessible);
        // Only the last OS page of the file can have bytes of unknown value. A page of a private view has none.
        let last_page = self.bytes.len() / self.page_bytes();
        if self.is_tail_written && !open.own_pages.borrow().contains_key(&last_page) {
            let tail_end = self.bytes.len().next_multiple_of(os_page_bytes());
            let in_found = |offset: usize| offset.saturating_sub(open.begin + start).min(found.len());
            let tail = in_found(self.bytes.len())..in_found(tail_end);
            expected[tail.clone()].copy_from_slice(&found[tail]);
        }
        let wrong = (0..found.len()).find(|at| found[*at] != expected[*at]);
        assert_eq!(wrong, None, "the first wrong byte of view {number} in {accessible:?}");
        if accessible.end < end {
            // SAFETY: the address lies in the view. The handler of `assert_sigbus` makes the page accessible.
            assert_sigbus(open.addr(accessible.end), |byte| _ = unsafe { byte.read_volatile() });
            assert!(open.view.take_error().is_none(), "an access behind the end is no error of the store");
        }
    }
}
