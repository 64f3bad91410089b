//! Speeds that the original experiment published in 2013, for reads from flash into hugetlbfs pages.

use crate::report::{Report, Row, TableCell};

const TABLE: &str = include_str!("../../../data/orion-2013.csv");

/// Adds the published table of 2013 to the report: the MB/s of several kernels, and the ratio to the speed of the
/// kernel without the patch that the publication proposed.
pub fn add_rows(report: &mut Report) {
    let mut lines = TABLE.lines().filter(|line| !line.starts_with('#')).map(|line| line.split(','));
    let kernels: Vec<&str> = lines.next().into_iter().flatten().skip(1).collect();
    for mut line in lines {
        let Some(case) = line.next() else { continue };
        let speeds: Vec<f64> = line.filter_map(|speed| speed.parse().ok()).collect();
        // The last two columns are v3.11-rc5 without the patch and v3.11-rc5 with the patch.
        let [.., before, _] = speeds[..] else { continue };
        for (kernel, speed) in kernels.iter().zip(&speeds) {
            let table = "the original, 2013: MB/s into hugetlbfs pages from flash, times v3.11-rc5".to_owned();
            report.add_row(Row {
                case: format!("original: {case}"),
                subject: format!("original-2013: {kernel}"),
                baseline: Some("original-2013: v3.11-rc5".to_owned()),
                ratio: Some(speed / before),
                cell: Some(TableCell { table, column: case.to_owned() }),
                ..report.single_value("mb_per_second", *speed, "MB/s")
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published table must have results of two transfer sizes on four kernels.
    #[test]
    fn published_table_is_complete() {
        let mut report = Report::new("orion", false);
        add_rows(&mut report);
        let lines: Vec<&str> = TABLE.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[2] == "1M read,8384,5629,6501,8371" && lines[3] == "64K read,7867,4576,4251,6510", "{lines:?}");
    }
}
