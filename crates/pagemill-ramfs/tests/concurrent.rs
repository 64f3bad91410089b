//! Threads that change, walk, list and shrink one file system at the same time, and what is left afterwards.

use pagemill_ramfs::{Error, OpenOptions, RamFs, Rename};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

const RUN: Duration = Duration::from_millis(1500);

fn expect(result: Result<(), Error>, allowed: &[i32]) {
    if let Err(error) = result {
        assert!(allowed.contains(&error.errno()), "{error}");
    }
}

/// Three threads create, remove, link and rename in four directories, one renames the directories themselves, one
/// shrinks, and two walk. Files that no thread changes must be found by each walk and listed once by each listing. At
/// the end all objects must be freed.
#[test]
fn walks_stay_right_during_changes_and_shrinks() {
    let fs = RamFs::builder("threads").bytes(64 << 20).negative_dentries(50).build().unwrap();
    let stays: BTreeSet<String> = (0..200).map(|i| format!("stays{i}")).collect();
    for dir in 0..4 {
        fs.create_dir_all(format!("/top/dir{dir}")).unwrap();
        stays.iter().for_each(|name| fs.write(format!("/top/dir{dir}/{name}"), b"").unwrap());
    }
    let is_over = AtomicBool::new(false);
    let run = |mut act: Box<dyn FnMut(&mut fastrand::Rng) + Send + '_>, seed| {
        let mut random = fastrand::Rng::with_seed(seed);
        while !is_over.load(Relaxed) {
            act(&mut random);
        }
    };
    thread::scope(|scope| {
        for seed in 0..3 {
            let fs = &fs;
            let change = move |random: &mut fastrand::Rng| {
                let mut path = || format!("/top/dir{}/file{}", random.u8(..4), random.u8(..50));
                let (one, two) = (path(), path());
                let races = [libc::ENOENT, libc::EEXIST];
                match random.u8(..6) {
                    0 | 1 => expect(fs.write(&one, b"x"), &races),
                    2 | 3 => expect(fs.remove_file(&one), &races),
                    4 => expect(fs.hard_link(&one, &two), &races),
                    _ if random.bool() => expect(fs.rename(&one, &two), &races),
                    _ => expect(fs.rename_with(&one, &two, Rename::Exchange), &races),
                }
            };
            scope.spawn(move || run(Box::new(change), seed));
        }
        scope.spawn(|| {
            let swap = |random: &mut fastrand::Rng| {
                let (one, two) = (random.u8(..4), random.u8(..4));
                let races = [libc::ENOENT, libc::EINVAL];
                expect(fs.rename_with(format!("/top/dir{one}"), format!("/top/dir{two}"), Rename::Exchange), &races);
            };
            run(Box::new(swap), 10);
        });
        scope.spawn(|| {
            let shrink = |random: &mut fastrand::Rng| {
                let shrunk = if random.bool() { fs.shrink() } else { fs.shrink_partially(100) };
                assert!(shrunk.is_ok() || matches!(shrunk, Err(Error::Memory(_))), "{shrunk:?}");
            };
            run(Box::new(shrink), 20);
        });
        for seed in 30..32 {
            let (fs, stays) = (&fs, &stays);
            let look = move |random: &mut fastrand::Rng| {
                let dir = random.u8(..4);
                let found = fs.metadata(format!("/top/dir{dir}/stays{}", random.u8(..200)));
                assert_eq!(found.unwrap().links, 1);
                assert!(!fs.exists(format!("/top/dir{dir}/missing{}", random.u8(..100))));
                let listed = fs.read_dir(format!("/top/dir{dir}")).unwrap();
                let names = listed.into_iter().map(|entry| entry.name.into_string().unwrap());
                let kept: Vec<String> = names.filter(|name| name.starts_with("stays")).collect();
                assert_eq!(kept.len(), stays.len());
                assert_eq!(kept.into_iter().collect::<BTreeSet<_>>(), *stays);
            };
            scope.spawn(move || run(Box::new(look), seed));
        }
        thread::sleep(RUN);
        is_over.store(true, Relaxed);
    });
    let mut seen = 0;
    fs.walk_tree("/top", |_, _| {
        seen += 1;
        true
    })
    .unwrap();
    assert!(seen >= 4 * (stays.len() + 1));
    fs.remove_dir_all("/top").unwrap();
    fs.shrink().unwrap();
    let usage = fs.usage();
    assert_eq!((usage.inodes, usage.bytes, usage.inodes_in_use, usage.negative_dentries), (1, 0, 1, 0));
}

/// A file is created and removed more often than a handle has generations. The handle must be given up and counted, and
/// the next files must work. Names of files that were opened before must not find later ones.
#[test]
fn handles_wear_out_and_are_counted() {
    const GENERATIONS: u64 = 1 << 19;
    let fs = RamFs::builder("generations").build().unwrap();
    let options = OpenOptions::new().read(true).write(true).create_new(true);
    let first = fs.open("/name", &options).unwrap();
    fs.remove_file("/name").unwrap();
    let began = Instant::now();
    let mut rounds = 0;
    while fs.usage().worn_out_handles < 2 {
        for _ in 0..10_000 {
            drop(fs.open("/name", &options).unwrap());
            fs.remove_file("/name").unwrap();
        }
        rounds += 10_000;
        assert!(rounds < 200 * GENERATIONS, "no handle wore out in {:?}", began.elapsed());
    }
    assert!(rounds >= GENERATIONS - 10_000);
    first.write_at(b"first", 0).unwrap();
    fs.write("/name", b"last").unwrap();
    assert_eq!((fs.read("/name").unwrap(), first.size_bytes()), (b"last".to_vec(), 5));
}
