//! Tests of slab caches across `fork` and at process exit, for which unit tests are not suitable.
#![allow(unsafe_code)] // fork

use pagemill_core::Error;
use pagemill_core::arena::Layout;
use pagemill_core::listing;
use pagemill_core::listing::{Action, ControlCommand};
use pagemill_core::published;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_slab as slab;
use pagemill_slab::{
    Candidates, Done, Guard, Handle, HandleMap, InsertError, Migrate, Moving, OwnerSlab, Settings, SlabCache, Slabs,
    Target,
};
use pagemill_sys::process;
use pagemill_testbed::Testbed;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

/// Lock that each test that forks holds, because a child inherits the pinned epoch of a reader on another thread.
static FORK_LOCK: Mutex<()> = Mutex::new(());

/// Runs `act` in a fork child. Returns whether `act` completed without a panic.
fn in_child(pagemill: &Testbed, act: impl FnOnce()) -> bool {
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { pagemill.instance.before_fork() };
    // SAFETY: the child runs `act` and ends without returning to the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    // SAFETY: called after `before_fork`.
    unsafe { pagemill.instance.after_fork() };
    if pid == 0 {
        // SAFETY: the process is a new child, and this is its only thread.
        unsafe { pagemill.instance.begin_child() };
        let is_done = catch_unwind(AssertUnwindSafe(act)).is_ok();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!is_done)) };
    }
    let mut status = -1;
    // SAFETY: waits for a child of this test, and writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status == 0
}

/// A fork child must be able to read the objects that it inherited. Operations on slab caches of its parent must fail,
/// caches that the child creates must work, and nothing of the parent may change.
#[test]
fn a_fork_child_has_caches_of_its_own() {
    let _alone = FORK_LOCK.lock();
    let pagemill = Testbed::for_test();
    let values = pagemill.slabs.by_handle::<[u64; 8]>(Settings::new("values")).unwrap();
    let boxes = pagemill.slabs.fixed::<u64>(Settings::new("boxes")).unwrap();
    let handles: Vec<_> = (0..1000).map(|number| values.insert([number; 8]).unwrap()).collect();
    let slots: Vec<_> = (0..1000).map(|number| boxes.insert(number).unwrap()).collect();
    let is_done = in_child(pagemill, || {
        let guard = slab::enter();
        assert!(handles.iter().zip(0..).all(|(handle, number)| values.get(*handle, &guard) == Some(&[number; 8])));
        drop(guard);
        assert!(matches!(values.insert([0; 8]), Err(InsertError { error: Error::WrongState { .. }, .. })));
        assert!(matches!(values.remove(handles[0]), Err(Error::WrongState { .. })));
        assert!(matches!(values.shrink(), Err(Error::WrongState { .. })));
        assert!(matches!(boxes.shrink(), Err(Error::WrongState { .. })));
        assert!(pagemill.slabs.list().is_empty());
        let own = pagemill.slabs.by_handle::<u64>(Settings::new("own")).unwrap();
        let own_handles: Vec<_> = (0..10_000).map(|number| own.insert(number).unwrap()).collect();
        own_handles.iter().step_by(2).for_each(|handle| assert!(own.remove(*handle).unwrap().is_some()));
        own.shrink().unwrap();
        assert_eq!(own.info().unwrap().active, 5_000);
        assert!(slots.iter().zip(0..).all(|(slot, number)| **slot == number));
    });
    assert!(is_done, "see the child's message above");
    slots.iter().zip(0..).for_each(|(slot, number)| assert_eq!(**slot, number));
    drop(slots);
    handles.iter().for_each(|handle| assert!(values.remove(*handle).unwrap().is_some()));
    values.shrink().unwrap();
    boxes.shrink().unwrap();
    assert_eq!((values.info().unwrap().total.blocks, boxes.info().unwrap().total.blocks), (0, 0));
}

