//! `PAGEMILL_CHECK`: a bit for every address where a small allocation can start. It detects at once a double free, a
//! free inside an allocation, and a free of memory that was never allocated.
//!
//! Large allocations are always checked by their state words. For small ones the check costs a table look-up per call,
//! so it is for testing.
#![allow(unsafe_code)] // the table of bits is accessed by address

use pagemill_core::Error;
use pagemill_sys::mem;
use pagemill_volatile::Base;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Allocations start at multiples of this.
const STEP: usize = 8;

/// Start and end of the addresses that have a bit.
static BASE: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
/// Address of the bits; 0 if checking is off.
static BITS: AtomicUsize = AtomicUsize::new(0);

pub fn is_on() -> bool {
    BITS.load(Relaxed) != 0
}

/// Turns checking on; returns whether that succeeded.
pub fn start(pagemill: &'static Base) -> bool {
    let (base, end) = (pagemill.arena.base(), pagemill.heap.base());
    let Ok(bits) = mem::map_sparse((end - base) / STEP / 8, pagemill_core::units::BLOCK_BYTES) else { return false };
    BASE.store(base, Relaxed);
    END.store(end, Relaxed);
    BITS.store(bits, Relaxed);
    true
}

/// The word and bit of an address.
fn bit(addr: usize) -> Option<(&'static AtomicU64, u64)> {
    let (base, bits) = (BASE.load(Relaxed), BITS.load(Relaxed));
    if bits == 0 || !(base..END.load(Relaxed)).contains(&addr) {
        return None;
    }
    let index = (addr - base) / STEP;
    // SAFETY: the table has a bit for every step of this range and stays mapped.
    let word = unsafe { &*((bits + index / 64 * 8) as *const AtomicU64) };
    Some((word, 1 << (index % 64)))
}

/// Records a small allocation.
pub fn note(pointer: *mut c_void) {
    if let Some((word, bit)) = bit(pointer as usize) {
        word.fetch_or(bit, Relaxed);
    }
}

/// Ends the process if there is no small allocation at this address.
pub fn verify(function: &str, pointer: *mut c_void) {
    if is_on() {
        forget(function, pointer);
        note(pointer);
    }
}

/// Records that a small allocation is freed; ends the process if there is none at this address.
pub fn forget(function: &str, pointer: *mut c_void) {
    let addr = pointer as usize;
    if !is_on() {
        return;
    }
    let was_there =
        addr.is_multiple_of(STEP) && bit(addr).is_some_and(|(word, bit)| word.fetch_and(!bit, Relaxed) & bit != 0);
    if !was_there {
        let error = Error::NotAllocated { addr };
        pagemill_sys::fatal(format_args!("pagemill: {function}(): double free or invalid pointer: {error}"));
    }
}
