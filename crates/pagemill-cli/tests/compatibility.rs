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

/// Compiles the program with another compiler; `None`, with a sentence, if that is missing or cannot.
fn compiled_by(place: &Place, compiler: &str, source: &str, flags: &[&str]) -> Option<String> {
    let out = place.path("out");
    let mut command = Command::new(compiler);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
    command.args(["-w", "-pthread"]).args(flags).arg(source).arg("-o").arg(&out);
    if common::lacks(compiler) || !command.output().is_ok_and(|output| output.status.success()) {
        println!("skipped: nothing is compiled with {compiler} {flags:?}");
        return None;
    }
    Some(out.to_str().unwrap().to_owned())
}

/// musl's loader ends a program whose preload it cannot load. As first program it runs without, or is refused under a limit.
#[test]
fn programs_of_musl_run_without_the_library() {
    let place = Place::new();
    let Some(program) = compiled_by(&place, "musl-gcc", "fork.c", &[]) else { return };
    let end = run(&place, &[], &[&program, "4"], None);
    assert!(end.code() == 0 && end.err.contains("made for another C library"), "{}", end.err);
    run(&place, &["--limit", "1G", "--force"], &[&program, "4"], None).assert_success();
    let refused = run(&place, &["--limit", "1G"], &[&program, "4"], None);
    assert!(refused.code() == 126 && refused.err.contains("--limit cannot bound it"), "{}", refused.err);
    assert_eq!(refused.err.lines().count(), 1, "{}", refused.err);
    run(&place, &["--limit", "1G"], &["env", "-u", "LD_PRELOAD", &program, "4"], None).assert_success();
}

/// Programs with a sanitizer that clang linked into them run on its allocator, which no limit bounds; a sanitizer
/// without an allocator changes nothing.
#[test]
fn static_sanitizers_are_named() {
    for sanitizer in ["address", "thread", "memory", "leak"] {
        let place = Place::new();
        let Some(program) = compiled_by(&place, "clang", "edges.c", &[&format!("-fsanitize={sanitizer}")]) else {
            continue;
        };
        let end = run(&place, &["--limit", "1G"], &[&program, "4"], None);
        assert!(end.code() == 126 && end.err.contains("so --limit cannot bound it"), "{sanitizer}: {}", end.err);
        if sanitizer == "address" {
            // Leaks are looked for by tracing, which may not be allowed.
            let mut command = place.pagemill_run(&[], &program);
            command.env("ASAN_OPTIONS", "detect_leaks=0");
            let end = finish(command, STUCK_AFTER);
            assert!(end.code() == 0 && end.err.contains("but on its own allocator"), "{}", end.err);
        }
    }
    let place = Place::new();
    let Some(program) = compiled_by(&place, "clang", "fork.c", &["-fsanitize=undefined"]) else { return };
    run(&place, &["--limit", "1G"], &[&program, "4"], None).assert_success();
}

/// Programs whose headers were rewritten work as before.
#[test]
fn patched_programs_work() {
    let place = Place::new();
    if common::lacks("patchelf") {
        return;
    }
    let Some(program) = program(&place, &[]) else { return };
    let long = format!("/{}", "folder/".repeat(60));
    let changes: [&[&str]; 4] = [
        &["--force-rpath", "--set-rpath", "$ORIGIN"],
        &["--add-needed", "libm.so.6"],
        &["--page-size", "65536", "--set-rpath", &long],
        &["--remove-needed", "libc.so.6", "--add-needed", "libc.so.6"],
    ];
    for change in changes {
        let patched = place.path("patched");
        std::fs::copy(&program, &patched).unwrap();
        let mut command = place.command("patchelf");
        command.args(change).arg(&patched);
        finish(command, STUCK_AFTER).assert_success();
        run(&place, &["--limit", "1G"], &[patched.to_str().unwrap(), "4"], None).assert_success();
    }
    let mut command = place.command("patchelf");
    command.args(["--set-interpreter", "/no/such/loader"]).arg(&program);
    finish(command, STUCK_AFTER).assert_success();
    let end = run(&place, &["--limit", "1G"], &[program.to_str().unwrap(), "4"], None);
    assert!(end.code() == 127 && end.err.contains("No such file"), "{}", end.err);
}

/// The loader, started as a program, loads the library into the program that it is given.
#[test]
fn the_loader_as_a_program_is_bounded() {
    let loaders = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
    let Some(loader) = loaders.into_iter().find(|path| Path::new(path).exists()) else {
        return println!("skipped: no loader at the usual places");
    };
    let place = Place::new();
    let Some(program) = program(&place, &[]) else { return };
    let end = run(&place, &["--limit", "1G"], &[loader, program.to_str().unwrap(), "4"], None);
    end.assert_success();
    assert!(!end.err.contains("statically"), "{}", end.err);
}

/// A pipe in place of a program is refused at once, as by a shell.
#[test]
fn a_pipe_is_no_program() {
    let place = Place::new();
    assert!(common::shell(&format!("mkfifo -m 755 {}", place.path("pipe").display())).success());
    let end = run(&place, &[], &[place.path("pipe").to_str().unwrap()], None);
    assert!(end.code() == 126 && end.err.contains("Permission denied"), "{}", end.err);
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
        run(&place, options, &words("deny"), None).assert_success();
        let killed = run(&place, options, &words("kill"), None);
        assert!(killed.code() == 128 + libc::SIGSYS && killed.err.contains("seccomp"), "{}", killed.err);
    }
}
