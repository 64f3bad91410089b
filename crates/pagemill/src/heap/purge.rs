//! Giving back the memory of free slots, the coldest first.
//!
//! Slots from 2 MiB up own their blocks and are purged slot by slot. Smaller
//! ones share blocks: a huge page goes back when every slot that reaches into
//! it can be claimed; small pages go back slot by slot. Under the limit a huge
//! page of which only a part is free is split, since a part of it frees nothing
//! while it is whole.
//!
//! A walk goes from span to span through the heap zone and takes no lock that
//! an allocation waits for. A claimed slot is out of reach for some ten
//! microseconds (a block), or for as long as its own size takes (a big slot,
//! which nobody waits for: a fresh one costs nothing).
#![allow(unsafe_code)] // gives the memory of claimed slots back

use super::class::Class;
use super::slot::{Bytes, Claim, Phase, Slot, Slots};
use super::{Heap, Place};
use crate::arena::block::Backing;
use crate::reclaim::{Shrinker, Urgency, Which};
use crate::stats::{self, Counter};
use crate::trace::{self, Event};
use crate::units::{BLOCK_BYTES, os_page_bytes};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Ages are told apart by powers of two of the tick.
const AGES: usize = 17;

/// Age from which on free memory counts as cold: one tick at least. Bringing it in again costs a hundredth of that.
const COLD_AGE: usize = 1;

/// Most slots that reach into one block: 32 of 64 KiB, or one more that straddles.
const MAX_SLOTS_PER_BLOCK: usize = BLOCK_BYTES / super::class::MIN_BYTES + 1;

/// Part of a block that must be free to be worth a split.
const SPLIT_FROM_BYTES: usize = BLOCK_BYTES / 4;

/// A span: its first address and the class of its slots.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub start: usize,
    pub class: Class,
}

pub(super) fn age(now: u16, stamp: u16) -> usize {
    (u16::BITS - now.wrapping_sub(stamp).leading_zeros()) as usize
}

impl Shrinker for Heap {
    fn name(&self) -> &'static str {
        "heap"
    }

    fn may_nest(&self) -> bool {
        true
    }

    fn giveable_bytes(&self) -> u64 {
        let bytes = self.free_bytes();
        stats::set(Counter::HeapFree, bytes);
        bytes
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let _guard = self.purging.lock();
        let now = super::stamp_now();
        let mut left = Wanted { bytes: want_bytes, freed: 0 };
        if urgency == Urgency::Request {
            let (older, last) = self.choose_ages(now, want_bytes);
            self.walk(|span| self.purge_span(span, now, older.clone(), &mut left));
            if left.is_open() {
                self.walk(|span| self.purge_span(span, now, last..last + 1, &mut left));
            }
        } else {
            self.walk(|span| self.purge_span(span, now, 0..AGES, &mut left));
            if left.is_open() {
                self.walk(|span| self.split_span(span, &mut left));
            }
        }
        stats::add(Counter::PurgeFreed, left.freed);
        stats::set(Counter::HeapFree, self.free_bytes());
        left.freed
    }

    fn shrink_cold(&self, want_bytes: u64) -> u64 {
        let _guard = self.purging.lock();
        let now = super::stamp_now();
        let mut left = Wanted { bytes: want_bytes, freed: 0 };
        self.walk(|span| self.purge_span(span, now, COLD_AGE..AGES, &mut left));
        stats::add(Counter::PurgeFreed, left.freed);
        left.freed
    }

    fn offer(&self, want_bytes: u64, which: Which) -> u64 {
        self.offer_free(want_bytes, which)
    }

    fn reap(&self) {
        self.reap_offered();
    }

    fn settle(&self) {
        self.arena.settle(self.arena.block_of(self.base()), self.arena.heap.used_bytes() / BLOCK_BYTES);
        self.arena.settle_extents();
    }
}

/// The claims of all slots that reach into a block.
pub(super) struct Claims {
    first: usize,
    count: usize,
    claims: [Option<Claim>; MAX_SLOTS_PER_BLOCK],
}

impl Claims {
    pub fn iter(&self) -> impl Iterator<Item = Claim> {
        self.indices().map(|(_, claim)| claim)
    }

    /// With the slots' numbers within the span.
    pub fn indices(&self) -> impl Iterator<Item = (usize, Claim)> {
        let claims = self.claims[..self.count].iter();
        (self.first..).zip(claims).filter_map(|(index, claim)| Some((index, (*claim)?)))
    }
}

