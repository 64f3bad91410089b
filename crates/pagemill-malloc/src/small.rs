//! jemalloc, which serves sizes below 64 KiB: its settings, its extents in the arena, its shrinker.
//!
//! jemalloc's own decay is off (`dirty_decay_ms:-1`), because reclaim purges on request and by age
//! ([`ExtentShrinker`]). An extent is one block (`retain_grow_limit`), so that it can be exactly one huge page.
#![allow(unsafe_code)] // jemalloc and its hooks

use crate::globals::{assert_fatal, debug_assert_fatal};
use crate::{fork, globals};
use pagemill_core::reclaim::aging::LeastOver;
use pagemill_core::reclaim::{Cost, Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Lock;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::clock;
use pagemill_sys::file::Text;
use pagemill_volatile::Base;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tikv_jemalloc_sys as je;

/// The arena index that means all arenas: jemalloc's `MALLCTL_ARENAS_ALL`.
const ALL_ARENAS: usize = 4096;

/// The page size with which jemalloc was built.
const JEMALLOC_PAGE_BYTES: usize = 4096;

/// Maximum number of jemalloc arenas. Each costs some ten microseconds when jemalloc starts.
const MAX_ARENAS: usize = 16;

/// The text of jemalloc's settings. jemalloc reads this symbol when it starts.
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static SETTINGS: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

/// Number of jemalloc arenas; 0 before [`start_jemalloc`].
static ARENA_COUNT: AtomicUsize = AtomicUsize::new(0);

/// jemalloc's table of extent hooks, which threads may share.
struct Hooks(je::extent_hooks_t);
// SAFETY: the value consists of function pointers that never change.
unsafe impl Sync for Hooks {}

/// The extent hooks of all jemalloc arenas.
static HOOKS: Hooks = Hooks(je::extent_hooks_t {
    alloc: Some(alloc_extent),
    dalloc: Some(retain_extent),
    destroy: None,
    commit: Some(commit_pages),
    decommit: Some(decommit_pages),
    purge_lazy: None,
    purge_forced: None,
    split: Some(split_extent),
    merge: Some(merge_extents),
});

/// Extent hook: allocates addresses for an extent. The addresses read zero and have no memory until they are committed.
unsafe extern "C" fn alloc_extent(
    _hooks: *mut je::extent_hooks_t,
    new_addr: *mut c_void,
    size: usize,
    align: usize,
    zero: *mut bool,
    is_committed: *mut bool,
    _arena: c_uint,
) -> *mut c_void {
    let Some(pagemill) = globals::pagemill() else { return ptr::null_mut() };
    if !new_addr.is_null() {
        return ptr::null_mut();
    }
    let Ok(addr) = pagemill.instance.arena.extent(size, align) else { return ptr::null_mut() };
    assert_fatal!(addr.is_multiple_of(align));
    assert_fatal!(addr >= pagemill.instance.arena.base());
    assert_fatal!(addr + size <= pagemill.heap.base());
    // SAFETY: jemalloc passes pointers to two flags, and this call has just carved the extent.
    unsafe {
        if *is_committed && pagemill.instance.arena.overcommit_extent(addr, size).is_err() {
            return ptr::null_mut();
        }
        *zero = true;
    }
    addr as *mut c_void
}

/// Extent hook for freeing: reports a failure, so that jemalloc retains the addresses.
unsafe extern "C" fn retain_extent(
    _hooks: *mut je::extent_hooks_t,
    _addr: *mut c_void,
    _size: usize,
    _is_committed: bool,
    _arena: c_uint,
) -> bool {
    true
}

/// Extent hook: charges pages of an extent and makes them usable.
unsafe extern "C" fn commit_pages(
    _hooks: *mut je::extent_hooks_t,
    addr: *mut c_void,
    size: usize,
    offset: usize,
    len: usize,
    _arena: c_uint,
) -> bool {
    assert_fatal!(len <= size && offset <= size - len);
    let Some(pagemill) = fork::pagemill_of_process() else { return true };
    // SAFETY: the pages are in an extent of `alloc_extent`, and jemalloc commits only pages that are not committed.
    let result = unsafe { pagemill.instance.arena.commit(addr as usize + offset, len) };
    if pagemill.instance.helper.is_due() {
        globals::take_large_path_next();
    }
    result.is_err()
}

/// Extent hook: decommits pages that jemalloc no longer uses.
unsafe extern "C" fn decommit_pages(
    _hooks: *mut je::extent_hooks_t,
    addr: *mut c_void,
    size: usize,
    offset: usize,
    len: usize,
    _arena: c_uint,
) -> bool {
    assert_fatal!(len <= size && offset <= size - len);
    let Some(pagemill) = fork::pagemill_of_process() else { return true };
    // SAFETY: the pages are committed, and jemalloc does not need their contents any more.
    unsafe { pagemill.instance.arena.decommit(addr as usize + offset, len) };
    false
}

/// Extent hook: allows jemalloc to split an extent. The arena has no state for each extent.
unsafe extern "C" fn split_extent(
    _hooks: *mut je::extent_hooks_t,
    _addr: *mut c_void,
    _size: usize,
    _size_a: usize,
    _size_b: usize,
    _is_committed: bool,
    _arena: c_uint,
) -> bool {
    false
}

/// Extent hook: allows jemalloc to merge adjacent extents.
unsafe extern "C" fn merge_extents(
    _hooks: *mut je::extent_hooks_t,
    _addr_a: *mut c_void,
    _size_a: usize,
    _addr_b: *mut c_void,
    _size_b: usize,
    _is_committed: bool,
    _arena: c_uint,
) -> bool {
    false
}

/// The Pagemill whose arena serves jemalloc's `mmap` calls while jemalloc starts; null at other times.
static BOOTSTRAP_PAGEMILL: AtomicPtr<Base> = AtomicPtr::new(ptr::null_mut());

unsafe extern "C" {
    /// The C library's `mmap`; the linker option `--wrap` defines this name.
    fn __real_mmap(
        addr: *mut c_void,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: libc::off_t,
    ) -> *mut c_void;
}

/// Replaces the calls of `mmap` in this library. While jemalloc starts, takes the memory from the arena.
///
/// jemalloc maps memory before its hooks can be set, and later also serves the program from it. So that memory must be
/// in the arena, too.
///
/// # Safety
///
/// As `mmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __wrap_mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the pointer is null or refers to a value that is never freed.
    if let Some(pagemill) = unsafe { BOOTSTRAP_PAGEMILL.load(Relaxed).as_ref() }
        && addr.is_null()
        && fd == -1
        && let Ok(extent) = pagemill.instance.arena.extent(len, BLOCK_BYTES)
        // SAFETY: this call has just carved the extent.
        && unsafe { pagemill.instance.arena.overcommit_extent(extent, len) }.is_ok()
    {
        return extent as *mut c_void;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { __real_mmap(addr, len, prot, flags, fd, offset) }
}

/// Calls `mallctl` of jemalloc; returns whether the call succeeded.
fn call_mallctl(name: &CStr, read: *mut c_void, read_len: *mut usize, write: *mut c_void, write_len: usize) -> bool {
    // SAFETY: the callers pass values of the type that jemalloc documents for the name.
    unsafe { je::mallctl(name.as_ptr(), read, read_len, write, write_len) == 0 }
}

/// Sets the `mallctl` value `name` of jemalloc, whose documented type must be `T`. Returns whether the call succeeded.
fn write_mallctl<T>(name: &CStr, mut value: T) -> bool {
    call_mallctl(name, ptr::null_mut(), ptr::null_mut(), (&raw mut value).cast(), size_of::<T>())
}

/// Calls `mallctl` for a command without arguments; returns whether the call succeeded.
fn call_mallctl_command(name: &CStr) -> bool {
    call_mallctl(name, ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0)
}

/// The buffer for the text of all settings of jemalloc.
type Settings = Text<2048>;

/// Writes the setting `slab_sizes`: slabs of about 32 KiB, where jemalloc's default is mostly one page.
///
/// Fewer slabs are created, and returning them takes an eighth of the time. A large slab costs no memory by itself,
/// because its pages become resident on first touch. Each size is a multiple of jemalloc's default for the class, so no
/// more is unused at its end. jemalloc chooses a smaller slab if it would have more than 512 objects.
fn write_slab_sizes(settings: &mut Settings) {
    const PAGES_BY_STEP: [(usize, usize); 4] = [(4, 8), (5, 10), (6, 9), (7, 7)];
    const MAX_SMALL_CLASS: usize = 14 << 10;
    let mut separator = "";
    for shift in 2..12 {
        for (step, pages) in PAGES_BY_STEP {
            let size = step << shift;
            if size <= MAX_SMALL_CLASS {
                let _ = write!(settings, "{separator}{size}-{size}:{pages}");
                separator = "|";
            }
        }
    }
}

/// Starts jemalloc with extents in the arena of `pagemill`. Returns whether that succeeded. jemalloc has not started
/// before, because its constructor was removed (build.rs).
pub fn start_jemalloc(pagemill: &'static Base) -> bool {
    static SETTINGS_TEXT: OnceLock<Settings> = OnceLock::new();
    assert_fatal!(ARENA_COUNT.load(Relaxed) == 0); // started once
    let arenas = pagemill_sys::process::cpu_count().clamp(1, MAX_ARENAS);
    let mut settings = Settings::new();
    let _ = write!(
        settings,
        "narenas:{arenas},dirty_decay_ms:-1,muzzy_decay_ms:0,retain:true,zero_realloc:free,\
         oversize_threshold:0,tcache_max:65536,tcache_nslots_large:8,slab_sizes:"
    );
    write_slab_sizes(&mut settings);
    SETTINGS.store(SETTINGS_TEXT.get_or_init(|| settings).as_c_str().as_ptr().cast_mut(), Relaxed);
    ARENA_COUNT.store(arenas, Relaxed);
    BOOTSTRAP_PAGEMILL.store(ptr::from_ref(pagemill).cast_mut(), Relaxed);
    for arena in 0..arenas {
        let Some(name) = Text::<64>::format(format_args!("arena.{arena}.extent_hooks")) else { continue };
        let is_set = write_mallctl(name.as_c_str(), (&raw const HOOKS.0).cast_mut());
        // The first call has started jemalloc and set the hooks of arena 0. Each further call creates an arena with the
        // hooks.
        BOOTSTRAP_PAGEMILL.store(ptr::null_mut(), Relaxed);
        if !is_set {
            return false;
        }
        if let Some(name) = Text::<64>::format(format_args!("arena.{arena}.retain_grow_limit")) {
            write_mallctl(name.as_c_str(), BLOCK_BYTES);
        }
    }
    true
}

/// Allocates from jemalloc. Returns null and sets `errno` if no memory is available.
pub fn allocate(size: usize, align: usize, is_zeroed: bool) -> *mut c_void {
    debug_assert_fatal!(align.is_power_of_two());
    // jemalloc's malloc guarantees an alignment of 8 bytes for the smallest sizes.
    let flags = if align <= 8 { 0 } else { je::MALLOCX_ALIGN(align) };
    // SAFETY: these functions accept any size. The alignment is a power of two.
    let pointer = unsafe {
        match (flags, is_zeroed) {
            (0, false) => je::malloc(size),
            (0, true) => je::calloc(1, size),
            (flags, _) => je::mallocx(size.max(1), flags | if is_zeroed { je::MALLOCX_ZERO } else { 0 }),
        }
    };
    debug_assert_fatal!((pointer as usize).is_multiple_of(align));
    if pointer.is_null() { globals::out_of_memory() } else { pointer }
}

/// Frees an allocation of jemalloc.
///
/// # Safety
///
/// The pointer is an allocation of jemalloc that is not used any more.
pub unsafe fn free(pointer: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { je::free(pointer) };
}

/// Returns the usable bytes of an allocation of jemalloc.
///
/// # Safety
///
/// The pointer is a live allocation of jemalloc.
pub unsafe fn usable_bytes(pointer: *mut c_void) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe { je::malloc_usable_size(pointer) }
}

