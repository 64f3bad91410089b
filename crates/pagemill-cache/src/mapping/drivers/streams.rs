//! Detects streams of reads in the accesses to a file, and computes what to read ahead for each. Does no I/O and takes
//! no lock.
//!
//! | stream | detected by | continues at |
//! |---|---|---|
//! | forward | three accesses, each beginning on the page where the previous one ended, or on the next page | the same page, or up to 16 pages further within the range to read ahead |
//! | backward | three accesses, each ending on the page where the previous one began, or on the page before | as forward |
//! | strided | four accesses at the same distance in bytes, which is more than a page | that distance further, or a multiple of it within the range to read ahead |
//!
//! An access that continues no stream begins a new one. Its stride is assumed to be the distance to the nearest other
//! access. So concurrent streams are distinguished from each other, and from random accesses between them. A *proposal*
//! is a range to read ahead. A stream makes proposals only as its accesses arrive, so the proposals stop when the
//! accesses stop. The first proposal is small. When accesses reach the latest proposal, the next one follows, twice as
//! large up to a bound.
//!
//! Source: Linux, mm/readahead.c (readahead windows that double, each started when the previous one is reached); stride
//! detection as in J. Fu, J. Patel and B. Janssens, "Stride directed prefetching in scalar processors", MICRO 1992.

use std::ops::Range;

/// Maximum number of detected streams of a file.
const MAX_STREAMS: usize = 8;
/// Number of entries of a file's table of streams. Some entries are single accesses that may become streams.
const TABLE_ENTRY_COUNT: usize = MAX_STREAMS + 4;

/// Number of accesses that must continue a stream before the stream makes its first proposal (a range to read ahead).
const CONFIRMING_ACCESSES: u32 = 2;

/// Maximum number of pages between two accesses of a sequential stream. Reads of pages that are in memory already are
/// not reported to this module, so they leave such gaps.
const MAX_SKIPPED_PAGES: u64 = 16;

/// A stream has ended after this many accesses that belong to other streams.
const MAX_IDLE_ACCESSES: u64 = 512;

/// Number of ranges in the first proposal of a strided stream.
const FIRST_RANGES: u64 = 4;
/// Maximum number of ranges in a proposal of a strided stream.
const MAX_RANGES_PER_PROPOSAL: u64 = 32;

/// Ranges to read ahead for one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Proposal {
    /// The first range, in bytes of the file.
    pub range: Range<u64>,
    /// Distance in bytes from each range to the next one.
    pub step: i64,
    /// Number of ranges.
    pub count: u64,
}

impl Proposal {
    /// Returns the proposed ranges, in bytes of the file.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let Self { range: Range { start, end }, step, count } = self.clone();
        let shifted = move |at: u64, nth: u64| at.wrapping_add_signed(step * nth as i64);
        (0..count).map(move |nth| shifted(start, nth)..shifted(end, nth))
    }
}

/// Parameters of readahead, which follow from the cache's settings and the caller's hints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Unit of reads in bytes: a page, or a huge folio.
    pub page_bytes: u64,
    /// Size of the first proposal, at least a page.
    pub first_bytes: u64,
    /// Size of the largest proposal, at least a page.
    pub most_bytes: u64,
    /// Whether the caller declared sequential reads. If so, the first access is enough for a proposal.
    pub is_eager: bool,
}

impl Rules {
    /// Returns the start of the page that contains byte `at`.
    fn page_start(&self, at: u64) -> u64 {
        at - at % self.page_bytes
    }

    /// Returns the first page boundary at or after byte `at`.
    fn page_end(&self, at: u64) -> u64 {
        at.next_multiple_of(self.page_bytes)
    }
}

/// Direction in which the accesses of a stream proceed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
    /// Each access begins at this distance in bytes from the previous one. The distance is larger than a page.
    Stride(i64),
    /// The stream has only one access so far.
    #[default]
    Unknown,
}

/// A stream, or an access that may become one. The default is an unused table entry.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Start of the byte range of the last access. The end is `end`.
    begin: u64,
    end: u64,
    direction: Direction,
    /// Number of accesses that continued the stream. A new stream first replaces streams that are not confirmed.
    continuations: u32,
    /// End of the ranges that were proposed so far: a page boundary, or the begin of the next range of a strided
    /// stream.
    ahead: u64,
    /// Size of the latest proposal, in bytes, or in ranges if the stream is strided.
    latest: u64,
    /// Size of the next proposal, in the unit of `latest`; 0 before the first one.
    next: u64,
    /// Number of accesses to the file up to the stream's last access; 0 if the table entry is unused.
    at: u64,
}

