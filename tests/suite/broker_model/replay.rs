//! Random walks through the model, replayed on a real server. The server receives the model's requests, and is killed before the system
//! call that corresponds to the model's next step. Afterwards its state must equal the model's.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use nix::libc;
use serde_json::json;
use vmmfd::wire::{
    Memory,
    broker::{
        self, Attached, Delete, GetHeader, GetObject, Message, PutPartHeader, Release, Resume, Stat, Table, Token, Who,
    },
};

use super::{
    flaws::Flaw,
    steps::{Action, Model},
    world::{CLIENTS, COMMON, NAMES, Request, Step, Verb, World},
};
use crate::{
    broker::until,
    broker_crashes::token,
    broker_pages::{PAGE, Template, number, page},
    broker_process::Raw,
    support::{
        Subject,
        served::{Keeper, Served},
        stepper::{Call, while_traced},
    },
};

const MODEL: Model = Model { flaw: Flaw::None };

const NAME: [&str; NAMES] = ["first", "second"];

/// The visible effect of a step: a record in the catalogue, a message to the keeper, or a message to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Catalogue,
    Store,
    Client,
}

fn seen_of(step: &Step) -> Option<Seen> {
    match step {
        Step::Admit(_) => None,
        Step::Send(_) | Step::Remove(_) | Step::SendCatalogues | Step::Complete => Some(Seen::Store),
        Step::Answer(_) | Step::Refuse(_) | Step::Hand(..) => Some(Seen::Client),
        _ => Some(Seen::Catalogue),
    }
}

/// Classifies system calls: the first socket that the server reads is the client's.
#[derive(Debug, Default)]
struct Watcher {
    client: Option<String>,
}

impl Watcher {
    fn seen(&mut self, call: &Call) -> Option<Seen> {
        let Call { number, file } = call;
        match *number {
            libc::SYS_recvmsg => {
                self.client.get_or_insert_with(|| file.clone());
                None
            }
            libc::SYS_pwrite64 if file.starts_with("/memfd:vmmfd-catalogue") => Some(Seen::Catalogue),
            libc::SYS_sendmsg | libc::SYS_sendto if self.client.as_ref() == Some(file) => Some(Seen::Client),
            libc::SYS_sendmsg | libc::SYS_sendto => Some(Seen::Store),
            _ => None,
        }
    }
}

/// A deterministic pseudo-random generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// A walk: the model's state, and a server that must match it.
struct Walk {
    world: World,
    served: Served,
    random: Random,
    template: Template,
    files: Vec<OwnedFd>,
    raws: Vec<Option<Raw>>,
    /// The token of each request, and the number by which its version is recognised.
    tokens: HashMap<Request, (Token, u64)>,
    last: u64,
    leases: HashMap<usize, Token>,
    kills: usize,
    steps: usize,
    trace: Vec<String>,
}

impl Walk {
    fn new(seed: u64, subject: &Subject) -> Self {
        let served = Served::start(Keeper::Own, subject);
        let raws = (0..CLIENTS).map(|_| Some(served.greeted().0)).collect();
        Self {
            world: World::new(4, 2, 0, 1),
            served,
            random: Random(seed),
            template: Template::new(),
            files: (0..=u64::from(COMMON)).map(page).collect(),
            raws,
            tokens: HashMap::new(),
            last: 0,
            leases: HashMap::new(),
            kills: 0,
            steps: 0,
            trace: Vec::new(),
        }
    }

    /// The message of a request, and its descriptors.
    fn message(&self, request: Request) -> (Message, Vec<OwnedFd>) {
        let asked = self.world.requests[request].as_ref().unwrap();
        let (name, (token, number)) = (NAME[asked.name].to_owned(), self.tokens[&request]);
        match asked.verb {
            Verb::Put | Verb::Replace => {
                let files = [&self.files[asked.client], &self.files[usize::from(COMMON)]];
                let memory: Memory = (&self.template.of(2)).into();
                let metadata = Attached::of(&json!({"request": number})).unwrap();
                let put = broker::PutHeader {
                    name,
                    replace: asked.verb == Verb::Replace,
                    request: Some(token),
                    parts: vec![PutPartHeader { name: "all".to_owned(), memory, arrays: None, digest: None }],
                    metadata: Some(Table::Inline(metadata)),
                    sizes: vec![PAGE; 2],
                    ..self.template.raw_put("", 0, false).0
                };
                (Message::Put(Box::new(put)), files.map(|file| file.try_clone().unwrap()).into())
            }
            Verb::Delete => (Message::Delete(Delete { name, request: Some(token) }), Vec::new()),
            Verb::Get => {
                let objects = vec![GetObject { name, ..GetObject::default() }];
                (Message::Get(Box::new(GetHeader { objects, wait_ms: None, claim: None })), Vec::new())
            }
        }
    }

