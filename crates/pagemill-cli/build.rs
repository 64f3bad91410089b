//! Tells the command where cargo puts the preload library, which it embeds.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // OUT_DIR is target/PROFILE/build/NAME/out. The library is a normal
    // dependency, so it is there when the command is compiled.
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let profile = out.ancestors().nth(3).expect("OUT_DIR lies in a target folder");
    let library = profile.join("deps").join("libpagemill_malloc.so");
    // `cargo check` makes no libraries, but wants the file: an empty one stands in until cargo writes the real one.
    let _ = std::fs::OpenOptions::new().write(true).create_new(true).open(&library);
    // The unwinder is linked in: one library less to load at each start.
    println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    // At a fixed address, pages of constants need no relocation at each start.
    if std::env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|library| library == "gnu") {
        println!("cargo:rustc-link-arg-bins=-no-pie");
    }
    println!("cargo:rustc-env=PAGEMILL_PRELOAD_FILE={}", library.display());
}
