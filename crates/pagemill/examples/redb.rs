//! The database redb with its file in a page cache, instead of in a file of its own: an adapter of redb's interface for
//! storage. The file has a store, so the database is durable, and may be larger than the cache.
//!
//! `cargo run --release -p pagemill --example redb -- FILE`

use pagemill::PageCache;
use pagemill::cache::{Mapping, Source, View, ViewMut};
use pagemill::store::{FileStore, Store};
use redb::{Database, StorageBackend, TableDefinition};
use std::error::Error;
use std::io;
use std::sync::Arc;

/// Memory limit of the page cache in bytes.
const CACHE_BYTES: u64 = 8 << 20;
/// Length of the views in bytes, which the database must not exceed. Only addresses are reserved, no memory.
const VIEW_BYTES: u64 = 1 << 36;

/// The way in which the database accesses its file.
#[derive(Debug)]
pub enum Access {
    /// `read_at` and `write_at`.
    Calls,
    /// Reads in a view, writes by `write_at`.
    ReadsInView(View),
    /// Reads and writes in a view.
    View(ViewMut),
}

/// A file of a page cache as storage of redb.
#[derive(Debug)]
pub struct CachedStorage {
    file: Mapping,
    access: Access,
}

impl CachedStorage {
    /// Opens a file by a function that chooses the way of access.
    ///
    /// # Errors
    ///
    /// As [`PageCache::open`] and `access`.
    pub fn open(
        cache: &PageCache,
        store: Arc<dyn Store>,
        access: impl FnOnce(&Mapping) -> pagemill::Result<Access>,
    ) -> pagemill::Result<Self> {
        let file = cache.open(store)?;
        let access = access(&file)?;
        Ok(Self { file, access })
    }

    fn check(&self, offset: u64, len: usize) -> io::Result<usize> {
        let is_inside = offset.checked_add(len as u64).is_some_and(|end| end <= self.file.size_bytes());
        if is_inside { Ok(offset as usize) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// Ways of access, as functions for [`CachedStorage::open`].
pub const ACCESSES: [fn(&Mapping) -> pagemill::Result<Access>; 3] = [
    |_| Ok(Access::Calls),
    |file| file.view(0..VIEW_BYTES).map(Access::ReadsInView),
    |file| file.view_mut(0..VIEW_BYTES).map(Access::View),
];

impl StorageBackend for CachedStorage {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.size_bytes())
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let at = self.check(offset, len)?;
        let mut bytes = vec![0; len];
        match &self.access {
            Access::Calls => {
                let count = self.file.read_at(&mut bytes, offset)?;
                assert_eq!(count, len, "a read within the file returns all bytes");
            }
            Access::ReadsInView(view) => view.read_at(&mut bytes, at),
            Access::View(view) => view.read_at(&mut bytes, at),
        }
        Ok(bytes)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(self.file.truncate(len)?)
    }

    fn sync_data(&self, _eventual: bool) -> io::Result<()> {
        Ok(self.file.sync()?)
    }

    fn write(&self, mut offset: u64, mut data: &[u8]) -> io::Result<()> {
        let at = self.check(offset, data.len())?;
        if let Access::View(view) = &self.access {
            view.write_at(data, at);
            return Ok(());
        }
        // A write at the limit of the cache may be short.
        while !data.is_empty() {
            let count = self.file.write_at(data, offset)?;
            data = &data[count..];
            offset += count as u64;
        }
        Ok(())
    }
}

const TABLE: TableDefinition<'_, u64, &str> = TableDefinition::new("names");

#[allow(dead_code)] // a test includes this file
fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: redb FILE")?;
    let cache = PageCache::builder("database").limit(CACHE_BYTES).source(Source::Shared).build()?;
    let store = Arc::new(FileStore::create(path)?);
    let database = Database::builder().create_with_backend(CachedStorage::open(&cache, store, ACCESSES[2])?)?;
    let writing = database.begin_write()?;
    writing.open_table(TABLE)?.insert(7, "seven")?;
    writing.commit()?;
    println!("{:?}", database.begin_read()?.open_table(TABLE)?.get(7)?.map(|name| name.value().to_owned()));
    println!("{:?}", cache.usage());
    Ok(())
}
