//! Listings of volatile ranges: copied in parts, into memory of the caller.

use super::vrange::{AT_A_TIME, How, Vranges};
use super::word::{RangePhase, ticks_since};
use super::{Ranges, now};
use std::sync::atomic::Ordering::Acquire;

/// How a range was made.
///
/// Example: [`Listed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// Allocated by [`Ranges::allocate`].
    Handle,
    /// Memory of the program, marked by address.
    Marked,
}

/// The state of a range.
///
/// Example: [`Listed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeState {
    /// Not marked: its bytes stay.
    Held,
    /// Its bytes may be purged.
    Volatile,
    /// Its bytes may be purged after the last pin ends.
    Pinned,
    /// Its bytes are being purged.
    Purging,
}

/// A volatile range at one moment.
///
/// ```
/// use pagemill::volatile::listed::{RangeKind, RangeState};
/// use pagemill::{Pagemill, volatile::{Behaviour, Listed}};
///
/// let ranges = Pagemill::of_process()?.ranges;
/// let range = ranges.allocate(1 << 20, Behaviour::Full)?;
/// let mut listed = [Listed::NONE; 16];
/// let part = ranges.list(0, &mut listed); // 16 ranges at most; `part.next` is where to continue
/// assert!(listed[..part.count].iter().any(|listed| listed.addr == range.addr()
///     && listed.kind == RangeKind::Handle && listed.state == RangeState::Held));
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub addr: usize,
    pub len_bytes: usize,
    pub kind: RangeKind,
    pub state: RangeState,
    pub how: How,
    /// Purged pages raise `SIGBUS` when touched.
    pub is_strict: bool,
    /// Bytes purged since it was marked; `None`: some, but the number is unknown.
    pub purged_bytes: Option<usize>,
    /// Ticks of 4.2 ms since it was marked, or lost a chunk; they wrap after 19 hours. `None` while it is held.
    pub age_ticks: Option<u32>,
}

impl Listed {
    /// The initial value of array elements.
    pub const NONE: Self = Self {
        addr: 0,
        len_bytes: 0,
        kind: RangeKind::Handle,
        state: RangeState::Held,
        how: How::Full,
        is_strict: false,
        purged_bytes: Some(0),
        age_ticks: None,
    };
}

/// The part of a listing that was copied.
///
/// Example: [`Listed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedPart {
    /// Number of ranges copied.
    pub count: usize,
    /// Where to continue; `None` after the last.
    pub next: Option<usize>,
}

/// Fills `into` from `found` as far as there is room. Returns the count.
fn fill(into: &mut [Listed], found: impl Iterator<Item = Listed>) -> usize {
    into.iter_mut().zip(found).fold(0, |count, (place, listed)| {
        *place = listed;
        count + 1
    })
}

impl Ranges {
    /// Copies ranges with a handle, from number `from` on (0: the first). Ranges allocated or dropped meanwhile may be
    /// missing or outdated. Cost: some nanoseconds each, no lock.
    pub fn list(&self, from: usize, into: &mut [Listed]) -> ListedPart {
        // Visits at most as many entries as there is room for, so that the position to continue at is known.
        let end = (self.count.load(Acquire) as usize).max(from);
        let to = end.min(from.saturating_add(into.len()));
        let count = fill(into, (from..to).filter_map(|number| self.listed(number as u32)));
        ListedPart { count, next: (to < end).then_some(to) }
    }

    fn listed(&self, number: u32) -> Option<Listed> {
        const LOOKS: usize = 4;
        let entry = self.entry(number);
        let mut found = None;
        for _ in 0..LOOKS {
            let seen = entry.word.look();
            let len_bytes = entry.len_bytes.load(Acquire) as usize;
            if !seen.has_owner() || len_bytes == 0 {
                return None;
            }
            let kept_bytes = entry.kept_bytes.load(Acquire) as usize;
            let is_partial = entry.chunk_bytes.load(Acquire) < len_bytes as u64;
            let is_held = seen.phase() == RangePhase::Held;
            found = Some(Listed {
                addr: entry.addr.load(Acquire) as usize,
                len_bytes,
                kind: RangeKind::Handle,
                state: match seen.phase() {
                    RangePhase::Purging => RangeState::Purging,
                    RangePhase::Volatile if seen.pins() > 0 => RangeState::Pinned,
                    RangePhase::Volatile => RangeState::Volatile,
                    RangePhase::Held | RangePhase::Free => RangeState::Held,
                },
                how: if is_partial { How::Partial } else { How::Full },
                is_strict: false,
                purged_bytes: Some(if is_held || !seen.is_lost() { 0 } else { len_bytes.saturating_sub(kept_bytes) }),
                age_ticks: (!is_held).then(|| ticks_since(now(), seen.epoch())),
            });
            if entry.word.look() == seen {
                break;
            }
        }
        found
    }

    /// Called in a fork child: publishes the ranges inherited from the parent.
    pub fn begin_child(&self) {
        self.tell_bytes();
    }
}

impl Vranges {
    /// Copies marks that end after `from`, ascending by address. Cost: some nanoseconds each, under the lock of marks;
    /// at most some thousand per call.
    pub fn list_from(&self, from: usize, into: &mut [Listed]) -> ListedPart {
        let room = into.len().min(AT_A_TIME);
        let count = self.book.with(|book| {
            let found = book.marks.from(from).map(|(addresses, mark)| Listed {
                addr: addresses.start,
                len_bytes: addresses.len(),
                kind: RangeKind::Marked,
                state: if mark.is_purging { RangeState::Purging } else { RangeState::Volatile },
                how: mark.how,
                is_strict: mark.is_strict,
                purged_bytes: match (mark.is_empty, mark.is_purged) {
                    (true, _) => Some(addresses.len()),
                    (false, true) => None,
                    (false, false) => Some(0),
                },
                age_ticks: Some(ticks_since(now(), mark.epoch)),
            });
            fill(&mut into[..room], found)
        });
        let next = (count == room).then(|| into[..count].last().map(|last| last.addr + last.len_bytes)).flatten();
        ListedPart { count, next }
    }

    /// All marks, ascending by address. Allocates.
    pub fn list(&self) -> Vec<Listed> {
        let (mut listed, mut part) = (Vec::new(), vec![Listed::NONE; AT_A_TIME]);
        let mut from = Some(0);
        while let Some(start) = from {
            let ListedPart { count, next } = self.list_from(start, &mut part);
            listed.extend_from_slice(&part[..count]);
            from = next;
        }
        listed
    }
}
