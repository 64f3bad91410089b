//! [`InsertError`]: the error of an insertion that failed, with the value that was to be inserted.

use pagemill_core::error::Error;
use std::fmt;

/// Error of an insertion into a slab cache. It contains the value that was to be inserted.
///
/// The conversions to [`Error`] and to [`std::io::Error`] drop the value, so `?` works in functions that return one of
/// these errors.
///
/// ```
/// use pagemill::HandleMap;
///
/// let map = HandleMap::<String>::new("names")?;
/// let handle = match map.insert("pagemill".to_owned()) {
///     Ok(handle) => handle,
///     Err(failed) => panic!("no memory for {}: {}", failed.value, failed.error),
/// };
/// # drop(handle);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct InsertError<T> {
    pub value: T,
    pub error: Error,
}

impl<T> From<InsertError<T>> for Error {
    fn from(failed: InsertError<T>) -> Self {
        failed.error
    }
}

impl<T> From<InsertError<T>> for std::io::Error {
    fn from(failed: InsertError<T>) -> Self {
        failed.error.into()
    }
}

impl<T> fmt::Debug for InsertError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InsertError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for InsertError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> std::error::Error for InsertError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}
