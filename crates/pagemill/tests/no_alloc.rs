//! Tests of invariant 3 of ARCHITECTURE.md: arena, heap, reclaim, volatile, stats and trace must never use the global
//! allocator.
//!
//! The global allocator of this test program aborts if a thread uses it in a forbidden section. A thread runs such a
//! section by [`without_allocations`]. Other threads, such as those of the test harness, may allocate.
#![allow(unsafe_code)] // a global allocator; frees and forks

use pagemill_cache::mapping::PageCache;
use pagemill_core::Error;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::arena::{Context, Layout};
use pagemill_core::published::{self, Subject};
use pagemill_core::reclaim::alarms::Alarms;
use pagemill_core::reclaim::helper::Answer;
use pagemill_core::reclaim::kernel::Kernel;
use pagemill_core::reclaim::limits::{Limits, Room};
use pagemill_core::reclaim::tree::{TreePage, UNLIMITED};
use pagemill_core::reclaim::{Reason, Shrinker, Urgency, Which};
use pagemill_core::stats::{self, Counter};
use pagemill_core::trace::{self, Event};
use pagemill_core::units::{BLOCK_BYTES, PageSize, os_page_bytes, parse_plain_bytes};
use pagemill_slab as slab;
use pagemill_sys::file::AnswerFile;
use pagemill_sys::{fatal, mem, process};
use pagemill_testbed::Testbed;
use pagemill_volatile::vrange::{How, Mode};
use pagemill_volatile::{Behaviour, Contents};
use std::alloc::{GlobalAlloc, Layout as Request, System};
use std::ffi::CString;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Token of the thread that must not use the global allocator now; 0 if there is no such thread.
static FORBIDDEN_THREAD: AtomicUsize = AtomicUsize::new(0);

struct CheckedAllocator;

fn abort_if_forbidden(what: &str, bytes: usize) {
    if FORBIDDEN_THREAD.load(Relaxed) == mem::thread_token() {
        fatal(format_args!("invariant 3 is broken: {what} of {bytes} bytes through the global allocator"));
    }
}

