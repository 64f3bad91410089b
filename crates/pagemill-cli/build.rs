//! Tells the compiler where cargo puts the preload library, which the command embeds.

use std::path::PathBuf;

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
}
