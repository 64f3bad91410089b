//! Calls a function on a separate stack, because the calling thread's stack may be as small as 16 KiB. Nothing here
//! allocates, so signal handlers may use it.
#![allow(unsafe_code)] // changes the stack pointer

use crate::mem;
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

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

/// Some stacks that threads share. Each has `STACK_BYTES`, is mapped at its first use, and keeps the memory that was
/// touched. Below it lies a guard page.
pub struct Stacks<const COUNT: usize, const STACK_BYTES: usize> {
    places: [Place; COUNT],
}

struct Place {
    is_taken: AtomicU32,
    /// Address of the guard page; 0 before the first use.
    base: AtomicUsize,
}

impl<const COUNT: usize, const STACK_BYTES: usize> Stacks<COUNT, STACK_BYTES> {
    #[expect(clippy::new_without_default, reason = "constant")]
    pub const fn new() -> Self {
        Self { places: [const { Place { is_taken: AtomicU32::new(0), base: AtomicUsize::new(0) } }; COUNT] }
    }

    /// Calls `act` on a stack that no other thread uses. Returns `None` without a call if there is none.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if no stack can be mapped.
    ///
    /// # Panics
    ///
    /// A panic of `act` aborts the process.
    pub fn call<F: FnOnce() -> R, R>(&self, act: F) -> io::Result<Option<R>> {
        let take = |place: &&Place| place.is_taken.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
        let Some(place) = self.places.iter().find(take) else { return Ok(None) };
        let result = place.top(STACK_BYTES).map(|top| {
            let mut call = Call { act: Some(act), result: None };
            // SAFETY: the stack is mapped, and this thread has taken it. The function gets the data of its type, and
            // does not unwind.
            unsafe { call_on_stack(top, Call::<F, R>::run, (&raw mut call).cast()) };
            call.result
        });
        place.is_taken.store(0, Release);
        result
    }

    /// In a fork child: ends the calls of the parent's other threads.
    pub fn begin_child(&self) {
        self.places.iter().for_each(|place| place.is_taken.store(0, Relaxed));
    }
}

impl Place {
    /// Returns the address behind the stack, which is mapped first if needed. The caller has taken the place.
    fn top(&self, stack_bytes: usize) -> io::Result<usize> {
        let page = mem::os_page_bytes();
        let total = stack_bytes.next_multiple_of(page) + page;
        let mut base = self.base.load(Relaxed);
        if base == 0 {
            base = mem::reserve(total, page, 0)?;
            // SAFETY: the range was reserved above.
            if let Err(error) = unsafe { mem::open(base + page, total - page) } {
                // SAFETY: no other code knows the addresses.
                unsafe { mem::unreserve(base, total) };
                return Err(error);
            }
            self.base.store(base, Relaxed);
        }
        Ok(base + total)
    }
}

/// A function to call, and its result.
struct Call<F, R> {
    act: Option<F>,
    result: Option<R>,
}

impl<F: FnOnce() -> R, R> Call<F, R> {
    /// Calls the function of the call at `data`, which no other code accesses meanwhile.
    extern "C" fn run(data: *mut c_void) {
        // SAFETY: the only caller passes a call of this type.
        let call = unsafe { &mut *data.cast::<Self>() };
        call.result = call.act.take().map(|act| act());
    }
}

/// Calls `function` with the stack pointer set to `top`, and restores the stack pointer afterwards. Backtraces end
/// here: the caller's frame is not on this stack, and behind `top` other memory may lie, or none.
///
/// # Safety
///
/// `top` must be the upper end of a writable range that is large enough for `function`, and be aligned to 16 bytes.
/// `function` must return normally, without unwinding or jumping out, and must accept `argument`.
#[unsafe(naked)]
unsafe extern "C" fn call_on_stack(top: usize, function: extern "C" fn(*mut c_void), argument: *mut c_void) {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined rip",
        "push rbp",
        "mov rbp, rsp",
        "mov rsp, rdi",
        "mov rdi, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        "ret",
        ".cfi_endproc",
    );
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined x30",
        "stp x29, x30, [sp, #-16]!",
        "mov x29, sp",
        "mov sp, x0",
        "mov x0, x2",
        "blr x1",
        "mov sp, x29",
        "ldp x29, x30, [sp], #16",
        "ret",
        ".cfi_endproc",
    );
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

    /// A backtrace on a separate stack must end where the stack begins: behind it lies other memory, or none.
    #[test]
    fn backtraces_end_at_the_begin_of_the_stack() {
        static STACKS: Stacks<1, { 1 << 20 }> = Stacks::new();
        let mut traces = [String::new(), String::new()];
        call_on_new(1 << 20, || traces[0] = std::backtrace::Backtrace::force_capture().to_string());
        traces[1] = STACKS.call(|| std::backtrace::Backtrace::force_capture().to_string()).unwrap().unwrap();
        for trace in traces {
            let mut functions = trace.lines().filter(|line| !line.trim_start().starts_with("at ")).rev();
            assert!(functions.next().unwrap().ends_with("call_on_stack"), "{trace}");
            assert!(functions.any(|function| function.contains("backtraces_end_at_the_begin")), "{trace}");
        }
    }

    /// Functions that need much stack run on additional stacks, one inside of the other. The third finds no stack.
    #[test]
    fn calls_run_on_stacks_of_their_own() {
        static STACKS: Stacks<2, { 1 << 20 }> = Stacks::new();
        fn used(depth: usize) -> usize {
            let buffer = std::hint::black_box([depth as u8; 4096]);
            if depth == 0 { buffer.len() } else { buffer.len() + used(depth - 1) + usize::from(buffer[7]) - depth }
        }
        let here = 0_u8;
        for _ in 0..3 {
            let result = STACKS.call(|| {
                let there = 0_u8;
                assert!((&raw const here).addr().abs_diff((&raw const there).addr()) > 1 << 16);
                let inner = STACKS.call(|| (STACKS.call(|| ()).unwrap(), used(30))).unwrap();
                assert_eq!(inner, Some((None, 31 * 4096)));
                used(60)
            });
            assert_eq!(result.unwrap(), Some(61 * 4096));
        }
    }
}
