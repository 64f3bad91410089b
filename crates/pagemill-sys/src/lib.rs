//! Linux system calls and kernel files for Pagemill. This crate contains no policy.
//!
//! Each file covers one kernel feature. Each call returns its actual effect (how many bytes, whether a huge page), so
//! that callers count actual effects. Only [`probe`] (for `pagemill doctor`), [`task`], [`child`], [`fanotify`],
//! [`open_permission`], [`pages`] and [`namespace`] use the global allocator. All other modules may be used inside
//! `malloc`.
//!
//! | file | kernel feature |
//! |---|---|
//! | [`mem`] | address space: reserve, open, populate, release |
//! | [`maps`] | mappings of this process |
//! | [`fault`] | signal handlers for faults in the program's own memory |
//! | [`hugetlb`] | huge pages that the administrator has reserved |
//! | [`memory_file`], [`private_tmpfs`] | memory that several mappings share; a tmpfs for it |
//! | [`moves`] | moving pages between addresses (userfaultfd) |
//! | [`mthp`] | page sizes between the OS page and 2 MiB that the kernel offers |
//! | [`numa`] | nodes and memory policy |
//! | [`barrier`] | a memory barrier in all threads at once (membarrier) |
//! | [`futex`], [`thread`], [`task`], [`stack`], [`clock`] | futex waits, threads, a thread for a closure, a stack for one call, time |
//! | [`file`](mod@file) | reading kernel files and mapping shared files without allocating |
//! | [`disk`], [`waker`] | files and block devices; an eventfd waker |
//! | [`process`], [`child`] | process identity and limits; running a child process and forwarding its signals |
//! | [`cgroup`] | memory control groups, the machine's memory |
//! | [`events`] | kernel notifications about memory pressure |
//! | [`fanotify`], [`open_permission`], [`pages`] | files of a RAM file system: write events; delayed opens; page contents and leases |
//! | [`namespace`] | a private mount namespace |
//! | [`probe`] | which features this kernel has, as readable text |

pub mod barrier;
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
pub mod memory_file;
pub mod moves;
pub mod mthp;
pub mod namespace;
pub mod numa;
pub mod open_permission;
pub mod pages;
pub mod private_tmpfs;
pub mod probe;
pub mod process;
mod result;
pub mod stack;
pub mod task;
pub mod thread;
mod userfault;
pub mod waker;
pub mod window;

/// Prints one line to standard error and ends the process with `SIGABRT`.
///
/// Used for errors after which the process must not continue, such as a double free. The function neither allocates nor
/// locks, so any code of the allocator may call it.
pub fn fatal(message: core::fmt::Arguments<'_>) -> ! {
    let mut line = file::Text::<512>::new();
    let _ = core::fmt::Write::write_fmt(&mut line, message);
    line.push_byte(b'\n');
    file::write_stderr(line.as_bytes());
    process::abort()
}
