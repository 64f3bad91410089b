//! The state of the screen, and what the keys do. Draws nothing.

use super::inspect::Answers;
use super::rows::{Row, Tracker};
use super::sample::Sample;
use super::table::{Arrangement, COLUMNS, Column};
use pagemill_sys::process::Identity;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::time::Duration;

/// The shortest and the longest interval between two samples.
pub const INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// The list that fills the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    Processes,
    Slabs,
    Mounts,
}

/// What the keys control at present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    List,
    Help,
    /// The menu of columns, with the index of the selected one.
    SortMenu(usize),
    /// A text is entered for the filter.
    Filter,
    /// A number of seconds is entered for the interval.
    Interval(String),
    /// All figures of one process or tree.
    Details(Identity),
}

/// What the event loop must do after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    None,
    Quit,
    /// Stop this process as Ctrl-Z does.
    Suspend,
    /// Take a sample at once.
    Sample,
    /// Write all cells of the screen anew.
    Redraw,
}

pub struct App {
    pub interval: Duration,
    pub is_paused: bool,
    pub view: View,
    pub mode: Mode,
    pub arrangement: Arrangement,
    pub tracker: Tracker,
    pub sample: Option<Sample>,
    pub answers: Answers,
    pub rows: Vec<Row>,
    /// The shown rows, as indices in `rows`, each with its depth in the tree.
    pub shown: Vec<(usize, usize)>,
    selected: Option<Identity>,
    /// Position of the selected line; the selected process may move to another one.
    pub cursor: usize,
    /// Number of lines of the list that the last drawing showed, and the number of all lines.
    pub page_lines: usize,
    pub all_lines: usize,
    /// First shown line of the list, of the help or of the details.
    pub top_line: usize,
    /// The filter before it was edited.
    previous_filter: String,
    /// The last rows of the process in the details, also after it has ended.
    pub details_row: Option<Row>,
}

impl App {
    pub fn new(interval: Duration, arrangement: Arrangement) -> Self {
        Self {
            interval,
            is_paused: false,
            view: View::Processes,
            mode: Mode::List,
            arrangement,
            tracker: Tracker::default(),
            sample: None,
            answers: Answers::default(),
            rows: Vec::new(),
            shown: Vec::new(),
            selected: None,
            cursor: 0,
            page_lines: 0,
            all_lines: 0,
            top_line: 0,
            previous_filter: String::new(),
            details_row: None,
        }
    }

    /// Replaces the sample. The selection stays at the same process.
    pub fn take_sample(&mut self, sample: Sample) {
        self.rows = self.tracker.update(&sample);
        self.sample = Some(sample);
        if let Mode::Details(identity) = self.mode
            && let Some(row) = self.rows.iter().find(|row| row.identity == identity)
        {
            self.details_row = Some(row.clone());
        }
        self.arrange();
    }

    pub fn take_answers(&mut self, answers: Answers) {
        self.answers = answers;
    }

    /// Returns the process whose details are shown.
    pub fn focus(&self) -> Option<Identity> {
        match self.mode {
            Mode::Details(identity) => Some(identity),
            _ => None,
        }
    }

    /// Returns whether the process in the details has ended.
    pub fn has_focus_ended(&self) -> bool {
        self.focus().is_some_and(|identity| self.rows.iter().all(|row| row.identity != identity))
    }

    /// Arranges the rows anew, after a new sample or another order. The cursor follows the selected process; if that has
    /// ended, the cursor stays at its line.
    fn arrange(&mut self) {
        self.shown = self.arrangement.arrange(&self.rows);
        if self.view == View::Processes {
            let is_selected = |(at, _): &(usize, usize)| Some(self.rows[*at].identity) == self.selected;
            if let Some(place) = self.shown.iter().position(is_selected) {
                self.cursor = place;
            }
            self.move_cursor(0);
        }
    }

    /// Returns the row at the cursor.
    pub fn selected_row(&self) -> Option<&Row> {
        self.shown.get(self.cursor).map(|(at, _)| &self.rows[*at])
    }

    fn line_count(&self) -> usize {
        match self.view {
            View::Processes => self.shown.len(),
            View::Slabs => self.answers.slabs.len(),
            View::Mounts => self.answers.mounts.len(),
        }
    }

    fn move_cursor(&mut self, lines: isize) {
        let last = self.line_count().saturating_sub(1);
        self.cursor = self.cursor.saturating_add_signed(lines).min(last);
        if self.view == View::Processes {
            self.selected = self.selected_row().map(|row| row.identity);
        }
    }

