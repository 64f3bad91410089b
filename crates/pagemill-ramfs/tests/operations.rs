//! Random operations on a RAM file system, compared with a simple reference in this process, and with a tmpfs of the
//! kernel through system calls. After each operation both sides must have returned the same result or error number.

#[path = "operations/model.rs"]
mod model;

use model::Model;
use pagemill_ramfs::{Error, File, FileType, OpenOptions, RamFs, Rename};
use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, RenameFlags};
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Names of entries. The long one does not fit into a dentry.
const NAMES: [&str; 4] = ["a", "b", "c", "a-name-that-is-longer-than-what-a-dentry-has-room-for-itself"];
/// Target of all symbolic links, a name that never exists.
pub const TARGET: &str = "nowhere";

#[derive(Clone, Debug)]
pub enum Operation {
    Create(String),
    Write(String, u16, u16, u8),
    Truncate(String, u16),
    Read(String),
    Mkdir(String),
    Rmdir(String),
    Unlink(String),
    Symlink(String),
    Link(String, String),
    Rename(String, String, Rename),
    List(String),
    Stat(String),
    /// Opens a file and keeps it open.
    Hold(String),
    /// Closes the oldest open file, and returns its contents.
    Release,
    /// Packs, moves and renumbers the objects of the RAM file system.
    Shrink,
}

/// What an operation returns: its result, or its error number.
pub type Outcome = Result<Seen, i32>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Done,
    Bytes(Vec<u8>),
    Names(Vec<String>),
    /// Kind (`d`, `f`, `l`), length of files, number of links.
    Attr(char, u64, u64),
}

/// A file system that the operations run on.
pub trait Subject {
    fn apply(&mut self, operation: &Operation) -> Outcome;
}

struct OfRam {
    fs: RamFs,
    held: Vec<File>,
}

fn contents(file: &File) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; file.size_bytes() as usize];
    let read = file.read_at(&mut bytes, 0)?;
    assert_eq!(read, bytes.len());
    Ok(bytes)
}

impl OfRam {
    fn try_apply(&mut self, operation: &Operation) -> Result<Seen, Error> {
        let (fs, read) = (&self.fs, OpenOptions::new().read(true));
        let done = |()| Seen::Done;
        match operation {
            Operation::Create(path) => fs.open(path, &read.write(true).create_new(true)).map(|_| Seen::Done),
            Operation::Write(path, at, len, byte) => {
                let file = fs.open(path, &OpenOptions::new().write(true))?;
                file.write_at(&vec![*byte; usize::from(*len)], u64::from(*at)).map(|_| Seen::Done)
            }
            Operation::Truncate(path, len) => {
                fs.open(path, &OpenOptions::new().write(true))?.set_size(u64::from(*len)).map(done)
            }
            Operation::Read(path) => contents(&fs.open(path, &read)?).map(Seen::Bytes),
            Operation::Mkdir(path) => fs.create_dir(path).map(done),
            Operation::Rmdir(path) => fs.remove_dir(path).map(done),
            Operation::Unlink(path) => fs.remove_file(path).map(done),
            Operation::Symlink(path) => fs.symlink(TARGET, path).map(done),
            Operation::Link(from, to) => fs.hard_link(from, to).map(done),
            Operation::Rename(from, to, how) => fs.rename_with(from, to, *how).map(done),
            Operation::List(path) => {
                let entries = fs.read_dir(path)?;
                let mut names: Vec<String> =
                    entries.into_iter().map(|entry| entry.name.into_string().unwrap()).collect();
                names.sort();
                Ok(Seen::Names(names))
            }
            Operation::Stat(path) => {
                let attr = fs.symlink_metadata(path)?;
                let (kind, len) = match attr.kind {
                    FileType::Directory => ('d', 0),
                    FileType::Symlink => ('l', attr.size_bytes),
                    _ => ('f', attr.size_bytes),
                };
                Ok(Seen::Attr(kind, len, u64::from(attr.links)))
            }
            Operation::Hold(path) => {
                self.held.push(fs.open(path, &read)?);
                Ok(Seen::Done)
            }
            Operation::Release if self.held.is_empty() => Ok(Seen::Done),
            Operation::Release => contents(&self.held.remove(0)).map(Seen::Bytes),
            Operation::Shrink => fs.shrink().map(|_| Seen::Done),
        }
    }
}

