//! A memory manager in user space for Linux: page caches, volatile memory and slab caches that return memory before a
//! limit is reached.
//!
//! All products of a process share one memory manager. The first use of a product creates it. It uses huge pages,
//! observes the limits of the process, of its control groups and of the machine, and returns memory before a limit is
//! reached.
//!
//! | use | start with | module |
//! |---|---|---|
//! | memory that can be computed again | [`VolatileBuf`], [`VolatileCache`] | [`volatile`] |
//! | files in memory; files on disk, cached | [`PageCache`] | [`cache`], [`store`] |
//! | many small objects | [`HandleMap`] | [`slab`] |
//! | a RAM file system in the process (feature `ramfs`) | `ramfs::RamFs` | `ramfs` |
//! | memory of the program that reclaim may request | [`reclaim::Shrinker`] | [`reclaim`] |
//! | statistics, settings, purging all volatile memory in a test | [`Pagemill`] | [`stats`], [`metrics`] |
//!
//! ```
//! use pagemill::{Contents, HandleMap, PageCache, VolatileBuf, slab};
//!
//! // A buffer that memory pressure may purge.
//! let mut tile = VolatileBuf::new(1 << 20)?;
//! tile.bytes_mut()?.fill(7);
//! tile.mark()?;
//! if let Contents::Purged { .. } = tile.unmark()? { /* compute the bytes again */ }
//!
//! // Files in memory, in huge pages, at most 64 MiB.
//! let tiles = PageCache::builder("tiles").limit(64 << 20).build()?;
//! let file = tiles.create()?; // a file on disk: `tiles.open(Arc::new(FileStore::open("f")?))?`
//! file.write_at(b"hello", 1000)?; // or `file.cursor()`, for `Read`, `Write` and `Seek`
//! file.close().map_err(|(_file, error)| error)?;
//!
//! // Values that the map may move, to return memory.
//! let names = HandleMap::<String>::new("names")?;
//! let handle = names.insert("pagemill".to_owned())?;
//! let guard = slab::enter(); // values that were read under the guard stay until it is dropped
//! assert_eq!(names.get(handle, &guard).map(String::as_str), Some("pagemill"));
//! # Ok::<(), pagemill::Error>(())
//! ```
//!
//! # Dependencies
//!
//! ```toml
//! [dependencies]
//! pagemill = { path = "pagemill/crates/pagemill" } # where the repository lies
//! ```
//!
//! A program depends on this crate only, and the examples of all items use no other crate of Pagemill. Values of a
//! [`VolatileCache`] can be `bytes::Bytes` and `Vec<T>` with `T: bytemuck::Pod`; a program that names these types also
//! depends on the crate `bytes` (version 1) or `bytemuck` (version 1).
//!
//! This library compiles no C code, so it needs no C compiler and no `make`. (Only the preload library of `pagemill
//! run`, which contains jemalloc, needs them.)
//!
//! # Errors
//!
//! [`Error`] converts to [`std::io::Error`], which contains the original error and prints the same text. A failed
//! insert into a slab cache returns a [`slab::InsertError`] with the value; it converts to both errors.

// Nothing here is modelled by loom.
#![cfg(not(loom))]

#[cfg(feature = "tracing")]
mod events;
mod pagemill;

#[cfg(feature = "tracing")]
pub use events::EventForwarder;
pub use pagemill::Pagemill;
pub use pagemill_cache::PageCache;
pub use pagemill_core::{Error, Result};
pub use pagemill_slab::HandleMap;
pub use pagemill_volatile::{Contents, VolatileBuf, VolatileCache};

/// The page cache: files in memory, with or without a store from which their pages are read.
///
/// A file is a [`Mapping`](cache::Mapping). Its memory consists of *folios*: a folio is one page of the cache, or a
/// huge page of 2 MiB, that is handled as one object.
///
/// ```
/// use pagemill::PageCache;
///
/// let cache = PageCache::builder("tiles").limit(64 << 20).build()?;
/// let file = cache.create()?;
/// assert_eq!(file.write_at(b"hello", 1000)?, 5);
/// let mut bytes = [0; 5];
/// assert_eq!(file.read_at(&mut bytes, 1000)?, 5);
/// assert_eq!(&bytes, b"hello");
/// file.close().map_err(|(_file, error)| error)?; // an error of `close` returns the file, too
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// A file on disk is opened with a [`FileStore`](store::FileStore):
///
/// ```no_run
/// use pagemill::PageCache;
/// use pagemill::store::FileStore;
/// use std::io::Write;
/// use std::sync::Arc;
///
/// let cache = PageCache::builder("logs").limit(64 << 20).build()?;
/// let file = cache.open(Arc::new(FileStore::open("log.txt")?))?;
/// writeln!(file.cursor(), "first line")?; // `cursor` has a position, for `Read`, `Write` and `Seek`
/// file.close().map_err(|(_file, error)| error)?; // the line is durable
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub mod cache {
    pub use pagemill_cache::{
        Advice, Always, Ask, Auto, Builder, Bytes, Cause, Choice, Cursor, Exclusive, Fetch, Fetched, FolioHint,
        Mapping, Never, PageCache, Pin, Pins, Policy, Prefaulted, PrivateView, Queue, Reuse, SharedMemory, Source,
        Usage, View, ViewMut, Writeback,
    };
    pub use pagemill_volatile::handle_fault;
}

