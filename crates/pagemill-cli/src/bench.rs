//! `pagemill bench`: hands over to the experiments, which are a program of their own so that their peers stay out of this one.

use crate::fail;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

pub fn bench(args: &[OsString]) -> ExitCode {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("pagemill-bench"));
    let Some(program) = beside.filter(|path| path.is_file()) else {
        return fail(
            2,
            "the experiments are not built. This builds them, with the allocators they compare:\n\n    \
             cargo build --release -p pagemill-cli -p pagemill-bench\n",
        );
    };
    let error = Command::new(&program).args(args).exec();
    fail(2, &format!("cannot start {}: {error}", program.display()))
}
