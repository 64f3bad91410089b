//! Tests of views beside signal handlers of the program, and of accesses to views inside of handlers
//! (docs/mapping.md, "Views and signals").
//!
//! A test runs each of its scenes in a child process, because handlers belong to a process, and some scenes end it.
#![allow(unsafe_code)] // installs handlers, raises signals, accesses memory wrongly on purpose

#[path = "common/stores.rs"]
mod stores;

use pagemill::cache::handle_fault;
use pagemill_cache::mapping::policy::Never;
use pagemill_cache::mapping::{Mapping, PageCache, Source, View, ViewMut};
use pagemill_core::units::{PageSize, os_page_bytes};
use pagemill_store::{Faults, FaultyStore, MemoryStore};
use pagemill_testbed::Testbed;
use std::backtrace::Backtrace;
use std::ffi::c_void;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use stores::HookedStore;

const MIB: usize = 1 << 20;
const PAGE_BYTES: usize = 4 << 10;

/// Distance of pages of which none is mapped together with another.
const FAR_BYTES: usize = 64 << 10;

/// Name of the scene that a child process plays.
const SCENE_ENV: &str = "VIEW_SIGNALS_SCENE";

/// Exit status of a child whose handler got the fault that it expected.
const EXPECTED_FAULT: i32 = 7;

/// Returns the scene that this process plays; `None` in the parent.
fn scene() -> Option<String> {
    std::env::var(SCENE_ENV).ok()
}

/// Plays a scene of a test in a child process.
fn play(test: &str, scene: &str) -> Output {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env(SCENE_ENV, scene).output().unwrap()
}

fn text(output: &Output) -> String {
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    format!("{}\n{stdout}\n{stderr}", output.status)
}

#[track_caller]
fn assert_passed(output: &Output) {
    assert!(output.status.success(), "{}", text(output));
}

#[track_caller]
fn assert_killed(output: &Output, signal: i32) {
    assert_eq!(output.status.signal(), Some(signal), "{}", text(output));
}

fn byte_at(at: usize) -> u8 {
    (at / PAGE_BYTES * 31 + at) as u8
}

/// A file of 1 MiB in a store, none of it in memory, with a view of it and of as many bytes behind its end.
struct Scene {
    store: FaultyStore<MemoryStore>,
    file: Mapping,
    view: ViewMut,
}

impl Scene {
    fn new() -> Self {
        let page = PageSize::new(PAGE_BYTES).unwrap();
        let builder = PageCache::builder("signals").limit(16 << 20).page(page).policy(Never).source(Source::Shared);
        let cache = builder.build_in(Testbed::for_test().caches).unwrap();
        let store = FaultyStore::new(MemoryStore::new((0..MIB).map(byte_at).collect(), 512));
        let file = cache.open(Arc::new(store.clone())).unwrap();
        let view = file.view_mut(0..2 * MIB as u64).unwrap();
        Self { store, file, view }
    }

    /// Reads the page at an offset into memory, without mapping it.
    fn bring_in(&self, at: usize) {
        self.file.read_at(&mut [0], at as u64).unwrap();
    }

    /// Reads a byte of the view.
    fn read(&self, at: usize) -> u8 {
        read_byte(&self.view, at)
    }

    fn addr(&self, at: usize) -> usize {
        self.view.as_ptr() as usize + at
    }
}

fn read_byte(view: &View, at: usize) -> u8 {
    let mut byte = [0];
    view.read_at(&mut byte, at);
    byte[0]
}

type Handler = extern "C" fn(i32, *const libc::siginfo_t, *mut c_void);

/// Installs a handler. Returns the action before.
fn install(signal: i32, handler: Handler, flags: i32) -> libc::sigaction {
    // SAFETY: plain data. The handlers of this file touch atomics, and memory that the scene has prepared.
    unsafe {
        let (mut action, mut before): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | flags;
        assert_eq!(libc::sigaction(signal, &raw const action, &raw mut before), 0);
        before
    }
}

fn block(signal: i32) {
    // SAFETY: plain data.
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut signals, signal);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut()), 0);
    }
}

/// Reserves a page that cannot be accessed. It belongs to no view.
fn closed_page() -> usize {
    map_page(0, libc::PROT_NONE)
}

