//! Two million objects, of which nine tenths are freed at random. Measures the memory left after all free memory was
//! returned.

use std::hint;
use std::time::Instant;

use fastrand::Rng;
use pagemill_core::units::BLOCK_BYTES;

use super::SlabsProvider;
use super::object_stores::{FixedStore, HandleStore, Malloc, ObjectStore};
use super::owner_store::{AddressTable, OwnerStore};
use crate::native::{GiveBack, Pages};
use crate::proc;
use crate::stats::mib;
use crate::workload::{Failure, WorkloadResult, ensure};

/// The seed of the random order of the objects. All subjects use the same seed, so that they free the same objects in
/// the same order.
const ORDER_SEED: u64 = 0x736c_6162;

/// One object in this many is kept; the others are freed.
const OBJECTS_PER_KEPT_ONE: usize = 10;

/// Number of object numbers that are reserved for objects allocated during the compaction.
pub const SPARE_OBJECT_NUMBERS: usize = 64;

/// Bytes of an entry in the table of handles. The table keeps as many entries as there were objects at most.
const HANDLE_BYTES: u64 = 8;

/// The allocator or cache that stores the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    #[value(name = "by-owner")]
    OwnerSlab,
    #[value(name = "by-handle")]
    HandleMap,
    Fixed,
    Malloc,
}

crate::workload::arguments! {
    /// Arguments that choose an allocator or a cache, and the number and size of its objects.
    SubjectOptions:
    subject: Subject,
    /// Bytes of an object: 192 or 576.
    size: usize,
    objects: usize,
    /// The call that makes the allocator return free memory to the system.
    #[arg(default_value = "malloc-trim")]
    how: GiveBack,
}

crate::workload::arguments! {
    FragmentsArguments:
    ..subject_options: SubjectOptions,
}

/// A measurement that can run with any allocator or cache. Its function `run_with` calls `open` to make the allocator
/// or cache.
pub trait SubjectWork {
    fn run_with<const WORDS: usize, K: ObjectStore<WORDS>>(
        &self,
        open: impl FnOnce() -> Result<K, Failure>,
    ) -> WorkloadResult;
}

impl SubjectOptions {
    /// Runs `work` with the chosen allocator or cache. Memory that is in use before `work` calls `open` is not counted
    /// as memory of the allocator or cache.
    pub fn run(&self, provider: SlabsProvider, work: &impl SubjectWork) -> WorkloadResult {
        match self.size {
            192 => self.run_with_object_words::<24>(provider, work),
            576 => self.run_with_object_words::<72>(provider, work),
            other => Err(format!("objects are of 192 or of 576 bytes, not of {other}").into()),
        }
    }

    fn run_with_object_words<const WORDS: usize>(
        &self,
        provider: SlabsProvider,
        work: &impl SubjectWork,
    ) -> WorkloadResult {
        match self.subject {
            Subject::OwnerSlab => {
                let table = AddressTable::<WORDS>::new(self.objects + SPARE_OBJECT_NUMBERS);
                work.run_with(|| OwnerStore::new(provider()?, table))
            }
            Subject::HandleMap => work.run_with(|| HandleStore::<WORDS>::new(provider()?)),
            Subject::Fixed => work.run_with(|| FixedStore::<WORDS>::new(provider()?)),
            Subject::Malloc => work.run_with::<WORDS, _>(|| Ok(Malloc { how: self.how })),
        }
    }
}

/// The choice of the objects to free and to keep, and the workload's references to all objects. All memory of the plan
/// is resident before the first object is made.
pub struct FragmentationPlan<Reference> {
    /// The reference to each object, by object number; none if the object does not exist.
    pub references: Vec<Option<Reference>>,
    /// All object numbers in random order. The objects whose numbers are in the first nine tenths are freed.
    order: Vec<u32>,
}

