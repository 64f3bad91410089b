//! fio as a peer: runs one fio job and converts its JSON output into the bench's metrics.

use std::io::{self, BufWriter, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::target::Target;
use super::{CPU, IOS, MIB, P50, P99, P999};
use crate::cgroup::Cgroup;
use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Named};
use crate::report::Report;
use crate::subject;

/// Makes glibc use huge pages for fio's buffers, which fio allocates with one `malloc`.
const GLIBC_HUGE_PAGES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

const COMMON_ARGUMENTS: [&str; 5] =
    ["--thread", "--output-format=json", "--lat_percentiles=1", "--clat_percentiles=0", "--percentile_list=50:99:99.9"];

/// Argument with which fio writes the same bytes each time. By default fio changes the bytes of each write.
const KEEP_BYTES_ARGUMENT: &str = "--scramble_buffers=0";

/// An I/O engine of fio, with its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    pub name: &'static str,
    pub settings: &'static [&'static str],
    /// Whether the buffers are in transparent huge pages.
    pub is_huge: bool,
    /// Whether the transfers use the kernel's page cache.
    pub is_cached: bool,
}

impl Engine {
    /// Makes an engine that bypasses the kernel's page cache, with buffers in small pages.
    const fn direct(name: &'static str, settings: &'static [&'static str]) -> Self {
        Self { name, settings, is_huge: false, is_cached: false }
    }
}

/// Correction that is added to the user time and to the system time of fio. fio truncates each of them to whole
/// milliseconds, which subtracts half a millisecond on average.
const MEAN_TRUNCATION_MS: f64 = 0.5;

/// fio's engine that uses blocking system calls.
pub const PSYNC: Engine = Engine::direct("psync", &[]);
/// fio's engine that uses the kernel's older asynchronous interface (`io_submit`).
pub const LIBAIO: Engine = Engine::direct("libaio", &[]);
/// fio's engine that copies from and to a mapping of the file. It calls `madvise` for the job's order of accesses.
pub const MMAP: Engine = Engine { name: "mmap", settings: &[], is_huge: false, is_cached: true };
/// fio's io_uring engine with unregistered buffers and an unregistered file.
pub const URING: Engine = Engine::direct("io_uring", &[]);
/// fio's io_uring engine with registered buffers and a registered file.
pub const URING_FIXED: Engine = Engine::direct("io_uring", &["--fixedbufs=1", "--registerfiles=1"]);
/// fio's io_uring engine with registered buffers only. Replays use it: fio opens the file of an I/O list too late to
/// register it.
pub const URING_FIXED_BUFFERS: Engine = Engine::direct("io_uring", &["--fixedbufs=1"]);

/// A fio job: transfers of one length between memory and a file.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub engine: Engine,
    pub path: &'a Path,
    pub len_bytes: u64,
    pub io_bytes: u64,
    pub depth: u64,
    pub task: Task<'a>,
}

/// What a fio job does with its file.
#[derive(Clone, Copy, Debug)]
pub enum Task<'a> {
    /// Transfers at sequential or random offsets, by several threads for a fixed time.
    Timed { is_random: bool, is_write: bool, jobs: u64, run_ms: u64 },
    /// Reads or writes the file once, in order. After writes it syncs the file, which counts as a part of the job. If
    /// `is_append` is true, the file is empty before the job, so that the writes extend it.
    Pass { is_write: bool, is_append: bool },
    /// Writes at the offsets of a list that [`write_list`] made.
    Replay { list: &'a Path },
}

/// Returns a path as fio's arguments spell it. fio splits file names at colons, so these are escaped.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(':', "\\:")
}

/// Returns whether a subject runs fio, by its name.
pub fn is_fio(subject: &impl Named) -> bool {
    subject.name().starts_with("fio-")
}

/// Returns the names of the subjects that run fio.
pub fn names(subjects: &[impl Named]) -> Vec<&'static str> {
    subjects.iter().filter(|subject| is_fio(*subject)).map(Named::name).collect()
}

/// Returns the wanted subjects. If the program fio is missing, leaves out the subjects that need it, and adds a
/// sentence (gap) to the report.
///
/// # Errors
///
/// [`Error::CannotRun`] if `--only` has an unknown name, or if no subject is left.
pub fn available_subjects<'a, Subject: Named>(
    common: &CommonOptions,
    known: &'a [Subject],
    report: &mut Report,
) -> Result<Vec<&'a Subject>> {
    common.check_only(&known.iter().map(Named::name).collect::<Vec<_>>())?;
    let mut subjects: Vec<&Subject> = known.iter().filter(|subject| common.is_wanted(subject.name())).collect();
    if subjects.iter().any(is_fio)
        && let Some(gap) = missing_reason()
    {
        subjects.retain(|subject| !is_fio(subject));
        if subjects.is_empty() {
            return Err(Error::CannotRun(gap));
        }
        report.add_gap(gap);
    }
    Ok(subjects)
}

/// Returns the reason why fio cannot be run; none if it can.
pub fn missing_reason() -> Option<String> {
    let version = Command::new("fio").arg("--version").stdin(Stdio::null()).output();
    match version {
        Ok(output) if output.status.success() => None,
        _ => Some("fio is not there (Debian: apt install fio): nothing to compare with".to_owned()),
    }
}

