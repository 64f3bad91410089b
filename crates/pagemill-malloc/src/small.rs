//! jemalloc for the sizes below 64 KiB: settings, extents from the arena, giving back.
//!
//! It returns memory when reclaim asks, never by time (`dirty_decay_ms:-1`).
//! Its extents grow block by block (`retain_grow_limit`), so that an extent and
//! the huge page behind it begin and end together.
#![allow(unsafe_code)] // jemalloc and its hooks

use crate::{slow, start};
use pagemill::Pagemill;
use pagemill::reclaim::{Shrinker, Urgency};
use pagemill::stats::{self, Counter};
use pagemill::sync::Lock;
use pagemill::units::BLOCK_BYTES;
use pagemill_sys::file::Text;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};
use tikv_jemalloc_sys as je;

/// `MALLCTL_ARENAS_ALL` of jemalloc.
const ALL_ARENAS: usize = 4096;

/// Most arenas: each costs some ten microseconds at start.
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

/// A new extent. New address space reads zero; nothing is behind it until committed.
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
    // SAFETY: jemalloc passes two flags to be read and written.
    unsafe {
        if *is_committed && pagemill.arena.lend_extent(addr, size).is_err() {
            return ptr::null_mut();
        }
        *zero = true;
    }
    addr as *mut c_void
}

/// "Could not be freed": jemalloc keeps the addresses for itself.
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
    let result = pagemill.arena.commit(addr as usize + offset, len);
    if pagemill.helper.is_due(pagemill.account) {
        slow::call_soon();
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
    // SAFETY: jemalloc gives the contents up.
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

/// The arena that jemalloc's own mappings are taken from while it starts.
static MAPPING_FROM: AtomicPtr<Pagemill> = AtomicPtr::new(ptr::null_mut());

unsafe extern "C" {
    /// The C library's `mmap`, under the name the linker gives it (`--wrap`).
    fn __real_mmap(
        addr: *mut c_void,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: libc::off_t,
    ) -> *mut c_void;
}

/// Takes the place of `mmap` in this library: what jemalloc maps while it starts comes from the arena, too.
///
/// It needs memory before it can be told where to get it, and hands out the
/// rest of that later; so it would be outside of the arena for good.
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
    // SAFETY: null, or a reference that stays.
    if let Some(pagemill) = unsafe { MAPPING_FROM.load(Relaxed).as_ref() }
        && addr.is_null()
        && fd == -1
        && let Ok(extent) = pagemill.arena.extent(len, BLOCK_BYTES)
        && pagemill.arena.lend_extent(extent, len).is_ok()
    {
        return extent as *mut c_void;
    }
    // SAFETY: the caller's promise.
    unsafe { __real_mmap(addr, len, prot, flags, fd, offset) }
}

/// Reads or does what jemalloc knows under a name; says whether it could.
fn control(name: &CStr, read: *mut c_void, read_len: *mut usize, write: *mut c_void, write_len: usize) -> bool {
    // SAFETY: the callers pass a value of the type that the name has.
    unsafe { je::mallctl(name.as_ptr(), read, read_len, write, write_len) == 0 }
}

fn act(name: &CStr) -> bool {
    control(name, ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0)
}

/// Room for all settings.
type Settings = Text<2048>;

/// Slabs of about 32 KiB instead of mostly one page: fewer of them to make, and an eighth of the time to give back.
///
/// Their pages come with the first touch, so a large slab costs no memory by
/// itself. Each is a multiple of jemalloc's own size for its class, so that no
/// more is lost at its end; jemalloc takes less where a slab would hold more
/// than 512 objects.
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

/// Starts jemalloc, with extents from `pagemill`, and says whether it could. It has not run before: its constructor is
/// left out (build.rs).
pub fn start(pagemill: &'static Pagemill) -> bool {
    static TEXT: OnceLock<Settings> = OnceLock::new();
    let arenas = pagemill_sys::process::cpu_count().clamp(1, MAX_ARENAS);
    let mut settings = Settings::new();
    let _ = write!(
        settings,
        "narenas:{arenas},dirty_decay_ms:-1,muzzy_decay_ms:0,retain:true,zero_realloc:free,\
         oversize_threshold:0,tcache_max:65536,slab_sizes:"
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
        // The first call has started jemalloc and told arena 0; the others are made with the hooks.
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
    // What malloc returns for up to 8 bytes is aligned to 8 only.
    let flags = if align <= 8 { 0 } else { je::MALLOCX_ALIGN(align) };
    // SAFETY: plain calls; jemalloc sets errno by itself except in mallocx.
    let pointer = unsafe {
        match (flags, is_zeroed) {
            (0, false) => je::malloc(size),
            (0, true) => je::calloc(1, size),
            (flags, _) => je::mallocx(size.max(1), flags | if is_zeroed { je::MALLOCX_ZERO } else { 0 }),
        }
    };
    if pointer.is_null() { slow::out_of_memory() } else { pointer }
}

/// # Safety
///
/// An allocation of jemalloc's that is not used any more.
pub unsafe fn free(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { je::free(pointer) };
}

/// # Safety
///
/// An allocation of jemalloc's.
pub unsafe fn usable(pointer: *mut c_void) -> usize {
    // SAFETY: the caller's promise.
    unsafe { je::malloc_usable_size(pointer) }
}

/// Gives back what the program freed: pages that jemalloc keeps for reuse.
pub struct Extents(pub &'static Pagemill);

impl Extents {
    fn purge_arena(&self, arena: usize) -> u64 {
        let before = stats::get(Counter::Small);
        if let Some(name) = Text::<64>::format(format_args!("arena.{arena}.purge")) {
            act(name.as_c_str());
        }
        before.saturating_sub(stats::get(Counter::Small))
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
        stats::get(Counter::SmallFree)
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        // jemalloc lets a second purger go at once with nothing, while the first is still giving back.
        let _guard = PURGING.lock();
        act(c"thread.tcache.flush");
        let mut freed = 0;
        for arena in 0..ARENA_COUNT.load(Relaxed) {
            if freed < want_bytes {
                freed += self.purge_arena(arena);
            }
        }
        if urgency == Urgency::Limit && freed < want_bytes {
            freed += self.0.arena.split_sparse_extents(want_bytes - freed);
        }
        stats::add(Counter::PurgeFreed, freed);
        stats::set(Counter::SmallFree, 0);
        freed
    }

    fn measure(&self) {
        measure();
    }
}

/// Held around purges of jemalloc, and across `fork`: a child would inherit one that nobody ends.
static PURGING: Lock = Lock::new();

/// Before `fork`, outside of jemalloc's locks: waits until no purge is under way.
pub fn before_fork() {
    PURGING.acquire();
}

/// After `fork`, on both sides.
pub fn after_fork() {
    PURGING.release();
}

/// Asks jemalloc how much it keeps for reuse. Not to be called while it holds its locks.
fn measure() {
    let mut epoch = 1u64;
    control(c"epoch", ptr::null_mut(), ptr::null_mut(), (&raw mut epoch).cast(), size_of::<u64>());
    let (mut pages, mut len) = (0usize, size_of::<usize>());
    let Some(name) = Text::<64>::format(format_args!("stats.arenas.{ALL_ARENAS}.pdirty")) else { return };
    if control(name.as_c_str(), (&raw mut pages).cast(), &raw mut len, ptr::null_mut(), 0) {
        stats::set(Counter::SmallFree, (pages * 4096) as u64);
    }
}
