//! Starts workloads, ends them, and reads their output. Each workload has a process group of its own.
//!
//! The process group lets the bench end a workload together with its children. Ctrl-C reaches only the bench and not
//! the workloads. The bench then ends every group that it started, and removes its cgroups and folders.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::cgroup::Cgroup;
use crate::error::{Error, Result, doing};
use crate::native;
use crate::subject::{AvailableSubject, Named};

/// Exit status of a workload that found wrong bytes in its memory.
pub const WRONG_ANSWER: i32 = 70;

/// The first signal that requested the end of the bench; 0 if none has arrived.
static FIRST_SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Process ids of the leaders of all running process groups, which an interrupt must kill.
static RUNNING_GROUPS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn running_groups() -> MutexGuard<'static, BTreeSet<u32>> {
    RUNNING_GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs handlers for Ctrl-C, SIGTERM and SIGHUP, which kill the workloads. The bench then cleans up and ends.
pub fn handle_interrupts() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(doing("watching for signals"))?;
    thread::spawn(move || {
        for signal in signals.forever() {
            let _ = FIRST_SIGNAL.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
            for &leader in running_groups().iter() {
                native::kill_group(leader);
            }
        }
    });
    Ok(())
}

/// Ends the bench by the signal's default action, so that the parent process can detect the signal. The caller must
/// have cleaned up.
pub fn end_by_signal(signal: i32) {
    // If the call fails, the bench exits with a status that contains the signal's number.
    let _ = emulate_default_handler(signal);
}

/// Returns [`Error::Interrupted`] if a signal has requested the end of the bench, otherwise `Ok`.
pub fn check_interrupt() -> Result<()> {
    match FIRST_SIGNAL.load(Ordering::SeqCst) {
        0 => Ok(()),
        signal => Err(Error::Interrupted { signal }),
    }
}

/// Sleeps for the duration. Returns an error as soon as a signal has requested the end of the bench.
pub fn sleep(duration: Duration) -> Result<()> {
    let until = Instant::now() + duration;
    loop {
        check_interrupt()?;
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(Duration::from_millis(20)));
    }
}

/// Returns a command that runs this executable. `arguments` begins with the name of a hidden subcommand.
pub fn workload_command(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Command> {
    let mut command = Command::new(own_executable()?);
    command.args(arguments);
    Ok(command)
}

/// Converts numeric options to arguments of a workload's command line.
pub fn numeric_options(options: &[(&str, u64)]) -> impl Iterator<Item = String> {
    options.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()])
}

/// Returns a value of an enumeration as a word of a workload's command line.
pub fn word(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

pub fn own_executable() -> Result<std::path::PathBuf> {
    std::env::current_exe().map_err(doing("finding the own executable"))
}

/// A process group that the bench started, with its output. Dropping the value kills the group.
#[derive(Debug)]
pub struct RunningGroup {
    child: Child,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
    is_ended: bool,
}

/// Exit status, output and CPU time of a process that ended.
#[derive(Debug)]
pub struct FinishedProcess {
    pub status: ExitStatus,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub wall: Duration,
    /// CPU time of the process and of all children that it has waited for.
    pub cpu: Duration,
}

impl RunningGroup {
    /// Starts the command in a new process group and captures its output.
    pub fn start(command: &mut Command) -> Result<Self> {
        check_interrupt()?;
        command.process_group(0).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let name = command.get_program().to_string_lossy().into_owned();
        // The lock is held during the spawn. So at a signal, the child either does not exist or is registered.
        let mut groups = running_groups();
        let mut child = command.spawn().map_err(doing(format!("starting {name}")))?;
        groups.insert(child.id());
        drop(groups);
        let stdout = child.stdout.take().map(read_in_background);
        let stderr = child.stderr.take().map(read_in_background);
        Ok(Self { child, stdout, stderr, is_ended: false })
    }

    /// Returns the process id of the group's leader.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the group's leader has ended. The leader remains a zombie until [`RunningGroup::finish`] reaps
    /// it, so that its process id cannot be reused.
    pub fn has_ended(&self) -> bool {
        native::has_ended(self.child.id())
    }

    pub fn terminate(&self) {
        if !self.has_ended() {
            native::terminate(self.child.id());
        }
    }

    /// Waits until the group's leader ends, then kills the rest of the group. Fails if the leader runs longer than
    /// `limit`.
    pub fn finish(mut self, limit: Duration) -> Result<FinishedProcess> {
        let started = Instant::now();
        while !self.has_ended() {
            if started.elapsed() > limit {
                let seconds = limit.as_secs();
                return Err(Error::CannotRun(format!("a workload did not end within {seconds} s")));
            }
            thread::sleep(Duration::from_millis(5));
        }
        let wall = started.elapsed();
        self.end_group();
        let (status, cpu) = native::reap(self.child.id()).map_err(doing("waiting for a workload"))?;
        let status = ExitStatus::from_raw(status);
        check_interrupt()?;
        Ok(FinishedProcess {
            status,
            stdout: join_reader(self.stdout.take()),
            stderr: join_reader(self.stderr.take()),
            wall,
            cpu,
        })
    }

    /// Kills all members of the group and removes the group from [`RUNNING_GROUPS`]. Does not reap the leader.
    fn end_group(&mut self) {
        if !self.is_ended {
            native::kill_group(self.child.id());
            running_groups().remove(&self.child.id());
            self.is_ended = true;
        }
    }
}

impl Drop for RunningGroup {
    fn drop(&mut self) {
        if !self.is_ended {
            self.end_group();
            // The leader was killed before, so waiting only reaps the zombie.
            let _ = self.child.wait();
        }
    }
}

fn read_in_background(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // Bytes that were read before an error, such as a broken pipe, are returned.
        let _: io::Result<usize> = pipe.read_to_end(&mut bytes);
        bytes
    })
}

