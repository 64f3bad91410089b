//! Start, fork, exit: the library's life in a process.
//!
//! Its constructor starts it, or the first call of malloc where that comes
//! before: from the loader, or from another library's constructor. What allocates while that goes on
//! (on the same thread) gets memory from a small fixed buffer.
#![allow(unsafe_code)] // statics made at start, the early buffer

use crate::{SMALL_END, SMALL_LIMIT, check, small};
use pagemill::arena::Layout;
use pagemill::arena::nodes::Nodes;
use pagemill::heap::MIN_BYTES;
use pagemill::published::{self, TREE_VARIABLE};
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
const READY: usize = 1;
const UNMANAGED: usize = 2;

/// One of the above, or the thread that starts.
static PHASE: AtomicUsize = AtomicUsize::new(UNSTARTED);
static PAGEMILL: AtomicPtr<Pagemill> = AtomicPtr::new(ptr::null_mut());
/// In a process tree the figures stay after exit, for `run` to count.
static IS_IN_TREE: AtomicBool = AtomicBool::new(false);

/// How far the library is.
#[derive(Clone, Copy)]
pub enum State {
    /// This very thread is starting it.
    Starting,
    Ready(&'static Pagemill),
    /// No address space for an arena: jemalloc alone serves all sizes.
    Unmanaged,
}

pub fn pagemill() -> Option<&'static Pagemill> {
    // SAFETY: null, or what `Pagemill::new` made, which stays.
    unsafe { PAGEMILL.load(Acquire).as_ref() }
}

/// As [`pagemill`], after a look whether this is a new process.
pub fn pagemill_of_process() -> Option<&'static Pagemill> {
    pagemill().inspect(|pagemill| notice_raw_clone(pagemill))
}

/// Starts the library if need be.
pub fn state() -> State {
    let own = mem::thread_token();
    loop {
        match PHASE.load(Acquire) {
            READY => match pagemill() {
                Some(pagemill) => {
                    notice_raw_clone(pagemill);
                    return State::Ready(pagemill);
                }
                None => return State::Unmanaged,
            },
            UNMANAGED => return State::Unmanaged,
            UNSTARTED => {
                if PHASE.compare_exchange(UNSTARTED, own, AcqRel, Relaxed).is_ok() {
                    start();
                }
            }
            starter if starter == own => return State::Starting,
            _ => thread::yield_now(),
        }
    }
}

fn start() {
    let result = Pagemill::new(layout(), own_limit());
    match result {
        Ok(pagemill) => {
            PAGEMILL.store(ptr::from_ref(pagemill).cast_mut(), Release);
            // Before jemalloc's: its handlers then run first before a fork, and its locks are outside of ours.
            mark_process();
            let _ = thread::at_fork(before_fork, after_fork, in_fork_child);
            pagemill.account.on_first_charge(publish);
            pagemill.account.on_debt(crate::slow::call_soon);
            join_tree(pagemill);
            small::start(Some(pagemill));
            // After jemalloc's, so that it runs before them.
            let _ = thread::at_fork(small::before_fork, small::after_fork, small::after_fork);
            register_extents(pagemill);
            let is_checking = variable(c"PAGEMILL_CHECK").is_some_and(|value| value != "0") && check::start(pagemill);
            if !is_checking {
                open_free(pagemill.heap.base());
                SMALL_LIMIT.store(MIN_BYTES, Relaxed);
            }
            PHASE.store(READY, Release);
        }
        Err(error) => {
            warn(format_args!("pagemill: {error}; serving this program without an arena"));
            small::start(None);
            open_free(usize::MAX);
            SMALL_LIMIT.store(isize::MAX as usize, Relaxed);
            PHASE.store(UNMANAGED, Release);
        }
    }
}

/// Lets `free` go straight to jemalloc below `end`, unless memory handed out early lies there.
fn open_free(end: usize) {
    if EARLY.used.load(Relaxed) == 0 || EARLY.bytes.get() as usize >= end {
        SMALL_END.store(end, Relaxed);
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

/// Joins the tree that `pagemill run` made; without one the limit of the environment is this process's own.
fn join_tree(pagemill: &'static Pagemill) {
    let Some(folder) = variable(TREE_VARIABLE) else { return };
    let Some(path) = Path::format(format_args!("{folder}/{}", published::TREE_FILE)) else { return };
    // A folder that is gone: `run` has ended, and this is a process it left behind.
    if let Ok(page) = TreePage::join(path.as_c_str()) {
        IS_IN_TREE.store(true, Relaxed);
        pagemill.account.join(page, process::own_identity());
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
fn notice_raw_clone(pagemill: &'static Pagemill) {
    // SAFETY: null, or a page that stays mapped.
    if let Some(mark) = unsafe { MARK.load(Acquire).as_ref() }
        && mark.load(Relaxed) == 0
        && mark.swap(1, Relaxed) == 0
    {
        pagemill.begin_child();
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
    if let Some(pagemill) = pagemill() {
        mark_process();
        pagemill.in_fork_child();
    }
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
    let Some(pagemill) = pagemill() else { return };
    pagemill.measure();
    pagemill.account.leave();
    if !IS_IN_TREE.load(Relaxed)
        && let Some(path) = figures_path()
    {
        file::remove(path.as_c_str());
    }
}

/// Starts before jemalloc's own constructor, which would map its first extents elsewhere: priorities run in order.
#[used]
#[unsafe(link_section = ".init_array.00099")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    state();
}

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// Memory for what allocates while the library starts.
struct Early {
    bytes: UnsafeCell<[u8; EARLY_BYTES]>,
    used: AtomicUsize,
}

const EARLY_BYTES: usize = 64 << 10;

// SAFETY: parts of `bytes` are handed out once each, by `used`.
unsafe impl Sync for Early {}

static EARLY: Early = Early { bytes: UnsafeCell::new([0; EARLY_BYTES]), used: AtomicUsize::new(0) };

/// Memory from the early buffer, zeroed, with its size before it; never freed.
pub fn early(size: usize, align: usize) -> *mut c_void {
    let base = EARLY.bytes.get() as usize;
    let align = align.max(16);
    loop {
        let used = EARLY.used.load(Relaxed);
        let start = (base + used + 16).next_multiple_of(align) - base;
        let Some(end) = start.checked_add(size).filter(|end| *end <= EARLY_BYTES) else {
            return crate::slow::out_of_memory();
        };
        if EARLY.used.compare_exchange(used, end, Relaxed, Relaxed).is_ok() {
            // SAFETY: `start - 16..end` of the buffer is this caller's; aligned to 16.
            unsafe { ((base + start - 16) as *mut usize).write(size) };
            return (base + start) as *mut c_void;
        }
    }
}

/// Whether an address lies in the early buffer.
pub fn is_early(addr: usize) -> bool {
    addr.wrapping_sub(EARLY.bytes.get() as usize) < EARLY_BYTES
}

/// Bytes of an early allocation; 0 for any other address.
pub fn early_size(addr: usize) -> usize {
    // SAFETY: an address that `early` returned has its size before it.
    if is_early(addr) { unsafe { ((addr - 16) as *const usize).read() } } else { 0 }
}
