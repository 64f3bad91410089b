//! The columns of the table, and the order of its rows: sorted, as trees, filtered.

use super::rows::{Kind, Row};
use crate::columns::short_bytes;
use crate::statistics::{giveable_bytes, needed_bytes, resident_bytes};
use pagemill_core::stats::Counter;
use pagemill_sys::process::Identity;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    Pid,
    User,
    Name,
    Cpu,
    Kernel,
    Resident,
    Net,
    Giveable,
    Limit,
    Volatile,
    Purged,
    Returned,
    Why,
    Read,
    Written,
    Ahead,
    Huge,
    Slabs,
    History,
}

pub struct ColumnSpec {
    pub column: Column,
    pub title: &'static str,
    /// Width in characters. The name and the history get the rest of the line.
    pub width: u16,
    pub is_right_aligned: bool,
    /// A narrow terminal shows only columns of low rank.
    rank: u8,
    pub meaning: &'static str,
}

const fn spec(
    column: Column,
    title: &'static str,
    width: u16,
    is_right_aligned: bool,
    rank: u8,
    meaning: &'static str,
) -> ColumnSpec {
    ColumnSpec { column, title, width, is_right_aligned, rank, meaning }
}

/// All columns, in the order of the table.
pub const COLUMNS: [ColumnSpec; 19] = [
    spec(Column::Pid, "PID", 7, true, 0, "process id"),
    spec(Column::User, "USER", 6, true, 16, "id of the user"),
    spec(Column::Name, "NAME", 14, false, 0, "program; a `run` stands for its tree"),
    spec(Column::Cpu, "CPU%", 5, true, 3, "CPU time in percent of one CPU"),
    spec(Column::Kernel, "RSS", 5, true, 10, "resident as the kernel counts it, with files"),
    spec(Column::Resident, "RES", 5, true, 1, "resident on Pagemill"),
    spec(Column::Net, "NET", 5, true, 2, "resident without what could be returned at once"),
    spec(Column::Giveable, "GIVE", 5, true, 2, "could be returned at once"),
    spec(Column::Limit, "LIMIT", 5, true, 5, "limit of the tree (run --limit)"),
    spec(Column::Volatile, "VOLAT", 5, true, 8, "volatile ranges, and memory marked by address"),
    spec(Column::Purged, "PURGE", 5, true, 9, "purged of volatile memory so far"),
    spec(Column::Returned, "RET/s", 5, true, 4, "returned to the system each second"),
    spec(Column::Why, "WHY", 7, false, 6, "why memory was returned last"),
    spec(Column::Read, "READ/s", 6, true, 11, "read from the stores of cached files (misses)"),
    spec(Column::Written, "WRIT/s", 6, true, 12, "written to the stores of cached files"),
    spec(Column::Ahead, "AHD%", 4, true, 13, "part of the readahead that was used (hits)"),
    spec(Column::Huge, "HUGE%", 5, true, 14, "blocks and folios that got a huge page"),
    spec(Column::Slabs, "SLABS", 5, true, 15, "memory of slab caches, in use or free"),
    spec(Column::History, "HISTORY", 8, false, 7, "resident memory in the latest samples"),
];

/// Columns of a higher rank are shown only if the name gets [`NAME_RESERVE`] more characters.
const LAST_RANK_OF_SHORT_NAMES: u8 = 9;
const NAME_RESERVE: u16 = 18;

