//! The steps of the model of views, decoded from bytes.

use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};

/// Number of bytes that encode one step.
pub const STEP_BYTES: usize = 8;

/// Maximum number of views of the file.
pub const MAX_VIEWS: usize = 4;

/// What a step does. Most calls use a range of the file; those of a view use a range of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Open,
    Drop,
    Read,
    Prefault,
    WriteToView,
    Lock,
    Unlock,
    Write,
    WritePinned,
    Truncate,
    Remove,
    Zero,
    Split,
    Collapse,
    Sweep,
    Sync,
    Evict,
}

/// The calls, the frequent ones several times.
const CALLS: [Call; 26] = [
    Call::Open,
    Call::Open,
    Call::Drop,
    Call::Read,
    Call::Read,
    Call::Read,
    Call::Prefault,
    Call::Prefault,
    Call::WriteToView,
    Call::WriteToView,
    Call::WriteToView,
    Call::WriteToView,
    Call::Lock,
    Call::Unlock,
    Call::Write,
    Call::Write,
    Call::Write,
    Call::WritePinned,
    Call::Truncate,
    Call::Truncate,
    Call::Remove,
    Call::Zero,
    Call::Split,
    Call::Collapse,
    Call::Sync,
    Call::Evict,
];

/// A step: a call, the number of a view, an offset, a length, and the value of written bytes.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub call: Call,
    pub view: usize,
    at: [u8; 3],
    len: [u8; 2],
    pub byte: u8,
}

impl Step {
    /// Decodes a step. Every value is a valid one.
    pub fn decode(bytes: [u8; STEP_BYTES]) -> Self {
        let [call, view, at_high, at_low, at_kind, len, len_kind, byte] = bytes;
        let call = if call == 255 { Call::Sweep } else { CALLS[usize::from(call) % CALLS.len()] };
        let view = usize::from(view) % MAX_VIEWS;
        Self { call, view, at: [at_high, at_low, at_kind], len: [len, len_kind], byte: byte | 1 }
    }

    /// Returns the offset below `max`, mostly near the border of a page or block.
    pub fn offset(&self, page_bytes: usize, max: usize) -> usize {
        let [high, low, kind] = self.at;
        let number = usize::from(u16::from_be_bytes([high, low]));
        let unit = [page_bytes, BLOCK_BYTES, os_page_bytes(), 1 + number % 5000][usize::from(kind) % 4];
        let near = [0, 0, 1, usize::from(kind)][usize::from(kind) / 4 % 4];
        (number % (max / unit + 1) * unit + near) % max
    }

    pub fn len_bytes(&self, page_bytes: usize) -> usize {
        let [number, kind] = self.len.map(usize::from);
        match kind % 4 {
            0 => number,
            1 => number % 8 * page_bytes + kind / 64,
            2 => number * os_page_bytes(),
            _ => number % 3 * BLOCK_BYTES + kind,
        }
    }
}
