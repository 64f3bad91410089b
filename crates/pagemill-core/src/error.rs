//! The error type of the crate. Each variant carries the quantities that explain the failure.

use crate::units::{BLOCK_BYTES, Bytes, os_page_bytes};
use std::fmt;
use std::io;

/// Why an operation of Pagemill failed. Converts to [`io::Error`].
///
/// ```
/// use pagemill::{Error, VolatileBuf};
///
/// let error = VolatileBuf::new(0).unwrap_err();
/// assert!(matches!(error, Error::BadLength { len_bytes: 0 }));
/// assert_eq!((error.errno(), error.to_string().as_str()), (22, "0 B is not a valid length"));
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// `wanted_bytes` more would exceed the memory limit, even after reclaim.
    NoMemory { wanted_bytes: u64, used_bytes: u64, limit_bytes: u64 },
    /// Too few of the huge pages that the administrator reserved (hugetlb) are free.
    NoHugetlb { wanted_bytes: u64 },
    /// The address space that was reserved for this kind of memory is used up.
    NoAddresses { wanted_bytes: u64 },
    /// The process has the maximum number of `what` (slab caches, for example) already.
    TooMany { what: &'static str, most: usize },
    /// The alignment is not a power of two, or too large.
    BadAlignment { align_bytes: usize },
    /// The kernel refused a request.
    System { doing: &'static str, cause: io::Error },
    /// The address was never allocated, or lies inside an allocation.
    NotAllocated { addr: usize },
    /// The allocation at this address has been freed already.
    FreedBefore { addr: usize, len_bytes: usize },
    /// The length is not valid for the operation.
    BadLength { len_bytes: u64 },
    /// The memory limit of a page cache is less than one of its pages.
    BadLimit { limit_bytes: u64, page_bytes: u64 },
    /// The chunk size of a partial volatile range is not a multiple of the OS page.
    BadChunk { chunk_bytes: u64 },
    /// The addresses are not whole OS pages, or end beyond the address space.
    BadRange { addr: usize, len_bytes: usize },
    /// A part of these addresses is not mapped.
    NotMapped { addr: usize, len_bytes: u64 },
    /// This kernel lacks a feature that the operation needs.
    Unsupported { what: &'static str },
    /// The object is not in the state that the operation requires.
    WrongState { what: &'static str },
    /// The range of the file ends beyond the largest file offset.
    BadOffset { offset: u64, len_bytes: u64 },
    /// The offset lies at or past the end of the file.
    PastEnd { offset: u64, size_bytes: u64 },
    /// The requested file size exceeds the largest possible one, `most_bytes`.
    FileTooLarge { size_bytes: u64, most_bytes: u64 },
    /// The file's store is read-only.
    ReadOnly,
    /// Other code uses the object, and did not release it in time.
    Busy { what: &'static str },
    /// The ratio that the caller passed is not 0 to 100 percent.
    BadRatio { percent: u32 },
    /// The machine has no NUMA node of this number.
    BadNode { node: usize, nodes: usize },
    /// The store behind a file failed.
    Store { doing: &'static str, cause: io::Error },
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The `errno` of this error, as the C ABI reports it.
    pub fn errno(&self) -> i32 {
        use libc::{EBADF, EBUSY, EFBIG, EINVAL, EIO, ENOMEM, ENXIO, EOPNOTSUPP};
        match self {
            Self::NoMemory { .. }
            | Self::NoHugetlb { .. }
            | Self::NoAddresses { .. }
            | Self::TooMany { .. }
            | Self::NotMapped { .. } => ENOMEM,
            Self::BadAlignment { .. }
            | Self::NotAllocated { .. }
            | Self::FreedBefore { .. }
            | Self::BadLength { .. }
            | Self::BadLimit { .. }
            | Self::BadChunk { .. }
            | Self::BadRange { .. }
            | Self::BadOffset { .. }
            | Self::BadRatio { .. }
            | Self::BadNode { .. }
            | Self::WrongState { .. } => EINVAL,
            Self::PastEnd { .. } => ENXIO,
            Self::FileTooLarge { .. } => EFBIG,
            Self::ReadOnly => EBADF,
            Self::Busy { .. } => EBUSY,
            Self::Store { cause, .. } => errno_of(cause).unwrap_or(EIO),
            Self::Unsupported { .. } => EOPNOTSUPP,
            Self::System { cause, .. } => errno_of(cause).unwrap_or(ENOMEM),
        }
    }

    /// Returns a function for `map_err` that wraps an I/O error, with the name of the operation that the kernel
    /// refused.
    pub fn system(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::System { doing, cause }
    }
}

/// Returns the error number of `cause`, also if `cause` was converted from an [`Error`].
fn errno_of(cause: &io::Error) -> Option<i32> {
    let inner = || cause.get_ref()?.downcast_ref::<Error>().map(Error::errno);
    cause.raw_os_error().or_else(inner)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory { wanted_bytes, used_bytes, limit_bytes } => {
                let [wanted, used, limit] = [wanted_bytes, used_bytes, limit_bytes].map(|bytes| Bytes(*bytes));
                write!(f, "no room for {wanted}: {used} of {limit} in use, nothing left to reclaim")
            }
            Self::NoHugetlb { wanted_bytes } => {
                let pages = wanted_bytes.div_ceil(BLOCK_BYTES as u64);
                write!(
                    f,
                    "too few reserved huge pages (hugetlb) are free: {pages} of 2 MiB are wanted; \
                     the administrator reserves them with /proc/sys/vm/nr_hugepages"
                )
            }
            Self::NoAddresses { wanted_bytes } => {
                write!(
                    f,
                    "no address space left for {}: the process has too many mappings (vm.max_map_count), \
                     or a limit of addresses (ulimit -v)",
                    Bytes(*wanted_bytes)
                )
            }
            Self::TooMany { what, most } => {
                write!(f, "the process has {most} {what}, the maximum: drop one, or share one")
            }
            Self::BadAlignment { align_bytes } => write!(f, "{align_bytes} is not a valid alignment"),
            Self::System { doing, cause } | Self::Store { doing, cause } => write!(f, "{doing}: {cause}"),
            Self::NotAllocated { addr } => write!(f, "{addr:#x} was not handed out by this allocator"),
            Self::FreedBefore { addr, len_bytes } => {
                write!(f, "{addr:#x} ({}) is free already", Bytes(*len_bytes as u64))
            }
            Self::BadLength { len_bytes } => write!(f, "{} is not a valid length", Bytes(*len_bytes)),
            Self::BadLimit { limit_bytes, page_bytes } => {
                write!(f, "a limit of {} is less than one page of {}", Bytes(*limit_bytes), Bytes(*page_bytes))
            }
            Self::BadChunk { chunk_bytes } => {
                let page = os_page_bytes();
                write!(f, "chunks of {chunk_bytes} bytes are not a multiple of the page, {page} bytes")
            }
            Self::BadRange { addr, len_bytes: 0 } => {
                write!(f, "the range that begins at {addr:#x} is empty, or ends before it begins")
            }
            Self::BadRange { addr, len_bytes } => {
                let page = Bytes(os_page_bytes() as u64);
                write!(
                    f,
                    "{len_bytes} bytes at {addr:#x} are not whole pages of {page}, or end beyond the address space"
                )
            }
            Self::NotMapped { addr, len_bytes } => {
                write!(f, "a part of the {} at {addr:#x} is not mapped", Bytes(*len_bytes))
            }
            Self::BadOffset { offset, len_bytes } => {
                write!(f, "{len_bytes} bytes at offset {offset} end beyond 2^63")
            }
            Self::BadRatio { percent } => write!(f, "{percent} is not a percentage: expected 0 to 100"),
            Self::BadNode { node, nodes } => {
                write!(f, "there is no NUMA node {node}: the machine has {nodes}, numbered from 0")
            }
            Self::PastEnd { offset, size_bytes } => {
                write!(f, "offset {offset} is at or past the end of the file of {size_bytes} bytes")
            }
            Self::FileTooLarge { size_bytes, most_bytes } => {
                write!(f, "a file of {size_bytes} bytes is too large: the maximum is {most_bytes}")
            }
            Self::ReadOnly => f.write_str("the file is read-only"),
            Self::Unsupported { what } | Self::WrongState { what } | Self::Busy { what } => f.write_str(what),
        }
    }
}

impl From<Error> for io::Error {
    /// Returns an I/O error whose kind follows from [`Error::errno`]. It contains `error` and prints the same text.
    fn from(error: Error) -> Self {
        let kind = Self::from_raw_os_error(error.errno()).kind();
        Self::new(kind, error)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { cause, .. } | Self::Store { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_text_has_quantities() {
        let error = Error::NoMemory { wanted_bytes: 2 << 20, used_bytes: 511 << 20, limit_bytes: 512 << 20 };
        assert_eq!(error.to_string(), "no room for 2 MiB: 511 MiB of 512 MiB in use, nothing left to reclaim");
        assert_eq!(error.errno(), libc::ENOMEM);
        let error = Error::TooMany { what: "slab caches", most: 256 };
        let text = "the process has 256 slab caches, the maximum: drop one, or share one";
        assert_eq!((error.to_string().as_str(), error.errno()), (text, libc::ENOMEM));
        let error = Error::BadLimit { limit_bytes: 100, page_bytes: 4 << 10 };
        let text = "a limit of 100 B is less than one page of 4 KiB";
        assert_eq!((error.to_string().as_str(), error.errno()), (text, libc::EINVAL));
    }
}
