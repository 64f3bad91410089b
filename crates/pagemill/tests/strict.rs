//! Tests of strict volatile ranges. An access to a purged page must raise `SIGBUS`, other accesses must not, and faults
//! of the program must reach its own handlers.
#![allow(unsafe_code)] // handlers, and a function that faults

#[path = "common/area.rs"]
mod area;
mod common;

use area::{Area, marked, purge, vrange};
use common::{assert_in_child, exclusive_test, pagemill};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_volatile::handle_fault;
use pagemill_volatile::vrange::{How, Mode};
use proptest::prelude::*;
use std::ffi::c_void;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Result of [`probe`] if the read raised `SIGBUS`.
const GOT_SIGBUS: i32 = -1;
/// Result of [`probe`] if the read raised `SIGSEGV`.
const GOT_SIGSEGV: i32 = -2;
/// Result of [`probe`] if the read raised a signal whose information was wrong.
const GOT_WRONG_INFO: i32 = -3;

/// Reads a byte by a single instruction, and returns the byte. If the instruction faults, a signal handler can skip it
/// and set the result.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn load(addr: usize) -> i32 {
    core::arch::naked_asm!("movzx eax, byte ptr [rdi]", "ret")
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn load(addr: usize) -> i32 {
    core::arch::naked_asm!("ldrb w0, [x0]", "ret")
}

/// If the instruction of [`load`] caused the fault, skips it and sets its result to `value`. Returns the address that
/// [`load`] was reading; `None` for another instruction.
fn set_load_result(context: &mut libc::ucontext_t, value: i32) -> Option<usize> {
    let start = load as *const () as usize;
    #[cfg(target_arch = "x86_64")]
    {
        let registers = &mut context.uc_mcontext.gregs;
        let is_load = registers[libc::REG_RIP as usize] as usize == start;
        registers[libc::REG_RIP as usize] += if is_load { 3 } else { 0 };
        registers[libc::REG_RAX as usize] = i64::from(value);
        is_load.then_some(registers[libc::REG_RDI as usize] as usize)
    }
    #[cfg(target_arch = "aarch64")]
    {
        let machine = &mut context.uc_mcontext;
        let (is_load, addr) = (machine.pc as usize == start, machine.regs[0] as usize);
        machine.pc += if is_load { 4 } else { 0 };
        machine.regs[0] = value as u32 as u64;
        is_load.then_some(addr)
    }
}

