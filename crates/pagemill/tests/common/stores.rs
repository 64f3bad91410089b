//! A store in memory that breaks its contract on request.
#![allow(dead_code)] // no test file uses all of it

use pagemill::store::{MemoryStore, Store, Transfer};
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// A [`MemoryStore`] that panics on writes or never completes transfers.
pub struct Broken {
    pub inner: MemoryStore,
    /// Whether a write panics.
    pub panics: AtomicBool,
    /// The transfers that were started and never completed; `None` completes all.
    pub kept: Option<Mutex<Vec<Transfer>>>,
}

impl Broken {
    /// Returns an empty store whose writes panic.
    #[must_use]
    pub fn that_panics(block_bytes: usize) -> Self {
        Self { inner: MemoryStore::new(Vec::new(), block_bytes), panics: AtomicBool::new(true), kept: None }
    }

    /// Returns an empty store that completes no transfer.
    #[must_use]
    pub fn that_keeps(block_bytes: usize) -> Self {
        let inner = MemoryStore::new(Vec::new(), block_bytes);
        Self { inner, panics: AtomicBool::new(false), kept: Some(Mutex::default()) }
    }

    /// Takes the transfers that were kept.
    pub fn take_kept(&self) -> Vec<Transfer> {
        self.kept.as_ref().map(|kept| std::mem::take(&mut *kept.lock().unwrap())).unwrap_or_default()
    }
}

impl Store for Broken {
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
        match &self.kept {
            Some(kept) => kept.lock().unwrap().extend(batch),
            None => batch.into_iter().for_each(|transfer| transfer.run(self)),
        }
    }

    fn is_asynchronous(&self) -> bool {
        self.kept.is_some()
    }
}
