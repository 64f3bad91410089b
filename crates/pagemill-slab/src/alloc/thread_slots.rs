//! Thread slots: a small integer for each thread, which indexes the thread's magazines and other data of the thread.
//! The slot is reused after the thread has ended.
//!
//! A thread takes a slot at its first call that needs one.

use crate::alloc::magazine::Offset;
use crate::read::epochs;
use pagemill_core::sync::{Acquire, Relaxed, Release};
use pagemill_sys::process;
use std::sync::atomic::{self, Ordering::AcqRel};

/// Maximum number of threads that have slots at a time. Further threads have no magazines and allocate from slabs
/// directly. Linux's default limit of 65,530 mappings allows no more threads in a process, because each thread needs
/// two mappings.
pub(crate) const MAX_THREADS: usize = 1 << 15;

/// Number of bits in one word of a bitmap with a bit for each thread slot.
pub(crate) const WORD_BITS: usize = u64::BITS as usize;

/// Stands for the slot of a thread that has not called [`ensure_slot`] yet.
pub(crate) const UNKNOWN_SLOT: u32 = u32::MAX;
/// Stands for the slot of a thread that got no slot, because all slots are in use or the thread is ending.
pub(crate) const NO_SLOT: u32 = u32::MAX - 1;

/// The thread slots that the threads of the process use.
static SLOTS: ThreadSlots = ThreadSlots::new();

/// One more than the highest thread slot that was ever used.
static HIGH_WATER: atomic::AtomicU32 = atomic::AtomicU32::new(0);

/// Returns one more than the highest thread slot that was ever used.
pub(crate) fn high_water() -> usize {
    HIGH_WATER.load(Acquire) as usize
}

/// Returns the indices of all set bits in a bitmap of 64-bit words, in ascending order.
pub(crate) fn set_bits(words: impl Iterator<Item = u64>) -> impl Iterator<Item = usize> {
    words.enumerate().flat_map(|(at, mut bits)| {
        std::iter::from_fn(move || {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits.checked_sub(1)?;
            Some(at * WORD_BITS + bit)
        })
    })
}

/// Returns the thread slots of existing threads, and of ended threads whose guards still exist. A slot is certainly
/// included if its thread took the slot and executed a barrier before the caller executed a barrier.
#[cfg(not(shuttle))]
pub(crate) fn slots_in_use() -> impl Iterator<Item = usize> {
    SLOTS.taken(high_water().div_ceil(WORD_BITS))
}

/// Returns all thread slots that were ever used, because under shuttle tasks do not take slots.
#[cfg(shuttle)]
pub(crate) fn slots_in_use() -> impl Iterator<Item = usize> {
    0..high_water()
}

/// The set of thread slots in use.
struct ThreadSlots {
    /// One bit for each thread slot, set while the slot is in use.
    taken: [atomic::AtomicU64; MAX_THREADS / WORD_BITS],
    /// Id of the process whose thread took a slot last.
    last_process: atomic::AtomicU32,
}

impl ThreadSlots {
    const fn new() -> Self {
        Self {
            taken: [const { atomic::AtomicU64::new(0) }; MAX_THREADS / WORD_BITS],
            last_process: atomic::AtomicU32::new(0),
        }
    }

    /// Takes and returns the lowest free slot, for a thread of the process with id `process`; `None` if all slots are
    /// in use.
    fn take(&self, process: u32) -> Option<u32> {
        // Stored before any bit is set, because `free_inherited` relies on this order.
        self.last_process.store(process, Relaxed);
        for (at, word) in self.taken.iter().enumerate() {
            // Acquire: the thread must see what the previous thread in this slot did with its magazines.
            let set_lowest = |bits: u64| (bits != u64::MAX).then(|| bits | (bits + 1));
            if let Ok(before) = word.fetch_update(AcqRel, Relaxed, set_lowest) {
                return Some(at as u32 * 64 + before.trailing_ones());
            }
        }
        None
    }

