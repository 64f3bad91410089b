//! Magazines: per-thread stacks of a cache's free objects, used without locks or atomic exchanges.
//!
//! A magazine belongs to its cache and is indexed by the thread slot ([`super::thread_slots`]). It holds up to two
//! sheaves as one stack. So a thread at the boundary of a sheaf does not access the barn for every second object.
//! Nothing has to be done when a thread ends: the next thread in its slot takes the contents over, and a drain empties
//! the magazines of all slots ([`AsymmetricLock`]).
//!
//! Names: a [`MagazineRange`] is the address range of the magazines under one cache id; a [`Magazines`] is the view of
//! one cache in its range.
#![allow(unsafe_code)] // magazines at computed addresses

use super::asymmetric_lock::{AsymmetricLock, Barriers};
use super::shape::MAX_SHEAF;
use super::thread_slots::{MAX_THREADS, NONE};
use pagemill_core::arena::{Table, Zeroed};
use pagemill_core::error::Result;
use pagemill_core::sync::{AtomicU32, AtomicU64, AtomicUsize, Relaxed, Release};
use std::hint::assert_unchecked;
use std::ops::Deref;
use std::sync::atomic::{self, fence};

/// The table is halved down to this many threads if addresses are short; below that no cache is created.
const FEWEST_THREADS: usize = 1 << 10;

/// Capacity: the objects of two sheaves.
const PLACES: usize = 2 * MAX_SHEAF;

/// # Invariants
///
/// Only the side that is inside of `lock` changes `len`, `room`, `node` and `objects`: the thread in this slot, or a
/// draining thread. At any moment the first `len` objects are free and distinct. This also holds in the middle of an
/// operation: `fork` may copy a magazine while a thread is inside, and in the child the slot belongs to another thread
/// ([`super::thread_slots::begin_child`]).
#[repr(C, align(1024))]
pub(super) struct Magazine {
    lock: AsymmetricLock,
    len: AtomicU32,
    /// Capacity now: 0 until its thread has opened it.
    room: AtomicU32,
    /// The node of its objects.
    node: AtomicU32,
    objects: [AtomicU64; PLACES],
}

// SAFETY: atomic words.
unsafe impl Zeroed for Magazine {}

/// A magazine with its thread inside; dropping this leaves it. It also covers what the thread slot keeps beside the
/// magazine.
///
/// # Invariants
///
/// The magazine's thread has entered its claim.
pub(super) struct MagazineGuard<'magazine>(&'magazine Magazine);

impl Drop for MagazineGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.lock.leave();
    }
}

impl Deref for MagazineGuard<'_> {
    type Target = Magazine;

    #[inline(always)]
    fn deref(&self) -> &Magazine {
        self.0
    }
}

impl MagazineGuard<'_> {
    /// Takes the object that was added last.
    #[inline(always)]
    pub fn pop(self) -> Option<usize> {
        self.last().map(|last| self.take_last(last))
    }

    /// As [`MagazineGuard::pop`], together with the result of `beside`, which takes something kept beside the magazine
    /// and must not panic.
    #[inline(always)]
    pub fn pop_with<R>(self, beside: impl FnOnce() -> Option<R>) -> Option<(usize, R)> {
        let last = self.last()?;
        beside().map(|result| (self.take_last(last), result))
    }

    /// The position of the object that was added last.
    #[inline(always)]
    fn last(&self) -> Option<u32> {
        self.len.load(Relaxed).checked_sub(1)
    }

    #[inline(always)]
    fn take_last(&self, last: u32) -> usize {
        self.len.store(last, Relaxed);
        self.place(last).load(Relaxed) as usize
    }

    /// Adds an object, if there is room.
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

    /// Calls `act`, which must not panic and may use what is kept beside the magazine. `None` if the magazine is not
    /// open.
    #[inline(always)]
    pub fn act<R>(self, act: impl FnOnce() -> R) -> Option<R> {
        (self.room.load(Relaxed) > 0).then(act)
    }

    /// Adds as many of these objects of a node as there is room for; returns how many.
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

    /// Removes the oldest objects, up to a sheaf; returns how many.
    pub fn drain(self, sheaf: &mut [usize]) -> usize {
        self.take_oldest(sheaf)
    }

    /// Opens the magazine with this capacity.
    pub fn open(self, room: usize) {
        debug_assert!(room <= PLACES);
        self.room.store(room as u32, Relaxed);
    }
}

