//! `pagemill run` as a user sees it: exit statuses, streams, signals, reports, and limits of a process tree.

mod common;

use common::{
    End, Guard, PAGEMILL, TIMEOUT, TestFolder, await_end_of, finish, finish_bytes, finish_with_input, is_ignored,
};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Returns the JSON report of a `pagemill run`, which must succeed. `run` returns the command with the given options.
fn report(mut run: impl FnMut(&[&str]) -> Command) -> Value {
    let end = finish(run(&["--json"]), TIMEOUT);
    end.assert_success();
    report_in_stderr(&end)
}

/// Returns the report, a JSON object, from the standard error of a run.
fn report_in_stderr(end: &End) -> Value {
    let line = end.err.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| panic!("no report: {}", end.err));
    serde_json::from_str(line).unwrap()
}

fn bytes(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("no {name}: {report}"))
}

const MIB: u64 = 1 << 20;

mod status {
    use super::*;

    #[test]
    fn every_status_is_passed_on() {
        let place = TestFolder::new();
        for status in 0..=255 {
            let end = finish(place.pagemill_run_shell(&[], &format!("exit {status}")), TIMEOUT);
            assert_eq!((end.code(), end.err.as_str()), (status, ""));
        }
        place.assert_no_files_left();
    }

    #[test]
    fn a_killed_program_gives_128_plus_the_signal() {
        let place = TestFolder::new();
        for (name, number) in
            [("HUP", 1), ("INT", 2), ("ABRT", 6), ("KILL", 9), ("SEGV", 11), ("PIPE", 13), ("TERM", 15)]
        {
            if is_ignored(number) {
                println!("skipped: {name} is ignored here, and so by every program that starts from here");
                continue;
            }
            let end = finish(place.pagemill_run_shell(&[], &format!("kill -s {name} $$; sleep 60")), TIMEOUT);
            assert_eq!(end.code(), 128 + number, "{name}");
        }
        place.assert_no_files_left();
    }

    #[test]
    fn a_failed_start_has_the_status_of_a_shell() {
        let place = TestFolder::new();
        fs::write(place.path("plain"), "#!/bin/sh\n").unwrap();
        fs::create_dir(place.path("folder")).unwrap();
        for (name, status) in [
            ("no-such-program-anywhere", 127),
            ("./missing", 127),
            ("./missing/deeper", 127),
            ("./plain", 126),
            ("./folder", 126),
        ] {
            let end = finish(place.pagemill_run(&[], name), TIMEOUT);
            assert_eq!(end.code(), status, "{name}: {}", end.err);
            assert!(end.err.starts_with("pagemill: ") && end.err.contains(name), "{name}: {}", end.err);
            assert_eq!(end.err.lines().count(), 1, "{}", end.err);
        }
        place.assert_no_files_left();
    }

    /// Environment variables must have the same effect as the options. An empty variable must have no effect. For an
    /// invalid value, the error must name the variable.
    #[test]
    fn variables_are_read_like_options() {
        let place = TestFolder::new();
        for (name, value, code) in
            [("PAGEMILL_LIMIT", "", 4), ("PAGEMILL_LIMIT", "nonsense", 2), ("PAGEMILL_AFTER", "1.5M", 4)]
        {
            let mut command = place.pagemill_run_shell(&[], "exit 4");
            let end = finish(
                {
                    command.env(name, value);
                    command
                },
                TIMEOUT,
            );
            assert_eq!(end.code(), code, "{name}={value}: {}", end.err);
            assert!(code == 4 || end.err.contains(name), "{}", end.err);
        }
    }

