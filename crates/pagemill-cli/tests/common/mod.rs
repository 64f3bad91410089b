//! Helpers of the end-to-end tests: private folders, compiled C programs, and processes that are killed when a test
//! ends.
#![allow(dead_code)] // no test file uses all of it

pub mod fuse;
pub mod group;
pub mod holder;
pub mod ram;
pub mod slab_program;
pub mod sweep;

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Path of the command `pagemill` under test.
pub const PAGEMILL: &str = env!("CARGO_BIN_EXE_pagemill");

/// Timeout of all waits. A test program needs far less time, so a program that is still running after the timeout is
/// considered hung.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// A folder for one test, with private runtime, cache and home folders. Dropping the value removes the folder.
pub struct TestFolder {
    folder: TempDir,
}

impl TestFolder {
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    /// Creates the folder in cargo's target folder, for tests that hide `/tmp`.
    pub fn in_target_folder() -> Self {
        Self::below(Path::new(env!("CARGO_TARGET_TMPDIR")))
    }

    fn below(parent: &Path) -> Self {
        let folder = tempfile::Builder::new().prefix("pagemill-test-").tempdir_in(parent).unwrap();
        for name in ["runtime", "cache", "home"] {
            fs::DirBuilder::new().mode(0o700).create(folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Like [`TestFolder::command_with_libc_fallback`], but Pagemill serves the program from the first call on.
    /// Otherwise the C library would serve most test programs, because they are small.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.command_with_libc_fallback(program);
        command.env("PAGEMILL_AFTER", "0");
        command
    }

    /// Returns a command for `program` that uses the folders of this test and has no Pagemill settings in its
    /// environment.
    pub fn command_with_libc_fallback(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PAGEMILL_") {
                command.env_remove(name);
            }
        }
        command.env_remove("LD_PRELOAD");
        command.env("XDG_RUNTIME_DIR", self.path("runtime")).env("XDG_CACHE_HOME", self.path("cache"));
        command.stdin(Stdio::null()).current_dir(self.folder.path());
        command
    }

    /// Returns the command `pagemill run OPTIONS -- PROGRAM`.
    pub fn pagemill_run(&self, options: &[&str], program: impl AsRef<OsStr>) -> Command {
        let mut command = self.command(PAGEMILL);
        command.arg("run").args(options).arg("--").arg(program);
        command
    }

    /// Returns the command `pagemill run OPTIONS -- sh -c SCRIPT`.
    pub fn pagemill_run_shell(&self, options: &[&str], script: &str) -> Command {
        let mut command = self.pagemill_run(options, "sh");
        command.args(["-c", script]);
        command
    }

    /// Copies the program `from` into the test's folder with mode 755, and creates missing folders. Returns the copy's
    /// path. Other users can run the copy only if they can reach the test's folder.
    ///
    /// Runs `install`, so that this process never has the copy open for writing. Otherwise a child that a parallel test
    /// forks could inherit the descriptor, and to run the copy would fail with `ETXTBSY` until the child's `exec`.
    pub fn install(&self, from: impl AsRef<OsStr>, name: &str) -> PathBuf {
        let to = self.path(name);
        let mut command = self.command("install");
        command.args(["-D", "-m", "755"]).arg(from).arg(&to);
        finish(command, TIMEOUT).assert_success();
        to
    }

    /// Writes a script with mode 755 into the test's folder, as [`TestFolder::install`] does. Returns its path.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let source = self.path(&format!("{name}.source"));
        fs::write(&source, text).unwrap();
        self.install(source, name)
    }

    /// Compiles a source file of `tests/c`. Returns the path of the program. Without a compiler, prints a message and
    /// returns `None`.
    pub fn compile(&self, source: &str, flags: &[&str]) -> Option<PathBuf> {
        let compiler = if source.ends_with(".cpp") { "c++" } else { "cc" };
        if !is_installed(compiler) {
            println!("skipped: no {compiler} to compile {source}");
            return None;
        }
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
        let to = self.path(&format!("{source}.out"));
        let mut command = self.command(compiler);
        // With `-fno-builtin` the compiler does not remove a `malloc` whose memory is only freed.
        command.args(["-O1", "-g", "-w", "-fno-builtin", "-pthread"]).arg(from).arg("-o").arg(&to).args(flags);
        let end = finish(command, TIMEOUT);
        assert!(end.status.success(), "{source} does not compile: {}", end.err);
        Some(to)
    }

    /// Checks that no published file, and no folder of a process tree, is left in the folders of this test.
    pub fn assert_no_files_left(&self) {
        let left: Vec<_> = walk(&self.path("runtime")).into_iter().filter(|path| !path.is_dir()).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        let trees: Vec<_> = walk(&self.path("runtime/pagemill")).into_iter().filter(|path| path.is_dir()).collect();
        assert!(trees.is_empty(), "left behind: {trees:?}");
    }
}

pub fn walk(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        found.extend(walk(&path));
        found.push(path);
    }
    found
}

pub fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Returns whether a program is not installed. If so, prints that the test is skipped.
pub fn is_missing(program: &str) -> bool {
    let is_missing = !is_installed(program);
    if is_missing {
        println!("skipped: {program} is not installed");
    }
    is_missing
}

