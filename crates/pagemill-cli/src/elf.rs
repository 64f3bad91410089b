//! Determines from the file of a program whether the preload library can replace the program's allocator.

use object::elf::{self, FileHeader64, ProgramHeader64};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};
use object::read::{ReadCache, ReadRef, StringTable};
use object::{Endianness, U32};
use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why a program would run without Pagemill's allocator, or could not run with it preloaded.
#[derive(Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The program is statically linked: it has no dynamic loader, which would load the preload library.
    Static,
    /// The program is set-uid or set-gid, so the loader ignores `LD_PRELOAD`.
    ChangesUser,
    /// The program is made for another processor architecture.
    Foreign,
    /// The program needs a sanitizer library, which ends the program if another allocator is preloaded.
    NeedsSanitizer,
    /// A sanitizer with an allocator is linked into the program. The program continues to use that allocator.
    OwnAllocator,
    /// The program's file could not be read. The text is the error.
    Unreadable(String),
    /// The program is made for another C library (musl), whose loader cannot load a library made for glibc.
    OtherCLibrary,
}

impl Obstacle {
    /// Returns the sentence that explains why the program cannot use the allocator.
    fn reason(&self, program: &Path) -> String {
        let program = program.display();
        match self {
            Self::Static => format!("{program} is linked statically"),
            Self::ChangesUser => format!("{program} is set-uid or set-gid, so the loader ignores preloads"),
            Self::Foreign => format!("{program} is made for another processor architecture"),
            Self::OwnAllocator => format!("{program} has a sanitizer with an allocator linked into it"),
            Self::NeedsSanitizer => {
                format!("{program} is built with a sanitizer, which works only with its own allocator")
            }
            Self::Unreadable(error) => format!("{program} cannot be read ({error})"),
            Self::OtherCLibrary => format!("{program} is made for another C library than glibc"),
        }
    }

    /// Returns the warning for a program that is started although it cannot use the allocator.
    pub fn warning(&self, program: &Path) -> String {
        let addition = match self {
            Self::Unreadable(_) => ": it may run on its own allocator",
            Self::Foreign => ": it may run, but on its own allocator",
            Self::OtherCLibrary => ": it runs, but it and its children use their own allocators",
            _ => ": it runs, but on its own allocator",
        };
        format!("{}{addition}", self.reason(program))
    }

    /// Returns the error message for a program that is not started, because the limit would have no effect or the
    /// program would end at once.
    pub fn refusal(&self, program: &Path) -> String {
        if *self == Self::NeedsSanitizer {
            return format!("{}: run it without pagemill", self.reason(program));
        }
        format!(
            "{}, so --limit has no effect on it: --limit-kernel SIZE lets the kernel limit it, --force runs it without a limit",
            self.reason(program)
        )
    }
}

/// Prefixes of the names of sanitizer libraries that replace `malloc`: those of gcc, then those of clang.
const SANITIZER_LIBRARIES: [&[u8]; 8] = [
    b"libasan.so",
    b"libtsan.so",
    b"liblsan.so",
    b"libhwasan.so",
    b"libclang_rt.asan",
    b"libclang_rt.tsan",
    b"libclang_rt.hwasan",
    b"libclang_rt.memprof",
];

/// Functions that a program exports if a sanitizer with its own allocator is linked into it.
const SANITIZER_FUNCTIONS: [&[u8]; 6] =
    [b"__asan_init", b"__tsan_init", b"__msan_init", b"__hwasan_init", b"__memprof_init", b"__lsan_do_leak_check"];

/// Maximum number of symbols that are compared in one bucket of a symbol hash table. A bucket usually has a few
/// symbols.
const MAX_COMPARED_SYMBOLS: usize = 4096;

/// Maximum size of a dynamic segment that is read. Real programs have far smaller dynamic segments.
const MAX_DYNAMIC_BYTES: u64 = 1 << 20;

/// Maximum length of the path of a program's dynamic loader. A longer path is not read.
const MAX_LOADER_PATH_BYTES: u64 = 4096;

/// Number of bytes at the start of a program's file that are searched for the first line of a script (`#!`).
const SCRIPT_START_BYTES: usize = 4096;

