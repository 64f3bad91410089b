//! The controller of `pagemill mount`: it steers a tmpfs so that it gives memory back.
//!
//! The kernel does every file operation, at its own speed. The controller looks on from outside: it purges what users marked
//! as volatile before a limit is met, keeps the size of the file system below what limits
//! leave, and has huge pages made where they pay.
//!
//! From bottom to top: [`policy`] (what marks mean), [`door`] (calls that follow no link), [`folders`], [`index`], [`groups`]
//! (what is where, used when, charged to whom), [`budget`], [`pace`] (arithmetic), [`purge`], [`scan`], [`worker`] (huge pages, in a
//! process of its own) and [`pagework`] (what it gets), [`ledger`] (all that is known of files), [`steward`] (the one thread
//! that decides) and its [`inbox`], [`control`] (who asks it), [`mounting`].

pub mod budget;
pub mod control;
pub mod door;
pub mod folders;
pub mod groups;
pub mod inbox;
pub mod index;
pub mod ledger;
pub mod mounting;
pub mod pace;
pub mod pagework;
pub mod policy;
pub mod purge;
pub mod scan;
pub mod status;
pub mod steward;
pub mod worker;
