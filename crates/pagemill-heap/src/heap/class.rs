//! Size classes of slots: four steps per power of two, from 64 KiB up.

use pagemill_core::units::BLOCK_BYTES;

/// Size of the smallest slot. The small allocator serves smaller sizes.
pub const MIN_BYTES: usize = 64 << 10;

/// Bytes of a granule, the unit of slot numbers. At most one slot starts in a granule, so the granule's number
/// identifies the slot.
pub(crate) const GRANULE_BYTES: usize = MIN_BYTES;

/// The slot size of every class is a multiple of this number of bytes.
pub(crate) const STEP_BYTES: usize = MIN_BYTES / 4;

/// Number of size classes. The largest class has slots of 16 TiB.
pub(crate) const CLASS_COUNT: usize = 4 * 28 + 1;

const _: () = assert!(CLASS_COUNT <= 1 << 8, "a slot stores its class in 8 bits");

/// A size class: all its slots have the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Class(u8);

impl Class {
    /// Returns the smallest class whose slots have at least `size` bytes; `None` for more than 16 TiB.
    #[inline]
    pub fn of(size: usize) -> Option<Self> {
        if size <= MIN_BYTES {
            return Some(Self(0));
        }
        let exponent = usize::BITS - 1 - (size - 1).leading_zeros(); // of the largest power of two below `size`
        let step = (size - 1) >> (exponent - 2) & 3;
        let index = (exponent as usize - 16) * 4 + step + 1;
        debug_assert!(index >= CLASS_COUNT || Self(index as u8).bytes() >= size);
        (index < CLASS_COUNT).then_some(Self(index as u8))
    }

    /// Returns a class for `size` bytes whose slots all start at multiples of `align`: the smallest class for `size` if
    /// its alignment suffices, else a class whose size is a power of two.
    pub fn with_align(size: usize, align: usize) -> Option<Self> {
        let class = Self::of(size)?;
        if class.align() >= align { Some(class) } else { Self::of(size.max(align).checked_next_power_of_two()?) }
    }

    pub fn from_index(index: usize) -> Option<Self> {
        (index < CLASS_COUNT).then_some(Self(index as u8))
    }

    #[inline]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// Bytes of a slot of this class.
    #[inline]
    pub fn bytes(self) -> usize {
        let (exponent, step) = (16 + self.0 / 4, usize::from(self.0 % 4));
        (4 + step) << (exponent - 2)
    }

    /// Whether slots of this class are *big*: a big slot shares no block with other slots.
    #[inline]
    pub fn is_big(self) -> bool {
        self.bytes() >= BLOCK_BYTES
    }

    /// Distance in bytes between the starts of neighbouring slots of this class.
    pub fn stride(self) -> usize {
        if self.is_big() { self.bytes().next_multiple_of(BLOCK_BYTES) } else { self.bytes() }
    }

    /// Number of blocks in a span of this class: the fewest blocks that a whole number of slots fills.
    pub fn span_blocks(self) -> usize {
        // The largest odd divisor of the slot size is the fewest blocks that whole slots fill.
        if self.is_big() { self.stride() / BLOCK_BYTES } else { self.bytes() >> self.bytes().trailing_zeros() }
    }

    /// Number of slots in a span of this class.
    pub fn span_slots(self) -> usize {
        let span_bytes = self.span_blocks() * BLOCK_BYTES;
        debug_assert!(span_bytes.is_multiple_of(self.stride()), "slots fill a span");
        span_bytes / self.stride()
    }

    /// Every slot of this class starts at a multiple of this number of bytes.
    pub fn align(self) -> usize {
        if self.is_big() && !self.bytes().is_power_of_two() { BLOCK_BYTES } else { 1 << self.bytes().trailing_zeros() }
    }

    /// Every span of this class starts at a multiple of this number of blocks.
    pub fn span_align_blocks(self) -> usize {
        (self.align() / BLOCK_BYTES).max(1)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// For every class, a size just above the next smaller class must map to the class, and at most a fifth of a slot
    /// may be unused. Slots smaller than a block must fill a span of at most 7 blocks completely.
    #[test]
    fn classes_waste_at_most_a_fifth_and_fill_spans() {
        let mut below = 0;
        for class in (0..CLASS_COUNT).filter_map(Class::from_index) {
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

    /// `Class::with_align` must return a class with at least the requested size and alignment, or `None` if there is
    /// none.
    #[test]
    fn aligned_class_has_size_and_alignment() {
        for (size, align) in
            [(65 << 10, 4096), (65 << 10, 65536), (100 << 10, 1 << 20), (3 << 20, 1 << 30), (1, 2 << 20)]
        {
            let class = Class::with_align(size, align).unwrap();
            assert!(class.bytes() >= size && class.align() >= align, "{size} {align}");
        }
        assert_eq!(Class::with_align(1, 1 << 63), None);
    }
}
