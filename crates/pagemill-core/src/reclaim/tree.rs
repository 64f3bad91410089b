//! The page that a process tree shares: its limit, the charge of each member process, and requests to give memory back.
//!
//! The page contains no lock, so a member that dies cannot leave one locked. It stores no total, which could become
//! stale: the total is the sum of the members' own words. The charge of a killed member ends when a sweep finds that
//! the process does not exist. A request is an amount and a sequence number. Each member subtracts the bytes that it
//! accepts from the amount by compare-and-swap. It gives these bytes back, and stores the sequence number as answered.
//!
//! The page is untrusted: members check the values that matter to them, and wait for answers for at most [`ANSWER_MS`].
#![allow(unsafe_code)] // the shared page is reached through a pointer

use crate::error::{Error, Result};
use pagemill_sys::file::{self, Access, PublishedFile};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::process::{self, Identity};
use std::ffi::CStr;
use std::io;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::time::Duration;

/// Maximum number of members that a tree can list. Further members obey the limit, but their charge is not counted.
pub const MAX_MEMBERS: usize = 1024;

/// Maximum time, in milliseconds, to wait for answers of siblings to a request.
pub const ANSWER_MS: u64 = 25;

/// First word of the page. It identifies the file format.
const MAGIC: u64 = u64::from_le_bytes(*b"pm-tree1");

/// Value of [`Member::helper_state`]: the member has a helper thread that answers requests.
const HELPER_LISTENS: u32 = 1;
/// Value of [`Member::helper_state`]: the member's helper thread did not answer the last request in time.
const HELPER_UNRESPONSIVE: u32 = 2;

/// The value of a limit in bytes that means no limit.
pub const UNLIMITED: u64 = u64::MAX;

/// The slot of a member process on the shared page of its tree.
#[repr(C, align(64))]
struct Member {
    /// Process id in the low half, low half of the start time in the high half; 0 in a free slot.
    id: AtomicU64,
    /// Bytes that the member published as resident.
    resident: AtomicU64,
    /// Overcommitted bytes of the member that are not known to be touched.
    untouched: AtomicU64,
    /// Bytes that the member could give back at once.
    giveable: AtomicU64,
    /// Incremented to wake the member's helper, which sleeps on it.
    wake: AtomicU32,
    /// Number of the latest request that the member has answered.
    answered: AtomicU32,
    /// [`HELPER_LISTENS`] while a helper runs, [`HELPER_UNRESPONSIVE`] after the helper did not answer in time, else 0.
    helper_state: AtomicU32,
    /// Unused.
    reserved: AtomicU32,
}

impl Member {
    fn wake(&self) {
        self.wake.fetch_add(1, AcqRel);
        futex::wake(&self.wake, 1, Scope::Shared);
    }
}

/// The shared page of a process tree, mapped from a file.
///
/// # Invariants
///
/// All bit patterns are valid: the page may be mapped from any file.
///
/// ```
/// use pagemill_testbed::Testbed;
/// use pagemill_core::reclaim::tree::TreePage;
///
/// # let path = std::env::temp_dir().join(format!("pagemill-doc-tree-{}", std::process::id()));
/// let file = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
/// let tree = TreePage::create(&file, 512 << 20)?; // as `pagemill run --limit 512M` does
/// let place = tree.enter(Testbed::of_process()?.figures().identity).unwrap();
/// place.publish(30 << 20, 0, 10 << 20); // resident, untouched, giveable
/// assert_eq!((tree.totals().resident, tree.totals().members), (30 << 20, 1));
/// assert_eq!(TreePage::read_amounts(&file, None).unwrap(), tree.amounts()); // as another process reads them
/// place.leave();
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[repr(C)]
pub struct TreePage {
    magic: AtomicU64,
    limit: AtomicU64,
    /// Requested bytes that no member has accepted yet.
    wanted: AtomicU64,
    /// Largest sum of the members' resident bytes so far.
    peak: AtomicU64,
    /// Largest sum so far of the members' resident bytes, minus the bytes that the members could have given back at
    /// once.
    net_peak: AtomicU64,
    /// Number of processes of the tree that found no free slot.
    unlisted: AtomicU64,
    /// Number of the latest request.
    request: AtomicU32,
    /// Incremented with every answer; processes that wait for answers sleep on it.
    answers: AtomicU32,
    /// Slots from this index on were never used.
    high_water: AtomicU32,
    /// Number of programs that were started in the tree, and of fork children.
    started: AtomicU32,
    members: [Member; MAX_MEMBERS],
}

