//! A program that is killed at any moment: each byte that it synced is in the file.
//!
//! The program is this test again, with a file to write to. In each round it writes some ranges, syncs all or one of them, and
//! says so; the ranges follow from the round's number, so the parent knows what has to be there.

use pagemill::Pagemill;
use pagemill::mapping::Settings;
use pagemill::store::FileStore;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const KILLS: u64 = 200;
const FILE_BYTES: usize = 300_000;
const FILE: &str = "PAGEMILL_TEST_CRASH_FILE";
const SEED: &str = "PAGEMILL_TEST_CRASH_SEED";

/// Numbers that follow from others.
fn mixed(seed: u64, round: u64, at: u64) -> u64 {
    let mut word = (seed << 32 ^ round << 8 ^ at).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for shift in [30, 27, 31] {
        word = (word ^ word >> shift).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    }
    word
}

/// What a round writes, and whether it syncs only the last of them.
fn round_of(seed: u64, round: u64) -> (Vec<(Range<usize>, u8)>, bool) {
    let ranges = (0..4).map(|at| {
        let word = mixed(seed, round, at);
        let begin = (word % FILE_BYTES as u64) as usize;
        let len = [10, 4096, 30_000][(word >> 40) as usize % 3];
        (begin..(begin + len).min(FILE_BYTES), (word >> 50) as u8)
    });
    (ranges.collect(), mixed(seed, round, 9).is_multiple_of(4))
}

/// The program: until it is killed.
fn write_for_ever(path: &Path, seed: u64) -> ! {
    let cache = Pagemill::of_process().unwrap().caches.make(Settings::new("crash", 1 << 20)).unwrap();
    let file = cache.open(Arc::new(FileStore::create(path).unwrap())).unwrap();
    let mut out = std::io::stdout();
    for round in 0.. {
        let (ranges, is_partial) = round_of(seed, round);
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

/// Ends with the test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// For each byte of the file what may be there.
struct Expected(Vec<Vec<u8>>);

impl Expected {
    fn write(&mut self, range: &Range<usize>, byte: u8) {
        self.0[range.clone()].iter_mut().for_each(|may_be| may_be.push(byte));
    }

    /// Only the last of these may be.
    fn settle(&mut self, range: Range<usize>) {
        self.0[range].iter_mut().for_each(|may_be| drop(may_be.drain(..may_be.len() - 1)));
    }
}

/// Runs the program on the file, kills it after a while, looks at each byte. Returns how many rounds were synced.
fn kill_once(path: &Path, seed: u64) -> u64 {
    let mut expected = Expected(fs::read(path).unwrap().into_iter().map(|byte| vec![byte]).collect());
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "synced_bytes_survive_kills", "--nocapture"]);
    command.env(FILE, path).env(SEED, seed.to_string()).stdout(Stdio::piped());
    let mut program = Program(command.spawn().unwrap());
    let mut lines = BufReader::new(program.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let is_synced = |line: &String| line.contains("synced ");
    // Some rounds, then a part of one.
    let wanted = 1 + mixed(seed, 0, 100) % 2;
    let mut rounds = lines.by_ref().filter(is_synced).take(wanted as usize).count() as u64;
    std::thread::sleep(Duration::from_micros(mixed(seed, 0, 101) % 6000));
    drop(program);
    rounds += lines.filter(is_synced).count() as u64;
    for round in 0..rounds {
        let (ranges, is_partial) = round_of(seed, round);
        ranges.iter().for_each(|(range, byte)| expected.write(range, *byte));
        match ranges.last() {
            Some((range, _)) if is_partial => expected.settle(range.clone()),
            _ => expected.settle(0..FILE_BYTES),
        }
    }
    round_of(seed, rounds).0.iter().for_each(|(range, byte)| expected.write(range, *byte));
    let found = fs::read(path).unwrap();
    assert_eq!(found.len(), FILE_BYTES);
    for (at, (byte, may_be)) in found.iter().zip(&expected.0).enumerate() {
        assert!(
            may_be.contains(byte),
            "byte {at} is {byte}, not one of {may_be:?}, after {rounds} rounds of seed {seed}"
        );
    }
    rounds
}

#[test]
fn synced_bytes_survive_kills() {
    if let (Some(path), Ok(seed)) = (env::var_os(FILE), env::var(SEED)) {
        write_for_ever(Path::new(&path), seed.parse().unwrap());
    }
    let path = env::temp_dir().join(format!("pagemill-crash-{}", std::process::id()));
    fs::write(&path, vec![0; FILE_BYTES]).unwrap();
    let rounds: Vec<u64> = (0..KILLS).map(|seed| kill_once(&path, seed)).collect();
    fs::remove_file(&path).unwrap();
    // Each synced one at least, also though the one before was killed just now.
    assert!(rounds.iter().all(|rounds| *rounds > 0), "it was killed before it did anything: {rounds:?}");
}
