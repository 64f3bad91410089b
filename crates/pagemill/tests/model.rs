//! Model tests of the heap and of extents. A test makes random operations and checks all contents after each of them.
//!
//! Each run prints its seed, and `PAGEMILL_TEST_SEED` repeats a run. The charged bytes are compared with the resident
//! bytes that the kernel reports.
#![allow(unsafe_code)] // writes to, frees and resizes the allocations under test

use pagemill_core::Error;
use pagemill_core::arena::Layout;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, PageSize, os_page_bytes};
use pagemill_heap::MIN_BYTES;
use pagemill_sys::{clock, mem};
use pagemill_testbed::Testbed;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

/// Allocations up to this size are filled and compared completely. Larger allocations are written and compared at some
/// offsets only.
const FILLED_BYTES: usize = 1 << 20;

/// Number of offsets at which a larger allocation is written and compared.
const CHECKED_OFFSETS: u64 = 8;

/// Maximum number of bytes of live allocations.
const MAX_LIVE_BYTES: usize = 256 << 20;
/// Number of resident bytes above which the test purges free memory.
const MAX_RESIDENT_BYTES: u64 = 320 << 20;

/// Returns a number whose bits depend on all bits of `value`.
fn mix_bits(mut value: u64) -> u64 {
    value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

struct Random(u64);

impl Random {
    /// Returns a generator of pseudo-random numbers, and prints its seed. The seed is taken from `PAGEMILL_TEST_SEED`.
    /// Without that variable, it is new for each run and each `salt`.
    fn seeded(what: &str, salt: u64) -> Self {
        let named = std::env::var("PAGEMILL_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = named.unwrap_or_else(|| mix_bits(clock::fine_ns() ^ salt));
        println!("{what}: PAGEMILL_TEST_SEED={seed}");
        Self(seed)
    }

    fn next_number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix_bits(self.0)
    }

    fn random_below(&mut self, end: u64) -> u64 {
        self.next_number() % end.max(1)
    }

    /// Returns a size between `min` and `max` whose logarithm is uniformly distributed, so that small sizes are as
    /// frequent as large ones.
    fn size(&mut self, min: usize, max: usize) -> usize {
        let octaves = u64::from((max / min).ilog2());
        let low = min << self.random_below(octaves);
        (low + self.random_below(low as u64) as usize).min(max)
    }
}

/// What an allocation contains: its size, and the seed of the bytes that were written to it.
#[derive(Clone, Copy, Debug)]
struct Contents {
    size: usize,
    seed: u64,
}

impl Contents {
    fn byte(self) -> u8 {
        self.seed as u8 | 1
    }

    fn checked_words(self) -> impl Iterator<Item = (usize, u64)> {
        let last = self.size - 8;
        (0..CHECKED_OFFSETS).map(move |index| {
            let offset = match index {
                0 => 0,
                1 => last & !7,
                _ => (mix_bits(self.seed ^ index) as usize % last) & !7,
            };
            (offset, mix_bits(self.seed ^ offset as u64) | 1)
        })
    }

    /// Writes the contents to the allocation at `addr`.
    ///
    /// # Safety
    ///
    /// `addr` starts `size` bytes that only the caller uses.
    unsafe fn write(self, addr: usize) {
        if self.size <= FILLED_BYTES {
            // SAFETY: guaranteed by the caller.
            unsafe { std::ptr::write_bytes(addr as *mut u8, self.byte(), self.size) };
            return;
        }
        for (offset, mark) in self.checked_words() {
            // SAFETY: the word is inside the allocation, and slots are aligned.
            unsafe { ((addr + offset) as *mut u64).write(mark) };
        }
    }

    /// Asserts that the first `len` bytes of the allocation at `addr` are unchanged.
    ///
    /// # Safety
    ///
    /// `addr` starts `len` bytes that no thread changes meanwhile.
    unsafe fn check(self, addr: usize, len: usize, when: &str) {
        let len = len.min(self.size);
        if self.size <= FILLED_BYTES {
            // SAFETY: guaranteed by the caller.
            let bytes = unsafe { std::slice::from_raw_parts(addr as *const u8, len) };
            let expected = [self.byte(); 4096];
            let is_intact = bytes.chunks(expected.len()).all(|chunk| *chunk == expected[..chunk.len()]);
            assert!(is_intact, "{when}: contents of {addr:#x} changed ({self:?})");
            return;
        }
        for (offset, mark) in self.checked_words().filter(|(offset, _)| offset + 8 <= len) {
            // SAFETY: the bytes are inside the allocation.
            let found = unsafe { ((addr + offset) as *const u64).read() };
            assert_eq!(found, mark, "{when}: {addr:#x} + {offset:#x} changed ({self:?})");
        }
    }

    /// Returns how many bytes of the allocation at `addr` must at least be resident, because the test wrote these
    /// contents.
    fn least_resident_bytes(self, addr: usize) -> usize {
        let page = os_page_bytes();
        if self.size <= FILLED_BYTES {
            return (addr + self.size).next_multiple_of(page) - addr / page * page - page;
        }
        let mut pages: Vec<usize> = self.checked_words().map(|(offset, _)| offset / page).collect();
        pages.sort_unstable();
        pages.dedup();
        pages.len() * page
    }
}

/// Returns the resident bytes of a range, as the kernel reports them.
fn resident_bytes(base: usize, len: usize) -> u64 {
    const WINDOW_PAGES: usize = 1 << 16;
    let (page, mut pages) = (os_page_bytes(), vec![0u8; WINDOW_PAGES]);
    let windows = (base..base + len).step_by(WINDOW_PAGES * page);
    let counts = windows.map(|at| {
        let part = (base + len - at).min(WINDOW_PAGES * page);
        mem::resident(at, part, &mut pages).unwrap();
        pages[..part / page].iter().filter(|page| **page & 1 == 1).count()
    });
    (counts.sum::<usize>() * page) as u64
}

/// Returns the resident bytes of a range without the shared zero page. A read of an untouched page maps the zero page,
/// which costs no memory but is counted by [`resident_bytes`].
fn resident_bytes_without_zero_page(start: usize, end: usize) -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut is_inside, mut kib) = (false, 0);
    for line in text.lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((from, to)) = first.split_once('-') {
            let bound = |text| usize::from_str_radix(text, 16).unwrap();
            is_inside = bound(from) < end && bound(to) > start;
        } else if is_inside && first == "Rss:" {
            kib += line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        }
    }
    kib << 10
}

