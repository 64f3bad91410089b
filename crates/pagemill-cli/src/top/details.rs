//! All figures of one process or tree, as lines of a text.

use super::app::App;
use super::rows::{HISTORY_LEN, Kind, Row};
use crate::meminfo::{GIVEABLE_COUNTERS, OTHER_COUNTERS, RESIDENT_PARTS};
use crate::plot;
use crate::slabinfo::table::{self, Style as TableStyle};
use crate::statistics::{PURGE_CAUSES, RETURN_CAUSES, age_text, giveable_bytes, needed_bytes, resident_bytes};
use pagemill_core::stats::{Counter, CounterKind, TABLE, Unit};
use pagemill_core::units::Bytes;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

/// Lines of the plot of resident memory.
const PLOT_LINES: usize = 6;

/// Width of the amounts beside the plot.
const SCALE_WIDTH: usize = 10;

const HEADING: Style = Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD);
const WARNING: Style = Style::new().fg(Color::Yellow);

/// Returns the lines of the details; a note if there is no process.
pub fn lines(app: &App, width: usize) -> Vec<Line<'static>> {
    let Some(row) = &app.details_row else { return vec![Line::raw("no process")] };
    let mut lines = title(app, row);
    lines.extend(plot(app, row, width));
    let mut add = |heading: &str, rows: Vec<(String, String, String)>| {
        if !rows.is_empty() {
            lines.push(Line::styled(heading.to_owned(), HEADING));
            lines.extend(rows.into_iter().map(|(name, value, meaning)| {
                Line::from(vec![
                    Span::raw(format!("  {name:<22}")),
                    Span::styled(format!("{value:>10}"), Style::new().add_modifier(Modifier::BOLD)),
                    Span::raw(format!("  {meaning}")),
                ])
            }));
        }
    };
    add("Memory", memory_rows(row));
    add("Limits", limit_rows(app, row));
    add("Returned to the system", cause_rows(row, &RETURN_CAUSES));
    add("Purged volatile memory", cause_rows(row, &PURGE_CAUSES));
    add("Counters since the start", counter_rows(row));
    lines.extend(caches(app, row, width));
    lines
}

fn title(app: &App, row: &Row) -> Vec<Line<'static>> {
    let what = match row.kind {
        Kind::Run => "a tree of processes: the sums over them",
        Kind::Process => "on Pagemill",
        Kind::Small => "small: the C library serves it, so there are no figures (run --after)",
    };
    let text = format!("{} {}  user {}  {what}", row.identity.pid, row.name, row.user);
    let mut lines = vec![Line::styled(text, Style::new().add_modifier(Modifier::BOLD))];
    if app.has_focus_ended() {
        lines.push(Line::styled("it has ended; these are its last figures", WARNING));
    } else if let Some(why) = row.stale {
        let age = row.age.map_or_else(|| "never measured".to_owned(), age_text);
        lines.push(Line::styled(format!("measured figures {age}: {why}"), WARNING));
    } else if let Some(age) = row.age {
        lines.push(Line::raw(format!("measured figures {}", age_text(age))));
    }
    lines
}

/// Returns the plot of resident memory over the latest samples.
fn plot(app: &App, row: &Row, width: usize) -> Vec<Line<'static>> {
    let history = app.tracker.history(row.identity);
    let columns = width.saturating_sub(SCALE_WIDTH + 2).min(HISTORY_LEN);
    let shown = &history[history.len().saturating_sub(columns)..];
    let max = shown.iter().copied().max().unwrap_or(0);
    if columns < 8 || shown.is_empty() {
        return Vec::new();
    }
    let bars = plot::bars(shown, max, PLOT_LINES);
    let scale = |line: usize| match line {
        0 => Bytes(max).to_string(),
        line if line == PLOT_LINES / 2 => Bytes(max / 2).to_string(),
        _ => String::new(),
    };
    let mut lines: Vec<Line<'static>> = bars
        .into_iter()
        .enumerate()
        .map(|(line, bar)| {
            let axis = Span::raw(format!("{:>SCALE_WIDTH$} ┤", scale(line)));
            Line::from(vec![axis, Span::styled(format!("{bar:>columns$}"), Style::new().fg(Color::Green))])
        })
        .collect();
    let seconds = app.interval.as_secs_f64() * shown.len() as f64;
    let label = format!("resident memory, latest {} samples ({seconds:.0} s)", shown.len());
    lines.push(Line::raw(format!("{:>SCALE_WIDTH$} └{label:─^columns$}", "0 B")));
    lines
}