    /// Returns the slots in use, in ascending order. Reads only the first `words` words of the bitmap.
    #[cfg_attr(shuttle, allow(dead_code))] // shuttle tasks take no slots
    fn taken(&self, words: usize) -> impl Iterator<Item = usize> {
        // Acquire: the caller sees what threads did until they freed their slots.
        set_bits(self.taken[..words.min(self.taken.len())].iter().map(|word| word.load(Acquire)))
    }

    /// Frees a thread slot for use by another thread.
    fn free(&self, slot: u32) {
        let before = self.taken[slot as usize / 64].fetch_and(!(1 << (slot % 64)), Release);
        debug_assert!(before >> (slot % 64) & 1 == 1, "a slot is freed once");
    }

    /// Frees all thread slots except `own`, if no thread of `process` has taken a slot yet.
    fn free_inherited(&self, process: u32, own: u32) {
        for (at, word) in self.taken.iter().enumerate() {
            let seen = word.load(Acquire);
            if self.last_process.load(Relaxed) == process {
                return;
            }
            let kept = if own as usize / 64 == at { 1 << (own % 64) } else { 0 };
            word.fetch_and(!seen | kept, Relaxed);
        }
    }
}

/// In a fork child: frees all slots except that of this thread. Does nothing if a thread of this process has taken a
/// slot already: each instance of Pagemill in the process calls this function, and only the first call must free slots.
/// Also does nothing on a thread other than the first.
pub(crate) fn begin_child() {
    if process::is_first_thread() {
        SLOTS.free_inherited(process::id(), own_slot());
    }
}

/// The slot that a thread has taken. Dropping this value at the end of the thread frees the slot.
struct OwnSlot(u32);

impl Drop for OwnSlot {
    fn drop(&mut self) {
        // Destructors that run later on this thread must not use a magazine.
        set_own(NO_SLOT);
        // A guard that outlives its thread uses the participant word of this slot. The slot then stays in use for good.
        if !epochs::is_reading(self.0) {
            SLOTS.free(self.0);
        }
    }
}

thread_local! {
    /// The slot of this thread. The variable has no destructor, so reading it costs a single instruction.
    static OWN_SLOT: std::cell::Cell<u32> = const { std::cell::Cell::new(UNKNOWN_SLOT) };
    /// The slot of this thread as an offset into magazines. This variable has no destructor either.
    static OWN_OFFSET: std::cell::Cell<Offset> = const { std::cell::Cell::new(Offset::NONE) };
    /// The destructor of this variable frees the thread's slot when the thread ends.
    static FREES_SLOT_AT_END: std::cell::Cell<Option<OwnSlot>> = const { std::cell::Cell::new(None) };
}

/// Returns the slot of this thread; [`UNKNOWN_SLOT`] before [`ensure_slot`].
#[cfg(not(shuttle))]
#[inline(always)]
pub(crate) fn own_slot() -> u32 {
    OWN_SLOT.with(std::cell::Cell::get)
}

/// Returns the id of the current shuttle task as the slot, because under shuttle all tasks share one thread.
#[cfg(shuttle)]
pub(crate) fn own_slot() -> u32 {
    shuttle::current::try_get_current_task().map_or(OWN_SLOT.with(std::cell::Cell::get), |task| {
        let slot = usize::from(task) as u32 + 1;
        HIGH_WATER.fetch_max(slot + 1, AcqRel);
        slot
    })
}

/// Returns the slot of this thread as an offset into magazines.
#[cfg(not(shuttle))]
#[inline(always)]
pub(crate) fn own_offset() -> Offset {
    OWN_OFFSET.with(std::cell::Cell::get)
}

#[cfg(shuttle)]
pub(crate) fn own_offset() -> Offset {
    Offset::of(own_slot())
}

