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

/// Number of attempts to remove the group.
const REMOVE_ATTEMPTS: usize = 200;
/// Pause between two attempts.
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// The handle by which `run` controls the guard of a group.
pub struct Guard(Child);

impl Guard {
    /// Starts the guard of a group.
    ///
    /// # Errors
    ///
    /// Errors of starting the process.
    pub fn start(folder: &Path) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args([OsStr::new("run-guard"), folder.as_os_str()]);
        // The guard has a process group of its own, so that it does not receive signals that the terminal sends to
        // `run`. The guard does not belong to an outer `run`, so nothing is preloaded into it.
        command.env_remove("LD_PRELOAD").process_group(0).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// Ends the guard. The group is not changed.
    pub fn dismiss(mut self) {
        if let Some(mut input) = self.0.stdin.take() {
            let _ = input.write_all(b"x");
        }
        let _ = self.0.wait();
    }
}

/// The main function of the guard's process.
pub fn main(folder: &Path) -> ExitCode {
    wait_for_run(folder, &mut io::stdin());
    ExitCode::SUCCESS
}

fn wait_for_run(folder: &Path, input: &mut impl Read) {
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
        if group::remove(folder) {
            return;
        }
        thread::sleep(REMOVE_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The guard reads a byte, or the end of its input. After a byte it must do nothing. After the end without a byte,
    /// it must write to `cgroup.kill`, if the file exists, and remove the group.
    #[test]
    fn the_end_of_input_without_a_byte_kills() {
        let folder = tempfile::tempdir().unwrap();
        let (group, kill) = (folder.path().join("group"), folder.path().join("group/cgroup.kill"));
        fs::create_dir(&group).unwrap();
        fs::write(&kill, "").unwrap();
        wait_for_run(&group, &mut &b"x"[..]);
        assert_eq!(fs::read_to_string(&kill).unwrap(), "");
        wait_for_run(&group, &mut io::empty());
        assert_eq!(fs::read_to_string(&kill).unwrap(), "1");
        fs::remove_file(&kill).unwrap();
        wait_for_run(&group, &mut io::empty());
        assert!(!group.exists(), "the empty group is removed");
    }
}
