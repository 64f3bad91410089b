//! Finding the folio of a page, and making one where there is none.

use super::inflight::InflightGuard;
use super::policy::{Ask, Cause, Choice};
use super::request::READING;
use super::writeback::dirty::DIRTY;
use super::writeback::sync::failed;
use super::{File, TimedWait};
use crate::folio::{Frame, NewFolio, Owner};
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, Relaxed};
use pagemill_core::trace::Event;
use pagemill_store::fills_all;
use pagemill_xarray::Found;
use std::mem::ManuallyDrop;
use std::ops::Range;

/// A folio that is pinned, and which of its bytes are meant.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub number: u32,
    /// First index of the folio.
    pub first: u64,
    pub order: u8,
}

/// The bytes that a new folio begins with.
pub(crate) enum Content<'bytes> {
    /// What the store has; zeros without one.
    Stored,
    /// As [`Content::Stored`], with these at an offset of the file.
    Written(u64, &'bytes [u8]),
}

impl Content<'_> {
    /// Whether it is written all over this range.
    fn fills(&self, range: Range<u64>) -> bool {
        match self {
            Self::Stored => false,
            Self::Written(from, bytes) => *from <= range.start && from + bytes.len() as u64 >= range.end,
        }
    }
}

/// Most pages that a write makes under one lock of the index: those of one node.
const MOST_PAGES: usize = 64;

/// Folios in a row that were taken and are in no index: they go back if they do not get there. Several are pages.
struct Fresh<'file> {
    file: &'file File,
    order: u8,
    first: u64,
    number: u32,
    /// Pages behind it.
    more: Vec<u32>,
}

impl<'file> Fresh<'file> {
    /// One folio. It has to be filled.
    fn new(file: &'file File, taken: &NewFolio, first: u64) -> Self {
        let fresh = Self { file, order: taken.order, first, number: taken.number, more: Vec::new() };
        fresh.own(taken, first);
        fresh
    }

    /// Puts the next page behind the others. It has to be filled.
    fn push(&mut self, taken: &NewFolio) {
        self.more.push(taken.number);
        self.own(taken, self.last());
    }

    fn own(&self, taken: &NewFolio, index: u64) {
        self.file.pool.set_owner(taken.number, Owner { id: self.file.id, index });
    }

    /// Their last index.
    fn last(&self) -> u64 {
        self.first + (1 << self.order) - 1 + self.more.len() as u64
    }

    fn numbers(&self) -> impl Iterator<Item = u32> {
        std::iter::once(self.number).chain(self.more.iter().copied())
    }

    /// What they cover from each one's first index on, and where its bytes lie. From here on they stay.
    fn keep(self) -> impl Iterator<Item = (u64, u32)> {
        let mut kept = ManuallyDrop::new(self);
        let (first, number, more) = (kept.first, kept.number, std::mem::take(&mut kept.more));
        (first..).zip(std::iter::once(number).chain(more))
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        self.numbers().for_each(|number| self.file.cache.free(number, self.order));
    }
}

impl File {
    /// Pins the folio that holds a page; `None` where there is none.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Busy`] if it is held for a second.
    #[inline]
    pub(crate) fn pin_page(&self, index: u64) -> Result<Option<Place>> {
        match self.try_pin_page(index) {
            Some((found, _)) => {
                Ok(Some(Place { number: found.value as u32, first: found.first, order: found.order as u8 }))
            }
            None => self.pin_page_slowly(index),
        }
    }

    /// As [`File::pin_page`], for the common case: the index's hint is right and no other thread changes the folio. The
    /// order in the result is the folio's.
    #[inline]
    pub(crate) fn try_pin_page(&self, index: u64) -> Option<(Found, &'static Frame)> {
        let (found, frame) = self.hint(index)?;
        let state = frame.word.pin().ok()?;
        // While pinned it keeps its owner.
        if u32::from(state.order()) == found.order && self.is_of(frame, found.first) {
            if self.note_used(frame) {
                self.note_first_use(frame, self.offset_of(index), 1);
            }
            return Some((found, frame));
        }
        self.cache.unpin(found.value as u32);
        None
    }

