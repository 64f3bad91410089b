//! Handles faults in memory of the program, before the program's own `SIGSEGV` handler runs.
//!
//! [`install`] replaces the program's `SIGSEGV` handler by that of this module, and stores the program's handler. The
//! [`Judge`]s decide about each fault, in the order of their installation. A fault that is the program's own is passed to the program's handler, with the
//! mask and flags that the program set. The jump to the program's handler leaves no stack frame of this module's
//! handler. For a fault on a purged page, this thread gets a `SIGBUS` at the faulting instruction, which runs the
//! program's `SIGBUS` handler or ends the process.
//!
//! Nothing here allocates. The handler takes no lock that the interrupted thread could hold, because a thread that
//! holds the lock has blocked all signals.
#![allow(unsafe_code)] // signal actions, a handler

use crate::result::check_result;
use crate::{process, thread};
use libc::{c_int, c_void};
use std::io;
use std::mem::size_of;
use std::sync::atomic::{
    AtomicU32, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence,
};

const SEGV_MAPERR: c_int = 1;
const SEGV_ACCERR: c_int = 2;
/// Flag of an action that contains the address of the function that returns from the signal handler.
const SA_RESTORER: u64 = 0x0400_0000;
/// Flags that the action of this module's handler copies from the program's action: the stack to use, and whether
/// system calls restart.
const COPIED_FLAGS: u64 = (libc::SA_ONSTACK | libc::SA_RESTART) as u64;

/// A signal's action: the kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Action {
    pub handler: usize,
    pub flags: u64,
    pub restorer: usize,
    /// Signals that are blocked while the handler runs: one bit per signal; bit 0 is signal 1.
    pub mask: u64,
}

/// The default action of a signal (`SIG_DFL`).
const DEFAULT_ACTION: Action = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };

/// A fault, as the kernel reports it. A [`Judge`] decides from these values.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub addr: usize,
    /// The mapping exists but forbids the access. If false, there is no mapping, or a guard page.
    pub is_protected: bool,
    /// The kind of access that faulted; `None` where the processor does not report the kind.
    pub access: Option<Access>,
}

/// The kind of access that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    /// An instruction fetch at the address.
    Fetch,
}

/// The decision of a [`Judge`] about a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The judge does not know the address. The next judge decides. After the last one, the fault is the program's own,
    /// and the program's handler is called.
    Program,
    /// The page has no contents: it was purged, or lies behind the end of a file. The thread gets a `SIGBUS`.
    Purged,
    /// The access is retried at once: the judge has made the page accessible.
    Resolved,
    /// The access is retried after a pause: another thread changes the page.
    Again,
}

/// A function that decides how a fault is handled. The function runs in a signal handler, so it must neither allocate
/// nor lock.
pub type Judge = fn(&Fault) -> Verdict;

/// Maximum number of judges.
const MAX_JUDGES: usize = 4;

/// Addresses of the [`Judge`] functions that were passed to [`install`], in that order; the others are 0.
static JUDGE_ADDRESSES: [AtomicUsize; MAX_JUDGES] = [const { AtomicUsize::new(0) }; MAX_JUDGES];
/// Id of the process that has installed the handler; 0 before [`install`].
static INSTALLED_PID: AtomicU32 = AtomicU32::new(0);
/// The program's `SIGSEGV` action is in `ACTION_SLOTS[ACTION_SEQUENCE % 2]`. A writer fills the other slot, then
/// increments `ACTION_SEQUENCE`.
static ACTION_SEQUENCE: AtomicU64 = AtomicU64::new(0);
/// Two buffers, each for the words of one [`Action`] of the program.
static ACTION_SLOTS: [[AtomicU64; 4]; 2] = [const { [const { AtomicU64::new(0) }; 4] }; 2];
/// Lock word: 1 while a thread reads or replaces the `SIGSEGV` action, else 0.
static ACTION_LOCK: AtomicU32 = AtomicU32::new(0);

