//! The parts `views` and `touch`: views of resident files, compared with mappings of the kernel and anonymous memory.

use std::time::Duration;

use super::page::{LARGE, MEDIUM, Page, SMALL};
use super::recommend::Finding;
use super::repeated::LEN_BYTES;
use super::{Part, Plan};
use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{Metric, Study, metric_names};
use crate::report::{Bound, Report, Series};
use crate::stats::Better;
use crate::storage::Subject;
use crate::workload::pageshift::memory::Kind;

/// Subject: a view of a file in a cache with pages of 4 KiB and the default policy, which makes huge folios.
pub const VIEW_AUTO: &str = "view-auto";
/// Subject: a mapping of a file in the kernel's memory, in pages of the kernel's setting.
const MMAP: &str = "mmap";
/// Subject: anonymous memory in huge pages.
const ANONYMOUS: &str = "anonymous-huge";

/// Duration in milliseconds of a sample of `views`, and of `touch` (quick, full).
const VIEWS_MS: (u64, u64) = (200, 1000);
const TOUCH_MS: (u64, u64) = (100, 1000);
/// MiB of memory that `touch` reads (quick, full).
const TOUCH_MIB: (u64, u64) = (256, 1024);
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// Fraction in huge pages of [`ANONYMOUS`] below which the report warns that the baseline is too slow.
const MIN_HUGE_SHARE: f64 = 0.98;

const TOUCH_PER_VIEW: Metric = Metric::lower("touch_ms", "ms");
const HANDLER_FAULTS: Metric = Metric::lower("handler_faults", "faults");
/// Number of pages of 4 KiB in the file for each fault.
const SMALL_PAGES_PER_FAULT: Metric = Metric::higher("small_pages_per_fault", "pages");
const VIEW_COLUMNS: [(Metric, &str); 5] = [
    (TOUCH_PER_VIEW.against(MMAP), "map and touch, ms"),
    (Metric::lower("unmap_ms", "ms").against(MMAP), "unmap, ms"),
    (HANDLER_FAULTS, "faults by our handler"),
    (SMALL_PAGES_PER_FAULT, "4 KiB for each of them"),
    (Metric::lower("kernel_faults", "faults"), "faults by the kernel"),
];
const TOUCH_NS: Metric = Metric::lower("touch_ns", "ns");
const HUGE_SHARE: &str = "huge_share";
const TOUCH_COLUMNS: [(Metric, &str); 2] =
    [(TOUCH_NS.against(ANONYMOUS), "8 bytes, ns"), (Metric::higher(HUGE_SHARE, "1"), "mapped huge")];