/// Minimum number of aged bytes for which `shrink_aged` purges an arena or splits huge pages. Aged bytes were not
/// reused for the given age.
const WORTHWHILE_BYTES: u64 = 256 << 10;

/// Once this much memory is charged for jemalloc, the governor watches the limits even if no free memory is known,
/// because jemalloc reports its free bytes only on request.
const MIN_OBSERVED_BYTES: u64 = 8 << 20;

/// The shrinker of jemalloc's memory: it returns free pages that jemalloc caches, and stale pages (decommitted, but
/// resident) inside huge pages.
///
/// jemalloc can purge all free pages of an arena at once, or by a decay that runs in the program's threads. A `fork`
/// during such a decay would leave a child whose arena never purges again. So decay is off. [`Shrinker::shrink_aged`]
/// purges an arena when most of its free pages were not reused for the given age.
pub struct ExtentShrinker {
    pagemill: &'static Base,
    unused: [UnusedPages; MAX_ARENAS],
    /// The minimum, over an age, of the bytes of stale pages that splitting huge pages would free.
    sparse: LeastOver,
}

/// The free pages of one arena, and how long they were not reused.
#[derive(Default)]
struct UnusedPages {
    /// The minimum of the arena's free bytes over an age. At least as many bytes were not reused during that age.
    least: LeastOver,
    /// Number of calls of [`UnusedPages::is_due`] since the last purge in which half or more of the free bytes were
    /// old, but not enough for a purge. Reset to 0 when few bytes are old.
    postponed: AtomicU32,
}

