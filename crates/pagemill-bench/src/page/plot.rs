//! The plots of a table: which rows become which points.
//!
//! Columns that are numbers, such as threads or sizes, become the x axis of lines, one line for each subject. Subjects
//! that differ only in a page size also become lines, one plot for each column. All other tables become bars, one plot
//! for each column. Error bars are half of the spread on each side, as in the tables.

use pagemill_core::units::parse_bytes;

use super::RATIO_UNIT;
use crate::report::{ORIGINAL_SUBJECTS, OriginalCurve, Row, TableView, unique_names};

/// Number of different x values from which lines are drawn instead of bars.
const MIN_X_VALUES: usize = 3;

/// A value in a plot, with the ends of its error bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Position on the x axis; zero in bars.
    pub x: f64,
    /// The x value as text.
    pub x_text: String,
    pub y: f64,
    pub low: f64,
    pub high: f64,
}

/// The points of one subject.
#[derive(Clone, Debug)]
pub struct PlotSeries {
    pub name: String,
    /// Position of the subject among those of the table, Pagemill's subjects first. It chooses the colour.
    pub color: usize,
    /// Whether the subject is Pagemill.
    pub is_own: bool,
    /// Whether the subject is a published result of an original experiment.
    pub is_original: bool,
    pub points: Vec<Point>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Lines,
    Bars,
}

#[derive(Clone, Debug)]
pub struct Plot {
    pub title: String,
    pub shape: Shape,
    /// Title of the x axis; empty in bars.
    pub x_title: String,
    pub unit: String,
    pub series: Vec<PlotSeries>,
}

/// A number in the name of a column or of a subject, and the rest of the name.
#[derive(Clone, Debug, PartialEq)]
struct Number {
    value: f64,
    text: String,
    /// The name without the number and its unit of bytes.
    rest: String,
}

/// The subjects of a table, Pagemill's first.
struct Subjects<'a> {
    names: Vec<&'a str>,
    own_count: usize,
}

impl Subjects<'_> {
    /// Returns a series without points. `name` is the subject, or the start that several subjects have in common.
    fn series(&self, subject: &str, name: &str) -> PlotSeries {
        let color = self.names.iter().position(|known| *known == subject).unwrap_or_default();
        let is_original = subject.starts_with(ORIGINAL_SUBJECTS);
        let is_own = color < self.own_count;
        PlotSeries { name: name.to_owned(), color, is_own, is_original, points: Vec::new() }
    }
}

/// Returns the plots of a table. `curves` are the published results that belong to it, and `is_own` returns whether a
/// subject is Pagemill.
pub fn plots(table: &TableView<'_>, curves: &[&OriginalCurve], is_own: impl Fn(&str) -> bool) -> Vec<Plot> {
    let rows: Vec<&Row> = table.rows.iter().map(|placed| placed.row).filter(|row| !row.is_lost_rounds()).collect();
    let names = unique_names(rows.iter().map(|row| row.subject.as_str()));
    let (own, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| is_own(name));
    let subjects = Subjects { own_count: own.len(), names: [own, others].concat() };
    let (lines, rest) = match lines_over_columns(&rows, &subjects, curves) {
        Some((plot, rest)) => (Some(plot), rest),
        None => (None, rows),
    };
    let columns = unique_names(rest.iter().map(|row| column(row)));
    let of_column = columns.into_iter().map(|name| {
        let rows: Vec<&Row> = rest.iter().copied().filter(|row| column(row) == name).collect();
        lines_over_page_sizes(name, &rows, &subjects).unwrap_or_else(|| bars(name, &rows, &subjects))
    });
    lines.into_iter().chain(of_column).collect()
}

fn column(row: &Row) -> &str {
    row.cell.as_ref().map_or("", |cell| &cell.column)
}

