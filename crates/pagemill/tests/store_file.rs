//! Tests of files and devices as stores: partial blocks at the end of a file, fallbacks, changes by other processes,
//! and errors of the system.
//!
//! Some tests run a part of themselves in a child process, under a limit or as another user. The child runs this
//! program again.

use pagemill_core::stats::{self, Counter};
use pagemill_core::{Error, Result};
use pagemill_store::ring::{Engine, Event, Settings};
use pagemill_store::{Aligned, Buffer, Cancel, Faults, FaultyStore, FileOptions, FileStore, Ring, Store, Transfer};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const WAIT_LIMIT: Duration = Duration::from_secs(600);

/// Environment variable that makes a child process run its part of a test. Its value is the argument of that part.
const CHILD_ENV: &str = "STORE_FILE_PART";

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Returns bytes in which any two adjacent bytes differ.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at / 7 % 251) as u8 ^ seed | 1).collect()
}

fn aligned(bytes: &[u8]) -> Aligned {
    let mut memory = Aligned::new(bytes.len(), 64 * KIB);
    memory.copy_from_slice(bytes);
    memory
}

fn read(store: &impl Store, offset: usize, len: usize) -> Vec<u8> {
    let mut memory = aligned(&vec![0xEE; len]);
    store.read(offset as u64, &mut memory).unwrap();
    memory.to_vec()
}

/// Returns the error of an open that must fail: the error number of the system or, if there is none, the error itself.
fn open_error(opened: Result<FileStore>) -> std::result::Result<i32, Error> {
    match opened.expect_err("the store was opened") {
        Error::Store { cause, .. } => Ok(cause.raw_os_error().unwrap()),
        other => Err(other),
    }
}

/// Returns whether an open failed because another store writes to the file.
fn is_busy(opened: Result<FileStore>) -> bool {
    matches!(open_error(opened), Err(Error::Busy { .. }))
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}

/// A generator of pseudo-random numbers, which are the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// A test writes each length around multiples of a block, with blocks of 4 and 64 KiB, direct and buffered. The file
/// must have exactly the written length, and bytes past its end must read as zeros.
#[test]
fn partial_last_blocks_of_every_length_are_written() {
    let folder = folder();
    for (block, use_direct) in [(4 * KIB, true), (4 * KIB, false), (64 * KIB, true)] {
        let path = folder.path().join(format!("{block}-{use_direct}"));
        let options = FileOptions::new().create().block_bytes(block);
        let options = if use_direct { options } else { options.buffered() };
        let store = options.open(&path).unwrap();
        assert_eq!(store.block_bytes(), block);
        let mut lens: Vec<usize> = [511, 512, 513, block / 2].into();
        lens.extend([1, 2, 3].iter().flat_map(|blocks| [blocks * block - 1, blocks * block, blocks * block + 1]));
        for (round, len) in lens.into_iter().enumerate() {
            store.set_size(0).unwrap();
            let bytes = pattern(len, round as u8);
            store.write(0, &aligned(&bytes)).unwrap();
            assert_eq!(store.size_bytes().unwrap(), len as u64);
            assert!(fs::read(&path).unwrap() == bytes, "{len} of {block}");
            let back = read(&store, 0, 4 * block);
            assert!(back[..len] == bytes && back[len..].iter().all(|byte| *byte == 0), "{len} of {block}");
            // Writes the last block again, as a whole and with more bytes, so that the file becomes longer.
            let (from, more) = (len / block * block, pattern(block + 9, 0x55));
            store.write(from as u64, &aligned(&more)).unwrap();
            assert!(fs::read(&path).unwrap()[from..] == more, "{len} of {block}");
        }
    }
}

/// Random transfers with unaligned addresses and offsets must have the same results as copies in memory.
#[test]
fn unaligned_addresses_and_offsets_work() {
    let folder = folder();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    let (mut random, mut model) = (Random(1), vec![0u8; 64 * KIB]);
    let mut memory = aligned(&vec![0; 32 * KIB]);
    store.set_size(model.len() as u64).unwrap();
    for round in 0..300 {
        let unit = [1, 512, 4 * KIB][random.below(3)];
        let (at, skip) = (random.below(32 * KIB) / unit * unit, random.below(2));
        let len = random.below(16 * KIB) / unit * unit;
        if random.below(2) == 0 {
            memory[skip..skip + len].copy_from_slice(&pattern(len, round as u8));
            store.write(at as u64, &memory[skip..skip + len]).unwrap();
            model[at..at + len].copy_from_slice(&memory[skip..skip + len]);
        } else {
            store.read(at as u64, &mut memory[skip..skip + len]).unwrap();
            assert!(memory[skip..skip + len] == model[at..at + len], "round {round}");
        }
    }
    store.sync().unwrap();
    assert!(fs::read(folder.path().join("file")).unwrap() == model);
}

