//! A check and its result as JSON on the wire.

use std::ops::Range;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _},
};
use vmmfd::{
    driver::Access,
    error::{Error, ErrorCode, PeerError, ProtocolError, Result},
    internals::{clean, shorten},
    session::{Check, Verdict},
    wire::MAX_NAME,
};

use super::{
    files,
    pattern::{Mismatch, Verification, touched},
};

/// The expected content of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Claim {
    /// The salt, if the content is the pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<u32>,
    /// The salt of the pattern to write as a reply in a round trip. It must differ from `salt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_salt: Option<u32>,
    /// The digest of the requested bytes, if the content is not the pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl Claim {
    /// Parses an offer's check. The check of an unknown extension becomes an empty claim.
    ///
    /// # Errors
    /// [`PeerError::Protocol`] for fields of the wrong type.
    pub fn read(check: Option<&Check>) -> Result<Self> {
        let mut claim: Self = check.map_or_else(|| Ok(Self::default()), parse)?;
        claim.digest.as_mut().map_or(Ok(()), bounded)?;
        Ok(claim)
    }

    /// Checks that the claim is consistent with itself and with the offer's access, and that this version supports it.
    ///
    /// # Errors
    /// [`PeerError::Protocol`]; [`PeerError::Mismatch`] for a digest of an unknown algorithm.
    pub fn inspect(&self, access: Access) -> Result<()> {
        if let (Some(salt), Some(digest)) = (self.salt, &self.digest) {
            return Err(wrong(format!(
                "a check has the salt {salt} and the digest `{digest}`: only one of them belongs there"
            )));
        }
        match (self.salt, self.reply_salt) {
            (None, Some(reply)) => return Err(wrong(format!("a check has the reply_salt {reply} without a salt"))),
            (Some(salt), Some(reply)) if salt == reply => {
                return Err(wrong(format!("a check has the reply_salt {reply}, which is also its salt")));
            }
            _ => {}
        }
        if self.reply_salt.is_some() && access == Access::ReadOnly {
            return Err(wrong("a reply is requested in memory that is offered read-only".to_owned()));
        }
        match &self.digest {
            Some(digest) if !files::is_known(digest) => {
                let message = format!("the data comes with the digest `{digest}`, which this version can't check");
                Err(Error::Peer(PeerError::Mismatch { code: ErrorCode::Failed, message }))
            }
            _ => Ok(()),
        }
    }

    pub fn to_check(&self) -> Check {
        to_check(self)
    }
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// The number of checked words.
    pub words: u64,
    /// The number of wrong words.
    pub mismatches: u64,
    /// The first wrong word.
    #[serde(default, deserialize_with = "optional_object")]
    pub first_mismatch: Option<Mismatch>,
    /// The computed digest, if the offer has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

/// Not an array of the fields' values, which serde's derived code accepts too.
fn optional_object<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<Mismatch>, D::Error> {
    let fields = Option::<Check>::deserialize(input)?;
    fields.map(|fields| Mismatch::deserialize(fields).map_err(D::Error::custom)).transpose()
}

impl From<&Verification> for Figures {
    fn from(verification: &Verification) -> Self {
        let Verification { words, mismatches, first } = *verification;
        Self { words, mismatches, first_mismatch: first, digest: None }
    }
}

impl Figures {
    /// Parses a peer's result. `None` if the peer checked nothing.
    ///
    /// # Errors
    /// [`PeerError::Protocol`] for fields of the wrong type.
    pub fn read(check: Option<&Check>) -> Result<Option<Self>> {
        let Some(check) = check else { return Ok(None) };
        let mut figures: Self = parse(check)?;
        figures.digest.as_mut().map_or(Ok(()), bounded)?;
        Ok(Some(figures))
    }

    /// The figures in a verdict; empty if they can't be parsed.
    pub fn of(verdict: &Verdict) -> Self {
        Self::read(verdict.check.as_ref()).ok().flatten().unwrap_or_default()
    }

    /// A verdict with these figures.
    pub fn verdict(&self, verified: bool) -> Verdict {
        Verdict::new(verified, Some(to_check(self)))
    }

    /// Checks that a peer's result is consistent with itself, with its verdict and with the checked range.
    ///
    /// # Errors
    /// [`PeerError::Protocol`].
    pub fn accept(&self, verified: bool, range: &Range<u64>) -> Result<()> {
        let words = touched(range);
        let count = words.end - words.start;
        let Self { words: claimed, mismatches, .. } = *self;
        // A peer that checked nothing may still report a failure.
        let verdict = verified == (mismatches == 0) || (claimed == 0 && !verified);
        let counts = claimed == count && mismatches <= count && verdict;
        let first = match self.first_mismatch {
            Some(first) => mismatches > 0 && words.contains(&first.index) && first.expected != first.found,
            None => true,
        };
        if counts && first {
            return Ok(());
        }
        let first = self.first_mismatch.map_or_else(String::new, |first| format!(", the first at {}", first.index));
        Err(wrong(format!(
            "a result has verified: {verified}, {claimed} words, {mismatches} wrong{first}, for {count} words from {} on",
            words.start
        )))
    }
}

