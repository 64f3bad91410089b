//! Control groups with a memory limit. Each test creates its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A control group with a memory limit for the processes of one test. Dropping the value removes the group.
pub struct Group {
    pub folder: PathBuf,
    limit_file: &'static str,
}

impl Group {
    /// Creates a group inside the control group of this process. If that is impossible, prints the reason and returns
    /// `None`.
    pub fn new(name: &str, limit_bytes: u64) -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = |controller: &str| {
            own.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let names = fields.next()?;
                (names.split(',').any(|name| name == controller)).then(|| fields.next().map(str::to_owned))?
            })
        };
        let (folder, limit_file) = match path("memory") {
            Some(path) => (format!("/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"),
            None => (format!("/sys/fs/cgroup{}", path("").unwrap_or_default()), "memory.max"),
        };
        let folder = Path::new(&folder).join(format!("pagemill-test-{}-{name}", std::process::id()));
        if let Err(error) = fs::create_dir(&folder) {
            println!("skipped: no control group can be made: {error}");
            return None;
        }
        let group = Self { folder, limit_file };
        if let Err(error) = group.set_limit(limit_bytes) {
            println!("skipped: no limit can be set: {error}");
            return None;
        }
        Some(group)
    }

    pub fn set_limit(&self, limit_bytes: u64) -> std::io::Result<()> {
        fs::write(self.folder.join(self.limit_file), limit_bytes.to_string())
    }

    /// Moves a process into the group.
    pub fn move_process(&self, pid: u32) {
        fs::write(self.folder.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Returns a command that enters the group and then executes `command`.
    pub fn enter(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        let script = format!("echo 0 > {}/cgroup.procs && exec \"$@\"", self.folder.display());
        inside.args(["-c", &script, "sh"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.stdin(Stdio::null());
        inside
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // An ended process remains in its group for a short time.
        for _ in 0..200 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