/// What is still to be given.
struct Wanted {
    bytes: u64,
    freed: u64,
}

impl Wanted {
    fn is_open(&self) -> bool {
        self.freed < self.bytes
    }
}

impl Heap {
    /// Calls `act` for every span until it says to stop.
    pub(super) fn walk(&self, act: impl FnMut(Span) -> bool) {
        self.walk_in(0..self.zone_blocks(), act);
    }

    /// Blocks of the zone that were given out.
    pub(super) fn zone_blocks(&self) -> usize {
        self.arena.heap.used_bytes() / BLOCK_BYTES
    }

    /// As [`Heap::walk`], for spans that start in a part of the zone. Returns whether it came to the end.
    pub(super) fn walk_in(&self, blocks: Range<usize>, mut act: impl FnMut(Span) -> bool) -> bool {
        let mut block = blocks.start;
        while block < blocks.end {
            let word = self.spans.get(block).load(Relaxed) as usize;
            let Some(class) = word.checked_sub(1).and_then(Class::from_index) else {
                block += 1; // a gap before an aligned span
                continue;
            };
            if !act(Span { start: self.base() + block * BLOCK_BYTES, class }) {
                return false;
            }
            block += class.span_blocks();
        }
        true
    }

    pub(super) fn slot_at(&self, span: Span, index: usize) -> Option<Place> {
        let addr = span.start + index * span.class.stride();
        self.place(((addr - self.base()) / super::class::GRANULE_BYTES) as u32).filter(|place| place.addr == addr)
    }

    /// Ages that are purged as a whole, and the one of which a part suffices.
    fn choose_ages(&self, now: u16, want_bytes: u64) -> (Range<usize>, usize) {
        let mut by_age = [0u64; AGES];
        self.walk(|span| {
            for place in (0..span.class.span_slots()).filter_map(|index| self.slot_at(span, index)) {
                let slot = self.slot(place.number);
                if slot.phase() == Phase::Free {
                    by_age[age(now, slot.stamp())] += slot.bytes().counted_bytes();
                }
            }
            true
        });
        let mut sum = 0;
        for last in (0..AGES).rev() {
            sum += by_age[last];
            if sum >= want_bytes {
                return (last + 1..AGES, last);
            }
        }
        (1..AGES, 0)
    }

    /// Purges what of a span is free and of these ages. Returns whether to go on.
    fn purge_span(&self, span: Span, now: u16, ages: Range<usize>, wanted: &mut Wanted) -> bool {
        if span.class.is_big() {
            if let Some(place) = self.slot_at(span, 0) {
                wanted.freed += self.purge_slot(place, now, &ages);
            }
            return wanted.is_open();
        }
        let first = self.arena.block_of(span.start);
        for block in first..first + span.class.span_blocks() {
            match self.arena.peek(block).backing {
                Backing::Huge => wanted.freed += self.purge_block(span, block, now, &ages),
                Backing::Lazy => {
                    // As a whole if it can be, so that it may come back as a huge page.
                    wanted.freed += self.purge_block(span, block, now, &ages);
                    if self.arena.peek(block).backing == Backing::Empty {
                        continue;
                    }
                    for place in self.slots_of_block(span, block).filter_map(|index| self.slot_at(span, index)) {
                        // Once, though it may reach into two such blocks.
                        let head = self.arena.block_of(place.addr);
                        if head == block || self.arena.peek(head).backing != Backing::Lazy {
                            wanted.freed += self.purge_slot(place, now, &ages);
                        }
                    }
                }
                Backing::Empty | Backing::Small => {}
            }
            if !wanted.is_open() {
                return false;
            }
        }
        true
    }

    fn is_of_age(&self, place: Place, now: u16, ages: &Range<usize>) -> bool {
        let slot = self.slot(place.number);
        slot.phase() == Phase::Free && ages.contains(&age(now, slot.stamp()))
    }

    /// Purges one slot: its own blocks, or its part of blocks in small pages.
    fn purge_slot(&self, place: Place, now: u16, ages: &Range<usize>) -> u64 {
        if !self.is_of_age(place, now, ages) {
            return 0;
        }
        let Some(claim) = self.slot(place.number).try_claim() else { return 0 };
        if claim.phase() != Phase::Free {
            self.slot(place.number).restore(claim, claim.bytes());
            return 0;
        }
        stats::add(Counter::PurgeScanned, claim.bytes().counted_bytes());
        let (freed, bytes) = if place.class.is_big() {
            let (first, blocks) = (self.arena.block_of(place.addr), place.class.span_blocks());
            if claim.bytes().is_offered {
                self.arena.note_taken(first, blocks);
            }
            // SAFETY: the slot is claimed and its blocks are its own.
            let freed = unsafe { self.arena.discard(first, blocks) };
            let is_zero = (first..first + blocks).all(|block| self.arena.peek(block).backing == Backing::Empty);
            (freed, Bytes { is_resident: !is_zero, is_zero, ..Bytes::default() })
        } else {
            match self.discard_parts(place) {
                Some(freed) => (freed, self.known_of(place)),
                None => (0, Bytes::USED),
            }
        };
        self.restore(place, claim, bytes);
        freed
    }

