//! Two million objects, of which nine tenths are freed at random. Measures the memory left after all free memory was
//! returned.

use std::hint;
use std::time::Instant;

use pagemill::units::BLOCK_BYTES;

use super::Home;
use super::keepers::{Handled, Keeper, Malloc, Still};
use super::owned::{Book, Owned};
use crate::native::{GiveBack, Pages};
use crate::proc;
use crate::stats::Random;
use crate::workload::{Failure, Outcome};

/// The seed of the random order. It is the same for all subjects, so that the same objects are freed in the same order.
const SEED: u64 = 0x736c_6162;

/// One object in this many is kept.
const STAYING: usize = 10;

/// Number of additional object numbers, for allocations during the compaction.
pub const SPARE: usize = 64;

/// Bytes of an entry in the table of handles, for each object of the peak.
const HANDLE_BYTES: u64 = 8;

/// The subject that stores the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    ByOwner,
    ByHandle,
    Fixed,
    /// The preloaded allocator.
    Malloc,
}

/// Arguments: the subject, and the number and size of its objects.
#[derive(Clone, Debug, clap::Args)]
pub struct Chosen {
    #[arg(long)]
    pub subject: Subject,
    /// Bytes of an object: 192 or 576.
    #[arg(long)]
    pub size: usize,
    #[arg(long)]
    pub objects: usize,
    /// The call that makes the allocator return memory.
    #[arg(long, default_value = "malloc-trim")]
    pub how: GiveBack,
}

/// Arguments of one run.
#[derive(Clone, Debug, clap::Args)]
pub struct Fragments {
    #[command(flatten)]
    pub chosen: Chosen,
}

/// Work that is generic over the subject.
pub trait Work {
    fn with<const WORDS: usize, K: Keeper<WORDS>>(&self, open: impl FnOnce() -> Result<K, Failure>) -> Outcome;
}

impl Chosen {
    /// Runs the work with the chosen subject. Memory that is in use before the work calls `open` does not count as the
    /// subject's.
    pub fn run(&self, home: Home, work: &impl Work) -> Outcome {
        match self.size {
            192 => self.with_words::<24>(home, work),
            576 => self.with_words::<72>(home, work),
            other => Err(Failure::Other(format!("objects are of 192 or of 576 bytes, not of {other}"))),
        }
    }

    fn with_words<const WORDS: usize>(&self, home: Home, work: &impl Work) -> Outcome {
        match self.subject {
            Subject::ByOwner => {
                let book = Book::<WORDS>::new(self.objects + SPARE);
                work.with(|| Owned::new(home()?, book))
            }
            Subject::ByHandle => work.with(|| Handled::<WORDS>::new(home()?)),
            Subject::Fixed => work.with(|| Still::<WORDS>::new(home()?)),
            Subject::Malloc => work.with::<WORDS, _>(|| Ok(Malloc { how: self.how })),
        }
    }
}

/// The objects that are to be freed or kept, and the workload's references to them. All of its memory is resident
/// before the first object is made.
pub struct Plan<Kept> {
    /// References to the objects by number; none if the object does not exist.
    pub kept: Vec<Option<Kept>>,
    /// All numbers in random order. The objects of the first nine tenths are freed.
    order: Vec<u32>,
}

impl<Kept> Plan<Kept> {
    pub fn new(objects: usize) -> Self {
        let mut order: Vec<u32> = (0..objects as u32).collect();
        Random::new(SEED).shuffle(&mut order);
        let mut kept = Vec::with_capacity(objects);
        kept.resize_with(objects, || None);
        // `black_box` makes the compiler write the entries, so that their pages are resident.
        hint::black_box(&mut kept).iter_mut().for_each(|kept| *kept = None);
        Self { kept, order }
    }

    fn going(&self) -> &[u32] {
        &self.order[..self.order.len() - self.order.len() / STAYING]
    }

    /// Returns the numbers of the kept objects in ascending order.
    fn staying(&self) -> Vec<u32> {
        let mut staying = self.order[self.going().len()..].to_vec();
        staying.sort_unstable();
        staying
    }

    /// Makes all objects and frees nine tenths of them.
    pub fn fragment<const WORDS: usize>(&mut self, keeper: &impl Keeper<WORDS, Kept = Kept>) -> Result<(), Failure> {
        for (number, kept) in (0..).zip(&mut self.kept) {
            *kept = Some(keeper.put(number)?);
        }
        for at in 0..self.going().len() {
            let number = self.order[at] as usize;
            if let Some(kept) = self.kept[number].take() {
                keeper.take(kept)?;
            }
        }
        Ok(())
    }

    /// Checks that exactly the kept objects exist, with their contents.
    pub fn check<const WORDS: usize>(&self, keeper: &impl Keeper<WORDS, Kept = Kept>) -> Result<(), Failure> {
        let kept = (0..).zip(&self.kept).filter_map(|(number, kept)| Some((number, kept.as_ref()?)));
        let wrong = kept.clone().filter(|(number, kept)| !keeper.is_whole(kept, *number)).count();
        match (wrong, kept.count()) {
            (0, count) if count == self.order.len() / STAYING => Ok(()),
            (wrong, count) => {
                Err(Failure::WrongAnswer(format!("{wrong} of {count} objects are not what was put there")))
            }
        }
    }
}

/// Makes the objects, frees nine tenths, has the free memory returned, and measures the memory left.
pub fn run(arguments: &Fragments, home: Home) -> Outcome {
    arguments.chosen.run(home, arguments)
}

