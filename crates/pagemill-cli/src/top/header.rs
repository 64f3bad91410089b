//! The lines above the table: sums over all processes, and the memory of the machine.

use super::app::App;
use super::rows::{Kind, Rates, Row};
use crate::columns::short_bytes;
use crate::statistics::{
    PURGE_CAUSES, RETURN_CAUSES, giveable_bytes, needed_bytes, process_count_text, resident_bytes,
};
use pagemill_core::stats::{Counter, Snapshot};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

/// Width of the names before the meters.
const LABEL_WIDTH: usize = 9;

const LABEL: Style = Style::new().fg(Color::Cyan);
const STRONG: Style = Style::new().add_modifier(Modifier::BOLD);
const WARNING: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
pub const NET: Style = Style::new().fg(Color::Green);
pub const GIVEABLE: Style = Style::new().fg(Color::Yellow);
pub const VOLATILE: Style = Style::new().fg(Color::Blue);

/// A part of a meter: its bytes, and how it is drawn.
type Part = (u64, char, Style);

/// Returns a line such as `Memory   [||||||::      1.2G/8G]`. `max` bytes fill the meter.
fn meter(label: &str, width: usize, parts: &[Part], max: u64, text: &str) -> Vec<Span<'static>> {
    let inner = width.saturating_sub(LABEL_WIDTH + 2).max(text.chars().count());
    let mut cells: Vec<(char, Style)> = Vec::with_capacity(inner);
    let mut sum = 0u64;
    for (bytes, letter, style) in parts {
        sum = sum.saturating_add(*bytes);
        let end = (u128::from(sum.min(max)) * inner as u128 / u128::from(max.max(1))) as usize;
        cells.resize(end.max(cells.len()), (*letter, *style));
    }
    cells.resize(inner, (' ', Style::new()));
    for (cell, letter) in cells.iter_mut().rev().zip(text.chars().rev()) {
        *cell = (letter, STRONG);
    }
    let mut spans = vec![Span::styled(format!("{label:<LABEL_WIDTH$}"), LABEL), Span::styled("[", STRONG)];
    for part in cells.chunk_by(|one, other| one.1 == other.1) {
        spans.push(Span::styled(part.iter().map(|(letter, _)| letter).collect::<String>(), part[0].1));
    }
    spans.push(Span::styled("]", STRONG));
    spans
}

/// The sums over all processes.
struct Sums {
    figures: Snapshot,
    rates: Rates,
    /// Resident memory of small programs, which the C library serves, as the kernel counts it.
    small_bytes: u64,
    processes: usize,
}

impl Sums {
    fn of(rows: &[Row]) -> Self {
        let mut sums = Self { figures: Snapshot::default(), rates: Rates::default(), small_bytes: 0, processes: 0 };
        for row in rows.iter().filter(|row| row.kind != Kind::Run) {
            sums.processes += 1;
            sums.figures.add(&row.figures);
            if let Some(rates) = &row.rates {
                sums.rates.add(rates);
            }
            if row.kind == Kind::Small {
                sums.small_bytes = sums.small_bytes.saturating_add(row.kernel_bytes);
            }
        }
        sums
    }
}

/// Returns the lines, the most important first.
pub fn lines(app: &App, width: usize) -> Vec<Line<'static>> {
    let sums = Sums::of(&app.rows);
    let mut lines = vec![title_line(app, &sums)];
    let Some(sample) = &app.sample else { return lines };
    let machine = &sample.machine;
    // The meters take two thirds of a wide line, and leave room for the words behind them.
    let meter_width = if width >= 70 { (width * 11 / 20).min(80) } else { width };
    let is_wide = width >= 70;

    let (resident, net) = (resident_bytes(&sums.figures), needed_bytes(&sums.figures));
    let (giveable, volatile) = (giveable_bytes(&sums.figures).0, volatile_bytes(&sums.figures));
    // This meter is always full: it shows which part of the resident memory could be returned.
    let parts = [(net, '|', NET), (resident - net, ':', GIVEABLE)];
    let mut pagemill = meter("Pagemill", meter_width, &parts, resident, &short_bytes(resident));
    if is_wide {
        pagemill.extend(words(&[("net", net, NET), ("give", giveable, GIVEABLE), ("volat", volatile, VOLATILE)]));
    }
    lines.push(Line::from(pagemill));

    let used = machine.total_bytes.saturating_sub(machine.available_bytes);
    let text = format!("{}/{}", short_bytes(used), short_bytes(machine.total_bytes));
    let is_short = machine.available_bytes < machine.total_bytes / 10;
    let style = if is_short { WARNING } else { NET };
    let mut memory = meter("Machine", meter_width, &[(used, '|', style)], machine.total_bytes, &text);
    if let Some(stalls) = machine.stalls.filter(|_| is_wide) {
        let text = format!("  stalls some {:.1} % full {:.1} %", stalls.some_percent, stalls.full_percent);
        memory.push(Span::styled(text, if stalls.some_percent >= 1.0 { WARNING } else { Style::new() }));
    }
    lines.push(Line::from(memory));
    if let Some(group) = &machine.group {
        let text = format!("{}/{}", short_bytes(group.used_bytes), short_bytes(group.limit_bytes));
        let is_short = group.used_bytes > group.limit_bytes / 10 * 9;
        let style = if is_short { WARNING } else { NET };
        let mut spans = meter("Group", meter_width, &[(group.used_bytes, '|', style)], group.limit_bytes, &text);
        if is_wide {
            spans.push(Span::raw(format!("  {}", group.name)));
        }
        lines.push(Line::from(spans));
    }
    lines.push(returned_line(&sums));
    lines
}

