//! Start, growth, fork, exit: the library's life in a process.
//!
//! Its constructor begins it, or the first call of malloc where that comes
//! before: from the loader, or from another library's constructor. Mostly the
//! program is *young* then ([`crate::young`]), and the arena is made when it
//! grows. What allocates while that goes on (on the same thread) gets memory
//! from the C library.
#![allow(unsafe_code)] // statics made at start

use crate::{SMALL_END, SMALL_LIMIT, check, small, young};
use pagemill::arena::Layout;
use pagemill::arena::nodes::Nodes;
use pagemill::heap::MIN_BYTES;
use pagemill::published::{self, TREE_VARIABLE};
use pagemill::reclaim::Account;
use pagemill::reclaim::tree::{TreePage, UNLIMITED};
use pagemill::units::{PageSize, parse_plain_bytes};
use pagemill::{Pagemill, stats};
use pagemill_sys::file::{self, Path};
use pagemill_sys::{mem, process, thread};
use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
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
/// In a process tree the figures stay after exit, for `run` to count.
static IS_IN_TREE: AtomicBool = AtomicBool::new(false);

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
    pagemill().inspect(|_| notice_raw_clone())
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
                notice_raw_clone();
                return State::Young;
            }
            UNMANAGED => return State::Unmanaged,
            UNSTARTED => {
                if PHASE.compare_exchange(UNSTARTED, own, AcqRel, Relaxed).is_ok() {
                    PHASE.store(begin_life(), Release);
                }
            }
            starter if starter == own => return State::Starting,
            _ => thread::yield_now(),
        }
    }
}

/// The program has grown: from now on Pagemill serves it.
#[cold]
pub fn grow() {
    if PHASE.compare_exchange(YOUNG, mem::thread_token(), AcqRel, Relaxed).is_ok() {
        PHASE.store(start_arena(), Release);
    }
}

/// Joins the tree if there is one, and decides who serves at first. Returns the phase that begins.
fn begin_life() -> usize {
    young::find_functions();
    // Before jemalloc's: its handlers then run first before a fork, and its locks are outside of ours.
    let _ = thread::at_fork(before_fork, after_fork, in_fork_child);
    let tree = tree();
    let limit = tree.map_or(UNLIMITED, TreePage::limit).min(own_limit());
    let may_be_young = limit == UNLIMITED && !is_check_wanted();
    let after_bytes = if may_be_young { size_variable(c"PAGEMILL_AFTER") } else { Some(0) };
    if !young::begin(after_bytes.unwrap_or(young::DEFAULT_AFTER_BYTES)) {
        return start_arena();
    }
    if tree.is_some() {
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
    let account = Account::make(own_limit())?;
    ACCOUNT.store(ptr::from_ref(account).cast_mut(), Release);
    mark_process();
    account.on_first_charge(publish);
    account.on_debt(crate::slow::call_soon);
    if let Some(page) = tree() {
        account.join(page, process::own_identity());
    }
    Ok(account)
}

/// Makes the arena and starts jemalloc in it. Returns the phase that begins.
fn start_arena() -> usize {
    let result = make_account().and_then(|account| Pagemill::with_account(layout(), account));
    match result {
        Ok(pagemill) => {
            PAGEMILL.store(ptr::from_ref(pagemill).cast_mut(), Release);
            small::start(pagemill);
            // After jemalloc's, so that it runs before them.
            let _ = thread::at_fork(small::before_fork, small::after_fork, small::after_fork);
            register_extents(pagemill);
            young::charge_exactly(pagemill.account);
            let is_checking = is_check_wanted() && check::start(pagemill);
            if !is_checking {
                // The fast way of `free` takes everything below for jemalloc's.
                if young::lies_above(pagemill.heap.base()) {
                    SMALL_END.store(pagemill.heap.base(), Relaxed);
                }
                SMALL_LIMIT.store(MIN_BYTES, Relaxed);
            }
            READY
        }
        Err(error) => {
            warn(format_args!("pagemill: {error}; the C library serves this program"));
            UNMANAGED
        }
    }
}

fn warn(message: std::fmt::Arguments<'_>) {
    if let Some(line) = file::Text::<512>::format(format_args!("{message}\n")) {
        file::write_stderr(line.as_bytes());
    }
}

fn variable(name: &CStr) -> Option<&'static str> {
    file::environment(name)?.to_str().ok().filter(|value| !value.is_empty())
}

/// A size from the environment; one that cannot be read is named and passed over.
fn size_variable(name: &CStr) -> Option<usize> {
    let value = variable(name)?;
    let bytes = parse_plain_bytes(value).and_then(|bytes| usize::try_from(bytes).ok());
    if bytes.is_none() {
        warn(format_args!("pagemill: {}={value} is no size; ignored", name.to_str().unwrap_or("")));
    }
    bytes
}

fn is_check_wanted() -> bool {
    variable(c"PAGEMILL_CHECK").is_some_and(|value| value != "0")
}

fn own_limit() -> u64 {
    size_variable(c"PAGEMILL_LIMIT").map_or(UNLIMITED, |bytes| bytes as u64)
}