impl UnusedPages {
    /// Value of `postponed` from which the arena is purged although only half of its free bytes are old.
    const MAX_POSTPONED: u32 = 20;

    /// Returns whether to purge the arena, which has `free_bytes` of free pages. True if most of the free bytes are old
    /// (not reused for `age`), or if half of them were old in more than [`Self::MAX_POSTPONED`] calls.
    fn is_due(&self, free_bytes: u64, age: Duration) -> bool {
        let old_bytes = self.least.least(free_bytes, clock::fine_ns(), age);
        assert_fatal!(old_bytes <= free_bytes);
        if old_bytes < WORTHWHILE_BYTES {
            self.postponed.store(0, Relaxed);
            return false;
        }
        let is_mostly_old = free_bytes - old_bytes <= WORTHWHILE_BYTES.max(old_bytes / 4);
        let is_due = is_mostly_old
            || (old_bytes >= free_bytes / 2 && self.postponed.fetch_add(1, Relaxed) >= Self::MAX_POSTPONED);
        if is_due {
            self.postponed.store(0, Relaxed);
            self.least.forget();
        }
        is_due
    }
}

impl ExtentShrinker {
    pub fn new(pagemill: &'static Base) -> Self {
        Self { pagemill, unused: Default::default(), sparse: LeastOver::default() }
    }