// SAFETY: the system's allocator, with a check of the thread before each call.
unsafe impl GlobalAlloc for CheckedAllocator {
    unsafe fn alloc(&self, request: Request) -> *mut u8 {
        abort_if_forbidden("allocation", request.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(request) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, request: Request) {
        abort_if_forbidden("free", request.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(pointer, request) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, request: Request, size: usize) -> *mut u8 {
        abort_if_forbidden("reallocation", size);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(pointer, request, size) }
    }
}

#[global_allocator]
static CHECKED_ALLOCATOR: CheckedAllocator = CheckedAllocator;

/// Runs `act` as a forbidden section, in which this thread must not use the global allocator. Only one thread at a time
/// can run such a section.
fn without_allocations<T>(act: impl FnOnce() -> T) -> T {
    static ONE_THREAD_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_THREAD_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    FORBIDDEN_THREAD.store(mem::thread_token(), Relaxed);
    let result = act();
    FORBIDDEN_THREAD.store(0, Relaxed);
    result
}

/// Aborts if the condition `holds` is false. Makes no allocation for the message.
fn require(holds: bool, what: &str) {
    if !holds {
        fatal(format_args!("not so: {what}"));
    }
}

fn layouts() -> [Layout; 4] {
    let small = Layout { use_huge: false, ..Layout::for_test() };
    [
        Layout::for_test(),
        small,
        Layout {
            nodes: Nodes::logical(3),
            huge_from_bytes: Layout::for_program().huge_from_bytes,
            ..Layout::for_test()
        },
        Layout { page: PageSize::new(64 * KIB).unwrap(), ..small },
    ]
}

fn use_whole_heap_api(pagemill: &Testbed) {
    let sizes = [1, 64 * KIB, 100 * KIB, 384 * KIB, MIB, 3 * MIB, 5 * MIB, 40 * MIB];
    for round in 0..3u8 {
        let mut addrs = [0; 16];
        for (index, addr) in addrs.iter_mut().enumerate() {
            let size = sizes[index % sizes.len()];
            let found = if index % 3 == 0 {
                pagemill.heap.allocate_zeroed(size, 1)
            } else {
                pagemill.heap.allocate(size, 1 << (index + 8)).map(|found| found.addr)
            };
            let Ok(found) = found else { continue };
            *addr = found.as_ptr() as usize;
            // SAFETY: the memory was allocated just now, and has at least one byte.
            unsafe { found.as_ptr().write(round) };
        }
        pagemill.measure();
        for (index, addr) in addrs.into_iter().enumerate().filter(|(_, addr)| *addr != 0) {
            // SAFETY: the allocation is live. Afterwards only the new address is used.
            let new = unsafe { pagemill.heap.resize(addr, sizes[(index + 3) % sizes.len()]) };
            let addr = new.map_or(addr, |new| new.as_ptr() as usize);
            require(pagemill.heap.usable_bytes(addr).is_ok(), "a live allocation has a size");
            // SAFETY: the allocation is live. The second free is invalid on purpose, and the heap rejects it.
            unsafe {
                require(pagemill.heap.free(addr).is_ok(), "it can be freed");
                require(matches!(pagemill.heap.free(addr), Err(Error::FreedBefore { .. })), "and only once");
            }
        }
        let urgency = if round == 0 { Urgency::Request } else { Urgency::Limit };
        pagemill.heap.shrink(if round == 1 { 5 << 20 } else { u64::MAX }, urgency);
    }
    require(pagemill.heap.allocate(1, 3).is_err(), "bad alignment");
    require(pagemill.heap.allocate(usize::MAX, 1).is_err(), "bad size");
    // SAFETY: the address is invalid on purpose; the heap rejects it.
    require(unsafe { pagemill.heap.free(7) }.is_err(), "foreign free");
}

/// Creates Pagemill instances and makes every call of the heap, including calls that fail. No call may use the global
/// allocator.
#[test]
fn the_heap_allocates_nothing_elsewhere() {
    let layouts = layouts();
    without_allocations(|| {
        for layout in layouts {
            let Ok(pagemill) = Testbed::new(layout, UNLIMITED) else { fatal(format_args!("no address space")) };
            use_whole_heap_api(pagemill);
        }
    });
}

/// Volatile ranges are allocated, marked, purged and dropped, by handle and by address. Some calls fail. No call may
/// use the global allocator.
#[test]
fn volatile_ranges_allocate_nothing_elsewhere() {
    without_allocations(|| {
        let Ok(pagemill) = Testbed::new(Layout::for_test(), UNLIMITED) else { fatal(format_args!("no address space")) };
        for len in [1, 64 * KIB, MIB, 5 * MIB] {
            for behaviour in [Behaviour::Full, Behaviour::Partial { chunk_bytes: 64 * KIB }] {
                let Ok(mut range) = pagemill.ranges.allocate(len, behaviour) else { fatal(format_args!("no range")) };
                require(range.bytes_mut().map(|bytes| bytes.fill(1)).is_ok(), "a held range can be written");
                require(range.mark().is_ok() && range.mark().is_err(), "it is marked once");
                require(pagemill.ranges.shrink(u64::MAX, Urgency::Request) > 0, "it is purged");
                require(range.pin().is_ok_and(|pin| pin.contents() != Contents::Kept), "the purge is reported");
                require(range.unmark().is_ok() && range.unmark().is_err(), "it is unmarked once");
            }
        }
        require(pagemill.ranges.allocate(0, Behaviour::Full).is_err(), "bad length");
        let Ok(slot) = pagemill.heap.allocate(MIB, MIB) else { fatal(format_args!("no slot")) };
        let (addr, page) = (slot.addr.as_ptr() as usize, os_page_bytes());
        for at in (0..MIB).step_by(2 * page) {
            // SAFETY: a live slot, to which there are no references; unmarked before it is freed.
            let marked = unsafe { pagemill.vranges.vrange(addr + at, page, Mode::Volatile, How::Full) };
            require(marked.is_ok(), "every other page is marked");
        }
        pagemill.vranges.shrink(u64::MAX, Urgency::Limit);
        // SAFETY: as above.
        let unmarked = unsafe { pagemill.vranges.vrange(addr, MIB, Mode::Nonvolatile, How::Full) };
        require(unmarked.is_ok_and(|marked| marked.bytes == MIB as u64 / 2), "and unmarked");
        pagemill.vranges.forget(addr..addr + MIB);
        // SAFETY: as above. The range is invalid on purpose.
        require(unsafe { pagemill.vranges.vrange(1, 1, Mode::Volatile, How::Full) }.is_err(), "bad range");
    });
}

/// Another process requests a list of volatile ranges. The helper thread must write the list without using the global
/// allocator.
#[test]
fn listing_allocates_nothing_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("request");
    std::fs::write(&path, b"").unwrap();
    let path = CString::new(path.to_str().unwrap()).unwrap();
    without_allocations(|| {
        let Ok(pagemill) = Testbed::new(Layout::for_test(), UNLIMITED) else { fatal(format_args!("no address space")) };
        for _ in 0..300 {
            let Ok(range) = pagemill.ranges.allocate(64 * KIB, Behaviour::Full) else {
                fatal(format_args!("no range"))
            };
            require(range.mark().is_ok(), "it is marked");
            std::mem::forget(range);
        }
        let Ok(file) = AnswerFile::open(&path) else { fatal(format_args!("no file")) };
        require(pagemill.responder.write_list(&file, 1, Subject::Ranges).is_ok(), "it is written");
        require(AnswerFile::open(&path).is_err(), "it is not empty any more");
        pagemill.responder.answer(1);
    });
    assert_eq!(std::fs::metadata(folder.path().join("request")).unwrap().len(), 301 * 32);
}

