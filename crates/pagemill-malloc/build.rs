//! Link options of the preload library.

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=no-constructor.ld");
    // Handlers registered with the C library point into the library: dlclose must not unmap it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Resolved at load time: the first call of a function must not take the loader's lock inside malloc.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    // jemalloc maps its first extents itself, before it can be told of its hooks: see small.rs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=mmap");
    // Its fork handlers are called by ours, in order: see fork.rs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=pthread_atfork");
    // Nothing of jemalloc runs before it is needed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,{here}/no-constructor.ld");
    // The unwinder comes along: one library less for every process to load, at 0.2 ms and 100 KiB.
    println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    // It is embedded in the command; names of functions stay for profiles.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
}
