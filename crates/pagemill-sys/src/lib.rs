//! Linux for Pagemill: every system call, every kernel file, and no policy.
//!
//! One file per thing the kernel offers; each call returns what really
//! happened (how many bytes, huge or not), so that the layers above count
//! facts. Nothing here allocates from the global allocator except [`probe`],
//! which serves `pagemill doctor` only, and [`ring`]: the rest runs inside `malloc`.
//!
//! | file | what of Linux |
//! |---|---|
//! | [`mem`] | address space: reserve, open, populate, give back |
//! | [`maps`] | what is mapped where |
//! | [`fault`] | faults of the program's own memory, heard of first |
//! | [`hugetlb`] | huge pages that the administrator has reserved |
//! | [`moves`] | moving pages between addresses (userfaultfd, mremap) |
//! | [`numa`] | nodes and memory policy |
//! | [`barrier`] | a memory barrier in all threads at once (membarrier) |
//! | [`futex`], [`thread`], [`stack`], [`clock`] | waiting, threads, a stack for one call, time |
//! | [`file`](mod@file) | small kernel and shared files without allocating |
//! | [`disk`], [`ring`], [`bell`] | files and devices that hold content; transfers queued (io_uring); a wake-up (eventfd) |
//! | [`process`], [`child`] | who a process is, what it holds; a child stood in for |
//! | [`cgroup`] | memory control groups, the machine's memory |
//! | [`events`] | what the kernel says by itself when memory runs short |
//! | [`fanotify`], [`pages`] | files of a RAM file system: who wrote one; its pages and leases |
//! | [`namespace`] | a mount namespace of one's own |
//! | [`probe`] | what this kernel can do, for people |

pub mod barrier;
pub mod bell;
pub mod cgroup;
pub mod child;
pub mod clock;
pub mod disk;
pub mod events;
pub mod fanotify;
pub mod fault;
pub mod file;
pub mod futex;
pub mod hugetlb;
pub mod maps;
pub mod mem;
pub mod moves;
pub mod namespace;
pub mod numa;
pub mod pages;
pub mod probe;
pub mod process;
pub mod ring;
pub mod stack;
pub mod thread;

/// Prints one line to standard error and ends the process by `SIGABRT`.
///
/// For damage that must not go on (a double free, say). Neither allocates nor
/// locks, so it may be called from anywhere in the allocator.
pub fn fatal(message: core::fmt::Arguments<'_>) -> ! {
    let mut line = file::Text::<512>::new();
    let _ = core::fmt::Write::write_fmt(&mut line, message);
    line.push_byte(b'\n');
    file::write_stderr(line.as_bytes());
    process::abort()
}
