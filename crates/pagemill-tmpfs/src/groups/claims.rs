//! The claims of groups: when the files that processes of a group closed are examined, and what counts then.

use super::{Group, GroupId, Groups, RecordedFile, WrittenBytes, guard_bytes};
use std::time::{Duration, Instant};

/// Interval of examinations of a group whose limit bounds the size.
const EXAMINATION_INTERVAL: Duration = Duration::from_secs(1);

/// The claims of a group, the memory of files that its processes closed, are examined when they are at least
/// `guard_bytes` of its limit divided by this number. Otherwise a group just below `guard_bytes` would cause an
/// examination with each close.
const CLAIMS_DIVISOR: u64 = 8;

/// Maximum number of groups whose claims are examined at a time, which takes some 0.3 ms per group.
const MAX_EXAMINED_GROUPS: usize = 8;

impl Groups {
    /// Records that a file grew by this much since its last close, and that a process of `group` closed it or a page is
    /// charged to `group`. The bytes count after [`Self::count_claims`].
    pub fn claim_written(&mut self, group: GroupId, bytes: WrittenBytes, file: RecordedFile) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.credit.claim(bytes, file);
            group.wrote_at = Instant::now();
        }
    }

    /// Records the present folder and name of a file that was renamed.
    pub fn record_name(&mut self, file: &RecordedFile) {
        self.groups.values_mut().for_each(|group| group.credit.record_name(file));
    }

    /// Returns the groups whose claims must be examined: at most `MAX_EXAMINED_GROUPS`, largest claims first. These are
    /// groups where counted and claimed bytes together reach the threshold ([`guard_bytes`]) at which their own limit,
    /// or an ancestor's, bounds the size of the tmpfs. The claimed bytes must be at least the threshold divided by
    /// `CLAIMS_DIVISOR`.
    ///
    /// If the counted bytes alone reach the threshold, a group is examined at most once a second, because its files may
    /// have been deleted meanwhile.
    pub fn groups_to_examine(&mut self, now: Instant) -> Vec<GroupId> {
        let has_claims = |group: &Group| group.credit.claimed().sum() > 0 && !group.credit.samples().is_empty();
        if !self.groups.values().any(has_claims) {
            return Vec::new();
        }
        self.read_limits();
        let counted = self.bytes_by_watch(Group::counted_bytes);
        let claimed = self.bytes_by_watch(|group| group.credit.claimed());
        let is_wanted = |watch: usize| {
            let guard = guard_bytes(self.watches[watch].limit.soft_bytes);
            let (counted, claimed) = (counted[watch].sum(), claimed[watch].sum());
            let is_new = counted < guard;
            (counted.saturating_add(claimed) >= guard && claimed >= guard / CLAIMS_DIVISOR).then_some(is_new)
        };
        let is_wanted = |group: &Group| {
            let is_due = group.examined_at.is_none_or(|at| now >= at + EXAMINATION_INTERVAL);
            let mut watches = group.watches.iter().filter_map(|watch| is_wanted(*watch));
            has_claims(group) && watches.any(|is_new| is_new || is_due)
        };
        let wanted = self.groups.iter().filter(|(_, group)| is_wanted(group));
        let mut wanted: Vec<_> = wanted.map(|(id, group)| (group.credit.claimed().sum(), *id)).collect();
        wanted.sort_unstable_by(|left, right| right.cmp(left));
        wanted.into_iter().take(MAX_EXAMINED_GROUPS).map(|(_, id)| id).collect()
    }

    /// Returns the claims of a group that were not examined yet.
    #[cfg(test)]
    pub fn claimed_bytes(&self, group: GroupId) -> u64 {
        self.groups.get(&group).map_or(0, |group| group.credit.claimed().sum())
    }

    /// Returns some of the files that processes of a group closed (its samples).
    pub fn samples(&self, group: GroupId) -> Vec<RecordedFile> {
        self.groups.get(&group).map_or_else(Vec::new, |group| group.credit.samples().to_vec())
    }

    /// Counts the claims of a group after its samples were examined at `now`. Of the `examined` samples, those in
    /// `charged` exist and are charged to the group.
    pub fn count_claims(&mut self, group: GroupId, charged: Vec<RecordedFile>, examined: usize, now: Instant) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.credit.count(charged, examined);
            group.examined_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Tree, file, in_files};
    use super::*;

    /// A close names a group. The bytes must count only after the closed files were examined. The examination must be
    /// due when the claims of all groups below a limit reach `guard_bytes` of that limit, and not before.
    #[test]
    fn claims_are_examined_at_the_guard() {
        const LIMIT: u64 = 512 << 20;
        let tree = Tree::new();
        tree.group("/app", &LIMIT.to_string(), LIMIT / 2);
        for (pid, name) in [(7, "/app/one"), (8, "/app/two")] {
            tree.group(name, "max", LIMIT / 4);
            tree.set(&format!("/proc/{pid}/cgroup"), &format!("0::{name}\n"));
        }
        tree.set("/cg/app/memory.stat", &format!("shmem {LIMIT}\n"));
        let mut groups = Groups::new(tree.root());
        let (one, two) = (groups.of_process(7), groups.of_process(8));
        let here = |groups: &mut Groups| groups.sample()[0].here_bytes;
        let (guard, now) = (guard_bytes(LIMIT), Instant::now());
        groups.claim_written(one, in_files(guard / 2), file(1));
        assert!(groups.groups_to_examine(now).is_empty());
        groups.claim_written(two, WrittenBytes { files: 0, inodes: guard / 2 }, file(2));
        assert_eq!((groups.groups_to_examine(now), here(&mut groups)), (vec![two, one], 0));
        groups.count_claims(one, groups.samples(one), groups.samples(one).len(), now);
        groups.count_claims(two, Vec::new(), groups.samples(two).len(), now);
        assert_eq!(
            (groups.groups_to_examine(now), here(&mut groups)),
            (vec![], guard / 2),
            "the files of two are gone"
        );
        groups.claim_written(two, in_files(guard / 2), file(3));
        assert_eq!(groups.groups_to_examine(now), [two]);
        groups.count_claims(two, groups.samples(two), groups.samples(two).len(), now);
        groups.claim_written(two, in_files(guard), file(4));
        assert_eq!((groups.groups_to_examine(now), here(&mut groups)), (vec![], guard), "the limit counts already");
    }

    /// The limit of a group bounds the size, and the group goes on writing. Its claims must be examined again after a
    /// second, and not before. If the examination finds no file, the limit must no longer count, and new claims must be
    /// examined at once.
    #[test]
    fn counted_claims_are_examined_again() {
        const LIMIT: u64 = 512 << 20;
        let tree = Tree::new();
        tree.group("/app", &LIMIT.to_string(), LIMIT / 2);
        tree.set("/cg/app/memory.stat", &format!("shmem {LIMIT}\n"));
        tree.set("/proc/7/cgroup", "0::/app\n");
        let mut groups = Groups::new(tree.root());
        let app = groups.of_process(7);
        let (guard, now) = (guard_bytes(LIMIT), Instant::now());
        groups.claim_written(app, in_files(guard), file(1));
        assert_eq!(groups.groups_to_examine(now), [app]);
        groups.count_claims(app, groups.samples(app), groups.samples(app).len(), now);
        let later = now + EXAMINATION_INTERVAL;
        groups.claim_written(app, in_files(guard / CLAIMS_DIVISOR - 1), file(2));
        assert!(groups.groups_to_examine(later).is_empty(), "the claims are small");
        groups.claim_written(app, in_files(1), file(3));
        assert!(groups.groups_to_examine(later - Duration::from_nanos(1)).is_empty(), "the last one is recent");
        assert_eq!(groups.groups_to_examine(later), [app]);
        groups.count_claims(app, Vec::new(), groups.samples(app).len(), later);
        assert_eq!((groups.groups_to_examine(later), groups.sample()[0].here_bytes), (vec![], 0));
        groups.claim_written(app, in_files(guard), file(4));
        assert_eq!(groups.groups_to_examine(later), [app], "the limit does not count yet");
    }
}
