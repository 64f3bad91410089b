//! Details of slab caches: as text for one cache, or as JSON for several caches.

use super::table::{self, Totals};
use crate::columns::{self, Heading};
use pagemill_core::units::Bytes;
use pagemill_slab::{NodeInfo, SlabInfo, SlabKind};
use serde_json::{Value, json};
use std::fmt::Write as _;

fn kind_and_meaning(info: &SlabInfo) -> (&'static str, &'static str) {
    match info.kind {
        SlabKind::Fixed => ("fixed", "objects keep their address"),
        SlabKind::ByOwner => ("by owner", "a function of the owner moves objects"),
        SlabKind::ByHandle => ("by handle", "the cache moves objects behind handles"),
    }
}

pub fn text_of(info: &SlabInfo) -> String {
    let mut text = format!("  {}\n", info.name);
    let total = &info.total;
    let amount = |bytes: u64| Bytes(bytes).to_string();
    let mut row = |name: &str, value: String, meaning: &str| {
        let _ = writeln!(text, "    {name:<12} {value:>10}  {meaning}");
    };
    let (kind, meaning) = kind_and_meaning(info);
    row("kind", kind.to_owned(), meaning);
    row(
        "constructor",
        if info.has_constructor { "yes" } else { "no" }.to_owned(),
        "called for each object of a new slab",
    );
    row("debug mode", if info.is_debug { "yes" } else { "no" }.to_owned(), "redzones, poison, records of owners");
    row(
        "object",
        amount(info.object_bytes as u64),
        &format!("and {} from one object to the next", amount(info.stride_bytes as u64)),
    );
    row(
        "slab",
        amount(info.slab_bytes as u64),
        &format!("{} objects, order {}", info.objects_per_slab, table::order(info)),
    );
    row("objects", info.active.to_string(), &format!("in use: {}", amount(table::in_use_bytes(info))));
    row("waiting", info.waiting.to_string(), "of these objects: retired, readers may use them");
    row("cached", info.cached.to_string(), "free objects in magazines and barns");
    row("slabs", total.slabs.to_string(), "divided into objects");
    row("partial", total.partial.to_string(), "of these slabs: partially used");
    row("empty", total.empty.to_string(), "of these slabs: without used objects");
    row("lost", total.lost.to_string(), "of these slabs: out of use after a panic");
    let used = table::percent(table::in_use_bytes(info), total.resident_bytes);
    let used = used.map_or_else(String::new, |percent| format!("{percent} % of it in use"));
    row("blocks", total.blocks.to_string(), "of 2 MiB, only for slabs of this cache");
    row("resident", amount(total.resident_bytes), &used);
    if info.kind == SlabKind::ByHandle {
        row("handles", amount(info.handle_bytes), "the handle table, not included in resident");
    }
    if info.kind != SlabKind::Fixed {
        let percent = format!("{} %", info.defrag_used_ratio);
        row("used ratio", percent, "slabs used less than this are emptied (--set-ratio)");
    }
    if info.is_given_up {
        row("given up", "yes".to_owned(), "not defragmented until --set-ratio or -s");
    }
    let remote = "use of other nodes' objects (--set-remote-ratio)";
    row("remote ratio", format!("{} %", info.remote_node_defrag_ratio), remote);
    row("moved", info.moved.to_string(), "objects moved so far");
    row("emptied", info.emptied.to_string(), "slabs emptied by moving their objects");
    row("freed", info.freed.to_string(), "objects that the owner freed instead of moving");
    row("busy", info.busy.to_string(), "objects not moved: they were in use");
    row("refused", info.refused.to_string(), "objects not moved: the owner refused");
    row("failed", info.failed.to_string(), "objects not moved: no free slot, or the move failed");
    row("from remote", info.from_remote.to_string(), "objects from another node than requested");
    if info.is_partial {
        row("in part", "yes".to_owned(), "a node was locked for too long to be examined");
    }
    text + &nodes_of(info)
}

