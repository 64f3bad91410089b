//! A process that ends the tree of a killed `run`: hidden command `run-guard`.
//!
//! It reads its standard input. A byte dismisses it. The end of the input without a byte means that `run` was killed.
//! Then it makes the kernel kill all processes of the group (`cgroup.kill`, version 2 since Linux 5.14) and removes
//! the group.

use super::group;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

/// Number of attempts to remove the group, and the pause between them.
const TRIES: usize = 200;
const TRY_EVERY: Duration = Duration::from_millis(10);

/// `run`'s handle of a group's guard.
pub struct Guard(Child);

impl Guard {
    /// # Errors
    ///
    /// Errors of starting it.
    pub fn start(folder: &Path) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args([OsStr::new("run-guard"), folder.as_os_str()]);
        // A separate process group: signals of the terminal are for `run`. The guard is no part of an outer run.
        command.env_remove("LD_PRELOAD").process_group(0).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// Ends the guard without any effect.
    pub fn dismiss(mut self) {
        if let Some(mut input) = self.0.stdin.take() {
            let _ = input.write_all(b"x");
        }
        let _ = self.0.wait();
    }
}

/// Runs the guard.
pub fn main(folder: &Path) -> ExitCode {
    act(folder, &mut io::stdin());
    ExitCode::SUCCESS
}

fn act(folder: &Path, input: &mut impl Read) {
    let is_dismissed = input.read(&mut [0]).is_ok_and(|count| count > 0);
    if is_dismissed {
        return;
    }
    let kill = folder.join("cgroup.kill");
    if kill.exists() {
        let _ = fs::write(kill, "1");
    }
    // Killed processes need some time to exit. A later command removes the group if they take longer.
    for _ in 0..TRIES {
        if group::remove(folder) {
            return;
        }
        thread::sleep(TRY_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the input ends without a byte, kills through the group's file, where it exists; otherwise does nothing.
    #[test]
    fn an_end_without_a_word_kills() {
        let folder = tempfile::tempdir().unwrap();
        let (group, kill) = (folder.path().join("group"), folder.path().join("group/cgroup.kill"));
        fs::create_dir(&group).unwrap();
        fs::write(&kill, "").unwrap();
        act(&group, &mut &b"x"[..]);
        assert_eq!(fs::read_to_string(&kill).unwrap(), "");
        act(&group, &mut io::empty());
        assert_eq!(fs::read_to_string(&kill).unwrap(), "1");
        fs::remove_file(&kill).unwrap();
        act(&group, &mut io::empty());
        assert!(!group.exists(), "removed once it is empty");
    }
}
