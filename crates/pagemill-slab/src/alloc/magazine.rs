//! Magazines: stacks of a cache's free objects, one for each thread, used without locks or atomic exchanges.
//!
//! A magazine belongs to a cache and is indexed by the thread slot ([`crate::alloc::thread_slots`]). It is one stack
//! that holds up to two sheaves, so a thread that alternates between allocation and free rarely needs the barn. Nothing
//! has to be done when a thread ends: the next thread in its slot uses the contents, and a drain empties the magazines
//! of all slots ([`AsymmetricLock`]).
//!
//! A [`MagazineRange`] is the address range of the magazines under one cache id. A [`Magazines`] is the view that one
//! cache has of its range.
#![allow(unsafe_code)] // magazines at computed addresses

use crate::alloc::asymmetric_lock::{AsymmetricLock, Barriers};
use crate::alloc::shape::MAX_SHEAF_LEN;
use crate::alloc::thread_slots::{MAX_THREADS, NO_SLOT};
use pagemill_core::arena::{Table, Zeroed};
use pagemill_core::error::Result;
use pagemill_core::sync::{AtomicU32, AtomicU64, Relaxed, Release};
use std::hint::assert_unchecked;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, fence};

/// Minimum number of threads for which a table by thread slot reserves addresses. If not enough addresses are
/// available, the number of threads is halved, down to this minimum. If even that table does not fit, no slab cache is
/// created.
const MIN_THREADS: usize = 1 << 10;

/// Maximum number of objects in a magazine: two sheaves.
const MAGAZINE_CAPACITY: usize = 2 * MAX_SHEAF_LEN;

/// The stack of the free objects of one cache that belong to one thread slot.
///
/// # Invariants
///
/// Only the thread that has entered `lock` changes `len`, `capacity`, `node` and `objects`: the thread in this slot, or
/// a draining thread. At any time the first `len` objects are free and distinct, even in the middle of an operation. A
/// fork may copy a magazine while a thread holds `lock`, and in the child the slot belongs to another thread
/// ([`crate::alloc::thread_slots::begin_child`]).
#[repr(C, align(1024))]
pub(crate) struct Magazine {
    pub lock: AsymmetricLock,
    len: AtomicU32,
    /// Current capacity: 0 until the magazine's thread has opened it.
    capacity: AtomicU32,
    /// NUMA node of the memory of the stored objects.
    node: AtomicU32,
    objects: [AtomicU64; MAGAZINE_CAPACITY],
}

// SAFETY: atomic words are valid if all bits are zero.
unsafe impl Zeroed for Magazine {}

/// A magazine that its thread has entered. Dropping the guard leaves the magazine again. The guard also protects the
/// stock of the thread slot.
///
/// # Invariants
///
/// The magazine's thread has entered `lock`.
pub(crate) struct MagazineGuard<'magazine>(&'magazine Magazine);

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
    /// Removes and returns the object that was added last; `None` if the magazine is empty.
    #[inline(always)]
    pub fn pop(self) -> Option<usize> {
        self.last().map(|last| self.take_last(last))
    }

    /// As [`MagazineGuard::pop`], together with the result of `take_other`, which takes a free handle from the thread
    /// slot's stock ([`crate::alloc::stock`]). If the object or the handle is not available, neither is taken.
    /// `take_other` must not panic.
    #[inline(always)]
    pub fn pop_together<R>(self, take_other: impl FnOnce() -> Option<R>) -> Option<(usize, R)> {
        let last = self.last()?;
        take_other().map(|result| (self.take_last(last), result))
    }

    /// Returns the stack position of the object that was added last; `None` if the magazine is empty.
    #[inline(always)]
    fn last(&self) -> Option<u32> {
        self.len.load(Relaxed).checked_sub(1)
    }

    /// Removes and returns the object at `last`, the highest position of the stack.
    #[inline(always)]
    fn take_last(&self, last: u32) -> usize {
        self.len.store(last, Relaxed);
        self.object_at(last).load(Relaxed) as usize
    }

    /// Adds a free object to the magazine. Returns false if the magazine is full.
    #[inline(always)]
    pub fn push(self, object: usize) -> bool {
        let len = self.len.load(Relaxed);
        let has_room = len < self.capacity.load(Relaxed);
        if has_room {
            self.object_at(len).store(object as u64, Relaxed);
            self.len.store(len + 1, Release);
        }
        has_room
    }

    /// Calls `act` while the magazine is entered. `act` may use the stock of the thread slot and must not panic.
    /// Returns `None` if the magazine is not open.
    #[inline(always)]
    pub fn run_entered<R>(self, act: impl FnOnce() -> R) -> Option<R> {
        (self.capacity.load(Relaxed) > 0).then(act)
    }

    /// Adds as many of the objects as fit into the magazine. All of them lie on NUMA node `node`; none is added if the
    /// magazine has objects of another node. Returns the number of added objects.
    pub fn fill(self, objects: impl ExactSizeIterator<Item = usize>, node: usize) -> usize {
        let len = self.len.load(Relaxed);
        let is_of_node = len == 0 || self.node() == node;
        let count = if is_of_node { objects.len().min((self.capacity.load(Relaxed) - len) as usize) } else { 0 };
        debug_assert!(len as usize + count <= MAGAZINE_CAPACITY);
        (len..).zip(objects.take(count)).for_each(|(at, object)| self.object_at(at).store(object as u64, Relaxed));
        self.len.store(len + count as u32, Release);
        if count > 0 {
            self.node.store(node as u32, Relaxed);
        }
        count
    }

    /// Opens the magazine: sets the number of objects that it may hold to `capacity`.
    pub fn open(self, capacity: usize) {
        debug_assert!(capacity <= MAGAZINE_CAPACITY);
        debug_assert!(self.len() <= capacity, "no object is lost");
        self.capacity.store(capacity as u32, Relaxed);
    }
}

