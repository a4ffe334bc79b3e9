//! The meeting: the conversation of [`crate::wire`], held over a [`Channel`] about [`crate::memory`].
//!
//! [`producer::serve`] and [`consumer::Consumer`] are the two sides of one buffer. Both report what they do as [`Event`]s.
//! [`stream::Publisher`] and [`stream::Subscriber`] are those of many that come again and again.

pub mod consumer;
mod gate;
mod opening;
pub mod producer;
pub mod stream;

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    process,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use crate::{
    array::ArrayDescriptor,
    channel::{Cancel, Channel, Peer, Trust, deadline_after},
    driver::{Access, Backend, Choice, Driver, Opened, open},
    error::{Error, Result},
    memory::Device,
    tools::check::pattern::{Verification, Work},
    wire::{Busy, Description, ErrorCode, Failure, Hello, Message, Offer, Outcome, ProtocolError, VERSION},
};

/// How often whoever works instead of answering says so; three times in its own timeout where that is short.
pub const BUSY_EVERY: Duration = Duration::from_secs(1);

/// What both sides are told about their peer.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The longest silence of the peer, and the longest wait for one to appear.
    pub timeout: Duration,
    /// Which users it may belong to.
    pub trust: Trust,
    /// What ends the session early.
    pub cancel: Cancel,
}

/// A step that was taken, as it is taken.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The backend is ready, perhaps only the second choice.
    Started {
        /// Which one.
        backend: Backend,
        /// Why it is not CUDA although that was preferred.
        fallback: Option<&'a Error>,
        /// How long it took.
        took: Duration,
    },
    /// The device is chosen, and ready for copies.
    Device {
        /// Which one.
        device: &'a Device,
        /// What sizes are multiples of, in bytes.
        granularity: u64,
        /// How long it took.
        took: Duration,
    },
    /// Memory is allocated.
    Created {
        /// What it is.
        description: &'a Description,
        /// How long it took.
        took: Duration,
    },
    /// Memory is mapped.
    Mapped {
        /// Its address in this process.
        address: u64,
        /// What this process may do with it.
        access: Access,
        /// How long it took.
        took: Duration,
    },
    /// The pattern is written.
    Filled {
        /// How many words of it.
        words: u64,
        /// Its salt.
        salt: u32,
        /// By whom, and how long that took alone.
        work: &'a Work,
        /// How long it took.
        took: Duration,
    },
    /// Memory is exported.
    Exported {
        /// The descriptors' numbers in this process: none for a legacy handle.
        fds: &'a [i32],
        /// How long it took.
        took: Duration,
    },
    /// A file is read in.
    Loaded {
        /// How many bytes.
        size: u64,
        /// Their digest.
        digest: &'a str,
        /// How long it took.
        took: Duration,
    },
    /// Nobody is to write into the memory any more.
    Sealed {
        /// Whether the kernel sees to it. If not, whoever holds the descriptor can write all the same.
        enforced: bool,
        /// How long it took.
        took: Duration,
    },
    /// Some of a long piece of work is done.
    Progress {
        /// How many bytes.
        done: u64,
        /// Of how many.
        all: u64,
    },
    /// The producer listens.
    Listening {
        /// Where.
        path: &'a Path,
        /// For how many consumers, or 0 for any number.
        consumers: u64,
    },
    /// The consumer is connected and both have said hello.
    Connected {
        /// To whom.
        peer: Peer,
        /// How long it took, with the wait for the producer.
        took: Duration,
    },
    /// A consumer asked for the buffer.
    Requested {
        /// Who.
        peer: Peer,
    },
    /// The producer sent the offer and the descriptor, and the consumer has them.
    Offered {
        /// To whom.
        peer: Peer,
        /// The access offered.
        access: Access,
        /// How long it took.
        took: Duration,
    },
    /// The consumer has an offer and its descriptors.
    Received {
        /// What was offered.
        offer: &'a Offer,
        /// The descriptors' numbers in this process, which it had for a moment.
        fds: &'a [i32],
        /// How long it took.
        took: Duration,
    },
    /// The consumer sees what the memory holds.
    Array {
        /// What it is made of.
        array: &'a ArrayDescriptor,
        /// Its first elements, as a person reads them.
        first: &'a [String],
    },
    /// This side checked the buffer.
    Verified {
        /// What it found.
        outcome: &'a Outcome,
        /// By whom the pattern was checked, if it was the pattern, and how long that took alone.
        work: Option<&'a Work>,
        /// How long it took.
        took: Duration,
    },
    /// The data is in a file.
    Saved {
        /// Which one.
        path: &'a Path,
        /// How many bytes.
        size: u64,
        /// How long it took.
        took: Duration,
    },
    /// The other side told what it found.
    Told {
        /// Who.
        peer: Peer,
        /// What.
        outcome: &'a Outcome,
        /// How long was waited for it.
        took: Duration,
    },
    /// A consumer's conversation ended.
    Ended {
        /// Whose.
        served: &'a producer::Served,
    },
}

