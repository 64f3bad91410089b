//! Building blocks of a page cache: plain memory, state words, and files of the kernel.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

use super::{Data, Record, first_word, for_all_records};
use crate::files::Place;
use crate::files::mapping::Shared;
use crate::native::{Counts, Pages};
use crate::pattern::RECORD_BYTES;
use crate::workload::Failure;

/// The pages in plain memory, in huge pages of the processor.
pub struct Memory {
    pages: Pages,
    len_bytes: usize,
}

impl Memory {
    pub fn new(pages: usize) -> Result<Self, Failure> {
        let len_bytes = pages * RECORD_BYTES;
        let mut memory = Self { pages: Pages::huge(len_bytes)?, len_bytes };
        let bytes = memory.pages.bytes_mut(len_bytes);
        for_all_records(pages, |offset, records| {
            bytes[offset..offset + records.len()].copy_from_slice(records);
            Ok(())
        })?;
        Ok(memory)
    }

    #[inline]
    fn page(&self, page: usize) -> &[u8] {
        &self.pages.bytes(self.len_bytes)[page * RECORD_BYTES..][..RECORD_BYTES]
    }
}

impl Data for Memory {
    const CAN_PIN: bool = false;

    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        to.copy_from_slice(self.page(page));
        true
    }

    fn pin(&self, _page: usize) -> u64 {
        0
    }
}

/// Plain memory with a state word for each page, as any cache needs one. There is no index and no lock.
pub struct Frames {
    words: Counts,
    memory: Memory,
}

impl Frames {
    pub fn new(pages: usize) -> Result<Self, Failure> {
        Ok(Self { words: Counts::new(pages)?, memory: Memory::new(pages)? })
    }
}

impl Data for Frames {
    const CAN_PIN: bool = true;

    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        let word = self.words.at(page);
        let seen = word.load(Acquire);
        to.copy_from_slice(self.memory.page(page));
        fence(Acquire);
        word.load(Relaxed) == seen
    }

    #[inline]
    fn pin(&self, page: usize) -> u64 {
        let word = self.words.at(page);
        word.fetch_add(1, Acquire);
        let found = first_word(self.memory.page(page));
        word.fetch_sub(1, Release);
        found
    }
}

/// Makes and fills the file of a subject.
fn file(pages: usize, place: &Place) -> Result<File, Failure> {
    place.check()?;
    let path = place.folder.join("data");
    let complain = |cause: std::io::Error| Failure::Other(format!("{}: {cause}", path.display()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(complain)?;
    for_all_records(pages, |offset, records| file.write_all_at(records, offset as u64).map_err(complain))?;
    Ok(file)
}

/// A file that is read through a mapping.
pub struct Mapped(Shared);

impl Mapped {
    pub fn new(pages: usize, place: &Place) -> Result<Self, Failure> {
        let mapping = Shared::new(&file(pages, place)?, pages * RECORD_BYTES);
        let mapping = mapping.map_err(|cause| format!("mapping a file: {cause}"))?;
        Ok(Self(mapping))
    }
}

impl Data for Mapped {
    const CAN_PIN: bool = false;

    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        self.0.read(page * RECORD_BYTES, to);
        true
    }

    fn pin(&self, _page: usize) -> u64 {
        0
    }
}

/// A file that is read by system calls.
pub struct OnFile(File);

impl OnFile {
    pub fn new(pages: usize, place: &Place) -> Result<Self, Failure> {
        file(pages, place).map(Self)
    }
}

impl Data for OnFile {
    const CAN_PIN: bool = false;

    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        self.0.read_exact_at(to, (page * RECORD_BYTES) as u64).is_ok()
    }

    fn pin(&self, _page: usize) -> u64 {
        0
    }
}
