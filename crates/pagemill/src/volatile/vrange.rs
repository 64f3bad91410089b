//! Volatile ranges of the program's own memory, by address.
//!
//! Marks are kept beside the memory, in an ordered map under one lock; marking asks the kernel only whether the range is
//! mapped. Bytes go as those of [`Range`](super::Range)s do: when memory is needed, the least recently marked first. While a
//! step of a purge is at a piece, whoever wants that piece waits for the step.
//!
//! What has no pages of its own to give (shared memory, files, hugetlbfs), cannot be read and written, is a stack, or is
//! locked can be marked, and is never purged. docs/volatile.md has a row for each kind.
//!
//! Below: `intervals`, `arena` (for memory that Pagemill handed out). Above, by trait: `reclaim::Shrinker`.
#![allow(unsafe_code)] // gives marked memory back

use super::intervals::Intervals;
use super::line::{Line, Oldest};
use super::word::{GRACE_TICKS, age};
use super::{Patience, now};
use crate::arena::Arena;
use crate::arena::block::Backing;
use crate::error::{Error, Result};
use crate::reclaim::{Account, Shrinker, Urgency};
use crate::stats::{self, Counter};
use crate::sync::{Guarded, Lock};
use crate::trace::{self, Event};
use crate::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::maps::Maps;
use pagemill_sys::mem;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Given back by one system call: what a waiter may have to wait for.
const STEP_BYTES: usize = 4 * BLOCK_BYTES;

/// What a partial range loses at a time: a huge page, or a part of one where it is smaller.
const CHUNK_BYTES: usize = BLOCK_BYTES;
const SMALL_CHUNK_BYTES: usize = BLOCK_BYTES / 32;

/// Intervals that a walk looks at while it has the lock: some 20 us.
const AT_A_TIME: usize = 4000;

/// Pages asked for at a time whether they are resident.
const ASKED_PAGES: usize = 1024;

/// What is to become of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Volatile,
    Nonvolatile,
}

/// How a marked range goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// As a whole.
    Full,
    /// From its end, a chunk at a time, in turn with others.
    Partial,
}

/// How the C ABI names them (include/pagemill.h).
pub fn from_c(mode: i32, behaviour: i32) -> Option<(Mode, How)> {
    let mode = match mode {
        0 => Mode::Nonvolatile,
        1 => Mode::Volatile,
        _ => return None,
    };
    let how = match behaviour {
        0 => How::Full,
        1 => How::Partial,
        _ => return None,
    };
    Some((mode, how))
}

/// What a call did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marked {
    /// Bytes that are marked now; of unmarking, bytes that were.
    pub bytes: u64,
    /// Whether any of the range had been purged since it was marked.
    pub purged: bool,
}

/// What is known of a marked interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    epoch: u32,
    how: How,
    /// Some of it was purged, or of what it took the place of.
    is_purged: bool,
    /// All of it was.
    is_empty: bool,
    /// A purge is at it.
    is_purging: bool,
    /// Somebody waits for that, or has and comes first for a while.
    is_awaited: bool,
}

/// A marked interval, for listings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub addresses: Range<usize>,
    pub how: How,
    pub is_purged: bool,
    /// Ticks of 4.2 ms since it was marked.
    pub age_ticks: u32,
}

/// What the lock guards.
struct Book {
    marks: Intervals<Mark>,
    /// Pieces that a purge is at: mostly none, and then nobody need look whether his is one.
    claimed: usize,
}

/// All marks of a process.
pub struct Vranges {
    arena: &'static Arena,
    account: &'static Account,
    book: Guarded<Book>,
    purging: Lock,
    line: Line,
    giveable_bytes: AtomicU64,
    is_registered: OnceLock<()>,
}

impl Vranges {
    pub(crate) fn new(arena: &'static Arena, account: &'static Account) -> Self {
        Self {
            arena,
            account,
            book: Guarded::new(Book { marks: Intervals::new(), claimed: 0 }),
            purging: Lock::new(),
            line: Line::default(),
            giveable_bytes: AtomicU64::new(0),
            is_registered: OnceLock::new(),
        }
    }