/// How an access relates to a stream.
enum AccessMatch {
    Continues(Direction),
    /// The access lies within the stream's last access, so its position says nothing about the direction of the stream.
    Inside,
}

impl Stream {
    /// Returns whether the table entry is used.
    fn is_present(&self) -> bool {
        self.at > 0
    }

    /// Returns whether so many accesses have continued the stream that it makes proposals.
    fn is_confirmed(&self) -> bool {
        self.continuations >= CONFIRMING_ACCESSES
    }

    /// Returns how an access relates to the stream, or `None` if the access does not belong to the stream.
    fn match_access(&self, access: &Range<u64>, rules: &Rules) -> Option<AccessMatch> {
        let (first, last) = (rules.page_start(access.start), rules.page_end(access.end));
        let (own_first, own_last) = (rules.page_start(self.begin), rules.page_end(self.end));
        let is_inside = first >= own_first && last <= own_last;
        let skip = (MAX_SKIPPED_PAGES * rules.page_bytes).max(2 * (access.end - access.start));
        match self.direction {
            Direction::Stride(step) if access.start != self.begin => {
                let distance = access.start.wrapping_sub(self.begin) as i64;
                let steps = if distance % step == 0 { distance / step } else { 0 };
                let most = if self.is_confirmed() { self.steps_ahead(step) } else { 1 };
                if (1..=most).contains(&steps) {
                    return Some(AccessMatch::Continues(self.direction));
                }
            }
            Direction::Forward if self.is_confirmed() => {
                let end = own_last.max(self.ahead).min(own_last + skip);
                return (own_first..=end).contains(&first).then_some(AccessMatch::Continues(Direction::Forward));
            }
            Direction::Backward if self.is_confirmed() => {
                let begin = own_first.min(self.ahead).max(own_first.saturating_sub(skip));
                return (begin..=own_last).contains(&last).then_some(AccessMatch::Continues(Direction::Backward));
            }
            _ => {}
        }
        if is_inside {
            Some(AccessMatch::Inside)
        } else if self.is_confirmed() {
            None
        } else if (own_first..=own_last).contains(&first) {
            Some(AccessMatch::Continues(Direction::Forward))
        } else if (own_first..=own_last).contains(&last) {
            Some(AccessMatch::Continues(Direction::Backward))
        } else {
            None
        }
    }

    /// Returns the number of strides from the last access to the next range that is not proposed yet.
    fn steps_ahead(&self, step: i64) -> i64 {
        ((self.ahead.wrapping_sub(self.begin) as i64) / step).max(1)
    }

    /// Records an access that continues the stream.
    fn continue_with(&mut self, direction: Direction, access: Range<u64>, at: u64) {
        // The stride of a new stream was a guess. Sequential pages are recognized from the second access on.
        self.continuations = if self.direction == direction { self.continuations + 1 } else { 1 };
        if self.continuations <= CONFIRMING_ACCESSES {
            (self.ahead, self.latest, self.next) = (access.start, 0, 0);
        }
        if self.direction == Direction::Forward && direction == Direction::Forward && self.is_confirmed() {
            self.begin = self.begin.max(access.start);
            self.end = self.end.max(access.end);
        } else {
            (self.begin, self.end) = (access.start, access.end);
        }
        (self.direction, self.at) = (direction, at);
    }

    /// Returns the ranges to read ahead now, if the accesses of the stream have reached its latest proposal.
    fn propose(&mut self, size_bytes: u64, rules: &Rules) -> Option<Proposal> {
        match self.direction {
            Direction::Forward => self.propose_forward(size_bytes, rules),
            Direction::Backward => self.propose_backward(rules),
            Direction::Stride(step) => self.propose_strided(step, size_bytes, rules),
            Direction::Unknown => None,
        }
    }

    /// Returns the size of the stream's next proposal in bytes, and doubles the size for the proposal after that.
    fn next_size_bytes(&mut self, rules: &Rules) -> u64 {
        if self.next == 0 {
            let wanted = if rules.is_eager { rules.most_bytes } else { 2 * (self.end - self.begin) };
            self.next = wanted.clamp(rules.first_bytes, rules.most_bytes);
        }
        self.latest = self.next;
        self.next = (2 * self.next).min(rules.most_bytes);
        self.latest
    }

