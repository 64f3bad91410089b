//! Hints: a caller remembers where it found a page, so that the next access skips the file's index.

use crate::mapping::{File, Mapping, Pin};
use pagemill_core::error::Result;

/// The folio in which a page was found last. A program that accesses the same page again stores the hint beside its own
/// reference to the page, for example in the parent node of a tree. An access with a correct hint needs no look-up in
/// the file's index. Every access checks the hint: if the page has moved or left memory meanwhile, or if the hint is
/// that of another page or file, the access uses the index and corrects the hint. So any hint is safe to use.
///
/// The default is a hint without a folio. A hint has 4 bytes and keeps nothing in memory.
///
/// ```
/// use pagemill::PageCache;
/// use pagemill::cache::FolioHint;
///
/// let cache = PageCache::builder("tree").limit(64 << 20).build()?;
/// let file = cache.create()?;
/// file.write_at(&7_u64.to_ne_bytes(), 4096)?;
/// let mut child = FolioHint::default();
/// for _ in 0..3 {
///     let pin = file.pin_hinted(&mut child, 4096)?; // uses the index once
///     assert_eq!(pin.read_u64(0), 7);
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FolioHint {
    /// For a folio of 2^`order` pages that begins at page `number` of the cache's memory: `2 * number + 2^order`. The
    /// number is a multiple of 2^`order`, so the lowest set bit gives the order.
    bits: u32,
}

impl Default for FolioHint {
    fn default() -> Self {
        Self { bits: u32::MAX }
    }
}

/// Hints are equal if their folios begin at the same page of memory. The order serves only to prefetch the bytes of a pin.
impl PartialEq for FolioHint {
    fn eq(&self, other: &Self) -> bool {
        self.number() == other.number()
    }
}

impl Eq for FolioHint {}

impl FolioHint {
    /// Returns the hint of a folio; the default hint for a folio behind the first 2^31 - 1 pages.
    pub(super) fn of(number: u32, order: u8) -> Self {
        number.checked_mul(2).map_or_else(Self::default, |twice| Self { bits: twice | 1 << order })
    }

    /// Returns the number of the folio's first page.
    #[inline(always)]
    fn number(self) -> u32 {
        (self.bits & self.bits.wrapping_sub(1)) / 2
    }

    /// Returns the order that the folio had when it was found.
    #[inline(always)]
    fn order(self) -> u32 {
        self.bits.trailing_zeros()
    }
}

impl Mapping {
    /// As [`Mapping::pin`]. If `hint` is that of the page, the pin costs no look-up; otherwise the hint is corrected.
    ///
    /// Cost: with a correct hint one atomic operation to pin and one to unpin. For a few bytes,
    /// [`Mapping::read_at_hinted`] is cheaper.
    ///
    /// # Errors
    ///
    /// See [`Mapping::pin`]. The hint stays as it is.
    #[inline(always)]
    pub fn pin_hinted(&self, hint: &mut FolioHint, offset: u64) -> Result<Pin<'_>> {
        match self.0.try_pin_hinted(*hint, offset) {
            Some(pin) => Ok(pin),
            None => {
                let pin = self.pin(offset)?;
                *hint = pin.hint();
                Ok(pin)
            }
        }
    }

    /// As [`Mapping::read_at`]. If `hint` is that of the first page, and the bytes lie in one folio, the read costs no
    /// look-up. Otherwise the hint is corrected, if the first page has a folio.
    ///
    /// Cost: with a correct hint a copy, and two loads of the folio's metadata. No atomic operation on memory that
    /// threads share, except that reads of files with a store sometimes record the use of a folio. So the processor can
    /// wait for the bytes of several reads at a time, unlike for those of several pins.
    ///
    /// # Errors
    ///
    /// See [`Mapping::read_at`]. The hint stays as it is.
    #[inline(always)]
    pub fn read_at_hinted(&self, hint: &mut FolioHint, to: &mut [u8], offset: u64) -> Result<usize> {
        if self.0.try_read_hinted(*hint, to, offset) {
            return Ok(to.len());
        }
        let read = self.read_at(to, offset)?;
        if let Some((found, _)) = self.0.hint(self.0.index_of(offset)) {
            *hint = FolioHint::of(found.value as u32, found.order as u8);
        }
        Ok(read)
    }
}

impl File {
    /// Pins the folio of a hint if that folio has the byte at `offset`. Returns `None` if the hint is wrong, or if the
    /// slow path is needed.
    #[inline(always)]
    fn try_pin_hinted(&self, hint: FolioHint, offset: u64) -> Option<Pin<'_>> {
        if offset >= self.size_bytes() {
            return None;
        }
        let (place, frame) = self.try_pin_number(hint.number().into(), hint.order(), offset)?;
        Some(self.guard(place, frame, offset))
    }

    /// Fills `to` from the folio of a hint. Returns as [`File::try_read_folio`].
    #[inline(always)]
    fn try_read_hinted(&self, hint: FolioHint, to: &mut [u8], offset: u64) -> bool {
        let Some(frame) = self.pool.frame_if_any(hint.number().into()) else { return false };
        let seen = frame.word.load();
        // Only live folios: a frozen one may have left the file's index already.
        seen.is_live() && self.try_read_folio(hint.number(), frame, seen, to, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_has_the_number_and_order_of_its_folio() {
        for (number, order) in [(0, 0), (0, 9), (1, 0), (512, 9), (3 << 20, 20), ((1 << 31) - 2, 0), (1 << 30, 30)] {
            let hint = FolioHint::of(number, order);
            assert_eq!((hint.number(), hint.order()), (number, order.into()));
        }
        assert_eq!(FolioHint::of(1 << 31, 0), FolioHint::default(), "the number does not fit");
        assert_eq!(FolioHint::default().number(), (1 << 31) - 1, "no pool of less than 8 TiB has this page");
    }
}
