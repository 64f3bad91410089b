//! Objects that are allocated and freed: each object at once, in batches of a thousand, or as a random replacement
//! among many.
//!
//! The first word of an object is its tag. The tag is written at allocation and checked when the object is freed. At
//! the end of a run, the tags of all live objects are checked. All subjects use the same tags in the same order.

use super::pagemill_caches::{self, Object};
use super::peers::{LockedSlotMap, SharedSlab, ThreadSlotMap};
use crate::workload::WorkloadResult;
use crate::workload::pairs::{self, FreeOrder, Malloc, ObjectAllocator, PairPlan, Pattern};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    /// A slab cache of values that do not move
    Fixed,
    /// A slab cache of objects that their owner moves
    #[value(name = "by-owner")]
    OwnerSlab,
    /// A slab cache of values that are accessed by handle
    #[value(name = "by-handle")]
    HandleMap,
    /// Allocations of the C library, or of the preloaded allocator
    Malloc,
    /// A map of the crate slotmap; if there are several threads, they share it under a lock
    Slotmap,
    /// A map of the crate sharded-slab, which all threads share
    ShardedSlab,
}

crate::workload::arguments! {
    SpeedArguments:
    subject: Subject,
    /// Bytes of an object.
    size: usize,
    /// Number of live objects of all threads together in the pattern `churn`, which replaces random objects.
    #[arg(default_value_t = 100_000)]
    live: usize,
    ..plan: PairPlan,
}

/// The words of an object that follow its tag.
pub type Words<const COUNT: usize> = [u64; COUNT];

/// Allocates and frees objects in the given pattern. The resulting JSON has the number of pairs of allocation and free
/// and, in a timed run, the nanoseconds per pair and the pairs per second.
pub fn run(arguments: &SpeedArguments) -> WorkloadResult {
    match arguments.size {
        64 => run_for_object_size::<Words<7>>(arguments),
        192 => run_for_object_size::<Words<23>>(arguments),
        576 => run_for_object_size::<Words<71>>(arguments),
        1024 => run_for_object_size::<Words<127>>(arguments),
        4096 => run_for_object_size::<Words<511>>(arguments),
        size => Err(format!("there are no objects of {size} bytes here").into()),
    }
}

fn run_for_object_size<Rest: Copy + Send + Sync + 'static>(arguments: &SpeedArguments) -> WorkloadResult {
    assert_eq!(size_of::<Object<Rest>>(), arguments.size);
    match arguments.subject {
        Subject::Fixed => pagemill_caches::fixed_cache::<Rest>().and_then(|cache| arguments.measure(|| &cache)),
        Subject::OwnerSlab => pagemill_caches::owner_cache::<Rest>().and_then(|cache| arguments.measure(|| &cache)),
        Subject::HandleMap => pagemill_caches::handle_cache::<Rest>().and_then(|cache| arguments.measure(|| &cache)),
        Subject::Malloc => arguments.measure(|| Malloc { size: arguments.size }),
        Subject::Slotmap if arguments.plan.threads == 1 => arguments.measure(ThreadSlotMap::<Rest>::new),
        Subject::Slotmap => {
            let map = LockedSlotMap::<Rest>::new();
            arguments.measure(|| &map)
        }
        Subject::ShardedSlab => {
            let slab = SharedSlab::<Rest>::new();
            arguments.measure(|| &slab)
        }
    }
}

impl SpeedArguments {
    /// Measures threads that allocate and free objects through values that `access` returns.
    fn measure<A: ObjectAllocator>(&self, access: impl Fn() -> A + Sync) -> WorkloadResult {
        let count = match self.plan.pattern {
            Pattern::Churn => self.live.div_ceil(self.plan.threads),
            Pattern::Pair | Pattern::Batch => pairs::PAIRS_PER_STEP as usize,
        };
        self.plan.measure(count, FreeOrder::Alternating, access)
    }
}