/// Asserts that a range contains only zeros.
///
/// # Safety
///
/// `addr` starts `size` bytes that no thread writes meanwhile.
unsafe fn assert_zero(addr: usize, size: usize, what: &str) {
    let zeros = [0u8; 4096];
    // Compares up to 4 MiB completely. In a larger range, compares the start of every 64 KiB, and the end.
    let step = if size <= 4 << 20 { zeros.len() } else { 64 << 10 };
    for offset in (0..size).step_by(step).chain([size - size.min(zeros.len())]) {
        let len = zeros.len().min(size - offset);
        // SAFETY: the bytes are inside the allocation.
        let bytes = unsafe { std::slice::from_raw_parts((addr + offset) as *const u8, len) };
        assert!(*bytes == zeros[..len], "{what}: {addr:#x} + {offset:#x} is not zero");
    }
}

struct LiveAllocation {
    contents: Contents,
    align: usize,
    usable: usize,
}

struct HeapModel {
    pagemill: &'static Testbed,
    random: Random,
    live: BTreeMap<usize, LiveAllocation>,
    /// Address at which the highest allocation so far ends.
    highest_end: usize,
    /// The memory limit in bytes.
    limit: u64,
    /// Number of requests that the heap has refused.
    refusals: usize,
    max_bytes: usize,
}