/// The helper thread writes a list of the memory of page caches. It must not use the global allocator.
#[test]
fn listing_page_caches_allocates_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("request"), b"").unwrap();
    let path = CString::new(folder.path().join("request").to_str().unwrap()).unwrap();
    let pagemill = Testbed::for_test();
    let make = |name| PageCache::builder(name).limit(64 << 20).build_in(pagemill.caches).unwrap();
    let (tiles, rows) = (make("tiles"), make("rows"));
    let files: Vec<_> = [&tiles, &rows, &rows].map(|cache| cache.create().unwrap()).into();
    files.iter().for_each(|file| assert_eq!(file.write_at(&[1; 3 * MIB], 0).unwrap(), 3 * MIB));
    drop(make("ended"));
    without_allocations(|| {
        let Ok(file) = AnswerFile::open(&path) else { fatal(format_args!("no file")) };
        require(pagemill.responder.write_list(&file, 1, Subject::Caches).is_ok(), "it is written");
        pagemill.measure();
    });
    let bytes = std::fs::read(folder.path().join("request")).unwrap();
    assert_eq!((&bytes[..9], bytes.len()), (&b"pm-cach2\x01"[..], 32 + 4 * 144), "three pools, spare nodes");
    assert_eq!((&bytes[32..38], &bytes[176..181]), (&b"tiles\0"[..], &b"rows\0"[..]));
}

/// The helper thread writes a list of slab caches. It must not use the global allocator.
#[test]
fn listing_slab_caches_allocates_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("request"), b"").unwrap();
    let path = CString::new(folder.path().join("request").to_str().unwrap()).unwrap();
    let pagemill = Testbed::for_test();
    let entries = pagemill.slabs.by_handle::<[u64; 24]>(slab::Settings::new("entries")).unwrap();
    let boxes = pagemill.slabs.fixed::<u64>(slab::Settings::new("boxes")).unwrap();
    let (_entry, _box) = (entries.insert([1; 24]).unwrap(), boxes.insert(1).unwrap());
    drop(pagemill.slabs.fixed::<u64>(slab::Settings::new("ended")).unwrap());
    without_allocations(|| {
        let Ok(file) = AnswerFile::open(&path) else { fatal(format_args!("no file")) };
        require(pagemill.responder.write_list(&file, 1, Subject::Slabs).is_ok(), "it is written");
    });
    let bytes = std::fs::read(folder.path().join("request")).unwrap();
    assert_eq!((&bytes[..9], bytes.len()), (&b"pm-slab2\x01"[..], 32 + 2 * 256), "two caches of one node");
    assert_eq!((&bytes[32..40], &bytes[288..294]), (&b"entries\0"[..], &b"boxes\0"[..]));
}

