//! The record of a slab cache on one NUMA node: 256 bytes, in little-endian order. A cache has one record for each
//! node; its records follow each other in the order of nodes.
//!
//! | offset | field |
//! |---|---|
//! | 0 | name, padded with zeros |
//! | 64, 72, 80, 88 | (u64) id of the cache; bytes of an object; bytes from one object to the next; bytes of a slab |
//! | 96, 100, 104 | (u32) objects per slab; `defrag_used_ratio`; `remote_node_defrag_ratio` |
//! | 108 | (u8) kind of cache: 0 fixed objects, 1 by owner, 2 by handle |
//! | 109, 110 | (u8, 0 or 1) whether the cache has a constructor; whether debug mode is on |
//! | 111 | (u8, 0 or 1) whether the statistics of the node are missing |
//! | 112 | (u32) number of the NUMA node |
//! | 116 | (u8, 0 or 1) whether the background thread skips the cache after a panic; 117 to 119 are zero |
//! | 120 | (u64) number of free objects in magazines |
//! | 128, 136, 144, 152, 160 | (u64) objects by the outcome of their move: moved, freed, busy, refused, failed |
//! | 168, 176, 184 | (u64) emptied slabs; objects allocated from other nodes; bytes of the handle table |
//! | 192, 200 | (u64) of the node: number of used objects; number of all objects |
//! | 208, 212, 216, 220, 224 | (u32) of the node: number of slabs; of partial, empty, lost slabs; of blocks |
//! | 228 | (u32) 0 |
//! | 232, 240 | (u64) of the node: resident bytes; number of free objects in its barns |
//! | 248 | (u64) of the cache: number of objects that wait for readers |

use crate::NodeInfo;
use crate::SlabInfo;
use crate::cache::{Cache, SlabKind};
use crate::caches::Slabs;
use crate::report::info;
use pagemill_core::listing::{
    ListWriter, MAX_INSPECTION_NS, Record, Records, Response, Unanswered, ask_all_for, u32_at, u64_at,
};
use pagemill_core::published::Subject;
use pagemill_core::sync::Backoff;
use pagemill_sys::file::Path;
use pagemill_sys::process::Identity;
use std::io;
use std::sync::Arc;

/// Length of a record in bytes.
const RECORD_LEN: usize = 256;

/// Length in bytes of the name field of a record.
const NAME_LEN: usize = 64;

/// The kind of slab cache that each code in a record stands for: the kinds in the order of the enum.
const KIND_OF_CODE: [SlabKind; 3] = [SlabKind::Fixed, SlabKind::ByOwner, SlabKind::ByHandle];

/// The statistics of one slab cache on one NUMA node, as read from a record.
struct NodeRecord {
    id: u64,
    info: SlabInfo,
    node: u32,
    /// The statistics of the cache on this node.
    figures: NodeInfo,
}

/// Returns the part of a cache's name that fits into a record, cut at a character boundary.
fn truncated_name(name: &str) -> &str {
    let len = (0..=NAME_LEN.min(name.len())).rev().find(|len| name.is_char_boundary(*len)).unwrap_or(0);
    &name[..len]
}

/// Returns a cache's name for printing to a terminal: without control characters, and not longer than in a record.
pub fn shown_name(name: &str) -> String {
    let clean = |letter: char| if letter.is_control() || letter == char::REPLACEMENT_CHARACTER { '?' } else { letter };
    truncated_name(name).chars().map(clean).collect()
}

/// Writes consecutive words of `N` bytes into a record, the first at offset `at`.
fn put<const N: usize>(record: &mut [u8; RECORD_LEN], at: usize, words: impl IntoIterator<Item = [u8; N]>) {
    record[at..].chunks_exact_mut(N).zip(words).for_each(|(place, word)| place.copy_from_slice(&word));
}

/// Returns the record of a cache on one NUMA node.
fn to_record(id: u64, info: &SlabInfo, node: usize, figures: &NodeInfo) -> [u8; RECORD_LEN] {
    let mut bytes = [0; RECORD_LEN];
    let name = truncated_name(&info.name);
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    let words = [id, info.object_bytes as u64, info.stride_bytes as u64, info.slab_bytes as u64];
    put(&mut bytes, 64, words.map(u64::to_le_bytes));
    let SlabInfo { cached, moved, freed, busy, refused, failed, emptied, from_remote, handle_bytes, waiting, .. } =
        *info;
    let of_cache = [cached, moved, freed, busy, refused, failed, emptied, from_remote, handle_bytes];
    put(&mut bytes, 120, of_cache.map(u64::to_le_bytes));
    put(&mut bytes, 192, [figures.used, figures.objects].map(u64::to_le_bytes));
    put(&mut bytes, 232, [figures.resident_bytes, figures.cached, waiting].map(u64::to_le_bytes));
    let ratios = [info.objects_per_slab, info.defrag_used_ratio, info.remote_node_defrag_ratio];
    put(&mut bytes, 96, ratios.map(u32::to_le_bytes));
    put(&mut bytes, 112, [(node as u32).to_le_bytes()]);
    let slabs_of_node = [figures.slabs, figures.partial, figures.empty, figures.lost, figures.blocks];
    put(&mut bytes, 208, slabs_of_node.map(u32::to_le_bytes));
    bytes[108] = info.kind as u8;
    bytes[109..112].copy_from_slice(&[info.has_constructor, info.is_debug, info.is_partial].map(u8::from));
    bytes[116] = u8::from(info.is_given_up);
    bytes
}

