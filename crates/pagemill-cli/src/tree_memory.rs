//! The memory of the processes of a `pagemill run` as the kernel counts it, sampled from `/proc`.
//!
//! A sample includes the program's descendants (found by parent links), the members of the tree's page, and processes
//! that earlier samples found. So a daemon is counted even after another process has adopted it.
//!
//! A page that processes share (library code, memory after a fork) is counted in each of them, as in `ps`. If the sum
//! exceeds a limit, the proportional share (`Pss`) of each process is read. The sum of the proportional shares counts a
//! shared page once. Reading them costs far more.
//!
//! A process that starts and ends between two samples is missed. The pause after a sample is proportional to its cost,
//! so that sampling uses less than 1 % of a CPU.

use crate::proc_status::{Status, children_of, proportional_bytes};
use crate::timeline::{Returned, Timeline};
use pagemill_core::reclaim::tree::{TreePage, UNLIMITED};
use pagemill_sys::clock;
use pagemill_sys::process::{self, Identity};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Maximum number of processes that a message or a report lists.
pub const MAX_LISTED_PROCESSES: usize = 5;

/// Minimum pause between two samples of a process tree's memory.
const MIN_SAMPLE_PAUSE: Duration = Duration::from_millis(10);

/// Minimum pause between two readings of the counters of all processes.
const MIN_COUNTERS_PAUSE: Duration = Duration::from_millis(50);

/// The pause after a sample is the sample's CPU time multiplied by this factor.
const SAMPLE_PAUSE_FACTOR: u32 = 120;

/// A process and its memory, which is a peak or a proportional share.
#[derive(Clone, Debug)]
pub struct Process {
    pub identity: Identity,
    /// Name of the program that the process was running when it had the most memory.
    pub name: String,
    pub bytes: u64,
}

/// The sample in which the process tree exceeded its limit by the largest amount so far.
#[derive(Clone, Debug)]
pub struct Excess {
    pub limit_bytes: u64,
    /// Anonymous and shared memory of all processes. Memory that several processes share counts once.
    pub held_bytes: u64,
    /// Memory of all the processes' allocators when the sample was taken.
    pub allocator_bytes: u64,
    /// The processes with the largest proportional shares of `held_bytes`, largest first; at most
    /// [`MAX_LISTED_PROCESSES`].
    pub largest: Vec<Process>,
}

impl Excess {
    pub fn bytes_over_limit(&self) -> u64 {
        self.held_bytes - self.limit_bytes
    }

    pub fn bytes_outside_allocators(&self) -> u64 {
        self.held_bytes.saturating_sub(self.allocator_bytes)
    }
}

/// Peak memory of a process tree, over all samples so far.
#[derive(Clone, Debug, Default)]
pub struct Peak {
    /// Largest sum of the resident memory of all processes in one sample.
    pub resident_bytes: u64,
    /// Largest sum of the anonymous and shared memory of all processes in one sample: their resident memory without
    /// pages of files.
    pub anonymous_bytes: u64,
    /// The part of `anonymous_bytes` that belonged to no allocator of the tree, in the same sample.
    pub outside_bytes: u64,
    pub excess: Option<Excess>,
}

/// Samples the memory of one process tree.
pub struct TreeMemory {
    page: &'static TreePage,
    program: u32,
    /// The running processes that the last sample found, by process id.
    seen: HashMap<u32, Process>,
    /// The processes with the largest peaks of resident memory among those that have ended.
    ended: Vec<Process>,
    ended_count: usize,
    pub peak: Peak,
    start: Instant,
    pub timeline: Timeline,
    /// Earliest time at which the counters of the processes are read again.
    next_counters: Instant,
    /// Earliest time at which proportional shares are read again, in nanoseconds.
    next_shares_ns: u64,
}

impl TreeMemory {
    /// Creates a sampler. `program` is the process id of the tree's root, which started at `start`.
    pub fn new(page: &'static TreePage, program: u32, start: Instant) -> Self {
        Self {
            page,
            program,
            seen: HashMap::new(),
            ended: Vec::new(),
            ended_count: 0,
            peak: Peak::default(),
            start,
            timeline: Timeline::default(),
            next_counters: start,
            next_shares_ns: 0,
        }
    }

