//! Calls a function on a separate stack, because the calling thread's stack may be as small as 16 KiB.
#![allow(unsafe_code)] // changes the stack pointer

use crate::mem;
use std::ffi::c_void;

/// Calls `act` on a new stack of `stack_bytes`. If no stack can be mapped, uses the caller's stack. A panic of `act`
/// aborts the process.
pub fn call_on_new<F: FnMut()>(stack_bytes: usize, mut act: F) {
    extern "C" fn call<F: FnMut()>(act: *mut c_void) {
        // SAFETY: `act` points to the closure of the caller, which waits for this call.
        unsafe { (*act.cast::<F>())() }
    }
    let page = mem::os_page_bytes();
    let len_bytes = stack_bytes.next_multiple_of(page);
    // The lowest page stays inaccessible, as the guard page of the stack.
    assert!(stack_bytes > 0);
    let Ok(base) = mem::reserve(len_bytes + page, page, 0) else { return call::<F>((&raw mut act).cast()) };
    // SAFETY: the range lies in the reservation made above.
    if unsafe { mem::open(base + page, len_bytes) }.is_ok() {
        // SAFETY: the top of memory opened above, aligned to a page. `call` takes a pointer to `act` and does not
        // unwind.
        unsafe { call_on_stack(base + page + len_bytes, call::<F>, (&raw mut act).cast()) };
    } else {
        call::<F>((&raw mut act).cast());
    }
    // SAFETY: the reservation was made above, and the function has returned.
    unsafe { mem::unreserve(base, len_bytes + page) };
}

/// Calls `function` with the stack pointer set to `top`, and restores the stack pointer afterwards.
///
/// # Safety
///
/// `top` must be the upper end of a writable range that is large enough for `function`, and be aligned to 16 bytes.
/// `function` must return normally, without unwinding or jumping out, and must accept `argument`.
unsafe fn call_on_stack(top: usize, function: extern "C" fn(*mut c_void), argument: *mut c_void) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the callee preserves r12, which holds the old stack pointer. All registers that the callee may change are
    // declared.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {function}",
            "mov rsp, r12",
            top = in(reg) top,
            function = in(reg) function,
            in("rdi") argument,
            out("r12") _,
            clobber_abi("C"),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the callee preserves x20, which holds the old stack pointer. All registers that the callee may change are
    // declared.
    unsafe {
        std::arch::asm!(
            "mov x20, sp",
            "mov sp, {top}",
            "blr {function}",
            "mov sp, x20",
            top = in(reg) top,
            function = in(reg) function,
            in("x0") argument,
            out("x20") _,
            clobber_abi("C"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `call_on_new` must run the function on a separate stack that has room for a large array. The caller must receive
    /// the result.
    #[test]
    fn functions_run_on_a_stack_of_their_own() {
        let mut answer = [0usize; 2];
        let here = (&raw const answer) as usize;
        call_on_new(64 << 10, || {
            let mut array = [1u64; 4000];
            std::hint::black_box(&mut array);
            answer = [array.iter().sum::<u64>() as usize, (&raw const array) as usize];
        });
        assert_eq!(answer[0], 4000);
        assert!(answer[1].abs_diff(here) > 64 << 10, "the function ran on this stack");
    }
}