    /// As [`Stream::propose`], for a forward stream.
    fn propose_forward(&mut self, size_bytes: u64, rules: &Rules) -> Option<Proposal> {
        let here = rules.page_end(self.end);
        self.ahead = self.ahead.max(here);
        if self.ahead - here > self.latest {
            return None;
        }
        let end = (self.ahead + self.next_size_bytes(rules)).next_multiple_of(rules.page_bytes);
        let range = self.ahead..end.min(rules.page_end(size_bytes));
        self.ahead = end;
        (range.start < range.end).then_some(Proposal { range, step: 0, count: 1 })
    }

    /// As [`Stream::propose`], for a backward stream.
    fn propose_backward(&mut self, rules: &Rules) -> Option<Proposal> {
        let here = rules.page_start(self.begin);
        self.ahead = self.ahead.min(here);
        if here - self.ahead > self.latest {
            return None;
        }
        let begin = self.ahead.saturating_sub(self.next_size_bytes(rules));
        let range = rules.page_start(begin)..self.ahead;
        self.ahead = range.start;
        (range.start < range.end).then_some(Proposal { range, step: 0, count: 1 })
    }

    /// As [`Stream::propose`], for a stream with stride `step`.
    fn propose_strided(&mut self, step: i64, size_bytes: u64, rules: &Rules) -> Option<Proposal> {
        let len_bytes = (self.end - self.begin).max(1);
        let steps = self.steps_ahead(step);
        if steps as u64 - 1 > self.latest {
            return None;
        }
        let most = (rules.most_bytes / rules.page_end(len_bytes)).min(MAX_RANGES_PER_PROPOSAL);
        self.latest = if self.next == 0 { FIRST_RANGES.min(most) } else { self.next };
        self.next = (2 * self.latest).min(most);
        let start = self.begin.checked_add_signed(step.checked_mul(steps)?)?;
        // Limits the number of ranges to those inside the file.
        let room = if step > 0 {
            size_bytes.saturating_sub(start).div_ceil(step as u64)
        } else {
            start / step.unsigned_abs() + 1
        };
        let count = self.latest.min(if start < size_bytes { room } else { 0 });
        self.ahead = start.wrapping_add_signed(step * count as i64);
        (count > 0).then_some(Proposal { range: start..start + len_bytes, step, count })
    }
}

/// The streams of reads of one file.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    entries: [Stream; TABLE_ENTRY_COUNT],
    /// Number of accesses so far.
    clock: u64,
}

impl Streams {
    /// Records an access: a read of bytes that were not in memory, or the first use of bytes that were read ahead.
    /// Returns the ranges to read ahead now.
    pub fn note(&mut self, access: Range<u64>, size_bytes: u64, rules: &Rules) -> Option<Proposal> {
        self.clock += 1;
        let clock = self.clock;
        let has_ended = |stream: &&mut Stream| clock - stream.at > MAX_IDLE_ACCESSES;
        self.entries.iter_mut().filter(has_ended).for_each(|stream| *stream = Stream::default());
        let fits = self.entries.iter().enumerate().filter(|(_, stream)| stream.is_present());
        let mut found: Option<(usize, AccessMatch)> = None;
        for (at, stream) in fits {
            match stream.match_access(&access, rules) {
                Some(fit) if stream.is_confirmed() => {
                    found = Some((at, fit));
                    break;
                }
                // An access that continues a stream is stronger evidence than an access that lies within a stream's
                // last access.
                Some(fit @ AccessMatch::Continues(_)) => found = Some((at, fit)),
                Some(fit) if found.is_none() => found = Some((at, fit)),
                _ => {}
            }
        }
        let at = match found {
            Some((at, AccessMatch::Inside)) => {
                self.entries[at].at = self.clock;
                return None;
            }
            Some((at, AccessMatch::Continues(direction))) => {
                self.entries[at].continue_with(direction, access, self.clock);
                at
            }
            None => self.begin(access, rules),
        };
        if self.entries[at].continuations == CONFIRMING_ACCESSES {
            self.drop_excess_stream(at);
        }
        let stream = &mut self.entries[at];
        if stream.is_confirmed() { stream.propose(size_bytes, rules) } else { None }
    }