    /// Samples the memory of all processes of the tree. Returns the pause until the next sample.
    ///
    /// Cost: some 20 us for each process.
    pub fn sample(&mut self) -> Duration {
        let start_ns = clock::own_cpu_ns();
        let found = self.find_processes();
        self.record_processes(&found);
        let resident_bytes = found.values().map(Status::resident_bytes).sum();
        self.peak.resident_bytes = self.peak.resident_bytes.max(resident_bytes);
        let anonymous_bytes = found.values().map(|status| status.anonymous_bytes).sum();
        let totals = self.page.totals();
        let allocator_bytes = totals.resident.saturating_add(totals.untouched);
        self.timeline.record(self.start.elapsed(), resident_bytes, totals.resident);
        if anonymous_bytes > self.peak.anonymous_bytes {
            self.peak.anonymous_bytes = anonymous_bytes;
            self.peak.outside_bytes = anonymous_bytes.saturating_sub(allocator_bytes);
        }
        let pause = pause_after(clock::own_cpu_ns() - start_ns);
        let limit_bytes = self.page.limit();
        if limit_bytes != UNLIMITED && anonymous_bytes > limit_bytes && clock::fine_ns() >= self.next_shares_ns {
            let start_ns = clock::own_cpu_ns();
            self.record_shares(&found, limit_bytes, allocator_bytes);
            let cost_ns = clock::own_cpu_ns() - start_ns;
            self.next_shares_ns = clock::fine_ns() + pause_after(cost_ns).as_nanos() as u64;
        }
        pause
    }

    /// Calls `read` for the bytes that the tree has returned, and adds them to the time line. Does nothing if the last
    /// call was so recent that reading would use much CPU time.
    pub fn sample_returned(&mut self, read: impl FnOnce() -> Returned) {
        if Instant::now() < self.next_counters {
            return;
        }
        let start_ns = clock::own_cpu_ns();
        self.timeline.record_returned(self.start.elapsed(), read());
        let pause = pause_after(clock::own_cpu_ns() - start_ns).max(MIN_COUNTERS_PAUSE);
        self.next_counters = Instant::now() + pause;
    }

    /// Returns the status of all running processes of the tree, by process id.
    fn find_processes(&self) -> HashMap<u32, Status> {
        let mut found = HashMap::new();
        add_descendants(self.program, &mut found);
        for member in self.page.members() {
            if !found.contains_key(&member.pid()) && member.is_alive() {
                add_descendants(member.pid(), &mut found);
            }
        }
        for (pid, process) in &self.seen {
            if !found.contains_key(pid) && process::is_alive(process.identity) {
                add_descendants(*pid, &mut found);
            }
        }
        found
    }

    fn record_processes(&mut self, found: &HashMap<u32, Status>) {
        for (pid, status) in found {
            if let Some(process) = self.seen.get_mut(pid) {
                if status.peak_bytes > process.bytes {
                    (process.bytes, process.name) = (status.peak_bytes, status.name.clone());
                }
            } else if let Some(identity) = process::identity(*pid) {
                self.seen.insert(*pid, Process { identity, name: status.name.clone(), bytes: status.peak_bytes });
            }
        }
        let (ended, count) = (&mut self.ended, &mut self.ended_count);
        self.seen.retain(|pid, process| {
            let stays = found.contains_key(pid);
            if !stays {
                *count += 1;
                ended.push(process.clone());
            }
            stays
        });
        keep_largest(ended);
        assert!(self.ended.len() <= self.ended_count);
    }

