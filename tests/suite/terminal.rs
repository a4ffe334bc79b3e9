//! The commands on a terminal: a pty and the content of its screen.

use std::{
    process::{Child, Stdio},
    thread::JoinHandle,
};

use nix::{
    pty::{Winsize, openpty},
    sys::signal::{self},
    unistd::Pid,
};

use crate::support::prelude::*;

/// The delay of each copy in the emulated driver for tests of long transfers, in milliseconds.
const SLOW: &str = "cuMemcpyHtoD_v2:120";

/// A command with its own terminal.
pub(crate) struct OnTerminal {
    child: Child,
    keyboard: File,
    reader: JoinHandle<Vec<u8>>,
    seen: Arc<std::sync::Mutex<Vec<u8>>>,
    size: (u16, u16),
}

/// The terminal output of a command, and its exit code.
pub(crate) struct Shown {
    bytes: Vec<u8>,
    pub(crate) code: Option<i32>,
    size: (u16, u16),
}

const ROWS: u16 = 200;

/// Starts a command with a terminal of this width as standard output and standard error.
pub(crate) fn on_terminal(mut run: Run, columns: u16) -> OnTerminal {
    let size = Winsize { ws_row: ROWS, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(Some(&size), None).unwrap();
    let end = || Stdio::from(pty.slave.try_clone().unwrap());
    run.command.stdin(Stdio::null()).stdout(end()).stderr(end());
    let usual = [
        ("TERM", Some("xterm-256color")),
        ("CLICOLOR", None),
        ("CLICOLOR_FORCE", None),
        ("COLORTERM", None),
        ("CI", None),
    ];
    for (name, value) in usual {
        if !run.command.get_envs().any(|(set, _)| set == name) {
            match value {
                Some(value) => run.command.env(name, value),
                None => run.command.env_remove(name),
            };
        }
    }
    let child = run.command.spawn().unwrap();
    // The reader sees EIO once the last process has closed the terminal: only the command may keep a copy.
    drop((run, pty.slave));
    let keyboard = File::from(pty.master.try_clone().unwrap());
    let seen: Arc<std::sync::Mutex<Vec<u8>>> = Default::default();
    let shared = seen.clone();
    let reader = thread::spawn(move || {
        let mut master = File::from(pty.master);
        let mut buffer = [0; 4096];
        // EIO: all processes have closed the terminal.
        while let Ok(read @ 1..) = master.read(&mut buffer) {
            shared.lock().unwrap().extend_from_slice(&buffer[..read]);
        }
        shared.lock().unwrap().clone()
    });
    OnTerminal { child, keyboard, reader, seen, size: (ROWS, columns) }
}

impl OnTerminal {
    /// Waits until the output contains `words`.
    fn until(&mut self, words: &str) {
        wait_for(words, || {
            let seen = String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned();
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none() || seen.contains(words), "it ended without `{words}`: {seen}");
            seen.contains(words)
        });
    }

    /// Types Ctrl-C, which the terminal shows as `^C`. The signal is sent separately: the command does not control the terminal.
    fn interrupt(&mut self) {
        self.keyboard.write_all(b"\x03").unwrap();
        self.until("^C");
        signal::kill(Pid::from_raw(self.child.id() as i32), Signal::SIGINT).unwrap();
    }

    pub(crate) fn end(mut self) -> Shown {
        let code = self.child.wait().unwrap().code();
        Shown { bytes: self.reader.join().unwrap(), code, size: self.size }
    }
}

impl Shown {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// Returns the non-empty rows of the final screen.
    pub(crate) fn screen(&self) -> Vec<String> {
        self.screens(self.bytes.len().max(1)).last().unwrap_or_default()
    }

    /// Returns the rows with text after each `step` bytes, and at the end.
    fn screens(&self, step: usize) -> impl Iterator<Item = Vec<String>> {
        let mut terminal = vt100::Parser::new(dimension(self.size.0), dimension(self.size.1), 0);
        self.bytes.chunks(step).map(move |bytes| {
            terminal.process(bytes);
            terminal.screen().rows(0, self.size.1).filter(|row| !row.trim().is_empty()).collect()
        })
    }

