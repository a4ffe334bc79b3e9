//! The last output of a child on standard error.

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

/// The number of bytes kept.
const MAX_KEPT: usize = 4096;

/// How long to wait for the remaining output after the process exits. Another process may hold its standard error open.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// The last bytes on a child's standard error. A thread reads the stream, so that the child never blocks.
#[derive(Debug)]
pub struct StderrTail {
    text: Arc<Mutex<String>>,
    /// Disconnected at end of file.
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
                // A driver may write invalid UTF-8.
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

    /// The first line kept, once the process has exited.
    pub fn first_line(&self) -> Option<String> {
        self.text().lines().find(|line| !line.trim().is_empty()).map(str::to_owned)
    }

    /// The last line, once the process has exited.
    pub fn last_line(&self) -> Option<String> {
        self.text().lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned)
    }

    fn text(&self) -> String {
        // No value is ever sent: returns at end of file, or after the timeout.
        let _ = self.open.recv_timeout(DRAIN_TIMEOUT);
        self.text.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn append(kept: &mut String, text: &str) {
    kept.push_str(text);
    let mut surplus = kept.len().saturating_sub(MAX_KEPT);
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
    fn keeps_the_last_bytes() {
        let mut kept = String::new();
        for part in ["first", &"ä".repeat(MAX_KEPT), "last"] {
            append(&mut kept, part);
        }
        assert!(kept.len() <= MAX_KEPT && kept.len() > MAX_KEPT - 2, "{}", kept.len());
        assert!(kept.starts_with('ä') && kept.ends_with("älast"));
    }

    #[test]
    fn first_and_last_line() {
        let script = "printf 'one\\ntwo\\n\\n' >&2";
        let mut child = Command::new("sh").args(["-c", script]).stderr(Stdio::piped()).spawn().unwrap();
        let tail = StderrTail::read(child.stderr.take().unwrap()).unwrap();
        child.wait().unwrap();
        assert_eq!((tail.first_line().as_deref(), tail.last_line().as_deref()), (Some("one"), Some("two")));
    }
}
