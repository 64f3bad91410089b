//! Memory with stamped records, read word by word: a view of a cached file, a mapping of the kernel, or anonymous memory.
//! All kinds are read by the same instructions.

#![allow(unsafe_code)] // reads words of memory that other code may write

use std::ptr;

use pagemill_cache::View;
use pagemill_core::units::PageSize;

use super::{cached_file, for_all_blocks, memory_file};
use crate::files::mapping::{Access, Mapping};
use crate::native::Pages;
use crate::pattern::{self, RECORD_BYTES};
use crate::workload::{Failure, ensure};
use pagemill_cache::{PageCache, Source};

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A view of a file in a page cache.
    View,
    /// A kernel mapping of a file in memory, in the kernel's default pages.
    Memfd,
    /// Anonymous memory in huge pages.
    Anonymous,
}

/// The object that keeps the memory mapped.
enum Owner {
    View(View),
    Mapping(Mapping),
    Pages(Pages),
}

/// Readable memory whose records have the stamps of their offsets in the file.
///
/// # Invariants
///
/// `start` is the first of `len_bytes` readable bytes, a multiple of 8, and stays so as long as `owner` exists.
pub struct Memory {
    start: *const u64,
    len_bytes: usize,
    owner: Owner,
}

impl Memory {
    fn new(owner: Owner, len_bytes: usize) -> Self {
        let start = match &owner {
            Owner::View(view) => view.as_ptr(),
            Owner::Mapping(mapping) => ptr::with_exposed_provenance(mapping.address()),
            Owner::Pages(pages) => pages.address_at(0, len_bytes).cast_const(),
        };
        Self { start: start.cast(), len_bytes, owner }
    }

    /// Returns the word with index `index`. Makes a page resident if it is not.
    #[inline]
    pub fn word(&self, index: usize) -> u64 {
        assert!(index < self.len_bytes / size_of::<u64>());
        // SAFETY: the word lies in the memory (assertion above, type invariant).
        unsafe { self.start.add(index).read_volatile() }
    }

    /// Reads the first word of each record; returns how many are wrong.
    pub fn touch_records(&self) -> usize {
        let is_wrong = |offset: &usize| self.word(offset / size_of::<u64>()) != pattern::word_at(0, *offset as u64);
        (0..self.len_bytes).step_by(RECORD_BYTES).filter(is_wrong).count()
    }

    /// Compares every byte.
    pub fn check(&self) -> Result<(), Failure> {
        let is_wrong = |index: &usize| self.word(*index) != pattern::word_at(0, (index * size_of::<u64>()) as u64);
        match (0..self.len_bytes / size_of::<u64>()).find(is_wrong) {
            Some(index) => ensure(false, || format!("the word with index {index} is not what was written")),
            None => Ok(()),
        }
    }

    /// Returns the error of the latest access that failed, if the memory is a view.
    pub fn take_error(&self) -> Result<(), Failure> {
        match &self.owner {
            Owner::View(view) => view.take_error().map_or(Ok(()), |error| Err(error.into())),
            Owner::Mapping(_) | Owner::Pages(_) => Ok(()),
        }
    }
}

/// A file of which [`Memory`] can be made again and again.
pub enum Backing {
    Cached { file: pagemill_cache::Mapping, _cache: PageCache },
    Kernel(std::fs::File),
}

impl Backing {
    /// Makes a file of `len_bytes` bytes for views or kernel mappings.
    ///
    /// # Errors
    ///
    /// A message if the memory is not there, or for [`Kind::Anonymous`], which has no file.
    pub fn new(kind: Kind, page: Option<PageSize>, len_bytes: usize) -> Result<Self, Failure> {
        match kind {
            Kind::View => {
                let (cache, file) = cached_file(page, len_bytes, Source::Shared)?;
                Ok(Self::Cached { file, _cache: cache })
            }
            Kind::Memfd => Ok(Self::Kernel(memory_file(len_bytes)?)),
            Kind::Anonymous => Err("anonymous memory has no file".into()),
        }
    }

    /// Maps the file anew.
    pub fn map(&self, len_bytes: usize) -> Result<Memory, Failure> {
        let owner = match self {
            Self::Cached { file, .. } => Owner::View(file.view(0..len_bytes as u64)?),
            Self::Kernel(file) => Owner::Mapping(Mapping::new(file, len_bytes, Access::Read)?),
        };
        Ok(Memory::new(owner, len_bytes))
    }
}

/// Makes anonymous memory in huge pages, filled with stamped records.
pub fn anonymous(len_bytes: usize) -> Result<Memory, Failure> {
    let mut pages = Pages::huge(len_bytes)?;
    let bytes = pages.bytes_mut(len_bytes);
    for_all_blocks(len_bytes, |offset, records| {
        bytes[offset as usize..][..records.len()].copy_from_slice(records);
        Ok(())
    })?;
    Ok(Memory::new(Owner::Pages(pages), len_bytes))
}
