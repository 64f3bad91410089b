//! `pagemill run` from the user's point of view: statuses, streams, signals, reports, limits of a process tree.

mod common;

use common::{End, Guard, PAGEMILL, Place, STUCK_AFTER, finish, finish_bytes, finish_with_input};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The report of a run as JSON; the run must succeed.
fn report(mut run: impl FnMut(&[&str]) -> Command) -> Value {
    let end = finish(run(&["--json"]), STUCK_AFTER);
    end.assert_success();
    parse(&end)
}

/// The JSON object in the standard error of a run.
fn parse(end: &End) -> Value {
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
        let place = Place::new();
        for status in 0..=255 {
            let end = finish(place.shell(&[], &format!("exit {status}")), STUCK_AFTER);
            assert_eq!((end.code(), end.err.as_str()), (status, ""));
        }
        place.assert_swept();
    }

    #[test]
    fn a_signal_gives_128_and_its_number() {
        let place = Place::new();
        for (name, number) in
            [("HUP", 1), ("INT", 2), ("ABRT", 6), ("KILL", 9), ("SEGV", 11), ("PIPE", 13), ("TERM", 15)]
        {
            let end = finish(place.shell(&[], &format!("kill -s {name} $$; sleep 60")), STUCK_AFTER);
            assert_eq!(end.code(), 128 + number, "{name}");
        }
        place.assert_swept();
    }

    #[test]
    fn what_cannot_be_started_is_told_as_a_shell_does() {
        let place = Place::new();
        fs::write(place.path("plain"), "#!/bin/sh\n").unwrap();
        fs::create_dir(place.path("folder")).unwrap();
        for (name, status) in [
            ("no-such-program-anywhere", 127),
            ("./missing", 127),
            ("./missing/deeper", 127),
            ("./plain", 126),
            ("./folder", 126),
        ] {
            let end = finish(place.pagemill_run(&[], name), STUCK_AFTER);
            assert_eq!(end.code(), status, "{name}: {}", end.err);
            assert!(end.err.starts_with("pagemill: ") && end.err.contains(name), "{name}: {}", end.err);
            assert_eq!(end.err.lines().count(), 1, "{}", end.err);
        }
        place.assert_swept();
    }

    /// Variables that mirror flags: an empty one has no effect, a wrong one is named in the error.
    #[test]
    fn variables_are_read_as_flags_are() {
        let place = Place::new();
        for (name, value, code) in
            [("PAGEMILL_LIMIT", "", 4), ("PAGEMILL_LIMIT", "nonsense", 2), ("PAGEMILL_AFTER", "1.5M", 4)]
        {
            let mut command = place.shell(&[], "exit 4");
            let end = finish(
                {
                    command.env(name, value);
                    command
                },
                STUCK_AFTER,
            );
            assert_eq!(end.code(), code, "{name}={value}: {}", end.err);
            assert!(code == 4 || end.err.contains(name), "{}", end.err);
        }
    }

    #[test]
    fn usage_errors_give_2_and_start_nothing() {
        let place = Place::new();
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
            let end = finish(place.shell(options, "echo started"), STUCK_AFTER);
            assert_eq!((end.code(), end.out.as_str()), (2, ""), "{options:?}: {}", end.err);
            assert!(!end.err.is_empty());
        }
        let of_flags = [("PAGEMILL_LIMIT", "0"), ("PAGEMILL_LIMIT", "x"), ("PAGEMILL_PAGE_SIZE", "48K")];
        let of_the_allocator =
            ["RETURN", "IDLE", "HELPER", "WATCH", "HUGE", "NODES"].map(|name| format!("PAGEMILL_{name}"));
        for (name, value) in of_flags.into_iter().chain(of_the_allocator.iter().map(|name| (name.as_str(), "x"))) {
            let mut command = place.shell(&[], "echo started");
            command.env(name, value);
            let end = finish(command, STUCK_AFTER);
            assert_eq!((end.code(), end.out.as_str()), (2, ""), "{name}={value}: {}", end.err);
        }
        let mut nothing = place.command(PAGEMILL);
        nothing.args(["run", "--limit", "1G"]);
        assert_eq!(finish(nothing, STUCK_AFTER).code(), 2);
        place.assert_swept();
    }

    /// A variable that a program of the tree sets wrongly is passed over, and not told of by each process.
    #[test]
    fn wrong_variables_are_told_of_once_at_most() {
        let place = Place::new();
        let script = "PAGEMILL_HELPER=x; export PAGEMILL_HELPER; for i in 1 2 3 4 5; do sh -c true; done";
        let end = finish(place.shell(&[], script), STUCK_AFTER);
        assert_eq!((end.code(), end.err.as_str()), (0, ""));
    }

    /// A misspelt option is not taken as a program.
    #[test]
    fn an_unknown_option_is_a_usage_error() {
        let place = Place::new();
        for option in ["--no-such-option", "--limt=512M", "-x"] {
            let end = finish(place.shell(&[option], "echo started"), STUCK_AFTER);
            assert_eq!((end.code(), end.out.as_str()), (2, ""), "{option}: {}", end.err);
        }
    }

    /// Where the experiments are not built, their names and what builds them are shown.
    #[test]
    fn experiments_are_listed_without_being_built() {
        let place = Place::new();
        // No program of theirs lies beside this one.
        let alone = place.path("pagemill");
        fs::copy(PAGEMILL, &alone).unwrap();
        let mut command = place.command(&alone);
        command.args(["bench", "--help"]);
        let end = finish(command, STUCK_AFTER);
        end.assert_success();
        for word in ["ebizzy", "footprint", "survive", "cargo build --release -p pagemill-cli -p pagemill-bench"] {
            assert!(end.out.contains(word), "{}", end.out);
        }
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let place = Place::new();
        for size in ["512M", "1.5G", "600000K", "1GiB", "1gb", "1000000000", " 512M "] {
            assert_eq!(finish(place.shell(&["--limit", size], "exit 5"), STUCK_AFTER).code(), 5, "{size}");
        }
        for size in ["4K", "64K", "2M", "8M"] {
            assert_eq!(finish(place.shell(&["--page-size", size], "exit 5"), STUCK_AFTER).code(), 5, "{size}");
        }
    }
}

