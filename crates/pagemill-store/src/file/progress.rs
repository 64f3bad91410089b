//! Progress of a transfer in pieces: the same for blocking calls, threads and rings.

use super::Handle;
use crate::errno::{self, EAGAIN, EINTR, EINVAL};
use crate::transfer::Direction;
use pagemill_core::stats::{self, Counter};
use std::io;

/// Largest piece: the system transfers at most 2 GiB at a time.
const PIECE_BYTES: usize = 1 << 30;

/// Retries of a transfer after `EAGAIN` or `EINTR`.
const TRIES: u32 = 64;

/// Which descriptor a piece uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferWay {
    Direct,
    /// Through the kernel's page cache.
    Buffered,
}

/// The next piece of a transfer, from its current position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub way: TransferWay,
    pub len_bytes: usize,
}

/// Whether the transfer continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferStep {
    More,
    /// The file ends here.
    End,
}

/// Progress of one transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TransferProgress {
    pub done_bytes: usize,
    /// The file refused a direct piece of this transfer.
    is_refused: bool,
    tries: u32,
}

impl TransferProgress {
    /// Returns the next piece of a transfer of `len_bytes` with memory at `addr`.
    pub fn next(&self, handle: &Handle, addr: usize, offset: u64, len_bytes: usize) -> Piece {
        let (at, left) = (self.done_bytes, (len_bytes - self.done_bytes).min(PIECE_BYTES));
        if !handle.is_direct() {
            return Piece { way: TransferWay::Buffered, len_bytes: left };
        }
        let unit = handle.alignment.offset;
        let whole = left - left % unit;
        let is_aligned =
            (addr + at).is_multiple_of(handle.alignment.memory) && (offset + at as u64).is_multiple_of(unit as u64);
        if is_aligned && whole > 0 && !self.is_refused {
            return Piece { way: TransferWay::Direct, len_bytes: whole };
        }
        stats::add(Counter::TransfersBuffered, 1);
        Piece { way: TransferWay::Buffered, len_bytes: left }
    }

    /// Records the result of a piece.
    ///
    /// # Errors
    ///
    /// The error of the piece, unless the next piece can avoid it.
    pub fn take(
        &mut self,
        handle: &Handle,
        direction: Direction,
        piece: Piece,
        result: io::Result<usize>,
    ) -> io::Result<TransferStep> {
        match result {
            Ok(0) if direction == Direction::Read => Ok(TransferStep::End),
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => {
                self.done_bytes += bytes.min(piece.len_bytes);
                if bytes >= piece.len_bytes {
                    return Ok(TransferStep::More);
                }
                // A direct read ends between sectors only at the end of the file.
                let unit = handle.alignment.offset;
                if direction == Direction::Read && piece.way == TransferWay::Direct && !bytes.is_multiple_of(unit) {
                    return Ok(TransferStep::End);
                }
                stats::add(Counter::TransfersResumed, 1);
                Ok(TransferStep::More)
            }
            Err(error) if errno::is(&error, EINVAL) && piece.way == TransferWay::Direct => {
                self.is_refused = true;
                Ok(TransferStep::More)
            }
            Err(error) if (errno::is(&error, EAGAIN) || errno::is(&error, EINTR)) && self.tries < TRIES => {
                self.tries += 1;
                Ok(TransferStep::More)
            }
            Err(error) => Err(error),
        }
    }
}
