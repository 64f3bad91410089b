//! Memory for software pages: lets one page fault provide several OS pages, but never a huge page.
//!
//! From Linux 6.8 on, the kernel has pages between the OS page and 2 MiB, if the administrator offers their sizes
//! (`pagemill_sys::mthp`). The advice that requests them, `MADV_HUGEPAGE`, also requests huge pages. A huge page needs
//! a whole block in one mapping with the advice. So one OS page of each block is left without the advice: the last one
//! of a block with an even index, the first one of a block with an odd index. Two neighbours without advice are one
//! mapping, so the advice costs one mapping for each block.
//!
//! ```text
//!   block 0           block 1           block 2           block 3
//!   |advised        -|-        advised | advised        -|-        advised |
//! ```
//!
//! Where the kernel offers no size, nothing changes: the kernel provides OS pages on touch.

use super::Arena;
use crate::units::{BLOCK_BYTES, PageSize, os_page_bytes};
use pagemill_sys::{mem, mthp};

/// Number of blocks of a zone, from its start, that get the advice. A process may have 65,530 mappings by default, and
/// the advice must leave most of them to the program.
const MAX_ADVISED_BLOCKS: usize = 8192;

/// Returns whether the kernel offers a size above the OS page for this software page, and no size that is larger than
/// the software page. Reads the kernel's settings.
pub(super) fn can_be_advised(page: PageSize) -> bool {
    let is_between = page.bytes() > os_page_bytes() && page.bytes() < BLOCK_BYTES;
    is_between && mthp::offered_sizes().advised_bytes(page.bytes()).is_some_and(|bytes| bytes > os_page_bytes())
}

impl Arena {
    /// Makes one page fault provide up to a software page in the `blocks` blocks from `first` on, where the kernel can.
    /// Forbids huge pages there.
    ///
    /// Another thread may touch the blocks meanwhile. The OS page without the advice is never advised, so the kernel
    /// makes no huge page at any moment.
    ///
    /// Cost: one or two system calls for each block (1.4 us, or 7 ms for a slot of 10 GiB); none where the kernel
    /// offers no such size.
    pub fn advise_pages(&self, first: usize, blocks: usize) {
        if !self.has_advised_pages {
            return;
        }
        for block in first..first + blocks {
            let (addr, page) = (self.block_addr(block), os_page_bytes());
            let zone = if self.small.contains(addr) { &self.small } else { &self.heap };
            debug_assert!(zone.contains(addr), "pages of caches have other advice");
            if addr - zone.base() >= MAX_ADVISED_BLOCKS * BLOCK_BYTES {
                return;
            }
            let (advised, other) =
                if block.is_multiple_of(2) { (addr, addr + BLOCK_BYTES - page) } else { (addr + page, addr) };
            if self.use_huge {
                // The block may have been a huge page before.
                mem::forbid_huge(other, page);
            }
            mem::allow_huge(advised, BLOCK_BYTES - page);
        }
    }

    /// As [`Arena::advise_pages`] for one block of an extent, but forbids huge pages also where the kernel offers no
    /// size for software pages.
    pub(super) fn advise_pages_of_extent(&self, block: usize) {
        mem::forbid_huge(self.block_addr(block), BLOCK_BYTES);
        self.advise_pages(block, 1);
    }
}
