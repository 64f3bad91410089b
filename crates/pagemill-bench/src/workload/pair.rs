//! Starts the ebizzy workload and the memory hog from one launcher process, so that both are in the same process tree
//! and cgroup.

use std::fs;
use std::io::Read;
use std::process::{Child, ChildStdout, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{Failure, WorkloadResult, check_status, hog};
use crate::child;

/// Time limit for the memory hog to end after the stop file was created. The hog first completes its round.
const HOG_STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Arguments of the memory hog, and of the ebizzy workload, which run as a pair of processes. Both use the lock file in
/// the hog's folder.
#[derive(Clone, Debug, clap::Args)]
pub struct PairArguments {
    #[command(flatten)]
    pub hog: hog::HogArguments,
    /// The arguments of the ebizzy workload, except its lock file.
    #[arg(last = true)]
    pub work: Vec<String>,
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
    let (lock, folder_name) = (folder.join(hog::LOCK_FILE).display().to_string(), folder.display().to_string());
    let numbers = [("--mib", arguments.hog.mib as u64), ("--pause-ms", arguments.hog.pause_ms)];
    let mut work_line = child::command_words(&["__ebizzy", "--lock", &lock], &[]);
    work_line.extend_from_slice(&arguments.work);
    let mut work = start(work_line)?;
    let mut hog = start(child::command_words(&["__hog", "--folder", &folder_name], &numbers))?;
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

fn start(line: Vec<String>) -> Result<ChildProcess, Failure> {
    let mut command = child::workload_command(&line)?;
    command.stdout(Stdio::piped());
    let child = command.spawn().map_err(|cause| format!("starting {}: {cause}", line[0]))?;
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
