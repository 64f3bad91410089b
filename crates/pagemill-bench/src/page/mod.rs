//! `--report DIR`: one page with all results of a run, as a single HTML file without scripts and network.

mod plot;
mod svg;
mod warnings;

use std::fmt::Write as _;

use crate::compare::Comparison;
use crate::ideas::IdeaResult;
use crate::machine::Machine;
use crate::report::{ORIGINAL_SUBJECTS, OriginalCurve, Report, TableView, VerdictState, format_number};
use crate::subject;
use plot::{Plot, Shape};
pub use warnings::Warning;

const STYLE: &str = include_str!("style.css");

/// An experiment of the suite that has no results.
#[derive(Clone, Debug)]
pub struct LeftOut {
    pub name: &'static str,
    pub warning: Warning,
}

/// Start of the unit of plots that show ratios.
const RATIO_UNIT: &str = "times ";
/// Number of verdicts from which those that are reached or were not measured are folded.
const FOLD_VERDICTS_FROM: usize = 12;

/// The results of an experiment.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    pub report: &'a Report,
    /// Duration of the experiment; none if it is the only one.
    pub seconds: Option<f64>,
}

/// What the page shows.
#[derive(Clone, Debug)]
pub struct Page<'a> {
    /// Name of the files, without their endings.
    pub name: &'a str,
    pub title: String,
    pub machine: &'a Machine,
    pub sections: Vec<Section<'a>>,
    /// The five ideas; empty for a single experiment.
    pub ideas: &'a [IdeaResult],
    /// Experiments of the suite without results.
    pub left_out: &'a [LeftOut],
    pub comparison: Option<&'a Comparison>,
}