/// Maps memory at the page of an address, so that an access there can continue; anywhere if the address is 0.
fn map_page(addr: usize, protection: i32) -> usize {
    let page = addr & !(os_page_bytes() - 1);
    let fixed = if addr == 0 { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    // SAFETY: the page is a reservation of this test, or lies in a view and has no folio there.
    let mapped = unsafe { libc::mmap(page as *mut c_void, os_page_bytes(), protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        std::process::abort();
    }
    mapped as usize
}

fn load(addr: usize) -> u8 {
    // SAFETY: a handler makes the address accessible, or the scene ends.
    unsafe { (addr as *const u8).read_volatile() }
}

/// Address at which a fault or an access of a handler is expected.
static TARGET: AtomicUsize = AtomicUsize::new(0);

/// Byte that a handler has read, or number of signals that it got.
static FOUND: AtomicUsize = AtomicUsize::new(0);

/// Address and code of the latest signal of a fault.
static FAULT: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

/// Takes address and code of the latest fault that a handler has recorded.
fn take_fault() -> (usize, i32) {
    (FAULT[0].swap(0, SeqCst), FAULT[1].swap(0, SeqCst) as i32)
}

/// Records a fault, and lets the access continue.
extern "C" fn record_fault(_signal: i32, info: *const libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes the information of a fault.
    let (addr, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    FAULT[0].store(addr, SeqCst);
    FAULT[1].store(code as usize, SeqCst);
    map_page(addr, libc::PROT_READ | libc::PROT_WRITE);
}

/// A handler of the program that was installed after Pagemill's, and asks it first.
extern "C" fn ask_pagemill(signal: i32, info: *const libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the arguments of this handler.
    if unsafe { handle_fault(signal, info.cast(), context) } {
        FOUND.fetch_add(1, SeqCst);
        return;
    }
    record_fault(signal, info, context);
}

/// A handler of the program that asks no other one.
extern "C" fn exit_if_expected(_signal: i32, info: *const libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes the information of a fault.
    let is_expected = unsafe { (*info).si_addr() } as usize == TARGET.load(SeqCst);
    // SAFETY: ends the process.
    unsafe { libc::_exit(if is_expected { EXPECTED_FAULT } else { 1 }) };
}

/// A program installs a handler for `SIGSEGV` after its first view. If the handler asks Pagemill first, views must work
/// as before, and only faults of the program must remain. If it does not, it must get the faults of pages that are not
/// mapped, and pages that are mapped must stay readable.
#[test]
fn a_later_handler_asks_pagemill_first() {
    match scene().as_deref() {
        None => {
            assert_passed(&play("a_later_handler_asks_pagemill_first", "asks"));
            let output = play("a_later_handler_asks_pagemill_first", "does not ask");
            assert_eq!(output.status.code(), Some(EXPECTED_FAULT), "{}", text(&output));
        }
        Some("asks") => {
            let scene = Scene::new();
            scene.bring_in(FAR_BYTES);
            install(libc::SIGSEGV, ask_pagemill, libc::SA_ONSTACK);
            install(libc::SIGBUS, record_fault, libc::SA_ONSTACK);
            assert!((0..MIB).step_by(100).all(|at| scene.read(at) == byte_at(at)));
            scene.view.write_at(&[9], FAR_BYTES);
            assert_eq!((scene.read(FAR_BYTES), take_fault()), (9, (0, 0)));
            assert!(FOUND.load(SeqCst) >= MIB / FAR_BYTES, "the handler got the faults of the view");
            let page = closed_page();
            assert_eq!((load(page + 5), take_fault().0), (0, page + 5));
            assert_eq!((scene.read(MIB + 5), take_fault().0), (0, scene.addr(MIB + 5)));
        }
        Some(_) => {
            let scene = Scene::new();
            assert_eq!(scene.read(3), byte_at(3));
            install(libc::SIGSEGV, exit_if_expected, libc::SA_ONSTACK);
            assert_eq!(scene.read(3), byte_at(3));
            TARGET.store(scene.addr(FAR_BYTES + 3), SeqCst);
            scene.read(FAR_BYTES + 3);
        }
    }
}

/// Reads a byte at [`TARGET`] and adds one to it.
extern "C" fn increment_target(_signal: i32, _info: *const libc::siginfo_t, _context: *mut c_void) {
    let target = TARGET.load(SeqCst) as *mut u8;
    // SAFETY: the target lies in a view that can be written.
    unsafe {
        FOUND.store(target.read_volatile().into(), SeqCst);
        target.write_volatile(target.read_volatile() + 1);
    }
}

/// A signal handler, which interrupts code outside of Pagemill, must be able to read and write pages of a view that are
/// in memory, and pages that are not.
#[test]
fn signal_handlers_access_views() {
    if scene().is_none() {
        return assert_passed(&play("signal_handlers_access_views", "access"));
    }
    let scene = Scene::new();
    install(libc::SIGUSR1, increment_target, 0);
    scene.bring_in(FAR_BYTES + 1);
    for at in [1, FAR_BYTES + 1, 2 * FAR_BYTES + 1] {
        TARGET.store(scene.addr(at), SeqCst);
        // SAFETY: the handler is installed.
        unsafe { libc::raise(libc::SIGUSR1) };
        assert_eq!(FOUND.load(SeqCst) as u8, byte_at(at));
        let mut byte = [0];
        scene.file.read_at(&mut byte, at as u64).unwrap();
        assert_eq!(byte, [byte_at(at) + 1]);
    }
}

/// Reads the byte at [`TARGET`], and counts.
extern "C" fn check_target(_signal: i32, _info: *const libc::siginfo_t, _context: *mut c_void) {
    if load(TARGET.load(SeqCst)) != byte_at(1) {
        std::process::abort();
    }
    FOUND.fetch_add(1, SeqCst);
}

/// A signal handler interrupts a thread in calls of Pagemill, and reads a page that is prefaulted. It must neither
/// fault nor wait for a lock of the interrupted thread.
#[test]
fn signal_handlers_read_prefaulted_pages_at_any_time() {
    if scene().is_none() {
        return assert_passed(&play("signal_handlers_read_prefaulted_pages_at_any_time", "read"));
    }
    let scene = Scene::new();
    let prefaulted = scene.view.prefault(0..PAGE_BYTES).unwrap();
    TARGET.store(scene.addr(1), SeqCst);
    install(libc::SIGUSR1, check_target, libc::SA_RESTART);
    // SAFETY: the thread of this test waits for the other one.
    let (this, is_over) = (unsafe { libc::pthread_self() }, AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            for sent in 1..=500 {
                // SAFETY: the target thread exists until this scope ends.
                unsafe { libc::pthread_kill(this, libc::SIGUSR1) };
                while FOUND.load(SeqCst) < sent {
                    thread::yield_now();
                }
            }
            is_over.store(true, SeqCst);
        });
        let mut at = FAR_BYTES;
        while !is_over.load(SeqCst) {
            scene.file.write_at(&[1; 100], at as u64).unwrap();
            scene.view.write_at(&[1; 100], at + PAGE_BYTES);
            scene.file.sync().unwrap();
            scene.file.dont_need(0, MIB as u64).unwrap();
            at = (at + FAR_BYTES) % (MIB / 2) + FAR_BYTES;
        }
    });
    drop(prefaulted);
}

