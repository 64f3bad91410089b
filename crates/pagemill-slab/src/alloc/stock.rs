//! The stock: the free handles that one thread keeps for a cache by handle, and the retired objects that wait for
//! readers.
//!
//! The stock of a thread slot is protected by the lock of the slot's magazine. Only a thread that has entered or
//! drained the magazine uses it.
#![allow(unsafe_code)] // zero bits are a valid stock

use crate::alloc::meta::{LockedU32, LockedU64};
use crate::read::epochs::{self, Epoch};
use pagemill_core::arena::Zeroed;

/// Size of a [`Stock`] in bytes.
const STOCK_BYTES: usize = 16 << 10;

/// Maximum number of free handles in a stock. They fill the bytes of the stock that the retire list leaves. Memory of
/// the stock becomes resident only as handles are added.
pub(crate) const STOCK_KEY_CAPACITY: usize = (STOCK_BYTES - size_of::<ThreadRetireList>()) / size_of::<u64>() - 1;

/// Number of handles that a stock gets from the handle table in one call. The words of these handles fill whole cache
/// lines of the table, so no other thread uses these lines.
pub(crate) const KEY_BATCH_LEN: usize = 64;

/// Maximum number of retired objects in a stock.
pub(crate) const STOCK_RETIRED_CAPACITY: usize = 64;

/// The free handles and retired objects that one thread slot keeps for a cache by handle.
#[repr(C, align(1024))]
pub(crate) struct Stock {
    pub retired: ThreadRetireList,
    pub keys: Stack<STOCK_KEY_CAPACITY>,
}

const _: () = assert!(size_of::<Stock>() == STOCK_BYTES);

// SAFETY: atomic words are valid if all bits are zero.
unsafe impl Zeroed for Stock {}

impl Stock {
    /// Adds a free handle and a retired object to the stock. Returns false, and adds neither, if the handle or the
    /// object does not fit.
    #[inline(always)]
    pub fn push_pair(&self, key: u64, object: u64) -> bool {
        let (keys, objects) = (self.keys.len.get(), self.retired.objects.len.get());
        let has_room = objects < self.retired.capacity.get();
        match (self.keys.items.get(keys as usize), self.retired.objects.items.get(objects as usize)) {
            (Some(key_at), Some(place_at)) if has_room => {
                key_at.set(key);
                place_at.set(object);
                self.keys.len.set(keys + 1);
                self.retired.objects.len.set(objects + 1);
                true
            }
            _ => false,
        }
    }
}

/// Retired objects in order of retirement. The first `waiting` of them wait for readers of `epoch`; the others were
/// retired later.
#[repr(C)]
pub(crate) struct ThreadRetireList {
    /// Number of objects that the list may hold before the next [`ThreadRetireList::drain_batch`]; 0 at first.
    capacity: LockedU32,
    /// Number of objects of the list that wait for the readers of `epoch`.
    waiting: LockedU32,
    /// Readers that began at this epoch or earlier may still use the waiting objects.
    epoch: LockedU64,
    objects: Stack<STOCK_RETIRED_CAPACITY>,
}

/// Result of [`ThreadRetireList::drain_batch`]: retired objects that were removed from the list.
pub(crate) struct DrainedBatch {
    pub count: usize,
    /// Readers that began at this epoch or earlier may still use the objects. `None`: no reader uses them.
    pub until: Option<Epoch>,
}

impl ThreadRetireList {
    /// Retires an object that no handle refers to. Returns false if the list is full.
    pub fn push(&self, object: u64) -> bool {
        self.objects.len.get() < self.capacity.get() && self.objects.push(object)
    }

    /// Removes the retired objects that no reader uses: either all, or those that have waited since the last call. If
    /// readers still use the objects that have waited, removes them nevertheless; the caller moves them to the shared
    /// retire list. Afterwards at least `more` objects fit, up to the maximum.
    pub fn drain_batch(&self, more: usize, out: &mut [u64; STOCK_RETIRED_CAPACITY]) -> DrainedBatch {
        let (len, waiting) = (self.objects.len.get() as usize, self.waiting.get() as usize);
        debug_assert!(waiting <= len, "the waiting objects are in the list");
        let (epoch, oldest) = epochs::retire();
        let waited_for = Epoch::from_bits(self.epoch.get());
        let (count, until) = if oldest > epoch {
            (len, None)
        } else {
            (waiting, (waiting > 0 && oldest <= waited_for).then_some(waited_for))
        };
        debug_assert!(count <= len);
        let rest = len - self.objects.drain(len - count, out);
        self.waiting.set(rest as u32);
        self.epoch.set(epoch.to_bits());
        self.capacity.set((rest + more).min(STOCK_RETIRED_CAPACITY) as u32);
        DrainedBatch { count, until }
    }

