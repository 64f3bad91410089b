//! Destructors of values that remove others: what these leave is ended by the call of the cache that is ending values already on this
//! thread. So destructors are within each other once for each cache at most, however long the lists are that they take apart.

use super::numbers;
use std::cell::Cell;

/// Caches of which a thread ends values in destructors of each other's. What is left beyond that waits for a later call.
const DEPTH: usize = 8;

thread_local! {
    /// What is being ended on this thread. Without a destructor, so it is there to a thread's end.
    static ENDING: [Slot; DEPTH] = const { [const { Slot { cache: Cell::new(0), has_more: Cell::new(false) } }; DEPTH] };
}

struct Slot {
    /// 0 while it is free.
    cache: Cell<usize>,
    has_more: Cell<bool>,
}

/// Values of a cache are being ended on this thread.
pub(super) struct Ending(usize);

impl Ending {
    /// Begins to end values of a cache, which is named by its address. `None` within a destructor of one: who runs that is told that there is
    /// more.
    pub fn begin<T>(cache: &T) -> Option<Self> {
        // Under shuttle all threads are one.
        let thread = if cfg!(shuttle) { numbers::own_number() as usize } else { 0 };
        let cache = std::ptr::from_ref(cache) as usize + thread;
        ENDING.with(|slots| {
            if let Some(outer) = slots.iter().find(|slot| slot.cache.get() == cache) {
                outer.has_more.set(true);
                return None;
            }
            let free = slots.iter().position(|slot| slot.cache.get() == 0)?;
            slots[free].cache.set(cache);
            Some(Self(free))
        })
    }

    /// Whether destructors have left something since the last time.
    pub fn take_more(&self) -> bool {
        ENDING.with(|slots| slots[self.0].has_more.take())
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.take_more();
        ENDING.with(|slots| slots[self.0].cache.set(0));
    }
}
