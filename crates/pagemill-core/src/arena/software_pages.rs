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
//!
//! Only slots get the advice. Their pages are charged by measurement, so pages of a larger size, which the administrator
//! offers later, are charged too. Those of extents are charged before they become resident, one software page at a
//! time.
#![allow(unsafe_code)] // the tests carve blocks and commit pages

use super::Arena;
use super::block::Backing;
use crate::units::{BLOCK_BYTES, PageSize, os_page_bytes};
use pagemill_sys::{mem, mthp};

/// Number of blocks of the heap zone, from its start, that get the advice. A process may have 65,530 mappings by
/// default, and the advice must leave most of them to the program.
const MAX_ADVISED_BLOCKS: usize = 8192;

/// Returns whether the kernel offers a size above the OS page for this software page, and no size that is larger than
/// the software page. Reads the kernel's settings.
pub(super) fn can_be_advised(page: PageSize) -> bool {
    let is_between = page.bytes() > os_page_bytes() && page.bytes() < BLOCK_BYTES;
    is_between && mthp::offered_sizes().advised_bytes(page.bytes()).is_some_and(|bytes| bytes > os_page_bytes())
}

impl Arena {
    /// Makes one page fault provide up to a software page in the empty ones of the `blocks` blocks from `first` on, where
    /// the kernel can. Forbids huge pages there.
    ///
    /// Another thread may touch the blocks meanwhile. The OS page without the advice is never advised, so the kernel
    /// makes no huge page at any moment. Other blocks are passed over: they may have a huge page, which the advice would
    /// split. So are blocks that another thread is making resident.
    ///
    /// Cost: one or two system calls for each block (1.4 us, or 7 ms for a slot of 10 GiB); none where the kernel
    /// offers no such size.
    pub fn advise_pages(&self, first: usize, blocks: usize) {
        if !self.has_advised_pages {
            return;
        }
        for block in first..first + blocks {
            let Some(locked) = self.state_word(block).try_lock(&self.generation) else { continue };
            if locked.state.backing == Backing::Empty {
                self.advise_block(block);
            }
        }
    }

    /// Gives the advice for one block.
    fn advise_block(&self, block: usize) {
        let (addr, page) = (self.block_addr(block), os_page_bytes());
        debug_assert!(self.heap.contains(addr), "other blocks get no advice");
        if addr - self.heap.base() >= MAX_ADVISED_BLOCKS * BLOCK_BYTES {
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::arena::{ExpectedUse, Layout, place};
    use crate::reclaim::Account;
    use crate::reclaim::tree::UNLIMITED;

    /// Returns the number of mappings that overlap a block.
    fn mapping_count(addr: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ends = maps.lines().map(|line| line.split(' ').next().unwrap().split_once('-').unwrap());
        let ranges = ends.map(|ends| [ends.0, ends.1].map(|end| usize::from_str_radix(end, 16).unwrap()));
        ranges.filter(|[start, end]| *start < addr + BLOCK_BYTES && *end > addr).count()
    }

    /// Returns an arena that behaves as if the kernel offered the size of its software page.
    fn arena() -> &'static Arena {
        let mut arena = Arena::new(Layout::for_test(), Account::make(UNLIMITED).unwrap()).unwrap();
        arena.has_advised_pages = true;
        place(arena).unwrap()
    }

    /// Another thread has made a block resident as a huge page before a thread gives the advice for it. The mapping of
    /// the huge page must stay whole. An empty block must get the advice, which leaves out one of its OS pages.
    #[test]
    fn huge_pages_are_not_split_by_the_advice() {
        let arena = arena();
        // SAFETY: the arena has no heap, whose tables would have to cover the blocks.
        let addr = unsafe { arena.carve(&arena.heap, 4, 1, 0, |_, _| Ok(())) }.unwrap();
        let first = arena.block_of(addr);
        arena.back_block(first + 1, ExpectedUse::Full).unwrap();
        if arena.block_state(first + 1).backing != Backing::Huge {
            return println!("skipped: the kernel has no huge page");
        }
        assert_eq!(mapping_count(arena.block_addr(first + 1)), 1);
        arena.advise_pages(first, 4);
        assert_eq!(mapping_count(arena.block_addr(first + 1)), 1, "the huge page");
        assert_eq!(mapping_count(arena.block_addr(first + 3)), 2, "an empty block");
    }

    /// A block of an extent must get no advice. Otherwise the kernel could provide more than the software page that the
    /// account has admitted, once the administrator offers a larger size.
    #[test]
    fn extents_get_no_advice() {
        let page = PageSize::new(64 << 10).unwrap();
        let mut arena = Arena::new(Layout { page, ..Layout::for_test() }, Account::make(UNLIMITED).unwrap()).unwrap();
        arena.has_advised_pages = true;
        arena.use_huge = false;
        let arena = place(arena).unwrap();
        let addr = arena.extent(BLOCK_BYTES, 1).unwrap();
        // SAFETY: pages of the new extent.
        unsafe { arena.commit(addr, page.bytes()) }.unwrap();
        assert_eq!(mem::resident_bytes(addr, BLOCK_BYTES).unwrap(), page.bytes());
        assert_eq!(mapping_count(addr), 1);
    }
}
