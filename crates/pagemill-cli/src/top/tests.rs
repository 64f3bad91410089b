//! The screen as a whole: samples go in, keys are pressed, and the drawn text is examined.

use super::app::{App, Effect, Mode, View, parse_interval};
use super::machine::MachineSample;
use super::sample::{ProcessSample, RunSample, Sample, Unreadable};
use super::table::{Arrangement, Column};
use super::{json, screen};
use crate::statistics;
use pagemill_core::published;
use pagemill_core::reclaim::tree::{TreeHeader, UNLIMITED};
use pagemill_core::stats::{Counter, Snapshot};
use pagemill_sys::process::{Identity, Usage};
use pagemill_tmpfs::status::Status;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use std::time::{Duration, Instant, SystemTime};

const MIB: u64 = 1 << 20;

fn identity(pid: u32) -> Identity {
    Identity { pid, start_ticks: 7 }
}

fn usage(pid: u32, name: &str, parent_pid: u32, cpu_ticks: u64) -> Usage {
    let mut bytes = [0; 16];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    Usage { identity: identity(pid), name: bytes, parent_pid, cpu_ticks, threads: 1, resident_bytes: 3 * MIB }
}

/// Returns a process that holds slots of `mib`, a quarter of them free. It has returned `returned_mib` by age, and
/// purged as much for a control group.
fn process(pid: u32, name: &str, run: Option<u32>, mib: u64, returned_mib: u64) -> ProcessSample {
    let mut sum = Snapshot::default();
    for (counter, bytes) in [
        (Counter::Heap, mib * MIB),
        (Counter::Resident, mib * MIB),
        (Counter::HeapFree, mib * MIB / 4),
        (Counter::GivenForAge, returned_mib * MIB),
        (Counter::RangeBytesPurged, returned_mib * MIB),
        (Counter::PurgedForGroup, returned_mib * MIB),
    ] {
        sum.set(counter, bytes);
    }
    let published = published::Process { identity: identity(pid), user: 0, found: Vec::new() };
    ProcessSample {
        usage: usage(pid, name, run.unwrap_or(1), returned_mib),
        user: 0,
        run: run.map(identity),
        pagemill: Some(statistics::Process { published, sum, stale: None }),
    }
}

fn run(pid: u32, command: &str, limit: u64) -> RunSample {
    let header = TreeHeader { limit, peak: 0, net_peak: 0, unlisted: 0, started: 1 };
    RunSample { identity: identity(pid), user: 0, command: command.to_owned(), is_alive: true, header }
}

fn sample(at: Instant, processes: Vec<ProcessSample>, runs: Vec<RunSample>) -> Sample {
    let machine = MachineSample { total_bytes: 8 << 30, available_bytes: 6 << 30, stalls: None, group: None };
    Sample { time: SystemTime::now(), at, processes, runs, machine, unreadable: Unreadable::default() }
}

/// Returns an app with a tree of two processes and a small program, and a process without a tree.
fn app() -> App {
    let arrangement = Arrangement { sort: Column::Resident, is_reversed: false, is_tree: true, filter: String::new() };
    let mut app = App::new(Duration::from_secs(1), arrangement);
    app.take_sample(usual_sample(Instant::now(), 0));
    app
}

fn usual_sample(at: Instant, returned_mib: u64) -> Sample {
    let small = ProcessSample { usage: usage(13, "sh", 10, 0), user: 0, run: Some(identity(10)), pagemill: None };
    let processes = vec![
        process(11, "cc1", Some(10), 40, 0),
        process(12, "cc1plus", Some(10), 60, 0),
        small,
        process(20, "redis-server", None, 512, returned_mib),
    ];
    sample(at, processes, vec![run(10, "make -j2", 100 * MIB)])
}

fn press(app: &mut App, code: KeyCode) -> Effect {
    app.press(KeyEvent::new(code, KeyModifiers::NONE))
}

fn type_text(app: &mut App, text: &str) {
    for letter in text.chars() {
        press(app, KeyCode::Char(letter));
    }
}

/// Draws the screen, and returns its lines.
fn drawn(app: &mut App, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen::draw(app, frame.area(), frame.buffer_mut())).unwrap();
    screen::text_of(terminal.backend().buffer()).lines().map(str::to_owned).collect()
}

/// Returns the first words of the lines of the list, which are process ids.
fn listed_pids(lines: &[String]) -> Vec<u32> {
    lines.iter().filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
}

