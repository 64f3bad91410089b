//! A file system with a spill store: random operations against a model, also with a store that fails; several threads
//! with more data than memory; limits, pinned files, and space that returns.
#![allow(unsafe_code)] // forks

use fastrand::Rng;
use pagemill_core::units::PageSize;
use pagemill_ramfs::{Allocate, Builder, Error, File, OpenOptions, Quota, RamFs, Whence};
use pagemill_store::{Faults, FaultyStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const MIB: u64 = 1 << 20;
const SEGMENT: u64 = 256 << 10;

fn new_with(store: Arc<dyn Store>, limit_bytes: u64, change: impl FnOnce(Builder) -> Builder) -> RamFs {
    let testbed = Testbed::for_test();
    let builder = RamFs::builder("spill").bytes(MIB).spill(store, limit_bytes);
    change(builder).build_in(testbed.slabs, testbed.caches).unwrap()
}

fn memory_store() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(Vec::new(), 512))
}

/// A store in memory that calls a function before each write.
struct HookedStore {
    store: MemoryStore,
    before_write: Box<dyn Fn() + Send + Sync>,
}

impl Store for HookedStore {
    fn size_bytes(&self) -> std::io::Result<u64> {
        self.store.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.store.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> std::io::Result<()> {
        self.store.read(offset, to)
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::io::Result<()> {
        (self.before_write)();
        self.store.write(offset, from)
    }

    fn set_size(&self, size_bytes: u64) -> std::io::Result<()> {
        self.store.set_size(size_bytes)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.store.sync()
    }
}

fn hooked_store(bytes: Vec<u8>, before_write: impl Fn() + Send + Sync + 'static) -> Arc<HookedStore> {
    Arc::new(HookedStore { store: MemoryStore::new(bytes, 512), before_write: Box::new(before_write) })
}

fn new() -> RamFs {
    new_with(memory_store(), 64 * MIB, |builder| builder)
}

fn open(fs: &RamFs, path: &str) -> File {
    fs.open(path, &OpenOptions::new().read(true).write(true).create(true)).unwrap()
}

fn write_all(file: &File, from: &[u8], offset: u64) -> Result<(), Error> {
    let mut done = 0;
    while done < from.len() {
        done += file.write_at(&from[done..], offset + done as u64)?;
    }
    Ok(())
}

fn read_all(file: &File, len: usize, offset: u64) -> Result<Vec<u8>, Error> {
    let (mut bytes, mut done) = (vec![0xee; len], 0);
    while done < len {
        match file.read_at(&mut bytes[done..], offset + done as u64)? {
            0 => break,
            more => done += more,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// What a file should be: its bytes, and which of its pages have data.
#[derive(Clone, Default)]
struct Model {
    bytes: Vec<u8>,
    pages: BTreeSet<u64>,
    page_bytes: u64,
}

impl Model {
    fn new(page_bytes: u64) -> Self {
        Self { page_bytes, ..Self::default() }
    }

    fn fill(&mut self, offset: u64, len: u64, byte: Option<u8>) {
        if self.bytes.len() < (offset + len) as usize {
            self.bytes.resize((offset + len) as usize, 0);
        }
        byte.into_iter().for_each(|byte| self.bytes[offset as usize..(offset + len) as usize].fill(byte));
        self.pages.extend(offset / self.page_bytes..(offset + len).div_ceil(self.page_bytes));
    }

    fn truncate(&mut self, size: u64) {
        self.bytes.resize(size as usize, 0);
        let page_bytes = self.page_bytes;
        self.pages.retain(|page| page * page_bytes < size);
    }

    fn punch(&mut self, offset: u64, len: u64) {
        let size = self.bytes.len() as u64;
        let (start, end) = (offset.min(size), (offset + len).min(size));
        self.bytes[start as usize..end as usize].fill(0);
        // The last page is removed if the hole covers its bytes up to the end of the file.
        let end = if offset + len >= size { size.next_multiple_of(self.page_bytes) } else { end };
        let inner = offset.div_ceil(self.page_bytes)..end / self.page_bytes;
        self.pages.retain(|page| !inner.contains(page));
    }

    fn seek(&self, whence: Whence, offset: u64) -> Option<u64> {
        let size = self.bytes.len() as u64;
        let is_data = |page: u64| self.pages.contains(&page);
        let wanted = matches!(whence, Whence::Data);
        let mut page = offset / self.page_bytes;
        while page * self.page_bytes < size {
            if is_data(page) == wanted {
                return Some((page * self.page_bytes).max(offset));
            }
            page += 1;
        }
        (!wanted).then_some(size)
    }

    fn check(&self, file: &File, what: &str) {
        let attr = file.metadata().unwrap();
        assert_eq!(attr.size_bytes, self.bytes.len() as u64, "{what}");
        assert_eq!(attr.allocated_bytes, self.pages.len() as u64 * self.page_bytes, "{what}");
    }
}

const FILES: usize = 4;
const MOST_BYTES: u64 = 3 * MIB / 2;

/// Does random operations on files that are together up to six times as large as memory. Each result is compared with
/// the model. An operation that fails because the store does is repeated without faults.
fn run_model(seed: u64, operations: usize, page: PageSize, faults: Option<&Faults>) {
    let (mut rng, page_bytes) = (Rng::with_seed(seed), page.bytes() as u64);
    let store = Arc::new(FaultyStore::new(MemoryStore::new(Vec::new(), 512)));
    let fs = new_with(store.clone(), 64 * MIB, |builder| builder.page(page).bytes(MIB.max(4 * page_bytes)));
    let mut models: Vec<Model> = (0..FILES).map(|_| Model::new(page_bytes)).collect();
    let path = |at: usize| format!("/file{at}");
    let mut failures = 0;
    for step in 0..operations {
        let at = rng.usize(0..FILES);
        let (file, model) = (open(&fs, &path(at)), &mut models[at]);
        let offset = rng.u64(0..MOST_BYTES);
        let most = if rng.bool() { 10_000 } else { 600_000 };
        let len = rng.u64(1..=most).min(MOST_BYTES - offset).max(1);
        let kind = rng.u32(0..100);
        let what = format!("seed {seed}, step {step}: kind {kind}, file {at}, {offset}+{len}");
        let byte = rng.u8(1..);
        let act = || -> Result<(), Error> {
            match kind {
                0..40 => write_all(&file, &vec![byte; len as usize], offset),
                40..70 => {
                    let bytes = read_all(&file, len as usize, offset)?;
                    let end = model.bytes.len().min((offset + len) as usize);
                    assert!(bytes == model.bytes[end.min(offset as usize)..end], "{what}: other bytes were read");
                    Ok(())
                }
                70..76 => file.set_size(offset),
                76..82 => file.allocate(Allocate::Punch, offset, len),
                82..86 => file.allocate(Allocate::Zero, offset, len),
                86..90 => file.allocate(Allocate::Extend, offset, len),
                90..95 if offset < model.bytes.len() as u64 => {
                    for whence in [Whence::Data, Whence::Hole] {
                        assert_eq!(file.seek(whence, offset).ok(), model.seek(whence, offset), "{what} {whence:?}");
                    }
                    Ok(())
                }
                95..97 => fs.remove_file(path(at)),
                _ => Ok(()),
            }
        };
        if let Some(faults) = faults {
            store.set_faults(Faults { seed: rng.u64(..), ..faults.clone() });
        }
        let first = act();
        store.set_faults(Faults::default());
        if let Err(error) = first {
            failures += 1;
            assert!(faults.is_some(), "{what}: {error}");
            assert!(matches!(error.errno(), libc::EIO | libc::ENOSPC), "{what}: {error}");
            act().unwrap_or_else(|error| panic!("{what}, repeated: {error}"));
        }
        match kind {
            0..40 => model.fill(offset, len, Some(byte)),
            70..76 => model.truncate(offset),
            76..82 => model.punch(offset, len),
            82..86 => model.fill(offset, len, Some(0)),
            86..90 => model.fill(offset, len, None),
            95..97 => *model = Model::new(page_bytes),
            _ => {}
        }
        if !(95..97).contains(&kind) {
            model.check(&file, &what);
        }
    }
    assert!(store.calls().reads > 0 && store.calls().writes > 0, "data moved in both directions");
    assert_eq!(faults.is_some(), failures > 0, "{failures} operations failed");
    for (at, model) in models.iter().enumerate() {
        assert!(fs.read(path(at)).unwrap_or_default() == model.bytes, "seed {seed}: file {at} at the end");
        let _ = fs.remove_file(path(at));
    }
    let usage = fs.usage();
    assert_eq!((usage.bytes, usage.spilled_bytes), (0, 0));
}

/// Files of up to six times the memory are written, read, truncated, punched, zeroed, allocated and removed at random.
#[test]
fn random_operations_match_a_model() {
    (0..4).for_each(|seed| run_model(seed, 600, PageSize::new(4096).unwrap(), None));
    run_model(9, 300, PageSize::new(64 << 10).unwrap(), None);
    run_model(10, 60, PageSize::new(512 << 10).unwrap(), None);
}

/// As above, with a store of which some calls fail or are interrupted halfway. An operation must either do its work or
/// report the error, and a repetition without faults must succeed: no byte is lost.
#[test]
fn failures_of_the_store_lose_nothing() {
    let faults = Faults { fail_per_mille: 100, short_per_mille: 60, ..Faults::default() };
    (20..24).for_each(|seed| run_model(seed, 400, PageSize::new(4096).unwrap(), Some(&faults)));
}

/// Threads change files of their own and read a common one, together five times the memory. Each thread must find its
/// own bytes, and the bytes of the common file.
#[test]
fn threads_share_the_memory() {
    let fs = new();
    let common: Vec<u8> = (0..MIB as usize).map(|at| (at / 4096) as u8).collect();
    fs.write("/common", &common).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (fs, common) = (fs.clone(), &common);
            scope.spawn(move || {
                let (mut rng, path) = (Rng::with_seed(thread), format!("/own{thread}"));
                let (file, shared) = (open(&fs, &path), open(&fs, "/common"));
                let mut own = vec![0u8; MIB as usize];
                for _ in 0..250 {
                    let at = rng.usize(0..own.len());
                    let end = own.len().min(at + rng.usize(1..200_000));
                    match rng.u32(0..10) {
                        0..4 => {
                            own[at..end].fill(rng.u8(..));
                            write_all(&file, &own[at..end], at as u64).unwrap();
                        }
                        4 => {
                            file.set_size(at as u64).unwrap();
                            file.set_size(own.len() as u64).unwrap();
                            own[at..].fill(0);
                        }
                        5 => {
                            file.allocate(Allocate::Punch, at as u64, (end - at) as u64).unwrap();
                            own[at..end].fill(0);
                        }
                        6..8 => {
                            file.set_size(own.len() as u64).unwrap();
                            assert!(read_all(&file, end - at, at as u64).unwrap() == own[at..end], "own bytes");
                        }
                        _ => {
                            let bytes = read_all(&shared, end - at, at as u64).unwrap();
                            assert!(bytes == common[at..end], "bytes of the common file");
                        }
                    }
                }
            });
        }
    });
    assert!(fs.usage().spilled_bytes > 0);
    assert_eq!(fs.read("/common").unwrap(), common);
}

/// Data that fill memory and the store. Further data must be refused with "no space". Everything before must still be
/// readable, and writable in place. A removed file makes room again, in the store, too.
#[test]
fn a_full_store_refuses_new_data_and_keeps_the_old() {
    let fs = new_with(memory_store(), 2 * MIB, |builder| builder);
    let file = open(&fs, "/full");
    let mut len = 0;
    let error = loop {
        match file.write_at(&vec![(len >> 16) as u8; 65_536], len) {
            Ok(more) => len += more as u64,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    assert!((11 * MIB / 4..=3 * MIB).contains(&len), "{len} bytes fit into 1 + 2 MiB");
    for round in 0..3u8 {
        let bytes = read_all(&file, len as usize, 0).unwrap();
        assert!(bytes.iter().zip(0..).all(|(byte, at)| *byte == ((at >> 16) as u8).wrapping_add(round)));
        for at in (0..len).step_by(65_536) {
            let part = vec![((at >> 16) as u8).wrapping_add(round + 1); 65_536.min(len - at) as usize];
            write_all(&file, &part, at).unwrap_or_else(|error| panic!("at {at} in round {round}: {error}"));
        }
    }
    drop(file);
    fs.remove_file("/full").unwrap();
    assert_eq!((fs.usage().bytes, fs.usage().spilled_bytes), (0, 0));
    fs.write("/other", &vec![7; 11 * MIB as usize / 4]).unwrap();
}

/// Files are read without changes, twice as many as fit into memory. The second round must not write to the store: the
/// copies of what came back are still valid.
#[test]
fn unchanged_data_are_not_written_again() {
    let store = Arc::new(FaultyStore::new(MemoryStore::new(Vec::new(), 512)));
    let fs = new_with(store.clone(), 64 * MIB, |builder| builder);
    (0..8).for_each(|at| fs.write(format!("/file{at}"), &vec![at; SEGMENT as usize]).unwrap());
    let read_all = || (0..8).for_each(|at| assert_eq!(fs.read(format!("/file{at}")).unwrap()[5], at));
    read_all();
    read_all();
    let written = store.calls().writes;
    (0..3).for_each(|_| read_all());
    assert_eq!(store.calls().writes, written);
    assert!(store.calls().reads > 16);
}

/// A file with a mapping in use stays in memory as a whole, and others move. A file larger than memory gets no mapping.
#[test]
fn a_file_with_a_mapping_stays() {
    let fs = new();
    fs.write("/pinned", &vec![1; MIB as usize / 2]).unwrap();
    fs.write("/large", &vec![2; 2 * MIB as usize]).unwrap();
    let (pinned, large) = (open(&fs, "/pinned"), open(&fs, "/large"));
    assert!(large.mapping().is_none());
    let mapping = pinned.mapping().unwrap();
    let pin = mapping.pin(0).unwrap();
    fs.write("/more", &vec![3; 2 * MIB as usize]).unwrap();
    pinned.write_at(&[9; 1000], 5000).unwrap();
    let mut bytes = vec![0; MIB as usize / 2];
    assert_eq!(mapping.read_at(&mut bytes, 0).unwrap(), bytes.len());
    assert!(bytes[..5000].iter().chain(&bytes[6000..]).all(|byte| *byte == 1) && bytes[5999] == 9);
    drop(pin);
    assert_eq!(fs.read("/large").unwrap(), vec![2; 2 * MIB as usize]);
    pinned.set_size(10).unwrap();
    assert_eq!(fs.read("/pinned").unwrap(), [1; 10]);
}

/// Volatile files are purged before other data move to the store; a file with all data in the store is not purged.
#[test]
fn volatile_files_are_purged_first() {
    let fs = new();
    fs.write("/cache", &vec![1; MIB as usize / 2]).unwrap();
    fs.mark_volatile("/cache").unwrap();
    fs.write("/data", &vec![2; 3 * MIB as usize / 4]).unwrap();
    assert_eq!(fs.usage().spilled_bytes, 0);
    assert!(fs.unmark_volatile("/cache").unwrap());
    fs.write("/cache", &vec![3; SEGMENT as usize]).unwrap();
    fs.write("/more", &vec![4; 2 * MIB as usize]).unwrap();
    fs.mark_volatile("/cache").unwrap();
    fs.write("/last", &vec![5; 2 * MIB as usize]).unwrap();
    assert!(!fs.unmark_volatile("/cache").unwrap());
    assert_eq!(fs.read("/cache").unwrap(), vec![3; SEGMENT as usize]);
}

/// A quota counts data in memory and in the store alike, whatever moves meanwhile.
#[test]
fn a_quota_counts_spilled_data() {
    let fs = new();
    fs.create_dir("/team").unwrap();
    fs.set_quota("/team", Quota { bytes: 2 * MIB, inodes: 10 }).unwrap();
    fs.write("/team/one", &vec![1; MIB as usize]).unwrap();
    fs.write("/other", &vec![2; 2 * MIB as usize]).unwrap();
    assert_eq!(fs.quota_usage("/team").unwrap().bytes, MIB);
    fs.write("/team/two", &vec![3; MIB as usize]).unwrap();
    assert_eq!(fs.write("/team/three", b"x").unwrap_err().errno(), libc::EDQUOT);
    assert_eq!(fs.read("/team/one").unwrap(), vec![1; MIB as usize]);
    open(&fs, "/team/one").set_size(100_000).unwrap();
    assert_eq!(fs.quota_usage("/team").unwrap().bytes, MIB + 25 * 4096);
    fs.remove_dir_all("/team").unwrap();
    fs.create_dir("/team").unwrap();
}

/// Space of removed, truncated and punched files is discarded in the store and reused.
#[test]
fn space_in_the_store_is_reused() {
    let store = memory_store();
    let fs = new_with(store.clone(), 8 * MIB, |builder| builder);
    for round in 0..10u8 {
        fs.write("/file", &vec![round; 6 * MIB as usize]).unwrap();
        open(&fs, "/file").allocate(Allocate::Punch, MIB, 4 * MIB).unwrap();
        assert_eq!(fs.read("/file").unwrap()[5 * MIB as usize..], vec![round; MIB as usize]);
    }
    assert!(store.size_bytes().unwrap() <= 8 * MIB, "the store has {} bytes", store.size_bytes().unwrap());
}

/// Too little memory, and a store with large blocks, are refused with a reason.
#[test]
fn unsuitable_parameters_are_refused() {
    let build = |bytes, block| {
        let testbed = Testbed::for_test();
        let store = Arc::new(MemoryStore::new(Vec::new(), block));
        RamFs::builder("bad").bytes(bytes).spill(store, MIB).build_in(testbed.slabs, testbed.caches)
    };
    for (bytes, block) in [(MIB / 2, 512), (MIB, 8192)] {
        assert!(matches!(build(bytes, block), Err(Error::Invalid { .. })));
    }
    build(MIB, 4096).unwrap();
}

/// A file that stays in memory leaves room for less than a segment. A write of more than that must fail, and must not
/// evict its own segment again and again.
#[test]
fn writes_end_with_little_room() {
    let fs = new();
    fs.write("/pinned", &vec![1; MIB as usize - 40 * 1024]).unwrap();
    let pinned = open(&fs, "/pinned");
    assert!(pinned.mapping().is_some());
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let file = open(&fs, &format!("/other{thread}"));
            scope.spawn(move || {
                for _ in 0..20 {
                    assert!(matches!(write_all(&file, &vec![2; 100_000], 0), Err(Error::NoSpace { .. })));
                }
            });
        }
    });
    assert!(pinned.mapping().is_some());
}

/// Threads write, read and remove files, while other threads evict parts of them. No write may fail, because there is
/// room for all files, and afterwards the whole store must be free again.
#[test]
fn removals_beside_evictions_free_everything() {
    let fs = new_with(memory_store(), 8 * MIB, |builder| builder.bytes(4 * MIB));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let fs = fs.clone();
            scope.spawn(move || {
                let (path, bytes) = (format!("/file{thread}"), vec![thread + 1; 2 * MIB as usize]);
                for round in 0..60 {
                    fs.write(&path, &bytes).unwrap_or_else(|error| panic!("round {round}: {error}"));
                    (0..2).for_each(|_| assert!(fs.read(&path).unwrap() == bytes));
                    fs.remove_file(&path).unwrap();
                }
            });
        }
    });
    assert_eq!((fs.usage().bytes, fs.usage().spilled_bytes), (0, 0));
    fs.write("/all", &vec![7; 12 * MIB as usize - SEGMENT as usize]).unwrap();
}