/// A RAM file system in the process, whose inodes and names lie in movable slabs and whose data lie in a page cache.
///
/// ```
/// use pagemill::ramfs::RamFs;
///
/// let fs = RamFs::new("scratch")?;
/// fs.create_dir_all("/a/b")?;
/// fs.write("/a/b/file", b"hello")?;
/// assert_eq!(fs.read("/a/b/file")?, b"hello");
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[cfg(feature = "ramfs")]
pub mod ramfs {
    pub use pagemill_ramfs::{
        Access, Allocate, Attr, Builder, Caller, DirEntry, Entry, Error, Event, EventKind, File, FileSystem, FileType,
        Ino, LockKind, LockRange, OpenFile, OpenOptions, OwnedDirEntry, Quota, QuotaUsage, RamFs, RealFs, Rename,
        Result, SetAttr, SetTime, SetXattr, Shrunk, Usage, Watch, Whence,
    };
}

/// Slab caches for many small objects. They move objects together into fewer pages, and return the memory of the
/// others.
///
/// ```
/// use pagemill::{HandleMap, slab};
///
/// let sessions = HandleMap::<[u64; 8]>::new("sessions")?;
/// let handle = sessions.insert([7; 8])?;
/// assert_eq!(sessions.get(handle, &slab::enter()), Some(&[7; 8]));
/// assert_eq!(sessions.remove(handle)?.as_deref(), Some(&[7; 8]));
/// # Ok::<(), pagemill::Error>(())
/// ```
pub mod slab {
    pub use pagemill_slab::{
        Candidates, Done, FixedSlab, Guard, Handle, HandleMap, InsertError, Migrate, Movable, Moving, New, NodeInfo,
        OwnerSlab, Pinned, Progress, Removed, Settings, SlabCache, SlabInfo, SlabKind, Slot, Target, enter,
    };
}

/// Stores, from which the page cache reads its files and to which it writes them: files and block devices, memory, and
/// the program's own types.
///
/// ```no_run
/// use pagemill::PageCache;
/// use pagemill::store::FileStore;
/// use std::sync::Arc;
///
/// let cache = PageCache::builder("table").limit(1 << 30).build()?;
/// let file = cache.open(Arc::new(FileStore::open("table.db")?))?;
/// file.write_at(b"row", 0)?;
/// file.sync()?; // the row is durable
/// # Ok::<(), pagemill::Error>(())
/// ```
pub mod store {
    pub use pagemill_store::{
        Aligned, Alignment, Buffer, Cancel, Direction, FileOptions, FileStore, Finish, Gather, MemoryStore, Store,
        Transfer,
    };
}

/// Volatile memory: its contents may be purged under memory pressure, because the program can compute them again. A
/// test can purge all of it with [`Pagemill::return_all`](crate::Pagemill::return_all).
///
/// ```
/// use pagemill::VolatileCache;
///
/// let thumbnails = VolatileCache::<String, Vec<u8>>::new()?;
/// thumbnails.insert("a.png".to_owned(), &vec![7; 100_000])?;
/// match thumbnails.get("a.png") {
///     Some(bytes) => assert_eq!(bytes.len(), 100_000),
///     None => println!("purged: compute it again"),
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
pub mod volatile {
    pub use pagemill_volatile::{Behaviour, Blob, CacheCounts, Contents, Pin, VolatileBuf, VolatileCache};

    #[cfg(feature = "strict")]
    pub use pagemill_volatile::{
        handle_fault,
        vrange::{How, Marked, Mode, vrange},
    };
}

/// What a program needs to register memory of its own for reclaim, and to set when free memory returns to the system.
///
/// Example: [`Pagemill`].
pub mod reclaim {
    pub use pagemill_core::reclaim::{Cost, ParseReturnError, Return, Shrinker, Urgency, Which};
}

/// Statistics of the memory that this process holds, and counters of events.
///
/// Example: [`Pagemill`].
pub mod stats {
    pub use pagemill_core::stats::{Counter, CounterKind, MemoryAmounts, Row, Snapshot, TABLE, Unit};
}

/// Statistics as text for monitoring systems.
///
/// Example: [`metrics::Format`].
pub mod metrics {
    pub use pagemill_core::metrics::Format;
}

/// Types for sizes in bytes and in pages.
///
/// Example: [`cache::Builder`].
pub mod units {
    pub use pagemill_core::units::{Bytes, PageSize, parse_bytes};
}

/// The Rust blocks of the documentation, which the tests compile and run.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../../../README.md")]
    mod readme {}
    #[doc = include_str!("../README.md")]
    mod readme_of_the_crate {}
    #[doc = include_str!("../../../docs/recipe-rust-cache.md")]
    mod recipe_rust_cache {}
    #[doc = include_str!("../../../docs/recipe-file-cache.md")]
    mod recipe_file_cache {}
    #[doc = include_str!("../../../docs/volatile.md")]
    mod volatile {}
    #[doc = include_str!("../../../docs/mapping.md")]
    mod mapping {}
    #[doc = include_str!("../../../docs/files-behind.md")]
    mod files_behind {}
    #[doc = include_str!("../../../docs/slab.md")]
    mod slab {}
    #[cfg(feature = "ramfs")]
    #[doc = include_str!("../../../docs/ramfs.md")]
    mod ramfs {}
}
