//! Path walks, renames and shrinks at the same time, in random schedules.

use crate::fs::volatile::Purge;
use crate::{Builder, Error, OpenOptions, RamFs, Rename, Whence};
use pagemill_core::sync::modelled::reset_clock;
use pagemill_core::units::PageSize;
use pagemill_store::MemoryStore;
use pagemill_testbed::Testbed;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::sync::Arc;

/// Depth of the PCT schedules (probabilistic concurrency testing): at up to `PCT_DEPTH - 1` random steps, the running
/// thread gets the lowest priority.
const PCT_DEPTH: usize = 4;

/// Maximum number of steps of a run. A longer run waits for an event that never comes.
const MAX_STEPS: usize = 2_000_000;

/// Bytes of a segment of the spill store.
const SEGMENT: usize = 256 << 10;

/// Number of schedules of each kind. Reserved addresses are never freed, so there are few.
const RUNS: usize = 60;

/// Runs a test on a new file system in many schedules.
fn run_in_many_schedules(run: impl Fn(RamFs) + Clone + Send + Sync + 'static) {
    run_with_settings(|builder| builder.negative_dentries(1), run);
}

/// As [`run_in_many_schedules`], with other settings of the file system.
fn run_with_settings(settings: fn(Builder) -> Builder, run: impl Fn(RamFs) + Clone + Send + Sync + 'static) {
    let config = || {
        let mut config = Config::new();
        (config.stack_size, config.max_steps) = (1 << 20, MaxSteps::FailAfter(MAX_STEPS));
        config
    };
    let begin = move || {
        reset_clock();
        let testbed = Testbed::for_test();
        testbed.caches.collapse_by_hand();
        let builder = settings(RamFs::builder("shuttle").bytes(1 << 20));
        run(builder.build_in(testbed.slabs, testbed.caches).unwrap());
    };
    Runner::new(RandomScheduler::new(RUNS), config()).run(begin.clone());
    Runner::new(PctScheduler::new(PCT_DEPTH, RUNS), config()).run(begin);
}

/// One thread renames a file within a directory, one gives all objects lower handles and moves them, and one walks. A
/// walk must find the file that stays. A look-up of either name of the other file must find that inode or nothing. A
/// listing of this small directory is of one moment, so it must have exactly one of the two names.
#[test]
fn walks_meet_renames_and_shrinks() {
    run_in_many_schedules(|fs| {
        fs.create_dir("/d").unwrap();
        // Leaves holes before the handles that stay, so that the shrink has something to do.
        (0..4).for_each(|i| fs.write(format!("/d/gone{i}"), b"").unwrap());
        fs.write("/d/stays", b"").unwrap();
        fs.write("/d/one", b"").unwrap();
        (0..4).for_each(|i| fs.remove_file(format!("/d/gone{i}")).unwrap());
        let [stays, moved] = ["/d/stays", "/d/one"].map(|path| fs.metadata(path).unwrap().ino);
        let renaming = fs.clone();
        let renamer = shuttle::thread::spawn(move || {
            renaming.rename("/d/one", "/d/two").unwrap();
            renaming.rename_with("/d/two", "/d/one", Rename::NoReplace).unwrap();
        });
        let shrinking = fs.clone();
        let shrinker = shuttle::thread::spawn(move || shrinking.inner.renumber_all());
        for _ in 0..2 {
            assert_eq!(fs.metadata("/d/stays").unwrap().ino, stays);
            for path in ["/d/one", "/d/two"] {
                match fs.metadata(path) {
                    Ok(attr) => assert_eq!(attr.ino, moved),
                    Err(error) => assert!(matches!(error, Error::NotFound), "{error}"),
                }
            }
            let entries = fs.read_dir("/d").unwrap();
            let count = |ino| entries.iter().filter(|entry| entry.ino == ino).count();
            assert_eq!(count(stays), 1, "{entries:?}");
            assert_eq!(count(moved), 1, "a rename within a directory is one change: {entries:?}");
        }
        renamer.join().unwrap();
        shrinker.join().unwrap();
        assert_eq!(fs.metadata("/d/one").unwrap().ino, moved);
    });
}

