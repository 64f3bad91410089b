//! Volatile ranges of any memory of the program, given by their addresses.
//!
//! The marks are stored in an ordered map under one lock (`mark_table`). Marking calls the kernel only to check that
//! the range is mapped. Marked memory is purged under pressure, the least recently marked first (`vpurge`). A thread
//! that marks or unmarks memory that is being purged waits for the current step of the purge.
//!
//! Shared memory, files and hugetlbfs, memory that is not readable and writable, stacks and locked memory can be marked
//! but are never purged; docs/volatile.md has a row for each kind. Purged pages of *strict* ranges have guards
//! (`guards`): accessing them raises `SIGBUS`. Unmarking claims such pages, as a purge does, and removes their guards.
//!
//! Uses `mark_table`, `guards`, and `arena` for memory that Pagemill allocated.
#![allow(unsafe_code)] // functions whose callers must keep a contract

use super::mark_table::{Mark, MarkTable, Sums};
use super::purge_queue::PurgeQueue;
use super::{MAX_RESERVED_BYTES, current_epoch, guards};
use crate::Base;
use pagemill_core::arena::Arena;
use pagemill_core::error::{Error, Result};
use pagemill_core::reclaim::Account;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU64, Backoff, Guarded, Relaxed};
use pagemill_core::units::os_page_bytes;
use pagemill_sys::mem;
use std::ops::Range;

/// Maximum number of marked intervals that a walk visits while it holds the lock of the marks. Visiting that many takes
/// some 20 us.
pub(super) const MAX_INTERVALS_PER_LOCK: usize = 4000;

/// Marking publishes the statistics of the process whenever the giveable bytes of marked memory cross a multiple of
/// this number.
const PUBLISH_STEP_BYTES: u64 = 1 << 20;

/// The state that a call of [`Vranges::vrange`] sets for a range.
///
/// Example: [`vrange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The range is marked volatile. Purged bytes read zero.
    Volatile,
    /// The range is marked volatile. Accessing a purged page raises `SIGBUS`; system calls return `EFAULT`.
    VolatileStrict,
    /// The range is unmarked.
    Nonvolatile,
}

/// How a marked range is purged.
///
/// Example: [`vrange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The range is purged as a whole.
    Full = 0,
    /// The range is purged from the end, one chunk at a time, alternating with other ranges.
    Partial = 1,
}

/// The result of marking or unmarking a range.
///
/// Example: [`vrange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marked {
    /// Marking: the length of the range. Unmarking: the number of its bytes that were marked.
    pub bytes: u64,
    /// Whether any byte of the range was purged since it was marked.
    pub purged: bool,
}

/// Whether a change of marks removes the guards in the range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Guards {
    Keep,
    Remove,
}

/// The result of one attempt to change the marks of a range.
enum MarkAttempt<T> {
    /// The marks were changed.
    Done(T),
    /// A part of the range has guards that must be removed first. The attempt has claimed the part.
    Guarded(Range<usize>, Mark),
    /// A purge, or another thread that removes guards, has claimed a part of the range.
    Busy,
}

/// Marks memory of the program volatile, or unmarks it: [`Vranges::vrange`] for the ranges of the process.
///
/// ```
/// use pagemill::store::Aligned;
/// use pagemill::volatile::{How, Mode, vrange};
///
/// let memory = Aligned::new(1 << 20, 1 << 16);
/// let addr = memory.as_ptr() as usize;
/// // SAFETY: nothing needs or refers to the bytes while they are marked; the mark ends before they are freed.
/// let marked = unsafe { vrange(addr, 1 << 20, Mode::Volatile, How::Full)? };
/// assert_eq!(marked.bytes, 1 << 20);
/// // SAFETY: as above.
/// let unmarked = unsafe { vrange(addr, 1 << 20, Mode::Nonvolatile, How::Full)? };
/// println!("purged: {}", unmarked.purged);
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// # Errors
///
/// As [`Vranges::vrange`], and those of [`Base::of_process`].
///
/// # Safety
///
/// As [`Vranges::vrange`].
pub unsafe fn vrange(addr: usize, len_bytes: usize, mode: Mode, how: How) -> Result<Marked> {
    let vranges = Base::of_process()?.vranges;
    // SAFETY: guaranteed by the caller.
    unsafe { vranges.vrange(addr, len_bytes, mode, how) }
}

/// All volatile ranges that are given by address.
///
/// Example: [`vrange`].
pub struct Vranges {
    pub(super) arena: &'static Arena,
    pub(super) account: &'static Account,
    pub(super) table: Guarded<MarkTable>,
    /// The purge queue; its keys are addresses. A thread that purges marked memory holds its lock.
    pub(super) queue: Guarded<PurgeQueue>,
    /// Bytes that are marked and not purged: a copy of `Sums::all` that is read without the lock of the marks.
    pub(super) giveable_bytes: AtomicU64,
    /// The part of `giveable_bytes` outside the arena: a copy of `Sums::foreign` that is read without the lock of the
    /// marks.
    pub(super) foreign_bytes: AtomicU64,
    /// The part of `giveable_bytes` that a purge would not free, as last measured: not resident, or not purgeable. Each
    /// change of marks resets it to 0.
    pub(super) unfreeable_bytes: AtomicU64,
    /// The part of `foreign_bytes` that a purge would not free, as last measured.
    pub(super) unfreeable_foreign_bytes: AtomicU64,
    /// Bytes of all marked intervals, including intervals that are already purged or were inherited in a fork. Read
    /// without the lock of the marks.
    marked_bytes: AtomicU64,
}

