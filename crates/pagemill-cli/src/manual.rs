//! Manual pages, completions of the command line, and the version. All are rendered from the declarations of the
//! subcommands and their options.

use crate::fail;
use clap_complete::Shell;
use clap_mangen::Man as Page;
use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The version, with the commit if the build knows it.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), env!("PAGEMILL_COMMIT_SUFFIX"));

#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagemill completions bash > ~/.local/share/bash-completion/completions/pagemill
  pagemill completions zsh > ~/.zfunc/_pagemill       (with ~/.zfunc in fpath)
  pagemill completions fish > ~/.config/fish/completions/pagemill.fish")]
pub struct Completions {
    shell: Shell,
}

impl Completions {
    /// Prints the completions of `command`, which is the whole command line.
    pub fn main(&self, mut command: clap::Command) -> ExitCode {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, "pagemill", &mut text);
        let mut out = io::stdout().lock();
        match out.write_all(&text).and_then(|()| out.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                fail(1, &format!("the completions cannot be written: {error}"))
            }
            _ => ExitCode::SUCCESS,
        }
    }
}

#[derive(clap::Args)]
pub struct Man {
    /// The folder, which is created if it is missing. The pages are `pagemill.1` and one for each subcommand.
    dir: PathBuf,
}

impl Man {
    /// Writes the manual pages of `command`, which is the whole command line.
    pub fn main(&self, mut command: clap::Command) -> ExitCode {
        command.build();
        let written = fs::create_dir_all(&self.dir).and_then(|()| write_pages(&command, &self.dir));
        match written {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(1, &format!("the manual pages cannot be written to {}: {error}", self.dir.display())),
        }
    }
}

/// Writes the page of a command and those of its visible subcommands.
fn write_pages(command: &clap::Command, folder: &Path) -> io::Result<()> {
    let page = Page::new(command.clone()).manual("Pagemill").source(concat!("Pagemill ", env!("CARGO_PKG_VERSION")));
    page.generate_to(folder)?;
    let subcommands =
        command.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help");
    subcommands.into_iter().try_for_each(|command| write_pages(command, folder))
}
