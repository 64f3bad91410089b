//! The state word of a slot, and the lists of free ones.
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
//! A free slot is volatile memory. An allocation changes *Free* to *Live* with one compare-and-swap. Only a purge that
//! has set *Purging* may discard the slot's bytes. A slot stays in its list while it is purged. The lists are last in,
//! first out; purges take the oldest slots first. Checked under loom (`cargo test` with `--cfg loom`).

use pagemill_core::sync::{Acquire, AtomicU32, AtomicU64, Relaxed, Release};

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotPhase {
    /// Never allocated.
    None = 0,
    /// Allocated to the program.
    Live = 1,
    /// Free; its bytes may be discarded.
    Free = 2,
    /// A purge is discarding its bytes.
    Purging = 3,
}

/// What is known of a slot's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct SlotBytes {
    /// The slot has memory, or the kernel provides it on touch.
    pub is_resident: bool,
    /// All bytes read zero.
    pub is_zero: bool,
    /// Free, and offered to the kernel, which takes it when it runs short. Ends with the next use.
    pub is_offered: bool,
    /// Free: its share of the free bytes, in units of 4 KiB. A thread that takes the slot subtracts it again.
    pub counted: u32,
}

impl SlotBytes {
    /// No memory is behind it.
    pub const UNTOUCHED: Self = Self { is_resident: false, is_zero: true, is_offered: false, counted: 0 };
    /// The program has used it.
    pub const USED: Self = Self { is_resident: true, is_zero: false, is_offered: false, counted: 0 };

    /// The same, with a count of `bytes`.
    pub fn with_count(self, bytes: u64) -> Self {
        Self { counted: u32::try_from(bytes / COUNT_UNIT_BYTES).unwrap_or(u32::MAX), ..self }
    }

    pub fn counted_bytes(self) -> u64 {
        u64::from(self.counted) * COUNT_UNIT_BYTES
    }
}

const COUNT_UNIT_BYTES: u64 = 4 << 10;

const PHASE: u64 = 3;
const RESIDENT: u64 = 1 << 2;
const ZERO: u64 = 1 << 3;
const OFFERED: u64 = 1 << 4;
/// Never allocated, but with memory of another slot behind it: not zero.
const STALE: u64 = 1 << 5;
const AGE_SHIFT: u32 = 16;
const COUNT_SHIFT: u32 = 32;

fn pack(phase: SlotPhase, bytes: SlotBytes, stamp: u16) -> u64 {
    phase as u64
        | if bytes.is_resident { RESIDENT } else { 0 }
        | if bytes.is_zero { ZERO } else { 0 }
        | if bytes.is_offered { OFFERED } else { 0 }
        | u64::from(stamp) << AGE_SHIFT
        | u64::from(bytes.counted) << COUNT_SHIFT
}

fn phase(word: u64) -> SlotPhase {
    match word & PHASE {
        0 => SlotPhase::None,
        1 => SlotPhase::Live,
        2 => SlotPhase::Free,
        _ => SlotPhase::Purging,
    }
}

fn bytes(word: u64) -> SlotBytes {
    SlotBytes {
        is_resident: word & RESIDENT != 0,
        is_zero: word & ZERO != 0,
        is_offered: word & OFFERED != 0,
        counted: (word >> COUNT_SHIFT) as u32,
    }
}

/// The phase and bytes of a claimed slot, for restoring it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotClaim(u64);

impl SlotClaim {
    pub fn phase(self) -> SlotPhase {
        phase(self.0)
    }

    pub fn bytes(self) -> SlotBytes {
        bytes(self.0)
    }

    /// The same after memory of another slot was put behind it.
    pub fn stale(self) -> Self {
        match self.phase() {
            SlotPhase::None => Self(self.0 | STALE),
            _ => Self(self.0 & !ZERO),
        }
    }
}

/// Out-of-line metadata of one slot: 16 bytes, indexed by the slot's granule number.
#[repr(C)]
pub(crate) struct Slot {
    state: AtomicU64,
    /// Next in the free list: slot number plus one.
    next: AtomicU32,
    /// A packed [`Info`].
    info: AtomicU32,
}

/// The class of a slot, and its start within its granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Info {
    pub class: u8,
    pub node: u8,
    /// In steps of 16 KiB.
    pub offset: u8,
}

impl Slot {
    #[cfg(all(test, loom))]
    pub fn new() -> Self {
        Self { state: AtomicU64::new(0), next: AtomicU32::new(0), info: AtomicU32::new(0) }
    }

