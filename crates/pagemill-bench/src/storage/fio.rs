//! fio as a peer: one job by its arguments, its JSON read into the same figures as ours.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::{CPU, IOS, MIB, P50, P99, P999};
use crate::child::{Outcome, Running};
use crate::error::Result;
use crate::subject;

/// glibc asks for huge pages for fio's buffers, which it takes by one `malloc`.
const HUGE_MALLOC: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");

/// How fio does its transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    pub name: &'static str,
    pub settings: &'static [&'static str],
    /// Buffers in transparent huge pages.
    pub is_huge: bool,
}

/// Blocking calls.
pub const PSYNC: Engine = Engine { name: "psync", settings: &[], is_huge: false };
pub const LIBAIO: Engine = Engine { name: "libaio", settings: &[], is_huge: false };
pub const URING: Engine = Engine { name: "io_uring", settings: &[], is_huge: false };
/// Buffers and file registered.
pub const URING_FIXED: Engine =
    Engine { name: "io_uring", settings: &["--fixedbufs=1", "--registerfiles=1"], is_huge: false };

/// One run of fio.
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

/// Why fio cannot be run, if it cannot.
pub fn gap() -> Option<String> {
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
        // A colon separates names of files.
        let path = self.path.display().to_string().replace(':', "\\:");
        let words = [
            "--name=pagemill".to_owned(),
            format!("--filename={path}"),
            format!("--rw={way}"),
            format!("--bs={}", self.io_bytes),
            format!("--size={}", self.len_bytes),
            format!("--ioengine={}", self.engine.name),
            format!("--iodepth={}", self.depth),
            format!("--numjobs={}", self.jobs),
            format!("--runtime={}ms", self.run_ms),
            format!("--ramp_time={}ms", self.run_ms / 10),
        ];
        let fixed = ["--direct=1", "--thread", "--group_reporting", "--time_based", "--norandommap", "--randrepeat=0"];
        let output =
            ["--output-format=json", "--lat_percentiles=1", "--clat_percentiles=0", "--percentile_list=50:99:99.9"];
        // Otherwise it changes what it writes, each time.
        let guard = if self.is_write { "--scramble_buffers=0" } else { "--readonly" };
        let rest = fixed.iter().chain(&output).chain(self.engine.settings).copied().chain([guard]);
        words.into_iter().chain(rest.map(str::to_owned)).collect()
    }

    /// Runs it to its figures.
    ///
    /// # Errors
    ///
    /// If the bench is interrupted, or fio does not end.
    pub fn run(&self) -> Result<Outcome> {
        let mut command = Command::new("fio");
        subject::clear_foreign_settings(&mut command);
        command.args(self.arguments());
        if self.engine.is_huge {
            command.env(HUGE_MALLOC.0, HUGE_MALLOC.1);
        }
        let limit = Duration::from_millis(self.run_ms * 2) + Duration::from_secs(60);
        let finished = Running::start(&mut command)?.finish(limit)?;
        let complaint = String::from_utf8_lossy(&finished.stderr);
        let figures = figures(&finished.stdout, self.is_write);
        Ok(match figures {
            Ok(line) if finished.status.success() => Outcome::Measured(line),
            Ok(_) => Outcome::Failed(format!("fio: {}: {}", finished.status, complaint.trim())),
            Err(why) => Outcome::Failed(format!("fio: {why}: {}", complaint.trim())),
        })
    }
}

/// What fio says of its one group of jobs. The processor's time is that of its jobs, without its start.
fn figures(stdout: &[u8], is_write: bool) -> std::result::Result<Value, String> {
    // Before the JSON it may say something else.
    let begin = stdout.iter().position(|byte| *byte == b'{').ok_or("it said nothing")?;
    let said: Value = serde_json::from_slice(&stdout[begin..]).map_err(|cause| cause.to_string())?;
    let job = &said["jobs"][0];
    let side = &job[if is_write { "write" } else { "read" }];
    if let Some(error) = job["error"].as_i64().filter(|error| *error != 0) {
        return Err(std::io::Error::from_raw_os_error(error as i32).to_string());
    }
    let number = |value: &Value, name: &str| value[name].as_f64().ok_or_else(|| format!("it does not say {name}"));
    let ios = number(side, "total_ios")?;
    if ios == 0.0 {
        return Err("it did nothing".to_owned());
    }
    let share = (number(job, "usr_cpu")? + number(job, "sys_cpu")?) / 100.0;
    let seconds = number(side, "runtime")? / 1000.0;
    let times = &side["lat_ns"]["percentile"];
    let percentile = |name: &str| number(times, name).map(|ns| ns / 1000.0);
    Ok(json!({
        IOS: ios / seconds,
        MIB: number(side, "io_bytes")? / seconds / f64::from(1 << 20),
        CPU: share * number(job, "job_runtime")? * 1000.0 / ios,
        P50: percentile("50.000000")?,
        P99: percentile("99.000000")?,
        P999: percentile("99.900000")?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates, times and the processor's share, after a line that is no JSON; errors and silence are told.
    #[test]
    fn output_is_read() {
        let said = |error: i64| {
            let times = json!({"50.000000": 1500, "99.000000": 2000, "99.900000": 3000});
            let read = json!({"total_ios": 1000, "runtime": 500, "io_bytes": 4096000, "lat_ns": {"percentile": times}});
            let job = json!({"error": error, "read": read, "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 1000});
            format!("note: something\n{}", json!({"jobs": [job]}))
        };
        let line = figures(said(0).as_bytes(), false).expect("it can be read");
        let of = |name: &str| line[name].as_f64();
        assert_eq!((of(IOS), of(CPU), of(P50)), (Some(2000.0), Some(400.0), Some(1.5)));
        assert_eq!(of(MIB), Some(7.8125));
        assert!(figures(said(5).as_bytes(), false).is_err_and(|why| why.contains("os error 5")));
        assert!(figures(said(0).as_bytes(), true).is_err() && figures(b"", false).is_err());
    }
}