extern "C" fn on_signal(signal: i32, info: &libc::siginfo_t, context: &mut libc::ucontext_t) {
    // SAFETY: the signal is a fault, so the field is valid.
    let reported_addr = unsafe { info.si_addr() } as usize;
    let (value, code) =
        if signal == libc::SIGBUS { (GOT_SIGBUS, libc::BUS_ADRERR) } else { (GOT_SIGSEGV, info.si_code) };
    match set_load_result(context, value) {
        Some(addr) if addr == reported_addr && info.si_signo == signal && info.si_code == code => {}
        Some(_) => drop(set_load_result(context, GOT_WRONG_INFO)),
        None => {
            // SAFETY: the fault was elsewhere: restores the default action, so that the next fault ends the process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
}

/// Handles a signal like a handler that the program has installed after Pagemill's handler.
extern "C" fn on_late_signal(signal: i32, info: &libc::siginfo_t, context: &mut libc::ucontext_t) {
    // SAFETY: the arguments of this handler.
    let is_done = unsafe { handle_fault(signal, std::ptr::from_ref(info).cast(), std::ptr::from_mut(context).cast()) };
    if !is_done {
        on_signal(signal, info, context);
    }
}

type Handler = extern "C" fn(i32, &libc::siginfo_t, &mut libc::ucontext_t);

fn install(signal: i32, handler: Handler) -> libc::sigaction {
    // SAFETY: plain data; a handler that touches nothing but its arguments.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(signal, &raw const action, &raw mut before), 0);
        before
    }
}

/// Sets the alternate signal stack of this thread, and returns the previous one. The stack must exist while the thread
/// uses it.
fn change_signal_stack(stack: &libc::stack_t) -> libc::stack_t {
    // SAFETY: the structures are plain data.
    unsafe {
        let mut before: libc::stack_t = std::mem::zeroed();
        assert_eq!(libc::sigaltstack(stack, &raw mut before), 0);
        before
    }
}

/// Returns the byte at an address. If the read faults, returns [`GOT_SIGBUS`], [`GOT_SIGSEGV`] or [`GOT_WRONG_INFO`].
/// The first call installs signal handlers of the program.
fn probe(addr: usize) -> i32 {
    static INSTALL_HANDLERS: Once = Once::new();
    INSTALL_HANDLERS.call_once(|| {
        install(libc::SIGBUS, on_signal);
        install(libc::SIGSEGV, on_signal);
    });
    // SAFETY: a signal handler handles a fault of this read.
    unsafe { load(addr) }
}

fn probe_page(area: &Area, index: usize) -> i32 {
    probe(area.page_ptr(index) as usize)
}

fn probe_pages(area: &Area) -> Vec<i32> {
    (0..area.pages()).map(|index| probe_page(area, index)).collect()
}

/// Marks pages of the area as strictly volatile. Returns false if the kernel does not support strict marks.
fn mark(area: &Area, first: usize, count: usize, how: How) -> bool {
    probe(area.addr);
    match area.vrange(first, count, Mode::VolatileStrict, how) {
        Err(Error::Unsupported { what }) => {
            println!("skipped: {what}");
            false
        }
        result => result.map(|_| true).unwrap(),
    }
}

/// An access to a purged page must raise `SIGBUS` with the page's address, and fail with `EFAULT` in system calls,
/// until the page is unmarked. After that, the page must read as zeros and be writable. Other pages must not be
/// affected.
#[test]
fn purged_pages_raise_sigbus() {
    let _exclusive = exclusive_test();
    let area = Area::plain(64, 1);
    if !mark(&area, 16, 16, How::Full) {
        return;
    }
    assert!(probe_pages(&area).iter().all(|byte| *byte == 1), "nothing is purged yet");
    let counted = stats::get(Counter::PurgedTouched);
    assert_eq!(purge(usize::MAX), 16 * os_page_bytes());
    let expected: Vec<i32> = (0..64).map(|index| if (16..32).contains(&index) { GOT_SIGBUS } else { 1 }).collect();
    assert_eq!(probe_pages(&area), expected);
    assert_eq!(probe(area.page_ptr(20) as usize + 777), GOT_SIGBUS, "in the midst of a page");
    assert_eq!(stats::get(Counter::PurgedTouched) - counted, 17);
    let mut ends = [0; 2];
    // SAFETY: writes two descriptors, and reads what the kernel can read.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        assert_eq!(libc::write(ends[1], area.page_ptr(20).cast::<c_void>(), 1), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
        assert_eq!(libc::write(ends[1], area.page_ptr(40).cast::<c_void>(), 1), 1);
        libc::close(ends[0]);
        libc::close(ends[1]);
    }
    assert_eq!(area.mark(40, 8), marked(8, false), "another part, and not strict");
    assert_eq!(area.unmark(16, 4), marked(4, true));
    assert_eq!((probe_page(&area, 16), probe_page(&area, 19), probe_page(&area, 20)), (0, 0, GOT_SIGBUS));
    assert_eq!(area.unmark(0, 64), marked(20, true));
    area.fill(2);
    assert!(area.is_filled_with(2));
}