/// Allocations over the limit cause reclaim, errors, and debts of nested charges. None of this may use the global
/// allocator.
#[test]
fn reclaim_allocates_nothing_elsewhere() {
    let layouts = layouts();
    without_allocations(|| {
        for layout in layouts {
            let Ok(pagemill) = Testbed::new(layout, 12 << 20) else { fatal(format_args!("no address space")) };
            pagemill.account.on_first_charge(|| stats::add(Counter::SlotsFresh, 0));
            pagemill.account.on_debt(|| stats::add(Counter::SlotsFresh, 0));
            let mut addrs = [0; 64];
            for addr in &mut addrs {
                let Ok(found) = pagemill.heap.allocate(MIB, 1) else { break };
                *addr = found.addr.as_ptr() as usize;
                // SAFETY: the memory was allocated just now, and only this test uses it.
                unsafe { std::ptr::write_bytes(found.addr.as_ptr(), 1, MIB) };
            }
            pagemill.account.reconcile();
            require(pagemill.heap.allocate(MIB, 1).is_err(), "the limit was met");
            let Ok(extent) = pagemill.arena.extent(8 * BLOCK_BYTES, 1) else { fatal(format_args!("no extent")) };
            for part in 0..8 {
                // SAFETY: each part of the extent is committed once.
                let _ = unsafe { pagemill.arena.commit(extent + part * BLOCK_BYTES, BLOCK_BYTES) };
                if pagemill.account.has_debt() {
                    pagemill.account.pay_debt();
                }
            }
            // SAFETY: each allocation is live, and is freed once.
            addrs.iter().filter(|addr| **addr != 0).for_each(|addr| drop(unsafe { pagemill.heap.free(*addr) }));
            pagemill.account.offer(u64::MAX, Which::All);
            pagemill.account.reap();
            pagemill.account.give_back(u64::MAX, Context::Outside, Urgency::Limit, Reason::Program);
            use_whole_heap_api(pagemill);
        }
    });
}

/// Committing, decommitting, overcommitting, splitting and measuring extents must not use the global allocator.
#[test]
fn extents_allocate_nothing_elsewhere() {
    let layouts = layouts();
    without_allocations(|| {
        for layout in layouts {
            let Ok(pagemill) = Testbed::new(layout, UNLIMITED) else { fatal(format_args!("no address space")) };
            let (arena, page) = (pagemill.arena, os_page_bytes());
            let Ok(addr) = arena.extent(4 * BLOCK_BYTES, BLOCK_BYTES) else { fatal(format_args!("no extent")) };
            // SAFETY: the pages are in the extent above and are not committed.
            require(unsafe { arena.commit(addr + page, 3 * BLOCK_BYTES) }.is_ok(), "commit");
            // SAFETY: the pages were committed above and are not used again.
            unsafe { arena.decommit(addr + 2 * page, BLOCK_BYTES) };
            arena.split_sparse_extents(u64::MAX);
            // SAFETY: the page was decommitted above.
            require(unsafe { arena.commit(addr + 2 * page, page) }.is_ok(), "commit again");
            let Ok(overcommitted) = arena.extent(BLOCK_BYTES, 1) else { fatal(format_args!("no extent")) };
            // SAFETY: the pages are in a new extent, which only this test uses.
            require(unsafe { arena.overcommit_extent(overcommitted, BLOCK_BYTES) }.is_ok(), "overcommit");
            arena.reconcile_extents();
            require(arena.extent(usize::MAX, 1).is_err(), "no addresses");
            while arena.prefault() {}
        }
    });
}

