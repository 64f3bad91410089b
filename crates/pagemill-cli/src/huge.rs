//! `pagemill huge PID | MOUNT [WHEN]`: shows or sets which memory of a running process, or which files of a mounted
//! tmpfs, get huge pages from now on.

use crate::fail;
use crate::mount::{fuse, report_error};
use crate::requests::{Interrupt, unanswered_reason};
use pagemill_core::arena::HugeUse;
use pagemill_core::listing::{self, ControlCommand, Unanswered};
use pagemill_core::published::{self, Process};
use pagemill_core::stats::Counter;
use pagemill_tmpfs::mounting;
use serde_json::json;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(clap::Args)]
#[command(after_help = "\
Memory in use stays as it is; what becomes resident later follows the setting. `always` and `never` of a process \
override what the program and the policies of its page caches choose; `auto` ends that. `never` also ends background \
collapses. Only the user of a process can change it; root must first become that user (`setpriv --reuid=USER`). \
To change a mount needs CAP_SYS_ADMIN; all mounts of its file \
system change. Without WHEN, the command prints the setting. For a mount point \
named like a number, write ./123.")]
pub struct Huge {
    /// A process on Pagemill, a `pagemill run`, which stands for the processes that its tree has now, or the mount point
    /// of a tmpfs.
    #[arg(value_name = "PID | MOUNT")]
    target: PathBuf,
    /// Of a process: auto, always, never. Of a mount: always, within_size, advise, never.
    #[arg(value_enum)]
    when: Option<When>,
    /// Print one JSON object for each process, or for the mount.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum When {
    /// Do as the program and the policies of its page caches choose.
    Auto,
    /// Use a huge page for each new range, if the kernel has one.
    Always,
    /// Use huge pages only within the length of the file (tmpfs).
    #[value(name = "within_size")]
    WithinSize,
    /// Use huge pages only where a program advises them by madvise (tmpfs).
    Advise,
    /// Make no huge pages.
    Never,
}

impl When {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::WithinSize => "within_size",
            Self::Advise => "advise",
            Self::Never => "never",
        }
    }

    fn of_process(self) -> Result<HugeUse, String> {
        match self {
            Self::Auto => Ok(HugeUse::Auto),
            Self::Always => Ok(HugeUse::Always),
            Self::Never => Ok(HugeUse::Never),
            Self::WithinSize | Self::Advise => {
                Err(format!("{} is a setting of a mount; a process has auto, always and never", self.name()))
            }
        }
    }
}

fn process_setting_name(setting: HugeUse) -> &'static str {
    match setting {
        HugeUse::Auto => "auto",
        HugeUse::Always => "always",
        HugeUse::Never => "never",
    }
}

impl Huge {
    pub fn main(&self) -> ExitCode {
        // A folder whose name is a number can be written as `./123`.
        match self.target.to_str().and_then(|text| text.parse().ok()) {
            Some(pid) => self.main_of_process(pid),
            None => match self.set_mount() {
                Ok(line) => print_line(&line),
                Err(why) => report_error(2, self.json, &why),
            },
        }
    }

    fn main_of_process(&self, pid: u32) -> ExitCode {
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        let wanted = match self.when.map(When::of_process).transpose() {
            Ok(wanted) => wanted,
            Err(why) => return report_error(2, self.json, &why),
        };
        let processes = match published::read(pid).filter(Process::is_own) {
            Some(process) => vec![process],
            None => match published::read_tree(pid) {
                Some(members) => members.into_iter().filter(Process::is_own).collect(),
                None => return report_error(2, self.json, &published::missing(pid)),
            },
        };
        let mut status = ExitCode::SUCCESS;
        for process in processes {
            let (pid, name) = (process.identity.pid, process.found[0].1.name());
            match set_process(&process, wanted, &interrupt) {
                Ok(before) => {
                    let written = print_line(&self.process_line(pid, &name, wanted, before));
                    if written != ExitCode::SUCCESS {
                        return written;
                    }
                }
                Err(None) => return interrupt.end(),
                Err(Some(why)) => status = report_error(2, self.json, &format!("process {pid}: {why}")),
            }
        }
        status
    }

    fn process_line(&self, pid: u32, name: &str, wanted: Option<HugeUse>, before: HugeUse) -> String {
        let [now, before] = [wanted.unwrap_or(before), before].map(process_setting_name);
        if self.json {
            return json!({"pid": pid, "name": name, "huge": now, "before": before}).to_string();
        }
        format!("{pid} {name}: {}", change_text(now, before))
    }

