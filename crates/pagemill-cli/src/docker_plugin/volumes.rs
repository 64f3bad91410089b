//! The volumes: their folders, their mounts, and which containers use them.
//!
//! ```text
//! DIR/.lock              locked while a plugin uses DIR
//! DIR/NAME/volume.json   options, and the containers that use the volume
//! DIR/NAME/mount         mount point
//! ```
//!
//! A controller of its own serves each mount (`pagemill mount --daemon`). The kernel's list of mounts says which volumes
//! are mounted. So nothing is lost if this process is killed: a later one reads the folders and the mounts again. The
//! containers of a volume that is not mounted are void, since a container cannot outlive the mount that it uses.
//!
//! Locks: `records`, during a whole request. So requests are executed one after the other.

use super::options::{Options, check_name};
use crate::mount;
use pagemill_tmpfs::file_access;
use pagemill_tmpfs::messages::print_message;
use pagemill_tmpfs::mounting;
use pagemill_tmpfs::policy::{HUGE, VOLATILE};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const RECORD_NAME: &str = "volume.json";
const NEW_RECORD_NAME: &str = "volume.json.new";
const MOUNT_NAME: &str = "mount";
const LOCK_NAME: &str = ".lock";

/// Maximum time for `pagemill mount`. Docker waits two minutes for a response.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(60);

/// Time for which the removal of a busy volume is tried again.
const UNMOUNT_RETRY_TIME: Duration = Duration::from_millis(500);

/// Maximum number of bytes of a container's identifier, which Docker makes of 64 letters.
const MAX_ID_BYTES: usize = 256;

/// What `volume.json` holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// The options, as they were given.
    options: BTreeMap<String, String>,
    /// Identifiers of the containers that use the volume.
    containers: BTreeSet<String>,
}

/// A volume, as requests see it.
pub struct Volume {
    pub name: String,
    pub containers: usize,
    pub mounted: Option<Mounted>,
}

/// The mount of a volume.
pub struct Mounted {
    pub point: PathBuf,
    pub size_bytes: u64,
    pub used_bytes: u64,
}

/// All volumes below a folder.
pub struct Volumes {
    dir: PathBuf,
    records: Mutex<BTreeMap<String, Record>>,
    _lock: File,
}

