//! A case in the emulator. The values of a slab cache must be on the requested NUMA node after a move, according to
//! the kernel.
#![allow(unsafe_code)] // queries the nodes of pages

use pagemill_core::Result;
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::os_page_bytes;
use pagemill_slab as slab;
use pagemill_slab::SlabCache;
use pagemill_slab::{Handle, HandleMap, Settings};
use pagemill_testbed::Testbed;
use std::ffi::{c_int, c_void};

type Value = [u64; 24];

const VALUE_COUNT: u64 = 20_000;

/// Returns how many of these addresses are on each of the two NUMA nodes, according to the kernel.
fn count_by_node(addresses: &[usize]) -> [u64; 2] {
    let mask = !(os_page_bytes() - 1);
    let pages: Vec<*mut c_void> = addresses.iter().map(|address| (address & mask) as *mut c_void).collect();
    let mut nodes: Vec<c_int> = vec![-1; pages.len()];
    let no_nodes = std::ptr::null::<c_int>();
    // SAFETY: the call reads and writes as many entries as the vectors have. Without target nodes it only
    // reports where pages are.
    let result =
        unsafe { libc::syscall(libc::SYS_move_pages, 0, pages.len(), pages.as_ptr(), no_nodes, nodes.as_mut_ptr(), 0) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    [0, 1].map(|node| nodes.iter().filter(|found| **found == node).count() as u64)
}

/// Checks that each value is intact, and that the kernel and the slab cache both report the expected number of values
/// on each node.
fn assert_values_and_nodes(step: &str, cache: &HandleMap<Value>, handles: &[Handle<Value>], expected: [u64; 2]) {
    let guard = slab::enter();
    let values: Vec<&Value> = handles.iter().map(|handle| cache.get(*handle, &guard).unwrap()).collect();
    assert!(values.iter().zip(0..).all(|(value, number)| **value == [number; 24]));
    let places: Vec<usize> = values.into_iter().map(|value| std::ptr::from_ref(value) as usize).collect();
    let info = cache.info().unwrap();
    let found = count_by_node(&places);
    println!("{step}: {found:?}");
    assert_eq!((found, [info.nodes[0].used, info.nodes[1].used]), (expected, expected), "{step}: {info:?}");
}

/// Moves values between the NUMA nodes, once in blocks that are huge pages, and once in blocks of small pages.
pub fn move_between_nodes() -> Result<()> {
    for use_huge in [true, false] {
        let slabs = Testbed::new(Layout { use_huge, ..Layout::for_test() }, UNLIMITED)?.slabs;
        slabs.defrag_by_hand();
        let boxes = slabs.fixed::<Value>(Settings::new("boxes"))?;
        for (node, expected) in [(0, [1000, 0]), (1, [0, 1000])] {
            let slots = (0..1000).map(|number| Ok(boxes.insert_on(node, [number; 24])?)).collect::<Result<Vec<_>>>()?;
            let places: Vec<usize> = slots.iter().map(|slot| std::ptr::from_ref(&**slot) as usize).collect();
            assert_eq!(count_by_node(&places), expected, "taken on node {node}");
        }
        let cache = slabs.by_handle::<Value>(Settings::new("values"))?;
        let handles = (0..VALUE_COUNT).map(|number| Ok(cache.insert([number; 24])?)).collect::<Result<Vec<_>>>()?;
        // The scheduler decides on which nodes the values were allocated.
        cache.move_objects(1, 0, VALUE_COUNT)?;
        cache.shrink()?;
        assert_values_and_nodes("all on the first", &cache, &handles, [VALUE_COUNT, 0]);
        cache.balance()?;
        cache.shrink()?;
        assert_values_and_nodes("balanced", &cache, &handles, [VALUE_COUNT / 2; 2]);
        cache.move_objects(0, 1, VALUE_COUNT)?;
        cache.shrink()?;
        assert_values_and_nodes("all on the second", &cache, &handles, [0, VALUE_COUNT]);
        assert_eq!(cache.info()?.nodes[0].resident_bytes, 0);
    }
    Ok(())
}