    #[test]
    fn usage_errors_give_2_and_start_nothing() {
        let place = TestFolder::new();
        let wrong: &[&[&str]] = &[
            &["--limit", "0"],
            &["--limit", "0K"],
            &["--limit", ""],
            &["--limit", "many"],
            &["--limit", "12Q"],
            &["--limit", "-5"],
            &["--limit=-5"],
            &["--limit", "1..5M"],
            &["--limit", "99999999999999999999"],
            &["--limit", "99999999999T"],
            &["--limit", "NaN"],
            &["--limit", "inf"],
            &["--page-size", "48K"],
            &["--page-size", "0"],
            &["--page-size", "2K"],
            &["--page-size", "16M"],
            &["--page-size", "large"],
            &["--nodes", "0"],
            &["--nodes", "-1"],
        ];
        for options in wrong {
            let end = finish(place.pagemill_run_shell(options, "echo started"), TIMEOUT);
            assert_eq!((end.code(), end.out.as_str()), (2, ""), "{options:?}: {}", end.err);
            assert!(!end.err.is_empty());
        }
        let of_flags = [("PAGEMILL_LIMIT", "0"), ("PAGEMILL_LIMIT", "x"), ("PAGEMILL_PAGE_SIZE", "48K")];
        let of_the_allocator =
            ["RETURN", "IDLE", "HELPER", "WATCH", "HUGE", "NODES"].map(|name| format!("PAGEMILL_{name}"));
        for (name, value) in of_flags.into_iter().chain(of_the_allocator.iter().map(|name| (name.as_str(), "x"))) {
            let mut command = place.pagemill_run_shell(&[], "echo started");
            command.env(name, value);
            let end = finish(command, TIMEOUT);
            assert_eq!((end.code(), end.out.as_str()), (2, ""), "{name}={value}: {}", end.err);
        }
        let mut nothing = place.command(PAGEMILL);
        nothing.args(["run", "--limit", "1G"]);
        assert_eq!(finish(nothing, TIMEOUT).code(), 2);
        place.assert_no_files_left();
    }

    /// A program of the process tree sets a Pagemill variable to an invalid value. The value must be ignored, and no
    /// process may report it.
    #[test]
    fn invalid_variables_in_a_tree_are_not_reported() {
        let place = TestFolder::new();
        let script = "PAGEMILL_HELPER=x; export PAGEMILL_HELPER; for i in 1 2 3 4 5; do sh -c true; done";
        let end = finish(place.pagemill_run_shell(&[], script), TIMEOUT);
        assert_eq!((end.code(), end.err.as_str()), (0, ""));
    }

    /// A misspelt option must be reported, and must not be run as the program.
    #[test]
    fn an_unknown_option_is_a_usage_error() {
        let place = TestFolder::new();
        for option in ["--no-such-option", "--limt=512M", "-x"] {
            let end = finish(place.pagemill_run_shell(&[option], "echo started"), TIMEOUT);
            assert_eq!((end.code(), end.out.as_str()), (2, ""), "{option}: {}", end.err);
        }
    }

    /// If the experiments of `pagemill bench` are not built, the command must show their names and the command that
    /// builds them.
    #[test]
    fn experiments_are_listed_without_being_built() {
        let place = TestFolder::new();
        // There is no `pagemill-bench` in the folder of this link. A copy could not be started while a child that
        // another test has just forked still has the copy open for writing.
        let folder = tempfile::tempdir_in(Path::new(PAGEMILL).parent().unwrap()).unwrap();
        let alone = folder.path().join("pagemill");
        fs::hard_link(PAGEMILL, &alone).unwrap();
        let mut command = place.command(&alone);
        command.args(["bench", "--help"]);
        let end = finish(command, TIMEOUT);
        end.assert_success();
        for word in ["ebizzy", "footprint", "survive", "cargo build --release -p pagemill-cli -p pagemill-bench"] {
            assert!(end.out.contains(word), "{}", end.out);
        }
    }

    #[test]
    fn sizes_with_units_are_accepted() {
        let place = TestFolder::new();
        for size in ["512M", "1.5G", "600000K", "1GiB", "1gb", "1000000000", " 512M "] {
            assert_eq!(finish(place.pagemill_run_shell(&["--limit", size], "exit 5"), TIMEOUT).code(), 5, "{size}");
        }
        for size in ["4K", "64K", "2M", "8M"] {
            assert_eq!(finish(place.pagemill_run_shell(&["--page-size", size], "exit 5"), TIMEOUT).code(), 5, "{size}");
        }
    }
}

mod streams {
    use super::*;

    /// Closed standard streams must stay closed: a program that fails to write without Pagemill must also fail with it.
    #[test]
    fn closed_streams_stay_closed() {
        let place = TestFolder::new();
        let script = format!("{PAGEMILL} run -- echo hi >&-");
        let mut command = place.command("sh");
        command.args(["-c", &script]);
        assert_ne!(finish(command, TIMEOUT).code(), 0);
    }

