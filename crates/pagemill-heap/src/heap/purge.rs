//! Purges: return the memory of free slots to the kernel, the coldest first.
//!
//! A big slot is purged as a whole. Smaller slots share blocks. A block that is a huge page is discarded if every slot
//! that reaches into it can be claimed. In a block of small pages the free slots are discarded separately. When a limit
//! is reached, partly free huge pages are split first, because discarding a part of a huge page frees nothing.
//!
//! A walk visits the spans of the heap zone and holds no lock that an allocation waits for. A claimed slot cannot be
//! allocated. A claim lasts some ten microseconds; the claim on a big slot lasts until its memory is discarded.
//! Allocations do not wait for a claimed big slot, because they can carve a new one.
#![allow(unsafe_code)] // discards the memory of claimed slots

use super::class::Class;
use super::slot::{Slot, SlotBytes, SlotClaim, SlotPhase, Slots};
use super::{Heap, LocatedSlot, TICK_SHIFT};
use pagemill_core::arena::block::Backing;
use pagemill_core::reclaim::{Cost, Shrinker, Urgency, Which};
use pagemill_core::stats::{self, Counter};
use pagemill_core::trace::{self, Event};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A range of ages. An age is the number of ticks since a slot was freed.
type Ages = Range<u32>;
/// All ages that a slot's time stamp can express.
const ALL_AGES: Ages = 0..1 << 16;
/// Number of age groups. A group contains all ages, in ticks, that have the same number of significant bits.
const AGE_GROUPS: usize = 17;

/// Maximum number of huge pages that one call of [`Shrinker::shrink_aged`] splits, which takes some 10 ms.
const MAX_AGED_SPLITS: usize = 32;

/// Maximum number of slots that reach into one block: as many as fit, and one more that straddles its boundary.
const MAX_SLOTS_PER_BLOCK: usize = BLOCK_BYTES / super::class::MIN_BYTES + 1;

/// Minimum age of free memory for which huge pages are split. Younger memory is purged in whole blocks only.
const MIN_SPLIT_AGE: Duration = Duration::from_millis(500);

/// A huge page is split only if free slots fill at least this many bytes of it.
const MIN_SPLIT_FREE_BYTES: usize = BLOCK_BYTES / 4;

/// Whether a purge of a block also discards the slots that were never allocated.
#[derive(Clone, Copy)]
enum NeverCarved {
    /// Slots that were never allocated are not discarded.
    Keep,
    /// Slots that were never allocated are discarded, because they are resident only as parts of a huge page.
    Discard,
}

/// A span: adjacent blocks with slots of one class. `start` is the address of the first block.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub start: usize,
    pub class: Class,
}

/// Returns the ticks from the time stamp of a freed slot to `now`.
fn age_ticks(now: u16, stamp: u16) -> u32 {
    u32::from(now.wrapping_sub(stamp))
}

/// Returns the age group of a freed slot: the number of significant bits of its age in ticks.
pub(super) fn age_group(now: u16, stamp: u16) -> usize {
    (u32::BITS - age_ticks(now, stamp).leading_zeros()) as usize
}

/// Returns the ages that belong to an age group.
fn ages_in_group(group: usize) -> Ages {
    debug_assert!(group < AGE_GROUPS);
    if group == 0 { 0..1 } else { 1 << (group - 1)..1 << group }
}