impl Column {
    pub fn spec(self) -> &'static ColumnSpec {
        &COLUMNS[self as usize]
    }

    /// Returns the columns that fit into a line of `width` characters, each with its width, in the order of the table.
    pub fn fitting(width: u16) -> Vec<(Self, u16)> {
        let mut by_rank: Vec<&ColumnSpec> = COLUMNS.iter().collect();
        by_rank.sort_by_key(|spec| spec.rank);
        let (mut shown, mut used) = (Vec::new(), 0);
        for spec in by_rank {
            let more = spec.width + u16::from(!shown.is_empty());
            // Long names are more useful than the columns of high rank.
            let reserved = if spec.rank > LAST_RANK_OF_SHORT_NAMES { NAME_RESERVE } else { 0 };
            if used + more + reserved > width && spec.rank > 0 {
                break;
            }
            used += more;
            shown.push(spec.column);
        }
        let rest = width.saturating_sub(used);
        let for_history = if shown.contains(&Self::History) { rest / 3 } else { 0 };
        let more = |column: Self| match column {
            Self::Name => rest - for_history,
            Self::History => for_history,
            _ => 0,
        };
        let shown = COLUMNS.iter().filter(|spec| shown.contains(&spec.column));
        shown.map(|spec| (spec.column, spec.width + more(spec.column))).collect()
    }

    /// Returns the number by which rows are sorted, or `None` for a column of words. Percentages count in hundredths.
    pub fn number(self, row: &Row) -> Option<u64> {
        let of = |counter: Counter| row.figures.get(counter);
        let of_rates = |value: fn(&super::rows::Rates) -> u64| row.rates.as_ref().map_or(0, value);
        Some(match self {
            Self::Name | Self::Why => return None,
            Self::Pid => row.identity.pid.into(),
            Self::User => row.user.into(),
            Self::Cpu => of_rates(|rates| (rates.cpu_percent * 100.0) as u64),
            Self::Kernel => row.kernel_bytes,
            Self::Resident | Self::History => resident_bytes(&row.figures),
            Self::Net => needed_bytes(&row.figures),
            Self::Giveable => giveable_bytes(&row.figures).0,
            Self::Limit => row.limit.unwrap_or(0),
            Self::Volatile => of(Counter::RangesBytes).saturating_add(of(Counter::MarkedBytes)),
            Self::Purged => of(Counter::RangeBytesPurged),
            Self::Returned => of_rates(|rates| rates.returned),
            Self::Read => of_rates(|rates| rates.read),
            Self::Written => of_rates(|rates| rates.written),
            Self::Ahead => share(of(Counter::ReadAheadUsed), of(Counter::ReadAheadUnused)).unwrap_or(0),
            Self::Huge => huge_share(row).unwrap_or(0),
            Self::Slabs => of(Counter::SlabBlocks).saturating_mul(pagemill_core::units::BLOCK_BYTES as u64),
        })
    }

    /// Returns the text of a cell; `-` for a figure that a row does not have. The history is drawn separately.
    pub fn text(self, row: &Row) -> String {
        let number = self.number(row).unwrap_or(0);
        let has_figures = row.kind != Kind::Small;
        let percent = |share: Option<u64>| share.map_or_else(|| "-".to_owned(), |share| (share / 100).to_string());
        let of = |counter: Counter| row.figures.get(counter);
        match self {
            Self::Name => row.name.clone(),
            Self::Why => row.cause.map_or_else(|| "-".to_owned(), |cause| cause.word.to_owned()),
            Self::History => String::new(),
            Self::Pid | Self::User => number.to_string(),
            Self::Cpu => row.rates.as_ref().map_or_else(|| "-".to_owned(), |rates| format!("{:.1}", rates.cpu_percent)),
            Self::Kernel => short_bytes(number),
            Self::Limit if row.limit.is_some() => short_bytes(number),
            Self::Limit => "-".to_owned(),
            Self::Returned | Self::Read | Self::Written if row.rates.is_none() => "-".to_owned(),
            Self::Ahead => percent(share(of(Counter::ReadAheadUsed), of(Counter::ReadAheadUnused))),
            Self::Huge => percent(huge_share(row)),
            _ if has_figures => short_bytes(number),
            _ => "-".to_owned(),
        }
    }
}

impl FromStr for Column {
    type Err = String;

    /// Parses the title of a column, in upper or lower case, with or without `%` and `/s`.
    fn from_str(text: &str) -> Result<Self, String> {
        let plain = |title: &str| title.trim_end_matches("/s").trim_end_matches('%').to_lowercase();
        let found = COLUMNS.iter().find(|spec| plain(spec.title) == plain(text));
        found.map(|spec| spec.column).ok_or_else(|| {
            let titles: Vec<String> = COLUMNS.iter().map(|spec| plain(spec.title)).collect();
            format!("'{text}' is not a column: expected one of {}", titles.join(", "))
        })
    }
}

/// Returns `part` of `part + rest` in hundredths of a percent; `None` if both are 0.
fn share(part: u64, rest: u64) -> Option<u64> {
    let whole = u128::from(part) + u128::from(rest);
    (whole > 0).then(|| (u128::from(part) * 10_000 / whole) as u64)
}

/// Returns the share of blocks and of large folios that got a huge page, in hundredths of a percent.
fn huge_share(row: &Row) -> Option<u64> {
    let sum = |one: Counter, other: Counter| row.figures.get(one).saturating_add(row.figures.get(other));
    share(sum(Counter::BlocksHuge, Counter::HugeAllocated), sum(Counter::BlocksFallback, Counter::HugeFallback))
}

