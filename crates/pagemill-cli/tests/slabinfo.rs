//! `pagemill slabinfo`: lists the slab caches of programs, and shrinks them.

mod common;

use common::holder::ObservedProgram;
use common::slab_program::{
    self, CACHE_NAMES, CONTROL_CHARACTER_NAME, CONTROL_CHARACTER_NAME_SHOWN, INSERTED_OBJECTS, KEPT_OBJECTS,
    as_program, assert_refused, cache, cache_names, list, number, printed_numbers, request_files, show, slabinfo,
    start,
};
use common::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, is_root, shell};
use pagemill_core::listing;
use pagemill_core::listing::{Action, ControlCommand, Outcome, Unanswered};
use pagemill_core::published;
use pagemill_core::stats::{self, Counter};
use pagemill_sys::file::Path as FigurePath;
use pagemill_sys::process::{self, Identity};
use serde_json::{Value, json};
use std::cell::Cell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

#[test]
#[ignore = "a program for other tests"]
fn program() {
    slab_program::run();
}

/// `slabinfo` must list the slab caches of a program with the values that the program reads from the library. Movable
/// caches must come first, and sums must be correct. Control characters in names must be replaced.
#[test]
fn caches_are_listed() {
    let place = TestFolder::new();
    let holder = start(&place);
    let info = list(&place, &holder, &[]);
    assert_eq!(cache_names(&info), ["entries", "nodes", "boxes", CONTROL_CHARACTER_NAME_SHOWN]);
    for name in CACHE_NAMES {
        let (row, printed) = (cache(&info, name), printed_numbers(&holder, name));
        let shown = ["objects", "slabs", "partial", "resident_bytes", "defrag_used_ratio", "remote_node_defrag_ratio"];
        assert_eq!(shown.map(|column| number(row, column)), printed, "{row}");
        let nodes = row["nodes"].as_array().unwrap();
        for sum in ["slabs", "partial", "empty", "lost", "blocks", "room", "resident_bytes"] {
            assert_eq!(nodes.iter().map(|node| number(node, sum)).sum::<u64>(), number(row, sum), "{sum}: {row}");
        }
        let used: u64 = nodes.iter().map(|node| number(node, "used")).sum();
        assert_eq!(used, number(row, "objects") + number(row, "cached"));
    }
    let sum = |name: &str| info["caches"].as_array().unwrap().iter().map(|row| number(row, name)).sum::<u64>();
    for name in ["objects", "in_use_bytes", "resident_bytes", "slabs", "partial", "handle_bytes"] {
        assert_eq!(number(&info["totals"], name), sum(name), "{name}");
    }
    let nodes = cache(&info, "nodes");
    assert_eq!((number(nodes, "objects"), number(nodes, "in_use_bytes")), (KEPT_OBJECTS, KEPT_OBJECTS * 192));
    assert_eq!(number(cache(&info, "boxes"), "objects"), 100);
    assert!(number(cache(&info, "entries"), "handle_bytes") >= INSERTED_OBJECTS * 8);

    let text = show(&place, &holder, &[]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_ascii_whitespace().collect()).collect();
    assert_eq!(lines[1].join(" "), "NAME OBJECTS OBJSIZE SPACE SLABS/PART/EMPTY O/S O %FR %EF FLG");
    let entries = printed_numbers(&holder, "entries")[0];
    let starts = [2, 3].map(|row: usize| lines[row][..3].join(" "));
    assert_eq!(starts, [format!("entries {entries} 192"), format!("nodes {KEPT_OBJECTS} 192")]);
    let flags = |row: &str| text.lines().find(|line| line.trim_start().starts_with(row)).unwrap().trim_end().to_owned();
    assert!(
        flags("entries").ends_with(" M") && flags("nodes").ends_with(" MC") && flags("boxes").ends_with(" D"),
        "{text}"
    );
    assert!(text.contains(&format!("  {CONTROL_CHARACTER_NAME_SHOWN} ")) && !text.contains(['\t', '\x1b']), "{text}");
    assert!(
        lines[lines.len() - 2].join(" ").starts_with(&format!("4 caches: {} objects, ", entries + KEPT_OBJECTS + 100)),
        "{text}"
    );

    assert_eq!(cache_names(&list(&place, &holder, &["-M"])), ["entries", "nodes"]);
    assert_eq!(cache_names(&list(&place, &holder, &["--ctor"])), ["nodes"]);
    let all = finish(slabinfo(&place, &["--movable"]), TIMEOUT);
    all.assert_success();
    let own = about(&all.out, &[holder.pid()]);
    assert_eq!((own.lines().count(), own.lines().next()), (6, text.lines().next()), "{}", all.out);
    assert_eq!(holder.end(), [1]);
    place.assert_no_files_left();
}

