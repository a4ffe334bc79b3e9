//! The consumer's check of a pattern or digest, with an optional file for the data.

use std::time::Instant;

use vmmfd::{
    driver::Access,
    error::Result,
    internals::first_elements,
    session::{
        Check, Verdict,
        handoff::{ImportedObject, Tick, Verifier},
    },
};

use super::{
    Event, Observer,
    figures::{Claim, Figures},
    files::{self, Target},
    pattern::{self, Checker, EngineChoice, Pattern},
};

/// The number of reported array elements.
const FIRST_ELEMENTS: usize = 8;

/// Checks a producer's data, and writes a reply if requested.
pub struct DataVerifier<'a> {
    engine: EngineChoice,
    target: Option<Target>,
    observer: Observer<'a>,
}

impl<'a> DataVerifier<'a> {
    pub fn new(observer: Observer<'a>) -> Self {
        Self { engine: EngineChoice::Auto, target: None, observer }
    }

    /// Selects the engine for the pattern; the default is the one estimated to be faster.
    pub fn with_engine(self, engine: EngineChoice) -> Self {
        Self { engine, ..self }
    }

    /// Saves the next object to a file. The file appears only if the data is correct.
    pub fn with_target(self, target: Option<Target>) -> Self {
        Self { target, ..self }
    }

    /// Checks an object, and writes it to the target.
    fn check(
        &self,
        object: &ImportedObject,
        claim: &Claim,
        mut target: Option<&mut Target>,
        tick: Tick<'_>,
    ) -> Result<Verdict> {
        let started = Instant::now();
        let range = object.range();
        let observer = self.observer;
        if let Some(array) = object.array().filter(|_| object.is_whole()) {
            let first = first_elements(object, array, FIRST_ELEMENTS)?;
            observer(Event::Array { array, first: &first });
        }
        let all = range.end - range.start;
        let mut done = |done| {
            observer(Event::Progress { done, all });
            tick()
        };
        let mut work = None;
        let (verified, figures) = match (claim.salt.map(Pattern::new), &claim.digest) {
            (Some(pattern), _) if target.is_none() => {
                let found = self.engine.verify(object, object.start(), range.clone(), pattern, &mut done)?;
                work = Some(found.1);
                (found.0.passed(), Some(Figures::from(&found.0)))
            }
            (None, None) if target.is_none() => (true, None),
            (pattern, digest) => {
                let mut checker = pattern.map(Checker::new);
                let mut at = range.start;
                let found = files::read(object, object.start(), range.clone(), &mut |bytes| {
                    if let Some(checker) = &mut checker {
                        checker.check(at, bytes);
                    }
                    if let Some(target) = &mut target {
                        target.write(bytes)?;
                    }
                    at += bytes.len() as u64;
                    done(at - range.start)
                })?;
                match (checker, digest) {
                    (Some(checker), _) => {
                        let found = &checker.verification;
                        (found.passed(), Some(Figures::from(found)))
                    }
                    (None, Some(digest)) => {
                        (found == *digest, Some(Figures { digest: Some(found), ..Figures::default() }))
                    }
                    (None, None) => (true, None),
                }
            }
        };
        let reported = figures.clone().unwrap_or_default();
        observer(Event::Verified { verified, figures: &reported, work: work.as_ref(), elapsed: started.elapsed() });
        Ok(figures.map_or(Verdict::unchecked(verified), |figures| figures.verdict(verified)))
    }
}

impl Verifier for DataVerifier<'_> {
    fn inspect(&mut self, check: Option<&Check>, access: Access) -> Result<()> {
        Claim::read(check)?.inspect(access)
    }

    fn verify(&mut self, object: &ImportedObject, tick: Tick<'_>) -> Result<Verdict> {
        let started = Instant::now();
        let claim = Claim::read(object.check())?;
        let Some(mut target) = self.target.take() else { return self.check(object, &claim, None, tick) };
        let verdict = self.check(object, &claim, Some(&mut target), tick)?;
        if verdict.verified {
            let path = target.finish(tick)?;
            let range = object.range();
            let size = range.end - range.start;
            (self.observer)(Event::Saved { path: &path, size, elapsed: started.elapsed() });
        }
        Ok(verdict)
    }

    fn reply(&mut self, object: &ImportedObject, tick: Tick<'_>) -> Result<()> {
        let Some(salt) = Claim::read(object.check())?.reply_salt else { return Ok(()) };
        let started = Instant::now();
        let range = object.range();
        let words = pattern::words(&range);
        let work = self.engine.write(object, object.start(), range, Pattern::new(salt), &mut |_| tick())?;
        (self.observer)(Event::Filled { words, salt, work: &work, elapsed: started.elapsed() });
        Ok(())
    }

    fn accept(&mut self, object: &ImportedObject, own: &Verdict, answer: &Verdict) -> Result<()> {
        // A producer that does not check replies reports only its verdict.
        let Some(figures) = Figures::read(answer.check.as_ref())? else { return Ok(()) };
        let reply_due = Claim::read(object.check())?.reply_salt.is_some() && own.verified;
        let counted = answer.verified || figures.words > 0;
        let range = if reply_due && counted { object.range() } else { 0..0 };
        figures.accept(answer.verified, &range)
    }
}