/// Adds `judge` to the functions that decide about every fault, unless it was added before. The first call installs
/// this module's `SIGSEGV` handler.
///
/// # Errors
///
/// Errors of `rt_sigaction`. `ENOSPC` if there are too many judges.
pub fn install(judge: Judge) -> io::Result<()> {
    let is_added = || JUDGE_ADDRESSES.iter().any(|address| address.load(Acquire) == judge as usize);
    if INSTALLED_PID.load(Acquire) != 0 && is_added() {
        return Ok(());
    }
    under_lock(|| {
        if !is_added() {
            let free = JUDGE_ADDRESSES.iter().find(|address| address.load(Relaxed) == 0);
            free.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))?.store(judge as usize, Release);
        }
        if INSTALLED_PID.load(Relaxed) != 0 {
            return Ok(());
        }
        let before = rt_sigaction(libc::SIGSEGV, None)?;
        // In a fork child the handler may be installed already, if the fork happened during `install`.
        if before.handler != on_fault as *const () as usize {
            write_program_action(before);
            rt_sigaction(libc::SIGSEGV, Some(handler_action(before)))?;
        }
        INSTALLED_PID.store(process::id(), Release);
        Ok(())
    })
}

/// Performs `sigaction(SIGSEGV)` for a program whose calls are intercepted. Returns the program's previous action. The
/// handler of [`install`] stays installed.
///
/// # Errors
///
/// Errors of `rt_sigaction`.
pub fn program_action(new: Option<Action>) -> io::Result<Action> {
    under_lock(|| {
        // A child of `vfork` shares the parent's memory but has signal actions of its own.
        if INSTALLED_PID.load(Relaxed) != process::id() {
            return rt_sigaction(libc::SIGSEGV, new);
        }
        let before = read_program_action();
        if let Some(new) = new {
            write_program_action(new);
            rt_sigaction(libc::SIGSEGV, Some(handler_action(new)))?;
        }
        Ok(before)
    })
}

/// Releases `ACTION_LOCK` in a fork child, because the thread that held the lock may not exist in the child. Records
/// the child's process id.
pub fn begin_child() {
    ACTION_LOCK.store(0, Relaxed);
    if INSTALLED_PID.load(Relaxed) != 0 {
        INSTALLED_PID.store(process::id(), Relaxed);
    }
}

/// Handles a fault that is not the program's own. A `SIGSEGV` handler that a program installed after [`install`] calls
/// this function first. If the result is true, the program's handler must return.
///
/// After the return the access is retried, or a `SIGBUS` arrives.
///
/// # Safety
///
/// The arguments must be those that the kernel passed to a handler with `SA_SIGINFO`. That handler must call this
/// function directly.
pub unsafe fn handle(signal: c_int, info: *const c_void, context: *mut c_void) -> bool {
    let is_known =
        JUDGE_ADDRESSES[0].load(Acquire) != 0 && signal == libc::SIGSEGV && !info.is_null() && !context.is_null();
    if !is_known {
        return false;
    }
    // SAFETY: `errno` belongs to this thread.
    let errno = unsafe { *libc::__errno_location() };
    // Judges run with all signals blocked, as in this module's handler.
    let mask = change_signal_mask(libc::SIG_BLOCK, !0);
    // SAFETY: guaranteed by the caller.
    let is_done = unsafe { handle_fault(info.cast(), context.cast()) };
    if !is_done {
        change_signal_mask(libc::SIG_SETMASK, mask);
    }
    process::set_errno(errno);
    is_done
}

