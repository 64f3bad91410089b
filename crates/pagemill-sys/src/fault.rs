//! Handles faults in the program's own memory before the program's handler does.
//!
//! [`install`] puts a `SIGSEGV` handler before the program's and keeps that one behind it. A [`Judge`] classifies each
//! fault. A fault of the program is passed to the program's handler, with its mask and flags. The jump to it leaves no
//! stack frame of this handler. A fault on a purged page becomes a `SIGBUS` of this thread, delivered at the faulting
//! instruction: to the program's `SIGBUS` handler, or as the end of the process.
//!
//! Nothing here allocates. The handler takes no lock that the interrupted thread could hold: a thread that holds it
//! has blocked all signals.
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
const RESTORER: u64 = 0x0400_0000;
/// Flags that are copied from the program's action: which stack to use, and whether system calls restart.
const PASSED_ON: u64 = (libc::SA_ONSTACK | libc::SA_RESTART) as u64;

/// A signal's action: the kernel's `struct sigaction`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Action {
    pub handler: usize,
    pub flags: u64,
    pub restorer: usize,
    /// One bit per signal, the lowest for signal 1.
    pub mask: u64,
}

const DEFAULT: Action = Action { handler: libc::SIG_DFL, flags: 0, restorer: 0, mask: 0 };

/// Properties of a fault that decide whether it is the program's.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub addr: usize,
    /// The mapping exists but forbids the access. Otherwise there is no mapping, or a guard.
    pub is_protected: bool,
    /// The access that failed; `None` where the processor does not report it.
    pub access: Option<Access>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
    /// Executing an instruction at the address.
    Fetch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A fault of the program.
    Program,
    /// A fault on a purged page.
    Purged,
    /// Retry: the page is back by now, or its state will be known soon.
    Again,
}

/// Classifies a fault. Called in a signal handler: must neither allocate nor lock.
pub type Judge = fn(&Fault) -> Verdict;

static JUDGE: AtomicUsize = AtomicUsize::new(0);
/// Id of the process that has our handler; 0 before [`install`].
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// The program's `SIGSEGV` action is in the slot with this number's parity. A writer fills the other slot, then
/// increments.
static SEQUENCE: AtomicU64 = AtomicU64::new(0);
static SLOTS: [[AtomicU64; 4]; 2] = [const { [const { AtomicU64::new(0) }; 4] }; 2];
static LOCK: AtomicU32 = AtomicU32::new(0);

/// Installs the handler, so that `judge` classifies every fault. Once per process; later calls do nothing.
///
/// # Errors
///
/// Errors of `rt_sigaction`.
pub fn install(judge: Judge) -> io::Result<()> {
    if PROCESS.load(Acquire) != 0 {
        return Ok(());
    }
    locked(|| {
        if PROCESS.load(Relaxed) != 0 {
            return Ok(());
        }
        JUDGE.store(judge as usize, Relaxed);
        let before = raw_action(libc::SIGSEGV, None)?;
        // A fork child may already have inherited our handler, if the fork happened during `install`.
        if before.handler != on_fault as *const () as usize {
            write_program(before);
            raw_action(libc::SIGSEGV, Some(first(before)))?;
        }
        PROCESS.store(process::id(), Release);
        Ok(())
    })
}

/// Implements `sigaction(SIGSEGV)` for a program whose calls this library intercepts: the handler of [`install`] stays
/// first.
///
/// # Errors
///
/// Errors of `rt_sigaction`.
pub fn program_action(new: Option<Action>) -> io::Result<Action> {
    locked(|| {
        // A child of `vfork` shares the parent's memory but has its own signal actions.
        if PROCESS.load(Relaxed) != process::id() {
            return raw_action(libc::SIGSEGV, new);
        }
        let before = read_program();
        if let Some(new) = new {
            write_program(new);
            raw_action(libc::SIGSEGV, Some(first(new)))?;
        }
        Ok(before)
    })
}

/// For a fork child: the thread that held the lock does not exist here.
pub fn begin_child() {
    LOCK.store(0, Relaxed);
    if PROCESS.load(Relaxed) != 0 {
        PROCESS.store(process::id(), Relaxed);
    }
}

