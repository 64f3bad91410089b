//! The event loop on a terminal: samples, keys, answers, signals. The terminal is restored at every end.

use super::app::{App, Effect};
use super::inspect::{Answers, Chooser, Inspector};
use super::sample::Sampler;
use super::screen;
use crate::fail;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, KeyEventKind};
use ratatui::crossterm::terminal::{EnterAlternateScreen, enable_raw_mode};
use ratatui::crossterm::{cursor, execute};
use ratatui::layout::{Position, Rect};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::io;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// Pause before the second sample, which shows the first rates.
pub const FIRST_PAUSE: Duration = Duration::from_millis(250);

enum Event {
    Terminal(event::Event),
    /// No more input can be read.
    InputEnded,
    Answers(Box<Answers>),
    Signal(i32),
}

/// Shows the screen until a key or a signal ends it, or after `count` samples.
pub fn run(app: &mut App, sampler: &mut Sampler, count: Option<u64>) -> ExitCode {
    let (events, received) = mpsc::channel();
    // Signals are handled before the terminal is changed, so that no signal leaves it changed.
    if let Err(error) = forward_signals(events.clone()) {
        return fail(1, &format!("signals cannot be handled: {error}"));
    }
    let deliver = events.clone();
    let inspector = Inspector::start(move |answers| drop(deliver.send(Event::Answers(Box::new(answers)))));
    let inspector = match inspector {
        Ok(inspector) => inspector,
        Err(error) => return fail(1, &format!("a thread cannot be started: {error}")),
    };
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => {
            ratatui::restore();
            return fail(1, &format!("the terminal cannot be used ({error}); --once prints one page"));
        }
    };
    let end = forward_input(events)
        .and_then(|()| Loop { app, sampler, inspector: &inspector, received }.run(&mut terminal, count));
    let restored = ratatui::try_restore().and_then(|()| execute!(io::stdout(), cursor::Show));
    drop(inspector);
    match end.and_then(|signal| restored.map(|()| signal)) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(signal)) => {
            let _ = emulate_default_handler(signal);
            ExitCode::from(128 + signal as u8)
        }
        // The terminal was closed.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(1, &format!("the terminal cannot be used: {error}")),
    }
}

/// Starts a thread that sends signals as events.
fn forward_signals(events: Sender<Event>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGTSTP])?;
    let forward = move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(forward).map(drop)
}

/// Starts a thread that sends keys and changes of the terminal's size as events.
fn forward_input(events: Sender<Event>) -> io::Result<()> {
    let forward = move || {
        while let Ok(input) = event::read() {
            if events.send(Event::Terminal(input)).is_err() {
                return;
            }
        }
        let _ = events.send(Event::InputEnded);
    };
    thread::Builder::new().name("input".into()).spawn(forward).map(drop)
}

struct Loop<'a> {
    app: &'a mut App,
    sampler: &'a mut Sampler,
    inspector: &'a Inspector,
    received: Receiver<Event>,
}

impl Loop<'_> {
    /// Returns the signal that ended the loop, if any.
    fn run(self, terminal: &mut DefaultTerminal, count: Option<u64>) -> io::Result<Option<i32>> {
        let Self { app, sampler, inspector, received } = self;
        let (mut next, mut taken, mut chooser) = (Instant::now(), 0, Chooser::default());
        loop {
            if !app.is_paused && Instant::now() >= next {
                if count.is_some_and(|count| taken >= count) {
                    return Ok(None);
                }
                app.take_sample(sampler.sample());
                taken += 1;
                let pause = if taken == 1 { app.interval.min(FIRST_PAUSE) } else { app.interval };
                // After a pause of this process, missed samples are not caught up.
                next = (next + pause).max(Instant::now());
                if let Some(sample) = &app.sample {
                    inspector.ask(chooser.choose(sample, app.focus(), app.view == super::app::View::Slabs));
                }
                draw(app, terminal)?;
            }
            let event = if app.is_paused {
                received.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                received.recv_timeout(next.saturating_duration_since(Instant::now()))
            };
            match event {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) | Ok(Event::InputEnded) => return Ok(None),
                Ok(Event::Signal(SIGTSTP)) => {
                    suspend(terminal)?;
                    draw(app, terminal)?;
                }
                Ok(Event::Signal(signal)) => return Ok(Some(signal)),
                Ok(Event::Answers(answers)) => app.take_answers(*answers),
                Ok(Event::Terminal(event::Event::Key(key))) if key.kind != KeyEventKind::Release => {
                    match app.press(key) {
                        Effect::Quit => return Ok(None),
                        Effect::Suspend => suspend(terminal)?,
                        Effect::Sample => next = Instant::now(),
                        Effect::Redraw => clear(terminal)?,
                        Effect::None => {}
                    }
                    draw(app, terminal)?;
                }
                Ok(Event::Terminal(event::Event::Resize(..))) => draw(app, terminal)?,
                Ok(Event::Terminal(_)) => {}
            }
        }
    }
}

fn draw(app: &mut App, terminal: &mut DefaultTerminal) -> io::Result<()> {
    terminal.draw(|frame| screen::draw(app, frame.area(), frame.buffer_mut())).map(drop)
}

/// Restores the terminal and stops this process, as Ctrl-Z does. Returns when the process continues.
fn suspend(terminal: &mut DefaultTerminal) -> io::Result<()> {
    ratatui::try_restore()?;
    execute!(io::stdout(), cursor::Show)?;
    emulate_default_handler(SIGTSTP)?;
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)?;
    clear(terminal)
}

/// Makes the next drawing write all cells. `Terminal::clear` would read the cursor's position from the input, for which
/// the thread of the input waits.
fn clear(terminal: &mut DefaultTerminal) -> io::Result<()> {
    let size = terminal.size()?;
    terminal.resize(Rect::from((Position::ORIGIN, size)))
}