/// Handles a fault of the program by reading the byte at [`TARGET`], which lies in a view.
extern "C" fn read_target(signal: i32, info: *const libc::siginfo_t, context: *mut c_void) {
    FOUND.store(load(TARGET.load(SeqCst)).into(), SeqCst);
    record_fault(signal, info, context);
}

/// A handler for `SIGSEGV` that was installed before the first view gets a fault of the program, and reads a view.
/// While it runs, `SIGSEGV` is blocked, so only prefaulted pages can be read, unless it was installed with
/// `SA_NODEFER`.
#[test]
fn handlers_of_faults_read_views() {
    let test = "handlers_of_faults_read_views";
    let Some(scene_name) = scene() else {
        assert_passed(&play(test, "nodefer"));
        assert_passed(&play(test, "prefaulted"));
        return assert_killed(&play(test, "blocked"), libc::SIGSEGV);
    };
    install(libc::SIGSEGV, read_target, if scene_name == "nodefer" { libc::SA_NODEFER } else { 0 });
    let scene = Scene::new();
    let prefaulted = (scene_name == "prefaulted").then(|| scene.view.prefault(0..PAGE_BYTES).unwrap());
    let page = closed_page();
    TARGET.store(scene.addr(1), SeqCst);
    assert_eq!((load(page), FOUND.load(SeqCst) as u8, take_fault().0), (0, byte_at(1), page));
    drop(prefaulted);
}

