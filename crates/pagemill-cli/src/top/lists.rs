//! The lists of processes, slab caches and mounts.

use super::app::App;
use super::header::{GIVEABLE, NET, VOLATILE};
use super::inspect::SlabRow;
use super::rows::{Kind, Row};
use super::table::Column;
use crate::columns::short_bytes;
use crate::plot;
use crate::slabinfo::table::{in_use_bytes, percent};
use crate::statistics::resident_bytes;
use pagemill_tmpfs::status::Status;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

const TITLE: Style = Style::new().fg(Color::Black).bg(Color::Green);
const SORTED_TITLE: Style = Style::new().fg(Color::Black).bg(Color::Cyan);
pub const SELECTED: Style = Style::new().fg(Color::Black).bg(Color::Cyan);
const FULL: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
const ACTIVE: Style = Style::new().fg(Color::Magenta).add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().fg(Color::DarkGray);

/// Writes a text that is cut off or filled up to `width` characters.
fn put(buffer: &mut Buffer, (x, y): (u16, u16), width: u16, text: &str, is_right_aligned: bool, style: Style) {
    let len = text.chars().count().min(width.into()) as u16;
    let from = if is_right_aligned { x + width - len } else { x };
    buffer.set_style(Rect { x, y, width, height: 1 }, style);
    buffer.set_stringn(from, y, text, width.into(), style);
}

/// Draws the title line and as many processes as fit, from the line `top`. The line of the `cursor` is highlighted.
pub fn draw_processes(app: &App, area: Rect, buffer: &mut Buffer, top: usize, cursor: Option<usize>) {
    let columns = Column::fitting(area.width);
    buffer.set_style(Rect { height: 1, ..area }, TITLE);
    let mut x = area.x;
    for (column, width) in &columns {
        let spec = column.spec();
        let style = if *column == app.arrangement.sort { SORTED_TITLE } else { TITLE };
        put(buffer, (x, area.y), (*width).min(area.right() - x), spec.title, spec.is_right_aligned, style);
        x += width + 1;
    }
    let lines = usize::from(area.height).saturating_sub(1);
    for (line, (at, depth)) in app.shown.iter().enumerate().skip(top).take(lines) {
        let y = area.y + 1 + (line - top) as u16;
        draw_process(app, (&app.rows[*at], *depth), &columns, Rect { y, height: 1, ..area }, buffer);
        if cursor == Some(line) {
            buffer.set_style(Rect { y, height: 1, ..area }, SELECTED);
        }
    }
}

fn draw_process(app: &App, (row, depth): (&Row, usize), columns: &[(Column, u16)], line: Rect, buffer: &mut Buffer) {
    let mut x = line.x;
    for (column, width) in columns {
        let width = (*width).min(line.right() - x);
        let text = match column {
            Column::Name if depth > 0 => format!("{}└ {}", "  ".repeat(depth.min(8) - 1), row.name),
            Column::History => {
                let history = app.tracker.history(row.identity);
                let text = plot::spark(&history, width.into());
                format!("{text:>width$}", width = width.into())
            }
            column => column.text(row),
        };
        put(buffer, (x, line.y), width, &text, column.spec().is_right_aligned, style_of(*column, row));
        x += width + 1;
    }
}

fn style_of(column: Column, row: &Row) -> Style {
    let base = match row.kind {
        Kind::Run => Style::new().add_modifier(Modifier::BOLD),
        Kind::Process => Style::new(),
        Kind::Small => return DIM,
    };
    let is_zero = column.number(row) == Some(0);
    let is_near_limit = || row.limit.is_some_and(|limit| resident_bytes(&row.figures) > limit / 10 * 9);
    match column {
        Column::Limit | Column::Resident if is_near_limit() => FULL,
        Column::Pid | Column::Name | Column::Resident | Column::User => base,
        Column::Why if row.cause.is_some_and(|cause| cause.is_now) => ACTIVE,
        Column::Why => DIM,
        _ if is_zero => DIM,
        Column::Net | Column::History => base.patch(NET),
        Column::Giveable => base.patch(GIVEABLE),
        Column::Volatile | Column::Purged => base.patch(VOLATILE),
        Column::Returned => ACTIVE,
        _ => base,
    }
}

