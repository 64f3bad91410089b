//! Probes of huge pages, and of calls that return or move memory.

use super::trial::{self, AllowedHugePages, BLOCK_BYTES, Scratch};
use super::{Checked, Feature, Finding, Group, SystemFiles, describe_error, scratch_block};
use crate::clock;
use crate::mem::{self, Backing};
use crate::memory_file::{FileSystem, MemoryFile};
use crate::mthp::{self, PageSizes, bracketed_word};
use crate::userfault::Userfault;
use std::io;

const THP_ENABLED_PATH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const THP_DEFRAG_PATH: &str = "/sys/kernel/mm/transparent_hugepage/defrag";
const SHMEM_ENABLED_PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
const HUGE_PAGE_SIZE_PATH: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
const HUGETLB_FOLDER: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// The command that allows transparent huge pages.
const ENABLE_THP_COMMAND: &str = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled";

/// The command that offers pages of 64 KiB where a program advises them. The whole path would be too long for a line.
const ENABLE_MTHP_COMMAND: &str = "echo madvise | sudo tee /sys/kernel/mm/*/hugepages-64kB/enabled";

const UFFD_WRITE_PROTECT: u64 = 1 << 0;
const UFFD_POISON: u64 = 1 << 14;
const UFFD_FEATURE_NAMES: [(u64, &str); 4] =
    [(UFFD_WRITE_PROTECT, "write-protect"), (UFFD_POISON, "poison"), (1 << 15, "async"), (1 << 16, "move")];