/// Purged pages are marked strictly again. Their guard pages must stay. Both a plain mark and `forget` must remove the
/// guard pages.
#[test]
fn guards_stay_until_a_plain_mark_or_unmark() {
    let _exclusive = exclusive_test();
    let area = Area::plain(32, 1);
    if !mark(&area, 0, 32, How::Full) {
        return;
    }
    purge(usize::MAX);
    assert!(mark(&area, 0, 16, How::Partial));
    assert_eq!((probe_page(&area, 0), probe_page(&area, 31)), (GOT_SIGBUS, GOT_SIGBUS));
    assert_eq!(purge(usize::MAX), 0, "there is nothing to purge");
    area.mark(8, 8);
    assert_eq!(
        (probe_page(&area, 7), probe_page(&area, 8), probe_page(&area, 15), probe_page(&area, 16)),
        (GOT_SIGBUS, 0, 0, GOT_SIGBUS)
    );
    pagemill().vranges.forget(area.addr..area.page_ptr(4) as usize);
    assert_eq!((probe_page(&area, 3), probe_page(&area, 4)), (0, GOT_SIGBUS));
    assert_eq!(area.unmark(0, 32), marked(28, true));
    assert!(probe_pages(&area).iter().all(|byte| *byte == 0));
}

/// Strictly marked memory in huge pages must be purged, even in parts of a huge page. After it is unmarked, the memory
/// must be able to get huge pages again.
#[test]
fn unmarked_memory_gets_huge_pages_again() {
    let _exclusive = exclusive_test();
    let is_huge = |area: &Area, at: usize| {
        area.write(at, 1);
        let addr = (area.addr + at * os_page_bytes()) & !(BLOCK_BYTES - 1);
        pagemill_sys::mem::resident_bytes(addr, BLOCK_BYTES).unwrap() == BLOCK_BYTES
    };
    let area = Area::huge(4, 1);
    let (per_block, other) = (BLOCK_BYTES / os_page_bytes(), Area::huge(1, 1));
    if !mark(&area, per_block / 2, 3 * per_block, How::Full) {
        return;
    }
    assert_eq!(purge(usize::MAX), 3 * BLOCK_BYTES);
    let is_gone = |index: &usize| (per_block / 2..7 * per_block / 2).contains(index);
    assert!((0..area.pages()).all(|index| probe_page(&area, index) == if is_gone(&index) { GOT_SIGBUS } else { 1 }));
    assert!(area.unmark(0, area.pages()).purged);
    let (major, minor) = pagemill_sys::process::kernel_release();
    // Since Linux 6.14, the kernel frees empty page tables.
    if (major, minor) >= (6, 14) && is_huge(&other, 0) {
        other.mark(0, per_block);
        purge(usize::MAX);
        assert!(is_huge(&area, per_block) || !is_huge(&other, 0), "the refault was in small pages");
    }
    assert!((0..per_block / 2).all(|index| probe_page(&area, index) == 1), "beside it nothing changed");
}

/// Locked pages of a strict range cannot be purged. They must keep their bytes, raise no signal, and never read as
/// zeros.
#[test]
fn locked_pages_raise_no_signal() {
    let _exclusive = exclusive_test();
    let area = Area::plain(32, 7);
    // SAFETY: locks pages of a mapping of this test.
    if unsafe { libc::mlock(area.page_ptr(8).cast(), 8 * os_page_bytes()) } != 0 {
        return println!("skipped: nothing can be locked: {}", std::io::Error::last_os_error());
    }
    for (first, count) in [(8, 8), (0, 32)] {
        if !mark(&area, first, count, How::Full) {
            return;
        }
        purge(usize::MAX);
        let found = probe_pages(&area);
        assert!(found[8..16].iter().all(|byte| *byte == 7));
        assert!(found.iter().all(|byte| [7, GOT_SIGBUS].contains(byte)), "no zeros");
        assert_eq!(area.unmark(0, 32).purged, found.contains(&GOT_SIGBUS));
        // SAFETY: the mapping belongs to this test. It is unlocked for the fill, and locked again.
        unsafe { libc::munlock(area.page_ptr(8).cast(), 8 * os_page_bytes()) };
        area.fill(7);
        // SAFETY: as above.
        unsafe { libc::mlock(area.page_ptr(8).cast(), 8 * os_page_bytes()) };
    }
}

