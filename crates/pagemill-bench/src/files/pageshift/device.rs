//! The parts `random` and `order`: a file on a device that is four times the cache, read through views and by pins,
//! compared with mappings of the kernel in a memory control group of the cache's size, and with fio's engine `mmap` there.

use std::time::Duration;

use super::page::{MEDIUM, Page};
use super::recommend::Finding;
use super::resident::VIEW_AUTO;
use super::{Part, Plan};
use crate::cgroup::Cgroup;
use crate::child::{self, Outcome};
use crate::error::{Error, Result};
use crate::experiment::{Metric, Study, metric_names, threads_text};
use crate::pattern::RECORD_BYTES;
use crate::report::{Bound, Report};
use crate::stats::{Better, mib};
use crate::storage::fio::{self, Job, Task};
use crate::storage::target::Target;
use crate::storage::{CPU_PER_MIB, IOS, MIB, READS, Subject, judge_against_best};
use crate::workload::pageshift::device::Way;

/// Subjects: mappings of the kernel without advice, with `MADV_RANDOM` and with `MADV_SEQUENTIAL`.
const MMAP: &str = "mmap";
const MMAP_RANDOM: &str = "mmap-random";
const MMAP_SEQUENTIAL: &str = "mmap-sequential";
const FIO_MMAP: &str = "fio-mmap";