impl Work for Fragments {
    fn with<const WORDS: usize, K: Keeper<WORDS>>(&self, open: impl FnOnce() -> Result<K, Failure>) -> Outcome {
        let mut plan = Plan::new(self.chosen.objects);
        let at_first = resident()?;
        let keeper = open()?;
        plan.fragment(&keeper)?;
        let held = resident()?.saturating_sub(at_first);
        let begun = Instant::now();
        keeper.give_back()?;
        let took = begun.elapsed();
        let left = resident()?.saturating_sub(at_first);
        plan.check(&keeper)?;
        let (handles, moved) = (keeper.handle_bytes(), keeper.moved()?);
        // For a cache by handle, 8 bytes for each object of the peak are subtracted from the memory left.
        let apart = handles.min(HANDLE_BYTES * self.chosen.objects as u64);
        let live = (plan.staying().len() * self.chosen.size) as f64;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let mut line = serde_json::json!({
            "live_mib": live / f64::from(1 << 20),
            "held_ratio": held as f64 / live,
            "left_mib": mib(left),
            "left_ratio": left.saturating_sub(apart) as f64 / live,
            "handles_mib": mib(handles),
            "ms": took.as_secs_f64() * 1e3,
            "moved": moved,
        });
        if moved > 0 {
            let (move_ns, copy_ns) =
                (took.as_nanos() as f64 / moved as f64, copy_ns::<WORDS, _>(&plan, moved as usize)?);
            line["move_ns"] = move_ns.into();
            line["copy_ns"] = copy_ns.into();
            line["times_copy"] = (move_ns / copy_ns).into();
        }
        Ok(line)
    }
}

/// Returns the anonymous and shared resident bytes of this process.
fn resident() -> Result<u64, Failure> {
    proc::own_bytes().ok_or_else(|| Failure::Other("no /proc/self/smaps_rollup".to_owned()))
}

/// Returns the nanoseconds to copy an object. Copies as many objects as were moved, out of huge pages in which they are
/// scattered as the kept objects were. Before that, the other objects are written to, as when they were freed.
fn copy_ns<const WORDS: usize, Kept>(plan: &Plan<Kept>, moved: usize) -> Result<f64, Failure> {
    let size = WORDS * size_of::<u64>();
    let staying = plan.staying();
    let copies = moved.min(staying.len());
    let bytes = |objects: usize| (objects * size).next_multiple_of(BLOCK_BYTES);
    let (mut from, mut to) = (Pages::huge(bytes(plan.order.len()))?, Pages::huge(bytes(copies))?);
    let (from, to) = (from.bytes_mut(bytes(plan.order.len())), to.bytes_mut(bytes(copies)));
    for number in &staying {
        from[*number as usize * size..][..size].fill(*number as u8);
    }
    for number in plan.going() {
        from[*number as usize * size..][..size_of::<u64>()].fill(0);
    }
    let begun = Instant::now();
    for (number, to) in staying.iter().zip(to.chunks_exact_mut(size)).take(copies) {
        to.copy_from_slice(&from[*number as usize * size..][..size]);
    }
    let took = begun.elapsed();
    let is_whole = |(number, to): (&u32, &[u8])| to.iter().all(|byte| *byte == *number as u8);
    match staying.iter().zip(to.chunks_exact(size)).take(copies).all(is_whole) {
        true => Ok(took.as_nanos() as f64 / copies as f64),
        false => Err(Failure::WrongAnswer("a copy is not what was copied".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::slab::of_test;

    fn chosen(subject: Subject, size: usize) -> Chosen {
        Chosen { subject, size, objects: 20_000, how: GiveBack::MallocTrim }
    }

    /// Each subject finishes the run with its kept objects intact. Only relocatable objects are moved.
    #[test]
    fn fragments_are_packed() {
        for (subject, size, can_move) in [
            (Subject::ByOwner, 192, true),
            (Subject::ByHandle, 576, true),
            (Subject::Fixed, 192, false),
            (Subject::Malloc, 576, false),
        ] {
            let line = run(&Fragments { chosen: chosen(subject, size) }, of_test).expect("it comes through");
            let figure = |name: &str| line[name].as_f64();

            assert_eq!(figure("moved") > Some(0.0), can_move, "{subject:?}: {line}");
            assert_eq!(figure("times_copy").is_some(), can_move);
            assert_eq!(figure("live_mib").map(|mib| (mib * f64::from(1 << 20)) as usize), Some(2000 * size));
        }
        assert!(run(&Fragments { chosen: chosen(Subject::Fixed, 193) }, of_test).is_err());
    }

    /// The check fails if a kept object was replaced by another, and if it is missing.
    #[test]
    fn what_is_wrong_is_found() {
        let keeper = Malloc { how: GiveBack::MallocTrim };
        let mut plan = Plan::new(100);
        plan.fragment::<24>(&keeper).expect("memory");
        assert!(plan.check::<24>(&keeper).is_ok());
        let number = plan.staying()[3] as usize;

        plan.kept[number] = Keeper::<24>::put(&keeper, 1000).ok();
        assert!(matches!(plan.check::<24>(&keeper), Err(Failure::WrongAnswer(_))));

        plan.kept[number] = None;
        assert!(matches!(plan.check::<24>(&keeper), Err(Failure::WrongAnswer(_))));
    }
}
