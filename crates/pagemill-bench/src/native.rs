//! The few C calls that no safe wrapper covers: the malloc under test, process groups, locks.
//!
//! Every block of memory that a workload measures comes from [`Piece`], by way of the C symbol `malloc`, so
//! that it is the preloaded allocator that answers. The safe standard library goes there too, but it may
//! round, cache or over-allocate.

#![allow(unsafe_code)] // calls the C library directly, as the programs under test do

use std::ffi::{CStr, c_char, c_int, c_void};
use std::hint::black_box;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::AtomicU64;

use pagemill::units::BLOCK_BYTES;

/// A block from the C `malloc`, all of it initialized.
///
/// # Invariants
///
/// `start` is what `malloc` returned for `len_words * 8` bytes, ours alone, each word written.
pub struct Piece {
    start: NonNull<u64>,
    len_words: usize,
}

// SAFETY: a piece owns its bytes alone (type invariant), and malloc and free work across threads.
unsafe impl Send for Piece {}

// SAFETY: a shared piece is only read.
unsafe impl Sync for Piece {}

impl Piece {
    /// Copies `words` into a fresh block; none where the allocator has no memory.
    pub fn copy_of(words: &[u64]) -> Option<Self> {
        let start = raw_malloc(size_of_val(words))?.cast::<u64>();
        // SAFETY:
        // 1. `start` has room for the bytes of `words`, which malloc aligned for any fundamental type.
        // 2. A fresh block overlaps nothing that can be borrowed.
        unsafe { ptr::copy_nonoverlapping(words.as_ptr(), start.as_ptr(), words.len()) };
        Some(Self {
            // The optimizer knows malloc: without this it may search the source and drop the copy.
            start: black_box(start),
            len_words: words.len(),
        })
    }

    /// Writes `word` all over a fresh block; none where the allocator has no memory.
    pub fn filled(len_words: usize, word: u64) -> Option<Self> {
        let start = raw_malloc(len_words * size_of::<u64>())?.cast::<u64>();
        for index in 0..len_words {
            // SAFETY: `index` lies within the block just taken, which malloc aligned for any fundamental type.
            unsafe { start.as_ptr().add(index).write(word) };
        }
        Some(Self { start: black_box(start), len_words })
    }

    /// The words that were written.
    pub fn words(&self) -> &[u64] {
        // SAFETY: `start` begins `len_words` initialized words that live as long as `self` (type invariant).
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len_words) }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: `start` came from malloc and is given back once (type invariant).
        unsafe { libc::free(self.start.as_ptr().cast()) };
    }
}

/// A block from the C `malloc` of which only the first word is known: a tag to check later.
///
/// # Invariants
///
/// `start` is what `malloc` returned for at least eight bytes, ours alone; its first word is written.
pub struct Tagged {
    start: NonNull<u64>,
}

// SAFETY: the block is owned alone (type invariant), and malloc and free work across threads.
unsafe impl Send for Tagged {}

impl Tagged {
    /// Takes `size` bytes (at least eight) and writes `tag` at their start.
    #[inline]
    pub fn new(size: usize, tag: u64) -> Option<Self> {
        debug_assert!(size >= size_of::<u64>());
        let start = raw_malloc(size)?.cast::<u64>();
        // SAFETY: the block has at least eight bytes, aligned by malloc.
        unsafe { start.as_ptr().write(tag) };
        Some(Self { start: black_box(start) })
    }

    /// The same with one byte written into each 4 KiB, so that all of it becomes resident.
    pub fn touched(size: usize, tag: u64) -> Option<Self> {
        let tagged = Self::new(size, tag)?;
        for offset in (size_of::<u64>()..size).step_by(4096) {
            // SAFETY: `offset` lies within the `size` bytes just taken, past the tag.
            unsafe { tagged.start.as_ptr().cast::<u8>().add(offset).write_volatile(1) };
        }
        Some(tagged)
    }

    /// The same with every byte written.
    pub fn filled(size: usize, tag: u64) -> Option<Self> {
        let tagged = Self::new(size, tag)?;
        let rest = tagged.start.as_ptr().wrapping_add(1).cast::<u8>();
        // SAFETY: the `size - 8` bytes after the tag are ours.
        unsafe { rest.write_bytes(tag as u8, size - size_of::<u64>()) };
        Some(tagged)
    }

    /// The tag as memory has it now.
    #[inline]
    pub fn tag(&self) -> u64 {
        // SAFETY: the first word is initialized and ours (type invariant).
        unsafe { self.start.as_ptr().read_volatile() }
    }
}

impl Drop for Tagged {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `start` came from malloc and is given back once (type invariant).
        unsafe { libc::free(self.start.as_ptr().cast()) };
    }
}