/// Returns a plot over the numbers in the columns' names, and the rows of the other columns. Returns none if too few
/// columns have a number, the same rest of the name, and the same unit.
fn lines_over_columns<'a>(
    rows: &[&'a Row],
    subjects: &Subjects<'_>,
    curves: &[&OriginalCurve],
) -> Option<(Plot, Vec<&'a Row>)> {
    let (kind, unit) = rows.iter().find_map(|row| Some((number_in(column(row))?.rest, row.unit)))?;
    let number_of = |row: &Row| number_in(column(row)).filter(|number| number.rest == kind && row.unit == unit);
    let (numbered, rest): (Vec<&Row>, Vec<&Row>) = rows.iter().partition(|row| number_of(row).is_some());
    let measured_x = numbered.iter().filter_map(|row| number_of(row)).map(|number| number.value);
    let published_x = curves.iter().flat_map(|curve| curve.points.iter().map(|(x, _)| *x));
    if unique_values(measured_x.chain(published_x)) < MIN_X_VALUES {
        return None;
    }
    // Values of an original come from another machine, so only the ratios are comparable.
    let is_ratio = subjects.names.iter().any(|subject| subject.starts_with(ORIGINAL_SUBJECTS));
    let point_of = |row: &Row| {
        let number = number_of(row)?;
        let y = if is_ratio { row.ratio.unwrap_or(1.0) } else { row.value };
        Some(point((number.value, number.text), y, row.spread))
    };
    let series = subjects.names.iter().map(|subject| {
        let curve = curves.iter().find(|curve| curve.subject == *subject);
        let own = numbered.iter().filter(|row| row.subject == *subject);
        let mut points: Vec<Point> = match curve {
            Some(curve) => curve.points.iter().map(|(x, y)| point((*x, x.to_string()), *y, 0.0)).collect(),
            None => own.filter_map(|row| point_of(row)).collect(),
        };
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        PlotSeries { points, ..subjects.series(subject, subject) }
    });
    let series = series.filter(|series| !series.points.is_empty()).collect();
    let baseline = numbered.iter().find_map(|row| row.baseline.as_deref()).unwrap_or("the baseline");
    let unit = if is_ratio { format!("{RATIO_UNIT}{baseline}") } else { unit.to_owned() };
    Some((Plot { title: String::new(), shape: Shape::Lines, x_title: kind.clone(), unit, series }, rest))
}

/// Returns a plot of one column over the page sizes in the subjects' names. A subject without a page size is a level
/// with a single point. Returns none if no group of subjects has enough page sizes.
fn lines_over_page_sizes(title: &str, rows: &[&Row], subjects: &Subjects<'_>) -> Option<Plot> {
    let group_of = |row: &Row| page_size(&row.subject).map(|(group, _)| group.to_owned());
    let groups: Vec<String> = rows.iter().filter_map(|row| group_of(row)).collect();
    // The colours follow the groups of all columns, so that the plots of a table share their legend.
    let series_name = |subject: &str| match page_size(subject) {
        Some((group, _)) => format!("{group}-P"),
        None => subject.to_owned(),
    };
    let all_names: Vec<String> = subjects.names.iter().map(|subject| series_name(subject)).collect();
    let all_names = unique_names(all_names.iter().map(String::as_str));
    let of_group = |group: &String| groups.iter().filter(|other| *other == group).count();
    if !groups.iter().any(|group| of_group(group) >= MIN_X_VALUES) {
        return None;
    }
    let mut series: Vec<PlotSeries> = Vec::new();
    for row in rows {
        let name = series_name(&row.subject);
        let (x, x_text) = match page_size(&row.subject) {
            Some((_, number)) => (number.value, number.text),
            None => (0.0, String::new()),
        };
        let point = point((x, x_text), row.value, row.spread);
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => {
                let color = all_names.iter().position(|known| *known == name).unwrap_or_default();
                series.push(PlotSeries { color, points: vec![point], ..subjects.series(&row.subject, &name) });
            }
        }
    }
    series.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.x.total_cmp(&b.x)));
    let unit = rows.first()?.unit.to_owned();
    Some(Plot { title: title.to_owned(), shape: Shape::Lines, x_title: "page size".to_owned(), unit, series })
}

/// Splits a subject such as `view-64K` into its group and its page size.
fn page_size(subject: &str) -> Option<(&str, Number)> {
    let (group, size) = subject.rsplit_once('-')?;
    let is_size = size.ends_with(['K', 'M']) && size.starts_with(|first: char| first.is_ascii_digit());
    let bytes = is_size.then(|| parse_bytes(size).ok())??;
    Some((group, Number { value: bytes as f64, text: size.to_owned(), rest: String::new() }))
}

