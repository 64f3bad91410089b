//! Start, growth and exit of the library in a process.
//!
//! The library starts in its constructor, or in the first call of malloc if that comes earlier: from the loader, or
//! from another library's constructor. Mostly the C library serves the program then ([`crate::libc_fallback`]), and the
//! arena is created when it grows. Allocations of the same thread during that time are served by the C library.
#![allow(unsafe_code)] // statics made at start

use crate::settings::{self, settings, warn};
use crate::{SMALL_BYTES, SMALL_LIMIT, SMALL_START, check, fork, large, libc_fallback, small};
use pagemill_core::published;
use pagemill_core::reclaim::Account;
use pagemill_core::reclaim::kernel::Kernel;
use pagemill_core::reclaim::tree::{TreePage, UNLIMITED};
use pagemill_core::sync::Lock;
use pagemill_heap::MIN_BYTES;
use pagemill_sys::file::{self, Path};
use pagemill_sys::{mem, process, stack, thread};
use pagemill_volatile::Base;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{
    AtomicPtr, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

const UNSTARTED: usize = 0;
const LIBC_FALLBACK: usize = 1;
const READY: usize = 2;
const UNMANAGED: usize = 3;

/// One of the above, or the token of the thread that is starting the library.
static PHASE: AtomicUsize = AtomicUsize::new(UNSTARTED);
static PAGEMILL: AtomicPtr<Base> = AtomicPtr::new(ptr::null_mut());
/// Created with the arena, or earlier if a member of a process tree holds enough to be charged.
static ACCOUNT: AtomicPtr<Account> = AtomicPtr::new(ptr::null_mut());
/// The page of the process tree, if this process is in one. There the figures stay after exit, for `run` to count.
static TREE: AtomicPtr<TreePage> = AtomicPtr::new(ptr::null_mut());

/// Held while the arena is created, and across forks. A thread that wants to grow never waits for it: it stays on the
/// libc fallback meanwhile.
pub static GROWTH: Lock = Lock::new();

/// The state of the library.
#[derive(Clone, Copy)]
pub enum State {
    /// The current thread is starting it.
    Starting,
    /// The C library serves as long as the program is small.
    LibcFallback,
    Ready(&'static Base),
    /// No address space for an arena: the C library serves for good.
    Unmanaged,
}

pub fn pagemill() -> Option<&'static Base> {
    // SAFETY: null, or created by `Base::new` and never freed.
    unsafe { PAGEMILL.load(Acquire).as_ref() }
}

/// As [`pagemill`], after checking whether this is a new process.
pub fn pagemill_of_process() -> Option<&'static Base> {
    pagemill().inspect(|_| fork::notice_raw_clone())
}

/// The account, if this process has to be charged.
pub fn account() -> Option<&'static Account> {
    // SAFETY: null, or created by `Account::make` and never freed.
    unsafe { ACCOUNT.load(Acquire).as_ref() }
}

/// Returns the state; starts the library if needed.
pub fn state() -> State {
    let own = mem::thread_token();
    loop {
        match PHASE.load(Acquire) {
            READY => match pagemill_of_process() {
                Some(pagemill) => return State::Ready(pagemill),
                None => return State::Unmanaged,
            },
            LIBC_FALLBACK => {
                fork::notice_raw_clone();
                return State::LibcFallback;
            }
            UNMANAGED => return State::Unmanaged,
            UNSTARTED => {
                if PHASE.compare_exchange(UNSTARTED, own, AcqRel, Relaxed).is_ok() {
                    enter(begin_life());
                }
            }
            starter if starter == own => return State::Starting,
            _ => thread::pause(),
        }
    }
}

/// Switches from the C library to Pagemill because the program has grown. Returns whether Pagemill serves now.
///
/// Does nothing while a fork is under way or another thread does this: then the C library serves a little longer.
#[cold]
pub fn grow() -> bool {
    if !GROWTH.try_acquire() {
        return false;
    }
    if PHASE.compare_exchange(LIBC_FALLBACK, mem::thread_token(), AcqRel, Relaxed).is_ok() {
        enter(start_arena());
    }
    GROWTH.release();
    PHASE.load(Relaxed) == READY
}