/// A copy of the tree's own words on its page, without the slots of its members. Commands read it, because the page is
/// untrusted and a mapping of it could be truncated.
///
/// Example: [`TreePage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeHeader {
    /// [`UNLIMITED`] if the tree has no limit.
    pub limit: u64,
    /// Largest sum of the members' resident bytes so far.
    pub peak: u64,
    /// Largest sum so far of the members' resident bytes without the giveable ones.
    pub net_peak: u64,
    /// Number of processes of the tree that found no free slot.
    pub unlisted: u64,
    /// Number of programs that were started in the tree, and of fork children.
    pub started: u32,
}

impl TreeHeader {
    /// Bytes of the page before the first slot.
    const LEN: usize = std::mem::offset_of!(TreePage, members);

    /// Reads the header of the page at `path`. With `owner`, the file must belong to that user. Takes some 5 us.
    ///
    /// # Errors
    ///
    /// Errors of reading the file; `InvalidData` if it is not the page of a tree.
    pub fn read(path: &CStr, owner: Option<u32>) -> std::io::Result<Self> {
        let mut bytes = [0; Self::LEN];
        PublishedFile::open(path, owner)?.read(&mut bytes)?;
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        if word(0) != MAGIC {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        let started = std::mem::offset_of!(TreePage, started);
        Ok(Self {
            limit: word(std::mem::offset_of!(TreePage, limit)),
            peak: word(std::mem::offset_of!(TreePage, peak)),
            net_peak: word(std::mem::offset_of!(TreePage, net_peak)),
            unlisted: word(std::mem::offset_of!(TreePage, unlisted)),
            started: u32::from_ne_bytes(std::array::from_fn(|byte| bytes[started + byte])),
        })
    }
}

/// The sums of the published charges of all members of a tree, at one time.
///
/// Example: [`TreePage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub resident: u64,
    /// Bytes overcommitted to programs and not known to be touched.
    pub untouched: u64,
    pub giveable: u64,
    pub members: usize,
}

/// What a tree's page says about the tree at one time.
///
/// Example: [`TreePage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeAmounts {
    /// Limit of the resident bytes of all members together; [`UNLIMITED`] if there is none.
    pub limit: u64,
    pub totals: Totals,
    /// Largest sum of the members' resident bytes so far.
    pub peak: u64,
    /// Largest sum so far of the members' resident bytes, minus the bytes that they could have given back at once.
    pub net_peak: u64,
    /// Number of programs that were started in the tree, and of fork children.
    pub started: u32,
    /// Number of processes of the tree that found no free slot.
    pub unlisted: u64,
}

impl TreePage {
    /// Length of the file in bytes.
    pub const LEN: usize = size_of::<Self>();