impl Page<'_> {
    /// Renders the page.
    pub fn html(&self) -> String {
        let title = escape(&self.title);
        let mut html = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\
             <title>{title}</title><style>\n{STYLE}</style></head><body><main>\n<header><h1>{title}</h1>"
        );
        let _ = write!(
            html,
            "<p class=\"soft\">Measured {}, by Pagemill {}</p>",
            self.machine.time(),
            env!("CARGO_PKG_VERSION")
        );
        let _ = write!(html, "<p><code>{}</code></p>", escape(&command_line()));
        html += "<ul class=\"machine\">";
        for (name, text) in self.machine.titles() {
            let _ = write!(html, "<li><b>{}</b>{}</li>", escape(&name), escape(text));
        }
        html += "</ul></header>\n";
        html += &self.ideas();
        html += &warning_list(&self.warnings());
        html += &self.contents();
        html += &self.comparison();
        for section in &self.sections {
            html += &section_html(section);
        }
        let _ = writeln!(
            html,
            "<footer>Each figure is the median of its samples; error bars and ± are half of the spread, (max - min) / \
             median. A difference below the spread is no difference. The rows are in <a href=\"{0}.json\">{0}.json</a>; \
             <code>--compare {0}.json</code> compares a later run with them.</footer></main></body></html>",
            escape(self.name)
        );
        html
    }

    /// Returns the warnings about the machine and the experiments that were left out.
    fn warnings(&self) -> Vec<Warning> {
        let left_out = self.left_out.iter().map(|LeftOut { name, warning }| Warning {
            what: format!("{name} was left out: {}", warning.what),
            remedy: warning.remedy.clone(),
        });
        warnings::of_machine(self.machine).into_iter().chain(left_out).collect()
    }

    fn ideas(&self) -> String {
        if self.ideas.is_empty() {
            return String::new();
        }
        let mut html = "<section class=\"ideas\">".to_owned();
        for idea in self.ideas {
            let number = match idea.ratio_to(idea.baseline.as_ref()) {
                Some(ratio) => format!("<div class=\"number\">{}x</div>", format_number(ratio)),
                None => "<div class=\"number none\">not measured</div>".to_owned(),
            };
            let _ = write!(html, "<div class=\"card idea\"><h3>{}</h3>{number}", escape(idea.title));
            if let Some(baseline) = &idea.baseline {
                let _ = write!(html, "<div class=\"soft\">as good as {}</div>", escape(baseline.subject));
            }
            html += "<dl>";
            let texts = [
                ("Pagemill", idea.own_figure_text()),
                ("best peer", idea.peer_text()),
                ("the original", format!("{} ({})", idea.original, idea.source)),
                ("measured by", idea.measured.to_owned()),
            ];
            for (name, text) in texts {
                let _ = write!(html, "<dt>{name}</dt><dd>{}</dd>", escape(&text));
            }
            html += "</dl></div>";
        }
        html + "</section>\n"
    }

    /// Lists the experiments of the suite with links and the numbers of their verdicts.
    fn contents(&self) -> String {
        if self.sections.len() < 2 {
            return String::new();
        }
        let mut html = "<h3>Experiments</h3><div class=\"scroll\"><table><tr><th>experiment</th><th>seconds</th>\
             <th>figures</th><th>reached</th><th>within doubt</th><th>short</th><th>not measured</th></tr>"
            .to_owned();
        for Section { report, seconds } in &self.sections {
            let name = escape(report.experiment());
            let seconds = seconds.map_or(String::new(), |seconds| format!("{seconds:.1}"));
            let figures = report.rows().len();
            let _ = write!(html, "<tr><td><a href=\"#{name}\">{name}</a></td><td>{seconds}</td><td>{figures}</td>");
            for (count, class) in report.verdict_counts().into_iter().zip(["reached", "doubt", "short", "unknown"]) {
                let _ = match count {
                    0 => write!(html, "<td></td>"),
                    _ => write!(html, "<td><span class=\"state {class}\">{count}</span></td>"),
                };
            }
            html += "</tr>";
        }
        html + "</table></div>\n"
    }

    fn comparison(&self) -> String {
        let Some(comparison) = self.comparison else { return String::new() };
        let path = escape(&comparison.path);
        let mut html = format!("<h2>Compared with {path}</h2><p>{}</p>", escape(&comparison.summary()));
        let machine = comparison.machine_sentences().into_iter().map(|what| Warning {
            what: format!("machine: {what}"),
            remedy: "compare runs of one machine with the same settings".to_owned(),
        });
        html += &warning_list(&machine.collect::<Vec<_>>());
        if !comparison.changes.is_empty() {
            html += "<div class=\"scroll\"><table><tr><th>experiment</th><th>case</th><th>subject</th><th>metric</th>\
                     <th>old</th><th>new</th><th>new / old</th></tr>";
            for change in &comparison.changes {
                let [old, new] =
                    [change.old, change.new].map(|value| format!("{} {}", format_number(value), change.unit));
                let cells = change.key.iter().cloned().chain([old, new, change.ratio_text()]);
                html += &table_row(cells);
            }
            html += "</table></div>";
        }
        let missing = comparison.missing_lines();
        if !missing.is_empty() {
            let _ = write!(html, "<details><summary>{} entries of one run only</summary><ul>", missing.len());
            missing.iter().for_each(|line| html += &format!("<li>{}</li>", escape(line)));
            html += "</ul></details>";
        }
        html + "\n"
    }
}

