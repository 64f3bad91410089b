//! `pagemill doctor`: shows which features Pagemill can use with this kernel and these privileges. For each missing
//! feature, shows the effect and the fix.
//!
//! Prints the table of [`pagemill_sys::probe`] as text or as one JSON object.

use crate::running::{self, GovernorRow};
use pagemill_sys::probe::{self, Availability, Report, Row};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::process::ExitCode;

/// Line width in columns if the terminal does not report its width.
const DEFAULT_LINE_COLUMNS: usize = 100;
/// Minimum line width in columns, even on a narrower terminal.
const MIN_LINE_COLUMNS: usize = 60;
/// Column in which the feature names begin, after the word for the state.
const NAME_COLUMN: usize = 11;
/// Indentation, in columns, of a fix command that does not fit on the line of its label.
const COMMAND_COLUMN: usize = 4;

/// The features that the summary line names: the text for a feature, and the key of the table row whose state is shown.
const SUMMARY_FEATURES: &[(&str, &str)] = &[
    ("huge pages", "huge_page"),
    ("realloc moves pages", "uffd_move"),
    ("free pages are returned in batches", "process_madvise"),
    ("limits of containers are found", "cgroup"),
    ("pressure events", "psi"),
    ("direct I/O through rings", "io_uring"),
];

/// Probes every feature and prints the results. The exit status is 0 if Pagemill works here, 2 if not, and 1 if
/// printing fails.
pub fn doctor(json: bool) -> ExitCode {
    let report = probe::probe();
    let governor_rows = running::governor_rows();
    let text = if json {
        report_json(&report, &governor_rows)
    } else {
        let is_terminal = io::stdout().is_terminal();
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let columns = terminal_size::terminal_size().map_or(DEFAULT_LINE_COLUMNS, |(width, _)| width.0.into());
        let style =
            Style { columns: columns.max(MIN_LINE_COLUMNS), is_coloured: is_terminal && !no_colour && !is_dumb };
        report_table(&report, &governor_rows, style)
    };
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        // The reader may close the pipe early.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("pagemill doctor: cannot write: {error}");
            return ExitCode::FAILURE;
        }
        _ => {}
    }
    if report.is_supported() { ExitCode::SUCCESS } else { ExitCode::from(2) }
}

/// How the table is formatted.
#[derive(Clone, Copy)]
struct Style {
    columns: usize,
    is_coloured: bool,
}

impl Style {
    /// Returns `text` with the escape sequences of a colour, if colours are enabled. `colour` is an SGR parameter.
    fn paint(self, colour: &str, text: &str) -> String {
        if self.is_coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_string() }
    }
}

fn word_and_colour(state: Availability) -> (&'static str, &'static str) {
    match state {
        Availability::Available => ("ok", "32"),
        Availability::Limited => ("limited", "33"),
        Availability::Missing => ("missing", "31"),
        Availability::Unknown => ("unknown", "35"),
    }
}

/// A row of the table, from a probed feature or from a running process.
struct ReportLine<'text> {
    name: &'text str,
    state: Availability,
    found: &'text str,
    needed_for: &'text str,
    lost: &'text str,
    fix: Option<&'text str>,
}

impl<'text> From<&'text Row> for ReportLine<'text> {
    fn from(row: &'text Row) -> Self {
        let feature = row.feature;
        Self {
            name: feature.name,
            state: row.state,
            found: &row.found,
            needed_for: feature.needed_for,
            lost: feature.lost,
            fix: row.fix.as_deref(),
        }
    }
}

impl<'text> From<&'text GovernorRow> for ReportLine<'text> {
    fn from(row: &'text GovernorRow) -> Self {
        let GovernorRow { name, state, found, lost, .. } = row;
        Self { name, state: *state, found, needed_for: "", lost, fix: None }
    }
}