fn nodes_of(info: &SlabInfo) -> String {
    let headings = [
        Heading::right_aligned("NODE", 4, 4),
        Heading::right_aligned("USED", 10, 1),
        Heading::right_aligned("CACHED", 7, 1),
        Heading::right_aligned("ROOM", 10, 1),
        Heading::right_aligned("SLABS", 8, 1),
        Heading::right_aligned("PARTIAL", 8, 1),
        Heading::right_aligned("EMPTY", 6, 1),
        Heading::right_aligned("LOST", 5, 1),
        Heading::right_aligned("SPACE", 10, 1),
    ];
    let rows = info.nodes.iter().enumerate().map(|(number, node)| {
        let NodeInfo { used, cached, objects, slabs, partial, empty, lost, blocks: _, resident_bytes } = *node;
        let objects = [number as u64, used, cached, objects];
        let slabs = [slabs, partial, empty, lost].map(u64::from);
        let counts = objects.into_iter().chain(slabs).map(|count| count.to_string());
        counts.chain([Bytes(resident_bytes).to_string()]).collect()
    });
    columns::aligned_table(&headings, rows)
}

pub fn json_of(caches: &[&SlabInfo]) -> Value {
    let totals = Totals::of(caches);
    json!({
        "caches": caches.iter().map(|info| cache_json(info)).collect::<Vec<_>>(),
        "totals": {
            "caches": caches.len(), "objects": totals.objects, "in_use_bytes": totals.in_use_bytes,
            "resident_bytes": totals.resident, "slabs": totals.slabs, "partial": totals.partial,
            "handle_bytes": totals.handles,
        },
    })
}

fn cache_json(info: &SlabInfo) -> Value {
    let total = &info.total;
    json!({
        "name": &*info.name, "kind": kind_and_meaning(info).0, "movable": info.kind != SlabKind::Fixed,
        "constructor": info.has_constructor, "debug": info.is_debug, "in_part": info.is_partial,
        "objects": info.active, "waiting": info.waiting, "cached": info.cached, "room": total.objects,
        "object_bytes": info.object_bytes, "stride_bytes": info.stride_bytes,
        "slab_bytes": info.slab_bytes, "objects_per_slab": info.objects_per_slab, "order": table::order(info),
        "slabs": total.slabs, "partial": total.partial, "empty": total.empty, "lost": total.lost,
        "blocks": total.blocks, "resident_bytes": total.resident_bytes, "in_use_bytes": table::in_use_bytes(info),
        "handle_bytes": info.handle_bytes, "flags": table::flag_letters(info), "given_up": info.is_given_up,
        "defrag_used_ratio": info.defrag_used_ratio, "remote_node_defrag_ratio": info.remote_node_defrag_ratio,
        "moved": info.moved, "freed": info.freed, "busy": info.busy, "refused": info.refused,
        "failed": info.failed, "emptied": info.emptied, "from_remote": info.from_remote,
        "nodes": info.nodes.iter().map(node_json).collect::<Vec<_>>(),
    })
}

fn node_json(node: &NodeInfo) -> Value {
    json!({
        "used": node.used, "cached": node.cached, "room": node.objects, "slabs": node.slabs,
        "partial": node.partial, "empty": node.empty, "lost": node.lost, "blocks": node.blocks,
        "resident_bytes": node.resident_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::example_info;
    use super::*;

    /// The text for a slab cache must have its settings, the reasons why objects were not moved, and a row for each
    /// NUMA node.
    #[test]
    fn a_report_has_settings_reasons_and_nodes() {
        let info = example_info("entries", SlabKind::ByHandle);
        let text = text_of(&info);
        let row = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_default();
        for (name, value) in [
            ("used ratio", "30 %"),
            ("remote ratio", "100 %"),
            ("waiting", "20"),
            ("busy", "2"),
            ("refused", "3"),
            ("lost", "1"),
            ("handles", "8 KiB"),
        ] {
            assert!(row(name).contains(&format!(" {value}  ")), "{name}: {text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(
            text.lines().rev().take(2).map(|line| line.split_ascii_whitespace().next().unwrap()).collect::<Vec<_>>(),
            ["1", "0"]
        );
        let json = json_of(&[&info]);
        assert_eq!(
            (&json["caches"][0]["nodes"][0]["used"], &json["totals"]["in_use_bytes"]),
            (&json!(1100), &json!(192_000))
        );
    }
}