impl HeapModel {
    fn new(what: &str, layout: Layout, limit: u64, max_bytes: usize) -> Self {
        let pagemill = Testbed::new(layout, limit).unwrap();
        let random = Random::seeded(what, pagemill.heap.base() as u64);
        let highest_end = pagemill.heap.base();
        Self { pagemill, random, live: BTreeMap::new(), highest_end, limit, refusals: 0, max_bytes }
    }

    fn run(&mut self, steps: usize) {
        for step in 0..steps {
            let what = self.step();
            self.check(&format!("step {step}, {what}"));
            if step % 16 == 0 {
                self.compare_with_kernel(step);
            }
        }
        self.free_all();
    }

    fn step(&mut self) -> &'static str {
        let live_bytes: usize = self.live.values().map(|live| live.contents.size).sum();
        if live_bytes > MAX_LIVE_BYTES {
            return self.free();
        }
        if self.pagemill.account.resident() > MAX_RESIDENT_BYTES {
            return self.purge();
        }
        match self.random.random_below(100) {
            0..30 => self.allocate(),
            30..45 => self.allocate_zeroed(),
            45..70 => self.free(),
            70..85 => self.resize(),
            85..95 => self.purge(),
            _ => {
                self.pagemill.account.reconcile();
                "reconcile"
            }
        }
    }

    fn size_and_align(&mut self) -> (usize, usize) {
        let size = self.random.size(MIN_BYTES, self.max_bytes);
        let max_align = if self.max_bytes > 8 << 20 { 24 } else { 16 };
        (size, if self.random.random_below(3) == 0 { 1 << self.random.random_below(max_align) } else { 1 })
    }

    fn allocate(&mut self) -> &'static str {
        let (size, align) = self.size_and_align();
        match self.pagemill.heap.allocate(size, align) {
            Ok(allocation) => {
                let addr = allocation.addr.as_ptr() as usize;
                if allocation.is_zero {
                    // SAFETY: the memory was allocated just now, and only this test uses it.
                    unsafe { assert_zero(addr, size, "reported as zero") };
                }
                self.add_live(addr, size, align);
            }
            Err(error) => self.check_refusal(&error),
        }
        "allocate"
    }

    fn allocate_zeroed(&mut self) -> &'static str {
        let (size, align) = self.size_and_align();
        match self.pagemill.heap.allocate_zeroed(size, align) {
            Ok(addr) => {
                let addr = addr.as_ptr() as usize;
                // SAFETY: the memory was allocated just now, and only this test uses it.
                unsafe { assert_zero(addr, size, "allocate_zeroed") };
                self.add_live(addr, size, align);
            }
            Err(error) => self.check_refusal(&error),
        }
        "allocate_zeroed"
    }

    fn add_live(&mut self, addr: usize, size: usize, align: usize) {
        let contents = Contents { size, seed: self.random.next_number() };
        // SAFETY: the memory was allocated just now, and only this test uses it.
        unsafe { contents.write(addr) };
        let usable = self.pagemill.heap.usable_bytes(addr).unwrap();
        self.highest_end = self.highest_end.max(addr + usable);
        let before = self.live.insert(addr, LiveAllocation { contents, align, usable });
        assert!(before.is_none(), "{addr:#x} was handed out twice");
    }

    fn random_live(&mut self) -> Option<usize> {
        let index = self.random.random_below(self.live.len() as u64) as usize;
        self.live.keys().nth(index).copied()
    }

    fn free(&mut self) -> &'static str {
        if let Some(addr) = self.random_live() {
            self.live.remove(&addr);
            // SAFETY: the allocation was live and is not used again.
            unsafe { self.pagemill.heap.free(addr) }.unwrap();
        }
        "free"
    }

    fn resize(&mut self) -> &'static str {
        let Some(addr) = self.random_live() else { return "nothing to resize" };
        let (size, _) = self.size_and_align();
        // SAFETY: the allocation is live. Its old address is used again only if the call returns it.
        match unsafe { self.pagemill.heap.resize(addr, size) } {
            Ok(new) => {
                let old = self.live.remove(&addr).unwrap();
                let new = new.as_ptr() as usize;
                // SAFETY: the resized allocation, which only this test uses.
                unsafe { old.contents.check(new, size, "resize") };
                self.add_live(new, size, 1);
            }
            Err(error) => self.check_refusal(&error),
        }
        "resize"
    }

    fn purge(&mut self) -> &'static str {
        let urgency = if self.random.random_below(2) == 0 { Urgency::Request } else { Urgency::Limit };
        let want = if self.random.random_below(4) == 0 { u64::MAX } else { self.random.random_below(64 << 20) };
        let before = self.pagemill.account.resident();
        let freed = self.pagemill.heap.shrink(want, urgency);
        let after = self.pagemill.account.resident();
        // The measurement of resident memory during the purge may find more memory than was charged before.
        assert!(freed == 0 || after <= before.max(after.saturating_sub(freed) + freed), "{before} {freed} {after}");
        "purge"
    }

    fn check_refusal(&mut self, error: &Error) {
        let Error::NoMemory { wanted_bytes, used_bytes, limit_bytes } = *error else { panic!("{error}") };
        assert_eq!(limit_bytes, self.limit, "{error}");
        assert!(wanted_bytes > 0, "{error}");
        assert!(used_bytes.saturating_add(wanted_bytes) > limit_bytes, "refused although there was room: {error}");
        self.refusals += 1;
    }

    fn check(&self, when: &str) {
        let mut end = 0;
        for (&addr, live) in &self.live {
            assert!(addr >= end, "{when}: {addr:#x} overlaps the allocation before it");
            end = addr + live.usable;
            assert!(addr.is_multiple_of(live.align), "{when}: {addr:#x} is no multiple of {}", live.align);
            assert!(self.pagemill.heap.contains(addr) && self.pagemill.heap.contains(end - 1), "{when}: {addr:#x}");
            assert_eq!(self.pagemill.heap.usable_bytes(addr).unwrap(), live.usable, "{when}: {addr:#x}");
            assert!(live.usable >= live.contents.size, "{when}: {addr:#x}");
            // SAFETY: the allocation is live, and no thread writes to it.
            unsafe { live.contents.check(addr, live.contents.size, when) };
        }
    }

    /// Asserts that at least all bytes that were written are charged, and at most the bytes that the kernel reports as
    /// resident.
    fn compare_with_kernel(&self, step: usize) {
        self.pagemill.account.reconcile();
        let charged = self.pagemill.account.resident();
        let written: usize = self.live.iter().map(|(addr, live)| live.contents.least_resident_bytes(*addr)).sum();
        assert!(charged >= written as u64, "step {step}: {written} bytes are written, {charged} are charged");
        let there = resident_bytes(
            self.pagemill.heap.base(),
            (self.highest_end - self.pagemill.heap.base()).next_multiple_of(BLOCK_BYTES),
        );
        assert!(charged <= there, "step {step}: {charged} bytes are charged, {there} are resident");
    }

    /// Frees all allocations and purges all free memory. No bytes may be charged, free or resident afterwards.
    fn free_all(&mut self) {
        while !self.live.is_empty() {
            self.free();
        }
        self.pagemill.heap.shrink(u64::MAX, Urgency::Limit);
        self.pagemill.account.reconcile();
        let there = resident_bytes_without_zero_page(self.pagemill.heap.base(), self.highest_end);
        let (charged, free) = (self.pagemill.account.resident(), self.pagemill.heap.free_bytes());
        assert_eq!((charged, free, there), (0, 0, 0), "charged, free, resident bytes at the end");
    }
}