impl Shrinker for Heap {
    fn name(&self) -> &'static str {
        "heap"
    }

    fn cost(&self) -> Cost {
        Cost::Nothing
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
        let now = super::current_stamp();
        let mut target = PurgeTarget::new(want_bytes);
        if urgency == Urgency::Request {
            self.purge_oldest(now, &ALL_AGES, &mut target);
        } else {
            self.walk_spans(|span| self.purge_span(span, now, &ALL_AGES, &mut target));
            let mut splits = usize::MAX;
            if target.is_unmet() {
                self.walk_spans(|span| self.split_span(span, now, &ALL_AGES, &mut splits, &mut target));
            }
        }
        stats::add(Counter::PurgeFreed, target.freed);
        stats::set(Counter::HeapFree, self.free_bytes());
        target.freed
    }

    /// Purges free memory of at least this age, the oldest first: whole blocks, then parts of huge pages by splitting
    /// the huge pages.
    fn shrink_aged(&self, want_bytes: u64, age: Duration) -> Option<u64> {
        let ticks = age.as_nanos().div_ceil(1 << TICK_SHIFT).min(1 << 15);
        let oldest = ticks as u32..ALL_AGES.end;
        // Allocations call `shrink_aged`, too, when new memory becomes resident, and must not wait for another purge.
        let Some(_guard) = self.purging.try_lock() else { return Some(0) };
        let now = super::current_stamp();
        let mut target = PurgeTarget::new(want_bytes);
        if age.is_zero() {
            // Memory of any age may be reused soon. So do not purge a slot that is larger than the bytes wanted.
            target.largest_bytes = want_bytes;
        }
        self.purge_oldest(now, &oldest, &mut target);
        if target.is_unmet() && age >= MIN_SPLIT_AGE {
            let mut splits = MAX_AGED_SPLITS;
            self.walk_spans(|span| self.split_span(span, now, &oldest, &mut splits, &mut target));
        }
        stats::add(Counter::PurgeFreed, target.freed);
        Some(target.freed)
    }

    fn offer(&self, want_bytes: u64, which: Which) -> u64 {
        self.offer_free(want_bytes, which)
    }

    fn reap(&self) {
        self.reap_offered();
    }

    fn reconcile(&self) {
        self.arena.reconcile(self.arena.block_of(self.base()), self.arena.heap.carved_bytes() / BLOCK_BYTES);
        self.arena.reconcile_extents();
    }
}

/// A purge's claims on the slots that reach into a block.
pub(super) struct Claims {
    /// Index, within the span, of the first slot that reaches into the block.
    first: usize,
    /// Number of slots that reach into the block.
    count: usize,
    claims: [Option<SlotClaim>; MAX_SLOTS_PER_BLOCK],
}

impl Claims {
    pub fn iter(&self) -> impl Iterator<Item = SlotClaim> {
        self.indexed_claims().map(|(_, claim)| claim)
    }

    /// The claims, each with the index of its slot within the span.
    pub fn indexed_claims(&self) -> impl Iterator<Item = (usize, SlotClaim)> {
        let claims = self.claims[..self.count].iter();
        (self.first..).zip(claims).filter_map(|(index, claim)| Some((index, (*claim)?)))
    }
}

/// The number of bytes that a purge should free, and its progress.
struct PurgeTarget {
    /// Bytes that the purge should free.
    bytes: u64,
    /// Bytes freed so far.
    freed: u64,
    /// Big slots with more resident bytes than this are skipped.
    largest_bytes: u64,
}

impl PurgeTarget {
    fn new(bytes: u64) -> Self {
        Self { bytes, freed: 0, largest_bytes: u64::MAX }
    }

    /// Whether more bytes must be freed.
    fn is_unmet(&self) -> bool {
        self.freed < self.bytes
    }
}

impl Heap {
    /// Calls `act` for every span of the heap until `act` returns false.
    pub(super) fn walk_spans(&self, act: impl FnMut(Span) -> bool) {
        self.walk_spans_in(0..self.carved_blocks(), act);
    }

    /// Number of blocks of the heap zone that were carved.
    pub(super) fn carved_blocks(&self) -> usize {
        self.arena.heap.carved_bytes() / BLOCK_BYTES
    }

    /// As [`Heap::walk_spans`], for the spans that start in these blocks of the zone. Returns false if `act` stopped
    /// the walk.
    pub(super) fn walk_spans_in(&self, blocks: Range<usize>, mut act: impl FnMut(Span) -> bool) -> bool {
        let mut block = blocks.start;
        while block < blocks.end {
            let word = self.spans.get(block).load(Relaxed) as usize;
            let Some(class) = word.checked_sub(1).and_then(Class::from_index) else {
                block += 1; // no span starts here: the block was skipped to align the next span
                continue;
            };
            debug_assert!(block + class.span_blocks() <= blocks.end, "walks end between spans");
            if !act(Span { start: self.base() + block * BLOCK_BYTES, class }) {
                return false;
            }
            block += class.span_blocks();
        }
        true
    }

