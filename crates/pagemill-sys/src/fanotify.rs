//! Write events of one file system (fanotify): files closed after writing, files and folders renamed.
//!
//! The kernel queues at most 16384 events; after that it reports that events were lost. Unprivileged processes may use
//! these events in the user namespace that mounted the file system.
#![allow(unsafe_code)] // fanotify

use crate::pages::FileHandle;
use crate::result::{check_result, take_descriptor};
use rustix::io::Errno;
use std::ffi::{CStr, OsStr};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

/// Type of a tmpfs file handle, which contains generation and inode number (`shmem_encode_fh` in mm/shmem.c).
const SHMEM_HANDLE_TYPE: libc::c_int = 1;

/// The file handle by which an event identifies a folder.
#[derive(Clone, Copy)]
pub struct Handle<'event> {
    kind: libc::c_int,
    bytes: &'event [u8],
}

impl Handle<'_> {
    /// Returns the inode number of the folder; `None` if the folder is not on tmpfs.
    pub fn inode(&self) -> Option<u64> {
        let word = |at: usize| Some(u32::from_ne_bytes(self.bytes.get(at..at + 4)?.try_into().ok()?));
        (self.kind == SHMEM_HANDLE_TYPE).then_some(())?;
        Some(u64::from(word(4)?) | u64::from(word(8)?) << 32)
    }

    /// Opens the folder in the mount that contains `root`.
    ///
    /// # Errors
    ///
    /// `EPERM` without CAP_DAC_READ_SEARCH in the initial user namespace; `ESTALE` for a removed folder.
    pub fn open(&self, root: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let mut handle = FileHandle { len_bytes: self.bytes.len() as u32, kind: self.kind, ..FileHandle::LARGEST };
        handle.bytes.get_mut(..self.bytes.len()).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(self.bytes);
        handle.open(root, libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC)
    }
}

/// An event of the file system.
pub enum Event<'event> {
    /// A process closed a file that it had open for writing, or renamed a file to `name` in `folder`. `pid` is 0 if the
    /// kernel does not report the process.
    Written { folder: Handle<'event>, name: &'event OsStr, pid: u32 },
    /// A folder was renamed to `name` in `folder`.
    FolderMoved { folder: Handle<'event>, name: &'event OsStr },
    /// Events were lost. The listener must scan the whole file system to learn what has changed.
    Lost,
}

/// A listener for the events of one file system.
pub struct Listener(OwnedFd);

impl Listener {
    /// Starts listening to the file system that contains `root`.
    ///
    /// # Errors
    ///
    /// `EPERM` without CAP_SYS_ADMIN in the namespace that mounted the file system (before about Linux 6.8, in the
    /// initial namespace).
    pub fn new(root: BorrowedFd<'_>) -> io::Result<Self> {
        let flags = libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK | libc::FAN_REPORT_DFID_NAME;
        // SAFETY: the call only creates a descriptor.
        let listener = Self(unsafe { take_descriptor(libc::syscall(libc::SYS_fanotify_init, flags, libc::O_RDONLY)) }?);
        let events = libc::FAN_CLOSE_WRITE | libc::FAN_MOVED_TO | libc::FAN_ONDIR;
        listener.change_mark(root, libc::FAN_MARK_ADD, events)?;
        Ok(listener)
    }

    /// Turns the events of closed files on or off; rename events stay on.
    ///
    /// # Errors
    ///
    /// Errors of `fanotify_mark`.
    pub fn listen_to_closes(&self, root: BorrowedFd<'_>, is_wanted: bool) -> io::Result<()> {
        let how = if is_wanted { libc::FAN_MARK_ADD } else { libc::FAN_MARK_REMOVE };
        self.change_mark(root, how, libc::FAN_CLOSE_WRITE)
    }

