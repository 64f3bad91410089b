//! Truncation, holes and zeros in files with segments in the spill store.

use super::Spill;
use super::segments::{Frozen, PageSet, Segment, Segments};
use crate::error::Result;
use crate::file_data::FileData;
use pagemill_core::sync::Relaxed;
use std::ops::Range;

impl Spill {
    /// Sets the length of a file. The caller holds the lock `writing`, or is the file's only user.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::truncate`], and of the store. After an error of the store the length is unchanged,
    /// but bytes beyond `size_bytes` may read zero.
    pub fn truncate(&self, data: &FileData, segments: &Segments, size_bytes: u64) -> Result<()> {
        if size_bytes >= data.mapping.size_bytes() {
            return Ok(data.mapping.truncate(size_bytes)?);
        }
        let _frozen = Frozen::begin(segments);
        let indices = segments.indices(self.index_of(size_bytes)..u64::MAX);
        for index in &indices {
            let start = size_bytes.saturating_sub(self.range_of(*index).start);
            self.clear_in_segment(data, segments, *index, start..self.segment_bytes, Clear::Punch, || Ok(()))?;
        }
        data.mapping.truncate(size_bytes)?;
        let is_behind = |index: &&u64| self.range_of(**index).start >= size_bytes;
        indices.iter().filter(is_behind).for_each(|index| self.forget(segments, *index));
        // Counted before the thaw, so that an eviction that waited in `take_turn` sees that memory became free.
        self.count_release();
        Ok(())
    }

    /// Frees the memory of a range, which reads zero then. The caller has the lock `writing`.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::punch_hole`], and of the store, after a part was freed.
    pub fn punch_hole(&self, data: &FileData, segments: &Segments, offset: u64, len_bytes: u64) -> Result<()> {
        self.clear_in_segments(data, segments, offset..offset.saturating_add(len_bytes), Clear::Punch, |range| {
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
        self.clear_in_segments(data, segments, offset..offset.saturating_add(len_bytes), Clear::Zero, |range| {
            Ok(data.mapping.zero_range(range.start, range.end - range.start)?)
        })
    }

    /// Punches or zeroes a range of the file in all segments that it touches.
    fn clear_in_segments(
        &self,
        data: &FileData,
        segments: &Segments,
        range: Range<u64>,
        how: Clear,
        clear_in_memory: impl Fn(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        for index in segments.indices(self.index_of(range.start)..range.end.div_ceil(self.segment_bytes)) {
            let whole = self.range_of(index);
            let part = range.start.max(whole.start)..range.end.min(whole.end);
            let inside = part.start - whole.start..part.end - whole.start;
            self.clear_in_segment(data, segments, index, inside, how, || clear_in_memory(part.clone()))?;
        }
        Ok(())
    }

    /// Punches or zeroes a range of a segment. If the segment is resident, drops its copy and calls `clear_in_memory`. If
    /// it is spilled, [`Clear::Punch`] discards the whole pages of the range and zeroes its partial pages in the copy;
    /// [`Clear::Zero`] zeroes all of the range in the copy.
    fn clear_in_segment(
        &self,
        data: &FileData,
        segments: &Segments,
        index: u64,
        range: Range<u64>,
        how: Clear,
        clear_in_memory: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _locked = self.lock(segments, index);
        let Some(old) = segments.get(index) else { return Ok(()) };
        if old.is_resident {
            self.drop_copy(segments, index, &old);
            clear_in_memory()?;
            if self.pages_in_memory(data, index).is_some_and(PageSet::is_empty) {
                segments.remove(index);
            }
            return Ok(());
        }
        let (first, end) = (range.start.div_ceil(self.page_bytes), range.end / self.page_bytes);
        let removed = match how {
            Clear::Punch => old.pages.both(PageSet::of(first.min(end)..end)),
            Clear::Zero => PageSet::default(),
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

    /// Frees the pages, segments and copies of a file that has no users.
    pub fn free(&self, data: &FileData, segments: &Segments) {
        // Evictions wait from here on, until the memory is free.
        segments.set_frozen(true);
        let _ = data.mapping.truncate(0);
        self.count_release();
        segments.indices(0..u64::MAX).iter().for_each(|index| self.forget(segments, *index));
    }
}

/// What happens to the pages of a range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clear {
    /// They become holes.
    Punch,
    /// They become zeros.
    Zero,
}
