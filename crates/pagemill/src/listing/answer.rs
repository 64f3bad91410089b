//! Answering: in the helper thread of the process that is asked.

use super::{Head, MOST_RECORDS, RECORD_LEN, to_record};
use crate::published;
use crate::reclaim::helper::Answer;
use crate::volatile::listed::Part;
use crate::volatile::{Listed, Ranges, Vranges};
use pagemill_sys::file::Blank;
use std::io;

/// Ranges copied before they are written: 12 KiB of stack, and some microseconds of the lock of marks.
const AT_A_TIME: usize = 128;

/// Errors without a number of the system's.
const EIO: i32 = 5;

/// Lists the ranges of one Pagemill.
pub struct Lister {
    ranges: &'static Ranges,
    vranges: &'static Vranges,
}

impl Lister {
    pub(crate) fn new(ranges: &'static Ranges, vranges: &'static Vranges) -> Self {
        Self { ranges, vranges }
    }

    /// Writes all ranges into an empty file, and the head last: who sees it sees a whole list.
    ///
    /// # Errors
    ///
    /// What writing the head says. What writing records says stands in the head.
    pub fn write(&self, file: &Blank, number: u32) -> io::Result<()> {
        let mut sheet = Sheet { file, records: 0, left_out: 0 };
        let result = self.write_records(&mut sheet);
        let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(EIO));
        let head = Head { number, errno: errno as u32, records: sheet.records, left_out: sheet.left_out };
        // The magic last: who sees that sees a whole head.
        let bytes = head.to_bytes();
        let (magic, rest) = bytes.split_at(8);
        file.write_at(rest, 8)?;
        file.write_at(magic, 0)
    }

    fn write_records(&self, sheet: &mut Sheet) -> io::Result<()> {
        sheet.take(|from, into| self.ranges.list(from, into))?;
        sheet.take(|from, into| self.vranges.list_from(from, into))
    }
}

impl Answer for Lister {
    fn answer(&self, number: u32) {
        let request = published::own_file().and_then(|own| published::request_of(own.as_str(), number));
        // Who asked has gone, or is not who may ask: there is nobody to tell.
        if let Some(path) = request
            && let Ok(file) = Blank::open(path.as_c_str())
        {
            let _ = self.write(&file, number);
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
        let offset = Head::LEN as u64 + self.records * RECORD_LEN as u64;
        self.file.write_at(&bytes[..kept.len() * RECORD_LEN], offset)?;
        self.records += kept.len() as u64;
        self.left_out += left_out.len() as u64;
        Ok(())
    }
}