/// The part of an output that is about these processes. Other processes of the machine may have slab caches, too.
fn about(output: &str, pids: &[u32]) -> String {
    let mut is_kept = false;
    let kept = output.lines().filter(|line| {
        if !line.starts_with(' ') {
            is_kept = pids.iter().any(|pid| line.starts_with(&format!("{pid} ")));
        }
        is_kept
    });
    kept.map(|line| format!("{line}\n")).collect()
}

/// `slabinfo -r NAME` must show the details of one cache. The cache must be found by its real name and by its displayed
/// name.
#[test]
fn a_cache_is_reported() {
    let place = TestFolder::new();
    let holder = start(&place);
    let text = show(&place, &holder, &["-r", "nodes"]);
    let row = |name: &str| -> Vec<String> {
        let row = text.lines().map(|line| line.trim_start()).find(|line| line.starts_with(name));
        row.unwrap_or_else(|| panic!("no {name}: {text}")).split_ascii_whitespace().map(str::to_owned).collect()
    };
    assert_eq!((row("objects")[1].as_str(), row("kind")[1..3].join(" ")), ("2000", "by owner".to_owned()));
    assert_eq!((row("used ratio")[2].as_str(), row("remote ratio")[2].as_str()), ("0", "100"));
    for name in ["moved", "emptied", "freed", "busy", "refused", "failed", "lost", "from remote"] {
        assert!(row(name).contains(&"0".to_owned()), "{name}: {text}");
    }
    assert_eq!(row("NODE").len(), 9);
    for name in [CONTROL_CHARACTER_NAME, CONTROL_CHARACTER_NAME_SHOWN] {
        assert_eq!(cache_names(&list(&place, &holder, &["--report", name])), [CONTROL_CHARACTER_NAME_SHOWN]);
    }
    let pid = holder.pid().to_string();
    assert_refused(&finish(slabinfo(&place, &[&pid, "-r", "else"]), TIMEOUT), "has no slab cache else");
    assert_refused(&finish(slabinfo(&place, &["-r", "else"]), TIMEOUT), "no process has a slab cache else");
    holder.end();
}

/// Tables of caches with usual names must fit into 80 columns. Names must be truncated on a narrower terminal, but not
/// in a pipe. `-v` must show exact numbers.
#[test]
fn tables_fit_the_terminal() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    let fits = |text: &str| assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let exact = show(&place, &holder, &["-v"]);
    assert!(exact.contains(" 192 B ") && exact.contains(" MiB "), "{exact}");
    let short = show(&place, &holder, &[]);
    assert!(short.contains(CONTROL_CHARACTER_NAME_SHOWN) && !short.lines().nth(2).unwrap().contains(" MiB"), "{short}");
    fits(&short);
    fits(&show(&place, &holder, &["-r", "nodes"]));
    if !is_missing("script") && !is_missing("stty") {
        let mut command = place.command("script");
        let line = format!("stty rows 24 cols 72; exec {PAGEMILL} slabinfo {}", holder.pid());
        command.args(["-qec", &line, "/dev/null"]).env("SHELL", "/bin/sh");
        let end = finish(command, TIMEOUT);
        end.assert_success();
        let widest = end.out.lines().skip(2).take(4).map(|line| line.trim_end().chars().count()).max();
        assert!(
            end.out.contains("tab?red") && !end.out.contains(CONTROL_CHARACTER_NAME_SHOWN) && widest <= Some(72),
            "{}",
            end.out
        );
    }
    fits(&show(&place, &holder, &["--set-ratio", "nodes=0"]));
    fits(&show(&place, &holder, &["-s"]));
    holder.run_next_step();
    assert_eq!(holder.end(), [1]);
}

