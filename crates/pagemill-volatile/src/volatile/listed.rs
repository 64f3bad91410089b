//! Lists volatile ranges: copies their descriptions, one part at a time, into an array of the caller.

use super::vrange::{How, MAX_INTERVALS_PER_LOCK, Vranges};
use super::word::{RangePhase, ticks_since};
use super::{Ranges, current_epoch};
use std::sync::atomic::Ordering::Acquire;

/// How a volatile range was created.
///
/// Example: [`Listed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// The range has a handle: [`Ranges::allocate`] allocated it.
    Handle = 0,
    /// The range was marked by address ([`Vranges::vrange`]).
    Marked = 1,
}

/// The state of a volatile range.
///
/// Example: [`Listed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeState {
    /// The range is not marked: its bytes are preserved.
    Held = 0,
    /// The range is marked: its bytes may be purged.
    Volatile = 1,
    /// The range is marked and pinned: its bytes may be purged after the last pin has ended.
    Pinned = 2,
    /// The range is being purged.
    Purging = 3,
}

/// A description of one volatile range, as it was when it was listed.
///
/// ```
/// use pagemill_volatile::listed::{RangeKind, RangeState};
/// use pagemill_volatile::{Base, Behaviour, Listed};
///
/// let ranges = Base::of_process()?.ranges;
/// let range = ranges.allocate(1 << 20, Behaviour::Full)?;
/// let mut listed = [Listed::NONE; 16];
/// let part = ranges.list(0, &mut listed); // 16 ranges at most; `part.next` is where to continue
/// assert!(listed[..part.count].iter().any(|listed| listed.addr == range.addr()
///     && listed.kind == RangeKind::Handle && listed.state == RangeState::Held));
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub addr: usize,
    pub len_bytes: usize,
    pub kind: RangeKind,
    pub state: RangeState,
    pub how: How,
    /// Whether accessing a purged page raises `SIGBUS`.
    pub is_strict: bool,
    /// Number of bytes purged since the range was marked; `None` if some were purged but their number is unknown.
    pub purged_bytes: Option<usize>,
    /// Ticks of 4.2 ms since the range was marked or a chunk of it was purged. The number wraps after 19 hours. `None`
    /// for a held range.
    pub age_ticks: Option<u32>,
}

impl Listed {
    /// A value to initialise arrays with. It describes no range.
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

/// The result of copying one part of a list of volatile ranges.
///
/// Example: [`Listed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedPart {
    /// Number of ranges copied.
    pub count: usize,
    /// The argument `from` of the call that copies the next part; `None` after the last part.
    pub next: Option<usize>,
}

/// Copies items from `found` until `into` is full. Returns the number of copied items.
pub(super) fn copy_items<T>(into: &mut [T], found: impl Iterator<Item = T>) -> usize {
    into.iter_mut().zip(found).fold(0, |count, (place, item)| {
        *place = item;
        count + 1
    })
}

impl Ranges {
    /// Copies descriptions of ranges with a handle, starting with the entry `from` (0 for the first). Ranges that are
    /// allocated or dropped meanwhile may be missing or outdated. Cost: some nanoseconds for each range, no lock.
    pub fn list(&self, from: usize, into: &mut [Listed]) -> ListedPart {
        // Visits at most `into.len()` entries, so all ranges found fit, and the next part starts at `to`.
        let end = (self.count.load(Acquire) as usize).max(from);
        let to = end.min(from.saturating_add(into.len()));
        let count = copy_items(into, (from..to).filter_map(|number| self.listed(number as u32)));
        ListedPart { count, next: (to < end).then_some(to) }
    }

    /// Returns the description of the range with this entry; `None` if the entry is free.
    fn listed(&self, number: u32) -> Option<Listed> {
        const MAX_READ_ATTEMPTS: usize = 4;
        let entry = self.entry(number);
        let mut found = None;
        for _ in 0..MAX_READ_ATTEMPTS {
            let seen = entry.word.load();
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
                age_ticks: (!is_held).then(|| ticks_since(current_epoch(), seen.epoch())),
            });
            if entry.word.load() == seen {
                break;
            }
        }
        found
    }

    /// Publishes the total length of the ranges that a fork child inherited.
    pub fn begin_child(&self) {
        self.publish_total_bytes();
    }
}

impl Vranges {
    /// Copies the descriptions of at most 4000 marked ranges that end after the address `from`, in ascending order.
    /// Cost: some nanoseconds for each range, under the lock of the marks.
    pub fn list_from(&self, from: usize, into: &mut [Listed]) -> ListedPart {
        let room = into.len().min(MAX_INTERVALS_PER_LOCK);
        let count = self.table.with(|table| {
            let found = table.marks.from(from).map(|(addresses, mark)| Listed {
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
                age_ticks: Some(ticks_since(current_epoch(), mark.epoch)),
            });
            copy_items(&mut into[..room], found)
        });
        let next = (count == room).then(|| into[..count].last().map(|last| last.addr + last.len_bytes)).flatten();
        ListedPart { count, next }
    }

    /// Returns descriptions of all marked ranges, in ascending order. Allocates from the global allocator.
    pub fn list(&self) -> Vec<Listed> {
        let (mut listed, mut part) = (Vec::new(), vec![Listed::NONE; MAX_INTERVALS_PER_LOCK]);
        let mut from = Some(0);
        while let Some(start) = from {
            let ListedPart { count, next } = self.list_from(start, &mut part);
            listed.extend_from_slice(&part[..count]);
            from = next;
        }
        listed
    }
}
