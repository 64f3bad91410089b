//! The limits of `pagemill run`, and its report on memory outside the allocator.

mod common;

use common::group::Group;
use common::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Returns the JSON report of a run, which must end with the exit status `status`.
fn report(command: Command, status: i32) -> Value {
    let end = finish(command, TIMEOUT);
    assert_eq!(end.code(), status, "{}", end.err);
    let line = end.err.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| panic!("no report: {}", end.err));
    serde_json::from_str(line).unwrap()
}

fn bytes(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no {name}: {report}"))
}

fn is_running(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains('Z'))
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the command `pagemill run OPTIONS -- mapped MIB 0`. Its program `mapped` maps and touches `mib` MiB of
/// memory without malloc.
fn mapped_command(place: &TestFolder, options: &[&str], mib: &str) -> Option<Command> {
    let program = place.compile("mapped.c", &[])?;
    let mut command = place.pagemill_run(options, program);
    command.args([mib, "0"]);
    Some(command)
}

mod refused_programs {
    use super::*;

    /// Compiles a statically linked program that exits with status 7.
    fn static_program(place: &TestFolder) -> Option<PathBuf> {
        fs::write(place.path("static.c"), "int main(void) { return 7; }\n").unwrap();
        let mut compiler = place.command("cc");
        compiler.args(["-static", "static.c", "-o", "static"]);
        if common::is_missing("cc") || !finish(compiler, TIMEOUT).status.success() {
            println!("skipped: no static program can be made");
            return None;
        }
        Some(place.path("static"))
    }

    #[test]
    fn a_program_that_a_limit_cannot_bound_is_refused() {
        let place = TestFolder::new();
        let Some(program) = static_program(&place) else { return };
        let end = finish(place.pagemill_run(&["--limit", "10M"], &program), TIMEOUT);
        assert_eq!((end.code(), end.err.lines().count()), (126, 1), "{}", end.err);
        for words in ["is linked statically", "--limit has no effect on it", "--limit-kernel", "--force"] {
            assert!(end.err.contains(words), "{}", end.err);
        }
        let mut by_variable = place.pagemill_run(&[], &program);
        by_variable.env("PAGEMILL_LIMIT", "10M");
        assert_eq!(finish(by_variable, TIMEOUT).code(), 126);
        let end = finish(place.pagemill_run(&["--limit", "10M", "--force"], &program), TIMEOUT);
        assert_eq!(end.code(), 7);
        assert!(end.err.contains("it runs, but on its own allocator"), "{}", end.err);
        place.assert_no_files_left();
    }

    /// Inside a limit that the kernel enforces, static programs must not be refused, not even by an inner `run`.
    #[test]
    fn static_programs_run_under_a_kernel_limit() {
        let place = TestFolder::new();
        let Some(program) = static_program(&place) else { return };
        let Some(_group) = Group::new("reach", 256 << 20) else { return };
        let options = ["--limit", "10M", "--limit-kernel", "64M"];
        assert_eq!(finish(place.pagemill_run(&options, &program), TIMEOUT).code(), 7);
        let script = format!("{PAGEMILL} run --limit 5M -- {}", program.display());
        assert_eq!(finish(place.pagemill_run_shell(&options, &script), TIMEOUT).code(), 7);
    }

    #[test]
    fn a_set_uid_program_is_refused_under_a_limit() {
        if !common::is_root() {
            println!("skipped: only root can give a program to another user");
            return;
        }
        let place = TestFolder::new();
        let mut command = place.command("sh");
        command.args(["-c", "cp \"$(command -v id)\" other && chown 65534 other && chmod 4755 other"]);
        finish(command, TIMEOUT).assert_success();
        let end = finish(place.pagemill_run(&["--limit", "1G"], "./other"), TIMEOUT);
        assert_eq!((end.code(), end.out.as_str()), (126, ""));
        assert!(end.err.contains("set-uid"), "{}", end.err);
    }
}

mod children {
    use super::*;

