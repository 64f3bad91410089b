//! Where the copies of a search server's records are: in blocks of malloc, or in chunks that are kept for the next record
//! and given up meanwhile.
//!
//! Who keeps chunks takes the one that was left last, as allocators do.

use pagemill::Pagemill;
use pagemill::volatile::{Behaviour, Contents, Range};

use super::Failure;
use crate::native::{Pages, Piece};

/// What a copy is in, and what becomes of it after its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Memory {
    /// A block of malloc, freed.
    Malloc,
    /// A volatile handle: marked, and unmarked for the next record.
    Handles,
    /// Pages: `MADV_FREE`.
    Free,
    /// Pages: `MADV_DONTNEED`.
    Dontneed,
}

/// The chunks of one thread that no record has just now.
pub struct Copies {
    memory: Memory,
    pagemill: Option<&'static Pagemill>,
    chunk_bytes: usize,
    kept: Vec<Chunk>,
    /// Chunks that had lost bytes when they were taken.
    pub purged: u64,
}

enum Chunk {
    Range(Range),
    Pages(Pages),
}

/// A copy of some words.
pub struct Copy {
    home: Home,
    len_bytes: usize,
}

enum Home {
    Piece(Piece),
    Chunk(Chunk),
}

impl Copies {
    /// No chunks yet; each will have room for `chunk_bytes`.
    pub fn new(memory: Memory, chunk_bytes: usize) -> Result<Self, Failure> {
        let pagemill = match memory {
            Memory::Handles => Some(Pagemill::of_process().map_err(|error| error.to_string())?),
            _ => None,
        };
        Ok(Self { memory, pagemill, chunk_bytes, kept: Vec::new(), purged: 0 })
    }

    /// Copies `words`, as many as a chunk has room for at the most; none where there is no memory.
    pub fn copy_of(&mut self, words: &[u64]) -> Option<Copy> {
        let len_bytes = size_of_val(words);
        if self.memory == Memory::Malloc {
            return Some(Copy { home: Home::Piece(Piece::copy_of(words)?), len_bytes });
        }
        let mut chunk = match self.kept.pop() {
            Some(chunk) => self.taken_back(chunk)?,
            None => self.new_chunk()?,
        };
        let (places, _) = chunk.bytes_mut(len_bytes)?.as_chunks_mut();
        places.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_ne_bytes());
        Some(Copy { home: Home::Chunk(chunk), len_bytes })
    }

    fn new_chunk(&self) -> Option<Chunk> {
        match self.pagemill {
            Some(pagemill) => pagemill.ranges.allocate(self.chunk_bytes, Behaviour::Full).ok().map(Chunk::Range),
            None => Pages::new(self.chunk_bytes).ok().map(Chunk::Pages),
        }
    }

    fn taken_back(&mut self, chunk: Chunk) -> Option<Chunk> {
        if let Chunk::Range(range) = &chunk {
            // What it held means nothing any more: it is written anew, purged or not.
            self.purged += u64::from(range.unmark().ok()? != Contents::Kept);
        }
        Some(chunk)
    }

    /// Ends a record's use of its copy.
    ///
    /// # Errors
    ///
    /// A sentence, where the chunk cannot be given up.
    pub fn leave(&mut self, copy: Copy) -> Result<(), String> {
        let Home::Chunk(mut chunk) = copy.home else {
            return Ok(());
        };
        match (&mut chunk, self.memory) {
            (Chunk::Range(range), _) => range.mark().map_err(|error| error.to_string())?,
            (Chunk::Pages(pages), Memory::Free) => pages.offer(0, self.chunk_bytes)?,
            (Chunk::Pages(pages), _) => pages.discard(0, self.chunk_bytes)?,
        }
        self.kept.push(chunk);
        Ok(())
    }
}

impl Chunk {
    fn bytes_mut(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        match self {
            Self::Range(range) => range.bytes_mut().ok()?.get_mut(..len_bytes),
            Self::Pages(pages) => Some(pages.bytes_mut(len_bytes)),
        }
    }
}

impl Copy {
    /// Lets `look` see the words as eight bytes each; nothing where they cannot be had.
    fn see<T>(&self, look: impl FnOnce(&[[u8; 8]]) -> T) -> Option<T> {
        match &self.home {
            Home::Piece(_) => None,
            Home::Chunk(Chunk::Range(range)) => {
                let pin = range.pin().ok()?;
                Some(look(pin.whole()?[..self.len_bytes].as_chunks().0))
            }
            Home::Chunk(Chunk::Pages(pages)) => Some(look(pages.bytes(self.len_bytes).as_chunks().0)),
        }
    }

    /// Where the key is among ascending ones.
    pub fn find(&self, key: u64) -> Option<usize> {
        match &self.home {
            Home::Piece(piece) => piece.words().binary_search(&key).ok(),
            Home::Chunk(_) => {
                self.see(|words| words.binary_search_by_key(&key, |word| u64::from_ne_bytes(*word)).ok())?
            }
        }
    }

    /// The sum of the words.
    pub fn sum(&self) -> Option<u64> {
        match &self.home {
            Home::Piece(piece) => Some(sum(piece.words().iter().copied())),
            Home::Chunk(_) => self.see(|words| sum(words.iter().map(|word| u64::from_ne_bytes(*word)))),
        }
    }
}

/// The sum of words, over the end.
pub fn sum(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In every memory a copy holds its words, chunk after chunk.
    #[test]
    fn copies_hold_their_words() {
        let words: Vec<u64> = (0..8192).map(|word| word * 3).collect();
        for memory in [Memory::Malloc, Memory::Handles, Memory::Free, Memory::Dontneed] {
            let mut copies = Copies::new(memory, 2 * size_of_val(&*words)).expect("a Pagemill");
            for len in [words.len(), 100, words.len()] {
                let copy = copies.copy_of(&words[..len]).expect("64 KiB are there");
                assert_eq!((copy.find(3 * 99), copy.find(1)), (Some(99), None), "{memory:?}");
                assert_eq!(copy.sum(), Some(sum(words[..len].iter().copied())), "{memory:?}");
                copies.leave(copy).expect("it can be given up");
            }
            assert!(copies.kept.len() <= 1, "the chunk is used again");
        }
    }
}
