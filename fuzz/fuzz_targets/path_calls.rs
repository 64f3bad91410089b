//! Makes random calls with paths on a RAM file system. Each call has an opcode, a number, and one or two paths of any
//! bytes, which the input contains as length and bytes.
//!
//! Run it by `cargo +nightly fuzz run path_calls`. The first byte of an input chooses the number of significant bits in
//! the hashes of names and the number of negative dentries. At the end, the inodes that a walk sees must be those that
//! are counted, and removing everything must leave nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_ramfs::{Allocate, Caller, File, OpenOptions, RamFs, Rename, SetAttr, SetXattr};
use pagemill_testbed::Testbed;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// A path: one of few short ones, or bytes of the input.
    fn path(&mut self) -> Option<&'a Path> {
        const SHORT: [&str; 8] = ["/a", "/b", "/a/b", "/a/c", "/b/a/c", "/a/../b", "/l/x", "/a/b/"];
        let len = usize::from(self.byte()?);
        if let Some(short) = SHORT.get(len) {
            return Some(Path::new(short));
        }
        let (path, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        Some(Path::new(OsStr::from_bytes(path)))
    }
}

fn call(fs: &RamFs, files: &mut Vec<File>, input: &mut Input<'_>) -> Option<()> {
    let (code, number) = (input.byte()?, input.byte()?);
    let one = input.path()?;
    let how = [Rename::Replace, Rename::NoReplace, Rename::Exchange][usize::from(number) % 3];
    let user = fs.as_caller(Caller::new(u32::from(number % 3), 1));
    let size = u64::from(number) << (number % 32);
    match code % 18 {
        0 => drop(fs.write(one, &vec![number; usize::from(number) * 40])),
        1 => drop(user.create_dir(one)),
        2 => drop(user.remove_file(one)),
        3 => drop(user.remove_dir(one)),
        4 => drop(fs.rename_with(one, input.path()?, how)),
        5 => drop(fs.hard_link(one, input.path()?)),
        6 => drop(fs.symlink(input.path()?, one)),
        7 => drop(user.read(one)),
        8 => drop(fs.read_dir(one)),
        9 => drop(fs.metadata(one)),
        10 => drop(fs.symlink_metadata(one)),
        11 => files.extend(fs.open(one, &OpenOptions::from_flags(i32::from(number) * 5)).ok()),
        12 => files.extend(fs.open_nameless(one, &OpenOptions::new().read(true).write(true)).ok()),
        13 => drop(user.set_attributes(one, &SetAttr { size_bytes: Some(size), ..SetAttr::default() })),
        14 => drop(user.set_mode(one, u32::from(number) * 16)),
        15 => drop(fs.set_xattr(one, "user.x", &[number], SetXattr::Either)),
        16 => {
            if let Some(file) = files.last() {
                let _ = file.write_at(&[number; 100], size);
                let _ = file.allocate(Allocate::Punch, size, 5000);
                let _ = file.link_at(fs, one);
            }
            files.truncate(usize::from(number) % 4);
        }
        _ => drop(fs.shrink().unwrap()),
    }
    Some(())
}

fuzz_target!(|bytes: &[u8]| {
    thread_local! {
        static TESTBED: &'static Testbed = Testbed::for_test();
    }
    let mut input = Input(bytes);
    let Some(first) = input.byte() else { return };
    let testbed = TESTBED.with(|testbed| *testbed);
    let builder = RamFs::builder("fuzz").bytes(1 << 20).inodes(200).negative_dentries(usize::from(first % 4));
    let builder = builder.hash_bits(if first & 4 == 0 { 5 } else { 62 });
    let fs = builder.build_in(testbed.slabs, testbed.caches).unwrap();
    let mut files = Vec::new();
    while call(&fs, &mut files, &mut input).is_some() {}
    files.clear();
    let mut inodes = BTreeSet::new();
    fs.walk_tree("/", |_, entry| {
        inodes.insert(entry.ino);
        true
    })
    .unwrap();
    assert_eq!(inodes.len() as u64 + 1, fs.usage().inodes);
    for entry in fs.read_dir("/").unwrap() {
        let path = Path::new("/").join(&entry.name);
        let removed = fs.remove_file(&path).or_else(|_| fs.remove_dir_all(&path));
        removed.unwrap();
    }
    let usage = fs.usage();
    assert_eq!((usage.inodes, usage.bytes, usage.inodes_in_use), (1, 0, 1));
});