    /// A child inherits free memory at a fork. The memory must be charged to the child when the child allocates it,
    /// whether slots share blocks or have blocks of their own. So the limit bounds all children together.
    #[test]
    fn children_are_bounded_together() {
        let place = TestFolder::new();
        let Some(program) = place.compile("forked.c", &[]) else { return };
        // A slot of 4 MiB is admitted untouched, so each child may have one slot more than the limit allows.
        for (kib, most_mib) in [("256", 120), ("4096", 120 + 4 * 4)] {
            let mut command = place.pagemill_run(&["--limit", "120M"], &program);
            command.args(["100", kib, "4"]);
            let end = finish(command, TIMEOUT);
            end.assert_success();
            let mib: u64 = end.out.trim().parse().unwrap();
            assert!((60..=most_mib).contains(&mib), "{kib} KiB: {mib} MiB");
        }
    }
}

mod sizes {
    use super::*;

    #[test]
    fn percentages_out_of_range_are_usage_errors() {
        let place = TestFolder::new();
        for option in ["--limit", "--limit-kernel"] {
            for size in ["0%", "101%", "1.5%", "%", "0", "x"] {
                let end = finish(place.pagemill_run_shell(&[option, size], "echo started"), TIMEOUT);
                assert_eq!((end.code(), end.out.as_str()), (2, ""), "{option} {size}: {}", end.err);
            }
        }
    }

    /// A percentage must refer to the smallest limit that applies to the process, or to the machine's memory if that is
    /// smaller.
    #[test]
    fn a_percentage_refers_to_the_smallest_limit() {
        let place = TestFolder::new();
        let Some(group) = Group::new("share", 256 << 20) else { return };
        let inside = |options: &[&str]| group.enter(&place.pagemill_run(options, "true"));
        assert_eq!(bytes(&report(inside(&["--limit", "50%", "--json"]), 0), "limit_bytes"), 128 * MIB);
        let mut by_variable = inside(&["--json"]);
        by_variable.env("PAGEMILL_LIMIT", "25%");
        assert_eq!(bytes(&report(by_variable, 0), "limit_bytes"), 64 * MIB);
        let limit = bytes(&report(inside(&["--limit-kernel", "50%", "--json"]), 0)["kernel_limit"], "limit_bytes");
        assert_eq!(limit, 128 * MIB);
        group.set_limit(1 << 50).unwrap();
        let all = bytes(&report(inside(&["--limit", "100%", "--json"]), 0), "limit_bytes");
        let of_half = bytes(&report(inside(&["--limit", "50%", "--json"]), 0), "limit_bytes");
        assert!(all < 1 << 50 && of_half == all / 2, "{all} {of_half}");
    }
}

mod return_policy {
    use super::*;

    #[test]
    fn the_policy_is_passed_on() {
        let place = TestFolder::new();
        for when in ["keep", "eager", "balanced", "balanced=3"] {
            let end = finish(place.pagemill_run_shell(&["--return", when], "echo $PAGEMILL_RETURN"), TIMEOUT);
            assert_eq!((end.code(), end.out.trim()), (0, when), "{}", end.err);
        }
        let mut wrong = place.pagemill_run_shell(&[], "echo started");
        wrong.env("PAGEMILL_RETURN", "soon");
        let end = finish(wrong, TIMEOUT);
        assert_eq!((end.code(), end.out.as_str()), (2, ""));
        assert!(end.err.contains("PAGEMILL_RETURN: expected keep, eager, balanced"), "{}", end.err);
        let end = finish(place.pagemill_run_shell(&["--return", "balanced=0"], "echo started"), TIMEOUT);
        assert_eq!((end.code(), end.out.as_str()), (2, ""));
    }
}

mod memory_outside_malloc {
    use super::*;