/// Faults of the program must reach the program's own handler with the kernel's information, near strict ranges and
/// elsewhere.
#[test]
fn faults_of_the_program_reach_its_handler() {
    let _exclusive = exclusive_test();
    let (area, protected) = (Area::plain(8, 1), Area::plain(8, 1));
    if !mark(&area, 0, 8, How::Full) {
        return;
    }
    // SAFETY: the mapping belongs to this test.
    unsafe { libc::mprotect(protected.addr as *mut _, protected.len, libc::PROT_NONE) };
    purge(usize::MAX);
    assert_eq!(
        (probe_page(&protected, 3), probe(os_page_bytes()), probe_page(&area, 3)),
        (GOT_SIGSEGV, GOT_SIGSEGV, GOT_SIGBUS)
    );
    // A handler that was installed later must pass on faults that are not its own.
    let before = install(libc::SIGSEGV, on_late_signal);
    assert_eq!(
        (probe_page(&protected, 3), probe(os_page_bytes()), probe_page(&area, 3)),
        (GOT_SIGSEGV, GOT_SIGSEGV, GOT_SIGBUS)
    );
    // SAFETY: the call restores the previous handler; the mapping belongs to this test.
    unsafe {
        libc::sigaction(libc::SIGSEGV, &raw const before, std::ptr::null_mut());
        libc::mprotect(protected.addr as *mut _, protected.len, libc::PROT_READ | libc::PROT_WRITE);
    }
    assert_eq!((probe_page(&protected, 3), probe_page(&area, 3)), (1, GOT_SIGBUS));
}

/// A fork child inherits guard pages and the signal handler. If the child removes its guard pages, the guard pages of
/// the parent must stay.
#[test]
fn guards_of_a_fork_child_are_separate() {
    let _exclusive = exclusive_test();
    let area = Area::plain(16, 3);
    if !mark(&area, 0, 16, How::Full) {
        return;
    }
    purge(usize::MAX);
    assert_in_child(|| {
        let is_guarded = (0..16).all(|index| probe_page(&area, index) == GOT_SIGBUS);
        is_guarded && area.unmark(0, 8).purged && probe_page(&area, 0) == 0 && probe_page(&area, 8) == GOT_SIGBUS
    });
    assert!((0..16).all(|index| probe_page(&area, index) == GOT_SIGBUS));
}

/// A signal handler reads a purged page while its thread purges or unmarks memory. The handler must not deadlock with
/// its own thread.
#[test]
fn a_signal_handler_does_not_deadlock_with_its_thread() {
    static HANDLER_READ_COUNT: AtomicUsize = AtomicUsize::new(0);
    static PURGED_PAGE_ADDR: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn on_alarm(_: i32, _: &libc::siginfo_t, _: &mut libc::ucontext_t) {
        // SAFETY: a signal handler handles a fault of this read.
        unsafe { load(PURGED_PAGE_ADDR.load(Relaxed)) };
        HANDLER_READ_COUNT.fetch_add(1, Relaxed);
    }
    let _exclusive = exclusive_test();
    let area = Area::huge(8, 1);
    if !mark(&area, 0, area.pages(), How::Full) {
        return;
    }
    // Up to three handlers may be nested. On processors with wide registers, this needs more than a thread's usual 8
    // KiB for signal handlers.
    let mut room = vec![0_u8; 128 << 10];
    let nested = libc::stack_t { ss_sp: room.as_mut_ptr().cast(), ss_flags: 0, ss_size: room.len() };
    let own_stack = change_signal_stack(&nested);
    PURGED_PAGE_ADDR.store(area.page_ptr(area.pages() / 2) as usize, Relaxed);
    let before = install(libc::SIGPROF, on_alarm);
    // Another thread sends signals to this thread all the time.
    // SAFETY: the calls have no arguments.
    let (process, thread) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_gettid)) };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                // SAFETY: the signal has a handler, and the receiving thread exists until it has joined this one.
                unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGPROF) };
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        // Runs at least 300 rounds, and more until the handler has run often enough.
        let mut round = 0;
        while round < 300 || HANDLER_READ_COUNT.load(Relaxed) <= 100 {
            purge(usize::MAX);
            area.unmark(0, area.pages());
            (0..area.pages()).step_by(64).for_each(|index| area.write(index, 1));
            mark(&area, 0, area.pages(), How::Full);
            round += 1;
        }
        is_over.store(true, Relaxed);
    });
    // SAFETY: the call restores the previous handler.
    unsafe { libc::sigaction(libc::SIGPROF, &raw const before, std::ptr::null_mut()) };
    change_signal_stack(&own_stack);
}

