//! Counts the instructions per operation of a workload with valgrind. The count is exact, and equal on all machines
//! with the same binary.

use std::process::Command;
use std::time::Duration;

use crate::child::{self, Outcome, Running};
use crate::error::Result;

/// Number of operations in the first run; the second run has twice as many.
const COUNTED_ACTS: u64 = 100_000;

/// Returns the instructions per operation. The inner error is a sentence for the list of gaps. `complete` adds the
/// arguments and the environment for a run of the given number of operations.
///
/// It runs the workload twice, the second time with twice the operations. The difference excludes startup and exit.
///
/// # Errors
///
/// As [`child::outcome`].
pub fn instructions(name: &str, complete: impl Fn(&mut Command, u64)) -> Result<std::result::Result<f64, String>> {
    let mut counts = [0; 2];
    for (count, acts) in counts.iter_mut().zip([COUNTED_ACTS, 2 * COUNTED_ACTS]) {
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(child::own_executable()?);
        complete(&mut command, acts);
        let Ok(running) = Running::start(&mut command) else {
            child::check_interrupt()?;
            return Ok(Err("valgrind is missing: apt-get install valgrind".to_owned()));
        };
        let finished = running.finish(Duration::from_secs(300))?;
        if let Outcome::Failed(why) = child::outcome(name, &finished)? {
            return Ok(Err(why.lines().last().unwrap_or_default().to_owned()));
        }
        match collected(&String::from_utf8_lossy(&finished.stderr)) {
            Some(collected) => *count = collected,
            None => return Ok(Err("callgrind printed no count".to_owned())),
        }
    }
    let [once, twice] = counts;
    Ok(Ok(twice.saturating_sub(once) as f64 / COUNTED_ACTS as f64))
}

/// Parses the instruction count in the last lines of callgrind's output, such as `==7== Collected : 123456`.
fn collected(text: &str) -> Option<u64> {
    let (_, count) = text.lines().find(|line| line.contains("Collected"))?.split_once(" : ")?;
    count.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The count is found in output as callgrind 3.19 prints it; text without a count gives none.
    #[test]
    fn the_count_is_read() {
        assert_eq!(collected("==7== Events    : Ir\n==7== Collected : 123456\n"), Some(123_456));
        assert_eq!(collected("==7== nothing"), None);
    }
}
