//! fio as a peer: runs one fio job and converts its JSON output into the bench's metrics.

use std::io::{self, BufWriter, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::{CPU, IOS, MIB, P50, P99, P999};
use crate::child::{Outcome, RunningGroup};
use crate::error::{Error, Result};
use crate::report::Report;
use crate::subject;

/// Makes glibc use huge pages for fio's buffers, which fio allocates with one `malloc`.
const GLIBC_HUGE_PAGES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

const COMMON_ARGUMENTS: [&str; 6] = [
    "--direct=1",
    "--thread",
    "--output-format=json",
    "--lat_percentiles=1",
    "--clat_percentiles=0",
    "--percentile_list=50:99:99.9",
];

/// Argument with which fio writes the same bytes each time. By default fio changes the bytes of each write.
const KEEP_BYTES_ARGUMENT: &str = "--scramble_buffers=0";

/// An I/O engine of fio, with its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    pub name: &'static str,
    pub settings: &'static [&'static str],
    /// Whether the buffers are in transparent huge pages.
    pub is_huge: bool,
}

/// Correction that is added to the user time and to the system time of fio. fio truncates each of them to whole
/// milliseconds, which subtracts half a millisecond on average.
const MEAN_TRUNCATION_MS: f64 = 0.5;

/// fio's engine that uses blocking system calls.
pub const PSYNC: Engine = Engine { name: "psync", settings: &[], is_huge: false };
/// fio's engine that uses the kernel's older asynchronous interface (`io_submit`).
pub const LIBAIO: Engine = Engine { name: "libaio", settings: &[], is_huge: false };
/// fio's io_uring engine with unregistered buffers and an unregistered file.
pub const URING: Engine = Engine { name: "io_uring", settings: &[], is_huge: false };
/// fio's io_uring engine with registered buffers and a registered file.
pub const URING_FIXED: Engine =
    Engine { name: "io_uring", settings: &["--fixedbufs=1", "--registerfiles=1"], is_huge: false };
/// fio's io_uring engine with registered buffers only. Replays use it: fio opens the file of an I/O list too late to
/// register it.
pub const URING_FIXED_BUFFERS: Engine = Engine { name: "io_uring", settings: &["--fixedbufs=1"], is_huge: false };

/// A fio job: transfers of one length at sequential or random offsets.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub engine: Engine,
    pub path: &'a Path,
    pub len_bytes: u64,
    pub io_bytes: u64,
    pub is_random: bool,
    pub is_write: bool,
    pub depth: u64,
    pub jobs: u64,
    pub run_ms: u64,
}

/// Returns a path as fio's arguments spell it. fio splits file names at colons, so these are escaped.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(':', "\\:")
}

/// If the program fio is missing, removes the subjects that need it from `subjects`, and adds a sentence (gap) to the
/// report.
///
/// # Errors
///
/// [`Error::CannotRun`] if no subject is left.
pub fn remove_fio_if_missing<S>(subjects: &mut Vec<S>, is_fio: impl Fn(&S) -> bool, report: &mut Report) -> Result<()> {
    if subjects.iter().any(&is_fio)
        && let Some(gap) = missing_reason()
    {
        subjects.retain(|subject| !is_fio(subject));
        if subjects.is_empty() {
            return Err(Error::CannotRun(gap));
        }
        report.add_gap(gap);
    }
    Ok(())
}

/// Returns the reason why fio cannot be run; none if it can.
fn missing_reason() -> Option<String> {
    let version = Command::new("fio").arg("--version").stdin(Stdio::null()).output();
    match version {
        Ok(output) if output.status.success() => None,
        _ => Some("fio is not there (Debian: apt install fio): nothing to compare with".to_owned()),
    }
}

