//! Start of the library in a process, growth of the program, and exit.
//!
//! The library starts in its constructor, or earlier in a call of malloc by the loader or another library's
//! constructor. At first the C library serves most programs ([`crate::libc_fallback`]). The arena is created when the
//! program has grown. The C library also serves the allocations of a thread while it starts the library or creates the
//! arena.
#![allow(unsafe_code)] // references to objects that are created at start

use crate::globals::{self, ACCOUNT, GROWTH_LOCK, PAGEMILL, SMALL_BYTES, SMALL_LIMIT, SMALL_START, account, pagemill};
use crate::globals::{assert_fatal, debug_assert_fatal};
use crate::settings::{settings, warn};
use crate::{check, fork, libc_fallback, small};
use pagemill_core::instance::Instance;
use pagemill_core::published;
use pagemill_core::reclaim::Account;
use pagemill_core::reclaim::kernel::Kernel;
use pagemill_core::reclaim::tree::{TreePage, UNLIMITED};
use pagemill_heap::MIN_BYTES;
use pagemill_sys::file::{self, Path};
use pagemill_sys::{mem, process, stack, thread};
use pagemill_volatile::Base;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicPtr, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// Phase: the library has not started.
const UNSTARTED: usize = 0;
/// Phase: the program is small, so the C library serves it.
const LIBC_FALLBACK: usize = 1;
/// Phase: Pagemill serves the program.
const READY: usize = 2;
/// Phase: the arena could not be created, so the C library serves the program permanently.
const UNMANAGED: usize = 3;

/// One of the phases above, or the token of the thread that is starting the library or creating the arena.
static PHASE: AtomicUsize = AtomicUsize::new(UNSTARTED);
/// The shared page of the process tree; null if this process is in none.
static TREE_PAGE: AtomicPtr<TreePage> = AtomicPtr::new(ptr::null_mut());

/// The state of the library.
#[derive(Clone, Copy)]
pub enum State {
    /// The current thread is starting the library or creating the arena.
    Starting,
    /// The program is small, so the C library serves it.
    LibcFallback,
    /// Pagemill serves the program.
    Ready(&'static Base),
    /// The arena could not be created: the C library serves the program permanently.
    Unmanaged,
}

/// Returns the state of the library; the first call starts the library.
pub fn state() -> State {
    let own = mem::thread_token();
    debug_assert_fatal!(own > UNMANAGED); // a token is none of the phases
    loop {
        match PHASE.load(Acquire) {
            READY => match fork::pagemill_of_process() {
                Some(pagemill) => return State::Ready(pagemill),
                None => return State::Unmanaged,
            },
            LIBC_FALLBACK => {
                fork::detect_raw_clone();
                return State::LibcFallback;
            }
            UNMANAGED => return State::Unmanaged,
            UNSTARTED => {
                if PHASE.compare_exchange(UNSTARTED, own, AcqRel, Relaxed).is_ok() {
                    enter_phase(start_library());
                }
            }
            starter if starter == own => return State::Starting,
            _ => thread::pause(),
        }
    }
}

/// Creates the arena, and makes Pagemill serve the program, which has grown. Returns whether Pagemill serves the
/// program now.
///
/// Does nothing during a fork, or while another thread creates the arena; the C library then serves the current call.
#[cold]
pub fn switch_to_pagemill() -> bool {
    if !GROWTH_LOCK.try_acquire() {
        return false;
    }
    if PHASE.compare_exchange(LIBC_FALLBACK, mem::thread_token(), AcqRel, Relaxed).is_ok() {
        enter_phase(start_arena());
    }
    GROWTH_LOCK.release();
    PHASE.load(Relaxed) == READY
}

/// Enters a phase, and then enables the fast paths of malloc and free if Pagemill serves the program.
fn enter_phase(phase: usize) {
    assert_fatal!([LIBC_FALLBACK, READY, UNMANAGED].contains(&phase));
    assert_fatal!(phase != READY || pagemill().is_some());
    // A thread that starts the library or creates the arena holds the phase by its token.
    assert_fatal!(PHASE.swap(phase, AcqRel) == mem::thread_token());
    let Some(pagemill) = pagemill().filter(|_| phase == READY && !check::is_on()) else { return };
    let start = pagemill.instance.arena.base();
    assert_fatal!(start < pagemill.heap.base());
    SMALL_START.store(start, Release);
    SMALL_BYTES.store(pagemill.heap.base() - start, Release);
    SMALL_LIMIT.store(MIN_BYTES, Release);
}

/// Starts the library: reads the settings, registers fork handlers, joins the process tree, and selects the allocator.
/// Returns the phase to enter.
fn start_library() -> usize {
    libc_fallback::find_functions();
    fork::register_fork_handlers();
    join_tree();
    let limit = tree_limit().min(settings().limit_bytes);
    let may_fall_back = limit == UNLIMITED && !settings().is_checking;
    let after_bytes = settings().after_bytes.unwrap_or(libc_fallback::DEFAULT_AFTER_BYTES);
    if !libc_fallback::enable(if may_fall_back { after_bytes } else { 0 }) {
        return start_arena();
    }
    LIBC_FALLBACK
}

/// Returns the account to which memory of the libc fallback is charged. In a process tree the account is created when
/// the program has enough memory to be charged; most programs end before.
pub fn account_of_libc_fallback() -> Option<&'static Account> {
    if account().is_none() && tree_page().is_some() && libc_fallback::is_charge_due() && GROWTH_LOCK.try_acquire() {
        stack::call_on_new(STACK_BYTES, || _ = make_account());
        GROWTH_LOCK.release();
    }
    account()
}

