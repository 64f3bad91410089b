//! Samples the memory of a process and all its descendants every ten milliseconds.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::giveable;
use crate::proc;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);

/// The peaks of a process tree, in bytes.
#[derive(Clone, Debug, Default)]
pub struct TreePeaks {
    /// Peak of the resident memory, summed over the tree. A shared page counts once for each process, under every
    /// allocator.
    pub resident: u64,
    /// Peak of the resident anonymous memory, summed over the tree.
    pub anonymous: u64,
    /// Peak of the resident memory minus the free memory that the tree could return at once. None if the allocator does
    /// not publish how much it could return.
    pub net: Option<u64>,
    /// The largest peak of the resident memory of a single process. The kernel records the peak of each process, so it
    /// is exact even between samples.
    pub largest_process: u64,
    /// Whether the root process of the tree has mapped the preloaded library.
    pub has_mapped_library: bool,
}

/// The memory of a process tree at one point in time, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct TreeMemory {
    pub resident: u64,
    pub anonymous: u64,
    /// Bytes that the tree could return at once; none if the allocator does not publish them.
    pub giveable: Option<u64>,
}

/// A thread that samples a process tree until it is stopped.
#[derive(Debug)]
pub struct TreeSampler {
    is_stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<TreePeaks>>,
}

impl TreeSampler {
    /// Starts to sample the tree below `root`. `publishes` says whether the allocator publishes how much free memory it
    /// could return. A process that has not published this number yet counts as zero.
    pub fn start(root: u32, library: Option<&Path>, publishes: bool) -> Self {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let library = library.map(|library| library.display().to_string());
        let thread = {
            let is_stopped = Arc::clone(&is_stopped);
            thread::spawn(move || sample_until_stopped(root, library.as_deref(), publishes, &is_stopped))
        };
        Self { is_stopped, thread: Some(thread) }
    }

    pub fn stop(mut self) -> TreePeaks {
        self.is_stopped.store(true, Ordering::Relaxed);
        let peaks = self.thread.take().and_then(|thread| thread.join().ok());
        peaks.unwrap_or_default()
    }
}

impl Drop for TreeSampler {
    fn drop(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }
}

pub fn sample_once(root: u32, publishes: bool) -> TreeMemory {
    take_sample(root, publishes, &mut BTreeMap::new())
}

fn sample_until_stopped(root: u32, library: Option<&str>, publishes: bool, is_stopped: &AtomicBool) -> TreePeaks {
    let mut peaks = TreePeaks { has_mapped_library: library.is_none(), ..TreePeaks::default() };
    let mut largest = BTreeMap::new();
    // The end is checked after a sample, so that there is at least one sample.
    loop {
        let now = take_sample(root, publishes, &mut largest);
        peaks.resident = peaks.resident.max(now.resident);
        peaks.anonymous = peaks.anonymous.max(now.anonymous);
        if let Some(giveable) = now.giveable {
            let net = now.resident.saturating_sub(giveable);
            peaks.net = Some(peaks.net.unwrap_or(0).max(net));
        }
        if !peaks.has_mapped_library {
            peaks.has_mapped_library = library.is_some_and(|library| proc::has_mapped(root, library));
        }
        if is_stopped.load(Ordering::Relaxed) {
            break;
        }
        thread::sleep(SAMPLE_INTERVAL);
    }
    peaks.largest_process = largest.into_values().max().unwrap_or(0);
    peaks
}

fn take_sample(root: u32, publishes: bool, largest: &mut BTreeMap<(u32, u64), u64>) -> TreeMemory {
    let mut now = TreeMemory { giveable: publishes.then_some(0), ..TreeMemory::default() };
    for process in proc::process_tree(root) {
        let Some(memory) = proc::resident_memory(process.pid) else {
            continue;
        };
        now.resident += memory.all;
        now.anonymous += memory.anonymous;
        if let Some(sum) = &mut now.giveable {
            *sum += giveable::giveable_bytes(process.pid, process.start_time).unwrap_or(0);
        }
        let peak = largest.entry((process.pid, process.start_time)).or_default();
        *peak = memory.peak.max(*peak);
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sampler runs on this test process, which starts a child. The child must be found in the process tree, and the
    /// peaks of the tree must not be zero.
    #[test]
    fn sampler_includes_children() {
        let root = std::process::id();
        let watch = TreeSampler::start(root, None, false);
        // `cat` ends when `wait` closes its standard input.
        let child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn();
        let mut child = child.expect("cat starts");
        let both = proc::process_tree(root);
        child.wait().expect("cat ends");

        assert!(both.iter().any(|process| process.pid == child.id()));
        let peaks = watch.stop();
        assert!(peaks.resident > 0 && peaks.largest_process > 0 && peaks.has_mapped_library);
        assert!(sample_once(root, false).resident > 0);
    }
}
