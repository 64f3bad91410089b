//! The format of the 64-bit words in the slots of nodes.
//!
//! ```text
//!   63                      32 31        16 15      8 7      0
//!   |                value                 |  order  |  VALUE  |   an entry, in its first slot
//!   |          node          |      0      |  shift  |  NODE   |   a node below
//!   |                  0                   |  order  |  GONE   |   first slot, while the entry is inserted or removed
//!   |                  0                   |  slot   | SIBLING |   a later slot of an entry: number of the first slot
//!   |                              0                 |  DEAD   |   the node has left the tree: restart at the root
//!   |                              0                           |   empty
//! ```
//!
//! A word that points at a node contains the node's shift, so readers need not read the node's metadata. A word with a
//! value contains its order, so the first index of the entry follows from the word and any index in the entry.

/// Number of bits of an index that one level of the tree uses.
pub(super) const SLOT_BITS: u32 = 6;
/// Number of slots in a node.
pub(super) const SLOTS: usize = 1 << SLOT_BITS;

/// The largest index that an [`XArray`](super::XArray) can map.
pub const MAX_INDEX: u64 = (1 << 40) - 1;
/// The largest value that an entry can have.
pub const MAX_VALUE: u64 = (1 << 48) - 1;
/// The largest order that an entry can have. An entry of order n covers `1 << n` indices.
pub const MAX_ORDER: u32 = 11;
/// Shift of the root node in the tallest tree.
pub(super) const MAX_SHIFT: u32 = 36;

/// Tag of a VALUE word. The tag is the lowest byte of a word and tells its kind; the module documentation describes the
/// kinds.
const VALUE_TAG: u64 = 1;
const NODE_TAG: u64 = 2;
const GONE_TAG: u64 = 3;
/// Tag of a SIBLING word. Lookups end only at words with lower tags.
const SIBLING_TAG: u64 = 4;
const DEAD_TAG: u64 = 5;

/// Mask of the tag in a word.
const TAG_MASK: u64 = 0xFF;
/// Lowest bit, in a word, of the field that contains an order, a shift or a slot number.
const FIELD_SHIFT: u32 = 8;
/// Mask of the field that contains an order, a shift or a slot number, after the field was shifted down to bit 0.
const FIELD_MASK: u64 = 0xFF;
/// Lowest bit of the value in a VALUE word.
const VALUE_SHIFT: u32 = 16;
/// Lowest bit of the node number in a NODE word.
const NODE_NUMBER_SHIFT: u32 = 32;

/// A word in a slot, or the root word of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IndexWord(pub u64);

impl IndexWord {
    pub const EMPTY: Self = Self(0);
    pub const DEAD: Self = Self(DEAD_TAG);

    #[inline]
    pub fn value(value: u64, order: u32) -> Self {
        debug_assert!(value <= MAX_VALUE);
        debug_assert!(order <= MAX_ORDER);
        Self(value << VALUE_SHIFT | u64::from(order) << FIELD_SHIFT | VALUE_TAG)
    }

    #[inline]
    pub fn node(number: u32, shift: u32) -> Self {
        debug_assert!(shift <= MAX_SHIFT);
        debug_assert!(shift.is_multiple_of(SLOT_BITS));
        Self(u64::from(number) << NODE_NUMBER_SHIFT | u64::from(shift) << FIELD_SHIFT | NODE_TAG)
    }

    #[inline]
    pub fn sibling(first: usize) -> Self {
        debug_assert!(first < SLOTS);
        Self((first as u64) << FIELD_SHIFT | SIBLING_TAG)
    }

    /// Returns the GONE word for the entry of this VALUE word. It is in the entry's first slot while the entry's later
    /// slots are written or cleared, so that readers find no entry.
    pub fn gone(self) -> Self {
        debug_assert!(self.is_value());
        Self(self.0 & FIELD_MASK << FIELD_SHIFT | GONE_TAG)
    }

    #[inline]
    fn tag(self) -> u64 {
        self.0 & TAG_MASK
    }

    #[inline]
    fn field(self) -> u32 {
        (self.0 >> FIELD_SHIFT & FIELD_MASK) as u32
    }

    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    #[inline]
    pub fn is_value(self) -> bool {
        self.tag() == VALUE_TAG
    }

    #[inline]
    pub fn is_node(self) -> bool {
        self.tag() == NODE_TAG
    }

    #[inline]
    pub fn is_sibling(self) -> bool {
        self.tag() == SIBLING_TAG
    }

    /// Returns whether a lookup that reads this word ends at it. Returns false for SIBLING and DEAD words.
    #[inline]
    pub fn decides_lookup(self) -> bool {
        self.tag() < SIBLING_TAG
    }

    /// Returns the value in a VALUE word.
    #[inline]
    pub fn to_value(self) -> u64 {
        debug_assert!(self.is_value());
        self.0 >> VALUE_SHIFT
    }

    /// Returns the order in a VALUE or GONE word.
    #[inline]
    pub fn order(self) -> u32 {
        debug_assert!(matches!(self.tag(), VALUE_TAG | GONE_TAG));
        self.field()
    }

    /// Returns the node number in a NODE word.
    #[inline]
    pub fn number(self) -> u32 {
        debug_assert!(self.is_node());
        (self.0 >> NODE_NUMBER_SHIFT) as u32
    }

