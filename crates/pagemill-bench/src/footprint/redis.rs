//! Redis: runs its own benchmark, stores 200,000 keys, deletes half of them, and rests for two seconds.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::tree::{self, TreeSampler};
use super::{Sample, programs};
use crate::child::{self, RunningGroup};
use crate::error::{Error, Result, doing};
use crate::experiment::Named;
use crate::stats;
use crate::subject::{self, AvailableSubject};

const NAME: &str = "redis";
const KEY_COUNT: u32 = 200_000;
const VALUE_BYTES: usize = 500;
/// Time without requests, after which the memory of the idle server is measured.
const REST_TIME: Duration = Duration::from_secs(2);

/// Number of commands that are sent to the server before their replies are read.
const PIPELINED_COMMANDS: u32 = 1000;

/// Returns the reason why Redis cannot be measured; none if all its programs are installed.
pub fn missing_programs() -> Option<String> {
    let missing = ["redis-server", "redis-benchmark"].into_iter();
    let missing = missing.filter(|name| !programs::is_installed(name));
    let missing: Vec<&str> = missing.collect();
    (!missing.is_empty()).then(|| {
        let missing = missing.join(", ");
        format!("{NAME}: {missing} not installed: apt-get install redis-server redis-tools")
    })
}

/// Runs a Redis server under an allocator, sends it the commands of the experiment, and returns the measurements.
///
/// # Errors
///
/// [`Error::Gap`] if the server failed; [`Error::WrongAnswer`] if it answered wrongly.
pub fn run(ready: &AvailableSubject, folder: &Path) -> Result<Sample> {
    let socket = folder.join("socket");
    // Removes the socket file of an earlier server. It is no error if there is none.
    let _ = std::fs::remove_file(&socket);
    let mut command = Command::new("redis-server");
    command.args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"]);
    command.arg("--unixsocket").arg(&socket).arg("--dir").arg(folder);
    command.current_dir(folder);
    ready.apply(&mut command);
    if ready.preload().is_none()
        && let Some(libc) = subject::installed_file("libc.so.6")
    {
        // Distributions link Redis with jemalloc. With the C library preloaded, glibc's malloc is used instead.
        command.env("LD_PRELOAD", libc);
    }
    let begun = Instant::now();
    let server = RunningGroup::start(&mut command)?;
    let watch = TreeSampler::start(server.id(), ready.preload(), ready.publishes());
    let load_result = apply_load(&server, &socket);
    let wall = begun.elapsed();
    let idle = match &load_result {
        Ok(_) => {
            child::sleep(REST_TIME)?;
            Some(tree::sample_once(server.id(), ready.publishes()))
        }
        Err(_) => None,
    };
    let peaks = watch.stop();
    // The throughput is measured after the memory, so that this measurement does not change the reported memory.
    let ended = load_result.and_then(|mut client| {
        let requests = measure_throughput(&socket)?;
        client.send(&["SHUTDOWN", "NOSAVE"])?;
        Ok(requests)
    });
    match ended {
        Ok(requests) => {
            let finished = server.finish(Duration::from_secs(30))?;
            if !finished.status.success() {
                return Err(Error::Gap(format!("{NAME}: the server ended with {}", finished.status)));
            }
            Ok(Sample { peaks, idle, wall, requests_per_second: Some(requests) })
        }
        Err(ServerFailure::Wrong(what)) => Err(Error::WrongAnswer { subject: ready.name().to_owned(), what }),
        Err(ServerFailure::Lost(why)) => {
            child::check_interrupt()?;
            Err(Error::Gap(format!("{NAME}: {why}")))
        }
    }
}

/// The ways in which a server can fail.
enum ServerFailure {
    /// A reply differs from the stored value.
    Wrong(String),
    /// The server or its benchmark program did not reply, or failed.
    Lost(String),
}

impl From<std::io::Error> for ServerFailure {
    fn from(cause: std::io::Error) -> Self {
        Self::Lost(format!("the server did not answer: {cause}"))
    }
}

fn apply_load(server: &RunningGroup, socket: &Path) -> std::result::Result<Client, ServerFailure> {
    let mut client = Client::connect(server, socket)?;
    run_own_benchmark(socket)?;
    client.call(&["FLUSHALL"], "+OK")?;
    for first in (0..KEY_COUNT).step_by(PIPELINED_COMMANDS as usize) {
        for key in first..first + PIPELINED_COMMANDS {
            client.send(&["SET", &key_name(key), &stored_value(key)])?;
        }
        for _ in 0..PIPELINED_COMMANDS {
            client.expect_reply("+OK")?;
        }
    }
    for first in (0..KEY_COUNT).step_by(PIPELINED_COMMANDS as usize) {
        let odd = (first..first + PIPELINED_COMMANDS).filter(|key| key % 2 == 1);
        for key in odd.clone() {
            client.send(&["DEL", &key_name(key)])?;
        }
        for _ in odd {
            client.expect_reply(":1")?;
        }
    }
    client.call(&["DBSIZE"], &format!(":{}", KEY_COUNT / 2))?;
    for key in (0..KEY_COUNT).step_by(2) {
        client.call(&["GET", &key_name(key)], &stored_value(key))?;
    }
    Ok(client)
}

