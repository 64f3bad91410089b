//! Generates traces, which are sequences of page requests.
//!
//! A trace depends on its kind, on the number of pages (the footprint), for some kinds on the size of the cache, and on
//! a seed. Equal inputs give an equal trace.

use crate::stats::Random;

/// A Zipf distribution over pages. The pages are assigned to ranks in random order.
struct Zipf {
    sums: Vec<f64>,
    pages: Vec<u32>,
}

impl Zipf {
    fn new(pages: usize, exponent: f64, random: &mut Random) -> Self {
        let mut sum = 0.0;
        let weights = (1..=pages).map(|rank| (rank as f64).powf(-exponent));
        let sums = weights.map(|weight| {
            sum += weight;
            sum
        });
        let sums = sums.collect();
        let mut pages: Vec<u32> = (0..pages as u32).collect();
        for at in (1..pages.len()).rev() {
            pages.swap(at, random.below(at + 1));
        }
        Self { sums, pages }
    }

    fn draw(&self, random: &mut Random) -> u32 {
        let unit = (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let at = self.sums.partition_point(|sum| *sum < unit * self.sums[self.sums.len() - 1]);
        self.pages[at.min(self.pages.len() - 1)]
    }
}

/// The kinds of traces. A *footprint* is the number of distinct pages that a trace may request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Independent requests. The page of rank r has a frequency proportional to r^-x, where x is the exponent given.
    Zipf(f64),
    /// One half of the requests loop over a twentieth of the footprint; the other half scan the rest again and again.
    ScanLoop,
    /// A loop over more pages than the cache has room for, by one tenth.
    Loop,
    /// Nine of ten requests are for random pages of a working set, which is a twentieth of the footprint; the tenth is
    /// for any page. After ten requests for each page of the working set, half of it is replaced.
    Shift,
    /// Requests for random pages of a working set, which is a twentieth of the footprint. Every forty requests, one
    /// page of the set is replaced.
    Slide,
    /// A Zipf trace with exponent 1.0 on half of the footprint, interrupted by scans in the other half. Each scan
    /// covers a tenth of the footprint. One request in six belongs to a scan.
    Polluted,
    /// A Zipf trace with exponent 0.9. Each drawn page is requested one to four times more, within the next 63 draws.
    Bursts,
}

/// All kinds of traces with their names.
pub const KINDS: [(&str, Kind); 11] = [
    ("zipf-0.8", Kind::Zipf(0.8)),
    ("zipf-0.9", Kind::Zipf(0.9)),
    ("zipf-1.0", Kind::Zipf(1.0)),
    ("zipf-1.1", Kind::Zipf(1.1)),
    ("zipf-1.2", Kind::Zipf(1.2)),
    ("scan-loop", Kind::ScanLoop),
    ("loop", Kind::Loop),
    ("shift", Kind::Shift),
    ("slide", Kind::Slide),
    ("scan-zipf", Kind::Polluted),
    ("bursts", Kind::Bursts),
];

/// Makes a trace of `requests` page numbers below `pages`, for a cache with room for `size` pages.
pub fn trace(kind: Kind, pages: usize, size: usize, requests: usize, seed: u64) -> Vec<u32> {
    let random = &mut Random::new(seed);
    let set = pages / 20;
    let made: Vec<usize> = match kind {
        Kind::Zipf(exponent) => {
            let zipf = Zipf::new(pages, exponent, random);
            return (0..requests).map(|_| zipf.draw(random)).collect();
        }
        Kind::Polluted => return polluted(pages, requests, random),
        Kind::Bursts => return bursts(pages, requests, random),
        Kind::ScanLoop => {
            let (mut looped, mut scanned) = (0, 0);
            let mut next = |_| {
                if random.below(2) == 0 {
                    looped += 1;
                    looped % set
                } else {
                    scanned += 1;
                    set + scanned % (pages - set)
                }
            };
            (0..requests).map(&mut next).collect()
        }
        Kind::Loop => (0..requests).map(|at| at % (size + size / 10)).collect(),
        Kind::Shift => (0..requests)
            .map(|at| match random.below(10) {
                0 => random.below(pages),
                _ => (at / (10 * set) * (set / 2) + random.below(set)) % pages,
            })
            .collect(),
        Kind::Slide => (0..requests).map(|at| (at / 40 + random.below(set)) % pages).collect(),
    };
    made.into_iter().map(|page| page as u32).collect()
}

fn polluted(pages: usize, requests: usize, random: &mut Random) -> Vec<u32> {
    let half = pages / 2;
    let zipf = Zipf::new(half, 1.0, random);
    let (mut made, mut scanned) = (Vec::with_capacity(requests + pages), 0);
    while made.len() < requests {
        made.extend((0..half).map(|_| zipf.draw(random)));
        made.extend((scanned..scanned + pages / 10).map(|at| (half + at % half) as u32));
        scanned += pages / 10;
    }
    made.truncate(requests);
    made
}

fn bursts(pages: usize, requests: usize, random: &mut Random) -> Vec<u32> {
    const SOON: usize = 64;
    let zipf = Zipf::new(pages, 0.9, random);
    let mut due: [Vec<u32>; SOON] = std::array::from_fn(|_| Vec::new());
    let mut made = Vec::with_capacity(requests + SOON);
    let mut now = 0;
    while made.len() < requests {
        made.append(&mut due[now % SOON]);
        let page = zipf.draw(random);
        made.push(page);
        for _ in 0..=random.below(4) {
            due[(now + 1 + random.below(SOON - 1)) % SOON].push(page);
        }
        now += 1;
    }
    made.truncate(requests);
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each trace has the requested length, contains only pages of the footprint, and is the same for the same seed.
    #[test]
    fn traces_are_what_was_asked_for() {
        for (name, kind) in KINDS {
            let make = |seed| trace(kind, 2000, 200, 20_000, seed);
            let made = make(1);
            assert!(made.len() == 20_000 && made.iter().all(|page| *page < 2000), "{name}");
            assert!(made == make(1) && (kind == Kind::Loop || made != make(2)), "{name}");
        }
    }

    /// In a Zipf trace with exponent 1.0 on 2000 pages, one of 8.2 requests is for the most frequent page.
    #[test]
    fn zipf_has_its_shape() {
        let made = trace(Kind::Zipf(1.0), 2000, 0, 100_000, 1);
        let mut counts = vec![0; 2000];
        made.iter().for_each(|page| counts[*page as usize] += 1);
        let most = *counts.iter().max().unwrap_or(&0);
        assert!((11_500..13_000).contains(&most), "{most}");
    }
}
