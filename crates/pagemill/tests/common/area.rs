//! Memory that a test maps from the kernel and marks volatile by address.
#![allow(unsafe_code)] // maps memory, and marks it volatile

use crate::common::pagemill;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_volatile::vrange::{How, Marked, Mode};

/// A memory mapping, which is unmapped on drop. Its bytes are read and written one by one, because no Rust references
/// to them may exist.
pub struct Area {
    pub addr: usize,
    pub len: usize,
}

impl Area {
    pub fn map(len: usize, flags: i32, fd: i32) -> Option<Self> {
        // SAFETY: a new mapping replaces nothing.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
        (addr != libc::MAP_FAILED).then_some(Self { addr: addr as usize, len })
    }

    /// Maps private memory of `pages` OS pages, and writes `byte` to each page.
    pub fn plain(pages: usize, byte: u8) -> Self {
        let area = Self::map(pages * os_page_bytes(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).unwrap();
        area.fill(byte);
        area
    }

    /// Maps private memory of `blocks` blocks of 2 MiB, aligned to a block, and writes `byte` to each page. The memory
    /// is in huge pages if the kernel has some.
    pub fn huge(blocks: usize, byte: u8) -> Self {
        let mut area = Self::map((blocks + 1) * BLOCK_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).unwrap();
        let start = area.addr.next_multiple_of(BLOCK_BYTES);
        // SAFETY: both ranges are parts of the mapping created above.
        unsafe {
            libc::munmap(area.addr as *mut _, start - area.addr);
            let end = start + blocks * BLOCK_BYTES;
            libc::munmap(end as *mut _, area.addr + area.len - end);
            libc::madvise(start as *mut _, blocks * BLOCK_BYTES, libc::MADV_HUGEPAGE);
        }
        (area.addr, area.len) = (start, blocks * BLOCK_BYTES);
        area.fill(byte);
        area
    }

    pub fn page_ptr(&self, page: usize) -> *mut u8 {
        (self.addr + page * os_page_bytes()) as *mut u8
    }

    pub fn pages(&self) -> usize {
        self.len / os_page_bytes()
    }

    pub fn write(&self, page: usize, byte: u8) {
        // SAFETY: the byte is inside the mapping.
        unsafe { self.page_ptr(page).write_volatile(byte) };
    }

    pub fn read(&self, page: usize) -> u8 {
        // SAFETY: the byte is inside the mapping.
        unsafe { self.page_ptr(page).read_volatile() }
    }

    pub fn fill(&self, byte: u8) {
        (0..self.pages()).for_each(|page| self.write(page, byte));
    }

    pub fn vrange(&self, page: usize, pages: usize, mode: Mode, how: How) -> pagemill_core::Result<Marked> {
        vrange(self.addr + page * os_page_bytes(), pages * os_page_bytes(), mode, how)
    }

    pub fn mark(&self, page: usize, pages: usize) -> Marked {
        self.vrange(page, pages, Mode::Volatile, How::Full).unwrap()
    }

    pub fn unmark(&self, page: usize, pages: usize) -> Marked {
        self.vrange(page, pages, Mode::Nonvolatile, How::Full).unwrap()
    }

    pub fn is_filled_with(&self, byte: u8) -> bool {
        (0..self.pages()).all(|page| self.read(page) == byte)
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        if self.len > 0 {
            let _ = vrange(self.addr, self.len, Mode::Nonvolatile, How::Full);
            // SAFETY: the mapping belongs to the area, and is not marked any more.
            unsafe { libc::munmap(self.addr as *mut _, self.len) };
        }
    }
}

pub fn vrange(addr: usize, len: usize, mode: Mode, how: How) -> pagemill_core::Result<Marked> {
    // SAFETY: the tests mark only their own areas, whose bytes have no references, and unmark them before unmapping.
    unsafe { pagemill().vranges.vrange(addr, len, mode, how) }
}

pub fn purge(want: usize) -> usize {
    pagemill().vranges.shrink(want as u64, Urgency::Limit) as usize
}

pub fn marked(pages: usize, purged: bool) -> Marked {
    Marked { bytes: (pages * os_page_bytes()) as u64, purged }
}
