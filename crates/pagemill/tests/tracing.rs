//! Events of the memory manager as a subscriber of `tracing` gets them. The test has a process of its own, because a
//! subscriber belongs to the whole process.

use pagemill::cache::Always;
use pagemill::{PageCache, Pagemill, VolatileBuf};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The fields of an event as text, and its level.
type Seen = (Level, BTreeMap<&'static str, String>);

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

struct Collector;

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Collector {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _attributes: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        if event.metadata().target() == "pagemill" {
            let mut fields = Fields::default();
            event.record(&mut fields);
            SEEN.lock().unwrap().push((*event.metadata().level(), fields.0));
        }
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// A volatile range is purged, and a huge folio is made. The subscriber must get an event for each, in order and once,
/// with the numbers that the event has and no others. Events recorded before the start are forwarded, too.
#[test]
fn a_subscriber_gets_each_event_once() {
    tracing::subscriber::set_global_default(Collector).unwrap();
    let manager = Pagemill::of_process().unwrap();
    let purge = || {
        let mut range = VolatileBuf::new(8 << 20).unwrap();
        range.bytes_mut().unwrap().fill(7);
        range.mark().unwrap();
        manager.return_all();
    };
    purge();
    let forwarder = manager.forward_events(Duration::from_millis(1)).unwrap();
    purge();
    let file = PageCache::builder("events").limit(16 << 20).policy(Always).build().unwrap().create().unwrap();
    file.write_at(&[1; 1 << 20], 0).unwrap();
    drop(forwarder);
    let seen = std::mem::take(&mut *SEEN.lock().unwrap());
    let of_kind = |kind: &str| -> Vec<&Seen> {
        seen.iter()
            .filter(|(_, fields)| fields.get("event").is_some_and(|event| event.trim_matches('"') == kind))
            .collect()
    };
    let purges = of_kind("range_purged");
    assert!(purges.len() >= 2, "{seen:?}");
    for (level, fields) in &purges {
        let names: Vec<&str> = fields.keys().copied().collect();
        assert_eq!(names, ["addr", "event", "monotonic_ns", "purged_bytes", "sequence"]);
        assert_eq!(*level, Level::DEBUG);
        assert!(fields["purged_bytes"].parse::<u64>().unwrap() > 0);
    }
    if let Some((_, fields)) = of_kind("folio_made").first() {
        assert_eq!((fields["page_index"].as_str(), fields["file"].as_str()), ("0", "0"));
    }
    let numbers: Vec<u64> = seen.iter().map(|(_, fields)| fields["sequence"].parse().unwrap()).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{numbers:?}");
}
