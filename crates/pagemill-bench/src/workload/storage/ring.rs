//! A bare io_uring: the rings of `pagemill-store` with buffers of the workload, without a cache. Its speed is the upper
//! bound for a cache that uses an io_uring.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_store::ring::{Event, FileId, Settings};
use pagemill_store::{Aligned, FileStore, Ring as StoreRing, Store};
use serde_json::Value;

use super::buffers::{self, PageKind, TransferBuffer};
use super::{IntervalStart, Source};
use crate::histogram::Histogram;
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::workload::{Failure, WorkloadResult, ensure};

/// Time limit of a transfer between the file and memory. It is longer than any device needs.
const TRANSFER_TIME_LIMIT: Duration = Duration::from_secs(20);

/// Maximum number of written offsets whose data is read back and checked.
const READ_BACK_COUNT: usize = 32;

crate::workload::arguments! {
    /// Arguments of a run that keeps `depth` transfers of one length in flight in an io_uring.
    RingArguments:
    io_bytes: usize,
    depth: usize,
    /// Number of transfers that are submitted together; with a smaller number the device starts earlier
    #[arg(default_value_t = 1)]
    batch: usize,
    memory: PageKind,
    /// Register the buffers with the kernel beforehand
    registered: bool,
    /// Use random offsets instead of sequential ones
    random: bool,
    /// Write instead of read; the file's content is lost
    write: bool,
    run_ms: u64,
    ..source: Source,
}

/// An endless sequence of offsets in a file, sequential or random.
pub struct Offsets {
    random: Option<Rng>,
    count: usize,
    next: usize,
    io_bytes: usize,
}

impl Offsets {
    pub fn new(len_bytes: u64, io_bytes: usize, is_random: bool) -> Self {
        let count = len_bytes as usize / io_bytes;
        Self { random: is_random.then(|| Rng::with_seed(1)), count, next: 0, io_bytes }
    }

    pub fn draw(&mut self) -> u64 {
        let at = match &mut self.random {
            Some(random) => random.usize(..self.count),
            None => {
                self.next = (self.next + 1) % self.count;
                self.next
            }
        };
        (at * self.io_bytes) as u64
    }
}

impl Iterator for Offsets {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        Some(self.draw())
    }
}

impl RingArguments {
    /// Returns arguments for random reads into registered buffers.
    pub fn random_reads(source: &Source, io_bytes: usize, depth: usize) -> Self {
        let (memory, source) = (PageKind::Huge, source.clone());
        Self { source, io_bytes, depth, batch: 4, memory, registered: true, random: true, write: false, run_ms: 0 }
    }

    /// Returns arguments for writes from registered buffers.
    pub fn writes(source: &Source, io_bytes: usize, depth: usize) -> Self {
        Self { random: false, write: true, ..Self::random_reads(source, io_bytes, depth) }
    }

    /// Returns an endless sequence of offsets for the transfers.
    pub fn offsets(&self) -> Offsets {
        Offsets::new(self.source.len_bytes, self.io_bytes, self.random)
    }
}

/// An io_uring with transfers in flight, and the latencies of the completed ones.
pub struct TransferLoop<'a> {
    arguments: &'a RingArguments,
    ring: StoreRing<TransferBuffer>,
    store: FileStore,
    file: FileId,
    offsets: Box<dyn Iterator<Item = u64> + 'a>,
    idle: Vec<TransferBuffer>,
    pub times: Histogram,
    /// Generation number in the stamps that are written. It distinguishes the writes of this process from those of
    /// other processes.
    generation: u64,
    /// Some of the offsets that were written; the data there is read back at the end.
    written: BTreeSet<u64>,
}

impl<'a> TransferLoop<'a> {
    /// Opens the file, and makes an io_uring and its buffers. The transfers use the given offsets.
    pub fn new(arguments: &'a RingArguments, offsets: impl Iterator<Item = u64> + 'a) -> Result<Self, Failure> {
        let source = &arguments.source;
        let store = if arguments.write { source.open_writable()? } else { source.open_read_only()? };
        let settings = Settings { depth: arguments.depth as u32, ..Settings::default() };
        let mut ring = StoreRing::new(&settings)?;
        let file = ring.attach(&store)?;
        let (memories, mut idle) = buffers::make_buffers(arguments.memory, arguments.depth, arguments.io_bytes)?;
        if arguments.write {
            let mut records = Records::filled(arguments.io_bytes);
            idle.iter_mut().for_each(|part| part.bytes_mut().copy_from_slice(records.stamped_at(0, 0)));
        }
        if arguments.registered {
            for memory in memories {
                ring.register(Box::new(memory)).map_err(|(error, _)| format!("registering memory: {error}"))?;
            }
        }
        let offsets = Box::new(offsets);
        let (times, written) = (Histogram::new(), BTreeSet::new());
        let generation = u64::from(std::process::id());
        Ok(Self { arguments, ring, store, file, offsets, idle, times, generation, written })
    }