    pub fn info(&self) -> Option<Info> {
        let word = self.info.load(Acquire);
        (word != 0).then_some(Info { class: word as u8, node: (word >> 8) as u8, offset: (word >> 16) as u8 })
    }

    /// Describes a slot before its first allocation.
    pub fn describe(&self, info: Info) {
        let word = u32::from(info.class) | u32::from(info.node) << 8 | u32::from(info.offset) << 16 | 1 << 31;
        self.info.store(word, Release);
    }

    pub fn phase(&self) -> SlotPhase {
        phase(self.state.load(Acquire))
    }

    pub fn bytes(&self) -> SlotBytes {
        bytes(self.state.load(Acquire))
    }

    /// Whether it is free, and the kernel may take its bytes.
    pub fn is_offered(&self) -> bool {
        let word = self.state.load(Acquire);
        phase(word) == SlotPhase::Free && bytes(word).is_offered
    }

    /// Takes a slot that was never allocated. `None` while a purge holds it.
    #[inline]
    pub fn try_carve(&self) -> Option<SlotBytes> {
        let mut word = self.state.load(Relaxed);
        while phase(word) == SlotPhase::None {
            let fresh = SlotBytes { is_zero: word & STALE == 0, ..SlotBytes::UNTOUCHED };
            match self.state.compare_exchange(word, pack(SlotPhase::Live, fresh, 0), Acquire, Relaxed) {
                Ok(_) => return Some(fresh),
                Err(now) => word = now,
            }
        }
        None
    }

    /// Takes a free slot for the program. `None` while a purge holds it.
    #[inline]
    pub fn try_allocate(&self) -> Option<SlotBytes> {
        let mut word = self.state.load(Relaxed);
        while phase(word) == SlotPhase::Free {
            let live = pack(SlotPhase::Live, SlotBytes { is_offered: false, counted: 0, ..bytes(word) }, 0);
            match self.state.compare_exchange(word, live, Acquire, Relaxed) {
                Ok(_) => return Some(bytes(word)),
                Err(now) => word = now,
            }
        }
        None
    }

    /// Frees a live slot; `bytes` is what the caller knows of its bytes. Returns the phase as `Err` if it was not live.
    #[inline]
    pub fn free(&self, bytes: SlotBytes, stamp: u16) -> Result<(), SlotPhase> {
        let mut word = self.state.load(Relaxed);
        while phase(word) == SlotPhase::Live {
            match self.state.compare_exchange(word, pack(SlotPhase::Free, bytes, stamp), Release, Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => word = now,
            }
        }
        Err(phase(word))
    }

    /// Claims a slot that is free or was never allocated, so that its bytes may be discarded.
    pub fn try_claim(&self) -> Option<SlotClaim> {
        let mut word = self.state.load(Relaxed);
        while matches!(phase(word), SlotPhase::Free | SlotPhase::None) {
            match self.state.compare_exchange(word, word | PHASE, Acquire, Relaxed) {
                Ok(_) => return Some(SlotClaim(word)),
                Err(now) => word = now,
            }
        }
        None
    }

    /// Ends a claim: restores the slot's phase, with `bytes` for a free slot.
    pub fn restore(&self, claim: SlotClaim, bytes: SlotBytes) {
        let word = match claim.phase() {
            SlotPhase::None => claim.0,
            _ => pack(SlotPhase::Free, bytes, (claim.0 >> AGE_SHIFT) as u16),
        };
        self.state.store(word, Release);
    }

    /// The time stamp of freeing.
    pub fn stamp(&self) -> u16 {
        (self.state.load(Relaxed) >> AGE_SHIFT) as u16
    }
}

/// Looks slots up by number.
pub(crate) trait Slots {
    fn slot(&self, number: u32) -> &Slot;
}

/// The head of a free list: slot number plus one, and a tag against ABA.
pub(crate) struct Head<'head>(pub &'head AtomicU64);

