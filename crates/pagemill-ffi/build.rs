//! Link options of the C library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // dlclose must not unmap the library: its code may be running in a thread, and fork handlers point to it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
