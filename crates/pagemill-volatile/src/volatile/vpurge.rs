//! Purges memory that the program marked volatile by address, the least recently marked first, one piece at a time.
//!
//! A purge claims a piece in the `mark_table`, discards it without the table's lock, and records it as purged. Before
//! it discards any byte, it checks all mappings of the piece. If the kernel refuses a part nevertheless, the piece
//! counts as purged if any of it was discarded.
#![allow(unsafe_code)] // discards marked memory

use super::current_epoch;
use super::guards;
use super::listed::copy_items;
use super::mark_table::Mark;
use super::purge::{MAX_MEASURE_NS, note_purged};
use super::purge_queue::PurgeQueue;
use super::residents::ResidentBytes;
use super::vrange::{How, MAX_INTERVALS_PER_LOCK, Vranges};
use super::word::age;
use pagemill_core::arena::block::Backing;
use pagemill_core::reclaim::{Cost, Reason, Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::maps::Maps;
use pagemill_sys::{clock, mem};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Number of marked intervals that a measurement copies at a time while it holds the lock of the marks. It then queries
/// their pages without this lock.
const MEASURE_BATCH_LEN: usize = 64;

impl Shrinker for Vranges {
    fn name(&self) -> &'static str {
        "vranges"
    }

    fn cost(&self) -> Cost {
        Cost::Purge
    }

    fn may_nest(&self) -> bool {
        true
    }

    fn giveable_bytes(&self) -> u64 {
        self.giveable_bytes.load(Relaxed).saturating_sub(self.unfreeable_bytes.load(Relaxed))
    }

    fn foreign_bytes(&self) -> u64 {
        self.foreign_bytes.load(Relaxed).saturating_sub(self.unfreeable_foreign_bytes.load(Relaxed))
    }

    /// Frees nothing, because only pressure purges contents.
    fn shrink_aged(&self, _want_bytes: u64, _age: Duration) -> Option<u64> {
        Some(0)
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        self.shrink_for(want_bytes, urgency, Reason::Program)
    }

    fn shrink_for(&self, want_bytes: u64, urgency: Urgency, reason: Reason) -> u64 {
        if self.giveable_bytes.load(Relaxed) == 0 || reason.purge_counter().is_none() {
            return 0;
        }
        let mut queue = self.queue.lock();
        let Some(request) = self.new_request(urgency) else { return 0 };
        let purge = |addr, epoch| self.purge(&request, addr as usize, epoch, reason);
        queue.purge(want_bytes, purge, |queue| self.fill_queue(&request, queue))
    }

    /// Invalidates the last measurement, because the program may have accessed marked memory since.
    fn measure(&self) {
        self.set_unfreeable(0, 0);
    }
}

/// The parameters of one purge of marked memory.
struct PurgeRequest {
    maps: Maps,
    urgency: Urgency,
    may_purge_foreign: bool,
}

/// What a purge has discarded of a piece, which is a part of a marked interval.
#[derive(Clone, Copy)]
struct Discarded {
    /// Number of resident bytes that were freed; `None` if no byte of the piece was discarded.
    freed: Option<u64>,
    /// Whether all of the piece was discarded. If not, the kernel refused the rest.
    is_all: bool,
}

impl Vranges {
    /// Creates a request: opens the list of mappings (`/proc/self/maps`), and decides whether memory that Pagemill did
    /// not allocate may be purged. Returns `None` if the list cannot be read.
    fn new_request(&self, urgency: Urgency) -> Option<PurgeRequest> {
        // Without `/proc/self/maps` the kinds of mappings are unknown. Then nothing is purged.
        let maps = Maps::open().ok()?;
        // Purging foreign memory helps the kernel's limits, but not the limit of the account, which does not count
        // foreign memory.
        let may_purge_foreign = !self.account.is_limited() || self.account.headroom.is_short(0).is_some();
        Some(PurgeRequest { maps, urgency, may_purge_foreign })
    }

    /// Measures the bytes that a purge of all marked memory would free: the resident pages of marked memory that can be
    /// purged. The next mark or unmark invalidates the result.
    pub fn measure_now(&self) {
        self.set_unfreeable(0, 0);
        if self.giveable_bytes.load(Relaxed) == 0 {
            return;
        }
        let Some(request) = self.new_request(Urgency::Request) else { return };
        let until_ns = clock::fine_ns() + MAX_MEASURE_NS;
        let (mut own, mut foreign) = (ResidentBytes::new(until_ns), ResidentBytes::new(until_ns));
        let (mut from, mut intervals) = (0, [const { None }; MEASURE_BATCH_LEN]);
        loop {
            let count = self.table.with(|table| {
                let generation = table.generation;
                let found = table.marks.from(from);
                copy_items(
                    &mut intervals,
                    found.map(|(range, mark)| Some((range, mark, mark.is_claimable(generation)))),
                )
            });
            for (range, mark, is_claimable) in intervals[..count].iter_mut().filter_map(Option::take) {
                from = range.end;
                let mut left = if is_claimable { range } else { 0..0 };
                while !left.is_empty() {
                    let piece = mark.next_purged_piece(&left);
                    left.end = piece.start;
                    // Before Linux 6.11 finding the mappings takes long, so the check is skipped after the time limit.
                    if clock::fine_ns() > until_ns || self.can_purge_all(&request, &piece, mark.is_strict) {
                        let of = if self.arena.contains(piece.start) { &mut own } else { &mut foreign };
                        of.add(piece.start, piece.len() as u64);
                    }
                }
            }
            if count < MEASURE_BATCH_LEN {
                break;
            }
        }
        let (all, of_others) = (self.giveable_bytes.load(Relaxed), self.foreign_bytes.load(Relaxed));
        let found = own.bytes().saturating_add(foreign.bytes());
        self.set_unfreeable(all.saturating_sub(found), of_others.saturating_sub(foreign.bytes()));
    }

