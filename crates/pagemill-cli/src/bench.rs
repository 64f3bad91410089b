//! `pagemill bench`: executes `pagemill-bench`, a separate program that contains the experiments. The program is
//! separate because it links the allocators that the experiments compare.

use crate::fail;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Name and help text of each experiment, which are shown if `pagemill-bench` is not built. A test compares them with
/// the source of `pagemill-bench`.
const EXPERIMENTS: &[(&str, &str)] = &[
    (
        "ebizzy",
        "Records per second of a search server's workload with 1 to 24 threads, with and without a memory hog; \
         cost of watching memory limits",
    ),
    ("small", "Time of small allocations with Pagemill preloaded, compared with plain jemalloc preloaded"),
    ("giveback", "Time to return 1 GiB of free memory on request, and the longest malloc meanwhile"),
    ("startup", "Startup cost of a preloaded library in a program that does nothing"),
    ("footprint", "Memory of Redis, CPython, sqlite3, git and a cargo build under every allocator"),
    (
        "survive",
        "OOM kills while a process holds free memory that it could return: threads that write and free memory, \
         another process that needs the memory, a request by another process of the same tree, a full machine",
    ),
    (
        "iozone",
        "Files read and written in records of 4 KiB by 1 to 200 threads, mapped and unmapped, compared with tmpfs \
         and the results of 2013",
    ),
    ("waste", "Memory that small, medium, sparse and large files take, and which of them get huge pages"),
    ("metadata", "Create, stat, read, list and remove many small files, compared with tmpfs"),
    (
        "pageshift",
        "Software page sizes of 4 KiB to 8 MiB: files read again and again, fresh and resident views, a file four \
         times the cache compared with mappings of the kernel, small files",
    ),
    (
        "volatile",
        "Cost to mark memory volatile and to unmark it, compared with MADV_FREE and MADV_DONTNEED; cost of a \
         purge; ebizzy with its copies in volatile ranges",
    ),
    (
        "hit",
        "Resident pages copied out and pinned in random order: the page cache compared with memcpy, files and \
         other caches; its metadata",
    ),
    (
        "refs",
        "Cost to pin ranges of huge folios, compared with one reference count for each 4 KiB; cost to split and \
         collapse huge folios, compared with a copy",
    ),
    ("traces", "Hit rate on generated traces: the page cache's eviction compared with LRU, CLOCK, S3-FIFO and SIEVE"),
    (
        "miss",
        "Random 4 KiB reads of a file six times as large as the cache, by 1 to 32 threads and by one thread with \
         many requests in flight, compared with fio",
    ),
    (
        "orion",
        "Reads and writes of 64 KiB to 2 MiB at queue depths 1 to 64, with buffers in huge pages and in small \
         pages, compared with fio and the results of 2013",
    ),
    (
        "stream",
        "A file four times as large as the cache, read and written in order, compared with the kernel's page \
         cache and fio",
    ),
    (
        "writeback",
        "Write-back of scattered dirty 4 KiB pages in a file of 1 GiB, compared with fio writing at the same \
         offsets",
    ),
    (
        "slab",
        "Objects of one size in slabs, compared with allocators and keyed maps: time to allocate, free and read \
         an object; effect of moves on concurrent readers; memory that remains after nine tenths of the objects \
         were freed at random; stalls; walks of the index of a file",
    ),
    (
        "find",
        "A name that does not exist is looked for in 100,000 files: in a RAM file system in this process and \
         through FUSE, in tmpfs and in ext4; path walks, look-ups, creations and removals compared with system \
         calls; memory that remains after nine tenths of a million files were removed at random",
    ),
    ("settings", "Print the settings that make each allocator return memory at once, as a Markdown table"),
];

const BUILD_HINT: &str = "This builds them, with the allocators they compare:\n\n    \
                     cargo build --release -p pagemill-cli -p pagemill-bench\n";

pub fn bench(args: &[OsString]) -> ExitCode {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("pagemill-bench"));
    if let Some(program) = beside.filter(|path| path.is_file()) {
        let error = Command::new(&program).args(args).exec();
        return fail(2, &format!("cannot start {}: {error}", program.display()));
    }
    let is_help_requested = args.first().is_some_and(|word| ["--help", "-h", "help"].iter().any(|help| word == help));
    if is_help_requested {
        println!("Experiments (not built yet):\n");
        EXPERIMENTS.iter().for_each(|(name, meaning)| println!("  {name:<12} {meaning}"));
        println!("\n{BUILD_HINT}");
        return ExitCode::SUCCESS;
    }
    fail(2, &format!("the experiments are not built. {BUILD_HINT}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The list `EXPERIMENTS` must have the name and the help text of each experiment in the source of
    /// `pagemill-bench`.
    #[test]
    fn experiments_equal_those_of_pagemill_bench() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pagemill-bench/src/main.rs");
        let source = std::fs::read_to_string(source).unwrap();
        let variants = source.split_once("enum Experiment {").unwrap().1.split_once("#[command").unwrap().0;
        let (mut listed, mut meaning) = (Vec::new(), Vec::new());
        for line in variants.lines().map(str::trim) {
            if let Some(text) = line.strip_prefix("/// ") {
                meaning.push(text);
            } else if !meaning.is_empty() {
                let name: String = line.chars().take_while(char::is_ascii_alphanumeric).collect();
                listed.push((name.to_lowercase(), meaning.join(" ")));
                meaning.clear();
            }
        }
        let expected: Vec<_> =
            EXPERIMENTS.iter().map(|(name, meaning)| ((*name).to_owned(), (*meaning).to_owned())).collect();
        assert_eq!(listed, expected);
    }
}