    /// Runs the model until it accepts the next request, or kills its server before a random visible step. Returns the visible steps and
    /// the index of the kill.
    fn run_model(&mut self) -> (Vec<Seen>, Option<usize>) {
        let all = std::iter::successors(Some(self.world.clone()), |world| {
            let busy = world.server.as_ref().is_some_and(|server| !server.is_idle());
            busy.then(|| MODEL.next(world, Action::Step).unwrap())
        });
        let worlds: Vec<World> = all.collect();
        let step = |world: &World| world.server.as_ref().and_then(|server| server.steps.front().cloned());
        let steps: Vec<Step> = worlds.iter().filter_map(step).collect();
        // Several segments go to the keeper in one record.
        let together = |at: usize| {
            let before = at.checked_sub(1).map(|before| &steps[before]);
            matches!(
                (before, &steps[at]),
                (Some(Step::Send(_)), Step::Send(_)) | (Some(Step::Remove(_)), Step::Remove(_))
            )
        };
        let seen = |at: &usize| seen_of(&steps[*at]).filter(|_| !together(*at));
        let points: Vec<usize> = (0..steps.len()).filter(|at| seen(at).is_some()).collect();
        let seen: Vec<Seen> = points.iter().filter_map(seen).collect();
        self.steps += steps.len();
        if self.world.crashes > 0 && !points.is_empty() && self.random.below(3) == 0 {
            let nth = self.random.below(points.len());
            self.trace.push(format!("killed before {:?}", steps[points[nth]]));
            self.world = MODEL.next(&worlds[points[nth]], Action::KillServer).unwrap();
            return (seen, Some(nth));
        }
        self.world = worlds.into_iter().next_back().unwrap();
        (seen, None)
    }

    /// Runs an exchange that the model has started, and kills the server where the model did.
    fn exchange(&mut self, client: usize, run: impl FnOnce(&Raw) -> Option<Message> + Send) {
        let before = self.world.clone();
        let (expected, kill) = self.run_model();
        let server = self.served.server();
        let raw = self.raws[client].take().unwrap();
        // Otherwise the trace would include the close of an earlier connection.
        raw.until_connections(1 + self.raws.iter().flatten().count());
        let (mut watcher, mut count) = (Watcher::default(), 0);
        let kills = |call: &Call| {
            let seen = watcher.seen(call).is_some();
            count += usize::from(seen);
            seen && kill == Some(count - 1)
        };
        let (answer, traced) = while_traced(server, kills, || run(&raw));
        let mut watcher = Watcher::default();
        let seen: Vec<Seen> = traced.calls.iter().filter_map(|call| watcher.seen(call)).collect();
        let wanted = &expected[..kill.unwrap_or(expected.len())];
        // On a busy machine the server may find unread messages at the keeper after a second, and then sends one more.
        let is_one_more = |at: usize| seen[at] == Seen::Store && [&seen[..at], &seen[at + 1..]].concat() == wanted;
        assert!(seen == wanted || (0..seen.len()).any(is_one_more), "{seen:?}, not {wanted:?}: {:#?}", self.trace);
        self.raws[client] = Some(raw);
        if let Some(Message::Lease(lease)) = &answer {
            // The client's newest lease. The model has it too, unless its server was killed before it sent the lease.
            let own = &self.world.clients[client].leases;
            if let Some((model, _)) = own.iter().find(|lease| !before.clients[client].leases.contains(lease)) {
                self.leases.insert(*model, lease.token);
            }
        }
        if kill.is_some() {
            self.after_kill(server, traced.killed.unwrap());
        }
    }

    /// Waits for the next server after a kill.
    fn after_kill(&mut self, server: nix::unistd::Pid, killed: Instant) {
        self.kills += 1;
        self.served.wait_for_another(server, killed);
        self.raws.iter_mut().for_each(|raw| *raw = None);
        self.world = MODEL.next(&self.world, Action::Start).unwrap();
        while self.world.server.as_ref().is_some_and(|server| !server.is_idle()) {
            self.world = MODEL.next(&self.world, Action::Step).unwrap();
        }
    }

    /// Runs one action in the model and on the server. Returns whether an action was possible.
    fn go(&mut self) -> bool {
        let possible = |action: &Action| {
            !matches!(action, Action::EndGrace | Action::TakeForeign(..) | Action::Compact | Action::Step)
        };
        let actions: Vec<Action> = MODEL.actions(&self.world).into_iter().filter(possible).collect();
        if actions.is_empty() {
            return false;
        }
        // Prefer requests: they have more variants than all other actions.
        let requests: Vec<Action> =
            actions.iter().copied().filter(|action| matches!(action, Action::Ask(..) | Action::Reconnect(_))).collect();
        let from = if !requests.is_empty() && self.random.below(4) > 0 { &requests } else { &actions };
        let action = from[self.random.below(from.len())];
        self.trace.push(format!("{action:?}"));
        let server = self.served.server();
        match action {
            Action::KillServer => {
                nix::sys::signal::kill(server, nix::sys::signal::Signal::SIGKILL).unwrap();
                self.world = MODEL.next(&self.world, action).unwrap();
                self.after_kill(server, Instant::now());
            }
            Action::KillKeeper => {
                self.served.kill_keeper();
                for action in [Action::KillKeeper, Action::StoreAnew] {
                    self.world = MODEL.next(&self.world, action).unwrap();
                }
                while self.world.server.as_ref().is_some_and(|server| !server.is_idle()) {
                    self.world = MODEL.next(&self.world, Action::Step).unwrap();
                }
            }
            _ => self.ask(action),
        }
        self.compare();
        true
    }

