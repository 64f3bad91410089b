//! Contents that the bench writes into files: every record identifies its file and offset.

/// The unit of reading and writing: IOzone's default record, and a page.
pub const RECORD_BYTES: usize = 4096;

/// The byte that fills a record after its first word.
const FILLING: u8 = 0xa5;

/// A buffer of whole records.
#[derive(Clone, Debug)]
pub struct Records(Vec<u8>);

/// The first word of a record, a hash of file, offset and generation.
#[inline]
pub fn word(file: u64, offset: u64, generation: u64) -> u64 {
    let mixed = file.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ offset.wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed.wrapping_add(generation.wrapping_mul(0xff51_afd7_ed55_8ccd)) | 1
}

/// Writes only the first word: one store per record, which is too cheap to affect a measurement.
#[inline]
pub fn stamp(record: &mut [u8], file: u64, offset: u64, generation: u64) {
    record[..8].copy_from_slice(&word(file, offset, generation).to_le_bytes());
}

/// Whether a record starts with its expected word.
#[inline]
pub fn is_stamped(record: &[u8], file: u64, offset: u64, generation: u64) -> bool {
    record[..8] == word(file, offset, generation).to_le_bytes()
}

impl Records {
    /// Makes records of this many bytes in all, not yet stamped.
    pub fn filled(len_bytes: usize) -> Self {
        assert!(len_bytes.is_multiple_of(RECORD_BYTES));
        Self(vec![FILLING; len_bytes])
    }

    /// Stamps the records for this file from `offset` on, and returns them.
    pub fn at(&mut self, file: u64, offset: u64) -> &[u8] {
        for (record, place) in self.0.chunks_exact_mut(RECORD_BYTES).zip((offset..).step_by(RECORD_BYTES)) {
            stamp(record, file, place, 0);
        }
        &self.0
    }
}

/// Whether every byte is what [`Records`] writes there.
pub fn is_whole(bytes: &[u8], file: u64, offset: u64) -> bool {
    let mut records = bytes.chunks(RECORD_BYTES).zip((offset..).step_by(RECORD_BYTES));
    records.all(|(record, place)| is_record(record, file, place, 0))
}

/// As [`is_whole`] for one record of this generation.
pub fn is_record(record: &[u8], file: u64, offset: u64, generation: u64) -> bool {
    record.len() == RECORD_BYTES
        && is_stamped(record, file, offset, generation)
        && record[8..] == [FILLING; RECORD_BYTES - 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record is valid only at its own offset in its own file and generation; one changed byte is detected.
    #[test]
    fn records_know_their_place() {
        let mut records = Records::filled(2 * RECORD_BYTES);
        let mut bytes = records.at(3, 8192).to_owned();

        assert!(is_whole(&bytes, 3, 8192));
        assert!(!is_whole(&bytes, 3, 4096) && !is_whole(&bytes, 4, 8192));
        assert!(is_stamped(&bytes[RECORD_BYTES..], 3, 8192 + 4096, 0) && !is_stamped(&bytes, 3, 8192, 1));
        assert!(!is_whole(&bytes[..5000], 3, 8192), "a cut record is not whole");
        stamp(&mut bytes[RECORD_BYTES..], 3, 8192 + 4096, 7);
        assert!(is_record(&bytes[RECORD_BYTES..], 3, 8192 + 4096, 7) && !is_whole(&bytes, 3, 8192), "of generation 7");
        stamp(&mut bytes[RECORD_BYTES..], 3, 8192 + 4096, 0);
        bytes[6000] = 0;
        assert!(!is_whole(&bytes, 3, 8192));
        assert!(!is_stamped(&[0; RECORD_BYTES], 0, 0, 0), "what was never written is no record");
    }
}