    /// Starts a transfer for each idle buffer, waits for a completion, and handles all completions.
    pub fn step(&mut self) -> Result<(), Failure> {
        self.start_transfers()?;
        self.handle_completions()
    }

    /// Waits until all transfers in flight have completed.
    pub fn drain(&mut self) -> Result<(), Failure> {
        while self.ring.in_flight() > 0 {
            self.handle_completions()?;
        }
        Ok(())
    }

    /// Starts transfers until no offsets are left, and waits until all transfers have completed.
    pub fn run_to_end(&mut self) -> Result<(), Failure> {
        loop {
            self.start_transfers()?;
            if self.ring.in_flight() == 0 {
                return Ok(());
            }
            self.handle_completions()?;
        }
    }

    pub fn sync(&self) -> Result<(), Failure> {
        self.store.sync().map_err(|error| error.to_string().into())
    }

    fn start_transfers(&mut self) -> Result<(), Failure> {
        let mut started = 0;
        while let Some(mut part) = self.idle.pop() {
            let Some(offset) = self.offsets.next() else {
                self.idle.push(part);
                break;
            };
            part.offset = offset;
            if self.arguments.write {
                let (offset, generation) = (part.offset, self.generation);
                stamp_ends(part.bytes_mut(), offset, generation);
            }
            part.began = Instant::now();
            let (file, offset) = (self.file, part.offset);
            let begun = match self.arguments.write {
                true => self.ring.write(file, offset, part),
                false => self.ring.read(file, offset, part),
            };
            begun.map_err(|_| "the ring is full".to_owned())?;
            started += 1;
            if started % self.arguments.batch == 0 {
                self.ring.submit()?;
            }
        }
        Ok(())
    }

    fn handle_completions(&mut self) -> Result<(), Failure> {
        self.ring.wait(1, TRANSFER_TIME_LIMIT)?;
        while let Some(event) = self.ring.next() {
            let Event::Done { buffer: part, result, .. } = event else {
                return Err("a transfer is late".into());
            };
            result.map_err(|error| format!("at {}: {error}", part.offset))?;
            self.times.add(part.began.elapsed());
            if self.arguments.write {
                if self.written.len() < READ_BACK_COUNT {
                    self.written.insert(part.offset);
                }
            } else {
                let is_right = self.arguments.source.has_right_ends(part.bytes(), part.offset);
                ensure(is_right, || format!("what was read at {} is something else", part.offset))?;
            }
            self.idle.push(part);
        }
        Ok(())
    }

    fn run_for(&mut self, time: Duration) -> Result<(), Failure> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.step()?;
        }
        Ok(())
    }

    /// Reads the data at some of the written offsets, and compares the first and the last stamp of each transfer.
    fn read_back(&self) -> Result<(), Failure> {
        let io_bytes = self.arguments.io_bytes;
        let mut bytes = Aligned::new(io_bytes, RECORD_BYTES);
        for offset in &self.written {
            self.store.read(*offset, &mut bytes)?;
            let last = io_bytes - RECORD_BYTES;
            let places = [(0, *offset), (last, offset + last as u64)];
            ensure(
                places.iter().all(|(at, offset)| pattern::is_stamped(&bytes[*at..], 0, *offset, self.generation)),
                || format!("what was written at {offset} is not there"),
            )?;
        }
        Ok(())
    }
}

fn stamp_ends(bytes: &mut [u8], offset: u64, generation: u64) {
    let last = bytes.len() - RECORD_BYTES;
    pattern::stamp(&mut bytes[last..], 0, offset + last as u64, generation);
    pattern::stamp(bytes, 0, offset, generation);
}

/// Runs transfers until the time is over. The resulting JSON has their rate and latencies.
pub fn run(arguments: &RingArguments) -> WorkloadResult {
    let mut work = TransferLoop::new(arguments, arguments.offsets())?;
    let run = Duration::from_millis(arguments.run_ms);
    // A tenth of the time is spent on warm-up, as in the other workloads.
    work.run_for(run / 10)?;
    work.times.clear();
    let span = IntervalStart::begin();
    work.run_for(run)?;
    let took = span.end();
    let mut metrics = took.metrics(work.times.count(), arguments.io_bytes, &work.times)?;
    metrics.insert("is_kernel".to_owned(), Value::from(work.ring.is_kernel()));
    work.drain()?;
    work.read_back()?;
    Ok(metrics.into())
}
