//! Memory that comes back: by moves and new handles, by freeing the negative dentries of sparse slabs, and without
//! mobility.

use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_ramfs::{Builder, Error, OpenOptions, RamFs};
use pagemill_testbed::Testbed;

const FILES: usize = 20_000;

/// Makes a file system in an instance of its own, in which only explicit calls move objects.
fn new(change: impl FnOnce(Builder) -> Builder) -> RamFs {
    // Blocks get memory slab by slab, as in a small program.
    let layout = Layout { huge_from_bytes: Layout::for_program().huge_from_bytes, ..Layout::for_test() };
    let testbed = Testbed::new(layout, UNLIMITED).unwrap();
    testbed.slabs.defrag_by_hand();
    testbed.caches.collapse_by_hand();
    change(RamFs::builder("memory").bytes(16 << 20)).build_in(testbed.slabs, testbed.caches).unwrap()
}

fn path(file: usize) -> String {
    format!("/dir{}/file-{file:06}", file % 20)
}

fn fill(fs: &RamFs, files: impl Iterator<Item = usize>) {
    (0..20).for_each(|dir| fs.create_dir(format!("/dir{dir}")).unwrap());
    files.for_each(|file| drop(fs.open(path(file), &OpenOptions::new().write(true).create_new(true)).unwrap()));
}

/// Nine tenths of the files are removed at random. After a shrink the file system must take at most 1.25 times the
/// memory of a new one with the same files, and all files must be found by path and by number.
#[test]
fn shrunk_file_system_is_as_small_as_a_new_one() {
    let fs = new(|builder| builder);
    fill(&fs, 0..FILES);
    let full = fs.usage().metadata_bytes;
    let mut order: Vec<usize> = (0..FILES).collect();
    fastrand::Rng::with_seed(3).shuffle(&mut order);
    let (kept, removed) = order.split_at(FILES / 10);
    removed.iter().for_each(|file| fs.remove_file(path(*file)).unwrap());
    let inode_number = |file: &usize| fs.metadata(path(*file)).unwrap().ino;
    let numbers: Vec<u64> = kept.iter().map(inode_number).collect();
    let open = fs.open(path(kept[0]), &OpenOptions::new().read(true).write(true)).unwrap();
    let shrunk = fs.shrink().unwrap();
    assert!(shrunk.renumbered > 0 && shrunk.freed_bytes > full / 2, "{shrunk:?} of {full}");
    let fresh = new(|builder| builder);
    fill(&fresh, kept.iter().copied());
    fresh.shrink().unwrap();
    let (left, new) = (fs.usage().metadata_bytes, fresh.usage().metadata_bytes);
    assert!(left * 4 <= new * 5, "{left} bytes left, {new} in a new file system");
    assert_eq!(kept.iter().map(inode_number).collect::<Vec<_>>(), numbers);
    open.write_at(b"still open", 0).unwrap();
    assert_eq!(fs.read(path(kept[0])).unwrap(), b"still open");
    assert_eq!(fs.shrink().unwrap().renumbered, 0, "nothing is left to do");
}

/// Without mobility nothing moves and no handle changes. Empty slabs must still return.
#[test]
fn immovable_objects_stay() {
    let fs = new(|builder| builder.movable(false));
    fill(&fs, 0..FILES);
    let full = fs.usage().metadata_bytes;
    (0..FILES).filter(|file| file % 10 != 0).for_each(|file| fs.remove_file(path(file)).unwrap());
    assert_eq!(fs.shrink().unwrap().renumbered, 0);
    let sparse = fs.usage().metadata_bytes;
    assert!(sparse * 2 > full, "{sparse} of {full}: a tenth of the objects holds the slabs");
    (0..FILES).step_by(10).for_each(|file| fs.remove_file(path(file)).unwrap());
    fs.shrink().unwrap();
    assert!(fs.usage().metadata_bytes * 2 < full);
}

