//! Which part of each experiment `pagemill bench` without a name runs, as data.

/// An experiment of the suite.
#[derive(Debug)]
pub struct Entry {
    /// Name of the experiment, as on the command line.
    pub name: &'static str,
    /// Options of the experiment: the cases and subjects that carry its message, in few short samples.
    pub options: &'static [&'static str],
    /// What it shows, for the line of its progress.
    pub shows: &'static str,
}

/// All experiments, in the order in which they run.
pub const ENTRIES: &[Entry] = &[
    Entry {
        name: "ebizzy",
        options: &[
            "--quick",
            "--samples=3",
            "--threads=1,2,8",
            "--only=glibc,tcmalloc,glibc-eager,jemalloc-eager,pagemill",
        ],
        shows: "records per second of allocators, by threads",
    },
    Entry { name: "small", options: &["--quick", "--samples=2"], shows: "small allocations, by size" },
    Entry {
        name: "giveback",
        options: &["--quick", "--samples=2", "--only=glibc,jemalloc,pagemill"],
        shows: "time to return free memory",
    },
    Entry { name: "startup", options: &["--quick", "--samples=2"], shows: "startup cost of a preload" },
    Entry {
        name: "footprint",
        options: &["--return", "--quick", "--samples=2", "--only=glibc,jemalloc,mimalloc,pagemill"],
        shows: "memory over time while a program frees",
    },
    Entry {
        name: "survive",
        options: &["--handover", "--quick", "--samples=2", "--only=jemalloc,tcmalloc,glibc-eager,pagemill"],
        shows: "kills when another process needs freed memory",
    },
    Entry {
        name: "iozone",
        options: &[
            "--quick",
            "--samples=2",
            "--total=64M",
            "--threads=1,8",
            "--cell-seconds=0.02",
            "--only=tmpfs-never,tmpfs-always,pagemill",
        ],
        shows: "files in memory, mapped and by system calls, by threads",
    },
    Entry {
        name: "waste",
        options: &["--quick", "--samples=1", "--only=tmpfs-never,tmpfs-always,pagemill"],
        shows: "memory of small and sparse files",
    },
    Entry {
        name: "metadata",
        options: &["--quick", "--samples=2", "--only=tmpfs-within-size,pagemill"],
        shows: "create, stat, read, list and remove files",
    },
    Entry {
        name: "pageshift",
        options: &["--quick", "--samples=2", "--only=loop,views"],
        shows: "software page sizes",
    },
    Entry {
        name: "volatile",
        options: &[
            "--quick",
            "--samples=2",
            "--only=handle-mark-unmark,handle-pin-unpin,madv-free,madv-dontneed-and-fault",
        ],
        shows: "marking memory volatile",
    },
    Entry {
        name: "hit",
        options: &[
            "--quick",
            "--samples=2",
            "--mib=64",
            "--files=2000",
            "--only=huge,dense,memcpy,frames,pread-huge-never,foyer,files",
        ],
        shows: "copies and pins of cached pages",
    },
    Entry { name: "refs", options: &["--quick", "--samples=2"], shows: "references to huge folios" },
    Entry { name: "traces", options: &["--quick", "--samples=1"], shows: "hit ratios of eviction orders" },
    Entry {
        name: "miss",
        options: &["--quick", "--samples=2", "--only=threads-1,queue-32,fio-psync-1,fio-io_uring-32"],
        shows: "random reads of a file on a device",
    },
    Entry {
        name: "orion",
        options: &[
            "--quick",
            "--samples=2",
            "--reads",
            "--only=cache,ring-huge,ring-4-KiB-pages,fio-libaio,fio-io_uring-fixed-huge",
        ],
        shows: "large reads into huge pages",
    },
    Entry {
        name: "stream",
        options: &["--quick", "--samples=1", "--only=cache,kernel,fio-io_uring"],
        shows: "a large file in order",
    },
    Entry {
        name: "writeback",
        options: &["--quick", "--samples=2", "--only=cache,ring-64,fio-io_uring-64"],
        shows: "writeback of scattered pages",
    },
    Entry {
        name: "slab",
        options: &[
            "--quick",
            "--samples=2",
            "--parts=speed,fragments",
            "--sizes=192",
            "--objects=200000",
            "--only=by-owner,by-handle,fixed,glibc,jemalloc,tcmalloc",
        ],
        shows: "movable objects: speed, and memory left after freeing",
    },
    Entry {
        name: "find",
        options: &["--quick", "--samples=2", "--files=20000", "--only=ramfs,fuse,tmpfs,removed,fresh"],
        shows: "a RAM file system: searches, look-ups, changes, memory left after removal",
    },
];
