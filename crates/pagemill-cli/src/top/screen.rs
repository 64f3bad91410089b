//! Draws the screen, and the page of plain text that `--once` prints.

use super::app::{App, Mode, SORT_KEYS, View};
use super::lists::{self, MOUNT_COLUMNS, SELECTED, SLAB_COLUMNS};
use super::rows::Kind;
use super::table::COLUMNS;
use super::{details, header};
use crate::columns::short_bytes;
use crate::statistics::{process_count_text, resident_bytes};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Clear, Widget};

/// The smallest screen that has room for the header and a list. A smaller one shows one line.
const MIN_WIDTH: u16 = 22;
const MIN_HEIGHT: u16 = 5;

/// Maximum number of mounts below the list of processes, and of slab caches on a page of text.
const MAX_MOUNTS_BELOW: usize = 3;
const MAX_SLABS_ON_PAGE: usize = 10;

const KEY: Style = Style::new();
const KEY_MEANING: Style = Style::new().fg(Color::Black).bg(Color::Cyan);
const PROMPT: Style = Style::new().fg(Color::Black).bg(Color::Yellow);
const HEADING: Style = Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD);

/// What the screen says if nothing runs on Pagemill.
const NOTHING: [&str; 5] = [
    "No process of yours is on Pagemill, and nothing is mounted.",
    "",
    "  pagemill run -- PROGRAM         runs a program on Pagemill",
    "  pagemill mount DIR --size 1G    mounts a RAM file system (root)",
    "",
];

/// Draws the whole screen.
pub fn draw(app: &mut App, area: Rect, buffer: &mut Buffer) {
    if area.width < MIN_WIDTH || area.height < MIN_HEIGHT {
        draw_tiny(app, area, buffer);
        return;
    }
    let footer = Rect { y: area.bottom() - 1, height: 1, ..area };
    let above = Rect { height: area.height - 1, ..area };
    match app.mode.clone() {
        Mode::Help => draw_text(app, &help_lines(), above, buffer),
        Mode::Details(_) => {
            let lines = details::lines(app, area.width.into());
            draw_text(app, &lines, above, buffer);
        }
        mode => {
            let list = draw_header(app, above, buffer);
            draw_list(app, list, buffer);
            if let Mode::SortMenu(selected) = mode {
                draw_menu(selected, list, buffer);
            }
        }
    }
    draw_footer(app, footer, buffer);
}

/// Draws one line: the sums.
fn draw_tiny(app: &App, area: Rect, buffer: &mut Buffer) {
    let processes: Vec<_> = app.rows.iter().filter(|row| row.kind != Kind::Run).collect();
    let resident = processes.iter().fold(0u64, |sum, row| sum.saturating_add(resident_bytes(&row.figures)));
    let text = format!("{} {}", short_bytes(resident), process_count_text(processes.len()));
    if area.height > 0 {
        buffer.set_stringn(area.x, area.y, text, area.width.into(), Style::new());
    }
}

/// Draws the header. On a low screen, draws only its first lines. Returns the area below it.
fn draw_header(app: &App, area: Rect, buffer: &mut Buffer) -> Rect {
    let lines = header::lines(app, area.width.into());
    let most = match area.height {
        0..10 => 1,
        10..16 => 3,
        _ => lines.len() + 1,
    };
    let shown = lines.iter().take(most);
    let mut y = area.y;
    for line in shown {
        buffer.set_line(area.x, y, line, area.width);
        y += 1;
    }
    // An empty line sets the table apart.
    y += u16::from(area.height >= 20);
    Rect { y, height: area.bottom() - y, ..area }
}

fn draw_list(app: &mut App, area: Rect, buffer: &mut Buffer) {
    match app.view {
        View::Processes => draw_processes(app, area, buffer),
        View::Slabs => {
            app.scroll_to_cursor(usize::from(area.height).saturating_sub(1));
            let rows: Vec<_> = app.answers.slabs.iter().map(lists::slab_cells).collect();
            lists::draw_texts(&SLAB_COLUMNS, &rows, area, buffer, app.top_line, Some(app.cursor));
            if rows.is_empty() {
                draw_note(&["No process of yours has slab caches."], area, buffer);
            }
        }
        View::Mounts => {
            app.scroll_to_cursor(usize::from(area.height).saturating_sub(1));
            let rows: Vec<_> = app.answers.mounts.iter().map(lists::mount_cells).collect();
            lists::draw_texts(&MOUNT_COLUMNS, &rows, area, buffer, app.top_line, Some(app.cursor));
            if rows.is_empty() {
                draw_note(
                    &["Nothing is mounted: pagemill mount DIR --size 1G (root), pagemill run --ram DIR"],
                    area,
                    buffer,
                );
            }
        }
    }
}

