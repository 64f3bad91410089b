//! Start, growth, fork, exit: the library's life in a process.
//!
//! Its constructor begins it, or the first call of malloc where that comes
//! before: from the loader, or from another library's constructor. Mostly the
//! program is *young* then ([`crate::young`]), and the arena is made when it
//! grows. What allocates while that goes on (on the same thread) gets memory
//! from the C library.
#![allow(unsafe_code)] // statics made at start

use crate::settings::{self, settings, warn};
use crate::{SMALL_END, SMALL_LIMIT, check, fork, slow, small, young};
use pagemill::Pagemill;
use pagemill::heap::MIN_BYTES;
use pagemill::published;
use pagemill::reclaim::Account;
use pagemill::reclaim::kernel::Kernel;
use pagemill::reclaim::tree::{TreePage, UNLIMITED};
use pagemill::sync::Lock;
use pagemill_sys::file::Path;
use pagemill_sys::{mem, process, stack, thread};
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{
    AtomicPtr, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};

const UNSTARTED: usize = 0;
const YOUNG: usize = 1;
const READY: usize = 2;
const UNMANAGED: usize = 3;

/// One of the above, or the thread that starts.
static PHASE: AtomicUsize = AtomicUsize::new(UNSTARTED);
static PAGEMILL: AtomicPtr<Pagemill> = AtomicPtr::new(ptr::null_mut());
/// Made with the arena, or before it where there is a process tree to be told.
static ACCOUNT: AtomicPtr<Account> = AtomicPtr::new(ptr::null_mut());
/// The page of the process tree, if this process is in one: there the figures stay after exit, for `run` to count.
static TREE: AtomicPtr<TreePage> = AtomicPtr::new(ptr::null_mut());

/// Held while the arena is made, and across forks. Never waited for by who would grow: it stays young meanwhile.
pub static GROWTH: Lock = Lock::new();

/// How far the library is.
#[derive(Clone, Copy)]
pub enum State {
    /// This very thread is starting it.
    Starting,
    /// The C library serves as long as the program is small.
    Young,
    Ready(&'static Pagemill),
    /// No address space for an arena: the C library serves for good.
    Unmanaged,
}

pub fn pagemill() -> Option<&'static Pagemill> {
    // SAFETY: null, or what `Pagemill::new` made, which stays.
    unsafe { PAGEMILL.load(Acquire).as_ref() }
}

/// As [`pagemill`], after a look whether this is a new process.
pub fn pagemill_of_process() -> Option<&'static Pagemill> {
    pagemill().inspect(|_| fork::notice_raw_clone())
}

/// The account, if anybody is to be told what this process holds.
pub fn account() -> Option<&'static Account> {
    // SAFETY: null, or what `Account::make` made, which stays.
    unsafe { ACCOUNT.load(Acquire).as_ref() }
}

