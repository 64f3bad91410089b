//! The governor on real kernels: control groups, idleness, and what is to be seen of them.

mod common;

use common::{Guard, Place, STUCK_AFTER, finish};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A control group with a memory limit, removed at the end. Its members are processes of one test.
struct Group(PathBuf);

impl Group {
    /// Says why not, and returns `None`, where groups cannot be made.
    fn new(name: &str, limit_bytes: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = |controller: &str| {
            own.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let names = fields.next()?;
                (names.split(',').any(|name| name == controller)).then(|| fields.next().map(str::to_owned))?
            })
        };
        let (folder, limit_file) = match path("memory") {
            Some(path) => (format!("/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"),
            None => (format!("/sys/fs/cgroup{}", path("").unwrap_or_default()), "memory.max"),
        };
        let folder = Path::new(&folder).join(format!("pagemill-test-{}-{name}", std::process::id()));
        if let Err(error) = fs::create_dir(&folder) {
            println!("skipped: no control group can be made: {error}");
            return None;
        }
        let group = Self(folder);
        if let Err(error) = fs::write(group.0.join(limit_file), limit_bytes.to_string()) {
            println!("skipped: no limit can be set: {error}");
            return None;
        }
        Some(group)
    }

    /// The command, started inside.
    fn enter(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        let script = format!("echo 0 > {}/cgroup.procs && exec \"$@\"", self.0.display());
        inside.args(["-c", &script, "sh"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.stdin(Stdio::null());
        inside
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The dead leave a group a moment after they have ended.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Far more is freed than fits beside what is held; the limit is the group's alone. Nobody is killed, nothing refused.
#[test]
fn a_groups_limit_is_survived() {
    let place = Place::new();
    let Some(program) = place.compile("phases.c", &[]) else { return };
    for threads in ["2", "4", "8"] {
        let Some(group) = Group::new(&format!("phases{threads}"), 128 * MIB) else { return };
        let report = place.path("report.json");
        let mut command = place.pagemill_run(&["--json", "--output", report.to_str().unwrap()], &program);
        command.args([threads, "72", "3000"]).env_remove("PAGEMILL_AFTER");
        let end = finish(group.enter(&command), STUCK_AFTER);
        assert!(end.status.success(), "{threads} threads: {} {}", end.status, end.err);
        let report: Value = serde_json::from_str(&fs::read_to_string(place.path("report.json")).unwrap()).unwrap();
        let counters = &report["counters"];
        assert_eq!(counters["limit_refused"], 0, "{report}");
        assert!(counters["given_for_group"].as_u64().unwrap() > 0, "nothing was given for the group: {report}");
    }
}

/// Reads one figure of a running process.
fn figure(place: &Place, pid: u32, name: &str) -> Option<u64> {
    let mut command = place.command(common::PAGEMILL);
    command.args(["meminfo", "--json", &pid.to_string()]);
    let end = finish(command, STUCK_AFTER);
    let figures: Value = serde_json::from_str(&end.out).ok()?;
    figures[name].as_u64()
}

/// The one child of a process.
fn child_of(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.split_whitespace().next()?.parse().ok()
}

/// A process that freed much and then sleeps gives it back after the time told, and is woken by nobody afterwards.
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
            assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait("much is free", &|pid| figure(&place, pid, "heap_free").is_some_and(|bytes| bytes > 90 * MIB));
    let pid = wait("it went back", &|pid| figure(&place, pid, "giveable").is_some_and(|bytes| bytes < 2 * MIB));
    let resident = figure(&place, pid, "resident").unwrap();
    assert!(resident < 20 * MIB, "{resident}");
    let switches = || -> u64 {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let status = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok());
        status
            .flat_map(|text| {
                text.lines()
                    .filter_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok())
                    .collect::<Vec<_>>()
            })
            .sum()
    };
    std::thread::sleep(Duration::from_millis(1500));
    let before = switches();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(switches() - before, 0, "somebody was woken");
}

/// Figures add up, and both commands speak JSON; who publishes nothing is told so.
#[test]
fn figures_add_up() {
    let place = Place::new();
    let Some(program) = place.compile("idle.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], program);
    command.env("PAGEMILL_IDLE", "off").env("PAGEMILL_WATCH", "off").stdout(Stdio::null()).stderr(Stdio::null());
    let guard = Guard::new(command);
    let start = Instant::now();
    let pid = loop {
        if let Some(pid) = child_of(guard.id())
            && figure(&place, pid, "heap_free").is_some_and(|bytes| bytes > 90 * MIB)
        {
            break pid;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "nothing was published");
        std::thread::sleep(Duration::from_millis(20));
    };
    // Nobody wants what it could give, and it may keep it: its helper sleeps. A second of spinning would be 100 ticks.
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