/// Returns the command that made the page.
fn command_line() -> String {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    ["pagemill bench".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

fn warning_list(warnings: &[Warning]) -> String {
    if warnings.is_empty() {
        return String::new();
    }
    let mut html = "<ul class=\"warnings\">".to_owned();
    for Warning { what, remedy } in warnings {
        let _ = write!(html, "<li>{}<span class=\"remedy\">Remedy: {}</span></li>", escape(what), escape(remedy));
    }
    html + "</ul>\n"
}

fn section_html(Section { report, seconds }: &Section<'_>) -> String {
    let name = escape(report.experiment());
    let seconds = seconds.map_or(String::new(), |seconds| format!(" <small class=\"soft\">{seconds:.1} s</small>"));
    let mut html = format!("<section id=\"{name}\"><h2>{name}{seconds}</h2>\n");
    if let Some(conclusion) = report.conclusion() {
        let _ = write!(html, "<p><b>Recommendation:</b> {}</p>", escape(conclusion));
    }
    html += &verdict_table(report);
    html += &warning_list(&warnings::of_report(report));
    let tables: Vec<DrawnTable<'_>> = TableView::all(report).into_iter().map(|table| draw(report, table)).collect();
    // Tables with one plot each and the same legend share a grid.
    let is_alike = |one: &DrawnTable<'_>, other: &DrawnTable<'_>| {
        one.plots.len() == 1 && other.plots.len() == 1 && one.legend == other.legend
    };
    for group in tables.chunk_by(is_alike) {
        html += &match group {
            [table] => table_html(report.experiment(), table),
            _ => group_html(report.experiment(), group),
        };
    }
    if !report.notes().is_empty() {
        html += "<h3>Notes</h3><ul>";
        report.notes().iter().for_each(|note| html += &format!("<li>{}</li>", escape(note)));
        html += "</ul>";
    }
    html + "</section>\n"
}

/// Returns the verdicts as a table. The verdicts that matter most come first; of many, those that are reached or were not
/// measured are folded.
fn verdict_table(report: &Report) -> String {
    let states = [
        (VerdictState::FallsShort, "short"),
        (VerdictState::WithinDoubt, "doubt"),
        (VerdictState::Reached, "reached"),
        (VerdictState::NotMeasured, "unknown"),
    ];
    let (mut open, mut folded) = (String::new(), String::new());
    for (state, class) in states {
        for verdict in report.verdicts().iter().filter(|verdict| verdict.state() == state) {
            let is_calm = matches!(state, VerdictState::Reached | VerdictState::NotMeasured);
            let is_folded = is_calm && report.verdicts().len() >= FOLD_VERDICTS_FROM;
            let target = if is_folded { &mut folded } else { &mut open };
            let _ = write!(
                target,
                "<tr><td><span class=\"state {class}\">{}</span></td><td>{}</td><td>{}</td></tr>",
                state.name(),
                escape(&verdict.target_text()),
                escape(&verdict.result_text())
            );
        }
    }
    let table = |rows: &str| {
        format!(
            "<div class=\"scroll\"><table class=\"words\"><tr><th>verdict</th><th>target</th><th>measured [95 % \
             interval]</th></tr>{rows}</table></div>"
        )
    };
    let mut html = if open.is_empty() { String::new() } else { table(&open) };
    if !folded.is_empty() {
        let [reached, .., not_measured] = report.verdict_counts();
        let summary = format!("{reached} targets reached, {not_measured} not measured");
        let _ = write!(html, "<details><summary>{summary}</summary>{}</details>", table(&folded));
    }
    html + "\n"
}

/// A table, its plots, and the legend of its lines.
struct DrawnTable<'a> {
    table: TableView<'a>,
    plots: Vec<Plot>,
    legend: String,
}

fn draw<'a>(report: &Report, table: TableView<'a>) -> DrawnTable<'a> {
    let curves: Vec<&OriginalCurve> = report.curves().iter().filter(|curve| curve.table == table.title).collect();
    let plots = plot::plots(&table, &curves, |subject| subject::is_own(report.experiment(), subject));
    let legend = legend(&plots);
    DrawnTable { table, plots, legend }
}

/// Returns a table with its plots below its title.
fn table_html(experiment: &str, DrawnTable { table, plots, legend }: &DrawnTable<'_>) -> String {
    let mut html = format!("<h3>{}</h3>\n{legend}<div class=\"plots\">", escape(table.title));
    for plot in plots {
        // Lines of one table often have one plot without a title of its own.
        let title = if plot.title.is_empty() { String::new() } else { format!("<b>{}</b>, ", escape(&plot.title)) };
        let has_unit = !plot.title.is_empty() && plot.title.ends_with(&format!(", {}", plot.unit));
        let unit = if has_unit { "" } else { &plot.unit };
        let caption = format!("{title}{}", with_direction(unit, plot));
        let caption = caption.trim_end_matches(", ");
        let _ = write!(html, "<figure class=\"card\"><figcaption>{caption}</figcaption>");
        html += &(svg::draw(plot) + "</figure>\n");
    }
    html + "</div>" + &lost_rounds(table) + &table_details(experiment, table)
}

