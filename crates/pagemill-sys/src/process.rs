//! Identity and resources of processes, mostly read from `/proc`. Nothing here allocates.
#![allow(unsafe_code)] // getpid, gettid, kill, abort

use crate::file::{self, Fd, Path};
use crate::mem;
use crate::result::check_result;
use rustix::fs::{Mode, OFlags};
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Identifies a process by its id and the clock tick at which it started. Ids are reused, but not with the same start
/// tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Identity {
    pub pid: u32,
    /// Start time in clock ticks after boot; 0 if `/proc` is unavailable.
    pub start_ticks: u64,
}

/// Returns this process's id.
pub fn id() -> u32 {
    // SAFETY: the call takes no arguments.
    unsafe { libc::getpid() as u32 }
}

/// Returns whether the calling thread is the process's first thread. In a fork child that is the thread that called
/// `fork`.
pub fn is_first_thread() -> bool {
    thread_id() == id()
}

/// Returns the calling thread's id.
pub(crate) fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
}

/// Returns the effective user's id.
pub fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Ends this process with `SIGABRT`.
pub fn abort() -> ! {
    // SAFETY: the call takes no arguments.
    unsafe { libc::abort() }
}

/// The file `/proc/PID/stat` of a process, open. After the process has ended, reading fails, even if a new process has the
/// same id.
pub struct StatFile {
    fd: Fd,
    pid: u32,
}

impl StatFile {
    /// Opens the file of the process `pid`; returns `None` if there is no such process or no free descriptor.
    pub fn open(pid: u32) -> Option<Self> {
        let path = if pid == id() {
            // The path contains "self" instead of the id, because this `/proc` may belong to another PID namespace, with
            // other ids.
            Path::format(format_args!("/proc/self/stat"))?
        } else {
            Path::format(format_args!("/proc/{pid}/stat"))?
        };
        Some(Self { fd: file::open(path.as_c_str(), OFlags::RDONLY, Mode::empty()).ok()?, pid })
    }

    /// Returns the usage of the process; `None` if it has ended, or if it is a zombie. Takes some 5 us.
    pub fn usage(&self) -> Option<Usage> {
        let mut buffer = [0; 1024];
        let (name, fields) = self.fields(&mut buffer)?;
        let mut fields = fields.split(' ');
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        let parent_pid = fields.next()?.parse().ok()?;
        // `nth` continues after the last field that was read.
        let mut number = |skipped: usize| fields.nth(skipped)?.parse::<u64>().ok();
        let (user, system) = (number(9)?, number(0)?);
        let (threads, start_ticks, pages) = (number(4)?, number(1)?, number(1)?);
        Some(Usage {
            identity: Identity { pid: self.pid, start_ticks },
            name: name_bytes(name),
            parent_pid,
            cpu_ticks: user.saturating_add(system),
            threads,
            resident_bytes: pages.saturating_mul(mem::os_page_bytes() as u64),
        })
    }

    /// Returns the name of the process, and the fields from the state on (field 3 has index 0).
    fn fields<'buffer>(&self, buffer: &'buffer mut [u8; 1024]) -> Option<(&'buffer str, &'buffer str)> {
        let text = std::str::from_utf8(file::read_record(&self.fd, buffer).ok()?).ok()?;
        // The name is in parentheses and may contain any character.
        let (open, close) = (text.find('(')?, text.rfind(')')?);
        Some((text.get(open + 1..close)?, text.get(close + 2..)?))
    }
}

/// Opens the file `/proc/PID/stat` of a process, and returns its contents, as [`StatFile::fields`] does.
fn stat_fields(pid: u32, buffer: &mut [u8; 1024]) -> Option<(&str, &str)> {
    StatFile::open(pid)?.fields(buffer)
}

/// Returns the identity of a running process; `None` if there is no such process, or if it is a zombie.
pub fn identity(pid: u32) -> Option<Identity> {
    let mut buffer = [0; 1024];
    let (_, fields) = stat_fields(pid, &mut buffer)?;
    let mut fields = fields.split(' ');
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    Some(Identity { pid, start_ticks: fields.nth(18)?.parse().ok()? })
}

