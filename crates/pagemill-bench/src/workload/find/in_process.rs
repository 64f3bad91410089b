//! The operations of a tree in a RAM file system of this process, and the memory that it takes.

use std::time::Instant;

use fastrand::Rng;
use pagemill_ramfs::{Error, OpenOptions, RamFs};

use super::{FindArguments, MISSING, Tree, Work, create_directories, directory_path, file_path, median_search_ms};
use crate::native::{self, GiveBack};
use crate::proc;
use crate::stats::mib;
use crate::workload::{Failure, WorkloadResult, ensure};

/// Number of files for each file that is kept.
const FILES_PER_KEPT_FILE: usize = 10;
const REMOVAL_SEED: u64 = 0x6669_6e64;

pub struct InProcess(RamFs);

impl InProcess {
    pub fn new(arguments: &FindArguments) -> Result<Self, Failure> {
        Ok(Self(RamFs::builder("find").movable(!arguments.immovable).build()?))
    }
}

impl Tree for InProcess {
    fn create_directory(&self, path: &str) -> Result<(), Failure> {
        Ok(self.0.create_dir(path)?)
    }

    fn create(&self, path: &str) -> Result<(), Failure> {
        Ok(self.0.open(path, &OpenOptions::new().write(true).create_new(true)).map(drop)?)
    }

    fn remove(&self, path: &str) -> Result<(), Failure> {
        Ok(self.0.remove_file(path)?)
    }

    #[inline]
    fn exists(&self, path: &str) -> Result<bool, Failure> {
        match self.0.metadata(path) {
            Ok(_) => Ok(true),
            Err(Error::NotFound) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn search(&self, name: &str) -> Result<(Option<usize>, usize), Failure> {
        let (mut seen, mut found) = (0, 0);
        self.0.walk_tree("/", |_, entry| {
            seen += 1;
            found += usize::from(entry.name == name.as_bytes());
            true
        })?;
        Ok((Some(seen), found))
    }

    /// Does nothing: a file system that was just built has no cache.
    fn forget_after_building(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn drop_caches(&self) -> Result<(), Failure> {
        self.0.shrink()?;
        Ok(())
    }
}

/// Measures the memory of a file system with a tenth of the files: after the others were removed at random, or new.
pub fn measure_memory(arguments: &FindArguments) -> WorkloadResult {
    let (files, directories) = (arguments.files, arguments.directories);
    let mut order: Vec<u32> = (0..files as u32).collect();
    Rng::with_seed(REMOVAL_SEED).shuffle(&mut order);
    let (kept, removed) = order.split_at_mut(files / FILES_PER_KEPT_FILE);
    kept.sort_unstable();
    let path_of = |file: &u32| file_path(*file as usize, directories);

    let bytes_before = resident_bytes()?;
    let tree = InProcess::new(arguments)?;
    create_directories(&tree, directories)?;
    if arguments.work == Work::Removed {
        (0..files as u32).try_for_each(|file| tree.create(&path_of(&file)))?;
        removed.iter().try_for_each(|file| tree.remove(&path_of(file)))?;
    } else {
        kept.iter().try_for_each(|file| tree.create(&path_of(file)))?;
    }
    let entries = kept.len() + directories;
    let sparse_ms = median_search_ms(&tree, entries)?;
    let begun = Instant::now();
    let shrunk = tree.0.shrink()?;
    let shrink_ms = begun.elapsed().as_secs_f64() * 1e3;
    native::give_back(GiveBack::MallocTrim)?;
    let left_bytes = resident_bytes()?.saturating_sub(bytes_before);
    let search_ms = median_search_ms(&tree, entries)?;

    for file in kept.iter() {
        ensure(tree.exists(&path_of(file))?, || format!("{} is gone", path_of(file)))?;
    }
    for directory in 0..directories {
        let path = format!("{}/{MISSING}", directory_path(directory));
        ensure(!tree.exists(&path)?, || format!("{path} exists"))?;
    }
    Ok(serde_json::json!({
        "left_mib": mib(left_bytes), "counted_mib": mib(tree.0.usage().metadata_bytes),
        "bytes_per_file": left_bytes as f64 / kept.len() as f64, "shrink_ms": shrink_ms,
        "sparse_ms": sparse_ms, "search_ms": search_ms, "renumbered": shrunk.renumbered,
    }))
}

/// Returns the anonymous and shared resident bytes of this process.
fn resident_bytes() -> Result<u64, Failure> {
    proc::own_anonymous_bytes().ok_or_else(|| Failure::Other("/proc/self/smaps_rollup cannot be read".to_owned()))
}