fn report_table(report: &Report, governor_rows: &[GovernorRow], style: Style) -> String {
    let name_columns = report.rows.iter().map(|row| row.feature.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    let mut group = None;
    for row in &report.rows {
        if group.replace(row.feature.group) != Some(row.feature.group) {
            let gap = if text.is_empty() { "" } else { "\n" };
            let _ = writeln!(text, "{gap}{}", style.paint("1", row.feature.group.title()));
        }
        write_line(&mut text, &row.into(), name_columns, style);
    }
    if !governor_rows.is_empty() {
        let _ = writeln!(text, "\n{}", style.paint("1", "Running now"));
    }
    for row in governor_rows {
        write_line(&mut text, &row.into(), name_columns, style);
    }
    let _ = write!(text, "\n{}", wrap_hanging(&summary_line(report), 0, style.columns));
    text
}

fn write_line(text: &mut String, row: &ReportLine<'_>, name_columns: usize, style: Style) {
    let (word, colour) = word_and_colour(row.state);
    let found = wrap_hanging(row.found, NAME_COLUMN + name_columns + 2, style.columns);
    let state_word = style.paint(colour, &format!("{word:<7}"));
    let _ = write!(text, "  {state_word}  {:<name_columns$}  {found}", row.name);
    if row.state == Availability::Available {
        return;
    }
    // If a feature could not be probed, it may be present. So the line says what the feature is needed for, not what is
    // lost.
    let (label, text_below) = match row.state {
        Availability::Unknown => ("    for", row.needed_for),
        _ => ("   lost", row.lost),
    };
    let _ = write!(text, "  {}  {}", style.paint("2", label), wrap_hanging(text_below, NAME_COLUMN, style.columns));
    if let Some(fix) = row.fix {
        // A fix command must be copied as a whole, so it is never wrapped.
        let is_wide = NAME_COLUMN + fix.chars().count() > style.columns;
        let gap = if is_wide { format!("\n{:COMMAND_COLUMN$}", "") } else { "  ".to_string() };
        let _ = writeln!(text, "  {}{gap}{}", style.paint("2", "    fix"), style.paint("36", fix));
    }
}

/// Breaks `text` into lines of at most `columns` columns. Indents all lines except the first by `indent` columns. The
/// caller must already have printed `indent` columns on the first line.
fn wrap_hanging(text: &str, indent: usize, columns: usize) -> String {
    let mut wrapped = String::new();
    let mut at = indent;
    for word in text.split(' ') {
        let len = word.chars().count();
        if at > indent && at + 1 + len > columns {
            let _ = write!(wrapped, "\n{:indent$}", "");
            at = indent;
        }
        if at > indent {
            wrapped.push(' ');
            at += 1;
        }
        wrapped.push_str(word);
        at += len;
    }
    wrapped.push('\n');
    wrapped
}

/// Returns the summary line: whether Pagemill works here, the state of the main features, and the number of rows that
/// are not ok.
fn summary_line(report: &Report) -> String {
    if !report.is_supported() {
        let reasons: Vec<_> = report
            .rows
            .iter()
            .filter(|row| row.state == Availability::Missing && probe::is_required(row.feature.key))
            .map(|row| format!("{} ({})", row.feature.name, row.found))
            .collect();
        return format!("Pagemill does not work here: {}.", reasons.join(", "));
    }
    let answers: Vec<_> = SUMMARY_FEATURES
        .iter()
        .filter_map(|(question, key)| {
            let answer = match report.row(key)?.state {
                Availability::Available => "yes",
                Availability::Limited => "in part",
                Availability::Missing => "no",
                Availability::Unknown => "unknown",
            };
            Some(format!("{question}: {answer}"))
        })
        .collect();
    let rest = match report.lacking_count() {
        0 => format!("all {} rows are ok", report.rows.len()),
        1 => format!("1 of {} rows is not ok", report.rows.len()),
        count => format!("{count} of {} rows are not ok", report.rows.len()),
    };
    format!("Pagemill works here. {}; {rest}.", capitalised(&answers.join("; ")))
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[derive(Serialize)]
struct JsonReport<'report> {
    kernel: &'report str,
    supported: bool,
    rows: Vec<JsonFeature<'report>>,
    /// Rows about this user's running processes: the failures and fallbacks that they have counted. Empty if no process
    /// publishes statistics.
    running: Vec<JsonGovernorRow<'report>>,
    verdict: String,
}

#[derive(Serialize)]
struct JsonGovernorRow<'report> {
    key: &'report str,
    name: &'report str,
    state: &'report str,
    found: &'report str,
    lost: &'report str,
}

#[derive(Serialize)]
struct JsonFeature<'report> {
    key: &'report str,
    group: &'report str,
    name: &'report str,
    state: &'report str,
    found: &'report str,
    /// First kernel version that has the feature. Null if every kernel has it.
    since: Option<&'report str>,
    needed_for: &'report str,
    lost: &'report str,
    /// The command or advice that makes the feature available. Null if no fix is needed or none exists.
    fix: Option<&'report str>,
}

