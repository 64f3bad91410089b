//! Moves pages from one address to another instead of copying their bytes.
//!
//! `UFFDIO_MOVE` (since Linux 6.8) takes 1.8 us per huge page and leaves the mappings unchanged. `mremap` is
//! unsuitable: if it refuses a source that consists of several mappings, it has already unmapped the target. Each call
//! opens and closes its own userfaultfd, because a fork child that inherited the descriptor would act on its parent.
#![allow(unsafe_code)] // a function that moves the caller's pages

use crate::userfault::Userfault;
use std::io;

const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_AA01;
const UFFDIO_MOVE: libc::c_ulong = 0xC028_AA05;
const UFFD_FEATURE_MOVE: u64 = 1 << 16;
const REGISTER_MODE_MISSING: u64 = 1;
const MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;

/// In memory for software pages, mappings end one OS page before or behind the borders of these blocks.
const BLOCK_BYTES: u64 = 2 << 20;

/// Opens a userfaultfd that can move pages.
fn open_mover() -> io::Result<Userfault> {
    // A kernel before 6.8 has userfaultfd, but not this feature.
    Userfault::open(UFFD_FEATURE_MOVE).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => io::Error::from_raw_os_error(libc::ENOSYS),
        _ => error,
    })
}

/// Checks that this process may use `UFFDIO_MOVE`, which moves pages between addresses.
///
/// # Errors
///
/// `EPERM`; `ENOSYS` from a kernel before 6.8.
pub fn can_move() -> io::Result<()> {
    open_mover().map(drop)
}

/// Moves the pages of `src` to `dst`. Returns how many bytes were moved, counted from the start of the ranges.
///
/// Where `src` has no page, `dst` gets no page either. The moved range of `src` reads zero afterwards.
///
/// A range may consist of several mappings, but the kernel moves pages only from one mapping to one other. If it
/// refuses the whole range, the blocks of 2 MiB are moved one by one, so that huge pages stay whole. A block that the
/// kernel refuses, too, is moved in three parts: first OS page, middle, last OS page.
///
/// # Errors
///
/// The kernel's error if nothing was moved. After a partial move the caller must copy the rest.
///
/// # Safety
///
/// Both ranges must be private anonymous memory of the caller. `dst` must have no pages, and no other code may use it.
/// No thread may access `src` during the call.
pub unsafe fn move_pages(dst: usize, src: usize, len_bytes: usize) -> io::Result<usize> {
    assert!(dst.abs_diff(src) >= len_bytes, "the ranges overlap");
    assert!(len_bytes.is_multiple_of(crate::mem::os_page_bytes()));
    let mover = open_mover()?;
    let [dst, src, len] = [dst, src, len_bytes].map(|number| number as u64);
    mover.register(dst, len, REGISTER_MODE_MISSING)?;
    let (mut moved, mut failure) = (0, None);
    let may_be_cut = dst.abs_diff(src).is_multiple_of(BLOCK_BYTES);
    // Whether blocks are moved one by one, and the end of the block that is moved in three parts.
    let (mut is_by_block, mut parts_end) = (false, 0);
    while moved < len && failure.is_none() {
        let (rest, at) = (len - moved, src + moved);
        let block = BLOCK_BYTES - at % BLOCK_BYTES;
        let part = match is_by_block {
            true if at < parts_end => part_bytes(at).min(rest),
            true => block.min(rest),
            false => rest,
        };
        let mut request = [dst + moved, src + moved, part, MOVE_MODE_ALLOW_SRC_HOLES, 0];
        let result = mover.ioctl(UFFDIO_MOVE, &mut request);
        let is_refused = result.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL));
        if is_refused && may_be_cut && !is_by_block {
            is_by_block = true;
            continue;
        }
        if is_refused && may_be_cut && at >= parts_end {
            parts_end = at + block;
            continue;
        }
        // The kernel stores the bytes that it moved, or a negative error number.
        let moved_now = (request[4] as i64).max(0) as u64;
        moved += moved_now;
        assert!(moved <= len);
        failure = result.err().filter(|error| error.raw_os_error() != Some(libc::EAGAIN) || moved_now == 0);
    }
    // Unregistering needs to wake no thread, because none can have faulted in `dst`. Closing would also unregister. An
    // error here does not change what was moved.
    let _ = mover.ioctl(UFFDIO_UNREGISTER, &mut [dst, len]);
    match failure {
        Some(error) if moved == 0 => Err(error),
        _ => Ok(moved as usize),
    }
}

