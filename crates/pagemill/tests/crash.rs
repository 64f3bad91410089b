//! Tests that all bytes that a program has synced are in the file, no matter when the program is killed.
//!
//! The program is a child process that runs this test again. In some rounds it first truncates or extends the file. In
//! each round it writes some ranges, syncs the whole file or one range, and reports the sync. The operations depend
//! only on a seed and the number of the round, so the parent knows the expected contents.

use pagemill_cache::mapping::PageCache;
use pagemill_store::FileStore;
use pagemill_testbed::Testbed;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Number of times that the program is killed.
const KILL_COUNT: u64 = 200;
/// Maximum length of the file.
const MAX_FILE_BYTES: usize = 300_000;
const FILE_ENV: &str = "PAGEMILL_TEST_CRASH_FILE";
const SEED_ENV: &str = "PAGEMILL_TEST_CRASH_SEED";

/// Returns a pseudo-random number that depends only on a seed, a round and an index.
fn random_number(seed: u64, round: u64, at: u64) -> u64 {
    let mut word = (seed << 32 ^ round << 8 ^ at).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for shift in [30, 27, 31] {
        word = (word ^ word >> shift).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    }
    word
}

/// The operations that the program makes in one round.
struct Round {
    /// New length of the file in bytes, which is set before the writes of the round. `None`: the length stays.
    size: Option<usize>,
    ranges: Vec<(Range<usize>, u8)>,
    /// Whether the round syncs only the range that it wrote last.
    is_partial: bool,
}

impl Round {
    fn of(seed: u64, round: u64) -> Self {
        let ranges = (0..4).map(|at| {
            let word = random_number(seed, round, at);
            let begin = (word % MAX_FILE_BYTES as u64) as usize;
            let len = [10, 4096, 30_000][(word >> 40) as usize % 3];
            (begin..(begin + len).min(MAX_FILE_BYTES), (word >> 50) as u8)
        });
        let word = random_number(seed, round, 10);
        Self {
            size: word.is_multiple_of(3).then_some((word >> 8) as usize % MAX_FILE_BYTES),
            ranges: ranges.collect(),
            is_partial: random_number(seed, round, 9).is_multiple_of(4),
        }
    }
}

/// Runs rounds on the file until this process is killed.
fn run_rounds_until_killed(path: &Path, seed: u64) -> ! {
    let cache = PageCache::builder("crash").limit(1 << 20).build_in(Testbed::of_process().unwrap().caches).unwrap();
    let file = cache.open(Arc::new(FileStore::create(path).unwrap())).unwrap();
    let mut out = std::io::stdout();
    for round in 0.. {
        let Round { size, ranges, is_partial } = Round::of(seed, round);
        if let Some(size) = size {
            file.truncate(size as u64).unwrap();
        }
        for (range, byte) in &ranges {
            assert_eq!(file.write_at(&vec![*byte; range.len()], range.start as u64).unwrap(), range.len());
        }
        match ranges.last() {
            Some((range, _)) if is_partial => file.sync_range(range.start as u64, range.len() as u64).unwrap(),
            _ => file.sync().unwrap(),
        }
        writeln!(out, "synced {round}").unwrap();
        out.flush().unwrap();
    }
    unreachable!("rounds have no end")
}

/// The child process that runs the program. Dropping the value kills the process.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The expected file: the allowed values of each byte, the current length, and the allowed lengths. Bytes beyond the
/// end of the file have the value 0.
struct ExpectedFile {
    bytes: Vec<Vec<u8>>,
    size: usize,
    sizes: Range<usize>,
}

impl ExpectedFile {
    fn new(bytes: Vec<u8>) -> Self {
        let size = bytes.len();
        let padded = bytes.into_iter().chain(std::iter::repeat(0)).take(MAX_FILE_BYTES);
        Self { bytes: padded.map(|byte| vec![byte]).collect(), size, sizes: size..size }
    }

