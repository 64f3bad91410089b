//! Deferred drop: a destructor may remove further values of its cache. These are dropped later, by the call on this
//! thread that is already dropping values of the cache. So destructors nest at most once per cache, even when they take
//! apart a long list.

use super::thread_slots;
use std::cell::Cell;

/// Maximum number of caches with destructors nested on one thread. Values of further caches wait for a later call.
const DEPTH: usize = 8;

thread_local! {
    /// The drops in progress on this thread. Without a destructor, so it is usable until the thread ends.
    static DROPPING: [DropSlot; DEPTH] = const { [const { DropSlot { cache: Cell::new(0), has_more: Cell::new(false) } }; DEPTH] };
}

struct DropSlot {
    /// The address that names the cache; 0 if the slot is free.
    cache: Cell<usize>,
    has_more: Cell<bool>,
}

/// A drop in progress on this thread, for one cache.
pub(super) struct DeferredDrop(usize);

impl DeferredDrop {
    /// Begins to drop values of a cache, which is named by its address. `None` inside of a destructor of the same cache:
    /// the outer call is notified that there is more. Also `None` if all [`DEPTH`] slots are taken.
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

    /// Whether destructors have retired more since the last call.
    pub fn take_more(&self) -> bool {
        DROPPING.with(|slots| slots[self.0].has_more.take())
    }
}

impl Drop for DeferredDrop {
    fn drop(&mut self) {
        self.take_more();
        DROPPING.with(|slots| slots[self.0].cache.set(0));
    }
}
