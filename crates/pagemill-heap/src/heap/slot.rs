//! The state word of a slot, and the free lists.
//!
//! ```text
//!            carve                 free
//!   None ------------> Live <==============> Free
//!     ^ \                        allocate    ^  |
//!     |  \ claim                       restore  | claim
//!     |   `--------> Purging <------------------'
//!     `------ restore -'
//! ```
//!
//! An allocation changes *Free* to *Live* with one compare-and-swap. Only a purge that has changed the state to
//! *Purging* may discard the slot's bytes. A slot stays in its free list while it is purged. The lists are last in,
//! first out, whereas purges start with the oldest slots. Loom tests check the word (`cargo test` with `--cfg loom`).

use pagemill_core::sync::{Acquire, AtomicU32, AtomicU64, Relaxed, Release};

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotPhase {
    /// The slot was never allocated.
    None = 0,
    /// The slot is allocated to the program.
    Live = 1,
    /// The slot is free: a purge may claim it.
    Free = 2,
    /// A purge has claimed the slot and may discard its bytes.
    Purging = 3,
}

/// The attributes of a slot's bytes that its state word stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct SlotBytes {
    /// Whether the slot has memory, or the kernel provides it on touch without an admission.
    pub is_resident: bool,
    /// Whether all bytes are known to read zero.
    pub is_zero: bool,
    /// Whether the slot is free and was offered to the kernel (`MADV_FREE`). The next allocation of the slot clears the
    /// flag.
    pub is_offered: bool,
    /// For a free slot: the part of `Heap::free_bytes` that the slot accounts for, in units of 4 KiB. The thread that
    /// allocates the slot subtracts this part again.
    pub counted: u32,
}

impl SlotBytes {
    /// The attributes of a slot without memory.
    pub const UNTOUCHED: Self = Self { is_resident: false, is_zero: true, is_offered: false, counted: 0 };
    /// The attributes of a slot that the program has used.
    pub const USED: Self = Self { is_resident: true, is_zero: false, is_offered: false, counted: 0 };

    /// Returns a copy with `counted` set to `bytes`.
    pub fn with_count(self, bytes: u64) -> Self {
        debug_assert!(bytes.is_multiple_of(COUNT_UNIT_BYTES), "the count loses no bytes");
        Self { counted: u32::try_from(bytes / COUNT_UNIT_BYTES).unwrap_or(u32::MAX), ..self }
    }

    pub fn counted_bytes(self) -> u64 {
        u64::from(self.counted) * COUNT_UNIT_BYTES
    }
}

/// Unit of [`SlotBytes::counted`].
const COUNT_UNIT_BYTES: u64 = 4 << 10;

/// Mask of the bits of a slot's state word that contain the phase.
const PHASE_MASK: u64 = 3;
/// Bit of a slot's state word for [`SlotBytes::is_resident`].
const RESIDENT_BIT: u64 = 1 << 2;
/// Bit of a slot's state word for [`SlotBytes::is_zero`].
const ZERO_BIT: u64 = 1 << 3;
/// Bit of a slot's state word for [`SlotBytes::is_offered`].
const OFFERED_BIT: u64 = 1 << 4;
/// Bit of a slot's state word: the slot was never allocated, but pages of another slot were moved into it, so its bytes
/// are not zero.
const NONZERO_BIT: u64 = 1 << 5;
/// Position of the time stamp (16 bits) in a slot's state word.
const STAMP_SHIFT: u32 = 16;
/// Position of [`SlotBytes::counted`] (32 bits) in a slot's state word.
const COUNT_SHIFT: u32 = 32;

/// Packs the phase, the attributes and the time stamp into a state word.
fn pack(phase: SlotPhase, bytes: SlotBytes, stamp: u16) -> u64 {
    phase as u64
        | if bytes.is_resident { RESIDENT_BIT } else { 0 }
        | if bytes.is_zero { ZERO_BIT } else { 0 }
        | if bytes.is_offered { OFFERED_BIT } else { 0 }
        | u64::from(stamp) << STAMP_SHIFT
        | u64::from(bytes.counted) << COUNT_SHIFT
}

fn unpack_phase(word: u64) -> SlotPhase {
    match word & PHASE_MASK {
        0 => SlotPhase::None,
        1 => SlotPhase::Live,
        2 => SlotPhase::Free,
        _ => SlotPhase::Purging,
    }
}

fn unpack_bytes(word: u64) -> SlotBytes {
    SlotBytes {
        is_resident: word & RESIDENT_BIT != 0,
        is_zero: word & ZERO_BIT != 0,
        is_offered: word & OFFERED_BIT != 0,
        counted: (word >> COUNT_SHIFT) as u32,
    }
}

