//! Random reads of 8 bytes of resident memory.

use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_core::units::PageSize;

use super::memory::{self, Backing, Kind, Memory};
use crate::pattern;
use crate::proc;
use crate::workload::{WorkloadResult, ensure};

/// Number of reads between two readings of the clock.
const BATCH_READS: usize = 4096;

crate::workload::arguments! {
    /// Arguments of a run that reads random words of memory.
    TouchWordsArguments:
    kind: Kind,
    /// Size of the cache's pages; without it, 4 KiB and huge folios
    page: Option<PageSize>,
    len_bytes: usize,
    run_ms: u64,
}

/// Checks every byte, which makes all pages resident, then reads random words. The resulting JSON has the time of a
/// read, and the fraction of the memory that the processor addresses by huge pages.
pub fn run(arguments: &TouchWordsArguments) -> WorkloadResult {
    let len_bytes = arguments.len_bytes;
    let backing = match arguments.kind {
        Kind::Anonymous => None,
        kind => Some(Backing::new(kind, arguments.page, len_bytes)?),
    };
    let memory = match &backing {
        Some(backing) => backing.map(len_bytes)?,
        None => memory::anonymous(len_bytes)?,
    };
    memory.check()?;
    let mut random = Rng::with_seed(7);
    let run = Duration::from_millis(arguments.run_ms);
    let (begun, mut wrong) = (Instant::now(), 0);
    while begun.elapsed() < run / 10 {
        wrong += read_random_words(&memory, len_bytes, &mut random);
    }
    let (begun, mut reads) = (Instant::now(), 0);
    while reads == 0 || begun.elapsed() < run {
        wrong += read_random_words(&memory, len_bytes, &mut random);
        reads += BATCH_READS;
    }
    let took = begun.elapsed();
    ensure(wrong == 0, || format!("{wrong} words are not what was written"))?;
    memory.take_error()?;
    // The pool of a cache is mapped a second time, so the sum may be twice the length.
    let huge = proc::own_huge_bytes().unwrap_or(0) as f64 / len_bytes as f64;
    Ok(serde_json::json!({ "touch_ns": took.as_nanos() as f64 / reads as f64, "huge_share": huge }))
}

/// Reads random words, and returns how many are wrong.
#[inline(never)]
fn read_random_words(memory: &Memory, len_bytes: usize, random: &mut Rng) -> usize {
    let words = len_bytes / size_of::<u64>();
    let mut wrong = 0;
    for _ in 0..BATCH_READS {
        let index = random.usize(..words);
        wrong += usize::from(memory.word(index) != pattern::word_at(0, (index * size_of::<u64>()) as u64));
    }
    wrong
}