/// A thread of the parent reads an object during the fork. Reclamation in the child must not wait for that thread, but
/// must wait for a guard that the child's own thread has kept since before the fork.
#[test]
fn a_fork_child_waits_for_its_own_readers() {
    let _alone = FORK_LOCK.lock();
    let pagemill = Testbed::for_test();
    // A read in progress requires a cache.
    let values = pagemill.slabs.by_handle::<[u64; 8]>(Settings::new("values")).unwrap();
    let (is_reading, may_return) = (Barrier::new(2), Barrier::new(2));
    let use_own = |guard: Option<Guard>| {
        let own = pagemill.slabs.by_handle::<[u64; 8]>(Settings::new("own")).unwrap();
        let handles: Vec<_> = (0..1000).map(|number| own.insert([number; 8]).unwrap()).collect();
        let read = guard.as_ref().map(|guard| own.get(handles[7], guard).unwrap());
        handles.iter().for_each(|handle| assert!(own.remove(*handle).unwrap().is_some()));
        for number in 0..10_000 {
            assert!(own.remove(own.insert([number; 8]).unwrap()).unwrap().is_some());
            assert!(read.is_none_or(|read| *read == [7; 8]));
        }
        drop(guard);
        own.shrink().unwrap();
        assert_eq!(own.info().unwrap().active, 0);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let guard = slab::enter();
            values.insert([0; 8]).unwrap();
            is_reading.wait();
            may_return.wait();
            drop(guard);
        });
        is_reading.wait();
        let without = in_child(pagemill, || use_own(None));
        let guard = slab::enter();
        let with = in_child(pagemill, || use_own(Some(guard)));
        may_return.wait();
        assert!(without && with, "see the child's message above");
    });
}

/// A fork child must count free blocks of the parent neither as charged nor as giveable. When the child uses such a
/// block, the block must be charged to the child, and the child must be able to free the block afterwards.
#[test]
fn a_fork_child_is_charged_for_free_blocks_of_its_parent() {
    const VALUE_COUNT: u64 = 40_000;
    let _alone = FORK_LOCK.lock();
    let pagemill = Testbed::for_test();
    let cache = pagemill.slabs.fixed::<[u64; 24]>(Settings::new("of the parent")).unwrap();
    drop((0..VALUE_COUNT).map(|number| cache.insert([number; 24]).unwrap()).collect::<Vec<_>>());
    drop(cache);
    assert!(pagemill.slabs.giveable_bytes() >= 2 * BLOCK_BYTES as u64);
    let free = || (pagemill.slabs.giveable_bytes(), stats::get(Counter::SlabFree), pagemill.account.resident());
    let uses_some = || {
        let own = pagemill.slabs.fixed::<[u64; 24]>(Settings::new("own")).unwrap();
        let slots: Vec<_> = (0..VALUE_COUNT / 4).map(|number| own.insert([number; 24]).unwrap()).collect();
        let resident = own.info().unwrap().total.resident_bytes;
        assert!(
            resident >= VALUE_COUNT / 4 * 192 && pagemill.account.resident() == resident,
            "{resident} {:?}",
            free()
        );
        drop(slots);
        drop(own);
        assert_eq!(free(), (resident, resident, resident));
    };
    let is_done = in_child(pagemill, || {
        assert_eq!(free(), (0, 0, 0));
        uses_some();
        // A child of the child must not be charged for the child's free blocks either.
        assert!(in_child(pagemill, uses_some));
        pagemill.slabs.shrink(u64::MAX, Urgency::Limit);
        assert_eq!(free(), (0, 0, 0));
        uses_some();
    });
    assert!(is_done, "see the child's message above");
}

/// Flags by which an owner's callback and the test signal to each other.
#[derive(Default)]
struct Flags {
    is_in_callback: AtomicBool,
    may_return: AtomicBool,
}

/// An owner whose callback `isolate` waits until the test releases it. Meanwhile the callback holds the lock of a
/// NUMA node.
#[derive(Default)]
struct SlowOwner {
    flags: Arc<Flags>,
    fails_at_end: bool,
}

impl Drop for SlowOwner {
    fn drop(&mut self) {
        assert!(!self.fails_at_end, "an owner that fails to end, as it should here");
    }
}

