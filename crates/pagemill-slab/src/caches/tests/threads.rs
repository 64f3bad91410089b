//! Slab caches with many threads, and in processes where the kernel refuses `membarrier`.
#![allow(unsafe_code)] // implements `Movable`; system call filter, address limit

use super::*;
use crate::alloc::thread_slots::{MAX_THREADS, NO_SLOT, ensure_slot, high_water, take_slots};
use crate::caches::tests::basics::{finish_retired, slabs};
use pagemill_core::units::os_page_bytes;
use pagemill_sys::barrier;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Barrier;
use std::{env, io, thread};

type Words = [u64; 22];

struct Value(Words);

// SAFETY: numbers can be copied byte by byte.
unsafe impl Movable for Value {}

impl Value {
    fn new(number: u64) -> Self {
        Self([number; 22])
    }
}

fn slabs_with_refused_barrier() -> &'static Slabs {
    let slabs = slabs();
    slabs.refuse_barrier();
    slabs
}

/// Environment variable that is set in a process that runs a single test.
const ALONE_VARIABLE: &str = "PAGEMILL_TEST_ALONE";
/// Environment variable that is set in a process where the kernel refuses `membarrier`.
const REFUSED_VARIABLE: &str = "PAGEMILL_TEST_REFUSED";

/// Returns whether the test runs under ThreadSanitizer, for which `.ci/run` sets this variable.
fn is_under_thread_sanitizer() -> bool {
    env::var_os("TSAN_OPTIONS").is_some()
}

/// Returns a command that runs this test program again, with these arguments.
fn command_for_own_tests(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(arguments);
    command
}

#[track_caller]
fn assert_passes(command: &mut Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!said.contains(" 0 passed"), "{said}");
}

