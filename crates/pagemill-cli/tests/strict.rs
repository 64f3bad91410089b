//! Strict volatile ranges in preloaded programs, and in language runtimes that handle faults themselves.

mod common;

use common::{TIMEOUT, TestFolder, finish, is_installed, is_root};
use std::path::{Path, PathBuf};
use std::process::Command;

const SIGABRT: i32 = 6;
const SIGBUS: i32 = 7;
const SIGSEGV: i32 = 11;

fn foreign(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign").join(name)
}

/// Access to a purged page of a strict range must raise `SIGBUS`. All other faults must raise their usual signal, no
/// matter how and when the program installs handlers.
#[test]
fn handlers_receive_their_own_signals() {
    let place = TestFolder::new();
    let Some(program) = place.compile("strict_preload.c", &[]) else { return };
    for after in [Some("0"), None] {
        let mut command = place.pagemill_run(&[], &program);
        command.arg("handlers").env_remove("PAGEMILL_AFTER").envs(after.map(|bytes| ("PAGEMILL_AFTER", bytes)));
        finish(command, TIMEOUT).assert_success();
    }
}

/// A program without a signal handler must end by the same signal as without Pagemill.
#[test]
fn programs_end_by_the_right_signal() {
    let place = TestFolder::new();
    let Some(program) = place.compile("strict_preload.c", &[]) else { return };
    for (how, signal) in [
        ("touched", SIGBUS),
        ("ignored", SIGBUS),
        ("blocked", SIGBUS),
        ("null", SIGSEGV),
        ("ignored-null", SIGSEGV),
        ("sent", SIGSEGV),
    ] {
        let mut command = place.pagemill_run(&[], &program);
        command.arg(how);
        let end = finish(command, TIMEOUT);
        if end.out.starts_with("skipped") {
            return println!("{}", end.out);
        }
        assert_eq!(end.out, "marked\n", "{how}");
        // `run` exits with 128 plus the signal that ended its program.
        assert_eq!(end.code(), 128 + signal, "{how}: {:?} {}", end.status, end.err);
    }
}

/// The first process of a PID namespace ignores signals that it sends to itself. Nevertheless its own faults must end
/// it.
#[test]
fn the_first_process_of_a_namespace_ends_by_its_faults() {
    let place = TestFolder::new();
    let Some(program) = place.compile("strict_preload.c", &[]) else { return };
    if !is_root() || !is_installed("unshare") {
        return println!("skipped: no namespace of processes without root and unshare");
    }
    let mut command = place.pagemill_run(&[], "unshare");
    command.args(["--pid", "--fork"]).arg(&program).arg("touched");
    let end = finish(command, TIMEOUT);
    if end.out.starts_with("skipped") {
        return println!("{}", end.out);
    }
    assert_eq!(end.out, "marked\n", "{}", end.err);
    assert!([128 + SIGBUS, 128 + SIGSEGV].contains(&end.code()), "{:?} {}", end.status, end.err);
}

/// A C++ program is compiled so that its signal handlers may throw exceptions. A handler must be able to throw an
/// exception out of a fault.
#[test]
fn signal_handlers_may_throw() {
    let place = TestFolder::new();
    let Some(program) = place.compile("strict_throw.cpp", &["-fnon-call-exceptions"]) else { return };
    finish(place.pagemill_run(&[], &program), TIMEOUT).assert_success();
}

/// Returns the command `pagemill run` for a program, with a second preloaded library. That library purges pages of
/// strict ranges before the program starts, and accesses them at the program's end.
fn with_purged_pages(place: &TestFolder, program: &Path, arguments: &[&str]) -> Option<Command> {
    let library = place.compile("strict_first.c", &["-shared", "-fPIC"])?;
    let mut command = place.pagemill_run(&[], program);
    command.args(arguments).env("LD_PRELOAD", library);
    Some(command)
}

/// Under Pagemill, a Java program must still handle its null references and stack overflows.
#[test]
fn java_handles_its_faults() {
    let place = TestFolder::new();
    if !is_installed("java") || !is_installed("javac") {
        return println!("skipped: no Java here");
    }
    let mut compile = place.command("javac");
    compile.arg("-d").arg(place.path("")).arg(foreign("Faults.java"));
    finish(compile, TIMEOUT).assert_success();
    let classes = place.path("");
    let arguments = ["-Xmx256m", "-cp", classes.to_str().unwrap(), "Faults"];
    let Some(command) = with_purged_pages(&place, Path::new("java"), &arguments) else { return };
    let end = finish(command, TIMEOUT);
    end.assert_success();
    assert_eq!(end.out, "2003\n");
    assert!(end.err.contains("looked once more"), "{}", end.err);
}

/// Under Pagemill, a Go program with cgo must still handle its nil references, on several threads.
#[test]
fn go_handles_its_faults() {
    let place = TestFolder::new();
    if !is_installed("go") || !is_installed("cc") {
        return println!("skipped: no Go here");
    }
    let program = place.path("faults");
    let mut compile = place.command("go");
    compile.env("HOME", place.path("home")).env("GO111MODULE", "off").env("CGO_ENABLED", "1").env("GOFLAGS", "");
    compile.args(["build", "-o"]).arg(&program).arg(foreign("faults.go"));
    let end = finish(compile, TIMEOUT);
    if !end.status.success() {
        return println!("skipped: Go cannot build here: {}", end.err);
    }
    let Some(command) = with_purged_pages(&place, &program, &[]) else { return };
    let end = finish(command, TIMEOUT);
    end.assert_success();
    assert_eq!(end.out, format!("[1000 1000 1000 1000] {SIGBUS}\n"));
}

/// Under Pagemill, a Rust program must still detect and report a stack overflow.
#[test]
fn rust_reports_stack_overflows() {
    let place = TestFolder::new();
    if !is_installed("rustc") {
        return println!("skipped: no rustc here");
    }
    let program = place.path("overflow");
    let mut compile = place.command("rustc");
    compile.arg("-o").arg(&program).arg(foreign("overflow.rs"));
    finish(compile, TIMEOUT).assert_success();
    let Some(command) = with_purged_pages(&place, &program, &[]) else { return };
    let end = finish(command, TIMEOUT);
    assert_eq!(end.code(), 128 + SIGABRT, "{:?} {}", end.status, end.err);
    assert!(end.err.contains("has overflowed its stack"), "{}", end.err);
}