pub(super) const FEATURES: &[Feature] = &[
    Feature {
        key: "thp_enabled",
        group: Group::HugePages,
        name: "huge pages allowed",
        since: "2.6.38",
        needed_for: "taking each block of 2 MiB as one huge page",
        lost: "every block gets small pages: populating costs some 8 times more, more TLB misses",
        fix: ENABLE_THP_COMMAND,
        check: |system| setting_finding(system, THP_ENABLED_PATH, &["always", "madvise"], &[]),
    },
    Feature {
        key: "thp_defrag",
        group: Group::HugePages,
        name: "huge pages made on demand",
        since: "2.6.38",
        needed_for: "a huge page at the first touch even if free memory is fragmented",
        lost: "if free memory is fragmented, blocks start with small pages",
        fix: "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/defrag",
        check: |system| {
            setting_finding(system, THP_DEFRAG_PATH, &["always", "defer+madvise", "madvise"], &["defer", "never"])
        },
    },
    Feature {
        key: "thp_process",
        group: Group::HugePages,
        name: "not forbidden to us",
        since: "3.15",
        needed_for: "huge pages: a parent may have forbidden them to all its children (prctl)",
        lost: "no huge pages for this process and its children, whatever the settings",
        fix: "start it from a parent without PR_SET_THP_DISABLE",
        check: |_| {
            let allowed = trial::allowed_huge_pages().map_err(|error| Finding::unknown(describe_error(&error)))?;
            Ok(match allowed {
                AllowedHugePages::All => Finding::available("no PR_SET_THP_DISABLE"),
                AllowedHugePages::WhereAdvised => {
                    Finding::available("where advised only (PR_THP_DISABLE_EXCEPT_ADVISED)")
                }
                AllowedHugePages::None => Finding::missing("PR_SET_THP_DISABLE is set"),
            })
        },
    },
    Feature {
        key: "huge_size",
        group: Group::HugePages,
        name: "size of a huge page",
        since: "4.11",
        needed_for: "one huge page per block",
        lost: "a block is 2 MiB; if the kernel's huge page is larger, blocks use smaller pages",
        fix: "needs a kernel with pages of 4 KiB",
        check: probe_huge_page_size,
    },
    Feature {
        key: "huge_page",
        group: Group::HugePages,
        name: "a huge page taken",
        since: "2.6.38",
        needed_for: "fast faults, fast access, fast return of whole blocks",
        lost: "blocks get small pages: slower to populate, to use and to return",
        fix: "echo 1 | sudo tee /proc/sys/vm/compact_memory",
        check: probe_huge_page,
    },
    Feature {
        key: "mthp",
        group: Group::HugePages,
        name: "pages of 16 KiB to 1 MiB",
        since: "6.8",
        needed_for: "software pages (run --page-size): one page fault provides a whole page",
        lost: "with run --page-size, each OS page of an allocation from 64 KiB up is a page fault",
        fix: ENABLE_MTHP_COMMAND,
        check: probe_page_sizes,
    },
    Feature {
        key: "shmem_huge",
        group: Group::HugePages,
        name: "huge pages in shared memory",
        since: "4.8",
        needed_for: "caches in shared memory (Source::Shared)",
        lost: "such caches use a private tmpfs, or collapse each block at its first use",
        fix: "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        check: probe_shared_huge_page,
    },
    Feature {
        key: "private_tmpfs",
        group: Group::HugePages,
        name: "private tmpfs",
        since: "5.2",
        needed_for: "huge pages in shared memory (Source::Shared) where the row above has none",
        lost: "each block is collapsed at its first use: 0.05 ms more; before Linux 6.1 it stays small",
        fix: "",
        check: probe_private_tmpfs,
    },
    Feature {
        key: "hugetlb",
        group: Group::HugePages,
        name: "reserved pages (hugetlb)",
        since: "5.16",
        needed_for: "caches that request them (Source::Hugetlb), and nothing else",
        lost: "such caches are refused, or get ordinary memory (hugetlb_refused)",
        fix: "echo 512 | sudo tee /proc/sys/vm/nr_hugepages",
        check: probe_reserved_pages,
    },
    Feature {
        key: "madv_collapse",
        group: Group::HugePages,
        name: "MADV_COLLAPSE",
        since: "6.1",
        needed_for: "making one huge page of small ones in a block that filled up gradually",
        lost: "small blocks stay small until they are returned, or are copied",
        fix: "",
        check: probe_collapse,
    },
    Feature {
        key: "madv_populate",
        group: Group::GivingBack,
        name: "MADV_POPULATE_WRITE",
        since: "5.14",
        needed_for: "populating a whole range at once, and knowing that it succeeded",
        lost: "Pagemill does not run: memory cannot be charged before it becomes resident",
        fix: "",
        check: probe_populate,
    },
    Feature {
        key: "madv_dontneed",
        group: Group::GivingBack,
        name: "MADV_DONTNEED, MADV_FREE",
        since: "4.5",
        needed_for: "returning free blocks, at once or when the kernel needs them",
        lost: "free memory cannot be returned",
        fix: "",
        check: probe_dontneed,
    },
    Feature {
        key: "process_madvise",
        group: Group::GivingBack,
        name: "process_madvise on oneself",
        since: "6.13",
        needed_for: "returning many scattered pages in one call",
        lost: "one call per page: up to 16 us instead of some 1.2 us while other threads run",
        fix: "",
        check: probe_process_madvise,
    },
    Feature {
        key: "madv_cold",
        group: Group::GivingBack,
        name: "MADV_COLD",
        since: "5.4",
        needed_for: "splitting a huge page so that a part of it can be returned",
        lost: "a partially used block is returned only when all of it is free",
        fix: "",
        check: |_| try_on_touched_page(|page| page.advise(mem::os_page_bytes(), libc::MADV_COLD)),
    },
    Feature {
        key: "madv_guard",
        group: Group::GivingBack,
        name: "MADV_GUARD_INSTALL",
        since: "6.13",
        needed_for: "strict volatile ranges: a signal on purged pages",
        lost: "strict volatile ranges are refused; others work",
        fix: "",
        check: probe_guard_page,
    },
    Feature {
        key: "madv_wipeonfork",
        group: Group::GivingBack,
        name: "MADV_WIPEONFORK",
        since: "4.14",
        needed_for: "noticing a child made by a raw clone",
        lost: "a child made by a raw clone uses its parent's accounting (fork is noticed)",
        fix: "",
        check: probe_wipe_on_fork,
    },
    Feature {
        key: "userfaultfd",
        group: Group::GivingBack,
        name: "userfaultfd, user faults",
        since: "5.11",
        needed_for: "moving and write-protecting pages, SIGBUS on purged ones (three rows below)",
        lost: "realloc copies; purged pages are marked by guard pages only",
        fix: "echo 1 | sudo tee /proc/sys/vm/unprivileged_userfaultfd",
        check: probe_userfaultfd,
    },
    Feature {
        key: "uffd_move",
        group: Group::GivingBack,
        name: "UFFDIO_MOVE",
        since: "6.8",
        needed_for: "realloc and compaction that move pages: 1.8 us per 2 MiB instead of a copy",
        lost: "realloc copies, and free slots keep their pages until a purge",
        fix: "echo 1 | sudo tee /proc/sys/vm/unprivileged_userfaultfd",
        check: |_| probe_move_of_a_block(),
    },
    Feature {
        key: "uffd_wp",
        group: Group::GivingBack,
        name: "userfaultfd write-protect",
        since: "5.7",
        needed_for: "seeing the first write to a page of a mapped view",
        lost: "writable views are protected by mprotect, one more mapping each",
        fix: "echo 1 | sudo tee /proc/sys/vm/unprivileged_userfaultfd",
        check: |_| try_on_touched_page(|page| page.write_protect_first_page(&Userfault::open(UFFD_WRITE_PROTECT)?)),
    },
    Feature {
        key: "uffd_poison",
        group: Group::GivingBack,
        name: "userfaultfd poison",
        since: "6.6",
        needed_for: "nothing yet: strict ranges use guard pages",
        lost: "nothing: guard pages are used, and a handler turns their SIGSEGV into SIGBUS",
        fix: "echo 1 | sudo tee /proc/sys/vm/unprivileged_userfaultfd",
        check: probe_poisoned_page,
    },
];