    #[test]
    fn input_and_output_are_passed_on_unchanged() {
        let place = TestFolder::new();
        let input: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let mut command = place.pagemill_run(&["--limit", "1G"], "cat");
        command.arg("-");
        let (end, out) = finish_bytes(&mut command, input.clone(), TIMEOUT);
        end.assert_success();
        assert!(out == input, "{} bytes of {}", out.len(), input.len());
        assert_eq!(end.err, "");
    }

    #[test]
    fn arguments_and_folder_are_passed_on_unchanged() {
        let place = TestFolder::new();
        let mut command = place.pagemill_run(&[], "printf");
        command.args(["%s|", "--limit", "0", "--", "-h", "", "two words", "$HOME"]);
        assert_eq!(finish(command, TIMEOUT).out, "--limit|0|--|-h||two words|$HOME|");
        let end = finish(place.pagemill_run(&[], "pwd"), TIMEOUT);
        assert_eq!(fs::canonicalize(end.out.trim()).unwrap(), fs::canonicalize(place.path("")).unwrap());
    }

    #[test]
    fn a_program_may_read_its_input_in_parts() {
        let place = TestFolder::new();
        let end =
            finish_with_input(place.pagemill_run_shell(&[], "read a; read b; echo $b$a"), b"1\n2\n".to_vec(), TIMEOUT);
        assert_eq!(end.out, "21\n");
    }
}

mod signals {
    use super::*;

    /// Checks that a signal to `pagemill run` reaches its program. The program is a shell that prints a line when it is
    /// ready, and another line when the signal arrives.
    fn assert_signal_reaches_the_program(name: &str) {
        let place = TestFolder::new();
        let script = format!("trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done");
        let mut command = place.pagemill_run_shell(&["--limit", "1G"], &script);
        command.stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        guard.signal(name);
        assert_eq!(lines.next().unwrap().unwrap(), format!("got {name}"));
        assert_eq!(guard.wait(TIMEOUT).code(), Some(9), "{name}");
    }

    #[test]
    fn signals_reach_the_program() {
        for (name, number) in [("TERM", 15), ("INT", 2), ("HUP", 1), ("QUIT", 3), ("USR1", 10), ("USR2", 12)] {
            if is_ignored(number) {
                println!("skipped: {name} is ignored here, so no shell can handle it");
                continue;
            }
            assert_signal_reaches_the_program(name);
        }
    }

    #[test]
    fn a_signal_that_ends_the_program_ends_the_command() {
        let place = TestFolder::new();
        let mut command = place.pagemill_run(&[], "sh");
        command.args(["-c", "echo ready; exec sleep 60"]).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        guard.signal("TERM");
        assert_eq!(guard.wait(TIMEOUT).code(), Some(143));
        place.assert_no_files_left();
    }
}

mod reports {
    use super::*;

    #[track_caller]
    fn assert_adds_up(report: &Value) {
        let (peak, giveable) = (bytes(report, "peak_bytes"), bytes(report, "giveable_at_peak_bytes"));
        assert_eq!(bytes(report, "net_peak_bytes"), peak - giveable, "{report}");
        assert!(giveable <= peak, "{report}");
        let largest = report["largest"].as_array().unwrap();
        assert!(largest.len() <= 5 && largest.len() as u64 <= bytes(report, "processes"), "{report}");
        let total = report["counters"].as_object().unwrap();
        let listed: Vec<_> = largest.iter().map(|process| process["counters"].as_object().unwrap()).collect();
        if bytes(report, "processes") == listed.len() as u64 {
            for (name, value) in total.iter().filter(|(name, _)| !name.contains("peak")) {
                let sum: u64 = listed.iter().map(|counters| counters[name].as_u64().unwrap()).sum();
                assert_eq!(value.as_u64(), Some(sum), "{name}: {report}");
            }
        }
    }

    #[test]
    fn allocated_memory_is_reported() {
        let place = TestFolder::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        for (mib, piece_kib, options) in
            [("100", "1024", ""), ("100", "1", ""), ("100", "102400", ""), ("100", "300", "--no-huge")]
        {
            let report = report(|json| {
                let options: Vec<_> = json.iter().copied().chain((!options.is_empty()).then_some(options)).collect();
                let mut command = place.pagemill_run(&options, &program);
                command.args([mib, piece_kib, "free"]);
                command
            });
            assert_adds_up(&report);
            let peak = bytes(&report, "peak_bytes");
            // The program writes to every page of its memory.
            assert!((98 * MIB..125 * MIB).contains(&peak), "{piece_kib} KiB: {report}");
            assert!(bytes(&report, "max_resident_bytes") >= 98 * MIB, "{report}");
            assert_eq!((bytes(&report, "status"), bytes(&report, "processes")), (0, 1), "{report}");
            assert!(report["signal"].is_null() && report["limit_bytes"].is_null(), "{report}");
        }
        place.assert_no_files_left();
    }

