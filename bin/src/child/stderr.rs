//! The end of what a child writes to standard error.

use std::{
    io::Read,
    process::ChildStderr,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use vmmfd::error::{Error, Result};

/// How many bytes are kept.
const KEPT: usize = 4096;

/// How long the rest of the text of a process that has ended may take to arrive. Another process may hold its standard error
/// open, so that the stream does not end.
const REST: Duration = Duration::from_millis(100);

/// The last bytes of a process's standard error. A thread reads the stream to its end, so that the process is never blocked.
#[derive(Debug)]
pub struct StderrTail {
    text: Arc<Mutex<String>>,
    /// Disconnected at the end of the stream.
    open: Receiver<()>,
}

impl StderrTail {
    /// # Errors
    /// [`Error::System`] if no thread can be started.
    pub fn read(mut stderr: ChildStderr) -> Result<Self> {
        let text = Arc::new(Mutex::new(String::new()));
        let (kept, (sender, open)) = (Arc::clone(&text), mpsc::channel());
        let read = move || {
            let _open = sender;
            let mut bytes = [0; 1024];
            while let Ok(length @ 1..) = stderr.read(&mut bytes) {
                // A driver may write bytes that are no UTF-8.
                append(
                    &mut kept.lock().unwrap_or_else(PoisonError::into_inner),
                    &String::from_utf8_lossy(&bytes[..length]),
                );
            }
        };
        let spawned = thread::Builder::new().name("stderr".to_owned()).spawn(read);
        spawned.map_err(|error| Error::system("start a thread", error))?;
        Ok(Self { text, open })
    }

    /// The first line that was kept, of a process that has ended.
    pub fn first_line(&self) -> Option<String> {
        self.text().lines().find(|line| !line.trim().is_empty()).map(str::to_owned)
    }

    /// The last line, of a process that has ended or was killed.
    pub fn last_line(&self) -> Option<String> {
        self.text().lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned)
    }

    fn text(&self) -> String {
        // Nothing is ever sent: this ends with the stream, or after the time.
        let _ = self.open.recv_timeout(REST);
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn append(kept: &mut String, text: &str) {
    kept.push_str(text);
    let mut surplus = kept.len().saturating_sub(KEPT);
    while !kept.is_char_boundary(surplus) {
        surplus += 1;
    }
    kept.drain(..surplus);
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_last_bytes_are_kept() {
        let mut kept = String::new();
        for part in ["first", &"ä".repeat(KEPT), "last"] {
            append(&mut kept, part);
        }
        assert!(kept.len() <= KEPT && kept.len() > KEPT - 2, "{}", kept.len());
        assert!(kept.starts_with('ä') && kept.ends_with("älast"));
    }

    #[test]
    fn the_lines_of_a_process_that_has_ended_are_there() {
        let script = "printf 'one\\ntwo\\n\\n' >&2";
        let mut child = Command::new("sh").args(["-c", script]).stderr(Stdio::piped()).spawn().unwrap();
        let tail = StderrTail::read(child.stderr.take().unwrap()).unwrap();
        child.wait().unwrap();
        assert_eq!((tail.first_line().as_deref(), tail.last_line().as_deref()), (Some("one"), Some("two")));
    }
}
