//! The memory of a process tree over time, for the report of `run`: resident memory, the allocators' part of it, and the
//! bytes returned for each cause.
//!
//! The number of points is bounded. If all are used, each two adjacent points become one, so that a long run has a
//! coarser time line at the same cost.

use crate::plot;
use crate::statistics::RETURN_CAUSES;
use pagemill_core::stats::Snapshot;
use pagemill_core::units::Bytes;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::time::Duration;

/// Maximum number of points. At most half of them are lost when two become one.
const MAX_SLOTS: usize = 512;

/// Time of a point at the start, the shortest pause between two samples.
const FIRST_SLOT: Duration = Duration::from_millis(10);

/// Lines of the plot of resident memory.
const PLOT_LINES: usize = 8;

/// Width of the amounts beside a plot.
const SCALE_WIDTH: usize = 10;

/// Smallest width of a plot.
const MIN_PLOT_WIDTH: usize = 20;

/// Bytes returned since the start, for each of the [`RETURN_CAUSES`].
pub type Returned = [u64; RETURN_CAUSES.len()];

/// Returns the bytes that a process or a tree has returned, from its counters.
pub fn returned_by_cause(snapshot: &Snapshot) -> Returned {
    RETURN_CAUSES.map(|(counter, _)| snapshot.get(counter))
}

/// The largest amounts of the samples in one slot of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    pub resident_bytes: u64,
    /// Resident memory of the allocators, as Pagemill counts it.
    pub allocator_bytes: u64,
    /// Bytes returned until the end of the slot.
    pub returned: Returned,
}

impl Point {
    /// Merges a later point into this one.
    fn merge(&mut self, later: &Self) {
        self.resident_bytes = self.resident_bytes.max(later.resident_bytes);
        self.allocator_bytes = self.allocator_bytes.max(later.allocator_bytes);
        for (bytes, later) in self.returned.iter_mut().zip(later.returned) {
            *bytes = (*bytes).max(later);
        }
    }
}

/// A time line. Slots without a sample repeat the previous point.
#[derive(Clone, Debug)]
pub struct Timeline {
    slot: Duration,
    points: Vec<Point>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { slot: FIRST_SLOT, points: Vec::new() }
    }
}

impl Timeline {
    /// Records a sample at the time `at` since the start. A time before the last recorded one counts as the last.
    pub fn record(&mut self, at: Duration, resident_bytes: u64, allocator_bytes: u64) {
        let returned = self.points.last().map_or_else(Returned::default, |point| point.returned);
        self.add(at, Point { resident_bytes, allocator_bytes, returned });
    }

    /// Records the bytes that were returned until the time `at`.
    pub fn record_returned(&mut self, at: Duration, returned: Returned) {
        let before = self.points.last().copied().unwrap_or_default();
        self.add(at, Point { returned, ..before });
    }

    fn add(&mut self, at: Duration, point: Point) {
        while self.slot_at(at) >= MAX_SLOTS {
            self.halve();
        }
        let slot = self.slot_at(at);
        let before = self.points.last().copied().unwrap_or_default();
        while self.points.len() < slot {
            self.points.push(before);
        }
        if slot < self.points.len() {
            self.points[slot].merge(&point);
        } else {
            self.points.push(point);
        }
        assert!(self.points.len() <= MAX_SLOTS);
    }

    fn slot_at(&self, at: Duration) -> usize {
        let slot = at.as_nanos() / self.slot.as_nanos();
        (slot as usize).max(self.points.len().saturating_sub(1))
    }

