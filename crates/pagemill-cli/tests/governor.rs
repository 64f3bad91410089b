//! The governor on real kernels: control groups, idle processes, and what the commands show of them.

mod common;

use common::group::Group;
use common::{Guard, Place, STUCK_AFTER, finish};
use serde_json::Value;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A program frees far more than fits beside its live memory, under the group's limit alone. No process is killed, and
/// no call refused.
#[test]
fn a_groups_limit_is_survived() {
    let place = Place::new();
    let Some(program) = place.compile("phases.c", &[]) else { return };
    for threads in ["2", "4", "8"] {
        let Some(group) = Group::new(&format!("phases{threads}"), 128 * MIB) else { return };
        let report = place.path("report.json");
        let mut command = place.pagemill_run(&["--json", "--output", report.to_str().unwrap()], &program);
        // Enough phases that every size occurs, however slow the machine is.
        command.args([threads, "72", "3000", "8"]).env_remove("PAGEMILL_AFTER");
        let end = finish(group.enter(&command), STUCK_AFTER);
        assert!(end.status.success(), "{threads} threads: {} {}", end.status, end.err);
        let report: Value = serde_json::from_str(&fs::read_to_string(place.path("report.json")).unwrap()).unwrap();
        let counters = &report["counters"];
        assert_eq!(counters["limit_refused"], 0, "{report}");
        // Memory given for new allocations need not be given for the group. The thread that needs it first decides the
        // reason.
        let given = ["given_for_group", "given_for_new"].map(|reason| counters[reason].as_u64().unwrap());
        assert!(given.iter().sum::<u64>() > 64 * MIB, "hardly anything was given: {report}");
    }
}

/// If all memory is live, nothing can be returned: allocations beyond nearly the whole limit are refused, and no
/// process is killed.
#[test]
fn live_data_is_refused_before_it_kills() {
    let place = Place::new();
    let Some(program) = place.compile("full.c", &[]) else { return };
    for bytes in ["128", "3000", "100000"] {
        let Some(group) = Group::new(&format!("full{bytes}"), 128 * MIB) else { return };
        let mut command = place.pagemill_run(&[], &program);
        command.arg(bytes).env_remove("PAGEMILL_AFTER");
        let end = finish(group.enter(&command), STUCK_AFTER);
        assert!(end.status.success(), "{bytes} bytes each: {} {}", end.status, end.err);
        let filled: u64 = end.out.trim().strip_suffix(" MiB").unwrap().parse().unwrap();
        assert!((96..128).contains(&filled), "{bytes} bytes each: {filled} MiB");
    }
}

/// Reads one figure of a running process from the JSON of a `pagemill` command.
fn figure_of(place: &Place, shown_by: &str, pid: u32, name: &str) -> Option<u64> {
    let mut command = place.command(common::PAGEMILL);
    command.args([shown_by, "--json", "--all", &pid.to_string()]);
    let end = finish(command, STUCK_AFTER);
    let figures: Value = serde_json::from_str(&end.out).ok()?;
    figures[name].as_u64()
}

/// Reads one figure from `meminfo`.
fn figure(place: &Place, pid: u32, name: &str) -> Option<u64> {
    figure_of(place, "meminfo", pid, name)
}

/// The only child of a process.
fn child_of(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.split_whitespace().next()?.parse().ok()
}