/// Shrinking a cache by name must return only the empty slabs of that cache. Without a name, all caches must be shrunk.
/// No object may be lost.
#[test]
fn caches_are_shrunk() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    let before = holder.numbers.clone();
    let shrunk = list(&place, &holder, &["--shrink=nodes"]);
    holder.run_next_step();
    let [row] = &shrunk["shrunk"].as_array().unwrap()[..] else { panic!("{shrunk}") };
    let at =
        |numbers: &[u64], name: &str| numbers[1 + 6 * CACHE_NAMES.iter().position(|known| *known == name).unwrap() + 1];
    let (slabs_before, slabs) = (at(&before, "nodes"), at(&holder.numbers, "nodes"));
    assert_eq!((number(row, "slabs_before"), number(row, "slabs"), &row["error"]), (slabs_before, slabs, &Value::Null));
    assert!(slabs <= slabs_before / 5, "{shrunk}");
    assert!(number(row, "moved") > KEPT_OBJECTS / 2 && number(row, "freed_bytes") > 0, "{shrunk}");
    assert_eq!(number(row, "resident_bytes"), printed_numbers(&holder, "nodes")[3]);
    assert_eq!(number(&shrunk["totals"], "freed_bytes"), number(row, "freed_bytes"));
    assert_eq!(at(&before, "entries"), at(&holder.numbers, "entries"), "no command shrank this cache");

    let text = show(&place, &holder, &["-s"]);
    holder.run_next_step();
    assert!(printed_numbers(&holder, "entries")[1] <= at(&before, "entries") / 5, "{text}");
    assert_eq!((text.lines().count(), printed_numbers(&holder, "entries")[0]), (7, KEPT_OBJECTS), "{text}");
    assert!(text.lines().last().unwrap().ends_with(" returned"), "{text}");
    let again = list(&place, &holder, &["-s", "-C"]);
    assert_eq!(again["shrunk"].as_array().unwrap().len(), 1, "only caches with a constructor");
    let pid = holder.pid().to_string();
    assert_refused(&finish(slabinfo(&place, &[&pid, "--shrink=else"]), TIMEOUT), "has no slab cache else");
    let without_process = finish(slabinfo(&place, &["--shrink"]), TIMEOUT);
    assert!(without_process.code() == 2 && without_process.err.contains("PID"), "{}", without_process.err);
    assert_eq!(holder.end(), [1]);
    place.assert_no_files_left();
}

/// Moves between NUMA nodes must reach the process. A node or a cache that does not exist, and a cache whose objects
/// stay where they are, must be refused. This machine may have one node only, so no object needs to move.
#[test]
fn moves_between_nodes_are_requested() {
    let place = TestFolder::new();
    let holder = start(&place);
    let pid = holder.pid().to_string();
    let moved = list(&place, &holder, &["--move", "entries", "--from", "0", "--to", "0"]);
    assert_eq!(moved["moved"], json!([{"name": "entries", "moved": 0, "error": null}]));
    assert!(show(&place, &holder, &["--balance", "nodes"]).ends_with(" objects moved\n"));
    let run = |options: &[&str]| finish(slabinfo(&place, &[&[pid.as_str()], options].concat()), TIMEOUT);
    assert_refused(&run(&["--move", "entries", "--from", "0", "--to", "999"]), "has no NUMA node 999; the last one is");
    assert_refused(&run(&["--balance", "else"]), "has no slab cache else");
    assert_refused(&run(&["--move", "entries", "--from", "0"]), "--to <NODE>");
    assert_refused(&run(&["--move", "entries", "--balance", "nodes"]), "cannot be used with");
    let fixed = run(&["--balance", "boxes"]);
    assert!(fixed.code() == 1 && fixed.out.contains("boxes: not done: its objects stay"), "{}{}", fixed.out, fixed.err);
    assert_eq!(holder.end(), [1]);
    place.assert_no_files_left();
}

/// Sends a command for a slab cache to a process, as `pagemill slabinfo` does.
fn send_command(figures: &FigurePath, identity: Identity, action: Action, cache: u64) -> Result<Outcome, Unanswered> {
    listing::command(figures, identity, ControlCommand::Slab { action, cache }, || false)
}

/// Returns the path of the file in which a program of this test publishes its statistics.
fn figures_of(place: &TestFolder, identity: Identity) -> FigurePath {
    published::file_of(place.path("runtime/pagemill").to_str().unwrap(), identity).unwrap()
}

