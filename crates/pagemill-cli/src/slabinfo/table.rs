//! The table of slab caches. It has one row for each cache, with the columns of Linux's `slabinfo`, and sums below the
//! rows.

use crate::columns::{DEFAULT_LINE_COLUMNS, short_bytes};
use pagemill_core::units::{Bytes, os_page_bytes};
use pagemill_slab::{SlabInfo, SlabKind};
use std::fmt::Write as _;
use std::io::IsTerminal;

/// Sums over several slab caches. The values come from another process and may be impossible, so additions saturate.
#[derive(Default)]
pub struct Totals {
    pub objects: u64,
    /// Bytes of all objects in use.
    pub in_use_bytes: u64,
    pub resident: u64,
    pub slabs: u64,
    pub partial: u64,
    pub handles: u64,
}

impl Totals {
    pub fn of(caches: &[&SlabInfo]) -> Self {
        let sum = |of: &dyn Fn(&SlabInfo) -> u64| caches.iter().fold(0_u64, |sum, info| sum.saturating_add(of(info)));
        Self {
            objects: sum(&|info| info.active),
            in_use_bytes: sum(&in_use_bytes),
            resident: sum(&|info| info.total.resident_bytes),
            slabs: sum(&|info| u64::from(info.total.slabs)),
            partial: sum(&|info| u64::from(info.total.partial)),
            handles: sum(&|info| info.handle_bytes),
        }
    }
}

pub fn in_use_bytes(info: &SlabInfo) -> u64 {
    info.active.saturating_mul(info.object_bytes as u64)
}

/// Returns `part` in percent of `whole`; `None` if `whole` is 0.
pub fn percent(part: u64, whole: u64) -> Option<u64> {
    let percent = u128::from(part) * 100 / u128::from(whole).max(1);
    (whole > 0).then(|| u64::try_from(percent).unwrap_or(u64::MAX))
}

fn percent_text(percent: Option<u64>) -> String {
    percent.map_or_else(|| "-".to_owned(), |percent| percent.to_string())
}

/// Returns the order of the cache's slabs: a slab has 2^order OS pages.
pub fn order(info: &SlabInfo) -> u32 {
    (info.slab_bytes / os_page_bytes()).checked_ilog2().unwrap_or(0)
}

pub fn flag_letters(info: &SlabInfo) -> String {
    let flags = [
        ('M', info.kind != SlabKind::Fixed),
        ('C', info.has_constructor),
        ('D', info.is_debug),
        ('L', info.total.lost > 0),
        ('F', info.is_given_up),
        ('P', info.is_partial),
    ];
    flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).collect()
}

/// How a table of slab caches is formatted.
#[derive(Clone, Copy, Default)]
pub struct Style {
    /// Whether numbers have all digits, and units are not abbreviated.
    pub is_exact: bool,
    /// Maximum width of a row in columns. A cache name that does not fit is truncated. With `None`, no name is
    /// truncated.
    pub max_columns: Option<usize>,
}

impl Style {
    /// Returns the style for standard output. Names are truncated only if standard output is a terminal.
    pub fn of_output(is_exact: bool) -> Self {
        let is_terminal = std::io::stdout().is_terminal() && !is_exact;
        let columns = || terminal_size::terminal_size().map_or(DEFAULT_LINE_COLUMNS, |(width, _)| width.0.into());
        Self { is_exact, max_columns: is_terminal.then(columns) }
    }

    fn bytes(self, bytes: u64) -> String {
        if self.is_exact { Bytes(bytes).to_string() } else { short_bytes(bytes) }
    }

    /// Formats a number with at most `digits` digits, in thousands (K), millions (M) and so on.
    fn count(self, count: u64, digits: usize) -> String {
        const UNITS: [&str; 6] = ["K", "M", "G", "T", "P", "E"];
        let exact = count.to_string();
        if self.is_exact || exact.len() <= digits {
            return exact;
        }
        let thousands = (exact.len() - digits + 1).div_ceil(3);
        assert!(3 * thousands < exact.len(), "a digit stays");
        exact[..exact.len() - 3 * thousands].to_owned() + UNITS[thousands - 1]
    }
}

/// Minimum length of a truncated cache name.
const MIN_NAME_LEN: usize = 8;

const COLUMN_TITLES: [&str; 10] =
    ["NAME", "OBJECTS", "OBJSIZE", "SPACE", "SLABS/PART/EMPTY", "O/S", "O", "%FR", "%EF", "FLG"];

