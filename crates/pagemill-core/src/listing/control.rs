//! The control endpoint: executes commands from other processes. The helper thread executes a change of settings at
//! once. Commands that take long run in a separate thread, because the helper has other work and must not wait for
//! callbacks of the program. That thread ends when no command is left.
//!
//! The helper opens all files. It has a descriptor table of its own, which the thread shares, since the helper starts
//! the thread. So the thread must not run code of the program, which would not find the program's descriptors. The
//! defragmentation thread runs such code, and this thread waits for it.

use super::SlabCommands;
use super::answer::Response;
use super::commands::{Action, ControlCommand, Outcome, ShrinkReport};
use crate::arena::{Arena, Context, HugeUse};
use crate::published::Subject;
use crate::reclaim::{Account, Reason, Urgency};
use crate::sync::Guarded;
use libc::{EAGAIN, ECANCELED, ENOENT, ENOSYS};
use pagemill_sys::file::AnswerFile;
use pagemill_sys::thread;
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// Maximum number of commands that wait in the queue. A further command fails with `EAGAIN`.
const MAX_QUEUED_COMMANDS: usize = 8;

/// Maximum number of bytes that one step of [`ControlCommand::Trim`] requests from the shrinkers.
const TRIM_STEP_BYTES: u64 = 64 << 20;

/// A command that was read and is not finished yet, with the file of its answer.
struct PendingCommand {
    file: AnswerFile,
    number: u32,
    command: ControlCommand,
}

/// The queue of commands that take long. A separate thread executes them.
struct CommandQueue {
    /// Oldest command first.
    waiting: [Option<PendingCommand>; MAX_QUEUED_COMMANDS],
    /// Whether the thread that executes the commands runs and will check the queue again.
    is_working: bool,
}

/// Accepts commands of other processes and executes them.
///
/// Example: [`ControlCommand`].
pub struct ControlEndpoint {
    account: &'static Account,
    arena: &'static Arena,
    slabs: OnceLock<&'static dyn SlabCommands>,
    queue: Guarded<CommandQueue>,
}

impl ControlEndpoint {
    pub fn new(account: &'static Account, arena: &'static Arena) -> Self {
        let queue = CommandQueue { waiting: [const { None }; MAX_QUEUED_COMMANDS], is_working: false };
        Self { account, arena, slabs: OnceLock::new(), queue: Guarded::new(queue) }
    }

    /// Sets the slab caches that commands act on. Before this call, and in programs without the
    /// feature `control`, such commands fail with `ENOSYS`.
    pub fn set_slabs(&self, slabs: &'static dyn SlabCommands) {
        let is_first = self.slabs.set(slabs).is_ok();
        assert!(is_first, "the slab caches of one process");
    }

    /// Reads the command with the request id `number` from the file at `path`, and executes or queues it. Does nothing
    /// if the file contains no valid command. The helper thread calls this function.
    pub fn accept_command(&'static self, path: &CStr, number: u32) {
        let mut bytes = [0; ControlCommand::LEN];
        // A failure is not reported: the requester has ended, or must not access this process.
        let Ok(file) = AnswerFile::open_with(path, &mut bytes) else { return };
        let Some(command) = ControlCommand::from_bytes(&bytes, number) else { return };
        let pending = PendingCommand { file, number, command };
        match command {
            ControlCommand::Slab { action: Action::SetUsedRatio(_) | Action::SetRemoteRatio(_), .. }
            | ControlCommand::Huge(_) => self.execute(&pending),
            _ => self.enqueue(pending),
        }
    }

    /// Queues a command for the thread that executes the queued commands. Starts that thread if it does not run.
    fn enqueue(&'static self, pending: PendingCommand) {
        // The command is marked before it is queued, because the requester must not find it finished but not accepted.
        let _ = pending.file.write_at(&1_u32.to_le_bytes(), ControlCommand::ACCEPTED_OFFSET as u64);
        let mut queue = self.queue.lock();
        let Some(place) = queue.waiting.iter_mut().find(|place| place.is_none()) else {
            drop(queue);
            return write_answer(&pending, Outcome::failed(pending.command, EAGAIN));
        };
        *place = Some(pending);
        let is_idle = !std::mem::replace(&mut queue.is_working, true);
        drop(queue);
        if is_idle && thread::spawn(c"pagemill-orders", self).is_err() {
            while let Some(pending) = self.dequeue() {
                write_answer(&pending, Outcome::failed(pending.command, EAGAIN));
            }
        }
    }

