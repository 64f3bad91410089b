//! Stores in memory: one that panics on writes, or does not complete its transfers, and one that calls a function first.
#![allow(dead_code)] // each test file uses a part of this module

use pagemill_store::{MemoryStore, Store, Transfer};
use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// A [`MemoryStore`] that calls a function before each read, with the bytes of the store that are read. An error of the
/// function is the result of the read.
pub struct HookedStore<F> {
    pub inner: MemoryStore,
    pub before_read: F,
}

impl<F: Fn(Range<u64>) -> io::Result<()> + Send + Sync + 'static> Store for HookedStore<F> {
    fn size_bytes(&self) -> io::Result<u64> {
        self.inner.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        (self.before_read)(offset..offset + to.len() as u64)?;
        self.inner.read(offset, to)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.inner.write(offset, from)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.inner.set_size(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }
}

/// A [`MemoryStore`] that panics on writes, or never completes transfers.
pub struct BrokenStore {
    pub inner: MemoryStore,
    /// Whether a write panics.
    pub panics: AtomicBool,
    /// Transfers that were started and not completed. If `None`, every transfer is completed at once.
    pub started: Option<Mutex<Vec<Transfer>>>,
}

impl BrokenStore {
    /// Returns an empty store whose writes panic.
    #[must_use]
    pub fn that_panics(block_bytes: usize) -> Self {
        Self { inner: MemoryStore::new(Vec::new(), block_bytes), panics: AtomicBool::new(true), started: None }
    }

    /// Returns an empty store that completes no transfer.
    #[must_use]
    pub fn that_completes_no_transfer(block_bytes: usize) -> Self {
        let inner = MemoryStore::new(Vec::new(), block_bytes);
        Self { inner, panics: AtomicBool::new(false), started: Some(Mutex::default()) }
    }

    /// Returns the transfers that were started since the last call.
    pub fn take_started(&self) -> Vec<Transfer> {
        self.started.as_ref().map(|started| std::mem::take(&mut *started.lock().unwrap())).unwrap_or_default()
    }
}

impl Store for BrokenStore {
    fn size_bytes(&self) -> io::Result<u64> {
        self.inner.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, to)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        assert!(!self.panics.load(SeqCst), "the test asked for a panic");
        self.inner.write(offset, from)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.inner.set_size(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn start(&self, batch: Vec<Transfer>) {
        match &self.started {
            Some(started) => started.lock().unwrap().extend(batch),
            None => batch.into_iter().for_each(|transfer| transfer.run(self)),
        }
    }

    fn is_asynchronous(&self) -> bool {
        self.started.is_some()
    }
}