impl Magazine {
    #[inline(always)]
    fn place(&self, at: u32) -> &AtomicU64 {
        debug_assert!((at as usize) < PLACES);
        // SAFETY: `at` is below `len` or `room`, which never exceed the capacity (type invariant).
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

    /// Objects that it holds, approximately.
    pub fn len(&self) -> usize {
        self.len.load(Relaxed) as usize
    }

    #[inline]
    pub fn node(&self) -> usize {
        self.node.load(Relaxed) as usize
    }

    /// For the draining thread: takes objects out; returns how many.
    pub fn take_drained(&self, objects: &mut [usize]) -> usize {
        self.take_oldest(objects)
    }

    /// For the draining thread: resets it to its state before its thread opened it.
    pub fn close_drained(&self) {
        debug_assert_eq!(self.len(), 0);
        self.room.store(0, Relaxed);
    }

    pub fn begin_drain(&self) {
        self.lock.begin_drain();
    }

    pub fn is_outside(&self) -> bool {
        self.lock.is_outside()
    }

    pub fn release(&self) {
        self.lock.release();
    }
}

/// Creates a table with an entry for each thread slot, as many as addresses are available for; returns their number, too.
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

/// The addresses of the magazines of one cache id. Caches that use the id one after the other share them; opened memory
/// stays open.
pub(super) struct MagazineRange {
    table: Table<Magazine>,
    threads: usize,
    /// Number of thread slots that are open.
    opened: atomic::AtomicU32,
}

impl MagazineRange {
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] without addresses.
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

/// Byte offset of a thread's magazine from that of slot 0 of the same cache: precomputed, so that the fast path needs no
/// multiplication.
///
/// # Invariants
///
/// A multiple of a magazine's size, or [`Offset::NOWHERE`].
#[derive(Clone, Copy)]
pub(super) struct Offset(usize);

impl Offset {
    /// Added to any base, it lies beyond all addresses but does not overflow.
    pub const NOWHERE: Self = Self(1 << (usize::BITS - 2));

    pub fn of(number: u32) -> Self {
        if number < NONE { Self(number as usize * size_of::<Magazine>()) } else { Self::NOWHERE }
    }
}

/// The magazines of one cache, by thread slot.
///
/// # Invariants
///
/// `base` is the start of the range's table. The table is open from there to `plain` or `fenced`, at a magazine
/// boundary, and stays open.
pub(super) struct Magazines {
    base: *const Magazine,
    /// End of the magazines that their threads enter without a barrier ([`Barriers::OfDrainer`]).
    plain: AtomicUsize,
    /// End of the magazines that they enter with a barrier. One of the two is 0.
    fenced: AtomicUsize,
    range: &'static MagazineRange,
    barriers: Barriers,
}

// SAFETY: the pointer is to entries of a table, which are `Sync`.
unsafe impl Send for Magazines {}
// SAFETY: as above.
unsafe impl Sync for Magazines {}

impl Magazines {
    /// For the one cache that uses the range. No thread can enter before [`Magazines::reach`].
    pub fn new(range: &'static MagazineRange, barriers: Barriers) -> Self {
        Self { base: range.table.start(), plain: AtomicUsize::new(0), fenced: AtomicUsize::new(0), range, barriers }
    }

    pub fn barriers(&self) -> Barriers {
        self.barriers
    }

    /// Enters the magazine of this thread, if it has one that is not being drained.
    #[inline(always)]
    pub fn enter(&self, own: Offset) -> Option<MagazineGuard<'_>> {
        let magazine = self.at(own);
        // Needs no acquire: open memory stays open, and the contents belong to this thread.
        if magazine.addr() < self.plain.load(Relaxed) {
            // SAFETY: an open magazine (type invariant), never at address 0; the assertion removes a check from the fast
            // path.
            let magazine = unsafe {
                assert_unchecked(!magazine.is_null());
                &*magazine
            };
            magazine.lock.enter().then(|| MagazineGuard(magazine))
        } else {
            self.enter_fenced(magazine)
        }
    }

