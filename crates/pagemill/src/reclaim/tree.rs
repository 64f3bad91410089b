//! The page that a process tree shares: its limit, what each member holds, and requests to give back.
//!
//! There is no lock in it, so no member can die holding one, and no total that
//! could go stale: the total is the sum of the members' own words. A member
//! that was killed is found by its identity and its charge ends. A request is
//! an amount and a sequence number; members take their part of the amount with
//! compare-and-swap, give, and note the number as answered.
//!
//! The page is untrusted: members check what they read as far as it matters to
//! them, and wait for nobody longer than [`ANSWER_MS`].
#![allow(unsafe_code)] // the shared page is reached through a pointer

use crate::error::{Error, Result};
use pagemill_sys::file::{self, Access};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::process::{self, Identity};
use std::ffi::CStr;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::time::Duration;

/// Members that a tree can list. More go unlisted: they mind the limit, but nobody sees what they hold.
pub const CAPACITY: usize = 1024;

/// Longest wait for siblings to answer a request.
pub const ANSWER_MS: u64 = 25;

const MAGIC: u64 = u64::from_le_bytes(*b"pm-tree1");

const LISTENS: u32 = 1;
const DEAF: u32 = 2;

/// No limit.
pub const UNLIMITED: u64 = u64::MAX;

#[repr(C, align(64))]
struct Member {
    /// Process id in the low half, low half of the start time in the high half; 0: free.
    id: AtomicU64,
    resident: AtomicU64,
    untouched: AtomicU64,
    giveable: AtomicU64,
    /// Bumped to wake the member's helper.
    wake: AtomicU32,
    /// Latest request that the member has answered.
    answered: AtomicU32,
    /// [`LISTENS`] while a helper listens, [`DEAF`] while one should but did not answer in time, else 0.
    is_listening: AtomicU32,
    reserved: AtomicU32,
}

impl Member {
    fn wake(&self) {
        self.wake.fetch_add(1, AcqRel);
        futex::wake(&self.wake, 1, Scope::Shared);
    }
}

/// # Invariants
///
/// All bits are valid: it may be mapped from any file.
#[repr(C)]
pub struct TreePage {
    magic: AtomicU64,
    limit: AtomicU64,
    /// Bytes asked for and not yet given.
    wanted: AtomicU64,
    /// Largest sum of what the members had resident.
    peak: AtomicU64,
    /// Largest sum less what they could have given at once.
    net_peak: AtomicU64,
    /// Processes that found no place.
    unlisted: AtomicU64,
    /// Number of the latest request.
    request: AtomicU32,
    /// Bumped with every answer; requesters sleep on it.
    answers: AtomicU32,
    /// Places beyond this one were never used.
    high_water: AtomicU32,
    /// Processes that ever entered, those too that published no figures.
    entered: AtomicU32,
    members: [Member; CAPACITY],
}

/// Totals of a tree at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub resident: u64,
    /// Lent to programs, not known to be touched.
    pub untouched: u64,
    pub giveable: u64,
    pub members: usize,
}

impl TreePage {
    /// Bytes of the file.
    pub const LEN: usize = size_of::<Self>().next_multiple_of(64 << 10);