/// One thread continually rewrites the partial last block of a file, while another thread appends after it. No data may
/// be lost, and padding must never be visible.
#[test]
fn rewriting_the_last_block_keeps_appended_data() {
    let folder = folder();
    let store = &FileStore::create(folder.path().join("file")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || (0..200).for_each(|_| store.write(0, &aligned(&pattern(5000, 1))).unwrap()));
        scope.spawn(move || {
            for block in 2..200 {
                store.write((block * 4 * KIB) as u64, &aligned(&pattern(4 * KIB, block as u8))).unwrap();
                assert!(store.size_bytes().unwrap() >= ((block + 1) * 4 * KIB) as u64);
            }
        });
    });
    assert!(read(store, 0, 5000) == pattern(5000, 1));
    assert!(read(store, 5000, 3192).iter().all(|byte| *byte == 0));
    (2..200).for_each(|block| assert!(read(store, block * 4 * KIB, 4 * KIB) == pattern(4 * KIB, block as u8)));
}

/// A store changes the length of its file, or another process does. Truncated data must not come back, and added bytes
/// must read as zeros.
#[test]
fn files_can_grow_and_shrink() {
    let folder = folder();
    let path = folder.path().join("file");
    let store = FileStore::create(&path).unwrap();
    store.write(0, &aligned(&pattern(20 * KIB, 3))).unwrap();
    store.set_size(5 * KIB as u64 + 1).unwrap();
    store.set_size(12 * KIB as u64).unwrap();
    store.sync().unwrap();
    let mut expected = pattern(20 * KIB, 3);
    expected.truncate(5 * KIB + 1);
    expected.resize(12 * KIB, 0);
    assert!(fs::read(&path).unwrap() == expected && read(&store, 0, 12 * KIB) == expected);
    let others = fs::File::options().write(true).open(&path).unwrap();
    others.set_len(1000).unwrap();
    assert_eq!(store.size_bytes().unwrap(), 1000);
    assert!(read(&store, 0, 8 * KIB)[1000..].iter().all(|byte| *byte == 0));
    others.set_len(MIB as u64).unwrap();
    assert_eq!(store.size_bytes().unwrap(), MIB as u64);
    assert!(read(&store, 0, 1000) == expected[..1000]);
    // A hole must read as zeros, also after bytes beyond the hole were written.
    store.write(2 * MIB as u64, &aligned(&[7; 512])).unwrap();
    assert!(read(&store, MIB, MIB).iter().all(|byte| *byte == 0));
    assert_eq!(store.size_bytes().unwrap(), 2 * MIB as u64 + 512);
}

/// If another file takes over the path of a store's file, the store must continue to use the file that it opened.
#[test]
fn a_store_keeps_the_file_that_it_opened() {
    let folder = folder();
    let (path, other) = (folder.path().join("file"), folder.path().join("other"));
    let store = FileStore::create(&path).unwrap();
    store.write(0, b"first").unwrap();
    fs::write(&other, b"second").unwrap();
    fs::rename(&other, &path).unwrap();
    assert_eq!(read(&store, 0, 5), b"first");
    let second = FileStore::open(&path).unwrap();
    assert_eq!(read(&second, 0, 6), b"second");
}

/// If the file system refuses direct transfers, the store must use the kernel's page cache. The store must report that,
/// and a counter must count it.
#[test]
fn refused_direct_transfers_become_buffered() {
    let path = "/proc/version";
    let before = stats::get(Counter::StoresBuffered);
    let store = FileStore::open_read_only(path).unwrap();
    if store.is_direct() {
        return println!("skipped: {path} takes direct transfers");
    }
    assert!(stats::get(Counter::StoresBuffered) > before);
    let expected = fs::read(path).unwrap();
    assert_eq!(read(&store, 0, expected.len()), expected);
    assert_eq!(store.alignment().offset, 1);
    // If buffered transfers are requested, they must not count as a fallback, and the file must have the same bytes.
    let folder = folder();
    let path = folder.path().join("file");
    fs::write(&path, pattern(9000, 1)).unwrap();
    let store = FileOptions::new().buffered().open(&path).unwrap();
    assert!(!store.is_direct() && read(&store, 0, 9000) == pattern(9000, 1));
}