impl Vranges {
    pub fn new(arena: &'static Arena, account: &'static Account) -> Self {
        Self {
            arena,
            account,
            table: Guarded::new(MarkTable::new(arena.addresses())),
            queue: Guarded::default(),
            giveable_bytes: AtomicU64::new(0),
            foreign_bytes: AtomicU64::new(0),
            unfreeable_bytes: AtomicU64::new(0),
            unfreeable_foreign_bytes: AtomicU64::new(0),
            marked_bytes: AtomicU64::new(0),
        }
    }

    /// Marks `len_bytes` at `addr` volatile, or unmarks these bytes and reports whether any of them were purged.
    ///
    /// Marking a marked range replaces its mark; marks outside the range stay unchanged. Purged bytes read zero until
    /// the program writes them. Accessing purged pages of a strict range raises `SIGBUS` until the range is unmarked.
    /// After that the pages read zero. Unmarking an unmarked range does nothing.
    ///
    /// The first strict mark of a process installs a `SIGSEGV` handler in front of the existing one. If the program
    /// installs its own handler later, that handler must call [`handle_fault`](super::handle_fault), except under
    /// `pagemill run`.
    ///
    /// Cost of marking: some hundred nanoseconds, and a system call of about the same cost. Unmarking needs no system
    /// call, except some microseconds for each run of guards. If a part of the range is being purged, the call first
    /// waits some hundred microseconds at most.
    ///
    /// # Errors
    ///
    /// After an error nothing has changed, with one exception: some guards of a strict range may have been removed. The
    /// range is still marked and counts as purged. [`Error::BadRange`] if `addr` or `len_bytes` is not a multiple of
    /// the OS page, or the end lies beyond the address space; [`Error::NotMapped`] if a part is not mapped;
    /// [`Error::System`] without memory for the mark; [`Error::Unsupported`] for a strict mark on a kernel without
    /// guard pages (before Linux 6.13).
    ///
    /// # Safety
    ///
    /// While the range is volatile, the program must not depend on its contents and must hold no reference to them.
    /// Before the program unmaps, replaces, moves or frees a part, it must unmark that part. The program must also
    /// unmark a part of a strict range before it changes the protection of that part.
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

    /// Marks a range. The caller must have checked that its addresses are valid.
    fn mark(&self, range: Range<usize>, how: How, is_strict: bool) -> Result<Marked> {
        check_mapped(&range)?;
        if is_strict {
            guards::prepare(&range)?;
        }
        let bytes = range.len() as u64;
        // The program may have filled the range without a charge, and may fill as many bytes again after a purge.
        // Reserving that room reclaims now, before the kernel runs short.
        let _ = self.arena.budget.reserve(bytes.min(MAX_RESERVED_BYTES));
        let epoch = current_epoch();
        let before = self.giveable_bytes.load(Relaxed);
        // A strict mark keeps existing guards.
        let guards = if is_strict { Guards::Keep } else { Guards::Remove };
        let marked = self.change_marks(&range, guards, |table| {
            table.marks.prepare(3)?;
            let mut mark = Mark {
                epoch,
                how,
                is_purged: false,
                is_empty: false,
                is_purging: false,
                is_strict,
                is_guarded: false,
                generation: table.generation,
            };
            let mut empty_bytes = 0;
            table.cut(range.clone(), |part, old| {
                mark.is_purged |= old.is_purged;
                mark.is_guarded |= old.is_guarded;
                empty_bytes += if old.is_empty && old.is_guarded { part.len() } else { 0 };
            })?;
            mark.is_empty = empty_bytes == range.len();
            table.insert(range.clone(), mark)?;
            Ok(Marked { bytes, purged: mark.is_purged })
        })?;
        if before / PUBLISH_STEP_BYTES != self.giveable_bytes.load(Relaxed) / PUBLISH_STEP_BYTES {
            // The helper may be sleeping because nothing was giveable.
            self.account.publish();
        }
        Ok(marked)
    }

    /// Removes the marks of a range. Checks that the range is mapped only if none of its bytes was marked.
    fn unmark(&self, range: Range<usize>) -> Result<Marked> {
        let marked = self.change_marks(&range, Guards::Remove, |table| {
            let mut purged = false;
            let bytes = table.cut(range.clone(), |_, mark| purged |= mark.is_purged)?;
            Ok(Marked { bytes, purged })
        })?;
        if marked.bytes == 0 {
            check_mapped(&range)?;
        }
        Ok(marked)
    }

