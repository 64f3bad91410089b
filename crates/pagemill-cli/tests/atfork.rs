//! Fork handlers of a library whose constructors run before those of the preload library.
//!
//! Such handlers may allocate, and may wait for threads that allocate. So Pagemill must take its locks after the last
//! prepare handler, and release them before the first handler that runs after the fork. A program that hangs ends
//! itself by `alarm`.

mod common;

use common::{End, TIMEOUT, TestFolder, finish};
use std::path::Path;

/// How the library with the fork handlers is loaded.
#[derive(Clone, Copy)]
enum Link {
    /// The program is linked to the library.
    Needed,
    /// The library is preloaded after Pagemill's preload library.
    Preloaded,
}

/// Runs the program `atfork.c` with `arguments` under `pagemill run` with `options`. Returns `None` if the program
/// cannot be compiled.
fn run_atfork_program(place: &TestFolder, link: Link, options: &[&str], arguments: &[&str]) -> Option<End> {
    let library = place.compile("atfork_library.c", &["-shared", "-fPIC", "-Wl,-soname,atfork_library.c.out"])?;
    let folder = library.parent().unwrap().to_str().unwrap();
    let rpath = format!("-Wl,--no-as-needed,-rpath,{folder}");
    let library = library.to_str().unwrap();
    let program = match link {
        Link::Needed => place.compile("atfork.c", &[&rpath, library, "-ldl"])?,
        Link::Preloaded => place.compile("atfork.c", &["-ldl"])?,
    };
    let mut command = place.pagemill_run(options, program);
    command.args(arguments).env_remove("PAGEMILL_AFTER");
    if let Link::Preloaded = link {
        command.env("LD_PRELOAD", library);
    }
    let end = finish(command, TIMEOUT);
    place.assert_no_files_left();
    Some(end)
}

/// Sets of options of `run`. With the first, Pagemill's heap exists from the first call on. With the second, it is
/// created during the forks. With the third, the C library serves the program to its end. With the fourth, the heap
/// exists from the first call on and checks each free.
const OPTION_SETS: &[&[&str]] =
    &[&["--after", "0"], &["--after", "100K"], &["--after", "1G"], &["--after", "0", "--check"]];

#[track_caller]
fn assert_case_succeeds(case: &str) {
    let place = TestFolder::new();
    for options in OPTION_SETS {
        for link in [Link::Needed, Link::Preloaded] {
            let Some(end) = run_atfork_program(&place, link, options, &[case, "30"]) else { return };
            end.assert_success();
        }
    }
}

#[test]
fn handlers_may_allocate() {
    assert_case_succeeds("allocate");
}

#[test]
fn a_handler_may_join_threads_that_allocate() {
    assert_case_succeeds("join");
}

/// Prepare handlers must run in the reverse order of their registration, and the other handlers in the order of their
/// registration, as POSIX requires.
#[test]
fn handlers_run_in_the_order_of_the_c_library() {
    assert_case_succeeds("order");
}

/// The C library must drop the fork handlers of a library that is unloaded, even if Pagemill forwarded their
/// registration to the C library.
#[test]
fn handlers_of_an_unloaded_library_are_dropped() {
    let place = TestFolder::new();
    let Some(plugin) = place.compile("atfork_plugin.c", &["-shared", "-fPIC"]) else { return };
    let arguments = ["unload", "2", Path::to_str(&plugin).unwrap()];
    let Some(end) = run_atfork_program(&place, Link::Needed, &["--after", "0"], &arguments) else { return };
    end.assert_success();
}

/// The programs of the other tests must also succeed without Pagemill. Otherwise their success would show nothing about
/// Pagemill.
#[test]
fn the_programs_succeed_without_pagemill() {
    let place = TestFolder::new();
    let Some(library) = place.compile("atfork_library.c", &["-shared", "-fPIC"]) else { return };
    let rpath = format!("-Wl,--no-as-needed,-rpath,{}", library.parent().unwrap().display());
    let Some(program) = place.compile("atfork.c", &[&rpath, library.to_str().unwrap(), "-ldl"]) else { return };
    for case in ["allocate", "join", "order"] {
        let mut command = place.command(&program);
        command.args([case, "30"]);
        finish(command, TIMEOUT).assert_success();
    }
}
