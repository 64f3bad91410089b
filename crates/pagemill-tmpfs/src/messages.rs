//! Messages to the user, and the lines of JSON between processes.

use serde::Serialize;
use std::io::{self, Write};

/// Prints a message to standard error.
pub fn print_message(message: &str) {
    let _ = writeln!(io::stderr(), "pagemill: {message}");
}

/// Writes a value as one line of JSON.
///
/// # Errors
///
/// Errors of writing.
pub fn write_json_line(mut to: impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(value).map_err(io::Error::other)?;
    line.push('\n');
    to.write_all(line.as_bytes())
}
