//! Calls of the C library that have no safe wrapper in Rust: the malloc under test, process groups, file locks,
//! mappings.
//!
//! Every allocation that a workload measures comes from the C symbol `malloc`, which the preloaded allocator serves.
//! Most workloads allocate through [`WordAllocation`]. Rust's collections use the same `malloc`, but they may round
//! sizes or allocate more than needed.

#![allow(unsafe_code)] // calls the C library directly, as the programs under test do

use std::ffi::{CStr, c_char, c_int, c_void};
use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::mem;
use rustix::process::{self, Pid, Signal, WaitId, WaitIdOptions};
use rustix::time::{ClockId, clock_gettime};

/// An allocation from the C `malloc` that is filled with 64-bit words.
///
/// # Invariants
///
/// `start` is the result of `malloc` for `len_words * 8` bytes. This value alone owns these bytes, and each word is
/// initialized.
pub struct WordAllocation {
    start: NonNull<u64>,
    len_words: usize,
}

// SAFETY: the value is the only owner of its bytes (type invariant), and malloc and free work across threads.
unsafe impl Send for WordAllocation {}

// SAFETY: through a shared reference the words are only read.
unsafe impl Sync for WordAllocation {}

impl WordAllocation {
    /// Copies `words` into a new allocation; returns none if the allocator is out of memory.
    pub fn copy_of(words: &[u64]) -> Option<Self> {
        let start = raw_malloc(size_of_val(words))?.cast::<u64>();
        // SAFETY:
        // 1. `start` has room for the bytes of `words`; malloc aligned it for any fundamental type.
        // 2. A new allocation overlaps no borrowed memory.
        unsafe { ptr::copy_nonoverlapping(words.as_ptr(), start.as_ptr(), words.len()) };
        Some(Self {
            // Without `black_box` the optimizer may remove the copy and read the source instead, because it assumes
            // that memory from malloc is accessed nowhere else.
            start: black_box(start),
            len_words: words.len(),
        })
    }

    /// Makes an allocation with all words equal to `word`. Returns none if the allocator is out of memory.
    pub fn filled(len_words: usize, word: u64) -> Option<Self> {
        let start = raw_malloc(len_words * size_of::<u64>())?.cast::<u64>();
        for index in 0..len_words {
            // SAFETY: `index` lies within the new allocation, which malloc aligned for any fundamental type.
            unsafe { start.as_ptr().add(index).write(word) };
        }
        Some(Self { start: black_box(start), len_words })
    }

    pub fn words(&self) -> &[u64] {
        // SAFETY: `start` begins `len_words` initialized words that live as long as `self` (type invariant).
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len_words) }
    }
}

impl Drop for WordAllocation {
    fn drop(&mut self) {
        // SAFETY: `start` came from malloc and is freed once (type invariant).
        unsafe { libc::free(self.start.as_ptr().cast()) };
    }
}

/// An allocation from the C `malloc` that starts with a tag word. A workload checks the tag later to detect damaged
/// memory.
///
/// # Invariants
///
/// `start` is the result of `malloc` for at least eight bytes. This value alone owns these bytes, and the first word is
/// initialized.
pub struct TaggedAllocation {
    start: NonNull<u64>,
}

// SAFETY: the allocation has one owner (type invariant), and malloc and free work across threads.
unsafe impl Send for TaggedAllocation {}

impl TaggedAllocation {
    /// Allocates `size` bytes (at least eight) and writes `tag` into the first eight. Returns none if out of memory.
    #[inline]
    pub fn new(size: usize, tag: u64) -> Option<Self> {
        debug_assert!(size >= size_of::<u64>());
        let start = raw_malloc(size)?.cast::<u64>();
        // SAFETY: the allocation has at least eight bytes, and malloc aligned it.
        unsafe { start.as_ptr().write(tag) };
        Some(Self { start: black_box(start) })
    }

    /// Like [`TaggedAllocation::new`], but also writes one byte in each 4 KiB, so that all pages become resident.
    pub fn touched(size: usize, tag: u64) -> Option<Self> {
        let tagged = Self::new(size, tag)?;
        for offset in (size_of::<u64>()..size).step_by(4096) {
            // SAFETY: `offset` lies within the `size` bytes just allocated, past the tag.
            unsafe { tagged.start.as_ptr().cast::<u8>().add(offset).write_volatile(1) };
        }
        Some(tagged)
    }

