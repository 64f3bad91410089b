//! A program while it is small: the C library's own malloc serves it.
//!
//! Most programs of a build, a test suite or a shell script hold a few hundred
//! KiB and end after milliseconds. To them another allocator is nothing but
//! its cost: a start, and pages of code and data that nobody else has. So
//! nothing is reserved, mapped or started until the program has *grown*: it
//! holds more than `PAGEMILL_AFTER` bytes, or has called for a while. From then
//! on new memory is Pagemill's. What the C library handed out goes back to it
//! when it is freed.
//!
//! Under a limit, with `PAGEMILL_CHECK`, and in a program at fixed addresses
//! (its heap would lie below the arena, where one comparison in `free` tells
//! jemalloc's memory), Pagemill serves from the first call on. Where addresses
//! are limited (`ulimit -v`, `-d`) the program stays young for good: an arena
//! keeps addresses for each size class, several times what it holds.
#![allow(unsafe_code)] // the C library's allocator

use crate::SMALL_END;
use pagemill::heap::MIN_BYTES;
use pagemill::reclaim::Account;
use pagemill_sys::process;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{
    AtomicBool, AtomicIsize, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};

/// A program holds less than this while it is small, unless `PAGEMILL_AFTER` says otherwise.
pub const DEFAULT_AFTER_BYTES: usize = 4 << 20;

/// With fewer addresses than this a program never grows.
const NARROW_BYTES: usize = 64 << 30;

/// Calls after which a program is no longer young, however little it holds. Large sizes count for more:
/// the C library may map and unmap them one by one.
const MAX_EFFORT: usize = 1 << 17;
const EFFORT_BYTES: usize = 64 << 10;

const CACHE_LINE_BYTES: usize = 64;

/// The tree is told of what is held in steps of this.
const CHARGE_STEP_BYTES: usize = 1 << 20;

/// Position-independent programs have their heaps above this, and the arena lies below.
const FIXED_ADDRESSES_END: usize = 1 << 44;

/// Somebody tells the account just now.
static IS_CHARGING: AtomicBool = AtomicBool::new(false);

/// The C library's functions by their number in [`FUNCTIONS`].
#[derive(Clone, Copy)]
enum Function {
    Malloc,
    Calloc,
    Realloc,
    Memalign,
    Free,
    UsableSize,
    Trim,
}

/// Their addresses; 0: not found. Names alone do not do: another allocator that the program is linked to exports the
/// same ones, `__libc_malloc` included.
static FUNCTIONS: [AtomicUsize; 7] = [const { AtomicUsize::new(0) }; 7];

fn address(function: Function) -> Option<usize> {
    let address = FUNCTIONS[function as usize].load(Relaxed);
    (address != 0).then_some(address)
}

/// The version under which the C library has had these functions since its first release for this processor.
const VERSION: &CStr = if cfg!(target_arch = "x86_64") { c"GLIBC_2.2.5" } else { c"GLIBC_2.17" };

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Finds the C library's functions, by their version: nobody else has that. Before anything else here is used.
///
/// It allocates nothing where they are found (`dlopen`, to ask the C library alone, would).
pub fn find_functions() {
    const NAMES: [&CStr; 7] =
        [c"malloc", c"calloc", c"realloc", c"memalign", c"free", c"malloc_usable_size", c"malloc_trim"];
    for (place, name) in FUNCTIONS.iter().zip(NAMES) {
        // SAFETY: two C strings; looks among what is loaded.
        place.store(unsafe { dlvsym(libc::RTLD_NEXT, name.as_ptr(), VERSION.as_ptr()) } as usize, Relaxed);
    }
}

/// Bytes from which on the program is grown; 0: it was never young.
static AFTER: AtomicUsize = AtomicUsize::new(0);
/// Usable bytes that the C library has handed out and not got back.
static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static EFFORT: AtomicUsize = AtomicUsize::new(0);
/// Lowest address that the C library handed out.
static LOWEST: AtomicUsize = AtomicUsize::new(usize::MAX);
/// What of `LIVE` a fork child has from its parent, which is charged with it.
static INHERITED: AtomicIsize = AtomicIsize::new(0);
/// What of `LIVE` the account knows.
static CHARGED: AtomicUsize = AtomicUsize::new(0);

/// Begins the program's youth, if it may have one. `after_bytes` of 0 means: no.
pub fn begin(after_bytes: usize) -> bool {
    // SAFETY: reads a word of the process's auxiliary vector.
    let entry = unsafe { libc::getauxval(libc::AT_ENTRY) } as usize;
    let has_all = FUNCTIONS.iter().all(|function| function.load(Relaxed) != 0);
    let is_narrow = process::address_space_limit().is_some_and(|limit| limit < NARROW_BYTES);
    let after_bytes = if is_narrow && after_bytes > 0 { usize::MAX } else { after_bytes };
    let may_be = after_bytes > 0 && entry >= FIXED_ADDRESSES_END && has_all;
    AFTER.store(if may_be { after_bytes } else { 0 }, Relaxed);
    may_be
}

/// Whether the program is still small if it allocates `size` bytes more.
pub fn is_small_with(size: usize) -> bool {
    let live = LIVE.load(Relaxed).max(0) as usize;
    let effort = EFFORT.fetch_add(1 + size / EFFORT_BYTES, Relaxed);
    let after = AFTER.load(Relaxed);
    after == usize::MAX || effort < MAX_EFFORT && live.saturating_add(size) <= after
}