impl<'a> Job<'a> {
    /// Makes a job with transfers of `io_bytes` bytes on a file, of which `depth` are in flight.
    pub fn new(target: &'a Target, engine: Engine, (io_bytes, depth): (u64, u64), task: Task<'a>) -> Self {
        Self { engine, path: target.path(), len_bytes: target.len_bytes, io_bytes, depth, task }
    }

    fn is_write(&self) -> bool {
        match self.task {
            Task::Timed { is_write, .. } | Task::Pass { is_write, .. } => is_write,
            Task::Replay { .. } => true,
        }
    }

    fn arguments(&self) -> Vec<String> {
        let Self { engine, io_bytes, len_bytes, depth, .. } = self;
        let mut words = vec![
            "--name=pagemill".to_owned(),
            format!("--ioengine={}", engine.name),
            format!("--iodepth={depth}"),
            format!("--bs={io_bytes}"),
            format!("--direct={}", u8::from(!engine.is_cached)),
        ];
        let mut fixed = vec![if self.is_write() { KEEP_BYTES_ARGUMENT } else { "--readonly" }];
        match self.task {
            Task::Timed { is_random, is_write, jobs, run_ms } => {
                let order = if is_random { "rand" } else { "" };
                let way = if is_write { "write" } else { "read" };
                words.extend([format!("--rw={order}{way}"), format!("--numjobs={jobs}")]);
                words.extend([format!("--runtime={run_ms}ms"), format!("--ramp_time={}ms", run_ms / 10)]);
                fixed.extend(["--group_reporting", "--time_based", "--norandommap", "--randrepeat=0"]);
            }
            Task::Pass { is_write, is_append } => {
                fixed.extend(if is_write { &["--rw=write", "--end_fsync=1"][..] } else { &["--rw=read"] });
                // By default fio makes the file as long as the job before it starts the clock.
                fixed.extend(if is_append { &["--fallocate=none", "--file_append=1"][..] } else { &[] });
            }
            Task::Replay { list } => {
                words.push(format!("--read_iolog={}", escaped(list)));
                // The list contains a placeholder instead of the file name, since fio allows no spaces and at most 255
                // bytes in it.
                words.push(format!("--replay_redirect={}", self.path.display()));
                fixed.push("--replay_no_stall=1");
            }
        }
        if !matches!(self.task, Task::Replay { .. }) {
            words.extend([format!("--filename={}", escaped(self.path)), format!("--size={len_bytes}")]);
        }
        words.into_iter().chain(fixed.iter().chain(engine.settings).map(|word| (*word).to_owned())).collect()
    }

    /// Runs fio with this job, and returns the metrics.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] after a signal; [`Error::CannotRun`] if fio does not end in time.
    pub fn run(&self) -> Result<Outcome> {
        self.run_in(None)
    }

    /// As [`Job::run`], but runs fio in a cgroup if one is given.
    ///
    /// # Errors
    ///
    /// As [`Job::run`].
    pub fn run_in(&self, group: Option<&Cgroup>) -> Result<Outcome> {
        let limit = match self.task {
            Task::Timed { run_ms, .. } => Duration::from_millis(run_ms * 2) + Duration::from_secs(60),
            _ => Duration::from_secs(300),
        };
        let mut command = match group {
            Some(_) => child::command_in_group(group, &["fio".to_owned()])?,
            None => Command::new("fio"),
        };
        subject::clear_foreign_settings(&mut command);
        command.args(self.arguments()).args(COMMON_ARGUMENTS);
        if self.engine.is_huge {
            command.env(GLIBC_HUGE_PAGES.0, GLIBC_HUGE_PAGES.1);
        }
        let finished = RunningGroup::start(&mut command)?.finish(limit)?;
        let complaint = String::from_utf8_lossy(&finished.stderr);
        Ok(match self.parse_output(&finished.stdout) {
            Ok(line) if finished.status.success() => Outcome::Measured(line),
            Ok(_) => Outcome::Failed(format!("fio: {}: {}", finished.status, complaint.trim())),
            Err(why) => Outcome::Failed(format!("fio: {why}: {}", complaint.trim())),
        })
    }