mod streams {
    use super::*;

    /// Closed streams stay closed: a program that would fail to write fails here, too.
    #[test]
    fn closed_streams_are_not_replaced() {
        let place = Place::new();
        let script = format!("{PAGEMILL} run -- echo hi >&-");
        let mut command = place.command("sh");
        command.args(["-c", &script]);
        assert_ne!(finish(command, STUCK_AFTER).code(), 0);
    }

    #[test]
    fn bytes_pass_untouched() {
        let place = Place::new();
        let input: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let mut command = place.pagemill_run(&["--limit", "1G"], "cat");
        command.arg("-");
        let (end, out) = finish_bytes(&mut command, input.clone(), STUCK_AFTER);
        end.assert_success();
        assert!(out == input, "{} bytes of {}", out.len(), input.len());
        assert_eq!(end.err, "");
    }

    #[test]
    fn arguments_and_folder_pass_untouched() {
        let place = Place::new();
        let mut command = place.pagemill_run(&[], "printf");
        command.args(["%s|", "--limit", "0", "--", "-h", "", "two words", "$HOME"]);
        assert_eq!(finish(command, STUCK_AFTER).out, "--limit|0|--|-h||two words|$HOME|");
        let end = finish(place.pagemill_run(&[], "pwd"), STUCK_AFTER);
        assert_eq!(fs::canonicalize(end.out.trim()).unwrap(), fs::canonicalize(place.path("")).unwrap());
    }

    #[test]
    fn a_program_may_read_its_input_in_parts() {
        let place = Place::new();
        let end = finish_with_input(place.shell(&[], "read a; read b; echo $b$a"), b"1\n2\n".to_vec(), STUCK_AFTER);
        assert_eq!(end.out, "21\n");
    }
}

mod signals {
    use super::*;

    /// Checks that a signal reaches the program: a shell that prints a line when it is ready, and another at the
    /// signal.
    fn reached_by(name: &str) {
        let place = Place::new();
        let script = format!("trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done");
        let mut command = place.shell(&["--limit", "1G"], &script);
        command.stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        guard.signal(name);
        assert_eq!(lines.next().unwrap().unwrap(), format!("got {name}"));
        assert_eq!(guard.wait(STUCK_AFTER).code(), Some(9), "{name}");
    }

