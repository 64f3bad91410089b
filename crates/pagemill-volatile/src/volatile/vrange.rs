//! Volatile ranges of the program's own memory, by address.
//!
//! Marks are kept outside the memory, in an ordered map under one lock. Marking calls the kernel only to check that the
//! range is mapped. Bytes are purged as those of [`Range`](super::Range)s: when memory is needed, least recently marked
//! first. A thread that needs a piece which is being purged waits for the current step.
//!
//! Shared memory, files and hugetlbfs, memory that is not readable and writable, stacks and locked memory can be marked
//! but are never purged. docs/volatile.md has a row for each kind. Purged pages of strict ranges are guarded
//! (`guards`). Unmarking them claims the mark as a purge does, and removes the guards first.
//!
//! Below: `book`, `guards`, `arena` (for memory that Pagemill allocated). Purging: `vpurge`.
#![allow(unsafe_code)] // a contract that callers keep

use super::book::{Book, Mark, Sums};
use super::line::Line;
use super::{MOST_RESERVED_BYTES, guards, now};
use pagemill_core::arena::Arena;
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::Account;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU64, Backoff, Guarded, Lock, Relaxed};
use pagemill_core::units::os_page_bytes;
use pagemill_sys::mem;
use std::ops::Range;

/// Intervals that a walk visits in one critical section: some 20 us.
pub(super) const AT_A_TIME: usize = 4000;

/// The giveable amount is published whenever it crosses a multiple of this.
const PUBLISH_STEP_BYTES: u64 = 1 << 20;

/// What a call does with a range.
///
/// Example: [`Vranges`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Purged bytes read zero.
    Volatile,
    /// Purged pages raise `SIGBUS` when touched; system calls return `EFAULT`.
    VolatileStrict,
    Nonvolatile,
}

/// How a marked range is purged.
///
/// Example: [`Vranges`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// As a whole.
    Full,
    /// From the end, a chunk at a time, in turn with others.
    Partial,
}

/// The result of a call.
///
/// Example: [`Vranges`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marked {
    /// Bytes that are marked now; for unmarking, bytes that were marked.
    pub bytes: u64,
    /// Whether any of the range was purged since it was marked.
    pub purged: bool,
}

/// Whether guards stay when the marks of a range change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Guards {
    Keep,
    Remove,
}

/// The state of the marks that a call needs.
enum MarkLookup<T> {
    Done(T),
    /// Guards, now claimed, that must be removed first.
    Guarded(Range<usize>, Mark),
    /// A purge, or another thread that removes guards, holds a part.
    Busy,
}

/// All marks of a process.
///
/// ```
/// use pagemill::volatile::vrange::{How, Mode};
/// use pagemill::{Pagemill, store::Aligned};
///
/// let (vranges, memory) = (Pagemill::of_process()?.vranges, Aligned::new(1 << 20, 1 << 16));
/// let addr = memory.as_ptr() as usize;
/// // SAFETY: nothing needs or refers to the bytes while they are marked; the mark ends before they are freed.
/// let marked = unsafe { vranges.vrange(addr, 1 << 20, Mode::Volatile, How::Full)? };
/// assert_eq!(marked.bytes, 1 << 20);
/// // SAFETY: as above.
/// let unmarked = unsafe { vranges.vrange(addr, 1 << 20, Mode::Nonvolatile, How::Full)? };
/// println!("purged: {}", unmarked.purged);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct Vranges {
    pub(super) arena: &'static Arena,
    pub(super) account: &'static Account,
    pub(super) book: Guarded<Book>,
    pub(super) purging: Lock,
    pub(super) line: Line,
    /// Copies of the book's sums.
    pub(super) giveable_bytes: AtomicU64,
    pub(super) foreign_bytes: AtomicU64,
    /// The parts of these sums that a purge would not free, as measured last: not resident, or not purgeable. 0 after a
    /// new mark. First of all bytes, then of foreign ones.
    pub(super) absent_bytes: AtomicU64,
    pub(super) absent_foreign_bytes: AtomicU64,
    marked_bytes: AtomicU64,
}

