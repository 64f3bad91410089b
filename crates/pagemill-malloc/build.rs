//! Link options of the preload library.

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=no-constructor.ld");
    // Handlers registered with the C library point into the library: dlclose must not unmap it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Resolved at load time: the first call of a function must not take the loader's lock inside malloc.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    // jemalloc maps its first extents itself, before its hooks can be set: see small.rs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=mmap");
    // Our fork handlers call those of jemalloc, in order: see fork.rs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=pthread_atfork");
    // Drops jemalloc's constructor: it starts when it is needed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,{here}/no-constructor.ld");
    // Links the unwinder statically: each process loads one library less, which saves 0.2 ms and 100 KiB.
    println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    // The command distinguishes builds by the build id (preload.rs).
    println!("cargo:rustc-cdylib-link-arg=-Wl,--build-id");
    // The library is embedded in the command. Function names stay for profiles.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
}