    /// What the index seems to have for a page.
    #[inline]
    pub(crate) fn hint(&self, index: u64) -> Option<(Found, &'static Frame)> {
        let found = self.tree.hint(index)?;
        Some((found, self.pool.frame_if_any(found.value)?))
    }

    /// Whether the folio of a frame, which is live, is the one of this file that begins at `first`.
    #[inline]
    pub(crate) fn is_of(&self, frame: &Frame, first: u64) -> bool {
        frame.is_of(Owner { id: self.id, index: first })
    }

    /// Records a use for eviction. Returns whether the folio was read ahead, and this is its first use.
    #[inline]
    pub(crate) fn note_used(&self, frame: &Frame) -> bool {
        self.store.is_some() && frame.word.note_use()
    }

    #[cold]
    pub(crate) fn pin_page_slowly(&self, index: u64) -> Result<Option<Place>> {
        let mut turn = TimedWait::new();
        loop {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else { return Ok(None) };
            let number = hit.value() as u32;
            match self.pool().word(number).pin() {
                // While pinned it cannot leave the file for another, so the index entry stays true.
                Ok(state) if hit.is_still() => {
                    return Ok(Some(Place { number, first: hit.first(), order: state.order() }));
                }
                Ok(_) => self.cache.unpin(number),
                Err(_) if !hit.is_still() => {}
                Err(_) => {
                    drop(guard);
                    turn.wait()?;
                }
            }
        }
    }

    /// Makes a folio over `index`, with `content`, or small ones for more of that; puts them into the index. Returns up to
    /// which offset of the file they go; `None` if another was faster, perhaps for a part of it.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoMemory`], [`pagemill_core::Error::Store`].
    pub(crate) fn create(&self, index: u64, cause: Cause, content: &Content<'_>) -> Result<Option<u64>> {
        if matches!(content, Content::Stored) && self.bring_within_timeout(index..index + 1)? {
            return Ok(None);
        }
        // What the store has is stale once it was cut off.
        let revoked = self.revoked.load(Acquire);
        let Some((fresh, guard)) = self.make(index, cause, content)? else { return Ok(None) };
        let (order, number, first, last) = (fresh.order, fresh.number, fresh.first, fresh.last());
        fresh.numbers().try_for_each(|number| self.reach_order(number, order))?;
        let is_dirty = matches!(content, Content::Written(..));
        let dirty_bytes = if is_dirty { self.offset_of(last + 1) - self.offset_of(first) } else { 0 };
        // Before another thread can write it back.
        self.add_dirty(dirty_bytes);
        let locked = self.tree.lock_for(first, last, u32::from(order));
        let (mut writer, mut stock) = locked.inspect_err(|_| self.sub_dirty(dirty_bytes))?;
        if writer.next(first, last).is_some() || self.revoked.load(Relaxed) != revoked {
            drop(writer);
            self.sub_dirty(dirty_bytes);
            return Ok(None);
        }
        for (first, number) in fresh.keep() {
            writer.store(first, u32::from(order), u64::from(number), &mut stock);
            // It is busy yet: a thread that finds it waits a moment. The length is set now: a thread that reads up to
            // the new end finds the folio, and writeback knows how much of it is valid.
            if let Content::Written(offset, bytes) = content {
                self.grow(self.offset_of(first + (1 << order)).min(offset + bytes.len() as u64));
            }
            if is_dirty && self.dirty.is_some() {
                writer.set_mark(first, DIRTY);
            }
            self.pool.word(number).publish(order, !self.cache.may_split, is_dirty);
            self.enter_order(first, number, order);
        }
        drop((writer, guard));
        self.note_made(first, order);
        if order > 0 && !content.fills(self.offset_of(first)..self.offset_of(last + 1)) {
            self.note_sparse(number);
        }
        Ok(Some(self.offset_of(last + 1)))
    }