/// Spilled data are zeroed twice, under a quota of twice their size, and without memory for them. They must stay
/// allocated, and be charged once.
#[test]
fn zeroed_data_stay_where_they_are() {
    let fs = new();
    fs.create_dir("/team").unwrap();
    fs.set_quota("/team", Quota { bytes: 2 * MIB, inodes: 10 }).unwrap();
    fs.write("/team/one", &vec![1; MIB as usize]).unwrap();
    let one = open(&fs, "/team/one");
    for _ in 0..2 {
        fs.write("/other", &vec![2; 2 * MIB as usize]).unwrap();
        one.allocate(Allocate::Zero, 100, MIB - 5000).unwrap();
        assert_eq!(fs.quota_usage("/team").unwrap().bytes, MIB);
        assert_eq!(one.metadata().unwrap().allocated_bytes, MIB);
    }
    let bytes = fs.read("/team/one").unwrap();
    let (start, end) = (100, MIB as usize - 4900);
    assert!(bytes[..start].iter().chain(&bytes[end..]).all(|byte| *byte == 1));
    assert!(bytes[start..end].iter().all(|byte| *byte == 0));
}

/// A volatile file moved to the store, because it was open when memory was full. It must be purged when the store is
/// full, too.
#[test]
fn volatile_data_in_a_full_store_are_purged() {
    let fs = new_with(memory_store(), 2 * MIB, |builder| builder);
    fs.write("/cache", &vec![1; 2 * MIB as usize]).unwrap();
    fs.mark_volatile("/cache").unwrap();
    let file = open(&fs, "/cache");
    fs.write("/one", &vec![2; MIB as usize]).unwrap();
    assert_eq!(file.size_bytes(), 2 * MIB);
    drop(file);
    fs.write("/two", &vec![3; MIB as usize]).unwrap();
    assert!(fs.unmark_volatile("/cache").unwrap());
    assert_eq!(fs.read("/one").unwrap(), vec![2; MIB as usize]);
}

