//! Threads that run one closure. Unlike threads of the standard library, these threads have no signal stack: if memory
//! for the signal stack is missing, the standard library ends the process.
#![allow(unsafe_code)] // passes a closure through a pointer

use crate::thread;
use std::ffi::{CStr, c_void};
use std::io;
use std::ptr;

/// The closure that a thread runs.
type Task = Box<dyn FnOnce() + Send>;

/// Stack size of the threads that [`spawn`] starts.
const TASK_STACK_BYTES: usize = 1 << 20;

/// Runs `task` on a new detached thread, with all signals blocked.
///
/// # Errors
///
/// Errors of `pthread_create`, usually `EAGAIN`. The task is then dropped without running.
pub fn spawn(name: &CStr, task: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let task: Box<Task> = Box::new(Box::new(task));
    let task = Box::into_raw(task);
    // SAFETY: only the new thread gets the pointer.
    let result = unsafe { thread::spawn_with_argument(name, TASK_STACK_BYTES, run_task, task.cast()) };
    if result.is_err() {
        // SAFETY: no thread was started, so no other thread has the pointer.
        drop(unsafe { Box::from_raw(task) });
    }
    result
}

/// The first function of a thread: runs the task to which `task` points.
extern "C" fn run_task(task: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` passed the pointer to this thread alone.
    let task = unsafe { Box::from_raw(task.cast::<Task>()) };
    task();
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A task must run once, on another thread, and must be dropped after it has run.
    #[test]
    fn a_task_runs_on_another_thread() {
        let (sender, receiver) = mpsc::channel();
        spawn(c"task", move || sender.send(std::thread::current().id()).unwrap()).unwrap();
        assert_ne!(receiver.recv().unwrap(), std::thread::current().id());
        assert!(receiver.recv().is_err(), "the sender is gone");
    }
}