    /// A folio has come into the index.
    pub(crate) fn note_made(&self, first: u64, order: u8) {
        if order > 0 {
            self.trace(Event::FolioMade, first, order);
            stats::add(Counter::HugeAllocated, 1);
        }
    }

    /// Takes a folio for a page, or such for several that are to be written, and fills them; `None` if another does so, or has
    /// done so. Of a file with a store, with the request for them.
    fn make(
        &self,
        index: u64,
        cause: Cause,
        content: &Content<'_>,
    ) -> Result<Option<(Fresh<'_>, Option<InflightGuard<'_>>)>> {
        let is_huge = self.wants_huge(index, cause, content);
        let more = if is_huge { 0 } else { self.more_wanted(index, content) };
        let span = if is_huge { self.span_of(index) } else { index..index + 1 + more as u64 };
        if self.store.is_none() {
            return Ok(Some((self.take_and_fill(index, is_huge, more, content)?, None)));
        }
        if let Content::Written(offset, _) = content {
            // The caller's bytes are not touched during a request: a fault of theirs may need the same page.
            if content.fills(self.offset_of(span.start)..self.offset_of(span.end)) {
                let fresh = self.take_and_fill(index, is_huge, more, content)?;
                return Ok(Some((fresh, Some(self.wait_and_register(span.start, span.end - 1)?))));
            }
            // What is not written comes first; then it is as any page that is there.
            self.note_sequential(*offset, *offset);
            self.create(index, cause, &Content::Stored)?;
            return Ok(None);
        }
        // Before memory is taken: a thread that waits for another read needs none.
        let guard = self.wait_and_register(span.start, span.end - 1)?;
        // From here on nothing comes; what is there already must not be asked for.
        if self.tree.next(span.start, span.end - 1, &epoch::pin()).is_some() {
            return Ok(None);
        }
        Ok(Some((self.take_and_fill(index, is_huge, more, content)?, Some(guard))))
    }