    /// Like [`TaggedAllocation::new`], but also writes every byte after the tag.
    pub fn filled(size: usize, tag: u64) -> Option<Self> {
        let tagged = Self::new(size, tag)?;
        let rest = tagged.start.as_ptr().wrapping_add(1).cast::<u8>();
        // SAFETY: the `size - 8` bytes after the tag belong to the new allocation.
        unsafe { rest.write_bytes(tag as u8, size - size_of::<u64>()) };
        Some(tagged)
    }

    /// Reads the tag back from memory.
    #[inline]
    pub fn tag(&self) -> u64 {
        // SAFETY: the first word is initialized and owned (type invariant).
        unsafe { self.start.as_ptr().read_volatile() }
    }
}

impl Drop for TaggedAllocation {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `start` came from malloc and is freed once (type invariant).
        unsafe { libc::free(self.start.as_ptr().cast()) };
    }
}

#[inline]
fn raw_malloc(size: usize) -> Option<NonNull<c_void>> {
    // SAFETY: malloc takes any size.
    NonNull::new(unsafe { libc::malloc(size) })
}

/// Calls the function with which the loaded allocator returns its free memory to the kernel.
pub fn give_back(how: GiveBack) -> Result<(), String> {
    match how {
        GiveBack::MallocTrim => {
            let address = find_symbol(c"malloc_trim")?;
            // SAFETY: `malloc_trim` has this type in glibc and in every allocator that replaces it.
            let trim: unsafe extern "C" fn(usize) -> c_int = unsafe { std::mem::transmute(address) };
            // SAFETY: `malloc_trim` may be called at any time.
            unsafe { trim(0) };
        }
        GiveBack::Mallctl => {
            mallctl(c"thread.tcache.flush")?;
            // jemalloc uses the arena index 4096 for "all arenas" (`MALLCTL_ARENAS_ALL`).
            mallctl(c"arena.4096.purge")?;
        }
        GiveBack::MiCollect => {
            let address = find_symbol(c"peer_mi_collect")?;
            // SAFETY: the peer library exports `mi_collect` with this type.
            let collect: unsafe extern "C" fn(bool) = unsafe { std::mem::transmute(address) };
            // SAFETY: `mi_collect` may be called at any time.
            unsafe { collect(true) };
        }
        GiveBack::ReleaseFreeMemory => {
            let address = find_symbol(c"MallocExtension_ReleaseFreeMemory")?;
            // SAFETY: tcmalloc's C header declares the function without arguments and result.
            let release: unsafe extern "C" fn() = unsafe { std::mem::transmute(address) };
            // SAFETY: the function may be called at any time.
            unsafe { release() };
        }
        GiveBack::MeshCompact => (0..MESH_PASSES).try_for_each(|_| mesh_compact())?,
    }
    Ok(())
}

/// The C function that makes an allocator return its free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum GiveBack {
    /// `malloc_trim(0)`
    MallocTrim,
    /// `mallctl("thread.tcache.flush")`, then `mallctl("arena.4096.purge")`
    Mallctl,
    /// `mi_collect(true)`
    MiCollect,
    /// `MallocExtension_ReleaseFreeMemory()`
    ReleaseFreeMemory,
    /// `mesh_mallctl("mesh.compact")`, called repeatedly: each call merges some thousand pairs of pages
    MeshCompact,
}

/// Number of compaction passes after which the allocator Mesh has merged all pages that it can merge. It is more than
/// Mesh needs.
const MESH_PASSES: usize = 100;

type Mallctl = unsafe extern "C" fn(*const c_char, *mut c_void, *mut usize, *mut c_void, usize) -> c_int;

