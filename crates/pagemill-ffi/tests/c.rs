//! Tests of the C interface with C programs.

#[allow(dead_code)] // shared with tests that use more of it
#[path = "../../pagemill-cli/tests/common/group.rs"]
mod group;

use pagemill_core::published;
use pagemill_core::units::os_page_bytes;
use pagemill_sys::process;
use pagemill_volatile::List;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Builds the C program `source` of tests/c with this crate's library. Returns the path of the executable.
fn build_c_program(folder: &Path, source: &str) -> PathBuf {
    build(folder, &Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source))
}

/// Builds a C program with this crate's library. Returns the path of the executable.
fn build(folder: &Path, source: &Path) -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let program = folder.join("program");
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(source)
        .arg("-I")
        .arg(crate_folder.join("include"))
        .arg("-L")
        .arg(&library)
        .arg("-lpagemill_ffi")
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// A C program marks 64 MiB as volatile and unmarks them, without memory pressure. Nothing may be purged.
#[test]
fn c_program_marks_and_unmarks() {
    let folder = tempfile::tempdir().unwrap();
    let program = build_c_program(folder.path(), "vrange.c");
    let output = Command::new(&program).arg("64").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 of 16 gone\n", "without pressure nothing goes");
}

/// The C program of docs/recipe-c.md must work with the library, too. Nothing is purged, because `malloc_trim` is that of
/// the C library.
#[test]
fn c_program_of_the_recipe_works_with_the_library() {
    let folder = tempfile::tempdir().unwrap();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recipe-c.md");
    let page = std::fs::read_to_string(page).unwrap();
    let source = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    std::fs::write(folder.path().join("tile.c"), source).unwrap();
    let output = Command::new(build(folder.path(), &folder.path().join("tile.c"))).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "kept\nkept\n");
}

/// A C program reads its figures before it marks 64 MiB as volatile, while they are marked, and after it has unmarked
/// them. The 64 MiB must count as giveable only while they are marked.
#[test]
fn marked_memory_is_giveable_in_figures() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(build_c_program(folder.path(), "figures.c")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "64 MiB giveable while marked\n");
}

/// A C program fills and marks twice as much memory as the limit of its control group allows. The program must not be
/// killed, and about half of the memory must be purged.
#[test]
fn volatile_memory_is_purged_before_group_limit() {
    let folder = tempfile::tempdir().unwrap();
    let program = build_c_program(folder.path(), "vrange.c");
    let Some(group) = group::Group::new("vrange-c", 256 << 20) else { return };
    let mut command = Command::new(&program);
    command.arg("512");
    let output = group.enter(&command).output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let gone: u64 = said.split(' ').next().unwrap().parse().unwrap();
    assert!((64..=118).contains(&gone), "{said}");
}

/// A program with memory that is marked as volatile sleeps while another program of the same control group needs that
/// memory. The marked memory must be purged, and no program may be killed.
#[test]
fn sleeping_program_is_purged_for_its_group() {
    let folder = tempfile::tempdir().unwrap();
    let program = build_c_program(folder.path(), "vrange.c");
    let Some(group) = group::Group::new("vrange-hold", 256 << 20) else { return };
    let mut command = Command::new(&program);
    command.args(["hold", "180"]);
    let mut sleeper = group.enter(&command).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(sleeper.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "ready");
    let mut command = Command::new("sh");
    command.args(["-c", "head -c 125829120 /dev/zero | tail -c 125829120 | wc -c"]);
    let output = group.enter(&command).output().unwrap();
    drop(sleeper.stdin.take());
    let last = said.next().unwrap().unwrap();
    assert!(sleeper.wait().unwrap().success());
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "125829120",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let gone: u64 = last.split(' ').next().unwrap().parse().unwrap();
    assert!(gone >= 44, "{last}");
}

/// A C program with a `SIGSEGV` handler of its own marks memory as strict, twice as much as the limit of its control
/// group. Reading a purged page must raise `SIGBUS`, and other pages must read as written.
#[test]
fn purged_strict_memory_raises_sigbus() {
    let folder = tempfile::tempdir().unwrap();
    let program = build_c_program(folder.path(), "strict.c");
    let Some(group) = group::Group::new("strict-c", 256 << 20) else { return };
    let mut command = Command::new(&program);
    command.arg("512");
    let output = group.enter(&command).output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if said.starts_with("skipped") {
        return println!("{said}");
    }
    let gone: u64 = said.split(' ').next().unwrap().parse().unwrap();
    assert!((64..=118).contains(&gone), "{said}");
}

/// Requests the list of volatile ranges of a process whose figures file is in `folder`. Returns `None` if there is no
/// such file.
fn request_list(folder: &Path, pid: u32) -> Option<List> {
    let identity = process::identity(pid).unwrap();
    let figures = published::file_of(folder.to_str().unwrap(), identity).unwrap();
    std::fs::exists(figures.as_str()).unwrap().then(|| pagemill_volatile::ask(&figures, identity, || false).unwrap())
}

/// Returns the lengths of the listed ranges in OS pages, in ascending order.
fn page_counts(list: &List) -> Vec<usize> {
    let mut pages: Vec<_> = list.ranges.iter().map(|range| range.len_bytes / os_page_bytes()).collect();
    pages.sort_unstable();
    pages
}

/// Lists the volatile ranges of three processes: a program that marks memory, a child of it that also marks memory, and
/// a child that does not. The test runs with and without an exec of the program. Marks that a child inherited must be
/// listed, and marks from before the exec must not. No file may be left at the end.
#[test]
fn marked_ranges_of_processes_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let program = build_c_program(folder.path(), "vranges.c");
    let runtime = folder.path().join("runtime");
    std::fs::DirBuilder::new().mode(0o700).create(&runtime).unwrap();
    let published = runtime.join("pagemill");
    for arguments in [&[][..], &["exec"]] {
        let mut command = Command::new(&program);
        command.args(arguments).env("XDG_RUNTIME_DIR", &runtime).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = command.spawn().unwrap();
        let line = BufReader::new(holder.stdout.take().unwrap()).lines().next().unwrap().unwrap();
        let pids: Vec<u32> = line.split(' ').map(|pid| pid.parse().unwrap()).collect();
        let lists: Vec<_> = pids.iter().map(|pid| request_list(&published, *pid)).collect();
        drop(holder.stdin.take());
        assert!(holder.wait().unwrap().success());
        assert_eq!(lists[0].as_ref().map(page_counts), Some(vec![16]));
        assert_eq!(lists[1].as_ref().map(page_counts), Some(vec![4, 16]), "with what it has from its parent");
        assert_eq!(lists[2], None);
        let left: Vec<_> = std::fs::read_dir(&published).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}