/// The screen has the sums, the titles, the rows in order of their memory, and the keys. A tree is the sum of its
/// processes, which follow it.
#[test]
fn the_screen_shows_sums_rows_and_keys() {
    let mut app = app();
    let lines = drawn(&mut app, 80, 24);
    assert!(lines[0].starts_with("pagemill top  4 processes in 1 run  every 1 s"), "{lines:#?}");
    assert!(lines[1].contains("612M]  net 459M  give 153M"), "{lines:#?}");
    assert!(lines[2].contains("2G/8G]"), "{lines:#?}");
    let title = lines.iter().position(|line| line.contains("PID NAME")).unwrap();
    assert_eq!(listed_pids(&lines), [20, 10, 12, 11, 13]);
    let of_run: Vec<&str> = lines[title + 2].split_whitespace().collect();
    assert_eq!(of_run[..9], ["10", "run", "make", "-j2", "-", "100M", "75M", "25M", "100M"], "{lines:#?}");
    assert!(lines[title + 3].contains("└ cc1plus"), "{lines:#?}");
    assert!(lines[23].starts_with("F1Help F4Filter F5List F6SortBy"), "{lines:#?}");
    let wide = drawn(&mut app, 160, 50);
    let title = wide.iter().find(|line| line.contains("PID")).unwrap();
    assert!(["RSS", "VOLAT", "READ/s", "HISTORY"].iter().all(|word| title.contains(word)), "{title}");
}

/// Every size of the screen can be drawn, in every mode. Small screens show at least the sums.
#[test]
fn every_size_can_be_drawn() {
    let mut app = app();
    app.details_row = app.rows.iter().find(|row| row.identity == identity(20)).cloned();
    let of_processes = [
        Mode::List,
        Mode::Help,
        Mode::SortMenu(18),
        Mode::Filter,
        Mode::Interval("0.5".into()),
        Mode::Details(identity(20)),
    ];
    let others = [(View::Slabs, Mode::List), (View::Mounts, Mode::List)];
    for (view, mode) in of_processes.map(|mode| (View::Processes, mode)).into_iter().chain(others) {
        for (width, height) in (0..14).flat_map(|width| (0..14).map(move |height| (8 * width, height))) {
            (app.mode, app.view) = (mode.clone(), view);
            drawn(&mut app, width, height);
        }
    }
    (app.mode, app.view) = (Mode::List, View::Processes);
    assert_eq!(drawn(&mut app, 20, 1), ["612M 4 processes"]);
}

/// The cursor follows its process to another line, and stays at its line when the process ends. A process with a
/// reused id is another one.
#[test]
fn the_selection_follows_its_process() {
    let mut app = app();
    drawn(&mut app, 80, 24);
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Down);
    let selected = |app: &App| app.selected_row().map(|row| row.identity.pid);
    assert_eq!(selected(&app), Some(12));
    type_text(&mut app, "t");
    assert_eq!((selected(&app), app.cursor), (Some(12), 1));
    let at = Instant::now();
    let mut reused = process(12, "other", None, 1, 0);
    reused.usage.identity.start_ticks = 8;
    app.take_sample(sample(at, vec![process(11, "cc1", None, 40, 0), reused], Vec::new()));
    assert_eq!((selected(&app), app.cursor), (Some(12), 1), "the last line");
    assert_eq!(app.selected_row().unwrap().name, "other");
    app.take_sample(sample(at, Vec::new(), Vec::new()));
    assert_eq!(selected(&app), None);
    press(&mut app, KeyCode::Down);
    assert_eq!(press(&mut app, KeyCode::Enter), Effect::None, "there is nothing to show");
    assert_eq!(app.mode, Mode::List);
}

/// The cursor moves through a list that is longer than the screen, by lines, pages and to its ends.
#[test]
fn a_long_list_is_scrolled() {
    let mut app = app();
    let many = (100..300).map(|pid| process(pid, "x", None, u64::from(1000 - pid), 0)).collect();
    app.take_sample(sample(Instant::now(), many, Vec::new()));
    let mut listed_after = |codes: &[KeyCode]| {
        for code in codes {
            press(&mut app, *code);
        }
        let pids = listed_pids(&drawn(&mut app, 80, 24));
        (pids[0], pids.len())
    };
    let lines = listed_after(&[]).1;
    assert!((12..20).contains(&lines), "{lines}");
    assert_eq!(listed_after(&[KeyCode::PageDown]), (101, lines));
    assert_eq!(listed_after(&[KeyCode::End]), (300 - lines as u32, lines));
    assert_eq!(listed_after(&[KeyCode::Up]), (300 - lines as u32, lines));
    assert_eq!(listed_after(&[KeyCode::Home]), (100, lines));
}

