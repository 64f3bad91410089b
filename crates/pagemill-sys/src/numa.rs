//! NUMA nodes: their number, the node of this thread, and memory policy.
#![allow(unsafe_code)] // getcpu and mbind

use crate::file;
use std::io;

/// Maximum number of nodes that Pagemill distinguishes.
pub const MAX_NODES: usize = 64;

const MPOL_PREFERRED: libc::c_int = 1;

/// Number of memory nodes: one more than the highest that the system lists, 1 where it lists none.
pub fn node_count() -> usize {
    let mut buffer = [0u8; 256];
    let text = file::read(c"/sys/devices/system/node/has_memory", &mut buffer).unwrap_or(b"0");
    highest_in_list(text).map_or(1, |highest| (highest + 1).min(MAX_NODES))
}

/// The highest number of a kernel list such as `0-1,4`.
fn highest_in_list(text: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(text).ok()?.trim();
    text.split([',', '-']).filter_map(|part| part.parse().ok()).max()
}

/// The CPU and node this thread runs on now. No system call on x86-64.
pub fn current() -> (usize, usize) {
    let (mut cpu, mut node) = (0u32, 0u32);
    // SAFETY: writes the two words.
    unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, 0usize) };
    (cpu as usize, node as usize)
}

/// The CPU this thread runs on now. Cheap: the C library reads it from memory where the kernel provides it there.
#[inline]
pub fn cpu() -> usize {
    // SAFETY: no arguments.
    (unsafe { libc::sched_getcpu() }).max(0) as usize
}

/// Requests that pages of the range come from `node` while it has free pages.
///
/// # Errors
///
/// `ENOSYS` or `EPERM` where memory policies are unavailable, `EINVAL` for an unknown node.
pub fn prefer(addr: usize, len_bytes: usize, node: usize) -> io::Result<()> {
    let mask: u64 = 1 << node;
    // SAFETY: `mask` is read; the memory's contents do not change. The kernel reads one bit less than the given count,
    // hence the +1.
    let result =
        unsafe { libc::syscall(libc::SYS_mbind, addr, len_bytes, MPOL_PREFERRED, &raw const mask, MAX_NODES + 1, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        assert_eq!(highest_in_list(b"0\n"), Some(0));
        assert_eq!(highest_in_list(b"0-1,4\n"), Some(4));
        assert_eq!(highest_in_list(b"\n"), None);
    }

    #[test]
    fn this_machine_has_a_node() {
        assert!(node_count() >= 1);
        assert!(current().1 < node_count());
    }
}
