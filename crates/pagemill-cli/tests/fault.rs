//! Kernel calls fail one after the other, with each possible error, in programs that use Pagemill. No process may
//! abort, no byte may be lost, and no memory may remain in use. The error message must say what failed.
//!
//! `strace` injects the failures, so the programs are unchanged. A scenario is a process: this executable
//! (`PAGEMILL_FAULT` names its scenario), or a C program with the preload library. Only calls of the first thread fail,
//! and only those after its call of `getppid`, which ends the set-up.
//!
//! At the end of a scenario, the process must have no more open files than without a failure, and its published files
//! must be gone. `fault_run.rs` and `fault_mount.rs` test the commands in the same way. There is no test harness,
//! because its threads would make calls, too.
//!
//! By default a sample of the calls fails. `FAULT_SWEEP=full cargo test -p pagemill-cli --test fault` makes every call
//! fail in turn.

mod common;

use common::sweep::{cannot_inject, is_full_sweep};
use common::{End, TIMEOUT, TestFolder, finish, walk};
use pagemill_cache::mapping::policy::Always;
use pagemill_cache::mapping::{Mapping, PageCache};
use pagemill_core::Error;
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_slab as slab;
use pagemill_slab::SlabCache;
use pagemill_store::FileStore;
use pagemill_testbed::Testbed;
use pagemill_volatile::{Behaviour, VolatileCache};
use std::fmt::Display;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const MIB: usize = 1 << 20;

/// Kernel calls, each with the errors that are injected in it.
const CALL_ERRORS: &[(&str, &[&str])] = &[
    ("mmap", &["ENOMEM", "EPERM"]),
    ("munmap", &["ENOMEM"]),
    ("mprotect", &["ENOMEM", "EACCES"]),
    ("mremap", &["ENOMEM", "EFAULT"]),
    ("madvise", &["ENOMEM", "EINVAL", "EAGAIN", "EBUSY"]),
    ("process_madvise", &["EPERM", "EAGAIN", "ENOSYS"]),
    ("mincore", &["EAGAIN", "ENOSYS"]),
    ("mbind", &["EPERM", "ENOSYS"]),
    ("userfaultfd", &["EPERM", "ENOSYS"]),
    ("membarrier", &["EPERM", "ENOSYS"]),
    ("clone3", &["EAGAIN", "EPERM"]),
    ("openat", &["EMFILE", "ENOENT", "EACCES", "EINTR"]),
    ("read", &["EIO", "EINTR"]),
    ("pread64", &["EIO", "EINTR"]),
    ("pwrite64", &["EIO", "ENOSPC", "EINTR"]),
    ("fallocate", &["ENOSPC", "EOPNOTSUPP", "EINTR"]),
    ("ftruncate", &["EIO", "EINTR"]),
    ("fsync", &["EIO"]),
    ("fdatasync", &["EIO"]),
    ("mkdir", &["EACCES", "ENOSPC"]),
    ("prlimit64", &["EPERM"]),
    ("sched_setscheduler", &["EPERM"]),
    ("close_range", &["ENOSYS"]),
    ("io_uring_setup", &["EPERM", "ENOSYS", "ENOMEM"]),
    ("io_uring_enter", &["EAGAIN", "EBUSY", "EINTR"]),
    ("io_uring_register", &["ENOMEM", "EINVAL"]),
];

/// In a sample, each of the first three calls of one system call fails in a run of its own. Of its later calls, the
/// 6th, 12th, 24th and so on fail, and the last one.
const FIRST_CALL_COUNT: usize = 3;

/// Calls `act`, which may fail with the injected error. If it fails, prints the error and calls `act` again. The second
/// call must succeed.
fn retry_once<T, E: Display>(doing: &str, mut act: impl FnMut() -> Result<T, E>) -> T {
    match act() {
        Ok(done) => done,
        Err(error) => {
            let text = error.to_string();
            // The error must say more than the kernel's error text.
            assert!(text.len() > 10, "{doing}: {text:?} says nothing");
            println!("{doing}: {text}");
            act().unwrap_or_else(|error| panic!("{doing}, where no call failed: {error}"))
        }
    }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9E37_79B9).wrapping_add(seed) >> 7) as u8).collect()
}

fn set_up() -> &'static Testbed {
    let _ = std::os::unix::process::parent_id();
    let pagemill = retry_once("making Pagemill", || Testbed::new(Layout::for_test(), UNLIMITED));
    pagemill.caches.collapse_by_hand();
    pagemill.slabs.defrag_by_hand();
    pagemill
}