    fn take_and_fill(&self, index: u64, is_huge: bool, more: usize, content: &Content<'_>) -> Result<Fresh<'_>> {
        let (taken, first) = self.take_for(index, is_huge)?;
        let mut fresh = Fresh::new(self, &taken, first);
        self.fill(taken, first, content)?;
        if more > 0 {
            self.make_more(&mut fresh, more, content)?;
        }
        Ok(fresh)
    }

    /// Takes pages behind those that were taken, as many as there are, and fills them.
    fn make_more(&self, fresh: &mut Fresh<'_>, wanted: usize, content: &Content<'_>) -> Result<()> {
        let (mut more, mut count) = ([const { None }; MOST_PAGES], 0);
        self.cache.allocate_more(wanted, |taken| {
            more[count] = Some(taken);
            count += 1;
        });
        // All of them are owned before one is filled.
        more.iter().flatten().for_each(|taken| fresh.push(taken));
        (fresh.first + 1..).zip(more.into_iter().flatten()).try_for_each(|(at, taken)| self.fill(taken, at, content))
    }

    /// How many pages behind this one the same write makes: up to the end of the range that the policy was asked for.
    fn more_wanted(&self, index: u64, content: &Content<'_>) -> usize {
        let Content::Written(offset, bytes) = content else { return 0 };
        let end = offset + bytes.len() as u64;
        // Of a file with a store only such as are written whole.
        let end = if self.store.is_some() { self.index_of(end) } else { self.index_of(end - 1) + 1 };
        if end <= index + 1 {
            return 0;
        }
        let last = (end - 1).min(self.span_of(index).end - 1);
        let last = last.min(index + MOST_PAGES as u64 - 1);
        if last <= index {
            return 0;
        }
        let next = self.tree.next(index + 1, last, &epoch::pin());
        (next.map_or(last + 1, |found| found.first) - index - 1) as usize
    }

    /// Whether a folio for a page is to be huge: the policy says so, and nothing is in its range. Where a part is there already
    /// the background makes it huge once that pays.
    pub(crate) fn wants_huge(&self, index: u64, cause: Cause, content: &Content<'_>) -> bool {
        let span = self.span_of(index);
        self.pool().chunk_order() > 0
            && self.cache.is_huge_allowed()
            && self.choose(index, cause, content) == Choice::Huge
            && self.tree.next(span.start, span.end - 1, &epoch::pin()).is_none()
    }

    /// Takes a folio for a page, huge if that is wanted and it can be had.
    pub(crate) fn take_for(&self, index: u64, is_huge: bool) -> Result<(NewFolio, u64)> {
        if is_huge {
            if let Some(taken) = self.take_huge(self.pool().chunk_order()) {
                return Ok((taken, self.span_of(index).start));
            }
            stats::add(Counter::HugeFallback, 1);
        }
        loop {
            match self.cache.allocate(0) {
                Ok(taken) => return Ok((taken, index)),
                // Others may take what room was made: then once more.
                Err(_) if self.cache.make_room(self.page_bytes() as u64) => {}
                // All of it may be dirty.
                Err(_) if self.cache.clean_some(self.page_bytes() as u64)? => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// A huge folio; of a file with a store others make room for it. Once: what comes free in pieces makes no chunk, and to go on
    /// would drop all there is.
    fn take_huge(&self, order: u8) -> Option<NewFolio> {
        let may_evict = self.store.is_some();
        self.cache.allocate(order).ok().or_else(|| {
            let has_room = may_evict && self.cache.evict_some(self.cache.folio_bytes(order));
            has_room.then(|| self.cache.allocate(order).ok()).flatten()
        })
    }

    fn choose(&self, index: u64, cause: Cause, content: &Content<'_>) -> Choice {
        let span_bytes = self.cache.folio_bytes(self.pool().chunk_order());
        let span = self.span_of(index);
        let (begin, end) = (self.offset_of(span.start), self.offset_of(span.end));
        let (from, to) = match content {
            Content::Stored => (self.offset_of(index), self.offset_of(index + 1)),
            Content::Written(offset, bytes) => (*offset, offset + bytes.len() as u64),
        };
        let is_in_order = from == self.sequential_end.load(Relaxed);
        let ask = Ask {
            cause,
            offset: begin,
            span_bytes,
            wanted_bytes: to.min(end) - from.max(begin),
            present_bytes: 0,
            size_bytes: self.size_bytes().max(to),
            sequential_bytes: if is_in_order { from.saturating_sub(self.sequential_begin.load(Relaxed)) } else { 0 },
            read_bytes: if cause == Cause::Write { self.unwritten_bytes(begin..end, from..to) } else { 0 },
        };
        self.cache.policy.choose(&ask)
    }

    /// Returns how many bytes of a range the store has that a write to `written` does not replace.
    fn unwritten_bytes(&self, range: Range<u64>, written: Range<u64>) -> u64 {
        let end = range.end.min(self.stored_bytes.load(Relaxed));
        let behind = end.saturating_sub(written.end.max(range.start));
        written.start.min(end).saturating_sub(range.start) + behind
    }

    /// Puts the first bytes into an unpublished folio.
    fn fill(&self, mut taken: NewFolio, first: u64, content: &Content<'_>) -> Result<()> {
        let (pool, len_bytes) = (self.pool(), self.cache.folio_bytes(taken.order));
        let begin = self.offset_of(first);
        let (from, bytes) = match content {
            Content::Written(offset, bytes) => {
                let skipped = begin.saturating_sub(*offset) as usize;
                let from = offset.saturating_sub(begin);
                (from, &bytes[skipped..bytes.len().min(skipped + (len_bytes - from) as usize)])
            }
            Content::Stored => (0, &[][..]),
        };
        let to = from + bytes.len() as u64;
        if self.store.is_some() {
            if (from, to) != (0, len_bytes) {
                self.load(&mut taken, begin, len_bytes as usize)?;
            }
        } else if !taken.is_zero {
            // What was another's must not be seen; what is written now need not be zeroed before.
            pool.zero(taken.number, 0, from as usize);
            pool.zero(taken.number, to as usize, (len_bytes - to) as usize);
        }
        pool.copy_in(taken.number, from as usize, bytes);
        Ok(())
    }

    /// A write in place goes on where the last one ended, perhaps.
    #[inline]
    pub(crate) fn continue_sequential(&self, offset: u64, end: u64) {
        if self.sequential_end.load(Relaxed) == offset {
            self.sequential_end.store(end, Relaxed);
        }
    }

    /// Notes that a write made pages from `offset` to `end`: in order as before, or anew.
    pub(crate) fn note_sequential(&self, offset: u64, end: u64) {
        if self.sequential_end.load(Relaxed) != offset {
            self.sequential_begin.store(offset, Relaxed);
        }
        self.sequential_end.store(end, Relaxed);
    }

    /// A folio that was kept still goes on; or it left its file meanwhile, and is freed.
    pub(crate) fn thaw(&self, number: u32) {
        self.note_revived(number, self.pool().word(number).thaw());
    }

    /// Frees a folio that could not be made live again: it left its file while another thread used it.
    pub(crate) fn note_revived(&self, number: u32, is_live: bool) {
        if !is_live {
            self.cache.free(number, self.pool().word(number).load().order());
        }
    }

    /// Takes all pages from `first` to `last` out of the file that lie in folios wholly inside. Returns the bytes
    /// freed; pinned and held folios are freed later.
    pub(crate) fn remove_pages(&self, first: u64, last: u64) -> u64 {
        /// Folios taken out under the lock of the index at a time.
        const BATCH: usize = 256;
        let mut removed = 0;
        let mut from = first;
        loop {
            let (mut numbers, mut count, mut next) = ([(0, 0); BATCH], 0, None);
            let mut writer = self.tree.lock();
            self.note_revoked();
            while count < BATCH && from <= last {
                let Some(found) = writer.next(from, last) else { break };
                if found.first >= first && found.last() <= last {
                    writer.erase(found.first);
                    numbers[count] = (found.value as u32, found.order as u8);
                    count += 1;
                }
                from = found.last() + 1;
                next = Some(from);
            }
            drop(writer);
            // What is split meanwhile has the order of the index here, and the word another yet.
            let mut dirty_bytes = 0;
            for (number, order) in numbers[..count].iter().copied() {
                let left = self.pool().word(number).remove_from_file();
                dirty_bytes += if left.was_dirty { self.cache.folio_bytes(order) } else { 0 };
                if left.must_be_freed {
                    self.cache.free(number, order);
                    removed += self.cache.folio_bytes(order);
                }
            }
            self.sub_dirty(dirty_bytes);
            if next.is_none() || count < BATCH {
                return removed;
            }
        }
    }

    /// Reads the store's bytes of an unpublished folio.
    fn load(&self, taken: &mut NewFolio, begin: u64, len_bytes: usize) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        // What was cut off once must not come back.
        let stored = (self.stored_bytes.load(Relaxed).saturating_sub(begin) as usize).min(len_bytes);
        let is_zero = taken.is_zero;
        self.pool().with_bytes(taken, len_bytes, |bytes| {
            // Nothing that was another's, should the store put in less than it says.
            let from = if fills_all(&**store) { stored } else { 0 };
            if !is_zero {
                bytes[from..].fill(0);
            }
            if stored == 0 {
                return Ok(());
            }
            store.read(begin, &mut bytes[..stored]).map_err(failed(READING))
        })
    }
}
