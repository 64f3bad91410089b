//! Files of one kind are written and closed. Measures the memory that they use on the file system, at once and a second
//! later.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::WorkloadResult;
use crate::files::FilePlace;
use crate::files::mapping::{Access, Mapping};
use crate::files::mount::used_bytes;
use crate::pattern::{self, RECORD_BYTES};
use crate::proc;
use crate::stats::mib;

/// Time between the last close of a file and the second measurement of memory.
const SECOND_MEASUREMENT_DELAY: Duration = Duration::from_secs(1);

crate::workload::arguments! {
    /// Arguments of a run that writes files: their number, their length, and how they are written.
    WasteArguments:
    files: usize,
    /// Length of each file in bytes
    bytes: usize,
    /// Bytes that each write appends to the file; with 0, only one byte in the middle of the file is written
    step: usize,
    ..place: FilePlace,
}

/// Writes the files. The resulting JSON has the MiB that they use on the file system, at once and a second later. For
/// files that are written in steps, it also has the fraction of the first file that is mapped by huge pages.
pub fn run(arguments: &WasteArguments) -> WorkloadResult {
    let folder = &arguments.place.folder;
    arguments.place.check()?;
    let before = used_bytes(folder)?;
    let used = || used_bytes(folder).map(|used| used.saturating_sub(before));
    for index in 0..arguments.files {
        let path = folder.join(format!("file-{index}"));
        write(&path, index as u64, arguments).map_err(|cause| format!("{}: {cause}", path.display()))?;
    }
    let closed = Instant::now();
    let at_once = used()?;
    thread::sleep(SECOND_MEASUREMENT_DELAY.saturating_sub(closed.elapsed()));
    let later = used()?;
    let share = match arguments.step {
        0 => None,
        _ => huge_fraction(&folder.join("file-0"), arguments.bytes)?,
    };
    arguments.place.check()?;
    Ok(serde_json::json!({ "used_at_once": mib(at_once), "used_after_second": mib(later), "huge_share": share }))
}

fn write(path: &Path, index: u64, arguments: &WasteArguments) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    if arguments.step == 0 {
        file.set_len(arguments.bytes as u64)?;
        return file.write_all_at(&[1], arguments.bytes as u64 / 2);
    }
    let mut piece = vec![0x5a; arguments.step];
    for offset in (0..arguments.bytes).step_by(arguments.step) {
        let len = arguments.step.min(arguments.bytes - offset);
        piece[..len].chunks_mut(RECORD_BYTES).zip((offset..).step_by(RECORD_BYTES)).for_each(|(record, place)| {
            if record.len() >= size_of::<u64>() {
                pattern::stamp(record, index, place as u64, 1);
            }
        });
        file.write_all(&piece[..len])?;
    }
    Ok(())
}

/// Maps the file, reads all pages, and returns the fraction that the kernel maps by huge pages.
fn huge_fraction(path: &Path, len_bytes: usize) -> io::Result<Option<f64>> {
    let mapping = Mapping::new(&File::open(path)?, len_bytes, Access::Read)?;
    mapping.touch();
    Ok(proc::huge_mapped_bytes_at(mapping.address()).map(|huge| huge as f64 / len_bytes as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every size of the writes, a file must have its full length. A file written as a hole must have a single
    /// nonzero byte.
    #[test]
    fn files_have_their_length() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let place = FilePlace { folder: folder.path().to_owned(), device: 0 };
        for (step, bytes) in [(1000, 1000), (4096, 10_000), (0, 10_000)] {
            let path = folder.path().join(step.to_string());
            write(&path, 0, &WasteArguments { place: place.clone(), files: 1, bytes, step }).expect("it is written");
            let content = std::fs::read(&path).expect("it is read");
            assert_eq!(content.len(), bytes);
            assert_eq!(content.iter().filter(|byte| **byte != 0).count() == 1, step == 0);
        }
        assert!(huge_fraction(&folder.path().join("4096"), 10_000).expect("it is mapped").is_some());
    }
}
