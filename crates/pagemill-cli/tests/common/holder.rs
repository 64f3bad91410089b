//! Programs that hold something while others look at them.

use super::{Guard, STUCK_AFTER, shell, stop};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

/// A program that says some numbers once it is ready, its process id first, and goes on when its input ends.
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

    /// Lets it do the next of what it does, and waits until it has.
    pub fn next(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
        self.numbers = next_numbers(&mut self.said);
    }

    /// Lets it go on to its end; returns what it says then.
    pub fn end(mut self) -> Vec<u64> {
        drop(self.input.take());
        let numbers = next_numbers(&mut self.said);
        assert!(self.guard.wait(STUCK_AFTER).success());
        numbers
    }

    /// Stops it, not those that started it.
    pub fn stop(&self) {
        stop(self.pid());
    }

    pub fn go_on(&self) {
        assert!(shell(&format!("kill -s CONT {}", self.pid())).success());
    }
}

/// The first line of numbers only; others are a test harness's. None at the end.
fn next_numbers(said: &mut Lines<BufReader<ChildStdout>>) -> Vec<u64> {
    let numbers = |line: String| line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>().ok();
    said.by_ref().find_map(|line| numbers(line.unwrap())).unwrap_or_default()
}
