//! The libc fallback: the C library's own malloc serves a program while it is small.
//!
//! Most programs of a build, a test suite or a shell script allocate a few hundred KiB and end after milliseconds. For
//! such a program another allocator only costs time: the allocator must be started, and its code and data loaded. So
//! nothing is reserved, mapped or started until the program has *grown*: it has more than `PAGEMILL_AFTER` live bytes,
//! or has made many calls. Then Pagemill serves new allocations. Older allocations are returned to the C library when
//! they are freed.
//!
//! Under a limit and with `PAGEMILL_CHECK`, Pagemill serves all calls. If address space is limited (`ulimit -v`, `-d`),
//! the C library serves all calls, because an arena reserves several times the addresses that it uses.
#![allow(unsafe_code)] // the C library's allocator

use crate::globals::debug_assert_fatal;
use pagemill_core::reclaim::Account;
use pagemill_heap::MIN_BYTES;
use pagemill_sys::process;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{
    AtomicBool, AtomicIsize, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// Default of `PAGEMILL_AFTER`: a program with no more live bytes than this is small.
pub const DEFAULT_AFTER_BYTES: usize = 4 << 20;

/// If the program's address space is limited to less than this number of bytes, the C library's malloc serves all its
/// calls.
const NARROW_ADDRESS_SPACE_BYTES: usize = 64 << 30;

/// Value of [`WEIGHTED_CALLS`] above which a program counts as grown, however little it has allocated.
const MAX_WEIGHTED_CALLS: usize = 1 << 17;
/// A call that requests this number of bytes counts as one more call, twice as many bytes as two more calls, and so on:
/// the C library may map and unmap a large allocation at each call.
const BYTES_PER_EXTRA_CALL: usize = 64 << 10;

/// Alignment of large allocations of the C library.
const CACHE_LINE_BYTES: usize = 64;

/// In a process tree, the account is updated when the bytes to charge for the C library have changed by more than this.
const CHARGE_STEP_BYTES: usize = 1 << 20;

/// Whether a thread is updating the account with the bytes to charge for the C library.
static IS_CHARGING: AtomicBool = AtomicBool::new(false);

/// The C library's functions that serve allocations. The value is the function's index in [`LIBC_FUNCTIONS`].
#[derive(Clone, Copy)]
enum LibcFunction {
    Malloc,
    Calloc,
    Realloc,
    Memalign,
    Free,
    UsableSize,
    Trim,
}

/// Addresses of the C library's functions; 0 if not found. The functions are looked up by version, because an allocator
/// to which the program is linked exports the same names, including `__libc_malloc`.
static LIBC_FUNCTIONS: [AtomicUsize; 7] = [const { AtomicUsize::new(0) }; 7];

/// Returns the address of a function of the C library, if the function was found.
fn function_address(function: LibcFunction) -> Option<usize> {
    let address = LIBC_FUNCTIONS[function as usize].load(Relaxed);
    (address != 0).then_some(address)
}

/// The symbol version of [`LIBC_FUNCTIONS`]: that of the C library's first release for this processor architecture.
const SYMBOL_VERSION: &CStr = if cfg!(target_arch = "x86_64") { c"GLIBC_2.2.5" } else { c"GLIBC_2.17" };

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Finds the C library's functions by their version, which no other library has. Must be called before all other
/// functions of this module.
///
/// Allocates nothing if they are found, unlike a search with `dlopen`.
pub fn find_functions() {
    const FUNCTION_NAMES: [&CStr; 7] =
        [c"malloc", c"calloc", c"realloc", c"memalign", c"free", c"malloc_usable_size", c"malloc_trim"];
    for (place, name) in LIBC_FUNCTIONS.iter().zip(FUNCTION_NAMES) {
        // SAFETY: the arguments are two C strings. The call searches the loaded libraries.
        place.store(unsafe { dlvsym(libc::RTLD_NEXT, name.as_ptr(), SYMBOL_VERSION.as_ptr()) } as usize, Relaxed);
    }
}

/// Live bytes above which the program counts as grown; 0 if the fallback is not used, `usize::MAX` if it is used
/// permanently.
static GROWN_ABOVE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Usable bytes of the C library's live allocations.
static LIVE_BYTES: AtomicIsize = AtomicIsize::new(0);
/// Maximum of `LIVE_BYTES` so far.
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Number of calls so far, in which a call for a large size counts as several ([`BYTES_PER_EXTRA_CALL`]).
static WEIGHTED_CALLS: AtomicUsize = AtomicUsize::new(0);
/// The part of `LIVE_BYTES` that a fork child inherited. The parent is charged for this part.
static INHERITED_BYTES: AtomicIsize = AtomicIsize::new(0);
/// The part of `LIVE_BYTES` that is charged to the account.
static CHARGED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Makes the C library serve the program until the program has grown, if the C library's functions were found and
/// `after_bytes` is not 0. Returns whether the C library serves the program.
pub fn enable(after_bytes: usize) -> bool {
    let has_all = LIBC_FUNCTIONS.iter().all(|function| function.load(Relaxed) != 0);
    let is_narrow = process::address_space_limit().is_some_and(|limit| limit < NARROW_ADDRESS_SPACE_BYTES);
    let after_bytes = if is_narrow && after_bytes > 0 { usize::MAX } else { after_bytes };
    let may_be = after_bytes > 0 && has_all;
    GROWN_ABOVE_BYTES.store(if may_be { after_bytes } else { 0 }, Relaxed);
    may_be
}

/// Counts a call of malloc for `size` bytes. Returns whether the program is still small with `size` more live bytes.
pub fn is_small_with(size: usize) -> bool {
    let live = LIVE_BYTES.load(Relaxed).max(0) as usize;
    let weighted_calls = WEIGHTED_CALLS.fetch_add(1 + size / BYTES_PER_EXTRA_CALL, Relaxed);
    let after = GROWN_ABOVE_BYTES.load(Relaxed);
    after == usize::MAX || weighted_calls < MAX_WEIGHTED_CALLS && live.saturating_add(size) <= after
}

/// Returns the usable bytes of the C library's live allocations.
pub fn live_bytes() -> usize {
    LIVE_BYTES.load(Relaxed).max(0) as usize
}

/// Adds the new allocation `pointer` to the live bytes. Returns `pointer`.
fn count_allocation(pointer: *mut c_void) -> *mut c_void {
    if !pointer.is_null() {
        // SAFETY: the caller has just allocated the pointer.
        let bytes = unsafe { usable_bytes(pointer) } as isize;
        let live = LIVE_BYTES.fetch_add(bytes, Relaxed) + bytes;
        PEAK_BYTES.fetch_max(live.max(0) as usize, Relaxed);
    }
    pointer
}

/// Allocates from the C library; returns null and `ENOMEM` on failure. `align` is a power of two, 1 if `is_zeroed`.
pub fn allocate(size: usize, align: usize, is_zeroed: bool) -> *mut c_void {
    // Copies between large buffers are a tenth slower if one of them starts inside a cache line.
    let align = if size >= MIN_BYTES && !is_zeroed { align.max(CACHE_LINE_BYTES) } else { align };
    debug_assert_fatal!(align.is_power_of_two());
    let is_plain = align <= align_of::<libc::max_align_t>();
    let function = match (is_plain, is_zeroed) {
        (true, false) => LibcFunction::Malloc,
        (true, true) => LibcFunction::Calloc,
        (false, _) => LibcFunction::Memalign,
    };
    let Some(address) = function_address(function) else { return crate::globals::out_of_memory() };
    // SAFETY: the addresses are those of functions of these types. The C library sets `errno`.
    let pointer = unsafe {
        match function {
            LibcFunction::Malloc => transmute::<usize, extern "C" fn(usize) -> *mut c_void>(address)(size),
            LibcFunction::Calloc => transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(address)(1, size),
            _ => transmute::<usize, extern "C" fn(usize, usize) -> *mut c_void>(address)(align, size),
        }
    };
    debug_assert_fatal!((pointer as usize).is_multiple_of(align));
    count_allocation(pointer)
}

/// Resizes an allocation of the C library. On failure returns null, and the allocation is unchanged.
///
/// # Safety
///
/// The pointer is a live allocation of [`allocate`] or this function, and is not used after success. `size` is not 0.
pub unsafe fn resize(pointer: *mut c_void, size: usize) -> *mut c_void {
    type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
    let Some(address) = function_address(LibcFunction::Realloc) else { return crate::globals::out_of_memory() };
    // SAFETY: the address of a function of this type; guaranteed by the caller.
    let (before, new) = unsafe { (usable_bytes(pointer), transmute::<usize, Realloc>(address)(pointer, size)) };
    let new = count_allocation(new);
    if !new.is_null() {
        LIVE_BYTES.fetch_sub(before as isize, Relaxed);
    }
    new
}

/// Frees an allocation of the C library. For a pointer that the C library did not allocate, it aborts with a message.
///
/// # Safety
///
/// The pointer is not used any more.
pub unsafe fn free(pointer: *mut c_void) {
    let Some(address) = function_address(LibcFunction::Free) else { return };
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { usable_bytes(pointer) };
    LIVE_BYTES.fetch_sub(bytes as isize, Relaxed);
    // SAFETY: the address of a function of this type; guaranteed by the caller.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void)>(address)(pointer) };
}

/// Returns the usable bytes of an allocation of the C library.
///
/// # Safety
///
/// The pointer is a live allocation of the C library.
pub unsafe fn usable_bytes(pointer: *mut c_void) -> usize {
    let Some(address) = function_address(LibcFunction::UsableSize) else { return 0 };
    // SAFETY: the address of a function of this type; guaranteed by the caller.
    unsafe { transmute::<usize, unsafe extern "C" fn(*mut c_void) -> usize>(address)(pointer) }
}

/// Makes the C library return its free memory to the system, if the C library has ever served an allocation. Returns
/// whether any memory was returned.
pub fn trim() -> bool {
    let Some(address) = function_address(LibcFunction::Trim).filter(|_| PEAK_BYTES.load(Relaxed) > 0) else {
        return false;
    };
    // SAFETY: the address of a function of this type.
    unsafe { transmute::<usize, extern "C" fn(usize) -> c_int>(address)(0) == 1 }
}

/// Returns whether [`charge_roughly`] would update the account.
pub fn is_charge_due() -> bool {
    chargeable_bytes().abs_diff(CHARGED_BYTES.load(Relaxed)) > CHARGE_STEP_BYTES
}

/// Updates the account if the bytes to charge for the C library's memory have changed by more than
/// [`CHARGE_STEP_BYTES`].
pub fn charge_roughly(account: &Account) {
    charge(account, CHARGE_STEP_BYTES);
}

/// Updates the account with the exact number of bytes to charge for the C library's memory.
pub fn charge_exactly(account: &Account) {
    charge(account, 0);
}

/// Records the peak of a program that ends without having grown. If the program was never charged, it publishes no
/// figures, and the peak is recorded on the tree's page.
pub fn record_peak(account: &Account) {
    account.record_libc_peak(peak_bytes());
}

/// Returns the peak of the live bytes, without those that the program inherited from its parent.
pub fn peak_bytes() -> u64 {
    let inherited = INHERITED_BYTES.load(Relaxed).max(0) as usize;
    PEAK_BYTES.load(Relaxed).saturating_sub(inherited) as u64
}

/// Returns the bytes to charge to this process for the C library's memory: the live bytes without the inherited ones.
fn chargeable_bytes() -> usize {
    let live = LIVE_BYTES.load(Relaxed);
    // Inherited bytes can only become fewer: the program frees some of them.
    let inherited = INHERITED_BYTES.fetch_min(live, Relaxed).min(live);
    (live - inherited).max(0) as usize
}

/// Updates the account if the bytes to charge for the C library's memory have changed by more than `slack_bytes`.
fn charge(account: &Account, slack_bytes: usize) {
    if chargeable_bytes().abs_diff(CHARGED_BYTES.load(Relaxed)) <= slack_bytes {
        return;
    }
    // Only one thread updates the account, so that differences are applied in order. A later call applies the rest.
    if IS_CHARGING.swap(true, Acquire) {
        return;
    }
    let held = chargeable_bytes();
    let charged = CHARGED_BYTES.swap(held, Relaxed);
    account.charge_c_library(held as i64 - charged as i64);
    IS_CHARGING.store(false, Release);
}

/// Resets the counts of this module in a fork child. Memory that exists at the fork is charged to the parent.
pub fn begin_child() {
    INHERITED_BYTES.store(LIVE_BYTES.load(Relaxed), Relaxed);
    PEAK_BYTES.store(live_bytes(), Relaxed);
    CHARGED_BYTES.store(0, Relaxed);
    IS_CHARGING.store(false, Relaxed);
}