impl Job<'_> {
    fn arguments(&self) -> Vec<String> {
        let way = match (self.is_random, self.is_write) {
            (true, false) => "randread",
            (true, true) => "randwrite",
            (false, false) => "read",
            (false, true) => "write",
        };
        let words = [
            "--name=pagemill".to_owned(),
            format!("--filename={}", escaped(self.path)),
            format!("--rw={way}"),
            format!("--bs={}", self.io_bytes),
            format!("--size={}", self.len_bytes),
            format!("--ioengine={}", self.engine.name),
            format!("--iodepth={}", self.depth),
            format!("--numjobs={}", self.jobs),
            format!("--runtime={}ms", self.run_ms),
            format!("--ramp_time={}ms", self.run_ms / 10),
        ];
        let fixed = ["--group_reporting", "--time_based", "--norandommap", "--randrepeat=0"];
        let guard = if self.is_write { KEEP_BYTES_ARGUMENT } else { "--readonly" };
        let rest = fixed.iter().chain(self.engine.settings).copied().chain([guard]);
        words.into_iter().chain(rest.map(str::to_owned)).collect()
    }

    /// Runs fio with this job, and returns the metrics.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] after a signal; [`Error::CannotRun`] if fio does not end in time.
    pub fn run(&self) -> Result<Outcome> {
        let limit = Duration::from_millis(self.run_ms * 2) + Duration::from_secs(60);
        // fio's `io_bytes` has the bytes of operations that completed within the run, and `total_ios` the number of
        // operations that were started.
        let ios = |side: &Value| side["io_bytes"].as_f64().map(|bytes| bytes / self.io_bytes as f64);
        run(self.engine, self.arguments(), limit, |stdout| parse_fio_output(stdout, self.is_write, self.io_bytes, ios))
    }
}

/// A fio job that reads or writes a file once, in order. After writes it syncs the file, which counts as a part of the
/// job.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    pub engine: Engine,
    pub path: &'a Path,
    pub len_bytes: u64,
    pub io_bytes: u64,
    pub is_write: bool,
    /// Whether the file is empty before the job, so that the writes extend it.
    pub is_append: bool,
    pub depth: u64,
}

impl Pass<'_> {
    fn arguments(&self) -> Vec<String> {
        let (way, guard) = if self.is_write { ("write", KEEP_BYTES_ARGUMENT) } else { ("read", "--readonly") };
        let words = [
            "--name=pagemill".to_owned(),
            format!("--filename={}", escaped(self.path)),
            format!("--rw={way}"),
            format!("--bs={}", self.io_bytes),
            format!("--size={}", self.len_bytes),
            format!("--ioengine={}", self.engine.name),
            format!("--iodepth={}", self.depth),
            guard.to_owned(),
        ];
        let end = self.is_write.then(|| "--end_fsync=1".to_owned());
        // By default fio makes the file as long as the job before it starts the clock.
        let append = self.is_append.then_some(["--fallocate=none", "--file_append=1"]);
        let end = end.into_iter().chain(append.into_iter().flatten().map(str::to_owned));
        words.into_iter().chain(end).chain(self.engine.settings.iter().map(|&word| word.to_owned())).collect()
    }

    /// Runs the job and returns its metrics.
    ///
    /// # Errors
    ///
    /// As [`Job::run`].
    pub fn run(&self) -> Result<Outcome> {
        let ios = |side: &Value| side["total_ios"].as_f64();
        run(self.engine, self.arguments(), Duration::from_secs(300), |stdout| {
            parse_fio_output(stdout, self.is_write, self.io_bytes, ios)
        })
    }
}

/// A fio job that writes at the offsets of a list that [`write_list`] made.
#[derive(Clone, Copy, Debug)]
pub struct Replay<'a> {
    pub engine: Engine,
    pub path: &'a Path,
    /// The file of an I/O list made by [`write_list`].
    pub list: &'a Path,
    pub io_bytes: u64,
    pub depth: u64,
}

