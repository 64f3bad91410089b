//! Magazines: what one thread has of a cache's free objects, taken and given back without a lock or an atomic exchange.
//!
//! A magazine belongs to its cache; a thread is only a number ([`super::numbers`]). It holds up to two sheaves as one stack, so
//! that a thread at the edge of one does not go to the barn with every second object. When a thread ends nothing has to be
//! done: its number goes to the next, with what lies there, and who empties a cache empties magazines of all numbers ([`Claim`]).
#![allow(unsafe_code)] // magazines at addresses that are computed

use super::claim::{Barriers, Claim};
use super::numbers::{MAX_THREADS, NONE};
use super::shape::MAX_SHEAF;
use crate::arena::{Table, Zeroed};
use crate::error::Result;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Relaxed, Release};
use std::hint::assert_unchecked;
use std::ops::Deref;
use std::sync::atomic::{self, fence};

/// Where there are not addresses for all threads: no cache is made without those for so many.
const FEWEST_THREADS: usize = 1 << 10;

/// Objects of two sheaves.
const PLACES: usize = 2 * MAX_SHEAF;

/// # Invariants
///
/// `len`, `room`, `node` and `objects` are changed by who is inside of `claim` alone: the thread of this number, or who seized it.
/// At any moment the first `len` objects are free, and none is there twice: `fork` may copy a magazine while a thread is inside, and in the
/// child its number is another's ([`super::numbers::begin_child`]).
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

/// A magazine and the thread inside of it, which leaves it with this. What is kept beside the magazine is the thread's as long, too.
///
/// # Invariants
///
/// The thread, whose magazine it is, has entered its claim.
pub(super) struct Inside<'magazine>(&'magazine Magazine);

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.claim.leave();
    }
}

impl Deref for Inside<'_> {
    type Target = Magazine;

    #[inline(always)]
    fn deref(&self) -> &Magazine {
        self.0
    }
}

impl Inside<'_> {
    /// Takes the object that was given last.
    #[inline(always)]
    pub fn pop(self) -> Option<usize> {
        self.last().map(|last| self.take_last(last))
    }

    /// As [`Inside::pop`], together with what `beside`, which must not panic, takes of what is kept beside.
    #[inline(always)]
    pub fn pop_with<R>(self, beside: impl FnOnce() -> Option<R>) -> Option<(usize, R)> {
        let last = self.last()?;
        beside().map(|result| (self.take_last(last), result))
    }

    /// Where the object is that was given last.
    #[inline(always)]
    fn last(&self) -> Option<u32> {
        self.len.load(Relaxed).checked_sub(1)
    }

    #[inline(always)]
    fn take_last(&self, last: u32) -> usize {
        self.len.store(last, Relaxed);
        self.place(last).load(Relaxed) as usize
    }

    /// Takes an object in, if there is room.
    #[inline(always)]
    pub fn push(self, object: usize) -> bool {
        let len = self.len.load(Relaxed);
        let has_room = len < self.room.load(Relaxed);
        if has_room {
            self.place(len).store(object as u64, Relaxed);
            self.len.store(len + 1, Release);
        }
        has_room
    }

    /// Lets `act`, which must not panic, have what is kept beside; not before the magazine is open.
    #[inline(always)]
    pub fn act<R>(self, act: impl FnOnce() -> R) -> Option<R> {
        (self.room.load(Relaxed) > 0).then(act)
    }

    /// Takes in as many of these as there is room for, of a node; says how many.
    pub fn fill(self, objects: impl ExactSizeIterator<Item = usize>, node: usize) -> usize {
        let len = self.len.load(Relaxed);
        let is_of_node = len == 0 || self.node() == node;
        let count = if is_of_node { objects.len().min((self.room.load(Relaxed) - len) as usize) } else { 0 };
        (len..).zip(objects.take(count)).for_each(|(at, object)| self.place(at).store(object as u64, Relaxed));
        self.len.store(len + count as u32, Release);
        if count > 0 {
            self.node.store(node as u32, Relaxed);
        }
        count
    }

    /// Takes a sheaf out, of those that were given longest ago; says how many.
    pub fn drain(self, sheaf: &mut [usize]) -> usize {
        self.take_oldest(sheaf)
    }

    /// Lets it hold so many objects.
    pub fn open(self, room: usize) {
        debug_assert!(room <= PLACES);
        self.room.store(room as u32, Relaxed);
    }
}

