//! Memory that is registered with a ring: its pages are known to the kernel, and stay where they are.
//!
//! Registered memory is kept from fork children (`MADV_DONTFORK`): else the first write after a fork would leave the kernel with
//! the child's pages, and forking would copy all of it (0.9 s for 512 MiB). The same range may be registered with several
//! rings; the last one gives it back to children. What is never theirs ([`Buffer::is_kept_from_children`]) is left as it is.

use crate::store::buffer::Buffer;
use crate::store::errno::{self, EBUSY, EINVAL, ENOSPC};
use crate::store::forked;
use crate::sync::Guarded;
use pagemill_sys::disk;
use std::collections::BTreeMap;
use std::io;

/// A place in a ring's table of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionId(pub(super) u16);

pub(super) struct Region {
    pub place: u16,
    /// No transfer is to use it any more.
    is_retired: bool,
    addr: usize,
    len_bytes: usize,
    kept: Option<Kept>,
    keeper: Box<dyn Buffer>,
}

/// The registered memory of one ring.
pub(super) struct Regions {
    /// By address; no two overlap.
    regions: Vec<Region>,
    /// Places of the table that are free.
    free: Vec<u16>,
}

impl Regions {
    pub fn new(places: u16) -> Self {
        Self { regions: Vec::new(), free: (0..places).rev().collect() }
    }

    /// Where memory is registered that all of these bytes lie in.
    pub fn find(&self, addr: usize, len_bytes: usize) -> Option<u16> {
        let after = self.regions.partition_point(|region| region.addr <= addr);
        let region = &self.regions[after.checked_sub(1)?];
        (addr - region.addr + len_bytes <= region.len_bytes && !region.is_retired).then_some(region.place)
    }

    pub fn retire(&mut self, id: RegionId) {
        self.regions.iter_mut().filter(|region| region.place == id.0).for_each(|region| region.is_retired = true);
    }

    /// Takes memory in, which `register` does at a place.
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

    /// What is at a place: where it begins, and how long it is.
    pub fn range(&self, id: RegionId) -> Option<(usize, usize)> {
        let region = self.regions.iter().find(|region| region.place == id.0)?;
        Some((region.addr, region.len_bytes))
    }

    /// Gives memory back that is not at its place any more.
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

/// Ranges that are kept from fork children, by address: length, and how many rings have them.
pub(in crate::store) static KEPT: Guarded<BTreeMap<usize, (usize, usize)>> = Guarded::new(BTreeMap::new());

/// Keeps a range from fork children until it is dropped.
struct Kept {
    addr: usize,
    len_bytes: usize,
}

impl Kept {
    /// # Errors
    ///
    /// `EBUSY` for one that overlaps others but is none of them; what `madvise` says.
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
                // It was mapped when it was registered; what is gone is in no child either.
                let _ = disk::keep_from_children(self.addr, self.len_bytes, false);
            }
        });
    }
}
