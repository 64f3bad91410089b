//! Magazines: what one thread has of a cache's free objects, taken and given back without a lock or an atomic exchange.
//!
//! A magazine belongs to its cache; a thread is only a number ([`own_number`]). It holds up to two sheaves as one stack, so
//! that a thread at the edge of one does not go to the barn with every second object. When a thread ends nothing has to be
//! done: its number goes to the next, with what lies there, and who empties a cache empties magazines of all numbers ([`Claim`]).
#![allow(unsafe_code)] // magazines at addresses that are computed

use super::claim::Claim;
use super::shape::MAX_SHEAF;
use crate::arena::{Table, Zeroed};
use crate::error::Result;
use crate::sync::{Acquire, Relaxed, Release};
use pagemill_sys::barrier;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::AcqRel};

/// Threads that have magazines at a time; others go to the slabs.
pub(super) const MAX_THREADS: usize = 1024;

/// Objects of two sheaves.
const PLACES: usize = 2 * MAX_SHEAF;

/// # Invariants
///
/// `len`, `room`, `node` and `objects` are changed by who is inside of `claim` alone: the thread of this number, or who seized it.
#[repr(C, align(1024))]
pub(super) struct Magazine {
    claim: Claim,
    len: AtomicU32,
    /// Objects that it may hold: 0 until its thread has opened it.
    room: AtomicU32,
    /// The node that its objects are of.
    node: AtomicU32,
    objects: [AtomicU64; PLACES],
}

// SAFETY: atomic words.
unsafe impl Zeroed for Magazine {}

impl Magazine {
    /// Takes the object that was given last.
    #[inline(always)]
    pub fn pop(&self) -> Option<usize> {
        if !self.claim.enter() {
            return None;
        }
        let len = self.len.load(Relaxed);
        let object = (len > 0).then(|| {
            self.len.store(len - 1, Relaxed);
            self.place(len - 1).load(Relaxed) as usize
        });
        self.claim.leave();
        object
    }

    /// Takes an object in, if there is room.
    #[inline(always)]
    pub fn push(&self, object: usize) -> bool {
        if !self.claim.enter() {
            return false;
        }
        let len = self.len.load(Relaxed);
        let has_room = len < self.room.load(Relaxed);
        if has_room {
            self.place(len).store(object as u64, Relaxed);
            self.len.store(len + 1, Relaxed);
        }
        self.claim.leave();
        has_room
    }

    #[inline(always)]
    fn place(&self, at: u32) -> &AtomicU64 {
        debug_assert!((at as usize) < PLACES);
        // SAFETY: `len` never passes `room`, nor that the places (type invariant: two sheaves at most).
        unsafe { self.objects.get_unchecked(at as usize) }
    }

    /// By its thread: takes in as many of these as there is room for, of a node; says how many.
    pub fn fill(&self, objects: &[usize], node: usize) -> usize {
        if !self.claim.enter() {
            return 0;
        }
        let len = self.len.load(Relaxed);
        let is_of_node = len == 0 || self.node() == node;
        let count = if is_of_node { objects.len().min((self.room.load(Relaxed) - len) as usize) } else { 0 };
        (len..).zip(&objects[..count]).for_each(|(at, object)| self.place(at).store(*object as u64, Relaxed));
        self.len.store(len + count as u32, Relaxed);
        if count > 0 {
            self.node.store(node as u32, Relaxed);
        }
        self.claim.leave();
        count
    }

    /// By its thread: takes a sheaf out, of those that were given longest ago; says how many.
    pub fn drain(&self, sheaf: &mut [usize]) -> usize {
        if !self.claim.enter() {
            return 0;
        }
        let count = self.take_oldest(sheaf);
        self.claim.leave();
        count
    }

    fn take_oldest(&self, objects: &mut [usize]) -> usize {
        let len = self.len.load(Relaxed);
        let count = objects.len().min(len as usize) as u32;
        (0..count).zip(objects).for_each(|(at, object)| *object = self.place(at).load(Relaxed) as usize);
        for at in count..len {
            self.place(at - count).store(self.place(at).load(Relaxed), Relaxed);
        }
        self.len.store(len - count, Relaxed);
        count as usize
    }

    /// By its thread: lets it hold so many objects.
    pub fn open(&self, room: usize) {
        debug_assert!(room <= PLACES);
        if self.claim.enter() {
            self.room.store(room as u32, Relaxed);
            self.claim.leave();
        }
    }

    /// What it holds now, more or less.
    pub fn len(&self) -> usize {
        self.len.load(Relaxed) as usize
    }

    #[inline]
    pub fn node(&self) -> usize {
        self.node.load(Relaxed) as usize
    }

    /// By a seizer who has it: takes objects out; says how many.
    pub fn take_seized(&self, objects: &mut [usize]) -> usize {
        self.take_oldest(objects)
    }

    /// By a seizer who has it: it is as it was before its thread opened it.
    pub fn close_seized(&self) {
        debug_assert_eq!(self.len(), 0);
        self.room.store(0, Relaxed);
    }

    pub fn seize(&self) {
        self.claim.seize();
    }

    pub fn is_left(&self) -> bool {
        self.claim.is_left()
    }

    pub fn release(&self) {
        self.claim.release();
    }
}

/// The magazines of all caches.
pub(super) struct Magazines {
    table: Table<Magazine>,
    /// Without the barrier nobody could empty magazines of others: there are none then.
    are_usable: bool,
}

impl Magazines {
    /// # Errors
    ///
    /// [`crate::Error::System`] without addresses.
    pub fn new(caches: usize) -> Result<Self> {
        Ok(Self { table: Table::new_open(caches * MAX_THREADS)?, are_usable: barrier::register() })
    }

