//! `mallctl`, jemalloc's control call, for programs that are linked to jemalloc (for example Debian's Redis).
//!
//! Under `pagemill run` Pagemill's malloc serves such a program, and the program's own jemalloc has no memory: a purge
//! would return nothing, and all statistics would be 0. So purges and the sums under `stats` are handled here. All
//! other names are forwarded to the program's jemalloc.
#![allow(unsafe_code)] // the C ABI of mallctl

use crate::globals;
use crate::start::{self, State};
use crate::{large, libc_fallback, small};
use pagemill_core::stats::{self, Counter};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The type of jemalloc's function `mallctl`.
type MallctlFn = unsafe extern "C" fn(*const c_char, *mut c_void, *mut usize, *mut c_void, usize) -> c_int;

/// The value of `version` in a program without jemalloc. Some programs call `mallctl` to find the allocator's name.
static VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!("pagemill-", env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => c"pagemill",
    };

/// The names of jemalloc's controls that this module handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ControlName {
    /// `arena.N.purge` and `arena.N.decay`: return the free memory of all arenas to the system, whatever N is.
    Purge,
    /// `stats.allocated` and `stats.active`, which are equal here, because the allocators count pages.
    Used,
    /// `stats.resident`: the resident bytes that are charged to the process.
    Resident,
    /// `epoch`: updates the statistics.
    Epoch,
    /// `version`.
    Version,
}

impl ControlName {
    fn of(name: &[u8]) -> Option<Self> {
        let purged = name.strip_suffix(b".purge").or_else(|| name.strip_suffix(b".decay"));
        if purged
            .and_then(|name| name.strip_prefix(b"arena."))
            .is_some_and(|arena| arena.iter().all(u8::is_ascii_digit))
        {
            return Some(Self::Purge);
        }
        match name {
            b"stats.allocated" | b"stats.active" => Some(Self::Used),
            b"stats.resident" => Some(Self::Resident),
            b"epoch" => Some(Self::Epoch),
            b"version" => Some(Self::Version),
            _ => None,
        }
    }
}

/// Returns the bytes in use in jemalloc, the heap and the C library. Does not measure overcommitted memory, because
/// programs read the value several times a second.
fn used_bytes() -> usize {
    let small = match start::state() {
        State::Ready(_) => small::used_bytes(),
        State::Starting | State::LibcFallback | State::Unmanaged => 0,
    };
    let slots = stats::get(Counter::Heap).saturating_sub(stats::get(Counter::HeapFree));
    libc_fallback::live_bytes() + (small + slots) as usize
}

/// Returns the resident bytes that are charged to the process.
fn resident_bytes() -> usize {
    globals::account().map_or(libc_fallback::live_bytes(), |account| account.resident() as usize)
}

/// Address of `mallctl` in the program's jemalloc; 0 before the first search, 1 if the program has no jemalloc.
static JEMALLOC_MALLCTL: AtomicUsize = AtomicUsize::new(0);

/// Returns the function `mallctl` of the program's jemalloc. Searches for the function only once, because a failed
/// search changes the result of `dlerror`.
fn jemalloc_mallctl() -> Option<MallctlFn> {
    let mut address = JEMALLOC_MALLCTL.load(Relaxed);
    if address == 0 {
        // SAFETY: the argument is a C string. The call searches the loaded libraries.
        address = (unsafe { libc::dlsym(libc::RTLD_NEXT, c"mallctl".as_ptr()) } as usize).max(1);
        JEMALLOC_MALLCTL.store(address, Relaxed);
    }
    // SAFETY: jemalloc's function of this name has this type.
    (address > 1).then(|| unsafe { transmute::<usize, MallctlFn>(address) })
}

/// Bytes in use at the last update of the statistics, plus 1; 0 before the first update. Programs subtract the bytes in
/// use from the resident bytes, so [`RESIDENT_BYTES`] is updated at the same time.
static USED_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Resident bytes at the last update of the statistics, plus 1; 0 before the first update.
static RESIDENT_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Computes the bytes in use and the resident bytes, and stores them in [`USED_BYTES`] and [`RESIDENT_BYTES`].
fn update_statistics() {
    let used = used_bytes();
    USED_BYTES.store(used + 1, Relaxed);
    RESIDENT_BYTES.store(resident_bytes().max(used) + 1, Relaxed);
}

/// Returns the statistic that `sum` ([`USED_BYTES`] or [`RESIDENT_BYTES`]) holds; the first call updates both
/// statistics.
fn statistic(sum: &AtomicUsize) -> usize {
    if sum.load(Relaxed) == 0 {
        update_statistics();
    }
    sum.load(Relaxed) - 1
}

/// Stores a value at `old` for the program, unless `old` is null. Returns `EINVAL` if `*old_len` is not the size of the
/// value, as jemalloc does; otherwise 0.
///
/// # Safety
///
/// As for [`mallctl`].
unsafe fn store_value<T>(value: T, old: *mut c_void, old_len: *mut usize) -> c_int {
    if old.is_null() || old_len.is_null() {
        return 0;
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        if *old_len != size_of::<T>() {
            return libc::EINVAL;
        }
        old.cast::<T>().write_unaligned(value);
    }
    0
}

/// jemalloc's function `mallctl`. Handles the names that [`ControlName`] lists, and forwards other names to the
/// program's jemalloc. In a program without jemalloc, `version` is Pagemill's version, and unknown names return
/// `ENOENT`.
///
/// # Safety
///
/// As for jemalloc's function: `name` is a C string, `old` has `*old_len` writable bytes, `new` has `new_len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mallctl(
    name: *const c_char,
    old: *mut c_void,
    old_len: *mut usize,
    new: *mut c_void,
    new_len: usize,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    let known = ControlName::of(unsafe { CStr::from_ptr(name) }.to_bytes());
    let forward = || {
        // SAFETY: the caller's promise, for the same arguments.
        jemalloc_mallctl().map(|next| unsafe { next(name, old, old_len, new, new_len) })
    };
    // SAFETY: the caller's promise, for each call.
    unsafe {
        match known {
            Some(ControlName::Purge) => {
                large::trim();
                0
            }
            Some(ControlName::Used) => store_value(statistic(&USED_BYTES), old, old_len),
            Some(ControlName::Resident) => store_value(statistic(&RESIDENT_BYTES), old, old_len),
            Some(ControlName::Epoch) => {
                update_statistics();
                forward().unwrap_or(0)
            }
            Some(ControlName::Version) => forward().unwrap_or_else(|| store_value(VERSION.as_ptr(), old, old_len)),
            None => forward().unwrap_or(libc::ENOENT),
        }
    }
}
