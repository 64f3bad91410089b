//! Probes of limits of this process and of the machine: overcommit, resource limits, pressure events, swap, memory.

use super::trial;
use super::{Checked, Feature, Finding, Group, SystemFiles, describe_error, format_size};
use std::fs::File;
use std::io::Write;

/// Address space that an arena reserves.
const ARENA_BYTES: usize = 16 << 40;
/// Memory that is registered for direct I/O in one call.
const REGISTERED_BYTES: usize = 64 << 20;
/// The kernel's default of `vm.max_map_count`.
const DEFAULT_MAX_MAP_COUNT: u64 = 65_530;

pub(super) const FEATURES: &[Feature] = &[
    Feature {
        key: "reserve",
        group: Group::Limits,
        name: "address space for the arena",
        since: "",
        needed_for: "an arena with more addresses than any memory limit",
        lost: "the arena is smaller, and so is the maximum memory of the program",
        fix: "ulimit -v unlimited",
        check: probe_address_space,
    },
    Feature {
        key: "rlimit_as",
        group: Group::Limits,
        name: "RLIMIT_AS",
        since: "",
        needed_for: "reserving address space without pages",
        lost: "the arena gets a part of the limit",
        fix: "ulimit -v unlimited",
        check: |_| probe_resource_limit(libc::RLIMIT_AS, "as"),
    },
    Feature {
        key: "rlimit_data",
        group: Group::Limits,
        name: "RLIMIT_DATA",
        since: "4.7",
        needed_for: "opening reserved memory (private writable memory counts as data)",
        lost: "opened memory counts, used or not: malloc returns NULL earlier",
        fix: "ulimit -d unlimited",
        check: |_| probe_resource_limit(libc::RLIMIT_DATA, "data"),
    },
    Feature {
        key: "memlock",
        group: Group::Limits,
        name: "memory that may be locked",
        since: "",
        needed_for: "registering blocks for direct I/O, 64 MiB at a time",
        lost: "direct I/O takes a reference per I/O: up to twice the CPU per large read",
        fix: "sudo prlimit --pid $$ --memlock=unlimited",
        check: probe_locked_memory,
    },
    Feature {
        key: "overcommit",
        group: Group::Limits,
        name: "overcommit",
        since: "",
        needed_for: "granting memory that is charged only as it becomes resident",
        lost: "all opened memory counts at once: large sparse allocations fail at the commit limit",
        fix: "sudo sysctl vm.overcommit_memory=0",
        check: probe_overcommit_mode,
    },
    Feature {
        key: "max_map_count",
        group: Group::Limits,
        name: "mappings per process",
        since: "",
        needed_for: "protecting parts of the arena: each boundary is one more mapping",
        lost: "splitting and protecting fail early in programs with many mappings of their own",
        fix: "sudo sysctl vm.max_map_count=65530",
        check: |system| match system.read_number("/proc/sys/vm/max_map_count")? {
            count if count >= DEFAULT_MAX_MAP_COUNT => Ok(Finding::available(count.to_string())),
            count => Ok(Finding::limited(count.to_string())),
        },
    },
    Feature {
        key: "memory",
        group: Group::Limits,
        name: "memory",
        since: "3.14",
        needed_for: "knowing how much room the machine has (MemAvailable)",
        lost: "memory is short now: purging starts at once",
        fix: "end what needs the memory: ps --sort=-rss -eo pid,rss,comm",
        check: probe_available_memory,
    },
    Feature {
        key: "swap",
        group: Group::Limits,
        name: "swap",
        since: "",
        needed_for: "nothing: volatile memory is purged without it",
        lost: "anonymous memory hardly stalls before the kernel kills: pressure events come late",
        fix: "sudo swapon FILE (made by mkswap), or zram",
        check: |system| match read_meminfo(system, &["SwapTotal", "SwapFree"])? {
            [0, _] => Ok(Finding::limited("none")),
            [total, free] => Ok(Finding::available(format!("{} of {} free", format_size(free), format_size(total)))),
        },
    },
    Feature {
        key: "psi",
        group: Group::Limits,
        name: "pressure events (PSI)",
        since: "5.2",
        needed_for: "returning memory when other programs on the machine run short",
        lost: "the machine's memory is polled every few milliseconds instead",
        fix: "boot with psi=1 on the kernel's command line",
        check: probe_pressure_events,
    },
];