/// Starts `command`, whose process frees 100 MiB and sleeps; waits until the figures show that. Returns the process's
/// id, too.
fn start_idle(place: &Place, command: Command) -> (Guard, u32) {
    let mut command = command;
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    loop {
        if let Some(pid) = child_of(guard.id())
            && figure(place, pid, "heap_free").is_some_and(|bytes| bytes > 90 * MIB)
        {
            return (guard, pid);
        }
        assert!(start.elapsed() < STUCK_AFTER, "nothing was published");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the sum of some counters of a process, joined by `+`, reaches a value.
fn wait_for(place: &Place, pid: u32, counters: &str, least: u64) {
    let start = Instant::now();
    loop {
        let mut command = place.command(common::PAGEMILL);
        command.args(["vmstat", "--json", &pid.to_string()]);
        let out = finish(command, STUCK_AFTER).out;
        let found: Value = serde_json::from_str(&out).unwrap_or_default();
        if counters.split('+').map(|counter| found[counter].as_u64().unwrap_or(0)).sum::<u64>() >= least {
            return;
        }
        assert!(start.elapsed() < STUCK_AFTER, "{counters} never reached {least}: {out}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Sends a signal to a process of the test.
fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

/// Stops a process for longer and longer, until its helper, which checks the room near a limit periodically, counts
/// itself as late.
fn hold_up(place: &Place, pid: u32) {
    let (start, mut pause) = (Instant::now(), Duration::from_millis(50));
    while figure_of(place, "vmstat", pid, "helper_late").is_none_or(|times| times == 0) {
        assert!(start.elapsed() < STUCK_AFTER, "the helper never said that it was late");
        signal(pid, "STOP");
        std::thread::sleep(pause);
        signal(pid, "CONT");
        pause = (2 * pause).min(Duration::from_secs(10));
    }
}

/// The process is stopped while another process fills the group: the kernel takes the offered memory, and kills no
/// process.
#[test]
fn a_stopped_process_is_no_danger() {
    let place = Place::new();
    let (Some(idle), Some(touch)) = (place.compile("idle.c", &[]), place.compile("touch.c", &[])) else { return };
    let Some(group) = Group::new("stopped", 256 * MIB) else { return };
    let mut command = place.pagemill_run(&[], idle);
    command.env("PAGEMILL_IDLE", "off");
    let (mut guard, pid) = start_idle(&place, group.enter(&command));
    // With 100 MiB more the limit is near, and free memory becomes cold.
    let mut neighbour = Command::new(&touch);
    neighbour.args(["100", "3600000"]).stdout(Stdio::null());
    let mut neighbour = Guard::new(group.enter(&neighbour));
    wait_for(&place, pid, "offered", 80 * MIB);
    hold_up(&place, pid);
    signal(pid, "STOP");
    let mut greedy = Command::new(&touch);
    greedy.args(["100", "0"]);
    let end = finish(group.enter(&greedy), STUCK_AFTER);
    assert!(end.status.success(), "{} {}", end.status, end.err);
    signal(pid, "CONT");
    // The helper detects the memory that is gone.
    wait_for(&place, pid, "taken", 20 * MIB);
    assert!(!guard.has_ended() && !neighbour.has_ended(), "a process was killed");
}

/// Far from its group's limit, a process does not wake up to check it: the kernel notifies it when the limit gets near.
#[test]
fn thresholds_wake_the_helper() {
    let place = Place::new();
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
    // Other causes wake it, too: a shortage of the whole machine, and page faults that wait for a disk. They end soon,
    // so the measurement is repeated.
    let start = Instant::now();
    loop {
        let (begun, before) = (Instant::now(), switches(pid));
        std::thread::sleep(Duration::from_secs(3));
        let (woken, seconds) = (switches(pid) - before, begun.elapsed().as_secs());
        if woken <= 2 * seconds + 2 {
            break;
        }
        assert!(start.elapsed() < STUCK_AFTER, "woken {woken} times in {seconds} s");
    }
    let mut greedy = Command::new(&touch);
    greedy.args(["200", "0"]);
    let end = finish(group.enter(&greedy), STUCK_AFTER);
    assert!(end.status.success() && !guard.has_ended(), "{} {}", end.status, end.err);
    wait_for(&place, pid, "signs", 1);
    // The kernel may have taken the offered memory first.
    wait_for(&place, pid, "given_for_group+taken", 30 * MIB);
}

/// A move to another group and a change of that group's limit are both detected.
#[test]
fn another_group_is_noticed() {
    let place = Place::new();
    let Some(idle) = place.compile("idle.c", &[]) else { return };
    let Some(group) = Group::new("moved", 512 * MIB) else { return };
    let mut command = place.pagemill_run(&[], idle);
    command.env("PAGEMILL_IDLE", "off");
    let (_guard, pid) = start_idle(&place, command);
    group.take(pid);
    wait_for(&place, pid, "limits_changed", 1);
    group.set_limit(256 * MIB).unwrap();
    wait_for(&place, pid, "limits_changed", 2);
}

/// The number of voluntary context switches of a process.
fn switches(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok());
    let counts = |text: String| {
        let count = |line: &str| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok();
        text.lines().filter_map(count).sum::<u64>()
    };
    status.map(counts).sum()
}

/// A process that freed much memory and then sleeps returns it after the configured time, and does not wake up
/// afterwards.
#[test]
fn an_idle_process_gives_back() {
    let place = Place::new();
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
            assert!(start.elapsed() < STUCK_AFTER, "never: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait("much is free", &|pid| figure(&place, pid, "heap_free").is_some_and(|bytes| bytes > 90 * MIB));
    let pid = wait("it went back", &|pid| figure(&place, pid, "giveable").is_some_and(|bytes| bytes < 2 * MIB));
    let resident = figure(&place, pid, "resident").unwrap();
    assert!(resident < 20 * MIB, "{resident}");
    wait("no process is woken any more", &|pid| {
        let before = switches(pid);
        std::thread::sleep(Duration::from_secs(3));
        switches(pid) == before
    });
}

/// Overcommitted memory is accounted only when it is freed, and no allocator call follows. It is returned all the same.
#[test]
fn overcommitted_memory_is_given_back_after_a_last_free() {
    let place = Place::new();
    let Some(program) = place.compile("overcommitted.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], program);
    command.env("PAGEMILL_IDLE", "1").env_remove("PAGEMILL_AFTER").stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    loop {
        if let Some(pid) = child_of(guard.id())
            && figure(&place, pid, "resident_peak").is_some_and(|bytes| bytes > 170 * MIB)
        {
            // On a busy machine, another reason may come first.
            let given = "given_for_age+given_for_stall+given_for_machine+given_for_group+taken";
            return wait_for(&place, pid, given, 170 * MIB);
        }
        assert!(start.elapsed() < STUCK_AFTER, "nothing was published");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A pipe in place of the figures does not block a command.
#[test]
fn a_pipe_in_the_way_stops_no_process() {
    let place = Place::new();
    let Some(idle) = place.compile("idle.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], idle);
    command.env("PAGEMILL_IDLE", "off");
    let (mut guard, pid) = start_idle(&place, command);
    let script = format!("f=$(find {} -name '{pid}-*') && rm $f && mkfifo $f", place.path("runtime").display());
    assert!(common::shell(&script).success());
    for command in ["meminfo", "vmstat", "trace"] {
        let mut look = place.command(common::PAGEMILL);
        look.args([command, &pid.to_string()]);
        assert_eq!(finish(look, STUCK_AFTER).code(), 2, "{command}");
    }
    signal(pid, "TERM");
    guard.wait(STUCK_AFTER);
}

/// Figures add up, and both commands print JSON. A process without figures is reported as such.
#[test]
fn figures_add_up() {
    let place = Place::new();
    let Some(program) = place.compile("idle.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], program);
    command.env("PAGEMILL_IDLE", "off").env("PAGEMILL_WATCH", "off");
    let (_guard, pid) = start_idle(&place, command);
    // There is no demand for its free memory, and it may keep it, so its helper sleeps. A second of spinning would be
    // 100 ticks.
    let ticks = || -> u64 {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = ticks();
    std::thread::sleep(Duration::from_secs(1));
    assert!(ticks() - before < 50, "the helper does not sleep");
    let sum: u64 = ["heap", "small", "c_library"].iter().map(|name| figure(&place, pid, name).unwrap()).sum();
    let (resident, giveable, net) = (
        figure(&place, pid, "resident").unwrap(),
        figure(&place, pid, "giveable").unwrap(),
        figure(&place, pid, "net").unwrap(),
    );
    assert_eq!((resident, net), (sum, resident - giveable));
    let mut vmstat = place.command(common::PAGEMILL);
    vmstat.args(["vmstat", "--json", &pid.to_string()]);
    let vmstat: Value = serde_json::from_str(&finish(vmstat, STUCK_AFTER).out).unwrap();
    assert!(vmstat["slots_fresh"].as_u64().unwrap() > 0, "{vmstat}");
    for command in ["meminfo", "vmstat"] {
        let mut none = place.command(common::PAGEMILL);
        none.args([command, "1"]);
        let end = finish(none, STUCK_AFTER);
        assert_eq!(end.code(), 2);
        assert!(end.err.contains("no figures"), "{}", end.err);
    }
}

/// Starts a process that frees `mib` MiB of small pieces and goes on working; waits until the figures show that.
/// Returns its id, too.
fn start_freed(place: &Place, command: Command, mib: u64) -> (Guard, u32) {
    let mut command = command;
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    loop {
        if let Some(pid) = child_of(guard.id())
            && figure(place, pid, "giveable").is_some_and(|bytes| bytes > mib * MIB * 9 / 10)
        {
            return (guard, pid);
        }
        assert!(start.elapsed() < STUCK_AFTER, "nothing was published");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Freed small pieces make room for a process without Pagemill before the kernel kills any process. The amount of free
/// memory is unknown without measuring, so the alarms must be on. `keep`: nothing is returned by age.
#[test]
fn freed_small_pieces_make_room_for_a_neighbour() {
    let place = Place::new();
    let (Some(freed), Some(touch)) = (place.compile("freed.c", &[]), place.compile("touch.c", &[])) else { return };
    for size in ["64", "512", "4096", "16384", "65536"] {
        let Some(group) = Group::new(&format!("pieces{size}"), 140 * MIB) else { return };
        let mut command = place.pagemill_run(&[], &freed);
        command.args([size, "90"]).env("PAGEMILL_RETURN", "keep").env_remove("PAGEMILL_AFTER");
        let (mut guard, pid) = start_freed(&place, group.enter(&command), 90);
        let mut greedy = Command::new(&touch);
        greedy.args(["70", "0"]);
        let end = finish(group.enter(&greedy), STUCK_AFTER);
        assert!(end.status.success(), "{size} bytes each: {} {}", end.status, end.err);
        assert!(!guard.has_ended(), "{size} bytes each: it was killed");
        wait_for(&place, pid, "given_for_group", 10 * MIB);
    }
}

/// A process that works a fifth of the time returns memory that it freed and does not reuse, by the kernel's count.
#[test]
fn a_busy_process_returns_what_it_does_not_reuse() {
    let place = Place::new();
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
            assert!(start.elapsed() < STUCK_AFTER, "{size} bytes each: {:?} resident", resident());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
