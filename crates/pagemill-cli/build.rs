//! Tells the compiler where cargo puts the preload library, which the command embeds, and the commit for `--version`.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // OUT_DIR is target/PROFILE/build/NAME/out. The library is a normal dependency, so cargo builds it before
    // it compiles the command.
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let profile = out.ancestors().nth(3).expect("OUT_DIR lies in a target folder");
    let library = profile.join("deps").join("libpagemill_malloc.so");
    // `cargo check` builds no libraries, but the file must exist: it is empty until cargo builds the library.
    let _ = std::fs::OpenOptions::new().write(true).create_new(true).open(&library);
    // The unwinder is linked statically, so the loader has one library less to load at each start.
    println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    // A program at a fixed address needs no relocations of constants at each start.
    if std::env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|library| library == "gnu") {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
    println!("cargo:rustc-env=PAGEMILL_PRELOAD_FILE={}", library.display());
    let commit = commit().map_or_else(String::new, |commit| format!(" ({commit})"));
    println!("cargo:rustc-env=PAGEMILL_COMMIT_SUFFIX={commit}");
}

/// Returns the commit of a release build: the variable `PAGEMILL_COMMIT`, or that of the git repository. Other builds
/// have none, because the command would be built again after each commit.
fn commit() -> Option<String> {
    println!("cargo:rerun-if-env-changed=PAGEMILL_COMMIT");
    if let Some(commit) = std::env::var("PAGEMILL_COMMIT").ok().filter(|commit| !commit.is_empty()) {
        return Some(commit);
    }
    if std::env::var("PROFILE").is_ok_and(|profile| profile != "release") {
        return None;
    }
    let git = |arguments: &[&str]| -> Option<String> {
        let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
    };
    // The sources may lie in the repository of another project, whose commits have another meaning.
    git(&["rev-parse", "--show-prefix"]).filter(|prefix| prefix == "crates/pagemill-cli/")?;
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if std::fs::exists(&log).is_ok_and(|exists| exists) {
        println!("cargo:rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