/// A purge's claim on a slot. It contains the state word before the claim, from which the word is restored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotClaim(u64);

impl SlotClaim {
    pub fn phase(self) -> SlotPhase {
        unpack_phase(self.0)
    }

    pub fn bytes(self) -> SlotBytes {
        unpack_bytes(self.0)
    }

    /// Returns a claim from which the slot is restored as not zero, because pages of another slot were moved into it.
    pub fn as_nonzero(self) -> Self {
        match self.phase() {
            SlotPhase::None => Self(self.0 | NONZERO_BIT),
            _ => Self(self.0 & !ZERO_BIT),
        }
    }
}

/// Metadata of one slot: 16 bytes in a table that is indexed by the number of the slot's granule.
#[repr(C)]
pub(crate) struct Slot {
    /// Phase, attributes of the bytes, and time of the last free (`pack`).
    state: AtomicU64,
    /// Number of the next slot in the free list, plus one; 0 at the end of the list.
    next: AtomicU32,
    /// A packed [`SlotInfo`].
    info: AtomicU32,
}

/// The class and node of a slot, and its start within its granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotInfo {
    pub class: u8,
    pub node: u8,
    /// Distance from the start of the granule, in units of 16 KiB.
    pub offset: u8,
}

impl Slot {
    #[cfg(all(test, loom))]
    pub fn new() -> Self {
        Self { state: AtomicU64::new(0), next: AtomicU32::new(0), info: AtomicU32::new(0) }
    }

    pub fn info(&self) -> Option<SlotInfo> {
        let word = self.info.load(Acquire);
        (word != 0).then_some(SlotInfo { class: word as u8, node: (word >> 8) as u8, offset: (word >> 16) as u8 })
    }

    /// Stores the class, node and offset of a slot, before its first allocation.
    pub fn set_info(&self, info: SlotInfo) {
        let word = u32::from(info.class) | u32::from(info.node) << 8 | u32::from(info.offset) << 16 | 1 << 31;
        self.info.store(word, Release);
    }

    pub fn phase(&self) -> SlotPhase {
        unpack_phase(self.state.load(Acquire))
    }

    pub fn bytes(&self) -> SlotBytes {
        unpack_bytes(self.state.load(Acquire))
    }

    /// Returns whether the slot is free and was offered to the kernel.
    pub fn is_offered(&self) -> bool {
        let word = self.state.load(Acquire);
        unpack_phase(word) == SlotPhase::Free && unpack_bytes(word).is_offered
    }

    /// Allocates the slot for the first time. Returns `None` while a purge has claimed the slot.
    #[inline]
    pub fn try_carve(&self) -> Option<SlotBytes> {
        let fresh = |word| SlotBytes { is_zero: word & NONZERO_BIT == 0, ..SlotBytes::UNTOUCHED };
        let carve = |word| (unpack_phase(word) == SlotPhase::None).then(|| pack(SlotPhase::Live, fresh(word), 0));
        self.state.fetch_update(Acquire, Relaxed, carve).ok().map(fresh)
    }

    /// Allocates the slot, which was free. Returns `None` while a purge has claimed the slot.
    #[inline]
    pub fn try_allocate(&self) -> Option<SlotBytes> {
        let live = |word| SlotBytes { is_offered: false, counted: 0, ..unpack_bytes(word) };
        let allocate = |word| (unpack_phase(word) == SlotPhase::Free).then(|| pack(SlotPhase::Live, live(word), 0));
        self.state.fetch_update(Acquire, Relaxed, allocate).ok().map(unpack_bytes)
    }

    /// Frees the slot, and stores the attributes of its bytes and the time. If the slot is not live, returns its phase
    /// as `Err`.
    #[inline]
    pub fn free(&self, bytes: SlotBytes, stamp: u16) -> Result<(), SlotPhase> {
        let free = |word| (unpack_phase(word) == SlotPhase::Live).then(|| pack(SlotPhase::Free, bytes, stamp));
        self.state.fetch_update(Release, Relaxed, free).map(|_| ()).map_err(unpack_phase)
    }

    /// Claims the slot if it is free or was never allocated. The caller may then discard the slot's bytes.
    pub fn try_claim(&self) -> Option<SlotClaim> {
        let is_claimable = |word| matches!(unpack_phase(word), SlotPhase::Free | SlotPhase::None);
        let claim = |word| is_claimable(word).then_some(word | PHASE_MASK);
        self.state.fetch_update(Acquire, Relaxed, claim).ok().map(SlotClaim)
    }

