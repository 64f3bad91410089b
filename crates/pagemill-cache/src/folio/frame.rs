//! Frames: the metadata of pages.
#![allow(unsafe_code)] // `Zeroed` for a type of atomics

use super::word::Word;
use pagemill_core::arena::Zeroed;
use pagemill_core::sync::{AtomicU64, Relaxed};

/// Metadata of one page. In the first page of a folio: the folio's state word, and its owner.
#[repr(C)]
pub(crate) struct Frame {
    pub word: Word,
    pub(super) owner: AtomicU64,
}

// SAFETY: atomics only, for which zero bits are valid.
unsafe impl Zeroed for Frame {}

const _: () = assert!(size_of::<Frame>() == 16);

/// Number of bits of the owner word that hold a page's index in its file. The other bits hold the file's id.
const INDEX_BITS: u32 = 40;

/// The owner of a folio: the id of a file, and the index of the folio's first page in that file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Id of the file, at most [`Owner::MAX_ID`].
    pub id: u32,
    /// Index of the folio's first page.
    pub index: u64,
}

impl Owner {
    /// The largest file id.
    pub const MAX_ID: u32 = (1 << (u64::BITS - INDEX_BITS)) - 1;
    /// The largest page index.
    pub const MAX_INDEX: u64 = (1 << INDEX_BITS) - 1;

    #[inline]
    pub(super) fn pack(self) -> u64 {
        debug_assert!(self.id <= Self::MAX_ID && self.index <= Self::MAX_INDEX);
        u64::from(self.id) << INDEX_BITS | self.index
    }
}

impl Frame {
    /// Returns the owner of the folio that begins at this frame. Valid only if that folio is live.
    #[inline]
    pub fn owner(&self) -> Owner {
        let word = self.owner.load(Relaxed);
        Owner { id: (word >> INDEX_BITS) as u32, index: word & Owner::MAX_INDEX }
    }

    /// Returns whether the folio of 2^`order` pages that begins at this frame has the page with this owner. Valid only if
    /// that folio is live or frozen.
    #[inline]
    pub fn has_page(&self, page: Owner, order: u8) -> bool {
        // A folio is aligned to its length in the file, so that its pages differ in the lowest bits of the index only.
        (self.owner.load(Relaxed) ^ page.pack()) >> order == 0
    }
}