    /// Memory that a program maps without malloc can exceed the limit. Without a report, a line on standard error must
    /// say so. With a report, as text or JSON, the report must say it instead.
    #[test]
    fn exceeding_a_limit_is_reported() {
        let place = TestFolder::new();
        let Some(command) = mapped_command(&place, &["--limit", "64M"], "200") else { return };
        let end = finish(command, TIMEOUT);
        end.assert_success();
        assert_eq!(end.err.lines().count(), 1, "{}", end.err);
        for words in
            ["memory outside the allocator exceeded --limit 64 MiB by ", "most in mapped.c.out (", "--limit-kernel"]
        {
            assert!(end.err.contains(words), "{}", end.err);
        }

        let report = report(mapped_command(&place, &["--limit", "64M", "--json"], "200").unwrap(), 0);
        let over = &report["over_limit"];
        assert!((100 * MIB..150 * MIB).contains(&bytes(over, "bytes")), "{report}");
        assert_eq!(bytes(over, "held_bytes"), bytes(over, "bytes") + 64 * MIB);
        assert!(bytes(over, "outside_allocator_bytes") > 100 * MIB, "{report}");
        assert_eq!(over["largest"][0]["name"], "mapped.c.out", "{report}");
        assert!(bytes(&report, "peak_bytes") < 16 * MIB, "the allocator stayed below its limit: {report}");

        let end = finish(mapped_command(&place, &["--limit", "64M", "--report"], "200").unwrap(), TIMEOUT);
        assert!(end.err.lines().any(|line| line.trim_start().starts_with("over the limit")), "{}", end.err);
        assert!(!end.err.contains("--limit-kernel limits"), "reported only once: {}", end.err);
        place.assert_no_files_left();
    }

    /// A program and its children share almost all their memory. The shared memory must count once, so the process tree
    /// must not exceed the limit.
    #[test]
    fn memory_that_processes_share_counts_once() {
        let place = TestFolder::new();
        if common::is_missing("python3") {
            return;
        }
        // The program shares 100 MiB with four children, which live long enough to be sampled.
        let script = "import os, time\nheld = bytearray(100 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\n\
                      for _ in range(4):\n  if os.fork() == 0: time.sleep(0.5); os._exit(0)\nfor _ in range(4): os.wait()\n";
        let mut command = place.pagemill_run(&["--limit", "160M", "--json"], "python3");
        command.args(["-c", script]);
        let report = report(command, 0);
        assert!(report["over_limit"].is_null(), "{report}");
    }
}

mod reports {
    use super::*;

    /// Two concurrent children map memory without malloc. The report must have the process tree's memory as the kernel
    /// counts it, which includes that memory, and a row for each child.
    #[test]
    fn the_report_has_the_kernels_count_of_the_tree() {
        let place = TestFolder::new();
        let Some(program) = place.compile("mapped.c", &[]) else { return };
        let program = program.display();
        let script = format!("{program} 60 $PPID & {program} 90 $PPID & wait");
        let json = report(place.pagemill_run_shell(&["--json"], &script), 0);
        assert!((150 * MIB..200 * MIB).contains(&bytes(&json, "tree_resident_peak_bytes")), "{json}");
        assert!((150 * MIB..200 * MIB).contains(&bytes(&json, "tree_anonymous_peak_bytes")), "{json}");
        assert!(bytes(&json, "tree_outside_allocator_bytes") > 100 * MIB, "{json}");
        assert!((90 * MIB..110 * MIB).contains(&bytes(&json, "max_resident_bytes")), "{json}");
        assert!(bytes(&json, "peak_bytes") < 16 * MIB, "{json}");
        let rows = json["largest_processes"].as_array().unwrap();
        let held: Vec<_> = rows.iter().take(2).map(|row| bytes(row, "resident_peak_bytes") / MIB).collect();
        assert!((90..110).contains(&held[0]) && (60..80).contains(&held[1]), "{json}");
        assert!(rows.iter().take(2).all(|row| row["name"] == "mapped.c.out" && row["running"] == false), "{json}");

        let end = finish(place.pagemill_run_shell(&["--report"], &script), TIMEOUT);
        for row in ["resident peak", "without files", "not allocator's", "largest process", "peak", "largest processes"]
        {
            assert!(end.err.lines().any(|line| line.trim_start().starts_with(row)), "{row}: {}", end.err);
        }
    }

