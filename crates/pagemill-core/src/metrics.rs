//! Counters as text for monitoring systems, in the formats of OpenMetrics and of Prometheus.
//!
//! [`Exposition`] writes families of samples. [`write_process_families`] writes a family for each row of
//! [`TABLE`], so a new counter needs no code here.
//!
//! Uses `stats`. Allocates from the global allocator, so `malloc` must not call it.
//!
//! Sources: OpenMetrics 1.0.0 (openmetrics.io); "Exposition formats" and "Metric and label naming" of prometheus.io.

use crate::stats::{CounterKind, Row, Snapshot, TABLE, Unit};
use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::time::{Duration, SystemTime};

/// The format of the text.
///
/// ```
/// use pagemill::Pagemill;
/// use pagemill::metrics::Format;
///
/// let text = Pagemill::of_process()?.metrics(Format::OpenMetrics);
/// assert!(text.contains("_resident_bytes ") && text.ends_with("# EOF\n"));
/// println!("Content-Type: {}\n\n{text}", Format::OpenMetrics.content_type());
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.0. The text ends with a line `# EOF`, so no other text can follow.
    OpenMetrics,
    /// The text format 0.0.4 of Prometheus, which other text of this format may precede or follow.
    Prometheus,
}

impl Format {
    /// Returns the value of the HTTP header `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// What the samples of a family mean.
///
/// Example: [`Exposition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyKind {
    /// Totals that only grow. The names of the samples end with `_total`.
    Counter,
    /// Current amounts.
    Gauge,
    /// Texts, which are the labels of samples with the value 1. The names of the samples end with `_info`.
    Info,
}

/// The labels of a sample, written as text once for many samples.
///
/// Example: [`Exposition`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels(String);

impl Labels {
    /// Returns labels with these names and values. Names must match `[a-zA-Z_][a-zA-Z0-9_]*`; values can be any text.
    pub fn new(labels: &[(&str, &str)]) -> Self {
        let mut text = String::new();
        for (name, value) in labels {
            let separator = if text.is_empty() { '{' } else { ',' };
            let _ = write!(text, "{separator}{name}=\"{}\"", escaped(value, true));
        }
        if !text.is_empty() {
            text.push('}');
        }
        Self(text)
    }
}

/// Escapes a backslash and a newline, and with `is_quoted` also a quotation mark.
fn escaped(text: &str, is_quoted: bool) -> Cow<'_, str> {
    let is_special = |character| matches!(character, '\\' | '\n') || (is_quoted && character == '"');
    if !text.contains(is_special) {
        return Cow::Borrowed(text);
    }
    let mut result = String::with_capacity(text.len() + 2);
    for character in text.chars() {
        match character {
            '\n' => result.push_str("\\n"),
            special if is_special(special) => result.extend(['\\', special]),
            other => result.push(other),
        }
    }
    Cow::Owned(result)
}

/// The value of a sample.
///
/// Example: [`Exposition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    Integer(u64),
    /// Seconds, with up to nine decimals.
    Seconds(Duration),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(number) => write!(f, "{number}"),
            Self::Seconds(time) if time.subsec_nanos() == 0 => write!(f, "{}", time.as_secs()),
            Self::Seconds(time) => write!(f, "{}.{:09}", time.as_secs(), time.subsec_nanos()),
        }
    }
}

/// The text of a set of metrics. A family is written by [`Exposition::family`], then its samples follow.
///
/// ```
/// use pagemill_core::metrics::{Exposition, FamilyKind, Format, Labels, Value};
///
/// let mut metrics = Exposition::new(Format::OpenMetrics);
/// metrics.family("disk_read_bytes", FamilyKind::Counter, "bytes", "Bytes read from the disk.");
/// metrics.sample(&Labels::new(&[("disk", "sda")]), Value::Integer(4096));
/// let lines: Vec<String> = metrics.finish().lines().map(str::to_owned).collect();
/// assert_eq!(lines[0], "# TYPE disk_read_bytes counter");
/// assert_eq!(lines[2], "# HELP disk_read_bytes Bytes read from the disk.");
/// assert_eq!(lines[3..], ["disk_read_bytes_total{disk=\"sda\"} 4096", "# EOF"]);
/// ```
#[derive(Clone, Debug)]
pub struct Exposition {
    format: Format,
    text: String,
    /// Name of the samples of the current family.
    sample_name: String,
}