/// The options must set the ratios of a running program's caches. The command and the process must both refuse invalid
/// ratios.
#[test]
fn ratios_are_set() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    let set = list(
        &place,
        &holder,
        &["--set-ratio", "nodes=55", "--set-remote-ratio", &format!("{CONTROL_CHARACTER_NAME}=7")],
    );
    let row = |name, setting, before, percent| json!({"name": name, "setting": setting, "before": before, "percent": percent, "error": null});
    let expected = json!([
        row("nodes", "defrag_used_ratio", 0, 55),
        row(CONTROL_CHARACTER_NAME_SHOWN, "remote_node_defrag_ratio", 100, 7)
    ]);
    assert_eq!(set["set"], expected);
    holder.run_next_step();
    assert_eq!(
        (&printed_numbers(&holder, "nodes")[4..], printed_numbers(&holder, CONTROL_CHARACTER_NAME_SHOWN)[5]),
        (&[55, 100][..], 7)
    );
    let text = show(&place, &holder, &["--set-ratio=nodes=0"]);
    assert!(text.ends_with("  nodes: defrag_used_ratio 0 %, was 55 %\n"), "{text}");

    let pid = holder.pid().to_string();
    let refused = |options: &[&str]| finish(slabinfo(&place, &[&[pid.as_str()], options].concat()), TIMEOUT);
    for wrong in ["nodes=101", "nodes=x", "nodes=-1", "nodes"] {
        assert_refused(&refused(&["--set-ratio", wrong]), "for '--set-ratio <NAME=PERCENT>'");
    }
    assert_refused(&refused(&["--set-ratio", "nodes=1", "--set-ratio", "else=1"]), "has no slab cache else");
    let fixed = refused(&["--set-ratio", "boxes=1"]);
    assert!(fixed.code() == 1 && fixed.out.contains("stays 30 %: its objects stay where they are"), "{}", fixed.out);
    holder.run_next_step();
    assert_eq!(printed_numbers(&holder, "nodes")[4], 0, "a wrong name prevents all changes");

    let identity = process::identity(holder.pid()).unwrap();
    let figures = figures_of(&place, identity);
    let errno = |action, cache| send_command(&figures, identity, action, cache).unwrap().errno;
    assert_eq!(errno(Action::SetUsedRatio(101), 1), libc::EINVAL);
    assert_eq!(errno(Action::SetRemoteRatio(u32::MAX), 1), libc::EINVAL);
    assert_eq!([Action::Shrink, Action::SetUsedRatio(1)].map(|action| errno(action, 99)), [libc::ENOENT; 2]);
    assert_eq!(holder.end(), [1]);
}

/// A shrink that takes longer than the command waits must continue in the process. The process must answer other
/// requests meanwhile. The result of the shrink must be the same as without the wait.
#[test]
fn a_long_shrink_continues_after_the_command() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    let moving = place.path("moving");
    fs::write(&moving, b"").unwrap();
    let pid = holder.pid().to_string();
    let end = finish(slabinfo(&place, &[&pid, "-s", "--ctor"]), TIMEOUT);
    let words = "still runs the command after 2 s, and continues";
    assert!(
        end.code() == 1 && end.err.contains("nodes: process ") && end.err.contains(words),
        "{}{}",
        end.out,
        end.err
    );
    let info = list(&place, &holder, &[]);
    let entries = printed_numbers(&holder, "entries")[0];
    assert_eq!((number(cache(&info, "entries"), "objects"), number(cache(&info, "nodes"), "moved")), (entries, 0));
    show(&place, &holder, &["--set-ratio", "nodes=31"]);
    fs::remove_file(&moving).unwrap();
    let slabs = printed_numbers(&holder, "nodes")[1];
    while printed_numbers(&holder, "nodes")[1] > slabs / 5 {
        holder.run_next_step();
    }
    assert_eq!(holder.end(), [1]);
    place.assert_no_files_left();
}

/// A callback of a cache holds the lock of a NUMA node. That node must be omitted from the list, with a message, and
/// the other nodes must be shown.
#[test]
fn locked_nodes_are_left_out() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    let isolating = place.path("isolating");
    fs::write(&isolating, b"").unwrap();
    let pid = holder.pid().to_string();
    assert_eq!(finish(slabinfo(&place, &[&pid, "--shrink=nodes"]), TIMEOUT).code(), 1);
    let info = list(&place, &holder, &[]);
    assert_eq!(
        CACHE_NAMES.map(|name| &cache(&info, name)["in_part"]),
        [false, true, false, false].map(Value::from).each_ref()
    );
    let entries = printed_numbers(&holder, "entries")[0];
    assert_eq!((number(cache(&info, "nodes"), "slabs"), number(cache(&info, "entries"), "objects")), (0, entries));
    let text = show(&place, &holder, &[]);
    assert!(text.contains(" MCP\n") && text.contains("\n  P: not all is counted"), "{text}");
    fs::remove_file(&isolating).unwrap();
    let slabs = printed_numbers(&holder, "nodes")[1];
    while printed_numbers(&holder, "nodes")[1] > slabs / 5 {
        holder.run_next_step();
    }
    assert_eq!(list(&place, &holder, &[])["caches"][1]["in_part"], false);
    assert_eq!(holder.end(), [1]);
}

