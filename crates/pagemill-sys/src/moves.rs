//! Moves pages from one address to another instead of copying their bytes.
//!
//! `UFFDIO_MOVE` (since Linux 6.8) takes 1.8 us per huge page and leaves the mappings unchanged. `mremap` is
//! unsuitable: if it refuses a source that consists of several mappings, it has already unmapped the target. Each call
//! opens and closes its own userfaultfd, because a fork child that inherited the descriptor would act on its parent.
#![allow(unsafe_code)] // the userfaultfd calls

use crate::file::Fd;
use crate::result::check_result;
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use std::io;

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_AA01;
const UFFDIO_MOVE: libc::c_ulong = 0xC028_AA05;
const UFFD_FEATURE_MOVE: u64 = 1 << 16;
/// Flag of a userfaultfd that handles only faults of user code, which needs no privilege. rustix has no name for the
/// flag.
pub(crate) const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
const UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES: u64 = 1 << 1;

/// The kernel's `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// The kernel's `struct uffdio_range`.
#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// The kernel's `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// The kernel's `struct uffdio_move`.
#[repr(C)]
struct UffdioMove {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

/// A userfaultfd that can move pages. Dropping the value closes it.
struct Mover(Fd);

impl Mover {
    fn open() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK | USER_MODE_ONLY;
        // SAFETY: the call only creates a descriptor.
        let mover = Self(unsafe { userfaultfd(flags) }?.into());
        let mut api = UffdioApi { api: UFFD_API, features: UFFD_FEATURE_MOVE, ioctls: 0 };
        // A kernel before 6.8 has userfaultfd, but not this feature.
        mover.ioctl(UFFDIO_API, &raw mut api).map_err(|_| io::Error::from_raw_os_error(libc::ENOSYS))?;
        Ok(mover)
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: *mut T) -> io::Result<()> {
        // SAFETY: `argument` points to the structure that `request` reads and writes.
        check_result(unsafe { libc::ioctl(self.0.descriptor_number(), request as _, argument) })
    }
}

/// Checks that this process may use `UFFDIO_MOVE`, which moves pages between addresses.
///
/// # Errors
///
/// `ENOSYS`, `EPERM`, or `EINVAL` from a kernel before 6.8.
pub fn can_move() -> io::Result<()> {
    Mover::open().map(drop)
}

/// Moves the pages of `src` to `dst`. Returns how many bytes were moved, counted from the start of the ranges.
///
/// Where `src` has no page, `dst` gets no page either. The moved range of `src` reads zero afterwards.
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
    let mover = Mover::open()?;
    let range = UffdioRange { start: dst as u64, len: len_bytes as u64 };
    let mut register = UffdioRegister { range, mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 };
    mover.ioctl(UFFDIO_REGISTER, &raw mut register)?;
    let mut moved = 0;
    let mut failure = None;
    while moved < len_bytes {
        let mut request = UffdioMove {
            dst: (dst + moved) as u64,
            src: (src + moved) as u64,
            len: (len_bytes - moved) as u64,
            mode: UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES,
            moved: 0,
        };
        let result = mover.ioctl(UFFDIO_MOVE, &raw mut request);
        if request.moved > 0 {
            moved += request.moved as usize;
        }
        assert!(moved <= len_bytes);
        match result {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && request.moved > 0 => {}
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    // Unregistering needs to wake no thread, because none can have faulted in `dst`. Closing would also unregister. An
    // error here does not change what was moved.
    let _ = mover.ioctl(UFFDIO_UNREGISTER, &raw mut register.range);
    match failure {
        Some(error) if moved == 0 => Err(error),
        _ => Ok(moved),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem;

    const BLOCK_BYTES: usize = 2 << 20;

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