impl Vranges {
    pub fn new(arena: &'static Arena, account: &'static Account) -> Self {
        Self {
            arena,
            account,
            book: Guarded::new(Book::new(arena.addresses())),
            purging: Lock::new(),
            line: Line::default(),
            giveable_bytes: AtomicU64::new(0),
            foreign_bytes: AtomicU64::new(0),
            absent_bytes: AtomicU64::new(0),
            absent_foreign_bytes: AtomicU64::new(0),
            marked_bytes: AtomicU64::new(0),
        }
    }

    /// Marks `len_bytes` at `addr` volatile, or takes them back from reclaim and reports whether they survived.
    ///
    /// Marking a marked range marks it anew, with the new behaviour; marks outside the range stay unchanged. Purged
    /// bytes read zero, except those written since. Purged pages of a strict range raise `SIGBUS` until the range is
    /// nonvolatile, and read zero after that. Unmarking an unmarked range does nothing.
    ///
    /// The first strict mark of a process installs a `SIGSEGV` handler in front of the existing one. A program that
    /// installs its own later must call [`handle_fault`](super::handle_fault) in it; under `pagemill run` that is not
    /// needed.
    ///
    /// Cost of marking: some hundred nanoseconds, plus a system call of about the same. Unmarking needs no system call,
    /// except some microseconds for each run of guards to remove. While a piece is being purged, at most some hundred
    /// microseconds more.
    ///
    /// # Errors
    ///
    /// On an error nothing has changed, with one exception: guards of a strict range may be gone if there is no memory
    /// for the rest; the range is still marked and purged. [`Error::BadRange`] if `addr` or `len_bytes` is not a
    /// multiple of the OS page, or the end lies beyond the address space; [`Error::NotMapped`] if a part is not mapped;
    /// [`Error::System`] without memory for the mark; [`Error::Unsupported`] for a strict mark on a kernel without
    /// guard pages (before Linux 6.13).
    ///
    /// # Safety
    ///
    /// While the range is volatile the program must be able to do without its bytes at any moment, and must hold no
    /// reference to them. Before it unmaps, replaces, moves or frees a part, it must unmark that part. It must also do
    /// so before it changes the protection of a part of a strict range.
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
        // The range was filled without a charge, and more will be. Purge what is missing here, before the kernel runs
        // short.
        let _ = self.arena.budget.reserve(bytes.min(MOST_RESERVED_BYTES));
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
        // A strict mark keeps existing guards.
        let guards = if is_strict { Guards::Keep } else { Guards::Remove };
        let marked = self.after_purges(&range, guards, |book| {
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
            // The helper may sleep until there is something to give back.
            self.account.publish();
        }
        Ok(marked)
    }

    fn unmark(&self, range: Range<usize>) -> Result<Marked> {
        let marked = self.after_purges(&range, Guards::Remove, |book| {
            let mut purged = false;
            let bytes = book.cut(range.clone(), |_, mark| purged |= mark.is_purged)?;
            Ok(Marked { bytes, purged })
        })?;
        if marked.bytes == 0 {
            check_mapped(&range)?;
        }
        Ok(marked)
    }

    /// Removes all marks of a range before it is unmapped or freed, after waiting for purges of it.
    pub fn forget(&self, range: Range<usize>) {
        let forget =
            |range: Range<usize>| self.after_purges(&range, Guards::Remove, |book| book.cut(range.clone(), |_, _| ()));
        // Without memory to split a mark the whole mark is removed: unmarked memory is not purged.
        let result = forget(range.clone()).or_else(|_| {
            let all = |book: &mut Book| {
                let all = book.marks.overlapping(range.clone());
                all.fold(range.clone(), |all, (part, _)| all.start.min(part.start)..all.end.max(part.end))
            };
            forget(self.book.with(all))
        });
        debug_assert!(result.is_ok(), "whole marks are removed without splitting any");
    }

    /// Whether nothing is marked. Reads one number.
    pub fn is_empty(&self) -> bool {
        self.marked_bytes.load(Relaxed) == 0
    }

