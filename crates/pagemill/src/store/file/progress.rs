//! How far a transfer has got, and how it goes on: the same for blocking calls, threads and rings.

use super::Handle;
use crate::stats::{self, Counter};
use crate::store::errno::{self, EAGAIN, EINTR, EINVAL};
use crate::store::transfer::Direction;
use std::io;

/// Most bytes of a piece: the system does not do more than 2 GiB at a time.
const PIECE_BYTES: usize = 1 << 30;

/// Times that a transfer is begun anew because the system was short of something.
const TRIES: u32 = 64;

/// Which open file a piece goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Direct,
    /// Through the kernel's page cache.
    Buffered,
}

/// What is to be done next of a transfer, from where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub way: Way,
    pub len_bytes: usize,
}

/// Whether anything is left to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    More,
    /// The file ends there.
    End,
}

/// How far a transfer has got.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    pub done_bytes: usize,
    /// The file refused a direct piece of it.
    is_refused: bool,
    tries: u32,
}

impl Progress {
    /// The next piece of a transfer of `len_bytes`, whose memory begins at `addr`.
    pub fn next(&self, handle: &Handle, addr: usize, offset: u64, len_bytes: usize) -> Piece {
        let (at, left) = (self.done_bytes, (len_bytes - self.done_bytes).min(PIECE_BYTES));
        if !handle.is_direct() {
            return Piece { way: Way::Buffered, len_bytes: left };
        }
        let unit = handle.alignment.offset;
        let whole = left - left % unit;
        let is_aligned =
            (addr + at).is_multiple_of(handle.alignment.memory) && (offset + at as u64).is_multiple_of(unit as u64);
        if is_aligned && whole > 0 && !self.is_refused {
            return Piece { way: Way::Direct, len_bytes: whole };
        }
        stats::add(Counter::TransfersBuffered, 1);
        Piece { way: Way::Buffered, len_bytes: left }
    }

    /// Notes what became of a piece.
    ///
    /// # Errors
    ///
    /// That of the piece, unless the next one can do better.
    pub fn take(
        &mut self,
        handle: &Handle,
        direction: Direction,
        piece: Piece,
        result: io::Result<usize>,
    ) -> io::Result<Step> {
        match result {
            Ok(0) if direction == Direction::Read => Ok(Step::End),
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => {
                self.done_bytes += bytes.min(piece.len_bytes);
                if bytes >= piece.len_bytes {
                    return Ok(Step::More);
                }
                // Direct reads end between sectors only where the file does.
                let unit = handle.alignment.offset;
                if direction == Direction::Read && piece.way == Way::Direct && !bytes.is_multiple_of(unit) {
                    return Ok(Step::End);
                }
                stats::add(Counter::TransfersResumed, 1);
                Ok(Step::More)
            }
            Err(error) if errno::is(&error, EINVAL) && piece.way == Way::Direct => {
                self.is_refused = true;
                Ok(Step::More)
            }
            Err(error) if (errno::is(&error, EAGAIN) || errno::is(&error, EINTR)) && self.tries < TRIES => {
                self.tries += 1;
                Ok(Step::More)
            }
            Err(error) => Err(error),
        }
    }
}
