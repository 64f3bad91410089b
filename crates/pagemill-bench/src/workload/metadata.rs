//! Many small files, each of which is created, checked by stat, read, found and removed.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Failure, WorkloadResult, ensure};
use crate::files::FilePlace;
use crate::pattern;

const FILE_BYTES: usize = 100;
/// Number of stat calls for each file. It is more than one, because stat is faster than creation.
const STAT_REPEATS: usize = 4;
/// Number of times that each file is read.
const READ_REPEATS: usize = 2;
/// Number of times that the whole directory tree is searched.
const FIND_REPEATS: usize = 4;

crate::workload::arguments! {
    MetadataArguments:
    files: usize,
    /// Number of files in each directory
    per_directory: usize,
    /// Mark the directory so that its files never get huge pages
    huge_never: bool,
    ..place: FilePlace,
}

/// Runs all operations. The JSON line has the operations per second of each kind, and the time of a close in
/// nanoseconds.
pub fn run(arguments: &MetadataArguments) -> WorkloadResult {
    let root = arguments.place.folder.join("tree");
    let paths = make_directories(arguments, &root)?;
    arguments.place.check()?;
    // The first creation and removal of all files are not measured, since the creation touches memory that the host of
    // a virtual machine has not backed yet.
    operations_per_second(1, &paths, create)?;
    operations_per_second(1, &paths, unlink)?;
    let create = operations_per_second(1, &paths, create)?;
    let close = time_of_close(&paths)?;
    let stat = operations_per_second(STAT_REPEATS, &paths, stat)?;
    let read = operations_per_second(READ_REPEATS, &paths, read)?;
    let begun = Instant::now();
    for _ in 0..FIND_REPEATS {
        find(&root, paths.len())?;
    }
    let find = (paths.len() * FIND_REPEATS) as f64 / begun.elapsed().as_secs_f64();
    let unlink = operations_per_second(1, &paths, unlink)?;
    arguments.place.check()?;
    fs::remove_dir_all(&root).map_err(|cause| failed_at(&root, &cause))?;
    let measured = serde_json::json!({
        "create": create, "close": close, "stat": stat, "read": read, "find": find, "unlink": unlink
    });
    Ok(measured)
}

/// Makes the directories and returns the paths of the files to create.
fn make_directories(arguments: &MetadataArguments, root: &Path) -> Result<Vec<PathBuf>, Failure> {
    fs::create_dir_all(root).map_err(|cause| failed_at(root, &cause))?;
    if arguments.huge_never {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(root, "user.pagemill.huge", b"never", flags)
            .map_err(|errno| failed_at(root, &errno.into()))?;
    }
    let mut paths = Vec::with_capacity(arguments.files);
    for index in 0..arguments.files {
        let directory = root.join(format!("d{}", index / arguments.per_directory));
        if index % arguments.per_directory == 0 {
            fs::create_dir_all(&directory).map_err(|cause| failed_at(&directory, &cause))?;
        }
        paths.push(directory.join(format!("f{index}")));
    }
    Ok(paths)
}

fn failed_at(path: &Path, cause: &io::Error) -> Failure {
    Failure::Other(format!("{}: {cause}", path.display()))
}

/// Applies `operation` to all files, and repeats that `times` times. Returns the operations per second.
fn operations_per_second(
    times: usize,
    paths: &[PathBuf],
    mut operation: impl FnMut(usize, &PathBuf) -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let begun = Instant::now();
    for _ in 0..times {
        for (index, path) in paths.iter().enumerate() {
            operation(index, path)?;
        }
    }
    Ok((times * paths.len()) as f64 / begun.elapsed().as_secs_f64())
}

fn content(index: usize) -> [u8; FILE_BYTES] {
    let mut bytes = [0x5a; FILE_BYTES];
    pattern::stamp(&mut bytes, index as u64, 0, 1);
    bytes
}

fn create(index: usize, path: &PathBuf) -> Result<(), Failure> {
    let write = || File::create_new(path)?.write_all(&content(index));
    write().map_err(|cause| failed_at(path, &cause))
}

/// Writes each file again. Returns the mean time of `close` in nanoseconds.
fn time_of_close(paths: &[PathBuf]) -> Result<f64, Failure> {
    let mut took = Duration::ZERO;
    for (index, path) in paths.iter().enumerate() {
        let write = || {
            let mut file = File::options().write(true).open(path)?;
            file.write_all(&content(index)).map(|()| file)
        };
        let file = write().map_err(|cause| failed_at(path, &cause))?;
        let begun = Instant::now();
        drop(file);
        took += begun.elapsed();
    }
    Ok(took.as_nanos() as f64 / paths.len().max(1) as f64)
}

fn stat(_: usize, path: &PathBuf) -> Result<(), Failure> {
    match fs::metadata(path) {
        Ok(found) if found.len() == FILE_BYTES as u64 => Ok(()),
        Ok(found) => Err(Failure::WrongAnswer(format!("{} has {} bytes", path.display(), found.len()))),
        Err(cause) => Err(failed_at(path, &cause)),
    }
}

fn read(index: usize, path: &PathBuf) -> Result<(), Failure> {
    let mut bytes = [0; FILE_BYTES + 1];
    let len = File::open(path).and_then(|mut file| file.read(&mut bytes)).map_err(|cause| failed_at(path, &cause))?;
    ensure(bytes[..len] == content(index), || format!("{} has another content", path.display()))
}

fn unlink(_: usize, path: &PathBuf) -> Result<(), Failure> {
    fs::remove_file(path).map_err(|cause| failed_at(path, &cause))
}

/// Runs the program `find`, which must list each file. If `find` is not installed, walks the tree in this process
/// instead.
fn find(root: &Path, files: usize) -> Result<(), Failure> {
    let mut command = Command::new("find");
    command.arg(root).args(["-type", "f"]).stdin(Stdio::null());
    let seen = match command.output() {
        Ok(output) if output.status.success() => output.stdout.iter().filter(|&&byte| byte == b'\n').count(),
        Ok(output) => return Err(format!("find: {}", String::from_utf8_lossy(&output.stderr).trim()).into()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            count_files(root).map_err(|cause| failed_at(root, &cause))?
        }
        Err(cause) => return Err(format!("find: {cause}").into()),
    };
    ensure(seen == files, || format!("find saw {seen} of {files} files"))
}

/// Counts the files below a directory.
fn count_files(directory: &Path) -> io::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        count += if entry.file_type()?.is_dir() { count_files(&entry.path())? } else { 1 };
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program `find`, and a walk of the tree in this process, must find all files. A file with other contents and
    /// a missing file must each be reported as a wrong answer.
    #[test]
    fn files_are_made_and_found() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let place = FilePlace { folder: folder.path().to_owned(), device: 0 };
        let paths = make_directories(
            &MetadataArguments { place, files: 25, per_directory: 10, huge_never: false },
            folder.path(),
        )
        .expect("laid out");
        operations_per_second(1, &paths, create).expect("they are made");

        assert_eq!(count_files(folder.path()).expect("a count_files"), 25);
        assert!(time_of_close(&paths).expect("each is written again") > 0.0);
        assert!(
            find(folder.path(), 25).is_ok()
                && operations_per_second(2, &paths, stat).is_ok()
                && operations_per_second(2, &paths, read).is_ok()
        );
        fs::write(&paths[3], "short").expect("it is written");
        assert!(matches!(stat(3, &paths[3]), Err(Failure::WrongAnswer(_))));
        assert!(matches!(read(3, &paths[3]), Err(Failure::WrongAnswer(_))));
        assert!(matches!(find(folder.path(), 26), Err(Failure::WrongAnswer(_))));
    }
}