/// Enters a phase. The fast paths open last: a thread that takes them must find the phase entered.
fn enter(phase: usize) {
    PHASE.store(phase, Release);
    let Some(pagemill) = pagemill().filter(|_| phase == READY && !check::is_on()) else { return };
    let start = pagemill.arena.base();
    SMALL_START.store(start, Release);
    SMALL_BYTES.store(pagemill.heap.base() - start, Release);
    SMALL_LIMIT.store(MIN_BYTES, Release);
}

/// Joins the tree if there is one, and selects the first allocator. Returns the phase to enter.
fn begin_life() -> usize {
    settings::read();
    libc_fallback::find_functions();
    fork::register();
    join_tree();
    let limit = tree_limit().min(settings().limit_bytes);
    let may_fall_back = limit == UNLIMITED && !settings().is_checking;
    let after_bytes = settings().after_bytes.unwrap_or(libc_fallback::DEFAULT_AFTER_BYTES);
    if !libc_fallback::begin(if may_fall_back { after_bytes } else { 0 }) {
        return start_arena();
    }
    LIBC_FALLBACK
}

/// The account of a program on the libc fallback for its tree, created when the program holds enough to be charged.
/// Most programs of a tree end before.
pub fn account_of_libc_fallback() -> Option<&'static Account> {
    extern "C" fn on_new_stack(_: *mut c_void) {
        let _ = make_account();
    }
    if account().is_none() && tree().is_some() && libc_fallback::owes_charge() && GROWTH.try_acquire() {
        // SAFETY: the function returns, and does not use its argument.
        unsafe { stack::call_on_new(STACK_BYTES, on_new_stack, ptr::null_mut()) };
        GROWTH.release();
    }
    account()
}

/// Creates the account, once. The caller holds [`GROWTH`], or is the thread that starts the library.
fn make_account() -> pagemill_core::Result<&'static Account> {
    if let Some(account) = account() {
        return Ok(account);
    }
    // If the folder is gone, `run` has ended since this process began.
    if tree_file().is_none_or(|path| !file::exists(path.as_c_str())) {
        TREE.store(ptr::null_mut(), Release);
    }
    let account = Account::make(settings().limit_bytes)?;
    fork::mark_process();
    let folder = tree().map_or("", |_| settings().tree.as_str());
    published::set_home(folder, settings().runtime.as_str());
    account.on_first_charge(publish);
    account.on_debt(large::call_soon);
    if let Some(page) = tree() {
        account.join(page, process::own_identity());
    }
    // Last: other threads charge what they hold as soon as they see it.
    ACCOUNT.store(ptr::from_ref(account).cast_mut(), Release);
    Ok(account)
}

/// Creates the arena and starts jemalloc in it, on a separate stack, because the caller's thread may have a small one.
/// Returns the phase to enter.
fn start_arena() -> usize {
    extern "C" fn on_new_stack(phase: *mut c_void) {
        let began = try_start_arena().unwrap_or_else(|error| {
            let is_bound = settings().is_checking || settings().limit_bytes != UNLIMITED || tree_limit() != UNLIMITED;
            let lost = if is_bound { ", without the limit and the checks that were asked for" } else { "" };
            warn(format_args!("pagemill: {error}; the C library serves this program{lost}"));
            UNMANAGED
        });
        // SAFETY: points to the local variable of `start_arena`, which waits for this call.
        unsafe { phase.cast::<usize>().write(began) };
    }
    let mut phase = UNMANAGED;
    // SAFETY: the function returns, and its argument outlives the call.
    unsafe { stack::call_on_new(STACK_BYTES, on_new_stack, (&raw mut phase).cast()) };
    phase
}