fn assert_memory_returned(pagemill: &Testbed) {
    // One of these calls may itself fail.
    (0..3).for_each(|_| _ = pagemill.account.return_all());
    let left = pagemill.figures();
    let resident = left.get(pagemill_core::stats::Counter::Resident);
    assert!(resident <= BLOCK_BYTES as u64, "{resident} bytes stay resident");
}

fn run_volatile_scenario() {
    let pagemill = set_up();
    let mut ranges = Vec::new();
    for seed in 0..6 {
        let mut range = retry_once("allocating a range", || pagemill.ranges.allocate(2 * MIB + 5000, Behaviour::Full));
        let bytes = pattern(range.len_bytes(), seed);
        range.bytes_mut().unwrap().copy_from_slice(&bytes);
        retry_once("marking", || range.mark());
        ranges.push((range, bytes));
    }
    pagemill.account.give_back(
        5 * MIB as u64,
        pagemill_core::arena::Context::Outside,
        pagemill_core::reclaim::Urgency::Limit,
        pagemill_core::reclaim::Reason::Program,
    );
    for (range, bytes) in &ranges {
        let pin = retry_once("pinning", || range.pin());
        let kept = pin.whole().map(<[u8]>::to_vec);
        assert!(kept.is_none_or(|kept| kept == *bytes), "bytes that were kept are others");
    }
    drop(ranges);
    let cache: VolatileCache<u32, Vec<u8>> = VolatileCache::new_in(pagemill.ranges);
    for key in 0..20 {
        retry_once("inserting", || cache.insert(key, &pattern(100_000, key.into())));
    }
    (0..20).for_each(|key| assert!(cache.get(&key).is_none_or(|value| value == pattern(100_000, key.into()))));
    drop(cache);
    assert_memory_returned(pagemill);
}

fn assert_read(file: &Mapping, expected: &[u8]) {
    let (mut bytes, mut at) = (vec![0; expected.len()], 0);
    while at < bytes.len() {
        // A failed read returns the bytes that were read before the failure. The next read continues after them.
        let len = retry_once("reading", || file.read_at(&mut bytes[at..], at as u64));
        assert!(len > 0, "nothing is read at {at}");
        at += len;
    }
    assert!(bytes == expected, "other bytes are read");
}

fn run_cache_scenario(path: &Path) {
    let pagemill = set_up();
    let page = PageSize::new(16 << 10).unwrap();
    for policy in [true, false] {
        let settings = || match policy {
            true => PageCache::builder("fault").limit(8 * MIB as u64).page(page).policy(Always),
            false => PageCache::builder("fault").limit(8 * MIB as u64).page(page),
        };
        let cache = retry_once("making a cache", || settings().build_in(pagemill.caches));
        let file = retry_once("making a file", || cache.open(Arc::new(FileStore::create(path)?)));
        let bytes = pattern(5 * MIB + 777, u64::from(policy));
        let mut at = 0;
        while at < bytes.len() {
            at += retry_once("writing", || file.write_at(&bytes[at..bytes.len().min(at + MIB)], at as u64));
        }
        // A failed write may be reported once more, by the next sync. After that sync, all bytes must be in the file.
        if let Err(error) = file.sync() {
            println!("syncing: {error}");
            let _ = file.sync();
        }
        retry_once("syncing", || file.sync());
        assert!(retry_once("looking", || std::fs::read(path)) == bytes, "bytes that were synced are not in the file");
        retry_once("refreshing", || file.refresh());
        assert_read(&file, &bytes);
        retry_once("truncating", || file.truncate(0));
        let _ = file.sync();
        retry_once("syncing a cut", || file.sync());
        drop((file, cache));
        std::fs::remove_file(path).unwrap();
    }
    assert_memory_returned(pagemill);
}