/// The keys of top and htop: trees, order, filter, interval, pause, views, details, help, quit.
#[test]
fn keys_do_what_they_do_in_top() {
    let mut app = app();
    type_text(&mut app, "tN");
    assert_eq!(listed_pids(&drawn(&mut app, 80, 24)), [11, 12, 13, 20]);
    type_text(&mut app, "I");
    assert_eq!(listed_pids(&drawn(&mut app, 80, 24)), [20, 13, 12, 11]);
    press(&mut app, KeyCode::F(6));
    assert!(drawn(&mut app, 80, 24).iter().any(|line| line.starts_with(" USER     id of the user")));
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Enter);
    assert_eq!((app.arrangement.sort, app.arrangement.is_reversed), (Column::Name, false));
    type_text(&mut app, ">");
    assert_eq!(app.arrangement.sort, Column::Cpu);
    type_text(&mut app, "<<<<");
    assert_eq!(app.arrangement.sort, Column::History);

    type_text(&mut app, "/cc1p");
    assert_eq!(listed_pids(&drawn(&mut app, 80, 24)), [12]);
    press(&mut app, KeyCode::Enter);
    type_text(&mut app, "/");
    press(&mut app, KeyCode::Backspace);
    assert_eq!(listed_pids(&drawn(&mut app, 80, 24)), [12, 11]);
    press(&mut app, KeyCode::Esc);
    assert_eq!(app.arrangement.filter, "cc1p");
    type_text(&mut app, "/xyz");
    press(&mut app, KeyCode::Enter);
    assert!(drawn(&mut app, 80, 24).iter().any(|line| line.contains("No process matches the filter")));

    type_text(&mut app, "s0");
    assert_eq!(press(&mut app, KeyCode::Enter), Effect::None);
    assert_eq!(app.mode, Mode::Interval("0".into()), "0 is too short");
    type_text(&mut app, ".5");
    assert_eq!((press(&mut app, KeyCode::Enter), app.interval), (Effect::Sample, Duration::from_millis(500)));
    assert_eq!((press(&mut app, KeyCode::Char(' ')), app.is_paused), (Effect::None, true));
    assert!(drawn(&mut app, 80, 24)[0].contains("PAUSED"));
    assert_eq!((press(&mut app, KeyCode::Char(' ')), app.is_paused), (Effect::Sample, false));

    press(&mut app, KeyCode::Char('?'));
    assert!(drawn(&mut app, 80, 24)[0].starts_with("pagemill top: processes"));
    assert_eq!((press(&mut app, KeyCode::Char('q')), app.mode.clone()), (Effect::None, Mode::List));
    assert_eq!(press(&mut app, KeyCode::Char('q')), Effect::Quit);
    let control = |letter| KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL);
    assert_eq!([app.press(control('c')), app.press(control('z'))], [Effect::Quit, Effect::Suspend]);
}

/// The lines above the table have the returned and the purged memory, with their causes.
#[test]
fn causes_are_shown_above_the_table() {
    let mut app = app();
    app.take_sample(usual_sample(Instant::now(), 3));
    let lines = drawn(&mut app, 160, 50);
    assert!(lines[3].contains("so far for age 3M  purged 3M (group 3M)"), "{lines:#?}");
}

/// The details have the figures and the plot of a process. They stay on the screen after the process has ended.
#[test]
fn details_stay_after_the_end() {
    let mut app = app();
    drawn(&mut app, 100, 40);
    press(&mut app, KeyCode::Enter);
    app.take_sample(usual_sample(Instant::now(), 3));
    let text = drawn(&mut app, 100, 40).join("\n");
    assert!(text.starts_with("20 redis-server"), "{text}");
    assert!(text.contains("resident                 512 MiB") && text.contains("for age"), "{text}");
    assert!(text.contains("Purged volatile memory") && text.contains("for group"), "{text}");
    assert!(text.contains("latest 2 samples") && text.contains("██"), "{text}");
    app.take_sample(sample(Instant::now(), Vec::new(), Vec::new()));
    assert!(drawn(&mut app, 100, 40)[1].contains("it has ended"));
    press(&mut app, KeyCode::Esc);
    assert!(drawn(&mut app, 100, 40).iter().any(|line| line.contains("pagemill run -- PROGRAM")));
}

