//! Threads that run one closure. Unlike those of the standard library they need no memory for a signal stack, without which that
//! library ends the process.
#![allow(unsafe_code)] // passes a closure through a pointer

use crate::thread;
use std::ffi::{CStr, c_void};
use std::io;
use std::ptr;

type Task = Box<dyn FnOnce() + Send>;

const STACK_BYTES: usize = 1 << 20;

/// Starts `task` on a detached thread, with all signals blocked.
///
/// # Errors
///
/// Errors of `pthread_create`, usually `EAGAIN`. The task is dropped then.
pub fn spawn(name: &CStr, task: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let task: Box<Task> = Box::new(Box::new(task));
    let task = Box::into_raw(task);
    // SAFETY: the new thread alone has the pointer.
    let result = unsafe { thread::create(name, STACK_BYTES, run, task.cast()) };
    if result.is_err() {
        // SAFETY: no thread was started, so the pointer is still this one's.
        drop(unsafe { Box::from_raw(task) });
    }
    result
}

extern "C" fn run(task: *mut c_void) -> *mut c_void {
    // SAFETY: the pointer that `spawn` passed, to this thread alone.
    let task = unsafe { Box::from_raw(task.cast::<Task>()) };
    task();
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A task runs once, on another thread, and what it holds is dropped.
    #[test]
    fn a_task_runs_on_another_thread() {
        let (sender, receiver) = mpsc::channel();
        spawn(c"task", move || sender.send(std::thread::current().id()).unwrap()).unwrap();
        assert_ne!(receiver.recv().unwrap(), std::thread::current().id());
        assert!(receiver.recv().is_err(), "the sender is gone");
    }
}