/// The kind of memory and, for views, the page size of the cache.
type Work = (Kind, Option<&'static Page>);

fn views(pages: &[&'static Page]) -> Vec<Subject<Work>> {
    let views = pages.iter().map(|page| Subject { name: page.view, work: (Kind::View, Some(*page)) });
    views.chain([Subject { name: VIEW_AUTO, work: (Kind::View, None) }]).collect()
}

pub fn view_subjects(pages: &[&'static Page]) -> Vec<Subject<Work>> {
    let mmap = Subject { name: MMAP, work: (Kind::Memfd, None) };
    [mmap].into_iter().chain(views(pages)).collect()
}

pub fn touch_subjects(pages: &[&'static Page]) -> Vec<Subject<Work>> {
    let anonymous = Subject { name: ANONYMOUS, work: (Kind::Anonymous, None) };
    [anonymous].into_iter().chain(view_subjects(pages)).collect()
}

fn sample(command: &str, subject: &Subject<Work>, numbers: [(&str, u64); 2]) -> Result<Outcome> {
    let (kind, page) = subject.work;
    let kind = child::word(&kind);
    let words = [command, "--kind", &kind].into_iter().chain(page.into_iter().flat_map(|page| ["--page", page.text]));
    let line = child::command_words(&words.collect::<Vec<_>>(), &numbers);
    child::run_plain(subject.name, line, TIME_LIMIT)
}

pub fn run_views(plan: &Plan<'_>, report: &mut Report) -> Result<Option<Finding>> {
    let subjects = plan.wanted(Part::Views, view_subjects(&plan.pages));
    child::touch_beforehand(2 * (LEN_BYTES >> 20) + 64)?;
    let run_ms = plan.common.quick_or_full(VIEWS_MS);
    let mut study = Study::new(report, |()| "fresh views of 100 MiB".to_owned());
    study.measure_by_round((&[()], plan.common.rounds()), &subjects, &metric_names(&VIEW_COLUMNS), |(), subject| {
        sample("__pageshift-fresh", subject, [("--len-bytes", LEN_BYTES), ("--run-ms", run_ms)])
    })?;
    let table = format!("fresh views of 100 MiB, a word of each 4 KiB is read: half the spread, times {MMAP}");
    study.rows(&(), &subjects, &table, &VIEW_COLUMNS);
    let [small, medium, large] = [SMALL, MEDIUM, LARGE].map(|text| Page::named(text).view);
    for (metric, bound, what) in
        [(HANDLER_FAULTS, 16.0, "times fewer faults than"), (TOUCH_PER_VIEW, 3.0, "as fast as")]
    {
        let target = format!("fresh view of 100 MiB, {medium}, {what} {small}");
        study.judge_time_ratio(target, Bound::AtLeast(bound), (&(), medium, metric.name), (&(), small, metric.name));
    }
    // Not against the faults of `small`, because one fault may map several neighbouring small pages.
    let target = format!("fresh view of 100 MiB, {large}, pages of 4 KiB for each fault");
    study.judge_value(target, (Bound::AtLeast(512.0), "pages"), (&(), large, SMALL_PAGES_PER_FAULT.name));
    let metric = (TOUCH_PER_VIEW, Better::Lower);
    Ok(Some(Finding::new("fresh views of resident files", (&study, &()), metric, &plan.pages, |page| page.view)))
}

pub fn run_touch(plan: &Plan<'_>, report: &mut Report) -> Result<Option<Finding>> {
    let subjects = plan.wanted(Part::Touch, touch_subjects(&plan.pages));
    let (mib, run_ms) = (plan.common.quick_or_full(TOUCH_MIB), plan.common.quick_or_full(TOUCH_MS));
    child::touch_beforehand(mib * 3 / 2 + 64)?;
    let mut study = Study::new(report, |mib: &u64| format!("random 8 bytes of {mib} MiB"));
    let metrics = metric_names(&TOUCH_COLUMNS);
    study.measure_by_round((&[mib], plan.common.rounds()), &subjects, &metrics, |mib, subject| {
        sample("__pageshift-touch", subject, [("--len-bytes", mib << 20), ("--run-ms", run_ms)])
    })?;
    let table = format!("random reads of 8 bytes of {mib} MiB of resident memory: half the spread, times {ANONYMOUS}");
    study.rows(&mib, &subjects, &table, &TOUCH_COLUMNS);
    let share = study.samples.get((&mib, ANONYMOUS, HUGE_SHARE)).and_then(Series::median);
    if share.is_some_and(|share| share < MIN_HUGE_SHARE) {
        study.report.add_gap(format!("{ANONYMOUS}: the kernel gave it too few huge pages: the baseline is too slow"));
    }
    for own in [Page::named(LARGE).view, VIEW_AUTO] {
        let target = format!("resident view, random 8 bytes, {own}, as fast as {ANONYMOUS}");
        let (own, base) = ((&mib, own, TOUCH_NS.name), (&mib, ANONYMOUS, TOUCH_NS.name));
        study.judge_time_ratio(target, Bound::AtLeast(0.95), own, base);
    }
    let metric = (TOUCH_NS, Better::Lower);
    Ok(Some(Finding::new("random reads of resident views", (&study, &mib), metric, &plan.pages, |page| page.view)))
}