/// Returns the slot of this thread, and takes a slot if the thread has none. Returns [`NO_SLOT`] if all slots are in
/// use or the thread is ending.
#[cold]
pub(crate) fn ensure_slot() -> u32 {
    if own_slot() == UNKNOWN_SLOT {
        epochs::record_process();
        let taken = SLOTS.take(process::id());
        HIGH_WATER.fetch_max(taken.map_or(0, |slot| slot + 1), AcqRel);
        let is_kept = taken.is_some_and(|slot| FREES_SLOT_AT_END.try_with(|own| own.set(Some(OwnSlot(slot)))).is_ok());
        set_own(taken.filter(|_| is_kept).unwrap_or(NO_SLOT));
    }
    own_slot()
}

/// Records the slot of this thread, and the offset that follows from it.
fn set_own(slot: u32) {
    OWN_SLOT.with(|own| own.set(slot));
    OWN_OFFSET.with(|own| own.set(Offset::of(slot)));
}

/// A slot that a test has taken, as if a thread used it.
#[cfg(all(test, not(shuttle)))]
pub(crate) struct HeldSlot(u32);

#[cfg(all(test, not(shuttle)))]
impl Drop for HeldSlot {
    fn drop(&mut self) {
        SLOTS.free(self.0);
    }
}

/// Takes up to `most` free slots.
#[cfg(all(test, not(shuttle)))]
pub(crate) fn take_slots(most: usize) -> Vec<HeldSlot> {
    let taken = std::iter::from_fn(|| SLOTS.take(process::id()).map(HeldSlot));
    let taken: Vec<_> = taken.take(most).collect();
    HIGH_WATER.fetch_max(taken.iter().map(|held| held.0 + 1).max().unwrap_or(0), AcqRel);
    taken
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn set_bits_are_found_in_words() {
        assert_eq!(
            Vec::from_iter(set_bits([0, 1 << 63 | 0b101, 0, u64::MAX].into_iter()))[..5],
            [64, 66, 127, 192, 193]
        );
        assert_eq!(set_bits([u64::MAX; 2].into_iter()).count(), 128);
    }

    /// A fork child must free the slots of its parent's threads, except that of the forking thread, and must keep slots
    /// that its own threads have taken.
    #[test]
    fn fork_child_frees_slots_of_its_parent() {
        let slots = ThreadSlots::new();
        let take = |process, count| (0..count).map(|_| slots.take(process).unwrap()).collect::<Vec<_>>();
        let taken = || slots.taken(MAX_THREADS).map(|slot| slot as u32).collect::<Vec<_>>();
        assert_eq!(take(1, 70), Vec::from_iter(0..70));
        slots.free_inherited(1, 66);
        assert_eq!(take(1, 2), [70, 71]);
        slots.free_inherited(2, 66);
        assert_eq!(take(2, 80), Vec::from_iter((0..81).filter(|slot| *slot != 66)));
        slots.free_inherited(2, 66);
        slots.free(7);
        assert_eq!(take(2, 2), [7, 81]);
        slots.free_inherited(3, NO_SLOT);
        assert_eq!((taken(), take(3, 1)), (vec![], vec![0]));
        // All slots can be taken, and then no further one.
        let all = Vec::from_iter(0..MAX_THREADS as u32);
        assert_eq!((take(3, MAX_THREADS - 1), slots.take(3)), (all[1..].to_vec(), None));
        assert_eq!(taken(), all);
        slots.free_inherited(4, MAX_THREADS as u32 - 1);
        assert_eq!((taken(), take(4, 2)), (vec![MAX_THREADS as u32 - 1], vec![0, 1]));
    }

    /// A thread must not get the slot of another running thread. A slot must be reused after its thread has ended.
    #[test]
    fn slots_of_ended_threads_are_reused() {
        let slot = || std::thread::spawn(ensure_slot).join().unwrap();
        let own = ensure_slot();
        // Threads of concurrent tests, more of them on larger machines, take some of the slots.
        let mut seen = std::collections::BTreeSet::from([own]);
        let again = (0..10_000).map(|_| slot()).find(|slot| !seen.insert(*slot));
        assert!(again.is_some_and(|again| ![own, NO_SLOT].contains(&again)), "{again:?}");
    }
}
