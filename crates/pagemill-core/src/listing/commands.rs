//! A command to another process, and its outcome. Both are in the same file.
//!
//! The command, 32 bytes, little-endian:
//!
//! ```text
//!    0  u64  magic pm-ordr1
//!    8  u32  request id
//!   12  u32  action: 1 shrink, 2 defrag_used_ratio, 3 remote_node_defrag_ratio, 4 return memory, 5 move to another
//!            NUMA node, 6 balance NUMA nodes, 7 drop contents, 8 huge pages
//!   16  u32  percent, for actions 2 and 3; for action 5 the source node in the low half, the target node in the high
//!            half; for action 8 the number of a `HugeUse`, or 0 to change nothing; else 0
//!   20  u32  set to 1 by the process when it accepts the command
//!   24  u64  number of the cache; for action 4 the bytes to return
//! ```
//!
//! The answer follows the command: a header (see [`listing`](super)), then one record of 64 bytes. Its fields: 0 u64
//! the field at offset 24 of the command; 8 u64 bytes returned; 16 u64 objects moved; 24 and 28 u32 slabs before and
//! after; 32 and 40 u64 resident bytes before and after; 48 u32 `errno`; 52 u32 number of the `HugeUse` before, after
//! action 8. The other bytes are zero.

use super::{Record, bytes_of, u32_at, u64_at, word_of};
use crate::arena::HugeUse;
use crate::published::Subject;

/// First word of the file of a command. It identifies the file format.
const MAGIC: u64 = u64::from_le_bytes(*b"pm-ordr1");

/// An action on a slab cache.
///
/// Example: [`ControlCommand`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Moves the cache's objects together, if the cache can move objects, and returns the memory of empty slabs.
    Shrink,
    /// Sets the cache's setting `defrag_used_ratio`, in percent.
    SetUsedRatio(u32),
    /// Sets the cache's setting `remote_node_defrag_ratio`, in percent.
    SetRemoteRatio(u32),
    /// Moves the cache's objects from one NUMA node to another.
    Move { from: u16, to: u16 },
    /// Moves objects from NUMA nodes with more objects than the average to nodes with fewer.
    Balance,
}

/// A command that one process sends to another process of the same user.
///
/// ```
/// use pagemill_testbed::Testbed;
/// use pagemill_core::listing::{self, ControlCommand};
/// use pagemill_core::published;
///
/// Testbed::of_process()?;
/// let (file, figures) = published::find(std::process::id()).expect("this process publishes");
/// let command = ControlCommand::Trim { want_bytes: 1 << 20 };
/// match listing::command(&file, figures.identity, command, || false) {
///     Ok(outcome) => assert_eq!((outcome.of, outcome.errno), (1 << 20, 0)),
///     Err(reason) => println!("no answer: {reason}"),
/// }
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlCommand {
    /// Executes an action on the slab cache whose number in the list of slab caches is `cache`.
    Slab { action: Action, cache: u64 },
    /// Returns about this many bytes of free memory to the system.
    Trim { want_bytes: u64 },
    /// Drops contents that can be read again, such as clean pages of cached files, and returns their memory.
    DropContents,
    /// Sets which memory gets huge pages from now on; `None` only reports the setting ([`Outcome::huge_before`]).
    Huge(Option<HugeUse>),
}

/// The outcome of a [`ControlCommand`], which the process that executed the command reports.
///
/// Example: [`ControlCommand`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Number of the cache that the command acted on, or for [`ControlCommand::Trim`] the wanted bytes.
    pub of: u64,
    /// The result of a shrink; zeros after other actions. After [`ControlCommand::Trim`] only `freed_bytes` is set.
    pub shrunk: ShrinkReport,
    /// 0, or the reason of a failure: `ENOENT` if the cache does not exist any more, `ENOSYS` if the process executes
    /// no commands on slab caches, `ECANCELED` if code of the program panicked, `EAGAIN` if too many commands wait or
    /// no thread could be started, `EOPNOTSUPP` if the process was started without huge pages.
    pub errno: i32,
    /// After [`ControlCommand::Huge`]: the setting before the command. Otherwise `None`.
    pub huge_before: Option<HugeUse>,
}