    /// Creates the file of a new tree, and maps it.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the file cannot be created or mapped.
    pub fn create(path: &CStr, limit: u64) -> Result<&'static Self> {
        let page = Self::map_page(path, Access::Create)?;
        page.limit.store(limit, Relaxed);
        page.magic.store(MAGIC, Release);
        Ok(page)
    }

    /// Maps the file of an existing tree.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the file cannot be mapped, or is not the page of a tree.
    pub fn join(path: &CStr) -> Result<&'static Self> {
        let page = Self::map_page(path, Access::Update)?;
        if page.magic.load(Acquire) == MAGIC {
            Ok(page)
        } else {
            let cause = io::ErrorKind::InvalidData.into();
            Err(Error::System { doing: "joining the process tree", cause })
        }
    }

    /// Reads the amounts of the tree whose page is the file at `path`, without mapping it. `owner` is the user that must
    /// own the file; `None` skips the check. Takes 64 KiB of stack.
    ///
    /// # Errors
    ///
    /// The error of reading the file; `InvalidData` if it is not the page of a tree.
    pub fn read_amounts(path: &CStr, owner: Option<u32>) -> io::Result<TreeAmounts> {
        // SAFETY: every bit pattern is valid (type invariant).
        let mut page: Self = unsafe { std::mem::zeroed() };
        // SAFETY: these are the bytes of a local value for which every bit pattern is valid (type invariant).
        let bytes = unsafe { std::slice::from_raw_parts_mut((&raw mut page).cast::<u8>(), Self::LEN) };
        PublishedFile::open(path, owner)?.read(bytes)?;
        if page.magic.load(Relaxed) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(page.amounts())
    }

    /// Returns the limit, the sums over the members, and the peaks.
    pub fn amounts(&self) -> TreeAmounts {
        let (peak, net_peak) = self.peak();
        TreeAmounts {
            limit: self.limit(),
            totals: self.totals(),
            peak,
            net_peak,
            started: self.started(),
            unlisted: self.unlisted(),
        }
    }

    /// Maps the file of a tree's page.
    fn map_page(path: &CStr, access: Access) -> Result<&'static Self> {
        let addr =
            file::map_shared(path, Self::LEN, access).map_err(Error::system("mapping the page of the process tree"))?;
        // SAFETY: long enough, page aligned and never unmapped; all bit patterns are valid.
        Ok(unsafe { &*(addr as *const Self) })
    }

    /// Returns the number of bytes that all members together may have resident.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Returns the slots of the page that members have ever used.
    fn used_slots(&self) -> &[Member] {
        &self.members[..(self.high_water.load(Acquire) as usize).min(MAX_MEMBERS)]
    }

    /// Takes a slot for this process: the slot it had before an `exec`, or a free one. Returns `None` if all are taken.
    pub fn enter(&'static self, identity: Identity) -> Option<MemberSlot> {
        let MemberId(id) = MemberId::of(identity);
        assert!(id != 0, "0 marks a free slot");
        if let Some(index) = self.used_slots().iter().position(|member| member.id.load(Relaxed) == id) {
            return Some(self.initialize_slot(index));
        }
        let take_slot = || {
            self.members.iter().position(|member| {
                member.id.load(Relaxed) == 0 && member.id.compare_exchange(0, id, AcqRel, Relaxed).is_ok()
            })
        };
        let taken = take_slot().or_else(|| {
            self.sweep();
            take_slot()
        });
        let Some(index) = taken else {
            self.unlisted.fetch_add(1, Relaxed);
            return None;
        };
        self.high_water.fetch_max(index as u32 + 1, AcqRel);
        Some(self.initialize_slot(index))
    }

    /// Resets the words of a slot that this process has taken.
    fn initialize_slot(&'static self, index: usize) -> MemberSlot {
        let place = MemberSlot { page: self, index };
        place.publish(0, 0, 0);
        place.listen(false);
        place
    }

    /// Frees the slots of dead processes. Reads `/proc` once per member. Returns the number of freed slots.
    pub fn sweep(&self) -> usize {
        let mut ended = 0;
        for member in self.used_slots() {
            let id = member.id.load(Acquire);
            if id != 0 && !MemberId(id).is_alive() {
                // Clear only the identity: the other words do not count without it, and may belong to a new member by
                // now.
                ended += usize::from(member.id.compare_exchange(id, 0, AcqRel, Relaxed).is_ok());
            }
        }
        ended
    }

    /// Returns the members, some of which may have ended.
    pub fn members(&self) -> impl Iterator<Item = MemberId> {
        self.used_slots().iter().map(|member| MemberId(member.id.load(Relaxed))).filter(|id| id.0 != 0)
    }

    /// Sums up the charges of the members. Costs some nanoseconds per slot that was ever used.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for member in self.used_slots() {
            if member.id.load(Relaxed) != 0 {
                totals.resident = totals.resident.saturating_add(member.resident.load(Relaxed));
                totals.untouched = totals.untouched.saturating_add(member.untouched.load(Relaxed));
                totals.giveable = totals.giveable.saturating_add(member.giveable.load(Relaxed));
                totals.members += 1;
            }
        }
        totals
    }

    /// As [`TreePage::totals`], with `own` added. If this process has a slot, `place`, its charge there, which it
    /// published last, does not count.
    pub fn totals_with(&self, place: Option<MemberSlot>, own: Totals) -> Totals {
        let totals = self.totals();
        let (resident, untouched) = place.map_or((0, 0), |place| {
            let member = place.member();
            (member.resident.load(Relaxed), member.untouched.load(Relaxed))
        });
        Totals {
            resident: totals.resident.saturating_sub(resident).saturating_add(own.resident),
            untouched: totals.untouched.saturating_sub(untouched).saturating_add(own.untouched),
            ..totals
        }
    }

    /// Wakes the helper thread of a member process.
    pub fn wake(&self, identity: Identity) {
        let MemberId(id) = MemberId::of(identity);
        self.used_slots().iter().filter(|member| member.id.load(Relaxed) == id).for_each(Member::wake);
    }

    /// Raises the two peaks of the tree to the sums in `totals`, if these are larger.
    pub fn raise_peaks(&self, totals: Totals) {
        self.peak.fetch_max(totals.resident, Relaxed);
        self.net_peak.fetch_max(totals.resident.saturating_sub(totals.giveable), Relaxed);
    }

    /// Returns the largest sum of the members' resident bytes so far, and the largest sum minus the bytes that could
    /// have been given back at once.
    pub fn peak(&self) -> (u64, u64) {
        (self.peak.load(Relaxed), self.net_peak.load(Relaxed))
    }

    /// Counts a program or a fork child that was started in the tree. Most programs are too small to take a slot.
    pub fn count_started_program(&self) {
        self.started.fetch_add(1, Relaxed);
    }

    /// Records the peak of a process that ends and has published no charge.
    pub fn record_unpublished_peak(&self, peak_bytes: u64) {
        let totals = self.totals();
        self.raise_peaks(Totals { resident: totals.resident.saturating_add(peak_bytes), ..totals });
    }

    /// Returns the number of programs that were started in the tree, and of fork children. A process counts again for
    /// each `exec`.
    pub fn started(&self) -> u32 {
        self.started.load(Relaxed)
    }

    /// Returns the number of processes of the tree that found no free slot.
    pub fn unlisted(&self) -> u64 {
        self.unlisted.load(Relaxed)
    }

    /// Requests `bytes` from all members but `own`. Waits until all members with a helper have answered, until
    /// `is_enough` returns true, or for [`ANSWER_MS`].
    ///
    /// Returns the bytes by which the total of the other members fell.
    pub fn ask(&self, bytes: u64, own: Option<MemberSlot>, is_enough: impl Fn() -> bool) -> u64 {
        let others = || {
            let totals = self.totals();
            totals.resident.saturating_sub(own.map_or(0, |place| place.member().resident.load(Relaxed)))
        };
        let before = others();
        self.wanted.fetch_add(bytes, Relaxed);
        let request = self.request.fetch_add(1, AcqRel).wrapping_add(1);
        // A member that did not answer an earlier request in time gets this request, but is not waited for.
        let mut awaited = [false; MAX_MEMBERS];
        for (index, member) in self.used_slots().iter().enumerate() {
            let is_own = own.is_some_and(|place| place.index == index);
            if is_own || member.id.load(Relaxed) == 0 || member.helper_state.load(Relaxed) == 0 {
                continue;
            }
            awaited[index] = member.helper_state.load(Relaxed) == HELPER_LISTENS;
            member.wake();
        }
        self.wait_for_answers(&awaited, request, is_enough);
        let left = bytes.saturating_sub(before.saturating_sub(others()));
        let _ = self.wanted.fetch_update(Relaxed, Relaxed, |wanted| Some(wanted.saturating_sub(left)));
        before.saturating_sub(others())
    }

    /// Waits until the `awaited` members have answered `request`, at most [`ANSWER_MS`]. Marks members that are late as
    /// unresponsive.
    fn wait_for_answers(&self, awaited: &[bool; MAX_MEMBERS], request: u32, is_enough: impl Fn() -> bool) {
        let is_late = |member: &Member| (member.answered.load(Acquire).wrapping_sub(request) as i32) < 0;
        let late = || self.members.iter().zip(awaited).filter(|(member, is_awaited)| **is_awaited && is_late(member));
        for _ in 0..ANSWER_MS {
            let seen = self.answers.load(Acquire);
            if late().all(|(member, _)| member.id.load(Relaxed) == 0) || is_enough() {
                return;
            }
            futex::wait(&self.answers, seen, Some(Duration::from_millis(1)), Scope::Shared);
        }
        for (member, _) in late() {
            let _ = member.helper_state.compare_exchange(HELPER_LISTENS, HELPER_UNRESPONSIVE, Relaxed, Relaxed);
        }
    }
}