/// A heap in huge pages gets random operations. After each of them, contents and charges must be right.
#[test]
fn random_operations_on_huge_pages() {
    HeapModel::new("huge", Layout::for_test(), UNLIMITED, 64 << 20).run(350);
}

/// A heap in small pages, where slots are purged page by page, gets random operations. After each of them, contents and
/// charges must be right.
#[test]
fn random_operations_on_small_pages() {
    let layout = Layout { use_huge: false, ..Layout::for_test() };
    HeapModel::new("small pages", layout, UNLIMITED, 64 << 20).run(350);
}

/// A heap gets random operations. As in a program, it uses small pages at first, and huge pages from 32 MiB on. It has
/// three logical NUMA nodes. Contents and charges must be right.
#[test]
fn random_operations_on_both_kinds_of_pages() {
    let layout = Layout {
        huge_from_bytes: Layout::for_program().huge_from_bytes,
        nodes: Nodes::logical(3),
        ..Layout::for_test()
    };
    HeapModel::new("mixed, three nodes", layout, UNLIMITED, 64 << 20).run(300);
}

/// A heap with software pages of 64 KiB gets random operations. After each of them, contents and charges must be right.
#[test]
fn random_operations_on_software_pages() {
    let layout = Layout { use_huge: false, page: PageSize::new(64 << 10).unwrap(), ..Layout::for_test() };
    HeapModel::new("64 KiB pages", layout, UNLIMITED, 8 << 20).run(300);
}

