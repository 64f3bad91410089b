//! Regions: memory that is registered with a ring. The kernel has pinned its pages.
//!
//! Fork children do not inherit registered memory (`MADV_DONTFORK`). Otherwise, after a fork, the parent's first write
//! to a page would leave the pinned page to the child. In addition, the fork would copy all of the memory (0.9 s for
//! 512 MiB). Several rings may register the same range. When the last of these rings unregisters the range, children
//! inherit it again. Memory that children never inherit ([`Buffer::is_kept_from_children`]) keeps its setting.

use crate::buffer::Buffer;
use crate::errno::{self, EBUSY, EINVAL, ENOSPC};
use crate::forked;
use pagemill_core::sync::Guarded;
use pagemill_sys::disk;
use std::collections::BTreeMap;
use std::io;

/// Id of a region: its index in the kernel's table of registered buffers.
///
/// Example: [`Ring`](super::Ring).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionId(pub(super) u16);

/// A range of memory that is registered with a ring.
pub(super) struct Region {
    pub table_index: u16,
    /// Whether new transfers must not use the registration.
    is_retired: bool,
    addr: usize,
    len_bytes: usize,
    /// Keeps fork children from inheriting the region. `None` if this region did not set `MADV_DONTFORK`.
    kept: Option<InheritanceGuard>,
    memory: Box<dyn Buffer>,
}

/// The registered memory of one ring.
pub(super) struct Regions {
    /// The regions, sorted by address. They do not overlap.
    regions: Vec<Region>,
    /// Free indexes of the kernel's table.
    free: Vec<u16>,
}

impl Regions {
    pub fn new(table_len: u16) -> Self {
        Self { regions: Vec::new(), free: (0..table_len).rev().collect() }
    }

    /// Returns the table index of a region that contains the whole range.
    pub fn find(&self, addr: usize, len_bytes: usize) -> Option<u16> {
        let after = self.regions.partition_point(|region| region.addr <= addr);
        let region = &self.regions[after.checked_sub(1)?];
        (addr - region.addr + len_bytes <= region.len_bytes && !region.is_retired).then_some(region.table_index)
    }

    /// Excludes a region from new transfers: [`Regions::find`] no longer returns it.
    pub fn retire(&mut self, id: RegionId) {
        self.regions.iter_mut().filter(|region| region.table_index == id.0).for_each(|region| region.is_retired = true);
    }

    /// Adds a region. `register` is called with a free index of the kernel's table, an address and a length. It must
    /// register the memory at this address with the kernel, at this index.
    pub fn add(
        &mut self,
        memory: Box<dyn Buffer>,
        register: impl FnOnce(u16, usize, usize) -> io::Result<()>,
    ) -> Result<RegionId, (io::Error, Box<dyn Buffer>)> {
        match self.try_add(&*memory, register) {
            Ok((at, kept, table_index)) => {
                let (addr, len_bytes) = range(&*memory);
                self.regions.insert(at, Region { table_index, is_retired: false, addr, len_bytes, kept, memory });
                debug_assert!(self.regions.is_sorted_by_key(|region| region.addr));
                Ok(RegionId(table_index))
            }
            Err(error) => Err((error, memory)),
        }
    }

    /// Registers memory with the kernel if the memory overlaps no region. Returns of the new region its position in
    /// `regions`, its guard, and its table index.
    fn try_add(
        &mut self,
        memory: &dyn Buffer,
        register: impl FnOnce(u16, usize, usize) -> io::Result<()>,
    ) -> io::Result<(usize, Option<InheritanceGuard>, u16)> {
        let (addr, len_bytes) = range(memory);
        let at = self.regions.partition_point(|region| region.addr < addr);
        let is_free_below = at == 0 || self.regions[at - 1].addr + self.regions[at - 1].len_bytes <= addr;
        let is_free_above = self.regions.get(at).is_none_or(|next| addr + len_bytes <= next.addr);
        if len_bytes == 0 || !is_free_below || !is_free_above {
            return Err(errno::error(EINVAL));
        }
        let table_index = *self.free.last().ok_or_else(|| errno::error(ENOSPC))?;
        let kept = if memory.is_kept_from_children() { None } else { Some(InheritanceGuard::new(addr, len_bytes)?) };
        register(table_index, addr, len_bytes)?;
        let taken = self.free.pop();
        debug_assert!(taken == Some(table_index));
        debug_assert!(
            self.regions.iter().all(|region| region.table_index != table_index),
            "a free index has no region"
        );
        Ok((at, kept, table_index))
    }

