//! Handles faults in memory of the program, before the program's own `SIGSEGV` handler runs.
//!
//! [`install`] replaces the program's `SIGSEGV` handler by that of this module, and stores the program's handler. A
//! [`Judge`] decides about each fault. A fault that is the program's own is passed to the program's handler, with the
//! mask and flags that the program set. The jump to the program's handler leaves no stack frame of this module's
//! handler. For a fault on a purged page, this thread gets a `SIGBUS` at the faulting instruction, which runs the
//! program's `SIGBUS` handler or ends the process.
//!
//! Nothing here allocates. The handler takes no lock that the interrupted thread could hold, because a thread that
//! holds the lock has blocked all signals.
#![allow(unsafe_code)] // signal actions, a handler

use crate::{process, thread};
use libc::{c_int, c_void};
use std::io;
use std::mem::size_of;
use std::sync::atomic::{
    AtomicU32, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence,
};

const SEGV_MAPERR: c_int = 1;
const SEGV_ACCERR: c_int = 2;
const BUS_ADRERR: c_int = 2;
/// `SA_RESTORER`: the action names the function that returns from the handler.
const RESTORER: u64 = 0x0400_0000;
/// Flags that this handler copies from the program's action: the stack to use, and whether system calls restart.
const COPIED_FLAGS: u64 = (libc::SA_ONSTACK | libc::SA_RESTART) as u64;

/// A signal's action: the kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Action {
    pub handler: usize,
    pub flags: u64,
    pub restorer: usize,
    /// One bit per signal; bit 0 is signal 1.
    pub mask: u64,
}

/// The default action.
const DEFAULT: Action = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };

/// A fault, as the kernel reports it. A [`Judge`] decides from these values.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub addr: usize,
    /// The mapping exists but forbids the access. If false, there is no mapping, or a guard page.
    pub is_protected: bool,
    /// The access that failed; `None` where the processor does not report it.
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

/// The decision of a [`Judge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The fault is the program's own.
    Program,
    /// The fault is on a purged page.
    Purged,
    /// The access is retried: the page is accessible by now, or its state will be known soon.
    Again,
}

/// Decides about a fault. Called in a signal handler, so it must neither allocate nor lock.
pub type Judge = fn(&Fault) -> Verdict;

/// Address of the [`Judge`]; 0 before [`install`].
static JUDGE: AtomicUsize = AtomicUsize::new(0);
/// Id of the process that has this handler; 0 before [`install`].
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// The program's `SIGSEGV` action is in `SLOTS[SEQUENCE % 2]`. A writer fills the other slot and then increments
/// `SEQUENCE`.
static SEQUENCE: AtomicU64 = AtomicU64::new(0);
/// Two buffers for the words of an [`Action`].
static SLOTS: [[AtomicU64; 4]; 2] = [const { [const { AtomicU64::new(0) }; 4] }; 2];
/// 1 while a thread reads and replaces signal actions, else 0.
static LOCK: AtomicU32 = AtomicU32::new(0);

/// Installs the handler, with `judge` to decide about every fault. Works once per process; later calls do nothing.
///
/// # Errors
///
/// Errors of `rt_sigaction`.
pub fn install(judge: Judge) -> io::Result<()> {
    if PROCESS.load(Acquire) != 0 {
        return Ok(());
    }
    under_lock(|| {
        if PROCESS.load(Relaxed) != 0 {
            return Ok(());
        }
        JUDGE.store(judge as usize, Relaxed);
        let before = raw_action(libc::SIGSEGV, None)?;
        // In a fork child the handler may be installed already, if the fork happened during `install`.
        if before.handler != on_fault as *const () as usize {
            write_program_action(before);
            raw_action(libc::SIGSEGV, Some(our_action(before)))?;
        }
        PROCESS.store(process::id(), Release);
        Ok(())
    })
}

/// Performs `sigaction(SIGSEGV)` for a program whose calls are intercepted. The handler of [`install`] stays installed.
///
/// # Errors
///
/// Errors of `rt_sigaction`.
pub fn program_action(new: Option<Action>) -> io::Result<Action> {
    under_lock(|| {
        // A child of `vfork` shares the parent's memory but has signal actions of its own.
        if PROCESS.load(Relaxed) != process::id() {
            return raw_action(libc::SIGSEGV, new);
        }
        let before = read_program_action();
        if let Some(new) = new {
            write_program_action(new);
            raw_action(libc::SIGSEGV, Some(our_action(new)))?;
        }
        Ok(before)
    })
}