    /// Makes `len_bytes` from `addr` on volatile, or keeps them from here on and tells what became of them.
    ///
    /// Marking what is marked marks it anew, with the new behaviour; what was marked beyond the range stays as it was.
    /// Nonvolatile memory that was purged reads zero where it was, also if it was written meanwhile. Unmarking what is not
    /// marked does nothing.
    ///
    /// Cost: some hundred nanoseconds, and a system call of as much to mark; none to unmark. While a piece is being purged,
    /// some hundred microseconds at most.
    ///
    /// # Errors
    ///
    /// Nothing has changed then. [`Error::BadRange`] where `addr` or `len_bytes` are no multiples of the OS page, or the end
    /// lies beyond all addresses; [`Error::NotMapped`] where a part is not mapped; [`Error::System`] without memory for
    /// the mark.
    ///
    /// # Safety
    ///
    /// While it is volatile the program can do without the bytes of the range, at any moment, and holds no reference to
    /// them. Before it unmaps, replaces, moves or frees a part, it unmarks that part.
    ///
    /// Source: M. Kim and J. Stultz, "vrange for anonymous page" v7, 2013, lwn.net/Articles/542504.
    pub unsafe fn vrange(&'static self, addr: usize, len_bytes: usize, mode: Mode, how: How) -> Result<Marked> {
        let page = os_page_bytes();
        let bad = Error::BadRange { addr, len_bytes };
        if !addr.is_multiple_of(page) || !len_bytes.is_multiple_of(page) {
            return Err(bad);
        }
        let Some(end) = addr.checked_add(len_bytes) else { return Err(bad) };
        if len_bytes == 0 {
            return Ok(Marked { bytes: 0, purged: false });
        }
        match mode {
            Mode::Volatile => self.mark(addr..end, how),
            Mode::Nonvolatile => self.unmark(addr..end),
        }
    }

    fn mark(&'static self, range: Range<usize>, how: How) -> Result<Marked> {
        check_mapped(&range)?;
        self.is_registered.get_or_init(|| self.account.register(self));
        let bytes = range.len() as u64;
        let fresh = Mark { epoch: now(), how, is_purged: false, is_empty: false, is_purging: false, is_awaited: false };
        self.settled(&range, |marks| {
            marks.prepare(3)?;
            let mut purged = false;
            marks.cut(range.clone(), |_, mark| purged |= mark.is_purged)?;
            marks.insert(range.clone(), Mark { is_purged: purged, ..fresh })?;
            Ok(Marked { bytes, purged })
        })
    }

    fn unmark(&self, range: Range<usize>) -> Result<Marked> {
        let marked = self.settled(&range, |marks| {
            let mut purged = false;
            let bytes = marks.cut(range.clone(), |_, mark| purged |= mark.is_purged)?;
            Ok(Marked { bytes, purged })
        })?;
        if marked.bytes == 0 {
            check_mapped(&range)?;
        }
        Ok(marked)
    }

    /// Forgets all marks of a range that is going away, once no purge is at it. For whoever unmaps or frees it.
    pub fn forget(&self, range: Range<usize>) {
        // Without room to split a mark the whole mark goes: what is not marked is not purged.
        let result = self.settled(&range, |marks| marks.cut(range.clone(), |_, _| ()));
        if result.is_err() {
            self.book.with(|Book { marks, .. }| {
                let whole = marks
                    .overlapping(range.clone())
                    .fold(range.clone(), |all, (part, _)| all.start.min(part.start)..all.end.max(part.end));
                let _ = marks.cut(whole, |_, _| ());
            });
        }
    }

    /// Whether nothing is marked: a look at a number.
    pub fn is_empty(&self) -> bool {
        self.is_registered.get().is_none()
    }

    /// All marks, ascending by address. Allocates.
    pub fn list(&self) -> Vec<Listed> {
        let (now, mut listed, mut from) = (now(), Vec::new(), 0);
        loop {
            // Memory for the list is found outside of the lock: finding it may purge.
            let mut part = Vec::with_capacity(AT_A_TIME);
            self.book.with(|Book { marks, .. }| {
                part.extend(marks.from(from).take(AT_A_TIME).map(|(addresses, mark)| Listed {
                    addresses,
                    how: mark.how,
                    is_purged: mark.is_purged,
                    age_ticks: age(now, mark.epoch),
                }));
            });
            let Some(last) = part.last() else { return listed };
            from = last.addresses.end;
            listed.append(&mut part);
        }
    }

    /// Does something with the marks when no purge is at any of the range.
    fn settled<T>(&self, range: &Range<usize>, act: impl Fn(&mut Intervals<Mark>) -> Result<T>) -> Result<T> {
        let mut patience = None;
        loop {
            let done = self.book.with(|book| {
                let mut is_busy = false;
                if book.claimed > 0 {
                    book.marks.update(range.clone(), |_, mark| {
                        is_busy |= mark.is_purging;
                        mark.is_awaited |= mark.is_purging;
                    });
                }
                if is_busy { None } else { Some(act(&mut book.marks)) }
            });
            match done {
                Some(result) => return result,
                None => {
                    let patience = patience.get_or_insert_with(|| {
                        stats::add(Counter::RangesAwaited, 1);
                        Patience::new()
                    });
                    patience.pause();
                }
            }
        }
    }