/// Memory and CPU time of a running process, as `/proc/PID/stat` reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub identity: Identity,
    /// The kernel's name of the process, at most 15 bytes, followed by zeros.
    pub name: [u8; 16],
    pub parent_pid: u32,
    /// User and system time of all threads, in clock ticks ([`ticks_per_second`]).
    pub cpu_ticks: u64,
    pub threads: u64,
    /// Resident bytes, including mapped files. The kernel may lag by some pages for each thread.
    pub resident_bytes: u64,
}

/// Returns the usage of a running process; `None` if there is no such process, or if it is a zombie. Takes some 10 us.
pub fn usage(pid: u32) -> Option<Usage> {
    StatFile::open(pid)?.usage()
}

/// Returns whether a process is stopped, by a signal (`SIGSTOP`) or by a debugger.
pub fn is_stopped(pid: u32) -> bool {
    stat_fields(pid, &mut [0; 1024]).is_some_and(|(_, fields)| fields.starts_with(['T', 't']))
}

/// Returns the number of clock ticks in a second, the unit of CPU times and start times in `/proc`.
pub fn ticks_per_second() -> u64 {
    // SAFETY: the call has no preconditions.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).unwrap_or(100).max(1)
}

/// Cached result of [`own_identity`]: the lower [`START_TICK_BITS`] bits hold the start time, the upper bits the
/// process id. 0 before the first call.
static OWN_IDENTITY: AtomicU64 = AtomicU64::new(0);

/// Bits of [`OWN_IDENTITY`] that hold the start time, enough for a thousand years of ticks. The other 22 bits are
/// enough for every process id.
const START_TICK_BITS: u32 = 42;

/// Returns the identity of this process. Reads `/proc` only once, and again after [`forget_own_identity`].
pub fn own_identity() -> Identity {
    let (pid, known) = (id(), OWN_IDENTITY.load(Relaxed));
    if known >> START_TICK_BITS == u64::from(pid) {
        return Identity { pid, start_ticks: known & ((1 << START_TICK_BITS) - 1) };
    }
    let Some(known) = identity(pid) else { return Identity { pid, start_ticks: 0 } };
    if known.start_ticks >> START_TICK_BITS == 0 && u64::from(pid) >> (u64::BITS - START_TICK_BITS) == 0 {
        OWN_IDENTITY.store(u64::from(pid) << START_TICK_BITS | known.start_ticks, Relaxed);
    }
    known
}

/// Clears the cached identity, in a fork child. A parent and a child in another PID namespace may have the same id.
pub fn forget_own_identity() {
    OWN_IDENTITY.store(0, Relaxed);
}

/// Returns whether the process with this identity still runs. Without `/proc`, returns whether the process id is in
/// use.
pub fn is_alive(known: Identity) -> bool {
    match identity(known.pid) {
        Some(now) => known.start_ticks == 0 || now.start_ticks == known.start_ticks,
        // SAFETY: signal 0 is only checked and not sent.
        None => !has_proc() && unsafe { libc::kill(known.pid as i32, 0) == 0 },
    }
}

/// Returns whether `/proc` is mounted.
pub fn has_proc() -> bool {
    identity(id()).is_some()
}

/// Returns the kernel's name of a process, at most 15 bytes, followed by zeros. All bytes are 0 if there is no such
/// process.
pub fn name(pid: u32) -> [u8; 16] {
    let mut buffer = [0; 1024];
    stat_fields(pid, &mut buffer).map_or([0; 16], |(text, _)| name_bytes(text))
}

/// Returns the letters of a process's name as the kernel stores it. Unprintable characters are replaced, because the
/// process chooses its name.
pub fn printable_letters(name: &[u8; 16]) -> impl Iterator<Item = char> {
    let bytes = name.iter().take_while(|byte| **byte != 0);
    bytes.map(|byte| if (b' '..=b'~').contains(byte) { char::from(*byte) } else { '?' })
}