/// A thread blocks `SIGSEGV`. It must be able to access pages that are mapped. At the first access to another page, the
/// kernel ends the process. So it does at an access behind the end of the file, if `SIGBUS` is blocked or ignored.
#[test]
fn a_blocked_fault_ends_the_process() {
    let test = "a_blocked_fault_ends_the_process";
    let Some(scene_name) = scene() else {
        assert_passed(&play(test, "mapped"));
        assert_killed(&play(test, "not mapped"), libc::SIGSEGV);
        assert_killed(&play(test, "blocked SIGBUS"), libc::SIGBUS);
        return assert_killed(&play(test, "ignored SIGBUS"), libc::SIGBUS);
    };
    let scene = Scene::new();
    assert_eq!(scene.read(1), byte_at(1));
    match scene_name.as_str() {
        "blocked SIGBUS" => block(libc::SIGBUS),
        // SAFETY: changes an action only.
        "ignored SIGBUS" => _ = unsafe { libc::signal(libc::SIGBUS, libc::SIG_IGN) },
        _ => block(libc::SIGSEGV),
    }
    assert_eq!(scene.read(1), byte_at(1));
    match scene_name.as_str() {
        "mapped" => {
            let prefaulted = scene.view.prefault(FAR_BYTES..FAR_BYTES + PAGE_BYTES).unwrap();
            assert_eq!(scene.read(FAR_BYTES), byte_at(FAR_BYTES));
            drop(prefaulted);
        }
        "not mapped" => _ = scene.read(FAR_BYTES),
        _ => _ = scene.read(MIB),
    }
}

/// A thread reads a view at each depth of a recursion without end. The accesses must succeed on the last bytes of its
/// stack, too, and Rust must report the overflow.
#[test]
fn stack_overflows_are_reported() {
    fn recurse(view: &View, depth: usize) -> usize {
        if std::hint::black_box(depth) == usize::MAX {
            return 0;
        }
        let frame = std::hint::black_box([depth; 32]);
        assert_eq!(read_byte(view, depth * PAGE_BYTES % MIB), byte_at(depth * PAGE_BYTES % MIB));
        recurse(view, depth + 1) + std::hint::black_box(frame)[7]
    }
    if scene().is_some() {
        let scene = Scene::new();
        panic!("the recursion has returned {}", recurse(&scene.view, 0));
    }
    let output = play("stack_overflows_are_reported", "overflow");
    assert_killed(&output, libc::SIGABRT);
    assert!(text(&output).contains("has overflowed its stack"), "{}", text(&output));
}

/// `SIGBUS` must have the address of the access. `take_error` must return the error of the store once, and nothing for
/// an access behind the end of the file.
#[test]
fn sigbus_has_the_address_and_the_reason() {
    if scene().is_none() {
        return assert_passed(&play("sigbus_has_the_address_and_the_reason", "access"));
    }
    let scene = Scene::new();
    install(libc::SIGBUS, record_fault, libc::SA_ONSTACK);
    let expected = |at: usize| (scene.addr(at), libc::BUS_ADRERR);
    assert_eq!((scene.read(MIB + 77), take_fault()), (0, expected(MIB + 77)));
    scene.view.write_at(&[1], MIB + FAR_BYTES + 1);
    assert_eq!(take_fault(), expected(MIB + FAR_BYTES + 1));
    assert!(scene.view.take_error().is_none());
    scene.store.set_faults(Faults { fail_per_mille: 1000, errno: libc::ENODEV, ..Faults::default() });
    assert_eq!((scene.read(5 * FAR_BYTES + 9), take_fault()), (0, expected(5 * FAR_BYTES + 9)));
    assert_eq!(scene.view.take_error().map(|error| error.errno()), Some(libc::ENODEV));
    assert!(scene.view.take_error().is_none(), "an error is returned once");
    scene.store.set_faults(Faults::default());
    assert_eq!((scene.read(6 * FAR_BYTES), take_fault()), (byte_at(6 * FAR_BYTES), (0, 0)));
}