/// Files that cannot be stores must be rejected with the reason.
#[test]
fn files_that_cannot_be_stores_are_rejected() {
    let folder = folder();
    let path = |name: &str| folder.path().join(name);
    assert_eq!(open_error(FileStore::open(folder.path())).unwrap(), libc::EISDIR);
    assert_eq!(open_error(FileStore::open_read_only(folder.path())).unwrap(), libc::EISDIR);
    assert_eq!(open_error(FileStore::open(path("missing"))).unwrap(), libc::ENOENT);
    assert_eq!(open_error(FileStore::create(path("missing").join("file"))).unwrap(), libc::ENOENT);
    assert_eq!(open_error(FileStore::open("zero\0byte")).unwrap(), libc::EINVAL);
    assert_eq!(open_error(FileStore::open("")).unwrap(), libc::ENOENT);
    fs::write(path("file"), b"").unwrap();
    assert_eq!(open_error(FileOptions::new().create_new().open(path("file"))).unwrap(), libc::EEXIST);
    assert_eq!(open_error(FileStore::open(path("file").join("below"))).unwrap(), libc::ENOTDIR);
    assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
    for other in [path("pipe"), "/dev/null".into()] {
        for opened in [FileStore::open(&other), FileStore::open_read_only(&other)] {
            assert!(matches!(open_error(opened), Err(Error::Unsupported { .. })), "{other:?}");
        }
    }
    for block in [0, 1000] {
        let opened = FileOptions::new().block_bytes(block).open(path("file"));
        assert!(matches!(open_error(opened), Err(Error::BadAlignment { .. })), "{block}");
    }
    let text = FileStore::open(path("missing")).unwrap_err().to_string();
    assert!(text.starts_with("opening a file: No such file"), "{text}");
}

/// A read-only store must reject writes before any byte is written.
#[test]
fn read_only_stores_reject_writes() {
    let folder = folder();
    let path = folder.path().join("file");
    fs::write(&path, b"bytes").unwrap();
    let store = FileStore::open_read_only(&path).unwrap();
    assert!(!store.is_writable() && FileStore::open(&path).unwrap().is_writable());
    let errors = [store.write(0, b"other"), store.set_size(0), store.write(0, b"")];
    assert!(errors.into_iter().all(|result| result.unwrap_err().raw_os_error() == Some(libc::EBADF)));
    store.sync().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"bytes");
}

/// Only one store may write to a file at a time, by whatever path the file was opened. Any number of stores may read
/// the file. Once the writing store is dropped, another store may write.
#[test]
fn a_second_writer_is_refused() {
    let folder = folder();
    let (path, link, second) = (folder.path().join("file"), folder.path().join("link"), folder.path().join("second"));
    let first = FileStore::create(&path).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    fs::hard_link(&path, &second).unwrap();
    for name in [&path, &link, &second] {
        assert!(is_busy(FileStore::open(name)) && is_busy(FileStore::create(name)), "{name:?}");
    }
    // The refusals come from a list in this process. Where files have no locks, only this list refuses. Repeated checks
    // must not change it.
    for _ in 0..3 {
        let Err(Error::Busy { what }) = open_error(FileStore::open(&path)) else { panic!("not refused") };
        assert_eq!(what, "another store of this process writes to the file");
    }
    let readers = [FileStore::open_read_only(&path).unwrap(), FileStore::open_read_only(&link).unwrap()];
    first.write(0, b"bytes").unwrap();
    assert!(readers.iter().all(|reader| read(reader, 0, 5) == b"bytes"));
    drop(first);
    FileStore::open(&second).unwrap().write(0, b"other").unwrap();
    assert!(readers.iter().all(|reader| read(reader, 0, 5) == b"other"));
}

/// Returns a command that runs the test `test` again in a child process, with `argument`.
fn child_command(test: &str, argument: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD_ENV, argument);
    command
}

fn child_argument() -> Option<PathBuf> {
    std::env::var_os(CHILD_ENV).map(PathBuf::from)
}

fn assert_passes(mut command: Command) -> String {
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    stdout
}