// SAFETY: the objects are plain words, and none is ever moved.
unsafe impl Migrate for SlowOwner {
    type Object = [u64; 24];
    type Isolated = ();

    fn construct(&self) -> [u64; 24] {
        [0; 24]
    }

    fn isolate(&self, objects: &mut Candidates<'_, [u64; 24]>) {
        self.flags.is_in_callback.store(true, SeqCst);
        while !self.flags.may_return.load(SeqCst) {
            std::thread::yield_now();
        }
        objects.retain(|_| false);
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, [u64; 24]>,
        _: &mut Target<'_, [u64; 24]>,
        (): &mut (),
    ) -> Done<'object> {
        object.busy()
    }
}

/// Waits until `is_so` returns true, because of another thread.
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(600), "{what} does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Allocates `objects` objects and frees nine of ten.
fn remove_most<M: Migrate>(cache: &OwnerSlab<M>, objects: usize) {
    let objects: Vec<_> = (0..objects).map(|_| cache.allocate().unwrap()).collect();
    for (number, object) in objects.into_iter().enumerate().filter(|(number, _)| number % 10 != 0) {
        // SAFETY: the object was allocated above and is freed once.
        unsafe { cache.free(object) };
        assert!(number > 0);
    }
}

/// Returns settings with a used ratio of 0, so that the background thread moves no objects.
fn without_background(name: &str) -> Settings {
    Settings::new(name).defrag_used_ratio(0)
}

/// A slab cache is dropped while the background thread is in a callback of the cache's owner. The drop may wait at most
/// a second, so the background thread drops the owner later. The owner's destructor panics. The process and the
/// background thread must continue.
#[test]
fn panic_of_an_owners_destructor_does_not_end_the_process() {
    let _alone = FORK_LOCK.lock();
    let pagemill = Testbed::new(Layout::for_test(), UNLIMITED).unwrap();
    let flags = Arc::new(Flags::default());
    let slow = SlowOwner { flags: flags.clone(), fails_at_end: true };
    let cache = pagemill.slabs.by_owner(without_background("slow"), slow).unwrap();
    remove_most(&cache, 20_000);
    cache.set_defrag_used_ratio(30).unwrap();
    wait_until("isolate", || flags.is_in_callback.load(SeqCst));
    drop(cache);
    assert_eq!(Arc::strong_count(&flags), 2, "the owner is in use");
    flags.may_return.store(true, SeqCst);
    wait_until("the owner's end", || Arc::strong_count(&flags) == 1);
    wait_for_memory(&fragmented_cache(pagemill.slabs));
}

/// A process forks while another thread is inside the callback `isolate` of a slab cache. In the child, calls on that
/// cache must fail without waiting for a lock that is never released.
#[test]
fn a_fork_child_waits_for_no_callback_of_its_parent() {
    let _alone = FORK_LOCK.lock();
    let pagemill = Testbed::for_test();
    let flags = Arc::new(Flags::default());
    let slow = SlowOwner { flags: flags.clone(), fails_at_end: false };
    let cache = pagemill.slabs.by_owner(Settings::new("slow"), slow).unwrap();
    remove_most(&cache, 20_000);
    let is_done = std::thread::scope(|scope| {
        scope.spawn(|| cache.shrink().unwrap());
        wait_until("isolate", || flags.is_in_callback.load(SeqCst));
        let is_done = in_child(pagemill, || {
            // SAFETY: the timer ends the child if it hangs.
            unsafe { libc::alarm(600) };
            assert!(matches!(cache.set_defrag_used_ratio(50), Err(Error::WrongState { .. })));
            assert!(matches!(cache.shrink(), Err(Error::WrongState { .. })));
            assert!(matches!(cache.defrag_step(Duration::ZERO), Err(Error::WrongState { .. })));
            assert!(matches!(cache.move_objects(0, 0, 1), Err(Error::WrongState { .. })));
        });
        flags.may_return.store(true, SeqCst);
        is_done
    });
    assert!(is_done, "see the child's message above");
}

