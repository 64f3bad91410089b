//! The five ideas: what the original experiment found, what this run measured, and the best peer of this run.

use serde_json::{Value, json};

use crate::report::{Report, Row, format_number};
use crate::stats::Better;

/// An idea and the rows of a run that show it.
#[derive(Debug)]
struct Idea {
    title: &'static str,
    /// The original's result.
    original: &'static str,
    /// Where the original was published.
    source: &'static str,
    /// What the rows below measure.
    measured: &'static str,
    experiment: &'static str,
    /// Unit of the values, in words.
    unit: &'static str,
    /// Whether the name of a case belongs to the idea.
    has_case: fn(&str) -> bool,
    /// The metrics. With several cases or metrics, a subject has the geometric mean of its values.
    metrics: &'static [&'static str],
    better: Better,
    /// Pagemill's subjects, of which the best counts.
    own: &'static [&'static str],
    /// Subjects that stand for the original's own baseline, of which the best counts.
    baseline: &'static [&'static str],
    /// The other subjects, of which the best counts.
    peers: &'static [&'static str],
}

const IDEAS: &[Idea] = &[
    Idea {
        title: "huge pages in the page cache",
        original: "IOzone, mapped: up to 2.42x, mean 1.12x, down to 0.45x above 30 threads",
        source: "Transparent huge page cache v4, May 2013",
        measured: "iozone, mapped, mean of all operations and threads",
        experiment: "iozone",
        unit: "MiB/s",
        has_case: |case| case.starts_with("mapped"),
        metrics: &["initial_write", "rewrite", "read", "reread", "reverse_read", "random_read", "random_write"],
        better: Better::Higher,
        own: &["pagemill"],
        baseline: &["tmpfs-never"],
        peers: &["tmpfs-always", "tmpfs-within-size", "tmpfs-never"],
    },
    Idea {
        title: "volatile ranges",
        original: "ebizzy on jemalloc: 52,389 to 203,414 records/s, 3.9x",
        source: "vrange for anonymous page v7, March 2013",
        measured: "ebizzy, 2 threads; the baseline returns memory at once, as the original's did",
        experiment: "ebizzy",
        unit: "records/s",
        has_case: |case| case == "256 KiB, 2 threads",
        metrics: &["records_per_second"],
        better: Better::Higher,
        own: &["pagemill"],
        baseline: &["jemalloc-eager", "glibc-eager", "mimalloc-eager", "tcmalloc-eager"],
        peers: &["glibc", "jemalloc", "mimalloc", "tcmalloc"],
    },
    Idea {
        title: "cheap page references for direct I/O",
        original: "1 MiB reads: 6501 to 8371 MB/s, 77.5 % to 99.8 % of the rate before huge pages",
        source: "Fix aio performance regression for database caused by THP, August 2013",
        measured: "orion, random reads of 1 MiB, processor time for each",
        experiment: "orion",
        unit: "us of CPU time",
        has_case: |case| case.starts_with("1 MiB random reads"),
        metrics: &["cpu_us"],
        better: Better::Lower,
        own: &["cache"],
        baseline: &["ring-4-KiB-pages"],
        peers: &["fio-libaio", "fio-io_uring", "fio-io_uring-fixed", "fio-io_uring-fixed-huge"],
    },
    Idea {
        title: "slabs with movable objects",
        original: "`find` with movable dentries: 30.6 s, without 29.8 s (0.97x); memory was not published",
        source: "Slab Movable Objects v3, April 2019",
        measured: "slab, objects of 192 B, nine tenths freed: memory left, times the live objects",
        experiment: "slab",
        unit: "x of the live objects",
        has_case: |case| case.ends_with("objects of 192 B"),
        metrics: &["left_ratio"],
        better: Better::Lower,
        own: &["by-owner", "by-handle"],
        baseline: &["fixed"],
        peers: &["glibc", "jemalloc", "mimalloc", "tcmalloc", "mesh"],
    },
    Idea {
        title: "a software page size",
        original: "reading 100 MiB of a cached file: 109,722 us with 4 KiB, 108,703 us with 8 KiB (1.01x)",
        source: "CONFIG_PAGE_SHIFT, July 2007",
        measured: "pageshift, the same test",
        experiment: "pageshift",
        unit: "us",
        has_case: |case| case == "100 MiB",
        metrics: &["again_us"],
        better: Better::Lower,
        own: &["cache-8K", "cache-16K", "cache-64K", "cache-256K", "cache-1M", "cache-2M", "cache-8M"],
        baseline: &["cache-4K"],
        peers: &["kernel"],
    },
];