/// Returns tables with one plot each as a grid, in which each plot has the title of its table.
fn group_html(experiment: &str, group: &[DrawnTable<'_>]) -> String {
    let legend = group.first().map_or("", |first| &first.legend);
    let mut html = format!("<div class=\"group\">{legend}</div><div class=\"plots\">");
    for DrawnTable { table, plots, .. } in group {
        let (title, values) = table.title.split_once(": ").unwrap_or((table.title, ""));
        let values = values.split(", half the spread").next().unwrap_or(values);
        for plot in plots {
            // The values of the table are no ratios.
            let is_described = !values.is_empty() && !plot.unit.starts_with(RATIO_UNIT);
            let unit = if is_described { values } else { &plot.unit };
            let caption = format!("<b>{}</b><br/>{}", escape(title), with_direction(unit, plot));
            let _ = write!(html, "<figure class=\"card\"><figcaption>{caption}</figcaption>{}", svg::draw(plot));
        }
        html += &(lost_rounds(table) + &table_details(experiment, table) + "</figure>\n");
    }
    html + "</div>\n"
}

/// Returns a line for each subject of which samples were lost, for example because its process was killed.
fn lost_rounds(table: &TableView<'_>) -> String {
    let lost: Vec<_> =
        table.rows.iter().filter(|placed| placed.row.is_lost_rounds()).map(|placed| placed.row).collect();
    if lost.is_empty() {
        return String::new();
    }
    let mut html = "<ul class=\"lost\">".to_owned();
    for row in lost {
        let [subject, metric, case] = [&row.subject, row.metric, &row.case].map(escape);
        let (count, samples) = (row.value, row.samples);
        let _ = write!(html, "<li><b>{subject}</b>: {count} of {samples} samples {metric} ({case})</li>");
    }
    html + "</ul>"
}

fn table_details(experiment: &str, table: &TableView<'_>) -> String {
    let title = escape(table.title);
    let mut html = format!("<details><summary>table</summary><p class=\"soft\">{title}</p>");
    html += "<div class=\"scroll\"><table><tr><th></th>";
    table.columns.iter().for_each(|column| html += &format!("<th>{}</th>", escape(column)));
    html += "</tr>";
    for line in &table.lines {
        let cells = table.columns.iter().map(|column| table.cell_text(line, column));
        let row = table_row([(*line).to_owned()].into_iter().chain(cells));
        html += &if subject::is_own(experiment, line) { row.replacen("<tr>", "<tr class=\"own\">", 1) } else { row };
    }
    html + "</table></div></details>\n"
}

/// Returns a text about the values of a plot, and whether more or less is better.
fn with_direction(text: &str, plot: &Plot) -> String {
    let hint = direction(&plot.unit).map(|hint| format!("{hint} is better"));
    let parts: Vec<String> = [Some(escape(text)), hint].into_iter().flatten().filter(|part| !part.is_empty()).collect();
    parts.join(", ")
}

/// Returns the names and the colours of all lines. Bars have the names beside them.
fn legend(plots: &[Plot]) -> String {
    let mut entries: Vec<(&str, String)> = Vec::new();
    for series in plots.iter().filter(|plot| plot.shape == Shape::Lines).flat_map(|plot| &plot.series) {
        if !entries.iter().any(|(name, _)| *name == series.name) {
            entries.push((&series.name, svg::color_class(series.color, series.is_original)));
        }
    }
    if entries.is_empty() {
        return String::new();
    }
    let mut html = "<ul class=\"legend\">".to_owned();
    for (name, class) in entries {
        let kind = if name.starts_with(ORIGINAL_SUBJECTS) { " (published, on another machine)" } else { "" };
        let _ = write!(html, "<li class=\"{class}\"><i></i>{}{kind}</li>", escape(name));
    }
    html + "</ul>\n"
}

/// Returns whether more or less of a unit is better; none if the unit does not tell.
fn direction(unit: &str) -> Option<&'static str> {
    const MORE: &[&str] = &["1/s", "MiB/s", "GiB/s", "MB/s", "GB/s", "%"];
    const LESS: &[&str] = &["ns", "us", "ms", "s", "faults", "calls"];
    match unit {
        _ if MORE.contains(&unit) || unit.starts_with(RATIO_UNIT) => Some("more"),
        _ if LESS.contains(&unit) => Some("less"),
        _ => None,
    }
}

fn table_row(cells: impl Iterator<Item = String>) -> String {
    let cells: String = cells.map(|cell| format!("<td>{}</td>", escape(&cell))).collect();
    format!("<tr>{cells}</tr>")
}

/// Replaces the letters that have a meaning in HTML and XML.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            // XML allows no other control characters.
            letter if letter.is_control() && !matches!(letter, '\n' | '\t') => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests;