/// All allocations are charged before they are used. The limit must never be exceeded by more than two blocks. A
/// request that was refused must succeed once there is room.
#[test]
fn the_limit_is_not_exceeded_by_charged_allocations() {
    const LIMIT: u64 = 48 << 20;
    let mut model = HeapModel::new("limit", Layout::for_test(), LIMIT, BLOCK_BYTES - 1);
    // A block that is split under the limit is overcommitted again. So an allocation that fits may exceed the limit by
    // two blocks.
    const OVERCOMMITTED_BYTES: u64 = 2 * BLOCK_BYTES as u64;
    for step in 0..1000 {
        if model.random.random_below(3) == 0 {
            model.allocate()
        } else {
            model.step()
        };
        model.pagemill.account.reconcile();
        let resident = model.pagemill.account.resident();
        assert!(resident <= LIMIT + OVERCOMMITTED_BYTES, "step {step}: {resident} bytes under a limit of {LIMIT}");
        model.check(&format!("step {step}"));
    }
    assert!(model.refusals > 0, "the limit was never reached");
    model.free_all();
    let all: Vec<_> = (0..20).map(|_| model.pagemill.heap.allocate(BLOCK_BYTES - 1, 1).unwrap()).collect();
    assert_eq!(all.len(), 20);
}

/// Some allocations are overcommitted. Resident memory may exceed the limit by at most the overcommitted bytes. The
/// errors of refused requests must have the amounts, and memory must become available again.
#[test]
fn only_overcommitted_memory_exceeds_the_limit() {
    const LIMIT: u64 = 64 << 20;
    let mut model = HeapModel::new("limit, overcommitted", Layout::for_test(), LIMIT, 32 << 20);
    has_collapsed();
    for step in 0..500 {
        if model.random.random_below(3) == 0 {
            model.allocate()
        } else {
            model.step()
        };
        let big = model.live.values().filter(|live| live.usable >= BLOCK_BYTES);
        let overcommitted: usize = big.map(|live| live.usable.next_multiple_of(BLOCK_BYTES)).sum();
        let resident = model.pagemill.account.resident();
        assert!(
            resident <= LIMIT + overcommitted as u64 || has_collapsed(),
            "step {step}: {resident} bytes, {overcommitted} overcommitted"
        );
        model.check(&format!("step {step}"));
    }
    assert!(model.refusals > 0, "the limit was never reached");
    model.free_all();
}

