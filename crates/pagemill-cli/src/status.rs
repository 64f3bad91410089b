//! `pagemill status DIR`: how full a mount is, what of it could go, what its controller has done.

use crate::fail;
use crate::mount::{refuse, unreachable};
use pagemill::units::Bytes;
use pagemill_mount::control::{self, Reached};
use pagemill_mount::mounting;
use pagemill_mount::status::{Counts, Status as State};
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Status {
    /// Where it is mounted.
    dir: PathBuf,
    /// Every second anew, until it is unmounted or Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// One JSON object (with --watch one a second) instead of a table.
    #[arg(long)]
    json: bool,
}

impl Status {
    pub fn main(&self) -> ExitCode {
        let (point, device) = match mounting::find(&self.dir) {
            Ok(found) => found,
            Err(refusal) => return refuse(2, self.json, &refusal.to_string()),
        };
        loop {
            let state = match control::ask_status(device) {
                Reached::Answer(state) => state,
                Reached::Refused(why) => return refuse(1, self.json, &why),
                Reached::Nobody => without_controller(&point),
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

    fn write(&self, state: &State) -> std::io::Result<()> {
        let text = if self.json {
            serde_json::to_string(state).map_err(std::io::Error::other)? + "\n"
        } else {
            // A picture after the other, the newest on a clear screen.
            let clear = if self.watch { "\x1b[H\x1b[2J" } else { "" };
            format!("{clear}{}", text_of(state))
        };
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

/// What can be seen from outside.
fn without_controller(point: &Path) -> State {
    let mut state = State { mount_point: point.to_string_lossy().into_owned(), ..State::default() };
    if let Ok(stat) = rustix::fs::statvfs(point) {
        state.size_bytes = stat.f_blocks.saturating_mul(stat.f_frsize);
        state.used_bytes = state.size_bytes.saturating_sub(stat.f_bfree.saturating_mul(stat.f_frsize));
        state.inodes = stat.f_files.saturating_sub(stat.f_ffree);
    }
    state
}

/// Rows of what was done that are shown where they are not 0: name, value, whether in bytes, meaning.
fn rows(counts: &Counts) -> Vec<(&'static str, u64, bool, &'static str)> {
    vec![
        ("purged", counts.purged_bytes, true, "of volatile files, gone as a whole"),
        ("purged files", counts.purged_files, false, "so many files"),
        ("cut off", counts.cut_bytes, true, "of partial files, from their ends"),
        ("spared", counts.spared_open, false, "times a file was due and open"),
        ("could not give", counts.nothing_to_purge, false, "times memory was to go and nothing volatile was left"),
        ("huge", counts.huge_blocks, false, "blocks of 2 MiB found or made huge"),
        ("split", counts.split_blocks, false, "blocks of files that are never to be huge"),
        ("sparse", counts.sparse_bytes, true, "of zeros given back from sparse files"),
        ("busy", counts.collapse_busy, false, "times a file's pages were in use"),
        ("postponed", counts.collapse_postponed, false, "times others needed the processors"),
        ("no huge page", counts.collapse_no_memory, false, "times there was none to be had"),
        ("size changed", counts.size_changes, false, "times, to keep writers below a limit"),
        ("files written", counts.events, false, "as the kernel told"),
        ("events lost", counts.events_lost, false, "times: everything was looked at instead"),
        ("bad marks", counts.bad_marks, false, "with unknown values, passed over"),
        ("not in mind", counts.not_indexed, false, "volatile files beyond what is kept in mind"),
        ("worker", counts.worker_restarts, false, "times its process for pages was started anew"),
    ]
}

fn text_of(state: &State) -> String {
    let mut text = String::new();
    let _ = match state.controller_pid {
        Some(pid) => writeln!(text, "{}  controller {pid}, {:.0} s", state.mount_point, state.uptime_seconds),
        None => writeln!(text, "{}", unreachable(Path::new(&state.mount_point))),
    };
    let asked = match state.size_bytes {
        size if state.controller_pid.is_some() && size != state.asked_bytes => {
            format!("for now: {} were asked for, and a limit is near", Bytes(state.asked_bytes))
        }
        _ => String::new(),
    };
    let mut row = |name: &str, value: String, meaning: &str| {
        let line = format!("  {name:<16} {value:>10}  {meaning}");
        let _ = writeln!(text, "{}", line.trim_end());
    };
    row("size", Bytes(state.size_bytes).to_string(), &asked);
    row(
        "used",
        Bytes(state.used_bytes).to_string(),
        &format!("by {} files and folders, the root among them", state.inodes),
    );
    if state.controller_pid.is_none() {
        return text;
    }
    let files = format!("in {} files: goes first, least recently used before others", state.volatile_files);
    row("volatile", Bytes(state.volatile_bytes).to_string(), &files);
    for (name, value, is_bytes, meaning) in rows(&state.counts).into_iter().filter(|row| row.1 > 0) {
        row(name, if is_bytes { Bytes(value).to_string() } else { value.to_string() }, meaning);
    }
    if state.files_waiting_for_pages > 0 {
        row("waiting", state.files_waiting_for_pages.to_string(), "files whose pages are to be looked at");
    }
    let _ = writeln!(text, "  {:<16} {:>10} {:>10} {:>10}", "limits", "used", "purge from", "limit");
    for line in &state.lines {
        let name = if line.kind == "group" { format!("group {}", line.name) } else { line.name.clone() };
        let [used, mark, limit] =
            [line.used_bytes, line.mark_bytes, line.limit_bytes].map(|bytes| Bytes(bytes).to_string());
        let _ = writeln!(text, "    {name:<14} {used:>10} {mark:>10} {limit:>10}");
    }
    if !state.is_preferred {
        let _ = writeln!(text, "  without real-time priority: margins are wider");
    }
    if !state.is_notified {
        let _ = writeln!(text, "  the kernel does not tell what is written: new files are found now and then");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is 0 is not shown, a size that is held down is explained, no controller is said so.
    #[test]
    fn states_are_told() {
        let counts = Counts { purged_bytes: 3 << 20, purged_files: 2, ..Counts::default() };
        let state = State {
            mount_point: "/mnt/ram".into(),
            controller_pid: Some(7),
            asked_bytes: 8 << 30,
            size_bytes: 1 << 30,
            counts,
            is_preferred: true,
            is_notified: true,
            ..State::default()
        };
        let text = text_of(&state);
        assert!(text.contains("purged                3 MiB  of volatile files"), "{text}");
        assert!(text.contains("8 GiB were asked for") && !text.contains("cut off"), "{text}");
        let text = text_of(&State { controller_pid: None, ..state });
        assert!(text.starts_with("no controller of /mnt/ram answers") && !text.contains("volatile "), "{text}");
    }
}
