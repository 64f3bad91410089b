//! What one thread keeps of a cache by handle: handles for its next values, and places that readers have to leave first.
//!
//! Beside the thread's magazine, and under the claim of that: for who is inside of it, or has seized it.
#![allow(unsafe_code)] // says that zero bits are a value

use super::meta::{Held32, Held64};
use super::readers::{self, Moment};
use crate::arena::Zeroed;

const STOCK_BYTES: usize = 16 << 10;

/// Handles of a stock: what is left of it. Memory is behind as many as there ever were at a time.
pub(super) const KEYS: usize = (STOCK_BYTES - size_of::<Leavings>()) / size_of::<u64>() - 1;

/// Handles that come from the table at once: lines of it that no other thread has.
pub(super) const RUN: usize = 64;

/// Places that wait.
pub(super) const PLACES: usize = 64;

#[repr(C, align(1024))]
pub(super) struct Stock {
    pub left: Leavings,
    pub keys: Stack<KEYS>,
}

const _: () = assert!(size_of::<Stock>() == STOCK_BYTES);

// SAFETY: atomic words.
unsafe impl Zeroed for Stock {}

impl Stock {
    /// Takes a handle in and a place to which no word leads any more: both, or neither where there is no room for one.
    #[inline(always)]
    pub fn take_in(&self, key: u64, place: u64) -> bool {
        let (keys, places) = (self.keys.len.get(), self.left.places.len.get());
        let has_room = places < self.left.room.get();
        match (self.keys.items.get(keys as usize), self.left.places.items.get(places as usize)) {
            (Some(key_at), Some(place_at)) if has_room => {
                key_at.set(key);
                place_at.set(place);
                self.keys.len.set(keys + 1);
                self.left.places.len.set(places + 1);
                true
            }
            _ => false,
        }
    }
}

/// Places that were left, in the order in which they were: first those that wait for readers of a moment, then those of later.
#[repr(C)]
pub(super) struct Leavings {
    /// So many may be in before they are sorted; 0 at first.
    room: Held32,
    /// How many wait, and for whom.
    waiting: Held32,
    moment: Held64,
    places: Stack<PLACES>,
}

/// Places that came out: free, or to wait elsewhere.
pub(super) struct Sorted {
    pub count: usize,
    /// Readers of up to then may be at them.
    pub until: Option<Moment>,
}

impl Leavings {
    /// Takes a place in to which no word leads any more, if there is room.
    pub fn push(&self, place: u64) -> bool {
        self.places.len.get() < self.room.get() && self.places.push(place)
    }

    /// Takes out what no reader is at: all, or what has waited since the last time. Where not even that is free, it has to
    /// wait elsewhere. Afterwards there is room for `more`.
    pub fn sort(&self, more: usize, out: &mut [u64; PLACES]) -> Sorted {
        let (len, waiting) = (self.places.len.get() as usize, self.waiting.get() as usize);
        let (moment, oldest) = readers::leave();
        let waited_for = Moment::from_bits(self.moment.get());
        let (count, until) = if oldest > moment {
            (len, None)
        } else {
            (waiting, (waiting > 0 && oldest <= waited_for).then_some(waited_for))
        };
        let rest = len - self.places.drain(len - count, out);
        self.waiting.set(rest as u32);
        self.moment.set(moment.to_bits());
        self.room.set((rest + more).min(PLACES) as u32);
        Sorted { count, until }
    }

    /// Places that wait, for whoever wants to know it nearly.
    pub fn len(&self) -> u32 {
        self.places.len.get()
    }

    /// Takes all out, whoever may be at them; says how many. It is as at first.
    pub fn take(&self, out: &mut [u64; PLACES]) -> usize {
        self.room.set(0);
        self.waiting.set(0);
        self.places.drain(0, out)
    }
}

#[repr(C)]
pub(super) struct Stack<const N: usize> {
    len: Held32,
    items: [Held64; N],
}

impl<const N: usize> Stack<N> {
    /// Takes a word in, if there is room.
    #[inline]
    pub fn push(&self, item: u64) -> bool {
        let len = self.len.get();
        let Some(place) = self.items.get(len as usize) else { return false };
        place.set(item);
        self.len.set(len + 1);
        true
    }

    /// Takes the word that came last.
    #[inline]
    pub fn pop(&self) -> Option<u64> {
        let last = self.len.get().wrapping_sub(1);
        let item = self.items.get(last as usize)?.get();
        self.len.set(last);
        Some(item)
    }

    /// Takes all out but so many that came last, as far as there is room for them; says how many.
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

    /// What came last goes first; from the other end all goes that is not to be kept; there is never more than there is room.
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

    /// Places wait for a guard that was there when they were left, in the stock first, then elsewhere; without one they are free at once.
    #[test]
    fn leavings_wait_for_readers() {
        // SAFETY: zero bits are a value.
        let left: Leavings = unsafe { std::mem::zeroed() };
        let mut out = [0; PLACES];
        assert!(!left.push(1), "it has not been opened");
        assert_eq!(left.sort(2, &mut out).count, 0);
        assert!(left.push(1) && left.push(2) && !left.push(3));
        let guard = readers::pin();
        let first = left.sort(2, &mut out);
        assert_eq!((first.count, left.push(3), left.push(4), left.push(5)), (0, true, true, false));
        let second = left.sort(2, &mut out);
        assert!(second.until.is_some_and(|until| readers::oldest() <= until));
        assert_eq!((second.count, &out[..2]), (2, &[1, 2][..]));
        assert!(left.push(5) && left.push(6) && !left.push(7));
        drop(guard);
        let mut seen = Vec::new();
        // Readers of other tests may be there.
        while seen.len() < 4 {
            let sorted = left.sort(2, &mut out);
            assert!(sorted.until.is_none_or(|until| until > second.until.unwrap()));
            seen.extend_from_slice(&out[..sorted.count]);
        }
        assert_eq!(seen, [3, 4, 5, 6]);
        assert!(left.push(7));
        assert_eq!((left.take(&mut out), out[0], left.push(8)), (1, 7, false));
    }
}
