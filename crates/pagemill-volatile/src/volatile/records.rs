//! One record per volatile range, 32 bytes: 0 address; 8 length; 16 bytes purged (all ones: some, the number is
//! unknown); 24 age in ticks of 2^22 ns (u32; all ones: not marked); 28 kind; 29 state; 30 behaviour; 31 whether it is
//! strict.

use super::listed::{Listed, ListedPart, RangeKind, RangeState};
use super::vrange::How;
use super::{Ranges, Vranges};
use pagemill_core::listing::{Lister, Record, Response, Unanswered, ask_for, u32_at, u64_at};
use pagemill_core::published::Subject;
use pagemill_sys::file::Path;
use pagemill_sys::process::Identity;
use std::io;

/// Ranges copied before they are written: 12 KiB of stack, and some microseconds under the lock of marks.
const AT_A_TIME: usize = 128;

const UNKNOWN: u64 = u64::MAX;
const NOT_MARKED: u32 = u32::MAX;

const RECORD_LEN: usize = 32;

fn to_record(listed: &Listed) -> [u8; RECORD_LEN] {
    let mut bytes = [0; RECORD_LEN];
    bytes[..8].copy_from_slice(&(listed.addr as u64).to_le_bytes());
    bytes[8..16].copy_from_slice(&(listed.len_bytes as u64).to_le_bytes());
    let purged = listed.purged_bytes.map_or(UNKNOWN, |bytes| bytes as u64);
    bytes[16..24].copy_from_slice(&purged.to_le_bytes());
    bytes[24..28].copy_from_slice(&listed.age_ticks.unwrap_or(NOT_MARKED).to_le_bytes());
    bytes[28] = match listed.kind {
        RangeKind::Handle => 0,
        RangeKind::Marked => 1,
    };
    bytes[29] = match listed.state {
        RangeState::Held => 0,
        RangeState::Volatile => 1,
        RangeState::Pinned => 2,
        RangeState::Purging => 3,
    };
    bytes[30] = match listed.how {
        How::Full => 0,
        How::Partial => 1,
    };
    bytes[31] = u8::from(listed.is_strict);
    bytes
}

/// The ranges that a process listed.
///
/// ```
/// use pagemill::{Pagemill, listing, published, volatile::Behaviour};
///
/// let range = Pagemill::of_process()?.ranges.allocate(1 << 20, Behaviour::Full)?;
/// let (file, figures) = published::find(std::process::id()).expect("this process publishes");
/// match listing::ask(&file, figures.identity, || false) { // of any process of this user
///     Ok(list) => assert!(list.ranges.iter().any(|listed| listed.addr == range.addr())),
///     Err(reason) => println!("no answer: {reason}"),
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    pub ranges: Vec<Listed>,
    /// The number of ranges beyond [`MOST_RECORDS`](pagemill_core::listing::MOST_RECORDS).
    pub left_out: u64,
}

/// Asks the process that published its figures at `figures` for its ranges. Waits until it answers, `should_stop`
/// returns true, or [`ANSWER_WITHIN`](pagemill_core::listing::ask::ANSWER_WITHIN) has passed. In every case the file of
/// the request is removed.
///
/// # Errors
///
/// [`Unanswered`] with the reason.
pub fn ask(figures: &Path, identity: Identity, should_stop: impl Fn() -> bool) -> Result<List, Unanswered> {
    ask_for(figures, identity, should_stop).map(|(ranges, left_out)| List { ranges, left_out })
}

/// Lists the ranges of a process: those with a handle, then those marked by address.
///
/// Example: [`Lister`].
pub struct RangeLists {
    pub ranges: &'static Ranges,
    pub vranges: &'static Vranges,
}

impl Lister for RangeLists {
    fn subject(&self) -> Subject {
        Subject::Ranges
    }

    fn list(&self, response: &mut Response<'_>) -> io::Result<()> {
        put_all(response, |from, into| self.ranges.list(from, into))?;
        put_all(response, |from, into| self.vranges.list_from(from, into))
    }
}