    /// Makes jemalloc return all free pages of an arena. Returns the number of bytes by which the charge fell.
    fn purge_arena(&self, arena: usize) -> u64 {
        let before = stats::get(Counter::Small);
        if let Some(name) = Text::<64>::format(format_args!("arena.{arena}.purge")) {
            call_mallctl_command(name.as_c_str());
        }
        before.saturating_sub(stats::get(Counter::Small))
    }

    /// Updates the counter of the bytes that splitting huge pages of extents would free.
    fn publish_sparse_extent_bytes(&self) {
        stats::set(Counter::SmallStale, self.pagemill.instance.arena.sparse_extent_bytes());
    }
}

impl Shrinker for ExtentShrinker {
    fn name(&self) -> &'static str {
        "small"
    }

    fn cost(&self) -> Cost {
        Cost::Nothing
    }

    fn may_nest(&self) -> bool {
        false
    }

    fn giveable_bytes(&self) -> u64 {
        stats::get(Counter::SmallFree) + stats::get(Counter::SmallStale)
    }

    fn may_have_more(&self) -> bool {
        stats::get(Counter::Small) >= MIN_OBSERVED_BYTES
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        // The lock is needed because jemalloc's purge does nothing while another thread is purging.
        let _guard = PURGE_LOCK.lock();
        call_mallctl_command(c"thread.tcache.flush");
        let mut freed = 0;
        for arena in 0..ARENA_COUNT.load(Relaxed) {
            if freed < want_bytes {
                freed += self.purge_arena(arena);
            }
        }
        if urgency >= Urgency::Split && freed < want_bytes {
            freed += self.pagemill.instance.arena.split_sparse_extents(want_bytes - freed);
        }
        stats::add(Counter::PurgeFreed, freed);
        stats::set(Counter::SmallFree, 0);
        self.publish_sparse_extent_bytes();
        freed
    }

    fn shrink_aged(&self, want_bytes: u64, age: Duration) -> Option<u64> {
        let _guard = PURGE_LOCK.lock();
        let mut freed = 0;
        update_statistics();
        for (arena, unused) in (0..ARENA_COUNT.load(Relaxed)).zip(&self.unused) {
            if unused.is_due(free_bytes_of(arena), age) && freed < want_bytes {
                freed += self.purge_arena(arena);
            }
        }
        let sparse_bytes = self.sparse.least(self.pagemill.instance.arena.sparse_extent_bytes(), clock::fine_ns(), age);
        if sparse_bytes >= WORTHWHILE_BYTES && freed < want_bytes {
            let split = self.pagemill.instance.arena.split_sparse_extents(sparse_bytes.min(want_bytes - freed));
            self.sparse.take(split);
            freed += split;
        }
        stats::add(Counter::PurgeFreed, freed);
        Some(freed)
    }

    fn measure(&self) {
        update_statistics();
        stats::set(Counter::SmallFree, free_bytes_of(ALL_ARENAS));
        self.publish_sparse_extent_bytes();
    }
}