fn run_slab_scenario() {
    let pagemill = set_up();
    let fixed = retry_once("making a cache", || pagemill.slabs.fixed::<[u64; 24]>(slab::Settings::new("fixed")));
    let slots: Vec<_> =
        (0..40_000).map(|at| retry_once("inserting", || fixed.insert([at; 24]).map_err(Error::from))).collect();
    assert!(slots.iter().zip(0..).all(|(slot, at)| **slot == [at; 24]), "objects are others");
    let kept: Vec<_> = slots.into_iter().step_by(10).collect();
    retry_once("shrinking", || fixed.shrink());
    assert!(kept.iter().zip((0..).step_by(10)).all(|(slot, at)| **slot == [at; 24]), "objects are others");
    let handles = retry_once("making a cache", || pagemill.slabs.by_handle::<u64>(slab::Settings::new("handles")));
    let keys: Vec<_> =
        (0..60_000).map(|at| retry_once("inserting", || handles.insert(at).map_err(Error::from))).collect();
    for key in keys.iter().skip(1).step_by(2) {
        retry_once("removing", || handles.remove(*key));
    }
    retry_once("shrinking", || handles.shrink());
    let guard = slab::enter();
    let is_right = |(key, at): (&slab::Handle<u64>, u64)| handles.get(*key, &guard).is_none_or(|value| *value == at);
    assert!(keys.iter().zip(0..).all(is_right), "values are others");
    drop((guard, kept));
    drop((fixed, handles));
    assert_memory_returned(pagemill);
}

/// A scenario: its name, and how to start the process that runs it.
struct Scenario {
    name: &'static str,
    program: Box<dyn Fn(&TestFolder) -> Command>,
}

impl Scenario {
    fn own(name: &'static str) -> Self {
        let program = move |place: &TestFolder| {
            let mut command = place.command("strace");
            // With these settings, the C library requests memory from the kernel only once. So no allocation of the
            // test's own vectors makes a call that could fail.
            command.env("GLIBC_TUNABLES", "glibc.malloc.top_pad=402653184:glibc.malloc.mmap_threshold=1073741824");
            command.env("PAGEMILL_FAULT", name).env("PAGEMILL_FAULT_FILE", place.path("stored"));
            command
        };
        Self { name, program: Box::new(program) }
    }

    fn run(name: &'static str, options: &'static [&'static str]) -> Self {
        let program = move |place: &TestFolder| {
            let mut command = place.pagemill_run(options, "strace");
            command.env_remove("PAGEMILL_AFTER");
            command
        };
        Self { name, program: Box::new(program) }
    }

    /// Runs the scenario under `strace`, which traces `calls` and injects the failure `inject`. Returns how the process
    /// ended, and the trace.
    fn trace(&self, place: &TestFolder, executable: &Path, calls: &str, inject: Option<&str>) -> (End, String) {
        let mut command = (self.program)(place);
        let path = place.path("trace");
        let _ = std::fs::remove_file(&path);
        command.args(["-f", "-qq", "--seccomp-bpf", "-e", "signal=none", "-o"]).arg(&path);
        command.arg(format!("-etrace={calls},getppid"));
        command.args(inject.map(|inject| format!("-einject={inject}")));
        command.arg(executable);
        let end = finish(command, TIMEOUT);
        (end, std::fs::read_to_string(path).unwrap_or_default())
    }
}

/// Counts the calls with the name `call` on the first thread. Returns the number of calls before the end of the set-up,
/// and the number after it.
fn count_calls(trace: &str, call: &str) -> (usize, usize) {
    let first = trace.split_ascii_whitespace().next().unwrap_or_default();
    let own = trace.lines().filter_map(|line| line.strip_prefix(first)).map(str::trim_start);
    let (mut before, mut after, mut has_started) = (0, 0, false);
    for line in own {
        has_started |= line.starts_with("getppid(");
        let is_called = line.strip_prefix(call).is_some_and(|rest| rest.starts_with('('));
        *if has_started { &mut after } else { &mut before } += usize::from(is_called);
    }
    (before, after)
}

/// Returns which of the `calls` calls of one system call are to fail: their positions, from 1.
fn failing_calls(calls: usize) -> Vec<usize> {
    if is_full_sweep() {
        return (1..=calls).collect();
    }
    let doubled = std::iter::successors(Some(FIRST_CALL_COUNT), |at| Some(at * 2)).skip(1);
    let rare = doubled.take_while(|at| *at < calls).chain((calls > FIRST_CALL_COUNT).then_some(calls));
    (1..=calls.min(FIRST_CALL_COUNT)).chain(rare).collect()
}

/// Returns whether the transfer engine has no thread. Returns `None` if a call failed.
fn has_engine_exited() -> Option<bool> {
    let mut names = Vec::new();
    for thread in std::fs::read_dir("/proc/self/task").ok()? {
        names.push(std::fs::read_to_string(thread.ok()?.path().join("comm")).ok()?);
    }
    Some(names.iter().all(|name| name.trim_end() != "pagemill-ring"))
}

/// Prints the number of open files of this process, after the thread of the transfer engine has exited and closed its
/// ring. It is the minimum of several counts, because background threads open files for short times.
fn print_open_files() {
    // The thread exits 50 ms after its last transfer. The first check is late, so that there are few of them: their
    // calls fail, too.
    std::thread::sleep(std::time::Duration::from_millis(60));
    while has_engine_exited() != Some(true) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let count = || {
        std::thread::sleep(std::time::Duration::from_millis(1));
        std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count)
    };
    println!("open {}", (0..4).filter_map(|_| count()).min().unwrap_or(0));
}

