//! Memory registered with a ring: the kernel has pinned its pages.
//!
//! Registered memory is kept from fork children (`MADV_DONTFORK`). Otherwise the first write after a fork would leave
//! the kernel with the child's pages, and the fork would copy all of it (0.9 s for 512 MiB). The same range may be
//! registered with several rings; the last one to unregister it makes it inheritable again. Memory that children never
//! get ([`Buffer::is_kept_from_children`]) is left as it is.

use crate::buffer::Buffer;
use crate::errno::{self, EBUSY, EINVAL, ENOSPC};
use crate::forked;
use pagemill_core::sync::Guarded;
use pagemill_sys::disk;
use std::collections::BTreeMap;
use std::io;

/// Memory registered with a ring: its index in the ring's table of registered buffers.
///
/// Example: [`Ring`](super::Ring).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionId(pub(super) u16);

pub(super) struct Region {
    pub place: u16,
    /// New transfers must not use it.
    is_retired: bool,
    addr: usize,
    len_bytes: usize,
    kept: Option<Kept>,
    keeper: Box<dyn Buffer>,
}

/// The registered memory of one ring.
pub(super) struct Regions {
    /// Sorted by address; no two overlap.
    regions: Vec<Region>,
    /// Free table entries.
    free: Vec<u16>,
}

impl Regions {
    pub fn new(places: u16) -> Self {
        Self { regions: Vec::new(), free: (0..places).rev().collect() }
    }

    /// Returns the table entry of a region that contains all of these bytes.
    pub fn find(&self, addr: usize, len_bytes: usize) -> Option<u16> {
        let after = self.regions.partition_point(|region| region.addr <= addr);
        let region = &self.regions[after.checked_sub(1)?];
        (addr - region.addr + len_bytes <= region.len_bytes && !region.is_retired).then_some(region.place)
    }

    pub fn retire(&mut self, id: RegionId) {
        self.regions.iter_mut().filter(|region| region.place == id.0).for_each(|region| region.is_retired = true);
    }

    /// Adds memory; `register` registers it with the kernel at a table entry.
    pub fn add(
        &mut self,
        keeper: Box<dyn Buffer>,
        register: impl FnOnce(u16, usize, usize) -> io::Result<()>,
    ) -> Result<RegionId, (io::Error, Box<dyn Buffer>)> {
        match self.try_add(&*keeper, register) {
            Ok((at, kept, place)) => {
                let (addr, len_bytes) = range(&*keeper);
                self.regions.insert(at, Region { place, is_retired: false, addr, len_bytes, kept, keeper });
                Ok(RegionId(place))
            }
            Err(error) => Err((error, keeper)),
        }
    }

    fn try_add(
        &mut self,
        keeper: &dyn Buffer,
        register: impl FnOnce(u16, usize, usize) -> io::Result<()>,
    ) -> io::Result<(usize, Option<Kept>, u16)> {
        let (addr, len_bytes) = range(keeper);
        let at = self.regions.partition_point(|region| region.addr < addr);
        let is_free_below = at == 0 || self.regions[at - 1].addr + self.regions[at - 1].len_bytes <= addr;
        let is_free_above = self.regions.get(at).is_none_or(|next| addr + len_bytes <= next.addr);
        if len_bytes == 0 || !is_free_below || !is_free_above {
            return Err(errno::error(EINVAL));
        }
        let place = *self.free.last().ok_or_else(|| errno::error(ENOSPC))?;
        let kept = if keeper.is_kept_from_children() { None } else { Some(Kept::new(addr, len_bytes)?) };
        register(place, addr, len_bytes)?;
        self.free.pop();
        Ok((at, kept, place))
    }

    /// Returns address and length of a region.
    pub fn range(&self, id: RegionId) -> Option<(usize, usize)> {
        let region = self.regions.iter().find(|region| region.place == id.0)?;
        Some((region.addr, region.len_bytes))
    }

    /// Returns memory that has been unregistered from the kernel.
    pub fn remove(&mut self, id: RegionId) -> Option<Box<dyn Buffer>> {
        let at = self.regions.iter().position(|region| region.place == id.0)?;
        let Region { place, kept, keeper, .. } = self.regions.remove(at);
        self.free.push(place);
        drop(kept);
        Some(keeper)
    }

    pub fn last(&self) -> Option<RegionId> {
        self.regions.last().map(|region| RegionId(region.place))
    }

    pub fn len(&self) -> usize {
        self.regions.len()
    }
}

fn range(keeper: &dyn Buffer) -> (usize, usize) {
    (keeper.addr().as_ptr() as usize, keeper.len_bytes())
}

/// Ranges that are kept from fork children. Key: address. Value: length, and number of rings that registered it.
pub(crate) static KEPT: Guarded<BTreeMap<usize, (usize, usize)>> = Guarded::new(BTreeMap::new());

/// Keeps a range from fork children until this is dropped.
struct Kept {
    addr: usize,
    len_bytes: usize,
}

impl Kept {
    /// # Errors
    ///
    /// `EBUSY` if the range overlaps another one but is not equal to it; errors of `madvise`.
    fn new(addr: usize, len_bytes: usize) -> io::Result<Self> {
        forked::hear();
        KEPT.with(|kept| {
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

impl Drop for Kept {
    fn drop(&mut self) {
        KEPT.with(|kept| {
            let Some((_, count)) = kept.get_mut(&self.addr) else { return };
            *count -= 1;
            if *count == 0 {
                kept.remove(&self.addr);
                // The range was mapped when it was registered. If it was unmapped since, children do not have it
                // either.
                let _ = disk::keep_from_children(self.addr, self.len_bytes, false);
            }
        });
    }
}
