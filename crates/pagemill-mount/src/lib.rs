//! The controller of `pagemill mount`: manages a tmpfs so that it gives memory back.
//!
//! The kernel executes every file operation at its own speed. The controller runs outside that path. It purges files
//! that users marked as volatile before a limit is reached, keeps the file system's size within the limits, and
//! creates huge pages where they pay.
//!
//! From bottom to top:
//!
//! - [`policy`]: meaning of marks. [`door`]: file access without following links.
//! - [`folders`], [`index`], [`openfiles`], [`groups`]: paths, volatile files in order of use, open files, charged
//!   groups.
//! - [`budget`], [`pace`], [`closes`]: arithmetic.
//! - [`purge`], [`scan`]; [`worker`]: huge pages, in a separate process; [`pagework`]: its queue.
//! - [`ledger`]: the state of all files.
//! - [`steward`]: the control loop, in one thread; [`inbox`]: its queue; [`control`]: the socket for commands;
//!   [`mounting`].

pub mod budget;
pub mod closes;
pub mod control;
pub mod door;
pub mod folders;
pub mod groups;
pub mod inbox;
pub mod index;
pub mod ledger;
pub mod mounting;
pub mod openfiles;
pub mod pace;
pub mod pagework;
pub mod policy;
pub mod purge;
pub mod scan;
pub mod status;
pub mod steward;
pub mod worker;