fn bars(title: &str, rows: &[&Row], subjects: &Subjects<'_>) -> Plot {
    let of_subject = |subject: &&str| {
        let own = rows.iter().filter(|row| row.subject == **subject);
        let points: Vec<Point> = own.map(|row| point((0.0, String::new()), row.value, row.spread)).collect();
        (!points.is_empty()).then(|| PlotSeries { points, ..subjects.series(subject, subject) })
    };
    let series = subjects.names.iter().filter_map(of_subject).collect();
    let unit = rows.first().map_or("", |row| row.unit).to_owned();
    Plot { title: title.to_owned(), shape: Shape::Bars, x_title: String::new(), unit, series }
}

fn point((x, x_text): (f64, String), y: f64, spread: f64) -> Point {
    let half = (y * spread / 2.0).abs();
    Point { x, x_text, y, low: (y - half).max(0.0), high: y + half }
}

/// Finds the only number in a name, such as `2 threads`, `depth 8`, `64 KiB` or `after 5 s`.
fn number_in(name: &str) -> Option<Number> {
    const BYTES: [(&str, f64); 4] = [("B", 1.0), ("KiB", 1024.0), ("MiB", 1048576.0), ("GiB", 1073741824.0)];
    let words: Vec<&str> = name.split_whitespace().collect();
    let mut found = None;
    for (place, word) in words.iter().enumerate() {
        match word.parse::<f64>() {
            Ok(value) if found.is_none() => found = Some((place, value)),
            Ok(_) => return None,
            Err(_) if word.contains(|one: char| one.is_ascii_digit()) => return None,
            Err(_) => {}
        }
    }
    let (place, value) = found?;
    let unit = words.get(place + 1).and_then(|unit| BYTES.into_iter().find(|(name, _)| name == unit));
    let skipped = if unit.is_some() { place..place + 2 } else { place..place + 1 };
    // A number between two words leaves a gap.
    let middle: &[&str] = if skipped.start > 0 && skipped.end < words.len() { &["…"] } else { &[] };
    let rest = [&words[..skipped.start], middle, &words[skipped.end..]].concat().join(" ");
    // `1 thread` and `2 threads` are of one kind.
    let rest = if rest.ends_with("thread") { format!("{rest}s") } else { rest };
    let rest = if unit.is_some() && rest.is_empty() { "size".to_owned() } else { rest };
    let text = words[skipped].join(" ");
    Some(Number { value: value * unit.map_or(1.0, |(_, factor)| factor), text, rest })
}