/// Writes all records that `list` returns, part by part, from the start.
fn put_all(response: &mut Response<'_>, list: impl Fn(usize, &mut [Listed]) -> ListedPart) -> io::Result<()> {
    let (mut part, mut from) = ([Listed::NONE; AT_A_TIME], Some(0));
    while let Some(start) = from {
        let ListedPart { count, next } = list(start, &mut part);
        let mut bytes = [0; AT_A_TIME * RECORD_LEN];
        for (place, listed) in bytes.chunks_exact_mut(RECORD_LEN).zip(&part[..count]) {
            place.copy_from_slice(&to_record(listed));
        }
        response.put_all(&bytes[..count * RECORD_LEN], RECORD_LEN)?;
        from = next;
    }
    Ok(())
}

impl Record for Listed {
    const SUBJECT: Subject = Subject::Ranges;
    const LEN: usize = RECORD_LEN;

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        from_record(bytes)
    }
}

fn from_record(bytes: &[u8]) -> Option<Listed> {
    let (addr, len_bytes) = (u64_at(bytes, 0), u64_at(bytes, 8));
    let purged = Some(u64_at(bytes, 16)).filter(|purged| *purged != UNKNOWN);
    let is_inside =
        len_bytes > 0 && addr.checked_add(len_bytes).is_some() && purged.is_none_or(|purged| purged <= len_bytes);
    let listed = Listed {
        addr: usize::try_from(addr).ok()?,
        len_bytes: usize::try_from(len_bytes).ok()?,
        kind: *[RangeKind::Handle, RangeKind::Marked].get(usize::from(bytes[28]))?,
        state: *[RangeState::Held, RangeState::Volatile, RangeState::Pinned, RangeState::Purging]
            .get(usize::from(bytes[29]))?,
        how: *[How::Full, How::Partial].get(usize::from(bytes[30]))?,
        is_strict: *[false, true].get(usize::from(bytes[31]))?,
        purged_bytes: purged.and_then(|purged| usize::try_from(purged).ok()),
        age_ticks: Some(u32_at(bytes, 24)).filter(|ticks| *ticks != NOT_MARKED),
    };
    is_inside.then_some(listed)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn listed() -> Listed {
        Listed {
            addr: 0x7000_0000_0000,
            len_bytes: 3 << 20,
            kind: RangeKind::Marked,
            state: RangeState::Pinned,
            how: How::Partial,
            is_strict: true,
            purged_bytes: Some(1 << 20),
            age_ticks: Some(7),
        }
    }

    /// A written record is read back; each field has its offset.
    #[test]
    fn records_go_and_come() {
        let states = [RangeState::Held, RangeState::Volatile, RangeState::Pinned, RangeState::Purging];
        for (state, (kind, how)) in states
            .into_iter()
            .zip([RangeKind::Handle, RangeKind::Marked].into_iter().zip([How::Full, How::Partial]).cycle())
        {
            for (purged_bytes, age_ticks) in [(None, None), (Some(0), Some(0)), (Some(3 << 20), Some(1 << 24))] {
                let is_strict = age_ticks.is_some();
                let listed = Listed { state, kind, how, is_strict, purged_bytes, age_ticks, ..listed() };
                assert_eq!(from_record(&to_record(&listed)), Some(listed));
            }
        }
    }

    /// Invalid records are rejected, whichever byte is wrong.
    #[test]
    fn damaged_records_are_refused() {
        let good = to_record(&listed());
        for (at, byte) in [(28, 2), (29, 4), (30, 2), (31, 2), (18, 0x31), (23, 1), (7, 0xFF)] {
            let mut bytes = good;
            bytes[at] = byte;
            if at == 7 {
                bytes[..7].fill(0xFF);
            }
            assert_eq!(from_record(&bytes), None, "byte {at}");
        }
        assert_eq!(from_record(&[0; RECORD_LEN]), None, "no length");
        assert_eq!(from_record(&[0xFF; RECORD_LEN]), None);
    }
}
