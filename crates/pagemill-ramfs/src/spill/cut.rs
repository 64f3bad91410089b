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
        let indices = segments.indices(self.index_of(size_bytes)..u64::MAX);
        for index in &indices {
            let start = size_bytes.saturating_sub(self.range_of(*index).start);
            self.cut(data, segments, *index, start..self.segment_bytes, Cut::Remove, || Ok(()))?;
        }
        data.mapping.truncate(size_bytes)?;
        let is_behind = |index: &&u64| self.range_of(**index).start >= size_bytes;
        indices.iter().filter(is_behind).for_each(|index| self.forget(segments, *index));
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
        self.cut_each(data, segments, offset..offset.saturating_add(len_bytes), Cut::Remove, |range| {
            data.mapping.punch_hole(range.start, range.end - range.start)?;
            self.count_release();
            Ok(())
        })
    }

    /// Zeroes a range. Holes stay holes. The caller has the lock `writing`.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::zero_range`], and of the store, after a part was zeroed.
    pub fn zero_range(&self, data: &FileData, segments: &Segments, offset: u64, len_bytes: u64) -> Result<()> {
        self.cut_each(data, segments, offset..offset.saturating_add(len_bytes), Cut::Zero, |range| {
            Ok(data.mapping.zero_range(range.start, range.end - range.start)?)
        })
    }

    /// Cuts a range of the file out of all segments that it touches.
    fn cut_each(
        &self,
        data: &FileData,
        segments: &Segments,
        range: Range<u64>,
        how: Cut,
        cut_in_memory: impl Fn(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        for index in segments.indices(self.index_of(range.start)..range.end.div_ceil(self.segment_bytes)) {
            let whole = self.range_of(index);
            let part = range.start.max(whole.start)..range.end.min(whole.end);
            let inside = part.start - whole.start..part.end - whole.start;
            self.cut(data, segments, index, inside, how, || cut_in_memory(part.clone()))?;
        }
        Ok(())
    }

    /// Cuts a range out of a segment. If it is resident, drops its copy and calls `cut_in_memory`. If it is spilled,
    /// discards or zeroes the pages that lie in the range, and zeroes the rest of the range in the copy.
    fn cut(
        &self,
        data: &FileData,
        segments: &Segments,
        index: u64,
        range: Range<u64>,
        how: Cut,
        cut_in_memory: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _locked = self.lock(segments, index);
        let Some(old) = segments.get(index) else { return Ok(()) };
        if old.is_resident {
            self.drop_copy(segments, index, &old);
            cut_in_memory()?;
            if self.pages_in_memory(data, index).is_some_and(PageSet::is_empty) {
                segments.remove(index);
            }
            return Ok(());
        }
        let (first, end) = (range.start.div_ceil(self.page_bytes), range.end / self.page_bytes);
        let removed = match how {
            Cut::Remove => old.pages.both(PageSet::of(first.min(end)..end)),
            Cut::Zero => PageSet::default(),
        };
        let zeroed = old.pages.without(removed).both(self.pages_touched(range.clone()));
        for run in zeroed.runs() {
            let start = range.start.max(run.start * self.page_bytes);
            let end = range.end.min(run.end * self.page_bytes);
            self.change_copy(&old, start..end, |bytes| bytes.fill(0))?;
        }
        let copy = old.copy.expect("a spilled segment has a copy");
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

    /// Ends a file that no caller uses any more: frees its pages and its segments.
    pub fn free(&self, data: &FileData, segments: &Segments) {
        // Evictions wait from here on, until the memory is free.
        segments.set_frozen(true);
        let _ = data.mapping.truncate(0);
        self.count_release();
        segments.indices(0..u64::MAX).iter().for_each(|index| self.forget(segments, *index));
    }
}

/// What happens to the pages of a range that is cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// They become holes.
    Remove,
    /// They become zeros.
    Zero,
}