/// A file that does not fit into memory gets no mapping. The attempts must not make writes of another thread fail.
#[test]
fn refused_mappings_disturb_no_writes() {
    let fs = new();
    fs.write("/large", &vec![2; 4 * MIB as usize]).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let large = open(&fs, "/large");
        let is_done = &is_done;
        scope.spawn(move || {
            while !is_done.load(SeqCst) {
                assert!(large.mapping().is_none());
            }
        });
        let written: Result<(), Error> = (0..200).try_for_each(|_| fs.write("/small", &vec![3; 100_000]));
        is_done.store(true, SeqCst);
        written.unwrap();
    });
}

/// A fork child truncates, punches, zeroes, writes and reads files of its parent's file systems, and sets the store of
/// an empty file. A part of each file with data is in a spill store. At the fork, another thread of the parent writes to
/// the empty file, and waits for a spill store. Each call must fail, and the parent's bytes must stay.
#[test]
fn a_fork_child_changes_nothing() {
    let (testbed, bytes) = (Testbed::for_test(), vec![7; 2 * MIB as usize]);
    let [is_holding, is_writing] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (holds, writes) = (is_holding.clone(), is_writing.clone());
    let store = hooked_store(Vec::new(), move || {
        writes.store(true, SeqCst);
        while holds.load(SeqCst) {
            std::thread::yield_now();
        }
    });
    let builder = RamFs::builder("fork").bytes(MIB).spill(store, 8 * MIB);
    let fs = builder.build_in(testbed.slabs, testbed.caches).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let on_disk = Arc::new(pagemill_store::FileStore::create(folder.path().join("spill")).unwrap());
    let disk_fs = RamFs::builder("fork").bytes(MIB).spill(on_disk, 8 * MIB);
    let disk_fs = disk_fs.build_in(testbed.slabs, testbed.caches).unwrap();
    let files = [&fs, &disk_fs].map(|fs| {
        fs.write("/file", &bytes).unwrap();
        open(fs, "/file")
    });
    let [empty, writing] = [(); 2].map(|()| open(&fs, "/empty"));
    is_holding.store(true, SeqCst);
    is_writing.store(false, SeqCst);
    let writer = std::thread::spawn(move || write_all(&writing, &[8; 100_000], 0).unwrap());
    while !is_writing.load(SeqCst) {
        assert!(!writer.is_finished(), "the write needs the store");
        std::thread::yield_now();
    }
    assert_eq!(empty.size_bytes(), 0);
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { testbed.instance.before_fork() };
    // SAFETY: the child ends without returning to the test.
    let child = unsafe { libc::fork() };
    // SAFETY: called after `before_fork`.
    unsafe { testbed.instance.after_fork() };
    if child == 0 {
        // SAFETY: the process is a new child, and this is its only thread.
        unsafe { testbed.instance.begin_child() };
        // SAFETY: ends the child by a signal if a call waits for the other thread.
        unsafe { libc::alarm(30) };
        let all_fail = files.iter().all(|file| {
            file.read_at(&mut [0; 10], 0).is_err()
                && file.write_at(b"x", 0).is_err()
                && file.allocate(Allocate::Punch, 0, MIB).is_err()
                && file.allocate(Allocate::ZeroKeepSize, 0, MIB).is_err()
                && file.set_size(0).is_err()
        });
        let all_fail = all_fail && empty.set_store(memory_store()).is_err();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!all_fail)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child of this test, and writes `status`.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    is_holding.store(false, SeqCst);
    writer.join().unwrap();
    assert_eq!(status, 0);
    assert!(fs.read("/empty").unwrap() == [8; 100_000]);
    assert!([&fs, &disk_fs].iter().all(|fs| fs.read("/file").unwrap() == bytes));
}

