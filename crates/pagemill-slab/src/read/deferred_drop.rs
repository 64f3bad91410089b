//! Deferred drop: bounds the nesting of destructors that remove further values of their own cache. These further values
//! are dropped later, by the outer call on this thread that is already dropping values of the cache. So destructors
//! nest at most once per cache, even if each destructor removes the next element of a long list.

use crate::alloc::thread_slots;
use std::cell::Cell;

/// Maximum number of caches whose destructors may nest on one thread. If a destructor removes values of a further
/// cache, a later call drops these values.
const MAX_NESTED_CACHES: usize = 8;

thread_local! {
    /// The caches whose values this thread is dropping now. The variable has no destructor, so it is usable until the
    /// thread ends.
    static DROPPING: [DropSlot; MAX_NESTED_CACHES] =
        const { [const { DropSlot { cache: Cell::new(0), has_more: Cell::new(false) } }; MAX_NESTED_CACHES] };
}

/// An entry for a cache whose values this thread is dropping.
struct DropSlot {
    /// Address that identifies the cache of the entry; 0 if the entry is unused.
    cache: Cell<usize>,
    /// Whether destructors have retired further values of the cache.
    has_more: Cell<bool>,
}

/// The right to drop values of one cache on this thread. Dropping the `DeferredDrop` ends the right.
pub(crate) struct DeferredDrop(usize);

impl DeferredDrop {
    /// Begins to drop values of a cache, which `cache` identifies by its address. Inside of a destructor of the same
    /// cache, returns `None` and records for the outer call that there are more values to drop. Also returns `None` if
    /// all [`MAX_NESTED_CACHES`] entries are used.
    pub fn begin<T>(cache: &T) -> Option<Self> {
        // Under shuttle all tasks share one thread.
        let thread = if cfg!(shuttle) { thread_slots::own_slot() as usize } else { 0 };
        let cache = std::ptr::from_ref(cache) as usize + thread;
        DROPPING.with(|slots| {
            if let Some(outer) = slots.iter().find(|slot| slot.cache.get() == cache) {
                outer.has_more.set(true);
                return None;
            }
            let free = slots.iter().position(|slot| slot.cache.get() == 0)?;
            slots[free].cache.set(cache);
            Some(Self(free))
        })
    }

    /// Returns whether destructors have retired further values of the cache since the last call.
    pub fn take_has_more(&self) -> bool {
        DROPPING.with(|slots| slots[self.0].has_more.take())
    }
}

impl Drop for DeferredDrop {
    fn drop(&mut self) {
        self.take_has_more();
        DROPPING.with(|slots| slots[self.0].cache.set(0));
    }
}
