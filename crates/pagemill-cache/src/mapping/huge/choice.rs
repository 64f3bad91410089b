//! The choice between a huge folio and small ones for a page.

use crate::mapping::File;
use crate::mapping::policy::{Ask, Cause, Choice};
use pagemill_core::sync::Relaxed;
use std::ops::Range;

impl File {
    /// Returns whether a page gets a huge folio: the policy chooses one, and no folio is in its range. If there is a
    /// folio already, the background thread may collapse the range later. `wanted` are the bytes to be read or written.
    pub(crate) fn wants_huge(&self, index: u64, cause: Cause, wanted: Range<u64>) -> bool {
        if self.pool.chunk_order == 0 || !self.cache.is_huge_allowed() {
            return false;
        }
        let span = self.span_of(index);
        let (begin, end) = (self.offset_of(span.start), self.offset_of(span.end));
        let (from, to) = (wanted.start, wanted.end);
        let is_sequential = from == self.sequential_end.load(Relaxed);
        let ask = Ask {
            wanted_bytes: to.min(end) - from.max(begin),
            size_bytes: self.size_bytes().max(to),
            sequential_bytes: if is_sequential { from.saturating_sub(self.sequential_begin.load(Relaxed)) } else { 0 },
            read_bytes: match cause {
                Cause::Write => self.unwritten_bytes(begin..end, wanted),
                // The access writes a few bytes, or none.
                Cause::Fault => self.unwritten_bytes(begin..end, begin..begin),
                Cause::Read | Cause::Collapse => 0,
            },
            ..self.ask(cause, index)
        };
        self.cache.choose(&ask) == Choice::Huge && self.folios(span).next().is_none()
    }

    /// Returns the facts about the range of a huge folio with page `index`, of which a call wants no bytes.
    pub(crate) fn ask(&self, cause: Cause, index: u64) -> Ask {
        Ask {
            cause,
            offset: self.offset_of(self.span_of(index).start),
            span_bytes: self.pool.chunk_bytes as u64,
            wanted_bytes: 0,
            present_bytes: 0,
            size_bytes: self.size_bytes(),
            sequential_bytes: 0,
            read_bytes: 0,
        }
    }

    /// Returns how many bytes of a range the store has that a write to `written` does not replace.
    fn unwritten_bytes(&self, range: Range<u64>, written: Range<u64>) -> u64 {
        let end = range.end.min(self.stored_bytes.load(Relaxed));
        let behind = end.saturating_sub(written.end.max(range.start));
        written.start.min(end).saturating_sub(range.start) + behind
    }
}