fn mesh_compact() -> Result<(), String> {
    let address = find_symbol(c"mesh_mallctl")?;
    // SAFETY: `mesh_mallctl` of Mesh has the type of jemalloc's `mallctl`.
    let call: Mallctl = unsafe { std::mem::transmute(address) };
    let (mut value, mut len) = (0_usize, size_of::<usize>());
    // SAFETY: every control of Mesh requires room for a result word, which `value` provides; this one does not fill it.
    // It takes no input value.
    match unsafe { call(c"mesh.compact".as_ptr(), (&raw mut value).cast(), &raw mut len, ptr::null_mut(), 0) } {
        0 => Ok(()),
        status => Err(format!("mesh_mallctl: status {status}")),
    }
}

fn mallctl(name: &CStr) -> Result<(), String> {
    let address = find_symbol(c"mallctl")?;
    // SAFETY: `mallctl` of jemalloc has this type.
    let call: Mallctl = unsafe { std::mem::transmute(address) };
    // SAFETY: these two controls take no value and return none.
    match unsafe { call(name.as_ptr(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0) } {
        0 => Ok(()),
        errno => Err(format!("mallctl {name:?}: error {errno}")),
    }
}

fn find_symbol(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: RTLD_DEFAULT searches the loaded libraries; `name` is a C string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    match address.is_null() {
        true => Err(format!("{name:?} is not there")),
        false => Ok(address),
    }
}

/// Returns the path of the file that provides `malloc` in this process.
pub fn malloc_library() -> Option<PathBuf> {
    let address = find_symbol(c"malloc").ok()?;
    // SAFETY: all zeroes is a valid Dl_info.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr only looks up the address; `info` is a live Dl_info.
    let found = unsafe { libc::dladdr(address, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr succeeded, so the name is a C string that lives as long as its library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(name.to_str().ok()?).canonicalize().ok()
}

/// Makes the kernel kill this process when its parent ends, so that no workload outlives a killed bench.
pub fn die_with_parent() {
    // The call fails only for an invalid signal.
    let _ = process::set_parent_process_death_signal(Some(Signal::KILL));
}

/// Returns whether a child of this process has ended, without reaping the child.
pub fn has_ended(child: u32) -> bool {
    let flags = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(process::waitid(WaitId::Pid(pid_of(child)), flags), Ok(None))
}

/// Waits for a child of this process and reaps it. Returns the status as `wait` encodes it, and the CPU time of the
/// child and of the children that it waited for.
pub fn reap(child: u32) -> io::Result<(i32, Duration)> {
    let mut status = 0;
    // SAFETY: all zeroes is a valid rusage.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let duration = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    loop {
        // SAFETY: `status` and `usage` are live and have the types that wait4 fills.
        let reaped = unsafe { libc::wait4(child as libc::pid_t, &raw mut status, 0, &raw mut usage) };
        match reaped {
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => return Err(io::Error::last_os_error()),
            _ => return Ok((status, duration(usage.ru_utime) + duration(usage.ru_stime))),
        }
    }
}

/// Returns the user and system time of this process so far, over all its threads.
pub fn own_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Kills the process group that a child of this process leads. A group that no longer exists is no error.
pub fn kill_group(leader: u32) {
    let _ = process::kill_process_group(pid_of(leader), Signal::KILL);
}

/// Sends SIGTERM to a child of this process. The child must not have been reaped.
pub fn terminate(child: u32) {
    let _ = process::kill_process(pid_of(child), Signal::TERM);
}

fn pid_of(process: u32) -> Pid {
    Pid::from_raw(process as i32).expect("no process has the id 0")
}

/// Moves the calling thread into a new mount namespace. Threads and processes that the calling thread starts later are
/// in that namespace, too.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: unshare touches no memory.
    match unsafe { libc::unshare(libc::CLONE_NEWNS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Kills one process. The process must be in a cgroup that the bench made.
pub fn kill_process(pid: u32) {
    let _ = process::kill_process(pid_of(pid), Signal::KILL);
}

/// A private anonymous mapping of this process. Dropping it unmaps the memory.
#[derive(Debug)]
pub struct Pages {
    addr: *mut u8,
    len_bytes: usize,
}

impl Pages {
    pub fn page_bytes() -> usize {
        pagemill_core::units::os_page_bytes()
    }

    /// Maps `len_bytes` bytes of memory, of which no page is resident yet.
    pub fn new(len_bytes: usize) -> Result<Self, String> {
        Self::aligned(len_bytes, Self::page_bytes())
    }

    fn aligned(len_bytes: usize, align_bytes: usize) -> Result<Self, String> {
        let failed = |cause: io::Error| format!("mapping {len_bytes} bytes: {cause}");
        let addr = mem::reserve(len_bytes, align_bytes, 0).map_err(failed)?;
        let pages = Self { addr: addr as *mut u8, len_bytes };
        // SAFETY: the range is the reservation that was just made.
        unsafe { mem::open(addr, len_bytes) }.map_err(failed)?;
        Ok(pages)
    }

    /// Maps memory that begins at a multiple of 2 MiB, and makes all of it resident. The kernel uses huge pages if it
    /// has any.
    pub fn huge(len_bytes: usize) -> Result<Self, String> {
        let mut pages = Self::aligned(len_bytes, BLOCK_BYTES)?;
        pages.advise_huge()?;
        pages.touch(0, len_bytes);
        Ok(pages)
    }

    /// Maps memory in small pages, whatever the system's huge-page setting is, and makes all of it resident.
    pub fn small(len_bytes: usize) -> Result<Self, String> {
        let mut pages = Self::new(len_bytes)?;
        pages.advise(0, len_bytes, libc::MADV_NOHUGEPAGE)?;
        pages.touch(0, len_bytes);
        Ok(pages)
    }

    /// Returns the address at offset `at`. Panics unless the `len_bytes` bytes from there lie in the mapping.
    pub fn address_at(&self, at: usize, len_bytes: usize) -> *mut u8 {
        assert!(at + len_bytes <= self.len_bytes);
        // SAFETY: the address is inside the mapping (assertion above).
        unsafe { self.addr.add(at) }
    }

    /// Writes a byte to each page of the `len_bytes` bytes from offset `at`, which makes the pages resident.
    pub fn touch(&mut self, at: usize, len_bytes: usize) {
        for page in (0..len_bytes).step_by(Self::page_bytes()) {
            // SAFETY: the bytes are inside the mapping, and `&mut self` excludes other access.
            unsafe { self.address_at(at + page, 1).write_volatile(1) };
        }
    }

    /// Returns the first `len_bytes` bytes of the mapping. The caller must have written them since the last
    /// `MADV_FREE`.
    pub fn bytes(&self, len_bytes: usize) -> &[u8] {
        // SAFETY: the bytes are inside the mapping, which lives as long as `self`. The kernel does not discard pages
        // that were written after `MADV_FREE`.
        unsafe { slice::from_raw_parts(self.address_at(0, len_bytes), len_bytes) }
    }

    /// Returns the first `len_bytes` bytes of the mapping, for writing.
    pub fn bytes_mut(&mut self, len_bytes: usize) -> &mut [u8] {
        // SAFETY: the bytes are inside the mapping, and `&mut self` excludes other access.
        unsafe { slice::from_raw_parts_mut(self.address_at(0, len_bytes), len_bytes) }
    }

    fn advise(&mut self, at: usize, len_bytes: usize, advice: i32) -> Result<(), String> {
        // SAFETY: the range is inside the mapping, and `&mut self` excludes readers of bytes that the call may discard.
        match unsafe { libc::madvise(self.address_at(at, len_bytes).cast(), len_bytes, advice) } {
            0 => Ok(()),
            _ => Err(format!("madvise({advice}): {}", std::io::Error::last_os_error())),
        }
    }

    /// Calls `MADV_FREE` on a range: the kernel may discard its pages until they are written again.
    pub fn advise_free(&mut self, at: usize, len_bytes: usize) -> Result<(), String> {
        self.advise(at, len_bytes, libc::MADV_FREE)
    }

    /// Calls `MADV_DONTNEED` on a range, which discards its pages.
    pub fn discard(&mut self, at: usize, len_bytes: usize) -> Result<(), String> {
        self.advise(at, len_bytes, libc::MADV_DONTNEED)
    }

    /// Calls `MADV_HUGEPAGE` on the whole mapping, so that the kernel may use huge pages.
    pub fn advise_huge(&mut self) -> Result<(), String> {
        self.advise(0, self.len_bytes, libc::MADV_HUGEPAGE)
    }

    /// Marks a range volatile or nonvolatile, according to `mode`. Returns whether any byte of the range was purged.
    pub fn mark(
        &self,
        pagemill: &pagemill_testbed::Testbed,
        at: usize,
        len_bytes: usize,
        mode: pagemill_volatile::vrange::Mode,
    ) -> Result<bool, pagemill_core::Error> {
        use pagemill_volatile::vrange::How;
        // SAFETY: the range is inside the mapping. A purge may change its bytes, to which there is no reference. Marks
        // that remain at the end vanish with the process.
        let marked =
            unsafe { pagemill.vranges.vrange(self.address_at(at, len_bytes) as usize, len_bytes, mode, How::Full) };
        marked.map(|marked| marked.purged)
    }

    /// Marks a range volatile if `volatile` is true, otherwise nonvolatile. Fails if any byte of the range was purged.
    pub fn vrange(
        &self,
        pagemill: &pagemill_testbed::Testbed,
        at: usize,
        len_bytes: usize,
        volatile: bool,
    ) -> Result<(), String> {
        use pagemill_volatile::vrange::Mode;
        let mode = if volatile { Mode::Volatile } else { Mode::Nonvolatile };
        match self.mark(pagemill, at, len_bytes, mode) {
            Ok(false) => Ok(()),
            Ok(true) => Err("without pressure a range was purged".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Returns whether the page at this offset can be read without a signal (`SIGBUS` on a purged page of a strict
    /// range).
    pub fn is_readable(&self, at: usize) -> bool {
        pagemill_sys::fault::is_readable(self.address_at(at, 1) as usize)
    }

    /// Returns the number of minor page faults of the calling thread so far.
    pub fn faults() -> u64 {
        // SAFETY: rusage is plain data, and the call fills it.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
            usage.ru_minflt as u64
        }
    }
}

// SAFETY: the mapping has one owner and is written only through `&mut Pages`.
unsafe impl Send for Pages {}

// SAFETY: a shared mapping is only read. Purges through `mark` may change bytes, but then no reference to them exists.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference into it is left.
        unsafe { mem::unreserve(self.addr as usize, self.len_bytes) };
    }
}

/// Atomic counters in huge pages, which many threads can share.
#[derive(Debug)]
pub struct SharedCounters(Pages);

impl SharedCounters {
    pub fn new(count: usize) -> Result<Self, String> {
        let bytes = (count * size_of::<AtomicU64>()).next_multiple_of(BLOCK_BYTES);
        let mut pages = Pages::huge(bytes)?;
        pages.bytes_mut(bytes).fill(0);
        Ok(Self(pages))
    }

    #[inline]
    pub fn counter(&self, index: usize) -> &AtomicU64 {
        let word = self.0.address_at(index * size_of::<AtomicU64>(), size_of::<AtomicU64>()).cast::<AtomicU64>();
        // SAFETY: the counter is inside the mapping and aligned to its size. While `self` lives, the bytes are accessed
        // only as atomic counters.
        unsafe { &*word }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocations are made with copied words, with equal words, and with a tag. Reading must return the words and the
    /// tag that were written.
    #[test]
    fn allocations_keep_their_words() {
        let words: Vec<u64> = (0..4096).collect();
        let piece = WordAllocation::copy_of(&words).expect("32 KiB are there");

        assert_eq!(piece.words(), words);
        assert_eq!(WordAllocation::filled(3, 7).expect("24 bytes are there").words(), [7; 3]);
        assert_eq!(TaggedAllocation::new(16, 42).expect("16 bytes are there").tag(), 42);
    }

    /// [`give_back`] by glibc's `malloc_trim` must succeed. [`find_symbol`] must return an error for a name that no
    /// loaded library has.
    #[test]
    fn absent_symbols_are_reported() {
        assert_eq!(give_back(GiveBack::MallocTrim), Ok(()));
        assert!(find_symbol(c"no_allocator_has_this").is_err());
    }
}
