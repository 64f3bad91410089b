//! `Debug` of the public types. A `Slot`, `Pinned` or `Removed` shows its value, a cache its name and number of active
//! objects, `Slabs` the names of its caches, `Moving` and `New` an address, and other types only their type name.

use crate::{Candidates, Done, FixedSlab, Guard, HandleMap, Migrate, Movable, Moving, New, OwnerSlab};
use crate::{Pinned, Removed, SlabCache, Slabs, Slot, Target};
use std::fmt::{Debug, Formatter, Result};

fn fmt_cache(cache: &impl SlabCache, name: &str, f: &mut Formatter<'_>) -> Result {
    let mut text = f.debug_struct(name);
    if let Ok(info) = cache.info() {
        text.field("name", &info.name).field("active", &info.active);
    }
    text.finish_non_exhaustive()
}

impl<T> Debug for FixedSlab<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        fmt_cache(self, "FixedSlab", f)
    }
}

impl<M: Migrate> Debug for OwnerSlab<M> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        fmt_cache(self, "OwnerSlab", f)
    }
}

impl<T: Movable> Debug for HandleMap<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        fmt_cache(self, "HandleMap", f)
    }
}

impl Debug for Slabs {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_list().entries(self.list().iter().map(|info| &info.name)).finish()
    }
}

impl<T: Debug> Debug for Slot<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        (**self).fmt(f)
    }
}

impl<T: Movable + Debug> Debug for Pinned<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        (**self).fmt(f)
    }
}

impl<T: Movable + Debug> Debug for Removed<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        (**self).fmt(f)
    }
}

impl Debug for Guard {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}

impl<T> Debug for Candidates<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Candidates").finish_non_exhaustive()
    }
}

impl<T> Debug for Moving<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_tuple("Moving").field(&self.object()).finish()
    }
}

impl Debug for Done<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Done").finish_non_exhaustive()
    }
}

impl<T> Debug for Target<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

impl<T> Debug for New<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_tuple("New").field(&self.object()).finish()
    }
}