    /// Discards a claimed slot's bytes in blocks of small pages. `None` if the kernel refused.
    fn discard_parts(&self, place: Place) -> Option<u64> {
        let page = os_page_bytes();
        let (start, end) = (place.addr.next_multiple_of(page), (place.addr + place.class.bytes()) & !(page - 1));
        let mut freed = 0;
        for block in self.arena.block_of(place.addr)..=self.arena.block_of(place.addr + place.class.bytes() - 1) {
            let (from, to) =
                (start.max(self.arena.block_addr(block)), end.min(self.arena.block_addr(block) + BLOCK_BYTES));
            if from < to {
                // SAFETY: the slot is claimed; whole OS pages of it inside one block.
                freed += unsafe { self.arena.discard_part(block, from, to - from) }?;
            }
        }
        Some(freed)
    }

    /// After its parts in small pages went: such a slot may be touched without being brought in, and is zero unless
    /// a part of it lies in a huge page or a page it shares.
    fn known_of(&self, place: Place) -> Bytes {
        let mut blocks = self.arena.block_of(place.addr)..=self.arena.block_of(place.addr + place.class.bytes() - 1);
        let is_whole = [place.addr, place.class.bytes()].iter().all(|at| at.is_multiple_of(os_page_bytes()));
        let is_zero = is_whole && blocks.all(|block| self.arena.peek(block).backing != Backing::Huge);
        Bytes { is_zero, ..Bytes::default() }
    }

    /// Numbers (within the span) of the slots that reach into a block.
    pub(super) fn slots_of_block(&self, span: Span, block: usize) -> Range<usize> {
        let start = self.arena.block_addr(block) - span.start;
        let size = span.class.bytes();
        start / size..(start + BLOCK_BYTES).div_ceil(size)
    }

    /// Gives back a whole block if all slots that reach into it can be claimed and the free ones are of these ages.
    fn purge_block(&self, span: Span, block: usize, now: u16, ages: &Range<usize>) -> u64 {
        let is_due = |slot: &Slot| slot.phase() != Phase::Free || ages.contains(&age(now, slot.stamp()));
        let Some(claims) = self.claim_block(span, block, is_due) else { return 0 };
        stats::add(Counter::PurgeScanned, BLOCK_BYTES as u64);
        if claims.iter().any(|claim| claim.bytes().is_offered) {
            self.arena.note_taken(block, 1);
        }
        self.empty_block(span, block, &claims)
    }

    /// Gives a block back whose slots are claimed, and ends the claims.
    pub(super) fn empty_block(&self, span: Span, block: usize, claims: &Claims) -> u64 {
        // SAFETY: every slot that reaches into the block is claimed.
        let freed = unsafe { self.arena.discard(block, 1) };
        self.restore_all(span, block, claims);
        freed
    }

    /// Ends the claims of a block that may have been emptied.
    pub(super) fn restore_all(&self, span: Span, block: usize, claims: &Claims) {
        // Not judged by what was freed: a block that was lent and never touched is empty now, too.
        let is_emptied = self.arena.peek(block).backing == Backing::Empty;
        for (index, claim) in claims.indices() {
            let addr = span.start + index * span.class.bytes();
            let bytes = if is_emptied { self.known_after(addr, span.class, claim) } else { claim.bytes() };
            self.restore(self.place_at(span, index), claim, bytes);
        }
    }

    /// Claims all slots that reach into a block, if none is live and all meet the condition.
    pub(super) fn claim_block(&self, span: Span, block: usize, is_due: impl Fn(&Slot) -> bool) -> Option<Claims> {
        self.claim_others(span, block, None, is_due)
    }

