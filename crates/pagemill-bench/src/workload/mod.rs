//! The workloads: hidden subcommands, each of which runs as a separate process under one preloaded allocator.
//!
//! A workload measures, checks its own answers, and prints one line of JSON. It exits with [`WRONG_ANSWER`] if an
//! answer was wrong. Before it measures, it checks that the requested allocator serves `malloc`: after a failed preload
//! the loader only prints a warning, and glibc would be measured under another name.

pub mod churn;
pub mod copies;
pub mod ebizzy;
pub mod file_writers;
pub mod giveback;
pub mod handover;
pub mod hit;
pub mod hog;
pub mod host;
pub mod idle;
pub mod iozone;
pub mod metadata;
pub mod pair;
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
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::child::WRONG_ANSWER;
use crate::native;
use crate::subject::EXPECTED_LIBRARY;

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

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

/// Arguments of a process that touches and frees memory, so that the host of a virtual machine has backed this memory
/// before other workloads run.
#[derive(Debug, clap::Args)]
pub struct TouchArguments {
    #[arg(long)]
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
        held.push(native::TaggedAllocation::touched(ALLOCATION_BYTES, 1).ok_or("no memory".to_owned())?);
    }
    Ok(serde_json::json!({ "pieces": held.len() }))
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
        home => Err(Failure::Other(format!(
            "malloc comes from {}, not from {}: the preload failed",
            home.unwrap_or_default().display(),
            expected.display()
        ))),
    }
}
