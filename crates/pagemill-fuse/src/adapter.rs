//! [`Adapter`]: answers the requests of the kernel from a file system.

use crate::attr::{kind_to_fuse, missing, to_fuse, to_set_time};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, Notifier, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use pagemill_ramfs::{
    Allocate, Attr, Caller, DirEntry, Entry, Error, File, OpenOptions, RamFs, Rename, SetAttr, SetXattr, Usage, Whence,
};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Time for which the kernel may keep names and attributes: a year, in effect without a limit.
const VALID_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

/// Inode numbers are never used again, so there is one generation.
const GENERATION: Generation = Generation(0);

/// Maximum bytes of one write request. The kernel's own maximum is 1 MiB by default.
const MAX_WRITE_BYTES: u32 = 1 << 20;

/// Maximum number of requests for readahead that wait for an answer.
const MAX_BACKGROUND: u16 = 64;

/// Offsets of a directory's own entries. Cookies of other entries begin with 8.
const OFFSET_OF_SELF: u64 = 1;
const OFFSET_OF_PARENT: u64 = 2;
const FIRST_COOKIE: u64 = 8;

/// Name of an extended attribute of the root directory. Its value has one line `NAME BYTES` for each of `memory`,
/// `memory_limit`, `spilled` and `spill_limit`. All numbers are bytes; `spill_limit` is 0 without a spill store.
/// `listxattr` does not return it.
pub const USAGE_ATTRIBUTE: &str = "user.pagemill.usage";

/// A user without the right to keep set-user-ID bits.
const ORDINARY_USER: u32 = u32::MAX - 1;

