//! Tables without lines between their cells, as `ps` prints them.

use comfy_table::{CellAlignment, Table, presets};
use pagemill_core::units::Bytes;

/// Line width in columns if no terminal reports its width.
pub const DEFAULT_LINE_COLUMNS: usize = 80;

/// Returns a number of bytes in at most five characters: `512M`, `1.5G`, `1023K`. The units are powers of 1024.
pub fn short_bytes(bytes: u64) -> String {
    let exact = Bytes(bytes).to_string();
    let Some((number, unit)) = exact.split_once(' ') else { return exact };
    // A number with more than four characters loses its decimal places.
    let number = if number.len() > 4 { number.split('.').next().unwrap_or(number) } else { number };
    format!("{number}{}", unit.trim_end_matches(['i', 'B']))
}

/// A column of a table: its title, its minimum width, the number of spaces before it, and its alignment.
pub struct Heading<'a> {
    title: &'a str,
    min_width: usize,
    gap: u16,
    alignment: CellAlignment,
}

impl<'a> Heading<'a> {
    /// Creates a column of names or words, whose cells are aligned to the left.
    pub fn left_aligned(title: &'a str, min_width: usize, gap: u16) -> Self {
        Self { title, min_width, gap, alignment: CellAlignment::Left }
    }

    /// Creates a column of numbers, whose cells are aligned to the right.
    pub fn right_aligned(title: &'a str, min_width: usize, gap: u16) -> Self {
        Self { title, min_width, gap, alignment: CellAlignment::Right }
    }
}

/// Returns a table as text: a line with the titles, and a line for each row. A row may have fewer cells than there are
/// columns.
pub fn aligned_table(headings: &[Heading<'_>], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    // A title has the smallest width of its column, so that the column is at least as wide.
    table.set_header(headings.iter().map(|heading| match heading.alignment {
        CellAlignment::Right => format!("{:>width$}", heading.title, width = heading.min_width),
        _ => format!("{:<width$}", heading.title, width = heading.min_width),
    }));
    table.add_rows(rows.into_iter().inspect(|row| assert!(row.len() <= headings.len(), "cells without a column")));
    for (column, heading) in table.column_iter_mut().zip(headings) {
        column.set_padding((heading.gap, 0)).set_cell_alignment(heading.alignment);
    }
    table.trim_fmt() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names must be aligned to the left and numbers to the right. A column must have at least its minimum width. A
    /// line must not end with spaces.
    #[test]
    fn cells_are_aligned() {
        let headings = [
            Heading::right_aligned("PID", 8, 0),
            Heading::left_aligned("NAME", 0, 1),
            Heading::right_aligned("RSS", 6, 1),
        ];
        let headings = headings.into_iter().chain([Heading::left_aligned("", 0, 2)]).collect::<Vec<_>>();
        let rows = [vec!["7", "redis", "1 MiB", "late"], vec!["", "all 1", "1 MiB"]];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect());

        let expected = "     PID NAME     RSS\n       7 redis  1 MiB  late\n         all 1  1 MiB\n";
        assert_eq!(aligned_table(&headings, rows), expected);
        assert_eq!(aligned_table(&headings[..2], []), "     PID NAME\n");
    }
}