    /// Waits until no purge works on a range, and removes all marks in the range. Must be called before the range is
    /// unmapped or freed.
    pub fn forget(&self, range: Range<usize>) {
        let forget = |range: Range<usize>| {
            self.change_marks(&range, Guards::Remove, |table| table.cut(range.clone(), |_, _| ()))
        };
        // If there is no memory to split an interval, the whole interval is unmarked. This is safe, because unmarked
        // memory is never purged.
        let result = forget(range.clone()).or_else(|_| {
            let all = |table: &mut MarkTable| {
                let all = table.marks.overlapping(range.clone());
                all.fold(range.clone(), |all, (part, _)| all.start.min(part.start)..all.end.max(part.end))
            };
            forget(self.table.with(all))
        });
        debug_assert!(result.is_ok(), "whole marks are removed without splitting any");
    }

    /// Returns whether no memory is marked. Cost: one load.
    pub fn is_empty(&self) -> bool {
        self.marked_bytes.load(Relaxed) == 0
    }

    /// Runs `act` on the table of marks as soon as no part of the range is claimed. Before that, removes the guards in
    /// the range if `guards` is `Remove`.
    fn change_marks<T>(
        &self,
        range: &Range<usize>,
        guards: Guards,
        mut act: impl FnMut(&mut MarkTable) -> Result<T>,
    ) -> Result<T> {
        let mut backoff = None;
        loop {
            let found = self.table.with(|table| {
                if table.is_busy(range) {
                    table.waiting += usize::from(backoff.is_none());
                    return MarkAttempt::Busy;
                }
                table.waiting -= usize::from(backoff.take().is_some());
                let guarded = if guards == Guards::Remove { table.claim_guarded(range) } else { Ok(None) };
                let result = match guarded {
                    Ok(Some((part, mark))) => return MarkAttempt::Guarded(part, mark),
                    Ok(None) => act(table),
                    Err(error) => Err(error),
                };
                self.publish_sums(table);
                MarkAttempt::Done(result)
            });
            match found {
                MarkAttempt::Done(result) => return result,
                MarkAttempt::Guarded(part, mark) => self.remove_guards(&part, mark)?,
                MarkAttempt::Busy => {
                    let backoff = backoff.get_or_insert_with(|| {
                        stats::add(Counter::RangesAwaited, 1);
                        Backoff::new()
                    });
                    backoff.pause();
                }
            }
        }
    }

    /// Removes the guards of a claimed part of a range, and ends the claim.
    fn remove_guards(&self, part: &Range<usize>, mark: Mark) -> Result<()> {
        // SAFETY: the part is claimed, so no purge works on it.
        let result = unsafe { guards::remove(part) };
        self.table.with(|table| {
            table.claimed -= 1;
            table.change(part, Mark { is_guarded: result.is_err(), is_purging: false, ..mark });
        });
        result
    }

    /// Copies the sums over all marks to the atomics that are read without the lock, and to the published statistics.
    pub(super) fn publish_sums(&self, table: &MarkTable) {
        self.giveable_bytes.store(table.sums.all, Relaxed);
        self.foreign_bytes.store(table.sums.foreign, Relaxed);
        self.set_unfreeable(0, 0);
        let marked_bytes = table.marks.bytes();
        self.marked_bytes.store(marked_bytes, Relaxed);
        stats::set(Counter::MarkedBytes, marked_bytes);
    }

    /// Resets the state in a fork child. Inherited marks stay valid, but this process does not purge them. Claims and
    /// waiting threads of the parent do not exist here.
    ///
    /// # Safety
    ///
    /// The process is a child with one thread, created since the last call.
    pub unsafe fn begin_child(&self) {
        guards::begin_child();
        // After a bare `clone`, which runs no fork handlers, a thread of the parent may have held the lock.
        self.table.try_with(|table| {
            table.generation = table.generation.wrapping_add(1);
            if table.claimed > 0 {
                // A bare `clone` happened during a purge, which may have closed memory. Unmarking opens it again.
                table.marks.update(0..usize::MAX, |_, mark| {
                    mark.is_guarded |= mark.is_purging && mark.is_strict;
                    mark.is_purging = false;
                });
            }
            (table.claimed, table.waiting, table.sums) = (0, 0, Sums::default());
        });
        self.giveable_bytes.store(0, Relaxed);
        self.foreign_bytes.store(0, Relaxed);
        self.set_unfreeable(0, 0);
        stats::set(Counter::MarkedBytes, self.marked_bytes.load(Relaxed));
    }

    /// Waits until no marked memory is claimed, and acquires the locks of the marks.
    pub fn acquire_for_fork(&self) {
        self.queue.acquire_when(|_| true);
        // A claim means that a thread may have closed memory. Wait until all claims have ended; no purge can start.
        self.table.acquire_when(|table| table.claimed == 0);
    }

    /// Releases the locks of [`Vranges::acquire_for_fork`].
    ///
    /// # Safety
    ///
    /// The calling thread must have called [`Vranges::acquire_for_fork`], once for each call of this function.
    pub unsafe fn release_after_fork(&self) {
        self.table.release();
        self.queue.release();
    }
}

/// Returns an error unless the whole range is mapped.
fn check_mapped(range: &Range<usize>) -> Result<()> {
    mem::is_mapped(range.start, range.len())
        .map_err(|_| Error::NotMapped { addr: range.start, len_bytes: range.len() as u64 })
}
