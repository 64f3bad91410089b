//! `pagemill vranges PID`: lists the volatile ranges of a process with their states and purged bytes. The process
//! either holds a handle of a range, or marked the range by its address.

use crate::columns::{self, Heading};
use crate::fail;
use crate::requests::{Interrupt, unanswered_reason};
use pagemill_core::listing::Unanswered;
use pagemill_core::published;
use pagemill_core::stats::{Counter, Snapshot};
use pagemill_core::units::Bytes;
use pagemill_sys::file::Path;
use pagemill_volatile::List;
use pagemill_volatile::Listed;
use pagemill_volatile::listed::{RangeKind, RangeState};
use pagemill_volatile::vrange::How;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

/// Length in seconds of a tick, the unit of `Listed::age_ticks`.
const SECONDS_PER_TICK: f64 = (1 << 22) as f64 / 1e9;

#[derive(clap::Args)]
#[command(after_help = "\
STATE of a range: held (not marked, so its bytes stay), volatile (its bytes may be purged), pinned (its bytes may be \
purged after the last unpin), purging. GOES: full (purged as a whole), partial (purged from its end, in steps), strict \
(access to a purged page raises SIGBUS). AGE: seconds since the range was marked or last purged in part, accurate to \
4 ms; starts again at 0 after 19 hours. PURGED: purged bytes, or `some` if their number is unknown because purged \
memory was marked again or the kernel took back a part.")]
pub struct Vranges {
    /// A process that uses Pagemill through `pagemill run`, the C interface or the crate.
    pid: u32,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

impl Vranges {
    pub fn main(&self) -> ExitCode {
        let found = published::find_all(self.pid);
        let Some((_, snapshot)) = found.first() else { return fail(2, &published::missing(self.pid)) };
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        let mut list = List::default();
        for (path, snapshot) in &found {
            match request_ranges(path, snapshot, &interrupt) {
                Ok(part) => {
                    list.ranges.extend(part.ranges);
                    list.left_out = list.left_out.saturating_add(part.left_out);
                }
                Err(Unanswered::Stopped) => return interrupt.end(),
                Err(error) => {
                    return fail(2, &format!("process {}: {error}{}", self.pid, unanswered_reason(&error, snapshot)));
                }
            }
        }
        list.ranges.sort_by_key(|range| range.addr);
        let text = if self.json { format!("{}\n", json_of(snapshot, &list)) } else { text_of(snapshot, &list) };
        let mut out = std::io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // The reader (head, less) may close the pipe early.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                fail(1, &format!("the list cannot be written: {error}"))
            }
            _ => ExitCode::SUCCESS,
        }
    }
}

/// Requests the ranges of one Pagemill instance in the process. An instance without ranges gets no request: a request
/// would wake its helper thread for nothing.
fn request_ranges(path: &Path, snapshot: &Snapshot, interrupt: &Interrupt) -> Result<List, Unanswered> {
    let bytes = [Counter::RangesBytes, Counter::MarkedBytes].map(|counter| snapshot.get(counter));
    if bytes == [0, 0] {
        return Ok(List::default());
    }
    pagemill_volatile::ask(path, snapshot.identity, || interrupt.has_signal())
}

/// Sums over the listed ranges. Their lengths come from another process and may be impossible, so additions saturate.
#[derive(Default)]
struct Totals {
    bytes: u64,
    /// Number of ranges and number of bytes in each state, in the order of [`RANGE_STATES`].
    states: [(usize, u64); RANGE_STATES.len()],
    purged_bytes: u64,
    /// Whether the sum of purged bytes is a lower bound, because the purged bytes of some ranges are unknown.
    is_minimum: bool,
}

const RANGE_STATES: [RangeState; 4] = [RangeState::Held, RangeState::Volatile, RangeState::Pinned, RangeState::Purging];