/// Who is told of events. They may come from several threads at once.
pub type Observer<'a> = &'a (dyn Fn(Event<'_>) + Sync);

/// Opens a backend, in a thread of its own: starting a driver takes long and can't be interrupted, waiting for it can.
///
/// # Errors
/// Those of [`open`]; [`Error::Interrupted`].
pub fn start(choice: Choice, cancel: &Cancel, observer: Observer<'_>) -> Result<Opened> {
    let begun = Instant::now();
    let opened = interruptibly(&mut || cancel.check(), move || open(choice))?;
    let backend = opened.driver.backend();
    observer(Event::Started { backend, fallback: opened.fallback.as_ref(), took: begun.elapsed() });
    Ok(opened)
}

/// Makes a device ready for copies and tells of it: the second part of a driver's start. `tick` is called meanwhile.
fn activate(device: &Device, tick: &mut dyn FnMut() -> Result<()>, observer: Observer<'_>) -> Result<()> {
    let begun = Instant::now();
    let granularity = device.granularity()?;
    let activated = device.clone();
    interruptibly(tick, move || activated.activate())?;
    observer(Event::Device { device, granularity, took: begun.elapsed() });
    Ok(())
}

/// Runs what can't be interrupted in a thread that is left behind if `tick`, which is called meanwhile, fails.
fn interruptibly<T: Send + 'static>(
    tick: &mut dyn FnMut() -> Result<()>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    let spawned = thread::Builder::new().name("driver".to_owned()).spawn(move || {
        // Nobody may be waiting any more.
        let _ = sender.send(work());
    });
    spawned.map_err(|error| Error::system("start a thread", error))?;
    loop {
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => tick()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::system("start the driver", std::io::Error::other("its thread panicked")));
            }
        }
    }
}

/// A channel on which `busy` is no message but a sign of life.
#[derive(Debug)]
struct Link {
    channel: Channel,
    /// When this side last said something, or heard something that is for it to answer.
    spoken: Instant,
    busy_every: Duration,
}

impl Link {
    fn new(channel: Channel) -> Self {
        Self { busy_every: BUSY_EVERY.min(channel.timeout() / 3), channel, spoken: Instant::now() }
    }

    fn peer(&self) -> Peer {
        self.channel.peer()
    }

    fn hello(&mut self, driver: &Driver, capabilities: &[&str]) -> Result<()> {
        let backend = driver.backend().to_string();
        let capabilities = capabilities.iter().map(ToString::to_string).collect();
        self.send(&Message::Hello(Hello { version: VERSION, capabilities, backend, pid: process::id() }), &[])
    }

    fn send(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.channel.send(message, fds)?;
        self.spoken = Instant::now();
        Ok(())
    }

    /// The next message that is an answer. The peer's `error` is this side's.
    fn receive(&mut self, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_within(self.channel.timeout(), purpose)
    }

    /// As [`Link::receive`], from a peer who is given no more than `patience` between two signs of life.
    fn receive_within(&mut self, patience: Duration, purpose: &'static str) -> Result<(Message, Vec<OwnedFd>)> {
        loop {
            match self.channel.receive_by(deadline_after(patience), purpose)? {
                (Message::Busy(_), _) => {}
                (Message::Error(Failure { code, message }), _) => return Err(Error::Peer { code, message }),
                answer => {
                    self.spoken = Instant::now();
                    return Ok(answer);
                }
            }
        }
    }

    /// The next message of a peer who has asked for nothing yet, and so has nothing to be busy with.
    fn receive_first(&mut self, deadline: Instant, purpose: &'static str) -> Result<Message> {
        self.channel.receive_by(deadline, purpose).map(|(message, _)| message)
    }

    /// Says that this side is working, if it said nothing for a while. To be called often.
    fn busy(&mut self) -> Result<()> {
        self.channel.cancel().check()?;
        if self.spoken.elapsed() >= self.busy_every { self.send(&Message::Busy(Busy {}), &[]) } else { Ok(()) }
    }

    /// Ends the conversation: with an `error` if this side has one that the peer does not know. Says whether the peer has gone.
    fn end<T>(self, result: &Result<T>) -> bool {
        self.end_within(Duration::MAX, result)
    }

    /// As [`Link::end`], for a peer who is given no more than `patience` to leave.
    fn end_within<T>(mut self, patience: Duration, result: &Result<T>) -> bool {
        if let Err(error) = result {
            self.tell(error);
        }
        self.channel.finish(patience)
    }

    /// Sends an error, if the peer does not know it.
    fn tell(&mut self, error: &Error) {
        let Some(code) = code_for(error) else { return };
        let message = Message::Error(Failure { code, message: error.in_full() });
        if let Err(unsent) = self.channel.send(&message, &[]) {
            tracing::debug!(%unsent, "the peer can't be told");
        }
    }
}

/// A peer's first message, which says which version of the protocol it speaks.
fn greeting(message: Message) -> Result<Hello> {
    match message {
        Message::Hello(hello) if hello.version >= VERSION => Ok(hello),
        Message::Hello(hello) => Err(ProtocolError::Version { got: hello.version, own: VERSION }.into()),
        other => Err(unexpected(&other, "hello")),
    }
}

/// The code that tells a peer of an error; `None` where the peer is the one who knows.
fn code_for(error: &Error) -> Option<ErrorCode> {
    Some(match error {
        Error::Peer { .. } | Error::PeerGone { .. } => return None,
        Error::Protocol(ProtocolError::Version { .. }) => ErrorCode::Version,
        Error::Protocol(_) => ErrorCode::Protocol,
        Error::Mismatch { code, .. } => *code,
        Error::PeerNotAllowed { .. } => ErrorCode::Refused,
        Error::Timeout { .. } => ErrorCode::Timeout,
        Error::Interrupted { .. } => ErrorCode::Interrupted,
        _ => ErrorCode::Failed,
    })
}

fn unexpected(got: &Message, want: &'static str) -> Error {
    ProtocolError::Unexpected { got: got.name(), want }.into()
}

/// What a side that checked the buffer itself tells the other.
fn outcome_of(verification: &Verification) -> Outcome {
    Outcome {
        verified: verification.passed(),
        words: verification.words,
        mismatches: verification.mismatches,
        first_mismatch: verification.first,
        digest: None,
    }
}
