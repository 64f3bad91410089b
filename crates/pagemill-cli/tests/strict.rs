//! Strict volatile ranges in preloaded programs, and in runtimes that handle faults themselves.

mod common;

use common::{Place, STUCK_AFTER, finish, is_installed, is_root};
use std::path::{Path, PathBuf};
use std::process::Command;

const SIGABRT: i32 = 6;
const SIGBUS: i32 = 7;
const SIGSEGV: i32 = 11;

fn foreign(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign").join(name)
}

/// A purged page raises `SIGBUS`, and all other faults raise their usual signal, however and whenever handlers are set.
#[test]
fn handlers_get_what_is_theirs() {
    let place = Place::new();
    let Some(program) = place.compile("strict_preload.c", &[]) else { return };
    for after in [Some("0"), None] {
        let mut command = place.pagemill_run(&[], &program);
        command.arg("handlers").env_remove("PAGEMILL_AFTER").envs(after.map(|bytes| ("PAGEMILL_AFTER", bytes)));
        finish(command, STUCK_AFTER).assert_success();
    }
}

/// Without a handler the program ends by the signal that it would end by without Pagemill.
#[test]
fn programs_end_by_the_right_signal() {
    let place = Place::new();
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
        let end = finish(command, STUCK_AFTER);
        if end.out.starts_with("skipped") {
            return println!("{}", end.out);
        }
        assert_eq!(end.out, "marked\n", "{how}");
        // `run` exits as its program does.
        assert_eq!(end.code(), 128 + signal, "{how}: {:?} {}", end.status, end.err);
    }
}

/// The first process of a container: a signal that it sends itself does not end it, but its own faults do.
#[test]
fn the_first_process_ends_as_well() {
    let place = Place::new();
    let Some(program) = place.compile("strict_preload.c", &[]) else { return };
    if !is_root() || !is_installed("unshare") {
        return println!("skipped: no namespace of processes without root and unshare");
    }
    let mut command = place.pagemill_run(&[], "unshare");
    command.args(["--pid", "--fork"]).arg(&program).arg("touched");
    let end = finish(command, STUCK_AFTER);
    if end.out.starts_with("skipped") {
        return println!("{}", end.out);
    }
    assert_eq!(end.out, "marked\n", "{}", end.err);
    assert!([128 + SIGBUS, 128 + SIGSEGV].contains(&end.code()), "{:?} {}", end.status, end.err);
}

/// A C++ handler throws out of a fault, in a program compiled for that.
#[test]
fn handlers_may_throw() {
    let place = Place::new();
    let Some(program) = place.compile("strict_throw.cpp", &["-fnon-call-exceptions"]) else { return };
    finish(place.pagemill_run(&[], &program), STUCK_AFTER).assert_success();
}

/// `pagemill run` of a program with a preloaded library that purges pages before the program starts and checks them at
/// its end.
fn with_purged_pages(place: &Place, program: &Path, arguments: &[&str]) -> Option<Command> {
    let library = place.compile("strict_first.c", &["-shared", "-fPIC"])?;
    let mut command = place.pagemill_run(&[], program);
    command.args(arguments).env("LD_PRELOAD", library);
    Some(command)
}

/// Null references and stack overflows of a Java program.
#[test]
fn java_keeps_its_faults() {
    let place = Place::new();
    if !is_installed("java") || !is_installed("javac") {
        return println!("skipped: no Java here");
    }
    let mut compile = place.command("javac");
    compile.arg("-d").arg(place.path("")).arg(foreign("Faults.java"));
    finish(compile, STUCK_AFTER).assert_success();
    let classes = place.path("");
    let arguments = ["-Xmx256m", "-cp", classes.to_str().unwrap(), "Faults"];
    let Some(command) = with_purged_pages(&place, Path::new("java"), &arguments) else { return };
    let end = finish(command, STUCK_AFTER);
    end.assert_success();
    assert_eq!(end.out, "2003\n");
    assert!(end.err.contains("looked once more"), "{}", end.err);
}

/// Nil references of a Go program with cgo, on several threads.
#[test]
fn go_keeps_its_faults() {
    let place = Place::new();
    if !is_installed("go") || !is_installed("cc") {
        return println!("skipped: no Go here");
    }
    let program = place.path("faults");
    let mut compile = place.command("go");
    compile.env("HOME", place.path("home")).env("GO111MODULE", "off").env("CGO_ENABLED", "1").env("GOFLAGS", "");
    compile.args(["build", "-o"]).arg(&program).arg(foreign("faults.go"));
    let end = finish(compile, STUCK_AFTER);
    if !end.status.success() {
        return println!("skipped: Go cannot build here: {}", end.err);
    }
    let Some(command) = with_purged_pages(&place, &program, &[]) else { return };
    let end = finish(command, STUCK_AFTER);
    end.assert_success();
    assert_eq!(end.out, format!("[1000 1000 1000 1000] {SIGBUS}\n"));
}

/// Rust detects and reports a stack overflow.
#[test]
fn rust_keeps_its_stack_guard() {
    let place = Place::new();
    if !is_installed("rustc") {
        return println!("skipped: no rustc here");
    }
    let program = place.path("overflow");
    let mut compile = place.command("rustc");
    compile.arg("-o").arg(&program).arg(foreign("overflow.rs"));
    finish(compile, STUCK_AFTER).assert_success();
    let Some(command) = with_purged_pages(&place, &program, &[]) else { return };
    let end = finish(command, STUCK_AFTER);
    assert_eq!(end.code(), 128 + SIGABRT, "{:?} {}", end.status, end.err);
    assert!(end.err.contains("has overflowed its stack"), "{}", end.err);
}