impl Magazine {
    /// Returns the word at position `at` of the stack.
    #[inline(always)]
    fn object_at(&self, at: u32) -> &AtomicU64 {
        debug_assert!((at as usize) < MAGAZINE_CAPACITY);
        // SAFETY: `at` is below `len` or the current capacity, neither of which exceeds `MAGAZINE_CAPACITY` (type
        // invariant).
        unsafe { self.objects.get_unchecked(at as usize) }
    }

    /// Removes the objects that were added first, up to the length of `objects`, and copies them to `objects`. Returns
    /// their number. Only a thread that has entered or drained the magazine calls this.
    ///
    /// Moves the other objects down to the bottom of the stack. `len` is 0 while the others move, so a child forked meanwhile finds no object at two positions.
    pub fn take_oldest(&self, objects: &mut [usize]) -> usize {
        let len = self.len.load(Relaxed);
        debug_assert!(len as usize <= MAGAZINE_CAPACITY);
        let count = objects.len().min(len as usize) as u32;
        (0..count).zip(objects).for_each(|(at, object)| *object = self.object_at(at).load(Relaxed) as usize);
        self.len.store(0, Relaxed);
        fence(Release);
        for at in count..len {
            self.object_at(at - count).store(self.object_at(at).load(Relaxed), Relaxed);
        }
        self.len.store(len - count, Release);
        count as usize
    }

    /// Returns the number of objects in the magazine. The number is approximate, except on the magazine's thread.
    pub fn len(&self) -> usize {
        self.len.load(Relaxed) as usize
    }

    #[inline]
    pub fn node(&self) -> usize {
        self.node.load(Relaxed) as usize
    }

    /// Closes an empty magazine. Only a draining thread calls this. The magazine's thread must open the magazine before
    /// its next use.
    pub fn reset_drained(&self) {
        debug_assert_eq!(self.len(), 0);
        self.capacity.store(0, Relaxed);
    }
}

/// A table with an entry for each thread slot, or for fewer slots if not enough addresses are available. Memory that was
/// made accessible stays accessible.
pub(crate) struct ThreadTable<T> {
    pub entries: Table<T>,
    /// Number of entries for which addresses are reserved.
    threads: usize,
    /// Number of entries that are accessible: the first ones.
    opened: AtomicUsize,
}

impl<T: Zeroed> ThreadTable<T> {
    /// Reserves the addresses of the entries.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if no addresses are available.
    pub fn new() -> Result<Self> {
        let mut threads = MAX_THREADS;
        loop {
            match Table::new(threads) {
                Ok(entries) => return Ok(Self { entries, threads, opened: AtomicUsize::new(0) }),
                Err(error) if threads == MIN_THREADS => return Err(error),
                Err(_) => threads /= 2,
            }
        }
    }

    /// Makes the entry of a thread slot accessible. Returns false if no memory or addresses are available. Only one
    /// thread of a cache at a time may call `open_slot`.
    pub fn open_slot(&self, slot: usize) -> bool {
        let (opened, end) = (self.opened.load(Relaxed), slot + 1);
        if end > self.threads || self.entries.open(0, opened, end).is_err() {
            return false;
        }
        // A thread of the previous cache with this table may still be opening an entry.
        self.opened.fetch_max(end, Relaxed);
        true
    }

    pub fn resident_bytes(&self) -> u64 {
        self.entries.resident_bytes(0, self.opened.load(Relaxed))
    }
}

/// The magazines of one cache id. Successive caches with this id use the same magazines.
pub(crate) type MagazineRange = ThreadTable<Magazine>;

/// Byte offset of a thread's magazine from the magazine of slot 0 of the same cache. The offset is precomputed, so the
/// fast path needs no multiplication.
///
/// # Invariants
///
/// The offset is a multiple of a magazine's size, or [`Offset::NONE`].
#[derive(Clone, Copy)]
pub(crate) struct Offset(usize);

