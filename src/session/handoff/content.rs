//! The caller's data and its check. The session does not interpret either.

use std::{fmt, ops::Range};

use super::object::ImportedObject;
use crate::{
    error::Result,
    memory::Shared,
    session::{Check, Verdict},
};

/// Callback for long work: sends `busy` to the peer when due, and fails if the session must stop. Call it often.
pub type Tick<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The data of a producer's buffer, and its check. [`super::serve`] calls the methods.
///
/// Every method has a default. [`Unchecked`] uses all defaults: the program writes the data by other means, and nothing is checked.
pub trait Content: Send + Sync {
    /// Writes the data. No consumer has the memory during the call. Called before the first consumer is served, and again after a consumer
    /// has replied into the buffer. May block; calls `tick` often.
    ///
    /// # Errors
    /// Any error stops the service.
    fn fill(&self, memory: &Shared, tick: Tick<'_>) -> Result<()> {
        let _ = (memory, tick);
        Ok(())
    }

    /// Whether consumers reply by writing into the buffer. Applies to round trips with [`crate::driver::Access::ReadWrite`].
    fn expects_reply(&self) -> bool {
        false
    }

    /// Returns the offer's check of a byte range. `reply` is true if the consumer must reply. May block; calls `tick` often.
    ///
    /// # Errors
    /// Any error fails the session with this consumer.
    fn check(&self, range: &Range<u64>, reply: bool, tick: Tick<'_>) -> Result<Option<Check>> {
        let _ = (range, reply, tick);
        Ok(None)
    }

    /// Checks that a consumer's result is a valid answer to an offer. A consumer that ignored the check sends no figures.
    ///
    /// # Errors
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if the result contradicts itself or the offer. A result that
    /// reports wrong data still counts as a mismatch.
    fn accept(&self, offered: &Offered, result: &Verdict) -> Result<()> {
        let _ = (offered, result);
        Ok(())
    }

    /// Returns the producer's answer to an accepted result. If a reply was expected and sent, checks it. By default repeats the consumer's
    /// verdict. May block; calls `tick` often.
    ///
    /// # Errors
    /// Any error fails the session with this consumer. Report wrong data with a verdict, not with an error.
    fn judge(&self, memory: &Shared, offered: &Offered, result: &Verdict, tick: Tick<'_>) -> Result<Verdict> {
        let _ = (memory, offered, tick);
        Ok(Verdict::unchecked(result.verified))
    }
}

/// The offer to a consumer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Offered {
    /// The offered bytes.
    pub range: Range<u64>,
    /// Whether the consumer must reply.
    pub reply: bool,
    /// The result of [`Content::check`].
    pub check: Option<Check>,
}

/// Content that the program writes by other means, without a check.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unchecked;

impl Content for Unchecked {}

/// A consumer's check of the data. [`super::Consumer::verify`] and [`super::fetch`] call the methods.
pub trait Verifier {
    /// Inspects an offer before its memory is opened. Accepts everything by default.
    ///
    /// # Errors
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if the check contradicts itself;
    /// [`PeerError::Mismatch`](crate::error::PeerError::Mismatch) if this side should support the check but can't perform it.
    fn inspect(&mut self, check: Option<&Check>, access: crate::driver::Access) -> Result<()> {
        let _ = (check, access);
        Ok(())
    }

    /// Checks the requested bytes against [`ImportedObject::check`]. A verifier that does not know the check returns
    /// [`Verdict::unchecked`]`(true)`. May block; calls `tick` often.
    ///
    /// # Errors
    /// Any error of the caller. Report wrong data with a verdict, not with an error.
    fn verify(&mut self, object: &ImportedObject, tick: Tick<'_>) -> Result<Verdict>;

    /// Writes the reply if the check asks for one. Called only if the data was right. May block; calls `tick` often.
    ///
    /// # Errors
    /// Any error of the caller.
    fn reply(&mut self, object: &ImportedObject, tick: Tick<'_>) -> Result<()> {
        let _ = (object, tick);
        Ok(())
    }

    /// Checks that the producer's result is a valid answer to this side's result.
    ///
    /// # Errors
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if the result contradicts itself or the reply.
    fn accept(&mut self, object: &ImportedObject, own: &Verdict, answer: &Verdict) -> Result<()> {
        let _ = (object, own, answer);
        Ok(())
    }
}

impl Verifier for Unchecked {
    fn verify(&mut self, _: &ImportedObject, _: Tick<'_>) -> Result<Verdict> {
        Ok(Verdict::unchecked(true))
    }
}

/// The content of a buffer, with [`fmt::Debug`].
pub(super) struct BoxedContent<'a>(pub(super) Box<dyn Content + 'a>);

impl fmt::Debug for BoxedContent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Content")
    }
}