fn join_reader(reader: Option<JoinHandle<Vec<u8>>>) -> Vec<u8> {
    reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
}

/// How a workload ended.
#[derive(Debug)]
pub enum Outcome {
    /// The workload exited with status 0 and printed its line of JSON.
    Measured(serde_json::Value),
    /// SIGKILL ended the workload, which mostly means out of memory.
    Killed,
    /// The workload failed for another reason, with this message.
    Failed(String),
}

impl Outcome {
    /// Returns the outcome with a part of its JSON line. A lost outcome stays lost.
    pub fn part(&self, part: impl FnOnce(&serde_json::Value) -> serde_json::Value) -> Self {
        match self {
            Self::Measured(line) => Self::Measured(part(line)),
            Self::Killed => Self::Killed,
            Self::Failed(why) => Self::Failed(why.clone()),
        }
    }
}

/// Runs a hidden subcommand under the allocator of the subject `ready`, and reads the JSON line that the subcommand
/// prints.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if the workload found wrong bytes in its memory; [`Error::Interrupted`] after a signal.
pub fn run_under(
    ready: &AvailableSubject,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    limit: Duration,
) -> Result<Outcome> {
    let mut command = workload_command(arguments)?;
    ready.apply(&mut command);
    run_to_end(ready.name(), &mut command, limit)
}

/// Runs a hidden subcommand under the C library's allocator, for workloads that do not measure an allocator. Reads the
/// JSON line that the subcommand prints.
///
/// # Errors
///
/// As [`run_under`].
pub fn run_plain(
    subject: &str,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    limit: Duration,
) -> Result<Outcome> {
    run_with_settings(subject, arguments, &[], limit)
}

/// Like [`run_plain`], but sets the environment variables `settings` for the workload.
pub fn run_with_settings(
    subject: &str,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    settings: &[(&str, &str)],
    limit: Duration,
) -> Result<Outcome> {
    let mut command = workload_command(arguments)?;
    crate::subject::clear_foreign_settings(&mut command);
    command.envs(settings.iter().copied());
    run_to_end(subject, &mut command, limit)
}

/// Runs a command until it ends, and classifies it as measured, killed or failed.
pub fn run_to_end(subject: &str, command: &mut Command, limit: Duration) -> Result<Outcome> {
    classify(subject, &RunningGroup::start(command)?.finish(limit)?)
}

/// Returns the words of a command line: the words `first`, then the numeric options `numbers`.
pub fn command_words(first: &[&str], numbers: &[(&str, u64)]) -> Vec<String> {
    first.iter().map(|word| (*word).to_owned()).chain(numeric_options(numbers)).collect()
}