impl Subject for OfRam {
    fn apply(&mut self, operation: &Operation) -> Outcome {
        self.try_apply(operation).map_err(|error| error.errno())
    }
}

struct OfKernel {
    root: tempfile::TempDir,
    held: Vec<fs::File>,
}

impl OfKernel {
    fn try_apply(&mut self, operation: &Operation) -> io::Result<Seen> {
        let at = |path: &str| -> PathBuf { self.root.path().join(path.trim_start_matches('/')) };
        let done = |()| Seen::Done;
        // Without following links as the last component, since all links lead nowhere: `ENOENT` either way.
        match operation {
            Operation::Create(path) => fs::File::create_new(at(path)).map(|_| Seen::Done),
            Operation::Write(path, offset, len, byte) => {
                let file = fs::OpenOptions::new().write(true).open(at(path))?;
                file.write_all_at(&vec![*byte; usize::from(*len)], u64::from(*offset)).map(done)
            }
            Operation::Truncate(path, len) => {
                fs::OpenOptions::new().write(true).open(at(path))?.set_len(u64::from(*len)).map(done)
            }
            Operation::Read(path) => {
                // A directory can be opened for reading, but not read: an error of the read then.
                let file = fs::OpenOptions::new().read(true).custom_flags(0).open(at(path))?;
                let mut bytes = vec![0; file.metadata()?.len() as usize];
                file.read_exact_at(&mut bytes, 0).map(|()| Seen::Bytes(bytes))
            }
            Operation::Mkdir(path) => fs::create_dir(at(path)).map(done),
            Operation::Rmdir(path) => {
                rustix::fs::unlinkat(CWD, at(path), AtFlags::REMOVEDIR).map(done).map_err(Into::into)
            }
            Operation::Unlink(path) => rustix::fs::unlink(at(path)).map(done).map_err(Into::into),
            Operation::Symlink(path) => std::os::unix::fs::symlink(TARGET, at(path)).map(done),
            Operation::Link(from, to) => fs::hard_link(at(from), at(to)).map(done),
            Operation::Rename(from, to, how) => {
                let flags = match how {
                    Rename::Replace => RenameFlags::empty(),
                    Rename::NoReplace => RenameFlags::NOREPLACE,
                    Rename::Exchange => RenameFlags::EXCHANGE,
                };
                rustix::fs::renameat_with(CWD, at(from), CWD, at(to), flags).map(done).map_err(Into::into)
            }
            Operation::List(path) => {
                let entries = fs::read_dir(at(path))?.collect::<io::Result<Vec<_>>>()?;
                let mut names: Vec<String> =
                    entries.into_iter().map(|entry| entry.file_name().into_string().unwrap()).collect();
                names.sort();
                Ok(Seen::Names(names))
            }
            Operation::Stat(path) => {
                let found = fs::symlink_metadata(at(path))?;
                let (kind, len) = match found.file_type() {
                    kind if kind.is_dir() => ('d', 0),
                    kind if kind.is_symlink() => ('l', found.len()),
                    _ => ('f', found.len()),
                };
                Ok(Seen::Attr(kind, len, found.nlink()))
            }
            Operation::Hold(path) => {
                let file = fs::File::open(at(path))?;
                if file.metadata()?.is_dir() {
                    return Err(io::Error::from_raw_os_error(libc::EISDIR));
                }
                self.held.push(file);
                Ok(Seen::Done)
            }
            Operation::Release if self.held.is_empty() => Ok(Seen::Done),
            Operation::Release => {
                let file = self.held.remove(0);
                let mut bytes = vec![0; file.metadata()?.len() as usize];
                file.read_exact_at(&mut bytes, 0).map(|()| Seen::Bytes(bytes))
            }
            Operation::Shrink => Ok(Seen::Done),
        }
    }
}

impl Subject for OfKernel {
    fn apply(&mut self, operation: &Operation) -> Outcome {
        self.try_apply(operation).map_err(|error| error.raw_os_error().expect("an error of the kernel"))
    }
}