    /// Shows or sets the option `huge` of the tmpfs. Returns the line to print.
    fn set_mount(&self) -> Result<String, String> {
        let point = mounting::canonical(&self.target).map_err(|refusal| refusal.to_string())?;
        let found = mounting::mount_at(&point).map_err(|error| format!("the mounts cannot be read: {error}"))?;
        let Some(line) = found else { return Err(format!("{} is no mount point", point.display())) };
        let Some(before) = line.huge_option() else {
            let hint = if fuse::Found::at(&point).is_some() {
                ": its setting is that of the process that serves it"
            } else {
                ""
            };
            return Err(format!("{} is no tmpfs but {}{hint}", point.display(), line.kind));
        };
        let Some(when) = self.when else { return Ok(self.mount_line(&point, before, before)) };
        if when == When::Auto {
            return Err("auto is a setting of a process; a mount has always, within_size, advise and never".into());
        }
        mounting::set_huge_option(&point, when.name()).map_err(|error| mount_error_text(&point, when, &error))?;
        if line.is_ours() && when == When::Never && !self.json {
            let note = "the worker of the mount still makes huge pages of dense blocks; `pagemill mark --huge never` on the \
                        mount point ends that";
            let _ = writeln!(io::stderr(), "pagemill: {note}");
        }
        Ok(self.mount_line(&point, when.name(), before))
    }

    fn mount_line(&self, point: &Path, now: &str, before: &str) -> String {
        if self.json {
            return json!({"mount": point, "huge": now, "before": before, "overridden_by": override_of_mounts()})
                .to_string();
        }
        let note =
            override_of_mounts().map(|word| format!(" (the machine's shmem_enabled is {word}, which overrides it)"));
        format!("{}: {}{}", point.display(), change_text(now, before), note.unwrap_or_default())
    }
}

/// Returns the word of the machine's setting `shmem_enabled` if it overrides the options of all mounts.
fn override_of_mounts() -> Option<&'static str> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").ok()?;
    ["force", "deny"].into_iter().find(|word| text.contains(&format!("[{word}]")))
}

fn change_text(now: &str, before: &str) -> String {
    if now == before { format!("huge pages: {now}") } else { format!("huge pages: {now}, before: {before}") }
}

fn mount_error_text(point: &Path, when: When, error: &io::Error) -> String {
    let why = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "only root can change it (CAP_SYS_ADMIN in the user namespace that mounted it)".to_owned()
        }
        Some(libc::EINVAL) => "this kernel has no huge pages for tmpfs".to_owned(),
        Some(libc::ENOSYS) => "changing a mount needs Linux 5.2".to_owned(),
        _ => error.to_string(),
    };
    format!("{} does not get huge={}: {why}", point.display(), when.name())
}

fn print_line(line: &str) -> ExitCode {
    match writeln!(io::stdout(), "{line}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(1, &format!("the result cannot be written: {error}"))
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Shows or sets the setting of each Pagemill instance of a process. Returns the setting before.
///
/// # Errors
///
/// A message; `None` if a signal interrupted the wait.
fn set_process(process: &Process, wanted: Option<HugeUse>, interrupt: &Interrupt) -> Result<HugeUse, Option<String>> {
    let mut before = None;
    for (path, snapshot) in &process.found {
        // Without a helper thread, the process answers no commands. So the command counts as unanswered without a wait.
        let answer = match snapshot.get(Counter::Helpers) > 0 {
            true => listing::command(path, snapshot.identity, ControlCommand::Huge(wanted), || interrupt.has_signal()),
            false => Err(Unanswered::Late),
        };
        match answer {
            Ok(outcome) if outcome.errno == 0 => before = before.or(outcome.huge_before),
            Ok(outcome) if outcome.errno == libc::EOPNOTSUPP => {
                return Err(Some("it was started without huge pages (--no-huge, PAGEMILL_HUGE=never)".into()));
            }
            Ok(outcome) => {
                let error = io::Error::from_raw_os_error(outcome.errno);
                return Err(Some(format!("it cannot change its setting: {error}")));
            }
            Err(Unanswered::Stopped) => return Err(None),
            Err(error) => return Err(Some(format!("{error}{}", unanswered_reason(&error, snapshot)))),
        }
    }
    before.ok_or_else(|| Some("it reports no setting".into()))
}