    pub fn resident_bytes(&self, caches: usize) -> u64 {
        self.table.resident_bytes(0, caches * MAX_THREADS)
    }

    /// Those of one cache, by number of the thread; none where they cannot be had.
    pub fn of_cache(&'static self, cache: usize) -> &'static [Magazine] {
        let first = self.table.get(cache * MAX_THREADS);
        let len = if self.are_usable { MAX_THREADS } else { 0 };
        // SAFETY: the table is open as a whole and never closed; so many entries of a cache lie one after the other.
        unsafe { std::slice::from_raw_parts(first, len) }
    }
}

/// What is no number: not asked for yet, or there is none.
pub(super) const UNKNOWN: u32 = u32::MAX;
pub(super) const NONE: u32 = u32::MAX - 1;

/// Numbers that threads have, a bit each.
static TAKEN: [AtomicU64; MAX_THREADS / 64] = [const { AtomicU64::new(0) }; MAX_THREADS / 64];

/// One more than the highest number that any thread has had.
static HIGH_WATER: AtomicU32 = AtomicU32::new(0);

/// Numbers from here on were never anybody's.
pub(super) fn high_water() -> usize {
    HIGH_WATER.load(Acquire) as usize
}

fn take_number() -> Option<u32> {
    for (at, word) in TAKEN.iter().enumerate() {
        let mut bits = word.load(Relaxed);
        while bits != u64::MAX {
            let bit = bits.trailing_ones();
            // Acquires what the number's last thread did with its magazines.
            match word.compare_exchange(bits, bits | 1 << bit, AcqRel, Relaxed) {
                Ok(_) => {
                    let number = at as u32 * 64 + bit;
                    HIGH_WATER.fetch_max(number + 1, AcqRel);
                    return Some(number);
                }
                Err(now) => bits = now,
            }
        }
    }
    None
}

/// Gives a thread's number to the next when it ends.
struct Number(u32);

impl Drop for Number {
    fn drop(&mut self) {
        // Destructors that come later do without a magazine.
        let _ = OWN.try_with(|own| own.set(NONE));
        TAKEN[self.0 as usize / 64].fetch_and(!(1 << (self.0 % 64)), Release);
    }
}

thread_local! {
    /// A plain word: reading it costs one instruction.
    static OWN: std::cell::Cell<u32> = const { std::cell::Cell::new(UNKNOWN) };
    static NUMBER: std::cell::Cell<Option<Number>> = const { std::cell::Cell::new(None) };
}

/// This thread's number; [`UNKNOWN`] before [`find_number`].
#[cfg(not(shuttle))]
#[inline(always)]
pub(super) fn own_number() -> u32 {
    OWN.with(std::cell::Cell::get)
}

/// Under shuttle all threads are one: they are told apart by their task.
#[cfg(shuttle)]
pub(super) fn own_number() -> u32 {
    shuttle::current::try_get_current_task().map_or(OWN.with(std::cell::Cell::get), |task| {
        let number = usize::from(task) as u32 + 1;
        HIGH_WATER.fetch_max(number + 1, AcqRel);
        number
    })
}

/// Takes a number for this thread, where it has none; [`NONE`] where there is none left, or the thread is ending.
#[cold]
pub(super) fn find_number() -> u32 {
    if own_number() == UNKNOWN {
        let taken = take_number();
        let is_kept = taken.is_some_and(|number| NUMBER.try_with(|own| own.set(Some(Number(number)))).is_ok());
        OWN.with(|own| own.set(taken.filter(|_| is_kept).unwrap_or(NONE)));
    }
    own_number()
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::arena::place;

    fn magazine() -> &'static Magazine {
        let magazines = place(Magazines::new(1).unwrap()).unwrap();
        &magazines.of_cache(0)[0]
    }

    /// The object given last comes first; a sheaf goes from the other end; beyond its room nothing goes in.
    #[test]
    fn a_magazine_is_a_stack() {
        let magazine = magazine();
        assert!(!magazine.push(1), "it is not open");
        magazine.open(4);
        assert!((1..=4).all(|object| magazine.push(object)) && !magazine.push(5));
        let mut sheaf = [0; 2];
        assert_eq!((magazine.drain(&mut sheaf), sheaf), (2, [1, 2]));
        assert_eq!((magazine.pop(), magazine.pop(), magazine.pop()), (Some(4), Some(3), None));
        assert_eq!((magazine.fill(&[7, 8, 9, 10, 11], 3), magazine.node(), magazine.len()), (4, 3, 4));
        assert_eq!(magazine.drain(&mut sheaf), 2);
        assert_eq!(magazine.fill(&[12], 2), 0, "objects of two nodes are not mixed");
    }

    /// While it is seized its thread finds it neither full nor empty, and all is there afterwards.
    #[test]
    fn a_seized_magazine_is_left_alone() {
        let magazine = magazine();
        magazine.open(4);
        assert!(magazine.push(1) && magazine.push(2));
        magazine.seize();
        assert!(magazine.is_left());
        assert!(magazine.pop().is_none() && !magazine.push(3) && magazine.fill(&[3], 0) == 0);
        let mut objects = [0; 1];
        assert_eq!((magazine.take_seized(&mut objects), objects), (1, [1]));
        magazine.release();
        assert_eq!(magazine.pop(), Some(2));
    }

    /// Threads that are there at a time have different numbers; those of ended ones are used again.
    #[test]
    fn numbers_go_to_the_next_thread() {
        let number = || std::thread::spawn(find_number).join().unwrap();
        let own = find_number();
        let numbers: Vec<u32> = (0..100).map(|_| number()).collect();
        assert!(numbers.iter().all(|number| *number != own));
        // Others run tests beside this one.
        assert!((high_water()) < 90, "{numbers:?}");
    }
}
