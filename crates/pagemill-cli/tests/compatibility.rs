//! Programs with other allocators, in linker namespaces, and under system-call filters. Each program must either work
//! or be refused with an explanation. docs/compatibility.md lists all programs that were tried.

mod common;

use common::{End, TIMEOUT, TestFolder, finish};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the program `fork.c`, which allocates, frees, starts threads and forks.
fn compile_fork_program(place: &TestFolder, flags: &[&str]) -> Option<PathBuf> {
    place.compile("fork.c", flags)
}

fn run(place: &TestFolder, options: &[&str], words: &[&str], preload: Option<&Path>) -> End {
    let mut command = place.pagemill_run(options, words[0]);
    command.args(&words[1..]);
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", preload);
    }
    finish(command, TIMEOUT)
}

/// Returns the path of an installed allocator library whose file name starts with `name`.
fn allocator_library(name: &str) -> Option<PathBuf> {
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

/// A program that is linked to another allocator, or preloads one, must run on Pagemill.
#[test]
fn pagemill_precedes_other_allocators() {
    for name in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so"] {
        let Some(library) = allocator_library(name) else { continue };
        let place = TestFolder::new();
        let Some(linked) = compile_fork_program(&place, &["-Wl,--no-as-needed", library.to_str().unwrap()]) else {
            return;
        };
        run(&place, &[], &[linked.to_str().unwrap(), "8"], None).assert_success();
        let Some(plain) = compile_fork_program(&place, &[]) else { return };
        run(&place, &["--limit", "1G"], &[plain.to_str().unwrap(), "8"], Some(&library)).assert_success();
    }
}

/// A library in a linker namespace (`dlmopen`) has a C library of its own and allocates from it. That must work.
#[test]
fn linker_namespaces_work() {
    let place = TestFolder::new();
    let Some(plugin) = place.compile("namespace_plugin.c", &["-shared", "-fPIC"]) else { return };
    let Some(program) = place.compile("namespace.c", &["-ldl"]) else { return };
    for options in [&[] as &[&str], &["--limit", "1G"]] {
        run(&place, options, &[program.to_str().unwrap(), plugin.to_str().unwrap()], None).assert_success();
    }
}

