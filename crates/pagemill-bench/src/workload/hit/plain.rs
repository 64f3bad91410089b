//! Building blocks of a page cache: plain memory, state words, and files of the kernel.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

use super::{PageStore, Record, first_word, for_all_records};
use crate::files::FilePlace;
use crate::files::mapping::SharedMapping;
use crate::native::{Pages, SharedCounters};
use crate::pattern::RECORD_BYTES;
use crate::workload::Failure;

/// Plain memory for the pages, backed by huge pages of the processor.
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

impl PageStore for Memory {
    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        to.copy_from_slice(self.page(page));
        true
    }
}

/// Plain memory with a state word for each page. Every page cache needs such words; there is no index and no lock.
pub struct Frames {
    words: SharedCounters,
    memory: Memory,
}

impl Frames {
    pub fn new(pages: usize) -> Result<Self, Failure> {
        Ok(Self { words: SharedCounters::new(pages)?, memory: Memory::new(pages)? })
    }
}

impl PageStore for Frames {
    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        let word = self.words.counter(page);
        let seen = word.load(Acquire);
        to.copy_from_slice(self.memory.page(page));
        fence(Acquire);
        word.load(Relaxed) == seen
    }

    #[inline]
    fn pin(&self, page: usize) -> Option<u64> {
        let word = self.words.counter(page);
        word.fetch_add(1, Acquire);
        let found = first_word(self.memory.page(page));
        word.fetch_sub(1, Release);
        Some(found)
    }

    /// The index of a page's word is the page's number, so a pin is as cheap without a hint.
    #[inline]
    fn pin_hinted(&self, page: usize) -> Option<u64> {
        self.pin(page)
    }

    #[inline]
    fn read_hinted(&self, page: usize) -> Option<u64> {
        let word = self.words.counter(page);
        let seen = word.load(Acquire);
        let found = first_word(self.memory.page(page));
        fence(Acquire);
        (word.load(Relaxed) == seen).then_some(found)
    }
}

fn make_file(pages: usize, place: &FilePlace) -> Result<File, Failure> {
    place.check()?;
    let path = place.folder.join("data");
    let complain = |cause: std::io::Error| Failure::Other(format!("{}: {cause}", path.display()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(complain)?;
    for_all_records(pages, |offset, records| file.write_all_at(records, offset as u64).map_err(complain))?;
    Ok(file)
}

/// A file of the kernel that is read through a memory mapping.
pub struct Mapped(SharedMapping);

impl Mapped {
    pub fn new(pages: usize, place: &FilePlace) -> Result<Self, Failure> {
        let mapping = SharedMapping::new(&make_file(pages, place)?, pages * RECORD_BYTES);
        let mapping = mapping.map_err(|cause| format!("mapping a file: {cause}"))?;
        Ok(Self(mapping))
    }
}

impl PageStore for Mapped {
    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        self.0.read(page * RECORD_BYTES, to);
        true
    }
}

/// A file of the kernel that is read by system calls.
pub struct OnFile(File);

impl OnFile {
    pub fn new(pages: usize, place: &FilePlace) -> Result<Self, Failure> {
        make_file(pages, place).map(Self)
    }
}

impl PageStore for OnFile {
    #[inline]
    fn copy(&self, page: usize, to: &mut Record) -> bool {
        self.0.read_exact_at(to, (page * RECORD_BYTES) as u64).is_ok()
    }
}
