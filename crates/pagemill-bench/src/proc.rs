//! Reads the memory, parent, start time and page faults of processes from `/proc`.

use std::fs;
use std::io::Read;

use crate::native::Pages;

/// Resident memory of one process in bytes, from `/proc/PID/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentMemory {
    /// All resident pages, including those of files and shared memory.
    pub all: u64,
    /// Resident anonymous pages.
    pub anonymous: u64,
    /// The maximum of `all` since the start of the process, recorded by the kernel.
    pub peak: u64,
}

/// Parent, start time and faults of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    pub pid: u32,
    pub parent: u32,
    /// Start time in clock ticks since boot. Process id and start time together identify a process, even if the id is
    /// reused.
    pub start_time: u64,
    /// Page faults that needed no I/O.
    pub minor_faults: u64,
}

/// Returns the resident memory of a process; none if it has ended or is a zombie.
pub fn resident_memory(pid: u32) -> Option<ResidentMemory> {
    parse_status(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// Returns the resident bytes of this process as the kernel counts them; 0 if the value cannot be read. Makes no
/// allocation.
pub fn own_resident_bytes() -> u64 {
    let mut bytes = [0; 128];
    let read = fs::File::open("/proc/self/statm").and_then(|mut file| file.read(&mut bytes));
    let text = read.ok().and_then(|len| std::str::from_utf8(&bytes[..len]).ok()).unwrap_or_default();
    let pages: u64 = text.split_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    pages * Pages::page_bytes() as u64
}

/// Returns parent, start time and faults of a process; none if it has ended.
pub fn process_stat(pid: u32) -> Option<ProcessStat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

pub fn all_processes() -> Vec<ProcessStat> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers.filter_map(process_stat).collect()
}

/// Lists a process and all its descendants.
pub fn process_tree(root: u32) -> Vec<ProcessStat> {
    let processes = all_processes();
    let mut family: Vec<ProcessStat> = processes.iter().copied().filter(|process| process.pid == root).collect();
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        let children = processes.iter().filter(|process| process.parent == parent.pid);
        family.extend(children);
        next += 1;
    }
    family
}

/// Returns whether a process has mapped a file whose path contains `path`. If so, the preload of that library took
/// effect.
pub fn has_mapped(pid: u32, path: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains(path))
}

/// Returns how much memory could be used without swapping, as the kernel estimates it (`MemAvailable`).
pub fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    field_bytes(&text, "MemAvailable:")
}

/// Returns the machine's memory (`MemTotal`).
pub fn total_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    field_bytes(&text, "MemTotal:")
}

/// Returns how many bytes of the file mapping that contains `address` are mapped by huge page table entries.
pub fn huge_mapped_bytes_at(address: usize) -> Option<u64> {
    parse_huge_mapped_bytes(&fs::read_to_string("/proc/self/smaps").ok()?, address)
}

/// Returns the bytes of this process in huge pages, in anonymous memory, shared memory and files.
pub fn own_huge_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    ["AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"].iter().map(|name| field_bytes(&text, name)).sum()
}

/// Returns the anonymous and shared memory of this process in bytes, without file mappings. A page that this process
/// maps twice counts once.
pub fn own_anonymous_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    Some(field_bytes(&text, "Pss_Anon:")? + field_bytes(&text, "Pss_Shmem:")?)
}

fn parse_huge_mapped_bytes(smaps: &str, address: usize) -> Option<u64> {
    let bounds = |line: &str| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    };
    let mut lines = smaps.lines().skip_while(|line| bounds(line).is_none_or(|range| !range.contains(&address)));
    lines.next()?;
    let mapping: Vec<&str> = lines.take_while(|line| bounds(line).is_none()).collect();
    let text = mapping.join("\n");
    Some(field_bytes(&text, "ShmemPmdMapped:")? + field_bytes(&text, "FilePmdMapped:").unwrap_or(0))
}

/// Returns the voluntary context switches of all threads of a process so far; none if it has ended.
pub fn voluntary_switches(pid: u32) -> Option<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let statuses = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("status")).ok());
    statuses.map(|status| field_number(&status, "voluntary_ctxt_switches:")).sum()
}

