//! Whether a preload library can reach a program: not one that is linked statically, and not one that changes its user.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
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
}

impl Obstacle {
    pub fn explain(&self, program: &Path) -> String {
        let program = program.display();
        match self {
            Self::Static => format!("{program} is linked statically: it runs, but on its own allocator"),
            Self::ChangesUser => {
                format!(
                    "{program} is set-uid or set-gid, so the loader ignores preloads: it runs, but on its own allocator"
                )
            }
            Self::Foreign => {
                format!("{program} is made for another architecture: it runs if it can, but on its own allocator")
            }
        }
    }
}

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

/// What keeps the allocator from this program; scripts are judged by their interpreter.
pub fn obstacle(program: &Path) -> Option<Obstacle> {
    let mut path = program.to_owned();
    for _ in 0..4 {
        let metadata = path.metadata().ok()?;
        let (mode, user) = (metadata.permissions().mode(), std::fs::metadata("/proc/self").ok()?.uid());
        let changes_user = (mode & 0o4000 != 0 && metadata.uid() != user) || (mode & 0o2000 != 0 && mode & 0o010 != 0);
        if changes_user {
            return Some(Obstacle::ChangesUser);
        }
        let mut head = Vec::new();
        std::fs::File::open(&path).ok()?.take(64 << 10).read_to_end(&mut head).ok()?;
        match interpreter(&head) {
            Some(next) => path = next,
            None => return elf_obstacle(&head),
        }
    }
    None
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

/// Reads the program headers of a 64-bit ELF file.
fn elf_obstacle(head: &[u8]) -> Option<Obstacle> {
    const PT_INTERP: u32 = 3;
    if !head.starts_with(b"\x7fELF") {
        return None;
    }
    let u16_at = |at: usize| head.get(at..at + 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    let machine = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    if head.get(4) != Some(&2) || u16_at(18) != Some(machine) {
        return Some(Obstacle::Foreign);
    }
    let table = usize::try_from(u64::from_le_bytes(head.get(32..40)?.try_into().ok()?)).ok()?;
    let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
    for index in 0..count {
        let at = table.checked_add(index * size)?;
        let kind = head.get(at..at.checked_add(4)?)?;
        if kind == PT_INTERP.to_le_bytes() {
            return None;
        }
    }
    Some(Obstacle::Static)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(machine: u16, kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + kinds.len() * 56];
        bytes[..5].copy_from_slice(b"\x7fELF\x02");
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
        assert_eq!(elf_obstacle(&header(own, &[1, 3, 1])), None);
        assert_eq!(elf_obstacle(&header(own, &[1, 1])), Some(Obstacle::Static));
        assert_eq!(elf_obstacle(&header(8, &[3])), Some(Obstacle::Foreign));
        assert_eq!(elf_obstacle(b"\x7fELF"), Some(Obstacle::Foreign));
        assert_eq!(elf_obstacle(b"no program"), None);
    }

    #[test]
    fn scripts_are_judged_by_their_interpreter() {
        assert_eq!(interpreter(b"#! /bin/sh -e\nexit"), Some("/bin/sh".into()));
        assert_eq!(interpreter(b"#!/usr/bin/env -S A=1 sh\n"), find(OsStr::new("sh")));
        assert_eq!(interpreter(b"\x7fELF"), None);
    }
}
