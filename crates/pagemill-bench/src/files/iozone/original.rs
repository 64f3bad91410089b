//! The results that the original experiment published in 2013, as a table.

use crate::workload::iozone::Operation;

const TABLE: &str = include_str!("../../../data/iozone-2013.csv");

/// The parsed table of results. Each line has mode, operation, number of threads, KB/s of a kernel without the patches
/// for huge pages in the page cache, KB/s with these patches, and the ratio of the two speeds.
#[derive(Debug)]
pub struct PublishedResults {
    lines: Vec<Vec<&'static str>>,
}

/// Returns the name of an operation in the table of 2013.
pub fn published_name(operation: Operation) -> &'static str {
    match operation {
        Operation::InitialWrite => "initial writers",
        Operation::Rewrite => "rewriters",
        Operation::Read => "readers",
        Operation::Reread => "re-readers",
        Operation::ReverseRead => "reverse readers",
        Operation::RandomRead => "random readers",
        Operation::RandomWrite => "random writers",
    }
}

impl PublishedResults {
    pub fn load() -> Self {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#')).skip(1);
        Self { lines: lines.map(|line| line.split(',').collect()).collect() }
    }

    /// Returns the published speed in MiB/s of the kernel with the patches for huge pages in the page cache, and its
    /// ratio to the speed without these patches. Returns none if the table has no such cell.
    pub fn find(&self, mode: &str, operation: Operation, threads: u16) -> Option<(f64, f64)> {
        let key = [mode, published_name(operation), &threads.to_string()];
        let line = self.lines.iter().find(|line| line.len() == 6 && line[..3] == key)?;
        let patched: f64 = line[4].parse().ok()?;
        Some((patched / 1024.0, line[5].parse().ok()?))
    }

    /// Returns the published ratios of one operation by the number of threads.
    pub fn speedups(&self, mode: &str, operation: Operation) -> Vec<(f64, f64)> {
        let of_operation = self.lines.iter().filter(|line| line[..2] == [mode, published_name(operation)]);
        of_operation.filter_map(|line| Some((line[2].parse().ok()?, line[5].parse().ok()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All 210 cells of the published table (operations with a number of threads, in two modes) must be found. The
    /// ratio in each line must be the quotient of the two speeds in that line.
    #[test]
    fn all_published_cells_are_found() {
        let original = PublishedResults::load();
        let mut found = 0;
        for mode in ["mapped", "read/write"] {
            for threads in super::super::THREADS {
                found += Operation::ALL.iter().filter(|way| original.find(mode, **way, *threads).is_some()).count();
            }
        }
        assert_eq!((found, original.lines.len()), (210, 210));
        let speedups = original.speedups("mapped", Operation::InitialWrite);
        assert_eq!((speedups.len(), speedups[0], speedups[14]), (15, (1.0, 1.529), (200.0, 0.446)));
        for line in &original.lines {
            let [before, patched, ratio] = [3, 4, 5].map(|field| line[field].parse::<f64>().expect("a number"));
            assert!((patched / before - ratio).abs() < 0.001, "{line:?}");
        }
        assert!(original.find("mapped", Operation::Read, 3).is_none());
    }
}