/// A process joins a process tree, sends a request, answers, sweeps and leaves the tree. None of this may use the
/// global allocator.
#[test]
fn the_tree_allocates_nothing_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = CString::new(folder.path().join("tree").to_str().unwrap()).unwrap();
    let missing = CString::new(folder.path().join("none").to_str().unwrap()).unwrap();
    let pagemill = Testbed::for_test();
    without_allocations(|| {
        require(TreePage::join(&missing).is_err(), "no page there");
        let (Ok(page), Ok(_)) = (TreePage::create(&path, 16 << 20), TreePage::join(&path)) else {
            fatal(format_args!("no page"));
        };
        let dead = process::Identity { pid: 1 << 30, start_ticks: 1 };
        if let Some(place) = page.enter(dead) {
            place.publish(1 << 20, 0, 0);
            place.listen(true);
        }
        pagemill.account.join(page, process::own_identity());
        page.ask(1 << 20, pagemill.account.place(), || false);
        page.ask(1 << 20, None, || true);
        pagemill.account.answer();
        use_whole_heap_api(pagemill);
        require(page.totals().members > 0, "members");
        page.sweep();
        pagemill.account.leave();
    });
}

/// A process publishes counters and events. A process that starts searches for its figures files. Neither may use the
/// global allocator.
#[test]
fn counters_and_events_allocate_nothing_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = CString::new(folder.path().join("figures").to_str().unwrap()).unwrap();
    without_allocations(|| {
        let _ = published::user_folder();
        let _ = published::file_of("/somewhere", process::own_identity());
        let _ = (parse_plain_bytes("64K"), parse_plain_bytes("x"), Layout::for_program());
        require(stats::publish(&path, process::own_identity()).is_ok(), "publish");
        require(stats::publish(&path, process::own_identity()).is_ok(), "publish again, as after exec");
        for number in 0..3000 {
            trace::event(Event::GivenForProgram, number, number);
            stats::add(Counter::PurgeFreed, number);
            stats::raise(Counter::ResidentPeak, number);
        }
        require(stats::get(Counter::PurgeFreed) > 0, "counted");
        let _ = stats::snapshot();
        require(stats::read(&path).is_ok(), "read");
    });
}

/// Reading the kernel's limits must not use the global allocator, whether the kernel's files exist or not, because
/// malloc may call it.
#[test]
fn limits_are_sampled_without_allocating() {
    let (real, missing) = (Kernel::new(""), Kernel::new("/nowhere"));
    without_allocations(|| {
        require(real.sample().limit_bytes < u64::MAX, "the machine at least binds");
        require(missing.sample() == Room::ENDLESS, "nothing binds where nothing can be read");
        let Ok(mut alarms) = Alarms::new() else { fatal(format_args!("no alarms")) };
        for limits in [&real, &missing] {
            let Some(plan) = limits.plan(None) else { fatal(format_args!("no plan")) };
            alarms.set_all(&plan);
        }
    });
}

/// The handlers around `fork` run in both processes, while the heap is in use and the process is in a tree. They must
/// not use the global allocator.
#[test]
fn fork_handlers_allocate_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = CString::new(folder.path().join("tree").to_str().unwrap()).unwrap();
    let pagemill = Testbed::for_test();
    pagemill.account.join(TreePage::create(&path, 64 << 20).unwrap(), process::own_identity());
    use_whole_heap_api(pagemill);
    let status = without_allocations(|| {
        // SAFETY: `after_fork` follows on both sides, with nothing else before it.
        unsafe { pagemill.instance.before_fork() };
        // SAFETY: the child goes on with this thread only and ends without returning to the test.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: called after `before_fork`.
            unsafe { pagemill.instance.after_fork() };
            // SAFETY: the process is a new child, and this is its only thread.
            unsafe { pagemill.instance.begin_child() };
            use_whole_heap_api(pagemill);
            pagemill.account.leave();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: called after `before_fork`.
        unsafe { pagemill.instance.after_fork() };
        use_whole_heap_api(pagemill);
        let mut status = 0;
        // SAFETY: waits for a child of this test, and writes `status`.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        status
    });
    assert_eq!(status, 0);
}

/// A child process allocates in a forbidden section. The global allocator of this test program must abort the child.
#[test]
fn a_forbidden_allocation_aborts() {
    // SAFETY: the child allocates once and ends in either case.
    let status = without_allocations(|| unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::close(2);
            std::hint::black_box(vec![1u8; 100]);
            libc::_exit(0);
        }
        let mut status = 0;
        libc::waitpid(pid, &raw mut status, 0);
        status
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT, "status {status}");
}