/// Moves a file of 100,000 bytes to the store.
fn spill_small_file(fs: &RamFs) -> File {
    fs.write("/small", &[1; 100_000]).unwrap();
    fs.write("/large", &vec![2; MIB as usize]).unwrap();
    fs.remove_file("/large").unwrap();
    assert_eq!(fs.usage().spilled_bytes, 25 * 4096);
    open(fs, "/small")
}

/// Pages of a file with a store of its own fill the memory, or share it with pinned pages and too few free ones. They
/// are clean or dirty. A write into a spilled segment, or a mapping of its file, must evict them, dirty ones after
/// writeback.
#[test]
fn pages_of_stores_make_room_for_spilled_data() {
    for (pinned_pages, stored_pages) in [(0, 512), (220, 16)] {
        for (is_dirty, is_mapped) in [(false, false), (false, true), (true, false), (true, true)] {
            let fs = new();
            let small = spill_small_file(&fs);
            fs.write("/pinned", &vec![2; pinned_pages * 4096]).unwrap();
            let pinned = open(&fs, "/pinned");
            assert!(pinned_pages == 0 || pinned.mapping().is_some());
            let (stored, bytes) = (open(&fs, "/stored"), vec![3; stored_pages * 4096]);
            stored.set_store(Arc::new(MemoryStore::new(bytes.clone(), 512))).unwrap();
            if is_dirty {
                write_all(&stored, &bytes, 0).unwrap();
            }
            assert_eq!(read_all(&stored, bytes.len(), 0).unwrap(), bytes);
            if is_mapped {
                assert!(small.mapping().is_some(), "{stored_pages} {is_dirty}");
            } else {
                small.write_at(b"x", 200_000).unwrap();
            }
            assert_eq!(fs.usage().spilled_bytes, 0);
            assert_eq!(fs.read("/small").unwrap()[..100_000], [1; 100_000]);
        }
    }
}