/// Makes the kernel refuse the system call `membarrier` in this process, as in some containers and sandboxes.
fn refuse_membarrier() -> io::Result<()> {
    let step =
        |code: u32, skipped: u8, value: u32| libc::sock_filter { code: code as u16, jt: 0, jf: skipped, k: value };
    let mut steps = [
        // Loads the call number. If it is that of membarrier, the call fails; others are allowed.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_membarrier as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: numbers only, and a program of the given length.
    let is_set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) == 0
    };
    if is_set { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs all slab tests again in a process where the kernel refuses `membarrier`. All of them must pass. Under
/// ThreadSanitizer this would take minutes and show little: the tests of locks, magazines and drains run there with
/// refused barriers anyway.
#[test]
fn all_slab_tests_pass_without_membarrier() {
    if env::var_os(REFUSED_VARIABLE).is_some() || is_under_thread_sanitizer() {
        return;
    }
    let mut command = command_for_own_tests(&["alloc::", "caches::", "defrag::", "read::"]);
    // SAFETY: only two system calls between fork and exec, and no allocation.
    unsafe { command.env(REFUSED_VARIABLE, "1").pre_exec(refuse_membarrier) };
    assert_passes(&mut command);
}

/// The kind of barriers must follow from the kernel's answer to `membarrier`, and a cache must use this kind.
#[test]
fn barrier_kind_follows_the_kernel() {
    let barriers = Barriers::of_process();
    assert_eq!(barriers == Barriers::DrainerOnly, barrier::register());
    assert!(env::var_os(REFUSED_VARIABLE).is_none() || barriers == Barriers::BothSides);
    let cache = slabs().fixed::<Words>(Settings::new("barriers")).unwrap();
    assert_eq!(cache.engine().magazines.barriers, barriers);
}

/// An allocation must return the object that the thread freed last, until a drain removes that object from the
/// magazine. Runs with the process-wide barrier and as if the kernel refused it.
#[test]
fn freed_object_is_allocated_next() {
    for slabs in [slabs(), slabs_with_refused_barrier()] {
        let cache = slabs.fixed::<Words>(Settings::new("taken")).unwrap();
        let address = |slot: &Slot<'_, Words>| std::ptr::from_ref(&**slot) as usize;
        let slot = cache.insert([1; 22]).unwrap();
        let (first, cached) = (address(&slot), cache.engine().objects_in_magazines());
        assert!(cached > 0);
        drop(slot);
        assert_eq!(cache.engine().objects_in_magazines(), cached + 1);
        let slot = cache.insert([2; 22]).unwrap();
        assert_eq!((address(&slot), cache.engine().objects_in_magazines()), (first, cached));
        let drained = cache.engine().drain_magazines().unwrap();
        let other = cache.insert([3; 22]).unwrap();
        drop(slot);
        assert_eq!(cache.engine().objects_in_magazines(), 0);
        drop((drained, other));
        cache.engine().check_state();
    }
}

/// Threads allocate, free and read while another thread shrinks both caches, which drains the magazines. Each thread
/// must find exactly its own values. Runs with the process-wide barrier (`membarrier`), and as if the kernel refused
/// it.
#[test]
fn threads_keep_their_values_while_others_drain() {
    const THREADS: u64 = 3;
    const ROUNDS: u64 = 4_000;
    for slabs in [slabs(), slabs_with_refused_barrier()] {
        let cache = slabs.by_handle::<Value>(Settings::new("met")).unwrap();
        let fixed = slabs.fixed::<Words>(Settings::new("met")).unwrap();
        let begin = Barrier::new(THREADS as usize + 1);
        let work = |thread: u64| {
            begin.wait();
            let mut held = Vec::new();
            for round in 0..ROUNDS {
                let value = round * THREADS + thread;
                held.push((value, cache.insert(Value::new(value)).unwrap(), fixed.insert([value; 22]).unwrap()));
                if round % 3 != 0 {
                    let at = (value.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % held.len();
                    let (value, handle, slot) = held.swap_remove(at);
                    assert_eq!((cache.get(handle, &enter()).unwrap().0, *slot), ([value; 22], [value; 22]));
                    assert!(cache.remove(handle).unwrap().is_some());
                }
            }
            let is_there = |(value, handle, slot): &(u64, Handle<Value>, Slot<'_, Words>)| {
                cache.get(*handle, &enter()).unwrap().0 == [*value; 22] && **slot == [*value; 22]
            };
            assert!(held.iter().all(is_there));
            held.len() as u64
        };
        let left: u64 = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || work(number))).collect();
            begin.wait();
            while threads.iter().any(|thread| !thread.is_finished()) {
                let _ = (cache.shrink(), fixed.shrink());
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        fixed.shrink().unwrap();
        cache.pack();
        assert_eq!((fixed.info().unwrap().active, cache.info().unwrap().active), (0, left));
        finish_retired(cache.engine());
        cache.engine().check_state();
        fixed.engine().check_state();
    }
}

/// Runs each test of the module `alone` in a process of its own, because thread slots and address space belong to the
/// whole process.
#[test]
fn run_tests_alone_in_their_process() {
    for test in ["thousands_of_threads_have_magazines", "few_addresses_limit_the_magazines"] {
        assert_passes(
            command_for_own_tests(&[&format!("caches::tests::threads::alone::{test}"), "--ignored"])
                .env(ALONE_VARIABLE, "1"),
        );
    }
}

mod alone {
    use super::*;

    fn runs_alone_in_its_process() -> bool {
        env::var_os(ALONE_VARIABLE).is_some()
    }

    fn opened_slot_count(engine: &Engine) -> u32 {
        engine.opened_slots.iter().map(|word| word.load(Relaxed).count_ones()).sum()
    }

    /// Eight threads insert and remove values. Returns, for each of the two caches, the number of thread slots that
    /// have opened a magazine.
    fn use_caches_from_threads(cache: &HandleMap<Value>, fixed: &FixedSlab<Words>) -> [u32; 2] {
        const THREADS: usize = 8;
        const VALUES: u64 = 200;
        let one_at_a_time = Guarded::new(());
        let end = Barrier::new(THREADS + 1);
        let use_both = |thread: u64| {
            // One thread at a time, because a thread does not open its magazine while another opens one.
            one_at_a_time.with(|()| {
                let values = (0..VALUES).map(|value| thread * VALUES + value);
                let held: Vec<_> = values
                    .map(|value| (value, cache.insert(Value::new(value)).unwrap(), fixed.insert([value; 22]).unwrap()))
                    .collect();
                for (value, handle, slot) in held {
                    assert_eq!((cache.get(handle, &enter()).unwrap().0, *slot), ([value; 22], [value; 22]));
                    assert!(cache.remove(handle).unwrap().is_some());
                }
            });
            end.wait();
        };
        thread::scope(|scope| {
            let threads = (0..THREADS as u64).map(|thread| scope.spawn(move || use_both(thread)));
            let threads: Vec<_> = threads.collect();
            end.wait();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        [opened_slot_count(cache.engine()), opened_slot_count(fixed.engine())]
    }

    /// Checks that a value that is removed while a thread reads it is not freed until that thread has finished.
    fn assert_readers_delay_reclaim(cache: &HandleMap<Value>) {
        let handle = cache.insert(Value::new(7)).unwrap();
        let (begun, removed) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let guard = enter();
                let value = cache.get(handle, &guard).unwrap();
                begun.wait();
                removed.wait();
                assert_eq!(value.0, [7; 22]);
            });
            begun.wait();
            assert!(cache.remove(handle).unwrap().is_some());
            let (epoch, oldest) = epochs::retire();
            assert!(oldest <= epoch);
            removed.wait();
            reader.join().unwrap();
        });
        let (epoch, oldest) = epochs::retire();
        assert!(oldest > epoch, "no thread reads");
    }

    /// With 5,000 thread slots taken, further threads must still get magazines, stocks and participant words. With all
    /// slots taken, threads must work without them. The test takes slots directly, without starting threads.
    #[test]
    #[ignore = "alone in its process"]
    fn thousands_of_threads_have_magazines() {
        const FIRST_TAKEN_SLOTS: usize = 5_000;
        if !runs_alone_in_its_process() {
            return;
        }
        // Takes a slot below those that are taken and freed later.
        ensure_slot();
        for slabs in [slabs(), slabs_with_refused_barrier()] {
            let cache = slabs.by_handle::<Value>(Settings::new("many")).unwrap();
            let fixed = slabs.fixed::<Words>(Settings::new("many")).unwrap();
            let few = take_slots(FIRST_TAKEN_SLOTS);
            assert_eq!(few.len(), FIRST_TAKEN_SLOTS);
            assert_eq!(use_caches_from_threads(&cache, &fixed), [8, 8]);
            assert!(high_water() > FIRST_TAKEN_SLOTS);
            // At most one page for each thread and cache, including the cache of nodes.
            let ids = &slabs.shared().unwrap().ids;
            let resident = ids.with(|ids| ids.ranges.iter().map(|range| range.resident_bytes()).sum::<u64>());
            assert!(resident > 0 && resident <= 3 * 9 * os_page_bytes() as u64, "{resident}");
            assert_readers_delay_reclaim(&cache);
            let rest = take_slots(MAX_THREADS);
            assert_eq!(high_water(), MAX_THREADS);
            assert_eq!(thread::spawn(ensure_slot).join().unwrap(), NO_SLOT);
            // This thread has opened a magazine by now.
            assert_eq!(use_caches_from_threads(&cache, &fixed), [9, 8]);
            assert_readers_delay_reclaim(&cache);
            drop(rest);
            cache.pack();
            fixed.shrink().unwrap();
            let active = (cache.info().unwrap().active, fixed.info().unwrap().active);
            assert_eq!((active, cache.engine().objects_in_magazines()), ((0, 0), 0));
            cache.engine().check_state();
            fixed.engine().check_state();
        }
    }

    /// Limits the address space, so that only a quarter of all magazines fits. A quarter of the thread slots must then
    /// have magazines.
    #[test]
    #[ignore = "alone in its process"]
    fn few_addresses_limit_the_magazines() {
        const FEW_THREADS: usize = MAX_THREADS / 4;
        // ThreadSanitizer ends the process if its own allocator finds no addresses.
        if !runs_alone_in_its_process() || is_under_thread_sanitizer() {
            return;
        }
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let mapped = statm.split(' ').next().unwrap().parse::<usize>().unwrap() * os_page_bytes();
        let each = size_of::<magazine::Magazine>();
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: writes, then reads numbers.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &raw mut limit), 0);
            limit.rlim_cur = (mapped + (FEW_THREADS + FEW_THREADS / 2) * each) as u64;
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &raw const limit), 0);
        }
        let magazines =
            magazine::Magazines::new(place(magazine::MagazineRange::new().unwrap()).unwrap(), Barriers::DrainerOnly);
        assert!(
            magazines.open_slot(FEW_THREADS - 1)
                && !magazines.open_slot(FEW_THREADS)
                && magazines.get(FEW_THREADS - 1).len() == 0
        );
    }
}