/// A callback of a cache panics. The panic must take one slab out of use and must not end the process. `slabinfo` must
/// show the lost slab. It must also show that background defragmentation skips the cache until its ratio is set or the
/// cache is shrunk.
#[test]
fn panics_of_callbacks_are_shown() {
    let place = TestFolder::new();
    let holder = start(&place);
    let panicking = place.path("panicking");
    fs::write(&panicking, b"").unwrap();
    let pid = holder.pid().to_string();
    let end = finish(slabinfo(&place, &[&pid, "-s", "-M"]), TIMEOUT);
    assert_eq!(end.code(), 1, "{}{}", end.out, end.err);
    let is_late = end.err.contains("still runs the command after 2 s");
    assert!(is_late || end.out.contains("nodes   not done: code of the program panicked"), "{}{}", end.out, end.err);
    let nodes = || cache(&list(&place, &holder, &[]), "nodes").clone();
    let state = || {
        let nodes = nodes();
        json!([nodes["lost"], nodes["flags"], nodes["given_up"]])
    };
    // On a busy machine the state may take a while to change.
    let becomes = |expected: Value| {
        let begun = Instant::now();
        while state() != expected {
            assert!(begun.elapsed() < TIMEOUT, "{} does not become {expected}", state());
        }
    };
    becomes(json!([1, "MCLF", true]));
    assert!(show(&place, &holder, &[]).contains("\n  F: not defragmented in the background"));
    let report = show(&place, &holder, &["-r", "nodes"]);
    let row = |name: &str| {
        report.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_else(|| panic!("no {name}: {report}"))
    };
    assert!(row("lost").contains(" 1  ") && row("given up").contains("--set-ratio"), "{report}");
    // Sets the ratio to its current value, which must end the skipping.
    show(&place, &holder, &["--set-ratio=nodes=0"]);
    becomes(json!([1, "MCL", false]));
    assert_eq!(finish(slabinfo(&place, &[&pid, "--shrink=nodes"]), TIMEOUT).code(), 1);
    becomes(json!([2, "MCLF", true]));
    fs::remove_file(&panicking).unwrap();
    let slabs = number(&nodes(), "slabs");
    list(&place, &holder, &["-s", "-M"]);
    becomes(json!([2, "MCL", false]));
    assert!(number(&nodes(), "slabs") <= slabs / 5);
    assert_eq!(holder.end(), [1]);
}

/// A program that uses the crate and also has the preload library contains two Pagemill instances. The published files
/// of both are in the folder of a process tree. The command must send its requests to the instance that has the caches.
#[test]
fn caches_of_a_preloaded_program_are_shrunk() {
    let place = TestFolder::new();
    let mut holder =
        ObservedProgram::start(as_program(&place, place.pagemill_run(&[], std::env::current_exe().unwrap())));
    assert_eq!(cache_names(&list(&place, &holder, &[])), CACHE_NAMES);
    let all = finish(slabinfo(&place, &["-M"]), TIMEOUT);
    let own = about(&all.out, &[holder.pid()]);
    assert_eq!(own, show(&place, &holder, &["-M"]), "the process is found without its id");
    let slabs = printed_numbers(&holder, "nodes")[1];
    show(&place, &holder, &["-s"]);
    holder.run_next_step();
    assert!(printed_numbers(&holder, "nodes")[1] <= slabs / 5);
    assert_eq!(holder.end(), [1]);
}