    /// Merges each two adjacent points.
    fn halve(&mut self) {
        self.slot *= 2;
        let pair = |pair: &[Point]| {
            let mut merged = pair[0];
            pair[1..].iter().for_each(|later| merged.merge(later));
            merged
        };
        self.points = self.points.chunks(2).map(pair).collect();
    }

    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Returns the causes for which memory was returned, as indices of [`RETURN_CAUSES`], each with the sum of bytes.
    pub fn causes(&self) -> Vec<(usize, u64)> {
        let last = self.points.last().map_or_else(Returned::default, |point| point.returned);
        last.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Returns the bytes that were returned for a cause, in each of `width` equal parts of the time.
    pub fn returned_in_parts(&self, cause: usize, width: usize) -> Vec<u64> {
        let until: Vec<u64> = self.points.iter().map(|point| point.returned[cause]).collect();
        let ends = plot::stretched(&until, width);
        let before = [0].into_iter().chain(ends.iter().copied());
        ends.iter().zip(before).map(|(end, before)| end.saturating_sub(before)).collect()
    }

    /// Returns plots in lines of at most `width` characters, each below a heading. Empty if there are fewer than two
    /// points.
    pub fn text(&self, width: usize, wall: Duration, limit: Option<u64>) -> String {
        if self.points.len() < 2 {
            return String::new();
        }
        let columns = width.saturating_sub(SCALE_WIDTH + 4).max(MIN_PLOT_WIDTH);
        let resident: Vec<u64> = self.points.iter().map(|point| point.resident_bytes).collect();
        let peak = resident.iter().copied().max().unwrap_or(0);
        // A limit far above the peak would leave no room for the memory.
        let shown_limit = limit.filter(|limit| *limit <= peak.saturating_mul(2));
        let max = peak.max(shown_limit.unwrap_or(0));
        let mut text = String::from("  resident memory of the tree over time, as the kernel counts it");
        text += &shown_limit.map_or_else(String::new, |limit| format!("; ╌ limit {}", Bytes(limit)));
        text.push('\n');
        let limit_line = shown_limit.map(|limit| line_of(limit, max));
        let bars = plot::bars(&plot::stretched(&resident, columns), max, PLOT_LINES);
        for (line, mut bar) in bars.into_iter().enumerate() {
            let scale = match line {
                0 => Bytes(max).to_string(),
                line if line == PLOT_LINES / 2 => Bytes(max / 2).to_string(),
                _ => String::new(),
            };
            if limit_line == Some(line) {
                bar = bar.replace(' ', "╌");
            }
            let _ = writeln!(text, "{}", format!("  {scale:>SCALE_WIDTH$} ┤{bar}").trim_end());
        }
        let _ = writeln!(text, "  {:>SCALE_WIDTH$} └{}", "0 B", "─".repeat(columns));
        let end = format!("{:.2} s", wall.as_secs_f64());
        let _ = writeln!(text, "  {:>SCALE_WIDTH$}  0 s{end:>width$}", "", width = columns - 3);
        self.add_returned_text(&mut text, columns);
        text
    }

    /// Adds a line with a plot for each cause for which memory was returned. All lines have the same scale.
    fn add_returned_text(&self, text: &mut String, columns: usize) {
        let causes = self.causes();
        if causes.is_empty() {
            return;
        }
        let amount = |(cause, bytes): &(usize, u64)| format!("{} {}", RETURN_CAUSES[*cause].1, Bytes(*bytes));
        let amounts: Vec<String> = causes.iter().map(amount).collect();
        let _ = writeln!(text, "  returned to the system for: {}", amounts.join(", "));
        let parts: Vec<Vec<u64>> = causes.iter().map(|(cause, _)| self.returned_in_parts(*cause, columns)).collect();
        let max = parts.iter().flatten().copied().max().unwrap_or(0);
        for ((cause, _), parts) in causes.into_iter().zip(parts) {
            let bar = plot::bars(&parts, max, 1).remove(0);
            let _ = writeln!(text, "  {:>SCALE_WIDTH$} ┤{}", RETURN_CAUSES[cause].1, bar.trim_end());
        }
    }

    pub fn json(&self) -> Value {
        let of = |value: fn(&Point) -> u64| -> Vec<u64> { self.points.iter().map(value).collect() };
        let returned: Map<String, Value> = self
            .causes()
            .into_iter()
            .map(|(cause, _)| {
                let until: Vec<u64> = self.points.iter().map(|point| point.returned[cause]).collect();
                (RETURN_CAUSES[cause].1.to_owned(), json!(until))
            })
            .collect();
        json!({
            "interval_s": self.slot.as_secs_f64(),
            "resident_bytes": of(|point| point.resident_bytes),
            "allocator_bytes": of(|point| point.allocator_bytes),
            "returned_bytes": returned,
        })
    }
}

/// Returns the line of a plot in which `bytes` are, from the top.
fn line_of(bytes: u64, max: u64) -> usize {
    let from_below = u128::from(bytes.saturating_sub(1)) * PLOT_LINES as u128 / u128::from(max.max(1));
    PLOT_LINES - 1 - (from_below as usize).min(PLOT_LINES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn returned(age: u64) -> Returned {
        let mut returned = Returned::default();
        returned[0] = age;
        returned
    }

    /// A sample every 3 ms for a minute, whose memory grows: the number of points stays bounded. No point may lose the
    /// largest sample of its time, nor the bytes returned by then.
    #[test]
    fn the_resolution_is_halved_when_all_points_are_used() {
        let mut timeline = Timeline::default();
        for step in 0..20_000_u64 {
            let at = Duration::from_millis(3 * step);
            timeline.record(at, step * MIB, step);
            timeline.record_returned(at, returned(step));
            assert!(timeline.points().len() <= MAX_SLOTS);
        }
        let (points, slot_ms) = (timeline.points(), timeline.slot.as_millis() as u64);
        assert!(points.len() > MAX_SLOTS / 2 && slot_ms == 160, "{} of {slot_ms} ms", points.len());
        for (slot, point) in points.iter().enumerate() {
            let last_step = (((slot as u64 + 1) * slot_ms - 1) / 3).min(19_999);
            assert_eq!(point.resident_bytes, last_step * MIB);
            assert_eq!((point.allocator_bytes, point.returned[0]), (last_step, last_step));
        }
    }

    /// Between two samples the earlier amounts hold. An earlier time than the last counts as the last.
    #[test]
    fn gaps_repeat_the_previous_point() {
        let mut timeline = Timeline::default();
        timeline.record(Duration::from_millis(5), 7, 3);
        timeline.record(Duration::from_millis(45), 9, 4);
        timeline.record(Duration::ZERO, 8, 2);
        let resident: Vec<u64> = timeline.points().iter().map(|point| point.resident_bytes).collect();
        assert_eq!(resident, [7, 7, 7, 7, 9]);
        // An hour without a sample.
        timeline.record(Duration::from_secs(3600), 1, 0);
        assert!(timeline.points().len() <= MAX_SLOTS && timeline.points().last().unwrap().resident_bytes == 1);
    }

    /// The plot is as wide as the terminal, has the peak, the limit and the time, and a line for each cause.
    #[test]
    fn plots_fit_into_the_line() {
        let mut timeline = Timeline::default();
        assert_eq!(timeline.text(80, Duration::ZERO, None), "");
        for slot in 0..100 {
            timeline.record(Duration::from_millis(10 * slot), if slot < 50 { 100 * MIB } else { 50 * MIB }, 0);
        }
        timeline.record_returned(Duration::from_secs(1), returned(50 * MIB));
        for width in [40, 80, 160] {
            let text = timeline.text(width, Duration::from_secs(1), Some(110 * MIB));
            let plots = text.lines().filter(|line| line.contains(['┤', '└']));
            assert!(plots.clone().count() == PLOT_LINES + 2, "{text}");
            assert!(plots.clone().all(|line| line.chars().count() <= width), "{text}");
            assert!(text.contains("; ╌ limit 110 MiB\n") && text.contains("▂╌"), "{text}");
            assert!(text.contains("1.00 s\n") && text.contains("returned to the system for: age 50 MiB\n"), "{text}");
            let last = text.lines().nth(PLOT_LINES).unwrap();
            assert_eq!(last.matches('█').count(), width - SCALE_WIDTH - 4, "{text}");
        }
        assert!(!timeline.text(80, Duration::ZERO, Some(1 << 40)).contains('╌'), "a limit far above is not shown");
    }

    /// The parts of the time add up to all returned bytes, whatever their number.
    #[test]
    fn returned_parts_add_up() {
        let mut timeline = Timeline::default();
        for slot in 0..300_u64 {
            timeline.record_returned(Duration::from_millis(10 * slot), returned(slot * slot));
        }
        for width in [1, 7, 300, 500] {
            let parts = timeline.returned_in_parts(0, width);
            assert_eq!((parts.len(), parts.iter().sum::<u64>()), (width, 299 * 299));
        }
        assert_eq!(timeline.causes(), [(0, 299 * 299)]);
    }
}
