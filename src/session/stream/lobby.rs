//! Those who connect to a publisher, until one of them has subscribed. They are heard side by side: none delays another.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use crate::{
    channel::{Channel, Listener, deadline_after},
    driver::Driver,
    error::{Error, Result},
    session::{Link, Terms, greeting, unexpected},
    wire::{ErrorCode, Message, STREAM},
};

use super::wrong;

/// How many are heard at a time: beyond that the one who came first goes.
const MOST: usize = 64;

/// Those who have not subscribed.
pub(super) struct Lobby<'a> {
    driver: &'a Driver,
    terms: &'a Terms,
    /// In the order in which they came.
    strangers: Vec<Stranger>,
}

struct Stranger {
    link: Link,
    state: State,
}

/// How far somebody has come.
enum State {
    /// Not even hello.
    Silent,
    /// Hello, from a consumer of this backend.
    Greeted(String),
    /// It was told why it can't stay, and is left the time to read that.
    Refused,
}

/// A consumer that has subscribed.
pub(super) struct Subscribed {
    pub(super) link: Link,
    /// How many buffers it keeps at most.
    pub(super) keep: u64,
}

impl<'a> Lobby<'a> {
    pub(super) fn new(driver: &'a Driver, terms: &'a Terms) -> Self {
        Self { driver, terms, strangers: Vec::new() }
    }

    /// Waits for somebody to subscribe.
    pub(super) fn wait(&mut self, listener: &Listener) -> Result<Subscribed> {
        let deadline = deadline_after(self.terms.timeout);
        loop {
            let links = self.strangers.iter().map(|stranger| stranger.link.channel.as_fd());
            match self.terms.cancel.wait_readable(links.chain([listener.as_fd()]), deadline)? {
                None => return Err(Error::NoConsumer { waited: self.terms.timeout }),
                Some(index) if index == self.strangers.len() => self.admit(listener)?,
                Some(index) => {
                    if let Some(subscribed) = self.hear(index) {
                        return Ok(subscribed);
                    }
                }
            }
        }
    }

    /// Takes a connection.
    fn admit(&mut self, listener: &Listener) -> Result<()> {
        let Terms { timeout, trust, cancel } = self.terms;
        if self.strangers.len() == MOST {
            self.strangers.remove(0);
        }
        let accepted = listener.accept().and_then(|socket| match socket {
            Some(socket) => Channel::new(socket, *timeout, cancel).map(Some),
            None => Ok(None),
        });
        match accepted {
            Ok(None) => {}
            Ok(Some(channel)) => {
                let mut stranger = Stranger { link: Link::new(channel), state: State::Silent };
                if let Err(refused) = trust.check(stranger.link.peer()) {
                    stranger.refuse(&refused);
                }
                self.strangers.push(stranger);
            }
            Err(error) => {
                // Out of descriptors, most often: those who hold them and asked for nothing make room.
                tracing::debug!(%error, "a connection has to wait");
                if !self.strangers.is_empty() {
                    self.strangers.remove(0);
                }
                cancel.pause(Duration::from_millis(5))?;
            }
        }
        Ok(())
    }

    /// Hears what a stranger has to say.
    fn hear(&mut self, index: usize) -> Option<Subscribed> {
        let stranger = &mut self.strangers[index];
        match stranger.next(&self.driver) {
            Ok(None) => None,
            Ok(Some(keep)) => Some(Subscribed { link: self.strangers.remove(index).link, keep }),
            Err(error) => {
                let peer = stranger.link.peer();
                tracing::debug!(
                    pid = peer.pid,
                    uid = peer.uid,
                    error = error.in_full(),
                    "a stranger is not subscribed"
                );
                match (&stranger.state, &error) {
                    (State::Refused, _) | (_, Error::PeerGone { .. } | Error::Peer { .. }) => {
                        self.strangers.remove(index);
                    }
                    _ => stranger.refuse(&error),
                }
                None
            }
        }
    }
}

impl Stranger {
    /// Takes one record. Returns how many buffers it keeps, if that was what it had to say.
    fn next(&mut self, driver: &Driver) -> Result<Option<u64>> {
        let message = match self.link.receive_first(Instant::now(), "for a consumer to subscribe") {
            // What woke this side was no record.
            Err(Error::Timeout { .. }) => return Ok(None),
            message => message?,
        };
        match (&self.state, message) {
            (State::Silent, hello) => {
                let backend = greeting(hello)?.backend;
                self.link.hello(driver, &[STREAM])?;
                self.state = State::Greeted(backend);
                Ok(None)
            }
            (State::Greeted(backend), Message::Subscribe(subscribe)) => {
                check_backend(backend, driver)?;
                match subscribe.keep {
                    0 => Err(wrong("a consumer subscribes that keeps no buffer".to_owned())),
                    keep => Ok(Some(keep)),
                }
            }
            (State::Greeted(_), Message::Request(request)) => {
                let message = format!(
                    "there is no object `{}` here: this producer has a stream, to which a consumer subscribes",
                    request.object
                );
                Err(Error::Mismatch { code: ErrorCode::Object, message })
            }
            (_, other) => Err(unexpected(&other, "subscribe")),
        }
    }

    /// Tells it why it can't stay.
    fn refuse(&mut self, error: &Error) {
        self.link.tell(error);
        self.link.channel.hang_up();
        self.state = State::Refused;
    }
}

fn check_backend(theirs: &str, driver: &Driver) -> Result<()> {
    let own = driver.backend();
    if theirs == own.as_str() {
        return Ok(());
    }
    let message = format!("the producer's memory is on backend {own}, and the consumer uses {theirs}");
    Err(Error::Mismatch { code: ErrorCode::Backend, message })
}
