//! The workloads: hidden subcommands, each of which runs as a separate process under one preloaded allocator.
//!
//! A workload measures, checks its own answers, and prints one line of JSON. It exits with [`WRONG_ANSWER`] if an
//! answer was wrong. Before it measures, it checks that the requested allocator serves `malloc`: after a failed preload
//! the loader only prints a warning, and glibc would be measured under another name.

pub mod churn;
pub mod copies;
pub mod ebizzy;
pub mod file_writers;
pub mod find;
pub mod giveback;
pub mod handover;
pub mod hit;
pub mod hog;
pub mod host;
pub mod idle;
pub mod iozone;
pub mod metadata;
pub mod pageshift;
pub mod pair;
pub mod pairs;
pub mod pieces;
pub mod reaction;
pub mod refs;
pub mod slab;
pub mod small;
pub mod steps;
pub mod storage;
pub mod volatile;
pub mod waste;
pub mod work_after_free;
pub mod writers;

use std::env;
use std::fmt::Display;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitCode, ExitStatus};

use crate::child::WRONG_ANSWER;
use crate::native;
use crate::subject::EXPECTED_LIBRARY;

/// Declares the arguments of a workload. Each field is an option: `run_ms` is `--run-ms`. A last field that begins with
/// `..` is a group of options, which has its own declaration.
macro_rules! arguments {
    (
        $(#[$meta:meta])*
        $name:ident:
        $($(#[$field_meta:meta])* $field:ident: $type:ty,)*
        $(..$group:ident: $group_type:ty,)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, clap::Args)]
        pub struct $name {
            $(
                $(#[$field_meta])*
                #[arg(long)]
                pub $field: $type,
            )*
            $(
                #[command(flatten)]
                pub $group: $group_type,
            )*
        }
    };
}
pub(crate) use arguments;

/// The result of a workload: its JSON line, or the reason why it has no result.
pub type WorkloadResult = Result<serde_json::Value, Failure>;

/// The reason why a workload has no result.
#[derive(Debug)]
pub enum Failure {
    /// Memory did not contain what was written to it.
    WrongAnswer(String),
    /// Any other failure, with a message.
    Other(String),
    /// SIGKILL ended a child that the workload had started, mostly for lack of memory.
    Killed,
}

/// A message or an error of another operation.
impl<E: Display> From<E> for Failure {
    fn from(why: E) -> Self {
        Self::Other(why.to_string())
    }
}

/// Fails with [`Failure::WrongAnswer`] and this message unless `is_right` is true.
#[inline]
fn ensure<S: Into<String>>(is_right: bool, what: impl FnOnce() -> S) -> Result<(), Failure> {
    if is_right { Ok(()) } else { Err(Failure::WrongAnswer(what().into())) }
}

crate::workload::arguments! {
    /// Arguments of a process that touches and frees memory, so that the host of a virtual machine has backed this
    /// memory before other workloads run.
    TouchArguments:
    mib: usize,
}

/// Arguments of a process that joins a cgroup, if one is given, and then replaces itself by a command (`exec`). The
/// command is killed when the bench ends.
#[derive(Debug, clap::Args)]
pub struct ExecArguments {
    /// The file `cgroup.procs` of the cgroup to join.
    #[arg(long)]
    entrance: Option<PathBuf>,
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Runs a workload in this process, prints its result as one line of JSON, and returns the exit status.
pub fn run(work: impl FnOnce() -> WorkloadResult) -> ExitCode {
    native::die_with_parent();
    let outcome = check_malloc_library().and_then(|()| work());
    match outcome {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(Failure::WrongAnswer(what)) => {
            eprintln!("{what}");
            ExitCode::from(WRONG_ANSWER as u8)
        }
        Err(Failure::Other(why)) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
        Err(Failure::Killed) => ExitCode::from(128 + libc::SIGKILL as u8),
    }
}

pub fn touch(arguments: &TouchArguments) -> WorkloadResult {
    const ALLOCATION_BYTES: usize = 64 << 20;
    let mut held = Vec::new();
    for _ in 0..(arguments.mib << 20).div_ceil(ALLOCATION_BYTES) {
        held.push(native::TaggedAllocation::touched(ALLOCATION_BYTES, 1).ok_or("no memory")?);
    }
    Ok(serde_json::json!({ "pieces": held.len() }))
}

/// Returns an error if a child of this workload was killed, failed, or found wrong bytes.
fn check_status(child: &str, status: ExitStatus) -> Result<(), Failure> {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(WRONG_ANSWER), _) => Err(Failure::WrongAnswer(format!("{child} found wrong bytes"))),
        (None, Some(libc::SIGKILL)) => Err(Failure::Killed),
        _ => Err(format!("{child} ended with {status}").into()),
    }
}

/// Joins the cgroup, if one is given, and replaces this process by the command. Returns only on failure.
pub fn exec_in_cgroup(arguments: &ExecArguments) -> ExitCode {
    native::die_with_parent();
    if let Some(entrance) = &arguments.entrance
        && let Err(cause) = std::fs::write(entrance, "0")
    {
        eprintln!("{}: {cause}", entrance.display());
        return ExitCode::FAILURE;
    }
    let (program, rest) = (&arguments.command[0], &arguments.command[1..]);
    let cause = Command::new(program).args(rest).exec();
    eprintln!("{program}: {cause}");
    ExitCode::FAILURE
}

fn check_malloc_library() -> Result<(), Failure> {
    let Some(expected) = env::var_os(EXPECTED_LIBRARY).map(PathBuf::from) else {
        return Ok(());
    };
    match native::malloc_library() {
        Some(home) if home == expected => Ok(()),
        home => Err(format!(
            "malloc comes from {}, not from {}: the preload failed",
            home.unwrap_or_default().display(),
            expected.display()
        )
        .into()),
    }
}