fn text_row(name: &str, value: String, meaning: &str) -> (String, String, String) {
    (name.to_owned(), value, meaning.to_owned())
}

fn memory_rows(row: &Row) -> Vec<(String, String, String)> {
    let figures = &row.figures;
    let bytes = |bytes: u64| Bytes(bytes).to_string();
    let mut rows = Vec::new();
    if row.kind != Kind::Small {
        rows.push(text_row("resident", bytes(resident_bytes(figures)), "on Pagemill"));
        rows.push(text_row("net", bytes(needed_bytes(figures)), "without what could be returned at once"));
        rows.push(text_row("giveable", bytes(giveable_bytes(figures).0), "could be returned at once (pagemill trim)"));
    }
    rows.push(text_row("kernel's count", bytes(row.kernel_bytes), "resident, with mapped files; shared memory too"));
    let counters = RESIDENT_PARTS.iter().chain(GIVEABLE_COUNTERS).chain(OTHER_COUNTERS);
    let counters = counters.filter(|(counter, _)| figures.get(*counter) > 0);
    rows.extend(counters.map(|(counter, meaning)| text_row(counter.name(), bytes(figures.get(*counter)), meaning)));
    rows
}

fn limit_rows(app: &App, row: &Row) -> Vec<(String, String, String)> {
    let mut rows = Vec::new();
    let limit = row.limit.or_else(|| {
        let run = app.rows.iter().find(|other| Some(other.identity) == row.run)?;
        run.limit
    });
    if let Some(limit) = limit {
        rows.push(text_row("run --limit", Bytes(limit).to_string(), "for the allocators of the whole tree"));
    }
    let details = app.answers.details.as_ref().filter(|details| details.identity == row.identity);
    if let Some(group) = details.and_then(|details| details.group.as_ref()) {
        let meaning = format!("{} in use by the control group {}", Bytes(group.used_bytes), group.name);
        rows.push(text_row("control group", Bytes(group.limit_bytes).to_string(), &meaning));
    }
    rows
}

/// Returns a row for each counter of a cause that is not 0.
fn cause_rows(row: &Row, causes: &[(Counter, &str)]) -> Vec<(String, String, String)> {
    let shown = causes.iter().filter(|(counter, _)| row.figures.get(*counter) > 0);
    shown
        .map(|(counter, word)| {
            let meaning = TABLE[*counter as usize].meaning;
            text_row(&format!("for {word}"), Bytes(row.figures.get(*counter)).to_string(), meaning)
        })
        .collect()
}

fn counter_rows(row: &Row) -> Vec<(String, String, String)> {
    let is_cause = |counter: Counter| RETURN_CAUSES.iter().chain(&PURGE_CAUSES).any(|(cause, _)| *cause == counter);
    let shown = TABLE.iter().filter(|of| {
        let is_count = of.kind == CounterKind::Sum || (of.kind == CounterKind::Gauge && of.unit == Unit::Count);
        is_count && row.figures.get(of.counter) > 0 && !is_cause(of.counter)
    });
    shown
        .map(|of| {
            let value = row.figures.get(of.counter);
            let text = if of.unit == Unit::Bytes { Bytes(value).to_string() } else { value.to_string() };
            text_row(of.name, text, of.meaning)
        })
        .collect()
}

/// Returns the page caches and slab caches that the process reported.
fn caches(app: &App, row: &Row, width: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let mut add = |heading: &str, text: String| {
        if !text.trim().is_empty() {
            lines.push(Line::styled(heading.to_owned(), HEADING));
            lines.extend(text.lines().map(|line| Line::raw(line.to_owned())));
        }
    };
    if let Some(details) = app.answers.details.as_ref().filter(|details| details.identity == row.identity) {
        add("Page caches", details.caches.text());
    }
    let infos: Vec<_> =
        app.answers.slabs.iter().filter(|slab| slab.pid == row.identity.pid).map(|slab| &slab.info).collect();
    if !infos.is_empty() {
        let style = TableStyle { is_exact: false, max_columns: Some(width) };
        add("Slab caches, those with most unused memory first", table::text_of(&infos, style));
    }
    lines
}
