//! The index of a page cache: an [`XArray`], whose nodes lie in a [`Forest`].
//!
//! Uses `pagemill-core`. `pagemill-cache` uses this crate for the pages of files.

// Loom's atomics cannot lie in memory that is mapped manually: `--cfg loom` builds the slot protocol only.
#[cfg(not(loom))]
mod xarray;
#[cfg(all(loom, test))]
mod xarray {
    #[allow(dead_code)] // the parts that only the tree uses
    mod slots;
    #[allow(dead_code)]
    mod word;
}

#[cfg(all(not(loom), any(test, feature = "test-util")))]
pub use xarray::OneForest;
#[cfg(not(loom))]
pub use xarray::{
    Forest, Forests, Found, Hit, MAX_INDEX, MAX_ORDER, MAX_VALUE, Mark, Node, NodeStock, Source, Writer, XArray, pin,
};