    /// Returns the slot with this index in a span; `None` if the slot was never carved.
    pub(super) fn carved_slot_at(&self, span: Span, index: usize) -> Option<LocatedSlot> {
        debug_assert!(index < span.class.span_slots());
        let addr = span.start + index * span.class.stride();
        self.locate(((addr - self.base()) / super::class::GRANULE_BYTES) as u32).filter(|place| place.addr == addr)
    }

    /// Purges free slots with these ages, the oldest age groups first, until the target is met.
    fn purge_oldest(&self, now: u16, ages: &Ages, target: &mut PurgeTarget) {
        debug_assert!(self.purging.is_held());
        let (older, last) = self.ages_to_purge(now, ages, target.bytes);
        self.walk_spans(|span| self.purge_span(span, now, &older, target));
        if target.is_unmet() {
            self.walk_spans(|span| self.purge_span(span, now, &last, target));
        }
    }

    /// Returns two ranges of ages. To free `want_bytes`, all free slots in the first range and a part of the free slots
    /// in the second range, the next younger age group, must be purged.
    fn ages_to_purge(&self, now: u16, ages: &Ages, want_bytes: u64) -> (Ages, Ages) {
        let mut bytes_by_group = [0u64; AGE_GROUPS];
        self.walk_spans(|span| {
            for place in (0..span.class.span_slots()).filter_map(|index| self.carved_slot_at(span, index)) {
                if self.is_free_with_age(place, now, ages) {
                    let slot = self.slot(place.number);
                    bytes_by_group[age_group(now, slot.stamp())] += slot.bytes().counted_bytes();
                }
            }
            true
        });
        let within = |some: Ages| some.start.max(ages.start)..some.end.min(ages.end);
        let mut sum = 0;
        for last in (0..AGE_GROUPS).rev() {
            sum += bytes_by_group[last];
            if sum >= want_bytes {
                let last = ages_in_group(last);
                return (within(last.end..ALL_AGES.end), within(last));
            }
        }
        (ages.clone(), 0..0)
    }

    /// Purges the free slots with these ages in a span. Returns whether more bytes are wanted.
    fn purge_span(&self, span: Span, now: u16, ages: &Ages, target: &mut PurgeTarget) -> bool {
        if span.class.is_big() {
            if let Some(place) = self.carved_slot_at(span, 0)
                && self.slot(place.number).bytes().counted_bytes() <= target.largest_bytes
            {
                target.freed += self.purge_big_slot(place, now, ages);
            }
            return target.is_unmet();
        }
        let first = self.arena.block_of(span.start);
        for block in first..first + span.class.span_blocks() {
            match self.arena.block_state(block).backing {
                Backing::Huge => target.freed += self.purge_block(span, block, now, ages),
                Backing::Lazy => {
                    // Discard the whole block if possible, so that it can become a huge page again.
                    target.freed += self.purge_block(span, block, now, ages);
                    if self.arena.block_state(block).backing == Backing::Empty {
                        continue;
                    }
                    target.freed += self.discard_free_parts(span, block, now, ages, NeverCarved::Keep);
                }
                Backing::Empty | Backing::Small => {}
            }
            if !target.is_unmet() {
                return false;
            }
        }
        true
    }

    /// Returns whether a slot is free and has one of these ages.
    fn is_free_with_age(&self, place: LocatedSlot, now: u16, ages: &Ages) -> bool {
        let slot = self.slot(place.number);
        slot.phase() == SlotPhase::Free && ages.contains(&age_ticks(now, slot.stamp()))
    }

    /// Purges a big slot if it is free and has one of these ages. Returns the bytes freed.
    fn purge_big_slot(&self, place: LocatedSlot, now: u16, ages: &Ages) -> u64 {
        debug_assert!(place.class.is_big(), "the slot shares no block");
        let Some(claim) = self.claim_free(place, now, ages) else { return 0 };
        stats::add(Counter::PurgeScanned, claim.bytes().counted_bytes());
        let (first, blocks) = (self.arena.block_of(place.addr), place.class.span_blocks());
        if claim.bytes().is_offered {
            self.arena.discharge_taken(first, blocks);
        }
        // SAFETY: the slot is claimed and shares no block.
        let freed = unsafe { self.arena.discard(first, blocks) };
        let is_zero = (first..first + blocks).all(|block| self.arena.block_state(block).backing == Backing::Empty);
        self.restore(place, claim, SlotBytes { is_resident: !is_zero, is_zero, ..SlotBytes::default() });
        freed
    }