/// Returns whether the kernel has collapsed small pages of any process into huge pages since the first call of this
/// function. A collapse makes untouched pages resident.
fn has_collapsed() -> bool {
    let count = || std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/khugepaged/pages_collapsed").ok();
    static FIRST_COUNT: OnceLock<Option<String>> = OnceLock::new();
    *FIRST_COUNT.get_or_init(count) != count()
}

/// The expected state of a page of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    Unused,
    /// The page is committed and contains the value that was written to it.
    Committed(u64),
}

struct ExtentModel {
    pagemill: &'static Testbed,
    random: Random,
    addr: usize,
    pages: Vec<Page>,
}

impl ExtentModel {
    fn new(what: &str, layout: Layout) -> Self {
        let pagemill = Testbed::new(layout, UNLIMITED).unwrap();
        let random = Random::seeded(what, pagemill.heap.base() as u64);
        let len = 5 * BLOCK_BYTES;
        let addr = pagemill.arena.extent(len, 2 * BLOCK_BYTES).unwrap();
        has_collapsed();
        assert_eq!(addr % (2 * BLOCK_BYTES), 0);
        Self { pagemill, random, addr, pages: vec![Page::Unused; len / os_page_bytes()] }
    }

    fn addr_of(&self, page: usize) -> usize {
        self.addr + page * os_page_bytes()
    }

    /// Returns first page and number of pages of a run of pages that fulfil a condition. The search begins at a random
    /// page.
    fn find_page_run(&mut self, is_wanted: impl Fn(Page) -> bool) -> Option<(usize, usize)> {
        let start = self.random.random_below(self.pages.len() as u64) as usize;
        let longest = self.random.size(1, 1024);
        let len = self.pages[start..].iter().take(longest).take_while(|page| is_wanted(**page)).count();
        (len > 0).then_some((start, len))
    }

    fn commit(&mut self) {
        let Some((start, len)) = self.find_page_run(|page| page == Page::Unused) else { return };
        // SAFETY: pages of the model's extent that are not committed.
        unsafe { self.pagemill.arena.commit(self.addr_of(start), len * os_page_bytes()) }.unwrap();
        for page in start..start + len {
            let (addr, value) = (self.addr_of(page), self.random.next_number() | 1);
            // SAFETY: the pages were committed just now.
            unsafe {
                if page % 16 == 0 || len < 64 {
                    assert_zero(addr, os_page_bytes(), "commit");
                }
                assert_eq!((addr as *const u64).read(), 0, "commit of page {page}");
                (addr as *mut u64).write(value);
                ((addr + os_page_bytes() - 8) as *mut u64).write(value);
            }
            self.pages[page] = Page::Committed(value);
        }
    }

    fn decommit(&mut self) {
        let Some((start, len)) = self.find_page_run(|page| page != Page::Unused) else { return };
        // SAFETY: the pages are committed and are not used again.
        unsafe { self.pagemill.arena.decommit(self.addr_of(start), len * os_page_bytes()) };
        self.pages[start..start + len].fill(Page::Unused);
    }

    fn check(&self, step: usize) {
        let mut used = 0;
        for (index, page) in self.pages.iter().enumerate() {
            let Page::Committed(value) = *page else { continue };
            used += 1;
            let addr = self.addr_of(index);
            // SAFETY: the page is committed.
            let found = unsafe { [(addr as *const u64).read(), ((addr + os_page_bytes() - 8) as *const u64).read()] };
            assert_eq!(found, [value; 2], "step {step}: page {index} changed");
        }
        let charged = self.pagemill.account.resident();
        let there = resident_bytes(self.addr, self.pages.len() * os_page_bytes());
        assert!(charged >= (used * os_page_bytes()) as u64, "step {step}: {used} pages used, {charged} bytes charged");
        let spare = self.spare_bytes();
        assert!(there <= charged + spare || has_collapsed(), "step {step}: {there} resident, {charged} charged");
    }