    /// Extracts the metrics of fio's only job group from its JSON. The CPU time is that of the job threads and excludes
    /// fio's startup.
    fn parse_output(&self, stdout: &[u8]) -> std::result::Result<Value, String> {
        // fio may print other text before the JSON.
        let begin = stdout.iter().position(|byte| *byte == b'{').ok_or("fio printed nothing")?;
        let output: Value = serde_json::from_slice(&stdout[begin..]).map_err(|cause| cause.to_string())?;
        let job = &output["jobs"][0];
        let side = &job[if self.is_write() { "write" } else { "read" }];
        if let Some(error) = job["error"].as_i64().filter(|error| *error != 0) {
            return Err(io::Error::from_raw_os_error(error as i32).to_string());
        }
        let number =
            |value: &Value, name: &str| value[name].as_f64().ok_or_else(|| format!("fio's output lacks {name}"));
        let io_bytes = self.io_bytes as f64;
        let ios = match self.task {
            // `io_bytes` has the bytes of operations that completed within the run, and `total_ios` the number of
            // operations that were started.
            Task::Timed { .. } => side["io_bytes"].as_f64().map(|bytes| bytes / io_bytes),
            // In a replay, `io_bytes` lacks the operations that completed last.
            Task::Pass { .. } | Task::Replay { .. } => side["total_ios"].as_f64(),
        };
        let ios = ios.ok_or("fio's output lacks the number of transfers")?;
        if ios == 0.0 {
            return Err("it did nothing".to_owned());
        }
        let job_ms = number(job, "job_runtime")?;
        let cpu_ms = |name: &str| {
            let told = number(job, name)? / 100.0 * job_ms;
            Ok::<f64, String>(if told > 0.0 { told + MEAN_TRUNCATION_MS } else { 0.0 })
        };
        let cpu_ms = cpu_ms("usr_cpu")? + cpu_ms("sys_cpu")?;
        let seconds = number(side, "runtime")? / 1000.0;
        let times = &side["lat_ns"]["percentile"];
        let percentile = |name: &str| number(times, name).map(|ns| ns / 1000.0);
        Ok(json!({
            IOS: ios / seconds,
            MIB: ios * io_bytes / seconds / f64::from(1 << 20),
            CPU: cpu_ms * 1000.0 / ios,
            P50: percentile("50.000000")?,
            P99: percentile("99.000000")?,
            P999: percentile("99.900000")?,
        }))
    }
}

/// Writes a list of write operations at the offsets `places` to the file `to`, in fio's iolog format, version 2. The
/// last operation is a datasync.
///
/// # Errors
///
/// An I/O error of the file system.
pub fn write_list(to: &Path, places: &[u64], io_bytes: u64) -> io::Result<()> {
    let mut list = BufWriter::new(std::fs::File::create(to)?);
    writeln!(list, "fio version 2 iolog\nfile add\nfile open")?;
    for offset in places {
        writeln!(list, "file write {offset} {io_bytes}")?;
    }
    writeln!(list, "file datasync 0 0\nfile close")?;
    list.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The metrics must be parsed from fio's JSON output, even if a line of text precedes it. An error that fio
    /// reports, missing writes and empty output must be errors.
    #[test]
    fn fio_output_is_parsed() {
        let output = |error: i64| {
            let times = json!({"50.000000": 1500, "99.000000": 2000, "99.900000": 3000});
            let read = json!({"total_ios": 1000, "runtime": 500, "io_bytes": 4096000, "lat_ns": {"percentile": times}});
            let job = json!({"error": error, "read": read, "usr_cpu": 0.0, "sys_cpu": 40.0, "job_runtime": 1000});
            format!("note: something\n{}", json!({"jobs": [job]}))
        };
        let read = |text: &str, is_write| {
            let (path, task) = (Path::new("file"), Task::Pass { is_write, is_append: false });
            let job = Job { engine: PSYNC, path, len_bytes: 1 << 20, io_bytes: 4096, depth: 1, task };
            job.parse_output(text.as_bytes())
        };
        let line = read(&output(0), false).expect("it can be read");
        let of = |name: &str| line[name].as_f64();
        // A CPU time of zero must get no correction for truncation.
        assert_eq!((of(IOS), of(CPU), of(P50)), (Some(2000.0), Some(400.5), Some(1.5)));
        assert_eq!(of(MIB), Some(7.8125));
        assert!(read(&output(5), false).is_err_and(|why| why.contains("os error 5")));
        assert!(read(&output(0), true).is_err() && read("", false).is_err());
    }

    /// fio must replay an I/O list on a file whose name has spaces and colons, and write exactly at the list's offsets.
    #[test]
    fn fio_replays_a_list_exactly() {
        if let Some(gap) = missing_reason() {
            return println!("skipped: {gap}");
        }
        let folder = tempfile::Builder::new().prefix("a list: ").tempdir_in("/var/tmp").expect("a folder");
        let (path, list) = (folder.path().join("a file"), folder.path().join("list"));
        std::fs::write(&path, vec![0; 1 << 20]).expect("written");
        let places = [0, 8192, 12288, 1 << 19];
        write_list(&list, &places, 4096).expect("written");

        let (path, task) = (path.as_path(), Task::Replay { list: &list });
        let replay = Job { engine: PSYNC, path, len_bytes: 1 << 20, io_bytes: 4096, depth: 1, task };
        match replay.run().expect("it ran") {
            Outcome::Measured(_) => {}
            Outcome::Failed(why) if why.contains("Invalid argument") => {
                return println!("skipped: no O_DIRECT here: {why}");
            }
            other => panic!("{other:?}"),
        }
        let bytes = std::fs::read(path).expect("read");
        let is_written = |page: &[u8]| page.iter().any(|byte| *byte != 0);
        let written = (0..).zip(bytes.chunks(4096)).filter(|(_, page)| is_written(page)).map(|(at, _)| at * 4096);
        assert!(written.eq(places) && bytes.len() == 1 << 20);
    }
}
