//! The stats responder, in the helper thread: writes the lists that other processes request.

use super::control::ControlEndpoint;
use super::figures::CounterValues;
use super::{Head, ListWriter, MOST_RECORDS, Measured};
use crate::published::{self, Subject};
use crate::reclaim::helper::Answer;
use crate::stats;
use pagemill_sys::file::AnswerFile;
use std::io;
use std::sync::OnceLock;

/// Answers requests to one instance: writes lists and figures, and forwards commands to the control endpoint.
///
/// Example: [`ListWriter`].
pub struct StatsResponder {
    /// The list writers, by subject.
    list_writers: [OnceLock<&'static dyn ListWriter>; Subject::ALL.len()],
    control: &'static ControlEndpoint,
    measured: OnceLock<&'static dyn Measured>,
}

impl StatsResponder {
    pub fn new(control: &'static ControlEndpoint) -> Self {
        Self { list_writers: [const { OnceLock::new() }; Subject::ALL.len()], control, measured: OnceLock::new() }
    }

    /// Adds a list writer for its subject. A request for a subject without a list writer gets an empty list.
    pub fn add(&self, writer: &'static dyn ListWriter) {
        let is_first = self.list_writers[writer.subject() as usize].set(writer).is_ok();
        assert!(is_first, "one list for each subject");
    }

    /// Sets the object that measures the statistics before they are written.
    pub fn set_measured(&self, measured: &'static dyn Measured) {
        let _ = self.measured.set(measured);
    }

    /// Writes the records of a subject, or the figures, into an empty file, and the head last. So a file with a head
    /// has a complete list.
    ///
    /// # Errors
    ///
    /// Errors of writing the head. An error of writing the records is reported in the head.
    pub fn write_list(&self, file: &AnswerFile, number: u32, subject: Subject) -> io::Result<()> {
        let mut response = Response::after_request(file, 0);
        let result = match (subject, self.list_writers[subject as usize].get()) {
            (Subject::Figures, _) => self.write_figures(&mut response),
            (_, Some(writer)) => writer.list(&mut response),
            (_, None) => Ok(()),
        };
        response.write_head(number, subject, result)
    }

    /// Measures the figures and writes their record.
    fn write_figures(&self, response: &mut Response) -> io::Result<()> {
        if let Some(measured) = self.measured.get() {
            measured.measure();
        }
        response.write_record(&CounterValues(*stats::snapshot().values()).to_record())
    }
}

impl Answer for StatsResponder {
    fn answer(&self, number: u32) {
        let Some(own) = published::own_file() else { return };
        for subject in Subject::ALL {
            let Some(path) = published::request_file(own.as_str(), subject, number) else { continue };
            // A failure is not reported: the requester has ended, has made another request, or must not access this
            // process.
            match subject {
                Subject::Command => self.control.accept(path.as_c_str(), number),
                Subject::Ranges | Subject::Caches | Subject::Slabs | Subject::Figures => {
                    if let Ok(file) = AnswerFile::open(path.as_c_str()) {
                        let _ = self.write_list(&file, number, subject);
                    }
                }
            }
        }
    }
}

/// The file of an answer. The head is written at offset `from`, and the records follow it.
///
/// Example: [`ListWriter`].
pub struct Response<'file> {
    file: &'file AnswerFile,
    /// Offset of the head in the file.
    from: u64,
    /// Number of records written so far.
    records: u64,
    /// Number of records that were not written, because the list has more than [`MOST_RECORDS`].
    left_out: u64,
}

impl<'file> Response<'file> {
    /// Starts an answer that follows a request of `len` bytes in the same file.
    pub(super) fn after_request(file: &'file AnswerFile, len: usize) -> Self {
        Self { file, from: len as u64, records: 0, left_out: 0 }
    }

    /// Writes records of `record_len` bytes each up to [`MOST_RECORDS`] in total, and counts the rest.
    pub fn write_records(&mut self, records: &[u8], record_len: usize) -> io::Result<()> {
        let count = (records.len() / record_len) as u64;
        let written = count.min(MOST_RECORDS - self.records);
        self.write(&records[..written as usize * record_len], record_len)?;
        self.records += written;
        self.left_out += count - written;
        Ok(())
    }

    /// Writes one record after the existing ones.
    pub fn write_record(&mut self, record: &[u8]) -> io::Result<()> {
        self.write(record, record.len())?;
        self.records += 1;
        Ok(())
    }

    /// Writes bytes after the existing records. `bytes` are whole records of `record_len` bytes.
    fn write(&self, bytes: &[u8], record_len: usize) -> io::Result<()> {
        self.file.write_at(bytes, self.from + Head::LEN as u64 + self.records * record_len as u64)
    }

    /// Writes the head, with the error number of `result`.
    pub(super) fn write_head(self, number: u32, subject: Subject, result: io::Result<()>) -> io::Result<()> {
        let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        let head = Head { number, errno: errno as u32, records: self.records, left_out: self.left_out };
        // The magic is written last. A reader that finds it finds a complete head.
        let bytes = head.to_bytes(subject);
        let (magic, rest) = bytes.split_at(8);
        self.file.write_at(rest, self.from + 8)?;
        self.file.write_at(magic, self.from)
    }
}
