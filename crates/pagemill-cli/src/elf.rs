//! Whether a preload library can reach a program: not one that is linked statically, and not one that changes its user.

use object::Endianness;
use object::elf::{self, FileHeader64, ProgramHeader64};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};
use object::read::{ReadCache, ReadRef, StringTable};
use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Why a program would run without the allocator.
#[derive(Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// No dynamic loader, which would load the library.
    Static,
    /// The loader ignores preloads for programs that run as another user.
    ChangesUser,
    /// Made for another processor architecture.
    Foreign,
    /// Its sanitizer has an allocator that must be the only one.
    Sanitized,
    /// Reading it failed with this error.
    Unreadable(String),
}

impl Obstacle {
    /// Why the allocator cannot reach the program.
    fn reason(&self, program: &Path) -> String {
        let program = program.display();
        match self {
            Self::Static => format!("{program} is linked statically"),
            Self::ChangesUser => format!("{program} is set-uid or set-gid, so the loader ignores preloads"),
            Self::Foreign => format!("{program} is made for another architecture"),
            Self::Sanitized => format!("{program} is built with a sanitizer, whose allocator has to be the only one"),
            Self::Unreadable(error) => format!("{program} cannot be read ({error})"),
        }
    }

    /// For a program that is started nevertheless.
    pub fn explain(&self, program: &Path) -> String {
        if let Self::Unreadable(_) = self {
            return format!("{}: it may run on its own allocator", self.reason(program));
        }
        let ability = if *self == Self::Foreign { " if it can" } else { "" };
        format!("{}: it runs{ability}, but on its own allocator", self.reason(program))
    }

    /// For a program that is not started, since a limit would be void, or since it would end at once.
    pub fn refuse(&self, program: &Path) -> String {
        if *self == Self::Sanitized {
            return format!("{}: run it without pagemill", self.reason(program));
        }
        format!(
            "{}, so --limit cannot bound it: --limit-kernel SIZE has the kernel bound it, --force runs it without a bound",
            self.reason(program)
        )
    }
}

/// Sanitizer libraries that replace `malloc`, without their version.
const SANITIZERS: [&[u8]; 4] = [b"libasan.so", b"libtsan.so", b"liblsan.so", b"libhwasan.so"];

/// Bytes of a script that can hold its first line.
const LINE_BYTES: usize = 4096;

/// Finds a program as `execvp` does.
pub fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Path::new(name).exists().then(|| PathBuf::from(name));
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(is_program)
}

/// Why the allocator cannot reach this program; scripts are judged by their interpreter.
pub fn obstacle(program: &Path) -> Option<Obstacle> {
    let mut path = program.to_owned();
    for _ in 0..4 {
        let metadata = path.metadata().ok()?;
        let (mode, user) = (metadata.permissions().mode(), std::fs::metadata("/proc/self").ok()?.uid());
        let changes_user = (mode & 0o4000 != 0 && metadata.uid() != user) || (mode & 0o2000 != 0 && mode & 0o010 != 0);
        if changes_user {
            return Some(Obstacle::ChangesUser);
        }
        let file = File::open(&path).ok()?;
        let mut line = [0; LINE_BYTES];
        let count = file.read_at(&mut line, 0).ok()?;
        match interpreter(&line[..count]) {
            Some(next) => path = next,
            None => {
                let error = Cell::new(None);
                let found = elf_obstacle(&ReadCache::new(Watched { file, error: &error }));
                let unreadable = error.take().map(|error| Obstacle::Unreadable(error.to_string()));
                return unreadable.or(found);
            }
        }
    }
    None
}

/// A file whose last error is kept: the parser reports it as if the file ended there.
struct Watched<'a> {
    file: File,
    error: &'a Cell<Option<io::Error>>,
}

impl Watched<'_> {
    fn keep<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            let kind = error.kind();
            if kind != io::ErrorKind::Interrupted {
                self.error.set(Some(error));
            }
            kind.into()
        })
    }
}

impl Read for Watched<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let result = self.file.read(bytes);
        self.keep(result)
    }
}

impl Seek for Watched<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let result = self.file.seek(to);
        self.keep(result)
    }
}

/// The interpreter that the first line of a script names.
fn interpreter(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| *byte == b' ' || *byte == b'\t').filter(|word| !word.is_empty());
    let first = Path::new(OsStr::from_bytes(words.next()?));
    if first.file_name() == Some(OsStr::new("env")) {
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
        return find(OsStr::from_bytes(name));
    }
    Some(first.to_owned())
}