impl<Reference> FragmentationPlan<Reference> {
    pub fn new(objects: usize) -> Self {
        let mut order: Vec<u32> = (0..objects as u32).collect();
        Rng::with_seed(ORDER_SEED).shuffle(&mut order);
        let mut references = Vec::with_capacity(objects);
        references.resize_with(objects, || None);
        // `black_box` makes the compiler write the entries, so that their pages are resident.
        hint::black_box(&mut references).iter_mut().for_each(|references| *references = None);
        Self { references, order }
    }

    fn freed_numbers(&self) -> &[u32] {
        &self.order[..self.order.len() - self.order.len() / OBJECTS_PER_KEPT_ONE]
    }

    /// Returns the numbers of the objects to keep, in ascending order.
    fn kept_numbers(&self) -> Vec<u32> {
        let mut kept_numbers = self.order[self.freed_numbers().len()..].to_vec();
        kept_numbers.sort_unstable();
        kept_numbers
    }

    /// Makes all objects and frees nine tenths of them.
    pub fn fragment<const WORDS: usize>(
        &mut self,
        store: &impl ObjectStore<WORDS, Reference = Reference>,
    ) -> Result<(), Failure> {
        for (number, slot) in (0..).zip(&mut self.references) {
            *slot = Some(store.make_object(number)?);
        }
        for at in 0..self.freed_numbers().len() {
            let number = self.order[at] as usize;
            if let Some(reference) = self.references[number].take() {
                store.free_object(reference)?;
            }
        }
        Ok(())
    }

    /// Checks that exactly the objects to keep exist, and that their contents are unchanged.
    pub fn check_objects<const WORDS: usize>(
        &self,
        store: &impl ObjectStore<WORDS, Reference = Reference>,
    ) -> Result<(), Failure> {
        let references =
            (0..).zip(&self.references).filter_map(|(number, reference)| Some((number, reference.as_ref()?)));
        let wrong = references.clone().filter(|(number, reference)| !store.has_number(reference, *number)).count();
        let count = references.count();
        ensure(wrong == 0 && count == self.order.len() / OBJECTS_PER_KEPT_ONE, || {
            format!("{wrong} of {count} objects are not what was put there")
        })
    }
}

/// Makes the objects, frees nine tenths of them, makes the allocator or cache return its free memory, and measures the
/// memory left.
pub fn run(arguments: &FragmentsArguments, provider: SlabsProvider) -> WorkloadResult {
    arguments.subject_options.run(provider, arguments)
}

impl SubjectWork for FragmentsArguments {
    fn run_with<const WORDS: usize, K: ObjectStore<WORDS>>(
        &self,
        open: impl FnOnce() -> Result<K, Failure>,
    ) -> WorkloadResult {
        let mut plan = FragmentationPlan::new(self.subject_options.objects);
        let at_first = resident_bytes()?;
        let store = open()?;
        plan.fragment(&store)?;
        let held = resident_bytes()?.saturating_sub(at_first);
        let begun = Instant::now();
        store.give_back()?;
        let took = begun.elapsed();
        let left = resident_bytes()?.saturating_sub(at_first);
        plan.check_objects(&store)?;
        let (handles, moved) = (store.handle_bytes(), store.moved_count()?);
        // For a cache by handle, 8 bytes for each object of the peak are subtracted from the memory left.
        let subtracted_bytes = handles.min(HANDLE_BYTES * self.subject_options.objects as u64);
        let live = (plan.kept_numbers().len() * self.subject_options.size) as f64;
        let mut line = serde_json::json!({
            "live_mib": live / f64::from(1 << 20),
            "held_ratio": held as f64 / live,
            "left_mib": mib(left),
            "left_ratio": left.saturating_sub(subtracted_bytes) as f64 / live,
            "handles_mib": mib(handles),
            "ms": took.as_secs_f64() * 1e3,
            "moved": moved,
        });
        if moved > 0 {
            let (move_ns, copy_ns) =
                (took.as_nanos() as f64 / moved as f64, time_copy_ns::<WORDS, _>(&plan, moved as usize)?);
            line["move_ns"] = move_ns.into();
            line["copy_ns"] = copy_ns.into();
            line["times_copy"] = (move_ns / copy_ns).into();
        }
        Ok(line)
    }
}