    /// As [`Heap::claim_block`], but for one slot that the caller has.
    pub(super) fn claim_others(
        &self,
        span: Span,
        block: usize,
        own: Option<u32>,
        is_due: impl Fn(&Slot) -> bool,
    ) -> Option<Claims> {
        let indices = self.slots_of_block(span, block);
        let slot = |index| self.slot(self.number_at(span, index));
        let is_own = |index| own == Some(self.number_at(span, index));
        let may_go = |slot: &Slot| matches!(slot.phase(), Phase::None | Phase::Free) && is_due(slot);
        if !indices.clone().all(|index| is_own(index) || may_go(slot(index))) {
            return None;
        }
        let mut claims = Claims { first: indices.start, count: indices.len(), claims: [None; MAX_SLOTS_PER_BLOCK] };
        for index in indices.clone().filter(|index| !is_own(*index)) {
            claims.claims[index - indices.start] = slot(index).try_claim();
            if claims.claims[index - indices.start].is_none() {
                for (index, claim) in claims.indices() {
                    slot(index).restore(claim, claim.bytes());
                }
                return None;
            }
        }
        Some(claims)
    }

    /// A slot of a span, handed out before or not; of which node does not matter here.
    pub(super) fn place_at(&self, span: Span, index: usize) -> Place {
        let addr = span.start + index * span.class.bytes();
        Place { number: self.number_at(span, index), addr, class: span.class, node: 0 }
    }

    /// Its number.
    fn number_at(&self, span: Span, index: usize) -> u32 {
        ((span.start + index * span.class.bytes() - self.base()) / super::class::GRANULE_BYTES) as u32
    }

    /// What is known of a slot that shares blocks after one of them was emptied.
    fn known_after(&self, addr: usize, class: Class, claim: Claim) -> Bytes {
        let mut blocks = self.arena.block_of(addr)..=self.arena.block_of(addr + class.bytes() - 1);
        let is_empty = blocks.clone().all(|block| self.arena.peek(block).backing == Backing::Empty);
        let is_backed = blocks.all(|block| self.arena.peek(block).backing != Backing::Empty);
        Bytes {
            is_resident: is_backed && claim.bytes().is_resident,
            is_zero: is_empty || claim.bytes().is_zero,
            // Of another block that it reaches into.
            is_offered: !is_empty && claim.bytes().is_offered,
            counted: 0,
        }
    }

    /// Splits huge pages of which a part is free and gives that part back.
    fn split_span(&self, span: Span, wanted: &mut Wanted) -> bool {
        let first = self.arena.block_of(span.start);
        for block in if span.class.is_big() { 0..0 } else { first..first + span.class.span_blocks() } {
            if self.arena.peek(block).backing == Backing::Huge {
                wanted.freed += self.split_block(span, block);
            }
            if !wanted.is_open() {
                return false;
            }
        }
        true
    }

    /// Gives back the part of a split block where a slot was never handed out.
    fn discard_unused(&self, span: Span, index: usize, block: usize) -> u64 {
        let slot = self.slot(self.number_at(span, index));
        let Some(claim) = slot.try_claim() else { return 0 };
        let mut freed = 0;
        if claim.phase() == Phase::None {
            let (page, start) = (os_page_bytes(), span.start + index * span.class.bytes());
            let from = start.max(self.arena.block_addr(block)).next_multiple_of(page);
            let to = (start + span.class.bytes()).min(self.arena.block_addr(block) + BLOCK_BYTES) & !(page - 1);
            if from < to {
                // SAFETY: the slot is claimed; whole OS pages of it inside the block.
                freed = unsafe { self.arena.discard_part(block, from, to - from) }.unwrap_or(0);
            }
        }
        slot.restore(claim, claim.bytes());
        freed
    }

    fn split_block(&self, span: Span, block: usize) -> u64 {
        let indices = self.slots_of_block(span, block);
        let block_range = self.arena.block_addr(block)..self.arena.block_addr(block) + BLOCK_BYTES;
        let inside =
            |place: &Place| block_range.contains(&place.addr) && place.addr + place.class.bytes() <= block_range.end;
        let places = || indices.clone().filter_map(|index| self.slot_at(span, index)).filter(inside);
        let free = places().filter(|place| self.slot(place.number).phase() == Phase::Free);
        if free.map(|place| place.class.bytes()).sum::<usize>() < SPLIT_FROM_BYTES {
            return 0;
        }
        self.arena.split(block);
        let now = super::stamp_now();
        let used: u64 = places().map(|place| self.purge_slot(place, now, &(0..AGES))).sum();
        let unused: u64 = indices.clone().map(|index| self.discard_unused(span, index, block)).sum();
        let freed = used + unused;
        trace::event(Event::Split, block as u64, freed);
        freed
    }
}