fn name_bytes(text: &str) -> [u8; 16] {
    let mut name = [0; 16];
    for (to, from) in name.iter_mut().take(15).zip(text.bytes()) {
        *to = from;
    }
    name
}

/// Returns the resident bytes of a process, including mapped files; `None` without `/proc`.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let mut buffer = [0; 256];
    let path = Path::format(format_args!("/proc/{pid}/statm"))?;
    let text = std::str::from_utf8(file::read(path.as_c_str(), &mut buffer).ok()?).ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * mem::os_page_bytes() as u64)
}

/// Returns the number of CPUs that this process may run on, at least 1. On a machine with more possible CPUs than a
/// `cpu_set_t` has bits (1024), returns the number of all online CPUs.
pub fn cpu_count() -> usize {
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        return (set.count() as usize).max(1);
    }
    // SAFETY: the call has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1).max(1)
}

/// Returns the smaller of the limits on address space and data (`RLIMIT_AS`, `RLIMIT_DATA`) in bytes; `None` without a
/// limit.
pub fn address_space_limit() -> Option<usize> {
    let limit = soft_resource_limit(libc::RLIMIT_AS).min(soft_resource_limit(libc::RLIMIT_DATA));
    (limit != libc::RLIM_INFINITY).then_some(limit as usize)
}

/// Returns this process's soft limit of the resource `of`; `RLIM_INFINITY` if there is no limit.
fn soft_resource_limit(of: libc::__rlimit_resource_t) -> u64 {
    resource_limit(of).map_or(libc::RLIM_INFINITY, |limit| limit.rlim_cur)
}

/// Returns this process's limits of the resource `of`.
pub(crate) fn resource_limit(of: libc::__rlimit_resource_t) -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes only `limit`.
    check_result(unsafe { libc::getrlimit(of, &raw mut limit) }).map(|()| limit)
}

/// Returns the largest size of a file that this process may write (`RLIMIT_FSIZE`). The kernel sends a fatal signal
/// beyond that size.
pub fn file_size_limit() -> u64 {
    soft_resource_limit(libc::RLIMIT_FSIZE)
}

/// Returns the number of descriptors that this process may have open (the soft limit `RLIMIT_NOFILE`).
pub fn descriptor_limit() -> usize {
    usize::try_from(soft_resource_limit(libc::RLIMIT_NOFILE)).unwrap_or(usize::MAX)
}

