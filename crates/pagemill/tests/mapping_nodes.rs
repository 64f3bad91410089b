//! Tests of the index of a page cache. The index must return the memory of its nodes when files become sparse, even
//! during reads and writes.
#![allow(unsafe_code)] // fork

use pagemill_cache::mapping::{Mapping, PageCache};
use pagemill_core::units::PageSize;
use pagemill_slab::{NodeInfo, SlabInfo};
use pagemill_testbed::Testbed;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PAGE_BYTES: usize = PageSize::MIN_BYTES;

/// Number of pages that an index node of the lowest level covers.
const NODE_PAGES: u64 = 64;

/// Number of bytes that a test writes to a page.
const SAMPLE_BYTES: usize = 16;

/// Lets one test at a time run: memory is freed only when the readers of all tests have finished, one test forks, and
/// the counters belong to the process.
fn exclusive_test() -> MutexGuard<'static, ()> {
    static RUNNING_TEST: Mutex<()> = Mutex::new(());
    RUNNING_TEST.lock().unwrap_or_else(PoisonError::into_inner)
}

fn cache(pagemill: &Testbed) -> PageCache {
    pagemill.caches.collapse_by_hand();
    let page = PageSize::new(PAGE_BYTES).unwrap();
    PageCache::builder("sparse").limit(64 << 20).page(page).huge(false).build_in(pagemill.caches).unwrap()
}

/// Returns the bytes that a test writes to the page in node `at`.
fn sample(at: u64) -> [u8; SAMPLE_BYTES] {
    std::array::from_fn(|byte| (at * 31 + byte as u64 + 1) as u8)
}

fn offset(at: u64) -> u64 {
    at * NODE_PAGES * PAGE_BYTES as u64
}

fn write(file: &Mapping, at: u64) {
    assert_eq!(file.write_at(&sample(at), offset(at)).unwrap(), SAMPLE_BYTES);
}

fn punch(file: &Mapping, at: u64) {
    assert_eq!(file.punch_hole(offset(at), PAGE_BYTES as u64).unwrap(), PAGE_BYTES as u64);
}

/// Asserts that the page in node `at` has the bytes of [`sample`] if `is_there`, and reads as zeros otherwise.
fn assert_has(file: &Mapping, at: u64, is_there: bool) {
    let mut bytes = [0xEE; SAMPLE_BYTES];
    assert_eq!(file.read_at(&mut bytes, offset(at)).unwrap(), SAMPLE_BYTES, "{at}");
    assert_eq!(bytes, if is_there { sample(at) } else { [0; SAMPLE_BYTES] }, "{at}");
}

/// Creates a file with one page in each of `pages` index nodes, then removes five of six pages.
fn sparse_file(cache: &PageCache, pages: u64) -> Mapping {
    let file = cache.create().unwrap();
    (0..pages).for_each(|at| write(&file, at));
    let gone = (0..pages).filter(|at| at % 6 != 0);
    gone.for_each(|at| punch(&file, at));
    file
}

fn info(pagemill: &Testbed) -> SlabInfo {
    pagemill.nodes.cache().unwrap().info().unwrap()
}

/// Shrinks the slab cache of index nodes until at most one slab is partial. Readers of other tests may delay that.
fn shrink(pagemill: &Testbed) -> NodeInfo {
    let is_packed = |info: &NodeInfo| info.partial <= 1;
    for _ in 0..20 {
        pagemill.nodes.cache().unwrap().shrink().unwrap();
        if is_packed(&info(pagemill).total) {
            break;
        }
    }
    info(pagemill).total
}

/// Five of six index nodes of a file become empty. After a shrink, five of six slabs must be free, all bytes must be
/// right, and the counters of the index must add up.
#[test]
fn the_index_of_a_sparse_file_is_packed() {
    const PAGES: u64 = 6000;
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let cache = cache(pagemill);
    let file = sparse_file(&cache, PAGES);
    let before = info(pagemill);
    assert!(before.kind == pagemill_slab::SlabKind::ByOwner && before.has_constructor);
    assert_eq!(pagemill.slabs.list().iter().filter(|info| &*info.name == "xarray_node").count(), 1);
    let after = shrink(pagemill);
    assert!(after.slabs * 5 < before.total.slabs && after.partial <= 1, "{before:?} {after:?}");
    (0..PAGES).for_each(|at| assert_has(&file, at, at % 6 == 0));
    let indices: u64 = pagemill.caches.usage().iter().map(|usage| usage.index).sum();
    pagemill.measure();
    let spare = after.resident_bytes - after.used * before.stride_bytes as u64;
    assert_eq!(pagemill_core::stats::get(pagemill_core::stats::Counter::CacheIndex), indices + spare);
    assert!(cache.usage().index > after.used * before.stride_bytes as u64, "nodes are this cache's, and its file is");
    (0..PAGES).for_each(|at| write(&file, at));
    (0..PAGES).for_each(|at| assert_has(&file, at, true));
    drop(file);
    assert_eq!(shrink(pagemill), NodeInfo::default());
}