impl Exposition {
    pub fn new(format: Format) -> Self {
        Self { format, text: String::new(), sample_name: String::new() }
    }

    /// Begins a family. `name` has neither the suffix `_total` nor `_info`. If `unit` is not empty, the name must end
    /// with `_` and the unit. A name must not be used twice.
    pub fn family(&mut self, name: &str, kind: FamilyKind, unit: &str, help: &str) {
        assert!(unit.is_empty() || name.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_')), "{name}: {unit}");
        let suffix = match kind {
            FamilyKind::Counter => "_total",
            FamilyKind::Gauge => "",
            FamilyKind::Info => "_info",
        };
        self.sample_name.clear();
        self.sample_name.extend([name, suffix]);
        let (kind, is_open) = match (kind, self.format) {
            (FamilyKind::Counter, _) => ("counter", self.format == Format::OpenMetrics),
            (FamilyKind::Info, Format::OpenMetrics) => ("info", true),
            (FamilyKind::Gauge | FamilyKind::Info, _) => ("gauge", self.format == Format::OpenMetrics),
        };
        // Prometheus names a family like its samples, and has no units.
        let described = if is_open { name } else { &self.sample_name };
        let _ = writeln!(self.text, "# TYPE {described} {kind}");
        if is_open && !unit.is_empty() {
            let _ = writeln!(self.text, "# UNIT {described} {unit}");
        }
        let _ = writeln!(self.text, "# HELP {described} {}", escaped(help, is_open));
    }

    /// Writes a sample of the current family. Two samples of a family must have different labels.
    pub fn sample(&mut self, labels: &Labels, value: Value) {
        assert!(!self.sample_name.is_empty(), "a sample needs a family");
        let _ = writeln!(self.text, "{}{} {value}", self.sample_name, labels.0);
    }

    /// Returns the text.
    pub fn finish(mut self) -> String {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

/// Returns the name of the family of a counter, without `_total`, and its unit. Units are base units: bytes, seconds.
pub fn family_name(row: &Row) -> (String, &'static str) {
    let (units, unit) = match row.unit {
        Unit::Bytes => (["bytes", "bytes"], "bytes"),
        Unit::Count => return (format!("pagemill_{}", row.name), ""),
        Unit::Microseconds | Unit::Nanoseconds => (["us", "ns"], "seconds"),
    };
    // The name of a counter may contain its unit: `range_bytes_purged`, `slab_behind_ns`.
    let words = row.name.split('_').filter(|word| !units.contains(word));
    let mut name = words.fold("pagemill".to_owned(), |name, word| name + "_" + word);
    name += if row.kind == CounterKind::Moment { "_timestamp_" } else { "_" };
    (name + unit, unit)
}

/// Writes the families of one or more processes. The labels distinguish the samples of the processes. Writes nothing
/// if there is no process.
///
/// The families are those of all counters, and the gauges `pagemill_giveable_bytes` and `pagemill_net_bytes`.
pub fn write_process_families(metrics: &mut Exposition, processes: &[(Labels, Snapshot)]) {
    if processes.is_empty() {
        return;
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    for row in TABLE {
        let (name, unit) = family_name(row);
        let kind = if row.kind == CounterKind::Sum { FamilyKind::Counter } else { FamilyKind::Gauge };
        metrics.family(&name, kind, unit, row.meaning);
        for (labels, snapshot) in processes {
            metrics.sample(labels, value_of(row, snapshot, now));
        }
    }
    metrics.family(
        "pagemill_giveable_bytes",
        FamilyKind::Gauge,
        "bytes",
        "Memory that could be given back at once, as of the last measurement.",
    );
    processes.iter().for_each(|(labels, snapshot)| metrics.sample(labels, Value::Integer(snapshot.giveable_bytes())));
    metrics.family("pagemill_net_bytes", FamilyKind::Gauge, "bytes", "The part of `resident` that is not giveable.");
    for (labels, snapshot) in processes {
        metrics.sample(labels, Value::Integer(snapshot.memory_amounts().net));
    }
}

/// Returns the value of a counter in its base unit. `now` is the time since the Unix epoch.
fn value_of(row: &Row, snapshot: &Snapshot, now: Duration) -> Value {
    let amount = snapshot.get(row.counter);
    match (row.kind, row.unit) {
        // The time of an event that never happened is 0.
        (CounterKind::Moment, _) => {
            Value::Seconds(snapshot.age().map_or(Duration::ZERO, |age| now.saturating_sub(age)))
        }
        (_, Unit::Microseconds) => Value::Seconds(Duration::from_micros(amount)),
        (_, Unit::Nanoseconds) => Value::Seconds(Duration::from_nanos(amount)),
        (_, Unit::Bytes | Unit::Count) => Value::Integer(amount),
    }
}

/// Writes the family `pagemill_build`, whose label `version` is the version of this crate.
pub fn write_build_info(metrics: &mut Exposition) {
    metrics.family("pagemill_build", FamilyKind::Info, "", "The version of Pagemill that writes these metrics.");
    metrics.sample(&Labels::new(&[("version", env!("CARGO_PKG_VERSION"))]), Value::Integer(1));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::stats::Counter;
    use std::collections::BTreeSet;

    /// Each counter must have a name of its own that ends with its base unit, and contains the unit once.
    #[test]
    fn families_have_distinct_names_with_base_units() {
        let names: BTreeSet<String> = TABLE.iter().map(|row| family_name(row).0).collect();
        assert_eq!(names.len(), TABLE.len());
        let name = |counter: Counter| family_name(&TABLE[counter as usize]).0;
        assert_eq!(name(Counter::Resident), "pagemill_resident_bytes");
        assert_eq!(name(Counter::RangeBytesPurged), "pagemill_range_purged_bytes");
        assert_eq!(name(Counter::RangesBytes), "pagemill_ranges_bytes");
        assert_eq!(name(Counter::WritersThrottled), "pagemill_writers_throttled");
        assert_eq!(name(Counter::WritersThrottledUs), "pagemill_writers_throttled_seconds");
        assert_eq!(name(Counter::SlabBehindNs), "pagemill_slab_behind_seconds");
        assert_eq!(name(Counter::MeasuredAt), "pagemill_measured_at_timestamp_seconds");
        for name in names {
            assert!(name.matches("bytes").count() + name.matches("seconds").count() <= 1, "{name}");
            assert!(
                !["_total", "_info", "_count", "_sum", "_bucket", "_created"].iter().any(|end| name.ends_with(end))
            );
        }
    }

    /// Labels and help texts with special characters must be escaped as each format requires. Times must be written in
    /// seconds.
    #[test]
    fn special_characters_are_escaped() {
        let labels = Labels::new(&[("comm", "a\\b\"c\nd"), ("pid", "7")]);
        let text = |format| {
            let mut metrics = Exposition::new(format);
            metrics.family("x_seconds", FamilyKind::Counter, "seconds", "A \"time\" \\ of\nwork.");
            metrics.sample(&labels, Value::Seconds(Duration::from_nanos(1_000_000_020)));
            metrics.finish()
        };
        let sample = "x_seconds_total{comm=\"a\\\\b\\\"c\\nd\",pid=\"7\"} 1.000000020\n";
        let open =
            "# TYPE x_seconds counter\n# UNIT x_seconds seconds\n# HELP x_seconds A \\\"time\\\" \\\\ of\\nwork.\n";
        assert_eq!(text(Format::OpenMetrics), format!("{open}{sample}# EOF\n"));
        let plain = "# TYPE x_seconds_total counter\n# HELP x_seconds_total A \"time\" \\\\ of\\nwork.\n";
        assert_eq!(text(Format::Prometheus), format!("{plain}{sample}"));
        assert_eq!(Labels::new(&[]), Labels::default());
    }

    /// Values that another process published may be impossible. They must be written without an overflow.
    #[test]
    fn impossible_values_are_written() {
        let mut snapshot = Snapshot::default();
        TABLE.iter().for_each(|row| snapshot.set(row.counter, u64::MAX));
        let mut metrics = Exposition::new(Format::OpenMetrics);
        write_process_families(&mut metrics, &[(Labels::default(), snapshot)]);
        assert!(metrics.finish().contains("\npagemill_resident_bytes 18446744073709551615\n"));
    }
}