/// An owner whose callback waits for a lock of the program.
struct WaitingOwner {
    lock: Arc<Mutex<()>>,
    is_in_callback: Arc<AtomicBool>,
}

// SAFETY: the objects are plain words, and none is ever moved.
unsafe impl Migrate for WaitingOwner {
    type Object = [u64; 24];
    type Isolated = ();

    fn construct(&self) -> [u64; 24] {
        [0; 24]
    }

    fn isolate(&self, _: &mut Candidates<'_, [u64; 24]>) {}

    fn migrate<'object>(
        &self,
        object: Moving<'object, [u64; 24]>,
        _: &mut Target<'_, [u64; 24]>,
        (): &mut (),
    ) -> Done<'object> {
        self.is_in_callback.store(true, SeqCst);
        drop(self.lock.lock().unwrap());
        object.busy()
    }
}

/// A process forks while the background thread is in a callback that waits for the forking thread. The fork may wait
/// only briefly. The child must be able to use slab caches with a background thread of its own, and the parent's
/// background thread must continue afterwards.
#[test]
fn fork_does_not_deadlock_with_a_callback() {
    let _alone = FORK_LOCK.lock();
    let pagemill = Testbed::new(Layout::for_test(), UNLIMITED).unwrap();
    let (lock, is_in_callback) = (Arc::default(), Arc::default());
    let owner = WaitingOwner { lock: Arc::clone(&lock), is_in_callback: Arc::clone(&is_in_callback) };
    let cache = pagemill.slabs.by_owner(without_background("waiting"), owner).unwrap();
    remove_most(&cache, 20_000);
    let held = lock.lock().unwrap();
    cache.set_defrag_used_ratio(30).unwrap();
    wait_until("a callback", || is_in_callback.load(SeqCst));
    let waits = (0..5).map(|_| {
        let began = Instant::now();
        // SAFETY: `after_fork` follows on both sides, with nothing else before it.
        unsafe { pagemill.instance.before_fork() };
        // SAFETY: called after `before_fork`.
        unsafe { pagemill.instance.after_fork() };
        began.elapsed()
    });
    assert!(waits.min().unwrap() < Duration::from_millis(500), "a fork waits for long");
    let is_done = in_child(pagemill, || {
        // SAFETY: the timer ends the child if it hangs.
        unsafe { libc::alarm(600) };
        assert!(matches!(cache.shrink(), Err(Error::WrongState { .. })));
        let own = pagemill.slabs.by_owner(Settings::new("own"), SlowOwner::default()).unwrap();
        own.owner().flags.may_return.store(true, SeqCst);
        remove_most(&own, 20_000);
        wait_until("a thread of its own", || own.owner().flags.is_in_callback.load(SeqCst));
        wait_for_memory(&fragmented_cache(pagemill.slabs));
    });
    assert!(is_done, "see the child's message above");
    assert!(cache.info().unwrap().busy == 0, "it waits still");
    drop(held);
    wait_for_memory(&fragmented_cache(pagemill.slabs));
    assert!(cache.info().unwrap().busy > 0);
}

/// Number of calls of the callback `SleepingOwner::isolate`.
static ISOLATE_CALLS: AtomicU32 = AtomicU32::new(0);

/// An owner whose callback `isolate` keeps the background thread busy for some time.
struct SleepingOwner;

// SAFETY: the objects are plain words, and none is ever moved.
unsafe impl Migrate for SleepingOwner {
    type Object = [u64; 24];
    type Isolated = ();

    fn construct(&self) -> [u64; 24] {
        [0; 24]
    }

    fn isolate(&self, objects: &mut Candidates<'_, [u64; 24]>) {
        ISOLATE_CALLS.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_millis(2));
        objects.retain(|_| false);
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, [u64; 24]>,
        _: &mut Target<'_, [u64; 24]>,
        (): &mut (),
    ) -> Done<'object> {
        object.busy()
    }
}