    /// Returns the address and length of a region.
    pub fn range(&self, id: RegionId) -> Option<(usize, usize)> {
        let region = self.regions.iter().find(|region| region.table_index == id.0)?;
        Some((region.addr, region.len_bytes))
    }

    /// Removes a region that was unregistered from the kernel, and returns its memory.
    pub fn remove(&mut self, id: RegionId) -> Option<Box<dyn Buffer>> {
        let at = self.regions.iter().position(|region| region.table_index == id.0)?;
        let Region { table_index, kept, memory, .. } = self.regions.remove(at);
        debug_assert!(!self.free.contains(&table_index), "the index of a region is not free");
        self.free.push(table_index);
        drop(kept);
        Some(memory)
    }

    /// Returns the region with the highest address.
    pub fn last(&self) -> Option<RegionId> {
        self.regions.last().map(|region| RegionId(region.table_index))
    }

    pub fn len(&self) -> usize {
        self.regions.len()
    }
}

/// Returns the address and length of a buffer.
fn range(memory: &dyn Buffer) -> (usize, usize) {
    (memory.addr().as_ptr() as usize, memory.len_bytes())
}

/// Ranges that fork children do not inherit. Key: start address. Value: length in bytes, and number of rings' regions
/// that have exactly this range.
pub(crate) static NOT_INHERITED: Guarded<BTreeMap<usize, (usize, usize)>> = Guarded::new(BTreeMap::new());

/// Keeps fork children from inheriting a range of memory until the guard is dropped.
struct InheritanceGuard {
    addr: usize,
    len_bytes: usize,
}

impl InheritanceGuard {
    /// Excludes a range from fork children. If another ring has registered the same range, only counts one more region
    /// for the range.
    ///
    /// # Errors
    ///
    /// `EBUSY` if the range overlaps another registered range but is not equal to that range; errors of `madvise`.
    fn new(addr: usize, len_bytes: usize) -> io::Result<Self> {
        forked::register();
        NOT_INHERITED.with(|kept| {
            if let Some((len, count)) = kept.get_mut(&addr).filter(|(len, _)| *len == len_bytes) {
                debug_assert!(*len == len_bytes);
                debug_assert!(*count > 0);
                *count += 1;
                return Ok(());
            }
            let last = kept.range(..addr + len_bytes).next_back();
            if last.is_some_and(|(start, (len, _))| start + len > addr) {
                return Err(errno::error(EBUSY));
            }
            disk::keep_from_children(addr, len_bytes, true)?;
            kept.insert(addr, (len_bytes, 1));
            Ok(())
        })?;
        Ok(Self { addr, len_bytes })
    }
}

impl Drop for InheritanceGuard {
    fn drop(&mut self) {
        NOT_INHERITED.with(|kept| {
            let Some((len_bytes, count)) = kept.get_mut(&self.addr) else { return };
            debug_assert!(*len_bytes == self.len_bytes && *count > 0, "the range of this guard is counted");
            *count -= 1;
            if *count == 0 {
                kept.remove(&self.addr);
                // The range was mapped when it was registered. If it was unmapped since, this call fails, and children
                // have no such memory.
                let _ = disk::keep_from_children(self.addr, self.len_bytes, false);
            }
        });
    }
}
