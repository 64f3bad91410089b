//! Size classes of slots: four steps per power of two, from 64 KiB up.

use pagemill_core::units::BLOCK_BYTES;

/// Smallest slot. Smaller sizes belong to the small allocator.
pub const MIN_BYTES: usize = 64 << 10;

/// Each slot starts in a different granule, so a granule's number identifies a slot.
pub(crate) const GRANULE_BYTES: usize = MIN_BYTES;

/// Every class size is a multiple of this.
pub(crate) const STEP_BYTES: usize = MIN_BYTES / 4;

/// Number of classes: the largest is 16 TiB.
pub(crate) const COUNT: usize = 4 * 28 + 1;

/// A size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Class(u8);

impl Class {
    /// The smallest class that holds `size` bytes; `None` beyond 16 TiB.
    #[inline]
    pub fn of(size: usize) -> Option<Self> {
        if size <= MIN_BYTES {
            return Some(Self(0));
        }
        let exponent = usize::BITS - 1 - (size - 1).leading_zeros(); // of the power of two below
        let step = (size - 1) >> (exponent - 2) & 3;
        let index = (exponent as usize - 16) * 4 + step + 1;
        (index < COUNT).then_some(Self(index as u8))
    }

    /// The smallest class for `size` bytes whose slots all start at multiples of `align`.
    pub fn aligned(size: usize, align: usize) -> Option<Self> {
        let class = Self::of(size)?;
        if class.align() >= align { Some(class) } else { Self::of(size.max(align).checked_next_power_of_two()?) }
    }

    pub fn from_index(index: usize) -> Option<Self> {
        (index < COUNT).then_some(Self(index as u8))
    }

    #[inline]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Bytes of a slot.
    #[inline]
    pub fn bytes(self) -> usize {
        let (exponent, step) = (16 + self.0 / 4, usize::from(self.0 % 4));
        (4 + step) << (exponent - 2)
    }

    /// Whether a slot consists of whole blocks of its own.
    #[inline]
    pub fn is_big(self) -> bool {
        self.bytes() >= BLOCK_BYTES
    }

    /// Distance between slots in bytes: big slots do not share blocks.
    pub fn stride(self) -> usize {
        if self.is_big() { self.bytes().next_multiple_of(BLOCK_BYTES) } else { self.bytes() }
    }

    /// Blocks carved at once: the smallest number that holds a whole number of slots.
    pub fn span_blocks(self) -> usize {
        if self.is_big() { self.stride() / BLOCK_BYTES } else { self.odd_part() }
    }

    /// Slots of a span.
    pub fn span_slots(self) -> usize {
        self.span_blocks() * BLOCK_BYTES / self.stride()
    }

    /// Every slot starts at a multiple of this many bytes.
    pub fn align(self) -> usize {
        if self.is_big() && !self.bytes().is_power_of_two() { BLOCK_BYTES } else { 1 << self.bytes().trailing_zeros() }
    }

    /// A span starts at a multiple of this many blocks.
    pub fn span_align_blocks(self) -> usize {
        (self.align() / BLOCK_BYTES).max(1)
    }

    fn odd_part(self) -> usize {
        self.bytes() >> self.bytes().trailing_zeros()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Every class holds the sizes above the one below it, wastes at most a fifth, and fills its span.
    #[test]
    fn classes_are_dense_and_spans_are_full() {
        let mut below = 0;
        for class in (0..COUNT).filter_map(Class::from_index) {
            assert_eq!(Class::of(class.bytes()), Some(class));
            assert_eq!(Class::of(below + 1), Some(class));
            assert!(class.index() == 0 || (class.bytes() - below) * 5 <= class.bytes(), "{class:?}");
            assert_eq!(class.bytes() % STEP_BYTES, 0);
            if !class.is_big() {
                assert_eq!(class.span_slots() * class.bytes(), class.span_blocks() * BLOCK_BYTES);
                assert!(class.span_blocks() <= 7);
            }
            below = class.bytes();
        }
        assert_eq!(Class::of(below + 1), None);
        assert_eq!(Class::of(usize::MAX), None);
    }

    #[test]
    fn alignment_is_natural() {
        for (size, align) in
            [(65 << 10, 4096), (65 << 10, 65536), (100 << 10, 1 << 20), (3 << 20, 1 << 30), (1, 2 << 20)]
        {
            let class = Class::aligned(size, align).unwrap();
            assert!(class.bytes() >= size && class.align() >= align, "{size} {align}");
        }
        assert_eq!(Class::aligned(1, 1 << 63), None);
    }
}
