//! `pagemill mount --fuse`: a RAM file system in this process, mounted through FUSE.

mod spill;

use super::{Mount, UNMOUNT_RETRY_TIME, print_line, report_error};
use crate::fail;
use pagemill_core::units::Bytes;
use pagemill_fuse::Options;
use pagemill_ramfs::{RamFs, SetAttr};
use pagemill_tmpfs::messages::print_message;
use pagemill_tmpfs::mounting::{self, MOUNT_SOURCE, Refusal};
use rustix::fs::StatVfs;
use serde_json::json;
use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;
use spill::SpillFile;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Inode number of the root directory.
const ROOT_INO: u64 = 1;

/// Bytes of the size for each possible inode, in memory and in a spill file. The metadata of a spilled file stay in
/// memory, some 1.4 KiB for each.
const BYTES_PER_INODE: u64 = 1 << 10;
const SPILL_BYTES_PER_INODE: u64 = 16 << 10;
const MIN_INODES: u64 = 1 << 10;

/// Time for which a process may answer a request for the usage.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Interval of attempts to unmount a busy file system.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// What is mounted on a mount point of `pagemill mount --fuse`.
pub enum Found {
    /// A file system with this device number, which a process serves.
    Served { point: PathBuf, device: u64 },
    /// The process that served it has ended without unmounting it.
    Dead { point: PathBuf },
}

impl Found {
    /// Returns what Pagemill mounted through FUSE at exactly `dir`. `None`: nothing, or another file system.
    pub fn at(dir: &Path) -> Option<Self> {
        let point = canonical(dir).ok()?;
        let line = mounting::mount_at(&point).ok()?.filter(|line| line.is_our_fuse())?;
        Some(match stat(&point) {
            Some(Err(error)) if is_dead(&error) => Self::Dead { point },
            _ => Self::Served { point, device: line.device() },
        })
    }

    fn point(&self) -> &Path {
        match self {
            Self::Served { point, .. } | Self::Dead { point } => point,
        }
    }

    /// Unmounts it. Retries for the duration `retry_time` while it is busy, or until `is_urgent` returns true.
    fn unmount(&self, retry_time: Duration, mut is_urgent: impl FnMut() -> bool) -> Result<(), String> {
        let (point, device) = match self {
            Self::Served { point, device } => (point, *device),
            Self::Dead { point } => return unmount_dead(point),
        };
        let begun = Instant::now();
        loop {
            match pagemill_fuse::unmount(point, false) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() != io::ErrorKind::ResourceBusy => return Err(not_unmounted(point, &error)),
                Err(_) if begun.elapsed() >= retry_time || is_urgent() => {
                    return Err(mounting::busy(point, device, std::process::id()).to_string());
                }
                Err(_) => {}
            }
        }
    }
}

/// Unmounts a file system whose process has ended, also while it is busy: its users get errors anyway. Another command
/// may have unmounted it and mounted a new one meanwhile, which stays.
fn unmount_dead(point: &Path) -> Result<(), String> {
    let _locked = mounting::lock_mounts().map_err(|refusal| refusal.to_string())?;
    match Found::at(point) {
        Some(Found::Dead { .. }) => pagemill_fuse::unmount(point, false)
            .or_else(|_| pagemill_fuse::unmount(point, true))
            .map_err(|error| not_unmounted(point, &error)),
        _ => Ok(()),
    }
}

fn not_unmounted(point: &Path, error: &io::Error) -> String {
    format!("{} cannot be unmounted: {error}", point.display())
}

/// Returns the absolute path without links, also of a mount point whose process has ended.
fn canonical(dir: &Path) -> io::Result<PathBuf> {
    fs::canonicalize(dir).or_else(|error| match (dir.parent(), dir.file_name()) {
        (Some(parent), Some(name)) if is_dead(&error) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(fs::canonicalize(parent)?.join(name))
        }
        _ => Err(error),
    })
}

/// Bytes of a mount in memory and in its spill file, with their limits.
#[derive(Clone, Copy, Default)]
struct MemoryUsage {
    memory_bytes: u64,
    memory_limit_bytes: u64,
    spilled_bytes: u64,
    spill_limit_bytes: u64,
}