    fn ask(&mut self, action: Action) {
        let before = self.world.clone();
        self.world = MODEL.next(&self.world, action).unwrap();
        match action {
            Action::Ask(client, ..) => {
                let request = self.world.clients[client].open.unwrap();
                self.last += 1;
                self.tokens.insert(request, (token(), self.last));
                self.send(client, request);
            }
            Action::Release(client, model) => {
                let token = self.leases.remove(&model).unwrap();
                self.exchange(client, |raw| {
                    raw.send(&Message::Release(Release { token }), &[]).unwrap();
                    None
                });
            }
            Action::KillClient(client) => {
                for (model, _) in &before.clients[client].leases {
                    self.leases.remove(model);
                }
                // A client without a connection causes no work for the server.
                if before.clients[client].connected {
                    self.exchange(client, |raw| {
                        rustix::net::shutdown(raw, rustix::net::Shutdown::Both).unwrap();
                        None
                    });
                }
                self.raws[client] = None;
            }
            Action::Reconnect(client) => {
                let (raw, _) = self.served.greeted();
                let leases: Vec<Token> =
                    before.clients[client].leases.iter().map(|(model, _)| self.leases[model]).collect();
                let resume = Message::Resume(Resume { leases, puts: Vec::new() });
                match raw.ask(&resume, &[]).unwrap() {
                    Some((Message::Resumed(resumed), _)) => assert!(resumed.lost.is_empty(), "{:#?}", self.trace),
                    other => panic!("{other:?}"),
                }
                self.raws[client] = Some(raw);
                if let Some(request) = before.clients[client].open {
                    self.send(client, request);
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, client: usize, request: Request) {
        let (message, fds) = self.message(request);
        self.exchange(client, |raw| {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            raw.ask(&message, &fds).ok().flatten().map(|(answer, _)| answer)
        });
    }

    /// Asserts that the server's state equals the model's.
    #[track_caller]
    fn compare(&self) {
        let (raw, server) = self.served.greeted();
        let ask = |message: Message| raw.ask(&message, &[]).unwrap().unwrap().0;
        let number = |name: &str| match ask(Message::Stat(Stat { name: name.to_owned(), version: None })) {
            Message::Version(info) => match info.metadata {
                Some(Table::Inline(text)) => {
                    serde_json::from_str::<serde_json::Value>(text.as_str()).unwrap()["request"].as_u64().unwrap()
                }
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        };
        let there: Vec<(String, u64)> =
            raw.list().iter().map(|object| (object.name.clone(), number(&object.name))).collect();
        let visible = NAME.iter().zip(&self.world.visible);
        let wanted: Vec<(String, u64)> =
            visible.filter_map(|(name, version)| Some(((*name).to_owned(), self.tokens[&(*version)?].1))).collect();
        assert_eq!(there, wanted, "{:#?}", self.trace);
        let Message::Leases(page) = ask(Message::Who(Who::default())) else { panic!() };
        let model = self.world.server.as_ref().unwrap();
        let leases = model.content.leases.iter().flatten().count();
        assert_eq!(page.leases.len(), leases, "{:#?}", self.trace);
        let stored = self.world.store.len() + 2;
        let closed = || self.served.kept(server) == (stored, stored);
        if !closed() {
            // The server closes memory in another thread, with a delay.
            until(closed);
        }
    }
}

/// Each walk has at most two kills of the server or the keeper. `VMMFD_TEST_WALKS` sets the number of walks.
#[test]
fn server_follows_model_traces() {
    let walks = number("VMMFD_TEST_WALKS", 12);
    let subject = Subject::host();
    let mut actions = 0;
    let mut kills = 0;
    let mut steps = 0;
    for seed in 1..=walks {
        let mut walk = Walk::new(seed * 7919, &subject);
        while actions < 100_000 && walk.trace.len() < 40 && walk.go() {
            actions += 1;
        }
        kills += walk.kills;
        steps += walk.steps;
    }
    eprintln!("{walks} walks of {actions} actions and {steps} steps, with {kills} kills of the server");
    assert!(kills >= usize::try_from(walks).unwrap(), "{kills} kills in {walks} walks");
}
