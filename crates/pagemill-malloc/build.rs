//! Link options of the preload library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Handlers registered with the C library point into the library: dlclose must not unmap it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Resolved at load time: the first call of a function must not take the loader's lock inside malloc.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    // jemalloc maps its first extents itself, before it can be told of its hooks: see small.rs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=mmap");
    // It is embedded in the command; names of functions stay for profiles.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
}