fn open_files(end: &End) -> Option<usize> {
    end.out.lines().find_map(|line| line.strip_prefix("open ")?.parse().ok())
}

/// Returns what is wrong with the end of a run; `None` if nothing is wrong. `clean` is the end of a run without a
/// failure.
fn problem(place: &TestFolder, end: &End, clean: &End) -> Option<String> {
    if !end.status.success() || !end.out.contains("fine") {
        return Some("it fails".to_owned());
    }
    if open_files(end) > open_files(clean) {
        return Some(format!("{:?} open files, {:?} without a failed call", open_files(end), open_files(clean)));
    }
    let left: Vec<_> = walk(&place.path("runtime")).into_iter().filter(|path| path.is_file()).collect();
    (!left.is_empty()).then(|| format!("left behind: {left:?}"))
}

/// The totals of all runs with failing calls, and the problems that the runs showed.
#[derive(Default)]
struct Sweep {
    runs: usize,
    failed_calls: usize,
    kinds: usize,
    problems: Vec<String>,
}

impl Sweep {
    fn run_scenario(&mut self, place: &TestFolder, scenario: &Scenario, executable: &Path) {
        let all: Vec<_> = CALL_ERRORS.iter().map(|(call, _)| *call).collect();
        let (clean, trace) = scenario.trace(place, executable, &all.join(","), None);
        assert_eq!(problem(place, &clean, &clean), None, "{}: {}\n{}", scenario.name, clean.out, clean.err);
        assert!(open_files(&clean).is_some(), "{}", clean.out);
        for (call, errors) in CALL_ERRORS {
            let (before, after) = count_calls(&trace, call);
            for at in failing_calls(after) {
                for error in *errors {
                    let inject = format!("{call}:error={error}:when={}", before + at);
                    let (end, trace) = scenario.trace(place, executable, call, Some(&inject));
                    self.runs += 1;
                    self.failed_calls += trace.matches("(INJECTED)").count();
                    if let Some(what) = problem(place, &end, &clean) {
                        let output = format!("{}{}", common::tail(&end.out), common::tail(&end.err));
                        self.problems.push(format!("{what}: {}, {inject}: {}\n{output}", scenario.name, end.status));
                    }
                }
            }
            self.kinds += if after > 0 { errors.len() } else { 0 };
        }
        println!("{}: {} runs so far, {} problems", scenario.name, self.runs, self.problems.len());
    }
}

fn sweep() {
    if cannot_inject() {
        return;
    }
    let place = TestFolder::new();
    let Some(program) = place.compile("fault.c", &[]) else { return };
    let own = std::env::current_exe().unwrap();
    let mut sweep = Sweep::default();
    for scenario in ["volatile", "cache", "slabs"] {
        sweep.run_scenario(&place, &Scenario::own(scenario), &own);
    }
    for (name, options) in [("run", &["--after", "0"] as &[&str]), ("run, growing", &["--after", "1M"])] {
        sweep.run_scenario(&place, &Scenario::run(name, options), &program);
    }
    let Sweep { runs, failed_calls, kinds, problems } = sweep;
    println!("{runs} runs, {failed_calls} calls failed, {kinds} pairs of a call and an error in 5 scenarios");
    assert!(failed_calls >= runs / 2, "strace makes calls fail");
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n\n"));
}

fn main() {
    match std::env::var("PAGEMILL_FAULT").as_deref() {
        Ok("volatile") => run_volatile_scenario(),
        Ok("cache") => run_cache_scenario(Path::new(&std::env::var("PAGEMILL_FAULT_FILE").unwrap())),
        Ok("slabs") => run_slab_scenario(),
        _ => return sweep(),
    }
    println!("fine");
    print_open_files();
}
