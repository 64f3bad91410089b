//! `pagemill slabinfo`: messages for wrong arguments, and its behaviour while it waits for a process.

mod common;

use common::slab_program::{self, assert_refused, printed_numbers, request_files, show, slabinfo, start};
use common::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

#[test]
#[ignore = "a program for other tests"]
fn program() {
    slab_program::run();
}

/// Several caches are shrunk. The output must have the results of the caches that were shrunk in time. It must have no
/// result for a shrink that is still running or was not started.
#[test]
fn unfinished_shrinks_have_no_result() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    let moving = place.path("moving");
    fs::write(&moving, b"").unwrap();
    let pid = holder.pid().to_string();
    let slabs = printed_numbers(&holder, "nodes")[1];
    let end = finish(slabinfo(&place, &[&pid, "-s"]), TIMEOUT);
    assert_eq!(end.code(), 1, "{}", end.err);
    assert!(end.out.contains("\n  entries ") && !end.out.contains("nodes"), "{}{}", end.out, end.err);
    assert!(end.err.contains("nodes: process ") && end.err.contains("; not begun: boxes, tab?red"), "{}", end.err);
    for more in [&["--ctor"][..], &["-C", "--json"]] {
        let end = finish(slabinfo(&place, &[&[pid.as_str(), "-s"], more].concat()), TIMEOUT);
        assert_eq!((end.code(), end.out.as_str()), (1, ""), "{}", end.err);
        assert!(end.err.ends_with("still runs the command after 2 s, and continues\n"), "{}", end.err);
    }
    fs::remove_file(&moving).unwrap();
    while printed_numbers(&holder, "nodes")[1] > slabs / 5 {
        holder.run_next_step();
    }
    assert_eq!(holder.end(), [1]);
}

/// Errors about an unknown cache name, or about a cache name instead of a process id, must show the right command line.
#[test]
fn errors_show_the_right_command_line() {
    let place = TestFolder::new();
    let refused = |options: &[&str], words: &str| assert_refused(&finish(slabinfo(&place, options), TIMEOUT), words);
    refused(&["-s"], "`pagemill slabinfo PID --shrink`; no process of yours has slab caches");
    let holder = start(&place);
    let pid = &*holder.pid().to_string();
    refused(&[pid, "--shrink=ndoes"], "has no slab cache ndoes; did you mean nodes?");
    refused(&[pid, "-r", "Entry"], "has no slab cache Entry; did you mean entries?");
    refused(
        &[pid, "--set-ratio", "xyz=1"],
        "has no slab cache xyz; existing caches: boxes, entries, nodes, 'tab?red ?[31m?line=1'",
    );
    refused(&["-r", "box"], "no process has a slab cache box; did you mean boxes?");
    let which = format!("no process is given: use `pagemill slabinfo PID --shrink=nodes`; PID can be that of {pid} ");
    refused(&["--shrink=nodes"], &which);
    refused(&["-s"], &format!("`pagemill slabinfo PID --shrink`; PID can be that of {pid} "));
    refused(&["--shrink=nods"], "no process has a slab cache nods; did you mean nodes?");
    let is_none = "nodes is not a process id; `pagemill slabinfo";
    refused(&["-s", "nodes"], &format!("{is_none} PID --shrink=nodes` shrinks"));
    refused(&["nodes"], &format!("{is_none} --report=nodes` shows"));
    refused(
        &[pid, "-s", "nodes"],
        &format!("{pid} or nodes? A cache is given by an option: --shrink=nodes, --report=nodes"),
    );
    refused(&["nodes", pid], "A cache is given by an option: --shrink=nodes, --report=nodes");
    show(&place, &holder, &["-sM"]);
    assert_eq!(holder.end(), [1]);
}

/// A signal must end a waiting command like any other program, so that a shell or service manager gets the usual exit
/// status. No request file may be left behind.
#[test]
fn a_signal_ends_a_waiting_command() {
    let place = TestFolder::new();
    let holder = start(&place);
    holder.stop();
    let pid = holder.pid().to_string();
    for (name, signal) in [("INT", libc::SIGINT), ("TERM", libc::SIGTERM), ("HUP", libc::SIGHUP)] {
        for options in
            [&["slabinfo", &pid][..], &["slabinfo"], &["slabinfo", &pid, "-s"], &["meminfo", &pid, "--watch"]]
        {
            let mut command = place.command(PAGEMILL);
            command.args(options).stdout(Stdio::null()).stderr(Stdio::null());
            let mut asking = Guard::new(command);
            let has_asked = || !request_files(&place).is_empty();
            while options[0] == "slabinfo" && !has_asked() {
                thread::sleep(Duration::from_millis(1));
            }
            if options[0] == "meminfo" {
                thread::sleep(Duration::from_millis(300));
            }
            asking.signal(name);
            assert_eq!(asking.wait(TIMEOUT).signal(), Some(signal), "{options:?}");
            assert_eq!(request_files(&place), Vec::<PathBuf>::new());
        }
    }
    holder.continue_process();
    assert_eq!(holder.end(), [1]);
}

/// The help text must explain each column of the table and each letter of the column `FLG`, and have an example of a
/// command line. No line may be longer than 100 characters.
#[test]
fn help_explains_columns_and_flags() {
    let place = TestFolder::new();
    let holder = start(&place);
    let table = show(&place, &holder, &[]);
    let help = finish(slabinfo(&place, &["--help"]), TIMEOUT);
    help.assert_success();
    let (_, columns) = help.out.split_once("\nColumns:\n").unwrap();
    for column in table.lines().nth(1).unwrap().split_ascii_whitespace().filter(|column| *column != "NAME") {
        let is_explained = |line: &str| {
            let (names, text) = line.split_at(line.len().min(20));
            names.split([' ', ',']).any(|name| name == column) && !text.is_empty()
        };
        assert!(columns.lines().any(is_explained), "{column}: {columns}");
    }
    for flag in ["M ", "C ", "D ", "L ", "F ", "P "] {
        assert!(columns.contains(&format!(" {flag}")), "{flag}: {columns}");
    }
    assert!(columns.contains("\n  pagemill slabinfo 123 -s=entries "), "{columns}");
    assert!(help.out.lines().all(|line| line.chars().count() <= 100), "{}", help.out);
    let pid = holder.pid().to_string();
    finish(slabinfo(&place, &[&pid, "-s=entries"]), TIMEOUT).assert_success();
    assert_eq!(holder.end(), [1]);
}