/// Finds a program by name or path, as `execvp` does.
pub fn find_program(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Path::new(name).exists().then(|| PathBuf::from(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(is_program)
}

/// Returns why this program cannot use the preloaded allocator; `None` if it can. For a script, examines the
/// interpreter.
pub fn obstacle(program: &Path) -> Option<Obstacle> {
    let mut path = program.to_owned();
    for _ in 0..4 {
        // Only regular files are opened: opening a pipe would wait for a writer.
        let metadata = path.metadata().ok().filter(|metadata| metadata.is_file())?;
        let (mode, user) = (metadata.permissions().mode(), std::fs::metadata("/proc/self").ok()?.uid());
        let changes_user = (mode & 0o4000 != 0 && metadata.uid() != user) || (mode & 0o2000 != 0 && mode & 0o010 != 0);
        if changes_user {
            return Some(Obstacle::ChangesUser);
        }
        let mut line = [0; SCRIPT_START_BYTES];
        let read = File::open(&path).and_then(|file| Ok((read_file_start(&file, &mut line)?, file)));
        let (count, file) = match read {
            Ok(read) => read,
            Err(error) => return Some(Obstacle::Unreadable(error.to_string())),
        };
        match interpreter(&line[..count]) {
            Some(next) => path = next,
            None => {
                let error = Cell::new(None);
                let found = elf_obstacle(&ReadCache::new(ErrorRecordingFile { file, error: &error }));
                let unreadable = error.take().map(|error| Obstacle::Unreadable(error.to_string()));
                return unreadable.or(found);
            }
        }
    }
    None
}

fn read_file_start(file: &File, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read_at(bytes, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// A file that records its last read error. The caller needs the record because the ELF parser treats an error like the
/// end of the file.
struct ErrorRecordingFile<'a> {
    file: File,
    error: &'a Cell<Option<io::Error>>,
}

impl ErrorRecordingFile<'_> {
    fn record_error<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            let kind = error.kind();
            if kind != io::ErrorKind::Interrupted {
                self.error.set(Some(error));
            }
            kind.into()
        })
    }
}

impl Read for ErrorRecordingFile<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let result = self.file.read(bytes);
        self.record_error(result)
    }
}

impl Seek for ErrorRecordingFile<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let result = self.file.seek(to);
        self.record_error(result)
    }
}

/// Returns the path of the interpreter that the first line of a script names; `None` if the file is not a script.
fn interpreter(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| *byte == b' ' || *byte == b'\t').filter(|word| !word.is_empty());
    let first = Path::new(OsStr::from_bytes(words.next()?));
    if first.file_name() == Some(OsStr::new("env")) {
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
        return find_program(OsStr::from_bytes(name));
    }
    Some(first.to_owned())
}

/// Returns the obstacle that the headers of an ELF file show; `None` if there is none, or if the file is not an ELF
/// file. Reads only the parts of the file that are needed.
fn elf_obstacle<'data>(data: impl ReadRef<'data>) -> Option<Obstacle> {
    let machine = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
    if data.read_bytes_at(0, elf::ELFMAG.len() as u64) != Ok(&elf::ELFMAG[..]) {
        return None;
    }
    let header = FileHeader64::<Endianness>::parse(data).ok();
    let Some((header, endian)) = header.and_then(|header| Some((header, header.endian().ok()?))) else {
        return Some(Obstacle::Foreign);
    };
    // `PN_XNUM` means that the count of segments is stored elsewhere. That does not occur in programs.
    if header.e_machine(endian) != machine || header.e_phnum(endian) == elf::PN_XNUM {
        return Some(Obstacle::Foreign);
    }
    // A segment table that cannot be read counts as empty.
    let segments = header.program_headers(endian, data).unwrap_or_default();
    let loader = segments.iter().find(|segment| segment.p_type(endian) == elf::PT_INTERP);
    let dynamic = DynamicSegment::read(segments, endian, data);
    let Some(loader) = loader else {
        // The file can be a loader that was started as a program. glibc's loader also loads the preload library.
        let name = dynamic.as_ref().and_then(|dynamic| dynamic.names(elf::DT_SONAME).next());
        return match name {
            Some(name) if name.starts_with(b"ld-linux") => None,
            Some(name) if is_other_c_library(name) => Some(Obstacle::OtherCLibrary),
            _ => Some(Obstacle::Static),
        };
    };
    let is_short = loader.p_filesz(endian) <= MAX_LOADER_PATH_BYTES;
    let path = if is_short { loader.data(endian, data).unwrap_or_default() } else { &[] };
    let is_musl = path.windows(b"/ld-musl".len()).any(|bytes| bytes == b"/ld-musl");
    let dynamic = match dynamic {
        _ if is_musl => return Some(Obstacle::OtherCLibrary),
        Some(dynamic) => dynamic,
        None => return None,
    };
    if dynamic.names(elf::DT_NEEDED).any(is_other_c_library) {
        return Some(Obstacle::OtherCLibrary);
    }
    if dynamic.needs_sanitizer_library() {
        return Some(Obstacle::NeedsSanitizer);
    }
    dynamic.contains_sanitizer().then_some(Obstacle::OwnAllocator)
}