/// Raises the soft limit of open descriptors to the hard limit, if that is allowed.
pub fn raise_descriptor_limit() {
    if let Ok(mut limit) = resource_limit(libc::RLIMIT_NOFILE) {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the call only reads `limit`.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Returns a random number from the kernel, or a number derived from the clock if the kernel has no random number
/// ready.
pub fn random_u64() -> u64 {
    let mut bytes = [0u8; 8];
    // A direct system call: the C library's function is a cancellation point.
    let count = getrandom(&mut bytes, GetRandomFlags::NONBLOCK);
    if count == Ok(bytes.len()) {
        u64::from_ne_bytes(bytes)
    } else {
        crate::clock::fine_ns().wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

/// Returns the major and minor number of the kernel's release; zeros if the release cannot be parsed.
pub fn kernel_release() -> (u32, u32) {
    rustix::system::uname().release().to_str().ok().and_then(parse_release).unwrap_or_default()
}

/// Returns the major and minor number of a release such as `6.18.44-generic`.
pub(crate) fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Sets `errno`, the C library's error number, of the calling thread.
#[inline]
pub fn set_errno(errno: i32) {
    // SAFETY: `errno` belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// Flag of `PR_SET_THP_DISABLE` with which huge pages stay allowed where a program advises them.
pub(crate) const THP_DISABLE_EXCEPT_ADVISED: libc::c_int = 1 << 1;

/// Restricts this process and its children to huge pages that they request with `madvise`, whatever the setting of the
/// machine is.
///
/// # Errors
///
/// `EINVAL` before Linux 6.18.
pub fn allow_huge_where_advised() -> io::Result<()> {
    // SAFETY: the call changes a setting of this process only.
    check_result(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, THP_DISABLE_EXCEPT_ADVISED, 0, 0) })
}

/// Registers functions that run at each `fork`: before the fork, after it in the parent, and after it in the child. The
/// functions cannot be unregistered.
///
/// # Errors
///
/// `ENOMEM`.
pub fn at_fork(before: extern "C" fn(), in_parent: extern "C" fn(), in_child: extern "C" fn()) -> io::Result<()> {
    unsafe extern "C" {
        fn pthread_atfork(
            prepare: Option<extern "C" fn()>,
            parent: Option<extern "C" fn()>,
            child: Option<extern "C" fn()>,
        ) -> libc::c_int;
    }
    // SAFETY: the functions exist for as long as the process.
    match unsafe { pthread_atfork(Some(before), Some(in_parent), Some(in_child)) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Registers a function that runs when the process ends by `exit` or by returning from `main`. The function cannot be
/// unregistered.
///
/// # Errors
///
/// `ENOMEM`.
pub fn at_exit(act: extern "C" fn()) -> io::Result<()> {
    // SAFETY: the function exists for as long as the process.
    match unsafe { libc::atexit(act) } {
        0 => Ok(()),
        _ => Err(io::ErrorKind::OutOfMemory.into()),
    }
}

/// Returns the size of the machine's memory in bytes.
pub fn machine_bytes() -> u64 {
    // SAFETY: the call reads a value of the system and has no other effect.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0) * u64::try_from(page_bytes).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kernel_release` must return the numbers that `/proc/sys/kernel/osrelease` contains.
    #[test]
    fn the_kernel_release_is_read() {
        let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let (major, minor) = kernel_release();
        assert!(text.starts_with(&format!("{major}.{minor}")), "{major}.{minor} of {text}");
    }

    /// This process must count as alive and have a name. An identity with its process id but another start time must
    /// not count as alive.
    #[test]
    fn this_process_is_alive_and_named() {
        let own = own_identity();
        assert!(own.start_ticks > 0);
        assert!(is_alive(own));
        assert!(!is_alive(Identity { start_ticks: own.start_ticks + 1, ..own }));
        assert_ne!(name(own.pid)[0], 0);
        assert!(resident_bytes(own.pid).unwrap() > 0);
    }

    /// The usage of this process is read twice, with work between. Its parent, threads and memory must be those of this
    /// process, and its CPU time must not fall.
    #[test]
    fn the_usage_of_this_process_is_read() {
        let before = usage(id()).unwrap();
        assert_eq!((before.identity, before.parent_pid), (own_identity(), std::os::unix::process::parent_id()));
        assert!(before.threads >= 1 && before.resident_bytes > 1 << 16 && ticks_per_second() >= 1);
        let begun = std::time::Instant::now();
        while begun.elapsed() < std::time::Duration::from_millis(50) {
            std::hint::spin_loop();
        }
        assert!(usage(id()).unwrap().cpu_ticks >= before.cpu_ticks);
        assert_eq!(usage(1 << 30), None);
    }

    /// A process ends while its file of `/proc` is open. Two reads before must return its usage, and one afterwards none.
    #[test]
    fn an_open_stat_file_has_no_usage_after_the_end() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let file = StatFile::open(child.id()).unwrap();
        for _ in 0..2 {
            assert_eq!(file.usage().map(|usage| usage.identity), identity(child.id()));
        }
        assert_eq!(file.usage().unwrap().parent_pid, id());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(file.usage(), None);
    }

    /// A process that has ended must not count as alive, even if its parent has not waited for it yet.
    #[test]
    fn a_zombie_is_not_alive() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let known = identity(child.id());
        while identity(child.id()).is_some() {
            std::thread::yield_now();
        }
        if let Some(known) = known {
            assert!(!is_alive(known));
        }
        child.wait().unwrap();
    }
}
