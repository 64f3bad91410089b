//! NUMA nodes: their number, the node of this thread, and the memory policy of a range.
#![allow(unsafe_code)] // getcpu and mbind

use crate::file;
use crate::result::check_result;
use std::io;

/// Maximum number of nodes that Pagemill distinguishes.
pub const MAX_NODES: usize = 64;

/// Returns the number of NUMA nodes: one more than the highest node number that the kernel lists, at most
/// [`MAX_NODES`]. Returns 1 if the kernel lists no node.
pub fn node_count() -> usize {
    let mut buffer = [0u8; 256];
    let text = file::read(c"/sys/devices/system/node/has_memory", &mut buffer).unwrap_or(b"0");
    highest_in_list(text).map_or(1, |highest| (highest + 1).min(MAX_NODES))
}

/// Returns the highest number of a list in the kernel's format, such as `0-1,4`.
fn highest_in_list(text: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(text).ok()?.trim();
    text.split([',', '-']).filter_map(|part| part.parse().ok()).max()
}

/// Returns the CPU and the node that this thread runs on now. Makes no system call on x86-64.
pub fn current() -> (usize, usize) {
    let (mut cpu, mut node) = (0u32, 0u32);
    // SAFETY: the call writes only `cpu` and `node`.
    unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, 0usize) };
    (cpu as usize, node as usize)
}

/// Returns the CPU that this thread runs on now. Makes no system call where the kernel writes the CPU number into user
/// memory (rseq).
#[inline]
pub fn cpu() -> usize {
    // SAFETY: the call takes no arguments.
    (unsafe { libc::sched_getcpu() }).max(0) as usize
}

/// Requests that the kernel allocate the pages of the `len_bytes` from `addr` on from `node` while the node has free
/// pages.
///
/// # Errors
///
/// `ENOSYS` or `EPERM` if memory policies are unavailable; `EINVAL` for an unknown node.
pub fn prefer(addr: usize, len_bytes: usize, node: usize) -> io::Result<()> {
    assert!(node < MAX_NODES);
    let mask: u64 = 1 << node;
    // SAFETY: the call reads `mask` and changes no contents. The kernel reads one bit less than the given count, so 1
    // is added.
    check_result(unsafe {
        libc::syscall(libc::SYS_mbind, addr, len_bytes, libc::MPOL_PREFERRED, &raw const mask, MAX_NODES + 1, 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `highest_in_list` must return the highest number of a list, and `None` for an empty list.
    #[test]
    fn node_lists_are_parsed() {
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