    /// Returns how many bytes may be resident without a charge. If the allocation of a huge page fails, the kernel may
    /// leave the first small page of the block resident.
    fn spare_bytes(&self) -> u64 {
        let is_possible = stats::get(Counter::BlocksFallback) > 0;
        if is_possible { (self.pages.len() * 16) as u64 } else { 0 }
    }

    fn run(mut self, steps: usize) {
        for step in 0..steps {
            match self.random.random_below(9) {
                0..4 => self.commit(),
                4..8 => self.decommit(),
                _ => {
                    let want = self.random.random_below(4 << 20);
                    self.pagemill.arena.split_sparse_extents(want);
                }
            }
            self.check(step);
        }
        for page in 0..self.pages.len() {
            if self.pages[page] != Page::Unused {
                // SAFETY: the pages are committed and are not used again.
                unsafe { self.pagemill.arena.decommit(self.addr_of(page), os_page_bytes()) };
            }
        }
        assert_eq!(self.pagemill.account.resident(), 0, "everything is decommitted");
        let there = resident_bytes(self.addr, self.pages.len() * os_page_bytes());
        assert!(there <= self.spare_bytes(), "everything is decommitted, and {there} bytes are there");
    }
}

/// Extents in huge pages get random operations. Committed pages must keep their contents, and recommitted pages must
/// read as zeros.
#[test]
fn extents_in_huge_pages_keep_contents() {
    ExtentModel::new("extents, huge", Layout::for_test()).run(400);
}

/// Extents in small pages, and in software pages of three sizes, get random operations. Committed pages must keep their
/// contents, and recommitted pages must read as zeros.
#[test]
fn extents_in_small_pages_keep_contents() {
    for bytes in [os_page_bytes(), 64 << 10, 2 << 20, 8 << 20] {
        let layout = Layout { use_huge: false, page: PageSize::new(bytes).unwrap(), ..Layout::for_test() };
        ExtentModel::new(&format!("extents, {bytes} byte pages"), layout).run(200);
    }
}

/// A commit that would exceed the limit must be refused as a whole. After a decommit, a commit must succeed again.
#[test]
fn extents_over_the_limit_are_refused() {
    let pagemill = Testbed::new(Layout::for_test(), 8 << 20).unwrap();
    let addr = pagemill.arena.extent(32 << 20, 1).unwrap();
    let mut committed = 0;
    // SAFETY: pages of the extent above, behind those that are committed.
    let commit = |from: usize, bytes: usize| unsafe { pagemill.arena.commit(addr + from, bytes) };
    // A nested charge may exceed the limit once. The excess is then a debt, which cannot be paid in this test.
    while commit(committed, BLOCK_BYTES).is_ok() {
        committed += BLOCK_BYTES;
        pagemill.account.pay_debt();
        assert!(committed <= 12 << 20, "far over the limit");
    }
    let before = pagemill.account.resident();
    assert!(before >= 8 << 20);
    assert!(commit(committed, 3 * BLOCK_BYTES).is_err());
    assert_eq!(pagemill.account.resident(), before, "a refusal charges nothing");
    // SAFETY: the pages were committed above and are not used again.
    unsafe { pagemill.arena.decommit(addr, committed) };
    assert_eq!(pagemill.account.resident(), 0);
    commit(committed, BLOCK_BYTES).unwrap();
}

/// Allocations that one thread has passed on and that another thread may take.
struct SharedAllocations {
    allocations: Mutex<Vec<(usize, Contents)>>,
    stop: AtomicBool,
}

