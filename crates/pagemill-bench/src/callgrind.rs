//! Instructions per operation of a workload, counted by valgrind: exact, and the same on all machines of one kind.

use std::process::Command;
use std::time::Duration;

use crate::child::{self, Outcome, Running};
use crate::error::Result;

/// Operations of the first counted run; the second run has twice as many.
const COUNTED_ACTS: u64 = 100_000;

/// Instructions per operation; the inner error is a sentence for the list of gaps. `complete` adds the arguments and
/// environment of a run of the given number of operations.
///
/// Runs twice, the second time with twice the operations. The difference is free of startup and exit.
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

/// Parses the count in callgrind's last lines: `==7== Collected : 123456`.
fn collected(text: &str) -> Option<u64> {
    let (_, count) = text.lines().find(|line| line.contains("Collected"))?.split_once(" : ")?;
    count.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As callgrind 3.19 prints it.
    #[test]
    fn the_count_is_read() {
        assert_eq!(collected("==7== Events    : Ir\n==7== Collected : 123456\n"), Some(123_456));
        assert_eq!(collected("==7== nothing"), None);
    }
}