/// A mapping of a spilled file needs the memory of dirty pages of another file. The store of that file panics.
/// Afterwards, writes into the spilled segment must not be lost, and a mapping must have them.
#[test]
fn a_panic_of_another_store_loses_no_later_write() {
    let fs = new();
    let small = spill_small_file(&fs);
    let is_panicking = Arc::new(AtomicBool::new(false));
    let panics = is_panicking.clone();
    let (bytes, before_write) = (vec![3; 16 * 4096], move || assert!(!panics.load(SeqCst), "as the test wants"));
    fs.write("/pinned", &[2; 220 * 4096]).unwrap();
    let pinned = open(&fs, "/pinned");
    assert!(pinned.mapping().is_some());
    let stored = open(&fs, "/stored");
    stored.set_store(hooked_store(bytes.clone(), before_write)).unwrap();
    write_all(&stored, &bytes, 0).unwrap();
    is_panicking.store(true, SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| small.mapping().is_some())).is_err());
    is_panicking.store(false, SeqCst);
    assert_eq!(fs.usage().spilled_bytes, 25 * 4096);
    small.write_at(b"x", 4096).unwrap();
    let mut expected = vec![1; 100_000];
    expected[4096] = b'x';
    assert!(fs.read("/small").unwrap() == expected);
    assert!(small.mapping().is_some());
    assert!(fs.read("/small").unwrap() == expected);
    assert!(read_all(&stored, bytes.len(), 0).unwrap() == bytes);
}

