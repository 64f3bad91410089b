//! Volatile ranges of the program's own memory, by address.
//!
//! Marks are kept beside the memory, in an ordered map under one lock; marking asks the kernel only whether the range is
//! mapped. Bytes go as those of [`Range`](super::Range)s do: when memory is needed, the least recently marked first. While a
//! step of a purge is at a piece, whoever wants that piece waits for the step.
//!
//! What has no pages of its own to give (shared memory, files, hugetlbfs), cannot be read and written, is a stack, or is
//! locked can be marked, and is never purged. docs/volatile.md has a row for each kind. Purged pages of strict ranges are
//! guarded (`guards`); whoever ends such a mark takes the guards away first, with the mark claimed as by a purge.
//!
//! Below: `book`, `guards`, `arena` (for memory that Pagemill handed out). Purging: `vpurge`.
#![allow(unsafe_code)] // a contract that callers keep

use super::book::{Book, Mark, Sums};
use super::line::Line;
use super::{MOST_EXPECTED_BYTES, guards, now};
use crate::arena::Arena;
use crate::error::{Error, Result};
use crate::reclaim::Account;
use crate::stats::{self, Counter};
use crate::sync::{AtomicU64, Guarded, Lock, Patience, Relaxed};
use crate::units::os_page_bytes;
use pagemill_sys::mem;
use std::ops::Range;

/// Intervals that a walk looks at while it has the lock: some 20 us.
pub(super) const AT_A_TIME: usize = 4000;

/// What there is to give is published about every so many bytes.
const PUBLISH_STEP_BYTES: u64 = 1 << 20;

/// What is to become of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// What was purged reads zero.
    Volatile,
    /// What was purged raises `SIGBUS` when it is touched, in system calls `EFAULT`.
    VolatileStrict,
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

/// What a call did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marked {
    /// Bytes that are marked now; of unmarking, bytes that were.
    pub bytes: u64,
    /// Whether any of the range had been purged since it was marked.
    pub purged: bool,
}

/// Whether guards stay when something is done with a range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Guards {
    Keep,
    Remove,
}

/// What stands between a call and the marks it is for.
enum Found<T> {
    Done(T),
    /// Guards, claimed: they go first.
    Guarded(Range<usize>, Mark),
    /// A purge, or somebody who takes guards away.
    Busy,
}

/// All marks of a process.
pub struct Vranges {
    pub(super) arena: &'static Arena,
    pub(super) account: &'static Account,
    pub(super) book: Guarded<Book>,
    pub(super) purging: Lock,
    pub(super) line: Line,
    /// Copies of the book's sums, and all bytes that are marked, purged or not.
    pub(super) giveable_bytes: AtomicU64,
    pub(super) foreign_bytes: AtomicU64,
    marked_bytes: AtomicU64,
}

impl Vranges {
    pub(crate) fn new(arena: &'static Arena, account: &'static Account) -> Self {
        Self {
            arena,
            account,
            book: Guarded::new(Book::new(arena.addresses())),
            purging: Lock::new(),
            line: Line::default(),
            giveable_bytes: AtomicU64::new(0),
            foreign_bytes: AtomicU64::new(0),
            marked_bytes: AtomicU64::new(0),
        }
    }