/// Returns the action that installs this module's handler, with flags copied from the program's action.
fn handler_action(program: Action) -> Action {
    let has_handler = ![libc::SIG_DFL, libc::SIG_IGN].contains(&program.handler);
    let copied_flags = match has_handler {
        true => program.flags & COPIED_FLAGS,
        // An ignored signal must not interrupt system calls.
        false if program.handler == libc::SIG_IGN => COPIED_FLAGS,
        false => libc::SA_ONSTACK as u64,
    };
    let flags = libc::SA_SIGINFO as u64 | copied_flags;
    Action { handler: on_fault as *const () as usize, flags, restorer: 0, mask: !0 }
}

/// Makes the system call `rt_sigaction` without the C library. Adds the restorer function where the architecture needs
/// one. Returns the previous action.
fn rt_sigaction(signal: c_int, new: Option<Action>) -> io::Result<Action> {
    let new = new.map(with_restorer);
    let pointer = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mut old = DEFAULT_ACTION;
    // SAFETY: the call reads `new` and writes `old`, both with the kernel's layout. This module's handler is never
    // unloaded.
    check_result(unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, pointer, &raw mut old, size_of::<u64>()) })?;
    Ok(old)
}

/// Adds the function that returns from the handler, which the kernel requires on this architecture.
#[cfg(target_arch = "x86_64")]
fn with_restorer(mut action: Action) -> Action {
    if action.flags & SA_RESTORER == 0 {
        action.flags |= SA_RESTORER;
        action.restorer = return_from_signal as *const () as usize;
    }
    action
}

#[cfg(not(target_arch = "x86_64"))]
fn with_restorer(action: Action) -> Action {
    debug_assert!(action.flags & SA_RESTORER == 0 || action.restorer != 0);
    action
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    #[link_name = "pagemill_restore"]
    fn return_from_signal();
}

// Debuggers and unwinders recognise the return from a signal handler by exactly these instructions. An unwinder first
// looks for a function at the byte before the return address. So a byte that belongs to no function precedes them:
// otherwise the unwinder takes the frame for one of the function that the linker placed there.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.pagemill_restore, \"ax\", @progbits",
    ".hidden pagemill_restore",
    ".globl pagemill_restore",
    ".type pagemill_restore, @function",
    "nop",
    "pagemill_restore:",
    ".byte 0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00", // mov rax, 15: rt_sigreturn
    "syscall",
    ".size pagemill_restore, . - pagemill_restore",
    ".popsection",
);

/// Stores the program's `SIGSEGV` action. The caller must hold [`ACTION_LOCK`].
fn write_program_action(action: Action) {
    let next = ACTION_SEQUENCE.load(Relaxed) + 1;
    let words = [action.handler as u64, action.flags, action.restorer as u64, action.mask];
    for (slot, word) in ACTION_SLOTS[next as usize & 1].iter().zip(words) {
        slot.store(word, Relaxed);
    }
    ACTION_SEQUENCE.store(next, Release);
}

/// Returns the program's `SIGSEGV` action. Does not block: a slot is overwritten only after the other slot has become
/// current.
fn read_program_action() -> Action {
    loop {
        let sequence = ACTION_SEQUENCE.load(Acquire);
        let [handler, flags, restorer, mask] =
            ACTION_SLOTS[sequence as usize & 1].each_ref().map(|word| word.load(Relaxed));
        fence(Acquire);
        if ACTION_SEQUENCE.load(Relaxed) == sequence {
            return Action { handler: handler as usize, flags, restorer: restorer as usize, mask };
        }
    }
}

/// Runs `act` under [`ACTION_LOCK`], with all signals of this thread blocked, so that no handler interrupts `act`.
fn under_lock<T>(act: impl FnOnce() -> T) -> T {
    let _blocked = AllSignalsBlocked::begin();
    while ACTION_LOCK.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
        thread::pause();
    }
    let result = act();
    ACTION_LOCK.store(0, Release);
    result
}

/// Blocks all signals of this thread while the value lives, so that no handler of the program runs. Costs two system
/// calls.
pub struct AllSignalsBlocked {
    before: u64,
}