    /// Processes that end without exit handlers, by `_exit` or by a signal, must also be reported. A slot of 2 MiB or
    /// more is charged when it is measured. So a slot that is touched just before the end may be missing.
    #[test]
    fn memory_is_reported_however_a_process_ends() {
        let place = TestFolder::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        for (how, status) in [("exit", 0), ("kill", 137)] {
            for piece_kib in ["1024", "1"] {
                let mut command = place.pagemill_run(&["--json"], &program);
                command.args(["100", piece_kib, how]);
                let end = finish(command, TIMEOUT);
                assert_eq!(end.code(), status);
                let report = report_in_stderr(&end);
                assert_adds_up(&report);
                let peak = bytes(&report, "peak_bytes");
                assert!((98 * MIB..125 * MIB).contains(&peak), "{how}, {piece_kib} KiB: {report}");
            }
        }
    }

    /// Memory that is live at the peak and freed later must not count as memory that could have been returned at the
    /// peak.
    #[test]
    fn live_memory_at_the_peak_is_not_giveable() {
        let place = TestFolder::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        for piece_kib in ["102400", "1024", "300", "1"] {
            let report = report(|json| {
                let mut command = place.pagemill_run(json, &program);
                command.args(["100", piece_kib, "free"]);
                command
            });
            assert_adds_up(&report);
            assert!(bytes(&report, "net_peak_bytes") > 85 * MIB, "{piece_kib} KiB: {report}");
        }
    }

    #[test]
    fn all_processes_of_the_tree_are_counted() {
        let place = TestFolder::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        let script = format!("for i in 1 2 3 4 5 6 7; do {} 10 100; done", program.display());
        let report = report(|json| place.pagemill_run_shell(&[json, &["--limit", "700M"]].concat(), &script));
        assert_adds_up(&report);
        assert!(bytes(&report, "processes") >= 8, "{report}");
        assert_eq!(report["largest"].as_array().unwrap().len(), 5);
        assert_eq!(bytes(&report, "limit_bytes"), 700 * MIB);
        let peaks: Vec<_> = report["largest"].as_array().unwrap().iter().map(|process| &process["name"]).collect();
        assert!(peaks.iter().all(|name| name.as_str().unwrap().starts_with("held")), "{peaks:?}");
        // The processes ran one after the other, so the tree's peak is little more than that of one process.
        assert!(bytes(&report, "peak_bytes") < 40 * MIB, "{report}");
    }

    #[test]
    fn concurrent_processes_are_added_up() {
        let place = TestFolder::new();
        let Some(program) = place.compile("sibling.c", &[]) else { return };
        let report = report(|json| {
            let mut command = place.pagemill_run(&[json, &["--limit", "1G"]].concat(), &program);
            command.args(["100", "1024", "100", "1024", "calm"]);
            // The first process must keep its memory until the second one has ended.
            command.env("PAGEMILL_IDLE", "off");
            command
        });
        assert_adds_up(&report);
        assert!((190 * MIB..260 * MIB).contains(&bytes(&report, "peak_bytes")), "{report}");
        // One of the two processes had freed all its memory before the peak.
        assert!((85 * MIB..150 * MIB).contains(&bytes(&report, "net_peak_bytes")), "{report}");
    }

    #[test]
    fn the_text_report_has_its_rows() {
        let place = TestFolder::new();
        let end = finish(place.pagemill_run_shell(&["--report"], "exit 3"), TIMEOUT);
        assert_eq!(end.code(), 3);
        assert!(end.err.starts_with("pagemill: sh: exit 3, "), "{}", end.err);
        for row in ["peak", "could be given", "net peak", "largest process"] {
            assert!(end.err.lines().any(|line| line.trim_start().starts_with(row)), "{row}: {}", end.err);
        }
        let end = finish(place.pagemill_run_shell(&["--report"], "kill -s KILL $$"), TIMEOUT);
        assert_eq!(end.code(), 137);
        assert!(end.err.contains("killed by signal 9"), "{}", end.err);
    }

