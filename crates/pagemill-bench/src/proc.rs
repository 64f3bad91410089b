//! Reads the memory, parent, start time and page faults of processes from `/proc`.

use std::fs;
use std::io::Read;

use procfs::process::{MemoryMap, Process};
use procfs::{Current, CurrentSI, KernelStats, Meminfo};

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
    let status = Process::new(pid as i32).and_then(|process| process.status()).ok()?;
    Some(ResidentMemory { all: status.vmrss? * 1024, anonymous: status.rssanon? * 1024, peak: status.vmhwm? * 1024 })
}

/// Returns the resident bytes of this process as the kernel counts them; 0 if the value cannot be read. Makes no
/// allocation, unlike `procfs`, because workloads call it between two measurements of an allocator.
pub fn own_resident_bytes() -> u64 {
    let mut bytes = [0; 128];
    let read = fs::File::open("/proc/self/statm").and_then(|mut file| file.read(&mut bytes));
    let text = read.ok().and_then(|len| std::str::from_utf8(&bytes[..len]).ok()).unwrap_or_default();
    let pages: u64 = text.split_whitespace().nth(1).and_then(|field| field.parse().ok()).unwrap_or(0);
    pages * Pages::page_bytes() as u64
}

/// Returns parent, start time and faults of a process; none if it has ended.
pub fn process_stat(pid: u32) -> Option<ProcessStat> {
    stat_of(&Process::new(pid as i32).ok()?)
}

fn stat_of(process: &Process) -> Option<ProcessStat> {
    let stat = process.stat().ok()?;
    let (pid, parent) = (stat.pid as u32, stat.ppid as u32);
    Some(ProcessStat { pid, parent, start_time: stat.starttime, minor_faults: stat.minflt })
}

/// Lists a process and all its descendants.
pub fn process_tree(root: u32) -> Vec<ProcessStat> {
    let all = procfs::process::all_processes().into_iter().flatten();
    let processes: Vec<ProcessStat> = all.filter_map(|process| stat_of(&process.ok()?)).collect();
    let mut family: Vec<ProcessStat> = processes.iter().copied().filter(|process| process.pid == root).collect();
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        let children = processes.iter().filter(|process| process.parent == parent.pid);
        family.extend(children);
        next += 1;
    }
    family
}

/// Returns whether a process has mapped a file whose path contains `path`. For the path of a preloaded library, this
/// shows that the preload took effect.
pub fn has_mapped(pid: u32, path: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains(path))
}

/// Returns how many bytes of memory could be used without swapping, as the kernel estimates it (`MemAvailable`).
pub fn available_bytes() -> Option<u64> {
    Meminfo::current().ok()?.mem_available
}

/// Returns the size of the machine's memory in bytes (`MemTotal`).
pub fn total_bytes() -> Option<u64> {
    Meminfo::current().ok().map(|memory| memory.mem_total)
}

/// Returns how many bytes of the file mapping that contains `address` are mapped by huge page table entries.
pub fn huge_mapped_bytes_at(address: usize) -> Option<u64> {
    let is_it = |mapping: &MemoryMap| (mapping.address.0..mapping.address.1).contains(&(address as u64));
    let mapping = Process::myself().and_then(|own| own.smaps()).ok()?.into_iter().find(is_it)?;
    Some(mapping.extension.map.get("ShmemPmdMapped")? + mapping.extension.map.get("FilePmdMapped").unwrap_or(&0))
}

/// Returns the bytes of this process in huge pages, in anonymous memory, shared memory and files.
pub fn own_huge_bytes() -> Option<u64> {
    sum_of_rollup(&["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"])
}

/// Returns the anonymous and shared memory of this process in bytes, without file mappings. A page that this process
/// maps twice counts once.
pub fn own_anonymous_bytes() -> Option<u64> {
    sum_of_rollup(&["Pss_Anon", "Pss_Shmem"])
}

/// Returns the sum of the given fields of `/proc/self/smaps_rollup`; none if the kernel does not provide one of these
/// fields.
fn sum_of_rollup(fields: &[&str]) -> Option<u64> {
    let rollup = Process::myself().and_then(|own| own.smaps_rollup()).ok()?;
    let values = &rollup.memory_map_rollup.0.first()?.extension.map;
    fields.iter().map(|field| values.get(*field).copied()).sum()
}

/// Returns the voluntary context switches of all threads of a process so far; none if it has ended.
pub fn voluntary_switches(pid: u32) -> Option<u64> {
    let tasks = Process::new(pid as i32).and_then(|process| process.tasks()).ok()?;
    let statuses = tasks.filter_map(|task| task.ok()?.status().ok());
    statuses.map(|status| status.voluntary_ctxt_switches).sum()
}

/// Returns the busy clock ticks and the total clock ticks since boot, summed over all CPUs. Guest time is not added,
/// because the kernel's user time already includes it.
pub fn cpu_ticks() -> Option<(u64, u64)> {
    let cpu = KernelStats::current().ok()?.total;
    let optional = [cpu.irq, cpu.softirq, cpu.steal].into_iter().flatten().sum::<u64>();
    let (busy, idle) = (cpu.user + cpu.nice + cpu.system + optional, cpu.idle + cpu.iowait?);
    Some((busy, busy + idle))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For this test process, [`process_tree`] must contain the process, its resident memory must not be 0, and
    /// [`has_mapped`] must find the C library of the process.
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
        assert!(own_huge_bytes().is_some() && cpu_ticks().is_some_and(|(busy, all)| busy <= all));
    }
}
