//! Creates the structure of a file.
#![allow(unsafe_code)] // the index must not move

pub(crate) mod cursor;
pub(crate) mod gate;
pub(crate) mod hint;
pub(crate) mod pin;
mod punch;
mod read;
mod refresh;
mod seek;
mod truncate;
mod write;
mod zero;

use crate::mapping::file::gate::Gate;
use crate::mapping::submit::AsyncReads;
use crate::mapping::view::Views;
use crate::mapping::{File, NEXT_SERIAL, cache};
use pagemill_core::sync::{AtomicU32, AtomicU64, Lock, Relaxed};
use pagemill_store::Store;
use pagemill_xarray::XArray;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

impl File {
    /// Creates a file of `cache` with one handle.
    pub(crate) fn new(cache: Arc<cache::Inner>, id: u32, store: Option<Arc<dyn Store>>, size_bytes: u64) -> Arc<Self> {
        // SAFETY: the index is not used before it lies in the `Arc` that is created here. No code moves a file out of
        // its `Arc` (files never use `Arc::try_unwrap`, `Arc::get_mut` and the like), so the index stays in place until
        // it is dropped.
        let tree = unsafe { XArray::movable(cache.nodes) };
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            pool: cache.pool,
            tree,
            generation: cache.generation,
            cache,
            is_writable: store.as_ref().is_none_or(|store| store.is_writable()),
            dirty: store.as_ref().map(|_| Box::default()),
            handles: AtomicU32::new(1),
            reads: store.as_ref().map(|_| Arc::<AsyncReads>::default()),
            store,
            size_bytes: AtomicU64::new(size_bytes),
            stored_bytes: AtomicU64::new(size_bytes),
            length_version: AtomicU32::new(0),
            removals: AtomicU32::new(0),
            revoked: AtomicU32::new(0),
            syncing: Lock::new(),
            gate: Gate::default(),
            id,
            serial: NEXT_SERIAL.fetch_add(1, Relaxed),
            is_closed: AtomicBool::new(false),
            views: Views::default(),
            sequential_end: AtomicU64::new(0),
            sequential_begin: AtomicU64::new(0),
        })
    }
}
