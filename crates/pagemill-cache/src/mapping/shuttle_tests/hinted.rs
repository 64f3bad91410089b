//! Tests of accesses to folios that another thread creates, removes, splits or collapses: by a hint, or by the index
//! without a pin.

use super::*;

/// Returns a file of two pages, and a hint of its first page.
fn hinted_file() -> (Arc<Mapping>, FolioHint) {
    let file = cache_with_ample_room().create().unwrap();
    assert_eq!(file.write_at(&[1; 2 * PAGE], 0).unwrap(), 2 * PAGE);
    let mut hint = FolioHint::default();
    file.read_at_hinted(&mut hint, &mut [0; SAMPLE_BYTES], 0).unwrap();
    (Arc::new(file), hint)
}

/// A thread creates a folio for a hole while another thread pins it by a hint of an earlier folio of the same pages. The
/// index must have a folio that was pinned.
#[test]
fn a_new_folio_is_pinned_only_in_the_index() {
    run_in_many_schedules(RARE_RACE_FACTOR, || {
        let (file, mut hint) = hinted_file();
        file.punch_hole(0, 2 * PAGE as u64).unwrap();
        let other = file.clone();
        let creator = shuttle::thread::spawn(move || drop(other.pin(0).unwrap()));
        let pin = file.pin_hinted(&mut hint, 0).unwrap();
        assert_eq!(file.seek_data(0).unwrap(), Some(0));
        drop(pin);
        creator.join().unwrap();
    });
}

/// Pages are removed while another thread reads one of them. Once a read through the index has found the hole, a read by
/// a hint must not find the old bytes.
#[test]
fn a_hint_finds_no_removed_page() {
    run_in_many_schedules(RARE_RACE_FACTOR, || {
        let (file, mut hint) = hinted_file();
        let (other, mut bytes) = (file.clone(), [0; SAMPLE_BYTES]);
        let remover = shuttle::thread::spawn(move || _ = other.punch_hole(0, 2 * PAGE as u64).unwrap());
        file.read_at(&mut bytes, 0).unwrap();
        if bytes[0] == 0 {
            file.read_at_hinted(&mut hint, &mut bytes, 0).unwrap();
            assert_eq!(bytes, [0; SAMPLE_BYTES], "the page was removed before");
        }
        remover.join().unwrap();
    });
}

/// Small folios are collapsed while another thread writes to the huge folio by a hint of an earlier folio of the same
/// pages. A read through the index must find the written bytes.
#[test]
fn a_collapsed_folio_is_pinned_only_in_the_index() {
    run_in_many_schedules(RARE_RACE_FACTOR, || {
        let (file, mut hint) = hinted_file();
        // Each collapse moves the folios to the other of two pairs of pages. The hint is that of a huge folio in the pair
        // that the next collapse uses.
        let _ = file.split(0).unwrap();
        for _ in 0..2 {
            assert!(file.collapse(0).unwrap());
            file.read_at_hinted(&mut hint, &mut [0; SAMPLE_BYTES], 0).unwrap();
            assert!(file.split(0).unwrap());
        }
        assert!(file.collapse(0).unwrap() && file.split(0).unwrap());
        let (other, old_hint, mut bytes) = (file.clone(), hint, [0; SAMPLE_BYTES]);
        let collapser = shuttle::thread::spawn(move || other.collapse(0).is_ok_and(|is_huge| is_huge));
        if let Ok(pin) = file.pin_hinted(&mut hint, 0) {
            pin.write_at(&[2; SAMPLE_BYTES], 0).unwrap();
            drop(pin);
            file.read_at(&mut bytes, 0).unwrap();
            assert_eq!(bytes, [2; SAMPLE_BYTES], "the write went to a folio that was not in the index");
        }
        if collapser.join().unwrap() {
            drop(file.pin_hinted(&mut hint, 0).unwrap());
            assert_eq!(hint, old_hint, "the huge folio has the pages of the hint");
        }
    });
}

/// A huge folio is split while another thread removes its second page, and then reads over the end of the first page.
/// The read must find the hole.
#[test]
fn a_split_folio_is_read_without_its_removed_page() {
    run_in_many_schedules(RARE_RACE_FACTOR, || {
        let (file, _) = hinted_file();
        let other = file.clone();
        let splitter = shuttle::thread::spawn(move || drop(other.split(0)));
        file.punch_hole(PAGE as u64, PAGE as u64).unwrap();
        let mut bytes = [3; 2 * SAMPLE_BYTES];
        file.read_at(&mut bytes, (PAGE - SAMPLE_BYTES) as u64).unwrap();
        assert_eq!(bytes[SAMPLE_BYTES..], [0; SAMPLE_BYTES], "the page was removed before");
        splitter.join().unwrap();
    });
}
