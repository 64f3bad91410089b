//! Fork handlers of libraries whose constructors run before the preload library's.
//!
//! They may allocate, and wait for threads that allocate: Pagemill's locks are taken after the last prepare handler, and
//! released before the first handler behind the fork. A program that hangs ends itself (`alarm`).

mod common;

use common::{End, Place, STUCK_AFTER, finish};
use std::path::Path;

/// The program with the library, which is loaded the way that `link` says.
#[derive(Clone, Copy)]
enum Link {
    /// The program names it.
    Needed,
    /// It is preloaded behind Pagemill.
    Preloaded,
}

/// Runs `atfork.c` with a case and a count under these options of `run`.
fn run(place: &Place, link: Link, options: &[&str], arguments: &[&str]) -> Option<End> {
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
    let end = finish(command, STUCK_AFTER);
    place.assert_swept();
    Some(end)
}

/// Grown from the first call on, growing during the forks, on the libc fallback, and checked.
const WAYS: &[&[&str]] = &[&["--after", "0"], &["--after", "100K"], &["--after", "1G"], &["--after", "0", "--check"]];

#[track_caller]
fn holds(case: &str) {
    let place = Place::new();
    for options in WAYS {
        for link in [Link::Needed, Link::Preloaded] {
            let Some(end) = run(&place, link, options, &[case, "30"]) else { return };
            end.assert_success();
        }
    }
}

#[test]
fn handlers_may_allocate() {
    holds("allocate");
}

#[test]
fn a_handler_may_join_threads_that_allocate() {
    holds("join");
}

/// Of handlers registered later the prepare handlers run earlier, the others later, as POSIX has it.
#[test]
fn handlers_run_in_the_order_of_the_c_library() {
    holds("order");
}

/// The C library drops the handlers of a library that is unloaded: what is forwarded names it.
#[test]
fn handlers_end_with_their_library() {
    let place = Place::new();
    let Some(plugin) = place.compile("atfork_plugin.c", &["-shared", "-fPIC"]) else { return };
    let arguments = ["unload", "2", Path::to_str(&plugin).unwrap()];
    let Some(end) = run(&place, Link::Needed, &["--after", "0"], &arguments) else { return };
    end.assert_success();
}

/// The programs do what they say without Pagemill, too.
#[test]
fn the_programs_hold_without_pagemill() {
    let place = Place::new();
    let Some(library) = place.compile("atfork_library.c", &["-shared", "-fPIC"]) else { return };
    let rpath = format!("-Wl,--no-as-needed,-rpath,{}", library.parent().unwrap().display());
    let Some(program) = place.compile("atfork.c", &[&rpath, library.to_str().unwrap(), "-ldl"]) else { return };
    for case in ["allocate", "join", "order"] {
        let mut command = place.command(&program);
        command.args([case, "30"]);
        finish(command, STUCK_AFTER).assert_success();
    }
}