/// The disk of the store is full, or a quota or the process's file size limit is reached, before the spill store's own
/// limit. Writes by two threads must purge the volatile file in the store, and fail after fewer than 16 writes to it.
#[test]
fn a_write_fails_soon_if_the_disk_is_full() {
    for errno in [libc::ENOSPC, libc::EDQUOT, libc::EFBIG] {
        let store = Arc::new(FaultyStore::new(MemoryStore::new(Vec::new(), 512)));
        let fs = new_with(store.clone(), 64 * MIB, |builder| builder);
        fs.write("/cache", &vec![1; 200_000]).unwrap();
        fs.write("/rest", &vec![2; MIB as usize]).unwrap();
        fs.mark_volatile("/cache").unwrap();
        let writes = store.calls().writes;
        store.set_faults(Faults { fails_after: Some(0), errno, ..Faults::default() });
        std::thread::scope(|scope| {
            for path in ["/other", "/another"] {
                let file = open(&fs, path);
                scope.spawn(move || {
                    assert!(matches!(write_all(&file, &vec![3; 100_000], 0), Err(Error::NoSpace { .. })));
                });
            }
        });
        assert!(store.calls().writes - writes < 16, "{} writes", store.calls().writes - writes);
        store.set_faults(Faults::default());
        assert!(fs.unmark_volatile("/cache").unwrap());
        assert!(fs.read("/rest").unwrap() == vec![2; MIB as usize]);
    }
}

