//! Errors that end a run before its result.

use std::fmt;
use std::io;

/// Why an experiment stopped. Killed workloads and missing peers are results and gaps, not errors.
#[derive(Debug)]
pub enum Error {
    /// A signal asked the bench to end, such as Ctrl-C. All processes that it started were ended, too.
    Interrupted { signal: i32 },
    /// A workload found wrong bytes in its memory, so its measurements are worthless.
    WrongAnswer { subject: String, what: String },
    /// Nothing can be measured here, for this reason.
    CannotRun(String),
    /// A system call that the bench itself needs failed.
    System { doing: String, cause: io::Error },
}

/// The result type of the bench's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// 2 for what could not run, 1 for a wrong answer, 128 plus the signal's number as a shell reports it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted { signal } => 128 + *signal as u8,
            Self::WrongAnswer { .. } => 1,
            Self::CannotRun(_) | Self::System { .. } => 2,
        }
    }
}

/// Wraps an I/O error with the operation that failed.
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
            Self::System { doing, cause } => write!(f, "{doing}: {cause}"),
        }
    }
}

impl std::error::Error for Error {}