/// A process forks a child while it executes a command from `slabinfo`. The child must list and shrink its own caches,
/// but no cache of its parent.
#[test]
fn a_child_answers_for_itself() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    let (parent, moving, slabs) = (holder.pid(), place.path("moving"), printed_numbers(&holder, "nodes")[1]);
    fs::write(&moving, b"").unwrap();
    fs::write(place.path("forking"), b"").unwrap();
    assert_eq!(finish(slabinfo(&place, &[&parent.to_string(), "--shrink=nodes"]), TIMEOUT).code(), 1);
    holder.run_next_step();
    assert_ne!(holder.pid(), parent);
    assert_eq!(cache_names(&list(&place, &holder, &[])), ["own"]);
    let shrunk = list(&place, &holder, &["-s"]);
    let [row] = &shrunk["shrunk"].as_array().unwrap()[..] else { panic!("{shrunk}") };
    assert_eq!((&row["name"], &row["error"]), (&"own".into(), &Value::Null), "{shrunk}");
    show(&place, &holder, &["--set-ratio", "own=9"]);
    fs::remove_file(&moving).unwrap();
    fs::remove_file(place.path("forking")).unwrap();
    holder.run_next_step();
    assert_eq!(holder.pid(), parent);
    while printed_numbers(&holder, "nodes")[1] > slabs / 5 {
        holder.run_next_step();
    }
    assert_eq!(holder.end(), [1]);
}

/// Many commands send different requests to one process at the same time. The process must answer all of them.
#[test]
fn concurrent_requests_are_answered() {
    let place = TestFolder::new();
    let holder = start(&place);
    let pid = holder.pid().to_string();
    let asks: [&[&str]; 3] = [&["slabinfo", &pid], &["slabinfo", &pid, "-s"], &["meminfo", &pid]];
    thread::scope(|scope| {
        for ask in asks.iter().chain(&asks) {
            scope.spawn(|| {
                for _ in 0..10 {
                    let mut command = place.command(PAGEMILL);
                    command.args(*ask);
                    finish(command, TIMEOUT).assert_success();
                }
            });
        }
    });
    assert_eq!(request_files(&place), Vec::<PathBuf>::new());
    assert_eq!(holder.end(), [1]);
}

/// The error message must say whether a process is stopped, publishes no statistics, or ended during the request. A
/// process without slab caches must get no request.
#[test]
fn errors_say_why_there_is_no_list() {
    let place = TestFolder::new();
    let all = finish(slabinfo(&place, &[]), TIMEOUT);
    if all.out.starts_with(|first: char| first.is_ascii_digit()) {
        println!("not checked: the output without any process, because another process has slab caches");
    } else {
        assert_eq!((all.code(), all.out.as_str()), (0, "no process of yours has slab caches\n"));
        assert_eq!(finish(slabinfo(&place, &["--json"]), TIMEOUT).out, "");
    }
    assert_refused(&finish(slabinfo(&place, &["1073741824"]), TIMEOUT), "there is no process 1073741824");
    let mut plain = place.command("cat");
    plain.stdin(Stdio::piped());
    let plain = Guard::new(plain);
    assert_refused(&finish(slabinfo(&place, &[&plain.id().to_string(), "-s"]), TIMEOUT), "publishes no figures");

    let mut command = place.pagemill_run(&[], "sh");
    command.args(["-c", "echo $$; read word; echo 0"]);
    let none = ObservedProgram::start(command);
    none.stop();
    let end = finish(slabinfo(&place, &[&none.pid().to_string()]), TIMEOUT);
    assert!(end.code() == 0 && end.out.ends_with("  no slab caches\n"), "{}{}", end.out, end.err);
    none.continue_process();
    none.end();

    let holder = start(&place);
    let pid = holder.pid().to_string();
    holder.stop();
    assert_refused(&finish(slabinfo(&place, &[&pid]), TIMEOUT), "does not answer within 2 s");
    let end = thread::scope(|scope| {
        let asking = scope.spawn(|| finish(slabinfo(&place, &[&pid]), TIMEOUT));
        while request_files(&place).is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(shell(&format!("kill -s KILL {pid}")).success());
        asking.join().unwrap()
    });
    assert_refused(&end, "it has ended");
    assert_eq!(request_files(&place), Vec::<PathBuf>::new());
}