    /// Returns the text of every bar that was drawn.
    fn bars(&self) -> Vec<String> {
        let text = self.text();
        let bars = text.split(['\r', '\n']).filter(|part| is_bar(part));
        bars.map(str::to_owned).collect()
    }
}

/// Reports whether a row is a bar: only bars contain a rate.
fn is_bar(row: &str) -> bool {
    row.contains("B/s ") || row.contains('█') || row.contains('░')
}

#[test]
fn long_transfer_shows_a_bar() {
    let _turn = crate::support::cpu_turn();
    for columns in [40, 200] {
        let meeting = Meeting::fake();
        let run =
            meeting.producer(&["--size", "32MiB", "--verify", "host", "--timeout", "60s"]).env("FAKECUDA_SLOW", SLOW);
        let mut producer = on_terminal(run, columns);
        producer.until("shared");
        let consumer = on_terminal(meeting.consumer(&["--verify", "host"]), columns);
        assert_eq!(consumer.end().code, Some(0));
        let shown = producer.end();
        assert_eq!(shown.code, Some(0), "{}", shown.text());
        let mut bars = shown.bars();
        bars.dedup();
        assert!(bars.len() > 2, "it moves: {bars:?}");
        assert!(!bars.iter().any(|bar| bar.contains("0 B/0 B")), "{bars:?}");
        for bar in &bars {
            assert!(bar.contains("/32.00 MiB"), "{bar}");
            // The terminal's echo of Ctrl-C, `^C`, still fits beside the bar.
            assert!(bar.trim_start_matches("\u{1b}[2K").chars().count() + 4 <= usize::from(columns), "{bar:?}");
        }
        // Two bars are never visible at once. A row wider than the terminal would leave a second bar.
        for screen in shown.screens(7) {
            assert!(screen.iter().filter(|row| is_bar(row)).count() <= 1, "{screen:?}");
        }
        let screen = shown.screen();
        assert!(!screen.iter().any(|row| is_bar(row)), "{screen:?}");
        // Each line starts a row.
        for name in ["producer  pid ", "shared    32 MiB ", "verified  32 MiB, "] {
            assert_eq!(screen.iter().filter(|row| row.starts_with(name)).count(), 1, "{name}: {screen:?}");
        }
    }
}

#[test]
fn slow_allocation_is_shown_and_interrupted() {
    let meeting = Meeting::fake();
    let interrupted_at_once = || {
        let run = meeting.producer(&["--size", "512MiB"]).env("FAKECUDA_SLOW", format!("cuMemCreate:{HANGS}"));
        let mut producer = on_terminal(run, 80);
        producer.until("allocating 512 MiB");
        producer.interrupt();
        let shown = producer.end();
        assert_eq!(shown.code, Some(130), "{}", shown.text());
        let screen = shown.screen();
        let (error, lines) = screen.split_last().unwrap();
        assert!(error.starts_with("error: interrupted"), "{screen:?}");
        // The kernel may echo Ctrl-C after the program has cleared the row.
        let is_ours = |line: &String| line.trim_start_matches("^C").starts_with("producer  ");
        assert!(lines.len() < 2 && lines.iter().all(is_ours), "{screen:?}");
        // Two seconds after a signal, a process that still waits is ended, and prints only the error.
        lines.len() == 1
    };
    assert!((0..5).any(|_| interrupted_at_once()), "no attempt ended before the process was forced to");
}

#[test]
fn dumb_quiet_and_json_have_no_bar() {
    for (options, term) in [(&[][..], "dumb"), (&["-q"], "xterm"), (&["--json"], "xterm")] {
        let meeting = Meeting::fake();
        let options = [&["--size", "24MiB", "--verify", "host"][..], options].concat();
        let run = meeting.producer(&options).env("FAKECUDA_SLOW", SLOW).env("TERM", term);
        let producer = on_terminal(run, 80);
        meeting.consumer(&["--verify", "host"]).end().code(0);
        let shown = producer.end();
        assert_eq!(shown.code, Some(0), "{}", shown.text());
        assert!(shown.bars().is_empty() && !shown.text().contains('\u{1b}'), "{:?}", shown.text());
        if options.contains(&"--json") {
            serde_json::from_str::<Value>(shown.text().trim()).unwrap();
        }
    }
}

fn dimension(cells: u16) -> std::num::NonZero<u16> {
    std::num::NonZero::new(cells).unwrap()
}