#[inline]
fn raw_malloc(size: usize) -> Option<NonNull<c_void>> {
    // SAFETY: malloc takes any size.
    NonNull::new(unsafe { libc::malloc(size) })
}

/// Asks the loaded allocator, through its own call, to give all free memory back.
pub fn give_back(how: GiveBack) -> Result<(), String> {
    match how {
        GiveBack::MallocTrim => {
            let address = symbol(c"malloc_trim")?;
            // SAFETY: `malloc_trim` of glibc, and of any allocator that takes its place, has this type.
            let trim: unsafe extern "C" fn(usize) -> c_int = unsafe { std::mem::transmute(address) };
            // SAFETY: trimming may be asked for at any time.
            unsafe { trim(0) };
        }
        GiveBack::Mallctl => {
            mallctl(c"thread.tcache.flush")?;
            // 4096 is jemalloc's word for all arenas.
            mallctl(c"arena.4096.purge")?;
        }
        GiveBack::MiCollect => {
            let address = symbol(c"peer_mi_collect")?;
            // SAFETY: our peer library exports it with this type.
            let collect: unsafe extern "C" fn(bool) = unsafe { std::mem::transmute(address) };
            // SAFETY: collecting may be asked for at any time.
            unsafe { collect(true) };
        }
        GiveBack::ReleaseFreeMemory => {
            let address = symbol(c"MallocExtension_ReleaseFreeMemory")?;
            // SAFETY: tcmalloc's C shim declares it without arguments and value.
            let release: unsafe extern "C" fn() = unsafe { std::mem::transmute(address) };
            // SAFETY: releasing may be asked for at any time.
            unsafe { release() };
        }
        GiveBack::MeshCompact => (0..MESH_PASSES).try_for_each(|_| mesh_compact())?,
    }
    Ok(())
}

/// By which call an allocator is asked for its free memory.
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
    /// `mesh_mallctl("mesh.compact")`, again and again: each pass joins some thousand pairs of pages
    MeshCompact,
}

/// So often Mesh is asked: more than it has use for.
const MESH_PASSES: usize = 100;

type Mallctl = unsafe extern "C" fn(*const c_char, *mut c_void, *mut usize, *mut c_void, usize) -> c_int;

fn mesh_compact() -> Result<(), String> {
    let address = symbol(c"mesh_mallctl")?;
    // SAFETY: `mesh_mallctl` of Mesh has the type of jemalloc's.
    let call: Mallctl = unsafe { std::mem::transmute(address) };
    let (mut value, mut len) = (0_usize, size_of::<usize>());
    // SAFETY: every control of Mesh wants room for a word, which this one does not fill; it takes no value.
    match unsafe { call(c"mesh.compact".as_ptr(), (&raw mut value).cast(), &raw mut len, ptr::null_mut(), 0) } {
        0 => Ok(()),
        status => Err(format!("mesh_mallctl: status {status}")),
    }
}

