//! `pagemill status DIR`: shows the usage of a mount, its volatile memory, and what its controller has done.

use crate::columns::{self, Heading};
use crate::fail;
use crate::mount::{fuse, no_controller_message, report_error};
use pagemill_core::units::Bytes;
use pagemill_tmpfs::control::{self, RequestOutcome};
use pagemill_tmpfs::mounting;
use pagemill_tmpfs::status::{Counts, Status as State};
use std::cmp::Ordering;
use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Status {
    /// The mount point.
    dir: PathBuf,
    /// Repeat every second, until the file system is unmounted or Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// Print one JSON object (with --watch one per second) instead of a table.
    #[arg(long)]
    json: bool,
}

impl Status {
    pub fn main(&self) -> ExitCode {
        if let Some(found) = fuse::Found::at(&self.dir) {
            return self.main_of_fuse(found);
        }
        let (point, device) = match mounting::find_own_mount(&self.dir) {
            Ok(found) => found,
            Err(refusal) => return report_error(2, self.json, &refusal.to_string()),
        };
        loop {
            let state = match read_state(&point, device) {
                Ok(state) => state,
                Err(why) => return report_error(1, self.json, &why),
            };
            match self.write(&state) {
                Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                    return fail(1, &format!("the state cannot be written: {error}"));
                }
                Err(_) => return ExitCode::SUCCESS,
                Ok(()) => {}
            }
            if !self.watch {
                return ExitCode::SUCCESS;
            }
            thread::sleep(Duration::from_secs(1));
            if !mounting::is_mounted(device) {
                return ExitCode::SUCCESS;
            }
        }
    }

    /// Shows the usage of a mount through FUSE.
    fn main_of_fuse(&self, mut found: fuse::Found) -> ExitCode {
        loop {
            let text = match fuse::status_text(&found, self.json) {
                Ok(text) => text,
                Err(why) => return report_error(2, self.json, &why),
            };
            match self.write_text(&text) {
                Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                    return fail(1, &format!("the state cannot be written: {error}"));
                }
                Ok(()) if self.watch => {}
                _ => return ExitCode::SUCCESS,
            }
            thread::sleep(Duration::from_secs(1));
            found = match fuse::Found::at(&self.dir) {
                Some(found) => found,
                None => return ExitCode::SUCCESS,
            };
        }
    }

    fn write(&self, state: &State) -> std::io::Result<()> {
        let text = match self.json {
            true => serde_json::to_string(state).map_err(std::io::Error::other)? + "\n",
            false => text_of(state),
        };
        self.write_text(&text)
    }

    fn write_text(&self, text: &str) -> std::io::Result<()> {
        // With --watch, each status replaces the previous one on the screen of a terminal.
        let is_replaced = self.watch && !self.json && std::io::stdout().is_terminal();
        let text = format!("{}{text}", if is_replaced { "\x1b[H\x1b[2J" } else { "" });
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

/// Returns the status of a mount. If no controller runs, the kernel's figures are all that is known.
///
/// # Errors
///
/// The reason for which the controller gives no status.
pub fn read_state(point: &Path, device: u64) -> Result<State, String> {
    match control::request_status(device) {
        RequestOutcome::Answer(state) => Ok(state),
        RequestOutcome::Refused(why) => Err(why),
        RequestOutcome::NoController => Ok(state_without_controller(point)),
    }
}

/// Returns the part of a mount's status that is known if no controller runs.
fn state_without_controller(point: &Path) -> State {
    let mut state = State { mount_point: point.to_string_lossy().into_owned(), ..State::default() };
    if let Ok(stat) = rustix::fs::statvfs(point) {
        state.size_bytes = stat.f_blocks.saturating_mul(stat.f_frsize);
        state.used_bytes = state.size_bytes.saturating_sub(stat.f_bfree.saturating_mul(stat.f_frsize));
        (state.inodes, state.max_inodes) = (stat.f_files.saturating_sub(stat.f_ffree), stat.f_files);
    }
    state
}

/// The unit of a value in the table of the status.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Files,
    Blocks,
    Times,
}

impl Unit {
    fn text(self, value: u64) -> String {
        let word = match self {
            Self::Bytes => return Bytes(value).to_string(),
            Self::Files => "file",
            Self::Blocks => "block",
            Self::Times => "time",
        };
        format!("{value} {word}{}", if value == 1 { "" } else { "s" })
    }
}

/// Returns the controller's counts as rows of name, value, unit and meaning. The printed table omits rows with the
/// value 0.
fn count_rows(counts: &Counts) -> Vec<(&'static str, u64, Unit, &'static str)> {
    use Unit::{Blocks, Files, Times};
    vec![
        ("purged", counts.purged_bytes, Unit::Bytes, "of volatile files, purged whole"),
        ("purged files", counts.purged_files, Files, "purged whole"),
        ("cut off", counts.cut_bytes, Unit::Bytes, "of partial files, from their ends"),
        ("spared", counts.spared_open, Times, "a file that was to be purged was open"),
        ("opens delayed", counts.delayed_opens, Times, "writers were faster than purging"),
        ("nothing to give", counts.nothing_to_purge, Times, "a limit was near and no volatile file could be purged"),
        ("huge", counts.huge_blocks, Blocks, "of 2 MiB found or made huge"),
        ("split", counts.split_blocks, Blocks, "of 2 MiB split, in files with the mark `never`"),
        ("sparse", counts.sparse_bytes, Unit::Bytes, "of zero pages freed in sparse files"),
        ("busy", counts.collapse_busy, Times, "a file's pages were in use"),
        ("postponed", counts.collapse_postponed, Times, "the rest of a file, because the time for one visit was over"),
        ("no huge page", counts.collapse_no_memory, Times, "none was available"),
        ("size changed", counts.size_changes, Times, "to keep writers below a limit"),
        ("written", counts.events, Files, "closed or renamed, as the kernel reported"),
        ("events off", counts.quiet_times, Times, "during many closes of small files; a scan finds them later"),
        ("events lost", counts.events_lost, Times, "a full scan replaced them"),
        ("bad marks", counts.bad_marks, Times, "a mark with an unknown value was ignored"),
        ("not indexed", counts.not_indexed, Files, "volatile, but the index was full"),
        ("worker", counts.worker_restarts, Times, "the worker process was restarted"),
    ]
}

