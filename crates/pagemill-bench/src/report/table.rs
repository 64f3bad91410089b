//! The tables of a report: rows that share a title, by line and column.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};

use super::{FAILED_ROUNDS, KILLED_ROUNDS, Report, Row};

/// A row of a table, and the line and the column in which its value stands.
#[derive(Clone, Copy, Debug)]
pub struct PlacedRow<'a> {
    pub line: &'a str,
    pub column: &'a str,
    pub row: &'a Row,
}

/// All rows that share the title of a table, in the order in which they were added.
#[derive(Clone, Debug)]
pub struct TableView<'a> {
    pub title: &'a str,
    /// Names of the lines in the order of their first rows.
    pub lines: Vec<&'a str>,
    /// Names of the columns in the order of their first rows.
    pub columns: Vec<&'a str>,
    pub rows: Vec<PlacedRow<'a>>,
}

impl<'a> TableView<'a> {
    /// Returns the tables of a report in the order of their first rows.
    pub fn all(report: &'a Report) -> Vec<Self> {
        let rows_with_cells = || report.rows.iter().filter_map(|row| Some((row, row.cell.as_ref()?)));
        let titles = unique_names(rows_with_cells().map(|(_, cell)| cell.table.as_str()));
        let of_title = |title| {
            let is_transposed = report.transposed.iter().any(|transposed| transposed == title);
            let rows = rows_with_cells().filter(|(_, cell)| cell.table == title);
            let rows: Vec<_> = rows
                .map(|(row, cell)| match is_transposed {
                    true => PlacedRow { line: &cell.column, column: &row.subject, row },
                    false => PlacedRow { line: &row.subject, column: &cell.column, row },
                })
                .collect();
            let lines = unique_names(rows.iter().map(|row| row.line));
            let columns = unique_names(rows.iter().map(|row| row.column));
            Self { title, lines, columns, rows }
        };
        titles.into_iter().map(of_title).collect()
    }

    /// Returns the text of a cell: the values of all rows that stand there, separated by commas.
    pub fn cell_text(&self, line: &str, column: &str) -> String {
        let of_cell = self.rows.iter().filter(|row| (row.line, row.column) == (line, column));
        of_cell.map(|placed| format_cell(placed.row)).collect::<Vec<_>>().join(", ")
    }

    /// Renders the title and the table as text.
    pub fn text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header([""].into_iter().chain(self.columns.iter().copied()));
        for line in &self.lines {
            let cells = self.columns.iter().map(|column| self.cell_text(line, column));
            table.add_row([(*line).to_owned()].into_iter().chain(cells));
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        format!("{}\n{table}\n\n", self.title)
    }
}

fn format_cell(row: &Row) -> String {
    if row.is_lost_rounds() {
        return format!("{} {}/{}", row.metric, row.value, row.samples);
    }
    let mut text = format_number(row.value);
    if row.samples > 1 {
        let _ = write!(text, " ±{:.0}%", row.spread * 50.0);
    }
    if let Some(ratio) = row.ratio {
        let _ = write!(text, " {ratio:.2}x");
    }
    text
}

/// Formats a number with about three significant digits.
pub fn format_number(value: f64) -> String {
    match value.abs() {
        size if size >= 100_000.0 => format!("{:.0}k", value / 1000.0),
        size if size >= 10_000.0 => format!("{:.1}k", value / 1000.0),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Returns the names without repetitions, in the order of their first occurrence.
pub fn unique_names<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

impl Row {
    /// Returns whether the row counts killed or failed rounds instead of a measured value.
    pub fn is_lost_rounds(&self) -> bool {
        matches!(self.metric, KILLED_ROUNDS | FAILED_ROUNDS)
    }
}
