//! The choice between a huge folio and small ones for a page.

use crate::mapping::File;
use crate::mapping::policy::{Ask, Cause, Choice};
use pagemill_core::epoch;
use pagemill_core::sync::Relaxed;
use std::ops::Range;

impl File {
    /// Returns whether a page gets a huge folio: the policy chooses one, and no folio is in its range. If there is a
    /// folio already, the background thread may collapse the range later. `wanted` are the bytes to be read or written.
    pub(crate) fn wants_huge(&self, index: u64, cause: Cause, wanted: Range<u64>) -> bool {
        let span = self.span_of(index);
        self.pool.chunk_order > 0
            && self.cache.is_huge_allowed()
            && self.choose(index, cause, wanted) == Choice::Huge
            && self.tree.next(span.start, span.end - 1, &epoch::pin()).is_none()
    }

    fn choose(&self, index: u64, cause: Cause, wanted: Range<u64>) -> Choice {
        let span = self.span_of(index);
        let (begin, end) = (self.offset_of(span.start), self.offset_of(span.end));
        let (from, to) = (wanted.start, wanted.end);
        let is_sequential = from == self.sequential_end.load(Relaxed);
        self.cache.policy.choose(&Ask {
            cause,
            offset: begin,
            span_bytes: self.cache.folio_bytes(self.pool.chunk_order),
            wanted_bytes: to.min(end) - from.max(begin),
            present_bytes: 0,
            size_bytes: self.size_bytes().max(to),
            sequential_bytes: if is_sequential { from.saturating_sub(self.sequential_begin.load(Relaxed)) } else { 0 },
            read_bytes: if cause == Cause::Write { self.unwritten_bytes(begin..end, wanted) } else { 0 },
        })
    }

    /// Returns how many bytes of a range the store has that a write to `written` does not replace.
    fn unwritten_bytes(&self, range: Range<u64>, written: Range<u64>) -> u64 {
        let end = range.end.min(self.stored_bytes.load(Relaxed));
        let behind = end.saturating_sub(written.end.max(range.start));
        written.start.min(end).saturating_sub(range.start) + behind
    }
}
