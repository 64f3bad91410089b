//! Workloads on slab caches: objects of one size are allocated, freed, moved and checked, in Pagemill's caches and in
//! their peers.

mod fragments;
mod index;
mod moves;
mod object_stores;
mod owner_store;
mod pagemill_caches;
mod peers;
mod reads;
mod shared_objects;
mod speed;
mod stalls;
mod torture;
mod torture_command;
mod turns;

use super::{Failure, WorkloadResult};
use pagemill_slab::Slabs;
use pagemill_testbed::Testbed;

#[derive(Clone, Debug, clap::Args)]
pub struct SlabArguments {
    #[command(subcommand)]
    pub work: Workload,
}

#[derive(Clone, Debug, clap::Subcommand)]
pub enum Workload {
    Speed(speed::SpeedArguments),
    Reads(reads::ReadsArguments),
    Moves(moves::MovesArguments),
    Fragments(fragments::FragmentsArguments),
    Stalls(stalls::StallsArguments),
    Index(index::IndexArguments),
    Torture(torture_command::TortureArguments),
}

pub fn run(arguments: &SlabArguments) -> WorkloadResult {
    match &arguments.work {
        Workload::Speed(arguments) => speed::run(arguments),
        Workload::Reads(arguments) => reads::run(arguments),
        Workload::Moves(arguments) => moves::run(arguments, slabs_without_background_moves()?),
        Workload::Fragments(arguments) => fragments::run(arguments, slabs_without_background_moves),
        Workload::Stalls(arguments) => stalls::run(arguments, slabs_without_background_moves),
        Workload::Index(arguments) => index::run(arguments),
        Workload::Torture(arguments) => torture_command::run(arguments),
    }
}

/// A function that returns the `Slabs` in which a workload makes its slab caches. The workload calls it only when it
/// makes a cache.
type SlabsProvider = fn() -> Result<&'static Slabs, Failure>;

/// Returns the slabs of this process and turns their background defragmentation off, so that only the workload moves
/// objects.
fn slabs_without_background_moves() -> Result<&'static Slabs, Failure> {
    let pagemill = Testbed::of_process()?;
    pagemill.slabs.defrag_by_hand();
    Ok(pagemill.slabs)
}

/// Returns new slabs, which no other test uses or defragments.
#[cfg(test)]
fn slabs_of_test() -> Result<&'static Slabs, Failure> {
    use pagemill_core::arena::Layout;
    let layout = Layout { huge_from_bytes: Layout::for_program().huge_from_bytes, ..Layout::for_test() };
    let pagemill = Testbed::new(layout, pagemill_core::reclaim::tree::UNLIMITED)?;
    pagemill.slabs.defrag_by_hand();
    Ok(pagemill.slabs)
}