/// How the rows are ordered and selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrangement {
    pub sort: Column,
    /// Whether the order is the opposite of the usual one: largest first, and words in alphabetical order.
    pub is_reversed: bool,
    /// Whether the processes of a `run` follow it, each below its parent.
    pub is_tree: bool,
    /// Only rows whose name or process id contains this text are shown, with all processes of a `run` that is shown.
    pub filter: String,
}

impl Arrangement {
    fn compare(&self, one: &Row, other: &Row) -> Ordering {
        let order = match (self.sort, self.sort.number(one), self.sort.number(other)) {
            (Column::Pid | Column::User, one, other) => one.cmp(&other),
            (_, Some(one), Some(other)) => other.cmp(&one),
            _ => self.sort.text(one).to_lowercase().cmp(&self.sort.text(other).to_lowercase()),
        };
        let order = if self.is_reversed { order.reverse() } else { order };
        // Rows with equal values keep their places from one sample to the next.
        order.then(one.identity.cmp(&other.identity))
    }

    fn matches(&self, row: &Row) -> bool {
        let text = self.filter.to_lowercase();
        row.name.to_lowercase().contains(&text) || row.identity.pid.to_string().contains(&text)
    }

    /// Returns the rows to show, as indices in `rows`, each with its depth in the tree.
    pub fn arrange(&self, rows: &[Row]) -> Vec<(usize, usize)> {
        if self.is_tree { self.arrange_trees(rows) } else { self.arrange_flat(rows) }
    }

    fn arrange_flat(&self, rows: &[Row]) -> Vec<(usize, usize)> {
        // A `run` is the sum of other rows.
        let processes = (0..rows.len()).filter(|at| rows[*at].kind != Kind::Run && self.matches(&rows[*at]));
        let mut shown: Vec<usize> = processes.collect();
        shown.sort_by(|one, other| self.compare(&rows[*one], &rows[*other]));
        shown.into_iter().map(|at| (at, 0)).collect()
    }

    fn arrange_trees(&self, rows: &[Row]) -> Vec<(usize, usize)> {
        let index: HashMap<Identity, usize> = rows.iter().enumerate().map(|(at, row)| (row.identity, at)).collect();
        let by_pid: HashMap<u32, usize> = rows.iter().enumerate().map(|(at, row)| (row.identity.pid, at)).collect();
        let parent_of = |row: &Row| -> Option<usize> {
            let run = *index.get(&row.run?)?;
            // The parent is shown only if it belongs to the same tree.
            let parent = by_pid.get(&row.parent_pid).filter(|parent| rows[**parent].run == row.run);
            Some(parent.copied().unwrap_or(run))
        };
        let mut children: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
        for (at, row) in rows.iter().enumerate() {
            children.entry(parent_of(row)).or_default().push(at);
        }
        for siblings in children.values_mut() {
            siblings.sort_by(|one, other| self.compare(&rows[*one], &rows[*other]));
        }
        let mut shown = Vec::new();
        for root in children.get(&None).into_iter().flatten() {
            let mut tree = Vec::new();
            let is_whole = self.matches(&rows[*root]);
            self.add_subtree(rows, &children, (*root, 0), is_whole, &mut tree);
            shown.append(&mut tree);
        }
        shown
    }