impl MemoryUsage {
    /// Returns the usage that the process behind a mount point reports. `None` if the attribute is missing (a process of
    /// an earlier version) or cannot be read.
    fn at(point: &Path) -> Option<Self> {
        let mut buffer = [0; 512];
        let len = rustix::fs::getxattr(point, pagemill_fuse::USAGE_ATTRIBUTE, &mut buffer).ok()?;
        let mut usage = Self::default();
        for line in std::str::from_utf8(&buffer[..len]).ok()?.lines() {
            let (name, bytes) = line.split_once(' ')?;
            let bytes = bytes.parse().ok()?;
            match name {
                "memory" => usage.memory_bytes = bytes,
                "memory_limit" => usage.memory_limit_bytes = bytes,
                "spilled" => usage.spilled_bytes = bytes,
                "spill_limit" => usage.spill_limit_bytes = bytes,
                _ => {}
            }
        }
        Some(usage)
    }
}

/// Returns the usage of a file system, which the kernel never has in a cache. `None`: there is no answer in time.
fn stat(point: &Path) -> Option<io::Result<(StatVfs, Option<MemoryUsage>)>> {
    let (send, answer) = mpsc::channel();
    let point = point.to_owned();
    // A thread, since the process that serves the file system may be stopped.
    let ask = move || {
        let stat = rustix::fs::statvfs(&point).map_err(io::Error::from);
        let _ = send.send(stat.map(|stat| (stat, MemoryUsage::at(&point)))); // without a receiver after a timeout
    };
    std::thread::Builder::new().name("usage".into()).spawn(ask).ok()?;
    answer.recv_timeout(ANSWER_TIME).ok()
}

/// Returns whether a file system has no process any more that serves it.
fn is_dead(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOTCONN)
}

/// Unmounts FUSE file systems of Pagemill whose processes have ended, at a mount point, and reports that.
///
/// # Errors
///
/// A text: it cannot be unmounted, or it is not one of Pagemill's.
pub fn remove_dead_mounts(dir: &Path) -> Result<(), String> {
    while let Some(found @ Found::Dead { .. }) = Found::at(dir) {
        found.unmount(Duration::ZERO, || true)?;
        let point = found.point().display();
        print_message(&format!("the process behind {point} had ended without unmounting it: unmounted, files lost"));
    }
    match stat(dir) {
        Some(Err(error)) if is_dead(&error) => Err(format!(
            "the process behind {0} has ended without unmounting it, and it is not a mount of Pagemill: \
             `fusermount3 -u {0}` or, as root, `umount {0}` unmounts it",
            dir.display()
        )),
        _ => Ok(()),
    }
}

/// Why the process of a mount ends.
enum End {
    Signal(i32),
    Unmounted,
}

/// A file system that is mounted and served by this process.
struct Served {
    found: Found,
    mount: pagemill_fuse::Mount,
    size_bytes: u64,
    spill: Option<SpillFile>,
    threads: usize,
}

impl Mount {
    /// Mounts through FUSE, and serves the file system until it is unmounted.
    pub(super) fn main_of_fuse(&self, mut signals: Signals) -> ExitCode {
        let Served { found, mount, size_bytes, spill, threads } = match self.mount_through_fuse() {
            Ok(served) => served,
            Err(why) => return report_error(2, self.json, &why),
        };
        let (ends, end) = mpsc::channel();
        let signalled = ends.clone();
        let handle = signals.handle();
        let spawned = std::thread::Builder::new().name("signals".into()).spawn(move || {
            while signals.forever().next().is_some_and(|signal| signalled.send(End::Signal(signal)).is_ok()) {}
        });
        let awaits_end = move || {
            mount.wait();
            let _ = ends.send(End::Unmounted);
        };
        let spawned = spawned.and_then(|_| std::thread::Builder::new().name("session".into()).spawn(awaits_end));
        if let Err(error) = spawned {
            let _ = pagemill_fuse::unmount(found.point(), true);
            return report_error(2, self.json, &format!("{} is not served: {error}", found.point().display()));
        }
        self.report_fuse_ready(&found, size_bytes, spill.as_ref(), threads);
        let status = self.await_end(&found, &end);
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        handle.close();
        if let (true, Found::Served { device, .. }) = (self.as_daemon, &found) {
            super::remove_empty_log(*device);
        }
        status
    }

