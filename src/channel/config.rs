//! What both sides of a session are configured with.

use std::time::Duration;

use super::{Cancel, Trust};
use crate::error::Result;

/// How a session treats its peer: how long it waits, whom it trusts, what ends it early.
///
/// ```
/// use std::time::Duration;
/// use vmmfd::{channel::Cancel, session::Config};
///
/// # fn main() -> vmmfd::Result<()> {
/// let config = Config::default();
/// assert_eq!(config.timeout, Duration::from_secs(30));
/// let impatient = Config::default().timeout(Duration::from_millis(500)).cancel(&Cancel::new()?);
/// # drop(impatient);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The longest silence of the peer, and the longest wait for one to appear: 30 s by default. The peer learns it, and says
    /// that it is busy as often as this requires.
    pub timeout: Duration,
    /// Which users the peer may belong to: by default this process's user and root.
    pub trust: Trust,
    /// Ends the session's waits early, with [`crate::Error::Interrupted`]; by default nothing does.
    pub cancel: Option<Cancel>,
}

impl Default for Config {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(30), trust: Trust::default(), cancel: None }
    }
}

impl Config {
    /// Sets the timeout.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets which users to trust.
    pub fn trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }

    /// Sets what ends it early.
    pub fn cancel(self, cancel: &Cancel) -> Self {
        Self { cancel: Some(cancel.clone()), ..self }
    }

    /// What ends it early, or something that never does.
    pub(crate) fn cancellation(&self) -> Result<Cancel> {
        self.cancel.clone().map_or_else(Cancel::new, Ok)
    }
}
