//! The governor under real limits of the kernel: control groups with a limit, idle processes, and the statistics that
//! the commands show.

mod common;

use common::group::Group;
use common::{Guard, TIMEOUT, TestFolder, finish};
use serde_json::Value;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A program runs in a control group with a limit, without a limit of its own. It frees far more memory than fits below
/// the limit together with its live memory. No process may be killed, and no allocation may fail.
#[test]
fn a_groups_limit_is_survived() {
    let place = TestFolder::new();
    let Some(program) = place.compile("phases.c", &[]) else { return };
    for threads in ["2", "4", "8"] {
        let Some(group) = Group::new(&format!("phases{threads}"), 128 * MIB) else { return };
        let report = place.path("report.json");
        let mut command = place.pagemill_run(&["--json", "--output", report.to_str().unwrap()], &program);
        // There are so many phases that every size occurs, even on a slow machine.
        command.args([threads, "72", "3000", "8"]).env_remove("PAGEMILL_AFTER");
        let end = finish(group.enter(&command), TIMEOUT);
        assert!(end.status.success(), "{threads} threads: {} {}", end.status, end.err);
        let report: Value = serde_json::from_str(&fs::read_to_string(place.path("report.json")).unwrap()).unwrap();
        let counters = &report["counters"];
        assert_eq!(counters["limit_refused"], 0, "{report}");
        // Memory is returned either for the group or because new memory became resident. What is returned for one
        // reason need not be returned for the other, so the sum of both counters is checked.
        let given = ["given_for_group", "given_for_new"].map(|reason| counters[reason].as_u64().unwrap());
        assert!(given.iter().sum::<u64>() > 64 * MIB, "hardly anything was given: {report}");
    }
}

/// All memory of a program in a control group is live, so none can be returned. Allocations must then fail near the
/// limit of the group, and no process may be killed.
#[test]
fn allocations_fail_before_the_kernel_kills() {
    let place = TestFolder::new();
    let Some(program) = place.compile("full.c", &[]) else { return };
    for bytes in ["128", "3000", "100000"] {
        let Some(group) = Group::new(&format!("full{bytes}"), 128 * MIB) else { return };
        let mut command = place.pagemill_run(&[], &program);
        command.arg(bytes).env_remove("PAGEMILL_AFTER");
        let end = finish(group.enter(&command), TIMEOUT);
        assert!(end.status.success(), "{bytes} bytes each: {} {}", end.status, end.err);
        let filled: u64 = end.out.trim().strip_suffix(" MiB").unwrap().parse().unwrap();
        assert!((96..128).contains(&filled), "{bytes} bytes each: {filled} MiB");
    }
}

/// Returns a value of a running process from the JSON output of the `pagemill` command `shown_by`.
fn value_shown_by(place: &TestFolder, shown_by: &str, pid: u32, name: &str) -> Option<u64> {
    let mut command = place.command(common::PAGEMILL);
    command.args([shown_by, "--json", "--all", &pid.to_string()]);
    let end = finish(command, TIMEOUT);
    let values: Value = serde_json::from_str(&end.out).ok()?;
    values[name].as_u64()
}

fn meminfo_value(place: &TestFolder, pid: u32, name: &str) -> Option<u64> {
    value_shown_by(place, "meminfo", pid, name)
}

fn child_of(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.split_whitespace().next()?.parse().ok()
}