    /// Makes `len_bytes` from `addr` on volatile, or keeps them from here on and tells what became of them.
    ///
    /// Marking what is marked marks it anew, with the new behaviour; what was marked beyond the range stays as it was.
    /// What was purged reads zero, but for what was written since; so it does of a strict range once that is nonvolatile,
    /// and until then its pages raise `SIGBUS`. Unmarking what is not marked does nothing.
    ///
    /// The first strict mark of a process puts a handler before that for `SIGSEGV`. A program that installs one later calls
    /// [`handle_fault`](super::handle_fault) in it; under `pagemill run` that is not needed.
    ///
    /// Cost: some hundred nanoseconds, and a system call of as much to mark; none to unmark, but where guards
    /// are to go some microseconds for each run of them. While a piece is being purged, some hundred microseconds at most.
    ///
    /// # Errors
    ///
    /// Nothing has changed then, except that guards of a strict range may have gone where there is no memory for the rest: it
    /// is marked and purged still. [`Error::BadRange`] where `addr` or `len_bytes` are no multiples of the OS page, or the end
    /// lies beyond all addresses; [`Error::NotMapped`] where a part is not mapped; [`Error::System`] without memory for
    /// the mark; [`Error::Unsupported`] for a strict mark where the kernel has no guard pages (before Linux 6.13).
    ///
    /// # Safety
    ///
    /// While it is volatile the program can do without the bytes of the range, at any moment, and holds no reference to
    /// them. Before it unmaps, replaces, moves or frees a part, it unmarks that part; so it does before it protects a part
    /// of a strict range.
    ///
    /// Source: M. Kim and J. Stultz, "vrange for anonymous page" v7, 2013, lwn.net/Articles/542504.
    pub unsafe fn vrange(&self, addr: usize, len_bytes: usize, mode: Mode, how: How) -> Result<Marked> {
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
            Mode::Volatile => self.mark(addr..end, how, false),
            Mode::VolatileStrict => self.mark(addr..end, how, true),
            Mode::Nonvolatile => self.unmark(addr..end),
        }
    }

    fn mark(&self, range: Range<usize>, how: How, is_strict: bool) -> Result<Marked> {
        check_mapped(&range)?;
        if is_strict {
            guards::prepare(&range)?;
        }
        let bytes = range.len() as u64;
        // It was filled without asking anybody, and more will be: what is short is purged here, before the kernel notices.
        let _ = self.arena.budget.expect(bytes.min(MOST_EXPECTED_BYTES));
        let fresh = Mark {
            epoch: now(),
            how,
            is_purged: false,
            is_empty: false,
            is_purging: false,
            is_strict,
            is_guarded: false,
            generation: 0,
        };
        let before = self.giveable_bytes.load(Relaxed);
        // Strict marks leave guards where they are.
        let guards = if is_strict { Guards::Keep } else { Guards::Remove };
        let marked = self.settled(&range, guards, |book| {
            book.marks.prepare(3)?;
            let mut mark = Mark { generation: book.generation, ..fresh };
            let mut empty_bytes = 0;
            book.cut(range.clone(), |part, old| {
                mark.is_purged |= old.is_purged;
                mark.is_guarded |= old.is_guarded;
                empty_bytes += if old.is_empty && old.is_guarded { part.len() } else { 0 };
            })?;
            mark.is_empty = empty_bytes == range.len();
            book.insert(range.clone(), mark)?;
            Ok(Marked { bytes, purged: mark.is_purged })
        })?;
        if before / PUBLISH_STEP_BYTES != self.giveable_bytes.load(Relaxed) / PUBLISH_STEP_BYTES {
            // The helper may sleep until there is something to give.
            self.account.publish();
        }
        Ok(marked)
    }

    fn unmark(&self, range: Range<usize>) -> Result<Marked> {
        let marked = self.settled(&range, Guards::Remove, |book| {
            let mut purged = false;
            let bytes = book.cut(range.clone(), |_, mark| purged |= mark.is_purged)?;
            Ok(Marked { bytes, purged })
        })?;
        if marked.bytes == 0 {
            check_mapped(&range)?;
        }
        Ok(marked)
    }

    /// Forgets all marks of a range that is going away, once no purge is at it. For whoever unmaps or frees it.
    pub fn forget(&self, range: Range<usize>) {
        let forget =
            |range: Range<usize>| self.settled(&range, Guards::Remove, |book| book.cut(range.clone(), |_, _| ()));
        // Without room to split a mark the whole mark goes: what is not marked is not purged.
        let result = forget(range.clone()).or_else(|_| {
            let all = |book: &mut Book| {
                let all = book.marks.overlapping(range.clone());
                all.fold(range.clone(), |all, (part, _)| all.start.min(part.start)..all.end.max(part.end))
            };
            forget(self.book.with(all))
        });
        debug_assert!(result.is_ok(), "whole marks are removed without splitting any");
    }

    /// Whether nothing is marked: a look at a number.
    pub fn is_empty(&self) -> bool {
        self.marked_bytes.load(Relaxed) == 0
    }

    /// Does something with the marks when no purge is at any of the range, and no guards are left there that are to go.
    fn settled<T>(
        &self,
        range: &Range<usize>,
        guards: Guards,
        mut act: impl FnMut(&mut Book) -> Result<T>,
    ) -> Result<T> {
        let mut patience = None;
        loop {
            let found = self.book.with(|book| {
                if book.is_busy(range) {
                    book.waiting += usize::from(patience.is_none());
                    return Found::Busy;
                }
                book.waiting -= usize::from(patience.take().is_some());
                let guarded = if guards == Guards::Remove { book.claim_guarded(range) } else { Ok(None) };
                let result = match guarded {
                    Ok(Some((part, mark))) => return Found::Guarded(part, mark),
                    Ok(None) => act(book),
                    Err(error) => Err(error),
                };
                self.tell(book);
                Found::Done(result)
            });
            match found {
                Found::Done(result) => return result,
                Found::Guarded(part, mark) => self.remove_guards(&part, mark)?,
                Found::Busy => {
                    let patience = patience.get_or_insert_with(|| {
                        stats::add(Counter::RangesAwaited, 1);
                        Patience::new()
                    });
                    patience.pause();
                }
            }
        }
    }

    /// Ends the guards of a part that was claimed for that.
    fn remove_guards(&self, part: &Range<usize>, mark: Mark) -> Result<()> {
        // SAFETY: claimed: no purge is there.
        let result = unsafe { guards::remove(part) };
        self.book.with(|book| {
            book.claimed -= 1;
            book.change(part, Mark { is_guarded: result.is_err(), is_purging: false, ..mark });
        });
        result
    }

    /// Copies the sums to where they are read without the lock.
    pub(super) fn tell(&self, book: &Book) {
        self.giveable_bytes.store(book.sums.all, Relaxed);
        self.foreign_bytes.store(book.sums.foreign, Relaxed);
        let marked_bytes = book.marks.bytes();
        self.marked_bytes.store(marked_bytes, Relaxed);
        stats::set(Counter::MarkedBytes, marked_bytes);
    }

    /// In a fork child: the parent's marks hold, but nothing is purged for them; nobody of the parent waits here.
    pub(crate) fn begin_child(&self) {
        guards::begin_child();
        // After a bare `clone` the lock may be that of a thread which does not exist here.
        self.book.try_with(|book| {
            book.generation = book.generation.wrapping_add(1);
            if book.claimed > 0 {
                // After a bare `clone` in the midst of something: what is closed then is opened when it is unmarked.
                book.marks.update(0..usize::MAX, |_, mark| {
                    mark.is_guarded |= mark.is_purging && mark.is_strict;
                    mark.is_purging = false;
                });
            }
            (book.claimed, book.waiting, book.sums) = (0, 0, Sums::default());
        });
        self.giveable_bytes.store(0, Relaxed);
        self.foreign_bytes.store(0, Relaxed);
        stats::set(Counter::MarkedBytes, self.marked_bytes.load(Relaxed));
    }

    pub(crate) fn acquire_for_fork(&self) {
        self.purging.acquire();
        // Whoever takes guards away has closed memory: he comes to an end, and no purge begins.
        self.book.acquire_when(|book| book.claimed == 0);
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