    /// Reads the proportional shares of all processes. Records the excess over the limit if it is the largest so far.
    fn record_shares(&mut self, found: &HashMap<u32, Status>, limit_bytes: u64, allocator_bytes: u64) {
        // A single process shares its memory with no other process of the tree, so its proportional share is not read.
        let is_alone = found.len() == 1;
        let shares: Vec<Option<u64>> =
            found.keys().map(|pid| if is_alone { None } else { proportional_bytes(*pid) }).collect();
        // While the shares are read, processes can end, and the shares of the other processes grow. Only processes
        // that have their memory after the last share was read are counted: a share was then read while all of them
        // shared the page, so the sum counts no page more than once.
        let mut largest: Vec<_> = found
            .iter()
            .zip(shares)
            .filter_map(|((pid, status), proportional_bytes)| {
                let identity = self.seen.get(pid)?.identity;
                let later_bytes = if is_alone { u64::MAX } else { Status::read(*pid).map_or(0, |s| s.anonymous_bytes) };
                let bytes = bounded_share(status.anonymous_bytes, proportional_bytes, later_bytes);
                Some(Process { identity, name: status.name.clone(), bytes })
            })
            .collect();
        let held_bytes = largest.iter().map(|process| process.bytes).sum();
        let before = self.peak.excess.as_ref().map_or(limit_bytes, |excess| excess.held_bytes);
        assert!(before >= limit_bytes, "only an excess is recorded");
        if held_bytes > before {
            keep_largest(&mut largest);
            self.peak.excess = Some(Excess { limit_bytes, held_bytes, allocator_bytes, largest });
        }
    }

    /// Records the peak of resident memory that the kernel reports when the program ends. It is the largest peak of a
    /// single process, among the program and the descendants that were waited for.
    pub fn record_program_end(&mut self, max_resident_bytes: u64) {
        self.peak.resident_bytes = self.peak.resident_bytes.max(max_resident_bytes);
        // If only one process was found, the peak is that of this process.
        if self.ended_count + self.seen.len() == 1
            && let Some(process) = self.seen.get_mut(&self.program)
        {
            process.bytes = process.bytes.max(max_resident_bytes);
        }
    }

    /// Returns the number of different processes that all samples found.
    pub fn process_count(&self) -> usize {
        self.ended_count + self.seen.len()
    }

    /// Returns the processes with the largest peaks of resident memory, largest first.
    pub fn largest_processes(&self) -> Vec<Process> {
        let mut largest: Vec<_> = self.seen.values().chain(&self.ended).cloned().collect();
        keep_largest(&mut largest);
        largest
    }
}

/// Returns the proportional share of a process, but at most its `anonymous_bytes` in the sample and its `later_bytes`
/// after all shares were read.
///
/// `proportional_bytes` is read after the sample, and the process may have grown since then. Without the bound, the sum
/// of the shares could exceed the sum of the sample that was compared with the limit. `later_bytes` is zero for a
/// process that has ended. `proportional_bytes` is `None` for a process of another user, so all its memory counts.
fn bounded_share(anonymous_bytes: u64, proportional_bytes: Option<u64>, later_bytes: u64) -> u64 {
    proportional_bytes.unwrap_or(anonymous_bytes).min(anonymous_bytes).min(later_bytes)
}

fn keep_largest(processes: &mut Vec<Process>) {
    processes.retain(|process| process.bytes > 0);
    processes.sort_by_key(|process| std::cmp::Reverse(process.bytes));
    processes.truncate(MAX_LISTED_PROCESSES);
}

fn pause_after(cost_ns: u64) -> Duration {
    (Duration::from_nanos(cost_ns) * SAMPLE_PAUSE_FACTOR).max(MIN_SAMPLE_PAUSE)
}

