//! Link options of the C library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // dlclose must not unmap the library, because a thread runs its code and fork handlers point into it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