    /// Adds a row and the rows below it to `shown`. Returns whether one of them matches the filter; if not, adds nothing
    /// unless `is_whole`.
    fn add_subtree(
        &self,
        rows: &[Row],
        children: &BTreeMap<Option<usize>, Vec<usize>>,
        (at, depth): (usize, usize),
        is_whole: bool,
        shown: &mut Vec<(usize, usize)>,
    ) -> bool {
        let place = shown.len();
        shown.push((at, depth));
        let mut is_shown = is_whole || self.matches(&rows[at]);
        for child in children.get(&Some(at)).into_iter().flatten() {
            is_shown |= self.add_subtree(rows, children, (*child, depth + 1), is_whole, shown);
        }
        if !is_shown {
            shown.truncate(place);
        }
        is_shown
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use pagemill_core::stats::Snapshot;

    /// Returns a row of a process with this much memory of slots.
    pub fn row(pid: u32, name: &str, run: Option<u32>, parent_pid: u32, mib: u64) -> Row {
        let identity = |pid| Identity { pid, start_ticks: 1 };
        let mut figures = Snapshot::default();
        figures.set(Counter::Heap, mib << 20);
        figures.set(Counter::Resident, mib << 20);
        Row {
            kind: if name.starts_with("run ") { Kind::Run } else { Kind::Process },
            identity: identity(pid),
            parent_pid,
            run: run.map(identity),
            user: 0,
            name: name.to_owned(),
            kernel_bytes: mib << 20,
            figures,
            limit: None,
            rates: None,
            cause: None,
            age: None,
            stale: None,
        }
    }

    fn rows() -> Vec<Row> {
        vec![
            row(10, "redis", None, 1, 50),
            row(20, "run make", None, 0, 30),
            row(21, "make", Some(20), 20, 5),
            row(22, "cc1", Some(20), 21, 10),
            row(23, "cc1plus", Some(20), 21, 15),
            row(30, "sqlite", None, 1, 70),
        ]
    }

    fn arranged(sort: Column, is_reversed: bool, is_tree: bool, filter: &str) -> Vec<(u32, usize)> {
        let arrangement = Arrangement { sort, is_reversed, is_tree, filter: filter.to_owned() };
        let rows = rows();
        arrangement.arrange(&rows).into_iter().map(|(at, depth)| (rows[at].identity.pid, depth)).collect()
    }

    /// In the tree, roots are sorted by their sums and children below each parent. The flat list has only processes.
    #[test]
    fn rows_are_sorted_as_trees_and_flat() {
        let tree = [(30, 0), (10, 0), (20, 0), (21, 1), (23, 2), (22, 2)];
        assert_eq!(arranged(Column::Resident, false, true, ""), tree);
        let reversed = [(20, 0), (21, 1), (22, 2), (23, 2), (10, 0), (30, 0)];
        assert_eq!(arranged(Column::Resident, true, true, ""), reversed);
        let pids = |rows: Vec<(u32, usize)>| rows.into_iter().map(|(pid, _)| pid).collect::<Vec<_>>();
        assert_eq!(pids(arranged(Column::Resident, false, false, "")), [30, 10, 23, 22, 21]);
        assert_eq!(pids(arranged(Column::Pid, false, false, "")), [10, 21, 22, 23, 30]);
        assert_eq!(pids(arranged(Column::Name, false, false, "")), [22, 23, 21, 10, 30]);
        assert_eq!(pids(arranged(Column::Name, true, false, "")), [30, 10, 21, 23, 22]);
    }

    /// A filter keeps the parents of a match, and the whole tree of a `run` that matches.
    #[test]
    fn a_filter_keeps_parents() {
        assert_eq!(arranged(Column::Pid, false, true, "CC1P"), [(20, 0), (21, 1), (23, 2)]);
        assert_eq!(arranged(Column::Pid, false, true, "run"), [(20, 0), (21, 1), (22, 2), (23, 2)]);
        assert_eq!(arranged(Column::Pid, false, false, "2"), [(21, 0), (22, 0), (23, 0)]);
        assert_eq!(arranged(Column::Pid, false, true, "none"), []);
    }

    /// The columns of a line must fit into it, and a wider line must show no fewer of them.
    #[test]
    fn columns_fit_into_the_line() {
        let mut before = 0;
        for width in 22..300 {
            let columns = Column::fitting(width);
            let used: u16 = columns.iter().map(|(_, width)| width + 1).sum::<u16>() - 1;
            assert!(used <= width && columns.len() >= before, "{width}: {used}");
            before = columns.len();
        }
        assert_eq!(before, COLUMNS.len());
        let at_80: Vec<Column> = Column::fitting(80).into_iter().map(|(column, _)| column).collect();
        assert!([Column::Why, Column::Limit, Column::Returned].iter().all(|column| at_80.contains(column)));
        assert!(
            COLUMNS.iter().enumerate().all(|(at, spec)| spec.column as usize == at),
            "in the order of the variants"
        );
    }

    #[test]
    fn columns_are_named_by_their_titles() {
        assert_eq!(
            ("res".parse(), "RET/s".parse(), "cpu".parse()),
            (Ok(Column::Resident), Ok(Column::Returned), Ok(Column::Cpu))
        );
        assert!("x".parse::<Column>().unwrap_err().contains("expected one of pid, user, name, cpu"));
    }
}