/// Releases the lock in a fork child, in which the thread that held the lock does not exist. Records the child's
/// process id.
pub fn begin_child() {
    LOCK.store(0, Relaxed);
    if PROCESS.load(Relaxed) != 0 {
        PROCESS.store(process::id(), Relaxed);
    }
}

/// Handles a fault that is not the program's own. A `SIGSEGV` handler that a program installed after [`install`] calls
/// this function first. If the result is true, the program's handler must return.
///
/// After the return the access is retried, or a `SIGBUS` arrives.
///
/// # Safety
///
/// The arguments must be those of a handler with `SA_SIGINFO`, which must make the call itself.
pub unsafe fn handle(signal: c_int, info: *const c_void, context: *mut c_void) -> bool {
    let is_known = JUDGE.load(Acquire) != 0 && signal == libc::SIGSEGV && !info.is_null() && !context.is_null();
    if !is_known {
        return false;
    }
    // SAFETY: `errno` belongs to this thread.
    let errno = unsafe { *libc::__errno_location() };
    // `SIGBUS` must not arrive inside this handler.
    let mask = set_mask(libc::SIG_BLOCK, signal_bit(libc::SIGBUS));
    // SAFETY: guaranteed by the caller.
    let is_done = unsafe { handle_fault(info.cast(), context.cast()) };
    if !is_done {
        set_mask(libc::SIG_SETMASK, mask);
    }
    process::set_errno(errno);
    is_done
}

/// The action of this module's handler, with flags of the program's action.
fn our_action(program: Action) -> Action {
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

/// Calls `rt_sigaction` directly. Adds the restorer function where the architecture needs one.
fn raw_action(signal: c_int, new: Option<Action>) -> io::Result<Action> {
    let new = new.map(with_restorer);
    let pointer = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mut old = DEFAULT;
    // SAFETY: the call reads `new` and writes `old`, both with the kernel's layout. This module's handler is never
    // unloaded.
    let result = unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, pointer, &raw mut old, size_of::<u64>()) };
    if result == 0 { Ok(old) } else { Err(io::Error::last_os_error()) }
}

/// Adds the function that returns from the handler, which the kernel requires on this architecture.
#[cfg(target_arch = "x86_64")]
fn with_restorer(mut action: Action) -> Action {
    if action.flags & RESTORER == 0 {
        action.flags |= RESTORER;
        action.restorer = restore as *const () as usize;
    }
    action
}

#[cfg(not(target_arch = "x86_64"))]
fn with_restorer(action: Action) -> Action {
    debug_assert!(action.flags & RESTORER == 0 || action.restorer != 0);
    action
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    #[link_name = "pagemill_restore"]
    fn restore();
}

// Debuggers and unwinders recognise the return from a signal handler by exactly these instructions.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text.pagemill_restore, \"ax\", @progbits",
    ".hidden pagemill_restore",
    ".globl pagemill_restore",
    ".type pagemill_restore, @function",
    "pagemill_restore:",
    ".byte 0x48, 0xc7, 0xc0, 0x0f, 0x00, 0x00, 0x00", // mov rax, 15: rt_sigreturn
    "syscall",
    ".size pagemill_restore, . - pagemill_restore",
    ".popsection",
);

/// Stores the program's action. The caller must hold the lock.
fn write_program_action(action: Action) {
    let next = SEQUENCE.load(Relaxed) + 1;
    let words = [action.handler as u64, action.flags, action.restorer as u64, action.mask];
    for (slot, word) in SLOTS[next as usize & 1].iter().zip(words) {
        slot.store(word, Relaxed);
    }
    SEQUENCE.store(next, Release);
}

/// Returns the program's action. Does not block: a slot is overwritten only after the other slot has become current.
fn read_program_action() -> Action {
    loop {
        let sequence = SEQUENCE.load(Acquire);
        let [handler, flags, restorer, mask] = SLOTS[sequence as usize & 1].each_ref().map(|word| word.load(Relaxed));
        fence(Acquire);
        if SEQUENCE.load(Relaxed) == sequence {
            return Action { handler: handler as usize, flags, restorer: restorer as usize, mask };
        }
    }
}

/// Runs `act` under the lock, with all signals of this thread blocked, so that no handler interrupts it.
fn under_lock<T>(act: impl FnOnce() -> T) -> T {
    let _blocked = AllSignalsBlocked::begin();
    while LOCK.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
        thread::pause();
    }
    let result = act();
    LOCK.store(0, Release);
    result
}

/// Blocks all signals of this thread while the value lives, so that no handler of the program runs. Costs two system
/// calls.
pub struct AllSignalsBlocked {
    before: u64,
}

impl AllSignalsBlocked {
    /// Blocks all signals.
    pub fn begin() -> Self {
        Self { before: set_mask(libc::SIG_SETMASK, !0) }
    }
}

