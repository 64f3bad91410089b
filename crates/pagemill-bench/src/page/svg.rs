//! Draws plots as SVG elements. Colours come from the classes of the page's style sheet, so a plot follows the light or
//! the dark scheme. Every point is an element of the class `point` with a tooltip.

use std::fmt::Write as _;

use super::escape;
use super::plot::{Plot, PlotSeries, Point, Shape};
use crate::report::format_number;

/// Width of a plot in SVG units, which are pixels at normal size.
const WIDTH: f64 = 430.0;
/// Height of a plot of lines.
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 38.0;
/// Height of one bar with its gap, its thickness, and the widths of the names and of the values beside it.
const BAR_STEP: f64 = 22.0;
const BAR_THICKNESS: f64 = 13.0;
const NAME_WIDTH: f64 = 150.0;
const VALUE_WIDTH: f64 = 56.0;
/// Number of colours of the style sheet for subjects.
const COLORS: usize = 8;
/// Quotient of the largest and the smallest value from which an axis is logarithmic.
const LOG_X_FROM: f64 = 8.0;
const LOG_Y_FROM: f64 = 40.0;
/// Number of letters of a subject's name that fit beside a bar.
const NAME_LETTERS: usize = 23;

/// Draws a plot.
pub fn draw(plot: &Plot) -> String {
    match plot.shape {
        Shape::Lines => lines(plot),
        Shape::Bars => bars(plot),
    }
}

/// Returns the classes of a subject's colour.
pub fn color_class(color: usize, is_original: bool) -> String {
    if is_original { "original".to_owned() } else { format!("c{}", color % COLORS) }
}

/// An axis that maps values to positions.
#[derive(Clone, Copy, Debug)]
struct Axis {
    min: f64,
    max: f64,
    is_log: bool,
    start: f64,
    end: f64,
}

impl Axis {
    fn position(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.is_log { value.max(self.min).ln() } else { value };
        let (min, max) = (scale(self.min), scale(self.max));
        let share = if max > min { (scale(value) - min) / (max - min) } else { 0.5 };
        self.start + share.clamp(0.0, 1.0) * (self.end - self.start)
    }

