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

/// All ages that a slot's time stamp can express, in ticks.
const ALL_TICKS: Range<u32> = 0..1 << 16;
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

/// A range of ages at the time `now`. The age of a slot is the number of ticks since it was freed.
struct Ages {
    now: u16,
    ticks: Range<u32>,
}

impl Ages {
    fn contain(&self, slot: &Slot) -> bool {
        self.ticks.contains(&age_ticks(self.now, slot))
    }

    fn contain_free(&self, slot: &Slot) -> bool {
        slot.phase() == SlotPhase::Free && self.contain(slot)
    }
}

/// Returns the age of a freed slot in ticks.
fn age_ticks(now: u16, slot: &Slot) -> u32 {
    u32::from(now.wrapping_sub(slot.stamp()))
}

/// Returns the age group of a freed slot: the number of significant bits of its age in ticks.
pub(super) fn age_group(now: u16, slot: &Slot) -> usize {
    (u32::BITS - age_ticks(now, slot).leading_zeros()) as usize
}

/// Returns the ages, in ticks, that belong to an age group.
fn ticks_in_group(group: usize) -> Range<u32> {
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
        let ages = Ages { now: super::current_stamp(), ticks: ALL_TICKS };
        let mut target = PurgeTarget { bytes: want_bytes, freed: 0, largest_bytes: u64::MAX, splits_left: usize::MAX };
        if urgency == Urgency::Request {
            self.purge_oldest(&ages, &mut target);
        } else if self.spans().all(|span| self.purge_span(span, &ages, &mut target)) {
            self.spans().all(|span| self.split_span(span, &ages, &mut target));
        }
        stats::add(Counter::PurgeFreed, target.freed);
        stats::set(Counter::HeapFree, self.free_bytes());
        target.freed
    }

    /// Purges free memory of at least this age, the oldest first: whole blocks, then parts of huge pages by splitting
    /// the huge pages.
    fn shrink_aged(&self, want_bytes: u64, age: Duration) -> Option<u64> {
        let ticks = age.as_nanos().div_ceil(1 << TICK_SHIFT).min(1 << 15);
        // Allocations call `shrink_aged`, too, when new memory becomes resident, and must not wait for another purge.
        let Some(_guard) = self.purging.try_lock() else { return Some(0) };
        let ages = Ages { now: super::current_stamp(), ticks: ticks as u32..ALL_TICKS.end };
        // Memory of any age may be reused soon. So do not purge a slot that is larger than the bytes wanted.
        let largest_bytes = if age.is_zero() { want_bytes } else { u64::MAX };
        let mut target = PurgeTarget { bytes: want_bytes, freed: 0, largest_bytes, splits_left: MAX_AGED_SPLITS };
        self.purge_oldest(&ages, &mut target);
        if target.is_unmet() && age >= MIN_SPLIT_AGE {
            self.spans().all(|span| self.split_span(span, &ages, &mut target));
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
        self.arena.reconcile(self.arena.block_of(self.base()), self.carved_blocks());
        self.arena.reconcile_extents();
    }
}

/// A purge's claims on slots that reach into a block, in the order of their addresses.
pub(super) type Claims = [Option<(LocatedSlot, SlotClaim)>; MAX_SLOTS_PER_BLOCK];

/// Returns whether any of the claimed slots is offered to the kernel.
pub(super) fn is_any_offered(claims: &Claims) -> bool {
    claims.iter().flatten().any(|(_, claim)| claim.bytes().is_offered)
}

/// The number of bytes that a purge should free, and its progress.
struct PurgeTarget {
    /// Bytes that the purge should free.
    bytes: u64,
    /// Bytes freed so far.
    freed: u64,
    /// Big slots with more resident bytes than this are skipped.
    largest_bytes: u64,
    /// Number of huge pages that may still be split.
    splits_left: usize,
}

impl PurgeTarget {
    /// Whether more bytes must be freed.
    fn is_unmet(&self) -> bool {
        self.freed < self.bytes
    }
}

impl Heap {
    /// Returns the spans of the heap.
    pub(super) fn spans(&self) -> impl Iterator<Item = Span> {
        self.spans_in(0..self.carved_blocks())
    }

    /// Number of blocks of the heap zone that were carved.
    pub(super) fn carved_blocks(&self) -> usize {
        self.arena.heap.carved_bytes() / BLOCK_BYTES
    }

    /// As [`Heap::spans`], for the spans that start in these blocks of the zone.
    pub(super) fn spans_in(&self, mut blocks: Range<usize>) -> impl Iterator<Item = Span> {
        std::iter::from_fn(move || {
            // Blocks without the start of a span were skipped to align the next span.
            let class_in = |block| Class::from_index((self.spans.get(block).load(Relaxed) as usize).checked_sub(1)?);
            let (block, class) = blocks.find_map(|block| Some((block, class_in(block)?)))?;
            blocks.start = block + class.span_blocks();
            debug_assert!(blocks.start <= blocks.end, "walks end between spans");
            Some(Span { start: self.base() + block * BLOCK_BYTES, class })
        })
    }