    /// Stores how many marked bytes a purge would not free: in total, and in foreign memory (memory that Pagemill did
    /// not allocate). Also updates the published statistics.
    pub(super) fn set_unfreeable(&self, bytes: u64, foreign_bytes: u64) {
        self.unfreeable_bytes.store(bytes, Relaxed);
        self.unfreeable_foreign_bytes.store(foreign_bytes, Relaxed);
        stats::set(Counter::MarkedGiveable, self.giveable_bytes());
        stats::set(Counter::MarkedForeign, Shrinker::foreign_bytes(self));
    }

    /// Walks all marks to fill the purge queue.
    fn fill_queue(&self, request: &PurgeRequest, queue: &mut PurgeQueue) {
        let (now, mut from) = (current_epoch(), Some(0));
        while let Some(start) = from {
            from = self.table.with(|table| {
                let mut last = None;
                for (range, mark) in table.marks.from(start).take(MAX_INTERVALS_PER_LOCK) {
                    if mark.is_claimable(table.generation)
                        && (request.may_purge_foreign || self.arena.contains(range.start))
                    {
                        queue.add(age(now, mark.epoch), mark.epoch, range.start as u64);
                    }
                    last = Some(range.end);
                }
                last
            });
        }
    }

    /// Purges the interval that begins at `addr`, or its last chunk, unless the interval was marked again or unmarked
    /// after `epoch`. Returns the bytes that the kernel took; `None` if nothing was purged.
    fn purge(&self, request: &PurgeRequest, addr: usize, epoch: u32, reason: Reason) -> Option<u64> {
        let mut freed = None;
        loop {
            let Some((piece, mark)) = self.claim(addr, epoch) else { return freed };
            let taken = self.discard(request, &piece, mark.is_strict);
            self.finish(addr, &piece, mark, taken);
            if let Some(bytes) = taken.freed {
                note_purged(piece.start, piece.len(), reason);
                freed = Some(freed.unwrap_or(0) + bytes);
            }
            if mark.how == How::Partial || piece.start == addr || !taken.is_all {
                return freed;
            }
        }
    }

    /// Claims the last piece of the interval that begins at `addr`, for a purge. Returns `None` if the interval has
    /// changed or cannot be claimed, or if a thread waits for the end of another claim.
    fn claim(&self, addr: usize, epoch: u32) -> Option<(Range<usize>, Mark)> {
        self.table.with(|table| {
            let (range, mark) = table.marks.from(addr).next()?;
            let is_claimable = table.waiting == 0 && mark.is_claimable(table.generation);
            if range.start != addr || mark.epoch != epoch || !is_claimable {
                return None;
            }
            let piece = mark.next_purged_piece(&range);
            table.claim(&range, &piece, mark).ok()?;
            Some((piece, mark))
        })
    }

    /// Ends the claim on a piece of the interval that begins at `addr`, and records the result of its purge.
    fn finish(&self, addr: usize, piece: &Range<usize>, mark: Mark, taken: Discarded) {
        let (has_gone, is_all) = (taken.freed.is_some(), taken.is_all);
        let after = Mark {
            // After a refusal the piece counts as marked now, so that other ranges are tried first.
            epoch: if is_all { mark.epoch } else { current_epoch() },
            is_purged: mark.is_purged || has_gone,
            is_empty: is_all,
            is_guarded: mark.is_guarded || mark.is_strict && has_gone,
            ..mark
        };
        self.table.with(|table| {
            debug_assert!(table.claimed > 0, "the piece is claimed");
            table.claimed -= 1;
            table.change(piece, after);
            let before = table.marks.overlapping(piece.start.saturating_sub(1)..piece.start).next();
            // The rest of the interval before the piece, if the rest was not marked or unmarked since.
            let head = before.filter(|(head, found)| (head.start, head.end) == (addr, piece.start) && *found == mark);
            if let Some((head, _)) = head {
                if !has_gone {
                    table.join(head.start..piece.end, after);
                } else if mark.how == How::Partial || !is_all {
                    table.change(&head, Mark { epoch: current_epoch(), ..mark });
                }
            }
            // Merge the piece with the next one, which was purged before, so that a purge leaves one interval.
            let next = table.marks.from(piece.end).next();
            if let Some((next, _)) = next.filter(|(next, other)| next.start == piece.end && is_all && *other == after) {
                table.join(piece.start..next.end, after);
            }
            self.publish_sums(table);
        });
    }