fn report_json(report: &Report, governor_rows: &[GovernorRow]) -> String {
    let running = governor_rows.iter().map(|row| JsonGovernorRow {
        key: row.key,
        name: row.name,
        state: row.state.keyword(),
        found: &row.found,
        lost: row.lost,
    });
    let rows = report.rows.iter().map(|row| {
        let feature = row.feature;
        JsonFeature {
            key: feature.key,
            group: feature.group.keyword(),
            name: feature.name,
            state: row.state.keyword(),
            found: &row.found,
            since: (!feature.since.is_empty()).then_some(feature.since),
            needed_for: feature.needed_for,
            lost: feature.lost,
            fix: row.fix.as_deref(),
        }
    });
    let object = JsonReport {
        kernel: &report.kernel,
        supported: report.is_supported(),
        rows: rows.collect(),
        running: running.collect(),
        verdict: summary_line(report),
    };
    // The object has only texts and booleans, so serialization cannot fail.
    format!("{}\n", serde_json::to_string(&object).expect("plain data"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const PLAIN_STYLE: Style = Style { columns: 80, is_coloured: false };

    /// Returns a report in which the four states occur in turn.
    fn report_with_all_states() -> Report {
        let states = [Availability::Available, Availability::Limited, Availability::Missing, Availability::Unknown];
        let rows = probe::table().zip(states.into_iter().cycle()).map(|(feature, state)| Row {
            feature,
            state,
            found: "a fact that is long enough to need more than one line of a table".to_string(),
            fix: (state != Availability::Available).then(|| "echo 1 | sudo tee /proc/sys/vm/something".to_string()),
        });
        Report { kernel: "6.18.0".to_string(), rows: rows.collect() }
    }

    /// The features of this machine are rendered as JSON. The output must be one object on one line, and the keys of
    /// its rows must be unique. The words for the states must be those on which scripts rely.
    #[test]
    fn json_is_one_object() {
        let text = report_json(&probe::probe(), &[]);
        assert_eq!(text.lines().count(), 1);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(value["kernel"].is_string() && value["verdict"].is_string());
        let rows = value["rows"].as_array().unwrap();
        let keys: BTreeSet<_> = rows.iter().map(|row| row["key"].as_str().unwrap()).collect();
        assert_eq!(keys.len(), rows.len());
        for row in rows {
            assert!(["available", "limited", "missing", "unknown"].contains(&row["state"].as_str().unwrap()));
            for key in ["group", "found", "needed_for", "lost"] {
                assert!(!row[key].as_str().unwrap().is_empty(), "{key} of {row}");
            }
            assert!(row["fix"].is_null() || row["state"] != "available", "{row}");
        }
    }

    /// Every line of the table must fit the given width. Without colour, the table must have no escape sequences.
    #[test]
    fn lines_fit_the_terminal() {
        for columns in [MIN_LINE_COLUMNS, 80, 100, 120, 200] {
            let text = report_table(&report_with_all_states(), &[], Style { columns, ..PLAIN_STYLE });
            for line in text.lines() {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
                assert_eq!(line, line.trim_end(), "{columns}");
            }
            assert!(!text.contains('\x1b'));
        }
    }

    /// Without its escape sequences, the coloured table must equal the plain table.
    #[test]
    fn colour_adds_escapes_only() {
        let report = report_with_all_states();
        let coloured = report_table(&report, &[], Style { is_coloured: true, ..PLAIN_STYLE });
        let mut plain = String::new();
        let mut parts = coloured.split('\x1b');
        plain.push_str(parts.next().unwrap());
        parts.for_each(|piece| plain.push_str(piece.split_once('m').unwrap().1));
        assert_eq!(plain, report_table(&report, &[], PLAIN_STYLE));
    }

    /// In the table, rows that are not ok must have a line with the effect and a line with the fix. Rows that are ok
    /// must have neither.
    #[test]
    fn only_rows_that_are_not_ok_have_advice() {
        let mut report = report_with_all_states();
        report.rows.truncate(4); // one row with each state: ok, limited, missing, unknown
        let text = report_table(&report, &[], PLAIN_STYLE);
        let count = |label: &str| text.lines().filter(|line| line.trim_start().starts_with(label)).count();
        assert_eq!((count("lost "), count("for "), count("fix ")), (2, 1, 3), "{text}");
    }

    #[test]
    fn the_summary_names_the_missing_feature() {
        let mut report = report_with_all_states();
        for row in &mut report.rows {
            row.state = Availability::Available;
        }
        assert!(summary_line(&report).starts_with("Pagemill works here. Huge pages: yes; "));
        assert!(summary_line(&report).contains(" rows are ok."));
        report.rows[0].state = Availability::Missing;
        report.rows[0].found = "5.4.0".to_string();
        assert_eq!(summary_line(&report), "Pagemill does not work here: Linux release (5.4.0).");
    }
}