/// The process id of a member in the low half, and the low half of the process's start time in the high half.
///
/// Example: [`TreePage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberId(u64);

impl MemberId {
    fn of(identity: Identity) -> Self {
        Self(u64::from(identity.pid) | identity.start_ticks << 32)
    }

    pub fn pid(self) -> u32 {
        self.0 as u32
    }

    /// Whether the process is running. Reads `/proc` once. Without `/proc` every process counts as running.
    pub fn is_alive(self) -> bool {
        match process::identity(self.pid()) {
            Some(now) => [0, now.start_ticks & 0xFFFF_FFFF].contains(&(self.0 >> 32)),
            None => !process::has_proc(),
        }
    }
}

/// The slot of this process on the page of its tree.
///
/// Example: [`TreePage`].
#[derive(Clone, Copy)]
pub struct MemberSlot {
    page: &'static TreePage,
    index: usize,
}

impl MemberSlot {
    fn member(&self) -> &'static Member {
        &self.page.members[self.index]
    }

    pub fn page(&self) -> &'static TreePage {
        self.page
    }

    /// Returns the word on which the helper thread of this process sleeps.
    pub fn wake_word(&self) -> &'static AtomicU32 {
        &self.member().wake
    }

    /// Wakes the helper of this process.
    pub fn wake(&self) {
        self.member().wake();
    }

    /// Publishes the charge and the giveable bytes of this process.
    pub fn publish(&self, resident: u64, untouched: u64, giveable: u64) {
        debug_assert!(giveable <= resident, "only resident bytes can be given back");
        let member = self.member();
        member.resident.store(resident, Relaxed);
        member.untouched.store(untouched, Relaxed);
        member.giveable.store(giveable, Relaxed);
    }

    /// Returns the giveable bytes that this process last published.
    pub fn published_giveable(&self) -> u64 {
        self.member().giveable.load(Relaxed)
    }

    /// Publishes whether this process has a helper thread that answers requests of its siblings.
    pub fn listen(&self, is_listening: bool) {
        self.member().answered.store(self.page.request.load(Relaxed), Relaxed);
        self.member().helper_state.store(if is_listening { HELPER_LISTENS } else { 0 }, Release);
    }

    /// Answers an open request. Calls `give` with the bytes that this member accepts of the request, at most
    /// `giveable`. Returns the bytes given back, or `None` without an open request.
    pub fn answer(&self, giveable: u64, give: impl FnOnce(u64) -> u64) -> Option<u64> {
        let (page, member) = (self.page, self.member());
        let request = page.request.load(Acquire);
        if member.answered.load(Relaxed) == request {
            return None;
        }
        let mut part = 0;
        let _ = page.wanted.fetch_update(AcqRel, Relaxed, |wanted| {
            part = wanted.min(giveable);
            Some(wanted - part)
        });
        debug_assert!(part <= giveable, "no more is accepted than can be given");
        let given = if part > 0 { give(part) } else { 0 };
        page.wanted.fetch_add(part.saturating_sub(given), Relaxed);
        member.answered.store(request, Release);
        let _ = member.helper_state.compare_exchange(HELPER_UNRESPONSIVE, HELPER_LISTENS, Relaxed, Relaxed);
        page.answers.fetch_add(1, AcqRel);
        futex::wake(&page.answers, i32::MAX, Scope::Shared);
        Some(given)
    }

    /// Frees the slot of this process, at the end of the process.
    pub fn leave(&self) {
        self.publish(0, 0, 0);
        self.member().helper_state.store(0, Relaxed);
        self.member().id.store(0, Release);
    }
}

