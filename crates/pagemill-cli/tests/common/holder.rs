//! Programs that keep memory allocated while tests inspect them.

use super::{Guard, TIMEOUT, shell, stop};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

/// A program that prints a line of numbers when it is ready. The first number is its process id. The program ends when
/// its standard input is closed.
pub struct ObservedProgram {
    guard: Guard,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
    pub numbers: Vec<u64>,
}

impl ObservedProgram {
    pub fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let input = guard.child().stdin.take();
        let mut output = BufReader::new(guard.child().stdout.take().unwrap()).lines();
        let numbers = next_numbers(&mut output);
        Self { guard, input, output, numbers }
    }

    pub fn pid(&self) -> u32 {
        self.numbers[0] as u32
    }

    /// Writes a line to the program's input, which starts its next step. Waits for the line of numbers that the program
    /// then prints.
    pub fn run_next_step(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
        self.numbers = next_numbers(&mut self.output);
    }

    /// Closes the program's input and waits until the program ends. Returns the numbers that the program prints at its
    /// end.
    pub fn end(mut self) -> Vec<u64> {
        drop(self.input.take());
        let numbers = next_numbers(&mut self.output);
        assert!(self.guard.wait(TIMEOUT).success());
        numbers
    }

    /// Stops the program's process, but not its parent processes.
    pub fn stop(&self) {
        stop(self.pid());
    }

    pub fn continue_process(&self) {
        assert!(shell(&format!("kill -s CONT {}", self.pid())).success());
    }
}

/// Returns the numbers of the next line of the output that has only numbers, because a test harness may print other
/// lines. Returns an empty list at the end of the output.
fn next_numbers(output: &mut Lines<BufReader<ChildStdout>>) -> Vec<u64> {
    let numbers = |line: String| line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>().ok();
    output.by_ref().find_map(|line| numbers(line.unwrap())).unwrap_or_default()
}