/// An exit handler of the program. Such a handler may destroy data that callbacks use. It ends the process with status
/// 7 if a callback runs while the handler runs.
extern "C" fn fail_if_callbacks_run() {
    let before = ISOLATE_CALLS.load(SeqCst);
    std::thread::sleep(Duration::from_millis(300));
    if ISOLATE_CALLS.load(SeqCst) != before {
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(7) };
    }
}

/// A program registers an exit handler after all other handlers, so that it runs first. Once it is called, no callback
/// may run in the background.
#[test]
fn no_callback_runs_during_exit_handlers() {
    let _alone = FORK_LOCK.lock();
    // SAFETY: the child, whose first thread this is, ends without returning to the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let is_ready = catch_unwind(|| {
            let slabs = Testbed::of_process().unwrap().slabs;
            let cache = std::mem::ManuallyDrop::new(slabs.by_owner(Settings::new("lasting"), SleepingOwner).unwrap());
            // SAFETY: the function is never unloaded.
            assert_eq!(unsafe { libc::atexit(fail_if_callbacks_run) }, 0);
            remove_most(&cache, 100_000);
            wait_until("a callback", || ISOLATE_CALLS.load(SeqCst) > 0);
        });
        // SAFETY: no other thread exists here.
        unsafe { libc::exit(i32::from(is_ready.is_err())) };
    }
    let mut status = -1;
    // SAFETY: waits for a child of this test, and writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "7 << 8: a callback ran; see the child's message above");
}

/// The fork handler of a second Pagemill instance runs on another thread of this process. The handler must not end
/// guards that threads of this process hold.
#[test]
fn second_pagemill_keeps_the_guards_of_the_process() {
    let _alone = FORK_LOCK.lock();
    let (other, pagemill) = (Testbed::for_test(), Testbed::for_test());
    let cache = pagemill.slabs.by_handle::<Arc<u64>>(Settings::new("values")).unwrap();
    let value = Arc::new(7);
    let handle = cache.insert(value.clone()).unwrap();
    let guard = slab::enter();
    let read = cache.get(handle, &guard).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the process is a new child, and this is its only thread.
            unsafe { other.instance.begin_child() };
            cache.remove(handle).unwrap();
            cache.shrink().unwrap();
        });
    });
    assert_eq!((Arc::strong_count(&value), **read), (2, 7), "dropped under a guard");
}

/// Environment variable that makes this process the child process of one of the tests below. Its value says which.
const CHILD_TEST_ENV: &str = "PAGEMILL_TEST_ORDERS";

/// Another process requests a shrink of a slab cache. The shrink drops a removed value that has an open file. The file
/// must be closed, which shows that the destructor ran on a thread that shares the program's files.
#[test]
fn shrink_command_closes_files_of_removed_values() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_program_with_files", "--ignored", "--nocapture"]);
    command.env(CHILD_TEST_ENV, "1").env("XDG_RUNTIME_DIR", folder.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "a program for another test"]
fn a_program_with_files() {
    if std::env::var_os(CHILD_TEST_ENV).is_none() {
        return;
    }
    let pagemill = Testbed::of_process().unwrap();
    let settings = Settings::new("files").defrag_used_ratio(0);
    let cache = pagemill.slabs.by_handle::<Box<File>>(settings).unwrap();
    let file = File::open("/proc/self/exe").unwrap();
    let number = file.as_raw_fd();
    let handle = cache.insert(Box::new(file)).unwrap();
    cache.remove(handle).unwrap();
    let (own_file, own) = (published::own_file().unwrap(), process::own_identity());
    let list = pagemill_slab::ask_for_slabs(&[(&own_file, own)], || false).remove(0).unwrap();
    let id = list.iter().find(|(_, info)| &*info.name == "files").unwrap().0;
    let shrunk =
        listing::command(&own_file, own, ControlCommand::Slab { action: Action::Shrink, cache: id }, || false).unwrap();
    assert_eq!(shrunk.errno, 0);
    // Another thread that is reading delays the drop, and each request waits only a second for it. So the request is
    // repeated.
    let began = Instant::now();
    // SAFETY: the call only queries a number.
    while unsafe { libc::fcntl(number, libc::F_GETFD) } != -1 {
        assert!(began.elapsed() < Duration::from_secs(600), "{number} is open still");
        listing::command(&own_file, own, ControlCommand::Slab { action: Action::Shrink, cache: id }, || false).unwrap();
    }
}