impl Magazine {
    #[inline(always)]
    fn place(&self, at: u32) -> &AtomicU64 {
        debug_assert!((at as usize) < PLACES);
        // SAFETY: `len` never passes `room`, nor that the places (type invariant: two sheaves at most).
        unsafe { self.objects.get_unchecked(at as usize) }
    }

    fn take_oldest(&self, objects: &mut [usize]) -> usize {
        let len = self.len.load(Relaxed);
        let count = objects.len().min(len as usize) as u32;
        (0..count).zip(objects).for_each(|(at, object)| *object = self.place(at).load(Relaxed) as usize);
        self.len.store(0, Relaxed);
        fence(Release);
        for at in count..len {
            self.place(at - count).store(self.place(at).load(Relaxed), Relaxed);
        }
        self.len.store(len - count, Release);
        count as usize
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

/// A table with an entry for each thread that there are addresses for; says how many these are.
pub(super) fn table_by_thread<T: Zeroed>() -> Result<(Table<T>, usize)> {
    let mut threads = MAX_THREADS;
    loop {
        match Table::new(threads) {
            Ok(table) => return Ok((table, threads)),
            Err(error) if threads == FEWEST_THREADS => return Err(error),
            Err(_) => threads /= 2,
        }
    }
}

/// Addresses for the magazines of a cache, and of the next one of its number. What the last has opened stays so.
pub(super) struct Rack {
    table: Table<Magazine>,
    threads: usize,
    /// How many threads' are open.
    opened: atomic::AtomicU32,
}

impl Rack {
    /// # Errors
    ///
    /// [`crate::Error::System`] without addresses.
    pub fn new() -> Result<Self> {
        let (table, threads) = table_by_thread()?;
        Ok(Self { table, threads, opened: atomic::AtomicU32::new(0) })
    }

    pub fn resident_bytes(&self) -> u64 {
        match self.opened.load(Relaxed) {
            0 => 0,
            opened => self.table.resident_bytes(0, opened as usize),
        }
    }
}

/// Where the magazine of a thread lies, in bytes from that of number 0 of the same cache: at hand, so that the usual way need not multiply.
///
/// # Invariants
///
/// A multiple of a magazine's size, or [`Offset::NOWHERE`].
#[derive(Clone, Copy)]
pub(super) struct Offset(usize);

impl Offset {
    /// From whatever place on it is beyond all addresses, and below the end of numbers.
    pub const NOWHERE: Self = Self(1 << (usize::BITS - 2));

    pub fn of(number: u32) -> Self {
        if number < NONE { Self(number as usize * size_of::<Magazine>()) } else { Self::NOWHERE }
    }
}

/// The magazines of one cache, by number of the thread.
///
/// # Invariants
///
/// `base` is where the table of the rack begins, which is open from there to `plain` or `fenced`, whole magazines, and stays so.
pub(super) struct Shelf {
    base: *const Magazine,
    /// Where those end that their threads may enter without a barrier of their own.
    plain: AtomicUsize,
    /// Where those do that they enter with one. Either this or the other is 0.
    fenced: AtomicUsize,
    rack: &'static Rack,
    barriers: Barriers,
}

// SAFETY: the pointer is to entries of a table, which are `Sync`.
unsafe impl Send for Shelf {}
// SAFETY: as above.
unsafe impl Sync for Shelf {}

impl Shelf {
    /// Of the one cache that has the rack; nobody can enter before [`Shelf::reach`].
    pub fn new(rack: &'static Rack, barriers: Barriers) -> Self {
        Self { base: rack.table.start(), plain: AtomicUsize::new(0), fenced: AtomicUsize::new(0), rack, barriers }
    }

    pub fn barriers(&self) -> Barriers {
        self.barriers
    }

    /// Lets the thread into its magazine, if it has one and nobody has seized it.
    #[inline(always)]
    pub fn enter(&self, own: Offset) -> Option<Inside<'_>> {
        let magazine = self.at(own);
        // Nothing is acquired: what is open stays so, and what is there is the thread's own.
        if magazine.addr() < self.plain.load(Relaxed) {
            // SAFETY: one of those that are open (type invariant), of which none is at address 0: what the compiler would look at again.
            let magazine = unsafe {
                assert_unchecked(!magazine.is_null());
                &*magazine
            };
            magazine.claim.enter().then(|| Inside(magazine))
        } else {
            self.enter_fenced(magazine)
        }
    }

    /// Out of the way of who enters without.
    #[cold]
    #[inline(never)]
    fn enter_fenced(&self, magazine: *const Magazine) -> Option<Inside<'_>> {
        if magazine.addr() >= self.fenced.load(Relaxed) {
            return None;
        }
        // SAFETY: as in `enter`.
        let magazine = unsafe { &*magazine };
        magazine.claim.enter_fenced().then(|| Inside(magazine))
    }