    /// Makes the page of a new tree.
    ///
    /// # Errors
    ///
    /// [`Error::System`].
    pub fn create(path: &CStr, limit: u64) -> Result<&'static Self> {
        let page = Self::map(path, Access::Create)?;
        page.limit.store(limit, Relaxed);
        page.magic.store(MAGIC, Release);
        Ok(page)
    }

    /// Maps the page of an existing tree.
    ///
    /// # Errors
    ///
    /// [`Error::System`], also for a file that is no such page.
    pub fn join(path: &CStr) -> Result<&'static Self> {
        let page = Self::map(path, Access::Update)?;
        if page.magic.load(Acquire) == MAGIC {
            Ok(page)
        } else {
            let cause = std::io::ErrorKind::InvalidData.into();
            Err(Error::System { doing: "joining the process tree", cause })
        }
    }

    fn map(path: &CStr, access: Access) -> Result<&'static Self> {
        // SAFETY: a new mapping, at no fixed address.
        let addr = unsafe { file::map_shared(path, Self::LEN, access, 0) }
            .map_err(Error::system("mapping the page of the process tree"))?;
        // SAFETY: long enough, page aligned, all bits valid, never unmapped.
        Ok(unsafe { &*(addr as *const Self) })
    }

    /// Bytes that the members together may have resident.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    pub fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Relaxed);
    }

    fn used_places(&self) -> &[Member] {
        &self.members[..(self.high_water.load(Acquire) as usize).min(CAPACITY)]
    }

    /// Takes a place for this process, the one it had before an `exec` if any. `None` if all are taken.
    pub fn enter(&'static self, who: Identity) -> Option<Place> {
        let id = pack(who);
        if let Some(index) = self.used_places().iter().position(|member| member.id.load(Relaxed) == id) {
            return Some(self.take(index));
        }
        self.entered.fetch_add(1, Relaxed);
        for round in 0..2 {
            for (index, member) in self.members.iter().enumerate() {
                if member.id.load(Relaxed) == 0 && member.id.compare_exchange(0, id, AcqRel, Relaxed).is_ok() {
                    self.high_water.fetch_max(index as u32 + 1, AcqRel);
                    return Some(self.take(index));
                }
            }
            if round == 0 {
                self.sweep();
            }
        }
        self.unlisted.fetch_add(1, Relaxed);
        None
    }

    fn take(&'static self, index: usize) -> Place {
        let member = &self.members[index];
        for word in [&member.resident, &member.untouched, &member.giveable] {
            word.store(0, Relaxed);
        }
        member.is_listening.store(0, Relaxed);
        member.answered.store(self.request.load(Relaxed), Relaxed);
        Place { page: self, index }
    }

    /// Ends the places of processes that are gone. Reads `/proc` once per member. Returns how many it ended.
    pub fn sweep(&self) -> usize {
        let mut ended = 0;
        for member in self.used_places() {
            let id = member.id.load(Acquire);
            if id != 0 && !is_alive(id) {
                // Only the identity: its numbers count no more, and may be a newcomer's by now.
                ended += usize::from(member.id.compare_exchange(id, 0, AcqRel, Relaxed).is_ok());
            }
        }
        ended
    }

    /// Sums up the members. Some nanoseconds per place that was ever used.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for member in self.used_places() {
            if member.id.load(Relaxed) != 0 {
                totals.resident = totals.resident.saturating_add(member.resident.load(Relaxed));
                totals.untouched = totals.untouched.saturating_add(member.untouched.load(Relaxed));
                totals.giveable = totals.giveable.saturating_add(member.giveable.load(Relaxed));
                totals.members += 1;
            }
        }
        totals
    }

    /// As [`TreePage::totals`], with one member's own numbers instead of those it published.
    pub fn totals_with(&self, place: Place, own: Totals) -> Totals {
        let (totals, published) = (self.totals(), place.member());
        let replace = |sum: u64, word: &AtomicU64, own: u64| sum.saturating_sub(word.load(Relaxed)).saturating_add(own);
        Totals {
            resident: replace(totals.resident, &published.resident, own.resident),
            untouched: replace(totals.untouched, &published.untouched, own.untouched),
            ..totals
        }
    }

    /// Wakes the helper of a member.
    pub fn wake(&self, who: Identity) {
        let id = pack(who);
        self.used_places().iter().filter(|member| member.id.load(Relaxed) == id).for_each(Member::wake);
    }

    /// Notes what the members have now.
    pub fn note_peak(&self, totals: Totals) {
        self.peak.fetch_max(totals.resident, Relaxed);
        self.net_peak.fetch_max(totals.resident.saturating_sub(totals.giveable), Relaxed);
    }

    /// The largest sum so far, and the largest less what could have been given back at once.
    pub fn peak(&self) -> (u64, u64) {
        (self.peak.load(Relaxed), self.net_peak.load(Relaxed))
    }

    /// Notes what a process held at most that ends and published nothing.
    pub(super) fn note_small(&self, peak_bytes: u64) {
        let totals = self.totals();
        self.note_peak(Totals { resident: totals.resident.saturating_add(peak_bytes), ..totals });
    }

    /// Processes that ever entered.
    pub fn entered(&self) -> u32 {
        self.entered.load(Relaxed)
    }

    /// Processes that found no place.
    pub fn unlisted(&self) -> u64 {
        self.unlisted.load(Relaxed)
    }

    /// Asks all members but `own` for `bytes` and waits until all who listen have answered, it is enough, or time is up.
    ///
    /// Returns the bytes by which the others' total fell.
    pub fn ask(&self, bytes: u64, own: Option<Place>, is_enough: impl Fn() -> bool) -> u64 {
        let others = || {
            let totals = self.totals();
            totals.resident.saturating_sub(own.map_or(0, |place| place.member().resident.load(Relaxed)))
        };
        let before = others();
        self.wanted.fetch_add(bytes, Relaxed);
        let request = self.request.fetch_add(1, AcqRel).wrapping_add(1);
        // Who did not answer in time before is asked, but not waited for.
        let mut awaited = [0u64; CAPACITY / 64];
        for (index, member) in self.used_places().iter().enumerate() {
            let is_own = own.is_some_and(|place| place.index == index);
            if is_own || member.id.load(Relaxed) == 0 || member.is_listening.load(Relaxed) == 0 {
                continue;
            }
            if member.is_listening.load(Relaxed) == LISTENS {
                awaited[index / 64] |= 1 << (index % 64);
            }
            member.wake();
        }
        self.wait_for(&awaited, request, is_enough);
        let left = bytes.saturating_sub(before.saturating_sub(others()));
        let _ = self.wanted.fetch_update(Relaxed, Relaxed, |wanted| Some(wanted.saturating_sub(left)));
        before.saturating_sub(others())
    }

    fn wait_for(&self, awaited: &[u64; CAPACITY / 64], request: u32, is_enough: impl Fn() -> bool) {
        for _ in 0..ANSWER_MS {
            let seen = self.answers.load(Acquire);
            let is_open = (0..CAPACITY).any(|index| {
                let member = &self.members[index];
                awaited[index / 64] >> (index % 64) & 1 == 1
                    && member.id.load(Relaxed) != 0
                    && (member.answered.load(Acquire).wrapping_sub(request) as i32) < 0
            });
            if !is_open || is_enough() {
                return;
            }
            futex::wait(&self.answers, seen, Some(Duration::from_millis(1)), Scope::Shared);
        }
        for (index, member) in self.used_places().iter().enumerate() {
            let is_late = (member.answered.load(Relaxed).wrapping_sub(request) as i32) < 0;
            if awaited[index / 64] >> (index % 64) & 1 == 1 && is_late {
                let _ = member.is_listening.compare_exchange(LISTENS, DEAF, Relaxed, Relaxed);
            }
        }
    }
}

