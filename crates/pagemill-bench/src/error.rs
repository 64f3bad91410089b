//! What can end a run before its result.

use std::fmt;
use std::io;

/// Why an experiment stopped. Killed workloads and missing peers are results and gaps, not errors.
#[derive(Debug)]
pub enum Error {
    /// The user pressed Ctrl-C, or somebody asked the bench to end; everything started was ended too.
    Interrupted { signal: i32 },
    /// A workload found a wrong answer in its memory: whatever it measured is worthless.
    WrongAnswer { subject: String, what: String },
    /// Nothing can be measured here, and why.
    CannotRun(String),
    /// The system refused something the bench needs for itself.
    System { doing: String, cause: io::Error },
}

/// What the bench's functions return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// 2 for what could not run, 1 for a wrong answer, 128 and the signal as a shell reports it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted { signal } => 128 + *signal as u8,
            Self::WrongAnswer { .. } => 1,
            Self::CannotRun(_) | Self::System { .. } => 2,
        }
    }
}

/// Says what was being done when a system call failed.
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
