//! Messages to the user.

use std::io::{self, Write};

/// Prints a message to standard error.
pub fn print_message(message: &str) {
    let _ = writeln!(io::stderr(), "pagemill: {message}");
}