    /// Returns round values between the ends of the axis.
    fn ticks(&self) -> Vec<f64> {
        if self.is_log {
            let decades = (self.max / self.min).log10();
            let factors: &[f64] = if decades > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
            let powers = self.min.log10().floor() as i32..=self.max.log10().ceil() as i32;
            let all = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
            return all.filter(|tick| (self.min * 0.999..=self.max * 1.001).contains(tick)).collect();
        }
        let rough = (self.max - self.min) / 4.0;
        let power = 10f64.powf(rough.max(f64::MIN_POSITIVE).log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        (0..=10).map(|count| self.min + f64::from(count) * step).filter(|tick| *tick <= self.max * 1.001).collect()
    }
}

fn lines(plot: &Plot) -> String {
    let (x, y) = axes(plot);
    let label = format!("{} {} over {}", plot.title, plot.unit, plot.x_title);
    let mut svg = format!(r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{}">"#, escape(label.trim()));
    for tick in y.ticks() {
        let at = y.position(tick);
        let text = format_tick(tick);
        let _ = write!(svg, r#"<line class="grid" x1="{LEFT}" x2="{:.1}" y1="{at:.1}" y2="{at:.1}"/>"#, WIDTH - RIGHT);
        let _ = write!(svg, r#"<text class="tick end" x="{:.1}" y="{:.1}">{text}</text>"#, LEFT - 6.0, at + 3.5);
    }
    svg += &x_labels(plot, &x);
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let _ = write!(svg, r#"<text class="axis" x="{middle}" y="{:.1}">{}</text>"#, HEIGHT - 6.0, escape(&plot.x_title));
    // The originals are drawn first, so that measured lines lie above them.
    let (original, own): (Vec<_>, Vec<_>) = plot.series.iter().partition(|series| series.is_original);
    original.into_iter().chain(own).for_each(|series| svg += &line_of(plot, series, (&x, &y)));
    svg + "</svg>"
}

/// Chooses the axes: logarithmic if the values span a large range, otherwise y starts at zero.
fn axes(plot: &Plot) -> (Axis, Axis) {
    let points = || plot.series.iter().flat_map(|series| &series.points);
    let fold = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (x_min, x_max) = fold(&mut points().filter(|point| !is_level(plot, point)).map(|point| point.x));
    let (y_min, y_max) = fold(&mut points().flat_map(|point| [point.y, point.high]));
    let is_log_x = x_min > 0.0 && x_max / x_min >= LOG_X_FROM;
    let is_log_y = y_min > 0.0 && y_max / y_min >= LOG_Y_FROM;
    let y_min = if is_log_y { y_min * 0.8 } else { 0.0 };
    let y_max = if y_max > 0.0 { y_max * 1.06 } else { 1.0 };
    let x = Axis { min: x_min, max: x_max, is_log: is_log_x, start: LEFT + 8.0, end: WIDTH - RIGHT - 8.0 };
    (x, Axis { min: y_min, max: y_max, is_log: is_log_y, start: HEIGHT - BOTTOM, end: TOP })
}

/// Returns whether a point has no position on the x axis, so that its value is drawn as a level.
fn is_level(plot: &Plot, point: &Point) -> bool {
    plot.shape == Shape::Lines && point.x_text.is_empty()
}

/// Labels the x values of the points from left to right, without those that would overlap the label before.
fn x_labels(plot: &Plot, axis: &Axis) -> String {
    let points = plot.series.iter().flat_map(|series| &series.points).filter(|point| !is_level(plot, point));
    let mut labels: Vec<(f64, &str)> = points.map(|point| (axis.position(point.x), point.x_text.as_str())).collect();
    labels.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (mut svg, mut free_from) = (String::new(), 0.0);
    for (at, text) in labels {
        let half = 3.5 * text.len() as f64;
        if at - half >= free_from {
            let y = HEIGHT - BOTTOM + 15.0;
            let _ = write!(svg, r#"<text class="tick" x="{at:.1}" y="{y:.1}">{}</text>"#, escape(text));
            free_from = at + half + 5.0;
        }
    }
    svg
}

fn line_of(plot: &Plot, series: &PlotSeries, (x, y): (&Axis, &Axis)) -> String {
    let class = color_class(series.color, series.is_original);
    let mut svg = format!(r#"<g class="{class}">"#);
    if let [point] = &series.points[..]
        && is_level(plot, point)
    {
        let at = y.position(point.y);
        let (start, end) = (x.start - 8.0, x.end + 8.0);
        let _ = write!(svg, r#"<line class="level point" x1="{start}" x2="{end}" y1="{at:.1}" y2="{at:.1}">"#);
        return svg + &tooltip(plot, series, point) + "</line></g>";
    }
    let path = series.points.iter().map(|point| format!("{:.1},{:.1}", x.position(point.x), y.position(point.y)));
    let _ = write!(svg, r#"<polyline class="line" points="{}"/>"#, path.collect::<Vec<_>>().join(" "));
    for point in &series.points {
        let (at, low, high) = (x.position(point.x), y.position(point.low), y.position(point.high));
        if (low - high).abs() > 0.5 {
            let _ = write!(svg, r#"<line class="error" x1="{at:.1}" x2="{at:.1}" y1="{low:.1}" y2="{high:.1}"/>"#);
        }
        let radius = if series.is_original { 2.2 } else { 3.2 };
        let _ = write!(svg, r#"<circle class="point" cx="{at:.1}" cy="{:.1}" r="{radius}">"#, y.position(point.y));
        svg += &tooltip(plot, series, point);
        svg += "</circle>";
    }
    svg + "</g>"
}

fn tooltip(plot: &Plot, series: &PlotSeries, point: &Point) -> String {
    let x_text = if point.x_text.is_empty() { String::new() } else { format!(", {} {}", point.x_text, plot.x_title) };
    let range = match point.high - point.low > 0.0 {
        true => format!(" ({} to {})", format_number(point.low), format_number(point.high)),
        false => String::new(),
    };
    let text = format!("{}{x_text}: {} {}{range}", series.name, format_number(point.y), plot.unit);
    format!("<title>{}</title>", escape(&text))
}

fn bars(plot: &Plot) -> String {
    let points = || plot.series.iter().flat_map(|series| series.points.iter().map(move |point| (series, point)));
    let height = points().count() as f64 * BAR_STEP + 6.0;
    let max = points().map(|(_, point)| point.y.max(point.high)).fold(0.0, f64::max);
    // Long error bars must not make all bars short, so they are cut at twice the largest value.
    let largest = points().map(|(_, point)| point.y).fold(0.0, f64::max);
    let max = if largest > 0.0 { max.min(2.0 * largest) } else { 1.0 };
    let axis = Axis { min: 0.0, max, is_log: false, start: NAME_WIDTH, end: WIDTH - VALUE_WIDTH };
    let label = escape(&format!("{} {}", plot.title, plot.unit));
    let mut svg = format!(r#"<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">"#);
    for (place, (series, point)) in points().enumerate() {
        let top = place as f64 * BAR_STEP + 4.0;
        let (middle, end) = (top + BAR_THICKNESS / 2.0, axis.position(point.y));
        let width = (end - NAME_WIDTH).max(1.0);
        let class = match (series.is_own, series.is_original) {
            (true, _) => "c0",
            (_, true) => "original",
            _ => "peer",
        };
        let name = shortened(&series.name);
        let _ = write!(
            svg,
            r#"<text class="name end" x="{:.1}" y="{:.1}">{}</text>"#,
            NAME_WIDTH - 6.0,
            middle + 4.0,
            escape(&name)
        );
        let _ = write!(
            svg,
            r#"<g class="{class}"><rect class="bar point" x="{NAME_WIDTH}" y="{top:.1}" width="{width:.1}" "#
        );
        let _ = write!(svg, r#"height="{BAR_THICKNESS}" rx="2">"#);
        svg += &tooltip(plot, series, point);
        svg += "</rect>";
        let (low, high) = (axis.position(point.low), axis.position(point.high));
        if high - low > 1.0 {
            let _ =
                write!(svg, r#"<line class="error" x1="{low:.1}" x2="{high:.1}" y1="{middle:.1}" y2="{middle:.1}"/>"#);
        }
        let text_at = end.max(high) + 5.0;
        let _ = write!(
            svg,
            r#"</g><text class="tick start" x="{text_at:.1}" y="{:.1}">{}</text>"#,
            middle + 4.0,
            format_number(point.y)
        );
    }
    svg + "</svg>"
}

/// Cuts a long name in its middle, since its end often distinguishes subjects.
fn shortened(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    if letters.len() <= NAME_LETTERS {
        return name.to_owned();
    }
    let tail = &letters[letters.len() - NAME_LETTERS / 2..];
    letters[..NAME_LETTERS / 2].iter().chain(['…'].iter()).chain(tail).collect()
}

/// Formats the value of a tick, which is round, without useless zeros.
fn format_tick(value: f64) -> String {
    let (number, suffix) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{number:.4}");
    format!("{}{suffix}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(x: f64, y: f64) -> Point {
        Point { x, x_text: format!("{x}"), y, low: y * 0.9, high: y * 1.1 }
    }

    fn plot(shape: Shape, values: &[&[(f64, f64)]]) -> Plot {
        let series = values.iter().enumerate().map(|(color, values)| PlotSeries {
            name: format!("<subject> & {color}"),
            color,
            is_own: color == 0,
            is_original: color == 1,
            points: values.iter().map(|(x, y)| point(*x, *y)).collect(),
        });
        let (title, x_title, unit) = ("t<".to_owned(), "threads".to_owned(), "1/s".to_owned());
        Plot { title, shape, x_title, unit, series: series.collect() }
    }

    /// Each drawing must be well-formed XML, must contain as many points as its series, and must keep all of them
    /// within its frame.
    #[test]
    fn every_point_is_drawn_within_the_frame() {
        let values: [&[(f64, f64)]; 3] = [&[(1.0, 5.0), (2.0, 500.0), (200.0, 1.0)], &[(1.0, 0.0)], &[]];
        for shape in [Shape::Lines, Shape::Bars] {
            let svg = draw(&plot(shape, &values));
            let document = roxmltree::Document::parse(&svg).expect("it is well-formed");
            let number = |node: roxmltree::Node<'_, '_>, name| {
                node.attribute(name).and_then(|text: &str| text.parse::<f64>().ok())
            };
            let is_point = |node: &roxmltree::Node<'_, '_>| {
                node.attribute("class").is_some_and(|class| class.split(' ').any(|class| class == "point"))
            };
            let points: Vec<_> = document.descendants().filter(is_point).collect();
            assert_eq!(points.len(), 4, "{shape:?}");
            for node in points {
                let x = number(node, "cx").or(number(node, "x")).expect("it has a place");
                assert!((0.0..=WIDTH).contains(&x), "{x}");
                let title = node.children().next().and_then(|title| title.text()).expect("a tooltip");
                assert!(title.starts_with("<subject> & "), "{title}");
            }
        }
    }

    /// Ticks must be round, lie within the axis, and be at least two.
    #[test]
    fn ticks_are_round() {
        let axis = |min, max, is_log| Axis { min, max, is_log, start: 0.0, end: 1.0 };
        assert_eq!(axis(0.0, 10.0, false).ticks(), [0.0, 2.5, 5.0, 7.5, 10.0]);
        assert_eq!(axis(0.0, 0.0037, false).ticks().len(), 4);
        assert_eq!(axis(1.0, 100.0, true).ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!([0.0, 0.25, 1500.0, 20_000.0, 2.5e6].map(format_tick), ["0", "0.25", "1500", "20k", "2.5M"]);
        assert_eq!(axis(1.0, 100.0, true).position(10.0), 0.5);
        assert_eq!(axis(3.0, 3.0, false).position(3.0), 0.5);
        assert_eq!(shortened("original-2013: with the patch of 2013").chars().count(), 23);
    }
}
