//! Answering: in the helper thread of the process that is asked.

use super::clerk::Clerk;
use super::ranges::{RECORD_LEN, to_record};
use super::{Head, MOST_RECORDS, caches, slabs};
use crate::mapping::Caches;
use crate::published::{self, Subject};
use crate::reclaim::helper::Answer;
use crate::slab::Slabs;
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

/// Lists the ranges and the caches of one Pagemill, and passes orders on.
pub struct Lister {
    ranges: &'static Ranges,
    vranges: &'static Vranges,
    caches: &'static Caches,
    slabs: &'static Slabs,
    clerk: &'static Clerk,
}

impl Lister {
    pub(crate) fn new(
        (ranges, vranges): (&'static Ranges, &'static Vranges),
        caches: &'static Caches,
        slabs: &'static Slabs,
        clerk: &'static Clerk,
    ) -> Self {
        Self { ranges, vranges, caches, slabs, clerk }
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

    /// As [`Lister::write`] of slab caches.
    ///
    /// # Errors
    ///
    /// As [`Lister::write`].
    pub fn write_slabs(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Slabs)
    }

    fn write_list(&self, file: &Blank, number: u32, subject: Subject) -> io::Result<()> {
        let mut sheet = Sheet::behind(file, 0);
        let result = match subject {
            Subject::Ranges => self.write_ranges(&mut sheet),
            Subject::Caches => {
                self.caches.show(MOST_LOOK_NS, |holder, usage| sheet.put(&caches::to_record(holder, usage)))
            }
            Subject::Slabs => self
                .slabs
                .show(MOST_LOOK_NS, |id, info, node, figures| sheet.put(&slabs::to_record(id, info, node, figures))),
            Subject::SlabOrder => Ok(()),
        };
        sheet.end(number, subject, result)
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
            let Some(path) = published::request_of(own.as_str(), subject, number) else { continue };
            // Who asked has gone, asked for another list, or is not who may ask: there is nobody to tell.
            match subject {
                Subject::SlabOrder => self.clerk.take(path.as_c_str(), number),
                Subject::Ranges | Subject::Caches | Subject::Slabs => {
                    if let Ok(file) = Blank::open(path.as_c_str()) {
                        let _ = self.write_list(&file, number, subject);
                    }
                }
            }
        }
    }
}

/// A file that is being written, with its head at `from`.
pub(super) struct Sheet<'file> {
    file: &'file Blank,
    from: u64,
    records: u64,
    left_out: u64,
}

impl<'file> Sheet<'file> {
    /// An answer behind so many bytes of the request.
    pub fn behind(file: &'file Blank, len: usize) -> Self {
        Self { file, from: len as u64, records: 0, left_out: 0 }
    }

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

    /// Writes the next record.
    pub fn put(&mut self, record: &[u8]) -> io::Result<()> {
        self.write(record, record.len())?;
        self.records += 1;
        Ok(())
    }

    /// Writes bytes behind the records that there are.
    fn write(&self, bytes: &[u8], record_len: usize) -> io::Result<()> {
        self.file.write_at(bytes, self.from + Head::LEN as u64 + self.records * record_len as u64)
    }

    /// Writes the head, of a list that ended so.
    pub fn end(self, number: u32, subject: Subject, result: io::Result<()>) -> io::Result<()> {
        let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(EIO));
        let head = Head { number, errno: errno as u32, records: self.records, left_out: self.left_out };
        // The magic last: who sees that sees a whole head.
        let bytes = head.to_bytes(subject);
        let (magic, rest) = bytes.split_at(8);
        self.file.write_at(rest, self.from + 8)?;
        self.file.write_at(magic, self.from)
    }
}