impl AllSignalsBlocked {
    /// Blocks all signals of the calling thread.
    pub fn begin() -> Self {
        Self { before: change_signal_mask(libc::SIG_SETMASK, !0) }
    }
}

impl Drop for AllSignalsBlocked {
    fn drop(&mut self) {
        change_signal_mask(libc::SIG_SETMASK, self.before);
    }
}

/// Changes this thread's signal mask by a direct system call. Returns the previous mask.
fn change_signal_mask(how: c_int, mask: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: the call reads one word and writes one word.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const mask, &raw mut before, size_of::<u64>()) };
    before
}

/// Returns the bit of a signal in a signal mask.
const fn signal_bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Returns whether the page at `addr` can be read. Passes `addr` to the kernel as the address of a signal set: the
/// kernel reads the set before it rejects the invalid operation.
pub fn is_readable(addr: usize) -> bool {
    const INVALID_OPERATION: c_int = -1;
    let set = (addr & !(size_of::<u64>() - 1)) as *const u64;
    let nowhere = std::ptr::null_mut::<u64>();
    // SAFETY: the kernel checks the address itself (`EFAULT`). The mask does not change.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, INVALID_OPERATION, set, nowhere, size_of::<u64>()) };
    io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// Returns whether the four bytes at `addr` can be written. Their value stays: the kernel combines them with zero by
/// OR.
pub fn is_writable(addr: usize) -> bool {
    const FUTEX_OR_ZERO: u32 = (libc::FUTEX_OP_OR as u32) << 28;
    let (unused, operation) = (AtomicU32::new(0), libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG);
    let word = (addr & !(size_of::<u32>() - 1)) as *const u32;
    // SAFETY: the kernel checks the address itself (`EFAULT`). No thread waits on `unused`.
    unsafe { libc::syscall(libc::SYS_futex, unused.as_ptr(), operation, 0, 0, word, FUTEX_OR_ZERO) >= 0 }
}

/// The signal handler. Jumps to the address that [`choose_handler`] returns, with the kernel's arguments, or returns if
/// the address is 0.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn on_fault() {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {choose_handler}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2: ret",
        choose_handler = sym choose_handler,
    )
}

/// The signal handler. Jumps to the address that [`choose_handler`] returns, with the kernel's arguments, or returns if
/// the address is 0.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn on_fault() {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-48]!",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "mov x29, sp",
        "bl {choose_handler}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldr x2, [sp, #32]",
        "ldp x29, x30, [sp], #48",
        "cbz x16, 2f",
        "br x16",
        "2: ret",
        choose_handler = sym choose_handler,
    )
}

/// Handles a fault, or returns the address of the program's handler, which [`on_fault`] then jumps to. After 0, the
/// signal handler returns, and the faulting instruction is retried.
extern "C" fn choose_handler(_signal: c_int, info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> usize {
    // SAFETY: `errno` belongs to this thread.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the arguments are those that the kernel passed to the handler.
    let next = unsafe { if handle_fault(info, context) { 0 } else { prepare_program_handler(info, context) } };
    process::set_errno(errno);
    next
}

/// Asks the [`Judge`]s about a fault, and handles the fault unless it is the program's own. Returns whether the fault
/// was handled.
///
/// # Safety
///
/// Both arguments must be those that the kernel passed to a signal handler, and that handler must call this function.
/// `SIGBUS` must be blocked until the handler returns.
unsafe fn handle_fault(info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> bool {
    // SAFETY: the caller passes the kernel's pointers, and `si_addr` is valid for a fault.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if ![SEGV_MAPERR, SEGV_ACCERR].contains(&code) {
        return false;
    }
    // SAFETY: guaranteed by the caller.
    let access = unsafe { access_of(context) };
    let fault = Fault { addr, is_protected: code == SEGV_ACCERR, access };
    let addresses = JUDGE_ADDRESSES.iter().map(|address| address.load(Acquire)).take_while(|address| *address != 0);
    // SAFETY: `install` stored functions of this type.
    let mut verdicts = addresses.map(|address| unsafe { std::mem::transmute::<usize, Judge>(address) }(&fault));
    match verdicts.find(|verdict| *verdict != Verdict::Program).unwrap_or(Verdict::Program) {
        Verdict::Program => false,
        // SAFETY: guaranteed by the caller.
        Verdict::Purged => unsafe { queue_sigbus(addr, context) },
        Verdict::Resolved => true,
        Verdict::Again => {
            thread::pause();
            true
        }
    }
}

/// Returns the kind of access that faulted, from the processor's error code.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler.
#[cfg(target_arch = "x86_64")]
unsafe fn access_of(context: *const libc::ucontext_t) -> Option<Access> {
    const WRITE_BIT: i64 = 1 << 1;
    const FETCH_BIT: i64 = 1 << 4;
    // SAFETY: guaranteed by the caller.
    let code = unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] };
    Some(match code {
        code if code & FETCH_BIT != 0 => Access::Fetch,
        code if code & WRITE_BIT != 0 => Access::Write,
        _ => Access::Read,
    })
}

