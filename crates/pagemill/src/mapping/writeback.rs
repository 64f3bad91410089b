//! Folios written back together: kept still one after the other, written at once, small ones that follow each other as one.
#![allow(unsafe_code)] // lends the bytes of folios that it keeps still

use super::File;
use super::sync::{Still, failed};
use crate::error::Result;
use crate::folio::word::State;
use crate::store::{Aligned, Direction, Finish, Gather, Store, Transfer};
use crate::sync::Relaxed;
use crate::units::BLOCK_BYTES;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// As many transfers keep a device busy. Of a store that only blocks each goes by itself.
const MOST_FOLIOS: usize = 64;
const MOST_BYTES: u64 = 4 * BLOCK_BYTES as u64;

/// Small folios that follow each other are copied, and written as one, up to so many bytes: a device does few large transfers for
/// the price of many small ones.
const MERGED_BYTES: u64 = BLOCK_BYTES as u64 / 2;

/// Nobody gives up: what a store has been lent is lent until it says so.
const LOOK: Duration = Duration::from_secs(60);

const DOING: &str = "writing a file back";

/// A folio of the batch, and which bytes of the file it has.
struct Part<'file> {
    still: Still<'file>,
    bytes: Range<u64>,
}

/// Folios of one file, in its order.
pub(super) struct Batch<'file> {
    file: &'file File,
    store: &'file dyn Store,
    parts: Vec<Part<'file>>,
    len_bytes: u64,
}

/// Waits for what was started, whatever happens: until then a store may read the folios.
struct Started(Arc<Gather>);

impl Started {
    fn results(&self) -> Vec<io::Result<()>> {
        loop {
            if let Some(results) = self.0.wait(LOOK) {
                return results;
            }
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.results();
    }
}

impl<'file> Batch<'file> {
    pub fn new(file: &'file File, store: &'file dyn Store) -> Self {
        Self { file, store, parts: Vec::new(), len_bytes: 0 }
    }

    pub fn is_full(&self) -> bool {
        // Who writes to one of them waits for all: not for one after the other.
        !self.store.is_asynchronous() || self.parts.len() >= MOST_FOLIOS || self.len_bytes >= MOST_BYTES
    }

    /// Adds a folio that the caller keeps still, behind the others in the file.
    pub fn push(&mut self, number: u32, state: State) {
        let offset = self.file.offset_of(self.file.pool.owner(number).index);
        let len_bytes = self.file.cache.folio_bytes(state.order());
        self.parts.push(Part { still: Still { file: self.file, number }, bytes: offset..offset + len_bytes });
        self.len_bytes += len_bytes;
    }

    /// Writes them, and lets them go on. Returns whether all are clean; those that are not stay dirty.
    pub fn write(&mut self) -> Result<bool> {
        self.len_bytes = 0;
        let mut parts = std::mem::take(&mut self.parts);
        let cut = self.file.cut.load(Relaxed);
        let size_bytes = self.file.size_bytes();
        // What is behind the end is about to go.
        parts.retain_mut(|part| {
            part.bytes.end = part.bytes.end.min(size_bytes);
            !part.bytes.is_empty()
        });
        let runs = self.runs(&parts);
        let results = self.transfer(&parts, &runs);
        let (mut is_clean, mut failure, mut parts) = (true, Ok(()), parts.into_iter());
        for (run, result) in runs.iter().zip(results) {
            for part in parts.by_ref().take(run.len()) {
                if result.is_ok() {
                    is_clean &= self.file.note_written(part.still, part.bytes.end, cut);
                }
            }
            if failure.is_ok() {
                failure = result;
            }
        }
        failure.map_err(failed(DOING))?;
        Ok(is_clean)
    }

    /// Which of them are written as one.
    fn runs(&self, parts: &[Part<'_>]) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            match runs.last_mut() {
                Some(run)
                    if parts[at - 1].bytes.end == part.bytes.start
                        && part.bytes.end - parts[run.start].bytes.start <= MERGED_BYTES =>
                {
                    run.end = at + 1;
                }
                _ => runs.push(at..at + 1),
            }
        }
        runs
    }

    /// Does the transfers of all runs; returns how each ended.
    fn transfer(&self, parts: &[Part<'_>], runs: &[Range<usize>]) -> Vec<io::Result<()>> {
        let pool = self.file.pool;
        if runs.is_empty() {
            return Vec::new();
        }
        if let ([part], [_]) = (parts, runs) {
            // Nothing goes beside it.
            let len = (part.bytes.end - part.bytes.start) as usize;
            let write = |bytes: &[u8]| self.store.write(part.bytes.start, bytes);
            return vec![pool.with_still_bytes(part.still.number, len, write)];
        }
        let gather = Gather::new(runs.len());
        let begin = |(token, run): (usize, &Range<usize>)| {
            let (first, last) = (&parts[run.start], &parts[run.end - 1]);
            let (offset, len) = (first.bytes.start, (last.bytes.end - first.bytes.start) as usize);
            let (to, token) = (gather.clone(), token as u64);
            if run.len() > 1 {
                return Transfer::write(offset, self.merged(&parts[run.clone()], len), move |result, _| {
                    to.finish(token, result);
                });
            }
            // SAFETY: the folio's bytes, which lie at no address 0.
            let addr = unsafe { NonNull::new_unchecked(pool.addr(first.still.number) as *mut u8) };
            // SAFETY: kept still, so nobody writes to them, by `parts`, which the caller keeps until all ends were told.
            unsafe { Transfer::new(Direction::Write, offset, addr, len, to, token) }
        };
        let transfers = runs.iter().enumerate().map(begin).collect();
        let started = Started(gather.clone());
        self.store.start(transfers);
        started.results()
    }

    /// A copy of what follows each other.
    fn merged(&self, parts: &[Part<'_>], len_bytes: usize) -> Aligned {
        let mut merged = Aligned::new(len_bytes, self.file.page_bytes());
        let mut at = 0;
        for part in parts {
            let len = (part.bytes.end - part.bytes.start) as usize;
            let copy = |bytes: &[u8]| merged[at..at + len].copy_from_slice(bytes);
            self.file.pool.with_still_bytes(part.still.number, len, copy);
            at += len;
        }
        merged
    }
}
