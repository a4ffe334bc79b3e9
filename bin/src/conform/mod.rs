//! Meets an implementation of the protocol, plays the other end, and reports which rules of the page it broke.
//!
//! The rules are those of [`vmmfd::wire`] and [`vmmfd::wire::broker`], by their numbers. Each case is a connection of its own: sound conversations, which must
//! go as the page says, and ones in which this side breaks a rule, which the other must notice. It needs no GPU: the memory is of
//! the backend `host`.

mod fault;
mod lender;
mod meets_broker;
mod meets_consumer;
mod meets_producer;
mod meets_publisher;
mod meets_subscriber;
mod memory;
pub mod page;
mod peer;
mod records;
mod report;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use vmmfd::{
    channel::{Cancel, Listener, Trust},
    driver::{Backend, Choice, open},
    error::{Error, PeerError, Result, SocketError},
    internals::{accept, connect_socket, deadline_after, wait},
    memory::{Device, Selector},
};

pub use self::report::{CaseReport, ConformReport, Outcome, RuleReport, render};
use self::{fault::Fault, peer::Peer};

/// What this side plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Against a producer of a handoff, which listens.
    Consumer,
    /// Against consumers of a handoff, which connect: one after the other, until all cases are through.
    Producer,
    /// Against consumers of a stream, which connect.
    Publisher,
    /// Against a producer of streams, which listens.
    Subscriber,
    /// Against a broker, which listens.
    Client,
}

impl Role {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Consumer => "consumer",
            Self::Producer => "producer",
            Self::Publisher => "publisher",
            Self::Subscriber => "subscriber",
            Self::Client => "client",
        }
    }

    fn listens(self) -> bool {
        matches!(self, Self::Producer | Self::Publisher)
    }

    fn cases(self) -> Vec<Case> {
        match self {
            Self::Consumer => meets_producer::cases(),
            Self::Producer => meets_consumer::cases(),
            Self::Publisher => meets_subscriber::cases(),
            Self::Subscriber => meets_publisher::cases(),
            Self::Client => meets_broker::cases(),
        }
    }
}

/// What to do.
#[derive(Debug, Clone)]
pub struct ConformPlan {
    /// Where to meet: this side connects to it, or listens there, by its role.
    pub socket: PathBuf,
    /// What this side plays.
    pub role: Role,
    /// The names of the cases to try; all if there are none.
    pub only: Vec<String>,
    /// Which users the other end may belong to.
    pub trust: Trust,
    /// How long to wait for the other end to listen, or for its next connection.
    pub wait: Duration,
    /// How long each silence may last: what this side says in `hello`.
    pub timeout: Duration,
}

/// One conversation, or one for each of several faults of the same kind.
struct Case {
    name: String,
    /// The rules that it is about.
    rules: &'static [&'static str],
    run: Run,
}

/// What a case does with a new connection.
type Run = Box<dyn Fn(&Scene<'_>, &mut Peer) -> Result<(), Fault>>;

impl Case {
    fn new(
        name: impl Into<String>,
        rules: &'static [&'static str],
        run: impl Fn(&Scene<'_>, &mut Peer) -> Result<(), Fault> + 'static,
    ) -> Self {
        Self { name: name.into(), rules, run: Box::new(run) }
    }
}

/// What all cases have.
struct Scene<'a> {
    device: &'a Device,
    /// Makes another connection with the other end.
    connect: &'a dyn Fn() -> Result<Peer>,
}

/// The names of a role's cases, with the rules that each is about.
pub fn cases(role: Role) -> Vec<(String, &'static [&'static str])> {
    role.cases().into_iter().map(|case| (case.name, case.rules)).collect()
}

/// Tries all cases. Blocks for as long as the other end takes, and for no silence longer than the plan says. What the other end does
/// wrong is in the report, as is that there was no other end.
///
/// # Errors
/// [`Error::Misuse`] for a case that there is not; [`Error::Socket`] if this side can't listen; [`Error::Interrupted`];
/// [`Error::System`].
pub fn run(plan: &ConformPlan, cancel: &Cancel, progress: &dyn Fn(&CaseReport)) -> Result<ConformReport> {
    let mut cases = plan.role.cases();
    if let Some(unknown) = plan.only.iter().find(|name| !cases.iter().any(|case| case.name == **name)) {
        let problem = format!("a {} has no case called `{unknown}`: --list names them", plan.role.as_str());
        return Err(Error::Misuse { problem });
    }
    cases.retain(|case| plan.only.is_empty() || plan.only.contains(&case.name));
    let driver = open(Choice::Only(Backend::Host))?.driver;
    let device = Device::find(&driver, Selector::default())?;
    let listener = match plan.role.listens() {
        true => Some(Listener::bind(&plan.socket, !plan.trust.uids.is_empty(), plan.timeout, cancel)?),
        false => None,
    };
    let connect = || meet(plan, listener.as_ref(), cancel);
    let scene = Scene { device: &device, connect: &connect };
    let mut report = ConformReport::new(plan);
    for case in &cases {
        let attempt = || match connect() {
            Ok(mut peer) => {
                let found = (case.run)(&scene, &mut peer).err();
                let spoke = peer.spoke;
                peer.leave();
                (found, spoke)
            }
            Err(error) => (Some(Fault::from(error)), true),
        };
        let fault = match attempt() {
            // A producer that stops listening hangs up on those that it has not accepted. One that goes on is met again.
            (Some(Fault::Broken { .. }), false) if listener.is_none() => attempt().0,
            (fault, _) => fault,
        };
        if let Some(Fault::Failed(error)) = fault {
            return Err(error);
        }
        let absent = matches!(fault, Some(Fault::Absent(_)));
        progress(report.enter(&case.name, case.rules, fault));
        if absent {
            break;
        }
    }
    report.finish(cases.len());
    Ok(report)
}

/// The next connection with the other end.
fn meet(plan: &ConformPlan, listener: Option<&Listener>, cancel: &Cancel) -> Result<Peer> {
    let Some(listener) = listener else {
        let (socket, _) = connect_socket(&plan.socket, plan.wait, &plan.trust, cancel)?;
        return Peer::new(socket, plan.timeout, cancel);
    };
    let deadline = deadline_after(plan.wait);
    loop {
        if let Some(socket) = accept(listener)? {
            let peer = Peer::new(socket, plan.timeout, cancel)?;
            plan.trust.check(peer.who())?;
            return Ok(peer);
        }
        if Instant::now() >= deadline {
            return Err(Error::Peer(PeerError::NoConsumer { waited: plan.wait }));
        }
        use std::os::fd::AsFd;
        wait(cancel, listener.as_fd(), nix::poll::PollFlags::POLLIN, deadline)?;
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        match error {
            Error::Socket(
                SocketError::Absent { .. }
                | SocketError::NotAccepted { .. }
                | SocketError::Denied { .. }
                | SocketError::ClosedFolder { .. },
            )
            | Error::Peer(PeerError::NoConsumer { .. } | PeerError::NotAllowed { .. }) => Self::Absent(error.in_full()),
            error => Self::Failed(error),
        }
    }
}