/// This process's place in its tree.
#[derive(Clone, Copy)]
pub struct Place {
    page: &'static TreePage,
    index: usize,
}

impl Place {
    fn member(&self) -> &'static Member {
        &self.page.members[self.index]
    }

    pub fn page(&self) -> &'static TreePage {
        self.page
    }

    /// The word that the helper of this process sleeps on.
    pub fn wake_word(&self) -> &'static AtomicU32 {
        &self.member().wake
    }

    /// Wakes that helper.
    pub fn wake(&self) {
        self.member().wake();
    }

    /// Publishes what this process holds.
    pub fn publish(&self, resident: u64, untouched: u64, giveable: u64) {
        let member = self.member();
        member.resident.store(resident, Relaxed);
        member.untouched.store(untouched, Relaxed);
        member.giveable.store(giveable, Relaxed);
    }

    /// What this process last said it could give.
    pub fn published_giveable(&self) -> u64 {
        self.member().giveable.load(Relaxed)
    }

    /// Says whether a helper answers requests.
    pub fn listen(&self, is_listening: bool) {
        self.member().answered.store(self.page.request.load(Relaxed), Relaxed);
        self.member().is_listening.store(if is_listening { LISTENS } else { 0 }, Release);
    }

    /// Answers an open request: `give` is told how much is wanted (at most what it can give) and says what it gave.
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
        let given = if part > 0 { give(part) } else { 0 };
        page.wanted.fetch_add(part.saturating_sub(given), Relaxed);
        member.answered.store(request, Release);
        let _ = member.is_listening.compare_exchange(DEAF, LISTENS, Relaxed, Relaxed);
        page.answers.fetch_add(1, AcqRel);
        futex::wake(&page.answers, i32::MAX, Scope::Shared);
        Some(given)
    }

    /// Gives the place up, at the end of the process.
    pub fn leave(&self) {
        self.publish(0, 0, 0);
        self.member().is_listening.store(0, Relaxed);
        self.member().id.store(0, Release);
    }
}

