//! Programs in safe code that the compiler must reject: each would break an invariant of another part of the process.
//!
//! All begin as this one, which is accepted:
//!
//! ```
//! # use pagemill::{Pagemill, epoch, xarray::XArray};
//! let pagemill = Pagemill::for_test();
//! let array = XArray::new(pagemill.slabs.nodes()?.forest());
//! assert!(array.load(0, &epoch::pin()).is_none());
//! # Ok::<(), pagemill::Error>(())
//! ```
//!
//! Freeing a node that an index uses; moving a node to a number that another index uses; clearing a node:
//!
//! ```compile_fail,E0599
//! # let pagemill = pagemill::Pagemill::for_test();
//! pagemill.slabs.nodes().unwrap().forest().give(1);
//! ```
//! ```compile_fail,E0599
//! # let pagemill = pagemill::Pagemill::for_test();
//! pagemill.slabs.nodes().unwrap().forest().retire(1);
//! ```
//! ```compile_fail,E0603
//! # let pagemill = pagemill::Pagemill::for_test();
//! pagemill::xarray::relocate(pagemill.slabs.nodes().unwrap().forest(), 1, 2);
//! ```
//! ```compile_fail,E0603
//! fn empty(node: &pagemill::xarray::Node) {
//!     node.clear();
//! }
//! ```
//! ```compile_fail,E0603
//! fn give<N: pagemill::xarray::Nodes>(nodes: &N) {
//!     nodes.give(1);
//! }
//! ```
//!
//! A lookup with a guard of another collector (the default one of crossbeam), which protects nothing here; a function
//! of the program called under a lock of this crate:
//!
//! ```compile_fail,E0308
//! # use pagemill::{Pagemill, xarray::XArray};
//! # let pagemill = Pagemill::for_test();
//! let array = XArray::new(pagemill.slabs.nodes().unwrap().forest());
//! array.load(0, &crossbeam_epoch::pin());
//! ```
//! ```compile_fail,E0624
//! pagemill::epoch::pin().defer(|| println!("under a lock"));
//! ```
//!
//! A guard dropped on another thread:
//!
//! ```compile_fail,E0277
//! let guard = pagemill::epoch::pin();
//! std::thread::spawn(move || drop(guard));
//! ```
//!
//! Fork handlers, called without a fork:
//!
//! ```compile_fail,E0133
//! pagemill::Pagemill::for_test().before_fork();
//! ```
//! ```compile_fail,E0133
//! pagemill::Pagemill::for_test().after_fork();
//! ```
//! ```compile_fail,E0133
//! pagemill::Pagemill::for_test().begin_child();
//! ```
//! ```compile_fail,E0133
//! pagemill::stats::detach_in_child();
//! ```
//!
//! Pages of an allocation in use, zeroed by a commit or charged a second time:
//!
//! ```compile_fail,E0133
//! # let pagemill = pagemill::Pagemill::for_test();
//! pagemill.arena.commit(pagemill.heap.base(), 4096);
//! ```
//! ```compile_fail,E0133
//! # let pagemill = pagemill::Pagemill::for_test();
//! pagemill.arena.overcommit_extent(pagemill.heap.base(), 4096);
//! ```