    /// Creates the file system and mounts it.
    fn mount_through_fuse(&self) -> Result<Served, String> {
        let text = |refusal: Refusal| refusal.to_string();
        mounting::check_size(self.size).map_err(text)?;
        let point = mounting::canonical(&self.dir).map_err(|refusal| self.hint_of(&refusal))?;
        let (_folder, _lock) = mounting::lock_mounts().map_err(text)?;
        match mounting::mount_at(&point).map_err(|error| format!("the mounts cannot be read: {error}"))? {
            Some(line) if line.is_our_fuse() => {
                let point = point.display();
                return Err(format!("{point} is mounted by Pagemill already (pagemill status {point})"));
            }
            Some(line) => return Err(Refusal::Taken { point, kind: line.kind, source: line.source }.to_string()),
            None => mounting::check_empty(&point, &point).map_err(text)?,
        }
        let size_bytes = self.size.unwrap_or_else(mounting::default_size);
        let create = |dir| SpillFile::create(dir, self.spill_size, size_bytes, &point);
        let spill = self.spill.as_deref().map(create).transpose()?;
        let fs = self.new_file_system(size_bytes, spill.as_ref());
        let fs = fs.map_err(|error| format!("no file system can be made: {error}"))?;
        let threads = self.threads.map_or_else(default_threads, usize::from);
        let options = Options { name: MOUNT_SOURCE, threads, allow_other: rustix::process::geteuid().is_root() };
        let mount = pagemill_fuse::Mount::start(fs, &point, &options).map_err(|error| error.to_string())?;
        let device = fs::metadata(&point).map(|metadata| metadata.dev()).map_err(|error| {
            let _ = pagemill_fuse::unmount(&point, true);
            format!("{} was mounted, but cannot be read: {error}", point.display())
        })?;
        Ok(Served { found: Found::Served { point, device }, mount, size_bytes, spill, threads })
    }

    fn new_file_system(&self, size_bytes: u64, spill: Option<&SpillFile>) -> Result<RamFs, pagemill_ramfs::Error> {
        let spilled_inodes = spill.map_or(0, |spill| spill.limit_bytes / SPILL_BYTES_PER_INODE);
        let default_inodes = (size_bytes / BYTES_PER_INODE).max(MIN_INODES).saturating_add(spilled_inodes);
        let inodes = self.inodes.unwrap_or(default_inodes);
        let builder = RamFs::builder("fuse").bytes(size_bytes).inodes(inodes).root_mode(self.mode.unwrap_or(0o1777));
        let builder = match spill {
            Some(spill) => builder.spill(spill.store.clone(), spill.limit_bytes),
            None => builder,
        };
        let fs = builder.build()?;
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let owner = SetAttr { uid: Some(uid), gid: Some(gid), mode: self.mode, ..SetAttr::default() };
        fs.setattr(ROOT_INO, &owner, None, &pagemill_ramfs::Caller::root())?;
        Ok(fs)
    }

    fn report_fuse_ready(&self, found: &Found, size_bytes: u64, spill: Option<&SpillFile>, threads: usize) {
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        let Found::Served { point, device } = found else { return };
        let (pid, size) = (std::process::id(), Bytes(size_bytes));
        let line = if self.json {
            let point = point.to_string_lossy();
            json!({
                "mounted": point, "size_bytes": size_bytes + spill.map_or(0, |spill| spill.limit_bytes), "controller_pid": pid, "taken_over": false,
                "fuse": true, "threads": threads, "memory_limit_bytes": size_bytes,
                "spill_limit_bytes": spill.map_or(0, |spill| spill.limit_bytes)
            })
            .to_string()
        } else {
            let end = self.end_hint(*device);
            let more = spill.map_or_else(String::new, |spill| {
                format!(" in memory and {} on disk in {}", Bytes(spill.limit_bytes), spill.folder.display())
            });
            let point = point.display();
            format!("{point} mounted through FUSE: up to {size}{more}, process {pid}, {threads} threads; {end}")
        };
        let _ = writeln!(io::stdout(), "{line}");
        let _ = io::stdout().flush();
        if self.as_daemon {
            self.redirect_output_to_log(*device);
            // The folder in which it was started can be unmounted.
            let _ = std::env::set_current_dir("/");
        }
    }

