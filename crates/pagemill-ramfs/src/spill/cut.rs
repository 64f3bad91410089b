//! Truncation, holes and zeros in files whose segments may be spilled.

use super::Spill;
use super::segments::{Frozen, PageSet, Segment, Segments};
use crate::error::Result;
use crate::file_data::FileData;
use pagemill_core::sync::Relaxed;
use std::ops::Range;

impl Spill {
    /// Sets the length of a file. No other thread changes the file meanwhile.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::truncate`], and of the store. After an error of the store, bytes behind the
    /// new end may read zero.
    pub fn truncate(&self, data: &FileData, segments: &Segments, size_bytes: u64) -> Result<()> {
        if size_bytes >= data.mapping.size_bytes() {
            return Ok(data.mapping.truncate(size_bytes)?);
        }
        let _frozen = Frozen::begin(segments);
        for index in segments.indices(self.index_of(size_bytes)..u64::MAX) {
            let start = size_bytes.saturating_sub(self.range_of(index).start);
            self.cut(segments, index, start..self.segment_bytes, || Ok(()))?;
        }
        data.mapping.truncate(size_bytes)?;
        // Before the segments may move again: an eviction that waits for this learns that it need not.
        self.count_release();
        Ok(())
    }

    /// Frees the memory of a range, which reads zero then. The caller has the lock `writing`.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::punch_hole`], and of the store, after a part was freed.
    pub fn punch_hole(&self, data: &FileData, segments: &Segments, offset: u64, len_bytes: u64) -> Result<()> {
        self.cut_each(segments, offset, len_bytes, |range| {
            data.mapping.punch_hole(range.start, range.end - range.start)?;
            self.count_release();
            Ok(())
        })
    }

    /// Zeroes a range. Spilled pages of it become holes. The caller has the lock `writing`.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::zero_range`], and of the store, after a part was zeroed.
    pub fn zero_range(&self, data: &FileData, segments: &Segments, offset: u64, len_bytes: u64) -> Result<()> {
        self.cut_each(segments, offset, len_bytes, |range| {
            Ok(data.mapping.zero_range(range.start, range.end - range.start)?)
        })
    }

    /// Cuts a range of the file out of all segments that it touches.
    fn cut_each(
        &self,
        segments: &Segments,
        offset: u64,
        len_bytes: u64,
        cut_in_memory: impl Fn(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let end = offset.saturating_add(len_bytes);
        for index in segments.indices(self.index_of(offset)..end.div_ceil(self.segment_bytes)) {
            let whole = self.range_of(index);
            let range = offset.max(whole.start)..end.min(whole.end);
            let inside = range.start - whole.start..range.end - whole.start;
            self.cut(segments, index, inside, || cut_in_memory(range.clone()))?;
        }
        Ok(())
    }

    /// Cuts a range out of a segment. If it is resident, drops its copy and calls `cut_in_memory`. If it is spilled,
    /// discards the pages that lie in the range, and zeroes the rest of the range in the copy.
    fn cut(
        &self,
        segments: &Segments,
        index: u64,
        range: Range<u64>,
        cut_in_memory: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _locked = self.lock(segments, index);
        let Some(old) = segments.get(index) else { return Ok(()) };
        if old.is_resident {
            self.drop_copy(segments, index, &old);
            return cut_in_memory();
        }
        let copy = old.copy.expect("a spilled segment has a copy");
        let (first, end) = (range.start.div_ceil(self.page_bytes), range.end / self.page_bytes);
        let inner = PageSet::of(first.min(end)..end);
        for page in [range.start / self.page_bytes, range.end / self.page_bytes] {
            let start = range.start.max(page * self.page_bytes);
            let end = range.end.min((page + 1) * self.page_bytes);
            let is_partial = start < end && end - start < self.page_bytes;
            if is_partial && old.pages.contains(self.pages_touched(start..end)) {
                self.change_copy(&old, start..end, |bytes| bytes.fill(0))?;
            }
        }
        let removed = old.pages.without(old.pages.without(inner));
        let pages = old.pages.without(removed);
        self.spilled_pages.fetch_sub(removed.count(), Relaxed);
        if pages.is_empty() {
            segments.remove(index);
            self.extents.free(copy, removed);
        } else {
            segments.set(index, Segment { pages, ..old });
            self.extents.discard(copy, removed);
        }
        Ok(())
    }

    /// Ends all segments of a file whose pages were freed.
    pub fn free(&self, segments: &Segments) {
        segments.set_frozen(true);
        self.count_release();
        segments.indices(0..u64::MAX).iter().for_each(|index| self.forget(segments, *index));
    }
}