    #[inline(always)]
    fn at(&self, offset: Offset) -> *const Magazine {
        self.base.wrapping_byte_add(offset.0)
    }

    /// That of a thread for which it was [reached](Shelf::reach).
    pub fn get(&self, number: usize) -> &Magazine {
        let magazine = self.at(Offset::of(number as u32));
        assert!(magazine.addr() < self.plain.load(Relaxed).max(self.fenced.load(Relaxed)));
        // SAFETY: as in `enter`.
        unsafe { &*magazine }
    }

    /// Opens the table for the magazine of a thread; says whether it has one. By one caller at a time.
    pub fn reach(&self, number: usize) -> bool {
        let Rack { table, threads, opened } = self.rack;
        let (before, end) = (opened.load(Relaxed) as usize, number + 1);
        if end > *threads || table.open(0, before, end).is_err() {
            return false;
        }
        opened.store(end.max(before) as u32, Relaxed);
        let may_enter = match self.barriers {
            Barriers::OfSeizer => &self.plain,
            Barriers::OfEach => &self.fenced,
        };
        let end = self.at(Offset::of(end as u32)).addr();
        may_enter.store(end.max(may_enter.load(Relaxed)), Release);
        true
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::arena::place;
    use crate::slab::numbers::UNKNOWN;
    use crate::units::os_page_bytes;

    /// A thread's own, of a cache in a process with such barriers.
    struct Own(Shelf);

    impl Own {
        const NUMBER: u32 = 3;

        fn new(barriers: Barriers) -> Self {
            let shelf = Shelf::new(place(Rack::new().unwrap()).unwrap(), barriers);
            assert!(shelf.enter(Offset::of(Self::NUMBER)).is_none() && shelf.reach(Self::NUMBER as usize));
            Self(shelf)
        }

        fn enter(&self) -> Option<Inside<'_>> {
            self.0.enter(Offset::of(Self::NUMBER))
        }

        fn open(&self, room: usize) -> &Magazine {
            self.enter().unwrap().open(room);
            self.0.get(Self::NUMBER as usize)
        }

        fn push(&self, object: usize) -> bool {
            self.enter().is_some_and(|inside| inside.push(object))
        }

        fn pop(&self) -> Option<usize> {
            self.enter()?.pop()
        }

        fn fill(&self, objects: &[usize], node: usize) -> usize {
            self.enter().map_or(0, |inside| inside.fill(objects.iter().copied(), node))
        }

        fn drain(&self, sheaf: &mut [usize]) -> usize {
            self.enter().unwrap().drain(sheaf)
        }
    }

    const BOTH: [Barriers; 2] = [Barriers::OfSeizer, Barriers::OfEach];