/// Begins the library's life if need be.
pub fn state() -> State {
    let own = mem::thread_token();
    loop {
        match PHASE.load(Acquire) {
            READY => match pagemill_of_process() {
                Some(pagemill) => return State::Ready(pagemill),
                None => return State::Unmanaged,
            },
            YOUNG => {
                fork::notice_raw_clone();
                return State::Young;
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

/// The program has grown: from now on Pagemill serves it. Says whether somebody else than the C library serves now.
///
/// Not while a fork is under way, or while another thread does this: then the
/// program stays young a little longer.
#[cold]
pub fn grow() -> bool {
    if !GROWTH.try_acquire() {
        return false;
    }
    if PHASE.compare_exchange(YOUNG, mem::thread_token(), AcqRel, Relaxed).is_ok() {
        enter(start_arena());
    }
    GROWTH.release();
    PHASE.load(Relaxed) == READY
}

/// Begins a phase. The fast ways open last: who takes them must find the phase begun.
fn enter(phase: usize) {
    PHASE.store(phase, Release);
    let Some(pagemill) = pagemill().filter(|_| phase == READY && !check::is_on()) else { return };
    let heap_base = pagemill.heap.base();
    // The fast way of `free` takes everything below for jemalloc's. Another thread may still be on its way out of the
    // C library: it notes what it got and then looks here, as we look at what was noted after opening.
    if young::lies_above(heap_base) {
        SMALL_END.store(heap_base, SeqCst);
        if !young::lies_above(heap_base) {
            SMALL_END.store(0, SeqCst);
        }
    }
    SMALL_LIMIT.store(MIN_BYTES, Release);
}

/// Joins the tree if there is one, and decides who serves at first. Returns the phase that begins.
fn begin_life() -> usize {
    settings::read();
    young::find_functions();
    fork::register();
    join_tree();
    let limit = tree().map_or(UNLIMITED, TreePage::limit).min(settings().limit_bytes);
    let may_be_young = limit == UNLIMITED && !settings().is_checking;
    let after_bytes = settings().after_bytes.unwrap_or(young::DEFAULT_AFTER_BYTES);
    if !young::begin(if may_be_young { after_bytes } else { 0 }) {
        return start_arena();
    }
    if tree().is_some() {
        // A tree wants to know of the smallest process; without one nobody asks before it has grown.
        let _ = make_account();
    }
    YOUNG
}

/// Makes the account, once.
fn make_account() -> pagemill::Result<&'static Account> {
    if let Some(account) = account() {
        return Ok(account);
    }
    let account = Account::make(settings().limit_bytes)?;
    fork::mark_process();
    let folder = tree().map_or("", |_| settings().tree.as_str());
    published::set_home(folder, settings().runtime.as_str());
    account.on_first_charge(publish);
    account.on_debt(slow::call_soon);
    if let Some(page) = tree() {
        account.join(page, process::own_identity());
    }
    // Last: other threads charge what they hold as soon as they see it.
    ACCOUNT.store(ptr::from_ref(account).cast_mut(), Release);
    Ok(account)
}

/// Makes the arena and starts jemalloc in it, on a stack of its own: that of the caller may be a small thread's.
/// Returns the phase that begins.
fn start_arena() -> usize {
    extern "C" fn on_new_stack(phase: *mut c_void) {
        let began = try_start_arena().unwrap_or_else(|error| {
            warn(format_args!("pagemill: {error}; the C library serves this program"));
            UNMANAGED
        });
        // SAFETY: the word that `start_arena` waits with.
        unsafe { phase.cast::<usize>().write(began) };
    }
    let mut phase = UNMANAGED;
    // SAFETY: the function returns, and its argument outlives the call.
    unsafe { stack::call_on_new(STACK_BYTES, on_new_stack, (&raw mut phase).cast()) };
    phase
}

/// jemalloc's start alone takes 11 KiB; what is built is moved into its place, in a debug build several times.
const STACK_BYTES: usize = 512 << 10;

fn try_start_arena() -> pagemill::Result<usize> {
    let account = make_account()?;
    let pagemill = Pagemill::with_account(settings().layout(), account)?;
    if settings().is_watching {
        static KERNEL: Kernel = Kernel::new("");
        account.headroom.set_limits(&KERNEL);
    }
    // jemalloc's hooks look here.
    PAGEMILL.store(ptr::from_ref(pagemill).cast_mut(), Release);
    if !small::start(pagemill) {
        PAGEMILL.store(ptr::null_mut(), Release);
        let cause = std::io::ErrorKind::OutOfMemory.into();
        return Err(pagemill::Error::System { doing: "starting jemalloc", cause });
    }
    register_extents(pagemill);
    if settings().is_checking {
        check::start(pagemill);
    }
    young::charge_exactly(account);
    Ok(READY)
}

/// The page of the tree that `pagemill run` made.
fn tree() -> Option<&'static TreePage> {
    // SAFETY: null, or a page that `TreePage::join` mapped for good.
    unsafe { TREE.load(Acquire).as_ref() }
}

fn join_tree() {
    let folder = settings().tree.as_str();
    if folder.is_empty() {
        return;
    }
    // A folder that is gone: `run` has ended, and this is a process it left behind.
    if let Some(path) = Path::format(format_args!("{folder}/{}", published::TREE_FILE))
        && let Ok(page) = TreePage::join(path.as_c_str())
    {
        TREE.store(ptr::from_ref(page).cast_mut(), Release);
    }
}

fn register_extents(pagemill: &'static Pagemill) {
    struct Cell(UnsafeCell<Option<small::Extents>>);
    // SAFETY: written once, by the thread that starts the library, before anybody reads.
    unsafe impl Sync for Cell {}
    static EXTENTS: Cell = Cell(UnsafeCell::new(None));
    // SAFETY: as above.
    let extents = unsafe { (*EXTENTS.0.get()).insert(small::Extents(pagemill)) };
    pagemill.account.register(extents);
}

/// Publishes the figures, at the first charge, which may come on a small stack.
fn publish() {
    extern "C" fn on_new_stack(_: *mut c_void) {
        let _ = published::publish();
    }
    // SAFETY: the function returns, and does not look at its argument.
    unsafe { stack::call_on_new(STACK_BYTES, on_new_stack, ptr::null_mut()) };
}

/// The helper thread's work.
struct Help;

impl thread::Work for Help {
    fn work(&'static self) {
        if let Some(pagemill) = pagemill() {
            pagemill.helper.run(pagemill.arena, settings().idle);
        }
    }
}

/// Starts the helper thread. Outside of every lock: the C library allocates for it.
pub fn helper(pagemill: &'static Pagemill) {
    if !settings().may_have_helper || !pagemill.helper.claim() {
        return;
    }
    if thread::spawn(c"pagemill", &Help).is_err() {
        pagemill.helper.unclaim();
    }
}

/// At exit: the last figures, and the place in the tree is given up.
extern "C" fn end() {
    let Some(account) = account() else { return };
    match pagemill() {
        Some(pagemill) => pagemill.measure(),
        None => young::note_end(account),
    }
    account.leave();
    published::withdraw();
}

/// Begins before other constructors of this library and most of others: priorities run in order.
#[used]
#[unsafe(link_section = ".init_array.00099")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    state();
}

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
