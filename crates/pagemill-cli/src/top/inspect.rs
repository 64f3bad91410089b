//! Asks processes and controllers of mounts what they do not publish: slab caches, page caches, the state of mounts. A
//! thread of its own asks, because a stopped process answers only after a timeout.

use super::machine::{GroupUsage, tightest_group};
use super::sample::Sample;
use crate::caches::{self, CachesReport};
use crate::requests::Interrupt;
use crate::slabinfo;
use crate::slabinfo::table::in_use_bytes;
use crate::statistics;
use crate::status;
use pagemill_core::published;
use pagemill_slab::SlabInfo;
use pagemill_sys::cgroup::Hierarchy;
use pagemill_sys::process::Identity;
use pagemill_tmpfs::mounting;
use pagemill_tmpfs::status::Status;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Maximum number of processes that are asked to measure themselves after one sample.
const MAX_MEASURED: usize = 4;

/// Age of figures from which a process is asked to measure itself.
const MEASURED_AGE: Duration = Duration::from_secs(5);

/// Pause before a process that was asked is asked again, so that a stopped process delays others rarely.
const ASK_INTERVAL: Duration = Duration::from_secs(5);

/// A slab cache of a process.
pub struct SlabRow {
    pub pid: u32,
    pub process: String,
    pub info: SlabInfo,
}

impl SlabRow {
    /// Returns the bytes of the cache that no object in use needs: free slots, and the rests of slabs.
    pub fn unused_bytes(&self) -> u64 {
        self.info.total.resident_bytes.saturating_sub(in_use_bytes(&self.info))
    }
}

/// What a process told about itself.
pub struct Details {
    pub identity: Identity,
    pub caches: CachesReport,
    /// The control group with the smallest limit above the process.
    pub group: Option<GroupUsage>,
}

/// The answers to one [`Questions`].
#[derive(Default)]
pub struct Answers {
    pub mounts: Vec<Status>,
    /// Sorted by the bytes that are not in use, largest first.
    pub slabs: Vec<SlabRow>,
    /// Number of processes with slab caches that did not answer.
    pub slabs_unanswered: usize,
    pub details: Option<Details>,
}

/// What to ask after a sample.
pub struct Questions {
    /// Processes that measure themselves; their answers are in the next sample.
    measure: Vec<published::Process>,
    slabs: Vec<published::Process>,
    details: Option<published::Process>,
}

/// Chooses what to ask, so that no process is asked too often.
#[derive(Default)]
pub struct Chooser {
    asked: HashMap<Identity, Instant>,
}

impl Chooser {
    /// Returns the questions for a sample: measurements of the processes whose figures are oldest, of `focus` in every
    /// sample, slab caches of all processes if `with_slabs`, otherwise those of `focus`.
    pub fn choose(&mut self, sample: &Sample, focus: Option<Identity>, with_slabs: bool) -> Questions {
        let now = sample.at;
        self.asked.retain(|_, asked| now.duration_since(*asked) < ASK_INTERVAL);
        // Only this user's processes with a helper answer.
        let answering = sample.processes.iter().filter_map(|process| process.pagemill.as_ref());
        let answering: Vec<_> = answering.filter(|process| process.stale.is_none()).collect();
        let age = |process: &statistics::Process| process.sum.age().unwrap_or(Duration::MAX);
        let is_focus = |process: &statistics::Process| Some(process.published.identity) == focus;
        let mut old: Vec<_> = answering
            .iter()
            .filter(|process| is_focus(process) || age(process) >= MEASURED_AGE)
            .filter(|process| is_focus(process) || !self.asked.contains_key(&process.published.identity))
            .collect();
        old.sort_by_key(|process| std::cmp::Reverse((is_focus(process), age(process))));
        old.truncate(MAX_MEASURED);
        for process in &old {
            self.asked.insert(process.published.identity, now);
        }
        let is_asked_for_slabs =
            |process: &&&statistics::Process| (with_slabs || is_focus(process)) && slabinfo::has_caches(&process.sum);
        Questions {
            measure: old.iter().map(|process| process.published.clone()).collect(),
            slabs: answering.iter().filter(is_asked_for_slabs).map(|process| process.published.clone()).collect(),
            details: answering.iter().find(|process| is_focus(process)).map(|process| process.published.clone()),
        }
    }
}