impl Drop for AllSignalsBlocked {
    fn drop(&mut self) {
        set_mask(libc::SIG_SETMASK, self.before);
    }
}

/// Changes this thread's signal mask by a direct system call. Returns the previous mask.
fn set_mask(how: c_int, mask: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: the call reads one word and writes one word.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const mask, &raw mut before, size_of::<u64>()) };
    before
}

/// The bit of a signal in a mask.
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
    const OR_ZERO: u32 = (libc::FUTEX_OP_OR as u32) << 28;
    let (unused, operation) = (AtomicU32::new(0), libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG);
    let word = (addr & !(size_of::<u32>() - 1)) as *const u32;
    // SAFETY: the kernel checks the address itself (`EFAULT`). No thread waits on `unused`.
    unsafe { libc::syscall(libc::SYS_futex, unused.as_ptr(), operation, 0, 0, word, OR_ZERO) >= 0 }
}

/// The signal handler. Jumps to the address that [`decide`] returns, with the arguments that the kernel passed.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn on_fault() {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {decide}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2: ret",
        decide = sym decide,
    )
}

/// The signal handler. Jumps to the address that [`decide`] returns, with the arguments that the kernel passed.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn on_fault() {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-48]!",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "mov x29, sp",
        "bl {decide}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldr x2, [sp, #32]",
        "ldp x29, x30, [sp], #48",
        "cbz x16, 2f",
        "br x16",
        "2: ret",
        decide = sym decide,
    )
}

/// Handles a fault, or returns the program's handler to call; 0 returns to the faulting instruction.
extern "C" fn decide(_signal: c_int, info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> usize {
    // SAFETY: `errno` belongs to this thread.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the arguments are those that the kernel passed to the handler.
    let next = unsafe { if handle_fault(info, context) { 0 } else { program_handler(info, context) } };
    process::set_errno(errno);
    next
}

/// Asks the judge about a fault and handles it, unless it is the program's own. Returns whether the fault was handled.
///
/// # Safety
///
/// Both arguments must be those that the kernel passed to a signal handler, and that handler must make the call.
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
    // SAFETY: `install` stored a function of this type before it installed the handler.
    let judge: Judge = unsafe { std::mem::transmute(JUDGE.load(Relaxed)) };
    match judge(&fault) {
        Verdict::Program => false,
        // SAFETY: guaranteed by the caller.
        Verdict::Purged => unsafe { raise_bus(addr, context) },
        Verdict::Again => {
            thread::pause();
            true
        }
    }
}

/// Returns the access that faulted, from the processor's error code.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler.
#[cfg(target_arch = "x86_64")]
unsafe fn access_of(context: *const libc::ucontext_t) -> Option<Access> {
    const WRITE: i64 = 1 << 1;
    const FETCH: i64 = 1 << 4;
    // SAFETY: guaranteed by the caller.
    let code = unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] };
    Some(match code {
        code if code & FETCH != 0 => Access::Fetch,
        code if code & WRITE != 0 => Access::Write,
        _ => Access::Read,
    })
}

