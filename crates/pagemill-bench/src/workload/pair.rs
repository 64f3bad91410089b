//! Starts the ebizzy workload and the memory hog from one launcher process, so that both are in the same process tree
//! and cgroup.

use std::fs;
use std::io::Read;
use std::process::{Child, ChildStdout, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{Failure, WorkloadResult, check_status, child_command, hog};

/// Time limit for the memory hog to end after the stop file was created. The hog first completes its round.
const HOG_STOP_TIMEOUT: Duration = Duration::from_secs(10);

crate::workload::arguments! {
    /// Arguments of the ebizzy workload and of the memory hog, which run as a pair of processes. Both use the lock file
    /// in the hog's folder.
    PairArguments:
    threads: usize,
    warm_ms: u64,
    measure_ms: u64,
    burst_mib: usize,
    burst_every_ms: u64,
    /// The kind of memory in which the ebizzy workload stores its copies.
    #[arg(default_value = "malloc")]
    memory: String,
    /// In one record of this many, the sum of the whole copy is compared with the sum of its source; 0: in none.
    #[arg(default_value_t = 0)]
    sum_every: u64,
    ..hog: hog::HogArguments,
}

/// A child process that is killed when this value is dropped.
struct ChildProcess(Child);

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Both calls fail only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the ebizzy workload and the memory hog, waits for the end of the workload, and stops the hog. Returns
/// [`Failure::Killed`] if either process was killed.
pub fn run(arguments: &PairArguments) -> WorkloadResult {
    let folder = &arguments.hog.folder;
    let lock = folder.join(hog::LOCK_FILE).display().to_string();
    let hog_arguments = [
        ("--mib", arguments.hog.mib.to_string()),
        ("--pause-ms", arguments.hog.pause_ms.to_string()),
        ("--folder", folder.display().to_string()),
    ];
    let work_arguments = [
        ("--threads", arguments.threads.to_string()),
        ("--warm-ms", arguments.warm_ms.to_string()),
        ("--measure-ms", arguments.measure_ms.to_string()),
        ("--burst-mib", arguments.burst_mib.to_string()),
        ("--burst-every-ms", arguments.burst_every_ms.to_string()),
        ("--memory", arguments.memory.clone()),
        ("--sum-every", arguments.sum_every.to_string()),
        ("--lock", lock),
    ];
    let mut work = start("__ebizzy", &work_arguments)?;
    let mut hog = start("__hog", &hog_arguments)?;
    let work_status = loop {
        if let Some(status) = exit_status(&mut work)? {
            break status;
        }
        if let Some(status) = exit_status(&mut hog)? {
            check_status("the hog", status)?;
            return Err("the hog ended too early".into());
        }
        thread::sleep(Duration::from_millis(5));
    };
    check_status("ebizzy", work_status)?;
    fs::write(folder.join(hog::STOP_FILE), "")?;
    let stop_time = Instant::now();
    let hog_status = loop {
        match exit_status(&mut hog)? {
            Some(status) => break status,
            None if stop_time.elapsed() > HOG_STOP_TIMEOUT => {
                return Err("the hog did not stop".into());
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    check_status("the hog", hog_status)?;
    let (mut line, neighbour) = (read_json_line(&mut work)?, read_json_line(&mut hog)?);
    line["hog_rounds"] = neighbour["rounds"].clone();
    line["hog_refused"] = neighbour["refused"].clone();
    Ok(line)
}

fn start(name: &str, arguments: &[(&str, String)]) -> Result<ChildProcess, Failure> {
    let mut command = child_command(name, arguments)?;
    command.stdout(Stdio::piped());
    let child = command.spawn().map_err(|cause| format!("starting {name}: {cause}"))?;
    Ok(ChildProcess(child))
}

fn exit_status(process: &mut ChildProcess) -> Result<Option<ExitStatus>, Failure> {
    process.0.try_wait().map_err(Failure::from)
}

/// Reads the JSON that a process has printed before it ended. The pipe buffers the whole text.
fn read_json_line(process: &mut ChildProcess) -> WorkloadResult {
    let mut text = String::new();
    let pipe: Option<&mut ChildStdout> = process.0.stdout.as_mut();
    let pipe = pipe.ok_or("no output was captured")?;
    pipe.read_to_string(&mut text)?;
    serde_json::from_str(&text).map_err(Failure::from)
}