impl Questions {
    /// Asks, and waits for the answers: at most some seconds. Returns `None` if `interrupt` ends the wait.
    pub fn ask(self, interrupt: &Interrupt) -> Option<Answers> {
        if !self.measure.is_empty() {
            statistics::request_statistics(self.measure, interrupt).ok()?;
        }
        let details = match self.details {
            Some(process) => Some(Details {
                identity: process.identity,
                caches: caches::request_caches(&process.found, interrupt)?,
                group: Hierarchy::find_of("", &process.identity.pid.to_string())
                    .ok()
                    .and_then(|groups| tightest_group(&groups)),
            }),
            None => None,
        };
        let found = self.slabs.into_iter().map(|process| process.found).collect();
        let (mut slabs, mut slabs_unanswered) = (Vec::new(), 0);
        for (process, error) in slabinfo::request_slab_caches(found, interrupt) {
            slabs_unanswered += usize::from(error.is_some());
            let (pid, name) = (process.snapshot().identity.pid, process.snapshot().name());
            slabs.extend(process.caches.into_iter().map(|cache| SlabRow {
                pid,
                process: name.clone(),
                info: cache.info,
            }));
        }
        slabs.sort_by_key(|row| (u64::MAX - row.unused_bytes(), row.pid));
        (!interrupt.has_signal()).then_some(Answers { mounts: read_mounts(), slabs, slabs_unanswered, details })
    }
}

/// Returns the states of all mounts that this process can see or control, in the order of their mount points.
fn read_mounts() -> Vec<Status> {
    let mut mounts = Vec::new();
    for (device, point) in mounting::all_devices() {
        let is_mounted_here = point.is_some();
        let point = point.unwrap_or_else(PathBuf::new);
        match status::read_state(&point, device) {
            Ok(state) if is_mounted_here || state.controller_pid.is_some() => mounts.push(state),
            // The socket of a controller that has ended.
            Ok(_) => {}
            Err(why) => {
                mounts.push(Status { mount_point: format!("{} ({why})", point.display()), ..Status::default() })
            }
        }
    }
    mounts.sort_by(|one, other| one.mount_point.cmp(&other.mount_point));
    mounts
}

/// The thread that asks. Dropping the value ends it, and removes the files of its requests.
pub struct Inspector {
    questions: Option<SyncSender<Questions>>,
    interrupt: Interrupt,
    thread: Option<JoinHandle<()>>,
}

impl Inspector {
    /// Starts the thread. `deliver` gets the answers.
    pub fn start(deliver: impl Fn(Answers) + Send + 'static) -> std::io::Result<Self> {
        let (questions, asked) = mpsc::sync_channel::<Questions>(1);
        let interrupt = Interrupt::by_hand();
        let interrupted = interrupt.clone();
        let ask = move || {
            while let Some(answers) = asked.recv().ok().and_then(|questions| questions.ask(&interrupted)) {
                deliver(answers);
            }
        };
        let thread = thread::Builder::new().name("inspector".into()).spawn(ask)?;
        Ok(Self { questions: Some(questions), interrupt, thread: Some(thread) })
    }

    /// Asks in the background. Does nothing if earlier questions are still waiting.
    pub fn ask(&self, questions: Questions) {
        if let Some(sender) = &self.questions
            && let Err(TrySendError::Disconnected(_)) = sender.try_send(questions)
        {
            assert!(self.interrupt.has_signal(), "the thread runs until it is stopped");
        }
    }
}

impl Drop for Inspector {
    fn drop(&mut self) {
        self.interrupt.stop();
        drop(self.questions.take());
        // A controller of a mount that does not answer would delay the end by seconds, and leaves no file.
        if let Some(thread) = self.thread.take() {
            let begun = Instant::now();
            while !thread.is_finished() && begun.elapsed() < Duration::from_millis(200) {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