/// Returns the access that faulted, from the syndrome in the context records.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler.
#[cfg(target_arch = "aarch64")]
unsafe fn access_of(context: *const libc::ucontext_t) -> Option<Access> {
    /// Kind of the context record that contains the exception syndrome (`ESR_MAGIC`).
    const SYNDROME: u32 = 0x4553_5201;
    const WRITE: u64 = 1 << 6;
    /// Exception class of an instruction fetch from user mode.
    const FETCH: u64 = 0x20;
    /// Exception class of a data access from user mode.
    const DATA: u64 = 0x24;
    /// Offset of the context records in `uc_mcontext`, in bytes: the size of the registers and of the fields before the
    /// records, aligned to 16 bytes.
    const RECORDS_AT: usize = (8 + 31 * 8 + 3 * 8_usize).next_multiple_of(16);
    /// Size of the area of the context records, in bytes.
    const ROOM: usize = 4 << 10;
    // SAFETY: `context` is valid (caller). The records lie in `uc_mcontext`, and each begins with its kind and size.
    unsafe {
        let records = (&raw const (*context).uc_mcontext).cast::<u8>().add(RECORDS_AT);
        let mut at = 0;
        while at + 16 <= ROOM {
            let [kind, size] = records.add(at).cast::<[u32; 2]>().read();
            if kind == SYNDROME {
                let syndrome = records.add(at + 8).cast::<u64>().read();
                return match syndrome >> 26 & 0x3F {
                    FETCH => Some(Access::Fetch),
                    DATA if syndrome & WRITE != 0 => Some(Access::Write),
                    DATA => Some(Access::Read),
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

/// Returns the address of the mask that the thread gets back after the handler: the first word of the C library's set.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler.
unsafe fn mask_of(context: *mut libc::ucontext_t) -> *mut u64 {
    // SAFETY: guaranteed by the caller.
    unsafe { (&raw mut (*context).uc_sigmask).cast() }
}

/// Queues a `SIGBUS` with the address to this thread, to be delivered when the handler returns. Returns whether it was
/// queued.
///
/// If the program ignores or blocks `SIGBUS`, the signal ends the process, as a `SIGBUS` from the kernel would.
///
/// # Safety
///
/// `context` must be what the kernel passed to a signal handler, which makes the call.
unsafe fn raise_bus(addr: usize, context: *mut libc::ucontext_t) -> bool {
    /// The kernel's `siginfo_t` of a fault.
    #[repr(C)]
    struct Info {
        signal: c_int,
        errno: c_int,
        code: c_int,
        padding: c_int,
        addr: usize,
        rest: [u64; 13],
    }
    const _: () = assert!(size_of::<Info>() == size_of::<libc::siginfo_t>());
    // SAFETY: guaranteed by the caller.
    let mask = unsafe { mask_of(context) };
    // SAFETY: `mask` points into the context, which the kernel passed.
    let is_blocked = unsafe { *mask } & signal_bit(libc::SIGBUS) != 0;
    let handler = raw_action(libc::SIGBUS, None).map_or(libc::SIG_DFL, |action| action.handler);
    if is_blocked || [libc::SIG_DFL, libc::SIG_IGN].contains(&handler) {
        // With the default action `SIGBUS` ends the process. The init process of a PID namespace would ignore this
        // signal, so the fault remains a `SIGSEGV` there.
        if process::id() == 1 {
            return false;
        }
        let _ = raw_action(libc::SIGBUS, Some(DEFAULT));
        // SAFETY: `mask` points into the context, which the kernel passed.
        unsafe { *mask &= !signal_bit(libc::SIGBUS) };
    }
    let info = Info { signal: libc::SIGBUS, errno: 0, code: BUS_ADRERR, padding: 0, addr, rest: [0; 13] };
    queue_signal(libc::SIGBUS, (&raw const info).cast())
}

/// Queues a signal with the given `siginfo_t` to the calling thread.
fn queue_signal(signal: c_int, info: *const c_void) -> bool {
    // SAFETY: `info` points to a whole `siginfo_t`, and the other arguments are numbers.
    unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, process::id(), process::thread_id(), signal, info) == 0 }
}

/// Prepares a call of the program's handler as the kernel would: sets the signal mask of the program's action, and
/// returns the handler's address; 0 if no handler is to be called.
///
/// # Safety
///
/// Both arguments must be those that the kernel passed to a signal handler, and that handler must make the call.
unsafe fn program_handler(info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> usize {
    // SAFETY: guaranteed by the caller.
    let (is_sent, mask) = unsafe { ((*info).si_code <= 0, mask_of(context)) };
    let action = read_program_action();
    match action.handler {
        libc::SIG_IGN if is_sent => 0,
        // The init process of a PID namespace ignores a signal that a process sent, if its action is the default.
        libc::SIG_DFL if is_sent && process::id() == 1 => 0,
        libc::SIG_DFL | libc::SIG_IGN => {
            // The access is retried and ends the process with a complete core file. A signal that a process sent raises
            // no fault, so it is sent again.
            let _ = raw_action(libc::SIGSEGV, Some(DEFAULT));
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
                under_lock(|| write_program_action(DEFAULT));
            }
            let itself = if has(libc::SA_NODEFER) { 0 } else { signal_bit(libc::SIGSEGV) };
            // SAFETY: guaranteed by the caller.
            set_mask(libc::SIG_SETMASK, unsafe { *mask } | action.mask | itself);
            handler
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accessible memory must be reported as readable and writable, reserved or closed memory as neither. The check
    /// must change no byte.
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

    /// The handler must use the alternate stack, and restart system calls, if the program's action says so.
    #[test]
    fn flags_are_copied_from_the_programs_action() {
        let handler =
            |flags: c_int| our_action(Action { handler: 7, flags: flags as u64, ..DEFAULT }).flags & COPIED_FLAGS;
        assert_eq!(handler(libc::SA_ONSTACK), libc::SA_ONSTACK as u64);
        assert_eq!(handler(libc::SA_RESTART | libc::SA_NODEFER), libc::SA_RESTART as u64);
        assert_eq!(our_action(DEFAULT).flags & COPIED_FLAGS, libc::SA_ONSTACK as u64);
    }
}