/// Rates are per second, also if a sample is late. The cause of the latest return is shown.
#[test]
fn rates_are_per_second() {
    let mut app = app();
    let begun = app.sample.as_ref().unwrap().at;
    app.take_sample(usual_sample(begun + Duration::from_secs(4), 20));
    let row = app.rows.iter().find(|row| row.identity.pid == 20).unwrap();
    let rates = row.rates.unwrap();
    assert_eq!((rates.returned, Column::Why.text(row).as_str()), (5 * MIB, "age"));
    assert!((rates.cpu_percent - 5.0).abs() < 0.01, "20 ticks of 10 ms in 4 s: {rates:?}");
    assert!(row.cause.unwrap().is_now);
    app.take_sample(usual_sample(begun + Duration::from_secs(5), 20));
    let row = app.rows.iter().find(|row| row.identity.pid == 20).unwrap();
    assert_eq!((row.rates.unwrap().returned, row.cause.unwrap().is_now), (0, false));
    // A counter that falls, because an id was reused or a file is damaged, is no rate.
    app.take_sample(usual_sample(begun + Duration::from_secs(6), 1));
    assert_eq!(app.rows.iter().find(|row| row.identity.pid == 20).unwrap().rates.unwrap().returned, 0);
}

/// A page has all rows and fits into its width. Without processes it says what to start.
#[test]
fn a_page_has_all_rows() {
    let mut app = app();
    app.answers.mounts = vec![Status { mount_point: "/mnt/ram".into(), size_bytes: 1 << 30, ..Status::default() }];
    for width in [40, 80, 200] {
        let page = screen::page(&app, width);
        assert!(page.lines().all(|line| line.chars().count() <= width.into()), "{page}");
        let lines: Vec<String> = page.lines().map(str::to_owned).collect();
        assert_eq!(listed_pids(&lines), [20, 10, 12, 11, 13], "{page}");
        assert!(page.contains("/mnt/ram") && !page.contains('\u{1b}'), "{page}");
    }
    let many = (1000..9000).map(|pid| process(pid, "x", None, 1, 0)).collect();
    app.take_sample(sample(Instant::now(), many, Vec::new()));
    let page = screen::page(&app, 80);
    assert_eq!(page.matches("PID NAME").count(), 1);
    assert_eq!(listed_pids(&page.lines().map(str::to_owned).collect::<Vec<_>>()), (1000..9000).collect::<Vec<_>>());
    let empty = App::new(Duration::from_secs(1), app.arrangement.clone());
    assert!(screen::page(&empty, 80).contains("pagemill run -- PROGRAM"));
}

/// The document has the same processes, with the figures in bytes. A small program has no figures.
#[test]
fn the_document_has_the_figures() {
    let document = json::document(&app());
    let find = |pid: u32| document["processes"].as_array().unwrap().iter().find(|row| row["pid"] == pid).unwrap();
    assert_eq!((&find(20)["resident_bytes"], &find(20)["giveable_bytes"]), (&(512 * MIB).into(), &(128 * MIB).into()));
    assert_eq!((&find(11)["run"], find(13)["resident_bytes"].is_null()), (&10.into(), true));
    assert_eq!(
        (&document["runs"][0]["limit_bytes"], &document["runs"][0]["resident_bytes"]),
        (&(100 * MIB).into(), &(100 * MIB).into())
    );
    assert_eq!(document["machine"]["total_bytes"], 8_u64 << 30);
}

/// Impossible values, which any user can publish, cause no overflow.
#[test]
fn impossible_values_do_not_overflow() {
    let mut app = app();
    let absurd = || {
        let mut absurd = process(30, "absurd", Some(10), 1, 1);
        let sum = &mut absurd.pagemill.as_mut().unwrap().sum;
        pagemill_core::stats::TABLE.iter().for_each(|row| sum.set(row.counter, u64::MAX));
        absurd
    };
    let begun = Instant::now() + Duration::from_secs(60);
    for second in 0..2 {
        let processes = vec![absurd(), process(31, "x", Some(10), 1, 1)];
        app.take_sample(sample(begun + Duration::from_secs(second), processes, vec![run(10, "x", UNLIMITED)]));
        drawn(&mut app, 200, 50);
        screen::page(&app, 80);
        json::document(&app);
        app.details_row = app.rows.iter().find(|row| row.identity.pid == 30).cloned();
        app.mode = Mode::Details(identity(30));
        drawn(&mut app, 200, 50);
        app.mode = Mode::List;
    }
}

#[test]
fn intervals_are_parsed() {
    assert_eq!(
        (parse_interval("0.1"), parse_interval("3600")),
        (Ok(Duration::from_millis(100)), Ok(Duration::from_secs(3600)))
    );
    for text in ["", "0", "0.09", "3601", "-1", "NaN", "inf", "1e30", "x"] {
        assert!(parse_interval(text).is_err(), "{text}");
    }
}