/// A child is forked while another thread removes guard pages. The child must be able to access the pages that it
/// unmarks.
#[test]
fn a_child_forked_during_unmarking_can_access_its_pages() {
    let _exclusive = exclusive_test();
    let area = Area::huge(4, 3);
    if !mark(&area, 0, area.pages(), How::Full) {
        return;
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                purge(usize::MAX);
                area.unmark(0, area.pages());
                mark(&area, 0, area.pages(), How::Full);
            }
        });
        for _ in 0..100 {
            assert_in_child(|| {
                area.unmark(0, area.pages());
                (0..area.pages()).all(|index| [0, 3].contains(&probe_page(&area, index)))
            });
        }
        is_over.store(true, Relaxed);
    });
}

/// A child does not inherit memory with `MADV_DONTFORK`, and maps new memory at the same address. Records of marks that
/// the child inherits must not change the new memory.
#[test]
fn memory_that_a_child_does_not_inherit_is_not_changed() {
    let _exclusive = exclusive_test();
    let area = Area::huge(2, 3);
    if !mark(&area, 0, area.pages(), How::Full) {
        return;
    }
    purge(usize::MAX);
    // SAFETY: the call affects only children.
    unsafe { libc::madvise(area.addr as *mut _, area.len, libc::MADV_DONTFORK) };
    assert_in_child(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: in this child, nothing is mapped at this address.
        let mapped = unsafe {
            libc::mmap(area.addr as *mut _, area.len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) as usize
        };
        (0..area.pages()).for_each(|index| area.write(index, 9));
        area.unmark(0, area.pages());
        mapped == area.addr && (0..area.pages()).all(|index| probe_page(&area, index) == 9)
    });
}

/// A thread locks memory while another thread purges it. Purged pages must raise `SIGBUS`, other pages must keep their
/// bytes, and no page may read as zeros.
#[test]
fn purges_race_with_locking() {
    let _exclusive = exclusive_test();
    let area = Area::huge(4, 1);
    if !mark(&area, 0, area.pages(), How::Full) {
        return;
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                // SAFETY: the mapping belongs to this test, and its contents do not change.
                unsafe {
                    libc::mlock2(area.addr as *const _, area.len, libc::MLOCK_ONFAULT as _);
                    libc::munlock(area.addr as *const _, area.len);
                }
            }
        });
        for _ in 0..300 {
            purge(usize::MAX);
            assert!(probe_pages(&area).iter().step_by(16).all(|found| [1, GOT_SIGBUS].contains(found)), "no zeros");
            area.unmark(0, area.pages());
            area.fill(1);
            mark(&area, 0, area.pages(), How::Full);
        }
        is_over.store(true, Relaxed);
    });
}

/// Slots of the heap are marked as strictly volatile and purged. They must behave like other memory, and the number of
/// charged bytes must stay correct.
#[test]
fn heap_slots_can_be_marked_strictly() {
    let _exclusive = exclusive_test();
    for len in [2 * BLOCK_BYTES, BLOCK_BYTES / 4] {
        let addr = pagemill().heap.allocate(len, BLOCK_BYTES.min(len)).unwrap().addr.as_ptr();
        // SAFETY: the slot is live and of that length, and belongs to this test.
        unsafe { addr.write_bytes(6, len) };
        pagemill().account.reconcile();
        let before = pagemill().account.resident();
        let area = Area { addr: addr as usize, len };
        let is_marked = mark(&area, 0, area.pages(), How::Full);
        if is_marked {
            assert_eq!((purge(usize::MAX), before - pagemill().account.resident()), (len, len as u64));
            assert!(probe_pages(&area).iter().all(|byte| *byte == GOT_SIGBUS));
            assert!(area.unmark(0, area.pages()).purged);
            area.fill(5);
            assert!(area.is_filled_with(5));
            pagemill().account.reconcile();
            assert_eq!(pagemill().account.resident(), before);
        }
        std::mem::forget(area);
        // SAFETY: the slot was allocated above and is no longer marked.
        unsafe { pagemill().heap.free(addr as usize).unwrap() };
    }
}