/// Probes the setting in the file `path` by its word in brackets. The feature is available if the word is in `good`,
/// limited if the word is in `bearable`, else missing.
fn setting_finding(system: &SystemFiles, path: &str, good: &[&str], bearable: &[&str]) -> Checked {
    let none = || Finding::missing("this kernel has no transparent huge pages").with_fix("needs another kernel");
    let text = system.read(path).map_err(|unread| unread.or_if_absent(none()))?;
    Ok(match bracketed_word(&text) {
        Some(word) if good.contains(&word) => Finding::available(word),
        Some(word) if bearable.contains(&word) => Finding::limited(word),
        Some(word) => Finding::missing(word),
        None => Finding::unknown(format!("{path} says {text:?}")),
    })
}

/// Probes the size of a transparent huge page.
fn probe_huge_page_size(system: &SystemFiles) -> Checked {
    let none = || Finding::missing("none").with_fix("needs another kernel");
    let bytes = system.read_number(HUGE_PAGE_SIZE_PATH).map_err(|unread| unread.or_if_absent(none()))?;
    let found = super::format_size(bytes);
    Ok(if bytes == BLOCK_BYTES as u64 { Finding::available(found) } else { Finding::limited(found) })
}

/// Probes which page sizes below 2 MiB the kernel has and offers (`mthp`), and how much one page fault provides.
fn probe_page_sizes(system: &SystemFiles) -> Checked {
    let (known, offered) = page_sizes(system)?;
    if offered == PageSizes::default() {
        return Ok(match known == PageSizes::default() {
            true => Finding::missing("this kernel has none").with_fix("needs Linux 6.8"),
            false => Finding::missing(format!("none of {} sizes is offered", known.bytes().count())),
        });
    }
    // No huge page fits into the advised range, which ends before the block does.
    let (scratch, len_bytes) = (scratch_block()?, BLOCK_BYTES - mem::os_page_bytes());
    scratch.advise(BLOCK_BYTES, libc::MADV_NOHUGEPAGE)?;
    scratch.advise(len_bytes, libc::MADV_HUGEPAGE)?;
    scratch.write(0, 7);
    let provided = mem::resident_bytes(scratch.addr(), len_bytes)?;
    let sizes: Vec<_> = offered.bytes().map(|bytes| super::format_size(bytes as u64)).collect();
    let found = format!("{}; a fault provided {}", sizes.join(", "), super::format_size(provided as u64));
    let is_larger = provided > mem::os_page_bytes();
    Ok(if is_larger { Finding::available(found) } else { Finding::limited(found) })
}