fn path() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(&NAMES[..]), 1..4).prop_map(|names| format!("/{}", names.join("/")))
}

fn operation() -> impl Strategy<Value = Operation> {
    let how = prop::sample::select(vec![Rename::Replace, Rename::Replace, Rename::NoReplace, Rename::Exchange]);
    prop_oneof![
        4 => path().prop_map(Operation::Create),
        2 => (path(), 0..9000_u16, 0..9000_u16, any::<u8>()).prop_map(|(p, at, len, b)| Operation::Write(p, at, len, b)),
        1 => (path(), 0..9000_u16).prop_map(|(path, len)| Operation::Truncate(path, len)),
        2 => path().prop_map(Operation::Read),
        5 => path().prop_map(Operation::Mkdir),
        2 => path().prop_map(Operation::Rmdir),
        2 => path().prop_map(Operation::Unlink),
        1 => path().prop_map(Operation::Symlink),
        2 => (path(), path()).prop_map(|(from, to)| Operation::Link(from, to)),
        6 => (path(), path(), how).prop_map(|(from, to, how)| Operation::Rename(from, to, how)),
        2 => path().prop_map(Operation::List),
        2 => path().prop_map(Operation::Stat),
        1 => path().prop_map(Operation::Hold),
        1 => Just(Operation::Release),
        1 => Just(Operation::Shrink),
    ]
}

/// All paths that the operations use.
fn all_paths() -> Vec<String> {
    let extend = |paths: Vec<String>| -> Vec<String> {
        paths.iter().flat_map(|path| NAMES.iter().map(move |name| format!("{path}/{name}"))).collect()
    };
    let first = extend(vec![String::new()]);
    let second = extend(first.clone());
    let third = extend(second.clone());
    [first, second, third].concat()
}

/// Runs operations on a RAM file system and on a reference. Finally compares all paths, then removes all objects.
fn compare(operations: &[Operation], fs: RamFs, reference: &mut dyn Subject) {
    let mut ram = OfRam { fs, held: Vec::new() };
    for operation in operations {
        assert_eq!(ram.apply(operation), reference.apply(operation), "{operation:?}");
    }
    for path in all_paths() {
        for look in [Operation::Stat(path.clone()), Operation::Read(path.clone()), Operation::List(path.clone())] {
            assert_eq!(ram.apply(&look), reference.apply(&look), "{look:?} at the end");
        }
    }
    ram.held.clear();
    NAMES.iter().for_each(|name| {
        let path = format!("/{name}");
        let _ = ram.fs.remove_dir_all(&path);
        let _ = ram.fs.remove_file(&path);
    });
    let usage = ram.fs.usage();
    assert_eq!((usage.inodes, usage.bytes, usage.inodes_in_use), (1, 0, 1), "something was not freed");
}

fn new_ram_fs(negative: usize, hash_bits: u32) -> RamFs {
    let builder = RamFs::builder("operations").bytes(16 << 20).huge(false);
    builder.negative_dentries(negative).hash_bits(hash_bits).build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Against the reference in this process, with few and with many bits in the hashes of names, and with and without
    /// negative dentries.
    #[test]
    fn operations_agree_with_a_simple_reference(
        operations in prop::collection::vec(operation(), 1..120),
        negative in 0..4_usize,
        hash_bits in prop::sample::select(vec![4, 62]),
    ) {
        compare(&operations, new_ram_fs(negative, hash_bits), &mut Model::default());
    }

    /// Against a tmpfs. Skipped where `/dev/shm` is none.
    #[test]
    fn operations_agree_with_tmpfs(operations in prop::collection::vec(operation(), 1..120)) {
        let folder = Path::new("/dev/shm");
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        if !rustix::fs::statfs(folder).is_ok_and(|found| found.f_type as u64 == TMPFS_MAGIC) {
            println!("skipped: /dev/shm is no tmpfs");
            return Ok(());
        }
        let root = tempfile::tempdir_in(folder).unwrap();
        compare(&operations, new_ram_fs(0, 62), &mut OfKernel { root, held: Vec::new() });
    }
}
