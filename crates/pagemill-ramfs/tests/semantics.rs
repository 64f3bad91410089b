//! The rules of names, renames, permissions and data, each as a tmpfs has them.

use pagemill_ramfs::{
    Access, Allocate, Caller, Error, EventKind, FileType, OpenOptions, Quota, RamFs, Rename, SetAttr, SetTime,
    SetXattr, Whence,
};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

fn new() -> RamFs {
    RamFs::builder("test").bytes(64 << 20).build().unwrap()
}

fn errno<T: std::fmt::Debug>(result: Result<T, Error>) -> i32 {
    result.unwrap_err().errno()
}

fn read_write() -> OpenOptions {
    OpenOptions::new().read(true).write(true).create(true)
}

fn names(fs: &RamFs, path: &str) -> Vec<String> {
    let mut names: Vec<String> =
        fs.read_dir(path).unwrap().into_iter().map(|entry| entry.name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// Names of 255 bytes and names that are not UTF-8 must work, longer names and paths must fail, and a path may have
/// 4095 bytes.
#[test]
fn names_and_paths_at_their_limits() {
    let fs = new();
    for len in [46, 47, 48, 254, 255] {
        let name = "x".repeat(len);
        fs.write(&name, b"1").unwrap();
        assert_eq!(fs.read(format!("/{name}")).unwrap(), b"1");
        fs.rename(&name, format!("{}y", &name[1..])).unwrap();
        assert!(!fs.exists(&name));
        fs.remove_file(format!("{}y", &name[1..])).unwrap();
    }
    assert_eq!(errno(fs.write("x".repeat(256), b"")), libc::ENAMETOOLONG);
    assert_eq!(errno(fs.metadata("x".repeat(256))), libc::ENAMETOOLONG);
    let binary = PathBuf::from(OsStr::from_bytes(b"\xff\xfe\n "));
    fs.write(&binary, b"2").unwrap();
    assert_eq!(fs.read_dir("/").unwrap()[0].name, binary);
    assert_eq!(errno(fs.write(OsStr::from_bytes(b"a\0b"), b"")), libc::EINVAL);

    let path = format!("{}/f", "/.".repeat(4092 / 2));
    fs.write(format!("/{path}"), b"3").unwrap();
    assert_eq!(fs.read(&path).unwrap(), b"3");
    assert_eq!(errno(fs.read(format!("/././{path}"))), libc::ENAMETOOLONG);
    assert_eq!((errno(fs.metadata("")), errno(fs.write("/f/x", b""))), (libc::ENOENT, libc::ENOTDIR));
    assert_eq!(
        (errno(fs.create_dir("/")), errno(fs.remove_dir("/")), errno(fs.remove_file("/"))),
        (libc::EEXIST, libc::EBUSY, libc::EISDIR)
    );
}

/// Symbolic links: relative and absolute ones, in the middle of a path, with a slash behind them; 40 in a row work, 41
/// do not.
#[test]
fn symbolic_links_are_followed_up_to_40_times() {
    let fs = new();
    fs.create_dir_all("/a/b").unwrap();
    fs.write("/a/b/file", b"x").unwrap();
    fs.symlink("b", "/a/link").unwrap();
    fs.symlink("/a/link/file", "/direct").unwrap();
    assert_eq!(fs.read("/direct").unwrap(), b"x");
    assert_eq!(fs.read("/a/link/../link/file").unwrap(), b"x");
    assert_eq!(fs.symlink_metadata("/a/link").unwrap().kind, FileType::Symlink);
    assert_eq!(fs.symlink_metadata("/a/link/").unwrap().kind, FileType::Directory);
    assert_eq!(errno(fs.metadata("/direct/")), libc::ENOTDIR);
    assert_eq!(fs.read_link("/a/link").unwrap(), PathBuf::from("b"));
    assert_eq!(errno(fs.read_link("/a/b")), libc::EINVAL);
    fs.write("/0", b"end").unwrap();
    (1..=41).for_each(|i| fs.symlink(format!("/{}", i - 1), format!("/{i}")).unwrap());
    assert_eq!(fs.read("/40").unwrap(), b"end");
    assert_eq!(errno(fs.read("/41")), libc::ELOOP);
    fs.symlink("loop", "/loop").unwrap();
    assert_eq!(errno(fs.read("/loop")), libc::ELOOP);
    assert_eq!(errno(fs.open("/direct", &OpenOptions::new().read(true).no_follow(true))), libc::ELOOP);
    assert_eq!(errno(fs.symlink("", "/empty")), libc::ENOENT);
    fs.symlink("y".repeat(4095), "/long").unwrap();
    assert_eq!(errno(fs.symlink("y".repeat(4096), "/longer")), libc::ENAMETOOLONG);
    // A dangling link as the last component: the target is created.
    fs.symlink("/made", "/dangling").unwrap();
    fs.write("/dangling", b"new").unwrap();
    assert_eq!(fs.read("/made").unwrap(), b"new");
    assert_eq!(errno(fs.open("/dangling", &read_write().create_new(true))), libc::EEXIST);
}

/// All forms of rename, with files and directories as source and target.
#[test]
fn renames_replace_exchange_and_refuse() {
    let fs = new();
    fs.create_dir_all("/d/e/f").unwrap();
    fs.write("/one", b"1").unwrap();
    fs.write("/two", b"2").unwrap();
    fs.rename("/one", "/two").unwrap();
    assert_eq!((fs.read("/two").unwrap(), names(&fs, "/")), (b"1".to_vec(), vec!["d".into(), "two".into()]));
    assert_eq!(errno(fs.rename("/two", "/d")), libc::EISDIR);
    assert_eq!(errno(fs.rename("/d", "/two")), libc::ENOTDIR);
    assert_eq!(errno(fs.rename("/missing", "/two")), libc::ENOENT);
    assert_eq!(errno(fs.rename("/d", "/d/e/f/g")), libc::EINVAL);
    assert_eq!(errno(fs.rename("/d", "/d/e")), libc::EINVAL);
    assert_eq!(errno(fs.rename("/d/e/f", "/d")), libc::ENOTEMPTY);
    assert_eq!(errno(fs.rename("/two", "/new/")), libc::ENOTDIR);
    fs.rename("/d", "/d").unwrap();
    fs.create_dir("/empty").unwrap();
    let links = || ["/", "/d", "/d/e"].map(|path| fs.metadata(path).map(|attr| attr.links).unwrap_or(0));
    assert_eq!(links(), [4, 3, 3]);
    fs.rename("/d/e/f", "/empty").unwrap();
    assert_eq!(links(), [4, 3, 2]);
    assert_eq!(fs.inner_parent("/empty"), 1);
    assert_eq!(errno(fs.rename("/empty", "/d")), libc::ENOTEMPTY);
    assert_eq!(errno(fs.rename_with("/two", "/d/e", Rename::NoReplace)), libc::EEXIST);
    fs.rename_with("/two", "/d/three", Rename::NoReplace).unwrap();
    fs.rename_with("/d/three", "/empty", Rename::Exchange).unwrap();
    assert_eq!(
        (fs.read("/empty").unwrap(), fs.metadata("/d/three").unwrap().kind),
        (b"1".to_vec(), FileType::Directory)
    );
    assert_eq!(links(), [3, 4, 2]);
    assert_eq!(errno(fs.rename_with("/empty", "/missing", Rename::Exchange)), libc::ENOENT);
    assert_eq!(errno(fs.rename_with("/d", "/d/e", Rename::Exchange)), libc::EINVAL);
    assert_eq!(errno(fs.rename_with("/d/e", "/d", Rename::Exchange)), libc::EINVAL);
    fs.hard_link("/empty", "/same").unwrap();
    fs.rename("/empty", "/same").unwrap();
    assert_eq!(names(&fs, "/"), ["d", "empty", "same"]);
}

trait ParentOf {
    fn inner_parent(&self, path: &str) -> u64;
}

impl ParentOf for RamFs {
    fn inner_parent(&self, path: &str) -> u64 {
        let ino = self.lookup_path(path).unwrap().attr.ino;
        let parent = self.parent_of(ino).unwrap();
        self.forget(ino, 1);
        parent
    }
}

/// Hard links share one inode. The inode must exist until the last name and the last open file are gone.
#[test]
fn inode_lives_as_long_as_names_and_files() {
    let fs = new();
    fs.write("/one", b"data").unwrap();
    fs.hard_link("/one", "/two").unwrap();
    assert_eq!(errno(fs.hard_link("/one", "/two")), libc::EEXIST);
    fs.create_dir("/dir").unwrap();
    assert_eq!(errno(fs.hard_link("/dir", "/dir2")), libc::EPERM);
    assert_eq!(fs.metadata("/two").unwrap().links, 2);
    fs.remove_file("/one").unwrap();
    let file = fs.open("/two", &read_write()).unwrap();
    fs.remove_file("/two").unwrap();
    assert_eq!(file.metadata().unwrap().links, 0);
    assert_eq!(file.write_at(b"more", 4).unwrap(), 4);
    assert_eq!(errno(file.link_at(&fs, "/three")), libc::ENOENT);
    let used = fs.usage();
    drop(file);
    assert_eq!((used.inodes - fs.usage().inodes, used.bytes - fs.usage().bytes), (1, 4096));

    let nameless = fs.open_nameless("/dir", &read_write()).unwrap();
    nameless.write_at(b"tmp", 0).unwrap();
    assert_eq!((nameless.metadata().unwrap().links, names(&fs, "/dir").len()), (0, 0));
    nameless.link_at(&fs, "/dir/named").unwrap();
    assert_eq!(fs.read("/dir/named").unwrap(), b"tmp");
    let inodes = fs.usage().inodes;
    drop(fs.open_nameless("/dir", &read_write()).unwrap());
    assert_eq!(fs.usage().inodes, inodes);
}

/// A removed directory accepts no names, and its number is not in use after it is forgotten.
#[test]
fn removed_directory_accepts_no_names() {
    let (fs, root) = (new(), Caller::root());
    let dir = fs.mkdir(1, b"dir", 0o755, &root).unwrap().attr.ino;
    fs.mkdir(dir, b"sub", 0o755, &root).unwrap();
    assert_eq!(errno(fs.rmdir(1, b"dir", &root)), libc::ENOTEMPTY);
    fs.rmdir(dir, b"sub", &root).unwrap();
    assert_eq!(errno(fs.unlink(1, b"dir", &root)), libc::EISDIR);
    fs.rmdir(1, b"dir", &root).unwrap();
    assert_eq!(errno(fs.mkdir(dir, b"x", 0o755, &root)), libc::ENOENT);
    assert_eq!(errno(fs.lookup(dir, b"x", &root)), libc::ENOENT);
    assert_eq!((errno(fs.lookup(dir, b"..", &root)), fs.parent_of(dir).unwrap()), (libc::ENOENT, dir));
    assert_eq!(fs.getattr(dir).unwrap().links, 0);
    fs.forget(dir, 1);
    assert_eq!(errno(fs.getattr(dir)), libc::ESTALE);
    assert_eq!((errno(fs.rmdir(1, b".", &root)), errno(fs.rmdir(1, b"..", &root))), (libc::EINVAL, libc::ENOTEMPTY));
}

/// Owner, group, others and the sticky bit, for callers with and without privilege.
#[test]
fn permissions_follow_owner_group_and_sticky_bit() {
    let fs = new();
    let [owner, member, other] =
        [Caller::new(1, 1), Caller::new(2, 2).groups(&[1]), Caller::new(3, 3)].map(|caller| fs.as_caller(caller));
    fs.create_dir("/users").unwrap();
    fs.set_owner("/users", Some(1), Some(1)).unwrap();
    fs.set_mode("/users", 0o770).unwrap();
    owner.write("/users/file", b"x").unwrap();
    owner.set_mode("/users/file", 0o640).unwrap();
    assert_eq!(member.read("/users/file").unwrap(), b"x");
    assert_eq!(errno(member.write("/users/file", b"y")), libc::EACCES);
    assert_eq!(errno(other.read("/users/file")), libc::EACCES);
    assert_eq!(errno(member.set_mode("/users/file", 0o666)), libc::EPERM);
    assert_eq!(errno(owner.set_owner("/users/file", Some(2), None)), libc::EPERM);
    assert_eq!(errno(other.access("/users", Access::EXECUTE)), libc::EACCES);
    fs.set_mode("/users", 0o1777).unwrap();
    assert_eq!(errno(other.remove_file("/users/file")), libc::EPERM);
    assert_eq!(errno(other.rename("/users/file", "/users/mine")), libc::EPERM);
    other.write("/users/own", b"").unwrap();
    other.remove_file("/users/own").unwrap();
    assert_eq!(errno(fs.access("/users/file", Access::EXECUTE)), libc::EACCES, "no execute bit at all");
    assert_eq!(errno(other.make_special("/users/null", FileType::CharDevice, 0o666, 0x103)), libc::EPERM);
    fs.make_special("/users/null", FileType::CharDevice, 0o666, 0x103).unwrap();
    assert_eq!(fs.metadata("/users/null").unwrap().device, 0x103);
    // Times: the owner may set any, a writer only the current one.
    let past = SetAttr { modified: Some(SetTime::To(5)), ..SetAttr::default() };
    assert_eq!(errno(member.set_attributes("/users/file", &past)), libc::EPERM);
    assert_eq!(owner.set_attributes("/users/file", &past).unwrap().modified_ns, 5);
}

/// Set-user-ID and set-group-ID bits must vanish when an unprivileged caller writes, truncates or changes the owner. A
/// directory's set-group-ID bit is inherited.
#[test]
fn set_id_bits_are_cleared_and_inherited() {
    let fs = new();
    fs.set_mode("/", 0o777).unwrap();
    let user = fs.as_caller(Caller::new(7, 7));
    user.write("/program", b"old").unwrap();
    for act in [0, 1, 2] {
        user.set_mode("/program", 0o6755).unwrap();
        match act {
            0 => user.write("/program", b"new").unwrap(),
            1 => _ = user.set_attributes("/program", &SetAttr { size_bytes: Some(1), ..SetAttr::default() }).unwrap(),
            _ => user.set_owner("/program", None, Some(7)).unwrap(),
        }
        assert_eq!(fs.metadata("/program").unwrap().mode, 0o755, "act {act}");
    }
    user.set_mode("/program", 0o4755).unwrap();
    fs.write("/program", b"by root").unwrap();
    assert_eq!(fs.metadata("/program").unwrap().mode, 0o4755);
    fs.create_dir("/shared").unwrap();
    fs.set_owner("/shared", None, Some(50)).unwrap();
    fs.set_mode("/shared", 0o2777).unwrap();
    user.create_dir("/shared/sub").unwrap();
    user.write("/shared/file", b"").unwrap();
    let [sub, file] = ["/shared/sub", "/shared/file"].map(|path| fs.metadata(path).unwrap());
    assert_eq!((sub.gid, sub.mode & 0o2000, file.gid), (50, 0o2000, 50));
}

/// Sparse files: holes read zero and have no memory; data and holes are found; punched and truncated parts read zero.
#[test]
fn sparse_files_have_memory_only_for_data() {
    // Without huge folios: the background thread would fill holes of dense ranges.
    let fs = RamFs::builder("sparse").bytes(64 << 20).huge(false).build().unwrap();
    let file = fs.open("/sparse", &read_write()).unwrap();
    assert_eq!((file.read_at(&mut [0; 8], 0).unwrap(), file.metadata().unwrap().allocated_bytes), (0, 0));
    file.write_at(b"end", 10 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().allocated_bytes, 4096);
    assert_eq!((file.seek(Whence::Data, 0).unwrap(), file.seek(Whence::Hole, 0).unwrap()), (10 << 20, 0));
    assert_eq!(file.seek(Whence::Hole, 10 << 20).unwrap(), (10 << 20) + 3);
    assert_eq!(errno(file.seek(Whence::Data, (10 << 20) + 3)), libc::ENXIO);
    file.allocate(Allocate::KeepSize, 0, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().allocated_bytes, (1 << 20) + 4096);
    file.write_at(&[7; 8192], 100).unwrap();
    file.allocate(Allocate::Punch, 0, 4096).unwrap();
    let mut bytes = [1; 8292];
    file.read_at(&mut bytes, 0).unwrap();
    assert!(bytes[..4096].iter().all(|byte| *byte == 0) && bytes[4096..].iter().all(|byte| *byte == 7));
    file.allocate(Allocate::Zero, 5000, 20 << 20).unwrap();
    assert_eq!(file.size_bytes(), 5000 + (20 << 20));
    assert_eq!(errno(file.allocate(Allocate::KeepSize, 0, 30 << 20)), libc::EOPNOTSUPP);
    assert_eq!(
        (errno(file.allocate(Allocate::Extend, 0, 0)), errno(file.allocate(Allocate::Extend, 1, u64::MAX))),
        (libc::EINVAL, libc::EFBIG)
    );
    assert_eq!(errno(Allocate::from_mode(libc::FALLOC_FL_COLLAPSE_RANGE)), libc::EOPNOTSUPP);
    file.set_size(5000).unwrap();
    assert_eq!(fs.metadata("/sparse").unwrap().allocated_bytes, 4096);
    let reader = fs.open("/sparse", &OpenOptions::new().read(true)).unwrap();
    assert_eq!((errno(reader.write_at(b"x", 0)), errno(reader.set_size(0))), (libc::EBADF, libc::EBADF));
}

/// A full file system: each operation must fail with `ENOSPC` and leave everything as it was.
#[test]
fn full_file_system_changes_nothing() {
    let fs = RamFs::builder("full").bytes(64 << 10).inodes(4).build().unwrap();
    fs.create_dir("/dir").unwrap();
    fs.write("/dir/file", b"x").unwrap();
    fs.symlink("file", "/dir/link").unwrap();
    let before = (fs.usage().inodes, names(&fs, "/"), names(&fs, "/dir"), fs.metadata("/").unwrap().links);
    assert_eq!(errno(fs.write("/more", b"")), libc::ENOSPC);
    assert_eq!(errno(fs.create_dir("/more")), libc::ENOSPC);
    assert_eq!(errno(fs.symlink("x", "/more")), libc::ENOSPC);
    assert_eq!(errno(fs.open_nameless("/", &read_write())), libc::ENOSPC);
    assert_eq!(before, (fs.usage().inodes, names(&fs, "/"), names(&fs, "/dir"), fs.metadata("/").unwrap().links));
    // Bytes: a write gets what there is room for, then fails.
    let file = fs.open("/dir/file", &read_write()).unwrap();
    assert_eq!(file.write_at(&[1; 100_000], 0).unwrap(), 64 << 10);
    assert_eq!(errno(file.write_at(b"x", 64 << 10)), libc::ENOSPC);
    assert_eq!((file.size_bytes(), fs.usage().bytes), (64 << 10, 64 << 10));
    file.set_size(8192).unwrap();
    let before = file.metadata().unwrap();
    assert_eq!(errno(file.allocate(Allocate::Extend, 0, 1 << 20)), libc::ENOSPC);
    let after = file.metadata().unwrap();
    assert_eq!((after.size_bytes, after.allocated_bytes), (before.size_bytes, before.allocated_bytes));
    // A rename needs no space.
    fs.rename("/dir/file", "/moved").unwrap();
    fs.remove_file("/dir/link").unwrap();
    fs.write("/again", &[2; 4096]).unwrap();
}

/// Quotas of nested directories: bytes and inodes of both are limited, moves and links across are refused, and
/// everything is given back.
#[test]
fn quotas_limit_what_is_below_a_directory() {
    let fs = new();
    fs.create_dir_all("/outer/inner").unwrap();
    assert_eq!(errno(fs.set_quota("/outer", Quota { bytes: 1, inodes: 1 })), libc::ENOTEMPTY);
    fs.remove_dir("/outer/inner").unwrap();
    fs.set_quota("/outer", Quota { bytes: 40 << 10, inodes: 4 }).unwrap();
    fs.create_dir("/outer/inner").unwrap();
    fs.set_quota("/outer/inner", Quota { bytes: 20 << 10, inodes: 2 }).unwrap();
    let file = fs.open("/outer/inner/file", &read_write()).unwrap();
    assert_eq!(file.write_at(&[1; 100_000], 100).unwrap(), (20 << 10) - 100);
    assert_eq!(errno(file.write_at(b"x", 20 << 10)), libc::EDQUOT);
    fs.write("/outer/other", &[1; 20 << 10]).unwrap();
    assert_eq!(errno(fs.write("/outer/third", b"x")), libc::EDQUOT);
    assert_eq!(fs.quota_usage("/outer").unwrap().bytes, 40 << 10);
    assert_eq!(fs.quota_usage("/outer").unwrap().inodes, 4);
    assert_eq!(errno(fs.create_dir("/outer/fifth")), libc::EDQUOT);
    assert_eq!(errno(fs.rename("/outer/other", "/other")), libc::EXDEV);
    assert_eq!(errno(fs.hard_link("/outer/other", "/other")), libc::EXDEV);
    assert_eq!(errno(fs.set_quota("/", Quota { bytes: 1, inodes: 1 })), libc::ENOTEMPTY);
    file.set_size(1).unwrap();
    assert_eq!(fs.quota_usage("/outer/inner").unwrap().bytes, 4096);
    assert_eq!(fs.quota_usage("/outer").unwrap().bytes, 24 << 10);
    drop(file);
    fs.remove_dir_all("/outer/inner").unwrap();
    assert_eq!(fs.quota_usage("/outer").unwrap().inodes, 2);
    fs.remove_dir_all("/outer").unwrap();
    assert_eq!((fs.usage().inodes, fs.usage().bytes), (1, 0));
    assert_eq!(errno(fs.quota_usage("/")), libc::ENOENT);
}

/// The limit of inodes must bound all metadata: each further name counts as an inode, and each KiB of attributes or of a
/// link's target. What fails must be charged nothing, and all of it must be given back.
#[test]
fn names_and_attributes_count_as_inodes() {
    let fs = RamFs::builder("test").inodes(100).build().unwrap();
    let used = || fs.usage().inodes;
    fs.write("/file", b"").unwrap();
    (0..98).for_each(|i| fs.hard_link("/file", format!("/{i}")).unwrap());
    assert_eq!(used(), 100);
    assert_eq!(errno(fs.hard_link("/file", "/more")), libc::ENOSPC);
    assert_eq!(errno(fs.set_xattr("/file", "user.a", &[1; 1024], SetXattr::Either)), libc::ENOSPC);
    assert_eq!(errno(fs.get_xattr("/file", "user.a")), libc::ENODATA);
    fs.rename("/0", "/1").unwrap(); // two names of one file: both stay
    (0..98).for_each(|i| fs.remove_file(format!("/{i}")).unwrap());
    assert_eq!(used(), 2);

    fs.set_xattr("/file", "user.a", &[1; 60 << 10], SetXattr::Either).unwrap();
    assert_eq!(used(), 62);
    assert_eq!(errno(fs.set_xattr("/file", "user.b", &[1; 60 << 10], SetXattr::Either)), libc::ENOSPC);
    fs.set_xattr("/file", "user.a", b"small", SetXattr::Either).unwrap();
    assert_eq!(used(), 2);
    (0..20).for_each(|i| fs.set_xattr("/file", &format!("user.{i}"), b"", SetXattr::Either).unwrap());
    assert_eq!(used(), 4, "each attribute has a place in a table");
    assert_eq!(fs.xattr_names("/file").unwrap().len(), 21);
    (0..20).for_each(|i| fs.remove_xattr("/file", &format!("user.{i}")).unwrap());
    fs.symlink("t".repeat(4095), "/link").unwrap();
    assert_eq!(used(), 6);
    fs.set_xattr("/file", "user.a", &[1; 2000], SetXattr::Either).unwrap();
    fs.hard_link("/file", "/second").unwrap();
    assert_eq!(used(), 9);
    fs.rename("/link", "/second").unwrap(); // the file loses one of two names
    assert_eq!(used(), 8);
    let other = new();
    let nameless = other.open_nameless("/", &read_write()).unwrap();
    assert_eq!(errno(nameless.link_at(&fs, "/foreign")), libc::EXDEV);
    fs.remove_file("/second").unwrap();
    fs.remove_file("/file").unwrap();
    assert_eq!(used(), 1);
    assert!(fs.usage().metadata_bytes > 0 && fs.read_dir("/").unwrap().is_empty());
}

/// A file that is open when the directory of its quota is removed must stay charged to the quotas above, and to no other
/// one that is set meanwhile.
#[test]
fn removed_quotas_last_as_long_as_their_open_files() {
    let fs = new();
    fs.create_dir("/outer").unwrap();
    fs.set_quota("/outer", Quota { bytes: 1 << 20, inodes: 10 }).unwrap();
    let inodes = |path: &str| fs.quota_usage(path).unwrap().inodes;
    for removes_outer in [false, true] {
        fs.create_dir("/outer/inner").unwrap();
        fs.set_quota("/outer/inner", Quota { bytes: 1 << 20, inodes: 5 }).unwrap();
        let file = fs.open("/outer/inner/file", &read_write()).unwrap();
        fs.remove_dir_all("/outer/inner").unwrap();
        assert_eq!(inodes("/outer"), 1, "the open file");
        if removes_outer {
            fs.remove_dir("/outer").unwrap();
        }
        fs.create_dir("/new").unwrap();
        fs.set_quota("/new", Quota { bytes: 1 << 20, inodes: 5 }).unwrap();
        fs.write("/new/file", b"").unwrap();
        drop(file);
        assert_eq!(inodes("/new"), 1);
        if !removes_outer {
            assert_eq!(inodes("/outer"), 0);
        }
        fs.remove_dir_all("/new").unwrap();
    }
    assert_eq!(fs.usage().inodes, 1);
}

/// Extended attributes: namespaces, limits, creation and replacement.
#[test]
fn extended_attributes_have_namespaces_and_limits() {
    let fs = new();
    fs.set_mode("/", 0o777).unwrap();
    let user = fs.as_caller(Caller::new(1, 1));
    user.write("/file", b"").unwrap();
    assert_eq!(errno(user.get_xattr("/file", "user.a")), libc::ENODATA);
    assert_eq!(errno(user.remove_xattr("/file", "user.a")), libc::ENODATA);
    user.set_xattr("/file", "user.a", b"1", SetXattr::Create).unwrap();
    assert_eq!(errno(user.set_xattr("/file", "user.a", b"2", SetXattr::Create)), libc::EEXIST);
    assert_eq!(errno(user.set_xattr("/file", "user.b", b"2", SetXattr::Replace)), libc::ENODATA);
    user.set_xattr("/file", "user.a", &[3; 65536], SetXattr::Replace).unwrap();
    assert_eq!(errno(user.set_xattr("/file", "user.a", &[3; 65537], SetXattr::Either)), libc::E2BIG);
    let long = format!("user.{}", "n".repeat(251));
    assert_eq!(errno(user.set_xattr("/file", &long, b"", SetXattr::Either)), libc::ENAMETOOLONG);
    assert_eq!(errno(user.set_xattr("/file", "trusted.x", b"", SetXattr::Either)), libc::EPERM);
    assert_eq!(errno(user.set_xattr("/file", "system.posix_acl_access", b"", SetXattr::Either)), libc::EOPNOTSUPP);
    fs.set_xattr("/file", "trusted.x", b"t", SetXattr::Either).unwrap();
    let ino = fs.lookup_path("/file").unwrap().attr.ino;
    assert_eq!(fs.listxattr(ino, &Caller::new(1, 1)).unwrap(), [b"user.a".to_vec()]);
    assert_eq!(fs.listxattr(ino, &Caller::root()).unwrap().len(), 2);
    fs.removexattr(ino, b"user.a", &Caller::root()).unwrap();
    assert_eq!(errno(fs.removexattr(ino, b"user.a", &Caller::root())), libc::ENODATA);
    fs.symlink("x", "/link").unwrap();
    let link = fs.lookup(1, b"link", &Caller::root()).unwrap().attr.ino;
    assert_eq!(errno(fs.setxattr(link, b"user.x", b"", SetXattr::Either, &Caller::root())), libc::EPERM);
}

/// A clock that goes back: times follow the clock, and nothing else depends on it.
#[test]
fn clock_may_go_back() {
    let now = Arc::new(AtomicI64::new(1000));
    let clock = now.clone();
    let fs = RamFs::builder("clock").clock(move || clock.load(Relaxed)).build().unwrap();
    fs.write("/file", b"1").unwrap();
    assert_eq!(fs.metadata("/file").unwrap().created_ns, 1000);
    now.store(-5, Relaxed);
    fs.write("/file", b"22").unwrap();
    let attr = fs.metadata("/file").unwrap();
    assert_eq!((attr.modified_ns, attr.changed_ns, attr.created_ns), (-5, -5, 1000));
    assert_eq!(fs.read("/file").unwrap(), b"22");
    fs.create_dir("/dir").unwrap();
    fs.rename("/file", "/dir/file").unwrap();
    assert_eq!(fs.metadata("/dir").unwrap().modified_ns, -5);
    // The last access is later than the last change, so a read sets the time only a day later.
    for (now_ns, accessed_ns) in [(2000, 1000), (86_400_000_001_000, 86_400_000_001_000)] {
        now.store(now_ns, Relaxed);
        fs.read("/dir/file").unwrap();
        assert_eq!(fs.metadata("/dir/file").unwrap().accessed_ns, accessed_ns);
    }
}

/// A watch gets the events of its directory. A full queue must end with one overflow event.
#[test]
fn watch_reports_events_and_overflow() {
    let fs = new();
    fs.create_dir("/dir").unwrap();
    let (watch, all) = (fs.watch("/dir", 4).unwrap(), fs.watch_all(100));
    fs.write("/dir/a", b"1").unwrap();
    fs.rename("/dir/a", "/b").unwrap();
    fs.write("/elsewhere", b"").unwrap();
    let events: Vec<_> = std::iter::from_fn(|| watch.try_next()).map(|event| (event.kind, event.name)).collect();
    assert_eq!(events, [(EventKind::Created, b"a".to_vec()), (EventKind::Removed, b"a".to_vec())]);
    (0..10).for_each(|i| fs.write(format!("/dir/{i}"), b"").unwrap());
    let kinds: Vec<_> = std::iter::from_fn(|| watch.try_next()).map(|event| event.kind).collect();
    assert_eq!((kinds.len(), kinds[4]), (5, EventKind::Overflow));
    fs.set_mode("/dir", 0o700).unwrap();
    assert_eq!(watch.next(Duration::ZERO).unwrap().kind, EventKind::Attributes);
    assert!(watch.next(Duration::from_millis(1)).is_none());
    assert!(std::iter::from_fn(|| all.try_next()).any(|event| event.kind == EventKind::Modified));
}

/// A listing continues at any cookie, whatever was added, removed and rehashed meanwhile. Each entry that exists
/// throughout must be listed once.
#[test]
fn listing_survives_changes_of_its_directory() {
    for bits in [11, 62] {
        let fs = RamFs::builder("list").hash_bits(bits).build().unwrap();
        fs.create_dir("/dir").unwrap();
        let kept: Vec<String> = (0..100).map(|i| format!("kept{i}")).collect();
        kept.iter().for_each(|name| fs.write(format!("/dir/{name}"), b"").unwrap());
        (0..400).for_each(|i| fs.write(format!("/dir/old{i}"), b"").unwrap());
        let (mut cookie, mut seen, mut round) = (0, Vec::new(), 0);
        loop {
            let mut last = None;
            fs.visit_dir("/dir", cookie, |entry| {
                seen.push(String::from_utf8(entry.name.to_vec()).unwrap());
                last = Some(entry.cookie);
                seen.len() % 3 != 0
            })
            .unwrap();
            let Some(last) = last else { break };
            cookie = last;
            for i in 0..8 {
                let _ = fs.remove_file(format!("/dir/old{}", round * 8 + i));
                let _ = fs.write(format!("/dir/new{}", round * 8 + i), b"");
            }
            round += 1;
            if round == 20 {
                (0..600).for_each(|i| _ = fs.write(format!("/dir/more{i}"), b""));
            }
        }
        seen.retain(|name| name.starts_with("kept"));
        seen.sort();
        let mut kept = kept;
        kept.sort();
        assert_eq!(seen, kept);
    }
}

/// A volatile file that consists of a hole only has no memory. A full file system without a spill store must not purge
/// it.
#[test]
fn a_volatile_hole_is_not_purged() {
    let testbed = pagemill_testbed::Testbed::for_test();
    let builder = RamFs::builder("holes").bytes(1 << 20);
    let fs = builder.build_in(testbed.slabs, testbed.caches).unwrap();
    fs.open("/hole", &read_write().create(true)).unwrap().set_size(1 << 20).unwrap();
    fs.mark_volatile("/hole").unwrap();
    assert_eq!(fs.write("/full", &vec![1; 2 << 20]).unwrap_err().errno(), libc::ENOSPC);
    assert!(!fs.unmark_volatile("/hole").unwrap());
    assert_eq!(fs.metadata("/hole").unwrap().size_bytes, 1 << 20);
}