    #[test]
    fn signals_reach_the_program() {
        for name in ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"] {
            reached_by(name);
        }
    }

    #[test]
    fn a_program_that_dies_of_a_signal_ends_the_command() {
        let place = Place::new();
        let mut command = place.pagemill_run(&[], "sh");
        command.args(["-c", "echo ready; exec sleep 60"]).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        guard.signal("TERM");
        assert_eq!(guard.wait(STUCK_AFTER).code(), Some(143));
        place.assert_swept();
    }
}

mod reports {
    use super::*;

    #[track_caller]
    fn adds_up(report: &Value) {
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
    fn what_is_held_is_reported() {
        let place = Place::new();
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
            adds_up(&report);
            let peak = bytes(&report, "peak_bytes");
            // mark() touches every page of a piece.
            assert!((98 * MIB..125 * MIB).contains(&peak), "{piece_kib} KiB: {report}");
            assert!(bytes(&report, "max_resident_bytes") >= 98 * MIB, "{report}");
            assert_eq!((bytes(&report, "status"), bytes(&report, "processes")), (0, 1), "{report}");
            assert!(report["signal"].is_null() && report["limit_bytes"].is_null(), "{report}");
        }
        place.assert_swept();
    }

    /// Programs that end without exit handlers: by `_exit`, as shells do, and by a signal. (Blocks from 2 MiB up are
    /// counted when they are measured, so one that is touched just before the end may not be counted.)
    #[test]
    fn what_a_process_held_is_reported_however_it_ends() {
        let place = Place::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        for (how, status) in [("exit", 0), ("kill", 137)] {
            for piece_kib in ["1024", "1"] {
                let mut command = place.pagemill_run(&["--json"], &program);
                command.args(["100", piece_kib, how]);
                let end = finish(command, STUCK_AFTER);
                assert_eq!(end.code(), status);
                let report = parse(&end);
                adds_up(&report);
                let peak = bytes(&report, "peak_bytes");
                assert!((98 * MIB..125 * MIB).contains(&peak), "{how}, {piece_kib} KiB: {report}");
            }
        }
    }

    /// Memory that was live at the peak does not count as giveable because it was freed later.
    #[test]
    fn what_was_held_at_the_peak_was_not_giveable() {
        let place = Place::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        for piece_kib in ["102400", "1024", "300", "1"] {
            let report = report(|json| {
                let mut command = place.pagemill_run(json, &program);
                command.args(["100", piece_kib, "free"]);
                command
            });
            adds_up(&report);
            assert!(bytes(&report, "net_peak_bytes") > 85 * MIB, "{piece_kib} KiB: {report}");
        }
    }

    #[test]
    fn the_whole_tree_is_counted() {
        let place = Place::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        let script = format!("for i in 1 2 3 4 5 6 7; do {} 10 100; done", program.display());
        let report = report(|json| place.shell(&[json, &["--limit", "700M"]].concat(), &script));
        adds_up(&report);
        assert!(bytes(&report, "processes") >= 8, "{report}");
        assert_eq!(report["largest"].as_array().unwrap().len(), 5);
        assert_eq!(bytes(&report, "limit_bytes"), 700 * MIB);
        let peaks: Vec<_> = report["largest"].as_array().unwrap().iter().map(|process| &process["name"]).collect();
        assert!(peaks.iter().all(|name| name.as_str().unwrap().starts_with("held")), "{peaks:?}");
        // The processes ran one after the other, so the tree never held much more than one of them.
        assert!(bytes(&report, "peak_bytes") < 40 * MIB, "{report}");
    }

    #[test]
    fn processes_at_once_add_up() {
        let place = Place::new();
        let Some(program) = place.compile("sibling.c", &[]) else { return };
        let report = report(|json| {
            let mut command = place.pagemill_run(&[json, &["--limit", "1G"]].concat(), &program);
            command.args(["100", "1024", "100", "1024", "calm"]);
            // However long the second process takes, the first keeps its memory.
            command.env("PAGEMILL_IDLE", "off");
            command
        });
        adds_up(&report);
        assert!((190 * MIB..260 * MIB).contains(&bytes(&report, "peak_bytes")), "{report}");
        // One of the two processes had freed all its memory.
        assert!((85 * MIB..150 * MIB).contains(&bytes(&report, "net_peak_bytes")), "{report}");
    }

