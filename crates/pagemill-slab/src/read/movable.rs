//! [`Movable`]: the values that a [`HandleMap`](crate::HandleMap) can move.
#![allow(unsafe_code)] // implementations for types of the standard library

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::OsString;
use std::marker::PhantomData;
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

#[diagnostic::on_unimplemented(
    message = "a `HandleMap` needs `Movable` values, and `{Self}` does not implement `Movable`",
    label = "not `Movable`",
    note = "`#[derive(pagemill::slab::Movable)]` implements `Movable` for a type whose fields are all movable",
    note = "put fields that change through `&` (atomics, locks, cells) behind an `Arc` or a `Box`"
)]
/// Values that may be copied byte by byte to another address while other threads read them.
///
/// `#[derive(Movable)]` implements the trait for types whose fields are all movable:
///
/// ```
/// use pagemill::slab::{HandleMap, Movable, enter};
///
/// #[derive(Movable)]
/// struct Session {
///     user: String,
///     hits: u64,
/// }
///
/// let sessions = HandleMap::new("sessions")?;
/// let handle = sessions.insert(Session { user: "ann".to_owned(), hits: 0 })?;
/// sessions.update(handle, |old| Session { user: old.user.clone(), hits: old.hits + 1 })?;
/// assert_eq!(sessions.get(handle, &enter()).map(|session| session.hits), Some(1));
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// A field that other threads change through `&`, such as an atomic or a lock, lies behind a pointer:
///
/// ```compile_fail,E0277
/// use pagemill::slab::Movable;
///
/// #[derive(Movable)]
/// struct Session {
///     hits: std::sync::atomic::AtomicU64, // an `Arc<AtomicU64>` compiles
/// }
/// ```
///
/// # Safety
///
/// The value does not refer to its own address. Its bytes do not change while only `&` references exist: no `Cell`,
/// atomic or lock, except behind a pointer. Example of a cache of such values: [`HandleMap`](crate::HandleMap).
pub unsafe trait Movable: Send + Sync + 'static {}

macro_rules! movable {
    ($($plain:ty),*) => { $(
        // SAFETY: plain data, or pointers to data that is not moved. No interior mutability.
        unsafe impl Movable for $plain {}
    )* };
}

movable!((), bool, char, u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);
movable!(String, Box<str>, Arc<str>, &'static str, OsString, PathBuf, Duration, Instant, SystemTime);
movable!(NonZero<u8>, NonZero<u16>, NonZero<u32>, NonZero<u64>, NonZero<usize>, NonZero<i32>, NonZero<i64>);

macro_rules! movable_pointers {
    ($($pointer:ty),*) => { $(
        // SAFETY: the value consists of pointers and lengths. What they point to is not moved.
        unsafe impl<T: Send + Sync + 'static> Movable for $pointer {}
    )* };
}

movable_pointers!(Vec<T>, VecDeque<T>, Box<T>, Box<[T]>, Arc<T>, Arc<[T]>, &'static T, BTreeSet<T>);

// SAFETY: the value consists of pointers and lengths. The entries are not moved.
unsafe impl<K: Send + Sync + 'static, V: Send + Sync + 'static> Movable for BTreeMap<K, V> {}
// SAFETY: the value consists of pointers, lengths and the hasher, which is movable. The entries are not moved.
unsafe impl<K: Send + Sync + 'static, V: Send + Sync + 'static> Movable for HashMap<K, V> {}
// SAFETY: as for `HashMap`.
unsafe impl<T: Send + Sync + 'static> Movable for HashSet<T> {}
// SAFETY: an array is movable if its items are.
unsafe impl<T: Movable, const N: usize> Movable for [T; N] {}
// SAFETY: an option is movable if its value is.
unsafe impl<T: Movable> Movable for Option<T> {}
// SAFETY: a result is movable if its two values are.
unsafe impl<T: Movable, E: Movable> Movable for Result<T, E> {}
// SAFETY: a tuple is movable if its items are.
unsafe impl<A: Movable, B: Movable> Movable for (A, B) {}
// SAFETY: as above.
unsafe impl<A: Movable, B: Movable, C: Movable> Movable for (A, B, C) {}
// SAFETY: as above.
unsafe impl<A: Movable, B: Movable, C: Movable, D: Movable> Movable for (A, B, C, D) {}
// SAFETY: the value has no bytes.
unsafe impl<T: Send + Sync + 'static + ?Sized> Movable for PhantomData<T> {}
// SAFETY: a handle is a number.
unsafe impl<T: 'static> Movable for crate::Handle<T> {}
