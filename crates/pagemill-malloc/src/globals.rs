//! Variables of the library that several files use: its heap, its account, and the limits of the fast paths.
#![allow(unsafe_code)] // references to objects that are created at start

use pagemill_core::reclaim::Account;
use pagemill_core::sync::Lock;
use pagemill_sys::process::set_errno;
use pagemill_volatile::Base;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Acquire, Ordering::Relaxed};

/// Ends the process with a message if a fact does not hold, which is a bug of this library. `assert!` would unwind, and
/// may allocate for its message; this neither allocates nor locks.
macro_rules! assert_fatal {
    ($fact:expr) => {
        if !$fact {
            pagemill_sys::fatal(format_args!("pagemill: bug: not {} ({}:{})", stringify!($fact), file!(), line!()));
        }
    };
}

/// As [`assert_fatal`], in debug builds only: for paths that most calls of malloc take.
macro_rules! debug_assert_fatal {
    ($fact:expr) => {
        if cfg!(debug_assertions) {
            $crate::globals::assert_fatal!($fact);
        }
    };
}
pub(crate) use {assert_fatal, debug_assert_fatal};

/// [`crate::malloc`] passes sizes below this limit directly to jemalloc. The limit is 0 until the program has grown,
/// while deferred work is pending ([`take_large_path_next`]), and with `PAGEMILL_CHECK`.
pub static SMALL_LIMIT: AtomicUsize = AtomicUsize::new(0);

/// Start of the small zone of the arena. [`crate::free`] passes the addresses of this zone directly to jemalloc. Until
/// the program has grown, the value is an address that no program can have.
pub static SMALL_START: AtomicUsize = AtomicUsize::new(1 << 63);

/// Length of the small zone; 0 until the program has grown, and with `PAGEMILL_CHECK`. Stored after [`SMALL_START`].
pub static SMALL_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns whether an address lies in the small zone of the arena, so that it may be passed directly to jemalloc.
#[inline]
pub fn is_in_small_zone(pointer: *mut c_void) -> bool {
    let bytes = SMALL_BYTES.load(Acquire);
    (pointer as usize).wrapping_sub(SMALL_START.load(Relaxed)) < bytes
}

/// The [`Base`] (instance, heap and volatile ranges) of this library; null until the arena is created.
pub static PAGEMILL: AtomicPtr<Base> = AtomicPtr::new(ptr::null_mut());
/// The account of this process. It is created with the arena, or earlier in a process tree, when the C library's memory
/// is charged.
pub static ACCOUNT: AtomicPtr<Account> = AtomicPtr::new(ptr::null_mut());
/// Lock that is held while the arena is created and during forks. An allocation does not wait for this lock: if the
/// lock is held, the C library serves the allocation.
pub static GROWTH_LOCK: Lock = Lock::new();

/// Returns the [`Base`] of this library; `None` until the program has grown.
pub fn pagemill() -> Option<&'static Base> {
    // SAFETY: the pointer is null or refers to a Base, which is never freed.
    unsafe { PAGEMILL.load(Acquire).as_ref() }
}

/// Returns the account of this process; `None` before the account is created.
pub fn account() -> Option<&'static Account> {
    // SAFETY: the pointer is null or refers to an account, which is never freed.
    unsafe { ACCOUNT.load(Acquire).as_ref() }
}

/// Sets `errno` to `ENOMEM` and returns null.
pub fn out_of_memory() -> *mut c_void {
    set_errno(libc::ENOMEM);
    ptr::null_mut()
}

/// Makes the next call of malloc take the path of large allocations, which does deferred work. Neither allocates nor
/// locks.
pub fn take_large_path_next() {
    if pagemill().is_some() {
        SMALL_LIMIT.store(0, Relaxed);
    }
}
