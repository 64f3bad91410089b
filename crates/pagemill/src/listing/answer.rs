//! Answering: in the helper thread of the process that is asked.

use super::ranges::{RECORD_LEN, to_record};
use super::{Head, MOST_RECORDS, caches};
use crate::mapping::Caches;
use crate::published::{self, Subject};
use crate::reclaim::helper::Answer;
use crate::volatile::listed::Part;
use crate::volatile::{Listed, Ranges, Vranges};
use pagemill_sys::file::Blank;
use std::io;

/// Ranges copied before they are written: 12 KiB of stack, and some microseconds of the lock of marks.
const AT_A_TIME: usize = 128;

/// The helper has other things to do: siblings wait for it 25 ms at most. What caches hold is looked at for so long.
const MOST_LOOK_NS: u64 = 15_000_000;

/// Errors without a number of the system's.
const EIO: i32 = 5;

/// Lists the ranges and the caches of one Pagemill.
pub struct Lister {
    ranges: &'static Ranges,
    vranges: &'static Vranges,
    caches: &'static Caches,
}

impl Lister {
    pub(crate) fn new(ranges: &'static Ranges, vranges: &'static Vranges, caches: &'static Caches) -> Self {
        Self { ranges, vranges, caches }
    }

    /// Writes all ranges into an empty file, and the head last: who sees it sees a whole list.
    ///
    /// # Errors
    ///
    /// What writing the head says. What writing records says stands in the head.
    pub fn write(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Ranges)
    }

    /// As [`Lister::write`] of what caches hold.
    ///
    /// # Errors
    ///
    /// As [`Lister::write`].
    pub fn write_caches(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Caches)
    }

    fn write_list(&self, file: &Blank, number: u32, subject: Subject) -> io::Result<()> {
        let mut sheet = Sheet { file, records: 0, left_out: 0 };
        let result = match subject {
            Subject::Ranges => self.write_ranges(&mut sheet),
            Subject::Caches => self.caches.show(MOST_LOOK_NS, |holder, usage| {
                sheet.write(&caches::to_record(holder, usage), caches::RECORD_LEN)?;
                sheet.records += 1;
                Ok(())
            }),
        };
        let errno = result.err().map_or(0, |error: io::Error| error.raw_os_error().unwrap_or(EIO));
        let head = Head { number, errno: errno as u32, records: sheet.records, left_out: sheet.left_out };
        // The magic last: who sees that sees a whole head.
        let bytes = head.to_bytes(subject);
        let (magic, rest) = bytes.split_at(8);
        file.write_at(rest, 8)?;
        file.write_at(magic, 0)
    }

    fn write_ranges(&self, sheet: &mut Sheet) -> io::Result<()> {
        sheet.take(|from, into| self.ranges.list(from, into))?;
        sheet.take(|from, into| self.vranges.list_from(from, into))
    }
}

impl Answer for Lister {
    fn answer(&self, number: u32) {
        let Some(own) = published::own_file() else { return };
        for subject in Subject::ALL {
            // Who asked has gone, asked for another list, or is not who may ask: there is nobody to tell.
            if let Some(path) = published::request_of(own.as_str(), subject, number)
                && let Ok(file) = Blank::open(path.as_c_str())
            {
                let _ = self.write_list(&file, number, subject);
            }
        }
    }
}

/// A file that is being written.
struct Sheet<'file> {
    file: &'file Blank,
    records: u64,
    left_out: u64,
}

impl Sheet<'_> {
    /// Writes what `list` copies, part by part, from its start on.
    fn take(&mut self, list: impl Fn(usize, &mut [Listed]) -> Part) -> io::Result<()> {
        let (mut part, mut from) = ([Listed::NONE; AT_A_TIME], Some(0));
        while let Some(start) = from {
            let Part { count, next } = list(start, &mut part);
            self.add(&part[..count])?;
            from = next;
        }
        Ok(())
    }

    fn add(&mut self, part: &[Listed]) -> io::Result<()> {
        let room = usize::try_from(MOST_RECORDS - self.records).unwrap_or(usize::MAX);
        let (kept, left_out) = part.split_at(part.len().min(room));
        let mut bytes = [0; AT_A_TIME * RECORD_LEN];
        for (place, listed) in bytes.chunks_exact_mut(RECORD_LEN).zip(kept) {
            place.copy_from_slice(&to_record(listed));
        }
        self.write(&bytes[..kept.len() * RECORD_LEN], RECORD_LEN)?;
        self.records += kept.len() as u64;
        self.left_out += left_out.len() as u64;
        Ok(())
    }

    /// Writes bytes behind the records that there are.
    fn write(&self, bytes: &[u8], record_len: usize) -> io::Result<()> {
        self.file.write_at(bytes, Head::LEN as u64 + self.records * record_len as u64)
    }
}