/// Returns the account; the first call creates it. The caller must hold [`GROWTH_LOCK`] or be the thread that starts
/// the library.
fn make_account() -> pagemill_core::Result<&'static Account> {
    if let Some(account) = account() {
        return Ok(account);
    }
    // If the tree's folder does not exist, `run` has ended, and the process no longer belongs to a tree.
    if tree_file().is_none_or(|path| !file::exists(path.as_c_str())) {
        TREE_PAGE.store(ptr::null_mut(), Release);
    }
    let account = Account::make(settings().limit_bytes)?;
    fork::arm_raw_clone_detection();
    let folder = tree_page().map_or("", |_| settings().tree.as_str());
    published::set_publish_folder(folder, settings().runtime.as_str());
    account.on_first_charge(publish_figures);
    account.on_debt(globals::take_large_path_next);
    if let Some(page) = tree_page() {
        account.join(page, process::own_identity());
    }
    // Stored last, because other threads charge memory to the account as soon as they read its address.
    assert_fatal!(ACCOUNT.swap(ptr::from_ref(account).cast_mut(), AcqRel).is_null());
    Ok(account)
}

/// Creates the arena and starts jemalloc in it. Uses a separate stack, because the caller's stack may be small. Returns
/// the phase to enter.
fn start_arena() -> usize {
    let mut phase = UNMANAGED;
    stack::call_on_new(STACK_BYTES, || {
        phase = try_start_arena().unwrap_or_else(|error| {
            let is_bound = settings().is_checking || settings().limit_bytes != UNLIMITED || tree_limit() != UNLIMITED;
            let lost = if is_bound { ", without the limit and the checks that were asked for" } else { "" };
            warn(format_args!("pagemill: {error}; the C library serves this program{lost}"));
            UNMANAGED
        });
    });
    phase
}

/// Size of the separate stack for [`try_start_arena`]. Starting jemalloc takes 11 KiB of it; the rest is for objects
/// that are built on the stack, in debug builds with several copies.
const STACK_BYTES: usize = 512 << 10;