    #[test]
    fn a_killed_program_is_reported_too() {
        let place = TestFolder::new();
        let end = finish(place.pagemill_run_shell(&["--json"], "kill -s KILL $$"), TIMEOUT);
        let report = report_in_stderr(&end);
        assert_eq!((bytes(&report, "status"), bytes(&report, "signal")), (137, 9));
        assert_adds_up(&report);
    }

    #[test]
    fn a_report_is_written_to_a_file() {
        let place = TestFolder::new();
        let end =
            finish(place.pagemill_run_shell(&["--json", "--output", "report.json"], "echo out; echo err >&2"), TIMEOUT);
        end.assert_success();
        assert_eq!((end.out.as_str(), end.err.as_str()), ("out\n", "err\n"));
        assert_adds_up(&serde_json::from_str(&fs::read_to_string(place.path("report.json")).unwrap()).unwrap());
        let end = finish(place.pagemill_run_shell(&["--output", "report.txt"], "exit 4"), TIMEOUT);
        assert_eq!((end.code(), end.err.as_str()), (4, ""));
        assert!(fs::read_to_string(place.path("report.txt")).unwrap().starts_with("pagemill: sh: exit 4"));
        let end = finish(place.pagemill_run_shell(&["--output", "no/such/folder/report"], "exit 0"), TIMEOUT);
        assert_eq!(end.code(), 2);
        assert!(end.err.contains("no/such/folder/report"), "{}", end.err);
    }

    /// A `pagemill run` with a report starts another `pagemill run` with a report. Both must succeed, and each must
    /// report its own process tree.
    #[test]
    fn nested_runs_report_their_own_trees() {
        let place = TestFolder::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        let script = format!("{PAGEMILL} run --json --output inner.json -- {} 50 100; echo $?", program.display());
        let end = finish(
            place.pagemill_run_shell(&["--limit", "400M", "--json", "--output", "outer.json"], &script),
            TIMEOUT,
        );
        end.assert_success();
        assert!(end.out.ends_with("\n0\n"), "{}", end.out);
        let read =
            |name: &str| -> Value { serde_json::from_str(&fs::read_to_string(place.path(name)).unwrap()).unwrap() };
        let (inner, outer) = (read("inner.json"), read("outer.json"));
        assert_adds_up(&inner);
        assert_adds_up(&outer);
        assert!(bytes(&inner, "peak_bytes") > 49 * MIB, "{inner}");
        assert_eq!(bytes(&inner, "limit_bytes"), 400 * MIB, "the outer limit applies: {inner}");
        place.assert_no_files_left();
    }

    /// An inner `run` requests a higher limit than the outer `run` has. The outer limit must still apply.
    #[test]
    fn an_inner_run_cannot_raise_the_outer_limit() {
        let place = TestFolder::new();
        let script = format!("{PAGEMILL} run --limit 4G --json --output inner.json -- true");
        finish(place.pagemill_run_shell(&["--limit", "300M"], &script), TIMEOUT).assert_success();
        let inner: Value = serde_json::from_str(&fs::read_to_string(place.path("inner.json")).unwrap()).unwrap();
        assert_eq!(bytes(&inner, "limit_bytes"), 300 * MIB, "{inner}");
    }

    /// An inner `run` without a limit and without a report must join the outer process tree. The outer report must
    /// count the memory of its program.
    #[test]
    fn a_plain_inner_run_joins_the_outer_tree() {
        let place = TestFolder::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        let script = format!("{PAGEMILL} run -- {} 50 100", program.display());
        let mut command = place.pagemill_run_shell(&["--limit", "400M", "--json", "--output", "outer.json"], &script);
        command.env_remove("PAGEMILL_AFTER");
        finish(command, TIMEOUT).assert_success();
        let outer: Value = serde_json::from_str(&fs::read_to_string(place.path("outer.json")).unwrap()).unwrap();
        assert!(bytes(&outer, "peak_bytes") > 49 * MIB, "{outer}");
        place.assert_no_files_left();
    }

    /// If the file for the report cannot be created, the program must not be started. If the file cannot be written at
    /// the end, the exit status must still be that of the program.
    #[test]
    fn the_report_file_is_opened_before_the_start() {
        let place = TestFolder::new();
        let end = finish(place.pagemill_run_shell(&["--output", "missing/report"], "touch ran; exit 3"), TIMEOUT);
        assert_eq!((end.code(), place.path("ran").exists()), (2, false), "{}", end.err);
        let end = finish(place.pagemill_run_shell(&["--output", "/dev/full"], "exit 3"), TIMEOUT);
        assert_eq!(end.code(), 3);
        assert!(end.err.contains("cannot be written"), "{}", end.err);
    }

