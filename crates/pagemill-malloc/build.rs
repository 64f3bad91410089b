//! Link options of the preload library.

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=no-constructor.ld");
    // dlclose must not unmap the library, because handlers that it registered with the C library point into it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Symbols are resolved at load time. Lazy resolution would acquire the loader's lock inside malloc.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    // jemalloc maps its first extents before its hooks can be set, so its mmap is replaced (small.rs).
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=mmap");
    // The fork handlers of this library call those of jemalloc, so jemalloc must not register its own (fork.rs).
    println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=pthread_atfork");
    // Removes jemalloc's constructor, because jemalloc starts only when it is needed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-T,{here}/no-constructor.ld");
    // Links the unwinder statically, which saves each process a library to load: 0.2 ms and 100 KiB.
    println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    // `pagemill run` distinguishes builds of this library by the build id (preload.rs).
    println!("cargo:rustc-cdylib-link-arg=-Wl,--build-id");
    // The library is embedded in the command, so it should be small. Function names stay, for profilers.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
}
