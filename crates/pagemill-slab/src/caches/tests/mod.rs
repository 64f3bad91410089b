//! Tests of slab caches as a whole.

use super::*;
#[cfg(not(shuttle))]
use crate::alloc::*;
#[cfg(not(shuttle))]
use crate::read::*;
use crate::*;
use pagemill_core::error::Error;

#[cfg(not(shuttle))]
pub(crate) mod basics;
#[cfg(not(shuttle))]
pub(crate) mod defrag;
#[cfg(not(shuttle))]
pub(crate) mod handle;
#[cfg(not(shuttle))]
pub(crate) mod model;
#[cfg(not(shuttle))]
pub(crate) mod node;
#[cfg(not(shuttle))]
pub(crate) mod owner;
#[cfg(shuttle)]
pub(crate) mod shuttle_tests;
#[cfg(not(shuttle))]
pub(crate) mod threads;
#[cfg(not(shuttle))]
pub(crate) mod worker;