    pub(crate) fn acquire_for_fork(&self) {
        self.purging.acquire();
        self.book.acquire();
    }

    pub(crate) fn release_after_fork(&self) {
        self.book.release();
        self.purging.release();
    }
}

fn check_mapped(range: &Range<usize>) -> Result<()> {
    mem::is_mapped(range.start, range.len())
        .map_err(|_| Error::NotMapped { addr: range.start, len_bytes: range.len() as u64 })
}

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

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let _guard = self.purging.lock();
        // Without it nobody knows what may be purged.
        let Ok(maps) = Maps::open() else { return 0 };
        let (mut freed, mut is_fresh) = (0, false);
        while freed < want_bytes {
            let mut has_gone = false;
            while freed < want_bytes
                && let Some((addr, epoch)) = self.line.next()
            {
                let gone = self.purge(&maps, addr as usize, epoch, urgency);
                has_gone |= gone.is_some();
                freed += gone.unwrap_or(0);
            }
            let is_futile = is_fresh && !has_gone;
            if freed >= want_bytes || is_futile || self.look_for_oldest() == 0 {
                break;
            }
            is_fresh = true;
        }
        freed
    }

    fn measure(&self) {
        let _guard = self.purging.lock();
        self.look_for_oldest();
    }
}

impl Mark {
    fn is_claimable(&self, now: u32) -> bool {
        let is_wanted = self.is_awaited && age(now, self.epoch) < GRACE_TICKS;
        !self.is_empty && !self.is_purging && !is_wanted
    }

    /// The part of an interval that goes next.
    fn next_piece(&self, range: &Range<usize>) -> Range<usize> {
        let step = match self.how {
            How::Full => STEP_BYTES,
            How::Partial if range.len() > CHUNK_BYTES => CHUNK_BYTES,
            How::Partial => SMALL_CHUNK_BYTES,
        };
        // Pieces end where huge pages do.
        let start = (range.end - 1) & !(step - 1);
        start.max(range.start)..range.end
    }
}

