//! Cached files as byte streams of the standard library.

use crate::mapping::Mapping;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};

/// A position in a cached file, for code that uses [`Read`], [`Write`] and [`Seek`].
///
/// ```
/// use pagemill::PageCache;
/// use std::io::{BufRead, BufReader, Read, Seek, Write};
///
/// let cache = PageCache::builder("notes").limit(16 << 20).build()?;
/// let file = cache.create()?;
/// let mut cursor = file.cursor();
/// writeln!(cursor, "first")?;
/// writeln!(cursor, "second")?;
/// cursor.rewind()?;
/// let lines: Vec<_> = BufReader::new(cursor).lines().collect::<Result<_, _>>()?;
/// assert_eq!(lines, ["first", "second"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cursor<'file> {
    file: &'file Mapping,
    offset: u64,
}

impl Mapping {
    /// Returns a position at the begin of the file. Each cursor has a position of its own.
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor { file: self, offset: 0 }
    }
}

impl Cursor<'_> {
    /// Moves the position by the number of bytes that a call has transferred, and returns that number.
    fn advance(&mut self, done: pagemill_core::Result<usize>) -> io::Result<usize> {
        let len_bytes = done?;
        self.offset += len_bytes as u64;
        Ok(len_bytes)
    }
}

impl Read for Cursor<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.advance(self.file.read_at(to, self.offset))
    }

    fn read_vectored(&mut self, to: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.advance(self.file.read_vectored_at(to, self.offset))
    }
}

impl Write for Cursor<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.advance(self.file.write_at(from, self.offset))
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.advance(self.file.write_vectored_at(from, self.offset))
    }

    /// Does nothing, because a write is visible to all readers at once. [`Mapping::sync`] makes writes durable.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Cursor<'_> {
    fn seek(&mut self, position: SeekFrom) -> io::Result<u64> {
        let offset = match position {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(distance) => self.offset.checked_add_signed(distance),
            SeekFrom::End(distance) => self.file.size_bytes().checked_add_signed(distance),
        };
        let offset = offset.ok_or_else(|| {
            let text = format!("seek by {position:?} from {} leads before the begin of the file", self.offset);
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })?;
        self.offset = offset;
        Ok(offset)
    }
}