    /// Returns the blocks of a span.
    pub(super) fn blocks_of_span(&self, span: Span) -> Range<usize> {
        let first = self.arena.block_of(span.start);
        first..first + span.class.span_blocks()
    }

    /// Returns the slot with this index in a span; `None` if the slot was never carved.
    pub(super) fn carved_slot_at(&self, span: Span, index: usize) -> Option<LocatedSlot> {
        let any = self.any_slot_at(span, index);
        self.locate(any.number).filter(|place| place.addr == any.addr)
    }

    /// Returns the slots of a span that were carved.
    pub(super) fn carved_slots(&self, span: Span) -> impl Iterator<Item = LocatedSlot> {
        (0..span.class.span_slots()).filter_map(move |index| self.carved_slot_at(span, index))
    }

    /// Purges free slots with these ages, the oldest age groups first, until the target is met.
    fn purge_oldest(&self, ages: &Ages, target: &mut PurgeTarget) {
        debug_assert!(self.purging.is_held());
        let [older, last] = self.ages_to_purge(ages, target.bytes);
        if self.spans().all(|span| self.purge_span(span, &older, target)) {
            self.spans().all(|span| self.purge_span(span, &last, target));
        }
    }

    /// Returns two ranges of ages. To free `want_bytes`, all free slots in the first range and a part of the free slots
    /// in the second range, the next younger age group, must be purged.
    fn ages_to_purge(&self, ages: &Ages, want_bytes: u64) -> [Ages; 2] {
        let mut bytes_by_group = [0u64; AGE_GROUPS];
        for place in self.spans().flat_map(|span| self.carved_slots(span)) {
            let slot = self.slot(place.number);
            if ages.contain_free(slot) {
                bytes_by_group[age_group(ages.now, slot)] += slot.bytes().counted_bytes();
            }
        }
        let mut sum = 0;
        let last = (0..AGE_GROUPS).rev().find(|group| {
            sum += bytes_by_group[*group];
            sum >= want_bytes
        });
        let last = last.map_or(0..0, ticks_in_group);
        [last.end..ALL_TICKS.end, last]
            .map(|part| Ages { now: ages.now, ticks: part.start.max(ages.ticks.start)..part.end.min(ages.ticks.end) })
    }

    /// Purges the free slots with these ages in a span. Returns whether more bytes are wanted.
    fn purge_span(&self, span: Span, ages: &Ages, target: &mut PurgeTarget) -> bool {
        if span.class.is_big() {
            if let Some(place) = self.carved_slot_at(span, 0)
                && self.slot(place.number).bytes().counted_bytes() <= target.largest_bytes
            {
                target.freed += self.purge_big_slot(place, ages);
            }
            return target.is_unmet();
        }
        self.blocks_of_span(span).all(|block| {
            let backing = self.arena.block_state(block).backing;
            if matches!(backing, Backing::Huge | Backing::Lazy) {
                // Discard the whole block if possible, so that it can become a huge page again.
                target.freed += self.purge_block(span, block, ages);
            }
            if backing == Backing::Lazy && !self.is_empty_block(block) {
                target.freed += self.discard_free_parts(span, block, ages, NeverCarved::Keep);
            }
            target.is_unmet()
        })
    }

    /// Purges a big slot if it is free and has one of these ages. Returns the bytes freed.
    fn purge_big_slot(&self, place: LocatedSlot, ages: &Ages) -> u64 {
        debug_assert!(place.class.is_big(), "the slot shares no block");
        let Some(claim) = self.claim_free(place, ages) else { return 0 };
        stats::add(Counter::PurgeScanned, claim.bytes().counted_bytes());
        let blocks = self.blocks_of(place);
        if claim.bytes().is_offered {
            self.arena.discharge_taken(blocks.start, blocks.len());
        }
        // SAFETY: the slot is claimed and shares no block.
        let freed = unsafe { self.arena.discard(blocks.start, blocks.len()) };
        self.restore(place, claim, self.bytes_of_emptied(blocks));
        freed
    }

    /// Returns the attributes of the bytes of a big slot in these blocks, after memory of the blocks was removed.
    pub(super) fn bytes_of_emptied(&self, mut blocks: Range<usize>) -> SlotBytes {
        let is_zero = blocks.all(|block| self.is_empty_block(block));
        SlotBytes { is_resident: !is_zero, is_zero, ..SlotBytes::default() }
    }