    /// Claims a slot if it is free and has one of these ages.
    fn claim_free(&self, place: LocatedSlot, now: u16, ages: &Ages) -> Option<SlotClaim> {
        if !self.is_free_with_age(place, now, ages) {
            return None;
        }
        let slot = self.slot(place.number);
        let claim = slot.try_claim()?;
        if claim.phase() != SlotPhase::Free {
            slot.restore(claim, claim.bytes());
            return None;
        }
        Some(claim)
    }

    /// Discards the free slots with these ages in a block of small pages, including parts that reach into the next
    /// block. `never_carved` says whether slots that were never allocated are also discarded. Returns the bytes freed.
    ///
    /// The block is measured once for all slots, because measuring it again for each slot takes longer.
    fn discard_free_parts(&self, span: Span, block: usize, now: u16, ages: &Ages, never_carved: NeverCarved) -> u64 {
        let indices = self.slots_of_block(span, block);
        let (first, count) = (indices.start, indices.len());
        let mut claims = Claims { first, count, claims: [None; MAX_SLOTS_PER_BLOCK] };
        let mut parts = [const { 0..0 }; MAX_SLOTS_PER_BLOCK];
        for index in indices {
            let place = self.any_slot_at(span, index);
            let head = self.arena.block_of(place.addr);
            let slot = self.slot(place.number);
            // Skip slots without memory: those that are neither resident nor possibly nonzero. A slot that straddles
            // two such blocks is handled with the block in which it starts.
            let may_hold = slot.bytes().is_resident || !slot.bytes().is_zero;
            let is_handled_here = may_hold && (head == block || self.arena.block_state(head).backing != Backing::Lazy);
            let claim = match never_carved {
                NeverCarved::Discard if slot.phase() == SlotPhase::None => slot.try_claim(),
                _ if is_handled_here => self.claim_free(place, now, ages),
                _ => None,
            };
            if claim.is_some() {
                parts[index - first] = self.whole_pages_in(place, block);
            }
            claims.claims[index - first] = claim;
        }
        let mut refused = [false; MAX_SLOTS_PER_BLOCK];
        // SAFETY: the slots are claimed, and the parts are whole OS pages of them inside the block.
        let discarded = unsafe { self.arena.discard_parts(block, &parts[..count], |at| refused[at] = true) };
        let mut freed = discarded.unwrap_or(0);
        for (index, claim) in claims.indexed_claims() {
            let place = self.any_slot_at(span, index);
            if claim.phase() != SlotPhase::Free {
                self.slot(place.number).restore(claim, claim.bytes());
                continue;
            }
            stats::add(Counter::PurgeScanned, claim.bytes().counted_bytes());
            let is_refused = &mut refused[index - first];
            let mut is_zero = self.has_whole_pages(place) && (discarded.is_some() || self.is_empty_block(block));
            for other in self.blocks_of(place).filter(|other| *other != block) {
                // SAFETY: the slot is claimed, and the part is whole OS pages of it inside the other block.
                let discarded = unsafe {
                    self.arena.discard_parts(other, &[self.whole_pages_in(place, other)], |_| *is_refused = true)
                };
                freed += discarded.unwrap_or(0);
                is_zero &= discarded.is_some() || self.is_empty_block(other);
            }
            // `is_zero` follows from what was discarded under the block's lock, because another thread may populate the
            // block now.
            let bytes = if *is_refused { SlotBytes::USED } else { SlotBytes { is_zero, ..SlotBytes::default() } };
            self.restore(place, claim, bytes);
        }
        freed
    }

    /// Returns whether a block has no memory, so that its pages read zero when they are touched next.
    fn is_empty_block(&self, block: usize) -> bool {
        self.arena.block_state(block).backing == Backing::Empty
    }

    /// Returns whether a slot starts and ends at boundaries of OS pages.
    fn has_whole_pages(&self, place: LocatedSlot) -> bool {
        [place.addr, place.class.bytes()].iter().all(|at| at.is_multiple_of(os_page_bytes()))
    }