/// Draws the processes and, on a high screen, the first mounts below them.
fn draw_processes(app: &mut App, area: Rect, buffer: &mut Buffer) {
    let mounts: Vec<_> = app.answers.mounts.iter().take(MAX_MOUNTS_BELOW).map(lists::mount_cells).collect();
    let below = if mounts.is_empty() || area.height < 14 { 0 } else { mounts.len() as u16 + 1 };
    let list = Rect { height: area.height - below, ..area };
    app.scroll_to_cursor(usize::from(list.height).saturating_sub(1));
    lists::draw_processes(app, list, buffer, app.top_line, Some(app.cursor));
    if app.shown.is_empty() && app.sample.is_some() {
        draw_note(&empty_note(app), list, buffer);
    }
    if below > 0 {
        let area = Rect { y: list.bottom(), height: below, ..area };
        lists::draw_texts(&MOUNT_COLUMNS, &mounts, area, buffer, 0, None);
    }
}

/// Returns why the list of processes is empty.
fn empty_note(app: &App) -> Vec<&'static str> {
    match (app.rows.is_empty(), app.answers.mounts.is_empty()) {
        (false, _) => vec!["No process matches the filter: / changes it."],
        (true, false) => vec!["No process of yours is on Pagemill: pagemill run -- PROGRAM"],
        (true, true) => NOTHING.to_vec(),
    }
}

/// Draws lines below the title of an empty list.
fn draw_note(lines: &[&str], area: Rect, buffer: &mut Buffer) {
    for (y, line) in (area.y + 2..area.bottom()).zip(lines) {
        buffer.set_stringn(area.x + 1, y, line, usize::from(area.width).saturating_sub(1), Style::new());
    }
}

/// Draws a text that can be scrolled.
fn draw_text(app: &mut App, lines: &[Line<'_>], area: Rect, buffer: &mut Buffer) {
    app.bound_scrolling(lines.len(), area.height.into());
    for (y, line) in (area.y..area.bottom()).zip(&lines[app.top_line..]) {
        buffer.set_line(area.x, y, line, area.width);
    }
}

fn draw_menu(selected: usize, list: Rect, buffer: &mut Buffer) {
    let area = Rect { width: list.width.min(58), height: list.height.min(COLUMNS.len() as u16 + 1), ..list };
    Clear.render(area, buffer);
    let lines = usize::from(area.height).saturating_sub(1);
    let top = selected.saturating_sub(lines.saturating_sub(1));
    buffer.set_style(Rect { height: 1, ..area }, KEY_MEANING);
    buffer.set_stringn(area.x, area.y, "Sort by (Enter selects, Esc cancels)", area.width.into(), KEY_MEANING);
    for (at, spec) in COLUMNS.iter().enumerate().skip(top).take(lines) {
        let y = area.y + 1 + (at - top) as u16;
        let text = format!(" {:<8} {}", spec.title, spec.meaning);
        buffer.set_stringn(area.x, y, text, area.width.into(), Style::new());
        if at == selected {
            buffer.set_style(Rect { y, height: 1, ..area }, SELECTED);
        }
    }
}

fn draw_footer(app: &App, line: Rect, buffer: &mut Buffer) {
    let prompt = match &app.mode {
        Mode::Filter => {
            Some(format!("Filter: {}_   Enter keeps it, Esc restores the previous one", app.arrangement.filter))
        }
        Mode::Interval(text) => {
            Some(format!("Seconds between samples (0.1 to 3600, now {}): {text}_", app.interval.as_secs_f64()))
        }
        _ => None,
    };
    if let Some(prompt) = prompt {
        buffer.set_style(line, PROMPT);
        buffer.set_stringn(line.x, line.y, prompt, line.width.into(), PROMPT);
        return;
    }
    let next_view = match app.view {
        View::Processes => "Slabs",
        View::Slabs => "Mounts",
        View::Mounts => "Processes",
    };
    let tree = if app.arrangement.is_tree { "List" } else { "Tree" };
    let scrolled = match app.mode {
        Mode::Help | Mode::Details(_) if app.all_lines > app.page_lines => "Scroll",
        _ => "",
    };
    let keys: &[(&str, &str)] = match app.mode {
        Mode::Help | Mode::Details(_) => &[("Esc", "Back"), ("↑↓ PgUp PgDn", scrolled)],
        _ => &[
            ("F1", "Help"),
            ("F4", "Filter"),
            ("F5", tree),
            ("F6", "SortBy"),
            ("Enter", "Details"),
            ("Tab", next_view),
            ("Space", "Pause"),
            ("F10", "Quit"),
        ],
    };
    let mut x = line.x;
    for (key, meaning) in keys.iter().filter(|(_, meaning)| !meaning.is_empty()) {
        let rest = |x: u16| usize::from(line.right().saturating_sub(x));
        (x, _) = buffer.set_stringn(x, line.y, key, rest(x), KEY);
        (x, _) = buffer.set_stringn(x, line.y, format!("{meaning} "), rest(x), KEY_MEANING);
    }
}

fn help_lines() -> Vec<Line<'static>> {
    let mut lines = vec![Line::styled("pagemill top: processes, trees and mounts on Pagemill", HEADING), Line::raw("")];
    let keys = [
        ("↑ ↓ PgUp PgDn Home End", "move the cursor"),
        ("Enter", "all figures of the process or tree; Esc returns"),
        ("Tab", "next list: processes, slab caches, mounts"),
        ("/  F3  F4", "show only names or process ids that contain a text"),
        ("t  F5", "trees of `pagemill run`, or a list of processes"),
        ("F6", "choose the column to sort by"),
        ("<  >", "sort by the previous or next column"),
        ("I  R", "reverse the order"),
        ("s  d", "change the interval"),
        ("Space", "pause"),
        ("Ctrl-L", "draw the whole screen again"),
        ("q  F10  Ctrl-C", "quit"),
    ];
    let sorts: Vec<(String, String)> =
        SORT_KEYS.iter().map(|(key, _, meaning)| (key.to_string(), format!("sort by {meaning}"))).collect();
    let keys = keys.iter().map(|(key, meaning)| ((*key).to_owned(), (*meaning).to_owned()));
    lines.extend(keys.chain(sorts).map(|(key, meaning)| Line::raw(format!("  {key:<24} {meaning}"))));
    lines.extend([Line::raw(""), Line::styled("Columns (a wide screen shows more)", HEADING)]);
    lines.extend(COLUMNS.iter().map(|spec| Line::raw(format!("  {:<24} {}", spec.title, spec.meaning))));
    lines.extend([
        Line::raw(""),
        Line::styled("Words", HEADING),
        Line::raw(
            "  Names in grey are small programs of a `run`: the C library serves them, and they have no figures.",
        ),
        Line::raw(
            "  WHY: age (free for long), new (room for new memory), program (malloc_trim), sibling (of the tree),",
        ),
        Line::raw("  limit (run --limit), group (control group), machine, stall (PSI), kernel (took offered memory)."),
        Line::raw("  GIVE and NET are measured by the process every 5 s; its details say when."),
    ]);
    lines
}

