//! The report of `run` as an HTML page in one file: plots as inline SVG, no script, nothing from the network.

use crate::report::Section;
use crate::statistics::RETURN_CAUSES;
use crate::timeline::{Point, Timeline};
use pagemill_core::units::Bytes;
use std::fmt::Write as _;
use std::time::Duration;

/// Size of the plots in units of the SVG.
const WIDTH: f64 = 960.0;
const PLOT_HEIGHT: f64 = 260.0;
const RETURNED_HEIGHT: f64 = 110.0;

/// Room for the amounts on the left, and below and above the plots.
const LEFT: f64 = 90.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const GAP: f64 = 44.0;

/// Number of bars in the plot of returned memory.
const MAX_BARS: usize = 120;

/// Colours of the causes, in the order of `RETURN_CAUSES`.
const CAUSE_COLOURS: [&str; RETURN_CAUSES.len()] =
    ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#9d755d", "#ff9da6", "#eeca3b", "#79706e"];

const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1c1e21;--dim:#6a737d;--line:#d0d7de;--back:#fff;--resident:#8fb8de;--allocator:#1f6feb}
@media (prefers-color-scheme:dark){:root{--text:#e6edf3;--dim:#9198a1;--line:#3d444d;--back:#0d1117;--resident:#2f4d6e;--allocator:#58a6ff}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--back);max-width:1000px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin-top:2rem}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}svg text{fill:var(--dim)}
table{border-collapse:collapse;width:100%}td{padding:.2rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
td:nth-child(2){text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td:first-child{white-space:nowrap}td:last-child{color:var(--dim)}
.legend span{margin-right:1.2rem;white-space:nowrap}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
";

/// The contents of the page.
pub struct Page<'run> {
    pub title: String,
    pub summary: String,
    pub timeline: &'run Timeline,
    pub wall: Duration,
    pub limit: Option<u64>,
    pub sections: Vec<Section>,
}

/// Returns the text with the characters of HTML replaced.
fn escaped(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => result.push_str("&amp;"),
            '<' => result.push_str("&lt;"),
            '>' => result.push_str("&gt;"),
            '"' => result.push_str("&quot;"),
            letter if letter.is_control() => result.push('?'),
            letter => result.push(letter),
        }
    }
    result
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Returns the distance of two lines of a scale up to `max`: a power of two, so that there are 2 to 5 lines.
fn scale_step(max: u64) -> u64 {
    (max.max(1) / 4).max(1).checked_next_power_of_two().unwrap_or(1 << 63)
}

impl Page<'_> {
    pub fn html(&self) -> String {
        let mut html = format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\n<style>\n{STYLE}</style>\
             </head><body>\n<h1>{title}</h1>\n<p>{summary}</p>\n",
            title = escaped(&self.title),
            summary = escaped(&self.summary),
        );
        if self.timeline.points().len() < 2 {
            html += "<p>The program ended before its memory was sampled twice, so there is no plot.</p>\n";
        } else {
            html += "<h2>Resident memory over time, and memory returned to the system</h2>\n";
            let _ = writeln!(html, "<p class=\"legend\">{}</p>", self.legend());
            self.add_plots(&mut html);
        }
        for Section { heading, rows } in self.sections.iter().filter(|section| !section.rows.is_empty()) {
            let _ = writeln!(html, "<h2>{}</h2>\n<table>", escaped(&capitalized(heading)));
            for row in rows {
                let [name, value, meaning] = [&row.name, &row.value, &row.meaning].map(|text| escaped(text));
                let _ = writeln!(html, "<tr><td>{name}</td><td>{value}</td><td>{meaning}</td></tr>");
            }
            html += "</table>\n";
        }
        html + "</body></html>\n"
    }

    fn legend(&self) -> String {
        let mut legend = String::new();
        let mut add = |colour: &str, text: &str| {
            let _ = write!(legend, "<span><i style=\"background:{colour}\"></i>{}</span>", escaped(text));
        };
        add("var(--resident)", "all processes, as the kernel counts them");
        add("var(--allocator)", "allocators, as Pagemill counts them");
        if let Some(limit) = self.limit {
            add("#e5534b", &format!("limit of the allocators, {}", Bytes(limit)));
        }
        for (cause, bytes) in self.timeline.causes() {
            add(CAUSE_COLOURS[cause], &format!("returned for {}, {}", RETURN_CAUSES[cause].1, Bytes(bytes)));
        }
        legend
    }

    fn add_plots(&self, html: &mut String) {
        let causes = self.timeline.causes();
        let height = TOP + PLOT_HEIGHT + GAP + if causes.is_empty() { 0.0 } else { RETURNED_HEIGHT + GAP };
        let _ = writeln!(
            html,
            "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"resident memory over time\">"
        );
        self.add_memory(html);
        self.add_time(html, TOP + PLOT_HEIGHT);
        if !causes.is_empty() {
            let top = TOP + PLOT_HEIGHT + GAP;
            self.add_returned(html, top);
            self.add_time(html, top + RETURNED_HEIGHT);
        }
        html.push_str("</svg>\n");
    }

    /// Adds the plot of resident memory, with the limit if it is not far above.
    fn add_memory(&self, html: &mut String) {
        let points = self.timeline.points();
        let peak = points.iter().map(|point| point.resident_bytes.max(point.allocator_bytes)).max().unwrap_or(0);
        let limit = self.limit.filter(|limit| *limit <= peak.saturating_mul(2));
        let max = peak.max(limit.unwrap_or(0)).max(1);
        add_scale(html, TOP, PLOT_HEIGHT, max);
        let y = |bytes: u64| TOP + PLOT_HEIGHT * (1.0 - bytes as f64 / max as f64);
        let path = |value: fn(&Point) -> u64| {
            let mut path = String::new();
            for (slot, point) in points.iter().enumerate() {
                let (from, to) = (x_of(slot, points.len()), x_of(slot + 1, points.len()));
                let _ = write!(path, "L{from:.1} {y:.1}L{to:.1} {y:.1}", y = y(value(point)));
            }
            path
        };
        let (left, right, bottom) = (x_of(0, 1), x_of(1, 1), TOP + PLOT_HEIGHT);
        let resident = path(|point| point.resident_bytes);
        let _ = writeln!(
            html,
            "<path d=\"M{left:.1} {bottom:.1}{resident}L{right:.1} {bottom:.1}Z\" fill=\"var(--resident)\"/>"
        );
        let allocator = path(|point| point.allocator_bytes);
        let _ = writeln!(
            html,
            "<path d=\"M{}\" fill=\"none\" stroke=\"var(--allocator)\" stroke-width=\"2\"/>",
            &allocator[1..]
        );
        if let Some(limit) = limit {
            let _ = writeln!(
                html,
                "<line x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#e5534b\" \
                 stroke-width=\"2\" stroke-dasharray=\"6 4\"/>",
                y = y(limit)
            );
        }
    }

    /// Adds stacked bars of the memory that was returned for each cause.
    fn add_returned(&self, html: &mut String, top: f64) {
        let bars = self.timeline.points().len().min(MAX_BARS);
        let causes: Vec<(usize, Vec<u64>)> = self
            .timeline
            .causes()
            .iter()
            .map(|(cause, _)| (*cause, self.timeline.returned_in_parts(*cause, bars)))
            .collect();
        let sum_of = |bar: usize| causes.iter().fold(0u64, |sum, (_, parts)| sum.saturating_add(parts[bar]));
        let max = (0..bars).map(sum_of).max().unwrap_or(0).max(1);
        add_scale(html, top, RETURNED_HEIGHT, max);
        let bottom = top + RETURNED_HEIGHT;
        for bar in 0..bars {
            let (x, width) = (x_of(bar, bars), x_of(1, bars) - x_of(0, bars));
            let mut below = 0.0;
            for (cause, parts) in causes.iter().filter(|(_, parts)| parts[bar] > 0) {
                let height = RETURNED_HEIGHT * parts[bar] as f64 / max as f64;
                below += height;
                let title = format!("{} for {}", Bytes(parts[bar]), RETURN_CAUSES[*cause].1);
                let _ = writeln!(
                    html,
                    "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\" fill=\"{}\">\
                     <title>{title}</title></rect>",
                    bottom - below,
                    (width - 1.0).max(1.0),
                    CAUSE_COLOURS[*cause]
                );
            }
        }
    }

    /// Adds the scale of the time below a plot.
    fn add_time(&self, html: &mut String, bottom: f64) {
        for quarter in 0..=4 {
            let anchor = match quarter {
                0 => "start",
                4 => "end",
                _ => "middle",
            };
            let seconds = self.wall.as_secs_f64() * f64::from(quarter) / 4.0;
            let _ = writeln!(
                html,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{seconds:.2} s</text>",
                x_of(quarter as usize, 4),
                bottom + 18.0
            );
        }
    }
}