impl Totals {
    fn of(ranges: &[Listed]) -> Self {
        let mut totals = Self::default();
        for range in ranges {
            let bytes = range.len_bytes as u64;
            totals.bytes = totals.bytes.saturating_add(bytes);
            for (sum, _) in totals.states.iter_mut().zip(RANGE_STATES).filter(|(_, state)| *state == range.state) {
                *sum = (sum.0 + 1, sum.1.saturating_add(bytes));
            }
            totals.purged_bytes = totals.purged_bytes.saturating_add(range.purged_bytes.unwrap_or(0) as u64);
            totals.is_minimum |= range.purged_bytes.is_none();
        }
        totals
    }
}

fn kind_name(range: &Listed) -> &'static str {
    match range.kind {
        RangeKind::Handle => "handle",
        RangeKind::Marked => "marked",
    }
}

fn state_name(state: RangeState) -> &'static str {
    match state {
        RangeState::Held => "held",
        RangeState::Volatile => "volatile",
        RangeState::Pinned => "pinned",
        RangeState::Purging => "purging",
    }
}

fn behaviour_name(range: &Listed) -> &'static str {
    match range.how {
        How::Full => "full",
        How::Partial => "partial",
    }
}

/// Returns a keyword that says how much of the range was purged.
fn purged_keyword(range: &Listed) -> &'static str {
    match range.purged_bytes {
        Some(0) => "no",
        Some(bytes) if bytes >= range.len_bytes => "all",
        _ => "in part",
    }
}

fn age_seconds(range: &Listed) -> Option<f64> {
    // The age is rounded to milliseconds, which is finer than a tick.
    range.age_ticks.map(|ticks| (f64::from(ticks) * SECONDS_PER_TICK * 1e3).round() / 1e3)
}

fn text_of(snapshot: &Snapshot, list: &List) -> String {
    let mut text = format!("{} {}\n", snapshot.identity.pid, snapshot.name());
    if list.ranges.is_empty() {
        text.push_str("  no volatile ranges\n");
        return text;
    }
    let headings = [
        Heading::left_aligned("ADDRESSES", 25, 2),
        Heading::right_aligned("SIZE", 10, 1),
        Heading::left_aligned("KIND", 6, 2),
        Heading::left_aligned("STATE", 8, 2),
        Heading::left_aligned("GOES", 14, 2),
        Heading::right_aligned("AGE", 10, 2),
        Heading::left_aligned("PURGED", 0, 2),
    ];
    let row = |range: &Listed| {
        let age = age_seconds(range).map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.1} s"));
        let purged = match (purged_keyword(range), range.purged_bytes) {
            ("no", _) => "-".to_owned(),
            ("all", _) => "all".to_owned(),
            (_, Some(bytes)) => Bytes(bytes as u64).to_string(),
            (_, None) => "some".to_owned(),
        };
        vec![
            format!("{:012x}-{:012x}", range.addr, range.addr.saturating_add(range.len_bytes)),
            Bytes(range.len_bytes as u64).to_string(),
            kind_name(range).to_string(),
            state_name(range.state).to_string(),
            format!("{}{}", behaviour_name(range), if range.is_strict { " strict" } else { "" }),
            age,
            purged,
        ]
    };
    text += &columns::aligned_table(&headings, list.ranges.iter().map(row));
    let totals = Totals::of(&list.ranges);
    let ranges = if list.ranges.len() == 1 { "1 range".to_owned() } else { format!("{} ranges", list.ranges.len()) };
    let _ = write!(text, "  {ranges}, {}:", Bytes(totals.bytes));
    for (state, (count, bytes)) in RANGE_STATES.into_iter().zip(totals.states).filter(|(_, (count, _))| *count > 0) {
        let _ = write!(text, " {count} {} {},", state_name(state), Bytes(bytes));
    }
    let at_least = if totals.is_minimum { "at least " } else { "" };
    let _ = writeln!(text, " purged {at_least}{}", Bytes(totals.purged_bytes));
    if list.left_out > 0 {
        let _ = writeln!(text, "  {} more are not listed", list.left_out);
    }
    text
}

