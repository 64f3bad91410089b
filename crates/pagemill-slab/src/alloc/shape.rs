//! The layout of a slab cache: distance between objects, objects per slab, and slabs per block.

use pagemill_core::error::{Error, Result};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};

/// Maximum number of objects in a slab. A bitmap with one bit for each object then fits into a cache line.
pub(crate) const MAX_OBJECTS: usize = 512;

/// Minimum slab size, unless an OS page is larger.
pub(crate) const MIN_SLAB_BYTES: usize = 16 << 10;

/// Slab size for most object sizes. A larger size is chosen only if slabs of this size would waste too much memory.
const DEFAULT_SLAB_BYTES: usize = 64 << 10;

/// Maximum number of slabs in a block.
pub(crate) const MAX_SLABS: usize = BLOCK_BYTES / MIN_SLAB_BYTES;

/// A slab size is chosen so that at most `1 / WASTE_DIVISOR` of a slab is unused after its last object.
const WASTE_DIVISOR: usize = 8;

/// Approximate size in bytes of the free objects in one sheaf.
const SHEAF_BYTES: usize = 32 << 10;

/// Maximum number of objects in a sheaf.
pub(crate) const MAX_SHEAF_LEN: usize = 62;

/// The layout of objects in slabs and of slabs in blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Distance in bytes from one object to the next.
    pub stride: usize,
    pub slab_bytes: usize,
    /// Number of objects in a slab.
    pub capacity: u32,
    /// Number of slabs in a block.
    pub slabs: u32,
    /// Number of objects in a sheaf.
    pub sheaf_len: usize,
    /// Log2 of `slab_bytes`.
    slab_shift: u32,
    /// 2^32 divided by `stride`, rounded up. Multiplication by this number replaces the division by the stride.
    reciprocal: u64,
}

impl Shape {
    /// Computes the layout for objects of `bytes` at multiples of `align`. `slab_bytes` is the slab size; if `None`, a
    /// suitable size is chosen.
    ///
    /// # Errors
    ///
    /// [`Error::BadLength`] for objects larger than a slab, and for slab sizes that are not a power of two from 16 KiB
    /// (and the OS page) to 2 MiB; [`Error::BadAlignment`] if `align` exceeds the slab size.
    pub fn new(bytes: usize, align: usize, slab_bytes: Option<usize>) -> Result<Self> {
        let least = MIN_SLAB_BYTES.max(os_page_bytes());
        let slab_bytes = match slab_bytes {
            None => Self::choose_slab_bytes(bytes.max(1).next_multiple_of(align), least),
            Some(bytes) if bytes.is_power_of_two() && (least..=BLOCK_BYTES).contains(&bytes) => bytes,
            Some(bytes) => return Err(Error::BadLength { len_bytes: bytes as u64 }),
        };
        if align > slab_bytes {
            return Err(Error::BadAlignment { align_bytes: align });
        }
        let stride = bytes.max(slab_bytes / MAX_OBJECTS).next_multiple_of(align.max(size_of::<u64>()));
        if stride > slab_bytes {
            return Err(Error::BadLength { len_bytes: bytes as u64 });
        }
        debug_assert!(stride > 0 && slab_bytes / stride <= MAX_OBJECTS, "bits for each object");
        debug_assert!(slab_bytes.is_power_of_two() && BLOCK_BYTES / slab_bytes <= MAX_SLABS, "slabs fill a block");
        Ok(Self {
            stride,
            slab_bytes,
            capacity: (slab_bytes / stride) as u32,
            slabs: (BLOCK_BYTES / slab_bytes) as u32,
            sheaf_len: (SHEAF_BYTES / stride).clamp(2, MAX_SHEAF_LEN),
            slab_shift: slab_bytes.trailing_zeros(),
            reciprocal: (1u64 << 32).div_ceil(stride as u64),
        })
    }