/// Starts `command`, a program that frees 100 MiB and sleeps. Waits until `meminfo` shows about as many free bytes.
/// Returns the guard of the command, and the program's process id.
fn start_idle(place: &TestFolder, command: Command) -> (Guard, u32) {
    let mut command = command;
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    loop {
        if let Some(pid) = child_of(guard.id())
            && meminfo_value(place, pid, "heap_free").is_some_and(|bytes| bytes > 90 * MIB)
        {
            return (guard, pid);
        }
        assert!(start.elapsed() < TIMEOUT, "nothing was published");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the sum of some counters of a process reaches `least`. `counters` has the names of the counters, joined
/// by `+`.
fn wait_for(place: &TestFolder, pid: u32, counters: &str, least: u64) {
    let start = Instant::now();
    loop {
        let mut command = place.command(common::PAGEMILL);
        command.args(["vmstat", "--json", &pid.to_string()]);
        let out = finish(command, TIMEOUT).out;
        let found: Value = serde_json::from_str(&out).unwrap_or_default();
        if counters.split('+').map(|counter| found[counter].as_u64().unwrap_or(0)).sum::<u64>() >= least {
            return;
        }
        assert!(start.elapsed() < TIMEOUT, "{counters} never reached {least}: {out}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

/// Stops a process for longer and longer times, until its helper thread records that it woke late. Near a limit the
/// helper checks the limit periodically, so it notices a delay.
fn delay_helper(place: &TestFolder, pid: u32) {
    let (start, mut pause) = (Instant::now(), Duration::from_millis(50));
    while value_shown_by(place, "vmstat", pid, "helper_late").is_none_or(|times| times == 0) {
        assert!(start.elapsed() < TIMEOUT, "the helper never said that it was late");
        signal(pid, "STOP");
        std::thread::sleep(pause);
        signal(pid, "CONT");
        pause = (2 * pause).min(Duration::from_secs(10));
    }
}

/// A process with much free memory is stopped while another process fills their control group. The kernel must take the
/// memory that the stopped process offered, and must kill no process.
#[test]
fn the_kernel_takes_free_memory_of_a_stopped_process() {
    let place = TestFolder::new();
    let (Some(idle), Some(touch)) = (place.compile("idle.c", &[]), place.compile("touch.c", &[])) else { return };
    let Some(group) = Group::new("stopped", 256 * MIB) else { return };
    let mut command = place.pagemill_run(&[], idle);
    command.env("PAGEMILL_IDLE", "off");
    let (mut guard, pid) = start_idle(&place, group.enter(&command));
    // With 100 MiB more in the group, the limit is near, so the governor offers free memory to the kernel.
    let mut neighbour = Command::new(&touch);
    neighbour.args(["100", "3600000"]).stdout(Stdio::null());
    let mut neighbour = Guard::new(group.enter(&neighbour));
    wait_for(&place, pid, "offered", 80 * MIB);
    delay_helper(&place, pid);
    signal(pid, "STOP");
    let mut greedy = Command::new(&touch);
    greedy.args(["100", "0"]);
    let end = finish(group.enter(&greedy), TIMEOUT);
    assert!(end.status.success(), "{} {}", end.status, end.err);
    signal(pid, "CONT");
    // The helper detects that the kernel took memory.
    wait_for(&place, pid, "taken", 20 * MIB);
    assert!(!guard.has_ended() && !neighbour.has_ended(), "a process was killed");
}

/// Far from its group's limit, a process must not wake periodically. The kernel must wake the process when the group's
/// usage passes a threshold.
#[test]
fn thresholds_wake_the_helper() {
    let place = TestFolder::new();
    let (Some(idle), Some(touch)) = (place.compile("idle.c", &[]), place.compile("touch.c", &[])) else { return };
    let Some(group) = Group::new("thresholds", 256 * MIB) else { return };
    if !group.folder.join("cgroup.event_control").exists() {
        println!("skipped: version 2 has no thresholds");
        return;
    }
    let mut command = place.pagemill_run(&[], idle);
    command.env("PAGEMILL_IDLE", "off");
    let (mut guard, pid) = start_idle(&place, group.enter(&command));
    wait_for(&place, pid, "helpers_warned", 1);
    // Other events wake the process, too: a memory shortage of the machine, and page faults that wait for a disk. Both
    // end soon, so the measurement is repeated.
    let start = Instant::now();
    loop {
        let (begun, before) = (Instant::now(), context_switches(pid));
        std::thread::sleep(Duration::from_secs(3));
        let (woken, seconds) = (context_switches(pid) - before, begun.elapsed().as_secs());
        if woken <= 2 * seconds + 2 {
            break;
        }
        assert!(start.elapsed() < TIMEOUT, "woken {woken} times in {seconds} s");
    }
    let mut greedy = Command::new(&touch);
    greedy.args(["200", "0"]);
    let end = finish(group.enter(&greedy), TIMEOUT);
    assert!(end.status.success() && !guard.has_ended(), "{} {}", end.status, end.err);
    wait_for(&place, pid, "signs", 1);
    // Not all memory needs to be returned: the kernel may already have taken offered memory.
    wait_for(&place, pid, "given_for_group+taken", 30 * MIB);
}

/// A process is moved to another control group, and then the limit of that group is changed. The process must detect
/// both.
#[test]
fn a_move_to_another_group_is_detected() {
    let place = TestFolder::new();
    let Some(idle) = place.compile("idle.c", &[]) else { return };
    let Some(group) = Group::new("moved", 512 * MIB) else { return };
    let mut command = place.pagemill_run(&[], idle);
    command.env("PAGEMILL_IDLE", "off");
    let (_guard, pid) = start_idle(&place, command);
    group.move_process(pid);
    wait_for(&place, pid, "limits_changed", 1);
    group.set_limit(256 * MIB).unwrap();
    wait_for(&place, pid, "limits_changed", 2);
}

fn context_switches(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok());
    let counts = |text: String| {
        let count = |line: &str| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok();
        text.lines().filter_map(count).sum::<u64>()
    };
    status.map(counts).sum()
}

/// A process frees much memory and then sleeps. It must return the memory after the configured time, and must not wake
/// afterwards.
#[test]
fn an_idle_process_returns_its_free_memory() {
    let place = TestFolder::new();
    let Some(program) = place.compile("idle.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], program);
    command.env("PAGEMILL_IDLE", "1").stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    let wait = |what: &str, is_so: &dyn Fn(u32) -> bool| {
        loop {
            if let Some(pid) = child_of(guard.id())
                && is_so(pid)
            {
                return pid;
            }
            assert!(start.elapsed() < TIMEOUT, "never: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait("much is free", &|pid| meminfo_value(&place, pid, "heap_free").is_some_and(|bytes| bytes > 90 * MIB));
    let pid = wait("it went back", &|pid| meminfo_value(&place, pid, "giveable").is_some_and(|bytes| bytes < 2 * MIB));
    let resident = meminfo_value(&place, pid, "resident").unwrap();
    assert!(resident < 20 * MIB, "{resident}");
    wait("no process is woken any more", &|pid| {
        let before = context_switches(pid);
        std::thread::sleep(Duration::from_secs(3));
        context_switches(pid) == before
    });
}

/// Overcommitted memory is charged only when it is freed. The program makes no allocator call after it has freed the
/// memory. The memory must still be returned.
#[test]
fn overcommitted_memory_is_returned_after_the_last_free() {
    let place = TestFolder::new();
    let Some(program) = place.compile("overcommitted.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], program);
    command.env("PAGEMILL_IDLE", "1").env_remove("PAGEMILL_AFTER").stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    loop {
        if let Some(pid) = child_of(guard.id())
            && meminfo_value(&place, pid, "resident_peak").is_some_and(|bytes| bytes > 170 * MIB)
        {
            // On a busy machine, memory may be returned for another reason first.
            let given = "given_for_age+given_for_stall+given_for_machine+given_for_group+taken";
            return wait_for(&place, pid, given, 170 * MIB);
        }
        assert!(start.elapsed() < TIMEOUT, "nothing was published");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A pipe with the path of a published file must not block a command.
#[test]
fn a_pipe_in_place_of_a_published_file_blocks_no_command() {
    let place = TestFolder::new();
    let Some(idle) = place.compile("idle.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], idle);
    command.env("PAGEMILL_IDLE", "off");
    let (mut guard, pid) = start_idle(&place, command);
    let script = format!("f=$(find {} -name '{pid}-*') && rm $f && mkfifo $f", place.path("runtime").display());
    assert!(common::shell(&script).success());
    for command in ["meminfo", "vmstat", "trace"] {
        let mut command_line = place.command(common::PAGEMILL);
        command_line.args([command, &pid.to_string()]);
        assert_eq!(finish(command_line, TIMEOUT).code(), 2, "{command}");
    }
    signal(pid, "TERM");
    guard.wait(TIMEOUT);
}

/// The values that a process publishes must add up, and `meminfo` and `vmstat` must print them as JSON. For a process
/// that publishes none, both commands must say so.
#[test]
fn figures_add_up() {
    let place = TestFolder::new();
    let Some(program) = place.compile("idle.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], program);
    command.env("PAGEMILL_IDLE", "off").env("PAGEMILL_WATCH", "off");
    let (_guard, pid) = start_idle(&place, command);
    // No other process needs this process's free memory, so its helper must sleep. A helper that runs all the time
    // would use 100 ticks in a second.
    let ticks = || -> u64 {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = ticks();
    std::thread::sleep(Duration::from_secs(1));
    assert!(ticks() - before < 50, "the helper does not sleep");
    let sum: u64 = ["heap", "small", "c_library"].iter().map(|name| meminfo_value(&place, pid, name).unwrap()).sum();
    let (resident, giveable, net) = (
        meminfo_value(&place, pid, "resident").unwrap(),
        meminfo_value(&place, pid, "giveable").unwrap(),
        meminfo_value(&place, pid, "net").unwrap(),
    );
    assert_eq!((resident, net), (sum, resident - giveable));
    let mut vmstat = place.command(common::PAGEMILL);
    vmstat.args(["vmstat", "--json", &pid.to_string()]);
    let vmstat: Value = serde_json::from_str(&finish(vmstat, TIMEOUT).out).unwrap();
    assert!(vmstat["slots_fresh"].as_u64().unwrap() > 0, "{vmstat}");
    for command in ["meminfo", "vmstat"] {
        let mut none = place.command(common::PAGEMILL);
        none.args([command, "1"]);
        let end = finish(none, TIMEOUT);
        assert_eq!(end.code(), 2);
        assert!(end.err.contains("no figures"), "{}", end.err);
    }
}

/// Starts a program that frees `mib` MiB of small allocations and continues to work. Waits until `meminfo` shows about
/// as many free bytes. Returns the guard of the command, and the program's process id.
fn start_freed(place: &TestFolder, command: Command, mib: u64) -> (Guard, u32) {
    let mut command = command;
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    loop {
        if let Some(pid) = child_of(guard.id())
            && meminfo_value(place, pid, "giveable").is_some_and(|bytes| bytes > mib * MIB * 9 / 10)
        {
            return (guard, pid);
        }
        assert!(start.elapsed() < TIMEOUT, "nothing was published");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A process without Pagemill fills a control group. The free small allocations of another process in the group must be
/// returned before the kernel kills. Only a measurement shows how much memory is free, so the kernel must wake that
/// process. The policy `keep` excludes a return by age.
#[test]
fn free_small_memory_is_returned_for_another_process() {
    let place = TestFolder::new();
    let (Some(freed), Some(touch)) = (place.compile("freed.c", &[]), place.compile("touch.c", &[])) else { return };
    for size in ["64", "512", "4096", "16384", "65536"] {
        let Some(group) = Group::new(&format!("pieces{size}"), 140 * MIB) else { return };
        let mut command = place.pagemill_run(&[], &freed);
        command.args([size, "90"]).env("PAGEMILL_RETURN", "keep").env_remove("PAGEMILL_AFTER");
        let (mut guard, pid) = start_freed(&place, group.enter(&command), 90);
        let mut greedy = Command::new(&touch);
        greedy.args(["70", "0"]);
        let end = finish(group.enter(&greedy), TIMEOUT);
        assert!(end.status.success(), "{size} bytes each: {} {}", end.status, end.err);
        assert!(!guard.has_ended(), "{size} bytes each: it was killed");
        wait_for(&place, pid, "given_for_group", 10 * MIB);
    }
}

/// A process works a fifth of the time and does not reuse the memory that it freed. The process must return that
/// memory. The kernel's count must confirm the return.
#[test]
fn a_busy_process_returns_what_it_does_not_reuse() {
    let place = TestFolder::new();
    let Some(freed) = place.compile("freed.c", &[]) else { return };
    for size in ["512", "4096", "65536"] {
        let mut command = place.pagemill_run(&[], &freed);
        command.args([size, "100"]).env("PAGEMILL_RETURN", "balanced=2").env_remove("PAGEMILL_AFTER");
        let (_guard, pid) = start_freed(&place, command, 100);
        let resident = || -> Option<u64> {
            let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
            Some(statm.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4096)
        };
        let start = Instant::now();
        while resident().expect("it runs") > 20 * MIB {
            assert!(start.elapsed() < TIMEOUT, "{size} bytes each: {:?} resident", resident());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