/// Two threads make a million reads of pages while a third thread purges them. A page must have its byte or, once a
/// read of it raised `SIGBUS`, raise `SIGBUS` from then on. It must never read as zero. Unmarked memory must not raise
/// a signal.
#[test]
fn purges_race_with_reads() {
    const PROBE_COUNT: usize = 1_000_000;
    let _exclusive = exclusive_test();
    let areas = [Area::plain(64, 1), Area::huge(2, 1), Area::plain(512, 1)];
    let others = [Area::plain(64, 1), Area::huge(1, 1)];
    if !mark(&areas[0], 0, 64, How::Full) {
        return;
    }
    areas[0].unmark(0, 64);
    let (done, signals) = (AtomicUsize::new(0), AtomicUsize::new(0));
    while done.load(Relaxed) < PROBE_COUNT {
        for (area, how) in areas.iter().zip([How::Full, How::Partial, How::Partial]) {
            mark(area, 0, area.pages(), how);
        }
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 0..2usize {
                let (areas, others, done, signals, is_over) = (&areas, &others, &done, &signals, &is_over);
                scope.spawn(move || {
                    let mut random = 0x9E37_79B9 + seed;
                    let mut is_gone: Vec<Vec<bool>> = areas.iter().map(|area| vec![false; area.pages()]).collect();
                    let mut last = false;
                    // Each thread makes one more round of reads after the last purge.
                    while !std::mem::replace(&mut last, is_over.load(Relaxed)) {
                        for _ in 0..500 {
                            random =
                                random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                            let which = (random >> 33) % areas.len();
                            let index = (random >> 40) % areas[which].pages();
                            let found = probe_page(&areas[which], index);
                            let was_gone = std::mem::replace(&mut is_gone[which][index], found == GOT_SIGBUS);
                            assert!(
                                found == GOT_SIGBUS || found == 1 && !was_gone,
                                "area {which}, page {index}: {found}"
                            );
                            signals.fetch_add(usize::from(found == GOT_SIGBUS), Relaxed);
                            let other = &others[which % others.len()];
                            assert_eq!(probe_page(other, index % other.pages()), 1, "not marked");
                        }
                        done.fetch_add(1000, Relaxed);
                    }
                });
            }
            while purge(1) > 0 {
                std::thread::yield_now();
            }
            is_over.store(true, Relaxed);
        });
        for area in &areas {
            assert!(probe_pages(area).iter().all(|found| *found == GOT_SIGBUS), "all were purged");
            assert_eq!(area.unmark(0, area.pages()), marked(area.pages(), true));
            area.fill(1);
        }
    }
    // Each of the two threads reads 500 purged pages after the last purge.
    assert!(signals.load(Relaxed) >= 1000, "only {signals:?} signals");
}

/// Two threads mark, unmark and read the same memory while a third thread purges it. A thread that faults while a guard
/// page is removed must continue.
#[test]
fn marks_race_with_reads() {
    let _exclusive = exclusive_test();
    let area = Area::huge(2, 1);
    if !mark(&area, 0, area.pages(), How::Full) {
        return;
    }
    let (is_over, signals) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                purge(usize::MAX);
            }
        });
        let probers = [0, 1].map(|seed| {
            let (area, signals) = (&area, &signals);
            scope.spawn(move || {
                // Runs at least 3000 rounds, and more until purges have caused enough signals.
                for round in (0..).take_while(|round| *round < 3000 || signals.load(Relaxed) < 2000) {
                    let first = (round * 37 + seed * 11) % (area.pages() - 40);
                    mark(area, first, 40, if round % 2 == 0 { How::Full } else { How::Partial });
                    for index in first..first + 40 {
                        let found = probe_page(area, index);
                        assert!([0, 1, GOT_SIGBUS].contains(&found), "{found}");
                        signals.fetch_add(usize::from(found == GOT_SIGBUS), Relaxed);
                    }
                    area.unmark(first, 20);
                }
            })
        });
        let ended = probers.map(|prober| prober.join());
        is_over.store(true, Relaxed);
        ended.into_iter().for_each(|prober| prober.unwrap());
    });
    area.unmark(0, area.pages());
    area.fill(1);
    assert!(area.is_filled_with(1));
}