/// Returns the page sizes below 2 MiB that the kernel has, and those that it offers.
fn page_sizes(system: &SystemFiles) -> Result<(PageSizes, PageSizes), Finding> {
    let none = || Finding::missing("this kernel has none").with_fix("needs Linux 6.8");
    let top = system.read(THP_ENABLED_PATH).map_err(|unread| unread.or_if_absent(none()))?;
    let top = bracketed_word(&top).unwrap_or("never");
    let (mut known, mut offered) = (PageSizes::default(), PageSizes::default());
    for exponent in mthp::SIZE_EXPONENTS {
        let path = format!("{}/hugepages-{}kB/enabled", mthp::FOLDER, 1 << (exponent - 10));
        let Ok(text) = system.read(&path) else { continue };
        known = known.with(exponent);
        if bracketed_word(&text).is_some_and(|word| mthp::is_offered(word, top)) {
            offered = offered.with(exponent);
        }
    }
    Ok((known, offered))
}

/// Probes the reserved huge pages (hugetlb): how many are free and not promised to a mapping.
fn probe_reserved_pages(system: &SystemFiles) -> Checked {
    let none = || Finding::missing("none of 2 MiB").with_fix("needs another kernel");
    let number = |name: &str| {
        system.read_number(&format!("{HUGETLB_FOLDER}/{name}")).map_err(|unread| unread.or_if_absent(none()))
    };
    let total = number("nr_hugepages")?;
    let free = number("free_hugepages")?.saturating_sub(number("resv_hugepages")?);
    let found = format!("{free} of {total} pages of 2 MiB free");
    Ok(match free {
        0 if total == 0 => Finding::missing("none reserved"),
        0 => Finding::limited(found),
        _ => Finding::available(found),
    })
}

/// Probes whether a block gets a huge page: populates a block twice, as the arena does, and reports the shorter time.
/// In a virtual machine, the first access to memory that the host has not allocated yet is many times slower.
fn probe_huge_page(system: &SystemFiles) -> Checked {
    let mut fastest_ns = u64::MAX;
    for _ in 0..2 {
        let scratch = scratch_block()?;
        let start_ns = clock::fine_ns();
        if mem::populate_huge(scratch.addr(), BLOCK_BYTES)? == Backing::Small {
            let found = Finding::missing("small pages came instead");
            let is_off = system.read(THP_ENABLED_PATH).is_ok_and(|text| bracketed_word(&text) == Some("never"));
            return Ok(if is_off { found.with_fix(ENABLE_THP_COMMAND) } else { found });
        }
        fastest_ns = fastest_ns.min(clock::fine_ns() - start_ns);
    }
    Ok(Finding::available(format!("2 MiB in {} us", fastest_ns / 1000)))
}

/// Probes whether shared memory (memfd) gets huge pages.
fn probe_shared_huge_page(system: &SystemFiles) -> Checked {
    let setting = match system.read(SHMEM_ENABLED_PATH) {
        Ok(text) => bracketed_word(&text).unwrap_or("unreadable").to_string(),
        Err(unread) => unread.reason,
    };
    Ok(match mem::populate_huge(Scratch::shared()?.addr(), BLOCK_BYTES)? {
        Backing::Huge => Finding::available(format!("{setting}; a memfd got a huge page")),
        Backing::Small => Finding::limited(format!("{setting}; a memfd got small pages")),
    })
}