/// Two threads create the same name, one removes it, and one renames a directory above it. Each inode must be freed
/// once, and at most one creation may find the name free at a time.
#[test]
fn creations_meet_removals_and_moves() {
    run_in_many_schedules(|fs| {
        fs.create_dir_all("/a/b").unwrap();
        fs.create_dir("/c").unwrap();
        let create = |fs: RamFs| {
            move || {
                ["/a/b/x", "/c/b/x"].map(|path| match fs.open(path, &OpenOptions::new().write(true).create_new(true)) {
                    Ok(file) => u32::from(file.metadata().unwrap().links <= 1),
                    Err(error) => {
                        assert!(matches!(error, Error::NotFound | Error::Exists), "{error}");
                        0
                    }
                })
            }
        };
        let creators = [0, 1].map(|_| shuttle::thread::spawn(create(fs.clone())));
        let moving = fs.clone();
        let mover = shuttle::thread::spawn(move || moving.rename("/a/b", "/c/b").unwrap());
        let removed = ["/a/b/x", "/c/b/x"].map(|path| u32::from(fs.remove_file(path).is_ok()));
        let made: u32 = creators.into_iter().flat_map(|creator| creator.join().unwrap()).sum();
        mover.join().unwrap();
        let left = fs.read_dir("/c/b").unwrap().len() as u32;
        assert_eq!(made, removed.iter().sum::<u32>() + left);
        assert_eq!(fs.usage().inodes, 4 + u64::from(left), "root, /a, /c, /c/b");
    });
}

/// One thread writes a file, opening and closing it, while another gives all objects lower handles. The file must have
/// the bytes.
#[test]
fn writes_meet_shrinks() {
    run_in_many_schedules(|fs| {
        fs.write("/gone", b"").unwrap();
        fs.write("/file", b"").unwrap();
        fs.remove_file("/gone").unwrap();
        let shrinking = fs.clone();
        let shrinker = shuttle::thread::spawn(move || shrinking.inner.renumber_all());
        fs.write("/file", b"bytes").unwrap();
        shrinker.join().unwrap();
        assert_eq!(fs.read("/file").unwrap(), b"bytes");
        assert_eq!(fs.usage().bytes, fs.usage().page_bytes);
    });
}

/// One thread ends the mark of a volatile file while another purges. If the end of the mark reports no purge, the file
/// must keep its bytes, also later.
#[test]
fn unmarks_meet_purges() {
    run_in_many_schedules(|fs| {
        fs.write("/file", b"bytes").unwrap();
        fs.mark_volatile("/file").unwrap();
        let purging = fs.clone();
        let purger = shuttle::thread::spawn(move || purging.inner.purge_one(Purge::Memory));
        let reading = fs.clone();
        let reader = shuttle::thread::spawn(move || reading.read("/file").unwrap());
        let was_purged = fs.unmark_volatile("/file").unwrap();
        let has_freed = purger.join().unwrap();
        reader.join().unwrap();
        assert_eq!(was_purged, has_freed);
        assert!(!fs.inner.purge_one(Purge::Memory), "nothing is volatile any more");
        assert_eq!(fs.read("/file").unwrap().is_empty(), was_purged);
    });
}

/// Adds a spill store in memory.
fn spill_to_memory(builder: Builder) -> Builder {
    let store = Arc::new(MemoryStore::new(Vec::new(), 512));
    builder.page(PageSize::new(64 << 10).unwrap()).spill(store, 8 << 20)
}

