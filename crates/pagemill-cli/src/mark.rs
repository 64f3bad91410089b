//! `pagemill mark`: sets or shows which files of a mount are volatile, and which page sizes their memory has.

use crate::fail;
use pagemill_tmpfs::file_access::{self, FileAttributes};
use pagemill_tmpfs::messages::print_message;
use pagemill_tmpfs::mounting;
use pagemill_tmpfs::policy::{self, Ancestor, HUGE, Huge, Marks, VOLATILE, Volatile};
use serde_json::json;
use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Without options: show the effective marks of files and folders. A file's own mark applies, or else that of
/// the nearest folder above that has one.
#[derive(clap::Args)]
pub struct Mark {
    /// What may be purged near a memory limit: `full` (the whole file), `partial` (the file's end), `none`.
    #[arg(long, value_name = "WHAT", value_parser = |text: &str| text.parse::<Volatile>())]
    volatile: Option<Volatile>,
    /// Which 2 MiB blocks get huge pages: `auto` (dense blocks), `always` (every block with data), `never` (none).
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| text.parse::<Huge>())]
    huge: Option<Huge>,
    /// Record that the end of a purged partial file was written again: remove the attribute user.pagemill.purged, which
    /// holds the offset from which the file was cut.
    #[arg(long)]
    refilled: bool,
    /// Files and folders on a `pagemill mount`. A folder's marks apply to the files in it, and to files further down if
    /// root or the file's owner owns the folder.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

fn keyword_of(word: Option<impl Display>) -> Option<String> {
    word.map(|word| word.to_string())
}

impl Mark {
    pub fn main(&self) -> ExitCode {
        let mut status = ExitCode::SUCCESS;
        for path in &self.paths {
            let Err(why) = self.mark_path(path) else { continue };
            let why = format!("{}: {why}", path.display());
            if self.json {
                let _ = writeln!(io::stdout(), "{}", json!({ "path": path.to_string_lossy(), "error": why }));
            }
            status = fail(1, &why);
        }
        status
    }

    fn mark_path(&self, path: &Path) -> Result<(), String> {
        let error_text = |error: io::Error| error.to_string();
        let (fd, seen) = open_without_links(path)?;
        let device = fs::symlink_metadata(path).map_err(error_text)?.dev();
        if !mounting::is_ours(device) {
            return Err("it is not on a `pagemill mount` without --fuse: a mark there has no effect".into());
        }
        self.set_marks(&fd, &seen)?;
        let mut bad = Vec::new();
        let set = file_access::marks(&fd, |mark| bad.push(mark.0)).map_err(error_text)?;
        let own = set.trusted(is_mark_ignored(&seen));
        if own != set {
            bad.push("volatile, but users other than its owner may write to it".into());
        }
        if seen.is_file() && seen.links > 1 && own.volatile.is_some_and(|volatile| volatile != Volatile::None) {
            let names = seen.links;
            print_message(&format!(
                "{}: the file has {names} names: it is not purged while it has more than one",
                path.display()
            ));
        }
        let marks = policy::effective_marks(own, seen.owner, ancestor_folders(path, device).map_err(error_text)?);
        let (volatile, huge) = (marks.volatile.unwrap_or_default(), marks.huge.unwrap_or_default());
        let purged = file_access::purged_from(&fd);
        let line = if self.json {
            json!({
                "path": path.to_string_lossy(), "volatile": volatile.to_string(), "huge": huge.to_string(),
                "own_volatile": keyword_of(own.volatile), "own_huge": keyword_of(own.huge),
                "purged_from": purged, "ignored": bad,
            })
            .to_string()
        } else {
            let origin = |own: bool, marked: bool| {
                if own {
                    "own"
                } else if marked {
                    "from above"
                } else {
                    "default"
                }
            };
            let of_volatile = origin(own.volatile.is_some(), marks.volatile.is_some());
            let of_huge = origin(own.huge.is_some(), marks.huge.is_some());
            let purged = purged.map_or_else(String::new, |from| format!("  purged from byte {from} on"));
            format!("volatile {volatile} ({of_volatile})  huge {huge} ({of_huge})  {}{purged}", path.display())
        };
        writeln!(io::stdout(), "{line}").map_err(error_text)?;
        for bad in bad {
            print_message(&format!("{}: {bad}: ignored", path.display()));
        }
        Ok(())
    }

    fn set_marks(&self, fd: &OwnedFd, seen: &FileAttributes) -> Result<(), String> {
        let changes_marks = self.volatile.is_some() || self.huge.is_some() || self.refilled;
        let user = rustix::process::geteuid().as_raw();
        if changes_marks && user != 0 && user != seen.owner {
            return Err(format!("it belongs to user {}: only its owner may mark it", seen.owner));
        }
        let is_marked = matches!(self.volatile, Some(Volatile::Full | Volatile::Partial));
        if is_marked && is_mark_ignored(seen) {
            return Err("users other than its owner may write to it, so its mark would be ignored (chmod go-w)".into());
        }
        for (attribute, word) in [(VOLATILE, keyword_of(self.volatile)), (HUGE, keyword_of(self.huge))] {
            let Some(word) = word else { continue };
            file_access::set_attribute(fd, attribute, &word).map_err(|error| match error.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::EPERM) => {
                    format!("{error}; before Linux 6.6 only root can mark files on tmpfs")
                }
                _ => error.to_string(),
            })?;
        }
        if self.refilled {
            file_access::clear_purged(fd).map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

/// Returns whether the controller ignores a volatile mark on this file, because users other than the owner may write to
/// the file.
fn is_mark_ignored(seen: &FileAttributes) -> bool {
    seen.is_file() && seen.is_writable_by_others()
}

/// Opens a file or folder and reads its attributes. Refuses symbolic links.
fn open_without_links(path: &Path) -> Result<(OwnedFd, FileAttributes), String> {
    use rustix::fs::{Mode, OFlags};
    let kind = fs::symlink_metadata(path).map_err(|error| error.to_string())?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        let what =
            if kind.is_symlink() { "it is a link: mark its target" } else { "it is neither a file nor a folder" };
        return Err(what.into());
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| io::Error::from(error).to_string())?;
    let seen = file_access::attributes(&fd).map_err(|error| error.to_string())?;
    Ok((fd, seen))
}

/// Returns the folders above `path` on the same file system, nearest first.
fn ancestor_folders(path: &Path, device: u64) -> io::Result<Vec<Ancestor>> {
    let mut found = Vec::new();
    let path = fs::canonicalize(path)?;
    for folder in path.ancestors().skip(1) {
        if fs::metadata(folder)?.dev() != device {
            break;
        }
        let fd = fs::File::open(folder)?;
        let seen = file_access::attributes(&fd)?;
        let marks: Marks = file_access::marks(&fd, |_| ())?;
        found.push(Ancestor { marks, owner: seen.owner, is_open_to_others: seen.is_open_to_others() });
    }
    Ok(found)
}
