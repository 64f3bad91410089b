//! Fill threads: do what a fault handler must not do, such as reading pages from a store.
#![allow(unsafe_code)] // references to the windows of waiting fault handlers

use super::pieces::Access;
use super::window::Window;
use pagemill_core::callback;
use pagemill_core::error::{Error, Result};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::thread::{self, Work};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// Number of requests that can wait at a time. Further fault handlers try again.
const MAX_REQUESTS: usize = 64;

/// Number of fill threads, so many reads of stores are in flight at a time.
const THREADS: u32 = 8;

/// Size of the stack of a fill thread, which calls stores and policies of the program.
const STACK_BYTES: usize = 1 << 20;

/// States of a request.
const FREE: u32 = 0;
const WRITTEN: u32 = 1;
const QUEUED: u32 = 2;
const TAKEN: u32 = 3;
const DONE: u32 = 4;
const FAILED: u32 = 5;

/// A request of a fault handler, which waits until it is done.
struct Request {
    state: AtomicU32,
    window: AtomicPtr<Window>,
    page: AtomicU64,
    is_write: AtomicBool,
}

/// The requests of the process.
struct Requests {
    places: [Request; MAX_REQUESTS],
    /// Increases with each request. Fill threads sleep on this word.
    count: AtomicU32,
    /// Number of fill threads that were started.
    threads: AtomicU32,
}

static REQUESTS: Requests = Requests {
    places: [const {
        Request {
            state: AtomicU32::new(FREE),
            window: AtomicPtr::new(ptr::null_mut()),
            page: AtomicU64::new(0),
            is_write: AtomicBool::new(false),
        }
    }; MAX_REQUESTS],
    count: AtomicU32::new(0),
    threads: AtomicU32::new(0),
};

/// Starts the fill threads, unless they were started before.
pub(super) fn start_threads() -> Result<()> {
    while REQUESTS.threads.load(SeqCst) < THREADS {
        let before = REQUESTS.threads.fetch_add(1, SeqCst);
        if before >= THREADS {
            REQUESTS.threads.fetch_sub(1, SeqCst);
            break;
        }
        if let Err(error) = thread::spawn_with_stack(c"pagemill-views", STACK_BYTES, &REQUESTS) {
            REQUESTS.threads.fetch_sub(1, SeqCst);
            // Fewer threads do.
            return if before > 0 { Ok(()) } else { Err(Error::System { doing: "starting a thread", cause: error }) };
        }
    }
    Ok(())
}

/// Forgets the threads and requests of the parent in a fork child.
pub(super) fn begin_child() {
    REQUESTS.threads.store(0, SeqCst);
    REQUESTS.places.iter().for_each(|place| place.state.store(FREE, SeqCst));
}

/// Has a fill thread read the page at `addr` and map it for an access, and waits for it. Returns whether the access can be
/// retried. Runs in a signal handler.
pub(super) fn request(window: &Window, addr: usize, access: Access) -> bool {
    if window.offset_at(addr) >= window.file.size_bytes().next_multiple_of(pagemill_sys::mem::os_page_bytes() as u64) {
        return false;
    }
    let is_free = |place: &&Request| place.state.compare_exchange(FREE, WRITTEN, SeqCst, Relaxed).is_ok();
    let Some(place) = REQUESTS.places.iter().find(is_free) else {
        thread::pause();
        return true;
    };
    place.window.store(ptr::from_ref(window).cast_mut(), SeqCst);
    place.page.store(window.page_at(addr), SeqCst);
    place.is_write.store(access == Access::Write, SeqCst);
    place.state.store(QUEUED, SeqCst);
    REQUESTS.count.fetch_add(1, SeqCst);
    futex::wake(&REQUESTS.count, 1, Scope::Private);
    loop {
        match place.state.load(SeqCst) {
            state @ (DONE | FAILED) => {
                place.state.store(FREE, SeqCst);
                return state == DONE;
            }
            state => futex::wait(&place.state, state, None, Scope::Private),
        }
    }
}

impl Work for Requests {
    fn work(&'static self) {
        loop {
            let seen = self.count.load(SeqCst);
            let is_queued = |place: &&Request| place.state.compare_exchange(QUEUED, TAKEN, SeqCst, Relaxed).is_ok();
            let Some(place) = self.places.iter().find(is_queued) else {
                futex::wait(&self.count, seen, None, Scope::Private);
                continue;
            };
            // SAFETY: the fault handler that waits for this request keeps the window.
            let window = unsafe { &*place.window.load(SeqCst) };
            // A panic of a store or policy counts as a failure.
            let mut state = FAILED;
            callback::catch_panic(|| {
                let access = if place.is_write.load(SeqCst) { Access::Write } else { Access::Read };
                state = match window.fill(place.page.load(SeqCst), access) {
                    // Another thread holds the page for long, so the access is tried again.
                    Ok(_) | Err(Error::Busy { .. }) => DONE,
                    Err(Error::PastEnd { .. }) => FAILED,
                    Err(error) => {
                        window.error.with(|latest| *latest = Some(error));
                        FAILED
                    }
                };
            });
            place.state.store(state, SeqCst);
            futex::wake(&place.state, 1, Scope::Private);
        }
    }
}
