//! The page must be well-formed, complete, and free of anything that needs a network or a script.

use super::*;
use crate::report::{Bound, Row, RowLabels, Series, TableCell, Verdict};
use crate::stats::{Better, Estimate};

/// Letters that must appear escaped wherever a text from outside is shown.
const HOSTILE: &str = "<script>alert('x')</script> & \"quoted\" \u{1}";

fn series(values: &[f64]) -> Series {
    Series { rounds: values.iter().copied().map(Some).collect(), ..Series::default() }
}

/// A report with lines over threads and an original, bars, lines over page sizes, and a row without a table.
fn report() -> Report {
    let mut report = Report::new("pageshift", false);
    let mut add = |table: &str, column: &str, subject: &str, values: &[f64], base: Option<&Series>| {
        let cell = Some(TableCell { table: table.to_owned(), column: column.to_owned() });
        let baseline = base.map(|base| ("kernel", base, Better::Higher));
        let labels = RowLabels { case: column, subject, metric: "rate", unit: "1/s", baseline, cell };
        report.add_series(labels, &series(values));
    };
    for (threads, column) in ["1 thread", "2 threads", "8 threads"].into_iter().enumerate() {
        let base = series(&[10.0 + threads as f64, 11.0]);
        add(HOSTILE, column, "kernel", &[10.0, 11.0], None);
        add(HOSTILE, column, "cache-4K", &[20.0, 30.0], Some(&base));
        add(HOSTILE, column, "original-2013", &[15.0], Some(&base));
    }
    for subject in ["view-4K", "view-64K", "view-2M", "kernel", HOSTILE] {
        add("sizes", "first, us", subject, &[3.0, 4.0, 5.0], None);
    }
    add("bars", "left", HOSTILE, &[1.0, 1.5, 1.25], None);
    add("bars", "left", "kernel", &[1.0], None);
    let cell = Some(TableCell { table: "bars".to_owned(), column: "left".to_owned() });
    let labels = RowLabels { case: "c", subject: "fragile", metric: "rate", unit: "1/s", baseline: None, cell };
    report.add_series(labels, &Series { rounds: vec![None, None], killed: 2, failures: Vec::new() });
    let points = vec![(1.0, 1.5), (40.0, 0.8), (200.0, 0.4)];
    let subject = "original-2013".to_owned();
    report.add_original_curve(OriginalCurve { table: HOSTILE.to_owned(), subject, points });
    report.add_row(Row { case: "c".to_owned(), ..report.single_value("hidden", 1.0, "1") });
    report.add_gap(format!("{HOSTILE}; to have it: apt-get install {HOSTILE}"));
    report.add_note(HOSTILE);
    report.set_conclusion(HOSTILE);
    let estimate = Some(Estimate { value: 1.0, low: 0.9, high: 1.1, samples: 3 });
    report.add_verdict(Verdict {
        target: HOSTILE.to_owned(),
        baseline: String::new(),
        bound: Bound::AtLeast(2.0),
        unit: "x",
        estimate,
        has_lost_round: false,
        note: HOSTILE.to_owned(),
    });
    report
}

/// Returns the page of the report and of a suite with an experiment that was left out.
fn page_of(report: &Report) -> String {
    let machine = Machine::read();
    let left_out = [LeftOut { name: "orion", warning: Warning::of_gap("fio is not there") }];
    let sections = vec![Section { report, seconds: Some(1.5) }, Section { report, seconds: None }];
    let comparison = Comparison { path: HOSTILE.to_owned(), ..Comparison::default() };
    let ideas = IdeaResult::all(&[report]);
    let page = Page {
        name: "bench",
        title: HOSTILE.to_owned(),
        machine: &machine,
        sections,
        ideas: &ideas,
        left_out: &left_out,
        comparison: Some(&comparison),
    };
    page.html()
}

fn parse(html: &str) -> roxmltree::Document<'_> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    roxmltree::Document::parse_with_options(html, options).expect("the page is well-formed XML")
}

fn has_class(node: &roxmltree::Node<'_, '_>, class: &str) -> bool {
    node.attribute("class").is_some_and(|classes| classes.split(' ').any(|one| one == class))
}

/// The page must parse as XML although every text in it has letters that need an escape. It must have no script, and
/// no address outside of the page other than the file with its rows.
#[test]
fn page_is_well_formed_and_self_contained() {
    let report = report();
    let html = page_of(&report);
    let document = parse(&html);

    assert!(document.descendants().all(|node| !node.has_tag_name("script") && !node.has_tag_name("img")));
    let links = document.descendants().filter_map(|node| node.attribute("href").or(node.attribute("src")));
    let links: Vec<&str> = links.collect();
    assert!(links.iter().all(|link| link.starts_with('#') || *link == "bench.json"), "{links:?}");
    assert!(!html.contains("url(") && !html.contains("@import") && html.len() < 2 << 20);
    assert!(html.contains("left out: fio is not there") && html.contains("Remedy: apt-get install fio"));
    assert!(html.contains("<b>fragile</b>: 2 of 2 samples killed (c)"));
    let texts: String = document.descendants().filter_map(|node| node.text()).collect();
    assert!(texts.contains("<script>alert('x')</script> & \"quoted\" \u{fffd}"));
}

/// Every table must have at least one plot. Every plot must have as many points as its table has rows; that of an
/// original has all published points.
#[test]
fn every_plot_has_the_points_of_its_table() {
    let report = report();
    let html = page_of(&report);
    let document = parse(&html);
    let sections: Vec<_> =
        document.descendants().filter(|node| node.has_tag_name("section") && node.attribute("id").is_some()).collect();
    assert_eq!(sections.len(), 2);
    let figures: Vec<_> = sections[0].descendants().filter(|node| node.has_tag_name("figure")).collect();

    let points = figures.iter().map(|figure| figure.descendants().filter(|node| has_class(node, "point")).count());
    let points: Vec<usize> = points.collect();

    // Three threads of two subjects and three published points; three sizes and two levels; two bars.
    assert_eq!(points, [9, 5, 2]);
    let drawn: Vec<usize> = TableView::all(&report)
        .iter()
        .flat_map(|table| {
            let curves: Vec<&OriginalCurve> =
                report.curves().iter().filter(|curve| curve.table == table.title).collect();
            plot::plots(table, &curves, |_| false)
        })
        .map(|plot| plot.series.iter().map(|series| series.points.len()).sum())
        .collect();
    assert_eq!(points, drawn);
    let legends = sections[0].descendants().filter(|node| has_class(node, "legend")).count();
    assert_eq!(legends, 2);
}

/// The letters with a meaning in HTML must be replaced; other letters must stay.
#[test]
fn texts_are_escaped() {
    assert_eq!(escape("a < b & \"c\" > 'd' µs\n"), "a &lt; b &amp; &quot;c&quot; &gt; &#39;d&#39; µs\n");
    assert_eq!((direction("ns"), direction("times glibc"), direction("MiB")), (Some("less"), Some("more"), None));
}