    /// Returns the shift in a NODE word: each slot of the node covers `1 << shift` indices.
    #[inline]
    pub fn shift(self) -> u32 {
        debug_assert!(self.is_node());
        self.field()
    }

    /// Returns the slot number in a SIBLING word: the first slot of the entry.
    #[inline]
    pub fn first_slot(self) -> usize {
        debug_assert!(self.is_sibling());
        self.field() as usize
    }

    /// Returns whether a tree with this root word covers the index.
    #[inline]
    pub fn reaches(self, index: u64) -> bool {
        if self.is_node() { index >> self.shift() < SLOTS as u64 } else { index == 0 }
    }

    /// Returns the number of slots that the entry of this VALUE word occupies in a node with this shift.
    pub fn slots(self, shift: u32) -> usize {
        debug_assert!(self.order() >= shift);
        debug_assert!(self.order() - shift < SLOT_BITS);
        1 << (self.order() - shift)
    }

    /// Returns whether this word, read from slot `first`, is VALUE or GONE, and its entry includes slot `slot`.
    #[inline]
    pub fn covers(self, first: usize, slot: usize, shift: u32) -> bool {
        debug_assert!(first <= slot);
        matches!(self.tag(), VALUE_TAG | GONE_TAG) && (slot - first) >> (self.order() - shift) == 0
    }
}

/// Returns the slot that covers `index` in a node with this shift.
#[inline]
pub(super) fn slot_of(index: u64, shift: u32) -> usize {
    (index >> shift) as usize % SLOTS
}

/// Returns the shift of the nodes that contain entries of this order.
pub(super) fn shift_of(order: u32) -> u32 {
    debug_assert!(order <= MAX_ORDER);
    order / SLOT_BITS * SLOT_BITS
}

/// Returns the first index of an entry of this order that covers `index`.
#[inline]
pub(super) fn first_index_of(index: u64, order: u32) -> u64 {
    index >> order << order
}

/// Returns the last index of the aligned range of `1 << bits` indices that contains `index`.
#[inline]
pub(super) fn last_index_of(index: u64, bits: u32) -> u64 {
    debug_assert!(bits < u64::BITS);
    index | ((1 << bits) - 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Creates words with the smallest and largest values of their fields. Each word must return its fields and must be
    /// of exactly one kind.
    #[test]
    fn words_return_their_fields() {
        for value in [0, 1, MAX_VALUE - 1, MAX_VALUE] {
            for order in 0..=MAX_ORDER {
                let word = IndexWord::value(value, order);
                assert!(
                    word.is_value()
                        && word.decides_lookup()
                        && !word.is_node()
                        && !word.is_sibling()
                        && !word.is_empty()
                );
                assert_eq!((word.to_value(), word.order()), (value, order));
                assert!(!word.gone().is_value() && word.gone().decides_lookup() && !word.gone().is_empty());
                assert_eq!(word.gone().order(), order);
            }
        }
        for (number, shift) in [(1, 0), (u32::MAX, MAX_SHIFT), (7, SLOT_BITS)] {
            let word = IndexWord::node(number, shift);
            assert!(
                word.is_node() && word.decides_lookup() && !word.is_value() && !word.is_sibling() && !word.is_empty()
            );
            assert_eq!((word.number(), word.shift()), (number, shift));
        }
        for slot in 0..SLOTS {
            let word = IndexWord::sibling(slot);
            assert!(
                word.is_sibling() && !word.decides_lookup() && !word.is_value() && !word.is_node() && !word.is_empty()
            );
            assert_eq!(word.first_slot(), slot);
        }
        assert!(!IndexWord::DEAD.decides_lookup() && !IndexWord::DEAD.is_sibling() && !IndexWord::DEAD.is_empty());
        assert!(IndexWord::EMPTY.decides_lookup() && IndexWord::EMPTY.is_empty() && !IndexWord::EMPTY.is_value());
    }

    /// `covers` must be true for the slots of an entry, and false for the slot after them and for words that are no
    /// entry.
    #[test]
    fn an_entry_covers_its_slots() {
        let word = IndexWord::value(5, 9);
        assert_eq!((word.slots(6), shift_of(9), shift_of(5), shift_of(MAX_ORDER)), (8, 6, 0, 6));
        assert!(word.covers(8, 15, 6) && word.gone().covers(8, 9, 6));
        assert!(!word.covers(8, 16, 6) && !IndexWord::node(1, 0).covers(8, 9, 6) && !IndexWord::EMPTY.covers(8, 9, 6));
    }

    /// A root word that refers to no node must reach index 0 only. A root word that refers to a node of the largest
    /// shift must reach all indices.
    #[test]
    fn a_root_reaches_its_indices() {
        assert!(
            IndexWord::value(1, 0).reaches(0) && !IndexWord::value(1, 0).reaches(1) && !IndexWord::EMPTY.reaches(1)
        );
        assert!(IndexWord::node(1, 0).reaches(63) && !IndexWord::node(1, 0).reaches(64));
        assert!(IndexWord::node(1, MAX_SHIFT).reaches(MAX_INDEX) && !IndexWord::node(1, MAX_SHIFT).reaches(u64::MAX));
        assert_eq!((slot_of(MAX_INDEX, 0), slot_of(64, SLOT_BITS), slot_of(64, 0)), (SLOTS - 1, 1, 0));
        assert_eq!((first_index_of(1023, 9), last_index_of(512, 9)), (512, 1023));
    }
}