fn run_thread(pagemill: &Testbed, shared: &SharedAllocations, mut random: Random) {
    let mut own: Vec<(usize, Contents)> = Vec::new();
    while !shared.stop.load(Relaxed) {
        match random.random_below(8) {
            0..3 if own.len() < 12 => {
                let contents = Contents { size: random.size(MIN_BYTES, 8 << 20), seed: random.next_number() };
                let addr = if random.random_below(3) == 0 {
                    let addr = pagemill.heap.allocate_zeroed(contents.size, 1).unwrap().as_ptr() as usize;
                    // SAFETY: the memory was allocated just now, and only this test uses it.
                    unsafe { assert_zero(addr, contents.size, "allocate_zeroed") };
                    addr
                } else {
                    pagemill.heap.allocate(contents.size, 1).unwrap().addr.as_ptr() as usize
                };
                // SAFETY: the memory was allocated just now, and only this test uses it.
                unsafe { contents.write(addr) };
                own.push((addr, contents));
            }
            3 if !own.is_empty() => {
                let (addr, old) = own.swap_remove(random.random_below(own.len() as u64) as usize);
                let contents = Contents { size: random.size(MIN_BYTES, 8 << 20), seed: random.next_number() };
                // SAFETY: the allocation is live, and only this thread uses it.
                unsafe {
                    let addr = pagemill.heap.resize(addr, contents.size).unwrap().as_ptr() as usize;
                    old.check(addr, contents.size, "resize");
                    contents.write(addr);
                    own.push((addr, contents));
                }
            }
            4 => own.extend(shared.allocations.lock().unwrap().pop()),
            5 => shared.allocations.lock().unwrap().extend(own.pop()),
            _ if !own.is_empty() => {
                let (addr, contents) = own.swap_remove(random.random_below(own.len() as u64) as usize);
                // SAFETY: the allocation is live, and only this thread uses it.
                unsafe {
                    contents.check(addr, contents.size, "free");
                    pagemill.heap.free(addr).unwrap();
                }
            }
            _ => {}
        }
    }
    for (addr, contents) in own {
        // SAFETY: the allocation is live, and only this thread uses it.
        unsafe {
            contents.check(addr, contents.size, "the end");
            pagemill.heap.free(addr).unwrap();
        }
    }
}

fn use_heap_by_four_threads(what: &str, layout: Layout, millis: u64) {
    let pagemill = Testbed::new(layout, UNLIMITED).unwrap();
    let shared = SharedAllocations { allocations: Mutex::new(Vec::new()), stop: AtomicBool::new(false) };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (random, shared) = (Random::seeded(what, thread), &shared);
            scope.spawn(move || run_thread(pagemill, shared, random));
        }
        let (end, mut random) = (clock::fine_ns() + millis * 1_000_000, Random::seeded(what, 4));
        while clock::fine_ns() < end {
            let urgency = if random.random_below(2) == 0 { Urgency::Request } else { Urgency::Limit };
            let want = random.random_below(96 << 20);
            pagemill.heap.shrink(want, urgency);
            pagemill.account.reconcile();
            std::thread::yield_now();
        }
        shared.stop.store(true, Relaxed);
    });
    for (addr, contents) in shared.allocations.into_inner().unwrap() {
        // SAFETY: the allocation is live, and no other thread is left.
        unsafe {
            contents.check(addr, contents.size, "the end");
            pagemill.heap.free(addr).unwrap();
        }
    }
    pagemill.heap.shrink(u64::MAX, Urgency::Limit);
    pagemill.account.reconcile();
    let (charged, free) = (pagemill.account.resident(), pagemill.heap.free_bytes());
    assert_eq!(charged, 0, "{what}: bytes charged at the end");
    assert_eq!(free, 0, "{what}: free bytes at the end");
}

/// Four threads use the heap and pass allocations to each other, while free memory is purged. No contents may change,
/// and no memory may leak.
#[test]
fn purges_do_not_change_slots_that_threads_use() {
    use_heap_by_four_threads("stress, huge", Layout::for_test(), 1500);
}

/// Four threads use a heap in small pages and pass allocations to each other, while free memory is purged. No contents
/// may change, and no memory may leak.
#[test]
fn purges_do_not_change_slots_in_small_pages() {
    use_heap_by_four_threads("stress, small pages", Layout { use_huge: false, ..Layout::for_test() }, 1500);
}
