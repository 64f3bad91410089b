//! The controller of `pagemill mount`: manages a tmpfs so that it gives memory back.
//!
//! The kernel executes every file operation at its own speed. The controller runs outside that path. It purges files
//! that users marked as volatile before a limit is reached, keeps the file system's size within the limits, and
//! creates huge pages where they pay.
//!
//! From bottom to top:
//!
//! - [`policy`]: meaning of marks. [`file_access`]: file access without following links.
//! - [`folders`], [`index`], [`openfiles`], [`groups`]: paths, volatile files in order of use, open files, charged
//!   groups.
//! - [`budget`], [`rate_limiter`], [`duty`], [`closes`]: arithmetic.
//! - [`purge`], [`scan`]; [`worker`]: huge pages, in a separate process; [`pagework`]: its queue.
//! - [`file_table`]: the state of all files.
//! - [`open_throttle`]: delays opens while writers outrun purging, in a thread of its own.
//! - [`control_loop`]: the control loop, in one thread; [`submissions`]: its queue; [`control`]: the socket for
//!   commands;
//!   [`mounting`].

pub mod budget;
pub mod closes;
pub mod control;
pub mod control_loop;
pub mod duty;
pub mod file_access;
pub mod file_table;
pub mod folders;
pub mod groups;
pub mod index;
pub mod mounting;
pub mod open_throttle;
pub mod openfiles;
pub mod pagework;
pub mod policy;
pub mod purge;
pub mod rate_limiter;
pub mod scan;
pub mod status;
pub mod submissions;
pub mod worker;
