//! The recommendation at the end of the report, computed from the measured rows.

use super::page::Page;
use crate::experiment::{Metric, Study};
use crate::report::Series;
use crate::stats::Better;

/// A page size whose result is within this factor of the best one counts as equally good.
const TIE: f64 = 1.05;

/// A use of files or memory, with a result for each page size.
#[derive(Debug)]
pub struct Finding {
    /// The use, as the recommendation names it.
    pub what: &'static str,
    pub better: Better,
    /// The page sizes and their medians, in ascending order of the sizes.
    pub results: Vec<(&'static Page, f64)>,
}

impl Finding {
    /// Collects the medians of one metric. `name` returns the subject that stands for a page size.
    pub fn new<Case: Ord + Clone>(
        what: &'static str,
        (study, case): (&Study<'_, Case>, &Case),
        (metric, better): (Metric, Better),
        pages: &[&'static Page],
        name: fn(&Page) -> &'static str,
    ) -> Self {
        let median = |page: &Page| study.samples.get((case, name(page), metric.name)).and_then(Series::median);
        Self { what, better, results: pages.iter().filter_map(|page| Some((*page, median(page)?))).collect() }
    }

    /// Returns the smallest page size that is as good as the best, and how many times better it is than the smallest page
    /// size measured. `None` with fewer than two sizes.
    fn best(&self) -> Option<(&'static Page, f64)> {
        let gain = |value: f64, base: f64| match self.better {
            Better::Higher => value / base,
            Better::Lower => base / value,
        };
        let first = self.results.first().filter(|_| self.results.len() > 1)?.1;
        let gains = || self.results.iter().map(|(page, value)| (*page, gain(*value, first)));
        let best = gains().map(|(_, gain)| gain).fold(0.0, f64::max);
        gains().find(|(_, gain)| gain * TIE >= best)
    }
}

/// Returns a sentence that names the best page size for each use; `None` if no use was measured with two sizes.
pub fn sentence(findings: &[Finding]) -> Option<String> {
    let best: Vec<_> = findings.iter().filter_map(|finding| Some((finding, finding.best()?))).collect();
    let mut pages: Vec<&Page> = best.iter().map(|(_, (page, _))| *page).collect();
    pages.sort_by_key(|page| page.bytes());
    pages.dedup();
    let uses = |page: &Page| {
        let uses = best.iter().filter(|(_, (of, _))| *of == page).map(|(finding, (_, gain))| {
            let first = finding.results[0].0;
            match first == page {
                true => finding.what.to_owned(),
                false => format!("{} ({gain:.1}x of {})", finding.what, first.text),
            }
        });
        format!("{} for {}", page.text, uses.collect::<Vec<_>>().join(", "))
    };
    let all: Vec<String> = pages.into_iter().map(uses).collect();
    (!all.is_empty()).then(|| format!("use pages of {}", all.join("; of ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(what: &'static str, better: Better, results: &[(&str, f64)]) -> Finding {
        let results = results.iter().map(|(text, value)| (Page::named(text), *value)).collect();
        Finding { what, better, results }
    }

    /// The smallest page size within 5 % of the best must be recommended. A use with one page size must be left out.
    #[test]
    fn smallest_of_the_best_sizes_is_recommended() {
        let findings = [
            finding("views", Better::Lower, &[("4K", 90.0), ("64K", 10.0), ("2M", 9.8)]),
            finding("small files", Better::Lower, &[("4K", 1.2), ("64K", 7.0)]),
            finding("touches", Better::Lower, &[("4K", 30.0), ("64K", 10.0)]),
            finding("reads", Better::Higher, &[("2M", 7.0)]),
        ];
        let sentence = sentence(&findings).expect("three uses were measured");
        assert_eq!(sentence, "use pages of 4K for small files; of 64K for views (9.0x of 4K), touches (3.0x of 4K)");
        assert!(super::sentence(&findings[3..]).is_none());
    }
}
