//! Answers requests, in the helper thread of the process that is asked.

use super::control::ControlEndpoint;
use super::figures::Values;
use super::ranges::{RECORD_LEN, to_record};
use super::{Head, MOST_RECORDS, Measured, caches, slabs};
use crate::mapping::Caches;
use crate::published::{self, Subject};
use crate::reclaim::helper::Answer;
use crate::slab::Slabs;
use crate::stats;
use crate::volatile::listed::ListedPart;
use crate::volatile::{Listed, Ranges, Vranges};
use pagemill_sys::file::Blank;
use std::io;
use std::sync::OnceLock;

/// Ranges copied before they are written: 12 KiB of stack, and some microseconds under the lock of marks.
const AT_A_TIME: usize = 128;

/// Time limit to inspect caches. The helper has other work, and siblings wait for it 25 ms at most.
const MOST_LOOK_NS: u64 = 15_000_000;

/// The errno of errors without one of the system.
const EIO: i32 = 5;

/// Lists the ranges and the caches of one Pagemill, and passes commands on.
///
/// Example: [`List`](super::List).
pub struct StatsResponder {
    ranges: &'static Ranges,
    vranges: &'static Vranges,
    caches: &'static Caches,
    slabs: &'static Slabs,
    control: &'static ControlEndpoint,
    measured: OnceLock<&'static dyn Measured>,
}

impl StatsResponder {
    pub(crate) fn new(
        (ranges, vranges): (&'static Ranges, &'static Vranges),
        caches: &'static Caches,
        slabs: &'static Slabs,
        control: &'static ControlEndpoint,
    ) -> Self {
        Self { ranges, vranges, caches, slabs, control, measured: OnceLock::new() }
    }

    /// Sets the object that measures the figures.
    pub(crate) fn set_measured(&self, measured: &'static dyn Measured) {
        let _ = self.measured.set(measured);
    }

    /// Writes all ranges into an empty file, and the head last: a reader that sees the head sees a whole list.
    ///
    /// # Errors
    ///
    /// An error of writing the head. Errors of writing records are reported in the head.
    pub fn write(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Ranges)
    }

    /// As [`StatsResponder::write`], for the usage of caches.
    ///
    /// # Errors
    ///
    /// As [`StatsResponder::write`].
    pub fn write_caches(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Caches)
    }

    /// As [`StatsResponder::write`], for slab caches.
    ///
    /// # Errors
    ///
    /// As [`StatsResponder::write`].
    pub fn write_slabs(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Slabs)
    }

    fn write_list(&self, file: &Blank, number: u32, subject: Subject) -> io::Result<()> {
        let mut response = Response::behind(file, 0);
        let result = match subject {
            Subject::Ranges => self.write_ranges(&mut response),
            Subject::Caches => {
                self.caches.show(MOST_LOOK_NS, |holder, usage| response.put(&caches::to_record(holder, usage)))
            }
            Subject::Slabs => self
                .slabs
                .show(MOST_LOOK_NS, |id, info, node, figures| response.put(&slabs::to_record(id, info, node, figures))),
            Subject::Figures => self.write_figures(&mut response),
            Subject::Command => Ok(()),
        };
        response.end(number, subject, result)
    }

    fn write_figures(&self, response: &mut Response) -> io::Result<()> {
        if let Some(measured) = self.measured.get() {
            measured.measure();
        }
        response.put(&Values(*stats::snapshot().values()).to_record())
    }

    fn write_ranges(&self, response: &mut Response) -> io::Result<()> {
        response.take(|from, into| self.ranges.list(from, into))?;
        response.take(|from, into| self.vranges.list_from(from, into))
    }
}

impl Answer for StatsResponder {
    fn answer(&self, number: u32) {
        let Some(own) = published::own_file() else { return };
        for subject in Subject::ALL {
            let Some(path) = published::request_file(own.as_str(), subject, number) else { continue };
            // On failure the requester has ended, asks for another list, or lacks the right; there is no one to report
            // to.
            match subject {
                Subject::Command => self.control.take(path.as_c_str(), number),
                Subject::Ranges | Subject::Caches | Subject::Slabs | Subject::Figures => {
                    if let Ok(file) = Blank::open(path.as_c_str()) {
                        let _ = self.write_list(&file, number, subject);
                    }
                }
            }
        }
    }
}

/// A file that is being written, with its head at offset `from`.
pub(super) struct Response<'file> {
    file: &'file Blank,
    from: u64,
    records: u64,
    left_out: u64,
}

impl<'file> Response<'file> {
    /// An answer after a request of `len` bytes.
    pub fn behind(file: &'file Blank, len: usize) -> Self {
        Self { file, from: len as u64, records: 0, left_out: 0 }
    }

    /// Writes all records that `list` returns, part by part, from the start.
    fn take(&mut self, list: impl Fn(usize, &mut [Listed]) -> ListedPart) -> io::Result<()> {
        let (mut part, mut from) = ([Listed::NONE; AT_A_TIME], Some(0));
        while let Some(start) = from {
            let ListedPart { count, next } = list(start, &mut part);
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

    /// Writes bytes after the existing records.
    fn write(&self, bytes: &[u8], record_len: usize) -> io::Result<()> {
        self.file.write_at(bytes, self.from + Head::LEN as u64 + self.records * record_len as u64)
    }

    /// Writes the head of a list with this result.
    pub fn end(self, number: u32, subject: Subject, result: io::Result<()>) -> io::Result<()> {
        let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(EIO));
        let head = Head { number, errno: errno as u32, records: self.records, left_out: self.left_out };
        // The magic is written last: a reader that sees it sees a whole head.
        let bytes = head.to_bytes(subject);
        let (magic, rest) = bytes.split_at(8);
        self.file.write_at(rest, self.from + 8)?;
        self.file.write_at(magic, self.from)
    }
}
