//! The configuration of both sides of a session.

use std::time::Duration;

use super::{Cancel, Trust};
use crate::error::Result;

/// How a session or a broker's client treats its peer: times, trusted users, and cancellation.
///
/// ```
/// use std::time::Duration;
/// use vmmfd::{channel::Cancel, session::Config};
///
/// # fn main() -> vmmfd::Result<()> {
/// let config = Config::default();
/// assert_eq!(config.timeout, Duration::from_secs(30));
/// let short = Config::default().timeout(Duration::from_millis(500)).cancel(&Cancel::new()?);
/// # drop(short);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Longest silence of the peer, and longest wait for a session's peer to appear. By default 30 s. The hello contains it, and a busy
    /// peer sends `busy` often enough.
    pub timeout: Duration,
    /// Longest wait of [`Client::connect`](crate::broker::Client::connect) for a broker to listen. By default 1 s, or the timeout if that
    /// is shorter.
    pub wait: Option<Duration>,
    /// The users that the peer may run as: by default this process's user and root.
    pub trust: Trust,
    /// Cancels the session's waits with [`crate::Error::Interrupted`]. By default none.
    pub cancel: Option<Cancel>,
}

impl Default for Config {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(30), wait: None, trust: Trust::default(), cancel: None }
    }
}

impl Config {
    /// Sets the timeout.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets the wait for a broker to listen.
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait: Some(wait), ..self }
    }

    /// Sets the trusted users.
    pub fn trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    /// Sets the request that cancels the session's waits.
    pub fn cancel(self, cancel: &Cancel) -> Self {
        Self { cancel: Some(cancel.clone()), ..self }
    }

    /// The cancel request, or a request that is never made.
    pub(crate) fn cancellation(&self) -> Result<Cancel> {
        self.cancel.clone().map_or_else(Cancel::new, Ok)
    }
}