/// A column of a list of texts: its title, its width, and whether it is aligned to the right. The first column gets the
/// rest of the line.
pub type TextColumn = (&'static str, u16, bool);

pub const SLAB_COLUMNS: [TextColumn; 9] = [
    ("CACHE", 14, false),
    ("PID", 7, true),
    ("PROCESS", 15, false),
    ("OBJECTS", 8, true),
    ("SPACE", 5, true),
    ("UNUSED", 6, true),
    ("USED%", 5, true),
    ("SLABS", 6, true),
    ("PART%", 5, true),
];

pub const MOUNT_COLUMNS: [TextColumn; 8] = [
    ("MOUNT", 20, false),
    ("SIZE", 5, true),
    ("USED", 5, true),
    ("USED%", 5, true),
    ("VOLAT", 5, true),
    ("FILES", 6, true),
    ("PURGED", 6, true),
    ("BOUND BY", 12, false),
];

/// Returns the cells of a slab cache, in the order of [`SLAB_COLUMNS`].
pub fn slab_cells(row: &SlabRow) -> Vec<String> {
    let (info, total) = (&row.info, &row.info.total);
    let percent_text = |part, whole| percent(part, whole).map_or_else(|| "-".to_owned(), |share| share.to_string());
    vec![
        info.name.to_string(),
        row.pid.to_string(),
        row.process.clone(),
        info.active.to_string(),
        short_bytes(total.resident_bytes),
        short_bytes(row.unused_bytes()),
        percent_text(in_use_bytes(info), total.resident_bytes),
        total.slabs.to_string(),
        percent_text(total.partial.into(), total.slabs.into()),
    ]
}

/// Returns the cells of a mount, in the order of [`MOUNT_COLUMNS`].
pub fn mount_cells(mount: &Status) -> Vec<String> {
    let share = percent(mount.used_bytes, mount.size_bytes);
    let purged = mount.counts.purged_bytes.saturating_add(mount.counts.cut_bytes);
    let bound = match (&mount.controller_pid, &mount.bounded_by) {
        (None, _) => "no controller".to_owned(),
        (Some(_), bounded_by) => bounded_by.clone().unwrap_or_else(|| "its size".to_owned()),
    };
    vec![
        mount.mount_point.chars().map(|letter| if letter.is_control() { '?' } else { letter }).collect(),
        short_bytes(mount.size_bytes),
        short_bytes(mount.used_bytes),
        share.map_or_else(|| "-".to_owned(), |share| share.to_string()),
        short_bytes(mount.volatile_bytes),
        mount.volatile_files.to_string(),
        short_bytes(purged),
        bound,
    ]
}

/// Draws the title line and as many rows as fit, from the line `top`.
pub fn draw_texts(
    columns: &[TextColumn],
    rows: &[Vec<String>],
    area: Rect,
    buffer: &mut Buffer,
    top: usize,
    cursor: Option<usize>,
) {
    let fixed: u16 = columns.iter().skip(1).map(|(_, width, _)| width + 1).sum();
    let first = area.width.saturating_sub(fixed).max(columns[0].1.min(area.width));
    let mut draw_line = |y: u16, cells: &mut dyn Iterator<Item = &str>, style: Style| {
        let mut x = area.x;
        buffer.set_style(Rect { y, height: 1, ..area }, style);
        for (number, (cell, (_, width, is_right_aligned))) in cells.zip(columns).enumerate() {
            let width = if number == 0 { first } else { *width }.min(area.right().saturating_sub(x));
            put(buffer, (x, y), width, cell, *is_right_aligned, style);
            x = (x + width + 1).min(area.right());
        }
    };
    draw_line(area.y, &mut columns.iter().map(|(title, ..)| *title), TITLE);
    let lines = usize::from(area.height).saturating_sub(1);
    for (line, cells) in rows.iter().enumerate().skip(top).take(lines) {
        let style = if cursor == Some(line) { SELECTED } else { Style::new() };
        draw_line(area.y + 1 + (line - top) as u16, &mut cells.iter().map(String::as_str), style);
    }
}
