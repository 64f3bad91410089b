//! The controller of `pagemill mount`: manages a tmpfs so that its memory can be reclaimed.
//!
//! The kernel executes all file operations. A close after writing and a rename also queue an event for the controller.
//! An open can wait while the file is purged, while the worker has a lease on it, or while writers are faster than
//! purges ([`open_throttle`]). The controller purges files that users marked as volatile before a limit is reached,
//! sets the file system's size according to the limits, and creates huge pages for dense files.
//!
//! Modules, from bottom to top:
//!
//! - [`messages`]: messages to the user, and lines of JSON. [`status`]: the status of a controller. [`policy`]: the marks that users set on files.
//!   [`file_access`]: file operations that follow no links.
//! - [`folders`]: paths of folders. [`index`]: volatile files in LRU order. [`openfiles`]: files that processes
//!   have open.
//! - [`groups`]: the memory groups (cgroups) that are charged for files.
//! - [`budget`]: how much to purge, and the size. [`growth_predictor`]: predicted growth. [`recent_peak`]: the largest
//!   recent value. [`duty`]: pauses of the control loop. [`closes`]: when close events are off. None of these makes
//!   system calls.
//! - [`purge`]: the purge of one file. [`scan`]: the walk over all files.
//! - [`worker`]: the separate process that creates and splits huge pages, and frees pages of zeros. [`pagework`]: the queue of its jobs.
//! - [`file_table`]: the state of all files.
//! - [`open_throttle`]: delays opens while files are written faster than purges free memory, in its own thread.
//! - [`control_loop`]: the control loop, in one thread. [`submissions`]: the queue of its requests.
//! - [`control`]: the socket for commands. [`mounting`]: mounts and unmounts.

pub mod budget;
pub mod closes;
pub mod control;
pub mod control_loop;
pub mod duty;
pub mod file_access;
pub mod file_table;
pub mod folders;
pub mod groups;
pub mod growth_predictor;
pub mod index;
pub mod messages;
pub mod mounting;
pub mod open_throttle;
pub mod openfiles;
pub mod pagework;
pub mod policy;
pub mod purge;
pub mod recent_peak;
pub mod scan;
pub mod status;
pub mod submissions;
pub mod worker;