/// An idea with the results of a run, as texts.
#[derive(Clone, Debug)]
pub struct IdeaResult {
    pub title: &'static str,
    pub original: &'static str,
    pub source: &'static str,
    pub measured: &'static str,
    pub experiment: &'static str,
    pub ours: Option<Figure>,
    /// The subject that stands for the original's baseline.
    pub baseline: Option<Figure>,
    pub peer: Option<Figure>,
    unit: &'static str,
    better: Better,
}

/// The value of a subject.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    pub subject: &'static str,
    pub value: f64,
}

impl IdeaResult {
    /// Collects the results of all ideas from the reports of a run.
    pub fn all(reports: &[&Report]) -> Vec<Self> {
        IDEAS.iter().map(|idea| Self::of_idea(idea, reports)).collect()
    }

    fn of_idea(idea: &Idea, reports: &[&Report]) -> Self {
        let of_experiment = reports.iter().filter(|report| report.experiment() == idea.experiment);
        let rows = of_experiment.flat_map(|report| report.rows());
        let is_of_idea = |row: &&Row| (idea.has_case)(&row.case) && idea.metrics.contains(&row.metric);
        let rows: Vec<&Row> = rows.filter(is_of_idea).collect();
        let best = |subjects: &'static [&'static str]| best_of(&rows, subjects, idea.better);
        Self {
            title: idea.title,
            original: idea.original,
            source: idea.source,
            measured: idea.measured,
            experiment: idea.experiment,
            ours: best(idea.own),
            baseline: best(idea.baseline),
            peer: best(idea.peers),
            unit: idea.unit,
            better: idea.better,
        }
    }

    /// Returns how many times better Pagemill is than another subject.
    pub fn ratio_to(&self, other: Option<&Figure>) -> Option<f64> {
        let (ours, other) = (self.ours.as_ref()?.value, other?.value);
        Some(match self.better {
            Better::Higher => ours / other,
            Better::Lower => other / ours,
        })
    }

    /// Describes Pagemill's result and its ratio to the original's kind of baseline.
    pub fn ours_text(&self) -> String {
        let Some(ours) = &self.ours else { return self.missing_text() };
        let figure = self.figure_text(ours);
        match (&self.baseline, self.ratio_to(self.baseline.as_ref())) {
            (Some(baseline), Some(ratio)) => format!("{figure}; {ratio:.2}x as good as {}", baseline.subject),
            _ => figure,
        }
    }

    /// Describes Pagemill's result.
    pub fn own_figure_text(&self) -> String {
        self.ours.as_ref().map_or_else(|| self.missing_text(), |ours| self.figure_text(ours))
    }

    /// Describes the best peer, and how many times better Pagemill is.
    pub fn peer_text(&self) -> String {
        let Some(peer) = &self.peer else { return self.missing_text() };
        match self.ratio_to(Some(peer)) {
            Some(ratio) => format!("{}; Pagemill is {ratio:.2}x as good", self.figure_text(peer)),
            None => self.figure_text(peer),
        }
    }

    fn missing_text(&self) -> String {
        format!("not measured by {} in this run", self.experiment)
    }

    fn figure_text(&self, figure: &Figure) -> String {
        format!("{}: {} {}", figure.subject, format_number(figure.value), self.unit)
    }

    /// Returns the result as a JSON row of the kind `idea`.
    pub fn json_row(&self) -> Value {
        let figure = |figure: &Option<Figure>| {
            figure.as_ref().map(|figure| json!({"subject": figure.subject, "value": figure.value}))
        };
        json!({"kind": "idea", "idea": self.title, "original": self.original, "source": self.source,
            "measured": self.measured, "experiment": self.experiment, "unit": self.unit, "ours": figure(&self.ours),
            "baseline": figure(&self.baseline), "times_baseline": self.ratio_to(self.baseline.as_ref()),
            "peer": figure(&self.peer), "times_peer": self.ratio_to(self.peer.as_ref())})
    }
}