/// Returns whether this is the file name of a C library other than glibc, such as musl. The name of glibc is
/// `libc.so.6`.
fn is_other_c_library(name: &[u8]) -> bool {
    name == b"libc.so" || name.starts_with(b"libc.musl-") || name.starts_with(b"ld-musl-")
}

/// The dynamic segment of an ELF program, and the tables to which its entries refer.
struct DynamicSegment<'data, R: ReadRef<'data>> {
    segments: &'data [ProgramHeader64<Endianness>],
    entries: &'data [elf::Dyn64<Endianness>],
    names: StringTable<'data, R>,
    endian: Endianness,
    data: R,
}

impl<'data, R: ReadRef<'data>> DynamicSegment<'data, R> {
    fn read(segments: &'data [ProgramHeader64<Endianness>], endian: Endianness, data: R) -> Option<Self> {
        // Large segments are skipped. A sparse file can claim a segment of any size, and the parser would read all of
        // it.
        let mut small = segments.iter().filter(|segment| segment.p_filesz(endian) <= MAX_DYNAMIC_BYTES);
        let entries = small.find_map(|segment| segment.dynamic(endian, data).ok()?)?;
        let mut dynamic = Self { segments, entries, names: StringTable::default(), endian, data };
        let start = dynamic.file_offset(elf::DT_STRTAB)?;
        let end = start.checked_add(dynamic.entry_value(elf::DT_STRSZ)?)?;
        dynamic.names = StringTable::new(data, start, end);
        Some(dynamic)
    }

    fn entry_value(&self, tag: elf::DynamicTag) -> Option<u64> {
        let entry = self.entries.iter().find(|entry| entry.d_tag(self.endian) == tag)?;
        Some(entry.d_val(self.endian))
    }

    /// Returns the file offset of a table. The entry of the dynamic segment with this tag holds the address of the
    /// table.
    fn file_offset(&self, tag: elf::DynamicTag) -> Option<u64> {
        let (address, endian) = (self.entry_value(tag)?, self.endian);
        self.segments.iter().filter(|segment| segment.p_type(endian) == elf::PT_LOAD).find_map(|segment| {
            let at = address.checked_sub(segment.p_vaddr(endian)).filter(|at| *at < segment.p_filesz(endian))?;
            // No file has offsets above `i64::MAX`. If a damaged file claims one, adding a size to it could overflow.
            segment.p_offset(endian).checked_add(at).filter(|at| *at <= i64::MAX as u64)
        })
    }

    /// Returns the names to which the entries of the dynamic segment with this tag refer, such as those of needed
    /// libraries.
    fn names(&self, tag: elf::DynamicTag) -> impl Iterator<Item = &'data [u8]> {
        let entries = self.entries.iter().filter(move |entry| entry.d_tag(self.endian) == tag);
        entries.filter_map(|entry| self.names.get(u32::try_from(entry.d_val(self.endian)).ok()?).ok())
    }

    fn needs_sanitizer_library(&self) -> bool {
        let is_sanitizer = |name: &[u8]| SANITIZER_LIBRARIES.iter().any(|library| name.starts_with(library));
        self.names(elf::DT_NEEDED).any(is_sanitizer)
    }

    fn contains_sanitizer(&self) -> bool {
        SANITIZER_FUNCTIONS.iter().any(|name| self.exports(name).unwrap_or(false))
    }

    fn read_u32_at(&self, at: u64) -> Option<u32> {
        Some(self.data.read_at::<U32<Endianness>>(at).ok()?.get(self.endian))
    }

    /// Returns whether the program itself exports a function of this name; `None` if its tables cannot be read. The
    /// hash table does not list functions that the program imports from libraries.
    fn exports(&self, name: &[u8]) -> Option<bool> {
        const SYMBOL_BYTES: u64 = size_of::<elf::Sym64<Endianness>>() as u64;
        let (table, symbols) = (self.file_offset(elf::DT_GNU_HASH)?, self.file_offset(elf::DT_SYMTAB)?);
        let [bucket_count, first, filter_words] =
            [self.read_u32_at(table)?, self.read_u32_at(table + 4)?, self.read_u32_at(table + 8)?];
        let buckets = table + 16 + u64::from(filter_words) * 8;
        let chains = buckets + u64::from(bucket_count) * 4;
        let wanted = elf::gnu_hash(name);
        let start = self.read_u32_at(buckets + u64::from(wanted.checked_rem(bucket_count)?) * 4)?;
        if start < first {
            return Some(false);
        }
        for symbol in (u64::from(start)..).take(MAX_COMPARED_SYMBOLS) {
            let hash = self.read_u32_at(chains + (symbol - u64::from(first)) * 4)?;
            let is_named = || self.names.get(self.read_u32_at(symbols + symbol * SYMBOL_BYTES)?).ok();
            if hash | 1 == wanted | 1 && is_named() == Some(name) {
                return Some(true);
            }
            if hash & 1 == 1 {
                break;
            }
        }
        Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn elf_headers(machine: u16, kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + kinds.len() * 56];
        // The identification says 64 bits, little endian, version 1.
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&(kinds.len() as u16).to_le_bytes());
        for (index, kind) in kinds.iter().enumerate() {
            bytes[64 + index * 56..][..4].copy_from_slice(&kind.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn programs_without_a_loader_are_static() {
        let own = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        assert_eq!(elf_obstacle(&elf_headers(own, &[1, 3, 1])[..]), None);
        assert_eq!(elf_obstacle(&elf_headers(own, &[1, 1])[..]), Some(Obstacle::Static));
        assert_eq!(elf_obstacle(&elf_headers(8, &[3])[..]), Some(Obstacle::Foreign));
        assert_eq!(elf_obstacle(&b"\x7fELF"[..]), Some(Obstacle::Foreign));
        assert_eq!(elf_obstacle(&b"no program"[..]), None);
    }

    /// The program headers are moved 300 KiB away from the start of the file. They must be found, with the same result.
    #[test]
    fn program_headers_far_from_the_file_start_are_found() {
        let own = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        for (kinds, obstacle) in [(&[1u32, 1][..], Some(Obstacle::Static)), (&[1, 3], None)] {
            let mut bytes = elf_headers(own, kinds);
            let table = bytes.split_off(64);
            bytes.resize(300 << 10, 0);
            bytes[32..40].copy_from_slice(&(300u64 << 10).to_le_bytes());
            bytes.extend(table);
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            assert_eq!(elf_obstacle(&ReadCache::new(file)), obstacle);
        }
    }

    /// No sanitizer may be reported for programs without a sanitizer, or for files that are not programs.
    #[test]
    fn ordinary_files_have_no_sanitizer() {
        for bytes in [&b""[..], b"#!/bin/sh\n", b"\x7fELF", &[0xff; 200], &[0; 200]] {
            assert_ne!(elf_obstacle(bytes), Some(Obstacle::NeedsSanitizer));
        }
        for program in ["/proc/self/exe", "/bin/sh", "/"] {
            assert_eq!(obstacle(Path::new(program)), None, "{program}");
        }
    }

    #[test]
    fn the_interpreter_of_a_script_is_found() {
        assert_eq!(interpreter(b"#! /bin/sh -e\nexit"), Some("/bin/sh".into()));
        assert_eq!(interpreter(b"#!/usr/bin/env -S A=1 sh\n"), find_program(OsStr::new("sh")));
        assert_eq!(interpreter(b"\x7fELF"), None);
    }
}
