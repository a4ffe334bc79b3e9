//! How much the broker holds and does.

use super::{Client, records::unexpected};
use crate::{
    error::Result,
    wire::broker::{Measure, Measured, Message},
};

impl Client {
    /// How much the broker holds and does. What it holds for each user it reports in full to its own user and root, and to others
    /// their own. Blocks as any request.
    ///
    /// # Errors
    /// [`Error::Peer`](crate::Error::Peer), [`Error::System`](crate::Error::System),
    /// [`Error::Interrupted`](crate::Error::Interrupted).
    pub fn metrics(&self) -> Result<Measured> {
        match self.ask(&Message::Measure(Measure {}))? {
            (Message::Measured(measured), _) => Ok(*measured),
            (other, _) => Err(unexpected(&other, "measured")),
        }
    }
}
