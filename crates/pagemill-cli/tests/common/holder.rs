//! Programs that hold memory while tests inspect them.

use super::{Guard, STUCK_AFTER, shell, stop};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

/// A program that prints numbers once it is ready, its process id first, and ends when its input is closed.
pub struct Holder {
    guard: Guard,
    input: Option<ChildStdin>,
    said: Lines<BufReader<ChildStdout>>,
    pub numbers: Vec<u64>,
}

impl Holder {
    pub fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let input = guard.child().stdin.take();
        let mut said = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        let numbers = next_numbers(&mut said);
        Self { guard, input, said, numbers }
    }

    pub fn pid(&self) -> u32 {
        self.numbers[0] as u32
    }

    /// Makes it do its next step, and waits for its numbers.
    pub fn next(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
        self.numbers = next_numbers(&mut self.said);
    }

    /// Closes its input and waits for its end; returns the numbers that it prints then.
    pub fn end(mut self) -> Vec<u64> {
        drop(self.input.take());
        let numbers = next_numbers(&mut self.said);
        assert!(self.guard.wait(STUCK_AFTER).success());
        numbers
    }

    /// Stops the process, not its parents.
    pub fn stop(&self) {
        stop(self.pid());
    }

    pub fn go_on(&self) {
        assert!(shell(&format!("kill -s CONT {}", self.pid())).success());
    }
}

/// The next line that has only numbers; other lines come from a test harness. Empty at the end.
fn next_numbers(said: &mut Lines<BufReader<ChildStdout>>) -> Vec<u64> {
    let numbers = |line: String| line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>().ok();
    said.by_ref().find_map(|line| numbers(line.unwrap())).unwrap_or_default()
}
