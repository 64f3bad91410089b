//! Answers requests, in the helper thread of the process that is asked.

use super::control::ControlEndpoint;
use super::figures::Values;
use super::{Head, Lister, MOST_RECORDS, Measured};
use crate::published::{self, Subject};
use crate::reclaim::helper::Answer;
use crate::stats;
use pagemill_sys::file::Blank;
use std::io;
use std::sync::OnceLock;

/// The errno of errors without one of the system.
const EIO: i32 = 5;

/// Lists the ranges and the caches of one Pagemill, and passes commands on.
///
/// Example: [`List`](super::List).
pub struct StatsResponder {
    listers: [OnceLock<&'static dyn Lister>; Subject::ALL.len()],
    control: &'static ControlEndpoint,
    measured: OnceLock<&'static dyn Measured>,
}

impl StatsResponder {
    pub fn new(control: &'static ControlEndpoint) -> Self {
        Self { listers: [const { OnceLock::new() }; Subject::ALL.len()], control, measured: OnceLock::new() }
    }

    /// Adds the list of its subject. A subject without a lister is answered with an empty list.
    pub fn add(&self, lister: &'static dyn Lister) {
        let is_first = self.listers[lister.subject() as usize].set(lister).is_ok();
        assert!(is_first, "one list for each subject");
    }

    /// Sets the object that measures the figures.
    pub fn set_measured(&self, measured: &'static dyn Measured) {
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
        let result = match (subject, self.listers[subject as usize].get()) {
            (Subject::Figures, _) => self.write_figures(&mut response),
            (_, Some(lister)) => lister.list(&mut response),
            (_, None) => Ok(()),
        };
        response.end(number, subject, result)
    }

    fn write_figures(&self, response: &mut Response) -> io::Result<()> {
        if let Some(measured) = self.measured.get() {
            measured.measure();
        }
        response.put(&Values(*stats::snapshot().values()).to_record())
    }
}

impl Answer for StatsResponder {
    fn answer(&self, number: u32) {
        let Some(own) = published::own_file() else { return };
        for subject in Subject::ALL {
            let Some(path) = published::request_of(own.as_str(), subject, number) else { continue };
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
///
/// Example: [`Lister`].
pub struct Response<'file> {
    file: &'file Blank,
    from: u64,
    records: u64,
    left_out: u64,
}

impl<'file> Response<'file> {
    /// An answer after a request of `len` bytes.
    pub(super) fn behind(file: &'file Blank, len: usize) -> Self {
        Self { file, from: len as u64, records: 0, left_out: 0 }
    }

    /// Writes records of `record_len` bytes each, as far as the list has room.
    pub fn put_all(&mut self, records: &[u8], record_len: usize) -> io::Result<()> {
        let count = (records.len() / record_len) as u64;
        let kept = count.min(MOST_RECORDS - self.records);
        self.write(&records[..kept as usize * record_len], record_len)?;
        self.records += kept;
        self.left_out += count - kept;
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
    pub(super) fn end(self, number: u32, subject: Subject, result: io::Result<()>) -> io::Result<()> {
        let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(EIO));
        let head = Head { number, errno: errno as u32, records: self.records, left_out: self.left_out };
        // The magic is written last: a reader that sees it sees a whole head.
        let bytes = head.to_bytes(subject);
        let (magic, rest) = bytes.split_at(8);
        self.file.write_at(rest, self.from + 8)?;
        self.file.write_at(magic, self.from)
    }
}
