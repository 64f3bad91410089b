//! Subjects of the experiment: the programs or queues that do the transfers, and the memory that each uses.

use super::{Case, MIB_1};
use crate::storage::Subject;
use crate::storage::fio::{self, Engine};

pub const CACHE: &str = "cache";
pub const RING_HUGE_FIXED: &str = "ring-huge-registered";
pub const RING_SMALL: &str = "ring-4-KiB-pages";
pub const FIO_HUGE_FIXED: &str = "fio-io_uring-fixed-huge";

#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// The page cache. Reads use a queue that reads folios; writes use writeback.
    Cache,
    /// A bare io_uring. The strings are arguments of its workload.
    Ring(&'static [&'static str]),
    Fio(Engine),
}

impl Subject<Work> {
    /// Returns whether the subject runs this case. The cache chooses the queue depth of its writeback itself, so it
    /// runs writes only in the case with the largest depth.
    pub(super) fn runs_case(&self, case: Case, largest_depth: u64) -> bool {
        !matches!(self.work, Work::Cache) || !case.is_write || case.depth == largest_depth
    }

    /// Returns whether the target of a case compares this subject: the cache, a variant of fio, or a ring that is a
    /// baseline.
    pub(super) fn has_target(&self, case: Case) -> bool {
        match self.work {
            Work::Cache | Work::Fio(_) => true,
            Work::Ring(_) => {
                self.name == RING_HUGE_FIXED || (self.name == RING_SMALL && !case.is_write && case.io_bytes == MIB_1)
            }
        }
    }
}

const fn ring_subject(name: &'static str, words: &'static [&'static str]) -> Subject<Work> {
    Subject { name, work: Work::Ring(words) }
}

const fn fio_subject(name: &'static str, engine: Engine, is_huge: bool) -> Subject<Work> {
    Subject { name, work: Work::Fio(Engine { is_huge, ..engine }) }
}

pub const SUBJECTS: [Subject<Work>; 11] = [
    Subject { name: CACHE, work: Work::Cache },
    ring_subject(RING_HUGE_FIXED, &["--memory", "huge", "--registered"]),
    ring_subject("ring-huge", &["--memory", "huge"]),
    ring_subject("ring-4-KiB-pages-registered", &["--memory", "small", "--registered"]),
    ring_subject(RING_SMALL, &["--memory", "small"]),
    fio_subject("fio-libaio", fio::LIBAIO, false),
    fio_subject("fio-libaio-huge", fio::LIBAIO, true),
    fio_subject("fio-io_uring", fio::URING, false),
    fio_subject("fio-io_uring-huge", fio::URING, true),
    fio_subject("fio-io_uring-fixed", fio::URING_FIXED, false),
    fio_subject(FIO_HUGE_FIXED, fio::URING_FIXED, true),
];