/// Lock that is held during purges of jemalloc and during `fork`, so that a child does not inherit an unfinished purge.
static PURGE_LOCK: Lock = Lock::new();

/// Waits before `fork` until no thread purges jemalloc, and prevents further purges. Must be called before jemalloc's
/// locks are acquired.
pub fn before_fork() {
    PURGE_LOCK.acquire();
}

/// Allows purges of jemalloc again after `fork`, in both processes.
pub fn after_fork() {
    PURGE_LOCK.release();
}

/// Updates jemalloc's statistics. Must not be called while jemalloc holds its locks.
fn update_statistics() {
    write_mallctl(c"epoch", 1u64);
}

/// Returns the charged bytes of jemalloc's extents, without the free pages that jemalloc caches.
pub fn used_bytes() -> u64 {
    update_statistics();
    stats::get(Counter::Small).saturating_sub(free_bytes_of(ALL_ARENAS))
}

/// Returns the bytes of free pages that an arena of jemalloc caches, as of the last [`update_statistics`].
fn free_bytes_of(arena: usize) -> u64 {
    let (mut pages, mut len) = (0usize, size_of::<usize>());
    let Some(name) = Text::<64>::format(format_args!("stats.arenas.{arena}.pdirty")) else { return 0 };
    let is_known = call_mallctl(name.as_c_str(), (&raw mut pages).cast(), &raw mut len, ptr::null_mut(), 0);
    if is_known { (pages * JEMALLOC_PAGE_BYTES) as u64 } else { 0 }
}
