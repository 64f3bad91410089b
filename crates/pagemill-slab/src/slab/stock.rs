//! The stock: what a thread keeps for a cache by handle, namely free handles, and retired places that wait for readers.
//!
//! It lies beside the thread's magazine, under the same claim: only the thread inside of the magazine, or a draining
//! thread, uses it.
#![allow(unsafe_code)] // zero bits are a valid stock

use super::epochs::{self, Epoch};
use super::meta::{Held32, Held64};
use pagemill_core::arena::Zeroed;

const STOCK_BYTES: usize = 16 << 10;

/// Capacity for handles: the rest of a stock. Its memory is populated up to the highest count so far.
pub(super) const KEYS: usize = (STOCK_BYTES - size_of::<ThreadRetireList>()) / size_of::<u64>() - 1;

/// Handles that are taken from the table at once: whole cache lines, not shared with other threads.
pub(super) const RUN: usize = 64;

/// Capacity for retired places.
pub(super) const PLACES: usize = 64;

/// What one thread slot keeps for a cache by handle.
#[repr(C, align(1024))]
pub(super) struct Stock {
    pub retired: ThreadRetireList,
    pub keys: Stack<KEYS>,
}

const _: () = assert!(size_of::<Stock>() == STOCK_BYTES);

// SAFETY: atomic words.
unsafe impl Zeroed for Stock {}

impl Stock {
    /// Adds a free handle and a retired place: both, or neither if there is no room for one of them.
    #[inline(always)]
    pub fn take_in(&self, key: u64, place: u64) -> bool {
        let (keys, places) = (self.keys.len.get(), self.retired.places.len.get());
        let has_room = places < self.retired.room.get();
        match (self.keys.items.get(keys as usize), self.retired.places.items.get(places as usize)) {
            (Some(key_at), Some(place_at)) if has_room => {
                key_at.set(key);
                place_at.set(place);
                self.keys.len.set(keys + 1);
                self.retired.places.len.set(places + 1);
                true
            }
            _ => false,
        }
    }
}

/// A retire list: places in order of retirement. First those that wait for readers of the epoch `epoch`, then later
/// ones.
#[repr(C)]
pub(super) struct ThreadRetireList {
    /// How many places it may hold before it is sorted; 0 at first.
    room: Held32,
    /// `waiting`: how many places wait. `epoch`: the epoch that they wait for.
    waiting: Held32,
    epoch: Held64,
    places: Stack<PLACES>,
}

/// Places that were removed from the list: free, or still waiting.
pub(super) struct Sorted {
    pub count: usize,
    /// Readers up to this epoch may use them; `None`: they are free.
    pub until: Option<Epoch>,
}

impl ThreadRetireList {
    /// Retires a place that no word names, if there is room.
    pub fn push(&self, place: u64) -> bool {
        self.places.len.get() < self.room.get() && self.places.push(place)
    }

    /// Removes the places that no reader uses: all, or those that waited since the last call. If not even these are free,
    /// they are removed to wait in the shared retire list. Afterwards there is room for `more`.
    pub fn sort(&self, more: usize, out: &mut [u64; PLACES]) -> Sorted {
        let (len, waiting) = (self.places.len.get() as usize, self.waiting.get() as usize);
        let (epoch, oldest) = epochs::retire();
        let waited_for = Epoch::from_bits(self.epoch.get());
        let (count, until) = if oldest > epoch {
            (len, None)
        } else {
            (waiting, (waiting > 0 && oldest <= waited_for).then_some(waited_for))
        };
        let rest = len - self.places.drain(len - count, out);
        self.waiting.set(rest as u32);
        self.epoch.set(epoch.to_bits());
        self.room.set((rest + more).min(PLACES) as u32);
        Sorted { count, until }
    }

    /// Number of places, approximate for other threads.
    pub fn len(&self) -> u32 {
        self.places.len.get()
    }

    /// Removes all places, even if readers use them, and returns how many. Resets the list.
    pub fn take(&self, out: &mut [u64; PLACES]) -> usize {
        self.room.set(0);
        self.waiting.set(0);
        self.places.drain(0, out)
    }
}

/// A bounded stack of words.
#[repr(C)]
pub(super) struct Stack<const N: usize> {
    len: Held32,
    items: [Held64; N],
}

impl<const N: usize> Stack<N> {
    /// Adds a word, if there is room.
    #[inline]
    pub fn push(&self, item: u64) -> bool {
        let len = self.len.get();
        let Some(place) = self.items.get(len as usize) else { return false };
        place.set(item);
        self.len.set(len + 1);
        true
    }

    /// Removes the word that was added last.
    #[inline]
    pub fn pop(&self) -> Option<u64> {
        let last = self.len.get().wrapping_sub(1);
        let item = self.items.get(last as usize)?.get();
        self.len.set(last);
        Some(item)
    }

    /// Removes all words but the last `kept`, oldest first, as many as `items` has room for. Returns how many.
    pub fn drain(&self, kept: usize, items: &mut [u64]) -> usize {
        let len = self.len.get() as usize;
        let gone = len.saturating_sub(kept).min(items.len());
        items.iter_mut().zip(&self.items[..gone]).for_each(|(item, place)| *item = place.get());
        (gone..len).for_each(|at| self.items[at - gone].set(self.items[at].get()));
        self.len.set((len - gone) as u32);
        gone
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// The last word is popped first; `drain` removes the oldest; the capacity is never exceeded.
    #[test]
    fn a_stack_gives_what_it_took() {
        // SAFETY: zero bits are a value.
        let stack: Stack<4> = unsafe { std::mem::zeroed() };
        let drain = |kept| {
            let mut items = [0; 4];
            let count = stack.drain(kept, &mut items);
            items[..count].to_vec()
        };
        assert_eq!((stack.pop(), drain(0)), (None, vec![]));
        assert!((1..=4).all(|item| stack.push(item)) && !stack.push(5));
        assert_eq!((stack.pop(), drain(1), drain(7)), (Some(4), vec![1, 2], vec![]));
        assert_eq!((stack.pop(), stack.pop()), (Some(3), None));
    }

    /// Places wait for a guard that existed when they were retired, first in the stock, then elsewhere. Without one they
    /// are free at once.
    #[test]
    fn retired_places_wait_for_readers() {
        // SAFETY: zero bits are a value.
        let retired: ThreadRetireList = unsafe { std::mem::zeroed() };
        let mut out = [0; PLACES];
        assert!(!retired.push(1), "it has not been opened");
        assert_eq!(retired.sort(2, &mut out).count, 0);
        assert!(retired.push(1) && retired.push(2) && !retired.push(3));
        let guard = epochs::pin();
        let first = retired.sort(2, &mut out);
        assert_eq!((first.count, retired.push(3), retired.push(4), retired.push(5)), (0, true, true, false));
        let second = retired.sort(2, &mut out);
        assert!(second.until.is_some_and(|until| epochs::oldest() <= until));
        assert_eq!((second.count, &out[..2]), (2, &[1, 2][..]));
        assert!(retired.push(5) && retired.push(6) && !retired.push(7));
        drop(guard);
        let mut seen = Vec::new();
        // Readers of other tests may exist.
        while seen.len() < 4 {
            let sorted = retired.sort(2, &mut out);
            assert!(sorted.until.is_none_or(|until| until > second.until.unwrap()));
            seen.extend_from_slice(&out[..sorted.count]);
        }
        assert_eq!(seen, [3, 4, 5, 6]);
        assert!(retired.push(7));
        assert_eq!((retired.take(&mut out), out[0], retired.push(8)), (1, 7, false));
    }
}