    /// Runs `act` on the marks when no purge holds any part of the range, after removing the guards that have to go.
    fn after_purges<T>(
        &self,
        range: &Range<usize>,
        guards: Guards,
        mut act: impl FnMut(&mut Book) -> Result<T>,
    ) -> Result<T> {
        let mut backoff = None;
        loop {
            let found = self.book.with(|book| {
                if book.is_busy(range) {
                    book.waiting += usize::from(backoff.is_none());
                    return MarkLookup::Busy;
                }
                book.waiting -= usize::from(backoff.take().is_some());
                let guarded = if guards == Guards::Remove { book.claim_guarded(range) } else { Ok(None) };
                let result = match guarded {
                    Ok(Some((part, mark))) => return MarkLookup::Guarded(part, mark),
                    Ok(None) => act(book),
                    Err(error) => Err(error),
                };
                self.tell(book);
                MarkLookup::Done(result)
            });
            match found {
                MarkLookup::Done(result) => return result,
                MarkLookup::Guarded(part, mark) => self.remove_guards(&part, mark)?,
                MarkLookup::Busy => {
                    let backoff = backoff.get_or_insert_with(|| {
                        stats::add(Counter::RangesAwaited, 1);
                        Backoff::new()
                    });
                    backoff.pause();
                }
            }
        }
    }

    /// Removes the guards of a part that was claimed for that.
    fn remove_guards(&self, part: &Range<usize>, mark: Mark) -> Result<()> {
        // SAFETY: claimed: no purge is there.
        let result = unsafe { guards::remove(part) };
        self.book.with(|book| {
            book.claimed -= 1;
            book.change(part, Mark { is_guarded: result.is_err(), is_purging: false, ..mark });
        });
        result
    }

    /// Copies the sums to atomics that are read without the lock.
    pub(super) fn tell(&self, book: &Book) {
        self.giveable_bytes.store(book.sums.all, Relaxed);
        self.foreign_bytes.store(book.sums.foreign, Relaxed);
        self.set_absent(0, 0);
        let marked_bytes = book.marks.bytes();
        self.marked_bytes.store(marked_bytes, Relaxed);
        stats::set(Counter::MarkedBytes, marked_bytes);
    }

    /// Called in a fork child: the parent's marks stay valid, but nothing is purged for them. No thread of the parent
    /// waits here.
    ///
    /// # Safety
    ///
    /// The process is a child with one thread, made since the last call.
    pub unsafe fn begin_child(&self) {
        guards::begin_child();
        // After a bare `clone` the lock may be held by a thread that does not exist here.
        self.book.try_with(|book| {
            book.generation = book.generation.wrapping_add(1);
            if book.claimed > 0 {
                // After a bare `clone` during a purge: memory that was closed then is opened when it is unmarked.
                book.marks.update(0..usize::MAX, |_, mark| {
                    mark.is_guarded |= mark.is_purging && mark.is_strict;
                    mark.is_purging = false;
                });
            }
            (book.claimed, book.waiting, book.sums) = (0, 0, Sums::default());
        });
        self.giveable_bytes.store(0, Relaxed);
        self.foreign_bytes.store(0, Relaxed);
        self.set_absent(0, 0);
        stats::set(Counter::MarkedBytes, self.marked_bytes.load(Relaxed));
    }

    pub fn acquire_for_fork(&self) {
        self.purging.acquire();
        // A thread that removes guards has closed memory: wait until it is done. No purge begins meanwhile.
        self.book.acquire_when(|book| book.claimed == 0);
    }

    /// Releases the locks of [`Vranges::acquire_for_fork`].
    ///
    /// # Safety
    ///
    /// Follows one call of it, by the same thread.
    pub unsafe fn release_after_fork(&self) {
        self.book.release();
        self.purging.release();
    }
}

fn check_mapped(range: &Range<usize>) -> Result<()> {
    mem::is_mapped(range.start, range.len())
        .map_err(|_| Error::NotMapped { addr: range.start, len_bytes: range.len() as u64 })
}
