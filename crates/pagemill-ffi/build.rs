//! Link options of the C library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // A thread runs in it, and fork handlers point into it: dlclose must not unmap it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