    /// Waits until the file system is unmounted. After a signal, unmounts it: if it stays busy, or at a second signal,
    /// also while files are open, since they are lost when this process ends.
    fn await_end(&self, found: &Found, end: &Receiver<End>) -> ExitCode {
        loop {
            match end.recv() {
                Ok(End::Signal(SIGHUP)) if self.as_daemon => {}
                Ok(End::Signal(_)) => break,
                Ok(End::Unmounted) | Err(_) => return ExitCode::SUCCESS,
            }
        }
        let is_urgent = || end.recv_timeout(RETRY_INTERVAL).is_ok();
        match found.unmount(UNMOUNT_RETRY_TIME, is_urgent) {
            Ok(()) => ExitCode::SUCCESS,
            // Another process has unmounted it meanwhile.
            Err(_) if !is_served(found) => ExitCode::SUCCESS,
            Err(why) => {
                let detached = pagemill_fuse::unmount(found.point(), true);
                let result = match detached {
                    Ok(()) => "unmounted anyway: open files are lost".to_owned(),
                    Err(error) => format!("it stays mounted without a process: {error}"),
                };
                fail(1, &format!("{why}\n{result}"))
            }
        }
    }
}

fn is_served(found: &Found) -> bool {
    matches!((found, Found::at(found.point())),
        (Found::Served { device, .. }, Some(Found::Served { device: now, .. })) if *device == now)
}

/// Number of threads that answer requests: one for each CPU, up to 4.
fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(4)
}

/// Unmounts a file system for `pagemill umount`. Returns the exit status.
pub fn unmount(found: &Found, retry_time: Duration, is_json: bool) -> ExitCode {
    let pause = || {
        std::thread::sleep(RETRY_INTERVAL);
        false
    };
    if let Err(why) = found.unmount(retry_time, pause) {
        return report_error(1, is_json, &why);
    }
    let point = found.point().to_string_lossy();
    let written = match is_json {
        true => print_line(&json!({ "unmounted": point, "still_mounted": [] }).to_string()),
        false => Ok(()),
    };
    written.map_or_else(|why| fail(1, &why), |()| ExitCode::SUCCESS)
}

/// Returns the text of `pagemill status`, or its JSON.
///
/// # Errors
///
/// A text: no process serves it, or it cannot be read.
pub fn status_text(found: &Found, is_json: bool) -> Result<String, String> {
    let Found::Served { point, .. } = found else {
        let point = found.point().display();
        return Err(format!("the process behind {point} has ended: `pagemill umount {point}` unmounts it"));
    };
    let (stat, usage) = match stat(point) {
        Some(Ok((stat, usage))) => (stat, usage),
        Some(Err(error)) => return Err(format!("{} cannot be read: {error}", point.display())),
        None => return Err(format!("the process behind {} does not answer; it may be stopped", point.display())),
    };
    let size_bytes = stat.f_blocks.saturating_mul(stat.f_frsize);
    let used_bytes = size_bytes.saturating_sub(stat.f_bfree.saturating_mul(stat.f_frsize));
    let inodes = stat.f_files.saturating_sub(stat.f_ffree);
    if stat.f_files == 0 {
        // The kernel answers with zeros then, without asking the process.
        let point = point.display();
        return Err(format!("{point} was mounted by another user; only that user can see its usage"));
    }
    if is_json {
        let state = json!({
            "mount_point": point.to_string_lossy(), "fuse": true, "size_bytes": size_bytes, "used_bytes": used_bytes,
            "inodes": inodes, "max_inodes": stat.f_files, "memory_bytes": usage.map(|usage| usage.memory_bytes),
            "memory_limit_bytes": usage.map(|usage| usage.memory_limit_bytes),
            "spilled_bytes": usage.map(|usage| usage.spilled_bytes),
            "spill_limit_bytes": usage.map(|usage| usage.spill_limit_bytes)
        });
        return Ok(format!("{state}\n"));
    }
    let (point, size, used) = (point.display(), Bytes(size_bytes).to_string(), Bytes(used_bytes).to_string());
    let most = stat.f_files;
    let mut text =
        format!("{point}  through FUSE\n  size {size:>24}\n  used {used:>24}  in {inodes} of {most} inodes\n");
    if let Some(usage) = usage.filter(|usage| usage.spill_limit_bytes > 0) {
        let [memory, spilled] = [usage.memory_bytes, usage.spilled_bytes].map(|bytes| Bytes(bytes).to_string());
        let [most_memory, most_spilled] = [usage.memory_limit_bytes, usage.spill_limit_bytes].map(Bytes);
        text += &format!("  in memory {memory:>19}  of {most_memory}\n  on disk {spilled:>21}  of {most_spilled}\n");
    }
    Ok(text)
}
