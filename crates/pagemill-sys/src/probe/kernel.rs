//! Probes of the kernel itself: release, processor, OS page, NUMA nodes.

use super::{Checked, Feature, Finding, Group, SystemFiles, describe_error, parse_release, scratch_block, trial};
use crate::{mem, numa};

/// The oldest release that Pagemill supports.
const MINIMUM_RELEASE: (u32, u32) = (5, 15);
/// The first release with all features that Pagemill uses.
const ALL_FEATURES_RELEASE: (u32, u32) = (6, 13);

pub(super) const FEATURES: &[Feature] = &[
    Feature {
        key: "kernel",
        group: Group::Kernel,
        name: "Linux release",
        since: "5.15",
        needed_for: "everything; 6.13 has all that Pagemill uses",
        lost: "before 6.13: some fast paths, see the rows below; before 5.15: Pagemill does not run",
        fix: "needs Linux 6.13",
        check: |_| Ok(release_finding(&trial::kernel_names().0)),
    },
    Feature {
        key: "processor",
        group: Group::Kernel,
        name: "processor",
        since: "",
        needed_for: "atomic words of 64 bits, the thread pointer, 2 MiB blocks",
        lost: "Pagemill is built and tested for x86-64 and aarch64 only",
        fix: "needs an x86-64 or aarch64 machine",
        check: |_| match trial::kernel_names().1.as_str() {
            name @ ("x86_64" | "aarch64") => Ok(Finding::available(name)),
            other => Ok(Finding::missing(other)),
        },
    },
    Feature {
        key: "os_page",
        group: Group::Kernel,
        name: "OS page",
        since: "",
        needed_for: "the unit in which the kernel counts memory",
        lost: "Pagemill supports OS pages of 4, 16 and 64 KiB",
        fix: "needs a kernel with pages of 4, 16 or 64 KiB",
        check: |_| {
            let bytes = mem::os_page_bytes();
            let found = super::format_size(bytes as u64);
            Ok(if [4, 16, 64].contains(&(bytes >> 10)) { Finding::available(found) } else { Finding::limited(found) })
        },
    },
    Feature {
        key: "futex_waitv",
        group: Group::Kernel,
        name: "waiting on several words",
        since: "5.16",
        needed_for: "one helper thread that waits for purge requests of the process and of its tree",
        lost: "the helper wakes periodically to check the second word",
        fix: "",
        check: |_| {
            trial::try_futex_waitv()?;
            Ok(Finding::available("futex_waitv works"))
        },
    },
    Feature {
        key: "numa",
        group: Group::Kernel,
        name: "NUMA nodes",
        since: "",
        needed_for: "taking blocks from the node that uses them (mbind)",
        lost: "blocks come from the node that the kernel chooses",
        fix: "docker run --cap-add SYS_NICE …",
        check: probe_memory_nodes,
    },
];

/// Returns the finding for a kernel release: available from [`ALL_FEATURES_RELEASE`] on, limited from
/// [`MINIMUM_RELEASE`] on, else missing.
fn release_finding(text: &str) -> Finding {
    match parse_release(text) {
        None => Finding::unknown(format!("not a release: {text:?}")),
        Some(found) if found >= ALL_FEATURES_RELEASE => Finding::available(text),
        Some(found) if found >= MINIMUM_RELEASE => Finding::limited(text),
        Some(_) => Finding::missing(text).with_fix("needs Linux 5.15, better 6.13"),
    }
}

/// Probes whether this process can choose the NUMA node of an address range (`mbind`).
fn probe_memory_nodes(system: &SystemFiles) -> Checked {
    let list = match system.read("/sys/devices/system/node/has_memory") {
        Ok(list) => list,
        // A kernel without NUMA support has no such folder.
        Err(unread) if unread.is_absent => "0".to_string(),
        Err(unread) => return Err(unread.into()),
    };
    let nodes = match list.as_str() {
        "0" => "1 node".to_string(),
        list => format!("nodes {list}"),
    };
    let first = list.split(['-', ',']).next().and_then(|node| node.parse().ok()).unwrap_or(0);
    Ok(match numa::prefer(scratch_block()?.addr(), mem::os_page_bytes(), first) {
        Ok(()) => Finding::available(format!("{nodes}, mbind works")),
        Err(error) if list == "0" => {
            Finding::available(format!("{nodes}; mbind not needed: {}", describe_error(&error)))
        }
        Err(error) => {
            let found = format!("{nodes}, mbind: {}", describe_error(&error));
            Finding { found, ..Finding::refused(&error) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::Availability;

    /// The state of each kernel release must depend on its major and minor number only.
    #[test]
    fn old_kernels_are_limited_or_missing() {
        for (text, state) in [
            ("5.14.21", Availability::Missing),
            ("5.15.0-91-generic", Availability::Limited),
            ("6.12.9", Availability::Limited),
            ("6.13.0", Availability::Available),
            ("7.0.0-rc1", Availability::Available),
            ("?", Availability::Unknown),
        ] {
            assert_eq!(release_finding(text).state, state, "{text}");
        }
    }
}
