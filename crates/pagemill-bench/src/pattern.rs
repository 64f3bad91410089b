//! What the bench writes into files, so that every record tells where it belongs.

/// The unit of reading and writing: IOzone's usual record, and a page.
pub const RECORD_BYTES: usize = 4096;

/// The first word of a record: other files, places and generations give other words.
fn word(file: u64, offset: u64, generation: u64) -> u64 {
    let mixed = file.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ offset.wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed.wrapping_add(generation.wrapping_mul(0xff51_afd7_ed55_8ccd)) | 1
}

/// Writes the first word alone: one store a record, which no measurement notices.
#[inline]
pub fn stamp(record: &mut [u8], file: u64, offset: u64, generation: u64) {
    record[..8].copy_from_slice(&word(file, offset, generation).to_le_bytes());
}

/// Whether a record has the first word that belongs there.
#[inline]
pub fn is_stamped(record: &[u8], file: u64, offset: u64, generation: u64) -> bool {
    record[..8] == word(file, offset, generation).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record is right at its own place in its own file and generation only; one byte changed is seen.
    #[test]
    fn records_know_their_place() {
        let mut record = [0; RECORD_BYTES];
        stamp(&mut record, 3, 8192, 1);

        assert!(is_stamped(&record, 3, 8192, 1) && !is_stamped(&record, 3, 8192, 0));
        assert!(!is_stamped(&record, 3, 4096, 1) && !is_stamped(&record, 4, 8192, 1));
        assert!(!is_stamped(&[0; RECORD_BYTES], 0, 0, 0), "what was never written is no record");
    }
}
