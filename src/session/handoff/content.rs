//! What data is and how it is checked: given by the caller, and of no concern to the session.

use std::{fmt, ops::Range};

use super::object::ImportedObject;
use crate::{
    error::Result,
    memory::Shared,
    session::{Check, Verdict},
};

/// To be called often during long work: it sends `busy` to the peer, and fails when the session has to end.
pub type Tick<'a> = &'a mut dyn FnMut() -> Result<()>;

/// What a producer's buffer holds, and what its consumers can check it against. [`super::serve`] calls it.
///
/// Everything has a default: [`Unchecked`] is content that the program writes by other means, and that is not checked.
pub trait Content: Send + Sync {
    /// Writes the data into the memory, which no consumer has at that time. Called before the first consumer is served, and again
    /// after a consumer's reply has replaced it. May block; calls `tick` often.
    ///
    /// # Errors
    /// Whatever it fails with, which ends the service.
    fn fill(&self, memory: &Shared, tick: Tick<'_>) -> Result<()> {
        let _ = (memory, tick);
        Ok(())
    }

    /// Whether consumers reply by writing into the buffer where that is possible: in a round trip, with
    /// [`crate::driver::Access::ReadWrite`].
    fn expects_reply(&self) -> bool {
        false
    }

    /// What a consumer can check a range of bytes against; `reply` if it is to reply. May block; calls `tick` often.
    ///
    /// # Errors
    /// Whatever it fails with, which ends the conversation with that consumer.
    fn check(&self, range: &Range<u64>, reply: bool, tick: Tick<'_>) -> Result<Option<Check>> {
        let _ = (range, reply, tick);
        Ok(None)
    }

    /// Whether a consumer's result can be an answer to an offer. A consumer that ignored the check sends none.
    ///
    /// # Errors
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if it contradicts itself or the offer. If it says that
    /// something was wrong, that counts all
    /// the same.
    fn accept(&self, offered: &Offered, result: &Verdict) -> Result<()> {
        let _ = (offered, result);
        Ok(())
    }

    /// What the producer answers to a result that was accepted: checks the reply, if one was expected and sent. By default what the
    /// consumer said. May block; calls `tick` often.
    ///
    /// # Errors
    /// Whatever it fails with, which ends the conversation with that consumer. Wrong data is no error, but a verdict.
    fn judge(&self, memory: &Shared, offered: &Offered, result: &Verdict, tick: Tick<'_>) -> Result<Verdict> {
        let _ = (memory, offered, tick);
        Ok(Verdict::unchecked(result.verified))
    }
}

/// What a consumer was offered.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Offered {
    /// Which bytes.
    pub range: Range<u64>,
    /// Whether it is to reply.
    pub reply: bool,
    /// What [`Content::check`] returned.
    pub check: Option<Check>,
}

/// Content that the program writes by other means, and that is not checked.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unchecked;

impl Content for Unchecked {}

/// What a consumer does with the check of an offer. [`super::Consumer::verify`] and [`super::fetch`] call it.
pub trait Verifier {
    /// Looks at an object before its memory is opened. By default anything is accepted.
    ///
    /// # Errors
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) for a check that contradicts itself;
    /// [`PeerError::Mismatch`](crate::error::PeerError::Mismatch) for one that this side should
    /// know and can't do.
    fn inspect(&mut self, check: Option<&Check>, access: crate::driver::Access) -> Result<()> {
        let _ = (check, access);
        Ok(())
    }

    /// Checks the bytes that were asked for against [`ImportedObject::check`]. A verifier that does not know that check returns
    /// [`Verdict::unchecked`] with `true`. May block; calls `tick` often.
    ///
    /// # Errors
    /// Whatever it fails with. Wrong data is no error, but a verdict.
    fn verify(&mut self, object: &ImportedObject, tick: Tick<'_>) -> Result<Verdict>;

    /// Writes the reply that the check asks for, if it asks for one. Called only if all was right. May block; calls `tick` often.
    ///
    /// # Errors
    /// Whatever it fails with.
    fn reply(&mut self, object: &ImportedObject, tick: Tick<'_>) -> Result<()> {
        let _ = (object, tick);
        Ok(())
    }

    /// Whether the producer's result can be an answer to this side's.
    ///
    /// # Errors
    /// [`PeerError::Protocol`](crate::error::PeerError::Protocol) if it contradicts itself or what was replied.
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

/// Content as its buffer owns it.
pub(super) struct Boxed<'a>(pub(super) Box<dyn Content + 'a>);

impl fmt::Debug for Boxed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Content")
    }
}
