//! Reads a process's memory and children from `/proc/PID`.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;

/// The fields of `/proc/PID/status` from which `run` samples the memory of a process.
#[derive(Clone, Debug, Default)]
pub struct Status {
    pub name: String,
    pub threads: u64,
    /// Peak of resident memory since the process executed its program.
    pub peak_bytes: u64,
    /// Resident anonymous and shared memory.
    pub anonymous_bytes: u64,
    /// Resident pages of files.
    pub file_bytes: u64,
    /// Hash of all memory sizes. After `vfork`, a child runs in its parent's memory until it executes a program. In
    /// that time its hash equals that of its parent.
    pub memory_hash: u64,
}

impl Status {
    /// Reads the status of a process. Returns `None` if the process does not exist. For a zombie, all sizes are
    /// zero.
    ///
    /// Cost: some 10 us.
    pub fn read(pid: u32) -> Option<Self> {
        let mut buffer = [0; 4096];
        let mut file = File::open(format!("/proc/{pid}/status")).ok()?;
        let len = file.read(&mut buffer).ok()?;
        Some(Self::parse(&String::from_utf8_lossy(&buffer[..len])))
    }

    fn parse(text: &str) -> Self {
        let (mut status, mut sizes_hash) = (Self::default(), DefaultHasher::new());
        for (name, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let value = value.trim();
            let bytes = || value.strip_suffix(" kB").and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024;
            match name {
                "Name" => status.name = value.to_owned(),
                "Threads" => status.threads = value.parse().unwrap_or(0),
                "VmHWM" => status.peak_bytes = bytes(),
                "RssAnon" | "RssShmem" => status.anonymous_bytes += bytes(),
                "RssFile" => status.file_bytes = bytes(),
                _ => {}
            }
            if name.starts_with("Vm") || name.starts_with("Rss") {
                value.hash(&mut sizes_hash);
            }
        }
        status.memory_hash = sizes_hash.finish();
        status
    }

    pub fn resident_bytes(&self) -> u64 {
        self.anonymous_bytes + self.file_bytes
    }

    /// Sets the memory sizes to zero. Called if the status of another process already counts the same memory.
    pub fn clear_memory(&mut self) {
        (self.peak_bytes, self.anonymous_bytes, self.file_bytes) = (0, 0, 0);
    }
}

/// Returns the process ids of the children of all threads of a process. `threads` is the number of its threads. Cost:
/// some 5 us per thread.
///
/// Returns no ids if the kernel does not list children, which needs `CONFIG_PROC_CHILDREN`. Distributions set that
/// option.
pub fn children_of(pid: u32, threads: u64) -> Vec<u32> {
    let of_thread = |thread: &str| -> Vec<u32> {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
        text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    };
    if threads == 1 {
        return of_thread(&pid.to_string());
    }
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().into_string().ok()).flat_map(|thread| of_thread(&thread)).collect()
}

/// Returns the proportional share of a process: the bytes of its anonymous and shared memory, divided for each page by
/// the number of processes that share it.
///
/// The kernel walks the page tables, which takes some milliseconds per gigabyte of small pages. Returns `None` if this
/// process may not read the file `smaps_rollup`, or if the process does not exist.
pub fn proportional_bytes(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let kib = |name: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix(" kB")?.parse().ok()
    };
    Some((kib("Pss_Anon:")? + kib("Pss_Shmem:")?) * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each memory size must be parsed. The hash must depend only on the sizes.
    #[test]
    fn sizes_and_their_hash_are_parsed() {
        let text = "Name:\tcc1 plus\nPid:\t7\nVmHWM:\t   300 kB\nRssAnon:\t 100 kB\nRssFile:\t  40 kB\n\
                    RssShmem:\t  10 kB\nThreads:\t3\n";
        let status = Status::parse(text);
        assert_eq!((status.name.as_str(), status.threads), ("cc1 plus", 3));
        assert_eq!((status.peak_bytes, status.anonymous_bytes, status.file_bytes), (300 << 10, 110 << 10, 40 << 10));
        assert_eq!(status.resident_bytes(), 150 << 10);
        let hash_after = |from: &str, to: &str| Status::parse(&text.replace(from, to)).memory_hash;
        assert_eq!(hash_after("Pid:\t7", "Pid:\t8"), status.memory_hash);
        assert_ne!(hash_after("40 kB", "44 kB"), status.memory_hash);
        // A zombie has no sizes.
        assert_eq!(Status::parse("Name:\tx\nThreads:\t1\n").resident_bytes(), 0);
    }

    #[test]
    fn this_process_has_memory() {
        let own = std::process::id();
        let status = Status::read(own).unwrap();
        assert!(status.resident_bytes() > 0 && status.peak_bytes > 0 && status.threads > 0);
        let share = proportional_bytes(own).unwrap();
        assert!(share > 0);
        assert!(Status::read(1 << 30).is_none() && proportional_bytes(1 << 30).is_none());
    }
}