fn add_descendants(root: u32, found: &mut HashMap<u32, Status>) {
    let mut open = vec![(root, None)];
    while let Some((pid, parents_memory)) = open.pop() {
        if found.contains_key(&pid) {
            continue;
        }
        let Some(mut status) = Status::read(pid) else { continue };
        let memory = Some(status.memory_hash);
        if memory == parents_memory {
            // Between `vfork` and `exec`, a child runs in its parent's memory. That memory is already counted for the
            // parent.
            status.clear_memory();
        }
        open.extend(children_of(pid, status.threads).into_iter().map(|child| (child, memory)));
        found.insert(pid, status);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::process::{Child, Command, Stdio};

    fn page(limit: u64) -> (tempfile::TempDir, &'static TreePage) {
        let folder = tempfile::tempdir().unwrap();
        let path = CString::new(folder.path().join("tree").to_str().unwrap()).unwrap();
        (folder, TreePage::create(&path, limit).unwrap())
    }

    /// Starts a shell with two children. All three wait until the shell's standard input ends. Returns when all three
    /// processes run.
    fn shell_with_children() -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "exec 3<&0; cat <&3 & sh -c 'echo; cat; true'; wait"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        std::io::Read::read(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        child
    }

    /// A shell with two children is sampled and then killed. The sample must count all three processes. Later samples
    /// must count the two orphans until they end.
    #[test]
    fn descendants_are_found() {
        let (_folder, page) = page(UNLIMITED);
        let mut child = shell_with_children();
        let mut memory = TreeMemory::new(page, child.id(), Instant::now());
        while memory.sample() > Duration::ZERO && memory.seen.len() < 4 {
            std::thread::yield_now();
        }
        assert!(memory.peak.resident_bytes > 400 << 10 && memory.peak.excess.is_none());
        assert_eq!(memory.peak.outside_bytes, memory.peak.anonymous_bytes, "no member published anything");
        let orphans: Vec<u32> = memory.seen.keys().copied().filter(|pid| *pid != child.id()).collect();
        // The orphans run while their standard input is open. `Child::wait` would close that input, so the input is
        // moved out of `child`.
        let input = child.stdin.take();
        child.kill().unwrap();
        child.wait().unwrap();
        memory.sample();
        assert!(orphans.iter().all(|pid| memory.seen.contains_key(pid)), "processes seen before still count");
        drop(input);
        while memory.sample() > Duration::ZERO && !memory.seen.is_empty() {
            std::thread::yield_now();
        }
        assert!(memory.process_count() >= 4 && !memory.largest_processes().is_empty());
    }

    /// A process grows between the sample and the reading of its proportional share. The share must be at most the
    /// memory of the process in the sample.
    #[test]
    fn a_share_is_at_most_what_the_sample_counted() {
        assert_eq!(bounded_share(4096, Some(1024), 4096), 1024);
        assert_eq!(bounded_share(4096, Some(8192), 8192), 4096);
        assert_eq!(bounded_share(4096, None, 8192), 4096);
        assert_eq!(bounded_share(4096, Some(4096), 512), 512);
    }

    /// Four processes end between the sample and the reading of their proportional shares, which are then unknown.
    /// Their memory must not be counted.
    #[test]
    fn processes_that_ended_are_not_an_excess() {
        let (_folder, page) = page(UNLIMITED);
        let mut child = shell_with_children();
        let mut memory = TreeMemory::new(page, child.id(), Instant::now());
        // A process that is being started has no memory of its own for a moment.
        let found = loop {
            memory.sample();
            let found = memory.find_processes();
            if found.len() >= 4 && found.values().all(|status| status.anonymous_bytes > 0) {
                break found;
            }
            std::thread::yield_now();
        };
        drop(child.stdin.take());
        child.wait().unwrap();
        while found.keys().any(|pid| Status::read(*pid).is_some_and(|status| status.anonymous_bytes > 0)) {
            std::thread::yield_now();
        }
        memory.record_shares(&found, 4 << 10, 0);
        assert!(memory.peak.excess.is_none(), "{:?}", memory.peak.excess);
    }

    /// A shell runs under a limit that is below its memory. A sample must record the excess over the limit and the
    /// processes that have the memory.
    #[test]
    fn an_excess_is_recorded_with_its_processes() {
        let (_folder, page) = page(4 << 10);
        let mut child = shell_with_children();
        let mut memory = TreeMemory::new(page, child.id(), Instant::now());
        memory.sample();
        drop(child.stdin.take());
        child.wait().unwrap();
        let excess = memory.peak.excess.unwrap();
        assert_eq!(excess.bytes_over_limit() + (4 << 10), excess.held_bytes);
        assert_eq!((excess.allocator_bytes, excess.bytes_outside_allocators()), (0, excess.held_bytes));
        assert!(excess.largest.iter().map(|process| process.bytes).sum::<u64>() <= excess.held_bytes);
        assert!(excess.held_bytes <= memory.peak.anonymous_bytes, "the shares do not exceed the sample");
    }
}
