//! The JSON document of one sample.

use super::app::App;
use super::rows::{Kind, Row};
use crate::statistics::{giveable_bytes, needed_bytes, resident_bytes};
use pagemill_core::stats::TABLE;
use serde_json::{Map, Value, json};
use std::time::UNIX_EPOCH;

/// Returns the document of the latest sample, in one line.
pub fn document(app: &App) -> Value {
    let Some(sample) = &app.sample else { return Value::Null };
    let of_kind = |is_run: bool| -> Vec<Value> {
        app.rows.iter().filter(|row| (row.kind == Kind::Run) == is_run).map(row_json).collect()
    };
    let machine = &sample.machine;
    let slabs = app.answers.slabs.iter().map(|slab| {
        json!({"pid": slab.pid, "process": slab.process, "name": &*slab.info.name, "objects": slab.info.active,
            "resident_bytes": slab.info.total.resident_bytes, "unused_bytes": slab.unused_bytes(),
            "slabs": slab.info.total.slabs, "partial_slabs": slab.info.total.partial})
    });
    json!({
        "time_s": sample.time.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
        "machine": {
            "total_bytes": machine.total_bytes,
            "available_bytes": machine.available_bytes,
            "stalls_some_percent": machine.stalls.map(|stalls| stalls.some_percent),
            "stalls_full_percent": machine.stalls.map(|stalls| stalls.full_percent),
            "group": machine.group.as_ref().map(|group| json!({
                "name": group.name, "limit_bytes": group.limit_bytes, "used_bytes": group.used_bytes})),
        },
        "unreadable": {
            "other_users": sample.unreadable.other_users,
            "other_versions": sample.unreadable.other_versions,
        },
        "runs": of_kind(true),
        "processes": of_kind(false),
        "mounts": app.answers.mounts,
        "slab_caches": slabs.collect::<Vec<_>>(),
        "slab_caches_unanswered": app.answers.slabs_unanswered,
    })
}

/// Returns the object of a process or of a `run`. Counters that are 0 are left out.
fn row_json(row: &Row) -> Value {
    let counters: Map<String, Value> = TABLE
        .iter()
        .filter(|of| row.figures.get(of.counter) > 0)
        .map(|of| (of.name.to_owned(), json!(row.figures.get(of.counter))))
        .collect();
    let is_small = row.kind == Kind::Small;
    let figure = |bytes: u64| if is_small { Value::Null } else { json!(bytes) };
    json!({
        "pid": row.identity.pid,
        "start_ticks": row.identity.start_ticks,
        "name": row.name,
        "user": row.user,
        "run": row.run.map(|run| run.pid),
        "parent": row.parent_pid,
        "kernel_resident_bytes": row.kernel_bytes,
        "resident_bytes": figure(resident_bytes(&row.figures)),
        "net_bytes": figure(needed_bytes(&row.figures)),
        "giveable_bytes": figure(giveable_bytes(&row.figures).0),
        "limit_bytes": row.limit,
        "cpu_percent": row.rates.map(|rates| rates.cpu_percent),
        "returned_bytes_per_s": row.rates.map(|rates| rates.returned),
        "store_read_bytes_per_s": row.rates.map(|rates| rates.read),
        "store_written_bytes_per_s": row.rates.map(|rates| rates.written),
        "returned_for": row.cause.map(|cause| cause.word),
        "measured_age_s": row.age.map(|age| age.as_secs_f64()),
        "stale": row.stale,
        "counters": counters,
    })
}