    /// Begins a stream with one access. Returns its index in the table of streams.
    fn begin(&mut self, access: Range<u64>, rules: &Rules) -> usize {
        let used = self.entries.iter().filter(|stream| stream.is_present());
        let distances = used.map(|stream| access.start.wrapping_sub(stream.begin) as i64);
        let is_stride = |step: &i64| step.unsigned_abs() > rules.page_bytes;
        let nearest = distances.filter(is_stride).min_by_key(|step| step.unsigned_abs());
        let oldest = |stream: &(usize, &Stream)| (stream.1.is_confirmed(), stream.1.at);
        let at = self.entries.iter().enumerate().min_by_key(oldest).map_or(0, |(at, _)| at);
        let direction =
            if rules.is_eager { Direction::Forward } else { nearest.map_or(Direction::Unknown, Direction::Stride) };
        let continuations = if rules.is_eager { CONFIRMING_ACCESSES } else { 0 };
        self.entries[at] = Stream {
            begin: access.start,
            end: access.end,
            direction,
            continuations,
            at: self.clock,
            ..Stream::default()
        };
        at
    }

    /// Called when a stream was detected. If the file has too many streams now, drops the stream that was not accessed
    /// for the longest time.
    fn drop_excess_stream(&mut self, newest: usize) {
        let known = self.entries.iter().enumerate().filter(|(_, stream)| stream.is_confirmed());
        if known.clone().count() > MAX_STREAMS {
            let silent = known.filter(|(at, _)| *at != newest).min_by_key(|(_, stream)| stream.at);
            if let Some((at, _)) = silent {
                self.entries[at] = Stream::default();
            }
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const PAGE: u64 = 4096;
    const FILE_BYTES: u64 = 256 << 20;

    fn rules() -> Rules {
        Rules { page_bytes: PAGE, first_bytes: 32 * PAGE, most_bytes: 512 * PAGE, is_eager: false }
    }

    /// Simulates the reads of a file: its streams, and its pages in memory.
    struct SimulatedReader {
        streams: Streams,
        rules: Rules,
        /// Pages in memory.
        present: BTreeSet<u64>,
        /// Pages that were read ahead and not used yet.
        ahead: BTreeSet<u64>,
        misses: u64,
        proposals: Vec<Proposal>,
    }

    impl SimulatedReader {
        fn new(rules: Rules) -> Self {
            let (present, ahead) = Default::default();
            Self { streams: Streams::default(), rules, present, ahead, misses: 0, proposals: Vec::new() }
        }

        fn read(&mut self, offset: u64, len: u64) {
            for page in offset / PAGE..(offset + len).div_ceil(PAGE) {
                let is_new = self.present.insert(page);
                self.misses += u64::from(is_new);
                if !self.ahead.remove(&page) && !is_new {
                    continue;
                }
                let begin = offset.max(page * PAGE);
                let Some(proposal) = self.streams.note(begin..offset + len, FILE_BYTES, &self.rules) else { continue };
                for range in proposal.ranges() {
                    assert!(range.start < range.end && range.start < FILE_BYTES, "{proposal:?}");
                    for page in range.start / PAGE..range.end.div_ceil(PAGE) {
                        if self.present.insert(page) {
                            self.ahead.insert(page);
                        }
                    }
                }
                self.proposals.push(proposal);
            }
        }

        fn proposed_pages(&self) -> u64 {
            self.proposals
                .iter()
                .map(|proposal| (proposal.range.end - proposal.range.start).div_ceil(PAGE) * proposal.count)
                .sum()
        }
    }

    /// For sequential forward reads of any length, no page may be missed after three accesses. Proposals must double,
    /// and only few pages may be read ahead without use.
    #[test]
    fn forward_streams_are_read_ahead() {
        for len in [100, PAGE, 5000, 64 << 10] {
            let mut reader = SimulatedReader::new(rules());
            (0..(16 << 20) / len).for_each(|step| reader.read((1 << 20) + step * len, len));
            assert!(reader.misses <= 3 * len.div_ceil(PAGE) + 1, "{len}: {} misses", reader.misses);
            let lens: Vec<_> = reader.proposals.iter().map(|p| (p.range.end - p.range.start) / PAGE).collect();
            assert!(lens.starts_with(&[32, 64, 128, 256, 512, 512]), "{len}: {lens:?}");
            assert!(reader.ahead.len() <= 1024, "{} pages were read ahead in vain", reader.ahead.len());
        }
    }

    #[test]
    fn backward_streams_are_read_ahead_to_the_beginning() {
        for len in [100, PAGE, 64 << 10] {
            let mut reader = SimulatedReader::new(rules());
            (0..(16 << 20) / len).rev().for_each(|step| reader.read(step * len, len));
            assert!(reader.misses <= 3 * len.div_ceil(PAGE) + 1, "{len}: {} misses", reader.misses);
            assert_eq!(reader.ahead.len(), 0);
        }
    }

    /// Reads follow each other at a fixed distance, forward or backward. All but the first four must find their pages
    /// in memory. Few other pages may be read ahead.
    #[test]
    fn strided_streams_are_read_ahead() {
        for (step, len) in [(10_000, 100), (40_000, 9000), (1 << 20, PAGE), (-123_456, 8)] {
            let mut reader = SimulatedReader::new(rules());
            let begin = if step > 0 { 77 } else { FILE_BYTES - 5000 };
            (0..200).for_each(|nth| reader.read(begin.wrapping_add_signed(nth * step), len));
            assert!(reader.misses <= 4 * (len.div_ceil(PAGE) + 1), "{step}: {} misses", reader.misses);
            let most_pages = (200 + 2 * MAX_RANGES_PER_PROPOSAL) * (len.div_ceil(PAGE) + 1);
            assert!(reader.proposed_pages() <= most_pages, "{step}: {} pages", reader.proposed_pages());
        }
    }

    /// Streams of all kinds alternate, with random accesses between them. Each stream must still be detected.
    #[test]
    fn alternating_streams_are_distinguished() {
        let mut reader = SimulatedReader::new(rules());
        let mut random = random_offsets(1, 1 << 20);
        for nth in 0..400 {
            (0..3).for_each(|stream| reader.read((stream << 25) + nth * PAGE, PAGE));
            reader.read((4 << 25) - (nth + 1) * PAGE, PAGE);
            reader.read((5 << 25) + nth * 50_000, 100);
            if nth % 4 == 0 {
                reader.read((7 << 25) + random.next().unwrap(), 100);
            }
        }
        assert!(reader.misses < 5 * 5 + 100 + 20, "{} misses", reader.misses);
    }

    fn random_offsets(seed: u64, below: u64) -> impl Iterator<Item = u64> {
        std::iter::successors(Some(seed), |last| Some(last.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1)))
            .map(move |bits| (bits >> 20) % below)
    }

    /// Random accesses must cause no proposals. After the end of a stream, random accesses may cause at most one more
    /// proposal.
    #[test]
    fn random_accesses_cause_no_proposals() {
        for seed in 0..10 {
            let mut reader = SimulatedReader::new(rules());
            random_offsets(seed, FILE_BYTES).take(10_000).for_each(|offset| reader.read(offset, 4096 - offset % PAGE));
            assert_eq!(reader.proposals, [], "seed {seed}");
        }
        let mut reader = SimulatedReader::new(rules());
        (0..100).for_each(|page| reader.read(page * PAGE, PAGE));
        let before = reader.proposals.len();
        random_offsets(3, FILE_BYTES).take(10_000).for_each(|offset| reader.read(offset, 1));
        assert!(reader.proposals.len() <= before + 1, "{} more", reader.proposals.len() - before);
    }

    /// If the caller declared sequential reads, the first access must cause a proposal. Proposals of huge folios must
    /// cover whole folios.
    #[test]
    fn eager_and_huge_rules_are_followed() {
        let mut reader = SimulatedReader::new(Rules { is_eager: true, ..rules() });
        reader.read(5 * PAGE, 10);
        assert_eq!(reader.proposals, [Proposal { range: 6 * PAGE..518 * PAGE, step: 0, count: 1 }]);
        let mut streams = Streams::default();
        let page_bytes = 512 * PAGE;
        let huge = Rules { page_bytes, first_bytes: page_bytes, most_bytes: page_bytes, is_eager: false };
        // Only the first use of each folio is recorded.
        let mut proposals = (0..6).map(|nth| streams.note(nth * page_bytes..nth * page_bytes + 10, FILE_BYTES, &huge));
        assert!(proposals.next().unwrap().is_none() && proposals.next().unwrap().is_none());
        for nth in 2..6 {
            let range = (nth + 1) * page_bytes..(nth + 2) * page_bytes;
            assert_eq!(proposals.next().unwrap(), Some(Proposal { range, step: 0, count: 1 }));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// For any sequence of accesses, proposals must lie inside the file.
        #[test]
        fn proposals_lie_inside_the_file(
            steps in prop::collection::vec((0..6u64, 0..FILE_BYTES, 1..100_000u64), 1..300)
        ) {
            let mut reader = SimulatedReader::new(rules());
            let mut at = 0;
            for (kind, offset, len) in steps {
                at = match kind {
                    0 => offset,
                    1 | 2 => at + len,
                    3 => at.saturating_sub(len),
                    _ => at + 20_000,
                }.min(FILE_BYTES - 1);
                reader.read(at, len.min(FILE_BYTES - at));
            }
        }
    }
}