fn layout() -> Layout {
    let mut layout = Layout::for_program();
    if let Some(bytes) = size_variable(c"PAGEMILL_PAGE_SIZE") {
        match PageSize::new(bytes) {
            Some(page) => layout.page = page,
            None => warn(format_args!("pagemill: PAGEMILL_PAGE_SIZE={bytes} is no page size; ignored")),
        }
    }
    if let Some(count) = size_variable(c"PAGEMILL_NODES").filter(|count| *count > 0) {
        layout.nodes = Nodes::logical(count);
    }
    match variable(c"PAGEMILL_HUGE") {
        Some("never") => layout.use_huge = false,
        Some("always") => layout.huge_from_bytes = 0,
        _ => {}
    }
    layout
}

/// The page of the tree that `pagemill run` made, if this process is in one. Joined at the first call.
fn tree() -> Option<&'static TreePage> {
    /// 0: not looked for yet; 1: there is none.
    static PAGE: AtomicUsize = AtomicUsize::new(0);
    const NONE: usize = 1;
    if PAGE.load(Acquire) == 0 {
        let page = join_tree().map_or(NONE, |page| ptr::from_ref(page) as usize);
        IS_IN_TREE.store(page != NONE, Relaxed);
        PAGE.store(page, Release);
    }
    let page = PAGE.load(Acquire);
    // SAFETY: otherwise the address of a page that `TreePage::join` mapped for good.
    (page != NONE).then(|| unsafe { &*(page as *const TreePage) })
}

fn join_tree() -> Option<&'static TreePage> {
    let folder = variable(TREE_VARIABLE)?;
    let path = Path::format(format_args!("{folder}/{}", published::TREE_FILE))?;
    // A folder that is gone: `run` has ended, and this is a process it left behind.
    TreePage::join(path.as_c_str()).ok()
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

/// Folder and file of this process's figures.
fn figures_path() -> Option<Path> {
    let who = process::own_identity();
    match variable(TREE_VARIABLE).filter(|_| IS_IN_TREE.load(Relaxed)) {
        Some(folder) => published::file_of(folder, who),
        None => published::file_of(published::user_folder().ok()?.as_str(), who),
    }
}

/// Publishes the figures, at the first charge.
fn publish() {
    let Some(path) = figures_path() else { return };
    let _ = stats::publish(path.as_c_str(), process::own_identity());
}

/// A page that reads zero in a child: the kernel wipes it, however the child was made.
static MARK: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

fn mark_process() {
    if MARK.load(Relaxed).is_null()
        && let Ok(page) = mem::map_sparse(pagemill::units::os_page_bytes(), pagemill::units::os_page_bytes())
        && mem::wipe_on_fork(page)
    {
        MARK.store(page as *mut AtomicU32, Release);
    }
    // SAFETY: null, or a page that stays mapped.
    if let Some(mark) = unsafe { MARK.load(Acquire).as_ref() } {
        mark.store(1, Relaxed);
    }
}

/// A child made by a bare `clone` ran no fork handlers: it starts its own account at its first slow call.
fn notice_raw_clone() {
    // SAFETY: null, or a page that stays mapped.
    if let Some(mark) = unsafe { MARK.load(Acquire).as_ref() }
        && mark.load(Relaxed) == 0
        && mark.swap(1, Relaxed) == 0
    {
        begin_child();
    }
}

/// In a child process: what is held is the parent's, and everything is counted anew.
fn begin_child() {
    young::forked();
    match (pagemill(), account()) {
        (Some(pagemill), _) => pagemill.begin_child(),
        (None, Some(account)) => {
            stats::detach_in_child();
            account.forked(process::own_identity());
        }
        (None, None) => {}
    }
}

/// In a fork child: another thread of the parent may have been making the arena, and does not exist here. Nothing of
/// the half of it was handed out yet, so the C library can serve this process for good.
fn give_up_start_of_parent() {
    let phase = PHASE.load(Relaxed);
    if ![UNSTARTED, YOUNG, READY, UNMANAGED].contains(&phase) {
        let was_complete = SMALL_LIMIT.load(Relaxed) != 0 || check::is_on();
        PHASE.store(if was_complete { READY } else { UNMANAGED }, Relaxed);
    }
}

extern "C" fn before_fork() {
    if let Some(pagemill) = pagemill() {
        pagemill.before_fork();
    }
}

extern "C" fn after_fork() {
    if let Some(pagemill) = pagemill() {
        pagemill.after_fork();
    }
}

extern "C" fn in_fork_child() {
    if !MARK.load(Relaxed).is_null() {
        mark_process();
    }
    give_up_start_of_parent();
    if let Some(pagemill) = pagemill() {
        pagemill.after_fork();
    }
    begin_child();
}

/// Starts the helper thread. Outside of every lock: the C library allocates for it.
pub fn helper(pagemill: &'static Pagemill) {
    extern "C" fn main(_: *mut c_void) -> *mut c_void {
        match self::pagemill() {
            Some(pagemill) => pagemill.helper.run(pagemill.account, pagemill.arena),
            None => ptr::null_mut(),
        }
    }
    if variable(c"PAGEMILL_HELPER") == Some("off") || !pagemill.helper.claim() {
        return;
    }
    if thread::spawn(c"pagemill", main).is_err() {
        pagemill.helper.unclaim();
    }
}

/// At exit: the last figures, and the place in the tree is given up.
extern "C" fn end() {
    let Some(account) = account() else { return };
    match pagemill() {
        Some(pagemill) => pagemill.measure(),
        None => young::charge_peak(account),
    }
    account.leave();
    if !IS_IN_TREE.load(Relaxed)
        && let Some(path) = figures_path()
    {
        file::remove(path.as_c_str());
    }
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
