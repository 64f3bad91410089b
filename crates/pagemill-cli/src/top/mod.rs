//! `pagemill top`: shows all processes on Pagemill, the trees of `pagemill run`, and mounts, as top(1) and htop(1) do.
//!
//! A sample ([`sample`]) reads only what processes publish and `/proc`. [`rows`] compares it with the previous sample,
//! [`table`] has columns and order, [`app`] the state of the screen and the keys, [`screen`] draws. A thread ([`inspect`])
//! asks processes and controllers for what they do not publish.

mod app;
mod details;
mod header;
mod inspect;
mod json;
mod lists;
mod machine;
mod rows;
mod sample;
mod screen;
mod table;
mod terminal;
#[cfg(test)]
mod tests;

use crate::columns::DEFAULT_LINE_COLUMNS;
use crate::fail;
use crate::requests::Interrupt;
use app::{App, parse_interval};
use inspect::Chooser;
use sample::Sampler;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};
use table::{Arrangement, Column};
use terminal::FIRST_PAUSE;

/// Smallest width of a page, in characters.
const MIN_PAGE_COLUMNS: u16 = 40;

#[derive(clap::Args)]
#[command(after_help = "\
Keys: arrows, PgUp, PgDn; Enter shows all figures of a process; Tab shows slab caches and mounts; / filters; t shows \
trees or a list; F6, <, > and P, M, G, T, V, L, W choose the column to sort by; s changes the interval; Space pauses; h \
shows all keys and columns; q quits.\n\n\
If standard output is not a terminal, one page is printed, as with --once. Root sees the processes of all users.")]
pub struct Top {
    /// Print one page of plain text: all processes, trees and mounts, and the slab caches with most unused memory.
    #[arg(long)]
    once: bool,
    /// Print one JSON object per sample, until Ctrl-C; with --once or --count that many.
    #[arg(long)]
    json: bool,
    /// Seconds between two samples, 0.1 to 3600.
    #[arg(short, long, visible_short_alias = 'd', value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,
    /// End after this many samples.
    #[arg(short = 'n', long, value_name = "COUNT", conflicts_with = "once", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Sort by the column with this title, such as res, net, cpu or pid.
    #[arg(long, value_name = "COLUMN", default_value = "res")]
    sort: Column,
    /// Show only processes and trees whose name or process id contains this text.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    filter: String,
    /// Show a list of processes instead of trees.
    #[arg(long)]
    flat: bool,
}

impl Top {
    pub fn main(self) -> ExitCode {
        let arrangement =
            Arrangement { sort: self.sort, is_reversed: false, is_tree: !self.flat, filter: self.filter.clone() };
        let (mut app, mut sampler) = (App::new(self.interval, arrangement), Sampler::default());
        if io::stdout().is_terminal() && !self.once && !self.json {
            return terminal::run(&mut app, &mut sampler, self.count);
        }
        self.print(&mut app, &mut sampler)
    }

    /// Prints pages of text or JSON documents.
    fn print(&self, app: &mut App, sampler: &mut Sampler) -> ExitCode {
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        let count = match (self.once, self.count) {
            (true, _) => Some(1),
            (false, None) if !self.json => Some(1),
            (false, count) => count,
        };
        // The first sample only provides what the first document's rates need.
        app.take_sample(sampler.sample());
        let mut pause = self.interval.min(FIRST_PAUSE);
        let (mut chooser, mut printed) = (Chooser::default(), 0);
        while count.is_none_or(|count| printed < count) {
            if !sleep(pause, &interrupt) {
                return interrupt.end();
            }
            let sample = sampler.sample();
            let questions = chooser.choose(&sample, None, true);
            // Processes measure themselves now. Their figures are read after that.
            let Some(answers) = questions.ask(&interrupt) else { return interrupt.end() };
            app.take_answers(answers);
            app.take_sample(sampler.sample());
            let text = if self.json { format!("{}\n", json::document(app)) } else { screen::page(app, page_columns()) };
            let mut out = io::stdout().lock();
            match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                // The reader (head, less) may close the pipe early.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
                Err(error) => return fail(1, &format!("the page cannot be written: {error}")),
                Ok(()) => {}
            }
            (printed, pause) = (printed + 1, self.interval);
        }
        ExitCode::SUCCESS
    }
}

/// Returns the width of a page: that of the terminal, or 80 columns.
fn page_columns() -> u16 {
    let width = if io::stdout().is_terminal() { terminal_size::terminal_size() } else { None };
    width.map_or(DEFAULT_LINE_COLUMNS as u16, |(width, _)| width.0).max(MIN_PAGE_COLUMNS)
}

/// Sleeps. Returns `false` if a signal arrives.
fn sleep(pause: Duration, interrupt: &Interrupt) -> bool {
    let begun = Instant::now();
    while !interrupt.has_signal() {
        let left = pause.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return true;
        }
        thread::sleep(left.min(Duration::from_millis(20)));
    }
    false
}
