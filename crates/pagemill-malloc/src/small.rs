//! jemalloc for the sizes below 64 KiB: settings, extents from the arena, reclaim.
//!
//! Its own decay is off (`dirty_decay_ms:-1`): reclaim purges on request, and the helper by age ([`Extents`]). Its
//! extents grow block by block (`retain_grow_limit`), so that an extent and its huge page begin and end together.
#![allow(unsafe_code)] // jemalloc and its hooks

use crate::{large, start};
use pagemill_core::reclaim::aging::LeastOver;
use pagemill_core::reclaim::{Shrinker, Urgency};
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

/// `MALLCTL_ARENAS_ALL` of jemalloc.
const ALL_ARENAS: usize = 4096;

/// The page size that jemalloc uses.
const JEMALLOC_PAGE_BYTES: usize = 4096;

/// Maximum number of arenas: each costs some ten microseconds at start.
const MAX_ARENAS: usize = 16;

/// jemalloc reads its settings from this symbol when it starts.
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static SETTINGS: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

static ARENA_COUNT: AtomicUsize = AtomicUsize::new(0);

struct Hooks(je::extent_hooks_t);
// SAFETY: function pointers, never changed.
unsafe impl Sync for Hooks {}

static HOOKS: Hooks = Hooks(je::extent_hooks_t {
    alloc: Some(alloc),
    dalloc: Some(keep),
    destroy: None,
    commit: Some(commit),
    decommit: Some(decommit),
    purge_lazy: None,
    purge_forced: None,
    split: Some(split),
    merge: Some(merge),
});

/// Allocates an extent. New address space reads zero; it has no memory until committed.
unsafe extern "C" fn alloc(
    _hooks: *mut je::extent_hooks_t,
    new_addr: *mut c_void,
    size: usize,
    align: usize,
    zero: *mut bool,
    is_committed: *mut bool,
    _arena: c_uint,
) -> *mut c_void {
    let Some(pagemill) = start::pagemill() else { return ptr::null_mut() };
    if !new_addr.is_null() {
        return ptr::null_mut();
    }
    let Ok(addr) = pagemill.arena.extent(size, align) else { return ptr::null_mut() };
    // SAFETY: jemalloc passes two flags to be read and written; the extent was just taken.
    unsafe {
        if *is_committed && pagemill.arena.overcommit_extent(addr, size).is_err() {
            return ptr::null_mut();
        }
        *zero = true;
    }
    addr as *mut c_void
}

/// Reports that the extent could not be freed, so jemalloc retains the addresses.
unsafe extern "C" fn keep(
    _hooks: *mut je::extent_hooks_t,
    _addr: *mut c_void,
    _size: usize,
    _is_committed: bool,
    _arena: c_uint,
) -> bool {
    true
}

unsafe extern "C" fn commit(
    _hooks: *mut je::extent_hooks_t,
    addr: *mut c_void,
    _size: usize,
    offset: usize,
    len: usize,
    _arena: c_uint,
) -> bool {
    let Some(pagemill) = start::pagemill_of_process() else { return true };
    // SAFETY: jemalloc has pages committed that it has from `allocate`, and has not committed, or has decommitted.
    let result = unsafe { pagemill.arena.commit(addr as usize + offset, len) };
    if pagemill.helper.is_due(pagemill.account) {
        large::call_soon();
    }
    result.is_err()
}

unsafe extern "C" fn decommit(
    _hooks: *mut je::extent_hooks_t,
    addr: *mut c_void,
    _size: usize,
    offset: usize,
    len: usize,
    _arena: c_uint,
) -> bool {
    let Some(pagemill) = start::pagemill_of_process() else { return true };
    // SAFETY: jemalloc does not need the contents any more.
    unsafe { pagemill.arena.decommit(addr as usize + offset, len) };
    false
}