fn text_of(state: &State) -> String {
    let mut text = String::new();
    let _ = match state.controller_pid {
        Some(pid) => writeln!(text, "{}  controller {pid}, {:.0} s", state.mount_point, state.uptime_seconds),
        None => writeln!(text, "{}", no_controller_message(Path::new(&state.mount_point))),
    };
    // A tmpfs has a size in whole pages.
    let asked_size_bytes = state.asked_bytes.next_multiple_of(pagemill_sys::mem::os_page_bytes() as u64);
    let asked = match (&state.bounded_by, state.size_bytes.cmp(&asked_size_bytes)) {
        _ if state.controller_pid.is_none() => String::new(),
        (_, Ordering::Equal) => String::new(),
        (_, Ordering::Greater) => format!("{} requested; more is in use", Bytes(state.asked_bytes)),
        (Some(limit), Ordering::Less) => format!("{} requested; bounded by {limit}", Bytes(state.asked_bytes)),
        (None, Ordering::Less) => format!("{} requested", Bytes(state.asked_bytes)),
    };
    let mut row = |name: &str, value: String, meaning: &str| {
        let line = format!("  {name:<16} {value:>12}  {meaning}");
        let _ = writeln!(text, "{}", line.trim_end());
    };
    row("size", Bytes(state.size_bytes).to_string(), &asked);
    row(
        "used",
        Bytes(state.used_bytes).to_string(),
        &format!("in {} of {} inodes (attributes count, too)", state.inodes, state.max_inodes),
    );
    if state.controller_pid.is_none() {
        return text;
    }
    let age = match state.volatile_age_seconds {
        seconds if seconds >= 1.0 => format!(", up to {seconds:.0} s ago"),
        _ => String::new(),
    };
    let files = format!("in {} files{age}: purged first, in LRU order", state.volatile_files);
    row("volatile", Bytes(state.volatile_bytes).to_string(), &files);
    if state.files_waiting_for_pages > 0 {
        row("waiting", Unit::Files.text(state.files_waiting_for_pages), "for the worker to examine");
    }
    let counts: Vec<_> = count_rows(&state.counts).into_iter().filter(|row| row.1 > 0).collect();
    if !counts.is_empty() {
        row("since the start", String::new(), "");
    }
    for (name, value, unit, meaning) in counts {
        row(&format!("  {name}"), unit.text(value), meaning);
    }
    let headings = [
        Heading::left_aligned("limits", 16, 2),
        Heading::right_aligned("used", 10, 1),
        Heading::right_aligned("purge from", 10, 1),
        Heading::right_aligned("limit", 10, 1),
    ];
    let limits = state.lines.iter().map(|line| {
        let name = if line.kind == "group" { format!("  group {}", line.name) } else { format!("  {}", line.name) };
        let bytes = [line.used_bytes, line.mark_bytes, line.limit_bytes].map(|bytes| Bytes(bytes).to_string());
        [name].into_iter().chain(bytes).collect()
    });
    text += &columns::aligned_table(&headings, limits);
    if !state.is_preferred {
        let _ = writeln!(text, "  the controller has no real-time priority: purging starts farther below the limits");
    }
    if !state.is_notified {
        let _ = writeln!(text, "  the kernel does not report writes: scans find new files");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts with the value 0 must be omitted from the text. The text must explain a reduced size, and report a
    /// missing controller.
    #[test]
    fn a_status_is_rendered() {
        let counts = Counts { purged_bytes: 3 << 20, purged_files: 2, nothing_to_purge: 3643, ..Counts::default() };
        let state = State {
            mount_point: "/mnt/ram".into(),
            controller_pid: Some(7),
            asked_bytes: 8 << 30,
            size_bytes: 1 << 30,
            bounded_by: Some("group /app".into()),
            counts,
            volatile_age_seconds: 12.3,
            is_preferred: true,
            is_notified: true,
            ..State::default()
        };
        let text = text_of(&state);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(" purged 3 MiB of volatile files"), "{text}");
        assert!(
            words.contains(" nothing to give 3643 times a limit was near and no volatile file could be purged"),
            "{text}"
        );
        assert!(text.contains("in 0 files, up to 12 s ago: purged first"), "{text}");
        assert!(text.contains("8 GiB requested; bounded by group /app\n") && !text.contains("cut off"), "{text}");
        let larger = text_of(&State { asked_bytes: 1 << 20, bounded_by: None, ..state.clone() });
        assert!(larger.contains("1 MiB requested; more is in use\n"), "{larger}");
        let rounded =
            text_of(&State { asked_bytes: (1 << 30) - 7, size_bytes: 1 << 30, bounded_by: None, ..state.clone() });
        assert!(!rounded.contains("requested"), "{rounded}");
        let text = text_of(&State { controller_pid: None, ..state });
        assert!(text.starts_with("no controller of /mnt/ram answers") && !text.contains("volatile "), "{text}");
    }
}