/// Two processes open a file as a store. The second writer must be refused, but a reader must not be refused.
#[test]
fn a_writer_of_another_process_is_refused() {
    if let Some(path) = child_argument() {
        assert!(is_busy(FileStore::open(&path)));
        return assert_eq!(read(&FileStore::open_read_only(&path).unwrap(), 0, 5), b"bytes");
    }
    let folder = folder();
    let path = folder.path().join("file");
    let store = FileStore::create(&path).unwrap();
    store.write(0, b"bytes").unwrap();
    assert_passes(child_command("a_writer_of_another_process_is_refused", &path));
}

/// A child process runs with a limit of the file size (`RLIMIT_FSIZE`). A write beyond the limit must lead to an error
/// instead of a deadly signal, and must write nothing.
#[test]
fn exceeding_the_file_size_limit_is_an_error() {
    const TEST_NAME: &str = "exceeding_the_file_size_limit_is_an_error";
    if let Some(path) = child_argument() {
        let store = FileStore::create(path).unwrap();
        store.write(0, &aligned(&[1; 4 * KIB])).unwrap();
        let errors = [store.write(0, &aligned(&[2; MIB])), store.set_size(MIB as u64), store.write(1 << 40, b"x")];
        assert!(errors.into_iter().all(|result| result.unwrap_err().raw_os_error() == Some(libc::EFBIG)));
        assert!(store.size_bytes().unwrap() == 4 * KIB as u64 && read(&store, 0, 4 * KIB) == [1; 4 * KIB]);
        for engine in [Engine::Best, Engine::Threads] {
            let mut ring = ring(engine);
            let file = ring.attach(&store).unwrap();
            ring.write(file, 0, aligned(&[3; MIB])).unwrap();
            assert_eq!(next_completion(&mut ring).1.unwrap_err().raw_os_error(), Some(libc::EFBIG));
        }
        return;
    }
    let folder = folder();
    let inner = child_command(TEST_NAME, &folder.path().join("file"));
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 64; exec \"$0\" \"$@\""]).arg(inner.get_program()).args(inner.get_args());
    limited.env(CHILD_ENV, folder.path().join("file"));
    assert_passes(limited);
}

/// Offsets beyond the maximum must lead to errors, even for reads.
#[test]
fn offsets_beyond_the_maximum_are_errors() {
    let folder = folder();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    for offset in [1 << 63, u64::MAX] {
        assert!(store.read(offset, &mut [0; 8]).is_err() && store.write(offset, &[0; 8]).is_err(), "{offset}");
        assert!(store.set_size(offset).is_err());
    }
    assert_eq!(store.size_bytes().unwrap(), 0);
}

fn ring(engine: Engine) -> Ring<Aligned> {
    Ring::new(&Settings { depth: 16, engine, ..Settings::default() }).unwrap()
}

/// Waits for the next completed transfer of the ring, and returns its buffer and its result.
fn next_completion(ring: &mut Ring<Aligned>) -> (Aligned, io::Result<()>) {
    ring.wait(1, WAIT_LIMIT).unwrap();
    match ring.next() {
        Some(Event::Done { buffer, result, .. }) => (buffer, result),
        other => panic!("{other:?}"),
    }
}

/// A ring and threads make the same random transfers. Both must produce the same file. Within a round the transfers do
/// not overlap.
#[test]
fn threads_and_rings_produce_the_same_file() {
    let folder = folder();
    let files = [Engine::Best, Engine::Threads].map(|engine| {
        let path = folder.path().join(format!("{engine:?}"));
        let store = FileStore::create(&path).unwrap();
        let (mut ring, mut random, mut model) = (ring(engine), Random(9), vec![0u8; 0]);
        assert!(engine == Engine::Best || !ring.is_kernel());
        let file = ring.attach(&store).unwrap();
        for round in 0..40 {
            for place in 0..16 {
                let (offset, len) = (place * 64 * KIB + random.below(3) * 512, 1 + random.below(48 * KIB));
                let bytes = pattern(len, (round * 16 + place) as u8);
                ring.write(file, offset as u64, aligned(&bytes)).unwrap();
                model.resize(model.len().max(offset + len), 0);
                model[offset..offset + len].copy_from_slice(&bytes);
            }
            (0..16).for_each(|_| next_completion(&mut ring).1.unwrap());
            let at = random.below(MIB);
            ring.read(file, at as u64, aligned(&[0xEE; 10_000])).unwrap();
            let (back, result) = next_completion(&mut ring);
            result.unwrap();
            let expected = model.get(at..).unwrap_or_default();
            let expected = &expected[..expected.len().min(10_000)];
            assert!(back.starts_with(expected) && back[expected.len()..].iter().all(|byte| *byte == 0));
        }
        let bytes = fs::read(&path).unwrap();
        assert!(bytes == model);
        bytes
    });
    assert!(files[0] == files[1]);
}