impl Offset {
    /// The offset of a thread without a slot. Added to any base address, it gives an address beyond all magazines,
    /// without overflow.
    pub const NONE: Self = Self(1 << (usize::BITS - 2));

    pub fn of(slot: u32) -> Self {
        if slot < NO_SLOT { Self(slot as usize * size_of::<Magazine>()) } else { Self::NONE }
    }
}

/// The magazines of one cache, indexed by thread slot.
///
/// # Invariants
///
/// `base` is the start of the table of magazines. The table is open (accessible) from there to `plain_end` or
/// `fenced_end`, which lie at a magazine boundary, and stays open.
pub(crate) struct Magazines {
    base: *const Magazine,
    /// End of the open magazines if their threads enter without a barrier ([`Barriers::DrainerOnly`]); else 0.
    plain_end: AtomicUsize,
    /// End of the open magazines if their threads enter with a barrier ([`Barriers::BothSides`]); else 0.
    fenced_end: AtomicUsize,
    range: &'static MagazineRange,
    pub barriers: Barriers,
}

// SAFETY: the pointer refers to entries of a table, which are `Sync`.
unsafe impl Send for Magazines {}
// SAFETY: as above.
unsafe impl Sync for Magazines {}

impl Magazines {
    /// Creates the magazines of the one cache that uses the magazine range `range`. No thread can enter a magazine
    /// before [`Magazines::open_slot`].
    pub fn new(range: &'static MagazineRange, barriers: Barriers) -> Self {
        Self {
            base: range.entries.start(),
            plain_end: AtomicUsize::new(0),
            fenced_end: AtomicUsize::new(0),
            range,
            barriers,
        }
    }