/// Links a process to the page of its tree and to its slot there. Replaced in a fork child.
#[derive(Default)]
pub(super) struct Membership {
    page: AtomicPtr<TreePage>,
    /// Index of the slot plus one; 0 for a process without a slot.
    index: AtomicUsize,
}

impl Membership {
    pub fn set(&self, page: &'static TreePage, place: Option<MemberSlot>) {
        debug_assert!(place.is_none_or(|place| std::ptr::eq(place.page, page)), "the slot is on the page");
        self.index.store(place.map_or(0, |place| place.index + 1), Relaxed);
        self.page.store(std::ptr::from_ref(page).cast_mut(), Release);
    }

    /// Removes the link to the slot. The page, and with it the tree's limit, stays.
    pub fn forget_slot(&self) {
        self.index.store(0, Relaxed);
    }

    pub fn page(&self) -> Option<&'static TreePage> {
        // SAFETY: the pointer is null, or from a reference to a page that is never unmapped.
        unsafe { self.page.load(Acquire).as_ref() }
    }

    pub fn place(&self) -> Option<MemberSlot> {
        let index = self.index.load(Relaxed).checked_sub(1)?;
        debug_assert!(index < MAX_MEMBERS);
        Some(MemberSlot { page: self.page()?, index })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::ffi::CString;

    fn page(limit: u64) -> (tempfile::TempDir, &'static TreePage) {
        let folder = tempfile::tempdir().unwrap();
        let path = CString::new(folder.path().join("tree").to_str().unwrap()).unwrap();
        let page = TreePage::create(&path, limit).unwrap();
        assert!(std::ptr::eq(page, page) && TreePage::join(&path).unwrap().limit() == limit);
        (folder, page)
    }

    /// The header of a page is read from its file. It must have the limit, the peaks and the counts of the page. A file
    /// that is too short, or is no page, must be rejected.
    #[test]
    fn the_header_of_a_page_is_read() {
        let (folder, page) = page(7 << 20);
        page.raise_peaks(Totals { resident: 5 << 20, giveable: 1 << 20, ..Totals::default() });
        page.count_started_program();
        let path = |name: &str| CString::new(folder.path().join(name).to_str().unwrap()).unwrap();
        let header = TreeHeader::read(&path("tree"), None).unwrap();
        let expected = TreeHeader { limit: 7 << 20, peak: 5 << 20, net_peak: 4 << 20, unlisted: 0, started: 1 };
        assert_eq!(header, expected);
        for (name, len) in [("short", 8), ("zeros", TreePage::LEN)] {
            std::fs::write(folder.path().join(name), vec![0; len]).unwrap();
            assert!(TreeHeader::read(&path(name), None).is_err());
        }
    }

    fn fake_identity(number: u32) -> Identity {
        Identity { pid: 1 << 30 | number, start_ticks: 1 }
    }

    /// A sweep must end the charge of a dead member, and must keep that of a living one.
    #[test]
    fn a_sweep_ends_the_charge_of_dead_members() {
        let (_folder, page) = page(UNLIMITED);
        let own = page.enter(process::own_identity()).unwrap();
        own.publish(10, 0, 0);
        page.enter(fake_identity(1)).unwrap().publish(100, 5, 0);
        assert_eq!(page.totals().resident, 110);
        let members: Vec<_> = page.members().map(|member| (member.pid(), member.is_alive())).collect();
        assert_eq!(members, [(process::id(), true), (1 << 30 | 1, false)]);
        assert_eq!(page.sweep(), 1);
        assert_eq!(page.totals(), Totals { resident: 10, untouched: 0, giveable: 0, members: 1 });
        own.leave();
        assert_eq!(page.totals().members, 0);
    }

    /// All slots belong to dead processes. A living process that enters must get one of these slots.
    #[test]
    fn a_full_page_reuses_slots_of_dead_members() {
        let (_folder, page) = page(UNLIMITED);
        for number in 0..MAX_MEMBERS as u32 {
            page.enter(fake_identity(number)).unwrap();
        }
        assert_eq!(page.totals().members, MAX_MEMBERS);
        assert!(page.enter(process::own_identity()).is_some(), "the dead were swept");
        assert_eq!(page.unlisted(), 0);
    }

    /// A process takes a slot twice, as after `exec`. Both slots must be the same one, and the charge must be reset.
    #[test]
    fn a_process_that_enters_twice_keeps_its_slot() {
        let (_folder, page) = page(UNLIMITED);
        let first = page.enter(process::own_identity()).unwrap();
        first.publish(7, 0, 0);
        let second = page.enter(process::own_identity()).unwrap();
        assert_eq!(first.index, second.index);
        assert_eq!(page.totals().resident, 0);
    }

    /// A request is for more bytes than each of two members has. The two members together must give back exactly the
    /// requested bytes.
    #[test]
    fn siblings_together_give_back_the_requested_bytes() {
        let (_folder, page) = page(UNLIMITED);
        let places = [fake_identity(1), fake_identity(2)].map(|identity| page.enter(identity).unwrap());
        let held = [AtomicU64::new(60), AtomicU64::new(60)];
        for place in &places {
            place.publish(60, 0, 60);
            place.listen(true);
        }
        let answer = || {
            std::thread::scope(|scope| {
                for (place, held) in places.iter().zip(&held) {
                    scope.spawn(|| {
                        place.answer(held.load(Relaxed), |part| {
                            held.fetch_sub(part, Relaxed);
                            place.publish(held.load(Relaxed), 0, 0);
                            part
                        })
                    });
                }
            });
            false
        };
        assert_eq!(page.ask(80, None, answer), 80);
        assert_eq!(page.totals().resident, 40);
        assert_eq!(page.wanted.load(Relaxed), 0);
    }

    /// A member never answers. The first request must wait for that member as long as allowed. The second request must
    /// not wait.
    #[test]
    fn an_unresponsive_member_is_waited_for_once() {
        let (_folder, page) = page(UNLIMITED);
        page.enter(fake_identity(1)).unwrap().listen(true);
        for expected in [ANSWER_MS, 0] {
            let waits = std::cell::Cell::new(0);
            let is_enough = || {
                waits.set(waits.get() + 1);
                false
            };
            assert_eq!((page.ask(10, None, is_enough), waits.get()), (0, expected));
        }
    }
}