/// An environment variable is set so that rings use threads instead of io_uring. A ring must then use threads.
#[test]
fn an_environment_variable_selects_threads() {
    const TEST_NAME: &str = "an_environment_variable_selects_threads";
    if child_argument().is_some() {
        assert!(!ring(Engine::Best).is_kernel());
        return assert_eq!(stats::get(Counter::RingsRefused), 0, "threads were selected, so no ring was refused");
    }
    let mut command = child_command(TEST_NAME, Path::new("yes"));
    command.env("PAGEMILL_IO", "threads");
    assert_passes(command);
}

/// An unprivileged user may not lock memory. Registering memory must fail, and transfers must still work.
#[test]
fn transfers_work_without_registered_memory() {
    const TEST_NAME: &str = "transfers_work_without_registered_memory";
    if let Some(path) = child_argument() {
        let store = FileStore::create(path).unwrap();
        let mut ring = ring(Engine::Best);
        if !ring.is_kernel() {
            return println!("skipped: no ring for this user");
        }
        let file = ring.attach(&store).unwrap();
        match ring.register(Box::new(aligned(&[0; MIB]))) {
            Ok(_) => panic!("a megabyte was locked"),
            Err((error, memory)) => {
                assert!(error.raw_os_error() == Some(libc::ENOMEM) && memory.len_bytes() == MIB, "{error}");
            }
        }
        assert!(stats::get(Counter::RegionsRefused) == 1 && stats::get(Counter::RegionsRegistered) == 0);
        ring.write(file, 0, aligned(&pattern(9000, 4))).unwrap();
        next_completion(&mut ring).1.unwrap();
        return assert!(read(&store, 0, 9000) == pattern(9000, 4));
    }
    if !is_root() {
        return println!("skipped: only root becomes a user without privileges");
    }
    // The unprivileged user may not have access to this program's directory, so the child runs a copy.
    let folder = folder();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let program = folder.path().join("tests");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -l 0; exec \"$0\" \"$@\""]).arg(program).args(["--exact", TEST_NAME, "--nocapture"]);
    limited.env(CHILD_ENV, folder.path().join("file")).current_dir(folder.path()).uid(65534).gid(65534);
    print!("{}", assert_passes(limited));
}

/// Many transfers are started together. Each must complete once, with the right bytes. Transfers that are cancelled
/// before they begin must complete as cancelled.
#[test]
fn each_started_transfer_completes_once() {
    let folder = folder();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    let (sender, ended) = mpsc::channel();
    let callback = |at: usize| {
        let sender = sender.clone();
        move |result: io::Result<()>, memory: Aligned| {
            sender.send((at, result.map_err(|error| error.raw_os_error()), memory)).unwrap();
        }
    };
    let len = 4 * KIB;
    let writes = (0..500).map(|at| Transfer::write((at * len) as u64, aligned(&pattern(len, at as u8)), callback(at)));
    store.start(writes.collect());
    for _ in 0..500 {
        ended.recv_timeout(WAIT_LIMIT).unwrap().1.unwrap();
    }
    let reads = (0..500).map(|at| Transfer::read((at * len) as u64, Aligned::new(len, len), callback(at)));
    store.start(reads.collect());
    for _ in 0..500 {
        let (at, result, memory) = ended.recv_timeout(WAIT_LIMIT).unwrap();
        result.unwrap();
        assert!(memory[..] == pattern(len, at as u8));
    }
    let cancel = Cancel::new();
    cancel.cancel();
    let cancelled = |at: usize| Transfer::write(0, aligned(&[0; 4 * KIB]), callback(at)).with_cancel(&cancel);
    store.start((0..20).map(cancelled).collect());
    for _ in 0..20 {
        assert_eq!(ended.recv_timeout(WAIT_LIMIT).unwrap().1, Err(Some(libc::ECANCELED)));
    }
    assert!(read(&store, 0, len) == pattern(len, 0));
}