/// Returns the kind of access that faulted, from the exception syndrome that the kernel stored among the context
/// records.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler.
#[cfg(target_arch = "aarch64")]
unsafe fn access_of(context: *const libc::ucontext_t) -> Option<Access> {
    /// Kind of the context record that contains the exception syndrome.
    const ESR_MAGIC: u32 = 0x4553_5201;
    const WRITE_BIT: u64 = 1 << 6;
    /// Exception class of an instruction fetch from user mode.
    const FETCH_CLASS: u64 = 0x20;
    /// Exception class of a data access from user mode.
    const DATA_CLASS: u64 = 0x24;
    /// Offset of the context records in `uc_mcontext`, in bytes: the size of the registers and of the fields before the
    /// records, aligned to 16 bytes.
    const RECORDS_OFFSET_BYTES: usize = (8 + 31 * 8 + 3 * 8_usize).next_multiple_of(16);
    /// Size of the area of the context records, in bytes.
    const RECORDS_BYTES: usize = 4 << 10;
    // SAFETY: `context` is valid (caller). The records lie in `uc_mcontext`, and each begins with its kind and size.
    unsafe {
        let records = (&raw const (*context).uc_mcontext).cast::<u8>().add(RECORDS_OFFSET_BYTES);
        let mut at = 0;
        while at + 16 <= RECORDS_BYTES {
            let [kind, size] = records.add(at).cast::<[u32; 2]>().read();
            if kind == ESR_MAGIC {
                let syndrome = records.add(at + 8).cast::<u64>().read();
                return match syndrome >> 26 & 0x3F {
                    FETCH_CLASS => Some(Access::Fetch),
                    DATA_CLASS if syndrome & WRITE_BIT != 0 => Some(Access::Write),
                    DATA_CLASS => Some(Access::Read),
                    _ => None,
                };
            }
            if kind == 0 || size < 8 {
                return None;
            }
            at += size as usize;
        }
    }
    None
}

/// Returns the address of the signal mask that the kernel restores when the handler returns. It is the first word of
/// the C library's signal set.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler.
unsafe fn saved_mask_of(context: *mut libc::ucontext_t) -> *mut u64 {
    // SAFETY: guaranteed by the caller.
    unsafe { (&raw mut (*context).uc_sigmask).cast() }
}