fn mallctl(name: &CStr) -> Result<(), String> {
    let address = symbol(c"mallctl")?;
    // SAFETY: `mallctl` of jemalloc has this type.
    let call: Mallctl = unsafe { std::mem::transmute(address) };
    // SAFETY: these two controls take no value and give none.
    match unsafe { call(name.as_ptr(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0) } {
        0 => Ok(()),
        errno => Err(format!("mallctl {name:?}: error {errno}")),
    }
}

fn symbol(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: RTLD_DEFAULT searches the loaded libraries; `name` is a C string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    match address.is_null() {
        true => Err(format!("{name:?} is not there")),
        false => Ok(address),
    }
}

/// The file whose `malloc` answers in this process.
pub fn malloc_home() -> Option<PathBuf> {
    let address = symbol(c"malloc").ok()?;
    // SAFETY: all zeroes is a valid Dl_info.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr only looks the address up; `info` is a live Dl_info.
    let found = unsafe { libc::dladdr(address, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr found it, so the name is a C string that lives as long as its library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(name.to_str().ok()?).canonicalize().ok()
}

/// Ends this process when the one that started it ends, so that nothing outlives a killed bench.
pub fn die_with_parent() {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Whether a child of ours has ended. It is not reaped.
pub fn has_ended(child: u32) -> bool {
    // SAFETY: all zeroes is a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is a live siginfo_t.
    let result = unsafe { libc::waitid(libc::P_PID, child, &mut info, flags) };
    // SAFETY: waitid filled `info`, or left it zero; its process number is then zero too.
    result != 0 || unsafe { info.si_pid() } != 0
}

/// Kills the process group that a child of ours leads; one that is gone is no error.
pub fn kill_group(leader: u32) {
    // SAFETY: kill touches no memory. The group is led by a child that we started and have not reaped.
    unsafe { libc::kill(-(leader as libc::pid_t), libc::SIGKILL) };
}

/// Asks a child of ours, not yet reaped, to end by itself.
pub fn terminate(child: u32) {
    // SAFETY: kill touches no memory. The number is still the child's as long as it is not reaped.
    unsafe { libc::kill(child as libc::pid_t, libc::SIGTERM) };
}

/// Gives the calling thread, and what it starts from here on, mounts of its own.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: unshare touches no memory.
    match unsafe { libc::unshare(libc::CLONE_NEWNS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Kills one process of a cgroup that we made.
pub fn kill_process(pid: u32) {
    // SAFETY: kill touches no memory.
    unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
}

/// Takes the file's lock, waiting for it.
pub fn lock(file: BorrowedFd<'_>) -> io::Result<()> {
    flock(file, libc::LOCK_EX)
}

/// Takes the file's lock if nobody has it.
pub fn try_lock(file: BorrowedFd<'_>) -> bool {
    flock(file, libc::LOCK_EX | libc::LOCK_NB).is_ok()
}

/// Gives the file's lock back.
pub fn unlock(file: BorrowedFd<'_>) {
    // Unlocking a lock that we hold cannot fail; and closing the file would end it too.
    let _ = flock(file, libc::LOCK_UN);
}

fn flock(file: BorrowedFd<'_>, operation: c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as it is borrowed; flock touches no memory.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Private anonymous memory of this process, in small pages, unmapped with this.
#[derive(Debug)]
pub struct Pages {
    addr: *mut u8,
    len_bytes: usize,
}

impl Pages {
    /// Bytes of a page.
    pub fn page_bytes() -> usize {
        pagemill::units::os_page_bytes()
    }

    /// Maps it; nothing is resident yet.
    pub fn new(len_bytes: usize) -> Result<Self, String> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping replaces nothing.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, access, flags, -1, 0) };
        match addr == libc::MAP_FAILED {
            true => Err(format!("mapping {len_bytes} bytes: {}", std::io::Error::last_os_error())),
            false => Ok(Self { addr: addr.cast(), len_bytes }),
        }
    }

    /// Maps it from a huge page's boundary on, in huge pages where the kernel has any; all of it is resident.
    pub fn huge(len_bytes: usize) -> Result<Self, String> {
        let spare = ManuallyDrop::new(Self::new(len_bytes + BLOCK_BYTES)?);
        let head_bytes = spare.addr.align_offset(BLOCK_BYTES);
        let mut pages = Self { addr: spare.at(head_bytes, len_bytes), len_bytes };
        // SAFETY: the part of our own mapping before what is kept, of which nobody knows; nothing is no error that matters.
        unsafe { libc::munmap(spare.addr.cast(), head_bytes) };
        let tail = spare.at(head_bytes + len_bytes, BLOCK_BYTES - head_bytes);
        // SAFETY: the same of the part behind it.
        unsafe { libc::munmap(tail.cast(), BLOCK_BYTES - head_bytes) };
        pages.allow_huge()?;
        pages.touch(0, len_bytes);
        Ok(pages)
    }

    /// Maps it in small pages, whatever the system prefers; all of it is resident.
    pub fn small(len_bytes: usize) -> Result<Self, String> {
        let mut pages = Self::new(len_bytes)?;
        pages.advise(0, len_bytes, libc::MADV_NOHUGEPAGE)?;
        pages.touch(0, len_bytes);
        Ok(pages)
    }

    /// Where a part is.
    pub fn at(&self, at: usize, len_bytes: usize) -> *mut u8 {
        assert!(at + len_bytes <= self.len_bytes);
        // SAFETY: inside the mapping, as asserted.
        unsafe { self.addr.add(at) }
    }

    /// Writes a byte of each page.
    pub fn touch(&mut self, at: usize, len_bytes: usize) {
        for page in (0..len_bytes).step_by(Self::page_bytes()) {
            // SAFETY: inside the mapping, which `&mut self` has for itself.
            unsafe { self.at(at + page, 1).write_volatile(1) };
        }
    }

    /// The first bytes, which were written since they were offered.
    pub fn bytes(&self, len_bytes: usize) -> &[u8] {
        // SAFETY: inside the mapping, which lives as long as `self`; the kernel takes nothing that was written.
        unsafe { slice::from_raw_parts(self.at(0, len_bytes), len_bytes) }
    }

    /// The first bytes, to be written.
    pub fn bytes_mut(&mut self, len_bytes: usize) -> &mut [u8] {
        // SAFETY: inside the mapping, which `&mut self` has for itself; whatever is read there is a byte.
        unsafe { slice::from_raw_parts_mut(self.at(0, len_bytes), len_bytes) }
    }

    fn advise(&mut self, at: usize, len_bytes: usize, advice: i32) -> Result<(), String> {
        // SAFETY: inside the mapping; `&mut self`: nobody reads what goes.
        match unsafe { libc::madvise(self.at(at, len_bytes).cast(), len_bytes, advice) } {
            0 => Ok(()),
            _ => Err(format!("madvise({advice}): {}", std::io::Error::last_os_error())),
        }
    }

    /// `MADV_FREE`.
    pub fn offer(&mut self, at: usize, len_bytes: usize) -> Result<(), String> {
        self.advise(at, len_bytes, libc::MADV_FREE)
    }

    /// `MADV_DONTNEED`.
    pub fn discard(&mut self, at: usize, len_bytes: usize) -> Result<(), String> {
        self.advise(at, len_bytes, libc::MADV_DONTNEED)
    }

    /// Lets it come in huge pages, where the kernel has any.
    pub fn allow_huge(&mut self) -> Result<(), String> {
        self.advise(0, self.len_bytes, libc::MADV_HUGEPAGE)
    }

    /// Marks a part, or unmarks it; says whether any was purged.
    pub fn mark(
        &self,
        pagemill: &pagemill::Pagemill,
        at: usize,
        len_bytes: usize,
        mode: pagemill::volatile::vrange::Mode,
    ) -> Result<bool, pagemill::Error> {
        use pagemill::volatile::vrange::How;
        // SAFETY: inside the mapping; nobody has a reference to its bytes, which mean nothing; what is marked at the end
        // goes with the process.
        let marked = unsafe { pagemill.vranges.vrange(self.at(at, len_bytes) as usize, len_bytes, mode, How::Full) };
        marked.map(|marked| marked.purged)
    }

    /// Marks a part, or unmarks it, where nothing is purged.
    pub fn vrange(
        &self,
        pagemill: &pagemill::Pagemill,
        at: usize,
        len_bytes: usize,
        volatile: bool,
    ) -> Result<(), String> {
        use pagemill::volatile::vrange::Mode;
        let mode = if volatile { Mode::Volatile } else { Mode::Nonvolatile };
        match self.mark(pagemill, at, len_bytes, mode) {
            Ok(false) => Ok(()),
            Ok(true) => Err("without pressure a range was purged".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Whether the page at this place can be read.
    pub fn is_readable(&self, at: usize) -> bool {
        pagemill_sys::fault::is_readable(self.at(at, 1) as usize)
    }

    /// Page faults of this thread so far.
    pub fn faults() -> u64 {
        // SAFETY: plain data, filled by the call.
        unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
            usage.ru_minflt as u64
        }
    }
}

// SAFETY: the mapping is owned alone, and written through `&mut Pages` only.
unsafe impl Send for Pages {}

// SAFETY: a shared mapping is only read; what `mark` does meanwhile is its contract's concern.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no part is known to anybody.
        unsafe { libc::munmap(self.addr.cast(), self.len_bytes) };
    }
}

/// Counters in huge pages, which many threads change.
#[derive(Debug)]
pub struct Counts(Pages);

impl Counts {
    /// So many, all zero.
    pub fn new(count: usize) -> Result<Self, String> {
        let bytes = (count * size_of::<AtomicU64>()).next_multiple_of(BLOCK_BYTES);
        let mut pages = Pages::huge(bytes)?;
        pages.bytes_mut(bytes).fill(0);
        Ok(Self(pages))
    }

    /// One of them.
    #[inline]
    pub fn at(&self, index: usize) -> &AtomicU64 {
        let word = self.0.at(index * size_of::<AtomicU64>(), size_of::<AtomicU64>()).cast::<AtomicU64>();
        // SAFETY: inside the mapping, aligned to the counter's size, and reached as such counters only, for as long as `self`
        // lives.
        unsafe { &*word }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What goes in comes out, at the alignment that words need.
    #[test]
    fn pieces_hold_their_words() {
        let words: Vec<u64> = (0..4096).collect();
        let piece = Piece::copy_of(&words).expect("32 KiB are there");

        assert_eq!(piece.words(), words);
        assert_eq!(Piece::filled(3, 7).expect("24 bytes are there").words(), [7; 3]);
        assert_eq!(Tagged::new(16, 42).expect("16 bytes are there").tag(), 42);
    }

    /// glibc answers its own call; a name that nobody has is an error, not a crash.
    #[test]
    fn absent_symbols_are_reported() {
        assert_eq!(give_back(GiveBack::MallocTrim), Ok(()));
        assert!(symbol(c"no_allocator_has_this").is_err());
    }
}