    /// Returns the number of retired objects in the list. The number is approximate, except on the stock's thread.
    pub fn len(&self) -> u32 {
        self.objects.len.get()
    }

    /// Removes all objects from the list, even if readers use them, and closes the list, so that no object fits.
    /// Returns the number of objects.
    pub fn drain_all(&self, out: &mut [u64; STOCK_RETIRED_CAPACITY]) -> usize {
        self.capacity.set(0);
        self.waiting.set(0);
        self.objects.drain(0, out)
    }
}

/// A bounded stack of 64-bit words.
#[repr(C)]
pub(crate) struct Stack<const N: usize> {
    len: LockedU32,
    items: [LockedU64; N],
}

impl<const N: usize> Stack<N> {
    /// Adds a word to the stack. Returns false if the stack is full.
    #[inline]
    pub fn push(&self, item: u64) -> bool {
        let len = self.len.get();
        let Some(object) = self.items.get(len as usize) else { return false };
        object.set(item);
        self.len.set(len + 1);
        true
    }

    /// Removes and returns the word of the stack that was added last; `None` if the stack is empty.
    #[inline]
    pub fn pop(&self) -> Option<u64> {
        let last = self.len.get().wrapping_sub(1);
        let item = self.items.get(last as usize)?.get();
        self.len.set(last);
        Some(item)
    }

    /// Moves the words that were added first from the stack to `items`, until `kept` words are left or `items` is full.
    /// Returns the number of removed words.
    pub fn drain(&self, kept: usize, items: &mut [u64]) -> usize {
        let len = self.len.get() as usize;
        debug_assert!(len <= N);
        let gone = len.saturating_sub(kept).min(items.len());
        items.iter_mut().zip(&self.items[..gone]).for_each(|(item, object)| *item = object.get());
        (gone..len).for_each(|at| self.items[at - gone].set(self.items[at].get()));
        self.len.set((len - gone) as u32);
        gone
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// `pop` must return the newest word, `drain` the oldest ones, and a full stack must accept no word.
    #[test]
    fn stack_pops_the_newest_and_drains_the_oldest() {
        // SAFETY: all bits zero are a valid value of this type.
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

    /// Retires objects while a guard exists. They must wait until the guard is dropped, first in the thread's list and
    /// then in a drained batch. Without a guard they must be free at the next `drain_batch`.
    #[test]
    fn retired_objects_wait_for_readers() {
        // SAFETY: all bits zero are a valid value of this type.
        let retired: ThreadRetireList = unsafe { std::mem::zeroed() };
        let mut out = [0; STOCK_RETIRED_CAPACITY];
        assert!(!retired.push(1), "it has not been opened");
        assert_eq!(retired.drain_batch(2, &mut out).count, 0);
        assert!(retired.push(1) && retired.push(2) && !retired.push(3));
        let guard = epochs::enter();
        let first = retired.drain_batch(2, &mut out);
        assert_eq!((first.count, retired.push(3), retired.push(4), retired.push(5)), (0, true, true, false));
        let second = retired.drain_batch(2, &mut out);
        assert!(second.until.is_some_and(|until| epochs::oldest_pinned() <= until));
        assert_eq!((second.count, &out[..2]), (2, &[1, 2][..]));
        assert!(retired.push(5) && retired.push(6) && !retired.push(7));
        drop(guard);
        let mut seen = Vec::new();
        // Readers of concurrent tests may delay this.
        while seen.len() < 4 {
            let drained = retired.drain_batch(2, &mut out);
            assert!(drained.until.is_none_or(|until| until > second.until.unwrap()));
            seen.extend_from_slice(&out[..drained.count]);
        }
        assert_eq!(seen, [3, 4, 5, 6]);
        assert!(retired.push(7));
        assert_eq!((retired.drain_all(&mut out), out[0], retired.push(8)), (1, 7, false));
    }
}