impl Volumes {
    /// Reads the volumes below `dir`, and creates `dir` if it is missing. Starts controllers for mounts that have lost
    /// theirs. Reports folders that are no volumes, and leaves them.
    ///
    /// # Errors
    ///
    /// A text: `dir` cannot be created, read or locked, or another plugin uses it.
    pub fn open(dir: &Path) -> Result<Self, String> {
        let text = |error: io::Error| format!("{}: {error}", dir.display());
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(text)?;
        let dir = fs::canonicalize(dir).map_err(text)?;
        let lock = File::create(dir.join(LOCK_NAME)).map_err(text)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::AGAIN) => return Err(format!("another plugin uses {}", dir.display())),
            Err(error) => return Err(text(error.into())),
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(&dir).map_err(text)? {
            let name = entry.map_err(text)?.file_name().to_string_lossy().into_owned();
            names.extend(Some(name).filter(|name| name != LOCK_NAME));
        }
        let volumes = Self { dir, records: Mutex::default(), _lock: lock };
        let mut records = volumes.lock();
        for name in names {
            match volumes.load(&name) {
                Ok(Some(record)) => drop(records.insert(name, record)),
                Ok(None) => {}
                Err(why) => print_message(&format!("{} is left alone: {why}", volumes.dir.join(&name).display())),
            }
        }
        drop(records);
        Ok(volumes)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Creates a volume and mounts it. A volume that exists with the same options is not changed.
    ///
    /// # Errors
    ///
    /// A text: the name or an option is wrong, a volume with other options exists, the mount failed. Nothing is left
    /// then.
    pub fn create(&self, name: &str, options: &BTreeMap<String, String>) -> Result<(), String> {
        check_name(name)?;
        let parsed = Options::parse(options)?;
        let mut records = self.lock();
        if let Some(known) = records.get_mut(name) {
            if Options::parse(&known.options)? != parsed {
                let (known, given) = (option_list(&known.options), option_list(options));
                return Err(format!("volume {name} exists with the options {known}; requested: {given}"));
            }
            return self.ensure_mounted(name, known).map(drop);
        }
        let folder = self.dir.join(name);
        DirBuilder::new().mode(0o700).create(&folder).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => format!("{} exists, and is not the folder of a volume", folder.display()),
            _ => format!("{} cannot be created: {error}", folder.display()),
        })?;
        let mut record = Record { options: options.clone(), ..Record::default() };
        let made = self.save(name, &record).and_then(|()| self.ensure_mounted(name, &mut record));
        if let Err(why) = made {
            return Err(match self.remove_folder(name) {
                Ok(()) => why,
                Err(also) => format!("{why}; then {also}"),
            });
        }
        records.insert(name.to_owned(), record);
        Ok(())
    }

    /// Removes a volume and its files.
    ///
    /// # Errors
    ///
    /// A text: the volume does not exist, containers or other processes use it, or it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<(), String> {
        let mut records = self.lock();
        let record = records.get(name).ok_or_else(|| missing(name))?;
        if let Some(device) = self.mounted_device(name)? {
            let point = self.mount_point(name);
            if !record.containers.is_empty() {
                let (containers, point) = (record.containers.len(), point.display());
                // Docker does not unmount the volumes of its containers if it is killed.
                return Err(format!(
                    "volume {name} is in use; containers: {containers} (if none of them runs: pagemill umount {point})"
                ));
            }
            let still_mounted = mount::unmount_and_wait(&point, device, UNMOUNT_RETRY_TIME)
                .map_err(|refusal| format!("volume {name} cannot be removed: {refusal}"))?;
            if let Some(other) = still_mounted.first() {
                print_message(&format!("the files of volume {name} stay in memory: mounted on {}", other.display()));
            }
        }
        self.remove_folder(name)?;
        records.remove(name);
        Ok(())
    }

    /// Mounts a volume that is not mounted, and records that container `id` uses it. Returns the mount point.
    ///
    /// # Errors
    ///
    /// A text: the volume does not exist, the mount failed, or the container cannot be recorded.
    pub fn mount(&self, name: &str, id: &str) -> Result<PathBuf, String> {
        check_id(id)?;
        let mut records = self.lock();
        let record = records.get_mut(name).ok_or_else(|| missing(name))?;
        self.ensure_mounted(name, record)?;
        let mut changed = record.clone();
        if changed.containers.insert(id.to_owned()) {
            self.save(name, &changed)?;
            *record = changed;
        }
        Ok(self.mount_point(name))
    }

    /// Records that container `id` does not use a volume any more. The files stay.
    ///
    /// # Errors
    ///
    /// A text: the volume does not exist, or the change cannot be recorded. That the container did not use the volume
    /// is no error, since Docker repeats requests.
    pub fn unmount(&self, name: &str, id: &str) -> Result<(), String> {
        check_id(id)?;
        let mut records = self.lock();
        let record = records.get_mut(name).ok_or_else(|| missing(name))?;
        let mut changed = record.clone();
        if changed.containers.remove(id) {
            self.save(name, &changed)?;
            *record = changed;
        }
        Ok(())
    }

    /// # Errors
    ///
    /// A text: the volume does not exist, or its mount cannot be read.
    pub fn get(&self, name: &str) -> Result<Volume, String> {
        let records = self.lock();
        self.describe(name, records.get(name).ok_or_else(|| missing(name))?)
    }

    /// # Errors
    ///
    /// A text: the mounts cannot be read.
    pub fn list(&self) -> Result<Vec<Volume>, String> {
        self.lock().iter().map(|(name, record)| self.describe(name, record)).collect()
    }

    /// Starts controllers for mounts that have lost theirs. Reports a volume once for which that fails: `failed` has the
    /// names of those that were reported.
    pub fn replace_controllers(&self, failed: &mut BTreeSet<String>) {
        for (name, record) in self.lock().iter_mut() {
            let lost = |device: u64| !mounting::is_controlled(device);
            let replaced = match self.mounted_device(name) {
                Ok(device) if device.is_some_and(lost) => self.ensure_mounted(name, record),
                result => result.map(drop),
            };
            match replaced {
                Ok(()) => drop(failed.remove(name)),
                Err(why) if failed.insert(name.clone()) => report_no_controller(name, &why),
                Err(_) => {}
            }
        }
    }

    fn describe(&self, name: &str, record: &Record) -> Result<Volume, String> {
        let point = self.mount_point(name);
        let mounted = match self.mounted_device(name)? {
            Some(_) => {
                let usage = rustix::fs::statvfs(&point).map_err(|error| format!("{}: {error}", point.display()))?;
                let bytes = |blocks: u64| blocks.saturating_mul(usage.f_frsize);
                let used_bytes = bytes(usage.f_blocks.saturating_sub(usage.f_bfree));
                Some(Mounted { point, size_bytes: bytes(usage.f_blocks), used_bytes })
            }
            None => None,
        };
        let containers = if mounted.is_some() { record.containers.len() } else { 0 };
        Ok(Volume { name: name.to_owned(), containers, mounted })
    }

    fn mount_point(&self, name: &str) -> PathBuf {
        self.dir.join(name).join(MOUNT_NAME)
    }

    /// Returns the device of a volume's mount; `None` if the volume is not mounted.
    fn mounted_device(&self, name: &str) -> Result<Option<u64>, String> {
        let line = mounting::mount_at(&self.mount_point(name));
        let line = line.map_err(|error| format!("the mounts cannot be read: {error}"))?;
        Ok(line.filter(mounting::MountLine::is_ours).map(|line| line.device()))
    }

    /// Ensures that a volume is mounted and has a controller. The containers of a volume that was not mounted are
    /// removed from its record.
    fn ensure_mounted(&self, name: &str, record: &mut Record) -> Result<(), String> {
        match self.mounted_device(name)? {
            Some(device) if mounting::is_controlled(device) => return Ok(()),
            Some(_) => {}
            None if record.containers.is_empty() => {}
            None => {
                let emptied = Record { containers: BTreeSet::new(), ..record.clone() };
                self.save(name, &emptied)?;
                *record = emptied;
            }
        }
        let options = Options::parse(&record.options)?;
        let point = self.mount_point(name);
        match DirBuilder::new().mode(0o700).create(&point) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(format!("{} cannot be created: {error}", point.display()));
            }
            _ => {}
        }
        let was_taken_over = start_controller(&point, &options)?;
        // The marks of a mount that was taken over may have been changed by `pagemill mark`.
        if !was_taken_over && let Err(error) = set_marks(&point, &options) {
            let device = self.mounted_device(name)?.unwrap_or(0);
            let _ = mount::unmount_and_wait(&point, device, UNMOUNT_RETRY_TIME);
            return Err(format!("the marks of {} cannot be set: {error}", point.display()));
        }
        Ok(())
    }

    /// Replaces a volume's record. After a crash the old or the new one is there.
    fn save(&self, name: &str, record: &Record) -> Result<(), String> {
        let (path, new) = (self.dir.join(name).join(RECORD_NAME), self.dir.join(name).join(NEW_RECORD_NAME));
        let write = || -> io::Result<()> {
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(record)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().map_err(|error| format!("{} cannot be written: {error}", path.display()))
    }

    /// Reads the record of a folder, and completes or undoes what a killed plugin left. Returns `None` if the folder
    /// was removed, because its volume was not complete.
    fn load(&self, name: &str) -> Result<Option<Record>, String> {
        check_name(name)?;
        let path = self.dir.join(name).join(RECORD_NAME);
        let text = match fs::read(&path) {
            Ok(text) => text,
            // `rmdir` removes no folder with files in it.
            Err(error) if error.kind() == ErrorKind::NotFound => return self.remove_folder(name).map(|()| None),
            Err(error) => return Err(format!("{} cannot be read: {error}", path.display())),
        };
        let wrong = |error: String| format!("{} is no record of a volume: {error}", path.display());
        let mut record: Record = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        Options::parse(&record.options).map_err(wrong)?;
        if self.mounted_device(name)?.is_some()
            && let Err(why) = self.ensure_mounted(name, &mut record)
        {
            report_no_controller(name, &why);
        }
        Ok(Some(record))
    }

    /// Removes the folder of a volume that is not mounted. The record goes first: a folder without it is not complete.
    fn remove_folder(&self, name: &str) -> Result<(), String> {
        let folder = self.dir.join(name);
        let text = |error: io::Error| format!("{} cannot be removed: {error}", folder.display());
        let ignore_missing = |result: io::Result<()>| match result {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            result => result.map_err(text),
        };
        ignore_missing(fs::remove_dir(folder.join(MOUNT_NAME)))?;
        ignore_missing(fs::remove_file(folder.join(NEW_RECORD_NAME)))?;
        ignore_missing(fs::remove_file(folder.join(RECORD_NAME)))?;
        ignore_missing(fs::remove_dir(&folder))
    }
}