/// All requests must be sent before the command waits for the first answer, so that two stopped processes delay the
/// command no longer than one. The two stopped processes must be reported, and a running process must be listed.
#[test]
fn stopped_processes_do_not_delay_others() {
    let place = TestFolder::new();
    let holders = [(); 3].map(|()| start(&place));
    let stopped = [&holders[0], &holders[2]];
    stopped.iter().for_each(|holder| holder.stop());
    let end = finish(slabinfo(&place, &[]), TIMEOUT);
    assert_eq!(end.code(), 2, "{}{}", end.out, end.err);
    for holder in stopped {
        assert!(end.err.contains(&format!("process {}: it does not answer within 2 s", holder.pid())), "{}", end.err);
    }
    let own = about(&end.out, &[0, 1, 2].map(|at: usize| holders[at].pid()));
    let titles: Vec<&str> = own.lines().filter(|line| !line.starts_with(' ')).collect();
    let listed = titles.iter().all(|title| title.starts_with(&format!("{} ", holders[1].pid())));
    assert!(titles.len() == 1 && listed, "{}", end.out);
    assert_eq!(request_files(&place), Vec::<PathBuf>::new());

    let identities = stopped.map(|holder| process::identity(holder.pid()).unwrap());
    let figures = identities.map(|identity| figures_of(&place, identity));
    let targets = [(&figures[0], identities[0]), (&figures[1], identities[1])];
    let asked = Cell::new(0);
    // Counts the requests that exist when the wait begins.
    let should_stop = || {
        asked.set(request_files(&place).len());
        true
    };
    let told = pagemill_slab::ask_for_slabs(&targets, should_stop);
    assert!(told.iter().all(|told| matches!(told, Err(Unanswered::Stopped))), "{told:?}");
    assert_eq!((asked.get(), told.len(), request_files(&place)), (2, 2, Vec::new()));
    stopped.iter().for_each(|holder| holder.continue_process());
    holders.into_iter().for_each(|holder| assert_eq!(holder.end(), [1]));
}

/// Another user must be able neither to list nor to shrink the caches of a process, by the command or by a request file
/// in the process's folder. Root must be able to shrink the caches when it acts as the user of the process.
#[test]
fn other_users_are_refused() {
    if !is_root() || is_missing("setpriv") {
        return println!("skipped: another user is needed");
    }
    const OTHER_USER: u32 = 65534;
    let place = TestFolder::new();
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let holder = start(&place);
    let pid = holder.pid().to_string();
    let as_other_user = |runtime: &Path| {
        let mut command = place.command("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", PAGEMILL, "slabinfo", &pid, "-s"]);
        command.env("XDG_RUNTIME_DIR", runtime);
        finish(command, TIMEOUT)
    };
    // The other user tries a folder of its own and the folder of the process.
    for runtime in [place.path("none"), place.path("runtime")] {
        let end = as_other_user(&runtime);
        if end.code() >= 126 {
            return println!("skipped: other users cannot reach the command");
        }
        assert_refused(&end, "is another user's: it answers user 0 only");
    }
    // The process must ignore a request that another user owns or can write, or that has a second link.
    let identity = process::identity(holder.pid()).unwrap();
    let figures = figures_of(&place, identity);
    let stopped = |change: &dyn Fn(&Path)| {
        holder.stop();
        let outcome = thread::scope(|scope| {
            let asking = scope.spawn(|| send_command(&figures, identity, Action::SetUsedRatio(77), 1));
            while request_files(&place).is_empty() {
                thread::sleep(Duration::from_millis(1));
            }
            change(&request_files(&place)[0]);
            holder.continue_process();
            asking.join().unwrap()
        });
        assert!(matches!(outcome, Err(Unanswered::Late)), "{outcome:?}");
    };
    stopped(&|path| std::os::unix::fs::chown(path, Some(OTHER_USER), None).unwrap());
    stopped(&|path| fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap());
    stopped(&|path| fs::hard_link(path, place.path("second")).unwrap());
    assert_eq!(number(cache(&list(&place, &holder, &[]), "nodes"), "defrag_used_ratio"), 0);
    assert_eq!(
        send_command(&figures, identity, Action::SetUsedRatio(77), 1).unwrap().errno,
        0,
        "the process's user may set the ratio"
    );
    assert_eq!(holder.end(), [1]);

    // Root must be able to send a request as the user of the process.
    fs::set_permissions(place.path("runtime"), fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(place.path("runtime"), Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    fs::remove_dir_all(place.path("runtime/pagemill")).unwrap();
    let mut command = place.command("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(std::env::current_exe().unwrap());
    let holder = ObservedProgram::start(as_program(&place, command));
    let pid = holder.pid().to_string();
    assert_refused(
        &finish(slabinfo(&place, &[&pid]), TIMEOUT),
        "it answers user 65534 only; root can send requests as that user",
    );
    let mut command = place.command("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", PAGEMILL, "slabinfo", &pid, "--shrink=nodes"]);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    assert!(end.out.contains(" returned"), "{}", end.out);
    assert_eq!(holder.end(), [1]);
}

/// Writes a forged published file. According to that file, the process has slab caches.
fn forge_figures(place: &TestFolder, identity: Identity) {
    let mut page = vec![0u8; stats::Figures::LEN];
    page[..8].copy_from_slice(b"pagemill");
    page[8..12].copy_from_slice(&stats::VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&identity.pid.to_le_bytes());
    page[16..24].copy_from_slice(&identity.start_ticks.to_le_bytes());
    let counter = 64 + 8 * Counter::SlabCaches as usize;
    page[counter..counter + 8].copy_from_slice(&1u64.to_le_bytes());
    let folder = place.path("runtime/pagemill");
    if !folder.exists() {
        std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700).create(&folder).unwrap();
    }
    fs::write(figures_of(place, identity).as_str(), page).unwrap();
}

