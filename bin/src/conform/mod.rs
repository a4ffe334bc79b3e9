//! Tests an implementation of the protocol: plays its peer, and reports the rules that it violates.
//!
//! The rules are numbered as in [`vmmfd::wire`] and [`vmmfd::wire::broker`]. Each case uses its own connection. Some cases are valid
//! conversations, which must succeed. In the others this side violates a rule, and the peer must report the violation. No GPU is
//! needed: the memory is of the backend `host`.

mod broker_cases;
mod case_end;
mod consumer_cases;
mod memory;
pub mod page;
mod peer;
mod producer_cases;
mod producer_steps;
mod publisher_cases;
mod records;
mod report;
mod subscriber_cases;

use std::{
    os::fd::AsFd,
    path::PathBuf,
    time::{Duration, Instant},
};

use nix::poll::PollFlags;
use vmmfd::{
    channel::{Cancel, Listener, Trust},
    driver::{Backend, Choice, open},
    error::{Error, PeerError, Result},
    internals::{accept, connect_socket, deadline_after, wait},
    memory::{Device, Selector},
};

pub use self::report::{CaseReport, ConformReport, Outcome, RuleReport, render};
use self::{
    case_end::{CaseEnd, CaseResult},
    peer::Peer,
};

/// The role that this side plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Connects to a producer.
    Consumer,
    /// Accepts consumers, one per case.
    Producer,
    /// Accepts subscribers to a stream, one per case.
    Publisher,
    /// Connects to a producer of streams.
    Subscriber,
    /// Connects to a broker.
    Client,
}

impl Role {
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
            Self::Consumer => producer_cases::cases(),
            Self::Producer => consumer_cases::cases(),
            Self::Publisher => subscriber_cases::cases(),
            Self::Subscriber => publisher_cases::cases(),
            Self::Client => broker_cases::cases(),
        }
    }
}

/// The options of a run.
#[derive(Debug, Clone)]
pub struct ConformPlan {
    /// The socket that this side connects to, or listens on, depending on its role.
    pub socket: PathBuf,
    pub role: Role,
    /// Names of the cases to run; empty for all.
    pub only: Vec<String>,
    /// The users that the peer may run as.
    pub trust: Trust,
    /// How long to wait for the peer to listen, or to connect again.
    pub wait: Duration,
    /// The longest silence allowed: the timeout in this side's `hello`.
    pub timeout: Duration,
}

/// A test case: one conversation, or one for each of several violations of the same kind.
struct Case {
    name: String,
    /// The numbers of the rules that it tests. The first one is violated if the peer does not report an error that the case provokes.
    rules: Vec<&'static str>,
    run: Run,
}

type Run = Box<dyn Fn(&Context<'_>, &mut Peer) -> CaseResult>;

/// A case with its rules' numbers, separated by spaces.
fn case(
    name: impl Into<String>,
    rules: &'static str,
    run: impl Fn(&Context<'_>, &mut Peer) -> CaseResult + 'static,
) -> Case {
    Case { name: name.into(), rules: rules.split(' ').collect(), run: Box::new(run) }
}

/// The running case.
struct Context<'a> {
    device: &'a Device,
    /// Opens another connection to the peer.
    connect: &'a dyn Fn() -> Result<Peer>,
    name: &'a str,
    /// The first of the case's rules.
    rule: &'static str,
}

/// The names of a role's cases, with the numbers of their rules.
pub fn cases(role: Role) -> Vec<(String, Vec<&'static str>)> {
    role.cases().into_iter().map(|case| (case.name, case.rules)).collect()
}

/// Runs the cases of a plan. Blocks while the peer answers; no wait exceeds the timeouts of the plan. Violations, and a peer that
/// does not appear, are in the report.
///
/// # Errors
/// [`Error::Misuse`] for an unknown case; [`Error::Socket`] if this side can't listen; [`Error::Interrupted`]; [`Error::System`].
pub fn run(plan: &ConformPlan, cancel: &Cancel, progress: &dyn Fn(&CaseReport)) -> Result<ConformReport> {
    let mut cases = plan.role.cases();
    if let Some(unknown) = plan.only.iter().find(|name| !cases.iter().any(|case| case.name == **name)) {
        let problem = format!("a {} has no case called `{unknown}`: --list names them", plan.role.as_str());
        return Err(Error::Misuse { problem });
    }
    cases.retain(|case| plan.only.is_empty() || plan.only.contains(&case.name));
    let driver = open(Choice::Only(Backend::Host))?.driver;
    let device = &Device::find(&driver, Selector::default())?;
    let listener = match plan.role.listens() {
        true => Some(Listener::bind(&plan.socket, !plan.trust.uids.is_empty(), plan.timeout, cancel)?),
        false => None,
    };
    let connect = &|| meet(plan, listener.as_ref(), cancel);
    let mut report = ConformReport::new(plan);
    for Case { name, rules, run } in &cases {
        let attempt = || match connect() {
            Ok(mut peer) => {
                let end = run(&Context { device, connect, name, rule: rules[0] }, &mut peer).err();
                let responded = peer.responded;
                peer.close();
                (end, responded)
            }
            Err(error) => (Some(CaseEnd::from(error)), true),
        };
        let end = match attempt() {
            // A producer that stops listening closes the connections that it has not accepted. Try once more in case it still serves.
            (Some(CaseEnd::Violation { .. }), false) if listener.is_none() => attempt().0,
            (end, _) => end,
        };
        if let Some(CaseEnd::Internal(error)) = end {
            return Err(error);
        }
        let no_peer = matches!(end, Some(CaseEnd::NoPeer(_)));
        progress(report.add(name, rules, end));
        if no_peer {
            break;
        }
    }
    report.finish(cases.len());
    Ok(report)
}

/// Opens the next connection to the peer.
fn meet(plan: &ConformPlan, listener: Option<&Listener>, cancel: &Cancel) -> Result<Peer> {
    let Some(listener) = listener else {
        let (socket, _) = connect_socket(&plan.socket, plan.wait, &plan.trust, cancel)?;
        return Peer::new(socket, plan.timeout, cancel);
    };
    let deadline = deadline_after(plan.wait);
    loop {
        if let Some(socket) = accept(listener)? {
            let peer = Peer::new(socket, plan.timeout, cancel)?;
            plan.trust.check(peer.process())?;
            return Ok(peer);
        }
        if Instant::now() >= deadline {
            return Err(Error::Peer(PeerError::NoConsumer { waited: plan.wait }));
        }
        wait(cancel, listener.as_fd(), PollFlags::POLLIN, deadline)?;
    }
}
