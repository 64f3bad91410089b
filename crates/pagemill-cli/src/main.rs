//! The command `pagemill`: runs programs on Pagemill's allocator, mounts RAM file systems, and shows what
//! Pagemill does.
//!
//! Each subcommand has a file of its own. Exit status 2 reports usage errors and unavailable features. `run`
//! ends with the status of its program.

mod bench;
mod caches;
mod columns;
mod docker_plugin;
mod doctor;
mod drop_caches;
mod elf;
mod http;
mod huge;
mod kernel_limit;
mod limit;
mod manual;
mod mark;
mod meminfo;
mod metrics;
mod mount;
mod page;
mod perfetto;
mod plot;
mod preload;
mod proc_status;
mod ram;
mod report;
mod requests;
mod run;
mod running;
mod slabinfo;
mod statistics;
mod status;
mod timeline;
mod top;
mod trace;
mod tree_memory;
mod trim;
mod vmstat;
mod vranges;

use clap::{Parser, Subcommand};
use std::io::Write;
use std::process::ExitCode;

/// Runs programs on Pagemill's allocator, mounts RAM file systems, and shows what Pagemill does.
#[derive(Parser)]
#[command(name = "pagemill", version = manual::VERSION, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program and its children on Pagemill's allocator.
    Run(run::Run),
    /// Show which features of the kernel Pagemill can use with these privileges, the effect of each missing feature, and
    /// how to get it.
    Doctor {
        /// Print one JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Show the latest decisions of the memory managers of running processes, with their times.
    Trace(trace::Trace),
    /// Show all processes on Pagemill, trees of `run` and mounts, like top(1), until a key ends it.
    Top(top::Top),
    /// Show the memory that running processes hold, and how much of it could be returned at once.
    Meminfo(meminfo::Meminfo),
    /// Show how much the memory managers of running processes have done since the start, or do each second.
    Vmstat(vmstat::Vmstat),
    /// Make running processes return free and volatile memory now, and show how much they returned.
    Trim(trim::Trim),
    /// Print all counters as text for monitoring systems, serve them over HTTP, or write them to a file.
    Metrics(metrics::Metrics),
    /// Make a process drop clean pages of its page caches and shrink its slab caches, and show how much it returned.
    DropCaches(drop_caches::DropCaches),
    /// Show or set whether a running process, or a mounted tmpfs, gets huge pages from now on.
    Huge(huge::Huge),
    /// List the volatile ranges of a running process: their state, purged bytes and age.
    Vranges(vranges::Vranges),
    /// Show the slab caches of running processes and their free memory; shrink the caches, or set their ratios.
    Slabinfo(slabinfo::Slabinfo),
    /// Mount a RAM file system that purges marked files near a memory limit, and puts dense files into huge pages.
    Mount(mount::Mount),
    /// Show the usage of a `pagemill mount`, its volatile memory, and what its controller has done.
    Status(status::Status),
    /// Purge volatile files of a `pagemill mount`, least recently used first.
    Purge(mount::Purge),
    /// Unmount a `pagemill mount`; if it is busy, list the processes that use it.
    Umount(mount::Umount),
    /// Set or show which files of a `pagemill mount` are volatile, and which get huge pages.
    Mark(mark::Mark),
    /// Serve Docker volumes whose files are in memory: a volume plugin, each of whose volumes is a `pagemill mount`.
    DockerPlugin(docker_plugin::DockerPlugin),
    /// Print the completions of the command line for a shell.
    Completions(manual::Completions),
    /// Write the manual pages.
    #[command(hide = true)]
    Man(manual::Man),
    #[command(hide = true)]
    MountWorker,
    #[command(hide = true)]
    RunGuard { folder: std::path::PathBuf },
    /// Compare Pagemill with other allocators, file systems and caches; `pagemill bench --help` lists the experiments.
    #[command(disable_help_flag = true)]
    Bench {
        /// The experiment and its options.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<std::ffi::OsString>,
    },
}

/// The command line if its subcommand is `run`. A separate parser for `run` starts its programs faster.
///
/// Every program that `run` starts must wait for the parser to be built. Building the parsers of all subcommands would
/// take longer than all other work before the program starts. The help texts equal those of [`Cli`].
#[derive(Parser)]
#[command(name = "pagemill", version = manual::VERSION, max_term_width = 100)]
struct RunCli {
    #[command(subcommand)]
    command: RunCommand,
}

#[derive(Subcommand)]
enum RunCommand {
    /// Run a program and its children on Pagemill's allocator.
    Run(run::Run),
}

fn parse_command_line() -> Command {
    if std::env::args_os().nth(1).is_some_and(|word| word == "run") {
        let RunCommand::Run(run) = RunCli::parse().command;
        return Command::Run(run);
    }
    Cli::parse().command
}

fn main() -> ExitCode {
    let command = parse_command_line();
    pagemill_core::published::sweep();
    // `run` removes dead groups only if it creates one, since its program waits for the start.
    if !matches!(command, Command::Run(_)) {
        kernel_limit::remove_dead_groups();
    }
    match command {
        Command::Run(run) => run.main(),
        Command::Doctor { json } => doctor::doctor(json),
        Command::Trace(trace) => trace.main(),
        Command::Top(top) => top.main(),
        Command::Meminfo(meminfo) => meminfo.main(),
        Command::Vmstat(vmstat) => vmstat.main(),
        Command::Trim(trim) => trim.main(),
        Command::Metrics(metrics) => metrics.main(),
        Command::DropCaches(drop_caches) => drop_caches.main(),
        Command::Huge(huge) => huge.main(),
        Command::Vranges(vranges) => vranges.main(),
        Command::Slabinfo(slabinfo) => slabinfo.main(),
        Command::Mount(mount) => mount.main(),
        Command::Status(status) => status.main(),
        Command::Purge(purge) => purge.main(),
        Command::Umount(umount) => umount.main(),
        Command::Mark(mark) => mark.main(),
        Command::DockerPlugin(docker_plugin) => docker_plugin.main(),
        Command::Completions(completions) => completions.main(<Cli as clap::CommandFactory>::command()),
        Command::Man(man) => man.main(<Cli as clap::CommandFactory>::command()),
        Command::MountWorker => mount::worker(),
        Command::RunGuard { folder } => kernel_limit::guard(&folder),
        Command::Bench { args } => bench::bench(&args),
    }
}

/// Prints an error message to standard error and returns the exit status.
fn fail(status: u8, message: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "pagemill: {message}");
    ExitCode::from(status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// The parser for `run` alone must show the same help as the parser of all subcommands.
    #[test]
    fn both_parsers_have_the_same_help_for_run() {
        let help = |mut command: clap::Command| {
            command.build();
            command.find_subcommand_mut("run").unwrap().render_long_help().to_string()
        };
        assert_eq!(help(RunCli::command()), help(Cli::command()));
    }
}