/// Creates the arena and starts jemalloc in it. Returns the phase to enter.
fn try_start_arena() -> pagemill_core::Result<usize> {
    let account = make_account()?;
    let pagemill = Base::new(Instance::new(settings().layout(), account)?)?;
    if settings().observes_limits {
        static KERNEL_LIMITS: Kernel = Kernel::new("");
        account.headroom.set_limits(&KERNEL_LIMITS);
    }
    // Stored before jemalloc starts, because its extent hooks read this pointer.
    assert_fatal!(PAGEMILL.swap(ptr::from_ref(pagemill).cast_mut(), AcqRel).is_null());
    if !small::start_jemalloc(pagemill) {
        PAGEMILL.store(ptr::null_mut(), Release);
        let cause = std::io::ErrorKind::OutOfMemory.into();
        return Err(pagemill_core::Error::System { doing: "starting jemalloc", cause });
    }
    register_extents(pagemill);
    pagemill.instance.helper.set_return(settings().policy);
    if settings().is_checking {
        check::start_checking(pagemill);
    }
    libc_fallback::charge_exactly(account);
    Ok(READY)
}

/// Returns the shared page of the process tree; `None` if this process is in no tree.
fn tree_page() -> Option<&'static TreePage> {
    // SAFETY: the pointer is null or refers to a page that `TreePage::join` mapped and that is never unmapped.
    unsafe { TREE_PAGE.load(Acquire).as_ref() }
}

/// Returns the limit of the process tree in bytes; [`UNLIMITED`] if this process is in none.
fn tree_limit() -> u64 {
    tree_page().map_or(UNLIMITED, TreePage::limit)
}

/// Returns the path of the file of the process tree's shared page; `None` if this process was not started in a tree.
fn tree_file() -> Option<Path> {
    let folder = settings().tree.as_str();
    if folder.is_empty() { None } else { Path::format(format_args!("{folder}/{}", published::TREE_FILE)) }
}

/// Maps the shared page of the process tree, if this process was started in one.
fn join_tree() {
    // Joining fails if `run` has ended and removed the folder. Then the process runs without a tree.
    if let Some(path) = tree_file()
        && let Ok(page) = TreePage::join(path.as_c_str())
    {
        page.count_started_program();
        TREE_PAGE.store(ptr::from_ref(page).cast_mut(), Release);
    }
}

/// Registers the shrinker of jemalloc's memory.
fn register_extents(pagemill: &'static Base) {
    static EXTENT_SHRINKER: OnceLock<small::ExtentShrinker> = OnceLock::new();
    let extents = EXTENT_SHRINKER.get_or_init(|| small::ExtentShrinker::new(pagemill));
    pagemill.instance.account.register(extents);
}

/// Publishes the figures at the first charge, on a separate stack, because the thread's stack may be small.
fn publish_figures() {
    stack::call_on_new(STACK_BYTES, || _ = published::publish());
}

/// Starts the helper thread unless it runs or is disabled. The caller must hold no lock, because creating a thread
/// allocates.
pub fn start_helper(pagemill: &'static Base) {
    if !settings().may_have_helper || !pagemill.instance.helper.claim() {
        return;
    }
    if thread::spawn(c"pagemill", pagemill.instance).is_err() {
        pagemill.instance.helper.unclaim();
    }
}

/// Destructor of the library: publishes the last figures and leaves the process tree.
extern "C" fn on_unload() {
    let Some(account) = account() else {
        if let Some(page) = tree_page() {
            page.record_unpublished_peak(libc_fallback::peak_bytes());
        }
        return;
    };
    match pagemill() {
        Some(pagemill) => pagemill.instance.measure(),
        None => libc_fallback::record_peak(account),
    }
    account.leave();
    published::remove_own_file();
}

/// Constructor of the library. Its priority makes it run before most other constructors.
#[used]
#[unsafe(link_section = ".init_array.00099")]
static CONSTRUCTOR: extern "C" fn() = on_load;

/// Called by the loader: starts the library, unless a call of malloc has started it.
extern "C" fn on_load() {
    state();
}

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = on_unload;