/// Size in MiB of the file (quick, full).
const FILE_MIB: (u64, u64) = (128, 1024);
/// Size of the file divided by that of the cache.
const FILE_TO_CACHE_RATIO: u64 = 4;
/// Least number of pages in a cache. Larger pages are left out, because the pages that threads use cannot be evicted.
const MIN_PAGES: u64 = 16;
/// Numbers of threads of the part `random`.
const THREADS: [u64; 2] = [1, 8];
/// Duration in milliseconds of a sample of the part `random` (quick, full). A quarter of it is warm-up.
const RANDOM_MS: (u64, u64) = (500, 4000);
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// Metric: the most memory that the control group of the process had, page cache included.
const PEAK_MIB: Metric = Metric::lower("peak_mib", "MiB");
const RANDOM_RATE: Metric = Metric::higher(READS, "1/s");
const ORDER_RATE: Metric = Metric::higher(MIB, "MiB/s");
const RANDOM_COLUMNS: [(Metric, &str); 2] = [(RANDOM_RATE.against(MMAP_RANDOM), "4 KiB /s"), (PEAK_MIB, "peak, MiB")];
const ORDER_COLUMNS: [(Metric, &str); 3] = [
    (ORDER_RATE.against(MMAP_SEQUENTIAL), "MiB/s"),
    (Metric::lower(CPU_PER_MIB, "us").against(MMAP_SEQUENTIAL), "processor time of a MiB, us"),
    (PEAK_MIB, "peak, MiB"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// In a cache with pages of this size; without a size, with the default settings.
    Cache(Way, Option<&'static Page>),
    Kernel(Way),
    Fio,
}

/// The order of the reads: at random by a number of threads, or in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    Random(u64),
    Order,
}

impl Case {
    fn name(self) -> String {
        match self {
            Self::Random(threads) => format!("random 4 KiB, {}", threads_text(threads)),
            Self::Order => "in order".to_owned(),
        }
    }
}

fn views(pages: &[&'static Page]) -> Vec<Subject<Work>> {
    let views = pages.iter().map(|page| Subject { name: page.view, work: Work::Cache(Way::View, Some(page)) });
    views.chain([Subject { name: VIEW_AUTO, work: Work::Cache(Way::View, None) }]).collect()
}

const fn kernel(name: &'static str, way: Way) -> Subject<Work> {
    Subject { name, work: Work::Kernel(way) }
}

pub fn random_subjects(pages: &[&'static Page]) -> Vec<Subject<Work>> {
    let pins = pages.iter().map(|page| Subject { name: page.pin, work: Work::Cache(Way::Pin, Some(page)) });
    let peers =
        [kernel(MMAP, Way::Mmap), kernel(MMAP_RANDOM, Way::MmapRandom), Subject { name: FIO_MMAP, work: Work::Fio }];
    peers.into_iter().chain(views(pages)).chain(pins).collect()
}

pub fn order_subjects(pages: &[&'static Page]) -> Vec<Subject<Work>> {
    let peers = [kernel(MMAP, Way::Mmap), kernel(MMAP_SEQUENTIAL, Way::MmapSequential)];
    peers.into_iter().chain(views(pages)).collect()
}

/// The file, and the size of the memory for its pages.
struct Setting {
    target: Target,
    cache_mib: u64,
    run_ms: u64,
}

pub fn run(plan: &Plan<'_>, report: &mut Report) -> Result<Vec<Finding>> {
    let common = plan.common;
    let default_mib = plan.options.cache_mib.map_or(common.quick_or_full(FILE_MIB), |mib| mib * FILE_TO_CACHE_RATIO);
    let target = plan.options.place.open_or_make(default_mib)?;
    if !target.has_pattern {
        report.add_note("the file's content is unknown, so reads are not compared");
    }
    let file_mib = target.len_bytes >> 20;
    // Larger caches than this are not what the targets are about.
    let cache_mib = plan.options.cache_mib.unwrap_or((file_mib / FILE_TO_CACHE_RATIO).min(1024)).max(8);
    if cache_mib >= file_mib {
        return Err(Error::CannotRun(format!(
            "a cache of {cache_mib} MiB holds the whole file of {file_mib} MiB: --cache-mib has to be less"
        )));
    }
    report.add_note(format!(
        "the file on a device has {file_mib} MiB, the cache and the control group of each mapping of the kernel {cache_mib}; each sample begins without a resident page of the file"
    ));
    let setting = Setting { target, cache_mib, run_ms: common.quick_or_full(RANDOM_MS) };
    child::touch_beforehand(cache_mib * 3 / 2 + 256)?;
    let mut findings = Vec::new();
    if plan.runs(Part::Random) {
        findings.extend(run_random(plan, &setting, report)?);
    }
    if plan.runs(Part::Order) {
        findings.push(run_order(plan, &setting, report)?);
    }
    Ok(findings)
}

/// Leaves out page sizes of which the cache has too few, and fio if it is not there. Both are gaps of the report.
fn available(
    part: Part,
    plan: &Plan<'_>,
    all: Vec<Subject<Work>>,
    cache_mib: u64,
    report: &mut Report,
) -> Vec<Subject<Work>> {
    let mut subjects = plan.wanted(part, all);
    subjects.retain(|subject| match subject.work {
        Work::Cache(_, Some(page)) if page.bytes() * MIN_PAGES > cache_mib << 20 => {
            report.add_gap(format!("{}: a cache of {cache_mib} MiB has fewer than {MIN_PAGES} pages", subject.name));
            false
        }
        Work::Fio => fio::missing_reason().map(|gap| report.add_gap(gap)).is_none(),
        _ => true,
    });
    subjects
}

fn run_random(plan: &Plan<'_>, setting: &Setting, report: &mut Report) -> Result<Vec<Finding>> {
    let subjects = available(Part::Random, plan, random_subjects(&plan.pages), setting.cache_mib, report);
    let cases = THREADS.map(Case::Random);
    let mut study = Study::new(report, |case: &Case| case.name());
    let metrics = metric_names(&RANDOM_COLUMNS);
    study.measure_by_round((&cases, plan.common.rounds()), &subjects, &metrics, |case, subject| {
        child::failed_if_gap(sample(subject, *case, setting))
    })?;
    let view = Page::named(MEDIUM).view;
    let mut findings = Vec::new();
    for (case, what) in cases.into_iter().zip([
        "random reads of a file four times the cache (1 thread)",
        "random reads of a file four times the cache (8 threads)",
    ]) {
        let name = case.name();
        let table = format!("a file of four times the cache, {name}: half the spread, times {MMAP_RANDOM}");
        study.rows(&case, &subjects, &table, &RANDOM_COLUMNS);
        let target = format!("{name}, {view}, against the best mapping of the kernel");
        let peers = (&[MMAP, MMAP_RANDOM][..], READS);
        judge_against_best(&mut study, (target, Bound::AtLeast(1.5)), (&case, view), peers);
        let pin = Page::named(MEDIUM).pin;
        let target = format!("{name}, {view}, against {pin}");
        study.judge_quotient(target, Bound::AtLeast(0.9), (&case, view, READS), (&case, pin, READS));
        let metric = (RANDOM_RATE, Better::Higher);
        findings.push(Finding::new(what, (&study, &case), metric, &plan.pages, |page| page.view));
    }
    Ok(findings)
}

fn run_order(plan: &Plan<'_>, setting: &Setting, report: &mut Report) -> Result<Finding> {
    let subjects = available(Part::Order, plan, order_subjects(&plan.pages), setting.cache_mib, report);
    let case = Case::Order;
    let mut study = Study::new(report, |case: &Case| case.name());
    let metrics = metric_names(&ORDER_COLUMNS);
    study.measure_by_round((&[case], plan.common.rounds()), &subjects, &metrics, |case, subject| {
        child::failed_if_gap(sample(subject, *case, setting))
    })?;
    let table = format!("a file of four times the cache, in order: half the spread, times {MMAP_SEQUENTIAL}");
    study.rows(&case, &subjects, &table, &ORDER_COLUMNS);
    let view = Page::named(MEDIUM).view;
    for (metric, bound, what) in
        [(MIB, Bound::AtLeast(1.0), "MiB a second"), (CPU_PER_MIB, Bound::AtMost(1.0), "processor time")]
    {
        let target = format!("{}, {what}, {view} against {MMAP_SEQUENTIAL}", case.name());
        study.judge_quotient(target, bound, (&case, view, metric), (&case, MMAP_SEQUENTIAL, metric));
    }
    let metric = (ORDER_RATE, Better::Higher);
    let what = "reads in order of such a file";
    Ok(Finding::new(what, (&study, &case), metric, &plan.pages, |page| page.view))
}

/// Runs one sample in a control group, which has the size of the cache if the pages are the kernel's.
fn sample(subject: &Subject<Work>, case: Case, setting: &Setting) -> Result<Outcome> {
    let Setting { target, cache_mib, run_ms } = setting;
    let group = match subject.work {
        // Without a group only the peak is missing.
        Work::Cache(..) => Cgroup::without_limit().ok(),
        Work::Kernel(_) | Work::Fio => {
            let limited = Cgroup::with_limit(cache_mib << 20);
            Some(limited.map_err(|why| Error::Gap(format!("mappings of the kernel in a control group: {why}")))?)
        }
    };
    let outcome = match (subject.work, case) {
        (Work::Fio, Case::Random(jobs)) => {
            let task = Task::Timed { is_random: true, is_write: false, jobs, run_ms: *run_ms };
            let outcome = Job::new(target, fio::MMAP, (RECORD_BYTES as u64, 1), task).run_in(group.as_ref())?;
            outcome.part(|line| serde_json::json!({ READS: line[IOS] }))
        }
        (Work::Fio, Case::Order) => return Err(Error::Gap("fio has no part in reads in order".to_owned())),
        (Work::Cache(way, page), case) => run_workload(subject, (way, page), case, setting, group.as_ref())?,
        (Work::Kernel(way), case) => run_workload(subject, (way, None), case, setting, group.as_ref())?,
    };
    let peak = group.as_ref().and_then(Cgroup::peak_bytes).map(mib);
    Ok(outcome.part(|line| {
        let mut line = line.clone();
        line[PEAK_MIB.name] = peak.into();
        line
    }))
}

fn run_workload(
    subject: &Subject<Work>,
    (way, page): (Way, Option<&'static Page>),
    case: Case,
    setting: &Setting,
    group: Option<&Cgroup>,
) -> Result<Outcome> {
    let way = child::word(&way);
    let words = ["__pageshift-device", "--way", &way].into_iter();
    let words: Vec<&str> = words.chain(page.into_iter().flat_map(|page| ["--page", page.text])).collect();
    let mut numbers = vec![("--cache-mib", setting.cache_mib)];
    if let Case::Random(threads) = case {
        numbers.extend([("--threads", threads), ("--run-ms", setting.run_ms)]);
    }
    let line =
        [child::own_executable()?.display().to_string()].into_iter().chain(child::command_words(&words, &numbers));
    let line: Vec<String> = line.chain(setting.target.arguments()).collect();
    child::run_to_end(subject.name, &mut child::command_in_group(group, &line)?, TIME_LIMIT)
}