    /// Small processes must be counted in the report, although they publish no statistics.
    #[test]
    fn small_processes_are_counted() {
        let place = TestFolder::new();
        let mut command =
            place.pagemill_run_shell(&["--json", "--output", "report.json"], "for i in 1 2 3 4 5; do /bin/true; done");
        command.env_remove("PAGEMILL_AFTER");
        finish(command, TIMEOUT).assert_success();
        let report: Value = serde_json::from_str(&fs::read_to_string(place.path("report.json")).unwrap()).unwrap();
        assert_eq!(report["processes"], 6, "{report}");
    }
}

mod obstacles {
    use super::*;

    #[test]
    fn a_static_program_is_explained_and_runs() {
        let place = TestFolder::new();
        let source = place.path("static.c");
        fs::write(&source, "int main(void) { return 7; }\n").unwrap();
        let mut compiler = place.command("cc");
        compiler.args(["-static", "static.c", "-o", "static"]);
        if common::is_missing("cc") || !finish(compiler, TIMEOUT).status.success() {
            println!("skipped: no static program can be made");
            return;
        }
        let end = finish(place.pagemill_run(&[], "./static"), TIMEOUT);
        assert_eq!(end.code(), 7);
        assert!(end.err.starts_with("pagemill: ./static is linked statically"), "{}", end.err);
        place.script("script", "#!./static\n");
        let end = finish(place.pagemill_run(&[], "./script"), TIMEOUT);
        assert_eq!(end.code(), 7);
        assert!(end.err.contains("statically"), "{}", end.err);
    }

    #[test]
    fn a_set_uid_program_is_explained_and_runs() {
        if !common::is_root() {
            println!("skipped: only root can give a program to another user");
            return;
        }
        let place = TestFolder::new();
        let make = "cp \"$(command -v id)\" own && cp own other && chown 65534 other && chmod 4755 own other";
        let mut command = place.command("sh");
        command.args(["-c", make]);
        finish(command, TIMEOUT).assert_success();
        let end = finish(place.pagemill_run(&[], "./other"), TIMEOUT);
        assert!(end.err.starts_with("pagemill: ./other is set-uid"), "{}", end.err);
        assert!(end.out.contains("euid=65534"), "{}", end.out);
        let end = finish(place.pagemill_run(&[], "./own"), TIMEOUT);
        assert_eq!(end.err, "", "no change of the user, no message");
    }

    #[test]
    fn the_users_preload_is_kept() {
        let place = TestFolder::new();
        let Some(library) = place.compile("marker.c", &["-shared", "-fPIC"]) else { return };
        let mut with_preload = place.pagemill_run(&[], "env");
        with_preload.env("LD_PRELOAD", &library);
        let end = finish(with_preload, TIMEOUT);
        end.assert_success();
        // The library is loaded into the command itself and into the program.
        assert_eq!(end.err.matches("marker loaded").count(), 2, "{}", end.err);
        let line = end.out.lines().find_map(|line| line.strip_prefix("LD_PRELOAD=")).unwrap();
        let parts: Vec<_> = line.split(':').collect();
        assert_eq!(parts.len(), 2, "{line}");
        assert!(parts[0].ends_with("libpagemill_malloc.so") && parts[1] == library.to_str().unwrap(), "{line}");
    }

    fn command_without_library(place: &TestFolder) -> Command {
        let mut command = place.command(place.install(PAGEMILL, "bin/pagemill"));
        command.args(["run", "--", "sh", "-c", "echo $LD_PRELOAD; grep -c libpagemill /proc/self/maps >/dev/null"]);
        command.env("HOME", place.path("home"));
        command
    }

    #[test]
    fn the_command_extracts_its_library() {
        let place = TestFolder::new();
        let end = finish(command_without_library(&place), TIMEOUT);
        end.assert_success();
        assert!(end.out.starts_with(place.path("cache").to_str().unwrap()), "{}", end.out);
        assert_eq!(common::walk(&place.path("cache/pagemill")).len(), 1);
    }

