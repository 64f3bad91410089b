//! Contents that the bench writes into files. Each record starts with a stamp that depends on its file, its offset and
//! a generation number. The generation number distinguishes the writes of one record.

/// The unit of reading and writing: the default record size of IOzone, and the size of a page.
pub const RECORD_BYTES: usize = 4096;

/// The byte that fills the rest of a record after its stamp.
const FILL_BYTE: u8 = 0xa5;

/// A buffer of whole records of [`RECORD_BYTES`] bytes each.
#[derive(Clone, Debug)]
pub struct Records(Vec<u8>);

/// Returns the stamp of a record: a hash of file, offset and generation.
#[inline]
pub fn stamp_word(file: u64, offset: u64, generation: u64) -> u64 {
    let mixed = file.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ offset.wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed.wrapping_add(generation.wrapping_mul(0xff51_afd7_ed55_8ccd)) | 1
}

/// Returns the 8 bytes at `offset`, a multiple of 8, of a file of stamped records.
#[inline]
pub fn word_at(file: u64, offset: u64) -> u64 {
    match offset.is_multiple_of(RECORD_BYTES as u64) {
        true => stamp_word(file, offset, 0),
        false => u64::from_le_bytes([FILL_BYTE; 8]),
    }
}

/// Writes the stamp into the first 8 bytes of a record. One store per record is too cheap to affect a measurement.
#[inline]
pub fn stamp(record: &mut [u8], file: u64, offset: u64, generation: u64) {
    record[..8].copy_from_slice(&stamp_word(file, offset, generation).to_le_bytes());
}

/// Returns whether a record starts with its expected stamp.
#[inline]
pub fn is_stamped(record: &[u8], file: u64, offset: u64, generation: u64) -> bool {
    record[..8] == stamp_word(file, offset, generation).to_le_bytes()
}

impl Records {
    /// Makes records of `len_bytes` bytes in total. Their stamps are not written yet.
    pub fn filled(len_bytes: usize) -> Self {
        assert!(len_bytes.is_multiple_of(RECORD_BYTES));
        Self(vec![FILL_BYTE; len_bytes])
    }

    /// Stamps the records for this file, starting at file offset `offset`, and returns their bytes.
    pub fn stamped_at(&mut self, file: u64, offset: u64) -> &[u8] {
        self.stamped(file, offset, 0)
    }

    /// As [`Records::stamped_at`], but stamps the records with the generation number `generation`.
    pub fn stamped(&mut self, file: u64, offset: u64, generation: u64) -> &[u8] {
        for (record, record_offset) in self.0.chunks_exact_mut(RECORD_BYTES).zip((offset..).step_by(RECORD_BYTES)) {
            stamp(record, file, record_offset, generation);
        }
        &self.0
    }
}

/// Returns whether every byte is what [`Records::stamped_at`] writes for this file and offset.
pub fn is_intact(bytes: &[u8], file: u64, offset: u64) -> bool {
    let mut records = bytes.chunks(RECORD_BYTES).zip((offset..).step_by(RECORD_BYTES));
    records.all(|(record, record_offset)| is_intact_record(record, file, record_offset, 0))
}

/// Returns whether one record has the stamp of this generation, and the fill byte in all other places.
pub fn is_intact_record(record: &[u8], file: u64, offset: u64, generation: u64) -> bool {
    record.len() == RECORD_BYTES
        && is_stamped(record, file, offset, generation)
        && record[8..] == [FILL_BYTE; RECORD_BYTES - 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record must be valid only in its own file, at its own offset, and in its own generation. One changed byte must
    /// make it invalid.
    #[test]
    fn record_is_intact_only_at_its_own_offset() {
        let mut records = Records::filled(2 * RECORD_BYTES);
        let mut bytes = records.stamped_at(3, 8192).to_owned();

        assert!(is_intact(&bytes, 3, 8192));
        assert!(!is_intact(&bytes, 3, 4096) && !is_intact(&bytes, 4, 8192));
        assert!(is_stamped(&bytes[RECORD_BYTES..], 3, 8192 + 4096, 0) && !is_stamped(&bytes, 3, 8192, 1));
        assert!(!is_intact(&bytes[..5000], 3, 8192), "a cut record is not whole");
        stamp(&mut bytes[RECORD_BYTES..], 3, 8192 + 4096, 7);
        assert!(
            is_intact_record(&bytes[RECORD_BYTES..], 3, 8192 + 4096, 7) && !is_intact(&bytes, 3, 8192),
            "of generation 7"
        );
        stamp(&mut bytes[RECORD_BYTES..], 3, 8192 + 4096, 0);
        bytes[6000] = 0;
        assert!(!is_intact(&bytes, 3, 8192));
        assert!(!is_stamped(&[0; RECORD_BYTES], 0, 0, 0), "what was never written is no record");
    }
}
