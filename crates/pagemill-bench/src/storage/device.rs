//! Reads how many writes the block device below a file has completed. The writes of all processes count.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Index of the field of `/sys/dev/block/*/stat` that counts completed writes. The kernel counts writes after it has
/// merged adjacent ones.
const WRITES_FIELD_INDEX: usize = 4;

/// Returns the number of writes that the device of a file has completed. Returns none if the file system has no single
/// device with such a count.
pub fn completed_writes(path: &Path) -> Option<u64> {
    let metadata = fs::metadata(path).ok()?;
    let device = if metadata.file_type().is_block_device() { metadata.rdev() } else { metadata.dev() };
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    parse_completed_writes(&fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?)
}

fn parse_completed_writes(line: &str) -> Option<u64> {
    line.split_whitespace().nth(WRITES_FIELD_INDEX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of completed writes must be the fifth number of the line. A file without a block device must have no
    /// such number.
    #[test]
    fn completed_writes_are_parsed() {
        assert_eq!(parse_completed_writes("  100  2  300 4  57 6  700 8 0 10 11\n"), Some(57));
        assert!(parse_completed_writes("").is_none() && completed_writes(Path::new("/proc/self/stat")).is_none());
    }
}
