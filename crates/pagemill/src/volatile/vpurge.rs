//! Purging a program's own memory that it marked: the least recently marked first, piece by piece.
//!
//! A piece is claimed in the book, given back without the book's lock, and entered as gone. Before a byte goes all of the
//! piece is looked at: what is mapped there, and whether it can go. Where the kernel refuses a part nevertheless, the piece
//! counts as purged if anything of it went.
#![allow(unsafe_code)] // gives marked memory back

use super::book::Mark;
use super::guards::{self, Refused};
use super::line::Oldest;
use super::now;
use super::purge::note_purged;
use super::vrange::{AT_A_TIME, How, Vranges};
use super::word::age;
use crate::arena::block::Backing;
use crate::reclaim::{Shrinker, Urgency};
use crate::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::maps::Maps;
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

impl Shrinker for Vranges {
    fn name(&self) -> &'static str {
        "vranges"
    }

    fn may_nest(&self) -> bool {
        true
    }

    fn giveable_bytes(&self) -> u64 {
        self.giveable_bytes.load(Relaxed)
    }

    fn foreign_bytes(&self) -> u64 {
        self.foreign_bytes.load(Relaxed)
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        if self.giveable_bytes() == 0 {
            return 0;
        }
        let _guard = self.purging.lock();
        // Without it nobody knows what may be purged.
        let Ok(maps) = Maps::open() else { return 0 };
        // A limit of ours is not helped by memory that it does not count.
        let takes_foreign = !self.account.is_limited() || self.account.headroom.is_short(0).is_some();
        let pass = Pass { maps, urgency, takes_foreign };
        let purge = |addr, epoch| self.purge(&pass, addr as usize, epoch);
        self.line.purge(want_bytes, purge, || self.look_for_oldest(&pass))
    }
}

/// What holds for one request.
struct Pass {
    maps: Maps,
    urgency: Urgency,
    takes_foreign: bool,
}

/// What became of a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// All of it is there.
    Nothing,
    /// Some of it went before the kernel refused the rest.
    Some {
        bytes: u64,
    },
    All {
        bytes: u64,
    },
}

impl Vranges {
    /// Walks all marks for the line. Returns its length.
    fn look_for_oldest(&self, pass: &Pass) -> usize {
        let (now, mut oldest, mut from) = (now(), Oldest::new(), 0);
        loop {
            let last = self.book.with(|book| {
                let mut last = None;
                for (range, mark) in book.marks.from(from).take(AT_A_TIME) {
                    if mark.is_claimable(book.generation) && (pass.takes_foreign || self.arena.contains(range.start)) {
                        oldest.offer(age(now, mark.epoch), mark.epoch, range.start as u64);
                    }
                    last = Some(range.end);
                }
                last
            });
            match last {
                Some(end) => from = end,
                None => break,
            }
        }
        self.line.set(&mut oldest)
    }

    /// Purges the interval that begins at `addr`, or its last chunk, if it is still marked since that epoch. Returns what
    /// the kernel took; `None` if nothing went.
    fn purge(&self, pass: &Pass, addr: usize, epoch: u32) -> Option<u64> {
        let mut freed = None;
        loop {
            let Some((piece, mark)) = self.claim(addr, epoch) else { return freed };
            let taken = self.discard(pass, &piece, mark.is_strict);
            self.finish(addr, &piece, mark, taken);
            match taken {
                Taken::All { bytes } | Taken::Some { bytes } => freed = Some(freed.unwrap_or(0) + bytes),
                Taken::Nothing => {}
            }
            let is_done = mark.how == How::Partial || piece.start == addr;
            if is_done || !matches!(taken, Taken::All { .. }) {
                return freed;
            }
        }
    }

    /// Takes a piece of an interval out of the program's reach; `None` while somebody waits for the last one.
    fn claim(&self, addr: usize, epoch: u32) -> Option<(Range<usize>, Mark)> {
        self.book.with(|book| {
            let (range, mark) = book.marks.from(addr).next()?;
            let is_claimable = book.waiting == 0 && mark.is_claimable(book.generation);
            if range.start != addr || mark.epoch != epoch || !is_claimable {
                return None;
            }
            let piece = mark.next_piece(&range);
            book.claim(&range, &piece, mark).ok()?;
            Some((piece, mark))
        })
    }