/// Many names that do not exist are looked up. At most the limit must be remembered, the ones found again must stay
/// longer, and a partial shrink must free those in sparse slabs only.
#[test]
fn negative_dentries_have_a_limit_and_are_freed_by_slab() {
    const LIMIT: usize = 5000;
    let fs = new(|builder| builder.negative_dentries(LIMIT));
    fs.create_dir("/dir").unwrap();
    let missing = |i: usize| format!("/dir/missing-{i:05}");
    (0..LIMIT).for_each(|i| assert!(!fs.exists(missing(i))));
    assert_eq!(fs.usage().negative_dentries as usize, LIMIT);
    assert!(!fs.exists(missing(0)), "found again, so it stays");
    (LIMIT..LIMIT + 100).for_each(|i| assert!(!fs.exists(missing(i))));
    assert_eq!(fs.usage().negative_dentries as usize, LIMIT);
    // A name that is created is negative no more; removed, it does not exist.
    fs.write(missing(7), b"now").unwrap();
    assert_eq!(fs.read(missing(7)).unwrap(), b"now");
    fs.remove_file(missing(7)).unwrap();
    assert!(!fs.exists(missing(7)) && fs.read_dir("/dir").unwrap().is_empty());

    // Files and missing names alternate, then three of four files go: every slab has both, and is half used at most.
    fs.shrink().unwrap();
    fs.create_dir("/mixed").unwrap();
    (0..LIMIT).for_each(|i| {
        fs.write(format!("/mixed/{i}"), b"").unwrap();
        assert!(!fs.exists(missing(i)));
    });
    assert_eq!(fs.shrink_partially(10).unwrap().freed_dentries, 0, "no slab is that sparse");
    (0..LIMIT).filter(|i| i % 4 > 0).for_each(|i| fs.remove_file(format!("/mixed/{i}")).unwrap());
    let before = fs.usage().negative_dentries;
    let shrunk = fs.shrink_partially(90).unwrap();
    assert!(shrunk.freed_dentries > 0 && shrunk.renumbered == 0);
    assert_eq!(fs.usage().negative_dentries, before - shrunk.freed_dentries);
    assert!((0..LIMIT).step_by(4).all(|i| fs.exists(format!("/mixed/{i}"))));
    fs.remove_dir_all("/mixed").unwrap();
    fs.remove_dir("/dir").unwrap();
    assert_eq!(fs.usage().negative_dentries, 0, "those of a removed directory go with it");
}

/// An instance with little memory: creations must fail with `ENOSPC` at some point, and leave nothing behind. After
/// removals there is room again.
#[test]
fn creations_fail_cleanly_without_memory() {
    let testbed = Testbed::new(Layout::for_test(), 24 << 20).unwrap();
    testbed.slabs.defrag_by_hand();
    testbed.caches.collapse_by_hand();
    let fs = RamFs::builder("little").bytes(4 << 20).build_in(testbed.slabs, testbed.caches).unwrap();
    for round in 0..3 {
        fs.create_dir("/dir").unwrap();
        let mut made = 0;
        let error = loop {
            match fs.open(format!("/dir/file-{made:07}"), &OpenOptions::new().write(true).create_new(true)) {
                Ok(_) => made += 1,
                Err(error) => break error,
            }
            assert!(made < 2_000_000, "the limit of 24 MiB was never reached");
        };
        assert_eq!(error.errno(), libc::ENOSPC, "{error}");
        assert!(made > 1000, "round {round}: {made}");
        assert_eq!((fs.read_dir("/dir").unwrap().len() as u64, fs.usage().inodes), (made, made + 2));
        for act in
            [fs.create_dir("/dir/new"), fs.symlink("x", "/dir/new"), fs.hard_link("/dir/file-0000000", "/dir/new")]
        {
            assert!(act.is_ok() || matches!(act, Err(Error::NoSpace { .. })), "{act:?}");
            let _ = fs.remove_file("/dir/new");
            let _ = fs.remove_dir("/dir/new");
        }
        for file in 0..made {
            // A removal may need memory, too: it must fail cleanly or work, and works after others were removed.
            match fs.remove_file(format!("/dir/file-{file:07}")) {
                Ok(()) => {}
                Err(Error::NoSpace { .. }) => assert!(fs.exists(format!("/dir/file-{file:07}"))),
                Err(error) => panic!("{error}"),
            }
        }
        fs.shrink().unwrap();
        fs.remove_dir_all("/dir").unwrap();
        fs.shrink().unwrap();
        assert_eq!(fs.usage().inodes, 1);
    }
}