/// A file has dirty pages for a store that fails. Other files must be read and written all the same: their segments
/// move to the spill store.
#[test]
fn other_files_do_not_need_a_failing_store() {
    let fs = new();
    let small = spill_small_file(&fs);
    let store = Arc::new(FaultyStore::new(MemoryStore::new(vec![3; 4096], 512)));
    let stored = open(&fs, "/stored");
    stored.set_store(store.clone()).unwrap();
    stored.write_at(b"dirty", 0).unwrap();
    store.set_faults(Faults { fails_after: Some(0), ..Faults::default() });
    fs.write("/fill", &vec![2; 2 * MIB as usize]).unwrap();
    assert_eq!(fs.read("/small").unwrap(), [1; 100_000]);
    small.write_at(b"x", 200_000).unwrap();
    assert!(fs.read("/fill").unwrap() == vec![2; 2 * MIB as usize]);
    store.set_faults(Faults::default());
    // The first sync may report the failure again.
    let _ = stored.sync();
    stored.sync().unwrap();
    let mut bytes = [0; 512];
    store.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes[..5], b"dirty");
}

/// A file that stays in memory leaves too little room for a write, or the store fails. Volatile files that are
/// entirely in the store must stay: to purge them frees no memory.
#[test]
fn spilled_volatile_files_stay_while_the_store_has_room() {
    for is_failing in [false, true] {
        let store = Arc::new(FaultyStore::new(MemoryStore::new(Vec::new(), 512)));
        let fs = new_with(store.clone(), 64 * MIB, |builder| builder);
        fs.write("/cache", &vec![1; 200_000]).unwrap();
        fs.write("/rest", &vec![2; MIB as usize - 40 * 1024]).unwrap();
        assert!(is_failing || open(&fs, "/rest").mapping().is_some());
        fs.mark_volatile("/cache").unwrap();
        if is_failing {
            store.set_faults(Faults { fails_after: Some(0), ..Faults::default() });
        }
        assert!(matches!(write_all(&open(&fs, "/other"), &vec![3; 100_000], 0), Err(Error::NoSpace { .. })));
        store.set_faults(Faults::default());
        assert!(!fs.unmark_volatile("/cache").unwrap());
        assert_eq!(fs.read("/cache").unwrap(), vec![1; 200_000]);
    }
}

/// Writes that would end behind the largest offset must be refused, with and without a quota and a spill store.
#[test]
fn offsets_have_a_limit() {
    let testbed = Testbed::for_test();
    let plain = RamFs::builder("plain").bytes(MIB).build_in(testbed.slabs, testbed.caches).unwrap();
    for fs in [plain, new()] {
        fs.create_dir("/team").unwrap();
        fs.set_quota("/team", Quota { bytes: MIB, inodes: 10 }).unwrap();
        for path in ["/file", "/team/file"] {
            let file = open(&fs, path);
            for offset in [u64::MAX - 1, u64::MAX, i64::MAX as u64] {
                assert!(matches!(file.write_at(b"xy", offset), Err(Error::Invalid { .. })), "{path} {offset}");
            }
            assert_eq!(file.size_bytes(), 0);
        }
    }
}