fn parse<T: DeserializeOwned>(check: &Check) -> Result<T> {
    serde_json::from_value(check.clone().into()).map_err(|error| {
        let mut reason = format!("a check is wrong: {error}");
        shorten(&mut reason, MAX_NAME);
        clean(&mut reason);
        wrong(reason)
    })
}

fn to_check(value: &impl Serialize) -> Check {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::Object(check)) => check,
        _ => Check::new(),
    }
}

/// Limits the length of a peer's text, and removes its control characters.
fn bounded(text: &mut String) -> Result<()> {
    if text.len() > MAX_NAME {
        return Err(wrong(format!("a digest has {} bytes where at most {MAX_NAME} are allowed", text.len())));
    }
    clean(text);
    Ok(())
}

fn wrong(message: String) -> Error {
    ProtocolError::Content(message).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradicting_figures_are_rejected() {
        let figures = |words, mismatches, first: Option<u64>| Figures {
            words,
            mismatches,
            first_mismatch: first.map(|index| Mismatch { index, expected: 1, found: 2 }),
            digest: None,
        };
        for (verified, sound) in [
            (true, figures(9, 0, None)),
            (false, figures(9, 1, None)),
            (false, figures(9, 1, Some(8))),
            (false, figures(9, 9, Some(0))),
        ] {
            assert!(sound.accept(verified, &(0..36)).is_ok(), "{sound:?}");
        }
        assert!(
            figures(0, 0, None).accept(true, &(0..0)).is_ok() && figures(0, 0, None).accept(false, &(5..5)).is_ok()
        );
        for (verified, lie) in [
            (true, figures(8, 0, None)),
            (true, figures(u64::MAX, 7, Some(0))),
            (true, figures(9, 1, Some(0))),
            (false, figures(9, 0, None)),
            (false, figures(9, 10, Some(0))),
            (false, figures(9, 1, Some(9))),
            (true, figures(9, 0, Some(0))),
        ] {
            assert!(lie.accept(verified, &(0..36)).is_err(), "{lie:?}");
        }
        // In a range, the index still counts from the start of the object.
        assert!(figures(9, 1, Some(100)).accept(false, &(400..436)).is_ok());
        assert!(figures(9, 1, Some(8)).accept(false, &(400..436)).is_err());
        assert!(figures(9, 1, Some(109)).accept(false, &(400..436)).is_err());
    }

    #[test]
    fn unknown_check_is_an_empty_claim() {
        let check = |text: &str| serde_json::from_str::<Check>(text).unwrap();
        for text in ["{}", r#"{"crc32c":7}"#, r#"{"salt":null,"digest":null}"#] {
            assert_eq!(Claim::read(Some(&check(text))).unwrap(), Claim::default(), "{text}");
        }
        for text in [r#"{"salt":"7"}"#, r#"{"salt":4294967296}"#, r#"{"digest":[]}"#] {
            assert!(matches!(Claim::read(Some(&check(text))), Err(Error::Peer(PeerError::Protocol(_)))), "{text}");
        }
        let long = check(&format!(r#"{{"digest":"{}"}}"#, "x".repeat(MAX_NAME + 1)));
        assert!(matches!(Claim::read(Some(&long)), Err(Error::Peer(PeerError::Protocol(_)))));
        let escape = check(r#"{"words":0,"mismatches":0,"digest":"\u001b[31m"}"#);
        assert_eq!(Figures::read(Some(&escape)).unwrap().unwrap().digest.as_deref(), Some(" [31m"));
    }

    #[test]
    fn contradicting_claims_are_rejected() {
        let digest = || Some(format!("blake3:{}", "0".repeat(64)));
        let claim = |salt, reply_salt, digest| Claim { salt, reply_salt, digest };
        for sound in
            [claim(Some(1), Some(2), None), claim(Some(1), None, None), claim(None, None, digest()), Claim::default()]
        {
            sound.inspect(Access::ReadWrite).unwrap();
        }
        for wrong in [
            claim(Some(1), None, digest()),
            claim(None, Some(2), None),
            claim(None, Some(2), digest()),
            claim(Some(1), Some(1), None),
        ] {
            let refused = wrong.inspect(Access::ReadWrite);
            assert!(matches!(refused, Err(Error::Peer(PeerError::Protocol(_)))), "{wrong:?}: {refused:?}");
        }
    }
}