/// For a program's own handler installed after ours. Returns whether the fault was handled, so that the handler must
/// return.
///
/// The access is then retried, or a `SIGBUS` arrives once the handler has returned.
///
/// # Safety
///
/// The arguments are those of a handler with `SA_SIGINFO`, and the call is made in that handler.
pub unsafe fn handle(signal: c_int, info: *const c_void, context: *mut c_void) -> bool {
    let is_known = JUDGE.load(Acquire) != 0 && signal == libc::SIGSEGV && !info.is_null() && !context.is_null();
    if !is_known {
        return false;
    }
    // SAFETY: the thread's own word.
    let errno = unsafe { *libc::__errno_location() };
    // `SIGBUS` must arrive at the faulting instruction, not inside this handler.
    let mask = set_mask(libc::SIG_BLOCK, bit(libc::SIGBUS));
    // SAFETY: the caller's promise.
    let is_done = unsafe { deal(info.cast(), context.cast()) };
    if !is_done {
        set_mask(libc::SIG_SETMASK, mask);
    }
    process::set_errno(errno);
    is_done
}

/// Returns our handler's action, given the program's.
fn first(program: Action) -> Action {
    let has_handler = ![libc::SIG_DFL, libc::SIG_IGN].contains(&program.handler);
    let passed_on = match has_handler {
        true => program.flags & PASSED_ON,
        // An ignored signal interrupts no system call.
        false if program.handler == libc::SIG_IGN => PASSED_ON,
        false => libc::SA_ONSTACK as u64,
    };
    let flags = libc::SA_SIGINFO as u64 | passed_on;
    Action { handler: on_fault as *const () as usize, flags, restorer: 0, mask: !0 }
}

/// Calls `rt_sigaction` directly. Adds the restorer where the architecture needs one.
fn raw_action(signal: c_int, new: Option<Action>) -> io::Result<Action> {
    let new = new.map(with_restorer);
    let pointer = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mut old = DEFAULT;
    // SAFETY: reads `new` and writes `old`, both laid out as the kernel's. Handlers are the program's, or ours, which
    // stays.
    let result = unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, pointer, &raw mut old, size_of::<u64>()) };
    if result == 0 { Ok(old) } else { Err(io::Error::last_os_error()) }
}

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

// Debuggers and unwinders recognise the end of a handler by exactly these instructions.
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

fn write_program(action: Action) {
    let next = SEQUENCE.load(Relaxed) + 1;
    let words = [action.handler as u64, action.flags, action.restorer as u64, action.mask];
    for (slot, word) in SLOTS[next as usize & 1].iter().zip(words) {
        slot.store(word, Relaxed);
    }
    SEQUENCE.store(next, Release);
}

/// Returns the program's action. Does not block: a slot is rewritten only after the other one has become current.
fn read_program() -> Action {
    loop {
        let sequence = SEQUENCE.load(Acquire);
        let [handler, flags, restorer, mask] = SLOTS[sequence as usize & 1].each_ref().map(|word| word.load(Relaxed));
        fence(Acquire);
        if SEQUENCE.load(Relaxed) == sequence {
            return Action { handler: handler as usize, flags, restorer: restorer as usize, mask };
        }
    }
}

/// Runs `act` under the lock with all signals blocked, so that no handler of this thread can interrupt it.
fn locked<T>(act: impl FnOnce() -> T) -> T {
    let _quiet = Quiet::begin();
    while LOCK.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
        thread::pause();
    }
    let result = act();
    LOCK.store(0, Release);
    result
}

/// Blocks all signals of this thread while it lives, so that no handler of the program interrupts it. Two system
/// calls.
pub struct Quiet {
    before: u64,
}

impl Quiet {
    pub fn begin() -> Self {
        Self { before: set_mask(libc::SIG_SETMASK, !0) }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        set_mask(libc::SIG_SETMASK, self.before);
    }
}

/// Changes this thread's signal mask by a plain system call. Returns the previous mask.
fn set_mask(how: c_int, mask: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: reads and writes a word each.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const mask, &raw mut before, size_of::<u64>()) };
    before
}

const fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Returns whether the page at `addr` can be read. Passes the address as a signal set: the kernel reads the set before
/// it rejects the invalid `how`.
pub fn is_readable(addr: usize) -> bool {
    const NO_SUCH_WAY: c_int = -1;
    let set = (addr & !(size_of::<u64>() - 1)) as *const u64;
    let nowhere = std::ptr::null_mut::<u64>();
    // SAFETY: the kernel checks the address itself and returns `EFAULT`. The mask does not change.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, NO_SUCH_WAY, set, nowhere, size_of::<u64>()) };
    io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// Returns whether four bytes at `addr` can be written. They keep their value: the kernel combines them with zero by
/// OR.
pub fn is_writable(addr: usize) -> bool {
    const OR_ZERO: u32 = (libc::FUTEX_OP_OR as u32) << 28;
    let (unused, way) = (AtomicU32::new(0), libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG);
    let word = (addr & !(size_of::<u32>() - 1)) as *const u32;
    // SAFETY: the kernel checks the address itself and returns `EFAULT`. No waiter exists.
    unsafe { libc::syscall(libc::SYS_futex, unused.as_ptr(), way, 0, 0, word, OR_ZERO) >= 0 }
}

/// The signal handler. Jumps to the address that [`decide`] returns, as if the kernel had called it.
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

/// The signal handler. Jumps to the address that [`decide`] returns, as if the kernel had called it.
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

/// Handles a fault, or returns the program's handler to call. 0: return to the faulting instruction.
extern "C" fn decide(_signal: c_int, info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> usize {
    // SAFETY: the thread's own word.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: what the kernel passed to the handler.
    let next = unsafe { if deal(info, context) { 0 } else { pass_on(info, context) } };
    process::set_errno(errno);
    next
}

/// Handles a fault that is not the program's. Returns whether it did.
///
/// # Safety
///
/// Both are what the kernel passed to a signal handler, and the call is made in that handler. `SIGBUS` is blocked until
/// it returns.
unsafe fn deal(info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> bool {
    // SAFETY: the caller's promise; a fault has an address.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if ![SEGV_MAPERR, SEGV_ACCERR].contains(&code) {
        return false;
    }
    // SAFETY: the caller's promise.
    let access = unsafe { access_of(context) };
    let fault = Fault { addr, is_protected: code == SEGV_ACCERR, access };
    // SAFETY: written by `install`, with a function of this type, before the handler was there.
    let judge: Judge = unsafe { std::mem::transmute(JUDGE.load(Relaxed)) };
    match judge(&fault) {
        Verdict::Program => false,
        // SAFETY: the caller's promise.
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
/// `context` is what the kernel passed to a signal handler.
#[cfg(target_arch = "x86_64")]
unsafe fn access_of(context: *const libc::ucontext_t) -> Option<Access> {
    const WRITE: i64 = 1 << 1;
    const FETCH: i64 = 1 << 4;
    // SAFETY: the caller's promise.
    let code = unsafe { (*context).uc_mcontext.gregs[libc::REG_ERR as usize] };
    Some(match code {
        code if code & FETCH != 0 => Access::Fetch,
        code if code & WRITE != 0 => Access::Write,
        _ => Access::Read,
    })
}

/// Returns the access that faulted, from the syndrome in the context records behind the registers.
///
/// # Safety
///
/// `context` is what the kernel passed to a signal handler.
#[cfg(target_arch = "aarch64")]
unsafe fn access_of(context: *const libc::ucontext_t) -> Option<Access> {
    const SYNDROME: u32 = 0x4553_5201;
    const WRITE: u64 = 1 << 6;
    /// Exception classes: instruction fetch and data access, from a lower exception level.
    const FETCH: u64 = 0x20;
    const DATA: u64 = 0x24;
    /// Size of the registers and the fields up to the context records, which are aligned to 16 bytes.
    const RECORDS_AT: usize = (8 + 31 * 8 + 3 * 8_usize).next_multiple_of(16);
    const ROOM: usize = 4 << 10;
    // SAFETY: the caller's promise. The records are in `uc_mcontext`, and each begins with its kind and size.
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

/// Returns the mask that the thread has again after the handler. Of the C library's set, this is the kernel's part,
/// one word.
///
/// # Safety
///
/// `context` is what the kernel passed to a signal handler.
unsafe fn mask_of(context: *mut libc::ucontext_t) -> *mut u64 {
    // SAFETY: the caller's promise.
    unsafe { (&raw mut (*context).uc_sigmask).cast() }
}

/// Queues a `SIGBUS` for the address to this thread, delivered when the handler returns. Returns whether it was
/// queued.
///
/// If the program ignores or blocks `SIGBUS`, the signal ends the program, as one from the kernel would.
///
/// # Safety
///
/// `context` is what the kernel passed to a signal handler, and the call is made in that handler.
unsafe fn raise_bus(addr: usize, context: *mut libc::ucontext_t) -> bool {
    /// `siginfo_t` of a fault.
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
    // SAFETY: the caller's promise.
    let mask = unsafe { mask_of(context) };
    // SAFETY: as above.
    let is_blocked = unsafe { *mask } & bit(libc::SIGBUS) != 0;
    let handler = raw_action(libc::SIGBUS, None).map_or(libc::SIG_DFL, |action| action.handler);
    if is_blocked || [libc::SIG_DFL, libc::SIG_IGN].contains(&handler) {
        // It ends the program, except the init process of a PID namespace, which takes the `SIGSEGV` itself.
        if process::id() == 1 {
            return false;
        }
        let _ = raw_action(libc::SIGBUS, Some(DEFAULT));
        // SAFETY: as above.
        unsafe { *mask &= !bit(libc::SIGBUS) };
    }
    let info = Info { signal: libc::SIGBUS, errno: 0, code: BUS_ADRERR, padding: 0, addr, rest: [0; 13] };
    queue(libc::SIGBUS, (&raw const info).cast())
}

/// Queues a signal with this `siginfo_t` to the calling thread.
fn queue(signal: c_int, info: *const c_void) -> bool {
    // SAFETY: no arguments; `info` is a whole `siginfo_t`.
    unsafe {
        let thread = libc::syscall(libc::SYS_gettid);
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process::id(), thread, signal, info) == 0
    }
}

/// Does what the kernel would do with the program's action: returns the handler to call and sets its mask, or returns
/// 0.
///
/// # Safety
///
/// Both are what the kernel passed to a signal handler, and the call is made in that handler.
unsafe fn pass_on(info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> usize {
    // SAFETY: the caller's promise.
    let (is_sent, mask) = unsafe { ((*info).si_code <= 0, mask_of(context)) };
    let action = read_program();
    match action.handler {
        libc::SIG_IGN if is_sent => 0,
        // A signal with default action that is sent to the init process of a namespace has no effect.
        libc::SIG_DFL if is_sent && process::id() == 1 => 0,
        libc::SIG_DFL | libc::SIG_IGN => {
            // The access is retried and ends the program with a complete core file. A signal that was sent is sent
            // again.
            let _ = raw_action(libc::SIGSEGV, Some(DEFAULT));
            // SAFETY: the caller's promise.
            unsafe { *mask &= !bit(libc::SIGSEGV) };
            if is_sent {
                queue(libc::SIGSEGV, info.cast());
            }
            0
        }
        handler => {
            let has = |flag: c_int| action.flags & flag as u32 as u64 != 0;
            if has(libc::SA_RESETHAND) {
                locked(|| write_program(DEFAULT));
            }
            let itself = if has(libc::SA_NODEFER) { 0 } else { bit(libc::SIGSEGV) };
            // SAFETY: the caller's promise.
            set_mask(libc::SIG_SETMASK, unsafe { *mask } | action.mask | itself);
            handler
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mapped accessible memory is readable; reserved or closed memory is not. The probe changes no byte.
    #[test]
    fn readable_pages_are_known() {
        let page = crate::mem::os_page_bytes();
        let addr = crate::mem::reserve(2 * page, page, 0).unwrap();
        assert!(!is_readable(addr));
        // SAFETY: our own reservation.
        unsafe { crate::mem::open(addr, page).unwrap() };
        assert!(is_readable(addr) && is_readable(addr + page - 1) && !is_readable(addr + page));
        // SAFETY: opened above.
        unsafe { (addr as *mut u8).write_volatile(7) };
        assert!(is_writable(addr) && is_writable(addr + page - 1) && !is_writable(addr + page));
        // SAFETY: as above.
        assert_eq!(unsafe { (addr as *const u8).read_volatile() }, 7);
        // SAFETY: our own reservation, with no other users.
        unsafe { crate::mem::close(addr, page).unwrap() };
        assert!(!is_readable(addr) && !is_writable(addr));
        // SAFETY: as above.
        unsafe { crate::mem::unreserve(addr, 2 * page) };
    }

    /// Our handler takes the program's choice of stack and of restarting system calls.
    #[test]
    fn the_first_handler_takes_after_the_second() {
        let handler = |flags: c_int| first(Action { handler: 7, flags: flags as u64, ..DEFAULT }).flags & PASSED_ON;
        assert_eq!(handler(libc::SA_ONSTACK), libc::SA_ONSTACK as u64);
        assert_eq!(handler(libc::SA_RESTART | libc::SA_NODEFER), libc::SA_RESTART as u64);
        assert_eq!(first(DEFAULT).flags & PASSED_ON, libc::SA_ONSTACK as u64);
    }
}
