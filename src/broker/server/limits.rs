//! The time limits of a server.

use std::time::Duration;

/// How long a server waits for others. Not for users: tests that wait for a limit shorten it.
#[derive(Debug, Clone, Copy)]
pub struct TimeLimits {
    /// How long clients can resume leases of the previous server.
    pub resume: Duration,
    /// How long a starting server waits for the socket of its keeper, and a stopping server for the keeper to confirm everything.
    pub keeper: Duration,
    /// How long a keeper may read nothing before it is killed and replaced.
    pub silence: Duration,
    /// How often to check that the socket's file still exists.
    pub file: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { resume: seconds(10), keeper: seconds(10), silence: seconds(5), file: seconds(10) }
    }
}

impl TimeLimits {
    /// Sets a limit by its name. Returns whether it exists.
    pub fn set(&mut self, name: &str, limit: Duration) -> bool {
        let field = match name {
            "resume" => &mut self.resume,
            "keeper" => &mut self.keeper,
            "silence" => &mut self.silence,
            "file" => &mut self.file,
            _ => return false,
        };
        *field = limit;
        true
    }
}