fn unique_values(values: impl Iterator<Item = f64>) -> usize {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    all.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Report, TableCell};

    /// Returns the plots of a table whose rows have these subjects, columns and values.
    fn plots_of(rows: &[(&str, &str, f64)], curves: &[&OriginalCurve]) -> Vec<Plot> {
        let mut report = Report::new("it", false);
        for (subject, column, value) in rows {
            let cell = Some(TableCell { table: "t".to_owned(), column: (*column).to_owned() });
            let ratio = (*subject != "base").then_some(value / 10.0);
            let spread = 0.2;
            report.add_row(Row {
                subject: (*subject).to_owned(),
                cell,
                ratio,
                spread,
                ..report.single_value("rate", *value, "1/s")
            });
        }
        let tables = TableView::all(&report);
        plots(&tables[0], curves, |subject| subject == "pagemill")
    }

    /// Names with one number must give the number, with units of bytes counted. Other names must give none.
    #[test]
    fn numbers_are_found_in_names() {
        let found = |name| number_in(name).map(|number| (number.value, number.rest));
        assert_eq!(found("1 thread"), Some((1.0, "threads".to_owned())));
        assert_eq!(found("200 threads"), Some((200.0, "threads".to_owned())));
        assert_eq!(found("depth 8"), Some((8.0, "depth".to_owned())));
        assert_eq!(found("64 KiB"), Some((65536.0, "size".to_owned())));
        assert_eq!(found("after 2 s"), Some((2.0, "after … s".to_owned())));
        for name in ["256 KiB, 2 threads", "1M read", "left, MiB", "2 MiB: 1 s"] {
            assert_eq!(found(name), None, "{name}");
        }
        assert_eq!(page_size("view-64K").map(|(group, size)| (group, size.value)), Some(("view", 65536.0)));
        assert!(page_size("fio-psync-8").is_none() && page_size("mmap").is_none() && page_size("view-auto").is_none());
    }

    /// Columns that are numbers must become lines, from three numbers on. Other columns must become bars, one plot for
    /// each column. Every row must become a point with an error bar.
    #[test]
    fn shape_follows_the_columns() {
        let three =
            [("a", "1 thread", 10.0), ("a", "8 threads", 20.0), ("a", "2 threads", 15.0), ("b", "1 thread", 5.0)];
        let [lines] = &plots_of(&three, &[])[..] else { panic!("one plot") };
        assert_eq!((lines.shape, lines.x_title.as_str(), lines.unit.as_str()), (Shape::Lines, "threads", "1/s"));
        let x_values: Vec<f64> = lines.series[0].points.iter().map(|point| point.x).collect();
        assert_eq!((x_values, lines.series[1].points.len()), (vec![1.0, 2.0, 8.0], 1));
        assert_eq!((lines.series[0].points[0].low, lines.series[0].points[0].high), (9.0, 11.0));

        let mixed = [&three[..], &[("a", "filled", 7.0)]].concat();
        let shapes: Vec<_> = plots_of(&mixed, &[]).iter().map(|plot| (plot.shape, plot.series.len())).collect();
        assert_eq!(shapes, [(Shape::Lines, 2), (Shape::Bars, 1)]);

        let bars = plots_of(&three[..2], &[]);
        assert_eq!(bars.iter().map(|plot| (plot.shape, plot.series.len())).collect::<Vec<_>>(), [(Shape::Bars, 1); 2]);
    }

    /// Subjects with page sizes must become lines over the sizes; a subject without a size must keep its point.
    #[test]
    fn page_sizes_become_lines() {
        let rows = [("view-4K", "us", 4.0), ("mmap", "us", 3.0), ("view-2M", "us", 1.0), ("view-64K", "us", 2.0)];
        let [plot] = &plots_of(&rows, &[])[..] else { panic!("one plot") };

        assert_eq!((plot.shape, plot.x_title.as_str()), (Shape::Lines, "page size"));
        let of = |index: usize| plot.series[index].points.iter().map(|point| point.x_text.as_str()).collect::<Vec<_>>();
        assert_eq!((plot.series[0].name.as_str(), of(0)), ("view-P", vec!["4K", "64K", "2M"]));
        assert_eq!((plot.series[1].name.as_str(), of(1)), ("mmap", vec![""]));

        // A subject with the name of a group, but without a size, is a level with a colour of its own.
        let [plot] = &plots_of(&[&rows[..], &[("view", "us", 9.0)]].concat(), &[])[..] else { panic!("one plot") };
        let names: Vec<_> = plot.series.iter().map(|series| (series.name.as_str(), series.color)).collect();
        assert_eq!(names, [("view-P", 0), ("mmap", 1), ("view", 2)]);
    }

    /// A table with an original must show ratios, and all published points instead of those of the measured cases.
    #[test]
    fn originals_are_plotted_as_ratios() {
        let points = vec![(1.0, 1.5), (40.0, 0.8), (200.0, 0.4)];
        let curve = OriginalCurve { table: "t".to_owned(), subject: "original-2013".to_owned(), points };
        let rows = [("base", "1 thread", 10.0), ("pagemill", "1 thread", 30.0), ("original-2013", "1 thread", 15.0)];
        let [plot] = &plots_of(&rows, &[&curve])[..] else { panic!("one plot") };

        let y_values = |index: usize| plot.series[index].points.iter().map(|point| point.y).collect::<Vec<_>>();
        assert_eq!((y_values(0), y_values(1), y_values(2)), (vec![3.0], vec![1.0], vec![1.5, 0.8, 0.4]));
        assert!(
            plot.series[0].is_own
                && !plot.series[1].is_own
                && plot.series[2].is_original
                && plot.unit.starts_with("times")
        );
    }
}