/// The command must not trust the contents of answers, because another process may have written them. The test writes
/// invalid answers itself.
#[test]
fn invalid_answers_are_refused() {
    let place = TestFolder::new();
    let mut sleeper = place.command("cat");
    sleeper.stdin(Stdio::piped());
    let sleeper = Guard::new(sleeper);
    let identity = process::identity(sleeper.id()).unwrap();
    let head = |magic: &[u8; 8], number: u32, errno: u32, records: u64| {
        let mut bytes = magic.to_vec();
        bytes.extend(number.to_le_bytes().into_iter().chain(errno.to_le_bytes()));
        bytes.extend(records.to_le_bytes().into_iter().chain(0u64.to_le_bytes()));
        bytes
    };
    let list = b"pm-slab2";
    let answers = [
        (vec![0xFF; 100], "not a valid list"),
        (head(list, 1, 0, 1), "not a valid list"),
        (head(list, 1, 0, u64::MAX), "not a valid list"),
        (head(list, 2, 0, 0), "not a valid list"),
        (head(b"pm-cach2", 1, 0, 0), "not a valid list"),
        ([head(list, 1, 0, 1), vec![0xFF; 256]].concat(), "not a valid list"),
        ([head(list, 1, 0, 1), vec![0; 256]].concat(), "not a valid list"),
        (head(list, 1, libc::ENOSPC as u32, 0), "could not write its list"),
        (Vec::new(), "no helper thread"),
    ];
    // Writes an answer as soon as a request exists.
    let answered = |answer: &[u8], from: usize, ask: &(dyn Fn() -> String + Sync)| {
        forge_figures(&place, identity);
        let told = thread::scope(|scope| {
            let asking = scope.spawn(ask);
            while request_files(&place).is_empty() && !asking.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            if let Some(path) = request_files(&place).first() {
                // The file is opened without `create`, since the command may have removed it. The loop waits because a
                // request is complete only some time after its file was created.
                while fs::metadata(path).is_ok_and(|metadata| metadata.len() < from as u64) {}
                let file = fs::OpenOptions::new().write(true).open(path);
                let _ = file.map(|file| std::os::unix::fs::FileExt::write_all_at(&file, answer, from as u64));
            }
            asking.join().unwrap()
        });
        assert_eq!(request_files(&place), Vec::<PathBuf>::new());
        told
    };
    for (answer, words) in &answers {
        let told = answered(answer, 0, &|| finish(slabinfo(&place, &[&sleeper.id().to_string()]), TIMEOUT).err);
        assert!(told.contains(words), "{told}");
    }
    let told = b"pm-answ1";
    let outcome = |cache: u64| [cache.to_le_bytes().to_vec(), vec![0; 56]].concat();
    let commands = [
        (vec![0xFF; 100], "not a valid list"),
        (head(list, 1, 0, 0), "not a valid list"),
        (head(told, 1, 0, 0), "not a valid list"),
        ([head(told, 1, 0, 1), outcome(6)].concat(), "not a valid list"),
        ([head(told, 1, 0, 1), vec![0xFF; 64]].concat(), "not a valid list"),
        ([head(told, 1, 0, 1), outcome(5)].concat(), "done"),
    ];
    for (answer, words) in &commands {
        let told =
            answered(answer, 32, &|| match send_command(&figures_of(&place, identity), identity, Action::Shrink, 5) {
                Ok(outcome) => format!("done: {outcome:?}"),
                Err(error) => error.to_string(),
            });
        assert!(told.contains(words), "{told}");
    }
}
