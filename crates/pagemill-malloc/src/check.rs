//! `PAGEMILL_CHECK`: detects invalid frees of small allocations, with a bit for every address at which an allocation
//! can start.
//!
//! Invalid are a double free, a free of an address inside an allocation, and a free of memory that was never allocated.
//! Large allocations are always checked, by their state words. For small allocations the check costs a table lookup in
//! each call, so it is intended for testing.
#![allow(unsafe_code)] // the table of bits is accessed by address

use crate::globals::assert_fatal;
use pagemill_core::Error;
use pagemill_sys::mem;
use pagemill_volatile::Base;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Small allocations start at multiples of this many bytes.
const STEP_BYTES: usize = 8;

/// First address that has a bit in the table at [`BIT_TABLE`].
static FIRST_ADDR: AtomicUsize = AtomicUsize::new(0);
/// End of the addresses that have a bit in the table at [`BIT_TABLE`].
static END_ADDR: AtomicUsize = AtomicUsize::new(0);
/// Address of the table that has a bit for each possible small allocation; 0 if checking is off.
static BIT_TABLE: AtomicUsize = AtomicUsize::new(0);

/// Returns whether frees of small allocations are checked.
pub fn is_on() -> bool {
    BIT_TABLE.load(Relaxed) != 0
}

/// Turns the check of small frees on. Returns whether the table of bits could be mapped.
pub fn start_checking(pagemill: &'static Base) -> bool {
    let (base, end) = (pagemill.instance.arena.base(), pagemill.heap.base());
    let Ok(bits) = mem::map_sparse((end - base) / STEP_BYTES / 8, pagemill_core::units::BLOCK_BYTES) else {
        return false;
    };
    assert_fatal!(base.is_multiple_of(STEP_BYTES));
    assert_fatal!(base < end);
    FIRST_ADDR.store(base, Relaxed);
    END_ADDR.store(end, Relaxed);
    BIT_TABLE.store(bits, Relaxed);
    true
}

/// Returns the table word of an address, and a mask with the address's bit.
fn table_bit(addr: usize) -> Option<(&'static AtomicU64, u64)> {
    let (base, bits) = (FIRST_ADDR.load(Relaxed), BIT_TABLE.load(Relaxed));
    if bits == 0 || !(base..END_ADDR.load(Relaxed)).contains(&addr) {
        return None;
    }
    let index = (addr - base) / STEP_BYTES;
    // SAFETY: the table has a bit for every step of this range and stays mapped.
    let word = unsafe { &*((bits + index / 64 * 8) as *const AtomicU64) };
    Some((word, 1 << (index % 64)))
}

/// Records in the table that a small allocation starts at `pointer`. Does nothing if checking is off.
pub fn record_allocation(pointer: *mut c_void) {
    if let Some((word, bit)) = table_bit(pointer as usize) {
        word.fetch_or(bit, Relaxed);
    }
}

/// Ends the process with a message, which names `function`, if no small allocation starts at `pointer`.
pub fn assert_live(function: &str, pointer: *mut c_void) {
    if is_on() {
        record_free(function, pointer);
        record_allocation(pointer);
    }
}

/// Records in the table that the small allocation at `pointer` is freed. Ends the process with a message, which names
/// `function`, if no small allocation starts there.
pub fn record_free(function: &str, pointer: *mut c_void) {
    let addr = pointer as usize;
    if !is_on() {
        return;
    }
    let was_there = addr.is_multiple_of(STEP_BYTES)
        && table_bit(addr).is_some_and(|(word, bit)| word.fetch_and(!bit, Relaxed) & bit != 0);
    if !was_there {
        let error = Error::NotAllocated { addr };
        pagemill_sys::fatal(format_args!("pagemill: {function}(): double free or invalid pointer: {error}"));
    }
}