fn json_of(snapshot: &Snapshot, list: &List) -> Value {
    let ranges: Vec<Value> = list
        .ranges
        .iter()
        .map(|range| {
            json!({
                "address": range.addr, "size": range.len_bytes, "kind": kind_name(range),
                "state": state_name(range.state),
                "behaviour": behaviour_name(range), "strict": range.is_strict, "age_seconds": age_seconds(range),
                "purged": purged_keyword(range), "purged_bytes": range.purged_bytes,
            })
        })
        .collect();
    let totals = Totals::of(&list.ranges);
    let [held, volatile, pinned, purging] = totals.states.map(|(_, bytes)| bytes);
    json!({
        "pid": snapshot.identity.pid, "name": snapshot.name(), "ranges": ranges,
        "totals": {
            "ranges": list.ranges.len(), "size": totals.bytes, "held": held, "volatile": volatile, "pinned": pinned,
            "purging": purging, "purged_bytes": totals.purged_bytes, "not_listed": list.left_out,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn range(state: RangeState, purged_bytes: Option<usize>) -> Listed {
        Listed {
            addr: 0x7f00_0000_0000,
            len_bytes: 4 * MIB,
            state,
            purged_bytes,
            age_ticks: Some(1000),
            ..Listed::NONE
        }
    }

    /// The printed list must have one row for each range, and the sums below the rows. Unknown values must be shown as
    /// unknown.
    #[test]
    fn a_list_has_rows_and_sums() {
        let held = Listed { age_ticks: None, ..range(RangeState::Held, Some(0)) };
        let marked =
            Listed { kind: RangeKind::Marked, how: How::Partial, is_strict: true, ..range(RangeState::Volatile, None) };
        let ranges =
            vec![held, range(RangeState::Pinned, Some(MIB)), range(RangeState::Volatile, Some(4 * MIB)), marked];
        let list = List { ranges, left_out: 7 };
        let text = text_of(&Snapshot::default(), &list);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_ascii_whitespace().collect()).collect();
        let row = |words: &str| words.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(lines[2], row("7f0000000000-7f0000400000 4 MiB handle held full - -"));
        assert_eq!(lines[3], row("7f0000000000-7f0000400000 4 MiB handle pinned full 4.2 s 1 MiB"));
        assert_eq!(lines[4], row("7f0000000000-7f0000400000 4 MiB handle volatile full 4.2 s all"));
        assert_eq!(lines[5], row("7f0000000000-7f0000400000 4 MiB marked volatile partial strict 4.2 s some"));
        let sums = "4 ranges, 16 MiB: 1 held 4 MiB, 2 volatile 8 MiB, 1 pinned 4 MiB, purged at least 5 MiB";
        assert_eq!((lines[6].join(" "), lines[7].join(" ")), (sums.to_owned(), "7 more are not listed".to_owned()));
        let json = json_of(&Snapshot::default(), &list);
        assert_eq!((&json["ranges"][0]["age_seconds"], &json["ranges"][3]["strict"]), (&Value::Null, &json!(true)));
        assert_eq!(
            (&json["ranges"][3]["purged"], &json["ranges"][3]["purged_bytes"]),
            (&json!("in part"), &Value::Null)
        );
        assert_eq!((&json["totals"]["volatile"], &json["totals"]["not_listed"]), (&json!(8 * MIB), &json!(7)));
    }

    /// Impossible lengths of ranges must not cause an overflow.
    #[test]
    fn impossible_lengths_do_not_overflow() {
        let endless =
            Listed { addr: usize::MAX, len_bytes: usize::MAX, purged_bytes: Some(usize::MAX), ..Listed::NONE };
        let list = List { ranges: vec![endless; 3], left_out: u64::MAX };
        assert!(text_of(&Snapshot::default(), &list).contains("3 ranges"));
        assert_eq!(json_of(&Snapshot::default(), &list)["totals"]["size"], u64::MAX);
        assert!(text_of(&Snapshot::default(), &List::default()).contains("no volatile ranges"));
    }
}
