//! The stats responder, in the helper thread: writes the lists that other processes request.

use super::control::ControlEndpoint;
use super::figures::CounterValues;
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

/// Ranges that are copied under the lock of the range table before they are written: 12 KiB of stack, and some
/// microseconds.
const BATCH_LEN: usize = 128;

/// Time limit for inspecting caches. The helper has other work, and siblings wait for it for at most 25 ms.
const MAX_INSPECTION_NS: u64 = 15_000_000;

/// Reported for errors without a number of the system.
const EIO: i32 = 5;

/// Writes lists of ranges, caches and slab caches of one Pagemill, and forwards commands.
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

    /// Sets the object that measures the statistics before they are written.
    pub(crate) fn set_measured(&self, measured: &'static dyn Measured) {
        let _ = self.measured.set(measured);
    }

    /// Writes all ranges into an empty file, and then the head. A reader that finds the head finds a complete list.
    ///
    /// # Errors
    ///
    /// Errors of writing the head. An error of writing the records is reported in the head.
    pub fn write(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Ranges)
    }

    /// As [`StatsResponder::write`], but lists the usage of caches.
    ///
    /// # Errors
    ///
    /// As [`StatsResponder::write`].
    pub fn write_caches(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Caches)
    }

    /// As [`StatsResponder::write`], but lists slab caches.
    ///
    /// # Errors
    ///
    /// As [`StatsResponder::write`].
    pub fn write_slabs(&self, file: &Blank, number: u32) -> io::Result<()> {
        self.write_list(file, number, Subject::Slabs)
    }

    fn write_list(&self, file: &Blank, number: u32, subject: Subject) -> io::Result<()> {
        let mut response = Response::after_request(file, 0);
        let result = match subject {
            Subject::Ranges => self.write_ranges(&mut response),
            Subject::Caches => self
                .caches
                .show(MAX_INSPECTION_NS, |holder, usage| response.write_record(&caches::to_record(holder, usage))),
            Subject::Slabs => self.slabs.show(MAX_INSPECTION_NS, |id, info, node, figures| {
                response.write_record(&slabs::to_record(id, info, node, figures))
            }),
            Subject::Figures => self.write_figures(&mut response),
            Subject::Command => Ok(()),
        };
        response.write_head(number, subject, result)
    }

    fn write_figures(&self, response: &mut Response) -> io::Result<()> {
        if let Some(measured) = self.measured.get() {
            measured.measure();
        }
        response.write_record(&CounterValues(*stats::snapshot().values()).to_record())
    }

    /// Writes the ranges by handle, then those by address.
    fn write_ranges(&self, response: &mut Response) -> io::Result<()> {
        response.write_batches(|from, into| self.ranges.list(from, into))?;
        response.write_batches(|from, into| self.vranges.list_from(from, into))
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
                    if let Ok(file) = Blank::open(path.as_c_str()) {
                        let _ = self.write_list(&file, number, subject);
                    }
                }
            }
        }
    }
}

/// The file of an answer. The head is written at offset `from`, and the records follow it.
pub(super) struct Response<'file> {
    file: &'file Blank,
    from: u64,
    records: u64,
    left_out: u64,
}

impl<'file> Response<'file> {
    /// Starts an answer that follows a request of `len` bytes in the same file.
    pub fn after_request(file: &'file Blank, len: usize) -> Self {
        Self { file, from: len as u64, records: 0, left_out: 0 }
    }

    /// Writes all ranges that `list` returns, in batches, from the first one on.
    fn write_batches(&mut self, list: impl Fn(usize, &mut [Listed]) -> ListedPart) -> io::Result<()> {
        let (mut batch, mut from) = ([Listed::NONE; BATCH_LEN], Some(0));
        while let Some(start) = from {
            let ListedPart { count, next } = list(start, &mut batch);
            self.write_batch(&batch[..count])?;
            from = next;
        }
        Ok(())
    }

    /// Writes ranges up to [`MOST_RECORDS`] in total, and counts the rest.
    fn write_batch(&mut self, batch: &[Listed]) -> io::Result<()> {
        let room = usize::try_from(MOST_RECORDS - self.records).unwrap_or(usize::MAX);
        let (written, left_out) = batch.split_at(batch.len().min(room));
        let mut bytes = [0; BATCH_LEN * RECORD_LEN];
        for (place, listed) in bytes.chunks_exact_mut(RECORD_LEN).zip(written) {
            place.copy_from_slice(&to_record(listed));
        }
        self.write(&bytes[..written.len() * RECORD_LEN], RECORD_LEN)?;
        self.records += written.len() as u64;
        self.left_out += left_out.len() as u64;
        Ok(())
    }

    /// Writes one record after the existing ones.
    pub fn write_record(&mut self, record: &[u8]) -> io::Result<()> {
        self.write(record, record.len())?;
        self.records += 1;
        Ok(())
    }

    /// Writes bytes after the existing records.
    fn write(&self, bytes: &[u8], record_len: usize) -> io::Result<()> {
        self.file.write_at(bytes, self.from + Head::LEN as u64 + self.records * record_len as u64)
    }

    /// Writes the head, with the error number of `result`.
    pub fn write_head(self, number: u32, subject: Subject, result: io::Result<()>) -> io::Result<()> {
        let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(EIO));
        let head = Head { number, errno: errno as u32, records: self.records, left_out: self.left_out };
        // The magic is written last. A reader that finds it finds a complete head.
        let bytes = head.to_bytes(subject);
        let (magic, rest) = bytes.split_at(8);
        self.file.write_at(rest, self.from + 8)?;
        self.file.write_at(magic, self.from)
    }
}