    /// Adds or removes events of the file system that contains `root`. `how` is `FAN_MARK_ADD` or `FAN_MARK_REMOVE`.
    fn change_mark(&self, root: BorrowedFd<'_>, how: libc::c_uint, events: u64) -> io::Result<()> {
        let how = how | libc::FAN_MARK_FILESYSTEM;
        // SAFETY: the path is a C string.
        let marked = unsafe { libc::fanotify_mark(self.0.as_raw_fd(), how, events, root.as_raw_fd(), c".".as_ptr()) };
        check_result(marked)
    }

    /// Returns the listener's descriptor, which is readable while events are queued.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }

    /// Reads the events that fit into `buffer` and calls `report` for each. Returns whether any event was read.
    ///
    /// # Errors
    ///
    /// Errors of `read`.
    pub fn drain(&self, buffer: &mut [u8], mut report: impl FnMut(Event<'_>)) -> io::Result<bool> {
        let count = match rustix::io::read(&self.0, &mut *buffer) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            count => count?,
        };
        let mut rest = &buffer[..count];
        while let Some((event, after)) = split_event(rest) {
            if let Some(event) = parse_event(event) {
                report(event);
            }
            rest = after;
        }
        Ok(count > 0)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Splits the first event off `bytes`. Returns the event and the rest; `None` if the first event is incomplete.
fn split_event(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let len = u32_at(bytes, 0)? as usize;
    (len >= size_of::<libc::fanotify_event_metadata>()).then(|| bytes.split_at_checked(len)).flatten()
}

/// Length of the header of an information record in an event.
const INFO_HEADER_BYTES: usize = 4;
/// Length of the file system's id in an information record.
const FILE_SYSTEM_ID_BYTES: usize = 8;
/// Length of the header of the file handle in an information record.
const HANDLE_HEADER_BYTES: usize = 8;

/// Parses an event. Returns `None` for an event without folder and name.
fn parse_event(event: &[u8]) -> Option<Event<'_>> {
    let mask = u64::from_ne_bytes(event.get(8..16)?.try_into().ok()?);
    if mask & libc::FAN_Q_OVERFLOW != 0 {
        return Some(Event::Lost);
    }
    let pid = u32_at(event, 20)?;
    let mut records = event.get(usize::from(u16::from_ne_bytes(event.get(6..8)?.try_into().ok()?))..)?;
    while records.len() > INFO_HEADER_BYTES {
        let len = usize::from(u16::from_ne_bytes(records.get(2..4)?.try_into().ok()?));
        let (record, after) = records.split_at_checked(len.max(INFO_HEADER_BYTES))?;
        if record[0] == libc::FAN_EVENT_INFO_TYPE_DFID_NAME {
            let handle = record.get(INFO_HEADER_BYTES + FILE_SYSTEM_ID_BYTES..)?;
            let (len, kind) = (u32_at(handle, 0)? as usize, u32_at(handle, 4)? as libc::c_int);
            let bytes = handle.get(HANDLE_HEADER_BYTES..HANDLE_HEADER_BYTES + len)?;
            let name = CStr::from_bytes_until_nul(handle.get(HANDLE_HEADER_BYTES + len..)?).ok()?;
            let name = OsStr::from_bytes(name.to_bytes());
            let folder = Handle { kind, bytes };
            return Some(match mask & libc::FAN_ONDIR {
                0 => Event::Written { folder, name, pid },
                _ => Event::FolderMoved { folder, name },
            });
        }
        records = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// Returns an event in the kernel's format: metadata, and one record with folder and name.
    fn event_bytes(mask: u64, kind: i32, words: [u32; 3], name: &[u8]) -> Vec<u8> {
        let mut record = vec![libc::FAN_EVENT_INFO_TYPE_DFID_NAME, 0, 0, 0];
        record.extend([0; 8]);
        record.extend(12u32.to_ne_bytes());
        record.extend(kind.to_ne_bytes());
        record.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        record.extend(name);
        record.resize(record.len().next_multiple_of(4), 0);
        let len = record.len() as u16;
        record[2..4].copy_from_slice(&len.to_ne_bytes());
        let mut event = (24 + u32::from(len)).to_ne_bytes().to_vec();
        event.extend([3, 0]);
        event.extend(24u16.to_ne_bytes());
        event.extend(mask.to_ne_bytes());
        event.extend((-1i32).to_ne_bytes());
        event.extend(77u32.to_ne_bytes());
        event.extend(record);
        event
    }

    /// Events must be parsed to folder, name and process. A truncated event must be rejected. A folder handle that is
    /// not of the type of tmpfs must have no inode number.
    #[test]
    fn events_are_parsed() {
        let whole = event_bytes(libc::FAN_CLOSE_WRITE, 1, [9, 5, 1], b"name\0");
        let both = [whole.clone(), event_bytes(libc::FAN_Q_OVERFLOW, 1, [0; 3], b"\0")].concat();
        let (first, rest) = split_event(&both).unwrap();
        let Some(Event::Written { folder, name, pid }) = parse_event(first) else { panic!() };
        assert_eq!((folder.inode(), name.as_bytes(), pid), (Some(1 << 32 | 5), &b"name"[..], 77));
        assert!(matches!(parse_event(split_event(rest).unwrap().0), Some(Event::Lost)));
        let moved = event_bytes(libc::FAN_MOVED_TO | libc::FAN_ONDIR, 1, [9, 5, 1], b"name\0");
        assert!(matches!(parse_event(&moved), Some(Event::FolderMoved { name, .. }) if name == "name"));
        let other = event_bytes(libc::FAN_CLOSE_WRITE, 2, [9, 5, 1], b"name\0");
        let Some(Event::Written { folder, .. }) = parse_event(&other) else { panic!() };
        assert_eq!(folder.inode(), None);
        for len in 0..whole.len() {
            assert!(split_event(&whole[..len]).is_none());
            let _ = parse_event(&whole[..len]);
        }
        let mut endless = whole;
        endless[0..4].copy_from_slice(&0u32.to_ne_bytes());
        assert!(split_event(&endless).is_none(), "a length of 0");
    }

    /// Closing a file after a write, and renaming it, must be reported once each, with folder and name. While close
    /// events are off, only the rename must be reported.
    #[test]
    fn closes_and_renames_are_reported() {
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return println!("skipped: no /dev/shm") };
        let root = std::fs::File::open(folder.path()).unwrap();
        let listener = match Listener::new(root.as_fd()) {
            Ok(listener) => listener,
            Err(error) => return println!("skipped: fanotify: {error}"),
        };
        std::fs::write(folder.path().join("a file"), b"x").unwrap();
        std::fs::rename(folder.path().join("a file"), folder.path().join("b file")).unwrap();
        let inode = std::os::unix::fs::MetadataExt::ino(&root.metadata().unwrap());
        let mut found = Vec::new();
        listener
            .drain(&mut [0; 4096], |event| {
                if let Event::Written { folder, name, pid } = event {
                    found.push((folder.inode(), name.to_owned(), pid));
                }
            })
            .unwrap();
        for mine in ["a file", "b file"] {
            // Other processes may write to the same file system.
            let reported: Vec<_> = found.iter().filter(|(at, name, _)| *at == Some(inode) && name == mine).collect();
            assert_eq!(reported.len(), 1, "{found:?}");
            assert_eq!(reported[0].2, std::process::id());
        }
        // With close events off, only the rename is reported.
        let names_of = |is_wanted: bool| {
            listener.listen_to_closes(root.as_fd(), is_wanted).unwrap();
            std::fs::write(folder.path().join("c file"), b"x").unwrap();
            std::fs::rename(folder.path().join("c file"), folder.path().join("d file")).unwrap();
            let mut names = Vec::new();
            while listener
                .drain(&mut [0; 4096], |event| {
                    if let Event::Written { folder, name, .. } = event
                        && folder.inode() == Some(inode)
                    {
                        names.push(name.to_owned());
                    }
                })
                .unwrap()
            {}
            names
        };
        assert_eq!(names_of(false), ["d file"]);
        assert_eq!(names_of(true), ["c file", "d file"]);
    }
}
