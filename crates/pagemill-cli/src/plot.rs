//! Plots of bytes over time in characters of a terminal.

/// Characters of a bar, from an eighth of a line to a whole line.
const EIGHTHS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns at most `width` values: for each column the largest of its values. Values for fewer columns than `width` are
/// returned unchanged.
pub fn merged(values: &[u64], width: usize) -> Vec<u64> {
    if values.len() <= width {
        return values.to_vec();
    }
    let part = |column: usize| &values[column * values.len() / width..(column + 1) * values.len() / width];
    (0..width).map(|column| part(column).iter().copied().max().unwrap_or(0)).collect()
}

/// Returns exactly `width` values. Columns between two values repeat the earlier one.
pub fn stretched(values: &[u64], width: usize) -> Vec<u64> {
    if values.is_empty() || values.len() > width {
        return merged(values, width);
    }
    (0..width).map(|column| values[column * values.len() / width]).collect()
}

/// Returns the number of eighths of a line that a bar for `value` has, in a plot of `lines` lines whose top is `max`. A
/// value above 0 has at least one eighth.
fn eighths(value: u64, max: u64, lines: usize) -> usize {
    let scaled = u128::from(value.min(max)) * (8 * lines as u128) / u128::from(max.max(1));
    (scaled as usize).max(usize::from(value > 0))
}

/// Returns a plot of one line, with a bar for each of the latest `width` values.
pub fn spark(values: &[u64], width: usize) -> String {
    let latest = &values[values.len().saturating_sub(width)..];
    let max = latest.iter().copied().max().unwrap_or(0);
    bars(latest, max, 1).remove(0)
}

/// Returns a plot with a bar for each value, as lines from the top down. The top of the plot is `max`.
pub fn bars(values: &[u64], max: u64, lines: usize) -> Vec<String> {
    let heights: Vec<usize> = values.iter().map(|value| eighths(*value, max, lines)).collect();
    let letter = |height: usize, below: usize| match height.saturating_sub(8 * below) {
        0 => ' ',
        eighths => EIGHTHS[eighths.min(8) - 1],
    };
    (0..lines).rev().map(|below| heights.iter().map(|height| letter(*height, below)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bars have heights in proportion to their values. The largest value fills the plot, a value above 0 is visible, a
    /// value above the top is cut off.
    #[test]
    fn bars_are_proportional() {
        assert_eq!(bars(&[0, 1, 50, 100, 200], 100, 2), ["   ██", " ▁███"]);
        assert_eq!(bars(&[], 0, 1), [""]);
        assert_eq!(spark(&[9, 0, 4, 8], 3), " ▄█");
        assert_eq!(spark(&[u64::MAX, 0], 5), "█ ");
    }

    /// More values than columns: each column shows its largest value. Fewer: values are repeated.
    #[test]
    fn values_are_merged_and_stretched() {
        assert_eq!(merged(&[1, 5, 2, 3, 9, 1], 3), [5, 3, 9]);
        assert_eq!(merged(&[1, 2], 3), [1, 2]);
        assert_eq!(stretched(&[1, 2], 5), [1, 1, 1, 2, 2]);
        assert_eq!((stretched(&[], 3), stretched(&[4, 1, 2], 1)), (vec![], vec![4]));
        let many: Vec<u64> = (0..1000).collect();
        assert_eq!((merged(&many, 7).len(), merged(&many, 7).last()), (7, Some(&999)));
    }
}
