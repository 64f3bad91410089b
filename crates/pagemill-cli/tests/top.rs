//! `pagemill top` as a user sees it: in a real terminal (tmux), and without one.

mod common;

use common::{Guard, PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, may_mount};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::thread;
use std::time::{Duration, Instant};

/// Argument of the observed program, by which it is found among the processes of the machine.
const MARK: &str = "987654";

/// Id of a user that owns no files on this machine.
const OTHER_USER_ID: u32 = 65_434;

/// Starts a program of a `pagemill run` that publishes figures and sleeps.
fn start_program(place: &TestFolder) -> Guard {
    let mut command = place.pagemill_run(&[], "sleep");
    command.arg(MARK);
    Guard::new(command)
}

/// A terminal with a shell. Dropping the value ends the shell and everything in the terminal.
struct Screen<'test> {
    place: &'test TestFolder,
}

impl<'test> Screen<'test> {
    /// Starts an interactive shell in a terminal of 80 columns and 24 lines.
    fn new(place: &'test TestFolder) -> Self {
        let screen = Self { place };
        screen.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "env PS1=ready: ENV= sh -i"]);
        screen.tmux(&["set-option", "-g", "window-size", "manual"]);
        screen.type_line("echo before-$((1 + 1))");
        screen.await_text("before-2");
        screen
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let mut command = self.place.command("tmux");
        command.arg("-S").arg(self.place.path("tmux")).args(arguments).env("TERM", "xterm-256color");
        let end = finish(command, TIMEOUT);
        assert!(end.status.success(), "tmux {arguments:?}: {}", end.err);
        end.out
    }

    fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    fn type_line(&self, line: &str) {
        self.tmux(&["send-keys", "-l", line]);
        self.press("Enter");
    }

    fn text(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until a condition holds for the text of the screen, which is returned.
    fn await_screen(&self, what: &str, is_there: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let text = self.text();
            if is_there(&text) {
                return text;
            }
            assert!(begun.elapsed() < TIMEOUT, "no {what} on the screen:\n{text}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn await_text(&self, part: &str) -> String {
        self.await_screen(part, |text| text.contains(part))
    }

    /// Waits until a variable of tmux about the terminal has a value.
    fn await_variable(&self, name: &str, value: &str) {
        let begun = Instant::now();
        while self.tmux(&["display-message", "-p", &format!("#{{{name}}}")]).trim() != value {
            assert!(begun.elapsed() < TIMEOUT, "{name} is not {value}:\n{}", self.text());
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn start_top(&self, options: &str) {
        self.type_line(&format!("{PAGEMILL} top {options}; echo status-$?"));
        self.await_variable("alternate_on", "1");
    }

    /// Returns the process id of the command that the shell runs.
    fn top_pid(&self) -> String {
        let shell = self.tmux(&["display-message", "-p", "#{pane_pid}"]).trim().to_owned();
        let begun = Instant::now();
        loop {
            let children = fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).unwrap();
            if let Some(pid) = children.split_whitespace().next() {
                return pid.to_owned();
            }
            assert!(begun.elapsed() < TIMEOUT, "the shell has no child");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Checks that the terminal is as it was before `top`: screen, cursor, and how keys are read.
    fn assert_restored(&self, status: &str) {
        let text = self.await_text(status);
        assert!(text.contains("before-2") && !text.contains("F1Help"), "{text}");
        self.await_variable("alternate_on", "0");
        self.await_variable("cursor_flag", "1");
        self.type_line("stty -a | tr ' ' '\\n' | grep -cE '^(icanon|echo|isig)$'; echo modes");
        let text = self.await_text("\nmodes");
        assert!(text.contains("\n3\nmodes"), "{text}");
    }
}

impl Drop for Screen<'_> {
    fn drop(&mut self) {
        let mut command = self.place.command("tmux");
        let _ = command.arg("-S").arg(self.place.path("tmux")).arg("kill-server").output();
    }
}

/// A user presses keys, changes the size of the terminal, sees a program end, and quits.
#[test]
fn keys_sizes_and_ends_are_shown() {
    if is_missing("tmux") {
        return;
    }
    let place = TestFolder::new();
    let mut program = start_program(&place);
    let screen = Screen::new(&place);
    screen.start_top(&format!("-d 0.1 --filter {MARK}"));
    let text = screen.await_text("└ sleep");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("pagemill top") && text.contains(&format!("run sleep {MARK}")), "{text}");
    assert!(lines[23].starts_with("F1Help") && lines[23].ends_with("F10Quit"), "{text}");

    screen.press("t");
    screen.await_text("F5Tree");
    screen.press("F5");
    screen.await_text("F5List");
    screen.press("F6");
    screen.await_text("Sort by");
    screen.press("Escape");
    screen.await_screen("list", |text| !text.contains("Sort by"));
    screen.press("Enter");
    screen.await_text("a tree of processes");
    screen.press("q");
    screen.await_text("F1Help");
    screen.press("?");
    screen.await_text("move the cursor");
    screen.press("Escape");
    screen.press("Space");
    screen.await_text("PAUSED");
    screen.press("Space");
    screen.await_screen("running list", |text| !text.contains("PAUSED"));

    screen.tmux(&["resize-window", "-x", "150", "-y", "40"]);
    let text = screen.await_screen("wide list", |text| {
        text.contains("READ/s") && text.lines().nth(39).is_some_and(|line| line.starts_with("F1Help"))
    });
    assert!(text.contains("└ sleep"), "{text}");
    screen.tmux(&["resize-window", "-x", "20", "-y", "2"]);
    screen.await_screen("sums", |text| text.contains("process") && !text.contains("F1Help"));
    screen.tmux(&["resize-window", "-x", "80", "-y", "24"]);
    screen.await_text("└ sleep");

    program.signal("TERM");
    program.wait(TIMEOUT);
    screen.await_screen("empty list", |text| !text.contains("└ sleep") && text.contains("F1Help"));
    screen.press("q");
    screen.assert_restored("status-0");
}

/// Signals end or stop `top`. In each case the terminal is usable afterwards. After `fg` the screen is drawn again.
#[test]
fn signals_restore_the_terminal() {
    if is_missing("tmux") {
        return;
    }
    let place = TestFolder::new();
    let _program = start_program(&place);
    let screen = Screen::new(&place);
    let kill = |signal: &str| assert!(common::shell(&format!("kill -s {signal} {}", screen.top_pid())).success());
    screen.start_top(&format!("--filter {MARK}"));
    screen.await_text("└ sleep");
    kill("TERM");
    screen.assert_restored("status-143");

    screen.type_line(&format!("clear; echo before-$((1 + 1)); {PAGEMILL} top --filter {MARK}"));
    screen.await_text("└ sleep");
    for stop in ["C-z", "TSTP"] {
        if stop == "TSTP" {
            kill(stop)
        } else {
            screen.press(stop)
        }
        screen.await_variable("alternate_on", "0");
        screen.await_text("before-2");
        // The shell reads this line once it has noticed that `top` is stopped.
        screen.type_line("fg");
        screen.await_variable("alternate_on", "1");
        screen.await_text("└ sleep");
    }
    screen.press("C-c");
    screen.await_variable("alternate_on", "0");
    screen.type_line("echo status-$?");
    screen.assert_restored("status-0");
}

fn top(place: &TestFolder, options: &[&str]) -> common::End {
    let mut command = place.command(PAGEMILL);
    command.arg("top").args(options);
    finish(command, TIMEOUT)
}

/// Waits until the program has published its figures.
fn await_program(place: &TestFolder) {
    let begun = Instant::now();
    while !top(place, &["--once", "--filter", MARK]).out.contains("└ sleep") {
        assert!(begun.elapsed() < TIMEOUT, "the program publishes nothing");
    }
}

/// Without a terminal, one page of plain text is printed, in at most 80 columns.
#[test]
fn a_page_is_printed_without_a_terminal() {
    let place = TestFolder::new();
    let program = start_program(&place);
    await_program(&place);
    for options in [&[][..], &["--once"], &["--count", "2", "--interval", "0.1"]] {
        let end = top(&place, &[options, &["--filter", MARK]].concat());
        end.assert_success();
        assert!(end.out.contains(&program.id().to_string()) && end.out.contains("└ sleep"), "{}", end.out);
        assert!(end.out.lines().all(|line| line.chars().count() <= 80 && !line.contains('\u{1b}')), "{}", end.out);
        let pages = end.out.matches("pagemill top").count();
        assert_eq!(pages, if options.contains(&"--count") { 2 } else { 1 }, "{}", end.out);
    }
    for (options, message) in [
        (["--interval", "0"], "'0' is not an interval: expected seconds from 0.1 to 3600"),
        (["--sort", "memory"], "'memory' is not a column: expected one of pid, user, name"),
    ] {
        let end = top(&place, &options);
        assert_eq!(end.code(), 2);
        assert!(end.err.contains(message), "{}", end.err);
    }
}

/// Each JSON document has the tree, its program and their figures. Rates are known from the first document on.
#[test]
fn documents_have_all_figures() {
    let place = TestFolder::new();
    let program = start_program(&place);
    await_program(&place);
    let end = top(&place, &["--json", "-n", "2", "-i", "0.1"]);
    end.assert_success();
    let documents: Vec<Value> = end.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(documents.len(), 2);
    for document in documents {
        let of_pid = |list: &str, key: &str| {
            let rows = document[list].as_array().unwrap().iter();
            rows.filter(|row| row[key] == program.id()).cloned().collect::<Vec<_>>()
        };
        let (runs, processes) = (of_pid("runs", "pid"), of_pid("processes", "run"));
        assert_eq!((runs.len(), processes.len()), (1, 1), "{document}");
        assert_eq!(runs[0]["name"], format!("run sleep {MARK}"));
        assert_eq!((&processes[0]["name"], &processes[0]["parent"]), (&"sleep".into(), &program.id().into()));
        assert!(processes[0]["resident_bytes"].is_u64() && processes[0]["cpu_percent"].is_f64(), "{processes:?}");
        assert!(processes[0]["kernel_resident_bytes"].as_u64().unwrap() > 100 << 10, "{processes:?}");
        assert!(document["machine"]["total_bytes"].as_u64().unwrap() > 1 << 27, "{document}");
    }
}

/// A RAM file system that only a `run` sees is listed, too.
#[test]
fn mounts_are_listed() {
    if !may_mount() {
        return;
    }
    let place = TestFolder::new();
    let ram = place.path("ram");
    let mut command = place.pagemill_run(&["--ram-size", "64M", "--ram", ram.to_str().unwrap()], "sleep");
    command.arg(MARK);
    let _program = Guard::new(command);
    await_program(&place);
    let end = top(&place, &["--json", "--once"]);
    let document: Value = serde_json::from_str(&end.out).unwrap();
    let mounts = document["mounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["mount_point"] == ram.to_str().unwrap());
    assert_eq!(mount.unwrap()["size_bytes"], 64 << 20, "{document}");
    assert!(top(&place, &["--once"]).out.contains("MOUNT"));
}

/// A process of root has a helper thread. For another user, `top` must count it as not readable, and must not show it.
#[test]
fn processes_of_other_users_are_counted() {
    if !common::is_root() || is_missing("setpriv") {
        println!("skipped: needs root and setpriv");
        return;
    }
    let place = TestFolder::new();
    let Some(idle) = place.compile("idle.c", &[]) else { return };
    let _program = Guard::new(place.pagemill_run(&[], &idle));
    let runtime = place.path("runtime-of-user");
    fs::DirBuilder::new().mode(0o700).create(&runtime).unwrap();
    chown(&runtime, Some(OTHER_USER_ID), Some(OTHER_USER_ID)).unwrap();
    let copy = place.install(PAGEMILL, "pagemill");
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let begun = Instant::now();
    loop {
        let mut command = place.command("setpriv");
        let user = OTHER_USER_ID.to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(&copy);
        command.args(["top", "--json", "--once"]).env("XDG_RUNTIME_DIR", &runtime);
        let end = finish(command, TIMEOUT);
        end.assert_success();
        let document: Value = serde_json::from_str(&end.out).unwrap();
        assert!(document["processes"].as_array().unwrap().iter().all(|row| row["name"] != "idle.c.out"), "{document}");
        if document["unreadable"]["other_users"].as_u64().unwrap() > 0 {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{document}");
    }
    let end = top(&place, &["--json", "--once"]);
    let document: Value = serde_json::from_str(&end.out).unwrap();
    assert_eq!(document["unreadable"]["other_users"], 0, "root reads all: {document}");
}