thread_local! {
    /// Bytes of the answers to reads.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file system behind a mount.
pub(crate) struct Adapter {
    fs: RamFs,
    /// Template of callers.
    root: Caller,
    /// The kernel needs no answer to an open of a file or of a directory.
    skips_open: bool,
    skips_opendir: bool,
    /// Sends invalidations to the kernel; set after the session has begun.
    notifier: Arc<OnceLock<Notifier>>,
    /// Gets a message when the session has ended.
    ended: Sender<()>,
}

impl Adapter {
    pub fn new(fs: RamFs, notifier: Arc<OnceLock<Notifier>>, ended: Sender<()>) -> Self {
        let root = Caller::root().umask(0).checked();
        Self { fs, root, skips_open: false, skips_opendir: false, notifier, ended }
    }

    /// Returns the caller of a request. The kernel has checked its permissions and applied its umask.
    fn caller(&self, request: &Request) -> Caller {
        Caller { uid: request.uid(), gid: request.gid(), ..self.root.clone() }
    }

    fn open_file(&self, ino: INodeNo, options: OpenOptions, caller: &Caller) -> Result<File, Error> {
        self.fs.open_ino(ino.0, &options, caller)
    }

    /// Calls `change`, which changes data of a file. If this clears the file's set-user-ID or set-group-ID bit, makes
    /// the kernel read the attributes again.
    fn change_data<T>(
        &self,
        ino: INodeNo,
        caller: &Caller,
        change: impl FnOnce(&File) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let file = self.open_file(ino, OpenOptions::new().write(true), caller)?;
        if caller.uid == 0 {
            return change(&file);
        }
        let before = file.mode()?;
        let result = change(&file);
        if file.mode()? != before
            && let Some(notifier) = self.notifier.get()
        {
            // A negative offset: the attributes only, not the pages. An error means that the kernel has no attributes.
            let _ = notifier.inval_inode(ino, -1, 0);
        }
        result
    }

    /// Adds the entries behind `offset` to a listing until `add` returns true, which means that the listing is full.
    /// The own entries of a directory have no name in the file system.
    fn list(
        &self,
        ino: INodeNo,
        offset: u64,
        mut add_own: impl FnMut(u64, u64, &OsStr) -> bool,
        mut add: impl FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<(), Error> {
        if offset < OFFSET_OF_SELF && add_own(ino.0, OFFSET_OF_SELF, OsStr::new(".")) {
            return Ok(());
        }
        if offset < OFFSET_OF_PARENT && add_own(self.fs.parent_of(ino.0)?, OFFSET_OF_PARENT, OsStr::new("..")) {
            return Ok(());
        }
        let after = if offset < FIRST_COOKIE { 0 } else { offset };
        self.fs.readdir(ino.0, after, |entry| !add(entry))
    }
}

fn errno(error: &Error) -> Errno {
    Errno::from_i32(error.errno())
}

fn reply_entry(reply: ReplyEntry, entry: Result<Entry, Error>) {
    match entry {
        Ok(entry) => reply.entry(&VALID_TIME, &to_fuse(&entry.attr), GENERATION),
        Err(error) => reply.error(errno(&error)),
    }
}

fn reply_attr(reply: ReplyAttr, attr: Result<Attr, Error>) {
    match attr {
        Ok(attr) => reply.attr(&VALID_TIME, &to_fuse(&attr)),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Reads until the buffer is full or the file ends. Returns the number of bytes read.
///
/// # Errors
///
/// Those of [`File::read_at`], also after a part was read: the kernel takes a short answer for the end of the file.
fn read_to_end(file: &File, to: &mut [u8], offset: u64) -> Result<usize, Error> {
    let mut done = 0;
    while done < to.len() {
        match file.read_at(&mut to[done..], offset + done as u64)? {
            0 => break,
            more => done += more,
        }
    }
    Ok(done)
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), Error>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Answers a request for an attribute: with its length if the size is 0, else with its bytes.
fn reply_xattr(reply: ReplyXattr, bytes: Result<Vec<u8>, Error>, size: u32) {
    match bytes {
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(bytes) => reply.data(&bytes),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Returns the value of [`USAGE_ATTRIBUTE`].
fn usage_text(usage: &Usage) -> String {
    let Usage { bytes, byte_limit, spilled_bytes, spill_limit, .. } = usage;
    format!("memory {bytes}\nmemory_limit {byte_limit}\nspilled {spilled_bytes}\nspill_limit {spill_limit}\n")
}

impl Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        const WANTED: [InitFlags; 7] = [
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ];
        for capability in WANTED {
            // A kernel without one of them works, but sends more requests.
            let _ = config.add_capabilities(capability);
        }
        self.skips_open = config.capabilities().contains(InitFlags::FUSE_NO_OPEN_SUPPORT);
        self.skips_opendir = config.capabilities().contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT);
        config.set_max_write(MAX_WRITE_BYTES).map_err(|most| io::Error::other(format!("max_write is {most}")))?;
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn destroy(&mut self) {
        // The receiver may have ended before.
        let _ = self.ended.send(());
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.fs.lookup(parent.0, name.as_bytes(), &self.root) {
            Err(Error::NotFound) => reply.entry(&VALID_TIME, &missing(), GENERATION),
            entry => reply_entry(reply, entry),
        }
    }

    fn forget(&self, _request: &Request, ino: INodeNo, count: u64) {
        self.fs.forget(ino.0, count);
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _file: Option<FileHandle>, reply: ReplyAttr) {
        reply_attr(reply, self.fs.getattr(ino.0));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size_bytes: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        changed: Option<SystemTime>,
        _file: Option<FileHandle>,
        _created: Option<SystemTime>,
        _change_time: Option<SystemTime>,
        _backup_time: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let change = SetAttr {
            mode,
            uid,
            gid,
            size_bytes,
            accessed: accessed.map(to_set_time),
            modified: modified.map(to_set_time),
            changed: changed.map(|time| to_set_time(TimeOrNow::SpecificTime(time))),
        };
        reply_attr(reply, self.fs.setattr(ino.0, &change, None, &self.caller(request)));
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        match self.fs.readlink(ino.0) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let made = self.fs.mknod(parent.0, name.as_bytes(), mode, u64::from(device), &self.caller(request));
        reply_entry(reply, made);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, reply: ReplyEntry) {
        reply_entry(reply, self.fs.mkdir(parent.0, name.as_bytes(), mode, &self.caller(request)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(reply, self.fs.unlink(parent.0, name.as_bytes(), &self.root));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(reply, self.fs.rmdir(parent.0, name.as_bytes(), &self.root));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = target.as_os_str().as_bytes();
        reply_entry(reply, self.fs.mksymlink(parent.0, name.as_bytes(), target, &self.caller(request)));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let how = match flags {
            flags if flags.is_empty() => Rename::Replace,
            RenameFlags::RENAME_NOREPLACE => Rename::NoReplace,
            RenameFlags::RENAME_EXCHANGE => Rename::Exchange,
            _ => return reply.error(Errno::EINVAL),
        };
        let (from, to) = ((parent.0, name.as_bytes()), (new_parent.0, new_name.as_bytes()));
        reply_empty(reply, self.fs.rename_entry(from, to, how, &self.root));
    }

    fn link(&self, _request: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply_entry(reply, self.fs.link(ino.0, parent.0, name.as_bytes(), &self.root));
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.skips_open {
            true => reply.error(Errno::ENOSYS),
            false => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE),
        }
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.skips_opendir {
            true => reply.error(Errno::ENOSYS),
            false => reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR),
        }
    }

    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        // The kernel then sends `mknod`, and no request when the file is closed.
        reply.error(Errno::ENOSYS);
    }

    fn flush(&self, _request: &Request, _ino: INodeNo, _file: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS); // the kernel sends no further such request
    }

    fn fsync(&self, _request: &Request, _ino: INodeNo, _file: FileHandle, _is_data: bool, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS); // the kernel sends no further such request; the call succeeds
    }

    fn fsyncdir(&self, _request: &Request, _ino: INodeNo, _file: FileHandle, _is_data: bool, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS); // as `fsync`
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _file: FileHandle,
        offset: u64,
        size_bytes: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        READ_BUFFER.with_borrow_mut(|buffer| {
            let size_bytes = size_bytes as usize;
            if buffer.len() < size_bytes {
                buffer.resize(size_bytes, 0);
            }
            let file = self.open_file(ino, OpenOptions::new().read(true), &self.root);
            match file.and_then(|file| read_to_end(&file, &mut buffer[..size_bytes], offset)) {
                Ok(len) => reply.data(&buffer[..len]),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _file: FileHandle,
        offset: u64,
        bytes: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let clears_set_id = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let caller = Caller { uid: if clears_set_id { ORDINARY_USER } else { 0 }, ..self.root.clone() };
        match self.change_data(ino, &caller, |file| file.write_at(bytes, offset)) {
            Ok(written) => reply.written(written as u32),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        _file: FileHandle,
        offset: u64,
        len_bytes: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let allocated = Allocate::from_mode(mode)
            .and_then(|how| self.change_data(ino, &self.caller(request), |file| file.allocate(how, offset, len_bytes)));
        reply_empty(reply, allocated);
    }

    fn lseek(&self, _request: &Request, ino: INodeNo, _file: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let whence = match whence {
            libc::SEEK_DATA => Whence::Data,
            libc::SEEK_HOLE => Whence::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let file = self.open_file(ino, OpenOptions::new().read(true), &self.root);
        match file.and_then(|file| file.seek(whence, offset)) {
            Ok(found) => reply.offset(found as i64),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdir(&self, _request: &Request, ino: INodeNo, _file: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let reply_to_list = RefCell::new(&mut reply);
        let add_own = |ino, offset, name: &OsStr| {
            reply_to_list.borrow_mut().add(INodeNo(ino), offset, fuser::FileType::Directory, name)
        };
        let add = |entry: &DirEntry<'_>| {
            let name = OsStr::from_bytes(entry.name);
            reply_to_list.borrow_mut().add(INodeNo(entry.ino), entry.cookie, kind_to_fuse(entry.kind), name)
        };
        match self.list(ino, offset, add_own, add) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _file: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let reply_to_list = RefCell::new(&mut reply);
        let add = |ino, offset, name: &OsStr, attr: &FileAttr| {
            reply_to_list.borrow_mut().add(INodeNo(ino), offset, name, &VALID_TIME, attr, GENERATION)
        };
        // The kernel counts no look-up of a directory's own entries.
        let add_own = |ino, offset, name: &OsStr| {
            let attr = FileAttr { ino: INodeNo(ino), kind: fuser::FileType::Directory, ..missing() };
            add(ino, offset, name, &attr)
        };
        let add_entry = |entry: &DirEntry<'_>| {
            // Removed or renamed since it was listed: leave it out.
            let Ok(found) = self.fs.lookup(ino.0, entry.name, &self.root) else { return false };
            let name = OsStr::from_bytes(entry.name);
            let is_full = add(found.attr.ino, entry.cookie, name, &to_fuse(&found.attr));
            if is_full {
                self.fs.forget(found.attr.ino, 1);
            }
            is_full
        };
        match self.list(ino, offset, add_own, add_entry) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        const NAME_BYTES: u32 = 255;
        let usage = self.fs.usage();
        let page = usage.page_bytes;
        let blocks = usage.byte_limit.saturating_add(usage.spill_limit) / page;
        let free = blocks.saturating_sub((usage.bytes + usage.spilled_bytes).div_ceil(page));
        let free_inodes = usage.inode_limit.saturating_sub(usage.inodes);
        reply.statfs(blocks, free, free, usage.inode_limit, free_inodes, page as u32, NAME_BYTES, page as u32);
    }

    fn setxattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let how = match flags {
            0 => SetXattr::Either,
            libc::XATTR_CREATE => SetXattr::Create,
            libc::XATTR_REPLACE => SetXattr::Replace,
            _ => return reply.error(Errno::EINVAL),
        };
        reply_empty(reply, self.fs.setxattr(ino.0, name.as_bytes(), value, how, &self.root));
    }

    fn getxattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let value = match name == USAGE_ATTRIBUTE && ino == INodeNo::ROOT {
            true => Ok(usage_text(&self.fs.usage()).into_bytes()),
            false => self.fs.getxattr(ino.0, name.as_bytes(), &self.root),
        };
        reply_xattr(reply, value, size);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        // The kernel does not remove the names of `trusted` from the list. The file system does, for other users.
        let caller = Caller::new(request.uid(), request.gid());
        let names = self
            .fs
            .listxattr(ino.0, &caller)
            .map(|names| names.iter().flat_map(|name| name.iter().copied().chain([0])).collect());
        reply_xattr(reply, names, size);
    }

    fn removexattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(reply, self.fs.removexattr(ino.0, name.as_bytes(), &self.root));
    }
}
