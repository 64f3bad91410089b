//! Programs beside other allocators, in namespaces of their own, under filters: they work, or are refused with a sentence.
//! docs/compatibility.md has all that was tried.

mod common;

use common::{End, Place, STUCK_AFTER, finish};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program that allocates, frees, starts threads and forks.
fn program(place: &Place, flags: &[&str]) -> Option<PathBuf> {
    place.compile("fork.c", flags)
}

fn run(place: &Place, options: &[&str], words: &[&str], preload: Option<&Path>) -> End {
    let mut command = place.pagemill_run(options, words[0]);
    command.args(&words[1..]);
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", preload);
    }
    finish(command, STUCK_AFTER)
}

/// Another allocator of this system, by the start of its library's name.
fn allocator(name: &str) -> Option<PathBuf> {
    let folders = ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib64"];
    let found = folders.iter().find_map(|folder| {
        let mut paths = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
        paths.find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)))
    });
    if found.is_none() {
        println!("skipped: there is no {name}");
    }
    found
}

/// Programs that are linked to another allocator, and such beside another preload, run on this one.
#[test]
fn other_allocators_give_way() {
    for name in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so"] {
        let Some(library) = allocator(name) else { continue };
        let place = Place::new();
        let Some(linked) = program(&place, &["-Wl,--no-as-needed", library.to_str().unwrap()]) else { return };
        run(&place, &[], &[linked.to_str().unwrap(), "8"], None).assert_success();
        let Some(plain) = program(&place, &[]) else { return };
        run(&place, &["--limit", "1G"], &[plain.to_str().unwrap(), "8"], Some(&library)).assert_success();
    }
}

/// A library in a namespace of its own (`dlmopen`) has a C library of its own, whose memory is its own, too.
#[test]
fn namespaces_of_their_own_work() {
    let place = Place::new();
    let Some(plugin) = place.compile("namespace_plugin.c", &["-shared", "-fPIC"]) else { return };
    let Some(program) = place.compile("namespace.c", &["-ldl"]) else { return };
    for options in [&[] as &[&str], &["--limit", "1G"]] {
        run(&place, options, &[program.to_str().unwrap(), plugin.to_str().unwrap()], None).assert_success();
    }
}

/// Static position-independent programs are named; sanitizers that bring an allocator are refused.
#[test]
fn what_cannot_be_reached_is_named() {
    let place = Place::new();
    let says = |flags: &[&str], options: &[&str], code: i32, sentence: &str| {
        // Its static libraries, or the sanitizer's, may not be installed.
        let mut command = Command::new("cc");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/fork.c");
        command.args(["-w", "-pthread"]).args(flags).arg(source).arg("-o").arg(place.path("out"));
        if !command.output().is_ok_and(|output| output.status.success()) {
            return println!("skipped: nothing is compiled with {flags:?}");
        }
        let end = run(&place, options, &[place.path("out").to_str().unwrap(), "4"], None);
        assert!(end.code() == code && end.err.contains(sentence), "{flags:?}: {}", end.err);
    };
    says(&["-static-pie"], &[], 0, "is linked statically: it runs");
    says(&["-static-pie"], &["--limit", "1G"], 126, "is linked statically, so --limit cannot bound it");
    says(&["-fsanitize=address"], &[], 126, "is built with a sanitizer");
    says(&["-fsanitize=thread"], &["--force"], 126, "run it without pagemill");
}

/// System-call filters. With one that refuses calls which only the allocator makes, the program runs without them. One
/// that kills for such a call ends the program, and `run` reports why.
#[test]
fn filters_of_system_calls() {
    let place = Place::new();
    let (Some(filter), Some(program)) = (place.compile("filter.c", &[]), program(&place, &[])) else { return };
    let words = |mode| [filter.to_str().unwrap(), mode, program.to_str().unwrap(), "8"];
    for options in [&[] as &[&str], &["--limit", "1G"]] {
        run(&place, options, &words("refuse"), None).assert_success();
        let killed = run(&place, options, &words("kill"), None);
        assert!(killed.code() == 128 + libc::SIGSYS && killed.err.contains("seccomp"), "{}", killed.err);
    }
}