    /// Discards the pages of a claimed piece. For a strict mark, also installs guards on them.
    fn discard(&self, request: &PurgeRequest, piece: &Range<usize>, is_strict: bool) -> Discarded {
        let (mut at, mut freed) = (piece.start, None);
        if !self.can_purge_all(request, piece, is_strict) {
            return Discarded { freed, is_all: false };
        }
        while at < piece.end {
            let part = self.next_part(request, at, piece.end);
            at = part.end;
            let mut discard = |part: Range<usize>| {
                let bytes = match self.arena.contains(part.start) {
                    true => self.discard_arena_part(part, request.urgency),
                    false => discard_foreign(part),
                }?;
                freed = Some(freed.unwrap_or(0) + bytes);
                Some(())
            };
            let result = match is_strict {
                // SAFETY: the piece is claimed, and all of it is private memory that can be read and written.
                true => unsafe { guards::purge_and_guard(part, discard) },
                false => discard(part),
            };
            if result.is_none() {
                return Discarded { freed, is_all: false };
            }
        }
        // Pages that have guards count as discarded, although nothing is left to free.
        Discarded { freed: freed.or(Some(0)), is_all: true }
    }

    /// Returns whether all of the piece can be purged, as far as its mappings and the arena show.
    fn can_purge_all(&self, request: &PurgeRequest, piece: &Range<usize>, is_strict: bool) -> bool {
        let mut at = piece.start;
        while at < piece.end {
            let Ok(Some(mapping)) = request.maps.find(at) else { return false };
            // A strict purge closes memory and opens it again without the right to execute.
            let is_open = mapping.is_readable && mapping.is_writable && !(is_strict && mapping.is_executable);
            let is_plain = is_open && !mapping.is_shared && !mapping.has_file;
            if mapping.addresses.start > at || !is_plain || mapping.is_stack {
                return false;
            }
            at = mapping.addresses.end;
        }
        let own = self.arena.addresses();
        let (from, to) = (piece.start.max(own.start), piece.end.min(own.end));
        if from >= to {
            return request.may_purge_foreign;
        }
        // Of the arena only heap memory is purged. A part of a huge page is purged only when a limit is reached,
        // because the page must be split first.
        let is_huge = |addr: usize| self.arena.block_state(self.arena.block_of(addr)).backing == Backing::Huge;
        let is_part = |addr: usize| !addr.is_multiple_of(BLOCK_BYTES);
        let splits = is_part(from) && is_huge(from) || is_part(to) && is_huge(to - 1);
        let is_one = own.contains(&piece.start) && own.contains(&(piece.end - 1));
        is_one && self.arena.heap.contains(from) && (!splits || request.urgency == Urgency::Limit)
    }

    /// Returns the part of a piece, starting at `at`, that one system call discards. The part lies inside one mapping,
    /// because the kernel discards or refuses a mapping as a whole. A part in the arena also lies inside one block.
    fn next_part(&self, request: &PurgeRequest, at: usize, end: usize) -> Range<usize> {
        let mapping_end = match request.maps.find(at) {
            Ok(Some(mapping)) if mapping.addresses.contains(&at) => mapping.addresses.end,
            _ => at + os_page_bytes(),
        };
        let block_end = if self.arena.contains(at) { (at & !(BLOCK_BYTES - 1)) + BLOCK_BYTES } else { end };
        at..end.min(mapping_end).min(block_end)
    }

    /// As [`Vranges::discard`], for a part of one block of the arena. Returns the bytes that the kernel took; `None` if
    /// the kernel refused, or if a huge page may not be split now.
    fn discard_arena_part(&self, part: Range<usize>, urgency: Urgency) -> Option<u64> {
        let block = self.arena.block_of(part.start);
        if part.len() == BLOCK_BYTES {
            // SAFETY: the block is claimed, and the program does not need its contents (contract of `vrange`).
            return unsafe { self.arena.discard_and_reopen(block, 1) };
        }
        if self.arena.block_state(block).backing == Backing::Huge {
            if urgency < Urgency::Limit {
                return None;
            }
            self.arena.split(block);
        }
        // SAFETY: as above; these are whole OS pages of one block.
        unsafe { self.arena.discard_part(block, part.start, part.len()) }
    }
}

/// Discards private anonymous pages outside the arena. Returns the bytes that were resident; `None` if the kernel
/// refused.
fn discard_foreign(part: Range<usize>) -> Option<u64> {
    let bytes = mem::resident_bytes(part.start, part.len()).ok()?;
    if !part.start.is_multiple_of(BLOCK_BYTES) || !part.end.is_multiple_of(BLOCK_BYTES) {
        // `MADV_COLD` splits a huge page that is partly in the range. Otherwise discarding the part would free nothing.
        let _ = mem::cool(part.start, part.len());
    }
    // SAFETY: the part is claimed. The program does not need its contents and has no reference to it (contract of
    // `vrange`).
    unsafe { mem::discard(part.start, part.len()) }.ok()?;
    Some(bytes as u64)
}
