//! Generates traces, which are sequences of page requests.
//!
//! A trace depends on its kind, on the number of pages (the footprint), and on a seed. For some kinds it also depends
//! on the size of the cache. Equal inputs give an equal trace.

/// The random number generator SplitMix64. It is written here and not taken from a crate: a new version of a crate
/// could change the sequence of requests, and with it the hit ratios in docs/benchmarks-cache.md and docs/decisions.md.
///
/// Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014.
struct Random(u64);

impl Random {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a random number below `bound`.
    fn next_below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }
}

/// A Zipf distribution over pages. Each rank has a page, assigned at random.
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
            pages.swap(at, random.next_below(at + 1));
        }
        Self { sums, pages }
    }

    fn draw(&self, random: &mut Random) -> u32 {
        let unit = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let at = self.sums.partition_point(|sum| *sum < unit * self.sums[self.sums.len() - 1]);
        self.pages[at.min(self.pages.len() - 1)]
    }
}

/// The kinds of traces. The *footprint* is the number of distinct pages that a trace may request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TraceKind {
    /// Independent requests. The page of rank r has a frequency proportional to r^-x, where x is the exponent given.
    Zipf(f64),
    /// Half of the requests loop over a twentieth of the footprint. The other requests scan the rest of the footprint
    /// repeatedly.
    ScanLoop,
    /// A loop over one tenth more pages than the cache has room for.
    Loop,
    /// Nine of ten requests are for random pages of a working set, which is a twentieth of the footprint. The tenth is
    /// for any page. After ten times as many requests as the working set has pages, half of the working set is
    /// replaced.
    Shift,
    /// Requests for random pages of a working set, which is a twentieth of the footprint. Every forty requests, one
    /// page of the set is replaced.
    Slide,
    /// A Zipf trace with exponent 1.0 on half of the footprint, interrupted by scans of the other half. Each scan
    /// covers a tenth of the footprint. One request in six belongs to a scan.
    ZipfWithScans,
    /// A Zipf trace with exponent 0.9. Each drawn page is requested one to four more times within the next 63 draws.
    Bursts,
}

pub const KINDS: [(&str, TraceKind); 11] = [
    ("zipf-0.8", TraceKind::Zipf(0.8)),
    ("zipf-0.9", TraceKind::Zipf(0.9)),
    ("zipf-1.0", TraceKind::Zipf(1.0)),
    ("zipf-1.1", TraceKind::Zipf(1.1)),
    ("zipf-1.2", TraceKind::Zipf(1.2)),
    ("scan-loop", TraceKind::ScanLoop),
    ("loop", TraceKind::Loop),
    ("shift", TraceKind::Shift),
    ("slide", TraceKind::Slide),
    ("scan-zipf", TraceKind::ZipfWithScans),
    ("bursts", TraceKind::Bursts),
];

/// Makes a trace of `requests` requests for page numbers below `pages`. Some kinds of traces depend on `size`, the
/// number of pages for which the cache has room.
pub fn trace(kind: TraceKind, pages: usize, size: usize, requests: usize, seed: u64) -> Vec<u32> {
    let random = &mut Random(seed);
    let set = pages / 20;
    let requested: Vec<usize> = match kind {
        TraceKind::Zipf(exponent) => {
            let zipf = Zipf::new(pages, exponent, random);
            return (0..requests).map(|_| zipf.draw(random)).collect();
        }
        TraceKind::ZipfWithScans => return zipf_with_scans(pages, requests, random),
        TraceKind::Bursts => return bursts(pages, requests, random),
        TraceKind::ScanLoop => {
            let (mut looped, mut scanned) = (0, 0);
            let mut next = |_| {
                if random.next_below(2) == 0 {
                    looped += 1;
                    looped % set
                } else {
                    scanned += 1;
                    set + scanned % (pages - set)
                }
            };
            (0..requests).map(&mut next).collect()
        }
        TraceKind::Loop => (0..requests).map(|at| at % (size + size / 10)).collect(),
        TraceKind::Shift => (0..requests)
            .map(|at| match random.next_below(10) {
                0 => random.next_below(pages),
                _ => (at / (10 * set) * (set / 2) + random.next_below(set)) % pages,
            })
            .collect(),
        TraceKind::Slide => (0..requests).map(|at| (at / 40 + random.next_below(set)) % pages).collect(),
    };
    requested.into_iter().map(|page| page as u32).collect()
}

fn zipf_with_scans(pages: usize, requests: usize, random: &mut Random) -> Vec<u32> {
    let half = pages / 2;
    let zipf = Zipf::new(half, 1.0, random);
    let (mut requested, mut scanned) = (Vec::with_capacity(requests + pages), 0);
    while requested.len() < requests {
        requested.extend((0..half).map(|_| zipf.draw(random)));
        requested.extend((scanned..scanned + pages / 10).map(|at| (half + at % half) as u32));
        scanned += pages / 10;
    }
    requested.truncate(requests);
    requested
}

fn bursts(pages: usize, requests: usize, random: &mut Random) -> Vec<u32> {
    const RING_LEN: usize = 64;
    let zipf = Zipf::new(pages, 0.9, random);
    let mut later: [Vec<u32>; RING_LEN] = std::array::from_fn(|_| Vec::new());
    let mut requested = Vec::with_capacity(requests + RING_LEN);
    let mut now = 0;
    while requested.len() < requests {
        requested.append(&mut later[now % RING_LEN]);
        let page = zipf.draw(random);
        requested.push(page);
        for _ in 0..=random.next_below(4) {
            later[(now + 1 + random.next_below(RING_LEN - 1)) % RING_LEN].push(page);
        }
        now += 1;
    }
    requested.truncate(requests);
    requested
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each trace must have the requested length and contain only pages of the footprint. The same seed must give the
    /// same trace.
    #[test]
    fn trace_has_requested_length_and_footprint() {
        for (name, kind) in KINDS {
            let make = |seed| trace(kind, 2000, 200, 20_000, seed);
            let requested = make(1);
            assert!(requested.len() == 20_000 && requested.iter().all(|page| *page < 2000), "{name}");
            assert!(requested == make(1) && (kind == TraceKind::Loop || requested != make(2)), "{name}");
        }
    }

    /// In a Zipf trace with exponent 1.0 on 2000 pages, one of 8.2 requests must be for the most frequent page.
    #[test]
    fn most_frequent_zipf_page_has_expected_share() {
        let requested = trace(TraceKind::Zipf(1.0), 2000, 0, 100_000, 1);
        let mut counts = vec![0; 2000];
        requested.iter().for_each(|page| counts[*page as usize] += 1);
        let most = *counts.iter().max().unwrap_or(&0);
        assert!((11_500..13_000).contains(&most), "{most}");
    }
}