/// Classifies a finished workload as measured, killed or failed.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if the workload found wrong bytes in its memory.
pub fn classify(subject: &str, finished: &FinishedProcess) -> Result<Outcome> {
    let complaint = String::from_utf8_lossy(&finished.stderr);
    let complaint = complaint.trim();
    match (finished.status.code(), finished.status.signal()) {
        (Some(0), _) => match serde_json::from_slice(&finished.stdout) {
            Ok(value) => Ok(Outcome::Measured(value)),
            Err(cause) => Ok(Outcome::Failed(format!("unreadable result: {cause}"))),
        },
        (Some(WRONG_ANSWER), _) => Err(Error::WrongAnswer { subject: subject.to_owned(), what: complaint.to_owned() }),
        // A launcher such as `pagemill run` exits with 137 (128 + 9) if SIGKILL ended its child.
        (Some(137), _) | (None, Some(libc::SIGKILL)) => Ok(Outcome::Killed),
        (Some(code), _) => Ok(Outcome::Failed(format!("status {code}: {complaint}"))),
        (None, signal) => Ok(Outcome::Failed(format!("signal {}: {complaint}", signal.unwrap_or_default()))),
    }
}

/// Touches and frees `mib` MiB of memory in a separate process. An experiment calls this function before it measures.
///
/// In a virtual machine, the first touch of memory that the host has not backed yet is 5 to 30 times slower than later
/// touches. Without this call, the first subject would seem slower than the others.
pub fn touch_beforehand(mib: u64) -> Result<()> {
    let mut command = workload_command(["__touch", "--mib", &mib.to_string()])?;
    crate::subject::clear_foreign_settings(&mut command);
    let finished = RunningGroup::start(&mut command)?.finish(Duration::from_secs(300))?;
    match finished.status.success() {
        true => Ok(()),
        false => Err(Error::CannotRun(format!("{mib} MiB could not be touched beforehand ({})", finished.status))),
    }
}

/// Returns a command that runs a command line in a cgroup, if one is given, without any allocator setting of the caller.
///
/// # Errors
///
/// [`Error::System`] if the bench cannot find its own executable.
pub fn command_in_group(group: Option<&Cgroup>, line: &[String]) -> Result<Command> {
    let mut command = workload_command(["__enter"])?;
    if let Some(group) = group {
        command.arg("--entrance").arg(group.join_file());
    }
    command.arg("--").args(line);
    crate::subject::clear_foreign_settings(&mut command);
    Ok(command)
}

/// Turns a gap into a failed sample, so that the other samples are still taken.
///
/// # Errors
///
/// Every other error.
pub fn failed_if_gap(sample: Result<Outcome>) -> Result<Outcome> {
    match sample {
        Err(Error::Gap(why)) => Ok(Outcome::Failed(why)),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> FinishedProcess {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let running = RunningGroup::start(&mut command).expect("sh starts");
        running.finish(Duration::from_secs(60)).expect("sh ends")
    }

    /// A JSON line must be classified as a measurement, SIGKILL as a kill, status 3 as a failure, and status 70 as a
    /// wrong answer.
    #[test]
    fn exit_statuses_are_classified() {
        let read = |script| classify("glibc", &shell(script));

        assert!(matches!(read("echo '{\"a\":1}'"), Ok(Outcome::Measured(value)) if value["a"] == 1));
        assert!(matches!(read("kill -9 $$"), Ok(Outcome::Killed)));
        assert!(matches!(read("echo no >&2; exit 3"), Ok(Outcome::Failed(why)) if why.contains("no")));
        assert!(matches!(read("exit 70"), Err(Error::WrongAnswer { .. })));
    }

    /// A shell starts a child that computes. The measured CPU time must include that of the child.
    #[test]
    fn cpu_time_includes_children() {
        let used = shell("sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done'; true").cpu;

        assert!(used >= Duration::from_millis(5), "{used:?}");
    }

    /// A child that runs longer than its leader must be killed with the group. Otherwise it would keep the output pipe
    /// open for an hour.
    #[test]
    fn finish_kills_remaining_group_members() {
        let started = Instant::now();

        shell("sleep 3600 &");

        assert!(started.elapsed() < Duration::from_secs(600));
    }
}