/// Returns the position of a part of the time, of `all` equal ones.
fn x_of(part: usize, all: usize) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * part as f64 / all.max(1) as f64
}

/// Adds horizontal lines with amounts.
fn add_scale(html: &mut String, top: f64, height: f64, max: u64) {
    let step = scale_step(max);
    let amounts = (0..).map(|line| step.saturating_mul(line)).take_while(|amount| *amount <= max).take(6);
    for amount in amounts {
        let y = top + height * (1.0 - amount as f64 / max as f64);
        let _ = writeln!(
            html,
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"var(--line)\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0,
            Bytes(amount)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Row;

    fn page(timeline: &Timeline, title: &str) -> String {
        let row = Row { name: "peak".into(), value: "7 MiB".into(), meaning: "a < b".into() };
        let sections = vec![Section { heading: "memory".into(), rows: vec![row] }];
        let (wall, limit) = (Duration::from_secs(2), Some(9 << 20));
        Page { title: title.to_owned(), summary: "exit 0".into(), timeline, wall, limit, sections }.html()
    }

    /// The page has both plots, the limit, and the rows of the report. It refers to no other file. Texts are escaped.
    #[test]
    fn a_page_has_plots_and_rows() {
        let mut timeline = Timeline::default();
        for slot in 0..200_u64 {
            timeline.record(Duration::from_millis(10 * slot), slot << 16, slot << 15);
            timeline
                .record_returned(Duration::from_millis(10 * slot), std::array::from_fn(|cause| slot * cause as u64));
        }
        let html = page(&timeline, "<script>\u{1b}");
        assert!(html.contains("<h1>&lt;script&gt;?</h1>") && html.contains("a &lt; b"), "{html}");
        assert!(html.contains("<h2>Memory</h2>"), "{html}");
        assert!(html.contains("stroke-dasharray") && html.contains("returned for limit"), "{html}");
        assert!(html.matches("<rect").count() > 100 && html.contains("2.00 s"), "{html}");
        for part in ["http", "src=", "href", "<script", "NaN", "inf"] {
            assert!(!html.contains(part), "{part}");
        }
        for tag in ["svg", "table", "tr", "td", "text", "rect", "title", "p", "h2"] {
            let opened = html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    /// A run that was too short for a time line has no plot, and says so.
    #[test]
    fn a_short_run_has_no_plot() {
        let html = page(&Timeline::default(), "true");
        assert!(html.contains("there is no plot") && !html.contains("<svg") && html.contains("7 MiB"));
    }

    #[test]
    fn scales_have_few_lines() {
        for max in [1, 2, 3, 5, 1000, 512 << 20, 1 << 40, u64::MAX] {
            let lines = max / scale_step(max) + 1;
            assert!((2..=6).contains(&lines), "{max}: {lines}");
        }
    }
}