/// Returns the anonymous and shared resident bytes of this process.
fn resident_bytes() -> Result<u64, Failure> {
    proc::own_anonymous_bytes().ok_or_else(|| Failure::Other("no /proc/self/smaps_rollup".to_owned()))
}

/// Returns the nanoseconds to copy an object. Copies as many objects as were moved, from huge pages in which these
/// objects are scattered like the kept objects of the plan. First writes to the objects that are not copied, since
/// freeing an object also writes to it.
fn time_copy_ns<const WORDS: usize, Reference>(
    plan: &FragmentationPlan<Reference>,
    moved: usize,
) -> Result<f64, Failure> {
    let size = WORDS * size_of::<u64>();
    let kept_numbers = plan.kept_numbers();
    let copies = moved.min(kept_numbers.len());
    let bytes = |objects: usize| (objects * size).next_multiple_of(BLOCK_BYTES);
    let (mut from, mut to) = (Pages::huge(bytes(plan.order.len()))?, Pages::huge(bytes(copies))?);
    let (from, to) = (from.bytes_mut(bytes(plan.order.len())), to.bytes_mut(bytes(copies)));
    for number in &kept_numbers {
        from[*number as usize * size..][..size].fill(*number as u8);
    }
    for number in plan.freed_numbers() {
        from[*number as usize * size..][..size_of::<u64>()].fill(0);
    }
    let begun = Instant::now();
    for (number, to) in kept_numbers.iter().zip(to.chunks_exact_mut(size)).take(copies) {
        to.copy_from_slice(&from[*number as usize * size..][..size]);
    }
    let took = begun.elapsed();
    let is_whole = |(number, to): (&u32, &[u8])| to.iter().all(|byte| *byte == *number as u8);
    ensure(
        kept_numbers.iter().zip(to.chunks_exact(size)).take(copies).all(is_whole),
        || "a copy is not what was copied",
    )?;
    Ok(took.as_nanos() as f64 / copies as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::slab::slabs_of_test;

    fn subject_options(subject: Subject, size: usize) -> SubjectOptions {
        SubjectOptions { subject, size, objects: 20_000, how: GiveBack::MallocTrim }
    }

    /// With each allocator and cache, the run must end with the kept objects intact. Only objects that their cache can
    /// move may be moved.
    #[test]
    fn fragmented_objects_are_compacted() {
        for (subject, size, can_move) in [
            (Subject::OwnerSlab, 192, true),
            (Subject::HandleMap, 576, true),
            (Subject::Fixed, 192, false),
            (Subject::Malloc, 576, false),
        ] {
            let line = run(&FragmentsArguments { subject_options: subject_options(subject, size) }, slabs_of_test)
                .expect("it comes through");
            let figure = |name: &str| line[name].as_f64();

            assert_eq!(figure("moved") > Some(0.0), can_move, "{subject:?}: {line}");
            assert_eq!(figure("times_copy").is_some(), can_move);
            assert_eq!(figure("live_mib").map(|mib| (mib * f64::from(1 << 20)) as usize), Some(2000 * size));
        }
        assert!(
            run(&FragmentsArguments { subject_options: subject_options(Subject::Fixed, 193) }, slabs_of_test).is_err()
        );
    }

    /// One of the kept objects is replaced by another object, or removed. [`FragmentationPlan::check_objects`] must
    /// fail in both cases.
    #[test]
    fn replaced_or_missing_objects_are_detected() {
        let store = Malloc { how: GiveBack::MallocTrim };
        let mut plan = FragmentationPlan::new(100);
        plan.fragment::<24>(&store).expect("memory");
        assert!(plan.check_objects::<24>(&store).is_ok());
        let number = plan.kept_numbers()[3] as usize;

        plan.references[number] = ObjectStore::<24>::make_object(&store, 1000).ok();
        assert!(matches!(plan.check_objects::<24>(&store), Err(Failure::WrongAnswer(_))));

        plan.references[number] = None;
        assert!(matches!(plan.check_objects::<24>(&store), Err(Failure::WrongAnswer(_))));
    }
}