/// Probes how much address space can be reserved: halves the size until a reservation succeeds.
fn probe_address_space(_: &SystemFiles) -> Checked {
    let mut len_bytes = ARENA_BYTES;
    loop {
        let (found, wanted) = (format_size(len_bytes as u64), format_size(ARENA_BYTES as u64));
        match trial::try_reserve(len_bytes) {
            Ok(()) if len_bytes == ARENA_BYTES => return Ok(Finding::available(format!("{found} reserved"))),
            Ok(()) => return Ok(Finding::limited(format!("{found} of {wanted}"))),
            Err(_) if len_bytes > REGISTERED_BYTES => len_bytes /= 2,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Probes a resource that should have no limit. The argument `prlimit` is the option of the command `prlimit` for this
/// resource. Only root can raise a limit above the hard limit.
fn probe_resource_limit(resource: libc::__rlimit_resource_t, prlimit: &str) -> Checked {
    let limits = trial::resource_limit(resource).map_err(|error| Finding::unknown(describe_error(&error)))?;
    Ok(match limits {
        (None, _) => Finding::available("unlimited"),
        (Some(soft), None) => Finding::limited(format_size(soft)),
        (Some(soft), Some(hard)) => {
            Finding::limited(format!("{} (hard limit {})", format_size(soft), format_size(hard)))
                .with_fix(format!("sudo prlimit --pid $$ --{prlimit}=unlimited"))
        }
    })
}

/// Probes whether 64 MiB can be locked.
fn probe_locked_memory(_: &SystemFiles) -> Checked {
    let limit = match trial::resource_limit(libc::RLIMIT_MEMLOCK) {
        Ok((soft, _)) => soft.map_or_else(|| "none".to_string(), format_size),
        Err(error) => describe_error(&error),
    };
    Ok(match trial::try_lock_memory(REGISTERED_BYTES) {
        Ok(()) => Finding::available(format!("64 MiB locked (limit {limit})")),
        Err(error) => Finding::limited(format!("limit {limit}; 64 MiB: {}", describe_error(&error))),
    })
}

/// Reports the overcommit mode of the machine.
fn probe_overcommit_mode(system: &SystemFiles) -> Checked {
    let mode = system.read_number("/proc/sys/vm/overcommit_memory")?;
    Ok(match (mode, read_meminfo(system, &["CommitLimit", "Committed_AS"])) {
        (0, _) => Finding::available("0, by estimate"),
        (1, _) => Finding::available("1, always"),
        (2, Ok([limit, committed])) => {
            Finding::limited(format!("2, strict: {} of {} committed", format_size(committed), format_size(limit)))
        }
        (2, Err(_)) => Finding::limited("2, strict"),
        (other, _) => Finding::unknown(format!("{other}, an unknown mode")),
    })
}

/// Reports how much memory of the machine is available.
fn probe_available_memory(system: &SystemFiles) -> Checked {
    let [total, available] = read_meminfo(system, &["MemTotal", "MemAvailable"])?;
    let found = format!("{} of {} available", format_size(available), format_size(total));
    // With less than a sixteenth available, the kernel is about to reclaim.
    Ok(if available >= total / 16 { Finding::available(found) } else { Finding::limited(found) })
}

/// Returns the values of the rows of `/proc/meminfo` with these names, in bytes.
fn read_meminfo<const N: usize>(system: &SystemFiles, names: &[&str; N]) -> Result<[u64; N], Finding> {
    let text = system.read("/proc/meminfo")?;
    let mut values = [0; N];
    for (value, name) in values.iter_mut().zip(names) {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        *value = number.ok_or_else(|| Finding::unknown(format!("/proc/meminfo has no {name}")))? << 10;
    }
    Ok(values)
}

/// Tries to set a stall trigger (PSI), which the kernel removes when its descriptor is closed.
fn probe_pressure_events(system: &SystemFiles) -> Checked {
    const PRESSURE_PATH: &str = "/proc/pressure/memory";
    let absent = || Finding::missing("this kernel was started without it");
    system.read(PRESSURE_PATH).map_err(|unread| unread.or_if_absent(absent()))?;
    let trigger =
        |text: &[u8]| File::options().read(true).write(true).open(system.path(PRESSURE_PATH))?.write_all(text);
    if trigger(b"some 50000 1000000\0").is_ok() {
        return Ok(Finding::available("triggers with windows from 500 ms"));
    }
    Ok(match trigger(b"some 150000 2000000\0") {
        Ok(()) => Finding::available("triggers with windows of 2 s (shorter ones need CAP_SYS_RESOURCE)"),
        Err(error) => {
            let found = format!("averages only; a trigger: {}", describe_error(&error));
            Finding::limited(found).with_fix("run with CAP_SYS_RESOURCE, or on Linux 6.4 or later")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::{Availability, finding_of};

    fn fake_files(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemFiles) {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        for (path, text) in files {
            let path = system.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (root, system)
    }

    /// The strict overcommit mode must be reported as limited, the other modes as available.
    #[test]
    fn strict_overcommit_is_limited() {
        let meminfo = "MemTotal: 1024 kB\nCommitLimit:    2048 kB\nCommitted_AS:   1024 kB\n";
        let files = [("/proc/sys/vm/overcommit_memory", "2\n"), ("/proc/meminfo", meminfo)];
        let (_root, system) = fake_files(&files);
        let finding = finding_of(probe_overcommit_mode(&system));
        assert_eq!(
            (finding.state, finding.found.as_str()),
            (Availability::Limited, "2, strict: 1 MiB of 2 MiB committed")
        );
    }

    /// If less than a sixteenth of the machine's memory is available, the state must be limited.
    #[test]
    fn little_available_memory_is_limited() {
        for (available, state) in
            [("4096", Availability::Available), ("100", Availability::Limited), ("?", Availability::Unknown)]
        {
            let text = format!("MemTotal:       16384 kB\nMemAvailable:   {available} kB\n");
            let (_root, system) = fake_files(&[("/proc/meminfo", &text)]);
            assert_eq!(finding_of(probe_available_memory(&system)).state, state, "{available}");
        }
    }

    /// If the pressure file is missing, the state must be missing. If all of `/proc` is missing, the state must be
    /// unknown.
    #[test]
    fn missing_psi_differs_from_missing_proc() {
        let (_root, system) = fake_files(&[("/proc/self/status", "")]);
        assert_eq!(finding_of(probe_pressure_events(&system)).state, Availability::Missing);
        let (_root, system) = fake_files(&[]);
        assert_eq!(finding_of(probe_pressure_events(&system)).state, Availability::Unknown);
    }
}