impl Record for NodeRecord {
    const SUBJECT: Subject = Subject::Slabs;
    const LEN: usize = RECORD_LEN;

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        const MAX_PERCENT: u32 = 100;
        let name = bytes[..NAME_LEN].split(|byte| *byte == 0).next().unwrap_or_default();
        let flag = |at: usize| [false, true].get(usize::from(bytes[at])).copied();
        let len = |at| usize::try_from(u64_at(bytes, at)).ok();
        let ratio = |at| Some(u32_at(bytes, at)).filter(|percent| *percent <= MAX_PERCENT);
        let [cached, moved, freed, busy, refused, failed, emptied, from_remote, handle_bytes] =
            std::array::from_fn(|at| u64_at(bytes, 120 + 8 * at));
        let [slabs, partial, empty, lost, blocks] = std::array::from_fn(|at| u32_at(bytes, 208 + 4 * at));
        let info = SlabInfo {
            name: shown_name(&String::from_utf8_lossy(name)).into(),
            kind: *KIND_OF_CODE.get(usize::from(bytes[108]))?,
            object_bytes: len(72)?,
            stride_bytes: len(80)?,
            slab_bytes: len(88).filter(|bytes| bytes.is_power_of_two())?,
            objects_per_slab: Some(u32_at(bytes, 96)).filter(|count| *count > 0)?,
            has_constructor: flag(109)?,
            is_debug: flag(110)?,
            defrag_used_ratio: ratio(100)?,
            remote_node_defrag_ratio: ratio(104)?,
            total: NodeInfo::default(),
            nodes: Vec::new(),
            active: 0,
            waiting: u64_at(bytes, 248),
            cached,
            moved,
            freed,
            busy,
            refused,
            failed,
            emptied,
            from_remote,
            handle_bytes,
            is_partial: flag(111)?,
            is_given_up: flag(116)?,
        };
        let figures = NodeInfo {
            used: u64_at(bytes, 192),
            objects: u64_at(bytes, 200),
            slabs,
            partial,
            empty,
            lost,
            blocks,
            resident_bytes: u64_at(bytes, 232),
            cached: u64_at(bytes, 240),
        };
        Some(Self { id: u64_at(bytes, 64), info, node: u32_at(bytes, 112), figures })
    }
}

/// Requests the slab caches of several processes with [`ask_all_for`]. Returns for each process its caches with their
/// ids, or the reason why there is no answer. Caches with movable objects come first; each kind is sorted by name.
pub fn ask_for_slabs(
    targets: &[(&Path, Identity)],
    should_stop: impl Fn() -> bool,
) -> Vec<Result<Vec<(u64, SlabInfo)>, Unanswered>> {
    let combined = |(rows, _): Records<NodeRecord>| combine_nodes(rows).ok_or(Unanswered::Damaged);
    ask_all_for(targets, should_stop).into_iter().map(|result| result.and_then(combined)).collect()
}

impl ListWriter for Slabs {
    fn subject(&self) -> Subject {
        Subject::Slabs
    }

    /// Writes a record for each node of every cache, in order of cache ids. Allocates no memory. If the lock of a node
    /// is not available within [`MAX_INSPECTION_NS`] for all locks, the record is marked as incomplete.
    fn list(&self, response: &mut Response<'_>) -> io::Result<()> {
        let (mut backoff, mut from) = (Backoff::new(), 0);
        while let Some((id, cache)) = self.first_cache_from(from) {
            info::show(&*cache, (&mut backoff, MAX_INSPECTION_NS), |info, node, figures| {
                response.write_record(&to_record(id, info, node, figures))
            })?;
            from = id + 1;
        }
        Ok(())
    }
}

impl Slabs {
    /// Returns the existing cache with the lowest id that is at least `from`.
    pub(super) fn first_cache_from(&self, from: u64) -> Option<(u64, Arc<dyn Cache>)> {
        self.caches.with(|caches| {
            let rest = &caches[caches.partition_point(|(id, _)| *id < from)..];
            rest.iter().find_map(|(id, cache)| Some((*id, cache.upgrade()?)))
        })
    }
}