/// Makes 32 threads use a slab cache by handle, so that each thread has a thread slot. Then drops the cache. Returns
/// the size of its handle table in bytes, and a function that ends the threads.
fn threads_with_slots(slabs: &'static Slabs) -> (u64, impl FnOnce() + use<>) {
    const THREAD_COUNT: usize = 32;
    let cache = Arc::new(slabs.by_handle::<u64>(Settings::new("values")).unwrap());
    let (are_in, may_end) = (Arc::new(Barrier::new(THREAD_COUNT + 1)), Arc::new(Barrier::new(THREAD_COUNT + 1)));
    // The threads run one at a time, because a thread does not open its magazine while another thread opens one.
    let one_at_a_time = Arc::new(Mutex::new(()));
    let use_cache = |cache: Arc<HandleMap<u64>>, one_at_a_time: &Mutex<()>| {
        let _turn = one_at_a_time.lock().unwrap();
        assert!(cache.remove(cache.insert(1).unwrap()).unwrap().is_some());
    };
    let threads: Vec<_> = (0..THREAD_COUNT)
        .map(|_| {
            let (cache, one_at_a_time, are_in, may_end) =
                (cache.clone(), one_at_a_time.clone(), are_in.clone(), may_end.clone());
            std::thread::spawn(move || {
                use_cache(cache, &one_at_a_time);
                are_in.wait();
                may_end.wait();
            })
        })
        .collect();
    use_cache(cache.clone(), &one_at_a_time);
    are_in.wait();
    let end = move || {
        may_end.wait();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    };
    (cache.handle_bytes(), end)
}

/// The threads of the parent do not exist in a fork child. Threads of the child must reuse the thread slots and stocks
/// of these threads. The test runs in a process of its own, without threads of other tests.
#[test]
fn fork_child_reuses_slots_of_its_parents_threads() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_program_with_threads", "--ignored", "--nocapture"]).env(CHILD_TEST_ENV, "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "a program for another test"]
fn a_program_with_threads() {
    if std::env::var_os(CHILD_TEST_ENV).is_none() {
        return;
    }
    let pagemill = Testbed::for_test();
    let (bytes, end) = threads_with_slots(pagemill.slabs);
    let is_done = in_child(pagemill, || {
        let (own_bytes, end) = threads_with_slots(pagemill.slabs);
        assert_eq!(own_bytes, bytes);
        end();
    });
    end();
    assert!(is_done, "see the child's message above");
}

const VALUE_COUNT: u64 = 60_000;

/// Creates a slab cache and removes nine tenths of its values. Returns the cache and the handles of the remaining
/// values.
fn fragmented_cache(slabs: &'static Slabs) -> (HandleMap<[u64; 24]>, Vec<Handle<[u64; 24]>>) {
    let cache = slabs.by_handle::<[u64; 24]>(Settings::new("fragmented")).unwrap();
    let mut handles: Vec<_> = (0..VALUE_COUNT).map(|number| cache.insert([number; 24]).unwrap()).collect();
    for (handle, number) in handles.iter().zip(0..) {
        assert!(number % 10 == 0 || cache.remove(*handle).unwrap().is_some());
    }
    handles.retain(|handle| cache.get(*handle, &slab::enter()).is_some());
    (cache, handles)
}