/// Facts from the headers of an ELF file; `None` for any other file. Reads only the parts that it needs.
fn elf_obstacle<'data>(data: impl ReadRef<'data>) -> Option<Obstacle> {
    let machine = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };
    if data.read_bytes_at(0, elf::ELFMAG.len() as u64) != Ok(&elf::ELFMAG[..]) {
        return None;
    }
    let header = FileHeader64::<Endianness>::parse(data).ok();
    let Some((header, endian)) = header.and_then(|header| Some((header, header.endian().ok()?))) else {
        return Some(Obstacle::Foreign);
    };
    if header.e_machine(endian) != machine {
        return Some(Obstacle::Foreign);
    }
    // A table that cannot be read names no loader.
    let segments = header.program_headers(endian, data).unwrap_or_default();
    if !segments.iter().any(|segment| segment.p_type(endian) == elf::PT_INTERP) {
        return Some(Obstacle::Static);
    }
    needs_sanitizer(segments, endian, data).unwrap_or(false).then_some(Obstacle::Sanitized)
}

/// Whether a program needs a sanitizer's library, by the names in its dynamic segment.
fn needs_sanitizer<'data>(
    segments: &[ProgramHeader64<Endianness>],
    endian: Endianness,
    data: impl ReadRef<'data>,
) -> Option<bool> {
    let entries = segments.iter().find_map(|segment| segment.dynamic(endian, data).ok()?)?;
    let value = |tag| entries.iter().find(|entry| entry.d_tag(endian) == tag).map(|entry| entry.d_val(endian));
    let (names, len_bytes) = (value(elf::DT_STRTAB)?, value(elf::DT_STRSZ)?);
    let start = segments.iter().find_map(|segment| {
        let at = names.checked_sub(segment.p_vaddr(endian)).filter(|at| *at < segment.p_filesz(endian))?;
        (segment.p_type(endian) == elf::PT_LOAD).then_some(segment.p_offset(endian).checked_add(at)?)
    })?;
    let names = StringTable::new(data, start, start.checked_add(len_bytes)?);
    let needed = entries.iter().filter(|entry| entry.d_tag(endian) == elf::DT_NEEDED);
    let needed = needed.filter_map(|entry| names.get(u32::try_from(entry.d_val(endian)).ok()?).ok());
    Some(needed.into_iter().any(|name| SANITIZERS.iter().any(|library| name.starts_with(library))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    fn header(machine: u16, kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + kinds.len() * 56];
        // 64 bits, little endian, version 1.
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
        assert_eq!(elf_obstacle(&header(own, &[1, 3, 1])[..]), None);
        assert_eq!(elf_obstacle(&header(own, &[1, 1])[..]), Some(Obstacle::Static));
        assert_eq!(elf_obstacle(&header(8, &[3])[..]), Some(Obstacle::Foreign));
        assert_eq!(elf_obstacle(&b"\x7fELF"[..]), Some(Obstacle::Foreign));
        assert_eq!(elf_obstacle(&b"no program"[..]), None);
    }

    /// Headers behind the first pages are read, and lead to the same answer.
    #[test]
    fn headers_far_away_are_found() {
        let own = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        for (kinds, obstacle) in [(&[1u32, 1][..], Some(Obstacle::Static)), (&[1, 3], None)] {
            let mut bytes = header(own, kinds);
            let table = bytes.split_off(64);
            bytes.resize(300 << 10, 0);
            bytes[32..40].copy_from_slice(&(300u64 << 10).to_le_bytes());
            bytes.extend(table);
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&bytes).unwrap();
            assert_eq!(elf_obstacle(&ReadCache::new(file)), obstacle);
        }
    }

    /// Programs without a sanitizer and files that are not programs need none.
    #[test]
    fn ordinary_files_need_no_sanitizer() {
        for bytes in [&b""[..], b"#!/bin/sh\n", b"\x7fELF", &[0xff; 200], &[0; 200]] {
            assert_ne!(elf_obstacle(bytes), Some(Obstacle::Sanitized));
        }
        for program in ["/proc/self/exe", "/bin/sh", "/"] {
            assert_eq!(obstacle(Path::new(program)), None, "{program}");
        }
    }

    #[test]
    fn scripts_are_judged_by_their_interpreter() {
        assert_eq!(interpreter(b"#! /bin/sh -e\nexit"), Some("/bin/sh".into()));
        assert_eq!(interpreter(b"#!/usr/bin/env -S A=1 sh\n"), find(OsStr::new("sh")));
        assert_eq!(interpreter(b"\x7fELF"), None);
    }
}