/// A file of five segments, of which four fit into memory, is truncated while one thread reads it and one writes another
/// file, so that segments of the first move in both directions. The file must have its new length, its bytes, and zeros
/// behind them when it grows again.
#[test]
fn truncations_meet_moves_to_the_spill_store() {
    run_with_settings(spill_to_memory, |fs| {
        fs.write("/file", &vec![1; 5 * SEGMENT]).unwrap();
        let file = fs.open("/file", &OpenOptions::new().read(true).write(true)).unwrap();
        let reading = fs.clone();
        let reader = shuttle::thread::spawn(move || {
            let file = reading.open("/file", &OpenOptions::new().read(true)).unwrap();
            for at in [70_000, SEGMENT as u64 + 5, 70_000] {
                let mut bytes = [2; 10];
                let len = file.read_at(&mut bytes, at).unwrap();
                assert!(bytes[..len] == [1; 10][..len] || bytes[..len] == [0; 10][..len], "{bytes:?}");
            }
        });
        let writing = fs.clone();
        let writer = shuttle::thread::spawn(move || writing.write("/other", &vec![3; SEGMENT]).unwrap());
        file.set_size(100_000).unwrap();
        reader.join().unwrap();
        writer.join().unwrap();
        assert_eq!(file.size_bytes(), 100_000);
        file.set_size(2 * SEGMENT as u64).unwrap();
        let bytes = fs.read("/file").unwrap();
        assert!(bytes[..100_000].iter().all(|byte| *byte == 1) && bytes[100_000..].iter().all(|byte| *byte == 0));
        assert!(fs.read("/other").unwrap().iter().all(|byte| *byte == 3));
    });
}

/// A file that fills memory is truncated while another thread writes a file. The write must find room: in the spill
/// store, or through the truncation.
#[test]
fn writes_meet_truncations_with_a_full_memory() {
    run_with_settings(spill_to_memory, |fs| {
        fs.write("/file", &vec![1; 4 * SEGMENT]).unwrap();
        let file = fs.open("/file", &OpenOptions::new().write(true)).unwrap();
        let writing = fs.clone();
        let writer = shuttle::thread::spawn(move || writing.write("/other", &[3]).unwrap());
        file.set_size(0).unwrap();
        writer.join().unwrap();
        assert_eq!(fs.read("/other").unwrap(), [3]);
    });
}

/// A thread looks for data and holes of a file while another one truncates and extends it. Each search must return an
/// offset from its start on, or none. A search from the begin of a file with bytes must find an offset.
#[test]
fn searches_meet_truncations() {
    run_with_settings(spill_to_memory, |fs| {
        fs.write("/file", &vec![1; 2 * SEGMENT]).unwrap();
        fs.write("/fill", &vec![2; 4 * SEGMENT]).unwrap();
        let file = fs.open("/file", &OpenOptions::new().write(true)).unwrap();
        let searching = fs.clone();
        let searcher = shuttle::thread::spawn(move || {
            let file = searching.open("/file", &OpenOptions::new().read(true)).unwrap();
            assert!(file.seek(Whence::Hole, 0).unwrap() <= 4 * SEGMENT as u64);
            let start = SEGMENT as u64 + 1;
            for whence in [Whence::Data, Whence::Hole] {
                assert!(file.seek(whence, start).unwrap_or(start) >= start);
            }
            assert!(file.metadata().unwrap().allocated_bytes <= 2 * SEGMENT as u64);
        });
        file.set_size(100_000).unwrap();
        file.set_size(4 * SEGMENT as u64).unwrap();
        searcher.join().unwrap();
    });
}

/// Memory and the spill store are full, and a volatile file is in the store. A write must purge it, also while another
/// thread reads and so moves segments.
#[test]
fn purges_in_a_full_store_meet_reads() {
    let settings = |builder: Builder| {
        let store = Arc::new(MemoryStore::new(Vec::new(), 512));
        builder.page(PageSize::new(64 << 10).unwrap()).spill(store, 1 << 20)
    };
    run_with_settings(settings, |fs| {
        fs.write("/volatile", &vec![1; SEGMENT]).unwrap();
        fs.write("/data", &vec![2; 7 * SEGMENT]).unwrap();
        fs.mark_volatile("/volatile").unwrap();
        let reading = fs.clone();
        let reader = shuttle::thread::spawn(move || {
            let file = reading.open("/data", &OpenOptions::new().read(true)).unwrap();
            for at in [0, 3 * SEGMENT as u64] {
                let mut bytes = [0; 10];
                assert_eq!((file.read_at(&mut bytes, at).unwrap(), bytes), (10, [2; 10]));
            }
        });
        fs.write("/new", &[3]).unwrap();
        reader.join().unwrap();
        assert!(fs.unmark_volatile("/volatile").unwrap());
        assert_eq!(fs.read("/new").unwrap(), [3]);
    });
}
