//! Memory for the copies that a search server makes: allocations of malloc, or chunks. After the search in a copy, the
//! contents of its chunk may be discarded until a later copy uses the chunk again.
//!
//! The chunk freed last is used first (LIFO), as in most allocators.

use pagemill_testbed::Testbed;
use pagemill_volatile::{Behaviour, Contents, VolatileBuf};

use super::Failure;
use crate::native::{Pages, WordAllocation};

/// The kind of memory that holds a copy, and how the memory is given up after the search in the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CopyMemory {
    /// An allocation of malloc, which is freed after the search.
    Malloc,
    /// A volatile range with a handle. After the search it is marked, so that it may be purged; a later copy unmarks
    /// and overwrites it.
    Handles,
    /// Anonymous pages, to which `MADV_FREE` is applied after the search.
    Free,
    /// Anonymous pages, to which `MADV_DONTNEED` is applied after the search.
    Dontneed,
}

/// The memory for the copies of one thread, including its unused chunks.
pub struct Copies {
    memory: CopyMemory,
    pagemill: Option<&'static Testbed>,
    chunk_bytes: usize,
    free_chunks: Vec<Chunk>,
    /// Number of chunks whose contents were purged before the chunk was used again.
    pub purged: u64,
}

enum Chunk {
    VolatileBuf(VolatileBuf),
    Pages(Pages),
}

/// A copy of words, stored in an allocation of malloc or in a chunk.
pub struct Copy {
    storage: CopyStorage,
    len_bytes: usize,
}

enum CopyStorage {
    WordAllocation(WordAllocation),
    Chunk(Chunk),
}

impl Copies {
    /// Creates the memory of one thread, without any chunk yet. Each later chunk has `chunk_bytes` bytes.
    pub fn new(memory: CopyMemory, chunk_bytes: usize) -> Result<Self, Failure> {
        let pagemill = match memory {
            CopyMemory::Handles => Some(Testbed::of_process()?),
            _ => None,
        };
        Ok(Self { memory, pagemill, chunk_bytes, free_chunks: Vec::new(), purged: 0 })
    }

    /// Copies `words`, which must fit into a chunk. Returns none if memory for the copy cannot be allocated.
    pub fn copy_of(&mut self, words: &[u64]) -> Option<Copy> {
        let len_bytes = size_of_val(words);
        if self.memory == CopyMemory::Malloc {
            return Some(Copy { storage: CopyStorage::WordAllocation(WordAllocation::copy_of(words)?), len_bytes });
        }
        let mut chunk = match self.free_chunks.pop() {
            Some(chunk) => self.prepare_for_reuse(chunk)?,
            None => self.new_chunk()?,
        };
        let (places, _) = chunk.bytes_mut(len_bytes)?.as_chunks_mut();
        places.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_ne_bytes());
        Some(Copy { storage: CopyStorage::Chunk(chunk), len_bytes })
    }

    fn new_chunk(&self) -> Option<Chunk> {
        match self.pagemill {
            Some(pagemill) => pagemill.ranges.allocate(self.chunk_bytes, Behaviour::Full).ok().map(Chunk::VolatileBuf),
            None => Pages::new(self.chunk_bytes).ok().map(Chunk::Pages),
        }
    }

    fn prepare_for_reuse(&mut self, chunk: Chunk) -> Option<Chunk> {
        if let Chunk::VolatileBuf(range) = &chunk {
            // The old contents do not matter, since the chunk is overwritten in any case.
            self.purged += u64::from(range.unmark().ok()? != Contents::Kept);
        }
        Some(chunk)
    }

    /// Frees the allocation of a copy. If the copy is in a chunk, allows the chunk's contents to be discarded until a
    /// later copy uses the chunk.
    ///
    /// # Errors
    ///
    /// A message if the chunk cannot be marked volatile, or if `madvise` fails.
    pub fn release(&mut self, copy: Copy) -> Result<(), String> {
        let CopyStorage::Chunk(mut chunk) = copy.storage else {
            return Ok(());
        };
        match (&mut chunk, self.memory) {
            (Chunk::VolatileBuf(range), _) => range.mark().map_err(|error| error.to_string())?,
            (Chunk::Pages(pages), CopyMemory::Free) => pages.advise_free(0, self.chunk_bytes)?,
            (Chunk::Pages(pages), _) => pages.discard(0, self.chunk_bytes)?,
        }
        self.free_chunks.push(chunk);
        Ok(())
    }
}

impl Chunk {
    fn bytes_mut(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        match self {
            Self::VolatileBuf(range) => range.bytes_mut().ok()?.get_mut(..len_bytes),
            Self::Pages(pages) => Some(pages.bytes_mut(len_bytes)),
        }
    }
}

impl Copy {
    /// Calls `read` with the words of a copy in a chunk, as arrays of eight bytes, and returns the result of `read`.
    /// Returns none for a copy in an allocation of malloc, or if the chunk cannot be pinned.
    fn with_words<T>(&self, read: impl FnOnce(&[[u8; 8]]) -> T) -> Option<T> {
        match &self.storage {
            CopyStorage::WordAllocation(_) => None,
            CopyStorage::Chunk(Chunk::VolatileBuf(range)) => {
                let pin = range.pin().ok()?;
                Some(read(pin.whole()?[..self.len_bytes].as_chunks().0))
            }
            CopyStorage::Chunk(Chunk::Pages(pages)) => Some(read(pages.bytes(self.len_bytes).as_chunks().0)),
        }
    }

    /// Returns the index of `key` among the copied words, which are in ascending order.
    pub fn find(&self, key: u64) -> Option<usize> {
        match &self.storage {
            CopyStorage::WordAllocation(piece) => piece.words().binary_search(&key).ok(),
            CopyStorage::Chunk(_) => {
                self.with_words(|words| words.binary_search_by_key(&key, |word| u64::from_ne_bytes(*word)).ok())?
            }
        }
    }

    pub fn sum(&self) -> Option<u64> {
        match &self.storage {
            CopyStorage::WordAllocation(piece) => Some(sum(piece.words().iter().copied())),
            CopyStorage::Chunk(_) => self.with_words(|words| sum(words.iter().map(|word| u64::from_ne_bytes(*word)))),
        }
    }
}

pub fn sum(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In every kind of memory, copies of several lengths must contain the words of their source. A copy must reuse the
    /// chunk that the previous copy has released.
    #[test]
    fn copies_equal_their_source() {
        let words: Vec<u64> = (0..8192).map(|word| word * 3).collect();
        for memory in [CopyMemory::Malloc, CopyMemory::Handles, CopyMemory::Free, CopyMemory::Dontneed] {
            let mut copies = Copies::new(memory, 2 * size_of_val(&*words)).expect("a Pagemill");
            for len in [words.len(), 100, words.len()] {
                let copy = copies.copy_of(&words[..len]).expect("64 KiB are there");
                assert_eq!((copy.find(3 * 99), copy.find(1)), (Some(99), None), "{memory:?}");
                assert_eq!(copy.sum(), Some(sum(words[..len].iter().copied())), "{memory:?}");
                copies.release(copy).expect("it can be given up");
            }
            assert!(copies.free_chunks.len() <= 1, "the chunk is used again");
        }
    }
}