/// Returns whether this process may mount, which requires root. If not, prints that the test is skipped.
pub fn may_mount() -> bool {
    let mut command = Command::new("unshare");
    command.args(["-m", "true"]).stderr(Stdio::null());
    let may = command.status().is_ok_and(|status| status.success());
    if !may {
        println!("skipped: mounting needs root");
    }
    may
}

pub fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n")
}

/// How a process ended, and its output.
pub struct End {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
    pub wall: Duration,
}

impl End {
    /// Returns the exit status. Panics if the process was ended by a signal.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("killed by signal {:?}\n{}", self.status.signal(), self.err))
    }

    #[track_caller]
    pub fn assert_success(&self) {
        assert!(self.status.success(), "{}\nstdout:\n{}\nstderr:\n{}", self.status, tail(&self.out), tail(&self.err));
    }
}

pub fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

/// A process in a process group of its own. Dropping the value kills the whole group, unless the process has already
/// ended.
pub struct Guard {
    child: Child,
    is_ended: bool,
}

impl Guard {
    pub fn new(mut command: Command) -> Self {
        let child = command.process_group(0).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child, is_ended: false }
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn wait(&mut self, at_most: Duration) -> ExitStatus {
        self.wait_for(at_most).unwrap_or_else(|| panic!("still running after {at_most:?}"))
    }

    /// Waits until the process has ended, like [`Guard::wait`], but returns `None` if the process is still running
    /// after `at_most`.
    pub fn wait_for(&mut self, at_most: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < at_most {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.is_ended = true;
                return Some(status);
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    pub fn has_ended(&mut self) -> bool {
        self.is_ended |= self.child.try_wait().unwrap().is_some();
        self.is_ended
    }

    /// Sends a signal to the process, but not to other processes of its process group.
    pub fn signal(&self, name: &str) {
        assert!(shell(&format!("kill -s {name} {}", self.id())).success());
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if !self.is_ended {
            shell(&format!("kill -s KILL -- -{} 2>/dev/null", self.id()));
            let _ = self.child.wait();
        }
    }
}

/// Stops a process. Returns only when all its threads are stopped, because some threads stop later than the signal is
/// sent.
pub fn stop(pid: u32) {
    assert!(shell(&format!("kill -s STOP {pid}")).success());
    let stat_of = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap();
    let is_stopped = |stat: String| stat[stat.rfind(')').unwrap()..].starts_with(") T");
    let tasks = || fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(Result::unwrap);
    while !tasks().map(stat_of).all(is_stopped) {
        thread::sleep(Duration::from_millis(1));
    }
}

pub fn shell(script: &str) -> ExitStatus {
    Command::new("sh").args(["-c", script]).status().unwrap()
}

/// Runs a command and waits for its end. After `at_most`, kills the command's process group and panics.
pub fn finish(command: Command, at_most: Duration) -> End {
    finish_with_input(command, Vec::new(), at_most)
}

/// Like [`finish`], for a command that sends a request to a process. Repeats the command if the process did not answer
/// in time, which may happen on a busy machine.
pub fn finish_answered(command: impl Fn() -> Command) -> End {
    let begun = Instant::now();
    loop {
        let end = finish(command(), TIMEOUT);
        if !end.err.contains("does not answer within") || begun.elapsed() > TIMEOUT {
            return end;
        }
    }
}

/// Like [`finish`], with `input` as the command's standard input. If `input` is empty, the command's standard input is
/// not changed.
pub fn finish_with_input(mut command: Command, input: Vec<u8>, at_most: Duration) -> End {
    let (end, out) = finish_bytes(&mut command, input, at_most);
    End { out: String::from_utf8_lossy(&out).into_owned(), ..end }
}

/// Like [`finish_with_input`], but also returns the standard output of the command as bytes.
pub fn finish_bytes(command: &mut Command, input: Vec<u8>, at_most: Duration) -> (End, Vec<u8>) {
    let start = Instant::now();
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    if !input.is_empty() {
        command.stdin(Stdio::piped());
    }
    let mut guard = Guard::new(std::mem::replace(command, Command::new("true")));
    let mut stdin = guard.child().stdin.take();
    let mut stdout = guard.child().stdout.take().unwrap();
    let mut stderr = guard.child().stderr.take().unwrap();
    let writer = thread::spawn(move || stdin.take().map(|mut pipe| pipe.write_all(&input)));
    let out = thread::spawn(move || read_all(&mut stdout));
    let err = thread::spawn(move || read_all(&mut stderr));
    let status = guard.wait(at_most);
    let wall = start.elapsed();
    let _ = writer.join();
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    (End { status, out: String::new(), err: String::from_utf8_lossy(&err).into_owned(), wall }, out)
}

fn read_all(from: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Returns whether this process ignores a signal, as under `nohup`. The programs that it starts ignore the signal, too.
pub fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim().to_owned();
    u64::from_str_radix(&mask, 16).unwrap() >> (signal - 1) & 1 == 1
}

/// Waits until a process has ended and was reaped.
pub fn await_end_of(pid: &str) {
    let begun = Instant::now();
    while fs::exists(format!("/proc/{pid}")).unwrap() {
        assert!(begun.elapsed() < TIMEOUT, "process {pid} does not end");
        thread::sleep(Duration::from_millis(1));
    }
}
