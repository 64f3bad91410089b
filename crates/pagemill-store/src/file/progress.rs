//! Splits a transfer into pieces of one system call each, for blocking calls, threads and rings.

use super::FileHandle;
use crate::errno::{self, EAGAIN, EINTR, EINVAL};
use crate::transfer::Direction;
use pagemill_core::stats::{self, Counter};
use std::io;

/// Maximum size of a piece. The kernel transfers at most 2 GiB in one system call.
const MAX_PIECE_BYTES: usize = 1 << 30;

/// Maximum number of retries of a transfer after `EAGAIN` or `EINTR`.
const MAX_RETRIES: u32 = 64;

/// How a piece of a transfer accesses the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoMode {
    /// Direct I/O, by the descriptor with `O_DIRECT`.
    Direct,
    /// I/O through the kernel's page cache, by the other descriptor.
    Buffered,
}

/// A piece: the next bytes of a transfer, which one system call transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub mode: IoMode,
    pub len_bytes: usize,
}

/// Whether a transfer needs another piece, that is another system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferStep {
    More,
    /// The transfer has reached the end of the file.
    End,
}

/// The state of a transfer between its pieces.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TransferProgress {
    /// Number of bytes transferred so far, from the start of the transfer.
    pub done_bytes: usize,
    /// Whether the file system refused a direct piece of this transfer. If so, further pieces use the kernel's page
    /// cache.
    is_refused: bool,
    /// Number of retries of this transfer after `EAGAIN` or `EINTR`.
    retries: u32,
}

impl TransferProgress {
    /// Returns the next piece of a transfer. The piece uses direct I/O if its memory address and its file offset are
    /// aligned.
    pub fn next_piece(&self, handle: &FileHandle, addr: usize, offset: u64, len_bytes: usize) -> Piece {
        debug_assert!(self.done_bytes < len_bytes, "bytes are left to transfer");
        let (at, left) = (self.done_bytes, (len_bytes - self.done_bytes).min(MAX_PIECE_BYTES));
        if !handle.is_direct() {
            return Piece { mode: IoMode::Buffered, len_bytes: left };
        }
        let unit = handle.alignment.offset;
        debug_assert!(unit.is_power_of_two() && handle.alignment.memory.is_power_of_two());
        let whole = left - left % unit;
        let is_aligned =
            (addr + at).is_multiple_of(handle.alignment.memory) && (offset + at as u64).is_multiple_of(unit as u64);
        if is_aligned && whole > 0 && !self.is_refused {
            return Piece { mode: IoMode::Direct, len_bytes: whole };
        }
        stats::add(Counter::TransfersBuffered, 1);
        Piece { mode: IoMode::Buffered, len_bytes: left }
    }

    /// Records the result of a piece. Returns whether the transfer needs another piece.
    ///
    /// # Errors
    ///
    /// The error of the piece, unless the piece may succeed when it is repeated or goes through the kernel's page
    /// cache.
    pub fn record(
        &mut self,
        handle: &FileHandle,
        direction: Direction,
        piece: Piece,
        result: io::Result<usize>,
    ) -> io::Result<TransferStep> {
        match result {
            Ok(0) if direction == Direction::Read => Ok(TransferStep::End),
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => {
                debug_assert!(bytes <= piece.len_bytes, "no more is transferred than requested");
                self.done_bytes += bytes.min(piece.len_bytes);
                if bytes >= piece.len_bytes {
                    return Ok(TransferStep::More);
                }
                // A direct read ends inside a sector only at the end of the file.
                let unit = handle.alignment.offset;
                if direction == Direction::Read && piece.mode == IoMode::Direct && !bytes.is_multiple_of(unit) {
                    return Ok(TransferStep::End);
                }
                stats::add(Counter::TransfersResumed, 1);
                Ok(TransferStep::More)
            }
            Err(error) if errno::is(&error, EINVAL) && piece.mode == IoMode::Direct => {
                self.is_refused = true;
                Ok(TransferStep::More)
            }
            Err(error) if (errno::is(&error, EAGAIN) || errno::is(&error, EINTR)) && self.retries < MAX_RETRIES => {
                self.retries += 1;
                Ok(TransferStep::More)
            }
            Err(error) => Err(error),
        }
    }
}