/// Combines the records of each cache into one [`SlabInfo`], and sorts the caches by [`SlabInfo::sort_key`]. Returns
/// `None` if the records are in an invalid order.
fn combine_nodes(rows: Vec<NodeRecord>) -> Option<Vec<(u64, SlabInfo)>> {
    let mut caches: Vec<(u64, SlabInfo)> = Vec::new();
    for NodeRecord { id, mut info, node, figures } in rows {
        match caches.last_mut().filter(|(last, _)| *last >= id) {
            Some((last, known)) => {
                let is_next = *last == id && node as usize == known.nodes.len();
                is_next.then(|| known.add_node(figures))?;
                known.is_partial |= info.is_partial;
            }
            None => {
                (node == 0).then(|| info.add_node(figures))?;
                caches.push((id, info));
            }
        }
    }
    caches.sort_by_cached_key(|(_, info)| info.sort_key());
    Some(caches)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn slab_info(name: &str, kind: SlabKind) -> SlabInfo {
        SlabInfo {
            name: name.into(),
            kind,
            object_bytes: 190,
            stride_bytes: 192,
            slab_bytes: 64 << 10,
            objects_per_slab: 341,
            has_constructor: true,
            is_debug: true,
            defrag_used_ratio: 30,
            remote_node_defrag_ratio: 100,
            total: NodeInfo::default(),
            nodes: Vec::new(),
            active: 0,
            waiting: 12,
            cached: 3,
            moved: 4,
            freed: 5,
            busy: 6,
            refused: 7,
            failed: 8,
            emptied: 9,
            from_remote: 10,
            handle_bytes: 11,
            is_partial: true,
            is_given_up: true,
        }
    }

    const NODE_INFO: NodeInfo = NodeInfo {
        used: 20,
        cached: 2,
        objects: 682,
        slabs: 2,
        partial: 1,
        empty: 3,
        lost: 4,
        blocks: 5,
        resident_bytes: 128 << 10,
    };

    fn node_record(id: u64, info: &SlabInfo, node: usize) -> NodeRecord {
        Record::from_bytes(&to_record(id, info, node, &NODE_INFO)).unwrap()
    }

    /// Writes records and reads them. Reading must return the values that were written, and must combine the records of
    /// a cache's nodes. A long name must be cut at a character boundary.
    #[test]
    fn records_are_read_as_written() {
        for kind in KIND_OF_CODE {
            let combined =
                combine_nodes(vec![node_record(7, &slab_info("a", kind), 0), node_record(7, &slab_info("a", kind), 1)])
                    .unwrap();
            let mut expected = slab_info("a", kind);
            (0..2).for_each(|_| expected.add_node(NODE_INFO));
            assert_eq!((expected.active, expected.cached, expected.total.slabs), (33, 7, 4));
            assert_eq!(combined, [(7, expected)]);
        }
        let long = format!("x{}", "ä".repeat(100));
        assert_eq!(*node_record(1, &slab_info(&long, SlabKind::Fixed), 0).info.name, format!("x{}", "ä".repeat(31)));
        assert_eq!(shown_name("tab\tline\nred\x1b[31m"), "tab?line?red?[31m");
    }

    /// Caches with movable objects must come first in a list. Within each of the two groups, caches must be sorted by
    /// name. Two caches may have the same name.
    #[test]
    fn records_are_listed_movable_first_then_by_name() {
        let rows = [
            ("b", SlabKind::Fixed),
            ("z", SlabKind::ByHandle),
            ("a", SlabKind::Fixed),
            ("y", SlabKind::ByOwner),
            ("a", SlabKind::Fixed),
        ];
        let rows = rows
            .iter()
            .enumerate()
            .map(|(id, (name, kind))| node_record(id as u64, &slab_info(name, *kind), 0))
            .collect();
        let names: Vec<_> =
            combine_nodes(rows).unwrap().iter().map(|(id, info)| format!("{id}{}", info.name)).collect();
        assert_eq!(names, ["3y", "1z", "2a", "4a", "0b"]);
    }

    /// Records with an invalid field, or in an invalid order of nodes, must be rejected. Sums over records must
    /// saturate.
    #[test]
    fn invalid_records_are_rejected() {
        let good = to_record(1, &slab_info("a", SlabKind::Fixed), 0, &NODE_INFO);
        for (at, byte) in [(108, 3), (109, 2), (110, 2), (111, 2), (116, 2), (100, 101), (104, 101), (88, 1)] {
            let mut bytes = good;
            bytes[at] = byte;
            assert!(NodeRecord::from_bytes(&bytes).is_none(), "byte {at}");
        }
        let mut bytes = good;
        bytes[96..100].fill(0);
        assert!(NodeRecord::from_bytes(&bytes).is_none(), "no objects in a slab");
        let wrong: [&[(u64, usize)]; 5] =
            [&[(1, 1)], &[(1, 0), (1, 0)], &[(1, 0), (1, 2)], &[(2, 0), (1, 0)], &[(1, 0), (2, 1)]];
        for ids in wrong {
            let rows = ids.iter().map(|(id, node)| node_record(*id, &slab_info("a", SlabKind::Fixed), *node)).collect();
            assert!(combine_nodes(rows).is_none(), "{ids:?}");
        }
        let mut bytes = good;
        bytes[120..].fill(0xFF);
        let rows = (0..3).map(|node| {
            bytes[112..116].copy_from_slice(&u32::to_le_bytes(node));
            NodeRecord::from_bytes(&bytes).unwrap()
        });
        let (_, sums) = combine_nodes(rows.collect()).unwrap().remove(0);
        assert_eq!((sums.total.used, sums.total.blocks, sums.active), (u64::MAX, u32::MAX, 0));
    }
}