    #[test]
    fn a_cache_folder_that_cannot_be_written_is_replaced() {
        let place = TestFolder::new();
        fs::write(place.path("file"), "").unwrap();
        symlink("nowhere/at/all", place.path("dangling")).unwrap();
        let mut command = command_without_library(&place);
        command.env("XDG_CACHE_HOME", place.path("file"));
        let end = finish(command, TIMEOUT);
        end.assert_success();
        assert!(end.out.starts_with(place.path("runtime").to_str().unwrap()), "{}", end.out);
    }

    #[test]
    fn a_cache_folder_with_a_space_is_skipped() {
        let place = TestFolder::new();
        fs::create_dir(place.path("my cache")).unwrap();
        let mut command = command_without_library(&place);
        command.env("XDG_CACHE_HOME", place.path("my cache"));
        let end = finish(command, TIMEOUT);
        end.assert_success();
        assert!(end.out.starts_with(place.path("runtime").to_str().unwrap()), "{}", end.out);
    }

    /// If no folder has room for the preload library, the message must name every folder that was tried, the exit
    /// status must be 126, and no partial file may remain.
    #[test]
    fn missing_room_for_the_library_is_explained() {
        let place = TestFolder::in_target_folder();
        if !common::may_mount() {
            return;
        }
        if place.path("").starts_with("/tmp") {
            return eprintln!("skipped: the target folder lies below /tmp, which this test mounts over");
        }
        let folders = [place.path("cache"), place.path("runtime"), "/tmp".into(), "/dev/shm".into()];
        let mounts =
            folders.clone().map(|folder| format!("mount -t tmpfs -o size=200k none {}", folder.display())).join(" && ");
        let without_library = command_without_library(&place);
        let mut command = place.command("unshare");
        let script = format!(
            "{mounts} && {} run -- true; echo $?; find {} /tmp /dev/shm -type f",
            place.path("bin/pagemill").display(),
            place.path("cache").display()
        );
        command.args(["-m", "sh", "-c", &script]);
        drop(without_library);
        let end = finish(command, TIMEOUT);
        assert_eq!(end.out, "126\n", "{}", end.err);
        assert!(end.err.contains("XDG_CACHE_HOME"), "{}", end.err);
        for folder in folders {
            assert!(end.err.contains(folder.to_str().unwrap()), "{}", end.err);
        }
    }

    /// If the folder that `XDG_RUNTIME_DIR` names does not exist, the published files must be in another folder.
    #[test]
    fn the_runtime_folder_may_be_missing() {
        let place = TestFolder::new();
        let mut command = place.pagemill_run_shell(&["--limit", "300M", "--report"], "exit 6");
        command.env("XDG_RUNTIME_DIR", place.path("missing/deeper"));
        assert_eq!(finish(command, TIMEOUT).code(), 6);
        // All processes of this user share the other folder, so it is removed only if it is empty.
        let user = finish(place.pagemill_run_shell(&[], "id -u"), TIMEOUT).out;
        let _ = fs::remove_dir(format!("/dev/shm/pagemill-{}", user.trim()));
    }
}

mod limits {
    use super::*;

    #[track_caller]
    fn assert_succeeds(limit: &str, source: &str, arguments: &[&str]) {
        let place = TestFolder::new();
        let Some(program) = place.compile(source, &[]) else { return };
        let mut command = place.pagemill_run(&["--limit", limit, "--report"], program);
        command.args(arguments);
        let end = finish(command, TIMEOUT);
        println!("{}", end.err);
        end.assert_success();
        place.assert_no_files_left();
    }

    #[test]
    fn allocations_are_refused_at_the_limit() {
        assert_succeeds("256M", "limit.c", &["65536", "192", "320"]);
    }

    #[test]
    fn allocations_of_every_size_are_refused_at_the_limit() {
        assert_succeeds("256M", "limit.c", &["5000", "240", "270"]);
        assert_succeeds("256M", "limit.c", &["1024", "240", "270"]);
        assert_succeeds("256M", "limit.c", &["100", "230", "264"]);
        // jemalloc uses 20 KiB for 16 KiB, so that such allocations do not all start in the same cache set.
        assert_succeeds("256M", "limit.c", &["16", "195", "264"]);
        assert_succeeds("256M", "limit.c", &["1", "200", "264"]);
    }

