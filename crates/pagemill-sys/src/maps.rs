//! Mappings of this process, looked up by address.
//!
//! Since Linux 6.11 an ioctl on `/proc/self/maps` finds the mapping of an address in some hundred nanoseconds. On older
//! kernels this module reads the file. Nothing here allocates.
#![allow(unsafe_code)] // the ioctl

use crate::file::{self, Fd};
use crate::result::check_result;
use rustix::fs::{Mode, OFlags};
use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::ops::Range;

const MAPS_PATH: &CStr = c"/proc/self/maps";

/// A mapping of this process: its addresses, access rights and kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub addresses: Range<usize>,
    pub is_readable: bool,
    pub is_writable: bool,
    pub is_executable: bool,
    pub is_shared: bool,
    /// The mapping has a file, which includes hugetlbfs pages and shared memory.
    pub has_file: bool,
    /// The mapping is the stack of the program's first thread.
    pub is_stack: bool,
}

/// The kernel's `struct procmap_query`.
#[derive(Default)]
#[repr(C)]
struct MappingQuery {
    size: u64,
    flags: u64,
    addr: u64,
    start: u64,
    end: u64,
    vma_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_addr: u64,
    build_id_addr: u64,
}

/// The ioctl `PROCMAP_QUERY`: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::c_ulong =
    3 << 30 | (size_of::<MappingQuery>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 17;
const VMA_READABLE: u64 = 1;
const VMA_WRITABLE: u64 = 1 << 1;
const VMA_EXECUTABLE: u64 = 1 << 2;
const VMA_SHARED: u64 = 1 << 3;
/// Flag of the query: if no mapping contains the address, the kernel returns the next mapping above it.
const COVERING_OR_NEXT: u64 = 1 << 4;

/// Size of the buffer for the name of a mapping. Longer names are paths of files, which are not needed.
const NAME_BUFFER_BYTES: usize = 32;

/// The mappings of the process that opened this value. A fork child must not use its parent's value.
pub struct Maps {
    file: Fd,
}

impl Maps {
    /// Opens the list of this process's mappings.
    ///
    /// # Errors
    ///
    /// Errors of opening `/proc/self/maps`.
    pub fn open() -> io::Result<Self> {
        Ok(Self { file: file::open(MAPS_PATH, OFlags::RDONLY, Mode::empty())? })
    }

    /// Returns the mapping that contains `addr`, or the next mapping above it; `None` above the last one.
    ///
    /// # Errors
    ///
    /// Errors of reading `/proc/self/maps`, which happens only before Linux 6.11.
    pub fn find(&self, addr: usize) -> io::Result<Option<Mapping>> {
        match self.query_by_ioctl(addr) {
            Ok(answer) => Ok(answer),
            // The kernel lacks the ioctl.
            Err(_) => file::find_line(MAPS_PATH, |line| parse_line(line).filter(|found| found.addresses.end > addr)),
        }
    }

    /// As [`Maps::find`], but only by the ioctl. Fails on a kernel without the ioctl.
    fn query_by_ioctl(&self, addr: usize) -> io::Result<Option<Mapping>> {
        let mut name = [0u8; NAME_BUFFER_BYTES];
        let mut query = MappingQuery {
            size: size_of::<MappingQuery>() as u64,
            flags: COVERING_OR_NEXT,
            addr: addr as u64,
            name_size: NAME_BUFFER_BYTES as u32,
            name_addr: name.as_mut_ptr() as u64,
            ..MappingQuery::default()
        };
        // SAFETY: the call reads and writes the query, which contains its own size, and `name`, whose address and size
        // the query contains.
        let ask = |query: &mut MappingQuery| unsafe {
            check_result(libc::ioctl(self.file.descriptor_number(), PROCMAP_QUERY as _, &raw mut *query))
        };
        let mut asked = ask(&mut query);
        if asked.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENAMETOOLONG)) {
            // The name is a path, so it is not needed.
            (query.name_size, query.name_addr) = (0, 0);
            asked = ask(&mut query);
        }
        match asked {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            asked => asked?,
        }
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(Some(query.to_mapping(name == c"[stack]")))
    }
}