    /// Returns the blocks into which a slot reaches.
    pub(super) fn blocks_of(&self, place: LocatedSlot) -> impl Iterator<Item = usize> + use<> {
        self.arena.block_of(place.addr)..=self.arena.block_of(place.addr + place.class.bytes() - 1)
    }

    /// Returns the addresses of those whole OS pages of a slot that lie inside a block; may be empty.
    fn whole_pages_in(&self, place: LocatedSlot, block: usize) -> Range<usize> {
        let (page, start) = (os_page_bytes(), self.arena.block_addr(block));
        let from = place.addr.next_multiple_of(page).max(start);
        let to = ((place.addr + place.class.bytes()) & !(page - 1)).min(start + BLOCK_BYTES);
        from..to.max(from)
    }

    /// Returns the indices, within the span, of the slots that reach into a block.
    pub(super) fn slots_of_block(&self, span: Span, block: usize) -> Range<usize> {
        let start = self.arena.block_addr(block) - span.start;
        let size = span.class.bytes();
        let indices = start / size..(start + BLOCK_BYTES).div_ceil(size);
        debug_assert!(indices.end <= span.class.span_slots(), "the block belongs to the span");
        debug_assert!(indices.len() <= MAX_SLOTS_PER_BLOCK);
        indices
    }

    /// Discards a whole block if no live slot reaches into it and its free slots all have these ages. Returns the bytes
    /// freed.
    fn purge_block(&self, span: Span, block: usize, now: u16, ages: &Ages) -> u64 {
        let is_due = |slot: &Slot| slot.phase() != SlotPhase::Free || ages.contains(&age_ticks(now, slot.stamp()));
        let Some(claims) = self.claim_block(span, block, is_due) else { return 0 };
        stats::add(Counter::PurgeScanned, BLOCK_BYTES as u64);
        if claims.iter().any(|claim| claim.bytes().is_offered) {
            self.arena.discharge_taken(block, 1);
        }
        self.discard_claimed_block(span, block, &claims)
    }

    /// Discards a block whose slots are all claimed, and ends the claims. Returns the bytes freed.
    pub(super) fn discard_claimed_block(&self, span: Span, block: usize, claims: &Claims) -> u64 {
        debug_assert!(self.slots_of_block(span, block) == (claims.first..claims.first + claims.count));
        // SAFETY: every slot that reaches into the block is claimed.
        let freed = unsafe { self.arena.discard(block, 1) };
        self.restore_claimed_slots(span, block, claims);
        freed
    }

    /// Ends the claims on the slots of a block. If the block was discarded, stores the new attributes of the slots'
    /// bytes.
    pub(super) fn restore_claimed_slots(&self, span: Span, block: usize, claims: &Claims) {
        // `is_emptied` does not follow from the bytes freed: discarding a block that was never touched frees no bytes,
        // either.
        let is_emptied = self.arena.block_state(block).backing == Backing::Empty;
        for (index, claim) in claims.indexed_claims() {
            let addr = span.start + index * span.class.bytes();
            let bytes =
                if is_emptied { self.bytes_after_discard(addr, span.class, claim.bytes()) } else { claim.bytes() };
            self.restore(self.any_slot_at(span, index), claim, bytes);
        }
    }

    /// Claims all slots that reach into a block, if none of them is live and all satisfy `is_due`.
    pub(super) fn claim_block(&self, span: Span, block: usize, is_due: impl Fn(&Slot) -> bool) -> Option<Claims> {
        self.claim_block_except(span, block, None, is_due)
    }