    #[test]
    fn people_can_read_it() {
        let place = Place::new();
        let end = finish(place.shell(&["--report"], "exit 3"), STUCK_AFTER);
        assert_eq!(end.code(), 3);
        assert!(end.err.starts_with("pagemill: sh: exit 3, "), "{}", end.err);
        for row in ["peak", "could be given", "net peak", "largest process"] {
            assert!(end.err.lines().any(|line| line.trim_start().starts_with(row)), "{row}: {}", end.err);
        }
        let end = finish(place.shell(&["--report"], "kill -s KILL $$"), STUCK_AFTER);
        assert_eq!(end.code(), 137);
        assert!(end.err.contains("killed by signal 9"), "{}", end.err);
    }

    #[test]
    fn a_killed_program_is_reported_too() {
        let place = Place::new();
        let end = finish(place.shell(&["--json"], "kill -s KILL $$"), STUCK_AFTER);
        let report = parse(&end);
        assert_eq!((bytes(&report, "status"), bytes(&report, "signal")), (137, 9));
        adds_up(&report);
    }

    #[test]
    fn it_goes_to_a_file_on_request() {
        let place = Place::new();
        let end = finish(place.shell(&["--json", "--output", "report.json"], "echo out; echo err >&2"), STUCK_AFTER);
        end.assert_success();
        assert_eq!((end.out.as_str(), end.err.as_str()), ("out\n", "err\n"));
        adds_up(&serde_json::from_str(&fs::read_to_string(place.path("report.json")).unwrap()).unwrap());
        let end = finish(place.shell(&["--output", "report.txt"], "exit 4"), STUCK_AFTER);
        assert_eq!((end.code(), end.err.as_str()), (4, ""));
        assert!(fs::read_to_string(place.path("report.txt")).unwrap().starts_with("pagemill: sh: exit 4"));
        let end = finish(place.shell(&["--output", "no/such/folder/report"], "exit 0"), STUCK_AFTER);
        assert_eq!(end.code(), 2);
        assert!(end.err.contains("no/such/folder/report"), "{}", end.err);
    }

    /// The inner tree belongs to the inner run; the outer run reports itself, and both succeed.
    #[test]
    fn a_run_inside_a_run() {
        let place = Place::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        let script = format!("{PAGEMILL} run --json --output inner.json -- {} 50 100; echo $?", program.display());
        let end = finish(place.shell(&["--limit", "400M", "--json", "--output", "outer.json"], &script), STUCK_AFTER);
        end.assert_success();
        assert!(end.out.ends_with("\n0\n"), "{}", end.out);
        let read =
            |name: &str| -> Value { serde_json::from_str(&fs::read_to_string(place.path(name)).unwrap()).unwrap() };
        let (inner, outer) = (read("inner.json"), read("outer.json"));
        adds_up(&inner);
        adds_up(&outer);
        assert!(bytes(&inner, "peak_bytes") > 49 * MIB, "{inner}");
        assert_eq!(bytes(&inner, "limit_bytes"), 400 * MIB, "the limit of the environment holds: {inner}");
        place.assert_swept();
    }

    /// An inner run may request more than the outer limit, but the outer limit applies.
    #[test]
    fn a_run_inside_a_run_keeps_the_outer_limit() {
        let place = Place::new();
        let script = format!("{PAGEMILL} run --limit 4G --json --output inner.json -- true");
        finish(place.shell(&["--limit", "300M"], &script), STUCK_AFTER).assert_success();
        let inner: Value = serde_json::from_str(&fs::read_to_string(place.path("inner.json")).unwrap()).unwrap();
        assert_eq!(bytes(&inner, "limit_bytes"), 300 * MIB, "{inner}");
    }

    /// An inner run without limit and report is a part of the outer tree: its memory counts there.
    #[test]
    fn a_plain_run_inside_a_run_is_a_part_of_it() {
        let place = Place::new();
        let Some(program) = place.compile("held.c", &[]) else { return };
        let script = format!("{PAGEMILL} run -- {} 50 100", program.display());
        let mut command = place.shell(&["--limit", "400M", "--json", "--output", "outer.json"], &script);
        command.env_remove("PAGEMILL_AFTER");
        finish(command, STUCK_AFTER).assert_success();
        let outer: Value = serde_json::from_str(&fs::read_to_string(place.path("outer.json")).unwrap()).unwrap();
        assert!(bytes(&outer, "peak_bytes") > 49 * MIB, "{outer}");
        place.assert_swept();
    }