fn title_line(app: &App, sums: &Sums) -> Line<'static> {
    let runs = app.rows.iter().filter(|row| row.kind == Kind::Run).count();
    let mut text = format!("  {}", process_count_text(sums.processes));
    if runs > 0 {
        text += &format!(" in {runs} run{}", if runs == 1 { "" } else { "s" });
    }
    match app.answers.mounts.len() {
        0 => {}
        1 => text += ", 1 mount",
        count => text += &format!(", {count} mounts"),
    }
    text += &format!("  every {} s", app.interval.as_secs_f64());
    let mut spans = vec![Span::styled("pagemill top", STRONG), Span::raw(text)];
    if app.is_paused {
        spans.push(Span::styled("  PAUSED", WARNING));
    }
    if !app.arrangement.filter.is_empty() {
        spans.push(Span::styled(format!("  filter: {}", app.arrangement.filter), GIVEABLE));
    }
    let unreadable = app.sample.as_ref().map(|sample| sample.unreadable).unwrap_or_default();
    if unreadable.other_users > 0 {
        spans.push(Span::styled(format!("  not readable: {} of other users", unreadable.other_users), GIVEABLE));
    }
    if unreadable.other_versions > 0 {
        spans.push(Span::styled(format!("  not readable: {} of another version", unreadable.other_versions), GIVEABLE));
    }
    Line::from(spans)
}

fn returned_line(sums: &Sums) -> Line<'static> {
    let mut spans = vec![Span::styled(format!("{:<LABEL_WIDTH$}", "Returned"), LABEL)];
    spans.push(Span::styled(format!("{}/s", short_bytes(sums.rates.returned)), STRONG));
    let causes = causes_text(&RETURN_CAUSES, &sums.figures);
    if !causes.is_empty() {
        spans.push(Span::raw(format!("  so far for {causes}")));
    }
    let purged = sums.figures.get(Counter::RangeBytesPurged);
    if purged > 0 {
        let causes = causes_text(&PURGE_CAUSES, &sums.figures);
        spans.push(Span::styled(format!("  purged {} ({causes})", short_bytes(purged)), VOLATILE));
    }
    if sums.rates.read.max(sums.rates.written) > 0 {
        let (read, written) = (short_bytes(sums.rates.read), short_bytes(sums.rates.written));
        spans.push(Span::raw(format!("  files {read}/s in, {written}/s out")));
    }
    if sums.small_bytes > 0 {
        spans.push(Span::raw(format!("  small programs {}", short_bytes(sums.small_bytes))));
    }
    Line::from(spans)
}

/// Returns the causes with the bytes of each, the most important first. Causes without bytes are left out.
fn causes_text(of: &[(Counter, &str)], figures: &Snapshot) -> String {
    let mut causes: Vec<(u64, &str)> = of.iter().map(|(counter, word)| (figures.get(*counter), *word)).collect();
    causes.retain(|(bytes, _)| *bytes > 0);
    causes.sort_by_key(|(bytes, _)| u64::MAX - bytes);
    let words: Vec<String> = causes.iter().map(|(bytes, word)| format!("{word} {}", short_bytes(*bytes))).collect();
    words.join(", ")
}

fn volatile_bytes(figures: &Snapshot) -> u64 {
    figures.get(Counter::RangesBytes).saturating_add(figures.get(Counter::MarkedBytes))
}

fn words(amounts: &[(&str, u64, Style)]) -> Vec<Span<'static>> {
    let word = |(name, bytes, style): &(&str, u64, Style)| {
        [Span::raw(format!("  {name} ")), Span::styled(short_bytes(*bytes), *style)]
    };
    amounts.iter().flat_map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(spans: &[Span<'_>]) -> String {
        spans.iter().map(|span| &*span.content).collect()
    }

    /// A meter has the given width, is filled in proportion, and shows its text at the right end.
    #[test]
    fn meters_are_filled_in_proportion() {
        let parts = [(4, '|', NET), (2, ':', GIVEABLE)];
        assert_eq!(text(&meter("Memory", 23, &parts, 12, "6/12")), "Memory   [||||::  6/12]");
        assert_eq!(text(&meter("Memory", 23, &[(99, '|', NET)], 1, "")), "Memory   [||||||||||||]");
        assert_eq!(text(&meter("M", 0, &parts, 12, "long text")), "M        [long text]");
    }
}