/// Result of shrinking a slab cache on request of another process.
///
/// Example: [`ControlCommand`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShrinkReport {
    /// Bytes that were freed: the return value of the cache's `shrink`.
    pub freed_bytes: u64,
    /// Objects that the shrink moved.
    pub moved: u64,
    pub slabs_before: u32,
    pub slabs_after: u32,
    /// `resident_before`, `resident_after`: bytes charged for the blocks of the cache before and after the shrink.
    pub resident_before: u64,
    pub resident_after: u64,
}

impl ControlCommand {
    pub(super) const LEN: usize = 32;

    /// Offset of the field in which the process marks the command as accepted, by a 1 (u32).
    pub(super) const ACCEPTED_OFFSET: usize = 20;

    /// Returns the value that the outcome of the command repeats in [`Outcome::of`].
    pub(super) fn target(self) -> u64 {
        match self {
            Self::Slab { cache, .. } => cache,
            Self::Trim { want_bytes } => want_bytes,
            Self::DropContents | Self::Huge(_) => 0,
        }
    }

    /// Returns the command in the format of the module documentation, with the request id `number`.
    pub(super) fn to_bytes(self, number: u32) -> [u8; Self::LEN] {
        let (action, detail) = match self {
            Self::Slab { action: Action::Shrink, .. } => (1, 0),
            Self::Slab { action: Action::SetUsedRatio(percent), .. } => (2, percent),
            Self::Slab { action: Action::SetRemoteRatio(percent), .. } => (3, percent),
            Self::Trim { .. } => (4, 0),
            Self::Slab { action: Action::Move { from, to }, .. } => (5, u32::from(from) | u32::from(to) << 16),
            Self::Slab { action: Action::Balance, .. } => (6, 0),
            Self::DropContents => (7, 0),
            Self::Huge(wanted) => (8, wanted.map_or(0, |wanted| wanted as u32)),
        };
        bytes_of([MAGIC, word_of(number, action), word_of(detail, 0), self.target()])
    }

    /// Parses a command. Returns `None` if the command is invalid, was accepted before, or has a request id other than
    /// `number`.
    pub(super) fn from_bytes(bytes: &[u8; Self::LEN], number: u32) -> Option<Self> {
        let (detail, of) = (u32_at(bytes, 16), u64_at(bytes, 24));
        let slab = |action| Self::Slab { action, cache: of };
        let command = match u32_at(bytes, 12) {
            1 => slab(Action::Shrink),
            2 => slab(Action::SetUsedRatio(detail)),
            3 => slab(Action::SetRemoteRatio(detail)),
            4 => Self::Trim { want_bytes: of },
            5 => slab(Action::Move { from: detail as u16, to: (detail >> 16) as u16 }),
            6 => slab(Action::Balance),
            7 => Self::DropContents,
            8 if detail == 0 => Self::Huge(None),
            8 => Self::Huge(Some(HugeUse::from_number(detail)?)),
            _ => return None,
        };
        let is_command =
            u64_at(bytes, 0) == MAGIC && u32_at(bytes, 8) == number && u32_at(bytes, Self::ACCEPTED_OFFSET) == 0;
        is_command.then_some(command)
    }
}

impl Outcome {
    /// Returns the outcome of a command that was executed.
    pub(super) fn of(command: ControlCommand, shrunk: ShrinkReport) -> Self {
        Self { of: command.target(), shrunk, errno: 0, huge_before: None }
    }

    /// Returns the outcome of a command that failed with the error number `errno`.
    pub(super) fn failed(command: ControlCommand, errno: i32) -> Self {
        Self { errno, ..Self::of(command, ShrinkReport::default()) }
    }

