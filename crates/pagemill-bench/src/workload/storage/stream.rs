//! One sequential pass over a file: reads or writes of one length, through Pagemill's page cache or through the
//! kernel's.

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use pagemill_cache::{Mapping, PageCache};
use pagemill_store::{Aligned, Store as _};
use rustix::fs::{Advice, fadvise};
use rustix::io::{ReadWriteFlags, preadv2, pwritev2};

use super::{IntervalStart, Source};
use crate::pattern::{self, RECORD_BYTES, Records};
use crate::storage::{CPU_PER_MIB, MIB};
use crate::workload::hit::write_all;
use crate::workload::{Failure, WorkloadResult, ensure};

/// `RWF_DONTCACHE` (Linux 6.14): the kernel drops the pages once they are read or written back.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// Bytes of a read that checks the file after writes.
const CHECK_BYTES: usize = 1 << 20;

/// The cache through which the calls go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// Pagemill's page cache with default settings.
    Cache,
    /// The kernel's page cache.
    Kernel,
    /// The kernel's page cache with `RWF_DONTCACHE`.
    Dontcache,
}

impl Way {
    /// Returns the value of `--way`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::Kernel => "kernel",
            Self::Dontcache => "dontcache",
        }
    }
}

crate::workload::arguments! {
    /// Arguments of a pass over a file. With `--write` the file's previous content is lost.
    StreamArguments:
    way: Way,
    cache_mib: u64,
    call_bytes: usize,
    /// Write the file instead of reading it
    write: bool,
    ..source: Source,
}

/// Reads or writes the whole file once, and checks the bytes.
pub fn run(arguments: &StreamArguments) -> WorkloadResult {
    arguments.source.drop_kernel_pages()?;
    let stamp = u64::from(std::process::id());
    let took = match (arguments.way, arguments.write) {
        (Way::Cache, is_write) => {
            let cache = PageCache::builder("stream").limit(arguments.cache_mib << 20).build()?;
            if is_write { write_cached(arguments, &cache, stamp)? } else { read_cached(arguments, &cache)? }
        }
        (way, true) => write_by_kernel(arguments, way, stamp)?,
        (way, false) => read_by_kernel(arguments, way)?,
    };
    if arguments.write {
        check_written(&arguments.source, stamp)?;
    }
    let mib = arguments.source.len_bytes as f64 / f64::from(1 << 20);
    let rates = [(MIB, mib / took.seconds), (CPU_PER_MIB, took.cpu_seconds * 1e6 / mib)];
    Ok(rates.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect::<serde_json::Map<_, _>>().into())
}

fn offsets(arguments: &StreamArguments) -> impl Iterator<Item = u64> {
    (0..arguments.source.len_bytes).step_by(arguments.call_bytes)
}

fn read_cached(arguments: &StreamArguments, cache: &PageCache) -> Result<super::Elapsed, Failure> {
    let file = cache.open(Arc::new(arguments.source.open_read_only()?))?;
    let mut bytes = vec![0; arguments.call_bytes];
    let span = IntervalStart::begin();
    for offset in offsets(arguments) {
        let read = read_all(&file, &mut bytes, offset)?;
        check_read(arguments, &bytes[..read], offset)?;
    }
    Ok(span.end())
}

fn read_all(file: &Mapping, to: &mut [u8], offset: u64) -> Result<usize, Failure> {
    let mut done = 0;
    while done < to.len() {
        match file.read_at(&mut to[done..], offset + done as u64)? {
            0 => break,
            read => done += read,
        }
    }
    Ok(done)
}

fn read_by_kernel(arguments: &StreamArguments, way: Way) -> Result<super::Elapsed, Failure> {
    let file = File::open(&arguments.source.file)?;
    fadvise(&file, 0, None, Advice::Sequential)?;
    let mut bytes = vec![0; arguments.call_bytes];
    let span = IntervalStart::begin();
    for offset in offsets(arguments) {
        let mut done = 0;
        while done < bytes.len() {
            let (rest, at) = (&mut bytes[done..], offset + done as u64);
            let read = match way {
                Way::Dontcache => {
                    preadv2(&file, &mut [std::io::IoSliceMut::new(rest)], at, DONTCACHE).map_err(Into::into)
                }
                _ => file.read_at(rest, at),
            };
            match read.map_err(|error| unsupported(way, &error))? {
                0 => break,
                read => done += read,
            }
        }
        check_read(arguments, &bytes[..done], offset)?;
    }
    Ok(span.end())
}

fn check_read(arguments: &StreamArguments, bytes: &[u8], offset: u64) -> Result<(), Failure> {
    ensure(bytes.len() == arguments.call_bytes && arguments.source.has_right_ends(bytes, offset), || {
        format!("wrong bytes were read at {offset}")
    })
}

fn write_cached(arguments: &StreamArguments, cache: &PageCache, generation: u64) -> Result<super::Elapsed, Failure> {
    let file = cache.open(Arc::new(arguments.source.open_writable()?))?;
    let mut records = Records::filled(arguments.call_bytes);
    let span = IntervalStart::begin();
    for offset in offsets(arguments) {
        write_all(&file, records.stamped(0, offset, generation), offset)?;
    }
    file.sync()?;
    Ok(span.end())
}

fn write_by_kernel(arguments: &StreamArguments, way: Way, generation: u64) -> Result<super::Elapsed, Failure> {
    let file = OpenOptions::new().write(true).open(&arguments.source.file)?;
    let mut records = Records::filled(arguments.call_bytes);
    let span = IntervalStart::begin();
    for offset in offsets(arguments) {
        let bytes = records.stamped(0, offset, generation);
        let mut done = 0;
        while done < bytes.len() {
            let (rest, at) = (&bytes[done..], offset + done as u64);
            let written = match way {
                Way::Dontcache => pwritev2(&file, &[IoSlice::new(rest)], at, DONTCACHE).map_err(Into::into),
                _ => file.write_at(rest, at),
            };
            done += written.map_err(|error| unsupported(way, &error))?;
        }
    }
    file.sync_data()?;
    Ok(span.end())
}

/// Returns the failure of a call. A kernel without `RWF_DONTCACHE` refuses the flag.
fn unsupported(way: Way, error: &std::io::Error) -> Failure {
    match way {
        Way::Dontcache => format!("RWF_DONTCACHE: {error}").into(),
        _ => error.to_string().into(),
    }
}

/// Checks the whole file with direct reads.
fn check_written(source: &Source, generation: u64) -> Result<(), Failure> {
    let store = source.open_read_only()?;
    let mut bytes = Aligned::new(CHECK_BYTES, RECORD_BYTES);
    for offset in (0..source.len_bytes).step_by(CHECK_BYTES) {
        store.read(offset, &mut bytes)?;
        for (at, record) in (offset..).step_by(RECORD_BYTES).zip(bytes.chunks_exact(RECORD_BYTES)) {
            ensure(pattern::is_intact_record(record, 0, at, generation), || {
                format!("what was written at {at} is not there")
            })?;
        }
    }
    Ok(())
}
