//! The C interface, from C.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the C program against the library that this crate was built into.
fn build(folder: &Path) -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let program = folder.join("vrange");
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .arg(crate_folder.join("tests/c/vrange.c"))
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

#[test]
fn c_programs_mark_and_unmark() {
    let folder = tempfile::tempdir().unwrap();
    let program = build(folder.path());
    let output = Command::new(&program).arg("64").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{:?}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 of 16 gone\n", "without pressure nothing goes");
}