    /// Ends a claim on a piece of the interval that began at `addr`.
    fn finish(&self, addr: usize, piece: &Range<usize>, mark: Mark, taken: Taken) {
        let is_all = matches!(taken, Taken::All { .. });
        let after = Mark {
            // Where the kernel refused, others have their turn first; so they have after a chunk.
            epoch: if is_all { mark.epoch } else { now() },
            is_purged: mark.is_purged || taken != Taken::Nothing,
            is_empty: is_all,
            is_guarded: mark.is_guarded || mark.is_strict && taken != Taken::Nothing,
            ..mark
        };
        self.book.with(|book| {
            book.claimed -= 1;
            book.change(piece, after);
            let before = book.marks.overlapping(piece.start.saturating_sub(1)..piece.start).next();
            // What the claim has left of its interval, if nobody has changed that since.
            let head = before.filter(|(head, found)| (head.start, head.end) == (addr, piece.start) && *found == mark);
            match (head, taken) {
                (Some((head, _)), Taken::Nothing) => book.join(head.start..piece.end, after),
                (Some((head, _)), _) if mark.how == How::Partial || !is_all => {
                    book.change(&head, Mark { epoch: now(), ..mark });
                }
                _ => {}
            }
            // The steps of a purge leave one interval.
            let next = book.marks.from(piece.end).next();
            if let Some((next, _)) = next.filter(|(next, other)| next.start == piece.end && is_all && *other == after) {
                book.join(piece.start..next.end, after);
            }
            self.tell(book);
        });
        if taken != Taken::Nothing {
            note_purged(piece.start, piece.len());
        }
    }

    /// Gives the pages of a claimed piece back, and guards their places where that is asked for.
    fn discard(&self, pass: &Pass, piece: &Range<usize>, is_strict: bool) -> Taken {
        if !self.may_all_go(pass, piece, is_strict) {
            return Taken::Nothing;
        }
        let (mut at, mut freed, mut is_begun) = (piece.start, 0, false);
        while at < piece.end {
            let part = self.next_part(pass, at, piece.end);
            at = part.end;
            let discard = |part: Range<usize>| match self.arena.contains(part.start) {
                true => self.discard_own(part, pass.urgency),
                false => discard_foreign(part),
            };
            let result = match is_strict {
                // SAFETY: claimed, and all of the piece is private memory that can be read and written.
                true => unsafe { guards::replace(part, discard) },
                false => discard(part).ok_or(Refused { freed: None }),
            };
            let gone = match &result {
                Ok(bytes) => Some(*bytes),
                Err(Refused { freed }) => *freed,
            };
            (freed, is_begun) = (freed + gone.unwrap_or(0), is_begun || gone.is_some());
            match result {
                Ok(_) => {}
                Err(_) if is_begun => return Taken::Some { bytes: freed },
                Err(_) => return Taken::Nothing,
            }
        }
        Taken::All { bytes: freed }
    }

    /// Whether nothing in a piece is known to stand against it.
    fn may_all_go(&self, pass: &Pass, piece: &Range<usize>, is_strict: bool) -> bool {
        let mut at = piece.start;
        while at < piece.end {
            let Ok(Some(mapping)) = pass.maps.find(at) else { return false };
            // Closed memory is opened again for reading and writing.
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
            return pass.takes_foreign;
        }
        // What the small allocator has is its own books'; a part of a huge page frees nothing until that is split.
        let is_huge = |addr: usize| self.arena.peek(self.arena.block_of(addr)).backing == Backing::Huge;
        let is_part = |addr: usize| !addr.is_multiple_of(BLOCK_BYTES);
        let splits = is_part(from) && is_huge(from) || is_part(to) && is_huge(to - 1);
        let is_one = own.contains(&piece.start) && own.contains(&(piece.end - 1));
        is_one && self.arena.heap.contains(from) && (!splits || pass.urgency == Urgency::Limit)
    }

    /// What of a piece goes by one call: inside one mapping, of which the kernel refuses all or nothing; and inside one block
    /// of the arena.
    fn next_part(&self, pass: &Pass, at: usize, end: usize) -> Range<usize> {
        let mapping_end = match pass.maps.find(at) {
            Ok(Some(mapping)) if mapping.addresses.contains(&at) => mapping.addresses.end,
            _ => at + os_page_bytes(),
        };
        let block_end = if self.arena.contains(at) { (at & !(BLOCK_BYTES - 1)) + BLOCK_BYTES } else { end };
        at..end.min(mapping_end).min(block_end)
    }

    /// As [`Vranges::discard`], for a part of one block that Pagemill handed out.
    fn discard_own(&self, part: Range<usize>, urgency: Urgency) -> Option<u64> {
        let block = self.arena.block_of(part.start);
        if part.len() == BLOCK_BYTES {
            // SAFETY: claimed: the program does without the bytes of this block (contract of `vrange`).
            return unsafe { self.arena.renew(block, 1) };
        }
        if self.arena.peek(block).backing == Backing::Huge {
            if urgency < Urgency::Limit {
                return None;
            }
            self.arena.split(block);
        }
        // SAFETY: as above, whole OS pages of one block.
        unsafe { self.arena.discard_part(block, part.start, part.len()) }
    }
}

/// Gives back private anonymous pages; returns how many bytes were resident.
fn discard_foreign(part: Range<usize>) -> Option<u64> {
    let bytes = mem::resident_bytes(part.start, part.len()).ok()?;
    if !part.start.is_multiple_of(BLOCK_BYTES) || !part.end.is_multiple_of(BLOCK_BYTES) {
        // Of a huge page nothing is freed by a part before it is split.
        let _ = mem::cool(part.start, part.len());
    }
    // SAFETY: claimed: the program does without these bytes and has no reference to them (contract of `vrange`).
    unsafe { mem::discard(part.start, part.len()) }.ok()?;
    Some(bytes as u64)
}
