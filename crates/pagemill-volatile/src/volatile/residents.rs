//! Measures the resident memory of ranges. One system call (`mincore`) per block serves all ranges in the block.

use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::{clock, mem};

/// Maximum number of OS pages in a block, for the smallest page size of 4 KiB.
const MAX_PAGES: usize = BLOCK_BYTES >> 12;

/// Sums up the resident bytes of ranges. A range that is added after the time `until_ns` is not measured. Its resident
/// share is assumed to be the average of the measured ranges.
pub(super) struct ResidentBytes {
    until_ns: u64,
    /// Address of the block whose pages were queried last.
    block: usize,
    /// The states of the pages of `block` (`mincore`); `None` if the kernel reported an error.
    pages: Option<[u8; MAX_PAGES]>,
    /// Sum of the lengths of the measured ranges in bytes.
    measured_bytes: u64,
    /// Resident bytes of the measured ranges.
    resident_bytes: u64,
    /// Sum of the lengths of the ranges that were not measured, in bytes.
    unmeasured_bytes: u64,
}

impl ResidentBytes {
    pub fn new(until_ns: u64) -> Self {
        Self { until_ns, block: usize::MAX, pages: None, measured_bytes: 0, resident_bytes: 0, unmeasured_bytes: 0 }
    }

    /// Adds a range of `bytes` bytes, which must begin on an OS page.
    pub fn add(&mut self, addr: usize, bytes: u64) {
        let end = addr.saturating_add(bytes as usize);
        let mut at = addr;
        while at < end {
            let block = at & !(BLOCK_BYTES - 1);
            let to = end.min(block + BLOCK_BYTES);
            if block != self.block && clock::fine_ns() > self.until_ns {
                self.unmeasured_bytes += (end - at) as u64;
                return;
            }
            let found = self.resident_bytes_in(block, at, to);
            self.measured_bytes += (to - at) as u64;
            self.resident_bytes += found.min(to - at) as u64;
            at = to;
        }
    }

    /// Returns the number of resident bytes at the addresses `from..to`, which lie inside `block`.
    fn resident_bytes_in(&mut self, block: usize, from: usize, to: usize) -> usize {
        if block != self.block {
            let mut pages = [0; MAX_PAGES];
            self.pages = mem::resident(block, BLOCK_BYTES, &mut pages).ok().map(|()| pages);
            self.block = block;
        }
        let page = os_page_bytes();
        let Some(pages) = &self.pages else {
            // A part of the block is not mapped, so it is not a block of the arena. Query the addresses separately.
            return mem::resident_bytes(from, (to - from).next_multiple_of(page)).unwrap_or(0);
        };
        let pages = &pages[(from - block) / page..(to - block).div_ceil(page)];
        pages.iter().filter(|page| **page & 1 == 1).count() * page
    }

    /// Returns the resident bytes of all ranges that were added. Those of ranges that were not measured are
    /// extrapolated.
    pub fn bytes(&self) -> u64 {
        let rest = u128::from(self.unmeasured_bytes) * u128::from(self.resident_bytes)
            / u128::from(self.measured_bytes.max(1));
        self.resident_bytes + u64::try_from(rest).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds memory as one range, and the same memory as many small ranges. Both sums must equal the kernel's count of
    /// resident bytes. Unmapped memory must count as 0. The resident bytes of a range that is added too late must be
    /// extrapolated.
    #[test]
    fn resident_pages_are_counted_or_extrapolated() {
        let page = os_page_bytes();
        let room = vec![0u8; 8 * BLOCK_BYTES];
        let start = (room.as_ptr() as usize).next_multiple_of(BLOCK_BYTES);
        let far = clock::fine_ns() + 60_000_000_000;
        let mut all = ResidentBytes::new(far);
        all.add(start, 6 * BLOCK_BYTES as u64);
        let mut parts = ResidentBytes::new(far);
        for part in 0..6 * BLOCK_BYTES / (16 * page) {
            parts.add(start + part * 16 * page, 16 * page as u64);
        }
        assert_eq!(all.bytes(), parts.bytes());
        assert_eq!(all.bytes(), mem::resident_bytes(start, 6 * BLOCK_BYTES).unwrap() as u64);
        all.add(page, page as u64);
        assert_eq!(all.bytes(), parts.bytes());
        let mut own = vec![1u8; 4 * page];
        own.fill(2);
        let inside = (own.as_ptr() as usize).next_multiple_of(page);
        let mut late = ResidentBytes::new(far);
        late.add(inside, 2 * page as u64);
        assert_eq!(late.bytes(), 2 * page as u64);
        late.until_ns = 0;
        late.add(start + 3 * BLOCK_BYTES, 10 * page as u64);
        assert_eq!(late.bytes(), 12 * page as u64);
    }
}