impl Vranges {
    /// Walks all marks for the line and for what there is. Returns the length of the line.
    fn look_for_oldest(&self) -> usize {
        let (now, mut oldest, mut giveable, mut from) = (now(), Oldest::new(), 0, 0);
        loop {
            let last = self.book.with(|Book { marks, .. }| {
                let mut last = None;
                for (range, mark) in marks.from(from).take(AT_A_TIME) {
                    if mark.is_claimable(now) {
                        giveable += range.len() as u64;
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
        self.giveable_bytes.store(giveable, Relaxed);
        self.line.set(&mut oldest)
    }

    /// Purges the interval that begins at `addr`, or its last chunk, if it is still marked since that epoch. Returns what
    /// the kernel took; `None` if nothing went.
    fn purge(&self, maps: &Maps, addr: usize, epoch: u32, urgency: Urgency) -> Option<u64> {
        let mut freed = None;
        loop {
            let Some((piece, mark)) = self.claim(addr, epoch) else { return freed };
            let taken = self.discard(maps, &piece, urgency);
            let is_awaited = self.finish(&piece, mark, taken.is_some());
            freed = taken.map(|bytes| freed.unwrap_or(0) + bytes).or(freed);
            if taken.is_none() || is_awaited || mark.how == How::Partial || piece.start == addr {
                return freed;
            }
        }
    }

    /// Takes a piece of an interval out of the program's reach.
    fn claim(&self, addr: usize, epoch: u32) -> Option<(Range<usize>, Mark)> {
        self.book.with(|Book { marks, claimed }| {
            let (range, mark) = marks.from(addr).next()?;
            if range.start != addr || mark.epoch != epoch || !mark.is_claimable(now()) {
                return None;
            }
            let piece = mark.next_piece(&range);
            marks.prepare(2).ok()?;
            marks.cut(piece.clone(), |_, _| ()).ok()?;
            marks.insert(piece.clone(), Mark { is_purging: true, is_awaited: false, ..mark }).ok()?;
            *claimed += 1;
            Some((piece, mark))
        })
    }

    /// Ends a claim. Returns whether somebody waits for it.
    fn finish(&self, piece: &Range<usize>, mark: Mark, is_gone: bool) -> bool {
        let after = Mark {
            // Where the kernel refused, others have their turn first; so they have after a chunk.
            epoch: if is_gone { mark.epoch } else { now() },
            is_purged: mark.is_purged || is_gone,
            is_empty: is_gone,
            is_awaited: false,
            ..mark
        };
        let is_awaited = self.book.with(|Book { marks, claimed }| {
            *claimed -= 1;
            let mut is_awaited = false;
            marks.update(piece.clone(), |range, found| {
                if range == *piece {
                    is_awaited = found.is_awaited;
                    *found = after;
                }
            });
            if !is_gone || is_awaited || mark.how == How::Partial {
                pass_turn(marks, piece, mark, Passed { is_gone, is_awaited });
            }
            join_next(marks, piece, after);
            is_awaited
        });
        if is_gone {
            stats::add(Counter::RangesPurged, 1);
            stats::add(Counter::RangeBytesPurged, piece.len() as u64);
            trace::event(Event::RangePurged, piece.start as u64, piece.len() as u64);
        }
        is_awaited
    }

    /// Gives the pages of a claimed piece back; `None` if they cannot go.
    fn discard(&self, maps: &Maps, piece: &Range<usize>, urgency: Urgency) -> Option<u64> {
        let (mut at, mut freed) = (piece.start, 0);
        // All of it is looked at before a byte goes.
        while at < piece.end {
            let mapping = maps.find(at).ok().flatten()?;
            let is_plain = mapping.is_readable && mapping.is_writable && !mapping.is_shared && !mapping.has_file;
            if mapping.addresses.start > at || !is_plain || mapping.is_stack {
                return None;
            }
            at = mapping.addresses.end;
        }
        at = piece.start;
        while at < piece.end {
            let own = self.arena.addresses();
            if own.contains(&at) {
                let end = piece.end.min((at & !(BLOCK_BYTES - 1)) + BLOCK_BYTES);
                freed += self.discard_own(at..end, urgency)?;
                at = end;
            } else {
                let end = if at < own.start { piece.end.min(own.start) } else { piece.end };
                freed += discard_foreign(at..end)?;
                at = end;
            }
        }
        Some(freed)
    }

    /// As [`Vranges::discard`], for a part of one block that Pagemill handed out. What the small allocator has is left alone.
    fn discard_own(&self, part: Range<usize>, urgency: Urgency) -> Option<u64> {
        if !self.arena.heap.contains(part.start) {
            return None;
        }
        let block = self.arena.block_of(part.start);
        if part.len() == BLOCK_BYTES {
            // SAFETY: claimed: the program does without the bytes of this block (contract of `vrange`).
            let freed = unsafe { self.arena.discard(block, 1) };
            let is_gone = self.arena.peek(block).backing == Backing::Empty;
            self.arena.reopen(block, 1);
            return is_gone.then_some(freed);
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

/// How a piece's turn ended.
struct Passed {
    is_gone: bool,
    is_awaited: bool,
}

/// What lies before a piece of the same interval has had its turn, and is left to who waits. Where nothing went, both are
/// one again.
fn pass_turn(marks: &mut Intervals<Mark>, piece: &Range<usize>, mark: Mark, passed: Passed) {
    let before = marks.overlapping(piece.start.saturating_sub(1)..piece.start).next();
    let Some((before, _)) = before.filter(|(before, found)| before.end == piece.start && *found == mark) else {
        return;
    };
    let whole = before.start..if passed.is_gone { before.end } else { piece.end };
    if marks.cut(whole.clone(), |_, _| ()).is_ok() {
        let is_in = marks.insert(whole, Mark { epoch: now(), is_awaited: passed.is_awaited, ..mark });
        debug_assert!(is_in.is_ok());
    }
}

/// Joins a purged piece with a purged one that follows, so that the steps of a purge leave one interval.
fn join_next(marks: &mut Intervals<Mark>, piece: &Range<usize>, mark: Mark) {
    let next = marks.from(piece.end).next();
    let Some((next, _)) = next.filter(|(next, other)| next.start == piece.end && *other == mark && mark.is_empty)
    else {
        return;
    };
    // Two go for one that comes: there is room.
    let whole = piece.start..next.end;
    if marks.cut(whole.clone(), |_, _| ()).is_ok() {
        let is_in = marks.insert(whole, mark);
        debug_assert!(is_in.is_ok());
    }
}

/// Gives back private anonymous pages; returns how many bytes were resident.
fn discard_foreign(part: Range<usize>) -> Option<u64> {
    let page = os_page_bytes();
    let (mut at, mut bytes) = (part.start, 0);
    let mut pages = [0u8; ASKED_PAGES];
    while at < part.end {
        let len = (part.end - at).min(ASKED_PAGES * page);
        mem::resident(at, len, &mut pages).ok()?;
        bytes += pages[..len / page].iter().filter(|page| **page & 1 == 1).count() * page;
        at += len;
    }
    // SAFETY: claimed: the program does without these bytes and has no reference to them (contract of `vrange`).
    unsafe { mem::discard(part.start, part.len()) }.ok()?;
    Some(bytes as u64)
}