    /// A process that does not load the preload library must also be counted and listed.
    #[test]
    fn processes_without_statistics_are_listed() {
        let place = TestFolder::new();
        let Some(program) = place.compile("mapped.c", &[]) else { return };
        let script = format!("unset LD_PRELOAD PAGEMILL_TREE; {} 80 $PPID; true", program.display());
        let json = report(place.pagemill_run_shell(&["--json"], &script), 0);
        let first = &json["largest_processes"][0];
        assert_eq!((&first["name"], &first["allocator_peak_bytes"]), (&"mapped.c.out".into(), &Value::Null), "{json}");
        assert!(bytes(first, "resident_peak_bytes") > 80 * MIB, "{json}");
    }
}

mod kernel_limit {
    use super::*;

    /// Returns the control groups that `run` commands created inside the group of this test.
    fn run_groups(parent: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(parent).unwrap().flatten().map(|entry| entry.path());
        entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("pagemill-run-")).collect()
    }

    /// The kernel must kill a process that exceeds the limit. `run` must report that and remove the group.
    #[test]
    fn the_kernel_kills_above_the_limit() {
        let place = TestFolder::new();
        let Some(group) = Group::new("hog", 512 << 20) else { return };
        let Some(command) = mapped_command(&place, &["--limit-kernel", "64M"], "200") else { return };
        let end = finish(group.enter(&command), TIMEOUT);
        assert_eq!(end.code(), 137, "{}", end.err);
        assert_eq!(end.err, "pagemill: the kernel killed 1 process at --limit-kernel 64 MiB\n");
        assert_eq!(run_groups(&group.folder), Vec::<PathBuf>::new());

        let command = mapped_command(&place, &["--limit-kernel", "64M", "--json"], "200").unwrap();
        let json = report(group.enter(&command), 137);
        let kernel = &json["kernel_limit"];
        assert_eq!((bytes(kernel, "limit_bytes"), bytes(kernel, "kills")), (64 * MIB, 1), "{json}");
        assert!((60 * MIB..=64 * MIB).contains(&bytes(kernel, "peak_bytes")), "{json}");
        finish(group.enter(&place.pagemill_run(&["--limit-kernel", "64M"], "true")), TIMEOUT).assert_success();
        assert_eq!(run_groups(&group.folder), Vec::<PathBuf>::new());
        place.assert_no_files_left();
    }

    /// If `run` is killed, its guard process must kill the process tree, if the kernel has `cgroup.kill`. A later
    /// command must remove the group.
    #[test]
    fn a_killed_run_leaves_no_group() {
        let place = TestFolder::new();
        let Some(group) = Group::new("killed", 512 << 20) else { return };
        // A shell closes the standard input of background commands, but not other descriptors, so the
        // grandchild reads descriptor 3.
        let script = "exec 3<&0; cat <&3 >/dev/null & echo $!; wait";
        // The shell that enters the group executes the command. Its input stays open.
        let mut command = group.enter(&place.pagemill_run_shell(&["--limit-kernel", "64M"], script));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let input = guard.child().stdin.take();
        let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        let grandchild = lines.next().unwrap().unwrap();
        let made = run_groups(&group.folder);
        assert_eq!(made.len(), 1);
        let kills_trees = made[0].join("cgroup.kill").exists();
        guard.signal("KILL");
        guard.wait(TIMEOUT);
        if kills_trees {
            wait_until("the tree is killed", || !is_running(&grandchild));
        } else {
            assert!(is_running(&grandchild), "only the program itself is killed");
        }
        drop(input);
        wait_until("the grandchild ends", || !is_running(&grandchild));
        let next = || {
            let mut doctor = place.command(PAGEMILL);
            doctor.arg("doctor");
            finish(group.enter(&doctor), TIMEOUT)
        };
        wait_until("the group is removed", || {
            next();
            run_groups(&group.folder).is_empty()
        });
    }

    /// Every command must remove the control groups of `run` commands that have ended. The command `run` does so only
    /// before it creates a group. Other groups must stay.
    #[test]
    fn groups_of_ended_runs_are_removed() {
        let place = TestFolder::new();
        let Some(group) = Group::new("sweep", 512 << 20) else { return };
        let (dead, other) = (group.folder.join("pagemill-run-1073741824-1"), group.folder.join("other"));
        fs::create_dir_all(&dead).unwrap();
        fs::create_dir_all(&other).unwrap();
        let mut doctor = place.command(PAGEMILL);
        doctor.args(["doctor", "--json"]);
        finish(group.enter(&doctor), TIMEOUT);
        let left = [dead.exists(), other.exists()];
        fs::remove_dir(other).unwrap();
        assert_eq!(left, [false, true]);
    }

    /// No control group can be created. The exit status must be 126, the message must have the reason, and the program
    /// must not be started.
    #[test]
    fn an_impossible_limit_is_explained() {
        if !common::may_mount() {
            return;
        }
        let place = TestFolder::new();
        let run = format!("{PAGEMILL} run --limit-kernel 64M -- touch ran");
        for mount in ["mount -t tmpfs none /sys/fs/cgroup", "umount -a -t cgroup,cgroup2"] {
            let mut command = place.command("unshare");
            command.args(["-m", "sh", "-c", &format!("{mount} && {run}")]);
            let end = finish(command, TIMEOUT);
            assert!(end.code() == 126 && !place.path("ran").exists(), "{mount}: {} {}", end.status, end.err);
            assert!(end.err.contains("--limit-kernel is not available: no control group"), "{mount}: {}", end.err);
        }
    }

    /// Under systemd, `systemd-run` must start the program, after a trial scope has shown that the limit is applied. In
    /// this test, a script that enters a control group replaces `systemd-run`.
    #[test]
    fn systemd_creates_a_scope() {
        if !common::may_mount() {
            return;
        }
        let place = TestFolder::new();
        let Some(group) = Group::new("scope", 64 << 20) else { return };
        let script = format!(
            "#!/bin/sh\necho \"$*\" >> calls\necho 0 > {}/cgroup.procs\n\
             while [ \"$1\" != -- ]; do shift; done\nshift\nexec \"$@\"\n",
            group.folder.display()
        );
        place.script("systemd-run", &script);
        let booted = "mount -t tmpfs none /run && mkdir -p /run/systemd/system && PATH=.:$PATH && ";
        let run = |limit: &str| {
            let mut command = place.command("unshare");
            let run = format!("{PAGEMILL} run --limit-kernel {limit} -- sh -c 'cat /proc/self/cgroup; exit 5'");
            command.args(["-m", "sh", "-c", &format!("{booted}{run}")]);
            finish(command, TIMEOUT)
        };
        let end = run("64M");
        assert_eq!(end.code(), 5, "{}", end.err);
        let name = group.folder.file_name().unwrap().to_str().unwrap();
        assert!(end.out.contains(name), "the program is inside: {}", end.out);
        let calls = fs::read_to_string(place.path("calls")).unwrap();
        assert_eq!(calls.lines().count(), 2, "{calls}");
        assert!(calls.lines().all(|call| call.contains("--scope") && call.contains("MemoryMax=67108864")), "{calls}");
        assert!(calls.contains("--unit=pagemill-run-"), "{calls}");
        // A scope without the requested limit must not be accepted; `run` must create a group instead.
        let end = run("32M");
        assert_eq!(end.code(), 5, "{}", end.err);
        assert!(end.out.contains("/pagemill-run-"), "{}", end.out);
    }
}

/// If `run` is killed, its program must be killed, too.
#[test]
fn a_killed_run_kills_its_program() {
    let place = TestFolder::new();
    let mut command = place.pagemill_run_shell(&[], "echo $$; exec cat");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut guard = Guard::new(command);
    // The program's input stays open, since its end would end the program.
    let _input = guard.child().stdin.take();
    let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
    let program = lines.next().unwrap().unwrap();
    assert!(is_running(&program));
    guard.signal("KILL");
    guard.wait(TIMEOUT);
    wait_until("the program is killed", || !is_running(&program));
}