    /// A file that cannot be written is reported before the program runs. A file that fills up does not change the
    /// status.
    #[test]
    fn the_reports_file_is_opened_first() {
        let place = Place::new();
        let end = finish(place.shell(&["--output", "missing/report"], "touch ran; exit 3"), STUCK_AFTER);
        assert_eq!((end.code(), place.path("ran").exists()), (2, false), "{}", end.err);
        let end = finish(place.shell(&["--output", "/dev/full"], "exit 3"), STUCK_AFTER);
        assert_eq!(end.code(), 3);
        assert!(end.err.contains("cannot be written"), "{}", end.err);
    }

    /// Small processes are counted although they publish nothing.
    #[test]
    fn small_processes_are_counted() {
        let place = Place::new();
        let mut command = place.shell(&["--json", "--output", "report.json"], "for i in 1 2 3 4 5; do /bin/true; done");
        command.env_remove("PAGEMILL_AFTER");
        finish(command, STUCK_AFTER).assert_success();
        let report: Value = serde_json::from_str(&fs::read_to_string(place.path("report.json")).unwrap()).unwrap();
        assert_eq!(report["processes"], 6, "{report}");
    }
}

mod obstacles {
    use super::*;

    #[test]
    fn a_static_program_is_named_and_runs() {
        let place = Place::new();
        let source = place.path("static.c");
        fs::write(&source, "int main(void) { return 7; }\n").unwrap();
        let mut compiler = place.command("cc");
        compiler.args(["-static", "static.c", "-o", "static"]);
        if common::lacks("cc") || !finish(compiler, STUCK_AFTER).status.success() {
            println!("skipped: no static program can be made");
            return;
        }
        let end = finish(place.pagemill_run(&[], "./static"), STUCK_AFTER);
        assert_eq!(end.code(), 7);
        assert!(end.err.starts_with("pagemill: ./static is linked statically"), "{}", end.err);
        fs::write(place.path("script"), "#!./static\n").unwrap();
        fs::set_permissions(place.path("script"), fs::Permissions::from_mode(0o755)).unwrap();
        let end = finish(place.pagemill_run(&[], "./script"), STUCK_AFTER);
        assert_eq!(end.code(), 7);
        assert!(end.err.contains("statically"), "{}", end.err);
    }

    #[test]
    fn a_program_that_changes_its_user_is_named_and_runs() {
        if !common::is_root() {
            println!("skipped: only root can give a program to another user");
            return;
        }
        let place = Place::new();
        let make = "cp \"$(command -v id)\" own && cp own other && chown 65534 other && chmod 4755 own other";
        let mut command = place.command("sh");
        command.args(["-c", make]);
        finish(command, STUCK_AFTER).assert_success();
        let end = finish(place.pagemill_run(&[], "./other"), STUCK_AFTER);
        assert!(end.err.starts_with("pagemill: ./other is set-uid"), "{}", end.err);
        assert!(end.out.contains("euid=65534"), "{}", end.out);
        let end = finish(place.pagemill_run(&[], "./own"), STUCK_AFTER);
        assert_eq!(end.err, "", "no change of the user, no message");
    }

    #[test]
    fn a_preload_of_the_users_is_kept() {
        let place = Place::new();
        let Some(library) = place.compile("marker.c", &["-shared", "-fPIC"]) else { return };
        let mut with_preload = place.pagemill_run(&[], "env");
        with_preload.env("LD_PRELOAD", &library);
        let end = finish(with_preload, STUCK_AFTER);
        end.assert_success();
        // Once by the command itself, once by the program.
        assert_eq!(end.err.matches("marker loaded").count(), 2, "{}", end.err);
        let line = end.out.lines().find_map(|line| line.strip_prefix("LD_PRELOAD=")).unwrap();
        let parts: Vec<_> = line.split(':').collect();
        assert_eq!(parts.len(), 2, "{line}");
        assert!(parts[0].ends_with("libpagemill_malloc.so") && parts[1] == library.to_str().unwrap(), "{line}");
    }