/// Returns the length of the part, of the three parts of a block, that starts at `addr`.
fn part_bytes(addr: u64) -> u64 {
    let page = crate::mem::os_page_bytes() as u64;
    let end = match addr % BLOCK_BYTES {
        0 => page,
        offset if offset < BLOCK_BYTES - page => BLOCK_BYTES - page,
        _ => BLOCK_BYTES,
    };
    end - addr % BLOCK_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem;

    const BLOCK_BYTES: usize = super::BLOCK_BYTES as usize;

    /// Moves blocks whose first or last OS page has other advice than the rest, so that both ranges consist of several
    /// mappings. All bytes must arrive.
    #[test]
    fn pages_of_several_mappings_are_moved() {
        let page = mem::os_page_bytes();
        let base = mem::map_sparse(8 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
        let (src, dst) = (base, base + 4 * BLOCK_BYTES);
        mem::forbid_huge(src + 2 * BLOCK_BYTES - page, 2 * page);
        mem::forbid_huge(dst + BLOCK_BYTES - page, 2 * page);
        mem::forbid_huge(dst + 3 * BLOCK_BYTES, page);
        // SAFETY: all addresses lie in the mapping made above, which no other code knows.
        unsafe {
            for at in (0..4 * BLOCK_BYTES).step_by(page) {
                ((src + at) as *mut u64).write(at as u64 + 1);
            }
            match move_pages(dst, src, 4 * BLOCK_BYTES) {
                Ok(moved) => assert_eq!(moved, 4 * BLOCK_BYTES),
                Err(error) => return eprintln!("skipped: UFFDIO_MOVE is unavailable here: {error}"),
            }
            for at in (0..4 * BLOCK_BYTES).step_by(page) {
                assert_eq!(((dst + at) as *const u64).read(), at as u64 + 1, "{at}");
            }
            mem::unreserve(base, 8 * BLOCK_BYTES);
        }
    }

    /// Of three blocks with a huge page each, the last has other advice, so that the range consists of two mappings. The
    /// others must stay huge pages, which are then at the target.
    #[test]
    fn huge_pages_stay_whole_beside_other_mappings() {
        let base = mem::map_sparse(8 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
        let (src, dst) = (base, base + 4 * BLOCK_BYTES);
        mem::allow_huge(src, 3 * BLOCK_BYTES);
        mem::allow_huge(dst, 3 * BLOCK_BYTES);
        // SAFETY: all addresses lie in the mapping made above, which no other code knows.
        unsafe {
            (0..3).for_each(|block| ((src + block * BLOCK_BYTES) as *mut u64).write(7));
            mem::forbid_huge(src + 2 * BLOCK_BYTES, BLOCK_BYTES);
            let huge_before = huge_bytes(src, dst);
            match move_pages(dst, src, 3 * BLOCK_BYTES) {
                Ok(moved) => assert_eq!(moved, 3 * BLOCK_BYTES),
                Err(error) => return eprintln!("skipped: UFFDIO_MOVE is unavailable here: {error}"),
            }
            if huge_before < 3 * BLOCK_BYTES {
                return eprintln!("skipped: the kernel provides no huge pages");
            }
            assert!(huge_bytes(dst, dst + 3 * BLOCK_BYTES) >= 2 * BLOCK_BYTES);
            mem::unreserve(base, 8 * BLOCK_BYTES);
        }
    }

    /// Returns the bytes of huge pages in the mappings between two addresses.
    fn huge_bytes(from: usize, to: usize) -> usize {
        let (mut is_inside, mut kib) = (false, 0);
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or_default();
            if let Some((begin, end)) = first.split_once('-').filter(|_| !first.ends_with(':')) {
                let [begin, end] = [begin, end].map(|text| usize::from_str_radix(text, 16).unwrap());
                is_inside = begin < to && end > from;
            } else if is_inside && first == "AnonHugePages:" {
                kib += words.next().unwrap().parse::<usize>().unwrap();
            }
        }
        kib << 10
    }

    /// Pages that are moved from one range to another must keep their bytes, and the source must read zero afterwards.
    #[test]
    fn pages_are_moved_with_their_bytes() {
        let base = mem::map_sparse(8 * BLOCK_BYTES, BLOCK_BYTES).unwrap();
        let (src, dst) = (base, base + 4 * BLOCK_BYTES);
        let pages = [0, 1, 511, 1024, 2047];
        // SAFETY: all addresses lie in the mapping made above, which no other code knows.
        unsafe {
            for page in pages {
                ((src + page * 4096) as *mut u64).write(page as u64 + 1);
            }
            match move_pages(dst, src, 4 * BLOCK_BYTES) {
                Ok(moved) => assert_eq!(moved, 4 * BLOCK_BYTES),
                Err(error) => return eprintln!("skipped: UFFDIO_MOVE is unavailable here: {error}"),
            }
            for page in pages {
                assert_eq!(((dst + page * 4096) as *const u64).read(), page as u64 + 1, "{page}");
                assert_eq!(((src + page * 4096) as *const u64).read(), 0, "{page}");
            }
            mem::unreserve(base, 8 * BLOCK_BYTES);
        }
    }
}