    /// The object given last comes first; a sheaf goes from the other end; beyond its room nothing goes in.
    #[test]
    fn a_magazine_is_a_stack() {
        for own in BOTH.map(Own::new) {
            assert!(!own.push(1), "it is not open");
            let magazine = own.open(4);
            assert!((1..=4).all(|object| own.push(object)) && !own.push(5));
            let mut sheaf = [0; 2];
            assert_eq!((own.drain(&mut sheaf), sheaf), (2, [1, 2]));
            assert_eq!((own.pop(), own.pop(), own.pop()), (Some(4), Some(3), None));
            assert_eq!((own.fill(&[7, 8, 9, 10, 11], 3), magazine.node(), magazine.len()), (4, 3, 4));
            assert_eq!(own.drain(&mut sheaf), 2);
            assert_eq!(own.fill(&[12], 2), 0, "objects of two nodes are not mixed");
        }
    }

    /// While it is seized its thread finds it neither full nor empty, and all is there afterwards.
    #[test]
    fn a_seized_magazine_is_left_alone() {
        for own in BOTH.map(Own::new) {
            let magazine = own.open(4);
            assert!(own.push(1) && own.push(2));
            magazine.seize();
            assert!(magazine.is_left());
            assert!(own.pop().is_none() && !own.push(3) && own.fill(&[3], 0) == 0);
            let mut objects = [0; 1];
            assert_eq!((magazine.take_seized(&mut objects), objects), (1, [1]));
            magazine.release();
            assert_eq!(own.pop(), Some(2));
        }
    }

    /// While its thread is inside, whatever it does there, a seizer sees that.
    #[test]
    fn who_is_inside_is_seen() {
        for own in BOTH.map(Own::new) {
            let magazine = own.open(4);
            let is_seen = |inside: Inside<'_>| {
                let is_left = magazine.is_left();
                drop(inside);
                !is_left && magazine.is_left()
            };
            assert!(own.enter().is_some_and(is_seen));
            assert_eq!(own.enter().unwrap().act(|| magazine.is_left()), Some(false));
            assert!(own.push(7) && magazine.is_left());
            assert_eq!(own.enter().unwrap().pop_with(|| Some(magazine.is_left())), Some((7, false)));
            assert!(magazine.is_left());
        }
    }

    /// Room comes with the threads that ask for it, for those below them, too, and for none beyond the last.
    #[test]
    fn a_shelf_has_room_for_who_came() {
        for barriers in BOTH {
            let racks = [(); 2].map(|()| place(Rack::new().unwrap()).unwrap());
            let shelves = racks.map(|rack| Shelf::new(rack, barriers));
            let resident_bytes = || racks.map(Rack::resident_bytes);
            let is_in = |shelf: &Shelf, number: usize| shelf.enter(Offset::of(number as u32)).is_some();
            for shelf in &shelves {
                assert!([0, 1, MAX_THREADS - 1].into_iter().all(|number| !is_in(shelf, number)));
            }
            assert_eq!(resident_bytes(), [0, 0]);
            for (number, below) in [(2_000, 7), (7, 2_000), (MAX_THREADS - 1, 20_000)] {
                assert!(shelves[0].reach(number) && is_in(&shelves[0], number) && is_in(&shelves[0], below));
                assert!(!is_in(&shelves[1], number));
            }
            assert!(!is_in(&shelves[0], MAX_THREADS) && !shelves[0].reach(MAX_THREADS));
            assert!([UNKNOWN, NONE].into_iter().all(|number| !is_in(&shelves[0], number as usize)));
            // The pages that four were in, and another's nothing.
            let page = os_page_bytes() as u64;
            assert_eq!(resident_bytes(), [4 * page, 0]);
            assert!(shelves[1].reach(MAX_THREADS - 1) && is_in(&shelves[1], MAX_THREADS - 1));
            assert_eq!(resident_bytes(), [4 * page, page]);
            // The next cache that has a rack has its own say; the room is there.
            let next = Shelf::new(racks[0], barriers);
            assert!(!is_in(&next, 7) && next.reach(7) && is_in(&next, 7) && !is_in(&next, 8));
        }
    }
}