    /// A copy of the command without its library beside it.
    fn lonely(place: &Place) -> Command {
        fs::create_dir(place.path("bin")).unwrap();
        fs::copy(PAGEMILL, place.path("bin/pagemill")).unwrap();
        let mut command = place.command(place.path("bin/pagemill"));
        command.args(["run", "--", "sh", "-c", "echo $LD_PRELOAD; grep -c libpagemill /proc/self/maps >/dev/null"]);
        command.env("HOME", place.path("home"));
        command
    }

    #[test]
    fn the_command_brings_its_library_along() {
        let place = Place::new();
        let end = finish(lonely(&place), STUCK_AFTER);
        end.assert_success();
        assert!(end.out.starts_with(place.path("cache").to_str().unwrap()), "{}", end.out);
        assert_eq!(common::walk(&place.path("cache/pagemill")).len(), 1);
    }

    #[test]
    fn another_folder_does_where_the_cache_cannot_be_written() {
        let place = Place::new();
        fs::write(place.path("file"), "").unwrap();
        symlink("nowhere/at/all", place.path("dangling")).unwrap();
        let mut command = lonely(&place);
        command.env("XDG_CACHE_HOME", place.path("file"));
        let end = finish(command, STUCK_AFTER);
        end.assert_success();
        assert!(end.out.starts_with(place.path("runtime").to_str().unwrap()), "{}", end.out);
    }

    #[test]
    fn a_cache_folder_with_a_space_is_passed_over() {
        let place = Place::new();
        fs::create_dir(place.path("my cache")).unwrap();
        let mut command = lonely(&place);
        command.env("XDG_CACHE_HOME", place.path("my cache"));
        let end = finish(command, STUCK_AFTER);
        end.assert_success();
        assert!(end.out.starts_with(place.path("runtime").to_str().unwrap()), "{}", end.out);
    }

    /// Without room in any folder: every folder is named, the status is 126, and no partial file stays.
    #[test]
    fn no_room_for_the_library_is_told() {
        let place = Place::beside_target();
        if !common::may_mount() {
            return;
        }
        if place.path("").starts_with("/tmp") {
            return eprintln!("skipped: the target folder lies below /tmp, which this test mounts over");
        }
        let folders = [place.path("cache"), place.path("runtime"), "/tmp".into(), "/dev/shm".into()];
        let mounts =
            folders.clone().map(|folder| format!("mount -t tmpfs -o size=200k none {}", folder.display())).join(" && ");
        let lonely = lonely(&place);
        let mut command = place.command("unshare");
        let script = format!(
            "{mounts} && {} run -- true; echo $?; find {} /tmp /dev/shm -type f",
            place.path("bin/pagemill").display(),
            place.path("cache").display()
        );
        command.args(["-m", "sh", "-c", &script]);
        drop(lonely);
        let end = finish(command, STUCK_AFTER);
        assert_eq!(end.out, "126\n", "{}", end.err);
        assert!(end.err.contains("XDG_CACHE_HOME"), "{}", end.err);
        for folder in folders {
            assert!(end.err.contains(folder.to_str().unwrap()), "{}", end.err);
        }
    }

    /// Without a folder for the figures in `XDG_RUNTIME_DIR`, another one is used.
    #[test]
    fn the_runtime_folder_may_be_missing() {
        let place = Place::new();
        let mut command = place.shell(&["--limit", "300M", "--report"], "exit 6");
        command.env("XDG_RUNTIME_DIR", place.path("missing/deeper"));
        assert_eq!(finish(command, STUCK_AFTER).code(), 6);
        // The folder used instead is shared by all processes of this user, so it is removed only if it is empty.
        let user = finish(place.shell(&[], "id -u"), STUCK_AFTER).out;
        let _ = fs::remove_dir(format!("/dev/shm/pagemill-{}", user.trim()));
    }
}

mod limits {
    use super::*;

    #[track_caller]
    fn holds(limit: &str, source: &str, arguments: &[&str]) {
        let place = Place::new();
        let Some(program) = place.compile(source, &[]) else { return };
        let mut command = place.pagemill_run(&["--limit", limit, "--report"], program);
        command.args(arguments);
        let end = finish(command, STUCK_AFTER);
        println!("{}", end.err);
        end.assert_success();
        place.assert_swept();
    }