unsafe extern "C" fn split(
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

unsafe extern "C" fn merge(
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

/// The arena that serves jemalloc's own mappings while it starts.
static MAPPING_FROM: AtomicPtr<Base> = AtomicPtr::new(ptr::null_mut());

unsafe extern "C" {
    /// The C library's `mmap`, under the name that the linker gives it (`--wrap`).
    fn __real_mmap(
        addr: *mut c_void,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: libc::off_t,
    ) -> *mut c_void;
}

/// Replaces `mmap` in this library: mappings that jemalloc makes while it starts come from the arena, too.
///
/// jemalloc needs memory before its hooks can be set, and allocates from the rest of that later. Without this it would
/// be outside the arena for good.
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
    // SAFETY: null, or a reference to a value that is never freed.
    if let Some(pagemill) = unsafe { MAPPING_FROM.load(Relaxed).as_ref() }
        && addr.is_null()
        && fd == -1
        && let Ok(extent) = pagemill.arena.extent(len, BLOCK_BYTES)
        // SAFETY: an extent of its own, just taken.
        && unsafe { pagemill.arena.overcommit_extent(extent, len) }.is_ok()
    {
        return extent as *mut c_void;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { __real_mmap(addr, len, prot, flags, fd, offset) }
}

/// Calls `mallctl` of jemalloc; returns whether it succeeded.
fn control(name: &CStr, read: *mut c_void, read_len: *mut usize, write: *mut c_void, write_len: usize) -> bool {
    // SAFETY: the callers pass a value of the type that the name has.
    unsafe { je::mallctl(name.as_ptr(), read, read_len, write, write_len) == 0 }
}

fn act(name: &CStr) -> bool {
    control(name, ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0)
}

/// Room for all settings.
type Settings = Text<2048>;

/// Slabs of about 32 KiB instead of mostly one page: fewer slabs to make, and an eighth of the time to give back.
///
/// Their pages are faulted in on first touch, so a large slab costs no memory by itself. Each is a multiple of
/// jemalloc's own size for its class, so that no more is lost at its end. jemalloc takes less where a slab would hold
/// more than 512 objects.
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

/// Starts jemalloc, with extents from `pagemill`; returns whether that succeeded. It has not run before: its
/// constructor is left out (build.rs).
pub fn start(pagemill: &'static Base) -> bool {
    static TEXT: OnceLock<Settings> = OnceLock::new();
    let arenas = pagemill_sys::process::cpu_count().clamp(1, MAX_ARENAS);
    let mut settings = Settings::new();
    let _ = write!(
        settings,
        "narenas:{arenas},dirty_decay_ms:-1,muzzy_decay_ms:0,retain:true,zero_realloc:free,\
         oversize_threshold:0,tcache_max:65536,tcache_nslots_large:8,slab_sizes:"
    );
    write_slab_sizes(&mut settings);
    SETTINGS.store(TEXT.get_or_init(|| settings).as_c_str().as_ptr().cast_mut(), Relaxed);
    ARENA_COUNT.store(arenas, Relaxed);
    MAPPING_FROM.store(ptr::from_ref(pagemill).cast_mut(), Relaxed);
    for arena in 0..arenas {
        let mut hooks = (&raw const HOOKS.0).cast_mut();
        let Some(name) = Text::<64>::format(format_args!("arena.{arena}.extent_hooks")) else { continue };
        let hooks_ptr = (&raw mut hooks).cast();
        let is_told =
            control(name.as_c_str(), ptr::null_mut(), ptr::null_mut(), hooks_ptr, size_of::<*mut je::extent_hooks_t>());
        // The first call has started jemalloc and set the hooks of arena 0. The other arenas are created with the
        // hooks.
        MAPPING_FROM.store(ptr::null_mut(), Relaxed);
        if !is_told {
            return false;
        }
        let mut limit = BLOCK_BYTES;
        if let Some(name) = Text::<64>::format(format_args!("arena.{arena}.retain_grow_limit")) {
            let limit_ptr = (&raw mut limit).cast();
            control(name.as_c_str(), ptr::null_mut(), ptr::null_mut(), limit_ptr, size_of::<usize>());
        }
    }
    true
}

pub fn allocate(size: usize, align: usize, is_zeroed: bool) -> *mut c_void {
    // malloc aligns sizes up to 8 bytes to 8 only.
    let flags = if align <= 8 { 0 } else { je::MALLOCX_ALIGN(align) };
    // SAFETY: plain calls; jemalloc sets errno by itself except in mallocx.
    let pointer = unsafe {
        match (flags, is_zeroed) {
            (0, false) => je::malloc(size),
            (0, true) => je::calloc(1, size),
            (flags, _) => je::mallocx(size.max(1), flags | if is_zeroed { je::MALLOCX_ZERO } else { 0 }),
        }
    };
    if pointer.is_null() { large::out_of_memory() } else { pointer }
}

/// # Safety
///
/// An allocation of jemalloc's that is not used any more.
pub unsafe fn free(pointer: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { je::free(pointer) };
}

/// # Safety
///
/// An allocation of jemalloc's.
pub unsafe fn usable(pointer: *mut c_void) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe { je::malloc_usable_size(pointer) }
}

/// Less than this is not worth the calls.
const WORTHWHILE_BYTES: u64 = 256 << 10;

/// From this size on, limits are watched even if no free memory is known: jemalloc reports its free bytes only on
/// request.
const HIDDEN_FROM_BYTES: u64 = 8 << 20;

/// Gives back what the program freed: pages that jemalloc keeps for reuse, and stale pages inside huge pages.
///
/// jemalloc purges all pages of an arena at once, or by a decay that runs in the program's threads. A `fork` during
/// such a decay would leave a child whose arena never purges again. So only the helper purges: an arena whose pages
/// were not reused for the age, at a moment when few others are free.
pub struct Extents {
    pagemill: &'static Base,
    unused: [Unused; MAX_ARENAS],
    /// Stale pages in huge pages that a split would free.
    sparse: LeastOver,
}

/// Free pages of one arena.
#[derive(Default)]
struct Unused {
    least: LeastOver,
    /// Consecutive looks at which much was old, but much more was free.
    postponed: AtomicU32,
}

impl Unused {
    /// Maximum number of looks to wait for such a moment: two ages.
    const MOST_POSTPONED: u32 = 20;

    /// Whether to purge now, with `free_bytes` free: part of them was not reused for `age`.
    fn is_due(&self, free_bytes: u64, age: Duration) -> bool {
        let old_bytes = self.least.least(free_bytes, clock::fine_ns(), age);
        if old_bytes < WORTHWHILE_BYTES {
            self.postponed.store(0, Relaxed);
            return false;
        }
        let is_mostly_old = free_bytes - old_bytes <= WORTHWHILE_BYTES.max(old_bytes / 4);
        let is_due = is_mostly_old
            || (old_bytes >= free_bytes / 2 && self.postponed.fetch_add(1, Relaxed) >= Self::MOST_POSTPONED);
        if is_due {
            self.postponed.store(0, Relaxed);
            self.least.forget();
        }
        is_due
    }
}

impl Extents {
    pub fn new(pagemill: &'static Base) -> Self {
        Self { pagemill, unused: Default::default(), sparse: LeastOver::default() }
    }

    fn purge_arena(&self, arena: usize) -> u64 {
        let before = stats::get(Counter::Small);
        if let Some(name) = Text::<64>::format(format_args!("arena.{arena}.purge")) {
            act(name.as_c_str());
        }
        before.saturating_sub(stats::get(Counter::Small))
    }

    /// Records the pages that a split would free.
    fn note_stale(&self) {
        stats::set(Counter::SmallStale, self.pagemill.arena.sparse_extent_bytes());
    }
}

impl Shrinker for Extents {
    fn name(&self) -> &'static str {
        "small"
    }

    fn may_nest(&self) -> bool {
        false
    }

    fn giveable_bytes(&self) -> u64 {
        stats::get(Counter::SmallFree) + stats::get(Counter::SmallStale)
    }

    fn may_have_more(&self) -> bool {
        stats::get(Counter::Small) >= HIDDEN_FROM_BYTES
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        // A second jemalloc purger returns at once without result, while the first is still giving back.
        let _guard = PURGING.lock();
        act(c"thread.tcache.flush");
        let mut freed = 0;
        for arena in 0..ARENA_COUNT.load(Relaxed) {
            if freed < want_bytes {
                freed += self.purge_arena(arena);
            }
        }
        if urgency >= Urgency::Split && freed < want_bytes {
            freed += self.pagemill.arena.split_sparse_extents(want_bytes - freed);
        }
        stats::add(Counter::PurgeFreed, freed);
        stats::set(Counter::SmallFree, 0);
        self.note_stale();
        freed
    }

    fn shrink_aged(&self, want_bytes: u64, age: Duration) -> Option<u64> {
        let _guard = PURGING.lock();
        let mut freed = 0;
        refresh();
        for (arena, unused) in (0..ARENA_COUNT.load(Relaxed)).zip(&self.unused) {
            if unused.is_due(free_bytes_of(arena), age) && freed < want_bytes {
                freed += self.purge_arena(arena);
            }
        }
        let sparse_bytes = self.sparse.least(self.pagemill.arena.sparse_extent_bytes(), clock::fine_ns(), age);
        if sparse_bytes >= WORTHWHILE_BYTES && freed < want_bytes {
            let split = self.pagemill.arena.split_sparse_extents(sparse_bytes.min(want_bytes - freed));
            self.sparse.take(split);
            freed += split;
        }
        stats::add(Counter::PurgeFreed, freed);
        Some(freed)
    }

    fn measure(&self) {
        refresh();
        stats::set(Counter::SmallFree, free_bytes_of(ALL_ARENAS));
        self.note_stale();
    }
}