    /// Removes the oldest command from the queue. Returns `None` if the queue is empty; then the thread that executes
    /// the commands must end.
    fn dequeue(&self) -> Option<PendingCommand> {
        let mut queue = self.queue.lock();
        let pending = queue.waiting[0].take();
        queue.waiting.rotate_left(1);
        queue.is_working = pending.is_some();
        pending
    }

    /// Executes a command and writes its outcome, also if the program's code panics.
    fn execute(&self, pending: &PendingCommand) {
        // Dropping the last reference to a cache runs code of the program, which may panic.
        let done = catch_unwind(AssertUnwindSafe(|| self.run_command(pending.command)));
        write_answer(pending, done.unwrap_or_else(|_| Outcome::failed(pending.command, ECANCELED)));
    }

    /// Executes a command. Returns its outcome.
    fn run_command(&self, command: ControlCommand) -> Outcome {
        let (action, id) = match command {
            ControlCommand::Slab { action, cache } => (action, cache),
            ControlCommand::Trim { want_bytes } => {
                let shrunk = ShrinkReport { freed_bytes: self.give_back(want_bytes), ..ShrinkReport::default() };
                return Outcome::of(command, shrunk);
            }
            ControlCommand::DropContents => {
                let shrunk = ShrinkReport { freed_bytes: self.account.drop_contents(), ..ShrinkReport::default() };
                return Outcome::of(command, shrunk);
            }
            ControlCommand::Huge(wanted) => return self.set_huge_use(command, wanted),
        };
        let Some(slabs) = self.slabs.get() else { return Outcome::failed(command, ENOSYS) };
        match slabs.execute(id, action) {
            Some(Ok(shrunk)) => Outcome::of(command, shrunk),
            Some(Err(error)) => Outcome::failed(command, error.errno()),
            None => Outcome::failed(command, ENOENT),
        }
    }

    /// Sets which memory gets huge pages, if a setting is wanted. Returns the outcome with the setting before.
    fn set_huge_use(&self, command: ControlCommand, wanted: Option<HugeUse>) -> Outcome {
        let before = if self.arena.uses_huge() { self.arena.huge_use() } else { HugeUse::Never };
        let errno = wanted.and_then(|wanted| self.arena.set_huge_use(wanted).err()).map_or(0, |error| error.errno());
        Outcome { errno, huge_before: Some(before), ..Outcome::of(command, ShrinkReport::default()) }
    }

    /// Makes the shrinkers return free and volatile memory, whole blocks first. Returns the bytes freed. Works in
    /// steps, so that the helper thread can answer requests of sibling processes between two steps.
    fn give_back(&self, want_bytes: u64) -> u64 {
        let mut freed = 0;
        for urgency in [Urgency::Request, Urgency::Split] {
            while freed < want_bytes {
                let part = TRIM_STEP_BYTES.min(want_bytes - freed);
                let given = self.account.give_back(part, Context::Outside, urgency, Reason::Program);
                freed = freed.saturating_add(given);
                // Do not wait for memory that a busy program frees meanwhile.
                if given < part {
                    break;
                }
            }
        }
        freed
    }

    /// Acquires the lock of the queue before `fork`. Waits for a thread that holds the lock.
    pub fn acquire_for_fork(&self) {
        self.queue.acquire_when(|_| true);
    }

    /// Releases the lock of the queue after `fork`, in the parent and in the child.
    pub fn release_after_fork(&self) {
        self.queue.release();
    }

    /// Empties the queue in a fork child, which has neither the thread that executes commands nor that thread's open
    /// files. The descriptor numbers of these files may belong to other files in the child, so the files are not
    /// closed.
    pub fn begin_child(&self) {
        let mut queue = self.queue.lock();
        queue.waiting.iter_mut().for_each(|place| std::mem::forget(place.take()));
        queue.is_working = false;
    }
}

impl thread::Work for ControlEndpoint {
    fn work(&'static self) {
        while let Some(pending) = self.dequeue() {
            self.execute(&pending);
        }
    }
}

/// Writes the outcome of a command into the command's file.
fn write_answer(pending: &PendingCommand, outcome: Outcome) {
    let mut response = Response::after_request(&pending.file, ControlCommand::LEN);
    let result = response.write_record(&outcome.to_record());
    let _ = response.write_header(pending.number, Subject::Command, result);
}