    /// Claims a slot if it is free and has one of these ages.
    fn claim_free(&self, place: LocatedSlot, ages: &Ages) -> Option<SlotClaim> {
        let slot = self.slot(place.number);
        if ages.contain_free(slot) { slot.try_claim_free() } else { None }
    }

    /// Discards the free slots with these ages in a block of small pages, including parts that reach into the next
    /// block. `never_carved` says whether slots that were never allocated are also discarded. Returns the bytes freed.
    ///
    /// The block is measured once for all slots, because measuring it again for each slot takes longer.
    fn discard_free_parts(&self, span: Span, block: usize, ages: &Ages, never_carved: NeverCarved) -> u64 {
        let mut claims: Claims = [None; MAX_SLOTS_PER_BLOCK];
        let mut parts = [const { 0..0 }; MAX_SLOTS_PER_BLOCK];
        for (at, place) in self.slots_of_block(span, block).enumerate() {
            let slot = self.slot(place.number);
            let head = self.arena.block_of(place.addr);
            // Skip slots without memory: those that are neither resident nor possibly nonzero. A slot that straddles
            // two such blocks is handled with the block in which it starts.
            let may_hold = slot.bytes().is_resident || !slot.bytes().is_zero;
            let is_handled_here = may_hold && (head == block || self.arena.block_state(head).backing != Backing::Lazy);
            let claim = match never_carved {
                NeverCarved::Discard if slot.phase() == SlotPhase::None => slot.try_claim(),
                _ if is_handled_here => self.claim_free(place, ages),
                _ => None,
            };
            if let Some(claim) = claim {
                parts[at] = self.whole_pages_in(place, block);
                claims[at] = Some((place, claim));
            }
        }
        let mut refused = [false; MAX_SLOTS_PER_BLOCK];
        // SAFETY: the slots are claimed, and the parts are whole OS pages of them inside the block.
        let discarded = unsafe { self.arena.discard_parts(block, &parts, |at| refused[at] = true) };
        let mut freed = discarded.unwrap_or(0);
        for (claim, is_refused) in claims.into_iter().zip(&mut refused) {
            let Some((place, claim)) = claim else { continue };
            if claim.phase() != SlotPhase::Free {
                self.slot(place.number).release(claim);
                continue;
            }
            stats::add(Counter::PurgeScanned, claim.bytes().counted_bytes());
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
    pub(super) fn is_empty_block(&self, block: usize) -> bool {
        self.arena.block_state(block).backing == Backing::Empty
    }

    /// Returns whether a slot starts and ends at boundaries of OS pages.
    fn has_whole_pages(&self, place: LocatedSlot) -> bool {
        [place.addr, place.class.bytes()].iter().all(|at| at.is_multiple_of(os_page_bytes()))
    }

    /// Returns whether a block is overcommitted, and no page of it is known to be resident.
    pub(super) fn is_untouched_block(&self, block: usize) -> bool {
        let state = self.arena.block_state(block);
        state.backing == Backing::Lazy && state.charged_pages == 0
    }

    /// Returns the blocks into which a slot reaches.
    pub(super) fn blocks_of(&self, place: LocatedSlot) -> Range<usize> {
        self.arena.block_of(place.addr)..self.arena.block_of(place.addr + place.class.bytes() - 1) + 1
    }

    /// Returns the addresses of those whole OS pages of a slot that lie inside a block; may be empty.
    fn whole_pages_in(&self, place: LocatedSlot, block: usize) -> Range<usize> {
        let (page, start) = (os_page_bytes(), self.arena.block_addr(block));
        let from = place.addr.next_multiple_of(page).max(start);
        let to = ((place.addr + place.class.bytes()) & !(page - 1)).min(start + BLOCK_BYTES);
        from..to.max(from)
    }

    /// Returns the slots that reach into a block of a span, carved or not. Their fields `node` are not set.
    pub(super) fn slots_of_block(&self, span: Span, block: usize) -> impl Iterator<Item = LocatedSlot> + Clone {
        let start = self.arena.block_addr(block) - span.start;
        let size = span.class.bytes();
        let indices = start / size..(start + BLOCK_BYTES).div_ceil(size);
        debug_assert!(indices.end <= span.class.span_slots(), "the block belongs to the span");
        debug_assert!(indices.len() <= MAX_SLOTS_PER_BLOCK);
        indices.map(move |index| self.any_slot_at(span, index))
    }

    /// Discards a whole block if no live slot reaches into it and its free slots all have these ages. Returns the bytes
    /// freed.
    fn purge_block(&self, span: Span, block: usize, ages: &Ages) -> u64 {
        let is_due = |slot: &Slot| slot.phase() != SlotPhase::Free || ages.contain(slot);
        let Some(claims) = self.claim_block(span, block, is_due) else { return 0 };
        stats::add(Counter::PurgeScanned, BLOCK_BYTES as u64);
        if is_any_offered(&claims) {
            self.arena.discharge_taken(block, 1);
        }
        self.discard_claimed_block(block, &claims)
    }

    /// Discards a block whose slots are all claimed, and ends the claims. Returns the bytes freed.
    pub(super) fn discard_claimed_block(&self, block: usize, claims: &Claims) -> u64 {
        debug_assert!(claims.iter().flatten().all(|(place, _)| self.blocks_of(*place).contains(&block)));
        // SAFETY: every slot that reaches into the block is claimed.
        let freed = unsafe { self.arena.discard(block, 1) };
        self.restore_claimed_slots(block, claims);
        freed
    }

    /// Ends the claims on the slots of a block. If the block was discarded, stores the new attributes of the slots'
    /// bytes.
    pub(super) fn restore_claimed_slots(&self, block: usize, claims: &Claims) {
        // `is_emptied` does not follow from the bytes freed: discarding a block that was never touched frees no bytes,
        // either.
        let is_emptied = self.is_empty_block(block);
        for (place, claim) in claims.iter().flatten().copied() {
            let bytes = if is_emptied { self.bytes_after_discard(place, claim.bytes()) } else { claim.bytes() };
            self.restore(place, claim, bytes);
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
        let may_go = |slot: &Slot| matches!(slot.phase(), SlotPhase::None | SlotPhase::Free) && is_due(slot);
        let places = self.slots_of_block(span, block).filter(|place| own != Some(place.number));
        if !places.clone().all(|place| may_go(self.slot(place.number))) {
            return None;
        }
        let mut claims: Claims = [None; MAX_SLOTS_PER_BLOCK];
        for (at, place) in places.enumerate() {
            claims[at] = self.slot(place.number).try_claim().map(|claim| (place, claim));
            if claims[at].is_none() {
                claims.iter().flatten().for_each(|(place, claim)| self.slot(place.number).release(*claim));
                return None;
            }
        }
        Some(claims)
    }

    /// Returns the slot with this index in a span, whether the slot was carved or not. The field `node` is not set.
    fn any_slot_at(&self, span: Span, index: usize) -> LocatedSlot {
        debug_assert!(index < span.class.span_slots());
        let addr = span.start + index * span.class.stride();
        let number = ((addr - self.base()) / super::class::GRANULE_BYTES) as u32;
        LocatedSlot { number, addr, class: span.class, node: 0 }
    }

    /// Returns the attributes of a slot's bytes after one of the blocks into which the slot reaches was discarded.
    pub(super) fn bytes_after_discard(&self, place: LocatedSlot, bytes: SlotBytes) -> SlotBytes {
        let is_empty = self.blocks_of(place).all(|block| self.is_empty_block(block));
        let is_backed = !self.blocks_of(place).any(|block| self.is_empty_block(block));
        SlotBytes {
            is_resident: is_backed && bytes.is_resident,
            is_zero: is_empty || bytes.is_zero,
            // Another block that the slot reaches into may still be offered.
            is_offered: !is_empty && bytes.is_offered,
            counted: 0,
        }
    }

    /// Splits up to `target.splits_left` huge pages of a span in which free slots with these ages fill at least a
    /// quarter. Discards these slots and those that were never allocated. Returns `false` once enough is freed or no
    /// splits are left.
    fn split_span(&self, span: Span, ages: &Ages, target: &mut PurgeTarget) -> bool {
        span.class.is_big()
            || self.blocks_of_span(span).all(|block| {
                let is_huge = self.arena.block_state(block).backing == Backing::Huge;
                if is_huge && self.is_worth_a_split(span, block, ages) {
                    self.arena.split(block);
                    let freed = self.discard_free_parts(span, block, ages, NeverCarved::Discard);
                    trace::event(Event::Split, block as u64, freed);
                    target.freed += freed;
                    target.splits_left -= 1;
                }
                target.is_unmet() && target.splits_left > 0
            })
    }

    /// Returns whether free slots with these ages fill enough of a huge page to split the page. Counts only slots that
    /// lie completely inside the block.
    fn is_worth_a_split(&self, span: Span, block: usize, ages: &Ages) -> bool {
        let is_inside = |place: &LocatedSlot| self.blocks_of(*place) == (block..block + 1);
        let is_free = |place: &LocatedSlot| ages.contain_free(self.slot(place.number));
        let free = self.slots_of_block(span, block).filter(is_inside).filter(is_free);
        free.map(|place| place.class.bytes()).sum::<usize>() >= MIN_SPLIT_FREE_BYTES
    }
}
