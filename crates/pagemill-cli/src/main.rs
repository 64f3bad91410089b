//! The command `pagemill`: run programs on memory that gives itself back, and see what it does.
//!
//! One file per subcommand. Usage errors and what cannot be done here end with
//! 2; `run` ends as its program does.

mod asking;
mod bench;
mod caches;
mod doctor;
mod elf;
mod mark;
mod meminfo;
mod mount;
mod preload;
mod ram;
mod report;
mod run;
mod running;
mod slabinfo;
mod status;
mod trace;
mod vmstat;
mod vranges;

use clap::{Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;

/// Big, fast memory that gives itself back.
#[derive(Parser)]
#[command(name = "pagemill", version, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program, and all that it starts, on Pagemill's allocator.
    Run(run::Run),
    /// Show what this kernel and these privileges offer, what is lost, and the command that fixes it.
    Doctor {
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Show the latest events of a running process: what its memory manager decided, and when.
    Trace(trace::Trace),
    /// Show what a running process holds, and what of it could be given back at once.
    Meminfo(meminfo::Meminfo),
    /// Show what the memory manager of a running process has done, or does from second to second.
    Vmstat(vmstat::Vmstat),
    /// List the volatile ranges of a running process: what may go, what has gone, and since when.
    Vranges(vranges::Vranges),
    /// Show the slab caches of running processes, with what they could give back; shrink them, set their ratios.
    Slabinfo(slabinfo::Slabinfo),
    /// Mount a RAM file system that gives memory back, in huge pages where they pay.
    Mount(mount::Mount),
    /// Show how full a `pagemill mount` is, what of it could go, and what its controller has done.
    Status(status::Status),
    /// Let volatile files of a `pagemill mount` go, least recently used first.
    Purge(mount::Purge),
    /// Unmount a `pagemill mount`; says who uses it if it is busy.
    Umount(mount::Umount),
    /// Say, or show, which files of a `pagemill mount` may vanish, and which pages they get.
    Mark(mark::Mark),
    #[command(hide = true)]
    MountWorker,
    /// Measure Pagemill beside its peers (`pagemill bench --help` lists the experiments).
    #[command(disable_help_flag = true)]
    Bench {
        /// The experiment and its options.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
}

fn main() -> ExitCode {
    pagemill::published::sweep();
    match Cli::parse().command {
        Command::Run(run) => run.main(),
        Command::Doctor { json } => doctor::doctor(json),
        Command::Trace(trace) => trace.main(),
        Command::Meminfo(meminfo) => meminfo.main(),
        Command::Vmstat(vmstat) => vmstat.main(),
        Command::Vranges(vranges) => vranges.main(),
        Command::Slabinfo(slabinfo) => slabinfo.main(),
        Command::Mount(mount) => mount.main(),
        Command::Status(status) => status.main(),
        Command::Purge(purge) => purge.main(),
        Command::Umount(umount) => umount.main(),
        Command::Mark(mark) => mark.main(),
        Command::MountWorker => mount::worker(),
        Command::Bench { args } => bench::bench(&args),
    }
}

/// Says on standard error what went wrong, and returns the status for it.
fn fail(status: u8, message: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "pagemill: {message}");
    ExitCode::from(status)
}