    /// As [`Heap::claim_block`], but does not claim the slot with the number `own`, which the caller has allocated.
    pub(super) fn claim_block_except(
        &self,
        span: Span,
        block: usize,
        own: Option<u32>,
        is_due: impl Fn(&Slot) -> bool,
    ) -> Option<Claims> {
        let indices = self.slots_of_block(span, block);
        let slot = |index| self.slot(self.slot_number_at(span, index));
        let is_own = |index| own == Some(self.slot_number_at(span, index));
        let may_go = |slot: &Slot| matches!(slot.phase(), SlotPhase::None | SlotPhase::Free) && is_due(slot);
        if !indices.clone().all(|index| is_own(index) || may_go(slot(index))) {
            return None;
        }
        let mut claims = Claims { first: indices.start, count: indices.len(), claims: [None; MAX_SLOTS_PER_BLOCK] };
        for index in indices.clone().filter(|index| !is_own(*index)) {
            claims.claims[index - indices.start] = slot(index).try_claim();
            if claims.claims[index - indices.start].is_none() {
                for (index, claim) in claims.indexed_claims() {
                    slot(index).restore(claim, claim.bytes());
                }
                return None;
            }
        }
        Some(claims)
    }

    /// Returns the slot with this index in a span, whether the slot was carved or not. The field `node` is not set.
    pub(super) fn any_slot_at(&self, span: Span, index: usize) -> LocatedSlot {
        debug_assert!(index < span.class.span_slots());
        let addr = span.start + index * span.class.bytes();
        LocatedSlot { number: self.slot_number_at(span, index), addr, class: span.class, node: 0 }
    }

    /// Returns the number of the slot with this index in a span.
    fn slot_number_at(&self, span: Span, index: usize) -> u32 {
        ((span.start + index * span.class.bytes() - self.base()) / super::class::GRANULE_BYTES) as u32
    }

    /// Returns the attributes of a slot's bytes after one of the blocks into which the slot reaches was discarded.
    pub(super) fn bytes_after_discard(&self, addr: usize, class: Class, bytes: SlotBytes) -> SlotBytes {
        let mut blocks = self.arena.block_of(addr)..=self.arena.block_of(addr + class.bytes() - 1);
        let is_empty = blocks.clone().all(|block| self.arena.block_state(block).backing == Backing::Empty);
        let is_backed = blocks.all(|block| self.arena.block_state(block).backing != Backing::Empty);
        SlotBytes {
            is_resident: is_backed && bytes.is_resident,
            is_zero: is_empty || bytes.is_zero,
            // Another block that the slot reaches into may still be offered.
            is_offered: !is_empty && bytes.is_offered,
            counted: 0,
        }
    }

    /// Splits up to `*splits` huge pages of a span in which free slots with these ages fill at least a quarter.
    /// Discards these slots and those that were never allocated. Returns `false` once enough is freed or no splits are
    /// left.
    fn split_span(&self, span: Span, now: u16, ages: &Ages, splits: &mut usize, target: &mut PurgeTarget) -> bool {
        let first = self.arena.block_of(span.start);
        for block in if span.class.is_big() { 0..0 } else { first..first + span.class.span_blocks() } {
            if self.arena.block_state(block).backing == Backing::Huge && self.is_worth_a_split(span, block, now, ages) {
                target.freed += self.split_block(span, block, now, ages);
                *splits -= 1;
            }
            if !target.is_unmet() || *splits == 0 {
                return false;
            }
        }
        true
    }

    /// Returns the slots that lie completely inside a block.
    fn slots_inside(&self, span: Span, block: usize) -> impl Iterator<Item = LocatedSlot> {
        let range = self.arena.block_addr(block)..self.arena.block_addr(block) + BLOCK_BYTES;
        let is_inside =
            move |place: &LocatedSlot| range.contains(&place.addr) && place.addr + place.class.bytes() <= range.end;
        self.slots_of_block(span, block).filter_map(move |index| self.carved_slot_at(span, index)).filter(is_inside)
    }

    /// Returns whether free slots with these ages fill enough of a huge page to split the page.
    fn is_worth_a_split(&self, span: Span, block: usize, now: u16, ages: &Ages) -> bool {
        let free = self.slots_inside(span, block).filter(|place| self.is_free_with_age(*place, now, ages));
        free.map(|place| place.class.bytes()).sum::<usize>() >= MIN_SPLIT_FREE_BYTES
    }

    /// Splits a huge page, and discards the free slots in it that have these ages. Returns the bytes freed.
    fn split_block(&self, span: Span, block: usize, now: u16, ages: &Ages) -> u64 {
        self.arena.split(block);
        let freed = self.discard_free_parts(span, block, now, ages, NeverCarved::Discard);
        trace::event(Event::Split, block as u64, freed);
        freed
    }
}