/// Makes the other threads end when the value is dropped, even if this thread has failed.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Threads read, write and punch holes, and create and drop files. Meanwhile another thread continuously defragments
/// the index. Pages that no thread removes must have their bytes at any time.
#[test]
fn threads_use_files_while_their_index_is_packed() {
    const PAGES: u64 = 300;
    const ROUND_COUNT: usize = 12;
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let (cache, is_done) = (cache(pagemill), AtomicBool::new(false));
    let file = sparse_file(&cache, PAGES);
    std::thread::scope(|scope| {
        let (cache, file, is_done) = (&cache, &file, &is_done);
        scope.spawn(move || {
            let nodes = pagemill.nodes.cache().unwrap();
            nodes.set_defrag_used_ratio(100).unwrap();
            let _done = StopOnDrop(is_done);
            while !is_done.load(Relaxed) {
                nodes.shrink().unwrap();
                pagemill.slabs.defrag_step(Duration::from_millis(1));
            }
        });
        let users: Vec<_> = (0..2)
            .map(|user| {
                scope.spawn(move || {
                    // Runs at least `ROUND_COUNT` rounds, and more until a node was moved.
                    let nothing_moved = || info(pagemill).moved == 0 && !is_done.load(Relaxed);
                    for round in (0..).take_while(|round| *round < ROUND_COUNT || nothing_moved()) {
                        let own = sparse_file(cache, PAGES / 4);
                        for at in 0..PAGES {
                            match (at % 6, (at + round as u64) % 2) {
                                (0, _) => assert_has(file, at, true),
                                (part, 0) if part % 2 == user => write(file, at),
                                (part, _) if part % 2 == user => {
                                    assert!(file.punch_hole(offset(at), PAGE_BYTES as u64).is_ok())
                                }
                                _ => {}
                            }
                        }
                        (0..PAGES / 4).for_each(|at| assert_has(&own, at, at % 6 == 0));
                    }
                })
            })
            .collect();
        let users: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        is_done.store(true, Relaxed);
        users.into_iter().for_each(|user| user.unwrap());
    });
    (0..PAGES).step_by(6).for_each(|at| assert_has(&file, at, true));
}

/// A fork child creates files with an index of its own, drops its parent's files without effect, and defragments its
/// own index. The child must not wait for a thread of its parent that was reading at the time of the fork.
#[test]
fn a_fork_child_has_nodes_of_its_own() {
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let file = sparse_file(&cache(pagemill), 1200);
    let before = info(pagemill).total;
    let (is_reading, is_done) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let reader = std::thread::spawn({
        let (is_reading, is_done) = (is_reading.clone(), is_done.clone());
        move || {
            let _guard = pagemill_xarray::pin();
            is_reading.wait();
            is_done.wait();
        }
    });
    is_reading.wait();
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { pagemill.instance.before_fork() };
    // SAFETY: the child ends without returning to the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    // SAFETY: called after `before_fork`.
    unsafe { pagemill.instance.after_fork() };
    if pid == 0 {
        // SAFETY: the process is a new child, and this is its only thread.
        unsafe { pagemill.instance.begin_child() };
        let act = || {
            let own = sparse_file(&cache(pagemill), 1200);
            drop(file);
            let after = shrink(pagemill);
            (0..1200).for_each(|at| assert_has(&own, at, at % 6 == 0));
            assert!(after.used >= 200 && after.used < 300 && after.partial <= 1, "{after:?}");
        };
        let is_done = catch_unwind(AssertUnwindSafe(act)).is_ok();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!is_done)) };
    }
    let mut status = -1;
    // SAFETY: waits for a child of this test, and writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    is_done.wait();
    reader.join().unwrap();
    assert_eq!(status, 0, "see the child's message above");
    assert_eq!(info(pagemill).total, before);
    (0..1200).for_each(|at| assert_has(&file, at, at % 6 == 0));
    assert!(shrink(pagemill).slabs < before.slabs);
}