/// Held around purges of jemalloc, and across `fork`: a child would inherit an unfinished purge.
static PURGING: Lock = Lock::new();

/// Called before `fork`, outside jemalloc's locks: waits until no purge is under way.
pub fn before_fork() {
    PURGING.acquire();
}

/// Called after `fork`, in both processes.
pub fn after_fork() {
    PURGING.release();
}

/// Updates jemalloc's statistics. Must not be called while jemalloc holds its locks.
fn refresh() {
    let mut epoch = 1u64;
    control(c"epoch", ptr::null_mut(), ptr::null_mut(), (&raw mut epoch).cast(), size_of::<u64>());
}

/// Bytes of extents in use: all but the pages kept for reuse.
pub fn used_bytes() -> u64 {
    refresh();
    stats::get(Counter::Small).saturating_sub(free_bytes_of(ALL_ARENAS))
}

/// Bytes that an arena keeps for reuse, as of the last [`refresh`].
fn free_bytes_of(arena: usize) -> u64 {
    let (mut pages, mut len) = (0usize, size_of::<usize>());
    let Some(name) = Text::<64>::format(format_args!("stats.arenas.{arena}.pdirty")) else { return 0 };
    let is_known = control(name.as_c_str(), (&raw mut pages).cast(), &raw mut len, ptr::null_mut(), 0);
    if is_known { (pages * JEMALLOC_PAGE_BYTES) as u64 } else { 0 }
}