    /// Moves the list so that the cursor is among its `lines` lines. Called before a list is drawn.
    pub fn scroll_to_cursor(&mut self, lines: usize) {
        self.page_lines = lines;
        self.cursor = self.cursor.min(self.line_count().saturating_sub(1));
        let lowest = self.cursor.saturating_sub(lines.saturating_sub(1));
        // No line stays empty while lines above are hidden.
        let last_top = self.line_count().saturating_sub(lines);
        self.top_line = self.top_line.clamp(lowest, self.cursor.max(lowest)).min(last_top.max(lowest));
    }

    /// Bounds the scrolling of a text with `all` lines, of which `lines` are visible. Called before the text is drawn.
    pub fn bound_scrolling(&mut self, all: usize, lines: usize) {
        (self.page_lines, self.all_lines) = (lines, all);
        self.top_line = self.top_line.min(all.saturating_sub(lines));
    }

    pub fn press(&mut self, key: KeyEvent) -> Effect {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => return Effect::Quit,
            KeyCode::Char('z') if is_control => return Effect::Suspend,
            KeyCode::Char('l') if is_control => return Effect::Redraw,
            KeyCode::F(10) if self.mode == Mode::List => return Effect::Quit,
            _ => {}
        }
        match std::mem::replace(&mut self.mode, Mode::List) {
            Mode::List => self.press_in_list(key.code),
            mode @ (Mode::Help | Mode::Details(_)) => self.press_in_text(key.code, mode),
            Mode::SortMenu(at) => self.press_in_menu(key.code, at),
            Mode::Filter => self.press_in_filter(key.code),
            Mode::Interval(text) => self.press_in_interval(key.code, text),
        }
    }

    fn press_in_list(&mut self, code: KeyCode) -> Effect {
        let page = self.page_lines.max(1) as isize;
        match code {
            KeyCode::Char('q') => return Effect::Quit,
            KeyCode::Up => self.move_cursor(-1),
            KeyCode::Down => self.move_cursor(1),
            KeyCode::PageUp => self.move_cursor(-page),
            KeyCode::PageDown => self.move_cursor(page),
            KeyCode::Home => self.move_cursor(isize::MIN),
            KeyCode::End => self.move_cursor(isize::MAX),
            KeyCode::Tab => self.show_view(match self.view {
                View::Processes => View::Slabs,
                View::Slabs => View::Mounts,
                View::Mounts => View::Processes,
            }),
            KeyCode::BackTab => self.show_view(match self.view {
                View::Processes => View::Mounts,
                View::Slabs => View::Processes,
                View::Mounts => View::Slabs,
            }),
            KeyCode::Char('h' | '?') | KeyCode::F(1) => self.open(Mode::Help),
            KeyCode::Char('/' | '\\') | KeyCode::F(3 | 4) => {
                self.previous_filter.clone_from(&self.arrangement.filter);
                self.mode = Mode::Filter;
            }
            KeyCode::Char('s' | 'd') => self.mode = Mode::Interval(String::new()),
            KeyCode::Char('t') | KeyCode::F(5) => {
                self.arrangement.is_tree ^= true;
                self.arrange();
            }
            KeyCode::F(6) => self.mode = Mode::SortMenu(self.arrangement.sort as usize),
            KeyCode::Char('>') => self.sort_by_neighbour(1),
            KeyCode::Char('<') => self.sort_by_neighbour(COLUMNS.len() - 1),
            KeyCode::Char('I' | 'R') => {
                self.arrangement.is_reversed ^= true;
                self.arrange();
            }
            KeyCode::Char(' ') => {
                self.is_paused ^= true;
                return if self.is_paused { Effect::None } else { Effect::Sample };
            }
            KeyCode::Enter => {
                if let Some(row) = self.selected_row().filter(|_| self.view == View::Processes).cloned() {
                    self.open(Mode::Details(row.identity));
                    self.details_row = Some(row);
                    return if self.is_paused { Effect::None } else { Effect::Sample };
                }
            }
            KeyCode::Char(letter) => {
                if let Some((_, column, _)) = SORT_KEYS.iter().find(|(key, ..)| *key == letter) {
                    self.sort_by(*column);
                }
            }
            _ => {}
        }
        Effect::None
    }

    fn show_view(&mut self, view: View) {
        (self.view, self.cursor, self.top_line) = (view, 0, 0);
        self.arrange();
    }

    /// Shows a text from its first line.
    fn open(&mut self, mode: Mode) {
        (self.mode, self.top_line) = (mode, 0);
    }

    fn sort_by(&mut self, column: Column) {
        (self.arrangement.sort, self.arrangement.is_reversed) = (column, false);
        self.arrange();
    }

    fn sort_by_neighbour(&mut self, steps: usize) {
        let at = (self.arrangement.sort as usize + steps) % COLUMNS.len();
        self.sort_by(COLUMNS[at].column);
    }

    fn press_in_text(&mut self, code: KeyCode, mode: Mode) -> Effect {
        let page = self.page_lines.max(1);
        match code {
            KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q' | 'h' | '?') | KeyCode::F(1 | 10) | KeyCode::Left => {
                self.top_line = 0;
                return Effect::None;
            }
            KeyCode::Up => self.top_line = self.top_line.saturating_sub(1),
            KeyCode::Down => self.top_line = self.top_line.saturating_add(1),
            KeyCode::PageUp => self.top_line = self.top_line.saturating_sub(page),
            KeyCode::PageDown => self.top_line = self.top_line.saturating_add(page),
            KeyCode::Home => self.top_line = 0,
            KeyCode::End => self.top_line = usize::MAX,
            KeyCode::Char(' ') => self.is_paused ^= true,
            _ => {}
        }
        self.mode = mode;
        Effect::None
    }

    fn press_in_menu(&mut self, code: KeyCode, at: usize) -> Effect {
        let last = COLUMNS.len() - 1;
        self.mode = match code {
            KeyCode::Esc | KeyCode::Char('q') | KeyCode::F(6 | 10) => return Effect::None,
            KeyCode::Enter => {
                self.sort_by(COLUMNS[at].column);
                return Effect::None;
            }
            KeyCode::Up => Mode::SortMenu(at.saturating_sub(1)),
            KeyCode::Down => Mode::SortMenu((at + 1).min(last)),
            KeyCode::Home | KeyCode::PageUp => Mode::SortMenu(0),
            KeyCode::End | KeyCode::PageDown => Mode::SortMenu(last),
            _ => Mode::SortMenu(at),
        };
        Effect::None
    }

    fn press_in_filter(&mut self, code: KeyCode) -> Effect {
        match code {
            KeyCode::Enter => return Effect::None,
            KeyCode::Esc => {
                self.arrangement.filter.clone_from(&self.previous_filter);
                self.arrange();
                return Effect::None;
            }
            KeyCode::Backspace => drop(self.arrangement.filter.pop()),
            KeyCode::Char(letter) => self.arrangement.filter.push(letter),
            _ => {}
        }
        self.mode = Mode::Filter;
        self.arrange();
        Effect::None
    }

    fn press_in_interval(&mut self, code: KeyCode, mut text: String) -> Effect {
        match code {
            KeyCode::Esc => return Effect::None,
            KeyCode::Enter => {
                // An invalid number keeps the prompt open, in which the valid range is named.
                if let Ok(interval) = parse_interval(&text) {
                    self.interval = interval;
                    return Effect::Sample;
                }
            }
            KeyCode::Backspace => drop(text.pop()),
            KeyCode::Char(letter @ ('0'..='9' | '.')) if text.len() < 6 => text.push(letter),
            _ => {}
        }
        self.mode = Mode::Interval(text);
        Effect::None
    }
}

/// Keys that sort by a column, with the column and the name of the key's meaning. The first four are those of top(1).
pub const SORT_KEYS: [(char, Column, &str); 9] = [
    ('P', Column::Cpu, "CPU time"),
    ('M', Column::Resident, "resident memory"),
    ('N', Column::Pid, "process id"),
    ('U', Column::User, "user"),
    ('G', Column::Giveable, "giveable memory"),
    ('T', Column::Returned, "returned memory"),
    ('V', Column::Volatile, "volatile memory"),
    ('L', Column::Limit, "limit"),
    ('W', Column::Why, "why memory was returned"),
];

/// Parses a number of seconds.
///
/// # Errors
///
/// A message with the allowed range.
pub fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
    let interval = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let (least, most) = INTERVALS;
    interval.filter(|interval| (least..=most).contains(interval)).ok_or_else(|| {
        format!("'{text}' is not an interval: expected seconds from {} to {}", least.as_secs_f64(), most.as_secs())
    })
}