fn report_no_controller(name: &str, why: &str) {
    print_message(&format!("volume {name} has no controller, so none of its files is purged: {why}"));
}

fn missing(name: &str) -> String {
    format!("there is no volume `{}`", name.escape_debug())
}

fn check_id(id: &str) -> Result<(), String> {
    match id.len() {
        0 => Err("the request has no ID of a container".to_owned()),
        1..=MAX_ID_BYTES => Ok(()),
        len => Err(format!("the ID of the container has {len} bytes; the maximum is {MAX_ID_BYTES}")),
    }
}

fn option_list(options: &BTreeMap<String, String>) -> String {
    let all: Vec<_> =
        options.iter().map(|(option, value)| format!("{}={}", option.escape_debug(), value.escape_debug())).collect();
    if all.is_empty() { "(none)".to_owned() } else { all.join(" ") }
}

/// Starts `pagemill mount --daemon`, and waits until it has mounted. Returns whether it took over a mount.
fn start_controller(point: &Path, options: &Options) -> Result<bool, String> {
    let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into()));
    command.args(["mount", "--daemon", "--json"]);
    command.args(options.size_bytes.map(|bytes| format!("--size={bytes}")));
    command.args(options.mode.map(|mode| format!("--mode={mode:o}")));
    // In a process group of its own, so that Ctrl-C reaches only this process.
    command.arg(point).env_remove("NOTIFY_SOCKET").stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let text = |error: io::Error| format!("the controller of {} cannot be started: {error}", point.display());
    let mut child = command.spawn().map_err(text)?;
    let begun = Instant::now();
    while child.try_wait().map_err(text)?.is_none() {
        if begun.elapsed() > MOUNT_TIMEOUT {
            let (_, _) = (child.kill(), child.wait());
            return Err(format!("{} was not mounted within {} s", point.display(), MOUNT_TIMEOUT.as_secs()));
        }
        thread::sleep(Duration::from_millis(2));
    }
    let mut answer = String::new();
    child.stdout.take().map_or(Ok(0), |mut out| out.read_to_string(&mut answer)).map_err(text)?;
    let answer: Value = serde_json::from_str(&answer).unwrap_or_default();
    match (&answer["mounted"], &answer["error"]) {
        (Value::String(_), _) => Ok(answer["taken_over"] == true),
        (_, Value::String(why)) => Err(why.clone()),
        _ => Err(format!("the controller of {} ended without an answer", point.display())),
    }
}

fn set_marks(point: &Path, options: &Options) -> io::Result<()> {
    let marks =
        [(VOLATILE, options.volatile.map(|word| word.to_string())), (HUGE, options.huge.map(|word| word.to_string()))];
    let root = File::open(point)?;
    for (attribute, word) in marks {
        if let Some(word) = word {
            file_access::set_attribute(&root, attribute, &word)?;
        }
    }
    Ok(())
}