/// Queues a `SIGBUS` for the address `addr` to this thread. The signal is delivered when the handler returns. Returns
/// whether the signal was queued.
///
/// If the program ignores or blocks `SIGBUS`, the signal ends the process, as a `SIGBUS` from the kernel would.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler. That handler must call this function.
unsafe fn queue_sigbus(addr: usize, context: *mut libc::ucontext_t) -> bool {
    /// The kernel's `siginfo_t` of a fault.
    #[repr(C)]
    struct FaultInfo {
        signal: c_int,
        errno: c_int,
        code: c_int,
        padding: c_int,
        addr: usize,
        rest: [u64; 13],
    }
    const _: () = assert!(size_of::<FaultInfo>() == size_of::<libc::siginfo_t>());
    // SAFETY: guaranteed by the caller.
    let mask = unsafe { saved_mask_of(context) };
    // SAFETY: `mask` points into the context, which the kernel passed.
    let is_blocked = unsafe { *mask } & signal_bit(libc::SIGBUS) != 0;
    let handler = rt_sigaction(libc::SIGBUS, None).map_or(libc::SIG_DFL, |action| action.handler);
    if is_blocked || [libc::SIG_DFL, libc::SIG_IGN].contains(&handler) {
        // With the default action `SIGBUS` ends the process. The init process of a PID namespace would ignore this
        // signal, so the fault remains a `SIGSEGV` there.
        if process::id() == 1 {
            return false;
        }
        let _ = rt_sigaction(libc::SIGBUS, Some(DEFAULT_ACTION));
        // SAFETY: `mask` points into the context, which the kernel passed.
        unsafe { *mask &= !signal_bit(libc::SIGBUS) };
    }
    let info = FaultInfo { signal: libc::SIGBUS, errno: 0, code: libc::BUS_ADRERR, padding: 0, addr, rest: [0; 13] };
    queue_signal(libc::SIGBUS, (&raw const info).cast())
}

/// Queues a signal with the given `siginfo_t` to the calling thread. Returns whether the signal was queued.
fn queue_signal(signal: c_int, info: *const c_void) -> bool {
    // SAFETY: `info` points to a whole `siginfo_t`, and the other arguments are numbers.
    unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, process::id(), process::thread_id(), signal, info) == 0 }
}

