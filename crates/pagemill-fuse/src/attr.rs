//! Conversion of attributes, times and names between the file system and the protocol.

use fuser::{FileAttr, INodeNo, TimeOrNow};
use pagemill_ramfs::{Attr, FileType, SetTime};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Unit of [`FileAttr::blocks`].
const BLOCK_BYTES: u64 = 512;

/// Returns the attributes in the form of the protocol.
pub(crate) fn to_fuse(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino),
        size: attr.size_bytes,
        blocks: attr.allocated_bytes.div_ceil(BLOCK_BYTES),
        atime: to_system_time(attr.accessed_ns),
        mtime: to_system_time(attr.modified_ns),
        ctime: to_system_time(attr.changed_ns),
        crtime: to_system_time(attr.created_ns),
        kind: kind_to_fuse(attr.kind),
        perm: attr.mode as u16,
        nlink: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.device as u32,
        blksize: attr.page_bytes,
        flags: 0,
    }
}

/// Returns the attributes that mean "this name does not exist": the number 0.
pub(crate) fn missing() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: fuser::FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

pub(crate) fn kind_to_fuse(kind: FileType) -> fuser::FileType {
    match kind {
        FileType::Fifo => fuser::FileType::NamedPipe,
        FileType::CharDevice => fuser::FileType::CharDevice,
        FileType::Directory => fuser::FileType::Directory,
        FileType::BlockDevice => fuser::FileType::BlockDevice,
        FileType::Regular => fuser::FileType::RegularFile,
        FileType::Symlink => fuser::FileType::Symlink,
        FileType::Socket => fuser::FileType::Socket,
    }
}

fn to_system_time(ns: i64) -> SystemTime {
    let distance = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 { UNIX_EPOCH + distance } else { UNIX_EPOCH - distance }
}

/// Returns a time of a request. Times that do not fit (before 1677, after 2262) become the nearest one that does.
pub(crate) fn to_set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::To(to_ns(time)),
    }
}

/// Returns nanoseconds since 1970.
///
/// The kernel sends a time before 1970 as negative seconds plus nanoseconds. `fuser` 0.18 subtracts the nanoseconds
/// instead of adding them, which this function reverses.
fn to_ns(time: SystemTime) -> i64 {
    let whole = |distance: Duration| i64::try_from(distance.as_secs()).unwrap_or(i64::MAX);
    let (seconds, nanoseconds) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (whole(after), after.subsec_nanos()),
        Err(before) => (-whole(before.duration()), before.duration().subsec_nanos()),
    };
    seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times on both sides of 1970 and beyond the limits must be converted in both directions.
    #[test]
    fn times_before_and_after_1970() {
        for ns in [0, 1, 1_500_000_000, -1_000_000_000, i64::MAX, i64::MIN + 1] {
            let distance = UNIX_EPOCH.duration_since(to_system_time(ns)).map_or_else(|_| 0, |it| it.as_nanos());
            assert_eq!(distance, if ns < 0 { u128::from(ns.unsigned_abs()) } else { 0 });
        }
        assert_eq!(to_ns(UNIX_EPOCH + Duration::new(3, 5)), 3_000_000_005);
        // What `fuser` makes of -2 s + 0.75 s.
        assert_eq!(to_ns(UNIX_EPOCH - Duration::new(2, 750_000_000)), -1_250_000_000);
        assert_eq!(to_ns(UNIX_EPOCH + Duration::from_secs(1 << 40)), i64::MAX);
        assert_eq!(to_ns(UNIX_EPOCH - Duration::from_secs(1 << 40)), i64::MIN);
    }
}