    pub(super) fn to_record(self) -> [u8; Self::LEN] {
        let ShrinkReport { freed_bytes, moved, slabs_before, slabs_after, resident_before, resident_after } =
            self.shrunk;
        let huge_before = self.huge_before.map_or(0, |before| before as u32);
        let (slabs, end) = (word_of(slabs_before, slabs_after), word_of(self.errno as u32, huge_before));
        bytes_of([self.of, freed_bytes, moved, slabs, resident_before, resident_after, end])
    }
}

impl Record for Outcome {
    const SUBJECT: Subject = Subject::Command;
    const LEN: usize = 64;

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let shrunk = ShrinkReport {
            freed_bytes: u64_at(bytes, 8),
            moved: u64_at(bytes, 16),
            slabs_before: u32_at(bytes, 24),
            slabs_after: u32_at(bytes, 28),
            resident_before: u64_at(bytes, 32),
            resident_after: u64_at(bytes, 40),
        };
        let errno = i32::try_from(u32_at(bytes, 48)).ok()?;
        Some(Self { of: u64_at(bytes, 0), shrunk, errno, huge_before: HugeUse::from_number(u32_at(bytes, 52)) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Writes commands and parses them. Each parsed command must equal the written one, and must be rejected if another
    /// request id is expected. A command with a changed magic or action, or one that was accepted before, must be
    /// rejected.
    #[test]
    fn commands_are_read_as_written() {
        let actions = [
            Action::Shrink,
            Action::SetUsedRatio(100),
            Action::SetRemoteRatio(7),
            Action::Move { from: 3, to: u16::MAX },
            Action::Balance,
        ];
        for action in actions.map(Some).into_iter().chain([None]) {
            for of in [0, 9, u64::MAX] {
                let slab = |action| ControlCommand::Slab { action, cache: of };
                let command = action.map_or(ControlCommand::Trim { want_bytes: of }, slab);
                let bytes = command.to_bytes(5);
                assert_eq!(
                    (ControlCommand::from_bytes(&bytes, 5), ControlCommand::from_bytes(&bytes, 6)),
                    (Some(command), None)
                );
                for at in [0, 15, ControlCommand::ACCEPTED_OFFSET] {
                    let mut bytes = bytes;
                    bytes[at] ^= 0x80;
                    assert_eq!(ControlCommand::from_bytes(&bytes, 5), None, "byte {at}");
                }
            }
        }
    }

    /// Commands without a slab cache must be read as they were written. Another number of a setting must be rejected.
    #[test]
    fn commands_for_the_process_are_read_as_written() {
        let settings = [None, Some(HugeUse::Auto), Some(HugeUse::Always), Some(HugeUse::Never)];
        for command in settings.map(ControlCommand::Huge).into_iter().chain([ControlCommand::DropContents]) {
            assert_eq!(ControlCommand::from_bytes(&command.to_bytes(5), 5), Some(command));
        }
        let mut bytes = ControlCommand::Huge(None).to_bytes(5);
        bytes[16] = 4;
        assert_eq!(ControlCommand::from_bytes(&bytes, 5), None);
    }

    /// Writes an outcome into a record and parses it. The parsed outcome must equal the written one. An invalid record
    /// must be rejected.
    #[test]
    fn outcomes_are_read_as_written() {
        let shrunk = ShrinkReport {
            freed_bytes: 1,
            moved: 2,
            slabs_before: 3,
            slabs_after: 4,
            resident_before: 5,
            resident_after: 6,
        };
        let outcome = Outcome { of: 7, shrunk, errno: libc::EBUSY, huge_before: Some(HugeUse::Never) };
        assert_eq!(Outcome::from_bytes(&outcome.to_record()), Some(outcome));
        assert_eq!(Outcome::from_bytes(&[0xFF; Outcome::LEN]), None);
    }
}