    /// As [`Slot::try_claim`], but only if the slot is free.
    pub fn try_claim_free(&self) -> Option<SlotClaim> {
        let claim = self.try_claim()?;
        if claim.phase() == SlotPhase::Free {
            return Some(claim);
        }
        self.release(claim);
        None
    }

    /// Ends a claim and changes nothing.
    pub fn release(&self, claim: SlotClaim) {
        self.restore(claim, claim.bytes());
    }

    /// Ends a claim: restores the slot's phase. For a free slot, also stores the new attributes of its bytes.
    pub fn restore(&self, claim: SlotClaim, bytes: SlotBytes) {
        debug_assert!(matches!(claim.phase(), SlotPhase::None | SlotPhase::Free), "no other slots are claimed");
        let word = match claim.phase() {
            SlotPhase::None => claim.0,
            _ => pack(SlotPhase::Free, bytes, (claim.0 >> STAMP_SHIFT) as u16),
        };
        self.state.store(word, Release);
    }

    /// The time stamp that [`Slot::free`] stored.
    pub fn stamp(&self) -> u16 {
        (self.state.load(Relaxed) >> STAMP_SHIFT) as u16
    }
}

/// A table of slots, indexed by slot number.
pub(crate) trait Slots {
    fn slot(&self, number: u32) -> &Slot;
}

/// A free list. Its head word has the number of the first slot plus one, and a tag that prevents the ABA problem.
pub(crate) struct FreeList<'head>(pub &'head AtomicU64);

impl FreeList<'_> {
    /// Pushes a slot, which the caller has just freed or popped.
    #[inline]
    pub fn push(&self, slots: &impl Slots, number: u32) {
        let _ = self.0.fetch_update(Release, Relaxed, |head| {
            debug_assert!(head as u32 != number + 1, "the slot is not in the list");
            slots.slot(number).next.store(head as u32, Relaxed);
            Some(u64::from(number + 1) | next_tag(head))
        });
    }

    /// Pops the slot that was pushed last.
    #[inline]
    pub fn pop(&self, slots: &impl Slots) -> Option<u32> {
        let popped = self.0.fetch_update(Acquire, Acquire, |head| {
            let first = (head as u32).checked_sub(1)?;
            Some(u64::from(slots.slot(first).next.load(Relaxed)) | next_tag(head))
        });
        popped.ok().map(|head| head as u32 - 1)
    }

    pub fn is_empty(&self) -> bool {
        self.0.load(Relaxed) as u32 == 0
    }
}