/// Bytes handed out and not yet back.
pub fn live_bytes() -> usize {
    LIVE.load(Relaxed).max(0) as usize
}

/// Whether everything that was handed out lies at `addr` or above.
pub fn lies_above(addr: usize) -> bool {
    LOWEST.load(SeqCst) >= addr
}

fn note(pointer: *mut c_void) -> *mut c_void {
    if !pointer.is_null() {
        LOWEST.fetch_min(pointer as usize, SeqCst);
        // Grown meanwhile: `free` must not take this for jemalloc's (start.rs, `enter`).
        if (pointer as usize) < SMALL_END.load(SeqCst) {
            SMALL_END.store(0, SeqCst);
        }
        // SAFETY: just handed out.
        let bytes = unsafe { usable(pointer) } as isize;
        let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
        PEAK.fetch_max(live.max(0) as usize, Relaxed);
    }
    pointer
}

/// Allocates from the C library; null and `ENOMEM` if it cannot. `align` is a power of two, 1 if `is_zeroed`.
pub fn allocate(size: usize, align: usize, is_zeroed: bool) -> *mut c_void {
    // Copies between large pieces are a tenth slower where one of them starts inside a cache line.
    let align = if size >= MIN_BYTES && !is_zeroed { align.max(CACHE_LINE_BYTES) } else { align };
    let is_plain = align <= align_of::<libc::max_align_t>();
    let function = match (is_plain, is_zeroed) {
        (true, false) => Function::Malloc,
        (true, true) => Function::Calloc,
        (false, _) => Function::Memalign,
    };
    let Some(address) = address(function) else { return crate::slow::out_of_memory() };
    // SAFETY: the addresses of functions of these types; plain calls, `errno` is set by the C library.
    let pointer = unsafe {
        match function {
            Function::Malloc => transmute::<usize, extern "C" fn(usize) -> *mut c_void>(address)(size),
            Function::Calloc => transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(address)(1, size),
            _ => transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(address)(align, size),
        }
    };
    note(pointer)
}

/// Changes the size of an allocation of the C library's; null and unchanged if that cannot be.
///
/// # Safety
///
/// The pointer is live and from [`allocate`] or this; the old one is not used after success. `size` is not 0.
pub unsafe fn resize(pointer: *mut c_void, size: usize) -> *mut c_void {
    type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
    let Some(address) = address(Function::Realloc) else { return crate::slow::out_of_memory() };
    // SAFETY: the address of a function of this type; the caller's promise.
    let (before, new) = unsafe { (usable(pointer), transmute::<usize, Realloc>(address)(pointer, size)) };
    let new = note(new);
    if !new.is_null() {
        LIVE.fetch_sub(before as isize, Relaxed);
    }
    new
}

/// Gives an allocation back to the C library, which names and aborts what it did not hand out.
///
/// # Safety
///
/// The pointer is not used any more.
pub unsafe fn free(pointer: *mut c_void) {
    let Some(address) = address(Function::Free) else { return };
    // SAFETY: the caller's promise.
    let bytes = unsafe { usable(pointer) };
    LIVE.fetch_sub(bytes as isize, Relaxed);
    // SAFETY: the address of a function of this type; the caller's promise.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void)>(address)(pointer) };
}

/// Usable bytes of an allocation of the C library's.
///
/// # Safety
///
/// The pointer is live.
pub unsafe fn usable(pointer: *mut c_void) -> usize {
    let Some(address) = address(Function::UsableSize) else { return 0 };
    // SAFETY: the address of a function of this type; the caller's promise.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void) -> usize>(address)(pointer) }
}

/// Lets the C library give back what it keeps, if it ever served; says whether there was something.
pub fn trim() -> bool {
    let Some(address) = address(Function::Trim).filter(|_| PEAK.load(Relaxed) > 0) else { return false };
    // SAFETY: the address of a function of this type.
    unsafe { transmute::<usize, extern "C" fn(usize) -> c_int>(address)(0) == 1 }
}

/// Tells the account what is held, if that has changed by much.
pub fn charge_roughly(account: &Account) {
    charge(account, CHARGE_STEP_BYTES);
}

/// Tells the account what is held.
pub fn charge_exactly(account: &Account) {
    charge(account, 0);
}

/// At the end of a program that never grew: the most that it held. Of one that never held much no figures are
/// published: it is only counted.
pub fn note_end(account: &Account) {
    let inherited = INHERITED.load(Relaxed).max(0) as usize;
    account.note_small(PEAK.load(Relaxed).saturating_sub(inherited) as u64);
}

fn charge(account: &Account, slack_bytes: usize) {
    let held = || {
        // What is left of the parent's can only become less.
        let live = LIVE.load(Relaxed);
        let inherited = INHERITED.fetch_min(live, Relaxed).min(live);
        (live - inherited).max(0) as usize
    };
    if held().abs_diff(CHARGED.load(Relaxed)) <= slack_bytes {
        return;
    }
    // One thread at a time, or the difference of one would come before that of another; the next call makes up for it.
    if IS_CHARGING.swap(true, Acquire) {
        return;
    }
    let held = held();
    let charged = CHARGED.swap(held, Relaxed);
    account.count_c_library(held as i64 - charged as i64);
    IS_CHARGING.store(false, Release);
}

/// In a fork child: what is there was charged to the parent.
pub fn forked() {
    INHERITED.store(LIVE.load(Relaxed), Relaxed);
    PEAK.store(live_bytes(), Relaxed);
    CHARGED.store(0, Relaxed);
    IS_CHARGING.store(false, Relaxed);
}