    fn set_size(&mut self, size: usize) {
        self.size = size;
        self.sizes = self.sizes.start.min(size)..self.sizes.end.max(size);
    }

    fn begin(&mut self, round: &Round) {
        if let Some(size) = round.size {
            self.set_size(size);
            self.write(&(size..MAX_FILE_BYTES), 0);
        }
        for (range, byte) in &round.ranges {
            self.set_size(self.size.max(range.end));
            self.write(range, *byte);
        }
    }

    fn write(&mut self, range: &Range<usize>, byte: u8) {
        self.bytes[range.clone()].iter_mut().for_each(|values| values.push(byte));
    }

    fn end(&mut self, round: &Round) {
        self.sizes = self.size..self.size;
        match round.ranges.last() {
            Some((range, _)) if round.is_partial => self.keep_latest_value(range.clone()),
            _ => self.keep_latest_value(0..MAX_FILE_BYTES),
        }
    }

    /// Removes all allowed values of each byte in `range` except the latest value.
    fn keep_latest_value(&mut self, range: Range<usize>) {
        self.bytes[range].iter_mut().for_each(|values| drop(values.drain(..values.len() - 1)));
    }
}

/// Runs the program on the file, kills it after some time, and checks each byte of the file. Returns the number of
/// rounds whose sync the program reported.
fn kill_once(path: &Path, seed: u64) -> u64 {
    let mut expected = ExpectedFile::new(fs::read(path).unwrap());
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "synced_bytes_survive_kills", "--nocapture"]);
    command.env(FILE_ENV, path).env(SEED_ENV, seed.to_string()).stdout(Stdio::piped());
    let mut program = KilledChild(command.spawn().unwrap());
    let mut lines = BufReader::new(program.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let is_synced = |line: &String| line.contains("synced ");
    // Waits for one or two rounds, and then for some part of another round.
    let wanted = 1 + random_number(seed, 0, 100) % 2;
    let mut rounds = lines.by_ref().filter(is_synced).take(wanted as usize).count() as u64;
    std::thread::sleep(Duration::from_micros(random_number(seed, 0, 101) % 6000));
    drop(program);
    rounds += lines.filter(is_synced).count() as u64;
    for round in (0..rounds).map(|round| Round::of(seed, round)) {
        expected.begin(&round);
        expected.end(&round);
    }
    expected.begin(&Round::of(seed, rounds));
    let found = fs::read(path).unwrap();
    let ExpectedFile { bytes, sizes, .. } = expected;
    let (least, most) = (sizes.start, sizes.end);
    assert!(
        (least..=most).contains(&found.len()),
        "{} bytes, not {sizes:?}: {rounds} rounds, seed {seed}",
        found.len()
    );
    for (at, values) in bytes.iter().enumerate() {
        let byte = found.get(at).unwrap_or(&0);
        assert!(
            values.contains(byte),
            "byte {at} is {byte}, not one of {values:?}, after {rounds} rounds of seed {seed}"
        );
    }
    rounds
}

/// A program is killed many times. After each kill, every byte of the file must have its last synced value or a later
/// one.
#[test]
fn synced_bytes_survive_kills() {
    if let (Some(path), Ok(seed)) = (env::var_os(FILE_ENV), env::var(SEED_ENV)) {
        run_rounds_until_killed(Path::new(&path), seed.parse().unwrap());
    }
    let path = env::temp_dir().join(format!("pagemill-crash-{}", std::process::id()));
    fs::write(&path, vec![0; MAX_FILE_BYTES]).unwrap();
    let rounds: Vec<u64> = (0..KILL_COUNT).map(|seed| kill_once(&path, seed)).collect();
    fs::remove_file(&path).unwrap();
    // Each child process must have synced at least one round, although the previous child was killed just before.
    assert!(rounds.iter().all(|rounds| *rounds > 0), "it was killed before it did anything: {rounds:?}");
}
