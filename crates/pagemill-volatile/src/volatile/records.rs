//! The record of a volatile range, 32 bytes. Fields by offset: address at 0; length at 8; number of purged bytes at 16
//! (all ones if some, but an unknown number, were purged); age at 24 in ticks of 2^22 ns (u32; all ones if not
//! volatile); kind at 28, state at 29 and behaviour at 30, as the discriminants of [`RangeKind`], [`RangeState`] and
//! [`How`]; 1 at 31 if the range is strict.

use super::listed::{Listed, ListedPart, RangeKind, RangeState};
use super::vrange::How;
use super::{Ranges, Vranges};
use pagemill_core::listing::{ListWriter, Record, Response, Unanswered, ask_for, u32_at, u64_at};
use pagemill_core::published::Subject;
use pagemill_sys::file::Path;
use pagemill_sys::process::Identity;
use std::io;

/// Number of ranges that are copied under the lock of the range table before they are written. The copies use 12 KiB of
/// stack and take some microseconds.
const BATCH_LEN: usize = 128;

/// The number of purged bytes in the record of a range of which an unknown number of bytes was purged.
const UNKNOWN_PURGED_BYTES: u64 = u64::MAX;
/// The age in the record of a range that is not volatile.
const NOT_MARKED_AGE: u32 = u32::MAX;

const RECORD_LEN: usize = 32;

/// Returns the record with the description of a range.
fn to_record(listed: &Listed) -> [u8; RECORD_LEN] {
    let mut bytes = [0; RECORD_LEN];
    bytes[..8].copy_from_slice(&(listed.addr as u64).to_le_bytes());
    bytes[8..16].copy_from_slice(&(listed.len_bytes as u64).to_le_bytes());
    let purged = listed.purged_bytes.map_or(UNKNOWN_PURGED_BYTES, |bytes| bytes as u64);
    bytes[16..24].copy_from_slice(&purged.to_le_bytes());
    bytes[24..28].copy_from_slice(&listed.age_ticks.unwrap_or(NOT_MARKED_AGE).to_le_bytes());
    bytes[28..].copy_from_slice(&[listed.kind as u8, listed.state as u8, listed.how as u8, u8::from(listed.is_strict)]);
    bytes
}

/// The answer of a process to [`ask`]: a list of its volatile ranges.
///
/// ```
/// use pagemill_core::published;
/// use pagemill_volatile::VolatileBuf;
///
/// let range = VolatileBuf::new(1 << 20)?;
/// let (file, figures) = published::find(std::process::id()).expect("this process publishes");
/// match pagemill_volatile::ask(&file, figures.identity, || false) { // of any process of this user
///     Ok(list) => assert!(list.ranges.iter().any(|listed| listed.addr == range.addr())),
///     Err(reason) => println!("no answer: {reason}"),
/// }
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    pub ranges: Vec<Listed>,
    /// Number of ranges that are not in `ranges`, because the process has more than
    /// [`MOST_RECORDS`](pagemill_core::listing::MOST_RECORDS).
    pub left_out: u64,
}

/// Requests a list of the volatile ranges of the process that published its statistics in the file `figures`. Waits
/// until the process answers, `should_stop` returns true, or
/// [`ANSWER_WITHIN`](pagemill_core::listing::ask::ANSWER_WITHIN) has passed. In every case the request's file is
/// removed.
///
/// # Errors
///
/// [`Unanswered`] says why there is no list.
pub fn ask(figures: &Path, identity: Identity, should_stop: impl Fn() -> bool) -> Result<List, Unanswered> {
    ask_for(figures, identity, should_stop).map(|(ranges, left_out)| List { ranges, left_out })
}

/// Lists the volatile ranges of a process: first those with a handle, then those marked by address.
///
/// Example: [`ListWriter`].
pub struct RangeLists {
    pub ranges: &'static Ranges,
    pub vranges: &'static Vranges,
}

impl ListWriter for RangeLists {
    fn subject(&self) -> Subject {
        Subject::Ranges
    }

    fn list(&self, response: &mut Response<'_>) -> io::Result<()> {
        write_batches(response, |from, into| self.ranges.list(from, into))?;
        write_batches(response, |from, into| self.vranges.list_from(from, into))
    }
}

/// Writes the records of all ranges that `list` returns. Calls `list` once for each batch of ranges.
fn write_batches(response: &mut Response<'_>, list: impl Fn(usize, &mut [Listed]) -> ListedPart) -> io::Result<()> {
    let (mut batch, mut from) = ([Listed::NONE; BATCH_LEN], Some(0));
    while let Some(start) = from {
        let ListedPart { count, next } = list(start, &mut batch);
        let mut bytes = [0; BATCH_LEN * RECORD_LEN];
        for (place, listed) in bytes.chunks_exact_mut(RECORD_LEN).zip(&batch[..count]) {
            place.copy_from_slice(&to_record(listed));
        }
        response.write_records(&bytes[..count * RECORD_LEN], RECORD_LEN)?;
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

/// Parses the record of a range; `None` if a field is invalid.
fn from_record(bytes: &[u8]) -> Option<Listed> {
    let (addr, len_bytes) = (u64_at(bytes, 0), u64_at(bytes, 8));
    let purged = Some(u64_at(bytes, 16)).filter(|purged| *purged != UNKNOWN_PURGED_BYTES);
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
        age_ticks: Some(u32_at(bytes, 24)).filter(|ticks| *ticks != NOT_MARKED_AGE),
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

    /// Writes records with all kinds of values. Reading a record must return the description that was written.
    #[test]
    fn records_are_read_as_written() {
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

    /// Sets one field of a valid record to an invalid value. Reading the record must return `None`.
    #[test]
    fn invalid_records_are_rejected() {
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