fn table_row(info: &SlabInfo, style: Style) -> [String; COLUMN_TITLES.len()] {
    let total = &info.total;
    let slabs = [total.slabs, total.partial, total.empty].map(|count| style.count(count.into(), 5));
    [
        info.name.to_string(),
        style.count(info.active, 8),
        style.bytes(info.object_bytes as u64),
        style.bytes(total.resident_bytes),
        slabs.join("/"),
        info.objects_per_slab.to_string(),
        order(info).to_string(),
        percent_text(percent(u64::from(total.partial), u64::from(total.slabs))),
        percent_text(percent(in_use_bytes(info), total.resident_bytes)),
        flag_letters(info),
    ]
}

fn truncated_name(name: &str, most: usize) -> String {
    if name.chars().count() <= most { name.to_owned() } else { name.chars().take(most - 1).collect::<String>() + "…" }
}

pub fn text_of(caches: &[&SlabInfo], style: Style) -> String {
    if caches.is_empty() {
        return "  no slab caches\n".to_owned();
    }
    let mut rows = vec![COLUMN_TITLES.map(str::to_owned).to_vec()];
    rows.extend(caches.iter().map(|info| table_row(info, style).to_vec()));
    aligned_rows(&rows, style, false) + &sums_text(caches)
}

/// Returns rows as text with aligned cells, indented by two spaces. The first row has the titles of all columns. The
/// first column is aligned to the left, and the others to the right. The last column is aligned to the right only if
/// `is_last_right_aligned`. In a row with fewer cells than titles, the last cell is not aligned.
pub fn aligned_rows(rows: &[Vec<String>], style: Style, is_last_right_aligned: bool) -> String {
    let count = rows.first().map_or(0, Vec::len);
    assert!(rows.iter().all(|row| (1..=count).contains(&row.len())), "cells without a column");
    let width_of = |column: usize| {
        let is_aligned = |row: &&Vec<String>| row.len() == count || column == 0;
        rows.iter().filter(is_aligned).map(|row| row[column].chars().count()).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> = (0..count).map(width_of).collect();
    if let Some(most) = style.max_columns {
        // There are two spaces before the first column, and one space before each other column.
        let others = widths[1..].iter().map(|width| width + 1).sum::<usize>() + 2;
        widths[0] = widths[0].min(most.saturating_sub(others).max(MIN_NAME_LEN));
    }
    let mut text = String::new();
    for row in rows {
        let mut line = format!("  {:<width$}", truncated_name(&row[0], widths[0]), width = widths[0]);
        for (column, cell) in row.iter().enumerate().skip(1) {
            let is_unaligned = column + 1 == row.len() && (row.len() < count || !is_last_right_aligned);
            let width = if is_unaligned { 0 } else { widths[column] };
            let _ = write!(line, " {cell:>width$}");
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn sums_text(caches: &[&SlabInfo]) -> String {
    let totals = Totals::of(caches);
    let count = if caches.len() == 1 { "1 cache".to_owned() } else { format!("{} caches", caches.len()) };
    let mut text = format!(
        "  {count}: {} objects, {} in use of {} resident ({} %)\n  {} slabs, {} in part",
        totals.objects,
        Bytes(totals.in_use_bytes),
        Bytes(totals.resident),
        percent_text(percent(totals.in_use_bytes, totals.resident)),
        totals.slabs,
        totals.partial
    );
    if totals.handles > 0 {
        let _ = write!(text, "; handles {}", Bytes(totals.handles));
    }
    text.push('\n');
    if caches.iter().any(|info| info.is_partial) {
        text.push_str("  P: not all is counted: a node was locked for too long to be examined\n");
    }
    if caches.iter().any(|info| info.is_given_up) {
        text.push_str("  F: not defragmented in the background, since a callback failed: see `-r NAME`\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::example_info;
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    /// The table must have a row for each slab cache with the columns of Linux's `slabinfo`, and the sums below the
    /// rows. With `is_exact`, the table must show all digits.
    #[test]
    fn a_table_has_rows_and_sums() {
        let (owner, handle) = (example_info("nodes", SlabKind::ByOwner), example_info("entries", SlabKind::ByHandle));
        let handle = SlabInfo { is_given_up: true, ..handle };
        let mut fixed = SlabInfo { is_partial: true, ..example_info("boxes", SlabKind::Fixed) };
        fixed.total = pagemill_slab::NodeInfo::default();
        fixed.active = 0;
        let order = ((64 << 10) / os_page_bytes()).ilog2();
        let text = text_of(&[&owner, &handle, &fixed], Style::default());
        let lines = lines(&text);
        assert_eq!(lines[0], COLUMN_TITLES.join(" "));
        assert_eq!(lines[1], format!("nodes 1000 192 256K 4/1/0 341 {order} 25 73 MCL"));
        assert_eq!(lines[2], format!("entries 1000 192 256K 4/1/0 341 {order} 25 73 MLF"));
        assert_eq!(lines[3], format!("boxes 0 192 0 0/0/0 341 {order} - - P"));
        assert_eq!(lines[4], "3 caches: 2000 objects, 375 KiB in use of 512 KiB resident (73 %)");
        assert_eq!(lines[5], "8 slabs, 2 in part; handles 8 KiB");
        assert!(lines[6].starts_with("P: ") && lines[7].starts_with("F: ") && lines.len() == 8, "{text}");
        assert_eq!(text_of(&[], Style::default()), "  no slab caches\n");
        let exact = text_of(&[&owner], Style { is_exact: true, ..Style::default() });
        let expected = format!("nodes 1000 192 B 256 KiB 4/1/0 341 {order} 25 73 MCL");
        assert_eq!(super::tests::lines(&exact)[1], expected);
    }

    /// Usual names and numbers must fit into 80 columns. Long names must be truncated to the maximum width, but not
    /// below the minimum length.
    #[test]
    fn long_names_are_truncated_to_the_width() {
        let mut large = example_info("directory_entries", SlabKind::ByOwner);
        (large.active, large.object_bytes, large.objects_per_slab) = (12_345_678, 4096, 1024);
        large.total.resident_bytes = 123 << 30;
        (large.total.slabs, large.total.partial, large.total.empty) = (98_765, 4321, 10);
        let small = example_info("x", SlabKind::Fixed);
        let widest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        let text = text_of(&[&large, &small], Style::default());
        assert!(widest(&text) <= 80 && lines(&text)[1].contains(" 12345678 4K 123G 98765/4321/10 "), "{text}");
        large.name = "n".repeat(64).into();
        let text = text_of(&[&large, &small], Style { max_columns: Some(80), ..Style::default() });
        assert!(widest(&text) == 80 && text.contains("nnn… "), "{text}");
        let narrow = text_of(&[&large, &small], Style { max_columns: Some(10), ..Style::default() });
        assert!(lines(&narrow)[1].starts_with("nnnnnnn… 12345678"), "{narrow}");
        assert!(text_of(&[&large], Style::default()).contains(&*large.name));
    }

    /// A number must be exact up to the maximum number of digits. A larger number must have at most four digits and a
    /// unit.
    #[test]
    fn numbers_are_short() {
        let short = Style::default();
        let bytes = [0, 1023, 1024, 1536, 102_400, 104_755, 1_048_575, u64::MAX].map(|bytes| short.bytes(bytes));
        assert_eq!(bytes, ["0", "1023", "1K", "1.5K", "100K", "102K", "1023K", "15.9E"]);
        let counts = [99_999, 100_000, 9_999_999, 10_000_000, u64::MAX].map(|count| short.count(count, 5));
        assert_eq!(counts, ["99999", "100K", "9999K", "10M", "18E"]);
    }

    /// A row has fewer cells than the title row. Its last cell must be unaligned, and must not widen its column.
    #[test]
    fn the_last_cell_of_a_short_row_is_unaligned() {
        let rows = [vec!["NAME", "A", "B"], vec!["long_name", "10", "20"], vec!["x", "a long sentence"]];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect());
        let text = aligned_rows(&rows, Style::default(), true);
        assert_eq!(text, "  NAME       A  B\n  long_name 10 20\n  x         a long sentence\n");
    }

    /// Slab caches report impossible values. The table must be printed without an overflow.
    #[test]
    fn impossible_values_do_not_overflow() {
        let mut impossible = example_info("x", SlabKind::Fixed);
        (impossible.active, impossible.object_bytes, impossible.total.resident_bytes) = (u64::MAX, usize::MAX, 1);
        impossible.slab_bytes = 1;
        impossible.total.slabs = u32::MAX;
        for is_exact in [false, true] {
            let text = text_of(&[&impossible, &impossible], Style { is_exact, max_columns: Some(0) });
            assert!(text.contains("2 caches"), "{text}");
        }
    }
}