/// Returns the busy clock ticks and all clock ticks of all CPUs since boot.
pub fn cpu_ticks() -> Option<(u64, u64)> {
    parse_ticks(&fs::read_to_string("/proc/stat").ok()?)
}

fn parse_ticks(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // Fields: user, nice, system, idle, iowait, irq, softirq, steal. The user field already includes guest time.
    let fields: Vec<u64> = line.split_whitespace().take(8).filter_map(|field| field.parse().ok()).collect();
    let idle = fields.get(3)? + fields.get(4)?;
    let all: u64 = fields.iter().sum();
    Some((all - idle, all))
}

fn parse_status(text: &str) -> Option<ResidentMemory> {
    Some(ResidentMemory {
        all: field_bytes(text, "VmRSS:")?,
        anonymous: field_bytes(text, "RssAnon:")?,
        peak: field_bytes(text, "VmHWM:")?,
    })
}

fn field_bytes(text: &str, name: &str) -> Option<u64> {
    Some(field_number(text, name)? * 1024)
}

fn field_number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

fn parse_stat(text: &str) -> Option<ProcessStat> {
    // The process name is in parentheses and can itself contain spaces and parentheses.
    let (head, tail) = text.rsplit_once(')')?;
    let (pid, _) = head.split_once(' ')?;
    let fields: Vec<&str> = tail.split_whitespace().collect();
    Some(ProcessStat {
        pid: pid.parse().ok()?,
        parent: fields.get(1)?.parse().ok()?,
        start_time: fields.get(19)?.parse().ok()?,
        minor_faults: fields.get(7)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process name may look like further fields of the line. It must be skipped up to the last parenthesis.
    #[test]
    fn process_name_with_parentheses_is_skipped() {
        let line = "7 (a) R (b) S 3 1 1 0 -1 0 55 0 0 0 1 2 0 0 20 0 1 0 999 8 9";

        let expected = ProcessStat { pid: 7, parent: 3, start_time: 999, minor_faults: 55 };
        assert_eq!(parse_stat(line), Some(expected));
    }

    /// In a line as the kernel writes it, iowait must count as idle time, and guest time must not be added a second
    /// time.
    #[test]
    fn cpu_line_is_parsed_into_busy_and_all_ticks() {
        let text = "cpu  10 1 5 100 20 1 1 2 7 7\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(parse_ticks(text), Some((20, 140)));
        assert!(cpu_ticks().is_some_and(|(busy, all)| busy <= all));
    }

    /// Of two mappings in smaps, only the mapping with the address must count.
    #[test]
    fn huge_bytes_count_only_the_mapping_at_the_address() {
        let smaps = "1000-2000 rw-s 0 0:1 7 /a b\nRss: 4 kB\nShmemPmdMapped: 2048 kB\nFilePmdMapped: 0 kB\n\
                     2000-4000 rw-s 0 0:1 8 /b\nShmemPmdMapped: 4096 kB\nVmFlags: rd";
        assert_eq!(parse_huge_mapped_bytes(smaps, 0x1fff), Some(2048 << 10));
        assert_eq!(parse_huge_mapped_bytes(smaps, 0x2000), Some(4096 << 10));
        assert_eq!(parse_huge_mapped_bytes(smaps, 0x4000), None);
    }

    /// The functions must find this test process: in its own process tree, with resident memory, and with its C library
    /// mapped.
    #[test]
    fn own_process_is_found() {
        let own = std::process::id();
        assert_eq!(process_tree(own)[0].pid, own);
        let memory = resident_memory(own).expect("a live process");
        assert!(memory.peak >= memory.all && memory.all > memory.anonymous);
        assert!(has_mapped(own, "libc"));
        assert_eq!(resident_memory(u32::MAX), None);
        // The bounds are wide, since concurrent tests in this process allocate and free memory.
        let own_bytes = own_anonymous_bytes().expect("the kernel tells it");
        assert!(own_bytes > 0 && own_bytes < resident_memory(own).expect("a live process").peak);
        assert!(voluntary_switches(own).is_some() && total_bytes() > available_bytes());
    }
}
