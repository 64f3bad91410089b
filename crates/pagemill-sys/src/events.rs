//! Kernel notifications about memory: thresholds and limits of control groups, and stalls (PSI).
//!
//! An [`Events`] waits for any number of [`Source`]s. Sources are descriptors, which a program must neither see nor
//! close. So an [`Events`] should be used in a thread with a private descriptor table
//! ([`crate::thread::unshare_files`]).
#![allow(unsafe_code)] // waiting on a descriptor by its number

use crate::file::{self, Fd, Path};
use crate::result::retry_interrupted;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// The kind of event that a source reports. Each value is one bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Sign {
    /// A control group crossed a threshold or reached its own limit.
    Limit = 1,
    /// A task in the control group is stalled on memory.
    GroupStall = 2,
    /// A task on the machine is stalled on memory.
    MachineStall = 4,
}

/// One source of kernel notifications. Dropping the source ends its notifications.
pub struct Source {
    fd: Fd,
    sign: Sign,
    stalls: Option<StallTrigger>,
}

/// A kernel trigger that notifies about memory stalls, and the stall times by which genuine notifications are
/// recognised.
struct StallTrigger {
    /// Total stall time at the last notification, or, before the first notification, when the trigger was set.
    seen_us: u64,
    /// Growth of the total stall time at which the trigger fires.
    trigger_us: u64,
}

impl Source {
    pub fn sign(&self) -> Sign {
        self.sign
    }

    /// Returns whether a notification that this source has just delivered is genuine. A stall notification is genuine
    /// if enough stall time was added since the last one.
    ///
    /// In the kernel, a trigger with a window of two seconds starts from a wrong counter: `psi_trigger_create` uses the
    /// counter of the other kind of trigger. So the first notification may be about stalls since boot.
    pub fn is_genuine(&mut self) -> bool {
        let Some(stalls) = &mut self.stalls else { return true };
        let Some(now_us) = read_stalled_us(&self.fd) else { return true };
        let new_us = now_us.saturating_sub(stalls.seen_us);
        stalls.seen_us = now_us;
        // The kernel adds an estimate for the previous window, so up to half of the requested stall time may be older.
        new_us >= stalls.trigger_us / 2
    }
}

/// Reads the total stall time in the first line of a pressure file: `some avg10=… total=N`.
fn read_stalled_us(fd: &Fd) -> Option<u64> {
    let mut buffer = [0u8; 256];
    let count = rustix::io::pread(fd, &mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..count]).ok()?;
    text.lines().next()?.strip_prefix("some ")?.split_once("total=")?.1.trim().parse().ok()
}

fn open(path: &CStr, flags: OFlags) -> io::Result<Fd> {
    file::open(path, flags, Mode::empty())
}

fn path_in(folder: &str, name: &str) -> io::Result<Path> {
    Path::format(format_args!("{folder}/{name}")).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// A set of sources that one thread waits for (epoll).
pub struct Events(Fd);

impl Events {
    /// Creates an empty set of sources.
    ///
    /// # Errors
    ///
    /// Errors of `epoll_create1`.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?.into()))
    }

    /// Returns the number of the epoll descriptor, for [`wait`].
    pub fn number(&self) -> i32 {
        self.0.descriptor_number()
    }

    /// Returns the epoll descriptor, so that a caller can wait for it together with other descriptors.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Adds a source that notifies whenever the memory usage of a version 1 control group crosses `bytes`, upwards or
    /// downwards.
    ///
    /// # Errors
    ///
    /// Errors of opening or writing `cgroup.event_control`, which requires write permission.
    pub fn add_threshold(&self, folder: &str, bytes: u64) -> io::Result<Source> {
        let fired = Fd::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let usage = open(path_in(folder, "memory.usage_in_bytes")?.as_c_str(), OFlags::RDONLY)?;
        let control = open(path_in(folder, "cgroup.event_control")?.as_c_str(), OFlags::WRONLY)?;
        let command = file::Text::<64>::format(format_args!(
            "{} {} {bytes}",
            fired.descriptor_number(),
            usage.descriptor_number()
        ));
        rustix::io::write(&control, command.unwrap_or_default().as_bytes())?;
        self.add_descriptor(fired, Sign::Limit, EventFlags::IN, None)
    }

    /// Adds a source that notifies when a version 2 control group reaches its own limit, which changes a counter in the
    /// group's `memory.events`.
    ///
    /// # Errors
    ///
    /// Errors of opening the file.
    pub fn add_group_events(&self, folder: &str) -> io::Result<Source> {
        let events = open(path_in(folder, "memory.events")?.as_c_str(), OFlags::RDONLY)?;
        self.add_descriptor(events, Sign::Limit, EventFlags::PRI, None)
    }

    /// Adds a source that notifies when tasks stalled on memory for `stall_us` within two seconds, at most once in two
    /// seconds. `file` is the pressure file of the machine or of a control group; `sign` is the matching sign.
    ///
    /// Without privileges, the kernel accepts only windows of two seconds, or of a multiple.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` without PSI. `EPERM` and `EINVAL` where triggers require privileges (before Linux 6.4; those of
    /// control groups before 6.7).
    pub fn add_stalls(&self, file: &CStr, stall_us: u32, sign: Sign) -> io::Result<Source> {
        let pressure = open(file, OFlags::RDWR)?;
        let command = file::Text::<64>::format(format_args!("some {stall_us} 2000000")).unwrap_or_default();
        rustix::io::write(&pressure, command.as_c_str().to_bytes_with_nul())?;
        let stalls = StallTrigger { seen_us: read_stalled_us(&pressure).unwrap_or(0), trigger_us: u64::from(stall_us) };
        self.add_descriptor(pressure, sign, EventFlags::PRI, Some(stalls))
    }

    /// Adds a descriptor, edge-triggered, so that a source notifies again although nothing was read from it. `when` is
    /// the poll event that signals a notification. For the kernel's own files that is not `EPOLLIN`, because these
    /// files are always readable.
    fn add_descriptor(&self, fd: Fd, sign: Sign, when: EventFlags, stalls: Option<StallTrigger>) -> io::Result<Source> {
        epoll::add(&self.0, &fd, EventData::new_u64(sign as u64), when | EventFlags::ET)?;
        Ok(Source { fd, sign, stalls })
    }
}