impl MappingQuery {
    /// Returns the mapping that the kernel has described in this query.
    fn to_mapping(&self, is_stack: bool) -> Mapping {
        Mapping {
            addresses: self.start as usize..self.end as usize,
            is_readable: self.vma_flags & VMA_READABLE != 0,
            is_writable: self.vma_flags & VMA_WRITABLE != 0,
            is_executable: self.vma_flags & VMA_EXECUTABLE != 0,
            is_shared: self.vma_flags & VMA_SHARED != 0,
            has_file: self.inode != 0,
            is_stack,
        }
    }
}

/// Parses a line of `/proc/self/maps`: `start-end rwxp offset device inode name`.
fn parse_line(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let inode = words.nth(2)?;
    let number = |text: &str| usize::from_str_radix(text, 16).ok();
    Some(Mapping {
        addresses: number(start)?..number(end)?,
        is_readable: rights.first() == Some(&b'r'),
        is_writable: rights.get(1) == Some(&b'w'),
        is_executable: rights.get(2) == Some(&b'x'),
        is_shared: rights.get(3) == Some(&b's'),
        has_file: inode != "0",
        is_stack: words.next() == Some("[stack]"),
    })
}

/// Calls `act` with each range of addresses below the last mapping that this process has not mapped, in ascending
/// order. `act` may map addresses of that range. Cost: about a microsecond for each mapping of the process.
///
/// # Errors
///
/// Errors of reading `/proc/self/maps`.
pub fn for_each_gap(mut act: impl FnMut(Range<usize>)) -> io::Result<()> {
    let mut end = 0;
    file::find_line(MAPS_PATH, |line| {
        let found = parse_line(line)?.addresses;
        if found.start > end {
            act(end..found.start);
        }
        end = end.max(found.end);
        None::<()>
    })?;
    Ok(())
}

/// Returns whether this process has mapped the file at `path`. Returns false if the mappings cannot be read.
pub fn has_mapped(path: &str) -> bool {
    let is_of_file = |line: &str| line.strip_suffix(path).is_some_and(|rest| rest.ends_with(' '));
    matches!(file::find_line(MAPS_PATH, |line| is_of_file(line).then_some(())), Ok(Some(())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every mapping of this process, the ioctl must return what `/proc/self/maps` lists. Above the last mapping it
    /// must return `None`.
    #[test]
    fn the_ioctl_and_the_file_agree() {
        let maps = Maps::open().unwrap();
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        let (mut count, mut stacks) = (0, 0);
        // The vsyscall page belongs to the kernel and is only listed in the file.
        for line in text.lines().filter(|line| !line.ends_with("[vsyscall]")) {
            let parsed = parse_line(line).unwrap();
            // Other tests map and unmap memory at the same time.
            let is_still_listed = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().any(|now| now == line);
            let mut others = Vec::new();
            let agrees = loop {
                match maps.query_by_ioctl(parsed.addresses.start) {
                    Ok(Some(asked)) if asked == parsed => break true,
                    Ok(asked) if is_still_listed() => others.push(asked),
                    Ok(_) => break false,
                    Err(error) => return println!("skipped: PROCMAP_QUERY: {error}"),
                }
                assert!(others.len() < 1000, "{:?} instead of {line}", others.last());
            };
            if !agrees {
                continue;
            }
            (count, stacks) = (count + 1, stacks + usize::from(parsed.is_stack));
        }
        assert!(count > 10, "only {count} mappings compared");
        assert_eq!(stacks, 1);
        assert_eq!(maps.query_by_ioctl(usize::MAX - 1).unwrap(), None);
    }

    /// `has_mapped` must find a mapped file by its whole path, but not by a part of the path.
    #[test]
    fn mapped_files_are_found() {
        let program = std::env::current_exe().unwrap();
        let program = program.to_str().unwrap();
        assert!(has_mapped(program));
        assert!(!has_mapped(&program[1..]) && !has_mapped("/nowhere"));
    }

    #[test]
    fn lines_of_maps_are_parsed() {
        let line = "7f5c-7f6d rw-s 00000000 00:01 42   /dev/zero (deleted)";
        let expected = Mapping {
            addresses: 0x7f5c..0x7f6d,
            is_readable: true,
            is_writable: true,
            is_executable: false,
            is_shared: true,
            has_file: true,
            is_stack: false,
        };
        assert_eq!(parse_line(line), Some(expected));
        assert!(parse_line("7fff-8000 rw-p 00000000 00:00 0  [stack]").unwrap().is_stack);
        assert_eq!((parse_line(""), parse_line("zz-1 rw-p 0 0 0")), (None, None));
    }
}