fn run_own_benchmark(socket: &Path) -> std::result::Result<(), ServerFailure> {
    run_benchmark(socket, &["-t", "set,get,lpush", "-n", "20000", "-r", "1000", "-P", "16", "-q"]).map(drop)
}

/// Measures the rates of SET and GET with values of 500 bytes. Returns their geometric mean.
fn measure_throughput(socket: &Path) -> std::result::Result<f64, ServerFailure> {
    let csv =
        run_benchmark(socket, &["-t", "set,get", "-n", "200000", "-r", "100000", "-P", "16", "-d", "500", "--csv"])?;
    mean_rate(&csv).ok_or_else(|| ServerFailure::Lost(format!("redis-benchmark printed no rates: {csv:.100}")))
}

/// Returns the geometric mean of the two rates in redis-benchmark's CSV output. A line has a rate if its second field
/// is a number.
fn mean_rate(csv: &str) -> Option<f64> {
    let fields = csv.lines().filter_map(|line| line.split(',').nth(1)?.trim_matches('"').parse::<f64>().ok());
    let rates: Vec<Vec<f64>> = fields.map(|rate| vec![rate]).collect();
    (rates.len() == 2).then(|| stats::geometric_means(&rates)[0])
}

fn run_benchmark(socket: &Path, arguments: &[&str]) -> std::result::Result<String, ServerFailure> {
    let mut command = Command::new("redis-benchmark");
    command.args(arguments).arg("-s").arg(socket);
    subject::clear_foreign_settings(&mut command);
    let lost = |error: Error| ServerFailure::Lost(error.to_string());
    let running = RunningGroup::start(&mut command).map_err(lost)?;
    let finished = running.finish(Duration::from_secs(120)).map_err(lost)?;
    match finished.status.success() {
        true => Ok(String::from_utf8_lossy(&finished.stdout).into_owned()),
        false => Err(ServerFailure::Lost(format!("redis-benchmark ended with {}", finished.status))),
    }
}

fn key_name(key: u32) -> String {
    format!("key:{key:07}")
}

fn stored_value(key: u32) -> String {
    format!("{key:09}.").repeat(VALUE_BYTES / 10)
}

/// A connection to the Redis server that sends commands and checks their replies.
struct Client {
    reader: BufReader<UnixStream>,
    writer: std::io::BufWriter<UnixStream>,
}

impl Client {
    /// Connects to the server. Retries until the server listens.
    fn connect(server: &RunningGroup, socket: &Path) -> std::result::Result<Self, ServerFailure> {
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(cause) if server.has_ended() || begun.elapsed() > Duration::from_secs(10) => {
                    return Err(ServerFailure::Lost(format!("the server does not listen: {cause}")));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let reader = BufReader::new(stream.try_clone()?);
        Ok(Self { reader, writer: std::io::BufWriter::new(stream) })
    }

    fn send(&mut self, words: &[&str]) -> std::result::Result<(), ServerFailure> {
        write!(self.writer, "*{}\r\n", words.len())?;
        for word in words {
            write!(self.writer, "${}\r\n{word}\r\n", word.len())?;
        }
        if words[0] == "SHUTDOWN" {
            self.writer.flush()?;
        }
        Ok(())
    }

    fn expect_reply(&mut self, wanted: &str) -> std::result::Result<(), ServerFailure> {
        self.writer.flush()?;
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        let mut answer = line.trim_end().to_owned();
        if let Some(length) = line.strip_prefix('$').and_then(|text| text.trim().parse::<usize>().ok()) {
            let mut bytes = vec![0; length + 2];
            self.reader.read_exact(&mut bytes)?;
            bytes.truncate(length);
            answer = String::from_utf8_lossy(&bytes).into_owned();
        }
        match answer == wanted {
            true => Ok(()),
            false if answer.is_empty() => Err(ServerFailure::Lost("the server hung up".to_owned())),
            false => Err(ServerFailure::Wrong(format!("Redis answered {answer:.60}, not {wanted:.60}"))),
        }
    }

    fn call(&mut self, words: &[&str], wanted: &str) -> std::result::Result<(), ServerFailure> {
        self.send(words)?;
        self.expect_reply(wanted)
    }
}

/// Makes a folder for the server's socket and data.
pub fn make_folder() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(doing("making a folder for Redis"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The geometric mean of the rates of SET and GET must be computed from CSV output with a header line. If one rate
    /// is missing, there must be no mean.
    #[test]
    fn csv_rates_are_averaged() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\"\n\"SET\",\"200.00\",\"0.1\"\n\"GET\",\"800.00\",\"0.1\"\n";

        assert!(mean_rate(csv).is_some_and(|rate| (rate - 400.0).abs() < 1e-6));
        assert!(mean_rate("\"SET\",\"200.00\"\n").is_none());
    }
}