/// jemalloc's start alone takes 11 KiB. Objects are built on the stack and moved, in a debug build several times.
const STACK_BYTES: usize = 512 << 10;

fn try_start_arena() -> pagemill_core::Result<usize> {
    let account = make_account()?;
    let pagemill = Base::new(settings().layout(), account)?;
    pagemill.responder.set_measured(pagemill);
    if settings().is_watching {
        static KERNEL: Kernel = Kernel::new("");
        account.headroom.set_limits(&KERNEL);
    }
    // jemalloc's hooks read this.
    PAGEMILL.store(ptr::from_ref(pagemill).cast_mut(), Release);
    if !small::start(pagemill) {
        PAGEMILL.store(ptr::null_mut(), Release);
        let cause = std::io::ErrorKind::OutOfMemory.into();
        return Err(pagemill_core::Error::System { doing: "starting jemalloc", cause });
    }
    register_extents(pagemill);
    pagemill.helper.set_return(settings().policy);
    if settings().is_checking {
        check::start(pagemill);
    }
    libc_fallback::charge_exactly(account);
    Ok(READY)
}

/// The page of the tree that `pagemill run` created.
fn tree() -> Option<&'static TreePage> {
    // SAFETY: null, or a page that `TreePage::join` mapped for good.
    unsafe { TREE.load(Acquire).as_ref() }
}

fn tree_limit() -> u64 {
    tree().map_or(UNLIMITED, TreePage::limit)
}

fn tree_file() -> Option<Path> {
    let folder = settings().tree.as_str();
    if folder.is_empty() { None } else { Path::format(format_args!("{folder}/{}", published::TREE_FILE)) }
}

fn join_tree() {
    // If the folder is gone, `run` has ended and left this process behind.
    if let Some(path) = tree_file()
        && let Ok(page) = TreePage::join(path.as_c_str())
    {
        page.count_start();
        TREE.store(ptr::from_ref(page).cast_mut(), Release);
    }
}

fn register_extents(pagemill: &'static Base) {
    struct Cell(UnsafeCell<Option<small::Extents>>);
    // SAFETY: written once, by the thread that starts the library, before any read.
    unsafe impl Sync for Cell {}
    static EXTENTS: Cell = Cell(UnsafeCell::new(None));
    // SAFETY: as above.
    let extents = unsafe { (*EXTENTS.0.get()).insert(small::Extents::new(pagemill)) };
    pagemill.account.register(extents);
}

/// Publishes the figures at the first charge, on a separate stack, because the current one may be small.
fn publish() {
    extern "C" fn on_new_stack(_: *mut c_void) {
        let _ = published::publish();
    }
    // SAFETY: the function returns, and does not use its argument.
    unsafe { stack::call_on_new(STACK_BYTES, on_new_stack, ptr::null_mut()) };
}

/// The helper thread.
struct Help;

impl thread::Work for Help {
    fn work(&'static self) {
        if let Some(pagemill) = pagemill() {
            pagemill.helper.run(pagemill.arena);
        }
    }
}

/// Starts the helper thread. Must be called outside every lock: the C library allocates for it.
pub fn helper(pagemill: &'static Base) {
    if !settings().may_have_helper || !pagemill.helper.claim() {
        return;
    }
    if thread::spawn(c"pagemill", &Help).is_err() {
        pagemill.helper.unclaim();
    }
}

/// Runs at exit: publishes the last figures and frees the slot in the tree.
extern "C" fn end() {
    let Some(account) = account() else {
        if let Some(page) = tree() {
            page.note_small(libc_fallback::peak_bytes());
        }
        return;
    };
    match pagemill() {
        Some(pagemill) => pagemill.measure_with(0),
        None => libc_fallback::note_end(account),
    }
    account.leave();
    published::withdraw();
}

/// Runs before other constructors of this library and most of others: priorities run in order.
#[used]
#[unsafe(link_section = ".init_array.00099")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    state();
}

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