/// Prepares a call of the program's handler as the kernel would: sets the signal mask of the program's action, and
/// returns the handler's address; 0 if no handler is to be called.
///
/// # Safety
///
/// Both arguments must be those that the kernel passed to a signal handler, and that handler must call this function.
unsafe fn prepare_program_handler(info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> usize {
    // SAFETY: guaranteed by the caller.
    let (is_sent, mask) = unsafe { ((*info).si_code <= 0, saved_mask_of(context)) };
    let action = read_program_action();
    match action.handler {
        libc::SIG_IGN if is_sent => 0,
        // The init process of a PID namespace ignores a signal that a process sent, if its action is the default.
        libc::SIG_DFL if is_sent && process::id() == 1 => 0,
        libc::SIG_DFL | libc::SIG_IGN => {
            // The access is retried and ends the process with a complete core file. A signal that a process sent raises
            // no fault, so it is sent again.
            let _ = rt_sigaction(libc::SIGSEGV, Some(DEFAULT_ACTION));
            // SAFETY: guaranteed by the caller.
            unsafe { *mask &= !signal_bit(libc::SIGSEGV) };
            if is_sent {
                queue_signal(libc::SIGSEGV, info.cast());
            }
            0
        }
        handler => {
            let has = |flag: c_int| action.flags & flag as u32 as u64 != 0;
            if has(libc::SA_RESETHAND) {
                under_lock(|| write_program_action(DEFAULT_ACTION));
            }
            let itself = if has(libc::SA_NODEFER) { 0 } else { signal_bit(libc::SIGSEGV) };
            // SAFETY: guaranteed by the caller.
            change_signal_mask(libc::SIG_SETMASK, unsafe { *mask } | action.mask | itself);
            handler
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opened memory must be reported as readable and writable. Reserved or closed memory must be reported as neither.
    /// The check must change no byte.
    #[test]
    fn accessible_pages_are_reported() {
        let page = crate::mem::os_page_bytes();
        let addr = crate::mem::reserve(2 * page, page, 0).unwrap();
        assert!(!is_readable(addr));
        // SAFETY: this test reserved the range.
        unsafe { crate::mem::open(addr, page).unwrap() };
        assert!(is_readable(addr) && is_readable(addr + page - 1) && !is_readable(addr + page));
        // SAFETY: the page was opened above.
        unsafe { (addr as *mut u8).write_volatile(7) };
        assert!(is_writable(addr) && is_writable(addr + page - 1) && !is_writable(addr + page));
        // SAFETY: the page is open.
        assert_eq!(unsafe { (addr as *const u8).read_volatile() }, 7);
        // SAFETY: no other code uses the range.
        unsafe { crate::mem::close(addr, page).unwrap() };
        assert!(!is_readable(addr) && !is_writable(addr));
        // SAFETY: no other code uses the range.
        unsafe { crate::mem::unreserve(addr, 2 * page) };
    }

    /// An unwinder looks for a function at the byte before the one that a handler returns to. That must be the `nop`,
    /// which is in no function, whatever the linker placed before it.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn no_function_ends_where_handlers_return_to() {
        let code = return_from_signal as *const u8;
        // SAFETY: the code, with the byte before it, is in readable memory of this program.
        let bytes = unsafe { std::slice::from_raw_parts(code.sub(1), 3) };
        assert_eq!(bytes, [0x90, 0x48, 0xc7]);
    }

    /// Addresses that the judges of [`judges_decide_in_order`] know: the first both, the second only the latter. Their
    /// pages are opened by the judge that decides.
    static KNOWN: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

    fn judge(fault: &Fault, known: &[AtomicUsize], byte: u8) -> Verdict {
        let page = crate::mem::os_page_bytes();
        let addr = fault.addr & !(page - 1);
        if known.iter().all(|known| known.load(Relaxed) != addr) {
            return Verdict::Program;
        }
        // SAFETY: the test reserved the page, and no other thread accesses it.
        unsafe { crate::mem::open(addr, page).unwrap() };
        // SAFETY: the page was opened above.
        unsafe { (addr as *mut u8).write_volatile(byte) };
        Verdict::Again
    }

    /// Of two judges that know an address, the first decides. An address that only the second judge knows is decided by
    /// that one. Adding a judge again must change nothing.
    #[test]
    fn judges_decide_in_order() {
        let first: Judge = |fault| judge(fault, &KNOWN[..1], 1);
        let second: Judge = |fault| judge(fault, &KNOWN, 2);
        let page = crate::mem::os_page_bytes();
        let addr = crate::mem::reserve(2 * page, page, 0).unwrap();
        KNOWN[0].store(addr, Relaxed);
        KNOWN[1].store(addr + page, Relaxed);
        for judge in [first, second, first] {
            install(judge).unwrap();
        }
        // SAFETY: a judge opens the page.
        let found = [addr, addr + page].map(|addr| unsafe { (addr as *const u8).read_volatile() });
        assert_eq!(found, [1, 2]);
        assert_eq!(JUDGE_ADDRESSES.iter().filter(|address| address.load(Relaxed) != 0).count(), 2);
        // SAFETY: no other code uses the range.
        unsafe { crate::mem::unreserve(addr, 2 * page) };
    }

    /// This module's handler must use the alternate stack, and restart system calls, if the program's action has these
    /// flags.
    #[test]
    fn flags_are_copied_from_the_programs_action() {
        let handler = |flags: c_int| {
            handler_action(Action { handler: 7, flags: flags as u64, ..DEFAULT_ACTION }).flags & COPIED_FLAGS
        };
        assert_eq!(handler(libc::SA_ONSTACK), libc::SA_ONSTACK as u64);
        assert_eq!(handler(libc::SA_RESTART | libc::SA_NODEFER), libc::SA_RESTART as u64);
        assert_eq!(handler_action(DEFAULT_ACTION).flags & COPIED_FLAGS, libc::SA_ONSTACK as u64);
    }
}
