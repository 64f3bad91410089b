//! The libc fallback: while a program is small, the C library's own malloc serves it.
//!
//! Most programs of a build, a test suite or a shell script hold a few hundred KiB and end after milliseconds. For them
//! another allocator only costs time: its start, and pages of code and data that no other process shares. So nothing is
//! reserved, mapped or started until the program has *grown*: it holds more than `PAGEMILL_AFTER` bytes, or has made
//! many calls. From then on new memory is Pagemill's. Memory of the C library is returned to it when it is freed.
//!
//! Under a limit and with `PAGEMILL_CHECK` Pagemill serves from the first call on. If address space is limited (`ulimit
//! -v`, `-d`) the C library serves for good, because an arena reserves addresses for each size class, several times
//! what it holds.
#![allow(unsafe_code)] // the C library's allocator

use pagemill_core::reclaim::Account;
use pagemill_heap::MIN_BYTES;
use pagemill_sys::process;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{
    AtomicBool, AtomicIsize, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// Default of `PAGEMILL_AFTER`: a program that holds less than this is small.
pub const DEFAULT_AFTER_BYTES: usize = 4 << 20;

/// If the program's address space is limited to less than this, the C library's malloc serves it for good.
const NARROW_BYTES: usize = 64 << 30;

/// Calls after which a program counts as grown, however little it holds. Large sizes count for more: the C library may
/// map and unmap each of them.
const MAX_EFFORT: usize = 1 << 17;
const EFFORT_BYTES: usize = 64 << 10;

const CACHE_LINE_BYTES: usize = 64;

/// A process tree is updated in steps of this.
const CHARGE_STEP_BYTES: usize = 1 << 20;

/// A thread is updating the account at the moment.
static IS_CHARGING: AtomicBool = AtomicBool::new(false);

/// The C library's functions, as indexes of [`FUNCTIONS`].
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

/// Their addresses; 0 if not found. Names alone are ambiguous: another allocator that the program is linked to exports
/// the same ones, including `__libc_malloc`.
static FUNCTIONS: [AtomicUsize; 7] = [const { AtomicUsize::new(0) }; 7];

fn address(function: Function) -> Option<usize> {
    let address = FUNCTIONS[function as usize].load(Relaxed);
    (address != 0).then_some(address)
}

/// The symbol version of these functions since the C library's first release for this processor.
const VERSION: &CStr = if cfg!(target_arch = "x86_64") { c"GLIBC_2.2.5" } else { c"GLIBC_2.17" };

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Finds the C library's functions by their version, which no other library has. Must run before anything else here is
/// used.
///
/// Allocates nothing if they are found (`dlopen`, to search the C library only, would).
pub fn find_functions() {
    const NAMES: [&CStr; 7] =
        [c"malloc", c"calloc", c"realloc", c"memalign", c"free", c"malloc_usable_size", c"malloc_trim"];
    for (place, name) in FUNCTIONS.iter().zip(NAMES) {
        // SAFETY: two C strings; searches the loaded libraries.
        place.store(unsafe { dlvsym(libc::RTLD_NEXT, name.as_ptr(), VERSION.as_ptr()) } as usize, Relaxed);
    }
}

/// Bytes from which the program counts as grown; 0: it was never small.
static AFTER: AtomicUsize = AtomicUsize::new(0);
/// Usable bytes that the C library has allocated and not got back.
static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static EFFORT: AtomicUsize = AtomicUsize::new(0);
/// The part of `LIVE` that a fork child inherited from its parent, which is charged for it.
static INHERITED: AtomicIsize = AtomicIsize::new(0);
/// The part of `LIVE` that the account knows.
static CHARGED: AtomicUsize = AtomicUsize::new(0);

/// Starts the libc fallback if possible; returns whether it did. `after_bytes` of 0 disables it.
pub fn begin(after_bytes: usize) -> bool {
    let has_all = FUNCTIONS.iter().all(|function| function.load(Relaxed) != 0);
    let is_narrow = process::address_space_limit().is_some_and(|limit| limit < NARROW_BYTES);
    let after_bytes = if is_narrow && after_bytes > 0 { usize::MAX } else { after_bytes };
    let may_be = after_bytes > 0 && has_all;
    AFTER.store(if may_be { after_bytes } else { 0 }, Relaxed);
    may_be
}

/// Whether the program is still small after allocating `size` bytes more.
pub fn is_small_with(size: usize) -> bool {
    let live = LIVE.load(Relaxed).max(0) as usize;
    let effort = EFFORT.fetch_add(1 + size / EFFORT_BYTES, Relaxed);
    let after = AFTER.load(Relaxed);
    after == usize::MAX || effort < MAX_EFFORT && live.saturating_add(size) <= after
}

/// Bytes allocated and not freed yet.
pub fn live_bytes() -> usize {
    LIVE.load(Relaxed).max(0) as usize
}

fn note(pointer: *mut c_void) -> *mut c_void {
    if !pointer.is_null() {
        // SAFETY: allocated just now.
        let bytes = unsafe { usable(pointer) } as isize;
        let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
        PEAK.fetch_max(live.max(0) as usize, Relaxed);
    }
    pointer
}

/// Allocates from the C library; returns null and `ENOMEM` on failure. `align` is a power of two, 1 if `is_zeroed`.
pub fn allocate(size: usize, align: usize, is_zeroed: bool) -> *mut c_void {
    // Copies between large buffers are a tenth slower if one of them starts inside a cache line.
    let align = if size >= MIN_BYTES && !is_zeroed { align.max(CACHE_LINE_BYTES) } else { align };
    let is_plain = align <= align_of::<libc::max_align_t>();
    let function = match (is_plain, is_zeroed) {
        (true, false) => Function::Malloc,
        (true, true) => Function::Calloc,
        (false, _) => Function::Memalign,
    };
    let Some(address) = address(function) else { return crate::large::out_of_memory() };
    // SAFETY: the addresses of functions of these types; plain calls; the C library sets `errno`.
    let pointer = unsafe {
        match function {
            Function::Malloc => transmute::<usize, extern "C" fn(usize) -> *mut c_void>(address)(size),
            Function::Calloc => transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(address)(1, size),
            _ => transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(address)(align, size),
        }
    };
    note(pointer)
}

/// Resizes an allocation of the C library; returns null and leaves it unchanged on failure.
///
/// # Safety
///
/// The pointer is live and from [`allocate`] or this function; the old one is not used after success. `size` is not 0.
pub unsafe fn resize(pointer: *mut c_void, size: usize) -> *mut c_void {
    type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
    let Some(address) = address(Function::Realloc) else { return crate::large::out_of_memory() };
    // SAFETY: the address of a function of this type; guaranteed by the caller.
    let (before, new) = unsafe { (usable(pointer), transmute::<usize, Realloc>(address)(pointer, size)) };
    let new = note(new);
    if !new.is_null() {
        LIVE.fetch_sub(before as isize, Relaxed);
    }
    new
}

/// Frees an allocation of the C library, which aborts with a message for a pointer that it did not allocate.
///
/// # Safety
///
/// The pointer is not used any more.
pub unsafe fn free(pointer: *mut c_void) {
    let Some(address) = address(Function::Free) else { return };
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { usable(pointer) };
    LIVE.fetch_sub(bytes as isize, Relaxed);
    // SAFETY: the address of a function of this type; guaranteed by the caller.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void)>(address)(pointer) };
}

/// Usable bytes of an allocation of the C library.
///
/// # Safety
///
/// The pointer is live.
pub unsafe fn usable(pointer: *mut c_void) -> usize {
    let Some(address) = address(Function::UsableSize) else { return 0 };
    // SAFETY: the address of a function of this type; guaranteed by the caller.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void) -> usize>(address)(pointer) }
}

/// Makes the C library give back its free memory, if it ever served; returns whether there was some.
pub fn trim() -> bool {
    let Some(address) = address(Function::Trim).filter(|_| PEAK.load(Relaxed) > 0) else { return false };
    // SAFETY: the address of a function of this type.
    unsafe { transmute::<usize, extern "C" fn(usize) -> c_int>(address)(0) == 1 }
}

/// Whether [`charge_roughly`] would update the account.
pub fn owes_charge() -> bool {
    held().abs_diff(CHARGED.load(Relaxed)) > CHARGE_STEP_BYTES
}

/// Updates the account if the amount held has changed by much.
pub fn charge_roughly(account: &Account) {
    charge(account, CHARGE_STEP_BYTES);
}

/// Updates the account with the amount held.
pub fn charge_exactly(account: &Account) {
    charge(account, 0);
}

/// Records the peak at the end of a program that never grew. A program that never held much publishes no figures; it is
/// only counted.
pub fn note_end(account: &Account) {
    account.note_small(peak_bytes());
}

/// The peak of the program, less what it inherited from its parent.
pub fn peak_bytes() -> u64 {
    let inherited = INHERITED.load(Relaxed).max(0) as usize;
    PEAK.load(Relaxed).saturating_sub(inherited) as u64
}

/// Bytes that the program holds and its parent is not charged for.
fn held() -> usize {
    let live = LIVE.load(Relaxed);
    // The inherited amount can only decrease.
    let inherited = INHERITED.fetch_min(live, Relaxed).min(live);
    (live - inherited).max(0) as usize
}

fn charge(account: &Account, slack_bytes: usize) {
    if held().abs_diff(CHARGED.load(Relaxed)) <= slack_bytes {
        return;
    }
    // One thread at a time, or differences would be applied out of order. The next call catches up.
    if IS_CHARGING.swap(true, Acquire) {
        return;
    }
    let held = held();
    let charged = CHARGED.swap(held, Relaxed);
    account.count_c_library(held as i64 - charged as i64);
    IS_CHARGING.store(false, Release);
}

/// Called in a fork child: existing memory is charged to the parent.
pub fn forked() {
    INHERITED.store(LIVE.load(Relaxed), Relaxed);
    PEAK.store(live_bytes(), Relaxed);
    CHARGED.store(0, Relaxed);
    IS_CHARGING.store(false, Relaxed);
}