impl Head<'_> {
    /// Pushes a slot. The caller must have popped or just freed it.
    #[inline]
    pub fn push(&self, slots: &impl Slots, number: u32) {
        let mut head = self.0.load(Relaxed);
        loop {
            slots.slot(number).next.store(head as u32, Relaxed);
            let new = u64::from(number + 1) | tag(head);
            match self.0.compare_exchange_weak(head, new, Release, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Pops the slot that was pushed last.
    #[inline]
    pub fn pop(&self, slots: &impl Slots) -> Option<u32> {
        let mut head = self.0.load(Acquire);
        loop {
            let number = (head as u32).checked_sub(1)?;
            let next = slots.slot(number).next.load(Relaxed);
            match self.0.compare_exchange_weak(head, u64::from(next) | tag(head), Acquire, Acquire) {
                Ok(_) => return Some(number),
                Err(now) => head = now,
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.load(Relaxed) as u32 == 0
    }
}

/// The next tag, shifted into place. It wraps after 2^32 changes between two reads of one thread.
fn tag(head: u64) -> u64 {
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
        /// Per slot: the current user of its bytes (1 program, 2 purge).
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
                Head(&fixture.head).push(&fixture, number);
            }
            Arc::new(fixture)
        }

        fn use_bytes(&self, number: u32, user: usize) {
            assert_eq!(self.users[number as usize].swap(user, Relaxed), 0, "two users of one slot's bytes");
            assert_eq!(self.users[number as usize].swap(0, Relaxed), user, "two users of one slot's bytes");
        }

        fn allocate_and_free(&self) {
            if let Some(number) = Head(&self.head).pop(self) {
                if self.slot(number).try_allocate().is_some() {
                    self.use_bytes(number, 1);
                    self.slot(number).free(SlotBytes::USED, 1).unwrap();
                }
                Head(&self.head).push(self, number);
            }
        }

        fn purge(&self, number: u32) {
            if let Some(claim) = self.slot(number).try_claim() {
                self.use_bytes(number, 2);
                self.slot(number).restore(claim, SlotBytes::UNTOUCHED);
            }
        }

        fn numbers(&self) -> Vec<u32> {
            let mut numbers: Vec<u32> = std::iter::from_fn(|| Head(&self.head).pop(self)).collect();
            numbers.sort_unstable();
            numbers
        }
    }

    /// A purge and an allocation never use the same bytes, and no slot is lost.
    #[test]
    fn allocation_and_purge_exclude_each_other() {
        loom::model(|| {
            let fixture = Fixture::new(1);
            let other = fixture.clone();
            let purge = thread::spawn(move || other.purge(0));
            fixture.allocate_and_free();
            purge.join().unwrap();
            assert_eq!(fixture.numbers(), [0]);
            assert_eq!(fixture.slot(0).phase(), SlotPhase::Free);
        });
    }

    /// Two threads pop and push: each slot has one user, and all slots are there afterwards.
    #[test]
    fn the_list_loses_and_doubles_nothing() {
        loom::model(|| {
            let fixture = Fixture::new(2);
            let other = fixture.clone();
            let thread = thread::spawn(move || {
                other.allocate_and_free();
                other.allocate_and_free();
            });
            fixture.allocate_and_free();
            thread.join().unwrap();
            assert_eq!(fixture.numbers(), [0, 1]);
        });
    }

    /// Of two frees of one slot exactly one succeeds.
    #[test]
    fn a_double_free_is_noticed() {
        loom::model(|| {
            let slot = Arc::new(Slot::new());
            assert!(slot.try_carve().is_some());
            let other = slot.clone();
            let thread = thread::spawn(move || other.free(SlotBytes::default(), 0).is_ok());
            let here = slot.free(SlotBytes::default(), 0).is_ok();
            assert!(here ^ thread.join().unwrap());
        });
    }

    /// A slot that was never allocated: a purge of its block and its first use exclude each other.
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

    /// Everything that a slot's word may know.
    fn all_bytes() -> impl Iterator<Item = SlotBytes> {
        let flags = |flags: u32| [flags & 1 != 0, flags & 2 != 0, flags & 4 != 0];
        (0..8).map(flags).flat_map(|[is_resident, is_zero, is_offered]| {
            [0, 1, u32::MAX].map(|counted| SlotBytes { is_resident, is_zero, is_offered, counted })
        })
    }

    /// A word holds all its parts, whatever the others are.
    #[test]
    fn a_word_holds_all_its_parts() {
        for known in all_bytes() {
            for of in [SlotPhase::None, SlotPhase::Live, SlotPhase::Free, SlotPhase::Purging] {
                for stamp in [0, 1, u16::MAX] {
                    let word = pack(of, known, stamp);
                    assert_eq!((phase(word), bytes(word), (word >> AGE_SHIFT) as u16), (of, known, stamp));
                }
            }
        }
        assert_eq!(bytes(pack(SlotPhase::Free, SlotBytes::USED.with_count(12 << 10), 0)).counted_bytes(), 12 << 10);
    }

    /// An allocation returns what was known, and ends the offer and the count; residency and zeros stay known.
    #[test]
    fn an_allocation_ends_the_offer_and_the_count() {
        for known in all_bytes() {
            let slot = slot_of(pack(SlotPhase::Free, known, 7));
            assert_eq!((slot.try_allocate(), slot.phase()), (Some(known), SlotPhase::Live));
            assert_eq!(slot.bytes(), SlotBytes { is_offered: false, counted: 0, ..known });
            assert_eq!(slot.try_allocate(), None);
        }
    }

    /// A description is read as written, and there is none before.
    #[test]
    fn a_description_holds_all_its_parts() {
        for class in [0, 1, 0x5A, u8::MAX] {
            for node in [0, 1, 0x5A, u8::MAX] {
                for offset in [0, 1, 0x5A, u8::MAX] {
                    let (slot, info) = (slot_of(0), Info { class, node, offset });
                    assert_eq!(slot.info(), None);
                    slot.describe(info);
                    assert_eq!(slot.info(), Some(info));
                }
            }
        }
    }

    /// A claimed slot can be used by nothing else. Restoring it keeps phase and stamp; a free slot gets new bytes.
    #[test]
    fn a_claim_excludes_all_others_and_restores() {
        for known in all_bytes() {
            let slot = slot_of(pack(SlotPhase::Free, known, 0xA5F1));
            assert_eq!(slot.is_offered(), known.is_offered);
            let claim = slot.try_claim().unwrap();
            assert_eq!((claim.phase(), claim.bytes(), slot.phase()), (SlotPhase::Free, known, SlotPhase::Purging));
            assert!(slot.try_claim().is_none() && slot.try_allocate().is_none() && slot.try_carve().is_none());
            assert!(slot.free(SlotBytes::USED, 1) == Err(SlotPhase::Purging) && !slot.is_offered());
            let stale = claim.stale();
            assert_eq!((stale.phase(), stale.bytes()), (SlotPhase::Free, SlotBytes { is_zero: false, ..known }));
            for next in all_bytes() {
                slot.restore(stale, next);
                assert_eq!((slot.phase(), slot.bytes(), slot.stamp()), (SlotPhase::Free, next, 0xA5F1));
            }
        }
        let live = slot_of(pack(SlotPhase::Live, SlotBytes { is_offered: true, ..SlotBytes::USED }, 3));
        assert!(live.try_claim().is_none() && !live.is_offered());
        assert_eq!((live.free(SlotBytes::USED, 9), live.phase(), live.stamp()), (Ok(()), SlotPhase::Free, 9));
    }

    /// A slot that was never allocated reads zero, unless memory of another slot was put behind it since.
    #[test]
    fn a_first_allocation_is_zero_unless_stale() {
        let slot = slot_of(0);
        let claim = slot.try_claim().unwrap();
        assert_eq!((claim.phase(), slot.phase()), (SlotPhase::None, SlotPhase::Purging));
        slot.restore(claim, SlotBytes::USED);
        assert_eq!((slot.phase(), slot.try_allocate()), (SlotPhase::None, None));
        assert_eq!((slot.try_carve(), slot.phase()), (Some(SlotBytes::UNTOUCHED), SlotPhase::Live));
        assert_eq!((slot.bytes(), slot.try_carve()), (SlotBytes::UNTOUCHED, None));
        let slot = slot_of(0);
        slot.restore(slot.try_claim().unwrap().stale(), SlotBytes::USED);
        slot.restore(slot.try_claim().unwrap().stale(), SlotBytes::USED);
        assert_eq!(
            (slot.phase(), slot.try_carve()),
            (SlotPhase::None, Some(SlotBytes { is_zero: false, ..SlotBytes::UNTOUCHED }))
        );
    }

    struct All(Vec<Slot>);

    impl Slots for All {
        fn slot(&self, number: u32) -> &Slot {
            &self.0[number as usize]
        }
    }

    /// The list behaves as a stack, and each change has a tag of its own.
    #[test]
    fn a_list_is_last_in_first_out() {
        const SLOTS: u32 = 5;
        let all = All((0..SLOTS).map(|_| slot_of(0)).collect());
        let (word, mut model, mut changes) = (AtomicU64::new(0), Vec::new(), 0);
        for round in 0..400_u32 {
            let (head, free) = (Head(&word), (0..SLOTS).find(|number| !model.contains(number)));
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