/// Probes whether this process can have files in a tmpfs of its own, and whether they get huge pages.
fn probe_private_tmpfs(_: &SystemFiles) -> Checked {
    let start_ns = clock::fine_ns();
    let file = MemoryFile::create_in(FileSystem::Tmpfs, BLOCK_BYTES)?;
    let taken_us = (clock::fine_ns() - start_ns) / 1000;
    Ok(match mem::populate_huge(Scratch::of_file(&file)?.addr(), BLOCK_BYTES)? {
        Backing::Huge => Finding::available(format!("created in {taken_us} us; a file got a huge page")),
        Backing::Small => Finding::limited("a file got small pages"),
    })
}

/// Probes `MADV_COLLAPSE`: makes small pages huge, and checks that their contents survive.
fn probe_collapse(_: &SystemFiles) -> Checked {
    let scratch = Scratch::new(1)?;
    scratch.advise(BLOCK_BYTES, libc::MADV_NOHUGEPAGE)?;
    for offset in (0..BLOCK_BYTES).step_by(mem::os_page_bytes()) {
        scratch.write(offset, 7);
    }
    scratch.advise(BLOCK_BYTES, libc::MADV_HUGEPAGE)?;
    let start_ns = clock::fine_ns();
    scratch.advise(BLOCK_BYTES, libc::MADV_COLLAPSE)?;
    let taken_ns = clock::fine_ns() - start_ns;
    Ok(match scratch.read(BLOCK_BYTES - mem::os_page_bytes()) {
        7 => Finding::available(format!("2 MiB made huge in {:.1} ms", taken_ns as f64 / 1e6)),
        _ => Finding::missing("it lost the contents"),
    })
}

/// Probes `MADV_POPULATE_WRITE`, and measures the time for each page.
fn probe_populate(_: &SystemFiles) -> Checked {
    const POPULATED_PAGES: usize = 64;
    let page = mem::os_page_bytes();
    let len_bytes = (POPULATED_PAGES * page).min(BLOCK_BYTES);
    let scratch = Scratch::new(1)?;
    scratch.advise(BLOCK_BYTES, libc::MADV_NOHUGEPAGE).ok();
    let start_ns = clock::fine_ns();
    mem::populate(scratch.addr(), len_bytes)?;
    let taken_ns = clock::fine_ns() - start_ns;
    if mem::resident_bytes(scratch.addr(), len_bytes)? < len_bytes {
        return Ok(Finding::limited("not every page came"));
    }
    let (count, taken_us) = (len_bytes / page, taken_ns as f64 / 1000.0);
    Ok(Finding::available(format!("{count} pages brought in, {:.1} us each", taken_us / count as f64)))
}

/// Probes `MADV_FREE` and `MADV_DONTNEED`, and checks that discarded memory reads zero.
fn probe_dontneed(_: &SystemFiles) -> Checked {
    let scratch = Scratch::new(1)?;
    scratch.write(0, 7);
    scratch.advise(mem::os_page_bytes(), libc::MADV_FREE)?;
    scratch.write(0, 7);
    scratch.advise(mem::os_page_bytes(), libc::MADV_DONTNEED)?;
    Ok(match scratch.read(0) {
        0 => Finding::available("both work"),
        _ => Finding::missing("MADV_DONTNEED kept the contents"),
    })
}

/// Probes whether one `process_madvise` call can discard many scattered pages of the calling process.
fn probe_process_madvise(_: &SystemFiles) -> Checked {
    let page = mem::os_page_bytes();
    let count = (BLOCK_BYTES / page / 2).min(64);
    let scratch = scratch_block()?;
    scratch.advise(BLOCK_BYTES, libc::MADV_NOHUGEPAGE).ok();
    for index in 0..count {
        scratch.write(2 * index * page, 7);
    }
    let start_ns = clock::fine_ns();
    if let Err(error) = scratch.advise_every_second_page(count, libc::MADV_DONTNEED) {
        let refused = Finding::refused(&error);
        scratch.advise_every_second_page(count, libc::MADV_COLD).map_err(|_| Finding::refused(&error))?;
        let found = format!("MADV_COLD only; MADV_DONTNEED: {}", refused.found);
        return Ok(Finding { errno: refused.errno, ..Finding::limited(found) });
    }
    let each_us = (clock::fine_ns() - start_ns) as f64 / 1000.0 / count as f64;
    Ok(match (0..count).all(|index| scratch.read(2 * index * page) == 0) {
        true => Finding::available(format!("{count} pages given back in one call, {each_us:.1} us each")),
        false => Finding::missing("it kept the contents"),
    })
}

