//! The stats responder, in the helper thread: writes the lists that other processes request.

use super::control::ControlEndpoint;
use super::{AnswerHeader, ListWriter, MOST_RECORDS};
use crate::published::{self, Subject};
use crate::reclaim::helper::Answer;
use pagemill_sys::file::AnswerFile;
use std::io;
use std::sync::OnceLock;

/// Answers requests of other processes: writes lists, and forwards commands to the control endpoint.
///
/// Example: [`ListWriter`].
pub struct StatsResponder {
    /// The list writers, indexed by [`Subject`].
    list_writers: [OnceLock<&'static dyn ListWriter>; Subject::ALL.len()],
    control: &'static ControlEndpoint,
}

impl StatsResponder {
    pub fn new(control: &'static ControlEndpoint) -> Self {
        Self { list_writers: [const { OnceLock::new() }; Subject::ALL.len()], control }
    }

    /// Adds a list writer. A request for a list that no list writer writes gets an empty list.
    pub fn add(&self, writer: &'static dyn ListWriter) {
        let is_first = self.list_writers[writer.subject() as usize].set(writer).is_ok();
        assert!(is_first, "one list for each subject");
    }

    /// Writes the records of a subject into an empty file, and the header last. So a file with a header has a complete
    /// list.
    ///
    /// # Errors
    ///
    /// Errors of writing the header. An error of writing the records is reported in the header.
    pub fn write_list(&self, file: &AnswerFile, number: u32, subject: Subject) -> io::Result<()> {
        let mut response = Response::after_request(file, 0);
        let writer = self.list_writers[subject as usize].get();
        let result = writer.map_or(Ok(()), |writer| writer.list(&mut response));
        response.write_header(number, subject, result)
    }
}

impl Answer for StatsResponder {
    fn answer(&self, number: u32) {
        let Some(own) = published::own_file() else { return };
        for subject in Subject::ALL {
            let Some(path) = published::request_file(own.as_str(), subject, number) else { continue };
            // A failure is not reported: the requester has ended, has made another request, or must not access this
            // process.
            if subject == Subject::Command {
                self.control.accept_command(path.as_c_str(), number);
            } else if let Ok(file) = AnswerFile::open(path.as_c_str()) {
                let _ = self.write_list(&file, number, subject);
            }
        }
    }
}

/// The file of an answer, while the answer is written. The header is at offset `from`, and the records follow it.
///
/// Example: [`ListWriter`].
pub struct Response<'file> {
    file: &'file AnswerFile,
    /// Offset of the header in the file.
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

    /// Appends the records in `records`, each of `record_len` bytes. The answer gets [`MOST_RECORDS`] records at most;
    /// all others are counted as left out.
    pub fn write_records(&mut self, records: &[u8], record_len: usize) -> io::Result<()> {
        let count = (records.len() / record_len) as u64;
        let written = count.min(MOST_RECORDS - self.records);
        self.write(&records[..written as usize * record_len], record_len)?;
        self.records += written;
        self.left_out += count - written;
        Ok(())
    }

    /// Appends one record.
    pub fn write_record(&mut self, record: &[u8]) -> io::Result<()> {
        self.write(record, record.len())?;
        self.records += 1;
        Ok(())
    }

    /// Writes `bytes`, which are whole records of `record_len` bytes each, after the existing records.
    fn write(&self, bytes: &[u8], record_len: usize) -> io::Result<()> {
        self.file.write_at(bytes, self.from + AnswerHeader::LEN as u64 + self.records * record_len as u64)
    }

    /// Writes the header, which completes the answer. If `result` is an error, the header contains its error number.
    pub(super) fn write_header(self, number: u32, subject: Subject, result: io::Result<()>) -> io::Result<()> {
        let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
        let header = AnswerHeader { number, errno: errno as u32, records: self.records, left_out: self.left_out };
        // The magic is written last. A reader that finds it finds a complete header.
        let bytes = header.to_bytes(subject);
        let (magic, rest) = bytes.split_at(8);
        self.file.write_at(rest, self.from + 8)?;
        self.file.write_at(magic, self.from)
    }
}