/// Returns one page of plain text: the header, all processes, all mounts, and the slab caches with most unused memory.
pub fn page(app: &App, width: u16) -> String {
    let header = header::lines(app, width.into());
    let mounts: Vec<_> = app.answers.mounts.iter().map(lists::mount_cells).collect();
    let slabs: Vec<_> = app.answers.slabs.iter().take(MAX_SLABS_ON_PAGE).map(lists::slab_cells).collect();
    let note = if app.shown.is_empty() { empty_note(app) } else { Vec::new() };
    // A buffer has at most 65,535 cells.
    let mut text = draw_page(width, header.len(), |area, buffer| {
        for (line, y) in header.iter().zip(area.y..) {
            buffer.set_line(area.x, y, line, area.width);
        }
    });
    text.push('\n');
    if note.is_empty() {
        let lines_of_part = usize::from(u16::MAX / width.max(1)).saturating_sub(1).max(1);
        for top in (0..app.shown.len()).step_by(lines_of_part) {
            let lines = lines_of_part.min(app.shown.len() - top);
            let part = draw_page(width, lines + 1, |area, buffer| lists::draw_processes(app, area, buffer, top, None));
            // Only the first part has the line with the titles.
            text += if top == 0 { &part } else { part.split_once('\n').map_or("", |(_, rest)| rest) };
        }
    }
    for line in note {
        text += &format!("{line}\n");
    }
    for (columns, rows) in [(&MOUNT_COLUMNS[..], mounts), (&SLAB_COLUMNS[..], slabs)] {
        if !rows.is_empty() {
            text.push('\n');
            let draw = |area, buffer: &mut Buffer| lists::draw_texts(columns, &rows, area, buffer, 0, None);
            text += &draw_page(width, rows.len() + 1, draw);
        }
    }
    text
}

/// Draws into a buffer of this size. Returns its lines without colours and without spaces at their ends.
fn draw_page(width: u16, lines: usize, draw: impl FnOnce(Rect, &mut Buffer)) -> String {
    let area = Rect::new(0, 0, width, lines as u16);
    let mut buffer = Buffer::empty(area);
    draw(area, &mut buffer);
    text_of(&buffer)
}

/// Returns the characters of a buffer as lines.
pub fn text_of(buffer: &Buffer) -> String {
    let mut text = String::new();
    for cells in buffer.content().chunks(buffer.area.width.max(1).into()) {
        let line: String = cells.iter().map(|cell| cell.symbol()).collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}