/// Waits until the background thread has freed three of the cache's six blocks. Of the remaining blocks, two are used
/// above the ratio and one is idle.
fn wait_for_memory((cache, handles): &(HandleMap<[u64; 24]>, Vec<Handle<[u64; 24]>>)) {
    let (began, most) = (Instant::now(), 3 * BLOCK_BYTES as u64);
    while cache.info().unwrap().total.resident_bytes > most {
        assert!(began.elapsed() < Duration::from_secs(600), "{:?}", cache.info());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(cache.info().unwrap().moved > 0);
    for (handle, number) in handles.iter().zip((0..VALUE_COUNT).step_by(10)) {
        assert_eq!(cache.get(*handle, &slab::enter()), Some(&[number; 24]));
    }
}

/// A process with a background thread forks at any time. The child must have no background thread until it creates a
/// slab cache. The background threads must free the memory of both processes.
#[test]
fn fork_child_has_its_own_background_thread() {
    let _alone = FORK_LOCK.lock();
    let pagemill = Testbed::new(Layout::for_test(), UNLIMITED).unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    for _ in 0..3 {
        let own = fragmented_cache(pagemill.slabs);
        let is_done = in_child(pagemill, || {
            assert_eq!(threads(), 1);
            wait_for_memory(&fragmented_cache(pagemill.slabs));
            assert_eq!(threads(), 2);
        });
        assert!(is_done, "see the child's message above");
        wait_for_memory(&own);
    }
}

/// Reads a freed object of an owner while the object's slab exists, which is valid. Then frees the slab and reads the
/// object's memory again, which is not valid.
fn read_after_slab_is_freed(slabs: &'static Slabs) {
    let slow = SlowOwner { flags: Arc::default(), fails_at_end: false };
    let cache = slabs.by_owner(Settings::new("owner"), slow).unwrap();
    let object = cache.allocate().unwrap();
    let at: *const u64 = object.as_ptr().cast();
    // SAFETY: the object was allocated above and is freed once.
    unsafe { cache.free(object) };
    // SAFETY: freed objects of an owner can be read while their slab exists.
    println!("read {}", unsafe { at.read_volatile() });
    cache.shrink().unwrap();
    // SAFETY: none. The test checks that this read is detected. The memory may exist.
    println!("survived {}", unsafe { at.read_volatile() });
}

/// Reads a value after it was freed. `case` says whether the value is fixed or by handle, and whether its memory is in
/// a magazine or in a slab.
fn read_after_free(case: &str) {
    let slabs = Testbed::for_test().slabs;
    if case == "owner" {
        return read_after_slab_is_freed(slabs);
    }
    let boxes = slabs.fixed::<[u64; 8]>(Settings::new("boxes")).unwrap();
    let values = slabs.by_handle::<[u64; 8]>(Settings::new("values")).unwrap();
    let (slot, handle) = (boxes.insert([1; 8]).unwrap(), values.insert([1; 8]).unwrap());
    let at: *const u64 = match case {
        "value" => &raw const values.get(handle, &slab::enter()).unwrap()[7],
        _ => &raw const slot[7],
    };
    // SAFETY: the value exists.
    println!("read {}", unsafe { at.read_volatile() });
    drop(slot);
    values.remove(handle).unwrap();
    if case != "magazine" {
        values.shrink().unwrap();
        boxes.shrink().unwrap();
    }
    // SAFETY: none. The test checks that this read is detected. The memory may exist.
    println!("survived {}", unsafe { at.read_volatile() });
}

/// A child process reads freed memory of a slab cache. AddressSanitizer must report the read.
#[test]
fn asan_reports_uses_of_free_objects() {
    const CASE_ENV: &str = "PAGEMILL_USE_AFTER_FREE";
    if let Ok(case) = std::env::var(CASE_ENV) {
        return read_after_free(&case);
    }
    if !cfg!(asan) {
        println!("skipped: built without `--cfg asan`");
        return;
    }
    for case in ["magazine", "slab", "value", "owner"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "asan_reports_uses_of_free_objects", "--nocapture"]).env(CASE_ENV, case);
        let output = child.output().unwrap();
        let (said, report) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(report.contains("AddressSanitizer: use-after-poison"), "{case}: {said}{report}");
        assert!(!output.status.success() && !said.contains("survived"), "{case}: {said}");
        assert!(
            said.contains(if case == "owner" { "read 0" } else { "read 1" }),
            "{case}: what is there can be read: {said}"
        );
    }
}