    /// Enters the magazine of this thread. Returns `None` if the magazine is not open or is being drained.
    #[inline(always)]
    pub fn enter(&self, own: Offset) -> Option<MagazineGuard<'_>> {
        let magazine = self.magazine_at(own);
        // Needs no acquire: open memory stays open, and the contents belong to this thread.
        if magazine.addr() < self.plain_end.load(Relaxed) {
            // SAFETY: an open magazine (type invariant). No magazine is at address 0; the assertion removes a check
            // from the fast path.
            let magazine = unsafe {
                assert_unchecked(!magazine.is_null());
                &*magazine
            };
            magazine.lock.enter().then(|| MagazineGuard(magazine))
        } else {
            self.enter_fenced(magazine)
        }
    }

    /// Enters a magazine with a memory barrier. Not inlined, since most kernels need no barrier.
    #[cold]
    #[inline(never)]
    fn enter_fenced(&self, magazine: *const Magazine) -> Option<MagazineGuard<'_>> {
        if magazine.addr() >= self.fenced_end.load(Relaxed) {
            return None;
        }
        // SAFETY: as in `enter`.
        let magazine = unsafe { &*magazine };
        magazine.lock.enter_fenced().then(|| MagazineGuard(magazine))
    }

    #[inline(always)]
    fn magazine_at(&self, offset: Offset) -> *const Magazine {
        self.base.wrapping_byte_add(offset.0)
    }

    /// Returns the magazine of a slot that [`Magazines::open_slot`] has opened.
    pub fn get(&self, slot: usize) -> &Magazine {
        let magazine = self.magazine_at(Offset::of(slot as u32));
        assert!(magazine.addr() < self.plain_end.load(Relaxed).max(self.fenced_end.load(Relaxed)));
        // SAFETY: as in `enter`.
        unsafe { &*magazine }
    }

    /// Opens the magazine of a thread slot. Returns false if no memory or addresses are available. Only one thread at a
    /// time may call `open_slot`.
    pub fn open_slot(&self, slot: usize) -> bool {
        if !self.range.open_slot(slot) {
            return false;
        }
        let may_enter = match self.barriers {
            Barriers::DrainerOnly => &self.plain_end,
            Barriers::BothSides => &self.fenced_end,
        };
        let end = self.magazine_at(Offset::of(slot as u32 + 1)).addr();
        may_enter.store(end.max(may_enter.load(Relaxed)), Release);
        true
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::alloc::thread_slots::UNKNOWN_SLOT;
    use pagemill_core::arena::place;
    use pagemill_core::units::os_page_bytes;

    /// The magazines of a cache. The test thread uses the magazine of one slot as if it were the thread in that slot.
    struct OwnMagazine(Magazines);

    impl OwnMagazine {
        const SLOT: u32 = 3;

        fn new(barriers: Barriers) -> Self {
            let magazines = Magazines::new(place(MagazineRange::new().unwrap()).unwrap(), barriers);
            assert!(magazines.enter(Offset::of(Self::SLOT)).is_none() && magazines.open_slot(Self::SLOT as usize));
            Self(magazines)
        }

        fn enter(&self) -> Option<MagazineGuard<'_>> {
            self.0.enter(Offset::of(Self::SLOT))
        }

        fn open(&self, capacity: usize) -> &Magazine {
            self.enter().unwrap().open(capacity);
            self.0.get(Self::SLOT as usize)
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
            self.enter().unwrap().take_oldest(sheaf)
        }
    }

    const BOTH_BARRIERS: [Barriers; 2] = [Barriers::DrainerOnly, Barriers::BothSides];

    /// `pop` must return the object that was added last, and `drain` must return the oldest objects. A full magazine
    /// and a magazine that is not open must accept no object.
    #[test]
    fn a_magazine_is_a_stack() {
        for own in BOTH_BARRIERS.map(OwnMagazine::new) {
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

    /// While a magazine is drained, its thread must not be able to use the magazine. After the drain, `pop` must return
    /// an object that the drain left in the magazine.
    #[test]
    fn magazine_is_unusable_during_a_drain() {
        for own in BOTH_BARRIERS.map(OwnMagazine::new) {
            let magazine = own.open(4);
            assert!(own.push(1) && own.push(2));
            magazine.lock.begin_drain();
            assert!(magazine.lock.is_not_held_by_owner());
            assert!(own.pop().is_none() && !own.push(3) && own.fill(&[3], 0) == 0);
            let mut objects = [0; 1];
            assert_eq!((magazine.take_oldest(&mut objects), objects), (1, [1]));
            magazine.lock.end_drain();
            assert_eq!(own.pop(), Some(2));
        }
    }

    /// A draining thread must see that the magazine's thread holds the lock, during each operation on the magazine.
    /// After the operation it must see that the lock is free.
    #[test]
    fn drain_sees_that_a_thread_holds_its_magazine() {
        for own in BOTH_BARRIERS.map(OwnMagazine::new) {
            let magazine = own.open(4);
            let is_seen = |entered: MagazineGuard<'_>| {
                let is_not_held_by_owner = magazine.lock.is_not_held_by_owner();
                drop(entered);
                !is_not_held_by_owner && magazine.lock.is_not_held_by_owner()
            };
            assert!(own.enter().is_some_and(is_seen));
            assert_eq!(own.enter().unwrap().run_entered(|| magazine.lock.is_not_held_by_owner()), Some(false));
            assert!(own.push(7) && magazine.lock.is_not_held_by_owner());
            assert_eq!(
                own.enter().unwrap().pop_together(|| Some(magazine.lock.is_not_held_by_owner())),
                Some((7, false))
            );
            assert!(magazine.lock.is_not_held_by_owner());
        }
    }

    /// Opens the magazines of several thread slots. A thread must be able to enter magazines up to the highest slot
    /// that was opened, and none beyond the last slot. Opening a magazine of one cache must not open one of another
    /// cache.
    #[test]
    fn magazines_open_up_to_the_highest_slot() {
        for barriers in BOTH_BARRIERS {
            let ranges = [(); 2].map(|()| place(MagazineRange::new().unwrap()).unwrap());
            let caches = ranges.map(|range| Magazines::new(range, barriers));
            let resident_bytes = || ranges.map(MagazineRange::resident_bytes);
            let is_in = |magazines: &Magazines, slot: usize| magazines.enter(Offset::of(slot as u32)).is_some();
            for magazines in &caches {
                assert!([0, 1, MAX_THREADS - 1].into_iter().all(|slot| !is_in(magazines, slot)));
            }
            assert_eq!(resident_bytes(), [0, 0]);
            for (slot, below) in [(2_000, 7), (7, 2_000), (MAX_THREADS - 1, 20_000)] {
                assert!(caches[0].open_slot(slot) && is_in(&caches[0], slot) && is_in(&caches[0], below));
                assert!(!is_in(&caches[1], slot));
            }
            assert!(!is_in(&caches[0], MAX_THREADS) && !caches[0].open_slot(MAX_THREADS));
            assert!([UNKNOWN_SLOT, NO_SLOT].into_iter().all(|slot| !is_in(&caches[0], slot as usize)));
            // Four pages of the first range were touched, and none of the other.
            let page = os_page_bytes() as u64;
            assert_eq!(resident_bytes(), [4 * page, 0]);
            assert!(caches[1].open_slot(MAX_THREADS - 1) && is_in(&caches[1], MAX_THREADS - 1));
            assert_eq!(resident_bytes(), [4 * page, page]);
            // The next cache in a range begins without open magazines, although their memory is open.
            let next = Magazines::new(ranges[0], barriers);
            assert!(!is_in(&next, 7) && next.open_slot(7) && is_in(&next, 7) && !is_in(&next, 8));
        }
    }
}