/// Transfers are cancelled at any time. Each must complete once: successfully, or as cancelled.
#[test]
fn cancelled_transfers_complete_once() {
    let folder = folder();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    let bytes = pattern(16 * MIB, 1);
    store.write(0, &aligned(&bytes)).unwrap();
    for round in 0..20 {
        let (sender, ended) = mpsc::channel();
        let cancel = Cancel::new();
        let reads = (0..16).map(|at| {
            let sender = sender.clone();
            let done = move |result: io::Result<()>, memory: Aligned| sender.send((at, result, memory)).unwrap();
            Transfer::read((at * MIB) as u64, Aligned::new(MIB, 4 * KIB), done).with_cancel(&cancel)
        });
        store.start(reads.collect());
        drop(sender);
        let begun: Vec<_> = ended.iter().take(round % 17).collect();
        cancel.cancel();
        let ends: Vec<_> = begun.into_iter().chain(ended.iter()).collect();
        assert_eq!(ends.len(), 16);
        for (at, result, memory) in ends {
            match result {
                Ok(()) => assert!(memory[..] == bytes[at * MIB..(at + 1) * MIB]),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ECANCELED)),
            }
        }
    }
}

/// A ring is dropped while transfers are in flight. The drop must wait for the transfers or cancel them before it frees
/// their memory.
#[test]
fn rings_are_dropped_with_transfers_in_flight() {
    let folder = folder();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    store.write(0, &aligned(&pattern(16 * MIB, 1))).unwrap();
    let stuck_before = stats::get(Counter::TransfersStuck);
    for round in 0..20 {
        let mut ring = ring(if round % 2 == 0 { Engine::Best } else { Engine::Threads });
        let file = ring.attach(&store).unwrap();
        for at in 0..16 {
            assert!(ring.read(file, (at * MIB) as u64, Aligned::new(MIB, 4 * KIB)).is_ok());
        }
        if round % 3 > 0 {
            ring.submit().unwrap();
        }
    }
    assert_eq!(stats::get(Counter::TransfersStuck), stuck_before);
}

/// Errors of a store must reach the caller unchanged, from blocking and from queued calls. A write that fails must
/// leave the file unchanged.
#[test]
fn errors_of_a_store_reach_the_caller() {
    let folder = folder();
    let store = FaultyStore::new(FileStore::create(folder.path().join("file")).unwrap());
    store.write(0, &aligned(&pattern(8 * KIB, 1))).unwrap();
    assert!(store.as_file().is_none(), "no call can bypass the injected faults");
    store.set_faults(Faults { fail_per_mille: 1000, ..Faults::default() });
    let errors = [store.read(0, &mut [0; 8]), store.write(0, &[0; 8]), store.sync(), store.set_size(0)];
    assert!(errors.into_iter().all(|result| result.unwrap_err().raw_os_error() == Some(libc::EIO)));
    let (sender, ended) = mpsc::channel();
    let done = move |result: io::Result<()>, _| sender.send(result).unwrap();
    store.start(vec![Transfer::write(0, aligned(&[0; 512]), done)]);
    assert_eq!(ended.recv_timeout(WAIT_LIMIT).unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(read(store.inner(), 0, 8 * KIB) == pattern(8 * KIB, 1));
    assert_eq!((store.calls().failed, store.calls().count()), (5, 6));
}

/// A discarded range must read as zeros and use no blocks of the file system. The bytes around it and the length must
/// stay. A read-only store must refuse.
#[test]
fn discarded_ranges_use_no_space() {
    use std::os::unix::fs::MetadataExt;
    let folder = folder();
    let path = folder.path().join("file");
    let store = FileStore::create(&path).unwrap();
    store.write(0, &aligned(&pattern(MIB, 5))).unwrap();
    store.sync().unwrap();
    let before = fs::metadata(&path).unwrap().blocks();
    store.discard(256 * KIB as u64, 512 * KIB as u64).unwrap();
    assert!(fs::metadata(&path).unwrap().blocks() <= before - 1000, "512 KiB are 1024 blocks");
    let mut expected = pattern(MIB, 5);
    expected[256 * KIB..768 * KIB].fill(0);
    assert!(read(&store, 0, MIB) == expected && store.size_bytes().unwrap() == MIB as u64);
    assert!(FileStore::open_read_only(&path).unwrap().discard(0, 4096).is_err());
}