/// Runs a trial on a page with contents, and checks that the contents survive.
fn try_on_touched_page(trial: impl FnOnce(&Scratch) -> io::Result<()>) -> Checked {
    let scratch = Scratch::new(1)?;
    scratch.write(0, 7);
    trial(&scratch)?;
    Ok(match scratch.read(0) {
        7 => Finding::available("works"),
        _ => Finding::missing("it lost the contents"),
    })
}

/// Probes guard pages: makes a page inaccessible and accessible again.
fn probe_guard_page(_: &SystemFiles) -> Checked {
    let page = mem::os_page_bytes();
    let scratch = Scratch::new(1)?;
    scratch.advise(page, mem::MADV_GUARD_INSTALL)?;
    let is_inaccessible = !scratch.is_readable(0) && scratch.is_readable(page);
    scratch.advise(page, mem::MADV_GUARD_REMOVE)?;
    Ok(inaccessible_page_finding(is_inaccessible && scratch.is_readable(0)))
}

/// Probes poisoned pages: makes a page inaccessible and accessible again.
fn probe_poisoned_page(_: &SystemFiles) -> Checked {
    let scratch = Scratch::new(1)?;
    let userfault = Userfault::open(UFFD_POISON)?;
    scratch.poison_first_page(&userfault)?;
    let is_inaccessible = !scratch.is_readable(0);
    scratch.advise(mem::os_page_bytes(), libc::MADV_DONTNEED)?;
    Ok(inaccessible_page_finding(is_inaccessible && scratch.is_readable(0)))
}

/// Returns the finding of a probe that made a page inaccessible and then accessible again. `has_worked` is false if the
/// page was readable in between, or not readable at the end.
fn inaccessible_page_finding(has_worked: bool) -> Finding {
    match has_worked {
        true => Finding::available("a page was fenced off and opened again"),
        false => Finding::missing("accepted, but the page stayed as it was"),
    }
}

/// Probes `MADV_WIPEONFORK`: a fork child must read zero, and the parent must still read the byte that it wrote.
fn probe_wipe_on_fork(_: &SystemFiles) -> Checked {
    let scratch = Scratch::new(1)?;
    scratch.write(0, 7);
    scratch.advise(mem::os_page_bytes(), libc::MADV_WIPEONFORK)?;
    Ok(match (trial::first_byte_in_child(&scratch)?, scratch.read(0)) {
        (0, 7) => Finding::available("a child read zero"),
        _ => Finding::missing("accepted, but a child read its parent's page"),
    })
}

/// Probes userfaultfd, and reports which of [`UFFD_FEATURE_NAMES`] the kernel offers.
fn probe_userfaultfd(system: &SystemFiles) -> Checked {
    let setting = system.read("/proc/sys/vm/unprivileged_userfaultfd");
    let setting = setting.map_or_else(|unread| unread.reason, |text| format!("unprivileged_userfaultfd={text}"));
    let features = Userfault::open(0)?.features;
    let offered = UFFD_FEATURE_NAMES.iter().filter(|(bit, _)| features & bit != 0);
    let names: Vec<_> = offered.map(|(_, name)| *name).collect();
    Ok(Finding::available(format!("{}; {setting}", names.join(", "))))
}