    /// Chooses the slab size: the largest power of two that [`MAX_OBJECTS`] objects fill, but at least `least` bytes
    /// and normally at most [`DEFAULT_SLAB_BYTES`]. A larger slab would spread few objects over more memory. The size
    /// is doubled while too much of the slab would be wasted.
    fn choose_slab_bytes(stride: usize, least: usize) -> usize {
        let filled = 1 << stride.saturating_mul(MAX_OBJECTS).ilog2();
        let full = filled.clamp(least, DEFAULT_SLAB_BYTES.max(least));
        let wastes = |slab: usize| slab < stride || slab % stride > slab / WASTE_DIVISOR;
        let sizes = std::iter::successors(Some(full), |slab| (*slab < BLOCK_BYTES).then(|| slab * 2));
        sizes.clone().find(|slab| !wastes(*slab)).or_else(|| sizes.last()).unwrap_or(full)
    }

    /// Finds the object at offset `in_block` of a block. Returns the index of its slab in the block, its index in the
    /// slab, and whether an object begins exactly at this offset.
    #[inline]
    pub fn locate(&self, in_block: usize) -> (u32, u32, bool) {
        debug_assert!(in_block < BLOCK_BYTES);
        let offset = in_block & (self.slab_bytes - 1);
        let object = ((offset as u64 * self.reciprocal) >> 32) as u32;
        let is_object = object as usize * self.stride == offset && object < self.capacity;
        ((in_block >> self.slab_shift) as u32, object, is_object)
    }

    /// Returns the offset of an object in its block, in bytes.
    #[inline]
    pub fn offset_of(&self, slab: u32, object: u32) -> usize {
        debug_assert!(slab < self.slabs && object < self.capacity);
        ((slab as usize) << self.slab_shift) + object as usize * self.stride
    }

    /// Returns the number of objects in a block.
    pub fn block_capacity(&self) -> u32 {
        self.slabs * self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For object sizes over the whole range, `locate` must find each object at its offset. At the next byte it must
    /// report that no object begins there.
    #[test]
    fn objects_are_located_by_their_offset() {
        for bytes in (1..600).chain([1000, 4096, 8192, 10_000, 40_000, 65_536, 100_000, 1 << 20]) {
            let shape = Shape::new(bytes, 8, None).unwrap();
            assert!(shape.stride >= bytes && shape.capacity >= 1 && shape.capacity as usize <= MAX_OBJECTS);
            for slab in [0, 1, shape.slabs - 1] {
                for object in 0..shape.capacity {
                    let at = shape.offset_of(slab.min(shape.slabs - 1), object);
                    assert_eq!(shape.locate(at), (slab.min(shape.slabs - 1), object, true), "{bytes}");
                    assert!(!shape.locate(at + 1).2);
                }
            }
        }
    }

    /// For many object sizes, the chosen slab size must leave at most an eighth of a slab unused after the last object.
    #[test]
    fn chosen_slab_size_wastes_little() {
        for (bytes, slab_bytes) in [(32, 16), (64, 32), (192, 64), (576, 64), (4096, 64), (40_960, 128)] {
            let shape = Shape::new(bytes, 8, None).unwrap();
            assert_eq!((shape.slab_bytes, shape.stride), (slab_bytes << 10, bytes), "{bytes}");
        }
        let least = MIN_SLAB_BYTES.max(os_page_bytes());
        for bytes in (least / MAX_OBJECTS..=DEFAULT_SLAB_BYTES).step_by(size_of::<u64>()) {
            let shape = Shape::new(bytes, 8, None).unwrap();
            assert_eq!(shape.stride, bytes);
            let lost = shape.slab_bytes - shape.capacity as usize * shape.stride;
            assert!(lost <= shape.slab_bytes / WASTE_DIVISOR, "{bytes}");
        }
    }

    #[test]
    fn unsupported_object_and_slab_sizes_are_refused() {
        for bytes in [BLOCK_BYTES + 1, 1 << 56, isize::MAX as usize - 7] {
            assert!(matches!(Shape::new(bytes, 8, None), Err(Error::BadLength { .. })), "{bytes}");
        }
        assert!(matches!(Shape::new(64, 2 * BLOCK_BYTES, None), Err(Error::BadAlignment { .. })));
        for slab_bytes in [0, 1 << 10, 48 << 10, 2 * BLOCK_BYTES] {
            assert!(matches!(Shape::new(64, 8, Some(slab_bytes)), Err(Error::BadLength { .. })), "{slab_bytes}");
        }
    }
}
