//! Checks and hashes of names.

use crate::error::{Error, Result};
use foldhash::quality::FixedState;
use std::hash::{BuildHasher, Hasher};

/// Maximum length of a name in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 255;
/// Maximum length of a path in bytes; with the terminating byte that system calls need, it is `PATH_MAX`.
pub(crate) const MAX_PATH_BYTES: usize = 4095;

/// Number of bits of a name's hash. A hash is also a cookie of `readdir`, which must be a positive `off_t`.
pub(crate) const HASH_BITS: u32 = 62;
/// Names with the same hash get hashes that differ in this many low bits.
pub(crate) const TIE_BITS: u32 = 3;

/// Checks a name for a new entry.
///
/// # Errors
///
/// [`Error::NameTooLong`]; [`Error::NotFound`] if it is empty; [`Error::Exists`] for `.` and `..`; [`Error::Invalid`]
/// with a slash or a zero byte.
pub(crate) fn check(name: &[u8]) -> Result<()> {
    check_length(name)?;
    match name {
        b"" => Err(Error::NotFound),
        b"." | b".." => Err(Error::Exists),
        name if name.contains(&b'/') || name.contains(&0) => {
            Err(Error::Invalid { what: "a name with a slash or a zero byte" })
        }
        _ => Ok(()),
    }
}

#[inline]
pub(crate) fn check_length(name: &[u8]) -> Result<()> {
    if name.len() <= MAX_NAME_BYTES {
        Ok(())
    } else {
        Err(Error::NameTooLong { len_bytes: name.len(), most_bytes: MAX_NAME_BYTES })
    }
}

/// The keyed hash function of a file system. The key is random, so that the creator of names cannot choose their hashes.
pub(crate) struct NameHasher {
    state: FixedState,
    /// Mask of the hash bits in use. Tests set few bits, so that names collide.
    mask: u64,
}

impl NameHasher {
    pub fn new(seed: u64, bits: u32) -> Self {
        let top = HASH_BITS - bits.clamp(TIE_BITS + 1, HASH_BITS);
        let mask = (1 << HASH_BITS) - (1 << top.max(TIE_BITS));
        Self { state: FixedState::with_seed(seed), mask }
    }

    /// Returns the hash of a name: [`HASH_BITS`] bits, of which the low [`TIE_BITS`] bits are 0. Never 0.
    #[inline]
    pub fn hash(&self, name: &[u8]) -> u64 {
        let mut hasher = self.state.build_hasher();
        hasher.write(name);
        (hasher.finish() >> (u64::BITS - HASH_BITS) & self.mask) | 1 << TIE_BITS
    }
}