/// Returns the tag that follows the tag of the head word `head`, in the upper half of a word. A tag recurs only after
/// 2^32 changes of the list.
fn next_tag(head: u64) -> u64 {
    ((head >> 32) + 1) << 32
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    struct Fixture {
        slots: Vec<Slot>,
        head: AtomicU64,
        /// For each slot: the current user of its bytes (0 none, 1 program, 2 purge).
        users: Vec<AtomicUsize>,
    }

    impl Slots for Fixture {
        fn slot(&self, number: u32) -> &Slot {
            &self.slots[number as usize]
        }
    }

    impl Fixture {
        fn new(count: u32) -> Arc<Self> {
            let fixture = Self {
                slots: (0..count).map(|_| Slot::new()).collect(),
                head: AtomicU64::new(0),
                users: (0..count).map(|_| AtomicUsize::new(0)).collect(),
            };
            for number in 0..count {
                assert!(fixture.slot(number).try_carve().is_some());
                fixture.slot(number).free(SlotBytes::USED, 0).unwrap();
                FreeList(&fixture.head).push(&fixture, number);
            }
            Arc::new(fixture)
        }

        fn use_bytes(&self, number: u32, user: usize) {
            assert_eq!(self.users[number as usize].swap(user, Relaxed), 0, "two users of one slot's bytes");
            assert_eq!(self.users[number as usize].swap(0, Relaxed), user, "two users of one slot's bytes");
        }

        fn allocate_and_free(&self) {
            if let Some(number) = FreeList(&self.head).pop(self) {
                if self.slot(number).try_allocate().is_some() {
                    self.use_bytes(number, 1);
                    self.slot(number).free(SlotBytes::USED, 1).unwrap();
                }
                FreeList(&self.head).push(self, number);
            }
        }

        fn purge(&self, number: u32) {
            if let Some(claim) = self.slot(number).try_claim() {
                self.use_bytes(number, 2);
                self.slot(number).restore(claim, SlotBytes::UNTOUCHED);
            }
        }

        fn pop_all(&self) -> Vec<u32> {
            let mut numbers: Vec<u32> = std::iter::from_fn(|| FreeList(&self.head).pop(self)).collect();
            numbers.sort_unstable();
            numbers
        }
    }

    /// A thread purges a slot while another thread allocates and frees the slot. The two threads must not use the
    /// slot's bytes at the same time, and the slot must be in its free list at the end.
    #[test]
    fn allocation_and_purge_exclude_each_other() {
        loom::model(|| {
            let fixture = Fixture::new(1);
            let other = fixture.clone();
            let purge = thread::spawn(move || other.purge(0));
            fixture.allocate_and_free();
            purge.join().unwrap();
            assert_eq!(fixture.pop_all(), [0]);
            assert_eq!(fixture.slot(0).phase(), SlotPhase::Free);
        });
    }

    /// Two threads pop and push the slots of one free list. No slot may have two users, and each must be in the list
    /// once at the end.
    #[test]
    fn free_list_has_each_slot_once() {
        loom::model(|| {
            let fixture = Fixture::new(2);
            let other = fixture.clone();
            let thread = thread::spawn(move || {
                other.allocate_and_free();
                other.allocate_and_free();
            });
            fixture.allocate_and_free();
            thread.join().unwrap();
            assert_eq!(fixture.pop_all(), [0, 1]);
        });
    }

    /// Two threads free the same slot. Exactly one of them must succeed.
    #[test]
    fn one_of_two_frees_succeeds() {
        loom::model(|| {
            let slot = Arc::new(Slot::new());
            assert!(slot.try_carve().is_some());
            let other = slot.clone();
            let thread = thread::spawn(move || other.free(SlotBytes::default(), 0).is_ok());
            let here = slot.free(SlotBytes::default(), 0).is_ok();
            assert!(here ^ thread.join().unwrap());
        });
    }

    /// A thread purges a slot that was never allocated while another thread carves the slot. The two threads must not
    /// use the slot's bytes at the same time.
    #[test]
    fn carving_and_purge_exclude_each_other() {
        loom::model(|| {
            let slot = Arc::new(Slot::new());
            let user = Arc::new(AtomicUsize::new(0));
            let (other, other_user) = (slot.clone(), user.clone());
            let purge = thread::spawn(move || {
                if let Some(claim) = other.try_claim() {
                    assert_eq!(other_user.swap(2, Relaxed), 0);
                    other_user.store(0, Relaxed);
                    other.restore(claim, SlotBytes::default());
                }
            });
            if slot.try_carve().is_some() {
                assert_eq!(user.swap(1, Relaxed), 0);
                user.store(0, Relaxed);
            }
            purge.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn slot_of(word: u64) -> Slot {
        Slot { state: AtomicU64::new(word), next: AtomicU32::new(0), info: AtomicU32::new(0) }
    }

    /// Returns all combinations of the attributes of a slot's bytes, each with several values of `counted`.
    fn all_attributes() -> impl Iterator<Item = SlotBytes> {
        let flags = |flags: u32| [flags & 1 != 0, flags & 2 != 0, flags & 4 != 0];
        (0..8).map(flags).flat_map(|[is_resident, is_zero, is_offered]| {
            [0, 1, u32::MAX].map(|counted| SlotBytes { is_resident, is_zero, is_offered, counted })
        })
    }

    /// Packs every combination of phase, attributes and stamp into a word. Unpacking must return the same values.
    #[test]
    fn state_word_packs_all_fields() {
        for known in all_attributes() {
            for of in [SlotPhase::None, SlotPhase::Live, SlotPhase::Free, SlotPhase::Purging] {
                for stamp in [0, 1, u16::MAX] {
                    let word = pack(of, known, stamp);
                    assert_eq!(
                        (unpack_phase(word), unpack_bytes(word), (word >> STAMP_SHIFT) as u16),
                        (of, known, stamp)
                    );
                }
            }
        }
        assert_eq!(
            unpack_bytes(pack(SlotPhase::Free, SlotBytes::USED.with_count(12 << 10), 0)).counted_bytes(),
            12 << 10
        );
    }

    /// `try_allocate` must return the attributes that the free slot had. In the state word it must clear `is_offered`
    /// and `counted`, and no other attribute.
    #[test]
    fn allocation_clears_offer_and_count() {
        for known in all_attributes() {
            let slot = slot_of(pack(SlotPhase::Free, known, 7));
            assert_eq!((slot.try_allocate(), slot.phase()), (Some(known), SlotPhase::Live));
            assert_eq!(slot.bytes(), SlotBytes { is_offered: false, counted: 0, ..known });
            assert_eq!(slot.try_allocate(), None);
        }
    }

    /// `info` must return `None` before `set_info`, and afterwards the values that `set_info` stored.
    #[test]
    fn described_slot_returns_its_info() {
        for class in [0, 1, 0x5A, u8::MAX] {
            for node in [0, 1, 0x5A, u8::MAX] {
                for offset in [0, 1, 0x5A, u8::MAX] {
                    let (slot, info) = (slot_of(0), SlotInfo { class, node, offset });
                    assert_eq!(slot.info(), None);
                    slot.set_info(info);
                    assert_eq!(slot.info(), Some(info));
                }
            }
        }
    }

    /// While a slot is claimed, all other operations must fail. Restoring a free slot must preserve phase and stamp and
    /// store the new attributes.
    #[test]
    fn claimed_slot_refuses_operations_until_restored() {
        for known in all_attributes() {
            let slot = slot_of(pack(SlotPhase::Free, known, 0xA5F1));
            assert_eq!(slot.is_offered(), known.is_offered);
            let claim = slot.try_claim().unwrap();
            assert_eq!((claim.phase(), claim.bytes(), slot.phase()), (SlotPhase::Free, known, SlotPhase::Purging));
            assert!(slot.try_claim().is_none() && slot.try_allocate().is_none() && slot.try_carve().is_none());
            assert!(slot.free(SlotBytes::USED, 1) == Err(SlotPhase::Purging) && !slot.is_offered());
            let stale = claim.as_nonzero();
            assert_eq!((stale.phase(), stale.bytes()), (SlotPhase::Free, SlotBytes { is_zero: false, ..known }));
            for next in all_attributes() {
                slot.restore(stale, next);
                assert_eq!((slot.phase(), slot.bytes(), slot.stamp()), (SlotPhase::Free, next, 0xA5F1));
            }
        }
        let live = slot_of(pack(SlotPhase::Live, SlotBytes { is_offered: true, ..SlotBytes::USED }, 3));
        assert!(live.try_claim().is_none() && !live.is_offered());
        assert_eq!((live.free(SlotBytes::USED, 9), live.phase(), live.stamp()), (Ok(()), SlotPhase::Free, 9));
    }

    /// The first allocation of a slot must report that its bytes are zero, unless pages of another slot were moved into
    /// it before.
    #[test]
    fn carved_slot_is_zero_unless_pages_were_moved_in() {
        let slot = slot_of(0);
        let claim = slot.try_claim().unwrap();
        assert_eq!((claim.phase(), slot.phase()), (SlotPhase::None, SlotPhase::Purging));
        slot.restore(claim, SlotBytes::USED);
        assert_eq!((slot.phase(), slot.try_allocate()), (SlotPhase::None, None));
        assert_eq!((slot.try_carve(), slot.phase()), (Some(SlotBytes::UNTOUCHED), SlotPhase::Live));
        assert_eq!((slot.bytes(), slot.try_carve()), (SlotBytes::UNTOUCHED, None));
        let slot = slot_of(0);
        slot.restore(slot.try_claim().unwrap().as_nonzero(), SlotBytes::USED);
        slot.restore(slot.try_claim().unwrap().as_nonzero(), SlotBytes::USED);
        assert_eq!(
            (slot.phase(), slot.try_carve()),
            (SlotPhase::None, Some(SlotBytes { is_zero: false, ..SlotBytes::UNTOUCHED }))
        );
    }

    struct SlotTable(Vec<Slot>);

    impl Slots for SlotTable {
        fn slot(&self, number: u32) -> &Slot {
            &self.0[number as usize]
        }
    }

    /// Pushes and pops slots, and compares the free list with a `Vec`. The list must be last in, first out, and each
    /// change must increment its tag.
    #[test]
    fn free_list_is_last_in_first_out() {
        const SLOTS: u32 = 5;
        let all = SlotTable((0..SLOTS).map(|_| slot_of(0)).collect());
        let (word, mut model, mut changes) = (AtomicU64::new(0), Vec::new(), 0);
        for round in 0..400_u32 {
            let (head, free) = (FreeList(&word), (0..SLOTS).find(|number| !model.contains(number)));
            assert_eq!(head.is_empty(), model.is_empty());
            match free {
                Some(number) if round * 7 % 11 > 4 => {
                    head.push(&all, number);
                    model.push(number);
                    changes += 1;
                }
                _ => {
                    changes += u64::from(!model.is_empty());
                    assert_eq!(head.pop(&all), model.pop());
                }
            }
            assert_eq!(word.load(Relaxed) >> 32, changes);
        }
    }
}
