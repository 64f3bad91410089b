//! Metrics of the file systems of `pagemill mount`, as their controllers report them.

use pagemill_core::metrics::{Exposition, FamilyKind, Labels, Value};
use pagemill_tmpfs::control::{self, RequestOutcome};
use pagemill_tmpfs::status::{Counts, LineStatus, Status};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// Maximum number of mounts with samples.
const MAX_MOUNTS: usize = 20;

/// Maximum number of limits of one mount with samples: those with the least room.
const MAX_LIMITS: usize = 16;

/// A gauge: the part of its name behind `pagemill_mount_`, its unit, help, and the function that returns its value.
type GaugeFamily = (&'static str, &'static str, &'static str, fn(&Status) -> Value);

const GAUGES: [GaugeFamily; 11] = {
    use Value::Integer;
    [
        ("requested_bytes", "bytes", "Size that the user requested.", |status| Integer(status.asked_bytes)),
        ("size_bytes", "bytes", "Current size. It is smaller than the requested size near a limit.", |status| {
            Integer(status.size_bytes)
        }),
        ("used_bytes", "bytes", "Memory of the files.", |status| Integer(status.used_bytes)),
        ("inodes", "", "Inodes in use.", |status| Integer(status.inodes)),
        ("inodes_max", "", "Current maximum number of inodes.", |status| Integer(status.max_inodes)),
        ("volatile_files", "", "Volatile files, which may be purged.", |status| Integer(status.volatile_files)),
        ("volatile_bytes", "bytes", "Memory of volatile files.", |status| Integer(status.volatile_bytes)),
        ("volatile_age_seconds", "seconds", "Maximum age of the figures of volatile files.", |status| {
            seconds(status.volatile_age_seconds)
        }),
        ("waiting_files", "", "Files whose pages the worker has not examined yet.", |status| {
            Integer(status.files_waiting_for_pages)
        }),
        ("preferred", "", "1 if the controller has real-time priority.", |status| {
            Integer(u64::from(status.is_preferred))
        }),
        ("uptime_seconds", "seconds", "Time since the start of the controller.", |status| {
            seconds(status.uptime_seconds)
        }),
    ]
};

/// A counter: the part of its name behind `pagemill_mount_`, its unit, help, and the function that returns its value.
type CounterFamily = (&'static str, &'static str, &'static str, fn(&Counts) -> u64);

const COUNTERS: [CounterFamily; 22] = [
    ("purged_files", "", "Volatile files purged as a whole.", |counts| counts.purged_files),
    ("purged_bytes", "bytes", "Memory freed by purges of whole files.", |counts| counts.purged_bytes),
    ("cut_files", "", "Purges of the ends of partially volatile files.", |counts| counts.cut_files),
    ("cut_bytes", "bytes", "Memory freed by purges of the ends of files.", |counts| counts.cut_bytes),
    ("spared_open", "", "Volatile files that were not purged because they were open.", |counts| counts.spared_open),
    ("nothing_to_purge", "", "Times that a limit was near and no volatile file could be purged.", |counts| {
        counts.nothing_to_purge
    }),
    ("size_changes", "", "Changes of the size, to keep writers below a limit.", |counts| counts.size_changes),
    ("size_refused", "", "Changes of the size that the kernel refused.", |counts| counts.size_refused),
    ("events", "", "Closes and renames of files that the kernel reported.", |counts| counts.events),
    ("events_lost", "", "Times that events were lost. A full scan replaces them.", |counts| counts.events_lost),
    ("scans", "", "Full scans of the file system.", |counts| counts.scans),
    ("delayed_opens", "", "Opens that waited, because files were written faster than purges freed memory.", |counts| {
        counts.delayed_opens
    }),
    ("quiet_times", "", "Times that close events were off, while many small files were closed.", |counts| {
        counts.quiet_times
    }),
    ("bad_marks", "", "Marks with invalid values, which were ignored.", |counts| counts.bad_marks),
    ("not_indexed", "", "Times that a volatile file did not fit in the index.", |counts| counts.not_indexed),
    ("huge_blocks", "", "Blocks of 2 MiB that were huge after the worker examined them.", |counts| counts.huge_blocks),
    ("split_blocks", "", "Blocks of 2 MiB split because of the mark `never`.", |counts| counts.split_blocks),
    ("sparse_bytes", "bytes", "Memory of pages of zeros that the worker freed.", |counts| counts.sparse_bytes),
    ("collapse_busy", "", "Files that the worker could not finish because they were in use.", |counts| {
        counts.collapse_busy
    }),
    ("collapse_postponed", "", "Files that the worker could not finish in the time of one job.", |counts| {
        counts.collapse_postponed
    }),
    (
        "collapse_no_memory",
        "",
        "Files that the worker could not finish because no huge page was available.",
        |counts| counts.collapse_no_memory,
    ),
    ("worker_restarts", "", "Restarts of the worker process.", |counts| counts.worker_restarts),
];

/// A gauge of a limit: the part of its name behind `pagemill_mount_`, its help, and the function that returns its value.
type LimitFamily = (&'static str, &'static str, fn(&LineStatus) -> u64);

const LIMITS: [LimitFamily; 3] = [
    ("limit_bytes", "A limit of memory: the size, that of a control group, or that of the machine.", |line| {
        line.limit_bytes
    }),
    ("limit_used_bytes", "Memory that counts against the limit.", |line| line.used_bytes),
    ("limit_threshold_bytes", "Above this usage, volatile files are purged.", |line| line.mark_bytes),
];

fn seconds(seconds: f64) -> Value {
    Value::Seconds(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// A mount, and its status if its controller answered.
pub struct MountState {
    pub point: PathBuf,
    pub status: Option<Status>,
}

/// Requests the status of mounts from their controllers. `mounts` has their mount points and devices.
pub fn request_all(mounts: Vec<(PathBuf, u64)>) -> Vec<MountState> {
    let request = |(point, device): (PathBuf, u64)| match control::request_status(device) {
        RequestOutcome::Answer(status) => MountState { point, status: Some(status) },
        RequestOutcome::Refused(_) | RequestOutcome::NoController => MountState { point, status: None },
    };
    mounts.into_iter().take(MAX_MOUNTS).map(request).collect()
}

/// Writes the families of mounts. The label `mount` is the mount point.
pub fn write_mounts(metrics: &mut Exposition, mounts: &[MountState]) {
    metrics.family("pagemill_mounts", FamilyKind::Gauge, "", "File systems of `pagemill mount`.");
    metrics.sample(&Labels::default(), Value::Integer(mounts.len() as u64));
    if mounts.is_empty() {
        return;
    }
    let named: Vec<(String, &MountState)> =
        mounts.iter().map(|mount| (mount.point.to_string_lossy().into_owned(), mount)).collect();
    metrics.family(
        "pagemill_mount_controlled",
        FamilyKind::Gauge,
        "",
        "1 if the controller of the file system answers. Without it, nothing is purged.",
    );
    let labels = |point: &str| Labels::new(&[("mount", point)]);
    for (point, mount) in &named {
        metrics.sample(&labels(point), Value::Integer(u64::from(mount.status.is_some())));
    }
    let known: Vec<(Labels, &str, &Status)> =
        named.iter().filter_map(|(point, mount)| Some((labels(point), &**point, mount.status.as_ref()?))).collect();
    for (name, unit, help, value) in GAUGES.iter().filter(|_| !known.is_empty()) {
        metrics.family(&format!("pagemill_mount_{name}"), FamilyKind::Gauge, unit, help);
        known.iter().for_each(|(labels, _, status)| metrics.sample(labels, value(status)));
    }
    for (name, unit, help, value) in COUNTERS.iter().filter(|_| !known.is_empty()) {
        metrics.family(&format!("pagemill_mount_{name}"), FamilyKind::Counter, unit, help);
        known.iter().for_each(|(labels, _, status)| metrics.sample(labels, Value::Integer(value(&status.counts))));
    }
    let lines: Vec<(Labels, LineStatus)> =
        known.iter().flat_map(|(_, point, status)| limit_rows(point, status)).collect();
    for (name, help, value) in LIMITS.iter().filter(|_| !lines.is_empty()) {
        metrics.family(&format!("pagemill_mount_{name}"), FamilyKind::Gauge, "bytes", help);
        lines.iter().for_each(|(labels, line)| metrics.sample(labels, Value::Integer(value(line))));
    }
}

/// Returns the limits of a mount that have the least room, each with its labels.
fn limit_rows(point: &str, status: &Status) -> Vec<(Labels, LineStatus)> {
    let mut lines = status.lines.clone();
    lines.sort_by_key(|line| line.limit_bytes.saturating_sub(line.used_bytes));
    let mut seen = BTreeSet::new();
    lines.retain(|line| seen.len() < MAX_LIMITS && seen.insert((line.kind.clone(), line.name.clone())));
    let labels = |line: &LineStatus| Labels::new(&[("mount", point), ("kind", &line.kind), ("name", &line.name)]);
    lines.into_iter().map(|line| (labels(&line), line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_core::metrics::Format;

    /// Each counter of a controller must have a family, with its own value. A mount without a controller must be
    /// counted. Of many limits, those with the least room must be shown.
    #[test]
    fn all_counters_of_a_controller_are_written() {
        let fields = serde_json::to_value(Counts::default()).unwrap().as_object().unwrap().len();
        assert_eq!(COUNTERS.len(), fields);
        let numbered: serde_json::Map<_, _> = serde_json::to_value(Counts::default())
            .unwrap()
            .as_object()
            .unwrap()
            .keys()
            .zip(1000..)
            .map(|(name, number)| (name.clone(), number.into()))
            .collect();
        let counts: Counts = serde_json::from_value(numbered.clone().into()).unwrap();
        let line = |number: u64| LineStatus {
            kind: "group".into(),
            name: format!("/g{number}"),
            limit_bytes: 100,
            used_bytes: number,
            mark_bytes: 90,
        };
        let status = Status { counts, lines: (0..30).map(line).collect(), uptime_seconds: 2.5, ..Status::default() };
        let mounts = [
            MountState { point: "/a \"b\"".into(), status: Some(status) },
            MountState { point: "/c".into(), status: None },
        ];
        let mut metrics = Exposition::new(Format::Prometheus);
        write_mounts(&mut metrics, &mounts);
        let text = metrics.finish();
        for (name, number) in numbered {
            assert!(
                text.contains(&format!("pagemill_mount_{name}_total{{mount=\"/a \\\"b\\\"\"}} {number}\n")),
                "{name}"
            );
        }
        assert!(text.contains("pagemill_mounts 2\n") && text.contains("pagemill_mount_controlled{mount=\"/c\"} 0\n"));
        assert!(text.contains("uptime_seconds{mount=\"/a \\\"b\\\"\"} 2.500000000\n"), "{text}");
        assert_eq!(text.matches("pagemill_mount_limit_bytes{").count(), MAX_LIMITS);
        assert!(text.contains("name=\"/g29\"") && text.contains("name=\"/g14\"") && !text.contains("name=\"/g13\""));
    }
}
