//! The commands on a terminal: a pty and the content of its screen.

use std::{num::NonZero, process::Child, thread::JoinHandle};

use nix::pty::{Winsize, openpty};

use crate::support::prelude::*;

/// A command with its own terminal.
pub(crate) struct OnTerminal {
    child: Child,
    reader: JoinHandle<Vec<u8>>,
    columns: u16,
}

/// The terminal output of a command, and its exit code.
pub(crate) struct Shown {
    bytes: Vec<u8>,
    pub(crate) code: Option<i32>,
    columns: u16,
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
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        // EIO: all processes have closed the terminal.
        let _ = File::from(pty.master).read_to_end(&mut bytes);
        bytes
    });
    OnTerminal { child, reader, columns }
}

impl OnTerminal {
    pub(crate) fn end(mut self) -> Shown {
        let code = self.child.wait().unwrap().code();
        Shown { bytes: self.reader.join().unwrap(), code, columns: self.columns }
    }
}

impl Shown {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// Returns the non-empty rows of the final screen.
    pub(crate) fn screen(&self) -> Vec<String> {
        let [rows, columns] = [ROWS, self.columns].map(|cells| NonZero::new(cells).unwrap());
        let mut terminal = vt100::Parser::new(rows, columns, 0);
        terminal.process(&self.bytes);
        terminal.screen().rows(0, self.columns).filter(|row| !row.trim().is_empty()).collect()
    }
}

#[test]
fn only_terminals_of_people_show_progress() {
    for (options, term, shows) in
        [(&[][..], "xterm", true), (&[], "dumb", false), (&["-q"], "xterm", false), (&["--json"], "xterm", false)]
    {
        let meeting = Meeting::fake();
        let options = [&["--size", "24MiB", "--verify", "host"][..], options].concat();
        let run = meeting.producer(&options).env("FAKECUDA_SLOW", "cuMemcpyHtoD_v2:120").env("TERM", term);
        let producer = on_terminal(run, 80);
        meeting.consumer(&["--verify", "host"]).end().code(0);
        let shown = producer.end();
        assert_eq!(shown.code, Some(0), "{}", shown.text());
        // Only progress has a rate.
        assert_eq!(shown.text().contains("B/s "), shows, "{:?}", shown.text());
        assert!(shows || !shown.text().contains('\u{1b}'), "{:?}", shown.text());
        assert!(!shown.screen().iter().any(|row| row.contains("B/s ")), "{:?}", shown.screen());
        if options.contains(&"--json") {
            serde_json::from_str::<Value>(shown.text().trim()).unwrap();
        }
    }
}