/// An access calls a store on a stack of Pagemill. There the store takes a backtrace, and panics, for which Rust prints
/// one. The backtrace must end with that stack. The panic must raise `SIGBUS`, and later accesses must work.
#[test]
fn stores_take_backtraces() {
    const PANICS_AT: usize = 8 * FAR_BYTES;
    if scene().is_none() {
        return assert_passed(&play("stores_take_backtraces", "backtraces"));
    }
    // SAFETY: no other thread of this process reads the environment.
    unsafe { std::env::set_var("RUST_BACKTRACE", "full") };
    install(libc::SIGBUS, record_fault, libc::SA_ONSTACK);
    let store = MemoryStore::new((0..MIB).map(byte_at).collect(), 512);
    let latest = Arc::new(Mutex::new(String::new()));
    let trace_to = latest.clone();
    let before_read = move |read: Range<u64>| {
        *trace_to.lock().unwrap() = Backtrace::force_capture().to_string();
        assert!(!read.contains(&(PANICS_AT as u64)), "the store panics");
        Ok(())
    };
    let store = Arc::new(HookedStore { inner: store, before_read });
    let builder = PageCache::builder("traced").limit(16 << 20).policy(Never).source(Source::Shared);
    let file = builder.build_in(Testbed::for_test().caches).unwrap().open(store).unwrap();
    let view = file.view_mut(0..MIB as u64).unwrap();
    assert_eq!(read_byte(&view, 9), byte_at(9));
    let trace = std::mem::take(&mut *latest.lock().unwrap());
    let last = trace.lines().rfind(|line| !line.trim_start().starts_with("at ")).unwrap();
    assert!(trace.contains("HookedStore") && last.ends_with("call_on_stack"), "{trace}");
    assert_eq!((read_byte(&view, PANICS_AT), take_fault().0), (0, view.as_ptr() as usize + PANICS_AT));
    assert_eq!((read_byte(&view, 4 * FAR_BYTES), take_fault()), (byte_at(4 * FAR_BYTES), (0, 0)));
}

/// Address of the handler for `SIGBUS` that [`call_earlier_handler`] calls.
static EARLIER_HANDLER: AtomicUsize = AtomicUsize::new(0);

/// A handler of the program that counts, and then calls the handler that was installed before it.
extern "C" fn call_earlier_handler(signal: i32, info: *const libc::siginfo_t, context: *mut c_void) {
    FOUND.fetch_add(1, SeqCst);
    // SAFETY: writes some bytes, also inside of a signal handler.
    unsafe { libc::write(2, b"later handler\n".as_ptr().cast(), 14) };
    // SAFETY: the address is that of a handler with these arguments.
    let earlier = unsafe { std::mem::transmute::<usize, Handler>(EARLIER_HANDLER.load(SeqCst)) };
    earlier(signal, info, context);
}

/// A handler for `SIGBUS` calls the one that was installed before it: first one of the program, which lets the access
/// continue, then that of Rust's runtime, after which the process must end by `SIGBUS`.
#[test]
fn handlers_of_sigbus_are_chained() {
    let test = "handlers_of_sigbus_are_chained";
    let Some(scene_name) = scene() else {
        assert_passed(&play(test, "program"));
        let output = play(test, "runtime");
        assert_killed(&output, libc::SIGBUS);
        return assert!(text(&output).contains("later handler"), "{}", text(&output));
    };
    if scene_name == "program" {
        install(libc::SIGBUS, record_fault, libc::SA_ONSTACK);
    }
    let scene = Scene::new();
    let before = install(libc::SIGBUS, call_earlier_handler, libc::SA_ONSTACK);
    assert!(![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction), "there is an earlier handler");
    EARLIER_HANDLER.store(before.sa_sigaction, SeqCst);
    assert_eq!(scene.read(MIB + 3), 0);
    assert_eq!((FOUND.load(SeqCst), take_fault().0), (1, scene.addr(MIB + 3)));
}