    /// Threads allocate random sizes, in total far more than the limit allows. Resident memory may exceed the limit by
    /// two of the largest allocations for each thread: `realloc` needs two at a time, and both can be admitted before
    /// they are touched.
    #[test]
    fn the_peak_stays_near_the_limit() {
        let place = TestFolder::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        for (limit, limit_mib) in [("64M", 64), ("256M", 256)] {
            let report = report(|json| {
                let mut command = place.pagemill_run(&[json, &["--limit", limit]].concat(), &program);
                command.args(["4", "600", "16384", "may-fail"]);
                command
            });
            let peak_mib = bytes(&report, "peak_bytes") / MIB;
            assert!(peak_mib <= limit_mib + 4 * 2 * 16, "--limit {limit}: {peak_mib} MiB: {report}");
        }
    }

    #[test]
    fn a_small_limit_is_enforced() {
        assert_succeeds("16M", "limit.c", &["64", "10", "18"]);
        assert_succeeds("16M", "limit.c", &["4", "10", "18"]);
    }

    /// Under a limit that is too small for any program, the program must end soon, with or without success. It must not
    /// be killed.
    #[test]
    fn a_tiny_limit_does_not_hang() {
        let place = TestFolder::new();
        for limit in ["1", "4K", "100K", "1M"] {
            let end = finish(place.pagemill_run_shell(&["--limit", limit], "echo $((6 * 7))"), TIMEOUT);
            println!("--limit {limit}: {} {:?} {}", end.status, end.out, end.err);
            assert!(end.code() < 128, "--limit {limit}: {} {}", end.status, end.err);
        }
        place.assert_no_files_left();
    }

    #[test]
    fn a_sibling_returns_freed_memory() {
        assert_succeeds("256M", "sibling.c", &["200", "1024", "150", "1024"]);
        assert_succeeds("256M", "sibling.c", &["200", "300", "150", "100"]);
    }

    #[test]
    fn a_sibling_returns_freed_small_memory() {
        assert_succeeds("256M", "sibling.c", &["200", "4", "150", "4"]);
        assert_succeeds("256M", "sibling.c", &["200", "1", "150", "1024"]);
    }

    #[test]
    fn a_sibling_returns_freed_large_memory() {
        assert_succeeds("256M", "sibling.c", &["192", "65536", "150", "10240"]);
    }

    #[test]
    fn memory_of_ended_processes_is_not_counted() {
        assert_succeeds("256M", "sibling.c", &["200", "1024", "200", "1024", "keep"]);
        assert_succeeds("256M", "sibling.c", &["200", "4", "200", "4", "keep"]);
    }

    #[test]
    fn members_may_be_killed_at_any_time() {
        assert_succeeds("256M", "killed.c", &[]);
    }

    #[test]
    fn more_processes_than_entries_of_the_tree_page_work() {
        assert_succeeds("4G", "crowd.c", &["1100"]);
    }

    /// The command and its program are killed while another process of the process tree is still running. After that
    /// process has ended, the next command must remove the files of the tree.
    #[test]
    fn the_next_command_removes_files_of_a_killed_one() {
        let place = TestFolder::new();
        // The other process ends when its standard input is closed.
        let mut command = place.pagemill_run_shell(&[], "exec 3<&0; cat <&3 & echo $$; echo $!; wait");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let input = guard.child().stdin.take();
        let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        let shell = lines.next().unwrap().unwrap();
        let program = lines.next().unwrap().unwrap();
        let has_published = || {
            let is_its = |path: &std::path::PathBuf| {
                path.file_name().unwrap().to_string_lossy().starts_with(&format!("{program}-"))
            };
            common::walk(&place.path("runtime/pagemill")).iter().any(is_its)
        };
        let begun = Instant::now();
        while !has_published() {
            assert!(begun.elapsed() < TIMEOUT, "the process publishes nothing");
            thread::sleep(Duration::from_millis(1));
        }
        guard.signal("KILL");
        guard.wait(TIMEOUT);
        // The kernel kills the shell when the command has ended, which may take a moment on a busy machine.
        await_end_of(&shell);
        assert_eq!(finish(place.pagemill_run(&[], "true"), TIMEOUT).code(), 0);
        assert!(!common::walk(&place.path("runtime/pagemill")).is_empty(), "the tree's files are still in use");
        drop(input);
        await_end_of(&program);
        assert_eq!(finish(place.pagemill_run(&[], "true"), TIMEOUT).code(), 0);
        place.assert_no_files_left();
    }
}
