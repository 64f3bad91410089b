//! A memory manager in user space for data-heavy Linux programs: huge pages, and free memory that returns to the
//! system.
//!
//! The crate consists of the basics ([`units`], [`error`], [`stats`], [`trace`]), the [`arena`] of 2 MiB blocks, memory
//! limits and [`reclaim`], the [`heap`] that serves whole programs under `pagemill run`, [`volatile`] ranges, [`slab`]
//! caches, the page cache ([`mapping`]) with its index ([`xarray`]), and the [`store`]s behind its files.
//!
//! [`Pagemill`] builds and owns all of these parts. Layers, from bottom to top: `units`, `error`, `trace`, `stats`,
//! `sync`, `epoch`; `arena`; `reclaim`, `xarray`, `store`; `heap`; `volatile`, `mapping`, `slab`. A module uses only
//! lower modules. Where lower code calls upper code, it declares a trait ([`arena::Budget`], [`reclaim::Shrinker`]).

// Nothing here is modelled by loom.
#![cfg(not(loom))]

mod pagemill;
mod process;
#[cfg(doctest)]
mod refused;

pub use pagemill::Pagemill;
pub use pagemill_core::{Error, Result, error, reclaim, units};

/// Blocks of 2 MiB.
pub mod arena {
    pub use pagemill_core::arena::{Arena, Budget, Context, Layout, WASTE_DIVISOR, nodes};
}

/// Epoch-based reclamation.
pub mod epoch {
    pub use pagemill_core::epoch::{Guard, pin};
}

/// Large allocations: slots of 64 KiB and up.
pub mod heap {
    pub use pagemill_heap::{Allocation, Heap, MIN_BYTES};
}

/// Lists and commands between processes.
pub mod listing {
    pub use pagemill_cache::mapping::ask_for_caches;
    pub use pagemill_core::listing::{
        Action, ControlCommand, MOST_RECORDS, Measured, Outcome, StatsResponder, Unanswered, ask_for_figures, command,
    };
    pub use pagemill_slab::{ask_for_slabs, shown_name};
    pub use pagemill_volatile::{List, ask};

    /// Requests to other processes.
    pub mod ask {
        pub use pagemill_cache::mapping::ask_for_caches;
        pub use pagemill_core::listing::ask::{ANSWER_WITHIN, Unanswered, ask_for_figures, command};
        pub use pagemill_slab::ask_for_slabs;
        pub use pagemill_volatile::{List, ask};
    }
}

/// Files in memory: the page cache.
pub mod mapping {
    pub use pagemill_cache::mapping::{
        Advice, Cache, Caches, Exclusive, Fetch, Fetched, Holder, MAX_CACHES, Mapping, Pin, Pins, Policy, Queue, Reuse,
        Settings, Source, Usage, Writeback, order, policy,
    };
}

/// Where processes publish their figures.
pub mod published {
    pub use pagemill_core::published::{
        Process, Published, TREE_FILE, TREE_VARIABLE, file_of, find, find_all, list, make_tree_folder, missing,
        own_file, publish, read, read_all, read_tree, remove_tree_folder, running, set_home, sweep, unreadable,
        user_folder, user_folder_below, withdraw,
    };
}

/// Slab caches: objects of one size, which can be moved together.
pub mod slab {
    pub use pagemill_cache::{NodeCache, Slabs};
    pub use pagemill_slab::{
        ByHandle, ByOwner, CacheKind, Candidates, Done, Fixed, Guard, Handle, MAX_CACHES, Migrate, Movable, Moving,
        New, NodeInfo, Pinned, Progress, Settings, ShrinkReport, SlabInfo, Slot, Target, pin,
    };
}

/// Counters of a process.
pub mod stats {
    pub use pagemill_core::stats::{
        Counter, CounterKind, Figures, GIVEABLE, MemoryAmounts, Row, Snapshot, TABLE, Unit, VERSION, add,
        detach_in_child, get, publish, raise, read, read_of, set, snapshot, sub,
    };
}

/// Files, devices and programs behind cached files.
pub mod store {
    pub use pagemill_store::{
        Aligned, Buffer, Cancel, Direction, Faults, FaultyStore, FileOptions, FileStore, Finish, Gather, MemoryStore,
        Ring, Store, Transfer, buffer, faulty, file, memory, ring, transfer,
    };
}

/// A lock that never allocates.
pub mod sync {
    pub use pagemill_core::sync::{Lock, LockGuard};
}

/// The latest events of a process.
pub mod trace {
    pub use pagemill_core::trace::{Event, EventRing, Recorded, event, read};
}

/// Memory whose contents may be purged under pressure.
pub mod volatile {
    pub use pagemill_volatile::{
        Behaviour, Contents, Listed, MAX_RANGES, Pin, Range, Ranges, VolatileCache, Vranges, c, cache, handle_fault,
        listed, range, vrange,
    };
}

/// The index of a page cache.
pub mod xarray {
    pub use pagemill_xarray::{
        Forest, Found, Hit, MAX_INDEX, MAX_ORDER, MAX_VALUE, Mark, NodeStock, Writer, XArray, pin,
    };
}