/// `run` must explain why it cannot replace the allocator of a static position-independent program. It must refuse a
/// program that needs a sanitizer library.
#[test]
fn unreachable_programs_are_explained() {
    let place = TestFolder::new();
    let says = |flags: &[&str], options: &[&str], code: i32, sentence: &str| {
        // The static version of the C library, or of the sanitizer library, may not be installed.
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
    says(&["-static-pie"], &["--limit", "1G"], 126, "is linked statically, so --limit has no effect on it");
    says(&["-fsanitize=address"], &[], 126, "is built with a sanitizer");
    says(&["-fsanitize=thread"], &["--force"], 126, "run it without pagemill");
}

/// Compiles a program with the given compiler. Prints a message and returns `None` if that is impossible.
fn compile_with(place: &TestFolder, compiler: &str, source: &str, flags: &[&str]) -> Option<String> {
    let out = place.path("out");
    let mut command = Command::new(compiler);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
    command.args(["-w", "-pthread"]).args(flags).arg(source).arg("-o").arg(&out);
    if common::is_missing(compiler) || !command.output().is_ok_and(|output| output.status.success()) {
        println!("skipped: nothing is compiled with {compiler} {flags:?}");
        return None;
    }
    Some(out.to_str().unwrap().to_owned())
}

/// The loader of musl ends a program if it cannot load the preload library. So `run` must start a program of musl
/// without the library, and refuse the program under a limit. A shell that runs under a limit must be able to start
/// such a program without `LD_PRELOAD`.
#[test]
fn programs_of_musl_run_without_the_library() {
    let place = TestFolder::new();
    let Some(program) = compile_with(&place, "musl-gcc", "fork.c", &[]) else { return };
    let end = run(&place, &[], &[&program, "4"], None);
    assert!(end.code() == 0 && end.err.contains("made for another C library"), "{}", end.err);
    run(&place, &["--limit", "1G", "--force"], &[&program, "4"], None).assert_success();
    let refused = run(&place, &["--limit", "1G"], &[&program, "4"], None);
    assert!(refused.code() == 126 && refused.err.contains("--limit has no effect on it"), "{}", refused.err);
    assert_eq!(refused.err.lines().count(), 1, "{}", refused.err);
    run(&place, &["--limit", "1G"], &["env", "-u", "LD_PRELOAD", &program, "4"], None).assert_success();
}

/// A sanitizer with an allocator of its own is linked into a program. The program runs on that allocator, so `run` must
/// refuse it under a limit. A sanitizer without an allocator must change nothing.
#[test]
fn static_sanitizers_are_explained() {
    for sanitizer in ["address", "thread", "memory", "leak"] {
        let place = TestFolder::new();
        let Some(program) = compile_with(&place, "clang", "edges.c", &[&format!("-fsanitize={sanitizer}")]) else {
            continue;
        };
        let end = run(&place, &["--limit", "1G"], &[&program, "4"], None);
        assert!(end.code() == 126 && end.err.contains("so --limit has no effect on it"), "{sanitizer}: {}", end.err);
        if sanitizer == "address" {
            // The leak check traces the process. If tracing is not allowed, the check fails.
            let mut command = place.pagemill_run(&[], &program);
            command.env("ASAN_OPTIONS", "detect_leaks=0");
            let end = finish(command, TIMEOUT);
            assert!(end.code() == 0 && end.err.contains("but on its own allocator"), "{}", end.err);
        }
    }
    let place = TestFolder::new();
    let Some(program) = compile_with(&place, "clang", "fork.c", &["-fsanitize=undefined"]) else { return };
    run(&place, &["--limit", "1G"], &[&program, "4"], None).assert_success();
}

/// Programs whose ELF headers were changed by `patchelf` must work as before.
#[test]
fn patched_programs_work() {
    let place = TestFolder::new();
    if common::is_missing("patchelf") {
        return;
    }
    let Some(program) = compile_fork_program(&place, &[]) else { return };
    let long = format!("/{}", "folder/".repeat(60));
    let changes: [&[&str]; 4] = [
        &["--force-rpath", "--set-rpath", "$ORIGIN"],
        &["--add-needed", "libm.so.6"],
        &["--page-size", "65536", "--set-rpath", &long],
        &["--remove-needed", "libc.so.6", "--add-needed", "libc.so.6"],
    ];
    for change in changes {
        let patched = place.install(&program, "patched");
        let mut command = place.command("patchelf");
        command.args(change).arg(&patched);
        finish(command, TIMEOUT).assert_success();
        run(&place, &["--limit", "1G"], &[patched.to_str().unwrap(), "4"], None).assert_success();
    }
    let mut command = place.command("patchelf");
    command.args(["--set-interpreter", "/no/such/loader"]).arg(&program);
    finish(command, TIMEOUT).assert_success();
    let end = run(&place, &["--limit", "1G"], &[program.to_str().unwrap(), "4"], None);
    assert!(end.code() == 127 && end.err.contains("No such file"), "{}", end.err);
}

/// A dynamic loader that is started as a program must load the preload library into the program that it runs.
#[test]
fn a_program_started_by_its_loader_is_limited() {
    let loaders = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
    let Some(loader) = loaders.into_iter().find(|path| Path::new(path).exists()) else {
        return println!("skipped: no loader at the usual places");
    };
    let place = TestFolder::new();
    let Some(program) = compile_fork_program(&place, &[]) else { return };
    let end = run(&place, &["--limit", "1G"], &[loader, program.to_str().unwrap(), "4"], None);
    end.assert_success();
    assert!(!end.err.contains("statically"), "{}", end.err);
}

/// If the path of the program is a pipe, `run` must refuse it at once, without waiting for a writer.
#[test]
fn a_pipe_is_refused() {
    let place = TestFolder::new();
    assert!(common::shell(&format!("mkfifo -m 755 {}", place.path("pipe").display())).success());
    let end = run(&place, &[], &[place.path("pipe").to_str().unwrap()], None);
    assert!(end.code() == 126 && end.err.contains("Permission denied"), "{}", end.err);
}

/// A system-call filter refuses calls that only Pagemill's allocator makes. The program must still run. If the filter
/// kills for such calls instead, the program ends, and `run` must report why.
#[test]
fn system_call_filters_are_survived_or_reported() {
    let place = TestFolder::new();
    let (Some(filter), Some(program)) = (place.compile("filter.c", &[]), compile_fork_program(&place, &[])) else {
        return;
    };
    let words = |mode| [filter.to_str().unwrap(), mode, program.to_str().unwrap(), "8"];
    for options in [&[] as &[&str], &["--limit", "1G"]] {
        run(&place, options, &words("refuse"), None).assert_success();
        run(&place, options, &words("deny"), None).assert_success();
        let killed = run(&place, options, &words("kill"), None);
        assert!(killed.code() == 128 + libc::SIGSYS && killed.err.contains("seccomp"), "{}", killed.err);
    }
}