/// Invalid ranges must be rejected for strict marks as for plain marks, before anything changes.
#[test]
fn invalid_ranges_are_rejected() {
    let _exclusive = exclusive_test();
    let page = os_page_bytes();
    assert!(matches!(vrange(1, page, Mode::VolatileStrict, How::Full), Err(Error::BadRange { .. })));
    assert!(matches!(vrange(page, page, Mode::VolatileStrict, How::Full), Err(Error::NotMapped { .. })));
    assert!(pagemill().vranges.list().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Random calls must agree with a model: a call may change the results of reading only those pages that it marks,
    /// unmarks or purges.
    #[test]
    fn calls_agree_with_a_model(steps in prop::collection::vec((0usize..64, 1usize..32, 0u8..8), 1..40)) {
        #[derive(Clone, Copy, PartialEq)]
        enum PageState { Nonvolatile, Plain, Strict }
        let _exclusive = exclusive_test();
        let area = Area::plain(64, 1);
        if !mark(&area, 0, 1, How::Full) {
            return Ok(());
        }
        area.unmark(0, 1);
        let mut model = [PageState::Nonvolatile; 64];
        let mut before = probe_pages(&area);
        for (first, count, act) in steps {
            let count = count.min(64 - first);
            let part = first..first + count;
            let how = if act % 2 == 0 { How::Full } else { How::Partial };
            match act {
                0 | 1 => drop(area.vrange(first, count, Mode::Volatile, how).unwrap()),
                2 | 3 => drop(area.vrange(first, count, Mode::VolatileStrict, how).unwrap()),
                4 | 5 => {
                    let lost = part.clone().any(|at| model[at] != PageState::Nonvolatile && before[at] != 1);
                    let unmarked = area.unmark(first, count);
                    let count = part.clone().filter(|at| model[*at] != PageState::Nonvolatile).count();
                    let bytes = count * os_page_bytes();
                    prop_assert_eq!(unmarked.bytes as usize, bytes);
                    prop_assert!(unmarked.purged || !lost);
                }
                6 => drop(purge(usize::MAX)),
                _ => drop(purge(count * os_page_bytes())),
            }
            let now = probe_pages(&area);
            for at in 0..64 {
                let (was, is) = (before[at], now[at]);
                let allowed = match (part.contains(&at), act, model[at]) {
                    // Plain marks and unmarks remove guard pages.
                    (true, 0 | 1 | 4 | 5, _) => is == was.max(0),
                    (_, 6, PageState::Strict) => is == GOT_SIGBUS,
                    (_, 6, PageState::Plain) => is == 0,
                    (_, 7, PageState::Strict) => is == was || is == GOT_SIGBUS,
                    (_, 7, PageState::Plain) => is == was || is == 0,
                    _ => is == was,
                };
                prop_assert!(allowed, "act {}, page {}: {} became {}", act, at, was, is);
            }
            let new_state = match act {
                0 | 1 => Some(PageState::Plain),
                2 | 3 => Some(PageState::Strict),
                4 | 5 => Some(PageState::Nonvolatile),
                _ => None,
            };
            if let Some(now) = new_state {
                model[part.clone()].fill(now);
            }
            // Writes again to the pages that are not marked.
            for at in (0..64).filter(|at| model[*at] == PageState::Nonvolatile) {
                area.write(at, 1);
            }
            before = probe_pages(&area);
        }
    }
}
