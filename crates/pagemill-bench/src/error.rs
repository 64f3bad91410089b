//! Errors that end a run of the bench before it has a result.

use std::fmt;
use std::io;

/// Why an experiment ended early. A killed workload is a result and not an error. A missing peer is only a line in the
/// report.
#[derive(Debug)]
pub enum Error {
    /// The bench received this signal, for example by Ctrl-C, and has ended all processes that it started.
    Interrupted { signal: i32 },
    /// The workload of this subject found wrong bytes in its memory, so its measurements are worthless.
    WrongAnswer { subject: String, what: String },
    /// The experiment cannot run. The string is the reason.
    CannotRun(String),
    /// A measurement could not be made. The string is a sentence for the report (gap). The other measurements go on.
    Gap(String),
    /// An operation of the operating system that the bench needs has failed.
    System { doing: String, cause: io::Error },
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the bench's exit status: 2 if the experiment could not run, and 1 for a wrong answer. After an interrupt
    /// it is 128 plus the signal's number, as in a shell.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted { signal } => 128 + *signal as u8,
            Self::WrongAnswer { .. } => 1,
            Self::CannotRun(_) | Self::Gap(_) | Self::System { .. } => 2,
        }
    }
}

/// Returns a closure for `map_err` that adds the name of the failed operation to an I/O error.
pub fn doing(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    move |cause| Error::System { doing: what.into(), cause }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupted { .. } => write!(f, "interrupted; everything started was ended"),
            Self::WrongAnswer { subject, what } => {
                write!(f, "wrong answer under {subject}: {what}")
            }
            Self::CannotRun(why) => write!(f, "cannot run: {why}"),
            Self::Gap(what) => f.write_str(what),
            Self::System { doing, cause } => write!(f, "{doing}: {cause}"),
        }
    }
}

impl std::error::Error for Error {}
