//! The guard: a process that kills the processes of a control group if their `run` is killed. It is the hidden command
//! `run-guard`.
//!
//! The guard reads its standard input, which is a pipe from `run`. If it reads a byte, the guard ends and does nothing
//! else. If the input ends without a byte, `run` was killed. The guard then makes the kernel kill all processes of the
//! group (`cgroup.kill`, version 2 since Linux 5.14), and removes the group.

use super::group;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

/// Number of attempts to remove the group after its processes were killed.
const REMOVE_ATTEMPTS: usize = 200;
/// Pause between two attempts to remove the group.
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// The handle with which `run` ends its guard process.
pub struct Guard(Child);

impl Guard {
    /// Starts the guard process for the control group with this folder.
    ///
    /// # Errors
    ///
    /// The error if the process cannot be started.
    pub fn start(folder: &Path) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args([OsStr::new("run-guard"), folder.as_os_str()]);
        // The guard has a process group of its own, so that it does not receive signals that the terminal sends to
        // `run`. The guard does not belong to an outer `run`, so nothing is preloaded into it.
        command.env_remove("LD_PRELOAD").process_group(0).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// Ends the guard process. The group and its processes remain.
    pub fn dismiss(mut self) {
        if let Some(mut input) = self.0.stdin.take() {
            let _ = input.write_all(b"x");
        }
        let _ = self.0.wait();
    }
}

/// The main function of the guard process.
pub fn main(folder: &Path) -> ExitCode {
    wait_for_end_of_run(folder, &mut io::stdin());
    ExitCode::SUCCESS
}

fn wait_for_end_of_run(folder: &Path, input: &mut impl Read) {
    let is_dismissed = input.read(&mut [0]).is_ok_and(|count| count > 0);
    if is_dismissed {
        return;
    }
    let kill = folder.join("cgroup.kill");
    if kill.exists() {
        let _ = fs::write(kill, "1");
    }
    // Killed processes need some time to exit. If that takes longer than all attempts, a later command removes the
    // group.
    for _ in 0..REMOVE_ATTEMPTS {
        if group::remove_when_empty(folder) {
            return;
        }
        thread::sleep(REMOVE_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The input of the guard is a byte, or ends at once. After a byte, the guard must do nothing. After an end without
    /// a byte, it must write to `cgroup.kill`, if that file exists, and remove the group.
    #[test]
    fn the_end_of_input_without_a_byte_kills_the_group() {
        let folder = tempfile::tempdir().unwrap();
        let (group, kill) = (folder.path().join("group"), folder.path().join("group/cgroup.kill"));
        fs::create_dir(&group).unwrap();
        fs::write(&kill, "").unwrap();
        wait_for_end_of_run(&group, &mut &b"x"[..]);
        assert_eq!(fs::read_to_string(&kill).unwrap(), "");
        wait_for_end_of_run(&group, &mut io::empty());
        assert_eq!(fs::read_to_string(&kill).unwrap(), "1");
        fs::remove_file(&kill).unwrap();
        wait_for_end_of_run(&group, &mut io::empty());
        assert!(!group.exists(), "the empty group is removed");
    }
}