/// Returns the best of the subjects that have a value in every case and metric. A subject with fewer values than others
/// was killed or failed somewhere.
fn best_of(rows: &[&Row], subjects: &'static [&'static str], better: Better) -> Option<Figure> {
    let cells_of = |subject: &str| {
        let mut cells: Vec<_> = rows.iter().filter(|row| row.subject == subject).collect();
        // A row can occur several times with different baselines.
        cells.sort_by_key(|row| (&row.case, row.metric));
        cells.dedup_by_key(|row| (&row.case, row.metric));
        cells
    };
    let most = rows.iter().map(|row| cells_of(&row.subject).len()).max()?;
    let figures = subjects.iter().filter_map(|subject| {
        let cells = cells_of(subject);
        let logs: f64 = cells.iter().map(|row| row.value.ln()).sum();
        (cells.len() == most).then(|| Figure { subject, value: (logs / most as f64).exp() })
    });
    match better {
        Better::Higher => figures.max_by(|a, b| a.value.total_cmp(&b.value)),
        Better::Lower => figures.min_by(|a, b| a.value.total_cmp(&b.value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rows: &[(&str, &str, f64)]) -> Report {
        let mut report = Report::new("iozone", false);
        for (case, subject, value) in rows {
            let single = report.single_value("read", *value, "MiB/s");
            report.add_row(Row { case: (*case).to_owned(), subject: (*subject).to_owned(), ..single });
        }
        report
    }

    /// The result must be the geometric mean over the cases of the idea. A subject without a value in one of the cases
    /// must not be the best peer. Ideas without rows must say that they were not measured.
    #[test]
    fn results_are_means_over_all_cases() {
        let rows = [
            ("mapped, 1 thread", "pagemill", 10.01),
            ("mapped, 2 threads", "pagemill", 40.0),
            ("mapped, 1 thread", "tmpfs-never", 4.01),
            ("mapped, 2 threads", "tmpfs-never", 16.0),
            ("mapped, 1 thread", "tmpfs-always", 900.0),
            ("read/write, 1 thread", "pagemill", 9999.0),
        ];

        let ideas = IdeaResult::all(&[&report(&rows)]);

        let idea = &ideas[0];
        assert!(idea.ours.as_ref().is_some_and(|ours| (ours.value - 20.01).abs() < 0.01), "{idea:?}");
        assert_eq!(idea.ours_text(), "pagemill: 20.0 MiB/s; 2.50x as good as tmpfs-never");
        assert_eq!(idea.peer_text(), "tmpfs-never: 8.01 MiB/s; Pagemill is 2.50x as good");
        assert_eq!(idea.json_row()["times_peer"].as_f64().map(|ratio| (ratio * 10.0).round()), Some(25.0));
        assert!(
            ideas[1..]
                .iter()
                .all(|idea| idea.ours_text().starts_with("not measured by ") && idea.json_row()["ours"].is_null())
        );
    }

    /// The texts of the originals must agree with the published tables.
    #[test]
    fn originals_agree_with_the_published_tables() {
        let table = include_str!("../data/iozone-2013.csv");
        let mapped = table.lines().filter(|line| line.starts_with("mapped,"));
        let ratios: Vec<f64> =
            mapped.map(|line| line.rsplit(',').next().expect("a field").parse().expect("a number")).collect();
        let largest = ratios.iter().copied().fold(0.0, f64::max);
        let smallest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let text = format!("up to {largest:.2}x, mean {mean:.2}x, down to {smallest:.2}x");
        assert!(IDEAS[0].original.contains(&text), "{text}");
        let orion = include_str!("../data/orion-2013.csv");
        assert!(orion.contains("1M read,8384,5629,6501,8371") && IDEAS[2].original.contains("6501 to 8371 MB/s"));
    }
}