    #[test]
    fn blocks_are_refused_at_the_limit() {
        holds("256M", "limit.c", &["65536", "192", "320"]);
    }

    #[test]
    fn blocks_of_every_size_are_refused_at_the_limit() {
        holds("256M", "limit.c", &["5000", "240", "270"]);
        holds("256M", "limit.c", &["1024", "240", "270"]);
        holds("256M", "limit.c", &["100", "230", "264"]);
        // jemalloc spends 20 KiB on 16, so that such blocks do not all start in one cache set.
        holds("256M", "limit.c", &["16", "195", "264"]);
        holds("256M", "limit.c", &["1", "200", "264"]);
    }

    /// Random sizes from several threads, far more than allowed: resident memory exceeds the limit by at most two of
    /// the largest blocks per thread (realloc holds two), which were granted untouched while there was room.
    #[test]
    fn the_peak_stays_near_the_limit() {
        let place = Place::new();
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
    fn a_small_limit_is_a_limit() {
        holds("16M", "limit.c", &["64", "10", "18"]);
        holds("16M", "limit.c", &["4", "10", "18"]);
    }

    /// A limit below the needs of any program: the program fails or goes on, soon, and is never killed.
    #[test]
    fn a_tiny_limit_does_not_hang() {
        let place = Place::new();
        for limit in ["1", "4K", "100K", "1M"] {
            let end = finish(place.shell(&["--limit", limit], "echo $((6 * 7))"), STUCK_AFTER);
            println!("--limit {limit}: {} {:?} {}", end.status, end.out, end.err);
            assert!(end.code() < 128, "--limit {limit}: {} {}", end.status, end.err);
        }
        place.assert_swept();
    }

    #[test]
    fn a_sibling_gives_what_it_freed() {
        holds("256M", "sibling.c", &["200", "1024", "150", "1024"]);
        holds("256M", "sibling.c", &["200", "300", "150", "100"]);
    }

    #[test]
    fn a_sibling_gives_small_pieces() {
        holds("256M", "sibling.c", &["200", "4", "150", "4"]);
        holds("256M", "sibling.c", &["200", "1", "150", "1024"]);
    }

    #[test]
    fn a_sibling_gives_large_pieces() {
        holds("256M", "sibling.c", &["192", "65536", "150", "10240"]);
    }

    #[test]
    fn the_dead_hold_nothing() {
        holds("256M", "sibling.c", &["200", "1024", "200", "1024", "keep"]);
        holds("256M", "sibling.c", &["200", "4", "200", "4", "keep"]);
    }

    #[test]
    fn members_may_be_killed_at_any_moment() {
        holds("256M", "killed.c", &[]);
    }

    #[test]
    fn more_processes_than_the_page_lists() {
        holds("4G", "crowd.c", &["1100"]);
    }

    /// The command and its program are killed while another process of the tree runs on. The next command cleans up
    /// after that process has ended.
    #[test]
    fn a_killed_command_is_swept_by_the_next() {
        let place = Place::new();
        // It ends when its input is closed.
        let mut command = place.shell(&[], "exec 3<&0; cat <&3 & echo $!; wait");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let input = guard.child().stdin.take();
        let mut lines = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        let program = lines.next().unwrap().unwrap();
        let has_published = || {
            let is_its = |path: &std::path::PathBuf| {
                path.file_name().unwrap().to_string_lossy().starts_with(&format!("{program}-"))
            };
            common::walk(&place.path("runtime/pagemill")).iter().any(is_its)
        };
        let begun = Instant::now();
        while !has_published() {
            assert!(begun.elapsed() < STUCK_AFTER, "it publishes nothing");
            thread::sleep(Duration::from_millis(1));
        }
        guard.signal("KILL");
        guard.wait(STUCK_AFTER);
        assert_eq!(finish(place.pagemill_run(&[], "true"), STUCK_AFTER).code(), 0);
        assert!(!common::walk(&place.path("runtime/pagemill")).is_empty(), "figures are still in use");
        drop(input);
        let begun = Instant::now();
        while fs::exists(format!("/proc/{program}")).unwrap() {
            assert!(begun.elapsed() < STUCK_AFTER, "it does not end");
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(finish(place.pagemill_run(&[], "true"), STUCK_AFTER).code(), 0);
        place.assert_swept();
    }
}
