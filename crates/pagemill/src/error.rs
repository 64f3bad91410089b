//! What the world can do wrong, with the numbers.

use crate::units::{BLOCK_BYTES, Bytes, os_page_bytes};
use std::fmt;
use std::io;

/// Why an operation could not be done.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// Not admitted, even after reclaim.
    NoMemory { wanted_bytes: u64, used_bytes: u64, limit_bytes: u64 },
    /// Not so many huge pages that the administrator has reserved (hugetlb) are free.
    NoHugetlb { wanted_bytes: u64 },
    /// The addresses reserved for this use are all taken.
    NoAddresses { wanted_bytes: u64 },
    /// There are as many of them as a process can have.
    TooMany { what: &'static str, most: usize },
    /// The alignment is no power of two, or too large.
    BadAlignment { align_bytes: usize },
    /// The kernel refused what it was asked for.
    System { doing: &'static str, cause: io::Error },
    /// The address was never handed out, or lies inside of what was.
    NotAllocated { addr: usize },
    /// The allocation at this address has been freed already.
    FreedBefore { addr: usize, len_bytes: usize },
    /// There is nothing of this length.
    BadLength { len_bytes: u64 },
    /// It goes by chunks of whole OS pages only.
    BadChunk { chunk_bytes: u64 },
    /// The addresses are no whole OS pages, or there are none such.
    BadRange { addr: usize, len_bytes: usize },
    /// Nothing is mapped at a part of these addresses.
    NotMapped { addr: usize, len_bytes: u64 },
    /// This kernel does not offer what it takes.
    Unsupported { what: &'static str },
    /// It is not in the state that this takes.
    WrongState { what: &'static str },
    /// Offset or length of which no file has one.
    BadOffset { offset: u64, len_bytes: u64 },
    /// The offset lies at or past the end of the file.
    PastEnd { offset: u64, size_bytes: u64 },
    /// No file can be so long.
    FileTooLarge { size_bytes: u64, most_bytes: u64 },
    /// What lies behind the file is only read.
    ReadOnly,
    /// Somebody else has it, and has not given it back in time.
    Busy { what: &'static str },
    /// A share of more than all.
    BadRatio { percent: u32 },
    /// There are not so many memory nodes.
    BadNode { node: usize, nodes: usize },
    /// The store behind a file failed.
    Store { doing: &'static str, cause: io::Error },
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The system's number for this error, as the C ABI reports it.
    pub fn errno(&self) -> i32 {
        const ENOMEM: i32 = 12;
        const EINVAL: i32 = 22;
        const EOPNOTSUPP: i32 = 95;
        const EIO: i32 = 5;
        const EBUSY: i32 = 16;
        const EFBIG: i32 = 27;
        const ENXIO: i32 = 6;
        const EBADF: i32 = 9;
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
            Self::Store { cause, .. } => cause.raw_os_error().unwrap_or(EIO),
            Self::Unsupported { .. } => EOPNOTSUPP,
            Self::System { cause, .. } => cause.raw_os_error().unwrap_or(ENOMEM),
        }
    }

    /// For `map_err`: what was being done when the kernel refused.
    pub(crate) fn system(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::System { doing, cause }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory { wanted_bytes, used_bytes, limit_bytes } => write!(
                f,
                "no room for {}: {} of {} in use, nothing left to reclaim",
                Bytes(*wanted_bytes),
                Bytes(*used_bytes),
                Bytes(*limit_bytes)
            ),
            Self::NoHugetlb { wanted_bytes } => {
                let pages = wanted_bytes.div_ceil(BLOCK_BYTES as u64);
                write!(
                    f,
                    "not so many reserved huge pages (hugetlb) are free: {pages} of 2 MiB are wanted; \
                     the administrator reserves them by /proc/sys/vm/nr_hugepages"
                )
            }
            Self::NoAddresses { wanted_bytes } => {
                write!(f, "no address space left for {}", Bytes(*wanted_bytes))
            }
            Self::TooMany { what, most } => {
                write!(
                    f,
                    "a process can have {most} {what} at a time, and this one has them: one has to go, or to be shared"
                )
            }
            Self::BadAlignment { align_bytes } => write!(f, "{align_bytes} is no alignment that can be had"),
            Self::System { doing, cause } | Self::Store { doing, cause } => write!(f, "{doing}: {cause}"),
            Self::NotAllocated { addr } => write!(f, "{addr:#x} was not handed out by this allocator"),
            Self::FreedBefore { addr, len_bytes } => {
                write!(f, "{addr:#x} ({}) is free already", Bytes(*len_bytes as u64))
            }
            Self::BadLength { len_bytes } => write!(f, "{} is no length that can be had", Bytes(*len_bytes)),
            Self::BadChunk { chunk_bytes } => {
                let page = os_page_bytes();
                write!(f, "chunks of {chunk_bytes} bytes are no multiple of the page, {page} bytes")
            }
            Self::BadRange { addr, len_bytes } => {
                let page = Bytes(os_page_bytes() as u64);
                write!(
                    f,
                    "{len_bytes} bytes from {addr:#x} on are no whole pages of {page}, or end beyond all addresses"
                )
            }
            Self::NotMapped { addr, len_bytes } => {
                write!(f, "a part of the {} from {addr:#x} on is not mapped", Bytes(*len_bytes))
            }
            Self::BadOffset { offset, len_bytes } => {
                write!(f, "{len_bytes} bytes from {offset} on end beyond 2^63")
            }
            Self::BadRatio { percent } => write!(f, "{percent} is no share in percent: 0 to 100 is"),
            Self::BadNode { node, nodes } => write!(f, "there is no memory node {node}: {nodes} there are, from 0 on"),
            Self::PastEnd { offset, size_bytes } => write!(f, "{offset} is past the end of the file, at {size_bytes}"),
            Self::FileTooLarge { size_bytes, most_bytes } => {
                write!(f, "a file of {size_bytes} bytes cannot be had: {most_bytes} is the most")
            }
            Self::ReadOnly => f.write_str("the file is only read"),
            Self::Unsupported { what } | Self::WrongState { what } | Self::Busy { what } => f.write_str(what),
        }
    }
}

impl From<Error> for io::Error {
    /// With the system's number: its text is the system's, too.
    fn from(error: Error) -> Self {
        Self::from_raw_os_error(error.errno())
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
    fn an_error_says_how_much() {
        let error = Error::NoMemory { wanted_bytes: 2 << 20, used_bytes: 511 << 20, limit_bytes: 512 << 20 };
        assert_eq!(error.to_string(), "no room for 2 MiB: 511 MiB of 512 MiB in use, nothing left to reclaim");
        assert_eq!(error.errno(), 12);
        let error = Error::TooMany { what: "slab caches", most: 256 };
        let text =
            "a process can have 256 slab caches at a time, and this one has them: one has to go, or to be shared";
        assert_eq!((error.to_string().as_str(), error.errno()), (text, 12));
    }
}
