//! The producer's content: a pattern, or a file's bytes.

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use vmmfd::{
    error::{ProtocolError, Result},
    memory::{Region, Shared},
    session::{
        Check, Verdict,
        handoff::{Content, Offered, Tick},
    },
};

use super::{
    Event, Observer,
    figures::{Claim, Figures},
    files::Source,
    pattern::{self, EngineChoice, Pattern, random_salt},
};

/// The content of a producer's buffer, which its consumers check.
pub struct Exercise<'a> {
    data: Data,
    engine: EngineChoice,
    corrupt: bool,
    /// The number of bytes written, and the digest of a file.
    written: Mutex<(u64, Option<String>)>,
    observer: Observer<'a>,
}

enum Data {
    Pattern(u32),
    File(Source),
}

impl<'a> Exercise<'a> {
    pub fn pattern(salt: u32, observer: Observer<'a>) -> Self {
        Self::of(Data::Pattern(salt), observer)
    }

    pub fn file(source: Source, observer: Observer<'a>) -> Self {
        Self::of(Data::File(source), observer)
    }

    fn of(data: Data, observer: Observer<'a>) -> Self {
        Self { data, engine: EngineChoice::Auto, corrupt: false, written: Mutex::default(), observer }
    }

    /// Selects the engine for the pattern; the default is the one estimated to be faster.
    pub fn with_engine(self, engine: EngineChoice) -> Self {
        Self { engine, ..self }
    }

    /// Flips one byte after each fill, so that every check fails.
    pub fn with_corruption(self, corrupt: bool) -> Self {
        Self { corrupt, ..self }
    }

    fn written(&self) -> MutexGuard<'_, (u64, Option<String>)> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Content for Exercise<'_> {
    fn fill(&self, memory: &Shared, tick: Tick<'_>) -> Result<()> {
        let started = Instant::now();
        let size = memory.size();
        let mut progress = |done| {
            (self.observer)(Event::Progress { done, all: size });
            tick()
        };
        let digest = match &self.data {
            Data::Pattern(salt) => {
                let work = self.engine.fill(memory, 0..size, Pattern::new(*salt), &mut progress)?;
                let words = pattern::words(&(0..size));
                (self.observer)(Event::Filled { words, salt: *salt, work: &work, elapsed: started.elapsed() });
                None
            }
            Data::File(source) => {
                let digest = source.load(memory, &mut progress)?;
                (self.observer)(Event::Loaded { size, digest: &digest, elapsed: started.elapsed() });
                Some(digest)
            }
        };
        *self.written() = (size, digest);
        if self.corrupt {
            let at = size / 2;
            let mut byte = [0];
            memory.copy_out(at, &mut byte)?;
            memory.copy_in(at, &[byte[0] ^ 0x01])?;
        }
        Ok(())
    }

    fn expects_reply(&self) -> bool {
        matches!(self.data, Data::Pattern(_))
    }

    fn check(&self, range: &Range<u64>, reply: bool, tick: Tick<'_>) -> Result<Option<Check>> {
        let claim = match &self.data {
            Data::Pattern(salt) => {
                let reply_salt = reply.then(|| other_salt(*salt)).transpose()?;
                Claim { salt: Some(*salt), reply_salt, digest: None }
            }
            Data::File(source) => {
                let (size, all) = self.written().clone();
                let digest = match all.filter(|_| *range == (0..size)) {
                    Some(all) => all,
                    // Read from the file, not from memory, to detect errors of the copy into memory too.
                    None => source.digest(range.clone(), tick)?,
                };
                Claim { digest: Some(digest), ..Claim::default() }
            }
        };
        Ok(Some(claim.to_check()))
    }

    fn accept(&self, offered: &Offered, result: &Verdict) -> Result<()> {
        let claim = Claim::read(offered.check.as_ref())?;
        // A client that ignores checks reports only its verdict.
        let Some(found) = Figures::read(result.check.as_ref())? else { return Ok(()) };
        found.accept(result.verified, if claim.salt.is_some() { &offered.range } else { &(0..0) })?;
        if result.verified && found.digest != claim.digest {
            let named =
                |digest: Option<String>| digest.map_or_else(|| "no digest".to_owned(), |it| format!("digest {it}"));
            let found = named(found.digest);
            let claimed = named(claim.digest);
            let message = format!("a result that is right has {found}, and {claimed} was offered");
            return Err(ProtocolError::Content(message).into());
        }
        Ok(())
    }

    fn judge(&self, memory: &Shared, offered: &Offered, result: &Verdict, tick: Tick<'_>) -> Result<Verdict> {
        let claim = Claim::read(offered.check.as_ref())?;
        // A client that ignores checks has not replied.
        let reply = claim.reply_salt.filter(|_| result.verified && result.check.is_some());
        let Some(salt) = reply else { return Ok(Verdict::unchecked(result.verified)) };
        let started = Instant::now();
        let range = offered.range.clone();
        let (found, work) = self.engine.verify(memory, 0, range, Pattern::new(salt), &mut |_| tick())?;
        let verified = found.passed();
        let figures = Figures::from(&found);
        (self.observer)(Event::Verified { verified, figures: &figures, work: Some(&work), elapsed: started.elapsed() });
        Ok(figures.verdict(verified))
    }
}

/// A random salt other than `salt`.
fn other_salt(salt: u32) -> Result<u32> {
    random_salt().map(|fresh| if fresh == salt { !salt } else { fresh })
}