/// Probes `UFFDIO_MOVE`: moves a block and checks that its bytes arrived. Does so three times, because the first move
/// is slow.
fn probe_move_of_a_block() -> Checked {
    let (to, from) = (0, BLOCK_BYTES);
    let mut fastest_ns = u64::MAX;
    for _ in 0..3 {
        let scratch = Scratch::new(2)?;
        mem::populate_huge(scratch.addr() + from, BLOCK_BYTES)?;
        scratch.write(from, 7);
        let start_ns = clock::fine_ns();
        trial::move_second_block(&scratch)?;
        fastest_ns = fastest_ns.min(clock::fine_ns() - start_ns);
        if scratch.read(to) != 7 || scratch.read(from) != 0 {
            return Ok(Finding::missing("accepted, but the page stayed where it was"));
        }
    }
    Ok(Finding::available(format!("2 MiB moved in {:.1} us", fastest_ns as f64 / 1000.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::{Availability, finding_of};

    /// Each word of a setting must lead to its state. If the file of the setting is missing, the state must be missing;
    /// if all of `/sys` is missing, the state must be unknown.
    #[test]
    fn settings_lead_to_states() {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        let judge = || finding_of(setting_finding(&system, THP_DEFRAG_PATH, &["madvise"], &["defer"])).state;
        assert_eq!(judge(), Availability::Unknown);

        let path = system.path(THP_DEFRAG_PATH);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        assert_eq!(judge(), Availability::Missing);

        for (text, state) in [
            ("always [madvise] never\n", Availability::Available),
            ("always [defer] madvise never\n", Availability::Limited),
            ("always madvise [never]\n", Availability::Missing),
            ("?\n", Availability::Unknown),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(judge(), state, "{text}");
        }
    }

    /// Reserved pages that are free but promised to a mapping must count as unavailable.
    #[test]
    fn reserved_pages_lead_to_states() {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        assert_eq!(finding_of(probe_reserved_pages(&system)).state, Availability::Unknown);
        let folder = system.path(HUGETLB_FOLDER);
        std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
        assert_eq!(finding_of(probe_reserved_pages(&system)).state, Availability::Missing);
        std::fs::create_dir_all(&folder).unwrap();
        for (total, free, promised, state) in [
            (0, 0, 0, Availability::Missing),
            (8, 8, 8, Availability::Limited),
            (8, 0, 0, Availability::Limited),
            (8, 5, 4, Availability::Available),
        ] {
            for (name, number) in [("nr_hugepages", total), ("free_hugepages", free), ("resv_hugepages", promised)] {
                std::fs::write(folder.join(name), format!("{number}\n")).unwrap();
            }
            assert_eq!(finding_of(probe_reserved_pages(&system)).state, state, "{total} {free} {promised}");
        }
    }

    /// A kernel without sizes below 2 MiB, and one that offers none of its sizes, must be told apart. The fix for the
    /// first is another kernel.
    #[test]
    fn page_sizes_are_read_from_settings() {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        assert_eq!(finding_of(probe_page_sizes(&system)).state, Availability::Unknown);
        let write = |path: &str, text: &str| {
            let path = system.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(THP_ENABLED_PATH, "always [madvise] never\n");
        assert_eq!(finding_of(probe_page_sizes(&system)).found, "this kernel has none");
        for kib in [16, 64] {
            write(&format!("{}/hugepages-{kib}kB/enabled", mthp::FOLDER), "always inherit madvise [never]\n");
        }
        let finding = finding_of(probe_page_sizes(&system));
        assert_eq!((finding.state, &*finding.found), (Availability::Missing, "none of 2 sizes is offered"));
        write(&format!("{}/hugepages-64kB/enabled", mthp::FOLDER), "always [inherit] madvise never\n");
        let Ok((_, offered)) = page_sizes(&system) else { panic!("the settings are readable") };
        assert_eq!(offered.bytes().collect::<Vec<_>>(), [64 << 10]);
    }

    #[test]
    fn other_huge_page_sizes_are_limited() {
        let root = tempfile::tempdir().unwrap();
        let system = SystemFiles { root: root.path().to_path_buf() };
        let path = system.path(HUGE_PAGE_SIZE_PATH);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        for (text, state) in [
            ("2097152\n", Availability::Available),
            ("536870912\n", Availability::Limited),
            ("many\n", Availability::Unknown),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(finding_of(probe_huge_page_size(&system)).state, state, "{text}");
        }
    }
}