    /// Out of line, off the path without barrier.
    #[cold]
    #[inline(never)]
    fn enter_fenced(&self, magazine: *const Magazine) -> Option<MagazineGuard<'_>> {
        if magazine.addr() >= self.fenced.load(Relaxed) {
            return None;
        }
        // SAFETY: as in `enter`.
        let magazine = unsafe { &*magazine };
        magazine.lock.enter_fenced().then(|| MagazineGuard(magazine))
    }

    #[inline(always)]
    fn at(&self, offset: Offset) -> *const Magazine {
        self.base.wrapping_byte_add(offset.0)
    }

    /// The magazine of a slot that was [reached](Magazines::reach).
    pub fn get(&self, number: usize) -> &Magazine {
        let magazine = self.at(Offset::of(number as u32));
        assert!(magazine.addr() < self.plain.load(Relaxed).max(self.fenced.load(Relaxed)));
        // SAFETY: as in `enter`.
        unsafe { &*magazine }
    }

    /// Opens the magazine of a thread slot; returns whether it has one. One caller at a time.
    pub fn reach(&self, number: usize) -> bool {
        let MagazineRange { table, threads, opened } = self.range;
        let (before, end) = (opened.load(Relaxed) as usize, number + 1);
        if end > *threads || table.open(0, before, end).is_err() {
            return false;
        }
        opened.store(end.max(before) as u32, Relaxed);
        let may_enter = match self.barriers {
            Barriers::OfDrainer => &self.plain,
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
    use crate::slab::thread_slots::UNKNOWN;
    use pagemill_core::arena::place;
    use pagemill_core::units::os_page_bytes;

    /// A thread's magazine, for a cache with either kind of barriers.
    struct Own(Magazines);

    impl Own {
        const NUMBER: u32 = 3;

        fn new(barriers: Barriers) -> Self {
            let magazines = Magazines::new(place(MagazineRange::new().unwrap()).unwrap(), barriers);
            assert!(magazines.enter(Offset::of(Self::NUMBER)).is_none() && magazines.reach(Self::NUMBER as usize));
            Self(magazines)
        }

        fn enter(&self) -> Option<MagazineGuard<'_>> {
            self.0.enter(Offset::of(Self::NUMBER))
        }

        fn open(&self, room: usize) -> &Magazine {
            self.enter().unwrap().open(room);
            self.0.get(Self::NUMBER as usize)
        }

        fn push(&self, object: usize) -> bool {
            self.enter().is_some_and(|entered| entered.push(object))
        }

        fn pop(&self) -> Option<usize> {
            self.enter()?.pop()
        }

        fn fill(&self, objects: &[usize], node: usize) -> usize {
            self.enter().map_or(0, |entered| entered.fill(objects.iter().copied(), node))
        }

        fn drain(&self, sheaf: &mut [usize]) -> usize {
            self.enter().unwrap().drain(sheaf)
        }
    }

    const BOTH: [Barriers; 2] = [Barriers::OfDrainer, Barriers::OfEach];

    /// The object added last comes first; a sheaf is taken from the other end; nothing is added beyond the capacity.
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

    /// While it is drained, the magazine cannot be used by its thread; afterwards its contents are unchanged.
    #[test]
    fn a_drained_magazine_is_unused() {
        for own in BOTH.map(Own::new) {
            let magazine = own.open(4);
            assert!(own.push(1) && own.push(2));
            magazine.begin_drain();
            assert!(magazine.is_outside());
            assert!(own.pop().is_none() && !own.push(3) && own.fill(&[3], 0) == 0);
            let mut objects = [0; 1];
            assert_eq!((magazine.take_drained(&mut objects), objects), (1, [1]));
            magazine.release();
            assert_eq!(own.pop(), Some(2));
        }
    }

    /// While its thread is inside, for any operation, a draining thread sees that.
    #[test]
    fn an_entered_magazine_is_seen() {
        for own in BOTH.map(Own::new) {
            let magazine = own.open(4);
            let is_seen = |entered: MagazineGuard<'_>| {
                let is_outside = magazine.is_outside();
                drop(entered);
                !is_outside && magazine.is_outside()
            };
            assert!(own.enter().is_some_and(is_seen));
            assert_eq!(own.enter().unwrap().act(|| magazine.is_outside()), Some(false));
            assert!(own.push(7) && magazine.is_outside());
            assert_eq!(own.enter().unwrap().pop_with(|| Some(magazine.is_outside())), Some((7, false)));
            assert!(magazine.is_outside());
        }
    }

    /// Magazines become usable up to the highest slot that was reached, and none beyond the last slot.
    #[test]
    fn magazines_open_up_to_the_highest_slot() {
        for barriers in BOTH {
            let ranges = [(); 2].map(|()| place(MagazineRange::new().unwrap()).unwrap());
            let caches = ranges.map(|range| Magazines::new(range, barriers));
            let resident_bytes = || ranges.map(MagazineRange::resident_bytes);
            let is_in = |magazines: &Magazines, number: usize| magazines.enter(Offset::of(number as u32)).is_some();
            for magazines in &caches {
                assert!([0, 1, MAX_THREADS - 1].into_iter().all(|number| !is_in(magazines, number)));
            }
            assert_eq!(resident_bytes(), [0, 0]);
            for (number, below) in [(2_000, 7), (7, 2_000), (MAX_THREADS - 1, 20_000)] {
                assert!(caches[0].reach(number) && is_in(&caches[0], number) && is_in(&caches[0], below));
                assert!(!is_in(&caches[1], number));
            }
            assert!(!is_in(&caches[0], MAX_THREADS) && !caches[0].reach(MAX_THREADS));
            assert!([UNKNOWN, NONE].into_iter().all(|number| !is_in(&caches[0], number as usize)));
            // The pages that four slots use; none of the other range.
            let page = os_page_bytes() as u64;
            assert_eq!(resident_bytes(), [4 * page, 0]);
            assert!(caches[1].reach(MAX_THREADS - 1) && is_in(&caches[1], MAX_THREADS - 1));
            assert_eq!(resident_bytes(), [4 * page, page]);
            // The next cache of a range starts without magazines; the memory is open already.
            let next = Magazines::new(ranges[0], barriers);
            assert!(!is_in(&next, 7) && next.reach(7) && is_in(&next, 7) && !is_in(&next, 8));
        }
    }
}