/// Blocks until a source notifies in the set whose epoll descriptor has the number `events`. Returns the [`Sign`]s of
/// all sources that notified, combined by OR.
///
/// # Errors
///
/// Errors of `epoll_wait`: `EBADF` when the set is closed.
pub fn wait(events: i32) -> io::Result<u64> {
    let mut fired = [libc::epoll_event { events: 0, u64: 0 }; 8];
    // A direct call, because rustix's `epoll::wait` takes a descriptor that must be open.
    let count = retry_interrupted(|| {
        let (to, most, no_mask) = (fired.as_mut_ptr(), fired.len() as libc::c_int, std::ptr::null::<libc::sigset_t>());
        // SAFETY: the call writes at most `fired.len()` entries; there is no signal mask.
        unsafe { libc::syscall(libc::SYS_epoll_pwait, events, to, most, -1, no_mask, 0_usize) }
    })?;
    Ok(fired[..count].iter().fold(0, |signs, event| signs | event.u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adding a source must lead to an error if its file is missing, or if epoll refuses the file.
    #[test]
    fn adding_an_unusable_source_fails() {
        let events = Events::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_str().unwrap();
        let kind = |result: io::Result<Source>| result.err().unwrap().kind();
        assert_eq!(kind(events.add_threshold(at, 1)), io::ErrorKind::NotFound);
        assert_eq!(kind(events.add_group_events(at)), io::ErrorKind::NotFound);
        assert_eq!(kind(events.add_stalls(c"/nowhere", 1, Sign::MachineStall)), io::ErrorKind::NotFound);
        // A regular file accepts any write, but epoll refuses it.
        std::fs::write(folder.path().join("memory.pressure"), "").unwrap();
        let file = Path::format(format_args!("{at}/memory.pressure")).unwrap();
        assert_eq!(kind(events.add_stalls(file.as_c_str(), 1, Sign::GroupStall)), io::ErrorKind::PermissionDenied);
        assert_eq!(std::fs::read_to_string(file.as_str()).unwrap(), "some 1 2000000\0");
    }

    /// A stall notification must count as genuine only if the total stall time grew enough, or cannot be read.
    #[test]
    fn notifications_of_old_stalls_are_not_genuine() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("memory.pressure");
        let total = |total: &str| {
            std::fs::write(&at, format!("some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull avg10=0.00\n"))
                .unwrap();
        };
        total("15000000");
        let path = Path::format(format_args!("{}", at.to_str().unwrap())).unwrap();
        let fd = open(path.as_c_str(), OFlags::RDONLY).unwrap();
        let stalls = StallTrigger { seen_us: read_stalled_us(&fd).unwrap(), trigger_us: 150_000 };
        assert_eq!(stalls.seen_us, 15_000_000);
        let mut source = Source { fd, sign: Sign::MachineStall, stalls: Some(stalls) };
        assert!(!source.is_genuine(), "of all stalls since the machine was started");
        total("15150000");
        assert!(source.is_genuine());
        assert!(!source.is_genuine(), "of the same stalls again");
        total("15150100");
        assert!(!source.is_genuine(), "a hundred microseconds");
        total("?");
        assert!(source.is_genuine());
        source.stalls = None;
        assert!(source.is_genuine());
    }

    /// Directly after a trigger was set, a notification must not count as genuine, unless tasks have stalled for long
    /// enough meanwhile.
    #[test]
    fn a_new_trigger_has_no_genuine_notification() {
        let events = Events::new().unwrap();
        let Ok(mut source) = events.add_stalls(c"/proc/pressure/memory", 1_900_000, Sign::MachineStall) else {
            println!("skipped: no triggers here");
            return;
        };
        let seen_us = read_stalled_us(&source.fd).unwrap();
        let is_genuine = source.is_genuine();
        let grown_us = read_stalled_us(&source.fd).unwrap() - seen_us;
        assert!(!is_genuine || grown_us >= 900_000, "true after {grown_us} us");
    }

    /// `wait` must return the sign of the source that notified. Waiting on an invalid descriptor must lead to an error.
    #[test]
    fn wait_returns_the_sign_of_the_source() {
        let events = Events::new().unwrap();
        let fd = Fd::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let source = events.add_descriptor(fd, Sign::GroupStall, EventFlags::IN, None).unwrap();
        for _ in 0..2 {
            rustix::io::write(&source.fd, &1u64.to_ne_bytes()).unwrap();
            assert_eq!(wait(events.number()).unwrap(), Sign::GroupStall as u64);
        }
        drop(source);
        assert!(wait(-1).is_err());
    }
}