impl Replay<'_> {
    fn arguments(&self) -> Vec<String> {
        let words = [
            "--name=pagemill".to_owned(),
            format!("--read_iolog={}", escaped(self.list)),
            // The list contains a placeholder instead of the file name, since fio allows no spaces and at most 255
            // bytes in it.
            format!("--replay_redirect={}", self.path.display()),
            format!("--ioengine={}", self.engine.name),
            format!("--iodepth={}", self.depth),
        ];
        let rest = ["--replay_no_stall=1", KEEP_BYTES_ARGUMENT].into_iter().chain(self.engine.settings.iter().copied());
        words.into_iter().chain(rest.map(str::to_owned)).collect()
    }

    /// Runs fio with the list of offsets, and returns the metrics.
    ///
    /// # Errors
    ///
    /// As [`Job::run`].
    pub fn run(&self) -> Result<Outcome> {
        // In a replay, fio's `io_bytes` lacks the operations that completed last.
        let ios = |side: &Value| side["total_ios"].as_f64();
        run(self.engine, self.arguments(), Duration::from_secs(300), |stdout| {
            parse_fio_output(stdout, true, self.io_bytes, ios)
        })
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

fn run(
    engine: Engine,
    arguments: Vec<String>,
    limit: Duration,
    read: impl FnOnce(&[u8]) -> std::result::Result<Value, String>,
) -> Result<Outcome> {
    let mut command = Command::new("fio");
    subject::clear_foreign_settings(&mut command);
    command.args(arguments).args(COMMON_ARGUMENTS);
    if engine.is_huge {
        command.env(GLIBC_HUGE_PAGES.0, GLIBC_HUGE_PAGES.1);
    }
    let finished = RunningGroup::start(&mut command)?.finish(limit)?;
    let complaint = String::from_utf8_lossy(&finished.stderr);
    Ok(match read(&finished.stdout) {
        Ok(line) if finished.status.success() => Outcome::Measured(line),
        Ok(_) => Outcome::Failed(format!("fio: {}: {}", finished.status, complaint.trim())),
        Err(why) => Outcome::Failed(format!("fio: {why}: {}", complaint.trim())),
    })
}

/// Extracts the metrics of fio's only job group from its JSON. `ios` returns the number of operations from the JSON of
/// the read or write side. The CPU time is that of the job threads and excludes fio's startup.
fn parse_fio_output(
    stdout: &[u8],
    is_write: bool,
    io_bytes: u64,
    ios: impl FnOnce(&Value) -> Option<f64>,
) -> std::result::Result<Value, String> {
    // fio may print other text before the JSON.
    let begin = stdout.iter().position(|byte| *byte == b'{').ok_or("fio printed nothing")?;
    let output: Value = serde_json::from_slice(&stdout[begin..]).map_err(|cause| cause.to_string())?;
    let job = &output["jobs"][0];
    let side = &job[if is_write { "write" } else { "read" }];
    if let Some(error) = job["error"].as_i64().filter(|error| *error != 0) {
        return Err(std::io::Error::from_raw_os_error(error as i32).to_string());
    }
    let number = |value: &Value, name: &str| value[name].as_f64().ok_or_else(|| format!("fio's output lacks {name}"));
    let ios = ios(side).ok_or("fio's output lacks the number of transfers")?;
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
        MIB: ios * io_bytes as f64 / seconds / f64::from(1 << 20),
        CPU: cpu_ms * 1000.0 / ios,
        P50: percentile("50.000000")?,
        P99: percentile("99.000000")?,
        P999: percentile("99.900000")?,
    }))
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
        let read =
            |text: &str, is_write| parse_fio_output(text.as_bytes(), is_write, 4096, |side| side["total_ios"].as_f64());
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

        let replay = Replay { engine: PSYNC, path: &path, list: &list, io_bytes: 4096, depth: 1 };
        match replay.run().expect("it ran") {
            Outcome::Measured(_) => {}
            Outcome::Failed(why) if why.contains("Invalid argument") => {
                return println!("skipped: no O_DIRECT here: {why}");
            }
            other => panic!("{other:?}"),
        }
        let bytes = std::fs::read(&path).expect("read");
        let is_written = |page: &[u8]| page.iter().any(|byte| *byte != 0);
        let written = (0..).zip(bytes.chunks(4096)).filter(|(_, page)| is_written(page)).map(|(at, _)| at * 4096);
        assert!(written.eq(places) && bytes.len() == 1 << 20);
    }
}