/// What a process knows of its tree; replaced in a fork child.
#[derive(Default)]
pub(super) struct Membership {
    page: AtomicPtr<TreePage>,
    /// Place in the page plus one; 0 for a process that found none.
    index: AtomicUsize,
}

impl Membership {
    pub fn set(&self, page: &'static TreePage, place: Option<Place>) {
        self.index.store(place.map_or(0, |place| place.index + 1), Relaxed);
        self.page.store(std::ptr::from_ref(page).cast_mut(), Release);
    }

    /// Keeps the page and its limit, but has no place in it any more.
    pub fn give_up_place(&self) {
        self.index.store(0, Relaxed);
    }

    pub fn page(&self) -> Option<&'static TreePage> {
        // SAFETY: null, or set from a reference that is never unmapped.
        unsafe { self.page.load(Acquire).as_ref() }
    }

    pub fn place(&self) -> Option<Place> {
        let index = self.index.load(Relaxed).checked_sub(1)?;
        Some(Place { page: self.page()?, index })
    }
}

fn pack(who: Identity) -> u64 {
    u64::from(who.pid) | who.start_ticks << 32
}

fn is_alive(id: u64) -> bool {
    match process::identity(id as u32) {
        Some(now) => (id >> 32) == (now.start_ticks & 0xFFFF_FFFF) || id >> 32 == 0,
        None => !process::has_proc(),
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

    fn nobody(number: u32) -> Identity {
        Identity { pid: 1 << 30 | number, start_ticks: 1 }
    }

    /// The charge of a killed member ends when somebody sweeps; that of a living one stays.
    #[test]
    fn the_dead_hold_nothing() {
        let (_folder, page) = page(UNLIMITED);
        let own = page.enter(process::own_identity()).unwrap();
        own.publish(10, 0, 0);
        page.enter(nobody(1)).unwrap().publish(100, 5, 0);
        assert_eq!(page.totals().resident, 110);
        assert_eq!(page.sweep(), 1);
        assert_eq!(page.totals(), Totals { resident: 10, untouched: 0, giveable: 0, members: 1 });
        own.leave();
        assert_eq!(page.totals().members, 0);
    }

    /// A full page takes no more living members, but the places of dead ones.
    #[test]
    fn a_full_page_makes_room_for_the_living() {
        let (_folder, page) = page(UNLIMITED);
        for number in 0..CAPACITY as u32 {
            page.enter(nobody(number)).unwrap();
        }
        assert_eq!(page.totals().members, CAPACITY);
        assert!(page.enter(process::own_identity()).is_some(), "the dead were swept");
        assert_eq!(page.unlisted(), 0);
    }

    /// Entering twice (as after exec) takes the same place.
    #[test]
    fn a_process_has_one_place() {
        let (_folder, page) = page(UNLIMITED);
        let first = page.enter(process::own_identity()).unwrap();
        first.publish(7, 0, 0);
        let second = page.enter(process::own_identity()).unwrap();
        assert_eq!(first.index, second.index);
        assert_eq!(page.totals().resident, 0);
    }

    /// Two members are asked for less than both hold: together they give what was asked, not more. They answer while they are
    /// waited for, however long they take.
    #[test]
    fn siblings_share_a_request() {
        let (_folder, page) = page(UNLIMITED);
        let places = [nobody(1), nobody(2)].map(|who| page.enter(who).unwrap());
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

    /// A member that never answers costs one bounded wait, and none the second time.
    #[test]
    fn the_deaf_are_waited_for_once() {
        let (_folder, page) = page(UNLIMITED);
        page.enter(nobody(1)).unwrap().listen(true);
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
